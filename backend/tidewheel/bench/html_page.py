import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidewheel.bench.figure_columns import (
    LATENCIES,
    RATES,
    SERVER,
    capacity_table,
    class_table,
    measured,
    table,
    verdicts,
)
from tidewheel.bench.results import ResultRecorder, StageResult
from tidewheel.bench.tables import TextTable, number

if TYPE_CHECKING:
    from tidewheel.bench.charts import ChartImage

MOST_LAG_S = 0.05  # warned about beyond
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
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .6rem; text-align: right; border-bottom: 1px solid #eee; }
th { color: #555; font-weight: 600; border-bottom: 1px solid #999; vertical-align: bottom; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; white-space: nowrap; }
tr.first td { border-top: 1px solid #999; }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; height: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
"""
_CARDS = (
    ("capacity_ratio", "x", "times the capacity of {reference}, by the whole answer"),
    ("vllm_cpu_ratio", "x", "of vLLM's output tokens/s, offline"),
    ("saturation_per_s", "/s", "requests at saturation"),
)
_HOW = (
    "Requests are sent when their time comes (open loop) or when an earlier one ends (in flight). Targets take "
    "turns, run by run, on the same requests. Capacity: the highest rate of Poisson arrivals at which 90 % of "
    "requests meet the objective; bracketed, then bisected. Rates: mean over repeats, ± Student's 95 % interval. "
    "Latencies: quantiles of all requests of all repeats, with their 95 % percentile bootstrap interval. Goodput: "
    "requests per second answered in full within the objective; e2e: whose whole answer was there by the time at "
    "which a stream just within the objective ends, which is how answers in one piece can be judged. Those have no "
    "time per output token, and their first token comes with their last."
)


def write_files(recorder: ResultRecorder, record: Path | None) -> str:
    note, drawn = "", {}
    try:
        drawn = _draw(recorder)
    except ImportError:
        note = "no pictures: matplotlib is not installed (pip install 'tidewheel[load]')\n"
    page = recorder.folder / "report.html"
    page.write_text(render(recorder, drawn), encoding="utf-8")
    saved = [recorder.save(), *([recorder.save_summaries(record)] if record else [])]
    for picture in (picture for of_stage in drawn.values() for picture in of_stage):
        (recorder.folder / f"{picture.name}.png").write_bytes(picture.png())
        if record is not None:
            (record.parent / f"{record.stem}_{picture.name}.webp").write_bytes(picture.webp())
    return f"{note}report: {page}\nresults: {', '.join(map(str, saved))}"


def _draw(recorder: ResultRecorder) -> "dict[str, list[ChartImage]]":
    from tidewheel.bench.pictures import capacity_picture, pictures

    drawn = {result.stage.name: pictures(result) for result in recorder.stages}
    if recorder.extra.get("capacities"):
        targets = next(result.stage.targets for result in recorder.stages if result.stage.name == "capacity")
        drawn["capacity"].insert(0, capacity_picture(recorder.extra, targets))
    return drawn


def render(recorder: ResultRecorder, pictures: "Mapping[str, Sequence[ChartImage]]") -> str:
    stages = sorted(recorder.stages, key=lambda result: result.stage.is_preliminary)
    about, machine = recorder.environment, recorder.environment["machine"]
    device = machine["gpu"] or f"{machine['cores']} cores"
    headline = f"{about['started']} · commit {about['commit']} · {machine['processor']}, {device}"
    parts = [
        _cards(recorder.extra),
        f'<p class="note">{escape(_HOW)}</p>',
        wide(capacity_table(recorder.extra)),
        *(_stage(result, pictures.get(result.stage.name, ())) for result in stages),
        "<h2>To repeat it</h2>",
        facts(about),
    ]
    return document("Tidewheel benchmark", headline, parts)


def document(title: str, headline: str, parts: Iterable[str]) -> str:
    begin = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(headline)}</p>',
    ]
    return "\n".join(part for part in (*begin, *parts, "</body></html>") if part)


def _cards(findings: Mapping[str, Any]) -> str:
    cards = []
    for name, unit, text in _CARDS:
        if (value := findings.get(name)) is not None:
            sign = "≥ " if findings.get(f"{name}_is_lower_bound") else ""
            label = text.format(reference=findings.get("reference", "the baseline"))
            cards.append(f'<div class="card"><b>{sign}{number(value)}{unit}</b><span>{escape(label)}</span></div>')
    return f'<div class="cards">{"".join(cards)}</div>' if cards else ""


def _stage(result: StageResult, pictures: "Sequence[ChartImage]") -> str:
    parts = [f"<h2>{escape(result.stage.title)}</h2>", f'<p class="note">{escape(_conditions(result))}</p>']
    parts += [f"<p>{escape(text)}</p>" for text in verdicts(result)]
    parts += map(figure, pictures)
    parts += [wide(table(result, columns).without_empty()) for columns in (RATES, LATENCIES, SERVER)]
    parts += [wide(class_table(result)), *(f'<p class="note">{escape(text)}</p>' for text in _warnings(result))]
    return "\n".join(part for part in parts if part)


def _conditions(result: StageResult) -> str:
    stage = result.stage
    length = f"{stage.max_requests} requests" if stage.max_requests else f"{stage.seconds:g} s"
    if stage.longest_s is not None:
        length += f" to {stage.longest_s:g} s"
    return (
        f"Workload {stage.workload.name} ({stage.workload.source}), seed {stage.seed}; {length} a run, "
        f"{stage.repeats} {'repeat' if stage.repeats == 1 else 'repeats'}; objective: first token within "
        f"{stage.slo.ttft_s:g} s, {stage.slo.tpot_s * 1e3:g} ms per output token."
    )


def _warnings(result: StageResult) -> Iterator[str]:
    if any(run.interrupted for run in result.runs):
        yield "Cut short: its last run was interrupted."
    for (load, target), figures in measured(result):
        if (lag := figures["send_lag_p99_s"]) > MOST_LAG_S:
            yield (
                f"{target} at {load}: the client itself was late, by {lag * 1e3:.0f} ms at the 99th percentile: "
                "it, or the machine, was at its limit."
            )


def figure(picture: "ChartImage") -> str:
    data = base64.b64encode(picture.svg()).decode()
    caption = escape(picture.caption)
    image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def wide(one: TextTable) -> str:
    return f'<div class="wide">{one.as_html()}</div>' if one.rows else ""


def facts(environment: Mapping[str, Any]) -> str:
    machine, versions = environment["machine"], environment["versions"]
    shown = {
        **{name: environment[name] for name in ("command", "commit")},
        "machine": f"{machine['processor']}, {machine['cores']} cores, GPU: {machine['gpu'] or 'none'}",
        "system": machine["system"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in shown.items()) + "</dl>"
