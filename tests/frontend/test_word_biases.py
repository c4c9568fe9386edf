from __future__ import annotations

from typing import Any

import pytest

from tidewheel.errors import InvalidRequest
from tidewheel.frontend.coercion import ParameterSource
from tidewheel.frontend.request_parameters import parse_parameters, with_token_biases


def encode(word: str) -> list[int]:
    return [ord(letter) for letter in word]


def expand(**values: Any) -> tuple[ParameterSource, ...]:
    return with_token_biases((ParameterSource(origin="input tensor", values=values),), encode)


def test_every_token_of_a_word_gets_its_weight() -> None:
    sources = expand(embedding_bias_words=["ab", "b", ""], embedding_bias_weights=[1.5, "2", 9], top_k=3)
    sampling = parse_parameters(sources).sampling
    assert sampling.logit_bias == {97: 1.5, 98: 3.5}
    assert sampling.top_k == 3


def test_nothing_is_done_without_words() -> None:
    sources = (ParameterSource(origin="input tensor", values={"top_k": 3}),)
    assert with_token_biases(sources, encode) == sources


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"embedding_bias_words": ["a"]}, "embedding_bias_words has 1 entries and embedding_bias_weights 0"),
        ({"embedding_bias_weights": [1.0, 2.0]}, "embedding_bias_words has 0 entries and embedding_bias_weights 2"),
        ({"embedding_bias_words": "a", "embedding_bias_weights": [1]}, "embedding_bias_words is 'a': .* a list"),
        ({"embedding_bias_words": ["a"], "embedding_bias_weights": ["x"]}, "embedding_bias_weights is 'x'"),
    ],
)
def test_what_does_not_match_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        expand(**values)


def test_a_bias_of_tokens_beside_contradicts() -> None:
    sources = expand(embedding_bias_words=["a"], embedding_bias_weights=[1], logit_bias={"5": 1.0})
    with pytest.raises(InvalidRequest, match=r"logit_bias in input tensor.*embedding_bias_words"):
        parse_parameters(sources)


def test_a_bias_out_of_range_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias\[97\] is 200"):
        parse_parameters(expand(embedding_bias_words=["a"], embedding_bias_weights=[200]))
