"""Self-contained HTML page of results."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from tidewheel.bench.columns import LATENCIES, RATES, SERVER, Table, class_table, number, table, without_empty
from tidewheel.bench.results import Recorder, StageResult

if TYPE_CHECKING:
    from tidewheel.bench.pictures import Picture

MOST_LAG_S = 0.05  # warned about beyond this
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1240px; margin: 2rem auto;
  padding: 0 1.5rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; } h2 { font-size: 1.25rem; margin: 2.4rem 0 .3rem; }
p.note, figcaption, .facts { color: #555; font-size: .9rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.card { border: 1px solid #ddd; border-radius: .5rem; padding: .7rem 1rem; min-width: 9.5rem; }
.card b { display: block; font-size: 1.5rem; } .card span { color: #555; font-size: .85rem; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid #eee; }
th { color: #555; font-weight: 600; border-bottom: 1px solid #999; vertical-align: bottom; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tr.first td { border-top: 1px solid #999; }
figure { margin: 1.2rem 0; } figure img { width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
"""
_CARDS = (
    ("goodput_ratio", "times the goodput of {reference} at its knee"),
    ("goodput_ratio_e2e", "the same, judged by the whole answer"),
    ("p99_ttft_ratio", "of the p99 time to first token of {reference}"),
    ("vllm_cpu_ratio", "of vLLM's output tokens/s, offline"),
    ("knee_per_s", "requests/s at the knee of {reference}"),
    ("capacity_per_s", "requests/s of capacity"),
)
_HOW = (
    "Requests are sent when their time comes (open loop) or when an earlier one ends (in flight). Targets take "
    "turns, run by run, on the same requests. Rates: mean over repeats, ± Student's 95 % interval. Latencies: "
    "quantiles of all requests of all repeats, with their 95 % percentile bootstrap interval. Goodput: requests per "
    "second answered in full within the objective; e2e: whose whole answer was there by the time at which a stream "
    "just within the objective ends, which is how answers in one piece can be judged. Those have no time per output "
    "token, and their first token comes with their last."
)


def render(recorder: Recorder, pictures: Mapping[str, Sequence[Picture]]) -> str:
    """Render the page; `pictures` are by stage name."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Tidewheel benchmark</title>',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>Tidewheel benchmark</h1>",
        f'<p class="note">{escape(_headline(recorder.environment))}</p>',
        _cards(recorder.extra),
        f'<p class="note">{escape(_HOW)}</p>',
        *(_stage(result, pictures.get(result.stage.name, ())) for result in recorder.stages),
        "<h2>To repeat it</h2>",
        _facts(recorder.environment),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part)


def _headline(environment: Mapping[str, Any]) -> str:
    machine = environment["machine"]
    device = machine["gpu"] or f"{machine['cores']} cores"
    return f"{environment['started']} · commit {environment['commit']} · {machine['processor']}, {device}"


def _cards(findings: Mapping[str, Any]) -> str:
    cards = []
    for name, text in _CARDS:
        value = findings.get(name)
        if value is not None:
            sign = "≥ " if findings.get(f"{name}_is_lower_bound") else ""
            label = text.format(reference=findings.get("reference", "the baseline"))
            unit = "x" if name.endswith(("_ratio", "_e2e")) else ""
            cards.append(f'<div class="card"><b>{sign}{number(value)}{unit}</b><span>{escape(label)}</span></div>')
    for target, knee in findings.get("knees_per_s", {}).items():
        cards.append(f'<div class="card"><b>{number(knee)}/s</b><span>knee of {escape(target)}</span></div>')
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _stage(result: StageResult, pictures: Sequence[Picture]) -> str:
    parts = [f"<h2>{escape(result.stage.title)}</h2>", f'<p class="note">{escape(_conditions(result))}</p>']
    parts += [_figure(picture) for picture in pictures]
    parts += [_table(without_empty(table(result, columns))) for columns in (RATES, LATENCIES, SERVER)]
    parts += [
        _table(class_table(result)),
        *(f'<p class="note">{escape(warning)}</p>' for warning in _warnings(result)),
    ]
    return "\n".join(part for part in parts if part)


def _conditions(result: StageResult) -> str:
    stage = result.stage
    length = f"{stage.max_requests} requests" if stage.max_requests else f"{stage.seconds:g} s"
    return (
        f"Workload {stage.workload.name} ({stage.workload.source}), seed {stage.seed}; {length} a run, "
        f"{stage.repeats} {'repeat' if stage.repeats == 1 else 'repeats'}; objective: first token within "
        f"{stage.slo.ttft_s:g} s, {stage.slo.tpot_s * 1e3:g} ms per output token."
    )


def _warnings(result: StageResult) -> Iterator[str]:
    if any(run.interrupted for run in result.runs):
        yield "Cut short: its last run was interrupted."
    for index, load in enumerate(result.stage.loads):
        for target in result.stage.targets:
            lag = result.figures(target.name, index).get("send_lag_p99_s", 0.0)
            if lag > MOST_LAG_S:
                yield (
                    f"{target.name} at {load}: the client itself was late, by {lag * 1e3:.0f} ms at the 99th "
                    "percentile: it, or the machine, was at its limit."
                )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.svg()).decode()
    caption = escape(picture.caption)
    image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def _table(one: Table) -> str:
    if not one.rows:
        return ""
    header = "".join(f"<th>{escape(cell)}</th>" for cell in one.header)
    lines, before = [], ""
    for row in one.rows:
        mark = ' class="first"' if row[0] != before and before else ""
        load = row[0] if row[0] != before else ""
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (load, *row[1:]))
        lines.append(f"<tr{mark}>{cells}</tr>")
        before = row[0]
    return f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _facts(environment: Mapping[str, Any]) -> str:
    machine, versions = environment["machine"], environment["versions"]
    facts = {
        "command": environment["command"],
        "commit": environment["commit"],
        "machine": f"{machine['processor']}, {machine['cores']} cores, GPU: {machine['gpu'] or 'none'}",
        "system": machine["system"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items()) + "</dl>"
