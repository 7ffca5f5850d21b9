"""A read compares a record with where it was found, and derives an entry that disagrees from the log again."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from librmq import Message, MessageStore, StoreConfig
from librmq.cli import main
from librmq.clock import ManualClock
from librmq.columns import reader
from librmq.errors import CorruptionError, RmqError
from librmq.message import StoredMessage, record
from librmq.store import verify
from librmq.store.engine import _comparison, saved_state
from librmq.store.engine.read import ReadResult, read_queue
from tests.budget import many, some
from tests.stores import START_MS, from_disk

CONFIG = StoreConfig.tiny()
COUNT = 60
QUEUE = "consumequeue/orders/0/00000000000000000000"
LOG = "commitlog/00000000000000000000"
Sent = list[tuple[int, int, str, bytes]]
"""Queue offset, physical offset, tag and body of each message of queue 0."""


def fill(folder: Path, *, closed: bool = True) -> Path:
    """Make a store whose log has two queues of one topic and another topic, in turns, all of records of one size."""
    store = MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS))
    for number in range(COUNT):
        for topic, queue_id in (("orders", 0), ("orders", 1), ("others", 0)):
            store.append(Message(topic, b"%s %d %03d" % (topic.encode(), queue_id, number), tags="paid"), queue_id)
    store.flush()
    store.close() if closed else store.abandon()
    return folder


@pytest.fixture(scope="module", params=["closed", "killed"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("sound") / "store", closed=request.param == "closed")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "store"))


def is_killed(folder: Path) -> bool:
    return (folder / "abort").exists()


def flip(folder: Path, file: str, bit: int) -> None:
    with (folder / file).open("r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


@contextmanager
def flipped(folder: Path, file: str, bit: int) -> Iterator[None]:
    """Flip a bit of a file, and flip it back."""
    flip(folder, file, bit)
    yield
    flip(folder, file, bit)


def seen(message: StoredMessage) -> tuple[int, int, str, bytes]:
    return message.queue_offset, message.physical_offset, message.tags or "", message.body


def messages(folder: Path, *, read_only: bool = True) -> Sent:
    with MessageStore.open(folder, read_only=read_only, clock=ManualClock(START_MS)) as store:
        return [seen(message) for message in store.messages("orders", 0)]


def by_filter(folder: Path) -> Sent:
    """Read by a filter, whose way through the queue is another."""
    found: Sent = []
    with MessageStore.open(folder, read_only=True) as store:
        matching, at, end = store.matching(sql="a IS NULL"), 0, store.queue_range("orders", 0)[1]
        while at < end:
            result = store.read("orders", 0, at, matching=matching)
            found += map(seen, result.messages)
            at = result.next_offset
    return found


def places(folder: Path) -> list[int]:
    return [place for _, place, _, _ in messages(folder)]


# ---- entries


@many
@pytest.mark.parametrize(("number", "step"), [(0, 7), (1, 7), (30, 1), (COUNT - 1, 7)])
def test_an_entry_with_any_flipped_bit_of_its_place_leads_to_its_message(folder: Path, number: int, step: int) -> None:
    sent = messages(folder)
    assert len(sent) == COUNT
    for bit in range(20 * 8 * number, (20 * number + 12) * 8, step):
        with flipped(folder, QUEUE, bit):
            assert messages(folder) == sent
            assert by_filter(folder) == sent


def test_a_read_only_store_tells_once_and_changes_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)).close()  # a recovery in memory would correct it
    flip(folder, QUEUE, 8 * (20 * 30 + 6))
    before = from_disk(folder)
    with MessageStore.open(folder, read_only=True) as store:
        for _ in range(2):
            assert len([*store.messages("orders", 0)]) == COUNT
    assert caplog.text.count("librmq verify") == 1
    assert "entry 30 of orders/0" in caplog.text
    assert from_disk(folder) == before


@many
@pytest.mark.parametrize("begin", [0, 20])
@pytest.mark.parametrize("count", [1, 5, COUNT])
def test_entries_of_zeros_are_derived_together(folder: Path, begin: int, count: int) -> None:
    """All of them behind the first: a queue ends at an entry of zeros only where the store says so."""
    sent = messages(folder)
    data = bytearray((folder / QUEUE).read_bytes())
    end = min(begin + count, COUNT - 1)
    data[20 * begin : 20 * end] = bytes(20 * (end - begin))
    (folder / QUEUE).write_bytes(data)
    assert messages(folder) == sent


def test_two_swapped_entries_are_put_right(folder: Path) -> None:
    sent = messages(folder)
    data = bytearray((folder / QUEUE).read_bytes())
    data[100:120], data[120:140] = data[120:140], data[100:120]
    (folder / QUEUE).write_bytes(data)
    assert messages(folder) == sent
    assert by_filter(folder) == sent


@pytest.mark.parametrize("distance", [1, 2])
def test_an_entry_of_a_record_of_another_queue_leads_to_its_own(folder: Path, distance: int) -> None:
    """Which has its size and its queue offset, and is of the same topic or of another."""
    sent = messages(folder)
    with MessageStore.open(folder, read_only=True) as store:
        size = store.read("orders", 0, 7, 1).messages[0].size
    data = bytearray((folder / QUEUE).read_bytes())
    data[140:148] = (sent[7][1] + distance * size).to_bytes(8, "big")
    (folder / QUEUE).write_bytes(data)
    assert messages(folder) == sent


def test_a_writer_corrects_the_entry_and_the_rest_of_its_queue(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)).close()  # a recovery would correct them too
    right = (folder / QUEUE).read_bytes()
    for number in (3, 11, 40, 50):
        flip(folder, QUEUE, 8 * (20 * number + 5))
    clock = ManualClock(START_MS)
    with MessageStore.open(folder, CONFIG, clock=clock) as store:
        assert store.read("orders", 0, 3, 1).messages[0].queue_offset == 3
        assert (folder / QUEUE).read_bytes() != right
        due_ms: int | None = clock.now_ms()
        while due_ms is not None and due_ms < START_MS + 60_000:
            due_ms = store.run_due(due_ms)
        assert (folder / QUEUE).read_bytes() == right
    assert caplog.text.count("librmq verify") == 1
    assert verify(folder).sound


def test_a_queue_that_a_reader_adds_as_its_comparison_ends_is_compared_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins: list[int] = []

    def read(*arguments: Any) -> ReadResult:
        begins.append(arguments[3])
        if len(begins) == 2:
            comparison.add(("orders", 0))
        return read_queue(*arguments)

    monkeypatch.setattr(_comparison, "read_queue", read)
    with MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)) as store:
        comparison = _comparison.Comparison(store.appender.open_parts(), store.writer.checks)
        comparison.add(("orders", 0))
        while comparison.run_due(START_MS) is not None:
            pass
    assert begins == [0, 32, 0, 32]


def test_a_corrected_entry_is_in_the_file_after_the_close(folder: Path) -> None:
    MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)).close()
    right = (folder / QUEUE).read_bytes()
    flip(folder, QUEUE, 8 * (20 * 3 + 5))
    with MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)) as store:
        assert len(store.read("orders", 0, 0).messages) == 32
    assert (folder / QUEUE).read_bytes() == right


def test_after_a_kill_older_entries_are_compared_in_the_background(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery begins at the mark of the last flush, and leaves out the queues before it."""
    monkeypatch.setattr(saved_state, "WORTH_A_MARK", 1)
    folder, clock, config = tmp_path / "store", ManualClock(START_MS), StoreConfig.tiny(commitlog_file_size=4096)
    store = MessageStore.open(folder, config, clock=clock)
    bodies = [b"%d" % number for number in range(2 * COUNT)]
    for number, body in enumerate(bodies):
        store.append(Message("orders", body), number % 2)
        clock.advance(seconds=1)
    store.flush()
    store.abandon()
    right = (folder / QUEUE).read_bytes()
    for number in (0, 17, 30):
        flip(folder, QUEUE, 8 * (20 * number + 6))
    with MessageStore.open(folder, config, clock=clock) as store:
        assert "are compared with the log in the background" in caplog.text
        due_ms: int | None = clock.now_ms()
        while due_ms is not None and due_ms < clock.now_ms() + 60_000:
            due_ms = store.run_due(due_ms)
        assert (folder / QUEUE).read_bytes() == right  # before any read, which compares the rest of its queue
        assert [message.body for message in store.messages("orders", 0)] == bodies[::2]
    assert verify(folder).sound


