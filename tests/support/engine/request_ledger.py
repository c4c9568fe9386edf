"""The law of every layer: an accepted request ends exactly once, gets nothing after its end, and leaves nothing."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import groupby

from support.engine.fake_runner import naive_output
from tidewheel.batch import StepOutputs
from tidewheel.request import FinishReason, Request
from tidewheel.stats import EngineStats


def check_all_over(num_ends: Mapping[Hashable, int], num_held: int) -> None:
    """Check that each accepted request has ended exactly once, and that nothing is held for any (blocks, places)."""
    assert {key: count for key, count in num_ends.items() if count != 1} == {}
    assert num_held == 0


class RequestLedger:
    """Requests that were accepted, the tokens that each got, and how each ended: as `naive_output` says."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.delivered: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}

    def accept(self, request: Request) -> None:
        assert request.request_id not in self.requests, "accepted twice"
        self.requests[request.request_id] = request
        self.delivered[request.request_id] = []

    def take(self, outputs: StepOutputs) -> None:
        """Note the tokens and the ends of a step."""
        assert len(outputs.requests) == len(outputs.token_ids)
        stays = [request.request_id for request, _ in groupby(outputs.requests)]
        assert len(set(stays)) == len(stays), "the tokens of a request are not adjacent"
        for request, token_id in zip(outputs.requests, outputs.token_ids, strict=True):
            assert request.request_id not in self.ended, "a token after the end"
            self.delivered[request.request_id].append(token_id)
        for request in outputs.finished:
            self.end(request)

    def end(self, request: Request) -> None:
        assert request.request_id not in self.ended, "ended twice"
        assert request.finish_reason is not None
        self.ended[request.request_id] = request.finish_reason
        output, reason = self.expected_output(request)
        delivered = self.delivered[request.request_id]
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert (delivered, request.finish_reason) == (output, reason)
        else:
            assert delivered == output[: len(delivered)]

    def expected_output(self, request: Request) -> tuple[list[int], FinishReason]:
        return naive_output(request)

    def check_all_over(self, stats: EngineStats) -> None:
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        num_ends = {request_id: int(request_id in self.ended) for request_id in self.requests}
        check_all_over(num_ends, stats.num_blocks - stats.num_free_blocks)
