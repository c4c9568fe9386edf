"""Folders made of GGUF files: the configuration of the model's own folder, or one line that says why not."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.models import tiny_models
from support.models.gguf_files import F32, write_gguf, write_model
from tidewheel.errors import ConfigError
from tidewheel.frontend.settings import GenerationDefaults
from tidewheel.models.architectures import ModelConfig, RopeConfig, inverse_frequencies, native_traits, parse_config
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.gguf_folder import model_config
from tidewheel.models.gguf_header import read_header
from tidewheel.models.model_folder import cached_folder, read_config, resolve_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tidewheel" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny model.gguf", tiny_models.save(tiny_models.llama, tmp_path / "hf"))


def parsed(folder: Path) -> ModelConfig:
    fields = read_config(folder)
    traits = native_traits(fields)
    assert traits is not None
    return parse_config(fields, traits)


def refusal(model: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_folder(str(model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewritten(path: Path, **changes: object) -> Path:
    """Write the tiny Llama again with other metadata, whose keys have `__` for a dot; None removes a key."""
    model = tiny_models.llama()
    return write_model(path, model, **{key.replace("__", "."): value for key, value in changes.items()})


LINEAR = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}
YARN = {
    "llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0,
    "llama__rope__scaling__original_context_length": 64,
}  # fmt: skip
MODELS: dict[str, tuple[Any, dict[str, object]]] = {
    "llama": (tiny_models.llama, {}),
    "llama with biases": (lambda: tiny_models.llama(attention_bias=True, mlp_bias=True), {}),
    "tied": (lambda: tiny_models.llama(tie_word_embeddings=True), {}),
    "linear": (lambda: tiny_models.llama(rope_parameters=tiny_models.LINEAR_ROPE), LINEAR),
    "yarn": (lambda: tiny_models.llama(rope_parameters=tiny_models.YARN_ROPE), YARN),
    "mistral": (tiny_models.mistral, {}),
    "qwen2": (tiny_models.qwen2, {}),
    "qwen3": (tiny_models.qwen3, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_configuration_is_that_of_the_models_own_folder(tmp_path: Path, name: str) -> None:
    make, changes = MODELS[name]
    model = tiny_models.save(make, tmp_path / "hf")
    path = write_model(
        tmp_path / "a.gguf", model, **{key.replace("__", "."): value for key, value in changes.items()}
    )
    found, expected = parsed(resolve_folder(str(path))), parsed(tmp_path / "hf")
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps, rel=1e-6)
    assert found == ModelConfig(**{**fields_of(expected), "rms_norm_eps": found.rms_norm_eps})


def fields_of(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ModelConfig.__slots__}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_llama_3(tmp_path: Path, factor: float) -> None:
    rope = RopeConfig(
        rope_type="llama3", theta=500_000.0, factor=factor, original_context=8192, low_freq_factor=1.0,
        high_freq_factor=4.0,
    )  # fmt: skip
    plain = RopeConfig(rope_type="default", theta=500_000.0)
    factors = (inverse_frequencies(plain, 128) / inverse_frequencies(rope, 128)).numpy()
    assert parsed(with_factors(tmp_path / "a.gguf", factors)).rope == rope
    assert parsed(with_factors(tmp_path / "b.gguf", np.ones(64, np.float32))).rope == plain
    with pytest.raises(ConfigError, match=r"rope_freqs.weight has other factors than Llama 3; take .* safetensors"):
        with_factors(tmp_path / "c.gguf", factors[::-1])
    with pytest.raises(ConfigError, match=r"rope_freqs.weight must be 64 numbers"):
        with_factors(tmp_path / "d.gguf", factors[:8])


def with_factors(path: Path, factors: np.ndarray) -> Path:
    config = {
        "general.architecture": "llama", "llama.attention.head_count": 4, "llama.embedding_length": 512,
        "llama.context_length": 4096, "llama.feed_forward_length": 64, "llama.block_count": 1,
        "llama.rope.freq_base": 500_000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "aa"], "tokenizer.ggml.merges": ["a a"],
    }  # fmt: skip
    embedding = np.zeros((2, 512), dtype=np.float32)
    write_gguf(path, config, {"token_embd.weight": (embedding, F32), "rope_freqs.weight": (factors, F32)})
    return resolve_folder(str(path))


def test_a_folder_is_made_once_and_again_for_another_file(file: Path, cache: Path) -> None:
    folder = resolve_folder(str(file))
    assert folder.parent == cache
    assert folder.name.startswith("tiny_model-")
    assert cache.stat().st_mode & 0o777 == 0o700
    assert cached_folder(str(file)) == resolve_folder(str(folder)) == folder
    assert (folder / "model.gguf").readlink() == file
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert resolve_folder(str(file)) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    other = file.with_name("other.gguf")
    other.write_bytes(file.read_bytes())
    kept = resolve_folder(str(other))
    os.utime(file, (1, 1))
    anew = resolve_folder(str(file))
    assert anew != folder
    assert set(cache.iterdir()) == {folder, anew, kept}


def test_a_folder_that_many_make_at_once(file: Path, cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(resolve_folder, [str(file)] * 16))
    assert folders == set(cache.iterdir())
    assert len(folders) == 1


def test_the_files_of_a_folder(file: Path) -> None:
    folder = resolve_folder(str(file))
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.gguf", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config == {
        "eos_token": "<|im_end|>",
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    assert GenerationDefaults.load(folder).eos_token_ids == {256}


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_K", "bfloat16")]
)
def test_the_dtype_is_that_of_the_embedding(file: Path, kind: str, dtype: str) -> None:
    header = read_header(file)
    tensor = header.tensors["token_embd.weight"]
    tensors = {"token_embd.weight": tensor._replace(kind=type(tensor.kind)[kind])}
    assert model_config(ConfigFields(header.metadata, ""), tensors)["dtype"] == dtype


def test_a_folder_with_a_file(file: Path, tmp_path: Path) -> None:
    assert resolve_folder(str(tmp_path)).parent == tmp_path / "cache" / "tidewheel" / "gguf"
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert resolve_folder(str(tmp_path)) == tmp_path
    file.with_name("b.gguf").write_bytes(b"")
    assert "has 2 GGUF files: name one of them" in refusal(tmp_path)


def test_a_part_of_a_split_file(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    path.write_bytes(b"")
    assert refusal(path) == f"{path} is a part: run llama-gguf-split --merge {path} {tmp_path / 'm.gguf'}"
    assert refusal(tmp_path) == refusal(path)


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "architecture": (
        {"general__architecture": "gemma3"},
        "is gemma3: GGUF files are served of llama, qwen2, qwen3; take",
    ),
    "experts": ({"llama__expert_count": 8}, r"is a mixture of experts \(llama\)"),
    "layers": ({"llama__block_count": None}, "llama.block_count is missing"),
    "heads by layer": ({"llama__attention__head_count": [4, 4]}, r"head_count is \[4, 4\], it must be an integer"),
    "part of a head": ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8, it must be 16"),
    "values": ({"llama__attention__value_length": 8}, "value_length is 8, it must be 16"),
    "rope": ({"llama__rope__scaling__type": "longrope"}, "is 'longrope', it must be none, linear or yarn"),
    "tokens": ({"tokenizer__ggml__tokens": None}, "has no tokenizer.*serve a folder with the file and its model's"),
    "numbers as tokens": (
        {"tokenizer__ggml__tokens": [7] * 384},
        r"tokens is \[7, 7.{75}, it must be a list of texts$",
    ),
    "tokenizer": ({"tokenizer__ggml__model": "bert"}, "is 'bert', it must be gpt2 or llama"),
    "pre": ({"tokenizer__ggml__pre": "viking"}, "is 'viking', it must be one of default, gpt-2"),
    "types": ({"tokenizer__ggml__token_type": [1]}, "token_type must be 384 numbers"),
    "end": ({"tokenizer__ggml__eos_token_id": 384}, "eos_token_id is 384, it must be an integer from 0 to 383"),
    "merges": ({"tokenizer__ggml__merges": ["x y"]}, r"has a damaged tokenizer \(.*\): download it again"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_not_offered(tmp_path: Path, cache: Path, name: str) -> None:
    changes, words = REFUSED[name]
    path = rewritten(tmp_path / "a.gguf", **changes)
    assert re.search(words, refusal(path))
    assert str(path) in refusal(path)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert re.search("make room, or set XDG_CACHE_HOME to another folder", refusal(file))


def test_a_cache_that_others_may_open(file: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    assert re.search("is open to other users: run chmod 700 on it, or set XDG_CACHE_HOME", refusal(file))
