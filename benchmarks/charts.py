"""The results of benchmarks: a table for each in ``benchmarks/results/``, and a picture of it in ``docs/performance/``.

A picture of ratios has a line for each: the median as a dot on the range of the rounds, and an upright stroke at
what is required. A picture of growth has curves of costs over sizes. All figures come from the tables, so that
both agree.

``python -m benchmarks.charts`` draws all pictures again. Drawing needs matplotlib.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKOUT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = CHECKOUT / "benchmarks" / "results"
PICTURES: Final = CHECKOUT / "docs" / "performance"
GUIDE: Final = "[Performance](../../docs/performance.md) says what was measured, and how."

NO_BREAK: Final = "\N{NO-BREAK SPACE}"
"""What stands between a number and its unit."""
WIDTH: Final = 4.6
"""Inches; 440 pixels in a browser, of which a phone has 340."""
LINE: Final = 0.21
"""The height of a line in inches."""
LETTERS: Final = 42
"""How many letters fit into a line."""
INDENT: Final = 0.15
"""Where the names of rows begin, as a share of the width."""
COLOURS: Final = {"reached": "#1a7f37", "met": "#1a7f37", "missed": "#cf222e", "short": "#9a6700", "": "#0969da"}
LEGEND: Final = (
    ("met", "met what is required"), ("missed", "missed it"), ("short", "short of an aim"), ("", "nothing required")
)  # fmt: skip
INK, GREY, PALE, STROKE = "#24292f", "#57606a", "#d0d7de", "#8250df"
PAPER: Final = {"facecolor": "white", "edgecolor": "none", "pad": 1}
"""Behind words, so that no line goes through them."""
STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # words stay text: small files, and the reader can search them
    "svg.hashsalt": "librmq",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": PALE,
    "legend.fontsize": "medium",
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
    origin = f"Written by `python -m benchmarks.{name} --write`. {GUIDE}"
    page = f"# Results of benchmarks.{name}\n\n{origin}\n\n{text.strip()}\n"
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
    titles, *lines = ([cell.strip() for cell in line[1:-1].split("|")] for line in page.splitlines() if line[:1] == "|")
    for line in lines:
        row = defaultdict(str, zip(titles, line, strict=True))
        shown, spread, required = row["measured"], row["rounds"], row["required"]
        if not shown.endswith("×") or not spread:
            continue
        least, most = map(number, spread.split("–"))
        bound = re.search(r"\d[\d.,]*", required)
        yield Ratio(
            path=row["path"],
            case=row["case"],
            against=row["against"],
            measured=number(shown.rstrip("×")),
            shown=shown,
            least=least,
            most=most,
            required=number(bound[0]) if bound else None,
            is_cost=required.startswith("≤") or is_cost(number(shown.rstrip("×")), row["librmq"], row["the other"]),
            verdict=row["result"],
        )


def number(text: str) -> float:
    """Return the number that a text shows: ``1,050`` is a thousand and fifty."""
    return float(text.replace(",", ""))


def digits(value: float) -> str:
    """Return a number with three digits, or with all that stand before its point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def is_cost(ratio: float, ours: str, other: str) -> bool:
    """Return whether a ratio is one of times, or of rates the other way round."""
    if ours.endswith(("ms", f"{NO_BREAK}s")):
        return True
    factors = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}
    rates = [re.match(r"([\d.,]+)\s?([kMG]?)", text) for text in (ours, other)]
    first, second = (number(rate[1]) * factors[rate[2]] if rate else 1.0 for rate in rates)
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
            shown = "; ".join(f"{size:,}: {digits(cost)}{NO_BREAK}{panel.unit}" for size, cost in points)
            lines.append(f"| {panel.title}: {name} | {panel.size} | {shown} |")
    return "\n".join(lines)


def panels_of(page: str) -> list[Panel]:
    """Return the curves of a page's table."""
    panels: dict[str, Panel] = {}
    for title, name, size, points in re.findall(r"^\| ([^|:]+): ([^|]+) \| ([^|]+) \| ([\d,]+: .+) \|$", page, re.M):
        found = re.findall(rf"([\d,]+): (\S+){NO_BREAK}(\w+)", points)
        panel = panels.setdefault(title, Panel(title, size, found[0][2]))
        panel.curves[name] = [(int(number(at)), number(cost)) for at, cost, _ in found]
    return list(panels.values())


# ------------------------------------------------------------------------------------------------------------ pictures


