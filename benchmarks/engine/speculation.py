"""Tokens/s with drafts from prompt lookup, beside the same engine without, by kind of text and by streams.

    python benchmarks speculation FILE.gguf --save        # for example SmolLM2-135M-Instruct, and llama.cpp beside it

One engine in this process takes turns with and without drafts. Answers that repeat their prompt are greedy; answers
that do not are drawn at temperature 1, where nothing of a prompt comes back. Both draw alike, so their answers are
compared as well. An edit of code ends with its block of code, as an editor asks for it; the explanation that the
model would go on with, which repeats little, is a line of its own.
llama.cpp (`pip install xllamacpp`) answers the greedy requests, one at a time, without lookup and with each of its
kinds.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from common.chat_texts import REPEATING, VARIED, ChatText
from common.study import RESULTS, Study, in_turns, show
from modelled.speculation_model import predictions
from quantized.llama_server import LOOKUPS, LlamaSettings, llama_server, version
from tidewheel.bench.charts import COLOURS, GREYS, INK, ChartImage, logarithmic, panels, style
from tidewheel.grammar import Grammar
from tidewheel.llm import LLM, GenerationResult
from tidewheel.sampling import SamplingParams

OFF, ON = "none", "prompt_lookup"
ONE_STREAM, REPEATS, VARIES = PARTS = "one-stream", "repeats", "varies"
CODE, WITH_PROSE = "code edits", "code edits and their explanation"
GOALS = {REPEATS: 1.5, VARIES: 0.97}  # of the rate without drafts, at one stream and at any number
ROUND_S = 10.0  # of a mode in a round, about: a busy machine's pauses take tenths of a second
LIMIT_S = 300.0


class Run(NamedTuple):
    num_tokens: int
    seconds: float
    answers: list[list[int]]

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds

    @classmethod
    def joined(cls, runs: Sequence[Run]) -> Run:
        num_tokens, seconds, answers = zip(*runs, strict=True)
        return cls(sum(num_tokens), sum(seconds), list(itertools.chain.from_iterable(answers)))


class TimedSearch:
    """`Speculation` whose calls are timed: looks for drafts, choices among them, and what they are learned from."""

    def __init__(self, speculation: Any) -> None:
        self._speculation = speculation
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._speculation, name)
        return functools.partial(self._call, value) if callable(value) else value

    def _call(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = method(*args, **named)
        self.seconds += time.perf_counter() - began
        return result


class Mode:
    """An engine with or without drafts. One engine is both: two differ by where in memory their weights lie."""

    def __init__(self, engine: LLM, *, drafts: bool) -> None:
        self._engine = engine
        self._state = engine._open_core().scheduler._state
        self.search = TimedSearch(self._state.speculation)
        self._speculation: Any = self.search if drafts else None

    def generate(self, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[GenerationResult]:
        self._state.speculation = self._speculation
        return self._engine.generate(prompts, params, use_tqdm=False)


class Figures(NamedTuple):
    """What a mode did in all rounds."""

    rate: float  # tokens/s, median
    samples: list[float]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Figures:
        rates = [run.rate for run in runs]
        return cls(statistics.median(rates), rates)


def sampling(text: ChatText, seed: int, num_tokens: int, *, varies: bool) -> SamplingParams:
    grammar = None if text.schema is None else Grammar.json_schema(text.schema)
    stop = [] if text.stop is None else [text.stop]
    return SamplingParams(max_tokens=num_tokens, temperature=float(varies), seed=seed, grammar=grammar, stop=stop)


def one_by_one(engine: Mode, texts: Sequence[ChatText], num_tokens: int) -> Callable[[], Run]:
    """Return a run of all texts, one at a time."""

    def run() -> Run:
        began, answers = time.perf_counter(), []
        for text in texts:
            answers += engine.generate([text.prompt], [sampling(text, 0, num_tokens, varies=False)])
        return _run(answers, began)

    return run


def at_once(
    engine: Mode, texts: Sequence[ChatText], streams: int, num_tokens: int, *, varies: bool
) -> Callable[[], Run]:
    """Return a run of so many streams, which goes on in the texts and seeds where the last one ended."""
    numbers = itertools.count()

    def run() -> Run:
        first = streams * next(numbers)
        chosen = [texts[(first + index) % len(texts)] for index in range(streams)]
        params = [sampling(text, first + index, num_tokens, varies=varies) for index, text in enumerate(chosen)]
        began = time.perf_counter()
        return _run(engine.generate([text.prompt for text in chosen], params), began)

    return run


def _run(results: Sequence[Any], began: float) -> Run:
    answers = [result.token_ids for result in results]
    return Run(sum(map(len, answers)), time.perf_counter() - began, answers)


def compare(
    make: Callable[[Mode], Callable[[], Run]], modes: Mapping[str, Mode], rounds: int, engine: LLM
) -> dict[str, Any]:
    """Run both modes in turns. Return rates, the median of ratios, drafts, the search's share and equal answers.

    The ratios are of rounds, in each of which the slower mode runs for about `ROUND_S`. A neighbour's work moves them
    by more than the search does where no drafts are tested: its share of the time with drafts says what it costs.
    """
    of_modes = {name: make(mode) for name, mode in modes.items()}
    turns = math.ceil(ROUND_S / max(run().seconds for run in of_modes.values()))
    before, searched_before = engine.stats(), modes[ON].search.seconds
    of_turns = in_turns(of_modes, rounds * turns, warm_up=0)
    after, searched = engine.stats(), modes[ON].search.seconds - searched_before
    runs = {
        name: [Run.joined(of_mode[first : first + turns]) for first in range(0, len(of_mode), turns)]
        for name, of_mode in of_turns.items()
    }
    ratios = [ours.rate / base.rate for ours, base in zip(runs[ON], runs[OFF], strict=True)]
    pairs = [
        pair
        for both in zip(runs[ON], runs[OFF], strict=True)
        for pair in zip(*(run.answers for run in both), strict=True)
    ]
    drafts = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
    return {
        "tokens/s": round(Figures.of(runs[ON]).rate, 1),
        "without": round(Figures.of(runs[OFF]).rate, 1),
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "accepted": f"{accepted / drafts:.0%} of {drafts}" if drafts else "no drafts",
        "search": f"{searched / sum(run.seconds for run in runs[ON]):.1%}",  # of the time with drafts
        "equal answers": f"{sum(ours == base for ours, base in pairs)} of {len(pairs)}",
        "samples": [round(ratio, 3) for ratio in ratios],
    }


def beside_llama(model: Path, threads: int, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return the rates of llama.cpp with each kind of lookup, and without."""
    lines = []
    with ExitStack() as stack:
        servers = {}
        for lookup in ("", *LOOKUPS):
            with suppress(RuntimeError):
                settings = LlamaSettings(threads, 1, context=1024, lookup=lookup)
                servers[lookup] = stack.enter_context(llama_server(None, model, settings)).address
        for kind, texts in REPEATING.items():
            asks = {lookup: _asked(address, texts, num_tokens) for lookup, address in servers.items()}
            runs = in_turns(asks, rounds)
            base = Figures.of(runs[""]).rate
            for lookup, of_lookup in runs.items():
                rate = Figures.of(of_lookup).rate
                ratio = round(rate / base, 3)
                lines.append({"text": kind, "lookup": lookup or "none", "tokens/s": round(rate, 1), "ratio": ratio})
    return lines


