import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from tidewheel.config import EngineConfig

Severity = Literal["error", "warning", "note"]

_PBTXT_TOKEN = re.compile(r"""\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[\w.+-]+|\S""")
_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[\[\]{}:]')
_CLOSING = {"{": "}", "<": ">", "[": "]"}
_KEYS = ("key", "name")  # fields that tell the elements of a repeated field apart


class Problem(NamedTuple):
    """Finding of a rule: the wrong field, and what to do."""

    severity: Severity
    field: str  # such as `parameters.dtype`; empty: the file as a whole
    message: str
    right_name: str = ""  # instead of the last part of `field`
    file: Path | None = None  # None: the entry's config.pbtxt


error = partial(Problem, "error")  # the server refuses the entry, or does otherwise than it says
warning = partial(Problem, "warning")  # the entry works, but probably not as meant
note = partial(Problem, "note")


class Edit(NamedTuple):
    start: int  # offset into the file's text
    old: str
    new: str


class Finding(NamedTuple):
    """Problem with its rule, file, line and column. `--json` has the fields in this order."""

    rule: str
    severity: Severity
    file: str
    line: int | None  # from 1, like columns; None: the file or folder as a whole
    column: int | None
    field: str
    message: str
    edit: Edit | None = None  # mends the problem

    @property
    def place(self) -> str:
        """File, and line and column if known, as compilers write them."""
        return ":".join([self.file, *(str(number) for number in (self.line, self.column) if number is not None)])


def mend(findings: Iterable[Finding]) -> list[Finding]:
    """Apply the edits to the files; return the findings that had an edit."""
    mended = [finding for finding in findings if finding.edit is not None]
    for file in dict.fromkeys(finding.file for finding in mended):
        edits = [finding.edit for finding in mended if finding.file == file and finding.edit is not None]
        path = Path(file)
        newline = "\r\n" if b"\r\n" in path.read_bytes() else "\n"
        path.write_text(edited(path.read_text(encoding="utf-8"), edits), encoding="utf-8", newline=newline)
    return mended


def edited(text: str, edits: Iterable[Edit]) -> str:
    for edit in sorted(edits, reverse=True):  # from the end, so that offsets hold
        end = edit.start + len(edit.old)
        assert text[edit.start : end] == edit.old, "the text has changed since its check"
        text = text[: edit.start] + edit.new + text[end:]
    return text


class MemoryNeeds(NamedTuple):
    """Bytes of memory that an engine takes on this machine."""

    device: str  # cpu or cuda
    weights: int
    cache: int
    host: int
    device_bytes: int = 0  # of a GPU

    @property
    def of_host(self) -> int:
        return self.host + (self.weights + self.cache if self.device == "cpu" else 0)


@dataclass(frozen=True, slots=True)
class CheckReport:
    checked: list[str] = field(default_factory=list)  # names of entries
    passed_over: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    models: dict[str, str] = field(default_factory=dict)  # by name: architecture, and native or through transformers
    kv_cache: dict[str, str] = field(default_factory=dict)  # by name: memory of a token and of the longest request
    memory: dict[str, str] = field(default_factory=dict)  # by name: of the weights, and room for the cache
    needs: dict[str, tuple[EngineConfig, MemoryNeeds]] = field(default_factory=dict)  # by name

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)


class Field(NamedTuple):
    """Field of a protobuf text or key of a JSON object, as offsets into the text."""

    name: str
    name_start: int
    start: int  # of a message in a list, else of the name
    end: int  # after the value
    value: str = ""  # of a scalar, without quotes
    value_start: int = 0
    fields: "tuple[Field, ...]" = ()  # of a message
    list_end: int = 0  # end of the list around it

    def child(self, name: str) -> "Field | None":
        return next((field for field in self.fields if field.name == name), None)


def place_of(text: str, offset: int) -> tuple[int, int]:
    """Return line and column, from 1."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def pbtxt_fields(text: str) -> tuple[Field, ...]:
    """Return the top-level fields of a valid protobuf text, one for each element of a list."""
    return tuple(_Scanner(text).fields(""))


def json_fields(text: str) -> tuple[Field, ...]:
    """Return the outermost keys of a valid JSON object."""
    fields, depth = [], 0
    tokens = list(_JSON_TOKEN.finditer(text))
    for token, following in itertools.pairwise(tokens):
        depth += (token[0] in "{[") - (token[0] in "}]")
        if depth == 1 and token[0][0] == '"' and following[0] == ":":
            fields.append(Field(token[0][1:-1], token.start() + 1, token.start(), token.end()))
    return tuple(fields)


def walk(fields: Iterable[Field], parent: str = "") -> Iterator[tuple[str, Field, str]]:
    """Yield (path, field, path of the enclosing message), outer fields first. Instance groups are numbered."""
    counts: dict[str, int] = {}
    for one in fields:
        path = f"{parent}.{one.name}" if parent else one.name
        label = next((child.value for key in _KEYS if (child := one.child(key)) is not None), "")
        if one.fields and (label or one.name == "instance_group"):
            path = f"{path}.{label or counts.setdefault(one.name, 0)}"
            counts[one.name] = counts.get(one.name, 0) + 1
        yield path, one, parent
        yield from walk(one.fields, path)


class _Scanner:
    def __init__(self, text: str) -> None:
        self._tokens = [token for token in _PBTXT_TOKEN.finditer(text) if token[0][0] != "#"]
        self._next = 0

    def fields(self, closing: str) -> Iterator[Field]:
        while self._next < len(self._tokens) and not self._take(closing):
            if self._take(",") or self._take(";"):
                continue
            name = self._pop()
            self._take(":")
            if not self._take("["):
                yield self._value(name, name.start())
                continue
            elements = []
            while not self._take("]"):
                first = self._tokens[self._next]
                elements.append(self._value(name, first.start() if first[0] in _CLOSING else name.start()))
                self._take(",")
            list_end = self._tokens[self._next - 1].end()
            yield from (element._replace(list_end=list_end) for element in elements)

    def _value(self, name: re.Match[str], start: int) -> Field:
        first = self._pop()
        if first[0] in _CLOSING:
            inner = tuple(self.fields(_CLOSING[first[0]]))
            return Field(name[0], name.start(), start, self._tokens[self._next - 1].end(), fields=inner)
        last, value = first, _unquoted(first[0])
        while first[0][0] in "\"'" and self._next < len(self._tokens) and self._tokens[self._next][0][0] in "\"'":
            last = self._pop()
            value += _unquoted(last[0])
        return Field(name[0], name.start(), start, last.end(), value, first.start())

    def _pop(self) -> re.Match[str]:
        self._next += 1
        return self._tokens[self._next - 1]

    def _take(self, token: str) -> bool:
        is_next = self._next < len(self._tokens) and self._tokens[self._next][0] == token
        self._next += is_next
        return is_next


def _unquoted(token: str) -> str:
    return token[1:-1] if token[0] in "\"'" else token
