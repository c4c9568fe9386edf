"""Requests of the engines of this machine: their list, and the cancel of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from tidewheel.engine.folder import label_of, model_label
from tidewheel.engine.messages import MAX_LISTED, RequestRow
from tidewheel.engine.operating import cancel_request, list_requests
from tidewheel.request import Priority
from tidewheel.server.endpoints import is_loopback
from tidewheel.server.own_servers import current_engines_of
from tidewheel.top.server_view import RequestLine

ANSWER_S = 1.0
ELSEWHERE = "requests are listed on the server's own machine alone"
NOT_OURS = "no engine of this user is here: requests are listed for the user who runs the server"
TWIN = "requests are listed under the model that has the engine"
SILENT = "an engine does not answer: its requests are not listed"


class Listing(NamedTuple):
    requests: list[RequestLine] | None  # None: the note says why
    num_sequences: int = 0
    note: str = ""


def list_here(metrics_url: str, model: str) -> Listing:
    """Return the oldest requests of each engine behind the metrics."""
    address = urlsplit(metrics_url)
    if not is_loopback(address.hostname or ""):
        return Listing(None, note=ELSEWHERE)
    engines = current_engines_of(address.port or 80)
    own = [link for link in engines if not model or label_of(link) == model_label(model)]
    if engines and not own:
        return Listing(None, note=TWIN)
    return list_engines(own)


def list_engines(links: Sequence[Path]) -> Listing:
    """`links` lead to the engines that serve."""
    if not links:
        return Listing(None, note=NOT_OURS)
    answers = [(link.resolve(), list_requests(link, MAX_LISTED, ANSWER_S)) for link in links]
    lines = [_line(str(folder), one.pid, row) for folder, one in answers if one is not None for row in one.rows]
    total = sum(one.num_sequences for _, one in answers if one is not None)
    is_whole = all(one is not None for _, one in answers)
    return Listing(lines if lines or is_whole else None, total, "" if is_whole else SILENT)


def cancel(request: RequestLine) -> str:
    """Cancel a request, and return what came of it."""
    name = request.request_id or f"number {request.number}"
    was_there = cancel_request(Path(request.engine), request.engine_pid, request.number, ANSWER_S)
    if was_there is None:
        return f"the engine does not answer: request {name} was not cancelled"
    return f"request {name} was cancelled" if was_there else f"request {name} had ended before"


def _line(engine: str, pid: int, row: RequestRow) -> RequestLine:
    since_first = 0.0 if row.first_token_s is None else row.age_s - row.first_token_s
    return RequestLine(
        engine=engine,
        engine_pid=pid,
        number=row.number,
        request_id=row.request_id,
        priority=Priority(row.priority).name.lower(),
        tenant=row.tenant,
        state=row.state,
        age_s=row.age_s,
        waited_s=row.waited_s,
        first_token_s=row.first_token_s,
        tokens_rate=(row.num_output_tokens - 1) / since_first if row.num_output_tokens > 1 and since_first else None,
        num_prompt_tokens=row.num_prompt_tokens,
        num_output_tokens=row.num_output_tokens,
        max_tokens=row.max_tokens,
        num_cached_tokens=row.num_cached_tokens,
        num_preemptions=row.num_preemptions,
    )
