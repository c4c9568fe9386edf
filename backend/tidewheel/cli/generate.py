from __future__ import annotations

import argparse
import sys

from tidewheel.cli.usage import (
    INTERRUPTED,
    UsageError,
    add_sampling_options,
    add_server_options,
    connect,
    printable,
    sampling_params,
    show,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; without it, or with -, standard input")
    add_server_options(parser)
    parser.add_argument("--no-stream", action="store_true", help="print the answer when it is whole")
    parser.add_argument("--stats", action="store_true", help="add tokens and times, on standard error")
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    prompt = _prompt(args.prompt)
    params = sampling_params(args)
    with connect(args) as client:
        if args.no_stream:
            text = client.generate(prompt, **params).text  # type: ignore[arg-type]
            print(printable(text) if sys.stdout.isatty() else text)
            return 0
        with client.stream(prompt, **params) as stream:  # type: ignore[arg-type]
            answer = show(stream)
    if args.stats:
        print(answer.stats, file=sys.stderr)
    return 0 if answer.finish_reason is not None else INTERRUPTED


def _prompt(argument: str | None) -> str:
    if argument not in (None, "-"):
        return str(argument)
    if sys.stdin.isatty() and argument is None:
        raise UsageError('give a prompt: tidewheel generate "Once upon a time"')
    return sys.stdin.read()
