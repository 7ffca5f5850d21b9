"""The possible contents of a disk after a power failure, and a store on each of them."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from librmq import Broker, BrokerConfig, ManualClock, ManualRunner, Message, MessageStore, Producer, StoreConfig
from tests.budget import examples, many, some
from tests.conftest import SlowBudget
from tests.crash.runs import Run, check_images, check_lives
from tests.file_seams import PAGE, SECTOR, CrashImages, Event, Image, RecordingFiles, on_a_disk
from tests.stores import ROOT, START_MS, opened

pytestmark = pytest.mark.usefixtures("mark_each_flush")

LIVES = tuple(examples(count) for count in (40, 35, 25))
"""Check images of each life of a store; a life starts from a crash of the one before."""


@many
@pytest.mark.parametrize("number", some(range(10)))
def test_a_store_survives_any_crash(number: int) -> None:
    assert check_lives(f"quick {number}", LIVES) == sum(LIVES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["slow 168"])
def test_a_store_survives_crashes_that_once_broke_it(seed: str) -> None:
    assert check_lives(seed, LIVES) == sum(LIVES)


@pytest.mark.slow
def test_a_store_survives_very_many_crashes(slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(1000, "hundreds of images of crashes", at_least=2):
        check_lives(f"slow {number}", LIVES)


@pytest.mark.parametrize("number", range(3))
def test_producers_in_parallel(number: int) -> None:
    """Separate threads append; their order differs from run to run."""
    run = Run(f"threads {number}")
    for what in (Run.append, Run.threads, Run.flush, Run.threads, Run.pass_time):
        run.step(what)
    run.recorded.trace = list(run.files.trace)
    check_images(run.recorded, f"threads {number}", examples(30))


FILE = StoreConfig.tiny(max_total_size=1 << 20)


@pytest.mark.parametrize("number", range(4))
def test_a_power_cut_takes_less_than_half_a_second(number: int, figure: Callable[[str], None]) -> None:
    """At any crash, all sends that were acknowledged more than 0.5 s before it are there, however few wait."""
    rng, clock, files = random.Random(number), ManualClock(START_MS), RecordingFiles()
    runner = ManualRunner(clock)
    broker = Broker.open(ROOT, BrokerConfig(), runner=runner, files=files, store_config=FILE)
    sent: list[tuple[int, str]] = []
    moments: list[tuple[int, int, int]] = []
    with Producer(broker, group="shop") as producer:
        for _ in range(examples(60)):
            for _ in range(rng.choice([0, 1, 1, 3])):
                sent.append((clock.now_ms(), producer.send("orders", bytes(rng.choice([10, 3000]))).message_id))
            moments.append((len(files.trace), clock.now_ms(), len(sent)))
            runner.advance(rng.choice([1, 100, 250, 400, 2000]))
            moments.append((len(files.trace), clock.now_ms(), len(sent)))
    images = CrashImages(files.trace)
    lost: list[int] = []
    for at, now_ms, count in moments[2:]:
        with opened(images.image(f"{number}/{at}", at).files(), None) as store:
            there = {message.unique_key for message in store}
        ages = [now_ms - at_ms for at_ms, message_id in sent[:count] if message_id not in there]
        assert max(ages, default=0) <= 500
        lost += ages
    figure(f"{len(moments) - 2} simulated power cuts: {len(lost)} messages lost, {max(lost, default=0)} ms old at most")


def test_a_broker_directory_keeps_its_intervals(tmp_path: Path) -> None:
    """4.9 lets less than 16 KiB wait ten seconds; a store that librmq made says in its own file that it did."""
    with MessageStore.open(tmp_path, StoreConfig.tiny(), background=False) as store:
        store.append(Message("orders", b"one"))
        assert store.config.flush_thorough_interval_s == 0.5
    with MessageStore.open(tmp_path, background=False) as store:
        assert store.config.flush_thorough_interval_s == 0.5
    (tmp_path / "librmq" / "config.json").unlink()
    with MessageStore.open(tmp_path, StoreConfig(durability="async"), background=False) as store:
        assert store.config.flush_thorough_interval_s == 10
    with MessageStore.open(tmp_path, background=False) as store:
        assert store.config.flush_thorough_interval_s == 10
    with MessageStore.open(tmp_path, StoreConfig(flush_thorough_interval_s=1), background=False) as store:
        assert store.config.flush_thorough_interval_s == 1


# ----------------------------------------------------------------------------------------------------- the images


def images_of(files: RecordingFiles, crash_point: int | None = None, count: int = 200) -> list[Image]:
    images = CrashImages(files.trace)
    return [images.image(seed, len(files.trace) if crash_point is None else crash_point) for seed in range(count)]


def test_flushed_data_is_there() -> None:
    files = on_a_disk("/a")
    file = files.create("/a/f", 3 * PAGE)
    file.buffer[10:20] = b"0123456789"
    files.flush(file)
    files.flush_folder("/a")
    expected = bytes(10) + b"0123456789" + bytes(3 * PAGE - 20)
    for image in images_of(files):
        assert image.contents == {"/a": None, "/a/f": expected}
        assert image.choices == ()
        assert image.files().read("/a/f") == expected


def test_sectors_that_were_not_flushed_are_there_or_not() -> None:
    files = on_a_disk("/a")
    file = files.create("/a/f", 3 * SECTOR)
    files.flush(file)
    files.flush_folder("/a")
    for byte in b"xy":
        file.buffer[: 3 * SECTOR] = bytes([byte]) * 3 * SECTOR
    found = set()
    for image in images_of(files, count=2000):
        data = image.contents["/a/f"]
        assert data is not None
        assert len(data) == 3 * SECTOR
        parts = [data[at : at + SECTOR] for at in range(0, len(data), SECTOR)]
        if all(len(set(part)) == 1 for part in parts):  # no sector is torn
            found.add("".join("0xy"[b"\0xy".index(part[0])] for part in parts))
        else:  # the crash may have interrupted the last write, word by word
            (torn,) = (part for part in parts if len(set(part)) > 1)
            assert torn[0] == ord("y")
            assert torn.count(b"y") % 8 == 0
    assert found == {"".join(three) for three in itertools.product("0xy", repeat=3)}


def test_pages_are_there_or_not_or_torn() -> None:
    files = on_a_disk("/a")
    file = files.create("/a/f", 2 * PAGE)
    files.flush(file)
    files.flush_folder("/a")
    file.buffer[: 2 * PAGE] = b"x" * 2 * PAGE
    file.buffer[0:0] = b""
    wholes = {image.contents["/a/f"] for image in images_of(files, count=500)}
    assert {bytes(2 * PAGE), bytes(PAGE) + b"x" * PAGE, b"x" * PAGE + bytes(PAGE), b"x" * 2 * PAGE} <= wholes
    assert any(
        data and data[:SECTOR] == b"x" * SECTOR and data[SECTOR : 2 * SECTOR] == bytes(SECTOR) for data in wholes
    )


def test_length_and_name_are_flushed_apart() -> None:
    def found(*flushes: str) -> set[bytes | str | None]:
        files = on_a_disk("/a")
        file = files.create("/a/f", 8)
        file.buffer[:8] = b"12345678"
        for flush in flushes:
            if flush == "file":
                files.flush(file)
            else:
                files.flush_folder(flush)
        return {image.contents.get("/a/f", "gone") for image in images_of(files)}

    assert found() == {"gone", b"", bytes(8), b"12345678"}
    assert found("file") == {"gone", b"12345678"}
    assert found("/a") == {b"", bytes(8), b"12345678"}
    assert found("/") == found()
    assert found("file", "/a") == {b"12345678"}


def test_files_of_an_unnamed_folder_are_lost() -> None:
    files = on_a_disk("/a")
    files.make_folder("/a/b/c")
    file = files.create("/a/b/c/f", 8)
    files.flush(file)
    files.flush_folder("/a/b/c")
    files.flush_folder("/a")
    assert {tuple(image.contents) for image in images_of(files)} == {
        ("/a", "/a/b"),
        ("/a", "/a/b", "/a/b/c", "/a/b/c/f"),
    }
    files.flush_folder("/a/b")
    assert {tuple(image.contents) for image in images_of(files)} == {("/a", "/a/b", "/a/b/c", "/a/b/c/f")}


def test_names_go_and_come_in_any_order_but_their_own() -> None:
    files = on_a_disk("/a")
    for name in "fg":
        files.write(f"/a/{name}", b"old")
    files.delete("/a/f")
    files.delete("/a/g")
    files.create("/a/g", 1)
    found = {tuple(sorted(os.path.basename(path) for path in image.contents)) for image in images_of(files)}
    assert found == {("a", "f", "g"), ("a", "g"), ("a", "f"), ("a",)}
    assert {image.contents.get("/a/g") for image in images_of(files)} == {b"old", None, b"", bytes(1)}


def test_a_rename_is_done_or_not() -> None:
    files = on_a_disk("/a")
    files.write("/a/f", b"old")
    files.rename("/a/f", "/a/g")
    found = {tuple(image.contents) for image in images_of(files)}
    assert found == {("/a", "/a/f"), ("/a", "/a/g")}
    files.flush_folder("/a")
    assert {tuple(image.contents) for image in images_of(files)} == {("/a", "/a/g")}


def test_a_file_that_is_replaced_is_the_old_or_the_new_one() -> None:
    files = on_a_disk("/a")
    files.write("/a/f", b"old")
    files.write("/a/f", b"new!")
    found = {
        (image.contents["/a/f"], image.contents.get("/a/f.tmp")) for image in images_of(files, len(files.trace) - 1)
    }
    assert found == {(b"old", None), (b"new!", None), *((b"old", b"new!"[:size]) for size in range(5))}
    assert {image.contents["/a/f"] for image in images_of(files)} == {b"new!"}


def test_two_names_of_one_file_have_the_same_bytes() -> None:
    files = on_a_disk("/a")
    file = files.create("/a/f", 2 * SECTOR)
    files.link("/a/f", "/a/g")
    file.buffer[:] = b"x" * 2 * SECTOR
    files.flush_folder("/a")
    assert all(image.contents["/a/f"] == image.contents["/a/g"] for image in images_of(files))
    assert len({image.contents["/a/f"] for image in images_of(files)}) > 2


def test_seed_and_crash_point_reproduce_an_image() -> None:
    files = on_a_disk("/a")
    for name in "fgh":
        files.create(f"/a/{name}", PAGE).buffer[:] = b"x" * PAGE
    images = CrashImages(files.trace, {"/b": None, "/b/z": b"there before"})
    assert len(images) == len(files.trace) + 1
    found = list(images.images("seed", 50))
    assert {image.crash_point for image in found} == set(range(len(images)))
    assert all(image.contents["/b/z"] == b"there before" for image in found)
    for image in reversed(found):
        again = images.image(image.seed, image.crash_point)
        assert again == image
        assert str(again) == str(image)
        assert f"{image.seed!r} at crash point {image.crash_point}" in str(image)
    with pytest.raises(IndexError, match="crash_point"):
        images.image("seed", len(images))


def test_a_rename_to_another_folder_is_not_known() -> None:
    with pytest.raises(ValueError, match="from folder to folder"):
        CrashImages([Event("replace", "/f"), Event("make_folder", "/a"), Event("rename", "/f", 0, b"/a/f")]).image(1, 3)
