"""Arrays arrive as they were sent, at places that follow from sizes alone, and slots are not written too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.runner.recorded_graphs import RecordingAccelerator
from tidewheel.runner.inputs import NUM_SLOTS, InputSender, StagingSender, share_memory

FIRST = [np.arange(3), np.arange(5, dtype=np.int32)]
LAST = [np.array([True, False, True]), np.array([0.5, 1.5], dtype=np.float32), np.empty(0, dtype=np.int64)]


@pytest.mark.parametrize(
    "sender",
    [share_memory, StagingSender(RecordingAccelerator(), 1024), StagingSender(RecordingAccelerator(), 48)],
    ids=["shared memory", "one buffer", "a part of it does not fit"],
)
def test_groups_arrive_as_they_were_sent(sender: InputSender) -> None:
    for _ in range(2 * NUM_SLOTS):
        sent = sender({"inputs": FIRST, "draw": None, "changes": LAST})
        assert sent["draw"] == []
        for name, arrays in (("changes", LAST), ("inputs", FIRST)):
            tensors = sent[name]
            assert [tensor.tolist() for tensor in tensors] == [array.tolist() for array in arrays]
            assert [tensor.dtype for tensor in tensors] == [torch.from_numpy(array).dtype for array in arrays]


def test_nothing_at_all_can_be_sent() -> None:
    assert StagingSender(RecordingAccelerator(), 64)({"inputs": None, "draw": []})["draw"] == []


def test_the_first_arrays_lie_where_they_lay() -> None:
    """Whatever follows them, also when it does not fit: that is what a graph reads."""
    staging = StagingSender(RecordingAccelerator(), 256)
    places = set()
    for size in (0, 3, 40, 4000, 2):
        sent = staging({"inputs": FIRST, "draw": [np.full(size, 9.0, dtype=np.float32)]})
        tensors = sent["inputs"]
        assert tensors[1].tolist() == [0, 1, 2, 3, 4]
        places.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(places) == 1


def test_a_slot_is_written_only_after_its_copy_is_done() -> None:
    accelerator = RecordingAccelerator()
    staging = StagingSender(accelerator, 256)
    for _ in range(2 * NUM_SLOTS):
        staging({"inputs": FIRST})
    slots = list(range(NUM_SLOTS))
    expected = [(name, slot) for slot in slots * 2 for name in ("synchronize", "record")]
    assert accelerator.events == expected


def test_what_was_sent_before_is_not_touched_by_a_larger_step() -> None:
    """A slot that has become too small is replaced, not written to."""
    staging = StagingSender(RecordingAccelerator(), 16)
    earlier = staging({"inputs": [np.arange(2)], "draw": [np.arange(100)]})["draw"][0]
    for size in (200, 300, 400, 500):
        staging({"inputs": [np.arange(2)], "draw": [np.zeros(size, dtype=np.int64)]})
    assert earlier.tolist() == list(range(100))
