"""Pictures of recorded results, in ``docs/performance/``: ratios as dots, growth and latencies as curves.

``python -m benchmarks.plots`` draws all pictures again. Drawing needs matplotlib.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from benchmarks.frame import CHECKOUT, Row, cells, recorded, title

PICTURES: Final = CHECKOUT / "docs" / "performance"
CURVES: Final = "growth", "tail"
"""Subjects whose rows are points of curves."""
WIDTH: Final = 4.6
"""Inches; 440 pixels in a browser, of which a phone has 340."""
LETTERS: Final = 48
"""Letters in a line."""
GREEN, RED, YELLOW, BLUE, PURPLE = "#1a7f37", "#cf222e", "#9a6700", "#0969da", "#8250df"
COLOURS: Final = {
    "reached": (GREEN, "met what is required"),
    "met": (GREEN, "met what is required"),
    "missed": (RED, "missed it"),
    "short": (YELLOW, "short of an aim"),
    "": (BLUE, "nothing required"),
}
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # words stay text: small files, and the reader can search them
    "svg.hashsalt": "librmq",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "grid.color": "#d0d7de",
    "legend.frameon": False,
}


def draw(subject: str, rows: Sequence[Row]) -> None:
    """Write the picture of a subject's ratios, or of its curves; delete that of a subject without either."""
    with matplotlib.rc_context(STYLE):
        if subject in CURVES:
            figure = curves(rows)
        elif ratios := [row for row in rows if row.unit == "×" and row.low and row.high]:
            figure = chart(ratios)
        else:
            (PICTURES / f"{subject}.svg").unlink(missing_ok=True)
            return
        PICTURES.mkdir(exist_ok=True)
        heading = f"Results of benchmarks.{subject}"
        # A date or a version in the file would change it each time.
        figure.savefig(PICTURES / f"{subject}.svg", metadata={"Title": heading, "Date": None, "Creator": None})


def label(row: Row) -> str:
    return f"{cells(row)[3]}  {title(row)}{' (less is better)' if row.less else ''}"


def chart(rows: Sequence[Row]) -> Figure:
    """Return a picture with a line for each ratio: the median on the range of the rounds, and what is required."""
    texts = [textwrap.fill(label(row), LETTERS) for row in rows]
    heights = [0.9 + text.count("\n") + 1 for text in texts]
    places = [sum(heights[: at + 1]) - 0.4 for at in range(len(rows))]
    figure = Figure(figsize=(WIDTH, 0.19 * sum(heights) + 1.1), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", ylim=(sum(heights) + 0.4, -0.2), yticks=[])
    for text, row, place in zip(texts, rows, places, strict=True):
        axes.text(0, place - 0.4, text, transform=axes.get_yaxis_transform(), va="bottom", linespacing=1.15)
        colour, meaning = COLOURS[row.verdict]
        spread = [[row.measured - (row.low or 0)], [(row.high or 0) - row.measured]]
        axes.errorbar(row.measured, place, xerr=spread, fmt="o", color=colour, ecolor=f"{colour}80", elinewidth=4,
                      label=meaning)  # fmt: skip
        if row.least:
            axes.plot(row.least, place, "|", color=PURPLE, markersize=11, markeredgewidth=2, label="what is required")
    axes.axvline(1, color="#57606a", linewidth=1, zorder=0)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x")
    axes.spines[:].set_visible(False)
    handles, meanings = axes.get_legend_handles_labels()
    unique = dict(zip(meanings, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside upper left", ncols=2)
    return figure


def curves(rows: Sequence[Row]) -> Figure:
    """Return a picture of costs over sizes: a panel for each name before a colon, and a curve for each behind it."""
    panels: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        if row.unit == "×":
            continue  # a ratio of two of the points
        panel, _, curve = row.name.partition(": ")
        panels.setdefault(panel, {}).setdefault(curve, []).append(row)
    figure = Figure(figsize=(WIDTH, 3.6 * len(panels)), layout="constrained")
    for axes, (panel, lines) in zip(figure.subplots(len(panels), squeeze=False).flat, panels.items(), strict=True):
        for curve, points in lines.items():
            sizes = [int(point.detail.split(": ")[1].replace(",", "")) for point in points]
            axes.loglog(sizes, [point.measured for point in points], "o-", markersize=3, label=curve)
        axes.set(title=panel, xlabel=points[0].detail.split(":")[0], ylabel=points[0].unit)
        costs = [point.measured for points in lines.values() for point in points]
        axes.set_ylim(min(costs) / 4, max(costs) * 4)  # so that what is flat looks flat
        for axis, form in ((axes.xaxis, EngFormatter(sep="")), (axes.yaxis, "{x:,g}")):
            axis.set_major_formatter(form)
            axis.set_minor_locator(NullLocator())
        axes.grid()
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.2))
    return figure


if __name__ == "__main__":
    for subject, (rows, _) in recorded().items():
        draw(subject, rows)
