"""The cache of 8-bit integers: attention against the reference, which reads the same codes, and what is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.kernels.kernel_harness import (
    NAN,
    RATIO,
    PagedBatch,
    assert_close,
    needs_compiler,
    paged_batch,
    rounded_cache,
)
from tidewheel_kernels import attention, paged_attention, rope, rope_and_cache, write_kv_cache
from tidewheel_kernels.attention import paged_attention_native
from tidewheel_kernels.attention.cpu import paged_attention_cpu
from tidewheel_kernels.attention.reference import paged_attention_reference
from tidewheel_kernels.kv_cache.codes import check_codes, codes_of, rounded, scales_behind
from tidewheel_kernels.native import library
from tidewheel_kernels.rope.reference import rope_and_cache_reference

pytestmark = needs_compiler
SCALE = 0.2
# Weights have 8 bits of the largest of their tile.
CODES_RATIO = {torch.float32: 5e-3, torch.bfloat16: 1e-2}
LENGTHS = [(1, 40), (1, 7), (1, 0), (1, 129), (1, 64), (1, 200), (3, 9), (20, 37), (70, 150)]


@pytest.fixture(autouse=True, params=[[], ["-march=x86-64-v3"]], ids=["this processor", "avx2"])
def _flags(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param:
        if "avx2" not in library.processor().split():
            pytest.skip("needs a processor with avx2")
        monkeypatch.setattr(library, "processor_flags", lambda: request.param)
        _forget()
    yield
    if request.param:
        _forget()


def _forget() -> None:
    library.native_library.cache_clear()
    for kernel in (attention._decode_attention, attention._prompt_attention, rope._rope_and_cache):
        kernel.clear()


def in_codes(batch: PagedBatch) -> PagedBatch:
    """Return the batch with caches of codes; where it has NaN, their scales have."""
    return batch._replace(k_cache=rounded_cache(batch.k_cache), v_cache=rounded_cache(batch.v_cache))


def attended(batch: PagedBatch, window: int = 0, cap: float = 0.0) -> torch.Tensor:
    ours = torch.full_like(batch.q, NAN)
    paged_attention_native(*batch[:4], ours, SCALE, window, cap, None)
    return ours


def check(batch: PagedBatch, window: int = 0, cap: float = 0.0) -> None:
    expected = torch.full_like(batch.q, NAN)
    paged_attention_reference(*batch, expected, SCALE, window, cap, None)
    assert_close("attention", expected, attended(batch, window, cap), CODES_RATIO[batch.q.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim"),
    [(3, 3, 64), (2, 1, 64), (1, 9, 64), (2, 2, 128), (1, 3, 128), (1, 2, 256), (3, 2, 80), (1, 1, 8)],
    ids=str,
)
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (1, 0.0), (70, 0.0), (10, 1.5)], ids=str)
def test_attention(
    window: int, cap: float, num_kv_heads: int, group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    shape = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim, "block_size": block_size}
    check(in_codes(paged_batch(LENGTHS, dtype=dtype, **shape)), window, cap)


def test_attention_of_every_length() -> None:
    check(in_codes(paged_batch([(1, length) for length in range(1, 201)], group=3, head_dim=64)))


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_attention_of_small_and_large_values(scale: float) -> None:
    batch = paged_batch(LENGTHS[:6], group=3, head_dim=64)
    check(in_codes(batch._replace(q=batch.q / scale, k_cache=batch.k_cache * scale, v_cache=batch.v_cache * scale)))


def test_more_query_heads_than_the_kernel_takes() -> None:
    check(in_codes(paged_batch([(1, 20), (5, 9)], num_kv_heads=1, group=260, head_dim=8)))


@pytest.mark.parametrize("spoiled", ["q", "k_cache", "v_cache"])
def test_what_is_not_a_number_stays_in_its_row(spoiled: str) -> None:
    batch = paged_batch([(1, 40), (1, 50), (1, 60)], group=3, head_dim=64)
    clean = attended(in_codes(batch))
    at = (batch.meta.block_tables[1, 1], 3) if spoiled != "q" else (1,)
    for value in (NAN, float("inf")):
        tensor = getattr(batch, spoiled).clone()
        tensor[at][..., 0, 5] = value
        found = attended(in_codes(batch._replace(**{spoiled: tensor})))
        assert torch.equal(found[::2], clean[::2])
        assert found[1, :1].isnan().all() and torch.equal(found[1, 3:], clean[1, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (2, 80)], ids=str)
def test_rotated_keys_and_values_are_rounded(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 4 * heads, head_dim, generator=generator).to(dtype)
    qkv[2, 3 * heads, 1], qkv[3, 3 * heads], qkv[4, 3 * heads, 2] = NAN, 0.0, float("inf")
    angles = torch.rand(100, head_dim // 2, generator=generator)
    cos_sin, slots = torch.cat((angles.cos(), angles.sin()), 1), torch.tensor([33, -1, 0, 17, 16, 63, 34])
    caches = torch.full((2, 2, 4, 16, heads, head_dim), NAN)
    written = []
    for caches_of in caches:
        keys, values = map(rounded_cache, caches_of)
        function = rope_and_cache if not written else rope_and_cache_reference
        q, k, v = qkv.clone().split((2 * heads, heads, heads), 1)
        extras = (None, None, 1e-6, None) if written else ()
        function(q, k, v, cos_sin, torch.arange(7), slots, keys, values, *extras)
        written.append((keys, values))
    for ours, reference in zip(*written, strict=True):
        scales, expected = scales_behind(ours), scales_behind(reference)
        assert torch.equal(scales.isnan(), expected.isnan()) and scales.isfinite().any()
        assert_close("scales", expected.nan_to_num(), scales.nan_to_num(), RATIO[dtype])
        finite = expected.isfinite()
        assert int((ours[finite].int() - reference[finite].int()).abs().max()) <= (1 if dtype == torch.float32 else 2)
    values = written[0][1]
    assert scales_behind(values).flatten(0, 1)[[0, 16], 0].isnan().all()
    assert not values.flatten(0, 1)[17, 0].any() and scales_behind(values)[1, 1, 0] == 0


def test_torch_writes_and_reads_the_same_codes() -> None:
    batch = paged_batch([(1, 5), (3, 20)])
    keys, values = rounded_cache(batch.k_cache), rounded_cache(batch.v_cache)
    rows = torch.randn(2, 3, 2, 32, generator=torch.Generator().manual_seed(3))
    for slots in ([0, 17, 1], [0, -1, 1]):
        write_kv_cache(rows[0], rows[1], torch.tensor(slots), keys, values)
    for cache, written in ((keys, rows[0]), (values, rows[1])):
        found = (cache * scales_behind(cache).unsqueeze(-1)).flatten(0, 1)[[0, 17, 1]]
        assert (found - written).abs().max() <= written.abs().max() / 250
    by_torch = torch.full_like(batch.q, NAN)
    made = in_codes(batch)
    paged_attention_cpu(*made, by_torch, SCALE, 0, 0.0, None)
    assert_close("attention", by_torch, attended(made), CODES_RATIO[torch.float32])


def test_rounding_loses_half_a_step() -> None:
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(4))
    codes, scales = rounded(values)
    assert ((codes * scales.unsqueeze(-1) - values).abs() <= 0.5001 * scales.unsqueeze(-1)).all()
    assert (codes.abs().amax(-1) == 127).all()


def test_caches_without_room_for_scales_are_refused() -> None:
    batch = paged_batch([(1, 3)])
    codes = torch.zeros(batch.k_cache.shape, dtype=torch.int8)
    with pytest.raises(ValueError, match="blocks of codes and scales take 1152 bytes, got 1024"):
        paged_attention(batch.q, codes, codes, batch.meta, scale=SCALE)
    with pytest.raises(TypeError, match="must be of one dtype"):
        paged_attention(batch.q, rounded_cache(batch.k_cache), batch.v_cache, batch.meta, scale=SCALE)
    check_codes(codes_of(torch.zeros(4, 1152, dtype=torch.int8), 16, 2, 32))
