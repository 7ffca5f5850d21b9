"""Settings of a timer, and the properties by which a message names its time; `librmq.scheduling.timer` delivers.

Mirrors 5.3.3's ``HookUtils``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from librmq.config import Between, Config, Seconds
from librmq.errors import MessageIllegalError
from librmq.files.seam import Files
from librmq.java.numbers import java_long
from librmq.message import record
from librmq.store.engine.dispatch import parse_level
from librmq.store.format.timerfiles import SLOT_SIZE, UNIT_SIZE, TimerWheel, timer_log_size

__all__ = ["TIMER_TOPIC", "TimerConfig", "TimerRefusedError", "delete_key", "is_timed", "out_time_ms"]

TIMER_TOPIC: Final = "rmq_sys_wheel_timer"
DELAY_SEC: Final = "TIMER_DELAY_SEC"
DELAY_MS: Final = "TIMER_DELAY_MS"
DELIVER_MS: Final = "TIMER_DELIVER_MS"
OUT_MS: Final = "TIMER_OUT_MS"
ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
DELETE_KEY: Final = "TIMER_DEL_UNIQKEY"

_BLANK_SLOTS: Final = 60
_INT32: Final = 1 << 31


class TimerRefusedError(MessageIllegalError):
    """The time that a message names is no number, or too far away, or what it deletes would be due by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerConfig(Config):
    """How the wheel is made, and how far ahead it takes messages; the defaults are 5.3.3's.

    The names are those of a ``config`` row.
    """

    timer_precision_ms: Annotated[int, Between(1, 86_400_000)] = 1000
    """Milliseconds of a slot."""
    timer_roll_window_slot: Annotated[int, Between(2, _INT32 - 1)] = 2 * 86_400
    """A message this many slots away, or more, is put into a slot on the way."""
    timer_log_file_size: Annotated[int, Between(UNIT_SIZE + 16, _INT32)] = 100 << 20
    timer_max_delay_sec: Annotated[int, Between(1, _INT32 - 1)] = 3 * 86_400
    """The timer refuses messages further away."""
    slots_total: Annotated[int, Between(_BLANK_SLOTS + 3, _INT32 // SLOT_SIZE // 2)] = 7 * 86_400
    """The slots of a turn; the wheel has two."""
    save_every_s: Annotated[float | None, Seconds()] = 1
    """From the first change that is not saved to saving; None leaves it to `Timers.save`."""
    retry_s: Annotated[float, Seconds()] = 10
    """From a failure (a full disk) to the next try."""
    most_at_once: Annotated[int, Between(1, _INT32 - 1)] = 10_000
    """Most messages that one turn delivers or puts into the wheel; the rest is due at once."""

    def _check_together(self) -> None:
        if self.window_ms >= _INT32:
            raise self.refusal("timer_roll_window_slot", "slots of less than 24 days in all, which a unit can hold")

    @property
    def window_slots(self) -> int:
        """The slots ahead that are used, of those of a turn."""
        return min(self.timer_roll_window_slot, self.slots_total - _BLANK_SLOTS)

    @property
    def window_ms(self) -> int:
        """The time ahead that the used slots cover."""
        return self.window_slots * self.timer_precision_ms

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self | None:
        """The settings that a ``config`` row names, over 5.3.3's; None if it names none of a timer."""
        known = cls.names()
        named = {name: value for name, value in row.items() if name in known}
        return cls(**named) if named else None

    @classmethod
    def of_store(cls, path: str, files: Files) -> Self | None:
        """Return the settings of a store's timer files, with 5.3.3's defaults; None without such files."""
        told = {}
        if size := timer_log_size(path, files):
            told["timer_log_file_size"] = size
        if size := files.size(TimerWheel.path_in(path)):
            told["slots_total"] = size // SLOT_SIZE // 2
        return cls(**told) if told else None


def is_timed(properties: Mapping[str, str]) -> bool:
    """Return whether a message with these properties names a time; a delay level takes precedence."""
    if parse_level(properties.get(record.PROPERTY_DELAY)) > 0 or OUT_MS in properties:
        return False
    return DELAY_SEC in properties or DELAY_MS in properties or DELIVER_MS in properties


def delete_key(topic: str, unique_key: str) -> str:
    """Return the value of `TIMER_DEL_UNIQKEY` for a message of a topic."""
    return f"{topic}+{unique_key}"


def deliver_time_ms(properties: Mapping[str, str], now_ms: int) -> int:
    """Return when a message is to be delivered (ms) that names a time; ``now_ms`` if it names none.

    Raises:
        TimerRefusedError: the time is no number.
    """
    for name, unit, begin in ((DELAY_SEC, 1000, now_ms), (DELAY_MS, 1, now_ms), (DELIVER_MS, 1, 0)):
        if name in properties:
            value = java_long(properties[name])
            if value is None:
                raise TimerRefusedError(f"{name}: expected a whole number, found {properties[name]!r:.80}")
            return begin + value * unit
    return now_ms


def out_time_ms(properties: Mapping[str, str], now_ms: int, settings: TimerConfig) -> int | None:
    """Return the slot's time for a message, None if it is to be delivered at once.

    Raises:
        TimerRefusedError: as for `Timers.put`.
    """
    deliver_ms = deliver_time_ms(properties, now_ms)
    if deliver_ms <= now_ms:
        if DELETE_KEY in properties:
            raise TimerRefusedError("what it deletes is due by now")
        return None
    if deliver_ms - now_ms > 1000 * settings.timer_max_delay_sec:
        raise TimerRefusedError(
            f"the time is {(deliver_ms - now_ms) // 1000} s away: "
            f"the timer takes up to timer_max_delay_sec, {settings.timer_max_delay_sec} s"
        )
    precision_ms = settings.timer_precision_ms
    return (deliver_ms - 1) // precision_ms * precision_ms
