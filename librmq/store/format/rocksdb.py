"""Databases of RocksDB in a store of RocketMQ 5, which are only read: the broker's tables, its queues, POP's records.

::

    config/topics/, config/subscriptionGroups/, config/consumerOffsets/        tables, one database each
        default        topic, group or topic@group (UTF-8)  ->  JSON
        kvDataVersion  kvDataVersionKey                     ->  JSON: counter, timestamp
    config/metadata/                                                           the same in one database
        topic, subscriptionGroup, consumerOffset            as ``default`` above
        topicVersion, subscriptionGroupVersion, consumerOffsetVersion          as ``kvDataVersion``
    config/rdb/                                             configManagerVersion=V2
        default        1 [1 byte], table [2], 1 [1], data_version      ->  state [8], timestamp [8], counter [8]
                       1 [1 byte], table [2], 2 [1], name [2 + n]      ->  1 [1 byte], JSON: topics (3), groups (4)
                       1 [1 byte], table [2], 2 [1], group [2 + n], 1 [1], topic [2 + n], 1 [1], queue id [4]
                                                                       ->  queue offset [8]: progress (1)
    consumequeue/, consumequeue_rocksdb/
        default        length [4], 1 [1], topic [n], 1 [1], queue id [4], 1 [1], queue offset [8]
                       ->  physical offset [8], size [4], tags code [8], store timestamp [8]
    kvStore/           POP's records of a broker with popConsumerKVServiceEnable
        popState       visible timestamp [8], group, @, topic, @, queue id [4], @, queue offset [8]  ->  JSON

A database is opened through a folder of links elsewhere, so that RocksDB makes its own log there. Nothing is written to
the store, and the lock of a running broker is not touched. Needs the extra ``rocksdb``.

Mirrors ``RocksDBConsumerOffsetManager``, ``ConsumerOffsetManagerV2``, ``RocksDBConsumeQueueTable`` and
``PopConsumerRecord`` of 5.3.3; ``metadata`` is of 5.4.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from librmq.errors import CorruptionError, MalformedError, MissingExtraError
from librmq.files import Files
from librmq.java import json as java_json
from librmq.store.format.directory import is_database

if TYPE_CHECKING:
    from rocksdict import Rdict

DEFAULT_FAMILY: Final = "default"
POP_FAMILY: Final = "popState"
_TRIES: Final = 5
"""A broker that runs can replace files while they are linked."""
_FILE: Final = re.compile(r"CURRENT|IDENTITY|(MANIFEST|OPTIONS)-[0-9]+|[0-9]+\.(sst|log|blob)")
"""The files that are linked: a tool's own, such as ``rocksdict-config.json``, would be written through the link."""
_V2_PREFIX: Final = struct.Struct(">BHB")
_V2_VERSION: Final = struct.Struct(">qqq")
_V2_DATA: Final = 2
_V2_JSON: Final = 1
_QUEUE_KEY: Final = struct.Struct(">BIBq")
_QUEUE_VALUE: Final = struct.Struct(">qiqq")
_KIND: Final = "rocksdb"


