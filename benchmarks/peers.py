"""Peers of the store: the same records, passed to other libraries as finished bytes.

Each run creates a fresh store in its folder. The peers get the bytes of finished records, while librmq's time includes
the encoding. Like librmq, none waits for the disk unless it is asked to: messages survive the process, not the machine.
SQLite, LMDB and RocksDB store the record, a queue entry and two keys. litequeue, diskcache and persist-queue store only
the record. ``share`` is for slow peers, which get one message in so many.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from benchmarks.frame import Bench, Timed
from librmq.clock import ManualClock
from librmq.message.message import Message
from librmq.store import MessageStore

TOPIC: Final = "orders"
TAG: Final = "paid"

_pack_entry = struct.Struct(">qiq").pack
_pack_long = struct.Struct(">q").pack
_INSERT: Final = "INSERT INTO record VALUES (?, ?, ?, ?, ?)"


def make_messages(
    count: int, body_size: int = 128, *, first: int = 0, added: Mapping[str, str] | None = None
) -> list[Message]:
    """Make messages with a unique id, a key, a tag and two properties, or more."""
    body = (bytes(range(256)) * 4)[:body_size]
    messages = []
    for number in range(first, first + count):
        message = Message(
            TOPIC, body, tags=TAG, keys=f"order-{number:08d}", properties={"region": "eu-west-1", "amount": "1234"},
            unique_key=f"7F0000010BB8{number:020X}",
        )  # fmt: skip
        message.properties.update(added or {})
        messages.append(message)
    return messages


def append_alone(bench: Bench, folder: Path, *, count: int, added: Mapping[str, str] | None = None) -> Timed:
    """Append messages to a store whose clock stands still."""
    messages = make_messages(bench.count(count), added=added)
    with MessageStore.open(folder / "store", clock=ManualClock()) as store:
        yield
        for message in messages:
            store.append(message)
        yield len(messages)


@dataclass(frozen=True)
class Load:
    """Messages, and the same messages as finished records."""

    messages: list[Message]
    raw: list[bytes]
    tags_code: int

    def rows(self, share: int) -> list[tuple[int, int, str, str, bytes]]:
        """Return a share of the records as rows of a table, with their two keys."""
        pairs = zip(self.messages, self.raw, strict=True)
        rows = [
            (number, self.tags_code, message.unique_key or "", message.keys[0], raw)
            for number, (message, raw) in enumerate(pairs)
        ]
        return rows[: max(len(rows) // share, 1)]

    def chunks(self, share: int, size: int) -> Iterator[list[tuple[int, bytes, bytes, bytes]]]:
        """Yield the same in lists of ``size``: number, two keys, record."""
        rows = iter(self.rows(share))
        while chunk := [
            (number, unique.encode(), key.encode(), raw) for number, _, unique, key, raw in islice(rows, size)
        ]:
            yield chunk


def make_load(bench: Bench, body_size: int, count: int) -> Iterator[Load]:
    """Yield a load of messages and records."""
    messages = make_messages(bench.count(count), body_size)
    with bench.folder() as folder, MessageStore.open(folder / "store") as store:
        for message in messages:
            store.append(message)
        raw = [message.raw for message in store]
        code = store.read(TOPIC, 0, 0, 1).messages[0].tags_code
    yield Load(messages, raw, code)


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


def sqlite(load: Load, folder: Path, *, size: int = 1, synchronous: str = "OFF", share: int = 1) -> Timed:
    rows = load.rows(share)
    with closing(sqlite_table(folder, synchronous)) as connection:
        execute, executemany = connection.execute, connection.executemany
        yield
        if size == 1:
            for row in rows:
                execute(_INSERT, row)
        else:
            for at in range(0, len(rows), size):
                execute("BEGIN")
                executemany(_INSERT, rows[at : at + size])
                execute("COMMIT")
        yield len(rows)


def _lmdb(folder: Path, writemap: bool = False, sync: bool = False) -> Any:
    import lmdb

    environment = lmdb.open(
        str(folder / "lmdb"), map_size=1 << 30, max_dbs=3, sync=sync, metasync=sync, writemap=writemap,
        map_async=writemap,
    )  # fmt: skip
    return environment, *(environment.open_db(name) for name in (b"log", b"queue", b"keys"))


def lmdb(
    load: Load, folder: Path, *, size: int = 1, writemap: bool = False, sync: bool = False, share: int = 1
) -> Timed:
    """Put ``size`` messages a transaction, put by put."""
    environment, log, queue, index = _lmdb(folder, writemap, sync)
    chunks, code, end, number = list(load.chunks(share, size)), load.tags_code, 0, 0
    begin = environment.begin
    yield
    for chunk in chunks:
        with begin(write=True) as transaction:
            put = transaction.put
            for number, unique, key, raw in chunk:
                position = _pack_long(end)
                put(position, raw, db=log, append=True)
                put(_pack_long(number), _pack_entry(end, len(raw), code), db=queue, append=True)
                put(unique, position, db=index)
                put(key, position, db=index)
                end += len(raw)
    yield number + 1
    environment.close()


def lmdb_putmulti(load: Load, folder: Path, *, size: int) -> Timed:
    """Put ``size`` messages a transaction, with one call for each table."""
    environment, log, queue, index = _lmdb(folder)
    chunks, code, end, number = list(load.chunks(1, size)), load.tags_code, 0, 0
    yield
    for chunk in chunks:
        records, entries, keys = [], [], []
        for number, unique, key, raw in chunk:
            position = _pack_long(end)
            records.append((position, raw))
            entries.append((_pack_long(number), _pack_entry(end, len(raw), code)))
            keys.append((unique, position))
            keys.append((key, position))
            end += len(raw)
        with environment.begin(write=True) as transaction:
            transaction.cursor(log).putmulti(records, append=True)
            transaction.cursor(queue).putmulti(entries, append=True)
            transaction.cursor(index).putmulti(keys)
    yield number + 1
    environment.close()


def rocksdb(load: Load, folder: Path, *, size: int = 1) -> Timed:
    """Write a batch for every ``size`` messages, with RocksDB's log written and not synced."""
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    database = rocksdict.Rdict(str(folder / "rocksdb"), options)
    unsynced = rocksdict.WriteOptions()
    unsynced.sync = False
    database.set_write_options(unsynced)
    chunks, code, end, number = list(load.chunks(1, size)), load.tags_code, 0, 0
    yield
    for chunk in chunks:
        batch = rocksdict.WriteBatch(raw_mode=True)
        put = batch.put
        for number, unique, key, raw in chunk:
            position = _pack_long(end)
            put(b"r" + position, raw)
            put(b"q" + _pack_long(number), _pack_entry(end, len(raw), code))
            put(unique, position)
            put(key, position)
            end += len(raw)
        database.write(batch)
    yield number + 1
    database.close()


