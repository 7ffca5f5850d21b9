"""Delays: the levels of 4.9, how long each waits and in which queue, and the times at which messages of 5.x are due.

A message with a level waits in topic ``SCHEDULE_TOPIC_XXXX``, which has one queue for each level; levels count from 1,
queues from 0. Mirrors ``ScheduleMessageService.parseDelayLevel`` and ``computeDeliverTimestamp``.

Properties of 5.x name the time at which a message is due, or the message that a deletion is for; they mirror 5.3.3's
``HookUtils``. `librmq.scheduling.timer` delivers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from librmq.errors import ConfigError, MessageIllegalError
from librmq.java.lang import java_int, java_long
from librmq.message.message import Message
from librmq.message.properties import PropertyName

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL = re.compile(r"([0-9]{1,18})([smhd])")
_UNKNOWN_LEVEL_MS = 1_000
_LONGEST_MS = 2**62  # so that the sum with a store time fits 64 bits


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """The delays of levels 1, 2, … in milliseconds. Immutable and thread-safe."""

    delays_ms: tuple[int, ...] = ()
    """Delays from level 1 on, in milliseconds."""

    @classmethod
    def parse(cls, text: str) -> DelayLevels:
        """Parse a broker's ``messageDelayLevel``: ``1s 5s 1m 2h 1d``, separated by single spaces.

        As in the broker, spaces at the end are ignored.

        Raises:
            ConfigError: The string has another form.
        """
        delays_ms = []
        for level, word in enumerate(text.rstrip(" ").split(" "), 1):
            match = _LEVEL.fullmatch(word)
            if match is None:
                raise ConfigError(f"delay level {level}: expected a number and s, m, h or d, not {word[:40]!r}")
            delay_ms = int(match[1]) * _UNITS_MS[match[2]]
            if delay_ms > _LONGEST_MS:
                raise ConfigError(f"delay level {level} is too long: {word!r}")
            delays_ms.append(delay_ms)
        return cls(tuple(delays_ms))

    @property
    def max_level(self) -> int:
        """Return the number of levels, which is the largest level."""
        return len(self.delays_ms)

    def cap(self, level: int) -> int:
        """Return ``level``, or the largest level if it is beyond that. A level of 0 or less means no delay."""
        return min(level, len(self.delays_ms))

    def delay_ms(self, level: int) -> int:
        """Return the delay of a message with ``level``; 1 s for a level that does not exist."""
        return self.delays_ms[level - 1] if 0 < level <= len(self.delays_ms) else _UNKNOWN_LEVEL_MS

    def level_for(self, topic: str, delay_ms: int, refusal: str | None) -> int:
        """Decide how a message waits: return the level of exactly that delay, or 0 for the broker's timer or relay.

        A broker in this process and the client of one over TCP both ask here. A message that is due has no level.

        Args:
            topic: The message's topic.
            delay_ms: How long it is to wait.
            refusal: Why the broker takes no delay but those of its levels; None if it has a timer or a relay.

        Raises:
            MessageIllegalError: No level is that long, and the broker has nothing else.
        """
        if delay_ms <= 0:
            return 0
        if delay_ms in self.delays_ms:
            return self.delays_ms.index(delay_ms) + 1
        if refusal is not None:
            raise MessageIllegalError(f"topic {topic!r}: the message is to wait {delay_ms / 1000:,.15g} s, {refusal}")
        return 0

    def deliver_timestamp_ms(self, level: int, store_timestamp_ms: int) -> int:
        """Return the delivery time of a message with ``level`` that was stored at ``store_timestamp_ms``."""
        return store_timestamp_ms + self.delay_ms(level)


DEFAULT_LEVELS = DelayLevels.parse("1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h")


def retry_level(reconsume_times: int) -> int:
    """Return the delay level before the next redelivery of a message that has had so many; brokers cap it."""
    return 3 + reconsume_times


def queue_id_of_level(level: int) -> int:
    """Return the queue of ``SCHEDULE_TOPIC_XXXX`` in which messages of ``level`` wait."""
    return level - 1


def level_of_queue_id(queue_id: int) -> int:
    """Return the level of the messages in a queue of ``SCHEDULE_TOPIC_XXXX``."""
    return queue_id + 1


def parse_level(text: str | None) -> int:
    """Parse the delay level of a record; 0, no delay, for a text that is not a number of 32 bits."""
    return 0 if text is None else java_int(text) or 0


# ---- times of 5.x

_TIMES: Final = (PropertyName.TIMER_DELAY_SEC, PropertyName.TIMER_DELAY_MS, PropertyName.TIMER_DELIVER_MS)


class TimerRefusedError(MessageIllegalError):
    """The time in a message is not a number or is too far away, or the message to delete is already due."""


def is_timed(properties: Mapping[str, str]) -> bool:
    """Return whether a message with these properties names a time; a delay level takes precedence."""
    if (
        PropertyName.TIMER_DELAY_MS not in properties
        and PropertyName.TIMER_DELIVER_MS not in properties
        and PropertyName.TIMER_DELAY_SEC not in properties
    ):
        return False
    return parse_level(properties.get(PropertyName.DELAY)) <= 0 and PropertyName.TIMER_OUT_MS not in properties


def without_time(message: Message) -> Message:
    """Return a copy of a message without the properties that name a time."""
    untimed = Message(message.topic, message.body, flag=message.flag)
    untimed.properties = {name: value for name, value in message.properties.items() if name not in _TIMES}
    return untimed


def time_properties(message: Message) -> dict[str, str]:
    """Return the properties of 5.x for the delivery time that an application gave a message."""
    if message.deliver_at_ms is not None:
        return {PropertyName.TIMER_DELIVER_MS: str(message.deliver_at_ms)}
    return {PropertyName.TIMER_DELAY_MS: str(round(1000 * message.delay_s))} if message.delay_s else {}


def delete_key(topic: str, unique_key: str) -> str:
    """Return the value of `TIMER_DEL_UNIQKEY` for a message of a topic, as brokers of 5.3.2 to 5.3.4 write it.

    Earlier brokers, and from 5.4 on those without ``appendTopicForTimerDeleteKey``, write the unique key alone.
    """
    return f"{topic}+{unique_key}"


def deliver_time_ms(properties: Mapping[str, str], now_ms: int) -> int:
    """Return the delivery time of a message (ms); ``now_ms`` if it names none.

    Raises:
        TimerRefusedError: The time is not a number.
    """
    for name, unit, begin in (
        (PropertyName.TIMER_DELAY_SEC, 1000, now_ms),
        (PropertyName.TIMER_DELAY_MS, 1, now_ms),
        (PropertyName.TIMER_DELIVER_MS, 1, 0),
    ):
        if name in properties:
            value = java_long(properties[name])
            if value is None:
                raise TimerRefusedError(f"{name}: expected a whole number, found {properties[name]!r:.80}")
            return begin + value * unit
    return now_ms
