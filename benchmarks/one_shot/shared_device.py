"""Gaps of CRITICAL streams alone, and beside images and speech that take what is left of the machine, in turns.

    python benchmarks shared_device --save
    python benchmarks shared_device --policies fifo priority density --image digits --speech-model whisper \\
      --normal 12 --set max_num_seqs=8 --save

One server has a language model, whose users always wait for CRITICAL streams, and two one-shot models with LOW
requests always in flight: `ours` in engines that take turns, `free` in engines without turns, `plain` as instances of
Triton's Python backend with its dynamic batcher, beside the same language model. A server runs during its runs alone.
With `--policies`, ours under each. *digits* are pictures of many steps, *whisper* is speech to text.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

from common import random_whisper
from common.onnx_file import image_classifier, speech_detector
from common.study import RESULTS, Study, in_turns, show, summary
from one_shot.many_steps import DIGITS, SETTINGS
from tidewheel.bench.charts import COLOURS, INK, ChartImage, legend_below, panels, style
from tidewheel.bench.deploy import Deployment, TargetEndpoint, deployed
from tidewheel.bench.driver import LoadDriver, RunLimits, RunProgress
from tidewheel.bench.estimates import quantile
from tidewheel.bench.outcome import Conversation, OfferedRequest, RequestOutcome
from tidewheel.bench.targets import TRITON_ONE_SHOT, BenchTarget, OneShotEntry
from tidewheel.bench.workloads import MIX, Workload
from tidewheel.cli.bench import DEFAULT_MODEL
from tidewheel.server.repository import parse_settings
from tidewheel.workload.lengths import LengthRange

OURS, FREE, PLAIN = "ours", "free", "plain"
ALONE, BESIDE = "alone", "beside"
STRATEGY = {"scheduling_strategy": "continuous"}
TARGETS = (
    BenchTarget(OURS, "ours", STRATEGY),
    BenchTarget(FREE, "ours", {**STRATEGY, "device_slice_ms": "0"}),
    BenchTarget(PLAIN, "ours", {**STRATEGY, TRITON_ONE_SHOT: "true"}),
)
NAMES = {"text": "CRITICAL text", "normal": "NORMAL text", "image": "LOW images", "speech": "LOW speech"}
KINDS = tuple(NAMES)
SETTLE_S = 1.0  # before gaps count
TIMEOUT_S = 60.0
TEXT = Workload("critical", LengthRange(16, 64), LengthRange(64, 96), kinds=MIX[:1], vocab=500)
TEXTS = {
    "text": TEXT,
    "normal": replace(TEXT, inputs=LengthRange(16, 160), outputs=LengthRange(8, 96), kinds=MIX[1:2]),
}


def tensors(entry: str) -> Iterator[Conversation]:
    return repeat((OfferedRequest(0.0, [4], 1, {"priority": 4}, entry=entry),))


async def measure(place: TargetEndpoint, users: Mapping[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Keep so many requests in flight by kind. Return gaps of text, and rates and latencies of all."""
    limits, runs = RunLimits(options.seconds, timeout_s=TIMEOUT_S), {kind: RunProgress() for kind in users}
    async with asyncio.TaskGroup() as tasks:
        for kind, count in users.items():
            load = TEXTS[kind].conversations(options.seed) if kind in TEXTS else tensors(kind)
            tasks.create_task(LoadDriver(place.transport, limits, runs[kind]).closed_loop(load, count))
    for kind, run in runs.items():
        if failed := [one.error for one in run.outcomes if one.error]:
            raise RuntimeError(f"{len(failed)} requests of {kind} failed: {failed[0]}")
    gaps = [gap for one in runs["text"].outcomes for gap in settled_gaps(one)]
    rates = {f"{kind}_per_s": per_second(run.outcomes, options.seconds) for kind, run in runs.items()}
    ends = {kind: [one.last_token or TIMEOUT_S for one in run.outcomes] for kind, run in runs.items()}
    rates |= {
        f"{kind}_{name}_s": quantile(ends[kind], q) for kind in runs for name, q in (("p50", 0.5), ("max", 1.0))
    }
    return {
        "gap_p50_s": quantile(gaps, 0.5),
        "gap_p99_s": quantile(gaps, 0.99),
        "gap_max_s": quantile(gaps, 1.0),
        **rates,
    }


