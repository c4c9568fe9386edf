"""FlashAttention-3 as torch offers it: what it takes, and with which arguments it is called."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from support.kernels.kernel_harness import paged_batch
from tidewheel_kernels import FP8, KernelUnavailable
from tidewheel_kernels.attention import triton_flash
from tidewheel_kernels.attention.reference import paged_attention_reference
from tidewheel_kernels.attention.triton_flash import PromptCall, objection, paged_attention, takes

BF16 = torch.bfloat16
CUDA = torch.device("cuda", 0)
GOOD = PromptCall(CUDA, BF16, BF16, 0.0)
LENGTHS = [(1, 70), (1, 16), (40, 40), (1, 33), (7, 90), (16, 48)]
TORCH = pytest.importorskip("torch.nn.attention.varlen")
needs_block_tables = pytest.mark.skipif(not hasattr(TORCH, "varlen_attn_out"), reason="torch 2.13 has block tables")


@pytest.mark.parametrize(
    ("call", "facts", "expected"),
    [
        (GOOD, {}, None),
        (GOOD._replace(dtype=torch.float16, cache_dtype=torch.float16), {"version": (2, 14)}, None),
        (GOOD, {"version": (2, 11)}, "needs torch 2.13, not 2.11"),
        (GOOD._replace(device=torch.device("cpu")), {}, "needs CUDA tensors, not those of the device cpu"),
        (GOOD, {"capability": 80}, "needs compute capability 9.0, not 8.0"),
        (GOOD, {"capability": 100}, "needs compute capability 9.0, not 10.0"),
        (GOOD, {"has_library": False}, "needs the module flash_attn_interface, which is not installed"),
        (GOOD._replace(dtype=torch.float32), {}, "takes bfloat16 and float16, not float32"),
        (GOOD._replace(cache_dtype=FP8), {}, "takes keys in the dtype of queries, bfloat16, not float8_e4m3fn"),
        (GOOD._replace(soft_cap=50.0), {}, "is called by torch without a soft cap, and logits have one of 50"),
    ],
)
def test_what_it_takes(call: PromptCall, facts: dict[str, object], expected: str | None) -> None:
    assert objection(call, **{"version": (2, 13), "capability": 90, "has_library": True, **facts}) == expected


def reference_varlen_attn_out(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Do as torch documents it: pages, used keys, and a mask that is aligned to the last query and key."""
    assert cu_seq_k is None and enable_gqa and window_size[1] == 0
    starts, used = cu_seq_q.tolist(), seqused_k.tolist()
    assert len(starts) == len(used) + 1 == len(block_table) + 1
    assert max_q >= max(b - a for a, b in itertools.pairwise(starts)) and max_k >= max(used)
    group = query.shape[1] // key.shape[2]
    for (begin, end), num_keys, pages in zip(itertools.pairwise(starts), used, block_table, strict=True):
        num_pages = -(-num_keys // key.shape[1])
        keys, values = (
            cache[pages[:num_pages].long()].flatten(0, 1)[:num_keys].repeat_interleave(group, dim=1)
            for cache in (key, value)
        )
        logits = torch.einsum("qhd,khd->hqk", query[begin:end], keys) * scale
        last = torch.arange(num_keys - (end - begin), num_keys)[:, None]  # key that each query is aligned to
        position = torch.arange(num_keys)
        hidden = (position > last) | ((position < last - window_size[0]) if window_size[0] >= 0 else False)
        out[begin:end] = torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return out


@needs_block_tables
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_torch_is_called_for_prompts_as_it_documents(
    device: str, window: int, num_decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of one token among others stays one; decodes are ours, and have the last word on their rows."""
    if device != "cpu":
        pytest.skip("the reference of the call runs on a CPU")
    batch = paged_batch(LENGTHS[2 - num_decodes :], group=3, head_dim=16, block_size=16)
    double = mock.create_autospec(TORCH.varlen_attn_out, side_effect=reference_varlen_attn_out)
    monkeypatch.setattr(TORCH, "varlen_attn_out", double)
    monkeypatch.setattr(triton_flash, "takes", lambda call: True)
    ours, expected = torch.full_like(batch.q, torch.nan), torch.empty_like(batch.q)
    arguments = batch.q, batch.k_cache, batch.v_cache, batch.meta
    paged_attention(*arguments, ours, 0.25, window, 0.0, None)
    paged_attention_reference(*arguments, expected, 0.25, window, 0.0, None)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert double.call_count == 1


@needs_block_tables
def test_decodes_alone_and_what_it_does_not_take_are_ours(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TORCH, "varlen_attn_out", mock.Mock(side_effect=AssertionError))
    takes.cache_clear()
    for lengths, cap in (([(1, 70), (1, 3)], 0.0), (LENGTHS, 30.0), (LENGTHS, 0.0)):  # the last: float32
        batch = paged_batch(lengths, head_dim=16, block_size=16, device=device)
        ours, expected = torch.empty_like(batch.q), torch.empty_like(batch.q)
        arguments = batch.q, batch.k_cache, batch.v_cache, batch.meta
        paged_attention(*arguments, ours, 0.25, 0, cap, None)
        paged_attention_reference(*arguments, expected, 0.25, 0, cap, None)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_demand_that_cannot_be_met_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call = PromptCall(torch.device("cpu"), BF16, BF16, 0.0)
    takes.cache_clear()
    assert not takes(call)
    takes.cache_clear()
    monkeypatch.setenv("TIDEWHEEL_KERNELS", "paged_attention=flash")
    with pytest.raises(KernelUnavailable, match=r"paged_attention=flash, and FlashAttention-3 needs .*; leave it"):
        takes(call)


def test_the_library_is_made_torchs_when_it_is_first_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    activated = mock.Mock()
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated, raising=False)
    monkeypatch.setattr(triton_flash, "objection", lambda *_: None)
    takes.cache_clear()
    assert takes(GOOD._replace(device=torch.device("cpu"))) and takes(GOOD._replace(device=torch.device("cpu")))
    activated.assert_called_once_with("FA3")
    takes.cache_clear()
