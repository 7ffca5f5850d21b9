"""A reader in this process and a writer in another: the reader sees acknowledged messages and disturbs no writer."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from librmq.cli import main
from librmq.errors import StoreLockedError
from librmq.message.message import StoredMessage
from librmq.store import MessageStore
from librmq.store.engine.read import GetStatus
from librmq.store.recovery._verify import verify
from tests.budget import examples
from tests.crash.writer import CONFIG, message_of
from tests.programs import start_program
from tests.reference import existing

pytestmark = [pytest.mark.platform, pytest.mark.skipif(sys.platform == "win32", reason="needs the locks of POSIX")]


class Writer:
    def __init__(self, path: Path, **settings: Any) -> None:
        self.path = path
        self.process = start_program("import runpy; runpy.run_module('tests.crash.writer', run_name='__main__')")
        self.tell("open", str(path), settings)

    def say(self, *words: Any) -> None:
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        line = self.process.stdout.readline()
        assert line, "the writer has ended"
        return json.loads(line)

    def tell(self, *words: Any) -> Any:
        self.say(*words)
        return self.hear()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def writers() -> Iterator[list[Writer]]:
    started: list[Writer] = []
    yield started
    for writer in started:
        writer.end()


def snapshot_of(path: Path) -> dict[str, tuple[Any, ...]]:
    """Return every name in the store's folder, with content, length and time of change."""
    found: dict[str, tuple[Any, ...]] = {}
    for one in sorted(path.rglob("*")):
        status = one.stat()
        what: tuple[Any, ...] = ("folder",)
        if one.is_file():
            what = (status.st_size, status.st_mtime_ns, status.st_ino, hashlib.sha1(one.read_bytes()).hexdigest())
        found[str(one.relative_to(path))] = what
    return found


def number_of(message: StoredMessage) -> int:
    return int(message.properties["n"])


def check(message: StoredMessage, number: int) -> None:
    expected, _ = message_of(number)
    assert number_of(message) == number
    assert message.body == expected.body
    assert message.crc_ok


def open_reader(path: Path) -> MessageStore:
    return MessageStore.open(path, read_only=True)


def read_all(store: MessageStore, queue_id: int) -> list[StoredMessage]:
    messages: list[StoredMessage] = []
    queue_offset = 0
    while True:
        found = store.read("T", queue_id, queue_offset)
        if not found.messages and found.status is not GetStatus.OFFSET_TOO_SMALL:
            return messages
        messages += found.messages
        queue_offset = found.next_offset


# ---------------------------------------------------------------------------------------------------- visible messages


@pytest.mark.slow
@pytest.mark.parametrize("ext", [False, True], ids=["plain", "ext"])
def test_a_message_is_there_when_its_acknowledgement_is(path: Path, writers: list[Writer], ext: bool) -> None:
    writers.append(writer := Writer(path, enable_consumequeue_ext=ext))
    with open_reader(path) as reader:  # there is no message yet, so the reader does not know the file sizes
        assert reader.read("T", 0, 0).status is GetStatus.NO_MESSAGE_IN_QUEUE
        for number in range(400):
            ((place, size, queue_offset),) = writer.tell("append", number, number + 1)
            match number % 4 if number < 200 else 0:
                case 0:
                    (message,) = reader.read("T", number % 3, queue_offset).messages
                case 1:
                    found = reader.message_at(place)
                    assert found is not None
                    message = found
                case 2:
                    (message,) = reader.find_by_key("T", f"k{number}")
                case _:
                    *_, message = reader
            assert (message.physical_offset, message.size, message.queue_offset) == (place, size, queue_offset)
            check(message, number)
        for number in range(400, 600, 2):
            writer.tell("batch", number, number + 2)
        assert [number_of(message) for message in reader.find_by_key("T", "all", max_messages=1000)] == [*range(600)]
        assert [number_of(message) for message in read_all(reader, 1)][-200:] == [*range(400, 600)]
        assert sum(len(read_all(reader, queue_id)) for queue_id in range(3)) == 600
        writer.tell("close")
        assert [number_of(message) for message in reader] == [*range(600)]


# ------------------------------------------------------------------------------------------------ unchanged files


def test_no_byte_is_changed_and_no_name(path: Path, writers: list[Writer]) -> None:
    writers.append(writer := Writer(path))
    writer.tell("append", 0, 150)
    before = snapshot_of(path)
    with open_reader(path) as reader:
        for _ in range(2):
            assert len(list(reader)) == 150
            assert sum(len(read_all(reader, queue_id)) for queue_id in range(3)) == 150
            assert len(reader.find_by_key("T", "all", max_messages=1000)) == 150
            assert reader.find_by_id("nothing") == []
            reader.queue_offset_at("T", 0, 0)
            reader.refresh()
        with pytest.raises(StoreLockedError, match=str(writer.process.pid)):
            MessageStore.open(path)
        assert snapshot_of(path) == before
        writer.kill()
        before = snapshot_of(path)
        assert reader.refresh()
        assert len(list(reader)) == 150
        assert sum(len(read_all(reader, queue_id)) for queue_id in range(3)) == 150
        with open_reader(path) as other:
            assert len(other.find_by_key("T", "all", max_messages=1000)) == 150
    assert snapshot_of(path) == before


