"""An adapter in plain numpy that remembers its batches."""

from __future__ import annotations

import numpy as np

from tidewheel.one_shot.signature import Arrays, Signature, TensorSpec

BAD, SLOW = -1.0, -2.0  # values of inputs


class FakeAdapter:
    """y [N, L] = sqrt(x [N, L]), n [N] = number of positive x; raises if x holds `BAD`."""

    device = "cpu"
    weights_bytes = 0

    def __init__(self, signature: Signature | None = None) -> None:
        self.signature = signature or Signature(
            (TensorSpec("x", "FP32", ("N", "L")),),
            (TensorSpec("y", "FP32", ("N", "L")), TensorSpec("n", "INT64", ("N",))),
        )
        self.shapes: list[tuple[int, ...]] = []

    def run(self, inputs: Arrays) -> Arrays:
        x = inputs["x"]
        self.shapes.append(x.shape)
        if (x == BAD).any():
            raise RuntimeError(f"bad value\nin {x.shape}")
        with np.errstate(invalid="ignore"):
            return {"y": np.sqrt(x), "n": (x > 0).sum(axis=1)}
