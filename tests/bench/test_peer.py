"""The process of a peer, with a peer that only counts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tidewheel.bench import BenchError
from tidewheel.bench.driver import LoadDriver, RunLimits, RunProgress
from tidewheel.bench.outcome import OfferedRequest, RequestOutcome
from tidewheel.bench.transports import peer as transport
from tidewheel.bench.transports.peer import PeerTransport

# The real program, with one more engine: two tokens a step to each request; 13 makes it fail.
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import peer_engines

class Counting:
    versions = {{"counting": "1.0"}}
    def __init__(self, options):
        if options["model"] != "good":
            1 / 0
        self.left = {{}}
    def add(self, request_id, input_ids, max_tokens):
        if 13 in input_ids:
            raise RuntimeError("unlucky")
        self.left[request_id] = max_tokens
    def step(self):
        print("chatter on standard output")
        events = []
        for request_id, left in list(self.left.items()):
            count = min(2, left)
            self.left[request_id] = left - count
            events.append((request_id, count, left == count))
            if left == count:
                del self.left[request_id]
        return events

peer_engines.ENGINES["counting"] = Counting
peer_engines.main()
"""


@pytest.fixture(autouse=True)
def counting_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(transport.PROGRAM.parent)))
    monkeypatch.setattr(transport, "PROGRAM", program)


def peer(tmp_path: Path, *, model: str = "good", python: str = sys.executable) -> PeerTransport:
    return PeerTransport(python, "counting", {"model": model}, tmp_path / "peer.log")


def send(one: PeerTransport, *requests: OfferedRequest) -> list[RequestOutcome]:
    async def run() -> list[RequestOutcome]:
        progress = RunProgress()
        await one.open()
        try:
            await LoadDriver(one, RunLimits(60.0), progress).open_loop([(request,) for request in requests])
        finally:
            await one.close()
        return progress.outcomes

    return asyncio.run(run())


def test_tokens_arrive_as_they_are_made(tmp_path: Path) -> None:
    counting = peer(tmp_path)
    outcomes = send(counting, OfferedRequest(0.0, [5], 5), OfferedRequest(0.0, [6], 2), OfferedRequest(0.0, [7], 1))
    assert [[count for _, count in outcome.chunks] for outcome in outcomes] == [[2, 2, 1], [2], [1]]
    assert all(outcome.is_complete for outcome in outcomes)
    assert counting.versions == {"counting": "1.0"}
    assert all(outcome.streamed for outcome in outcomes)
    assert "chatter" in (tmp_path / "peer.log").read_text()


def test_a_peer_that_dies_ends_its_requests_with_its_reason(tmp_path: Path) -> None:
    outcomes = send(peer(tmp_path), OfferedRequest(0.0, [13], 5), OfferedRequest(0.0, [6], 5))
    assert [outcome.code for outcome in outcomes] == ["PEER-DIED"] * 2
    assert "RuntimeError: unlucky" in outcomes[0].error


def test_a_peer_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="counting: ZeroDivisionError"):
        send(peer(tmp_path, model="bad"), OfferedRequest(0.0, [5], 1))


def test_a_python_that_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be run"):
        send(peer(tmp_path, python=str(tmp_path)), OfferedRequest(0.0, [5], 1))
