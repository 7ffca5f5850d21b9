"""A fuzzer of everything that decodes bytes: any bytes must quickly give a value or an error of librmq.

Run ``python -m tests.fuzz.formats TARGET [libFuzzer options] [folders]`` from the root of the checkout, for example
with ``record -max_total_time=60``. This needs the package ``atheris``, which guides the fuzzer by code coverage. It
begins with the files in ``tests/fuzz/corpus/TARGET``, which include inputs that once did harm. Without atheris,
`mutants` changes these files blindly. A target is a function that takes bytes and raises if something does not hold.
``oss_fuzz/`` beside this module makes a program of each target for OSS-Fuzz.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.stores import Contents

__all__ = ["CORPUS", "TARGETS", "fuzz", "mutants", "seeds"]

CORPUS: Final = Path(__file__).parent / "corpus"
_LONGEST: Final = 8192


def record(data: bytes) -> None:
    """Decode bytes as a record, as properties, and as a client's batch."""
    from librmq.errors import MessageIllegalError, RecordError, RmqError
    from librmq.message.batch import decode_batch
    from librmq.message.message import StoredMessage
    from librmq.message.properties import decode_properties, find_keys_and_tags
    from librmq.message.record import check_record, decode_record, encode_record

    size = 0
    with suppress(RecordError):
        size = check_record(data, 0, len(data), check_body=True)
        assert 0 <= size <= len(data)
    if size:
        message = StoredMessage(data[:size])
        _look_at(message)
        with suppress(
            RecordError, MessageIllegalError
        ):  # a topic of invalid UTF-8 can become too long when it is encoded again
            found = decode_record(data[:size])
            assert decode_record(encode_record(found)) == found or not found.topic.isascii()
    with suppress(RecordError):
        decode_record(data, check_body=False)
    decode_properties(data)
    find_keys_and_tags(data)
    with suppress(RmqError):
        decode_batch(data)


def _look_at(message: Any) -> None:
    from librmq.errors import RecordError

    assert message.size == len(message.raw)
    for name in dir(message):
        if not name.startswith("_"):
            with suppress(RecordError):
                getattr(message, name)
    with suppress(RecordError):
        message.decompressed_body(1 << 16)
    repr(message)


def log(data: bytes) -> None:
    """Open bytes as the files of a log."""
    from librmq import Message
    from librmq.commitlog import CommitLog
    from librmq.errors import StoreError

    files = _files("/log", data, 1024)
    with suppress(StoreError):
        opened = CommitLog.open("/log", 1024, files=files)
        assert 0 <= opened.begin <= opened.end
        with suppress(StoreError):
            for _, size, _ in opened.scan():
                assert size > 0
        for physical_offset in range(opened.begin, opened.end, 37):
            with suppress(StoreError):
                opened.message(physical_offset)
        opened.truncate(opened.end)
        opened.append(Message("T", b"goes on"))


def queue(data: bytes) -> None:
    """Open bytes as the files of a queue, with an extension if their length is even."""
    from librmq.consumequeue import ConsumeQueue
    from librmq.errors import StoreError

    files = _files("/queue", data, 160)
    files.make_folder("/ext")
    files.write("/ext/00000000000000000000", (data[::-1] + bytes(256))[:256])
    ext = "/ext" if len(data) % 2 == 0 else None
    with (
        suppress(StoreError),
        ConsumeQueue.open("/queue", 160, files=files, ext_folder=ext, ext_file_size=256) as found,
    ):
        assert 0 <= found.min_offset <= found.max_offset
        assert sum(len(block) for _, block in found.blocks()) <= len(data) // 20 + 8
        for queue_offset in range(found.min_offset, min(found.max_offset, found.min_offset + 40)):
            with suppress(StoreError):
                entry = found.entry(queue_offset)
                if entry is not None and found.ext is not None:
                    found.ext_unit(entry.tags_code)
        found.queue_offset_at(5, lambda place, size: place % 11)
        found.advance(len(data))
        found.recover()
        found.truncate_after(int.from_bytes(data[:3], "big"))
        found.append(found.max_offset, 1 << 40, 100, 7)
        found.trim(1 << 30)


def index(data: bytes) -> None:
    """Open bytes as a file of the key index."""
    from librmq.errors import StoreError
    from librmq.store.format._keyindex import KeyIndex
    from librmq.store.format.indexfile import IndexFile, file_length
    from librmq.store.recovery._index_check import find_flaw

    length = file_length(8, 32)
    files = _files("/index", b"", 1)
    files.write("/index/20231114221320000", (data + bytes(length))[:length] if len(data) <= length else data[:_LONGEST])
    with suppress(StoreError), IndexFile.open("/index/20231114221320000", files) as file:
        find_flaw(file)
    with suppress(StoreError):
        opened = KeyIndex.open("/index", slots=8, entries=32, files=files, now_ms=lambda: 1_700_000_000_000)
        for key_hash in range(8):
            with suppress(StoreError):
                assert len(opened.files[0].entries()) <= 32
                opened.files[0].query(key_hash, 0, 1 << 62, 50, [])
        opened.append_many([(opened.end_physical_offset + 1, 1_700_000_000_000, [1, 2, 3])])
        opened.delete_before(1 << 50)


