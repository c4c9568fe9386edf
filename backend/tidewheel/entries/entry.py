import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tidewheel.adapter.one_shot import kind_of
from tidewheel.adapter.repository_entry import BACKEND, MODEL_JSON, versions
from tidewheel.entries.findings import Field, Finding, pbtxt_fields, walk
from tidewheel.errors import ConfigError
from tidewheel.lora import MULTI_LORA
from tidewheel.regular_files import read_object, read_text

CONFIG_NAME = "config.pbtxt"
GPU_FILES = "nvidia[0-9]*"


def num_gpus() -> int:
    """Return this machine's number of GPUs, by `CUDA_VISIBLE_DEVICES`."""
    gpus = len(list(Path("/dev").glob(GPU_FILES)))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else min(gpus, sum(bool(name.strip()) for name in visible.split(",")))


class UnreadableConfig(ConfigError):
    def __init__(self, path: Path, line: int, column: int, reason: str) -> None:
        self.finding = Finding("syntax", "error", str(path), line, column, "", reason)
        super().__init__(f"{self.finding.place}: {reason}")


@dataclass(frozen=True, kw_only=True)
class Entry:
    folder: Path
    text: str  # of config.pbtxt
    config: Any  # `ModelConfig`
    model_json: Mapping[str, object]  # empty if unreadable, which a rule reports
    others: Mapping[str, Any] = field(default_factory=dict)  # `ModelConfig` by name of all entries of the repository
    is_this_machine: bool = False  # serves the entry

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def path(self) -> Path:
        return self.folder / CONFIG_NAME

    @property
    def is_ours(self) -> bool:
        return bool(self.config.backend == BACKEND)

    @property
    def is_decoupled(self) -> bool:
        if self.config.HasField("model_transaction_policy"):
            return bool(self.config.model_transaction_policy.decoupled)
        return self.kind != "one_shot"

    @cached_property
    def kind(self) -> str:
        return kind_of(self.folder, served_version(self.folder, self.config), self.settings)

    @property
    def json_path(self) -> Path:
        return self.folder / served_version(self.folder, self.config) / MODEL_JSON

    @property
    def lora_path(self) -> Path:
        return self.json_path.with_name(MULTI_LORA)

    @property
    def settings(self) -> dict[str, object]:
        return {**self.parameters, **self.model_json}

    @cached_property
    def parameters(self) -> dict[str, str]:
        return {key: value.string_value for key, value in self.config.parameters.items()}

    @property
    def engine_of(self) -> str:
        return str(self.settings.get("engine_of", ""))

    @cached_property
    def fields(self) -> dict[str, Field]:
        """First field of `config.pbtxt` by path, such as `input.text_input.dims`."""
        found: dict[str, Field] = {}
        for path, one, _ in walk(pbtxt_fields(self.text)):
            found.setdefault(path, one)
        return found


def served_version(folder: Path, config: Any) -> str:
    present, named = set(versions(folder)), set(config.version_policy.specific.versions)
    return str(max(present & named or present, default=1))


def read_entry(folder: Path) -> Entry:
    """Read an entry's `config.pbtxt` and `model.json`. Raise `UnreadableConfig`."""
    path, text = folder / CONFIG_NAME, ""
    try:
        text = read_text(path) or ""
        config = parse_config(text)
    except ConfigError as error:
        raise UnreadableConfig(path, 1, 1, str(error)) from None
    except text_format.ParseError as error:
        raise UnreadableConfig(path, error.GetLine(), error.GetColumn(), _explained(error, text)) from None
    except RecursionError:
        reason = "the messages are nested too deeply: no field of Triton needs that"
        raise UnreadableConfig(path, 1, 1, reason) from None
    model_json: Mapping[str, object] = {}
    with contextlib.suppress(ConfigError):
        model_json = read_object(folder / served_version(folder, config) / MODEL_JSON)
    return Entry(folder=folder, text=text, config=config, model_json=model_json)


def parse_config(text: str) -> Any:
    """Return a `ModelConfig`, without fields that it does not define. Raise `ParseError`."""
    return text_format.Parse(text, model_config_pb2.ModelConfig(), allow_unknown_field=True)


def _explained(error: text_format.ParseError, text: str) -> str:
    what = str(error).partition(" : ")[2].replace("\n", " ") or str(error)
    if "${" in text:
        return f"{what}: the file is a template; fill in its ${{…}} first"
    return f"{what.rstrip('.')}: mend it, or Triton cannot read the file"
