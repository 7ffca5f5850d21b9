"""The broker's tables (topics, groups, progress, filters) in the files of a ``config`` folder.

::

    topics.json              topicConfigTable        topic -> queues and permission          dataVersion
    subscriptionGroup.json   subscriptionGroupTable  group -> how it may consume             dataVersion
    consumerOffset.json      offsetTable             topic@group -> queue id -> queue offset
    lmqConsumerOffset.json   offsetTable             the same of a broker of 5.x with enableLmq=true
                             lmqOffsetTable          topic@group -> queue offset, of light groups
    delayOffset.json         offsetTable             delay level -> queue offset in its queue
    consumerFilter.json      filterDataByTopic       topic -> group -> filter
    ../librmq/schedules.json schedules               name -> when a schedule sends what, and how far it is
    ../librmq/starts.json    startTable              group -> topic -> time of its move by ``start_at``, in ms
    *.json.bak               the previous content of the file
    consumerOffsets.json     an export of ``mqadmin rocksDBConfigToJson``, which a person puts there

5.x can keep the first three in RocksDB, in ``consumerOffsets/`` or another folder here (`librmq.store.format.rocksdb`).
Then a file counts only if its data version has more changes, as it does for a broker that starts. Without the extra
``rocksdb``, or if the database is damaged, ``consumerOffset.json`` can be from an earlier time, so progress comes from
the export, or is unknown. It is unknown too if its file is missing where a broker has written one. Of
``consumerOffset.json`` and ``lmqConsumerOffset.json`` the later one counts.

Mirrors ``ConfigManager`` and its subclasses ``TopicConfigManager``, ``SubscriptionGroupManager``,
``ConsumerOffsetManager``, ``ScheduleMessageService`` and ``ConsumerFilterManager``. Other
content of a file is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from copy import copy
from functools import cached_property, partial
from itertools import chain
from sys import intern
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from librmq.errors import CorruptionError, MalformedError, MissingExtraError
from librmq.files import DiskFiles, Files, file_size
from librmq.files.interface import read_replaced
from librmq.java import json as java_json
from librmq.java.json import NumberColumns, NumberRows
from librmq.message.topics import (
    MESSAGE_TYPE,
    TOPIC_TYPES,
    TopicPrefix,
    TopicType,
    has_no_row,
    is_own_group,
)
from librmq.override import override
from librmq.runtime import ProgressSaver
from librmq.runtime.event_log import EventLog
from librmq.store.format.directory import CONSUMEQUEUE, has_abort, is_database, tables_database
from librmq.store.format.documents import (
    OWN_FOLDER,
    SCHEDULES_FILE,
    START_FILE,
    checked,
    full_disk_suffered,
    with_checksum,
)
from librmq.store.format.group_page import GroupPage, KeptPage, take_positions

if TYPE_CHECKING:
    from librmq.filter import BloomFilter, Registrations
    from librmq.store.format.rocksdb import StoredTable, StoredTables

Rows = dict[Any, Any]
_log = EventLog("librmq.store")

MOST_QUEUES: Final = 1 << 16
"""The most queues that an administrator can give a topic."""
_DATA_VERSION: Final = "dataVersion"
_TOPIC_NUMBERS: Final = ("readQueueNums", "writeQueueNums", "perm", "topicSysFlag")
_GROUP_NUMBERS: Final = ("retryMaxTimes", "retryQueueNums")
_BACKUP: Final = ".bak"
_LIGHT_OFFSETS: Final = "lmqConsumerOffset.json"
_LIGHT_TABLE: Final = "lmqOffsetTable"
_ATTRIBUTES: Final = "attributes"


_STATIC_TOPICS: Final = "topicQueueMapping.json"
_WITHOUT: Final = {
    "topics.json": "topics must be created again",
    "subscriptionGroup.json": "groups have default settings",
    "consumerOffset.json": "groups begin where their consumers' consume_from says",
    "delayOffset.json": "delayed messages are delivered again",
    "consumerFilter.json": "consumers must subscribe with their filters again",
}
"""What follows from the loss of a table."""


def repair_advice(path: str, files: Files) -> str:
    """Return what to do about the table in ``path``, or its backup, that nothing can read."""
    path = path.removesuffix(_BACKUP)
    name = os.path.basename(path)
    present = [name + end for end in ("", _BACKUP) if file_size(files, path + end) is not None]
    effect = _WITHOUT.get(name, "the store lacks what it held")
    return f"copy {name} from a backup of the store, or move {' and '.join(present)} away: then {effect}"


def progress_export(folder: str) -> str:
    """Return the command that exports the progress in a RocksDB in ``folder`` to the file that `BrokerTables` reads."""
    return f"mqadmin rocksDBConfigToJson -p {folder} -t consumerOffsets -e {folder}/consumerOffsets.json"


class BrokerTables:
    """The tables, read by `open` and written by `persist`, all or one by one. Not thread-safe."""

    def __init__(self, folder: str, files: Files, *, takes_page: bool = True) -> None:
        self._folder = folder
        self._files = files
        self.unread: str | None = None
        """Why RocksDB, where the broker keeps tables, can't be read, and what to do; None if it was, or has none."""
        stored = self._stored_tables()
        self.topics: ConfigTable = self._table(
            "topics.json",
            "topicConfigTable",
            partial(_check_numbers, _TOPIC_NUMBERS),
            stored and stored.topics,
            versioned=True,
        )
        """Rows as `topic_row` makes them, by topic."""
        self.groups: ConfigTable = self._table(
            "subscriptionGroup.json",
            "subscriptionGroupTable",
            partial(_check_numbers, _GROUP_NUMBERS),
            stored and stored.groups,
            versioned=True,
        )
        """Rows as `group_row` makes them, by consumer group."""
        self.database: str | None = tables_database(folder, files)
        """The folder of a RocksDB that has the progress; None if the files here have it."""
        self.offsets: ConfigTable = self._offsets(stored and stored.offsets)
        """Queue offsets by queue id, by ``topic@group``; empty where `unknown_progress` says why. They are those of the
        `GroupPage` where that is newer."""
        page = self._page(writable=False) if takes_page else None
        if page is not None and take_positions(page.opened, self.offsets.rows):
            self.offsets.is_stored = True
        self.delays: ConfigTable = self._table("delayOffset.json", "offsetTable", _check_offsets)
        """Queue offsets by delay level; empty where `unknown_delays` says why."""
        self.filter_table: ConfigTable = self._table("consumerFilter.json", "filterDataByTopic", _check_objects)

    @classmethod
    def open(cls, folder: str, *, files: Files | None = None, takes_page: bool = True) -> Self:
        """Read the tables in ``folder``, which need not exist. Changes nothing.

        Without ``takes_page``, progress is that of the table, for a broker, which takes that of its `kept_page`.

        Raises:
            CorruptionError: Neither a file nor its backup is readable.
        """
        return cls(folder, files or DiskFiles(), takes_page=takes_page)

    def _stored_tables(self) -> StoredTables | None:
        """Read the tables in RocksDB, if the broker keeps them there."""
        if not any(
            is_database(os.path.join(self._folder, name), self._files) for name in self._files.names(self._folder)
        ):
            return None
        from librmq.store.format.rocksdb import read_tables

        try:
            return read_tables(self._folder, self._files)
        except (MissingExtraError, CorruptionError) as error:
            self.unread = str(error)
            return None

    def _page(self, *, writable: bool) -> GroupPage | None:
        """Return the page of groups, which is newer than the table of progress; None if the table counts alone."""
        if self.database is not None:  # a broker that has run since does not change the file here
            return None
        store = os.path.dirname(self._folder)
        is_backup = self.offsets.replaced is not None
        return GroupPage.open(self._files, store, lambda: self.offsets.rows, is_backup=is_backup, writable=writable)

    def kept_page(self, flush: Callable[[], object]) -> KeptPage:
        """Return the page of groups for the broker that owns the store; ``flush()`` flushes the log."""
        store, files, table = os.path.dirname(self._folder), self._files, self.offsets
        page = self._page(writable=True)
        kept_page = KeptPage(files, store, flush, page)
        if page is None and self.database is None and (saved := GroupPage.saved(files, store, lambda: table.rows)):
            with full_disk_suffered(store, "messages in flight"):
                for name, place in saved.named():
                    position = self.consumer_offset(name.topic, name.group, name.queue_id)
                    rows = saved.flights.get(place.number)
                    if rows and position is not None:
                        kept_page.restore(name, position, place.next_offset or 0, rows)
        return kept_page

    def _offsets(self, stored: StoredTable | None) -> ConfigTable:
        if stored is not None:
            return self._table("consumerOffset.json", "offsetTable", _check_offsets_by_text, stored)
        if self.database is not None:
            return self._table("consumerOffsets.json", "offsetTable", _check_offsets_by_text)
        plain = self._table("consumerOffset.json", "offsetTable", _check_offsets_by_text)
        path = os.path.join(self._folder, _LIGHT_OFFSETS)
        if not any(file_size(self._files, place) for place in (path, path + _BACKUP)):
            return plain
        light = _LightOffsets(path, "offsetTable", _check_offsets_by_text, versioned=False, files=self._files)
        return plain if plain.is_stored and plain.saved_ms > light.saved_ms else light

    def take(
        self,
        topics: Mapping[str, Any],
        groups: Mapping[str, Any],
        offsets: Mapping[str, Mapping[int, int]],
        delays: Mapping[int, int],
    ) -> None:
        """Take the rows that the broker of a store has now, in place of those that it has saved."""
        self.topics.replace(topics)
        self.groups.replace(groups)
        self.offsets.replace(offsets)
        self.delays.replace(delays)
        self.topics.is_new = False
        self.offsets.is_stored = self.delays.is_stored = True  # the broker's answers, before its first save too

    def with_delays(self, offsets: dict[int, int]) -> Self:
        """Return the same tables with other progress of the delay levels, which is not for saving."""
        tables = copy(self)
        tables.delays = copy(self.delays)
        tables.delays.rows = offsets
        return tables

    def replaced(self) -> list[str]:
        """Return, for each table that was read from its backup, what is wrong with its file."""
        tables = (self.topics, self.groups, self.offsets, self.delays, self.filter_table)
        return [table.replaced for table in tables if table.replaced is not None]

    def topic_notes(self) -> list[str]:
        """Return remarks about compacted topics, and about static ones, by topic."""
        rows = self.topics.rows.items()
        compacted = [topic for topic, row in rows if topic_attribute(row, "cleanup.policy") == "COMPACTION"]
        notes = [
            f"topic {topic} is compacted: its broker keeps older messages in compaction/, which librmq does not read"
            for topic in sorted(compacted)
        ]
        path = os.path.join(self._folder, _STATIC_TOPICS)
        try:
            static = sorted(ConfigTable(path, "topicQueueMappingInfoMap", dict, versioned=True, files=self._files).rows)
        except CorruptionError as error:
            return [*notes, f"which topics are static is unknown: {error}"]
        return notes + [
            f"static topic {topic} ({_STATIC_TOPICS}): its queues are spread over brokers, and clients see other queue "
            "ids and offsets than those here"
            for topic in static
        ]

    def unknown_progress(self) -> str | None:
        """Return why the progress of groups is unknown, and what to do; None if a file has it, or there is none yet."""
        if self.offsets.is_stored:
            return None
        if self.database is not None:
            return (
                f"the broker keeps the progress of groups in RocksDB, so it is unknown: {self.unread}, or export it by "
                f"{progress_export(self._folder)}"
            )
        was_saved = self._was_saved(self.offsets, bool(self._user_groups()))
        return f"the progress of groups is unknown: {_lacks(self.offsets)}" if was_saved else None

    def unknown_delays(self) -> str | None:
        """Return why the progress of the delay levels is unknown, and what to do; None as in `unknown_progress`."""
        is_known = self.delays.is_stored or not self._was_saved(self.delays, self.offsets.is_stored)
        return None if is_known else f"the progress of delay levels is unknown: {_lacks(self.delays)}"

    def _was_saved(self, table: ConfigTable, is_likely: bool) -> bool:
        """Return whether a broker has saved a table that is not there now.

        Each broker saves all tables at its close, and a topic as it makes it. After a kill the first save of another
        table may not have come yet, so other tables or queues must say that it ``is_likely``.
        """
        if file_size(self._files, table.path) is not None or file_size(self._files, table.path + _BACKUP) is not None:
            return True
        if not self.topics.is_stored:  # a store without a broker has no tables, and no retries either
            # Only a broker stores retries and dead letters.
            topics = self._files.names(os.path.join(os.path.dirname(self._folder), CONSUMEQUEUE))
            return any(topic.startswith((TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER)) for topic in topics)
        return is_likely or not has_abort(self._files, os.path.dirname(self._folder))

    def _user_groups(self) -> set[str]:
        topics = self.topics.rows
        of_topics = {
            topic.removeprefix(prefix)
            for prefix in (TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER)
            for topic in topics
            if topic.startswith(prefix)
        }
        return {group for group in of_topics | self.groups.rows.keys() if not is_own_group(group)}

    def _table(
        self,
        file: str,
        name: str,
        check: Callable[[Rows], Rows],
        stored: StoredTable | None = None,
        *,
        versioned: bool = False,
    ) -> ConfigTable:
        return ConfigTable(
            os.path.join(self._folder, file), name, check, versioned=versioned, files=self._files, stored=stored
        )

    @cached_property
    def starts(self) -> ConfigTable:
        """Times of moves by topic, by group: marks of groups that ``start_at`` has moved; only a broker reads it."""
        path = os.path.join(os.path.dirname(self._folder), START_FILE)
        return ConfigTable(path, "startTable", _check_starts, versioned=False, files=self._files)

    @cached_property
    def schedules(self) -> ConfigTable:
        """Rows as `librmq.scheduling.schedules` makes them, by the name of the schedule."""
        path = os.path.join(os.path.dirname(self._folder), SCHEDULES_FILE)
        return ConfigTable(path, "schedules", _check_objects, versioned=False, files=self._files)

    def progress(self) -> dict[tuple[str, str], dict[int, int]]:
        """Return all groups' queue offsets by queue id, by group and topic; the caller does not change them."""
        return progress_of(self.offsets.rows)

    def drop_progress(self) -> None:
        """Drop the progress of groups and delays in memory, for a view of a time whose progress is unknown."""
        self.offsets.rows = {name: {} for name in self.offsets.rows}
        self.delays.rows = {}

    def persist(self, now_ms: int) -> None:
        """Write the tables that have changed; durable when it returns.

        ``now_ms`` becomes the time of their data versions.
        """
        for table in (self.topics, self.groups, self.offsets, self.delays, self.filter_table):
            table.persist(now_ms)
        for own_table in (vars(self).get("starts"), vars(self).get("schedules")):  # None before the first use
            if own_table is not None and own_table.rows:
                own_table.persist(now_ms)

    def set_topic(self, topic: str, *, read_queues: int, write_queues: int, permission: int) -> None:
        """Make or change a topic; ``permission`` has the bits 4 read, 2 write, 1 inherited."""
        self.topics.set(topic, topic_row(topic, read_queues, write_queues, permission))

    def add_queues(self, topic: str, queues: int) -> None:
        """Make a topic, or let groups read more queues of it, so that they get the messages in ``queues`` queues.

        Clients still write to as many as before, so keys stay in their queues.
        """
        before, queues = self.topics.rows.get(topic, {}), min(queues, MOST_QUEUES)
        if queues > before.get("readQueueNums", 0) and not has_no_row(topic):
            row = topic_row(topic, queues, before.get("writeQueueNums", queues), before.get("perm", 6), before=before)
            self.topics.set(topic, row)

    def make_topic(self, topic: str) -> None:
        """Make a topic of one queue, readable and writable, unless it exists."""
        if topic not in self.topics.rows:
            self.set_topic(topic, read_queues=1, write_queues=1, permission=6)

    def set_group(self, group: str, *, retry_max_times: int) -> None:
        """Make a consumer group, or change how often it retries; its other settings remain."""
        row = self.groups.rows.get(group) or group_row(group)
        self.groups.set(group, {**row, "retryMaxTimes": retry_max_times})

    def consumer_offset(self, topic: str, group: str, queue_id: int) -> int | None:
        """Return a group's progress in a queue, the queue offset of its next message; None if never stored."""
        row: Mapping[int, int] = self.offsets.row(f"{topic}@{group}") or {}
        return row.get(queue_id)

    def set_consumer_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Set a group's progress in a queue."""
        name = f"{topic}@{group}"
        self.offsets.set(name, {**self.offsets.rows.get(name, {}), queue_id: queue_offset})

    def delay_offset(self, level: int) -> int:
        """Return the progress of a delay level's delivery in its queue."""
        queue_offset: int = self.delays.rows.get(level, 0)
        return queue_offset

    def set_delay_offset(self, level: int, queue_offset: int) -> None:
        """Set the progress of a delay level's delivery."""
        self.delays.set(level, queue_offset)

    @property
    def filters(self) -> Mapping[str, Any]:
        """Filters registered by consumer groups, by topic, as `librmq.filter.Registrations` reads them."""
        return self.filter_table.rows

    def registrations(self, now_ms: int, bloom: BloomFilter | None = None) -> Registrations:
        """Return these filters for the bitmaps of a store, with the bits of ``bloom``; None: with those of the file.

        Raises:
            ConfigError: A filter is malformed.
        """
        from librmq.filter import Registrations  # loads a grammar that few callers need

        return Registrations.of_rows(self.filters, now_ms, bloom)

    def set_filters(self, filters: Mapping[str, Any]) -> None:
        """Replace all filters."""
        self.filter_table.rows.clear()
        self.filter_table.rows.update(filters)


