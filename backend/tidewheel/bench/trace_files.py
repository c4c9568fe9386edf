"""Azure and BurstGPT traces, beside the project's JSONL and CSV.

Azure LLM inference traces (Patel and others, Splitwise, ISCA 2024; AzurePublicDataset on GitHub):
`TIMESTAMP,ContextTokens,GeneratedTokens`, with dates. BurstGPT (Wang and others, arXiv 2401.17644):
`Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`, with seconds; rows without response tokens are
failed requests and dropped. Other columns are ignored.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.request import Priority
from tidewheel.simulate.trace_files import MAX_TOKENS, read_trace
from tidewheel.simulate.traces import NOBODY, Trace


class _Columns(NamedTuple):
    time: str
    prompt: str
    output: str
    times_are_dates: bool
    failed_without_output: bool


_AZURE = _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", True, False)
_BURSTGPT = _Columns("Timestamp", "Request tokens", "Response tokens", False, True)


def read_any_trace(path: Path) -> Trace:
    """Read a trace, known by its header; sort it and start it at 0.

    Raise `ConfigError` naming file and line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader([file.readline()]), [])
            columns = next((c for c in (_AZURE, _BURSTGPT) if set(c[:3]) <= set(header)), None)
            if columns is None:
                return read_trace(path)
            return _to_trace(_rows(file, header, columns, path), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None


def _to_trace(rows: Iterator[tuple[float, int, int]], path: Path) -> Trace:
    ordered = sorted(rows)
    if not ordered:
        raise ConfigError(f"the trace {path} has no requests")
    arrivals, prompts, outputs = (np.array(column) for column in zip(*ordered, strict=True))
    count = len(ordered)
    return Trace(
        arrivals=(arrivals - arrivals[0]).astype(np.float64),
        prompt_tokens=prompts.astype(np.int32),
        output_tokens=outputs.astype(np.int32),
        priorities=np.full(count, Priority.NORMAL, dtype=np.int32),
        tenants=np.zeros(count, dtype=np.int32),
        sessions=np.full(count, NOBODY, dtype=np.int32),
        prefix_groups=np.full(count, NOBODY, dtype=np.int32),
        prefix_tokens=np.zeros(count, dtype=np.int32),
        deadlines=np.full(count, np.inf),
    )


def _rows(lines: Iterator[str], header: list[str], columns: _Columns, path: Path) -> Iterator[tuple[float, int, int]]:
    for number, values in enumerate(csv.reader(lines), 2):
        if not values:
            continue
        where = f"{path}, line {number}"
        if len(values) < len(header):
            raise ConfigError(f"{where}: {len(values)} values, the header names {len(header)}")
        row = dict(zip(header, values, strict=False))
        num_output_tokens = _tokens(row, columns.output, where, least=0)
        if num_output_tokens or not columns.failed_without_output:
            at = _date(row, where) if columns.times_are_dates else _seconds(row, columns.time, where)
            yield at, _tokens(row, columns.prompt, where, least=1), max(1, num_output_tokens)


def _date(row: dict[str, str], where: str) -> float:
    text = row[_AZURE.time]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP is {text!r}: it must be a date and time") from None


def _seconds(row: dict[str, str], name: str, where: str) -> float:
    try:
        seconds = float(row[name])
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"{where}: {name} is {row[name]!r}: it must be a number of 0 or more")
    return seconds


def _tokens(row: dict[str, str], name: str, where: str, *, least: int) -> int:
    text = row[name]
    if not (text.strip().isdecimal() and least <= int(text) <= MAX_TOKENS):
        raise ConfigError(f"{where}: {name} is {text!r}: it must be a whole number from {least} to {MAX_TOKENS}")
    return int(text)
