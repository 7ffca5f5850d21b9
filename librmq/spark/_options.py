"""Options of the data source, checked on the driver before any task, and the conditions of its errors.

A condition is a short name in each sentence of librmq that Spark shows, by which a job can tell errors apart.

==================  ====================================================================
``RMQ_DATA_LOSS``   messages that a read should return are deleted, or a store is gone
``RMQ_DAMAGED``     a file of a store is damaged
``RMQ_BAD_OPTION``  an option, a column, a filter or another value is wrong
``RMQ_LOCKED``      another process writes to the store
``RMQ_ERROR``       any other error of librmq
==================  ====================================================================
"""

from __future__ import annotations

import functools
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeVar, cast
from urllib.parse import unquote, urlsplit

from librmq.columns import DataLossError, ReadOptions, ReadSelection, RemoteStore
from librmq.columns.options import (
    EARLIEST,
    LARGEST_OFFSET,
    Mode,
    OffsetBounds,
    OffsetTimes,
    View,
    check_filters,
    topics_named,
)
from librmq.columns.remote import located
from librmq.config import suggest, to_timestamp_ms
from librmq.errors import ConfigError, CorruptionError, FilterError, RmqError, StoreIOError, StoreLockedError

READ_OPTIONS: Final = (
    "path", "paths", "view", "topic", "topicPattern", "queue", "tags", "sql", "startingOffsets",
    "endingOffsets", "since", "until", "startingOffsetsByTimestamp", "endingOffsetsByTimestamp",
    "failOnDataLoss", "mode", "asRecovered", "minPartitions", "minOffsetsPerTrigger", "maxOffsetsPerTrigger",
    "maxBytesPerTrigger", "maxTriggerDelay", "checksums", "names", "storageOptions", "at",
    "columns", "includeHeaders",
)  # fmt: skip
WRITE_OPTIONS: Final = (
    "path", "topic", "queue", "orderBy", "jobId", "queues", "staging", "wait", "names", "checkpointLocation",
)  # fmt: skip
_STREAM_OPTIONS: Final = (
    "minOffsetsPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "maxTriggerDelay", "checkpointLocation",
)  # fmt: skip
_SPELLINGS: Final = {
    "topics": "topic",
    "queueid": "queue",
    "selector": "sql",
    "startingtimestamp": "since",
    "endingtimestamp": "until",
}
"""Options that have another name in `librmq.columns`, which is theirs too, and the later one. Both work until 1.0."""
_LARGEST_QUEUE_ID: Final = (1 << 31) - 1
_MILLIS: Final = re.compile(r"-?\d{1,18}")
_QUEUE_NAME: Final = re.compile("0|[1-9][0-9]*")
"""A queue's number, as the text by which offsets are looked up."""


_OF_KAFKA: Final = {
    "kafka.bootstrap.servers": "the option path names the folder of a store",
    "subscribe": "the option topic names topics",
    "subscribepattern": "the option topicPattern selects topics",
    "assign": "the options topic and queue select queues",
    "groupidprefix": "a read belongs to no group",
    "kafka.group.id": "a read belongs to no group",
    "startingoffsetsbytimestampstrategy": "a time after the last message stands for the end of a queue",
}
"""Options of Spark's source for Kafka that this source does not have, and what it has for them."""

_OF_COLUMNS: Final = {
    "offsets": "the options startingOffsets and endingOffsets limit offsets",
    "filter": "give the condition to the query, as in .where(…)",
    "files": "the option path names the folder of a store",
}
"""Settings of `librmq.columns` that are no text, and what the source has for them."""


def refuse_unknown(options: Mapping[str, str], names: Any, what: str) -> None:
    """Raise `ConfigError` for an option outside of ``names``, in whatever spelling."""
    expected = set(map(plain_option, names))
    for name in options:
        if name.lower() in _OF_KAFKA:
            raise ConfigError(f"option {name} is one of Kafka's; for {what} rocketmq {_OF_KAFKA[name.lower()]}")
        if name.lower().startswith("kafka."):
            raise ConfigError(f"option {name} is one of Kafka's clients; {what} rocketmq reads files: remove it")
        if plain_option(name) in _OF_COLUMNS:
            remedy = _OF_COLUMNS[plain_option(name)]
            raise ConfigError(f"option {name} is one of librmq.columns; for {what} rocketmq {remedy}")
        if plain_option(name) not in expected:
            raise ConfigError(f"unknown option {name!r} for {what} rocketmq: {suggest(name, names)}")


