"""What an append promises in async, sync and pipelined mode, also when a flush fails or a store is released."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import FlushFailedError, StoreClosedError, StoreError, StoreIOError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import File, Files, file_size
from librmq.message.message import Message
from librmq.store import AppendResult, MessageStore
from librmq.store.engine._durability import Acknowledgement
from librmq.store.recovery._verify import verify
from tests.file_seams import FailingFiles, RecordingFiles
from tests.programs import run_program
from tests.stores import ROOT, SMALL, START_MS, contents, opened, store_threads, with_contents

SYNC_SMALL = replace(SMALL, durability="sync")
ASYNC = replace(SMALL, commitlog_file_size=1 << 20, consumequeue_file_size=20_000)
SYNC = replace(ASYNC, durability="sync")
LOOK_S = 0.01
AT_ONCE = replace(ASYNC, flush_interval_s=0, flush_thorough_interval_s=0, flush_least_bytes=1)
"""The store's thread flushes the log each time it is woken."""


def message(number: int = 0, size: int = 50) -> Message:
    return Message("TopicA", b"%06d" % number + bytes(size), keys=f"key{number}")


class HeldFiles(MemoryFiles):
    """Files that count flushes of the log and can hold them up."""

    def __init__(self, part: str = "/commitlog/") -> None:
        super().__init__()
        self._part = part
        self.held = False
        self.flushes = 0
        self.flushed = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def flush(self, file: File, begin: int = 0, end: int | None = None) -> None:
        if self._part in file.path:
            self.flushes += 1
            if self.held:
                self.begun.release()
                self.go_on.acquire()
            self.flushed.release()


def open_store(
    files: Files, config: StoreConfig = ASYNC, clock: ManualClock | None = None, **more: Any
) -> MessageStore:
    """Open a store and flush one message, so that the files of the log exist."""
    store = MessageStore.open(ROOT, config, files=files, clock=clock or ManualClock(START_MS), **more)
    if store.log.end == 0:
        store.append(Message("First", b""))
        store.run_due(START_MS)
        store.flush()
        store.writer.thread.stop()
        if more.get("background"):
            store.writer.thread.may_start = True
        store.writer.housekeeping.alarm = -1  # as it was before the first append
    if isinstance(files, HeldFiles):
        files.flushes = 0
        files.flushed = threading.Semaphore(0)
    return store


