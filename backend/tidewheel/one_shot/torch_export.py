"""Programs of `torch.export`, and packages of AOTInductor where the entry allows native code.

`torch.export.load` unpickles sample inputs and more: it is not called. Of a file's text, checked before, torch's
deserializer of graphs (2.13) passes shapes to sympy's `eval`, looks operators up below `torch`, and compiles names.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._export.serde import schema, serialize
from torch.export.passes import move_to_device_pass
from torch.export.pt2_archive import _package
from torch.utils import _pytree as pytree

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.one_shot.adapters import Adapter, converted
from tidewheel.one_shot.signature import Signature, TensorSpec, tensor_spec
from tidewheel.one_shot.torch_program import ProgramOptions, program, take_device

_NATIVE = "data/aotinductor/"
_GRAPH = "models/model.json"
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|quantized_decomposed|torchvision)\.(?!__|from_file|save)\w+(\.(?!__)\w+)?"
    r"|torch\.ops\.higher_order\.(cond|scan|while_loop|wrap_with_\w+)|torch\.sym_\w+|math\.\w+"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|getitem|eq|ne|lt|le|gt|ge|and_|or_|not_)"
)
_SHAPE = re.compile(r"(\b[A-Z]\w*+\(|'\w+'|\w++|[ ,=)*+/<>-])+")  # calls of sympy's classes alone
_WORD = re.compile(r"(?!__)[\w.+:-]*")
_INERT = {"metadata", "guards_code", "as_string", "as_strings"}  # kept, not used, or quoted
_RULES = {"expr_str": _SHAPE, "target": _OPERATOR, "as_operator": _OPERATOR}  # by the field's name; others: `_WORD`
_NESTED = {"in_spec", "out_spec", "context"}  # JSON in text


def load(path: Path, config: EngineConfig) -> Adapter:
    """Load a `.pt2` file."""
    options, device = converted(config.adapter_options, "adapter_options", ProgramOptions), take_device(config)
    reader = _package.PT2ArchiveReader(str(path))
    if not any(name.startswith(_NATIVE) for name in reader.get_file_names()):
        return _program(path, reader, device)
    if not options.allow_native_code:
        raise ConfigError(f"{path} holds native code: if you trust it, set allow_native_code in adapter_options")
    signature = options.signature(path, [spec.name for spec in options.inputs])
    package = _package._load_aoti(str(path), "model", run_single_threaded=False, num_runners=1, device_idx=-1)
    return program(path, lambda tensors: package(*tensors), signature, device)


def _check(path: Path, node: object, key: str = "") -> None:
    """Raise `ConfigError` for a text below a node of JSON that torch would evaluate; `key`: the field's name."""
    if key in _NESTED and isinstance(node, str) and node:
        node, key = json.loads(node), ""
    if isinstance(node, dict):
        for name, value in node.items():
            _check(path, name)
            if name not in _INERT:
                _check(path, value, name)
    elif isinstance(node, list):
        for value in node:
            _check(path, value, key)
    elif isinstance(node, str) and not _RULES.get(key, _WORD).fullmatch(node):
        raise ConfigError(f"{path}: {_GRAPH} has {node[:80]!r}, which torch would evaluate: it is not served")


def _tensors(path: Path, reader: _package.PT2ArchiveReader, kind: str) -> dict[str, torch.Tensor]:
    folder, tensors = f"data/{kind}/", {}
    records = _package._load_payload_config(reader, f"{folder}model_{kind}_config.json")
    payloads = _package._build_file_map(reader, records, folder)  # skips what is pickled
    for name, record in records.config.items():
        meta = record.tensor_meta
        if record.use_pickle or meta is None:
            raise ConfigError(f"{path}: {name} is pickled, which is not served: export it as a plain tensor")
        sizes, strides = serialize.deserialize_size(meta.sizes), serialize.deserialize_stride(meta.strides)
        offset = serialize.deserialize_storage_offset(meta.storage_offset)
        tensor = payloads[record.path_name].detach().as_strided(sizes, strides, offset)
        tensors[name] = torch.nn.Parameter(tensor, requires_grad=False) if record.is_param else tensor
    return tensors


def _program(path: Path, reader: _package.PT2ArchiveReader, device: torch.device) -> Adapter:
    """Load the program named model, without its sample inputs."""
    graph = reader.read_bytes(_GRAPH)
    _check(path, json.loads(graph))
    state, constants = (_tensors(path, reader, kind) for kind in ("weights", "constants"))
    parsed = serialize._bytes_to_dataclass(schema.ExportedProgram, graph)
    exported = serialize.ExportedProgramDeserializer().deserialize(parsed, state, constants)
    names = exported.graph_signature
    if device.type != "cpu":
        exported = move_to_device_pass(exported, device)
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}

    def spec(name: object) -> TensorSpec:
        value = values.get(str(name))
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{path}: {name} is no tensor: export it with tensors as inputs and outputs alone")
        sizes = (size if isinstance(size, int) else str(size) for size in value.shape)  # equal sizes share a symbol
        shape = (None if isinstance(size, str) and not size.isidentifier() else size for size in sizes)
        return tensor_spec(path, str(name), str(value.dtype).removeprefix("torch."), shape)

    signature = Signature(tuple(map(spec, names.user_inputs)), tuple(map(spec, names.user_outputs)))
    module, in_spec = exported.module(check_guards=False), exported.call_spec.in_spec  # guards are text of the file

    def call(tensors: Sequence[torch.Tensor]) -> object:
        args, kwargs = pytree.tree_unflatten(list(tensors), in_spec)
        return module(*args, **kwargs)

    return program(path, call, signature, device, module)
