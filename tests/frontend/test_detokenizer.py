"""Streamed text is what the whole sequence decodes to, whatever the tokenizer and however the tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.frontend.tokenizers_on_the_spot import BACKENDS, TEXT, make_tokenizer
from tidewheel.frontend.tokenizer import Detokenizer, Tokenizer

get_tokenizer = cache(make_tokenizer)
families = pytest.mark.parametrize("family", BACKENDS)
chunk_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=8)
texts = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("aä日🎉 \n\u200d�'.")), min_size=1, max_size=60
)


def stream(detokenizer: Detokenizer, token_ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Pushes tokens in chunks of the given sizes, over and over."""
    pieces, begin, turn = [], 0, 0
    while begin < len(token_ids):
        end = begin + sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(token_ids[begin:end]))
        begin, turn = end, turn + 1
    return [*pieces, detokenizer.flush()]


def whole(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip: bool = True) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=skip)


@families
@settings(max_examples=150, deadline=None)
@given(text=texts, sizes=chunk_sizes)
@example(text="00\x8000\x8000\x8000\x80" + "𐀀" * 20, sizes=[4])  # no chunk ends where a character does
def test_text_comes_back_whole(family: str, text: str, sizes: list[int]) -> None:
    tokenizer = get_tokenizer(family)
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert "".join(stream(Detokenizer(tokenizer), ids, sizes)) == whole(tokenizer, ids)


@families
@settings(max_examples=150, deadline=None)
@given(text=texts, prompt=st.sampled_from(TEXT), cut=st.integers(0, 40), sizes=chunk_sizes)
def test_output_continues_the_prompt(family: str, text: str, prompt: str, cut: int, sizes: list[int]) -> None:
    tokenizer = get_tokenizer(family)
    prompt_ids = tokenizer.encode(prompt[: len(prompt) - cut]).tolist()
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    streamed = "".join(stream(Detokenizer(tokenizer, prompt_ids), ids, sizes))
    assert whole(tokenizer, prompt_ids) + streamed == whole(tokenizer, prompt_ids + ids)


@pytest.mark.parametrize("family", ["byte-level BPE", "WordPiece", "Unigram"])
@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=chunk_sizes, skip=st.booleans())
def test_any_tokens(family: str, data: st.DataObject, sizes: list[int], skip: bool) -> None:
    tokenizer = get_tokenizer(family)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=120))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join(stream(detokenizer, ids, sizes)) == whole(tokenizer, ids, skip=skip)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), sizes=chunk_sizes)
def test_any_tokens_with_byte_fallback(data: st.DataObject, sizes: list[int]) -> None:
    """Exact wherever the bytes are characters; where they are not, no good character is lost."""
    tokenizer = get_tokenizer("byte-fallback BPE")
    ids = data.draw(st.lists(st.integers(3, tokenizer.vocab_size - 1), max_size=120))
    streamed, full = "".join(stream(Detokenizer(tokenizer), ids, sizes)), whole(tokenizer, ids)
    if "�" not in full:
        assert streamed == full
    words = full.replace("�", "")
    assert len(streamed.replace("�", "")) >= len(words)


@families
def test_nothing_broken_is_ever_sent(family: str) -> None:
    """One token at a time: no piece ends in half a character, and every piece is the next part of the text."""
    tokenizer = get_tokenizer(family)
    text = "ab 🎉 日本語 cd"
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    pieces = stream(Detokenizer(tokenizer), ids, [1])
    assert not any("�" in piece for piece in pieces)
    assert pieces[-1] == ""  # nothing was left to flush


def test_half_a_character_at_the_end_is_flushed() -> None:
    tokenizer = get_tokenizer("byte-level BPE")
    ids = tokenizer.encode("x🎉", add_special_tokens=False).tolist()[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "x"
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


def test_emoji_after_emoji_in_bytes() -> None:
    """Each is four byte tokens: the window may not begin in the middle of one."""
    tokenizer = get_tokenizer("byte-fallback BPE")
    text = "🎃🎄🎅" * 20
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert sum(len(tokenizer.token_text(i).encode()) for i in ids) >= 4 * len(text)
    pieces = stream(Detokenizer(tokenizer, ids[:13]), ids[13:], [1])
    assert "".join(pieces).endswith("🎅🎃🎄🎅")
    assert "".join(stream(Detokenizer(tokenizer, ids), ids[1:], [1])) == text


@pytest.mark.parametrize("unit", [b"\xff", b"\xf0\x9f\x98", b"a\xc3", b"\x80\x80\xe6"], ids=repr)
@pytest.mark.parametrize("tail", ["é", "😀", "x"])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_garbage_is_held_only_so_long(unit: bytes, tail: str, size: int) -> None:
    """Bytes that never become a character come out before the end, and a real character after them whole."""
    tokenizer = get_tokenizer("byte-level BPE")
    ids = byte_tokens(tokenizer, unit * 100 + tail.encode())
    detokenizer = Detokenizer(tokenizer)
    *pieces, rest = stream(detokenizer, ids, [size])
    assert "".join(pieces) + rest == whole(tokenizer, ids)
    assert len(rest) <= 40
    assert len(detokenizer._ids) < 100


@pytest.mark.parametrize("num_stray", range(28, 40))
def test_a_character_behind_garbage_is_whole(num_stray: int) -> None:
    """Also where the garbage is given up in the middle of it."""
    tokenizer = get_tokenizer("byte-level BPE")
    ids = byte_tokens(tokenizer, b"\xff" * num_stray + "é😀".encode())
    assert "".join(stream(Detokenizer(tokenizer), ids, [1])) == "�" * num_stray + "é😀"


def byte_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte. Byte-level vocabularies spell each byte by one printable character (as GPT-2 does)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [tokenizer.backend.token_to_id(chars[byte]) for byte in data]


def test_a_flood_of_special_tokens_costs_nothing() -> None:
    tokenizer = get_tokenizer("byte-level BPE")
    detokenizer = Detokenizer(tokenizer)
    before = detokenizer.push(tokenizer.encode("Hello").tolist())
    assert detokenizer.push([2] * 10_000) == ""
    assert len(detokenizer._ids) < 10
    assert before + detokenizer.flush() == "Hello"


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = get_tokenizer("byte-level BPE")
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([2]) == "</s>"
    assert Detokenizer(tokenizer).push([2]) == ""
