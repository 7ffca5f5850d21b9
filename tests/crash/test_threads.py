"""Writers, readers, retention, flushes, snapshots and close in parallel: nothing acknowledged is lost or torn.

The interpreter switches threads as often as it can. Each lock is removed in turn, to show that the stress would notice
a missing one.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import pytest

from librmq.config import StoreConfig
from librmq.errors import StoreClosedError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.message.message import Message
from librmq.store import AppendResult, MessageStore
from librmq.store.engine.read import GetStatus
from librmq.store.recovery._verify import verify
from tests.conftest import SlowBudget
from tests.programs import run_program
from tests.stores import ROOT

CONFIG = StoreConfig(
    commitlog_file_size=8 << 10,
    consumequeue_file_size=30 * 20,
    consumequeue_ext_file_size=1 << 10,
    max_hash_slot_num=16,
    max_index_num=120,
    max_message_size=3000,
    max_total_size=64 << 10,
    flush_interval_s=0,
    flush_thorough_interval_s=0,
    flush_interval_consumequeue_s=0,
    flush_thorough_interval_consumequeue_s=0,
)
"""Settings with files that roll after a few messages and go after a few dozen, and constant flushes."""
TOPICS = ("A", "B")
QUEUES = 2


@contextmanager
def restless() -> Iterator[None]:
    """Make the interpreter switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


_TURNS = ("read", "scanned", "flushed")


class NoLock:
    """Replaces a lock and locks nothing."""

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def body_of(writer: int, number: int) -> bytes:
    rng = random.Random(writer * 100_003 + number)
    return b"%d %d " % (writer, number) + rng.randbytes(rng.choice([0, 20, 400]))


@dataclass
class Stress:
    """One run; ``failures`` are errors that no thread should get."""

    files: Files
    path: str
    config: StoreConfig
    seed: int
    messages: int
    """Number of messages that each writer appends, unless the store is closed earlier."""
    close_after: int
    """Least number of appends, by all writers, before the store is closed."""
    take_away: Callable[[MessageStore], None] | None = None
    failures: list[BaseException] = field(default_factory=list)
    acknowledged: dict[int, tuple[str, int, bytes, int]] = field(default_factory=dict)
    """Topic, queue, body and queue offset, by physical offset."""
    counts: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        self._store = MessageStore.open(self.path, self.config, files=self.files, background=True)
        if self.take_away is not None:
            self.take_away(self._store)
        self._appended = threading.Semaphore(0)
        self._over = threading.Event()
        roles: list[Callable[[int], None]] = [
            *[self._write] * 3,
            *[self._read] * 2,
            self._search,
            self._flush,
            self._snapshot,
        ]
        threads = [
            threading.Thread(target=self._guarded, args=(role, number), daemon=True)
            for number, role in enumerate(roles)
        ]
        with restless():
            for thread in threads:
                thread.start()
            for _ in range(self.close_after):
                self._appended.acquire()
            for _ in range(self.messages):  # until retention has deleted files and each kind of thread has had its turn
                if (self._store.log.begin and all(map(self.counts.get, _TURNS))) or self.failures:
                    break
                self._appended.acquire()
            try:
                self._store.close()
            except Exception as error:
                self.failures.append(error)
            self._over.set()
            for thread in threads:
                thread.join()
        if not self.failures:
            self._check()

    def _guarded(self, role: Callable[[int], None], number: int) -> None:
        try:
            role(number)
        except StoreClosedError:
            self.counts["closed"] += 1
        except BaseException as error:
            self.failures.append(error)
        finally:
            for _ in range(self.close_after):  # releases threads that wait for appends
                self._appended.release()

    def _write(self, writer: int) -> None:
        store, rng = self._store, random.Random(f"{self.seed} {writer}")
        number = 0
        while number < self.messages and not self.failures:
            topic, queue_id, way = rng.choice(TOPICS), rng.randrange(QUEUES), rng.random()
            bodies = [body_of(writer, number)]
            if way < 0.2:
                bodies.append(body_of(writer, number + 1))
            keys = [f"{writer}-{number + at}" for at in range(len(bodies))]
            messages = [Message(topic, body, keys=key) for body, key in zip(bodies, keys, strict=True)]
            results: list[AppendResult]
            if len(messages) > 1:
                results = store.append_batch(messages, queue_id)
            elif way < 0.4:
                results = [store.submit(messages[0], queue_id).wait()]
            else:
                results = [store.append(messages[0], queue_id)]
            for body, result in zip(bodies, results, strict=True):
                assert result.physical_offset not in self.acknowledged, "two messages in one place"
                self.acknowledged[result.physical_offset] = (topic, queue_id, body, result.queue_offset)
                self._appended.release()
            number += len(messages)

    def _read(self, reader: int) -> None:
        """Follow all queues: no hole, nothing twice, nothing torn; the store skips what retention deleted."""
        store = self._store
        next_offsets = dict.fromkeys(((topic, queue_id) for topic in TOPICS for queue_id in range(QUEUES)), 0)
        while not self._over.is_set() and not self.failures:
            for (topic, queue_id), queue_offset in next_offsets.items():
                result = store.read(topic, queue_id, queue_offset, 5)
                expected = queue_offset
                for message in result.messages:
                    assert (message.topic, message.queue_id) == (topic, queue_id)
                    assert message.queue_offset >= expected
                    if message.queue_offset > expected:  # only messages deleted with the oldest files may be missing
                        begin = store.log.begin
                        assert begin > 0
                        assert message.physical_offset < begin + 2 * self.config.commitlog_file_size, "a hole"
                    assert message.crc_ok
                    writer, number = map(int, message.body.split(b" ", 2)[:2])
                    assert message.body == body_of(writer, number), "torn"
                    expected = message.queue_offset + 1
                    self.counts["read"] += 1
                if result.status in (GetStatus.FOUND, GetStatus.OFFSET_TOO_SMALL):
                    assert result.next_offset >= queue_offset
                    next_offsets[topic, queue_id] = result.next_offset

    def _search(self, _: int) -> None:
        store, rng = self._store, random.Random(self.seed)
        while not self._over.is_set() and not self.failures:
            for message in store:
                assert message.crc_ok
                self.counts["scanned"] += 1
            for physical_offset, (topic, _queue_id, body, _queue_offset) in (
                rng.sample(sorted(dict(self.acknowledged).items()), 3) if len(self.acknowledged) > 3 else []
            ):
                found = store.find_by_key(topic, "-".join(body.decode("latin-1").split(" ", 2)[:2]))
                if physical_offset >= store.log.begin:
                    assert [message.body for message in found] == [body]
                self.counts["found"] += len(found)

    def _flush(self, _: int) -> None:
        store = self._store
        while not self._over.is_set() and not self.failures:
            end = store.log.end
            assert store.flush() >= end
            self.counts["flushed"] += 1

    def _snapshot(self, _: int) -> None:
        store = self._store
        while not self._over.is_set() and not self.failures:
            before = dict(self.acknowledged)
            target = f"{self.path}-snapshot"
            try:
                taken = store.snapshot(target)
                with MessageStore.open(target, self.config, files=self.files, read_only=True) as copy:
                    found = {message.physical_offset: message.body for message in copy}
                for physical_offset, appended in before.items():
                    assert physical_offset < taken.begin or found[physical_offset] == appended[2]
                assert verify(target, self.config, self.files).sound
                self.counts["snapshots"] += 1
            finally:
                self.files.delete(target)

    def _check(self) -> None:
        verdict = verify(self.path, self.config, self.files)
        assert verdict.sound, verdict.damage
        with MessageStore.open(self.path, self.config, files=self.files) as store:
            assert store.recovered == []
            found = {message.physical_offset: message for message in store}
            for physical_offset, (topic, queue_id, body, queue_offset) in self.acknowledged.items():
                if physical_offset >= store.log.begin:
                    message = found[physical_offset]
                    assert (message.topic, message.queue_id, message.body) == (topic, queue_id, body)
                    assert message.queue_offset == queue_offset
            for topic in TOPICS:
                for queue_id in range(QUEUES):
                    taken = sorted(at for t, q, _, at in self.acknowledged.values() if (t, q) == (topic, queue_id))
                    assert len(set(taken)) == len(taken)
            self.counts["deleted"] += store.log.begin > 0


