from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
from queue import LifoQueue

import msgspec
import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.engine.launcher import python_environment, python_executable
from tidewheel.errors import ConfigError, Draining, InternalError, InvalidRequest
from tidewheel.frontend import prompt_process
from tidewheel.frontend.control_tokens import Spans
from tidewheel.frontend.prompt_process import (
    Answer,
    EncodeJob,
    GrammarTrial,
    Job,
    PromptLimits,
    RenderJob,
    TokenizerFolder,
)
from tidewheel_process.child import Child, describe_exit

logger = logging.getLogger(__name__)

_ATTEMPTS = 2  # of a job whose process something else ended
# Jobs run beside each other, every thread takes address space, and a backtrace takes a second.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"
}  # fmt: skip
_answers = msgspec.msgpack.Decoder(Answer)


class PromptWorkers:
    """Encoder that gives each job to one of `count` processes, which are replaced when they end. Thread-safe."""

    def __init__(self, folder: TokenizerFolder, count: int, limits: PromptLimits | None = None) -> None:
        self._folder = folder
        self._limits = limits or PromptLimits()
        self._is_closed = False
        self._lock = threading.Lock()
        self._count = count
        self._workers = {0: _Worker(folder, self._limits, is_trial=True)}
        # A lone job goes to the first process, which has read the grammars' vocabulary.
        self._idle: LifoQueue[int] = LifoQueue()
        for index in reversed(range(count)):
            self._idle.put(index)

    def wait_tried(self) -> None:
        """Start all processes. Raise `ConfigError` if the model's tokenizer or template exceeds the limits."""
        self._worker(0).wait_started()
        for index in range(1, self._count):
            self._worker(index)

    def encode(self, text: str, *, add_special_tokens: bool, plain: Spans = ()) -> Int32Array:
        """Return token ids [num_tokens] int32. Special tokens in `plain` spans are text. Raise as `run` does."""
        found = self.run(EncodeJob(text, add_special_tokens, plain))
        return np.frombuffer(found.token_ids, dtype="<i4").astype(np.int32, copy=False)

    def run(self, job: Job) -> Answer:
        """Return a job's answer. Raise its error, `InvalidRequest` beyond limits, `InternalError` or `Draining`."""
        index = self._idle.get()
        try:
            for _ in range(_ATTEMPTS):
                answer = self._worker(index).ask(job)
                if answer is None:
                    self._discard(index, job)
                elif answer.error is not None:
                    raise answer.error.to_error()
                else:
                    return answer
        except ConfigError as error:  # files that have changed
            raise InternalError(str(error)) from None
        finally:
            self._idle.put(index)
        raise InternalError("the process that makes token ids ended twice: the server's log may say why")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.end()

    def _worker(self, index: int) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise Draining("the server is shutting down")
            if index not in self._workers:
                self._workers[index] = _Worker(self._folder, self._limits, is_trial=False)
            return self._workers[index]

    def _discard(self, index: int, job: Job) -> None:
        returncode = self._workers.pop(index).end()
        if self._is_closed:
            raise Draining("the server is shutting down")
        logger.warning("a process that makes token ids ended (%s) and is replaced", describe_exit(returncode))
        if isinstance(job, GrammarTrial) and returncode in (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT):
            raise InvalidRequest(
                f"{job.grammar.name} could not be compiled within {self._limits.of_job(job):.0f} s of CPU time and "
                "the limits of memory and depth: make it simpler"
            )
        if returncode == -signal.SIGPROF:
            what = "chat template did not end" if isinstance(job, RenderJob) else "prompt could not be tokenised"
            raise InvalidRequest(f"the {what} within {self._limits.of_job(job):.0f} s of CPU time: change the prompt")


class _Worker:
    def __init__(self, folder: TokenizerFolder, limits: PromptLimits, *, is_trial: bool) -> None:
        command = [python_executable(), "-P", "-m", prompt_process.__name__, *map(str, (*folder, *limits))]
        self._folder = folder
        self._limits = limits
        self._is_started = False
        command += ["--trial"] if is_trial else []
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._child = Child(command, stdin=theirs.fileno(), env=python_environment() | _ENVIRONMENT)

    def wait_started(self) -> None:
        work = "its files"
        while not self._is_started:
            answer = self._read()
            if answer is None:
                limits = f"{self._limits.trial_s:.0f} s of CPU time and {self._limits.memory_mb} MiB of memory"
                raise ConfigError(
                    f"{self._folder.path}: {work} could not be tried within {limits} ({describe_exit(self.end())}): "
                    "use files that you trust"
                )
            if answer.error is not None:
                raise ConfigError(answer.error.message)
            work, self._is_started = answer.text, not answer.text

    def ask(self, job: Job) -> Answer | None:
        """Return the answer to a job; None if the process has ended."""
        self.wait_started()
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(job))
        except OSError:
            return None
        return self._read()

    def end(self) -> int:
        """End the process and return its exit code. Thread-safe."""
        self._child.kill()
        return self._child.returncode or 0

    def _read(self) -> Answer | None:
        with contextlib.suppress(OSError, EOFError):
            return _answers.decode(self._connection.recv_bytes())
        return None
