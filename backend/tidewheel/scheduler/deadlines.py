"""Deadlines: who is refused because it could not keep one, and who ends because it has passed."""

from __future__ import annotations

from tidewheel.errors import DeadlineExceeded
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.scheduler.queue_time import ServiceEstimate
from tidewheel.scheduler.state import State


def check_deadline(
    state: State, estimate: ServiceEstimate, request: Request, service_class: Priority, now: float
) -> None:
    """Raises `DeadlineExceeded` if the first token is not expected before the request's deadline."""
    if request.deadline is None:
        return
    left = request.deadline - now
    if left <= 0.0:
        raise DeadlineExceeded(
            f"the deadline passed {_ms(-left)} ms before the request arrived: give it more time (deadline_ms)"
        )
    num_ahead = num_tokens_ahead(state, service_class)
    expected = estimate.first_token_seconds(request.num_prompt_tokens, num_ahead)
    if expected > left:
        raise DeadlineExceeded(
            f"the deadline is in {_ms(left)} ms, and the first token is expected in {_ms(expected)} ms: "
            f"{num_ahead} tokens wait ahead, and the prompt has {request.num_prompt_tokens}"
        )


def num_tokens_ahead(state: State, service_class: Priority) -> int:
    """Prompt tokens that are sure to be served before a newcomer of the class. Where the order inside a class is not
    that of arrival, it may overtake its class; where tenants take turns, it may overtake everybody."""
    policy, waiting = state.policy, state.waiting
    if policy.by_tenant:
        return 0
    if not policy.by_class:
        return waiting.num_new_tokens
    if policy.by_arrival:
        return waiting.num_tokens_ahead(service_class)
    return waiting.num_tokens_ahead(Priority(service_class - 1)) if service_class > Priority.CRITICAL else 0


def expire(state: State, now: float) -> list[Request]:
    """Ends the requests whose deadline has passed."""
    expired = []
    for _, _, request in state.deadlines.pop_due(now):
        reason = FinishReason.DEADLINE
        if request.first_scheduled_time is None:
            reason = FinishReason.ERROR
            request.error = DeadlineExceeded(
                f"the deadline passed after {_ms(now - request.arrival_time)} ms in the waiting set: "
                f"{state.waiting.num_new} requests wait, {state.columns.num_running} run"
            )
        state.end(request, reason, now)
        state.counters.num_expired += 1
        expired.append(request)
    return expired


def _ms(seconds: float) -> int:
    return round(1e3 * seconds)
