"""How long after the fault of a rank the clients of two ranks are told; a small random model on a CPU.

A round kills, stops (SIGSTOP) or fails (MemoryError) each rank at each named point of a step, and kills or fails it
at those of a load. After each fault, all ranks must have ended, and come back with the same tokens; no file, shared
memory, descriptor or thread may stay. A stop of the first rank where the other waits for none of its operations is a
pause, by which nothing may be lost. Needs what the tests need.

    PYTHONPATH=tests python benchmarks rank_faults --rounds 20 --save

With `--kinds`, a saved run takes the place of earlier rows of these kinds, and leaves the others as they were.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from common.study import RESULTS, Study, show
from support.faults.ranked_engine import ORDERS, ranked_engine

LIMIT_S = 2.0
KINDS = sorted({order.kind for order in ORDERS})


def main() -> None:
    study = Study("rank_faults", __doc__, "torch")
    study.add_argument("--rounds", type=int, default=20)
    study.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of faults (default: all)")
    study.add_argument("--minutes", type=float, default=float("inf"), help="until the last fault")
    options = study.begin()
    delays, num_faults = defaultdict[str, list[float]](list), 0
    chosen = [order for order in ORDERS if order.kind in options.kinds]
    shuffled = (random.Random(number).sample(chosen, len(chosen)) for number in range(options.rounds))
    orders = [order for each in shuffled for order in each]
    end = time.monotonic() + 60 * options.minutes
    engine_dir, folder = Path(tempfile.mkdtemp(prefix="tw-")), Path(tempfile.mkdtemp())
    with ranked_engine(engine_dir, folder) as engine:
        while num_faults < len(orders) and time.monotonic() < end:
            order = orders[num_faults]
            delay_s = engine.check(order)
            num_faults += 1
            print(f"{order.kind} rank {order.rank}, {order.point}: {delay_s:.2f} s", flush=True)
            if delay_s:
                delays[f"{order.kind} rank {order.rank}"].append(delay_s)
    for left in (engine_dir, folder):
        shutil.rmtree(left)
    rows = [
        {"fault": name, "count": len(each), "median_s": sorted(each)[len(each) // 2], "longest_s": max(each)}
        for name, each in sorted(delays.items())
    ]
    show(rows)
    of_run = {"rounds": num_faults / len(chosen), "commit": study.facts["commit"]}
    told = [*kept_rows(options.kinds), *({**row, **of_run} for row in rows)]
    study.save({"limit_s": LIMIT_S, "told": sorted(told, key=lambda row: str(row["fault"]))})
    if late := [row["fault"] for row in rows if row["longest_s"] > LIMIT_S]:
        raise SystemExit(f"told after more than {LIMIT_S:g} s: {late}")


def kept_rows(kinds: Collection[str]) -> list[dict[str, Any]]:
    """Return the rows of the record whose faults are of other kinds."""
    path = RESULTS / "rank_faults.json"
    rows = json.loads(path.read_text())["told"] if path.exists() else []
    return [row for row in rows if row["fault"].split()[0] not in kinds]


if __name__ == "__main__":
    main()