def settled_gaps(outcome: RequestOutcome) -> list[float]:
    chunks = [(time, count) for time, count in outcome.chunks if outcome.sent + time > SETTLE_S]
    return [(now - before) / count for (before, _), (now, count) in pairwise(chunks) for _ in range(count)]


def per_second(outcomes: list[RequestOutcome], seconds: float) -> float:
    return sum(one.sent + (one.last_token or seconds) < seconds for one in outcomes) / seconds


def run_all(options: argparse.Namespace, folder: Path, target: BenchTarget) -> dict[str, list[dict[str, Any]]]:
    """Serve a target, and return what each round measured, by case."""
    beside = {"text": options.streams, "image": options.images, "speech": options.speech}
    beside |= {"normal": options.normal} if options.normal else {}
    cases = {ALONE: {"text": options.streams}, BESIDE: beside}
    with deployed(deployment(options, folder), [target], with_ids=False) as places, asyncio.Runner() as runner:
        place = places[target.name]
        runner.run(place.transport.open())
        runs = {case: lambda users=users: runner.run(measure(place, users, options)) for case, users in cases.items()}
        found = in_turns(runs, options.rounds)
        runner.run(place.transport.close())
    return found


def deployment(options: argparse.Namespace, folder: Path) -> Deployment:
    return Deployment(
        model=str(options.folder.resolve()),
        dtype=options.dtype,
        settings=parse_settings(options.set),
        folder=folder,
        one_shot={"image": image_entry(options, folder), "speech": speech_entry(options, folder)},
    )


def image_entry(options: argparse.Namespace, folder: Path) -> OneShotEntry:
    threads = {"num_threads": str(options.threads)} if options.threads else {}
    if options.image == "digits":
        return OneShotEntry(str(DIGITS), "", threads | SETTINGS)
    if not options.image:
        (folder / "image.onnx").write_bytes(image_classifier())
    return OneShotEntry(str(Path(options.image or folder / "image.onnx").resolve()), "", threads)


def speech_entry(options: argparse.Namespace, folder: Path) -> OneShotEntry:
    threads, inputs = {"num_threads": str(options.threads)} if options.threads else {}, options.speech_inputs
    if options.speech_model == "whisper":
        audio = random_whisper.save_audio(folder / "audio.npz")
        return OneShotEntry(str(random_whisper.save(folder / "whisper")), str(audio), threads)
    if not options.speech_model:
        (folder / "speech.onnx").write_bytes(speech_detector())
    return OneShotEntry(str(Path(options.speech_model or folder / "speech.onnx").resolve()), inputs, threads)


def add_options(study: Study) -> None:
    study.add_argument("folder", type=Path, nargs="?", default=DEFAULT_MODEL, help="language model (default: demo)")
    study.add_argument("--dtype", default="float32")
    study.add_argument("--image", default="", metavar="FILE.onnx", help="or digits (default: four convolutions)")
    study.add_argument("--speech-model", default="", metavar="FILE.onnx", help="or whisper (default: five products)")
    study.add_argument("--speech-inputs", default="", metavar="FILE.npz", help="of one window")
    study.add_argument("--threads", type=int, default=0, help="of each one-shot model (default: all cores)")
    study.add_argument("--targets", nargs="+", choices=(OURS, FREE, PLAIN), default=(OURS, FREE, PLAIN))
    study.add_argument("--policies", nargs="+", default=(), help="measure ours under each, in place of the targets")
    study.add_argument("--normal", type=int, default=0, help="NORMAL texts in flight beside the others")
    study.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all engines")
    study.add_argument("--slice-ms", type=float, default=20.0, help="that the goal adds to the gap alone")
    study.add_argument("--streams", type=int, default=4, help="CRITICAL ones")
    study.add_argument("--images", type=int, default=4, help="in flight")
    study.add_argument("--speech", type=int, default=4, help="in flight")
    study.add_argument("--seconds", type=float, default=10.0, help="of a run")
    study.add_argument("--rounds", type=int, default=3)
    study.add_argument("--seed", type=int, default=0)


