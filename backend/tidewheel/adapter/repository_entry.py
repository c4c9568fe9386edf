"""Settings of a repository entry, from `config.pbtxt` and `model.json`. A mistake raises `ConfigError`."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tidewheel.config import REMOTE, EngineConfig, setting_names
from tidewheel.errors import ConfigError
from tidewheel.frontend.settings import FrontendSettings, read_overrides
from tidewheel.one_shot.adapters import with_kind
from tidewheel.regular_files import read_object
from tidewheel.settings import HONOURED, check_known, coerce_setting, take_settings, translate

BACKEND = "tidewheel"
MODEL_JSON = "model.json"
ORIGIN = "tidewheel_origin"  # file in an entry of links: path of the entry that it links to

# Read by Triton's Python backend.
TRITON_PARAMETERS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    name: str
    folder: Path  # absolute
    version: str
    parameters: Mapping[str, str]  # of config.pbtxt
    model_json: Mapping[str, object]
    decoupled: bool = True
    has_native_queue: bool = False  # Triton's queue sets the order
    max_batch_size: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)  # `config.pbtxt`, as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    engine: EngineConfig
    frontend: FrontendSettings
    entry: ModelEntry
    owner: ModelEntry  # of the engine

    def labels(self, entry: ModelEntry) -> dict[str, str]:
        """Return the labels of an entry's metrics."""
        model_name = self.engine.served_model_name or entry.name
        return {"model_name": model_name, "engine": "0", "model": entry.name, "version": entry.version}


def real_entry(folder: Path) -> Path:
    """Return the operator's folder to which a mirrored entry links, else the entry's own folder."""
    with contextlib.suppress(FileNotFoundError):
        return Path((folder / ORIGIN).read_text(encoding="utf-8")).resolve()
    return folder.resolve()


def load_settings(args: Mapping[str, str]) -> ModelSettings:
    """Return the settings of the entry that Triton's arguments of `initialize` name."""
    folder, config = real_entry(Path(args["model_repository"])), json.loads(args["model_config"])
    return resolve_settings(read_entry(args["model_name"], folder, args["model_version"], config))


def read_entry(name: str, folder: Path, version: str, config: Mapping[str, Any]) -> ModelEntry:
    return ModelEntry(
        name=name,
        folder=folder,
        version=version,
        parameters={key: str(value.get("string_value", "")) for key, value in config.get("parameters", {}).items()},
        model_json=read_object(folder / version / MODEL_JSON),
        decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        has_native_queue="dynamic_batching" in config,
        max_batch_size=int(config.get("max_batch_size", 0)),
        config=config,
    )


def resolve_settings(entry: ModelEntry) -> ModelSettings:
    given = _read(entry)
    frontend = _take_frontend(given)
    settings = with_kind(given, entry.folder / entry.version)
    if settings.get("kind", "text") != "text":
        if entry.max_batch_size and "max_num_batched_tokens" not in given:
            settings["max_num_batched_tokens"] = entry.max_batch_size
    elif (frontend.io_dialect == "trtllm") != (entry.max_batch_size > 0):
        raise ConfigError(
            f"io_dialect is {frontend.io_dialect} and max_batch_size {entry.max_batch_size}: set io_dialect in "
            "config.pbtxt, which Triton reads before model.json, and leave max_batch_size out"
        )
    engine_of = settings.pop("engine_of", None)
    owner = entry
    if engine_of is not None:
        if settings:
            raise ConfigError(
                f"{', '.join(sorted(settings))}: engine settings belong to {str(engine_of)!r}, "
                f"whose engine {entry.name!r} shares by engine_of"
            )
        owner, settings = _read_sibling(entry, str(coerce_setting("engine_of", engine_of, str)))
    return ModelSettings(engine=_engine_config(settings, owner), frontend=frontend, entry=entry, owner=owner)


def _read(entry: ModelEntry) -> dict[str, object]:
    settings: dict[str, object] = {k: v for k, v in entry.parameters.items() if k not in TRITON_PARAMETERS}
    for key, value in entry.model_json.items():
        if key in settings and not _same(settings[key], value):
            raise ConfigError(
                f"{key} is {settings[key]!r} in config.pbtxt and {value!r} in {entry.version}/{MODEL_JSON}: keep one"
            )
        settings[key] = value
    return _known(settings)


