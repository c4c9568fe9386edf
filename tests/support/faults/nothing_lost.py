"""What a fault may not cost: tokens of other streams, answers, blocks, memory, descriptors, threads, the service."""

from __future__ import annotations

import queue
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import pytest

from support.triton.burst import GREEDY, Burst, bursting
from support.triton.serving import Server, StreamError, grpc_inputs, grpc_stream, token_ids, wait_for
from tidewheel import metrics

CANARIES = (
    "The Python interpreter",
    "A database transaction",
    "To open a file",
    "Indexes are",
    "The server",
    "A tuple is",
    "Databases are",
    "The function returns",
)
CANARY_TOKENS = 120
SHORT_CANARY_TOKENS = 24
SERVED_AGAIN_S = 180.0
TOLD_S = 60.0
SETTLE_S = 60.0  # for figures, cancels, closed connections
STUB = "triton_python_b"  # a dead process has no more of its name
SPARE_THREADS = 8  # gRPC starts some of its own
SPARE_DESCRIPTORS = 8
INHERITED_DESCRIPTORS = 32  # by a stub that starts while Triton serves: pairs of sockets of its HTTP threads
SPARE_BYTES = 96 << 20  # of an allocator, after one case
BAD_LOG = re.compile(
    r"Segmentation|SIGSEGV|Traceback|device-side assert|illegal memory|double free|leak detected|not healthy"
    r"|could not be published"
)

NO_ANSWER = (queue.Empty, pytest.fail.Exception)  # a wait that reached its limit

Recorded = dict[str, list[int]]  # tokens by prompt


