from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from support.kernels.kernel_harness import (
    NAN,
    RATIO,
    PagedBatch,
    assert_close,
    needs_compiler,
    paged_batch,
    quantised,
)
from tidewheel_kernels import AttentionMetadata, attention, paged_attention
from tidewheel_kernels.attention import paged_attention_native
from tidewheel_kernels.attention.cpu import paged_attention_cpu
from tidewheel_kernels.attention.reference import paged_attention_reference
from tidewheel_kernels.attention.triton_kernels import paged_attention as paged_attention_triton
from tidewheel_kernels.launch_config import compile_target, prefill_config
from tidewheel_kernels.native import library

Implementation = Callable[..., None]
SCALE = 0.2
IMPLEMENTATIONS = {"triton": paged_attention_triton, "cpu": paged_attention_cpu, "native": paged_attention_native}


class Batch(NamedTuple):
    name: str
    lengths: list[tuple[int, int]]  # (query_len, seq_len)

    def __str__(self) -> str:
        return self.name


DECODE_1 = Batch("one-token", [(1, 1)])
DECODES = Batch("decodes", [(1, 40), (1, 7), (1, 0), (1, 129), (1, 64)])
LONG_DECODE = Batch("long-decode", [(1, 700)])
PREFILL_63 = Batch("prefill-63", [(63, 63)])
SMALL = [(1, 33), (1, 5), (3, 9), (20, 37)]  # a tile of keys or queries and more, also in groups of 7
MIXED = Batch("mixed", [(1, 33), (1, 5), (3, 9), (20, 20), (1, 17), (50, 83), (2, 150)])
ALL_BATCHES = [DECODE_1, DECODES, LONG_DECODE, PREFILL_63, MIXED]


@pytest.fixture(params=["triton", "cpu", pytest.param("native", marks=needs_compiler)])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture
def where(implementation: Implementation, device: str) -> str:
    return device if implementation is paged_attention_triton else "cpu"


def check(
    implementation: Implementation,
    batch: PagedBatch,
    *,
    window: int = 0,
    cap: float = 0.0,
    slack: float = 2.0,
    scales: torch.Tensor | None = None,
) -> None:
    ours, reference = torch.full_like(batch.q, NAN), torch.full_like(batch.q, NAN)
    arguments = (batch.q, batch.k_cache, batch.v_cache, batch.meta)
    implementation(*arguments, ours, SCALE, window, cap, scales)
    paged_attention_reference(*arguments, reference, SCALE, window, cap, scales)
    assert_close("attention", reference, ours, slack * RATIO[batch.q.dtype])


@pytest.mark.parametrize("batch", ALL_BATCHES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_batches(implementation: Implementation, where: str, batch: Batch, block_size: int) -> None:
    check(implementation, paged_batch(batch.lengths, block_size=block_size, device=where))


@pytest.mark.parametrize("block_size", [32, 128])
def test_other_block_sizes(implementation: Implementation, where: str, block_size: int) -> None:
    check(implementation, paged_batch(MIXED.lengths, block_size=block_size, device=where))


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_grouped_heads(implementation: Implementation, where: str, num_kv_heads: int, group: int) -> None:
    check(implementation, paged_batch(SMALL, num_kv_heads=num_kv_heads, group=group, device=where))


@pytest.mark.parametrize("group", [71, 260])
def test_more_query_heads_than_rows_of_a_tile(implementation: Implementation, where: str, group: int) -> None:
    check(implementation, paged_batch([(1, 20), (5, 9)], num_kv_heads=1, group=group, head_dim=8, device=where))


@pytest.mark.parametrize("head_dim", [8, 80, 96, 128, 256])
def test_head_dims(implementation: Implementation, where: str, head_dim: int) -> None:
    check(implementation, paged_batch(SMALL, head_dim=head_dim, num_kv_heads=1, device=where))


@pytest.mark.parametrize("window", [1, 10, 64, 1000])
@pytest.mark.parametrize("batch", [DECODES, LONG_DECODE, MIXED], ids=str)
def test_sliding_window(implementation: Implementation, where: str, batch: Batch, window: int) -> None:
    check(implementation, paged_batch(batch.lengths, device=where), window=window)


@pytest.mark.parametrize("window", [0, 10])
@pytest.mark.parametrize("batch", [LONG_DECODE, MIXED], ids=str)
def test_soft_cap(implementation: Implementation, where: str, batch: Batch, window: int) -> None:
    check(implementation, paged_batch(batch.lengths, device=where), window=window, cap=1.5)


# The interpreter multiplies bfloat16 bit patterns in tl.dot, so the kernels see bfloat16 on a GPU only.
@pytest.mark.parametrize("implementation", ["triton", "cpu"], indirect=True)
@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=str)
def test_float16(implementation: Implementation, where: str, batch: Batch) -> None:
    check(implementation, paged_batch(batch.lengths, dtype=torch.float16, head_dim=64, device=where))


