"""Traces for routers: sessions of several turns, system prompts by Zipf's law, and both, with classes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from tidewheel.request import Priority
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import NOBODY, Trace

NEW_TEXT = Lengths.parse("lognormal:150:1:2000", name="new text of a turn")
OUTPUT = Lengths.parse("lognormal:200:0.8:1000", name="output")
MEAN_TURNS = 6.0
THINK_S = 20.0  # mean, after the answer
SECONDS_PER_TOKEN = 0.015  # of an answer, as the sender expects it
MAX_PROMPT = 16_000
NUM_DRAWN = 1 << 16  # lengths, used again and again
MEAN_GROUP_TOKENS = 1500


class Kind(NamedTuple):
    session_share: float  # of requests
    num_groups: int  # system prompts; 0: none
    critical_share: float = 0.0


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "sessions": Kind(1.0, 0),
        "system prompts": Kind(0.0, 64),
        "mixed": Kind(0.7, 64, critical_share=0.05),
    }
)


class _Row(NamedTuple):
    arrival: float
    prompt: int
    output: int
    session: int
    group: int
    priority: int


def make_trace(kind: Kind, rate: float, seconds: float, seed: int) -> Trace:
    """Return the requests of the time from 0 to `seconds`; sessions began long before."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, kind.num_groups + 1)
    group_tokens = 64 * rng.integers(8, 2 * MEAN_GROUP_TOKENS // 64 - 8, max(kind.num_groups, 1))
    before = 3 * MEAN_TURNS * (THINK_S + 200 * SECONDS_PER_TOKEN) if kind.session_share else 0.0
    starts_per_s = rate * (kind.session_share / MEAN_TURNS + 1 - kind.session_share)
    single_share = (1 - kind.session_share) * rate / starts_per_s
    texts, outputs = (itertools.cycle(lengths.draw(NUM_DRAWN, rng).tolist()) for lengths in (NEW_TEXT, OUTPUT))
    rows: list[_Row] = []
    now, session = -before, 0
    while (now := now + float(rng.exponential(1 / starts_per_s))) < seconds:
        group = int(rng.choice(kind.num_groups, p=weights / weights.sum())) if kind.num_groups else NOBODY
        length = int(group_tokens[group]) if kind.num_groups else 0
        priority = Priority.CRITICAL if rng.random() < kind.critical_share else Priority.NORMAL
        if rng.random() < single_share:
            rows.append(_Row(now, length + next(texts), next(outputs), NOBODY, group, priority))
        else:
            rows += _turns(rng, texts, outputs, _Row(now, length, 0, session, group, Priority.NORMAL))
            session += 1
    rows = sorted(row for row in rows if 0 <= row.arrival < seconds)
    columns = list(zip(*rows, strict=True))
    names, sessions = np.unique(columns[3], return_inverse=True)
    offset = int(names[0] == NOBODY)
    groups = np.array(columns[4])
    return Trace.of(
        columns[0], columns[1], columns[2],
        sessions=sessions - offset,
        session_names=tuple(f"session {name}" for name in names[offset:]),
        prefix_groups=groups,
        prefix_names=tuple(f"system prompt {number}" for number in range(kind.num_groups)),
        prefix_tokens=np.where(groups == NOBODY, 0, group_tokens[groups]),
        priorities=columns[5],
    )  # fmt: skip


def _turns(rng: np.random.Generator, texts: Iterator[int], outputs: Iterator[int], row: _Row) -> list[_Row]:
    """Return the turns of a session, from a row that has its start and the length of its system prompt."""
    rows: list[_Row] = []
    for _ in range(rng.geometric(1 / MEAN_TURNS)):
        row = row._replace(prompt=row.prompt + row.output + next(texts), output=next(outputs))
        if row.prompt + row.output > MAX_PROMPT:
            break
        rows.append(row)
        row = row._replace(arrival=row.arrival + row.output * SECONDS_PER_TOKEN + float(rng.exponential(THINK_S)))
    return rows
