"""What front ends are sent of an engine's steps."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from support.scheduler.scheduling import make_request
from tidewheel.batch import StepOutputs
from tidewheel.engine.front_ends import FrontEnds
from tidewheel.engine.messages import Deltas, from_engine_decoder
from tidewheel.request import FinishReason, Request


class Wire:
    """Socket that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Deltas] = []

    def send_multipart(self, parts: list[bytes], _flags: int) -> None:
        message = from_engine_decoder.decode(parts[1])
        assert isinstance(message, Deltas)
        self.sent.append(message)

    def tokens(self) -> list[int]:
        """Return all tokens in the order in which a front end reads them: of all messages at once at the worst."""
        columns = [token_id for one in self.sent for new in one.tokens for token_id in new.arrays()[1].tolist()]
        return columns + [token_id for one in self.sent for delta in one.deltas for token_id in delta.token_ids]


def deliver(front_ends: FrontEnds, request: Request, *token_ids: int) -> None:
    ended = [request] if request.finish_reason is not None else []
    outputs = StepOutputs([request] * len(token_ids), np.array(token_ids, np.int32), None, ended)
    front_ends.deliver(outputs)


def test_tokens_keep_their_order_where_only_some_steps_give_several() -> None:
    wire = Wire()
    front_ends = FrontEnds(cast(Any, wire))
    front_end = front_ends.admit(b"one", "one", 0.0)
    (request_id,) = front_ends.open(front_end, key=7, n=1)
    request = make_request(request_id)
    for token_ids in ((0,), (1,), (2, 3, 4), (5,), (6, 7), (8,)):
        deliver(front_ends, request, *token_ids)
        if token_ids == (5,):
            front_ends.flush()
    request.finish_reason = FinishReason.LENGTH
    front_ends.deliver(StepOutputs([request], np.array([9], np.int32), None, []))
    front_ends.flush()
    assert wire.tokens() == list(range(10))
    assert [len(one.tokens) for one in wire.sent] == [2, 0]  # single tokens go in columns as long as they can
    assert not front_end.request_ids
