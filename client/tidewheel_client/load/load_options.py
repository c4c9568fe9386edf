from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

PRIORITIES = {"critical": 1, "high": 2, "normal": 3, "low": 4}  # `priority` by QoS class
MAX_LENGTH = 1_000_000


class OptionError(ValueError):
    """Bad option, in one line."""


@dataclass(frozen=True, slots=True)
class Range:
    """Uniform range, both ends included."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Range:
        """Parse `5` or `1-5`."""
        low, dash, high = text.partition("-")
        try:
            found = cls(float(low), float(high if dash else low))
        except ValueError:
            raise OptionError(f"{text!r} is no range: write LOW-HIGH, or one number") from None
        if not 0 <= found.low <= found.high <= MAX_LENGTH:
            raise OptionError(f"{text!r} is no range: 0 <= LOW <= HIGH <= {MAX_LENGTH} must hold")
        return found

    @classmethod
    def parse_count(cls, text: str) -> Range:
        found = cls.parse(text)
        if found.low < 1 or not (found.low.is_integer() and found.high.is_integer()):
            raise OptionError(f"{text!r} is no range of counts: write whole numbers from 1")
        return found

    def draw(self, rng: random.Random) -> float:
        return rng.uniform(self.low, self.high)

    def draw_count(self, rng: random.Random) -> int:
        return rng.randint(int(self.low), int(self.high))


@dataclass(frozen=True, slots=True)
class Mix:
    weights: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Mix:
        """Parse `name` or `name=weight`, separated by commas; the default is 1."""
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
                raise OptionError(
                    f"{text!r} is no mix: the weight of {name} must be over 0, and at most {MAX_LENGTH}"
                )
        return cls(weights)

    @classmethod
    def parse_qos(cls, text: str) -> Mix:
        found = cls.parse(text)
        unknown = sorted(found.weights.keys() - PRIORITIES.keys())
        if unknown:
            raise OptionError(f"{text!r}: {unknown[0]} is no QoS class: they are {', '.join(PRIORITIES)}")
        return found

    def draw(self, rng: random.Random) -> str:
        return rng.choices(list(self.weights), list(self.weights.values()))[0]


@lru_cache(maxsize=4)
def read_prompts(path: str) -> tuple[str, ...]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"prompt file {path!r} cannot be read: {error}") from None
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        raise OptionError(f"prompt file {path!r} holds no prompt: it must have one on a line")
    return prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    grpc_url: str
    model: str
    infer_model: str
    prompts: tuple[str, ...]  # empty: random words
    prompt_words: Range
    output_tokens: Range
    stop_at_eos: bool
    qos_mix: Mix
    tenants: Mix | None
    think_time_s: Range
    request_timeout_s: float
    seed: int

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> LoadOptions:
        """Raise `OptionError`."""
        if args.request_timeout <= 0:
            raise OptionError(f"request timeout is {args.request_timeout:g} s: it must be over 0")
        return cls(
            grpc_url=args.grpc_url,
            model=args.model,
            infer_model=args.infer_model or f"{args.model}_infer",
            prompts=read_prompts(args.prompt_file) if args.prompt_file else (),
            prompt_words=Range.parse_count(args.prompt_words),
            output_tokens=Range.parse_count(args.output_tokens),
            stop_at_eos=args.stop_at_eos,
            qos_mix=Mix.parse_qos(args.qos_mix),
            tenants=Mix.parse(args.tenants) if args.tenants else None,
            think_time_s=Range.parse(args.think_time),
            request_timeout_s=args.request_timeout,
            seed=args.load_seed,
        )


def add_arguments(parser: Any) -> None:
    """Add options to the parser itself: locust's web page omits grouped options."""
    parser.add_argument("--grpc-url", default="127.0.0.1:8001", metavar="HOST:PORT", help="the server's gRPC address")
    parser.add_argument("--model", default="demo", metavar="NAME", help="the model that streams (default: demo)")
    parser.add_argument("--infer-model", default="", metavar="NAME", help="the one for /infer (default: MODEL_infer)")
    parser.add_argument(
        "--prompt-file",
        type=_checked(_unless_empty(read_prompts)),
        default="",
        metavar="FILE",
        help="prompts, one on a line, drawn at random (default: random words)",
        include_in_web_ui=False,
    )
    for name, kind, default, check, text in (
        ("--prompt-words", "LOW-HIGH", "8-64", Range.parse_count, "words of a random prompt"),
        ("--output-tokens", "LOW-HIGH", "16-64", Range.parse_count, "max_tokens of a request"),
        ("--think-time", "LOW-HIGH", "0", Range.parse, "seconds between an answer and the next request"),
        ("--qos-mix", "MIX", "normal", Mix.parse_qos, "QoS classes with weights, such as high=1,normal=6,low=3"),
        ("--tenants", "MIX", "", _unless_empty(Mix.parse), "tenants with weights, such as a=3,b=1"),
    ):
        help_text = f"{text} (default: {default or 'none'})"
        parser.add_argument(name, type=_checked(check), default=default, metavar=kind, help=help_text)
    parser.add_argument("--stop-at-eos", action="store_true", help="let the model end before max_tokens")
    parser.add_argument("--request-timeout", type=float, default=120.0, metavar="S", help="seconds (default: 120)")
    parser.add_argument("--load-seed", type=int, default=0, metavar="N", help="of all that is drawn (default: 0)")


def _unless_empty(parse: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: parse(text) if text else None


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    def check(text: str) -> str:
        try:
            parse(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


_WORDS = (
    "answer", "block", "branch", "bridge", "cache", "cloud", "copper", "corner", "device", "engine", "field",
    "garden", "harbour", "index", "island", "kernel", "letter", "level", "machine", "market", "memory", "method",
    "number", "object", "paper", "pattern", "query", "question", "queue", "record", "river", "signal", "silver",
    "station", "stone", "summer", "table", "thread", "token", "window", "winter",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    prompt: str
    qos: str
    max_tokens: int
    ignore_eos: bool
    tenant: str | None

    @property
    def parameters(self) -> dict[str, Any]:
        named = {} if self.tenant is None else {"tenant": self.tenant}
        return {
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "priority": PRIORITIES[self.qos],
            **named,
        }


class Work:
    """Requests of one user, equal for equal seed and name."""

    def __init__(self, options: LoadOptions, name: str) -> None:
        self._options = options
        self._rng = random.Random(f"{options.seed} {name}")  # noqa: S311 - draws a load, guards nothing

    def next(self) -> LoadRequest:
        options, rng = self._options, self._rng
        return LoadRequest(
            prompt=rng.choice(options.prompts) if options.prompts else self._words(),
            qos=options.qos_mix.draw(rng),
            max_tokens=options.output_tokens.draw_count(rng),
            ignore_eos=not options.stop_at_eos,
            tenant=None if options.tenants is None else options.tenants.draw(rng),
        )

    def think_time(self) -> float:
        return self._options.think_time_s.draw(self._rng)

    def _words(self) -> str:
        return " ".join(self._rng.choices(_WORDS, k=self._options.prompt_words.draw_count(self._rng)))
