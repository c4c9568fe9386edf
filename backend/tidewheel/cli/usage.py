import argparse
import contextlib
import inspect
import json
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from tidewheel_client import Client, Stream

DEFAULT_URL = "127.0.0.1:8001"

# Option → (type, help).
_SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "longest answer in tokens (default: what fits the context)"),
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "sample among the K most likely tokens"),
    "top_p": (float, "sample among the likeliest tokens that sum to P"),
    "min_p": (float, "drop tokens less likely than P times the likeliest"),
    "seed": (int, "same seed, same answer"),
    "repetition_penalty": (float, "above 1 discourages repetition"),
    "presence_penalty": (float, "above 0 discourages tokens that are in the answer already"),
    "frequency_penalty": (float, "the same, by how often"),
}
JSON_VERSION = 1  # of what --json prints; a field may be added, none changes
INTERRUPTED = 130  # exit code
_LENGTHS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
_MOST_TOKENS = 2**31 - 1  # cut by the server to what fits the context
_KEPT_CONTROLS = "\n\t"
NumberT = TypeVar("NumberT", int, float)


class UsageError(Exception):
    """Wrong command line; the message says what to change."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="gRPC endpoint of the server (default: %(default)s)")
    parser.add_argument("--model", help="name of the model (default: the only one that the server streams)")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="give up after S seconds")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "what is not given is the model's default")
    for name, (kind, text) in _SAMPLING.items():
        option = f"--{name.replace('_', '-')}"
        group.add_argument(option, type=kind, metavar=name.rsplit("_", 1)[-1].upper(), help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT (repeatable)")
    text = "any other sampling parameter; VALUE is JSON or text (repeatable)"
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def sampling_params(args: argparse.Namespace) -> dict[str, object]:
    params = given(args, (*_SAMPLING, "stop"))
    for pair in args.set:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {pair!r}: write key=value")
        key = key.replace("-", "_")
        params[key] = value
        with contextlib.suppress(ValueError):
            params[key] = json.loads(value)
    if params.keys().isdisjoint(_LENGTHS):
        params["max_tokens"] = _MOST_TOKENS
    return params


def add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")


def within(kind: type[NumberT], what: str, least: NumberT, most: NumberT, unit: str = "") -> Callable[[str], NumberT]:
    """Return a parser of numbers from `least` to `most`, for argparse."""

    def parse(text: str) -> NumberT:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}: {least:g} to {most:g}{unit}")

    return parse


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, object]:
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def fields_of(args: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """Return the parsed options that have a value and are parameters of `cls`, by name."""
    return given(args, inspect.signature(cls).parameters.keys() & vars(args).keys())


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@contextlib.contextmanager
def connect(args: argparse.Namespace) -> "Iterator[Client]":
    from tidewheel_client import Client, ServerUnavailable

    with Client(args.url, args.model or "", timeout_s=args.timeout_s) as client:
        try:
            client.model = args.model or _only_model(client)
            client.metadata()
        except ServerUnavailable as error:
            raise UsageError(f"{error}: start one with 'tidewheel serve', or name another with --url") from None
        yield client


def _only_model(client: "Client") -> str:
    models = client.streaming_models()
    if len(models) == 1:
        return models[0]
    if not models:
        raise UsageError(f"the server at {client.url} has no model that streams: name one with --model")
    raise UsageError(f"the server at {client.url} has several models: choose one with --model: {', '.join(models)}")


class PrintedAnswer(NamedTuple):
    text: str
    finish_reason: str | None  # None: cancelled here
    stats: str  # tokens and times


def show(stream: "Stream") -> PrintedAnswer:
    """Print the chunks of a stream. Ctrl-C cancels it."""
    start = time.monotonic()
    first_s, texts, num_input, num_output = 0.0, [], 0, 0
    try:
        with _cancelled_by_ctrl_c(stream):
            for chunk in stream:
                first_s = first_s or time.monotonic() - start
                texts.append(chunk.text)
                num_input = chunk.num_input_tokens or num_input
                num_output += chunk.num_output_tokens or 0
                print(printable(chunk.text) if sys.stdout.isatty() else chunk.text, end="", flush=True)
    finally:
        if texts:
            print(flush=True)
    after_first = time.monotonic() - start - first_s
    speed = (num_output - 1) / after_first if num_output > 1 and after_first > 0 else 0.0
    stats = (
        f"{num_input} tokens in, {num_output} out; first after {first_s * 1e3:.0f} ms, then {speed:.0f} tokens/s; "
        f"ended by {stream.finish_reason or 'you'}"
    )
    return PrintedAnswer("".join(texts), stream.finish_reason, stats)


@contextlib.contextmanager
def _cancelled_by_ctrl_c(stream: "Stream") -> Iterator[None]:
    """Cancel the stream on Ctrl-C: a KeyboardInterrupt within gRPC can leave a lock held and the channel dead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: stream.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def printable(text: str) -> str:
    """Return the text without control characters, which a terminal would obey."""
    return "".join(c for c in text if c in _KEPT_CONTROLS or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))
