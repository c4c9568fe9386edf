from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.regular_files import parse_object, read_object
from tidewheel.sampling import SamplingParams

# Read from `generation_config.json` whatever `do_sample` says, like vLLM.
_KEYS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip
_OVERRIDES = (*_KEYS, "max_new_tokens")


class GenerationDefaults(NamedTuple):
    sampling: Mapping[str, Any]  # by `SamplingParams` name
    eos_token_ids: frozenset[int]

    @classmethod
    def load(cls, folder: Path, source: str = "auto", overrides: str = "{}") -> "GenerationDefaults":
        """Read `generation_config.json` and `config.json`, both optional. Raise `ConfigError`.

        `source`: auto (the model's), vllm (only `overrides`, JSON), or a folder.
        """
        path = (folder if source in ("auto", "vllm") else Path(source)) / "generation_config.json"
        if source not in ("auto", "vllm") and not path.is_file():
            raise ConfigError(f"generation_config is {source!r}: give auto, vllm, or a folder with {path.name}")
        sampling = {} if source == "vllm" else _sampling(read_object(path), _KEYS, str(path))
        sampling |= read_overrides(overrides)
        eos = (*_eos_token_ids(path), *_eos_token_ids(folder / "config.json"))
        return cls(sampling, frozenset(eos))


def read_overrides(text: str) -> dict[str, Any]:
    """Return the `SamplingParams` fields in a JSON text. Raise `ConfigError`."""
    name = "override_generation_config"
    values = parse_object(text, name)
    for key in values:
        if key not in _OVERRIDES:
            raise ConfigError(f"{name} has {key!r}: only {', '.join(_OVERRIDES)} are read")
    return _sampling(values, _OVERRIDES, name)


def _sampling(values: Mapping[str, object], keys: Iterable[str], where: str) -> dict[str, Any]:
    sampling: dict[str, Any] = {key: values[key] for key in keys if values.get(key) is not None}
    if "max_new_tokens" in sampling:
        sampling["max_tokens"] = sampling.pop("max_new_tokens")
    try:
        SamplingParams(**sampling)
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error.message}") from None
    return sampling


def _eos_token_ids(path: Path) -> list[int]:
    value = read_object(path).get("eos_token_id")
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ConfigError(f"{path}: eos_token_id is {value!r}, it must be a token id or a list of them")
    return ids
