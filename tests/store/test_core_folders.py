"""Both codes leave the same folders, byte for byte; without the compiled core these tests skip."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.delay import DelaySchedule
from librmq.errors import MessageIllegalError, RmqError
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import SystemTopic
from librmq.runtime import compiled_core
from librmq.store import AppendResult, MessageStore
from librmq.store.engine._append import Appender
from librmq.store.format.broker_tables import BrokerTables
from librmq.txn import TransactionConfig, Transactions
from tests.budget import examples
from tests.bytime import NOW
from tests.programs import run_program
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS, Contents, contents

pytestmark = [
    pytest.mark.platform,
    pytest.mark.skipif(compiled_core.CORE.module is None, reason=compiled_core.CORE.state),
]

TEXTS = st.sampled_from(["a", "b c", "é", "日本", "\U0001f600x", "x" * 40])
NAMES = st.sampled_from(["region", "amount", "é", "n1", "n2", "n3", "zone"])
APPENDS: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    topic=st.sampled_from(["orders", "T" * 19, "payments"]),
    queue_id=st.integers(0, 2),
    body=st.binary(max_size=700),
    tags=st.none() | TEXTS,
    keys=st.sampled_from([(), "k", ("k1", "k2"), "ключ"]),
    properties=st.dictionaries(NAMES, TEXTS, max_size=4),
    options=st.sampled_from([{}, {}, {}, {"delay_level": 2}, {"flag": -7}, {"unique_key": "U1"}]),
    fields=st.sampled_from([{}, {}, {}, {"sys_flag": 8}, {"born_host": ("::1", 1)}, {"reconsume_times": 3}]),
    times=st.sampled_from([1, 1, 5, 150]),
    batch=st.booleans(),
)


@contextmanager
def code(compiled: bool) -> Iterator[None]:
    """Let stores that are opened here run this code."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(Appender, "append_usual", Appender.append)
            patch.setattr(Appender, "append_batch_usual", Appender.append_batch)
            patch.setattr(Appender, "append_waiting", None)
            for module in (
                "engine.derivation", "engine.read", "engine.store_parts", "format._keyindex", "format.indexfile"
            ):  # fmt: skip
                patch.setattr(f"librmq.store.{module}.CORE", compiled_core.PURE)
            patch.setattr("librmq.message.frames.CORE", compiled_core.PURE)
        yield


def folder_after(steps: list[dict[str, Any]], compiled: bool) -> tuple[Contents, list[Any]]:
    """Return all files of a store, and all results, after these appends."""
    files, clock = MemoryFiles(), ManualClock()
    results: list[Any] = []
    with (
        code(compiled),
        MessageStore.open(ROOT, StoreConfig.tiny(), files=files, clock=clock, background=False) as store,
    ):
        for step in steps:
            message = Message(
                step["topic"],
                step["body"],
                tags=step["tags"],
                keys=step["keys"],
                properties=step["properties"],
                **step["options"],
            )
            if step["batch"]:
                try:
                    results += store.append_batch([message] * step["times"], step["queue_id"])
                except MessageIllegalError as error:
                    results.append(str(error))
                continue
            for _ in range(step["times"]):
                result = store.append(message, step["queue_id"], **step["fields"])
                results.append(result)
                assert type(result) is AppendResult
                clock.advance(ms=1)
            assert store.message_at(result.physical_offset) is not None
    return contents(files), results


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(APPENDS, min_size=1, max_size=12))
def test_folders_are_equal_byte_for_byte(steps: list[dict[str, Any]]) -> None:
    assert folder_after(steps, True) == folder_after(steps, False)


