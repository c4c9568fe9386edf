"""Biases of words, as the TensorRT-LLM ensemble takes them, to biases of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidewheel.errors import InvalidRequest
from tidewheel.frontend.coercion import show, to_float, to_text
from tidewheel.frontend.interface import ParameterSource

WORDS, WEIGHTS = "embedding_bias_words", "embedding_bias_weights"


def with_token_biases(
    sources: tuple[ParameterSource, ...], encode: Callable[[str], Iterable[int]]
) -> tuple[ParameterSource, ...]:
    """Replace words and weights by the `logit_bias` of every token of each word. Raise `InvalidRequest`."""
    if not any(name in source.values for source in sources for name in (WORDS, WEIGHTS)):
        return sources
    replaced: list[ParameterSource] = []
    for source in sources:
        others = {name: value for name, value in source.values.items() if name not in (WORDS, WEIGHTS)}
        replaced.append(ParameterSource(origin=source.origin, values=others))
        if len(others) < len(source.values):
            bias = _token_biases(_items(source, WORDS), _items(source, WEIGHTS), encode)
            replaced.append(ParameterSource(origin=WORDS, values={"logit_bias": bias}))
    return tuple(replaced)


def _items(source: ParameterSource, name: str) -> list[object]:
    value = source.values.get(name)
    if not isinstance(value, list | None):
        raise InvalidRequest(f"{name} is {show(value)}: it must be a list")
    return value or []


def _token_biases(
    words: list[object], weights: list[object], encode: Callable[[str], Iterable[int]]
) -> dict[int, float]:
    if len(words) != len(weights):
        raise InvalidRequest(f"{WORDS} has {len(words)} entries and {WEIGHTS} {len(weights)}: give one weight a word")
    bias: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        for token_id in map(int, encode(to_text(WORDS, word))):
            bias[token_id] = bias.get(token_id, 0.0) + to_float(WEIGHTS, weight)
    return bias
