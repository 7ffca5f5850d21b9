"""Plots as inline SVG. They contain no text: the page adds the labels, and its classes set the colours.

A plot stretches to the width of its place. For screen readers and hovering, its title says what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from markupsafe import Markup, escape

CELLS: Final = 60
"""Most cells in a strip. With more queues than this, a cell stands for several queues."""
WIDE: Final = 40
"""Most pixels between two columns, and between the labels of their axis."""
_DWARFED: Final = 50
"""A scale is logarithmic if the ratio of the largest value to the median exceeds this."""


class Scale(NamedTuple):
    """The common scale of bars that are compared."""

    maximum: float
    is_log: bool

    @classmethod
    def for_values(cls, values: Sequence[float]) -> Scale:
        """Return a scale that keeps the smaller values visible too."""
        positive = sorted(value for value in values if value > 0)
        if not positive:
            return cls(1, False)
        return cls(positive[-1], positive[-1] > _DWARFED * positive[len(positive) // 2])

    def share(self, value: float) -> float:
        """Return the length of a bar, from 0 to 1."""
        if value <= 0:
            return 0.0
        share = math.log10(1 + value) / math.log10(1 + self.maximum) if self.is_log else value / self.maximum
        return min(1.0, max(0.004, share))

    def ticks(self) -> list[float]:
        """Return the positions of the grid, from 0 to 1: powers of ten, or quarters."""
        if not self.is_log:
            return [0.25, 0.5, 0.75]
        powers = range(1, int(math.log10(1 + self.maximum)) + 1)
        return [tick for power in powers if (tick := self.share(10**power)) < 0.995]


def _svg(kind: str, width: float, height: float, what: str, inside: str, max_width: int = 0) -> Markup:
    style = f' style="max-width:{max_width}px"' if max_width else ""
    return Markup(
        f'<svg class="{kind}"{style} viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="none" role="img">'
        f"<title>{escape(what)}</title>{inside}</svg>"
    )


def bar(value: float, scale: Scale, what: str) -> Markup:
    """Draw a horizontal bar on its grid."""
    grid = "".join(f'<path class="grid" d="M{at * 1000:.1f} 0V10"/>' for at in scale.ticks())
    width = scale.share(value) * 1000
    inside = f'<rect class="fill" y="1" width="{width:.1f}" height="8"/>'
    return _svg("bar", 1000, 10, what, grid + inside)


def cells(values: Sequence[int], what: str) -> Markup:
    """Draw a square per value, shaded by its power of ten; with many values, a square shows the largest of several."""
    count = min(len(values), CELLS)
    if len(values) > CELLS:
        what += f"; each square shows the largest of {len(values) // CELLS} or more queues"
    bounds = [len(values) * at // count for at in range(count + 1)] if count else []
    inside = []
    for at in range(count):
        value = max(values[bounds[at] : bounds[at + 1]])
        level = 0 if value <= 0 else min(6, 1 + int(math.log10(value)))
        inside.append(f'<rect class="h{level}" x="{at * 10}" width="9" height="9"/>')
    width = max(1, count) * 10
    return Markup(
        f'<svg class="cells" viewBox="0 0 {width} 9" style="max-width:{width * 1.3:g}px" role="img">'
        f"<title>{escape(what)}</title>{''.join(inside)}</svg>"
    )


def columns(values: Sequence[int], what: str, warn: frozenset[int] = frozenset()) -> Markup:
    """Draw a column per value from a common base line; those in ``warn`` have the colour for problems."""
    largest = max(values, default=0) or 1
    inside = [f'<path class="grid" d="M0 39.5H{len(values) * 10}"/>']
    for at, value in enumerate(values):
        if value > 0:
            height = max(2.0, 38 * value / largest)
            kind = "bad" if at in warn else "fill"
            inside.append(
                f'<rect class="{kind}" x="{at * 10 + 1}" y="{39 - height:.1f}" width="8" height="{height:.1f}"/>'
            )
    width = max(1, len(values)) * 10
    return _svg("columns", width, 40, what, "".join(inside), width * WIDE // 10)


def area(values: Sequence[int], what: str, part: Sequence[int] = ()) -> Markup:
    """Draw values over equal time intervals as an area under a stepped line; what is ``part`` of them, darker."""
    largest = max(values, default=0) or 1
    paths = f'<path class="under" d="{_steps(values, largest)}"/>'
    paths += f'<path class="fill" d="{_steps(part, largest)}"/>' if any(part) else ""
    grid = f'<path class="grid" d="M0 39.5H{len(values) * 10}"/>'
    return _svg("area", max(1, len(values)) * 10, 40, what, grid + paths)


def _steps(values: Sequence[int], largest: int) -> str:
    path, is_open = "", False
    for at, value in enumerate(values):
        if value:
            path += f"{'' if is_open else f'M{at * 10} 40'}V{39 - 37 * value / largest:.1f}H{(at + 1) * 10}"
        elif is_open:
            path += "V40"
        is_open = value > 0
    return path + "V40" * is_open


def line(points: Sequence[tuple[int, int]], what: str) -> Markup:
    """Draw a value at some times, the oldest at the left and the greatest at the top; nothing for one of them."""
    if len(points) < 2:
        return Markup()
    begin, end = points[0][0], points[-1][0]
    top, length = max(value for _, value in points) or 1, max(end - begin, 1)
    places = ((1 + (at - begin) * 118 / length, 23 - value * 22 / top) for at, value in points)
    inside = f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'
    return _svg("line", 120, 24, what, inside)  # without a style, which a live page forbids
