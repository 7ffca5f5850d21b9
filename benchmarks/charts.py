"""The results of benchmarks: a table for each in ``benchmarks/results/``, and a picture of it in ``docs/performance/``.

A picture of ratios has a line for each: the median as a dot, the range of the rounds, and a bar where a figure is
required. A picture of growth has curves of costs over sizes. All figures come from the tables, so that both agree.

``python -m benchmarks.charts`` draws all pictures again. Drawing needs matplotlib.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKOUT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = CHECKOUT / "benchmarks" / "results"
PICTURES: Final = CHECKOUT / "docs" / "performance"

WIDTH: Final = 7.9
"""Inches, as all lengths below; 760 pixels in a browser."""
LINE: Final = 0.22
HEAD: Final = 0.42
"""Above the lines: what the colours mean, and the marks of the axis."""
LEFT: Final = 3.75
"""Where the axis begins; figures and names stand in front of it, which is what a phone shows first."""
RIGHT: Final = 7.7
COLOURS: Final = {"reached": "#1a7f37", "met": "#1a7f37", "missed": "#cf222e", "short": "#9a6700", "": "#0969da"}
LEGEND: Final = (
    ("met", "met what is required"), ("missed", "missed it"), ("short", "short of an aim"), ("", "nothing required")
)  # fmt: skip
INK, GREY, PALE = "#24292f", "#57606a", "#d0d7de"
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # words stay text: small files, and the reader can search them
    "svg.hashsalt": "librmq",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "grid.color": PALE,
    "legend.fontsize": 8.5,
}


@dataclass(frozen=True)
class Ratio:
    """A row of a table that compares librmq with something else."""

    path: str
    case: str
    against: str
    measured: float
    shown: str
    least: float
    most: float
    required: float | None
    is_cost: bool
    """Less is better."""
    verdict: str


@dataclass
class Panel:
    """Curves of costs over one size."""

    title: str
    size: str
    unit: str
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, name: str, size: int, cost: float) -> None:
        """Add a point; ``cost`` is in seconds."""
        self.curves.setdefault(name, []).append((size, cost * {"µs": 1e6, "ms": 1e3}[self.unit]))


def keep(name: str, text: str) -> None:
    """Write the results of a benchmark, and draw its picture if there is something to draw."""
    RESULTS.mkdir(exist_ok=True)
    page = f"# Results of benchmarks.{name}\n\nWritten by `python -m benchmarks.{name} --write`.\n\n{text.strip()}\n"
    (RESULTS / f"{name}.md").write_text(page, "utf-8")
    draw(name)


def draw(name: str) -> None:
    """Draw the ratios or the growth in a benchmark's table, if it has any."""
    page = (RESULTS / f"{name}.md").read_text("utf-8")
    if rows := list(ratios(page)):
        save(lambda: chart(rows), PICTURES / f"{name}.svg", f"Ratios of benchmarks.{name}")
    elif panels := panels_of(page):
        save(lambda: curves(panels), PICTURES / f"{name}.svg", f"Costs of benchmarks.{name}")


def draw_all() -> None:
    """Draw the pictures of all results again."""
    for result in sorted(RESULTS.glob("*.md")):
        draw(result.stem)


# -------------------------------------------------------------------------------------------------------------- tables


def ratios(page: str) -> Iterator[Ratio]:
    """Yield the rows of a page's table that have a ratio and its range over the rounds."""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 10 or not cells[3].endswith("×") or not cells[4]:
            continue
        path, case, against, measured, spread, required, _, verdict, ours, other = cells
        least, most = map(float, spread.split("–"))
        bound = re.search(r"[\d.]+", required)
        yield Ratio(
            path=path,
            case=case,
            against=against,
            measured=float(measured.rstrip("×")),
            shown=measured,
            least=least,
            most=most,
            required=float(bound[0]) if bound else None,
            is_cost=required.startswith("≤") or is_cost(float(measured.rstrip("×")), ours, other),
            verdict=verdict,
        )


