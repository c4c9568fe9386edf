"""Drafts of rows with grammars: text that the grammar forces, else the proposer's as far as the grammar allows.

A grammar of JSON leaves a space free at most places, so that it forces little. Where one character other than a
space can follow, it is drafted, with a space before it if the answer had one there the last time.
"""

import itertools
import re
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING

from tidewheel.batch import Int32Array, RowArray
from tidewheel.grammar import TokenGrammar
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.goodput import NUM_KINDS
from tidewheel.scheduler.speculation import Proposals, Proposer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

FORCED_KIND = NUM_KINDS - 1  # of `Proposals`; other proposers use the kinds before it
MAX_FORCED_ROWS = 8  # of a call: the text of one takes 30 to 100 µs
MAX_TOKEN_BYTES = 8  # of drafts, on average
# Two that may follow are found soon in a string and in a number.
_CHARACTERS = '{}[],:"01-tfnabcdeghijklmopqrsuvwxyzA'
_SPACING = re.compile(rb'(?=([{}\[\],:"])( ?)([^ ]))')


@lru_cache(maxsize=4)
def _tokens_of_characters(tokenizer: "LLTokenizer") -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a space, and those of each other character that the tokenizer can encode."""
    space, *others = (tokenizer.tokenize_bytes(character.encode()) for character in f" {_CHARACTERS}")
    return space, [token_ids for token_ids in others if token_ids]


class _GrammarRow:
    def __init__(self, grammar: TokenGrammar, output: list[int]) -> None:
        self.matcher = grammar.matcher(output)
        self._tokenizer = grammar.tokenizer
        self._forced: list[int] = []
        self._unread = output  # tokens whose spacing has not been learned
        self._text = b""  # the end of the answer
        self._has_space: dict[bytes, bool] = {}  # between two characters

    def append(self, token_ids: list[int]) -> None:
        self.matcher.consume_tokens(token_ids)
        count = len(token_ids)
        self._forced = self._forced[count:] if self._forced[:count] == token_ids else []
        self._unread += token_ids

    def allowed(self, drafts: list[int]) -> list[int]:
        """Return the drafts before the first that the grammar forbids; no drafts, if the runner is to make them."""
        is_known = bool(drafts) and min(drafts) >= 0
        return drafts[: self.matcher.validate_tokens(drafts)] if is_known and not self.matcher.is_error() else []

    def forced(self, most: int) -> list[int]:
        """Return at most `most` tokens of forced text."""
        if not self._forced and most and not self.matcher.is_error():
            text = self._text + self._tokenizer.decode_bytes(self._unread)
            self._has_space |= {before + after: bool(space) for before, space, after in _SPACING.findall(text)}
            self._text, self._unread = text[-2:], []
            self._forced = self._tokenizer.tokenize_bytes(self._forced_text(MAX_TOKEN_BYTES * most))
        return self._forced[:most]

    def _forced_text(self, most_bytes: int) -> bytes:
        text, num_consumed = b"", 0
        while len(text) < most_bytes:
            forced = self.matcher.compute_ff_bytes()
            token_ids = self._tokenizer.tokenize_bytes(forced) if forced else self._likely((self._text + text)[-1:])
            count = self.matcher.try_consume_tokens(token_ids)
            if not count:
                break
            num_consumed += count
            text += self._tokenizer.decode_bytes(token_ids[:count])
        self.matcher.rollback(num_consumed)
        return text

    def _likely(self, before: bytes) -> list[int]:
        """Return the tokens of the one character that may follow, with a space where it is likely; else nothing."""
        space, characters = _tokens_of_characters(self._tokenizer)
        allowed = (ids for ids in characters if self.matcher.validate_tokens(ids) == len(ids))
        candidates = list(itertools.islice(allowed, 2))
        if len(candidates) != 1:
            return []
        likely = self._has_space.get(before + self._tokenizer.decode_bytes(candidates[0]), before in (b":", b","))
        spaced = space + candidates[0]
        return spaced if likely and self.matcher.validate_tokens(spaced) == len(spaced) else candidates[0]


class GrammarDrafts:
    """Proposer that cuts another's drafts to what a row's grammar allows, and drafts text that the grammar forces."""

    def __init__(self, proposer: Proposer, columns: RowColumns) -> None:
        self._proposer = proposer
        self._columns = columns
        self._rows: dict[int, _GrammarRow] = {}
        self.is_free = proposer.is_free

    def enter(self, row: int, token_ids: Int32Array) -> None:
        self._proposer.enter(row, token_ids)
        self._rows.pop(row, None)
        request = self._columns.request(row)
        if request.grammar is not None:
            output = token_ids[request.num_prompt_tokens :].tolist()
            self._rows[row] = _GrammarRow(request.grammar.grammar, output)

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        self._proposer.append(rows, token_ids)
        if not self._rows:
            return
        for row, pairs in itertools.groupby(zip(rows.tolist(), token_ids.tolist(), strict=True), itemgetter(0)):
            if row in self._rows:
                self._rows[row].append([token_id for _, token_id in pairs])

    def propose(self, rows: RowArray) -> Proposals:
        proposals = self._proposer.propose(rows)
        found = [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]
        most = proposals.token_ids.shape[1] if len(found) <= MAX_FORCED_ROWS else 0
        for index, row in found:
            drafts = row.forced(most)
            if drafts:
                proposals.token_ids[index, : len(drafts)] = drafts
                proposals.kinds[index] = FORCED_KIND
            else:
                drafts = row.allowed(proposals.token_ids[index, : proposals.counts[index]].tolist())
            proposals.counts[index] = len(drafts)
        return proposals
