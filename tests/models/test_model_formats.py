"""Folders that are not served are named by `LLM`, `check` and `serve` in the same line, with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.frontend.tokenizers_on_the_spot import word_piece
from support.models import tiny_models
from support.models.judging import NAME, judge
from tidewheel.cli.main import main
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.llm import LLM
from tidewheel.server.repository import entry_text, resolve_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:9\nsize 9\n"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99}
Make = Callable[[Path], Path]


def files(**texts: object) -> Make:
    """Write files, objects as JSON; in their names `__` stands for a dot."""

    def make(folder: Path) -> Path:
        for name, content in texts.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name.replace("__", ".")).write_text(text)
        return folder

    return make


def quantised(**section: object) -> Make:
    return files(config__json={**CONFIG, "quantization_config": section}, model__safetensors="")


FORMATS = {
    "GGUF file": (
        lambda folder: files(a__gguf="GGUF")(folder) / "a.gguf",
        "a.gguf is not a valid GGUF file.* download",
    ),
    "folder of GGUF": (files(a__gguf=POINTER), "a.gguf is not a valid GGUF file.* a pointer of Git LFS"),
    "folder of two": (files(a__gguf="", b__gguf=""), "has 2 GGUF files: name one of them"),
    "pointer": (files(config__json=CONFIG, model__safetensors=POINTER), "a pointer of Git LFS.*run git lfs pull in"),
    "pointer alone": (files(config__json=POINTER), "config.json is a pointer of Git LFS"),
    "LoRA": (
        files(adapter_config__json={"base_model_name_or_path": "org/base"}, adapter_model__safetensors=""),
        "is a LoRA adapter of org/base, and no model: serve that model with enable_lora, and name",
    ),
    "bitsandbytes": (
        quantised(load_in_4bit=True, quant_method="bitsandbytes"),
        r"quantised by bitsandbytes \(quantization_config\).*take the float model",
    ),
    "another method": (quantised(quant_method="quip"), "quantised by quip"),
    "vision": (files(config__json={**CONFIG, "vision_config": {"a": 1}}), "is a vision-language model"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_is_named_alike(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = FORMATS[name]
    folder = tmp_path / "model"
    folder.mkdir()
    model = str(make(folder))
    with pytest.raises(ConfigError, match=message) as of_llm:
        LLM(model, device="cpu")
    with pytest.raises(ConfigError) as of_serve:
        resolve_model(model)
    said = str(of_llm.value)
    assert (said, "\n" in said) == (str(of_serve.value), False)
    (found,), _ = judge(EngineConfig(model=model))
    assert (found.severity, found.message) == ("error", said)
    entry = tmp_path / "models" / "one"
    (entry / "1").mkdir(parents=True)
    (entry / "config.pbtxt").write_text(entry_text({"model": model}, decoupled=True))
    assert main(["check", str(entry)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert sum(": error: " in line for line in printed) == 1
    assert any(f"error: {said} [model]" in line for line in printed)


def test_a_model_beside_such_files_is_served(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.llama, tmp_path)
    word_piece().save(str(tmp_path / "tokenizer.json"))
    files(a__gguf="GGUF", adapter_config__json={}, quantize_config__json={"bits": 3})(tmp_path)
    files(consolidated__safetensors=POINTER)(tmp_path)
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    problems, report = judge(EngineConfig(model=str(tmp_path), num_blocks=64))
    assert problems == []
    assert report.models[NAME] == "LlamaForCausalLM, native"


def test_a_tokenizer_of_sentencepiece_alone(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.llama, tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    message = "has no tokenizer.json, only tokenizer.model, a tokenizer of sentencepiece: convert it"
    with pytest.raises(ConfigError, match=message) as of_llm:
        LLM(str(tmp_path), device="cpu", num_blocks=64)
    problems, _ = judge(EngineConfig(model=str(tmp_path), num_blocks=64))
    assert [problem.message for problem in problems] == [str(of_llm.value)]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["GptOssForCausalLM"], "vocab_size": 4000}, "GptOssForCausalLM is not offered"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not offered"),
        ({"architectures": ["T5ForConditionalGeneration"], "vocab_size": 2**31 - 1}, "T5ForConditionalGeneration is"),
    ],
)
def test_a_refused_model_gets_one_error_and_its_vocabulary_none(
    tmp_path: Path, config: dict[str, object], words: str
) -> None:
    tiny_models.save(tiny_models.llama, tmp_path)
    word_piece().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (problem,), _ = judge(EngineConfig(model=str(tmp_path)))
    assert words in problem.message
