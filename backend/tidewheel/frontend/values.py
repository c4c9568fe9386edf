"""Values that cross the border between front end and adapter: a request for a generation, and its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tidewheel.batch import Int32Array, TopLogprobs
    from tidewheel.engine.messages import RequestStats
    from tidewheel.errors import TidewheelError
    from tidewheel.frontend.options import RequestOptions
    from tidewheel.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    """Parameters as one carrier brought them."""

    origin: str  # as an error names it: "sampling_parameters", "request parameter", "input tensor"
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, exactly one of text, ids or messages, and parameters that are not yet checked."""

    request_id: str = ""
    text: str | bytes | None = None  # bytes are checked for UTF-8
    input_ids: Int32Array | None = None  # [num_prompt_tokens]
    messages: str | bytes | None = None  # JSON list of chat messages
    parameters: tuple[ParameterSource, ...] = ()
    stream: bool = False
    echo: bool = False  # the prompt precedes the output text (not when streaming)
    arrival_ns: int = 0  # monotonic
    timeout_us: int = 0  # a deadline as Triton's own request field gives it; 0: none

    @property
    def prompt_bytes(self) -> int:
        """Size of the prompt as it came; a lower bound for a `str`."""
        ids = 0 if self.input_ids is None else self.input_ids.nbytes
        return len(self.text or "") + len(self.messages or "") + ids


class Generation(NamedTuple):
    """A tokenised prompt and how to continue it."""

    prompt_ids: Int32Array  # [num_prompt_tokens]
    sampling: SamplingParams
    options: RequestOptions
    prompt_name: str = "input_ids"  # its field, for errors
    prompt_text: str | None = None  # None: it came as token ids
    echo: bool = False  # the prompt precedes the output text


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """News of one sequence since the last response."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] | None = None  # aligned with token_ids, when asked
    token_texts: Mapping[int, str] = field(default_factory=dict)  # by id, of all tokens that `logprobs` is about
    cumulative_logprob: float | None = None  # over all output so far, when asked
    num_input_tokens: int = 0
    finish_reason: str | None = None  # in every response after the sequence ended
    stats: RequestStats | None = None  # in every response after the engine ended the sequence


Response = Sequence[Chunk]  # one for each of the request's `n` sequences, by index


def is_last(response: Response) -> bool:
    """Return whether all sequences of the request have ended."""
    return all(chunk.finish_reason is not None for chunk in response)


class Sink(Protocol):
    """The receiver of one request's responses. Called from one thread at a time; `send` of the last response or
    `fail` ends it, exactly once."""

    def send(self, response: Response) -> None: ...

    def fail(self, error: TidewheelError) -> None: ...

    def is_cancelled(self) -> bool: ...
