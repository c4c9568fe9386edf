"""Changes to an input: of bytes, or of one place in the value that JSON or msgpack holds."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import msgspec

Form = Literal["json", "msgpack", "text"]

DEEP = "[" * 3000 + "]" * 3000
# What parsers and checks of values tend to forget.
INTERESTING: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**400, 0.5, 1e-320, 1e308, float("nan"),
    float("inf"), -float("inf"), "", " ", "0", "-1", "1e999", "nan", "9" * 5000, "None", "true", "\ud800", "\x00",
    "a\nb\x1b[31m", "🎉", "../x", "a" * 5000, DEEP, [], {}, [[]], {"": None}, [None], {"a": {"a": 1}}, [1, "a"],
)  # fmt: skip
_PIECES = tuple(
    text.encode()
    for text in (
        "{", "}", "[", "]", '"', ":", ",", "\n", "\r", "\x00", "{{", "{%", "%}", "-", "1e999", "NaN", "null",
        "\\ud800", "99999999999999999999", "#", "'", "<", ">", "key", "$", "(", ")", "|", "*", "range(9)",
    )
)  # fmt: skip


def mutate(data: bytes, form: Form, rng: random.Random) -> bytes:
    """Return the input with a few changes; of its bytes where it holds no value."""
    if form == "text" or rng.random() < 0.2:
        return _mutate_bytes(data, rng)
    try:
        value = json.loads(data) if form == "json" else msgspec.msgpack.decode(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            value = _mutate_value(value, rng)
        return json.dumps(value).encode() if form == "json" else msgspec.msgpack.encode(value)
    except (ValueError, RecursionError, OverflowError, TypeError, msgspec.MsgspecError):
        return _mutate_bytes(data, rng)


def _mutate_value(value: Any, rng: random.Random) -> Any:
    """Replace, remove or double one place, more likely where there are more."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return (
            rng.choice(INTERESTING) if not isinstance(value, str) or rng.random() < 0.5 else _mutate_text(value, rng)
        )
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    (key,) = rng.choices(
        keys, [1 + 2 * min(len(value[k]), 10) if isinstance(value[k], dict | list) else 1 for k in keys]
    )
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    kind = rng.random()
    if kind < 0.08:
        del changed[key]
    elif kind < 0.16 and isinstance(changed, dict):
        name = rng.choice([item for item in INTERESTING if isinstance(item, str)])
        changed[name if rng.random() < 0.5 else rng.choice(keys)] = value[key]
    elif kind < 0.16:
        changed += [value[key]] * rng.choice((1, 20, 3000))
    else:
        changed[key] = _mutate_value(value[key], rng)
    return changed


def _mutate_text(text: str, rng: random.Random) -> str:
    return _mutate_bytes(text.encode("utf-8", "surrogatepass"), rng).decode("utf-8", "replace")


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        place = rng.randrange(len(changed) + 1)
        end = min(place + rng.choice((0, 0, 1, 4, 32)), len(changed))
        new = rng.choice((rng.choice(_PIECES), rng.randbytes(1), bytes(changed[place:end]) * 2, b""))
        changed[place:end] = new
    return bytes(changed)
