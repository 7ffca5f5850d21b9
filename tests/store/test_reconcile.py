"""Queues and index compared with the log: differences are reported, and corrected in parts that can be written."""

from __future__ import annotations

import io
import json
import random
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from librmq import Message
from librmq.cli import main
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Damage
from librmq.message.delays import DelayLevels
from librmq.message.record import (
    INNER_BATCH,
    MESSAGE_MAGIC,
    QUEUE_ID_AT,
    QUEUE_OFFSET_AT,
    SYS_FLAG_AT,
    TRANSACTION_PREPARED,
    Record,
    encode_record,
)
from librmq.runtime import compiled_core
from librmq.store import MessageStore
from librmq.store.format._keyindex import KeyIndex
from librmq.store.recovery._log_comparison import Reconciliation
from librmq.store.recovery._queue_check import GapError
from librmq.store.recovery._scope import Scope
from librmq.store.recovery._verify import verify
from tests.budget import examples, many
from tests.store.test_core import WITH_AND_WITHOUT, without_core
from tests.stores import START_MS

LEVELS = DelayLevels.parse("1s 5s")
LOG_SIZE = 4096


class Parts:
    """A log, its queues and its index, each on its own path."""

    def __init__(self, *, ext: bool = False) -> None:
        self.files = MemoryFiles()
        self.ext = ext
        self.log = CommitLog.open("/log", LOG_SIZE, files=self.files)
        self.queues: dict[tuple[str, int], ConsumeQueue] = {}
        self.index = self.open_index()
        self.stored = START_MS

    def open_index(self) -> KeyIndex:
        return KeyIndex.open("/index", slots=4, entries=16, files=self.files, now_ms=lambda: START_MS)

    def open_queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        ext = f"/ext/{topic}/{queue_id}" if self.ext else None
        return ConsumeQueue.open(
            f"/queues/{topic}/{queue_id}", 100, files=self.files, ext_folder=ext, ext_file_size=128
        )

    def record(self, queue_offset: int, topic: str = "T", queue_id: int = 0, **fields: object) -> int:
        """Append a record; return its place."""
        self.stored += 700
        record = Record(
            topic=topic,
            queue_id=queue_id,
            queue_offset=queue_offset,
            store_timestamp_ms=self.stored,
            properties_raw=b"KEYS\x01k%d\x02TAGS\x01A" % queue_offset,
        )
        for name, value in fields.items():
            setattr(record, name, value)
        record.physical_offset = place = self.log.claim(record.size)
        self.log.append(encode_record(record))
        return place

    def fill(self, size: int) -> None:
        """Append at least this many bytes of records of another topic."""
        end, number = self.log.end + size, 0
        while self.log.end < end:
            self.record(number, "Other", properties_raw=b"p\x01" + b"x" * min(size, LOG_SIZE - 200))
            number += 1

    def reconcile(
        self,
        begin: int = 0,
        *,
        repair: bool = True,
        scope: Scope | None = None,
        left_out: dict[tuple[str, int], int] | None = None,
    ) -> list[Damage]:
        comparison = Reconciliation(
            log=self.log, queues=self.queues, open_queue=self.open_queue, index=self.index, levels=LEVELS,
            has_ext=self.ext, left_out={} if left_out is None else left_out,
        )  # fmt: skip
        self.log.sequence.writable = self.index.writable = repair
        try:
            return list(comparison.run(begin, scope))
        finally:
            self.log.sequence.writable = self.index.writable = True

    def entries(self, topic: str = "T", queue_id: int = 0) -> list[tuple[int, int]]:
        """Return queue offset and log position of each entry of a queue, without entries of lost messages."""
        queue = self.queues[topic, queue_id]
        rows = queue.entries().tolist()
        following = [place for place, _, _ in rows[1:]] + [-1]
        return [
            (number, place)
            for number, ((place, size, _), after) in enumerate(zip(rows, following, strict=True), queue.min_offset)
            if size != 0x7FFFFFFF and place != after
        ]

    def settled(self) -> None:
        """Check that another run finds nothing to repair."""
        assert self.reconcile(repair=False) == []
        assert self.reconcile() == []


@pytest.fixture(params=[False, True], ids=["plain", "ext"])
def parts(request: pytest.FixtureRequest) -> Parts:
    return Parts(ext=request.param)


