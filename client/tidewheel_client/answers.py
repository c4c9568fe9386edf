from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    logprob: float
    rank: int  # 1: most likely; 0: a prompt's first token
    decoded_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfMetrics:
    """Times on the server's monotonic clock, and the prompt's KV blocks."""

    arrival_time_ns: int
    first_scheduled_time_ns: int
    first_token_time_ns: int
    last_token_time_ns: int
    kv_cache_reused_blocks: int
    kv_cache_alloc_new_blocks: int
    priority: int  # 1 CRITICAL to 4 LOW, at most the tenant's best
    num_cached_tokens: int  # of the prompt
    weights: str = "full"  # that computed it: full, quantized or mixed
    num_draft_tokens: int = 0  # proposed by speculative decoding
    num_accepted_draft_tokens: int = 0  # of these, tokens of the answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """Picture after `step` of its `steps`: a preview, or the last."""

    step: int
    steps: int
    image: npt.NDArray[np.uint8] | None = None  # [height, width, channels], of 1 (grey), 3 (RGB) or 4 (RGBA)
    png_base64: str = ""  # a PNG file in place of `image`, for format="png_base64"


@dataclass(slots=True, kw_only=True)  # a frozen one costs 1.3 µs more a response
class Chunk:
    """Part of one sequence; the last part has a `finish_reason`. Output flags ask for optional fields."""

    text: str
    index: int = 0
    finish_reason: str | None = None  # stop, length, cancelled, deadline
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None  # of this chunk
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[Mapping[int, TokenLogprob], ...] | None = None  # per token, with return_logprobs and logprobs
    prompt_logprobs: tuple[Mapping[int, TokenLogprob], ...] | None = None  # on the first chunk
    embedding: tuple[float, ...] | None = None
    language: str | None = None  # of audio
    seconds: tuple[float, ...] | None = None  # begin and end of its window, and the length of the audio
    cumulative_logprob: float | None = None  # so far
    perf: PerfMetrics | None = None  # on the last chunk
    picture: Picture | None = None  # of a model of pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Whole answer of one sequence, with the fields of `Chunk`."""

    request_id: str
    text: str
    finish_reason: str
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[Mapping[int, TokenLogprob], ...] | None = None
    prompt_logprobs: tuple[Mapping[int, TokenLogprob], ...] | None = None  # of the first sequence
    cumulative_logprob: float | None = None
    perf: PerfMetrics | None = None
    index: int = 0

    @classmethod
    def of_sequences(cls, request_id: str, chunks: Iterable[Chunk]) -> "tuple[Completion, ...]":
        by_index: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            by_index.setdefault(chunk.index, []).append(chunk)
        return tuple(cls.from_chunks(request_id, by_index[index]) for index in sorted(by_index))

    @classmethod
    def from_chunks(cls, request_id: str, chunks: Iterable[Chunk]) -> "Completion":
        parts = list(chunks)
        last = parts[-1]
        counts = [part.num_output_tokens for part in parts if part.num_output_tokens is not None]
        ids = [part.token_ids for part in parts if part.token_ids is not None]
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        return cls(
            request_id=request_id,
            text="".join(part.text for part in parts),
            finish_reason=last.finish_reason or "",
            num_input_tokens=last.num_input_tokens,
            num_output_tokens=sum(counts) if counts else None,
            token_ids=tuple(i for part in ids for i in part) if ids else None,
            logprobs=tuple(entry for part in logprobs for entry in part) if logprobs else None,
            prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
            cumulative_logprob=last.cumulative_logprob,
            perf=last.perf,
            index=last.index,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    server_version: str
    model: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Health(msgspec.Struct, frozen=True):
    """Answer of a server's `/ready`."""

    is_ready: bool = msgspec.field(name="ready")
    state: str  # as docs/serve.md lists them
    reason: str = ""


class LoraState(msgspec.Struct, frozen=True):
    name: str
    path: str  # folder on the server
    rank: int | None = None  # largest; None: not read yet
    is_loaded: bool = False  # in host memory; others are read for their next request
