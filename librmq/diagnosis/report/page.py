"""The page: what stands on it, and how it is written."""

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
    """A number to be seen first."""

    what: str
    value: str
    mood: Literal["good", "bad", ""] = ""


@dataclass(frozen=True)
class Section:
    """A heading, what it tells in a sentence or two, a plot (SVG from `librmq.diagnosis.report.plots`), a table."""

    title: str
    about: str
    plot: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    nothing: str = ""
    """What is said where there are no rows."""
    left_out: int = 0
    """How many rows there are beyond those given."""


@dataclass(frozen=True)
class Page:
    """All of it."""

    title: str
    about: str
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = field(default_factory=tuple)

    def html(self) -> str:
        """The page as HTML. `MissingExtraError` without the extra ``report``."""
        try:
            from jinja2 import Environment, StrictUndefined
        except ImportError:
            raise MissingExtraError("a report", "report") from None
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        source = (files("librmq.diagnosis.report") / "page.html.j2").read_text("utf-8")
        html = environment.from_string(source).render(page=self, shown=_shown, kind=_kind)
        return "\n".join(visible(line) for line in html.split("\n"))


def _shown(value: Any) -> str:
    """Return ``value`` as people read it."""
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
