"""On a full disk the producer gets an error that names file and cause, never a signal; the store stays intact.

The tests use simulated disks and, where mounting is allowed, real small file systems, on which blocks really run out
under a mapping.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

import librmq
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import DiskFullError, FlushFailedError, StoreError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File
from librmq.message.message import Message
from librmq.store import AppendResult, MessageStore
from librmq.store.recovery._verify import verify
from tests.conftest import SlowBudget
from tests.stores import ROOT, SMALL, START_MS, store_threads

CONFIG = StoreConfig(
    commitlog_file_size=256 << 10,
    consumequeue_file_size=2000 * 20,
    max_hash_slot_num=500,
    max_index_num=2000,
    max_message_size=16 << 10,
    flush_interval_s=0.005,
    flush_thorough_interval_s=0.01,
    flush_interval_consumequeue_s=0.01,
    flush_thorough_interval_consumequeue_s=0.05,
    # Let the disk itself fill up, before the ratios refuse messages.
    disk_max_used_ratio=100,
    disk_force_clean_ratio=100,
    disk_refuse_ratio=100,
)
MIB = 1 << 20


def mount(*words: str | Path) -> bool:
    if not hasattr(os, "geteuid") or os.geteuid() or sys.platform != "linux" or shutil.which("mount") is None:
        return False
    return not subprocess.run(["mount", *map(str, words)], stderr=subprocess.DEVNULL).returncode


@contextmanager
def small_file_system(kind: str, folder: Path) -> Iterator[Path]:
    """Mount a file system of about 6 MiB. For ext4 the kind has a block size, which may be below a page."""
    place = folder / "disk"
    place.mkdir()
    if kind == "tmpfs":
        mounted = mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", place)
    else:
        image, maker = folder / "image", shutil.which("mkfs.ext4") or "/usr/sbin/mkfs.ext4"
        mounted = False
        if os.path.exists(maker):
            with open(image, "wb") as file:
                file.truncate(6 * MIB)
            options = ["-q", "-m", "0", "-O", "^has_journal", "-b", kind.removeprefix("ext4-")]
            made = subprocess.run([maker, *options, image], stderr=subprocess.DEVNULL)
            mounted = not made.returncode and mount("-o", "loop", image, place)
    if not mounted:
        pytest.skip(f"no {kind} can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture(params=["ext4-1024", "ext4-4096"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with small_file_system(request.param, tmp_path) as place:
        yield place


def file_system(disk: Path) -> str:
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text("utf-8").splitlines()]
    return next(kind for _, place, kind, *_ in mounts if place == str(disk))


real = pytest.mark.platform


def body(number: int) -> bytes:
    rng = random.Random(number)
    return b"%d " % number + rng.randbytes(rng.choice([100, 2000, 9000]))


def fill_disk(disk: Path, name: str = "ballast", leave: int = 0) -> Path:
    ballast = disk / name
    with open(ballast, "wb", buffering=0) as file:
        for size in (64 << 10, 4096, 512):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
        os.fsync(file.fileno())
        if leave:
            file.truncate(max(file.tell() - leave, 0))
    return ballast


def append_until_full(store: MessageStore, results: dict[int, AppendResult]) -> StoreIOError:
    number = max(results, default=-1) + 1
    while True:
        try:
            results[number] = store.append(Message(f"T{number % 3}", body(number), keys=f"k{number}"), number % 2)
        except StoreIOError as error:
            return error
        number += 1


def check_served(store: MessageStore, results: dict[int, AppendResult]) -> None:
    """Check that every acknowledged message can be read from log and queue."""
    for number, result in results.items():
        message = store.message_at(result.physical_offset)
        assert message is not None
        assert message.body == body(number)
    for number in list(results)[:: max(1, len(results) // 40)]:
        result = results[number]
        found = store.read(f"T{number % 3}", number % 2, result.queue_offset, 1).messages
        assert [message.physical_offset for message in found] == [result.physical_offset]


# ---------------------------------------------------------------------------------------------- real file systems


@pytest.mark.slow
@real
@pytest.mark.parametrize("durability", ["async", "sync"])
def test_a_full_disk_is_an_error_and_the_store_continues(disk: Path, durability: Literal["async", "sync"]) -> None:
    """The disk fills up several times. Each time the producer gets an error, and the same store continues."""
    path = disk / "store"
    results: dict[int, AppendResult] = {}
    config = replace(CONFIG, durability=durability)
    with ExitStack() as stack:
        store = stack.enter_context(MessageStore.open(path, config))
        ballast = fill_disk(disk, leave=2 * MIB)
        for _ in range(3):
            error = append_until_full(store, results)
            assert error.errno == errno.ENOSPC
            assert error.filename is not None
            assert str(path) in str(error)
            assert isinstance(append_until_full(store, results), StoreIOError), "again and again"
            check_served(store, results)
            taken = len(results)
            os.truncate(ballast, max(ballast.stat().st_size - (1 << 19), 0))  # frees some space
            append_until_full(store, results)
            assert len(results) > taken, "space returned, and nothing is taken"
        ballast.unlink()
        store.flush()
        assert store.log.end == max(result.physical_offset + result.size for result in results.values())
    assert verify(str(path), CONFIG).sound
    with MessageStore.open(path, CONFIG) as store:
        assert store.recovered == []
        check_served(store, results)


@pytest.mark.slow
@real
def test_readers_and_the_store_thread_survive_a_full_disk(disk: Path) -> None:
    path = disk / "store"
    results: dict[int, AppendResult] = {}
    with MessageStore.open(path, CONFIG) as store, MessageStore.open(path, read_only=True):
        ballast = fill_disk(disk, leave=MIB)
        stop, errors, read = threading.Event(), [], 0

        def follow() -> None:
            nonlocal read
            queue_offset = 0
            while not (stop.is_set() and read):
                try:
                    result = store.read("T0", 0, queue_offset)
                    for message in result.messages:
                        assert message.body == body(int(message.body.split(b" ")[0]))
                        read += 1
                    queue_offset = result.next_offset
                except StoreIOError:
                    continue  # entries for a reader can't be written at this point
                except Exception as error:
                    errors.append(error)
                    return

        reader = threading.Thread(target=follow)
        reader.start()
        append_until_full(store, results)
        (thread,) = store_threads()
        ballast.unlink()
        append_until_full_or(store, results, 400)
        acknowledgement = store.submit(Message("last", b""))
        while not acknowledgement.done:  # the store's thread does it
            assert store_threads() == [thread]
        stop.set()
        reader.join()
        assert errors == []
        assert read > 0
        assert store_threads() == [thread]


def append_until_full_or(store: MessageStore, results: dict[int, AppendResult], count: int) -> None:
    """Append this many messages, or fewer if the disk is full, and free space at the end."""
    for number in range(max(results) + 1, max(results) + 1 + count):
        try:
            results[number] = store.append(Message(f"T{number % 3}", body(number), keys=f"k{number}"), number % 2)
        except StoreIOError:
            return


@pytest.mark.slow
@real
@pytest.mark.parametrize("kind", ["ext4-1024", "tmpfs"])
def test_no_exhausted_resource_kills_a_writer(kind: str, tmp_path: Path) -> None:
    """A separate process fills its disk at any moment, so that a signal would be noticed."""
    with small_file_system(kind, tmp_path) as disk:
        write_greedily(disk)


def write_greedily(disk: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(GREEDY), str(disk), file_system(disk)],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(Path(librmq.__file__ or "").parent.parent), str(Path(__file__).parent.parent.parent)]
            ),
        },
    )
    assert (done.returncode, done.stderr) == (0, "")
    refused, taken = map(int, done.stdout.split())
    assert refused > 20
    assert taken > 20


GREEDY = """
import gc
import logging
import os
import random
import shutil
import sys
from pathlib import Path

