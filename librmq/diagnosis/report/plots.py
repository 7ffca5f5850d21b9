"""Plots as SVG, ready to insert into a page."""

from __future__ import annotations

import io
import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from librmq.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bars", "lines", "visible"]

_COLOURS: Final = ("#2a6f97", "#e07a5f", "#6a994e", "#9c6ade", "#bc6c25", "#e9b44c", "#c1121f", "#7f8c8d")
_LONGEST: Final = 38
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # keep texts as texts, because the reader's fonts have more scripts
    "svg.hashsalt": "librmq",
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "text.parse_math": False,
}


@contextmanager
def _drawing(height: float) -> Iterator[tuple[Any, Any, list[str]]]:
    """Open a figure and its axes; at the end the SVG is appended to the list."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("drawing plots", "report") from None
    found: list[str] = []
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about glyphs that the fonts here lack
        figure = Figure(figsize=(9, height), layout="constrained")
        yield figure, figure.subplots(), found
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    # A page needs no names of name spaces. Without them it contains no address at all.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    found.append(re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg))


def visible(text: str) -> str:
    """Return ``text`` with codes in place of characters that could hide or reorder text."""
    return "".join(one if unicodedata.category(one)[0] != "C" else f"\\u{ord(one):04x}" for one in text)


def _short(text: str) -> str:
    text = visible(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 12]}…{text[-11:]}"


def bars(values: Sequence[tuple[str, float]], unit: str) -> str:
    """Draw horizontal bars, the first at the top; ``unit`` labels the axis."""
    with _drawing(0.9 + 0.32 * max(1, len(values))) as (_, axes, svg):
        names = [_short(name) for name, _ in values]
        places = range(len(values))
        drawn = axes.barh(places, [value for _, value in values], color=_COLOURS[0], height=0.72)
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.bar_label(drawn, [f"{value:,.10g}" for _, value in values], padding=4, fontsize=9)
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
    return svg[0]


def lines(series: Mapping[str, Sequence[tuple[datetime, float]]], unit: str) -> str:
    """Draw lines over time, in UTC."""
    with _drawing(3.4) as (_, axes, svg):
        for number, (name, points) in enumerate(series.items()):
            times = [time for time, _ in points]
            axes.plot(times, [value for _, value in points], color=_COLOURS[number % len(_COLOURS)],
                      label=_short(name), linewidth=1.8, marker="o" if len(points) < 3 else None)  # fmt: skip
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        if series:
            axes.legend(frameon=False, fontsize=9)
        axes.tick_params(axis="x", labelrotation=20)
    return svg[0]
