"""Requests of a recording as a trace, with their recorded prompt and output lengths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.record.recorded_events import ORDINARY_TOKEN, AddEvent
from tidewheel.request import Request
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.simulate.replay import EventPlayer, Recording, play, scheduler_of
from tidewheel.workload.traces import NOBODY, Trace

_FIRST_LINE = b'["tidewheel-recording"'


def is_recording(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_FIRST_LINE)) == _FIRST_LINE
    except OSError:
        return False


class RequestCollector(EventPlayer):
    """Player that collects the requests, which have their outputs after the replay."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.requests: list[Request] = []

    def on_added(self, event: AddEvent, requests: list[Request]) -> None:  # noqa: ARG002
        self.requests += requests


def trace_of(recording: Recording, path: Path) -> Trace:
    """Return the recorded requests. A request without output gets the median length of the others.

    Raise `ConfigError` for a recording without answered requests, or whose replay differs.
    """
    player = RequestCollector(scheduler_of(recording.header))
    if difference := play(recording, player).difference:
        raise ConfigError(f"{path}: the replay differs, so another version wrote it: {difference}")
    requests = sorted(player.requests, key=lambda request: request.arrival_time)
    outputs = np.array([request.num_output_tokens for request in requests])
    if not outputs.any():
        raise ConfigError(f"{path}: no recorded request has output")
    outputs[outputs == 0] = round(float(np.median(outputs[outputs > 0])))
    arrivals = np.array([request.arrival_time for request in requests])
    objectives = [request.objective for request in requests]
    deadlines = [np.inf if r.deadline is None else max(r.deadline - r.arrival_time, 0.0) for r in requests]
    return Trace.of(
        arrivals - arrivals[0],
        [request.num_prompt_tokens for request in requests],
        outputs,
        priorities=[request.priority for request in requests],
        deadlines=deadlines,
        ttft_objectives=[np.inf if objective is None else objective.ttft_s for objective in objectives],
        tpot_objectives=[np.inf if objective is None else objective.tpot_s for objective in objectives],
        encoder_tokens=[request.encoder_tokens for request in requests],
        **_named("tenant", [request.tenant for request in requests]),
        **_sessions(requests),
        **_prefixes(requests, _block_size(recording)),
    )


def _block_size(recording: Recording) -> int:
    return int(str(recording.header.info["block_size"]))


def _named(kind: str, names: Sequence[str]) -> dict[str, Any]:
    numbers = {"": 0}
    return {
        f"{kind}s": [numbers.setdefault(name, len(numbers)) for name in names],
        f"{kind}_names": tuple(numbers),
    }


def _sessions(requests: Sequence[Request]) -> dict[str, Any]:
    numbers: dict[str, int] = {}
    sessions = [numbers.setdefault(r.session_id, len(numbers)) if r.session_id else NOBODY for r in requests]
    return {"sessions": sessions, "session_names": tuple(numbers)}


def _prefixes(requests: Sequence[Request], block_size: int) -> dict[str, Any]:
    """Group requests by equal first blocks. A group's shared prefix is the longest that all its prompts have."""
    leaders: dict[int, Request] = {}  # first of a group, by the token that names its first block
    shared: dict[int, int] = {}
    groups: list[int] = []
    numbers: dict[int, int] = {}
    for request in requests:
        prompt = request.prompt_token_ids
        name = int(prompt[block_size - 1]) if len(prompt) >= block_size else ORDINARY_TOKEN
        if request.session_id or name == ORDINARY_TOKEN:
            groups.append(NOBODY)
            continue
        leader = leaders.setdefault(name, request).prompt_token_ids
        most = min(len(leader), len(prompt))
        equal = int((leader[:most] == prompt[:most]).sum())  # names of prefixes: once different, always
        number = numbers.setdefault(name, len(numbers))
        shared[number] = min(shared.get(number, equal), equal)
        groups.append(number)
    return {
        "prefix_groups": groups,
        "prefix_names": tuple(map(str, numbers)),
        "prefix_tokens": [shared.get(group, 0) for group in groups],
    }
