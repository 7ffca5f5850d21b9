"""Stores for tests: fill them with all kinds of records, copy them into memory, and read their contents."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from librmq.clock import ManualClock, SystemClock
from librmq.config import StoreConfig
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File, Files
from librmq.message import record
from librmq.message.message import Message, StoredMessage
from librmq.message.properties import PropertyName
from librmq.store import AppendResult, MessageStore
from librmq.store.engine.derivation import has_queue_entry, is_indexed
from librmq.store.format.documents import with_checksum
from librmq.store.retention import RetainedStore
from tests.budget import some, step
from tests.file_seams import Event, FailingFiles

ROOT = "/store"
EVER = -(1 << 63)
"""Earlier than any timestamp that a damaged record can have."""
START_MS = 1_700_000_000_000
TOPICS = ("TopicA", "消息", "%RETRY%group", "t" * 127)
V4 = ("192.168.1.10", 54321)
V6 = ("fe80::1:2", 10911)

SMALL = StoreConfig.broker(
    commitlog_file_size=4096,
    consumequeue_file_size=8 * 20,
    consumequeue_ext_file_size=256,
    max_hash_slot_num=8,
    max_index_num=32,
    max_message_size=3000,
)
"""File sizes so small that a few dozen messages fill several files of each kind."""
SMALL_EXT = replace(SMALL, enable_consumequeue_ext=True)
configs = pytest.mark.parametrize("config", [SMALL, SMALL_EXT], ids=["plain", "ext"])


def retained(
    store: MessageStore,
    config: StoreConfig,
    lock: AbstractContextManager[object] | None = None,
    settled: Callable[[], int] | None = None,
) -> RetainedStore:
    """Return what retention asks of an open store; a test can replace the settings, the lock, and what is settled."""
    log, queues, held = store.log, store.queues, lock or nullcontext()

    def flush() -> int:
        end = log.flush()
        for queue in list(queues.values()):
            queue.flush()
        return end

    return RetainedStore(
        path=store.path,
        files=store.files,
        clock=SystemClock(),
        config=config,
        log=log,
        index=store.index,
        queues=queues,
        lock=held,
        readers=lambda: None,
        written_queues=lambda: queues,
        deletion=lambda: held,
        settled=settled or flush,
        flush_log=log.flush,
    )


Contents = dict[str, Any]
"""The contents of a folder: the bytes of each file by relative path, or None for a folder."""


def contents(files: Files, root: str = ROOT) -> Contents:
    """Return a folder's contents without its lock file: closing a second descriptor of it would release the lock."""
    found: Contents = {}

    def walk(folder: str) -> None:
        for entry in files.list(os.path.join(root, folder) if folder else root):
            path = os.path.join(folder, entry.name)
            if entry.is_folder:
                found[path] = None
                walk(path)
            elif path != "lock":
                found[path] = files.read(os.path.join(root, path))

    walk("")
    return found


def derived(found: Contents) -> Contents:
    """Return only the contents of the log, the queues and the index."""
    return {path: data for path, data in found.items() if path.startswith(("commitlog/", "consumequeue", "index/"))}


LISTS_DESCRIPTORS = pytest.mark.skipif("not os.path.isdir('/proc/self/fd')", reason="needs a list of descriptors")


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Fail if the block leaves a descriptor open: a program must not wait for a garbage collection to have it back."""
    gc.collect()  # releases what earlier tests left
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        yield
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()


def store_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "librmq-store"]


F = TypeVar("F", bound=Files)


def in_memory(found: Mapping[str, bytes | None]) -> MemoryFiles:
    """Return files in memory with these contents: the store as another process finds it after a crash."""
    return with_contents(MemoryFiles(), found)


def with_contents(files: F, found: Mapping[str, bytes | None]) -> F:
    """Write the contents of a store into ``files``, and return them."""
    files.make_folder(ROOT)
    for path, data in found.items():
        if data is None:
            files.make_folder(os.path.join(ROOT, path))
    for path, data in found.items():
        if data is not None:
            files.make_folder(os.path.dirname(os.path.join(ROOT, path)))
            files.write(os.path.join(ROOT, path), data)
    return files


def with_fields(document: bytes | None, **fields: object) -> bytes:
    """Return a document of librmq's own with other values of these fields, or these more."""
    before = {} if document is None else json.loads(document)
    before.pop("crc32", None)
    return with_checksum(json.dumps(before | fields).encode())


