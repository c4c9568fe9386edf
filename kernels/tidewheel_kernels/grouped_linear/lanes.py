"""`GroupedWeights` for the C kernel: outputs side by side in a vector's lanes."""

from __future__ import annotations

import ctypes

import torch
from torch.nn.functional import pad

from tidewheel_kernels.grouped_linear.reference import Bits, GroupedWeights
from tidewheel_kernels.native.huge_pages import in_huge_pages

LANES = 32  # outputs side by side, on every processor
WORD_BYTES = 4  # of a lane


class _Matrix(ctypes.Structure):
    """C structure `Matrix` of grouped_linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "minimums")),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs", "group_size", "bits")),
    )


class LaneWeights:
    """Weights by blocks of `LANES` outputs, at addresses that the C kernel has."""

    def __init__(self, weights: GroupedWeights) -> None:
        codes = weights.codes.contiguous()
        codes = codes if codes.storage_offset() % WORD_BYTES == 0 else codes.clone()
        self.codes = _lanes(codes.view(torch.int32))  # [blocks, words of an output, LANES] int32
        self.minimums = None
        if weights.minimums is None:
            self.scales = _lanes(weights.scales)  # [blocks, groups, LANES] float16
        else:  # alternate, so that they are one stream
            both = _lanes(torch.stack((weights.scales, weights.minimums), dim=2).flatten(1))
            self.scales, self.minimums = both[:, ::2], both[:, 1::2]
        minimums = None if self.minimums is None else self.minimums.data_ptr()
        self.out_features, self.in_features = weights.out_features, weights.in_features
        self.group_size = weights.group_size
        self.bits: Bits = weights.bits
        self._matrix = _Matrix(
            self.codes.data_ptr(), self.scales.data_ptr(), minimums, self.out_features, self.in_features,
            self.group_size, self.bits,
        )  # fmt: skip
        self.address = ctypes.addressof(self._matrix)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.minimums) if part is not None)

    def outputs(self, ids: torch.Tensor) -> GroupedWeights:
        """Return the weights [len(ids), in_features] of the outputs `ids`."""
        at = (ids // LANES, slice(None), ids % LANES)
        minimums = None if self.minimums is None else self.minimums[at]
        return GroupedWeights(self.codes[at].view(torch.uint8), self.scales[at], minimums, self.bits)

    def by_rows(self) -> GroupedWeights:
        return self.outputs(torch.arange(self.out_features))


def _lanes(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [out_features, columns] as [blocks, columns, LANES]; the last block ends in zeros."""
    padded = pad(rows, (0, 0, 0, -rows.shape[0] % LANES))
    return in_huge_pages(padded.view(len(padded) // LANES, LANES, rows.shape[1]).transpose(1, 2))
