"""Layers of the native decoder: plain classes, without a module tree on the hot path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear, pad

from tidewheel_kernels import silu_and_mul

# Rows that oneDNN optimises its layout for: the layout for 16 and more is also better for fewer.
PACKED_ROWS = 64
FINELY_PADDED_ROWS = 64


class Linear:
    """``x @ weight.T + bias``.

    On a CPU `pack` stores oneDNN's blocked layout: up to three times as fast as plain GEMM for a decode step's few
    rows.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        if self.weight.device.type == "cpu" and can_pack(self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS)
            self.weight = torch.empty(0, dtype=self.weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return linear(x, self.weight, self.bias)
        num_rows = x.shape[0]
        extra = padded_rows(num_rows) - num_rows
        if extra:
            x = pad(x, (0, 0, 0, extra))
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return packed[:num_rows]

    def destinations(self, names: Sequence[str], sizes: Sequence[int]) -> dict[str, torch.Tensor]:
        """Map names of parts of a fused weight, and bias, to views."""
        parts = {
            f"{name}.weight": part for name, part in zip(names, torch.split(self.weight, list(sizes)), strict=True)
        }
        if self.bias is not None:
            biases = torch.split(self.bias, list(sizes))
            parts |= {f"{name}.bias": part for name, part in zip(names, biases, strict=True)}
        return parts


def padded_rows(num_rows: int) -> int:
    """Round up: by at most one row for a decode step, by a quarter for more.

    oneDNN keeps half a megabyte for each of up to a thousand row counts, so unrounded counts would take hundreds of
    megabytes. Time grows with the rows.
    """
    steps = 32 if num_rows <= FINELY_PADDED_ROWS else 8
    step = max(1, (1 << max(num_rows - 1, 0).bit_length()) // steps)
    return -(-num_rows // step) * step


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether torch and CPU have oneDNN's packed linear layer for `dtype`."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up in one matrix."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)
        self._intermediate_size = intermediate_size
        self._hidden_size = hidden_size

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_and_mul(self.gate_up(x)))

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()

    def destinations(self, prefix: str) -> dict[str, torch.Tensor]:
        gate_up = (f"{prefix}gate_proj", f"{prefix}up_proj")
        return {
            **self.gate_up.destinations(gate_up, (self._intermediate_size,) * 2),
            **self.down.destinations((f"{prefix}down_proj",), (self._hidden_size,)),
        }
