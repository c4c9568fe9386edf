"""Process that makes token ids of prompts and tries grammars: jobs on standard input, a socket, and answers on it.

A chat template is a program and a tokenizer a set of patterns, both from a model's folder. Some need hours or all
memory for some texts, a client's grammar may exhaust the stack, and none can be interrupted. The kernel ends this
process when a job overruns its limits.
"""

from __future__ import annotations

import argparse
import io
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from tidewheel.batch import Int32Array
from tidewheel.confidential import protect_texts
from tidewheel.errors import ConfigError, InvalidRequest, TidewheelError, Unsupported
from tidewheel.frontend.chat import ChatTemplate, Conversation
from tidewheel.frontend.coercion import check_size, to_text
from tidewheel.frontend.control_tokens import ControlTokens, Spans
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.grammar import Grammar
from tidewheel.runner.grammar_compiler import TRIAL_STACK_BYTES, GrammarCompiler, to_source

_CPU_STEP = 512 << 10  # characters
_LENGTH = struct.Struct("<Q")

# Patterns that try every division of a run overrun the limit with short runs, quadratic ones with long runs.
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
    plain: Spans = ()


class TokenizeJob(_Message, frozen=True):
    text: str
    add_special_tokens: bool
    max_model_len: int
    with_strings: bool
    plain: Spans = ()


class DecodeJob(_Message, frozen=True):
    token_ids: bytes  # little-endian int32


class GrammarTrial(_Message, frozen=True):
    grammar: Grammar


class PromptText(_Message, frozen=True):
    text: str
    plain: Spans = ()  # of a prompt: text of messages that must make no special token


class TokenIds(_Message, frozen=True):
    token_ids: bytes  # little-endian int32


class Refusal(_Message, frozen=True):
    tag: str  # of the error; empty: the folder cannot be served
    message: str


class Stage(_Message, frozen=True):
    """Work of the process before it serves; empty: it serves."""

    name: str


Job = RenderJob | EncodeJob | TokenizeJob | DecodeJob | GrammarTrial
Answer = PromptText | TokenIds | Refusal | Stage


class TokenizerFolder(NamedTuple):
    path: Path
    vocab_size: int
    max_prompt_bytes: int


class PromptLimits(NamedTuple):
    """The memory is address space; the time is CPU time."""

    memory_mb: int = 3072
    trial_s: float = 20.0
    job_s: float = 5.0  # and as much again per `_CPU_STEP` of text
    grammar_s: float = 1.0

    def of_job(self, job: Job) -> float:
        return self.grammar_s if isinstance(job, GrammarTrial) else self.job_s * (1 + _size(job) / _CPU_STEP)


def _size(job: RenderJob | EncodeJob | TokenizeJob | DecodeJob) -> int:
    if isinstance(job, RenderJob):
        return job.conversation.num_bytes
    return len(job.token_ids if isinstance(job, DecodeJob) else job.text)


class PromptEncoder(Protocol):
    """Thread-safe. Its methods raise `InvalidRequest`, `InternalError` or, when closed, `Draining`."""

    def render(self, conversation: Conversation) -> PromptText:
        """Apply the chat template. Return the text with its plain spans."""

    def encode(self, text: str, *, add_special_tokens: bool, plain: Spans = ()) -> Int32Array:
        """Return token ids [num_tokens] int32. Plain spans make no special token."""

    def tokenize(
        self, text: str, *, add_special_tokens: bool, max_model_len: int, with_strings: bool, plain: Spans = ()
    ) -> str:
        """Return JSON of the tokens, as vLLM's server answers."""

    def decode(self, token_ids: Int32Array) -> str:
        """Return the text with special tokens."""

    def compilable(self, grammar: Grammar) -> str:
        """Return the source of a grammar that compiles. Raise `Unsupported` too."""

    def close(self) -> None:
        """Thread-safe."""


