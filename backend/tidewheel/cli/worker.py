from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from tidewheel.cli.queue_options import add_queue_options, queue_package, where
from tidewheel.cli.usage import INTERRUPTED, add_server_options, connect, fields_of

if TYPE_CHECKING:
    from tidewheel_queue import Worker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add_queue_options(parser)
    add = parser.add_argument_group("work").add_argument
    add("--concurrency", type=int, default=16, metavar="N", help="jobs at a time (default: %(default)s)")
    text = "seconds after which another worker takes a dead one's jobs; at most this long may this one stall"
    add("--lease-s", type=float, default=30.0, metavar="S", help=f"{text} (default: %(default)g)")
    add("--max-attempts", type=int, default=5, metavar="N", help="give a job up after N (default: %(default)s)")
    text = "seconds that jobs may go on after Ctrl-C or SIGTERM, then they are given back; a second ends at once"
    add("--drain-s", type=float, default=30.0, metavar="S", help=f"{text} (default: %(default)g)")
    add("--until-empty", action="store_true", help="end when no job waits or runs")


def run(args: argparse.Namespace) -> int:
    queue_package()
    if args.model is None:
        with connect(args) as client:
            args.model = client.model
    return asyncio.run(_work(args))


async def _work(args: argparse.Namespace) -> int:
    from tidewheel_client import AsyncClient
    from tidewheel_queue import Worker, WorkerOptions

    options = WorkerOptions(**fields_of(args, WorkerOptions))
    async with AsyncClient(args.url, args.model, timeout_s=args.timeout_s) as client:
        worker = Worker(client, where(args), name=args.queue, options=options, note=_note)
        code = await _run_until_stopped(worker)
    made = worker.figures
    _note(f"{made.done} done, {made.failed} failed, {made.dead} given up or lost, {made.given_back} given back")
    return code


async def _run_until_stopped(worker: Worker) -> int:
    working = asyncio.ensure_future(worker.run())
    signals: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        signals.append(number)
        worker.stop() if len(signals) == 1 else working.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        await working
    except asyncio.CancelledError:
        return INTERRUPTED
    return 0


def _note(text: str) -> None:
    print(f"tidewheel worker: {text}", file=sys.stderr, flush=True)
