import codecs
import re
from collections import deque
from collections.abc import Callable
from typing import IO, NamedTuple

from tidewheel.server import LoadError

_KEPT_LINES = 400
_QUOTED_LINES = 8
_QUOTED_CHARS = 300  # of a line
_MAX_LINE = 1 << 16
_SIGNAL = re.compile(r"Signal \(\d+\) received")  # before a stack trace
_LINE = re.compile(r'^(?P<level>[IWEF])\d{4} [\d:.]+ \d+ [^:\]]+:\d+\] ?"?(?P<message>.*?)"?$', re.DOTALL)
_VERSION = re.compile(r"^\| server_version\s+\| (\S+)")
# "failed to load 'demo' version 1: Internal: TritonModelException: text\n\nAt:\n  file(1): function\n"
_LOAD_FAILED = re.compile(
    r"failed to load (?:model )?'?(?P<model>[^']+?)'?(?: version \d+)?: (?:[\w ]+: )?(?P<reason>.*)", re.DOTALL
)
_ENSEMBLE_FAILED = re.compile(
    r"(?:[\w ]+: )?ensemble '?(?P<model>[^' ]+)'? (?P<reason>(?:contains models|depends on) .*)", re.DOTALL
)
_LOADED = re.compile(r"successfully loaded '?(?P<model>[^']+?)'?$")
_POLL_FAILED = re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*)", re.DOTALL)
# Protobuf explains a wrong config.pbtxt before Triton reports it.
_SYNTAX_ERROR = re.compile(r"Error parsing text-format [\w.]+: (?P<detail>.*)")
_OTHER_BACKEND = re.compile(r"unable to find backend library for backend '(?P<backend>vllm|tensorrtllm)'")
_PLACES = "\n\nAt:"  # of an exception, before the lines of its code
_EXCEPTION_NAME = re.compile(r"^(?:[\w.]*(?:Exception|Error)): ")
# Harmless: a missing GPU, and clients that left at the very end.
_NOISE = re.compile(
    r"CudaDriverHelper|pinned system memory|DCGM|NVML|memory pool disabled"
    r"|HandleCancellation called even when the context was not cancelled"
)


class LogLine(NamedTuple):
    level: str  # I, W, E, F; empty if not Triton's
    message: str

    @property
    def is_problem(self) -> bool:
        return self.level in ("W", "E", "F") and _NOISE.search(self.message) is None


def parse(text: str) -> LogLine:
    match = _LINE.match(text)
    if match is None:
        return LogLine("", text)
    return LogLine(match["level"], match["message"].replace("\\n", "\n").replace('\\"', '"'))


def load_failure(message: str, syntax_error: str = "") -> LoadError | None:
    if match := _LOAD_FAILED.match(message) or _ENSEMBLE_FAILED.match(message):
        reason = _one_line(match["reason"])
        if other := _OTHER_BACKEND.search(reason):
            advice = "and this server has none: tidewheel migrate makes such an entry ours"
            return LoadError(match["model"], f"its backend is {other['backend']!r}, {advice}")
        return LoadError(match["model"], reason)
    if match := _POLL_FAILED.match(message):
        detail = f": {syntax_error}" if syntax_error else ""
        return LoadError(match["model"], _one_line(match["reason"]) + detail)
    return None


def without_places(message: str) -> str:
    return message.split(_PLACES, 1)[0].strip()


class ServerLog:
    """Parser of Triton's output. Keeps last lines, version and first failed load."""

    def __init__(self, copy: IO[bytes] | None = None) -> None:
        self._copy = copy  # unbuffered
        self._has_failed = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._syntax_error = ""
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self.version = ""
        self.failure: LoadError | None = None
        # Takes a model and its failure, empty if it serves.
        self.on_load: Callable[[str, str], object] = lambda model, failure: None  # noqa: ARG005

    def feed(self, data: bytes) -> list[LogLine]:
        """Return the complete lines of new output, and copy them to the log file."""
        problem = self._copied(data)
        *complete, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        if len(self._rest) > _MAX_LINE:
            complete, self._rest = [*complete, self._rest], ""
        return [*problem, *(self._note(text) for text in complete)]

    def _copied(self, data: bytes) -> list[LogLine]:
        had_failed, self._has_failed = self._has_failed, False
        if self._copy is not None:
            try:
                self._copy.write(data)
            except OSError as error:
                self._has_failed = True
                if not had_failed:
                    return [LogLine("W", f"the log file cannot be written, lines are lost: {error.strerror}")]
        return []

    def last_words(self) -> str:
        lines = [line for line in map(parse, self._kept) if line.message.strip()]
        errors = [line for line in lines if line.level in ("E", "F") and line.is_problem]
        plain = [line for line in lines if line.level == "" and not line.message.startswith(("|", "+"))]
        best = (errors or plain or lines)[-1:]
        return _one_line(best[0].message) if best else "it printed nothing"

    def quote(self) -> str:
        """Return the last lines, or the first lines of a stack trace."""
        lines = [line for line in (*self._kept, self._rest) if line.strip()]
        traces = [index for index, line in enumerate(lines) if _SIGNAL.search(line)]
        start = traces[-1] if traces else max(len(lines) - _QUOTED_LINES, 0)
        quoted = lines[start : start + _QUOTED_LINES] or ["(nothing)"]
        return "\n".join(f"  {line[:_QUOTED_CHARS]}" for line in quoted)

    def _note(self, text: str) -> LogLine:
        text = text.rstrip("\r")
        line = parse(text)
        self._kept.append(text)
        if version := _VERSION.match(line.message):
            self.version = version[1]
        if syntax := _SYNTAX_ERROR.search(line.message):
            self._syntax_error = syntax["detail"]
        elif line.level == "E" and (failure := load_failure(line.message, self._syntax_error)) is not None:
            self.failure = self.failure or failure
            self.on_load(failure.model, failure.reason)
        elif loaded := _LOADED.match(line.message):
            self.on_load(loaded["model"], "")
        return line


def _one_line(reason: str) -> str:
    return " ".join(_EXCEPTION_NAME.sub("", without_places(reason)).split())
