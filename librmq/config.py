"""Settings: frozen values that are checked when they are made, and those of a store, its delays and transactions.

Every class of settings derives from `Config` and states its limits beside each field. So one place checks them all,
with one wording of errors. Sizes are bytes, ``*_s`` are seconds.

    >>> @dataclass(frozen=True, slots=True, kw_only=True)
    ... class RetryConfig(Config):
    ...     attempts: Annotated[int, Between(1, 16)] = 3
    ...     first_pause_s: Annotated[float, Seconds()] = 1
    ...     longest_pause_s: Annotated[float | None, Seconds()] = None
    ...     mode: Literal["linear", "doubling"] = "doubling"
    ...
    ...     def _check_together(self) -> None:
    ...         if self.longest_pause_s is not None and self.longest_pause_s < self.first_pause_s:
    ...             raise self.refusal("longest_pause_s", f"at least first_pause_s, {self.first_pause_s}")
    >>> RetryConfig(attempts=0)
    Traceback (most recent call last):
    librmq.errors.ConfigError: attempts: expected a whole number from 1 to 16, found 0
    >>> RetryConfig().with_settings({"attempt": 3})
    Traceback (most recent call last):
    librmq.errors.ConfigError: attempt: unknown setting of RetryConfig; did you mean attempts?
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import os
import re
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from librmq.errors import ConfigError
from librmq.override import override

__all__ = ["Config", "StoreConfig"]

ENTRY_SIZE: Final = 20  # bytes of an entry of a consume queue
KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
_YEAR_S: Final = 86_400 * 365
_MOST: Final = 1 << 31


# ------------------------------------------------------------------------------------------------------- checks


@dataclass(frozen=True, slots=True)
class Between:
    """Limits of a number, both inclusive, for the field's `Annotated` type."""

    minimum: float
    """The smallest allowed value."""
    maximum: float = math.inf
    """The largest allowed value."""

    @override
    def __str__(self) -> str:
        return f" of at least {self.minimum}" if self.maximum == math.inf else f" from {self.minimum} to {self.maximum}"


@dataclass(frozen=True, slots=True)
class Seconds(Between):
    """Limits of a duration in seconds, by default 0 to a year."""

    minimum: float = 0
    maximum: float = _YEAR_S


_Check = Callable[[object], bool]


