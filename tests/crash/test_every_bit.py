"""Any flipped bit of the log and queues of a small store: each reader gives all as sent, or says that it does not."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest

from librmq import ManualRunner, Message, MessageStore, PushConsumer, StoreConfig
from librmq.broker import Broker
from librmq.cli import main
from librmq.clock import ManualClock
from librmq.columns import reader
from librmq.config import ENTRY_SIZE
from librmq.errors import RmqError
from librmq.protocol import ConsumeFrom
from tests.budget import examples
from tests.conftest import SlowBudget
from tests.stores import START_MS

QUEUES, EACH = 2, 12
SENT = {(queue_id, b"%d of %d" % (number, queue_id)) for queue_id in range(QUEUES) for number in range(EACH)}
LAST = {(QUEUES - 1, b"%d of %d" % (EACH - 1, QUEUES - 1))}
OF_A_COPY = re.compile("retention was recorded for another folder|nothing was cut")
"""What the warnings of an undamaged copy say."""
Bodies = set[tuple[int, bytes]]


def make(folder: Path, *, is_closed: bool, deletes: int = 0) -> Path:
    """Make a store of which retention has deleted the log's first bytes."""
    config = StoreConfig.tiny(commitlog_file_size=1024) if deletes else StoreConfig.tiny()
    with Broker.open(folder, store_config=config, runner=ManualRunner(ManualClock(START_MS))) as broker:
        broker.create_topic("T", QUEUES)
    clock = ManualClock(START_MS)
    store = MessageStore.open(folder, clock=clock)
    for number in range(EACH):
        for queue_id in range(QUEUES):
            store.append(Message("T", b"%d of %d" % (number, queue_id), tags="t", keys=f"k{number}"), queue_id)
        clock.advance(seconds=1)
    store.flush()
    if deletes:
        store._handle.retention.delete_before(deletes)  # type: ignore[attr-defined]  # noqa: SLF001
    store.close() if is_closed else store.abandon()
    return folder


def places(folder: Path) -> list[tuple[str, int]]:
    """Return the file and the bit of each bit that log and queues use."""
    files = [*folder.glob("commitlog/*"), *folder.glob("consumequeue/T/*/*")]
    return [
        (str(path.relative_to(folder)), bit)
        for path in sorted(files)
        for bit in range(8 * len(path.read_bytes().rstrip(b"\0")))
    ]


def by_store(folder: Path) -> tuple[Bodies, bool]:
    """Return what `MessageStore.messages` gives, and whether the store says that something is wrong."""
    found: Bodies = set()
    try:
        with MessageStore.open(folder, read_only=True) as store:
            for queue_id in range(QUEUES):
                found |= {(queue_id, message.body) for message in store.messages("T", queue_id)}
            return found, bool(store.condition.damage)
    except RmqError:
        return found, True


def by_time(folder: Path) -> tuple[Bodies, bool]:
    """Return the messages that come from where a search for their time leads, and whether the store says something."""
    found: Bodies = set()
    try:
        with MessageStore.open(folder, read_only=True) as store:
            for queue_id, body in SENT:
                stored_ms = START_MS + 1000 * int(body.split()[0])
                begin = store.first_offset_from("T", queue_id, stored_ms)
                if body in (message.body for message in store.messages("T", queue_id, begin)):
                    found.add((queue_id, body))
            return found, bool(store.condition.damage)
    except RmqError:
        return found, True


def by_consumer(folder: Path, caplog: pytest.LogCaptureFixture) -> tuple[Bodies, bool]:
    found: Bodies = set()
    runner = ManualRunner(ManualClock(START_MS))
    caplog.clear()
    try:
        with Broker.open(folder, runner=runner) as broker:
            consumer = PushConsumer(broker, "g", consume_from=ConsumeFrom.FIRST)
            consumer.subscribe("T")(lambda message: found.add((message.queue.queue_id, message.body)))
            with consumer:
                runner.advance(90_000)
            return found, any(not OF_A_COPY.search(record.getMessage()) for record in caplog.records)
    except RmqError:
        return found, True


