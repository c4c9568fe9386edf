"""Arrays to inputs of any module of tritonclient."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from tritonclient.utils import np_to_triton_dtype

Array = np.ndarray[Any, Any]


def texts(*rows: Any) -> Array:
    return np.array(rows, dtype=np.object_)


def make_inputs(module: ModuleType, arrays: dict[str, Array]) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        inputs.append(module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs
