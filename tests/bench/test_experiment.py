"""A search for capacities at a server without a model, which answers at once."""

from __future__ import annotations

import struct
from pathlib import Path

from support.bench.runs import recorder, stage
from support.bench.servers import bench_triton
from tidewheel.bench.capacity import HIGHEST_RATE, STREAM, WHOLE_ANSWER, CapacitySearch
from tidewheel.bench.deploy import Deployment
from tidewheel.bench.experiment import Experiment
from tidewheel.bench.outcome import Slo
from tidewheel.bench.targets import parse_targets

SLO = Slo(1e3, 1e3)  # met by any machine


def test_targets_are_searched_in_turns_on_the_same_requests(tmp_path: Path) -> None:
    one = recorder(tmp_path)
    with bench_triton() as triton:
        texts = [f"{name}=grpc://127.0.0.1:{triton.port}/{name}" for name in ("demo", "demo_infer")]
        targets = parse_targets(texts)
        of = stage(loads=[], targets=tuple(targets), seconds=0.05, longest_s=0.2, slo=SLO)
        searches = {target.name: CapacitySearch(SLO, start=HIGHEST_RATE / 2) for target in targets}
        deployment = Deployment(model="", dtype="float32", folder=tmp_path)
        with Experiment(deployment, one, targets, warm_up=0) as experiment:
            result = experiment.find_capacities(of, searches, budget_s=600.0)
    assert [(run.run.target.name, run.run.load.value) for run in result.runs] == [
        ("demo", 200.0), ("demo_infer", 200.0), ("demo", 400.0), ("demo_infer", 400.0),
    ]  # fmt: skip
    assert searches["demo"].capacities()[STREAM].low == HIGHEST_RATE
    assert set(searches["demo_infer"].capacities()) == {WHOLE_ANSWER}
    assert [load.value for load in result.stage.loads] == [200.0, 400.0]
    first, _, other, _ = ([o.offered for o in run.outcomes] for run in result.runs)
    common = list(zip(first, other, strict=False))
    assert all(a.num_output_tokens == b.num_output_tokens for a, b in common)
    assert all(a.input_ids[0] != b.input_ids[0] for a, b in common)
    prompts = [asked.message.raw_input_contents[0] for asked in triton.asked]
    assert struct.pack(f"<{len(first[0].input_ids)}i", *first[0].input_ids) in prompts
    assert result.figures("demo", 0)["requests"] == len(result.runs[0].outcomes)


def test_no_point_starts_after_the_time_of_the_search(tmp_path: Path) -> None:
    with bench_triton() as triton:
        targets = parse_targets([f"demo=grpc://127.0.0.1:{triton.port}/demo"])
        of = stage(loads=[], targets=tuple(targets), seconds=0.05, longest_s=0.2, slo=SLO)
        search = CapacitySearch(SLO, start=1.0)
        with Experiment(Deployment(model="", dtype="", folder=tmp_path), recorder(tmp_path), targets) as experiment:
            result = experiment.find_capacities(of, {"demo": search}, budget_s=0.0)
    assert result.runs == []
    assert search.capacities() == {}