def topic_and_group(key: str) -> tuple[str, str] | None:
    """Return the topic and the group of a key of progress; None for another text, which a broker keeps and ignores."""
    topic, _, group = key.partition("@")
    return (topic, group) if topic and group and "@" not in group else None


def progress_of(rows: Mapping[str, dict[int, int]]) -> dict[tuple[str, str], dict[int, int]]:
    """Return queue offsets by queue id, by group and topic, of rows by ``topic@group``."""
    progress = {}
    for key, offsets in rows.items():
        if (names := topic_and_group(key)) is not None:
            progress[intern(names[1]), intern(names[0])] = offsets
    return progress


def topic_row(
    topic: str,
    read_queues: int,
    write_queues: int,
    permission: int,
    *,
    before: Mapping[str, Any] | None = None,
    attributes: Mapping[str, str | None] = MappingProxyType({}),
) -> dict[str, object]:
    """Make a row of ``topics.json``; what ``before`` has besides stays, attributes too but for those given."""
    row: dict[str, Any] = {
        "order": False,
        "perm": permission,
        "readQueueNums": read_queues,
        "topicFilterType": "SINGLE_TAG",
        "topicName": topic,
        "topicSysFlag": 0,
        "writeQueueNums": write_queues,
    }
    if before:
        row = {**before, **{setting: row[setting] for setting in ("readQueueNums", "writeQueueNums", "perm")}}
    if attributes:
        others = row.get(_ATTRIBUTES)
        new_attributes = {**others} if isinstance(others, Mapping) else {}
        for name, value in attributes.items():
            new_attributes.pop(f"+{name}", None)
            new_attributes[name] = value
        row[_ATTRIBUTES] = {name: value for name, value in new_attributes.items() if value is not None}
    return row