class LocalEncoder:
    """Encoder in this process, without limits."""

    def __init__(self, folder: TokenizerFolder) -> None:
        """Raise `ConfigError`."""
        self._tokenizer = Tokenizer.load(folder.path, vocab_size=folder.vocab_size)
        self._controls = ControlTokens(self._tokenizer)
        self.template = ChatTemplate.load(folder.path, self._tokenizer.named_tokens)
        self._max_prompt_bytes = folder.max_prompt_bytes
        self._folder = folder
        self._compiler: GrammarCompiler | ConfigError | None = None

    def render(self, conversation: Conversation) -> PromptText:
        if self.template is None:
            raise InvalidRequest("messages is set, and the model has no chat template: send text_input")
        text = to_text("messages", self.template.render(conversation))
        size = len(text.encode("utf-8"))
        check_size("messages, as the chat template writes them,", size, self._max_prompt_bytes, "max_prompt_bytes")
        if not conversation.escapes_special_tokens:
            return PromptText(text)
        return PromptText(text, self._controls.plain_spans(conversation, text, self.template.render))

    def encode(self, text: str, *, add_special_tokens: bool, plain: Spans = ()) -> Int32Array:
        if plain:
            return self._controls.encode(text, plain, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def tokenize(
        self, text: str, *, add_special_tokens: bool, max_model_len: int, with_strings: bool, plain: Spans = ()
    ) -> str:
        token_ids = self.encode(text, add_special_tokens=add_special_tokens, plain=plain).tolist()
        strings = [self._tokenizer.token_string(token_id) for token_id in token_ids] if with_strings else None
        answer = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": strings}
        return msgspec.json.encode(answer).decode()

    def decode(self, token_ids: Int32Array) -> str:
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)

    def compilable(self, grammar: Grammar) -> str:
        compiler = self.prepare_grammars()
        if isinstance(compiler, ConfigError):
            raise Unsupported(f"{grammar.name} is set, and this model offers no grammars: {compiler}")
        source = to_source(grammar)
        compiler.compile(source, grammar.name, stack_bytes=TRIAL_STACK_BYTES)
        return source

    def prepare(self, job: Job) -> None:
        """Make shared parts once, outside of the limit of a job."""
        if isinstance(job, GrammarTrial):
            self.prepare_grammars()
        elif isinstance(job, EncodeJob | TokenizeJob) and job.plain:
            self._controls.prepare()

    def prepare_grammars(self) -> GrammarCompiler | ConfigError:
        """Read the vocabulary once, up to a second."""
        if self._compiler is None:
            try:
                self._compiler = GrammarCompiler(self._folder.path, self._folder.vocab_size)
            except ConfigError as error:
                self._compiler = error
        return self._compiler

    def close(self) -> None: ...


def try_out(encoder: LocalEncoder) -> Iterator[str]:
    """Encode and render odd inputs. Yield the name of each part. Raise `ConfigError`."""
    yield "its vocabulary"
    encoder.prepare_grammars()
    yield "its tokenizer"
    for run in _RUNS:
        for length in _RUN_LENGTHS:
            try:
                encoder.encode(run * length + "!\x00", add_special_tokens=True)
            except InvalidRequest as error:
                raise ConfigError(f"{error.message} ({length} times {run!r}): use another tokenizer") from None
    if encoder.template is None:
        return
    yield "its chat template"
    for roles in _CONVERSATIONS:
        for content in _CONTENTS:
            encoder.template.try_out(Conversation([{"role": role, "content": content} for role in roles]))


def write(stream: io.BufferedRWPair, message: Job | Answer) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read(stream: io.BufferedRWPair) -> bytes:
    """Return the next message; empty at the end."""
    head = stream.read(_LENGTH.size)
    return stream.read(*_LENGTH.unpack(head)) if len(head) == _LENGTH.size else b""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("vocab_size", type=int)
    parser.add_argument("max_prompt_bytes", type=int)
    parser.add_argument("memory_mb", type=int)
    parser.add_argument("trial_s", type=float)
    parser.add_argument("job_s", type=float)
    parser.add_argument("grammar_s", type=float)
    parser.add_argument("--trial", action="store_true")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the front end, whose socket then ends this process
    resource.setrlimit(resource.RLIMIT_AS, (args.memory_mb << 20, args.memory_mb << 20))
    protect_texts()
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as stream:
        folder = TokenizerFolder(args.folder, args.vocab_size, args.max_prompt_bytes)
        limits = PromptLimits(args.memory_mb, args.trial_s, args.job_s, args.grammar_s)
        encoder = _start(stream, folder, limits.trial_s, is_trial=args.trial)
        if encoder is not None:
            _serve(stream, encoder, limits)


def _start(
    stream: io.BufferedRWPair, folder: TokenizerFolder, limit_s: float, *, is_trial: bool
) -> LocalEncoder | None:
    _limit_cpu(limit_s)
    try:
        write(stream, Stage("its files"))
        encoder = LocalEncoder(folder)
        for stage in try_out(encoder) if is_trial else ():
            write(stream, Stage(stage))
    except ConfigError as error:
        write(stream, Refusal("", str(error)))
        return None
    _limit_cpu(0.0)
    write(stream, Stage(""))
    return encoder


def _serve(stream: io.BufferedRWPair, encoder: LocalEncoder, limits: PromptLimits) -> None:
    decoder = msgspec.msgpack.Decoder(Job)
    while data := read(stream):
        job = decoder.decode(data)
        answer: Answer
        try:
            encoder.prepare(job)
            _limit_cpu(limits.of_job(job))
            answer = _work(encoder, job)
        except TidewheelError as error:
            answer = Refusal(error.tag, error.message)
        except MemoryError:
            answer = Refusal(InvalidRequest.tag, "the prompt or grammar needs too much memory: shorten it")
        _limit_cpu(0.0)
        write(stream, answer)


def _work(encoder: LocalEncoder, job: Job) -> Answer:
    match job:
        case RenderJob(conversation):
            return encoder.render(conversation)
        case EncodeJob():
            return TokenIds(encoder.encode(**msgspec.structs.asdict(job)).astype("<i4").tobytes())
        case TokenizeJob():
            return PromptText(encoder.tokenize(**msgspec.structs.asdict(job)))
        case DecodeJob(token_ids):
            return PromptText(encoder.decode(np.frombuffer(token_ids, dtype="<i4")))
        case GrammarTrial(grammar):
            return PromptText(encoder.compilable(grammar))


def _limit_cpu(seconds: float) -> None:
    """End the process after CPU time; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
