"""A read as values: what it selects of a store, and the parts into which a plan divides it.

They are apart from the planner, so that a process that only reads does not load the store.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from librmq.config import nearest
from librmq.errors import ConfigError, StoreError
from librmq.files import Damage
from librmq.message.topics import SYSTEM_TOPICS, SystemTopic, is_user_topic
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.columns")
View = Literal["messages", "all", "queues", "log"]
Mode = Literal["FAILFAST", "PERMISSIVE", "DROPMALFORMED"]
OffsetBounds = Literal["earliest", "latest"] | Mapping[str, Any]
"""Offsets by topic and queue id, or by store, topic and queue id; -2 is the earliest, -1 the latest."""


class OffsetTimes(dict[str, Any]):
    """Store times in place of offsets: each stands for the first message stored at that time or later."""


EARLIEST: Final = -2
LATEST: Final = -1
LARGEST_OFFSET: Final = (1 << 63) - 1


def check_filters(view: str, tags: str | None, sql: str | None, name: str) -> str | None:
    """Check the two filters of a read; return the tags, or None if they select every message.

    Args:
        view: The view to read: messages, queues or log.
        tags: A tag expression.
        sql: An SQL92 expression.
        name: The caller's name for ``sql``, used in the error.

    Raises:
        ConfigError: A filter is no text, or the view has no properties, which ``sql`` needs.
        FilterSyntaxError: An expression does not compile.
    """
    for setting, text, example in (("tags", tags, "created || paid"), (name, sql, "price > 5")):
        if not isinstance(text, str | None):
            raise ConfigError(f"{setting}: expected text such as {example!r}, found {text!r:.80}")
    if tags is not None:
        from librmq.filter import TagFilter  # loads a grammar that few reads need

        TagFilter(tags)
    if sql is not None:
        if view == "queues":
            raise ConfigError(f"{name}: the view queues has no properties; read the view messages")
        from librmq.filter import SqlFilter

        SqlFilter(sql)
    return None if tags in (None, "*", "") else tags


@dataclass(frozen=True)
class ReadSelection:
    """The messages that options and pushed-down filters select by topic, queue, offset, time and tag."""

    topics: frozenset[str] | None = None
    """Names of topics; None for all."""
    topic_pattern: re.Pattern[str] | None = None
    """Pattern that the whole name of a topic matches; None for all."""
    queue_ids: frozenset[int] | None = None
    """Numbers of queues; None for all."""
    begin_offset: int = 0
    """First queue offset."""
    end_offset: int = LARGEST_OFFSET
    """Exclusive end of the queue offsets."""
    begin_ms: int | None = None
    """First store time, in milliseconds since 1970; None without a limit."""
    end_ms: int | None = None
    """Exclusive end of the store times."""
    tags: str | None = None
    """Expression of tags, separated by ``||``; None for all."""
    queues: frozenset[tuple[str, int]] | None = None
    """The only wanted queues; None for all queues of the topics."""
    internal: bool = False
    """Whether to read topics that are not named and are no user topics: the broker's own, retries, dead letters."""

    @property
    def has_times(self) -> bool:
        """Whether store times limit the messages."""
        return self.begin_ms is not None or self.end_ms is not None

    @property
    def window_ms(self) -> tuple[int, int]:
        """The first store time and the exclusive end, for all numbers of 64 bits."""
        first = -(1 << 63) if self.begin_ms is None else self.begin_ms
        return first, 1 << 63 if self.end_ms is None else self.end_ms

    def has_queue(self, topic: str, queue_id: int) -> bool:
        """Return whether the read can include messages of the queue."""
        if self.queue_ids is not None and queue_id not in self.queue_ids:
            return False
        if self.queues is not None:
            return (topic, queue_id) in self.queues
        return self.has_topic(topic)

    def has_topic(self, topic: str) -> bool:
        """Return whether the read includes a topic."""
        is_chosen = self.topics is not None or self.topic_pattern is not None
        return self.names_topic(topic) and (is_chosen or self.internal or is_user_topic(topic))

    def names_topic(self, topic: str) -> bool:
        """Return whether a name or pattern selects a topic, or there is none."""
        if self.topics is not None:
            return topic in self.topics
        return self.topic_pattern is None or self.topic_pattern.fullmatch(topic) is not None

    @property
    def takes_all(self) -> bool:
        """Return whether a read of the log wants every record, so that no record needs a check."""
        return self == ReadSelection(internal=True)


