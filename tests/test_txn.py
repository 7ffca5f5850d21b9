"""Transactions: prepare, end, check and discard them, and end them twice."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.errors import (
    DiskFullError,
    FlushFailedError,
    MessageIllegalError,
    StoreClosedError,
    StoreIOError,
    TransactionRefusedError,
)
from librmq.files._memory import MemoryFiles
from librmq.message import record
from librmq.message.message import Message, StoredMessage
from librmq.message.properties import encode_properties
from librmq.message.topics import SystemTopic
from librmq.scheduling.half_messages import CHECK_GROUP, Checked, EndedHalves
from librmq.store import AppendResult, MessageStore
from librmq.store.format._keyindex import KeyIndex
from librmq.store.format.broker_tables import BrokerTables
from librmq.txn import CheckBack, TransactionConfig, Transactions
from tests.bytime import ByTime
from tests.stores import ROOT, SMALL, START_MS, died
from tests.transactions_of_4 import TransactionsOf4

Half = AppendResult


class Desk(ByTime):
    """Transactions of a store in memory, with the checks sent to producers and the discarded halves."""

    def __init__(
        self,
        config: StoreConfig = SMALL,
        *,
        files: MemoryFiles | None = None,
        at_ms: int = START_MS,
        of_4: bool = False,
        settings: TransactionConfig | None = None,
        is_reachable: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(config, files, at_ms)
        self.offsets = BrokerTables.open(f"{ROOT}/config", files=self.files)
        self.asked: list[CheckBack] = []
        self.discarded: list[tuple[StoredMessage, int]] = []
        self.topics: list[str] = []
        kind = TransactionsOf4 if of_4 else Transactions
        self.transactions = kind(
            self.store, self.offsets, settings, make_topic=self.topics.append, is_reachable=is_reachable
        )

    def prepare(self, number: int = 0, **changes: Any) -> Half:
        """Store a half message that is born now."""
        unique_key = changes.pop("unique_key", f"U{number}")
        message = Message("T", b"%d" % number, tags="t", unique_key=unique_key, flag=changes.pop("flag", 0))
        message.properties |= {"TRAN_MSG": "true", "PGROUP": "P", **changes.pop("properties", {})}
        return self.transactions.prepare(message, 3, **changes)

    def commit(self, half: Half | StoredMessage, group: str = "P") -> AppendResult | None:
        return self.transactions.commit(half.physical_offset, half.queue_offset, group)

    def rollback(self, half: Half | StoredMessage) -> None:
        self.transactions.rollback(half.physical_offset, half.queue_offset, "P")

    def check(self, later_ms: int = 10_000, **settings: Any) -> list[StoredMessage]:
        """Run a whole pass ``later_ms`` from now; return the copies that producers are asked about."""
        self.clock.advance(ms=later_ms)
        self.transactions.check.run_pass(self.clock.now_ms(), TransactionConfig(**settings))
        return [question.half for question in self._note_checked().questions]

    def run_due(self, now_ms: int) -> int | None:
        due = self.transactions.check.run_due(now_ms)
        self._note_checked()
        return due

    def _note_checked(self) -> Checked:
        checked = self.transactions.check.checked
        self.asked += checked.questions
        self.discarded += checked.discarded
        return checked

    def checks_to(self, at_ms: int) -> list[int]:
        """Advance the clock to ``at_ms`` after the start; return the times at which a check was due."""
        before = len(self.runs)
        self.pass_to(at_ms)
        return self.runs[before:]

    def of(self, topic: str) -> list[StoredMessage]:
        return [message for message in self.store if message.topic == topic]

    def bodies(self) -> list[bytes]:
        return [message.body for message in self.of("T")]

    def ops(self) -> list[bytes]:
        return [message.body for message in self.of(SystemTopic.OP)]

    def progress(self) -> tuple[int | None, int | None]:
        found = [self.offsets.consumer_offset(topic, CHECK_GROUP, 0) for topic in (SystemTopic.HALF, SystemTopic.OP)]
        return found[0], found[1]

    def after_crash(self, **more: Any) -> Desk:
        return Desk(files=died(self.files), at_ms=self.clock.now_ms(), **more)

    def with_index_without(self, *records: Half | StoredMessage) -> Desk:
        """Close the store, and open it again after a broker has made an index that lacks some records."""
        lacking, stored = {record.physical_offset for record in records}, list(self.store)
        self.offsets.persist(self.clock.now_ms())
        self.store.close()
        files = died(self.files)
        files.delete(f"{ROOT}/librmq/closed.json")
        for entry in files.list(f"{ROOT}/index"):
            files.delete(f"{ROOT}/index/{entry.name}")
        slots, entries = SMALL.max_hash_slot_num, SMALL.max_index_num
        with KeyIndex.open(
            f"{ROOT}/index", slots=slots, entries=entries, files=files, now_ms=self.clock.now_ms
        ) as index:
            for message in stored:
                is_indexed = message.unique_key and message.physical_offset not in lacking
                keys = [str(message.unique_key)] if is_indexed else []
                index.append(message.topic, keys, message.physical_offset, message.store_timestamp_ms)
        return Desk(files=files, at_ms=self.clock.now_ms())


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- prepared and ended


def test_a_half_message_is_invisible_to_readers(desk: Desk) -> None:
    half = desk.prepare(7, sys_flag=record.TRANSACTION_PREPARED, born_timestamp_ms=5, reconsume_times=2)
    (stored,) = desk.store
    assert (stored.topic, stored.queue_id, stored.queue_offset) == (SystemTopic.HALF, 0, half.queue_offset)
    assert (stored.sys_flag, stored.born_timestamp_ms, stored.reconsume_times) == (0, 5, 2)
    assert stored.properties["REAL_TOPIC"] == "T"
    assert stored.properties["REAL_QID"] == "3"


def test_a_half_that_no_topic_can_take(desk: Desk) -> None:
    with pytest.raises(MessageIllegalError):
        desk.transactions.prepare(Message("a/b", b""), 0)
    assert desk.store.log.end == 0


@pytest.mark.parametrize("is_reopened", [False, True])
def test_commit_writes_the_message_and_an_op(desk: Desk, is_reopened: bool) -> None:
    desk.prepare(0)
    half = desk.prepare(7, flag=9, born_timestamp_ms=5, born_host=("10.0.0.1", 2))
    if is_reopened:
        desk = desk.after_crash()
    final = desk.commit(half)
    _, stored, message, op = desk.store
    assert final is not None
    assert final.physical_offset == message.physical_offset
    assert (message.topic, message.queue_id, message.body, message.flag) == ("T", 3, b"7", 9)
    assert message.sys_flag == record.TRANSACTION_COMMIT
    assert message.prepared_transaction_offset == half.physical_offset
    assert (message.born_timestamp_ms, message.born_host) == (5, ("10.0.0.1", 2))
    assert message.properties_raw == stored.properties_raw
    assert (op.topic, op.queue_id, op.body, op.tags) == (SystemTopic.OP, 0, b"1", "d")
    assert op.properties == {"TAGS": "d", "WAIT": "true"}


@pytest.mark.parametrize(("files_of_5", "body"), [((), b"0"), (("timerwheel",), b"0"), (("brokerIdentity",), b"0,")])
def test_an_op_has_the_form_of_5_only_in_its_store(desk: Desk, files_of_5: tuple[str, ...], body: bytes) -> None:
    half = desk.prepare(0)
    for name in files_of_5:
        desk.files.write(f"{ROOT}/{name}", b"x")
    later = desk.after_crash()
    later.commit(half)
    assert later.ops() == [body]
    assert later.check() == []


@pytest.mark.slow
def test_of_many_open_halves_each_can_be_committed(desk: Desk) -> None:
    halves = [desk.prepare(number) for number in range(1200)]
    for half in halves:
        desk.commit(half)
    assert desk.bodies() == [b"%d" % number for number in range(1200)]


def test_a_delayed_commit_goes_to_the_schedule(desk: Desk) -> None:
    half = desk.store.append(Message(SystemTopic.HALF, b"b"), 0, properties_raw=encode_properties(
        {"PGROUP": "P", "UNIQ_KEY": "u", "REAL_TOPIC": "T", "REAL_QID": "3", "TRAN_MSG": "true", "DELAY": "2"}
    ))  # fmt: skip
    desk.commit(half)
    (waiting,) = desk.of(SystemTopic.SCHEDULE)
    assert waiting.properties == {"PGROUP": "P", "UNIQ_KEY": "u", "REAL_TOPIC": "T", "REAL_QID": "3", "DELAY": "2"}
    assert desk.commit(half) is None
    assert len(desk.of(SystemTopic.SCHEDULE)) == 1


@pytest.mark.parametrize(
    ("changes", "group", "said"),
    [
        ({}, "other", "producer group wrong"),
        ({"queue_offset": 1}, "P", "state table offset wrong"),
        ({"physical_offset": 1}, "P", "Find prepared"),
        ({"physical_offset": -1}, "P", "Find prepared"),
        ({"physical_offset": 1 << 40}, "P", "Find prepared"),
    ],
)
def test_an_end_of_something_else_is_refused(desk: Desk, changes: dict[str, Any], group: str, said: str) -> None:
    half = desk.prepare()._replace(**changes)
    before = desk.store.log.end
    for end in (desk.transactions.commit, desk.transactions.rollback):
        with pytest.raises(TransactionRefusedError, match=said) as raised:
            end(half.physical_offset, half.queue_offset, group)
        assert raised.value.code == 1
    assert desk.store.log.end == before


def test_only_half_messages_can_be_committed(desk: Desk) -> None:
    message = Message("T", b"b")
    message.properties["PGROUP"] = "P"
    with pytest.raises(TransactionRefusedError, match="Find prepared"):
        desk.commit(desk.store.append(message, 0))


@pytest.mark.parametrize("properties", [{"REAL_TOPIC": "T"}, {"REAL_TOPIC": "a/b", "REAL_QID": "0"}])
def test_a_half_that_cannot_be_delivered_is_refused(desk: Desk, properties: dict[str, str]) -> None:
    raw = encode_properties({"PGROUP": "P", **properties})
    half = desk.store.append(Message(SystemTopic.HALF, b"b"), 0, properties_raw=raw)
    with pytest.raises(TransactionRefusedError) as raised:
        desk.commit(half)
    assert raised.value.code == 13
    assert desk.ops() == []


# --- ended twice


def test_without_a_unique_id_a_second_end_is_refused(desk: Desk) -> None:
    half = desk.prepare(unique_key=None)
    desk.commit(half)
    with pytest.raises(TransactionRefusedError, match="has ended before"):
        desk.commit(half)
    assert desk.bodies() == [b"0"]


def test_equal_unique_ids_of_two_messages_are_kept_apart(desk: Desk) -> None:
    halves = [desk.prepare(number, unique_key="same", born_timestamp_ms=number) for number in range(2)]
    desk.check()
    desk.commit(halves[0])
    assert desk.commit(halves[1]) is not None
    assert desk.bodies() == [b"0", b"1"]


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("ended_first", [0, 1])
def test_a_half_that_is_sent_again_is_the_same_transaction(desk: Desk, ended_first: int, crashes: bool) -> None:
    """A producer that got no answer to its half sends it again, born later and for another queue."""
    halves = [desk.prepare(born_timestamp_ms=START_MS)]
    desk = desk.after_crash() if crashes else desk
    halves.append(desk.prepare(born_timestamp_ms=START_MS + 3000, properties={"CLUSTER": "c"}))
    assert desk.commit(halves[ended_first]) is not None
    assert desk.commit(halves[1 - ended_first]) is None
    assert (desk.bodies(), desk.check()) == ([b"0"], [])


@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_message_with_the_id_of_a_delivered_one_is_named(
    desk: Desk, is_reopened: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that sends its message once more has to know that a second commit delivers nothing."""
    desk.commit(desk.prepare())
    again = desk.prepare()
    if is_reopened:
        desk = desk.after_crash()
        desk.prepare(1)
    assert desk.commit(again) is None
    (warning,) = (entry.getMessage() for entry in caplog.records if entry.name == "librmq.txn")
    assert warning.endswith("remove UNIQ_KEY to send a message again")


