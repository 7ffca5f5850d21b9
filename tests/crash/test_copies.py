"""Power failures while a snapshot or a rescue runs, or while recovery copies bytes that it cuts."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.files.interface import Files
from librmq.message.message import Message, StoredMessage
from librmq.store import MessageStore
from librmq.store._snapshots import restore, snapshot
from librmq.store.extraction import rescue
from librmq.store.recovery import salvage
from librmq.store.recovery._verify import verify
from librmq.store.retention import Retention
from tests.budget import examples, many
from tests.crash.runs import BusyFiles
from tests.file_seams import CrashImages, Image, RecordingFiles
from tests.stores import ROOT, SMALL, START_MS, Contents, configs, fill, filled, opened, retained

TARGET = "/snapshots/of today/one"


def crashes(found: Contents, do: Callable[[Files], object], count: int = examples(120)) -> list[Image]:
    """Return images of crashes during an action on a store, and many of crashes after it."""
    on_disk: Contents = {ROOT: None, **{f"{ROOT}/{path}": data for path, data in sorted(found.items())}}
    files = RecordingFiles()
    Image(0, 0, on_disk, ()).write_to(files)
    files.trace.clear()
    do(files)
    images = CrashImages(files.trace, on_disk)
    return [*images.images("meanwhile", count), *(images.image(seed, len(files.trace)) for seed in range(count // 2))]


def damaged(found: Contents) -> Contents:
    """Change bytes in the second file of the log."""
    path = "commitlog/00000000000000004096"
    data = found[path]
    return {**found, path: data[:1500] + b"\xff" * 40 + data[1540:]}


def open_target(files: Files, config: StoreConfig) -> MessageStore:
    return MessageStore.open(TARGET, config, files=files, clock=ManualClock(START_MS))


@many
@configs
@pytest.mark.parametrize(
    "make", [partial(snapshot, clock=ManualClock(START_MS)), restore, rescue], ids=["snapshot", "restore", "rescue"]
)
def test_a_new_store_is_whole_or_not_there(config: StoreConfig, make: Callable[..., object]) -> None:
    found = filled(config)
    images = crashes(damaged(found) if make is rescue else found, lambda files: make(ROOT, TARGET, config, files=files))
    *_, last = images
    with open_target(last.files(), config) as store:
        expected = [bytes(message.raw) for message in store]
    assert len(expected) > 30
    for image in images:
        if TARGET not in image.contents:
            assert image.crash_point < last.crash_point, f"it is gone\n{image}"
            continue
        files = image.files()
        with open_target(files, config) as store:
            assert store.recovered == [], image
            assert [bytes(message.raw) for message in store] == expected, image
            verdict = store.verify()
            assert verdict.sound, (verdict.damage, image)
        assert verify(TARGET, config, files).sound, image


@pytest.mark.slow
@pytest.mark.parametrize("copy", [False, True])
def test_a_snapshot_is_on_the_device_when_its_store_is_not(copy: bool) -> None:
    """The linked files were never flushed, and one queue has lost all its messages."""
    files = BusyFiles()
    clock = ManualClock(START_MS)
    with MessageStore.open(ROOT, SMALL, files=files, clock=clock) as store:
        store.append(Message("Old", b"body"), 7)
        fill(store, clock, random.Random(1), 100)
        store.flush()
        retention = Retention(retained(store, SMALL))
        retention.delete_before(2 * SMALL.commitlog_file_size)
        files.make_folder(f"{ROOT}/config/more")
        files.write(f"{ROOT}/config/more/topics.json", b"{}")
        fill(store, clock, random.Random(2), 100)
        assert (store.snapshot(TARGET, copy=copy).linked_files > 3) is not copy
        expected = [bytes(message.raw) for message in store]
        images = CrashImages(files.trace)
        for seed in range(examples(40)):
            found = images.image(seed, len(files.trace)).files()
            assert found.read(f"{TARGET}/config/more/topics.json") == b"{}"
            with open_target(found, SMALL) as copied:
                assert copied.recovered == []
                assert [bytes(message.raw) for message in copied] == expected
                assert copied.queues["Old", 7].max_offset == 1
                assert copied.verify().sound


def sound(files: Files) -> dict[int, bytes]:
    """Return all sound records, in the log or kept aside."""
    return {
        item.physical_offset: bytes(item.raw)
        for item in salvage.salvaged_records(ROOT, files)
        if isinstance(item, StoredMessage)
    }


@pytest.mark.slow
def test_cut_records_are_in_the_log_or_kept_aside() -> None:
    found = damaged(filled(SMALL))
    images = crashes(found, lambda files: opened(files, SMALL, thorough=True).close())
    expected = sound(images[0].files()) | sound(images[-1].files())
    assert salvage.kept_cuts(ROOT, images[-1].files())
    assert len(expected) > 50
    for image in images:
        files = image.files()
        assert sound(files) == expected, image
        opened(files, SMALL, thorough=True).close()
        assert sound(files) == expected, image
        assert verify(ROOT, SMALL, files).sound, image


def test_cut_bytes_are_flushed_before_the_cut() -> None:
    files = BusyFiles()
    clock = ManualClock(START_MS)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock)
    fill(store, clock, random.Random(1), 100)
    damage = files.open(f"{ROOT}/commitlog/00000000000000004096", writable=True).buffer
    damage[1500:1540] = b"\xff" * 40
    expected = sound(files)
    assert len(expected) > 60
    files = files.killed()
    opened(files, SMALL, thorough=True)
    images = CrashImages(files.trace)
    for seed in range(examples(40)):
        assert sound(images.image(seed, len(files.trace)).files()) == expected