class Config:
    """Base of all settings: keyword-only frozen dataclasses whose fields are checked by their types.

    The supported types are ``int``, ``float`` (which includes whole numbers), ``bool``, ``str``, `Literal`, functions
    and classes, each with ``| None``, and `Annotated` with `Between` or `Seconds`. Subclasses check combinations of
    fields in ``_check_together``; `librmq.config` begins with an example.

    Raises:
        ConfigError: A value is of a wrong type or out of range; the message names the setting.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, default, expected, check in _checks(cast("Hashable", type(self))):
            value = getattr(self, name)
            if value is default:
                continue
            if isinstance(value, timedelta) and "seconds" in expected:
                object.__setattr__(self, name, value.total_seconds())
            if not check(getattr(self, name)):
                raise self.refusal(name, expected)
        self._check_together()

    def _check_together(self) -> None:
        """Check combinations of settings; raise `refusal`."""

    def refusal(self, name: str, expected: str) -> ConfigError:
        """Return the error for the setting ``name``, with the expected and the present value."""
        return ConfigError(f"{name}: expected {expected}, found {getattr(self, name)!r:.80}")

    @classmethod
    def of(cls, config: Self | None, settings: Mapping[str, object]) -> Self:
        """Return ``config``, or the defaults for None, with the ``settings`` that keywords give replaced.

        Raises:
            ConfigError: ``config`` is something else, a setting is unknown, or its value is refused.
        """
        if config is not None and not isinstance(config, cls):
            raise ConfigError(f"config: expected a {cls.__name__}, found {type(config).__name__}")
        return (config or cls.defaults()).with_settings(settings)

    @classmethod
    def defaults(cls) -> Self:
        """Return the default settings, always the same object."""
        return cast("Self", _defaults.get(cls) or _defaults.setdefault(cls, cls()))

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return a copy with some settings replaced.

        Raises:
            ConfigError: A setting is unknown, or its value is refused.
        """
        if not settings:
            return self
        names = self.names()
        for name in settings:
            if name not in names:
                raise ConfigError(f"{name:.80}: unknown setting of {type(self).__name__}; {suggest(name, names)}")
        return dataclasses.replace(self, **settings)  # type: ignore[type-var]

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all settings, in order."""
        return [field.name for field in _fields(cast("Hashable", cls))]


def wrong_kind(name: str, value: object, expected: str) -> TypeError:
    """Return the error of an argument of another kind than expected."""
    return TypeError(f"{name}: expected {expected}, found {value!r:.80}")


def check_kind(name: str, value: object, kind: type, example: str = "") -> None:
    """Refuse the value of an optional keyword that is not of its class; ``example`` is an expression that makes one.

    Raises:
        TypeError: The value is neither None nor of ``kind``.
    """
    if value is not None and not isinstance(value, kind):
        such_as = f" such as {example}" if example else ""
        raise wrong_kind(name, value, f"a {kind.__name__}{such_as}")


def check_arguments(what: str, function: Callable[..., object], *arguments: str) -> None:
    """Refuse a function that can't take the positional ``arguments`` that it will be called with.

    What has no signature, such as some builtins, passes. The signature is the one of a wrapper itself, because a
    decorator can add arguments to those of the function that it wraps.

    Raises:
        ConfigError: The function takes fewer arguments, or requires more.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        parameters = ", ".join(map(str, signature.parameters.values()))
        raise ConfigError(
            f"{what} {function!r:.100} takes ({parameters:.100}), but it is called with {' and '.join(arguments)} "
            f"({error}): change its parameters, or wrap it in one that takes these"
        ) from None


def check_path(name: str, path: object, expected: str) -> None:
    """Check the path of a folder before it is opened.

    Raises:
        ConfigError: It is empty, has a null character, or begins with ``~`` or as a URL, and there is no such folder.
        TypeError: It is not a path.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise wrong_kind(name, path, expected)
    text = os.fspath(path)
    if not text or "\0" in text:
        raise ConfigError(f"{name}: expected {expected}, found {text!r:.80}")
    begin = _OF_SHELLS_AND_URLS.match(text)
    if begin is not None and not os.path.isdir(begin[0]):
        path_meant = text.removeprefix(f"{begin[1]}//") if begin[1] else os.path.expanduser(text)
        raise ConfigError(
            f"{name}: expected {expected}, found {text!r:.80}: write {path_meant!r:.80}, because {begin[0]} would be a "
            f"folder of that name; if it is to be one, write ./{begin[0]}"
        )


_OF_SHELLS_AND_URLS: Final = re.compile(r"~[^/]*|((?:librmq|file):)(?=//)")
"""The beginning of a path that a shell or a program for URLs would replace, and the operating system does not."""


def check_now(now_ms: object) -> None:
    """Refuse a value that cannot be the time of a step.

    Raises:
        TypeError: It is not a whole number.
    """
    if not isinstance(now_ms, int):
        raise wrong_kind("now_ms", now_ms, "milliseconds since 1970, a whole number")


def suggest(name: str, names: Iterable[str]) -> str:
    """Return the name that was probably meant, or all known names, as the end of an error."""
    sorted_names = sorted(names)
    match = nearest(name, sorted_names)
    return f"did you mean {match}?" if match is not None else f"known are {', '.join(sorted_names) or 'none'}"


def nearest(name: str, names: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known name that was probably meant, whatever its case; None if none is alike enough (1: the same)."""
    import difflib  # only errors need it

    by_lower = {candidate.lower(): candidate for candidate in sorted(names)}
    close = difflib.get_close_matches(name.lower(), by_lower, 1, likeness)
    return by_lower[close[0]] if close else None


