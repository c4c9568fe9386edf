"""Workloads made from a seed. Request i is equal at all loads. Prompts are random; they share prefixes if asked."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tidewheel.bench import BenchError
from tidewheel.bench.outcome import Conversation, OfferedRequest
from tidewheel.workload.agents import AgentLoad, agents_trace
from tidewheel.workload.lengths import LengthRange, Lengths
from tidewheel.workload.trace_files import read_trace
from tidewheel.workload.traces import NOBODY, Trace

FIRST_ID = 4  # after special tokens
_BLOCK = 256

# Mean tokens of ShareGPT (Kwon et al., PagedAttention, SOSP 2023, figure 11); lognormal sigma 1 is an assumption.
SHAREGPT_INPUT, SHAREGPT_OUTPUT, SHAREGPT_SIGMA, SHAREGPT_MAX = 161.31, 337.99, 1.0, 1024


class WorkloadKind(NamedTuple):
    share: float
    parameters: Mapping[str, Any]
    entry: str = ""  # one-shot model that is asked; empty: the language model


CLASSES = (
    WorkloadKind(0.1, {"priority": 1}),
    WorkloadKind(0.2, {"priority": 2}),
    WorkloadKind(0.4, {"priority": 3}),
    WorkloadKind(0.3, {"priority": 4}),
)
PLAIN = (WorkloadKind(1.0, {}),)
CRITICAL_SHARE = 0.2
MIX = (
    WorkloadKind(CRITICAL_SHARE, {"priority": 1}),
    WorkloadKind(0.5, {"priority": 3}),
    WorkloadKind(0.2, {"priority": 4}, "image"),
    WorkloadKind(0.1, {"priority": 3}, "speech"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    inputs: Lengths | LengthRange
    outputs: Lengths | LengthRange
    source: str = "synthetic"
    kinds: tuple[WorkloadKind, ...] = PLAIN
    prefix_tokens: int = 0  # shared by all requests
    turns: int = 1
    pause_s: float = 0.0  # mean, exponentially distributed
    vocab: int = 4096
    max_tokens: int = 1024  # prompt and output; longer requests are cut
    trace: Trace | None = None

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Yield conversations without end, or a trace's requests once."""
        if self.trace is not None:
            yield from _recorded(self, self.trace)
            return
        rng = np.random.default_rng(seed)
        prefix = self._ids(self.prefix_tokens, np.random.default_rng(seed + 1))
        shares = np.array([kind.share for kind in self.kinds])
        number = 0
        while True:
            inputs = self.inputs.draw(_BLOCK * self.turns, rng).reshape(-1, self.turns)
            outputs = self.outputs.draw(_BLOCK * self.turns, rng).reshape(-1, self.turns)
            kinds = rng.choice(len(self.kinds), size=_BLOCK, p=shares / shares.sum())
            for row in range(_BLOCK):
                kind = self.kinds[kinds[row]]
                parameters = dict(kind.parameters)
                if self.turns > 1:
                    parameters["session_id"] = f"bench-{seed}-{number}"
                if kind.entry:
                    yield (OfferedRequest(0.0, [FIRST_ID], 1, parameters, entry=kind.entry),)
                else:
                    yield self._turns(inputs[row].tolist(), outputs[row].tolist(), prefix, parameters, rng)
                number += 1

    def other_ids(self, input_ids: list[int], shift: int) -> list[int]:
        if not shift:
            return input_ids
        return [FIRST_ID + (token_id - FIRST_ID + shift) % (self.vocab - FIRST_ID) for token_id in input_ids]

    def summary(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "trace"}
        fields["inputs"], fields["outputs"] = dataclasses.asdict(self.inputs), dataclasses.asdict(self.outputs)
        fields["kinds"] = [kind._asdict() for kind in self.kinds]
        return fields

    def _turns(
        self,
        inputs: list[int],
        outputs: list[int],
        prefix: list[int],
        parameters: dict[str, Any],
        rng: np.random.Generator,
    ) -> Conversation:
        turns: list[OfferedRequest] = []
        room = self.max_tokens - len(prefix)
        for turn, (num_input, num_output) in enumerate(zip(inputs, outputs, strict=True)):
            if room < 2:
                break
            num_input = min(num_input, room - 1)
            num_output = min(num_output, room - num_input)
            room -= num_input + num_output
            ids = self._ids(num_input, rng)
            pause = float(rng.exponential(self.pause_s)) if turn and self.pause_s else 0.0
            turns.append(OfferedRequest(0.0, ids if turn else prefix + ids, num_output, parameters, pause))
        return tuple(turns)

    def _ids(self, count: int, rng: np.random.Generator) -> list[int]:
        ids: list[int] = rng.integers(FIRST_ID, self.vocab, count).tolist()
        return ids