def from_disk(folder: Path) -> Contents:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def on_disk(found: Contents, folder: Path) -> Path:
    """Write contents to a folder on disk, and return the folder."""
    for path, data in found.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            (folder / path).mkdir(exist_ok=True)
        else:
            (folder / path).write_bytes(data)
    return folder


def put_in_memory(folder: Path, url: str) -> str:
    """Copy a store into fsspec's file system in memory, and return its URL."""
    import fsspec

    system = fsspec.filesystem("memory")
    for name, data in from_disk(folder).items():
        if data is not None:
            system.pipe(f"{url.removeprefix('memory:/')}/{name}", data)
    return url


def died(files: MemoryFiles) -> MemoryFiles:
    """Return what a process leaves behind if it dies now: the contents without its lock."""
    return in_memory(contents(files))


def apply(files: MemoryFiles, event: Event) -> bool:
    """Repeat a recorded call if it changes what other processes see; return whether it does."""
    if event.call == "make_folder":
        files.make_folder(event.path)
    elif event.call == "create":
        files.create(event.path, event.offset)
    elif event.call == "replace":
        files.write(event.path, event.data)
    elif event.call == "delete":
        files.delete(event.path)
    elif event.call == "rename":
        files.rename(event.path, os.fsdecode(event.data))
    elif event.call == "link":
        files.link(event.path, os.fsdecode(event.data))
    elif event.call == "write":
        files.open(event.path, writable=True).buffer[event.offset : event.offset + len(event.data)] = event.data
    else:
        return False
    return True


def any_message(rng: random.Random, topic: str | None = None, *, delay: bool = True) -> tuple[Message, dict[str, Any]]:
    """Return a random message and random fields for its record."""
    number = rng.randrange(40)
    properties = {}
    if rng.random() < 0.4:
        properties = {rng.choice(["a", "color", "Ünï", "x%sy"]): rng.choice(["1", "r\u00e9d", "5.0", "\U0001d4b3%d"])}
    message = Message(
        topic or rng.choice(TOPICS),
        rng.choice([b"", b"x", rng.randbytes(rng.randrange(1, 400)), "body \u4e2d".encode() * 3]),
        tags=rng.choice([None, "TagA", "TagB", "标签", "a || b"]),
        keys=(
            text := rng.choice(["", f"key{number}", f"key{number} order{number}", f" k{number}  k{number} "])
        ).split(),
        properties=properties,
        delay_level=rng.choice([None, None, None, 1, 5, 30, -1]) if delay else None,
        flag=rng.choice([0, 1, -1, 1 << 30]),
        unique_key=rng.choice([None, f"UNIQ{rng.randrange(10**9):09d}", f"UNIQ{number}"]),
    )
    if text:
        message.properties[PropertyName.KEYS] = text  # as any client can send it
    fields: dict[str, Any] = {"reconsume_times": rng.choice([0, 3])}
    if rng.random() < 0.2:
        fields["born_host"] = rng.choice([V4, V6])
    if rng.random() < 0.2:
        fields["store_host"] = rng.choice([V4, V6])
    return message, fields


def fill(store: MessageStore, clock: ManualClock, rng: random.Random, count: int) -> list[AppendResult]:
    """Append ``count`` messages of all kinds, some of them in batches, and advance the clock in between."""
    results: list[AppendResult] = []
    while len(results) < count:
        clock.advance(ms=rng.choice([0, 1, 700, 5000]))
        message, fields = any_message(rng)
        queue_id = rng.randrange(2)
        if rng.random() < 0.15:
            batch = [any_message(rng, message.topic, delay=False)[0] for _ in range(rng.randrange(1, 5))]
            del fields["reconsume_times"]
            results += store.append_batch(batch, queue_id, properties=rng.choice([None, {"B": "b"}]), **fields)
            continue
        if rng.random() < 0.2:
            fields["sys_flag"] = rng.choice(
                [record.TRANSACTION_PREPARED, record.TRANSACTION_COMMIT, record.TRANSACTION_ROLLBACK]
            )
            fields["prepared_transaction_offset"] = rng.choice([0, 77])
        results.append(store.append(message, queue_id, **fields))
    return results


