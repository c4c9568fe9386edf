"""Random outputs, split at random, stopped, cancelled and lost at random: the text is right, and it ends once."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.engine.fake_engine import RecordingSink
from support.frontend.front_ends import FrontendHarness, Submitted, delta
from tidewheel.engine.messages import Delta
from tidewheel.errors import Draining, EngineDead

texts = st.text(st.one_of(st.sampled_from("ab🎉 "), st.characters(codec="utf-8")), min_size=1, max_size=30)


@pytest.fixture(scope="module")
def harness() -> Iterator[FrontendHarness]:
    with tempfile.TemporaryDirectory() as folder:
        harness = FrontendHarness(Path(folder), num_senders=3)
        yield harness
        harness.close()


@dataclass
class Script:
    """What one request asks, and what the engine does with it."""

    prompt: str
    output: str
    stops: list[str]
    stream: bool
    echo: bool
    ends_with_eos: bool
    cuts: list[int]  # sizes of the deltas, over and over
    cancel_after: int | None  # deltas
    in_columns: bool  # one token each
    deltas: list[Delta] = field(default_factory=list)


scripts = st.builds(
    Script,
    prompt=texts,
    output=texts,
    stops=st.lists(st.text("ab🎉 ", min_size=1, max_size=3), max_size=2),
    stream=st.booleans(),
    echo=st.booleans(),
    ends_with_eos=st.booleans(),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    cancel_after=st.none() | st.integers(0, 5),
    in_columns=st.booleans(),
)


def deltas_of(script: Script, key: int, token_ids: list[int]) -> list[Delta]:
    deltas, begin = [], 0
    while begin < len(token_ids):
        end = begin + (1 if script.in_columns else script.cuts[len(deltas) % len(script.cuts)])
        deltas.append(delta(key, token_ids[begin:end]))
        begin = end
    reason = "stop" if script.ends_with_eos else "length"
    return [*deltas, delta(key, [2] if script.ends_with_eos else [], reason)]


def whole_text(harness: FrontendHarness, script: Script) -> str:
    prompt_ids, output_ids = harness.encode(script.prompt), harness.encode(script.output)
    before = harness.tokenizer.decode(prompt_ids)
    return harness.tokenizer.decode(prompt_ids + output_ids)[len(before) :]


def expected_text(harness: FrontendHarness, script: Script) -> tuple[str, bool]:
    """The text of all tokens at once, cut at the first stop string; and whether there was one."""
    text = whole_text(harness, script)
    for end in range(1, len(text) + 1):
        hits = [stop for stop in script.stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - len(max(hits, key=len))], True
    return text, False


def submit(harness: FrontendHarness, script: Script) -> Submitted:
    submitted = harness.submit(
        script.prompt, stream=script.stream, echo=script.echo, parameters={"stop": script.stops}
    )
    script.deltas = deltas_of(script, submitted.key, harness.encode(script.output))
    return submitted


def play(harness: FrontendHarness, running: list[tuple[Script, Submitted]]) -> None:
    """One delta of each request in a batch, as steps of an engine would."""
    for step in range(max(len(script.deltas) for script, _ in running)):
        for script, submitted in running:
            if script.cancel_after == step:
                submitted.sink.gone.set()
        batch = [(script, script.deltas[step]) for script, _ in running if step < len(script.deltas)]
        plain = [one for script, one in batch if script.in_columns and not one.finish_reason]
        harness.deliver_tokens({one.key: one.token_ids[0] for one in plain})
        harness.frontend.on_deltas([one for _, one in batch if one not in plain])


def check(harness: FrontendHarness, script: Script, sink: RecordingSink) -> None:
    text, is_stopped = expected_text(harness, script)
    prefix = script.prompt if script.echo and not script.stream else ""
    assert sink.num_ends == 1
    assert sink.error is None
    if sink.finish_reason == "cancelled":
        assert script.cancel_after is not None
        # Half a character, or the beginning of a stop string, may be what it was cancelled in.
        assert (prefix + whole_text(harness, script)).startswith(sink.text.rstrip("�"))
        return
    assert sink.text == prefix + text
    assert sink.finish_reason == ("stop" if is_stopped or script.ends_with_eos else "length")
    sent = [token_id for piece in script.deltas for token_id in piece.token_ids]
    assert sink.token_ids == sent[: len(sink.token_ids)]
    assert is_stopped or sink.token_ids == sent
    assert script.stream or len(sink.chunks) == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(scripts, min_size=1, max_size=5))
def test_text_is_right_and_ends_once(harness: FrontendHarness, batch: list[Script]) -> None:
    running = [(script, submit(harness, script)) for script in batch]
    play(harness, running)
    for script, (_, sink) in running:
        sink.wait_end()
        check(harness, script, sink)
    figures = harness.frontend.stats()
    assert not harness.frontend._live
    assert figures.num_received == sum(figures.finished.values())


@pytest.mark.parametrize("seed", range(8))
def test_all_ends_at_once(tmp_path: Path, seed: int) -> None:
    """Last deltas, lost requests, clients that leave and the end of the front end, from four threads."""
    rng = random.Random(seed)
    harness = FrontendHarness(tmp_path)
    running = [harness.submit(stream=rng.random() < 0.5, parameters={"stop": ["b"]}) for _ in range(60)]
    keys = [key for key, _ in running]
    output = harness.encode("aab")
    start = threading.Barrier(4)

    def finish() -> None:
        start.wait()
        for key in rng_finish.sample(keys, len(keys)):
            harness.frontend.on_deltas([delta(key, output[:2]), delta(key, output[2:]), delta(key, [2], "stop")])

    def lose() -> None:
        start.wait()
        for key in rng_lose.sample(keys, 20):
            harness.frontend.on_lost([key], EngineDead("gone"))

    def leave() -> None:
        start.wait()
        for _, sink in rng_leave.sample(running, 20):
            sink.gone.set()

    rng_finish, rng_lose, rng_leave = (random.Random(rng.random()) for _ in range(3))
    threads = [threading.Thread(target=target) for target in (finish, lose, leave)]
    for thread in threads:
        thread.start()
    start.wait()
    harness.frontend.close(Draining("enough"))
    for thread in threads:
        thread.join()
    assert [sink.num_ends for _, sink in running] == [1] * len(running)
    figures = harness.frontend.stats()
    assert not harness.frontend._live
    assert sum(figures.finished.values()) + sum(figures.failed.values()) + sum(figures.rejected.values()) == 60
    for _, sink in running:
        assert sink.error is not None or sink.finish_reason in ("stop", "cancelled")


def test_nothing_is_left_behind(harness: FrontendHarness) -> None:
    """After many requests, no thread and no request has piled up."""
    before = threading.active_count()
    for _ in range(300):
        harness.finish(harness.submit(stream=True), "ab")
    assert threading.active_count() == before
    assert not harness.frontend._live
    assert not harness.frontend._prompts._num_bytes
