"""Settings of a store: frozen values with the defaults of 4.9.4's ``MessageStoreConfig``, and presets.

Sizes are bytes, ``*_s`` are seconds. The names of the fields that shape files are those of the ``config`` row of the
command line contract, so that a JSON file with such a row is a configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from librmq.errors import ConfigError

__all__ = ["StoreConfig", "parse_hours"]

ENTRY_SIZE: Final = 20  # of a consume queue
KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
_LONGEST_S: Final = 86_400 * 365  # of an interval

# The fields of a `config` row that describe a recorded run rather than a setting.
_IGNORED = {"type", "version", "load_ok", "abort_file_present"}
# Fields of the timer's `config` row: its files are shaped by settings of its own.
_TIMER = {
    "timer_precision_ms",
    "timer_roll_window_slot",
    "timer_log_file_size",
    "timer_max_delay_sec",
    "slots_total",
    "wheel_file_bytes",
    "timerlog_unit_size",
    "timerlog_blank_magic",
}


def parse_hours(text: str) -> frozenset[int]:
    """The hours of the day that ``delete_when`` names; `ConfigError` if it names none, or what is none."""
    hours = text.split(";")
    if not all(hour.isascii() and hour.isdigit() and len(hour) <= 2 and int(hour) < 24 for hour in hours):
        raise ConfigError(f"delete_when: expected hours from 0 to 23, several separated by ';', found {text!r:.80}")
    return frozenset(map(int, hours))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """How the files of a store are shaped and what it accepts; the defaults are 4.9.4's.

    Frozen and hashable; thread-safe. ``ConfigError`` names a field that is out of range.
    """

    commitlog_file_size: int = GIB
    consumequeue_file_size: int = 300_000 * ENTRY_SIZE
    enable_consumequeue_ext: bool = False
    consumequeue_ext_file_size: int = 48 * MIB
    max_hash_slot_num: int = 5_000_000
    max_index_num: int = 20_000_000
    message_delay_level: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    max_message_size: int = 4 * MIB
    """The longest body, and the longest batch, in bytes."""
    compress_from: int | None = None
    """Bodies of so many bytes and more are stored compressed (zlib); the client's setting is 4,096. None: none are."""
    max_transfer_count_in_memory: int = 32
    max_transfer_bytes_in_memory: int = 256 * KIB
    max_transfer_count_on_disk: int = 8
    max_transfer_bytes_on_disk: int = 64 * KIB
    memory_ratio: int = 40
    """Percent of the machine's memory; the newest messages of that many bytes count as in memory."""
    max_total_size: int | None = None
    """Oldest log files go when the log is larger than this; None: by age and disk use only."""
    file_reserved_hours: int = 72
    """Log files may go when their last record is so old."""
    delete_when: str = "04"
    """The hours of the day (local time, 0 to 23, several separated by ``;``) in which they go."""
    disk_max_used_ratio: int = 75
    """Percent of the disk in use above which they go at any hour."""
    disk_force_clean_ratio: int = 85
    """Percent above which the oldest log files go whatever their age."""
    disk_refuse_ratio: int = 90
    """Percent above which no message is taken."""
    enable_property_filter: bool = True
    """Whether SQL filters are taken; a broker's is off by default. They need nothing else."""
    enable_calc_filter_bitmap: bool = True
    """Whether a message gets the bitmap of the filters that match it, by which reads skip it without looking at the
    log; only with ``enable_consumequeue_ext``, which is where it is kept. A broker's is off by default."""
    store_host: str = "127.0.0.1:10911"
    """The broker's address, as it stands in records and message ids."""
    durability: Literal["async", "sync"] = "async"
    """When an append returns: ``async`` when the message stands in the page cache (it survives the process), ``sync``
    when it has reached the device (it survives the machine)."""
    flush_interval_s: float = 0.5
    """The log is flushed this often while at least `flush_least_bytes` wait, …"""
    flush_least_bytes: int = 16 * KIB
    flush_thorough_interval_s: float = 10
    """… and this often while anything waits."""
    flush_interval_consumequeue_s: float = 1
    flush_thorough_interval_consumequeue_s: float = 60
    mapped_files: int = 256
    """How many queue and extension files may be mapped at a time; each costs a file descriptor."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("commitlog_file_size", 256, 1 << 31),
            ("consumequeue_file_size", ENTRY_SIZE, 1 << 31),
            ("consumequeue_ext_file_size", 64, 1 << 31),
            ("max_hash_slot_num", 1, 1 << 29),
            ("max_index_num", 2, 1 << 31),
            ("max_message_size", 1, 1 << 31),
            ("max_transfer_count_in_memory", 1, 1 << 31),
            ("max_transfer_bytes_in_memory", 1, 1 << 31),
            ("max_transfer_count_on_disk", 1, 1 << 31),
            ("max_transfer_bytes_on_disk", 1, 1 << 31),
            ("memory_ratio", 0, 100),
            ("file_reserved_hours", 0, 1 << 20),
            ("disk_max_used_ratio", 0, 100),
            ("disk_force_clean_ratio", 0, 100),
            ("disk_refuse_ratio", 0, 100),
            ("flush_least_bytes", 0, 1 << 31),
            ("mapped_files", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(f"{name}: expected a whole number from {least} to {most}, found {value!r:.80}")
        if self.consumequeue_file_size % ENTRY_SIZE:
            raise ConfigError(
                f"consumequeue_file_size: expected a multiple of {ENTRY_SIZE}, found {self.consumequeue_file_size}"
            )
        for name in ("enable_consumequeue_ext", "enable_property_filter", "enable_calc_filter_bitmap"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}: expected true or false, found {value!r:.80}")
        if self.durability not in ("async", "sync"):
            raise ConfigError(f"durability: expected 'async' or 'sync', found {self.durability!r:.80}")
        for name, least in (("compress_from", 1), ("max_total_size", self.commitlog_file_size)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(
                    f"{name}: expected a whole number of at least {least} bytes, or none, found {value!r:.80}"
                )
        for name in (
            "flush_interval_s",
            "flush_thorough_interval_s",
            "flush_interval_consumequeue_s",
            "flush_thorough_interval_consumequeue_s",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S:
                raise ConfigError(f"{name}: expected seconds from 0 to {_LONGEST_S}, found {value!r:.80}")
        for name in ("message_delay_level", "store_host", "delete_when"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ConfigError(f"{name}: expected text, found {value!r:.80}")
        parse_hours(self.delete_when)

    @classmethod
    def embedded(cls, **changes: Any) -> StoreConfig:
        """For an application that embeds a store: small files that grow in number, bounded by total size."""
        return cls(
            **{
                "commitlog_file_size": 64 * MIB,
                "consumequeue_file_size": 20_000 * ENTRY_SIZE,
                "max_hash_slot_num": 100_000,
                "max_index_num": 400_000,
                "max_total_size": 4 * GIB,
                **changes,
            }
        )

    @classmethod
    def tiny(cls, **changes: Any) -> StoreConfig:
        """For tests: files so small that they roll after some dozens of messages."""
        return cls(
            **{
                "commitlog_file_size": 64 * KIB,
                "consumequeue_file_size": 200 * ENTRY_SIZE,
                "consumequeue_ext_file_size": KIB,
                "max_hash_slot_num": 64,
                "max_index_num": 256,
                "max_message_size": 48 * KIB,
                **changes,
            }
        )

    @classmethod
    def from_row(cls, row: Mapping[str, Any], base: StoreConfig | None = None) -> StoreConfig:
        """Read a ``config`` row: the settings that it names, over those of ``base`` (4.9's defaults).

        ``ConfigError`` for an unknown field, or a value out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        changes = {}
        for name, value in row.items():
            if name in known:
                changes[name] = value
            elif name not in _IGNORED | _TIMER:
                raise ConfigError(f"unknown setting {name!r:.80}; known are {', '.join(sorted(known))}")
        return dataclasses.replace(base or cls(), **changes)