def _recorded(workload: Workload, trace: Trace) -> Iterator[Conversation]:
    follows, next_turns = np.isfinite(trace.pauses).tolist(), trace.next_turns()
    for index, offered in enumerate(_recorded_requests(workload, trace)):
        if not follows[index]:
            yield (offered,) if index not in next_turns else _recorded_turns(workload, trace, index, next_turns)


def _recorded_turns(workload: Workload, trace: Trace, first: int, next_turns: Mapping[int, int]) -> Conversation:
    """Return a session's turns. The ids of each are those that follow the turn before and its answer."""
    rng = np.random.default_rng([3, int(trace.sessions[first])])
    turns, length, index = list[OfferedRequest](), 0, first
    while True:
        num_prompt, num_output = int(trace.prompt_tokens[index]), int(trace.output_tokens[index])
        if max(num_prompt, length + 1) + num_output > workload.max_tokens and turns:
            return tuple(turns)
        num_prompt = max(min(num_prompt, workload.max_tokens - 1), length + 1)
        num_output = min(num_output, workload.max_tokens - num_prompt)
        ids = rng.integers(FIRST_ID, workload.vocab, num_prompt - length).tolist()
        pause = float(trace.pauses[index]) if turns else 0.0
        parameters = _recorded_parameters(trace, index)
        turns.append(OfferedRequest(float(trace.arrivals[index]), ids, num_output, parameters, pause))
        length = num_prompt + num_output
        if index not in next_turns:
            return tuple(turns)
        index = next_turns[index]


def _recorded_requests(workload: Workload, trace: Trace) -> Iterator[OfferedRequest]:
    for index in range(len(trace)):
        session, group = int(trace.sessions[index]), int(trace.prefix_groups[index])
        num_prompt = min(int(trace.prompt_tokens[index]), workload.max_tokens - 1)
        num_shared = min(int(trace.prefix_tokens[index]), num_prompt)
        own = np.random.default_rng([1, session] if session != NOBODY else [0, index])
        shared = np.random.default_rng([2, max(0, group)]).integers(FIRST_ID, workload.vocab, num_shared)
        ids = [*shared.tolist(), *own.integers(FIRST_ID, workload.vocab, num_prompt)[num_shared:].tolist()]
        num_output = min(int(trace.output_tokens[index]), workload.max_tokens - num_prompt)
        yield OfferedRequest(float(trace.arrivals[index]), ids, num_output, _recorded_parameters(trace, index))


def _recorded_parameters(trace: Trace, index: int) -> dict[str, Any]:
    parameters: dict[str, Any] = {"priority": int(trace.priorities[index])}
    if name := trace.tenant(index):
        parameters["tenant"] = name
    if name := trace.session(index):
        parameters["session_id"] = name
    if np.isfinite(trace.deadlines[index]):
        parameters["deadline_ms"] = round(float(trace.deadlines[index]) * 1e3)
    objective = trace.objective(index)
    if objective is not None:
        limits = {"ttft_ms": 1e3 * objective.ttft_s, "tpot_ms": 1e3 * objective.tpot_s}
        parameters |= {name: limit for name, limit in limits.items() if limit < np.inf}
    return parameters


