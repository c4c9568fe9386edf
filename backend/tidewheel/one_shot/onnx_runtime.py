"""ONNX models by ONNX Runtime, on a CPU or by CUDA. Libraries of custom operators are never loaded."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import Adapter
from tidewheel.one_shot.signature import Arrays, Signature, TensorSpec, tensor_spec

_CUDA = "CUDAExecutionProvider"
_QUIET = 3  # errors alone
_KINDS = {"float": "float32", "double": "float64", "string": "object"}  # others have numpy's names
_decoded = np.vectorize(bytes.decode, otypes=[np.object_])


def load(path: Path, config: EngineConfig) -> Adapter:
    """Load a model; its external data must lie below its folder."""
    has_cuda = _CUDA in onnxruntime.get_available_providers()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(f"device is cuda, and this onnxruntime has no {_CUDA}: pip install onnxruntime-gpu")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _QUIET
    options.intra_op_num_threads = num_threads = config.num_threads or len(os.sched_getaffinity(0))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other engines need the cores
    use_cuda = has_cuda and config.device != "cpu"
    session = onnxruntime.InferenceSession(str(path), options, [_CUDA] * use_cuda + ["CPUExecutionProvider"])

    def spec(tensor: Any) -> TensorSpec:
        kind = tensor.type.removeprefix("tensor(").removesuffix(")")
        return tensor_spec(path, tensor.name, _KINDS.get(kind, kind), tensor.shape)

    signature = Signature(tuple(map(spec, session.get_inputs())), tuple(map(spec, session.get_outputs())))
    outputs = [each.name for each in signature.outputs]

    def run(inputs: Arrays) -> Arrays:
        feeds = {name: _decoded(array) if array.dtype == np.object_ else array for name, array in inputs.items()}
        return dict(zip(outputs, session.run(outputs, feeds), strict=True))

    return Adapter(signature, "cuda" if use_cuda else f"cpu ({num_threads} threads)", path.stat().st_size, run)