class Work:
    """Appends, transactions and delays of a store; a step is the name of a method and its arguments."""

    def __init__(self, store: MessageStore, clock: ManualClock, files: MemoryFiles) -> None:
        self.store, self.clock = store, clock
        self.results: list[Any] = []
        self.halves: list[AppendResult] = []
        offsets = BrokerTables.open(f"{ROOT}/config", files=files)
        self.transactions = Transactions(store, offsets, make_topic=self.results.append)
        self.schedule = DelaySchedule(store, offsets, START_MS, NOW, delivered=self.note)

    def do(self, name: str, *arguments: Any) -> None:
        try:
            self.results.append(getattr(self, name)(*arguments))
        except RmqError as error:
            self.results.append(f"{type(error)} {error}")

    def note(self, message: StoredMessage, topic: str, queue_id: int, result: AppendResult) -> None:
        self.results.append((message.raw, topic, queue_id, result))

    def send(
        self, queue_id: int, size: int, level: int | None, times: int, properties: Mapping[str, str] = {"p": "q"}
    ) -> list[AppendResult]:
        message = Message("T", b"x" * size, tags="t", keys=[f"k{size}", "k"], delay_level=level)
        message.properties |= properties
        return [self.store.append(message, queue_id) for _ in range(times)]

    def send_later(self, topics: list[str], sizes: list[int], properties: dict[str, str], times: int) -> None:
        """Send messages that wait, by turns to these topics and their queues."""
        for number in range(times):
            topic, body = topics[number % len(topics)], b"x" * sizes[number % len(sizes)]
            message = Message(topic, body, keys=f"k{number}", unique_key=f"W{number}")
            message.properties |= {"DELAY": "1"} | properties
            fields: dict[str, Any] = {"sys_flag": 8, "reconsume_times": number} if number % 3 else {}
            if number % 50 > 40:
                fields["store_host"] = "10.0.0.1", number
            self.results.append(self.store.append(message, number % 5 % 3, **fields))

    def batch(self, queue_id: int, size: int, times: int) -> list[AppendResult]:
        return self.store.append_batch([Message("T", b"x" * size, keys="k")] * times, queue_id)

    def prepare(self, size: int) -> AppendResult:
        message = Message("T", b"h" * size, tags="t", unique_key=f"U{len(self.halves)}")
        message.properties |= {"TRAN_MSG": "true", "PGROUP": "P"}
        self.halves.append(self.transactions.prepare(message, 3))
        return self.halves[-1]

    def commit(self, number: int) -> Any:
        half = self.halves[number % len(self.halves)] if self.halves else self.prepare(number)
        return self.transactions.commit(half.physical_offset, half.queue_offset, "P")

    def rollback(self, number: int) -> None:
        half = self.halves[number % len(self.halves)] if self.halves else self.prepare(number)
        self.transactions.rollback(half.physical_offset, half.queue_offset, "P")

    def later(self, milliseconds: int) -> int | None:
        self.clock.advance(ms=milliseconds)
        questions, discarded = self.transactions.check.run_pass(self.clock.now_ms(), TransactionConfig())
        self.results += [half.raw for half, _ in discarded] + [question.half.raw for question in questions]
        return self.schedule.run_due(self.clock.now_ms())

    def read(self, queue_id: int) -> list[bytes]:
        return [message.body for message in self.store.read("T", queue_id, 0).messages]


QUEUE, SIZE, FEW = st.integers(0, 2), st.sampled_from([0, 3, 40, 700]), st.sampled_from([1, 1, 7, 90])
PROPERTIES = st.dictionaries(NAMES, TEXTS, max_size=3) | st.sampled_from(
    [
        {"REAL_QID": "9", "REAL_TOPIC": "U", "p": "q"},
        {"empty": ""},
        {"p": "x\1y"},
        {"p": "x\2y"},
        *({"DELAY": text} for text in ("0", "-1", "+2", "99", "x")),
    ]
)
TOPICS = st.sampled_from(["T", "T", "U", "V" * 19, "W" * 127, "W" * 300, "é", SystemTopic.HALF, SystemTopic.SCHEDULE])
STEPS = st.one_of(
    st.tuples(st.just("send"), QUEUE, SIZE, st.sampled_from([None, None, 1, 2]), FEW),
    st.tuples(st.just("send"), QUEUE, SIZE, st.sampled_from([1, 2]), FEW, PROPERTIES),
    st.tuples(
        st.just("send_later"),
        st.lists(TOPICS, min_size=1, max_size=3),
        st.lists(SIZE, min_size=1, max_size=3),
        PROPERTIES,
        st.sampled_from([1, 20, 90]),
    ),
    st.tuples(st.just("batch"), QUEUE, st.sampled_from([0, 40]), st.sampled_from([1, 5, 20])),
    st.tuples(st.just("prepare"), SIZE),
    st.tuples(st.sampled_from(["commit", "rollback"]), st.integers(0, 3)),
    st.tuples(st.just("later"), st.sampled_from([1, 1000, 7000, 100_000])),
    st.tuples(st.just("read"), QUEUE),
)


