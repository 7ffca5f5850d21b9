"""What a broker behind TCP can delay, as its settings say: brokers of 4.9 have levels, those of 5.x a timer as well."""

from __future__ import annotations

from typing import Final, NamedTuple

from librmq.errors import ConfigError, MessageIllegalError
from librmq.message.delay_levels import DelayLevels
from librmq.message.message import Message
from librmq.message.properties import PROPERTY_DELAY
from librmq.scheduling.timer_config import time_properties
from librmq.wire.remote.forms import check
from librmq.wire.remoting.frames import Frame

_FIRST_WITH_TIMER: Final = 413
"""The version of 5.0.0 in answers."""


class BrokerDelays(NamedTuple):
    """The delay levels of a broker, and whether it has a timer."""

    level_text: str
    """Its setting ``messageDelayLevel``."""
    has_timer: bool
    """Its setting ``timerWheelEnable``, which a broker of 4.9 lacks."""

    @classmethod
    def from_settings(cls, answer: Frame) -> BrokerDelays:
        """Read the settings of a broker; one of 5.x that refuses to say them is asked for its timer.

        Raises:
            BrokerError: A broker of 4.x refuses.
        """
        if answer.code and answer.version >= _FIRST_WITH_TIMER:  # without a timer, it refuses the message itself
            return cls("", True)
        lines = check(answer).body.decode("utf-8", "replace").splitlines()
        settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
        return cls(settings.get("messageDelayLevel", ""), settings.get("timerWheelEnable", "").lower() == "true")

    def waiting_form(self, message: Message, broker_name: str, now_ms: int) -> Message:
        """Return the message to send in place of one with ``delay`` or ``deliver_at``: with a level or 5.x's property.

        Raises:
            MessageIllegalError: The broker has neither a level of that length nor a timer.
        """
        try:
            levels_ms = DelayLevels.parse(self.level_text).delays_ms
        except ConfigError:  # a level that librmq does not know
            levels_ms = ()
        delay_s, at_ms = message.delay_s, message.deliver_at_ms
        delay_ms = round(1000 * (delay_s or 0)) if at_ms is None else at_ms - now_ms
        added = time_properties(message)
        if delay_s is not None and delay_ms in levels_ms:
            added = {PROPERTY_DELAY: str(levels_ms.index(delay_ms) + 1)}
        elif delay_ms > 0 and not self.has_timer:
            raise MessageIllegalError(
                f"topic {message.topic!r}: the message is to wait {delay_ms / 1000:,.15g} s, but broker {broker_name} "
                f"has no timer, and none of its delay levels, {self.level_text or 'which it hides'}, is that long: "
                "give delay= the length of a level, or send to a broker with a timer (RocketMQ 5 with "
                "timerWheelEnable=true, or librmq's with BrokerConfig(timers=TimerConfig()))"
            )
        return Message._from_parts(message.topic, message.body, message.flag, message.properties | added)