def test_without_repair_nothing_is_written(parts: Parts) -> None:
    parts.record(0)
    before = len(parts.files.list("/"))
    assert {damage.kind for damage in parts.reconcile(repair=False)} == {"missing"}
    assert (len(parts.files.list("/")), parts.queues) == (before, {})


IMPOSSIBLE = [-1, -2, 1 - (1 << 63), -(1 << 63), (1 << 63) - 1, (1 << 63) - 2, 1 << 62, 1 << 58]


@many
@pytest.mark.parametrize("wrong", IMPOSSIBLE)
@pytest.mark.parametrize("at", [0, 1, 6])
@pytest.mark.parametrize("first", [0, 5])
def test_no_record_follows_an_impossible_queue_offset(parts: Parts, wrong: int, at: int, first: int) -> None:
    """Without entries the records alone tell what their queue offsets are."""
    places = [parts.record(first + n) for n in range(7)]
    parts.log.patch(places[at] + QUEUE_OFFSET_AT, struct.pack(">q", wrong))
    records = [damage for damage in parts.reconcile() if damage.kind == "record"]
    assert [damage.offset for damage in records] == [places[at]]
    assert f"expected {first + at}, found {wrong}" in records[0].what
    assert parts.entries() == list(enumerate(places, first))
    parts.settled()


@contextmanager
def walking(way: str) -> Iterator[None]:
    """Let comparisons take the log with the core, with arrays, or one record after the other."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("engine.derivation", "recovery._index_check", "recovery._queue_check"):
            patch.setattr(f"librmq.store.{module}.COMPARED", 4)  # so that arrays are worth it
        patch.setattr("librmq.store.engine.derivation._LEAST_APART", 1)
        patch.setattr("librmq.store.engine.derivation._WORTH_BLOCK", 1)
        if way == "arrays":
            patch.setattr("librmq.store.engine.derivation.CORE", compiled_core.PURE)
        if way == "one by one":
            patch.setattr("librmq.store.engine.derivation.derived_block", lambda *_, **_options: None)
        yield


def found_by(way: str, queue_offsets: Sequence[int], changed: Sequence[tuple[int, int]], has_entries: bool) -> object:
    """Return what the repair of a log says and leaves."""
    parts = Parts()
    with walking(way):
        places = [parts.record(queue_offset) for queue_offset in queue_offsets]
        if has_entries:
            parts.reconcile()
        for at, wrong in changed:
            parts.log.patch(places[at % len(places)] + QUEUE_OFFSET_AT, struct.pack(">q", wrong))
        told = [parts.reconcile(repair=False), parts.reconcile()]
    queue = parts.queues["T", 0]
    parts.settled()
    return told, queue.min_offset, queue.entries().tolist(), [raw for _, _, raw in parts.log.scan()]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.integers(0, 9),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from(IMPOSSIBLE) | st.integers(0, 20)), max_size=4),
    st.booleans(),
)
@example(0, 4, [(1, 100_000), (2, 100_001), (3, 100_002)], False)  # the log has no room for as many
@example(0, 3, [(0, (1 << 63) - 1), (1, -(1 << 63))], False)  # follows only in a number of 64 bits
def test_changed_queue_offsets_are_corrected_alike(
    first: int, count: int, changed: list[tuple[int, int]], has_entries: bool
) -> None:
    expected = found_by("one by one", range(first, first + count), changed, has_entries)
    assert found_by("arrays", range(first, first + count), changed, has_entries) == expected
    assert found_by("core", range(first, first + count), changed, has_entries) == expected


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from("TUV"), min_size=1, max_size=40), st.integers(0, 40), st.booleans())
def test_a_queue_without_files_is_made_again_alike(topics: list[str], begin: int, is_one_wrong: bool) -> None:
    """All records of the lost queue are compared, and of the others those from one place on."""

    def outcome(way: str) -> object:
        parts, counts, places = Parts(), Counter[str](), []
        with walking(way):
            for topic in topics:
                places.append(parts.record(counts[topic], topic))
                counts[topic] += 1
            parts.reconcile()
            del parts.queues[topics[0], 0]
            parts.files.delete(f"/queues/{topics[0]}")
            place = places[begin % len(places)]
            scope = Scope(place, frozenset([(topics[0], 0)]))
            if is_one_wrong:
                parts.log.patch(place + QUEUE_OFFSET_AT, struct.pack(">q", 1 << 40))
            left_out: dict[tuple[str, int], int] = {}
            try:
                damages = parts.reconcile(scope=scope, left_out=left_out)
            except GapError as gap:
                return gap.name
        if not is_one_wrong:
            parts.settled()
        return damages, left_out, [parts.entries(topic) for topic in counts]

    expected = outcome("one by one")
    assert outcome("arrays") == expected
    assert outcome("core") == expected


def test_keys_are_indexed_under_a_corrected_topic(parts: Parts) -> None:
    places = [parts.record(n) for n in range(7)]
    raw = parts.log.data_at(places[3], places[4] - places[3])
    parts.log.patch(places[3] + raw.index(b"\1T\0") + 1, b"U")
    parts.reconcile()
    assert parts.entries() == list(enumerate(places))
    assert (parts.index.query("T", "k3"), parts.index.query("U", "k3")) == ([places[3]], [])
    parts.settled()


def test_a_batch_with_a_damaged_flag_is_reported_once(parts: Parts) -> None:
    properties = b"KEYS\x01k1\x02TAGS\x01A\x02INNER_NUM\x013"
    places = [parts.record(number, properties_raw=properties) for number in range(3)]
    parts.reconcile()
    for flag, expected in ((INNER_BATCH, ["batch"]), (INNER_BATCH | TRANSACTION_PREPARED, ["batch", "record"])):
        parts.log.patch(places[1] + SYS_FLAG_AT, flag.to_bytes(4, "big"))
        damages = parts.reconcile(repair=False)
        assert sorted(damage.kind for damage in damages if damage.offset == places[1]) == expected


def test_a_power_cut_that_leaves_entries_behind_a_lost_one_moves_no_record(parts: Parts) -> None:
    """The first checked record is the lost one's, so its offset is below those of the entries that remain."""
    places = [parts.record(number) for number in range(2)]
    parts.fill(LOG_SIZE)
    begin = parts.log.end
    places += [parts.record(number) for number in range(2, 20)]
    parts.reconcile()
    queue = parts.queues["T", 0]
    for lost in (2, *range(10, 20)):
        path, position = queue.place_of(lost)
        parts.files.open(path, writable=True).buffer[position : position + 20] = bytes(20)
    assert "record" not in {damage.kind for damage in parts.reconcile(begin)}
    assert parts.entries() == list(enumerate(places))
    parts.settled()


