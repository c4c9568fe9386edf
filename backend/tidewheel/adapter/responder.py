import functools
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from tidewheel.adapter.tensors import ResponseFormat
from tidewheel.engine.messages import RequestStats
from tidewheel.errors import InternalError, TidewheelError, printable
from tidewheel.frontend.output import Response, is_last
from tidewheel.sampling import TopLogprobs

_COUNTS = frozenset(("num_input_tokens", "num_output_tokens"))  # tensors of few values
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# Figures of `RequestStats` by tensor of `return_perf_metrics`.
_PERF_TENSORS: Mapping[str, tuple[str, type[np.generic]]] = {
    "arrival_time_ns": ("arrival_ns", np.int64),
    "first_scheduled_time_ns": ("first_scheduled_ns", np.int64),
    "first_token_time_ns": ("first_token_ns", np.int64),
    "last_token_time_ns": ("last_token_ns", np.int64),
    "kv_cache_reused_blocks": ("num_reused_blocks", np.int32),
    "kv_cache_alloc_new_blocks": ("num_new_blocks", np.int32),
    "num_cached_tokens": ("num_cached_tokens", np.int32),
    "priority": ("priority", np.int32),
    "num_draft_tokens": ("num_draft_tokens", np.int32),
    "num_accepted_draft_tokens": ("num_accepted_draft_tokens", np.int32),
}


class TritonSink:
    """Thread-safe `Sink` on a Triton response sender. Triton's `is_cancelled` crashes server 2.51 after FINAL."""

    def __init__(self, sender: Any, on_end: Callable[[], None] = lambda: None) -> None:
        self.format = ResponseFormat()  # set before sending
        self._sender = sender
        self._on_end = on_end
        self._lock = threading.RLock()  # `send` may call `fail`
        self._is_open = True
        self._is_cancelled = False
        self._texts: list[list[str]] = []  # if text accumulates

    def send(self, response: Response) -> None:
        """Send a response, flagged FINAL if it is the last. A failure ends the request."""
        with self._lock:
            if not self._is_open:
                return
            try:
                self._respond(response)
            except Exception as error:
                pb_utils.Logger.log_error(f"a response could not be sent: {error}")
                self._is_cancelled = True
                self.fail(InternalError("the response could not be sent; the server's log says why"))

    def fail(self, error: TidewheelError) -> None:
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            try:
                self._sender.send(error_response(error), flags=_FINAL)
            except Exception as reason:
                pb_utils.Logger.log_error(f"an error response could not be sent: {reason}")
            self._on_end()

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
        whole = self._accumulated(response) if self.format.accumulate else response
        *others, last = response_tensors(whole, self.format)
        for tensors in others:
            self._sender.send(pb_utils.InferenceResponse(tensors), flags=0)
        is_final = is_last(response)
        self._sender.send(pb_utils.InferenceResponse(last), flags=_FINAL if is_final else 0)
        if is_final:
            self._is_open = False
            self._on_end()

    def _accumulated(self, response: Response) -> Response:
        self._texts.append([chunk.text for chunk in response])
        texts = map("".join, zip(*self._texts, strict=True))
        return [msgspec.structs.replace(chunk, text=text) for chunk, text in zip(response, texts, strict=True)]


Arrays = dict[str, npt.NDArray[Any]]  # by name of the tensor


def response_tensors(response: Response, response_format: ResponseFormat) -> list[list[Any]]:
    """Return the tensors of one or more responses of Triton, with an element per sequence."""
    if (tensors := response[0].tensors) is not None:
        kind = pb_utils.Tensor
        return [[each if isinstance(each, kind) else kind(name, each) for name, each in tensors.items()]]
    if not response_format.one_by_one or len(response) == 1:
        return [_tensors(response, response_format)]
    # Sequences without new tokens are left out, except at the end.
    shown = [index for index, chunk in enumerate(response) if chunk.token_ids or chunk.text or is_last(response)]
    return [_tensors([response[index]], response_format, index) for index in shown or [0]]


def _arrays(response: Response, response_format: ResponseFormat) -> Arrays:
    arrays: Arrays = {"text_output": _encoded([chunk.text for chunk in response])}
    if response[0].cumulative_logprob is not None:
        arrays |= _logprob_arrays(response, response_format)
    if response_format.logprobs:
        is_null = response_format.is_logprobs_null
        chunks = ((chunk.token_ids, chunk.logprobs or (), chunk.token_texts) for chunk in response)
        arrays["logprobs"] = _encoded(["null" if is_null else logprobs_json(*chunk) for chunk in chunks])
    if response[0].prompt_logprobs is not None:
        logprobs = (None, *response[0].prompt_logprobs)  # none of the first token
        text = logprobs_json(response[0].prompt_ids, logprobs, response[0].token_texts)
        arrays["prompt_logprobs"] = _encoded([text])
    if response[0].embedding is not None:
        arrays["embedding"] = response[0].embedding
    if response[0].seconds:
        seconds = np.array(response[0].seconds, np.float32)
        arrays |= {"language": _encoded([response[0].language]), "audio_seconds": seconds}
    if response_format.num_input_tokens:
        arrays["num_input_tokens"] = np.array([response[0].num_input_tokens], np.uint32)
    if response_format.num_output_tokens:
        arrays["num_output_tokens"] = np.array([len(chunk.token_ids) for chunk in response], np.uint32)
    if response_format.token_ids:
        arrays["token_ids"] = np.array([i for chunk in response for i in chunk.token_ids], np.int32)
    if response_format.perf_metrics and is_last(response) and any(chunk.stats is not None for chunk in response):
        # After a stop string a sequence has no figures.
        figures = [chunk.stats or RequestStats() for chunk in response]
        arrays |= {
            name: np.array([getattr(one, figure) for one in figures], dtype)
            for name, (figure, dtype) in _PERF_TENSORS.items()
        }
        arrays["weights"] = _encoded([one.weights for one in figures])
    return arrays


