"""Draft tokens: what a row's next tokens may be, checked by the model several in a step.

A row with k drafts is computed at k + 1 positions. Draws are a function of (seed, position), so the tokens sampled
there are those of plain steps while all drafts before equal their samples (compare Leviathan et al., "Fast inference
from transformers via speculative decoding", 2023, whose rule of acceptance draws anew).
"""

import itertools
import re
from bisect import bisect_left, bisect_right
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tidewheel.batch import NO_DRAFT, TO_DRAFT, BoolArray, Int32Array, RowArray, ScheduledBatch
from tidewheel.grammar import TokenGrammar
from tidewheel.request import Request
from tidewheel.scheduler.columns import RowColumns
from tidewheel.scheduler.goodput import NUM_KINDS, DecodeStep, Goodput
from tidewheel.stats import EngineStats

if TYPE_CHECKING:
    from llguidance import LLTokenizer

ANY_BUDGET = 1 << 30
COPIED_KIND, NUMBER_KIND, FORCED_KIND, REPEATED_KIND = range(NUM_KINDS - 4, NUM_KINDS)
NUM_OTHER_KINDS = (NUM_KINDS - 4) // 2  # of prompt lookup or the runner; as many again in rows with grammars
MAX_FORCED_ROWS = 8  # with a grammar; of more, none gets forced text: a row takes 30 to 150 µs
BYTES_PER_DRAFT = 8  # of the text that is drafted
MAX_WORD_BYTES = 32
MAX_PROMPT_TOKENS = 8192  # at the end of a prompt, that are searched for words and numbers
RECENT_BYTES = 4096  # at the end of the answer, that are searched for spaces
# Ordered so that in a string or a number, two that are allowed are found soon.
_CHARACTERS = '{}[],:"01-tfnabcdeghijklmopqrsuvwxyzA'
_NUMBER = re.compile(rb"\d+(?:\.\d+)?")
_WORDS_ALONE = bytes(byte if byte >= 128 or chr(byte).isalnum() else 32 for byte in range(256))  # others: a space


class Proposals(NamedTuple):
    """Drafts that could follow the known tokens of n rows."""

    counts: Int32Array  # [n]
    token_ids: Int32Array  # [n, most], `TO_DRAFT` where the runner drafts
    kinds: Int32Array  # [n] in [0, NUM_KINDS): acceptance is estimated for each kind


class Proposer:
    is_free: bool  # proposals cost next to no time: their acceptance is learned in all steps

    def enter(self, row: int, token_ids: Int32Array) -> None:
        """Begin a row with all tokens of its request so far."""

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        """Append known tokens [n] of rows; a row may repeat, in order of its tokens."""

    def propose(self, rows: RowArray) -> Proposals:
        """Propose what follows the known tokens of distinct rows."""
        raise NotImplementedError


class RunnerDrafts(Proposer):
    """Proposer of drafts that the runner makes on the device."""

    is_free = False

    def __init__(self, most: int) -> None:
        self._most = most

    def propose(self, rows: RowArray) -> Proposals:
        token_ids = np.full((len(rows), self._most), TO_DRAFT, np.int32)
        return Proposals(np.full(len(rows), self._most, np.int32), token_ids, np.zeros(len(rows), np.int32))


@lru_cache(maxsize=4)
def _tokens_of_characters(tokenizer: "LLTokenizer") -> tuple[list[int], list[list[int]]]:
    """Return the tokens of a space, and those of each other character that the tokenizer can encode."""
    space, *others = (tokenizer.tokenize_bytes(character.encode()) for character in f" {_CHARACTERS}")
    return space, [token_ids for token_ids in others if token_ids]


