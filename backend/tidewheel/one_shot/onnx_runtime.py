"""ONNX models by ONNX Runtime, on a CPU or by CUDA. Libraries of custom operators are never loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.signature import Array, Arrays, Signature, TensorSpec

_CUDA = "CUDAExecutionProvider"
_QUIET = 3  # errors alone
_DTYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float": "FP32", "double": "FP64",
    "string": "BYTES",
}  # fmt: skip


class OnnxModel:
    def __init__(self, session: Any, path: Path, device: str) -> None:
        self._session = session
        inputs, outputs = _specs(path, session.get_inputs()), _specs(path, session.get_outputs())
        self.signature = Signature(inputs, outputs)
        self.device = device
        self.weights_bytes = path.stat().st_size
        self._texts = {spec.name for spec in inputs if spec.dtype == "BYTES"}
        self._scalars = {each.name for each in session.get_inputs() if not each.shape}
        self._outputs = [spec.name for spec in outputs]

    def run(self, inputs: Arrays) -> Arrays:
        feeds = {name: self._feed(name, array) for name, array in inputs.items()}
        outputs = self._session.run(self._outputs, feeds)
        return {name: np.atleast_1d(array) for name, array in zip(self._outputs, outputs, strict=True)}

    def _feed(self, name: str, array: Array) -> Array:
        if name in self._texts:
            texts = [item.decode() for item in array.reshape(-1).tolist()]
            array = np.array(texts, np.object_).reshape(array.shape)
        return array.reshape(()) if name in self._scalars else array


def load(path: Path, config: EngineConfig) -> OnnxModel:
    """Load a model; its external data must lie below its folder. Raise `ConfigError`."""
    has_cuda = _CUDA in onnxruntime.get_available_providers()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(f"device is cuda, and this onnxruntime has no {_CUDA}: pip install onnxruntime-gpu")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _QUIET
    options.intra_op_num_threads = num_threads = config.num_threads or len(os.sched_getaffinity(0))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other engines need the cores
    use_cuda = has_cuda and config.device != "cpu"
    providers = [_CUDA] * use_cuda + ["CPUExecutionProvider"]
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers)
    except Exception as error:  # the library has a class for each cause
        raise ConfigError(f"{path} cannot be loaded by ONNX Runtime: {' '.join(str(error).split())}") from None
    return OnnxModel(session, path, "cuda" if use_cuda else f"cpu ({num_threads} threads)")


def _specs(path: Path, tensors: Iterable[Any]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(each.name, _dtype(path, each), _dims(each.name, each.shape)) for each in tensors)


def _dtype(path: Path, tensor: Any) -> str:
    dtype = _DTYPES.get(tensor.type.removeprefix("tensor(").removesuffix(")"))
    if dtype is None:
        raise ConfigError(f"{path}: {tensor.name} is {tensor.type}, and only tensors of numbers and texts are served")
    return dtype


def _dims(name: str, shape: Sequence[int | str | None]) -> tuple[int | str, ...]:
    """Return the dimensions, with names for unnamed ones. Triton has no scalars: they have one element."""
    return tuple(f"{name}.{axis}" if dim is None else dim for axis, dim in enumerate(shape)) or (1,)
