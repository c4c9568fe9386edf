"""What a ready server prints."""

from __future__ import annotations

import dataclasses

import pytest

from tidewheel.engine.messages import EngineInfo
from tidewheel.server.console import describe_endpoints, describe_models, version_warning
from tidewheel.server.endpoints import DeployedModel, Endpoints

INFO = EngineInfo(
    pid=1,
    model="/m",
    architecture="LlamaForCausalLM",
    device="cpu (2 threads)",
    dtype="float32",
    vocab_size=4096,
    max_model_len=1024,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    block_size=16,
    num_blocks=2048,
    weights_bytes=12 << 20,
    activation_bytes=1 << 20,
    kv_cache_bytes=3 << 30,
    enable_prefix_caching=True,
    load_seconds=0.54,
)
MODELS = [
    DeployedModel("demo", "tidewheel", decoupled=True, engine_of=""),
    DeployedModel("demo_infer", "tidewheel", decoupled=False, engine_of="demo"),
    DeployedModel("other", "onnxruntime", decoupled=False, engine_of=""),
]


def endpoints(grpc: int = 8001, host: str = "127.0.0.1") -> Endpoints:
    return Endpoints(host=host, http=8000, grpc=grpc, metrics=8002, health=8003)


def test_what_runs_and_where() -> None:
    text = describe_models("2.51.0", "from somewhere", MODELS, {"demo": INFO}) + describe_endpoints(
        endpoints(), MODELS
    )
    for part in (
        "Triton 2.51.0 (from somewhere)",
        "demo: LlamaForCausalLM, float32, on cpu (2 threads)",
        "KV cache 3.0 GiB: 2,048 blocks of 16 tokens",
        "Maximum concurrency for 1,024 tokens per request: 32.00x",
        "demo_infer: the engine of demo",
        "other: backend onnxruntime",
        "http://127.0.0.1:8000",
        "http://127.0.0.1:8002/metrics",
        "http://127.0.0.1:8003/ready",
        "tidewheel generate --model demo ",
        "tidewheel top --metrics-url http://127.0.0.1:8002/metrics --health-url http://127.0.0.1:8003/ready",
        "curl -N http://127.0.0.1:8000/v2/models/demo/generate_stream",
    ):
        assert part in text


def test_the_gateway_is_named_where_there_is_one() -> None:
    assert "OpenAI" not in describe_endpoints(endpoints(), MODELS)
    with_gateway = dataclasses.replace(endpoints(), openai=8080)
    text = describe_endpoints(with_gateway, MODELS)
    assert "  OpenAI    http://127.0.0.1:8080/v1" in text
    assert "playground" not in text
    assert "http://127.0.0.1:8080/playground" in describe_endpoints(with_gateway, MODELS, has_playground=True)


def test_examples_name_the_server_only_when_it_is_not_the_usual_one() -> None:
    text = describe_endpoints(endpoints(grpc=9001, host="0.0.0.0"), MODELS)
    assert "tidewheel generate --url 127.0.0.1:9001 --model demo" in text


def test_no_example_without_a_model_of_ours() -> None:
    assert "Try it" not in describe_endpoints(endpoints(), MODELS[2:])


@pytest.mark.parametrize(
    ("version", "host", "warned"),
    [
        ("2.51.0", "127.0.0.1", False),
        ("2.51.0", "0.0.0.0", True),
        ("2.68.9", "10.0.0.1", True),
        ("2.69.0", "0.0.0.0", False),
        ("2.73.0", "0.0.0.0", False),
        ("", "0.0.0.0", True),
    ],
)
def test_version_warning(version: str, host: str, warned: bool) -> None:
    assert (version_warning(version, host) is not None) == warned
