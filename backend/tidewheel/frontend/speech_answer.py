"""Answer to audio of several windows or of an unknown language: those of a request for each, in their order."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tidewheel.errors import Busy, DeadlineExceeded, TidewheelError
from tidewheel.frontend.output import Generation, OutputChunk, Response, Sink, is_last
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.speech import SpeechRules
from tidewheel.request import FinishReason

AT_ONCE = 4  # windows of a request at the engine
MAX_LONG_AUDIOS = 16  # of several windows, in memory
_RETRY_AFTER_MS = 1000
_GOES_ON = (FinishReason.STOP, FinishReason.LENGTH)
_room = threading.BoundedSemaphore(MAX_LONG_AUDIOS)


class WindowSink:
    def __init__(self, answer: SpeechAnswer, given: Generation) -> None:
        self.given, self.is_cancelled = given, answer.is_cancelled
        self.send, self.fail = partial(answer.take, self), partial(answer.fail, self)
        self.responses: deque[Response] = deque()
        self.is_waiting = True  # not yet at the engine, or refused by it
        self.has_ended = False


class SpeechAnswer:
    """Sender of one request's answer. Thread-safe. Its end cancels the windows that are left."""

    def __init__(self, asked: GenerateRequest, given: Sequence[Generation], rules: SpeechRules) -> None:
        """`given` are the windows, after the question for their language if that is unknown."""
        self._asked, self._rules = dataclasses.replace(asked, audio=None, audio_file=None), rules
        self._windows = deque(WindowSink(self, one) for one in given)  # the first one's text is sent as it comes
        self._first_s = given[0].seconds[0]
        self._is_long = given[-1].seconds[0] > self._first_s
        self._unsent: list[Response] = []
        self._lock = threading.RLock()

    def begin(self, sink: Sink, submit: Callable[[GenerateRequest, Sink], None]) -> WindowSink:
        """Return the sink of the first request, in place of `sink`. Raise `Busy` if too much audio is in memory."""
        if self._is_long and not _room.acquire(blocking=False):
            raise Busy(f"{MAX_LONG_AUDIOS} long audios are being written down", retry_after_ms=_RETRY_AFTER_MS)
        self._sink, self._submit = sink, submit
        self._windows[0].is_waiting = False
        return self._windows[0]

    def submit_waiting(self) -> None:
        with self._lock:
            at_once = AT_ONCE if self._windows and self._windows[0].given.language else 1
            for window in list(itertools.islice(self._windows, at_once)):
                if window.is_waiting and self._windows:
                    window.is_waiting = False
                    self._submit(dataclasses.replace(self._asked, given=window.given), window)

    def is_cancelled(self) -> bool:
        return not self._windows or self._sink.is_cancelled()

    def take(self, window: WindowSink, response: Response) -> None:
        with self._lock:
            window.responses.append(response)
            window.has_ended = is_last(response)
            while self._windows and self._windows[0].responses:
                self._pass_on(self._windows[0].given, self._windows[0].responses.popleft())
            if window.has_ended:
                self.submit_waiting()

    def fail(self, window: WindowSink, error: TidewheelError) -> None:
        """End the request, unless an earlier window has text, or another will make room."""
        seconds = window.given.seconds
        with self._lock:
            if isinstance(error, DeadlineExceeded) and seconds[0] > self._first_s:
                reason, language = FinishReason.DEADLINE.value, window.given.language
                self.take(window, [OutputChunk(text="", finish_reason=reason, language=language, seconds=seconds)])
                return
            window.is_waiting = True
            is_alone = all(one.is_waiting or one.has_ended for one in self._windows)
            if self._windows and (is_alone or not isinstance(error, Busy)):
                self._end()
                self._sink.fail(error)

    def _pass_on(self, given: Generation, response: Response) -> None:
        first, is_end = response[0], is_last(response)
        is_answer = not given.language and bool(first.token_ids)
        if is_end or is_answer:
            self._windows.popleft()
        if is_answer:
            for window in self._windows:
                window.given = self._rules.in_language(window.given, first.token_ids[0])
            return
        goes_on = is_end and first.finish_reason in _GOES_ON and bool(self._windows)
        self._unsent.append(
            [msgspec.structs.replace(one, finish_reason=None) for one in response] if goes_on else response
        )
        if is_end and not goes_on:
            self._end()
        if not self._windows or self._asked.stream:
            whole, self._unsent = joined(self._unsent), []
            self._sink.send(whole)

    def _end(self) -> None:
        self._windows.clear()
        if self._is_long:
            _room.release()


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
