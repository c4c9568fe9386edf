import argparse
import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tidewheel.cli import usage

if TYPE_CHECKING:
    from tidewheel_queue import EnqueuedJob, Queue, Worker

URL_VARIABLE = "TIDEWHEEL_QUEUE_REDIS"
_FOLDER = Path("tidewheel-queue")
_OF_ONE_JOB = ("id", "priority", "deadline_ms", "tenant", "session_id", "session_ttl_s", "stream")
_PIECE = 500


def add_enqueue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt of one job; its id is printed")
    text = "add a job for each line of JSON, or none if a line is wrong; - is standard input (docs/queue.md)"
    parser.add_argument("--file", metavar="FILE", help=text)
    _add_queue_options(parser)
    add = parser.add_argument_group("job").add_argument
    add("--id", help="a job whose id the queue knows is not added again (default: a new one)")
    text = "critical, high, normal (default) or low, or its number, 1 to 4"
    add("--priority", type=lambda text: int(text) if text.isdecimal() else text, metavar="CLASS", help=text)
    add("--deadline-ms", type=float, metavar="MS", help="from now on, the time in the queue included")
    add("--tenant")
    add("--session-id", metavar="ID")
    add("--session-ttl-s", type=float, metavar="S")
    add("--stream", action="store_true", default=None, help="keep the answer's parts as they come")
    add = parser.add_argument_group("limits").add_argument
    text = "refuse beyond N jobs that wait or run (default: %(default)s)"
    add("--bound", type=int, default=10_000, metavar="N", help=text)
    add("--wait", action="store_true", help="wait for room in place of refusing")
    text = "keep results for S seconds (default: %(default)g)"
    add("--result-ttl-s", type=float, default=86_400, metavar="S", help=text)
    usage.add_sampling_options(parser)


def run_enqueue(args: argparse.Namespace) -> int:
    package = _queue_package()
    jobs = _jobs(args)
    with package.Queue(_where(args), name=args.queue, bound=args.bound, result_ttl_s=args.result_ttl_s) as queue:
        added = list(_enqueue(queue, jobs, wait=args.wait))
    for one in added:
        print(one.id)
    num_new = sum(one.is_new for one in added)
    if args.file is not None or not num_new:
        print(f"added {num_new} jobs; the queue knew {len(added) - num_new}", file=sys.stderr)
    return 0


def _jobs(args: argparse.Namespace) -> list[dict[str, object]]:
    fields = usage.given(args, _OF_ONE_JOB)
    if (args.prompt is None) == (args.file is None):
        raise usage.UsageError("give a prompt, or --file with a job on each line")
    if args.file is None:
        return [{"prompt": args.prompt, "params": usage.sampling_params(args), **fields}]
    if fields or usage.sampling_params(args).keys() != {"max_tokens"} or args.max_tokens is not None:
        raise usage.UsageError("options of a job go with a prompt: the lines of a file have their own fields")
    return _jobs_of_file(args.file)


def _jobs_of_file(name: str) -> list[dict[str, object]]:
    from tidewheel.regular_files import open_regular
    from tidewheel_client.errors import InvalidRequest
    from tidewheel_queue.jobs import read_jobs

    try:
        with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open_regular(Path(name)) as file:
            # A line that is far too long comes in parts, which are no jobs.
            return read_jobs(iter(functools.partial(file.readline, 1 << 24), b""))
    except OSError as error:
        raise usage.UsageError(f"{name} cannot be read ({error.strerror})") from None
    except InvalidRequest as error:
        raise usage.UsageError(f"{name}: {error.message}; nothing was added") from None


def _enqueue(queue: "Queue", jobs: list[dict[str, object]], *, wait: bool) -> "Iterator[EnqueuedJob]":
    from tidewheel_client.errors import Busy

    for start in range(0, len(jobs), _PIECE):
        while True:
            try:
                yield from queue.enqueue_many(jobs[start : start + _PIECE])
                break
            except Busy as error:
                if not wait:
                    remedy = "the same command, or one with --wait, adds the others"
                    so_far = f"; of {len(jobs)} jobs {start} are in the queue: {remedy}" if len(jobs) > 1 else ""
                    raise usage.UsageError(f"{error}{so_far}") from None
                time.sleep((error.retry_after_ms or 1000) / 1e3)


def add_worker(parser: argparse.ArgumentParser) -> None:
    usage.add_server_options(parser)
    _add_queue_options(parser)
    add = parser.add_argument_group("work").add_argument
    add("--concurrency", type=int, default=16, metavar="N", help="jobs at a time (default: %(default)s)")
    text = "seconds after which another worker takes a dead one's jobs; at most this long may this one stall"
    add("--lease-s", type=float, default=30.0, metavar="S", help=f"{text} (default: %(default)g)")
    add("--max-attempts", type=int, default=5, metavar="N", help="give a job up after N (default: %(default)s)")
    text = "seconds that jobs may go on after Ctrl-C or SIGTERM, then they are given back; a second ends at once"
    add("--drain-s", type=float, default=30.0, metavar="S", help=f"{text} (default: %(default)g)")
    add("--until-empty", action="store_true", help="end when no job waits or runs")


def run_worker(args: argparse.Namespace) -> int:
    _queue_package()
    if args.model is None:
        with usage.connect(args) as client:
            args.model = client.model
    return asyncio.run(_work(args))


