"""What a page consists of: facts, findings, tables, plots, and links; its templates, and a request's parameters.

A plot is inline SVG without text: the page adds the labels, and its classes set the colours. It stretches to the width
of its place. For screen readers and hovering, its title says what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, cached_property
from itertools import islice
from typing import Any, Final, NamedTuple
from unicodedata import category
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from librmq.clock import LAST_MS, Clock
from librmq.diagnosis import Finding
from librmq.errors import ConfigError
from librmq.formatting import duration, moment, number, options_unbroken, visible
from librmq.message import StoredMessage
from librmq.message.topics import is_own_group

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
            return cls(1, is_log=False)
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


_LONGEST_EVIDENCE: Final = 300
KINDS: Final = {
    "half": ("half", "halves"), "given_up": ("given-up half", "given-up halves"), "delay": ("delay", "delays"),
    "retry": ("retry", "retries"), "timer": ("timer", "timers"), "pop": ("in flight", "in flight"),
    "schedule": ("schedule", "schedules"),
}  # fmt: skip
"""The kinds of `PendingMessage`, with the words for one and for several."""


class Cell(NamedTuple):
    text: str
    link: str = ""
    mood: str = ""
    """``bad``, ``warn`` or ``good``; ``plot``: the text is one; ``box``: a value to tick."""
    is_number: bool = False
    order: float | None = None
    """By what a browser sorts it; None for its text or number."""


class Table(NamedTuple):
    """A table of a page; without rows the page shows ``nothing``."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    note: str = ""
    nothing: str = "None."
    about: str = ""
    """What it shows, before the rows."""
    anchor: str = ""
    """Its place in the page, for links."""
    axes: Mapping[str, Axis] = {}
    """The labels of columns with plots."""
    has_shades: bool = False
    """Whether the shades of `cells` are explained below."""
    records: Sequence[Mapping[str, Any]] = ()
    """The rows as an export has them; without these the table has none."""


class Axis(NamedTuple):
    """The labels above the plots of a column, spaced evenly."""

    labels: Sequence[str]
    is_span: bool = False
    """Whether they are those of begin, middle and end; else each belongs to a bar."""

    @property
    def width(self) -> int:
        """The most pixels of the axis, as of its plots; 0 for all that there is."""
        return 0 if self.is_span else WIDE * len(self.labels)


class Fact(NamedTuple):
    """A number that stands alone, with what it is."""

    what: str
    value: str
    note: str = ""
    mood: str = ""


class Notice(NamedTuple):
    """The findings of one kind."""

    severity: str
    title: str
    findings: Sequence[tuple[Cell, str, Sequence[tuple[str, str]], str]]
    """Subject, what was found, evidence by name, and the next step, which is empty where all have the same."""
    next_step: str
    """The single next step of all; empty if they have several."""
    more: int
    """Number of further findings that the page leaves out."""


class Findings(NamedTuple):
    """The findings of a page; without one it shows ``nothing``."""

    notices: Sequence[Notice]
    note: str = ""
    nothing: str = ""


@dataclass
class Page:
    """A page: its template gets everything that is not None."""

    title: str
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    findings: Findings | None = None
    verdict: str = ""
    """The page in one sentence, at its top."""
    mood: str = "good"
    """Of that: ``good``, ``warn`` or ``bad``."""
    template: str = "page.html.j2"
    is_live: bool = True
    """Whether the page shows itself again every few seconds."""
    missing: Sequence[str] = ()
    """What the store is short of."""
    refresh_s: int = 5
    """Seconds between two looks of a live page."""
    may_change: bool = True
    """Whether the page offers changes, if the console does."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What a template of its own needs."""
    location: str = ""
    """The address of the page to show instead."""


# ---- templates


