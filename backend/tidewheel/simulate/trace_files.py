"""Trace files in JSONL or CSV; `traces` lists the fields."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.request import Priority
from tidewheel.settings import unknown_setting
from tidewheel.simulate.traces import NOBODY, Trace

REQUIRED = ("arrival", "prompt_tokens", "output_tokens")
FIELDS = (*REQUIRED, "priority", "tenant", "session", "prefix_group", "prefix_tokens", "deadline_s")
MAX_TOKENS = 1 << 24


class _Names:
    def __init__(self, *known: str) -> None:
        self.indices = {name: index for index, name in enumerate(known)}

    def index(self, name: str) -> int:
        return self.indices.setdefault(name, len(self.indices))

    def optional(self, name: str) -> int:
        return self.index(name) if name else NOBODY

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.indices)


def read_trace(path: Path) -> Trace:
    """Read a trace, sorted by arrival, the first at 0.

    Raise `ConfigError` naming file, line and field.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    rows = _csv_rows(text, path) if path.suffix == ".csv" else _json_rows(text, path)
    tenants, sessions, groups = _Names(""), _Names(), _Names()
    columns: dict[str, list[float]] = {name: [] for name in FIELDS}
    for line, row in rows:
        where = f"{path}, line {line}"
        for key in row:
            if key not in FIELDS:
                raise ConfigError(f"{where}: {unknown_setting(str(key), FIELDS).replace('setting', 'field')}")
        for name, value in _values(row, where, tenants, sessions, groups).items():
            columns[name].append(value)
    if not columns["arrival"]:
        raise ConfigError(f"the trace {path} has no requests")
    return _to_trace(columns, tenants, sessions, groups)


def _to_trace(columns: dict[str, list[float]], tenants: _Names, sessions: _Names, groups: _Names) -> Trace:
    arrivals = np.array(columns["arrival"])
    order = np.argsort(arrivals, kind="stable")

    def integers(name: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(columns[name], dtype=np.int32)[order]

    return Trace(
        arrivals=arrivals[order] - arrivals.min(),
        prompt_tokens=integers("prompt_tokens"),
        output_tokens=integers("output_tokens"),
        priorities=integers("priority"),
        tenants=integers("tenant"),
        tenant_names=tenants.names,
        sessions=integers("session"),
        session_names=sessions.names,
        prefix_groups=integers("prefix_group"),
        prefix_names=groups.names,
        prefix_tokens=integers("prefix_tokens"),
        deadlines=np.array(columns["deadline_s"])[order],
    )


def _values(
    row: Mapping[str, object], where: str, tenants: _Names, sessions: _Names, groups: _Names
) -> dict[str, float]:
    priority = _integer(row, "priority", 0, 4, where, default=0)
    values: dict[str, float] = {
        "arrival": _number(row, "arrival", where),
        "prompt_tokens": _integer(row, "prompt_tokens", 1, MAX_TOKENS, where),
        "output_tokens": _integer(row, "output_tokens", 1, MAX_TOKENS, where),
        "priority": Priority.from_wire(priority),
        "tenant": tenants.index(_text(row, "tenant")),
        "session": sessions.optional(_text(row, "session")),
        "prefix_group": groups.optional(_text(row, "prefix_group")),
        "prefix_tokens": _integer(row, "prefix_tokens", 0, MAX_TOKENS, where, default=0),
        "deadline_s": _number(row, "deadline_s", where, default=math.inf),
    }
    if values["prefix_tokens"] > values["prompt_tokens"]:
        raise ConfigError(f"{where}: prefix_tokens is {values['prefix_tokens']:g}, more than prompt_tokens")
    if values["prefix_group"] == NOBODY and values["prefix_tokens"]:
        raise ConfigError(f"{where}: prefix_tokens needs a prefix_group")
    return values


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    for line, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except ValueError as error:
            raise ConfigError(f"{path}, line {line}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {line}: it must be an object with {', '.join(REQUIRED)}")
        yield line, row


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}: the header line has no {', '.join(missing)}")
    for row in reader:
        if None in row:
            raise ConfigError(f"{path}, line {reader.line_num}: more values than the header has names")
        yield reader.line_num, {key: value for key, value in row.items() if value not in (None, "")}


def _text(row: Mapping[str, object], name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value)


def _number(row: Mapping[str, object], name: str, where: str, *, default: float | None = None) -> float:
    value = row.get(name, default)
    if value is None:
        raise ConfigError(f"{where}: {name} is missing")
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if math.isnan(number) or (math.isinf(number) and name in row) or number < 0:
        raise ConfigError(f"{where}: {name} is {value!r}: it must be a number of 0 or more")
    return number


def _integer(
    row: Mapping[str, object], name: str, low: int, high: int, where: str, *, default: int | None = None
) -> int:
    number = _number(row, name, where, default=default)
    if number != int(number) or not low <= number <= high:
        raise ConfigError(f"{where}: {name} is {row[name]!r}: it must be a whole number from {low} to {high}")
    return int(number)


def write_trace(trace: Trace, path: Path) -> None:
    with path.open("w") as file:
        for record in _records(trace):
            file.write(json.dumps(record) + "\n")


def _records(trace: Trace) -> Iterable[dict[str, object]]:
    for index in range(len(trace)):
        record: dict[str, object] = {
            "arrival": float(trace.arrivals[index]),
            "prompt_tokens": int(trace.prompt_tokens[index]),
            "output_tokens": int(trace.output_tokens[index]),
            "priority": int(trace.priorities[index]),
        }
        if name := trace.tenant_names[trace.tenants[index]]:
            record["tenant"] = name
        if trace.sessions[index] != NOBODY:
            record["session"] = trace.session_names[trace.sessions[index]]
        if trace.prefix_groups[index] != NOBODY:
            record["prefix_group"] = trace.prefix_names[trace.prefix_groups[index]]
            record["prefix_tokens"] = int(trace.prefix_tokens[index])
        if np.isfinite(trace.deadlines[index]):
            record["deadline_s"] = float(trace.deadlines[index])
        yield record
