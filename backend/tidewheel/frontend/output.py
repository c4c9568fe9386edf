from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from tidewheel.batch import Float32Array, Int32Array
from tidewheel.engine.messages import WHOLE_REQUEST, Delta, RequestStats
from tidewheel.errors import TidewheelError
from tidewheel.frontend.tokenizer import Detokenizer, Tokenizer
from tidewheel.one_shot.signature import Array
from tidewheel.request import FinishReason, Pooling
from tidewheel.request_options import RequestOptions
from tidewheel.sampling import SamplingParams, TopLogprobs

_TINY = 1e-30  # for states that are all zero


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
    audio: Float32Array | None = None  # [num_samples], of a speech model
    language: str = ""  # of audio
    seconds: Sequence[float] = ()  # begin and end of its window, and the length of the audio


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    token_ids: list[int] = []
    logprobs: list[TopLogprobs] | None = None  # aligned with token_ids
    prompt_ids: list[int] = []  # aligned with `prompt_logprobs`, and the first token
    prompt_logprobs: list[TopLogprobs] | None = None  # once, if asked
    token_texts: dict[int, str] = {}  # of ids with log-probabilities
    embedding: Float32Array | None = None  # [hidden_size] of length 1
    tensors: Mapping[str, Array] | None = None  # outputs of a one-shot model
    cumulative_logprob: float | None = None  # of all output
    num_input_tokens: int = 0
    language: str = ""
    seconds: Sequence[float] = ()
    finish_reason: str | None = None  # in every response after the end
    stats: RequestStats | None = None  # in every response after the engine's end


Response = Sequence[OutputChunk]  # by sequence


class Sink(Protocol):
    """Receiver of a request's responses. One thread at a time calls `send` or `fail`, which never raise."""

    def send(self, response: Response) -> None: ...

    def fail(self, error: TidewheelError) -> None: ...

    def is_cancelled(self) -> bool: ...


def is_last(response: Response) -> bool:
    if len(response) == 1:  # most, each asked twice
        return response[0].finish_reason is not None
    return all(chunk.finish_reason is not None for chunk in response)


