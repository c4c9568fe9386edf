"""Layers in one call against the same layers operation by operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch

from support.kernels.kernel_harness import RATIO, PagedBatch, assert_close, needs_compiler, paged_batch, rounded_cache
from support.kernels.lora_stacks import drawn_stack, grouped
from tidewheel_kernels import AttentionMetadata, paged_attention, rms_norm, rope_and_cache, silu_and_mul
from tidewheel_kernels.decode_layers import DecodeLayers, HeadShape, LayerWeights, LinearWeights, fits_decode_layers
from tidewheel_kernels.grouped_linear import LaneWeights, arrange, grouped_linear, quantize_groups
from tidewheel_kernels.kv_cache.codes import scales_behind
from tidewheel_kernels.lora import LoraGroups, LoraStack, add_lora
from tidewheel_kernels.lora.stacks import HostLoraStack, StaticLoraStack
from tidewheel_kernels.packed_linear import PackedWeights, can_pack, packed_linear

pytestmark = needs_compiler
HIDDEN, INTERMEDIATE, KV_HEADS, HEAD_DIM, EPS = 96, 544, 2, 32, 1e-5
FORMATS = {"4 bits": 4, "8 bits": 8, "floats": 0}


class Model(NamedTuple):
    layers: list[LayerWeights]
    heads: HeadShape
    cos_sin: torch.Tensor


def model(
    num_bits: Sequence[int], dtype: torch.dtype, *, group: int, has_norms: bool, has_bias: bool, window: int
) -> Model:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def linear(bits: int, outputs: int, inputs: int) -> LinearWeights:
        weight = drawn(outputs, inputs) * inputs**-0.5
        weights = arrange(quantize_groups(weight, bits), dtype) if bits else PackedWeights(weight)  # type: ignore[arg-type]
        assert isinstance(weights, PackedWeights | LaneWeights)
        return LinearWeights(weights, drawn(outputs) if has_bias else None)

    q_width = group * KV_HEADS * HEAD_DIM
    layers = [
        LayerWeights(
            1 + drawn(HIDDEN) / 8,
            1 + drawn(HIDDEN) / 8,
            1 + drawn(HEAD_DIM) / 8 if has_norms else None,
            1 + drawn(HEAD_DIM) / 8 if has_norms else None,
            linear(bits, q_width + 2 * KV_HEADS * HEAD_DIM, HIDDEN),
            linear(bits, HIDDEN, q_width),
            linear(bits, 2 * INTERMEDIATE, HIDDEN),
            linear(bits, HIDDEN, INTERMEDIATE),
            window,
        )
        for bits in num_bits
    ]
    angles = torch.rand(128, HEAD_DIM // 2, generator=generator)
    return Model(layers, HeadShape(group * KV_HEADS, KV_HEADS, HEAD_DIM), torch.cat((angles.cos(), angles.sin()), 1))


class Adapters(NamedTuple):
    stacks: list[LoraStack | None]
    groups: LoraGroups | None = None


def adapters(of: Model, dtype: torch.dtype, kind: type[LoraStack] = HostLoraStack) -> Adapters:
    """Draw three adapters of uneven ranks; the last layer's output matrix has none."""
    q_width = of.heads.num_q_heads * HEAD_DIM
    sizes = [
        (HIDDEN, (q_width, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)),
        (q_width, (HIDDEN,)),
        (HIDDEN, (INTERMEDIATE, INTERMEDIATE)),
        (INTERMEDIATE, (HIDDEN,)),
    ]
    stacks: list[LoraStack | None] = [
        drawn_stack(
            kind, inputs, outputs, [[5, 0, 16][: len(outputs)], [20] * len(outputs), [1] * len(outputs)], dtype
        )
        for _ in of.layers
        for inputs, outputs in sizes
    ]
    stacks[-3] = None
    return Adapters(stacks)


NO_ADAPTERS = Adapters([None] * 8)


def product(
    x: torch.Tensor, linear: LinearWeights, stack: LoraStack | None, groups: LoraGroups | None
) -> torch.Tensor:
    weights, bias = linear
    out = grouped_linear(x, weights, bias) if isinstance(weights, LaneWeights) else packed_linear(x, weights, bias)
    if stack is not None and groups is not None:
        add_lora(out, x, stack, groups)
    return out


