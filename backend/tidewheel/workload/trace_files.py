"""Trace files: one request a line, in JSONL, or in CSV after a header line, with the fields

    arrival          seconds from the start           required
    prompt_tokens    tokens in the prompt             required
    output_tokens    tokens generated                 required
    priority         critical, high, normal, low, or 1 … 4; 0 or absent: normal
    tenant           a name
    session          a name; each turn's prompt extends the turn before
    prefix_group     a name; its requests share their first prefix_tokens tokens
    prefix_tokens    needs prefix_group
    deadline_s       seconds from arrival; absent: never
    ttft_s           objective: seconds from arrival to the first token; absent: none
    tpot_s           objective: mean seconds of each later token; absent: none
    encoder_tokens   computed of a request's audio as it enters
    bucket           shapes of a request without text: equal names may share a batch
    pause_s          seconds from the end of the session's turn before; then `arrival` gives the order of turns alone
    tool             a name; the tool that runs after this turn
    lora             a name; the adapter that computes the request

CSV files of Azure (Patel and others, Splitwise, ISCA 2024; AzurePublicDataset on GitHub), with dates, and of BurstGPT
(Wang and others, arXiv 2401.17644), with seconds and without failed rows, are read too.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.request import Priority
from tidewheel.settings import unknown_setting
from tidewheel.workload.traces import NOBODY, Trace

MAX_TOKENS = 1 << 24
_Prompt = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e300)]
_Name = str | int | float


class _TraceRow(msgspec.Struct):
    arrival: _Seconds
    prompt_tokens: _Prompt
    output_tokens: _Prompt
    priority: Annotated[int, msgspec.Meta(ge=0, le=4)] | Literal["critical", "high", "normal", "low"] = 0
    tenant: _Name = ""
    session: _Name = ""
    prefix_group: _Name = ""
    prefix_tokens: _Tokens = 0
    deadline_s: _Seconds = math.inf
    ttft_s: _Seconds = math.inf
    tpot_s: _Seconds = math.inf
    encoder_tokens: _Tokens = 0
    bucket: _Name = ""
    pause_s: _Seconds | None = None
    tool: _Name = ""
    lora: _Name = ""


class _AzureRow(msgspec.Struct):
    arrival: datetime = msgspec.field(name="TIMESTAMP")
    prompt_tokens: _Prompt = msgspec.field(name="ContextTokens")
    output_tokens: _Tokens = msgspec.field(name="GeneratedTokens")

    def request(self) -> _TraceRow:
        return _TraceRow(self.arrival.timestamp(), self.prompt_tokens, max(1, self.output_tokens))


class _BurstGptRow(msgspec.Struct):
    arrival: _Seconds = msgspec.field(name="Timestamp")
    prompt_tokens: _Prompt = msgspec.field(name="Request tokens")
    output_tokens: _Tokens = msgspec.field(name="Response tokens")

    def request(self) -> _TraceRow | None:
        return _TraceRow(self.arrival, self.prompt_tokens, self.output_tokens) if self.output_tokens else None


FIELDS = _TraceRow.__struct_fields__
REQUIRED = FIELDS[:3]


class _TraceLine(NamedTuple):
    where: str
    values: Mapping[str, object]
    kind: type[_TraceRow | _AzureRow | _BurstGptRow] = _TraceRow

    def request(self) -> _TraceRow | None:
        values = {name: value for name, value in self.values.items() if value is not None and value != ""}
        try:
            request = msgspec.convert(values, self.kind, strict=False)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # a lone surrogate in JSON
            reason, _, name = str(error).partition(" - at `$.")
            name = name.removesuffix("`")
            found = f"{name} is {values[name]!r}: " if name else ""
            raise ConfigError(f"{self.where}: {found}{reason}") from None
        if not isinstance(request, _TraceRow):
            return request.request()
        for name in self.values.keys() - set(FIELDS):
            raise ConfigError(f"{self.where}: {unknown_setting(name, FIELDS).replace('setting', 'field')}")
        if request.prefix_tokens > request.prompt_tokens:
            raise ConfigError(f"{self.where}: prefix_tokens is {request.prefix_tokens}, more than prompt_tokens")
        if request.prefix_tokens and not request.prefix_group:
            raise ConfigError(f"{self.where}: prefix_tokens needs a prefix_group")
        return request


def read_trace(path: Path) -> Trace:
    """Return a file's requests sorted by arrival, the first at 0. Raise `ConfigError` with file, line and field."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = (_csv_lines if path.suffix == ".csv" else _json_lines)(file, path)
            requests = [request for line in lines if (request := line.request()) is not None]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    if not requests:
        raise ConfigError(f"the trace {path} has no requests")
    return _trace(requests)


