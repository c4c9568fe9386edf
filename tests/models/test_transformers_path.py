"""Models of transformers that cannot be exact with paged attention are refused by name when they are loaded."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.models import tiny_models
from support.models.loading import loaded
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.models.causal_lm import CausalLM, ModelShape
from tidewheel.models.transformers_model import IMPLEMENTATION, AttentionCall, attending, probe

CPU = torch.device("cpu")


def load(folder: Path, **settings: object) -> CausalLM:
    config = EngineConfig(model=str(folder), **settings)
    return loaded(folder, config)


def refusal(folder: Path, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_config(folder: Path, architecture: str, config: transformers.PretrainedConfig, **changes: object) -> Path:
    values = {**config.to_dict(), "architectures": [architecture], **changes}
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return folder


def test_shape_is_that_of_the_keys(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gemma2, tmp_path)
    model = load(tmp_path)
    assert model.shape == (2, 2, 32, tiny_models.VOCAB_SIZE, 64, 112)
    assert model.weights_bytes == sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert load(tmp_path, load_format="dummy").shape.num_layers == 2


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = {"rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("architecture", "config", "changes", "message"),
    [
        ("NoSuchForCausalLM", transformers.LlamaConfig(), {}, "architecture 'NoSuchForCausalLM' is unknown"),
        ("LlamaModel", transformers.LlamaConfig(), {}, "architecture 'LlamaModel' is unknown"),
        ("FalconForCausalLM", transformers.FalconConfig(**SMALL, alibi=True), {}, "ALiBi"),
        (
            "OpenAIGPTLMHeadModel",
            transformers.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4),
            {},
            "does not go through",
        ),
        (
            "GPT2LMHeadModel",
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, add_cross_attention=True),
            {},
            "cross-attention",
        ),
        (
            "GraniteForCausalLM",
            transformers.GraniteConfig(**SMALL),
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **ROPE}},
            "rope_type dynamic depends on the longest sequence",
        ),
        (
            "Gemma3ForCausalLM",
            transformers.Gemma3TextConfig(**SMALL, use_bidirectional_attention=True),
            {},
            "not causal",
        ),
        ("PhiForCausalLM", transformers.PhiConfig(**SMALL), {"vocab_size": "many"}, "transformers refuses it"),
        (
            "StableLmForCausalLM",
            transformers.StableLmConfig(**SMALL, num_key_value_heads=4),
            {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
            "run code from the model folder",
        ),
    ],
)
def test_refusals_before_any_weight_is_read(
    tmp_path: Path, architecture: str, config: transformers.PretrainedConfig, changes: dict[str, object], message: str
) -> None:
    write_config(tmp_path, architecture, config, **changes)
    assert message in refusal(tmp_path, load_format="dummy")


def test_code_in_the_folder_is_never_run(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('this file was imported')")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "auto_map": {"AutoModel": "evil.Model"}}))
    assert "run code from the model folder" in refusal(tmp_path)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
def test_a_folder_does_not_choose_the_attention(tmp_path: Path, key: str) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, key: "some-owner/some-kernel"}))
    assert load(tmp_path)._model.config._attn_implementation == IMPLEMENTATION


def test_missing_weights_are_named(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("transformer.h.1.mlp.c_fc.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "lacks transformer.h.1.mlp.c_fc.weight" in refusal(tmp_path)


def test_left_over_weights_are_named(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "transformer.extra": torch.ones(3)}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    assert "transformer.extra" in refusal(tmp_path)


def test_truncated_files_are_found_by_our_own_validation(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.gpt2, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "not a valid safetensors file" in refusal(tmp_path)


class ScaledAttention(torch.nn.Module):
    """Scales the output of an attention layer where the attention interface cannot see it."""

    def __init__(self, layer: torch.nn.Module, implementation: str) -> None:
        super().__init__()
        self.layer, self.implementation = layer, implementation

    def forward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, object]:
        output, weights = self.layer(*args, **kwargs)
        uses_eager = self.layer.config._attn_implementation == self.implementation
        return (output * 1.5 if uses_eager else output), weights


class Recorder:
    """An attention that answers zeros."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.layers.append(call.layer)
        return torch.zeros_like(call.query[0].transpose(0, 1))


def dummy_gpt2() -> transformers.GPT2LMHeadModel:
    model = tiny_models.gpt2().eval()
    model.set_attn_implementation("tidewheel")
    return model


@torch.inference_mode()
def probed(model: transformers.GPT2LMHeadModel) -> ModelShape:
    return probe(model, "GPT2LMHeadModel", CPU)


def test_the_probe_finds_attention_that_differs_from_the_model_s_own() -> None:
    model = dummy_gpt2()
    hidden_size = model.config.hidden_size
    assert probed(model) == ModelShape(2, 4, 16, tiny_models.VOCAB_SIZE, hidden_size, 4 * hidden_size)
    model.transformer.h[1].attn = ScaledAttention(model.transformer.h[1].attn, "eager")
    with pytest.raises(ConfigError, match="paged attention changes its logits by"):
        probed(model)


def test_the_probe_finds_layers_without_attention() -> None:
    model = dummy_gpt2()
    model.transformer.h = model.transformer.h[:1]
    with pytest.raises(ConfigError, match="1 of 2 layers attend"):
        probed(model)


def test_the_probe_finds_a_window_that_the_layers_do_not_get() -> None:
    model = dummy_gpt2()
    model.config.sliding_window = 8
    with pytest.raises(ConfigError, match="layer 0 has a window of 0, its configuration says 8"):
        probed(model)


def test_the_probe_refuses_attention_that_is_not_causal() -> None:
    model = dummy_gpt2()
    model.transformer.h[0].attn.is_causal = False
    with pytest.raises(ConfigError, match="not causal"):
        probed(model)


def test_the_probe_refuses_logits_of_tokens_that_cannot_be_read() -> None:
    model = dummy_gpt2()
    model.lm_head = torch.nn.Linear(64, tiny_models.VOCAB_SIZE + 8)
    with pytest.raises(ConfigError, match="logits of 392 tokens, embeddings of 384"):
        probed(model)


@torch.inference_mode()
def test_attention_belongs_to_one_step_and_one_thread() -> None:
    model, ids, recorder = dummy_gpt2(), torch.zeros(1, 4, dtype=torch.long), Recorder()
    with attending(recorder.attend), ThreadPoolExecutor(1) as other:
        model(ids)
        assert recorder.layers == [0, 1]
        with pytest.raises(ValueError, match="outside of a step"):
            other.submit(torch.inference_mode()(lambda: model(ids))).result()
    with pytest.raises(ValueError, match="outside of a step"):
        model(ids)
