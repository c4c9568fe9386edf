"""Location of a model: a folder, or the local copy of a Hugging Face repository."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tidewheel.errors import ConfigError
from tidewheel.models.config_file import one_line

# Data only: code and pickled weights are never fetched.
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
UNWANTED = ["*/*", "consolidated*"]  # other formats of the weights


def resolve_folder(model: str) -> Path:
    """Return the folder, or else that of the cached or downloaded Hugging Face repository."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists() or folder.is_absolute() or model.count("/") != 1:
        raise ConfigError(f"model is {model!r}: no such folder, and no Hugging Face id (owner/name)")
    try:
        return Path(snapshot_download(model, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except HFValidationError:
        raise ConfigError(f"model is {model!r}: no such folder, and no Hugging Face id (owner/name)") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model {model!r} is no folder and cannot be fetched from Hugging Face: {one_line(error)}"
        ) from None