def chart(rows: list[Ratio]) -> Figure:
    """Return the picture of some ratios: each has its figure and its name, and below them its dot."""
    from matplotlib.figure import Figure

    words: list[tuple[float, float, str, str]] = []
    places: dict[float, Ratio] = {}
    line = 0.0
    for group, labelled in groups(rows):
        less = " (less is better)" if any(row.is_cost for _, row in labelled) else ""
        for part in textwrap.wrap(group + less, LETTERS):
            line += 1
            words.append((0, line, part, "bold"))
        for label, row in labelled:
            words.append((0, line + 1, row.shown, "normal"))
            for part in textwrap.wrap(label, LETTERS - 4):
                line += 1
                words.append((INDENT, line, part, "normal"))
            places[line + 0.8] = row
            line += 1
        line += 0.4
    figure = Figure(figsize=(WIDTH, 1))
    head = legend(figure, rows) + LINE
    height = head + line * LINE
    figure.set_figheight(height)
    axes = figure.add_axes((0.02, 0, 0.96, 1 - head / height))
    axes.set(xscale="log", ylim=(line, 0.2))
    axes.tick_params(which="both", length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    beside = axes.get_yaxis_transform()
    for x, at, text, weight in words:
        axes.text(x, at, text, transform=beside, va="center_baseline", weight=weight, bbox=PAPER)
    dots(axes, places)
    values = [1.0] + [value for row in rows for value in (row.least, row.most, row.required) if value]
    low, high = min(values) / 1.15, max(values) * 1.15
    grid = list(marks(low, high))
    axes.set(xlim=(low, high))
    axes.set_xticks(grid, [f"{value:g}×" for value in grid])
    axes.set_xticks([], minor=True)
    axes.vlines(grid, *axes.get_ylim(), colors=[GREY if value == 1 else PALE for value in grid], linewidth=1, zorder=0)
    return figure


def marks(low: float, high: float) -> Iterator[float]:
    """Yield the marks of a logarithmic axis: 1, 2, 5 and their decades, or the decades of a long one."""
    for decade in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for step in (1, 2, 5) if high / low < 300 else (1,):
            if low <= step * 10.0**decade <= high:
                yield step * 10.0**decade


def dots(axes: Any, places: dict[float, Ratio]) -> None:
    """Draw the ranges of the rounds, the required figures and the medians of ratios at their lines."""
    for colour in dict.fromkeys(COLOURS.values()):
        lines = [line for line, row in places.items() if COLOURS[row.verdict] == colour]
        rows = [places[line] for line in lines]
        least, most = [row.least for row in rows], [row.most for row in rows]
        axes.hlines(lines, least, most, colors=colour, alpha=0.5, linewidth=5)
        axes.plot([row.measured for row in rows], lines, color=colour, marker="o", markersize=6, linestyle="")
    bounds = [(row.required, line) for line, row in places.items() if row.required]
    axes.plot(
        [bound for bound, _ in bounds],
        [line for _, line in bounds],
        color=STROKE,
        marker="|",
        markersize=10,
        markeredgewidth=1.5,
        linestyle="",
    )


def legend(figure: Any, rows: list[Ratio]) -> float:
    """Say at the top what the colours of some rows mean; return the height of it."""
    from matplotlib.lines import Line2D

    shown = {COLOURS[row.verdict] for row in rows}
    used = [(COLOURS[verdict], meaning) for verdict, meaning in LEGEND if COLOURS[verdict] in shown]
    handles = [Line2D([], [], color=colour, marker="o", linestyle="", label=meaning) for colour, meaning in used]
    if any(row.required for row in rows):
        handles.append(Line2D([], [], color=STROKE, marker="|", markersize=10, linestyle="", label="what is required"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, 1), ncols=2, frameon=False,
        borderaxespad=0, borderpad=0.2, handletextpad=0, columnspacing=0.8,
    )  # fmt: skip
    return LINE * math.ceil(len(handles) / 2) + 0.1


def curves(panels: Sequence[Panel]) -> Figure:
    """Return the picture of curves, a panel below the other."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, NullLocator

    heights = [2.4 + LINE * len(panel.curves) for panel in panels]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout=ConstrainedLayoutEngine(h_pad=0.1))
    places = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flat
    for panel, place in zip(panels, places, strict=True):
        for name, points in panel.curves.items():
            place.plot([size for size, _ in points], [cost for _, cost in points], marker="o", markersize=3, label=name)
        place.set(xscale="log", yscale="log", xlabel=panel.size, ylabel=panel.unit, title=panel.title)
        costs = [cost for points in panel.curves.values() for _, cost in points]
        place.set_ylim(min(costs) / 4, max(costs) * 4)  # so that what is flat looks flat
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
            axis.set_minor_locator(NullLocator())
        place.grid()
        place.legend(loc="upper left", bbox_to_anchor=(0, -0.25), frameon=False)
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