def test_a_rollback_ends_a_half_that_was_sent_twice(desk: Desk) -> None:
    halves = [desk.prepare(born_timestamp_ms=START_MS + number) for number in range(2)]
    desk.rollback(halves[1])
    assert desk.check() == []
    with pytest.raises(TransactionRefusedError):
        desk.commit(halves[0])
    assert desk.bodies() == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_old_coordinates_end_the_copy_too(desk: Desk, end: str) -> None:
    half = desk.prepare(flag=5)
    (copy,) = desk.check()
    getattr(desk, end)(half)
    assert desk.ops() == [b"1"]
    assert desk.check() == []
    assert desk.progress() == (2, 1)
    assert desk.bodies() == ([b"0"] if end == "commit" else [])
    if end == "commit":
        assert desk.commit(copy) is None
    else:
        with pytest.raises(TransactionRefusedError):
            desk.commit(copy)


def test_a_rollback_of_the_copy_is_known_of_the_half(desk: Desk) -> None:
    desk.prepare()
    (half,) = desk.of(SystemTopic.HALF)
    assert not desk.transactions.is_rolled_back(half)
    (copy,) = desk.check()
    assert not desk.transactions.is_rolled_back(half)
    desk.rollback(copy)
    assert desk.transactions.is_rolled_back(half)