def test_a_huge_gap_restarts_the_queue() -> None:
    parts = Parts()
    for n in (0, 1):
        parts.record(n)
    parts.fill(100_010 * 92)
    places = {n: parts.record(n) for n in (100_005, 100_006)}
    parts.reconcile()
    assert parts.entries() == list(places.items())
    parts.settled()


def test_a_gap_needs_all_of_the_log(parts: Parts) -> None:
    places = [parts.record(n) for n in range(6)]
    with pytest.raises(GapError):
        parts.reconcile(places[3])
    parts.reconcile()
    assert parts.reconcile(places[3]) == []
    parts.queues["T", 0].truncate_to(2)
    with pytest.raises(GapError):
        parts.reconcile(places[3])
    parts.reconcile(places[2])
    assert parts.entries() == list(enumerate(places))


def test_only_the_end_of_the_log_is_checked(parts: Parts) -> None:
    places = [parts.record(n) for n in range(6)]
    parts.reconcile()
    later = [parts.record(n) for n in (6, 7)]
    damage = parts.reconcile(later[0])
    assert {one.kind for one in damage} == {"missing"}
    assert parts.entries() == list(enumerate(places + later))
    parts.settled()


def test_entries_of_deleted_messages_stay(parts: Parts) -> None:
    places: list[int] = []
    while len(parts.log.sequence.starts) < 3:
        places.append(parts.record(len(places)))
    parts.reconcile()
    parts.log.delete_before(LOG_SIZE)
    assert parts.reconcile() == []
    assert parts.entries() == list(enumerate(places))
    first = next(n for n, place in enumerate(places) if place >= LOG_SIZE)
    queue = parts.queues["T", 0]
    for at in (0, first - 1):  # an entry that points at another entry's record
        path, position = queue.place_of(at)
        parts.files.open(path, writable=True).buffer[position : position + 8] = struct.pack(">q", places[-1])
        damage = parts.reconcile(LOG_SIZE)
        assert {one.kind for one in damage} == {"entry"}
        assert parts.reconcile(LOG_SIZE) == []
        assert [place for n, place in parts.entries() if n >= first] == places[first:]


