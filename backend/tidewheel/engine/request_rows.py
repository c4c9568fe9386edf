"""Rows of unfinished requests for the server's operator: counts, times and names, no text."""

from __future__ import annotations

from collections.abc import Sequence

from tidewheel.engine.messages import RequestRow
from tidewheel.request import Progress, Request


def row_of(group: Sequence[Progress], client_id: str, now: float) -> RequestRow:
    """Return the row of a request with these unfinished sequences."""
    first = group[0].request
    return RequestRow(
        number=int(first.request_id),
        request_id=client_id,
        tenant=first.tenant,
        priority=int(first.priority),
        state=first.state.name.lower(),
        age_s=now - first.arrival_time,
        waited_s=(now if first.first_scheduled_time is None else first.first_scheduled_time) - first.arrival_time,
        first_token_s=_first_token_s([one.request for one in group]),
        num_sequences=len(group),
        num_prompt_tokens=first.num_prompt_tokens,
        num_output_tokens=sum(one.num_tokens - one.request.num_prompt_tokens for one in group),
        max_tokens=first.max_tokens * len(group),
        num_cached_tokens=first.num_cached_tokens,
        num_preemptions=sum(one.num_preemptions for one in group),
    )


def _first_token_s(requests: Sequence[Request]) -> float | None:
    times = [one.first_token_time for one in requests if one.first_token_time is not None]
    return min(times) - requests[0].arrival_time if times else None
