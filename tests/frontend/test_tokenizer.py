"""Loading tokenizers from folders, good and bad, and what they say of a model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders

from support.engine.fake_engine import write_model_folder
from support.frontend.tokenizers_on_the_spot import BACKENDS, NAMED, byte_level_bpe, make_tokenizer
from support.models.odd_files import ODD_FILES, put_odd_file
from tidewheel.errors import ConfigError, InternalError
from tidewheel.frontend.request_reader import phrase_ids
from tidewheel.frontend.settings import GenerationDefaults
from tidewheel.frontend.tokenizer import Tokenizer


def test_load(tmp_path: Path) -> None:
    vocab_size = write_model_folder(tmp_path)
    tokenizer = Tokenizer.load(tmp_path, vocab_size=vocab_size)
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.named_tokens == NAMED
    ids = tokenizer.encode("the quick fox")
    assert ids.dtype == "int32"
    assert tokenizer.decode(ids.tolist()) == "the quick fox"


def test_named_tokens_written_as_objects(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<unk>"}))
    tokenizer = Tokenizer.load(tmp_path, vocab_size=1000)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_post_processor_says_what_is_added() -> None:
    tokenizer = make_tokenizer("byte-fallback BPE")
    bos = 1
    assert tokenizer.encode("the fox").tolist()[0] == bos
    assert bos not in tokenizer.encode("the fox", add_special_tokens=False).tolist()


def test_truncation_and_padding_left_in_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level_bpe()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "a rather long text that has more than four tokens"
    tokenizer = Tokenizer.load(tmp_path, vocab_size=1000)
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    assert 4 < len(ids) < 64


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_file_is_refused_instead_of_read(tmp_path: Path, name: str, kind: str) -> None:
    write_model_folder(tmp_path)
    (tmp_path / name).touch()
    put_odd_file(tmp_path / name, kind)
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        Tokenizer.load(tmp_path, vocab_size=1000)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: set tokenizer"):
        Tokenizer.load(tmp_path, vocab_size=10)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": 3}', b"\xff\xfe", b'{"version": "1.0", "model": '])
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path, vocab_size=10)
    assert "\n" not in str(caught.value)


def test_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    vocab_size = write_model_folder(tmp_path)
    with pytest.raises(ConfigError, match=f"has {vocab_size} tokens and the model 100"):
        Tokenizer.load(tmp_path, vocab_size=100)


def test_tokens_added_beyond_the_model_do_not_stop_the_load(tmp_path: Path) -> None:
    vocab_size = write_model_folder(tmp_path)
    backend = byte_level_bpe()
    backend.add_special_tokens(["<pad>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path, vocab_size=vocab_size).encode("<pad>").tolist() == [vocab_size]


@pytest.mark.parametrize("family", ["byte-fallback BPE", "Unigram"])
def test_the_text_of_one_token_keeps_its_space(family: str) -> None:
    tokenizer = make_tokenizer(family)
    ids = tokenizer.encode("the fox the fox", add_special_tokens=False).tolist()
    assert "".join(map(tokenizer.token_text, ids)) == " the fox the fox"


def test_phrases_at_the_start_and_after_a_space() -> None:
    tokenizer = make_tokenizer()
    encode = partial(tokenizer.encode, add_special_tokens=False)
    spellings = phrase_ids("fox", encode, tokenizer.vocab_size)
    assert {tokenizer.decode(ids) for ids in spellings} == {"fox", " fox"}
    assert phrase_ids(" fox", encode, tokenizer.vocab_size) == spellings
    assert phrase_ids("  ", encode, tokenizer.vocab_size)


@pytest.mark.parametrize("family", BACKENDS)
def test_no_token_stands_for_more_bytes_than_said(family: str) -> None:
    tokenizer = make_tokenizer(family)
    if family != "byte-level BPE":
        assert tokenizer.max_token_bytes is None
        return
    assert tokenizer.max_token_bytes is not None
    for text in ("the quick brown fox " * 50, "🎉日本" * 30, "</s>" * 20, " " * 400, "x"):
        assert len(text.encode()) <= tokenizer.max_token_bytes * len(tokenizer.encode(text))


def test_a_long_added_token_counts() -> None:
    backend = byte_level_bpe()
    backend.add_special_tokens(["<" + "é" * 100 + ">"])
    assert Tokenizer(backend, vocab_size=1000).max_token_bytes == 202


def test_swallowed_whitespace_has_no_bound() -> None:
    backend = byte_level_bpe()
    backend.add_special_tokens([AddedToken("<cut>", rstrip=True)])
    assert Tokenizer(backend, vocab_size=1000).max_token_bytes is None


def test_defaults(tmp_path: Path) -> None:
    generation = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "do_sample": True, "max_length": 20, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [0, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    defaults = GenerationDefaults.load(tmp_path)
    assert defaults.sampling == {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
    assert defaults.eos_token_ids == {0, 2, 7}


def test_where_defaults_come_from(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, generation in (
        (model, {"temperature": 0.7, "eos_token_id": 1}),
        (other, {"top_k": 9, "eos_token_id": 2}),
    ):
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps(generation))
    load = GenerationDefaults.load
    assert load(model, "auto", '{"top_p": 0.5}') == ({"temperature": 0.7, "top_p": 0.5}, frozenset({1}))
    assert load(model, "auto", '{"temperature": 0}').sampling == {"temperature": 0}
    assert load(model, "vllm") == ({}, frozenset({1}))
    assert load(model, "vllm", '{"max_new_tokens": 5}').sampling == {"max_tokens": 5}
    assert load(model, str(other)) == ({"top_k": 9}, frozenset({2}))


@pytest.mark.parametrize(
    ("source", "overrides", "words"),
    [
        ("nowhere", "{}", "generation_config is 'nowhere': give auto, vllm, or a folder"),
        ("auto", '{"top_p": 7}', "override_generation_config: top_p is 7"),
        ("auto", '{"num_beams": 4}', "override_generation_config has 'num_beams': only temperature"),
        ("auto", "[]", "override_generation_config holds a list: it must be a JSON object"),
        ("vllm", "{", "override_generation_config is not JSON"),
    ],
)
def test_wrong_settings_of_defaults(tmp_path: Path, source: str, overrides: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerationDefaults.load(tmp_path, source, overrides)
    assert words in str(caught.value)


def test_no_defaults(tmp_path: Path) -> None:
    assert GenerationDefaults.load(tmp_path) == ({}, frozenset())


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"temperature": -1}', "temperature"),
        ('{"top_k": "many"}', "top_k"),
        ('{"eos_token_id": "x"}', "eos_token_id"),
        ('{"eos_token_id": [true]}', "eos_token_id"),
        ("[]", "object"),
        ("{", "JSON"),
    ],
)
def test_bad_defaults_stop_the_load(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=word) as caught:
        GenerationDefaults.load(tmp_path)
    assert "generation_config.json" in str(caught.value)


def test_a_decoder_that_panics_fails_one_request_alone() -> None:
    """A panic of the library is no `Exception`, so it would end a thread that sends."""
    backend = byte_level_bpe()
    backend.decoder = decoders.Strip("a", 1, 1)
    tokenizer = Tokenizer(backend, vocab_size=1000)
    with pytest.raises(InternalError, match="the model's tokenizer fails at these tokens: slice index"):
        tokenizer.decode(backend.encode("a").ids)
