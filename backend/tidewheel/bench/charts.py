import io
import math
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito's first, for any colour vision; greys for baselines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#882255", "#44AA99", "#F0C000")
GREYS = ("#555555", "#999999")
INK, GRID = "#222222", "#DDDDDD"
MARKERS = "osD^vPX<>"
WIDTH = 9.0  # inches: 900 pixels of a page
_MOST_DECADES = 2.3
_MOST_ENTRIES = 6


class ChartImage(NamedTuple):
    name: str
    caption: str
    figure: Figure

    def svg(self) -> bytes:
        return self._saved("svg", {"Date": None})

    def png(self) -> bytes:
        return small_image(self._saved("png", {}), "png")

    def webp(self) -> bytes:
        return small_image(self._saved("png", {}), "webp")

    def _saved(self, kind: str, metadata: dict[str, None]) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format=kind, dpi=120, facecolor="white", metadata=metadata)
        return buffer.getvalue()


def small_image(picture: bytes, kind: Literal["png", "webp"]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(buffer, kind, optimize=True, lossless=True, quality=100, method=6)  # each format takes what it knows
    return buffer.getvalue()


def panels(
    columns: int = 1,
    rows: int = 1,
    *,
    width: float = WIDTH,
    height: float = 4.4,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey).flat)


def style(axes: Axes, title: str, note: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=18 if note else 6, fontweight="bold")
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=9, color="#666666")
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#888888")
    axes.tick_params(colors=INK, labelsize=9)


def logarithmic(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    is_wide = low > 0 and math.log10(high / low) > _MOST_DECADES
    axis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def name_lines(axes: Axes, *, least: float = 0.06) -> None:
    ends = []
    for line in axes.get_lines():
        points = np.asarray(line.get_xydata())
        if not str(line.get_label()).startswith("_") and len(points):
            at = axes.transAxes.inverted().transform(axes.transData.transform(points[-1]))
            ends.append((float(at[1]), float(at[0]), str(line.get_label()), line.get_color()))
    lowest = -least
    for height, right, label, colour in sorted(ends):
        lowest = max(height, lowest + least)
        axes.annotate(label, (right, lowest), (6, 0), xycoords="axes fraction", textcoords="offset points",
                      color=colour, va="center", fontsize=9)  # fmt: skip


def legend_below(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(_MOST_ENTRIES, len(labels)), frameon=False, fontsize=9
    )