@pytest.fixture(params=[80, 90], ids=["pointers", "boxes"])
def architecture(request: pytest.FixtureRequest) -> Iterator[int]:
    """What the launch table chooses for: the first loads keys through pointers, the second copies boxes."""
    token = compile_target.set(request.param)
    yield request.param
    compile_target.reset(token)


class TestCacheOf8Bits:
    """Against the reference on the same bytes, so nothing but arithmetic differs."""

    @pytest.mark.parametrize("batch", [DECODES, LONG_DECODE, MIXED], ids=str)
    @pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (10, 1.5)], ids=str)
    def test_batches(self, implementation: Implementation, where: str, batch: Batch, window: int, cap: float) -> None:
        made, scales = quantised(paged_batch(batch.lengths, num_kv_heads=3, device=where))
        check(implementation, made, window=window, cap=cap, scales=scales)

    @pytest.mark.usefixtures("architecture")
    @pytest.mark.parametrize("head_dim", [64, 72, 80])
    def test_both_ways_to_load_keys(self, device: str, head_dim: int) -> None:
        batch = half_batch([(1, 5), (3, 9), (20, 20), (70, 150)], device, head_dim=head_dim)
        made, scales = quantised(batch)
        check(paged_attention_triton, made, scales=scales)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("block_size", [16, 64])
    def test_bfloat16_on_a_gpu(self, device: str, head_dim: int, block_size: int) -> None:
        shape = {"num_kv_heads": 2, "group": 4, "head_dim": head_dim, "block_size": block_size}
        for lengths in ([(1, 5000), (1, 1), (1, 777)], [(1, 300), (777, 3001), (1, 4097)]):
            made, scales = quantised(paged_batch(lengths, dtype=torch.bfloat16, device=device, **shape))
            check(paged_attention_triton, made, scales=scales)

    def test_scales_and_caches_belong_together(self) -> None:
        batch = paged_batch([(1, 3)])
        made, scales = quantised(batch)
        with pytest.raises(TypeError, match="with scales"):
            paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.meta, scale=SCALE, scales=scales)
        with pytest.raises(TypeError, match="with scales"):
            paged_attention(made.q, made.k_cache, made.v_cache, made.meta, scale=SCALE)
        paged_attention(made.q, made.k_cache, made.v_cache, made.meta, scale=SCALE, scales=scales)


