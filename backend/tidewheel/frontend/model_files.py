from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.sampling import SamplingParams

MAX_FILE_BYTES = 256 << 20  # the largest tokenizer.json has about 35 MB
# Read from `generation_config.json` whatever `do_sample` says, like vLLM.
_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_text(path: Path) -> str | None:
    """Return None if the file is missing. Raise `ConfigError`."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes: at most {MAX_FILE_BYTES} are read")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def read_object(path: Path) -> dict[str, object]:
    """Return an empty object if the file is missing. Raise `ConfigError`."""
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


class GenerationDefaults(NamedTuple):
    sampling: Mapping[str, float]  # by `SamplingParams` name
    eos_token_ids: frozenset[int]

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """Read `generation_config.json` and `config.json`, both optional. Raise `ConfigError`."""
        path = folder / "generation_config.json"
        generation = read_object(path)
        sampling = {key: value for key in _KEYS if (value := generation.get(key)) is not None}
        try:
            SamplingParams(**sampling)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ConfigError(f"{path}: {error.message}") from None
        eos = (*_eos_token_ids(path), *_eos_token_ids(folder / "config.json"))
        return cls(sampling, frozenset(eos))  # type: ignore[arg-type]


def _eos_token_ids(path: Path) -> list[int]:
    value = read_object(path).get("eos_token_id")
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{path}: eos_token_id is {value!r}, it must be a token id or a list of them")
    return ids
