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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

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


class _Row(NamedTuple):
    where: str
    values: Mapping[str, object]

    def text(self, name: str) -> str:
        value = self.values.get(name)
        return "" if value is None else str(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if value is None:
            raise ConfigError(f"{self.where}: {name} is missing")
        number = math.nan
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            with suppress(ValueError):
                number = float(value)
        if math.isnan(number) or (math.isinf(number) and name in self.values) or number < 0:
            raise ConfigError(f"{self.where}: {name} is {value!r}: it must be a number of 0 or more")
        return number

    def whole(self, name: str, low: int = 1, high: int = MAX_TOKENS, default: int | None = None) -> int:
        number = self.number(name, default)
        if number != int(number) or not low <= number <= high:
            raise ConfigError(
                f"{self.where}: {name} is {self.values[name]!r}: it must be a whole number from {low} to {high}"
            )
        return int(number)

    def date(self, name: str) -> float:
        text = self.text(name)
        try:
            return datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise ConfigError(f"{self.where}: {name} is {text!r}: it must be a date and time") from None


class _Requests:
    """Columns of a `Trace` in the order of the file."""

    def __init__(self) -> None:
        self._columns: dict[str, list[float]] = {}
        self._tenants: dict[str, int] = {"": 0}
        self._sessions: dict[str, int] = {}
        self._groups: dict[str, int] = {}

    def add(self, row: _Row) -> None:
        for key in row.values:
            if key not in FIELDS:
                raise ConfigError(f"{row.where}: {unknown_setting(key, FIELDS).replace('setting', 'field')}")
        group, num_prompt_tokens = row.text("prefix_group"), row.whole("prompt_tokens")
        num_shared = row.whole("prefix_tokens", 0, default=0)
        if num_shared > num_prompt_tokens:
            raise ConfigError(f"{row.where}: prefix_tokens is {num_shared}, more than prompt_tokens")
        if num_shared and not group:
            raise ConfigError(f"{row.where}: prefix_tokens needs a prefix_group")
        self._append(
            arrivals=row.number("arrival"),
            prompt_tokens=num_prompt_tokens,
            output_tokens=row.whole("output_tokens"),
            priorities=Priority.from_wire(row.whole("priority", 0, 4, default=0)),
            tenants=_index(self._tenants, row.text("tenant")),
            sessions=_index(self._sessions, row.text("session")),
            prefix_groups=_index(self._groups, group),
            prefix_tokens=num_shared,
            deadlines=row.number("deadline_s", math.inf),
        )

    def add_published(self, row: _Row, columns: tuple[str, str, str]) -> None:
        arrival, prompt, output = columns
        num_output_tokens = row.whole(output, 0)
        if num_output_tokens or columns == AZURE:
            self._append(
                arrivals=row.date(arrival) if columns == AZURE else row.number(arrival),
                prompt_tokens=row.whole(prompt),
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


def _index(names: dict[str, int], name: str) -> int:
    return names.setdefault(name, len(names)) if name or name in names else NOBODY


def read_trace(path: Path) -> Trace:
    """Read a trace, sorted by arrival, the first at 0; raise `ConfigError` naming file, line and field."""
    requests = _Requests()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            (_read_csv if path.suffix == ".csv" else _read_json)(file, path, requests)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None
    return requests.trace(path)


def _read_json(lines: Iterable[str], path: Path, requests: _Requests) -> None:
    for number, content in enumerate(lines, 1):
        if not content.strip():
            continue
        where = f"{path}, line {number}"
        try:
            values = json.loads(content)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: it must be an object with {', '.join(REQUIRED)}")
        requests.add(_Row(where, values))


def _read_csv(lines: Iterable[str], path: Path, requests: _Requests) -> None:
    reader = csv.DictReader(lines)
    header = reader.fieldnames or ()
    published = next((columns for columns in (AZURE, BURSTGPT) if set(columns) <= set(header)), None)
    missing = [name for name in REQUIRED if name not in header]
    if missing and published is None:
        raise ConfigError(f"{path}: the header line has no {', '.join(missing)}")
    for values in reader:
        row = _Row(f"{path}, line {reader.line_num}", {name: value for name, value in values.items() if value})
        if None in values:
            raise ConfigError(f"{row.where}: more values than the header has names")
        if published is None:
            requests.add(row)
        elif None in values.values():
            found = len(header) - list(values.values()).count(None)
            raise ConfigError(f"{row.where}: {found} values, the header names {len(header)}")
        else:
            requests.add_published(row, published)