def stress(files: Files, path: str, seed: int, take_away: Callable[[MessageStore], None] | None = None) -> Stress:
    rng = random.Random(seed)
    found = Stress(
        files,
        path,
        replace(
            CONFIG, durability="sync" if rng.random() < 0.5 else "async", enable_consumequeue_ext=rng.random() < 0.3
        ),
        seed,
        messages=10_000,
        close_after=rng.choice([300, 600]),
        take_away=take_away,
    )
    try:
        found.run()
    except Exception as error:
        found.failures.append(error)
    return found


def assert_sound(found: Stress) -> None:
    if found.failures:
        raise AssertionError(f"seed {found.seed}: {len(found.failures)} failures") from found.failures[0]


@pytest.mark.slow
def test_everything_at_once_for_long(tmp_path: Path, slow_budget: SlowBudget) -> None:
    counts = Counter[str]()
    for seed in slow_budget.rounds(30, "runs of everything at once", at_least=4):
        files: Files = DiskFiles() if seed % 2 else MemoryFiles()
        found = stress(files, str(tmp_path / f"{seed}"), 1000 + seed)
        assert_sound(found)
        counts += found.counts
    for what in (*_TURNS, "closed", "deleted"):
        assert counts[what] > 0, f"nothing was {what}: the stress is none"


def passes_without_the_lock(seeds: range) -> bool:
    """Return whether the stress passes without the lock that producers hold while they write."""

    def without(store: MessageStore) -> None:
        store.appender.lock.mutex = NoLock()  # type: ignore[assignment]

    return not any(stress(MemoryFiles(), ROOT, seed, without).failures for seed in seeds)


@pytest.mark.slow
def test_a_lock_that_is_missing_is_found() -> None:
    """Runs in a separate process, because some threads may never end."""
    program = "import os; from tests.crash import test_threads as t; os._exit(t.passes_without_the_lock(range(20)))"
    assert run_program(program, timeout=240).returncode == 0
