"""Tokenizers made of GGUF metadata give the ids and the texts of the tokenizers that the metadata came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import tokenizers
from gguf.constants import TokenType

from support.frontend.tokenizers_on_the_spot import SPECIAL, TEXT, byte_fallback_bpe, byte_level_bpe
from support.models.gguf_files import byte_vocabulary, vocabulary_of
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.gguf_folder import tokenizer_files

TEXTS = [
    *TEXT[:4],
    "",
    " ",
    "a</s>b <s> c",
    "tab\tand\r\nnew  lines\n\n\n end ",
    "ünïcödé 👩‍👩‍👧 \u0301",
    "<0x41>",
    "1234567 it's IT'S",
]


def made(metadata: Mapping[str, object]) -> dict[str, Any]:
    return tokenizer_files(ConfigFields(metadata, "a.gguf"))


def backend_of(metadata: Mapping[str, object]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(made(metadata)["tokenizer.json"]))


def test_byte_level() -> None:
    expected = byte_level_bpe()
    found = backend_of(vocabulary_of(expected, "gpt2", SPECIAL, **{"tokenizer.ggml.pre": "gpt-2"}))
    for text in TEXTS:
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_sentencepiece(adds_bos: bool) -> None:
    expected = byte_fallback_bpe()
    metadata = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": adds_bos}
    found = backend_of(vocabulary_of(expected, "llama", SPECIAL, **metadata))
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=adds_bos).ids
        assert found.encode(text).ids == ids
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)


def test_sentencepiece_without_a_leading_space() -> None:
    metadata = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    found = backend_of(vocabulary_of(byte_fallback_bpe(), "llama", SPECIAL, **metadata))
    ids = found.encode("dog").ids
    assert not found.id_to_token(ids[0]).startswith("▁")
    assert found.decode(ids) == "dog"


SPLITS = {
    "gpt-2": ["it", "'s", " 1234", "ABc", " dE", "\u00a0", "?!", "\n", "\n", "x"],
    "smollm": ["it", "'s", " ", "1", "2", "3", "4", "ABc", " dE", "\u00a0", "?!", "\n", "\n", "x"],
    "default": ["it", "'", "s", " ", "123", "4", "ABc", " dE", "\u00a0", "?!", "\n", "\n", "x"],
    "llama-bpe": ["it", "'s", " ", "123", "4", "ABc", " dE", "\u00a0", "?!\n\n", "x"],
    "qwen2": ["it", "'s", " ", "1", "2", "3", "4", "ABc", " dE", "\u00a0", "?!\n\n", "x"],
    "tekken": ["it", "'s", " ", "1", "2", "3", "4", "ABc", " d", "E", "\u00a0", "?!\n\n", "x"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_words_of_a_pre_tokenizer(pre: str) -> None:
    backend = backend_of({**byte_vocabulary(300), "tokenizer.ggml.pre": pre})
    text = "it's 1234ABc dE\u00a0?!\n\nx"
    words = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in words] == SPLITS[pre]


@pytest.mark.parametrize(("pre", "num_added"), [("llama-bpe", 1), ("tekken", 1), ("qwen2", 0), ("gpt-2", 0)])
def test_the_first_token_is_added_as_the_family_does(pre: str, num_added: int) -> None:
    backend = backend_of({**byte_vocabulary(300), "tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 256})
    assert backend.encode("z").ids[:-1] == [256] * num_added


def test_a_last_token_is_added_where_the_file_says_so() -> None:
    backend = backend_of({**byte_vocabulary(300), "tokenizer.ggml.add_eos_token": True})
    ids = backend.encode("he").ids
    assert ids == [257, 256]
    assert backend.encode("he", add_special_tokens=False).ids == [257]


def test_a_token_of_a_million_characters_has_no_merges() -> None:
    tokens = ["<unk>", "a", "aa", "a" * (1 << 20)]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    assert made(metadata)["tokenizer.json"]["model"]["merges"] == [["a", "a"]]


def test_kinds_of_tokens() -> None:
    metadata: dict[str, Any] = byte_vocabulary(262)
    metadata["tokenizer.ggml.tokens"][258:262] = ["<|endoftext|>", "<tool>", "<|eot|>", "[PAD]"]
    metadata["tokenizer.ggml.token_type"][258:262] = [
        TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.NORMAL, TokenType.UNUSED
    ]  # fmt: skip
    metadata["tokenizer.ggml.eot_token_id"] = 260
    files = made(metadata)
    backend = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    assert backend.encode("he<tool>he<|eot|><|endoftext|>").ids == [257, 259, 257, 260, 258]
    assert backend.decode([257, 259, 260, 258, 256]) == "he<tool>"
    assert 261 not in backend.encode("[PAD]").ids
    assert files["generation_config.json"]["eos_token_id"] == [256, 258, 260]