def ext(data: bytes) -> None:
    """Open bytes as the files of a queue's extension."""
    from librmq.consumequeue_ext import ConsumeQueueExt
    from librmq.errors import StoreError

    files = _files("/ext", data, 256)
    with suppress(StoreError):
        opened = ConsumeQueueExt.open("/ext", 256, files=files)
        for position in range(0, len(data), 20):
            with suppress(StoreError):
                opened.get(position - (1 << 63))
        end = opened.end
        opened.recover()
        assert opened.put(1, 2, b"bitmap") + (1 << 63) >= end
        opened.truncate_after(int.from_bytes(data[:2], "big") - (1 << 63))
        opened.truncate_before(int.from_bytes(data[:2], "big") - (1 << 63))


def checkpoint(data: bytes) -> None:
    """Open bytes as a checkpoint, and as the states that librmq saves when it closes and flushes a store."""
    from librmq.errors import StoreError
    from librmq.store.engine.saved_state import MarkError, read_closed_state, take_mark
    from librmq.store.format._checkpoint import CHECKPOINT_SIZE, Checkpoint
    from librmq.store.format.documents import with_checksum

    files = _files("/store", b"", 1)
    short = data if data[:1] == b"\xff" else (data + bytes(CHECKPOINT_SIZE))[:CHECKPOINT_SIZE]
    files.write("/store/checkpoint", short)
    with suppress(StoreError):
        found = Checkpoint.open("/store/checkpoint", files=files, writable=True)
        assert found.min_timestamp_ms >= 0
        found.flush()
    files.make_folder("/store/librmq")
    for name in ("closed", "flushed"):
        files.write(f"/store/librmq/{name}.json", with_checksum(data))
    read_closed_state("/store", files)
    with suppress(MarkError):
        take_mark("/store", files)


def json(data: bytes) -> None:
    """Parse bytes as the broker's JSON, and as each of its tables."""
    from librmq.errors import MalformedError, RmqError
    from librmq.java import json as java_json
    from librmq.store.format.broker_tables import BrokerTables

    with suppress(MalformedError):
        value = java_json.loads(data)
        again = java_json.loads(java_json.dumps(value))
        assert repr(again) == repr(value)
    for name in ("topics", "subscriptionGroup", "consumerOffset", "delayOffset", "consumerFilter"):
        files = _files("/config", b"", 1)
        files.write(f"/config/{name}.json", data)
        with suppress(RmqError):
            config = BrokerTables.open("/config", files=files)
            config.delay_offset(1)
            config.consumer_offset("t", "g", 0)
            config.registrations(1_700_000_000_000)
            config.set_topic("t", read_queues=1, write_queues=1, permission=6)
            config.persist(1_700_000_000_000)


def filter(data: bytes) -> None:
    """Parse bytes as a filter expression; the first one selects the dialect."""
    from tests.fuzz.filter_parser import check

    check(data[1:].decode(errors="surrogateescape"), "5.3" if data[:1] > b"m" else "4.9")


def core(data: bytes) -> None:
    """Let bytes draw what is called in the compiled core, and with which damage; nothing without a core."""
    from librmq.runtime.compiled_core import CORE
    from tests.fuzz.core import Drawn

    if CORE.module is not None:
        fuzzer = _core_fuzzer()
        fuzzer.chance = Drawn(data)
        fuzzer.run(calls=8)
        if fuzzer.store.log.end > 1 << 26:
            _core_fuzzer.cache_clear()


@cache
def _core_fuzzer() -> Any:
    """Return calls of the core with a store of their own, which grows."""
    from tests.fuzz.core import Fuzzer

    return Fuzzer(Random(1))


def store(data: bytes) -> None:
    """Change a small store: the first byte selects it; each change is a file, a place, a length and new bytes."""
    from librmq.errors import ConfigError, StoreError
    from librmq.store.recovery._verify import verify
    from tests.stores import ROOT, contents, in_memory, opened

    if not data:
        return
    config, found = _stores()[data[0] % len(_stores())]
    spoilt = _spoilt(found, data[1:])
    files = in_memory(spoilt)
    before = contents(files)
    with suppress(ConfigError, StoreError):
        verify(ROOT, config, files)
    assert contents(files) == before, "verify changed something"
    with suppress(ConfigError, StoreError), opened(files, config, read_only=True) as reader:
        _read_everything(reader)
    assert contents(files) == before, "a reader changed something"
    with suppress(ConfigError, StoreError), opened(files, None) as writer:
        _read_everything(writer)
        _append(writer)
    files = in_memory(spoilt)
    try:
        with opened(files, config, thorough=True) as repaired:
            _read_everything(repaired)
            _append(repaired)
    except (StoreError, ConfigError):
        return
    verdict = verify(ROOT, config, files)
    assert verdict.sound, verdict.damage


