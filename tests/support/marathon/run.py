"""Serve the demo model for a while under mixed load and random faults, and judge what became of it.

    python -m support.marathon.run --minutes 30
    python -m support.marathon.run --minutes 20 --faults none --load 0.8 --name soak

Exit status 1: a criterion failed. Results go to build/NAME; with --record also to benchmarks/results.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from support.faults.own_mounts import OwnMount, may_mount, with_mounts
from support.faults.service import SETTINGS, make_repository
from support.marathon.disturbances import KINDS, Disturber, Target
from support.marathon.judgement import judge
from support.marathon.ledger import Run
from support.marathon.page import figures, recoveries, render, timeline, verdict_table
from support.marathon.traffic import (
    CANARIES_PER_S,
    CANARY_TOKENS,
    MAX_TOKENS,
    PROMPTS,
    Canaries,
    Traffic,
    asks,
    call_of,
)
from support.marathon.watch import Watch, at_rest, crash_lines, processes_with
from support.triton.burst import GREEDY
from support.triton.serving import (
    ROOT,
    WEIGHTS,
    Server,
    grpc_inputs,
    grpc_stream,
    start_server,
    stop_server,
    token_ids,
    wait_ready,
)
from tidewheel.bench.driver import LoadDriver, RunLimits, RunProgress
from tidewheel.bench.environment import command_line, environment
from tidewheel.private_dir import RUN_DIR
from tidewheel.server import model_control

MEGABYTES = {"disk": 64, "/dev/shm": 256}
RESULTS = ROOT / "benchmarks" / "results"
REQUEST_LIMIT_S = 60.0
CAPACITY_S, CAPACITY_USERS = 20.0, 32
MEAN_TOKENS = (4 + MAX_TOKENS) / 2
END_LIMIT_S = 20.0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", default="all", help=f"all, none, or some of: {', '.join(KINDS)}; commas between")
    parser.add_argument("--load", type=float, default=0.4, help="share of the capacity, which is measured first")
    parser.add_argument("--rate", type=float, help="requests a second, instead of --load")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--name", default="marathon", help="of the results")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results as well")
    parser.add_argument("--redraw", action="store_true", help="draw the recorded picture again, and measure nothing")
    options = parser.parse_args(arguments)
    chosen = {"all": list(KINDS), "none": []}.get(options.faults, options.faults.split(","))
    if unknown := set(chosen) - set(KINDS):
        parser.error(f"--faults: {', '.join(unknown)} is none of: {', '.join(KINDS)}")
    options.faults = [name for name in chosen if may_mount() or not KINDS[name].needs_mounts]
    return options


def marathon(folder: Path, options: argparse.Namespace) -> Run:
    """Start a server, measure it, end it, and see what it leaves."""
    disk = folder / "disk"
    disk.mkdir()
    mounts = {str(disk): MEGABYTES["disk"], "/dev/shm": MEGABYTES["/dev/shm"]}
    server = start_server(
        *("--model-repository", str(make_repository(folder, SETTINGS)), "--model-control", "explicit"),
        *("--open-api", "model-repository"),  # its faults load models over it
        *("--log-file", str(disk / "triton.log")),
        log=folder / "serve.log",
        prefix=with_mounts(mounts) if may_mount() else (),
        variables={RUN_DIR: str(disk)},
    )
    try:
        wait_ready(server)
        with OwnMount(server, str(disk)) as own_disk, OwnMount(server, "/dev/shm") as shared_memory:
            reference = {prompt: _ask(server, prompt) for prompt in PROMPTS}
            run = asyncio.run(_measure(Target(server, reference, own_disk, shared_memory), options))
            run.bad_lines = crash_lines(server.log.read_text(errors="replace") + own_disk.logs())
            run.exit_status = _stop(server)
            run.left_over = _left_over(disk, own_disk, shared_memory)
        return run
    finally:
        if server.process.poll() is None:
            server.process.kill()


def _ask(server: Server, prompt: str) -> list[int]:
    inputs = grpc_inputs(prompt, stream=True, return_token_ids=True, max_tokens=MAX_TOKENS, **GREEDY)
    return token_ids(grpc_stream(server, inputs))


async def _measure(target: Target, options: argparse.Namespace) -> Run:
    server, seconds = target.server, 60 * options.minutes
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    prompt_ids = {prompt: tokenizer.encode(prompt).ids for prompt in PROMPTS}
    for model in ("demo", "demo_infer"):  # front ends that start later inherit more descriptors of Triton's
        await asyncio.to_thread(model_control.reload, server.grpc, model)
    capacity = await _capacity(server, prompt_ids)
    rate = options.rate or options.load * capacity - CANARIES_PER_S * CANARY_TOKENS / MEAN_TOKENS
    before = await asyncio.to_thread(at_rest, server, target.disk)
    print(f"capacity {capacity:.1f} requests/s; offered: {rate:.1f}, and {CANARIES_PER_S:g} canaries", flush=True)
    progress = RunProgress(start=time.perf_counter())
    watch = Watch(server, progress)
    async with _opened(server) as traffic:
        canaries = Canaries(server, traffic, target.reference, progress)
        disturber = Disturber(target, canaries, progress)
        watching = asyncio.create_task(watch.run())
        async with asyncio.TaskGroup() as tasks:
            driver = LoadDriver(traffic, RunLimits(seconds, timeout_s=REQUEST_LIMIT_S), progress)
            tasks.create_task(driver.open_loop((ask,) for ask in asks(prompt_ids, rate, seconds, options.seed)))
            tasks.create_task(canaries.run(seconds))
            tasks.create_task(disturber.run(options.faults, seconds, options.seed))
        watching.cancel()
        canaries.close()
    calls = [*canaries.calls, *(call_of(outcome, target.reference) for outcome in progress.outcomes)]
    after = await asyncio.to_thread(at_rest, server, target.disk)
    return Run(seconds, rate, before, after, calls, disturber.faults, watch.samples)


async def _capacity(server: Server, prompt_ids: Mapping[str, list[int]]) -> float:
    """Return the answers a second with many requests in flight. This warms the server too."""
    progress = RunProgress()
    load = (replace(ask, cancel_after_s=None) for ask in asks(prompt_ids, 1000.0, CAPACITY_S, seed=0))
    async with _opened(server) as traffic:
        driver = LoadDriver(traffic, RunLimits(CAPACITY_S, timeout_s=REQUEST_LIMIT_S), progress)
        await driver.closed_loop(((ask,) for ask in load), CAPACITY_USERS)
    begin = CAPACITY_S / 4
    ends = [outcome.sent + outcome.ended for outcome in progress.outcomes if outcome.ended and not outcome.error]
    return sum(begin <= end < CAPACITY_S for end in ends) / (CAPACITY_S - begin)


@contextlib.asynccontextmanager
async def _opened(server: Server) -> AsyncIterator[Traffic]:
    traffic = Traffic(server)
    await traffic.open()
    try:
        yield traffic
    finally:
        await traffic.close()


def _stop(server: Server) -> int:
    try:
        return stop_server(server)
    except subprocess.TimeoutExpired:
        return -9


def _left_over(disk: Path, own_disk: OwnMount, shared_memory: OwnMount) -> list[str]:
    """Return processes, files and regions of the ended server."""

    def look() -> list[str]:
        files = [name for name in own_disk.files() if name != "triton.log"]
        regions = [name for name in shared_memory.files() if name.startswith("tidewheel_") or may_mount()]
        return [*(f"process {one.pid}" for one in processes_with(RUN_DIR, str(disk))), *files, *regions]

    deadline = time.monotonic() + END_LIMIT_S
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def main(arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    options = parse(arguments)
    recorded = ROOT / "benchmarks" / "results" / options.name
    if options.redraw:
        _draw(json.loads(recorded.with_suffix(".json").read_text())["recovery_s"], recorded)
        return 0
    folder = ROOT / "build" / options.name
    folder.mkdir(parents=True, exist_ok=True)
    about = {**environment(), "command": command_line("python -m support.marathon.run", arguments)}
    with tempfile.TemporaryDirectory(prefix="tw-") as work:
        try:
            run = marathon(Path(work), options)
        finally:
            shutil.copy(Path(work) / "serve.log", folder)
    verdicts, picture = judge(run), timeline(run)
    found = {**about, "verdicts": [one._asdict() for one in verdicts], **figures(run)}
    (folder / "report.html").write_text(render(options.name.capitalize(), run, verdicts, picture, about))
    for base in (folder / options.name, *([recorded] if options.record else [])):
        base.with_suffix(".json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
        _draw(found["recovery_s"], base)
    print(verdict_table(verdicts).as_text(), f"report: {folder / 'report.html'}", sep="\n")
    return int(not all(one.passed for one in verdicts))


def _draw(recovery_s: Mapping[str, Sequence[float]], base: Path) -> None:
    if recovery_s:
        base.with_suffix(".webp").write_bytes(recoveries(recovery_s).webp())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
