"""The results of benchmarks: a table for each in ``benchmarks/results/``, and a picture of its ratios in ``docs/``.

A picture has a line for each ratio: the median as a dot, the range of the rounds, and a bar where a figure is required.
Its figures come from the table, so that both agree.

``python -m benchmarks.charts`` draws all pictures again
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = CHECKOUT / "benchmarks" / "results"
PICTURES: Final = CHECKOUT / "docs" / "performance"

LEFT: Final = 360
"""Where the axis begins; figures and names stand in front of it, which is what a phone shows first."""
RIGHT: Final = 740
WIDTH: Final = 760
LINE: Final = 21
COLOURS: Final = {"reached": "#1a7f37", "met": "#1a7f37", "missed": "#cf222e", "short": "#9a6700", "": "#0969da"}
LEGEND: Final = (
    ("met", "met what is required"), ("missed", "missed it"), ("short", "short of an aim"), ("", "nothing required")
)  # fmt: skip
STYLE: Final = """
  text { font: 12.5px system-ui, sans-serif; fill: #24292f; }
  .path { font-weight: 600; } .note { fill: #57606a; font-size: 11.5px; }
  .paper { fill: #ffffff; } .grid { stroke: #d0d7de; } .same { stroke: #57606a; stroke-width: 1.5; }
  .range { stroke-width: 3; stroke-opacity: 0.35; } .bound { stroke: #24292f; stroke-width: 2; }
"""


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


def keep(name: str, text: str) -> None:
    """Write the results of a benchmark, and draw their ratios if there are any."""
    RESULTS.mkdir(exist_ok=True)
    page = f"# Results of benchmarks.{name}\n\nWritten by `python -m benchmarks.{name} --write`.\n\n{text.strip()}\n"
    (RESULTS / f"{name}.md").write_text(page, "utf-8")
    draw(name)


def draw(name: str) -> None:
    """Draw the ratios of a benchmark's table, if it has any."""
    rows = list(ratios((RESULTS / f"{name}.md").read_text("utf-8")))
    if rows:
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / f"{name}.svg").write_text(chart(f"Ratios of benchmarks.{name}", rows), "utf-8")


def draw_all() -> None:
    """Draw the pictures of all results again."""
    for result in sorted(RESULTS.glob("*.md")):
        draw(result.stem)


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


@dataclass
class Axis:
    """A logarithmic axis around 1 that shows every value."""

    low: float
    high: float
    marks: list[float] = field(default_factory=list)

    @classmethod
    def around(cls, rows: list[Ratio]) -> Axis:
        """Return an axis for rows, with marks at 1, 2, 5 and their decades."""
        values = [1.0] + [value for row in rows for value in (row.least, row.most, row.required) if value]
        low, high = min(values) / 1.15, max(values) * 1.15
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if high / low < 300 else (1,)
        marks = [step * 10.0**decade for decade in decades for step in steps]
        return cls(low, high, [mark for mark in marks if low <= mark <= high])

    def x(self, value: float) -> float:
        """Return the place of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(LEFT + share * (RIGHT - LEFT), 1)


def chart(title: str, rows: list[Ratio]) -> str:
    """Return the picture of some ratios as SVG."""
    axis, parts, y = Axis.around(rows), [], 58
    for group, found in groups(rows):
        less = " (less is better)" if any(row.is_cost for _, row in found) else ""
        parts.append(text(12, y, group + less, "path"))
        for label, row in found:
            y += LINE
            parts += [text(66, y, row.shown, anchor="end"), text(76, y, label), *drawn(row, axis, y)]
        y += LINE + 7
    bottom = y - LINE
    grid = []
    for mark in axis.marks:
        x = axis.x(mark)
        kind = "same" if mark == 1 else "grid"
        grid.append(f'<line class="{kind}" x1="{x}" y1="40" x2="{x}" y2="{bottom}"/>')
        grid.append(text(x, 34, f"{mark:g}×", "note", "middle"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 12}" '
            f'width="{WIDTH}" height="{bottom + 12}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{bottom + 12}"/>',
            *legend(rows),
            *grid,
            *parts,
            "</svg>\n",
        ]
    )


def legend(rows: list[Ratio]) -> Iterator[str]:
    """Yield what the colours of some rows mean."""
    x = 12
    shown = {COLOURS[row.verdict] for row in rows}
    for verdict, meaning in LEGEND:
        if COLOURS[verdict] in shown:
            yield f'<circle cx="{x + 5}" cy="12" r="4.5" fill="{COLOURS[verdict]}"/>'
            yield text(x + 15, 16, meaning, "note")
            x += 30 + 6 * len(meaning)
    if any(row.required for row in rows):
        yield f'<line class="bound" x1="{x + 5}" y1="5" x2="{x + 5}" y2="19"/>'
        yield text(x + 15, 16, "what is required", "note")


def drawn(row: Ratio, axis: Axis, y: int) -> Iterator[str]:
    """Yield the figures of one line whose text stands at ``y``."""
    middle, colour = y - 4, COLOURS[row.verdict]
    yield (
        f'<line class="range" stroke="{colour}" x1="{axis.x(row.least)}" y1="{middle}" '
        f'x2="{axis.x(row.most)}" y2="{middle}"/>'
    )
    if row.required:
        x = axis.x(row.required)
        yield f'<line class="bound" x1="{x}" y1="{middle - 7}" x2="{x}" y2="{middle + 7}"/>'
    yield f'<circle cx="{axis.x(row.measured)}" cy="{middle}" r="4.5" fill="{colour}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(words)}</text>'


if __name__ == "__main__":
    draw_all()