def worked(steps: list[tuple[int, tuple[Any, ...]]], config: StoreConfig, compiled: bool) -> tuple[Contents, list[Any]]:
    """Return all files and results after these steps, each in the thread with its number, in this order."""
    files, clock = MemoryFiles(), ManualClock(START_MS)
    with (
        code(compiled),
        ExitStack() as stack,
        MessageStore.open(ROOT, config, files=files, clock=clock, background=False) as store,
    ):
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(3)]
        work = Work(store, clock, files)
        for thread, step in steps:
            threads[thread].submit(work.do, *step).result()
    return contents(files), work.results


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), STEPS), min_size=1, max_size=15), st.sampled_from([SMALL, SMALL_EXT]))
def test_folders_of_turns_of_threads_are_equal(steps: list[tuple[int, tuple[Any, ...]]], config: StoreConfig) -> None:
    """With whole transactions, delays, batches, and files that are full after some messages."""
    assert worked(steps, config, True) == worked(steps, config, False)


def test_a_whole_transaction_leaves_equal_folders() -> None:
    """Halves are committed, rolled back, checked and given up, among messages; the compiled append has its part."""
    steps: list[tuple[Any, ...]] = [("prepare", 9)] * 6 + [("commit", 1), ("rollback", 2), ("commit", 2)]
    steps += [("send", 0, 40, None, 300), ("later", 7000), ("commit", 3), ("batch", 1, 5, 20), ("send", 1, 5, 2, 3)]
    steps += [("later", 100_000)] * 17
    before = compiled_core.CORE.module.counts()["append"]
    compiled = worked([(number % 3, step) for number, step in enumerate(steps)], SMALL, True)
    assert compiled_core.CORE.module.counts()["append"] - before > 100
    assert worked([(0, step) for step in steps], SMALL, False) == compiled
    assert any("TRANS_CHECK_MAX_TIME_TOPIC" in path for path in compiled[0])


def delivered(damage: list[tuple[int, int, int]], compiled: bool) -> tuple[Contents, list[Any]]:
    """Return all files and reports of deliveries after bytes of waiting records were replaced."""
    files, clock = MemoryFiles(), ManualClock(START_MS)
    config = StoreConfig.tiny(commitlog_file_size=1 << 20)
    with code(compiled), MessageStore.open(ROOT, config, files=files, clock=clock, background=False) as store:
        work = Work(store, clock, files)
        work.send_later(["T", "U"], [40], {"p": "q"}, 40)
        work.later(2_000)  # a layout is kept, and the queues are open
        store.append(Message("T", b""), 10)
        work.send_later(["T", "T", "U"], [0, 40], {"p": "q"}, 40)
        places = [result.physical_offset for result in work.results[-40:]]
        store.flush()  # what is derived from them is there
        buffer = store.log.sequence.file(0).buffer
        for number, at, value in damage:
            buffer[places[number] + at] = value
        work.later(2_000)
        work.send_later(["T"], [3], {"p": "q"}, 1)
    return contents(files), work.results


@settings(max_examples=examples(60), deadline=None)
@example([(6, 39, 4)])  # a prepared record
@example([(6, 112, 0xC3)])  # in the value of p
@example([(6, 112, 1)])
@example([(6, 112, 2)])
@example([(6, 164, 58)])  # behind "9", in the number of the queue
@given(
    st.lists(
        st.tuples(st.integers(0, 39), st.integers(0, 164), st.integers(0, 255) | st.sampled_from([1, 2, 48, 57, 58])),
        max_size=3,
    )
)
def test_damaged_messages_that_wait_are_delivered_alike(damage: list[tuple[int, int, int]]) -> None:
    before = compiled_core.CORE.module.counts()["append"]
    compiled = delivered(damage, True)
    if not damage:
        assert compiled_core.CORE.module.counts()["append"] - before > 115
    assert delivered(damage, False) == compiled


