"""Processes that turn prompts into token ids and try grammars. Jobs and answers are messages on a socket.

Some texts take a template or tokenizer hours or all memory, and a grammar may exhaust the stack. The kernel ends a
process when a job overruns its limits.
"""

import contextlib
import logging
import multiprocessing
import resource
import signal
import sys
import threading
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue
from typing import NamedTuple

import msgspec
import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.confidential import protect_texts
from tidewheel.engine.launcher import python_environment, python_executable
from tidewheel.engine.messages import ErrorInfo
from tidewheel.errors import ConfigError, Draining, InternalError, InvalidRequest, TidewheelError
from tidewheel.frontend.chat import ChatTemplate, Conversation
from tidewheel.frontend.coercion import check_size, to_text
from tidewheel.frontend.control_tokens import ControlTokens, Spans
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.frontend.tool_grammar import ToolGrammars
from tidewheel.grammar import Grammar
from tidewheel.runner.grammar_compiler import TRIAL_STACK_BYTES, GrammarCompiler, to_source
from tidewheel_process.child import Child, describe_exit

logger = logging.getLogger(__name__)

_ATTEMPTS = 2  # of a job whose process something else ended
# Jobs run beside each other, every thread takes address space, and a backtrace takes a second.
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"
}  # fmt: skip
_CPU_STEP = 512 << 10  # bytes


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class RenderJob(_Message, frozen=True):
    conversation: Conversation


class EncodeJob(_Message, frozen=True):
    text: str
    add_special_tokens: bool
    plain: Spans = ()  # make no special token


class TokenizeJob(_Message, frozen=True):
    """Job of vLLM's call `tokenize`. The answer's text is the call's JSON."""

    prompt: EncodeJob
    max_model_len: int
    with_strings: bool


class DecodeJob(_Message, frozen=True):
    token_ids: bytes  # little-endian int32


class GrammarJob(_Message, frozen=True):
    grammar: Grammar


class StartJob(_Message, frozen=True):
    """First job of a process: its folder, and the vocabulary of grammars."""


Job = RenderJob | EncodeJob | TokenizeJob | DecodeJob | GrammarJob | StartJob


class Answer(msgspec.Struct, frozen=True, array_like=True):
    text: str = ""
    plain: Spans = ()  # must make no special token
    token_ids: bytes = b""  # little-endian int32
    error: ErrorInfo | None = None
    grammar: Grammar | None = None  # of the answer to rendered messages


class TokenizerFolder(NamedTuple):
    """Folder of a tokenizer, and limits of a process that works for it: address space, and CPU seconds."""

    path: Path
    vocab_size: int
    max_prompt_bytes: int
    memory_mb: int = 3072
    start_s: float = 20.0
    job_s: float = 5.0  # and as much again per `_CPU_STEP` of the job
    grammar_s: float = 1.0

    def limit_of(self, job: Job) -> float:
        if isinstance(job, GrammarJob | StartJob):
            return self.grammar_s if isinstance(job, GrammarJob) else self.start_s
        return self.job_s * (1 + len(msgspec.msgpack.encode(job)) / _CPU_STEP)