class _GrammarRow:
    def __init__(self, grammar: TokenGrammar, prompt: list[int], output: list[int]) -> None:
        self.matcher = grammar.matcher(output)
        self._tokenizer = grammar.tokenizer
        self._forced: list[int] = []
        self._token_ids: list[int] = []  # of the answer
        self._text, self._ends = b"", [0]  # its text, and where in it each token ends
        self._read(output)
        self._prompt = self._tokenizer.decode_bytes(prompt[-MAX_PROMPT_TOKENS:])
        self._words = b" " + self._prompt.translate(_WORDS_ALONE)
        self._numbers = _NUMBER.findall(self._prompt)  # those after the last that the answer has too
        self._last_place = self._num_read = 0  # of the last copied word; bytes of the answer read for numbers
        self.forced_kind = FORCED_KIND  # of the last `forced`

    def append(self, token_ids: list[int]) -> None:
        self.matcher.consume_tokens(token_ids)
        self._forced = self._forced[len(token_ids) :] if self._forced[: len(token_ids)] == token_ids else []
        self._read(token_ids)

    def _read(self, token_ids: list[int]) -> None:
        texts = [self._tokenizer.decode_bytes([token_id]) for token_id in token_ids]
        self._ends += [self._ends[-1] + size for size in itertools.accumulate(map(len, texts))]
        self._text += b"".join(texts)
        self._token_ids += token_ids

    def allowed(self, drafts: list[int]) -> list[int]:
        """Return the drafts before the first that the grammar forbids; no drafts, if the runner is to make them."""
        is_known = bool(drafts) and min(drafts) >= 0
        return drafts[: self.matcher.validate_tokens(drafts)] if is_known and not self.matcher.is_error() else []

    def forced(self, most: int) -> list[int]:
        """Return at most `most` tokens of forced text, or of a number that is due."""
        if not self._forced and most and not self.matcher.is_error():
            self._forced = self._as_before(self._forced_text(BYTES_PER_DRAFT * most)) or self._number()
        return self._forced[:most]

    def copied(self, most: int) -> list[int]:
        """Return up to `most` tokens that end the last word as in the prompt, after the last place if possible."""
        word = self._text[-MAX_WORD_BYTES:].translate(_WORDS_ALONE).rpartition(b" ")[2]
        place = max(self._words.find(b" " + word, self._last_place), self._words.find(b" " + word))
        if place < 0 or not 0 < len(word) < MAX_WORD_BYTES:
            return []
        self._last_place, end = place, place + len(word)
        return self._tokenizer.tokenize_bytes(self._prompt[end : end + BYTES_PER_DRAFT * most])[:most]

    def _number(self) -> list[int]:
        """Return the tokens of the prompt's next number, where the grammar awaits one. Set `forced_kind`."""
        if re.search(rb"\d\.?\Z", self._text[-2:]) or self.allowed(self._tokenizer.tokenize_bytes(b"a")):
            return []
        for given in _NUMBER.finditer(self._text, self._num_read):  # those since the last call
            self._num_read = given.end()
            if given[0] in self._numbers:
                self._numbers = self._numbers[self._numbers.index(given[0]) + 1 :]
        self.forced_kind, space = NUMBER_KIND, b" " * (self._text[-1:] == b":")
        return self.allowed(self._tokenizer.tokenize_bytes(space + self._numbers[0])) if self._numbers else []

    def _as_before(self, text: bytes) -> list[int]:
        """Split forced text as last in the answer, since a model may split a name its own way. Set `forced_kind`."""
        begin = self._text.rfind(text)
        first, last = bisect_left(self._ends, begin), bisect_right(self._ends, begin + len(text)) - 1
        has_split = begin >= 0 and self._ends[first] == begin
        self.forced_kind = REPEATED_KIND if has_split else FORCED_KIND
        if not has_split:
            return self._tokenizer.tokenize_bytes(text)
        return self._token_ids[first:last] + self._tokenizer.tokenize_bytes(text[self._ends[last] - begin :])

    def _forced_text(self, most_bytes: int) -> bytes:
        text, num_consumed = b"", 0
        while len(text) < most_bytes:
            forced = self.matcher.compute_ff_bytes()
            token_ids = self._tokenizer.tokenize_bytes(forced) if forced else self._likely(text or self._text)
            count = self.matcher.try_consume_tokens(token_ids)
            if not count:
                break
            num_consumed += count
            text += self._tokenizer.decode_bytes(token_ids[:count])
        self.matcher.rollback(num_consumed)
        return text

    def _likely(self, text: bytes) -> list[int]:
        """Return the tokens of the one character that may follow, and of a likely space before it; else none."""
        space, characters = _tokens_of_characters(self._tokenizer)
        allowed = (ids for ids in characters if self.matcher.validate_tokens(ids) == len(ids))
        candidates = list(itertools.islice(allowed, 2))
        if len(candidates) != 1:
            return []
        before, after = text[-1:], self._tokenizer.decode_bytes(candidates[0])
        last, last_spaced = (self._text.rfind(before + between + after, -RECENT_BYTES) for between in (b"", b" "))
        likely = last_spaced > last if last != last_spaced else before in (b":", b",")
        spaced = space + candidates[0]
        return spaced if likely and self.matcher.validate_tokens(spaced) == len(spaced) else candidates[0]