def topic_attribute(row: Mapping[str, Any], name: str) -> object:
    """Return an attribute in a topic's row, which a table of 4.9 lacks; None without it."""
    attributes = row.get(_ATTRIBUTES)
    return (attributes.get(name) or attributes.get(f"+{name}")) if isinstance(attributes, Mapping) else None


def topic_type(row: Mapping[str, Any]) -> TopicType:
    """Return the type in a topic's row: an attribute of 5.x, which a table of 4.9 lacks; MIXED by default."""
    named = topic_attribute(row, MESSAGE_TYPE)
    return next((kind for kind in TOPIC_TYPES if kind == named), "MIXED")


def group_row(group: str, retry_max_times: int = 16) -> dict[str, object]:
    """Make a row of ``subscriptionGroup.json``."""
    return {
        "brokerId": 0,
        "consumeBroadcastEnable": True,
        "consumeEnable": True,
        "consumeFromMinEnable": True,
        "groupName": group,
        "notifyConsumerIdsChangedEnable": True,
        "retryMaxTimes": retry_max_times,
        "retryQueueNums": 1,
        "whichBrokerWhenConsumeSlowly": 1,
    }


def _lacks(table: ConfigTable) -> str:
    return f"{table.path} is missing or empty: copy it from the store that this is a copy of, or from a backup"


