"""A store that `extract` makes has the selected records, unchanged but for their numbers, in small files."""

from __future__ import annotations

import errno
import gc
import hashlib
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from librmq import Broker, BrokerConfig, ManualClock, ManualRunner, Message, MessageStore, Producer, TransactionProducer
from librmq.config import StoreConfig
from librmq.errors import ConfigError, CorruptionError, StoreIOError
from librmq.files import DiskFiles, File
from librmq.message import record
from librmq.message.batch import BatchItem
from librmq.message.message import StoredMessage
from librmq.message.topics import SystemTopic
from librmq.protocol import TransactionState
from librmq.store import extract, rescue, verify
from librmq.store.format.broker_tables import BrokerTables
from tests.budget import many
from tests.stores_of_5 import batch_record, write_log


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of two topics, with transactions, compressed bodies, and the progress of a group."""
    folder = tmp_path_factory.mktemp("extraction") / "store"
    with Broker.open(folder, BrokerConfig(), runner=ManualRunner(ManualClock(1_700_000_000_000))) as broker:
        broker.create_topic("orders", 2)
        broker.create_topic("payments", 1)
        with (
            Producer(broker, "shop") as producer,
            TransactionProducer(broker, "sales", lambda _: TransactionState.COMMIT) as transactions,
        ):
            for number in range(40):
                producer.send("orders", f"order {number}", keys=f"k{number}", tags="ab"[number % 2], queue=number % 2)
                producer.send("payments", b"paid", properties={"card": f"4000-{number}"})
            producer.send("orders", b"again and again " * 1000, keys="large", queue=0)
            half = Message("payments", b"half", keys="half")
            transactions.send_in_transaction(half, execute=lambda *_: TransactionState.COMMIT)
        broker.tables.set_consumer_offset("orders", "billing", 0, 10)
        broker.tables.set_consumer_offset("payments", "audit", 0, 1)
    return folder


def messages(path: Path) -> list[StoredMessage]:
    with MessageStore.open(path, read_only=True) as store:
        return list(store)


def compared(message: StoredMessage) -> record.Record:
    """Return a record without the numbers that a copy gives again."""
    decoded = record.decode_record(message.raw)
    return replace(decoded, physical_offset=0, queue_offset=0, prepared_transaction_offset=0)


def test_selected_records_stay_as_they_are(source: Path, tmp_path: Path) -> None:
    selected = [one for one in messages(source) if one.topic == "orders" and one.tags in ("a", None)]
    before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
    small = extract(str(source), str(tmp_path / "small"), lambda one: one.topic == "orders" and one.tags in ("a", None))
    copied = messages(tmp_path / "small")
    assert {path: path.stat().st_mtime_ns for path in source.rglob("*")} == before
    assert list(map(compared, copied)) == list(map(compared, selected))
    assert [(one.queue_id, one.queue_offset) for one in copied] == [(0, at) for at in range(21)]
    assert (small.messages, small.bytes) == (21, sum(one.size for one in selected))
    assert not verify(tmp_path / "small").damage
    with MessageStore.open(tmp_path / "small", read_only=True) as store:
        assert [one.body for one in store.find_by_key("orders", "k4")] == [b"order 4"]
        assert store.config.commitlog_file_size == 8 << 10
    assert sum(path.stat().st_size for path in (tmp_path / "small").rglob("*") if path.is_file()) < 20 << 10


def test_progress_and_topics_go_with_their_messages(source: Path, tmp_path: Path) -> None:
    extract(str(source), str(tmp_path / "small"), lambda one: one.topic == "orders" and one.queue_offset >= 5)
    tables = BrokerTables.open(str(tmp_path / "small" / "config"))
    assert tables.progress() == {("billing", "orders"): {0: 5}}
    assert list(tables.topics.rows) == ["orders"]


def test_a_committed_message_leads_to_its_half(source: Path, tmp_path: Path) -> None:
    extract(str(source), str(tmp_path / "both"), lambda one: one.keys == ("half",))
    half, committed = messages(tmp_path / "both")
    assert (half.topic, committed.topic) == (SystemTopic.HALF, "payments")
    assert committed.prepared_transaction_offset == half.physical_offset
    extract(str(source), str(tmp_path / "one"), lambda one: one.keys == ("half",) and one.topic == "payments")
    (committed,) = messages(tmp_path / "one")
    assert committed.prepared_transaction_offset == 0


def test_redacted_bodies_and_values_are_hidden(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "small"
    extract(str(source), str(target), lambda one: one.topic != SystemTopic.OP, redact=["bodies", "properties"])
    originals = [one for one in messages(source) if one.topic != SystemTopic.OP]
    for original, hidden in zip(originals, messages(target), strict=True):
        assert set(hidden.body) <= set(b"x")
        assert (hidden.crc_ok, hidden.size) == (True, original.size)
        assert (hidden.unique_key, hidden.keys, hidden.tags) == (original.unique_key, original.keys, original.tags)
        assert hidden.properties.get("card", "x" * 6)[:1] == "x"
        assert hidden.store_timestamp_ms == original.store_timestamp_ms
    assert not verify(target).damage


def test_queues_and_index_are_those_that_a_recovery_makes(source: Path, tmp_path: Path) -> None:
    small, again = tmp_path / "small", tmp_path / "again"
    extract(str(source), str(small), lambda one: bool(one.queue_offset) or one.topic != "orders")
    shutil.copytree(small, again)
    for derived in ("consumequeue", "index"):
        shutil.rmtree(again / derived)
    MessageStore.open(again, thorough=True).close()

    def contents(folder: Path) -> list[tuple[str, bytes]]:
        queues = sorted(path for path in (folder / "consumequeue").rglob("*") if path.is_file())
        (index,) = (folder / "index").iterdir()
        return [*((str(path.relative_to(folder)), path.read_bytes()) for path in queues), ("index", index.read_bytes())]

    assert contents(small) == contents(again)


def test_each_record_is_judged_once(source: Path, tmp_path: Path) -> None:
    judged: list[int] = []

    def keep(message: StoredMessage) -> bool:
        judged.append(message.physical_offset)
        return True

    extract(str(source), str(tmp_path / "small"), keep)
    assert judged == [one.physical_offset for one in messages(source)]


def test_a_log_that_loses_a_file_meanwhile(tmp_path: Path) -> None:
    """What was read before is copied, and a file that comes later is an error."""
    path = tmp_path / "store"
    with MessageStore.open(path, StoreConfig.tiny(commitlog_file_size=8 << 10)) as store:
        for number in range(60):
            store.append(Message("T", b"x" * 500, keys=f"k{number}"))
    first, second, *_, last = sorted((path / "commitlog").iterdir())

    def copy_without(lost: Path) -> int:
        def keep(message: StoredMessage) -> bool:
            if message.physical_offset >= int(second.name):
                lost.unlink(missing_ok=True)
            return True

        return extract(str(path), str(tmp_path / "small"), keep).messages

    assert copy_without(first) == 60
    shutil.rmtree(tmp_path / "small")
    with pytest.raises(CorruptionError, match="No such file"):
        copy_without(last)
    assert sorted(tmp_path.iterdir()) == [path]


def contents(folder: Path) -> dict[str, str]:
    """Return the checksums of all files; the name of the index is a time."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        "index" if name.startswith("index") else name: hashlib.sha1(path.read_bytes()).hexdigest()
        for name, path in files.items()
    }


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store whose log has many plain records, over several files, and a few of other kinds among them."""
    folder = tmp_path_factory.mktemp("extraction") / "long"
    config = StoreConfig(commitlog_file_size=1 << 20, consumequeue_file_size=20 * 8192)
    with MessageStore.open(folder, config, clock=ManualClock(1_700_000_000_000), background=False) as store:
        for number in range(90):
            topic = SystemTopic.HALF if number == 40 else f"T{number % 3}"
            keys = [str(number), "same"] if number % 5 else ()
            store.append_batch(
                [Message(topic, b"%d" % at, keys=keys, tags="ab"[at % 2]) for at in range(100)], number % 2
            )
    return folder


@many
@pytest.mark.parametrize("step", [1, 3])
def test_many_records_are_copied_like_single_ones(long_log: Path, tmp_path: Path, step: int) -> None:
    places = [message.physical_offset for message in messages(long_log)][::step]
    wanted = set(places)
    together = extract(str(long_log), str(tmp_path / "together"), places)
    one_by_one = extract(str(long_log), str(tmp_path / "singly"), lambda message: message.physical_offset in wanted)
    assert contents(tmp_path / "together") == contents(tmp_path / "singly")
    assert together[1:] == one_by_one[1:]
    assert not verify(tmp_path / "together").damage


@pytest.mark.slow
def test_many_records_are_rescued_from_around_damage(long_log: Path, tmp_path: Path) -> None:
    shutil.copytree(long_log, tmp_path / "damaged")
    before = messages(long_log)
    lost = before[5_000]
    file = sorted((tmp_path / "damaged/commitlog").iterdir())[lost.physical_offset >> 20]
    with file.open("r+b") as log:
        log.seek((lost.physical_offset & (1 << 20) - 1) + record.BODY_AT)
        log.write(b"x")
    rescued = rescue(str(tmp_path / "damaged"), str(tmp_path / "new"))
    assert (rescued.records, rescued.gaps) == (len(before) - 1, 1)
    assert list(map(compared, messages(tmp_path / "new"))) == list(map(compared, before[:5_000] + before[5_001:]))
    assert not verify(tmp_path / "new").damage


def test_settings_of_topics_keep_their_order(tmp_path: Path) -> None:
    names = [f"topic{number}" for number in range(12)]
    with Broker.open(tmp_path / "store", runner=ManualRunner()) as broker, Producer(broker, "shop") as producer:
        for name in names:
            producer.send(name, b"body")
    extract(str(tmp_path / "store"), str(tmp_path / "all"), lambda _: True)
    copied = BrokerTables.open(str(tmp_path / "all/config")).topics.rows
    assert [name for name in copied if name in names] == names


def test_large_records_are_copied_a_few_at_a_time(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", StoreConfig(commitlog_file_size=64 << 20)) as store:
        for _ in range(80):
            store.append(Message("Topic", bytes(400 << 10)), 0)
    tracemalloc.start()
    try:
        copied = rescue(str(tmp_path / "store"), str(tmp_path / "new"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (copied.records, copied.gaps) == (80, 0)
    assert peak < 80 << 20, "a read of a settings file reserves 64 MiB"


def test_a_record_that_fits_into_no_file_is_left_out_alone(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "store", StoreConfig(commitlog_file_size=1 << 20)) as store:
        for number in range(100):
            store.append(Message("Topic", bytes(40_000 if number == 50 else 10)), 0)
    copied = rescue(str(tmp_path / "store"), str(tmp_path / "new"), StoreConfig(commitlog_file_size=1 << 15))
    assert (copied.records, copied.gaps) == (99, 1)
    assert [len(message.body) for message in messages(tmp_path / "new")] == [10] * 99


def test_topics_that_are_read_alike_share_their_queues(tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "damaged", StoreConfig.tiny()) as store:
        places = [store.append(Message("Topic", b"%d" % number), 0).physical_offset for number in range(4)]
    with (tmp_path / "damaged/commitlog" / f"{0:020d}").open("r+b") as log:
        for place, byte in zip(places[1:3], (b"\x80", b"\x81"), strict=True):  # neither is UTF-8
            log.seek(place + record.BODY_AT + 1 + len("1Topi"))
            log.write(byte)
    rescue(str(tmp_path / "damaged"), str(tmp_path / "new"))
    with MessageStore.open(tmp_path / "new", read_only=True) as store:
        assert {name: queue.max_offset for name, queue in store.queues.items()} == {
            ("Topic", 0): 2,
            ("Topi\ufffd", 0): 2,
        }


def test_bytes_behind_a_file_of_the_log_hide_no_record(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with MessageStore.open(path, StoreConfig.tiny(commitlog_file_size=8 << 10)) as store:
        for number in range(60):
            store.append(Message("T", b"x" * 500, keys=f"k{number}"))
    before = [compared(one) for one in messages(path)]
    first, *_ = sorted((path / "commitlog").iterdir())
    with first.open("ab") as file:
        file.write(b"rubbish" * 400)  # these bytes have the physical offsets of the next file
    assert extract(str(path), str(tmp_path / "small"), lambda _: True).messages == 60
    assert [compared(one) for one in messages(tmp_path / "small")] == before


def test_messages_of_batches_take_more_room_than_the_batches(tmp_path: Path) -> None:
    one = record.Record(topic="T", queue_id=0, queue_offset=0, body=b"", store_timestamp_ms=1_700_000_000_000)
    write_log(tmp_path / "store", [batch_record(one, [BatchItem(b"%d" % at, 0, b"") for at in range(2_000)])])
    (tmp_path / "store/batchconsumequeue/T/0").mkdir(parents=True)
    size = sum(file.stat().st_size for file in (tmp_path / "store/commitlog").iterdir())
    small = extract(str(tmp_path / "store"), str(tmp_path / "small"), lambda _: True)
    assert small.messages == 2_000
    assert small.bytes > 2 * size
    assert [message.body for message in messages(tmp_path / "small")] == [b"%d" % at for at in range(2_000)]
    assert not verify(tmp_path / "small").damage


def test_a_small_store_takes_more_messages(source: Path, tmp_path: Path) -> None:
    extract(str(source), str(tmp_path / "small"), lambda one: one.topic == "orders")
    with Broker.open(tmp_path / "small") as broker, Producer(broker, "shop") as producer:
        for number in range(200):
            producer.send("orders", f"more {number}".encode())
        assert len(list(broker.messages("orders"))) == 241


def test_what_can_not_be_extracted_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^redact: expected bodies or properties"):
        extract(str(source), str(tmp_path / "small"), lambda _: True, redact=["keys"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"^target: .* is in the store"):
        extract(str(source), str(source / "small"), lambda _: True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(StoreIOError, match="it is not empty"):
        extract(str(source), str(tmp_path / "full"), lambda _: True)
    shutil.copytree(source, tmp_path / "damaged")
    log = next((tmp_path / "damaged" / "commitlog").iterdir())
    raw = bytearray(log.read_bytes())
    raw[95] ^= 1
    log.write_bytes(raw)
    with pytest.raises(CorruptionError, match="run librmq salvage first"):
        extract(str(tmp_path / "damaged"), str(tmp_path / "small"), lambda _: True)
    assert not (tmp_path / "small").exists()


class FullDisk(DiskFiles):
    """A disk that gets full before the key index of the new store is there."""

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        if "/new.part/index/" in file.path:
            raise StoreIOError("flush", file.path, OSError(errno.ENOSPC, "no space left"))
        super().flush(file, begin, end)


def extract_all(source: Path, target: Path, files: DiskFiles) -> None:
    extract(str(source), str(target), lambda _: True, files=files)


def rescue_all(source: Path, target: Path, files: DiskFiles) -> None:
    rescue(str(source), str(target), files=files)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the mappings of a process")
@pytest.mark.parametrize("make", [extract_all, rescue_all])
def test_a_full_disk_leaves_no_mapping(
    source: Path, tmp_path: Path, make: Callable[[Path, Path, DiskFiles], None]
) -> None:
    """Else the blocks of the deleted files stay used until the garbage collector runs."""
    gc.disable()
    try:
        with pytest.raises(StoreIOError, match="no space left"):
            make(source, tmp_path / "new", FullDisk())
        assert f"{tmp_path}/new.part/" not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
