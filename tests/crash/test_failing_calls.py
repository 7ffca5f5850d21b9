"""Each call to the operating system fails once, each in its own run.

Whatever fails, the error reaches the caller with its place (or the log, for periodic work). Acknowledged messages are
served, the store continues or says that it cannot, and it is sound when it is reopened on healthy files. After a failed
flush the kernel counts lost pages as written; messages that were reported as durable still survive a crash.
"""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import FlushFailedError, StoreIOError
from librmq.files.interface import read_sole_file
from librmq.store import AppendResult, MessageStore
from librmq.store.engine._append import Appender
from librmq.store.recovery._verify import verify
from tests.budget import examples, many
from tests.conftest import SlowBudget
from tests.crash.runs import Recorded, check
from tests.data.cut import spread
from tests.file_seams import CrashImages, FailingFiles, RecordingFiles
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS, any_message, opened

CODES = (errno.ENOSPC, errno.EIO, errno.EINTR)
CONFIGS = (replace(SMALL, durability="sync"), replace(SMALL_EXT, max_total_size=3 * SMALL.commitlog_file_size))
CALLS = (
    *("reserve", "create", "open", "flush", "flush_folder", "make_folder", "list"),
    *("delete", "rename", "link", "read", "write", "lock", "used_ratio"),
)


class Session:
    """Does the same things to a store in every run, while one call fails."""

    def __init__(self, config: StoreConfig, failing: tuple[str, int, int] | None = None) -> None:
        self.rng = random.Random(1)
        self.clock = ManualClock(START_MS)
        self.disk = RecordingFiles()
        self.files = FailingFiles(self.disk)
        if failing is not None:
            self.files.fail(*failing)
        self.recorded = Recorded("failing calls", config, {}, {})
        self.store: MessageStore | None = None
        self.raised: list[Exception] = []
        self.stopped = False
        """True once the store has reported that it accepts nothing more."""

    def run(self) -> None:
        steps = ["open", *14 * ["append"], "flush", *2 * ["append", "batch", "time"], "close", "open", *10 * ["append"]]
        steps += ["batch", "time", "read", "recover", *8 * ["append"], "flush", *4 * ["append", "time"], "close"]
        for step in steps:
            before = len(self.disk.trace)
            try:
                getattr(self, step)()
            except (StoreIOError, FlushFailedError) as error:
                self.raised.append(error)
                self.stopped |= isinstance(error, FlushFailedError)
                if self.store is None or self.store.is_closed:
                    self.store, self.stopped = None, False
            if self.store is not None:
                self.recorded.deleted.append((before, self.store.log.begin))
            if self.store is None and step != "close":
                self.open()  # the call fails only once
        self.recorded.trace = list(self.disk.trace)

    def opened_store(self) -> MessageStore:
        assert self.store is not None
        return self.store

    def promise(self, physical_end: int) -> None:
        assert not self.stopped, "a stopped store acknowledges"
        self.recorded.promised.append((len(self.disk.trace), physical_end))

    def note(self, results: list[AppendResult]) -> None:
        for result in results:
            raw = self.opened_store().log.read(result.physical_offset)
            assert raw is not None
            self.recorded.records[result.physical_offset] = raw
        if self.recorded.config.durability == "sync":
            self.promise(results[-1].physical_offset + results[-1].size)

    # --- steps

    def open(self) -> None:
        if self.store is not None:
            return
        self.store = MessageStore.open(ROOT, self.recorded.config, files=self.files, clock=self.clock)
        # Messages that were not acknowledged may be there nevertheless.
        log = {m.physical_offset: bytes(m.raw) for m in self.store}
        missing = self.recorded.records.keys() - log.keys()
        assert all(at < self.store.log.begin for at in missing), "acknowledged, and not there"
        self.recorded.records |= log
        self.promise(self.store.log.end)

    def append(self) -> None:
        self.clock.advance(ms=self.rng.choice([0, 700]))
        message, fields = any_message(self.rng)
        queue_id = self.rng.randrange(2)
        if self.stopped:
            with pytest.raises(FlushFailedError):
                self.opened_store().append(message, queue_id, **fields)
            return
        end = self.opened_store().log.end
        try:
            self.note([self.opened_store().append(message, queue_id, **fields)])
        except (StoreIOError, FlushFailedError):
            self.note_unacknowledged(end)
            raise

    def batch(self) -> None:
        message, _ = any_message(self.rng, delay=False)
        batch = [any_message(self.rng, message.topic, delay=False)[0] for _ in range(3)]
        if self.stopped:
            return
        end = self.opened_store().log.end
        try:
            self.note(self.opened_store().append_batch(batch, 0))
        except (StoreIOError, FlushFailedError):
            self.note_unacknowledged(end)
            raise

    def note_unacknowledged(self, begin: int) -> None:
        """A message may be in the log although its producer got an error."""
        for message in self.opened_store():
            if message.physical_offset >= begin:
                self.recorded.records[message.physical_offset] = bytes(message.raw)

    def flush(self) -> None:
        store = self.opened_store()
        if self.stopped:
            with pytest.raises(FlushFailedError):
                store.flush()
            return
        self.promise(store.flush())

    def time(self) -> None:
        self.clock.advance(seconds=61)
        self.opened_store().run_due(self.clock.now_ms())

    def read(self) -> None:
        store = self.opened_store()
        for topic, queue_id in store.queues:
            store.read(topic, queue_id, 0)
        store.find_by_key("TopicA", "key1")

    def recover(self) -> None:
        self.opened_store().recover()
        self.stopped = False

    def close(self) -> None:
        store, stopped = self.opened_store(), self.stopped
        self.store, self.stopped = None, False
        if stopped:
            with pytest.raises(FlushFailedError):
                store.close()
            return
        store.close()