@pytest.mark.parametrize("has_own", [True, False], ids=["a stale entry", "a lost message"])
def test_an_entry_of_another_queues_record_is_a_loss_if_that_queue_has_none(parts: Parts, has_own: bool) -> None:
    """4.9 leaves entries behind the end of a queue that it has cut, and after a second kill it goes on behind them."""
    places = [parts.record(n) for n in range(3)]
    other = [parts.record(n, "U", 0) for n in range(2)]
    parts.reconcile()
    parts.queues["T", 0].append(3, other[1], parts.log.end - other[1], 0)
    if not has_own:
        parts.queues["U", 0].truncate_to(1)
    assert [damage.kind for damage in parts.reconcile() if damage.kind != "missing"] == ["ahead", "lost"][: 2 - has_own]
    assert parts.entries() == list(enumerate(places))
    parts.settled()


def test_zeros_in_a_queue_are_not_an_entry(parts: Parts) -> None:
    """The first file of a queue that begins above 0 never reached the device; the log's first record belongs in it."""
    places = [parts.record(n) for n in range(3, 10)]
    assert places[0] == 0
    parts.reconcile()
    parts.files.open(f"/queues/T/0/{0:020d}", writable=True).buffer[:] = bytes(100)
    parts.queues = {("T", 0): parts.open_queue("T", 0)}
    assert {damage.kind for damage in parts.reconcile()} == {"entry"}
    assert parts.entries() == list(enumerate(places, 3))
    parts.settled()


@pytest.mark.parametrize("is_first_there", [False, True])
def test_an_index_file_that_is_lost_or_not_full_though_an_empty_one_follows(parts: Parts, is_first_there: bool) -> None:
    """The last entries of both never reached the device, but the header of the next file did.

    It was made from that of the file before, so it says that older records were indexed.
    """
    places = [parts.record(n) for n in range(20)]
    parts.reconcile()
    first, second = parts.index.files
    if is_first_there:
        first.file.buffer[24:40] = struct.pack(">qii", places[9], 4, 11)
        assert first.header.index_count == 11
    else:
        parts.files.delete(first.path)
    end = struct.pack(">qqqqii", *2 * (START_MS + 700 * 15,), *2 * (places[14],), 0, 0)
    second.file.buffer[:] = end + bytes(second.file.size - len(end))
    parts.index = parts.open_index()
    damage = parts.reconcile(repair=False)
    assert damage
    if is_first_there:
        assert next(one.offset for one in damage if one.file == first.path) == 36
    parts.reconcile()
    parts.settled()
    assert [parts.index.query("T", f"k{n}") for n in range(20)] == [[place] for place in places]


def test_an_index_that_ends_between_the_keys_of_a_record(parts: Parts) -> None:
    raw = b"KEYS\x01a b c d\x02UNIQ_KEY\x01U"
    first = parts.record(0, properties_raw=raw)
    hashes = [codec_hash("T", key) for key in ("U", "a", "b")]
    parts.index.append_many([(first, parts.stored, hashes)])
    second = parts.record(1, properties_raw=raw)
    parts.reconcile()
    for key in "Uabcd":
        assert parts.index.query("T", key) == [second, first]
    parts.settled()


def codec_hash(topic: str, key: str) -> int:
    from librmq.java.lang import index_key_hash

    return index_key_hash(topic, key)


@many
@pytest.mark.parametrize("seed", range(5))
def test_any_mixture_can_be_repaired(parts: Parts, seed: int) -> None:
    """Whatever queues and index say, nothing is left to repair afterwards."""
    rng = random.Random(seed)
    counts: dict[tuple[str, int], int] = {}
    for _ in range(150):
        name = rng.choice(["T", "U", "消"]), rng.randrange(2)
        offset = counts.get(name, rng.choice([0, 0, 3]))
        counts[name] = offset + 1 if rng.random() < 0.95 else rng.choice([0, offset + 5, offset + 200_000])
        parts.record(
            offset if rng.random() < 0.97 else rng.randrange(-5, 1000), *name, sys_flag=rng.choice([0, 0, 0, 4, 8, 12])
        )
        if rng.random() < 0.05:
            parts.reconcile()
    parts.reconcile()
    parts.settled()


# Recovery of a queue that has a record of another queue, or an entry without a record.