class GrammarDrafts(Proposer):
    """Proposer that drafts text which a row's grammar forces, else what the grammar allows of another's drafts.

    A grammar of JSON leaves a space free at most places, so that it forces little. Where one character other than a
    space can follow, it is drafted, with a space before it if the answer had one there the last time. Where a number
    is due, the prompt's next is drafted: records mostly follow their text. Failing these, the rest of the last word
    is drafted as in the prompt. Prompt lookup misses names, which follow a space in a prompt and quotation marks in
    JSON, so that their tokens differ.
    """

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
            prompt, output = np.split(token_ids, [request.num_prompt_tokens])
            self._rows[row] = _GrammarRow(request.grammar.grammar, prompt.tolist(), output.tolist())

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        self._proposer.append(rows, token_ids)
        self._rows = {row: one for row, one in self._rows.items() if self._columns.running[row]}
        if not self._rows:
            return
        for row, pairs in itertools.groupby(zip(rows.tolist(), token_ids.tolist(), strict=True), itemgetter(0)):
            if row in self._rows:
                self._rows[row].append([token_id for _, token_id in pairs])

    def propose(self, rows: RowArray) -> Proposals:
        counts, token_ids, kinds = proposals = self._proposer.propose(rows)
        found = [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]
        most = token_ids.shape[1] if len(found) <= MAX_FORCED_ROWS else 0
        for index, row in found:
            drafts, kind = row.forced(most), row.forced_kind
            if not drafts:
                drafts, kind = row.allowed(token_ids[index, : counts[index]].tolist()), kinds[index] + NUM_OTHER_KINDS
            if not drafts and most and (copied := row.allowed(row.copied(most))):
                drafts, kind = copied, COPIED_KIND
            token_ids[index, : len(drafts)] = drafts
            counts[index], kinds[index] = len(drafts), kind
        return proposals


