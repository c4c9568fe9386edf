from __future__ import annotations

import json
import socket
import threading

import pytest

from quantized.completion_streams import LlamaDialect, TritonDialect, run_streams
from quantized.llama_server import LlamaSettings, best_by_streams, candidates


def answer_once(listener: socket.socket, chunks: list[bytes]) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        for chunk in chunks:
            connection.sendall(chunk)


def streamed(dialect: LlamaDialect | TritonDialect, events: list[dict[str, object]], num_tokens: int) -> object:
    """Return the run of one stream whose events each come in two parts."""
    parts = [
        part
        for event in events
        for data in [f"data: {json.dumps(event)}\n\n".encode()]
        for part in (data[:9], data[9:])
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=answer_once, args=(listener, [b"HTTP/1.1 200 OK\r\n\r\n", *parts]))
        server.start()
        try:
            return run_streams(f"127.0.0.1:{listener.getsockname()[1]}", dialect, ["a"], num_tokens)
        finally:
            server.join()


def test_tokens_are_counted_in_the_events_of_both_servers() -> None:
    llama = [{"tokens": [5], "stop": False}, {"tokens": [6], "stop": False}]
    ours = [{"num_output_tokens": 1, "num_input_tokens": 7}, {"num_output_tokens": 3, "num_input_tokens": 7}]
    for dialect, events, count in ((LlamaDialect(), llama, 2), (TritonDialect("m"), ours, 4)):
        run = streamed(dialect, events, count)
        assert (run.num_tokens, len(run.first_s), len(run.gaps_s)) == (count, 1, 1)


def test_an_error_and_a_stream_that_ends_early_are_not_taken_for_tokens() -> None:
    with pytest.raises(RuntimeError, match="no slot"):
        streamed(LlamaDialect(), [{"error": "no slot"}], 1)
    with pytest.raises(RuntimeError, match="lacks 1 token"):
        streamed(LlamaDialect(), [{"tokens": [5], "stop": False}], 2)


def test_llama_gets_its_best_settings_for_each_number_of_streams() -> None:
    first, one_slot = LlamaSettings(2, 16), LlamaSettings(2, 1)
    assert {first, one_slot} <= set(candidates(2, 16))
    found = {first: {1: 80.0, 16: 190.0}, one_slot: {1: 90.0}}
    assert best_by_streams(found, (1, 16)) == {1: one_slot, 16: first}
