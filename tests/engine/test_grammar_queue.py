from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from support.engine.engine_clients import request
from support.engine.gated_compiler import LIMIT_S, UNUSED_GRAMMAR, GatedCompiler
from tidewheel.engine.front_ends import FrontEnd
from tidewheel.engine.grammar_queue import (
    MAX_KEPT,
    MAX_KEPT_CHARS,
    MAX_WAITING,
    GrammarCache,
    GrammarQueue,
)
from tidewheel.engine.messages import AddRequest
from tidewheel.errors import Busy, InternalError


@pytest.fixture
def compiler() -> Iterator[GatedCompiler]:
    made = GatedCompiler()
    yield made
    made.may_go_on.set()


def front_end() -> FrontEnd:
    return FrontEnd(b"", "", 0.0)


def asking(key: int, source: str) -> AddRequest:
    return request(key, 1, grammar=source, grammar_name="guided_json")


def taken(queue: GrammarQueue, count: int) -> list[Any]:
    found: list[Any] = []
    waited = threading.Event()
    for _ in range(int(LIMIT_S * 1000)):
        found += queue.take_compiled()
        if len(found) >= count:
            return found
        waited.wait(0.001)
    raise AssertionError(f"{len(found)} of {count}")


def test_requests_wait_for_their_grammar_alone(compiler: GatedCompiler) -> None:
    queue, client = GrammarQueue(compiler), front_end()
    for key, source in enumerate(("a", "a", "wrong", "broken")):
        queue.add(client, asking(key, source))
    assert queue.take_compiled() == []
    assert queue.num_waiting == 4
    compiler.may_go_on.set()
    first, second, wrong, broken = (
        grammar for _, _, grammar in sorted(taken(queue, 4), key=lambda item: item[1].key)
    )
    assert first is second is queue.kept.find("a")
    assert str(wrong) == "[TW-INPUT] guided_json is wrong"
    assert isinstance(broken, InternalError)
    assert compiler.compiled == ["a", "wrong", "broken"]
    assert not queue.num_waiting
    assert queue.kept.find("wrong") is None


def test_the_vocabulary_is_read_first(compiler: GatedCompiler) -> None:
    GrammarQueue(compiler)
    assert compiler.is_prepared


def test_only_so_many_wait(compiler: GatedCompiler) -> None:
    queue, client = GrammarQueue(compiler), front_end()
    for key in range(MAX_WAITING):
        queue.add(client, asking(key, "a"))
    with pytest.raises(Busy, match="256 requests wait for their grammars"):
        queue.add(client, asking(MAX_WAITING, "a"))


def test_requests_that_leave_are_not_added(compiler: GatedCompiler) -> None:
    queue, ours, gone = GrammarQueue(compiler), front_end(), front_end()
    queue.add(ours, asking(1, "a"))
    queue.add(ours, asking(2, "a"))
    queue.add(gone, asking(2, "a"))
    assert queue.cancel(ours, 1)
    assert not queue.cancel(ours, 1)
    queue.cancel(gone)
    compiler.may_go_on.set()
    assert [(owner, message.key) for owner, message, _ in taken(queue, 1)] == [(ours, 2)]


def test_grammars_that_nobody_waits_for_are_not_compiled(compiler: GatedCompiler) -> None:
    queue, ours, gone = GrammarQueue(compiler), front_end(), front_end()
    queue.add(ours, asking(1, "first"))
    assert compiler.has_begun.wait(LIMIT_S)
    for key, source in enumerate(("left", "shared", "kept"), start=2):
        queue.add(ours, asking(key, source))
    queue.add(gone, asking(1, "shared"))
    queue.add(gone, asking(2, "gone"))
    queue.cancel(gone)
    for key in (1, 2):
        assert queue.cancel(ours, key)
    queue.add(ours, asking(5, "left"))
    compiler.may_go_on.set()
    assert [message.key for _, message, _ in taken(queue, 3)] == [3, 4, 5]
    assert compiler.compiled == ["first", "shared", "kept", "left"]
    assert queue.kept.find("first") is not None


def test_the_least_recently_used_grammars_are_dropped() -> None:
    cache = GrammarCache()
    for number in range(MAX_KEPT):
        cache.keep(str(number), UNUSED_GRAMMAR)
    assert cache.find("0") is not None
    cache.keep("new", UNUSED_GRAMMAR)
    assert cache.find("1") is None
    assert cache.find("0") is not None
    cache.keep("x" * MAX_KEPT_CHARS, UNUSED_GRAMMAR)
    assert cache.find("new") is None
    assert cache.find("x" * MAX_KEPT_CHARS) is not None