@contextmanager
def told() -> Iterator[list[str]]:
    """Collects what is logged."""
    lines: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("librmq"), Keeping()
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


@cache
def healthy(config: StoreConfig) -> dict[str, int]:
    """Return how often each call is made in a run without failures."""
    session = Session(config)
    session.run()
    assert session.raised == []
    return dict(session.files.calls)


def check_failure(config: StoreConfig, call: str, number: int, code: int) -> None:
    session = Session(config, (call, number, code))
    with told() as lines:
        session.run()
    what = f"{call} {number} {errno.errorcode[code]}"
    if session.raised:
        error, *later = session.raised  # apart from this error the store continues, or says that it cannot
        assert all("reopen it" in str(one) for one in later), what  # a failed flush of queues or index sticks
        cause = error.cause if isinstance(error, FlushFailedError) else error
        assert isinstance(cause, StoreIOError)
        assert (cause.errno, cause.call) == (code, call), what
        assert cause.filename.startswith(ROOT) or (call, cause.filename) == ("flush_folder", "/"), what
        assert cause.filename in str(error)
    else:  # the call failed in periodic work
        is_told = any(f": {call}: {os.strerror(code)}" in line for line in lines)
        assert is_told or not call_is_told(call, code, session.files.failed_within), what
    store = opened(session.disk, config)
    records = {m.physical_offset: bytes(m.raw) for m in store}
    for at, raw in session.recorded.records.items():
        if at >= store.log.begin:
            assert records.get(at) == raw, f"{what}: {at} was acknowledged"
    verdict = store.verify()
    assert verdict.sound, (what, verdict.damage)
    store.close()
    verdict = verify(ROOT, config, session.disk)
    assert verdict.sound, (what, verdict.damage)
    images = CrashImages(session.recorded.trace)
    for image in images.images(what, 4):
        try:
            check(session.recorded, image)
        except Exception as error:
            raise AssertionError(f"{what}, {image}\n{error}") from error


def call_is_told(call: str, code: int, within: frozenset[str]) -> bool:
    """Snapshots try to link files, and otherwise copy them; `read_sole_file` leaves a folder to calls that tell it.

    A reader needs no room: at a full disk it leaves the entries of the last messages to the next append.
    """
    is_left = code == errno.ENOSPC and Appender.write_entries.__name__ in within
    return call != "link" and read_sole_file.__name__ not in within and not is_left


@many
@pytest.mark.parametrize("config", CONFIGS, ids=["sync", "async"])
@pytest.mark.parametrize("call", CALLS)
def test_each_call_fails_once(config: StoreConfig, call: str) -> None:
    """Only the first, the last and some calls between; the slow test covers all of them."""
    for number in spread(list(range(1, healthy(config).get(call, 0) + 1)), examples(12)):
        check_failure(config, call, number, CODES[number % len(CODES)])


@pytest.mark.slow
def test_each_call_fails_once_in_every_way(slow_budget: SlowBudget) -> None:
    cases = [
        (config, call, number, code)
        for config in CONFIGS
        for call, count in sorted(healthy(config).items())
        for number in range(1, count + 1)
        for code in CODES
    ]
    random.Random(1).shuffle(cases)
    for number in slow_budget.rounds(len(cases), "failing calls", at_least=10, of_list=True):
        check_failure(*cases[number])