class StopChecker:
    def __init__(self, strings: Iterable[str], *, include_in_output: bool = False) -> None:
        self._strings = sorted(set(strings), key=len, reverse=True)
        self._first_chars = frozenset(string[0] for string in self._strings)
        self._include = include_in_output
        self._held = ""  # may begin a stop string
        self.is_hit = False

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Return text up to a stop string; withhold an end that may begin one. Without `may_stop`, search none."""
        if self.is_hit:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        buffer = self._held + text
        if may_stop and (found := self._find(buffer)) is not None:
            self.is_hit, self._held = True, ""
            end, begin = found
            return buffer[: end if self._include else begin]
        ends = (buffer[start:] for start in range(len(buffer)))
        self._held = next((end for end in ends if any(string.startswith(end) for string in self._strings)), "")
        return buffer[: len(buffer) - len(self._held)]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _find(self, buffer: str) -> tuple[int, int] | None:
        """Return (end, begin) of the stop string that ends first; at equal ends, of the longest."""
        num_held, found = len(self._held), []
        for string in self._strings:
            begin = buffer.find(string, max(num_held + 1 - len(string), 0))
            if begin >= 0:
                found.append((begin + len(string), begin))
        return min(found, default=None)


class OutputStream:
    """Output of a sequence until `take`. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, given: Generation) -> None:
        self._tokenizer = tokenizer
        self._given = given
        self._sampling = sampling = given.sampling
        self._detokenizer = None
        if tokenizer is not None:
            skip = sampling.skip_special_tokens
            self._detokenizer = Detokenizer(tokenizer, given.prompt_ids, skip_special_tokens=skip)
        self._stop = StopChecker(sampling.stop, include_in_output=sampling.include_stop_str_in_output)
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self._wants_logprobs = sampling.logprobs is not None
        self._cumulative_logprob = 0.0
        self.token_ids: list[int] = []  # not taken
        self._logprobs: list[TopLogprobs] = []
        self._prompt_logprobs: list[TopLogprobs] | None = None
        self._embedding: Float32Array | None = None
        self._text = [self._prompt_text(given)] if given.echo else []

    def push(self, delta: Delta) -> None:
        if self.finish_reason is not None:
            return
        self._take_prompt(delta)
        ends = delta.finish_reason == FinishReason.STOP and not self._sampling.include_stop_str_in_output
        num_taken = self._push_text(delta.token_ids[:-1] if ends else delta.token_ids)
        if self._stop.is_hit:
            self.finish_reason = FinishReason.STOP.value
        else:
            num_taken = len(delta.token_ids)
        self.token_ids += delta.token_ids[:num_taken]
        self.num_tokens += num_taken
        for entry in (delta.logprobs or [])[:num_taken]:
            self._cumulative_logprob += entry.logprob
            self._logprobs.append(entry)

    def end(self, finish_reason: str) -> None:
        """Set the finish reason and emit withheld text, unless finished."""
        if self.finish_reason is None:
            self.finish_reason = finish_reason
            held = "" if self._detokenizer is None else self._detokenizer.flush()
            self._text.append(self._stop.push(held, may_stop=False) + self._stop.flush())

    def take(self, stats: RequestStats | None = None) -> OutputChunk:
        chunk = OutputChunk(
            text="".join(self._text),
            token_ids=self.token_ids,
            logprobs=self._logprobs if self._wants_logprobs else None,
            prompt_ids=[] if self._prompt_logprobs is None else self._given.prompt_ids.tolist(),
            prompt_logprobs=self._prompt_logprobs,
            token_texts=self._token_texts(),
            embedding=self._embedding,
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            num_input_tokens=len(self._given.prompt_ids),
            language=self._given.language,
            seconds=self._given.seconds,
            finish_reason=self.finish_reason,
            stats=stats,
        )
        self._text, self.token_ids, self._logprobs, self._prompt_logprobs = [], [], [], None
        return chunk

    def _take_prompt(self, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs

    def _push_text(self, token_ids: list[int]) -> int:
        if self._detokenizer is None:
            return len(token_ids)
        if not self._sampling.stop:
            self._text.append(self._detokenizer.push(token_ids))
            return len(token_ids)
        for index, token_id in enumerate(token_ids, start=1):
            may_stop = self.num_tokens + index > self._sampling.min_tokens
            self._text.append(self._stop.push(self._detokenizer.push((token_id,)), may_stop=may_stop))
            if self._stop.is_hit:
                return index
        return len(token_ids)

    def _prompt_text(self, given: Generation) -> str:
        if given.prompt_text is not None or self._tokenizer is None:
            return given.prompt_text or ""
        skip = given.sampling.skip_special_tokens
        return self._tokenizer.decode(given.prompt_ids.tolist(), skip_special_tokens=skip)

    def _token_texts(self) -> dict[int, str]:
        if self._tokenizer is None or not (self._logprobs or self._prompt_logprobs is not None):
            return {}
        of_prompt = self._prompt_logprobs or []
        token_ids = {token_id for entry in (*self._logprobs, *of_prompt) for token_id in entry.top_ids}
        token_ids.update(self.token_ids, () if self._prompt_logprobs is None else self._given.prompt_ids.tolist())
        return {token_id: self._tokenizer.token_text(token_id) for token_id in token_ids}


class PromptStream(OutputStream):
    """Output of a request that only scores, echoes or embeds its prompt. Embeddings are scaled to length 1."""

    def push(self, delta: Delta) -> None:
        self._take_prompt(delta)
        if delta.pooled:
            states = np.frombuffer(delta.pooled, dtype="<f4").astype(np.float32)
            self._embedding = states / max(float(np.linalg.norm(states)), _TINY)
            self.end(FinishReason.STOP.value)
        elif delta.token_ids and not self._given.pooling:
            self.end(FinishReason.LENGTH.value)


class Outputs:
    """Outputs of a request's sequences, opened at the first output. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer | None, given: Generation) -> None:
        self.num_input_tokens = len(given.prompt_ids)
        self._tokenizer = tokenizer
        self._given = given
        self._streams: list[OutputStream] = []
        self._stats: dict[int, RequestStats] = {}  # by index, from the engine

    @property
    def is_over(self) -> bool:
        return bool(self._streams) and all(stream.finish_reason is not None for stream in self._streams)

    @property
    def num_output_tokens(self) -> list[int]:
        return [stream.num_tokens for stream in self._streams]

    @property
    def has_tokens(self) -> bool:
        return any(stream.token_ids for stream in self._streams)

    def push(self, deltas: Iterable[Delta]) -> list[int]:
        """Add output of the engine. Return indices of sequences that a stop string ended."""
        return [delta.index for delta in deltas if delta.index != WHOLE_REQUEST and self._push(delta)]

    def end(self, finish_reason: str) -> TidewheelError | None:
        """End the sequences that have not ended. Return an error if there is no part to send."""
        for stream in self._opened():
            stream.end(finish_reason)
        return None

    def take(self) -> Response:
        return [stream.take(self._stats.get(index)) for index, stream in enumerate(self._opened())]

    def _opened(self) -> list[OutputStream]:
        if not self._streams:
            given = self._given
            kind = PromptStream if given.pooling or given.is_scoring else OutputStream
            self._streams = [kind(self._tokenizer, given) for _ in range(given.options.n)]
        return self._streams

    def _push(self, delta: Delta) -> bool:
        if delta.stats is not None:
            self._stats[delta.index] = delta.stats
        if delta.error is not None and not delta.token_ids:
            return False
        stream = self._opened()[delta.index]
        was_over = stream.finish_reason is not None
        stream.push(delta)
        if not delta.finish_reason:
            return stream.finish_reason is not None and not was_over
        if delta.error is None:
            stream.end(delta.finish_reason)
        return False
