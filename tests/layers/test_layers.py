"""Arrows point down: no module imports from a layer above its own, and modules do not import each other in rings.

Imports inside functions and under TYPE_CHECKING count like any other.

L0 values, L1 decisions, L2 device, L3 engine, L4 text, L5 Triton, L6 the server, L7 what measures and
shows, L8 commands. So serving never imports what measures.
L1 and L2 know nothing of each other; `tidewheel_kernels`, `tidewheel_{client,process,queue}` know nothing of
`tidewheel`.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "tidewheel": ROOT / "backend",
    "tidewheel_kernels": ROOT / "kernels",
    "tidewheel_client": ROOT / "client",
    "tidewheel_process": ROOT / "process",
    "tidewheel_queue": ROOT / "queue",
}
BENCHMARKS = ROOT / "benchmarks"

# Longest prefix wins.
LAYERS = {
    "tidewheel": 0,
    "tidewheel.errors": 0,
    "tidewheel.private_dir": 0,
    "tidewheel.confidential": 0,
    "tidewheel.regular_files": 0,
    "tidewheel.model_formats": 0,
    "tidewheel.config": 0,
    "tidewheel.settings": 0,
    "tidewheel.tenants": 0,
    "tidewheel.grammar": 0,
    "tidewheel.lora": 0,
    "tidewheel.tool_formats": 0,
    "tidewheel.sampling": 0,
    "tidewheel.parameters": 0,
    "tidewheel.request_options": 0,
    "tidewheel.request": 0,
    "tidewheel.batch": 0,
    "tidewheel.version": 0,
    "tidewheel.stats": 0,
    "tidewheel.processor_use": 0,
    "tidewheel.metrics": 0,
    "tidewheel.event_heap": 0,
    "tidewheel.audio_file": 0,
    "tidewheel.health_endpoint": 0,
    "tidewheel.scheduler": 1,
    "tidewheel.kvcache": 1,
    "tidewheel.record": 1,
    "tidewheel.fleet": 1,
    "tidewheel_kernels": 2,
    "tidewheel.models": 2,
    "tidewheel.runner": 2,
    "tidewheel.one_shot": 2,
    "tidewheel.engine": 3,
    "tidewheel.frontend": 4,
    "tidewheel.llm": 5,
    "tidewheel.model": 5,
    "tidewheel.adapter": 5,
    "tidewheel.server": 6,
    "tidewheel.entries": 6,
    "tidewheel.gateway": 6,
    "tidewheel.cluster": 6,
    "tidewheel.bench": 7,
    "tidewheel.simulate": 7,
    "tidewheel.workload": 7,
    "tidewheel.top": 7,
    "tidewheel.cli": 8,
    "tidewheel_client": 0,
    "tidewheel_process": 0,
    "tidewheel_queue": 0,
}
# What stands in a layer by itself and may not be reached from some that lie above it.
FORBIDDEN = [
    ("tidewheel.simulate", "tidewheel_kernels"),
    ("tidewheel.gateway", "tidewheel.engine"),
    ("tidewheel.gateway", "tidewheel.frontend"),
    ("tidewheel.workload", "tidewheel.bench"),
    ("tidewheel.workload", "tidewheel.simulate"),
    ("tidewheel_kernels", "tidewheel"),
    ("tidewheel_process", "tidewheel"),
    ("tidewheel_process", "tidewheel_client"),
    ("tidewheel_process", "tidewheel_kernels"),
    ("tidewheel_process", "tidewheel_queue"),
    ("tidewheel_client", "tidewheel_queue"),
    ("tidewheel_queue", "tidewheel"),
    ("tidewheel_queue", "tidewheel_kernels"),
    ("tidewheel_client", "tidewheel"),
    ("tidewheel_client", "tidewheel_kernels"),
]
WITHOUT_TORCH = [
    "tidewheel.engine.messages",
    "tidewheel.engine.engine_client",
    "tidewheel.frontend.frontend",
    "tidewheel.scheduler.scheduler",
    "tidewheel.kvcache.manager",
    "tidewheel.models.gguf_folder",
    "tidewheel.entries.checking",
    "tidewheel.gateway.run_gateway",
    "tidewheel.bench.suites",
    "tidewheel.bench.pictures",
    "tidewheel.workload.trace_files",
    "tidewheel.top.watch",
    "tidewheel_client",
    "tidewheel_process.child",
]


def module_name(path: Path, base: Path) -> str:
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path, base): path for package, base in SOURCES.items() for path in (base / package).rglob("*.py")
}
MODULES_AND_BENCHMARKS = MODULES | {module_name(path, BENCHMARKS): path for path in BENCHMARKS.rglob("*.py")}


@functools.cache
def imports(path: Path) -> set[str]:
    """Return the absolute names that a module imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import: {ast.unparse(node)}"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def defining_module(name: str, modules: Mapping[str, Path]) -> str | None:
    """Return the module of this repository that an imported name lives in."""
    while name:
        if name in modules:
            return name
        name = name.rpartition(".")[0]
    return None


