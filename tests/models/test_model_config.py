"""config.json by whitelist: both generations of transformers, defaults of each architecture, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from support.models import tiny_models
from tidewheel.errors import ConfigError
from tidewheel.models.architectures import NATIVE, ModelConfig, native_traits, parse_config
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.model_folder import checkpoint_dtype, read_config

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def parsed(**changes: object) -> ModelConfig:
    fields = ConfigFields({**LLAMA, **changes}, "config.json")
    traits = native_traits(fields)
    assert traits is not None
    return parse_config(fields, traits)


def saved(model: PreTrainedModel, folder: Path) -> ModelConfig:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    fields = read_config(folder)
    return parse_config(fields, NATIVE[fields.architecture])


def test_defaults_of_an_old_llama() -> None:
    config = parsed()
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rope.theta, config.rope.rope_type) == (10000.0, "default")
    assert config.sliding_windows == (0, 0)
    assert not (config.tie_word_embeddings or config.qkv_bias or config.output_bias or config.mlp_bias)


def test_transformers_4_spelling() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = parsed(rope_theta=500000.0, rope_scaling=scaling, torch_dtype="bfloat16")
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor) == ("llama3", 500000.0, 8.0)
    assert checkpoint_dtype(ConfigFields({"torch_dtype": "bfloat16"}, "config.json")) == "bfloat16"
    assert checkpoint_dtype(ConfigFields({"dtype": "float16"}, "config.json")) == "float16"


def test_what_transformers_5_saves(tmp_path: Path) -> None:
    config = saved(tiny_models.qwen3(rope_parameters=tiny_models.LINEAR_ROPE, tie_word_embeddings=True), tmp_path)
    assert (config.head_dim, config.num_kv_heads, config.rope.factor) == (24, 2, 2.0)
    assert config.qk_norm
    assert config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (4096, 4096)),
        ({"sliding_window": 7}, (7, 7)),
        ({"sliding_window": None}, (0, 0)),
    ],
)
def test_windows_of_mistral(changes: dict[str, object], windows: tuple[int, ...]) -> None:
    assert parsed(architectures=["MistralForCausalLM"], num_key_value_heads=2, **changes).sliding_windows == windows


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 7}, (0, 0)),
        ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (0, 7)),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, (4096, 0)),
        ({"sliding_window": None, "use_sliding_window": True}, (0, 0)),
    ],
)
def test_windows_of_qwen2(changes: dict[str, object], windows: tuple[int, ...]) -> None:
    config = parsed(architectures=["Qwen2ForCausalLM"], **changes)
    assert config.sliding_windows == windows
    assert config.qkv_bias
    assert not config.output_bias


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not offered"),
        ({"hidden_size": "64"}, "hidden_size is '64', it must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 20}, "head_dim is 20, it must be a multiple of 8"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_parameters": []}, "rope_parameters is \\[\\], it must be an object"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic' is not offered"),
        ({"architectures": []}, "architectures is \\[\\]"),
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM is not offered: .*ALiBi"),
        ({"architectures": ["MambaForCausalLM"]}, "recurrent state"),
        ({"architectures": ["GptOssForCausalLM"]}, "sinks"),
    ],
)
def test_refusals_name_the_key_and_the_value(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parsed(**changes)
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named() -> None:
    values = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        parse_config(ConfigFields(values, "config.json"), NATIVE["LlamaForCausalLM"])


def test_layer_types_must_fit() -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        parsed(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, layer_types=["sliding_attention"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "it must be a JSON object"),
        (json.dumps({**LLAMA, "auto_map": {"AutoModel": "evil.Model"}}).encode(), "run code from the model folder"),
        (json.dumps({**LLAMA, "quantization_config": {"bits": 4}}).encode(), "quantised"),
        (json.dumps({**LLAMA, "vision_config": {"a": 1}}).encode(), "multimodal"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)