def _sharegpt(scale: float) -> Workload:
    maximum = max(2, round(SHAREGPT_MAX * scale))
    return Workload(
        "sharegpt",
        Lengths("lognormal", max(1.0, SHAREGPT_INPUT * scale), SHAREGPT_SIGMA, maximum),
        Lengths("lognormal", max(1.0, SHAREGPT_OUTPUT * scale), SHAREGPT_SIGMA, maximum),
        source=f"lognormal with the ShareGPT means of Kwon and others (SOSP 2023), times {scale:g}; sigma 1 assumed",
    )


_MIXED = Workload("mixed", LengthRange(16, 128), LengthRange(16, 128))
WORKLOADS: Mapping[str, Workload] = {
    "fixed": Workload("fixed", Lengths("constant", 64), Lengths("constant", 64)),
    "mixed": _MIXED,
    "sharegpt": _sharegpt(1.0),
    "chat": Workload("chat", Lengths("lognormal", 32), Lengths("lognormal", 32), turns=4, pause_s=1.0),
    "shared-prefix": dataclasses.replace(_MIXED, name="shared-prefix", prefix_tokens=256),
    "qos": dataclasses.replace(_MIXED, name="qos", kinds=CLASSES),
    "mix": dataclasses.replace(_MIXED, name="mix", kinds=MIX),
    "critical": dataclasses.replace(_MIXED, name="critical", kinds=MIX[:1]),
}
TRACES = ("trace", "agents")  # with arrivals of their own
SYNTAX = f"{', '.join(WORKLOADS)}, sharegpt:SCALE, agents[:SCALE] or trace:FILE"


def parse_workload(text: str, *, inputs: str = "", outputs: str = "", vocab: int, max_tokens: int) -> Workload:
    """Return a named workload, with other lengths if given. Raise `BenchError` or `ConfigError`."""
    name, _, argument = text.partition(":")
    if name in TRACES and (inputs or outputs):
        raise BenchError("--input and --output do not go with a trace: it has its own lengths")
    one = Lengths("constant", 1)
    if name == "agents":
        scale = _scale(argument) if argument else 1.0
        trace = agents_trace(AgentLoad(token_scale=scale, time_scale=scale, max_tokens=max_tokens))
        source = f"{len(trace)} turns of 64 agents by TraceLab (arXiv 2606.30560), times {scale:g}"
        workload = Workload(text, one, one, source=source, trace=trace)
    elif name == "trace" and argument:
        path = Path(argument)
        trace, digest = read_trace(path), hashlib.sha256(path.read_bytes()).hexdigest()
        num_cut = int((trace.prompt_tokens + trace.output_tokens > max_tokens).sum())
        source = f"{len(trace)} requests, SHA-256 {digest[:16]}, {num_cut} of them cut to {max_tokens} tokens"
        workload = Workload(f"trace:{path.name}", one, one, source=source, trace=trace)
    elif name == "sharegpt" and argument:
        workload = _sharegpt(_scale(argument))
    elif name in WORKLOADS and not argument:
        workload = WORKLOADS[name]
    else:
        raise BenchError(f"--workload {text!r}: choose one of {SYNTAX}")
    changes: dict[str, Any] = {"vocab": vocab, "max_tokens": max_tokens}
    if inputs:
        changes["inputs"] = _parse_lengths(inputs, "--input")
    if outputs:
        changes["outputs"] = _parse_lengths(outputs, "--output")
    workload = dataclasses.replace(workload, **changes)
    if workload.prefix_tokens + 2 > max_tokens:
        raise BenchError(f"--max-tokens is {max_tokens}: {name} needs more than {workload.prefix_tokens + 2}")
    return workload


def _parse_lengths(text: str, name: str) -> Lengths | LengthRange:
    kind, *ends = text.split(":")
    if kind != "range":
        return Lengths.parse(text, name=name)
    if len(ends) != 2 or not all(end.isdecimal() for end in ends) or not 1 <= int(ends[0]) <= int(ends[1]) < 1 << 24:
        raise BenchError(f"{name} is {text!r}: write range:LOW:HIGH, two whole numbers from 1, the smaller first")
    return LengthRange(int(ends[0]), int(ends[1]))


def _scale(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.001 <= (scale := float(text)) <= 100.0:
            return scale
    raise BenchError(f"--workload has the scale {text}: the scale must be a number from 0.001 to 100")