class TestBothWaysToLoadKeys:
    """16-bit elements and blocks of 64: prompts longer than a tile of queries, contexts that end inside a box."""

    SHORT = Batch("short", [(1, 5), (3, 9), (20, 20), (2, 150)])
    PROMPT = Batch("prompt", [(70, 70), (1, 64), (90, 217)])

    def test_the_table_tells_them_apart(self) -> None:
        assert not prefill_config(64, 2, 64, 2, 80).tma and prefill_config(64, 2, 64, 2, 90).tma
        assert not prefill_config(64, 2, 64, 4, 90).tma and not prefill_config(64, 2, 16, 2, 90).tma

    @pytest.mark.usefixtures("architecture")
    @pytest.mark.parametrize("batch", [SHORT, PROMPT], ids=str)
    @pytest.mark.parametrize("block_size", [64, 128])
    def test_batches(self, device: str, batch: Batch, block_size: int) -> None:
        check(paged_attention_triton, half_batch(batch.lengths, device, block_size=block_size, group=4))

    @pytest.mark.usefixtures("architecture")
    @pytest.mark.parametrize(("group", "head_dim"), [(1, 128), (3, 80), (7, 64), (2, 256)], ids=str)
    def test_groups_and_head_dims(self, device: str, group: int, head_dim: int) -> None:
        check(paged_attention_triton, half_batch(self.SHORT.lengths, device, group=group, head_dim=head_dim))

    @pytest.mark.usefixtures("architecture")
    @pytest.mark.parametrize(("window", "cap"), [(1, 0.0), (40, 0.0), (130, 0.0), (1000, 2.0), (0, 1.5)], ids=str)
    def test_window_and_cap(self, device: str, window: int, cap: float) -> None:
        check(paged_attention_triton, half_batch([*self.PROMPT.lengths, (9, 400)], device), window=window, cap=cap)

    @pytest.mark.usefixtures("architecture")
    def test_keys_and_values_of_one_block_side_by_side(self, device: str) -> None:
        batch = half_batch(self.PROMPT.lengths, device)
        both = torch.stack((batch.k_cache, batch.v_cache), dim=1)
        check(paged_attention_triton, batch._replace(k_cache=both[:, 0], v_cache=both[:, 1]))

    @pytest.mark.usefixtures("architecture")
    @pytest.mark.parametrize("lengths", [[(1, 70)], [(20, 90)]], ids=["decode", "prompt"])
    def test_offsets_past_two_to_the_31(
        self, device: str, lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batch = half_batch(lengths, device, num_kv_heads=8, head_dim=128)
        num_blocks = len(batch.k_cache)
        first = 2**31 // (2 * batch.k_cache[0].numel())
        try:  # on a CPU, memory that nothing touches costs nothing
            both = torch.empty(first + num_blocks, 2, *batch.k_cache.shape[1:], dtype=torch.float16, device=device)
        except RuntimeError as error:
            pytest.skip(f"no address space for a cache of more than 2^31 elements: {error}")
        both[first:, 0], both[first:, 1] = batch.k_cache, batch.v_cache
        # The interpreter copies every storage of CPU tensors onto itself, which would touch all of it.
        monkeypatch.setattr(torch.UntypedStorage, "copy_", lambda self, *_: self)
        far = AttentionMetadata(**{**vars(batch.meta), "block_tables": batch.meta.block_tables + first})
        check(paged_attention_triton, batch._replace(k_cache=both[:, 0], v_cache=both[:, 1], meta=far))


def half_batch(lengths: list[tuple[int, int]], device: str, **shape: int) -> PagedBatch:
    shape = {"num_kv_heads": 2, "block_size": 64, "head_dim": 64, **shape}
    return paged_batch(lengths, dtype=torch.float16, device=device, **shape)


@pytest.mark.parametrize("implementation", ["cpu", pytest.param("native", marks=needs_compiler)], indirect=True)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("batch", [DECODES, MIXED], ids=str)
def test_bfloat16_on_the_cpu(implementation: Implementation, batch: Batch, head_dim: int) -> None:
    check(implementation, paged_batch(batch.lengths, dtype=torch.bfloat16, head_dim=head_dim))


@pytest.fixture(params=[True, False], ids=["tiles if there are any", "no tiles"])
def may_use_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not request.param:
        monkeypatch.setattr(library, "_may_use_tiles", lambda: False)
    attention._prompt_attention.clear()
    library.native_library.cache_clear()
    yield
    library.native_library.cache_clear()


@needs_compiler
@pytest.mark.usefixtures("may_use_tiles")
@pytest.mark.parametrize("window", [0, 1, 70])
@pytest.mark.parametrize(
    "shape", [{"head_dim": 64}, {"head_dim": 80, "group": 3}, {"head_dim": 128, "num_kv_heads": 1}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_of_many_tiles_in_c(dtype: torch.dtype, shape: dict[str, int], window: int) -> None:
    """Several jobs for a sequence, tiles of keys that only some rows see, and rows that fill no tile."""
    lengths = [(1, 300), (300, 300), (2, 65), (33, 257), (140, 513)]
    check(paged_attention_native, paged_batch(lengths, dtype=dtype, **shape), window=window)


@needs_compiler
@pytest.mark.usefixtures("may_use_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prompts_without_keys_become_zero_in_c(dtype: torch.dtype) -> None:
    batch = paged_batch([(1, 33), (3, 9), (20, 37)], dtype=dtype)
    empty = AttentionMetadata(
        **{**vars(batch.meta), "seq_lens": batch.meta.seq_lens * torch.tensor([1, 0, 1], dtype=torch.int32)}
    )
    ours = torch.full_like(batch.q, NAN)
    paged_attention_native(batch.q, batch.k_cache, batch.v_cache, empty, ours, SCALE, 0, 0.0, None)
    assert ours[1:4].eq(0).all() and ours.isfinite().all()


@needs_compiler
def test_keys_past_a_bfloat16_context_have_no_weight_in_c() -> None:
    """Not even when every logit is minus infinity."""
    batch = paged_batch([(1, 3), (1, 21)], dtype=torch.bfloat16, head_dim=64)
    queries, keys, values = (
        batch.q.abs() + 1,
        torch.full_like(batch.k_cache, -float("inf")),
        torch.ones_like(batch.v_cache),
    )
    ours = torch.full_like(queries, NAN)
    paged_attention_native(queries, keys, values, batch.meta, ours, SCALE, 0, 0.0, None)
    assert ours.eq(1).all()


@needs_compiler
@pytest.mark.usefixtures("may_use_tiles")
def test_soft_caps_of_bfloat16_prompts_in_c() -> None:
    check(paged_attention_native, paged_batch(MIXED.lengths, dtype=torch.bfloat16), window=10, cap=1.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("batch", ALL_BATCHES, ids=str)
def test_bfloat16_on_a_gpu(device: str, batch: Batch, head_dim: int) -> None:
    check(
        paged_attention_triton,
        paged_batch(batch.lengths, dtype=torch.bfloat16, head_dim=head_dim, block_size=64, device=device),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (300, 0.0), (0, 20.0), (300, 20.0)], ids=str)
def test_long_prompts_and_contexts_on_a_gpu(
    device: str, dtype: torch.dtype, block_size: int, window: int, cap: float
) -> None:
    """Many tiles per program, several programs per sequence, many splits, in every dtype."""
    shape = {"num_kv_heads": 2, "group": 4, "head_dim": 128, "block_size": block_size}
    for lengths in ([(1, 5000), (1, 1), (1, 777)], [(1, 300), (1500, 1500), (777, 3001), (1, 4097)]):
        check(
            paged_attention_triton, paged_batch(lengths, dtype=dtype, device=device, **shape), window=window, cap=cap
        )


def test_values_of_magnitude_do_not_overflow(implementation: Implementation, where: str) -> None:
    """Products reach some thousand, so that their own rounding changes a weight by up to 1e-4."""
    batch = paged_batch(MIXED.lengths, device=where)
    check(implementation, batch._replace(q=batch.q * 200), slack=500.0)


def test_a_frozen_upper_bound_gives_the_same_rows(device: str) -> None:
    batch = paged_batch(DECODES.lengths, device=device)
    frozen = AttentionMetadata(**{**vars(batch.meta), "max_seq_len": 4096})
    check(paged_attention_triton, batch._replace(meta=frozen))


def test_views_of_a_fused_projection(implementation: Implementation, where: str) -> None:
    batch = paged_batch(MIXED.lengths, device=where)
    fused = torch.full((batch.q.shape[0], 3 * batch.q.shape[1], batch.q.shape[2]), NAN, device=where)
    fused[:, : batch.q.shape[1]] = batch.q
    check(implementation, batch._replace(q=fused[:, : batch.q.shape[1]]))


def test_reference_against_dense_attention() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 48, 2, 16).unbind()
    batch = paged_batch([(48, 48)], head_dim=16)
    blocks = batch.meta.block_tables[0, :3].long()
    batch.k_cache[blocks], batch.v_cache[blocks] = k.view(3, 16, 2, 16), v.view(3, 16, 2, 16)
    out = torch.empty_like(batch.q)
    paged_attention_reference(batch.q, batch.k_cache, batch.v_cache, batch.meta, out, SCALE, 0, 0.0, None)
    dense = scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (batch.q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))),
        is_causal=True,
        scale=SCALE,
    )
    assert_close("reference", dense.transpose(0, 1), out, 1e-5)


