from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from support.models.eagle3_folders import ReferenceHead, find_head, write_eagle3
from support.models.loading import CPU, loaded
from support.models.tiny_models import llama, prompts, save
from tidewheel.config import EngineConfig
from tidewheel.models.causal_lm import ForwardInput, KVLayer, no_progress
from tidewheel.models.decoder import Decoder
from tidewheel.runner.eagle3 import Eagle3Head
from tidewheel.runner.kv_tensors import CacheLayout, KVTensors
from tidewheel_kernels import AttentionMetadata

BLOCK_SIZE, NUM_BLOCKS, NUM_DRAFTS = 16, 5, 4


class Head(NamedTuple):
    target: Decoder
    kv: KVTensors
    drafter: Eagle3Head
    reference: ReferenceHead

    def compute(self, token_ids: Sequence[int], start: int, end: int) -> None:
        """Compute positions [start, end) of a sequence by the target."""
        with torch.inference_mode():
            self.target.forward(step(token_ids[start:end], start, self.kv.layers))

    def draft(self, token_ids: Sequence[int], start: int, end: int, *, is_first: bool = True) -> int:
        """Return the draft after the pairs of positions [start, end), whose tokens come one later."""
        tokens = token_ids[start + 1 : end + 1]
        with torch.inference_mode():
            (draft,) = self.drafter.draft(step(tokens, start, self.drafter.kv_layers), is_first=is_first).tolist()
        return int(draft)

    def drafts(self, token_ids: Sequence[int], start: int) -> list[int]:
        """Return the drafts after `token_ids`, for which the head has computed the pairs before `start`."""
        known = list(token_ids)
        known.append(self.draft(known, start, len(token_ids) - 1))
        for position in range(len(token_ids) - 1, len(token_ids) + NUM_DRAFTS - 2):
            known.append(self.draft(known, position, position + 1, is_first=False))
        return known[len(token_ids) :]


def step(token_ids: Sequence[int], start: int, layers: Sequence[KVLayer]) -> ForwardInput:
    """Return the step of some tokens of a sequence that lies in the blocks 3, 1, 4, 0, …."""
    blocks = torch.tensor([[3, 1, 4, 0, 2]], dtype=torch.int32)
    count, end = len(token_ids), start + len(token_ids)
    positions = torch.arange(start, end)
    slots = blocks[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    bounds, length = np.array([0, count], dtype=np.int32), np.array([end], dtype=np.int32)
    meta = AttentionMetadata(
        slots, blocks, torch.from_numpy(bounds), torch.from_numpy(length), count, end, int(count == 1), bounds, length
    )
    return ForwardInput(torch.tensor(token_ids), positions, meta, layers, torch.tensor([count - 1]))


@pytest.fixture(params=[True, False], ids=["own table", "target's table"])
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Head:
    model = save(partial(llama, num_hidden_layers=8), tmp_path / "target")
    folder = write_eagle3(tmp_path / "head", model, has_table=request.param)
    target = loaded(tmp_path / "target", EngineConfig(model=str(tmp_path / "target")))
    assert isinstance(target, Decoder)
    kv = KVTensors(CacheLayout(target.shape, BLOCK_SIZE, torch.float32), NUM_BLOCKS, CPU)
    loaded_head = find_head(folder, tmp_path / "target").load(target, BLOCK_SIZE, no_progress)
    loaded_head.allocate(kv)
    return Head(target, kv, loaded_head, ReferenceHead(folder, model, (2, 4, 5)))


def test_drafts_are_those_of_a_plain_computation(head: Head) -> None:
    for prompt in prompts(6, 2, 60):
        tokens = prompt.tolist()
        head.compute(tokens, 0, len(tokens) - 1)
        assert head.drafts(tokens, 0) == head.reference.drafts(tokens, NUM_DRAFTS)


def test_the_head_catches_up_in_chunks_as_well(head: Head) -> None:
    (prompt,) = prompts(1, 50, 50)
    tokens = prompt.tolist()
    for start, end in ((0, 20), (20, 21), (21, 49)):  # of the target
        head.compute(tokens, start, end)
    for start, end in ((0, 7), (7, 33), (33, 34)):  # of the head
        head.draft(tokens, start, end)
    assert head.drafts(tokens, 34) == head.reference.drafts(tokens, NUM_DRAFTS)


def test_rejected_drafts_leave_no_trace(head: Head) -> None:
    first, second = prompts(2, 40, 40)
    tokens, others = first.tolist(), [*first.tolist()[:24], *second.tolist()[24:]]
    head.compute(tokens, 0, 24)
    drafts = head.drafts(tokens[:25], 0)
    head.compute([*tokens[:25], *drafts], 24, 29)  # all of them rejected
    head.compute(others, 24, 39)
    assert head.drafts(others, 24) == head.reference.drafts(others, NUM_DRAFTS)


def test_several_tokens_after_the_last_drafts_are_caught_up(head: Head) -> None:
    (prompt,) = prompts(1, 45, 45)
    tokens, caught_up = prompt.tolist(), 0
    for length in (10, 11, 14, 20, 21, 40, 45):
        head.compute(tokens, max(caught_up, 0), length - 1)
        assert head.drafts(tokens[:length], caught_up) == head.reference.drafts(tokens[:length], NUM_DRAFTS), length
        caught_up = length - 1


def test_a_block_takes_states_keys_and_values(head: Head) -> None:
    floats = BLOCK_SIZE * (64 + 2 * 2 * 16)  # hidden_size, and 2 heads of 16 keys and values
    assert head.drafter.block_bytes == floats * torch.float32.itemsize
