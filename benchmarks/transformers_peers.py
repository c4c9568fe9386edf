"""Careful use of transformers: `generate` over static batches, and `generate_batch`.

Both run the same weights on the same ids, greedy, to the given output lengths.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from work_items import WorkItem

PAD = 0


def load(folder: Path, dtype: torch.dtype, attention: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.eval()


class StaticBatches:
    """`generate` over batches of similar length: left padding, attention mask, to the longest output."""

    name = "transformers generate"

    def __init__(self, folder: Path, dtype: torch.dtype, batch_size: int = 16) -> None:
        self.model = load(folder, dtype, "sdpa")
        self.batch_size = batch_size

    def run(self, work: list[WorkItem]) -> list[list[int]]:
        order = sorted(range(len(work)), key=lambda i: work[i].num_output_tokens)
        outputs: list[list[int]] = [[] for _ in work]
        for start in range(0, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            for index, tokens in zip(indices, self._batch([work[i] for i in indices]), strict=True):
                outputs[index] = tokens
        return outputs

    @torch.inference_mode()
    def _batch(self, items: list[WorkItem]) -> list[list[int]]:
        width = max(len(item.input_ids) for item in items)
        longest = max(item.num_output_tokens for item in items)
        ids = torch.tensor([[PAD] * (width - len(item.input_ids)) + item.input_ids for item in items])
        mask = torch.tensor([[0] * (width - len(item.input_ids)) + [1] * len(item.input_ids) for item in items])
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        rows = output[:, width:].tolist()
        return [row[: item.num_output_tokens] for row, item in zip(rows, items, strict=True)]


class GenerateBatch:
    name = "transformers generate_batch"

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = load(folder, dtype, "paged|sdpa")

    def run(self, work: list[WorkItem]) -> list[list[int]]:
        longest = max(item.num_output_tokens for item in work)
        generation = GenerationConfig(
            do_sample=False, max_new_tokens=longest, eos_token_id=-1, pad_token_id=PAD, bos_token_id=1
        )
        batching = ContinuousBatchingConfig(num_blocks=1024, block_size=32, max_batch_tokens=512)
        results: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
        ) as manager:
            ids = [
                manager.add_request(item.input_ids, max_new_tokens=item.num_output_tokens, eos_token_id=-1)
                for item in work
            ]
            while len(results) < len(ids):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("generate_batch stopped before it was done")
                if result is not None and result.is_finished():
                    results[result.request_id] = result.generated_tokens
        return [results[i] for i in ids]
