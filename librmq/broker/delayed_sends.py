"""Choice of how a message with a delivery time waits: by an exact delay level, the timer, or the relay.

A message names its time by one of 5.x's properties TIMER_DELAY_SEC, TIMER_DELAY_MS and TIMER_DELIVER_MS. A broker
without timer, relay, or a level of exactly that length refuses it: 4.9 would deliver it immediately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from librmq.errors import MessageIllegalError
from librmq.java.numbers import java_int, java_long
from librmq.message import Message, record
from librmq.message.delay_levels import DelayLevels
from librmq.scheduling.relay import HOP_TOPIC, TARGET_MS, TARGET_QUEUE_ID, TARGET_TOPIC, send_at
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import DELAY_MS, DELAY_SEC, DELETE_KEY, DELIVER_MS, deliver_time_ms

_TIMES: Final = (DELAY_SEC, DELAY_MS, DELIVER_MS)
_SWITCH_ON: Final = "open the broker with BrokerConfig(timers=TimerConfig()) or BrokerConfig(hops=True)"


class DelayedSends:
    """Treatment of timed messages in one broker. Thread-safe."""

    def __init__(
        self, levels: DelayLevels, now_ms: Callable[[], int], timers: Timers | None, *, has_relay: bool
    ) -> None:
        self._levels = levels
        self._now_ms = now_ms
        self._timers = timers
        self._has_relay = has_relay

    def waiting_form(self, message: Message, queue_id: int) -> tuple[Message, int]:
        """Return the message to store in place of one that names a time, and its queue.

        A message that is already due is stored unchanged.

        Raises:
            MessageIllegalError: The broker can't delay a message that long; the error names the setting to switch on.
            TimerRefusedError: The time is not a number, or too far away.
        """
        now_ms = self._now_ms()
        deliver_ms = deliver_time_ms(message.properties, now_ms)
        delay_ms = deliver_ms - now_ms
        timers = self._timers
        if DELETE_KEY not in message.properties:
            if delay_ms <= 0:
                return message, queue_id
            is_relative = DELIVER_MS not in message.properties
            if (
                is_relative
                and delay_ms in self._levels.delays_ms
                and (timers is None or DELAY_MS in message.properties)
            ):
                return self._by_level(message, delay_ms), queue_id
            if self._has_relay and (timers is None or not timers.takes(delay_ms)):
                return send_at(_without_time(message), deliver_ms, queue_id), 0
        if timers is None:
            cancels = DELETE_KEY in message.properties
            what = "cancels a timed message" if cancels else f"is to wait {delay_ms / 1000:,.15g} s"
            raise MessageIllegalError(
                f"topic {message.topic!r}: the message {what}, which is no delay level of this broker: {_SWITCH_ON}"
            )
        waiting = timers.waiting_form(message, queue_id)
        return (message, queue_id) if waiting is None else (waiting, 0)

    def _by_level(self, message: Message, delay_ms: int) -> Message:
        delayed = _without_time(message)
        delayed.properties[record.PROPERTY_DELAY] = str(self._levels.delays_ms.index(delay_ms) + 1)
        return delayed

    def target_of(self, message: Message) -> tuple[str, int]:
        """Return the destination of a relayed message, as topic and queue.

        Raises:
            MessageIllegalError: The relay is off, or the message lacks its time or destination.
        """
        if not self._has_relay:
            raise MessageIllegalError(
                f"topic {HOP_TOPIC!r}: the relay, which delivers its messages, is off: "
                "open the broker with BrokerConfig(hops=True)"
            )
        properties = message.properties
        topic, queue_id = properties.get(TARGET_TOPIC), java_int(properties.get(TARGET_QUEUE_ID, "0"))
        if topic in (None, HOP_TOPIC) or queue_id is None or java_long(properties.get(TARGET_MS, "")) is None:
            raise MessageIllegalError(
                f"topic {HOP_TOPIC!r}: a message needs {TARGET_MS}, {TARGET_TOPIC} and {TARGET_QUEUE_ID}: "
                "make it by librmq.scheduling.relay.send_at"
            )
        return topic or "", queue_id


def _without_time(message: Message) -> Message:
    untimed = Message(message.topic, message.body, flag=message.flag)
    untimed.properties = {name: value for name, value in message.properties.items() if name not in _TIMES}
    return untimed
