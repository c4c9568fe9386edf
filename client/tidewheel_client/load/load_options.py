"""Requests of load tests by their options, and how they fill rows of locust's statistics:

    GRPC, SSE, INFER, OPENAI   whole requests, from sending to last token; failures count here, under their tag
    TTFT                       times to the first token of successful streams
    TPOT                       mean times between tokens of streams with two or more

A row's name is model and QoS class; the names of TTFT and TPOT begin with the request type. Times are milliseconds.
"""

import argparse
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tidewheel_client.codec import PRIORITIES
from tidewheel_client.errors import RequestError

logger = logging.getLogger(__name__)
_logged: set[tuple[str, str]] = set()  # request types and labels of errors
MAX_LENGTH = 1_000_000
_WORDS = (
    "answer", "block", "branch", "bridge", "cache", "cloud", "copper", "corner", "device", "engine", "field",
    "garden", "harbour", "index", "island", "kernel", "letter", "level", "machine", "market", "memory", "method",
    "number", "object", "paper", "pattern", "query", "question", "queue", "record", "river", "signal", "silver",
    "station", "stone", "summer", "table", "thread", "token", "window", "winter",
)  # fmt: skip


class OptionError(argparse.ArgumentTypeError):
    """Invalid value of a load-test option; the message has one line."""


def parse_range(text: str) -> tuple[float, float]:
    """Return low and high of `5` or `1-5`, both included. Raise `OptionError`."""
    first, dash, last = text.partition("-")
    try:
        low, high = float(first), float(last if dash else first)
    except ValueError:
        raise OptionError(f"{text!r} is no range: write LOW-HIGH, or one number") from None
    if not 0 <= low <= high <= MAX_LENGTH:
        raise OptionError(f"{text!r} is no range: 0 <= LOW <= HIGH <= {MAX_LENGTH} must hold")
    return low, high


def parse_counts(text: str) -> tuple[int, int]:
    low, high = parse_range(text)
    if low < 1 or not (low.is_integer() and high.is_integer()):
        raise OptionError(f"{text!r} is no range of counts: write whole numbers from 1")
    return int(low), int(high)


def parse_mix(text: str) -> dict[str, float]:
    """Return weights by name from `name` or `name=weight`, separated by commas; the default weight is 1."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (item.strip() for item in part.partition("="))
        if not name or name in weights:
            raise OptionError(f"{text!r} is no mix: write NAME=WEIGHT,NAME=WEIGHT, each name once")
        try:
            weights[name] = float(number if equals else 1)
        except ValueError:
            raise OptionError(f"{text!r} is no mix: the weight of {name} is {number!r}") from None
        if not 0 < weights[name] <= MAX_LENGTH:
            raise OptionError(f"{text!r} is no mix: the weight of {name} must be over 0, and at most {MAX_LENGTH}")
    return weights


def parse_tenants(text: str) -> dict[str, float]:
    return parse_mix(text) if text else {}


def parse_qos(text: str) -> dict[str, float]:
    weights = parse_mix(text)
    if unknown := sorted(weights.keys() - PRIORITIES.keys()):
        raise OptionError(f"{text!r}: {unknown[0]} is no QoS class: they are {', '.join(PRIORITIES)}")
    return weights


@lru_cache(maxsize=4)
def read_prompts(path: str) -> tuple[str, ...]:
    """Return non-empty lines; none without a path."""
    if not path:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"prompt file {path!r} cannot be read: {error}") from None
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise OptionError(f"prompt file {path!r} holds no prompt: it must have one on a line")
    return prompts


def add_arguments(parser: Any) -> None:
    """Add options to the parser itself: locust's web page omits grouped options."""
    parser.add_argument("--grpc-url", default="127.0.0.1:8001", metavar="HOST:PORT", help="the server's gRPC address")
    parser.add_argument("--model", default="demo", metavar="NAME", help="the model that streams (default: demo)")
    parser.add_argument("--infer-model", default="", metavar="NAME", help="the one for /infer (default: MODEL_infer)")
    text = "prompts, one on a line, drawn at random (default: random words)"
    check = _checked(read_prompts)
    parser.add_argument("--prompt-file", type=check, default="", metavar="FILE", help=text, include_in_web_ui=False)
    for name, kind, default, parse, text in (
        ("--prompt-words", "LOW-HIGH", "8-64", parse_counts, "words of a random prompt"),
        ("--output-tokens", "LOW-HIGH", "16-64", parse_counts, "max_tokens of a request"),
        ("--think-time", "LOW-HIGH", "0", parse_range, "seconds between an answer and the next request"),
        ("--qos-mix", "MIX", "normal", parse_qos, "QoS classes with weights, such as high=1,normal=6,low=3"),
        ("--tenants", "MIX", "", parse_tenants, "tenants with weights, such as a=3,b=1"),
    ):
        help_text = f"{text} (default: {default or 'none'})"
        parser.add_argument(name, type=_checked(parse), default=default, metavar=kind, help=help_text)
    parser.add_argument("--stop-at-eos", action="store_true", help="let the model end before max_tokens")
    parser.add_argument("--request-timeout", type=float, default=120.0, metavar="S", help="seconds (default: 120)")
    parser.add_argument("--load-seed", type=int, default=0, metavar="N", help="of all that is drawn (default: 0)")


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """Return a parser that only checks: locust's web page needs text."""

    def check(text: str) -> str:
        parse(text)
        return text

    return check


