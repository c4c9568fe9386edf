"""A real Prometheus with the configuration of `deploy/prometheus`, faster and on free ports."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from support.triton.serving import ROOT, Server, free_ports, wait_for

DEPLOY = ROOT / "deploy"
RULES = [DEPLOY / "prometheus" / name for name in ("recording.yml", "alerts.yml")]
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "tidewheel.json"
MISSING = "no prometheus and promtool on PATH: apt-get install prometheus"
HAS_PROMETHEUS = bool(shutil.which("prometheus") and shutil.which("promtool"))
START_LIMIT_S = 180.0
_COMPARISON = re.compile(r"\s[<>]=? [\d.]+$")

Sample = tuple[dict[str, str], float]


def rules() -> list[dict[str, Any]]:
    """Return all recording rules and alerts."""
    documents = (yaml.safe_load(path.read_text()) for path in RULES)
    return [rule for document in documents for group in document["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard that have queries."""
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if "targets" in panel]


def panel_queries() -> list[str]:
    """Return every query of the dashboard, for all models."""
    return [target["expr"].replace("$model", ".*") for panel in panels() for target in panel["targets"]]


def without_limit(expression: str) -> str:
    """Return what an alert compares with its limit."""
    value, count = _COMPARISON.subn("", expression)
    assert count == 1, f"no limit at the end of {expression!r}"
    return value


@dataclass(frozen=True)
class Prometheus:
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, **parameters: str) -> Any:
        answer = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def query(self, expression: str) -> list[Sample]:
        """Return the samples that are numbers."""
        samples = [(one["metric"], float(one["value"][1])) for one in self.ask("query", query=expression)["result"]]
        return [(labels, value) for labels, value in samples if not math.isnan(value)]

    def firing(self) -> list[dict[str, str]]:
        """Return the labels of the alerts that fire."""
        return [one["labels"] for one in self.ask("alerts")["alerts"] if one["state"] == "firing"]

    def targets(self) -> dict[str, str]:
        """Return the health of every job."""
        return {target["labels"]["job"]: target["health"] for target in self.ask("targets")["activeTargets"]}

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/-/ready", timeout=60).ok
        except requests.ConnectionError:
            return False


def _hasten(rule: str) -> str:
    return rule if re.match(r"- alert: \w+Down\n", rule) else re.sub(r"for: \d+[sm]\b", "for: 1s", rule)


def write_configuration(folder: Path, server: Server, gateway_key: str, *, interval: str, window: str) -> Path:
    """Copy the configuration: other targets, this interval, rates over `window`, and alerts after a second.

    Not those of a server that is down: on a busy machine a scrape may take longer than an interval.
    """
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    triton, gateway = config["scrape_configs"]
    assert (triton["job_name"], gateway["job_name"]) == ("tritonserver", "gateway")
    triton["static_configs"] = [{"targets": [f"127.0.0.1:{server.metrics_port}"]}]
    gateway["static_configs"] = [{"targets": [f"127.0.0.1:{server.openai_port}"]}]
    (folder / "gateway-key").write_text(gateway_key)
    gateway["authorization"] = {"type": "Bearer", "credentials_file": "gateway-key"}
    for path in RULES:
        text = "".join(map(_hasten, re.split("(?=- alert: )", path.read_text())))
        (folder / path.name).write_text(text.replace("[1m]", f"[{window}]"))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    return folder / "prometheus.yml"


@contextmanager
def prometheus(
    folder: Path, server: Server, *, gateway_key: str, interval: str = "1s", window: str = "1m"
) -> Iterator[Prometheus]:
    """Scrape the server and its gateway inside the block."""
    (port,) = free_ports(1)
    config = write_configuration(folder, server, gateway_key, interval=interval, window=window)
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=subprocess.STDOUT
        )
    running = Prometheus(port)
    try:
        wait_for(running.is_ready, START_LIMIT_S, f"ready Prometheus (see {folder / 'prometheus.log'})")
        yield running
    finally:
        process.terminate()
        process.wait(60)