def by_operations(
    of: Model,
    x: torch.Tensor,
    batch: PagedBatch,
    positions: torch.Tensor,
    caches: Sequence[torch.Tensor],
    lora: Adapters = NO_ADAPTERS,
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = torch.zeros_like(x)
    num_q_heads, num_kv_heads, head_dim = of.heads
    for index, (layer, cache) in enumerate(zip(of.layers, caches, strict=True)):
        qkv, output, gate_up, down = lora.stacks[4 * index : 4 * index + 4]
        normed, residual = rms_norm(x, layer.input_norm, EPS, residual)
        heads = product(normed, layer.qkv, qkv, lora.groups).view(len(x), -1, head_dim)
        q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), 1)
        rope_and_cache(
            q, k, v, of.cos_sin, positions, batch.meta.slot_mapping, *cache,
            q_norm_weight=layer.q_norm, k_norm_weight=layer.k_norm, eps=EPS,
        )  # fmt: skip
        attended = paged_attention(
            q, *cache, batch.meta, scale=head_dim**-0.5, sliding_window=layer.sliding_window
        ).view(len(x), -1)
        normed, residual = rms_norm(
            product(attended, layer.output, output, lora.groups), layer.mlp_norm, EPS, residual
        )
        activated = silu_and_mul(product(normed, layer.gate_up, gate_up, lora.groups))
        x = product(activated, layer.down, down, lora.groups)
    return x, residual