def topics_named(names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of `ReadSelection` for names of topics, in which ``*`` stands for any text."""
    texts = list(names)
    if not any("*" in text for text in texts):
        return {"topics": frozenset(texts)}
    patterns = (".*".join(map(re.escape, text.split("*"))) for text in texts)
    return {"topic_pattern": re.compile("|".join(patterns), re.DOTALL)}


@dataclass(frozen=True)
class Predicate:
    """A condition on rows: a `pyarrow.compute` expression and the columns that it reads."""

    expression: Any
    columns: tuple[str, ...]
    tags: frozenset[str] | None = None
    """The only tags that rows can have which it selects, and perhaps others; None if it can select any."""


@dataclass(frozen=True)
class ReadOptions:
    """The checked options of a read."""

    paths: tuple[str, ...]
    """Folders or URLs of the stores."""
    view: View = "messages"
    """What a row is: a message of user topics (``messages``) or of all topics (``all``), an entry of a queue
    (``queues``), or a record (``log``)."""
    selection: ReadSelection = field(default_factory=ReadSelection)
    """The messages to read."""
    selector: str | None = None
    """SQL92 expression that messages match; None for all."""
    predicate: Predicate | None = None
    """Condition on the columns of rows; None for all."""
    reports_all_damage: bool = False
    """Whether rows about damage pass the predicate, whose columns they mostly lack."""
    starting: OffsetBounds = "earliest"
    """First queue offsets to read."""
    ending: OffsetBounds = "latest"
    """Queue offsets at which to end."""
    offset_settings: tuple[str, str] = ("option startingOffsets", "option endingOffsets")
    """What the caller calls ``starting`` and ``ending``, for errors."""
    fail_on_data_loss: bool = True
    """Whether deleted messages raise an error."""
    mode: Mode = "FAILFAST"
    """What a read does about damage: raises, reports it by a row, or leaves it out."""
    as_recovered: bool = False
    """Whether ``FAILFAST`` reads a store as a recovery would leave it where that cuts sound records."""
    counts: bool = False
    """Whether only the number of rows matters, perhaps by topic, so that queue entries are enough."""
    min_partitions: int = 1
    """Least number of parts to plan."""
    checksums: bool = True
    """Whether to check the bodies of messages."""
    several: bool = False
    """Whether several stores can be read, so that each row needs its store."""
    storage_options: Mapping[str, Any] | None = None
    """Arguments of the file system, for paths that are URLs."""
    at: datetime | int | None = None
    """The moment at which the store is read: a time, or the physical offset of the log's end; None for now."""


def log_unknown_topics(options: ReadOptions, topics: Collection[str]) -> None:
    """Log which of the topics that a read names are not among ``topics`` of its stores, and which one is near.

    A store has most topics of the broker's own only once something is in them, so these are left out.
    """
    selection, stores = options.selection, ", ".join(options.paths)
    for topic in sorted((selection.topics or frozenset()) - SYSTEM_TOPICS - {SystemTopic.TIMER, *topics}):
        near = nearest(topic, topics)
        _log.warning(
            "topic %(topic)s has no queue in %(stores)s; %(hint)s",
            topic=repr(topic),
            stores=stores,
            hint="librmq topics lists the topics" if near is None else f"did you mean {near!r}?",
        )
    pattern = selection.topic_pattern
    if pattern is not None and not any(map(selection.names_topic, topics)):
        _log.warning(
            "no topic of %(stores)s matches %(pattern)s; librmq topics lists the topics",
            stores=stores,
            pattern=pattern.pattern,
        )


# ---- parts of a read

REST: Final = "to read the rest, set fail_on_data_loss=False, in Spark failOnDataLoss=false; repeat an export"
"""What to do about deleted messages, for errors."""


class DataLossError(StoreError):
    """Requested messages were deleted; with ``fail_on_data_loss`` false the rest is read."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Entries of a queue from ``begin`` to ``end``; those from ``inline_from`` on are in ``inline``, not in files."""

    topic: str
    queue_id: int
    begin: int
    end: int
    inline_from: int
    inline: bytes = b""


@dataclass(frozen=True, slots=True)
class RemoteLog:
    """The log of a store behind a URL, for a process that did not plan the read."""

    url: str
    storage_options: Mapping[str, Any]
    """Arguments of the file system."""
    sizes: Mapping[str, int]
    """Lengths of the log's files, by name within the store."""
    folder: str
    """Where the planner's machine keeps what is fetched, until the read has ended."""


@dataclass(frozen=True, slots=True)
class Part:
    """The work of one task: entries of queues, or a section of the log with its entries."""

    path: str
    """Folder of the store."""
    log_file_size: int
    """Size of a file of the log, in bytes."""
    queue_file_size: int
    """Size of a file of a queue, in bytes."""
    slices: tuple[Slice, ...]
    """Entries to read, by queue."""
    walk: tuple[int, int] | None = None
    """Section of the log to read, as physical offsets of begin and end; None without one."""
    has_batches: bool = False
    """Whether a record can be a batch of messages."""
    damage: tuple[Damage, ...] = ()
    """Damage that planning found and that does not raise."""
    remote: RemoteLog | None = None
    """Where the log is, if another process than the planner reads it; the slices then hold all entries."""
