"""Migration of model repository entries from Triton's vLLM and TensorRT-LLM backends."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tritonclient.grpc import model_config_pb2

from tidewheel.adapter.repository_entry import BACKEND
from tidewheel.adapter.tensors import INPUTS
from tidewheel.entries.checking import find_entries, is_unknown_setting, judge_settings, located
from tidewheel.entries.config_rules import CONFIG_RULES
from tidewheel.entries.entry import CONFIG_NAME, Entry, parse_config, read_entry
from tidewheel.entries.findings import Edit, Field, Finding, Problem, edited, error, warning
from tidewheel.errors import ConfigError
from tidewheel.server.repository import entry_text, resolve_model
from tidewheel.settings import GIB

TRTLLM_NAME = "tensorrt_llm"  # of the samples' engine; newer samples have the backend python
TRTLLM_NAME_PARAMETER = "tensorrt_llm_model_name"
TRTLLM_BLOCK_SIZE = 64
_REST_OF_LINE = re.compile(r"[ \t]*[,;]?[ \t]*(#[^\n]*)?")
_PARAMETERS = tomllib.loads(Path(__file__).with_name("trtllm_parameters.toml").read_text(encoding="utf-8"))
_KEPT: Mapping[str, Mapping[str, Any]] = _PARAMETERS["kept"]
_LEFT_OUT = {name: group["reason"] for group in _PARAMETERS["left_out"] for name in group["names"]}


class NewEntry(NamedTuple):
    name: str
    files: dict[str, str]  # text by path in the entry's folder
    source: Path | None = None  # folder whose other files belong to the entry


class Migration(NamedTuple):
    entries: list[NewEntry]
    lost: list[Finding]  # settings and fields that are not kept, at their old places
    unknown: list[Finding]  # settings that stay, and stop the load


def migrate(path: Path, model: str = "") -> Migration:
    """Migrate an entry, or all of a repository. `model`: to serve in place of the old model. Raise `ConfigError`."""
    repository, names = find_entries(path)
    entries = [read_entry(repository / name) for name in names]
    engines = [one for one in entries if one.config.backend == "tensorrtllm" or one.name == TRTLLM_NAME]
    parts = [_parts(engine, entries) for engine in engines]
    if parts and path.resolve() != repository.resolve():
        raise ConfigError(f"{path} is a part of a model of several entries: name the model repository")
    vllm = [entry for entry in entries if entry.config.backend == "vllm"]
    if not vllm and not parts:
        raise ConfigError(f"{path} has no entry of Triton's vLLM or TensorRT-LLM backend")
    if model and len(vllm) + len(parts) > 1:
        raise ConfigError(
            f"--model is for one model, and {path} has {len(vllm) + len(parts)}: migrate each by itself"
        )
    migration = Migration([], [], [])
    for entry in vllm:
        _add_vllm(migration, entry, model)
    for one in parts:
        _add_trtllm(migration, one, model)
    replaced = {entry.name for entry in vllm} | {part.name for one in parts for part in one.all}
    migration.entries.extend(NewEntry(one.name, {}, one.folder) for one in entries if one.name not in replaced)
    return migration


def write(entries: Sequence[NewEntry], repository: Path | None) -> list[Path]:
    """Write the migrated entries to new folders of a repository, or over the old entries without one.

    Raise `ConfigError` if a new folder exists, or if a new entry would replace several old ones.
    """
    folders = [_folder_of(entry, repository) for entry in entries]
    for entry, folder in zip(entries, folders, strict=True):
        if folder != entry.source:
            if entry.source is not None:
                shutil.copytree(entry.source, folder, symlinks=True)
            (folder / "1").mkdir(parents=True, exist_ok=True)
        for name, text in entry.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    return folders


def _folder_of(entry: NewEntry, repository: Path | None) -> Path:
    if repository is None:
        if entry.source is None:
            raise ConfigError(f"--in-place: {entry.name} is made of several entries, which stay: give --out")
        return entry.source
    if (folder := repository / entry.name).exists():
        raise ConfigError(f"{folder} exists, and is not written over: give another --out")
    return folder


def _add_vllm(migration: Migration, original: Entry, model: str) -> None:
    if not original.model_json:
        raise ConfigError(
            f"{original.json_path} is missing, empty or no JSON: the vLLM backend has its settings there"
        )
    backend = original.fields["backend"]
    old = original.text[backend.value_start : backend.end]
    entry = _with_edits(original, [Edit(backend.value_start, old, f'"{BACKEND}"')])
    if model:
        entry = replace(entry, model_json={**entry.model_json, "model": resolve_model(model)})
    while (refused := next(_refused(entry), None)) is not None:
        rule, problem = refused
        migration.lost.extend(located(original, rule, [problem]))
        entry = _without(entry, problem)
    problems = [problem for problem in judge_settings(entry).problems if is_unknown_setting(problem)]
    migration.unknown.extend(located(original, "settings", problems))
    settings = f"{json.dumps(entry.model_json, indent=4)}\n"
    files = {CONFIG_NAME: entry.text, str(entry.json_path.relative_to(entry.folder)): settings}
    migration.entries.append(NewEntry(entry.name, files, entry.folder))


def _refused(entry: Entry) -> Iterator[tuple[str, Problem]]:
    for name, rule in CONFIG_RULES.items():
        refused = (problem for problem in rule(entry) if problem.severity == "error")
        yield from ((name, problem) for problem in refused if _is_there(entry, problem))
    for problem in judge_settings(entry).problems:
        is_key_without_effect = problem.severity == "note" and problem.message.startswith(f"{problem.field}.")
        if _is_there(entry, problem) and not (is_unknown_setting(problem) or is_key_without_effect):
            yield "settings", problem


def _is_there(entry: Entry, problem: Problem) -> bool:
    keys = {None: entry.fields, entry.path: entry.fields, entry.json_path: entry.model_json}
    return problem.field in keys.get(problem.file, ())


def _without(entry: Entry, problem: Problem) -> Entry:
    if problem.file == entry.json_path:
        return replace(entry, model_json={k: v for k, v in entry.model_json.items() if k != problem.field})
    return _with_edits(entry, _removal(entry, entry.fields[problem.field]))


def _with_edits(entry: Entry, edits: Sequence[Edit]) -> Entry:
    text = edited(entry.text, edits)
    return replace(entry, text=text, config=parse_config(text))


def _removal(entry: Entry, field: Field) -> list[Edit]:
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
    ends = [other.end for other in entry.fields.values() if other.list_end == field.list_end]
    before = max((end for end in ends if end <= field.start), default=field.start)
    comma = entry.text.find(",", before, field.start)
    if comma >= 0:
        yield Edit(comma, ",", "")


class TrtllmModel(NamedTuple):
    engine: Entry
    faces: list[Entry]  # that clients call: ensemble, tensorrt_llm_bls
    others: list[Entry]

    @property
    def all(self) -> list[Entry]:
        return [self.engine, *self.faces, *self.others]


def _parts(engine: Entry, entries: Sequence[Entry]) -> TrtllmModel:
    ensembles = [entry for entry in entries if engine.name in _steps(entry)]
    bls = [
        entry
        for entry in entries
        if TRTLLM_NAME_PARAMETER in entry.parameters
        and _value(entry, TRTLLM_NAME_PARAMETER, TRTLLM_NAME) == engine.name
    ]
    steps = {name for ensemble in ensembles for name in _steps(ensemble)} - {engine.name}
    return TrtllmModel(engine, [*ensembles, *bls], [entry for entry in entries if entry.name in steps])


def _steps(entry: Entry) -> set[str]:
    return {step.model_name for step in entry.config.ensemble_scheduling.step}


def _value(entry: Entry, name: str, default: str = "") -> str:
    value = entry.parameters.get(name, "").strip()
    return default if not value or value.startswith("${") else value


def _add_trtllm(migration: Migration, parts: TrtllmModel, model: str) -> None:
    if not model:
        tokenizer = next((text for part in parts.all if (text := _value(part, "tokenizer_dir"))), "")
        hint = f"; the tokenizer was in {tokenizer!r}" if tokenizer else ""
        raise ConfigError(
            f"{parts.engine.folder}: an engine of TensorRT-LLM cannot be read: name the Hugging Face folder or id "
            f"it was made of with --model{hint}"
        )
    settings: dict[str, str] = {"model": resolve_model(model), "io_dialect": "trtllm"}
    for part in parts.all:
        for finding in located(part, "settings", _keep(part, settings)):
            (migration.unknown if finding.severity == "error" else migration.lost).append(finding)
    migration.lost.extend(located(parts.engine, "native-queue", _keep_queue(parts.engine, settings)))
    decoupled = bool(parts.engine.config.model_transaction_policy.decoupled)
    first, *others = parts.faces or [parts.engine]
    twin = {"engine_of": first.name, "io_dialect": "trtllm"}
    for face, parameters in ((first, settings), *((face, twin) for face in others)):
        text = entry_text(parameters, decoupled=decoupled) + _declarations(face)
        migration.entries.append(NewEntry(face.name, {CONFIG_NAME: text}))
        migration.lost.extend(located(face, "tensors", _lost_inputs(face)))


def _declarations(face: Entry) -> str:
    ours = {spec.name for spec in INPUTS if (spec.data_type, spec.dims) == ("TYPE_INT32", (1,))}
    uint32 = model_config_pb2.DataType.Value("TYPE_UINT32")
    old = [tensor.name for tensor in face.config.input if tensor.data_type == uint32 and tensor.name in ours]
    lines = [f'  {{ name: "{name}" data_type: TYPE_UINT32 dims: [ 1 ] optional: true }}' for name in old]
    return "max_batch_size: 1\ninput [\n{}\n]\n".format(",\n".join(lines)) if lines else ""


def _lost_inputs(face: Entry) -> Iterator[Problem]:
    ours = {spec.name for spec in INPUTS}
    for tensor in face.config.input:
        if tensor.name not in ours:
            yield warning(f"input.{tensor.name}", f"input {tensor.name!r} is not offered: clients must not send it")


def _keep(part: Entry, settings: dict[str, str]) -> Iterator[Problem]:
    for name in part.parameters:
        value = _value(part, name)
        note = _LEFT_OUT.get(name, "")
        if value and name in _KEPT:
            try:
                kept, note = _translate(value, _KEPT[name])
            except ValueError:
                raise ConfigError(f"{part.path}: {name} is {value!r}: it must be a number") from None
            settings.update(kept)
        elif value and not note:
            settings[name] = value
            yield error(f"parameters.{name}", f"{name} is {value!r}: no parameter that is known here")
        if value and note:
            yield warning(f"parameters.{name}", f"{name} is {value!r}: {note}")


def _translate(value: str, rule: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    if "usual" in rule:
        is_usual = value.lower() == rule["usual"]
        return ({}, "") if is_usual else (rule.get("otherwise", {}), rule.get("note", ""))
    if "setting" not in rule:
        return {}, ""
    settings = {rule["setting"]: value}
    match rule.get("unit"):
        case "GiB":
            settings = {rule["setting"]: f"{int(value) / GIB:g}"}
        case "blocks":
            num_blocks = -(-int(value) // TRTLLM_BLOCK_SIZE)
            settings = {rule["setting"]: str(num_blocks), "block_size": str(TRTLLM_BLOCK_SIZE)}
        case "if positive":
            settings = settings if int(value) > 0 else {}
    return settings, rule.get("note", "")


def _keep_queue(engine: Entry, settings: dict[str, str]) -> Iterator[Problem]:
    for rule in _PARAMETERS["fields"]:
        value = attrgetter(rule["field"])(engine.config)
        if value > 0 and "setting" in rule:
            settings.setdefault(rule["setting"], str(value))
        elif value > 0:
            yield warning(rule["field"], rule["note"])
