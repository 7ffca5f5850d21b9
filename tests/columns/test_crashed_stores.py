"""Stores that were not closed are read as recovery would leave them, and nothing is changed."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from librmq import CorruptionError, ManualClock, Message, MessageStore, StoreConfig
from librmq.files.interface import Files
from tests.budget import examples, many, some
from tests.crash.runs import record
from tests.file_seams import CrashImages
from tests.stores import ROOT, START_MS, contents, from_disk, in_memory, on_disk

pytest.importorskip("pyarrow")

from librmq.columns import ReaderKeywords, export, reader
from librmq.columns.options import Mode, View

CONFIG = StoreConfig.tiny(commitlog_file_size=4096, max_message_size=3000)
VIEWS: list[View] = ["messages", "queues", "log"]
COLUMNS = ("physicalOffset", "topic", "queueId", "queueOffset", "tags", "body")


def rows(store: Path | str, files: Files | None = None) -> list[list[dict[str, Any]]]:
    """Return the messages of all topics, and the records of the log."""
    settings = ReaderKeywords(columns=COLUMNS, files=files, as_recovered=True)
    every = reader(store, **settings | ReaderKeywords(topic=re.compile("(?s).*")))
    return [each.read_all().to_pylist() for each in (every, reader(store, **settings | ReaderKeywords(view="log")))]


def check(crashed: Path, config: StoreConfig) -> None:
    """Check that a store is read as recovery leaves a copy of it, also in memory, and that reading changes no byte."""
    recovered = shutil.copytree(crashed, crashed.with_name("recovered"))
    before = from_disk(crashed)
    found = rows(crashed)
    assert from_disk(crashed) == before
    memory = in_memory(before)
    assert rows(ROOT, memory) == found
    assert contents(memory) == {path: data for path, data in before.items() if path != "lock"}
    MessageStore.open(recovered, config, clock=ManualClock(START_MS + 86_400_000), background=False).close()
    assert found == rows(recovered)


@many
@pytest.mark.parametrize("number", some(range(8)))
def test_images_of_power_failures_are_read_as_recovered(tmp_path: Path, number: int) -> None:
    recorded = record(f"columns {number}")
    images, rng = CrashImages(recorded.trace), random.Random(number)
    for attempt in range(examples(16)):
        image = images.image(f"{number} {attempt}", rng.randrange(len(recorded.trace) + 1))
        contents = {path[len(ROOT) + 1 :]: data for path, data in image.contents.items() if path != ROOT}
        if "commitlog" in contents and not recorded.is_rotten(image.crash_point):
            check(on_disk(contents, tmp_path / f"{attempt}" / "crashed"), recorded.config)


def killed(folder: Path) -> MessageStore:
    """Return a store of a message and a batch whose writer has died."""
    store = MessageStore.open(folder / "crashed", CONFIG, clock=ManualClock(START_MS), background=False)
    store.append(Message("T", b"before", tags="a"))
    store.flush()
    store.append_batch([Message("T", b"%d" % number) for number in range(5)])
    store.flush()
    store.abandon()
    return store


def test_a_queue_file_of_length_zero_is_made_up_for(tmp_path: Path) -> None:
    killed(tmp_path)
    (file,) = (tmp_path / "crashed" / "consumequeue" / "T" / "0").iterdir()
    file.write_bytes(b"")
    bodies = reader(tmp_path / "crashed", columns=["body"]).read_all()["body"].to_pylist()
    assert bodies == [b"before", b"0", b"1", b"2", b"3", b"4"]
    check(tmp_path / "crashed", CONFIG)


def test_a_torn_batch_ends_what_is_read(tmp_path: Path) -> None:
    """The mark of 8 bytes states the size of the batch until all of it is written."""
    store = killed(tmp_path)
    sizes = reader(tmp_path / "crashed", columns=["size"]).read_all()["size"].to_pylist()
    (log,) = (tmp_path / "crashed" / "commitlog").iterdir()
    raw = bytearray(log.read_bytes())
    raw[sizes[0] : sizes[0] + 8] = (store.log.end - sizes[0]).to_bytes(4, "big") + b"undo"
    log.write_bytes(raw)
    assert reader(tmp_path / "crashed", columns=["body"]).read_all()["body"].to_pylist() == [b"before"]
    check(tmp_path / "crashed", CONFIG)


def test_sound_records_after_damage_are_not_left_out_in_silence(tmp_path: Path) -> None:
    """A read fails by default, also after a crash, and for every view."""
    store = killed(tmp_path)
    log = min((tmp_path / "crashed" / "commitlog").iterdir())
    log.write_bytes(log.read_bytes().replace(b"before", b"bef0re"))
    assert (tmp_path / "crashed" / "abort").exists()
    for view in VIEWS:
        with pytest.raises(CorruptionError, match="sound records follow"):
            reader(tmp_path / "crashed", view=view)
        reader(tmp_path / "crashed", view=view, as_recovered=True).read_all()
    assert reader(tmp_path / "crashed", as_recovered=True).read_all().num_rows == 0
    left = reader(tmp_path / "crashed", mode="DROPMALFORMED").read_all()
    assert left["body"].to_pylist() == [b"0", b"1", b"2", b"3", b"4"]
    names = ["body", "_corrupt_record"]
    shown = reader(tmp_path / "crashed", columns=names, mode="PERMISSIVE").read_all()["_corrupt_record"]
    assert (len(shown), shown.null_count) == (6, 5)
    store.close()


@pytest.mark.parametrize("closed", [True, False])
def test_a_moment_before_damage_is_read_as_a_store_shows_it(tmp_path: Path, closed: bool) -> None:
    killed(tmp_path)
    path = tmp_path / "crashed"
    with MessageStore.open(path, read_only=True) as store:
        damaged = list(store)[3]
    place, log = damaged.physical_offset, min((path / "commitlog").iterdir())
    log.write_bytes(log.read_bytes().replace(damaged.raw, bytes(damaged.size)))
    if closed:
        (path / "abort").unlink()
    with pytest.raises(CorruptionError):
        reader(path)
    with MessageStore.open(path, read_only=True, at=place) as past:
        expected = [message.physical_offset for message in past]
    assert len(expected) == 3
    for view in VIEWS:
        assert reader(path, view=view, at=place).read_all()["physicalOffset"].to_pylist() == expected
    for as_recovered, skipped, moment in ((True, True, None), (True, False, place), (False, False, place)):
        made = export(path, tmp_path / f"{as_recovered} {skipped}.jsonl", at=moment, as_recovered=as_recovered)
        assert (made.rows, made.skipped) == (3, skipped)


def test_a_torn_end_is_no_damage_in_any_mode(tmp_path: Path) -> None:
    """What a crash leaves behind the last sound record is cut, and shown as damage by no mode."""
    store = killed(tmp_path)
    (log,) = (tmp_path / "crashed" / "commitlog").iterdir()
    raw = bytearray(log.read_bytes())
    raw[store.log.end - 20 : store.log.end] = bytes(20)
    log.write_bytes(raw)
    every: list[Mode] = ["FAILFAST", "PERMISSIVE", "DROPMALFORMED"]
    for mode in every:
        for view in VIEWS:
            assert reader(tmp_path / "crashed", view=view, mode=mode).read_all().num_rows == 5
