"""Encoders against transformers called directly, on small random models and, where installed, a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from support.one_shot.encoder_folder import save
from support.one_shot.loading import load, refusal

TEXTS = ["red cat", "green dog blue cat red", "", "blue " * 40]


def pooled_by(folder: Path, mode: str) -> None:
    (folder / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": False, f"pooling_mode_{mode}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))


def tokenized(folder: Path, *texts: list[str]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(*texts, padding=True, truncation=True, max_length=16, return_tensors="pt")


def texts(values: list[str]) -> np.ndarray:
    return np.array([text.encode() for text in values], np.object_)


def embedded(folder: Path, values: list[str], mode: str = "mean") -> np.ndarray:
    """Embeddings by transformers, with the pooling that model cards of sentence-transformers show."""
    given = tokenized(folder, values)
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder)(**given).last_hidden_state
    mask = given["attention_mask"][:, :, None].float()
    pooled = states[:, 0] if mode == "cls" else (states * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled).numpy()


@pytest.mark.parametrize("mode", ["mean", "cls"])
def test_embeddings_are_those_of_transformers(mode: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    if mode == "cls":
        pooled_by(folder, "cls_token")
    adapter, signature = load(folder, adapter="encoder")
    assert signature.is_batched and signature.outputs[0].describe() == "embedding FP32 [batch, 8]"
    found = adapter.run({"text": texts(TEXTS)})
    np.testing.assert_allclose(found["embedding"], embedded(folder, TEXTS, mode), rtol=1e-5, atol=1e-6)
    assert found["num_input_tokens"].tolist() == [4, 7, 2, 16]


def test_bfloat16_is_close(tmp_path: Path) -> None:
    adapter, _ = load(save(tmp_path), {"dtype": "bfloat16"}, adapter="encoder")
    found = adapter.run({"text": texts(TEXTS)})["embedding"]
    assert found.dtype == np.float32 and (found * embedded(tmp_path, TEXTS)).sum(axis=1).min() > 0.99


def test_classes_are_those_of_transformers(tmp_path: Path) -> None:
    folder = save(tmp_path, labels=3)
    adapter, _ = load(folder, adapter="encoder")
    found = adapter.run({"text": texts(TEXTS)})
    with torch.no_grad():
        logits = AutoModelForSequenceClassification.from_pretrained(folder)(**tokenized(folder, TEXTS)).logits
    np.testing.assert_allclose(found["scores"], logits.softmax(dim=1).numpy(), rtol=1e-5, atol=1e-6)
    assert found["label"].tolist() == [f"class {index}".encode() for index in logits.argmax(dim=1).tolist()]


def test_scores_of_pairs_are_those_of_transformers(tmp_path: Path) -> None:
    folder = save(tmp_path, labels=1)
    adapter, signature = load(folder, adapter="encoder")
    assert [spec.name for spec in signature.inputs] == ["query", "text"]
    queries = ["cat", "dog red", "blue", "green"]
    found = adapter.run({"text": texts(TEXTS), "query": texts(queries)})["score"]
    with torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        wanted = model(**tokenized(folder, queries, TEXTS)).logits[:, 0].sigmoid()
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_texts_are_bounded(tmp_path: Path) -> None:
    adapter, _ = load(save(tmp_path), {"max_tokens": 4}, adapter="encoder")
    one, two = adapter.run({"text": texts(["red cat dog", "red cat blue blue"])})["embedding"]
    assert np.allclose(one[:2], two[:2]), "both are cut to two words"
    words = adapter.run({"text": texts(["red cat " * 1000])})["embedding"]
    assert np.allclose(words, one), "only the beginning is tokenised"
    with pytest.raises(UnicodeDecodeError):
        adapter.run({"text": np.array([b"a\xff"], np.object_)})


def test_folders_that_are_not_served(tmp_path: Path) -> None:
    folder = save(tmp_path / "good")
    assert "Invalid enum value 'x'" in refusal(folder, {"dtype": "x"}, adapter="encoder")
    pooled_by(folder, "max_tokens")
    assert "pooling_mode_max_tokens" in refusal(folder, adapter="encoder")
    (folder / "2_Dense").mkdir()
    assert "asks for 2_Dense" in refusal(folder, adapter="encoder")
    assert "cannot be loaded by encoder" in refusal(tmp_path / "gone", adapter="encoder")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_broken_files_are_one_line(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / name).write_bytes((folder / name).read_bytes()[:50])
    assert str(folder) in refusal(folder, adapter="encoder")
    (folder / name).unlink()
    assert str(folder) in refusal(folder, adapter="encoder")


def test_weights_are_never_unpickled_and_code_of_the_folder_never_runs(tmp_path: Path) -> None:
    folder = save(tmp_path)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    assert "safetensors" in refusal(folder, adapter="encoder")
    (folder / "model.safetensors").write_bytes(weights)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('ran')")
    assert "custom code" in refusal(folder, adapter="encoder")


def test_a_real_encoder(tmp_path: Path) -> None:
    package = pytest.importorskip("all_minilm_l6_v2")
    folder = Path(package.extract_model(str(tmp_path)))
    values = ["A man is eating food.", "Someone has a meal.", "The weather is nice today. " * 30]
    adapter, signature = load(folder, adapter="encoder")
    assert signature.outputs[0].dims == ("batch", 384)
    found = adapter.run({"text": texts(values)})["embedding"]
    given = AutoTokenizer.from_pretrained(folder)(
        values, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder)(**given).last_hidden_state
    mask = given["attention_mask"][:, :, None]
    wanted = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-6)
    assert found[0] @ found[1] > found[0] @ found[2]