@pytest.mark.parametrize("mib", [0, 16], ids=["short", "long"])
@pytest.mark.parametrize("closed_before", [True, False])
def test_last_entries_that_became_zeros_after_a_kill(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mib: int, closed_before: bool
) -> None:
    """As zeros they look like entries that no record has written yet; the log has the records, some files before its
    end. A long log is searched at the opening if a close has noted where the queue ended, else in the background."""
    folder, clock = tmp_path / "store", ManualClock(START_MS)
    config = StoreConfig.tiny(commitlog_file_size=2 << 20 if mib else 4096, max_message_size=1 << 20, max_index_num=4)
    store, size = MessageStore.open(folder, config, clock=clock), 1_000_000 if mib else 100
    bodies = [b"%d" % number for number in range(20)]
    for number, body in enumerate(bodies):
        store.append(Message("orders", body), number % 2)
    if closed_before:
        store.close()
        store = MessageStore.open(folder, config, clock=clock)
    for _ in range(mib or 100):
        store.append(Message("others", bytes(size), keys="k"))  # full files of the index, which a recovery keeps
        clock.advance(seconds=1)
    store.flush()
    store.abandon()
    with MessageStore.open(folder, read_only=True) as store:
        assert not store.condition.note  # the mark of the flush says where queues ended
    with (folder / QUEUE).open("r+b") as opened:
        opened.seek(20 * 7)
        opened.write(bytes(20 * 3))
    found_at_opening = closed_before or not mib
    (folder / "librmq/flushed.json").unlink(missing_ok=True)  # it notes the queues too
    with MessageStore.open(folder, read_only=True) as store:
        assert ("were compared with the log from" in store.condition.note) != found_at_opening
        if found_at_opening:
            assert [message.body for message in store.messages("orders", 0)] == bodies[::2]
    with MessageStore.open(folder, config, clock=clock) as store:
        due_ms: int | None = clock.now_ms()
        while due_ms is not None and due_ms < clock.now_ms() + 60_000:
            due_ms = store.run_due(due_ms)
        if found_at_opening:
            assert [message.body for message in store.messages("orders", 0)] == bodies[::2]
        else:
            assert "orders/0 lacks the entries of messages that the log has" in caplog.text
            store.recover()
            assert [message.body for message in store.messages("orders", 0)] == bodies[::2]
    assert verify(folder).sound


