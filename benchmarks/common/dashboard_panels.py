"""Draw panels of the Grafana dashboard from a Prometheus, without Grafana.

    python benchmarks dashboard_panels http://127.0.0.1:9090 panels.png --minutes 15

It reads title, queries, legend and unit of each panel, and asks for the range that Grafana would ask for. Grafana
draws them in its own way.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx2
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tidewheel.bench.charts import COLOURS, GREYS, panels, small_image, style

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards" / "tidewheel.json"
COLUMNS = 3
NUM_POINTS = 240
DPI = 100  # of a picture that fits into documentation
_MS_BELOW_S = 1.0  # axes that end lower are in milliseconds
_OWN_COLOURS = {"critical": 1, "high": 3, "normal": 0, "low": 2, "0.5": 0, "0.99": 1}  # the same in every panel
_GREY = ("arrivals", "limit")
_LEAST_TOP = {"reqps": 1.0, "short": 1.0}


class Span(NamedTuple):
    """Time that is shown, in Unix seconds, and the part of it that is shaded."""

    start: float
    end: float
    shaded: tuple[float, float] | None = None


class Line(NamedTuple):
    legend: str
    points: list[tuple[float, float]]  # Unix seconds, value


def read_panels(titles: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the panels with queries, or those of these titles. Raise `ValueError` for an unknown one."""
    every = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"] if "targets" in panel}
    if unknown := [title for title in titles if title not in every]:
        raise ValueError(f"no panel is called {unknown[0]!r}: use {', '.join(every)}")
    return [every[title] for title in titles or every]


def read_lines(prometheus: str, panel: Mapping[str, Any], model: str, span: Span) -> list[Line]:
    lines = []
    for target in panel["targets"]:
        step = max((span.end - span.start) / NUM_POINTS, 0.25)
        asked = {"query": target["expr"].replace("$model", model), "start": span.start, "end": span.end, "step": step}
        url = f"{prometheus.rstrip('/')}/api/v1/query_range"
        answer = httpx2.get(url, params=asked, timeout=30).raise_for_status()
        for one in answer.json()["data"]["result"]:
            points = [(at, float(value)) for at, value in one["values"] if math.isfinite(float(value))]
            lines.append(Line(legend(target["legendFormat"], one["metric"], model), points))
    return lines


def legend(template: str, labels: Mapping[str, str], model: str) -> str:
    """Return the name of a line, without the model if there is one."""
    if labels.get("model") == model:
        template = template.replace(" {{model}}", "")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template).strip()


def draw(
    prometheus: str,
    chosen: Sequence[Mapping[str, Any]],
    model: str,
    span: Span,
    kind: Literal["png", "webp"] = "png",
) -> bytes:
    """Return an image file."""
    num_rows = math.ceil(len(chosen) / COLUMNS)
    figure, every = panels(COLUMNS, num_rows, width=12.0, height=2.8 * num_rows)
    for axes, panel in zip(every, chosen, strict=False):
        _draw_panel(axes, panel, read_lines(prometheus, panel, model, span), span)
    for axes in every[len(chosen) :]:
        axes.set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, facecolor="white")
    return small_image(drawn.getvalue(), kind)


def _draw_panel(axes: Axes, panel: Mapping[str, Any], lines: Sequence[Line], span: Span) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    style(axes, panel["title"])
    if span.shaded is not None:
        axes.axvspan(*(at - span.start for at in span.shaded), color="#F2F2F2", zorder=0)
    for index, line in enumerate(lines):
        is_grey = line.legend.startswith(_GREY)
        colour = COLOURS[_OWN_COLOURS.get(line.legend, index) % len(COLOURS)]
        axes.plot(
            [at - span.start for at, _ in line.points],
            [value for _, value in line.points],
            color=GREYS[0] if is_grey else colour,
            linestyle="--" if is_grey else "-",
            linewidth=1.6,
            label=line.legend,
        )
    for step in defaults.get("thresholds", {}).get("steps", []):
        if step["value"] is not None:
            axes.axhline(step["value"], color="#BB0000", linewidth=0.9, linestyle=":")
    axes.set_xlim(0, span.end - span.start)
    highest = max(axes.get_ylim()[1], _LEAST_TOP.get(defaults["unit"], 1e-3))
    axes.set_ylim(0, 1.05 * defaults["max"] if "max" in defaults else highest)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g} s"))
    _set_unit(axes, defaults["unit"])
    if lines:
        place = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.1), "ncols": 5}
        axes.legend(**place, fontsize=8, frameon=False, handlelength=1.2, columnspacing=1.0, handletextpad=0.4)


def _set_unit(axes: Axes, unit: str) -> None:
    formats = {
        "short": lambda value, _: f"{value:g}",
        "percentunit": lambda value, _: f"{100 * value:.0f}%",
        "reqps": lambda value, _: f"{value:g}/s",
    }
    if unit == "s" and axes.get_ylim()[1] < _MS_BELOW_S:
        formats["s"] = lambda value, _: f"{1000 * value:.0f} ms"
    elif unit == "s":
        formats["s"] = lambda value, _: f"{value:g} s"
    if unit in formats:
        axes.yaxis.set_major_formatter(FuncFormatter(formats[unit]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prometheus", help="its address, as http://127.0.0.1:9090")
    parser.add_argument("out", type=Path, help="a PNG")
    parser.add_argument("--minutes", type=float, default=15.0, help="until now (default: %(default)g)")
    parser.add_argument("--model", default=".*", help="entries of the repository, as a pattern (default: all)")
    parser.add_argument("--panel", action="append", default=[], metavar="TITLE", help="repeatable (default: all)")
    arguments = parser.parse_args()
    if not arguments.prometheus.startswith(("http://", "https://")):
        parser.error(f"the address is {arguments.prometheus!r}: write http://HOST:PORT")
    if not arguments.minutes > 0:
        parser.error(f"--minutes is {arguments.minutes:g}: it must be above 0")
    now = time.time()
    try:
        chosen = read_panels(arguments.panel)
        picture = draw(arguments.prometheus, chosen, arguments.model, Span(now - 60 * arguments.minutes, now))
    except ValueError as error:
        parser.error(str(error))
    except httpx2.HTTPError as error:
        parser.error(f"{arguments.prometheus} does not answer: {error}")
    arguments.out.write_bytes(picture)
    print(arguments.out)


if __name__ == "__main__":
    main()
