"""Conversion of settings from text."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Literal

from tidewheel.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
JSON_SETTINGS = ("tenants", "override_generation_config")  # text in `config.pbtxt`, an object in `model.json`
_MOST_SHOWN = 16
_MAX_PATH_BYTES = 1024
_MAX_NAME_BYTES = 255  # in Linux
_CLOSE = 0.75  # likeness of a name that is suggested
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


def coerce_setting(key: str, raw: object, hint: object) -> object:
    """Return text or a JSON value as the declared type. Raise `ConfigError`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _coerce_either(key, raw, typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if raw not in choices:
            raise ConfigError(f"{key} is {raw!r}: choose one of {', '.join(map(str, choices))}")
        return raw
    if hint is bool:
        return _coerce_bool(key, raw)
    if hint is str:
        return _coerce_text(key, raw)
    return _coerce_number(key, raw, int if hint is int else float)


def _coerce_text(key: str, raw: object) -> str:
    """Return text that can name a file, because most text settings do. Raise `ConfigError`."""
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


def _coerce_either(key: str, raw: object, hints: Sequence[object]) -> object:
    words = [word for hint in hints if typing.get_origin(hint) is Literal for word in typing.get_args(hint)]
    if raw in words or (raw is None and type(None) in hints):
        return raw
    hint = next(hint for hint in hints if hint is not type(None) and typing.get_origin(hint) is not Literal)
    try:
        return coerce_setting(key, raw, hint)
    except ConfigError as error:
        raise ConfigError(" or ".join((str(error), *words))) from None


def _coerce_bool(key: str, raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off"):
        return False
    raise ConfigError(f"{key} is {raw!r}: it must be true or false")


def _coerce_number(key: str, raw: object, kind: type[int] | type[float]) -> int | float:
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ConfigError(f"{key} is {raw!r}: it must be a number")
    try:
        number = float(raw)
        if kind is int:
            exact = int(raw) if isinstance(raw, str) else int(number)
            if exact != number:
                raise ValueError
            return exact
    except (ValueError, OverflowError):
        wanted = "an integer" if kind is int else "a number"
        raise ConfigError(f"{key} is {raw!r}: it must be {wanted}") from None
    if number != number:
        raise ConfigError(f"{key} is {raw!r}: it must be a number")
    return number


def shown_bytes(num_bytes: int) -> str:
    """Return bytes as text, in GiB, or below 1 GiB in MiB."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / MIB:.1f}".removesuffix(".0") + " MiB"
