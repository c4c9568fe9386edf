"""Write the generated parts of the documentation from the code: ``make docs``.

A page has such a part between ``<!-- generated: NAME -->`` and ``<!-- end -->``. The comment after a setting's field
is its meaning; a comment on a line of its own is a heading.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tidewheel.config import LIVE, SIZED, EngineConfig
from tidewheel.errors import BY_TAG, ConfigError, cause_and_remedy
from tidewheel.frontend.request_parameters import FIELDS
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.metrics import TABLE
from tidewheel.parameters import ParameterField
from tidewheel.settings import HONOURED, JSON_SETTINGS

_HEADING = re.compile(r"    # (?P<text>.+)")
_FIELD = re.compile(r"    (?P<name>\w+): [^#]*# (?P<meaning>.+)")
_PART = re.compile(r"(<!-- generated: (?P<name>[\w ]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
_KINDS: Mapping[object, str] = {bool: "true or false", int: "integer", float: "number", str: "text"}

# Headings in `EngineConfig` that are sections of scheduling.md too.
_RULES = ("policies", "admission", "preemption", "strategies", "controllers", "sessions")
_SETTING = ("setting", "type", "default", "meaning")

Row = tuple[str, ...]


def read_settings(cls: type[Any]) -> dict[str, list[Row]]:
    """Return table rows for a dataclass and its bases, by heading. Raise `ConfigError` if a field lacks a comment."""
    comments: dict[str, tuple[str, str]] = {}
    for base in cls.__mro__[:-1]:
        comments |= _read_comments(inspect.getsource(base))
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in fields.keys() - comments.keys():
        raise ConfigError(f"{cls.__name__}.{name} has no meaning: write a comment behind it")
    hints = typing.get_type_hints(cls)
    settings: dict[str, list[Row]] = {}
    for name, (heading, meaning) in comments.items():
        kind = "JSON" if name in JSON_SETTINGS else _kind(hints[name])
        if name in LIVE:
            meaning += f" (**live**{', up to its start' if name in SIZED else ''})"
        settings.setdefault(heading, []).append((f"`{name}`", kind, _shown(fields[name].default), meaning))
    return settings


def render(page: str) -> str:
    return _PART.sub(lambda match: f"{match[1]}\n{PARTS[match['name']]()}\n{match[3]}", page)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write generated documentation.")
    parser.add_argument("folder", type=Path, help="of the pages: docs")
    for path in sorted(parser.parse_args(argv).folder.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (made := render(page)) != page:
            path.write_text(made, encoding="utf-8")
            print(path)
    return 0


def _read_comments(source: str) -> dict[str, tuple[str, str]]:
    heading, comments = "", {}
    for line in textwrap.dedent(source).splitlines():
        if match := _HEADING.fullmatch(line):
            heading = match["text"]
        elif match := _FIELD.fullmatch(line):
            comments[match["name"]] = (heading, match["meaning"])
    return comments


def _kind(hint: object) -> str:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_kind(arg) for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    return _KINDS[hint]


def _shown(value: object) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value) or "empty"


def _table(head: Row, rows: Iterable[Row]) -> str:
    heading, *lines = (f"| {' | '.join(line)} |\n" for line in (head, *rows))
    return "".join((heading, f"|{'---|' * len(head)}\n", *lines))


def _engine_settings() -> str:
    sections = []
    for heading, rows in read_settings(EngineConfig).items():
        rules = f"[Rules](scheduling.md#{heading})\n\n" if heading in _RULES else ""
        sections.append(f"### {heading[0].upper()}{heading[1:]}\n\n{rules}{_table(_SETTING, rows)}")
    return "\n".join(sections)


def _entry_settings() -> str:
    (rows,) = read_settings(FrontendSettings).values()
    return _table(_SETTING, rows)


def _engine_arguments() -> str:
    honoured = [f"`{name}`" + (f" (`{ours}`)" if ours != name else "") for name, ours in HONOURED.items()]
    return f"Honoured: {', '.join(honoured)}.\n"


def _errors() -> str:
    rows = ((f"`{tag}`", f"`{cls.__name__}`", cls.code, *cause_and_remedy(cls)) for tag, cls in BY_TAG.items())
    return _table(("tag", "class", "code", "cause", "what to do"), rows)


def _metrics() -> str:
    tables = []
    for owner in dict.fromkeys(metric.owner for metric in TABLE if metric.owner != "triton"):
        rows = []
        for one in (metric for metric in TABLE if metric.owner == owner):
            labels = f"{{{one.label.replace(' and ', ', ')}}}" if one.label else ""
            rows.append((f"`{one.name}{labels}`", one.kind, one.help))
        tables.append(f"{owner.capitalize()}:\n\n{_table(('name', 'type', 'meaning'), rows)}")
    return "\n".join(tables)


def _request_parameters() -> str:
    rows = (_parameter_row(field) for field in FIELDS.values() if field.kind != "grammar")
    return _table(("parameter, other names", "type", "default", "meaning"), rows)


def _parameter_row(field: ParameterField) -> Row:
    parameter = field.parameter
    name = f"`{field.name}`" + ("" if parameter.is_tensor else " \\*")
    names = ", ".join((name, *(f"`{alias}`" for alias in (*parameter.aliases, *parameter.tensor_aliases))))
    default = "" if field.default in (None, "", (), {}) else _shown(field.default)
    sizes = ((parameter.max_entries, "entries"), (parameter.max_bytes, "bytes"), (parameter.max_chars, "characters"))
    limits = [parameter.range, *(f"at most {size} {unit}" for size, unit in sizes if size is not None)]
    return names, ", ".join(filter(None, (field.kind, *limits))), default, parameter.meaning


PARTS: Mapping[str, Callable[[], str]] = {
    "request parameters": _request_parameters,
    "engine settings": _engine_settings,
    "entry settings": _entry_settings,
    "engine arguments": _engine_arguments,
    "errors": _errors,
    "metrics": _metrics,
}


if __name__ == "__main__":
    sys.exit(main())