CONFIG = StoreConfig.tiny(commitlog_file_size=16_384)
WITH_UNITS = StoreConfig.tiny(commitlog_file_size=16_384, enable_consumequeue_ext=True)


def change(folder: Path, physical_offset: int, data: bytes, config: StoreConfig = CONFIG) -> None:
    start = physical_offset - physical_offset % config.commitlog_file_size
    with open(folder / "commitlog" / f"{start:020d}", "r+b") as file:
        file.seek(physical_offset - start)
        file.write(data)


def filled(folder: Path, config: StoreConfig = CONFIG, count: int = 300) -> list[int]:
    """Append messages to three queues in turn; return their places."""
    with MessageStore.open(folder, config) as store:
        return [
            store.append(Message("Topic", b"%d" % n, tags=f"t{n % 5}", keys=f"k{n}"), n % 3).physical_offset
            for n in range(count)
        ]


def bodies(folder: Path, queue_id: int) -> list[int]:
    with MessageStore.open(folder, read_only=True) as store:
        return [int(message.body) for message in store.messages("Topic", queue_id)]


def broker_gives(folder: Path, queue_id: int, config: StoreConfig = CONFIG) -> list[int]:
    """Return what a broker's pulls of 32 give. At an entry without a record it skips to the next file."""
    given: list[int] = []
    with MessageStore.open(folder, read_only=True) as store:
        queue, size = store.queues["Topic", queue_id], config.commitlog_file_size
        at = queue.min_offset
        while at < queue.max_offset:
            skip_below, found = -(1 << 63), 0
            for place, length, _ in ENTRY.iter_unpack(queue.read(at, 1000)):
                if place >= skip_below:
                    if found == 32:
                        break
                    raw = b"" if place % size + length > size else store.log.data_at(place, length)
                    if raw:
                        assert struct.unpack_from(">II", raw) == (length, MESSAGE_MAGIC)
                        message = store.message_at(place)
                        assert message is not None
                        given.append(int(message.stored_body))
                        skip_below, found = -(1 << 63), found + 1
                    else:
                        skip_below = place - place % size + size
                at += 1
    return given


@many
@pytest.mark.parametrize("config", [CONFIG, WITH_UNITS], ids=["plain", "ext"])
@pytest.mark.parametrize("field", ["queue id", "other queue", "topic"])
@pytest.mark.parametrize("number", [100, 299, pytest.param(297, marks=pytest.mark.slow)])
@pytest.mark.parametrize("queues", ["there", "gone"])
def test_a_changed_header_byte_loses_no_message(
    tmp_path: Path, config: StoreConfig, field: str, number: int, queues: str
) -> None:
    places = filled(tmp_path, config)
    if field == "topic":
        with open(tmp_path / "commitlog" / f"{places[number] // 16_384 * 16_384:020d}", "rb") as file:
            file.seek(places[number] % 16_384)
            at = places[number] + file.read(400).index(b"Topic")
        change(tmp_path, at + 2, b"q", config)
    else:
        other = 7 if field == "queue id" else (number + 1) % 3
        change(tmp_path, places[number] + QUEUE_ID_AT, other.to_bytes(4, "big"), config)
    if queues == "gone":
        shutil.rmtree(tmp_path / "consumequeue")
        if config is WITH_UNITS:
            shutil.rmtree(tmp_path / "consumequeue_ext")
    assert not verify(tmp_path, config).sound
    with MessageStore.open(tmp_path, config, thorough=True):
        pass
    verdict = verify(tmp_path, config)
    assert verdict.sound, verdict.damage
    if queues == "gone" and number > 290:
        return  # it was the queue's last record, so its queue is unknown
    assert sorted(path.name for path in (tmp_path / "consumequeue").iterdir()) == ["Topic"]
    if queues == "gone" and field == "other queue":  # which of two records with one queue offset is wrong is unknown
        assert sorted(body for queue_id in range(3) for body in bodies(tmp_path, queue_id)) == list(range(300))
        return
    for queue_id in range(3):
        assert bodies(tmp_path, queue_id) == list(range(queue_id, 300, 3))
        assert broker_gives(tmp_path, queue_id, config) == list(range(queue_id, 300, 3))


IMPOSSIBLE_NUMBERS = st.sampled_from(IMPOSSIBLE) | st.integers(-(1 << 63), -1) | st.integers(1 << 58, (1 << 63) - 1)


