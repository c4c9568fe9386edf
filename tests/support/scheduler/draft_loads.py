"""Random loads of an engine, run once without and once with speculation: the tokens must be the same.

The runner computes each token from the tokens before it, over a cache that tells on misuse. After each step the block
tables, positions and free blocks must be those of an engine that never drafted.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from support.engine.fake_runner import VOCAB_SIZE, Row, next_token, prefix_hash
from support.engine.late_runner import LatePending, LateRunner
from support.engine.request_ledger import RequestLedger
from support.kvcache.invariants import held_blocks, held_sources
from support.scheduler.invariants import check_invariants
from support.scheduler.scheduling import make_config, make_request
from tidewheel.batch import (
    NOT_DRAFTED,
    TO_DRAFT,
    Int32Array,
    RowArray,
    RowError,
    SampledTokens,
    ScheduledBatch,
    StepOutputs,
)
from tidewheel.engine.core import EngineCore
from tidewheel.errors import TidewheelError
from tidewheel.kvcache.manager import KVCacheManager
from tidewheel.lora import NO_SLOT, Lora
from tidewheel.request import FinishReason, Priority, Request
from tidewheel.sampling import TopLogprobs
from tidewheel.scheduler.goodput import Goodput
from tidewheel.scheduler.policy import POLICIES
from tidewheel.scheduler.prompt_lookup import PromptLookup
from tidewheel.scheduler.scheduler import Scheduler
from tidewheel.scheduler.speculation import Proposals, Proposer

MAX_STEPS = 5000
NUM_KINDS = 8  # of proposals
NUM_ADAPTERS = 3
STRATEGIES: list[dict[str, Any]] = [
    *[{}] * 6,
    {"scheduling_strategy": "static", "batch_size": 1},
    {"scheduling_strategy": "dynamic"},
    {"scheduling_strategy": "predictive"},
    {"scheduling_strategy": "hybrid", "hybrid_threshold": 3, "hybrid_backlog": 4},
]


def seed_of_next(content: int, token_ids: Sequence[int]) -> int:
    """Return what the next token follows from: all tokens, or in a text that repeats mostly the last one."""
    repeats = token_ids[0] % 2 == 1 and content % 8 > 0
    return zlib.crc32(bytes(token_ids[-1:])) if repeats else content


def continuation(
    prompt: Sequence[int], max_tokens: int, min_tokens: int = 0, stop_token_ids: Sequence[int] = ()
) -> tuple[list[int], FinishReason]:
    """Return output and end of a request, computed alone."""
    token_ids, content = list(prompt), 0
    for token_id in token_ids:
        content = prefix_hash(content, token_id)
    for count in range(max_tokens):
        token_id = next_token(seed_of_next(content, token_ids), count, min_tokens, stop_token_ids)
        token_ids.append(token_id)
        if token_id in stop_token_ids and count + 1 >= min_tokens:
            return token_ids[len(prompt) :], FinishReason.STOP
        content = prefix_hash(content, token_id)
    return token_ids[len(prompt) :], FinishReason.LENGTH


class PlannedGroup(NamedTuple):
    """Requests with one prompt that arrive at a turn of the engine's loop."""

    turn: int
    request_ids: tuple[str, ...]
    prompt: tuple[int, ...]
    fields: dict[str, Any]
    time_left: float | None
    soft_time_left: float | None
    lora: int | None = None

    def some_token(self, draw: random.Random) -> int:
        """Return a number of tokens that the requests have at some time."""
        return len(self.prompt) + draw.randrange(self.fields["max_tokens"])

    def answered(self) -> tuple[int, ...]:
        """Return prompt and answer."""
        limits = (self.fields[name] for name in ("max_tokens", "min_tokens", "stop_token_ids"))
        return (*self.prompt, *continuation(self.prompt, *limits)[0])

    def requests(self, now: float, loras: Sequence[Lora]) -> list[Request]:
        made: list[Request] = []
        for request_id in self.request_ids:
            request = make_request(
                request_id,
                self.prompt,
                arrival_time=now,
                deadline=None if self.time_left is None else now + self.time_left,
                soft_deadline=None if self.soft_time_left is None else now + self.soft_time_left,
                leader=made[0] if made else None,
                **self.fields,
            )
            if self.lora is not None:
                request.lora = loras[self.lora]
                request.cache_salt += f"/{request.lora.name}"
            made.append(request)
        return made


