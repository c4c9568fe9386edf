import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tidewheel.adapter.repository_entry import ORIGIN, check_settings, real_entry
from tidewheel.errors import ConfigError
from tidewheel.model_formats import foreign_format
from tidewheel.models.model_folder import gguf_file_of, resolve_folder
from tidewheel.one_shot.adapters import with_kind

TWIN_SUFFIX = "_infer"
_AHEAD_S = 5 * 365 * 86400  # later than any change of a file while a server runs
CORES_OF_A_FRONT_END = 8
MAX_FRONT_ENDS = 4
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def write_entry(repository: Path, model: str, name: str, settings: Mapping[str, str]) -> None:
    """Write a model repository entry and its non-decoupled twin. Raise `ConfigError`."""
    parameters = {"model": resolve_model(model), **settings}
    kind = check_settings(parameters).kind
    if kind != "text":
        _write(repository / name, parameters, decoupled=kind == "iterative")
        return
    # Like `vllm serve`, and unlike entries that are written for Triton.
    _write(repository / name, {"generation_config": "auto", **parameters}, decoupled=True)
    _write(repository / f"{name}{TWIN_SUFFIX}", {"engine_of": name}, decoupled=False)


def resolve_model(model: str) -> str:
    """Return the folder, GGUF file or Hugging Face id of a model. Raise `ConfigError` for anything else."""
    folder = Path(model).expanduser()
    if model and folder.exists() and (refusal := foreign_format(folder)):
        raise ConfigError(refusal)
    if folder.is_file() and "adapter" in with_kind({"model": model}):
        return str(folder.resolve())
    if model and gguf_file_of(folder) is not None:
        resolve_folder(model)
        return str(folder.absolute())
    if model and folder.is_dir():
        if not any((folder / name).exists() for name in ("config.json", "model_index.json")):
            raise ConfigError(f"model is {model!r}: the folder has no config.json, so it is no Hugging Face model")
        return str(folder.resolve())
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model is {model!r}: no such folder, and no Hugging Face id (owner/name)")
    return model


def served_name(model: str) -> str:
    folder = Path(model).expanduser()
    name = folder.resolve().name if folder.is_dir() else model.rsplit("/", 1)[-1]
    name = re.sub(r"\.(gguf|onnx|pt2?|xml|plan)$", "", name)
    return re.sub(r"[^\w.-]+", "_", name).strip("._-") or "model"


def check_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(f"the name {name!r} cannot be served: use letters, digits, '.', '-' and '_'")
    return name


def parse_settings(pairs: Iterable[str], option: str = "--set") -> dict[str, str]:
    """Parse an option's `key=value` texts. Raise `ConfigError` for a repeated key."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ConfigError(f"{option} {pair!r}: write key=value")
        if key == "model" and option == "--set":
            raise ConfigError(f"--set {pair!r}: --model names the model")
        if key in settings:
            raise ConfigError(f"{option} has {key} twice: {settings[key]!r} and {value!r}")
        settings[key] = value.strip()
    return settings


def entries(repository: Path) -> list[str]:
    """Return the sorted names of a repository's models. Raise `ConfigError` if there are none."""
    if not repository.is_dir():
        raise ConfigError(f"model repository {str(repository)!r}: no such folder")
    names = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not names:
        raise ConfigError(
            f"model repository {str(repository)!r} has no entry: it must hold a folder per model, with a config.pbtxt"
        )
    return names


def folder_names(repository: Path) -> list[str]:
    """Return sorted folder names, each a model to a polling Triton."""
    return sorted(path.name for path in repository.iterdir() if path.is_dir())


def check_names(repository: Path, names: Iterable[str]) -> None:
    """Raise `ConfigError` if a named model is missing in the repository."""
    there = entries(repository)
    for name in names:
        if name not in there:
            raise ConfigError(f"--models names {name!r}, but {str(repository)!r} has {', '.join(there)}")


def mirror(repository: Path, names: Sequence[str], target: Path) -> Path:
    """Make a repository of folders with links to the named models' files (none: all). Raise `ConfigError`."""
    check_names(repository, names)
    target.mkdir()
    for name in dict.fromkeys(names) or folder_names(repository):
        add_entry(repository, name, target)
    return target


def add_entry(repository: Path, name: str, target: Path) -> None:
    """Link to the files of a model atomically, so that a polling Triton loads it."""
    source, folder = (repository / name).resolve(), _aside(target, name)
    folder.mkdir(parents=True)
    _link(folder, source)
    # The only file whose changes Triton sees, because it is the latest.
    (folder / ORIGIN).write_text(str(source), encoding="utf-8")
    os.utime(folder / ORIGIN, (time.time() + _AHEAD_S,) * 2)
    folder.rename(target / name)


def remove_entry(target: Path, name: str) -> None:
    """Remove the links to a model, so that a polling Triton unloads it."""
    folder = _aside(target, name)
    folder.parent.mkdir(exist_ok=True)
    (target / name).rename(folder)
    shutil.rmtree(folder)


def refresh_entry(entry: Path) -> None:
    """Link to new files of the operator's folder, and remove links to deleted ones."""
    for path in entry.iterdir():
        if not path.exists():
            path.unlink()
    _link(entry, real_entry(entry))


def load_again(entry: Path, *, undo: bool = False) -> None:
    """Have a polling Triton reload a model, every second until it succeeds; with `undo`, keep the loaded model."""
    path = entry / ORIGIN
    os.utime(path, (path.stat().st_mtime + (-1 if undo else 1),) * 2)


def _link(folder: Path, source: Path) -> None:
    for path in source.iterdir():
        if path.name != ORIGIN and not (folder / path.name).is_symlink():
            (folder / path.name).symlink_to(path)


def _aside(target: Path, name: str) -> Path:
    folder = target.with_name(f"{target.name}-aside") / name
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def select(repository: Path, names: Sequence[str], target: Path) -> Path:
    """Link to the named models' folders in a new repository. Raise `ConfigError` if one is missing."""
    check_names(repository, names)
    target.mkdir(parents=True)
    for name in dict.fromkeys(names):
        (target / name).symlink_to((repository / name).resolve())
    return target


def _write(folder: Path, parameters: Mapping[str, str], *, decoupled: bool) -> None:
    (folder / "1").mkdir(parents=True)
    count = num_front_ends(len(os.sched_getaffinity(0)))
    text = entry_text(parameters, decoupled=decoupled, num_instances=count)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")


def num_front_ends(num_cores: int) -> int:
    """Return a model's number of front ends: each keeps one core busy, and Triton another."""
    return max(1, min(MAX_FRONT_ENDS, num_cores // CORES_OF_A_FRONT_END))


def entry_text(parameters: Mapping[str, str], *, decoupled: bool, num_instances: int = 1) -> str:
    lines = [
        'backend: "tidewheel"',
        f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}",
        f"instance_group [ {{ count: {num_instances} kind: KIND_CPU }} ]",  # front ends: the engine picks the device
    ]
    for key, value in parameters.items():
        text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'parameters {{ key: "{key}" value: {{ string_value: "{text}" }} }}')
    return "\n".join(lines) + "\n"
