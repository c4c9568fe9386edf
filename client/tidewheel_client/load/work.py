from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tidewheel_client.load.options import PRIORITIES, LoadOptions

_WORDS = (
    "answer", "block", "branch", "bridge", "cache", "cloud", "copper", "corner", "device", "engine", "field",
    "garden", "harbour", "index", "island", "kernel", "letter", "level", "machine", "market", "memory", "method",
    "number", "object", "paper", "pattern", "query", "question", "queue", "record", "river", "signal", "silver",
    "station", "stone", "summer", "table", "thread", "token", "window", "winter",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
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

    def next(self) -> Ask:
        options, rng = self._options, self._rng
        return Ask(
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
