"""Settings of a cluster: what is wrong with them is one line that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from support.triton.serving import ROOT
from tidewheel.cluster import ClusterError
from tidewheel.cluster.cluster_settings import ClusterSettings, read_settings
from tidewheel.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "give either model or model_repository"),
        ({"model": "a/b", "model_repository": "m"}, "give either"),
        ({"model": "a/b", "models": ["x"]}, "does not go with model"),
        ({"model": "a/b", "replicas": 0}, "replicas is 0: it must be 1 to 1024"),
        ({"model": "a/b", "replicas": -1, "max_replicas": 2}, "replicas is -1: it must be 0 to 1024"),
        ({"model": "a/b", "replica_gpus": -1}, "replica_gpus is -1"),
        ({"model": "a/b", "openai_port": 70000}, "openai_port is 70000"),
        ({"model": "a/b", "router": "best"}, "router is 'best': choose one of"),
        ({"model": "a/b", "scaling_settings": {"min_replicas": 3}}, "replicas and max_replicas bound the number"),
        ({"model": "a/b", "scaling_settings": {"queue_limit_s": 3}}, "scaling_settings has 'queue_limit_s'"),
        ({"model": "a/b", "scaling_settings": {"cool_down_s": "x"}}, "scaling_settings"),
        ({"model": "a/b", "replica": 2}, "replica"),
        ({"model": "a/b", "port": 8080}, "port"),
        ({"model": "a/b", "replicas": "two"}, "replicas"),
        ({"model": "a/b", "replica_host": "0.0.0.0"}, "replica_host"),
    ],
)
def test_wrong_ones_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_settings(arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_application_for_ray_has_right_ones() -> None:
    application = yaml.safe_load((ROOT / "deploy" / "ray" / "app.yaml").read_text())["applications"][0]
    settings = read_settings(application["args"])
    assert (settings.replicas, settings.replica_host, settings.port) == (2, "node", 8080)
    module, _, name = application["import_path"].partition(":")
    source = ROOT / "backend" / Path(*module.split(".")).with_suffix(".py")
    assert f"def {name}(" in source.read_text()


def test_options_of_the_server() -> None:
    repository = ClusterSettings(model_repository="/m", models=["a", "b"], serve_arguments=["--no-restart"])
    assert repository.serve_options == ["--model-repository", "/m", "--models", "a,b", "--no-restart"]
    assert ClusterSettings(model="a/b").serve_options == ["--model", "a/b"]


def write_entry(repository: Path, name: str, *parameters: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    pairs = (one.partition("=") for one in parameters)
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, _, value in pairs]
    (repository / name / "config.pbtxt").write_text("\n".join(['backend: "tidewheel"', *lines]))


def test_gpus_are_what_the_entries_need(tmp_path: Path) -> None:
    write_entry(tmp_path, "any", "model=m")
    write_entry(tmp_path, "cpu", "model=m", "device=cpu")
    write_entry(tmp_path, "gpu", "model=m", "device=cuda")
    write_entry(tmp_path, "cpu_infer", "engine_of=cpu")

    def gpus(*models: str, has_gpus: bool, **fields: Any) -> float:
        settings = ClusterSettings(model_repository=str(tmp_path), models=list(models), **fields)
        return settings.gpus(has_gpus=has_gpus)

    assert gpus("any", has_gpus=False) == 0
    assert gpus("any", has_gpus=True) == 1
    assert gpus("cpu", "cpu_infer", has_gpus=True) == 0
    assert gpus("gpu", has_gpus=False) == 1
    assert gpus(has_gpus=False) == 1, "all of the repository"
    assert gpus("gpu", has_gpus=True, replica_gpus=0.5) == 0.5
    write_entry(tmp_path, "ranks", "model=m", "tensor_parallel_size=4")
    write_entry(tmp_path, "wrong", "model=m", "tensor_parallel_size=many")
    assert gpus("any", "ranks", "wrong", has_gpus=True) == 4
    assert gpus("ranks", has_gpus=False) == 0
    with pytest.raises(ConfigError, match="names 'none'"):
        gpus("none", has_gpus=True)
    named = ClusterSettings(model="a/b", serve_arguments=["--set", "device=cpu"])
    assert named.gpus(has_gpus=True) == 0
    of_ranks = ClusterSettings(model="a/b", serve_arguments=["--set", "tensor_parallel_size=2"])
    assert (of_ranks.gpus(has_gpus=True), of_ranks.gpus(has_gpus=False)) == (2, 0)