@pytest.mark.parametrize("core", WITH_AND_WITHOUT)
@settings(max_examples=examples(12), deadline=None)
@given(
    wrong=st.dictionaries(st.integers(0, 29), IMPOSSIBLE_NUMBERS, min_size=1, max_size=2),
    is_gone=st.booleans(),
    is_unclean=st.booleans(),
)
def test_a_store_with_impossible_queue_offsets_is_repaired(
    core: str, wrong: dict[int, int], is_gone: bool, is_unclean: bool
) -> None:
    """Each command can look at it, and no message is lost."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if core == "pure":
            without_core(patch)
        path = Path(folder)
        places = filled(path, count=30)
        for number, queue_offset in wrong.items():
            change(path, places[number] + QUEUE_OFFSET_AT, struct.pack(">q", queue_offset))
        if is_gone:
            shutil.rmtree(path / "consumequeue")
        if is_unclean:
            (path / "abort").touch()
        verdict = verify(path, CONFIG)
        assert verdict.recoverable if is_unclean else verdict.damage
        with redirect_stdout(io.StringIO()) as out:
            assert main(["dump", str(path)]) <= (is_gone and not is_unclean)
        rows = [json.loads(line) for line in out.getvalue().splitlines()]
        printed = [row["queue_offset"] for row in rows if row["type"] == "message"]
        assert printed == [wrong.get(number, number // 3) for number in range(30)]
        with MessageStore.open(path, CONFIG, read_only=True) as store:
            assert [message.physical_offset for message in store] == places
        with MessageStore.open(path, CONFIG):
            pass
        with MessageStore.open(path, CONFIG, thorough=True) as store:
            numbers = [int(message.body) for queue_id in range(3) for message in store.messages("Topic", queue_id)]
        assert numbers == [number for queue_id in range(3) for number in range(queue_id, 30, 3)]
        verdict = verify(path, CONFIG)
        assert verdict.sound, verdict.damage


@pytest.mark.parametrize("number", [60, 100, 250])
def test_a_hole_is_skipped(tmp_path: Path, number: int) -> None:
    """A record whose queue offset and queue changed, and whose entry is gone, leaves a hole."""
    places = filled(tmp_path)
    queue_id = number % 3
    change(tmp_path, places[number] + QUEUE_ID_AT, (9).to_bytes(4, "big") + bytes(4) + (5).to_bytes(8, "big"))
    with ConsumeQueue.open(tmp_path / "consumequeue" / "Topic" / str(queue_id), CONFIG.consumequeue_file_size) as queue:
        queue.truncate_to(number // 3)
    with MessageStore.open(tmp_path, CONFIG, thorough=True):
        pass
    verdict = verify(tmp_path, CONFIG)
    assert verdict.sound, verdict.damage
    wanted = [n for n in range(queue_id, 300, 3) if n != number]
    assert bodies(tmp_path, queue_id) == wanted
    given = broker_gives(tmp_path, queue_id)
    assert sorted(set(given)) == wanted
    assert len(given) <= len(wanted) + 1
    with MessageStore.open(tmp_path, CONFIG, thorough=True) as store:
        assert store.recovered == []
        assert store.queues["Topic", queue_id].max_offset == 100


@pytest.mark.parametrize("repair", ["opening", "recover"])
def test_each_way_into_a_store_reports_offsets_ahead_of_the_log(
    tmp_path: Path, repair: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = filled(tmp_path, count=9)
    for number in (3, 6):  # the second record of queue 0, and the third
        change(tmp_path, places[number] + QUEUE_OFFSET_AT, struct.pack(">q", 100_000 + number // 3))
    shutil.rmtree(tmp_path / "consumequeue")
    (tmp_path / "abort").touch()
    (tmp_path / "librmq/closed.json").unlink()
    recoverable = [damage.offset for damage in verify(tmp_path, CONFIG).recoverable if damage.kind == "record"]
    assert recoverable == [places[3], places[6]]
    if repair == "recover":
        assert main(["recover", str(tmp_path)]) == 0
        row = json.loads(capsys.readouterr().out)
        assert "queue offset: expected 1, found 100001" in [cut["why"] for cut in row["cut"]]
    else:
        MessageStore.open(tmp_path, CONFIG).close()
    assert bodies(tmp_path, 0) == [0, 3, 6]
    assert verify(tmp_path, CONFIG).sound
