"""Targets as people write them."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest

from tidewheel.bench import BenchError, peer_engines
from tidewheel.bench.deploy import Deployment, deployed
from tidewheel.bench.targets import BASELINES, STRATEGIES, parse_target, parse_targets
from tidewheel.bench.transports.peer import PeerTransport


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_our_engine_with_it(name: str) -> None:
    target = parse_target(name)
    assert (target.name, target.kind, target.settings) == (name, "ours", {"scheduling_strategy": name})


@pytest.mark.parametrize("name", BASELINES)
def test_baselines(name: str) -> None:
    assert parse_target(name).settings == {"entry": name}


def test_settings_and_a_name_of_its_own() -> None:
    target = parse_target('big=static,batch_size=32,tenants={"a": 1, "b": 2}')
    assert target.name == "big"
    assert target.settings == {
        "scheduling_strategy": "static",
        "batch_size": "32",
        "tenants": '{"a": 1, "b": 2}',
    }


@pytest.mark.parametrize(
    ("text", "kind", "name", "model"),
    [
        ("grpc://host:8001/demo", "grpc", "host:8001/demo", "demo"),
        ("x=http://host/v2/models/demo/generate_stream", "generate_stream", "x", "demo"),
        ("http://host/v2/models/demo_infer/infer", "infer", "host/v2/models/demo_infer/infer", "demo_infer"),
        ("v=http://host:8000/v1/completions?model=qwen", "openai", "v", ""),
        ("https://host/v1/chat/completions", "openai", "host/v1/chat/completions", ""),
    ],
)
def test_addresses(text: str, kind: str, name: str, model: str) -> None:
    target = parse_target(text)
    assert (target.kind, target.name, target.model) == (kind, name, model)
    assert target.transport(with_ids=False) is not None


def test_an_address_with_metrics() -> None:
    target = parse_target("a=grpc://host:8001/demo,metrics=http://host:8002/metrics")
    assert target.url == "grpc://host:8001/demo"
    assert target.settings["metrics"] == "http://host:8002/metrics"


def test_a_peer_of_another_environment() -> None:
    for text, name in ((f"vllm={sys.executable}", "vllm"), (f"fast=vllm={sys.executable},threads=2", "fast")):
        target = parse_target(text)
        assert (target.name, target.kind, target.python) == (name, "vllm", sys.executable)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("continous", "neither a URL nor one of"),
        ("vllm", "give the python of its environment"),
        ("vllm=/no/such/python", "no python at '/no/such/python'"),
        ("grpc://host:8001", "write grpc://"),
        ("http://host/v2/models/demo", "write grpc://"),
        ("ftp://host/demo", "write grpc://"),
        ("static,batch_size=1,batch_size=2", "batch_size stands twice"),
    ],
)
def test_what_names_nothing_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(BenchError) as refusal:
        parse_target(text)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_two_targets_of_one_name() -> None:
    with pytest.raises(BenchError, match="stands twice"):
        parse_targets(["static", "static,batch_size=4"])


@pytest.mark.parametrize(
    "text",
    [
        "transformers,max_num_seqs=4",
        f"vllm={sys.executable},cache_gib=4",
        f"openvino={sys.executable},enforce_eager=true",
        "grpc://host:8001/demo,max_num_seqs=4",
    ],
)
def test_an_option_that_a_target_would_not_read_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match=f"{text.rpartition(',')[2].partition('=')[0]} is no option of"):
        parse_target(text)


def test_options_of_peers_are_those_that_are_read() -> None:
    source = inspect.getsource(peer_engines)
    for name in set().union(*peer_engines.OPTIONS.values()):
        assert f'options["{name}"]' in source or f'options.get("{name}"' in source or f'(options, "{name}")' in source


def test_settings_of_our_engines_count_for_the_offline_engine_too(tmp_path: Path) -> None:
    deployment = Deployment(model="m", dtype="float32", settings={"max_num_seqs": "4"}, folder=tmp_path)
    targets = parse_targets(["llm", "few=llm,max_num_seqs=2", "transformers"])
    with deployed(deployment, targets, with_ids=False) as places:
        made = {name: place.transport for name, place in places.items()}
    options = {name: json.loads(one._command[-1]) for name, one in made.items() if isinstance(one, PeerTransport)}
    plain = {"model": "m", "dtype": "float32"}
    assert options["llm"] == plain | {"max_num_seqs": "4"}
    assert options["few"] == plain | {"max_num_seqs": "2"}
    assert options["transformers"] == plain


@pytest.mark.parametrize(("text", "is_on"), [("true", True), ("False", False), (None, True)])
def test_an_option_of_a_peer_can_be_switched_off(text: str | None, is_on: bool) -> None:
    assert peer_engines.is_on({} if text is None else {"enforce_eager": text}, "enforce_eager") is is_on
    with pytest.raises(ValueError, match="it must be true or false"):
        peer_engines.is_on({"enforce_eager": "no"}, "enforce_eager")
