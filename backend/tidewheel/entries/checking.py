"""Check entries of a model repository: every rule, and where in the files its findings are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tidewheel.adapter.repository_entry import BACKEND
from tidewheel.config import MODEL_NOT_SET
from tidewheel.entries.entry import CONFIG_NAME, Entry, Machine, UnreadableConfig, make_entry, read_config, versions
from tidewheel.entries.entry_rules import ENTRY_RULES, backend
from tidewheel.entries.finding import Edit, Finding, Problem, Severity
from tidewheel.entries.setting_rules import at_setting, judge_settings
from tidewheel.entries.source_text import Field, json_fields, place_of
from tidewheel.errors import ConfigError
from tidewheel.frontend.model_files import read_text
from tidewheel.model_formats import foreign_format

if TYPE_CHECKING:
    from tidewheel.config import EngineConfig
    from tidewheel.entries.model_rules import Needs

# Beside those of `ENTRY_RULES`.
RULES = ("syntax", "folder", "backend", "settings", "model", "together")
_UNREAD = (("schema", "error"), ("model-json", "error"))  # a model that is set may not be seen
_MAPS = ("parameters", "priority_queue_policy")  # fields of `ModelConfig`


Tell = Callable[[Finding], None]


class Report(NamedTuple):
    checked: list[str]  # names of entries
    passed_over: list[str]
    findings: list[Finding]
    models: dict[str, str]  # by name: architecture, and whether it is native or runs through transformers
    kv_cache: dict[str, str]  # by name: what a token and the longest request take of it
    tell: Tell | None  # called with each finding when it is found

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            if self.tell is not None:
                self.tell(finding)

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
    if path.exists() and (refusal := foreign_format(path)):
        raise ConfigError(refusal)
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


def check(path: Path, *, is_this_machine: bool = True, tell: Tell | None = None) -> Report:
    """Raise `ConfigError` if there is nothing to check."""
    target = find_target(path)
    configs = {found.parent.name: read_config(found) for found in sorted(target.repository.glob(f"*/{CONFIG_NAME}"))}
    others = {name: read[1] for name, read in configs.items() if not isinstance(read, UnreadableConfig)}
    report = Report([], [], [], {}, {}, tell)
    if not (path / CONFIG_NAME).is_file() and path.name != CONFIG_NAME:
        report.add(_without_config(target.repository))
    needs: dict[str, tuple[EngineConfig, Needs]] = {}
    for name in target.names:
        read, folder = configs[name], target.repository / name
        if isinstance(read, UnreadableConfig):
            report.checked.append(name)
            report.add([_unreadable(folder / CONFIG_NAME, read)])
            continue
        entry = make_entry(folder, *read, others, Machine.here() if is_this_machine else None)
        before = report.count("error")
        of_files = sorted(_judge_files(entry), key=lambda found: (found.file, found.line or 0, found.column or 0))
        held_back = [found for found in of_files if (found.rule, found.severity) == ("transactions", "note")]
        report.add(found for found in of_files if found not in held_back)
        report.add(_judge_model(entry, needs, report))
        has_errors = report.count("error") > before
        report.add([] if has_errors else held_back)
        is_passed_over = not entry.is_ours and not has_errors
        (report.passed_over if is_passed_over else report.checked).append(name)
    report.add(_together(target.repository, needs))
    if not report.checked and not report.count("warning"):
        message = f"nothing was checked: no entry has backend: {BACKEND!r}"
        report.add([_of_folder("backend", "warning", path, message)])
    return report


def _without_config(repository: Path) -> Iterator[Finding]:
    """Find folders with which Triton does not start. One with a version may be of a backend that needs no file."""
    for folder in sorted(repository.iterdir()):
        is_entry = not folder.is_dir() or (folder / CONFIG_NAME).is_file() or versions(folder)
        if not is_entry and not folder.name.startswith("."):
            message = (
                f"there is no {CONFIG_NAME}, and Triton does not start: remove the folder or write {CONFIG_NAME}"
            )
            yield _of_folder("folder", "error", folder, message)


def _of_folder(rule: str, severity: Severity, folder: Path, message: str) -> Finding:
    return Finding(rule, severity, str(folder), None, None, "", message)


def _unreadable(path: Path, read: UnreadableConfig) -> Finding:
    return Finding("syntax", "error", str(path), read.line, read.column, "", read.message)


def _judge_files(entry: Entry) -> Iterator[Finding]:
    if not entry.is_ours:
        yield from located(entry, "backend", backend(entry))
        return
    of_files = [found for name, rule in ENTRY_RULES.items() for found in located(entry, name, rule(entry))]
    yield from of_files
    judged = judge_settings(entry)
    is_unread = any((found.rule, found.severity) in _UNREAD for found in of_files)
    is_misspelt = any(problem.right_name == "model" for problem in judged.problems)
    problems = (one for one in judged.problems if not (is_unread or is_misspelt) or one.message != MODEL_NOT_SET)
    yield from located(entry, "settings", problems)


def _judge_model(entry: Entry, needs: dict[str, tuple[EngineConfig, Needs]], report: Report) -> Iterator[Finding]:
    """Yield the findings of an entry's model. Record its implementation in `report`, its memory in `needs`."""
    settings = judge_settings(entry).settings if entry.is_ours else None
    if settings is None or settings.owner.name != entry.name:
        return
    # It imports torch, which takes seconds.
    from tidewheel.entries.model_rules import ModelJudge

    judge = ModelJudge(settings.engine, is_this_machine=entry.machine is not None)
    yield from located(entry, "model", (at_setting(entry, problem) for problem in judge.problems()))
    if judge.needs is not None:
        needs[entry.name] = (settings.engine, judge.needs)
    if judge.implementation:
        report.models[entry.name] = judge.implementation
    if judge.cache_of_a_request:
        report.kv_cache[entry.name] = judge.cache_of_a_request


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
            key = fields[path].child("key") if fields[path].name in _MAPS else None
            return key or fields[path]
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
        yield _of_folder("together", "error", repository, message)
