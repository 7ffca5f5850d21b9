"""The parts of a page, from which the template makes HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

MOST: Final = 20
"""Most rows of a table."""


class Fact(NamedTuple):
    """A number at the top of the page."""

    what: str
    value: str
    note: str = ""
    mood: Literal["", "bad", "good"] = ""


class NoticeItem(NamedTuple):
    """A finding as the page shows it."""

    subject: str
    what: str
    evidence: Sequence[tuple[str, str]]
    next_step: str
    """Empty if the whole notice has a single next step."""


class Notice(NamedTuple):
    """The findings of one kind, the largest first."""

    severity: str
    title: str
    items: Sequence[NoticeItem]
    next_step: str
    more: int
    """Number of further findings that the page leaves out."""


class Column(NamedTuple):
    """A column in a table."""

    name: str
    kind: Literal["text", "number", "plot", "store"] = "text"
    axis: Sequence[str] = ()
    """Labels below the columns of a plot, or at the beginning, the middle and the end of an area."""
    ends: bool = False
    """Whether these are begin, middle and end."""


@dataclass(frozen=True)
class PageTable:
    """Rows of strings and plots."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    left_out: str = ""
    """Says what the table leaves out."""
    legend: bool = False
    """Whether the shades of `plots.cells` are explained below."""

    @property
    def first(self) -> int:
        """The column that names a row."""
        return int(self.columns[0].kind == "store")


@dataclass(frozen=True)
class Section:
    """A heading with a sentence and tables. Without tables only the sentence is shown, at the end of the page."""

    anchor: str
    title: str
    about: str
    tables: Sequence[PageTable] = field(default_factory=tuple)


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[Any]], *, stores: bool, legend: bool = False, limit: int = MOST
) -> Sequence[PageTable]:
    """Return a table whose rows begin with their store; empty columns are omitted, and so is a single store."""
    every = list(rows)
    if not every:
        return ()
    names = [Column("store", "store"), *columns]
    positions = [at for at in range(len(names)) if (stores or at) and any(row[at] != "" for row in every[:limit])]
    visible_rows = [[row[at] for at in positions] for row in every[:limit]]
    names = [names[at] for at in positions]
    hidden = len(every) - len(visible_rows)
    left_out = (
        f"{hidden:,} more {'rows are' if hidden > 1 else 'row is'} in the JSON beside this page." if hidden else ""
    )
    return (PageTable(names, visible_rows, left_out, legend),)
