"""Settings of a front end, and the default sampling of a model's files."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.regular_files import parse_object, read_object
from tidewheel.sampling import SamplingParams
from tidewheel.stats import DEFAULT_TPOT_S, DEFAULT_TTFT_S, Objective

STDERR = "stderr"  # of request_log
IoDialect = Literal["vllm", "trtllm"]
_MAX_SENDERS = 64
_MAX_INTERVAL_MS = 10_000
_OTLP_ADVICE = "use a URL of OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces"
# Read from `generation_config.json` whatever `do_sample` says, like vLLM.
_KEYS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # fmt: skip
_OVERRIDES = (*_KEYS, "max_new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendSettings:
    num_sender_threads: int = 4  # threads that send responses, 1 to 64; more than four gain nothing on two cores
    stream_interval_ms: float = 20.0  # most time between responses of a stream; 12.5 times it if processors are short
    REPORT_CUSTOM_METRICS: bool = True  # publish figures on /metrics; named by Triton's vLLM backend
    default_max_tokens: int | Literal["context"] = 16  # `max_tokens` of a request that names none, or what fits
    max_request_s: float | None = None  # time limit of a request from its arrival, as if it set `deadline_ms`
    max_audio_s: float = 1800.0  # longest audio of a request
    voice_activity: str = ""  # entry of silero-vad that finds the pauses of longer audio; empty: loudness does
    objective_ttft_ms: float = 1e3 * DEFAULT_TTFT_S  # goodput on /metrics: time to the first token of a good answer
    objective_tpot_ms: float = 1e3 * DEFAULT_TPOT_S  # and for each later one
    request_log: str = ""  # file, with its whole path, of a JSON line for each ended request; stderr; empty: none
    otlp_traces_endpoint: str = ""  # URL of a collector of OpenTelemetry, as http://127.0.0.1:4318/v1/traces
    pooling: Literal["last", "mean"] = "last"  # hidden states of an embedding: of the last token, or all tokens' mean
    escape_special_tokens: bool = True  # those that texts of messages spell are plain text; false: control tokens
    io_dialect: IoDialect = "vllm"  # whose tensors: Triton's vLLM backend's or the TensorRT-LLM ensemble's

    def __post_init__(self) -> None:
        tokens, seconds, log = self.default_max_tokens, self.max_request_s, self.request_log
        is_log = log in ("", STDERR) or Path(log).is_absolute()
        rules = (
            ("default_max_tokens", tokens == "context" or tokens >= 1, "use 1 or more, or context"),
            ("max_request_s", seconds is None or 0.0 < seconds < math.inf, "it must be above 0, in seconds"),
            ("max_audio_s", 0.0 < self.max_audio_s < math.inf, "it must be above 0, in seconds"),
            ("objective_ttft_ms", 0.0 < self.objective_ttft_ms < math.inf, "it must be above 0, in milliseconds"),
            ("objective_tpot_ms", 0.0 < self.objective_tpot_ms < math.inf, "it must be above 0, in milliseconds"),
            ("request_log", is_log, f"use a path that begins with /, or {STDERR}"),
            ("otlp_traces_endpoint", _is_endpoint(self.otlp_traces_endpoint), _OTLP_ADVICE),
            ("stream_interval_ms", 0 <= self.stream_interval_ms <= _MAX_INTERVAL_MS, f"use 0 to {_MAX_INTERVAL_MS}"),
            ("num_sender_threads", 1 <= self.num_sender_threads <= _MAX_SENDERS, f"use 1 to {_MAX_SENDERS}"),
        )
        for name, is_right, advice in rules:
            if not is_right:
                value = getattr(self, name)
                raise ConfigError(f"{name} is {f'{value:g}' if isinstance(value, float) else repr(value)}: {advice}")

    @property
    def objective(self) -> Objective:
        return Objective(1e-3 * self.objective_ttft_ms, 1e-3 * self.objective_tpot_ms)

    def timeout_us(self, asked_us: int) -> int:
        """Return the shorter of a request's timeout and `max_request_s`, in microseconds; 0: none."""
        limits_us = asked_us, math.ceil(1e6 * (self.max_request_s or 0))
        return min(filter(None, limits_us), default=0)


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text)
        return not text or (url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0)
    except ValueError:
        return False


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
