"""A compiler of grammars that waits for a test."""

from __future__ import annotations

import threading
from typing import Any

from tidewheel.errors import InvalidRequest
from tidewheel.grammar import TokenGrammar

LIMIT_S = 60.0
_UNUSED: Any = None
UNUSED_GRAMMAR = TokenGrammar(_UNUSED, _UNUSED, end_bit=0, num_words=1, tokenizer=_UNUSED)


class GatedCompiler:
    """Compiles when it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.compiled: list[str] = []
        self.is_prepared = False

    def prepare(self) -> None:
        self.is_prepared = True

    def compile(self, source: str, name: str) -> TokenGrammar:
        self.has_begun.set()
        assert self.may_go_on.wait(LIMIT_S)
        self.compiled.append(source)
        if source == "wrong":
            raise InvalidRequest(f"{name} is wrong")
        if source == "broken":
            raise ZeroDivisionError
        return UNUSED_GRAMMAR