def test_messages_that_wait_for_many_queues_leave_equal_folders() -> None:
    """They are sent, and delivered together, by the compiled core; where one is unusual the Python code delivers."""
    topics = ["T", "U", "V" * 19, SystemTopic.HALF, SystemTopic.SCHEDULE, "no/topic"]
    steps: list[tuple[Any, ...]] = [("send_later", ["T", "U"], [3, 40, 0], {"p": "q"}, 90), ("later", 2_000)] * 3
    steps += [("prepare", 9)]  # it opens the queue of halves
    for topic in topics:
        steps += [("send_later", [topic], [3], {"p": "q"}, 1), ("later", 2_000)]
        steps += [("send_later", ["T", topic], [3], {"p": "q"}, 9), ("later", 2_000)]
    steps += [("send_later", ["T"], [3], {"p": value}, 9) for value in ("x\1y", "é", "x")] + [("later", 2_000)]
    config = StoreConfig.tiny(commitlog_file_size=1 << 20)
    before = compiled_core.CORE.module.counts()["append"]
    compiled = worked([(0, step) for step in steps], config, True)
    assert compiled_core.CORE.module.counts()["append"] - before > 450
    assert worked([(0, step) for step in steps], config, False) == compiled


def repeated(order: list[tuple[bytes, int]], messages: Mapping[bytes, Message], config: StoreConfig) -> Contents:
    """Return all files after the Python code has appended these messages, named by body, to these queues."""
    files = MemoryFiles()
    with (
        code(False),
        MessageStore.open(ROOT, config, files=files, clock=ManualClock(START_MS), background=False) as store,
    ):
        for body, queue_id in order:
            store.append(messages[body], queue_id)
    return contents(files)


@pytest.mark.parametrize(
    ("config", "batch"), [(SMALL, 1), (StoreConfig.tiny(commitlog_file_size=1 << 20), 5)], ids=["full files", "batches"]
)
def test_free_threads_leave_the_folder_of_one(config: StoreConfig, batch: int) -> None:
    """Threads append and read in any order; the Python code, in one thread, repeats the order that is in the log."""
    messages = {
        body: Message("T", body, tags="t", keys=f"k{number}", properties={"thread": str(thread)})
        for thread in range(4)
        for number in range(200)
        for body in [b"%d:%d" % (thread, number)]
    }

    def produce(store: MessageStore, thread: int) -> None:
        mine = [messages[b"%d:%d" % (thread, number)] for number in range(200)]
        for at in range(0, 200, 8 + batch):
            for message in mine[at : at + 8]:
                store.append(message, thread % 2)
            store.append_batch(mine[at + 8 : at + 8 + batch] or [mine[0]], thread % 2)
            store.read("T", 0, 0, 1)

    files, interval = MemoryFiles(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with MessageStore.open(ROOT, config, files=files, clock=ManualClock(START_MS), background=False) as store:
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(produce, [store] * 4, range(4)))
            order = [(message.body, message.queue_id) for message in store]
    finally:
        sys.setswitchinterval(interval)
    assert set(messages) == {body for body, _ in order}
    assert contents(files) == repeated(order, messages, config)


def memory_that_ends(many: bool) -> None:
    """Let each allocation of a compiled append fail in turn; what it acknowledged is stored, queues and index fit."""
    testing = pytest.importorskip("_testcapi")
    files, config = MemoryFiles(), StoreConfig.tiny(commitlog_file_size=1 << 20)
    messages = {
        b"%d" % number: Message(
            "T", b"%d" % number, tags="t", keys=f"k{number}", delay_level=None if many or number % 2 else 1
        )
        for number in range(100)
    }
    stored, failed = set(), 0
    with MessageStore.open(ROOT, config, files=files, clock=ManualClock(START_MS), background=False) as store:
        for number, message in enumerate(messages.values()):
            result: object = None
            if number % 3:
                testing.set_nomemory(number % 16, number % 16 + 1)
            try:
                result = store.append_batch([message] * 2) if many else store.append(message)
            except MemoryError:
                failed += 1
            finally:
                testing.remove_mem_hooks()
            if result is not None:
                stored.add(message.body)
        store.append(message)  # a closed store notes where its last write began
        order = [(message.body, message.queue_id) for message in store]
    assert failed
    assert stored <= {body for body, _ in order}
    assert contents(files) == repeated(order, messages, config)


def test_memory_that_ends_between_steps() -> None:
    """In a process of its own, because other threads of this one would lack memory too."""
    pytest.importorskip("_testcapi")
    program = f"from {__name__} import memory_that_ends; memory_that_ends(False); memory_that_ends(True); print('done')"
    done = run_program(program)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
