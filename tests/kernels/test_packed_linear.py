from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear

from support.kernels.kernel_harness import RATIO, assert_close, needs_compiler
from support.kernels.processors import PROCESSORS, compiled_for
from tidewheel_kernels import packed_linear as package
from tidewheel_kernels.packed_linear import (
    FEW_ROWS,
    PackedWeights,
    can_pack,
    few_rows,
    packed_linear,
    packed_linear_cpu,
)

pytestmark = needs_compiler
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def packed(weight: torch.Tensor) -> PackedWeights:
    weights = PackedWeights(weight)
    if weights.address is None:
        pytest.skip("oneDNN's layout for this processor is not known")
    return weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("size", [(64, 96), (200, 576), (48, 1534), (2, 32)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 15, 17, 65])
def test_equals_the_product_with_plain_weights(
    rows: int, size: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    weight, x = drawn(*size, dtype=dtype), drawn(rows, size[1], dtype=dtype)
    bias = drawn(size[0], dtype=dtype) if has_bias else None
    expected = linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
    weights = packed(weight)
    assert_close("native", expected, packed_linear(x, weights, bias), RATIO[dtype])
    assert_close("oneDNN", expected, packed_linear_cpu(x, weights, bias), RATIO[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(200, 576), (48, 1534), (64, 4096)], ids=str)
def test_a_row_is_bitwise_the_same_beside_any_others(size: tuple[int, int], dtype: torch.dtype) -> None:
    weights, x = packed(drawn(*size, dtype=dtype)), drawn(FEW_ROWS[dtype], size[1], dtype=dtype)
    alone = torch.cat([packed_linear(row, weights) for row in x.split(1)])
    for rows in range(1, len(x) + 1):
        assert torch.equal(packed_linear(x[:rows], weights), alone[:rows]), rows


@pytest.fixture(scope="module", params=[name for name in PROCESSORS if name != "amx"])
def _processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        compiled_for(request.param, tmp_path_factory.mktemp("compiler"), package._packed_linear),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(package, "FEW_ROWS", dict.fromkeys(DTYPES, 64))
        yield


@pytest.mark.usefixtures("_processor")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [16, 48, 120, 200])
def test_other_processors(width: int, dtype: torch.dtype) -> None:
    weight, x = drawn(width, 1090, dtype=dtype), drawn(64, 1090, dtype=dtype)
    weights, expected = packed(weight), linear(x.float(), weight.float()).to(dtype)
    alone = torch.cat([packed_linear(row, weights) for row in x.split(1)])
    assert_close("native", expected, alone, RATIO[dtype])
    for rows in range(1, len(x) + 1):
        assert torch.equal(packed_linear(x[:rows], weights), alone[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_be_apart(dtype: torch.dtype) -> None:
    x, weight = drawn(3, 200, dtype=dtype)[:, 8:104], drawn(80, 96, dtype=dtype)
    expected = linear(x.float(), weight.float()).to(dtype)
    assert_close("native", expected, packed_linear(x, packed(weight), None), RATIO[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_a_layout_that_holds_the_weights_is_read(dtype: torch.dtype) -> None:
    weight = drawn(96, 64, dtype=dtype)
    weights = packed(weight)
    changed = weight.clone()
    changed[95, 63] += 1
    assert package._blocked(weight, weights.packed) is not None
    assert package._blocked(changed, weights.packed) is None


def test_an_unknown_layout_leaves_few_rows_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "BLOCKS", ())
    weight, x = drawn(64, 96, dtype=torch.float32), drawn(2, 96, dtype=torch.float32)
    weights = PackedWeights(weight)
    assert weights.address is None
    torch.testing.assert_close(packed_linear(x, weights, None), linear(x, weight))


def test_a_bias_of_another_dtype_is_refused() -> None:
    weights = packed(drawn(64, 96, dtype=torch.float32))
    with pytest.raises(TypeError, match="bfloat16"):
        packed_linear(drawn(1, 96, dtype=torch.float32), weights, drawn(64, dtype=torch.bfloat16))


def test_rows_of_another_width_are_refused() -> None:
    weights = packed(drawn(64, 96, dtype=torch.float32))
    with pytest.raises(ValueError, match="x has 80 inputs, and the weights 96"):
        packed_linear(drawn(1, 80, dtype=torch.float32), weights)


@pytest.mark.parametrize(
    ("features", "expected"),
    [((), (4, 16)), (("fma",), (64, 16)), (("fma", "avx512f", "avx512_bf16"), (64, 64)),
     (("fma", "avx512f", "avx512_bf16", "amx_bf16"), (64, 16))],
    ids=str,
)  # fmt: skip
def test_onednn_multiplies_more_rows_where_it_is_faster(features: tuple[str, ...], expected: tuple[int, int]) -> None:
    assert tuple(few_rows(features).values()) == expected


@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_without_c_kernels_onednn_multiplies_few_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_KERNELS", kind)
    weight, x = drawn(64, 96, dtype=torch.float32), drawn(2, 96, dtype=torch.float32)
    weights = PackedWeights(weight)
    assert weights.address is None
    torch.testing.assert_close(packed_linear(x, weights), linear(x, weight))
