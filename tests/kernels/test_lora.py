"""Adapters of many requests in one step: groups of tokens, and the products of each implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch

from support.kernels.kernel_harness import RATIO, assert_close, needs_compiler
from support.kernels.lora_stacks import drawn_stack, fill, grouped
from support.kernels.processors import PROCESSORS, compiled_for
from tidewheel_kernels.lora import (
    LoraGroups,
    LoraSizes,
    LoraStack,
    add_lora,
    cpu,
    group_tokens,
    lora_stack,
)
from tidewheel_kernels.lora.cpu import _bound, add_lora_native
from tidewheel_kernels.lora.reference import add_lora_reference
from tidewheel_kernels.lora.stacks import HostLoraStack, StaticLoraStack
from tidewheel_kernels.lora.triton_kernels import add_lora as add_lora_triton

# Inputs and outputs of the parts: a fused layer, a layer of one part with splits on a GPU, and odd sizes.
LAYERS = {"fused": (96, (70, 33, 16)), "one part": (1200, (150,)), "odd": (31, (5, 130))}
EACH_LAYER = pytest.mark.parametrize(("in_features", "part_sizes"), LAYERS.values(), ids=LAYERS)
UNEVEN = (1, 2, 3, 5, 8, 16, 33, 64, 256)
SLOTS = [3, -1, 0, 0, 8, -1, *[4] * 37, 5, 2, 1, 3, 6, 7, -1, 8]


class Implementation(NamedTuple):
    add: Callable[[torch.Tensor, torch.Tensor, LoraStack, LoraGroups], None]
    stack: type[LoraStack]
    dtype: torch.dtype
    device: str


IMPLEMENTATIONS = {
    f"{name} {str(dtype).removeprefix('torch.')}": (name, dtype)
    for name, dtypes in {
        "native": (torch.float32, torch.bfloat16),
        "reference": (torch.float32, torch.bfloat16),
        "triton": (torch.float32, torch.float16, torch.bfloat16),
    }.items()
    for dtype in dtypes
}


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, device: str) -> Implementation:
    name, dtype = request.param
    if name == "native":
        return Implementation(add_lora_native, HostLoraStack, dtype, "cpu")
    if name == "reference":
        return Implementation(add_lora_reference, HostLoraStack, dtype, "cpu")
    if dtype == torch.bfloat16:
        request.getfixturevalue("exact_rows")  # the interpreter's own products are of bits
    return Implementation(add_lora_triton, StaticLoraStack, dtype, device)


def uneven_ranks(num_parts: int) -> list[list[int]]:
    """Return ranks by slot and part; some parts have no adapter."""
    return [[0 if (slot + part) % 4 == 3 else rank for part in range(num_parts)] for slot, rank in enumerate(UNEVEN)]


def drawn(num_rows: int, width: int, of: Implementation, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).to(of.device, of.dtype)


def expected(out: torch.Tensor, x: torch.Tensor, stack: LoraStack, slots: list[int]) -> torch.Tensor:
    """Return ``out + B (A x)`` in float64, token by token."""
    rows = []
    for row, inputs, slot in zip(out.double(), x.double(), slots, strict=True):
        deltas = [
            torch.zeros(size, dtype=torch.float64, device=x.device)
            if part is None
            else part.b.double() @ (part.a.double() @ inputs)
            for part, size in zip(stack.matrices(slot), stack.sizes.part_sizes, strict=True)
        ]
        rows.append(row + torch.cat(deltas) if slot >= 0 else row)
    return torch.stack(rows).to(out.dtype)


def test_too_few_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="4 tokens of 3 adapters need 3 tiles, got 2"):
        group_tokens(np.array([0, 1, -1, 5, 0], dtype=np.int32), 2)


@needs_compiler
@EACH_LAYER
def test_as_token_by_token(implementation: Implementation, in_features: int, part_sizes: tuple[int, ...]) -> None:
    of = implementation
    stack = drawn_stack(of.stack, in_features, part_sizes, uneven_ranks(len(part_sizes)), of.dtype, of.device)
    # Rows of a wider tensor, as of a fused layer.
    x = drawn(len(SLOTS), in_features + 3, of)[:, :in_features]
    out = drawn(len(SLOTS), sum(part_sizes) + 5, of, 1)[:, : sum(part_sizes)]
    before = out.clone()
    of.add(out, x, stack, grouped(SLOTS, of.device))
    assert_close("product", expected(before, x, stack, SLOTS), out, RATIO[of.dtype])
    is_base = torch.tensor(SLOTS, device=of.device) < 0
    assert torch.equal(out[is_base], before[is_base])


@needs_compiler
@EACH_LAYER
@pytest.mark.usefixtures("exact_rows")
def test_a_row_does_not_depend_on_its_neighbours(
    implementation: Implementation, in_features: int, part_sizes: tuple[int, ...]
) -> None:
    of = implementation
    if of.add is add_lora_reference:
        pytest.skip("torch orders sums by the number of rows")
    stack = drawn_stack(of.stack, in_features, part_sizes, uneven_ranks(len(part_sizes)), of.dtype, of.device)
    x, before = drawn(len(SLOTS), in_features, of), drawn(len(SLOTS), sum(part_sizes), of, 1)
    together = before.clone()
    of.add(together, x, stack, grouped(SLOTS, of.device))
    for chosen in ([0], [7, 8], [43, 6, 20, 9], list(range(5, 30))):
        out = before[chosen]
        of.add(out, x[chosen], stack, grouped([SLOTS[row] for row in chosen], of.device))
        assert torch.equal(out, together[chosen]), chosen
    dirty = x.clone()
    dirty[10] = float("nan")
    out = before.clone()
    of.add(out, dirty, stack, grouped(SLOTS, of.device))
    assert out[10].isnan().any()
    others = [row for row in range(len(SLOTS)) if row != 10]
    assert torch.equal(out[others], together[others])


@needs_compiler
def test_a_slot_has_what_was_set_last(implementation: Implementation) -> None:
    of = implementation
    in_features, part_sizes = LAYERS["fused"]
    stack = drawn_stack(of.stack, in_features, part_sizes, [[16, 16, 16]], of.dtype, of.device)
    x, before = drawn(3, in_features, of), drawn(3, sum(part_sizes), of, 1)
    for ranks in ([3, 0, 16], [0, 9, 1], [0, 0, 0]):
        fill(stack, [ranks], seed=sum(ranks))
        assert [0 if part is None else len(part.a) for part in stack.matrices(0)] == ranks
        out = before.clone()
        of.add(out, x, stack, grouped([0, -1, 0], of.device))
        assert_close("product", expected(before, x, stack, [0, -1, 0]), out, RATIO[of.dtype])
        for first, last, rank in ((0, 70, ranks[0]), (70, 103, ranks[1]), (103, 119, ranks[2])):
            assert torch.equal(out[0, first:last], before[0, first:last]) == (rank == 0)
    fill(stack, [[2, 2, 2]])
    stack.clear(0)
    out = before.clone()
    of.add(out, x, stack, grouped([0, 1, 0], of.device))  # slot 1 was never set
    assert torch.equal(out, before)


@needs_compiler
def test_nothing_to_do(implementation: Implementation) -> None:
    of = implementation
    stack = drawn_stack(of.stack, 31, (5, 130), uneven_ranks(2), of.dtype, of.device)
    out = drawn(4, 135, of)
    before = out.clone()
    of.add(out, drawn(4, 31, of), stack, grouped([-1] * 4, of.device))
    of.add(out[:0], drawn(0, 31, of), stack, grouped([], of.device, spare_tiles=0))
    assert torch.equal(out, before)


@pytest.fixture(scope="module", params=[name for name in PROCESSORS if name != "amx"])
def _processor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_for(request.param, tmp_path_factory.mktemp("compiler"), cpu._add_lora):
        yield


@needs_compiler
@pytest.mark.usefixtures("_processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EACH_LAYER
def test_other_processors(dtype: torch.dtype, in_features: int, part_sizes: tuple[int, ...]) -> None:
    of = Implementation(add_lora_native, HostLoraStack, dtype, "cpu")
    test_as_token_by_token(of, in_features, part_sizes)
    test_a_row_does_not_depend_on_its_neighbours(of, in_features, part_sizes)


@needs_compiler
def test_threads_change_nothing() -> None:
    of = Implementation(add_lora_native, HostLoraStack, torch.float32, "cpu")
    stack = drawn_stack(HostLoraStack, 96, (700,), uneven_ranks(1), of.dtype)
    x, before, threads = drawn(len(SLOTS), 96, of), drawn(len(SLOTS), 700, of), torch.get_num_threads()
    found = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(before.clone())
            add_lora_native(found[-1], x, stack, grouped(SLOTS))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_a_host_stack_copies_nothing_that_is_laid_out_for_it() -> None:
    stack = HostLoraStack(LoraSizes(8, (6, 4), 2, 3), torch.float32, torch.device("cpu"))
    a, b = torch.randn(8, 3), torch.randn(3, 6)
    stack.set(1, [(a.t(), b.t()), None])
    held = stack.matrices(1)[0]
    assert held is not None and (held.a.data_ptr(), held.b.data_ptr()) == (a.data_ptr(), b.data_ptr())
    assert stack.num_bytes == 0
    plain = [matrix.t().contiguous() for matrix in (a, b)]
    stack.set(0, [tuple(plain), None])
    other = stack.matrices(0)[0]
    assert other is not None
    for found, given in zip(other, plain, strict=True):
        assert torch.equal(found, given) and found.t().is_contiguous()


def test_a_static_stack_states_its_size_before_it_is_made() -> None:
    sizes = LoraSizes(8, (6, 4), 2, 3)
    planned = lora_stack(sizes, torch.bfloat16, torch.device("meta"))
    assert planned.num_bytes == 2 * (2 * 2 * 3 * 8 + 2 * 3 * 10) + 4 * 2 * 2
    assert StaticLoraStack(sizes, torch.bfloat16, torch.device("cpu")).num_bytes == planned.num_bytes


@pytest.mark.parametrize("kind", [HostLoraStack, StaticLoraStack])
def test_matrices_that_do_not_fit_are_refused(kind: type[LoraStack]) -> None:
    stack = kind(LoraSizes(8, (6, 4), 2, 3), torch.float32, torch.device("cpu"))
    a, b = torch.randn(3, 8), torch.randn(6, 3)
    with pytest.raises(ValueError, match="the layer has 2 parts, and the adapter 1"):
        stack.set(0, [(a, b)])
    for wrong in ((a, b[:4]), (a[:2], b), (a[:, :7], b), (a.double(), b), (torch.randn(4, 8), torch.randn(6, 4))):
        with pytest.raises(ValueError, match=r"do not fit 8 inputs, 6 outputs, torch\.float32 and ranks up to 3"):
            stack.set(0, [wrong, None])
    assert stack.matrices(0) == [None, None]
    with pytest.raises(ValueError, match="a layer has up to 3 parts, got 4"):
        kind(LoraSizes(8, (1, 1, 1, 1), 2, 3), torch.float32, torch.device("cpu"))


@needs_compiler
def test_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Implementation(add_lora, HostLoraStack, torch.float32, "cpu")
    stack = lora_stack(LoraSizes(8, (6, 4), 2, 3), torch.float32, torch.device("cpu"))
    assert isinstance(stack, HostLoraStack)
    fill(stack, [[2, 0], [3, 1]])
    x, before, slots = drawn(3, 8, of), drawn(3, 10, of, 1), [1, -1, 0]
    out = before.clone()
    add_lora(out, x, stack, grouped(slots))
    torch.testing.assert_close(out, expected(before, x, stack, slots))
    for wrong in ((out[:2], x), (out[:, :9], x), (out, x[:, :7]), (out.double(), x)):
        with pytest.raises(ValueError, match="do not fit adapters of 8 inputs and 10 outputs"):
            add_lora(*wrong, stack, grouped(slots))
    with pytest.raises(TypeError, match=r"a native kernel for torch\.bfloat16 was given torch\.float32"):
        add_lora_native(out.bfloat16(), x.bfloat16(), stack, grouped(slots))
    with pytest.raises(TypeError, match="reads a HostLoraStack"):
        add_lora_native(out, x, StaticLoraStack(stack.sizes, stack.dtype, stack.device), grouped(slots))
    with pytest.raises(TypeError, match="read a StaticLoraStack"):
        add_lora_triton(out, x, stack, grouped(slots))
    monkeypatch.setenv("TIDEWHEEL_KERNELS", "add_lora=reference")
    assert isinstance(lora_stack(stack.sizes, torch.float32, torch.device("cpu")), HostLoraStack)


def test_threads_with_the_same_groups_have_rooms_of_their_own_for_products() -> None:
    groups = grouped([0, 0, -1, 0])
    own = _bound(groups, 8)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(_bound, groups, 8).result()
    assert own.products_address != other.products_address
    assert _bound(groups, 8) is own
