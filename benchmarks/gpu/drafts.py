"""Decoding with drafts that are right with a chance, beside the same engine without drafts.

Answers come from an engine without drafts; a proposer that knows them puts in wrong tokens. Both engines are
`deterministic`, since other roundings would lead away from the known answers. `prompt_lookup` runs on random tokens,
whose greedy answers soon loop, so that it finds drafts.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.work_items import WorkItem, of_length
from gpu.engine_steps import TimedLLM, open_engine, warm_up
from gpu.measurements import OURS, Measurement
from gpu.stage import Stage, parser, run
from modelled.roofline import SHAPES
from tidewheel.batch import Int32Array, RowArray
from tidewheel.scheduler.speculation import Proposals

ROWS = (1, 8, 64)
CHANCES = (0.5, 0.7, 0.9)
NUM_INPUT, NUM_OUTPUT = 256, 256
REPEATS = 3
MOST = 8
NEEDS_S = 12.0


class Outline(NamedTuple):
    rate: float  # output tokens/s
    answers: list[list[int]]


class KnownAnswers:
    """Proposer of the tokens of known answers, each wrong with a chance."""

    is_free = True

    def __init__(self, num_rows: int, answers: Mapping[bytes, Sequence[int]], right: float, num_input: int) -> None:
        self._answers = answers
        self._right = right
        self._num_input = num_input
        self._of_rows: list[Sequence[int]] = [()] * num_rows
        self._num_known = [0] * num_rows
        self._random = np.random.default_rng(0)

    def enter(self, row: int, token_ids: Int32Array) -> None:
        self._of_rows[row] = self._answers.get(token_ids[: self._num_input].tobytes(), ())
        self._num_known[row] = len(token_ids) - self._num_input

    def append(self, rows: RowArray, token_ids: Int32Array) -> None:  # noqa: ARG002
        for row in rows.tolist():
            self._num_known[row] += 1

    def propose(self, rows: RowArray) -> Proposals:
        token_ids = np.zeros((len(rows), MOST), dtype=np.int32)
        counts = np.zeros(len(rows), dtype=np.int32)
        for index, row in enumerate(rows.tolist()):
            known = self._num_known[row]
            drafts = np.array(self._of_rows[row][known : known + MOST], dtype=np.int32)
            drafts[self._random.random(len(drafts)) >= self._right] += 1
            counts[index], token_ids[index, : len(drafts)] = len(drafts), drafts
        return Proposals(counts, token_ids, np.zeros(len(rows), dtype=np.int32))


def body(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for model in stage.models:
            with stage.part(f"drafts, {model}"):
                stage.check_time(NEEDS_S)
                _measure(stage, model, Path(scratch))


def _measure(stage: Stage, model: str, folder: Path) -> None:
    num_input, num_output = (16, 24) if stage.is_dry else (NUM_INPUT, NUM_OUTPUT)
    rows = (1, 2) if stage.is_dry else ROWS
    works = {count: of_length(count, num_input, num_output, SHAPES[model].vocab, seed=count) for count in rows}
    settings = {"deterministic": stage.is_cuda, "max_num_seqs": max(rows)}
    with open_engine(stage, model, folder, **settings) as engine:
        plain = {count: _rate(engine, work, stage.is_dry) for count, work in works.items()}
    answers = {
        np.array(item.input_ids, dtype=np.int32).tobytes(): answer
        for count, work in works.items()
        for item, answer in zip(work, plain[count].answers, strict=True)
    }
    with open_engine(stage, model, folder, speculation="prompt_lookup", **settings) as engine:
        _report(stage, model, "prompt lookup on random tokens", engine, works, plain)
        scheduler = engine._open_core().scheduler
        for chance in CHANCES[:1] if stage.is_dry else CHANCES:
            scheduler.use_proposer(KnownAnswers(max(rows), answers, chance, num_input))
            _report(stage, model, f"drafts right with {chance:g}", engine, works, plain)


def _report(
    stage: Stage, model: str, name: str, engine: TimedLLM, works: Mapping[int, Sequence[WorkItem]],
    plain: Mapping[int, Outline],
) -> None:  # fmt: skip
    for count, work in works.items():
        stage.check_time(NEEDS_S / 4)
        before = engine.stats()
        with_drafts = _rate(engine, work, stage.is_dry)
        after = engine.stats()
        same = sum(ours == theirs for ours, theirs in zip(with_drafts.answers, plain[count].answers, strict=True))
        drafts = after.num_draft_tokens - before.num_draft_tokens
        details = {
            "tokens_per_s": with_drafts.rate,
            "plain_tokens_per_s": plain[count].rate,
            "drafts": drafts,
            "accepted": after.num_accepted_draft_tokens - before.num_accepted_draft_tokens,
            "steps": after.num_steps - before.num_steps,
            "equal_answers": same,
        }
        ratio = with_drafts.rate / plain[count].rate
        case = f"{model}, {count} rows, {drafts} drafts, {same} of {count} equal"
        stage.result(
            Measurement(name=name, case=case, value=ratio, unit="x of plain", samples=[], details=details, who=OURS)
        )


def _rate(engine: TimedLLM, work: Sequence[WorkItem], is_dry: bool) -> Outline:
    warm_up(engine, work, 0.0)
    seconds = [engine.timed(work, 0.0).seconds for _ in range(1 if is_dry else REPEATS)]
    amount = sum(item.num_output_tokens for item in work)
    return Outline(amount / statistics.median(seconds), engine.greedy(work))


if __name__ == "__main__":
    run("drafts", body, parser(__doc__).parse_args())
