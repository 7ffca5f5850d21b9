"""The properties of 5.x that name the time at which a message is due, or the message that a deletion is for.

Mirrors 5.3.3's ``HookUtils``. `librmq.scheduling.timer` delivers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from librmq.errors import MessageIllegalError
from librmq.java.lang import java_long
from librmq.message.delays import parse_level
from librmq.message.message import Message
from librmq.message.properties import PropertyName

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
