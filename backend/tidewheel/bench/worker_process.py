import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

END_S = 10.0
_CHUNK = 1 << 16  # bytes


class WorkerFailed(Exception):
    pass


class WorkerProcess:
    """Worker process that exchanges JSON lines over pipes; one thread may send while another receives.

    Ctrl-C does not reach it; `stop` also ends its children.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start `command`, with standard error written to `log`. Raise `WorkerFailed` if it cannot be run."""
        self._name = name
        self._log = log
        self._received = b""
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(  # noqa: S603 - the caller's program
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                    env={**os.environ, **(environment or {})},
                )
        except OSError as error:
            raise WorkerFailed(f"{command[0]} cannot be run: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def send(self, message: object) -> None:
        """Write a message as a line of JSON. Raise `WorkerFailed` if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # broken, or closed by `stop`
            raise self._ended() from None

    def receive(self, limit_s: float | None = None) -> Any:
        """Return the next JSON answer. Raise `WorkerFailed` after `limit_s`, process end or `{"error": …}`."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._received:
            chunk = self._read(None if end is None else max(0.0, end - time.monotonic()))
            if chunk is None:
                raise WorkerFailed(f"{self._name} gave no answer within {limit_s or 0:g} s: see {self._log}")
            if not chunk:
                raise self._ended()
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise WorkerFailed(f"{self._name}: {answer['error']} (see {self._log})")
        return answer

    def stop(self, limit_s: float = END_S) -> None:
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self, limit_s: float | None) -> bytes | None:
        assert self._process.stdout is not None
        try:
            ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
            return os.read(self._process.stdout.fileno(), _CHUNK) if ready else None
        except (OSError, ValueError):  # closed by `stop`
            return b""

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ended(self) -> WorkerFailed:
        return WorkerFailed(f"{self._name} has ended: see {self._log}")