class Speculation:
    """Owner of the drafts proposed for running rows, which chooses those that pay."""

    def __init__(
        self, proposer: Proposer, goodput: Goodput, most: int, columns: RowColumns, stats: EngineStats
    ) -> None:
        self._proposer = proposer
        self._goodput = goodput
        goodput.classes = columns.classes  # which change while requests run
        self._columns = columns
        self._stats = stats
        self._counts, self._kinds = np.zeros((2, columns.num_rows), dtype=np.int32)
        self._token_ids = np.zeros((columns.num_rows, most), dtype=np.int32)
        self.has_proposals = False
        self._had_drafts = False  # the step that is applied
        self._has_caught_up = False  # in the last step with drafts
        self._unseen: list[tuple[RowArray, Int32Array]] = []  # rows and tokens of steps that the proposer lacks
        self._last_rows: RowArray = np.empty(0, dtype=np.intp)  # of the last step; a row with accepted drafts repeats
        self._num_vain_looks = 0  # since a row began or drafts were of use

    def enter(self, request: Request) -> None:
        self._append_unseen()
        self._num_vain_looks = 0
        output = np.array(request.output_token_ids, dtype=np.int32)
        self._proposer.enter(request.row, np.concatenate((request.prompt_token_ids, output)))
        self._goodput.enter(request.row)
        self._counts[request.row] = 0

    def choose(self, rows: RowArray, most: Int32Array, budget: int) -> Int32Array:
        """Return how many drafts of distinct rows pay in a step [n]: at most `most` [n], in all at most `budget`."""
        counts = np.minimum(self._counts.take(rows), most)
        return self._goodput.choose(rows, counts, self._kinds.take(rows), budget) if counts.any() else counts

    def is_worthwhile(self) -> bool:
        """Return whether drafts of the running rows would pay. If so, looks become frequent again."""
        if not self.has_proposals:
            return False
        rows = self._columns.running.nonzero()[0]
        if pays := bool(self.choose(rows, self._counts.take(rows), ANY_BUDGET).any()):
            self._num_vain_looks = 0
        return pays

    def drafts(self, rows: RowArray, counts: Int32Array) -> Int32Array:
        """Return the first `counts` [n] drafts of rows [sum of counts], row by row."""
        return self._token_ids[rows][np.arange(self._token_ids.shape[1]) < counts[:, None]]

    def observe(self, rows: RowArray, tokens: Int32Array) -> None:
        """Learn a step's tokens [n] of running rows; a row with accepted drafts repeats."""
        if self.has_proposals and self._proposer.is_free and not self._had_drafts:
            self._observe_unused(rows, tokens)
        self._had_drafts = False
        self._last_rows = rows
        self._unseen.append((rows, tokens))

    def _append_unseen(self) -> None:
        if len(self._unseen) == 1:
            self._proposer.append(*self._unseen[0])
        elif self._unseen:
            rows, tokens = (np.concatenate(parts) for parts in zip(*self._unseen, strict=True))
            order = rows.argsort(kind="stable")
            self._proposer.append(rows[order], tokens[order])
        self._unseen.clear()

    def _observe_unused(self, rows: RowArray, tokens: Int32Array) -> None:
        has_proposal, num_rows = self._counts.take(rows) > 0, len(rows)
        rows, tokens = rows[has_proposal], tokens[has_proposal]
        num_right = (self._token_ids[rows, 0] == tokens).astype(np.int32)
        self._goodput.observe_drafts(rows, self._kinds.take(rows), np.ones_like(num_right), num_right)
        if self._goodput.cost.wait and 2 * num_right.sum() >= max(num_rows, 1):  # else frequent looks only cost time
            self._num_vain_looks = 0

    def propose(self) -> None:
        """Propose what follows the tokens of the rows that were observed last; seldom, if looks were in vain."""
        if not self._goodput.is_look_due(len(self._unseen), self._num_vain_looks):
            self._counts[:] = 0
            self.has_proposals = False
            return
        self._num_vain_looks += 1
        self._append_unseen()
        rows = (np.bincount(self._last_rows, minlength=len(self._counts)) * self._columns.running).nonzero()[0]
        self._counts[rows], self._token_ids[rows], self._kinds[rows] = self._proposer.propose(rows)
        self.has_proposals = bool(self._counts.any())

    def observe_drafts(
        self, rows: RowArray, draft_tokens: Int32Array, follows: BoolArray, *, has_caught_up: bool = False
    ) -> None:
        """Learn which drafts of a step were accepted. `follows` [n]: the token counts. Call before `observe`."""
        firsts = (draft_tokens == NO_DRAFT).nonzero()[0]
        num_drafts = np.add.reduceat(draft_tokens >= 0, firsts, dtype=np.int32)
        num_accepted = np.add.reduceat(follows, firsts, dtype=np.int32) - 1
        has_drafts = (num_drafts > 0) & (num_accepted >= 0)
        rows = rows[firsts[has_drafts]]
        num_drafts, num_accepted = num_drafts[has_drafts], num_accepted[has_drafts]
        num_tested = np.minimum(num_accepted + 1, num_drafts)
        self._goodput.observe_drafts(rows, self._kinds.take(rows), num_tested, num_accepted)
        self._columns.num_draft_tokens[rows] += num_drafts
        self._columns.num_accepted_draft_tokens[rows] += num_accepted
        self._stats.num_drafts += len(rows)
        self._stats.num_draft_tokens += int(num_drafts.sum())
        self._stats.num_accepted_draft_tokens += int(num_accepted.sum())
        self._had_drafts, self._has_caught_up = True, has_caught_up
        if num_accepted.any() or has_caught_up:
            self._num_vain_looks = 0

    def observe_step(self, batch: ScheduledBatch, seconds: float, *, has_waited: bool) -> None:
        """Learn the seconds of the last step, if of decodes alone, with drafts, a wait or proposals for the next."""
        num_entries = len(batch.rows)
        if batch.num_decodes != num_entries or not (len(batch.draft_tokens) or has_waited or self.has_proposals):
            return
        num_entries_of_rows = np.bincount(batch.rows)
        num_rows = int(np.count_nonzero(num_entries_of_rows))
        caught_up = self._has_caught_up and num_entries > num_rows
        step = DecodeStep(num_rows, num_entries - num_rows, int(num_entries_of_rows.max()) - 1, has_waited, caught_up)
        self._goodput.observe_step(*np.unique(self._last_rows, return_counts=True), step, seconds)
