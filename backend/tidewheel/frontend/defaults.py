"""What a model's folder says of how it wants to be sampled: defaults, and the tokens that end its output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.frontend.model_files import read_object, token_ids
from tidewheel.sampling import SamplingParams

# Taken wherever `generation_config.json` has them, whatever its `do_sample` says, as vLLM does.
_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class GenerationDefaults(NamedTuple):
    sampling: Mapping[str, float]  # by name of `SamplingParams`
    eos_token_ids: frozenset[int]

    @classmethod
    def load(cls, folder: Path) -> GenerationDefaults:
        """From `generation_config.json` and `config.json`, both optional. Raises `ConfigError`."""
        path = folder / "generation_config.json"
        generation = read_object(path)
        sampling = {key: value for key in _KEYS if (value := generation.get(key)) is not None}
        try:
            SamplingParams(**sampling)  # type: ignore[arg-type]
        except InvalidRequest as error:
            raise ConfigError(f"{path}: {error.message}") from None
        config_path = folder / "config.json"
        eos = (
            *token_ids(path, generation, "eos_token_id"),
            *token_ids(config_path, read_object(config_path), "eos_token_id"),
        )
        return cls(sampling, frozenset(eos))  # type: ignore[arg-type]