@dataclass(frozen=True)
class Load:
    seed: int
    num_blocks: int
    block_size: int
    settings: dict[str, Any]
    groups: list[PlannedGroup]
    num_drafts: int  # most of a row
    proposer: str
    random_lengths: bool  # in place of those of `Goodput`
    cancels: list[tuple[int, str]]  # turn and id
    not_finite: set[str]  # requests after some of whose prefixes logits are not finite
    row_errors: dict[str, int]  # tokens at which a request cannot be launched
    fails_at_launch: Counter[int]  # out of memory, by step
    fails_late: Counter[int]


def random_load(seed: int) -> Load:
    draw = random.Random(seed)
    is_talk = draw.random() < 0.4  # requests go on from answers
    is_cached = is_talk or draw.random() < 0.6
    num_host_blocks = draw.choice([0, 6, 12]) if is_cached else 0
    max_loras = draw.choice([0, 0, 1, 2])
    num_drafts = draw.choice([1, 2, 3, 8, 32])
    settings = {
        "enable_prefix_caching": is_cached,
        "num_host_blocks": num_host_blocks,
        "preemption_mode": draw.choice(["swap", "auto"]) if num_host_blocks else "recompute",
        "max_num_seqs": draw.choice([1, 2, 4, 4, 6, 8]),
        "max_num_batched_tokens": draw.choice([8, 16, 32, 64]),
        "max_inflight_steps": draw.choice([1, 1, 2]),
        "policy": draw.choice(["priority", "fifo", *POLICIES]),
        "watermark": draw.choice([0.0, 0.0, 0.25]),
        "admit_by_growth": draw.choice([False, False, True]),
        "ageing_s": draw.choice([3.0, 10.0, 1000.0]),
        "max_preemptions": draw.choice([1, 4, 0]),
        "long_prefill_token_threshold": draw.choice([None, 3]),
        "target_tpot_ms": draw.choice([None, None, 500.0]),
        "max_loras": max_loras,
        "num_speculative_tokens": num_drafts,
        **draw.choice(STRATEGIES),
    }
    if settings.get("scheduling_strategy") == "static":
        settings["target_tpot_ms"] = None
    block_size = draw.choice([1, 2, 4, 4, 16])
    num_blocks = draw.choice([24, 48, 96, 200]) // block_size + draw.randint(1, 4)
    groups = list(_talk(draw) if is_talk else _groups(draw, max_loras))
    names = [name for group in groups for name in group.request_ids]
    fails, of = draw.random() < 0.3, {name: group for group in groups for name in group.request_ids}
    return Load(
        seed,
        num_blocks,
        block_size,
        settings,
        groups,
        num_drafts,
        proposer=draw.choice(["prompt lookup", "right or wrong", "right or wrong", "runner"]),
        random_lengths=draw.random() < 0.75,
        cancels=[(draw.randint(1, 80), name) for name in names if draw.random() < 0.15],
        not_finite={name for name in names if fails and draw.random() < 0.4},
        row_errors={name: of[name].some_token(draw) for name in names if fails and draw.random() < 0.2},
        fails_at_launch=Counter(draw.randint(0, 30) for _ in range(draw.choice([0, 0, 0, 2]))),
        fails_late=Counter(draw.randint(0, 30) for _ in range(draw.choice([0, 0, 0, 2]))),
    )


