"""Models that are loaded again, unloaded and ended under load."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults.nothing_lost import (
    CANARIES,
    INHERITED_DESCRIPTORS,
    Recorded,
    assert_prefixes,
    assert_serves,
    assert_survived,
    nothing_lost,
    record,
    streaming_canaries,
)
from support.faults.raw_streams import RawStream
from support.faults.service import serving
from support.triton.burst import bursting
from support.triton.serving import Server, has_ended, wait_for
from tidewheel.server import ServeError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LIMIT_S = 180.0
LONG = 900


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve models that the tests load."""
    with serving(tmp_path_factory.mktemp("control"), "--model-control", "explicit") as server:
        yield server


@pytest.fixture(scope="module")
def tokens(explicit: Server) -> Recorded:
    return record(explicit)


def test_reload_under_load(explicit: Server, tokens: Recorded) -> None:
    with nothing_lost(explicit, tokens, spare_descriptors=INHERITED_DESCRIPTORS) as canaries:
        explicit.control("reload", "demo")
        canaries.finish()


def test_a_reload_that_fails_keeps_the_old_model(explicit: Server, tokens: Recorded) -> None:
    path = explicit.log.parent / "repository" / "demo" / "config.pbtxt"
    config = path.read_text()
    with nothing_lost(explicit, tokens):
        path.write_text(config + 'parameters { key: "max_num_seq" value: { string_value: "4" } }\n')
        with pytest.raises(ServeError, match="max_num_seqs"):
            explicit.control("reload", "demo")
        path.write_text(config)


def test_unload_under_load(explicit: Server, tokens: Recorded) -> None:
    with streaming_canaries(explicit) as canaries:
        explicit.control("unload", "demo_infer")
        explicit.control("unload", "demo")
        assert_survived(canaries, tokens)
    wait_for(lambda: not explicit.stubs(), LIMIT_S, "the end of the front ends")
    explicit.control("load", "demo")
    explicit.control("load", "demo_infer")
    assert_serves(explicit, tokens)


def test_a_model_that_is_loaded_keeps_no_connection_open(explicit: Server, tokens: Recorded) -> None:
    """The new front end is a fork of Triton, and the client reads until its connection is closed."""
    explicit.control("unload", "demo_infer")
    stream = RawStream(explicit, CANARIES[0], 100)
    stream.wait_for_first()
    explicit.control("load", "demo_infer")
    assert stream.finish() == tokens[CANARIES[0]][:100]


@pytest.mark.parametrize("drain_s", [30, 1])
def test_sigterm_under_load(tmp_path: Path, drain_s: int) -> None:
    """Streams end by themselves, or with `TW-DRAINING` when the time is over."""
    with serving(tmp_path, "--drain-s", str(drain_s)) as server:
        recorded = record(server)
        left = server.descendants()
        with streaming_canaries(server) as canaries, bursting(server) as burst:
            if drain_s < 30:
                for _ in CANARIES:
                    burst.send("A long story", LONG)
                burst.receive_until_all_run()
            server.process.send_signal(signal.SIGTERM)
            canaries.finish()
            burst.finish()
            assert_prefixes(canaries, recorded)
            assert all(error.startswith("[TW-DRAINING]") for error in canaries.errors + burst.errors)
        assert server.process.wait(LIMIT_S) == 0
        wait_for(lambda: all(map(has_ended, left)), LIMIT_S, "the end of its processes")
