"""Settings of a timer, and what they make of the time of a message; `librmq.scheduling.timer` delivers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Self

from librmq.config import Between, Config, Seconds
from librmq.files import Files
from librmq.message import StoredMessage
from librmq.message.delays import TimerRefusedError, delete_key, deliver_time_ms
from librmq.message.properties import PropertyName
from librmq.override import override
from librmq.store.format import directory

_BLANK_SLOTS: Final = 60
_INT32: Final = 1 << 31
_END: Final = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerConfig(Config):
    """Settings of the timer wheel: its shape and its limits; the defaults are 5.3.3's.

    `from_row` reads them from a JSON object, such as the file given to the option ``--config`` of the command line.
    """

    timer_precision_ms: Annotated[int, Between(1, 86_400_000)] = 1000
    """Milliseconds of a slot."""
    timer_roll_window_slot: Annotated[int, Between(2, _INT32 - 1)] = 2 * 86_400
    """A message at least this many slots away is put into an earlier slot."""
    timer_log_file_size: Annotated[int, Between(directory.TIMER_UNIT_SIZE + 16, _INT32)] = 100 << 20
    """Bytes of a file of the timer's log."""
    timer_max_delay_sec: Annotated[int, Between(1, _INT32 - 1)] = 3 * 86_400
    """The timer refuses messages further away."""
    slots_total: Annotated[int, Between(_BLANK_SLOTS + 3, _INT32 // directory.TIMER_SLOT_SIZE // 2)] = 7 * 86_400
    """Slots of one turn of the wheel, which has two turns."""
    save_every_s: Annotated[float | None, Seconds()] = 1
    """Time from the first unsaved change to the save; None leaves saving to `Timers.save`."""
    retry_s: Annotated[float, Seconds()] = 10
    """Time from a failure, such as a full disk, to the next try."""
    most_at_once: Annotated[int, Between(1, _INT32 - 1)] = 10_000
    """Most messages that one call delivers or puts into the wheel; the next call is due immediately."""

    @override
    def _check_together(self) -> None:
        if self.window_ms >= _INT32:
            raise self.refusal("timer_roll_window_slot", "slots of less than 24 days in total, a unit's limit")

    @property
    def window_slots(self) -> int:
        """The number of slots ahead that are used."""
        return min(self.timer_roll_window_slot, self.slots_total - _BLANK_SLOTS)

    @property
    def window_ms(self) -> int:
        """The time that the used slots cover."""
        return self.window_slots * self.timer_precision_ms

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self | None:
        """Return the settings in a JSON object, with 5.3.3's defaults; None if it has none of a timer."""
        names = cls.names()
        named = {name: value for name, value in row.items() if name in names}
        return cls(**named) if named else None

    @classmethod
    def of_store(cls, path: str, files: Files) -> Self | None:
        """Return the settings of a store's timer files, with 5.3.3's defaults; None without such files."""
        if not directory.has_timer(path, files):
            return None
        from librmq.store.format.timerfiles import TimerLog, TimerWheel

        settings = {}
        if size := TimerLog.file_size_in(path, files):
            settings["timer_log_file_size"] = size
        if size := TimerWheel.size_in(path, files):
            settings["slots_total"] = size // directory.TIMER_SLOT_SIZE // 2
        return cls(**settings) if settings else None


def deleted_before(deletions: Iterable[StoredMessage]) -> dict[str, int]:
    """Return the physical offset before which messages of a slot are deleted, by the value of `TIMER_DEL_UNIQKEY`.

    Those of librmq's `cancel` concern what was sent before, those of 5.x the whole slot.
    """
    ends: dict[str, int] = {}
    for deletion in deletions:
        name = deletion.properties.get(PropertyName.TIMER_DELETE_KEY, "")
        end = deletion.physical_offset if PropertyName.TIMER_DELETES_EARLIER in deletion.properties else _END
        ends[name] = max(end, ends.get(name, 0))
    return ends


def deletion_end(ends: Mapping[str, int], topic: str, unique_key: str) -> int:
    """Return the physical offset before which a message is deleted, by what `deleted_before` returns."""
    return max(ends.get(delete_key(topic, unique_key), 0), ends.get(unique_key, 0))


def out_time_ms(properties: Mapping[str, str], now_ms: int, config: TimerConfig) -> int | None:
    """Return the time of the slot for a message, None if it is already due.

    Raises:
        TimerRefusedError: As for `Timers.waiting_form`.
    """
    deliver_ms = deliver_time_ms(properties, now_ms)
    if deliver_ms <= now_ms:
        if PropertyName.TIMER_DELETE_KEY in properties:
            raise TimerRefusedError("the message to delete is already due")
        return None
    if deliver_ms - now_ms > 1000 * config.timer_max_delay_sec:
        raise TimerRefusedError(
            f"expected a time at most {config.timer_max_delay_sec} s away, found "
            f"{(deliver_ms - now_ms) / 1000:.15g} s, where the broker's time is "
            f"{datetime.fromtimestamp(now_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC: raise "
            "TimerConfig(timer_max_delay_sec=…), or let the relay carry the message by BrokerConfig(hops=True)"
        )
    precision_ms = config.timer_precision_ms
    return (deliver_ms - 1) // precision_ms * precision_ms