def main() -> None:
    study = Study("shared_device", __doc__, "onnxruntime", "torch", "tritonclient")
    add_options(study)
    options = study.begin()
    with tempfile.TemporaryDirectory() as folder:
        targets = [BenchTarget(name, "ours", {**STRATEGY, "scheduling_policy": name}) for name in options.policies]
        targets = targets or [target for target in TARGETS if target.name in options.targets]
        found = {target.name: run_all(options, Path(folder), target) for target in targets}
    figures = {
        (target, case): {name: summary([one[name] for one in rounds]) for name in rounds[0]}
        for target, cases in found.items()
        for case, rounds in cases.items()
    }
    show(
        {
            "one-shot models": target,
            "streams": case,
            **{f"{name}, ms": round(1e3 * row[f"gap_{name}_s"]["median"], 2) for name in ("p50", "p99", "max")},
            "goal of p99": round(1e3 * figures[target, ALONE]["gap_p99_s"]["median"] + options.slice_ms, 2),
            **{f"{kind}/s": round(row.get(f"{kind}_per_s", {}).get("median", 0.0), 1) for kind in KINDS},
            **{f"{kind}, longest s": round(row.get(f"{kind}_max_s", {}).get("median", 0.0), 2) for kind in KINDS[1:]},
        }
        for (target, case), row in figures.items()
    )  # fmt: skip
    given = {
        name: getattr(options, name) for name in ("streams", "images", "speech", "normal", "threads", "slice_ms")
    }
    targets = {target: {case: figures[target, case] for case in cases} for target, cases in found.items()}
    name = "shared_device_policies" if options.policies else "shared_device"
    study.save({**given, "set": options.set, "targets": targets}, name)
    if options.save and options.policies:
        (RESULTS / f"{name}.webp").write_bytes(picture({**given, "targets": targets}).webp())


def picture(record: Mapping[str, Any]) -> ChartImage:
    """Draw a record of policies: gaps of CRITICAL streams, and what the others got."""
    figure, (gaps, rates) = panels(2, height=3.0)
    goal = 1e3 * statistics.median(one[ALONE]["gap_p99_s"]["median"] for one in record["targets"].values())
    kinds = [kind for kind in KINDS if kind != "normal" or record["normal"]]
    for number, (policy, cases) in enumerate(record["targets"].items()):
        row, colour = cases[BESIDE], COLOURS[number]
        p99 = 1e3 * row["gap_p99_s"]["median"]
        gaps.barh(number, p99, 0.6, color=colour)
        label = gaps.annotate(f"{p99:.0f} ms", (p99, number), (-6, 0), textcoords="offset points", va="center")
        label.set(horizontalalignment="right", color="white")
        places = [kind + 0.26 * (number - 1) for kind in range(len(kinds))]
        rates.bar(places, [row[f"{kind}_per_s"]["median"] for kind in kinds], 0.24, color=colour, label=policy)
    gaps.axvline(goal + record["slice_ms"], color=INK, linewidth=0.9, linestyle=":")
    style(gaps, "Gap between tokens, p99", f"CRITICAL streams; dotted: {goal:.0f} ms alone, and a slice")
    style(rates, "Answers per second", "of each kind, on one device")
    gaps.set_yticks(range(len(record["targets"])), list(record["targets"]))
    gaps.invert_yaxis()
    gaps.margins(x=0.2)
    rates.set_xticks(range(len(kinds)), [NAMES[kind] for kind in kinds])
    legend_below(figure, rates)
    return ChartImage("shared_device_policies", "", figure)


if __name__ == "__main__":
    main()
