"""The adapter and the fake of its tests use what the Python backend of Triton has: in 2.51 and in the newest.

`python_backend_api.json` has the names and parameters. The end-to-end tests compare it with the installed server.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.triton import fake_triton
from tidewheel.adapter import triton_model
from tidewheel.bench import transformers_baseline
from tidewheel.errors import BY_TAG

FACTS = json.loads((Path(__file__).parent / "python_backend_api.json").read_text())
OLD: dict[str, list[str] | None] = FACTS["2.51.0"]
APIS = {"2.51.0": OLD, "newest": {**OLD, **FACTS["newest"]}}
ADAPTER = [*sorted(Path(triton_model.__file__).parent.glob("*.py")), Path(transformers_baseline.__file__)]
ONLY_IN_TESTS = {"MetricFamily.value", "InferenceResponseSender.is_over"}


def chain(node: ast.expr) -> str:
    """Return the name under `pb_utils` or `self.triton`, such as `Logger.log_info`, or nothing."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    root = node.id if isinstance(node, ast.Name) else ""
    if root == "self" and names[:1] == ["triton"]:
        return ".".join(names[1:])
    return ".".join(names) if root == "pb_utils" else ""


def uses(path: Path) -> Iterator[tuple[str, ast.Call | None]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and (name := chain(node.func)):
            yield name, node
        elif isinstance(node, ast.Attribute) and (name := chain(node)):
            yield name, None


def takes(parameters: list[str] | None, call: ast.Call) -> bool:
    keywords = [keyword.arg for keyword in call.keywords]
    if parameters is None:  # an exception
        return not keywords
    return len(call.args) + len(keywords) <= len(parameters) and set(keywords) <= set(parameters[len(call.args) :])


@pytest.mark.parametrize("version", APIS)
def test_what_the_adapter_uses_is_there(version: str) -> None:
    found = [(path.name, name, call) for path in ADAPTER for name, call in uses(path)]
    assert len(found) > 10
    for file, name, call in found:
        assert name in APIS[version], f"{file}: pb_utils.{name}"
        assert call is None or takes(APIS[version][name], call), f"{file}: {ast.unparse(call)}"


@pytest.mark.parametrize("version", APIS)
def test_codes_of_errors_are_there(version: str) -> None:
    assert {f"TritonError.{cls.code}" for cls in BY_TAG.values()} <= APIS[version].keys()


def public_methods(owner: type) -> Iterator[tuple[str, list[str]]]:
    for name, value in vars(owner).items():
        function = value.__func__ if isinstance(value, classmethod) else value
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            yield name, list(inspect.signature(function).parameters)[1:]


@pytest.mark.parametrize("version", APIS)
def test_the_fake_has_no_more_than_the_server(version: str) -> None:
    """So a test of the adapter fails if the adapter uses something else."""
    classes = {name.lstrip("_"): value for name, value in vars(fake_triton).items() if inspect.isclass(value)}
    for owner in classes.keys() & APIS[version].keys() - {"ModelConfig", "InferenceRequest", "Metric"}:
        real = APIS[version][owner]
        given = dict(public_methods(classes[owner])).get("__init__", [])
        assert real is None or len(given) <= len(real), owner
    for owner in classes.keys() & APIS[version].keys():
        for method, given in public_methods(classes[owner]):
            name = f"{owner}.{method}"
            if method == "__init__" or name in ONLY_IN_TESTS:
                continue
            assert name in APIS[version], name
            assert len(given) <= len(APIS[version][name] or []), name


@pytest.mark.parametrize("model", [triton_model.TritonPythonModel, transformers_baseline.TransformersBaseline])
def test_the_hooks_of_a_model(model: type) -> None:
    hooks = {**FACTS["model"], **FACTS["newest_model"]}
    for name, value in vars(model).items():
        if not name.startswith("_"):
            function = getattr(value, "__func__", value)
            given = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
            assert given == hooks[name], name
