"""After a store is flushed, closed or opened, a crash loses nothing of it."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import StoreIOError
from librmq.files.interface import file_size, make_folders
from librmq.message.message import Message
from librmq.store import MessageStore
from librmq.store.retention import Retention
from tests.budget import many, some
from tests.crash.runs import BusyFiles, assert_settled
from tests.file_seams import CrashImages, FailingFiles, Image, distinct
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS, configs, fill, opened, retained, served

pytestmark = pytest.mark.usefixtures("mark_each_flush")


def filled(files: BusyFiles, config: StoreConfig, count: int = 60) -> MessageStore:
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, config, files=files, clock=clock)
    fill(store, clock, random.Random(count), count)
    return store


def expire(store: MessageStore) -> list[str]:
    """Delete everything that may be deleted, as retention does between two flushes."""
    store.flush()
    retention = Retention(retained(store, store.config, lock=store.appender.lock))
    return retention.delete_before(store.log.end)


def broker_files(image: Image) -> dict[str, bytes | None]:
    """Return all files but librmq's own, which only save time."""
    return {path: data for path, data in image.contents.items() if not path.startswith(f"{ROOT}/librmq")}


@configs
def test_after_a_flush_nothing_is_unflushed(config: StoreConfig) -> None:
    files = BusyFiles()
    store = filled(files, config)
    assert store.flush() == store.log.end
    assert_settled(files)


@pytest.mark.slow
@configs
@pytest.mark.parametrize("expiring", [False, True])
def test_after_a_close_nothing_is_unflushed(config: StoreConfig, expiring: bool) -> None:
    """When the marker is gone, everything is on the device."""
    files = BusyFiles()
    store = filled(files, config, 200)
    if expiring:
        assert len([path for path in expire(store) if "/consumequeue" in path]) > 4
    begin = len(files.trace)
    store.close()
    assert_settled(files)
    images = CrashImages(files.trace)
    last = images.image(0, len(files.trace))
    for crash_point in some(range(begin, len(images))):
        for seed in range(10):
            image = images.image(seed, crash_point)
            assert f"{ROOT}/abort" in image.contents or broker_files(image) == broker_files(last), image


@many
@configs
@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("flushed", [0, 40])
def test_after_a_recovery_nothing_is_unflushed(config: StoreConfig, thorough: bool, flushed: int) -> None:
    """The dead writer may have flushed nothing, so the next one flushes what it opens."""
    files = BusyFiles()
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, config, files=files, clock=clock)
    if flushed:
        fill(store, clock, random.Random(1), flushed)
        store.flush()
        clock.advance(seconds=60)
    fill(store, clock, random.Random(2), 60)
    before = served(store)
    files = files.killed()
    with MessageStore.open(ROOT, config, files=files, clock=clock, thorough=thorough) as store:
        assert_settled(files)
        assert served(store) == before
    assert_settled(files)


@configs
def test_queues_deleted_by_a_dead_process(config: StoreConfig) -> None:
    """The next process writes to none of these queues, but its checkpoint still covers them."""
    files = BusyFiles()
    store = filled(files, config, 200)
    assert len([path for path in expire(store) if "/consumequeue" in path]) > 4
    files = files.killed()
    with opened(files, config):
        assert_settled(files)


@pytest.mark.parametrize(
    ("name", "thorough"),
    [
        (f"commitlog/{4096:020d}", False),
        (f"consumequeue/New/0/{0:020d}", False),
        (f"consumequeue_ext/New/0/{0:020d}", False),
        ("index/20300101000000000", False),
        (f"consumequeue/New/0/{7:020d}", True),
    ],
)
def test_queues_deleted_during_an_opening(name: str, thorough: bool) -> None:
    """Otherwise a crash after the store was closed would bring the file back."""
    files = BusyFiles()
    store = filled(files, SMALL_EXT, 5)
    store.flush()
    path = f"{ROOT}/{name}"
    make_folders(files, os.path.dirname(path))
    files.write(path, bytes(100 if thorough else 0))
    files = files.killed()
    with opened(files, SMALL_EXT, thorough=thorough) as store:
        assert any(damage.file == path for damage in store.recovered)
    assert file_size(files, path) is None
    assert_settled(files)


@pytest.mark.slow
@pytest.mark.parametrize("at", [36, 500], ids=["a header", "an entry"])
def test_a_crash_while_the_whole_index_is_rebuilt(at: int) -> None:
    """The checkpoint covers the old files; a new one that survives the crash must not be taken for one of them."""
    files = BusyFiles()
    store = filled(files, SMALL, 200)
    store.flush()
    assert len(store.index.files) > 4
    assert store.checkpoint.index_timestamp_ms
    first = files.open(store.index.files[0].path, writable=True)
    first.buffer[at : at + 4] = b"\x7f\xff\xff\xff"
    files.flush(first)
    files = files.killed()
    begin = len(files.trace)
    with opened(files, SMALL, thorough=True) as store:
        wanted = served(store)
    images = CrashImages(files.trace)
    of_index = [
        point for point in range(begin + 1, len(images)) if files.trace[point - 1].path.startswith(f"{ROOT}/index/")
    ]
    for image in distinct(images.image(crash_point, crash_point) for crash_point in some(of_index)):
        with opened(image.files(), SMALL, thorough=at != 36 and first.path in image.contents) as again:
            assert served(again) == wanted, image