@contextmanager
def check(name: str, *, late: str = "") -> Iterator[None]:
    """Note the name on what fails inside; `late`: that of waits that reach their limit."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"check: {late if late and isinstance(error, NO_ANSWER) else name}")
        raise


def record(server: Server) -> Recorded:
    """Run each canary alone, and all of them at once, so that later cases find a warm server."""
    recorded = {prompt: _ask(server, prompt, CANARY_TOKENS) for prompt in CANARIES}
    with streaming_canaries(server) as canaries:
        assert_survived(canaries, recorded)
    return recorded


def _ask(server: Server, prompt: str, count: int) -> list[int]:
    inputs = grpc_inputs(prompt, stream=True, return_token_ids=True, max_tokens=count, **GREEDY)
    return token_ids(grpc_stream(server, inputs))


@contextmanager
def streaming_canaries(server: Server) -> Iterator[Burst]:
    """Start greedy streams, each of which has its first token."""
    with bursting(server, num_clients=1) as canaries:
        for prompt in CANARIES:
            canaries.send(prompt, CANARY_TOKENS)
        canaries.receive_until_all_run()
        yield canaries


@contextmanager
def nothing_lost(
    server: Server,
    recorded: Recorded,
    *,
    ends: str = "",
    log: str = "",
    spare_bytes: int = SPARE_BYTES,
    spare_descriptors: int = SPARE_DESCRIPTORS,
) -> Iterator[Burst]:
    """Run a case beside greedy streams, and check afterwards.

    `ends`: tag of the errors that may end those streams. `log`: pattern of lines that the case may leave in the logs.
    """
    wait_for(lambda: server.readiness()[0] == 200 and is_idle(server), SERVED_AGAIN_S, "the end of earlier faults")
    before, ledger = Footprint.of(server), Ledger.settled(server)
    logs = Logs(server)
    with streaming_canaries(server) as canaries:
        with check("case", late="clock"):
            yield canaries
        with check("survivors", late="clock"):
            canaries.finish()
            if ends:
                assert all(error.startswith(f"[{ends}") for error in canaries.errors), canaries.errors
                assert_prefixes(canaries, recorded)
            else:
                assert_survived(canaries, recorded)
            assert canaries.answers.empty(), "an answer after the last"
    with check("blocks"):
        if not ends:
            wait_for(lambda: is_idle(server), SETTLE_S, "all blocks back")
    with check("service"):
        assert_serves(server, recorded)
    with check("blocks"):
        wait_for(lambda: is_idle(server), SETTLE_S, "all blocks back")
        assert "invariant broken" not in logs.text()
    with check("ledger"):
        wait_for(lambda: Ledger.of(server).since(ledger).is_balanced(), SETTLE_S, "every request in one count")
    with check("host"):
        before.assert_back(server, spare_bytes, spare_descriptors)
    with check("log"):
        logs.assert_quiet(log)


# --- tokens -------------------------------------------------------------------------------------------------------


def assert_survived(canaries: Burst, recorded: Recorded) -> None:
    canaries.finish()
    assert canaries.errors == []
    assert list(canaries.tokens.values()) == [recorded[prompt] for prompt in CANARIES]


def assert_prefixes(canaries: Burst, recorded: Recorded) -> None:
    """Check that a stream that was cut off has the tokens up to there."""
    for tokens, prompt in zip(canaries.tokens.values(), CANARIES, strict=True):
        assert tokens == recorded[prompt][: len(tokens)]


def assert_serves(server: Server, recorded: Recorded) -> None:
    """Wait until the server is ready and answers; every answer is right."""

    def answers() -> bool:
        try:
            for prompt in CANARIES[:5]:
                assert _ask(server, prompt, SHORT_CANARY_TOKENS) == recorded[prompt][:SHORT_CANARY_TOKENS]
        except StreamError as error:
            assert str(error).startswith("[TW-ENGINE-DEAD retry_after_ms="), error
            return False
        return server.is_ready() and server.readiness()[0] == 200

    wait_for(answers, SERVED_AGAIN_S, "five right answers")


def assert_told(server: Server, *states: str) -> None:
    """Wait until `/ready` is 503 with one of these states."""
    with check("service"):
        wait_for(lambda: server.readiness() in [(503, state) for state in states], TOLD_S, f"503 and {states}")


# --- figures ------------------------------------------------------------------------------------------------------


def is_idle(server: Server) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return sum(server.metric(name) for name in names) == 0


COUNTS = {
    "vllm:request_success_total": "finished",
    "tidewheel_requests_rejected_total": "rejected",
    "tidewheel_requests_failed_total": "failed",
    "nv_inference_request_success": "triton success",
    "nv_inference_request_failure": "triton failure",
}
REASONS = ("finished_reason", "tag", "reason")  # labels


@dataclass(frozen=True)
class Ledger:
    """Requests that came, and how they ended: `finished length`, `rejected TW-INPUT`, `failed TW-NUMERIC`."""

    received: int  # by our front ends
    ended: Counter[str]
    tritons: Counter[str]  # Triton's own: `triton success`, `triton failure BACKEND`

    @classmethod
    def of(cls, server: Server) -> Ledger:
        ended, tritons = Counter[str](), Counter[str]()
        figures = server.metrics()
        received = int(sum(sample.value for sample in figures.samples(metrics.RECEIVED.name)))
        for name, outcome in COUNTS.items():
            side = tritons if name.startswith("nv_") else ended
            for sample in figures.samples(name):
                reasons = (sample.labels[label] for label in REASONS if label in sample.labels)
                side[" ".join([outcome, *reasons])] += int(sample.value)
        return cls(received, ended, tritons)

    @classmethod
    def settled(cls, server: Server) -> Ledger:
        """Wait until earlier requests are counted: an error is within a second."""
        return cast(
            Ledger, wait_for(lambda: (now := cls.of(server)).is_balanced() and now, SETTLE_S, "earlier counts")
        )

    def since(self, other: Ledger) -> Ledger:
        return Ledger(
            self.received - other.received,
            counted_since(self.ended, other.ended),
            counted_since(self.tritons, other.tritons),
        )

    def is_balanced(self) -> bool:
        """To Triton every request succeeded that a front end got: with an error, too, its answer is an answer."""
        return self.received == self.ended.total() == self.tritons["triton success"]


def counted_since(now: Counter[str], before: Counter[str]) -> Counter[str]:
    return Counter({name: count - before[name] for name, count in now.items() if count != before[name]})


# --- the host -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    threads: int
    descriptors: int
    memory: int
    shared_memory: int  # touched bytes of Triton's regions
    processes: Counter[str]

    @classmethod
    def of(cls, server: Server) -> Footprint:
        threads = descriptors = memory = 0
        names: Counter[str] = Counter()
        for process in [psutil.Process(server.process.pid), *server.descendants()]:
            try:
                with process.oneshot():
                    if process.status() == psutil.STATUS_ZOMBIE and process.name().startswith(STUB):
                        continue  # Triton waits for a killed front end when it has replaced it
                    threads += process.num_threads()
                    descriptors += process.num_fds()
                    memory += process.memory_info().rss - process.memory_info().shared
                    names[process.name().strip()] += 1
            except psutil.Error:
                continue
        regions = [path.stat().st_blocks * 512 for path in shared_memory(server).glob(f"{shm_prefix(server)}*")]
        return cls(threads, descriptors, memory, sum(regions), names)

    def assert_back(self, server: Server, spare_bytes: int, spare_descriptors: int = SPARE_DESCRIPTORS) -> None:
        def difference() -> dict[str, object]:
            now = Footprint.of(server)
            limits = {
                "threads": SPARE_THREADS,
                "descriptors": spare_descriptors,
                "memory": spare_bytes,
                "shared_memory": spare_bytes,
            }
            grown = {name: getattr(now, name) - getattr(self, name) for name in limits}
            more: dict[str, object] = {name: by for name, by in grown.items() if by > limits[name]}
            return more if now.processes == self.processes else {**more, "processes": (self.processes, now.processes)}

        deadline = time.monotonic() + SETTLE_S
        while (left := difference()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == {}, f"more than before the case: {left}"


def run_dir(server: Server) -> Path:
    """Return the folder below which engines have theirs."""
    return Path(server.triton_process().environ()["TIDEWHEEL_RUN_DIR"])


def shm_prefix(server: Server) -> str:
    return f"tidewheel_{run_dir(server).parent.name.removeprefix('serve-')}_"


def as_seen_by(server: Server, path: Path) -> Path:
    """Return a way to a path of the server, which may have file systems of its own."""
    return Path(f"/proc/{server.process.pid}/root{path}")


def shared_memory(server: Server) -> Path:
    return as_seen_by(server, Path("/dev/shm"))


# --- logs ---------------------------------------------------------------------------------------------------------


def triton_log(server: Server) -> Path:
    """Return the file for what `tidewheel serve` does not show."""
    return server.log.with_name("triton.log")


class Logs:
    """What the server and its engines write from now on."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._starts = {inode: path.stat().st_size for inode, path in self._files().items()}

    def _files(self) -> dict[int, Path]:
        engines = as_seen_by(self._server, run_dir(self._server)).glob("*/*/engine.log")
        paths = (self._server.log, triton_log(self._server), *engines)
        return {path.stat().st_ino: path for path in paths if path.is_file()}

    def text(self) -> str:
        pieces = []
        for inode, path in self._files().items():
            with path.open(errors="replace") as log:
                log.seek(self._starts.get(inode, 0))
                pieces.append(log.read())
        return "".join(pieces)

    def assert_quiet(self, allowed: str) -> None:
        bad = [line for line in self.text().splitlines() if BAD_LOG.search(line)]
        assert [line for line in bad if not (allowed and re.search(allowed, line))] == []
