"""Parts of a model that the ranks of a group hold, and the operations by which they exchange results."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Collectives:
    """Operations that all ranks of a group call in the same order; here, of a group of one rank."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace `x` by its sum over all ranks."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, [num_ranks, *x.shape]."""
        return x.unsqueeze(0)

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace `x` by that of rank 0."""

    def limit(self, timeout_s: float) -> None:
        """Set how long an operation waits for other ranks."""


class TensorPart(NamedTuple):
    """Half-open range of a checkpoint tensor's outputs (axis 0) or inputs (axis 1)."""

    axis: int
    begin: int
    end: int


class Shard(NamedTuple):
    """One rank's share of a model; by default all of it."""

    rank: int = 0
    num_ranks: int = 1
    collectives: Collectives = Collectives()

    def count(self, total: int) -> int:
        """Return this rank's number of heads or features; several ranks hold the same one if there are too few."""
        return max(total // self.num_ranks, 1)

    def part(self, axis: int, total: int, unit: int) -> TensorPart:
        """Return this rank's range of `total` outputs or inputs, in units that ranks share if there are too few."""
        num_pieces = min(self.num_ranks, total // unit)
        size, index = total // num_pieces, self.rank * num_pieces // self.num_ranks
        return TensorPart(axis, index * size, (index + 1) * size)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, vocab_size] of which each rank holds a part."""
        return self.collectives.all_gather(part).transpose(0, 1).flatten(1)

    def from_leader(self, token_ids: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        """Return the tokens [len(rows)] int64 of rank 0; other ranks give None."""
        if token_ids is None:
            token_ids = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
        self.collectives.broadcast(token_ids)
        return token_ids

    def least(self, counts: Sequence[int], device: torch.device) -> list[int]:
        """Return the smallest value of any rank for each count."""
        least: list[int] = self.collectives.all_gather(torch.tensor(counts, device=device)).amin(0).tolist()
        return least