from librmq import Message, MessageStore
from librmq.errors import StoreIOError
from librmq.store import verify
from tests.crash.test_full_disk import CONFIG, body, check_served, fill_disk, mount

logging.disable()

disk, rng = Path(sys.argv[1]), random.Random(5)
refused = taken = 0
for attempt in range(6):
    path, results = disk / f"store{attempt}", {}
    ballast = fill_disk(disk, leave=rng.choice([0, 4096, 50_000, 300_000, 1_000_000]))
    try:
        store = MessageStore.open(path, CONFIG)
    except StoreIOError:
        refused += 1
        ballast.unlink()
        store = MessageStore.open(path, CONFIG)
        fill_disk(disk, leave=rng.choice([50_000, 300_000]))
    number = 0
    for _ in range(60):
        kind = rng.random()
        try:
            if kind < 0.05:
                fill_disk(disk)
            elif kind < 0.1:
                fill_disk(disk, leave=rng.choice([4096, 20_000, 100_000]))
            for _ in range(rng.choice([1, 20])):
                message = Message(f"T{number % 3}", body(number), keys=f"k{number}")
                results[number] = store.append(message, number % 2)
                number += 1
                taken += 1
        except StoreIOError:
            number += 1
            refused += 1
    (disk / "ballast").unlink()
    os.sync()  # ext4 frees the blocks of a deleted file when its journal commits
    if sys.argv[2] == "tmpfs":  # on which reading holes, as in verify, takes pages
        mount("-o", "remount,size=64m", disk)
    check_served(store, results)
    store.close()
    assert verify(str(path), CONFIG).sound
    with MessageStore.open(path, CONFIG) as again:
        check_served(again, results)
    shutil.rmtree(path)
    gc.collect()  # errors are in cycles with frames, which keep files, and so the space, of the deleted store
    if sys.argv[2] == "tmpfs":
        mount("-o", "remount,size=6m", disk)
