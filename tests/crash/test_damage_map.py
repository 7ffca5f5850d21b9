"""No reader passes damage in silence where a check can see it: each gives what the whole store gives, or says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, ManualRunner, Message, MessageStore, StoreConfig
from librmq.config import ENTRY_SIZE
from librmq.consumequeue_entries import ENTRY
from librmq.files._memory import MemoryFiles
from librmq.message.record import BODY_AT, PHYSICAL_OFFSET_AT, QUEUE_ID_AT, QUEUE_OFFSET_AT
from librmq.message.topics import SystemTopic
from librmq.store.format.timerfiles import TimerLog, unit_dtype
from tests.budget import examples, many
from tests.conftest import SlowBudget
from tests.crash.damage_map import Damage, Look, draw, look, places, silent, store
from tests.stores import ROOT, START_MS, Contents, contents, in_memory, opened

WITHOUT_CHECK = {
    "log: born_host", "log: born_timestamp", "log: flag", "log: prepared_offset", "log: properties",
    "log: reconsume_times", "log: store_host", "log: store_timestamp", "log: sys_flag",
    "queue: tags_code", "index: slots and entries", "config/consumerOffset.json", "config/subscriptionGroup.json",
    "config/topics.json", "config/delayOffset.json", "timercheck: read time",
}  # fmt: skip
"""Places of which RocketMQ's formats keep nothing to compare with: docs/guarantees.md has their kinds."""


@cache
def whole(closed: bool, folder: Path) -> Look:
    seen = look(*store(closed=closed), folder)
    assert not seen.is_refused
    assert seen.verdict is not None
    assert all(reader.answer for reader in seen.seen.values())
    return seen


def drawn(closed: bool, seed: object) -> Damage:
    return draw(store(closed=closed)[0], random.Random(f"damage {seed} {closed}"))


def check(closed: bool, damage: Damage, folder: Path) -> None:
    """Damage a store, ask all readers, and compare."""
    found, now_ms = store(closed=closed)
    changed = places(found, damage)
    if not changed:
        return
    before, after = whole(closed, folder), look({**found, damage.path: damage.data}, now_ms, folder)
    where = f"{damage.kind} at {damage.begin} of {damage.path}: {', '.join(sorted(changed))}"
    foreign = {name: seen.said for name, seen in after.seen.items() if seen.is_foreign}
    excused = bool(changed & WITHOUT_CHECK)
    assert not foreign or excused, (where, foreign)
    passed = silent(before, after, closed=closed)
    assert not passed or excused, (where, passed)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_damage_is_not_passed_in_silence(closed: bool, tmp_path: Path) -> None:
    for seed in range(examples(24)):  # the rounds below draw others
        check(closed, drawn(closed, seed), tmp_path)


def changed_at(found: Contents, path: str, kind: str, *changes: tuple[int, bytes]) -> Damage:
    """Return a damage that puts some bytes into a file."""
    data = bytearray(found[path] or b"")
    for at, new in changes:
        data[at : at + len(new)] = new
    return Damage(path, kind, changes[0][0], bytes(data))


def queue_file(topic: str, queue_id: int = 0) -> str:
    return f"consumequeue/{topic}/{queue_id}/{0:020}"


def entries(found: Contents, path: str) -> list[bytes]:
    data = found[path] or b""
    return [data[at : at + ENTRY_SIZE] for at in range(0, len(data), ENTRY_SIZE) if any(data[at : at + ENTRY_SIZE])]


def swapped(found: Contents) -> Iterator[Damage]:
    """Let two entries of a queue lead to each other's record."""
    for path in map(queue_file, ("rmq_sys_wheel_timer", "later")):
        one, two = (entry[:12] for entry in entries(found, path)[:2])
        yield changed_at(found, path, "swap", (0, two), (ENTRY_SIZE, one))


def elsewhere(found: Contents) -> Iterator[Damage]:
    """Let the entry of the group's first unread message lead to the log's first record, or to that of another queue."""
    at, others = 10 * ENTRY_SIZE, entries(found, queue_file("T", 0))
    yield changed_at(found, queue_file("T", 1), "zeros", (at + 4, bytes(4)))
    yield changed_at(found, queue_file("T", 1), "swap", (at, others[10][:12]))


