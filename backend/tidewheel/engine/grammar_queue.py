import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tidewheel.engine.front_ends import FrontEnd
from tidewheel.engine.messages import RETRY_AFTER_MS, AddRequest
from tidewheel.errors import Busy, InternalError, TidewheelError
from tidewheel.grammar import TokenGrammar
from tidewheel.runner.grammar_compiler import GrammarCompiler

log = logging.getLogger(__name__)

MAX_WAITING = 256  # each with up to 1 MiB of source
MAX_KEPT = 64
MAX_KEPT_CHARS = 512 << 10  # of sources; a compiled one takes up to 300 times more


class GrammarCache:
    """LRU cache of compiled grammars by source."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, TokenGrammar] = OrderedDict()

    def find(self, source: str) -> TokenGrammar | None:
        grammar = self._kept.get(source)
        if grammar is not None:
            self._kept.move_to_end(source)
        return grammar

    def keep(self, source: str, grammar: TokenGrammar) -> None:
        self._kept[source] = grammar
        while len(self._kept) > MAX_KEPT or sum(map(len, self._kept)) > MAX_KEPT_CHARS:
            self._kept.popitem(last=False)


class GrammarQueue:
    """Requests that wait while a thread compiles their grammar."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        compiler.prepare()  # now, because it would delay steps
        self._compiler = compiler
        self.kept = GrammarCache()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._jobs: dict[str, Future[TokenGrammar]] = {}
        self._waiting: list[tuple[FrontEnd, AddRequest]] = []

    @property
    def num_waiting(self) -> int:
        return sum(message.options.n for _, message in self._waiting)

    def add(self, front_end: FrontEnd, message: AddRequest) -> None:
        """Queue a request with a grammar. Raise `Busy` if too many wait."""
        if len(self._waiting) >= MAX_WAITING:
            raise Busy(f"{len(self._waiting)} requests wait for their grammars", retry_after_ms=RETRY_AFTER_MS)
        source = message.grammar
        if source not in self._jobs:
            self._jobs[source] = self._thread.submit(self._compiler.compile, source, message.grammar_name)
        self._waiting.append((front_end, message))

    def take_compiled(self) -> list[tuple[FrontEnd, AddRequest, TokenGrammar | TidewheelError]]:
        problem = "the grammar could not be compiled"
        done = {source: result_of(job, problem) for source, job in self._jobs.items() if job.done()}
        if not done:
            return []
        for source, result in done.items():
            del self._jobs[source]
            if not isinstance(result, TidewheelError):
                self.kept.keep(source, result)
        ready = [(*item, done[item[1].grammar]) for item in self._waiting if item[1].grammar in done]
        self._waiting = [item for item in self._waiting if item[1].grammar not in done]
        return ready

    def cancel(self, front_end: FrontEnd, key: int | None = None) -> bool:
        """Remove the front end's request `key` (None: all). Return whether one waited."""
        num_before = len(self._waiting)
        self._waiting = [
            (owner, message)
            for owner, message in self._waiting
            if owner is not front_end or (key is not None and message.key != key)
        ]
        for source in self._jobs.keys() - {message.grammar for _, message in self._waiting}:
            if self._jobs[source].cancel():
                del self._jobs[source]
        return len(self._waiting) < num_before


def result_of(job: Future[Any], problem: str) -> Any:
    """Return a finished job's result or `TidewheelError`; `problem` is the message of an unexpected error."""
    error = job.exception()
    if error is None:
        return job.result()
    if isinstance(error, TidewheelError):
        return error
    log.error("%s", problem, exc_info=error)
    return InternalError(f"{problem}; the server's log says why")