def _append(opened: Any) -> None:
    from librmq.message.message import Message

    result = opened.append(Message("TopicA", b"goes on", keys="goes-on"))
    opened.flush()
    assert opened.read("TopicA", 0, result.queue_offset, 1).messages[0].body == b"goes on"


def _read_everything(opened: Any) -> None:
    from librmq.errors import StoreError

    for topic, queue_id in sorted(opened.queues):
        with suppress(StoreError):
            queue_offset, end = opened.queues[topic, queue_id].min_offset, opened.queues[topic, queue_id].max_offset
            for _ in range(100):
                result = opened.read(topic, queue_id, queue_offset)
                if queue_offset >= end:
                    break
                assert result.next_offset > queue_offset
                queue_offset = result.next_offset
    with suppress(StoreError):
        for message in opened:
            with suppress(StoreError):
                assert len(message.body) < 1 << 26
            for key in message.keys[:2]:
                with suppress(StoreError):
                    opened.find_by_key(message.topic, key)


@cache
def _stores() -> list[tuple[Any, Contents]]:
    """Return a plain store, one with extension files, and one left by a process that died."""
    from tests.stores import SMALL, SMALL_EXT, filled

    return [
        (SMALL, filled(SMALL, 20, seed=1)),
        (SMALL_EXT, filled(SMALL_EXT, 20, seed=2)),
        (SMALL, filled(SMALL, 20, seed=3, clean=False)),
    ]


def _spoilt(found: Contents, changes: bytes) -> Contents:
    found = dict(found)
    paths = sorted(path for path, content in found.items() if content is not None)
    at = 0
    while at + 4 <= len(changes):
        path = paths[changes[at] % len(paths)]
        content = found.get(path)
        place, length = int.from_bytes(changes[at + 1 : at + 3], "big"), changes[at + 3]
        at += 4
        if content is None:
            continue
        if length == 255:  # truncate the file there
            found[path] = content[:place]
        elif length == 254:
            found[path] = content + bytes(place % 300)
        elif length == 253:
            del found[path]
        elif content:
            place %= len(content)
            new = changes[at : at + length % 32]
            at += len(new)
            found[path] = (content[:place] + new + content[place + len(new) :])[: len(content)]
    return found


def _files(folder: str, data: bytes, file_size: int) -> Any:
    """Return memory files with ``data`` split into files of one size in ``folder``; zeros fill up the last one."""
    from librmq.files._memory import MemoryFiles

    files = MemoryFiles()
    files.make_folder(folder)
    for start in range(0, len(data), file_size):
        part = data[start : start + file_size]
        files.write(f"{folder}/{start:020d}", part + bytes(file_size - len(part)))
    return files


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target for target in (record, log, queue, index, ext, checkpoint, json, filter, core, store)
}


# --------------------------------------------------------------------------------------------------------- the fuzzer


def seeds(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


def mutants(target: str, random: Random) -> Iterator[bytes]:
    """Yield random changes of the target's corpus, without end."""
    kept = seeds(target)
    while True:
        data = bytearray(random.choice(kept))
        for _ in range(random.choice((1, 1, 2, 3, 8))):
            at = random.randrange(len(data) + 1)
            match random.randrange(6):
                case 0 if data:
                    data[at % len(data)] ^= 1 << random.randrange(8)
                case 1:
                    data[at : at + 4] = random.choice(
                        (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0")
                    )
                case 2:
                    del data[at : at + random.choice((1, 4, 20, 200))]
                case 3:
                    data[at:at] = random.randbytes(random.choice((1, 4, 20)))
                case 4:
                    other = random.choice(kept)
                    data[at:] = other[at:] if random.random() < 0.5 else other[random.randrange(len(other) + 1) :]
                case _ if data:
                    data[at % len(data)] = random.randrange(256)
        yield bytes(data[:_LONGEST])


def fuzz(name: str, *options: str) -> None:
    """Fuzz one target with these options and folders of libFuzzer; atheris ends the process."""
    import atheris  # type: ignore[import,unused-ignore]

    target = TARGETS[name]
    with atheris.instrument_imports(include=["librmq"]):  # librmq must not be imported earlier
        logging.disable()
        for data in (b"", *seeds(name)):  # imports what it needs; to instrument all of librmq takes long
            target(data)
    atheris.Setup([sys.argv[0], *options], target)
    atheris.Fuzz()


if __name__ == "__main__":
    fuzz(*sys.argv[1:], str(CORPUS / sys.argv[1]))
