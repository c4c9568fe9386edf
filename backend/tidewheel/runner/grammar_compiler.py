"""Compilation of grammars over a model's tokens, by llguidance.

An extra token ends every answer, because end tokens differ by request.
"""

import json
import os
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from tidewheel.errors import ConfigError, InvalidRequest, TidewheelError, Unsupported
from tidewheel.grammar import Grammar, GrammarKind, TokenGrammar, check_bounds, read_plainly
from tidewheel.regular_files import read_at_most

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_BYTES = 1 << 20
MAX_THREADS = 4  # that compute masks
MAX_TOKENIZER_BYTES = 256 << 20  # the largest known has 35 MB
# Compilation recurses by rule and a full stack ends its process: another process tries grammars on a small stack.
TRIAL_STACK_BYTES = 1 << 20
STACK_BYTES = 16 << 20
_END = "<|tidewheel end of answer|>"
_ERROR_CHARS = 300
# A lexer state takes 1 to 2 kB; a mask stops at 200,000 units of work (about 15 ms).
_MAX_LEXER_STATES = 50_000
_UNSUPPORTED = re.compile("unimplemented|(not|only) (yet )?supported|not disjoint|unknown format", re.IGNORECASE)
_PLAIN = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"NoExtensionBias", "no text follows it"),
        (r"Unimplemented keys: \[(.*)\]", r"\1 is not supported"),
        (r"oneOf constraints are not supported", "oneOf with cases that overlap is not supported: use anyOf"),
        (r"(Resource '.*') is not present", r"\1 is another document: put it into $defs"),
    )
)
# Models fill an answer with whitespace where they may.
_DEFAULTS: "JsonCompileOptions" = {"whitespace_pattern": " "}
# Else llguidance would make an added token of its text in a string, where only the characters fit, and refuse both.
_NO_FORCING = '%llguidance {"no_forcing": true}'
_STRICT: "JsonCompileOptions" = {"lenient": False, "coerce_one_of": False}  # precede a schema's `x-guidance`


