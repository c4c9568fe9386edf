"""OpenVINO GenAI's continuous batching, on a `model` folder exported by optimum-intel."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any


def make(options: dict[str, Any]) -> OpenVinoPipeline:
    return OpenVinoPipeline(options)


class OpenVinoPipeline:
    streams = True

    def __init__(self, options: dict[str, Any]) -> None:
        self._genai = import_module("openvino_genai")
        self._openvino = import_module("openvino")
        self._numpy = import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = int(options.get("cache_gib", 2))
        scheduler.max_num_seqs = int(options.get("max_num_seqs", 256))
        scheduler.max_num_batched_tokens = int(options.get("max_num_batched_tokens", 2048))
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = bool(options.get("enable_prefix_caching", True))
        hints: dict[str, Any] = {"INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[options["dtype"]]}
        if options.get("threads"):
            hints["INFERENCE_NUM_THREADS"] = int(options["threads"])
        self._pipeline = self._genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", hints)
        self._running: dict[int, tuple[Any, int]] = {}  # handle, tokens left
        self.versions = {name: metadata.version(name) for name in ("openvino-genai", "openvino")}

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        ids = self._openvino.Tensor(self._numpy.array([input_ids], dtype=self._numpy.int64))
        self._running[request_id] = (self._pipeline.add_request(request_id, ids, config), max_tokens)

    def step(self) -> list[tuple[int, int, bool]]:
        self._pipeline.step()
        events = []
        for request_id, (handle, left) in list(self._running.items()):
            count = 0
            while handle.can_read():
                count += sum(len(output.generated_ids) for output in handle.read().values())
            if count:
                self._running[request_id] = (handle, left - count)
                events.append((request_id, count, left <= count))
            if left <= count:
                del self._running[request_id]
        return events
