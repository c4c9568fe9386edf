"""This project's engine in-process, for offline work: what has come is generated as one batch."""

from __future__ import annotations

import time
from typing import Any

GATHER_S = 0.02  # requests of an offline batch come within it


def make(options: dict[str, Any]) -> TidewheelLlm:
    return TidewheelLlm(options)


class TidewheelLlm:
    streams = False

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        from tidewheel import LLM, SamplingParams, __version__

        own = ("model", "threads")
        settings = {key: value for key, value in options.items() if key not in own}
        if options.get("threads"):
            settings["num_threads"] = int(options["threads"])
        self._llm = LLM(options["model"], skip_tokenizer_init=True, **settings)
        self._sampling = SamplingParams
        self._waiting: list[tuple[int, list[int], int]] = []
        self._gathered = False
        self.versions = {"tidewheel": __version__, "torch": torch.__version__}

    def add(self, request_id: int, input_ids: list[int], max_tokens: int) -> None:
        self._waiting.append((request_id, input_ids, max_tokens))

    def step(self) -> list[tuple[int, int, bool]]:
        if not self._gathered:
            time.sleep(GATHER_S)
            self._gathered = True
            return []
        batch, self._waiting, self._gathered = self._waiting, [], False
        results = self._llm.generate(
            [{"input_ids": ids} for _, ids, _ in batch],
            [self._sampling(temperature=0.0, max_tokens=count, ignore_eos=True) for _, _, count in batch],
            use_tqdm=False,
        )
        return [
            (request_id, len(result.token_ids), True)
            for (request_id, _, _), result in zip(batch, results, strict=True)
        ]