class ConfigTable:
    """One file, a JSON object with the table as one of its values. Not thread-safe."""

    def __init__(
        self,
        path: str,
        name: str,
        check: Callable[[Rows], Rows],
        *,
        versioned: bool,
        files: Files,
        stored: StoredTable | None = None,
    ) -> None:
        self.path = path
        self._name = name
        self._check = check
        self._files = files
        self._changes = 0
        self.revision: int = 0
        """Number of changes since the table was read, also of those that callers made in `rows`, which they count."""
        self._is_own = os.path.basename(os.path.dirname(path)) == OWN_FOLDER  # so its last field is a checksum
        self._versioned = versioned
        self._rows_of = name if check is _check_offsets_by_text else None
        self._written: dict[Any, tuple[object, java_json.Written]] = {}  # rows in the file's form
        self._left_out: list[Any] = []  # keys of rows that can't be written
        self._stored: bytes | None = None  # the content of the file, None if it is unreadable
        self.page: KeptPage | None = None
        """The page of groups, which a write of the progress is noted on."""
        self.is_stored: bool = False
        """Whether the file, or its backup, has content."""
        self.replaced: str | None = None
        """What is wrong with the file in whose place its backup was read, and what that means."""
        self._document = self._load() if stored is None else self._load_stored(stored)
        self.is_new: bool = not self._document[name]
        """Whether nothing was stored; a broker's own topics are always stored with the first one."""

    @cached_property
    def rows(self) -> Rows:
        """The rows by their keys."""
        rows: Rows | NumberRows = self._document[self._name]
        if isinstance(rows, NumberRows):  # a million rows of progress are not read for what needs their columns alone
            rows = self._document[self._name] = rows.as_dict()
        return rows

    @property
    def has_rows(self) -> bool:
        """Whether `rows` has been read."""
        return "rows" in vars(self)

    def row(self, key: str) -> Any:  # noqa: ANN401 (a row of any table)
        """Return a row; None without one. Those of a table of progress are not all read for it."""
        rows = self._document[self._name]
        return rows.get(key) if isinstance(rows, NumberRows) else self.rows.get(key)

    def columns(self, few: int) -> NumberColumns | None:
        """Return the rows of a table of progress as columns; None if `rows` has been read, or ``few`` has room for all.

        ``few`` is a number of queues of all rows.
        """
        rows = self._document[self._name]
        return rows.columns() if isinstance(rows, NumberRows) and rows.pairs() > few else None

    def unnamed(self) -> list[str]:
        """Return the keys of a table of progress that name no topic and group, and so belong to no group."""
        rows: Rows | NumberRows = self._document[self._name]
        return [] if isinstance(rows, NumberRows) else [key for key in rows if topic_and_group(key) is None]

    def set(self, key: str | int, row: object) -> None:
        """Add or replace a row."""
        self.rows[key] = row
        self._changes += 1
        self.revision += 1

    def remove(self, key: str | int) -> None:
        """Remove an existing row."""
        del self.rows[key]
        self._written.pop(key, None)
        self._changes += 1
        self.revision += 1

    def replace(self, rows: Mapping[Any, object]) -> bool:
        """Take other rows in place of all; return whether they differ."""
        if rows == self.rows:
            return False
        self.rows.clear()
        self.rows.update(rows)
        self._written.clear()
        self._changes += 1
        self.revision += 1
        return True

    @property
    def saved_ms(self) -> int:
        """The time that 5.x notes in the file at each save; 0 without it."""
        version = self._document.get(_DATA_VERSION)
        time_ms = version.get("timestamp") if isinstance(version, dict) else None
        return time_ms if type(time_ms) is int else 0

    def backup_rows(self) -> Rows:
        """Return the rows of the file's backup, which is a save older; none if it is missing or unreadable."""
        data = read_replaced(self._files, self.path + _BACKUP)
        if not data:
            return {}
        try:
            rows: Rows = self._complete(java_json.loads(data))[self._name]
        except MalformedError:
            return {}
        return rows

    def persist(self, now_ms: int) -> None:
        """Write the file if its content changes; durable when it returns. ``now_ms`` goes into a new data version."""
        self.write(self.snapshot(now_ms))

    def snapshot(self, now_ms: int) -> bytes:
        """Return what `persist` would write now."""
        if self._versioned and self._changes:
            version = self._document[_DATA_VERSION]
            version["counter"] += self._changes
            version["timestamp"] = now_ms
        self._changes = 0
        try:
            data = self._encoded(self.rows)
        except (MalformedError, UnicodeEncodeError, RecursionError) as error:
            data = self._encoded(self._writable_rows(error))
        if self.page is not None:
            self.page.copy(data)
        return with_checksum(data) if self._is_own else data

    def _encoded(self, rows: Rows) -> bytes:
        if self._versioned:  # its rows are replaced, never changed
            rows = {key: self._as_written(key, row) for key, row in rows.items()}
        return java_json.dumps({**self._document, self._name: rows}).encode()

    def _writable_rows(self, error: Exception) -> Rows:
        """Return the rows without those that no file can hold; raise ``error`` if all can be written."""
        rows = {key: row for key, row in self.rows.items() if _is_writable({key: row})}
        unwritable = [key for key in self.rows if key not in rows]
        if not unwritable:
            raise error
        if unwritable != self._left_out:
            _log.error(
                "%(file)s: saved without %(rows)d rows that can't be written, such as %(key)s: %(error)s",
                file=self.path,
                rows=len(unwritable),
                key=ascii(unwritable[0])[:80],
                error=error,
            )
        self._left_out = unwritable
        return rows

    def _as_written(self, key: object, row: object) -> java_json.Written:
        cached = self._written.get(key)
        if cached is None or cached[0] is not row:
            cached = self._written[key] = row, java_json.written(row, 2)
        return cached[1]

    def write(self, data: bytes) -> None:
        """Write a snapshot if the file's content changes; durable when it returns.

        The table can change meanwhile. Make one call at a time.
        """
        if self.page is not None:
            self.page.begin_write(data)
        if data != self._stored:
            self._files.make_folder(os.path.dirname(self.path))
            if self._stored is not None:
                self._files.write(self.path + _BACKUP, self._stored)
            self._files.write(self.path, data)
            self._stored = data
            self.is_stored = True
        if self.page is not None:
            self.page.end_write()

    def _load_stored(self, stored: StoredTable) -> dict[str, Any]:
        """Return the document of a table in RocksDB, or the file's if it has more changes, as a broker does."""
        with suppress(CorruptionError):
            document = self._load()
            version = document.get(_DATA_VERSION)
            changes = version.get("counter") if isinstance(version, dict) else None
            if self.is_stored and type(changes) is int and changes > stored.counter:
                return document
        self._stored, self.replaced, self.is_stored = None, None, True
        try:
            return self._complete({self._name: stored.rows})
        except MalformedError as error:
            raise CorruptionError(self.path, 0, "config", f"RocksDB: {error}") from error

    def _load(self) -> dict[str, Any]:
        """Return the file's document, or its backup's, or an empty one."""
        damage: CorruptionError | None = None
        wrong = ""
        for path in (self.path, self.path + _BACKUP):
            data = read_replaced(self._files, path)
            if not data:
                continue
            try:
                content = checked(path, data) if self._is_own else data
                document = self._complete(java_json.loads(content, rows_of=self._rows_of))
            except (CorruptionError, MalformedError) as error:
                what = error.what if isinstance(error, CorruptionError) else str(error)
                damage = damage or CorruptionError(path, 0, "config", what)
                wrong = f"is damaged ({what})"
                continue
            if path == self.path:
                self._stored = data
            else:
                wrong = wrong or ("is missing" if file_size(self._files, self.path) is None else "is empty")
                name = os.path.basename(path)
                self.replaced = f"{self.path} {wrong}, so {name} was read, as a broker does: it can be a save older"
            self.is_stored = True
            return document
        if damage is not None:
            advice = repair_advice(self.path, self._files)
            raise CorruptionError(damage.file, damage.offset, damage.kind, f"{damage.what}; {advice}") from damage
        return self._complete({})

    def _complete(self, document: object) -> dict[str, Any]:
        """Check the values of ``document`` and fill in missing parts; raise `MalformedError` for a wrong kind."""
        fields = _object(document, "the file")
        complete: dict[str, Any] = {}
        if self._versioned:
            version = _object(fields.get(_DATA_VERSION), _DATA_VERSION)
            for field in ("counter", "timestamp"):
                if type(version.setdefault(field, 0)) is not int:
                    raise MalformedError(f"{_DATA_VERSION}: expected a number as {field}")
            complete[_DATA_VERSION] = version
        rows = fields.get(self._name)
        if fields and self._name not in fields:  # a broker writes an empty table too
            raise MalformedError(f"expected {self._name}, found {', '.join(fields)[:80]}")
        complete[self._name] = rows if isinstance(rows, NumberRows) else self._check(_object(rows, self._name))
        return {**fields, **complete} if fields else complete