# ---- records


def field_bits(first: int, last: int) -> range:
    return range(8 * first, 8 * (last + 1))


@many
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("queue id", field_bits(record.QUEUE_ID_AT, record.QUEUE_ID_AT + 3)),
        ("queue offset", field_bits(record.QUEUE_OFFSET_AT, record.QUEUE_OFFSET_AT + 7)),
        ("physical offset", field_bits(record.PHYSICAL_OFFSET_AT, record.PHYSICAL_OFFSET_AT + 7)),
    ],
)
@pytest.mark.parametrize(("number", "step"), [(0, 5), (30, 1), (COUNT - 1, 5)])
def test_the_place_asked_for_counts_and_not_the_word_of_the_record(
    folder: Path, name: str, bits: range, number: int, step: int
) -> None:
    MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)).close()  # a recovery would correct it
    sent = messages(folder)
    for bit in bits[::step]:
        with flipped(folder, LOG, 8 * sent[number][1] + bit):
            assert messages(folder) == sent, (name, bit)
            assert by_filter(folder) == sent, (name, bit)


def test_a_flipped_bit_of_its_topic_leaves_a_message_in_its_queue(folder: Path) -> None:
    MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)).close()
    sent = messages(folder)
    with MessageStore.open(folder, read_only=True) as store:
        message = store.read("orders", 0, 30, 1).messages[0]
    _, _, begin, end, _, _ = message.frame
    for bit in some(range(8 * (message.physical_offset + begin), 8 * (message.physical_offset + end))):
        with flipped(folder, LOG, bit):
            assert messages(folder) == sent
            with MessageStore.open(folder, read_only=True) as store:
                assert {message.topic for message in store.messages("orders", 0)} == {"orders"}


