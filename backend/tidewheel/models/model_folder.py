from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tidewheel.errors import ConfigError
from tidewheel.model_formats import MAX_CONFIG_BYTES, foreign_format
from tidewheel.models.config_fields import ConfigFields
from tidewheel.regular_files import read_object

log = logging.getLogger(__name__)

DTYPE_NAMES = ("float32", "bfloat16", "float16")
# Code and pickled weights are never fetched.
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]


def read_config(folder: Path) -> ConfigFields:
    """Return the checked fields of `config.json`. Raise `ConfigError` for a format that is not served."""
    if refusal := foreign_format(folder):
        raise ConfigError(refusal)
    path = folder / "config.json"
    fields = ConfigFields(read_object(path, MAX_CONFIG_BYTES), str(path))
    if not fields.values and not path.exists():
        raise ConfigError(f"{path} does not exist: give the folder of a Hugging Face model")
    if "auto_map" in fields.values:
        raise ConfigError(f"{path}: auto_map asks to run code from the model folder, which is never done")
    return fields


def architecture(fields: ConfigFields) -> str:
    names = fields.texts("architectures")
    if len(names) != 1:
        raise fields.error("architectures", "a list of one name")
    return names[0]


def checkpoint_dtype(fields: ConfigFields) -> str | None:
    name = fields.values.get("dtype") or fields.values.get("torch_dtype")
    return name if isinstance(name, str) and name in DTYPE_NAMES else None


def one_line(error: Exception, limit: int = 400) -> str:
    return " ".join(str(error).split())[:limit] or type(error).__name__


def resolve_folder(model: str, revision: str = "", cache_dir: str = "") -> Path:
    """Return the model's local folder, downloaded from Hugging Face to `cache_dir` (empty: its default) if needed."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision:
            log.info("model is a folder: revision %r has no effect", revision)
        return folder.resolve()
    if folder.exists() and (refusal := foreign_format(folder)):
        raise ConfigError(refusal)
    try:
        if folder.exists() or folder.is_absolute() or model.count("/") != 1:
            raise HFValidationError
        return _snapshot(model, revision, cache_dir)
    except HFValidationError:
        raise ConfigError(f"model is {model!r}: no such folder, and no Hugging Face id (owner/name)") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {model!r} is no folder and cannot be fetched from Hugging Face: {one_line(error)}"
        ) from None


def cached_folder(model: str, revision: str = "", cache_dir: str = "") -> Path | None:
    """Return the model's folder without a download; None for an id that is not cached."""
    is_id = model.count("/") == 1 and not Path(model).is_absolute()
    if Path(model).expanduser().exists() or not is_id:
        return resolve_folder(model)
    try:
        return _snapshot(model, revision, cache_dir, only_cached=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _snapshot(model: str, revision: str, cache_dir: str, *, only_cached: bool = False) -> Path:
    folder = snapshot_download(
        model,
        revision=revision or None,
        cache_dir=cache_dir or None,
        allow_patterns=WANTED,
        ignore_patterns=UNWANTED,
        local_files_only=only_cached,
    )
    return Path(folder)