class DelayedSave:
    """Saves a table some time after its first change. Called under the runner's lock."""

    def __init__(
        self,
        what: str,
        save: Callable[[], None],
        now_ms: Callable[[], int],
        save_every_s: float,
        wake: Callable[[int], object],
    ) -> None:
        """``save()`` writes the table, and ``wake(at_ms)`` makes the runner call ``saver.run_due`` by then."""
        self.has_changed: bool = False
        """Whether there are unsaved changes."""
        self._save = save
        self._wake = wake
        self.saver: ProgressSaver[bool] = ProgressSaver(
            what,
            flush=lambda reached: None,  # the writer of the table flushes what it depends on
            reached=lambda: self.has_changed or None,
            note=lambda reached: self.save(),
            now_ms=now_ms,
            save_every_s=save_every_s,
        )

    def save_soon(self) -> None:
        """Note a change; the table is saved some time after the first one."""
        if not self.has_changed:
            due = self.saver.changed()
            if due is not None:
                self._wake(due)
            self.has_changed = True

    def save(self) -> None:
        """Save now what has changed since the last save; a failure leaves it to be saved again."""
        if self.has_changed:
            self._save()
            self.has_changed = False


class _LightOffsets(ConfigTable):
    """The progress of a broker with light queues; that of light groups is in a table of its own, without queue ids."""

    @override
    def _encoded(self, rows: Rows) -> bytes:
        is_light = {key: (topic_and_group(key) or ("", ""))[1].startswith(TopicPrefix.LIGHT) for key in rows}
        light = {name: row[0] for name, row in rows.items() if is_light[name] and 0 in row}
        others = {name: row for name, row in rows.items() if not is_light[name]}
        return java_json.dumps({**self._document, self._name: others, _LIGHT_TABLE: light}).encode()

    @override
    def _complete(self, document: object) -> dict[str, Any]:
        complete = super()._complete(document)
        rows = complete[self._name]
        rows = complete[self._name] = rows.as_dict() if isinstance(rows, NumberRows) else rows
        for name, queue_offset in _object(complete.get(_LIGHT_TABLE), _LIGHT_TABLE).items():
            if not isinstance(name, str) or type(queue_offset) is not int:
                raise MalformedError(f"expected names with offsets, found {name!r:.80}: {queue_offset!r:.80}")
            rows.setdefault(name, {0: queue_offset})
        return complete


