"""The results of a drill: a timeline, totals for comparison, and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final, NamedTuple

from librmq.client.recorder import Event
from librmq.testing.anomalies import Anomaly

_COLOURS: Final = ("#1b6ca8", "#2e9e5b", "#b8860b", "#8e44ad", "#16a085", "#7f5539", "#5c6bc0", "#ad1457")
_WIDTH, _LEFT, _EDGE, _TOP, _LANE = 400, 44, 8, 76, 110  # little wider than a phone
_SITES_IN_ROW: Final = 4
_HALO: Final = 'stroke="white" stroke-width="4" paint-order="stroke"'


class TimelineRow(NamedTuple):
    """An event in a drill."""

    minute: float
    what: str


@dataclass(slots=True)
class Minute:
    """What happened in one minute; ``lag`` is the one at its end."""

    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Stored messages, by the sites of producer and broker."""
    consumed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """First deliveries, by the sites of consumer and broker."""
    refused: int = 0
    """Sends that failed."""
    duplicates: int = 0
    """Deliveries of messages that had been delivered before."""
    lag: int = 0
    """Stored messages that no consumer has received."""


@dataclass(slots=True)
class DrillReport:
    """The result of one drill."""

    name: str
    sites: Sequence[str]
    minutes: list[Minute] = field(default_factory=list)
    events: list[TimelineRow] = field(default_factory=list)
    sent: int = 0
    refused: int = 0
    delivered: int = 0
    duplicates: int = 0
    sends_across: int = 0
    """Messages that were stored at another site than the producer's."""
    deliveries_across: int = 0
    """Deliveries to a consumer at another site than the broker's."""
    most_waiting: int = 0
    """The largest lag at the end of a minute."""
    longest_wait_s: float = 0
    """The longest time from a send to the first delivery."""
    lost: int = 0
    """Stored messages that were never delivered, although everything was restored at the end."""
    history: list[Event] = field(default_factory=list)
    """What clients and brokers did, as `librmq.testing.check_history` judges it."""
    anomalies: list[Anomaly] = field(default_factory=list)
    """What is wrong in the history."""

    @property
    def lag(self) -> int:
        """Messages that were waiting at the end of the script."""
        return self.minutes[-1].lag if self.minutes else 0

    def timeline(self) -> str:
        """Return the events and, between them, who consumed what from where, the lag, refused sends and duplicates."""
        lines = []
        marks = sorted({0.0, *(row.minute for row in self.events), float(len(self.minutes))})
        for begin, end in zip(marks, [*marks[1:], marks[-1]], strict=True):
            lines += [f"{row.minute:6.1f}  {row.what}" for row in self.events if row.minute == begin]
            span = self.minutes[int(begin) : max(int(end), int(begin) + (end > begin))]
            if not span:
                continue
            consumed = sum((minute.consumed for minute in span), Counter[tuple[str, str]]())
            flows = ", ".join(f"{user} from {where} {count}" for (user, where), count in sorted(consumed.items()))
            refused, again = sum(minute.refused for minute in span), sum(minute.duplicates for minute in span)
            problems = f"{f', {refused} sends refused' if refused else ''}{f', {again} duplicates' if again else ''}"
            lines.append(f"        consumed: {flows or 'nothing'}; lag {span[-1].lag}{problems}")
        return "\n".join(lines)

    @staticmethod
    def table(reports: Sequence[DrillReport]) -> str:
        """Return a Markdown table that compares drills."""
        rows = [
            "| deployment | sends refused | most messages waiting | longest wait | duplicates | "
            "sends to another site | deliveries from another site | lost |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for report in reports:
            wait = f"{report.longest_wait_s:,.0f} s"
            rows.append(
                f"| {report.name} | {_part(report.refused, report.sent + report.refused)} | {report.most_waiting:,} | "
                f"{wait} | {report.duplicates:,} | {_part(report.sends_across, report.sent)} | "
                f"{_part(report.deliveries_across, report.delivered)} | {report.lost:,} |"
            )
        return "\n".join(rows)

    # ---- picture

    def svg(self) -> str:
        """Return a picture: what each site's consumers got from where, then lag and refused sends, with the events."""
        lanes = [*self.sites, "lag", "refused"]
        top = self._top()
        bottom = top + _LANE * len(lanes) + 30
        height = bottom + 17 * len(self.events) + 10
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            f'width="{_WIDTH}" height="{height}" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            f'<text x="{_EDGE}" y="18" font-size="15">{escape(self.name)}: messages per minute</text>',
        ]
        parts += self._legend()
        parts += self._marks(bottom)
        for number, lane in enumerate(lanes):
            parts += self._lane(lane, top + _LANE * number)
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _top(self) -> int:
        """Return the place below the legend, which can have several rows, and the numbers of the events."""
        return _TOP + 16 * ((len(self.sites) - 1) // _SITES_IN_ROW)

    def _x(self, minute: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _EDGE) * minute / max(1, len(self.minutes))

    def _legend(self) -> list[str]:
        parts = []
        for number, site in enumerate(self.sites):
            row, column = divmod(number, _SITES_IN_ROW)
            x, y = _EDGE + 96 * column, 28 + 16 * row
            parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{_COLOURS[number % len(_COLOURS)]}"/>')
            parts.append(f'<text x="{x + 14}" y="{y + 10}">from {escape(site)}</text>')
        return parts

    def _lane(self, lane: str, top: int) -> list[str]:
        if lane in self.sites:
            title = f"consumed at {lane}"
            stacks = [[minute.consumed[lane, site] for site in self.sites] for minute in self.minutes]
            colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(self.sites))]
        elif lane == "lag":
            title, colours = "waiting at the end of the minute", ["#c77700"]
            stacks = [[minute.lag] for minute in self.minutes]
        else:
            title, colours = "sends refused", ["#c0392b"]
            stacks = [[minute.refused] for minute in self.minutes]
        highest = max((sum(stack) for stack in stacks), default=0)
        high, base = _LANE - 40, top + _LANE - 14
        width = (_WIDTH - _LEFT - _EDGE) / max(1, len(stacks))
        parts = [
            f'<text x="{_LEFT}" y="{top + 14}" {_HALO}>{escape(title)}</text>',
            f'<line x1="{_LEFT}" y1="{base}" x2="{_WIDTH - _EDGE}" y2="{base}" stroke="#888"/>',
            f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end">0</text>',
        ]
        if highest:
            parts.append(f'<text x="{_LEFT - 6}" y="{base - high + 8}" text-anchor="end">{highest:,}</text>')
        for minute, stack in enumerate(stacks):
            y = float(base)
            for count, colour in zip(stack, colours, strict=True):
                if count:
                    tall = high * count / highest
                    y -= tall
                    parts.append(
                        f'<rect x="{self._x(minute):.1f}" y="{y:.1f}" width="{max(0.5, width - 1):.1f}" '
                        f'height="{tall:.1f}" fill="{colour}"/>'
                    )
        return parts

    def _marks(self, bottom: int) -> list[str]:
        """Return the numbered lines of the events, the list of events, and the axis."""
        parts, numbers = [], []
        for number, row in enumerate(self.events):
            x, y = self._x(row.minute), self._top() - 22 + 11 * (number % 2)
            parts.append(f'<path d="M{x:.1f} {y + 2}V{bottom - 28}" stroke="#333" stroke-dasharray="2 3"/>')
            numbers.append(f'<text x="{x:.1f}" y="{y}" font-size="11" text-anchor="middle" {_HALO}>{number + 1}</text>')
            caption = f"{number + 1}  minute {row.minute:g}, {row.what}"
            parts.append(f'<text x="{_EDGE}" y="{bottom + 14 + 17 * number}">{escape(caption)}</text>')
        for minute in range(0, len(self.minutes) + 1, max(1, len(self.minutes) // 6)):
            parts.append(f'<text x="{self._x(minute):.1f}" y="{bottom - 12}" text-anchor="middle">{minute}</text>')
        return parts + numbers  # after all lines, whose neighbours would strike them through


def _part(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / total:.0f} %)" if count and total else f"{count:,}"
