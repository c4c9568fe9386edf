"""Adapters' matrices of one linear layer, by slot."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

MAX_PARTS = 3  # query, key and value


class LoraMatrices(NamedTuple):
    """Adapter's part of a layer: ``x @ a.T @ b.T`` is added to the part's outputs."""

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [outputs of the part, rank], with the adapter's scale


class LoraSizes(NamedTuple):
    """Sizes of a linear layer, and bounds of its adapters."""

    in_features: int
    part_sizes: tuple[int, ...]  # outputs of each part, in order
    max_loras: int
    max_rank: int

    @property
    def out_features(self) -> int:
        return sum(self.part_sizes)


class LoraStack(ABC):
    """Matrices of `max_loras` adapters of one layer. A slot that was not set has none."""

    num_bytes = 0  # that the stack allocated; a host stack refers to the adapters' own tensors

    def __init__(self, sizes: LoraSizes, dtype: torch.dtype, device: torch.device) -> None:
        if not 0 < len(sizes.part_sizes) <= MAX_PARTS:
            raise ValueError(f"a layer has up to {MAX_PARTS} parts, got {len(sizes.part_sizes)}")
        self.sizes, self.dtype, self.device = sizes, dtype, device
        self.width = len(sizes.part_sizes) * sizes.max_rank  # elements of one token's `a @ x` of all parts

    def set(self, slot: int, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        """Give a slot an adapter's `LoraMatrices` by part, None where it has none.

        Tensors are on the host (pinned: a copy to the device does not wait) or on the device. A host stack keeps
        tensors whose transposes are contiguous, as its kernel reads them, and copies others.
        """
        sizes = self.sizes
        if len(parts) != len(sizes.part_sizes):
            raise ValueError(f"the layer has {len(sizes.part_sizes)} parts, and the adapter {len(parts)}")
        for part, num_outputs in zip(parts, sizes.part_sizes, strict=True):
            if part is not None:
                self._check(LoraMatrices(*part), num_outputs)
        self._set(slot, [None if part is None else LoraMatrices(*part) for part in parts])

    def _check(self, part: LoraMatrices, num_outputs: int) -> None:
        rank, sizes = part.a.shape[0], self.sizes
        shapes = (part.a.shape, part.b.shape) == ((rank, sizes.in_features), (num_outputs, rank))
        if not shapes or not 0 < rank <= sizes.max_rank or {part.a.dtype, part.b.dtype} != {self.dtype}:
            raise ValueError(
                f"an adapter's matrices {list(part.a.shape)} and {list(part.b.shape)} in {part.a.dtype} do not fit "
                f"{sizes.in_features} inputs, {num_outputs} outputs, {self.dtype} and ranks up to {sizes.max_rank}"
            )

    def clear(self, slot: int) -> None:
        """Let go of a slot's adapter."""
        self._set(slot, [None] * len(self.sizes.part_sizes))

    @abstractmethod
    def _set(self, slot: int, parts: Sequence[LoraMatrices | None]) -> None: ...

    @abstractmethod
    def matrices(self, slot: int) -> Sequence[LoraMatrices | None]:
        """Return a slot's matrices by part."""


class _Part(ctypes.Structure):
    """C structure `LoraPart` of lora.h."""

    _fields_ = (("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("rank", ctypes.c_int64))


class _Stack(ctypes.Structure):
    """C structure `LoraStack` of lora.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "ends")),
        *((name, ctypes.c_int64) for name in ("num_parts", "num_inputs", "max_rank")),
    )


class HostLoraStack(LoraStack):
    """Stack of the adapters' own tensors, at addresses that C kernels have."""

    def __init__(self, sizes: LoraSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(sizes, dtype, device)
        num_parts = len(sizes.part_sizes)
        nothing: list[LoraMatrices | None] = [None] * num_parts
        self._slots = [nothing for _ in range(sizes.max_loras)]
        self._parts = (_Part * (sizes.max_loras * num_parts))()
        self._ends = (ctypes.c_int64 * num_parts)(*accumulate(sizes.part_sizes))
        self._stack = _Stack(
            ctypes.addressof(self._parts), ctypes.addressof(self._ends), num_parts, sizes.in_features, sizes.max_rank
        )
        self.address = ctypes.addressof(self._stack)

    def _set(self, slot: int, parts: Sequence[LoraMatrices | None]) -> None:
        self._slots[slot] = arranged = [None if part is None else self._arranged(part) for part in parts]
        for place, part in enumerate(arranged, slot * len(parts)):
            self._parts[place] = _Part() if part is None else _Part(part.a.data_ptr(), part.b.data_ptr(), len(part.a))

    def _arranged(self, part: LoraMatrices) -> LoraMatrices:
        return LoraMatrices(*(tensor.to(self.device).t().contiguous().t() for tensor in part))

    def matrices(self, slot: int) -> Sequence[LoraMatrices | None]:
        return self._slots[slot]


class StaticLoraStack(LoraStack):
    """Stack of tensors that never move, for CUDA graphs: adapters are copied to their slots."""

    def __init__(self, sizes: LoraSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(sizes, dtype, device)
        slots, num_parts = sizes.max_loras, len(sizes.part_sizes)
        # Ranks past an adapter's own are never read.
        self.a = torch.empty(slots, num_parts, sizes.max_rank, sizes.in_features, dtype=dtype, device=device)
        self.b = torch.empty(slots, sizes.max_rank, sizes.out_features, dtype=dtype, device=device)
        self.ranks = torch.zeros(slots, num_parts, dtype=torch.int32, device=device)
        self.num_bytes = sum(tensor.nbytes for tensor in (self.a, self.b, self.ranks))
        self._ranks = [[0] * num_parts for _ in range(slots)]

    def _set(self, slot: int, parts: Sequence[LoraMatrices | None]) -> None:
        self._ranks[slot] = [0 if part is None else len(part.a) for part in parts]
        for index, (part, to) in enumerate(zip(parts, self._places(slot), strict=True)):
            self.ranks[slot, index].fill_(self._ranks[slot][index])
            if part is not None:
                to.a.copy_(part.a, non_blocking=True)
                to.b.copy_(part.b.to(self.device, non_blocking=True))

    def _places(self, slot: int) -> list[LoraMatrices]:
        columns = torch.split(self.b[slot], list(self.sizes.part_sizes), dim=1)
        return [
            LoraMatrices(self.a[slot, part, :rank], columns[part][:rank].t())
            for part, rank in enumerate(self._ranks[slot])
        ]

    def matrices(self, slot: int) -> Sequence[LoraMatrices | None]:
        return [part if len(part.a) else None for part in self._places(slot)]