def refuse_for_batches(options: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an option that only a stream obeys."""
    stream_options = _recognized(options, _STREAM_OPTIONS)
    if stream_options:
        raise ConfigError(f"option {next(iter(stream_options))}: only a stream has it; remove it, or use a stream")


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """Check options, whose names are case-insensitive; `ConfigError`, `FilterSyntaxError`."""
    refuse_unknown(options, READ_OPTIONS, "reading")
    values = _recognized(options, READ_OPTIONS)
    view = _choice(values, "view", ("messages", "all", "queues", "log", "progress"), "messages")
    if view == "progress":  # The reader of this view parses its own options.
        raise ConfigError(
            "option view: progress is for reads with spark.read alone; here it is messages, all, queues or log"
        )
    if parse_names(options) == "kafka" and view not in ("messages", "all"):
        raise ConfigError("option names: Kafka's names are for the views messages and all")
    if includes_headers(options) and parse_names(options) != "kafka":
        raise ConfigError("option includeHeaders: it is for names=kafka; otherwise read the column properties")
    mode = _choice(values, "mode", ("FAILFAST", "PERMISSIVE", "DROPMALFORMED"), "FAILFAST", upper=True)
    topics = _list(values, "topic")
    if topics is not None and "topicPattern" in values:
        raise ConfigError("options topic and topicPattern: expected only one of them, found both")
    pattern = values.get("topicPattern")
    try:
        topic_pattern = None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"option topicPattern: {pattern!r} is not a regular expression: {error}") from None
    ids = _list(values, "queue")
    selector = values.get("sql")
    tags = check_filters(view, values.get("tags"), selector, "option sql")
    begin_ms, end_ms = _time(values, "since"), _time(values, "until")
    if begin_ms is not None and end_ms is not None and begin_ms > end_ms:
        raise ConfigError(f"option since: expected a time before {end_ms}, the end, found {begin_ms}")
    starting, ending = _offsets(values, "startingOffsets", "earliest"), _offsets(values, "endingOffsets", "latest")
    if view == "log" and (starting, ending) != ("earliest", "latest"):
        raise ConfigError(
            "options startingOffsets, endingOffsets: the view log is not read by queue; give since and until, or "
            "read the view messages"
        )
    storage_options = _storage_options(values)
    paths = _paths(values, storage_options)
    if storage_options is not None and not any("://" in path for path in paths):
        raise ConfigError(f"option storageOptions: it is for URLs such as s3://bucket/store; remove it for {paths[0]}")
    return ReadOptions(
        paths=paths,
        view=cast(View, view),
        selection=ReadSelection(
            **({"topic_pattern": topic_pattern} if topics is None else topics_named(topics)),
            queue_ids=None if ids is None else frozenset(_queue_id(text) for text in ids),
            begin_ms=begin_ms,
            end_ms=end_ms,
            tags=tags,
            internal=view != "messages",
        ),
        selector=selector,
        starting=starting,
        ending=ending,
        fail_on_data_loss=_flag(values, "failOnDataLoss", default=True),
        mode=cast(Mode, mode),
        as_recovered=_flag(values, "asRecovered", default=False),
        min_partitions=_whole_number("minPartitions", values.get("minPartitions", "1"), 1),
        checksums=_flag(values, "checksums", default=True),
        storage_options=storage_options,
        at=_moment(values),
        several=len(paths) > 1 or any(_is_glob(text) for text in (values.get("path", ""), values.get("paths", ""))),
    )


def _moment(values: Mapping[str, str]) -> datetime | int | None:
    """Return the moment that a read shows: a time, or the physical offset of the log's end; None for now."""
    text = values.get("at")
    if text is None:
        return None
    if text.isdecimal() and text.isascii():
        return int(text)
    with suppress(ValueError):
        time = datetime.fromisoformat(text)
        if time.tzinfo is not None:
            return time
    raise ConfigError(
        f"option at: expected a time with a zone such as 2026-11-20T08:00:00+00:00, or a physical offset, found "
        f"{text!r:.80}"
    )


def refuse_urls(paths: Sequence[str], what: str) -> None:
    """Raise `ConfigError` if one of the stores is behind a URL, which ``what`` can't read."""
    for path in paths:
        if "://" in path:
            raise ConfigError(
                f"option path: {path}: {what} only a store in a mounted file system; copy the store there, or read its "
                'messages with spark.read.format("rocketmq")'
            )


def parse_names(options: Mapping[str, str]) -> str:
    """Return which names the columns have: ``rocketmq`` or ``kafka``."""
    return _choice(_recognized(options, ("names",)), "names", ("rocketmq", "kafka"), "rocketmq")


def includes_headers(options: Mapping[str, str]) -> bool:
    """Return whether a read with Kafka's names has the column ``headers``."""
    return _flag(_recognized(options, ("includeHeaders",)), "includeHeaders", default=False)


def parse_columns(options: Mapping[str, str]) -> list[str] | None:
    """Return the columns of the option ``columns``, as the user names them; None without the option."""
    columns = _list(_recognized(options, ("columns",)), "columns")
    for name in columns or ():
        if columns is not None and columns.count(name) > 1:
            raise ConfigError(f"option columns: {name!r} is named twice; name each column once")
    return columns


@dataclass(frozen=True)
class StreamLimits:
    """The checked limits of a trigger of a stream."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    """Bytes of records as stored."""
    min_offsets: int = 0
    """A trigger with fewer messages waits, for ``max_delay_seconds``."""
    max_delay_seconds: float = 900

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> StreamLimits:
        """Check options, whose names are case-insensitive; `ConfigError`."""
        values = _recognized(options, READ_OPTIONS)

        def whole(name: str) -> int | None:
            return _whole_number(name, values[name], 1) if name in values else None

        limits = cls(
            max_offsets=whole("maxOffsetsPerTrigger"),
            max_bytes=whole("maxBytesPerTrigger"),
            min_offsets=whole("minOffsetsPerTrigger") or 0,
            max_delay_seconds=_duration(values.get("maxTriggerDelay", "15m")),
        )
        if "maxTriggerDelay" in values and not limits.min_offsets:
            raise ConfigError("option maxTriggerDelay: it limits the wait for minOffsetsPerTrigger, which is not given")
        if limits.max_offsets is not None and limits.min_offsets > limits.max_offsets:
            raise ConfigError(
                f"options minOffsetsPerTrigger, maxOffsetsPerTrigger: expected the first not above the second, "
                f"found {limits.min_offsets} and {limits.max_offsets}"
            )
        return limits


@dataclass(frozen=True)
class WriteOptions:
    """The checked options of a write."""

    path: str
    topic: str | None = None
    """Values for rows without a column of that name."""
    queue_id: int | None = None
    queues: int | None = None
    """Number of queues for rows without a queue; None for those of their topic."""
    order_by: str | None = None
    job_id: str | None = None
    staging: str | None = None
    wait_seconds: float = 60
    """Seconds to wait for another writer to release the store: before the job's work, and again at its commit."""
    names: str = "rocketmq"
    checkpoint: str | None = None
    """The checkpoint of a stream."""

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> WriteOptions:
        """Check options, whose names are case-insensitive; `ConfigError`."""
        refuse_unknown(options, WRITE_OPTIONS, "writing")
        values = _recognized(options, WRITE_OPTIONS)
        if "path" not in values:
            raise ConfigError(
                "option path: expected the folder of a store, found none; INSERT INTO a table has none, because Spark "
                'does not pass the options of a table: use df.write.format("rocketmq").mode("append").save(path)'
            )
        if "queue" in values and "queues" in values:
            raise ConfigError("options queue and queues: expected only one of them, found both")
        return cls(
            path=local_path(values["path"]),
            topic=values.get("topic"),
            queue_id=_queue_id(values["queue"]) if "queue" in values else None,
            queues=_whole_number("queues", values["queues"], 1) if "queues" in values else None,
            order_by=values.get("orderBy"),
            job_id=_job_id(values.get("jobId")),
            staging=local_path(values["staging"]) if "staging" in values else None,
            wait_seconds=_seconds("wait", values["wait"]) if "wait" in values else cls.wait_seconds,
            names=parse_names(options),
            checkpoint=values.get("checkpointLocation"),
        )


# ---------------------------------------------------------------------------------------------------- single options


def _recognized(options: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the options of these names, in whatever spelling."""
    spellings: dict[str, str] = {}
    for key in sorted(options):
        first = spellings.setdefault(plain_option(key), key)
        if first != key:
            raise ConfigError(f"options {first} and {key}: expected only one of them, found both")
    return {name: options[spellings[plain_option(name)]] for name in names if plain_option(name) in spellings}


def plain_option(name: str) -> str:
    """Return an option's name without case and underscores, of two spellings that of `librmq.columns`."""
    plain = name.replace("_", "").lower()
    return _SPELLINGS.get(plain, plain)


def _choice(
    values: Mapping[str, str], name: str, choices: tuple[str, ...], default: str, *, upper: bool = False
) -> str:
    text = values.get(name, default)
    choice = text.upper() if upper else text.lower()
    if choice not in choices:
        raise ConfigError(f"option {name}: unknown value {text!r}: {suggest(text, choices)}")
    return choice


def _flag(values: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = values.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"option {name}: expected true or false, found {text!r}")
    return text == "true"


def _whole_number(name: str, text: str, minimum: int) -> int:
    if not (_MILLIS.fullmatch(text.strip()) and minimum <= int(text) <= LARGEST_OFFSET):
        raise ConfigError(f"option {name}: expected a whole number of at least {minimum}, found {text!r}")
    return int(text)


def _queue_id(text: str) -> int:
    queue_id = _whole_number("queue", text, 0)
    if queue_id > _LARGEST_QUEUE_ID:
        raise ConfigError(f"option queue: expected at most {_LARGEST_QUEUE_ID}, found {text!r}")
    return queue_id


def _job_id(text: str | None) -> str | None:
    """Check a job id, which names files and a folder."""
    if text is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text):
        return text
    raise ConfigError(
        f"option jobId: expected a letter or digit, then up to 99 letters, digits, '.', '_' or '-', "
        f"found {text[:120]!r}"
    )


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < 1e9:
        raise ConfigError(f"option {name}: expected a number of seconds, found {text!r}")
    return seconds


def _duration(text: str) -> float:
    match = re.fullmatch(r"\s*(\d{1,9})\s*(ms|s|m|h)\s*", text)
    if match is None:
        raise ConfigError(f"option maxTriggerDelay: expected a duration such as 30s or 15m, found {text!r}")
    return int(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[match[2]]


def _time(values: Mapping[str, str], name: str) -> int | None:
    """Return a time in milliseconds, which a user gives as such, or as a date with a zone."""
    text = values.get(name)
    if text is None:
        return None
    if _MILLIS.fullmatch(text.strip()):
        return int(text)
    with suppress(ValueError):
        time = datetime.fromisoformat(text)
        if time.tzinfo is not None:
            return to_timestamp_ms(name, time)
    raise ConfigError(
        f"option {name}: expected milliseconds since 1970, or a time with a zone such as 2026-11-20T08:00:00+00:00, "
        f"found {text!r:.80}"
    )


def _list(values: Mapping[str, str], name: str) -> list[str] | None:
    if name not in values:
        return None
    items = [part.strip() for part in values[name].split(",") if part.strip()]
    if not items:
        raise ConfigError(f"option {name}: expected one or several, separated by commas, found {values[name]!r}")
    return items


def _offsets(values: Mapping[str, str], name: str, default: Literal["earliest", "latest"]) -> OffsetBounds:
    by_time = f"{name}ByTimestamp"
    if by_time in values:
        if name in values:
            raise ConfigError(f"options {name} and {by_time}: expected only one of them, found both")
        return OffsetTimes(_by_queue(by_time, values[by_time], 0))
    text = values.get(name, default).strip()
    if text.lower() == "earliest":
        return "earliest"
    if text.lower() == "latest":
        return "latest"
    return _by_queue(name, text, EARLIEST)


def _by_queue(name: str, text: str, minimum: int) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
        _check_offsets(document, minimum)
    except (ValueError, RecursionError):
        expected = (
            'JSON of milliseconds since 1970 like {"TopicA": {"0": 1700000000000}}'
            if minimum == 0
            else 'earliest, latest, or JSON like {"TopicA": {"0": 23, "1": -1}} (-2 is earliest, -1 latest)'
        )
        raise ConfigError(f"option {name}: expected {expected}, found {text[:200]!r}") from None
    return cast(Mapping[str, Any], document)


def _check_offsets(document: Any, minimum: int, depth: int = 0) -> None:
    if not isinstance(document, dict):
        raise ValueError
    for name, below in document.items():
        if isinstance(below, dict) and depth < 2:
            _check_offsets(below, minimum, depth + 1)
        elif (
            depth == 0
            or type(below) is not int
            or not (minimum <= below <= LARGEST_OFFSET and _QUEUE_NAME.fullmatch(name))
        ):
            raise ValueError


def _is_glob(text: str) -> bool:
    return any(character in text for character in "*?[")


def _storage_options(values: Mapping[str, str]) -> Mapping[str, Any] | None:
    if "storageOptions" not in values:
        return None
    try:
        document = json.loads(values["storageOptions"])
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ConfigError(
            'option storageOptions: expected arguments of the file system as JSON like {"anon": true}, '
            "found something else"  # it may hold keys
        )
    return document


def _paths(values: Mapping[str, str], storage_options: Mapping[str, Any] | None) -> tuple[str, ...]:
    texts: list[str] = []
    if "paths" in values:
        try:
            texts = list(json.loads(values["paths"]))
        except (ValueError, TypeError):
            texts = values["paths"].split(",")
    if values.get("path"):
        single = located(os.path.expanduser(values["path"]), storage_options)
        texts += [values["path"]] if isinstance(single, str) and os.path.exists(single) else values["path"].split(",")
    if not texts:
        raise ConfigError("option path: expected the folder of a store, found none")
    paths: list[str] = []
    for text in texts:
        store = located(os.path.expanduser(text.strip()), storage_options)
        path = store.url if isinstance(store, RemoteStore) else store
        if isinstance(store, RemoteStore) or os.path.exists(path) or not _is_glob(path):
            matches = [path]
        else:
            matches = sorted(filter(os.path.isdir, glob.glob(path)))
            if not matches:
                raise ConfigError(f"option path: no folder matches {path}")
        paths += matches
    unique: dict[str, str] = {}
    for path in paths:  # a symbolic link or another spelling leads to the same store, which is read once
        unique.setdefault(path if "://" in path else os.path.realpath(path), path)
    return tuple(unique.values())


def local_path(text: str) -> str:
    """Return a path of a mounted file system as an absolute one."""
    parts = urlsplit(text)
    if parts.scheme == "file" and not parts.netloc:
        text = unquote(parts.path)
    elif len(parts.scheme) > 1 and ("://" in text or not os.path.lexists(text)):  # one letter is a drive
        raise ConfigError(
            f"option path: {text!r}: expected a path in a mounted file system, found the scheme {parts.scheme}: "
            "write the path of the mount, such as /dbfs/…, or ./ before a relative path"
        )
    return os.path.abspath(os.path.expanduser(text))


_CONDITIONS: Final[tuple[tuple[type[RmqError], str], ...]] = (
    (DataLossError, "RMQ_DATA_LOSS"),
    (CorruptionError, "RMQ_DAMAGED"),
    (StoreLockedError, "RMQ_LOCKED"),
    (ConfigError, "RMQ_BAD_OPTION"),
    (FilterError, "RMQ_BAD_OPTION"),
    (RmqError, "RMQ_ERROR"),
)
_Class = TypeVar("_Class", bound=type)


def with_condition(error: RmqError) -> RmqError:
    """Put the condition of ``error`` before its text, unless it has one, and return it."""
    text = str(error)
    if not text.startswith("[RMQ_"):
        condition = next(name for kind, name in _CONDITIONS if isinstance(error, kind))
        error.args = (f"[{condition}] {text}",)
        if isinstance(error, StoreIOError):  # its text begins with the file
            error.filename = f"[{condition}] {error.filename}"
    return error


def shows_conditions(kind: _Class) -> _Class:
    """Let the methods of a class that Spark calls, and the rows that they return, raise errors with a condition."""
    for name, method in list(vars(kind).items()):
        if callable(method) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, raises_conditions(method))
    return kind


def raises_conditions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, whose errors of librmq have a condition, also those of an iterator that it returns."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except RmqError as error:
            with_condition(error)
            raise
        return _rows(result) if isinstance(result, Iterator) else result

    return call


def _rows(rows: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from rows
    except RmqError as error:
        with_condition(error)
        raise
