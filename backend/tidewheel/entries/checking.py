import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tidewheel.adapter.one_shot import contradictions, signature_of
from tidewheel.adapter.repository_entry import ModelEntry, ModelSettings, known_settings, resolve_settings, versions
from tidewheel.config import MODEL_NOT_SET, EngineConfig
from tidewheel.entries.config_rules import CONFIG_RULES, backend, declared_tensors
from tidewheel.entries.entry import CONFIG_NAME, Entry, UnreadableConfig, read_entry, served_version
from tidewheel.entries.findings import CheckReport, Edit, Field, Finding, Problem, error, json_fields, place_of
from tidewheel.errors import ConfigError
from tidewheel.lora import MULTI_LORA
from tidewheel.model_formats import foreign_format
from tidewheel.regular_files import read_text
from tidewheel.settings import ARGUMENTS, HONOURED, WITHOUT_EFFECT, flattened, nearest

_UNREAD = (("schema", "error"), ("model-json", "error"))  # with these, a model that is set may not be seen
_MAPS = ("parameters", "priority_queue_policy")  # fields of `ModelConfig`

_NAME = re.compile(r"\w+")
_NO_MODEL = "no/model"  # stands for a model that is not set


def find_entries(path: Path) -> tuple[Path, list[str]]:
    """Return the repository at a path and the names of all its entries, or of the one at the path.

    Raise `ConfigError` without an entry.
    """
    folder = path.parent if path.name == CONFIG_NAME else path
    if folder.name in ("", ".."):
        folder = folder.resolve()
    if path.exists() and (refusal := foreign_format(path)):
        raise ConfigError(refusal)
    if not folder.is_dir():
        raise ConfigError(f"{str(path)!r}: no such folder")
    if (folder / CONFIG_NAME).is_file():
        return folder.parent, [folder.name]
    names = sorted(found.parent.name for found in folder.glob(f"*/{CONFIG_NAME}"))
    if not names:
        raise ConfigError(
            f"{str(path)!r} is no entry and no model repository: neither it nor a folder in it has a {CONFIG_NAME}"
        )
    return folder, names


def check(path: Path, *, is_this_machine: bool = True) -> CheckReport:
    """Raise `ConfigError` if the path holds no entries."""
    (repository, names), report = find_entries(path), CheckReport()
    read = {found.parent.name: _read(found.parent) for found in sorted(repository.glob(f"*/{CONFIG_NAME}"))}
    others = {name: entry.config for name, entry in read.items() if isinstance(entry, Entry)}
    if not (path / CONFIG_NAME).is_file() and path.name != CONFIG_NAME:
        report.findings.extend(_without_config(repository))
    for name in names:
        entry = read[name]
        if isinstance(entry, UnreadableConfig):
            report.checked.append(name)
            report.findings.append(entry.finding)
        else:
            _check_entry(replace(entry, others=others, is_this_machine=is_this_machine), report)
    if len(report.needs) > 1:
        from tidewheel.entries.model_rules import together

        report.findings.extend(_of_folder("together", repository, error("", text)) for text in together(report.needs))
    if not report.checked and not report.count("warning"):
        message = "nothing was checked: no entry has backend: 'tidewheel'"
        report.findings.append(_of_folder("backend", path, Problem("warning", "", message)))
    return report


def _read(folder: Path) -> Entry | UnreadableConfig:
    try:
        return read_entry(folder)
    except UnreadableConfig as error:
        return error


def _check_entry(entry: Entry, report: CheckReport) -> None:
    before = report.count("error")
    of_files = sorted(_judge_files(entry), key=lambda found: (found.file, found.line or 0, found.column or 0))
    held_back = [found for found in of_files if (found.rule, found.severity) == ("transactions", "note")]
    report.findings.extend(found for found in of_files if found not in held_back)
    report.findings.extend(_judge_model(entry, report))
    has_errors = report.count("error") > before
    report.findings.extend(() if has_errors else held_back)
    is_passed_over = not entry.is_ours and not has_errors
    (report.passed_over if is_passed_over else report.checked).append(entry.name)


def _without_config(repository: Path) -> Iterator[Finding]:
    message = f"there is no {CONFIG_NAME}, and Triton does not start: remove the folder or write {CONFIG_NAME}"
    for folder in sorted(repository.iterdir()):
        is_entry = not folder.is_dir() or (folder / CONFIG_NAME).is_file() or versions(folder)
        if not is_entry and not folder.name.startswith("."):
            yield _of_folder("folder", folder, error("", message))


def _of_folder(rule: str, folder: Path, problem: Problem) -> Finding:
    return Finding(rule, problem.severity, str(folder), None, None, "", problem.message)


def _judge_files(entry: Entry) -> Iterator[Finding]:
    if not entry.is_ours:
        yield from located(entry, "backend", backend(entry))
        return
    of_files = [found for name, rule in CONFIG_RULES.items() for found in located(entry, name, rule(entry))]
    yield from of_files
    judged = judge_settings(entry)
    is_unread = any((found.rule, found.severity) in _UNREAD for found in of_files)
    is_misspelt = any(problem.right_name == "model" for problem in judged.problems)
    problems = (one for one in judged.problems if not (is_unread or is_misspelt) or one.message != MODEL_NOT_SET)
    yield from located(entry, "settings", problems)


