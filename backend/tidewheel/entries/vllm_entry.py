"""Make entries of Triton's vLLM backend ours: what the check refuses in them is taken out, and said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tidewheel.adapter.repository_entry import BACKEND as OURS
from tidewheel.entries.checking import located
from tidewheel.entries.entry import CONFIG_NAME, Entry, UnreadableConfig, make_entry, parse_config, read_config
from tidewheel.entries.entry_rules import ENTRY_RULES
from tidewheel.entries.finding import Edit, Finding, Problem
from tidewheel.entries.migration import Migration, NewEntry
from tidewheel.entries.repairs import edited
from tidewheel.entries.setting_rules import is_unknown_setting, judge_settings
from tidewheel.entries.source_text import Field
from tidewheel.errors import ConfigError
from tidewheel.server.repository import resolve_model

BACKEND = "vllm"
LORA_NAME = "multi_lora.json"
_REST_OF_LINE = re.compile(r"[ \t]*[,;]?[ \t]*(#[^\n]*)?")


def read_entry(folder: Path) -> Entry:
    """Raise `ConfigError`."""
    read = read_config(folder / CONFIG_NAME)
    if isinstance(read, UnreadableConfig):
        raise ConfigError(f"{folder / CONFIG_NAME}:{read.line}:{read.column}: {read.message}")
    return make_entry(folder, *read, {})


def from_vllm(original: Entry, model: str = "") -> Migration:
    """Keep names, comments and layout. Empty `model`: that of the entry. Raise `ConfigError`."""
    if not original.model_json:
        raise ConfigError(
            f"{original.json_path} is missing, empty or no JSON: the vLLM backend has its settings there"
        )
    backend = original.fields["backend"]
    old = original.text[backend.value_start : backend.end]
    entry = _with_edits(original, [Edit(backend.value_start, old, f'"{OURS}"')])
    if model:
        entry = replace(entry, model_json={**entry.model_json, "model": resolve_model(model)})
    lost = list(_lost_adapters(original))
    while (refused := next(_refused(entry), None)) is not None:
        rule, problem = refused
        lost += located(original, rule, [problem])
        entry = _without(entry, problem)
    problems = [problem for problem in judge_settings(entry).problems if is_unknown_setting(problem)]
    unknown = list(located(original, "settings", problems))
    settings = f"{json.dumps(entry.model_json, indent=4)}\n"
    files = {CONFIG_NAME: entry.text, str(entry.json_path.relative_to(entry.folder)): settings}
    return Migration([NewEntry(entry.name, files, entry.folder, (LORA_NAME,))], lost, unknown)


def _lost_adapters(entry: Entry) -> Iterator[Finding]:
    path = entry.json_path.with_name(LORA_NAME)
    if path.is_file():
        yield from located(
            entry, "settings", [Problem("error", "", "LoRA is not offered: serve merged weights", file=path)]
        )


def _refused(entry: Entry) -> Iterator[tuple[str, Problem]]:
    """Yield (rule, problem) for known fields of the entry's files that are refused or have no effect."""
    for name, rule in ENTRY_RULES.items():
        refused = (problem for problem in rule(entry) if problem.severity == "error")
        yield from ((name, problem) for problem in refused if _is_there(entry, problem))
    for problem in judge_settings(entry).problems:
        if _is_there(entry, problem) and not is_unknown_setting(problem):
            yield "settings", problem


def _is_there(entry: Entry, problem: Problem) -> bool:
    return problem.field in (entry.model_json if problem.file == entry.json_path else entry.fields)


def _without(entry: Entry, problem: Problem) -> Entry:
    if problem.file == entry.json_path:
        return replace(entry, model_json={k: v for k, v in entry.model_json.items() if k != problem.field})
    return _with_edits(entry, _removal(entry, entry.fields[problem.field]))


def _with_edits(entry: Entry, edits: Sequence[Edit]) -> Entry:
    text = edited(entry.text, edits)
    return replace(entry, text=text, config=parse_config(text))


def _removal(entry: Entry, field: Field) -> list[Edit]:
    """Cut a field, or one element of a list of messages, with its line if nothing else is on it."""
    text, is_element = entry.text, bool(field.list_end and field.fields)
    start = field.start if is_element else field.name_start
    end = field.end if is_element else field.list_end or field.end
    rest = _REST_OF_LINE.match(text, end)
    end = rest.end() if rest else end
    is_last = is_element and text[end:].lstrip().startswith("]")
    commas = list(_comma_before(entry, field)) if is_last else []
    line = text.rfind("\n", 0, start) + 1
    if not text[line:start].strip() and text[end : end + 1] in ("\n", ""):
        start, end = line, end + 1
    return [Edit(start, text[start:end], ""), *commas]


def _comma_before(entry: Entry, field: Field) -> Iterator[Edit]:
    """Yield the edit that removes the comma before a list's last element, if there is one."""
    ends = [other.end for other in entry.fields.values() if other.list_end == field.list_end]
    before = max((end for end in ends if end <= field.start), default=field.start)
    comma = entry.text.find(",", before, field.start)
    if comma >= 0:
        yield Edit(comma, ",", "")
