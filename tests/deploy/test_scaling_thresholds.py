"""The thresholds of deploy/kubernetes are those that the scaling policies have by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tidewheel.fleet.scaling import ScalingSettings
from tidewheel.simulate.compared_policies import QueueDepthScaling

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
DEFAULTS = ScalingSettings()


def spec(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load((KUBERNETES / name).read_text())["spec"]
    return spec


def check_pace(behavior: dict[str, Any]) -> None:
    up, down = behavior["scaleUp"]["policies"], behavior["scaleDown"]
    assert up == [{"type": "Pods", "value": 1, "periodSeconds": int(QueueDepthScaling.UP_EVERY_S)}]
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": int(QueueDepthScaling.DOWN_EVERY_S)}]
    assert down["stabilizationWindowSeconds"] == DEFAULTS.scale_down_after_s


def test_the_pod_autoscaler_has_the_defaults() -> None:
    hpa = spec("hpa/server.yaml")
    (metric,) = hpa["metrics"]
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (DEFAULTS.min_replicas, DEFAULTS.max_replicas)
    assert int(metric["pods"]["target"]["averageValue"]) == DEFAULTS.waiting_per_replica
    check_pace(hpa["behavior"])


def test_keda_has_the_defaults() -> None:
    keda = spec("keda/server.yaml")
    thresholds = {trigger["name"]: float(trigger["metadata"]["threshold"]) for trigger in keda["triggers"]}
    assert thresholds == {"waiting": DEFAULTS.waiting_per_replica, "kv-cache": 100 * DEFAULTS.cache_usage}
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (DEFAULTS.min_replicas, DEFAULTS.max_replicas)
    assert keda["cooldownPeriod"] == DEFAULTS.idle_to_zero_s
    check_pace(keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"])
