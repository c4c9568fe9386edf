"""Rotary frequencies against the published formulas, and against transformers' implementation of them."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tidewheel.errors import ConfigError
from tidewheel.models.architectures import (
    NATIVE,
    RopeConfig,
    cos_sin_table,
    inverse_frequencies,
    parse_config,
    parse_rope,
)
from tidewheel.models.config_fields import ConfigFields

HEAD_DIM = 128
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def parsed(parameters: dict[str, object], context: int = 131072) -> RopeConfig:
    return parse_rope(
        ConfigFields({"rope_parameters": parameters, "max_position_embeddings": context}, "config.json")
    )


def plain(theta: float) -> list[float]:
    """Su et al. 2021 (RoFormer), equation 15."""
    return [theta ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def llama3(theta: float, factor: float, low: float, high: float, original: int) -> list[float]:
    """Llama 3.1's scaling, one frequency at a time."""
    scaled = []
    for frequency in plain(theta):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            scaled.append(frequency)
        elif wavelength > original / low:
            scaled.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return scaled


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, plain(10000.0)),
        ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, [f / 4 for f in plain(10000.0)]),
        (LLAMA3, llama3(500000.0, 32.0, 1.0, 4.0, 8192)),
    ],
    ids=["default", "linear", "llama3"],
)
def test_frequencies_follow_the_formula(parameters: dict[str, object], expected: list[float]) -> None:
    actual = inverse_frequencies(parsed(parameters), HEAD_DIM)
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("extra", [{}, {"truncate": False}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"factor": 1.0}])
def test_yarn_is_that_of_transformers(extra: dict[str, object]) -> None:
    parameters = {**YARN, **extra}
    config = LlamaConfig(
        rope_parameters=dict(parameters), hidden_size=HEAD_DIM, num_attention_heads=1, max_position_embeddings=131072
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    rope = parsed(parameters)
    torch.testing.assert_close(inverse_frequencies(rope, HEAD_DIM), expected, rtol=1e-5, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


def test_table_holds_cosines_then_sines_times_the_attention_factor() -> None:
    rope = parsed(YARN)
    table = cos_sin_table(rope, HEAD_DIM, 50, CPU)
    angle = 49 * float(inverse_frequencies(rope, HEAD_DIM)[3])
    assert table.shape == (50, HEAD_DIM)
    assert float(table[49, 3]) == pytest.approx(math.cos(angle) * rope.attention_factor, abs=1e-5)
    assert float(table[49, HEAD_DIM // 2 + 3]) == pytest.approx(math.sin(angle) * rope.attention_factor, abs=1e-5)


def test_both_spellings_say_the_same() -> None:
    old = {
        "type": "llama3",
        **{key: value for key, value in LLAMA3.items() if key not in ("rope_type", "rope_theta")},
    }
    fields = {"rope_theta": 500000.0, "rope_scaling": old, "max_position_embeddings": 131072}
    assert parse_rope(ConfigFields(fields, "config.json")) == parsed(LLAMA3)


@pytest.mark.parametrize(("kind", "context"), [("yarn", 131072), ("linear", 32768)])
def test_yarn_alone_extends_the_context(kind: str, context: int) -> None:
    fields = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32768,
        "rope_parameters": {**YARN, "rope_type": kind},
    }  # fmt: skip
    config = parse_config(ConfigFields(fields, "config.json"), NATIVE["LlamaForCausalLM"])
    assert config.context_length == context


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type 'longrope' is not offered"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor is missing"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "must be above low_freq_factor"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0, it must be a number from 1e-12"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not offered"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
    ],
)
def test_what_is_not_known_is_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(parameters)
