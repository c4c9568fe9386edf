"""Quantised checkpoints: each matrix has the values that its format defines, and all else stops in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.models import tiny_models
from support.models.quantized_formats import (
    CASES,
    FP8_CASES,
    ORDERED_CASES,
    Fp8Case,
    QuantizedCase,
    Tensors,
    compressed,
    edit_config,
    random_matrix,
    save_quantized_llama,
)
from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.model_formats import QUANTIZATION_METHODS, config_refusal
from tidewheel.models.causal_lm import ForwardInput
from tidewheel.models.config_fields import ConfigFields
from tidewheel.models.decoder import Decoder
from tidewheel.models.linear import GroupFormat
from tidewheel.models.quantized_checkpoint import PARSERS, QuantizedFolder, quantization_layout
from tidewheel.models.trial_prompt import one_sequence, random_tokens
from tidewheel.models.weight_source import SafetensorsFolder
from tidewheel.runner.kv_tensors import KVTensors
from tidewheel.runner.loading import RunnerParts, load_parts
from tidewheel_kernels import grouped_linear
from tidewheel_kernels.grouped_linear import GroupedWeights, dequantize

CPU = torch.device("cpu")
OUT, INPUTS = 24, 256
NUM_TOKENS = 40
GPTQ, PACKED, INT8, FP8 = CASES["gptq"], CASES["pack-quantized"], CASES["int-quantized"], FP8_CASES["fp8, blocks"]


def folder_of(folder: Path, tensors: Tensors, section: object, **fields: object) -> QuantizedFolder:
    save_file({f"a.q_proj.{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    layout = quantization_layout(folder, ConfigFields({"quantization_config": section, **fields}, "config.json"))
    assert layout is not None
    return QuantizedFolder(SafetensorsFolder(folder), layout, ())


def matrix_of(source: QuantizedFolder) -> GroupedWeights:
    assert set(source.tensors) == {"a.q_proj.weight"}
    matrix = source.matrix("a.q_proj.weight", CPU)
    assert isinstance(matrix, GroupedWeights)
    stored = source.tensors["a.q_proj.weight"]
    assert stored.shape == (matrix.out_features, matrix.in_features)
    assert stored.kind == GroupFormat(matrix.bits, matrix.group_size, matrix.minimums is not None)
    assert stored.num_bytes == matrix.nbytes
    return matrix


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_definition(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    matrix = case.random(OUT, INPUTS)
    found = matrix_of(folder_of(tmp_path, case.write(matrix), case.section))
    torch.testing.assert_close(dequantize(found), matrix.values(), rtol=0, atol=0)
    assert found.bits == case.bits
    assert found.group_size == min(case.group_size or 128, 128)
    assert (found.minimums is None) == case.symmetric


@pytest.mark.parametrize("name", ORDERED_CASES)
def test_groups_of_scattered_inputs_are_rounded_to_8_bits(tmp_path: Path, name: str) -> None:
    case = ORDERED_CASES[name]
    matrix = case.random(OUT, INPUTS)
    found = matrix_of(folder_of(tmp_path, case.write(matrix), case.section))
    assert (found.bits, found.group_size) == (8, 32)
    values = matrix.values().unflatten(1, (-1, 32))
    half_steps = values.abs().amax(-1, keepdim=True) / 254
    assert ((dequantize(found).unflatten(1, (-1, 32)) - values).abs() <= half_steps * 1.01).all()


@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_is_rounded_to_8_bits(tmp_path: Path, name: str) -> None:
    case = FP8_CASES[name]
    tensors, values = case.quantize(torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(0)))
    found = dequantize(matrix_of(folder_of(tmp_path, tensors, case.section)))
    half_steps = values.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 254
    assert ((found - values).unflatten(1, (-1, 32)).abs() <= half_steps * 1.01).all()


def test_groups_in_another_order_keep_their_bits(tmp_path: Path) -> None:
    matrix = random_matrix(OUT, INPUTS, 4, 64, symmetric=False)
    swapped = matrix._replace(groups=matrix.groups[::-1].copy())
    case = ORDERED_CASES["gptq, act-order"]
    found = matrix_of(folder_of(tmp_path, case.write(swapped), case.section))
    assert (found.bits, found.group_size) == (4, 64)
    assert torch.equal(dequantize(found), swapped.values())


W8A8 = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": True}


def with_inputs(section: dict[str, object], inputs: dict[str, object]) -> dict[str, object]:
    groups = section["config_groups"]
    assert isinstance(groups, dict)
    return {**section, "config_groups": {"group_0": {**groups["group_0"], "input_activations": inputs}}}


@pytest.mark.parametrize(
    ("changes", "rounds"),
    [({}, True), ({"dynamic": False}, False), ({"num_bits": 4}, False), ({"symmetric": False}, False),
     ({"strategy": "tensor"}, False), ({"type": "float"}, False)],
)  # fmt: skip
def test_inputs_are_rounded_where_the_file_says_so(tmp_path: Path, changes: dict[str, object], rounds: bool) -> None:
    tensors = INT8.write(INT8.random(OUT, INPUTS))
    source = folder_of(tmp_path, tensors, with_inputs(INT8.section, W8A8 | changes))
    assert source.tensors["a.q_proj.weight"].kind == GroupFormat(8, 128, rounds_inputs=rounds)


def test_a_model_with_inputs_of_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_linear, "preference_for", lambda _: "reference")  # as a GPU holds the weights
    model = save_quantized_llama(tmp_path, INT8)
    unrounded = logits_of(parts_of(tmp_path))
    edit_config(tmp_path, quantization_config=with_inputs(INT8.section, W8A8))
    parts = parts_of(tmp_path)
    assert isinstance(parts.model, Decoder)
    assert all(layer._groups.codes.dtype == torch.int8 for layer in parts.model.to_fill if layer._groups)
    with torch.inference_mode():
        expected = model(TOKENS.long().unsqueeze(0)).logits[0]
    assert not torch.equal(logits_of(parts), unrounded)
    difference = logits_of(parts) - expected
    assert 0.001 < (difference.square().mean() / expected.square().mean()).sqrt() < 0.06


def test_one_scale_for_a_tensor(tmp_path: Path) -> None:
    matrix = random_matrix(OUT, INPUTS, 8, INPUTS, symmetric=True)
    tensors = {**INT8.write(matrix), "weight_scale": torch.tensor(0.5)}
    section = compressed("int-quantized", num_bits=8, strategy="tensor")
    found = dequantize(matrix_of(folder_of(tmp_path, tensors, section)))
    assert torch.equal(found, 0.5 * torch.from_numpy(matrix.codes - 128).float())


def test_older_writers(tmp_path: Path) -> None:
    """AWQ and GPTQ had files of their own beside config.json, and GPTQ a bias of zeros for each layer."""
    matrix = random_matrix(OUT, INPUTS, 4, 64, symmetric=False)
    for name, values, case in (
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, CASES["awq"]),
        ("quantize_config.json", {"bits": 4, "group_size": 64, "desc_act": False, "sym": False}, GPTQ),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text(json.dumps(values))
        source = folder_of(folder, {**case.write(matrix), "bias": torch.zeros(OUT)}, None)
        assert torch.equal(dequantize(matrix_of(source)), matrix.values())
        (folder / name).write_text(json.dumps({**values, "bits": 3, "w_bit": 3}))
        with pytest.raises(ConfigError, match=rf"{name}: (w_bit|bits) is 3"):
            quantization_layout(folder, ConfigFields({}, "config.json"))


def test_a_bias_that_the_model_has_or_that_is_not_zero_stays(tmp_path: Path) -> None:
    matrix = random_matrix(OUT, INPUTS, 4, 32, symmetric=False)
    source = folder_of(tmp_path, {**GPTQ.write(matrix), "bias": torch.ones(OUT)}, GPTQ.section)
    assert "a.q_proj.bias" in source.tensors
    tensors = {**GPTQ.write(matrix), "bias": torch.zeros(OUT)}
    save_file({f"a.{part}": tensor for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    layout = quantization_layout(tmp_path, ConfigFields({"quantization_config": GPTQ.section}, ""))
    assert layout is not None
    assert set(QuantizedFolder(SafetensorsFolder(tmp_path), layout, {"a.bias"}).tensors) == {"a.bias", "a.weight"}


def parts_of(folder: Path, **settings: object) -> RunnerParts:
    given = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_threads": 1, **settings}
    return load_parts(EngineConfig.from_settings(given), lambda stage, fraction: None)


def logits_of(parts: RunnerParts) -> torch.Tensor:
    kv = KVTensors(parts.layout, 4, CPU)
    positions = torch.arange(NUM_TOKENS)
    step = ForwardInput(TOKENS, positions, one_sequence(NUM_TOKENS, 16, CPU), kv.layers, positions)
    with torch.inference_mode():
        return parts.model.forward(step)


TOKENS = random_tokens(NUM_TOKENS, tiny_models.VOCAB_SIZE, CPU)


@pytest.mark.parametrize("name", CASES | ORDERED_CASES | FP8_CASES)
def test_a_model_answers_like_the_model_of_its_values(tmp_path: Path, name: str) -> None:
    every: dict[str, QuantizedCase | Fp8Case] = {**CASES, **ORDERED_CASES, **FP8_CASES}
    model = save_quantized_llama(tmp_path, every[name])
    with torch.inference_mode():
        expected = model(TOKENS.long().unsqueeze(0)).logits[0]
    for quantization, error in (("none", 0.005), ("auto", 0.06)):
        difference = logits_of(parts_of(tmp_path, quantization=quantization)) - expected
        assert (difference.square().mean() / expected.square().mean()).sqrt() < error
    parts = parts_of(tmp_path)
    assert parts.info.weights_bytes == parts.model.weights_bytes


def test_quantised_and_plain_matrices_of_one_layer(tmp_path: Path) -> None:
    """Where a writer leaves out one of q, k and v, their joint matrix is floats."""
    model = save_quantized_llama(tmp_path, GPTQ)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.self_attn.k_proj."
    for name in [name for name in tensors if name.startswith(prefix)]:
        del tensors[name]
    tensors[f"{prefix}weight"] = model.get_parameter(f"{prefix}weight").data.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.inference_mode():
        expected = model(TOKENS.long().unsqueeze(0)).logits[0]
    difference = logits_of(parts_of(tmp_path)) - expected
    assert (difference.square().mean() / expected.square().mean()).sqrt() < 0.06


def scheme(**changes: object) -> dict[str, object]:
    return compressed("pack-quantized", **{"num_bits": 4, "strategy": "group", "group_size": 64, **changes})


PACK = scheme()
SECTIONS: dict[str, tuple[object, str]] = {
    "no object": ("awq", "quantization_config is 'awq', it must be an object"),
    "no bits": ({"quant_method": "gptq", "group_size": 64}, "bits is missing, and only 4 or 8 is served"),
    "3 bits": ({"quant_method": "gptq", "bits": 3, "group_size": 64}, "bits is 3, and only 4 or 8"),
    "bits as text": ({"quant_method": "awq", "bits": "4", "group_size": 64}, "bits is '4', and only 4"),
    "bits as flag": ({"quant_method": "awq", "bits": True, "group_size": 64}, "bits is True"),
    "8 bits of AWQ": ({"quant_method": "awq", "bits": 8, "group_size": 64}, "bits is 8, and only 4"),
    "no group size": ({"quant_method": "awq", "bits": 4}, "group_size is missing"),
    "group size of 0": ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size is 0, it must be"),
    "gemv": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "'gemv', and only gemm"),
    "marlin": ({**GPTQ.section, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', and only gptq"),
    "old marlin": ({**GPTQ.section, "is_marlin_format": True}, "is_marlin_format is True"),
    "mixed": ({**GPTQ.section, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic is .* only one scheme"),
    "order": ({**GPTQ.section, "desc_act": "yes"}, "desc_act is 'yes', it must be true or false"),
    "cache": ({**PACK, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is .* not served"),
    "sparse": ({**PACK, "sparsity_config": {"format": "sparse-24-bitmask"}}, "format is 'sparse-24-bitmask'"),
    "sparse codes": ({**PACK, "format": "marlin-24"}, "format is 'marlin-24', and only pack-quantized"),
    "fp4": ({**PACK, "format": "nvfp4-pack-quantized"}, "format is 'nvfp4-pack-quantized'"),
    "no schemes": ({**PACK, "config_groups": {}}, "config_groups is {}"),
    "schemes": ({**PACK, "config_groups": [1]}, r"config_groups is \[1\], it must be an object"),
    "strategy": (scheme(strategy="token"), "strategy is 'token', and only tensor or channel or group"),
    "actorder": (scheme(actorder="random"), "actorder is 'random', and only group"),
    "kind": (scheme(type="float"), "type is 'float', and only int"),
    "dynamic": (scheme(dynamic=True), "dynamic is True"),
    "block": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", SECTIONS)
def test_a_configuration_that_is_not_served_is_named(tmp_path: Path, name: str) -> None:
    section, words = SECTIONS[name]
    with pytest.raises(ConfigError, match=words) as caught:
        quantization_layout(tmp_path, ConfigFields({"quantization_config": section}, "config.json"))
    assert str(caught.value).startswith("config.json: quantization_config")


def test_two_schemes_in_one_file(tmp_path: Path) -> None:
    one, other = (scheme(group_size=size)["config_groups"] for size in (64, 32))
    assert isinstance(one, dict)
    assert isinstance(other, dict)
    section = {**PACK, "config_groups": {**one, "group_1": other["group_0"]}}
    with pytest.raises(ConfigError, match=r"config_groups is .* one scheme for all"):
        quantization_layout(tmp_path, ConfigFields({"quantization_config": section}, "config.json"))


def test_each_method_has_a_parser() -> None:
    assert tuple(PARSERS) == QUANTIZATION_METHODS
    assert config_refusal({"quantization_config": {"quant_method": "quip"}}).startswith(
        "the weights are quantised by"
    )


Edit = Callable[[Tensors], object]


def put(part: str, tensor: torch.Tensor) -> Edit:
    return lambda tensors: tensors.update({part: tensor})


BAD_TENSORS: dict[str, tuple[QuantizedCase | Fp8Case, Edit, str]] = {
    "no scales": (GPTQ, lambda t: t.pop("scales"), "qweight: scales is missing"),
    "no order": (ORDERED_CASES["gptq, act-order"], lambda t: t.pop("g_idx"), "g_idx is missing"),
    "no zeros": (CASES["pack-quantized, asymmetric"], lambda t: t.pop("weight_zero_point"), "zero_point is missing"),
    "NaN": (GPTQ, lambda t: t["scales"].view(-1)[3:4].fill_(float("nan")), "scales have values that are not finite"),
    "infinity": (PACKED, lambda t: t["weight_scale"].fill_(float("inf")), "not finite"),
    "too large": (INT8, lambda t: t["weight_scale"].fill_(1e6), "float16 cannot hold"),
    "fp8 NaN": (FP8, lambda t: t["weight_scale_inv"].fill_(float("nan")), "weight_scale has values"),
    "shape": (GPTQ, put("scales", torch.ones(3, OUT).half()), r"scales is \[3, 24\] .* must be \[8, 24\] in"),
    "flat": (PACKED, put("weight_packed", torch.zeros(8, dtype=torch.int32)), r"weight_packed: it has shape \[8\]"),
    "empty": (PACKED, put("weight_packed", torch.zeros(0, 32, dtype=torch.int32)), r"has shape \[0, 32\]"),
    "codes as floats": (PACKED, put("weight_packed", torch.zeros(OUT, 32)), "dtype torch.float32"),
    "scales as codes": (GPTQ, put("scales", torch.ones(8, OUT).int()), "torch.int32, it must be .* torch.float16 or"),
    "odd inputs": (PACKED, put("weight_packed", torch.zeros(OUT, 2, dtype=torch.int32)), "16 inputs, .* of 32"),
    "groups": (PACKED, put("weight_packed", torch.zeros(OUT, 12, dtype=torch.int32)), "96 inputs are not groups"),
    "order": (GPTQ, put("g_idx", torch.full((INPUTS,), 8).int()), "inputs are in groups 8 to 8 of 8"),
    "order below": (GPTQ, put("g_idx", torch.full((INPUTS,), -1).int()), "groups -1 to -1"),
    "declared shape": (PACKED, put("weight_shape", torch.tensor([OUT, 7])), r"weight_shape is \[24, 7\]"),
    "also floats": (GPTQ, put("weight", torch.ones(OUT, INPUTS)), "a.q_proj.weight is beside it"),
    "two scales": (FP8, put("weight_scale", torch.ones(2, 8)), "weight_scale and .*weight_scale_inv are beside it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_are_no_layer_are_named(tmp_path: Path, name: str) -> None:
    case, edit, words = BAD_TENSORS[name]
    tensors = (
        case.quantize(torch.randn(64, INPUTS))[0]
        if isinstance(case, Fp8Case)
        else case.write(case.random(OUT, INPUTS))
    )
    edit(tensors)
    with pytest.raises(ConfigError, match=words) as caught:
        folder_of(tmp_path, tensors, case.section)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: a.q_proj.")
    assert "take the float model" in message
    assert "\n" not in message


def test_fp8_weights_that_are_not_finite_stop_the_load(tmp_path: Path) -> None:
    tensors = FP8.quantize(torch.randn(64, INPUTS))[0]
    tensors["weight"].view(torch.uint8)[3, 5] = 0x7F
    source = folder_of(tmp_path, tensors, FP8.section)
    with pytest.raises(ConfigError, match=r"a.q_proj.weight: the weights have values that are not finite"):
        source.matrix("a.q_proj.weight", CPU)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        parts_of(folder)
    return str(caught.value)


def test_a_tensor_that_no_layer_has_a_place_for(tmp_path: Path) -> None:
    save_quantized_llama(tmp_path, GPTQ)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.up_proj.lut": torch.ones(3)}, tmp_path / "model.safetensors")
    assert "has model.layers.0.mlp.up_proj.lut, which config.json has no place for" in refusal(tmp_path)


def test_fp8_without_a_configuration_is_refused(tmp_path: Path) -> None:
    save_quantized_llama(tmp_path, FP8_CASES["fbgemm"])
    edit_config(tmp_path, quantization_config=None)
    assert "has dtype torch.float8_e4m3fn; only float weights" in refusal(tmp_path)


def test_transformers_runs_no_quantised_weights(tmp_path: Path) -> None:
    save_quantized_llama(tmp_path, GPTQ)
    edit_config(tmp_path, architectures=["StableLmForCausalLM"], model_type="stablelm")
    assert "StableLmForCausalLM runs through transformers, which needs float weights" in refusal(tmp_path)