def test_public_function_fills_out_and_accepts_no_rows() -> None:
    batch = paged_batch(MIXED.lengths)
    out = torch.full_like(batch.q, NAN)
    returned = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.meta, scale=SCALE, out=out)
    assert returned is out and not out.isnan().any()
    empty = paged_batch([])
    assert paged_attention(empty.q, empty.k_cache, empty.v_cache, empty.meta, scale=SCALE).shape == empty.q.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 12}, "multiple of 8"),
        ({"head_dim": 264}, "multiple of 8"),
        ({"block_size": 8}, "block_size"),
    ],
    ids=str,
)
def test_shapes_that_are_not_supported(change: dict[str, int], message: str) -> None:
    batch = paged_batch([(1, 3)], **change)
    with pytest.raises(ValueError, match=message):
        paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.meta, scale=SCALE)


def test_mixed_dtypes_and_uneven_heads_are_refused() -> None:
    batch = paged_batch([(1, 3)])
    with pytest.raises(TypeError, match="one dtype"):
        paged_attention(batch.q.half(), batch.k_cache, batch.v_cache, batch.meta, scale=SCALE)
    with pytest.raises(ValueError, match="not a multiple"):
        paged_attention(batch.q[:, :3], batch.k_cache, batch.v_cache, batch.meta, scale=SCALE)
    with pytest.raises(ValueError, match="scale must be positive"):
        paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.meta, scale=0.0)
    with pytest.raises(ValueError, match="negative"):
        paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.meta, scale=SCALE, sliding_window=-1)