_defaults: Final[dict[type[Config], Config]] = {}
_fields = lru_cache(maxsize=64)(dataclasses.fields)


@lru_cache(maxsize=64)
def _checks(kind: Any) -> list[tuple[str, object, str, _Check]]:  # noqa: ANN401 a class, which is hashable
    """Return each setting's name, its default, the description of its expected values, and its check."""
    hints = get_type_hints(kind, include_extras=True)
    return [(field.name, field.default, *_check_of(hints[field.name])) for field in _fields(kind)]


def _check_of(hint: Any) -> tuple[str, _Check]:  # noqa: ANN401 types have none
    limits = None
    if get_origin(hint) is Annotated:
        hint, limits = get_args(hint)[:2]
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(limits, Seconds):
        options = tuple(option for option in options if option is not timedelta)  # it is kept in seconds
    optional = types.NoneType in options
    expected, check = _one_of([option for option in options if option is not types.NoneType], limits)
    if optional:
        return f"{expected}, or None", lambda value: value is None or check(value)
    return expected, check


def _one_of(options: list[Any], limits: Between | None) -> tuple[str, _Check]:
    if len(options) > 1:
        choices = [_one_of([option], limits) for option in options]
        return " or ".join(what for what, _ in choices), lambda value: any(check(value) for _, check in choices)
    hint = options[0]
    origin = get_origin(hint) or hint
    if origin is Literal:
        allowed = get_args(hint)
        return f"one of {', '.join(map(repr, allowed))}", lambda value: value in allowed
    if origin is bool:
        return "True or False", lambda value: isinstance(value, bool)
    if origin in (int, float):
        kinds = int if origin is int else (int, float)
        within = limits or Between(-math.inf)
        what = "seconds" if isinstance(limits, Seconds) else "a whole number" if origin is int else "a number"
        return (
            f"{what}{limits or ''}",
            lambda value: (
                isinstance(value, kinds) and not isinstance(value, bool) and within.minimum <= value <= within.maximum
            ),
        )
    if origin is str:
        return "text", lambda value: isinstance(value, str)
    if origin in (Callable, types.FunctionType):
        return "a function", callable
    if getattr(origin, "_is_protocol", False) or not isinstance(origin, type):  # only a type checker can check these
        return f"{origin}", lambda value: value is not None
    article = "an" if origin.__name__[0] in "AEIO" else "a"
    members = f" ({', '.join(origin.__members__)})" if issubclass(origin, enum.Enum) else ""
    return f"{article} {origin.__name__}{members}", lambda value: isinstance(value, origin)


