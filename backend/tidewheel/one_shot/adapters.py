"""Adapters: programs that run one-shot models, each a module here with `load(path, config) -> Adapter`."""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from tidewheel.config import REMOTE, EngineConfig, Kind
from tidewheel.errors import ConfigError
from tidewheel.one_shot.signature import Arrays, Signature, TensorSpec
from tidewheel.regular_files import open_regular, parse_object
from tidewheel.settings import nearest

_Axis = Annotated[int, msgspec.Meta(ge=0)]
_Sizes = Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(min_length=1)]
_MAX_REASON_CHARS = 500
_KindT = TypeVar("_KindT")


class Adapter(NamedTuple):
    signature: Signature  # of the file, without the entry's settings
    device: str  # such as "cpu (2 threads)"
    weights_bytes: int  # 0: unknown
    run: Callable[[Arrays], Arrays]  # must not write to the inputs; may raise anything


class AdapterKind(NamedTuple):
    module: str
    extra: str  # of pyproject.toml; empty: none is needed
    file: str = ""  # in a version folder, or its suffix in `model`, means this adapter; empty: none does
    has_options: bool = False
    kind: Kind = "one_shot"


ADAPTERS: Mapping[str, AdapterKind] = {
    "onnxruntime": AdapterKind("tidewheel.one_shot.onnx_runtime", "onnx", "model.onnx"),
    "torch_export": AdapterKind("tidewheel.one_shot.torch_export", "", "model.pt2", has_options=True),
    "torch_script": AdapterKind("tidewheel.one_shot.torch_program", "", "model.pt", has_options=True),
    "openvino": AdapterKind("tidewheel.one_shot.openvino_ir", "openvino", "model.xml"),
    "tensorrt": AdapterKind("tidewheel.one_shot.tensorrt_plan", "tensorrt", "model.plan"),
    "encoder": AdapterKind("tidewheel.one_shot.encoder", "", has_options=True),
    "diffusers": AdapterKind("tidewheel.one_shot.diffusion", "diffusers", has_options=True, kind="iterative"),
    REMOTE: AdapterKind(__name__, "", has_options=True),
}
DEFAULTS: Mapping[str, object] = {
    "enable_prefix_caching": False, "cache_aware_order": False, "async_scheduling": False,
    "admit_by_growth": False, "max_num_seqs": 32, "max_num_batched_tokens": 32,
}  # fmt: skip


def with_kind(settings: Mapping[str, object], folder: Path | None = None) -> dict[str, object]:
    """Return an entry's settings, completed if a file in its version folder or a setting names an adapter."""
    model, adapter = str(settings.get("model") or ""), str(settings.get("adapter") or "")
    files = {kind.file: name for name, kind in ADAPTERS.items() if kind.file}
    if not model and folder is not None:
        model = next((file for file in files if (folder / file).is_file()), "")
    adapter = adapter or {Path(file).suffix: name for file, name in files.items()}.get(Path(model).suffix, "")
    if not adapter:
        return dict(settings)
    kind = ADAPTERS[adapter].kind if adapter in ADAPTERS else "one_shot"
    return {"kind": kind, **DEFAULTS, **settings, "adapter": adapter, "model": model}


def load_adapter(config: EngineConfig) -> tuple[Adapter, Signature]:
    """Load a model. Return it and its signature with the entry's settings. Raise `ConfigError`."""
    kind = ADAPTERS.get(config.adapter)
    if kind is None:
        near = nearest(config.adapter, ADAPTERS)
        hint = f"did you mean {near}?" if near else f"known are {', '.join(ADAPTERS)}"
        raise ConfigError(f"adapter is {config.adapter!r}: {hint}")
    path = Path(config.model)
    try:
        module: Any = importlib.import_module(kind.module)
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'tidewheel[{kind.extra}]' for adapter {config.adapter}") from None
    if not kind.has_options and config.adapter_options != "{}":
        raise ConfigError(f"adapter_options is {config.adapter_options}: adapter {config.adapter} has none")
    axes = converted(config.batch_axes, "batch_axes", dict[str, _Axis | None])
    buckets = converted(config.buckets, "buckets", dict[str, _Sizes])
    try:
        if kind.file:
            open_regular(path).close()
        adapter: Adapter = module.load(path, config)
    except ConfigError:
        raise
    except Exception as error:  # libraries have a class for each cause, or none
        text = " ".join(str(error).split())[:_MAX_REASON_CHARS] + " (is it whole?)" * (not isinstance(error, OSError))
        raise ConfigError(f"{path} cannot be loaded by {config.adapter}: {text}") from None
    return adapter, adapter.signature.with_settings(axes, buckets)


class RemoteTensors(msgspec.Struct, forbid_unknown_fields=True):
    """Tensors of a model that another backend of the server runs, which are taken from `config.pbtxt`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def load(_: Path, config: EngineConfig) -> Adapter:
    """Return the signature of a model that another backend runs: front ends call it."""
    if config.buckets != "{}":
        raise ConfigError(f"buckets is {config.buckets}: adapter {config.adapter} pads no tensors, leave it out")
    if config.adapter_options == "{}":
        raise ConfigError(f"model is {config.model!r}, whose config.pbtxt lacks input or output: declare both here")
    tensors = converted(config.adapter_options, "adapter_options", RemoteTensors)
    return Adapter(Signature(tensors.inputs, tensors.outputs), "another backend", 0, dict)


def print_signature() -> None:
    """Print the signature that the settings `argv[1]` give, or an error, in a process that may import any library."""
    try:
        config = EngineConfig.from_settings(msgspec.json.decode(sys.argv[1], type=dict[str, object]))
        found: Signature | str = load_adapter(config)[1]
    except ConfigError as error:
        found = str(error)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(found))


def converted(text: str, setting: str, kind: type[_KindT]) -> _KindT:
    """Return a setting's JSON object as `kind`. Raise `ConfigError`."""
    try:
        return msgspec.convert(parse_object(text, setting), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{setting} is {text}: {error}") from None
