from __future__ import annotations

import contextlib
import functools
import logging
import signal
import socket
import threading
from queue import LifoQueue
from typing import TypeVar

import msgspec
import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.engine.launcher import python_environment, python_executable
from tidewheel.errors import ConfigError, Draining, InternalError, InvalidRequest, from_wire
from tidewheel.frontend import prompt_process
from tidewheel.frontend.chat import Conversation
from tidewheel.frontend.control_tokens import Spans
from tidewheel.frontend.prompt_process import (
    Answer,
    DecodeJob,
    EncodeJob,
    GrammarTrial,
    Job,
    PromptLimits,
    PromptText,
    Refusal,
    RenderJob,
    Stage,
    TokenIds,
    TokenizeJob,
    TokenizerFolder,
)
from tidewheel.grammar import Grammar
from tidewheel_process.child import Child, describe_exit

logger = logging.getLogger(__name__)

T = TypeVar("T", PromptText, TokenIds)

MAX_KNOWN_GRAMMARS = 64
_ATTEMPTS = 2  # of a job whose process something else ended
# Jobs run beside each other, every thread takes address space, and a backtrace takes a second.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"
}  # fmt: skip
_answers = msgspec.msgpack.Decoder(Answer)


class PromptWorkers:
    """Encoder that gives each job to one of `count` processes, which are replaced when they end."""

    def __init__(self, folder: TokenizerFolder, count: int, limits: PromptLimits | None = None) -> None:
        self._folder = folder
        self._limits = limits or PromptLimits()
        self._is_closed = False
        self._lock = threading.Lock()
        self._workers: list[_Worker | None] = [_Worker(folder, self._limits, is_trial=True), *[None] * (count - 1)]
        # Single jobs go to the first process, which has read the vocabulary of grammars.
        self._idle: LifoQueue[int] = LifoQueue()
        for index in reversed(range(count)):
            self._idle.put(index)
        self.compilable = functools.lru_cache(MAX_KNOWN_GRAMMARS)(self._try)

    def wait_tried(self) -> None:
        """Start all processes. Raise `ConfigError` if the first one cannot serve the folder within the limits."""
        self._worker(0).wait_started()
        for index in range(1, len(self._workers)):
            self._worker(index)

    def render(self, conversation: Conversation) -> PromptText:
        return self._ask(RenderJob(conversation), PromptText)

    def encode(self, text: str, *, add_special_tokens: bool, plain: Spans = ()) -> Int32Array:
        answer = self._ask(EncodeJob(text, add_special_tokens, plain), TokenIds)
        return np.frombuffer(answer.token_ids, dtype="<i4").astype(np.int32, copy=False)

    def tokenize(
        self, text: str, *, add_special_tokens: bool, max_model_len: int, with_strings: bool, plain: Spans = ()
    ) -> str:
        job = TokenizeJob(text, add_special_tokens, max_model_len, with_strings, plain)
        return self._ask(job, PromptText).text

    def decode(self, token_ids: Int32Array) -> str:
        return self._ask(DecodeJob(token_ids.astype("<i4").tobytes()), PromptText).text

    def _try(self, grammar: Grammar) -> str:
        return self._ask(GrammarTrial(grammar), PromptText).text

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.end()

    def _ask(self, job: Job, kind: type[T]) -> T:
        index = self._idle.get()
        try:
            for _ in range(_ATTEMPTS):
                answer = self._worker(index).ask(job)
                if answer is not None:
                    break
                self._discard(index, job)
        except ConfigError as error:  # files that have changed
            raise InternalError(str(error)) from None
        finally:
            self._idle.put(index)
        if answer is None:
            raise InternalError("the process that makes token ids ended twice: the server's log may say why")
        if isinstance(answer, Refusal):
            raise from_wire(answer.tag, answer.message)
        assert isinstance(answer, kind)
        return answer

    def _worker(self, index: int) -> _Worker:
        with self._lock:
            if self._is_closed:
                raise Draining("the server is shutting down")
            worker = self._workers[index]
            if worker is None:
                worker = self._workers[index] = _Worker(self._folder, self._limits, is_trial=False)
        return worker

    def _discard(self, index: int, job: Job) -> None:
        """Forget an ended process. Raise `InvalidRequest` if its job overran a limit."""
        worker = self._workers[index]
        assert worker is not None
        returncode = worker.end()
        self._workers[index] = None
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
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = Child(command, stdin=theirs.fileno(), env=python_environment() | _ENVIRONMENT)
        self._socket = ours
        self._stream = ours.makefile("rwb")

    def wait_started(self) -> None:
        """Raise `ConfigError` if the folder cannot be served."""
        stage = "its files"
        while not self._is_started:
            answer = self._read()
            if isinstance(answer, Refusal):
                raise ConfigError(answer.message)
            if answer is None:
                limits = f"{self._limits.trial_s:.0f} s of CPU time and {self._limits.memory_mb} MiB of memory"
                raise ConfigError(
                    f"{self._folder.path}: {stage} could not be tried within {limits} ({describe_exit(self.end())}): "
                    "use files that you trust"
                )
            assert isinstance(answer, Stage)
            stage, self._is_started = answer.name, not answer.name

    def ask(self, job: Job) -> Answer | None:
        """Return None if the process has ended."""
        self.wait_started()
        try:
            prompt_process.write(self._stream, job)
        except (OSError, ValueError):  # ValueError: closed
            return None
        return self._read()

    def end(self) -> int:
        """End the process and return its exit code. Thread-safe."""
        self._child.kill()
        with contextlib.suppress(OSError):
            self._stream.close()
            self._socket.close()
        return self._child.returncode or 0

    def _read(self) -> Answer | None:
        try:
            data = prompt_process.read(self._stream)
        except (OSError, ValueError):
            return None
        return _answers.decode(data) if data else None
