"""A class name means one thing within what a module can import, and is a noun."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from layers.test_layers import MODULES, arrows, reachable

# Class name -> reason why two classes that one module can import share it.
SHARED: dict[str, str] = {}
# Names that classes had and that said nothing of what they hold.
BARE_WORDS = frozenset(
    """
    Added Alike Applied Arrival Asked Booked Captured Carried Chunked Course Cut Declared Departures
    Door Dynamic Enqueued Expired Failed Flight Full Given Greedy Hybrid Infer Kept Lane Live Offered
    Order Packed Passed Place Played Predictive Refused Replayed Sampled Scheduled Seat Seen Sent Shared
    Short Shown Side Spell Spoken Static Stay Streamed Taken Ticket Told Turns Unread Unrest Waiting
    Watched Written
    """.split()  # noqa: SIM905
)


def class_names(path: Path) -> set[str]:
    """Return the names of a module's public classes."""
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


@functools.cache
def classes() -> dict[str, set[str]]:
    return {module: class_names(path) for module, path in MODULES.items()}


def homonyms(graph: Mapping[str, set[str]], names: Mapping[str, set[str]]) -> set[tuple[str, tuple[str, ...]]]:
    """Return class names, each with its modules, that two modules within the reach of a third define."""
    found = set()
    for module in graph:
        homes: dict[str, set[str]] = defaultdict(set)
        for reached in reachable(graph, module) | {module}:
            for name in names[reached]:
                homes[name].add(reached)
        found |= {(name, tuple(sorted(where))) for name, where in homes.items() if len(where) > 1}
    return found


def test_a_class_name_means_one_thing() -> None:
    assert {(name, where) for name, where in homonyms(arrows(), classes()) if name not in SHARED} == set()


def test_homonyms_are_found() -> None:
    graph = {"a": {"b", "c"}, "b": set[str](), "c": set[str](), "d": {"b"}}
    names = {"a": set[str](), "b": {"Plan"}, "c": {"Plan"}, "d": {"Limits"}}
    assert homonyms(graph, names) == {("Plan", ("b", "c"))}


def test_class_names_are_nouns() -> None:
    bare = {module: names & BARE_WORDS for module, names in classes().items()}
    assert {module: names for module, names in bare.items() if names} == {}
