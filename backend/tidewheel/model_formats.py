from collections.abc import Mapping
from pathlib import Path

from tidewheel.errors import ConfigError
from tidewheel.regular_files import open_regular, read_object

GUIDE = 'docs/serve.md, "Other formats", has the commands'
_LFS = b"version https://git-lfs.github.com/spec/"
MAX_CONFIG_BYTES = 16 << 20  # also of an index of weights
_MAX_HEADER_BYTES = 1 << 20  # searched in a file of weights
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
QUANTIZATION_METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8")
QUANTIZATION_KEYS = {"quantization_config": None, "compression_config": "compressed-tensors"}  # and a default method
_OLD_QUANTIZATION_FILES = {"quant_config.json": "awq", "quantize_config.json": "gptq"}  # config.json says nothing
FLOAT_MODEL = "take the float model that it was made of; quantization int8 or int4 rounds it at load"


def foreign_format(model: Path) -> str:
    """Return a sentence about a path whose format is not served; empty for other paths."""
    return _pointer(model) or _adapter(model) or _of_files(model) if model.is_dir() else ""


def config_refusal(values: Mapping[str, object]) -> str:
    """Return why this `config.json` is not served (quantised, multimodal); empty without a reason."""
    for key in QUANTIZATION_KEYS:
        section = values.get(key)
        if not isinstance(section, dict) or not section:
            continue
        method = section.get("quant_method", QUANTIZATION_KEYS[key])
        if method not in QUANTIZATION_METHODS:
            return (
                f"the weights are quantised by {method or 'a method that is not named'} ({key}), and "
                f"{', '.join(QUANTIZATION_METHODS)} are served: {FLOAT_MODEL}"
            )
    for key, kind in (("vision_config", "vision-language"), ("audio_config", "speech")):
        if values.get(key):
            return f"it is a {kind} model ({key}), and multimodal models are not offered: take one of text alone"
    return ""


def sentencepiece_only(folder: Path) -> str:
    """Return how to convert a folder that has only a sentencepiece tokenizer; else empty."""
    name = next((name for name in _SENTENCEPIECE if (folder / name).is_file()), "")
    if not name:
        return ""
    return f"only {name}, a tokenizer of sentencepiece: convert it with transformers ({GUIDE})"


def _pointer(folder: Path) -> str:
    # Other files of weights, such as Mistral's consolidated.safetensors, are not read.
    for path in (folder / "config.json", folder / "tokenizer.json", *sorted(folder.glob("model*.safetensors"))):
        if _first_bytes(path, len(_LFS)) == _LFS:
            return f"{path} is a pointer of Git LFS, and not the file itself: run git lfs pull in {folder}"
    return ""


def _adapter(folder: Path) -> str:
    has_model = any(not path.name.startswith("adapter") for path in folder.glob("*.safetensors"))
    if has_model or not (folder / "adapter_config.json").is_file():
        return ""
    base = _fields(folder / "adapter_config.json").get("base_model_name_or_path") or "a model that it does not name"
    return (
        f"{folder} is a LoRA adapter of {base}, and no model: serve that model with enable_lora, and name the "
        "adapter in multi_lora.json (docs/lora.md)"
    )


def _of_files(folder: Path) -> str:
    said = config_refusal(_fields(folder / "config.json"))
    return f"{folder / 'config.json'}: {said}" if said else ""


def old_quantization(folder: Path) -> tuple[Path, str] | None:
    """Return the file in which older writers describe a folder's quantised tensors, and their method."""
    first = min(folder.glob("*.safetensors"), default=folder)
    for name, method in _OLD_QUANTIZATION_FILES.items():
        if (folder / name).is_file() and b'.qweight"' in _first_bytes(first, _MAX_HEADER_BYTES):
            return folder / name, method
    return None


def _fields(path: Path) -> dict[str, object]:
    try:
        return read_object(path, MAX_CONFIG_BYTES)
    except ConfigError:
        return {}


def _first_bytes(path: Path, count: int) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(count)
    except OSError:
        return b""
