"""Options, errors and answers of several commands."""

from __future__ import annotations

import argparse
import json
import sys
import time
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

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
_LENGTHS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
_MOST_TOKENS = 2**31 - 1  # cut by the server to what fits the context
_KEPT_CONTROLS = "\n\t"


class UsageError(Exception):
    """Wrong command line."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="gRPC endpoint of the server (default: %(default)s)")
    parser.add_argument("--model", help="name of the model (default: the only one that the server streams)")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="give up after S seconds")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "what is not given is the model's default")
    for name, (kind, text) in _SAMPLING.items():
        group.add_argument(_option(name), type=kind, metavar=name.rsplit("_", 1)[-1].upper(), help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT (repeatable)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other sampling parameter; VALUE is JSON or text (repeatable)",
    )


def sampling_params(args: argparse.Namespace) -> dict[str, object]:
    params: dict[str, object] = {
        name: value for name in (*_SAMPLING, "stop") if (value := getattr(args, name)) is not None
    }
    for pair in args.set:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {pair!r}: write key=value")
        params[key.replace("-", "_")] = _json_or_text(value)
    if params.keys().isdisjoint(_LENGTHS):
        params["max_tokens"] = _MOST_TOKENS
    return params


def connect(args: argparse.Namespace) -> Client:
    from tidewheel_client import Client, ServerUnavailable

    client = Client(args.url, args.model or "", timeout_s=args.timeout_s)
    try:
        client.model = args.model or _only_model(client)
        client.metadata()
    except BaseException as error:
        client.close()
        if isinstance(error, ServerUnavailable):
            raise UsageError(f"{error}: start one with 'tidewheel serve', or name another with --url") from None
        raise
    return client


def _only_model(client: Client) -> str:
    models = client.streaming_models()
    if len(models) == 1:
        return models[0]
    if not models:
        raise UsageError(f"the server at {client.url} has no model that streams: name one with --model")
    raise UsageError(f"the server at {client.url} has several models: choose one with --model: {', '.join(models)}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _json_or_text(value: str) -> object:
    try:
        return json.loads(value)
    except ValueError:
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedAnswer:
    text: str
    finish_reason: str | None  # None: cancelled here
    num_input_tokens: int
    num_output_tokens: int
    first_s: float  # until the first text
    total_s: float

    @property
    def stats(self) -> str:
        after_first = self.total_s - self.first_s
        speed = (self.num_output_tokens - 1) / after_first if self.num_output_tokens > 1 and after_first > 0 else 0.0
        return (
            f"{self.num_input_tokens} tokens in, {self.num_output_tokens} out; "
            f"first after {self.first_s * 1e3:.0f} ms, then {speed:.0f} tokens/s; "
            f"ended by {self.finish_reason or 'you'}"
        )


def show(stream: Stream, out: TextIO | None = None) -> PrintedAnswer:
    """Print a stream's chunks. Ctrl-C cancels it."""
    out = out or sys.stdout
    start = time.monotonic()
    first_s, texts, num_input, num_output = 0.0, [], 0, 0
    try:
        for chunk in stream:
            first_s = first_s or time.monotonic() - start
            texts.append(chunk.text)
            num_input = chunk.num_input_tokens or num_input
            num_output += chunk.num_output_tokens or 0
            out.write(printable(chunk.text) if out.isatty() else chunk.text)
            out.flush()
    except KeyboardInterrupt:
        stream.cancel()
    finally:
        if texts:
            out.write("\n")
            out.flush()
    return PrintedAnswer(
        text="".join(texts),
        finish_reason=stream.finish_reason,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        first_s=first_s,
        total_s=time.monotonic() - start,
    )


def printable(text: str) -> str:
    """Return the text without control characters, which a terminal would obey."""
    return "".join(c for c in text if c in _KEPT_CONTROLS or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))