def read_all(folder: Path, *, filtered: bool = False) -> tuple[Sent, RmqError]:
    """Read up to an error, or to damage at which the log of a killed store ends; return what came before it."""
    found: Sent = []
    with MessageStore.open(folder, read_only=True) as store:
        matching, at = store.matching(sql="a IS NULL") if filtered else None, 0
        try:
            while len(found) < COUNT:
                result = store.read("orders", 0, at, matching=matching)
                found += map(seen, result.messages)
                if at == result.next_offset:
                    (damage,) = store.condition.damage
                    return found, CorruptionError(damage.file, damage.offset, damage.kind, damage.what)
                at = result.next_offset
        except RmqError as error:
            return found, error
    raise AssertionError("expected an error")


@pytest.mark.parametrize("filtered", [False, True])
def test_a_body_with_any_flipped_bit_is_an_error_behind_the_messages_before_it(folder: Path, filtered: bool) -> None:
    sent = messages(folder)
    body_at = sent[30][1] + record.BODY_AT
    bits = some(range(8 * body_at, 8 * (body_at + len(sent[30][3])), 7))
    for bit in [*bits, 8 * (sent[30][1] + record.BODY_CRC_AT)]:
        with flipped(folder, LOG, bit):
            found, error = read_all(folder, filtered=filtered)
            assert found == sent[:30]
            assert "body checksum" in str(error)
            with MessageStore.open(folder, read_only=True) as store:  # the others are read
                rest = [] if is_killed(folder) else sent[31:]
                assert [seen(message) for message in store.messages("orders", 0, 31)] == rest


@many
@pytest.mark.parametrize("at", [0, 3, 5, record.BODY_AT - 1, record.BODY_AT - 4])
def test_a_record_whose_frame_is_damaged_is_an_error_with_its_place(folder: Path, at: int) -> None:
    sent = messages(folder)
    for bit in range(8):
        with flipped(folder, LOG, 8 * (sent[30][1] + at) + bit):
            found, error = read_all(folder)
            assert found == sent[:30]
            assert isinstance(error, CorruptionError)
            assert error.offset == sent[30][1]
            assert error.file.endswith(LOG)
            assert is_killed(folder) or "librmq verify" in str(error)


def test_a_message_that_the_log_does_not_have_is_an_error_at_its_entry(folder: Path) -> None:
    """Two faults at once: the entry leads elsewhere, and its record names another topic."""
    MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)).close()
    sent = messages(folder)
    with MessageStore.open(folder, read_only=True) as store:
        message = store.read("orders", 0, 30, 1).messages[0]
    flip(folder, LOG, 8 * (message.physical_offset + message.frame[2]) + 1)
    flip(folder, QUEUE, 8 * (20 * 30 + 7))
    found, error = read_all(folder)
    assert found == sent[:30]
    assert isinstance(error, CorruptionError)
    assert (error.kind, error.offset) == ("entry", 20 * 30)