@functools.cache
def arrows(*, benchmarks: bool = False) -> dict[str, set[str]]:
    """Map each module to the modules that it imports."""
    modules = MODULES_AND_BENCHMARKS if benchmarks else MODULES
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = {defining_module(name, modules) for name in imports(path)}
        graph[module] = {target for target in found if target is not None and target != module}
    return graph


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def rings(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that all reach each other."""
    reach = {module: reachable(graph, module) for module in graph}
    groups = {frozenset(m for m in reach[module] if module in reach[m]) for module in graph}
    return [set(group) for group in groups if group]


def layer(module: str) -> int:
    while module not in LAYERS:
        module, _, tail = module.rpartition(".")
        assert tail, "a module outside every known layer"
    return LAYERS[module]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_every_module_has_a_layer() -> None:
    top_level = {m for m in MODULES if m.startswith("tidewheel.")}
    strangers = [m for m in top_level if not any(within(m, known) for known in LAYERS if known != "tidewheel")]
    assert not strangers


def test_arrows_point_down() -> None:
    # The package's own __init__ gives `LLM` on first use: the one name that may look up.
    upward = [
        f"{module} (L{layer(module)}) imports {target} (L{layer(target)})"
        for module, targets in arrows().items()
        if module != "tidewheel"
        for target in targets
        if layer(target) > layer(module)
    ]
    assert not upward


def test_decisions_and_device_do_not_know_each_other() -> None:
    graph = arrows()
    mixed = [
        f"{module} imports {target}"
        for module, targets in graph.items()
        for target in targets
        if layer(module) == 2 and layer(target) == 1
    ]
    assert not mixed


@pytest.mark.parametrize(("package", "forbidden"), FORBIDDEN)
def test_packages_that_stand_alone(package: str, forbidden: str) -> None:
    graph = arrows()
    assert not [
        f"{module} imports {target}"
        for module, targets in graph.items()
        for target in targets
        if within(module, package) and within(target, forbidden)
    ]


def test_no_ring_of_imports() -> None:
    assert rings(arrows(benchmarks=True)) == []


def test_rings_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert rings(graph) == [{"a", "b", "c"}]


def test_only_the_adapter_knows_triton() -> None:
    users = [module for module, path in MODULES.items() if "triton_python_backend_utils" in imports(path)]
    assert users
    assert not [m for m in users if not within(m, "tidewheel.adapter")]


def test_nothing_unpickles() -> None:
    banned = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    for module, path in MODULES.items():
        names = {name.split(".")[0] for name in imports(path)}
        assert not names & banned, module
        assert "torch.load(" not in path.read_text(), module


def test_durations_are_monotonic() -> None:
    """A wall clock may jump. It is read for times of files, and for dates in templates, answers, logs and reports."""
    readers = {
        m for m, path in MODULES.items() if re.search(r"\btime\.time(_ns)?\(|datetime\.now\(", path.read_text())
    }
    assert readers == {
        "tidewheel.server.repository",
        "tidewheel_process.locked_folder",
        "tidewheel.frontend.chat",
        "tidewheel.frontend.ended_requests",
        "tidewheel.gateway.answers",
        "tidewheel.gateway.application",
        "tidewheel.gateway.media",
        "tidewheel.gateway.responses",
        "tidewheel.bench.environment",
    }


def test_imports_without_torch() -> None:
    code = (
        f"import importlib, sys\nfor module in {WITHOUT_TORCH}:\n    importlib.import_module(module)\n"
        "    found = [name for name in ('torch', 'triton', 'locust') if name in sys.modules]\n"
        "    assert not found, (module, found)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
