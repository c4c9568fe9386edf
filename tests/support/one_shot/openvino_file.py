"""OpenVINO IR of y = relu(x · w) and n + 1, by the library's own operators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino
import openvino.opset13 as ops


def save(folder: Path) -> Path:
    x = ops.parameter([-1, 4], np.float32, name="x")
    x.output(0).set_names({"x"})
    y = ops.relu(ops.matmul(x, np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2), False, False))
    y.output(0).set_names({"y"})
    n = ops.parameter([], np.int64, name="n")
    model = openvino.Model([y, ops.add(n, np.int64(1))], [x, n], "scorer")
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)
    return folder / "model.xml"
