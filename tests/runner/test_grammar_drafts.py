"""Drafts of rows with grammars: forced text, and the drafts of another proposer that the grammar allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.engine.json_schemas import WRITTEN
from support.models.tiny_models import save_byte_tokenizer
from support.runner.step_loop import request
from tidewheel.batch import TO_DRAFT, Int32Array, RowArray
from tidewheel.grammar import Grammar, RowGrammar, TokenGrammar
from tidewheel.runner.grammar_compiler import GrammarCompiler, to_source
from tidewheel.scheduler import speculation
from tidewheel.scheduler.speculation import (
    COPIED_KIND,
    FORCED_KIND,
    MAX_FORCED_ROWS,
    NUM_OTHER_KINDS,
    NUMBER_KIND,
    REPEATED_KIND,
    GrammarDrafts,
    Proposals,
)

MOST = 24
PROMPT = np.array([1, 2, 3], dtype=np.int32)
ENDS = (250, 251)
PAIRS = ("si", "na", "\u0120B")  # "\u0120" is a space
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"const": "box"}},
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder: Path = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(folder)
    return GrammarCompiler(folder, 256)


@pytest.fixture
def pair_compiler(tmp_path: Path) -> GrammarCompiler:
    save_byte_tokenizer(tmp_path, PAIRS)
    return GrammarCompiler(tmp_path, 256 + len(PAIRS))


class Constant:
    """Proposer of the same drafts for every row."""

    is_free = True

    def __init__(self, drafts: Sequence[int]) -> None:
        self.drafts = list(drafts)

    def enter(self, row: int, token_ids: Int32Array) -> None:
        pass

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        pass

    def propose(self, rows: RowArray) -> Proposals:
        token_ids = np.zeros((len(rows), MOST), dtype=np.int32)
        token_ids[:, : len(self.drafts)] = self.drafts
        return Proposals(np.full(len(rows), len(self.drafts), np.int32), token_ids, np.zeros(len(rows), np.int32))


class Rows:
    """Rows of a proposer, with one grammar each or none."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        grammars: Sequence[Grammar | None],
        drafts: Sequence[int] = (),
        prompt: str = "",
    ) -> None:
        self.compiled = [grammar and compiler.compile(to_source(grammar), "grammar") for grammar in grammars]
        prompt_ids = np.array(self.tokens(prompt), dtype=np.int32) if prompt else PROMPT
        requests = [
            request(f"r{row}", prompt_ids, 50, grammar=None if one is None else RowGrammar(one, ENDS))
            for row, one in enumerate(self.compiled)
        ]
        self.running = np.ones(len(requests), np.bool_)
        columns: Any = SimpleNamespace(request=requests.__getitem__, running=self.running)
        self.inner = Constant(drafts)
        self.proposer = GrammarDrafts(self.inner, columns)
        for row in range(len(requests)):
            self.proposer.enter(row, prompt_ids)

    def tokens(self, text: str) -> list[int]:
        compiled = next(one for one in self.compiled if one is not None)
        return compiled.tokenizer.tokenize_str(text)

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        self.proposer.append(np.full(len(token_ids), row), np.array(token_ids, dtype=np.int32))

    def propose(self, *rows: int) -> list[tuple[list[int], int]]:
        counts, token_ids, kinds = self.proposer.propose(np.array(rows, dtype=np.intp))
        return [(token_ids[i, : counts[i]].tolist(), int(kinds[i])) for i in range(len(rows))]

    def text(self, row: int = 0) -> str:
        ((drafts, kind),) = self.propose(row)
        assert kind in (FORCED_KIND, REPEATED_KIND) or not drafts
        compiled = self.compiled[row]
        assert compiled is not None
        return compiled.tokenizer.decode_str(drafts)


def test_forced_text_is_drafted_with_the_spaces_of_the_answer(compiler: GrammarCompiler) -> None:
    rows = Rows(compiler, [Grammar.json_schema(SCHEMA)] * 2)
    assert rows.text() == '{"name": "'
    rows.append(0, rows.tokens('{"name": "a'))
    assert rows.text() == ""  # anything may follow in a string
    rows.append(0, rows.tokens('b"'))
    assert rows.text() == ', "size":'
    rows.append(1, rows.tokens('{ "name":"ab"'))
    assert rows.text(1) == ', "size":'
    rows.append(1, rows.tokens(' ,"size":8'))
    rows.append(1, rows.tokens(" "))
    assert rows.text(1) == ',"kind":"box"}'


