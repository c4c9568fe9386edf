"""A recording as a trace for Perfetto: events of Chrome's trace event format.

    thread "scheduler"   plan ─ … ─ apply ─ send …
    thread "steps"             step ─────── step ──       from the plan, or the end of the step before, to the tokens
    counters             requests, KV blocks, tokens
    a track per request  queue ─ prefill ─ decode ─ preempted ─ …

Recorded calls are played to a real scheduler, for figures that a recording leaves out.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tidewheel.batch import ScheduledBatch, StepOutputs
from tidewheel.record import recorded_events as record
from tidewheel.request import Request, RequestState
from tidewheel.simulate.replay import EventPlayer, Recording, ReplayResult, play, scheduler_of

PID = 1
SCHEDULER, STEPS = 1, 2  # threads
_CATEGORY = "request"

Event = dict[str, Any]


class _TracedStep(NamedTuple):
    planned: record.ScheduleEvent
    args: Mapping[str, object]


class _RequestTrack:
    def __init__(self, number: int, request: Request, name: str) -> None:
        self.request = request
        self.has_tokens = False
        self._number = number
        self._name = name
        self._phase = ""

    def begin(self, time: float) -> list[Event]:
        request = self.request
        args = {
            "request": request.request_id, "class": request.priority.name, "prompt tokens": request.num_prompt_tokens,
            "max_tokens": request.max_tokens,
        }  # fmt: skip
        return [self._event("b", self._name, time, args), *self.enter("queue", time)]

    def enter(self, phase: str, time: float) -> list[Event]:
        if phase == self._phase:
            return []
        ends, self._phase = self._end_phase(time), phase
        return [*ends, self._event("b", phase, time)]

    def end(self, time: float, reason: str) -> list[Event]:
        request = self.request
        args = {
            "end": reason, "output tokens": request.num_output_tokens, "cached tokens": request.num_cached_tokens,
            "preemptions": request.num_preemptions,
        }  # fmt: skip
        return [*self._end_phase(time), self._event("e", self._name, time, args)]

    def _end_phase(self, time: float) -> list[Event]:
        return [self._event("e", self._phase, time)] if self._phase else []

    def _event(self, kind: str, name: str, time: float, args: dict[str, object] | None = None) -> Event:
        track = {"cat": _CATEGORY, "id": str(self._number), "tid": SCHEDULER}
        return _event(kind, name, time, **track, **({"args": args} if args else {}))


class TracingPlayer(EventPlayer):
    """Player that collects trace events; times in seconds of the recording's clock."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.events: list[Event] = []
        self._tracks: dict[str, _RequestTrack] = {}
        self._num_tracks = 0
        self._steps: deque[_TracedStep] = deque()
        self._applied_until: float | None = None  # since when answers are sent; None: sent
        self._last_tokens = 0.0
        self._now = 0.0

    def play(self, event: record.AnyEvent) -> str:
        self._now = max(self._now, getattr(event, "now", 0.0))
        if isinstance(event, record.ScheduleEvent):
            self._end_sending(event.now)
        difference = super().play(event)
        self._end_all_that_ended()
        return difference

    def close(self) -> None:
        for track in self._tracks.values():
            self.events += track.end(self._now, "the recording ends")
        self._tracks.clear()

    def on_added(self, event: record.AddEvent, requests: list[Request]) -> None:
        if event.refused:
            args = {"requests": len(requests), "prompt tokens": requests[0].num_prompt_tokens}
            self.events.append(_event("i", f"refused {event.refused}", event.now, tid=SCHEDULER, s="p", args=args))
            return
        for request in requests:
            self._num_tracks += 1
            track = _RequestTrack(self._num_tracks, request, f"request {request.request_id}")
            self._tracks[request.request_id] = track
            self.events += track.begin(min(request.arrival_time, event.now))

    def on_scheduled(self, event: record.ScheduleEvent, batch: ScheduledBatch) -> None:
        end = event.now + event.seconds
        tokens = {"decode": batch.num_decodes, "prompt": batch.num_tokens - batch.num_decodes}
        args = {"step": event.step_id, "rows": len(batch.rows), "tokens": batch.num_tokens}
        args |= {f"{kind} tokens": count for kind, count in tokens.items()}
        self._steps.append(_TracedStep(event, args))
        self.events.append(_slice("plan", SCHEDULER, event.now, end, {"step": event.step_id}))
        for track in self._tracks.values():
            self.events += self._follow(track, end)
        self._count(end)
        self.events.append(_event("C", "tokens of a step", end, args=tokens))

    def on_applied(self, event: record.ApplyEvent, outputs: StepOutputs) -> None:
        planned, args = self._steps.popleft()
        # The second of two steps in flight begins when the first has its tokens.
        begin, end = max(planned.now + planned.seconds, self._last_tokens), event.now + event.seconds
        times = {"plan ms": planned.seconds, "run ms": event.now - begin, "apply ms": event.seconds}
        args = (
            {**args} | {name: round(1e3 * seconds, 3) for name, seconds in times.items()} | {"launch": event.launch}
        )
        name = " and ".join(f"{kind}s" for kind in ("prompt", "decode") if args[f"{kind} tokens"])
        self.events.append(_slice(name, STEPS, begin, event.now, args))
        self.events.append(_slice("apply", SCHEDULER, event.now, end, {"step": event.step_id}))
        self._last_tokens, self._applied_until = event.now, end
        for request in outputs.requests:
            if (track := self._tracks.get(request.request_id)) is not None:
                track.has_tokens = True
                self.events += track.enter("decode", end)
        self._now = max(self._now, end)
        self._count(end)

    def _follow(self, track: _RequestTrack, time: float) -> list[Event]:
        state = track.request.state
        if state is RequestState.RUNNING:
            return track.enter("decode" if track.has_tokens else "prefill", time)
        return track.enter("preempted", time) if state is RequestState.PREEMPTED else []

    def _end_all_that_ended(self) -> None:
        for track in [track for track in self._tracks.values() if track.request.is_finished]:
            self.events += track.end(self._now, str(track.request.finish_reason))
            del self._tracks[track.request.request_id]

    def _end_sending(self, time: float) -> None:
        if self._applied_until is not None and time > self._applied_until:
            self.events.append(_slice("send and receive", SCHEDULER, self._applied_until, time))
        self._applied_until = None

    def _count(self, time: float) -> None:
        stats = self.scheduler.stats()
        running = {"running": stats.num_running, "waiting": stats.num_waiting}
        used = {"used": stats.num_blocks - stats.num_free_blocks, "cached": stats.num_cached_blocks}
        self.events.append(_event("C", "requests", time, args=running))
        self.events.append(_event("C", "KV blocks", time, args=used))