def renamed(found: Contents) -> Iterator[Damage]:
    """Let the first or last record of a queue name another queue: no later record, or no earlier one, shows a gap."""
    queue = entries(found, queue_file("rmq_sys_wheel_timer"))
    for entry in queue[0], queue[-1]:
        path, at, topic_at = record_of(found, entry, b"rmq_sys_wheel")
        yield changed_at(found, path, "bit", (topic_at + 8, b"v"))
        yield changed_at(found, path, "bit", (at + QUEUE_ID_AT + 1, b"\x40"))


def misnamed(found: Contents) -> Iterator[Damage]:
    """Let the record with key k7 name another topic, queue, queue offset or place: the index leads to it."""
    path, at, topic_at = record_of(found, entries(found, queue_file("T", 1))[3], b"T\0")
    yield changed_at(found, path, "bit", (topic_at, b"V"))
    for field in QUEUE_ID_AT, QUEUE_OFFSET_AT, PHYSICAL_OFFSET_AT:
        yield changed_at(found, path, "bit", (at + field + 3, b"\x40"))


def record_of(found: Contents, entry: bytes, topic: bytes) -> tuple[str, int, int]:
    """Return file and position of an entry's record, and the position of its topic, which ends so."""
    place, size, _ = ENTRY.unpack(entry)
    file_size = len(found[f"commitlog/{0:020}"] or b"")
    path, at = f"commitlog/{place - place % file_size:020}", place % file_size
    return path, at, (found[path] or b"").index(topic, at, at + size)


def forgotten(found: Contents) -> Iterator[Damage]:
    """Let the timer's checkpoint know no progress, only the time."""
    yield changed_at(found, "config/timercheck", "zeros", (8, bytes(48)))


def passed(found: Contents) -> Iterator[Damage]:
    """Let the units of timers that are rolled later be in slots that have passed."""
    path = f"timerlog/{0:020}"
    fields: Any = unit_dtype().fields
    unit_at = 5 * TimerLog.UNIT_SIZE
    yield changed_at(found, path, "bit", (unit_at + fields["write_time_ms"][1] + 4, b"\xcb"))
    for delay_ms in 0, 60_000, 120_000:
        yield changed_at(found, path, "zeros", (unit_at + fields["delay_ms"][1], delay_ms.to_bytes(4)))


def unchained(found: Contents) -> Iterator[Damage]:
    """Let a unit of the timer's log point far before the log's begin; the slots of some have one before them."""
    path = f"timerlog/{0:020}"
    fields: Any = unit_dtype().fields
    for number in range(2, 6):
        yield changed_at(
            found, path, "bit", (number * TimerLog.UNIT_SIZE + fields["previous"][1], b"\x80" + 7 * b"\xff")
        )


def restarted(found: Contents) -> Iterator[Damage]:
    """Let a record in the middle of a queue, or its last one, say that it is the first."""
    for topic in "T", "later", "rmq_sys_wheel_timer":
        queue = entries(found, queue_file(topic))
        for entry in queue[2], queue[-1]:
            path, at, _ = record_of(found, entry, topic.encode())
            yield changed_at(found, path, "zeros", (at + QUEUE_OFFSET_AT, bytes(8)))


def moved(found: Contents) -> Iterator[Damage]:
    """Let a record be a sound one of a queue that is not there: its own lacks it, and has an entry of it."""
    for topic, queue_id in (SystemTopic.SCHEDULE, 2), ("T", 1):
        queue = entries(found, queue_file(topic, queue_id))
        for entry, queue_offset in (queue[0], 5), (queue[2], 0), (queue[-1], 0), (queue[-1], 5):
            path, at, _ = record_of(found, entry, topic.encode())
            changes = (at + QUEUE_ID_AT, (7).to_bytes(4)), (at + QUEUE_OFFSET_AT, queue_offset.to_bytes(8))
            yield changed_at(found, path, "swap", *changes)