def _trace(requests: list[_TraceRow]) -> Trace:
    tenants: dict[str, int] = {"": 0}
    sessions: dict[str, int] = {}
    groups: dict[str, int] = {}
    buckets: dict[str, int] = {"": 0}
    tools: dict[str, int] = {"": 0}
    loras: dict[str, int] = {"": 0}
    arrivals = np.array([request.arrival for request in requests])
    columns = {
        "arrivals": arrivals - arrivals.min(),
        "prompt_tokens": [request.prompt_tokens for request in requests],
        "output_tokens": [request.output_tokens for request in requests],
        "priorities": [Priority.from_wire(request.priority) for request in requests],
        "tenants": [_index(tenants, request.tenant) for request in requests],
        "sessions": [_index(sessions, request.session) for request in requests],
        "prefix_groups": [_index(groups, request.prefix_group) for request in requests],
        "prefix_tokens": [request.prefix_tokens for request in requests],
        "deadlines": [request.deadline_s for request in requests],
        "ttft_objectives": [request.ttft_s for request in requests],
        "tpot_objectives": [request.tpot_s for request in requests],
        "encoder_tokens": [request.encoder_tokens for request in requests],
        "buckets": [_index(buckets, request.bucket) for request in requests],
        "pauses": [math.nan if request.pause_s is None else request.pause_s for request in requests],
        "tools": [_index(tools, request.tool) for request in requests],
        "loras": [_index(loras, request.lora) for request in requests],
    }
    order = np.argsort(arrivals, kind="stable")
    _check_pauses([requests[index] for index in order])
    return Trace.of(
        **{name: np.array(column)[order] for name, column in columns.items()},
        tenant_names=tuple(tenants),
        session_names=tuple(sessions),
        prefix_names=tuple(groups),
        bucket_names=tuple(buckets),
        tool_names=tuple(tools),
        lora_names=tuple(loras),
    )


def _check_pauses(requests: Iterable[_TraceRow]) -> None:
    seen = set[_Name]()
    for request in requests:
        if request.pause_s is not None and (request.session == "" or request.session not in seen):
            raise ConfigError(
                f"pause_s is {request.pause_s:g} at {request.arrival:g} s: no turn of session "
                f"{request.session!r} comes before; leave it out of a first turn"
            )
        seen.add(request.session)


def _index(names: dict[str, int], name: _Name) -> int:
    text = str(name)
    return names.setdefault(text, len(names)) if text or text in names else NOBODY


def _json_lines(lines: Iterable[str], path: Path) -> Iterator[_TraceLine]:
    for number, content in enumerate(lines, 1):
        if not content.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: it must be an object with {', '.join(REQUIRED)}")
        yield _TraceLine(where, values)


def _csv_lines(lines: Iterable[str], path: Path) -> Iterator[_TraceLine]:
    reader = csv.DictReader(lines)
    header = reader.fieldnames or ()
    published = next(
        (kind for kind in (_AzureRow, _BurstGptRow) if set(kind.__struct_encode_fields__) <= {*header}), None
    )
    missing = [name for name in REQUIRED if name not in header]
    if missing and published is None:
        raise ConfigError(f"{path}: the header line has no {', '.join(missing)}")
    for values in reader:
        where = f"{path}, line {reader.line_num}"
        if None in values:
            raise ConfigError(f"{where}: more values than the header has names")
        if published is not None and None in values.values():
            found = len(header) - list(values.values()).count(None)
            raise ConfigError(f"{where}: {found} values, the header names {len(header)}")
        yield _TraceLine(where, values, published or _TraceRow)
