"""transformers' continuous batching, as in `generate_batch`, with tokens as made."""

from __future__ import annotations

import dataclasses
from typing import Any

FREE_MEMORY_SHARE = 0.5  # of a GPU; batches may need the rest
WAIT_S = 0.005  # for results, while requests may come


def make(options: dict[str, Any]) -> TransformersBatch:
    return TransformersBatch(options)


class TransformersBatch:
    """Scheduler and paged cache on paged SDPA or `attention`, with Tidewheel's thread limits."""

    streams = True

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers
        from transformers.generation import configuration_utils

        from tidewheel.runner.device import limit_threads

        device = options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            options["model"],
            dtype=getattr(torch, options["dtype"]),
            attn_implementation=options.get("attention", "paged|sdpa"),
        )
        self._model = model.to(device).eval()
        if options.get("threads"):
            torch.set_num_threads(int(options["threads"]))
        elif device == "cpu":
            limit_threads(sum(parameter.nbytes for parameter in model.parameters()))
        new_generation_config: Any = transformers.GenerationConfig
        generation = new_generation_config(do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=1)
        sizes: dict[str, Any] = {"max_memory_percent": float(options.get("max_memory_percent", FREE_MEMORY_SHARE))}
        if device == "cpu":
            names = {field.name for field in dataclasses.fields(configuration_utils.ContinuousBatchingConfig)}
            sizes = {"num_blocks": 1024, "page_size" if "page_size" in names else "block_size": 32}
        if options.get("max_batch_tokens") or device == "cpu":
            sizes["max_batch_tokens"] = int(options.get("max_batch_tokens", 512))
        self._manager = self._model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=configuration_utils.ContinuousBatchingConfig(**sizes),
        )
        self._manager.start()
        self._counts: dict[str, int] = {}
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None:
        self._counts[str(request_id)] = 0
        self._manager.add_request(
            input_ids, str(request_id), max_new_tokens=max_tokens, streaming=True, eos_token_id=-1
        )

    def step(self) -> list[tuple[int, int, bool]]:
        events = []
        result = self._manager.get_result(timeout=WAIT_S)
        while result is not None:
            events += self._event(result)
            result = None if self._manager.output_router.output_queue.empty() else self._manager.get_result()
        if not events and not self._manager.is_running():
            raise RuntimeError("generate_batch stopped before it was done")
        return events

    def _event(self, result: Any) -> list[tuple[int, int, bool]]:
        """Count new tokens: results hold all so far, and one may follow the last."""
        before = self._counts.get(result.request_id)
        if before is None:
            return []
        if result.error:
            raise RuntimeError(result.error)
        count, done = len(result.generated_tokens), result.is_finished()
        if done:
            del self._counts[result.request_id]
        else:
            self._counts[result.request_id] = count
        return [(int(result.request_id), count - before, done)]