def is_cost(ratio: float, ours: str, other: str) -> bool:
    """Return whether a ratio is one of times, or of rates the other way round."""
    if ours.endswith(("ms", " s")):
        return True
    rates = [re.match(r"([\d.]+) ?([kMG]?)", text) for text in (ours, other)]
    first, second = (float(rate[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[rate[2]] if rate else 1.0 for rate in rates)
    return ratio > 1.5 and first < second / 1.5


def groups(rows: list[Ratio]) -> Iterator[tuple[str, list[tuple[str, Ratio]]]]:
    """Yield titles, each with its rows and their labels: what differs within a path is a label."""
    for path in dict.fromkeys(row.path for row in rows):
        found = [row for row in rows if row.path == path]
        if len(found) > 1 and all(row.case and row.against == found[0].against for row in found):
            yield f"{path}, against {found[0].against}", [(row.case, row) for row in found]
            continue
        for case in dict.fromkeys(row.case for row in found):
            yield (
                f"{path}, {case}" if case else path,
                [(f"against {row.against}", row) for row in found if row.case == case],
            )


def table(panels: Sequence[Panel]) -> str:
    """Return the points of curves in Markdown."""
    lines = ["| cost | of | at |", "| --- | --- | --- |"]
    for panel in panels:
        for name, points in panel.curves.items():
            shown = "; ".join(f"{size:,}: {cost:.3g} {panel.unit}" for size, cost in points)
            lines.append(f"| {panel.title}: {name} | {panel.size} | {shown} |")
    return "\n".join(lines)


def panels_of(page: str) -> list[Panel]:
    """Return the curves of a page's table."""
    panels: dict[str, Panel] = {}
    for title, name, size, points in re.findall(r"^\| ([^|:]+): ([^|]+) \| ([^|]+) \| ([\d,]+: .+) \|$", page, re.M):
        found = re.findall(r"([\d,]+): (\S+) (\w+)", points)
        panel = panels.setdefault(title, Panel(title, size, found[0][2]))
        panel.curves[name] = [(int(at.replace(",", "")), float(cost)) for at, cost, _ in found]
    return list(panels.values())


# ------------------------------------------------------------------------------------------------------------ pictures


def chart(rows: list[Ratio]) -> Figure:
    """Return the picture of some ratios."""
    from matplotlib.figure import Figure

    found = list(groups(rows))
    lines = sum(len(labelled) + 1.35 for _, labelled in found)
    height = HEAD + lines * LINE
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((LEFT / WIDTH, 0, (RIGHT - LEFT) / WIDTH, 1 - HEAD / height))
    axes.set(xscale="log", ylim=(lines - 0.2, -0.2))
    axes.tick_params(which="both", length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    line = 0.5
    places: dict[float, Ratio] = {}
    for group, labelled in found:
        less = " (less is better)" if any(row.is_cost for _, row in labelled) else ""
        words(axes, 0.1, line, group + less, weight="bold")
        for label, row in labelled:
            line += 1
            words(axes, 0.7, line, row.shown, ha="right")
            words(axes, 0.8, line, label)
            places[line] = row
        line += 1.35
    dots(axes, places)
    values = [1.0] + [value for row in rows for value in (row.least, row.most, row.required) if value]
    low, high = min(values) / 1.15, max(values) * 1.15
    grid = list(marks(low, high))
    axes.set(xlim=(low, high))
    axes.set_xticks(grid, [f"{value:g}×" for value in grid])
    axes.set_xticks([], minor=True)
    axes.vlines(grid, *axes.get_ylim(), colors=[GREY if value == 1 else PALE for value in grid], linewidth=1, zorder=0)
    legend(figure, rows)
    return figure


def marks(low: float, high: float) -> Iterator[float]:
    """Yield the marks of a logarithmic axis: 1, 2, 5 and their decades, or the decades of a long one."""
    for decade in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for step in (1, 2, 5) if high / low < 300 else (1,):
            if low <= step * 10.0**decade <= high:
                yield step * 10.0**decade


def words(axes: Any, x: float, line: float, text: str, **settings: Any) -> None:
    """Write a text in front of the axis, ``x`` inches from the left."""
    place = (x - LEFT) / (RIGHT - LEFT)
    axes.text(place, line, text, transform=axes.get_yaxis_transform(), va="center_baseline", **settings)


def dots(axes: Any, places: dict[float, Ratio]) -> None:
    """Draw the ranges of the rounds, the required figures and the medians of ratios at their lines."""
    for colour in dict.fromkeys(COLOURS.values()):
        lines = [line for line, row in places.items() if COLOURS[row.verdict] == colour]
        rows = [places[line] for line in lines]
        least, most = [row.least for row in rows], [row.most for row in rows]
        axes.hlines(lines, least, most, colors=colour, alpha=0.35, linewidth=2.5)
        axes.plot([row.measured for row in rows], lines, color=colour, marker="o", markersize=6, linestyle="")
    bounds = [(row.required, line) for line, row in places.items() if row.required]
    axes.plot(
        [bound for bound, _ in bounds],
        [line for _, line in bounds],
        color=INK,
        marker="|",
        markersize=10,
        markeredgewidth=1.5,
        linestyle="",
    )


def legend(figure: Any, rows: list[Ratio]) -> None:
    """Say at the top what the colours of some rows mean."""
    from matplotlib.lines import Line2D

    shown = {COLOURS[row.verdict] for row in rows}
    used = [(COLOURS[verdict], meaning) for verdict, meaning in LEGEND if COLOURS[verdict] in shown]
    handles = [Line2D([], [], color=colour, marker="o", linestyle="", label=meaning) for colour, meaning in used]
    if any(row.required for row in rows):
        handles.append(Line2D([], [], color=INK, marker="|", markersize=10, linestyle="", label="what is required"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, 1), ncols=len(handles), frameon=False,
        borderaxespad=0, borderpad=0.2, handletextpad=0, columnspacing=0.8,
    )  # fmt: skip


def curves(panels: Sequence[Panel]) -> Figure:
    """Return the picture of curves, two panels a line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    lines = (len(panels) + 1) // 2
    figure = Figure(figsize=(WIDTH, 2.8 * lines), layout="constrained")
    places = figure.subplots(lines, 2, squeeze=False).flat
    for panel, place in zip(panels, places, strict=False):
        for name, points in panel.curves.items():
            place.plot([size for size, _ in points], [cost for _, cost in points], marker="o", markersize=3, label=name)
        place.set(xscale="log", yscale="log", xlabel=panel.size, ylabel=panel.unit, title=panel.title)
        costs = [cost for points in panel.curves.values() for _, cost in points]
        place.set_ylim(min(costs) / 4, max(costs) * 10)  # so that what is flat looks flat
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
            axis.set_minor_locator(NullLocator())
        place.grid()
        place.legend(loc="upper left", ncols=2, columnspacing=0.8, handlelength=1.2, handletextpad=0.4)
    for place in list(places)[len(panels) :]:
        place.set_visible(False)
    return figure


def short(value: float) -> str:
    """Return a number of an axis: ``10k`` for 10,000, ``100M`` for 100 million."""
    for unit, sign in ((1_000_000, "M"), (1_000, "k")):
        if value >= unit:
            return f"{value / unit:g}{sign}"
    return f"{value:g}"


def save(figure: Callable[[], Figure], target: Path, title: str) -> None:
    """Write a picture as SVG, on white paper; a date or a version in it would change it each time."""
    import matplotlib

    target.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure().savefig(target, metadata={"Title": title, "Date": None, "Creator": None})


if __name__ == "__main__":
    draw_all()
