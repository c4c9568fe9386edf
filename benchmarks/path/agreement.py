"""Compare `tidewheel bench` with locust and AIPerf, in turns, on one server without prefix cache.

    python benchmarks agreement build/qwen3-40m --aiperf ENVIRONMENT/bin/aiperf --save

Each keeps as many random prompts of one size in flight. AIPerf (`pip install aiperf`) speaks generate_stream.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common.serving import LOCUSTFILE, Address, served
from common.study import Study, in_turns

NUM_PROMPTS = 2048
TEMPLATE = (
    '{"text_input": {{ text|tojson }}, "max_tokens": {{ max_tokens }}, "stream": true, "ignore_eos": true, '
    '"temperature": 0}'
)
# Locust's figures by row type; its --json has no rate over the whole test.
STATISTICS = """
import json
from pathlib import Path
from locust import events

@events.quitting.add_listener
def write(environment, **_):
    rows = {
        kind: {"mean": row.avg_response_time, "per_s": row.total_rps}
        for (_, kind), row in environment.stats.entries.items()
    }
    Path(__file__).with_name("locust.json").write_text(json.dumps(rows))
"""
PAIRS = (  # Tidewheel's target, the other tool's
    ("bench gRPC", "locust GrpcStreamUser"),
    ("bench generate_stream", "locust HttpStreamUser"),
    ("bench generate_stream", "aiperf"),
)


class Size(NamedTuple):
    users: int
    seconds: int
    prompt_tokens: int
    output_tokens: int


class Bench(NamedTuple):
    address: Address
    size: Size
    folder: Path
    vocab: int


Figures = dict[str, float]  # means of ttft_ms, tpot_ms, requests_per_s, output_tokens_per_s


def write_inputs(folder: Path, size: Size, vocab: int) -> None:
    rng = random.Random(0)
    texts = [" ".join(f"t{rng.randrange(4, vocab)}" for _ in range(size.prompt_tokens)) for _ in range(NUM_PROMPTS)]
    (folder / "prompts.txt").write_text("\n".join(texts))
    lines = [json.dumps({"text": text, "output_length": size.output_tokens}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    (folder / "template.json").write_text(TEMPLATE)
    (folder / "statistics.py").write_text(STATISTICS)


def with_bench(url: str, bench: Bench) -> Figures:
    size, out = bench.size, bench.folder / "bench"
    target = url.format(grpc=bench.address.grpc, http=bench.address.http, model=bench.address.model)
    command = [sys.executable, "-m", "tidewheel.cli.main", "bench", "--target", f"it={target}"]
    command += ["--load", f"closed:{size.users}", "--seconds", str(size.seconds), "--repeats", "1"]
    command += ["--workload", "fixed", "--input", f"constant:{size.prompt_tokens}"]
    command += ["--output", f"constant:{size.output_tokens}", "--vocab", str(bench.vocab), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    (run,) = json.loads((out / "results.json").read_text())["stages"][0]["runs"]
    summary = run["summary"]
    if summary["errors"]:
        raise SystemExit(f"requests failed: {summary['errors']}")
    return {
        "ttft_ms": summary["ttft_s"]["mean"] * 1e3,
        "tpot_ms": summary["tpot_s"]["mean"] * 1e3,
        "requests_per_s": summary["requests_per_s"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
    }


def with_locust(user: str, bench: Bench) -> Figures:
    size = bench.size
    command = [sys.executable, "-m", "locust", "--headless", "--only-summary"]
    command += ["-f", f"{LOCUSTFILE},{bench.folder / 'statistics.py'}"]
    command += ["-u", str(size.users), "-r", str(size.users), "-t", f"{size.seconds}s", "--stop-timeout", "60"]
    command += ["--grpc-url", bench.address.grpc, "--host", f"http://{bench.address.http}"]
    command += ["--model", bench.address.model, "--prompt-file", str(bench.folder / "prompts.txt")]
    command += ["--output-tokens", str(size.output_tokens), user]
    subprocess.run(command, check=True, capture_output=True)
    rows = json.loads((bench.folder / "locust.json").read_text())
    whole = next(rows[kind] for kind in ("GRPC", "SSE") if kind in rows)
    return {
        "ttft_ms": rows["TTFT"]["mean"],
        "tpot_ms": rows["TPOT"]["mean"],
        "requests_per_s": whole["per_s"],
        "output_tokens_per_s": whole["per_s"] * size.output_tokens,
    }


def with_aiperf(program: Path, tokenizer: Path, bench: Bench) -> Figures:
    size, out = bench.size, bench.folder / "aiperf"
    command = [str(program), "profile", "-m", bench.address.model, "--url", f"http://{bench.address.http}"]
    command += ["--endpoint-type", "template", "--streaming", "--ui", "none"]
    command += ["--custom-endpoint", f"/v2/models/{bench.address.model}/generate_stream"]
    command += ["--extra-inputs", f"payload_template:{bench.folder / 'template.json'}"]
    command += ["--extra-inputs", "response_field:text_output", "--tokenizer", str(tokenizer.resolve())]
    command += ["--input-file", str(bench.folder / "prompts.jsonl"), "--custom-dataset-type", "single_turn"]
    command += ["--concurrency", str(size.users), "--benchmark-duration", str(size.seconds)]
    command += ["--workers-max", "1", "--output-artifact-dir", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    return {
        "ttft_ms": found["time_to_first_token"]["avg"],
        "tpot_ms": found["inter_token_latency"]["avg"],
        "requests_per_s": found["request_throughput"]["avg"],
        "output_tokens_per_s": found["output_token_throughput"]["avg"],
    }


def note(number: int, name: str, figures: Figures) -> None:
    print(number, f"{name:24}", {key: round(value, 2) for key, value in figures.items()}, flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    size = Size(options.users, options.seconds, options.prompt_tokens, options.output_tokens)
    vocab = json.loads((options.model / "config.json").read_text())["vocab_size"]
    tools = {
        "bench gRPC": partial(with_bench, "grpc://{grpc}/{model}"),
        "locust GrpcStreamUser": partial(with_locust, "GrpcStreamUser"),
        "bench generate_stream": partial(with_bench, "http://{http}/v2/models/{model}/generate_stream"),
        "locust HttpStreamUser": partial(with_locust, "HttpStreamUser"),
    }
    if options.aiperf:
        tools["aiperf"] = partial(with_aiperf, options.aiperf, options.model)
    settings = {
        "enable_prefix_caching": False,
        "num_threads": options.threads,
        "kv_cache_memory_mb": 256,
        "max_model_len": 2048,
    }
    with tempfile.TemporaryDirectory() as scratch, served(options.model, settings) as address:
        bench = Bench(address, size, Path(scratch), vocab)
        write_inputs(bench.folder, size, vocab)
        for run in tools.values():
            run(bench._replace(size=size._replace(seconds=min(3, size.seconds))))
        runs = {name: partial(run, bench) for name, run in tools.items()}
        samples = in_turns(runs, options.repeats, warm_up=0, note=note)
    return {"size": size._asdict(), "settings": settings, "samples": samples, "differences": differences(samples)}


def differences(samples: dict[str, list[Figures]]) -> dict[str, Figures]:
    """Return Tidewheel's figures over the other tool's, less 1, as medians over pairs in time."""
    found = {}
    for ours, theirs in PAIRS:
        if theirs in samples:
            pairs = list(zip(samples[ours], samples[theirs], strict=True))
            found[f"{ours} / {theirs}"] = {
                key: statistics.median(mine[key] / other[key] for mine, other in pairs) - 1 for key in pairs[0][0]
            }
    return found


def aiperf_version(program: Path | None) -> dict[str, str]:
    if program is None:
        return {}
    done = subprocess.run([str(program), "--version"], check=True, capture_output=True, text=True)
    return {"aiperf": done.stdout.strip().splitlines()[-1]}


def main() -> None:
    study = Study("agreement", __doc__, "locust", "torch")
    study.add_argument("model", type=Path, help="a folder of benchmarks/common/random_model.py: a word is a token")
    study.add_argument("--aiperf", type=Path, help="the program")
    study.add_argument("--users", type=int, default=2)
    study.add_argument("--seconds", type=int, default=20, help="of each run")
    study.add_argument("--prompt-tokens", type=int, default=64)
    study.add_argument("--output-tokens", type=int, default=64)
    study.add_argument("--repeats", type=int, default=3)
    study.add_argument("--threads", type=int, default=1, help="of the engine: the tools need a core of their own")
    options = study.begin()
    study.facts["versions"] |= aiperf_version(options.aiperf)
    result = measure(options)
    for pair, figures in result["differences"].items():
        print(pair, {key: f"{value:+.1%}" for key, value in figures.items()})
    study.save(result)


if __name__ == "__main__":
    main()
