"""Make stores of RocketMQ 5 out of stores of 4.9, in the ways in which 5.x can keep queues outside of plain files.

No broker of 5.x takes part: the log stays as it is, queues are moved away, and a folder gets an empty RocksDB, as if
the broker had not flushed it, or only its file names, as if it were damaged. Batches and light queues are written as
the sources of 5.3.3 say (``SendMessageProcessor``, ``BatchConsumeQueue``, ``LmqDispatch``).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from librmq.commitlog import CommitLog
from librmq.message.batch import BatchItem, encode_batch
from librmq.message.properties import decode_properties, encode_properties
from librmq.message.record import INNER_BATCH, NEED_UNWRAP, Record, body_checksum, encode_record
from tests.rocksdb_stores import write_database

_DATABASE = {
    "CURRENT": b"MANIFEST-000005\n",
    "MANIFEST-000005": b"\x56\xf9\xb8\xf8\x1c\x00\x01",
    "000004.log": b"",
    "IDENTITY": b"0b6e3ad6-31a4-4f54-9c4f-52c6e7a2a0a1",
    "LOCK": b"",
    "OPTIONS-000007": b"[Version]\n",
}

KINDS = ("in consumequeue", "in a folder of its own", "beside files", "beside old files")


def keep_queues_elsewhere(store: Path, kind: str) -> None:
    """Change the queues of a store as if it were one of `KINDS` of 5.x."""
    queues = store / "consumequeue"
    if kind == "beside old files":
        for file in sorted(queues.rglob("0" * 10 + "*")):
            data = file.read_bytes()
            file.write_bytes(data[:20] + bytes(len(data) - 20))
    elif kind != "beside files":
        shutil.rmtree(queues, ignore_errors=True)
    folder = store / "consumequeue_rocksdb" if kind == "in a folder of its own" else queues
    write_database(folder, {"default": {}, "offset": {}})


def add_database(folder: Path) -> None:
    """Put the files of a RocksDB into a folder, without a content that can be read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in _DATABASE.items():
        (folder / name).write_bytes(data)


def state_of(store: Path) -> dict[str, tuple[int, bytes]]:
    """Return modification time and content of each file and folder."""
    return {
        str(path.relative_to(store)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"",
        )
        for path in [store, *sorted(store.rglob("*"))]
    }


def write_log(store: Path, records: Iterable[Record], file_size: int = 1 << 16) -> None:
    """Make a store of a log alone; the records get their places and checksums."""
    with CommitLog.open(store / "commitlog", file_size) as log:
        for record in records:
            place = log.claim(record.size)
            log.append(encode_record(replace(record, physical_offset=place, body_crc=body_checksum(record.body))))


def batch_record(record: Record, messages: Sequence[BatchItem]) -> Record:
    """Return the record in which 5.x stores messages of a topic with queues of batches; see ``SendMessageProcessor``.

    It begins at the queue offset of ``record``; the next record of its queue is to follow after all messages.
    """
    properties = {**decode_properties(record.properties_raw), "INNER_NUM": str(len(messages))}
    return replace(
        record,
        sys_flag=record.sys_flag | INNER_BATCH | NEED_UNWRAP,
        body=encode_batch(messages),
        properties_raw=encode_properties({**properties, "INNER_BASE": str(record.queue_offset)}),
    )
