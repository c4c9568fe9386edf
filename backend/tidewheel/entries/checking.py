"""Check entries of a model repository: every rule, and where in the files its findings are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tidewheel.entries.entry import CONFIG_NAME, Entry, Machine, UnreadableConfig, make_entry, read_config
from tidewheel.entries.entry_rules import ENTRY_RULES, backend
from tidewheel.entries.finding import Edit, Finding, Problem, Severity
from tidewheel.entries.setting_rules import at_setting, judge_settings
from tidewheel.entries.source_text import Field, json_fields, place_of
from tidewheel.errors import ConfigError
from tidewheel.frontend.model_files import read_text

if TYPE_CHECKING:
    from tidewheel.config import EngineConfig
    from tidewheel.entries.model_rules import Needs

# Beside those of `ENTRY_RULES`.
RULES = ("syntax", "backend", "settings", "model", "together")


class Report(NamedTuple):
    checked: list[str]  # names of entries
    passed_over: list[str]
    findings: list[Finding]

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)


class Target(NamedTuple):
    repository: Path
    names: list[str]


def find_target(path: Path) -> Target:
    """Return the entries that a path stands for: all of a repository, or one. Raise `ConfigError`."""
    folder = path.parent if path.name == CONFIG_NAME else path
    if folder.name in ("", ".."):
        folder = folder.resolve()
    if not folder.is_dir():
        raise ConfigError(f"{str(path)!r}: no such folder")
    if (folder / CONFIG_NAME).is_file():
        return Target(folder.parent, [folder.name])
    names = sorted(found.parent.name for found in folder.glob(f"*/{CONFIG_NAME}"))
    if not names:
        raise ConfigError(
            f"{str(path)!r} is no entry and no model repository: neither it nor a folder in it has a {CONFIG_NAME}"
        )
    return Target(folder, names)


def check(path: Path, *, is_this_machine: bool = True) -> Report:
    """Raise `ConfigError` if there is nothing to check."""
    target = find_target(path)
    configs = {found.parent.name: read_config(found) for found in sorted(target.repository.glob(f"*/{CONFIG_NAME}"))}
    others = {name: read[1] for name, read in configs.items() if not isinstance(read, UnreadableConfig)}
    report = Report([], [], [])
    needs: dict[str, tuple[EngineConfig, Needs]] = {}
    for name in target.names:
        read, folder = configs[name], target.repository / name
        if isinstance(read, UnreadableConfig):
            report.checked.append(name)
            report.findings.append(_unreadable(folder / CONFIG_NAME, read))
            continue
        entry = make_entry(folder, *read, others, Machine.here() if is_this_machine else None)
        found = list(_judge(entry, needs))
        is_passed_over = not entry.is_ours and all(finding.severity == "note" for finding in found)
        (report.passed_over if is_passed_over else report.checked).append(name)
        report.findings.extend(sorted(found, key=lambda found: (found.file, found.line or 0, found.column or 0)))
    report.findings.extend(_together(target.repository, needs))
    return report


def _unreadable(path: Path, read: UnreadableConfig) -> Finding:
    return Finding("syntax", "error", str(path), read.line, read.column, "", read.message)


def _judge(entry: Entry, needs: dict[str, tuple[EngineConfig, Needs]]) -> Iterator[Finding]:
    if not entry.is_ours:
        yield from located(entry, "backend", backend(entry))
        return
    for name, rule in ENTRY_RULES.items():
        yield from located(entry, name, rule(entry))
    judged = judge_settings(entry)
    yield from located(entry, "settings", judged.problems)
    if judged.settings is None or judged.settings.owner.name != entry.name:
        return
    # It imports torch, which takes seconds.
    from tidewheel.entries.model_rules import judge_model

    model = judge_model(judged.settings.engine, is_this_machine=entry.machine is not None)
    yield from located(entry, "model", (at_setting(entry, problem) for problem in model.problems))
    if model.needs is not None:
        needs[entry.name] = (judged.settings.engine, model.needs)


def located(entry: Entry, rule: str, problems: Iterable[Problem]) -> Iterator[Finding]:
    """Turn problems of a rule into findings."""
    for problem in problems:
        path = problem.file or entry.path
        text, field = "", None
        if path == entry.path:
            text, field = entry.text, _nearest_field(entry.fields, problem.field)
        elif path == entry.json_path:
            text = read_text(path) or ""
            field = next((key for key in reversed(json_fields(text)) if key.name == problem.field), None)
        line, column = place_of(text, field.start) if field else (None, None)
        edit = Edit(*_renamed(text, field), problem.right_name) if field and problem.right_name else None
        yield Finding(rule, problem.severity, str(path), line, column, problem.field, problem.message, edit)


def _nearest_field(fields: Mapping[str, Field], path: str) -> Field | None:
    """Return the field at the path, or the innermost one around it; of a parameter, its key."""
    while path:
        if path in fields:
            return fields[path].child("key") or fields[path]
        path = path.rpartition(".")[0]
    return None


def _renamed(text: str, field: Field) -> tuple[int, str]:
    """Return place and text of the name that is wrong: of a parameter, the value of `key`."""
    if field.name == "key":
        start = field.value_start + 1
        return start, text[start : start + len(field.value)]
    return field.name_start, field.name


def _together(repository: Path, needs: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge engines that each fit, and all of them do not."""
    if len(needs) < 2:
        return
    from tidewheel.entries.model_rules import together

    for message in together(needs):
        yield Finding("together", "error", str(repository), None, None, "", message)
