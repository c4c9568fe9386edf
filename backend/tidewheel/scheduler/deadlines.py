from __future__ import annotations

from tidewheel.errors import DeadlineExceeded
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.scheduler.state import State
from tidewheel.scheduler.step_time import ServiceEstimate


def check_deadline(
    state: State, estimate: ServiceEstimate, request: Request, service_class: Priority, now: float
) -> None:
    """Raise `DeadlineExceeded` if the deadline has passed or precedes the expected first token.

    An idle engine tries every request with time left.
    """
    if request.deadline is None:
        return
    left = request.deadline - now
    if left <= 0.0:
        raise DeadlineExceeded(
            f"the deadline passed {_ms(-left)} ms before the request arrived: give it more time (deadline_ms)"
        )
    if state.is_idle:
        return
    num_ahead = num_tokens_ahead(state, service_class)
    has_free_rows = state.num_waiting < min(state.columns.num_free_rows, state.config.max_num_seqs)
    queue_seconds = estimate.queue_seconds(num_ahead, now, has_free_rows=has_free_rows)
    if queue_seconds + estimate.prefill_seconds(request.num_prompt_tokens, now) <= left:
        return
    num_tokens = request.num_prompt_tokens - state.find_hit(request).num_tokens
    expected = queue_seconds + estimate.prefill_seconds(num_tokens, now)
    if expected > left:
        raise DeadlineExceeded(
            f"the deadline is in {_ms(left)} ms, and the first token is expected in {_ms(expected)} ms: "
            f"{num_ahead} tokens wait ahead, and {num_tokens} tokens of the prompt are to be computed"
        )


def num_tokens_ahead(state: State, service_class: Priority) -> int:
    """Count prompt tokens certain to be served before a newcomer of the class.

    Its own class counts only if served by arrival. Nothing is certain if tenants take turns.
    """
    policy, waiting = state.policy, state.waiting
    if policy.by_tenant:
        return 0
    if not policy.by_class:
        return waiting.num_new_tokens
    return waiting.num_tokens_ahead(service_class if policy.by_arrival else service_class - 1)


def expire(state: State, now: float) -> list[Request]:
    expired = []
    for _, _, request in state.deadlines.pop_due(now):
        reason = FinishReason.DEADLINE
        if request.first_scheduled_time is None:
            reason = FinishReason.ERROR
            request.error = DeadlineExceeded(
                f"the deadline passed after {_ms(now - request.arrival_time)} ms in the waiting set: "
                f"{state.num_waiting} requests wait, {state.columns.num_running} run"
            )
        state.end(request, reason, now)
        state.stats.num_expired += 1
        expired.append(request)
    return expired


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)
