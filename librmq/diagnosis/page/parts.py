"""The parts of a page, from which the template makes HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

__all__ = ["Column", "Fact", "Notice", "PageTable", "Section", "table"]

MOST: Final = 20
"""Most rows of a table."""


class Fact(NamedTuple):
    """A number at the top of the page."""

    what: str
    value: str
    note: str = ""
    mood: Literal["", "bad", "good"] = ""


class Notice(NamedTuple):
    """A finding as the page shows it."""

    severity: str
    what: str
    subject: str
    next_step: str
    evidence: Sequence[tuple[str, str]]
    more: int = 0
    """Number of further findings of this kind that the page leaves out."""


class Column(NamedTuple):
    """A column of a table."""

    name: str
    kind: Literal["text", "number", "plot"] = "text"
    axis: Sequence[str] = ()
    """Labels of a plot's horizontal axis, at equal distances."""


@dataclass(frozen=True)
class PageTable:
    """Rows of texts and plots."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    left_out: str = ""
    """What the table leaves out."""
    legend: bool = False
    """Whether the shades of `plots.cells` are explained below."""


@dataclass(frozen=True)
class Section:
    """A heading with a sentence and tables; without tables only the sentence is shown, at the end of the page."""

    anchor: str
    title: str
    about: str
    tables: Sequence[PageTable] = field(default_factory=tuple)


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Any]], *, stores: bool, legend: bool = False, most: int = MOST
) -> Sequence[PageTable]:
    """Return a table of rows that begin with their store, a column that is left out where there is one store."""
    every = list(rows)
    if not every:
        return ()
    shown = [row if stores else row[1:] for row in every[:most]]
    names = [Column("store"), *columns] if stores else columns
    rest = len(every) - len(shown)
    left_out = f"{rest:,} more {'rows are' if rest > 1 else 'row is'} in the JSON beside this page." if rest else ""
    return (PageTable(names, shown, left_out, legend),)
