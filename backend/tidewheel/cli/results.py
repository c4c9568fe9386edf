from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tidewheel.cli.queue_options import add_queue_options, queue_package, where
from tidewheel.cli.usage import UsageError, printable

if TYPE_CHECKING:
    from tidewheel_queue import Queue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "print these jobs, one line of JSON each (default: all that have ended)"
    parser.add_argument("ids", nargs="*", metavar="ID", help=text)
    add_queue_options(parser)
    text = "wait up to S seconds for each job named"
    parser.add_argument("--wait-s", type=float, default=0.0, metavar="S", help=text)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--follow", action="store_true", help="go on with new results until Ctrl-C")
    add("--tokens", action="store_true", help="print the text of one job with --stream as it comes")
    add("--cancel", action="store_true", help="cancel the jobs named, which wait or run")
    add("--dead", action="store_true", help="print the jobs that were given up, and why")
    add("--counts", action="store_true", help="print how many jobs wait and run in each class")


def run(args: argparse.Namespace) -> int:
    package = queue_package()
    _check(args)
    with package.Queue(where(args), name=args.queue) as queue:
        if args.tokens:
            return _print_tokens(queue, args.ids[0])
        for line in _lines(queue, args):
            print(json.dumps(line), flush=True)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.tokens and len(args.ids) != 1:
        raise UsageError("--tokens takes the id of one job")
    if args.cancel and not args.ids:
        raise UsageError("--cancel takes the ids of jobs")
    if args.ids and (args.follow or args.dead or args.counts):
        raise UsageError("--follow, --dead and --counts are about all jobs: leave the ids away")
    if args.wait_s and (not args.ids or args.tokens or args.cancel):
        raise UsageError("--wait-s waits for the jobs that are named and printed: it goes with their ids alone")
    if not 0 <= args.wait_s <= 86_400:
        raise UsageError(f"--wait-s is {args.wait_s:g}: 0 to 86400")


def _lines(queue: Queue, args: argparse.Namespace) -> Iterator[Mapping[str, Any]]:
    if args.cancel:
        return ({"id": job_id, "cancelled": queue.cancel(job_id)} for job_id in args.ids)
    if args.dead:
        return ({"id": one.id, "reason": one.reason, "attempts": one.attempts} for one in queue.dead())
    if args.counts:
        return iter([_counts(queue)])
    if args.ids:
        return (queue.result(job_id, wait_s=args.wait_s).as_dict() for job_id in args.ids)
    return (result.as_dict() for result in queue.results(follow=args.follow))


def _counts(queue: Queue) -> dict[str, Any]:
    from tidewheel_queue.jobs import CLASSES

    counts = queue.counts()
    return {
        "waiting": dict(zip(CLASSES, counts.waiting, strict=True)),
        "running": dict(zip(CLASSES, counts.running, strict=True)),
        "dead": counts.dead,
    }


def _print_tokens(queue: Queue, job_id: str) -> int:
    attempt = 0
    for part in queue.tokens(job_id):
        if attempt not in (0, part.attempt):
            print(f"\n[attempt {part.attempt}: the text begins anew]", file=sys.stderr)
        attempt = part.attempt
        print(printable(part.text) if sys.stdout.isatty() else part.text, end="", flush=True)
    print()
    result = queue.result(job_id)
    if result.error is not None:
        print(f"{result.state}: {printable(result.error)}", file=sys.stderr)
    return 0