def to_seconds(name: str, value: float | timedelta, minimum: float = 0, maximum: float = math.inf) -> float:
    """Return a duration, given in seconds or as a `timedelta`, in seconds; ``name`` is the argument's.

    Raises:
        ConfigError: It is neither, or out of range.
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if type(seconds) not in (int, float) or not minimum <= seconds <= maximum:
        limits = f" from {minimum} to {maximum}" if maximum != math.inf else f" of at least {minimum}"
        raise ConfigError(f"{name}: expected seconds or a timedelta{limits}, found {value!r:.80}")
    return seconds


def to_timestamp_ms(name: str, time: datetime | int) -> int:
    """Return a time, given with a time zone or in ms since 1970, in ms, rounded up.

    Raises:
        ConfigError: It is neither.
    """
    if type(time) is int:
        return time
    if isinstance(time, datetime) and time.tzinfo is not None:
        return -int(-time.timestamp() * 1000 // 1)
    raise ConfigError(f"{name}: expected a time with a time zone, or milliseconds since 1970, found {time!r:.80}")


def check_reached(name: str, queue_offset: int, topic: str, ends: Collection[int]) -> None:
    """Refuse a queue offset that none of a topic's queues has reached, by their ends; a time was meant, perhaps.

    Raises:
        ConfigError: It is beyond the end of each.
    """
    if queue_offset <= max(ends, default=queue_offset):
        return
    meant = f"; if a time was meant, give it {'by --to' if name == '--offset' else 'with its zone'}"
    with suppress(OverflowError, ValueError, OSError):
        # Until the year 5138 seconds since 1970 have at most 11 digits, and since 1973 milliseconds have 12.
        seconds = queue_offset / 1000 if queue_offset >= 10**11 else queue_offset
        meant += f", as {datetime.fromtimestamp(seconds, UTC).isoformat()}" if queue_offset >= 10**8 else ""
    raise ConfigError(
        f"{name}: expected a queue offset up to {max(ends)}, where the longest queue of topic {topic!r} ends, found "
        f"{queue_offset}{meant}"
    )


# ------------------------------------------------------------------------------------------------- a store's settings

# The fields of a `config` row that describe a recorded run rather than a setting.
_IGNORED: Final = {"type", "version", "load_ok", "abort_file_present"}
# Fields of the timer's `config` row: its files are shaped by settings of its own.
_TIMER: Final = {
    "timer_precision_ms",
    "timer_roll_window_slot",
    "timer_log_file_size",
    "timer_max_delay_sec",
    "slots_total",
    "wheel_file_bytes",
    "timerlog_unit_size",
    "timerlog_blank_magic",
}


_BROKER_RETENTION: Final = {"max_total_size": None, "file_reserved_hours": 72, "keep_unconsumed": False}


def parse_hours(text: str) -> frozenset[int]:
    """Return the hours of the day that ``delete_when`` names.

    Raises:
        ConfigError: The text is not a list of hours.
    """
    hours = text.split(";")
    if not all(hour.isascii() and hour.isdigit() and len(hour) <= 2 and int(hour) < 24 for hour in hours):
        raise ConfigError(f"delete_when: expected hours from 0 to 23, several separated by ';', found {text!r:.80}")
    return frozenset(map(int, hours))


class NamedConfig(Config):
    """Settings that know which of them their maker named, so that others can come from elsewhere."""

    __slots__ = ("named",)

    named: frozenset[str]

    def __new__(cls, **settings: Any) -> Self:  # noqa: ANN401 checked by the class
        """Note the names. ``dataclasses.replace`` gives all settings; of those, others than a preset's count."""
        named, names = set(settings), cls.names()
        if len(settings) == len(names):
            defaults = cls.defaults()
            named = {name for name in names if settings[name] != getattr(defaults, name)} - cls._unnamed(settings)
        return _name(super().__new__(cls), named)

    @classmethod
    def _unnamed(cls, settings: Mapping[str, Any]) -> set[str]:
        """Return the names of settings that a preset has changed."""
        return set()

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _with_names, (type(self), {name: getattr(self, name) for name in self.names()}, self.named)

    @override
    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        if not settings:
            return self
        return _name(super().with_settings(settings), self.named | settings.keys())


_N = TypeVar("_N", bound=NamedConfig)


def _name(config: _N, named: Iterable[str]) -> _N:
    object.__setattr__(config, "named", frozenset(named))
    return config


