import enum
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tidewheel.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_GRAMMAR_BYTES = 128 << 10
MAX_CHOICES = 1024
MOST_BOUND = 2**53  # llguidance keeps bounds as floats, which hold all integers up to here

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = ("const", "enum", "default", "examples")
_SHOWN_CHARS = 80


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    LARK = "lark"  # with ids of tokens


@dataclass(frozen=True, slots=True)
class Grammar:
    """Formal grammar of a whole answer. Raise `InvalidRequest`.

    `text` is a JSON schema, a pattern of the whole answer, a JSON list of choices, or rules in the notation of GBNF
    (root `root`) or Lark (root `start`).
    """

    kind: GrammarKind
    text: str = ""
    name: str = field(default="grammar", compare=False)  # parameter that gave it, for messages

    def __post_init__(self) -> None:
        if not self.text and self.kind is not GrammarKind.JSON_OBJECT:
            raise InvalidRequest(f"{self.name} is empty: give a {self.kind}, or leave it out")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest(f"{self.name} is not valid Unicode: it holds a lone surrogate") from None
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{self.name} has {size} bytes: at most {MAX_GRAMMAR_BYTES} are allowed")

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | str, name: str = "grammar") -> "Grammar":
        return cls(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else _dumped(schema, name), name)

    @classmethod
    def json_object(cls, name: str = "grammar") -> "Grammar":
        return cls(GrammarKind.JSON_OBJECT, "", name)

    @classmethod
    def regex(cls, pattern: str, name: str = "grammar") -> "Grammar":
        return cls(GrammarKind.REGEX, pattern, name)

    @classmethod
    def choice(cls, choices: Sequence[str], name: str = "grammar") -> "Grammar":
        if not 0 < len(choices) <= MAX_CHOICES:
            raise InvalidRequest(f"{name} has {len(choices)} choices: it must have 1 to {MAX_CHOICES}")
        return cls(GrammarKind.CHOICE, _dumped(list(choices), name), name)

    @classmethod
    def ebnf(cls, rules: str, name: str = "grammar") -> "Grammar":
        return cls(GrammarKind.EBNF, rules, name)


@dataclass(frozen=True, slots=True, eq=False)
class TokenGrammar:
    start: "LLMatcher"  # before the first token
    pool: "LLExecutor"
    end_bit: int  # of a mask: the answer may end
    num_words: int  # of 32 bits, of a mask
    tokenizer: "LLTokenizer"

    def matcher(self, token_ids: Sequence[int]) -> "LLMatcher":
        """Return a new matcher that has consumed `token_ids`."""
        copy = self.start.deep_copy()
        copy.consume_tokens(list(token_ids))
        return copy


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


def check_bounds(name: str, schema: object) -> None:
    """Raise `Unsupported` for a numeric bound that a float cannot represent."""
    for keyword, value in itertools.chain.from_iterable(part.items() for part in _parts(schema)):
        if keyword not in _BOUNDS or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        most = MOST_BOUND - keyword.startswith("exclusive")  # the next integer must be exact too
        if not -most <= value <= most:
            shown = f"{keyword} is {str(value)[:_SHOWN_CHARS]}"
            raise Unsupported(f"{name}: {shown}: bounds beyond {most} are not supported; set a nearer one")


def check_options(name: str, schema: object) -> None:
    """Raise `Unsupported` for llguidance's options, which can produce invalid JSON."""
    if any("x-guidance" in part for part in _parts(schema)):
        raise Unsupported(f"{name}: x-guidance is set: options of llguidance are not supported; leave it out")


def read_plainly(schema: object) -> None:
    """Rewrite, in place, what llguidance refuses in valid schemas: counts such as 2.0, and a false `uniqueItems`."""
    for part in _parts(schema):
        if part.get("uniqueItems") is False:
            del part["uniqueItems"]
        for keyword in _COUNTS:
            value = part.get(keyword)
            if isinstance(value, float) and value.is_integer():
                part[keyword] = int(value)


def _parts(schema: object) -> Iterator[dict[str, object]]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, dict):
            yield part
            for keyword, value in part.items():
                waiting += _schemas(keyword, value)


def _schemas(keyword: str, value: object) -> list[object]:
    if keyword in _OF_VALUES:
        return []
    return list(value.values()) if keyword in _OF_NAMES and isinstance(value, dict) else [value]
