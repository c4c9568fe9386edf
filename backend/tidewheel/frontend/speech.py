"""Speech models: windows of audio cut at pauses, rules of a model's answers, and the answer to several windows."""

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tidewheel.audio_file import SAMPLING_RATE
from tidewheel.batch import Float32Array, Int32Array
from tidewheel.errors import Busy, ConfigError, DeadlineExceeded, InvalidRequest, TidewheelError
from tidewheel.frontend.output import Generation, OutputChunk, Response, Sink, is_last
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.regular_files import read_object
from tidewheel.request import FinishReason
from tidewheel.sampling import SamplingParams

HOP = 512  # samples of an activity, as of silero-vad
_SMOOTHED = 8  # hops, a quarter of a second
_QUIET = 1e-3  # root mean square, -60 dB of full scale
AT_ONCE = 4  # windows of a request at the engine
MAX_LONG_AUDIOS = 16  # of several windows, in memory
_RETRY_AFTER_MS = 1000
_GOES_ON = (FinishReason.STOP, FinishReason.LENGTH)
_room = threading.BoundedSemaphore(MAX_LONG_AUDIOS)


class AudioWindow(NamedTuple):
    samples: Float32Array
    seconds: tuple[float, float, float]  # begin, end, and length of the whole audio


# Returns the activity of each `HOP` of samples: at most 0.5 is silence.
Activity = Callable[[Float32Array], Float32Array]


def loudness(samples: Float32Array) -> Float32Array:
    sums = np.add.reduceat(np.square(samples), np.arange(0, len(samples), HOP))
    found: Float32Array = np.sqrt(sums / HOP) * np.float32(0.5 / _QUIET)
    return found


def cut(samples: Float32Array, most: int, activity: Activity = loudness) -> list[AudioWindow]:
    """Return windows of at most `most` samples without the silent ones, but one at least.

    A longer audio is cut where its activity is least in the last third of a window.
    """
    total, begin = len(samples), 0
    whole = AudioWindow(samples, (0.0, total / SAMPLING_RATE, total / SAMPLING_RATE))
    if total <= most:
        return [whole]
    active, windows = activity(samples), []
    smooth = np.convolve(active, np.full(_SMOOTHED, 1 / _SMOOTHED), "same")
    while begin < total:
        end = total
        if total - begin > most:
            first, last = -(-(begin + 2 * most // 3) // HOP), (begin + most) // HOP
            end = (last - int(np.argmin(smooth[first:last][::-1]))) * HOP
        if not active[begin // HOP : -(-end // HOP)].max() <= 0.5:  # NaN too
            seconds = begin / SAMPLING_RATE, end / SAMPLING_RATE, total / SAMPLING_RATE
            windows.append(AudioWindow(samples[begin:end], seconds))
        begin = end
    return windows or [AudioWindow(samples[:most], whole.seconds)]


class SpeechRules(msgspec.Struct, frozen=True, kw_only=True):
    """Beginning of a Whisper model's answers, and tokens that never follow, by the names of the model's files."""

    decoder_start_token_id: int
    lang_to_id: Mapping[str, int] = {}  # by "<|en|>"; empty: the model knows English alone
    task_to_id: Mapping[str, int] = {}
    no_timestamps_token_id: int | None = None
    suppress_tokens: tuple[int, ...] | None = ()
    begin_suppress_tokens: tuple[int, ...] | None = ()

    @classmethod
    def load(cls, folder: Path) -> "SpeechRules":
        """Read `config.json` and `generation_config.json`. Raise `ConfigError`."""
        names = [folder / "config.json", folder / "generation_config.json"]
        fields = {key: value for path in names for key, value in read_object(path).items() if value is not None}
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{names[1]}: {error}; a speech model needs its rules") from None

    def question(self, given: Generation) -> Generation:
        """Return the request for a window's likeliest language after `decoder_start_token_id`, as in transformers."""
        prompt_ids = np.array([self.decoder_start_token_id], np.int32)
        sampling = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=tuple(self.lang_to_id.values()))
        options = msgspec.structs.replace(given.options, n=1)
        return given._replace(prompt_ids=prompt_ids, sampling=sampling, options=options, is_scoring=False)

    def in_language(self, given: Generation, token_id: int) -> Generation:
        language = next(name for name, known in self.lang_to_id.items() if known == token_id)
        prompt_ids = np.array([given.prompt_ids[0], token_id, *given.prompt_ids[2:]], np.int32)
        return given._replace(prompt_ids=prompt_ids, language=language.strip("<|>"))

    def prompt(self, language: str, *, translate: bool) -> Int32Array:
        """Return the tokens before the text. Raise `InvalidRequest`."""
        ids, known = [self.decoder_start_token_id], sorted(name.strip("<|>") for name in self.lang_to_id)
        if known:
            task = "translate" if translate else "transcribe"
            if language not in known or task not in self.task_to_id:
                raise InvalidRequest(
                    f"language is {language[:40]!r} and the task {task}: give one of the model's languages in "
                    f"language, such as {', '.join(known[:5])}; without translate, if it has no such task"
                )
            ids += [self.lang_to_id[f"<|{language}|>"], self.task_to_id[task]]
        elif language not in ("", "en") or translate:
            raise InvalidRequest("language or translate is set: this model writes English alone; leave them out")
        return np.array([*ids, *filter(None, [self.no_timestamps_token_id])], np.int32)

    def forbidden(self, prompt_ids: Int32Array) -> tuple[tuple[int, ...], ...]:
        """Return forbidden token sequences: of one token, or of the prompt's last and a first one of the text."""
        if self.lang_to_id and len(prompt_ids) == 1:  # of `question`
            return ()
        after = int(prompt_ids[-1])
        first = [(after, token_id) for token_id in self.begin_suppress_tokens or ()]
        return (*((token_id,) for token_id in self.suppress_tokens or ()), *first)


class WindowSink:
    def __init__(self, answer: "SpeechAnswer", given: Generation) -> None:
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