def test_the_grammar_of_an_ended_request_is_dropped(compiler: GrammarCompiler) -> None:
    rows = Rows(compiler, [Grammar.choice(["certainly", "no"])] * 2)
    rows.running[1] = False
    rows.append(0, rows.tokens("c"))
    assert list(rows.proposer._rows) == [0]
    assert rows.text(0) == "ertainly"


def test_a_number_that_comes_again_is_passed_once(compiler: GrammarCompiler) -> None:
    item = {
        "type": "object", "properties": {"size": {"type": "integer"}, "name": {"type": "string"}},
        "required": ["size", "name"], "additionalProperties": False,
    }  # fmt: skip
    rows = Rows(compiler, [Grammar.json_schema({"type": "array", "items": item})], prompt="5 of 7, 5 of 9")
    rows.append(0, rows.tokens('[{"size": 5, "name": "a"}'))
    for _ in range(3):
        assert rows.propose(0)[0][0] == []  # the next item, or the end
    rows.append(0, rows.tokens(', {"size": '))
    assert rows.propose(0) == [(rows.tokens("7"), NUMBER_KIND)]


def test_a_decimal_that_comes_in_parts_is_one_number(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "number"}}
    rows = Rows(compiler, [Grammar.json_schema(schema)], prompt="12.5 kg, 3 pieces, 5 boxes")
    for text in ("[12", ".", "5", ", "):
        rows.append(0, rows.tokens(text))
        (found,) = rows.propose(0)
    assert found == (rows.tokens("3"), NUMBER_KIND)


def test_the_rest_of_an_accepted_draft_is_drafted_again(compiler: GrammarCompiler) -> None:
    rows = Rows(compiler, [Grammar.choice(["certainly", "certain", "no"])])
    assert rows.text() == ""
    rows.append(0, rows.tokens("c"))
    assert rows.text() == "ertainly"
    rows.append(0, rows.tokens("ert"))
    assert rows.text() == "ainly"
    rows.append(0, rows.tokens("ain"))
    assert rows.text() == "ly"


def test_forced_text_has_the_tokens_that_it_had_before(pair_compiler: GrammarCompiler) -> None:
    rows = Rows(pair_compiler, [Grammar.json_schema({"type": "array", "items": SCHEMA, "minItems": 3})])
    apart = [token_id for byte in '"size":' for token_id in rows.tokens(byte)]
    assert len(rows.tokens('"size":')) == len(apart) - 1
    rows.append(0, rows.tokens('[{"name": "a", '))
    assert rows.propose(0) == [(rows.tokens('"size":'), FORCED_KIND)]
    rows.append(0, apart)
    rows.append(0, rows.tokens('5, "kind": "box"}, {"name": "b", '))
    assert rows.propose(0) == [(apart, REPEATED_KIND)]
    rows.append(0, apart[:2])
    assert rows.propose(0) == [(apart[2:], REPEATED_KIND)]
    rows.append(0, rows.tokens('ize":6, "kind": "box"}, {"name": "c", '))
    rows.append(0, rows.tokens('"si'))  # `si` is one token now, and ends where `i` did
    assert rows.propose(0) == [(apart[3:], REPEATED_KIND)]


def test_a_word_goes_on_as_in_the_prompt(pair_compiler: GrammarCompiler) -> None:
    grammar = Grammar.json_schema({"type": "array", "items": {"type": "string"}})
    rows = Rows(pair_compiler, [grammar] * 2, prompt='Lee Anna Bauer\n"Len" Anton Lear.')
    rows.append(0, rows.tokens('["An'))
    drafts = rows.tokens("na Bauer")
    assert rows.propose(0)[0][0][: len(drafts)] == drafts  # though " An" ends with another token in the prompt
    for begun, rest in (("Le", 'n" '), ("A", "nton Lear."), ("Le", "ar."), ("B", "auer")):
        rows.append(0, rows.tokens(f'", "{begun}'))
        assert rows.propose(0) == [(rows.tokens(rest), COPIED_KIND)]
    for text in ('", "Lex', '", "nn', '", "'):  # no such word, no beginning of one, none begun
        rows.append(0, rows.tokens(text))
        assert rows.propose(0) == [([], NUM_OTHER_KINDS)]
    rows.append(1, rows.tokens('["L'))
    rows.inner.drafts = rows.tokens("ee")
    assert rows.propose(1) == [(rows.inner.drafts, NUM_OTHER_KINDS)]  # another proposer's come first
    rows.inner.drafts = [TO_DRAFT] * 3  # of which the grammar allows none
    assert rows.propose(1) == [(rows.tokens("ee Anna Bauer"), COPIED_KIND)]