@cache
def templates() -> dict[str, Template]:
    """Return the templates by name, compiled, so that no first look at a page waits for that."""
    environment = Environment(
        loader=PackageLoader("librmq.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["at_moment"] = at_moment
    environment.filters["exact"] = _exact
    environment.filters["options"] = lambda text: Markup(options_unbroken(text))
    return {name: environment.get_template(name) for name in environment.list_templates(extensions=["j2"])}


def _exact(text: object) -> Markup:
    """Return a value of a form, which a browser sends back as it is; `visible` would change invisible characters."""
    characters = str(escape(str(text)))
    return Markup("".join(f"&#{ord(char)};" if category(char)[0] == "C" else char for char in characters))


def render(page: Page, **variables: object) -> str:
    """Return a page as HTML; its template also gets ``variables``."""
    text = templates()[page.template].render(page=page, **variables, **page.more)
    return "\n".join(visible(line) for line in text.split("\n"))


# ---- findings


def notices(findings: Sequence[tuple[Finding, Cell, str]], max_rows: int) -> list[Notice]:
    """Return findings by kind, at most ``max_rows`` of each, given with their subjects and what to say."""
    kinds: dict[tuple[str, str], list[tuple[Finding, Cell, str]]] = {}
    for row in findings:
        kinds.setdefault((row[0].severity, row[0].kind), []).append(row)
    page_notices = []
    for (severity, kind), rows in kinds.items():
        steps = {finding.next_step for finding, *_ in rows[:max_rows]}
        common = steps.pop() if len(steps) == 1 else ""
        listed = [
            (subject, what, _evidence(finding), "" if common else finding.next_step)
            for finding, subject, what in islice(rows, max_rows)
        ]
        title = kind.replace("-", " ").capitalize()
        page_notices.append(Notice(severity, title, listed, common, len(rows) - len(listed)))
    return page_notices


def _evidence(finding: Finding) -> list[tuple[str, str]]:
    pairs = []
    for name, value in finding.evidence.items():
        if name.endswith("_timestamp_ms") and isinstance(value, int):
            text = moment(value)
        elif name.endswith("_s") and isinstance(value, int | float):
            text = duration(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            text = number(value)
        else:
            text = "unknown" if value is None else str(value)
            if len(text) > _LONGEST_EVIDENCE:
                text = f"{text[:_LONGEST_EVIDENCE]}…"
        pairs.append((name.removesuffix("_timestamp_ms").removesuffix("_s").replace("_", " "), text))
    return pairs


# ---- what a request asks for


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

    def text(self, name: str) -> str:
        """Return a parameter, at most a kilobyte of it; empty without one."""
        return self.values.get(name, "")[:1024].strip()

    def required(self, name: str) -> str:
        """Return a parameter, which has to be there."""
        if not (text := self.text(name)):
            raise ConfigError(f"{name}: missing in the page's address")
        return text

    def words(self, name: str) -> list[str]:
        """Return the words of a parameter, each once."""
        return list(dict.fromkeys(self.values.get(name, "").split()))

    def number(self, name: str, largest: int = (1 << 63) - 1) -> int:
        """Return a parameter as a whole number from 0, which it is without one."""
        text = self.text(name)
        if not text:
            return 0
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= largest):
            raise ConfigError(f"{name}: expected a whole number up to {largest}, found {text!r:.80}")
        return int(text)

    def time_ms(self, name: str) -> int | None:
        """Return a parameter as a time, which is UTC without a zone; None if it is missing."""
        text = self.text(name)
        if not text:
            return None
        if text.isascii() and text.isdigit() and len(text) < 15:
            return int(text)
        try:
            time = datetime.fromisoformat(text)
            time = time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
            return min(round(time.timestamp() * 1000), LAST_MS)
        except (ValueError, OverflowError):
            raise ConfigError(f"{name}: expected a time such as 2026-11-20T08:00 (UTC), found {text!r:.80}") from None


def link(page: str, **parameters: object) -> str:
    """Return the address of a page, relative to all others, so that no prefix or proxy matters."""
    query = {name: str(value) for name, value in parameters.items() if value not in (None, "")}
    return f"{page}?{urlencode(query, errors='surrogatepass')}" if query else page


def at_moment(address: str, at: str) -> str:
    """Return the address of a page at a past moment, which is the parameter ``at``; as it is, without one."""
    return f"{address}{'&' if '?' in address else '?'}{urlencode({'at': at})}" if at else address


def topic_link(topic: str) -> Cell:
    """Return a cell that leads to a topic."""
    return Cell(topic, link("topic", name=topic))


def group_link(group: str) -> Cell:
    """Return a cell that leads to a group; one of a broker's own has no page."""
    return Cell(group, "" if is_own_group(group) else link("group", name=group))


def count(value: int | None, mood: str = "") -> Cell:
    """Return a cell with a number."""
    return Cell(number(value), "", mood if value else "", is_number=True)


def message_link(message: StoredMessage) -> str:
    """Return the permanent address of a message: by its id, else by its place."""
    if message.unique_key:
        return link("message", id=message.unique_key)
    return link("message", topic=message.topic, queue=message.queue_id, offset=message.queue_offset)
