"""Requests that are sent again keep their class, and have the time that their deadline leaves."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import grpc
import pytest

from support.gateway.running_gateway import gateway_to, say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, Refused, running
from tidewheel.gateway.bodies import UpstreamRequest
from tidewheel.gateway.upstreams import Attempt, ProxyAttempt
from tidewheel_client.errors import DeadlineExceeded


def request(deadline_ms: object, age_s: float) -> UpstreamRequest:
    params = {"priority": 2, "deadline_ms": deadline_ms}
    begun = time.monotonic() - age_s
    return UpstreamRequest(model="demo", prompts=[{"text_input": "a"}], params=params, begun=begun)


def sent(request: UpstreamRequest, num_retries: int) -> dict[str, Any]:
    """Return the body by HTTP."""
    attempt = ProxyAttempt(request)
    for _ in range(num_retries):
        attempt.encode(attempt.request.params_left())
    return dict(json.loads(attempt.message))


def test_a_deadline_counts_from_the_first_try() -> None:
    late = request(60_000, age_s=20)
    assert sent(late, 0)["deadline_ms"] == 60_000
    again = sent(late, 1)
    assert 30_000 < again["deadline_ms"] <= 40_000
    assert again["priority"] == 2
    with pytest.raises(DeadlineExceeded, match="deadline_ms is 1000"):
        sent(request(1000, age_s=2), 1)


@pytest.mark.parametrize("deadline_ms", [None, "soon", "-1", "nan", True, -1, float("nan"), [5], {}])
def test_a_deadline_that_the_backend_refuses_is_sent_as_it_is(deadline_ms: object) -> None:
    late = request(deadline_ms, age_s=20)
    assert late.due() == math.inf
    assert sent(late, 1) == sent(late, 0)


def test_both_kinds_of_requests_carry_it() -> None:
    attempt = Attempt(request(60_000, age_s=20))
    attempt.encode(attempt.request.params_left())
    assert 30_000_000 < attempt.message.parameters["timeout"].int64_param <= 40_000_000


def test_what_a_server_has_refused_too_late_is_not_sent_again() -> None:
    def refuse_late(asked: Asked) -> Answer:
        time.sleep(0.05)  # longer than the deadline, however fast the machine is
        raise Refused(grpc.StatusCode.UNAVAILABLE, "[TW-ENGINE-DEAD] the engine died")
        yield

    with running(FakeTriton(answer=refuse_late)) as one, running(FakeTriton(answer=say)) as other:
        with gateway_to(one.port, other.port) as gateway:
            answers = [gateway.complete(deadline_ms=40) for _ in range(2)]
        assert sorted(answer.status_code for answer in answers) in ([200, 504], [504, 504])
        assert len(one.asked) + len(other.asked) == 2