class GrammarCompiler:
    """Compiler over the tokens of a folder's `tokenizer.json`. Not thread-safe."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._path = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._tokens: LLTokenizer | ConfigError | None = None

    @cached_property
    def _pool(self) -> LLExecutor:
        return LLExecutor(min(MAX_THREADS, max(1, (os.cpu_count() or 1) // 4)))

    def prepare(self) -> LLTokenizer | ConfigError:
        """Read the tokens once (up to 1 s). Return, not raise, `ConfigError` if grammars cannot use them."""
        if self._tokens is None:
            try:
                self._tokens = self._read_tokens()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | MemoryError):
                    raise
                self._tokens = ConfigError(f"{self._path} cannot be used for grammars: {_one_line(str(error))}")
        return self._tokens

    def by_id(self, tokens: Mapping[str, int]) -> dict[str, int]:
        """Return those of some tokens that grammars match by id, not by text."""
        known = self.prepare()
        if isinstance(known, ConfigError):
            return {}
        return {text: token_id for text, token_id in tokens.items() if known.is_special_token(token_id)}

    def _read_tokens(self) -> LLTokenizer:
        backend = tokenizers.Tokenizer.from_str(read_at_most(self._path, MAX_TOKENIZER_BYTES).decode("utf-8"))
        backend.no_truncation()
        backend.no_padding()
        backend.add_special_tokens([_END])
        end_bit = backend.token_to_id(_END) or 0
        return LLTokenizer(backend.to_str(), n_vocab=max(self._vocab_size, end_bit + 1), eos_token=end_bit)

    def compile(self, source: str, name: str, *, stack_bytes: int = STACK_BYTES) -> TokenGrammar:
        """Compute also the first mask. Raise `InvalidRequest` or `Unsupported`."""
        tokens = self.prepare()
        if isinstance(tokens, ConfigError):
            raise Unsupported(f"{name} is set, and this model offers no grammars: {tokens}")
        if len(source.encode()) > MAX_SOURCE_BYTES:
            raise InvalidRequest(f"{name} is too large: its rules take more than {MAX_SOURCE_BYTES} bytes")
        matcher = _started(tokens, source, stack_bytes)
        if matcher.is_error():
            problem = _one_line(matcher.get_error())
            cause = Unsupported if _UNSUPPORTED.search(problem) else InvalidRequest
            raise cause(f"{name} cannot be followed: {_plain(problem)}")
        return TokenGrammar(matcher, self._pool, tokens.eos_token, -(-tokens.vocab_size // 32), tokens)


def _started(tokens: LLTokenizer, source: str, stack_bytes: int) -> LLMatcher:
    """Return a matcher that a thread with a stack of that size has made."""
    future: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
            matcher = LLMatcher(tokens, source, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # some grammars fail only here
            future.set_result(matcher)
        except BaseException as error:  # panics of the library
            future.set_exception(error)

    before = threading.stack_size(stack_bytes)
    try:
        threading.Thread(target=run, daemon=True).start()
    finally:
        threading.stack_size(before)
    return future.result()


def to_source(grammar: Grammar) -> str:
    """Return the Lark or JSON source to compile. Raise `InvalidRequest`."""
    source = _source(grammar)
    if not source.startswith("{"):
        return f"{source}\n{_NO_FORCING}"
    whole = json.loads(source)["grammars"][0] | {"name": "whole"}
    return json.dumps({"grammars": [{"lark_grammar": f"start: @whole\n{_NO_FORCING}"}, whole]})


def _source(grammar: Grammar) -> str:
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                schema = json.loads(grammar.text)
                check_bounds(grammar.name, schema)
                read_plainly(schema)
                return LLMatcher.grammar_from_json_schema(json.dumps(schema), _DEFAULTS, _STRICT)
            case GrammarKind.JSON_OBJECT:
                return LLMatcher.grammar_from_json_schema('{"type": "object"}', _DEFAULTS)
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.CHOICE:
                choices = json.loads(grammar.text)
                return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, choices))}")
            case GrammarKind.EBNF:
                return LLMatcher.grammar_from_lark(to_lark(grammar.text))
            case GrammarKind.LARK:
                return LLMatcher.grammar_from_lark(grammar.text)
    except TidewheelError:
        raise
    except RecursionError:
        raise InvalidRequest(f"{grammar.name} is nested too deep") from None
    except Exception as error:
        kind = grammar.kind.replace("_", " ")
        raise InvalidRequest(f"{grammar.name} is no valid {kind}: {_one_line(str(error))}") from None


def _plain(problem: str) -> str:
    for pattern, words in _PLAIN:
        if found := pattern.search(problem):
            return found.expand(words)
    return problem


def _one_line(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:_ERROR_CHARS]


_RULE = re.compile(r"^[ \t]*([A-Za-z0-9_-]+)[ \t]*::=", re.MULTILINE)
# Literals, sets and comments.
_PART = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\r\n]*', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)|[\r\n]", re.DOTALL)
_LINE_ENDS = {"\n": "\\n", "\r": "\\r"}
_ASCII = 0x80
_SURROGATES = range(0xD800, 0xE000)


def to_lark(rules: str) -> str:
    """Return GBNF or Lark rules as Lark. Raise `ValueError`.

    llguidance's converter drops a rule given twice, merges names that differ only in case or `-`, calls the root
    `start`, and breaks `\\u00e9`.
    """
    names = _RULE.findall(rules)
    if not names:
        return str(any_to_lark(rules))
    taken = {"start"}
    for name in names:
        key = re.sub("([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()
        if key in taken:
            raise ValueError(f"the rule {name} is called start, or as another one (- and case do not count)")
        taken.add(key)
    return str(any_to_lark(_PART.sub(_part, rules)))


def _part(part: re.Match[str]) -> str:
    return part[0] if part[0].startswith("#") else _ESCAPE.sub(_character, part[0])


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits is None:
        return _LINE_ENDS.get(escape[0], escape[0])
    code = int(digits, 16)
    if code in _SURROGATES or code > 0x10FFFF:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{code:02x}" if code < _ASCII else chr(code)
