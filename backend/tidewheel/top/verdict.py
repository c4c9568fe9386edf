"""A sentence that tells an overload from a slow model, and both from a failure."""

from __future__ import annotations

from tidewheel.errors import Busy
from tidewheel.top.server_view import ErrorLine, View
from tidewheel.top.shown import duration, number, percent

OVERLOAD_TAGS = frozenset({"TW-BUSY", "TW-KV-FULL", "TW-DEADLINE"})
GONE_TAG = "TW-CANCELLED"  # of a client that hung up
FULL_CACHE = 0.95
LEAST_RATE = 1e-6  # of a difference of rates
GOOD_SHARE = 0.9  # of answers in time
NUM_STEPS = 2  # that a request may wait while none queues: it joins the next one, behind those in flight


def verdict(view: View) -> str:
    """Return the first that holds, from "not ready" to "idle", as docs/top.md lists them."""
    if view.is_ready is False:
        return f"NOT READY: {view.reason or view.state}"
    if view.gateway_problem:
        return f"GATEWAY: {view.gateway_problem}"
    if failing := [one for one in view.errors if one.failed_rate and one.tag != GONE_TAG]:
        return f"FAILING: {', '.join(f'{one.tag} {number(one.failed_rate)}/s' for one in failing)}"
    limited = view.traffic.rate_limited_rate or 0.0
    if refused := [one for one in view.errors if _refused_for_others(one, limited)]:
        return f"OVERLOADED: refuses {_refusals(refused)}; {_queue(view)}"
    if _queues(view) and (view.cache.use or 0.0) >= FULL_CACHE:
        return f"KV CACHE FULL: {percent(view.cache.use)} in use; {_queue(view)}"
    if _queues(view):
        return f"QUEUEING: {_queue(view)}"
    if limited:
        return f"OVER ITS RATE: {_limited_tenants(view)}; the server has room: {_unhindered(view)}"
    return _unhindered(view)


def _refused_for_others(line: ErrorLine, limited: float) -> bool:
    """Return whether requests are refused because others wait or run, and not by the rates of their own tenant."""
    rate = line.refused_rate or 0.0
    if line.tag == Busy.tag:
        rate -= limited
    return line.tag in OVERLOAD_TAGS and rate > LEAST_RATE


def _limited_tenants(view: View) -> str:
    tenants = [one for one in view.tenants if one.rejected_rate]
    return ", ".join(f"{one.name or 'no tenant'} has {number(one.rejected_rate)}/s refused" for one in tenants)


def _unhindered(view: View) -> str:
    in_time = view.traffic.in_time
    if in_time is not None and in_time < GOOD_SHARE:
        return f"SLOW: {percent(in_time)} of the answers are in time, and no queue makes them late; {_pace(view)}"
    if view.traffic.running:
        return f"SERVING: no queue; {_pace(view)}"
    return "IDLE: nothing runs"


def _queues(view: View) -> bool:
    """Return whether requests wait for longer than until a step ends."""
    if not view.traffic.waiting:
        return False
    waits = [one.oldest_wait_s for one in view.classes if one.oldest_wait_s is not None]
    return not waits or max(waits) > NUM_STEPS * (view.steps.seconds_per_step or 0.0)


def _refusals(lines: list[ErrorLine]) -> str:
    return ", ".join(f"{one.tag} {number(one.refused_rate)}/s" for one in lines)


def _queue(view: View) -> str:
    waits = [one.oldest_wait_s for one in view.classes if one.oldest_wait_s]
    since = f", the oldest for {duration(max(waits))}" if waits else ""
    return f"{view.traffic.waiting or 0:.0f} wait{since}, {view.traffic.running or 0:.0f} run; {_pace(view)}"


def _pace(view: View) -> str:
    return f"a step takes {duration(view.steps.seconds_per_step)}"
