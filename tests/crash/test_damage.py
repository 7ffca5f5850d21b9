"""Stores with damage anywhere: what `verify` finds, and what opening and recovery do.

A case damages a sound store: it changes a byte, writes zeros, or shortens, lengthens or deletes a file. In each case
only errors of librmq are raised. `verify` changes nothing and finds all detectable damage. Recovery refuses with file
and offset, or leaves a sound store that serves every record before the damage and continues.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from librmq.config import StoreConfig
from librmq.errors import ConfigError, CorruptionError, NotAStoreError, RecordError, RmqError, StoreError
from librmq.files._memory import MemoryFiles
from librmq.message.delays import DelayLevels
from librmq.message.message import Message, StoredMessage
from librmq.message.properties import split_keys
from librmq.message.record import check_record
from librmq.message.topics import SystemTopic
from librmq.store import MessageStore
from librmq.store.engine.derivation import derived_tags_code, has_queue_entry, is_indexed
from librmq.store.recovery._verify import verify
from tests.budget import examples
from tests.conftest import SlowBudget
from tests.reference import rows, store_folders
from tests.stores import (
    ROOT,
    SMALL,
    SMALL_EXT,
    Contents,
    contents,
    derived,
    filled,
    from_disk,
    in_memory,
    opened,
    served,
)

LEVELS = DelayLevels.parse(SMALL.message_delay_level)


@dataclass(frozen=True)
class Subject:
    """A store that a case damages."""

    config: StoreConfig
    found: Contents
    records: dict[int, StoredMessage]
    """The undamaged records, by physical offset."""
    clean: bool

    @property
    def log_files(self) -> list[str]:
        return sorted(path for path in self.found if path.startswith("commitlog/"))


def subject_of(config: StoreConfig, found: Contents) -> Subject:
    files = in_memory(found)
    with opened(files, config, read_only=True) as store:
        records = {message.physical_offset: message for message in store}
    return Subject(config, found, records, "abort" not in found)


@cache
def subjects() -> list[Subject]:
    """Return a plain store, one with extension, one of a process that died, and one whose log begins above 0."""
    found = [subject_of(SMALL, filled(SMALL, 60, seed=1)), subject_of(SMALL_EXT, filled(SMALL_EXT, 50, seed=2))]
    found.append(subject_of(SMALL, filled(SMALL, 50, seed=3, clean=False)))
    older = filled(SMALL, 80, seed=4)
    del older[min(path for path in older if path.startswith("commitlog/"))]
    found.append(subject_of(SMALL, older))
    return found


# ----------------------------------------------------------------------------------------------- damaging a file


@dataclass(frozen=True)
class Spoilt:
    """The kind of damage, its file and its range."""

    kind: str
    path: str
    begin: int
    end: int
    found: Contents


KINDS = ("flip", "flip", "flip", "zero", "truncate", "delete", "append", "garbage")


def spoil(subject: Subject, rng: random.Random) -> Spoilt:
    """Damage one file at a random place."""
    found = dict(subject.found)
    kind = rng.choice(KINDS)
    part = rng.choice(["commitlog/", "commitlog/", "consumequeue/", "consumequeue_ext/", "index/", "checkpoint"])
    paths = sorted(path for path, data in found.items() if data and path.startswith(part))
    if not paths:
        paths = subject.log_files
    path = rng.choice(paths)
    data = found[path]
    used = len(data.rstrip(b"\0"))
    begin = rng.randrange(max(used, 1)) if rng.random() < 0.9 else rng.randrange(len(data))
    end = len(data)
    if kind == "flip":
        end = begin + 1
        changed = bytes([data[begin] ^ 1 << rng.randrange(8)]) if rng.random() < 0.5 else rng.randbytes(1)
        found[path] = data[:begin] + changed + data[end:]
    elif kind == "zero":
        end = min(len(data), begin + rng.choice([1, 4, 20, 100, 10_000]))
        found[path] = data[:begin] + bytes(end - begin) + data[end:]
    elif kind == "garbage":
        end = min(len(data), begin + rng.choice([2, 8, 40, 500]))
        found[path] = data[:begin] + rng.randbytes(end - begin) + data[end:]
    elif kind == "truncate":
        begin = rng.choice([0, begin])
        found[path] = data[:begin]
    elif kind == "append":
        begin = end
        found[path] = data + rng.choice([b"\0", rng.randbytes(20), bytes(len(data))])
    else:
        begin = 0
        del found[path]
    return Spoilt(kind, path, begin, end, found)


# --------------------------------------------------------------------------------------------- detectable damage


def same_derived(before: StoredMessage, after: StoredMessage) -> bool:
    """Return whether derived data and checks are the same for the two records."""
    if (before.size, before.body_crc, before.stored_body) != (after.size, after.body_crc, after.stored_body):
        return before.stored_body == after.stored_body == b"" and before.size == after.size
    if before.physical_offset != after.physical_offset:
        return False
    if has_queue_entry(before.sys_flag) != has_queue_entry(after.sys_flag):
        return False
    if has_queue_entry(before.sys_flag) and (
        (before.topic, before.queue_id, before.queue_offset) != (after.topic, after.queue_id, after.queue_offset)
        # A delayed message may wait for any number of seconds, because no file names the levels of a broker.
        or (
            before.topic != SystemTopic.SCHEDULE
            and derived_tags_code(before, LEVELS) != derived_tags_code(after, LEVELS)
        )
    ):
        return False

    def keys(message: StoredMessage) -> list[str]:
        if not is_indexed(message.sys_flag):
            return []
        given = message.properties.get("KEYS")
        names = ([message.unique_key] if message.unique_key else []) + split_keys(given)
        return [f"{message.topic}#{key}" for key in names]

    return keys(before) == keys(after)


def can_be_known(subject: Subject, spoilt: Spoilt) -> bool:
    """Return whether `verify` must find the damage."""
    before, after = subject.found[spoilt.path], spoilt.found.get(spoilt.path)
    assert before is not None
    if before == after:
        return False
    part = spoilt.path.split("/")[0]
    if part in ("consumequeue_ext", "checkpoint"):
        # Bitmaps and bytes after the last unit have no check; the checkpoint may have any times before the last record.
        return after is not None and len(after) != len(before)
    if not subject.clean:
        return part == "commitlog" and after is not None and len(after) != len(before)
    if after is None:
        if part == "consumequeue":  # may have held only older entries, or filler
            return min(subject.records, default=0) == 0
        return spoilt.path != subject.log_files[0] if part == "commitlog" else subject.found[spoilt.path] is not None
    if len(after) != len(before):
        return True
    if part == "commitlog":
        return log_damage_known(subject, int(spoilt.path.split("/")[1]), before, after)
    return min(subject.records) == 0  # else there are filler and entries of older records


def log_damage_known(subject: Subject, start: int, before: bytes, after: bytes) -> bool:
    last = max(subject.records)
    log_end = last + subject.records[last].size
    if before[max(0, log_end - start) :] != after[max(0, log_end - start) :] and log_end < start + len(before):
        return True
    for place, record in subject.records.items():
        at = place - start
        if not 0 <= at < len(before) or before[at : at + record.size] == after[at : at + record.size]:
            continue
        try:
            check_record(after, at, len(after), check_body=True)
            damaged = StoredMessage(after[at : at + record.size])
            is_torn = damaged.properties_raw[-1:] == b"\0"  # the record's entry and keys are kept
            if not is_torn and not same_derived(record, damaged):
                return True
        except (RecordError, ValueError):
            return True
    in_file = [
        place - start + record.size for place, record in subject.records.items() if start <= place < start + len(before)
    ]
    blank = max(in_file)
    return log_end > start + len(before) and before[blank + 4 : blank + 8] != after[blank + 4 : blank + 8]


# ------------------------------------------------------------------------------------------------------- one case


def check_case(subject: Subject, spoilt: Spoilt) -> None:
    """One damaged store: verify it, open it, recover it, and continue to use it."""
    files = in_memory(spoilt.found)
    config = subject.config
    before = contents(files)
    try:
        verdict = verify(ROOT, config, files)
    except NotAStoreError:
        raise AssertionError("the folder of the log is still there") from None
    assert contents(files) == before, "verify changed something"
    if can_be_known(subject, spoilt):
        assert verdict.damage or verdict.recoverable, "not found"
    for damage in verdict.damage:
        assert damage.file.startswith(ROOT)
        assert damage.offset >= 0
        assert damage.what
    check_read_only(in_memory(spoilt.found), config)
    check_opened(in_memory(spoilt.found), subject, spoilt)
    check_recovered(in_memory(spoilt.found), subject, spoilt)


def check_read_only(files: MemoryFiles, config: StoreConfig) -> None:
    before = contents(files)
    try:
        with opened(files, config, read_only=True) as store:
            read_everything(store)
    except StoreError as error:
        has_address(error)
    except ConfigError:
        pass
    assert contents(files) == before


def read_everything(store: MessageStore) -> None:
    """Make every kind of query; only errors of librmq may be raised."""
    for topic, queue_id in sorted(store.queues):
        queue = store.queues[topic, queue_id]
        queue_offset = queue.min_offset
        while queue_offset < queue.max_offset:
            try:
                result = store.read(topic, queue_id, queue_offset)
            except CorruptionError as error:
                has_address(error)
                queue_offset += 1
                continue
            assert result.next_offset > queue_offset
            queue_offset = result.next_offset
        try:
            store.queue_offset_at(topic, queue_id, 1_700_000_010_000)
        except CorruptionError as error:
            has_address(error)
        for key in ("key1", "key2", "UNIQ3"):
            try:
                store.find_by_key(topic, key)
            except RmqError as error:
                has_address(error)
    try:
        store.find_by_id("UNIQ7")
    except StoreError as error:
        has_address(error)
    try:
        for _ in store:
            pass
    except CorruptionError as error:
        has_address(error)


def has_address(error: RmqError) -> None:
    assert isinstance(error, CorruptionError), repr(error)
    assert error.file.startswith(ROOT)
    assert error.offset >= 0
    assert error.what


def check_opened(files: MemoryFiles, subject: Subject, spoilt: Spoilt) -> None:
    """Opening does what the last exit requires. If it refuses the store, it leaves it unchanged."""
    before = contents(files)
    try:
        store = opened(files, subject.config)
    except CorruptionError as error:
        has_address(error)
        after = contents(files)
        gone = {path for path in before if path not in after}
        assert all(before[path] == b"" for path in gone)  # left behind by a kill
        assert {path for path in after if after[path] != before.get(path)} == set()
        return
    except ConfigError:
        return
    with store:
        read_everything(store)
        store.append(Message("TopicA", b"after"), 0)


def expected(subject: Subject, spoilt: Spoilt) -> dict[int, StoredMessage]:
    """Return the records that must be there after recovery: all before the damage."""
    if not spoilt.path.startswith("commitlog/"):
        return subject.records
    start = int(spoilt.path.split("/")[1])
    if spoilt.kind == "delete" and spoilt.path == subject.log_files[0]:
        return {
            place: record
            for place, record in subject.records.items()
            if place >= start + subject.config.commitlog_file_size
        }
    return {place: record for place, record in subject.records.items() if place + record.size <= start + spoilt.begin}


def check_refusal(spoilt: Spoilt, kind: str) -> None:
    assert spoilt.path.startswith("commitlog/")
    assert spoilt.kind in ("truncate", "append", "delete")
    assert kind in ("size", "name")


def check_recovered(files: MemoryFiles, subject: Subject, spoilt: Spoilt) -> None:
    config = subject.config
    try:
        store = opened(files, config, thorough=True)
    except CorruptionError as error:
        has_address(error)
        # Recovery repairs everything except lengths and gaps of the log itself.
        check_refusal(spoilt, error.kind)
        return
    except ConfigError:
        # Most files of one kind have a length other than the settings say.
        assert spoilt.kind in ("truncate", "append")
        return
    folder, _, name = spoilt.path.partition("/")
    damaged = range(int(name) + spoilt.begin, int(name) + spoilt.end) if folder == "commitlog" else range(0)
    there = served(store, damaged)
    wanted = expected(subject, spoilt)
    for place, record in wanted.items():
        assert there.get(place) == record, place
    verdict = store.verify()
    assert verdict.sound, verdict.damage
    more = [store.append(Message("TopicA", bytes([n]), keys=f"more{n}", tags="T"), n % 2) for n in range(30)]
    store.close()
    assert "abort" not in contents(files)
    verdict = verify(ROOT, config, files)
    assert verdict.sound, verdict.damage
    settled = derived(contents(files))
    with opened(files, config) as store:
        assert store.recovered == []
        again = served(store, damaged)
        for place, record in there.items():
            assert again[place] == record
        for n, result in enumerate(more):
            assert again[result.physical_offset].keys == (f"more{n}",)
    assert derived(contents(files)) == settled
    with opened(files, config, thorough=True) as store:
        assert store.recovered == []
    assert derived(contents(files)) == settled


def run_case(subject: Subject, spoilt: Spoilt) -> None:
    try:
        check_case(subject, spoilt)
    except Exception as error:
        place = f"{spoilt.kind} {spoilt.path} {spoilt.begin}..{spoilt.end}"
        which = subjects().index(subject) if subject in subjects() else "golden"
        error.add_note(f"store {which}: {place}")
        raise


@pytest.mark.slow
def test_much_damage_anywhere(slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(20_000, "damaged stores", at_least=8 * examples(24)):
        rng = random.Random(f"slow {number}")
        subject = rng.choice(subjects())
        run_case(subject, spoil(subject, rng))


# ---------------------------------------------------------------------------------------------------- real stores


@cache
def real_subject(folder: Path) -> Subject:
    """Return the store of a golden folder, recovered if it was damaged or left by a crash."""
    config = StoreConfig.from_row(rows(folder, "config")[0])
    files = in_memory(from_disk(folder / "store"))
    opened(files, config, thorough=True).close()
    return subject_of(config, {name: data for name, data in contents(files).items() if not name.startswith("librmq")})


@pytest.mark.slow
@pytest.mark.parametrize("folder", store_folders())
def test_much_damage_to_real_stores(folder: Path, slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(2_000, "damaged stores", at_least=6):
        subject = real_subject(folder)
        run_case(subject, spoil(subject, random.Random(f"{folder.name} {number}")))