def _event(kind: str, name: str, time: float, **fields: object) -> Event:
    return {"ph": kind, "name": name, "pid": PID, "tid": 0, "ts": time, **fields}


def _slice(name: str, thread: int, begin: float, end: float, args: dict[str, object] | None = None) -> Event:
    return _event("X", name, begin, tid=thread, dur=max(end - begin, 0.0), args=args or {})


def trace(recording: Recording) -> tuple[dict[str, object], ReplayResult]:
    player = TracingPlayer(scheduler_of(recording.header))
    replayed = play(recording, player)
    player.close()
    header = recording.header
    names = {"model": str(header.info.get("model", "")), "device": str(header.info.get("device", ""))}
    events = [*_names(f"engine {Path(names['model']).name}"), *_in_order(player.events)]
    about = names | {"tidewheel": header.version}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}, replayed


def write(recording: Recording, path: Path) -> ReplayResult:
    content, replayed = trace(recording)
    path.write_bytes(msgspec.json.encode(content))
    return replayed


def _names(process: str) -> Iterable[Event]:
    yield _name("process_name", 0, process)
    for thread, name in ((SCHEDULER, "scheduler"), (STEPS, "steps")):
        yield _name("thread_name", thread, name)


def _name(kind: str, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": PID, "tid": thread, "ts": 0.0, "args": {"name": name}}


def _in_order(events: list[Event]) -> list[Event]:
    begin = min((event["ts"] for event in events), default=0.0)
    ordered = sorted(events, key=lambda event: event["ts"])
    for event in ordered:
        event["ts"] = round(1e6 * (event["ts"] - begin), 3)
        if "dur" in event:
            event["dur"] = round(1e6 * event["dur"], 3)
    return ordered