# ------------------------------------------------------------------------------------------------- writers that die


@pytest.mark.slow
def test_a_writer_that_dies_and_another_that_follows(path: Path, writers: list[Writer]) -> None:
    writers.append(Writer(path))
    with open_reader(path) as reader:
        number = 0
        for round_ in range(max(2, examples(4))):
            writer = writers[-1]
            held = [message for queue_id in range(3) for message in read_all(reader, queue_id)]
            raw = [message.raw for message in held]
            writer.tell("append", number, number + 70)
            number += 70
            if round_ % 2:
                writer.tell("close")
                writer.end()
            else:
                writer.kill()
            assert sorted(number_of(one) for queue_id in range(3) for one in read_all(reader, queue_id)) == [
                *range(number)
            ]
            assert [message.raw for message in held] == raw
            assert reader.find_by_key("T", f"k{number - 1}")
            writers.append(Writer(path))
            writers[-1].tell("append", number, number + 5)
            number += 5
            assert reader.find_by_key("T", f"k{number - 1}")[0].properties["n"] == str(number - 1)
    writers[-1].tell("close")
    assert verify(str(path), CONFIG).sound


def test_the_command_shows_the_result_of_a_recovery(capsys: pytest.CaptureFixture[str]) -> None:
    folder = existing("store-crash")
    before = snapshot_of(folder / "store")
    assert main(["queues", str(folder / "store"), "--format", "jsonl"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert snapshot_of(folder / "store") == before
    store = next(
        row for row in map(json.loads, (folder / "expected.jsonl").read_text("utf-8").splitlines())
        if row["type"] == "store"
    )  # fmt: skip
    assert printed == [queue for queue in store["queues"] if queue["max_offset"]]


# -------------------------------------------------------------------------------------------------------- retention


@pytest.mark.slow
def test_a_queue_is_read_while_its_oldest_messages_go(path: Path, writers: list[Writer]) -> None:
    """A reader that requests messages while they are deleted gets them whole, or gets the next offset."""
    writers.append(writer := Writer(path, max_total_size=3 * CONFIG.commitlog_file_size))
    with open_reader(path) as reader:
        positions = [0, 0, 0]
        for number in range(0, 1500, 30):
            writer.say("append", number, number + 30)
            for queue_id in range(3):
                found = reader.read("T", queue_id, positions[queue_id], 4)
                for message in found.messages:
                    check(message, number_of(message))
                    assert message.queue_offset >= positions[queue_id]
                assert found.next_offset >= positions[queue_id] or found.max_offset == 0
                positions[queue_id] = max(found.next_offset, positions[queue_id])
            writer.hear()
            writer.say("flush")
            writer.say("expire")
            list(reader)
            writer.hear()
            writer.hear()
        assert reader.log.begin > 0


# ----------------------------------------------------------------------------------------------------------- stress


@pytest.mark.slow
@pytest.mark.parametrize("ext", [False, True], ids=["plain", "ext"])
def test_polling_during_many_small_appends(path: Path, writers: list[Writer], ext: bool) -> None:
    """At any moment the reader sees messages in order and exact, none twice, none in part."""
    count = 3 * examples(1000)
    writers.append(writer := Writer(path, enable_consumequeue_ext=ext))
    with open_reader(path) as reader:
        writer.say("append", 0, count)
        positions = [0, 0, 0]
        tagged = reader.matching(tags="TagA")
        for seen in range(200_000):
            for queue_id in range(3):
                found = reader.read("T", queue_id, positions[queue_id], matching=tagged if seen % 5 == 4 else None)
                for message in found.messages:
                    check(message, 3 * message.queue_offset + queue_id)
                    assert seen % 5 == 4 or message.queue_offset == positions[queue_id]
                    positions[queue_id] = message.queue_offset + 1
                positions[queue_id] = max(found.next_offset, positions[queue_id])
            if sum(positions) == count:
                break
        assert sum(positions) == count
        assert len(writer.hear()) == count
        for queue_id in range(3):
            numbers = [number_of(message) for message in read_all(reader, queue_id)]
            assert numbers == [*range(queue_id, count, 3)]
        assert [number_of(message) for message in reader] == [*range(count)]


@pytest.mark.slow
def test_keys_are_found_during_many_small_appends(path: Path, writers: list[Writer]) -> None:
    writers.append(writer := Writer(path))
    count = examples(1200)
    with open_reader(path) as reader:
        writer.say("each", 0, count)
        for number in range(count):
            writer.hear()
            (message,) = reader.find_by_key("T", f"k{number}")
            check(message, number)
            older = number * 7 % (number + 1)
            (message,) = reader.find_by_key("T", f"k{older}")
            check(message, older)
        writer.hear()