class Database:
    """An open database. Not thread-safe."""

    def __init__(self, folder: str, database: Rdict, families: frozenset[str]) -> None:
        self.folder = folder
        self.families = families
        """The names of its column families."""
        self._database = database

    def rows(self, family: str = DEFAULT_FAMILY) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and values of a column family, in order of the keys.

        Raises:
            CorruptionError: A file of the database is damaged.
        """
        database = self._database if family == DEFAULT_FAMILY else self._database.get_column_family(family)
        try:
            yield from database.items()
        except Exception as error:
            raise _damage(self.folder, error) from error


@contextmanager
def opened_database(folder: str, files: Files) -> Iterator[Database]:
    """Open a database for reading, without a change in ``folder``.

    Raises:
        MissingExtraError: The extra ``rocksdb`` is not installed.
        CorruptionError: It can't be opened (kind ``rocksdb``).
    """
    try:
        import rocksdict
    except ImportError as error:
        raise MissingExtraError(f"reading {folder}", "rocksdb") from error
    for attempt in range(_TRIES):
        names: tuple[str, ...] = ()
        with tempfile.TemporaryDirectory(prefix="librmq-rocksdb-", ignore_cleanup_errors=True) as linked:
            try:
                names = _link(folder, linked, files)
                families = frozenset(rocksdict.Rdict.list_cf(linked, rocksdict.Options(raw_mode=True)))
                options = rocksdict.Options(raw_mode=True)
                options.create_if_missing(False)
                database = rocksdict.Rdict(
                    linked,
                    options,
                    {name: rocksdict.Options(raw_mode=True) for name in families},
                    rocksdict.AccessType.read_only(error_if_log_file_exist=False),
                )
            except CorruptionError:
                raise
            except Exception as error:
                if attempt + 1 < _TRIES and names != files.names(folder):
                    continue
                raise _damage(folder, error) from error
            try:
                yield Database(folder, database, families)
            finally:
                database.close()
            return


def _link(folder: str, linked: str, files: Files) -> tuple[str, ...]:
    """Link the files of a database into another folder, and return their names; copy what is not a file on disk."""
    entries = files.list(folder)
    for name, size, _, is_file in entries:
        source, target = os.path.join(folder, name), os.path.join(linked, name)
        if not _FILE.fullmatch(name):
            continue
        if not is_file:  # RocksDB would wait for the writer of a pipe
            raise CorruptionError(source, 0, "name", "expected a regular file")
        if files.is_shared and name != "CURRENT" and hasattr(os, "symlink"):
            os.symlink(os.path.abspath(source), target)
            continue
        with open(target, "xb") as file:
            file.write(files.read(source, 0, size))
    return tuple(entry.name for entry in entries)


def _damage(folder: str, error: Exception) -> CorruptionError:
    return CorruptionError(os.path.join(folder, "CURRENT"), 0, _KIND, f"RocksDB can't be read: {error!r:.300}")


# ------------------------------------------------------------------------------------------------- broker's tables


@dataclass
class StoredTable:
    """A table of a broker in a database."""

    rows: dict[str, Any] = field(default_factory=dict)
    """As in the table's file."""
    counter: int = 0
    """Changes of the table; a file with more of them replaces it when the broker starts."""
    timestamp_ms: int = 0
    """The time of the last change, 0 if it is not known."""


class StoredTables(NamedTuple):
    """The tables of a broker in databases; None where no database has one."""

    topics: StoredTable | None
    groups: StoredTable | None
    offsets: StoredTable | None


def read_tables(folder: str, files: Files) -> StoredTables:
    """Read the tables in the databases of a ``config`` folder; of several, the one that changed last counts.

    Raises:
        MissingExtraError: The extra ``rocksdb`` is not installed.
        CorruptionError: A database is damaged.
    """
    tables: list[list[StoredTable]] = [[], [], []]
    for name in files.names(folder):
        path = os.path.join(folder, name)
        if not is_database(path, files):
            continue
        with opened_database(path, files) as database:
            if "consumerOffset" in database.families:
                for number, family in enumerate(("topic", "subscriptionGroup", "consumerOffset")):
                    if family in database.families:
                        tables[number].append(_table(database, family, f"{family}Version", number))
            elif name in _SEPARATE:
                number = _SEPARATE[name]
                tables[number].append(_table(database, DEFAULT_FAMILY, "kvDataVersion", number))
            else:
                for number, table in enumerate(_tables_of_v2(database)):
                    tables[number].append(table)
    latest = [max(versions, key=lambda table: table.timestamp_ms, default=None) for versions in tables]
    return StoredTables(*latest)


_SEPARATE: Final = {"topics": 0, "subscriptionGroups": 1, "consumerOffsets": 2}


def _table(database: Database, family: str, version_family: str, number: int) -> StoredTable:
    table = StoredTable()
    for key, value in database.rows(family):
        row = _json(database, key, value)
        table.rows[_text(database, key)] = row.get("offsetTable", {}) if number == 2 else row
    if version_family in database.families:
        for key, value in database.rows(version_family):
            version = _json(database, key, value)
            counter, timestamp_ms = version.get("counter"), version.get("timestamp")
            table.counter = counter if type(counter) is int else 0
            table.timestamp_ms = timestamp_ms if type(timestamp_ms) is int else 0
    return table


