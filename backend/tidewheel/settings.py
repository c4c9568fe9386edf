"""Settings from text and JSON, and from vLLM's engine arguments, which `vllm_arguments.toml` lists."""

import difflib
import json
import logging
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tidewheel.errors import ConfigError

log = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30
# Text in `config.pbtxt`, an object in `model.json`.
JSON_SETTINGS = (
    "tenants", "override_generation_config", "buckets", "batch_axes", "adapter_options", "lora_modules",
    "lora_limits",
)  # fmt: skip
_MOST_SHOWN = 16
_MAX_PATH_BYTES = 1024
_MAX_NAME_BYTES = 255
_CLOSE = 0.75  # likeness of a name that is suggested
BOOLEANS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
_ELSEWHERE = {
    "decoupled": "set model_transaction_policy { decoupled: … } in config.pbtxt",
    **dict.fromkeys(
        ("api_key", "chat_template", "enable_auto_tool_choice", "tool_call_parser"),
        "it is an argument of vllm serve, not of the engine; remove it",
    ),
}


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name; empty if none is close."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=_CLOSE)), "")


def unknown_setting(key: str, known: Iterable[str]) -> str:
    known = sorted(known)
    if key in _ELSEWHERE:
        return f"unknown setting {key!r}: {_ELSEWHERE[key]}"
    if near := nearest(key, known):
        return f"unknown setting {key!r}; did you mean {near!r}?"
    where = f"known settings: {', '.join(known)}" if len(known) <= _MOST_SHOWN else "docs/settings.md lists them"
    return f"unknown setting {key!r}; {where}"


def check_known(keys: Iterable[str], known: Collection[str], where: str = "") -> None:
    """Raise `ConfigError` for the first unknown key; its message begins with `where`."""
    for key in keys:
        if key not in known:
            raise ConfigError(where + unknown_setting(key, known))


def take_settings(cls: type[object], settings: dict[str, object]) -> dict[str, Any]:
    """Remove the class's fields from `settings`, and return them as the declared types. Raise `ConfigError`."""
    hints = typing.get_type_hints(cls)
    return {key: coerce_setting(key, settings.pop(key), hints[key]) for key in [*settings] if key in hints}


def coerce_setting(key: str, raw: object, hint: object) -> object:
    """Return text or a JSON value as the declared type. Raise `ConfigError`."""
    hints = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    words = [word for one in hints if typing.get_origin(one) is Literal for word in typing.get_args(one)]
    if raw in words or (raw is None and type(None) in hints):
        return raw
    kind = next((one for one in hints if one in (bool, int, float, str)), None)
    if kind is None:
        raise ConfigError(f"{key} is {raw!r}: choose one of {', '.join(map(str, words))}")
    if kind is str:
        return _coerce_text(key, raw)
    value = BOOLEANS.get(str(raw).strip().lower()) if kind is bool else _number(raw, is_whole=kind is int)
    if value is None:
        is_scalar = isinstance(raw, str | int | float) and not isinstance(raw, bool)
        wanted = "true or false" if kind is bool else "an integer" if kind is int and is_scalar else "a number"
        raise ConfigError(f"{key} is {raw!r}: it must be {' or '.join((wanted, *words))}")
    return value


def _coerce_text(key: str, raw: object) -> str:
    if key in JSON_SETTINGS and isinstance(raw, dict):
        return json.dumps(raw)
    if not isinstance(raw, str):
        raise ConfigError(f"{key} is {raw!r}: it must be text")
    encoded = raw.encode("utf-8", "surrogatepass")
    is_name = len(encoded) <= _MAX_PATH_BYTES and max(map(len, encoded.split(b"/"))) <= _MAX_NAME_BYTES
    if key not in JSON_SETTINGS and not (is_name and raw.isprintable()):
        raise ConfigError(
            f"{key} is {raw[:80]!r}, of {len(encoded)} bytes: use printable text of at most {_MAX_PATH_BYTES} bytes, "
            f"{_MAX_NAME_BYTES} between slashes"
        )
    return raw


def _number(raw: object, *, is_whole: bool) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        return None
    try:
        number = float(raw)
        whole = int(raw if isinstance(raw, str) else number) if is_whole else number
        return whole if whole == number else None
    except (ValueError, OverflowError):
        return None


def shown_bytes(num_bytes: int) -> str:
    """Return bytes as text, in GiB, or below 1 GiB in MiB."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.1f}".removesuffix(".0") + " MiB"


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
        follows_model = name == "tokenizer_revision" and value == settings.get("revision")
        if name in NOT_OFFERED and not follows_model:
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