async def _work(args: argparse.Namespace) -> int:
    from tidewheel_client import AsyncClient
    from tidewheel_queue import Worker, WorkerOptions

    options = WorkerOptions(**usage.fields_of(args, WorkerOptions))
    async with AsyncClient(args.url, args.model, timeout_s=args.timeout_s) as client:
        worker = Worker(client, _where(args), name=args.queue, options=options, note=_note)
        code = await _run_until_stopped(worker)
    made = worker.figures
    _note(f"{made.done} done, {made.failed} failed, {made.dead} given up or lost, {made.given_back} given back")
    return code


async def _run_until_stopped(worker: "Worker") -> int:
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
        return usage.INTERRUPTED
    return 0


def _note(text: str) -> None:
    print(f"tidewheel worker: {text}", file=sys.stderr, flush=True)


def add_results(parser: argparse.ArgumentParser) -> None:
    text = "print these jobs, one line of JSON each (default: all that have ended)"
    parser.add_argument("ids", nargs="*", metavar="ID", help=text)
    _add_queue_options(parser)
    text = "wait up to S seconds for each job named"
    parser.add_argument("--wait-s", type=float, default=0.0, metavar="S", help=text)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--follow", action="store_true", help="go on with new results until Ctrl-C")
    add("--tokens", action="store_true", help="print the text of one job with --stream as it comes")
    add("--cancel", action="store_true", help="cancel the jobs named, which wait or run")
    add("--dead", action="store_true", help="print the jobs that were given up, and why")
    add("--counts", action="store_true", help="print how many jobs wait and run in each class")


def run_results(args: argparse.Namespace) -> int:
    package = _queue_package()
    _check(args)
    with package.Queue(_where(args), name=args.queue) as queue:
        if args.tokens:
            return _print_tokens(queue, args.ids[0])
        for line in _lines(queue, args):
            print(json.dumps(line), flush=True)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.tokens and len(args.ids) != 1:
        raise usage.UsageError("--tokens takes the id of one job")
    if args.cancel and not args.ids:
        raise usage.UsageError("--cancel takes the ids of jobs")
    if args.ids and (args.follow or args.dead or args.counts):
        raise usage.UsageError("--follow, --dead and --counts are about all jobs: leave the ids away")
    if args.wait_s and (not args.ids or args.tokens or args.cancel):
        raise usage.UsageError("--wait-s waits for the jobs that are named and printed: it goes with their ids alone")
    if not 0 <= args.wait_s <= 86_400:
        raise usage.UsageError(f"--wait-s is {args.wait_s:g}: 0 to 86400")


def _lines(queue: "Queue", args: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    if args.cancel:
        return ({"id": job_id, "cancelled": queue.cancel(job_id)} for job_id in args.ids)
    if args.dead:
        return ({"id": one.id, "reason": one.reason, "attempts": one.attempts} for one in queue.dead())
    if args.counts:
        return iter([_counts(queue)])
    if args.ids:
        return (queue.result(job_id, wait_s=args.wait_s).as_dict() for job_id in args.ids)
    return (result.as_dict() for result in queue.results(follow=args.follow))


def _counts(queue: "Queue") -> dict[str, Any]:
    from tidewheel_queue.jobs import CLASSES

    counts = queue.counts()
    return {
        "waiting": dict(zip(CLASSES, counts.waiting, strict=True)),
        "running": dict(zip(CLASSES, counts.running, strict=True)),
        "dead": counts.dead,
    }


def _print_tokens(queue: "Queue", job_id: str) -> int:
    attempt = 0
    for part in queue.tokens(job_id):
        if attempt not in (0, part.attempt):
            print(f"\n[attempt {part.attempt}: the text begins anew]", file=sys.stderr)
        attempt = part.attempt
        print(usage.printable(part.text) if sys.stdout.isatty() else part.text, end="", flush=True)
    print()
    result = queue.result(job_id)
    if result.error is not None:
        print(f"{result.state}: {usage.printable(result.error)}", file=sys.stderr)
    return 0


def _add_queue_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("queue")
    where = group.add_mutually_exclusive_group()
    text = f"folder of an embedded Redis, which runs while a command uses it (default: {_FOLDER})"
    where.add_argument("--dir", type=Path, metavar="DIR", help=text)
    text = (
        "redis://, rediss:// (TLS) or unix:// URL of a Redis from 6.2 on. Other users of the machine see the command "
        f"line: a URL with a password goes into the variable {URL_VARIABLE}"
    )
    where.add_argument("--redis", metavar="URL", help=text)
    group.add_argument("--queue", default="default", metavar="NAME", help="name of the queue (default: %(default)s)")


def _where(args: argparse.Namespace) -> str | Path:
    if args.redis is not None and "://" not in args.redis:
        raise usage.UsageError("--redis takes a URL, such as redis://127.0.0.1:6379/0; --dir takes a folder")
    if args.redis is not None or args.dir is not None:
        return args.redis or Path(args.dir)
    return os.environ.get(URL_VARIABLE) or _FOLDER


def _queue_package() -> ModuleType:
    """Import `tidewheel_queue`. Raise `UsageError` without the extra `queue`."""
    try:
        import tidewheel_queue
    except ImportError as error:
        raise usage.UsageError(str(error)) from None
    return tidewheel_queue