class PromptWorkers:
    """Encoder in `count` processes, which are replaced when they end. Thread-safe."""

    def __init__(self, folder: TokenizerFolder, count: int) -> None:
        self._folder = folder
        self._is_closed = False
        self._lock = threading.Lock()
        self._workers = [_Worker(folder) for _ in range(count)]
        # A lone job goes to the first process, which has read the grammars' vocabulary.
        self._idle: LifoQueue[int] = LifoQueue()
        for index in reversed(range(count)):
            self._idle.put(index)

    def wait_started(self) -> None:
        """Raise `ConfigError` if the folder cannot be read within the limits."""
        worker, folder = self._workers[0], self._folder
        answer = worker.ask(StartJob())
        if answer is None:
            limits = f"{folder.start_s:.0f} s of CPU time and {folder.memory_mb} MiB of memory"
            raise ConfigError(
                f"{folder.path}: its tokenizer and template could not be read within {limits} "
                f"({describe_exit(worker.end())}): use files that you trust"
            )
        if answer.error is not None:
            raise ConfigError(answer.error.message)

    def encode(self, text: str, *, add_special_tokens: bool, plain: Spans = ()) -> Int32Array:
        """Return token ids [num_tokens] int32. `plain` spans make no special tokens. Raise as `run` does."""
        found = self.run(EncodeJob(text, add_special_tokens, plain))
        return np.frombuffer(found.token_ids, dtype="<i4").astype(np.int32, copy=False)

    def run(self, job: Job) -> Answer:
        """Return a job's answer. Raise its error, `InvalidRequest` beyond limits, `InternalError` or `Draining`."""
        index = self._idle.get()
        try:
            for _ in range(_ATTEMPTS):
                answer = self._workers[index].ask(job)
                if answer is None:
                    self._replace(index, job)
                elif answer.error is not None:
                    raise answer.error.to_error()
                else:
                    return answer
        finally:
            self._idle.put(index)
        raise InternalError("the process that makes token ids ended twice: the server's log may say why")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.end()

    def _replace(self, index: int, job: Job) -> None:
        with self._lock:
            returncode = self._workers[index].end()
            if self._is_closed:
                raise Draining("the server is shutting down")
            self._workers[index] = _Worker(self._folder)
        logger.warning("a process that makes token ids ended (%s) and is replaced", describe_exit(returncode))
        limit = f"{self._folder.limit_of(job):.0f} s of CPU time"
        if isinstance(job, GrammarJob) and returncode in (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT):
            raise InvalidRequest(
                f"{job.grammar.name} could not be compiled within {limit} and the limits of memory and depth: "
                "make it simpler"
            )
        if returncode == -signal.SIGPROF:
            what = "chat template did not end" if isinstance(job, RenderJob) else "prompt could not be tokenised"
            raise InvalidRequest(f"the {what} within {limit}: change the prompt")


class _Worker:
    def __init__(self, folder: TokenizerFolder) -> None:
        command = [python_executable(), "-P", "-m", __name__, *map(str, folder)]
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._child = Child(command, stdin=theirs.fileno(), env=python_environment() | _ENVIRONMENT)

    def ask(self, job: Job) -> Answer | None:
        """Return the answer; None if the process has ended."""
        with contextlib.suppress(OSError, EOFError):
            self._connection.send_bytes(msgspec.msgpack.encode(job))
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Answer)
        return None

    def end(self) -> int:
        """End the process and return its exit code. Thread-safe."""
        self._child.kill()
        return self._child.returncode or 0


