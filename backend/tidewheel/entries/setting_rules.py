"""Settings judged by the load itself: it runs again and again, each time without what it refused before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tidewheel.adapter.repository_entry import (
    ModelEntry,
    ModelSettings,
    known_settings,
    resolve_settings,
)
from tidewheel.engine_arguments import ARGUMENTS, HONOURED, WITHOUT_EFFECT
from tidewheel.entries.entry import Entry
from tidewheel.entries.finding import Problem, error
from tidewheel.errors import ConfigError
from tidewheel.settings import nearest

_NAME = re.compile(r"\w+")
_NO_MODEL = "no/model"  # stands for a model that is not set


class Judgement(NamedTuple):
    problems: list[Problem]
    settings: ModelSettings | None  # without what was refused; None: there is no model to judge


def judge_settings(entry: Entry) -> Judgement:
    parameters, from_json = dict(entry.parameters), dict(entry.model_json)
    problems: list[Problem] = []
    while True:
        model = ModelEntry(
            name=entry.name,
            folder=entry.folder.resolve(),
            version=entry.version,
            parameters=parameters,
            model_json=from_json,
        )
        try:
            settings = resolve_settings(
                model,
                decoupled=entry.is_decoupled,
                has_native_queue=entry.config.HasField("dynamic_batching"),
                max_batch_size=int(entry.parameters.get("io_dialect") == "trtllm"),  # as completed
            )
            is_known = settings.engine.model != _NO_MODEL
            return Judgement([*problems, *_without_effect(entry)], settings if is_known else None)
        except ConfigError as refusal:
            settings_left = {**parameters, **from_json}
            key = _named(str(refusal), settings_left)
            problems.append(_problem(entry, key, str(refusal), parameters))
            if key == "engine_of" or (not key and {"model", "engine_of"} & settings_left.keys()):
                return Judgement(problems, None)
            if key:
                (parameters if key in parameters else from_json).pop(key)
            else:
                parameters["model"] = _NO_MODEL


def is_unknown_setting(problem: Problem) -> bool:
    return problem.message.startswith("unknown setting ")


def at_setting(entry: Entry, problem: Problem) -> Problem:
    """Move a problem to the setting that its message names; one of a file, only if it begins with the setting."""
    first = problem.message.split()[0].rstrip(":")
    words = problem.message if problem.file is None else first if first.isidentifier() else ""
    key = _named(words, entry.settings)
    if not key:
        return problem
    return _problem(entry, key, problem.message, entry.parameters)._replace(severity=problem.severity)


def _named(message: str, settings: Mapping[str, object]) -> str:
    """Return the first setting that a message names, under its own name or as the one that it stands for."""
    here = {HONOURED.get(key, key): key for key in settings} | {key: key for key in settings}
    quoted = next((key for key in settings if message.startswith(f"unknown setting {key!r}")), None)
    return quoted or next((here[word] for word in _NAME.findall(message) if word in here), "")


def _problem(entry: Entry, key: str, message: str, parameters: Mapping[str, str]) -> Problem:
    """Return an error of a setting in `config.pbtxt`, if it is among `parameters`, or in `model.json`."""
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


def _without_effect(entry: Entry) -> Iterator[Problem]:
    for key in entry.settings:
        if key in WITHOUT_EFFECT:
            message = f"{key} has no effect here: {WITHOUT_EFFECT[key]}"
            yield _problem(entry, key, message, entry.parameters)._replace(severity="note")
