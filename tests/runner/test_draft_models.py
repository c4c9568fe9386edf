"""Draft models: what has the tokens of the model that they draft for, and each defect in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.model_folder import resolve_folder
from tidewheel.runner.drafter import check_tokens, find_draft

VOCAB = {"a": 0, "b": 1, "ab": 2}
MORE = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
END = {"id": 3, "content": "<end>", **MORE}


def write(folder: Path, vocab: Any = VOCAB, added: Any = (END,), vocab_size: int = 4) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    kind = {"type": "WordLevel", "unk_token": "a"} if isinstance(vocab, dict) else {"type": "Unigram", "unk_id": 0}
    tokenizer = {"version": "1.0", "model": {**kind, "vocab": vocab}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def test_models_with_the_same_tokens(tmp_path: Path, model: Path) -> None:
    check_tokens(model, model, 4)
    check_tokens(write(tmp_path / "reordered", dict(reversed(VOCAB.items()))), model, 4)
    check_tokens(write(tmp_path / "scores", [["a", 0.0], ["b", -1.5], ["ab", -2]]), model, 4)


def test_a_family_may_pad_its_vocabulary(tmp_path: Path, model: Path) -> None:
    """Ids from the draft's vocabulary size on are never drafted."""
    check_tokens(model, model, 8)
    check_tokens(write(tmp_path / "cut", added=[{**END, "content": "<other>"}], vocab_size=3), model, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 5}, "of vocab_size 5; the model has 4"),
        ({"vocab": {"b": 0, "a": 1, "ab": 2}}, "'b' is 0; it is 1 in the model's"),
        ({"added": [{**END, "content": "<stop>"}]}, "'<stop>' is 3; it is not in the model's"),
        ({"vocab": {**VOCAB, "x" * 999: 3}, "added": []}, "x' is 3; it is not in the model's"),
    ],
)
def test_other_vocabularies(tmp_path: Path, model: Path, change: dict[str, Any], words: str) -> None:
    draft = write(tmp_path / "draft", **change)
    with pytest.raises(ConfigError) as caught:
        check_tokens(draft, model, 4)
    message = str(caught.value)
    assert message.startswith(f"draft_model is {draft}") and words in message and "\n" not in message
    assert "same tokenizer" in message and len(message) < 300


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}']
)
def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, model: Path, text: str) -> None:
    draft = write(tmp_path / "draft")
    (draft / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json has no tokens") as caught:
        check_tokens(draft, model, 4)
    assert "\n" not in str(caught.value)


def test_folders(tmp_path: Path, model: Path) -> None:
    def found(name: str) -> Path:
        return find_draft(EngineConfig(model="m", speculation="draft_model", draft_model=name), resolve_folder)

    assert found(str(model)) == model
    with pytest.raises(ConfigError, match=r"draft_model cannot be found: model is '.*/absent': no such folder"):
        found(str(tmp_path / "absent"))
