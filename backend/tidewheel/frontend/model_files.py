"""JSON files of a model folder: small, optional, and never trusted to be well formed."""

from __future__ import annotations

import json
from pathlib import Path

from tidewheel.errors import ConfigError

MAX_FILE_BYTES = 256 << 20  # the largest tokenizer.json in use has some 35 MB


def read_text(path: Path) -> str | None:
    """None when there is no such file. Raises `ConfigError` when it cannot be read as UTF-8 text."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def read_object(path: Path) -> dict[str, object]:
    """A JSON object; empty when there is no such file."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}: it must be a JSON object")
    return value


def token_ids(path: Path, values: dict[str, object], key: str) -> tuple[int, ...]:
    """A token id or a list of them, as Hugging Face writes `eos_token_id`; empty when absent or null."""
    value = values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{path}: {key} is {value!r}, it must be a token id or a list of them")
    return tuple(ids)