@pytest.mark.slow
@configs
def test_no_crash_leaves_a_gap_where_files_expire(config: StoreConfig) -> None:
    """Nor do records come back without their entries, because records are deleted before derived data."""
    files = BusyFiles()
    store = filled(files, config, 200)
    store.flush()
    begin = len(files.trace)
    assert len([path for path in expire(store) if "/commitlog/" in path]) > 4
    images = CrashImages(files.trace)
    crashes = itertools.product(some(range(begin, len(images))), range(3))
    for image in distinct(images.image(seed, crash_point) for crash_point, seed in crashes):
        starts = [int(path[-20:]) for path in image.contents if path.startswith(f"{ROOT}/commitlog/")]
        assert sorted(starts) == [*range(min(starts), max(starts) + 1, config.commitlog_file_size)], image
        with opened(image.files(), config) as again:
            assert not [cut for cut in again.recovered if "/index/" not in cut.file and cut.kind != "size"], image
            verdict = again.verify()
            assert verdict.sound, (verdict.damage, image)


def test_a_queue_that_could_not_be_flushed_is_flushed_later() -> None:
    """Only the opening of the file for the flush failed. So nothing is lost, and the next flush includes it."""
    disk = BusyFiles()
    files = FailingFiles(disk)
    config = replace(SMALL, mapped_files=1)
    store = MessageStore.open(ROOT, config, files=files, clock=ManualClock(START_MS))
    for queue_id in range(3):
        store.append(Message("TopicA", b"body"), queue_id)
    store.read("TopicA", 0, 0)
    files.fail("open")
    with pytest.raises(StoreIOError):
        store.flush()
    assert store.flush() == store.log.end
    assert_settled(disk)
    store.append(Message("TopicA", b"more"))
    store.close()
    assert_settled(disk)


@pytest.mark.slow
def test_after_a_failed_queue_flush_nothing_is_clean() -> None:
    """What the failed flush left out counts as flushed, but is not on the device."""
    disk = BusyFiles()
    files = FailingFiles(disk)
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
    fill(store, clock, random.Random(1), 20)
    store.log.flush()
    files.fail("flush", 2)  # the first flush is that of the log's last file
    with pytest.raises(StoreIOError, match="/consumequeue/"):
        store.flush()
    for _ in range(80):
        clock.advance(seconds=1)
        store.append(Message("Other", b"b" * 100))
    for end in (store.flush, store.close):
        with pytest.raises(StoreIOError, match="close the store and reopen it"):
            end()
    assert store.checkpoint.min_timestamp_ms < START_MS
    assert file_size(disk, f"{ROOT}/abort") == 0
    images = CrashImages(disk.trace)
    for seed in range(20):
        with opened(images.image(seed, len(disk.trace)).files(), SMALL) as again:
            assert len(served(again)) == 100
            assert again.verify().sound


def test_an_index_file_filled_during_a_flush_is_not_vouched_for() -> None:
    files = BusyFiles()
    store = MessageStore.open(ROOT, SMALL, files=files, clock=ManualClock(START_MS))

    def append(count: int = 40) -> None:
        for number in range(count):
            store.append(Message("TopicA", b"", keys=f"k{number}"))
        store.find_by_key("TopicA", "k1")

    append(5)
    files.meanwhile = append
    store.flush()
    files.meanwhile = None
    assert store.index.files[0].full
    assert store.checkpoint.physic_timestamp_ms == START_MS
    assert store.checkpoint.index_timestamp_ms == 0
    store.flush()
    assert store.checkpoint.index_timestamp_ms == START_MS


@configs
@pytest.mark.parametrize("closed", [False, True])
def test_opened_files_can_expire_before_the_first_append(config: StoreConfig, closed: bool) -> None:
    """Opening flushes everything, so retention does not have to wait for the flush of an append."""
    files = BusyFiles()
    store = filled(files, config, 200)
    begin = store.log.begin
    if closed:
        store.close()
    files = files.killed()
    size = 4 * config.commitlog_file_size
    clock = ManualClock(START_MS * 2)
    with MessageStore.open(ROOT, replace(config, max_total_size=size), files=files, clock=clock) as again:
        again.run_due(clock.now_ms())
        assert again.log.begin > begin
        assert again.verify().sound