def by_columns(folder: Path) -> tuple[Bodies, bool]:
    found: Bodies = set()
    try:
        for batch in reader(str(folder), topic=re.compile("T"), columns=["queueId", "body"]):
            found.update(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
    except RmqError:
        return found, True
    return found, False


def by_command(folder: Path, *words: str, queue: str, body: str) -> tuple[Bodies, bool]:
    """Return what a command writes as JSON lines, in the named fields, and whether it fails or lacks a body."""
    out = folder.parent / "out.jsonl"
    out.unlink(missing_ok=True)
    status = main([words[0], str(folder), "--topic", "T", *words[1:], "-o", str(out)])
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()] if out.exists() else []
    bodies = {(row[queue], row[body].encode()) for row in rows if row[body] is not None}
    return bodies, status != 0 or any(row[body] is None for row in rows)


def answers(folder: Path, caplog: pytest.LogCaptureFixture) -> dict[str, tuple[Bodies, bool]]:
    """Return what each reader gives of a store, and whether it says that something is wrong. The consumer comes last,
    because it writes."""
    return {
        "messages": by_store(folder),
        "times": by_time(folder),
        "columns": by_columns(folder),
        "show": by_command(folder, "show", "--limit", "100", queue="queue_id", body="body"),
        "export": by_command(folder, "export", queue="queueId", body="body"),
        "consumer": by_consumer(folder, caplog),
    }


def check(sound: Path, folder: Path, file: str, bit: int, caplog: pytest.LogCaptureFixture) -> None:
    """Damage a copy, and ask all readers. After a kill the last record can be one whose writing the kill cut short, as
    far as a reader can know."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    with (folder / file).open("r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))
    for name, (found, says_so) in answers(folder, caplog).items():
        missing = SENT ^ found
        is_cut_short = missing == LAST and sound.name == "killed"
        if name == "times" and file.startswith("commitlog"):
            continue  # the format keeps no checksum of a record's time
        assert not missing or says_so or is_cut_short, (name, file, bit, sorted(missing))


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_no_reader_is_silent_about_a_flipped_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str) -> None:
    sound = make(tmp_path / end, is_closed=end == "closed")
    shutil.copytree(sound, tmp_path / "store")
    for name, answer in answers(tmp_path / "store", caplog).items():
        assert answer == (SENT, False), name
    for place in random.Random(f"a bit, {end}").sample(places(sound), examples(50)):
        check(sound, tmp_path / "store", *place, caplog)


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_an_entry_that_leads_below_the_log_is_not_taken_for_a_deleted_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """The entries of deleted messages before it lead behind that place."""
    sound = make(tmp_path / end, is_closed=end == "closed", deletes=1024)
    shutil.copytree(sound, tmp_path / "store")
    kept, _ = by_store(tmp_path / "store")
    for path in sorted(sound.glob("consumequeue/T/*/*")):
        data = path.read_bytes()
        places = [int.from_bytes(data[at : at + 8]) for at in range(0, len(data.rstrip(b"\0")), ENTRY_SIZE)]
        number = next(number for number, place in enumerate(places) if place >= 1024)
        assert 0 <= places[number] - 1024 < places[number - 1]
        for damaged in number, number + 1:
            shutil.rmtree(tmp_path / "store")
            shutil.copytree(sound, tmp_path / "store")
            changed = bytearray(data)
            changed[damaged * ENTRY_SIZE : damaged * ENTRY_SIZE + 8] = (places[damaged] - 1024).to_bytes(8)
            (tmp_path / "store" / path.relative_to(sound)).write_bytes(changed)
            for name, (found, says_so) in answers(tmp_path / "store", caplog).items():
                assert found == kept or (says_so and name != "consumer"), (name, damaged, sorted(kept ^ found))


@pytest.mark.slow
def test_no_reader_is_silent_about_any_flipped_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, slow_budget: SlowBudget
) -> None:
    stores = [make(tmp_path / end, is_closed=end == "closed") for end in ("closed", "killed")]
    cases = [(store, place) for store in stores for place in places(store)]
    random.Random("all bits").shuffle(cases)
    for number in slow_budget.rounds(len(cases), "flipped bits", of_list=True):
        store, place = cases[number]
        check(store, tmp_path / "store", *place, caplog)
