"""The files of `deploy/prometheus` and `deploy/grafana`, without a server."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from common.dashboard_panels import legend, read_panels
from documentation.test_pages_and_code import anchors
from support.deploy.prometheus_server import (
    DASHBOARD,
    DEPLOY,
    HAS_PROMETHEUS,
    MISSING,
    RULES,
    alerts,
    panel_queries,
    panels,
    rules,
    without_limit,
)
from support.triton.serving import ROOT
from tidewheel.errors import TAGS
from tidewheel.metrics import TABLE

METRICS = {metric.name for metric in TABLE}
RUNBOOK = ROOT / "docs" / "runbook.md"
OF_PROMETHEUS = {"up", "ALERTS"}
NAMES = re.compile(r"(?<![\w:])(?:ALERTS|up|(?:\w+:)?(?:tidewheel|vllm)[\w:]+)(?![\w:])")
needs_prometheus = pytest.mark.skipif(not HAS_PROMETHEUS, reason=MISSING)


def names(expression: str) -> set[str]:
    """Return the metrics of a query, without what stands in texts."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAMES.findall(re.sub(r'"[^"]*"', "", expression))}


def expressions() -> list[str]:
    return [*panel_queries(), *(rule["expr"] for rule in rules())]


@pytest.mark.parametrize("expression", expressions())
def test_what_a_query_names_exists(expression: str) -> None:
    known = {*METRICS, *OF_PROMETHEUS, *(rule["record"] for rule in rules() if "record" in rule)}
    found = names(expression)
    assert found
    assert found <= known


def test_a_metric_has_one_name_and_one_row() -> None:
    assert len(METRICS) == len(TABLE)
    sources = {path for path in (ROOT / "backend").rglob("*.py") if path != ROOT / "backend/tidewheel/metrics.py"}
    again = {
        node.value
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert METRICS & again == set()


@pytest.mark.parametrize("path", [*DEPLOY.rglob("*.yaml"), *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_what_a_file_names_exists(path: Path) -> None:
    """Names like those of metrics are names of metrics, or the beginning of such names."""
    found = re.findall(r"(?<![\w:/])(vllm:\w+|tidewheel_\w+_(?:total|seconds|bucket|sum|count))\b", path.read_text())
    beginnings = {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}
    assert not {name for name in beginnings if not any(metric.startswith(name) for metric in METRICS)}


def test_every_recording_rule_is_used() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert recorded - {name for expression in expressions() for name in names(expression)} == set()


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_leads_to_a_section_of_the_runbook(alert: dict[str, dict[str, str]]) -> None:
    assert {"summary", "description", "runbook"} == alert["annotations"].keys()
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert ROOT / page == RUNBOOK
    tags = tags_of(alert)
    if "$labels.tag" in anchor:
        assert anchor == "{{ $labels.tag | toLower }}" and tags
    assert {tag.lower() for tag in tags} or anchor in anchors(RUNBOOK)
    assert {tag.lower() for tag in tags} <= anchors(RUNBOOK)
    assert without_limit(str(alert["expr"]))


def tags_of(alert: dict[str, dict[str, str]]) -> set[str]:
    return set(re.findall(r"TW(?:-[A-Z]+)+", f"{alert['expr']} {alert['labels'].get('tag', '')}"))


def test_the_tags_of_alerts_and_of_the_runbook_are_those_of_errors() -> None:
    named = {tag for alert in alerts() for tag in tags_of(alert)}
    assert named <= TAGS
    sections = set(re.findall(r"^## (TW-[A-Z-]+)$", RUNBOOK.read_text(), re.MULTILINE))
    assert named <= sections <= TAGS


def test_every_panel_says_what_it_shows() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    source = (DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text()
    titles = [panel["title"] for panel in dashboard["panels"]]
    assert len(set(titles)) == len(titles)
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"] and f"uid: {target['datasource']['uid']} " in source, panel["title"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def test_panels_are_named_by_their_title() -> None:
    assert [panel["title"] for panel in read_panels(["Running", "Cache hits"])] == ["Running", "Cache hits"]
    with pytest.raises(ValueError, match="no panel is called 'Runing': use Arrivals"):
        read_panels(["Runing"])


def test_a_line_is_named_after_its_labels() -> None:
    labels = {"class": "high", "model": "demo"}
    assert legend("{{class}} {{model}}", labels, ".*") == "high demo"
    assert legend("{{class}} {{model}}", labels, "demo") == "high"
    assert legend("{{alertname}} {{tag}}", {"alertname": "Slow"}, "demo") == "Slow"


@needs_prometheus
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--syntax-only", DEPLOY / "prometheus" / "prometheus.yml"],
        ["check", "rules", "--lint-fatal", *RULES],
        ["test", "rules", Path(__file__).parent / "alerts_test.yml"],
    ],
    ids=["config", "rules", "alerts"],
)
def test_promtool_accepts(arguments: list[str | Path]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
