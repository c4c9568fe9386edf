from __future__ import annotations

import pytest
import torch

from support.kernels.grouped_weights import BITS, MINIMUMS, SIZES, drawn, drawn_weights
from support.kernels.kernel_harness import RATIO, assert_close, needs_compiler
from tidewheel_kernels.grouped_linear import (
    ArrangedWeights,
    LaneWeights,
    arrange,
    grouped_embedding,
    grouped_linear,
    grouped_linear_native,
    reference,
)
from tidewheel_kernels.grouped_linear.reference import (
    Bits,
    GroupedWeights,
    dequantize,
    grouped_linear_reference,
    join_outputs,
    quantize_groups,
    round_inputs,
)


@BITS
@SIZES
@MINIMUMS
def test_a_matrix_is_scales_times_codes_plus_minimums(bits: Bits, group_size: int, has_minimums: bool) -> None:
    weights = drawn_weights(5, 256, bits, group_size, has_minimums=has_minimums)
    assert (weights.out_features, weights.in_features, weights.group_size) == (5, 256, group_size)
    assert weights.nbytes == 5 * 32 * bits + 2 * 5 * 256 // group_size * (1 + has_minimums)
    found = dequantize(weights)
    for output, column in ((0, 0), (4, 255), (2, 131), (3, 64)):
        byte = int(weights.codes[output, column * bits // 8])
        code = byte if bits == 8 else byte >> 4 if column % 2 else byte & 15
        scale = weights.scales[output, column // group_size].float()
        least = -scale * 2 ** (bits - 1)
        if weights.minimums is not None:
            least = weights.minimums[output, column // group_size].float()
        assert found[output, column] == pytest.approx(float(scale * code + least), rel=1e-5, abs=1e-5)


@BITS
@SIZES
def test_rounded_weights_are_within_half_a_step(bits: Bits, group_size: int) -> None:
    weight = drawn(20, 256) * torch.logspace(-3, 2, 20).unsqueeze(1)
    weight[3] = 0.0
    found = dequantize(quantize_groups(weight, bits, group_size))
    groups = weight.view(20, -1, group_size)
    widest = groups.abs().amax(-1) * 2 if bits == 8 else groups.amax(-1) - groups.amin(-1)
    error = (found - weight).abs().view(20, -1, group_size).amax(-1)
    assert (error <= widest / (2 ** (bits + 1) - 4) * 1.02 + 1e-6).all()
    assert torch.equal(found[3], torch.zeros(256))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 1e9])
@BITS
def test_weights_that_no_scale_holds_are_refused(bits: Bits, odd: float) -> None:
    weight = drawn(4, 64)
    weight[2, 7] = odd
    with pytest.raises(ValueError, match="not finite, or too large"):
        quantize_groups(weight, bits)


@pytest.mark.parametrize("group_size", [48, 128, 0])
def test_inputs_that_are_not_groups_are_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"192 inputs are not groups of {group_size}"):
        quantize_groups(drawn(4, 192), 8, group_size)


@BITS
def test_a_matrix_is_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch, bits: Bits) -> None:
    weight = drawn(7, 64)
    whole = quantize_groups(weight, bits)
    monkeypatch.setattr(reference, "PIECE_VALUES", 3 * 64)
    for part, of_whole in zip(quantize_groups(weight, bits)[:3], whole[:3], strict=True):
        assert part is of_whole is None or torch.equal(part, of_whole)


def test_parts_that_do_not_fit_are_refused() -> None:
    codes, scales, _, _ = quantize_groups(drawn(4, 192), 8)
    with pytest.raises(ValueError, match="192 inputs with 4 scales an output are not groups of 32, 64 or 128"):
        GroupedWeights(codes, scales[:, :4], None, 8)
    with pytest.raises(ValueError, match=r"scales are .* float16; got \[4, 6\] float32 for codes \[4, 192\]"):
        GroupedWeights(codes, scales.float(), None, 8)
    with pytest.raises(ValueError, match=r"minimums are .* got \[3, 6\] float16"):
        GroupedWeights(codes, scales, scales[:3], 8)
    with pytest.raises(ValueError, match=r"uint8 .* got \[4, 192\] int8, 8 bits"):
        GroupedWeights(codes.view(torch.int8), scales, None, 8)


def test_joined_outputs_are_those_of_the_parts() -> None:
    parts = [
        drawn_weights(3, 256, bits, size, has_minimums=has_minimums, seed=seed)
        for seed, (bits, size, has_minimums) in enumerate(
            [(4, 128, False), (8, 32, False), (4, 64, True), (8, 128, True), (4, 32, False)]  # type: ignore[list-item]
        )
    ]
    for some in (parts, parts[:2], parts[2:3], parts[::4]):
        joined = join_outputs(some)
        # The sums of the two forms are rounded differently.
        torch.testing.assert_close(dequantize(joined), torch.cat([dequantize(part) for part in some]))
    assert (joined.bits, joined.group_size, joined.minimums) == (4, 32, None)
    large = GroupedWeights(parts[1].codes, torch.full((3, 8), 1000.0).half(), None, 8)
    with pytest.raises(ValueError, match=r"scales up to 1000\.0 have minimums that float16 cannot hold"):
        join_outputs([large, parts[3]])


