from __future__ import annotations

import gc
import weakref

import pytest
import torch

pytest.importorskip("triton")

from tidewheel_kernels.attention.triton_kernels import box_descriptor

BOX = (1, 16, 1, 8)


def test_a_descriptor_is_made_once_per_tensor_and_box() -> None:
    cache = torch.zeros(3, 32, 2, 8)
    descriptor = box_descriptor(cache, BOX)
    assert box_descriptor(cache, BOX) is descriptor
    assert tuple(descriptor.shape) == cache.shape and tuple(descriptor.strides) == cache.stride()
    assert list(box_descriptor(cache, (1, 32, 1, 8)).block_shape) == [1, 32, 1, 8]
    assert box_descriptor(cache.clone(), BOX) is not descriptor


def test_another_view_of_the_same_memory_has_its_own() -> None:
    cache = torch.zeros(4, 32, 2, 8)
    first, second = cache[:2], cache[2:]
    assert box_descriptor(first, BOX).base.data_ptr() == first.data_ptr()
    assert box_descriptor(second, BOX).base.data_ptr() == second.data_ptr()


def test_a_tensor_whose_memory_moved_gets_a_new_one() -> None:
    cache, other = torch.zeros(3, 32, 2, 8), torch.zeros(3, 32, 2, 8)
    box_descriptor(cache, BOX)
    cache.set_(other)
    assert box_descriptor(cache, BOX).base.data_ptr() == other.data_ptr()


def test_memory_goes_with_its_tensor() -> None:
    cache = torch.zeros(3, 32, 2, 8)
    view = weakref.ref(box_descriptor(cache, BOX).base)
    del cache
    gc.collect()
    assert view() is None


def test_rows_that_are_not_aligned_are_refused() -> None:
    with pytest.raises(AssertionError, match="16-byte"):
        box_descriptor(torch.zeros(2, 16, 2, 9)[..., :8], BOX)
