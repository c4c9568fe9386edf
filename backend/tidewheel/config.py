"""Engine settings: one frozen value, checked once, the same from `config.pbtxt`, `model.json`, CLI or `LLM(...)`.

Names follow vLLM where the concept is the same. Unknown keys and impossible values raise `ConfigError` with one
line that says what to change. What depends on the model or the device (context length, number of blocks) is
resolved later, by the engine, into `EngineInfo`.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tidewheel.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
PolicyName = Literal["fifo", "priority"]

BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Sizes are in tokens, sequences or blocks; fractions in (0, 1]."""

    model: str  # a folder, or a Hugging Face id
    tokenizer: str = ""  # a folder; empty: the model's
    dtype: DType = "auto"
    device: Device = "auto"
    load_format: LoadFormat = "auto"  # dummy: random weights made on the device
    seed: int = 0
    max_model_len: int | None = None  # None: the model's context
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int | None = None  # None: 64 on CUDA, 16 on CPU
    num_blocks: int | None = None  # None: from free memory
    kv_cache_memory_mb: int | None = None  # CPU: memory for the cache; None: 512
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    num_threads: int | None = None  # CPU threads of the engine; None: all cores, one for small models
    scheduling_policy: PolicyName = "priority"
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1 << 22
    max_prompt_bytes: int = 1 << 22
    engine_start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is not set: give a folder or a Hugging Face id")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting_requests", "max_waiting_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_blocks", "kv_cache_memory_mb", "num_threads"):
            _at_least(name, getattr(self, name), 1)
        _at_least("max_prompt_bytes", self.max_prompt_bytes, 1)
        _at_least("seed", self.seed, 0)
        if self.block_size is not None and self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size is {self.block_size}: choose one of {', '.join(map(str, BLOCK_SIZES))}")
        if not 0.05 <= self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization is {self.gpu_memory_utilization}: it must be 0.05 to 1")
        if not 0.0 < self.engine_start_timeout_s <= 86_400.0:
            raise ConfigError(f"engine_start_timeout_s is {self.engine_start_timeout_s}: it must be 0 to 86400")
        if self.num_blocks is not None and self.kv_cache_memory_mb is not None:
            raise ConfigError("num_blocks and kv_cache_memory_mb both set the size of the KV cache: set one")

    @classmethod
    def from_settings(cls, settings: Mapping[str, object], *, base_dir: Path | None = None) -> EngineConfig:
        """Typed settings from text or JSON values.

        `base_dir` is where a relative `model` path starts; a name that is no folder there is taken as a
        Hugging Face id. Keys of vLLM that state what is always so here are accepted with just that value.
        """
        values: dict[str, object] = {}
        hints = typing.get_type_hints(cls)
        for key, raw in settings.items():
            if key in _FIXED:
                _check_fixed(key, raw)
            elif key in hints:
                values[key] = coerce_setting(key, raw, hints[key])
            else:
                raise ConfigError(unknown_setting(key, setting_names()))
        if "model" not in values:
            raise ConfigError("model is not set: give a folder or a Hugging Face id")
        for key in ("model", "tokenizer"):
            if values.get(key) and base_dir is not None and (base_dir / str(values[key])).is_dir():
                values[key] = str((base_dir / str(values[key])).resolve())
        return cls(**values)  # type: ignore[arg-type]

    def to_settings(self) -> dict[str, object]:
        """Only what differs from the defaults: enough to make the same config again."""
        return {
            f.name: value
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default or f.name == "model"
        }


# vLLM settings that have one possible value here: (value, what to do instead).
_FIXED: dict[str, tuple[object, str]] = {
    "trust_remote_code": (False, "code from a model folder is never run"),
    "tensor_parallel_size": (1, "one device serves one engine"),
    "pipeline_parallel_size": (1, "one device serves one engine"),
    "kv_cache_dtype": ("auto", "the cache has the dtype of the model"),
    "disable_log_requests": (True, "requests are never logged"),
    "disable_log_stats": (True, "figures go to /metrics"),
    "enforce_eager": (True, "steps run without CUDA graphs"),
    "enable_chunked_prefill": (True, "prompts are always chunked to the token budget"),
    "swap_space": (0, "preempted requests are computed again"),
    "quantization": ("", "weights are served in float32, bfloat16 or float16"),
}


def _check_fixed(key: str, raw: object) -> None:
    expected, reason = _FIXED[key]
    if coerce_setting(key, raw, type(expected)) != expected:
        raise ConfigError(f"{key} is {raw!r}: only {expected!r} is offered ({reason})")


def setting_names() -> list[str]:
    """Every key that `EngineConfig.from_settings` takes."""
    return [*(field.name for field in dataclasses.fields(EngineConfig)), *_FIXED]


def unknown_setting(key: str, known: Iterable[str]) -> str:
    """What to say of a key that is none of the known ones."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known settings: {', '.join(known)}"
    return f"unknown setting {key!r}{hint}"


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{name} is {value}: it must be at least {low}")


def coerce_setting(key: str, raw: object, hint: object) -> object:
    """Text as `config.pbtxt` has it, or a JSON value, as the type that the field declares."""
    if isinstance(hint, types.UnionType):
        if raw is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if raw not in choices:
            raise ConfigError(f"{key} is {raw!r}: choose one of {', '.join(map(str, choices))}")
        return raw
    if hint is bool:
        return _coerce_bool(key, raw)
    if hint is str:
        if not isinstance(raw, str):
            raise ConfigError(f"{key} is {raw!r}: it must be text")
        return raw
    return _coerce_number(key, raw, int if hint is int else float)


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