def test_words_are_sought_at_the_end_of_a_long_prompt(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MAX_PROMPT_TOKENS", len(" Lear"))
    rows = Rows(compiler, [Grammar.json_schema({"type": "string"})], prompt="Anton Lear")
    rows.append(0, rows.tokens('"Ant'))
    assert rows.propose(0) == [([], NUM_OTHER_KINDS)]
    rows.append(0, rows.tokens(" Le"))
    assert rows.propose(0) == [(rows.tokens("ar"), COPIED_KIND)]


def test_the_next_number_of_the_prompt_is_drafted_where_one_is_due(compiler: GrammarCompiler) -> None:
    fields = {"name": {"type": "string"}, "size": {"type": "integer"}, "price": {"type": "number"}}
    item = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    rows = Rows(compiler, [Grammar.json_schema({"type": "array", "items": item})], prompt="a 12 0.5, b 7 2.25, c 9 1")
    rows.append(0, rows.tokens('[{"name": "'))
    assert rows.propose(0) == [([], NUM_OTHER_KINDS)]  # digits may follow, and letters too
    rows.append(0, rows.tokens('a", "size":'))
    assert rows.propose(0) == [(rows.tokens(" 12"), NUMBER_KIND)]
    rows.append(0, rows.tokens(" "))
    assert rows.propose(0) == [(rows.tokens("12"), NUMBER_KIND)]
    rows.append(0, rows.tokens("1"))
    assert rows.propose(0) == [(rows.tokens("2"), NUMBER_KIND)]
    rows.append(0, rows.tokens('3, "price": '))  # 13, which the prompt has not
    assert rows.propose(0) == [(rows.tokens("12"), NUMBER_KIND)]
    rows.append(0, rows.tokens('0.5}, {"name": "b", "size": '))
    assert rows.propose(0) == [(rows.tokens("7"), NUMBER_KIND)]
    rows.append(0, rows.tokens('7, "price": '))
    assert rows.propose(0) == [(rows.tokens("2.25"), NUMBER_KIND)]
    rows.append(0, rows.tokens('0}, {"name": "c", "size": '))
    assert rows.propose(0) == [(rows.tokens("2"), NUMBER_KIND)]  # an integer
    rows.append(0, rows.tokens('1, "price": '))
    assert rows.propose(0) == [([], NUM_OTHER_KINDS)]  # 1 was the last


def test_drafts_of_another_proposer_end_where_the_grammar_forbids_them(compiler: GrammarCompiler) -> None:
    grammar = Grammar.regex("[a-z]{3}[0-9]{3}")
    drafts = Rows(compiler, [grammar]).tokens("ab12")
    rows = Rows(compiler, [grammar, None], drafts)
    assert rows.propose(0, 1) == [(drafts[:2], NUM_OTHER_KINDS), (drafts, 0)]
    rows.inner.drafts = [TO_DRAFT] * 3
    assert rows.propose(1, 0) == [([TO_DRAFT] * 3, 0), ([], NUM_OTHER_KINDS)]
    rows.append(0, [ENDS[0]])  # no text of the grammar
    rows.inner.drafts = drafts
    assert rows.propose(0) == [([], NUM_OTHER_KINDS)]


def test_many_rows_have_no_forced_drafts(compiler: GrammarCompiler) -> None:
    rows = Rows(compiler, [Grammar.choice(["yes"])] * (MAX_FORCED_ROWS + 1))
    assert all(drafts for drafts, _ in rows.propose(*range(MAX_FORCED_ROWS)))
    assert not any(drafts for drafts, _ in rows.propose(*range(MAX_FORCED_ROWS + 1)))


@pytest.mark.parametrize("index", range(len(WRITTEN)))
def test_the_grammar_allows_all_drafts(compiler: GrammarCompiler, index: int) -> None:
    """Answers follow drafts, or go another way at one."""
    random = np.random.default_rng(index)
    rows = Rows(compiler, [Grammar.json_schema(WRITTEN[index])], random.integers(0, 256, 8).tolist())
    (compiled,) = rows.compiled
    assert isinstance(compiled, TokenGrammar)
    answer: list[int] = []
    for _ in range(40):
        ((drafts, _),) = rows.propose(0)
        matcher = compiled.matcher(answer)
        assert matcher.validate_tokens(drafts) == len(drafts)
        taken = drafts[: random.integers(0, len(drafts) + 1)]
        matcher.consume_tokens(taken)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
        if not bits.any():
            break
        taken.append(int(random.choice(bits.nonzero()[0])))
        rows.append(0, taken)
        answer += taken
