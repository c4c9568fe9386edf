import logging
import re
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
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def read_config(folder: Path) -> ConfigFields:
    """Return the fields of `config.json`. Raise `ConfigError`."""
    if refusal := foreign_format(folder):
        raise ConfigError(refusal)
    path = folder / "config.json"
    fields = ConfigFields(read_object(path, MAX_CONFIG_BYTES), str(path))
    if not fields.values and not path.exists():
        raise ConfigError(f"{path} does not exist: give the folder of a Hugging Face model")
    if "auto_map" in fields.values:
        raise ConfigError(f"{path}: auto_map asks to run code from the model folder, which is never done")
    return fields


def checkpoint_dtype(fields: ConfigFields) -> str | None:
    name = fields.values.get("dtype") or fields.values.get("torch_dtype")
    return name if isinstance(name, str) and name in DTYPE_NAMES else None


def one_line(error: Exception, limit: int = 400) -> str:
    return " ".join(str(error).split())[:limit] or type(error).__name__


def resolve_folder(model: str, revision: str = "", cache_dir: str = "") -> Path:
    """Return the model's folder: as given, made of a GGUF file, or downloaded to `cache_dir`."""
    folder = Path(model).expanduser()
    if revision and folder.exists():
        log.info("model is on disk: revision %r has no effect", revision)
    file = gguf_file_of(folder)
    if file is not None and not all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
        from tidewheel.models.gguf_folder import derived_folder

        return derived_folder(file)
    if folder.is_dir():
        return folder.resolve()
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


def gguf_file_of(model: Path) -> Path | None:
    """Return the GGUF file that a path is or holds. Raise `ConfigError` for several."""
    found = sorted(model.glob("*.gguf")) if model.is_dir() else [model] if model.suffix == ".gguf" else []
    if not found or not found[0].is_file() or any(model.glob("*.safetensors")):
        return None
    if SPLIT.search(found[0].name):
        merged = SPLIT.sub(".gguf", found[0].name)
        raise ConfigError(f"{found[0]} is a part: run llama-gguf-split --merge {found[0]} {found[0].parent / merged}")
    if len(found) > 1:
        raise ConfigError(f"{model} has {len(found)} GGUF files: name one of them, such as {found[0]}")
    return found[0]


def cached_folder(model: str, revision: str = "", cache_dir: str = "") -> Path | None:
    """Return the model's folder without a download, None if not cached."""
    is_id = model.count("/") == 1 and not Path(model).is_absolute()
    if Path(model).expanduser().exists() or not is_id:
        return resolve_folder(model)
    try:
        return _snapshot(model, revision, cache_dir, only_cached=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _snapshot(model: str, revision: str, cache_dir: str, *, only_cached: bool = False) -> Path:
    folder = snapshot_download(
        model, revision=revision or None, cache_dir=cache_dir or None, allow_patterns=WANTED,
        ignore_patterns=UNWANTED, local_files_only=only_cached,
    )  # fmt: skip
    if not Path(folder, "config.json").exists():
        raise ConfigError(f"model {model!r} has no config.json on Hugging Face: {gguf_by_name(model)}")
    return Path(folder)


def gguf_by_name(model: str) -> str:
    return f"if it holds GGUF files, run hf download {model} FILE.gguf, and give the path that this prints"