def _tables_of_v2(database: Database) -> tuple[StoredTable, StoredTable, StoredTable]:
    """Read the three tables of configManagerVersion=V2."""
    topics, groups, offsets = StoredTable(), StoredTable(), StoredTable()
    by_id = {1: offsets, 3: topics, 4: groups}
    for key, value in database.rows():
        if len(key) < _V2_PREFIX.size:
            continue
        table_prefix, table_id, kind = _V2_PREFIX.unpack_from(key)
        table = by_id.get(table_id)
        if table_prefix != 1 or table is None:
            continue
        try:
            if kind != _V2_DATA:
                _, table.timestamp_ms, table.counter = _V2_VERSION.unpack(value)
            elif table is offsets:
                group, at = _sized(key, _V2_PREFIX.size)
                topic, at = _sized(key, at + 1)
                (queue_id,), (queue_offset,) = struct.unpack_from(">i", key, at + 1), struct.unpack(">q", value)
                name = f"{_text(database, topic)}@{_text(database, group)}"
                table.rows.setdefault(name, {})[queue_id] = queue_offset
            elif value[:1] == bytes([_V2_JSON]):
                name = _text(database, _sized(key, _V2_PREFIX.size)[0])
                table.rows[name] = _json(database, key, value[1:])
            else:
                raise _damage(database.folder, MalformedError(f"a row of table {table_id} is not in JSON"))
        except struct.error as error:
            raise _damage(database.folder, error) from error
    return topics, groups, offsets


def _sized(key: bytes, at: int) -> tuple[bytes, int]:
    """Return the bytes behind a length of two bytes, and the place of their end."""
    (size,) = struct.unpack_from(">H", key, at)
    return key[at + 2 : at + 2 + size], at + 2 + size


def _text(database: Database, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _damage(database.folder, error) from error


def _json(database: Database, key: bytes, data: bytes) -> dict[str, Any]:
    try:
        row = java_json.loads(data)
    except MalformedError as error:
        raise _damage(database.folder, MalformedError(f"{key!r:.80}: {error}")) from error
    if not isinstance(row, dict):
        raise _damage(database.folder, MalformedError(f"{key!r:.80}: expected an object, found {row!r:.80}"))
    return row


# ---------------------------------------------------------------------------------------------------------- queues


class StoredEntry(NamedTuple):
    """An entry of a queue."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int
    tags_code: int
    store_timestamp_ms: int


def queue_entries(folder: str, files: Files) -> Iterator[StoredEntry]:
    """Yield the entries of all queues in a database, those of a queue together and in order.

    Raises:
        MissingExtraError: The extra ``rocksdb`` is not installed.
        CorruptionError: The database is damaged.
    """
    with opened_database(folder, files) as database:
        for key, value in database.rows():
            length = int.from_bytes(key[:4], "big")
            if len(key) != 5 + length + _QUEUE_KEY.size or len(value) != _QUEUE_VALUE.size:
                raise _damage(folder, MalformedError(f"{key!r:.80}: expected an entry of a queue"))
            _, queue_id, _, queue_offset = _QUEUE_KEY.unpack_from(key, 5 + length)
            yield StoredEntry(_text(database, key[5 : 5 + length]), queue_id, queue_offset, *_QUEUE_VALUE.unpack(value))


# ------------------------------------------------------------------------------------------------------------- POP


def pop_records(folder: str, files: Files) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield when a message that was received is visible again, and its record, in order of these times.

    Without a database in the folder there are none.

    Raises:
        MissingExtraError: The extra ``rocksdb`` is not installed.
        CorruptionError: The database is damaged.
    """
    if not is_database(folder, files):
        return
    with opened_database(folder, files) as database:
        if POP_FAMILY in database.families:
            for key, value in database.rows(POP_FAMILY):
                yield int.from_bytes(key[:8], "big"), _json(database, key, value)