@needs_compiler
@BITS
@SIZES
@MINIMUMS
@pytest.mark.parametrize("outputs", [32, 37])
def test_lanes_hold_every_output(bits: Bits, group_size: int, has_minimums: bool, outputs: int) -> None:
    weights = drawn_weights(outputs, 256, bits, group_size, has_minimums=has_minimums)
    lanes = LaneWeights(weights)
    assert torch.equal(dequantize(lanes.by_rows()), dequantize(weights))
    assert lanes.nbytes == weights.nbytes * (-(-outputs // 32) * 32) // outputs
    ids = torch.tensor([outputs - 1, 0, 17, 0])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for arranged in (lanes, weights):
            found = grouped_embedding(ids.int(), arranged, dtype)  # as a table of tokens holds them
            torch.testing.assert_close(found, dequantize(weights)[ids].to(dtype))


def test_codes_that_begin_anywhere_are_arranged() -> None:
    weights = drawn_weights(16, 64, 8)
    apart = torch.cat((weights.codes.new_zeros(1), weights.codes.flatten()))[1:].view(16, 64)
    assert torch.equal(LaneWeights(weights._replace(codes=apart)).codes, LaneWeights(weights).codes)


@needs_compiler
@BITS
@SIZES
@MINIMUMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [(37, 384), (64, 1536)])
def test_native_equals_reference(
    bits: Bits, group_size: int, has_minimums: bool, dtype: torch.dtype, num_rows: int, outputs: int, inputs: int
) -> None:  # fmt: skip
    weights = drawn_weights(outputs, inputs, bits, group_size, has_minimums=has_minimums)
    x = drawn(num_rows, inputs + 8, seed=2).to(dtype)[:, :inputs]
    bias = drawn(outputs, seed=3).to(dtype) if outputs % 2 else None
    found = grouped_linear_native(x, LaneWeights(weights), bias)
    expected = grouped_linear_reference(round_inputs(x), weights, bias).to(dtype)
    assert_close("product", expected, found, RATIO[dtype])


@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 4, 19])
def test_threads_change_nothing(num_rows: int) -> None:
    weights, x = LaneWeights(drawn_weights(300, 128, 4)), drawn(num_rows, 128)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = grouped_linear_native(x, weights, None)
        torch.set_num_threads(2)
        assert torch.equal(grouped_linear_native(x, weights, None), alone)
    finally:
        torch.set_num_threads(before)


@needs_compiler
@BITS
@MINIMUMS
def test_largest_codes_and_inputs_do_not_overflow(bits: Bits, has_minimums: bool) -> None:
    weights = drawn_weights(16, 256, bits, has_minimums=has_minimums)
    ones = torch.ones_like(weights.scales)
    for code in (0, 255):
        weights = weights._replace(codes=torch.full_like(weights.codes, code), scales=ones)
        weights = weights._replace(minimums=ones if has_minimums else None)
        for sign in (1.0, -1.0):
            x = torch.full((3, 256), sign * 127)
            found = grouped_linear_native(x, LaneWeights(weights), None)
            assert torch.equal(found, grouped_linear_reference(x, weights, None))


@needs_compiler
@BITS
@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_number_changes_no_other(bits: Bits, is_native: bool, odd: float) -> None:
    weights: ArrangedWeights = quantize_groups(drawn(40, 64), bits)
    weights = LaneWeights(weights) if is_native else weights  # type: ignore[arg-type]
    x = drawn(5, 64)
    expected = grouped_linear(x, weights)
    x[2, 7] = odd
    found = grouped_linear(x, weights)
    # An infinite input times a weight of 0 is no number; times others, the reference has infinity.
    assert not found[2].isfinite().any()
    assert not is_native or found[2].isnan().all()
    kept = [0, 1, 3, 4]
    torch.testing.assert_close(found[kept], expected[kept])


@pytest.mark.parametrize("least", [0.0, 1e-45, 1e-37])
def test_inputs_too_small_for_a_scale(least: float) -> None:
    weights = arrange(quantize_groups(drawn(20, 64), 4), torch.float32)
    x = torch.full((2, 64), least)
    assert torch.equal(round_inputs(torch.zeros(2, 64)), torch.zeros(2, 64))
    assert grouped_linear(x, weights).abs().max() <= 1e4 * least


@needs_compiler
def test_float16_and_other_environments_need_no_c(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = quantize_groups(drawn(20, 64), 8), drawn(2, 64).half()
    expected = grouped_linear_reference(x, weights, None)
    assert torch.equal(grouped_linear(x, arrange(weights, x.dtype)), expected)
    monkeypatch.setenv("TIDEWHEEL_KERNELS", "grouped_linear=reference")
    assert arrange(weights, torch.float32) is weights


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="x has 32 inputs, and the weights 64"):
        grouped_linear(drawn(1, 32), quantize_groups(drawn(4, 64), 8))
