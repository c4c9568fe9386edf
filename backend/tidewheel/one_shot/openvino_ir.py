"""OpenVINO IR on a CPU, with the `.bin` file beside it. Extensions, which are native code, are never loaded."""

import os
from pathlib import Path
from typing import Any

import openvino

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import Adapter
from tidewheel.one_shot.signature import Arrays, Signature, TensorSpec, tensor_spec

_KINDS = {"f": "float", "i": "int", "u": "uint"}  # f32 is float32


def load(path: Path, config: EngineConfig) -> Adapter:
    if config.device == "cuda":
        raise ConfigError("device is cuda, and OpenVINO has no CUDA: set it to cpu, or serve the model as ONNX")
    num_threads = config.num_threads or len(os.sched_getaffinity(0))
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": num_threads}
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(str(path)), "CPU", properties)

    def spec(port: Any) -> TensorSpec:
        kind, shape = port.get_element_type().get_type_name(), port.get_partial_shape()
        dtype = "bool" if kind == "boolean" else _KINDS.get(kind[0], kind[0]) + kind[1:]
        sizes = (None if each.is_dynamic else each.get_length() for each in shape)  # raises for any number of them
        name = port.get_any_name() if port.get_names() else port.get_node().get_friendly_name()
        return tensor_spec(path, name, dtype, sizes)

    signature = Signature(tuple(map(spec, compiled.inputs)), tuple(map(spec, compiled.outputs)))

    def run(inputs: Arrays) -> Arrays:
        results = compiled([inputs[each.name] for each in signature.inputs], share_inputs=False)
        return {each.name: results[index] for index, each in enumerate(signature.outputs)}

    return Adapter(signature, f"cpu ({num_threads} threads)", 0, run)
