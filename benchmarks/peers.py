"""Peers of the store: the same records, passed to other libraries as finished bytes.

Each function creates a fresh store in a folder, times its part, and returns the seconds. The peers get the bytes of
finished records, while librmq's time includes the encoding. Like librmq, none waits for the disk unless its function
says so: messages survive the process, not the machine. SQLite, LMDB and RocksDB store the record, a queue entry and two
keys. litequeue, diskcache and persist-queue store only the record.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common import NO_TARGET, Run, Stopwatch, Target

_pack_entry = struct.Struct(">qiq").pack
_pack_long = struct.Struct(">q").pack
_MAP_SIZE: Final = 1 << 30
_INSERT: Final = "INSERT INTO record VALUES (?, ?, ?, ?, ?)"


@dataclass(frozen=True)
class Records:
    """Records to store, one for each message, with unique id and key."""

    raw: Sequence[bytes]
    unique_keys: Sequence[str]
    keys: Sequence[str]
    tags_code: int

    def first(self, count: int) -> Records:
        """Return the first ``count`` of them."""
        return Records(self.raw[:count], self.unique_keys[:count], self.keys[:count], self.tags_code)

    def rows(self) -> list[tuple[int, int, str, str, bytes]]:
        """Return them as rows of a table."""
        return [
            (number, self.tags_code, unique_key, key, raw)
            for number, (raw, unique_key, key) in enumerate(zip(self.raw, self.unique_keys, self.keys, strict=True))
        ]


@dataclass(frozen=True)
class Peer:
    """A library to compare with: its package, its run, and its share of the messages."""

    package: str
    run: Callable[[Path, Records], float]
    target: Target = NO_TARGET
    share: int = 1
    limit: bool = False

    def measure(self, all_records: Records) -> Run:
        """Return its run with its share of the records."""
        records = all_records.first(max(len(all_records.raw) // self.share, 1))
        return lambda folder: len(records.raw) / self.run(folder, records)


def sqlite_table(folder: Path, synchronous: str = "OFF") -> sqlite3.Connection:
    """Make a table with two key indexes and the queue offset as its key, in WAL mode."""
    connection = sqlite3.connect(folder / "records.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute(
        "CREATE TABLE record (queue_offset INTEGER PRIMARY KEY, tags_code INTEGER, unique_key TEXT, key TEXT, raw BLOB)"
    )
    connection.execute("CREATE INDEX by_unique_key ON record (unique_key)")
    connection.execute("CREATE INDEX by_key ON record (key)")
    return connection


def sqlite_fill(connection: sqlite3.Connection, records: Records) -> None:
    """Write all records in one transaction."""
    connection.execute("BEGIN")
    connection.executemany(_INSERT, records.rows())
    connection.execute("COMMIT")


def sqlite_append(folder: Path, records: Records, *, synchronous: str = "OFF") -> float:
    """Write a transaction for each row."""
    rows = records.rows()
    connection = sqlite_table(folder, synchronous)
    execute = connection.execute
    with Stopwatch() as watch:
        for row in rows:
            execute(_INSERT, row)
    connection.close()
    return watch.seconds


def sqlite_batches(folder: Path, records: Records, size: int, *, synchronous: str = "OFF") -> float:
    """Write a transaction for every ``size`` rows."""
    rows = records.rows()
    connection = sqlite_table(folder, synchronous)
    execute, executemany = connection.execute, connection.executemany
    with Stopwatch() as watch:
        for at in range(0, len(rows), size):
            execute("BEGIN")
            executemany(_INSERT, rows[at : at + size])
            execute("COMMIT")
    connection.close()
    return watch.seconds


def _lmdb(folder: Path, writemap: bool, sync: bool = False) -> tuple[Any, Any, Any, Any]:
    import lmdb

    environment = lmdb.open(
        str(folder / "lmdb"),
        map_size=_MAP_SIZE,
        max_dbs=3,
        sync=sync,
        metasync=sync,
        writemap=writemap,
        map_async=writemap,
    )
    return environment, environment.open_db(b"log"), environment.open_db(b"queue"), environment.open_db(b"keys")


def lmdb_append(folder: Path, records: Records, *, writemap: bool = False, sync: bool = False) -> float:
    """Write a transaction for each message, unsynced unless ``sync``."""
    environment, log, queue, index = _lmdb(folder, writemap, sync)
    begin = environment.begin
    unique_keys = [key.encode() for key in records.unique_keys]
    keys = [key.encode() for key in records.keys]
    code, end = records.tags_code, 0
    with Stopwatch() as watch:
        for number, raw in enumerate(records.raw):
            position = _pack_long(end)
            with begin(write=True) as transaction:
                put = transaction.put
                put(position, raw, db=log, append=True)
                put(_pack_long(number), _pack_entry(end, len(raw), code), db=queue, append=True)
                put(unique_keys[number], position, db=index)
                put(keys[number], position, db=index)
            end += len(raw)
    environment.close()
    return watch.seconds


def lmdb_batches(folder: Path, records: Records, size: int) -> float:
    """Write a transaction for every ``size`` messages, put by put."""
    environment, log, queue, index = _lmdb(folder, False)
    unique_keys = [key.encode() for key in records.unique_keys]
    keys = [key.encode() for key in records.keys]
    code, end = records.tags_code, 0
    with Stopwatch() as watch:
        for at in range(0, len(records.raw), size):
            with environment.begin(write=True) as transaction:
                put = transaction.put
                for number, raw in enumerate(records.raw[at : at + size], at):
                    position = _pack_long(end)
                    put(position, raw, db=log, append=True)
                    put(_pack_long(number), _pack_entry(end, len(raw), code), db=queue, append=True)
                    put(unique_keys[number], position, db=index)
                    put(keys[number], position, db=index)
                    end += len(raw)
    environment.close()
    return watch.seconds


def lmdb_bulk(folder: Path, records: Records, size: int) -> float:
    """Write a transaction for every ``size`` messages, with one call for each table."""
    environment, log, queue, index = _lmdb(folder, False)
    unique_keys = [key.encode() for key in records.unique_keys]
    keys = [key.encode() for key in records.keys]
    code, end = records.tags_code, 0
    with Stopwatch() as watch:
        for at in range(0, len(records.raw), size):
            written, entries, names = [], [], []
            for number, raw in enumerate(records.raw[at : at + size], at):
                position = _pack_long(end)
                written.append((position, raw))
                entries.append((_pack_long(number), _pack_entry(end, len(raw), code)))
                names.append((unique_keys[number], position))
                names.append((keys[number], position))
                end += len(raw)
            with environment.begin(write=True) as transaction:
                transaction.cursor(log).putmulti(written, append=True)
                transaction.cursor(queue).putmulti(entries, append=True)
                transaction.cursor(index).putmulti(names)
    environment.close()
    return watch.seconds


def rocksdb_batches(folder: Path, records: Records, size: int) -> float:
    """Write a batch for every ``size`` messages, with its log written and not synced."""
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    database = rocksdict.Rdict(str(folder / "rocksdb"), options)
    unsynced = rocksdict.WriteOptions()
    unsynced.sync = False
    database.set_write_options(unsynced)
    unique_keys = [key.encode() for key in records.unique_keys]
    keys = [key.encode() for key in records.keys]
    code, end = records.tags_code, 0
    with Stopwatch() as watch:
        for at in range(0, len(records.raw), size):
            batch = rocksdict.WriteBatch(raw_mode=True)
            put = batch.put
            for number, raw in enumerate(records.raw[at : at + size], at):
                position = _pack_long(end)
                put(b"r" + position, raw)
                put(b"q" + _pack_long(number), _pack_entry(end, len(raw), code))
                put(unique_keys[number], position)
                put(keys[number], position)
                end += len(raw)
            database.write(batch)
    database.close()
    return watch.seconds


def litequeue_append(folder: Path, records: Records) -> float:
    """``put`` of only the record."""
    import litequeue

    queue = litequeue.LiteQueue(folder / "litequeue.db")
    queue.conn.execute("PRAGMA synchronous = OFF")
    with Stopwatch() as watch:
        for raw in records.raw:
            queue.put(raw)
    queue.conn.close()
    return watch.seconds


def diskcache_append(folder: Path, records: Records) -> float:
    """``push`` of only the record."""
    import diskcache

    cache = diskcache.Cache(folder / "diskcache", sqlite_synchronous=0)
    with Stopwatch() as watch:
        for raw in records.raw:
            cache.push(raw)
    cache.close()
    return watch.seconds


def persist_queue_append(folder: Path, records: Records, *, synchronous: str = "OFF") -> float:
    """``put`` of only the record into its SQLite queue, which is faster than its files.

    By default, with FULL, it syncs every put.
    """
    import persistqueue

    queue: Any = persistqueue.SQLiteQueue(str(folder / "persist-queue"), auto_commit=True)
    queue._putter.execute(f"PRAGMA synchronous = {synchronous}")
    with Stopwatch() as watch:
        for raw in records.raw:
            queue.put(raw)
    queue.close()
    return watch.seconds


def raw_write(folder: Path, records: Records) -> float:
    """Return the limit: ``write`` of the record's bytes to a file, unbuffered."""
    descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write = os.write
    with Stopwatch() as watch:
        for raw in records.raw:
            write(descriptor, raw)
    os.close(descriptor)
    return watch.seconds
