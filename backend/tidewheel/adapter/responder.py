from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from tidewheel.adapter.io import ResponseFormat, response_tensors
from tidewheel.errors import InternalError, TidewheelError
from tidewheel.frontend.values import Response, is_last

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_MAX_MESSAGE_CHARS = 2000


class TritonSink:
    """`frontend.values.Sink` on a Triton response sender. The last response is FINAL.

    Triton frees the request with its FINAL response. `is_cancelled` on a freed request crashes the server (seen with
    2.51). So a lock separates it from sending, and nothing touches the sender after the end.
    """

    def __init__(self, sender: Any) -> None:
        self.format = ResponseFormat()  # set before sending
        self._sender = sender
        self._lock = threading.Lock()
        self._is_open = True
        self._is_cancelled = False
        self._texts: list[list[str]] = []  # of all responses, if text accumulates

    def send(self, response: Response) -> None:
        """Send a response, FINAL if all sequences have ended. If that fails, end the request."""
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
        """Send the error as FINAL, unless the request is over."""
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


def error_response(error: TidewheelError) -> Any:
    code = getattr(pb_utils.TritonError, error.code.value)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(_printable(str(error)), code))


def _printable(message: str) -> str:
    """Escape a client's lone surrogates and control characters, and cut long messages."""
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[:_MAX_MESSAGE_CHARS] + "…"
    encodable = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in encodable)
