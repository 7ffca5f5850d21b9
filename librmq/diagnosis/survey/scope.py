"""The part of a store that a report is about, and the time axis of its rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple, Self

from librmq.config import suggest, to_timestamp_ms
from librmq.errors import ConfigError

_LARGEST: Final = (1 << 63) - 1
_INTERVALS: Final = 72
_SETTINGS: Final = ("topic", "group", "tags", "since", "until")


@dataclass(frozen=True, slots=True)
class ReportScope:
    """The messages, topics and groups of a report. The default is everything."""

    topics: frozenset[str] | None = None
    groups: frozenset[str] | None = None
    tags: str | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    """Exclusive."""
    names: tuple[tuple[str, str], ...] = ()
    """The settings as the caller gave them, for the page."""

    @classmethod
    def of(cls, settings: Mapping[str, str | None]) -> Self:
        """Parse ``topic`` and ``group`` (names separated by commas), ``tags``, ``since`` and ``until``.

        Raises:
            ConfigError: A setting is unknown, or a time is invalid.
        """
        for name in settings:
            if name not in _SETTINGS:
                raise ConfigError(f"only: unknown setting {name!r:.80}: {suggest(name, _SETTINGS)}")
        texts = {name: value for name, value in settings.items() if value is not None}

        def names(name: str) -> frozenset[str] | None:
            return frozenset(text.strip() for text in texts[name].split(",")) if name in texts else None

        def time(name: str) -> int | None:
            return parse_time(name, texts[name]) if name in texts else None

        return cls(
            names("topic"), names("group"), texts.get("tags"), time("since"), time("until"), tuple(texts.items())
        )

    def has_topic(self, topic: str) -> bool:
        """Return whether a topic is part of the report."""
        return self.topics is None or topic in self.topics

    def has_group(self, group: str) -> bool:
        """Return whether a group is part of the report."""
        return self.groups is None or group in self.groups

    def has_time(self, timestamp_ms: int) -> bool:
        """Return whether a store time is part of the report."""
        return (self.begin_ms or 0) <= timestamp_ms < (_LARGEST if self.end_ms is None else self.end_ms)

    @property
    def has_times(self) -> bool:
        """Whether store times limit the report."""
        return self.begin_ms is not None or self.end_ms is not None

    def has_subject(self, subject: str) -> bool:
        """Return whether the subject of a finding, such as ``group g, topic t``, is part of the report."""
        for kind, names in (("topic ", self.topics), ("group ", self.groups)):
            named = {part.removeprefix(kind) for part in subject.split(", ") if part.startswith(kind)}
            if names is not None and named and not named & names:
                return False
        return True


class TimeAxis(NamedTuple):
    """Equal time intervals over which rates are counted."""

    begin_ms: int
    interval_ms: int
    intervals: int

    @classmethod
    def over(cls, first_ms: int, last_ms: int) -> Self:
        """Divide the time from the first to the last message into intervals."""
        interval_ms = max(1_000, -(-(last_ms - first_ms + 1) // _INTERVALS))
        return cls(first_ms, interval_ms, (last_ms - first_ms) // interval_ms + 1)


def parse_time(name: str, text: str) -> int:
    """Return a time, given in digits or as ISO 8601 with a zone, in milliseconds since 1970.

    Raises:
        ConfigError: The string is neither; the error names the setting.
    """
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return to_timestamp_ms(name, datetime.fromisoformat(text))
    except (ValueError, ConfigError):
        raise ConfigError(
            f"setting {name}: expected milliseconds, or a time like 2026-11-20T08:00+00:00, found {text!r:.80}"
        ) from None