class JobRunner:
    """Tokenizer, chat template and grammar compiler. Methods raise `InvalidRequest` or `Unsupported`."""

    def __init__(self, folder: TokenizerFolder) -> None:
        """Raise `ConfigError`."""
        self.tokenizer = Tokenizer.load(folder.path, vocab_size=folder.vocab_size)
        self.template = ChatTemplate.load(folder.path, self.tokenizer.named_tokens)
        self._controls = ControlTokens(self.tokenizer)
        self._folder = folder
        self._compiler = GrammarCompiler(folder.path, folder.vocab_size)

    def run(self, job: Job) -> Answer:
        match job:
            case RenderJob(conversation):
                return self._render(conversation)
            case EncodeJob():
                return Answer(token_ids=self._encode(job).astype("<i4").tobytes())
            case TokenizeJob():
                return Answer(self._tokenize(job))
            case DecodeJob(token_ids):
                ids = np.frombuffer(token_ids, dtype="<i4").tolist()
                return Answer(self.tokenizer.decode(ids, skip_special_tokens=False))
            case GrammarJob(grammar):
                source = to_source(grammar)
                self._compiler.compile(source, grammar.name, stack_bytes=TRIAL_STACK_BYTES)
                return Answer(source)
            case StartJob():
                self._compiler.prepare()
                return Answer()

    @cached_property
    def _tool_grammars(self) -> ToolGrammars:
        added = self.tokenizer.backend.get_added_tokens_decoder()
        tokens = self._compiler.by_id({token.content: token_id for token_id, token in added.items()})
        plain = {token.content for token in added.values() if not token.special}
        return ToolGrammars("" if self.template is None else self.template.source, tokens, plain & tokens.keys())

    def prepare(self, job: Job) -> None:
        """Make what such jobs share, before the job's limit begins."""
        match job:
            case RenderJob(conversation) if conversation.calls is not None:
                _ = self._tool_grammars
            case GrammarJob():
                self._compiler.prepare()
            case EncodeJob(plain=plain) | TokenizeJob(EncodeJob(plain=plain)) if plain:
                _ = self._controls.renamed

    def _render(self, conversation: Conversation) -> Answer:
        if self.template is None:
            raise InvalidRequest("messages is set, and the model has no chat template: send text_input")
        text = to_text("messages", self.template.render(conversation))
        size, limit = len(text.encode("utf-8")), self._folder.max_prompt_bytes
        check_size("messages, as the chat template writes them,", size, limit, "max_prompt_bytes")
        rules, tools = conversation.calls, conversation.tools or []
        grammar = None if rules is None else self._tool_grammars.grammar(rules, tools, text)
        if not conversation.escapes_special_tokens:
            return Answer(text, grammar=grammar)
        return Answer(text, self._controls.plain_spans(conversation, text, self.template.render), grammar=grammar)

    def _tokenize(self, job: TokenizeJob) -> str:
        ids = self._encode(job.prompt).tolist()
        strings = [*map(self.tokenizer.backend.id_to_token, ids)] if job.with_strings else None
        answer = {"count": len(ids), "max_model_len": job.max_model_len, "tokens": ids, "token_strs": strings}
        return msgspec.json.encode(answer).decode()

    def _encode(self, job: EncodeJob) -> Int32Array:
        if job.plain:
            return self._controls.encode(job.text, job.plain, add_special_tokens=job.add_special_tokens)
        return self.tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens)


def main() -> None:
    path, vocab_size, max_prompt_bytes, memory_mb, *limits = sys.argv[1:]
    sizes = map(int, (vocab_size, max_prompt_bytes, memory_mb))
    folder = TokenizerFolder(Path(path), *sizes, *map(float, limits))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front end's end ends this process
    resource.setrlimit(resource.RLIMIT_AS, (folder.memory_mb << 20, folder.memory_mb << 20))
    protect_texts()
    _limit_cpu(folder.start_s)
    with Connection(0) as connection, contextlib.suppress(EOFError):  # the front end has ended
        try:
            runner = JobRunner(folder)
        except ConfigError as error:
            connection.recv_bytes()
            connection.send_bytes(msgspec.msgpack.encode(Answer(error=ErrorInfo(InternalError.tag, str(error)))))
        else:
            _serve(connection, runner, folder)


def _serve(connection: Connection, runner: JobRunner, folder: TokenizerFolder) -> None:
    decoder = msgspec.msgpack.Decoder(Job)
    _limit_cpu(0.0)
    while True:
        job = decoder.decode(connection.recv_bytes())
        try:
            runner.prepare(job)
            _limit_cpu(folder.limit_of(job))
            answer = runner.run(job)
        except TidewheelError as error:
            answer = Answer(error=ErrorInfo.of(error))
        except ConfigError as error:
            answer = Answer(error=ErrorInfo(InternalError.tag, str(error)))
        except MemoryError:
            if isinstance(job, StartJob):
                raise
            message = "the prompt or grammar needs too much memory: shorten it"
            answer = Answer(error=ErrorInfo(InvalidRequest.tag, message))
        _limit_cpu(0.0)
        connection.send_bytes(msgspec.msgpack.encode(answer))


def _limit_cpu(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