def _with_names(kind: type[_N], settings: Mapping[str, Any], named: Iterable[str]) -> _N:
    return _name(kind(**settings), named)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(NamedConfig):
    """Settings of a store: the shape of its files, and what it accepts.

    The defaults suit an application that embeds a store: small files that grow in number, bounded by their total size.
    `broker` has the sizes and the retention of a RocketMQ 4.9 broker, `tiny` those of tests. Frozen and hashable.

    `from_row` reads them from a JSON object, such as the file given to the option ``--config`` of the command line.

    ``named`` contains the names of the settings that the caller passed. An existing store keeps its own sizes, delay
    levels and retention for all others. The sizes of a preset count as passed, its retention does not.

    Raises:
        ConfigError: A value is of a wrong type or out of range; the message names the setting.
    """

    commitlog_file_size: Annotated[int, Between(256, _MOST)] = 64 * MIB
    """Length of a file of the log in bytes. A record must fit into one."""
    consumequeue_file_size: Annotated[int, Between(ENTRY_SIZE, _MOST)] = 20_000 * ENTRY_SIZE
    """Length of a file of a queue in bytes, a multiple of 20."""
    enable_consumequeue_ext: bool = False
    """Whether queues have extension files, which hold the bitmaps of filters."""
    consumequeue_ext_file_size: Annotated[int, Between(64, _MOST)] = 4 * MIB
    """Length of an extension file in bytes."""
    max_hash_slot_num: Annotated[int, Between(1, 1 << 29)] = 100_000
    """Hash slots of an index file."""
    max_index_num: Annotated[int, Between(2, _MOST)] = 400_000
    """Entries of an index file; each key of a message takes one."""
    message_delay_level: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    """Durations of the delay levels, from level 1 on, in `s`, `m`, `h` or `d`."""
    max_message_size: Annotated[int, Between(1, _MOST)] = 4 * MIB
    """The longest body, and the longest batch, in bytes."""
    compress_from: Annotated[int | None, Between(1)] = None
    """Least bytes of a body to store it compressed (zlib); None: never. A client's default is 4,096."""
    max_transfer_count_in_memory: Annotated[int, Between(1, _MOST)] = 32
    """Most messages that a read returns while they count as in memory (see `memory_ratio`)."""
    max_transfer_bytes_in_memory: Annotated[int, Between(1, _MOST)] = 256 * KIB
    """Most bytes of such a read, or one message."""
    max_transfer_count_on_disk: Annotated[int, Between(1, _MOST)] = 8
    """Most messages that a read of older messages returns."""
    max_transfer_bytes_on_disk: Annotated[int, Between(1, _MOST)] = 64 * KIB
    """Most bytes of such a read, or one message."""
    memory_ratio: Annotated[int, Between(0, 100)] = 40
    """Percent of the machine's memory; the newest messages of that many bytes count as in memory."""
    max_total_size: Annotated[int | None, Between(256)] = 4 * GIB
    """Size of the log above which the oldest files are deleted; None: files are deleted by age and disk use only."""
    keep_unconsumed: bool = True
    """Whether log files with unconsumed messages stay, and sends are refused at ``max_total_size`` and on a full disk.
    Otherwise, as in a broker, such messages are deleted with their file, with one warning for each group and file."""
    file_reserved_hours: Annotated[int | None, Between(0, 1 << 20)] = None
    """Age of its last record at which a log file can be deleted; None means at no age."""
    delete_when: str = "04"
    """Hours of the day (local time, 0 to 23, several separated by ``;``) for deletion by age."""
    disk_max_used_ratio: Annotated[int, Between(0, 100)] = 75
    """Used percent of the disk above which old enough files are deleted at any hour."""
    disk_force_clean_ratio: Annotated[int, Between(0, 100)] = 85
    """Used percent above which the oldest log files are deleted at any age, unless ``keep_unconsumed`` keeps them."""
    disk_refuse_ratio: Annotated[int, Between(0, 100)] = 90
    """Used percent above which messages are refused."""
    enable_property_filter: bool = True
    """Whether SQL filters are accepted. A broker's default is off. SQL filters need no other setting."""
    enable_calc_filter_bitmap: bool = True
    """Whether a message gets the bitmap of matching filters, by which reads skip it without reading the log. It needs
    ``enable_consumequeue_ext``, which stores it. A broker's default is off."""
    store_host: str = "127.0.0.1:10911"
    """The broker's address in records and message ids."""
    durability: Literal["async", "sync"] = "async"
    """When an append returns: with ``async`` when the message is in the page cache (it survives the process), with
    ``sync`` when it is on the device (it survives the machine)."""
    flush_interval_s: Annotated[float, Seconds()] = 0.5
    """Interval of the log's flushes while at least `flush_least_bytes` wait; 4 MiB wait only if they come very fast."""
    flush_least_bytes: Annotated[int, Between(0, _MOST)] = 16 * KIB
    """Bytes of the log for which a flush does not wait longer than `flush_interval_s`."""
    flush_thorough_interval_s: Annotated[float, Seconds()] = 0.5
    """Interval of the log's flushes while fewer bytes wait. In a broker's directory it is 4.9's 10 unless named."""
    flush_interval_consumequeue_s: Annotated[float, Seconds()] = 1
    """Interval of the flushes of queues and index while the written queues have 400 entries each on average (two
    pages)."""
    flush_thorough_interval_consumequeue_s: Annotated[float, Seconds()] = 60
    """Interval of these flushes while they have fewer."""
    mapped_files: Annotated[int, Between(1, 1 << 20)] = 256
    """Most queue and extension files to keep mapped; each takes a file descriptor. Beyond these, entries are read and
    written by a system call each, which takes two to three times as long."""

    @override
    def _check_together(self) -> None:
        if self.consumequeue_file_size % ENTRY_SIZE:
            raise self.refusal("consumequeue_file_size", f"a multiple of {ENTRY_SIZE}")
        if self.max_total_size is not None and self.max_total_size < self.commitlog_file_size:
            raise self.refusal("max_total_size", f"at least one log file, {self.commitlog_file_size} bytes, or None")
        parse_hours(self.delete_when)

    @classmethod
    def broker(cls, **changes: Any) -> Self:  # noqa: ANN401 checked by the class
        """Return the default sizes and retention of a RocketMQ 4.9 broker."""
        sizes = {
            "commitlog_file_size": GIB,
            "consumequeue_file_size": 300_000 * ENTRY_SIZE,
            "consumequeue_ext_file_size": 48 * MIB,
            "max_hash_slot_num": 5_000_000,
            "max_index_num": 20_000_000,
            **changes,
        }
        return _with_names(cls, {**_BROKER_RETENTION, **sizes}, sizes)

    @classmethod
    @override
    def _unnamed(cls, settings: Mapping[str, Any]) -> set[str]:
        has_preset = all(settings[name] == value for name, value in _BROKER_RETENTION.items())
        return set(_BROKER_RETENTION) if has_preset else set()

    @classmethod
    def tiny(cls, **changes: Any) -> Self:  # noqa: ANN401 checked by the class
        """Return sizes for tests: files so small that they roll after a few dozen messages."""
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
        """Return the settings in a JSON object, over those of ``base`` (by default a 4.9 broker's).

        Raises:
            ConfigError: A setting is unknown, or its value out of range.
        """
        ignored = _IGNORED | _TIMER
        settings = {name: value for name, value in row.items() if name not in ignored}
        return (base or cls.broker()).with_settings(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionConfig(Config):
    """Settings for the checks of half messages; the defaults are 4.9.4's."""

    timeout_s: Annotated[float, Seconds()] = 6
    """Age of a half message at its first check, unless it has an immunity of its own."""
    check_max: Annotated[int, Between(1, (1 << 31) - 1)] = 15
    """Checks after which a half message is discarded."""
    interval_s: Annotated[float, Seconds(0.001)] = 60
    """Time between two check passes."""
    reserved_hours: Annotated[int | None, Between(1, (1 << 31) - 1)] = None
    """Age at which a half message is discarded; None means the store's ``file_reserved_hours``, or else 72."""
    most_at_once: Annotated[int, Between(1, (1 << 31) - 1)] = 1000
    """Half messages in one turn of `HalfCheck.run_due`; the next turn continues the pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayConfig(Config):
    """Times of looks at the delay levels and of saves; the defaults are 4.9.4's."""

    first_look_s: Annotated[float, Seconds()] = 1
    """Time from the start to the first look."""
    look_every_s: Annotated[float, Seconds(0.001)] = 0.1
    """Time between two looks, in whole milliseconds."""
    retry_s: Annotated[float, Seconds(0.001)] = 10
    """Time from a failure (a full disk, a damaged queue) to the next look at the same level."""
    save_every_s: Annotated[float | None, Seconds()] = 10
    """Time from the first unsaved delivery to the save; None leaves saving to `DelaySchedule.save`."""
    most_at_once: Annotated[int, Between(1)] = 10_000
    """Most messages of a level in one turn; the rest is due at once."""
