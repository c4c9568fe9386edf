from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from tidewheel.cli import usage

if TYPE_CHECKING:
    from tidewheel_client import Client

_HELP = "Ctrl-C stops an answer, Ctrl-D ends the chat, /new starts over."
_PROMPT = "> "


def add_chat(parser: argparse.ArgumentParser) -> None:
    usage.add_server_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the first message")
    parser.add_argument("--stats", action="store_true", help="add tokens and times after each answer")
    usage.add_sampling_options(parser)


def run_chat(args: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` line editing and a history
    params = usage.sampling_params(args)
    with usage.connect(args) as client:
        print(f"{client.model} at {client.url}. {_HELP}")
        TerminalChat(client, args.system, params, stats=args.stats).run()
    return 0


class TerminalChat:
    def __init__(self, client: Client, system: str | None, params: dict[str, object], *, stats: bool) -> None:
        self._client = client
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._params = params
        self._stats = stats

    def run(self) -> None:
        from tidewheel_client import RequestError

        while (line := _read_line()) is not None:
            if line == "/new":
                self._messages = list(self._opening)
            elif line:
                try:
                    self.ask(line)
                except RequestError as error:
                    print(f"error: {error}", file=sys.stderr)

    def ask(self, question: str) -> None:
        """Send a question and print the answer. Raise `RequestError`; the conversation then lacks the question."""
        messages = [*self._messages, {"role": "user", "content": question}]
        with self._client.stream(messages=messages, **self._params) as stream:  # type: ignore[arg-type]
            answer = usage.show(stream)
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        if self._stats:
            print(answer.stats, file=sys.stderr)


def _read_line() -> str | None:
    try:
        return input(_PROMPT if sys.stdin.isatty() else "").strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        if sys.stdin.isatty():
            print()
        return None


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; without it, or with -, standard input")
    usage.add_server_options(parser)
    parser.add_argument("--no-stream", action="store_true", help="print the answer when it is whole")
    parser.add_argument("--stats", action="store_true", help="add tokens and times, on standard error")
    usage.add_sampling_options(parser)


def run_generate(args: argparse.Namespace) -> int:
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
