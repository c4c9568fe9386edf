from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tidewheel.cli.queue_options import add_queue_options, queue_package, where
from tidewheel.cli.usage import UsageError, add_sampling_options, given, sampling_params

if TYPE_CHECKING:
    from tidewheel_queue import EnqueuedJob, Queue

_OF_ONE_JOB = ("id", "priority", "deadline_ms", "tenant", "session_id", "session_ttl_s", "stream")
_PIECE = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt of one job; its id is printed")
    text = "add a job for each line of JSON, or none if a line is wrong; - is standard input (docs/queue.md)"
    parser.add_argument("--file", metavar="FILE", help=text)
    add_queue_options(parser)
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
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    package = queue_package()
    jobs = _jobs(args)
    with package.Queue(where(args), name=args.queue, bound=args.bound, result_ttl_s=args.result_ttl_s) as queue:
        added = list(_enqueue(queue, jobs, wait=args.wait))
    for one in added:
        print(one.id)
    num_new = sum(one.is_new for one in added)
    if args.file is not None or not num_new:
        print(f"added {num_new} jobs; the queue knew {len(added) - num_new}", file=sys.stderr)
    return 0


def _jobs(args: argparse.Namespace) -> list[dict[str, object]]:
    fields = given(args, _OF_ONE_JOB)
    if (args.prompt is None) == (args.file is None):
        raise UsageError("give a prompt, or --file with a job on each line")
    if args.file is None:
        return [{"prompt": args.prompt, "params": sampling_params(args), **fields}]
    if fields or sampling_params(args).keys() != {"max_tokens"} or args.max_tokens is not None:
        raise UsageError("options of a job go with a prompt: the lines of a file have their own fields")
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
        raise UsageError(f"{name} cannot be read ({error.strerror})") from None
    except InvalidRequest as error:
        raise UsageError(f"{name}: {error.message}; nothing was added") from None


def _enqueue(queue: Queue, jobs: list[dict[str, object]], *, wait: bool) -> Iterator[EnqueuedJob]:
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
                    raise UsageError(f"{error}{so_far}") from None
                time.sleep((error.retry_after_ms or 1000) / 1e3)
