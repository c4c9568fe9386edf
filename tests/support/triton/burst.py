"""Many streams at once, of greedy requests."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import tritonclient.grpc as grpcclient

from support.triton.serving import Server, grpc_inputs, token_ids

PROMPTS = ["The Python interpreter", "A database transaction", "To open a file", "Indexes are", "The server"]
ANSWER_LIMIT_S = 120.0
GREEDY: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}


class Burst:
    """Many requests over a few gRPC streams; answers sorted by request id."""

    def __init__(self, server: Server, num_clients: int = 4, model: str = "demo") -> None:
        self.model = model
        self.answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.clients = [grpcclient.InferenceServerClient(server.grpc) for _ in range(num_clients)]
        for client in self.clients:
            client.start_stream(callback=lambda result, error: self.answers.put((result, error)))
        self.tokens: dict[str, list[int]] = {}
        self.errors: list[str] = []
        self.num_sent = 0
        self.num_final = 0
        self.finals: Counter[str] = Counter()  # by request id

    def send(self, prompt: str | list[int], max_tokens: int, **tensors: Any) -> str:
        """Send a request for a greedy stream; `tensors` are more inputs of it. Return its id."""
        request_id = f"{self.num_sent}"
        client = self.clients[self.num_sent % len(self.clients)]
        prompts: dict[str, Any] = {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        values = {**prompts, **GREEDY, "stream": True, "return_token_ids": True, "max_tokens": max_tokens, **tensors}
        inputs = grpc_inputs(**values)
        client.async_stream_infer(self.model, inputs, request_id=request_id, enable_empty_final_response=True)
        self.tokens[request_id] = []
        self.num_sent += 1
        return request_id

    def receive(self) -> None:
        """One answer."""
        result, error = self.answers.get(timeout=ANSWER_LIMIT_S)
        if error is not None:
            self.errors.append(error.message())
            self.num_final += 1
            return
        response = result.get_response()
        if response.outputs:
            self.tokens[response.id] += token_ids([result])
        if response.parameters["triton_final_response"].bool_param:
            self.num_final += 1
            self.finals[response.id] += 1

    def receive_until_all_run(self) -> None:
        """Receive until each request has its first token or has ended."""
        while self.num_final < self.num_sent and not all(self.tokens.values()):
            self.receive()

    def finish(self) -> None:
        while self.num_final < self.num_sent:
            self.receive()

    def close(self, *, cancel: bool = False) -> None:
        """Close the streams, and cancel what still runs if asked to.

        Server 2.51 keeps a front end for ever if a stream is cancelled as its last response is sent.
        """
        still_runs = self.num_final < self.num_sent
        for client in self.clients:
            client.stop_stream(cancel_requests=cancel and still_runs)
            client.close()


@contextlib.contextmanager
def bursting(server: Server, num_clients: int = 4) -> Iterator[Burst]:
    """Cancel at the end what still runs."""
    burst = Burst(server, num_clients)
    try:
        yield burst
    finally:
        burst.close(cancel=True)


@contextlib.contextmanager
def steady_streams(server: Server, count: int, expected: dict[str, list[int]]) -> Iterator[Burst]:
    """Keep `count` streams running inside the block. At its end, each has ended once, with the expected tokens."""
    burst, is_over = Burst(server), threading.Event()
    prompts = list(expected)

    def send() -> None:
        burst.send(prompts[burst.num_sent % len(prompts)], len(next(iter(expected.values()))))

    def keep_on() -> None:
        while not is_over.is_set() and not burst.errors:
            before = burst.num_final
            burst.receive()
            for _ in range(burst.num_final - before):
                send()
        burst.finish()

    for _ in range(count):
        send()
    thread = threading.Thread(target=keep_on)
    thread.start()
    try:
        yield burst
    finally:
        is_over.set()
        thread.join()
        burst.close()
    assert burst.errors == []
    assert burst.finals == dict.fromkeys(burst.tokens, 1)
    wrong = [i for i in burst.tokens if burst.tokens[i] != expected[prompts[int(i) % len(prompts)]]]
    assert wrong == []
