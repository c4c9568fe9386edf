from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.kernels.kernel_harness import NAN, drawn_scales
from tidewheel_kernels import FP8, copy_blocks, write_kv_cache
from tidewheel_kernels.kv_cache import _WRITE
from tidewheel_kernels.kv_cache.cpu import write_kv_cache_cpu
from tidewheel_kernels.kv_cache.reference import write_kv_cache_reference
from tidewheel_kernels.kv_cache.triton_kernels import copy_blocks as copy_blocks_triton
from tidewheel_kernels.kv_cache.triton_kernels import write_kv_cache as write_triton


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (2, 80), (3, 128)], ids=str)
@pytest.mark.parametrize("write", [write_triton, write_kv_cache_cpu], ids=["triton", "cpu"])
def test_write_stores_strided_rows_and_skips_padding(
    device: str, write: Callable[..., None], heads: int, head_dim: int
) -> None:
    torch.manual_seed(0)
    kv = torch.randn(5, 2 * heads, head_dim, device=device)
    k, v = kv[:, :heads], kv[:, heads:]
    slots = torch.tensor([17, -1, 0, 63, 16], device=device)
    ours, reference = (torch.full((2, 4, 16, heads, head_dim), NAN, device=device) for _ in range(2))
    write(k, v, slots, ours[0], ours[1], None)
    write_kv_cache_reference(k, v, slots, reference[0], reference[1], None)
    assert torch.equal(ours.nan_to_num(7.0), reference.nan_to_num(7.0))
    assert torch.equal(ours[0, 1, 1], k[0]) and torch.equal(ours[1, 3, 15], v[3])
    assert ours[:, 2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [[17, -1, 0, 63, 16], [17, 1, 0, 63, 16]], ids=["padding", "all"])
@pytest.mark.parametrize("write", [write_triton, write_kv_cache_cpu], ids=["triton", "cpu"])
def test_write_of_8_bits_divides_and_saturates(
    device: str, write: Callable[..., None], slots: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    k, v = (torch.randn(2, 5, 3, 40, device=device) * torch.logspace(-4, 3, 40, device=device)).to(dtype)
    k[0, 0, :3] = torch.tensor([float("inf"), -float("inf"), NAN])
    scales = drawn_scales(3, device)
    caches = torch.full((2, 4, 16, 3, 40), NAN, device=device).to(FP8)
    write(k, v, torch.tensor(slots, device=device), caches[0], caches[1], scales)
    written = caches.view(2, 64, 3, 40).float()
    for values, cache, of_heads in zip((k, v), written, scales, strict=True):
        for token, slot in enumerate(slots):
            expected = (values[token].float() / of_heads[:, None]).clamp(-448.0, 448.0).to(FP8).float()
            assert slot < 0 or torch.equal(cache[slot].nan_to_num(7.0), expected.nan_to_num(7.0))
    assert written[0, slots[0], 0, :3].tolist()[:2] == [448.0, -448.0] and written[0, slots[0], 0, 2].isnan()
    assert written[:, 2:16].isnan().all()


def test_scales_belong_to_8_bits() -> None:
    kv, cache = torch.zeros(2, 1, 2, 8), torch.zeros(2, 1, 16, 2, 8)
    with pytest.raises(TypeError, match="others have none"):
        write_kv_cache(kv[0], kv[1], torch.tensor([0]), cache[0], cache[1], scales=drawn_scales(2))
    with pytest.raises(TypeError, match="its scales are none"):
        write_kv_cache(kv[0], kv[1], torch.tensor([0]), cache[0].to(FP8), cache[1].to(FP8))


def test_write_without_padding_on_the_cpu() -> None:
    kv = torch.randn(2, 3, 2, 8)
    cache = torch.full((2, 2, 16, 2, 8), NAN)
    write_kv_cache(kv[0], kv[1], torch.tensor([31, 0, 16]), cache[0], cache[1])
    assert torch.equal(cache.flatten(1, 2)[:, [31, 0, 16]], kv)
    assert int(cache.isnan().sum()) == cache.numel() - kv.numel()


def test_write_of_no_token(device: str) -> None:
    cache = torch.zeros(1, 16, 2, 8, device=device)
    empty = torch.zeros(0, 2, 8, device=device)
    for write in (write_triton, _WRITE.chosen[cache.device, cache.dtype]):
        write(empty, empty, torch.zeros(0, dtype=torch.int64, device=device), cache, cache, None)
    assert not cache.any()


@pytest.mark.parametrize("block", [(16, 2, 8), (16, 3, 40)], ids=str)
def test_copy_inside_a_stack_of_caches(device: str, block: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    stack = torch.randn(3, 5, *block, device=device)
    expected = stack.clone()
    expected[:, 4], expected[:, 1] = stack[:, 0], stack[:, 2]
    copy_blocks_triton(stack, torch.tensor([0, 2], device=device), torch.tensor([4, 1], device=device))
    assert torch.equal(stack, expected)


@pytest.mark.parametrize("as_list", [False, True], ids=["stack", "list"])
def test_copy_blocks_on_the_cpu(as_list: bool) -> None:
    stack = torch.randn(2, 4, 16, 1, 8)
    before = stack.clone()
    copy_blocks(list(stack) if as_list else stack, torch.tensor([3]), torch.tensor([0]))
    assert torch.equal(stack[:, 0], before[:, 3]) and torch.equal(stack[:, 1:], before[:, 1:])


def test_copy_of_interleaved_keys_and_values(device: str) -> None:
    cache = torch.randn(4, 2, 16, 1, 8, device=device)
    before = cache.clone()
    copy_blocks_triton(cache[:, 1].unsqueeze(0), torch.tensor([3], device=device), torch.tensor([0], device=device))
    assert torch.equal(cache[0, 1], before[3, 1]) and torch.equal(cache[:, 0], before[:, 0])


def test_copy_refuses_what_it_cannot_do(device: str) -> None:
    with pytest.raises(ValueError, match="one length"):
        copy_blocks(torch.zeros(1, 2, 8), torch.tensor([0]), torch.tensor([1, 0]))
    index = torch.tensor([0], device=device)
    with pytest.raises(ValueError, match="contiguous"):
        copy_blocks_triton(torch.zeros(1, 2, 8, 4, device=device).transpose(2, 3), index, index + 1)


def test_copy_of_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    copy_blocks(torch.zeros(1, 2, 8), none, none)
