"""Answer to audio of any length: those of its windows, each a request of its own, in their order."""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tidewheel.errors import Busy, DeadlineExceeded, TidewheelError
from tidewheel.frontend.audio_windows import AudioWindow
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.output import OutputChunk, Response, Sink, is_last
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.speech import SpeechRules
from tidewheel.request import FinishReason

AT_ONCE = 4  # windows of a request at the engine
MAX_LONG_AUDIOS = 16  # of several windows, in memory
_RETRY_AFTER_MS = 1000
_GOES_ON = (FinishReason.STOP, FinishReason.LENGTH)
_room = threading.BoundedSemaphore(MAX_LONG_AUDIOS)


class WindowSink:
    def __init__(self, answer: SpeechAnswer, asked: GenerateRequest, seconds: Sequence[float]) -> None:
        self.asked, self.seconds, self.is_cancelled = asked, seconds, answer.is_cancelled
        self.send, self.fail = partial(answer.take, self), partial(answer.fail, self)
        self.responses: deque[Response] = deque()
        self.is_refused = False  # to be sent again
        self.has_ended = False


class SpeechAnswer:
    """Sender of one request's answer. Thread-safe. Its end cancels the windows that are left."""

    def __init__(
        self, asked: GenerateRequest, windows: Sequence[AudioWindow], language: str, rules: SpeechRules
    ) -> None:
        """Raise `Busy` if too much audio is in memory. Without `language`, the model is asked for it."""
        self._asked, self._windows, self._language, self._rules = asked, deque(windows), language, rules
        self._first_s = windows[0].seconds[0]
        self._open: deque[WindowSink] = deque()  # the first one's text is sent as it comes
        self._unsent: list[Response] = []
        self._is_over = self._is_counted = False
        self._lock = threading.RLock()
        self._is_long = len(windows) > 1
        if self._is_long and not _room.acquire(blocking=False):
            raise Busy(f"{MAX_LONG_AUDIOS} long audios are being written down", retry_after_ms=_RETRY_AFTER_MS)

    def start(self, sink: Sink, submit: Callable[..., None]) -> None:
        """Submit the windows; `submit` is `Frontend.submit`."""
        self._sink, self._submit = sink, submit
        with self._lock:
            self._fill()

    def end(self) -> None:
        self._is_over = True
        self._windows.clear()
        self._open.clear()
        if self._is_long:
            _room.release()

    def is_cancelled(self) -> bool:
        return self._is_over or self._sink.is_cancelled()

    def take(self, sink: WindowSink, response: Response) -> None:
        with self._lock:
            sink.responses.append(response)
            sink.has_ended = is_last(response)
            while not self._is_over and self._open and self._open[0].responses:
                self._pass_on(self._open[0], self._open[0].responses.popleft())
            if sink.has_ended:
                self._fill()

    def fail(self, sink: WindowSink, error: TidewheelError) -> None:
        """End the request, unless an earlier window has text, or another will make room."""
        with self._lock:
            if isinstance(error, DeadlineExceeded) and sink.seconds[0] > self._first_s:
                self.take(sink, [OutputChunk(text="", finish_reason=FinishReason.DEADLINE.value)])
                return
            sink.is_refused = True
            is_alone = all(one.is_refused or one.has_ended for one in self._open)
            if (is_alone or not isinstance(error, Busy)) and not self._is_over:
                self.end()
                self._sink.fail(error)

    def _fill(self) -> None:
        for sink in [one for one in self._open if one.is_refused]:
            self._send(sink)
        while not self._is_over and self._windows and len(self._open) < (AT_ONCE if self._language else 1):
            window = self._windows.popleft() if self._language else self._windows[0]
            sources = self._asked.parameters or (ParameterSource(origin="language", values={}),)
            asked = dataclasses.replace(
                self._asked,
                task="generate" if self._language else "detect_language",
                stream=self._asked.stream and bool(self._language),
                audio=window.samples,
                is_window=True,
                parameters=tuple(
                    dataclasses.replace(one, values={**one.values, "language": self._language}) for one in sources
                ),
            )
            self._open.append(WindowSink(self, asked, window.seconds))
            self._send(self._open[-1])

    def _send(self, sink: WindowSink) -> None:
        if not self._is_over:
            is_new, self._is_counted, sink.is_refused = self._is_counted, True, False
            self._submit(sink.asked, sink, is_new=is_new)

    def _pass_on(self, sink: WindowSink, response: Response) -> None:
        first, is_end = response[0], is_last(response)
        if is_end:
            self._open.popleft()
        if not self._language and first.token_ids:
            self._language = self._rules.language_of(first.token_ids[0])
            return
        goes_on = is_end and first.finish_reason in _GOES_ON and bool(self._open or self._windows)
        changes: dict[str, object] = {"language": self._language, "seconds": sink.seconds}
        changes |= {"finish_reason": None} if goes_on else {}
        self._unsent.append([msgspec.structs.replace(chunk, **changes) for chunk in response])
        if is_end and not goes_on:
            self.end()
        if self._is_over or self._asked.stream:
            whole, self._unsent = joined(self._unsent), []
            self._sink.send(whole)


def joined(responses: list[Response]) -> Response:
    """Return one response of several, of as many sequences each."""
    return [
        msgspec.structs.replace(
            parts[-1],
            text="".join(part.text for part in parts),
            token_ids=[token_id for part in parts for token_id in part.token_ids],
            logprobs=parts[-1].logprobs and [entry for part in parts for entry in part.logprobs or ()],
            cumulative_logprob=parts[-1].cumulative_logprob and sum(part.cumulative_logprob or 0.0 for part in parts),
            token_texts={key: text for part in parts for key, text in part.token_texts.items()},
        )
        for parts in zip(*responses, strict=True)
    ]
