"""vLLM's engine arguments: each is honoured, without effect, or refused in words that help."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tidewheel.config import EngineConfig
from tidewheel.errors import ConfigError
from tidewheel.settings import (
    ARGUMENTS,
    ENTRY_ARGUMENTS,
    HONOURED,
    NOT_OFFERED,
    WITHOUT_EFFECT,
    plain,
    translate,
)

LIST = json.loads((Path(__file__).parent / "vllm_engine_arguments.json").read_text())
VLLM: dict[str, dict[str, Any]] = LIST["arguments"]
OF_TRITON = set(LIST["triton_vllm_backend"]["parameters"])


def test_the_table_has_just_the_arguments_of_the_list() -> None:
    assert {*VLLM, *OF_TRITON} == ARGUMENTS


def test_an_argument_is_of_one_kind() -> None:
    assert len(ARGUMENTS) == len(HONOURED) + len(WITHOUT_EFFECT) + len(NOT_OFFERED)


def test_what_is_honoured_is_a_setting_here() -> None:
    fields = {*EngineConfig.__dataclass_fields__, *ENTRY_ARGUMENTS}
    assert set(HONOURED.values()) <= fields


# Defaults of vLLM that ask for something else than the same words here.
UNLIKE = {"model"}


def as_text(value: object) -> str:
    """Return what a person writes into config.pbtxt."""
    return value if isinstance(value, str) else str(value) if isinstance(value, bool) else json.dumps(value)


@pytest.mark.parametrize("name", sorted(VLLM.keys() - UNLIKE))
def test_the_default_of_vllm_loads(name: str) -> None:
    value = VLLM[name].get("default")
    for given in (value, as_text(value), None, "None", "null"):
        EngineConfig.from_settings({"model": "m", name: given})


VALUES = (True, False, 1, 0, 7, 0.5, "some/name", {"a": 1}, ["a"])


@pytest.mark.parametrize("name", sorted(VLLM.keys() - UNLIKE))
def test_any_value_loads_or_is_refused_by_name(name: str) -> None:
    for value in VALUES:
        for given in (value, as_text(value)):
            try:
                EngineConfig.from_settings({"model": "m", name: given})
            except ConfigError as error:
                message = str(error)
                assert HONOURED.get(name, name) in message or name in message
                assert f"unknown setting {name!r}" not in message and "\n" not in message and len(message) < 200


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_what_is_not_offered_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate({name: "yes please"})
    assert name in str(caught.value)
    assert NOT_OFFERED[name].reason in str(caught.value)
    assert NOT_OFFERED[name].remedy in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("default_mm_loras", {"image": "/a"}, "adapters of images, and of bitsandbytes weights, are not offered"),
        ("qlora_adapter_name_or_path", "a/b", "are not offered; remove it"),
        ("max_lora_rank", 512, "it must be 1 to 256"),
        ("quantization", "quip", "quantization is 'quip': choose one of auto, none, fp8, int8, int4"),
        ("quantization_config", {"bits": 4}, "describes its quantised weights"),
        ("pipeline_parallel_size", "4", "layers are not spread over devices; set it to 1, and tensor_parallel_size"),
        ("data_parallel_size", "4", "one engine serves one copy of a model"),
        ("speculative_config", "ngram", 'no JSON object; write one, such as {"method": "ngram"}'),
        ("speculative_config", {"methd": "ngram"}, "did you mean 'speculative_config.method'?"),
        ("speculative_config", {"use_heterogeneous_vocab": True}, "a draft model shares the model's tokens"),
        ("speculative_config", {"model": "a/b", "revision": "v2"}, "set draft_model to a folder"),
        ("speculative_config", {"method": "ngram", "rejection_sample_method": "synthetic"}, "without drafts; remove"),
        ("task", "embed", "the engine generates text"),
        ("rope_scaling", {"rope_type": "yarn"}, "edit config.json"),
        ("tokenizer_mode", "slow", "tokenizer.json"),
        ("dtype", "int8", "choose one of auto, float32"),
        ("kv_cache_memory_bytes", 12, "1 MiB"),
        ("load_format", "pt", "choose one of auto, safetensors"),
        ("max_logprobs", 1000, "at most 256"),
        ("max_num_queued_reqs", 100, "set max_waiting_requests"),
    ],
)
def test_refusals_name_the_feature(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_settings({"model": "m", name: value})
    assert name in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_config": {"method": "medusa", "model": "m"}},
        {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 1}'},
        {"spec_method": "mlp_speculator"},
    ],
    ids=str,
)
def test_methods_of_vllm_that_are_not_here(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="choose one of none, prompt_lookup, first_layers, draft_model, eagle3"):
        EngineConfig.from_settings({"model": "m", **given})


def test_a_token_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        translate({"hf_token": "hf_secret"})
    assert "hf_secret" not in str(caught.value)


LOOKUP = {"speculation": "prompt_lookup", "num_speculative_tokens": 5, "draft_model": ""}
DRAFT = {"num_speculative_tokens": 8, "draft_model": "a/b"}


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "fp16"}, {"dtype": "float16"}),
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"scheduling_policy": "fcfs"}, {"scheduling_policy": "fifo"}),
        ({"scheduling_policy": "priority"}, {"scheduling_policy": "priority"}),
        ({"num_gpu_blocks_override": "64"}, {"num_blocks": 64}),
        ({"kv_cache_memory_bytes": 3 << 20}, {"kv_cache_memory_mb": 3}),
        ({"kv_cache_memory_bytes": "3145728"}, {"kv_cache_memory_mb": 3}),
        ({"kv_offloading_size": 2}, {"swap_space": 2.0}),
        ({"quantization": "awq_marlin"}, {"quantization": "auto"}),
        ({"quantization": None}, {"quantization": "auto"}),
        ({"quantization": "none"}, {"quantization": "none"}),
        ({"max_model_len": -1}, {"max_model_len": "auto"}),
        ({"max_model_len": "auto"}, {"max_model_len": "auto"}),
        ({"max_logprobs": "-1"}, {"max_logprobs": 256}),
        ({"long_prefill_token_threshold": "0"}, {"long_prefill_token_threshold": None}),
        ({"load_format": "runai_streamer"}, {"load_format": "safetensors"}),
        ({"served_model_name": ["a", "b"]}, {"served_model_name": "a"}),
        ({"seed": None, "max_num_seqs": "none"}, {"seed": 0, "max_num_seqs": 256}),
        ({"tokenizer": "m"}, {"tokenizer": ""}),
        ({"revision": "v1", "tokenizer_revision": "v1"}, {"revision": "v1"}),
        ({"enable_lora": "true", "max_cpu_loras": "None"}, {"enable_lora": True, "max_cpu_loras": None}),
        ({"max_cpu_loras": 4}, {"max_loras": 4, "max_cpu_loras": 4}),
        ({"max_cpu_loras": 16}, {"max_loras": 8}),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}, LOOKUP),
        ({"speculative_config": '{"method": "suffix", "num-speculative-tokens": 5}'}, LOOKUP),
        ({"speculative_config": {"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 4}}, LOOKUP),
        ({"speculative_model": "[ngram]", "num_speculative_tokens": "5", "ngram_prompt_lookup_max": "4"}, LOOKUP),
        ({"spec_method": "ngram", "spec_tokens": 5}, LOOKUP),
        ({"speculative_config.method": "ngram", "speculative_config.num_speculative_tokens": 5}, LOOKUP),
        ({"speculative_config": {"model": "a/b", "revision": None}}, {**DRAFT, "speculation": "draft_model"}),
        ({"speculative_config": {"model": "a/b", "method": "eagle3"}}, {**DRAFT, "speculation": "eagle3"}),
        ({"speculative_config": {"model": "a/EAGLE3-b"}}, {"speculation": "eagle3", "draft_model": "a/EAGLE3-b"}),
        ({"speculative_model": "a/b", "num_speculative_tokens": 8}, {**DRAFT, "speculation": "draft_model"}),
        ({"speculative_config": {}, "spec_model": None}, {"speculation": "none", "draft_model": ""}),
        ({"override_generation_config": {"top_k": 3}}, {"override_generation_config": '{"top_k": 3}'}),
    ],
    ids=str,
)
def test_names_and_values_of_vllm(given: dict[str, object], ours: dict[str, object]) -> None:
    config = EngineConfig.from_settings({"model": "m", **given})
    assert {name: getattr(config, name) for name in ours} == ours
    assert EngineConfig.from_settings(config.to_settings()) == config


def test_two_names_of_one_setting() -> None:
    both = {"num_gpu_blocks_override": 4, "num_blocks": "8"}
    with pytest.raises(ConfigError, match="num_gpu_blocks_override and num_blocks are one setting"):
        translate(both)
    assert translate({**both, "num_blocks": 4}) == {"num_blocks": 4}


def test_one_line_names_what_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lookup = {"method": "ngram", "prompt_lookup_max": 4}
    EngineConfig.from_settings(
        {
            "model": "m",
            "lora_dtype": "auto",
            "enable_eplb": False,
            "seed": 3,
            "quantization": None,
            "speculative_config": lookup,
        }
    )
    names = "enable_eplb, lora_dtype, speculative_config.prompt_lookup_max"
    assert [record.message for record in caplog.records] == [f"no effect here: {names}"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("None", None), (" null ", None), ("", None), ("{}", None), ("True", True), ("1", 1), ("auto", "auto")],
)
def test_plain_values_of_texts(text: str, value: object) -> None:
    assert plain(text) == value
