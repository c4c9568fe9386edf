from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

pytest.importorskip("triton")

from tidewheel_kernels.attention.triton_kernels import box_descriptor
from tidewheel_kernels.launch_config import declared_blocks

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


def test_a_cache_over_2_gib_is_not_taken_for_a_small_one() -> None:
    """3.4 GiB, which 32 bits turn into a negative number; the meta device allocates nothing."""
    cache = torch.empty(28_000, 64, 8, 128, dtype=torch.bfloat16, device="meta")
    assert cleared_bit(list(cache.shape), list(cache.stride()), 2)
    descriptor = box_descriptor(cache, (1, 64, 1, 128))
    assert not cleared_bit(descriptor.shape, descriptor.strides, 2)
    assert descriptor.shape[0] > len(cache) and descriptor.shape[1:] == [64, 8, 128]
    assert descriptor.strides == list(cache.stride())


@pytest.mark.parametrize("element_size", [1, 2])
@pytest.mark.parametrize("apart", [1, 2, 56], ids=["packed", "keys beside values", "all layers of a block"])
def test_blocks_are_declared_so_that_32_bits_suffice(element_size: int, apart: int) -> None:
    draw = random.Random(apart)
    for _ in range(2000):
        block_size, num_heads, head_dim = draw.choice((16, 64, 128)), draw.choice((1, 8)), draw.choice((64, 128))
        strides = [apart * block_size * num_heads * head_dim, num_heads * head_dim, head_dim, 1]
        gib = draw.choice((0.0001, 1.99, 2, 3.99, 4, 6, 8, 80)) * draw.uniform(0.99, 1.01)
        shape = [int(gib * 2**30 / (strides[0] * element_size)) + 1, block_size, num_heads, head_dim]
        declared = [declared_blocks(shape, strides, element_size), *shape[1:]]
        last_byte = last_byte_of(shape, strides, element_size)
        assert cleared_bit(declared, strides, element_size) == (last_byte + 1 < 128 * 1024)
        assert declared == shape if last_byte < 2**31 - 1 else shape[0] <= declared[0] < 2**32
        # No more than 2 GiB and what a small tensor has.
        assert (declared[0] - shape[0] - 1) * strides[0] * element_size <= 2**31 + 128 * 1024


def last_byte_of(shape: list[int], strides: list[int], element_size: int) -> int:
    return sum((size - 1) * stride * element_size for size, stride in zip(shape, strides, strict=True))


def cleared_bit(shape: list[int], strides: list[int], element_size: int) -> bool:
    """Do as `fillTMADescriptorTiled` of triton-lang 3.9, whose sum is an `int`."""
    total = last_byte_of(shape, strides, element_size) % 2**32
    return (total if total < 2**31 else total - 2**32) + 1 < 128 * 1024
