"""Trace files: one request a line, in JSONL, or in CSV after a header line, with the fields

    arrival          seconds from the start           required
    prompt_tokens    tokens in the prompt             required
    output_tokens    tokens generated                 required
    priority         1 (CRITICAL) … 4 (LOW), 0 or absent: NORMAL
    tenant           a name
    session          a name; each turn's prompt extends the last
    prefix_group     a name; its requests share their first prefix_tokens tokens
    prefix_tokens    with prefix_group
    deadline_s       seconds from arrival; absent: never

CSV files of two published traces are read too; their other columns are ignored. Azure's (Patel and others, Splitwise,
ISCA 2024; AzurePublicDataset on GitHub) have dates. BurstGPT's (Wang and others, arXiv 2401.17644) have seconds, and
rows without response tokens, which failed, are dropped.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.request import Priority
from tidewheel.settings import unknown_setting
from tidewheel.workload.traces import NOBODY, Trace

REQUIRED = ("arrival", "prompt_tokens", "output_tokens")
FIELDS = (*REQUIRED, "priority", "tenant", "session", "prefix_group", "prefix_tokens", "deadline_s")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
MAX_TOKENS = 1 << 24

Row = Mapping[str, object]


def read_trace(path: Path) -> Trace:
    """Read a trace, sorted by arrival, the first at 0; raise `ConfigError` naming file, line and field."""
    requests = _Requests()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".csv":
                _read_csv(file, path, requests)
            else:
                for where, row in _json_rows(file, path):
                    requests.add(row, where)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    return requests.trace(path)


class _Requests:
    """Columns of a `Trace` in the order of the file."""

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {}
        self._tenants: dict[str, int] = {"": 0}
        self._sessions: dict[str, int] = {}
        self._groups: dict[str, int] = {}

    def add(self, row: Row, where: str) -> None:
        for key in row:
            if key not in FIELDS:
                raise ConfigError(f"{where}: {unknown_setting(str(key), FIELDS).replace('setting', 'field')}")
        group, num_prompt_tokens = _text(row, "prefix_group"), _integer(row, "prompt_tokens", 1, MAX_TOKENS, where)
        num_shared = _integer(row, "prefix_tokens", 0, MAX_TOKENS, where, default=0)
        if num_shared > num_prompt_tokens:
            raise ConfigError(f"{where}: prefix_tokens is {num_shared}, more than prompt_tokens")
        if num_shared and not group:
            raise ConfigError(f"{where}: prefix_tokens needs a prefix_group")
        self._append(
            arrivals=_number(row, "arrival", where),
            prompt_tokens=num_prompt_tokens,
            output_tokens=_integer(row, "output_tokens", 1, MAX_TOKENS, where),
            priorities=Priority.from_wire(_integer(row, "priority", 0, 4, where, default=0)),
            tenants=_index(self._tenants, _text(row, "tenant")),
            sessions=_index(self._sessions, _text(row, "session")),
            prefix_groups=_index(self._groups, group),
            prefix_tokens=num_shared,
            deadlines=_number(row, "deadline_s", where, default=math.inf),
        )

    def add_published(self, row: Row, columns: tuple[str, str, str], where: str) -> None:
        arrival, prompt, output = columns
        num_output_tokens = _integer(row, output, 0, MAX_TOKENS, where)
        if num_output_tokens or columns == AZURE:
            self._append(
                arrivals=_date(row, arrival, where) if columns == AZURE else _number(row, arrival, where),
                prompt_tokens=_integer(row, prompt, 1, MAX_TOKENS, where),
                output_tokens=max(1, num_output_tokens),
            )

    def _append(self, **values: float) -> None:
        for name, value in values.items():
            self._columns.setdefault(name, []).append(value)

    def trace(self, path: Path) -> Trace:
        if not self._columns:
            raise ConfigError(f"the trace {path} has no requests")
        columns = {name: np.array(column) for name, column in self._columns.items()}
        order = np.argsort(columns["arrivals"], kind="stable")
        columns["arrivals"] = columns["arrivals"] - columns["arrivals"].min()
        return Trace.of(
            **{name: column[order] for name, column in columns.items()},
            tenant_names=tuple(self._tenants),
            session_names=tuple(self._sessions),
            prefix_names=tuple(self._groups),
        )


def _json_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[str, Row]]:
    for number, content in enumerate(lines, 1):
        if not content.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(content)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: it must be an object with {', '.join(REQUIRED)}")
        yield where, row


def _read_csv(lines: Iterable[str], path: Path, requests: _Requests) -> None:
    reader = csv.DictReader(lines)
    header = reader.fieldnames or ()
    published = next((columns for columns in (AZURE, BURSTGPT) if set(columns) <= set(header)), None)
    missing = [name for name in REQUIRED if name not in header]
    if missing and published is None:
        raise ConfigError(f"{path}: the header line has no {', '.join(missing)}")
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        values = {name: value for name, value in row.items() if value is not None}
        if None in row:
            raise ConfigError(f"{where}: more values than the header has names")
        if published is None:
            requests.add({name: value for name, value in values.items() if value}, where)
        elif len(values) < len(header):
            raise ConfigError(f"{where}: {len(values)} values, the header names {len(header)}")
        else:
            requests.add_published(values, published, where)


def _index(names: dict[str, int], name: str) -> int:
    if not name and "" not in names:
        return NOBODY
    return names.setdefault(name, len(names))


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    return "" if value is None else str(value)


def _number(row: Row, name: str, where: str, *, default: float | None = None) -> float:
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


def _integer(row: Row, name: str, low: int, high: int, where: str, *, default: int | None = None) -> int:
    number = _number(row, name, where, default=default)
    if number != int(number) or not low <= number <= high:
        raise ConfigError(f"{where}: {name} is {row[name]!r}: it must be a whole number from {low} to {high}")
    return int(number)


def _date(row: Row, name: str, where: str) -> float:
    text = str(row[name])
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"{where}: {name} is {text!r}: it must be a date and time") from None
