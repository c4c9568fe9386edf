from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from tidewheel.batch import Float32Array, Int32Array
from tidewheel.engine.messages import RequestStats
from tidewheel.errors import TidewheelError
from tidewheel.request import Pooling
from tidewheel.request_options import RequestOptions
from tidewheel.sampling import SamplingParams, TopLogprobs

INPUT_TENSOR = "input tensor"  # origin of parameters
Task = Literal["generate", "tokenize", "detokenize", "embed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSource:
    origin: str  # for errors: "sampling_parameters", "request parameter", `INPUT_TENSOR`
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    request_id: str = ""
    task: Task = "generate"
    text: str | bytes | None = None
    input_ids: Int32Array | None = None  # [num_prompt_tokens]
    messages: str | bytes | None = None  # JSON list of chat messages
    parameters: tuple[ParameterSource, ...] = ()
    stream: bool = False
    echo: bool = False  # prompt before the text (not when streaming)
    arrival_ns: int = 0  # monotonic
    traceparent: str = ""  # W3C's, of the span that asks
    timeout_us: int = 0  # from the arrival, by Triton or the entry; 0: none

    @property
    def prompt_bytes(self) -> int:
        """Return a lower bound of the prompt's size."""
        ids = 0 if self.input_ids is None else self.input_ids.nbytes
        return len(self.text or "") + len(self.messages or "") + ids


class Generation(NamedTuple):
    prompt_ids: Int32Array  # [num_prompt_tokens]
    sampling: SamplingParams
    options: RequestOptions
    prompt_name: str = "input_ids"  # field of the prompt, for errors
    prompt_text: str | None = None  # None: token ids
    echo: bool = False
    pooling: Pooling = ""
    is_scoring: bool = False  # nothing is generated
    request_id: str = ""


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New output of a sequence."""

    text: str
    token_ids: list[int] = []
    logprobs: list[TopLogprobs] | None = None  # aligned with token_ids
    prompt_ids: list[int] = []  # aligned with `prompt_logprobs`, and the first token
    prompt_logprobs: list[TopLogprobs] | None = None  # once, if asked
    token_texts: dict[int, str] = {}  # of ids in what has log-probabilities
    embedding: Float32Array | None = None  # [hidden_size] of length 1
    cumulative_logprob: float | None = None  # of all output
    num_input_tokens: int = 0
    finish_reason: str | None = None  # in every response after the end
    stats: RequestStats | None = None  # in every response after the engine's end


Response = Sequence[OutputChunk]  # by sequence


def is_last(response: Response) -> bool:
    if len(response) == 1:  # most, and each is asked twice
        return response[0].finish_reason is not None
    return all(chunk.finish_reason is not None for chunk in response)


class Sink(Protocol):
    """Receiver of one request's responses, from one thread at a time, up to the last `send` or `fail`."""

    def send(self, response: Response) -> None: ...

    def fail(self, error: TidewheelError) -> None: ...

    def is_cancelled(self) -> bool: ...
