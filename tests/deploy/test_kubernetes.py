"""The manifests of `deploy/kubernetes`: valid, with commands and probes that Tidewheel has, and confined.

Kubernetes' own kinds are validated with its published schemas, in which nothing unknown is allowed. Those of KEDA and
of the Gateway API are restated in `schema/custom_resources.json`, as far as manifests may use them, in the same way.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from support.triton.serving import ROOT
from tidewheel.cli import gateway, serve
from tidewheel.gateway.gateway_options import Address

FOLDER = ROOT / "deploy" / "kubernetes"
CUSTOM = json.loads((Path(__file__).parent / "schema" / "custom_resources.json").read_text(encoding="utf-8"))
VERSION = "1.31"  # the oldest of these manifests: `sleep` in preStop
HEALTH_PATHS = {"/ready", "/live", "/health"}

Resource = dict[str, Any]


def resources() -> Iterator[tuple[str, Resource]]:
    for path in sorted(FOLDER.rglob("*.yaml")):
        for resource in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(FOLDER)} {resource['kind']} {resource['metadata']['name']}", resource


RESOURCES = dict(resources())
DEPLOYMENTS = {name: one for name, one in RESOURCES.items() if one["kind"] == "Deployment"}


def validate(resource: Resource) -> None:
    if schema := CUSTOM.get(resource["kind"]):
        jsonschema.validate(resource, schema, cls=jsonschema.Draft202012Validator)
    else:
        kubernetes_validate.validate(resource, VERSION, strict=True)


def pod_of(deployment: Resource) -> Resource:
    found: Resource = deployment["spec"]["template"]["spec"]
    return found


def container_of(deployment: Resource) -> Resource:
    (found,) = pod_of(deployment)["containers"]
    assert isinstance(found, dict)
    return found


def labels_of(deployment: Resource) -> dict[str, str]:
    found: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
    return found


@pytest.mark.parametrize("resource", RESOURCES.values(), ids=RESOURCES)
def test_a_manifest_is_valid(resource: Resource) -> None:
    validate(resource)


MISTAKES: list[tuple[str, Callable[[Resource], Any]]] = [
    ("Deployment", lambda one: pod_of(one).update(terminationGracePeriod=5)),
    ("Deployment", lambda one: container_of(one)["readinessProbe"].update(failureTreshold=1)),
    ("Service", lambda one: one["spec"]["ports"][0].update(port="8001")),
    ("HorizontalPodAutoscaler", lambda one: one["spec"].pop("maxReplicas")),
    ("ScaledObject", lambda one: one["spec"].update(minReplicas=1)),
    ("ScaledObject", lambda one: one["spec"]["triggers"][0]["metadata"].update(threshold=8)),
    ("InferencePool", lambda one: one["spec"].pop("endpointPickerRef")),
    ("InferencePool", lambda one: one["spec"].update(targetPortNumber=8080)),
    ("HTTPRoute", lambda one: one["spec"]["rules"][0]["timeouts"].update(request="never")),
]


@pytest.mark.parametrize(("kind", "mistake"), MISTAKES)
def test_a_mistake_is_found(kind: str, mistake: Callable[[Resource], Any]) -> None:
    resource = copy.deepcopy(next(one for one in RESOURCES.values() if one["kind"] == kind))
    mistake(resource)
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        validate(resource)


def arguments_of(command: Any, container: Resource) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    return parser.parse_args(container["args"])


def test_the_server_is_started_as_its_ports_and_volumes_say() -> None:
    deployment = DEPLOYMENTS["server.yaml Deployment tidewheel"]
    container = container_of(deployment)
    given = arguments_of(serve, container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    defaults = [given.http, given.grpc, given.metrics, given.health]
    assert [ports[name] for name in ("http", "grpc", "metrics", "health")] == defaults
    assert ports["openai"] == given.openai
    assert given.open_metrics  # the picker of the inference extension has no key
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert str(given.model_repository) in mounts and str(Path(given.api_keys).parent) in mounts
    exchange = next(one for one in pod_of(deployment)["volumes"] if one["name"] == mounts["/dev/shm"])
    assert exchange["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert grace_of(deployment) >= seconds_before_term(container) + given.drain_s + 10


def test_the_gateway_finds_the_servers_by_their_headless_service() -> None:
    deployment = DEPLOYMENTS["gateway.yaml Deployment tidewheel-gateway"]
    container = container_of(deployment)
    given = arguments_of(gateway, container)
    address = Address.parse(given.url[0])
    service = RESOURCES["server.yaml Service tidewheel"]["spec"]
    assert address.is_name_of_many and service["clusterIP"] == "None"
    assert {one.partition(":")[0] for one in address[:3]} == {"tidewheel"}
    assert {int(one.partition(":")[2]) for one in address[:3]} == {port["port"] for port in service["ports"]}
    assert container["command"] == ["tidewheel", "gateway"]
    assert [port["containerPort"] for port in container["ports"]] == [given.port]
    assert grace_of(deployment) >= seconds_before_term(container) + given.drain_s + 10


def grace_of(deployment: Resource) -> float:
    return float(pod_of(deployment)["terminationGracePeriodSeconds"])


def seconds_before_term(container: Resource) -> float:
    return float(container["lifecycle"]["preStop"]["sleep"]["seconds"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_a_pod_may_do_little_and_tells_its_state(deployment: Resource) -> None:
    pod, container = pod_of(deployment), container_of(deployment)
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
    assert "memory" in container["resources"]["limits"]
    named = {port["name"] for port in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        asked = probe.get("httpGet") or probe["tcpSocket"]
        assert asked["port"] in named
        assert asked.get("path", "/ready") in HEALTH_PATHS


def test_whatever_selects_pods_selects_those_of_a_deployment() -> None:
    every = [labels_of(deployment) for deployment in DEPLOYMENTS.values()]
    selectors = []
    for resource in RESOURCES.values():
        spec = resource["spec"]
        selector = spec.get("selector") or spec.get("podSelector")
        if selector is not None:
            selectors.append(selector.get("matchLabels", selector))
    assert len(selectors) == 8
    assert all(any(selector.items() <= labels.items() for labels in every) for selector in selectors)


def test_what_scales_scales_the_servers() -> None:
    targets = [one["spec"]["scaleTargetRef"]["name"] for one in RESOURCES.values() if "scaleTargetRef" in one["spec"]]
    assert targets == ["tidewheel", "tidewheel"]