def _groups(draw: random.Random, max_loras: int) -> Iterator[PlannedGroup]:
    """Yield any requests, some with prompts that begin alike or that others are about to say."""
    base = draw.choices(range(VOCAB_SIZE), k=24)
    turn, groups = 0, list[PlannedGroup]()
    for number in range(draw.randint(1, 10)):
        turn += draw.choice([0, 0, 1, 5, 20])
        shared = draw.choice([0, 0, 4, 8, 24])
        prompt = (*base[:shared], *draw.choices(range(VOCAB_SIZE), k=draw.randint(0 if shared else 1, 8)))
        if groups and draw.random() < 0.3:
            prompt = draw.choice(groups).answered()[: draw.choice([20, 120])]
        count = draw.choice([1, 1, 1, 1, 3])
        group = PlannedGroup(
            turn,
            tuple(f"r{number}.{index}" for index in range(count)),
            prompt,
            _limits(draw)
            | {
                "priority": draw.choice(list(Priority)),
                "cache_salt": draw.choice(["", "", "x"]),
                "tenant": draw.choice(["", "", "other"]),
                "session_id": draw.choice(["", "", "s"]) if count == 1 else "",
                "session_ttl": 20.0,
            },
            draw.choice([None, None, None, 20.0, 80.0]),
            draw.choice([None, None, None, 5.0]),
            draw.randrange(NUM_ADAPTERS) if max_loras and draw.random() < 0.6 else None,
        )
        groups.append(group)
        yield group


def _talk(draw: random.Random) -> Iterator[PlannedGroup]:
    """Yield requests each of which goes on from the answer of another, mostly after its end."""
    turn, groups = 0, list[PlannedGroup]()
    for number in range(draw.randint(4, 16)):
        prompt = tuple(draw.choices(range(VOCAB_SIZE), k=draw.randint(0 if groups else 1, 3)))
        if groups:
            prompt = (*draw.choice(groups[-3:]).answered(), *prompt)[:160]
        group = PlannedGroup(turn, (f"r{number}",), prompt, _limits(draw), None, None)
        groups.append(group)
        yield group
        turn += draw.choice([1, 10, 40])


def _limits(draw: random.Random) -> dict[str, Any]:
    max_tokens = draw.choice([1, 2, 8, 24, 40, 80])
    return {
        "max_tokens": max_tokens,
        "min_tokens": min(draw.choice([0, 0, 3, 8]), max_tokens),
        "stop_token_ids": tuple(draw.sample(range(VOCAB_SIZE), k=draw.choice([0, 0, 1, 3]))),
    }


