"""Traces of agents: conversations whose turns end with a tool call, and go on with its result.

Durations by tool, their frequencies and the growth of contexts are those of TraceLab (Zhu and others, "TraceLab:
Characterizing Coding Agent Workloads for LLM Serving", arXiv 2606.30560; data under CC BY 4.0): 357,161 turns of
Claude Code and Codex by 43 developers. A lognormal has the published median and 90 % quantile. Lengths of first
prompts and the spread of outputs are assumptions.
"""

import math
from typing import NamedTuple

import numpy as np

from tidewheel.errors import ConfigError
from tidewheel.workload.arrivals import FloatArray
from tidewheel.workload.lengths import Lengths
from tidewheel.workload.traces import Trace

_P90 = 1.2815515655446004  # standard deviations of a normal distribution


class Spread(NamedTuple):
    """Lognormal distribution by its median and its 90 % quantile."""

    median: float
    p90: float

    def draw(self, count: int, rng: np.random.Generator) -> FloatArray:
        return np.asarray(self.median * np.exp(rng.normal(0.0, math.log(self.p90 / self.median) / _P90, count)))


class ToolTimes(NamedTuple):
    name: str
    num_calls: int
    seconds: Spread


TOOLS = (
    ToolTimes("exec_command", 110_497, Spread(0.323, 1.002)),
    ToolTimes("Bash", 66_835, Spread(0.409, 30.3308)),
    ToolTimes("write_stdin", 45_437, Spread(5.002, 60.001)),
    ToolTimes("Read", 32_209, Spread(0.036, 0.427)),
    ToolTimes("apply_patch", 20_960, Spread(0.059, 1.2172)),
    ToolTimes("Edit", 18_279, Spread(0.095, 2.2368)),
    ToolTimes("TaskUpdate", 4_772, Spread(0.082, 1.2472)),
    ToolTimes("Write", 3_827, Spread(0.098, 4.4654)),
)
GROWTH = Spread(652.0, 4122.5)  # tokens from one prompt to the next, with the answer between
MEAN_OUTPUT = 520.0
FIRST_PROMPT = Lengths("lognormal", 8192, 0.5)
LONGEST_CALL_S = 60.0
LEAST_NEW_TOKENS = 4  # of a tool's result


class AgentLoad(NamedTuple):
    """Agents that begin within `spread_s`. Published lengths and pauses are multiplied by the two scales."""

    num_agents: int = 64
    num_turns: int = 11
    token_scale: float = 1.0
    time_scale: float = 1.0
    spread_s: float = 30.0
    max_tokens: int = 1 << 20  # of a context; longer ones end earlier
    seed: int = 0


def agents_trace(load: AgentLoad) -> Trace:
    """Return the trace; turns after the first arrive a pause after the end of the turn before."""
    if min(load.num_agents, load.num_turns) < 1 or not min(load.token_scale, load.time_scale) > 0.0:
        raise ConfigError(f"agents are {load}: numbers must be at least 1, and scales above 0")
    shape, rng = (load.num_agents, load.num_turns), np.random.default_rng(load.seed)
    count = load.num_agents * load.num_turns
    tools = rng.choice(len(TOOLS), count, p=_shares())
    seconds = np.select(
        [tools == kind for kind in range(len(TOOLS))], [one.seconds.draw(count, rng) for one in TOOLS]
    )
    pauses = (load.time_scale * np.minimum(seconds, LONGEST_CALL_S)).reshape(shape)
    outputs = _tokens(Lengths("lognormal", MEAN_OUTPUT).draw(count, rng), load, least=2).reshape(shape)
    growth = _tokens(GROWTH.draw(count, rng), load, least=1).reshape(shape)
    firsts = _tokens(FIRST_PROMPT.draw(load.num_agents, rng), load, least=LEAST_NEW_TOKENS)
    added = np.maximum(growth, outputs + LEAST_NEW_TOKENS)[:, :-1]
    prompts = firsts[:, None] + np.hstack((np.zeros((load.num_agents, 1), np.int64), added.cumsum(axis=1)))
    fits = np.logical_and.accumulate(prompts + outputs <= load.max_tokens, axis=1)
    starts = np.sort(rng.uniform(0.0, load.spread_s, load.num_agents))
    before = np.hstack((np.zeros((load.num_agents, 1)), pauses[:, :-1]))
    arrivals = starts[:, None] + before.cumsum(axis=1)  # had the answers taken no time
    order = np.argsort(arrivals[fits], kind="stable")
    agents, turns = (index[order] for index in fits.nonzero())
    after = np.hstack((fits[:, 1:], np.zeros((load.num_agents, 1), np.bool_)))
    return Trace.of(
        arrivals[agents, turns],
        prompts[agents, turns],
        outputs[agents, turns],
        sessions=agents,
        session_names=tuple(f"agent {number}" for number in range(load.num_agents)),
        pauses=np.where(turns > 0, before[agents, turns], np.nan),
        tools=np.where(after[agents, turns], tools.reshape(shape)[agents, turns] + 1, 0),
        tool_names=("", *(tool.name for tool in TOOLS)),
    )


def _shares() -> FloatArray:
    calls = np.array([tool.num_calls for tool in TOOLS], dtype=np.float64)
    return np.asarray(calls / calls.sum())


def _tokens(drawn: object, load: AgentLoad, *, least: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.asarray(np.maximum(np.rint(np.asarray(drawn) * load.token_scale), least), dtype=np.int64)
