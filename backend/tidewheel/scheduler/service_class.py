"""Changes of service class.

Ageing lifts waiting requests and prompts under way, up to HIGH. In classes not served by arrival, a request that ages
again is *overdue*: it precedes its class. A request drops a class once over its tenant's block quota, and at its soft
deadline.
"""

from __future__ import annotations

from tidewheel.request import Priority, Request
from tidewheel.scheduler.state import SchedulerState


def reclassify_due(state: SchedulerState, now: float) -> None:
    for time, _, request in state.timers.lifts.pop_due(now):
        if request.row >= 0 and not state.columns.is_prefilling(request.row):
            request.lift_time = None
        elif request.service_class <= Priority.HIGH:
            state.reclassify(request, request.service_class, since=None)
        else:
            state.reclassify(request, request.service_class.lifted(), since=time)
            state.stats.num_aged += 1
    for _, _, request in state.timers.soft_deadlines.pop_due(now):
        follows = request.leader is not None and request in request.leader.followers
        if request.service_class < Priority.LOW and not follows:
            state.reclassify(request, request.service_class.dropped(), since=now)
            state.stats.num_downgraded_deadline += 1


def is_over_quota(state: SchedulerState, request: Request) -> bool:
    """Return whether the request takes its tenant over quota. Shared blocks count for each holder."""
    limit = state.config.limits_of(request.tenant).max_blocks
    if limit is None or request.was_over_quota:
        return False
    kv = state.kv
    num_blocks = state.columns.num_slots_of(request.tenant) // kv.block_size + kv.sessions.table.num_blocks(
        request.tenant
    )
    return num_blocks + kv.num_blocks_for(request.num_tokens) > limit


def drop_over_quota(state: SchedulerState, request: Request, now: float) -> bool:
    if not is_over_quota(state, request):
        return False
    for member in (request, *request.followers):
        member.was_over_quota = True
    if request.service_class is Priority.LOW:
        return False
    state.stats.num_downgraded_quota += 1
    state.reclassify(request, request.service_class.dropped(), since=now)
    return True
