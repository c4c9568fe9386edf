"""Entries of Triton's other backends for language models, as their samples have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

# As in the vLLM backend's samples/model_repository/vllm_model.
SAMPLE = """# The server knows nothing of vLLM.
name: "sample"
backend: "vllm"  # not ours yet
max_batch_size: 0
model_transaction_policy {
  decoupled: True
}
input [
  {
    name: "text_input"
    data_type: TYPE_STRING
    dims: [ 1 ]
  },
  {
    name: "stream"
    data_type: TYPE_BOOL
    dims: [ 1 ]
  },
  {
    name: "sampling_parameters"
    data_type: TYPE_STRING
    dims: [ 1 ]
    optional: true
  }
]
output [
  {
    name: "text_output"
    data_type: TYPE_STRING
    dims: [ -1 ]
  }
]
instance_group [
  {
    count: 1
    kind: KIND_MODEL
  }
]
"""
SAMPLE_JSON = {
    "model": "facebook/opt-125m",
    "disable_log_requests": True,
    "gpu_memory_utilization": 0.5,
    "enforce_eager": True,
    "disable_log_stats": False,
}
# As in its docs/llama_multi_lora_tutorial.md, for one device.
SAMPLE_LORA_JSON = {
    "model": "/vllm_workspace/weights/backbone/llama-7b-hf",
    "disable_log_requests": "true",
    "gpu_memory_utilization": 0.8,
    "tensor_parallel_size": 1,
    "block_size": 16,
    "enforce_eager": "true",
    "enable_lora": "true",
    "max_lora_rank": 16,
}

# As fill_template.py of tensorrtllm_backend leaves its all_models/inflight_batcher_llm; what it does not fill in
# counts as absent there too.
_PYTHON = 'backend: "python"\nmax_batch_size: 16\n'
_ENGINE = """name: "tensorrt_llm"
backend: "tensorrtllm"
max_batch_size: 16
model_transaction_policy { decoupled: True }
dynamic_batching {
    preferred_batch_size: [ 16 ]
    max_queue_delay_microseconds: 100
    default_queue_policy: { max_queue_size: 500 }
}
input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] } ]
"""
_PARAMETERS = {
    "max_beam_width": "2", "FORCE_CPU_ONLY_INPUT_TENSORS": "no", "gpt_model_type": "inflight_fused_batching",
    "gpt_model_path": "/engines/llama", "max_tokens_in_paged_kv_cache": "${max_tokens_in_paged_kv_cache}",
    "batch_scheduler_policy": "max_utilization", "kv_cache_free_gpu_mem_fraction": "0.7",
    "kv_cache_host_memory_bytes": "67108864", "enable_kv_cache_reuse": "true", "enable_chunked_context": "true",
    "gpu_device_ids": "1", "decoding_mode": "${decoding_mode}", "medusa_choices": "[[0]]", "novel_option": "3",
}  # fmt: skip


def pbtxt(head: str, parameters: dict[str, str]) -> str:
    return head + "".join(
        f'parameters: {{\n  key: "{key}"\n  value: {{\n    string_value: "{text}"\n  }}\n}}\n'
        for key, text in parameters.items()
    )


def write_entry(
    repository: Path, name: str, config: str, model_json: Mapping[str, object] | str | None = None
) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    if model_json is not None:
        text = model_json if isinstance(model_json, str) else json.dumps(model_json, indent=4)
        (folder / "1" / "model.json").write_text(text)
    return folder


def write_trtllm(repository: Path) -> Path:
    """Write all entries of one model, and one of another backend; return the repository."""
    tokenizer = {"tokenizer_dir": "/models/llama"}
    write_entry(repository, "preprocessing", pbtxt(_PYTHON, tokenizer))
    write_entry(repository, "postprocessing", pbtxt(_PYTHON, tokenizer))
    write_entry(repository, "tensorrt_llm", pbtxt(_ENGINE, _PARAMETERS))
    bls = {"accumulate_tokens": "${accumulate_tokens}", "tensorrt_llm_model_name": "${tensorrt_llm_model_name}"}
    write_entry(repository, "tensorrt_llm_bls", pbtxt(_PYTHON, bls))
    parts = ("preprocessing", "tensorrt_llm", "postprocessing")
    steps = "".join(f'step {{ model_name: "{name}" }} ' for name in parts)
    ensemble = f'platform: "ensemble"\nmax_batch_size: 16\nensemble_scheduling {{ {steps}}}\n'
    write_entry(repository, "ensemble", ensemble)
    write_entry(repository, "add_sub", 'backend: "python"\n')
    return repository
