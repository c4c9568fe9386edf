"""A compiler of grammars that waits for a test."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tidewheel.errors import InvalidRequest
from tidewheel.grammar import MatcherPool, TokenGrammar, TokenMatcher

LIMIT_S = 60.0


class Named:
    num_words, end_bit = 1, 0

    @property
    def pool(self) -> MatcherPool:
        raise NotImplementedError

    def matcher(self, _token_ids: Sequence[int]) -> TokenMatcher:
        raise NotImplementedError


class GatedCompiler:
    """Compiles when it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.compiled: list[str] = []

    def compile(self, source: str, name: str) -> TokenGrammar:
        self.has_begun.set()
        assert self.may_go_on.wait(LIMIT_S)
        self.compiled.append(source)
        if source == "wrong":
            raise InvalidRequest(f"{name} is wrong")
        if source == "broken":
            raise ZeroDivisionError
        return Named()