def bodies(store: MessageStore) -> list[bytes]:
    return [one.body for one in store if one.topic == "TopicA"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def end_of(result: AppendResult) -> int:
    return result.physical_offset + result.size


# ---------------------------------------------------------------------------------------------------- async and sync


def test_async_returns_without_a_flush() -> None:
    files = HeldFiles()
    with open_store(files) as store:
        results = [store.append(message(number)) for number in range(100)]
        results += store.append_batch([message(), message()])
        assert files.flushes == 0
        assert store.flush() == end_of(results[-1])
        assert files.flushes > 0


@pytest.mark.parametrize("batch", [False, True])
def test_sync_returns_when_the_message_has_reached_the_device(batch: bool) -> None:
    files = HeldFiles()
    with open_store(files, SYNC) as store:
        files.held = True
        returned: list[AppendResult] = []

        def produce() -> None:
            returned.extend(store.append_batch([message(), message()]) if batch else [store.append(message())])

        before = store.log.end
        producer = threading.Thread(target=produce)
        producer.start()
        files.begun.acquire()
        assert returned == []
        assert store.log.end > before, "it is already in the log"
        files.go_on.release()
        producer.join()
        assert len(returned) == 1 + batch
        assert files.flushes == 1
        files.held = False


def test_a_batch_costs_one_flush() -> None:
    files = HeldFiles()
    with open_store(files, SYNC) as store:
        store.append_batch([message(number) for number in range(10)])
        assert files.flushes == 1


def test_a_message_is_flushed_with_the_blank_before_it() -> None:
    files = RecordingFiles()
    with open_store(files, SYNC_SMALL) as store:
        while store.log.end < 4096:
            before = len(files.trace)
            store.append(message(size=500))
        flushed = {event.path for event in files.trace[before:] if event.call == "flush"}
        assert flushed == {store.log.sequence.path(0), store.log.sequence.path(4096)}


def test_producers_share_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight producers append while one flush is held up; two flushes serve them all."""
    files = HeldFiles()
    with open_store(files, SYNC) as store:
        files.held = True
        first = threading.Thread(target=store.append, args=(message(),))
        first.start()
        files.begun.acquire()
        appended = threading.Barrier(9)
        take, stood = store.writer.durability.commit.reach, store.log.end

        def reach(physical_offset: int) -> None:
            if physical_offset > stood:
                appended.wait()  # all eight messages are now in the log
            take(physical_offset)

        monkeypatch.setattr(store.writer.durability.commit, "reach", reach)
        producers = [threading.Thread(target=store.append, args=(message(number), 1)) for number in range(8)]
        for producer in producers:
            producer.start()
        appended.wait()
        files.go_on.release()
        files.begun.acquire()
        files.go_on.release()
        for producer in [first, *producers]:
            producer.join()
        assert files.flushes == 2
        files.held = False
        monkeypatch.undo()


# --------------------------------------------------------------------------------------------------------- pipelined


@pytest.mark.parametrize("config", [ASYNC, SYNC], ids=["async", "sync"])
def test_a_pipelined_append_returns_immediately(config: StoreConfig) -> None:
    files = HeldFiles()
    with open_store(files, config) as store:
        acknowledgements = [store.submit(message(number), number % 2) for number in range(50)]
        assert files.flushes == 0
        assert not any(one.done for one in acknowledgements)
        assert [one.result.queue_offset for one in acknowledgements] == [number // 2 for number in range(50)]
        last = acknowledgements[-1].wait()
        assert last is acknowledgements[-1].result
        assert all(one.done for one in acknowledgements)
        once = files.flushes
        assert [one.wait() for one in acknowledgements] == [one.result for one in acknowledgements]
        assert files.flushes == once, "one wait is enough for all"
        assert store.read("TopicA", 1, 24, 1).messages[0].body == message(49).body


def test_a_pipelined_append_takes_the_same_keywords() -> None:
    with open_store(MemoryFiles()) as store:
        result = store.submit(message(), 3, reconsume_times=5, born_timestamp_ms=77).wait()
        found = store.message_at(result.physical_offset)
        assert found is not None
        assert (found.queue_id, found.reconsume_times, found.born_timestamp_ms) == (3, 5, 77)


def test_in_async_it_completes_with_the_next_periodic_flush() -> None:
    files = HeldFiles()
    with open_store(files) as store:
        acknowledgement = store.submit(message())
        due = store.run_due(START_MS)
        assert due is not None
        assert not acknowledgement.done
        assert due <= START_MS + 10_000
        store.run_due(due)
        assert acknowledgement.done


def test_in_sync_it_completes_by_itself() -> None:
    with open_store(MemoryFiles(), SYNC) as store:
        acknowledgement = store.submit(message())
        store.run_due(START_MS)
        assert acknowledgement.done


@pytest.mark.parametrize("config", [AT_ONCE, SYNC], ids=["async", "sync"])
def test_the_thread_of_the_store_completes_it(config: StoreConfig) -> None:
    files = HeldFiles()
    with open_store(files, config, background=True) as store:
        for _ in range(5):
            acknowledgement = store.submit(message())
            while not acknowledgement.done:  # some time after the flush
                files.flushed.acquire(timeout=LOOK_S)


def test_an_observer_sees_them_complete_in_order() -> None:
    files = HeldFiles()
    with open_store(files, SYNC, background=True) as store:
        acknowledgements = [store.submit(message(number)) for number in range(200)]
        done = 0
        while done < len(acknowledgements):
            files.flushed.acquire(timeout=LOOK_S)
            states = [one.done for one in reversed(acknowledgements)]  # more of them are done with each look
            assert states == sorted(states)
            done = states.count(True)


# --------------------------------------------------------------------------------------------- flushes by time


def test_moving_a_manual_clock_flushes_the_log() -> None:
    files = HeldFiles()
    clock = ManualClock(START_MS)
    with open_store(files, clock=clock) as store:
        for number in range(300):
            store.append(message(number))
        due = store.run_due(clock.now_ms())
        assert due == START_MS + 500
        assert files.flushes == 0
        clock.move_to(due)
        store.run_due(due)
        assert files.flushes > 0
        assert store.writer.durability.commit.flushed == store.log.end
        assert store_threads() == []


@pytest.mark.parametrize(("queues", "seconds"), [(1, 1), (50, 60)])
def test_entries_are_flushed_when_queues_have_two_pages(queues: int, seconds: int) -> None:
    """So that a second's messages over thousands of queues do not lead to thousands of flushes."""
    files, clock = HeldFiles("/consumequeue/"), ManualClock(START_MS)
    with open_store(files, clock=clock) as store:
        for number in range(500):
            store.append(message(number), number % queues)
        due = store.run_due(START_MS)
        while not files.flushes:
            assert due is not None
            clock.move_to(due)
            due = store.run_due(due)
        assert clock.now_ms() == START_MS + 1000 * seconds


def test_queues_index_and_checkpoint_are_flushed_periodically() -> None:
    files, clock = RecordingFiles(), ManualClock(START_MS)
    with open_store(files, clock=clock) as store:
        clock.advance(seconds=5)
        store.append(message())
        files.trace.clear()
        due = store.run_due(clock.now_ms())
        assert store.checkpoint.physic_timestamp_ms == START_MS
        while due is not None and due <= START_MS + 60_000:
            due = store.run_due(due)
        flushed = [event.path.split("/")[2] for event in files.trace if event.call == "flush"]
        assert flushed.index("commitlog") < flushed.index("consumequeue") < flushed.index("checkpoint")
        assert store.checkpoint.physic_timestamp_ms == START_MS + 5_000


# ---------------------------------------------------------------------------------------------------- a failed flush


def failing_store(config: StoreConfig = SYNC) -> tuple[MessageStore, FailingFiles, list[AppendResult]]:
    """Return a store with ten durable messages whose next flush fails."""
    files = FailingFiles(MemoryFiles())
    store = open_store(files, config)
    results = [store.append(message(number)) for number in range(10)]
    store.flush()
    files.fail("flush", code=errno.EIO)
    return store, files, results


def refused(call: Callable[[], object]) -> FlushFailedError:
    with pytest.raises(FlushFailedError) as raised:
        call()
    return raised.value


def test_a_failed_flush_is_reported_to_the_producer_and_sticks() -> None:
    store, files, results = failing_store()
    error = refused(lambda: store.append(message(10)))
    assert isinstance(error.cause, StoreIOError)
    assert (error.cause.errno, error.cause.call) == (errno.EIO, "flush")
    assert "commitlog" in str(error)
    flushes = files.calls["flush"]
    refused(lambda: store.append(message(11)))
    refused(lambda: store.append_batch([message(12)]))
    refused(lambda: store.append(message(), 9))
    refused(lambda: store.submit(message(13)))
    refused(store.flush)
    assert files.calls["flush"] == flushes, "flushed again"
    assert [one.body for one in store.read("TopicA", 0, 0).messages][:10] == [message(n).body for n in range(10)]
    refused(store.close)
    store.close()
    assert files.lock_holder("/store/lock") is None
    with open_store(files, SYNC) as store:
        assert bodies(store)[:10] == [message(number).body for number in range(10)]
        assert all(store.message_at(one.physical_offset) for one in results)
        store.append(message(14))
    assert verify(ROOT, SYNC, files).sound


def test_a_failed_periodic_flush_refuses_the_next_append() -> None:
    store, _, _ = failing_store(ASYNC)
    store.append(message(10))
    assert store.run_due(START_MS + 60_000) is None
    refused(lambda: store.append(message(11)))
    assert store.run_due(START_MS + 70_000) is None
    refused(store.close)


@pytest.mark.parametrize(("number", "part"), [(2, "consumequeue"), (3, "index"), (4, "checkpoint")])
def test_a_failed_flush_of_queues_or_index_sticks(number: int, part: str) -> None:
    """A later flush can't know what the kernel dropped. Messages are still accepted because they are sound."""
    files = FailingFiles(MemoryFiles())
    store = open_store(files)
    store.append(message(10))
    files.fail("flush", number, errno.EIO)
    with pytest.raises(StoreIOError, match=r"flush: Input/output error$") as first:
        store.flush()
    assert part in first.value.filename
    for call in (store.flush, store.flush, store.close):
        with pytest.raises(StoreIOError, match=rf"{part}.*Input/output error, so .* close the store and reopen it"):
            call()
        if call != store.close:
            store.append(message(11))
    with open_store(files) as store:
        assert bodies(store)[-2:] == [message(11).body] * 2
        store.flush()
    assert verify(ROOT, ASYNC, files).sound


def test_the_store_thread_outlives_a_failed_flush() -> None:
    files = FailingFiles(HeldFiles())
    store = open_store(files, AT_ONCE, background=True)
    files.fail("flush", code=errno.EIO)
    acknowledgement = store.submit(message())
    with pytest.raises(FlushFailedError):
        acknowledgement.wait()
    assert len(store_threads()) == 1
    refused(store.close)
    assert store_threads() == []


def test_periodic_work_outlives_queues_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    """The log is flushed as before, and what fails is logged once, as is its end."""
    caplog.set_level(logging.INFO, "librmq.store")
    files = FailingFiles(MemoryFiles())
    with open_store(files) as store:
        store.append(message(1))
        for number in range(1, 5):
            files.fail("create", number, code=errno.EIO)
        due = store.run_due(START_MS)
        assert due == START_MS + 500, "of the log"
        due = store.run_due(due)
        assert due is not None
        assert store.writer.durability.commit.flushed == store.log.end
        store.run_due(due)
        store.run_due(START_MS + 150_000)
        assert store.queue_range("TopicA", 0) == (0, 1)
    said = [record.getMessage() for record in caplog.records]
    for what in ("writing the entries of queues", "flushing queues and index"):
        fails, works = (line for line in said if what in line)
        assert f"{what} fails" in fails
        assert works == f"/store: {what} works again"


@pytest.mark.parametrize("how", ["close", "abandon", "failed"])
def test_after_each_end_the_store_opens_and_takes_messages(how: str) -> None:
    store, files, _ = failing_store(ASYNC)
    store.append(message(10))
    if how == "failed":
        refused(store.flush)
        refused(store.close)
    elif how == "close":
        refused(store.close)
    else:
        with pytest.raises(StoreIOError, match="Input/output error"):
            store.abandon()
    assert file_size(files, "/store/abort") == 0, "the marker stays"
    with open_store(files) as again:
        again.append(message(11))
        again.flush()


class Appending(ManualClock):
    """A clock that appends a message in each pause of a thread of the store."""

    pause: Callable[[], object] | None = None

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        if self.pause is not None:
            self.pause()
        return super().wait(event, seconds)


def test_an_append_that_waited_for_a_flush_comes_before_its_rest() -> None:
    """A flush pauses behind the entries and keys of many records."""
    clock, files = Appending(START_MS), MemoryFiles()
    with open_store(files, clock=clock) as store:
        for number in range(100):
            store.append(message(number))
        later: list[int] = []

        def pause() -> None:
            later.append(store.append(message(100 + len(later))).queue_offset)

        clock.pause = pause
        store.flush()
        clock.pause = None
        assert later == [100]
    with open_store(files) as again:
        found = [stored.body for stored in again.read("TopicA", 0, 80).messages]
        assert found == [message(number).body for number in range(80, 101)]


# --------------------------------------------------------------------------------------------- releasing the store


def test_a_store_is_abandoned_though_the_disk_is_full() -> None:
    disk = MemoryFiles()
    files = FailingFiles(disk)
    store = open_store(files)
    store.append(message())
    reserved = files.calls["reserve"]
    files.fail("reserve")
    store.abandon()
    assert files.calls["reserve"] > reserved
    with open_store(disk) as again:
        assert [found.body for found in again.read("TopicA", 0, 0).messages] == [message().body]


def unflushed(store: MessageStore) -> Acknowledgement[AppendResult]:
    acknowledgement = store.submit(message())
    assert not acknowledgement.done
    return acknowledgement


def test_close_completes_submitted_appends() -> None:
    store = open_store(HeldFiles())
    acknowledgement = unflushed(store)
    store.close()
    assert acknowledgement.done
    acknowledgement.wait()


@pytest.mark.parametrize("let_go", [MessageStore.abandon, MessageStore.recover])
def test_nothing_is_acknowledged_by_a_store_that_was_abandoned(let_go: Callable[[MessageStore], object]) -> None:
    files = HeldFiles()
    store = open_store(files)
    acknowledgement = unflushed(store)
    flushes = files.flushes
    let_go(store)
    if acknowledgement.done:
        assert files.flushes > flushes
    else:
        with pytest.raises(StoreClosedError):
            acknowledgement.wait()
    store.close()


def test_a_sync_append_during_abandon_is_not_acknowledged() -> None:
    files = HeldFiles()
    store = open_store(files, SYNC)
    reach = store.writer.durability.commit.reach

    def meet(physical_offset: int) -> None:
        store.abandon()  # called in another thread, between the append and its flush
        reach(physical_offset)

    store.writer.durability.commit.reach = meet  # type: ignore[method-assign]
    with pytest.raises(StoreClosedError):
        store.append(message())
    assert files.flushes == 0


@pytest.mark.parametrize("call", ["flush", "run_due", "submit", "append"])
def test_a_store_that_was_closed_promises_nothing(call: str) -> None:
    store = open_store(MemoryFiles())
    store.append(message())
    store.close()
    arguments: dict[str, tuple[Any, ...]] = {"run_due": (START_MS,), "submit": (message(),), "append": (message(),)}
    with pytest.raises(StoreClosedError):
        getattr(store, call)(*arguments.get(call, ()))


def test_a_flush_waits_for_the_one_that_flushes_the_queues() -> None:
    """A second caller does not take an empty list of dirty queues to mean that they are durable."""
    files = HeldFiles("/consumequeue/")
    with open_store(files) as store:
        store.append(message())
        files.held = True
        first = threading.Thread(target=store.flush)
        first.start()
        files.begun.acquire()
        ended = threading.Event()

        def flush() -> None:
            store.flush()
            ended.set()

        checkpoints: list[bool] = []
        write = store.checkpoint.flush

        def flush_checkpoint() -> None:
            checkpoints.append(files.flushed.acquire(blocking=False))
            write()

        store.checkpoint.flush = flush_checkpoint  # type: ignore[method-assign]
        second = threading.Thread(target=flush)
        second.start()
        assert not ended.is_set()
        files.held = False
        files.go_on.release()
        first.join()
        second.join()
        assert checkpoints[0], "the checkpoint vouched for a queue that had not reached the device"


def test_opening_after_a_kill_flushes_unflushed_data() -> None:
    """The page cache survived the kill. The checkpoint may cover that data only once it has reached the device."""
    dead = open_store(MemoryFiles(), SMALL)
    for number in range(150):
        dead.append(message(number), number % 2)
    dead.abandon()
    found = contents(dead.files)
    # A process that dies leaves the checkpoint as it was last flushed.
    found["checkpoint"] = bytes(4096)
    files = with_contents(RecordingFiles(), found)
    files.trace.clear()
    with opened(files, SMALL) as store:
        store.flush()
        flushed = {event.path for event in files.trace if event.call == "flush"}
        vouched = next(
            number for number, event in enumerate(files.trace)
            if (event.call, event.path) == ("flush", "/store/checkpoint")
        )  # fmt: skip
        before = {event.path for event in files.trace[:vouched] if event.call == "flush"}
        log = {store.log.sequence.path(start) for start in store.log.sequence.starts if start < store.log.end}
        assert log <= flushed
        assert log <= before
        for queue in store.queues.values():
            path, _ = queue.place_of(0)
            assert path in before


# ------------------------------------------------------------------------------------------------- the store's thread


def test_the_thread_begins_with_the_first_append() -> None:
    with open_store(HeldFiles(), background=True) as store:
        assert store.read("TopicA", 0, 0).messages == []
        store.flush()
        assert store_threads() == []
        store.append(message())
        assert len(store_threads()) == 1
        for number in range(500):
            store.append(message(number))
        assert len(store_threads()) == 1
    assert store_threads() == []


def test_a_reader_has_no_thread() -> None:
    files = MemoryFiles()
    with open_store(files) as store:
        store.append(message())
    with open_store(files, read_only=True, background=True) as store:
        list(store)
        assert store_threads() == []


@pytest.mark.parametrize("end", [MessageStore.close, MessageStore.abandon])
def test_no_thread_outlives_its_store(end: Callable[[MessageStore], None]) -> None:
    store = open_store(HeldFiles(), background=True)
    store.append(message())
    assert len(store_threads()) == 1
    end(store)
    assert store_threads() == []
    store.writer.thread.wake()  # wakes it for an append made before the store ended
    assert store_threads() == []


def test_after_recovering_time_continues() -> None:
    files = HeldFiles()
    with open_store(files, AT_ONCE, background=True) as store:
        store.append(message())
        store.recover()
        assert store_threads() == []
        acknowledgement = store.submit(message(1))
        assert len(store_threads()) == 1
        while not acknowledgement.done:  # some time after the flush
            files.flushed.acquire(timeout=LOOK_S)


def test_recovering_waits_for_the_thread_that_flushes() -> None:
    files = HeldFiles("/consumequeue/")
    config = replace(AT_ONCE, flush_interval_consumequeue_s=0, flush_thorough_interval_consumequeue_s=0)
    with open_store(files, config, background=True) as store:
        files.held = True
        store.append(message())
        files.begun.acquire()  # the thread is flushing queues
        recovered = threading.Thread(target=store.recover)
        recovered.start()
        files.held = False
        files.go_on.release()
        recovered.join()
        assert bodies(store) == [message().body]


# ------------------------------------------------------------------------------------------- processes


@pytest.mark.slow
def test_an_exit_handler_closes_a_store_of_many_queues(tmp_path: Path) -> None:
    done = run_program(
        """
        import atexit, sys
        from librmq import Message, MessageStore, StoreConfig

        store = MessageStore.open(sys.argv[1], StoreConfig.tiny())
        atexit.register(store.close)
        for queue_id in range(40):
            store.append(Message("t", b"x"), queue_id)
        """,
        tmp_path / "s",
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert not (tmp_path / "s" / "abort").exists()


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["async", "sync"])
def test_an_interpreter_ends_with_an_open_store(tmp_path: Path, durability: str) -> None:
    done = run_program(
        """
        import sys
        from librmq import Message, MessageStore, StoreConfig

        store = MessageStore.open(sys.argv[1], StoreConfig.tiny(durability=sys.argv[2], flush_interval_s=0.001))
        for number in range(1000):
            store.append(Message("t", b"%d" % number))
        """,
        tmp_path / "store",
        durability,
    )
    assert (done.returncode, done.stderr) == (0, "")
    with MessageStore.open(tmp_path / "store") as store:
        assert [one.body for one in store] == [b"%d" % number for number in range(1000)]


@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_gets_no_promise_from_its_parents_handle(tmp_path: Path) -> None:
    """A lock that another thread of the parent held at the fork blocks nothing."""
    done = run_program(
        """
        import os, sys, threading
        from librmq import Message, MessageStore, StoreClosedError, StoreConfig

        store = MessageStore.open(sys.argv[1], StoreConfig.tiny())
        store.append(Message("t", b"1"))
        acknowledgement = store.submit(Message("t", b"2"))
        assert not acknowledgement.done
        held = threading.Event()

        def hold():
            with store.appender.lock.mutex, store.appender.lock.flushing, store.writer.durability.commit._guard:
                held.set()
                released.wait()

        released = threading.Event()
        threading.Thread(target=hold).start()
        held.wait()
        child = os.fork()
        if not child:
            for call in (
                acknowledgement.wait,
                store.flush,
                store.recover,
                store.verify,
                lambda: store.append(Message("t", b"3")),
                lambda: store.append_batch([Message("t", b"3")]),
                lambda: store.read("t", 0, 0),
                lambda: store.find_by_key("t", "k"),
                lambda: list(store),
                lambda: store.submit(Message("t", b"3")),
                lambda: store.run_due(0),
            ):
                try:
                    call()
                except StoreClosedError as error:
                    assert "fork" in str(error), error
                else:
                    os._exit(3)
            store.close()
            store.abandon()
            os._exit(0)
        released.set()
        assert os.waitpid(child, 0)[1] == 0
        acknowledgement.wait()
        store.append(Message("t", b"4"))
        store.close()
        """,
        tmp_path / "store",
        PYTHONWARNINGS="ignore::DeprecationWarning",  # Python 3.12 warns of a fork beside threads
    )
    assert (done.returncode, done.stderr) == (0, "")
    with MessageStore.open(tmp_path / "store") as store:
        assert [one.body for one in store] == [b"1", b"2", b"4"]
        assert store.recovered == []


def test_errors_of_durability_are_errors_of_the_store() -> None:
    assert issubclass(FlushFailedError, StoreError)
    assert issubclass(StoreClosedError, StoreError)


@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs a list of descriptors")
def test_a_closed_store_holds_no_descriptor(tmp_path: Path) -> None:
    """The descriptors are released at the close, without waiting for a garbage collection."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        store = MessageStore.open(tmp_path / "store", replace(SMALL, enable_consumequeue_ext=True))
        for number in range(200):
            store.append(message(number), number % 5)
        list(store)
        assert descriptors() > before + 10
        store.close()
        assert descriptors() == before
        store = MessageStore.open(tmp_path / "store", read_only=True)
        assert sum(len(store.read("TopicA", queue_id, 0).messages) for queue_id in range(5)) > 0
        store.close()
        assert descriptors() == before
    finally:
        gc.enable()