def check_settings(settings: Mapping[str, object]) -> EngineConfig:
    """Return the engine's settings of an entry that owns its engine. Raise `ConfigError`."""
    values = _known(settings)
    _take_frontend(values)
    return _engine_config(with_kind(values))


def _engine_config(settings: dict[str, object], owner: ModelEntry | None = None) -> EngineConfig:
    base_dir = None if owner is None else owner.folder / owner.version
    if owner is not None and settings.get("adapter") == REMOTE:
        settings.setdefault("adapter_options", _called_tensors(owner, str(settings["model"])))
    config = EngineConfig.from_settings(settings, base_dir=base_dir)
    read_overrides(config.override_generation_config)  # before a model is loaded
    return config


def _known(settings: Mapping[str, object]) -> dict[str, object]:
    translated = translate(settings)
    check_known(translated, known_settings() | HONOURED.keys())
    return translated


def known_settings() -> set[str]:
    return {*setting_names(), *(field.name for field in fields(FrontendSettings)), "engine_of"}


def _same(text: object, value: object) -> bool:
    left, right = str(text).strip(), str(value).strip()
    try:
        return bool(json.loads(left) == value) if isinstance(value, dict) else float(left) == float(right)
    except (ValueError, RecursionError):
        return left.lower() == right.lower() if isinstance(value, bool) else left == right


def _take_frontend(settings: dict[str, object]) -> FrontendSettings:
    return FrontendSettings(**take_settings(FrontendSettings, settings))


def _read_sibling(twin: ModelEntry, name: str) -> tuple[ModelEntry, dict[str, object]]:
    path = twin.folder.parent / name / "config.pbtxt"
    if Path(name).name != name or not path.is_file():
        raise ConfigError(f"engine_of of {twin.name!r} is {name!r}: the model repository has no model of that name")
    folder = path.parent
    if not (present := versions(folder)):
        raise ConfigError(f"model {name!r} has no version folder, such as {name}/1")
    config, where = _read_pbtxt(path), f"{name}/{path.name}"
    if (backend := config.get("backend", "")) != BACKEND:
        raise ConfigError(f"{where} has backend {backend!r}: only a {BACKEND!r} model has an engine to share")
    owner = read_entry(name, folder, str(present[-1]), config)
    settings = _read(owner)
    _take_frontend(settings)
    if "engine_of" in settings:
        raise ConfigError(
            f"engine_of of {twin.name!r} is {name!r}, itself a twin: name {settings['engine_of']!r} instead"
        )
    if "adapter" in with_kind(settings, folder / owner.version):
        raise ConfigError(f"engine_of of {twin.name!r} is {name!r}, which has an adapter: such models have no twins")
    return owner, settings


def versions(folder: Path) -> list[int]:
    return sorted(int(child.name) for child in folder.iterdir() if child.name.isdecimal() and child.is_dir())


def _called_tensors(owner: ModelEntry, name: str) -> dict[str, object]:
    """Return the tensors that an entry declares, else those of the model that it calls; {} if unknown."""
    if name == owner.name:
        raise ConfigError(f"model is {name!r}, this entry itself: name a model of another backend")
    config, path = owner.config, owner.folder.parent / name / "config.pbtxt"
    if not (config.get("input") and config.get("output")) and Path(name).name == name and path.is_file():
        config = _read_pbtxt(path)
    if not (config.get("input") and config.get("output")):
        return {}
    sizes = [-1] * (int(config.get("max_batch_size", 0)) > 0)
    return {f"{kind}s": [_tensor(tensor, sizes) for tensor in config[kind]] for kind in ("input", "output")}


def _tensor(tensor: Mapping[str, Any], first_sizes: list[int]) -> tuple[object, ...]:
    name, data_type = tensor["name"], str(tensor["data_type"]).removeprefix("TYPE_")
    sizes = enumerate([*first_sizes, *map(int, tensor["dims"])])
    dims = [f"{name}.{axis}" if size < 0 else size for axis, size in sizes]
    return name, "BYTES" if data_type == "STRING" else data_type, dims


def _read_pbtxt(path: Path) -> dict[str, Any]:
    # These imports bring all of gRPC.
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    where = f"{path.parent.name}/{path.name}"
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (text_format.ParseError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None
    return dict(json_format.MessageToDict(config, preserving_proto_field_name=True))
