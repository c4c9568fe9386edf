"""The C kernel as compiled for other processors; AMX is emulated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.kernels.grouped_weights import BITS, MINIMUMS, drawn, drawn_weights
from support.kernels.kernel_harness import RATIO, assert_close, needs_compiler
from support.kernels.processors import PROCESSORS, compiled_for
from tidewheel_kernels import grouped_linear as package
from tidewheel_kernels.grouped_linear import LaneWeights, grouped_linear_native
from tidewheel_kernels.grouped_linear.reference import Bits, grouped_linear_reference, round_inputs

pytestmark = needs_compiler


@pytest.fixture(scope="module", params=PROCESSORS)
def _processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_for(request.param, tmp_path_factory.mktemp("compiler"), package._grouped_linear):
        yield


@pytest.mark.usefixtures("_processor")
@BITS
@MINIMUMS
@pytest.mark.parametrize("num_rows", [1, 70])
@pytest.mark.parametrize("group_size", [32, 128])
def test_as_the_reference(bits: Bits, has_minimums: bool, num_rows: int, group_size: int) -> None:
    weights = drawn_weights(75, 384, bits, group_size, has_minimums=has_minimums)
    x = drawn(num_rows, 384)
    found = grouped_linear_native(x, LaneWeights(weights), None)
    assert_close("product", grouped_linear_reference(round_inputs(x), weights, None), found, RATIO[torch.float32])


@pytest.mark.usefixtures("_processor")
@BITS
@MINIMUMS
def test_a_row_is_the_same_with_any_number_beside_it(bits: Bits, has_minimums: bool) -> None:
    weights = LaneWeights(drawn_weights(75, 384, bits, has_minimums=has_minimums))
    x = drawn(10, 384)
    alone = torch.cat([grouped_linear_native(row, weights, None) for row in x.split(1)])
    for num_rows in range(2, 11):
        assert torch.equal(grouped_linear_native(x[:num_rows], weights, None), alone[:num_rows]), num_rows
