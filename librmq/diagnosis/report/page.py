"""The page of a report and its parts, written as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.resources import files
from typing import Any, Literal

from librmq.diagnosis.report.plots import visible
from librmq.errors import MissingExtraError

__all__ = ["Page", "Section", "Tile"]


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    what: str
    value: str
    mood: Literal["good", "bad", ""] = ""


@dataclass(frozen=True)
class Section:
    """A heading with a short explanation, a plot (SVG from `librmq.diagnosis.report.plots`) and a table."""

    title: str
    about: str
    plot: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    nothing: str = ""
    """The sentence in place of a table without rows."""
    left_out: int = 0
    """Number of further rows that the table leaves out."""


@dataclass(frozen=True)
class Page:
    """The whole page."""

    title: str
    about: str
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = field(default_factory=tuple)

    def html(self) -> str:
        """Return the page as HTML.

        Raises:
            MissingExtraError: The extra ``report`` is not installed.
        """
        try:
            from jinja2 import Environment, StrictUndefined
        except ImportError:
            raise MissingExtraError("a report", "report") from None
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        source = (files("librmq.diagnosis.report") / "page.html.j2").read_text("utf-8")
        html = environment.from_string(source).render(page=self, shown=_shown, kind=_kind)
        return "\n".join(visible(line) for line in html.split("\n"))


def _shown(value: Any) -> str:
    """Format a value for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return str(value).replace("\n", "\\u000a")


def _kind(section: Section, column: int) -> str:
    values = [row[column] for row in section.rows if row[column] is not None]
    return "number" if values and all(isinstance(value, int | float) for value in values) else ""
