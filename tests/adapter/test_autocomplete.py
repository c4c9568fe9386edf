"""What the backend adds to an entry's configuration, and what it refuses to build on."""

from __future__ import annotations

from typing import Any

import pytest

from support.triton.fake_triton import ModelConfig
from tidewheel.adapter.tensors import INPUTS, OUTPUTS, complete
from tidewheel.errors import ConfigError


def declared(name: str, data_type: str, dims: list[int]) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": dims, "optional": False, "format": "FORMAT_NONE"}


def test_an_empty_entry_gets_everything() -> None:
    entry = complete(ModelConfig({"name": "demo"})).as_dict()
    assert [tensor["name"] for tensor in entry["input"]] == [spec.name for spec in INPUTS]
    assert [tensor["name"] for tensor in entry["output"]] == [spec.name for spec in OUTPUTS]
    assert all(tensor["optional"] for tensor in entry["input"])
    assert entry["model_transaction_policy"] == {"decoupled": True}
    assert entry["max_batch_size"] == 0


def test_tensors_of_both_dialects_are_there() -> None:
    entry = complete(ModelConfig({"name": "demo"})).as_dict()
    inputs = {tensor["name"]: (tensor["data_type"], tensor["dims"]) for tensor in entry["input"]}
    assert inputs["text_input"] == ("TYPE_STRING", [1])
    assert inputs["sampling_parameters"] == ("TYPE_STRING", [1])
    assert inputs["return_finish_reason"] == ("TYPE_BOOL", [1])
    assert inputs["stop_words"] == inputs["bad_words"] == ("TYPE_STRING", [-1])
    assert inputs["temperature"] == ("TYPE_FP32", [1])
    assert inputs["seed"] == ("TYPE_UINT64", [1])
    assert inputs["input_ids"] == ("TYPE_INT32", [-1])


def test_a_twin_stays_not_decoupled() -> None:
    config = ModelConfig({"name": "twin", "model_transaction_policy": {"decoupled": False}})
    assert complete(config).as_dict()["model_transaction_policy"] == {"decoupled": False}


def test_declared_tensors_are_kept() -> None:
    text, output = declared("text_input", "TYPE_STRING", [-1]), declared("text_output", "TYPE_STRING", [-1])
    entry = complete(ModelConfig({"name": "demo", "input": [text], "output": [output]})).as_dict()
    assert entry["input"][0] == text
    assert len(entry["input"]) == len(INPUTS)
    assert len(entry["output"]) == len(OUTPUTS)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"max_batch_size": 8}, ["max_batch_size", "8"]),
        ({"input": [declared("text_input", "TYPE_INT32", [1])]}, ["text_input", "TYPE_INT32", "TYPE_STRING"]),
        ({"input": [declared("top_k", "TYPE_INT32", [1, 1])]}, ["top_k", "[1, 1]", "[1]"]),
        ({"input": [declared("prompt", "TYPE_STRING", [1])]}, ["'prompt'"]),
        ({"output": [declared("texts", "TYPE_STRING", [1])]}, ["'texts'"]),
    ],
)
def test_contradictions_are_one_line(entry: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        complete(ModelConfig({"name": "demo", **entry}))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