def _logprob_arrays(response: Response, response_format: ResponseFormat) -> Arrays:
    sums = np.array([chunk.cumulative_logprob or 0.0 for chunk in response], np.float32)
    arrays = {"cumulative_logprob": sums} if response_format.cumulative_logprob else {}
    if response_format.log_probs:
        by_sequence = [[entry.logprob for entry in chunk.logprobs or ()] for chunk in response]
        rows = np.zeros((len(response), max(map(len, by_sequence))), np.float32)  # 0 after the end of a sequence
        for row, logprobs in zip(rows, by_sequence, strict=True):
            row[: len(logprobs)] = logprobs
        arrays |= {"cum_log_probs": sums, "output_log_probs": rows}
    return arrays


def _as_ensemble(arrays: Arrays) -> Arrays:
    if "kv_cache_reused_blocks" in arrays:
        reused, new = arrays["kv_cache_reused_blocks"], arrays["kv_cache_alloc_new_blocks"]
        drafted, accepted = arrays["num_draft_tokens"], arrays["num_accepted_draft_tokens"]
        arrays |= {
            "kv_cache_alloc_total_blocks": reused + new, "total_draft_tokens": drafted,
            "total_accepted_draft_tokens": accepted,
            "acceptance_rate": (accepted / np.maximum(drafted, 1)).astype(np.float32),
        }  # fmt: skip
    signed = {name: array.astype(np.int32) for name, array in arrays.items() if array.dtype == np.uint32}
    return {name: array if name == "text_output" else array[np.newaxis] for name, array in (arrays | signed).items()}


def logprobs_json(token_ids: Sequence[int], logprobs: Sequence[TopLogprobs | None], texts: Mapping[int, str]) -> str:
    """Return a list of `{token_id: {logprob, rank, decoded_token}}`; an infinite or unknown `logprob` is null."""
    return json.dumps([_entries(*pair, texts) for pair in zip(token_ids, logprobs, strict=False)])


def _entries(token_id: int, logprobs: TopLogprobs | None, texts: Mapping[int, str]) -> dict[str, dict[str, object]]:
    if logprobs is None:
        return {str(token_id): {"logprob": None, "rank": None, "decoded_token": texts[token_id]}}
    found = {token_id: (logprobs.logprob, logprobs.rank)}
    for rank, (top_id, logprob) in enumerate(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), start=1):
        found[top_id] = (logprob, rank)  # as in vLLM, also for a tie
    return {
        str(known): {
            "logprob": logprob if math.isfinite(logprob) else None,
            "rank": rank,
            "decoded_token": texts[known],
        }
        for known, (logprob, rank) in found.items()
    }


def _tensors(response: Response, response_format: ResponseFormat, index: int | None = None) -> list[Any]:
    arrays = _arrays(response, response_format)
    if index is not None:
        arrays["sequence_index"] = np.array([index], np.int32)
    if response_format.is_trtllm:
        arrays = _as_ensemble(arrays)
    thread_id = threading.get_ident()
    tensors = [
        _kept(name, array.tobytes(), array.shape, array.dtype.char, thread_id)
        if name in _COUNTS
        else pb_utils.Tensor(name, array)
        for name, array in arrays.items()
    ]
    if response_format.finish_reason:
        shape = (1, len(response)) if response_format.is_trtllm else (len(response),)
        reasons = tuple([(chunk.finish_reason or "None").encode() for chunk in response])
        tensors.append(_kept("finish_reason", reasons, shape, "O", thread_id))
    return tensors


@functools.lru_cache(maxsize=1024)
def _kept(name: str, values: bytes | tuple[bytes, ...], shape: tuple[int, ...], dtype: str, thread_id: int) -> Any:
    """Return a thread's tensor of few values: two threads must not send a new tensor at once."""
    del thread_id
    array = np.frombuffer(bytearray(values), dtype) if isinstance(values, bytes) else np.array(values, dtype)
    return pb_utils.Tensor(name, array.reshape(shape))


def _encoded(texts: Sequence[str]) -> npt.NDArray[np.object_]:
    return np.array([text.encode("utf-8", "replace") for text in texts], dtype=np.object_)


def error_response(error: TidewheelError) -> Any:
    code = getattr(pb_utils.TritonError, error.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(printable(str(error)), code))