print(refused, taken)
"""


@real
def test_a_store_opens_on_a_full_disk_and_writes_later(tmp_path: Path) -> None:
    """Not on tmpfs, where reading a hole through a mapping takes a page, or raises a signal if there is none."""
    with small_file_system("ext4-4096", tmp_path) as disk:
        open_when_full(disk)


def open_when_full(disk: Path) -> None:
    path = disk / "store"
    results: dict[int, AppendResult] = {}
    store = MessageStore.open(path, CONFIG)
    fill_disk(disk, leave=MIB)
    append_until_full(store, results)
    store.abandon()  # there may be no room for derived entries
    fill_disk(disk, "more")
    with MessageStore.open(path, read_only=True) as reader:
        assert sum(1 for _ in reader) == len(results)
    with suppress(StoreIOError, FlushFailedError), MessageStore.open(path, CONFIG) as store:
        check_served(store, results)
    (disk / "ballast").unlink()
    with MessageStore.open(path, CONFIG) as store:
        check_served(store, results)
        store.append(Message("goes on", b""))
        store.flush()
    assert verify(str(path), CONFIG).sound


# ------------------------------------------------------------------------------------------------- simulated disks


class BoundedFiles(MemoryFiles):
    """Files in memory with a limited number of 512-byte blocks.

    On a real disk a write to a block that was not reserved kills the process; `check_blocks` finds such writes.
    """

    BLOCK = 512

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = blocks
        self.reserved: dict[str, set[int]] = {}

    @property
    def used(self) -> int:
        return sum(map(len, self.reserved.values()))

    def reserve(self, file: File, begin: int, end: int) -> None:
        with self._guard:
            wanted = set(range(begin // self.BLOCK, -(-min(end, file.size) // self.BLOCK)))
            have = self.reserved.setdefault(file.path, set())
            if self.used + len(wanted - have) > self.blocks:
                raise StoreIOError("allocate", file.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            have |= wanted

    def delete(self, path: str) -> None:
        with self._guard:
            super().delete(path)
            self.reserved = {
                other: blocks
                for other, blocks in self.reserved.items()
                if other != path and not other.startswith(path + os.sep)
            }

    def check_blocks(self) -> None:
        """Check that every byte that is not zero lies in a reserved block."""
        for path, file in self._files.items():
            if not isinstance(file, File):
                continue
            have = self.reserved.get(path, set())
            for block in range(-(-file.size // self.BLOCK)):
                if block not in have:
                    assert not any(file.buffer[block * self.BLOCK : (block + 1) * self.BLOCK]), (path, block)


def run_out(seed: int, config: StoreConfig, *, check: bool = True) -> int:
    """Fill the disk of one store and make room again, repeatedly; return how often the store refused a message."""
    rng = random.Random(seed)
    files = BoundedFiles(rng.randrange(20, 120))
    results: dict[int, AppendResult] = {}
    refused = 0
    store = None
    while store is None:
        try:
            store = MessageStore.open(ROOT, config, files=files, clock=ManualClock(START_MS))
        except StoreIOError as error:
            refused += error.errno == errno.ENOSPC
            files.blocks += rng.randrange(1, 100)
    for number in range(150):
        message = Message(f"T{number % 3}", body(number)[: rng.choice([50, 1500])], keys=f"k{number}")
        try:
            if rng.random() < 0.1:
                store.run_due(START_MS + 1000 * number)
            results[number] = store.append(message, number % 2)
        except StoreIOError as error:
            refused += error.errno == errno.ENOSPC
            if rng.random() < 0.3:
                files.blocks += rng.randrange(1, 60)
        if check:
            files.check_blocks()
    files.blocks += 10_000
    for one, result in results.items():
        found = store.message_at(result.physical_offset)
        assert found is not None
        assert body(one).startswith(found.body)
        served = store.read(f"T{one % 3}", one % 2, result.queue_offset, 1).messages
        assert [message.physical_offset for message in served] == [result.physical_offset]
    assert len(list(store)) == len(results), "a refused message is in the log"
    store.close()
    files.check_blocks()
    assert verify(ROOT, config, files).sound
    return refused


EXT = replace(SMALL, enable_consumequeue_ext=True)


@pytest.mark.parametrize("at_once", [1, 3], ids=["single", "batches"])
def test_the_log_takes_no_room_that_entries_of_earlier_files_need(at_once: int) -> None:
    """What is acknowledged is read while the disk is full, also where no thread has written entries before."""
    files, taken = BoundedFiles(160), 0
    config = replace(SMALL, consumequeue_file_size=500 * 20)
    with MessageStore.open(ROOT, config, files=files, clock=ManualClock(START_MS)) as store:
        with suppress(StoreIOError):
            while taken < 200:
                messages = [Message("T", b"%0500d" % number) for number in range(taken, taken + at_once)]
                store.append_batch(messages) if at_once > 1 else store.append(messages[0])
                taken += at_once
        assert 60 < taken < 200
        assert [int(message.body) for message in store.messages("T", 0)] == list(range(taken))
        files.blocks *= 2


@pytest.mark.slow
def test_many_full_disks(slow_budget: SlowBudget) -> None:
    """Whichever block is the last, nothing is lost and nothing is written without a block."""
    seeds = slow_budget.rounds(2_000, "full disks", at_least=20)
    assert sum(run_out(seed, EXT if seed % 2 else SMALL, check=seed % 10 == 0) for seed in seeds) > 100


@pytest.mark.platform
@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="blocks are not reserved here")
def test_blocks_are_reserved_behind_whole_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If blocks are smaller than pages, a write to a page without all its blocks kills the process."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, begin, length: asked.append((begin, begin + length)))
    files, page = DiskFiles(), mmap.PAGESIZE
    file = files.create(str(tmp_path / "file"), 3 * page + 100)
    for begin, end in ((0, 1), (page - 1, page + 1), (page, 2 * page), (3 * page + 1, 3 * page + 90)):
        files.reserve(file, begin, end)
    assert asked == [(0, page), (0, 2 * page), (page, 2 * page), (3 * page, 3 * page + 100)]


def test_a_write_without_a_block_would_be_noticed() -> None:
    files = BoundedFiles(10)
    files.make_folder("/x")
    file = files.create("/x/1", 4096)
    files.reserve(file, 0, 600)
    file.buffer[1000:1005] = b"abcde"
    files.check_blocks()
    file.buffer[1024:1025] = b"a"
    with pytest.raises(AssertionError):
        files.check_blocks()


class FullDisk(MemoryFiles):
    """A disk that has no room for a new file while ``is_full``."""

    is_full = False
    code = errno.ENOSPC

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        if self.is_full:
            raise StoreIOError("create", path, OSError(self.code, os.strerror(self.code)))
        return super().create(path, size, keep_descriptor=keep_descriptor)

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        if self.is_full and data:
            raise StoreIOError("write", path, OSError(self.code, os.strerror(self.code)))
        super().write(path, data)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_store_opens_and_closes_without_room_for_its_documents(code: int) -> None:
    """A full disk, or a quota that is used up, prevents no reading."""
    files = FullDisk()
    files.code = code
    with MessageStore.open("/s", StoreConfig.tiny(), files=files) as store:
        store.append(Message("T", b"1"))
    files.is_full = True
    config = StoreConfig.tiny(file_reserved_hours=1, message_delay_level="1s 1h")
    with MessageStore.open("/s", config, files=files) as store:
        assert [message.body for message in store] == [b"1"]
    with MessageStore.open("/s", files=files) as store:
        assert [message.body for message in store] == [b"1"]


@pytest.mark.parametrize("before", [1, 100])
def test_all_messages_are_found_while_entries_and_keys_wait_for_room(before: int) -> None:
    """Neither the queue nor the index has room. A search answers from what waits."""
    files = FullDisk()
    config = StoreConfig.tiny(commitlog_file_size=1 << 20, max_index_num=64)
    with librmq.Broker.open("/s", files=files, store_config=config, runner=librmq.ManualRunner()) as broker:
        store, count = broker.store, before
        broker.create_topic("T", 1)
        for number in range(count):
            store.append(Message("T", b"%d" % number, keys=f"k{number}", unique_key=f"U{number}"))
        store.flush()
        files.is_full = True
        with suppress(StoreIOError):
            for number in range(count, count + 3000):
                store.append(Message("T", b"%d" % number, keys=[f"k{number}", "all"], unique_key=f"U{number}"))
                count = number + 1
        assert before + 5 < count < 3000
        for number in (0, before, 63, count - 1):
            expected = [b"%d" % number]
            assert [message.body for message in store.find_by_key("T", f"k{number}")] == expected
            assert [message.body for message in broker.find_by_key("T", f"U{number}")] == expected
            assert [message.body for message in store.find_by_id(f"U{number}")] == expected
            assert [message.body for message in store.find_by_key("T", f"k{number}", exact=False)] == expected
        last = [b"%d" % number for number in range(count - 5, count)]
        assert [message.body for message in store.find_by_key("T", "all", max_messages=5)] == last
        assert store.find_by_key("T", "all", end_ms=1) == []
        assert len(list(store)) == count
        assert store.queue("T", 0) is not None
        assert store.queue_offset_at("T", 0, 0) == 0
        files.is_full = False
        assert [message.body for message in store.messages("T")] == [b"%d" % number for number in range(count)]
        assert [message.body for message in store.find_by_key("T", "all", max_messages=5)] == last


def test_a_disk_nearly_full_refuses_by_ratio_and_takes_again() -> None:
    files, clock = MemoryFiles(), ManualClock(START_MS)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        store.append(Message("t", b"1"))
        files.disk_used_ratio = 0.91
        clock.advance(seconds=20)
        store.run_due(clock.now_ms())
        with pytest.raises(DiskFullError, match="91"):
            store.append(Message("t", b"2"))
        assert [message.body for message in store] == [b"1"]
        assert issubclass(DiskFullError, StoreError)
        files.disk_used_ratio = 0.5
        clock.advance(seconds=20)
        store.run_due(clock.now_ms())
        store.append(Message("t", b"3"))
