"""Model for Triton's Python backend that writes the API of its stub to `api.json` beside it when it is loaded."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton_python_backend_utils as pb_utils


def parameters(thing: object) -> list[str] | None:
    """Return names of parameters, from the docstring of a function in C++. None for what is not called."""
    found = re.match(r"\w+\((.*)\) -> ", inspect.getdoc(thing) or "")
    if found:
        return [name for name in re.findall(r"(?:^|, )(\w+):", found[1]) if name != "self"]
    return (
        [name for name in inspect.signature(thing).parameters if name != "self"]
        if inspect.isfunction(thing)
        else None
    )


def describe(name: str, thing: object) -> dict[str, list[str] | None]:
    if not inspect.isclass(thing):
        return {name: parameters(thing)}
    members = {member: getattr(thing, member) for member in dir(thing) if not member.startswith("_")}
    own = {f"{name}.{member}": parameters(value) for member, value in members.items()}
    return {name: parameters(vars(thing).get("__init__")), **own}


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        native = importlib.import_module("c_python_backend_utils")
        api: dict[str, list[str] | None] = {}
        for module in (native, pb_utils):
            for name in dir(module):
                api |= describe(name, getattr(module, name))
        path = Path(args["model_repository"]) / args["model_version"] / "api.json"
        path.write_text(json.dumps(api))

    def execute(self, requests: Sequence[object]) -> list[object]:
        return []