def _judge_model(entry: Entry, report: CheckReport) -> Iterator[Finding]:
    settings = judge_settings(entry).settings if entry.is_ours else None
    if settings is None or settings.owner.name != entry.name:
        return
    if settings.engine.kind != "text":
        yield from located(entry, "model", _judge_one_shot(entry, settings.engine, report))
        return
    # It imports torch, which takes seconds.
    from tidewheel.entries.model_rules import ModelJudge

    judge = ModelJudge(settings.engine, report, entry.name, is_this_machine=entry.is_this_machine)
    yield from located(entry, "model", (at_setting(entry, problem) for problem in judge.problems()))
    for name, reason in judge.refused_adapters():
        if "lora_modules" in entry.settings:
            problem = at_setting(entry, error("", f"lora_modules: {name}: {reason}"))
        else:
            problem = error(name, f"{name}: {reason}", file=entry.lora_path)
        yield from located(entry, "multi-lora", [problem])


def _judge_one_shot(entry: Entry, config: EngineConfig, report: CheckReport) -> Iterator[Problem]:
    try:
        signature = signature_of(config)
    except ConfigError as refusal:
        yield at_setting(entry, error("", str(refusal)))
        return
    report.models[entry.name] = f"{config.adapter}, inputs {', '.join(spec.describe() for spec in signature.inputs)}"
    for field_path, message in contradictions(declared_tensors(entry), signature):
        yield error(field_path, message)


def located(entry: Entry, rule: str, problems: Iterable[Problem]) -> Iterator[Finding]:
    for problem in problems:
        path = problem.file or entry.path
        text, found = "", None
        if path == entry.path:
            text, found = entry.text, _nearest_field(entry.fields, problem.field)
        elif path in (entry.json_path, entry.lora_path):
            text = read_text(path) or ""
            found = next((key for key in reversed(json_fields(text)) if key.name == problem.field), None)
        line, column = place_of(text, found.start) if found else (None, None)
        edit = Edit(*_renamed(text, found), problem.right_name) if found and problem.right_name else None
        yield Finding(rule, problem.severity, str(path), line, column, problem.field, problem.message, edit)


def _nearest_field(fields: Mapping[str, Field], path: str) -> Field | None:
    while path:
        if path in fields:
            key = fields[path].child("key") if fields[path].name in _MAPS else None
            return key or fields[path]
        path = path.rpartition(".")[0]
    return None


def _renamed(text: str, found: Field) -> tuple[int, str]:
    if found.name == "key":
        start = found.value_start + 1
        return start, text[start : start + len(found.value)]
    return found.name_start, found.name


class SettingsJudgement(NamedTuple):
    problems: list[Problem]
    settings: ModelSettings | None  # without the refused ones; None: there is no model to judge


def judge_settings(entry: Entry) -> SettingsJudgement:
    """Resolve the settings as the load does. Leave out each refused setting until the rest is accepted."""
    parameters, from_json = dict(entry.parameters), dict(entry.model_json)
    problems: list[Problem] = []
    while True:
        model = ModelEntry(
            name=entry.name,
            folder=entry.folder.resolve(),
            version=served_version(entry.folder, entry.config),
            parameters=parameters,
            model_json=from_json,
            max_batch_size=int(entry.parameters.get("io_dialect") == "trtllm"),  # as completed
            config=declared_tensors(entry),
        )
        try:
            settings = resolve_settings(model)
            is_known = settings.engine.model != _NO_MODEL
            notes = _without_effect(entry, {**parameters, **from_json})
            return SettingsJudgement([*problems, *notes], settings if is_known else None)
        except ConfigError as refusal:
            settings_left = {**parameters, **from_json}
            if str(refusal).startswith(str(model.folder / model.version / MULTI_LORA)):
                key = "enable_lora"  # without which the file is not read
                problems.append(error("", str(refusal), file=entry.lora_path))
            else:
                key = _named(str(refusal), settings_left)
                problems.append(_problem(entry, key, str(refusal), parameters))
            if key == "engine_of" or (not key and {"model", "engine_of"} & settings_left.keys()):
                return SettingsJudgement(problems, None)
            if key:
                (parameters if key in parameters else from_json).pop(key)
            else:
                parameters["model"] = _NO_MODEL


def is_unknown_setting(problem: Problem) -> bool:
    return problem.message.startswith("unknown setting ")


def at_setting(entry: Entry, problem: Problem) -> Problem:
    first = problem.message.split()[0].rstrip(":")
    words = problem.message if problem.file is None else first if first.isidentifier() else ""
    key = _named(words, entry.settings)
    if not key:
        return problem
    return _problem(entry, key, problem.message, entry.parameters)._replace(severity=problem.severity)


def _named(message: str, settings: Mapping[str, object]) -> str:
    names = {name: name.partition(".")[0] for name in flattened(settings)}
    here = {HONOURED.get(name, name): key for name, key in names.items()} | names | {key: key for key in settings}
    quoted = next((key for key in settings if message.startswith(f"unknown setting {key!r}")), None)
    return quoted or next((here[word] for word in _NAME.findall(message) if word in here), "")


def _problem(entry: Entry, key: str, message: str, parameters: Mapping[str, str]) -> Problem:
    if not key and "engine_of" in entry.settings:
        message = f"engine_of is {entry.engine_of!r}, whose engine cannot be had: {message}"
        key = "engine_of"
    if not key:
        return error("parameters", message)
    known = known_settings() | ARGUMENTS
    right_name = "" if key in known else nearest(key, (known_settings() | HONOURED.keys()) - entry.settings.keys())
    if key not in parameters:
        return error(key, message, right_name=right_name, file=entry.json_path)
    return error(f"parameters.{key}", message, right_name=right_name)


def _without_effect(entry: Entry, settings: Mapping[str, object]) -> Iterator[Problem]:
    for name in flattened(settings):
        if name in WITHOUT_EFFECT:
            message = f"{name} has no effect here: {WITHOUT_EFFECT[name]}"
            yield _problem(entry, name.partition(".")[0], message, entry.parameters)._replace(severity="note")
