"""Small ONNX files: tests need no package that writes them."""

from __future__ import annotations

import numpy as np

from common.onnx_file import FLOAT, INT64, STRING, model, node, weights

__all__ = ["FLOAT", "INT64", "STRING", "looked_up", "model", "node", "scaled", "weights"]


def scaled(width: int = 4) -> bytes:
    """Return a model of y = log(x · w): x FP32 [batch, width], y FP32 [batch, 2], w[i] = [i, 1]."""
    w = np.stack([np.arange(width), np.ones(width)], 1).astype(np.float32)
    nodes = [node("MatMul", ["x", "w"], ["z"]), node("Log", ["z"], ["y"])]
    return model(nodes, [("x", FLOAT, ("batch", width))], [("y", FLOAT, ("batch", 2))], weights("w", w))


def looked_up() -> bytes:
    """Return a model that raises for indices above 3: rows [batch, length] of the table 10, 11, 12, 13."""
    table = np.arange(10, 14, dtype=np.float32)
    io = ("rows", INT64, ("batch", "length")), ("values", FLOAT, ("batch", "length"))
    return model([node("Gather", ["table", "rows"], ["values"])], io[:1], io[1:], weights("table", table))