def put_each(load: Load, share: int, put: Callable[[bytes], object]) -> Timed:
    """Put only the records."""
    records = load.raw[: max(len(load.raw) // share, 1)]
    yield
    for raw in records:
        put(raw)
    yield len(records)


def litequeue(load: Load, folder: Path, *, share: int = 1) -> Timed:
    import litequeue

    queue = litequeue.LiteQueue(folder / "litequeue.db")
    queue.conn.execute("PRAGMA synchronous = OFF")
    yield from put_each(load, share, queue.put)
    queue.conn.close()


def diskcache(load: Load, folder: Path, *, share: int = 1) -> Timed:
    import diskcache

    with diskcache.Cache(folder / "diskcache", sqlite_synchronous=0) as cache:
        yield from put_each(load, share, cache.push)


def persist_queue(load: Load, folder: Path, *, synchronous: str = "OFF", share: int = 1) -> Timed:
    """Put into its SQLite queue, which is faster than its files; with FULL, each put syncs."""
    import persistqueue

    queue: Any = persistqueue.SQLiteQueue(str(folder / "persist-queue"), auto_commit=True)
    queue._putter.execute(f"PRAGMA synchronous = {synchronous}")
    yield from put_each(load, share, queue.put)
    queue.close()


def raw_write(load: Load, folder: Path) -> Timed:
    """Run at the limit: ``write`` of the record's bytes to a file, unbuffered."""
    with open(folder / "raw", "ab", buffering=0) as file:
        yield from put_each(load, 1, partial(os.write, file.fileno()))


def raw_flushed(load: Load, folder: Path, *, most: int | None = None) -> Timed:
    """Run at the limit: ``pwrite`` and ``fdatasync`` of each record, into a file with allocated blocks."""
    records, at = load.raw[:most], 0
    descriptor = os.open(folder / "raw", os.O_RDWR | os.O_CREAT)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, sum(map(len, records)))
    os.fsync(descriptor)
    flush = os.fdatasync if hasattr(os, "fdatasync") else os.fsync
    yield
    for raw in records:
        os.pwrite(descriptor, raw, at)
        flush(descriptor)
        at += len(raw)
    yield len(records)
    os.close(descriptor)
