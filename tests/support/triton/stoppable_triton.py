"""A Triton without models in a process of its own, which a test can stop and continue.

python -m support.triton.stoppable_triton      prints its port, and then the id of each request that was cancelled
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.gateway.running_gateway import say
from support.triton.grpc_triton import Answer, Asked, FakeTriton, response, running

TESTS = Path(__file__).parents[2]


@dataclass
class StoppableTriton:
    process: subprocess.Popen[str]
    port: int

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def next_line(self) -> str:
        """Wait for the next report: `asked ID` or `cancelled ID`."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def stoppable_triton() -> Iterator[StoppableTriton]:
    command = [sys.executable, "-m", "support.triton.stoppable_triton"]
    with subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield StoppableTriton(process, int(process.stdout.readline()))
        finally:
            process.kill()


class _Reporting(FakeTriton):
    """Answers a prompt of one word at once; `wait` never; `begin` with one token."""

    def ModelStreamInfer(self, requests: Any, context: Any) -> Answer:
        cancelled = threading.Event()
        context.add_callback(cancelled.set)
        for message in requests:
            asked = Asked(message, {})
            prompt = asked.inputs["text_input"]
            print(f"asked {message.id}\n", end="", flush=True)  # in one write: threads print at once
            if prompt == "begin":
                yield response(message, text_output="a", finish_reason="None")
            if prompt in ("begin", "wait"):
                cancelled.wait()
                print(f"cancelled {message.id}\n", end="", flush=True)
                return
            yield from say(asked)


if __name__ == "__main__":
    with running(_Reporting(models=("demo",))) as fake:
        print(fake.port, flush=True)
        threading.Event().wait()
