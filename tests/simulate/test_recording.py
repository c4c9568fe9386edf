"""What is recorded is decided again: the same commands give the same batches, and a changed one is found."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.long_runs import slow
from support.scheduler.invariants import check_invariants
from support.simulate.simulation import make_scheduler
from tidewheel.batch import NOT_DRAFTED, TO_DRAFT, SampledTokens, ScheduledBatch
from tidewheel.errors import ConfigError, InternalError, InvalidRequest, NotFound, TidewheelError
from tidewheel.lora import Lora
from tidewheel.record import recorder as recorder_module
from tidewheel.record.recorded_events import ApplyEvent, ScheduleEvent, StepFeatures
from tidewheel.record.recorder import PrefixNames, Recorder, RecordingScheduler
from tidewheel.request import FinishReason, Priority, Request, RequestObjective
from tidewheel.sampling import SamplingParams
from tidewheel.simulate.calibration import measured_steps
from tidewheel.simulate.replay import Recording, ReplayResult, replay
from tidewheel.tenants import TenantLimits

EOS = 3
VOCAB = 8  # so few that prompts share prefixes and answers stop


def recording_scheduler(recorder: Recorder, **settings: Any) -> RecordingScheduler:
    plain = make_scheduler(**settings)
    return RecordingScheduler(plain._state.config, plain._state.kv, recorder)


class Session:
    """A random client and a device that answers at random, on a scheduler that is recorded."""

    def __init__(self, seed: int, path: Path, *, max_inflight_steps: int = 1, **settings: object) -> None:
        self.rng = np.random.default_rng(seed)
        self.settings = {"max_inflight_steps": max_inflight_steps, **settings}
        self.path = path
        self.max_inflight_steps = max_inflight_steps
        self.file = path.open("wb")
        self.recorder = Recorder(
            self.file,
            settings={},
            info={},
            with_contents=bool(settings.get("enable_prefix_caching", True)),
            named_tenants=settings.get("tenants", ()),
        )
        self.scheduler = recording_scheduler(self.recorder, **self.settings)
        self.in_flight: deque[ScheduledBatch] = deque()
        self.loras = [Lora(f"secret adapter {number}", number, Path()) for number in range(4)]
        self.scheduler.loras.load = self.load
        self.loading: dict[Lora, None] = {}
        self.requests: list[Request] = []
        self.turns: dict[str, Request] = {}  # the newest of each session
        self.now = 0.0

    def add(self) -> None:
        with contextlib.suppress(TidewheelError):
            self.scheduler.add_group([self.request()], self.now)

    def add_group(self) -> None:
        first = self.request()
        group = [first] + [
            Request(
                f"{first.request_id}-{index}", first.prompt_token_ids, first.sampling, max_tokens=first.max_tokens,
                arrival_time=self.now, priority=first.priority, stop_token_ids=first.stop_token_ids,
                cache_salt=first.cache_salt, tenant=first.tenant, leader=first, lora=first.lora,
            )
            for index in (1, 2)
        ]  # fmt: skip
        with contextlib.suppress(TidewheelError):
            self.scheduler.add_group(group, self.now)

    def request(self) -> Request:
        rng = self.rng
        request = Request(
            f"r{len(self.requests)}",
            rng.integers(1, VOCAB, int(rng.integers(1, 30)), dtype=np.int32) % 3 + 4,
            SamplingParams(min_tokens=int(rng.integers(0, 2))),
            max_tokens=int(rng.integers(1, 20)),
            arrival_time=self.now,
            priority=Priority(int(rng.integers(1, 5))),
            stop_token_ids=(EOS,) if rng.random() < 0.5 else (),
            cache_salt=str(rng.integers(0, 2)),
            tenant=str(rng.choice(["acme", "zed"])),
            deadline=self.now + float(rng.exponential(1.0)) if rng.random() < 0.1 else None,
            soft_deadline=self.now + float(rng.exponential(0.3)) if rng.random() < 0.1 else None,
            objective=RequestObjective(0.2, math.inf, bool(rng.random() < 0.5)) if rng.random() < 0.2 else None,
        )
        if "max_loras" in self.settings and rng.random() < 0.7:
            request.lora = self.loras[int(rng.integers(len(self.loras)))]
            request.cache_salt += request.lora.name
        self.requests.append(request)
        return request

    def load(self, lora: Lora) -> None:
        """Drop weights of other adapters, for room, and have those of this one read by a later step."""
        self.loading[lora] = None
        for other in self.loras:
            if other not in self.scheduler.loras.running and self.rng.random() < 0.2:
                other.weights = None

    def end_loads(self) -> None:
        for lora in [lora for lora in self.loading if self.rng.random() < 0.3]:
            del self.loading[lora]
            lora.weights = True
            if self.rng.random() < 0.05:
                lora.weights, lora.error = None, InvalidRequest("a test")
                self.loras = [again(one) if one is lora else one for one in self.loras]

    def add_turn(self) -> None:
        """The next turn of a session that has ended, sometimes with another ending than was generated."""
        rng = self.rng
        name = str(rng.choice(["s1", "s2", "s3"]))
        last = self.turns.get(name)
        if last is not None and not last.is_finished:
            return
        said = [] if last is None else [*last.prompt_token_ids.tolist(), *last.output_token_ids]
        kept = said[: len(said) - int(rng.integers(0, 3))][:80]
        request = self.request()
        request.prompt_token_ids = np.array([*kept, *request.prompt_token_ids.tolist()], dtype=np.int32)
        request.num_prompt_tokens = len(request.prompt_token_ids)
        request.session_id, request.session_ttl = name, 2.0
        with contextlib.suppress(TidewheelError):
            self.scheduler.add_group([request], self.now)
            self.turns[name] = request

    def close(self) -> None:
        with contextlib.suppress(NotFound):
            self.scheduler.close_session(str(self.rng.choice(["acme", "zed"])), str(self.rng.choice(["s1", "s2"])))

    def cancel(self) -> None:
        if self.requests:
            self.scheduler.cancel(self.rng.choice(self.requests).request_id)

    def schedule(self) -> None:
        self.end_loads()
        self.scheduler.expire(self.now)
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            self.in_flight.append(batch)

    def apply(self) -> None:
        if not self.in_flight:
            return
        batch = self.in_flight.popleft()
        tokens = self.rng.integers(EOS, VOCAB, len(batch.rows), dtype=np.int32)
        tokens[self.rng.random(len(tokens)) < 0.01] = SampledTokens.NOT_FINITE
        tokens[~batch.samples] = SampledTokens.NOT_SAMPLED
        drafts = None
        if (is_drafted := batch.draft_tokens == TO_DRAFT).any():
            is_right = self.rng.random(len(tokens)) < 0.7
            drafts = np.where(is_drafted, np.where(is_right, np.roll(tokens, 1), NOT_DRAFTED), batch.draft_tokens)
        self.scheduler.apply(batch, SampledTokens(batch.step_id, tokens, draft_tokens=drafts), self.now)

    def fail(self) -> None:
        self.in_flight.clear()
        self.scheduler.fail_all(InternalError("a test"))

    def run(self, num_actions: int) -> Path:
        actions = {
            self.add: 0.14, self.add_group: 0.02, self.add_turn: 0.04, self.close: 0.01, self.cancel: 0.04,
            self.schedule: 0.4, self.apply: 0.347, self.fail: 0.003,
        }  # fmt: skip
        for index in self.rng.choice(len(actions), size=num_actions, p=list(actions.values())):
            self.now += float(self.rng.exponential(0.01))
            list(actions)[index]()
        check_invariants(self.scheduler)
        self.recorder.flush()
        self.file.close()
        return self.path

    def replay(self, **changes: object) -> ReplayResult:
        return replay(Recording(self.path), make_scheduler(**(self.settings | changes)))


def again(lora: Lora) -> Lora:
    return Lora(lora.name, lora.version + 10, Path())


CASES = [
    {"max_inflight_steps": steps, "num_blocks": blocks, "enable_prefix_caching": caching}
    for steps, blocks, caching in itertools.product((1, 2), (32, 96), (True, False))
] + [
    {"num_blocks": 32, "num_host_blocks": 40, "preemption_mode": "swap", "swap_seconds_per_block": 1e-4},
    {"num_blocks": 32, "num_host_blocks": 40, "swap_seconds_per_block": 1e-4, "max_inflight_steps": 2},
    *({"policy": policy} for policy in ("fifo", "sjf", "deadline", "fair", "density")),
    *({"scheduling_strategy": name} for name in ("static", "dynamic", "predictive", "hybrid")),
    {"target_tpot_ms": 20.0, "enable_seqs_governor": True, "num_blocks": 32},
    *({"speculation": "prompt_lookup", "max_inflight_steps": steps} for steps in (1, 2)),
    *({"speculation": "draft_model", "num_blocks": 32, "max_inflight_steps": steps} for steps in (1, 2)),
    {"max_loras": 2, "ageing_s": 0.05, "num_blocks": 32, "max_inflight_steps": 2},
    {"max_loras": 1, "ageing_s": 0.05, "lora_limits": {"*": TenantLimits(requests_per_s=20.0, each=True)}},
    {
        "breaker_queue_time_s": 0.2,
        "breaker_error_rate": 0.2,
        "tenants": {"zed": TenantLimits(requests_per_s=5, tokens_per_s=500, max_priority=3)},
    },
]


@pytest.mark.parametrize("settings", CASES, ids=str)
@pytest.mark.parametrize("seed", [0, *slow((1, 2))])
def test_a_recording_is_replayed_to_the_same_decisions(tmp_path: Path, seed: int, settings: dict[str, int]) -> None:
    session = Session(seed, tmp_path / "r.jsonl", **settings)
    session.run(1500)
    replayed = session.replay()
    assert replayed.difference == ""
    assert replayed.num_steps > 200 and replayed.num_requests >= len(session.requests)
    stats = session.scheduler.stats()
    if "speculation" in settings and seed == 0:  # with other seeds, too little repeats
        assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    if settings.get("num_blocks") == 32:
        assert stats.num_preemptions > 0
    if settings.get("enable_prefix_caching", True):
        assert stats.num_prefix_hits > 0


@pytest.mark.parametrize(
    "changes",
    [{"max_num_batched_tokens": 16}, {"num_blocks": 33}, {"policy": "fifo"}, {"enable_prefix_caching": False}],
    ids=str,
)
def test_another_scheduler_is_told_apart_at_the_first_difference(tmp_path: Path, changes: dict[str, object]) -> None:
    session = Session(0, tmp_path / "r.jsonl", num_blocks=32)
    session.run(1500)
    difference = session.replay(**changes).difference
    assert "recorded" in difference and "replayed" in difference


def edit(path: Path, kind: str, position: int, change: object) -> None:
    """Changes one element of the first line of this kind that has something there."""
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines):
        values = msgspec.json.decode(line)
        if values[0] == kind and values[position]:
            values[position] = change
            lines[number] = msgspec.json.encode(values)
            break
    path.write_bytes(b"\n".join(lines) + b"\n")


@pytest.mark.parametrize(
    ("kind", "position", "change", "says"),
    [
        ("schedule", 4, "00", "digest: recorded '00'"),
        ("schedule", 5, ["x"], r"new_requests: recorded \['x'\]"),
        ("apply", 4, 1000, "tokens delivered: recorded 1000"),
        ("cancel", 3, False, "was it there: recorded False, replayed True"),
    ],
)
def test_every_kind_of_decision_is_compared(
    tmp_path: Path, kind: str, position: int, change: object, says: str
) -> None:
    session = Session(1, tmp_path / "r.jsonl")
    edit(session.run(600), kind, position, change)
    assert re.search(says, session.replay().difference)


def test_a_recording_holds_no_tokens_and_no_names(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with path.open("wb") as file:
        recorder = Recorder(file, settings={}, info={}, with_contents=True, named_tenants=("paying",))
        scheduler = recording_scheduler(recorder)
        prompt = np.arange(1_000_000, 1_000_020, dtype=np.int32)
        for tenant in ("secret tenant", "paying"):
            request = Request(
                tenant[0], prompt, SamplingParams(), max_tokens=2, arrival_time=0.0, tenant=tenant,
                cache_salt="secret salt", session_id="secret session", lora=Lora("secret adapter", 1, Path()),
            )  # fmt: skip
            scheduler.add_group([request], 0.0)
        recorder.flush()
    content = path.read_bytes()
    assert b"secret" not in content and b"paying" in content
    added = [event for event in Recording(path).events() if type(event).__name__ == "AddEvent"]
    names = np.frombuffer(added[0].requests[0].prompt, dtype=np.int32)
    assert len(names) == 20 and not np.isin(names, prompt).any()


def test_names_are_equal_for_equal_prefixes_and_only_for_those() -> None:
    names = PrefixNames()
    _, one = names.extend(names.root, [5, 6, 7, 8])
    state, head = names.extend(names.root, [5, 6])
    _, tail = names.extend(state, [9, 8])
    assert one[:2] == head
    assert not set(one[2:]) & set(tail), "after another token, the same one has another name"
    assert len(set(names.extend(names.root, [5] * 50)[1])) == 50, "a token has no name of its own"
    assert PrefixNames().extend(b"", [5])[1] != PrefixNames(b"x" * 16).extend(names.root, [5])[1]


def test_a_torn_last_line_ends_the_replay_there(tmp_path: Path) -> None:
    session = Session(2, tmp_path / "r.jsonl")
    path = session.run(600)
    path.write_bytes(path.read_bytes()[:-7])
    replayed = session.replay()
    assert replayed.is_cut and replayed.difference == ""


def test_a_recording_stops_at_its_limit_and_the_scheduler_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_BYTES", 20_000)
    session = Session(2, tmp_path / "r.jsonl")
    session.run(1500)
    assert not session.recorder.is_open
    assert (tmp_path / "r.jsonl").stat().st_size < 25_000
    replayed = session.replay()
    assert replayed.is_cut and replayed.difference == "" and replayed.num_steps > 10


class FullDisk(io.BytesIO):
    def write(self, data: object) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_recording_not_the_scheduler() -> None:
    recorder = Recorder(FullDisk(), settings={}, info={}, with_contents=False)
    scheduler = recording_scheduler(recorder)
    scheduler.schedule(0.0)
    assert not recorder.is_open
    assert scheduler.schedule(1.0) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "its first line is not the header"),
        (b"{}\n", "line 1 of the recording cannot be read"),
        (b'["tidewheel-recording", 99, "1", {}, {}]\n', "schema 99: this version reads 2"),
        (b'["full"]\n', "its first line is not the header"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        Recording(path)


def scheduled(now: float, step_id: int) -> ScheduleEvent:
    return ScheduleEvent(now, step_id, StepFeatures(1, 1, 1, 0, 1, 0))


def applied(now: float, step_id: int) -> ApplyEvent:
    return ApplyEvent(now, step_id, b"", 1, [])


def times(events: Sequence[ScheduleEvent | ApplyEvent]) -> list[tuple[float, float | None]]:
    return [(step.seconds, step.turn_seconds) for step in measured_steps(events)]


def test_steps_are_measured_with_the_turns_between_them() -> None:
    idle = ScheduleEvent(4.0)
    events = [
        scheduled(1.0, 0),
        applied(2.0, 0),
        scheduled(2.5, 1),
        applied(3.0, 1),
        idle,
        scheduled(9.0, 2),
        applied(9.5, 2),
    ]
    assert times(events) == [(1.0, 0.5), (0.5, None), (0.5, None)]


def test_with_two_in_flight_a_step_starts_when_the_one_before_it_ends() -> None:
    events = [
        scheduled(1.0, 0),
        scheduled(1.1, 1),
        applied(2.0, 0),
        scheduled(2.1, 2),
        applied(3.0, 1),
        applied(4.0, 2),
    ]
    assert times(events) == [(1.0, None), (1.0, None), (1.0, None)]


def test_a_cancel_names_its_reason(tmp_path: Path) -> None:
    session = Session(0, tmp_path / "r.jsonl")
    session.add()
    session.scheduler.cancel("r0", FinishReason.STOP)
    session.recorder.flush()
    assert session.replay().difference == ""
