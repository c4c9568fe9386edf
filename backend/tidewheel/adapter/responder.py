from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tidewheel.batch import TopLogprobs
from tidewheel.engine.messages import RequestStats
from tidewheel.errors import InternalError, TidewheelError
from tidewheel.frontend.interface import Chunk, Response, is_last

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """Tensors beside `text_output`."""

    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    is_logprobs_null: bool = False  # only `return_logprobs` asks for them, which vLLM's backend answers with null
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    token_ids: bool = False
    perf_metrics: bool = False
    accumulate: bool = False  # each response holds all text so far


class TritonSink:
    """`Sink` on a Triton response sender.

    Triton frees the request with its FINAL response, and `is_cancelled` on a freed one crashes the server (seen with
    2.51). So a lock separates it from sending, and nothing touches the sender after the end.
    """

    def __init__(self, sender: Any) -> None:
        self.format = ResponseFormat()  # set before sending
        self._sender = sender
        self._lock = threading.Lock()
        self._is_open = True
        self._is_cancelled = False
        self._texts: list[list[str]] = []  # if text accumulates

    def send(self, response: Response) -> None:
        """Send a response, FINAL if it is the last. If that fails, end the request."""
        with self._lock:
            if not self._is_open:
                return
            try:
                self._respond(response)
            except Exception as error:
                pb_utils.Logger.log_error(f"a response could not be sent: {error}")
                self._is_cancelled = True
                self._fail(InternalError("the response could not be sent; the server's log says why"))

    def fail(self, error: TidewheelError) -> None:
        with self._lock:
            self._fail(error)

    def is_cancelled(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return self._is_cancelled  # sending now: ask later
        try:
            if self._is_open and not self._is_cancelled:
                self._is_cancelled = bool(self._sender.is_cancelled())
            return self._is_cancelled
        finally:
            self._lock.release()

    def _respond(self, response: Response) -> None:
        tensors = response_tensors(response, self.format, self._texts_of(response))
        is_final = is_last(response)
        self._sender.send(pb_utils.InferenceResponse(tensors), flags=_FINAL if is_final else 0)
        self._is_open = not is_final

    def _fail(self, error: TidewheelError) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._sender.send(error_response(error), flags=_FINAL)
        except Exception as reason:
            pb_utils.Logger.log_error(f"an error response could not be sent: {reason}")

    def _texts_of(self, response: Response) -> list[str]:
        new = [chunk.text for chunk in response]
        if not self.format.accumulate:
            return new
        self._texts.append(new)
        return ["".join(texts) for texts in zip(*self._texts, strict=True)]


def response_tensors(response: Response, response_format: ResponseFormat, texts: Sequence[str]) -> list[Any]:
    """Return tensors with one element per sequence. `token_ids` concatenates those of all."""
    tensors = [_text_tensor("text_output", texts)]
    if response_format.finish_reason:
        tensors.append(_text_tensor("finish_reason", [chunk.finish_reason or "None" for chunk in response]))
    if response_format.cumulative_logprob and response[0].cumulative_logprob is not None:
        tensors.append(_tensor("cumulative_logprob", np.float32, [c.cumulative_logprob or 0.0 for c in response]))
    if response_format.logprobs:
        is_null = response_format.is_logprobs_null
        tensors.append(_text_tensor("logprobs", ["null" if is_null else logprobs_json(c) for c in response]))
    if response_format.num_input_tokens:
        tensors.append(_tensor("num_input_tokens", np.uint32, [response[0].num_input_tokens]))
    if response_format.num_output_tokens:
        tensors.append(_tensor("num_output_tokens", np.uint32, [len(chunk.token_ids) for chunk in response]))
    if response_format.token_ids:
        tensors.append(_tensor("token_ids", np.int32, [i for chunk in response for i in chunk.token_ids]))
    if response_format.perf_metrics and is_last(response) and any(chunk.stats is not None for chunk in response):
        # A stop string may have ended a sequence before its figures came.
        tensors.extend(_perf_tensors([chunk.stats or RequestStats() for chunk in response]))
    return tensors


def logprobs_json(chunk: Chunk) -> str:
    """Return `{token_id: {logprob, rank, decoded_token}}` per token. `logprob` is null if infinite."""
    pairs = zip(chunk.token_ids, chunk.logprobs or (), strict=False)
    return json.dumps([_logprob_entries(token_id, entry, chunk.token_texts) for token_id, entry in pairs])


def _logprob_entries(token_id: int, logprobs: TopLogprobs, texts: Mapping[int, str]) -> dict[str, object]:
    found = {token_id: (logprobs.logprob, logprobs.rank)}
    for rank, (top_id, logprob) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), start=1):
        found[top_id] = (logprob, rank)  # of a tie, vLLM shows the place among the likeliest
    return {
        str(known): {
            "logprob": logprob if math.isfinite(logprob) else None,
            "rank": rank,
            "decoded_token": texts[known],
        }
        for known, (logprob, rank) in found.items()
    }


def _perf_tensors(stats: Sequence[RequestStats]) -> list[Any]:
    def column(name: str, dtype: type[np.generic], of: Callable[[RequestStats], int]) -> Any:
        return _tensor(name, dtype, [of(one) for one in stats])

    return [
        column("arrival_time_ns", np.int64, lambda s: s.arrival_ns),
        column("first_scheduled_time_ns", np.int64, lambda s: s.first_scheduled_ns),
        column("first_token_time_ns", np.int64, lambda s: s.first_token_ns),
        column("last_token_time_ns", np.int64, lambda s: s.last_token_ns),
        column("kv_cache_reused_blocks", np.int32, lambda s: s.num_reused_blocks),
        column("kv_cache_alloc_new_blocks", np.int32, lambda s: s.num_new_blocks),
        column("priority", np.int32, lambda s: s.priority),
    ]


def _tensor(name: str, dtype: type[np.generic], values: Sequence[float]) -> Any:
    return pb_utils.Tensor(name, np.array(values, dtype=dtype))


def _text_tensor(name: str, texts: Sequence[str]) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode("utf-8", "replace") for text in texts], dtype=np.object_))


def error_response(error: TidewheelError) -> Any:
    code = getattr(pb_utils.TritonError, error.code.value)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(_printable(str(error)), code))


def _printable(message: str) -> str:
    """Escape lone surrogates and control characters, and cut long messages."""
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[:_MAX_MESSAGE_CHARS] + "…"
    encodable = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in encodable)
