"""Schedules: when a message is due by a cron expression or an interval, and the id that it has.

``librmq/schedules.json`` of a store has them, which a broker of RocketMQ ignores::

    {"schedules": {name: {"topic", "cron", "timezone", "every_ms", "missed", "body_b64", "properties", "until_ms",
                          "set_ms", "reached_ms", "last_ms", "paused"}}}

Everything due up to ``reached_ms`` is sent, or passed over. A kill can lose its last change. The unique id of a message
is therefore made of the name and the due time, and looked for before a send. `librmq.broker` sends the messages.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from librmq.config import check_kind, to_timestamp_ms, wrong_kind
from librmq.errors import ConfigError, MalformedError, MissingExtraError
from librmq.message import Message
from librmq.message.message import reserved_topic
from librmq.message.topics import NOT_FOR_SENDING, validate_client_topic

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

_MISSED: Final = ("once", "skip", "all")
_MOST_NAME: Final = 255
_SHORTEST_MS: Final = 100
_FIRST_LOOK_MS: Final = 60_000


class Schedule(NamedTuple):
    """A schedule as it stands now."""

    name: str
    topic: str
    next: datetime | None
    """When the next message is due, in the zone of the schedule; None after its ``until``, and while it is paused."""
    last: datetime | None
    """The due time of the last message."""
    paused: bool
    """Whether it sends nothing until `resume_schedule`."""
    rule: str
    """Its cron expression with the zone, or its interval in seconds."""
    missed: str
    """What becomes of due times at which nothing could be sent: ``once``, ``skip`` or ``all``."""

    @classmethod
    def of_row(cls, name: str, row: Mapping[str, Any]) -> Schedule:
        """Return the schedule in a row of the file, as it stands now.

        Raises:
            MissingExtraError: It has a cron expression, and the extra ``cron`` is missing.
        """
        rule = ScheduleRule.of_row(row)
        next_ms = None if row["paused"] else rule.due_after(row["reached_ms"], row["set_ms"])
        next_at, last_at = (
            None if at_ms is None else datetime.fromtimestamp(at_ms / 1000, _zone(rule.timezone))
            for at_ms in (next_ms, row["last_ms"])
        )
        return cls(name, rule.topic, next_at, last_at, row["paused"], rule.text, rule.missed)

    @property
    def next_ms(self) -> int | None:
        """`next` in ms since 1970."""
        return None if self.next is None else round(1000 * self.next.timestamp())

    @property
    def last_ms(self) -> int | None:
        """`last` in ms since 1970."""
        return None if self.last is None else round(1000 * self.last.timestamp())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRule:
    """What a schedule sends, and when; `of` makes one of what a user gives."""

    NAME_PROPERTY: ClassVar = "SCHEDULE"
    DUE_PROPERTY: ClassVar = "SCHEDULE_DUE_MS"

    topic: str
    cron: str | None = None
    timezone: str = "UTC"
    every_ms: int | None = None
    missed: str = "once"
    body: bytes = b""
    """Empty: the name of the schedule."""
    properties: Mapping[str, str] = field(default_factory=dict)
    until_ms: int | None = None

    @classmethod
    def of(  # noqa: PLR0913 (what a user gives)
        cls,
        name: object,
        *,
        topic: str,
        cron: str | None,
        timezone: str,
        every: float | timedelta | None,
        missed: str,
        body: bytes | str | None,
        properties: Mapping[str, str] | None,
        until: datetime | int | None,
    ) -> ScheduleRule:
        """Return the rule that a user describes.

        Raises:
            ConfigError: A part of it is wrong.
            MessageIllegalError: The topic, the body or a property can't be sent.
            MissingExtraError: It has a cron expression, and the extra ``cron`` is missing.
            TypeError: The body or the properties are of another kind.
        """
        if not isinstance(name, str) or not name.strip() or len(name) > _MOST_NAME or not name.isprintable():
            raise ConfigError(f"name: expected text of 1 to {_MOST_NAME} characters, found {name!r:.80}")
        validate_client_topic(topic)
        if topic in NOT_FOR_SENDING:
            raise reserved_topic(topic)
        if (cron is None) == (every is None):
            raise ConfigError(
                f"schedule {name!r:.80}: expected either cron= or every=, found {'neither' if cron is None else 'both'}"
            )
        if missed not in _MISSED:
            raise ConfigError(f"missed: expected one of {', '.join(_MISSED)}, found {missed!r:.80}")
        every_ms = None
        if every is not None:
            seconds = every.total_seconds() if isinstance(every, timedelta) else every
            if type(seconds) not in (int, float) or not _SHORTEST_MS <= 1000 * seconds <= 1000 * 86_400 * 366:
                raise ConfigError(f"every: expected seconds or a timedelta from 0.1 s to a year, found {every!r:.80}")
            every_ms = round(1000 * seconds)
        if cron is not None:
            _cron_after(cron, timezone, 0)  # refuses what is wrong
        elif timezone != "UTC":
            raise ConfigError("timezone: only cron= goes by one, and every= counts from when the schedule was set")
        check_kind("properties", properties, Mapping)
        if not isinstance(body, bytes | str | None):
            raise wrong_kind("body", body, "bytes or text")
        until_ms = None if until is None else to_timestamp_ms("until", until)
        for mark in (cls.NAME_PROPERTY, cls.DUE_PROPERTY):
            if properties and mark in properties:
                raise ConfigError(f"properties: {mark} is what the schedule itself adds: choose another name")
        text = body.encode() if isinstance(body, str) else body or b""
        rule = cls(
            topic=topic, cron=cron, timezone=timezone, every_ms=every_ms, missed=missed, body=text,
            properties=dict(properties or {}), until_ms=until_ms,
        )  # fmt: skip
        rule.message(name, 0)  # refuses what can't be sent
        return rule

    def row(self) -> dict[str, Any]:
        """Return the rule as a row of the file."""
        body = base64.b64encode(self.body).decode()
        fields = {name: getattr(self, name) for name in _FIELDS if name != "body"}
        return {**fields, "properties": dict(self.properties), "body_b64": body}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> ScheduleRule:
        """Return the rule in a row; raise `MalformedError` if it is none."""
        try:
            fields = {name: row[name] for name in _FIELDS if name != "body"}
            rule = cls(**fields, body=base64.b64decode(row["body_b64"], validate=True))
            has_time = isinstance(rule.cron, str) != isinstance(rule.every_ms, int)
            if not has_time or rule.missed not in _MISSED or type(row["topic"]) is not str:
                raise ValueError("a topic, cron or every_ms, and missed are needed")
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedError(f"expected a schedule, found {dict(row)!r:.200}: {error}") from None
        return rule

    @property
    def text(self) -> str:
        """When it sends, for people."""
        return f"every {(self.every_ms or 0) / 1000:g} s" if self.cron is None else f"{self.cron} {self.timezone}"

    def due_after(self, after_ms: int, set_ms: int) -> int | None:
        """Return the first due time after ``after_ms``, None if there is none; intervals count from ``set_ms``.

        Raises:
            MissingExtraError: The extra ``cron`` is missing.
        """
        due_ms: int | None
        if self.every_ms is not None:
            due_ms = set_ms + max(1, (after_ms - set_ms) // self.every_ms + 1) * self.every_ms
        else:
            due_ms = _cron_after(self.cron or "", self.timezone, after_ms)
        return None if due_ms is None or (self.until_ms is not None and due_ms > self.until_ms) else due_ms

    def last_due(self, after_ms: int, now_ms: int, set_ms: int) -> int | None:
        """Return the last due time after ``after_ms`` and not after ``now_ms``; None if there is none."""
        look_ms, due_ms = _FIRST_LOOK_MS, None
        while due_ms is None:  # A look back that doubles finds it without passing all the due times of a long pause.
            begin_ms = max(after_ms, now_ms - look_ms)
            next_ms = self.due_after(begin_ms, set_ms)
            while next_ms is not None and next_ms <= now_ms:
                due_ms, next_ms = next_ms, self.due_after(next_ms, set_ms)
            if begin_ms == after_ms:
                break
            look_ms *= 2
        return due_ms

    @staticmethod
    def message_id(name: str, due_ms: int) -> str:
        """Return the unique id of the message that a schedule sends at a due time: 32 hex digits."""
        return hashlib.sha256(f"{name}\0{due_ms}".encode()).hexdigest()[:32].upper()

    def new_row(self, now_ms: int, before: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the row of a schedule that is set now; intervals count from the first time, and a pause stays."""
        state = {"set_ms": now_ms, "last_ms": None, "paused": False, **(before or {})}
        return {**{name: state[name] for name in ("set_ms", "last_ms", "paused")}, **self.row(), "reached_ms": now_ms}

    def message(self, name: str, due_ms: int) -> Message:
        """Return the message of a due time."""
        marks = {self.NAME_PROPERTY: name, self.DUE_PROPERTY: str(due_ms)}
        unique_key = self.message_id(name, due_ms)
        return Message(self.topic, self.body or name, properties={**self.properties, **marks}, unique_key=unique_key)


