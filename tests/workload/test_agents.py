"""Traces of agents, and turns that arrive a pause after the turn before."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from support.scheduler.invariants import check_invariants
from support.simulate.simulation import COST, simulator
from tidewheel.bench.workloads import parse_workload
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.simulate.cost_model import H200_8B
from tidewheel.simulate.replay import Recording, replay, scheduler_of
from tidewheel.simulate.scenario import simulated_info, simulator_of
from tidewheel.simulate.simulator import EngineReplica
from tidewheel.workload.agents import LONGEST_CALL_S, TOOLS, AgentLoad, agents_trace
from tidewheel.workload.trace_files import read_trace
from tidewheel.workload.traces import Trace

SMALL = AgentLoad(num_agents=6, num_turns=5, token_scale=1 / 256, time_scale=1 / 64, spread_s=2.0)


def test_equal_seeds_give_equal_traces() -> None:
    first, same, other = (agents_trace(SMALL._replace(seed=seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.pauses, same.pauses, equal_nan=True)
    assert (first.prompt_tokens == same.prompt_tokens).all() and (first.tools == same.tools).all()
    assert (first.prompt_tokens != other.prompt_tokens).any()


def test_tools_last_as_published() -> None:
    trace = agents_trace(AgentLoad(num_agents=2000))
    before = {after: index for index, after in trace.next_turns().items()}
    for number, tool in enumerate(TOOLS[:4], 1):
        pauses = [trace.pauses[after] for after, index in before.items() if trace.tools[index] == number]
        assert np.median(pauses) == pytest.approx(tool.seconds.median, rel=0.25)
        p90 = min(tool.seconds.p90, LONGEST_CALL_S)
        assert np.quantile(pauses, 0.9) == pytest.approx(p90, rel=0.35)


def test_prompts_extend_the_turn_before() -> None:
    trace = agents_trace(SMALL)
    assert len(trace) == 30 and len(trace.next_turns()) == 24
    for before, after in trace.next_turns().items():
        assert trace.sessions[before] == trace.sessions[after] and trace.tool(before)
        assert trace.prompt_tokens[after] > trace.prompt_tokens[before] + trace.output_tokens[before]
    last = trace.next_turns().keys() ^ set(range(30))
    assert all(trace.tool(index) == "" for index in last)


def test_contexts_that_grow_too_long_end_earlier() -> None:
    limit = 60
    trace = agents_trace(SMALL._replace(max_tokens=limit))
    assert 6 < len(trace) < 30
    assert (trace.prompt_tokens + trace.output_tokens <= limit).all()


@pytest.mark.parametrize("changes", [{"num_agents": 0}, {"num_turns": 0}, {"token_scale": 0.0}, {"time_scale": -1.0}])
def test_impossible_loads_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="agents are"):
        agents_trace(SMALL._replace(**changes))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_turn_arrives_a_pause_after_the_end_of_the_turn_before(num_replicas: int) -> None:
    trace = agents_trace(SMALL)
    run = simulator(trace, num_replicas=num_replicas, router="session-affinity", num_blocks=1024)
    outcomes = run.run()
    assert outcomes.finished.all()
    for before, after in trace.next_turns().items():
        waited = outcomes.arrivals[after] - outcomes.last_token[before]
        assert waited == pytest.approx(float(trace.pauses[after]), abs=2 * COST.turn_overhead_s)
        assert outcomes.replicas[after] == outcomes.replicas[before]
    assert (outcomes.ttft > 0.0).all() and run.summary()["keeps_up"]


def test_files_name_pauses_and_tools(tmp_path: Path) -> None:
    turns = [
        {"arrival": 0.0, "prompt_tokens": 8, "output_tokens": 2, "session": "a", "tool": "Read"},
        {"arrival": 0.1, "prompt_tokens": 12, "output_tokens": 2, "session": "a", "pause_s": 0.5},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, turns)))
    trace = read_trace(path)
    assert isinstance(trace, Trace) and trace.next_turns() == {0: 1}
    assert [trace.tool(0), trace.tool(1)] == ["Read", ""] and trace.pauses[1] == 0.5


@pytest.mark.parametrize("session", ["", "b"])
def test_a_pause_without_a_turn_before_is_refused(tmp_path: Path, session: str) -> None:
    turns = [
        {"arrival": 0.0, "prompt_tokens": 8, "output_tokens": 2, "session": "a"},
        {"arrival": 0.1, "prompt_tokens": 12, "output_tokens": 2, "session": session, "pause_s": 0.5},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, turns)))
    with pytest.raises(ConfigError, match=r"pause_s is 0.5 at 0.1 s: no turn of session"):
        read_trace(path)


def test_the_bench_sends_the_same_turns() -> None:
    workload = parse_workload("agents:0.01", vocab=100, max_tokens=512)
    trace = agents_trace(AgentLoad(token_scale=0.01, time_scale=0.01, max_tokens=512))
    conversations = list(workload.conversations(0))
    assert sum(map(len, conversations)) == len(trace) and len(conversations) == 64
    for conversation in conversations:
        (session,) = {turn.parameters["session_id"] for turn in conversation}
        own = [index for index in range(len(trace)) if trace.session(index) == session]
        length = 0
        for index, turn in zip(own, conversation, strict=True):
            length += len(turn.input_ids)
            assert length == trace.prompt_tokens[index] and turn.num_output_tokens == trace.output_tokens[index]
            assert turn.think_s == pytest.approx(np.nan_to_num(trace.pauses[index]))
            length += turn.num_output_tokens


def run_recorded(trace: Trace, folder: Path) -> Recording:
    config = EngineConfig(
        model="simulated", block_size=16, num_blocks=40, max_num_seqs=4, swap_space=0.125, record=str(folder)
    )
    info = simulated_info(config, H200_8B, max_model_len=256)
    run = simulator_of(config, info, trace, H200_8B)
    outcomes = run.run()
    assert outcomes.finished.all()
    (replica,) = run.replicas
    assert isinstance(replica, EngineReplica)
    check_invariants(replica.scheduler)
    stats = replica.scheduler.stats()
    assert stats.num_swapped_in > 0 and stats.num_free_blocks == stats.num_blocks
    (path,) = folder.iterdir()
    return Recording(path)


def test_a_recording_with_pauses_is_replayed(tmp_path: Path) -> None:
    trace = agents_trace(
        AgentLoad(num_agents=12, num_turns=8, token_scale=1 / 128, time_scale=0.02, spread_s=0.1, max_tokens=240)
    )
    recording = run_recorded(trace, tmp_path)
    replayed = replay(recording, scheduler_of(recording.header))
    assert replayed.difference == "" and replayed.num_requests == len(trace)
