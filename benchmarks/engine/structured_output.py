"""Cost of grammars, with the demo model on a CPU.

    python benchmarks structured_output --save

throughput   tokens per second of 32 requests, all of which follow a schema, over that of the same without, in turns;
             the same by the CPU time of the step loop's thread, as if masks had a processor of their own
first_token  milliseconds to the first token over gRPC, of requests with a schema of 1 kB that no request had before
neighbour    worst milliseconds between two tokens of a stream, beside grammars that are new, hostile or wrong
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from common.serving import Address, free_ports, served
from common.study import ROOT, Study, in_turns, show, summary
from tidewheel.grammar import Grammar
from tidewheel.llm import LLM
from tidewheel.sampling import SamplingParams
from tidewheel_client import Client
from tidewheel_client.errors import RequestError

WEIGHTS = ROOT / "model_repository" / "demo" / "1" / "weights"
SETTINGS = {"dtype": "float32", "num_threads": 1}
PROMPT = "The answer is"
BATCH = 32
NUM_TOKENS = 200
REPEATS = 7
NUM_SCHEMAS = 40
NUM_NEIGHBOUR_TOKENS = 900
DEPTH = 4000
GOALS = {"throughput_ratio": 0.9, "first_token_ms": 100.0, "neighbour_ms": 50.0}


class Rates(NamedTuple):
    """Tokens per second."""

    by_clock: float
    by_loop: float  # CPU time of the thread of the step loop


def record(number: int) -> dict[str, Any]:
    """Return a schema of 1 kB."""
    text: dict[str, Any] = {"type": "string", "maxLength": 40}
    line = {
        "type": "object",
        "properties": {"sku": text, "quantity": {"type": "integer", "minimum": 1}, "price": {"type": "number"}},
        "required": ["sku", "quantity", "price"],
        "additionalProperties": False,
    }
    properties = {
        f"id_{number}": {"type": "string", "format": "uuid"},
        "name": {"type": "string", "minLength": 1, "maxLength": 80},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "maxItems": 10},
        "address": {
            "type": "object",
            "properties": {"street": text, "zip": {"type": "string", "pattern": "^\\d{5}$"}},
        },
        "status": {"enum": ["active", "inactive", "banned"]},
        "created": {"type": "string", "format": "date-time"},
        "orders": {"type": "array", "items": line},
        "contact": {"anyOf": [{"type": "object", "properties": {"phone": text}}, {"type": "null"}]},
    }
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def throughput() -> dict[str, Any]:
    schema = {"type": "array", "items": record(0), "minItems": 50}
    plain = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    kinds = {"plain": plain, "grammar": SamplingParams(max_tokens=NUM_TOKENS, grammar=Grammar.json_schema(schema))}
    with LLM(WEIGHTS, num_blocks=1024, **SETTINGS) as llm:

        def rates(params: SamplingParams) -> Callable[[], Rates]:
            def once() -> Rates:
                clock, loop = time.perf_counter(), time.thread_time()
                results = llm.generate([PROMPT] * BATCH, params, use_tqdm=False)
                num_tokens = sum(len(result.token_ids) for result in results)
                return Rates(num_tokens / (time.perf_counter() - clock), num_tokens / (time.thread_time() - loop))

            return once

        samples = in_turns({name: rates(params) for name, params in kinds.items()}, REPEATS)
    pairs = list(zip(samples["grammar"], samples["plain"], strict=True))
    return {
        **{name: summary([one.by_clock for one in each]) for name, each in samples.items()},
        "ratio": summary([grammar.by_clock / plain.by_clock for grammar, plain in pairs]),
        "ratio_of_loop": summary([grammar.by_loop / plain.by_loop for grammar, plain in pairs]),
    }


def first_token(address: Address) -> dict[str, Any]:
    numbers = itertools.count(1)

    def milliseconds(with_schema: bool) -> float:
        grammar = {"guided_json": record(next(numbers))} if with_schema else {}
        with Client(address.grpc, model=address.model) as client:
            client.is_ready()  # connects
            began = time.perf_counter()
            next(iter(client.stream(PROMPT, max_tokens=8, seed=1, **grammar)))
            return 1e3 * (time.perf_counter() - began)

    runs = {"plain": lambda: milliseconds(False), "new_schema": lambda: milliseconds(True)}
    return {name: _spread(samples) for name, samples in in_turns(runs, NUM_SCHEMAS).items()}


def neighbour(address: Address) -> dict[str, Any]:
    kinds = {"alone": None, "new": new_schemas, "hostile": hostile_grammars}
    return {name: _worst_gap(address, kind) for name, kind in kinds.items()}


def new_schemas() -> Iterator[dict[str, Any]]:
    return ({"guided_json": record(number)} for number in itertools.count(1000))


def hostile_grammars() -> Iterator[dict[str, Any]]:
    chain = "\n".join(f'r{i} ::= "x" r{i + 1}' for i in range(DEPTH))
    names = {f"p{i}": {"type": "string"} for i in range(2000)}
    for number in itertools.count():
        yield {"guided_regex": f"((a{{1,{100 + number}}}){{1,100}}){{1,100}}"}
        yield {"guided_regex": rf"(\p{{L}}{{1,{50 + number}}}\p{{N}}?){{1,200}}"}
        yield {"guided_json": {"type": "object", "properties": {**names, f"n{number}": {}}}}
        yield {"guided_grammar": f'root ::= r0\n{chain}\nr{DEPTH} ::= "{number}"'}


def _worst_gap(address: Address, kind: Callable[[], Iterator[dict[str, Any]]] | None) -> dict[str, float]:
    over = threading.Event()
    grammars = kind() if kind is not None else iter(())

    def keep_asking() -> int:
        count = 0
        with Client(address.grpc, model=address.model) as client:
            for grammar in grammars:
                if over.is_set():
                    break
                with contextlib.suppress(RequestError):
                    client.generate(PROMPT, max_tokens=16, **grammar)
                count += 1
        return count

    with ThreadPoolExecutor(1) as pool, Client(address.grpc, model=address.model) as client:
        asking = pool.submit(keep_asking)
        moments = []
        for _ in client.stream(PROMPT, max_tokens=NUM_NEIGHBOUR_TOKENS, ignore_eos=True, temperature=0.0):
            moments.append(time.perf_counter())
        over.set()
        num_grammars = asking.result()
    gaps = [1e3 * (later - before) for before, later in itertools.pairwise(moments)]
    return {"grammars": num_grammars, "median_ms": statistics.median(gaps), "worst_ms": max(gaps)}


def _spread(samples: list[float]) -> dict[str, float]:
    return {"median_ms": statistics.median(samples), "p95_ms": sorted(samples)[int(0.95 * len(samples))]}


def main() -> None:
    study = Study("structured_output", __doc__, "torch", "llguidance")
    study.begin()
    figures: dict[str, Any] = {"throughput": throughput()}
    with served(WEIGHTS, SETTINGS, ports=free_ports(4)) as address:
        figures["first_token"] = first_token(address)
        figures["neighbour"] = neighbour(address)
    show([{name: one["median"] for name, one in figures["throughput"].items()}])
    show({"request": name, **one} for name, one in figures["first_token"].items())
    show({"beside": name, **one} for name, one in figures["neighbour"].items())
    study.save({"settings": SETTINGS, "goals": GOALS, **figures})


if __name__ == "__main__":
    main()
