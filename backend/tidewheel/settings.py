from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Collection, Iterable
from typing import Any, Literal

from tidewheel.errors import ConfigError

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
