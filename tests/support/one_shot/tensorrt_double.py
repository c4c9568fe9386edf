"""Double of the part of TensorRT's Python API that the adapter calls; a plan sums x [n, 4] by halves to y [n, 2]."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

PLAN = b"plan"
MOST = 8  # rows, by the profile
__version__ = "10.9.0"


class Logger:
    ERROR = 1

    def __init__(self, severity: int) -> None:
        assert severity == self.ERROR


class TensorIOMode:
    INPUT, OUTPUT = 1, 2


def _array(address: int, shape: Sequence[int]) -> np.ndarray:
    count = int(np.prod(shape))
    return np.frombuffer((ctypes.c_float * count).from_address(address), np.float32).reshape(shape)


class Context:
    def __init__(self) -> None:
        self._addresses: dict[str, int] = {}
        self._rows = 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._rows = shape[0]
        return self._rows <= MOST

    def get_tensor_shape(self, name: str) -> tuple[int, int]:
        return (self._rows, 2 if name == "y" else 4)

    def set_tensor_address(self, name: str, address: int) -> None:
        self._addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        x = _array(self._addresses["x"], (self._rows, 4))
        _array(self._addresses["y"], (self._rows, 2))[:] = x.reshape(-1, 2, 2).sum(axis=2)
        return bool((x >= 0).all())


class Engine:
    num_io_tensors = 2

    def __init__(self, dtype: str) -> None:
        self._dtype = SimpleNamespace(name=dtype)

    def get_tensor_name(self, index: int) -> str:
        return "yx"[index]

    def get_tensor_mode(self, name: str) -> int:
        return TensorIOMode.INPUT if name == "x" else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name: str) -> tuple[int, int]:
        return (-1, 2 if name == "y" else 4)

    def get_tensor_dtype(self, name: str) -> SimpleNamespace:
        return self._dtype

    def create_execution_context(self) -> Context:
        return Context()


class Runtime:
    def __init__(self, logger: Logger) -> None:
        assert isinstance(logger, Logger)

    def deserialize_cuda_engine(self, plan: bytes) -> Engine | None:
        return Engine(plan.removeprefix(PLAN).decode() or "FLOAT") if plan.startswith(PLAN) else None