def _asked(address: str, texts: Sequence[ChatText], num_tokens: int) -> Callable[[], Run]:
    def run() -> Run:
        began, count = time.perf_counter(), 0
        for text in texts:
            body = {"prompt": text.prompt, "n_predict": num_tokens, "temperature": 0, "cache_prompt": False}
            if text.schema is not None:
                body["json_schema"] = text.schema
            if text.stop is not None:
                body["stop"] = [text.stop]
            answer = httpx2.post(f"http://{address}/completion", json=body, timeout=LIMIT_S)
            count += int(json.loads(answer.content)["tokens_predicted"])
        return Run(count, time.perf_counter() - began, [])

    return run


def picture(record: Mapping[str, Any]) -> ChartImage:
    """Draw a record of this study: the rate with drafts over that without, by streams."""
    figure, (axes,) = panels(1, height=2.8)
    for (name, lines), colour in zip(record["by_streams"].items(), (COLOURS[0], GREYS[1]), strict=True):
        axes.plot(
            [line["streams"] for line in lines], [line["ratio"] for line in lines], "o-", color=colour, label=name
        )
    axes.axhline(1.0, color=INK, linewidth=0.9, linestyle=":")
    logarithmic(axes, "x")
    style(axes, "Tokens/s with prompt lookup, over those without", "by number of streams; dotted: no drafts")
    axes.legend()
    return ChartImage("speculation", "", figure)


