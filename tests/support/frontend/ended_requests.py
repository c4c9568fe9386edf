from __future__ import annotations

from typing import Any

from tidewheel.frontend.ended_requests import EndedRequest

MS = 1_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def ended(request_id: str = "r", **fields: Any) -> EndedRequest:
    """Make an ended request: 10 ms of queue, 20 of prefill, 30 of decode and 40 until its response was sent."""
    values: dict[str, Any] = {
        "arrival_ns": 1000 * MS, "scheduled_ns": 1010 * MS, "first_token_ns": 1030 * MS, "last_token_ns": 1060 * MS,
        "end_ns": 1100 * MS,
        "stream": True, "priority": "HIGH", "tenant": "acme", "finish_reason": "stop", "prompt_tokens": 7,
        "cached_tokens": 4, "output_tokens": 9, "responses": 3, "session": True,
        "traceparent": f"00-{TRACE}-{PARENT}-01",
    }  # fmt: skip
    return EndedRequest(request_id, **values | fields)


def refused(request_id: str, arrival_ns: int, end_ns: int, **fields: Any) -> EndedRequest:
    """Make a request that ended with an error and never began."""
    moments = {"arrival_ns": arrival_ns, "scheduled_ns": 0, "first_token_ns": 0, "last_token_ns": 0, "end_ns": end_ns}
    return ended(request_id, **moments, finish_reason=None, tag="TW-KV-FULL", **fields)