@many
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("at", [record.BODY_AT + 2, record.BODY_CRC_AT, 0, 5])
def test_a_search_for_a_damaged_record_is_an_error(tmp_path: Path, at: int, closed: bool) -> None:
    """Not an empty answer: by offset id, by unique id and by key, in Python and in commands."""
    folder = tmp_path / "store"
    store = MessageStore.open(folder, CONFIG)
    results = [
        store.append(Message("orders", b"%d coats" % number, keys=f"k{number}", unique_key=f"{number:032X}"))
        for number in range(9)
    ]
    offset_id = store.read("orders", 0, 4, 1).messages[0].offset_id
    store.flush()
    store.close() if closed else store.abandon()
    flip(folder, LOG, 8 * (results[4].physical_offset + at))
    with MessageStore.open(folder, read_only=True) as store:
        assert store.find_by_id("no such id") == []
        assert [message.body for message in store.find_by_id(f"{3:032X}")] == [b"3 coats"]
        searches = (
            partial(store.find_by_id, offset_id),
            partial(store.find_by_id, f"{4:032X}"),
            partial(store.find_by_key, "orders", "k4"),
        )
        for search in searches:
            if closed:
                with pytest.raises(CorruptionError) as raised:
                    search()
                assert raised.value.offset == results[4].physical_offset
            else:  # what is read of a killed log ends there
                assert search() == []
        assert closed or [damage.offset for damage in store.condition.damage] == [results[4].physical_offset]
    for options in (["--id", offset_id], ["--id", f"{4:032X}"], ["--topic", "orders", "--key", "k4"]):
        assert main(["query", str(folder), *options]) == 1


