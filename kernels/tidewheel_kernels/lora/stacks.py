"""Adapters' matrices of one linear layer, by slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
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

    def set(self, slot: int, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        """Give a slot an adapter's `LoraMatrices` by part, None where it has none.

        Tensors are on the host (pinned: a copy to the device does not wait) or on the device. A host stack keeps
        them; it needs `a` contiguous and `b` the transpose of a contiguous [rank, outputs], and copies others.
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


class HostLoraStack(LoraStack):
    """Stack of the adapters' own tensors, at addresses that the C kernel has."""

    def __init__(self, sizes: LoraSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(sizes, dtype, device)
        nothing: list[LoraMatrices | None] = [None] * len(sizes.part_sizes)
        self._slots = [nothing for _ in range(sizes.max_loras)]

    def _set(self, slot: int, parts: Sequence[LoraMatrices | None]) -> None:
        self._slots[slot] = [None if part is None else self._arranged(part) for part in parts]

    def _arranged(self, part: LoraMatrices) -> LoraMatrices:
        a, b = (tensor.to(self.device) for tensor in part)
        return LoraMatrices(a.contiguous(), b.t().contiguous().t())

    def matrices(self, slot: int) -> Sequence[LoraMatrices | None]:
        return self._slots[slot]
