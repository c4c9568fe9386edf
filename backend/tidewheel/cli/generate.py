from __future__ import annotations

import argparse
import sys

from tidewheel.cli import usage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; without it, or with -, standard input")
    usage.add_server_options(parser)
    parser.add_argument("--no-stream", action="store_true", help="print the answer when it is whole")
    parser.add_argument("--stats", action="store_true", help="add tokens and times, on standard error")
    usage.add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    prompt = _prompt(args.prompt)
    params = usage.sampling_params(args)
    with usage.connect(args) as client:
        if args.no_stream:
            text = client.generate(prompt, **params).text  # type: ignore[arg-type]
            print(usage.printable(text) if sys.stdout.isatty() else text)
            return 0
        with client.stream(prompt, **params) as stream:  # type: ignore[arg-type]
            answer = usage.show(stream)
    if args.stats:
        print(answer.stats, file=sys.stderr)
    return 0 if answer.finish_reason is not None else usage.INTERRUPTED


def _prompt(argument: str | None) -> str:
    if argument not in (None, "-"):
        return str(argument)
    if sys.stdin.isatty() and argument is None:
        raise usage.UsageError('give a prompt: tidewheel generate "Once upon a time"')
    return sys.stdin.read()