def test_a_copy_delivers_the_flag_that_was_sent(desk: Desk) -> None:
    desk.prepare(flag=5)
    (copy,) = desk.check()
    assert copy.flag == 0
    desk.commit(copy)
    assert [message.flag for message in desk.of("T")] == [5]


def test_a_commit_after_the_discard_delivers(desk: Desk) -> None:
    half = desk.prepare()
    for _ in range(3):
        desk.check(check_max=2)
    assert len(desk.of(SystemTopic.CHECK_MAX_TIME)) == 1
    assert desk.commit(half) is not None
    assert desk.commit(half) is None
    assert desk.bodies() == [b"0"]
    assert len(desk.of(SystemTopic.OP)) == 1


# --- crashes between two writes


def fail_once(monkeypatch: pytest.MonkeyPatch, store: MessageStore, topic: str, error: Exception) -> None:
    append, left = store.append, [error]

    def fail(message: Message, *args: Any, **fields: Any) -> Any:
        if message.topic == topic and left:
            raise left.pop()
        return append(message, *args, **fields)

    monkeypatch.setattr(store, "append", fail)


def test_a_crash_between_final_and_op_delivers_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    half = desk.prepare()
    fail_once(monkeypatch, desk.store, SystemTopic.OP, RuntimeError("killed"))
    with pytest.raises(RuntimeError):
        desk.commit(half)
    again = desk.after_crash()
    (copy,) = again.check()
    assert again.commit(copy) is None
    assert again.bodies() == [b"0"]
    assert again.check() == []