_FIELDS: Final = tuple(entry.name for entry in dataclasses.fields(ScheduleRule))


@cache
def _zone(name: str) -> ZoneInfo:
    from zoneinfo import ZoneInfo  # only schedules need it, and it takes some ms to load

    try:
        return ZoneInfo(name)
    except (OSError, ValueError, TypeError, LookupError):
        raise ConfigError(
            f"timezone: expected a name such as Europe/Berlin, found {name!r:.80}; a system without zones needs the "
            "package tzdata"
        ) from None


def _cron_after(expression: str, timezone: str, after_ms: int) -> int | None:
    """Return the first time of a cron expression after ``after_ms``, None if it has none."""
    try:
        from cronsim import CronSim, CronSimError  # only these schedules need it
    except ImportError:
        raise MissingExtraError("a schedule by cron=", "cron") from None
    zone = _zone(timezone)
    try:
        times = CronSim(expression, datetime.fromtimestamp(after_ms / 1000, UTC if timezone == "UTC" else zone))
    except (CronSimError, AttributeError) as error:
        raise ConfigError(
            f"cron: expected five fields such as '30 6 * * 1-5', found {expression!r:.80}: {error}"
        ) from None
    for time in times:  # When clocks are set back, the first of its times can be before the given one.
        if (at_ms := round(time.timestamp() * 1000)) > after_ms:
            return at_ms
    return None
