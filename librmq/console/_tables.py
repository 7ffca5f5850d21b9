"""What a page consists of: facts, tables of cells, and links; and the parameters that a request gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import urlencode

from librmq.clock import LAST_MS, Clock
from librmq.errors import ConfigError
from librmq.formatting import moment, number
from librmq.message import StoredMessage


class Cell(NamedTuple):
    text: str
    link: str = ""
    mood: str = ""
    """``bad``, ``warn`` or ``good``; ``line``: the text is the points of one; ``box``: a value to tick."""
    is_number: bool = False


class Table(NamedTuple):
    """A table of a page; without rows the page shows ``nothing``."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    nothing: str = "None."


class Fact(NamedTuple):
    """A number that stands alone, with what it is."""

    what: str
    value: str
    note: str = ""
    mood: str = ""


@dataclass
class Page:
    """A page: its template gets everything that is not None."""

    title: str
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    template: str = "page.html.j2"
    is_live: bool = True
    """Whether the page shows itself again every few seconds."""
    refresh_s: int = 5
    """Seconds between two looks of a live page."""
    may_change: bool = True
    """Whether the page offers changes, if the console does."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What a template of its own needs."""


class Moment(NamedTuple):
    """The moment that a page shows, and the form by which another one is chosen."""

    at: str
    """The parameter of a past moment, which all links keep; empty for now."""
    time: str
    """The time, in UTC as a form has it."""
    now: str
    """The address of the same page as it is now."""
    slider: tuple[int, int, int]
    """The times of the first message, of the moment, and of the last look, in milliseconds."""
    fields: Mapping[str, str]
    """The other parameters of the page."""

    @classmethod
    def of(cls, query: Query, extent: tuple[int, int] | None) -> Moment | None:
        """Return the moment of a request; None where the log has no past to show."""
        try:
            at_ms = query.at_ms
        except ConfigError:
            at_ms = None
        if extent is None:
            return None
        first_ms, last_ms = extent
        shown_ms = last_ms if at_ms is None else at_ms
        fields = {name: query.text(name) for name in query.values if name != "at"}
        return cls(
            "" if at_ms is None else query.text("at"),
            "" if at_ms is None else moment(at_ms).replace(" ", "T"),
            f"?{urlencode(fields)}",
            (first_ms, min(max(shown_ms, first_ms), last_ms), last_ms),
            fields,
        )


class Query:
    """The parameters of a request, checked as they are read."""

    def __init__(self, values: Mapping[str, str], clock: Clock) -> None:
        self.values = values
        self.clock = clock

    @cached_property
    def at_ms(self) -> int | None:
        """The past moment at which to show a page; None for now."""
        return self.time_ms("at")

    def text(self, name: str, default: str = "") -> str:
        """Return a parameter, at most a kilobyte of it."""
        return self.values.get(name, default)[:1024].strip()

    def required(self, name: str) -> str:
        """Return a parameter.

        Raises:
            ConfigError: It is missing.
        """
        if not (text := self.text(name)):
            raise ConfigError(f"{name}: missing in the page's address")
        return text

    def words(self, name: str) -> list[str]:
        """Return the words of a parameter, each once."""
        return list(dict.fromkeys(self.values.get(name, "").split()))

    def number(self, name: str, default: int = 0, largest: int = (1 << 63) - 1) -> int:
        """Return a parameter as a whole number from 0.

        Raises:
            ConfigError: It is none, or too large.
        """
        text = self.text(name)
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= largest):
            raise ConfigError(f"{name}: expected a whole number up to {largest}, found {text!r:.80}")
        return int(text)

    def time_ms(self, name: str) -> int | None:
        """Return a parameter as a time, which is UTC without a zone; None if it is missing.

        Raises:
            ConfigError: It is no time.
        """
        text = self.text(name)
        if not text:
            return None
        if text.isascii() and text.isdigit() and len(text) < 15:
            return int(text)
        try:
            found = datetime.fromisoformat(text)
            found = found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
            return min(round(found.timestamp() * 1000), LAST_MS)
        except (ValueError, OverflowError):
            raise ConfigError(f"{name}: expected a time such as 2026-11-20T08:00 (UTC), found {text!r:.80}") from None


def link(page: str, **parameters: object) -> str:
    """Return the address of a page, relative to all others, so that no prefix or proxy matters."""
    given = {name: str(value) for name, value in parameters.items() if value not in (None, "")}
    return f"{page}?{urlencode(given, errors='surrogatepass')}" if given else page


def at_moment(address: str, at: str) -> str:
    """Return the address of a page at a past moment, which is the parameter ``at``; as it is, without one."""
    return f"{address}{'&' if '?' in address else '?'}{urlencode({'at': at})}" if at else address


def topic_link(topic: str) -> Cell:
    """Return a cell that leads to a topic."""
    return Cell(topic, link("topic", name=topic))


def group_link(group: str) -> Cell:
    """Return a cell that leads to a group."""
    return Cell(group, link("group", name=group))


def count(value: int | None, mood: str = "") -> Cell:
    """Return a cell with a number."""
    return Cell(number(value), "", mood if value else "", is_number=True)


def message_link(message: StoredMessage) -> str:
    """Return the permanent address of a message: by its id, else by its place."""
    if message.unique_key:
        return link("message", id=message.unique_key)
    return link("message", topic=message.topic, queue=message.queue_id, offset=message.queue_offset)