def filled(config: StoreConfig = SMALL, count: int = 60, seed: int = 1, *, clean: bool = True) -> Contents:
    """Return the contents of a store of ``count`` messages: closed or, unless ``clean``, left by a process that died.

    Files that only librmq writes are left out, as if a broker had written the store.
    """
    return dict(_filled(config, count, seed, clean))


@cache
def _filled(config: StoreConfig, count: int, seed: int, clean: bool) -> Contents:
    files = MemoryFiles()
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, config, files=files, clock=clock)
    fill(store, clock, random.Random(seed), count)
    if clean:
        store.close()
    else:
        store.flush()
        fill(store, clock, random.Random(seed + 1), count // 4)
    return {name: data for name, data in contents(files).items() if not name.startswith("librmq")}


def opened(files: Files, config: StoreConfig | None = SMALL, **more: Any) -> MessageStore:
    """Open a store in memory one day after it was made."""
    return MessageStore.open(ROOT, config, files=files, clock=ManualClock(START_MS + 86_400_000), **more)


def served(store: MessageStore, damaged: range = range(0)) -> dict[int, StoredMessage]:
    """Return all messages by physical offset; assert that each is found by its queue and its keys.

    If two messages have the same queue offset because the topic was created again, the later one counts, unless it has
    bytes in ``damaged``, physical offsets: its queue offset can be that of another message.
    """
    found = {message.physical_offset: message for message in store}
    owners = {}
    keyed: dict[tuple[str, str], list[StoredMessage]] = {}
    for message in found.values():
        place = message.topic, message.queue_id, message.queue_offset
        is_damaged = message.physical_offset < damaged.stop and damaged.start < message.physical_offset + message.size
        if has_queue_entry(message.sys_flag) and not (is_damaged and place in owners):
            owners[place] = message
        if is_indexed(message.sys_flag):
            for key in {*message.keys, *([message.unique_key] if message.unique_key else [])}:
                if key.endswith("\0"):  # of a record that zeros end: the keys that it had are kept
                    continue
                keyed.setdefault((message.topic, key), []).append(message)
    for (topic, key), messages in some([*keyed.items()]):
        by_key = {one.physical_offset: one for one in store.find_by_key(topic, key, EVER, max_messages=10_000)}
        assert all(by_key.get(message.physical_offset) == message for message in messages), (key, messages)
    for (topic, queue_id, queue_offset), message in owners.items():
        result = store.read(topic, queue_id, queue_offset, 1)
        assert result.messages == [message], (result, message)
    return found


class OpenedFiles(FailingFiles):
    """Files that record the path within the store of each file that is opened."""

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self.paths: list[str] = []

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        self.paths.append(path.removeprefix(f"{ROOT}/"))
        file: File = super().open(path, writable=writable, keep_descriptor=keep_descriptor)
        return file


def calls_failing(files: Files, calls: Iterable[str], code: int) -> Iterator[tuple[str, FailingFiles]]:
    """Yield files in which the first call fails, then the second, and so on, until there are no more calls to fail."""
    for call in calls:
        number = 1
        while True:
            failing = FailingFiles(files)
            failing.fail(call, number, code)
            yield call, failing
            if failing.calls[call] < number:
                break
            number += step()


class CountingFiles(DiskFiles):
    """Files on disk that note which log files were opened, and add up their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: set[str] = set()

    def open(self, path: str, *, writable: bool = False, keep_descriptor: bool = False) -> File:
        if f"{os.sep}commitlog{os.sep}" in path:
            self.opened.add(path)
        return super().open(path, writable=writable, keep_descriptor=keep_descriptor)

    @property
    def log_bytes(self) -> int:
        return sum(os.path.getsize(path) for path in self.opened)


class AnyClock(ManualClock):
    """A clock that a test sets to any time, also back."""

    def __init__(self, time_ms: int = START_MS) -> None:
        super().__init__(time_ms)
        self.time_ms = time_ms

    def now_ms(self) -> int:
        return self.time_ms
