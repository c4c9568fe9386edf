from __future__ import annotations

from typing import Any

from tidewheel.frontend.ended_requests import EndedRequest, Stages

MS = 1_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def ended(request_id: str = "r", **fields: Any) -> EndedRequest:
    """Make an ended request: 10 ms of queue, 20 of prefill, 30 of decode and 40 until its response was sent."""
    values: dict[str, Any] = {
        "stages": Stages(1000 * MS, 1010 * MS, 1030 * MS, 1060 * MS, 1100 * MS),
        "stream": True, "priority": "HIGH", "tenant": "acme", "finish_reason": "stop", "prompt_tokens": 7,
        "cached_tokens": 4, "output_tokens": 9, "responses": 3, "session": True,
        "traceparent": f"00-{TRACE}-{PARENT}-01",
    }  # fmt: skip
    return EndedRequest(request_id, **values | fields)
