"""TensorRT plans. Unproven: written against a double of the Python API of TensorRT 10, and never run on a GPU."""

from pathlib import Path

import numpy as np
import tensorrt
import torch

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import Adapter
from tidewheel.one_shot.signature import DTYPES, Arrays, Signature, TensorSpec, tensor_spec

_DEVICE = "cuda"
_KINDS = {"FLOAT": "float32", "HALF": "float16"}  # others have numpy's names


def load(path: Path, config: EngineConfig) -> Adapter:
    """Load a plan, which must be built for this GPU by this version of TensorRT."""
    if config.device == "cpu" or not torch.cuda.is_available():
        raise ConfigError(f"{path} needs a GPU, and torch sees none, or device is cpu: serve the model as ONNX")
    runtime = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.ERROR))  # says why in the engine's log
    engine = runtime.deserialize_cuda_engine(path.read_bytes())  # code in a plan is refused by default
    context = engine and engine.create_execution_context()
    if context is None:
        found = f"TensorRT {tensorrt.__version__} and the memory of {torch.cuda.get_device_name()}"
        raise ConfigError(f"{path} does not fit {found}: build it here")

    def spec(name: str) -> TensorSpec:
        kind, shape = engine.get_tensor_dtype(name).name, engine.get_tensor_shape(name)
        sizes = (None if size < 0 else int(size) for size in shape)
        return tensor_spec(path, name, _KINDS.get(kind, kind.lower()), sizes)

    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    is_input = {name: engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT for name in names}
    inputs, outputs = (tuple(spec(name) for name in names if is_input[name] is kind) for kind in (True, False))

    def run(feeds: Arrays) -> Arrays:
        tensors = {name: torch.tensor(array, device=_DEVICE) for name, array in feeds.items()}
        for name, tensor in tensors.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise ValueError(f"{name} {list(tensor.shape)} is outside the plan's profile")
        for each in outputs:
            dtype = getattr(torch, np.dtype(DTYPES[each.dtype]).name)
            tensors[each.name] = torch.empty(tuple(context.get_tensor_shape(each.name)), dtype=dtype, device=_DEVICE)
        for name, tensor in tensors.items():
            context.set_tensor_address(name, tensor.data_ptr())
        stream = torch.cuda.current_stream()
        if not context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError("TensorRT failed, and says why in the log")
        stream.synchronize()
        return {each.name: tensors[each.name].cpu().numpy() for each in outputs}

    return Adapter(Signature(inputs, outputs), _DEVICE, path.stat().st_size, run)