def test_a_commit_without_room_for_the_op_is_completed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    half = desk.prepare(unique_key=None)
    fail_once(monkeypatch, desk.store, SystemTopic.OP, DiskFullError("full"))
    with pytest.raises(DiskFullError):
        desk.commit(half)
    assert desk.commit(half) is None
    assert desk.bodies() == [b"0"]
    assert desk.ops() == [b"0"]


def test_a_crash_before_saving_asks_twice_and_delivers_once(desk: Desk) -> None:
    desk.prepare()
    desk.check()
    again = desk.after_crash()
    assert again.progress() == (None, None)
    copies = again.check()
    assert [copy.queue_offset for copy in copies] == [2, 3]  # copies of the half and of its first copy
    again.commit(copies[0])
    assert again.ops() == [b"2", b"3"]
    assert again.commit(copies[1]) is None
    assert again.bodies() == [b"0"]
    assert again.check() == []


def test_progress_is_stored_after_a_flush(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.prepare()
    monkeypatch.setattr(desk.store, "flush", raising(FlushFailedError(OSError())))
    with pytest.raises(FlushFailedError):
        desk.check()
    assert desk.progress() == (None, None)


# --- the check, step by step


def test_a_check_of_nothing(desk: Desk) -> None:
    assert desk.check() == []
    assert desk.progress() == (None, None)
    assert desk.topics == [SystemTopic.HALF]


def test_a_half_without_an_op_is_copied_and_checked(desk: Desk) -> None:
    desk.prepare(flag=5, reconsume_times=2)
    (copy,) = desk.check()
    half, stored = desk.store
    assert stored == copy
    (question,) = desk.asked
    assert (question.group, question.topic, question.check_times) == ("P", "T", 1)
    assert copy.properties == {**half.properties, "TRANSACTION_CHECK_TIMES": "1"}
    assert (copy.topic, copy.queue_offset, copy.body) == (SystemTopic.HALF, 1, half.body)
    assert (copy.born_timestamp_ms, copy.flag, copy.reconsume_times) == (half.born_timestamp_ms, 0, 0)
    assert desk.progress() == (1, None)


def test_a_check_runs_at_a_whole_number(desk: Desk) -> None:
    for check in (desk.transactions.check.run_due, desk.transactions.check.run_pass):
        with pytest.raises(TypeError, match="now_ms: expected milliseconds since 1970, a whole number, found 'x'"):
            check("x")  # type: ignore[arg-type]


@pytest.mark.parametrize("age_h", [0, 100])
def test_any_number_of_ended_halves_is_passed_at_any_age(desk: Desk, age_h: int) -> None:
    """4.9 stops behind 32 that are too young for a check, and gives up later ones that are too old."""
    for number in range(40):
        end = desk.commit if number % 2 else desk.rollback
        end(desk.prepare(number, born_timestamp_ms=START_MS - age_h * 3_600_000))
    assert desk.check(1) == []
    assert (desk.discarded, desk.progress()) == ([], (40, 40))


def test_ops_out_of_order(desk: Desk) -> None:
    halves = [desk.prepare(number) for number in range(4)]
    desk.commit(halves[3])
    desk.commit(halves[1])
    assert [copy.body for copy in desk.check()] == [b"0", b"2"]
    assert desk.progress() == (4, 2)


def test_an_op_of_a_half_that_is_not_judged_yet_stays(desk: Desk) -> None:
    desk.prepare(0, born_timestamp_ms=START_MS + 9_000)
    desk.commit(desk.prepare(1))
    assert desk.check() == []  # the first is too young
    assert desk.progress() == (None, None)
    assert len(desk.check()) == 1
    assert desk.progress() == (2, 1)


@pytest.mark.parametrize(("age", "asked"), [(0, 0), (5_999, 0), (6_000, 1), (6_001, 1)])
def test_a_young_half_ends_the_pass(desk: Desk, age: int, asked: int) -> None:
    desk.clock.advance(ms=10_000)
    desk.prepare(born_timestamp_ms=desk.clock.now_ms() + 1 - age)
    assert len(desk.check(1)) == asked


def test_a_half_of_the_same_millisecond_ends_the_pass(desk: Desk) -> None:
    desk.prepare(born_timestamp_ms=START_MS - 60_000)
    assert desk.check(0) == []
    assert len(desk.check(1)) == 1


def test_a_half_from_the_future_is_asked_about(desk: Desk) -> None:
    desk.prepare(born_timestamp_ms=START_MS + 3_600_000)
    assert len(desk.check()) == 1


def test_an_own_immunity_is_kept_in_the_copy(desk: Desk) -> None:
    half = desk.prepare(properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"})
    for times in (1, 2):
        assert desk.check() == []
        copy = desk.of(SystemTopic.HALF)[-1]
        assert copy.properties["TRANSACTION_CHECK_TIMES"] == str(times)
        assert copy.properties["TRAN_PREPARED_QUEUE_OFFSET"] == str(half.queue_offset)
        assert copy.properties["WAIT"] == "false"
    assert desk.asked == []
    (asked,) = desk.check(50_000)
    assert asked.properties["TRANSACTION_CHECK_TIMES"] == "3"


@pytest.mark.parametrize("value", ["-1", "x", ""])
def test_an_invalid_immunity_counts_as_the_default(desk: Desk, value: str) -> None:
    raw = {"PGROUP": "P", "REAL_TOPIC": "T", "REAL_QID": "0", "CHECK_IMMUNITY_TIME_IN_SECONDS": value}
    desk.store.append(Message(SystemTopic.HALF, b"b"), 0, properties_raw=encode_properties(raw))
    desk.check(5_999)
    assert desk.asked == []
    desk.check(1)
    assert len(desk.asked) == 1


def test_an_op_by_the_first_place_ends_an_immune_copy() -> None:
    """As in RocketMQ 4.9, an op that names the first queue offset of a half ends its immune copy."""
    desk = Desk()
    half = desk.prepare(properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"})
    desk.prepare(1, properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "60", "TRAN_PREPARED_QUEUE_OFFSET": "2"})
    desk.prepare(2)
    desk.store.append(Message(SystemTopic.OP, b"2", tags="d"), 0)
    desk.check()
    assert half.queue_offset == 0
    assert [message.body for message in desk.of(SystemTopic.HALF)[3:]] == [b"0"]  # 1 ended, with the op of 2


def test_a_missing_first_place_does_not_cause_a_wait(desk: Desk) -> None:
    properties = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "9999", "TRAN_PREPARED_QUEUE_OFFSET": "x"}
    desk.prepare(properties=properties)
    assert len(desk.check()) == 1


def test_after_fifteen_checks_a_half_is_given_up(desk: Desk) -> None:
    desk.prepare(flag=5, reconsume_times=2)
    times = [copy.properties["TRANSACTION_CHECK_TIMES"] for _ in range(15) for copy in desk.check()]
    assert times == [str(number) for number in range(1, 16)]
    assert desk.check() == []
    (given_up,) = desk.of(SystemTopic.CHECK_MAX_TIME)
    assert given_up.queue_id == 0
    assert given_up.properties["TRANSACTION_CHECK_TIMES"] == "15"
    assert given_up.properties["REAL_TOPIC"] == "T"
    ((half, check_times),) = desk.discarded
    assert (half.queue_offset, check_times) == (15, 15)
    assert set(desk.topics) == {SystemTopic.HALF, SystemTopic.CHECK_MAX_TIME}
    assert desk.check() == []
    assert desk.progress() == (16, None)


def test_a_half_that_is_too_old_is_given_up(desk: Desk) -> None:
    born = START_MS - 72 * 3_600_000
    desk.prepare(born_timestamp_ms=born)
    assert len(desk.check(0)) == 0  # of the same moment
    assert desk.discarded == []
    assert desk.check(1) == []
    assert [check_times for _, check_times in desk.discarded] == [1]
    assert desk.of(SystemTopic.CHECK_MAX_TIME)[0].properties["TRANSACTION_CHECK_TIMES"] == "1"


def test_the_maximum_age_is_a_setting(desk: Desk) -> None:
    desk.prepare()
    assert len(desk.check(3_600_001, reserved_hours=2)) == 1
    assert desk.check(1, reserved_hours=1) == []
    assert len(desk.discarded) == 1


@pytest.mark.parametrize(("times", "asked"), [("x", "0"), ("-7", "-6"), ("14", "15")])
def test_check_times_as_they_are_read(desk: Desk, times: str, asked: str) -> None:
    desk.prepare(properties={"TRANSACTION_CHECK_TIMES": times})
    assert [copy.properties["TRANSACTION_CHECK_TIMES"] for copy in desk.check()] == [asked]


def test_a_half_without_room_for_a_copy_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(StoreConfig.tiny())
    desk.prepare(properties={"long": "x" * 32_680})
    assert desk.check() == []
    assert "can't be copied" in caplog.text
    assert desk.of(SystemTopic.CHECK_MAX_TIME)[0].properties_raw == desk.of(SystemTopic.HALF)[0].properties_raw


def test_copies_of_a_pass_wait_for_the_next(desk: Desk) -> None:
    for number in range(40):
        desk.prepare(number)
    assert [copy.queue_offset for copy in desk.check()] == list(range(40, 80))
    assert [copy.queue_offset for copy in desk.check()] == list(range(80, 120))


def test_no_copies_are_written_for_halves_that_all_wait_for_a_producer(desk: Desk) -> None:
    """A half that has ended is no question to a group, although a producer of that group could be asked."""
    desk.prepare()
    desk.commit(desk.prepare(1, properties={"PGROUP": "reached"}), "reached")
    desk = desk.after_crash(is_reachable=lambda group: group == "reached")
    assert desk.check() == []
    assert len(desk.of(SystemTopic.HALF)) == 2
    desk.prepare(2, properties={"PGROUP": "reached"})
    assert [half.body for half in desk.check()] == [b"2"]


def test_deleted_halves_are_skipped(desk: Desk) -> None:
    for number in range(60):
        desk.prepare(number)
    desk.store.flush()
    desk.store.log.delete_before(4096)
    queue = desk.store.queue(SystemTopic.HALF, 0)
    assert queue is not None
    queue.advance(4096)
    gone = queue.min_offset
    desk.offsets.set_consumer_offset(SystemTopic.HALF, CHECK_GROUP, 0, gone - 3)
    assert [int(copy.body) for copy in desk.check()] == list(range(gone, 60))


@pytest.mark.parametrize("form", ["0,1,3,", "0,1,3", "3,0,1,0,", "0,x,1,99,3,,"])
def test_an_op_of_5_ends_many_halves(form: str) -> None:
    """5.x collects the ends of some seconds in one op message."""
    desk = Desk()
    halves = [desk.prepare(number) for number in range(5)]
    desk.store.append(Message(SystemTopic.OP, form.encode(), tags="d"), 0)
    desk.rollback(halves[4])
    ended = EndedHalves(desk.store, desk.offsets)
    assert [number for number in range(5) if number in ended] == [0, 1, 3, 4]
    with pytest.raises(TransactionRefusedError, match="rolled back"):
        desk.commit(halves[3])
    assert [copy.body for copy in desk.check()] == [b"2"]
    assert desk.progress()[0] == 5


def test_an_op_of_5_is_passed_with_its_last_half() -> None:
    desk = Desk()
    for number in range(4):
        desk.clock.advance(ms=10_000 if number == 2 else 0)
        desk.prepare(number)
    desk.store.append(Message(SystemTopic.OP, b"0,1,3,", tags="d"), 0)
    assert desk.check(0) == []
    assert desk.progress() == (2, None)  # half 2 is too young; the op message still ends half 3
    assert [copy.body for copy in desk.check()] == [b"2"]
    assert desk.progress() == (4, 1)


def test_an_op_of_many_halves_is_longer_than_a_number() -> None:
    desk = Desk()
    for number in range(100):
        desk.prepare(number)
    desk.store.append(Message(SystemTopic.OP, b"".join(b"%d," % number for number in range(99)), tags="d"), 0)
    assert [copy.body for copy in desk.check()] == [b"99"]


def test_ops_are_read_rightly_by_5(desk: Desk) -> None:
    """5.3.3 splits the body at commas, and drops what is empty at the end."""
    for number in range(12):
        desk.rollback(desk.prepare(number))
    assert [[int(part) for part in body.decode().split(",") if part] for body in desk.ops()] == [[n] for n in range(12)]


@pytest.mark.parametrize("topic", [SystemTopic.HALF, SystemTopic.OP])
def test_a_progress_beyond_the_end_is_put_back_at_the_opening(desk: Desk, topic: str) -> None:
    """Records behind it were lost with a power failure: the next halves at these offsets are checked."""
    desk.rollback(desk.prepare(0))
    desk.check()
    desk.offsets.set_consumer_offset(topic, CHECK_GROUP, 0, 7)
    desk.offsets.persist(START_MS)
    desk = desk.after_crash()
    desk.prepare(1)
    desk.rollback(desk.prepare(2))
    assert [copy.body for copy in desk.check()] == [b"1"]


def test_a_progress_beyond_the_queues_does_nothing(desk: Desk) -> None:
    desk.prepare()
    desk.offsets.set_consumer_offset(SystemTopic.HALF, CHECK_GROUP, 0, 7)
    assert desk.check() == []
    assert desk.progress() == (7, None)


def test_an_op_progress_beyond_the_queue_is_corrected(desk: Desk) -> None:
    desk.commit(desk.prepare(0))
    desk.prepare(1)
    desk.offsets.set_consumer_offset(SystemTopic.OP, CHECK_GROUP, 0, 9)
    desk.check()
    assert desk.progress()[1] == 1


@pytest.mark.parametrize(("body", "tag"), [(b"x", "d"), (b"0", "other"), (b"9" * 30, "d"), (b"99999999999", "d")])
def test_empty_ops_end_nothing(desk: Desk, body: bytes, tag: str) -> None:
    half = desk.prepare()
    desk.store.append(Message(SystemTopic.OP, body, tags=tag), 0)
    assert half.queue_offset not in EndedHalves(desk.store, desk.offsets)
    assert len(desk.check()) == 1
    assert desk.commit(desk.asked[0].half) is not None
    assert desk.bodies() == [b"0"]


def test_ops_that_a_broker_wrote_are_seen(desk: Desk) -> None:
    halves = [desk.prepare(number) for number in range(3)]
    desk.commit(halves[0])
    desk.store.append(Message(SystemTopic.OP, b"1", tags="d"), 0)
    desk.rollback(halves[2])
    with pytest.raises(TransactionRefusedError, match="rolled back"):
        desk.commit(halves[1])


def test_late_ops_ask_although_there_are_some(desk: Desk) -> None:
    """An op message born long after the start of the pass proves that time has passed, so the half is due."""
    desk.prepare(0)
    desk.prepare(1)
    desk.store.append(Message(SystemTopic.OP, b"1", tags="d"), 0, born_timestamp_ms=START_MS + 60_000)
    assert [copy.body for copy in desk.check()] == [b"0"]


# --- by time


def test_passes_come_every_minute_while_something_is_pending(desk: Desk) -> None:
    assert desk.checks_to(100_000) == []
    half = desk.prepare()
    assert desk.checks_to(300_000) == [120_000, 180_000, 240_000, 300_000]
    assert len(desk.asked) == 4
    desk.commit(half)
    assert desk.checks_to(86_400_000) == [360_000]
    desk.prepare(1)
    assert desk.checks_to(86_400_000 + 60_000) == [86_460_000]


def test_a_year_without_an_answer_passes_quickly(desk: Desk) -> None:
    desk.prepare()
    assert desk.checks_to(365 * 86_400_000) == [60_000 * number for number in range(1, 17)]
    assert len(desk.discarded) == 1


def test_a_pass_takes_several_turns() -> None:
    desk = Desk(settings=TransactionConfig(most_at_once=10))
    halves = [desk.prepare(number) for number in range(25)]
    desk.pass_to(59_999)
    desk.clock.advance(ms=1)
    now = desk.clock.now_ms()
    assert desk.run_due(now) == now
    assert len(desk.asked) == 10
    desk.commit(halves[24])  # during the pass
    desk.commit(halves[0])
    assert desk.run_due(now) == now
    assert desk.run_due(now) == now + 60_000
    assert [int(question.half.body) for question in desk.asked] == list(range(24))
    assert desk.progress() == (25, 1)
    assert desk.bodies() == [b"24", b"0"]
    desk.asked.clear()
    desk.pass_to(120_000)
    assert [int(question.half.body) for question in desk.asked] == list(range(1, 24))


def test_a_pass_that_takes_too_long_ends_where_it_is() -> None:
    desk = Desk(settings=TransactionConfig(most_at_once=10))
    for number in range(25):
        desk.prepare(number)
    desk.pass_to(59_999)
    assert desk.run_due(START_MS + 60_000) == START_MS + 60_000
    assert desk.run_due(START_MS + 120_001) == START_MS + 180_000
    assert desk.progress() == (10, None)


def test_a_clock_that_is_set_back(desk: Desk) -> None:
    desk.prepare()
    assert desk.run_due(START_MS + 30_000) == START_MS + 60_000
    assert desk.run_due(START_MS - 3_600_000) == START_MS - 3_600_000 + 60_000


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **fields: Any) -> Any:
        raise error

    return fail


