"""Audio in a front end: windows at pauses, their requests, and one answer from theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.fake_engine import RecordingSink
from support.engine.request_ledger import check_all_over
from support.frontend.front_ends import FrontendHarness, error_info, prompt_ids
from support.triton.serving import wait_for
from tidewheel.audio_file import SAMPLING_RATE
from tidewheel.engine.messages import AddRequest
from tidewheel.errors import Busy, Cancelled, DeadlineExceeded, WaitingSetFull
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.ended_requests import EndedRequest
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.speech import AT_ONCE, HOP, MAX_LONG_AUDIOS, _room, cut
from tidewheel.one_shot.signature import Array

END, START, ENGLISH, GERMAN, TRANSCRIBE = 2, 5, 6, 7, 8
MOST = 2 * SAMPLING_RATE
RULES = {
    "decoder_start_token_id": START, "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
    "task_to_id": {"transcribe": TRANSCRIBE}, "suppress_tokens": [ENGLISH, GERMAN], "begin_suppress_tokens": [9],
}  # fmt: skip


def speech(*spans: tuple[float, float], seconds: float = 0.0) -> Array:
    """Return noise in the spans (seconds), silence elsewhere."""
    samples = np.zeros(int(max(seconds, *(end for _, end in spans)) * SAMPLING_RATE), np.float32)
    for begin, end in spans:
        part = samples[int(begin * SAMPLING_RATE) : int(end * SAMPLING_RATE)]
        part[:] = np.random.default_rng(0).normal(0, 0.1, len(part))
    return samples


SENTENCES = speech((0.1, 1.5), (1.8, 3.2), (3.6, 5.0), (5.3, 6.6), (6.9, 8.2), (8.5, 9.8))


def test_windows_end_in_pauses() -> None:
    windows = cut(SENTENCES, MOST)
    assert [window.seconds[:2] for window in windows] == [
        (pytest.approx(b, abs=0.25), pytest.approx(e, abs=0.25))
        for b, e in ((0, 1.65), (1.65, 3.4), (3.4, 5.15), (5.15, 6.75), (6.75, 8.35), (8.35, 9.8))
    ]
    assert {window.seconds[2] for window in windows} == {9.8}


def test_silence_is_left_out_unless_it_is_all() -> None:
    windows = cut(speech((3.0, 3.5), (11.0, 11.5), seconds=20), MOST)
    assert len(windows) == 2 and all(np.abs(window.samples).max() > 0 for window in windows)
    (window,) = cut(np.zeros(10 * MOST, np.float32), MOST)
    assert len(window.samples) == MOST


def test_another_activity_decides_where_it_is_named() -> None:
    def activity(samples: Array) -> Array:
        found = np.ones(-(-len(samples) // HOP), np.float32)
        found[50:55] = 0.0  # 1.6 s
        found[80:] = 0.4  # all of it is noise
        return found

    (window,) = cut(SENTENCES, MOST, activity)[:1]
    assert 1.55 <= window.seconds[1] <= 1.8
    assert cut(SENTENCES, MOST, activity)[-1].seconds[1] < 4.5


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 60_000), st.integers(8 * HOP, 20_000), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_windows_cover_all_that_is_loud(count: int, most: int, seed: int, quiet: float) -> None:
    generator = np.random.default_rng(seed)
    loud = (generator.uniform(0, 1, count // 400 + 1) >= quiet).repeat(400)[:count]
    samples = (generator.normal(0, 0.1, count) * loud).astype(np.float32)
    windows = cut(samples, most)
    assert all(1 <= len(window.samples) <= most for window in windows)
    ends = [0.0, *(end for window in windows for end in window.seconds[:2])]
    assert ends == sorted(ends) and ends[-1] <= count / SAMPLING_RATE
    kept = sum(int(np.count_nonzero(window.samples)) for window in windows)
    assert count <= most or kept >= np.count_nonzero(samples) * 0.99


class SpeechHarness(FrontendHarness):
    ended: list[EndedRequest]

    def ask(self, samples: Array, sink: RecordingSink | None = None, **options: object) -> RecordingSink:
        sink, parameters = sink or RecordingSink(), options.pop("parameters", {})
        sources = (ParameterSource(origin="sampling_parameters", values=parameters),) if parameters else ()
        self._send(GenerateRequest(audio=samples, parameters=sources, **options), sink)  # type: ignore[arg-type]
        return sink

    def added(self, count: int) -> list[AddRequest]:
        self.engine.wait_added(count)
        assert len(self.engine.added) == count
        return [self.engine.added[key] for key in sorted(self.engine.added)]

    def text(self, message: AddRequest, text: str) -> None:
        self.deliver(message.key, [*self.encode(text), END], "stop")


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SpeechHarness]:
    ended: list[EndedRequest] = []
    sizes = {"max_prompt_bytes": 1 << 22, "max_audio_samples": MOST}
    harness = SpeechHarness(tmp_path, on_ended=[ended.append], **sizes, **RULES)  # type: ignore[arg-type]
    harness.ended = ended
    yield harness
    harness.close()
    check_all_over({id(sink): sink.num_ends for sink in harness._sinks}, 0)
    assert _room._value == MAX_LONG_AUDIOS  # type: ignore[attr-defined]


ENGLISH_TEXT = {"language": "en"}
PARTS = ["One.", " Two.", " Three.", " Four.", " Five.", " Six."]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (3, 2, 1, 0, 5, 4), (1, 0, 4, 2, 3, 5)])
def test_texts_come_in_order(harness: SpeechHarness, stream: bool, order: tuple[int, ...]) -> None:
    sink = harness.ask(SENTENCES, stream=stream, parameters=ENGLISH_TEXT)
    for number, index in enumerate(order):
        first = min(set(range(6)) - set(order[:number]))
        harness.text(harness.added(min(first + AT_ONCE, 6))[index], PARTS[index])
    sink.wait_end()
    assert sink.text == "".join(PARTS) and sink.finish_reason == "stop"
    assert stream or len(sink.responses) == 1
    assert {chunk.language for chunk in sink.chunks} == {"en"}
    assert prompt_ids(harness.added(6)[5]) == [START, ENGLISH, TRANSCRIBE]


def test_few_windows_are_at_the_engine_at_once(harness: SpeechHarness) -> None:
    sink = harness.ask(SENTENCES, stream=True, parameters=ENGLISH_TEXT)
    first, *_ = harness.added(AT_ONCE)
    harness.deliver(first.key, harness.encode("On"))
    sink.wait_chunks(1)
    assert sink.text == "On" and sink.finish_reason is None
    harness.text(first, "e.")
    harness.added(AT_ONCE + 1)


def test_the_language_is_asked_first(harness: SpeechHarness) -> None:
    sink = harness.ask(SENTENCES[:MOST], parameters={"temperature": 1.0, "n": 2})
    (question,) = harness.added(1)
    assert prompt_ids(question) == [START] and question.sampling.temperature == 0
    assert set(question.sampling.allowed_token_ids) == {ENGLISH, GERMAN}
    assert not question.bad_words_ids and (question.sampling.max_tokens, question.options.n) == (1, 1)
    harness.deliver(question.key, [GERMAN], "length")
    _, window = harness.added(2)
    assert prompt_ids(window) == [START, GERMAN, TRANSCRIBE] and window.options.n == 2
    for index, text in enumerate(("Ja.", "Nein.")):
        harness.deliver(window.key, [*harness.encode(text), END], "stop", index=index)
    sink.wait_end()
    assert sink.texts() == ["Ja.", "Nein."] and sink.chunks[-1].language == "de"


def test_the_language_is_asked_once_where_the_prompt_is_scored(harness: SpeechHarness) -> None:
    sink = harness.ask(SENTENCES[:MOST], parameters={"max_tokens": 0, "prompt_logprobs": 1})
    harness.deliver(harness.added(1)[0].key, [GERMAN], "length")
    _, window = harness.added(2)
    assert prompt_ids(window) == [START, GERMAN, TRANSCRIBE]
    harness.deliver(window.key, harness.encode("Ja"), "length")
    sink.wait_end()
    assert (sink.text, sink.chunks[-1].language) == ("", "de")


def fail(harness: SpeechHarness, index: int) -> None:
    harness.deliver(sorted(harness.engine.added)[index], finish_reason="error", error=error_info())


@pytest.mark.parametrize("index", [0, 2])
def test_a_failed_window_ends_all(harness: SpeechHarness, index: int) -> None:
    sink = harness.ask(SENTENCES, stream=True, parameters=ENGLISH_TEXT)
    keys = [message.key for message in harness.added(AT_ONCE)]
    fail(harness, index)
    sink.wait_end()
    assert "logits are not finite" in str(sink.error)
    for key in (key for number, key in enumerate(keys) if number != index):
        harness.engine.wait_cancelled(key)
    assert len(harness.engine.added) == AT_ONCE


@pytest.mark.parametrize("parameters", [ENGLISH_TEXT, {}])
def test_a_client_that_is_gone_ends_all(harness: SpeechHarness, parameters: dict[str, str]) -> None:
    sink = harness.ask(SENTENCES, stream=True, parameters=parameters)
    keys = [message.key for message in harness.added(AT_ONCE if parameters else 1)]
    sink.gone.set()
    sink.wait_end()
    assert sink.finish_reason == "cancelled"
    for key in keys:
        harness.engine.wait_cancelled(key)


def test_a_deadline_leaves_the_text_of_earlier_windows(harness: SpeechHarness) -> None:
    sink = harness.ask(SENTENCES, stream=False, parameters=ENGLISH_TEXT)
    first, *others = harness.added(AT_ONCE)
    late = error_info("TW-DEADLINE", "the deadline passed")
    harness.deliver(others[0].key, finish_reason="error", error=late)
    harness.text(first, "One.")
    sink.wait_end()
    assert (sink.text, sink.finish_reason) == ("One.", "deadline")


def test_a_deadline_before_any_text_is_an_error(harness: SpeechHarness) -> None:
    sink = harness.ask(SENTENCES, parameters=ENGLISH_TEXT)
    late = error_info("TW-DEADLINE", "the deadline passed")
    harness.deliver(harness.added(AT_ONCE)[0].key, finish_reason="error", error=late)
    sink.wait_end()
    assert isinstance(sink.error, DeadlineExceeded)


def say_length(harness: SpeechHarness, window: AddRequest) -> None:
    assert window.inputs is not None
    harness.text(window, f" {window.inputs.tensors[0].shape[0]}")


def test_a_window_without_room_is_sent_again_when_another_ends(harness: SpeechHarness) -> None:
    sink = harness.ask(SENTENCES, parameters=ENGLISH_TEXT)
    messages = harness.added(AT_ONCE)
    full = error_info(WaitingSetFull.tag, "the waiting set is full")
    for message in messages[1:]:
        harness.deliver(message.key, finish_reason="error", error=full)
    wait_for(lambda: len(harness.ended) == AT_ONCE - 1, 30, "refusals")
    say_length(harness, messages[0])
    for message in harness.added(2 * AT_ONCE)[AT_ONCE:]:
        say_length(harness, message)
    say_length(harness, harness.added(2 * AT_ONCE + 1)[-1])
    sink.wait_end()
    assert sink.text == "".join(f" {len(window.samples)}" for window in cut(SENTENCES, MOST))


def test_without_any_room_the_request_is_refused(harness: SpeechHarness) -> None:
    sink = harness.ask(SENTENCES, parameters=ENGLISH_TEXT)
    for message in harness.added(AT_ONCE):
        harness.deliver(message.key, finish_reason="error", error=error_info(Busy.tag, "no room"))
    sink.wait_end()
    assert isinstance(sink.error, Busy)


def test_long_audio_in_memory_is_limited(harness: SpeechHarness) -> None:
    first = harness.ask(SENTENCES, parameters=ENGLISH_TEXT)
    harness.added(AT_ONCE)
    taken = [_room.acquire(blocking=False) for _ in range(MAX_LONG_AUDIOS)]
    sink = harness.ask(SENTENCES, parameters=ENGLISH_TEXT)
    sink.wait_end()
    _room.release(sum(taken))
    assert isinstance(sink.error, Busy) and not first.num_ends


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"samples": np.zeros(0, np.float32)}, "audio has 0 samples"),
        ({"samples": np.zeros(8, np.float32), "parameters": {"language": "xx"}}, "language is 'xx'"),
        ({"samples": np.full(8, 9.0, np.float32), "parameters": {"wrong": 1}}, "unknown parameter 'wrong'"),
        ({"samples": SENTENCES, "parameters": {"n": 2}}, "n is 2"),
        ({"samples": np.zeros(1 << 21, np.float32)}, "max_prompt_bytes"),
        ({"samples": None, "audio_file": b""}, "audio_file cannot be read"),
        ({"samples": SENTENCES, "task": "embed"}, "task is embed"),
    ],
)
def test_bad_input_is_refused_in_one_line(harness: SpeechHarness, asked: dict[str, object], words: str) -> None:
    samples = asked.pop("samples")
    sink = harness.ask(samples, **asked)  # type: ignore[arg-type]
    sink.wait_end()
    assert words in str(sink.error) and "\n" not in str(sink.error)


def test_a_closed_front_end_ends_audio_once(harness: SpeechHarness) -> None:
    sinks = [harness.ask(SENTENCES, parameters=parameters) for parameters in (ENGLISH_TEXT, {})]
    harness.added(AT_ONCE + 1)
    harness.frontend.close(Cancelled("closed"))
    for sink in sinks:
        sink.wait_end()
        assert sink.num_ends == 1
