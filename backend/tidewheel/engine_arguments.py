"""Translation of vLLM's engine arguments, listed in `vllm_arguments.toml`, to settings."""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tidewheel.errors import ConfigError

log = logging.getLogger(__name__)

ENTRY_ARGUMENTS = frozenset({"REPORT_CUSTOM_METRICS", "otlp_traces_endpoint"})  # of an entry, not of its engine


class NotOffered(NamedTuple):
    reason: str
    remedy: str
    allowed: tuple[object, ...]  # values that do not ask for it, beside nothing


_file = tomllib.loads(Path(__file__).with_name("vllm_arguments.toml").read_text(encoding="utf-8"))
HONOURED: Mapping[str, str] = {name: name for name in _file["same_name"]} | _file["renamed"]  # our name by vLLM's
WITHOUT_EFFECT: Mapping[str, str] = {  # reason by name
    name: group["reason"] for group in _file["without_effect"] for name in group["names"]
}
NOT_OFFERED: Mapping[str, NotOffered] = {
    name: NotOffered(group["reason"], group["remedy"], tuple(allowed))
    for group in _file["not_offered"]
    for name, allowed in group["arguments"].items()
}
ARGUMENTS = frozenset((*HONOURED, *WITHOUT_EFFECT, *NOT_OFFERED))
_VALUES: Mapping[str, Mapping[str, object]] = _file["values"]  # by our name
SPECULATIVE_CONFIG = "speculative_config"  # whose keys are arguments `speculative_config.KEY` here
_METHODS = ("speculation", *(name for name, ours in HONOURED.items() if ours == "speculation"))
_DRAFT_MODELS = tuple(name for name, ours in HONOURED.items() if ours == "draft_model")


def plain(value: object) -> object:
    """Return the number, truth value or text that a text means; None for an empty value, `none` and `null`."""
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in ("none", "null"):
            return None
        try:
            value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except (ValueError, RecursionError):
            value = text
    return None if value in ("", {}, []) else value


def flattened(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings with each key of `speculative_config`, and the method that vLLM takes for its model."""
    keys = plain(settings.get(SPECULATIVE_CONFIG))
    if keys is not None and not isinstance(keys, dict):
        return dict(settings)
    flat = {name: value for name, value in settings.items() if name != SPECULATIVE_CONFIG}
    flat |= {f"{SPECULATIVE_CONFIG}.{key.replace('-', '_')}": value for key, value in (keys or {}).items()}
    model = next((str(flat[name]) for name in _DRAFT_MODELS if plain(flat.get(name)) is not None), "")
    if model and not any(plain(flat.get(name)) is not None for name in _METHODS):
        usual = "eagle3" if "eagle3" in model.lower() else "draft_model"
        flat[f"{SPECULATIVE_CONFIG}.method"] = "prompt_lookup" if model in ("ngram", "[ngram]") else usual
    return flat


def translate(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by our names, without nulls and what has no effect (logged). Raise `ConfigError`."""
    translated: dict[str, object] = {}
    without_effect: list[str] = []
    origin: dict[str, str] = {}
    for name, value in flattened(settings).items():
        is_null = value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null"))
        if is_null and (name, value) != ("quantization", "none"):  # which makes floats of quantised weights
            continue
        if name in NOT_OFFERED:
            follows_model = name == "tokenizer_revision" and value == settings.get("revision")
            if not follows_model:
                _refuse(name, value)
        if name in WITHOUT_EFFECT or name in NOT_OFFERED:
            without_effect.append(name)
            continue
        ours, value = HONOURED.get(name, name), _translate_value(name, value)
        if value is None:
            continue
        if ours in origin and value != translated[ours]:
            raise ConfigError(f"{origin[ours]} and {name} are one setting here: keep one")
        translated[ours], origin[ours] = value, name
    if without_effect:
        log.info("no effect here: %s", ", ".join(sorted(without_effect)))
    return translated


def _refuse(name: str, value: object) -> None:
    argument, asked = NOT_OFFERED[name], plain(value)
    if asked is not None and all(asked != allowed for allowed in argument.allowed):
        shown = "set" if name == "hf_token" else repr(value)
        raise ConfigError(f"{name} is {shown}: {argument.reason}; {argument.remedy}")


def _translate_value(name: str, value: object) -> object:
    if name == "kv_cache_memory_bytes":
        number = plain(value)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 1 << 20 <= number < 1 << 63:
            raise ConfigError(f"{name} is {value!r}: it must be a number of bytes, {1 << 20} (1 MiB) or more")
        return int(number) >> 20
    if name == "served_model_name" and isinstance(value, list):
        return value[0] if value else None
    values, known = _VALUES.get(HONOURED.get(name, name), {}), str(plain(value))
    return plain(values[known]) if known in values else value
