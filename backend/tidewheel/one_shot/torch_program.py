"""TorchScript, of which `torch.jit.load` unpickles no Python; and what adapters of torch share."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import Adapter, converted
from tidewheel.one_shot.signature import Arrays, Signature, TensorSpec

Call = Callable[[Sequence[torch.Tensor]], object]
_REACHES = re.compile(r"\btorch\.(save|from_file)\b|\bops\.debugprims\b|\brpc_(a?sync|remote)\b")
_EXAMPLE = '{"inputs": [["x", "FP32", ["batch", 4]]], "outputs": [["y", "FP32", ["batch", 2]]]}'


class ProgramOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors of files without shapes, in the model's order."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    allow_native_code: bool = False  # load the shared object of an AOTInductor package into the engine

    def signature(self, path: Path, names: Sequence[str]) -> Signature:
        """Return the signature; `names`: inputs of the file. Raise `ConfigError`."""
        if not self.inputs or not self.outputs or [spec.name for spec in self.inputs] != names:
            wanted = f"{_EXAMPLE}, with the inputs {', '.join(names) or 'in their order'}"
            raise ConfigError(f"{path} does not say its shapes: set adapter_options, as in {wanted}")
        return Signature(self.inputs, self.outputs)


def take_device(config: EngineConfig) -> torch.device:
    """Return the device; set torch's threads. Raise `ConfigError`."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, and torch sees no GPU: set device to cpu, or install torch for CUDA")
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def program(path: Path, call: Call, signature: Signature, device: torch.device, module: Any = None) -> Adapter:
    """Return a model whose `call` takes the inputs in order and returns outputs in any nesting."""
    buffers = [] if module is None else list(module.buffers())

    def run(inputs: Arrays) -> Arrays:
        versions = [buffer._version for buffer in buffers]
        with torch.inference_mode():  # a program may write to its inputs, so they are copies
            tensors = [torch.tensor(inputs[spec.name], device=device) for spec in signature.inputs]
            outputs = pytree.tree_leaves(call(tensors))
        if versions != [buffer._version for buffer in buffers]:
            raise ValueError("the program changes its buffers, which clients would share: make them inputs")
        return {spec.name: each.cpu().numpy() for spec, each in zip(signature.outputs, outputs, strict=True)}

    return Adapter(signature, f"{device} ({torch.get_num_threads()} threads)", path.stat().st_size, run)


def load(path: Path, config: EngineConfig) -> Adapter:
    """Load a `.pt` file that `torch.jit.save` wrote."""
    options, device = converted(config.adapter_options, "adapter_options", ProgramOptions), take_device(config)
    reader = torch._C.PyTorchFileReader(str(path))
    for name in reader.get_all_records():
        code = reader.get_record(name).decode() if name.startswith("code/") and name.endswith(".py") else ""
        if found := _REACHES.search(code):
            raise ConfigError(f"{path} calls {found[0]}, which reaches files or machines: it is not served")
    module = torch.jit.load(str(path), map_location=device).eval()  # type: ignore[no-untyped-call]
    graph = module.inlined_graph  # owns its nodes
    if kept := {node.s("name") for node in graph.findAllNodes("prim::SetAttr")}:
        raise ConfigError(f"{path} keeps {', '.join(kept)} from call to call, for all clients: make it an input")
    arguments = module.forward.schema.arguments[1:]
    num_taken = max(len(options.inputs), sum(not each.has_default_value() for each in arguments))
    signature = options.signature(path, [each.name for each in arguments[:num_taken]])
    return program(path, lambda tensors: module(*tensors), signature, device, module)
