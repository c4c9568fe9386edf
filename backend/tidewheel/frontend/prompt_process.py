"""Process that turns prompts into token ids and tries grammars. Jobs and answers are messages on a socket.

For some texts, a model's template or tokenizer takes hours or all memory, and a client's grammar may exhaust the
stack. The kernel ends this process when a job overruns its limits.
"""

from __future__ import annotations

import itertools
import resource
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.confidential import protect_texts
from tidewheel.engine.messages import ErrorInfo
from tidewheel.errors import ConfigError, InvalidRequest, TidewheelError
from tidewheel.frontend.chat import ChatTemplate, Conversation
from tidewheel.frontend.coercion import check_size, to_text
from tidewheel.frontend.control_tokens import ControlTokens, Spans
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.grammar import Grammar
from tidewheel.runner.grammar_compiler import TRIAL_STACK_BYTES, GrammarCompiler, to_source

_CPU_STEP = 512 << 10  # bytes

# Exponential patterns overrun the limit with short runs, quadratic ones with long runs.
_RUNS = ("a", "A", "0", " ", "\n", ".", "-", "_", "é", "日", "🎉", "a ", "a1", "\n ")
_RUN_LENGTHS = (60, 5_000)
_CONVERSATIONS = (["user"], ["system", "user"], ["system", *["user", "assistant"] * 20, "user"])
_CONTENTS = ("Hello", "", "{{ 1 }} <|im_end|> </s>\n\x00", "word " * 10_000)


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


class GrammarTrial(_Message, frozen=True):
    grammar: Grammar


Job = RenderJob | EncodeJob | TokenizeJob | DecodeJob | GrammarTrial


class Answer(msgspec.Struct, frozen=True, array_like=True):
    text: str = ""  # while the process starts, its work; then empty
    plain: Spans = ()  # of a prompt: text of messages that must make no special token
    token_ids: bytes = b""  # little-endian int32
    error: ErrorInfo | None = None


class TokenizerFolder(NamedTuple):
    path: Path
    vocab_size: int
    max_prompt_bytes: int


class PromptLimits(NamedTuple):
    """Limits of a prompt process: address space, and CPU seconds."""

    memory_mb: int = 3072
    trial_s: float = 20.0
    job_s: float = 5.0  # and as much again per `_CPU_STEP` of the job
    grammar_s: float = 1.0

    def of_job(self, job: Job) -> float:
        if isinstance(job, GrammarTrial):
            return self.grammar_s
        return self.job_s * (1 + len(msgspec.msgpack.encode(job)) / _CPU_STEP)


class JobRunner:
    """Tokenizer, chat template and grammar compiler that do jobs. Methods raise `InvalidRequest` or `Unsupported`."""

    def __init__(self, folder: TokenizerFolder) -> None:
        """Load a folder's tokenizer and chat template. Raise `ConfigError`."""
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
            case GrammarTrial(grammar):
                source = to_source(grammar)
                self._compiler.compile(source, grammar.name, stack_bytes=TRIAL_STACK_BYTES)
                return Answer(source)

    def prepare(self, job: Job) -> None:
        """Make what all jobs of this kind need, before the job's limit begins."""
        match job:
            case GrammarTrial():
                self._compiler.prepare()
            case EncodeJob(plain=plain) | TokenizeJob(EncodeJob(plain=plain)) if plain:
                _ = self._controls.renamed

    def try_out(self) -> Iterator[str]:
        """Encode and render odd inputs. Yield the name of each part before its trial. Raise `ConfigError`."""
        yield "its vocabulary"
        self._compiler.prepare()
        yield "its tokenizer"
        for run, length in itertools.product(_RUNS, _RUN_LENGTHS):
            try:
                self.tokenizer.encode(run * length + "!\x00")
            except InvalidRequest as error:
                raise ConfigError(f"{error.message} ({length} times {run!r}): use another tokenizer") from None
        if self.template is None:
            return
        yield "its chat template"
        for roles, content in itertools.product(_CONVERSATIONS, _CONTENTS):
            self.template.try_out(Conversation([{"role": role, "content": content} for role in roles]))

    def _render(self, conversation: Conversation) -> Answer:
        if self.template is None:
            raise InvalidRequest("messages is set, and the model has no chat template: send text_input")
        text = to_text("messages", self.template.render(conversation))
        size, limit = len(text.encode("utf-8")), self._folder.max_prompt_bytes
        check_size("messages, as the chat template writes them,", size, limit, "max_prompt_bytes")
        if not conversation.escapes_special_tokens:
            return Answer(text)
        return Answer(text, self._controls.plain_spans(conversation, text, self.template.render))

    def _encode(self, job: EncodeJob) -> Int32Array:
        if job.plain:
            return self._controls.encode(job.text, job.plain, add_special_tokens=job.add_special_tokens)
        return self.tokenizer.encode(job.text, add_special_tokens=job.add_special_tokens)

    def _tokenize(self, job: TokenizeJob) -> str:
        ids = self._encode(job.prompt).tolist()
        strings = [self.tokenizer.token_string(token_id) for token_id in ids] if job.with_strings else None
        answer = {"count": len(ids), "max_model_len": job.max_model_len, "tokens": ids, "token_strs": strings}
        return msgspec.json.encode(answer).decode()


def main() -> None:
    path, vocab_size, max_prompt_bytes, memory_mb, trial_s, job_s, grammar_s, *trial = sys.argv[1:]
    folder = TokenizerFolder(Path(path), int(vocab_size), int(max_prompt_bytes))
    limits = PromptLimits(int(memory_mb), float(trial_s), float(job_s), float(grammar_s))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the front end, and thereby this process
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_mb << 20, limits.memory_mb << 20))
    protect_texts()
    with Connection(0) as connection:
        try:
            runner = _start(connection, folder, limits.trial_s, is_trial=bool(trial))
        except ConfigError as error:
            _send(connection, Answer(error=ErrorInfo("", str(error))))
        else:
            _serve(connection, runner, limits)


def _start(connection: Connection, folder: TokenizerFolder, limit_s: float, *, is_trial: bool) -> JobRunner:
    _limit_cpu(limit_s)
    runner = JobRunner(folder)
    for work in runner.try_out() if is_trial else ():
        _send(connection, Answer(work))
    _limit_cpu(0.0)
    _send(connection, Answer())
    return runner


def _serve(connection: Connection, runner: JobRunner, limits: PromptLimits) -> None:
    decoder = msgspec.msgpack.Decoder(Job)
    while True:
        try:
            job = decoder.decode(connection.recv_bytes())
        except EOFError:  # the front end has ended
            return
        try:
            runner.prepare(job)
            _limit_cpu(limits.of_job(job))
            answer = runner.run(job)
        except TidewheelError as error:
            answer = Answer(error=ErrorInfo.of(error))
        except MemoryError:
            message = "the prompt or grammar needs too much memory: shorten it"
            answer = Answer(error=ErrorInfo(InvalidRequest.tag, message))
        _limit_cpu(0.0)
        _send(connection, answer)


def _send(connection: Connection, answer: Answer) -> None:
    connection.send_bytes(msgspec.msgpack.encode(answer))


def _limit_cpu(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