def test_a_pass_that_fails_continues_in_the_next(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.prepare(0)
    desk.prepare(1)
    again = desk.store.copies.append_again
    calls: list[int] = []

    def second_fails(*args: Any, **fields: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise DiskFullError("full")
        return again(*args, **fields)

    monkeypatch.setattr(desk.store.copies, "append_again", second_fails)
    assert desk.checks_to(60_000) == [60_000]
    assert "the check of half messages fails; next try in 60000 ms: full" in caplog.text
    assert desk.progress() == (1, None)
    assert [question.half.body for question in desk.asked] == [b"0"]
    desk.pass_to(120_000)
    assert [question.half.body for question in desk.asked] == [b"0", b"1", b"0"]


@pytest.mark.parametrize(("part", "refused"), [(ConsumeQueue, "append_many"), (KeyIndex, "append_block")])
def test_a_full_disk_does_not_end_the_checks(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: type, refused: str
) -> None:
    """Checks continue after a full disk has stopped a pass, the saving of its progress, or the writing of queues."""
    for number in range(20):
        desk.prepare(number)
    full = raising(StoreIOError("allocate", ROOT, OSError(errno.ENOSPC, "full")))
    again = desk.store.copies.append_again
    calls: list[int] = []

    def second_fails(*args: Any, **fields: Any) -> Any:
        calls.append(1)
        return again(*args, **fields) if len(calls) == 1 else full()

    with monkeypatch.context() as patched:
        patched.setattr(desk.store.copies, "append_again", second_fails)
        patched.setattr(part, refused, full)
        assert desk.pass_to(60_000) == 70_000
    # Without room for the queue the pass sees the first half alone, and comes to no failing write.
    assert ("the check of half messages fails; next try in 60000 ms: " in caplog.text) == (part is KeyIndex)
    assert "the progress of the check of half messages: saving fails" in caplog.text
    desk.pass_to(120_000)
    assert {question.half.body for question in desk.asked} == {b"%d" % number for number in range(20)}


def test_a_store_that_is_closed_is_reported(desk: Desk) -> None:
    desk.prepare()
    desk.pass_to(1_000)
    desk.store.close()
    with pytest.raises(StoreClosedError):
        desk.run_due(START_MS + 60_000)


# --- in turn with a broker of 4.9, over kills

STEPS = ("check", "answer", "save", "kill and librmq", "kill and 4.9")


def after_steps(steps: tuple[str, ...], is_original: bool) -> tuple[Desk, bool]:
    """Return the store after a half whose end was lost, and these steps; and whether 4.9 had a turn."""
    desk = Desk(of_4=is_original)
    desk.prepare()
    for step in steps:
        if step == "check":
            desk.check()
        elif step == "answer" and desk.asked:
            desk.commit(desk.asked[-1].half)
        elif step == "save":
            desk.offsets.persist(desk.clock.now_ms())
        elif step.startswith("kill"):
            desk = desk.after_crash(of_4=step.endswith("4.9"))
            is_original |= step.endswith("4.9")
    return desk, is_original


@pytest.mark.slow
@pytest.mark.parametrize("first", STEPS)
@pytest.mark.parametrize("is_original", [False, True])
def test_no_kill_in_turns_with_4_loses_a_commit(first: str, is_original: bool) -> None:
    """The rules of 4.9 and of librmq in turn, a kill between any two steps: the commit is delivered.

    4.9 can deliver it several times; librmq never does so by itself.
    """
    for rest in itertools.product(STEPS, repeat=3):
        desk, was_original = after_steps((first, *rest), is_original)
        desk = desk.after_crash()
        for _ in range(3):
            for copy in desk.check():
                desk.commit(copy)
        assert desk.bodies() == [b"0"] or (was_original and set(desk.bodies()) == {b"0"}), (first, *rest)
        assert desk.check() == []


def test_a_lost_end_is_asked_for_a_minute_after_the_opening(desk: Desk) -> None:
    """So 40 s after the last open of a store whose broker was killed such a commit is still being checked."""
    desk.prepare()
    desk = desk.after_crash()
    assert desk.checks_to(59_999) == []
    assert desk.asked == []
    desk.checks_to(60_000)
    assert len(desk.asked) == 1


@pytest.mark.parametrize("by_copy", [False, True])
@pytest.mark.parametrize("lacking", [(0,), (1,), (0, 1)])
def test_no_commit_is_refused_because_the_index_lacks_a_half(
    desk: Desk, by_copy: bool, lacking: tuple[int, ...]
) -> None:
    """A broker without ``messageIndexEnable`` writes no index; the half and its copy are found in the queue."""
    half = desk.prepare()
    (copy,) = desk.check()
    desk.prepare(1)
    answered = copy if by_copy else half
    desk = desk.with_index_without(*[(half, copy)[number] for number in lacking])
    assert desk.commit(answered) is not None
    assert desk.commit(answered) is None
    assert desk.bodies() == [b"0"]
    assert [question.body for question in desk.check()] == [b"1"]


def test_a_commit_is_known_although_the_index_lacks_its_half(desk: Desk) -> None:
    half = desk.prepare()
    (copy,) = desk.check()
    desk.commit(copy)
    desk = desk.with_index_without(copy)
    assert desk.commit(half) is None
    with pytest.raises(TransactionRefusedError, match="committed before"):
        desk.rollback(half)
    assert desk.bodies() == [b"0"]


def test_a_rollback_ends_the_copies_that_the_index_lacks(desk: Desk) -> None:
    half = desk.prepare()
    (copy,) = desk.check()
    desk.prepare(1)
    desk = desk.with_index_without(half, copy)
    desk.rollback(half)
    assert desk.ops() == [b"%d" % copy.queue_offset]
    with pytest.raises(TransactionRefusedError, match="rolled back"):
        desk.commit(half)


@pytest.mark.parametrize("others", [0, 40])
def test_a_late_commit_delivers_a_discarded_half_that_the_index_lacks(desk: Desk, others: int) -> None:
    for number in range(others):
        desk.prepare(2 + number)
    half = desk.prepare()
    desk.check(check_max=1)
    desk.check(check_max=1)
    *_, discarded = desk.of(SystemTopic.CHECK_MAX_TIME)
    desk.prepare(1)
    desk = desk.with_index_without(discarded)
    assert desk.commit(half) is not None
    assert desk.bodies() == [b"0"]