def by_streams(
    modes: Mapping[str, Mode], engine: LLM, options: argparse.Namespace
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    greedy = tuple(itertools.chain.from_iterable(zip(*REPEATING.values(), strict=True)))
    for name, texts, varies in ((REPEATS, greedy, False), (VARIES, VARIED, True)):
        lines = []
        for streams in options.streams if name in options.parts else ():
            make = lambda mode, n=streams, t=texts, v=varies: at_once(mode, t, n, options.tokens, varies=v)  # noqa: E731
            lines.append({"text": name, "streams": streams, **compare(make, modes, options.rounds, engine)})
            show([lines[-1]])
        yield name, lines


def main() -> None:
    study = Study("speculation", __doc__, "torch", "numpy", "llguidance")
    study.add_argument("model", type=Path, help="a GGUF file or a folder")
    study.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    study.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="to run alone, such as one that was disturbed"
    )
    study.add_argument("--rounds", type=int, default=7)
    study.add_argument("--llama-rounds", type=int, default=3)
    study.add_argument("--tokens", type=int, default=128, help="most of an answer")
    study.add_argument("--drafts", type=int, default=8, help="num_speculative_tokens")
    study.add_argument("--threads", type=int, default=2)
    study.add_argument("--no-llama", action="store_true", help="without llama.cpp")
    options = study.begin()
    if options.save and set(options.parts) != set(PARTS):
        study.error(f"--parts {' '.join(options.parts)}: a record has all parts; run these without --save")
    settings: dict[str, Any] = {
        "dtype": "auto" if options.model.suffix else "bfloat16", "max_model_len": 1024,
        "num_threads": options.threads,
        "max_num_seqs": max(options.streams), "enable_prefix_caching": False, "num_blocks": 64 * max(options.streams),
    }  # fmt: skip
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        engine = stack.enter_context(
            LLM(str(options.model), **settings, speculation=ON, num_speculative_tokens=options.drafts)
        )
        modes = {OFF: Mode(engine, drafts=False), ON: Mode(engine, drafts=True)}
        lines = []
        with_prose = tuple(text._replace(stop=None) for text in REPEATING[CODE])
        kinds = {**REPEATING, WITH_PROSE: with_prose} if ONE_STREAM in options.parts else {}
        for kind, texts in kinds.items():
            make = lambda mode, t=texts: one_by_one(mode, t, options.tokens)  # noqa: E731
            goal = "none" if kind == WITH_PROSE else GOALS[REPEATS]
            lines.append({"text": kind, **compare(make, modes, options.rounds, engine), "goal": goal})
            show([lines[-1]])
        result["one_stream"] = lines
        result["by_streams"] = dict(by_streams(modes, engine, options))
    if ONE_STREAM in options.parts and not options.no_llama and options.model.suffix == ".gguf":
        result["llama.cpp"] = {
            "version": version(None),
            "lines": beside_llama(options.model, options.threads, options.tokens, options.llama_rounds),
        }
        show(result["llama.cpp"]["lines"])
    result["step_model"] = list(predictions())
    show(result["step_model"])
    study.save({"goals": GOALS, **result})
    if options.save:
        (RESULTS / "speculation.webp").write_bytes(picture(result).webp())


if __name__ == "__main__":
    main()