class DraftRunner(LateRunner):
    """A late runner whose rows may fail, with log-probabilities that name their token, and slots of adapters."""

    def __init__(self, load: Load, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.not_finite = load.not_finite
        self.row_errors = dict(load.row_errors)
        self.fails_at_launch = Counter(load.fails_at_launch)
        self.fails_late = Counter(load.fails_late)
        self.device: dict[int, Lora] = {}
        self.num_failed_drafts = 0  # steps with drafts that failed

    def launch(self, batch: ScheduledBatch) -> LatePending:
        is_again = batch.step_id < self.num_steps
        self.num_failed_drafts += is_again and len(batch.draft_tokens) > 0
        if len(batch.draft_tokens) and not is_again:
            assert not self._queue, "a step with drafts does not run alone"
        pending = super().launch(batch)
        ends = (batch.start_positions + batch.num_scheduled_tokens).tolist()
        for row, end in zip(batch.rows.tolist(), ends, strict=True):
            name = self._name_of(batch, row)
            if end >= self.row_errors.get(name, end + 1):
                del self.row_errors[name]
                pending.fails = True
                if is_again:
                    self._queue.pop()
                raise RowError(row)
        return pending

    def _name_of(self, batch: ScheduledBatch, row: int) -> str:
        requests = {new.row: new.request for new in batch.new_rows}
        if row in requests:
            return requests[row].request_id
        known = [new.request for entry in self._queue for new in entry.batch.new_rows if new.row == row]
        return (known[-1] if known else self.rows[row].new_row.request).request_id

    def _execute(self, entry: LatePending) -> SampledTokens | None:
        for slot, lora in entry.batch.lora_loads:  # also of a step that fails
            self.device[slot] = lora
        return super()._execute(entry)

    def _compute(self, batch: ScheduledBatch) -> SampledTokens:
        slots = batch.lora_slots.tolist() or [NO_SLOT] * len(batch.rows)
        for row, slot in zip(batch.rows.tolist(), slots, strict=True):
            assert self.device.get(slot) is self.rows[row].new_row.request.lora, "a row computes with another adapter"
        sampled = super()._compute(batch)
        found = enumerate(sampled.token_ids.tolist())
        logprobs = {index: TopLogprobs(0.0, 1, (token_id,), (0.0,)) for index, token_id in found if token_id >= 0}
        return SampledTokens(batch.step_id, sampled.token_ids, logprobs, draft_tokens=sampled.draft_tokens)

    def _sample(self, row: Row, end: int) -> int:
        new = row.new_row
        if self._breaks(row, end):
            return SampledTokens.NOT_FINITE
        seed = seed_of_next(row.contents[end - 1], row.token_ids[:end])
        num_output_tokens = end - new.request.num_prompt_tokens
        return next_token(seed, num_output_tokens, new.sampling.min_tokens, new.request.stop_token_ids)

    def _breaks(self, row: Row, num_tokens: int) -> bool:
        return row.new_row.request.request_id in self.not_finite and row.contents[num_tokens - 1] % 12 == 0


class Answer(NamedTuple):
    token_ids: list[int]
    end: str  # finish reason, or the name of the error

    @property
    def is_sure(self) -> bool:
        """Return whether the tokens alone decide the end."""
        return self.end in ("stop", "length", "NumericError")


class LoadRun(RequestLedger):
    """The engine's loop over a load, on a scripted clock, without or with drafts."""

    def __init__(self, load: Load, *, drafts: bool = False) -> None:
        super().__init__()
        self.load = load
        changes = dict(load.settings)
        kv = KVCacheManager(
            load.num_blocks,
            load.block_size,
            enable_prefix_caching=changes.pop("enable_prefix_caching"),
            num_host_blocks=changes.pop("num_host_blocks"),
        )
        self.config = config = make_config(**changes)
        self.scheduler = Scheduler(config, kv)
        self.loras = [Lora(f"a{number}", number, Path()) for number in range(NUM_ADAPTERS)]
        self.loading: list[Lora] = []
        self.scheduler.loras.load = self.loading.append
        self.proposer: Proposer | None = None
        self.runner = DraftRunner(
            load,
            num_rows=config.num_rows,
            num_blocks=load.num_blocks,
            block_size=load.block_size,
            token_budget=config.max_num_batched_tokens,
            salt_of=self._salt_of,
        )
        self.now = 0.0
        self.turn = 0
        self.places: dict[tuple[str, int], tuple[int, int]] = {}  # position and slots of a request, by its tokens
        self.core = EngineCore(self.scheduler, self.runner, self.take, receive=self.receive, clock=lambda: self.now)
        if drafts:
            self._speculate(random.Random(load.seed))
        self._apply = self.scheduler.apply
        self.scheduler.apply = self.apply  # type: ignore[method-assign]

    def _speculate(self, draw: random.Random) -> None:
        most, num_rows = self.load.num_drafts, self.config.num_rows
        chance = draw.choice([0.0, 0.5, 0.8, 0.95, 1.0])
        if self.load.proposer == "prompt lookup":
            self.proposer = PromptLookup(num_rows, self.config.max_model_len, most)
        else:
            self.proposer = DraftProposer(
                num_rows, most, draw, chance=chance, by_runner=self.load.proposer == "runner"
            )
        self.scheduler.use_proposer(self.proposer)
        self.runner.draft_of = lambda row: drafted(row, draw, chance)
        speculation = self.scheduler._state.speculation
        assert speculation is not None
        if self.load.random_lengths:
            speculation._goodput = RandomLengths(num_rows, most, draw)

    def _salt_of(self, request_id: str) -> str:
        request = self.requests[request_id]
        return f"{request.tenant}/{request.cache_salt}"

    def expected_output(self, request: Request) -> tuple[list[int], FinishReason]:
        prompt, min_tokens = request.prompt_token_ids.tolist(), request.sampling.min_tokens
        return continuation(prompt, request.max_tokens, min_tokens, request.stop_token_ids)

    def receive(self) -> None:
        self.now += 1.0
        self.turn += 1
        for lora in self.loading:
            lora.weights = lora.name
        self.loading.clear()
        for group in self.load.groups:
            if group.turn == self.turn - 1:
                self._add(group.requests(self.now, self.loras))
        for turn, request_id in self.load.cancels:
            if turn == self.turn:
                self.core.cancel(request_id)

    def _add(self, requests: list[Request]) -> None:
        try:
            evicted = self.scheduler.add_group(requests, self.now)
        except TidewheelError:
            return
        for request in requests:
            self.accept(request)
        self.take(StepOutputs([], np.empty(0, np.int32), None, evicted))

    def take(self, outputs: StepOutputs) -> None:
        super().take(outputs)
        logprobs = outputs.logprobs or {}
        for index, token_id in enumerate(outputs.token_ids.tolist()):
            assert index in logprobs and logprobs[index].top_ids == (token_id,), "log-probabilities of another token"

    def apply(self, batch: ScheduledBatch, sampled: SampledTokens, now: float) -> StepOutputs:
        outputs = self._apply(batch, sampled, now)
        self._check_blocks()
        return outputs

    def _check_blocks(self) -> None:
        """Check that each row has the blocks of its computed and scheduled tokens, and that no others are taken."""
        state = self.scheduler._state
        columns, kv = state.columns, state.kv
        starts = columns.num_computed_tokens + columns.num_inflight_tokens
        used: set[int] = set()
        for row in columns.running.nonzero()[0].tolist():
            start, table = int(starts[row]), kv.block_table(row)
            num_needed = kv.num_blocks_for(max(start, int(columns.num_entered_tokens[row])))
            assert len(table) == num_needed, f"row {row} has {len(table)} blocks for {start} computed tokens"
            assert int(columns.num_slots[row]) == num_needed * kv.block_size
            assert start <= int(columns.num_tokens[row] + columns.num_inflight_samples[row])
            used.update(table)
            if not state.in_flight:
                request = columns.request(row)
                key = request.request_id, int(columns.num_tokens[row])
                if start == key[1] - 1 and not request.num_preemptions:
                    self.places[key] = start, len(table)
        used.update(held_blocks(kv.transfers), held_sources(kv.transfers))
        assert kv.num_free_blocks == kv.num_blocks - len(used), "blocks are kept that no row needs"

    def _check_proposer(self) -> None:
        """Check that the proposer knows the tokens of each running row, but those it has not been told yet."""
        columns, speculation = self.scheduler._state.columns, self.scheduler._state.speculation
        unseen = () if speculation is None else speculation._unseen
        untold = [row for rows, _ in unseen for row in rows.tolist()]
        for row in columns.running.nonzero()[0].tolist() if isinstance(self.proposer, DraftProposer) else ():
            request = columns.request(row)
            expected = [*request.prompt_token_ids.tolist(), *self.delivered[request.request_id]]
            told = expected[: len(expected) - untold.count(row)]
            assert self.proposer.token_ids[row] == told, "a proposer drafts after other tokens"

    def run(self) -> dict[str, Answer]:
        last_turn = max([0, *(group.turn for group in self.load.groups)]) + 2
        for _ in range(MAX_STEPS):
            worked = self.core.step()
            check_invariants(self.scheduler)
            self._check_proposer()
            if not worked and self.turn > last_turn and not self.core.has_unfinished:
                break
        else:
            raise AssertionError(f"still not done after {MAX_STEPS} steps")
        self.check_all_over(self.core.stats())
        return {name: Answer(tokens, self._end_of(name)) for name, tokens in self.delivered.items()}

    def _end_of(self, name: str) -> str:
        error = self.requests[name].error
        return str(self.ended[name]) if error is None else type(error).__name__


NO_ROW: Any = None


class DraftProposer:
    """Proposes drafts of random number, each right with a chance; the runner drafts (`TO_DRAFT`) if asked to."""

    def __init__(self, num_rows: int, most: int, draw: random.Random, *, chance: float, by_runner: bool) -> None:
        self.is_free = not by_runner
        self.token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self._most = most
        self._draw = draw
        self._chance = chance
        self._by_runner = by_runner

    def enter(self, row: int, token_ids: Int32Array) -> None:
        self.token_ids[row] = token_ids.tolist()

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            self.token_ids[row].append(token_id)

    def propose(self, rows: RowArray) -> Proposals:
        assert len(set(rows.tolist())) == len(rows)
        counts = np.array([self._draw.randint(0, self._most) for _ in rows], dtype=np.int32)
        drafts = np.full((len(rows), self._most), TO_DRAFT, dtype=np.int32)
        if not self._by_runner:
            for index, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
                drafts[index, :count] = self._drafts(self.token_ids[row], count)
        kinds = np.array([self._draw.randrange(NUM_KINDS) for _ in rows], dtype=np.int32)
        return Proposals(counts, drafts, kinds)

    def _drafts(self, token_ids: list[int], count: int) -> list[int]:
        row = Row(NO_ROW, "", [], [], 0)
        for token_id in token_ids:
            row.append(token_id)
        for _ in range(count):
            row.append(draft_of(row, self._draw, self._chance))
        return row.token_ids[len(token_ids) :]


def drafted(row: Row, draw: random.Random, chance: float) -> int:
    """Return a draft of a runner, which at times has none."""
    return NOT_DRAFTED if draw.random() < 0.05 else draft_of(row, draw, chance)


def draft_of(row: Row, draw: random.Random, chance: float) -> int:
    """Return a draft of the row's next token that is right with a chance, unless ids are masked there."""
    if draw.random() < chance:
        return next_token(seed_of_next(row.contents[-1], row.token_ids), 0, 0, ())
    return draw.randrange(VOCAB_SIZE)


class RandomLengths(Goodput):
    def __init__(self, num_rows: int, most: int, draw: random.Random) -> None:
        super().__init__(num_rows, most)
        self._draw = draw

    def choose(self, rows: RowArray, counts: Int32Array, kinds: Int32Array, budget: int) -> Int32Array:
        before = np.cumsum(counts) - counts
        chosen = np.minimum(counts, budget - before).clip(0)
        if self._draw.random() < 0.2:
            chosen = np.zeros_like(chosen)
        return np.array([self._draw.randint(min(count, 1), count) for count in chosen.tolist()], dtype=np.int32)


def compare(seed: int) -> Counter[str]:
    """Run a load without and with drafts, check that the answers are the same, and return what happened."""
    load = random_load(seed)
    plain, drafting = LoadRun(load), LoadRun(load, drafts=True)
    answers, others = plain.run(), drafting.run()
    for name in answers.keys() & others.keys():
        answer, other = answers[name], others[name]
        count = min(len(answer.token_ids), len(other.token_ids))
        assert answer.token_ids[:count] == other.token_ids[:count]
        assert answer == other or not (answer.is_sure and other.is_sure)
    for key in plain.places.keys() & drafting.places.keys():
        assert plain.places[key] == drafting.places[key], f"{key}: other positions or blocks than without drafts"
    stats = drafting.core.stats()
    return Counter(
        loads=1,
        places=len(plain.places.keys() & drafting.places.keys()),
        tokens=sum(len(answer.token_ids) for answer in others.values()),
        fewer_steps=max(plain.runner.num_steps - drafting.runner.num_steps, 0),
        drafts=stats.num_draft_tokens,
        accepted=stats.num_accepted_draft_tokens,
        rejected=stats.num_draft_tokens - stats.num_accepted_draft_tokens,
        recomputed=stats.num_preemptions - stats.num_swap_preemptions,
        swapped=stats.num_swap_preemptions,
        hits=stats.num_prefix_hits,
        loras=stats.num_lora_loads,
        failed_steps=drafting.runner.num_failures,
        failed_drafts=drafting.runner.num_failed_drafts,
        **Counter(answer.end for answer in others.values()),
    )
