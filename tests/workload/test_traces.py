"""Arrivals, lengths and files of traces."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.simulate.simulation import lengths, make_trace
from tidewheel.errors import ConfigError
from tidewheel.request import Priority
from tidewheel.workload.arrivals import FloatArray, bursty_arrivals, poisson_arrivals, switching_arrivals
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.trace_files import read_trace
from tidewheel.workload.traces import PrefixMix, TenantMix


@pytest.mark.parametrize(
    "kind", ["constant", "uniform", "geometric", "lognormal:1.0", "lognormal:1.5", "pareto:2.5", "pareto:1.5"]
)
def test_lengths_have_the_mean_asked_for(kind: str) -> None:
    name, _, shape = kind.partition(":")
    drawn = lengths(f"{name}:64:{shape}:4096").draw(200_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(64, rel=0.04)
    assert drawn.min() >= 1 and drawn.max() <= 4096


def test_heavy_tails_are_heavy() -> None:
    heavy = lengths("lognormal:64:1.5").draw(100_000, np.random.default_rng(0))
    light = lengths("geometric:64").draw(100_000, np.random.default_rng(0))
    assert heavy.std() / heavy.mean() > 1.5 * light.std() / light.mean()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("normal:5", "write KIND:MEAN"),
        ("constant", "numbers after the kind"),
        ("constant:x", "numbers after the kind"),
        ("constant:0", "at least 1 token"),
        ("constant:nan", "at least 1 token"),
        ("pareto:10:1", "tail index is 1"),
        ("lognormal:10:-1", "sigma is -1"),
        ("lognormal:10:1:5", "maximum is 5"),
    ],
)
def test_bad_lengths_name_the_option_and_the_part(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Lengths.parse(text, name="--output")
    assert "--output" in str(caught.value)


@pytest.mark.parametrize("arrivals", [poisson_arrivals, bursty_arrivals, switching_arrivals])
def test_arrivals_rise_at_the_rate_asked_for(arrivals: Callable[..., FloatArray]) -> None:
    times = arrivals(50_000, 10.0, np.random.default_rng(3))
    assert len(times) == 50_000 and (np.diff(times) >= 0).all()
    assert 50_000 / times[-1] == pytest.approx(10.0, rel=0.1)


def index_of_dispersion(times: FloatArray) -> float:
    """Variance over mean of the counts in intervals of 10 s: 1 for a Poisson process."""
    counts = np.histogram(times, bins=np.arange(0, times[-1], 10.0))[0]
    return float(counts.var() / counts.mean())


def test_bursts_are_bursts() -> None:
    rng = np.random.default_rng(3)
    assert index_of_dispersion(poisson_arrivals(50_000, 10.0, rng)) == pytest.approx(1.0, abs=0.25)
    assert index_of_dispersion(bursty_arrivals(50_000, 10.0, rng, burstiness=4.0)) > 2.5
    assert index_of_dispersion(switching_arrivals(50_000, 10.0, rng)) > 2.5


def test_one_seed_one_trace() -> None:
    first, second, other = make_trace(seed=1), make_trace(seed=1), make_trace(seed=2)
    assert (first.arrivals == second.arrivals).all() and (first.output_tokens == second.output_tokens).all()
    assert (first.arrivals != other.arrivals).any()


def test_a_file_with_all_fields_is_read(tmp_path: Path) -> None:
    trace = make_trace(
        tenants=TenantMix(("acme", "zed"), (3.0, 1.0), (Priority.HIGH, Priority.LOW)), prefixes=PrefixMix(3, 8)
    )
    rows = [
        {
            "arrival": float(trace.arrivals[i]),
            "prompt_tokens": int(trace.prompt_tokens[i]),
            "output_tokens": int(trace.output_tokens[i]),
            "priority": int(trace.priorities[i]),
            "tenant": trace.tenant_names[trace.tenants[i]],
            "session": f"session {i % 7}",
            "prefix_group": trace.prefix_names[trace.prefix_groups[i]],
            "prefix_tokens": int(trace.prefix_tokens[i]),
            **({"deadline_s": 0.5 * i} if i % 2 else {}),
        }
        for i in range(len(trace))
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    again = read_trace(tmp_path / "trace.jsonl")
    assert np.allclose(again.arrivals, trace.arrivals - trace.arrivals[0])
    for name in ("prompt_tokens", "output_tokens", "priorities", "prefix_tokens"):
        assert (getattr(again, name) == getattr(trace, name)).all()
    assert [again.tenant_names[i] for i in again.tenants] == [row["tenant"] for row in rows]
    assert [again.session_names[i] for i in again.sessions] == [row["session"] for row in rows]
    assert [again.prefix_names[i] for i in again.prefix_groups] == [row["prefix_group"] for row in rows]
    assert again.deadlines.tolist() == [row.get("deadline_s", np.inf) for row in rows]


def test_classes_may_be_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"arrival": 0, "prompt_tokens": 4, "output_tokens": 1}
    path.write_text("\n".join(json.dumps(row | {"priority": one}) for one in ("critical", 2, "normal", "low")))
    assert read_trace(path).priorities.tolist() == [1, 2, 3, 4]


def test_a_csv_with_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,output_tokens,priority,tenant,session\n7.5,10,5,1,acme,s\n3.5,20,2,,,\n")
    trace = read_trace(path)
    assert trace.arrivals.tolist() == [0.0, 4.0]
    assert trace.prompt_tokens.tolist() == [20, 10]
    assert trace.priorities.tolist() == [Priority.NORMAL, Priority.CRITICAL]
    assert [trace.tenant_names[i] for i in trace.tenants] == ["", "acme"]
    assert trace.sessions.tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.jsonl", "", "has no requests"),
        ("t.jsonl", "{", "line 1: not JSON"),
        ("t.jsonl", "[]", "line 1: it must be an object"),
        ("t.jsonl", '{"arrival": 0, "prompt_tokens": 4}', "missing required field `output_tokens`"),
        ("t.jsonl", '{"arrival": -1, "prompt_tokens": 4, "output_tokens": 1}', "arrival is -1"),
        ("t.jsonl", '{"arrival": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens is 0"),
        ("t.jsonl", '{"arrival": 0, "prompt_tokens": 2.5, "output_tokens": 1}', "prompt_tokens is 2.5"),
        ("t.jsonl", '{"arrival": 0, "prompt_tokens": 4, "output_tokens": 1, "priority": 5}', "priority is 5"),
        ("t.jsonl", '{"arrival": 0, "prompt_tokens": 4, "output_tokens": 1, "tenat": "a"}', "did you mean 'tenant'"),
        (
            "t.jsonl",
            '{"arrival": 0, "prompt_tokens": 4, "output_tokens": 1, "prefix_tokens": 2}',
            "needs a prefix_group",
        ),
        ("t.jsonl", '{"arrival": true, "prompt_tokens": 4, "output_tokens": 1}', "arrival is True"),
        ("t.csv", "arrival,prompt_tokens\n", "the header line has no output_tokens"),
        ("t.csv", "arrival,prompt_tokens,output_tokens\n0,1,2,3\n", "line 2: more values"),
        ("t.csv", "arrival,prompt_tokens,output_tokens\n0,x,2\n", "prompt_tokens is 'x'"),
        (
            "t.csv",
            "arrival,prompt_tokens,output_tokens\n" + "1" * 200_000 + ",1,2\n",
            "cannot read the trace .*field",
        ),
    ],
    ids=lambda text: text[:60],
)
def test_a_bad_file_names_line_and_field(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_trace(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*absent\.jsonl"):
        read_trace(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_must_be_above_zero(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate is"):
        poisson_arrivals(3, rate, np.random.default_rng(0))