def check(
    of: Model,
    dtype: torch.dtype,
    seq_lens: Sequence[int],
    *,
    has_codes: bool = False,
    lora: Adapters = NO_ADAPTERS,
) -> None:
    batch = paged_batch([(1, length) for length in seq_lens], group=1, dtype=dtype)
    lengths = batch.meta.seq_lens.long()
    positions = (lengths - 1).clamp(min=0)
    blocks = batch.meta.block_tables[torch.arange(len(seq_lens)), positions // 16].long()
    batch.meta.slot_mapping.copy_(torch.where(lengths > 0, blocks * 16 + positions % 16, -1))
    layers = DecodeLayers(*of, EPS)
    if lora is not NO_ADAPTERS:
        layers.use_lora(lora.stacks)
    copied = rounded_cache if has_codes else torch.clone
    caches = [[tuple(map(copied, batch[1:3])) for _ in of.layers] for _ in range(2)]
    x = torch.randn(len(seq_lens), HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = by_operations(of, x, batch, positions, caches[0], lora)
    residual = layers.run(x, positions, batch.meta, caches[1], lora.groups)
    if all(isinstance(linear.weights, LaneWeights) for layer in of.layers for linear in layer.linears):
        # Steps of more rows take single operations: as inputs are rounded to 8 bits, a last bit changes tokens.
        assert torch.equal(expected[0], x) and torch.equal(expected[1], residual)
    for name, wanted, got in zip(("output", "residual"), expected, (x, residual), strict=True):
        assert_close(name, wanted, got, 4 * RATIO[dtype] * (1 if dtype == torch.bfloat16 else 100))
    for pair in zip(*caches, strict=True):
        for wanted, got in zip(*pair, strict=True):
            if has_codes:
                wanted, got = (cache * scales_behind(cache).unsqueeze(-1) for cache in (wanted, got))
            assert_close("cache", wanted.nan_to_num(), got.nan_to_num(), 4 * RATIO[dtype] * 100)
    again = torch.randn(1, HIDDEN).to(dtype)
    layers.run(again, positions[:1], batch.meta, caches[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("seq_lens", [(1,), (40, 17, 0, 3)], ids=str)
@pytest.mark.parametrize("has_extras", [False, True], ids=["plain", "norms, biases and a window"])
def test_equals_single_operations(has_extras: bool, seq_lens: tuple[int, ...], bits: int, dtype: torch.dtype) -> None:
    if not bits and not can_pack(dtype):
        pytest.skip("oneDNN packs no weights of this dtype here")
    of = model((bits, bits), dtype, group=3, has_norms=has_extras, has_bias=has_extras, window=8 * has_extras)
    if not fits_decode_layers(of.layers, of.heads):
        pytest.skip("oneDNN's layout for this processor is not known")
    check(of, dtype, seq_lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 8])
def test_equals_single_operations_with_a_cache_of_codes(window: int, dtype: torch.dtype) -> None:
    of = model((8, 4), dtype, group=3, has_norms=True, has_bias=False, window=window)
    check(of, dtype, (40, 17, 0, 3), has_codes=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("slots", [(1,), (2, -1, 0, 2)], ids=str)
def test_equals_single_operations_with_adapters(slots: tuple[int, ...], bits: int, dtype: torch.dtype) -> None:
    if not bits and not can_pack(dtype):
        pytest.skip("oneDNN packs no weights of this dtype here")
    of = model((bits, bits), dtype, group=3, has_norms=False, has_bias=True, window=0)
    if not fits_decode_layers(of.layers, of.heads):
        pytest.skip("oneDNN's layout for this processor is not known")
    drawn = adapters(of, dtype)._replace(groups=grouped(slots))
    check(of, dtype, (40, 17, 9, 3)[: len(slots)], lora=drawn)


def test_adapters_change_no_row_without_one_and_no_later_step() -> None:
    of = model((8, 4), torch.float32, group=3, has_norms=True, has_bias=True, window=0)
    batch = paged_batch([(1, length) for length in (5, 20, 3)], group=1)
    positions = batch.meta.seq_lens.long() - 1
    batch.meta.slot_mapping.fill_(-1)
    caches, layers = [tuple(cache.nan_to_num() for cache in batch[1:3])] * 2, DecodeLayers(*of, EPS)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2))
    plain, mixed, after = x.clone(), x.clone(), x.clone()
    layers.run(plain, positions, batch.meta, caches)
    layers.use_lora(adapters(of, torch.float32).stacks)
    assert layers.takes_lora
    layers.run(mixed, positions, batch.meta, caches, grouped((-1, 1, -1)))
    layers.run(after, positions, batch.meta, caches)
    assert torch.equal(mixed[::2], plain[::2]) and not torch.isclose(mixed[1], plain[1]).all()
    assert torch.equal(after, plain)


def test_adapters_that_the_kernel_cannot_read_are_left_to_operations() -> None:
    of = model((8, 4), torch.float32, group=3, has_norms=True, has_bias=True, window=0)
    layers = DecodeLayers(*of, EPS)
    assert not layers.takes_lora
    for dtype, kind in ((torch.bfloat16, HostLoraStack), (torch.float32, StaticLoraStack)):
        layers.use_lora(adapters(of, dtype, kind).stacks)
        assert not layers.takes_lora


@pytest.mark.parametrize("setting", ["torch", "rms_norm=reference", "paged_attention=torch"])
def test_runs_only_where_the_environment_leaves_all_its_operations_to_c(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = model((4,), torch.float32, group=1, has_norms=False, has_bias=False, window=0)
    assert fits_decode_layers(of.layers, of.heads)
    monkeypatch.setenv("TIDEWHEEL_KERNELS", setting)
    assert not fits_decode_layers(of.layers, of.heads)


@pytest.mark.parametrize(
    "shapes", [[(4, 16, 2, 32)], [(4, 16, 2, 32), (4, 32, 2, 32)], [(4, 16, 2, 16)] * 2], ids=str
)
def test_caches_of_another_layout_are_refused(shapes: list[tuple[int, ...]]) -> None:
    of = model((4, 8), torch.float32, group=1, has_norms=False, has_bias=False, window=0)
    caches = [(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]
    meta = paged_batch([(1, 1)], group=1).meta
    with pytest.raises(ValueError, match="2 layers need caches of one layout"):
        DecodeLayers(*of, EPS).run(torch.zeros(1, HIDDEN), torch.zeros(1, dtype=torch.int64), meta, caches)


def test_a_row_with_nan_changes_no_other() -> None:
    of = model((8, 4), torch.float32, group=3, has_norms=True, has_bias=True, window=0)
    batch = paged_batch([(1, length) for length in (5, 20, 3)], group=1)
    positions = batch.meta.seq_lens.long() - 1
    batch.meta.slot_mapping.fill_(-1)
    caches, layers = [tuple(cache.nan_to_num() for cache in batch[1:3])] * 2, DecodeLayers(*of, EPS)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2))
    clean, dirty = x.clone(), x.clone()
    dirty[1, 7] = float("nan")
    for rows in (clean, dirty):
        layers.run(rows, positions, batch.meta, caches)
    assert dirty[1].isnan().any()
    assert torch.equal(clean[::2], dirty[::2])


class Entries(NamedTuple):
    """Successive tokens of sequences, one row each; a sequence of no token is padding."""

    positions: torch.Tensor
    meta: AttentionMetadata
    batch: PagedBatch
    steps: list[list[int]]  # rows of each step, when a sequence's tokens are decoded one after the other


def entries(counts: Sequence[tuple[int, int]], dtype: torch.dtype) -> Entries:
    """Return rows for `counts`, (tokens in the cache, tokens of the step) of each sequence; (0, 0): padding."""
    batch = paged_batch([(1, known + new) for known, new in counts], group=1, dtype=dtype)
    for cache in batch[1:3]:
        cache.nan_to_num_(7.0)  # where a row reads a key before it is stored, its result differs
    sequence = torch.tensor([i for i, (_, new) in enumerate(counts) for _ in range(max(new, 1))])
    seq_lens = torch.cat(
        [torch.arange(known + 1, known + new + 1) if new else torch.zeros(1) for known, new in counts]
    )
    positions = (seq_lens - 1).clamp(min=0).long()
    tables = batch.meta.block_tables[sequence]
    blocks = tables[torch.arange(len(positions)), positions // 16].long()
    slots = torch.where(seq_lens > 0, blocks * 16 + positions % 16, -1)
    for block, offset in zip(blocks[slots >= 0].tolist(), (positions % 16)[slots >= 0].tolist(), strict=True):
        for cache in batch[1:3]:
            cache[block, offset] = 7.0
    meta = metadata(slots, tables, seq_lens.int())
    nth = [j for _, new in counts for j in range(max(new, 1))]
    return Entries(positions, meta, batch, [[i for i, of in enumerate(nth) if of == j] for j in range(max(nth) + 1)])


def metadata(slots: torch.Tensor, tables: torch.Tensor, seq_lens: torch.Tensor) -> AttentionMetadata:
    starts = torch.arange(len(slots) + 1, dtype=torch.int32)
    return AttentionMetadata(slots, tables, starts, seq_lens, 1, int(seq_lens.max()), len(slots))


MIXED = ((30, 3), (0, 0), (15, 1), (0, 2), (47, 5), (9, 1), (0, 0), (16, 2))


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("extras", ["plain", "norms, biases and a window", "codes", "adapters"])
def test_successive_tokens_of_a_sequence_equal_decodes_one_after_the_other(
    extras: str, bits: int, dtype: torch.dtype
) -> None:
    if not bits and not can_pack(dtype):
        pytest.skip("oneDNN packs no weights of this dtype here")
    has_norms = extras.startswith("norms")
    of = model((bits, bits), dtype, group=3, has_norms=has_norms, has_bias=has_norms, window=8 * has_norms)
    if not fits_decode_layers(of.layers, of.heads):
        pytest.skip("oneDNN's layout for this processor is not known")
    layers = DecodeLayers(*of, EPS)
    slots: list[int] = []
    if extras == "adapters":
        layers.use_lora(adapters(of, dtype).stacks)
        slots = [2, -1, 1, 0, 2, -1, 1, 1]
    loads = [MIXED, *([(known, new)] for known in (0, 21) for new in {*range(1, 10), 16, layers.max_rows})]
    copied = rounded_cache if extras == "codes" else torch.clone
    for counts in loads:
        if sum(max(new, 1) for _, new in counts) > layers.max_rows:
            counts = [(30, 2), (0, 0), (15, 1)]
        of_step = entries(counts, dtype)
        rows = [i for i, (_, new) in enumerate(counts) for _ in range(max(new, 1))]
        caches = [[tuple(map(copied, of_step.batch[1:3])) for _ in of.layers] for _ in range(2)]
        together = torch.randn(len(rows), HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
        one_by_one, expected = together.clone(), torch.empty_like(together)
        residual = layers.run(
            together, of_step.positions, of_step.meta, caches[0], grouped([slots[i] for i in rows]) if slots else None
        )
        for step in of_step.steps:
            meta = of_step.meta
            chosen = metadata(meta.slot_mapping[step], meta.block_tables[step], meta.seq_lens[step])
            groups = grouped([slots[rows[i]] for i in step]) if slots else None
            x = one_by_one[step]
            expected[step] = layers.run(x, of_step.positions[step], chosen, caches[1], groups)
            one_by_one[step] = x
        assert torch.equal(together, one_by_one) and torch.equal(residual, expected), counts
        for pair in zip(*caches, strict=True):
            for got, wanted in zip(*pair, strict=True):
                assert torch.equal(got.nan_to_num(), wanted.nan_to_num()), counts


def test_a_sequence_that_shares_blocks_with_another_is_none_of_its_tokens() -> None:
    of = model((8, 4), torch.float32, group=3, has_norms=True, has_bias=True, window=0)
    layers = DecodeLayers(*of, EPS)
    of_step = entries([(17, 1), (18, 1)], torch.float32)
    of_step.meta.block_tables[1, 0] = of_step.meta.block_tables[0, 0]  # a shared prefix of 16 tokens
    results = []
    for chosen in ([0, 1], [1, 0]):
        x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))[chosen]
        caches = [tuple(map(torch.clone, of_step.batch[1:3])) for _ in of.layers]
        meta = of_step.meta
        given = metadata(meta.slot_mapping[chosen], meta.block_tables[chosen], meta.seq_lens[chosen])
        layers.run(x, of_step.positions[chosen], given, caches)
        results.append(x[[chosen.index(0), chosen.index(1)]])
    assert torch.equal(*results)
