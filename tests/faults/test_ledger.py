"""Every request is counted once, under the reason for its end; Triton counts the same ones."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from faults.conftest import Case
from support.faults.nothing_lost import CANARIES, Ledger, Recorded
from support.faults.planted import Fault
from support.triton.burst import bursting
from support.triton.serving import Server, grpc_inputs, wait_for

pytestmark = pytest.mark.e2e

LIMIT_S = 180.0
LONG = 900
REFUSED: dict[str, dict[str, Any]] = {
    "TW-INPUT": {"temperature": -0.5},
    "TW-TOO-LARGE": {"stop": ["x"] * 100_000},
    "TW-UNSUPPORTED": {"best_of": 3},
}
NOT_FOR_A_FRONT_END: dict[str, dict[str, Any]] = {
    "misnamed": {"prompt": "Hello"},
    "of another type": {"text_input": 5},
    "of two elements": {"text_input": ["Hello", "Hello"]},
    "extra": {"text_input": "Hello", "more": 5},
}


def test_each_reason_is_counted_once(server: Server, recorded: Recorded, case: Case) -> None:
    before = Ledger.settled(server)
    prompt = CANARIES[0]
    with case() as canaries, bursting(server) as burst:
        canaries.finish()
        for tag, parameters in REFUSED.items():
            burst.send(prompt, 8, sampling_parameters=json.dumps(parameters))
            burst.finish()
            assert burst.errors.pop().startswith(f"[{tag}]")
        burst.send(prompt, 8, stop_token_ids=recorded[prompt][3:4])
        burst.send(prompt, 8)
        burst.send(Fault.NOT_FINITE.prompt(), 20)
        burst.finish()
        assert burst.errors.pop().startswith("[TW-NUMERIC]")
        with bursting(server) as gone:
            gone.send(prompt, LONG)
            gone.receive()
        expected = Counter(f"rejected {tag}" for tag in REFUSED)
        expected += Counter({"failed TW-NUMERIC": 1, "finished stop": 1, "finished cancelled": 1})
        expected["finished length"] = 1 + len(CANARIES)
        wait_for(lambda: Ledger.of(server).since(before).ended == expected, LIMIT_S, f"{expected}")
        assert Ledger.of(server).since(before).received == expected.total()


def test_tensors_that_triton_refuses_reach_no_front_end(server: Server, case: Case) -> None:
    with case() as canaries:
        canaries.finish()
        before = Ledger.settled(server)
        for name, tensors in NOT_FOR_A_FRONT_END.items():
            with bursting(server, num_clients=1) as burst:
                burst.clients[0].async_stream_infer("demo", grpc_inputs(**tensors))
                burst.num_sent += 1
                burst.finish()
                assert burst.errors, name
                assert "[TW-" not in burst.errors[0], name
        with bursting(server) as burst:
            burst.send(CANARIES[0], 4)
            burst.finish()
        wait_for(lambda: Ledger.of(server).since(before).received == 1, LIMIT_S, "the count of the last")
