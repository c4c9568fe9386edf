"""Every option of every command is read: by a function that its command reaches with the parsed arguments."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tidewheel import cli
from tidewheel.cli.main import _MODULES, COMMANDS, _parser

Function = ast.FunctionDef | ast.AsyncFunctionDef
FOLDER = Path(cli.__file__).parent
PREFIX = "tidewheel.cli."
BY_NAME = {
    "sampling_params": ("tidewheel.cli.usage", "_SAMPLING"),
    "_jobs": ("tidewheel.cli.queue_commands", "_OF_ONE_JOB"),
}


@functools.cache
def module(name: str) -> ast.Module:
    return ast.parse((FOLDER / f"{name}.py").read_text())


def functions(tree: ast.Module) -> dict[str, Function]:
    return {node.name: node for node in tree.body if isinstance(node, Function)}


def imported(tree: ast.Module) -> dict[str, str]:
    """Return the command module of each name that this one imports from one."""
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        name.name: node.module.removeprefix(PREFIX)
        for node in froms
        if node.module is not None and node.module.startswith(PREFIX)
        for name in node.names
    }


def reached(name: str, function: str) -> Iterator[Function]:
    """Yield `function` of a module, and all that it names, directly or not."""
    seen, waiting = set(), [(name, function)]
    while waiting:
        here = waiting.pop()
        found = functions(module(here[0])).get(here[1])
        if here in seen or found is None:
            continue
        seen.add(here)
        yield found
        elsewhere = imported(module(here[0]))
        names = {node.id for node in ast.walk(found) if isinstance(node, ast.Name)}
        waiting += [(elsewhere.get(name, here[0]), name) for name in names]
        parts = [
            node for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        ]
        waiting += [(part.value.id, part.attr) for part in parts if (FOLDER / f"{part.value.id}.py").is_file()]


def read_by(command: str) -> set[str]:
    """Return the attributes that reached functions read of a parameter of type Namespace."""
    found: set[str] = set()
    name = _MODULES.get(command, command)
    for function in reached(name, f"run_{command}" if f"run_{command}" in functions(module(name)) else "run"):
        arguments = {
            arg.arg for arg in function.args.args if arg.annotation and "Namespace" in ast.unparse(arg.annotation)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in arguments:
                found.add(node.attr)
        found |= {name for cls in classes(function) for name in inspect.signature(cls).parameters}
        if function.name in BY_NAME:
            name, table = BY_NAME[function.name]
            found |= {*getattr(import_module(name), table), "stop"}
    return found


def classes(function: Function) -> Iterator[type]:
    """Yield the classes whose fields the function takes from the options."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("usage.") in (
            "fields_of",
            "gateway_options",
        ):
            name = ast.unparse(node.args[1])
            for source in (one for one in ast.walk(function) if isinstance(one, ast.ImportFrom)):
                if name in [alias.name for alias in source.names]:
                    yield getattr(import_module(str(source.module)), name)


def options(parser: argparse.ArgumentParser) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name for choice in action.choices.values() for name in options(choice)}
        elif action.dest not in ("help", "version"):
            found.add(action.dest)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_read(command: str) -> None:
    (commands,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    unread = options(commands.choices[command]) - read_by(command) - {argparse.SUPPRESS}
    assert not unread, f"tidewheel {command} accepts {sorted(unread)} and does nothing with it"


def test_an_option_that_nothing_reads_is_found() -> None:
    assert "max_num_seqs" not in read_by("check")
    assert {"path", "json", "strict", "fix", "other_machine"} <= read_by("check")
