"""Criteria of a marathon, and of a soak, which is one without faults that open a window."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from support.faults.nothing_lost import SPARE_DESCRIPTORS, SPARE_THREADS
from support.marathon.ledger import RECOVERY_LIMIT_S, Call, Run, Sample
from tidewheel.bench.estimates import quantile
from tidewheel.bench.outcome import TIMEOUT, UNANSWERED

ERRORS_OUTSIDE, ERRORS_INSIDE = 0.01, 0.10
SPARE_MEMORY = 128 << 20  # bytes, of the allocators of some ten processes
SPARE_SHARED_MEMORY = 32 << 20  # two steps of growth
SPARE_FILES = 12  # an engine's folder after a reload, marks of front ends that died
FLAT_RATIO, FLAT_S = 1.5, 0.1  # p99 of the last third over the first, and seconds on top
FLAT_MEMORY = 1.05
BUCKET_S = 60.0
LEAST_FOR_FLATNESS_S = 300.0
MIB = 1 << 20


class Verdict(NamedTuple):
    criterion: str
    limit: str
    found: str
    passed: bool


def judge(run: Run) -> list[Verdict]:
    verdicts = [*_canaries(run), *_faults(run), *_requests(run), *_leaks(run), *_end(run)]
    if not any(fault.opens_window for fault in run.faults) and run.seconds >= LEAST_FOR_FLATNESS_S:
        verdicts += _flatness(run)
    return verdicts


def _canaries(run: Run) -> Iterator[Verdict]:
    canaries = [call for call in run.calls if call.is_canary]
    inside = [call for call in canaries if run.is_inside(call)]
    outside = [call for call in canaries if not run.is_inside(call)]
    yield _share("canaries that fail outside of windows", outside, "error", ERRORS_OUTSIDE)
    yield _share("their first attempts that fail", outside, "first_error", ERRORS_OUTSIDE)
    if any(fault.opens_window for fault in run.faults):
        yield _share("canaries that fail inside", inside, "error", ERRORS_INSIDE)


def _share(criterion: str, calls: Sequence[Call], field: str, limit: float) -> Verdict:
    failed = sum(bool(getattr(call, field)) for call in calls)
    found = f"{failed} of {len(calls)}"
    return Verdict(criterion, f"under {limit:.0%}", found, bool(calls) and failed < limit * len(calls))


def _faults(run: Run) -> Iterator[Verdict]:
    if windows := [fault for fault in run.faults if fault.opens_window]:
        slowest = max(windows, key=lambda fault: fault.recovery_s)
        found = f"{slowest.recovery_s:.1f} s at most, of {len(windows)} ({slowest.kind})"
        yield Verdict("recovery", f"under {RECOVERY_LIMIT_S:g} s", found, slowest.recovery_s < RECOVERY_LIMIT_S)
    surprises = [f"{fault.kind}: {fault.surprise}" for fault in run.faults if fault.surprise]
    if run.faults:
        yield _none("faults with an unexpected result", surprises)


def _requests(run: Run) -> Iterator[Verdict]:
    wrong = [f"{call.way} at {call.sent:.0f} s" for call in run.calls if not call.has_right_tokens]
    yield _none("requests with a wrong token", wrong)
    silent = [f"{call.way} at {call.sent:.0f} s" for call in run.calls if call.error in (TIMEOUT, UNANSWERED)]
    yield _none("requests that never end", silent)


def _leaks(run: Run) -> Iterator[Verdict]:
    before, after = run.before, run.after
    yield Verdict("KV blocks in use at the end", "0", f"{after.kv_use:.1%}", after.kv_use == 0)
    yield Verdict("requests left in the engine", "0", f"{after.unfinished:g}", after.unfinished == 0)
    yield _growth("private memory, MiB", before.memory, after.memory, SPARE_MEMORY, MIB)
    yield _growth("shared memory, MiB", before.shared_memory, after.shared_memory, SPARE_SHARED_MEMORY, MIB)
    yield _growth("descriptors", before.descriptors, after.descriptors, SPARE_DESCRIPTORS)
    yield _growth("threads", before.threads, after.threads, SPARE_THREADS)
    yield _growth("files of the run folder", len(before.files), len(after.files), SPARE_FILES)
    names = sorted(before.processes.keys() | after.processes.keys())
    changes = {name: after.processes.get(name, 0) - before.processes.get(name, 0) for name in names}
    changed = [f"{name} {by:+d}" for name, by in changes.items() if by > 0 or name not in after.processes]
    yield _none("more processes, or none of a kind", changed)


def _growth(what: str, before: float, after: float, spare: float, unit: float = 1) -> Verdict:
    found = f"{before / unit:.0f} to {after / unit:.0f}"
    return Verdict(what, f"{spare / unit:+.0f}", found, after - before <= spare)


def _end(run: Run) -> Iterator[Verdict]:
    yield Verdict("exit status of serve", "0", str(run.exit_status), run.exit_status == 0)
    yield _none("left by the ended server", run.left_over)
    yield _none("log lines of a crash", run.bad_lines)


def _none(criterion: str, found: Sequence[str]) -> Verdict:
    shown = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    return Verdict(criterion, "none", shown or "none", not found)


# --- flatness -----------------------------------------------------------------------------------------------------


def _flatness(run: Run) -> Iterator[Verdict]:
    third = run.seconds / 3
    for name, unit in (("memory", MIB), ("threads", 1), ("descriptors", 1)):
        first, last = (_median(run.samples, name, begin, begin + third) for begin in (0.0, 2 * third))
        limit = first * FLAT_MEMORY if name == "memory" else first + _spare(name)
        slope = f", {hourly_slope(run.samples, name) / unit:+.1f} an hour" if name == "memory" else ""
        found = f"{first / unit:.0f} to {last / unit:.0f}{slope}"
        yield Verdict(f"{name}, first third to last", f"at most {limit / unit:.0f}", found, last <= limit)
    for what, measure in LATENCIES.items():
        first, last = (p99(run.calls, measure, begin, begin + third) for begin in (0.0, 2 * third))
        limit = FLAT_RATIO * first + FLAT_S
        found = f"{first * 1e3:.0f} to {last * 1e3:.0f} ms"
        yield Verdict(f"p99 of {what}, first third to last", f"at most {limit * 1e3:.0f} ms", found, last <= limit)


def _spare(name: str) -> int:
    return {"threads": SPARE_THREADS, "descriptors": SPARE_DESCRIPTORS}[name]


def _median(samples: Sequence[Sample], name: str, begin: float, end: float) -> float:
    seen = [getattr(sample, name) for sample in samples if begin <= sample.at < end]
    return statistics.median(seen) if seen else math.nan


def hourly_slope(samples: Sequence[Sample], name: str) -> float:
    """Return the growth an hour, by least squares."""
    if len(samples) < 2:
        return math.nan
    points = [(sample.at, getattr(sample, name)) for sample in samples]
    return 3600 * statistics.linear_regression(*zip(*points, strict=True)).slope


LATENCIES: dict[str, Callable[[Call], float | None]] = {
    "first tokens": lambda call: None if call.error else call.first_token,
    "canaries": lambda call: call.ended - call.sent if call.is_canary and not call.error else None,
}


def p99(calls: Sequence[Call], measure: Callable[[Call], float | None], begin: float, end: float) -> float:
    """Return the median of the minutes' 99th percentiles: what else the machine does for a minute is no trend."""
    buckets: dict[int, list[float]] = {}
    for call in calls:
        if begin <= call.sent < end and (value := measure(call)) is not None:
            buckets.setdefault(int((call.sent - begin) // BUCKET_S), []).append(value)
    return statistics.median([quantile(bucket, 0.99) for bucket in buckets.values()]) if buckets else math.nan