def displaced(found: Contents) -> Iterator[Damage]:
    """Let a document have another value, and its checksum another name."""
    for name, before in ("cancelled", b'"later",'), ("resent", b"[["):
        path = f"librmq/{name}.json"
        data = found[path] or b""
        changes = (data.index(before) + len(before), b"9"), (data.index(b'crc32"'), b'crc"  ')
        yield changed_at(found, path, "swap", *changes)


def emptied(found: Contents) -> Iterator[Damage]:
    """Let a document of librmq's own be empty."""
    for path in found:
        if path.startswith("librmq/") and path.endswith(".json"):
            yield Damage(path, "cut", 0, b"")


def far(found: Contents) -> Iterator[Damage]:
    """Let the checkpoint say a time beyond the calendar."""
    yield changed_at(found, "checkpoint", "bit", *((at, b"\x01") for at in (1, 9)))


def ended(found: Contents) -> Iterator[Damage]:
    """Let an op message name no half."""
    for entry in entries(found, queue_file("RMQ_SYS_TRANS_OP_HALF_TOPIC")):
        path, at, _ = record_of(found, entry, b"RMQ_SYS_TRANS_OP")
        yield changed_at(found, path, "bit", (at + BODY_AT, b";"))


@many
@pytest.mark.parametrize("closed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["closed", "killed"])
@pytest.mark.parametrize(
    "damages",
    [
        swapped,
        elsewhere,
        renamed,
        misnamed,
        forgotten,
        passed,
        unchained,
        restarted,
        moved,
        displaced,
        emptied,
        far,
        ended,
    ],
)
def test_known_damages_are_not_passed_in_silence(
    closed: bool, damages: Callable[[Contents], Iterator[Damage]], tmp_path: Path
) -> None:
    for damage in damages(store(closed=closed)[0]):
        check(closed, damage, tmp_path)


def shortened(*, closed: bool) -> tuple[Contents, int]:
    """Return the files of a store whose first log file was deleted, and the time of its end."""
    files, runner, config = (
        MemoryFiles(),
        ManualRunner(ManualClock(START_MS)),
        StoreConfig.tiny(commitlog_file_size=4096),
    )
    with Broker.open(ROOT, runner=runner, files=files, store_config=config) as broker:
        broker.create_topic("T", 2)
    with MessageStore.open(ROOT, files=files, clock=runner.clock) as store:
        for number in range(40):
            store.append(Message("T", b"body %d" % number + bytes(100), keys="k7"), number % 2)
            runner.advance(1000)
        store.flush()
        store.writer.retention.delete_before(4096)
        if not closed:
            return contents(files), runner.now_ms()
    return contents(files), runner.now_ms()


@many
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_an_entry_that_leads_below_the_log_is_not_taken_for_a_deleted_one(closed: bool, tmp_path: Path) -> None:
    """The entries of deleted messages before it lead behind that place."""
    (found, now_ms), path = shortened(closed=closed), queue_file("T")
    before = look(found, now_ms, tmp_path)
    with opened(in_memory(found), None, read_only=True) as view:
        times = {message.queue_offset: message.store_timestamp_ms for message in view.messages("T", 0)}
    first, places = min(times), [ENTRY.unpack(entry)[0] for entry in entries(found, path)]
    for number in first, first + 1:
        place = places[number] - 4096
        assert 0 <= place < places[first - 1]
        damage = changed_at(found, path, "bit", (number * ENTRY_SIZE, place.to_bytes(8)))
        after = look({**found, path: damage.data}, now_ms, tmp_path)
        assert not silent(before, after, closed=closed)
        assert after.seen["push"].answer == before.seen["push"].answer
        with opened(in_memory({**found, path: damage.data}), None, read_only=True) as view:
            for queue_offset, time_ms in times.items():
                assert view.first_offset_from("T", 0, time_ms) <= queue_offset or view.condition.damage


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
def test_no_damage_of_the_whole_map_is_passed_in_silence(closed: bool, tmp_path: Path, slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(6_000, "damaged stores as all readers see them"):
        check(closed, drawn(closed, f"of the map {number}"), tmp_path)