class LoadRequest(NamedTuple):
    prompt: str
    qos: str
    parameters: dict[str, Any]


class Work:
    """Source of a user's requests, fixed by seed and name. Raise `OptionError`."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        if args.request_timeout <= 0:
            raise OptionError(f"request timeout is {args.request_timeout:g} s: it must be over 0")
        self._prompts = read_prompts(args.prompt_file)
        self._prompt_words = parse_counts(args.prompt_words)
        self._output_tokens = parse_counts(args.output_tokens)
        self._qos_mix = parse_qos(args.qos_mix)
        self._tenants = parse_tenants(args.tenants)
        self._think_time_s = parse_range(args.think_time)
        self._ignore_eos = not args.stop_at_eos
        self._rng = random.Random(f"{args.load_seed} {name}")  # noqa: S311 - draws a load, guards nothing

    def next(self) -> LoadRequest:
        rng = self._rng
        if self._prompts:
            prompt = rng.choice(self._prompts)
        else:
            prompt = " ".join(rng.choices(_WORDS, k=rng.randint(*self._prompt_words)))
        qos = self._draw(self._qos_mix)
        parameters: dict[str, Any] = {
            "max_tokens": rng.randint(*self._output_tokens),
            "ignore_eos": self._ignore_eos,
            "priority": PRIORITIES[qos],
        }
        if self._tenants:
            parameters["tenant"] = self._draw(self._tenants)
        return LoadRequest(prompt, qos, parameters)

    def think_time(self) -> float:
        return self._rng.uniform(*self._think_time_s)

    def _draw(self, mix: dict[str, float]) -> str:
        return self._rng.choices(list(mix), list(mix.values()))[0]


class Timing:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._first: float | None = None
        self._last = self._start
        self._num_tokens = 0
        self.num_bytes = 0  # of text

    def arrived(self, num_tokens: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if num_tokens == 0:
            return
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
        self._num_tokens += num_tokens

    @property
    def elapsed_ms(self) -> float:
        return 1e3 * (self._clock() - self._start)

    @property
    def ttft_ms(self) -> float | None:
        return None if self._first is None else 1e3 * (self._first - self._start)

    @property
    def tpot_ms(self) -> float | None:
        if self._first is None or self._num_tokens < 2:
            return None
        return 1e3 * (self._last - self._first) / (self._num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Reporter:
    event: Any
    kind: str
    model: str

    def report(self, request: LoadRequest, timing: Timing, error: RequestError | None = None) -> None:
        """Add an ended request to locust's statistics; log the first error of each label."""
        name = f"{self.model} {request.qos}"
        label = None if error is None else error.label
        if label is not None and (self.kind, label) not in _logged:
            _logged.add((self.kind, label))
            logger.warning("first %s of %s users: %s", label, self.kind, error)
        self._fire(self.kind, name, timing.elapsed_ms, timing.num_bytes, label)
        if label is None and self.kind != "INFER":
            self._fire("TTFT", f"{self.kind} {name}", timing.ttft_ms)
            self._fire("TPOT", f"{self.kind} {name}", timing.tpot_ms)

    def _fire(self, row: str, name: str, value: float | None, num_bytes: int = 0, label: str | None = None) -> None:
        if value is not None:
            figures = {"response_time": value, "response_length": num_bytes, "exception": label}
            self.event.fire(request_type=row, name=name, context={}, **figures)
