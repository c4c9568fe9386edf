"""An engine whose model looks its logits up by the last token, so that they are the same bits however the work is cut
into steps.

Logits are multiples of 2⁻¹⁰: sums with such biases and penalties are exact on any processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from support.runner.recorded_graphs import RecordingAccelerator
from support.runner.step_loop import StepLoop
from support.scheduler.guesses import Guesses, put_proposer
from support.scheduler.invariants import check_invariants
from tidewheel.engine.core import EngineCore
from tidewheel.models.causal_lm import ForwardInput, ModelShape
from tidewheel.request import Request
from tidewheel.runner.host_tier import BlockTransfers, HostBlocks
from tidewheel.runner.info import RunnerInfo
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel.runner.loading import RunnerParts
from tidewheel.runner.model_runner import ModelRunner

VOCABULARY, CONTEXT, BLOCK_SIZE, NUM_HOST_BLOCKS = 17, 40, 4, 8
CPU = torch.device("cpu")
NORMAL = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.eye(VOCABULARY)
LOGITS = NORMAL.mul(3 << 10).round() / (1 << 10)


class LookUp:
    """Its steps of these numbers run out of memory."""

    shape = ModelShape(1, 1, 2, VOCABULARY, VOCABULARY, 4)
    weights_bytes = 0
    is_capturable = True

    def __init__(self, fails_at: Sequence[int] = ()) -> None:
        self._fails_at = set(fails_at)
        self._num_steps = 0

    def forward(self, step: ForwardInput) -> torch.Tensor:
        self._num_steps += 1
        if self._num_steps in self._fails_at:
            raise torch.OutOfMemoryError
        return LOGITS[step.token_ids[step.logit_indices].long()]

    def forward_with_states(self, step: ForwardInput, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward(step), HIDDEN[step.token_ids[indices].long()]

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        return states @ LOGITS


class Engine:
    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_blocks: int,
        is_staged: bool = False,
        fails_at: Sequence[int] = (),
        right_drafts: float | None = None,
        filters_drafts: bool = False,
        **scheduling: Any,
    ) -> None:
        """Drafts are right with a chance, by the model's logits alone; None: there are none.

        With `filters_drafts`, grammars filter them and add their own.
        """
        info = RunnerInfo(
            model="", architecture="", device="", dtype="float32", vocab_size=VOCABULARY, max_model_len=CONTEXT,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=64, block_size=BLOCK_SIZE, num_blocks=num_blocks,
            weights_bytes=0, activation_bytes=0, kv_cache_bytes=0, load_seconds=0.0,
        )  # fmt: skip
        layout = CacheLayout(LookUp.shape, BLOCK_SIZE, torch.float32)
        kv = KVTensors(layout, num_blocks, CPU)
        cache = BlockTransfers(kv, HostBlocks(kv, NUM_HOST_BLOCKS))
        parts = RunnerParts(LookUp(fails_at), layout, info, CPU)
        self.runner = ModelRunner(parts, cache, RecordingAccelerator() if is_staged else None)
        method = "none" if right_drafts is None else "prompt_lookup"
        loop = StepLoop(self.runner, num_host_blocks=NUM_HOST_BLOCKS, speculation=method, **scheduling)
        self.scheduler = loop.scheduler
        if right_drafts is not None:
            guesses = Guesses(max_num_seqs, VOCABULARY, lambda tokens: int(LOGITS[tokens[-1]].argmax()), right_drafts)
            put_proposer(self.scheduler, guesses, filters_drafts=filters_drafts)
        self.core = EngineCore(
            self.scheduler, self.runner, lambda outputs: None, receive=lambda: None, clock=lambda: 0.0
        )

    def run(self, requests: Sequence[Request]) -> None:
        for item in requests:
            self.core.add_group([item])
        while self.core.has_unfinished:
            self.core.step()
        check_invariants(self.scheduler)