def _is_writable(rows: Rows) -> bool:
    try:
        java_json.dumps(rows).encode()
    except (MalformedError, UnicodeEncodeError, RecursionError):
        return False
    return True


def _object(value: object, what: str) -> dict[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedError(f"{what}: expected an object, found {type(value).__name__}")
    return value


def _check_objects(rows: Rows) -> Rows:
    for key, row in rows.items():
        if not isinstance(key, str) or not isinstance(row, dict):
            raise MalformedError(f"expected names with objects, found {key!r:.80}: {row!r:.80}")
    return rows


def _check_numbers(names: tuple[str, ...], rows: Rows) -> Rows:
    """Return whether the values are objects whose fields ``names``, if present, are numbers of 32 bits."""
    for key, row in _check_objects(rows).items():
        for name in names:
            value = row.get(name, 0)
            if type(value) is not int or not -(1 << 31) <= value < 1 << 31:
                raise MalformedError(f"{key[:80]}: expected a number of 32 bits as {name}, found {value!r:.80}")
    return rows


def _check_offsets(rows: Rows) -> Rows:
    """Return whole numbers by whole numbers; the keys can be texts."""
    if set(map(type, rows)) | set(map(type, rows.values())) <= {int}:
        return rows
    checked = {}
    for key, row in rows.items():
        is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        number = int(key) if is_text else key
        if type(number) is not int or type(row) is not int:
            raise MalformedError(f"expected numbers with offsets, found {key!r:.80}: {row!r:.80}")
        checked[number] = row
    return checked


def _check_starts(rows: Rows) -> Rows:
    for group, row in _check_objects(rows).items():
        for topic, at_ms in row.items():
            if not isinstance(topic, str) or type(at_ms) is not int:
                raise MalformedError(f"{group[:80]}: expected topics with times, found {topic!r:.80}: {at_ms!r:.80}")
    return rows


def _check_offsets_by_text(rows: Rows) -> Rows:
    # As in nearly all files, which can have a million rows.
    if set(map(type, rows)) <= {str} and set(map(type, rows.values())) <= {dict}:
        keys, values = chain.from_iterable(rows.values()), chain.from_iterable(map(dict.values, rows.values()))
        if set(map(type, chain(keys, values))) <= {int}:
            return rows
    return {str(name): _check_offsets(_object(row, str(name)[:80])) for name, row in rows.items()}


def unlisted_topics(
    queues: Iterable[tuple[str, int]], range_of: Callable[[str, int], tuple[int, int]], listed: Container[str]
) -> dict[str, int]:
    """Return the topics that have messages and are not ``listed``, with their numbers of queues.

    ``range_of(topic, queue_id)`` returns the beginning and end of a queue. The topics that RocketMQ or the relay make
    themselves are left out, and light queues.
    """
    queue_counts: dict[str, int] = {}
    for topic, queue_id in queues:
        if topic not in listed and not has_no_row(topic):
            begin, end = range_of(topic, queue_id)
            if begin < end:
                queue_counts[topic] = max(queue_counts.get(topic, 0), queue_id + 1)
    return dict(sorted(queue_counts.items()))
