"""Host time of prompt lookup, and how often its drafts agree with recorded answers.

    python benchmarks prompt_lookup --save
    python benchmarks prompt_lookup --answers FILE.json

A step appends one token to each row and proposes 8 drafts. Tokens are drawn from 49,152, so little matches, or from
20, so that all of them do. FILE holds a JSON list of {"prompt_ids": [..], "answer_ids": [..]}: at every token of an
answer, the drafts are compared with the rest of the answer.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common.study import Study, show
from tidewheel.scheduler.prompt_lookup import MATCH_KINDS, PromptLookup

MOST = 8
VOCABULARIES = {"varies": 49_152, "repeats": 20}
CONTEXT = 1000
STEPS = 500
REPEATS = 7


def step_cost(num_rows: int, text: str) -> dict[str, Any]:
    """Return median microseconds of `append` and `propose` for `num_rows` of 256 rows."""
    rng = np.random.default_rng(0)
    lookup = PromptLookup(max(num_rows, 256), CONTEXT + STEPS, MOST)
    rows = rng.permutation(max(num_rows, 256))[:num_rows]
    for row in rows.tolist():
        lookup.enter(row, rng.integers(VOCABULARIES[text], size=CONTEXT, dtype=np.int32))
    times = []
    for token_ids in rng.integers(VOCABULARIES[text], size=(STEPS, num_rows), dtype=np.int32):
        began = time.perf_counter()
        lookup.append(rows, token_ids)
        appended = time.perf_counter()
        lookup.propose(rows)
        times.append((appended - began, time.perf_counter() - appended))
    append_us, propose_us = np.median(np.array(times) * 1e6, axis=0).round(1).tolist()
    return {"rows": num_rows, "text": text, "append_us": append_us, "propose_us": propose_us}


def enter_cost(num_tokens: int) -> dict[str, Any]:
    """Return milliseconds of `enter` for rows whose memory was not used before, and for the same rows again."""
    token_ids = np.random.default_rng(0).integers(VOCABULARIES["varies"], size=num_tokens, dtype=np.int32)
    lookup = PromptLookup(REPEATS, 2 * num_tokens, MOST)
    rounds = []
    for _ in range(2):
        times = []
        for row in range(REPEATS):
            began = time.perf_counter()
            lookup.enter(row, token_ids)
            times.append((time.perf_counter() - began) * 1e3)
        rounds.append(round(statistics.median(times), 3))
    return {"tokens": num_tokens, "first_ms": rounds[0], "again_ms": rounds[1]}


def comparisons(prompt_ids: list[int], answer_ids: list[int]) -> Iterator[tuple[int, int]]:
    """Yield kind and number of agreeing drafts for each proposal within an answer."""
    lookup, row = PromptLookup(1, len(prompt_ids) + len(answer_ids), MOST), np.zeros(1, dtype=np.intp)
    lookup.enter(0, np.array(prompt_ids, dtype=np.int32))
    for place in range(len(answer_ids)):
        counts, token_ids, kinds = lookup.propose(row)
        rest = answer_ids[place : place + int(counts[0])]
        if rest:
            agrees = [*(token_ids[0, : len(rest)] == rest).tolist(), False]
            yield int(kinds[0]), agrees.index(False)
        lookup.append(row, np.array(answer_ids[place : place + 1], dtype=np.int32))


def acceptance(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each kind of proposal which share of drafts agrees, up to each position."""
    agreeing: list[list[int]] = [[] for _ in range(int(MATCH_KINDS.max()) + 1)]
    for answer in answers:
        for kind, number in comparisons(answer["prompt_ids"], answer["answer_ids"]):
            agreeing[kind].append(number)
    return [
        {
            "match_tokens": int(np.searchsorted(MATCH_KINDS[1:], kind)) + 1,
            "proposals": len(numbers),
            **{f"draft_{place}": round(float(np.mean(np.array(numbers) >= place)), 3) for place in (1, 2, 4, MOST)},
        }
        for kind, numbers in enumerate(agreeing)
        if numbers
    ]


def main() -> None:
    study = Study("prompt_lookup", __doc__, "numpy")
    study.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    study.add_argument("--prompts", type=int, nargs="+", default=[1000, 10_000, 100_000], help="tokens")
    study.add_argument("--answers", type=Path, nargs="+", default=[], metavar="FILE", help="recorded answers")
    options = study.begin()
    steps = [step_cost(num_rows, text) for num_rows in options.rows for text in VOCABULARIES]
    entries = [enter_cost(num_tokens) for num_tokens in options.prompts]
    kinds = acceptance([answer for path in options.answers for answer in json.loads(path.read_text())])
    for table in (steps, entries, *([kinds] if kinds else [])):
        show(table)
    study.save({"steps": steps, "enter": entries, **({"kinds": kinds} if kinds else {})})


if __name__ == "__main__":
    main()
