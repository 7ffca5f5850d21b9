"""Queues of 5.x stores that are derived from the log, compared with a model: a list of messages for each queue."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq.cli import main
from librmq.columns import reader
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY_SIZE, HOLE_SIZE
from librmq.errors import CorruptionError, NotAStoreError
from librmq.files._disk import DiskFiles
from librmq.message import Message
from librmq.message.batch import BatchItem, encode_batch
from librmq.message.properties import encode_properties
from librmq.message.record import (
    INNER_BATCH,
    PHYSICAL_OFFSET_AT,
    QUEUE_OFFSET_AT,
    Record,
    body_checksum,
    encode_record,
)
from librmq.store import MessageStore, Wholeness
from librmq.store.recovery._verify import verify
from tests.budget import examples
from tests.rocksdb_stores import write_database
from tests.stores_of_5 import batch_record, write_log

START_MS = 1_700_000_000_000
SMALL = StoreConfig.broker(
    commitlog_file_size=1 << 16, consumequeue_file_size=2000, max_hash_slot_num=8, max_index_num=64
)


@dataclass
class Model:
    """The records of a log, and the messages that a broker of 5.x shows for them."""

    records: list[Record] = field(default_factory=list)
    bodies: list[list[bytes]] = field(default_factory=list)
    """Bodies of the messages of each record."""
    queues: dict[tuple[str, int], list[tuple[int, bytes, str]]] = field(default_factory=dict)
    """Queue offset, body and tag of each message."""

    def add(self, topic: str, queue_id: int, bodies: list[bytes], light: list[str], *, is_batch: bool) -> None:
        """Store messages, as one record or each alone."""
        queue = self.queues.setdefault((topic, queue_id), [])
        for some in [bodies] if is_batch else [[body] for body in bodies]:
            number = len(self.records)
            properties = {} if is_batch else {"TAGS": tag_of(some[0])}
            properties |= {"UNIQ_KEY": f"U{number}", "KEYS": f"k{number}"}
            lights = [self.queues.setdefault((name, 0), []) for name in light] if not is_batch else []
            if lights:
                properties["INNER_MULTI_DISPATCH"] = ",".join(light)
                properties["INNER_MULTI_QUEUE_OFFSET"] = ",".join(str(len(one)) for one in lights)
            record = Record(
                topic=topic, queue_id=queue_id, queue_offset=len(queue), body=some[0], born_timestamp_ms=START_MS,
                store_timestamp_ms=START_MS + number, properties_raw=encode_properties(properties),
            )  # fmt: skip
            if is_batch:
                items = [
                    BatchItem(body, at, encode_properties({"TAGS": tag_of(body), "KEYS": f"b{number}-{at}"}))
                    for at, body in enumerate(some)
                ]
                record = batch_record(record, items)
            self.records.append(record)
            self.bodies.append(some)
            for body in some:
                queue.append((len(queue), body, tag_of(body)))
            for one in lights:
                one.append((len(one), some[0], tag_of(some[0])))


def tag_of(body: bytes) -> str:
    return "ab"[len(body) % 2]


operations = st.lists(
    st.tuples(
        st.sampled_from(["T", "orders"]),
        st.integers(0, 1),
        st.lists(st.binary(max_size=30), min_size=1, max_size=5),
        st.lists(st.sampled_from(["%LMQ%a", "%LMQ%b"]), unique=True, max_size=2),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def model_of(drawn: list[tuple[str, int, list[bytes], list[str], bool]]) -> Model:
    model = Model()
    for topic, queue_id, bodies, light, is_batch in drawn:
        model.add(topic, queue_id, bodies, light, is_batch=is_batch)
    return model


def test_batches_and_light_queues_are_counted_from_the_log(tmp_path: Path) -> None:
    model = Model()
    model.add("T", 0, [b"a", b"b"], ["%LMQ%a", "%LMQ%b"], is_batch=False)
    model.add("T", 1, [b"c", b"d", b"e"], [], is_batch=True)
    write_log(tmp_path, model.records)
    (tmp_path / "batchconsumequeue" / "T" / "1").mkdir(parents=True)
    notes = verify(tmp_path).notes
    assert "records of the log: 1 batches with 3 messages" in notes
    assert "records of light queues: 2 of 2 light queues" in notes


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(drawn=operations, file_size=st.sampled_from([2048, 1 << 16]))
def test_batches_and_light_queues_are_as_the_model_says(
    drawn: list[tuple[str, int, list[bytes], list[str], bool]], file_size: int
) -> None:
    model = model_of(drawn)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_log(path, model.records, file_size)
        write_database(path / "consumequeue_rocksdb", {"default": {}})
        assert verify(path).sound
        with MessageStore.open(path, read_only=True) as store:
            assert {name: queue.max_offset for name, queue in store.queues.items()} == {
                name: len(messages) for name, messages in model.queues.items()
            }
            for name, messages in model.queues.items():
                stored = list(store.messages(*name))
                assert [(one.body, one.tags) for one in stored] == [one[1:] for one in messages]
                if not name[0].startswith("%LMQ%"):
                    assert [one.queue_offset for one in stored] == [one[0] for one in messages]
                for begin in range(len(messages)):
                    one_by_one = store.read(*name, begin, 1)
                    assert ([one.body for one in one_by_one.messages], one_by_one.next_offset) == (
                        [messages[begin][1]], begin + 1
                    )  # fmt: skip
                tagged = store.read(*name, 0, 32, store.matching(tags="a"))
                assert [one.body for one in tagged.messages] == [one[1] for one in messages if one[2] == "a"][:32]
            count = sum(len(messages) for name, messages in model.queues.items() if not name[0].startswith("%LMQ%"))
            assert sum(1 for _ in store) == count
            for number, record in enumerate(model.records):
                numbers = record.queue_offset, record.queue_offset + len(model.bodies[number])
                for key in (f"k{number}", f"U{number}"):
                    assert [one.queue_offset for one in store.find_by_key(record.topic, key)] == list(range(*numbers))
                assert len(store.find_by_id(f"U{number}")) == len(model.bodies[number])
                if INNER_BATCH & record.sys_flag:
                    (inner,) = store.find_by_key(record.topic, f"b{number}-0")
                    assert (inner.body, inner.queue_offset) == (model.bodies[number][0], record.queue_offset)
        assert_columns(path, model)


def assert_columns(path: Path, model: Model) -> None:
    """Compare columns by queues, and those of a walk over the log, with the model."""
    columns = ["topic", "queueId", "queueOffset", "body", "tags"]
    for view in ("messages", "log"):
        rows = reader(path, view=view, columns=columns).read_all().to_pylist()
        expected = [
            (*name, *message)
            for name, messages in model.queues.items()
            if view == "messages" or not name[0].startswith("%LMQ%")
            for message in messages
        ]
        assert sorted(tuple(row.values()) for row in rows) == sorted(expected), view


@pytest.mark.parametrize(
    ("body", "number", "what"),
    [
        (b"abc", "1", "message 0 is cut off"),
        (encode_batch([BatchItem(b"a")]), "2", "expected 2 messages in the body, found 1"),
        (b"", "1", "expected messages in the body, found none"),
    ],
)
def test_a_batch_that_cannot_be_opened_is_damage(tmp_path: Path, body: bytes, number: str, what: str) -> None:
    broken = replace(batch_record(Record(topic="T"), [BatchItem(b"x")]), body=body)
    broken = replace(broken, properties_raw=encode_properties({"INNER_NUM": number}))
    write_log(tmp_path, [broken, Record(topic="T", queue_offset=int(number), body=b"sound")])
    write_database(tmp_path / "consumequeue", {"default": {}})
    (damage,) = verify(tmp_path).damage
    assert (damage.offset, what in damage.what) == (0, True)
    with MessageStore.open(tmp_path, read_only=True) as store:
        assert store.queue_range("T", 0) == (0, int(number) + 1)
        assert [message.body for message in store.messages("T", 0, int(number))] == [b"sound"]
        for messages in (store.messages("T"), store):
            with pytest.raises(CorruptionError, match=what):
                list(messages)
    with pytest.raises(CorruptionError, match=what):
        reader(tmp_path).read_all()
    rows = reader(tmp_path, columns=["body"], mode="PERMISSIVE").read_all().to_pylist()
    assert [row["body"] for row in rows if row["body"]] == [b"sound"]


@pytest.mark.parametrize("has_database", [True, False])
@pytest.mark.parametrize("begins_with_batch", [True, False])
def test_new_records_of_a_running_broker_are_seen(tmp_path: Path, has_database: bool, begins_with_batch: bool) -> None:
    record = Record(topic="T", body=b"0", properties_raw=encode_properties({"KEYS": "k0"}))
    write_log(tmp_path, [batch_record(record, [BatchItem(b"0")] * 3) if begins_with_batch else record])
    if has_database:
        write_database(tmp_path / "consumequeue", {"default": {}})
    lock = DiskFiles().lock(str(tmp_path / "lock"))
    try:
        with (
            MessageStore.open(tmp_path, read_only=True) as store,
            CommitLog.open(tmp_path / "commitlog", 1 << 16) as log,
        ):
            at = 3 if begins_with_batch else 1
            assert len(store.find_by_key("T", "k0")) == at
            for number in range(1, 50):
                record = Record(topic="T", queue_offset=at, body=b"%d" % number)
                record = replace(record, properties_raw=encode_properties({"KEYS": f"k{number}"}))
                if number % 7 == 0:
                    record = batch_record(record, [BatchItem(b"%d" % number)] * 3)
                record = replace(record, physical_offset=log.claim(record.size), body_crc=body_checksum(record.body))
                log.append(encode_record(record))
                new = list(store.messages("T", 0, at))
                assert [message.body for message in new] == [b"%d" % number] * len(new)
                at += 3 if number % 7 == 0 else 1
                assert store.queue_range("T", 0) == (0, at)
                assert len(store.find_by_key("T", f"k{number}")) == len(new)
    finally:
        lock.release()


def test_a_reader_follows_a_broker_that_moves_its_queues(tmp_path: Path) -> None:
    """A broker of 5.x goes on with the queues in RocksDB, and leaves their files as they are."""
    with MessageStore.open(tmp_path, SMALL) as store:
        store.append(Message("T", b"0", keys="k"))
    reading = MessageStore.open(tmp_path, read_only=True)
    with MessageStore.open(tmp_path, SMALL) as store:
        for number in (1, 2):
            store.append(Message("T", b"%d" % number, keys="k"))
    file = tmp_path / "consumequeue" / "T" / "0" / f"{0:020d}"
    file.write_bytes(file.read_bytes()[:ENTRY_SIZE].ljust(2000, b"\0"))
    write_database(tmp_path / "consumequeue_rocksdb", {"default": {}})
    lock = DiskFiles().lock(str(tmp_path / "lock"))
    try:
        assert [message.body for message in reading.messages("T")] == [b"0", b"1", b"2"]
    finally:
        reading.close()
        lock.release()


def test_records_out_of_their_count(tmp_path: Path) -> None:
    """A gap is filled, a topic that was made again starts over, and a single wrong queue offset is corrected."""
    for offsets, expected in (
        ([0, 1, -1, -1, 4, 5], (0, [0, 1, 4, 5])),  # -1 stands for a record of another queue
        ([0, 1, 4, 5], (0, [0, 1, 2, 3])),  # the log has no room for lost ones
        ([0, 100_000, 100_001], (0, [0, 1, 2])),
        ([0, 1, 2, 0, 1], (0, [0, 1])),
        ([0, 1, 2, 0], (0, [0])),
        ([5, 6, 1 << 40, 8], (5, [5, 6, 7, 8])),
        ([7, 8, 3, 10, 11], (7, [7, 8, 9, 10, 11])),
        ([0, 200_000, 200_001], (0, [0, 1, 2])),
    ):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        records = [
            Record(topic="T", queue_offset=at, body=b"%d" % at)
            if at >= 0
            else Record(topic="U", queue_offset=number, body=bytes(50))
            for number, at in enumerate(offsets)
        ]
        write_log(path, records)
        write_database(path / "consumequeue", {"default": {}})
        with MessageStore.open(path, read_only=True) as store:
            queue = store.queues["T", 0]
            sizes = queue.entries()["size"].tolist()
            there = [at for at, size in enumerate(sizes, queue.min_offset) if size != HOLE_SIZE]
            assert (queue.min_offset, there) == expected, offsets
            assert len(list(store.messages("T", 0, queue.min_offset))) == len(there)


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (QUEUE_OFFSET_AT, "queue offset: expected 2, found 7"),
        (PHYSICAL_OFFSET_AT, "physical offset: expected {}, found 7"),
    ],
)
def test_a_record_that_columns_refuse_is_damage(tmp_path: Path, at: int, what: str) -> None:
    write_log(tmp_path, [Record(topic="T", queue_offset=number, body=b"x") for number in (0, 1, 2, 3, 0, 1, 1)])
    write_database(tmp_path / "consumequeue", {"default": {}})
    assert verify(tmp_path).sound  # the topic was made again, and a record was copied again
    with CommitLog.open(tmp_path / "commitlog", 1 << 16) as log:
        place = [place for place, _, _ in log.scan()][2]
        log.patch(place + at, (7).to_bytes(8))
    assert [(found.offset, found.what) for found in verify(tmp_path).damage] == [(place, what.format(place))]
    with pytest.raises(CorruptionError, match="names another"):
        reader(tmp_path).read_all()


def test_what_commands_say_about_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*words: str) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main([*words, "--format", "jsonl"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    model = model_of([("T", 0, [b"a", b"bb", b"ccc"], [], True), ("T", 0, [b"d"], ["%LMQ%x"], False)])
    path = tmp_path / "store"
    write_log(path, model.records)
    (path / "batchconsumequeue" / "T" / "0").mkdir(parents=True)
    store = str(path)
    assert [row.get("inner_messages") for row in rows("dump", store)] == [3, None]
    assert [(row["topic"], row["messages"]) for row in rows("topics", store)] == [("%LMQ%x", 1), ("T", 4)]
    assert [(row["tag"], row["messages"]) for row in rows("count", store, "--by", "tag", "--topic", "T")] == [
        ("b", 3),
        ("a", 1),
    ]
    assert [row["body"] for row in rows("show", store, "--topic", "T")] == ["a", "bb", "ccc", "d"]
    assert [row["queue_offset"] for row in rows("show", store, "--tag", "b", "--topic", "T")] == [0, 2, 3]
    assert [row["max_offset"] for row in rows("queues", store)] == [1, 4]
    for words in (
        ["extract", store, "-o", str(tmp_path / "small")],
        ["salvage", store, "--into", str(tmp_path / "saved")],
    ):
        assert main(words) == 0
        with MessageStore.open(words[-1]) as copy:
            assert [message.body for message in copy.messages("T")] == [b"a", b"bb", b"ccc", b"d"]
            assert copy.verify().sound
    assert main(["follow", store, str(tmp_path / "followed"), "--until-end"]) == 2


@settings(max_examples=examples(30), deadline=None)
@given(drawn=operations, cut=st.integers(0, 3))
def test_recovery_keeps_light_queues(drawn: list[tuple[str, int, list[bytes], list[str], bool]], cut: int) -> None:
    """A store with light queues in files is sound, and a recovery writes the entries that a kill has lost."""
    model = model_of([(topic, queue_id, bodies, light, False) for topic, queue_id, bodies, light, _ in drawn])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_log(path, model.records)
        (path / "consumequeue_rocksdb").mkdir()
        with MessageStore.open(path, read_only=True) as store:
            expected = {name: queue.entries().tobytes() for name, queue in store.queues.items()}
        (path / "consumequeue_rocksdb").rmdir()
        log = (path / "commitlog" / f"{0:020d}").read_bytes()
        for (topic, queue_id), entries in expected.items():
            with ConsumeQueue.open(path / "consumequeue" / topic / str(queue_id), 2000) as queue:
                kept = len(entries) - 20 * min(cut, len(entries) // 20 - 1)
                queue.append_many(0, entries[:kept])
        if not cut:
            assert {damage.file for damage in verify(path).damage} <= {str(path / "index")}
        (path / "abort").touch()
        for read_only in (True, False):
            with MessageStore.open(path, SMALL, read_only=read_only) as store:
                assert {name: queue.entries().tobytes() for name, queue in store.queues.items()} == expected
        assert verify(path).sound
        assert (path / "commitlog" / f"{0:020d}").read_bytes() == log


def test_a_log_file_of_another_length_is_never_empty(tmp_path: Path) -> None:
    """Its queues begin behind what is missing, and a read that accepts no damage is refused."""
    write_log(tmp_path, [Record(topic="T", queue_offset=at, body=bytes(200)) for at in range(40)], 4096)
    write_database(tmp_path / "consumequeue", {"default": {}})
    file = min((tmp_path / "commitlog").iterdir())
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CorruptionError, match="found 100"):
        reader(tmp_path).read_all()
    expected = list(range(14, 40))
    rows = reader(tmp_path, mode="DROPMALFORMED", columns=["queueOffset"]).read_all()
    assert rows.column(0).to_pylist() == expected
    with MessageStore.open(tmp_path, read_only=True) as store:
        assert store.condition.damage[0].file == str(file)
        assert [message.queue_offset for message in store.messages("T", 0, 14)] == expected


@pytest.mark.parametrize(("size", "closed"), [(0, True), (0, False), (10, True), (10, False)])
def test_a_checkpoint_that_readers_refuse_is_damage(tmp_path: Path, size: int, closed: bool) -> None:
    write_log(tmp_path, [Record(topic="T", body=b"x")])
    write_database(tmp_path / "consumequeue", {"default": {}})
    (tmp_path / "checkpoint").write_bytes(bytes(size))
    if not closed:
        (tmp_path / "abort").touch()
    damage = [(Path(found.file).name, found.offset, found.kind) for found in verify(tmp_path).damage]
    assert damage == ([("checkpoint", size, "size")] if size or closed else [])
    with pytest.raises(CorruptionError, match="checkpoint") if damage else nullcontext():
        MessageStore.open(tmp_path, read_only=True).close()


@pytest.mark.parametrize("closed", [True, False])
def test_a_log_that_has_lost_its_records_is_short(tmp_path: Path, closed: bool) -> None:
    """The checkpoint tells that there were some; no queue in files can."""
    write_log(tmp_path, [Record(topic="T", body=b"x", store_timestamp_ms=START_MS)])
    write_database(tmp_path / "consumequeue", {"default": {}})
    (tmp_path / "checkpoint").write_bytes(2 * START_MS.to_bytes(8) + bytes(4080))
    if not closed:
        (tmp_path / "abort").touch()
    with MessageStore.open(tmp_path, read_only=True) as store:
        assert store.condition.kind is (Wholeness.SOUND if closed else Wholeness.RECOVERABLE)
    assert verify(tmp_path).sound
    file = min((tmp_path / "commitlog").iterdir())
    file.write_bytes(bytes(file.stat().st_size))
    with MessageStore.open(tmp_path, read_only=True) as store:
        assert store.condition.kind is Wholeness.SHORT
        assert "the checkpoint covers records up to" in store.condition.damage[0].what
    assert [damage.kind for damage in verify(tmp_path).damage] == ["ahead"]


def test_a_last_log_file_of_length_zero_hides_no_damage(tmp_path: Path) -> None:
    """A kill leaves such a file, so readers pass over it, and `verify` reads the others."""
    write_log(tmp_path, [Record(topic="T", queue_offset=at, body=b"x" * 200) for at in range(40)], 4096)
    write_database(tmp_path / "consumequeue", {"default": {}})
    (tmp_path / "abort").touch()
    file, *_, last = sorted((tmp_path / "commitlog").iterdir())
    empty = last.with_name(f"{int(last.name) + 4096:020d}")
    empty.touch()
    verdict = verify(tmp_path)
    assert verdict.sound
    assert [(Path(found.file), found.kind) for found in verdict.recoverable] == [(empty, "size")]
    file.write_bytes(file.read_bytes().replace(b"x", b"y", 1))
    assert [(Path(found.file), found.kind) for found in verify(tmp_path).damage] == [(file, "checksum")]


def test_recovery_takes_no_record_for_one_of_a_light_queue(tmp_path: Path) -> None:
    """An entry of a light queue leads to a record that does not name the queue: the entry is wrong, not the record."""
    lights = [
        encode_properties({"INNER_MULTI_DISPATCH": "%LMQ%x", "INNER_MULTI_QUEUE_OFFSET": str(at)}) if at != 1 else b""
        for at in range(3)
    ]
    write_log(tmp_path, [Record(topic="orders", queue_offset=at, properties_raw=lights[at]) for at in range(3)])
    log = (tmp_path / "commitlog" / f"{0:020d}").read_bytes()
    for name in ("orders", "%LMQ%x"):
        with ConsumeQueue.open(tmp_path / "consumequeue" / name / "0", 2000) as queue:
            for at, (place, size, _) in enumerate(CommitLog.open(tmp_path / "commitlog", 1 << 16).scan()):
                queue.append(at, place, size, 0)
    with MessageStore.open(tmp_path, SMALL, thorough=True) as store:
        assert store.queue_range("%LMQ%x", 0) == (0, 3)
    assert (tmp_path / "commitlog" / f"{0:020d}").read_bytes() == log


@pytest.mark.parametrize(("offsets", "kept"), [([0, 1, 1, 2], [0, 1, 3]), ([0, 5, 1, 2], [0, 2, 3])])
def test_a_record_out_of_the_count_of_a_light_queue_has_no_place_there(
    tmp_path: Path, offsets: list[int], kept: list[int]
) -> None:
    records = [
        encode_properties({"INNER_MULTI_DISPATCH": "%LMQ%x", "INNER_MULTI_QUEUE_OFFSET": str(at)}) for at in offsets
    ]
    write_log(tmp_path, [Record(topic="orders", queue_offset=at, properties_raw=raw) for at, raw in enumerate(records)])
    with ConsumeQueue.open(tmp_path / "consumequeue" / "%LMQ%x" / "0", 2000) as queue:
        place, size, _ = next(CommitLog.open(tmp_path / "commitlog", 1 << 16).scan())
        queue.append(0, place, size, 0)
    with MessageStore.open(tmp_path, SMALL, thorough=True) as store:
        assert [message.queue_offset for message in store.messages("%LMQ%x", 0)] == kept
    assert verify(tmp_path).sound


def test_batches_beside_files_of_queues(tmp_path: Path) -> None:
    """A log with batches and no sign of them is read right, refused for writing, and not called sound."""
    model = model_of([("T", 0, [b"a", b"bb"], [], True), ("T", 0, [b"c"], [], False)])
    write_log(tmp_path / "alone", model.records)
    with MessageStore.open(tmp_path / "alone", read_only=True) as store:
        assert [message.body for message in store.messages("T")] == [b"a", b"bb", b"c"]
    (damage, *_) = verify(tmp_path / "alone").damage
    assert (damage.kind, damage.offset, "a batch of 2 messages" in damage.what) == ("batch", 0, True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("0*") if path.is_file()}
    for thorough in (False, True):
        with pytest.raises(NotAStoreError, match="a batch of 2 messages of RocketMQ 5"):
            MessageStore.open(tmp_path / "alone", SMALL, thorough=thorough)
    assert {path: path.read_bytes() for path in tmp_path.rglob("0*") if path.is_file()} == before

    write_log(tmp_path / "named", model.records)
    (tmp_path / "named" / "timerlog").mkdir()
    (tmp_path / "named" / "config").mkdir()
    row = {"attributes": {"queue.type": "BatchCQ"}}
    (tmp_path / "named" / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": {"T": row}}))
    with pytest.raises(NotAStoreError, match="with queues of batches: librmq reads it"):
        MessageStore.open(tmp_path / "named")
    assert "records of the log: 1 batches with 2 messages" in verify(tmp_path / "named").notes
