"""`io_dialect: trtllm`: the tensors of the TensorRT-LLM ensemble."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from support.triton.fake_triton import InferenceRequest, InferenceResponseSender, ModelConfig, Tensor
from tidewheel.adapter.responder import TritonSink, response_tensors
from tidewheel.adapter.tensors import INPUTS, TRTLLM_OUTPUTS, ResponseFormat, complete, read_request
from tidewheel.engine.messages import RequestStats
from tidewheel.errors import ConfigError, InvalidRequest
from tidewheel.frontend.output import OutputChunk
from tidewheel.frontend.request_parameters import GenerateRequest
from tidewheel.frontend.settings import FrontendSettings
from tidewheel.sampling import TopLogprobs

DIALECT = {"parameters": {"io_dialect": {"string_value": "trtllm"}}}
# Inputs of NVIDIA/TensorRT-LLM, triton_backend/all_models/inflight_batcher_llm/ensemble/config.pbtxt, that ask for
# something offered or may ask for nothing. The last two are of older releases.
ENSEMBLE_INPUTS = {
    "text_input": "STRING", "max_tokens": "INT32", "num_return_sequences": "INT32", "bad_words": "STRING",
    "stop_words": "STRING", "exclude_input_in_output": "BOOL", "end_id": "INT32", "pad_id": "INT32", "top_k": "INT32",
    "top_p": "FP32", "temperature": "FP32", "length_penalty": "FP32", "repetition_penalty": "FP32",
    "min_tokens": "INT32", "presence_penalty": "FP32", "frequency_penalty": "FP32", "seed": "UINT64",
    "return_log_probs": "BOOL", "return_context_logits": "BOOL", "return_generation_logits": "BOOL",
    "return_perf_metrics": "BOOL", "return_num_input_tokens": "BOOL", "return_num_output_tokens": "BOOL",
    "beam_width": "INT32", "stream": "BOOL", "embedding_bias_words": "STRING", "embedding_bias_weights": "FP32",
    "guided_decoding_guide_type": "STRING", "guided_decoding_guide": "STRING",
    "random_seed": "UINT64", "min_length": "INT32",
}  # fmt: skip
ENSEMBLE_OUTPUTS = {
    "text_output": "STRING", "cum_log_probs": "FP32", "output_log_probs": "FP32", "sequence_index": "INT32",
    "kv_cache_alloc_new_blocks": "INT32", "kv_cache_reused_blocks": "INT32", "kv_cache_alloc_total_blocks": "INT32",
    "arrival_time_ns": "INT64", "first_scheduled_time_ns": "INT64", "first_token_time_ns": "INT64",
    "last_token_time_ns": "INT64", "acceptance_rate": "FP32", "total_accepted_draft_tokens": "INT32",
    "total_draft_tokens": "INT32", "num_input_tokens": "INT32", "num_output_tokens": "INT32",
}  # fmt: skip


def entry(**fields: Any) -> dict[str, Any]:
    return complete(ModelConfig({"name": "ensemble", **DIALECT, **fields})).as_dict()  # type: ignore[no-any-return]


def read(decoupled: bool = True, **arrays: Any) -> tuple[GenerateRequest, ResponseFormat]:
    request = InferenceRequest([Tensor(name, np.array(array)) for name, array in arrays.items()])
    settings = FrontendSettings(io_dialect="trtllm")
    return read_request(request, settings, decoupled=decoupled, max_prompt_bytes=99, arrival_ns=0)


def types(tensors: list[dict[str, Any]]) -> dict[str, str]:
    return {tensor["name"]: tensor["data_type"].removeprefix("TYPE_") for tensor in tensors}


def test_the_tensors_of_the_ensemble_are_declared() -> None:
    made = entry()
    assert made["max_batch_size"] == 1
    assert ENSEMBLE_INPUTS.items() <= types(made["input"]).items()
    assert ENSEMBLE_OUTPUTS.items() <= types(made["output"]).items()
    assert made["model_transaction_policy"] == {"decoupled": True}


def test_unsigned_integers_of_older_ensembles_are_kept() -> None:
    older = [{"name": "max_tokens", "data_type": "TYPE_UINT32", "dims": [-1]}]
    made = entry(max_batch_size=64, input=older, output=[])
    assert made["max_batch_size"] == 64
    assert types(made["input"])["max_tokens"] == "UINT32"
    assert len(made["input"]) == len(INPUTS)
    assert len(made["output"]) == len(TRTLLM_OUTPUTS)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ({"name": "max_tokens", "data_type": "TYPE_INT64", "dims": [1]}, ["TYPE_INT64", "TYPE_INT32 or TYPE_UINT32"]),
        ({"name": "input_ids", "data_type": "TYPE_FP32", "dims": [-1]}, ["TYPE_FP32", "has TYPE_INT32"]),
    ],
)
def test_other_types_are_refused(tensor: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        entry(input=[tensor])
    for word in words:
        assert word in str(error.value)


def test_a_batch_dimension_without_the_dialect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_size is 8.*io_dialect"):
        complete(ModelConfig({"name": "demo", "max_batch_size": 8}))


def test_a_row_is_a_request() -> None:
    request, response_format = read(
        text_input=[[b"Hi"]],
        max_tokens=np.array([[5]], np.uint32),
        stop_words=[[b"a", b""]],
        top_k=np.array([[1]], np.int32),
        top_p=np.array([[0.0]], np.float32),
        embedding_bias_weights=np.array([[0.5]], np.float32),
    )
    (source,) = request.parameters
    assert request.text == b"Hi"
    assert source.values == {
        "max_tokens": 5, "stop_words": ["a", ""], "top_k": 1, "embedding_bias_weights": [0.5],
        "include_stop_str_in_output": True,
    }  # fmt: skip
    assert response_format == ResponseFormat(is_trtllm=True, one_by_one=True)
    assert read(decoupled=False, text_input=[[b"Hi"]])[1] == ResponseFormat(is_trtllm=True)


def test_stop_words_stay_in_the_text_unless_the_request_says_no() -> None:
    request, _ = read(text_input=[[b"Hi"]], stop_words=[[b"a"]], include_stop_str_in_output=[[False]])
    (source,) = request.parameters
    assert source.values["include_stop_str_in_output"] is False


def test_two_rows_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="text_input has 2 elements"):
        read(text_input=[[b"a"], [b"b"]])


@pytest.mark.parametrize(("stream", "exclude", "echo"), [(True, False, False), (False, False, True)])
def test_a_stream_never_brings_the_prompt(stream: bool, exclude: bool, echo: bool) -> None:
    request, _ = read(text_input=[[b"Hi"]], stream=[[stream]], exclude_input_in_output=[[exclude]])
    assert (request.echo and not request.stream) is echo


STATS = RequestStats(
    arrival_ns=1, first_scheduled_ns=2, num_reused_blocks=5, num_new_blocks=6, num_cached_tokens=64,
    num_draft_tokens=8, num_accepted_draft_tokens=6,
)  # fmt: skip
CHUNK = OutputChunk(
    text="né",
    token_ids=[5, 6],
    logprobs=[TopLogprobs(-0.5, 1, (), ()), TopLogprobs(-1.5, 3, (), ())],
    cumulative_logprob=-2.0,
    num_input_tokens=4,
    finish_reason="length",
    stats=STATS,
)
ASKED = ResponseFormat(
    log_probs=True, num_input_tokens=True, num_output_tokens=True, perf_metrics=True, is_trtllm=True, one_by_one=True
)


def arrays(tensors: list[Tensor]) -> dict[str, Any]:
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in tensors}


def test_every_output_but_the_text_has_a_batch_dimension() -> None:
    (tensors,) = response_tensors([CHUNK], ASKED)
    outputs = arrays(tensors)
    assert outputs.keys() | {"sequence_index"} >= ENSEMBLE_OUTPUTS.keys()
    del outputs["first_token_time_ns"], outputs["last_token_time_ns"], outputs["priority"]
    assert outputs == {
        "text_output": ["né".encode()], "cum_log_probs": [[-2.0]], "output_log_probs": [[[-0.5, -1.5]]],
        "num_input_tokens": [[4]], "num_output_tokens": [[2]], "arrival_time_ns": [[1]],
        "first_scheduled_time_ns": [[2]], "kv_cache_reused_blocks": [[5]], "kv_cache_alloc_new_blocks": [[6]],
        "kv_cache_alloc_total_blocks": [[11]], "acceptance_rate": [[0.75]], "total_accepted_draft_tokens": [[6]],
        "total_draft_tokens": [[8]], "num_draft_tokens": [[8]], "num_accepted_draft_tokens": [[6]],
        "num_cached_tokens": [[64]], "weights": [[b"full"]],
    }  # fmt: skip
    declared = {spec.name: spec.data_type.removeprefix("TYPE_") for spec in TRTLLM_OUTPUTS}
    for tensor in tensors:
        kind = "STRING" if tensor.as_numpy().dtype == np.object_ else tensor.as_numpy().dtype.name.upper()
        assert kind.replace("FLOAT", "FP") == declared[tensor.name()], tensor.name()


def sent(one_by_one: bool, *responses: list[OutputChunk]) -> list[tuple[dict[str, Any], int]]:
    sender = InferenceResponseSender()
    sink = TritonSink(sender)
    sink.format = ResponseFormat(is_trtllm=True, one_by_one=one_by_one)
    for response in responses:
        sink.send(response)
    return [(arrays(response.output_tensors()), flags) for response, flags in sender.sent]


def test_a_response_for_each_sequence_with_news() -> None:
    first, second = OutputChunk(text="a", token_ids=[1]), OutputChunk(text="b", token_ids=[2])
    quiet = OutputChunk(text="")
    last = [msgspec.structs.replace(chunk, finish_reason="stop") for chunk in (quiet, second)]
    assert sent(True, [first, second], [quiet, second], last) == [
        ({"text_output": [b"a"], "sequence_index": [[0]]}, 0),
        ({"text_output": [b"b"], "sequence_index": [[1]]}, 0),
        ({"text_output": [b"b"], "sequence_index": [[1]]}, 0),
        ({"text_output": [b""], "sequence_index": [[0]]}, 0),
        ({"text_output": [b"b"], "sequence_index": [[1]]}, 1),
    ]


def test_a_twin_answers_once_with_all_sequences() -> None:
    last = [msgspec.structs.replace(CHUNK, text=text, logprobs=None, cumulative_logprob=None) for text in "ab"]
    assert sent(False, last) == [({"text_output": [b"a", b"b"]}, 1)]
