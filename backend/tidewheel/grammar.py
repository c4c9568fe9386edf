from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tidewheel.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 128 << 10
MAX_CHOICES = 1024


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Language of which an answer that ends by itself is a text. Raise `InvalidRequest` beyond the limits.

    `text` is a JSON schema, a pattern that the whole answer matches, a JSON list of choices, or rules in the notation
    of GBNF (root `root`) or Lark (root `start`).
    """

    kind: GrammarKind
    text: str = ""
    name: str = field(default="grammar", compare=False)  # parameter that gave it, for messages

    def __post_init__(self) -> None:
        if not self.text and self.kind is not GrammarKind.JSON_OBJECT:
            raise InvalidRequest(f"{self.name} is empty: give a {self.kind}, or leave it out")
        size = len(self.text.encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{self.name} has {size} bytes: at most {MAX_GRAMMAR_BYTES} are allowed")

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | str, name: str = "grammar") -> Grammar:
        return cls(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else _dumped(schema, name), name)

    @classmethod
    def json_object(cls, name: str = "grammar") -> Grammar:
        return cls(GrammarKind.JSON_OBJECT, "", name)

    @classmethod
    def regex(cls, pattern: str, name: str = "grammar") -> Grammar:
        return cls(GrammarKind.REGEX, pattern, name)

    @classmethod
    def choice(cls, choices: Sequence[str], name: str = "grammar") -> Grammar:
        if not 0 < len(choices) <= MAX_CHOICES:
            raise InvalidRequest(f"{name} has {len(choices)} choices: it must have 1 to {MAX_CHOICES}")
        return cls(GrammarKind.CHOICE, _dumped(list(choices), name), name)

    @classmethod
    def ebnf(cls, rules: str, name: str = "grammar") -> Grammar:
        return cls(GrammarKind.EBNF, rules, name)


class TokenMatcher(Protocol):
    """Position of one answer in its grammar."""

    def is_error(self) -> bool:
        """Return whether a token was not allowed, or the grammar has become too complex."""


class MatcherPool(Protocol):
    """Work on matchers that releases the interpreter once."""

    def consume_token_par(self, tokens: list[tuple[Any, int]], /) -> object:
        """Let each matcher follow its token."""

    def unsafe_compute_mask_ptr(
        self, rows: list[tuple[Any, int]], address: int, row_bytes: int, num_rows: int, /
    ) -> None:
        """Write a bit for each token, a matcher's into its row."""


class TokenGrammar(Protocol):
    """Compiled grammar; see `tidewheel.runner.grammar_compiler`."""

    @property
    def pool(self) -> MatcherPool: ...

    @property
    def num_words(self) -> int:
        """Return the words of 32 bits of a mask."""

    @property
    def end_bit(self) -> int:
        """Return the bit of a mask that is set where the answer may end. No token has it."""

    def matcher(self, token_ids: Sequence[int]) -> TokenMatcher:
        """Return one that has followed these tokens."""


class RowGrammar(NamedTuple):
    grammar: TokenGrammar
    end_token_ids: tuple[int, ...]  # allowed exactly where the grammar may end


def _dumped(value: object, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{name} is nested too deep") from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from None