@pytest.mark.parametrize("field", ["queue_id", "queue_offset", "physical_offset", "topic"])
def test_a_walk_over_the_log_says_where_a_record_contradicts_its_place(
    folder: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`librmq show` without a topic asks no queue."""
    assert main(["show", str(folder)]) == 0
    assert not capsys.readouterr().err
    at = record.BODY_AT + len(b"orders 0 030") + 1 if field == "topic" else record.span("size", field) - 1
    flip(folder, LOG, 8 * (places(folder)[30] + at))
    main(["show", str(folder)])
    assert "librmq verify" in capsys.readouterr().err


def test_the_checksum_of_a_whole_record_is_compared(tmp_path: Path) -> None:
    """RocketMQ 5.1.5 and later can put one last into the properties, by which no field can change unseen."""
    folder = tmp_path / "store"
    properties = b"TAGS\1paid\2region\1eu\2__CRC32#\1" + bytes(10) + b"\2"
    with MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)) as store:
        results = [store.append(Message("orders", b"%d" % n), properties_raw=properties) for n in range(3)]
    log = bytearray((folder / LOG).read_bytes())
    for stored in results:
        at = stored.physical_offset + stored.size - 20
        checksum = zlib.crc32(log[stored.physical_offset : at]) & 0x7FFFFFFF
        log[at + 9 : at + 19] = f"{checksum:010}".encode()[::-1]
    (folder / LOG).write_bytes(log)
    MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)).close()  # notes how the log ends now

    def records() -> list[bytes]:
        with MessageStore.open(folder, read_only=True) as store:
            messages = list(store.messages("orders"))
            assert [message.body for message in messages] == [b"0", b"1", b"2"]  # pure Python checks it here
            return [message.raw for message in messages]

    sent = records()
    assert verify(folder).sound
    begin, size = results[1].physical_offset, results[1].size
    name = {*range(size - 20, size - 11), size - 1}
    for bit in some(range(0, 8 * size, 13)):
        with flipped(folder, LOG, 8 * begin + bit):
            if bit // 8 in name:
                continue  # without the property there is no such checksum
            try:
                assert records() == sent, bit
            except RmqError:
                assert not verify(folder).sound
                with pytest.raises(RmqError):
                    reader(str(folder), topic="orders", columns=["body", "properties"]).read_all()


# ---- queues that a damaged entry ends


@many
@pytest.mark.parametrize("files", ["small", "large"])
@pytest.mark.parametrize(
    ("number", "value"), [(0, 1 << 63), (58, 1 << 63), (59, 1 << 63), (59, 1 << 50), (0, 0), (58, 0)]
)
def test_after_a_kill_a_damaged_entry_ends_no_queue(tmp_path: Path, number: int, value: int, files: str) -> None:
    """A recovery reads the end of the log, in which this queue has nothing, so only its entries say where it ends."""
    config = StoreConfig.tiny(commitlog_file_size=8 << 10, max_message_size=4 << 10)
    count = COUNT if files == "small" else 4000  # such a queue is not read at once
    clock = ManualClock(START_MS)
    with MessageStore.open(tmp_path / "first", config, clock=clock) as store:
        for message in range(count):
            store.append(Message("orders", b"%d" % message))
        for message in range(400):
            clock.advance(seconds=1)
            store.append(Message("others", b"%d" % message))
        store.flush()
        store.abandon()
    folder = Path(shutil.copytree(tmp_path / "first", tmp_path / "store"))  # in which no mark of a flush counts
    begin = 20 * (count - COUNT + number) % config.consumequeue_file_size
    file = sorted((folder / "consumequeue/orders/0").iterdir())[-1]
    with file.open("r+b") as opened:
        opened.seek(begin)
        entry = opened.read(20)
        opened.seek(begin)
        opened.write((int.from_bytes(entry) ^ value << 96).to_bytes(20) if value else bytes(20))
    for read_only in (True, False):
        with MessageStore.open(folder, read_only=read_only) as store:
            assert [message.body for message in store.messages("orders", 0)] == [b"%d" % n for n in range(count)]


def test_the_last_record_of_a_closed_store_is_cut_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "first")
    folder = Path(shutil.copytree(tmp_path / "first", tmp_path / "store"))
    with MessageStore.open(folder, read_only=True) as store:
        *_, last = store
    flip(folder, LOG, 8 * (last.physical_offset + record.BODY_AT))
    (folder / "lock").touch()  # as a copy, or as a broker does that has run meanwhile
    caplog.clear()
    with MessageStore.open(folder, clock=ManualClock(START_MS)) as store:
        assert store.log.end == last.physical_offset
    assert f"it reached from 0 to {last.physical_offset + last.size} at the last close" in caplog.text


# ---- times


@many
@pytest.mark.parametrize("is_known", [True, False], ids=["order known", "order unknown"])
@pytest.mark.parametrize(("file", "step"), [(QUEUE, 8 * 20 + 3), (LOG, 613)], ids=["queue", "log"])
def test_a_search_by_time_passes_no_damaged_message(tmp_path: Path, file: str, step: int, is_known: bool) -> None:
    """Only the damaged one comes before what was stored then. A changed time, or where it is, is not noticed."""
    clock = ManualClock(START_MS)
    with MessageStore.open(tmp_path, CONFIG, clock=clock) as store:
        for number in range(COUNT):
            for topic in ("orders", "others"):
                store.append(Message(topic, b"%03d" % number))
            clock.advance(seconds=1)
        begins = [message.physical_offset for message in store]
        end = {QUEUE: 20 * COUNT, LOG: store.log.end}[file]
    if not is_known:
        (tmp_path / "librmq" / "closed.json").unlink()
    without_check = range(record.span("size", "physical_offset"), record.span("size", "store_timestamp"))
    for bit in some(range(0, 8 * end, step)):
        if file == LOG and bit // 8 - max(begin for begin in begins if begin <= bit // 8) in without_check:
            continue
        with flipped(tmp_path, file, bit), MessageStore.open(tmp_path, read_only=True) as store:
            for number in range(0, COUNT, 7):
                time_ms = START_MS + 1000 * number
                first, nearest = (f("orders", 0, time_ms) for f in (store.first_offset_from, store.queue_offset_at))
                assert max(first, nearest) <= number, (bit, number, first, nearest)
                assert min(first, nearest) >= number - 1 or store.condition.damage, (bit, number, first, nearest)
