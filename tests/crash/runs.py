"""Recorded runs of a store, and what must hold for every crash image of them."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.files.interface import file_size
from librmq.message.message import Message, StoredMessage
from librmq.message.record import QUEUE_OFFSET_AT
from librmq.message.topics import SystemTopic
from librmq.runtime.locks import Lock
from librmq.store import AppendResult, MessageStore
from librmq.store.engine._durability import Acknowledgement
from librmq.store.engine.derivation import has_queue_entry
from librmq.store.recovery._verify import verify
from librmq.store.retention import Retention
from tests.file_seams import CrashImages, Event, Image, RecordingFiles
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS, any_message, opened, retained, served

PAGES = replace(SMALL, commitlog_file_size=3 * 4096)
"""Settings with log files of several pages."""
BOUNDED = replace(SMALL, max_total_size=3 * SMALL.commitlog_file_size)
WIDE = replace(
    SMALL_EXT,
    commitlog_file_size=4 * 4096,
    consumequeue_file_size=2000,
    consumequeue_ext_file_size=2048,
    max_hash_slot_num=64,
    max_index_num=256,
)
"""The files of queues and index have several sectors, too."""
CONFIGS = (
    SMALL, replace(SMALL_EXT, mapped_files=2), PAGES, BOUNDED, WIDE,
    replace(WIDE, enable_consumequeue_ext=False, mapped_files=1),
)  # fmt: skip


_machines = itertools.count()


class BusyFiles(RecordingFiles):
    """Files that record changes, and run an action during a flush that does not cover it.

    They are on a machine of their own, which a killed process shares with the next one.
    """

    meanwhile: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.machine = f"machine {next(_machines)}"

    def identity(self, path: str) -> str:
        return f"{self.machine}: {path}"

    def flush(self, file: Any, begin: int = 0, end: int | None = None) -> None:
        super().flush(file, begin, end)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
            self.meanwhile = meanwhile

    def killed(self) -> BusyFiles:
        """Return what the next process finds after this one is killed: everything written, flushed or not."""
        other = BusyFiles()
        other._files, other._folders, other.trace = self._files, self._folders, self.trace
        other.machine = self.machine
        return other


@dataclass
class Recorded:
    """A run: its changes of files, and its promises with the times at which they were made."""

    seed: str
    config: StoreConfig
    contents: dict[str, bytes | None]
    """The disk before the run."""
    records: dict[int, bytes]
    """The appended records, by physical offset."""
    trace: list[Event] = field(default_factory=list)
    promised: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (events, offset): after that many events everything below the physical offset is durable."""
    deleted: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (events, offset): after that many events everything below the physical offset may be deleted."""
    older: dict[int, bytes] = field(default_factory=dict)
    """Records that the log may hold until the run has opened the store."""
    opened_at: int = 0
    """Number of events that the opening took."""
    opened: list[int] = field(default_factory=list)
    """Numbers of events after which the store was opened."""
    closed: list[int] = field(default_factory=list)
    """Numbers of events after which the store was closed."""
    vouched: int | None = None
    """Number of events after which there is a checkpoint."""
    rotten: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of events during which the store has damage that no crash causes."""

    def promised_at(self, crash_point: int) -> int:
        return max((end for events, end in self.promised if events <= crash_point), default=0)

    def deleted_at(self, crash_point: int) -> int:
        return max((begin for events, begin in self.deleted if events <= crash_point), default=0)

    def is_rotten(self, crash_point: int) -> bool:
        return any(begin <= crash_point < end for begin, end in self.rotten)

    def records_at(self, crash_point: int) -> dict[int, bytes]:
        return self.older if crash_point < self.opened_at else self.records


class Run:
    """Does random things to a store, and records its promises."""

    def __init__(self, seed: str, before: tuple[Recorded, Image] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = ManualClock(START_MS)
        self.files = BusyFiles()
        if before is None:
            config = rng.choice(CONFIGS)
            if rng.random() < 0.5:
                config = replace(config, durability="sync")
            self.recorded = Recorded(seed, config, {}, {})
        else:
            earlier, image = before
            self.clock.advance(seconds=rng.choice([0, 2, 60, 86_400]))  # may be earlier than the end of the run before
            image.write_to(self.files)
            self.files.trace.clear()
            self.recorded = Recorded(seed, earlier.config, dict(image.contents), {})
            self.recorded.older = earlier.records_at(image.crash_point)
            self.recorded.promised = [(0, earlier.promised_at(image.crash_point))]
            self.recorded.deleted = [(0, earlier.deleted_at(image.crash_point))]
        self.waiting: list[Acknowledgement[AppendResult]] = []
        self.without_keys = rng.random() < 0.1
        self.guard = Lock()
        self.open(thorough=before is not None and rng.random() < 0.2)
        (self.recorded.opened_at,) = self.recorded.opened
        self.recorded.records = {m.physical_offset: bytes(m.raw) for m in self.store}

    def open(self, *, thorough: bool = False) -> None:
        self.store = MessageStore.open(
            ROOT, self.recorded.config, files=self.files, clock=self.clock, thorough=thorough
        )
        self.promise(self.store.log.end)
        self.recorded.opened.append(len(self.files.trace))

    # --- recording

    def promise(self, physical_end: int) -> None:
        self.recorded.promised.append((len(self.files.trace), physical_end))

    def note(self, result: AppendResult) -> None:
        raw = self.store.log.read(result.physical_offset)
        assert raw is not None
        with self.guard:
            self.recorded.records[result.physical_offset] = raw

    def look(self) -> None:
        """Record which acknowledgements have completed."""
        for acknowledgement in self.waiting:
            if acknowledgement.done:
                self.promise(acknowledgement.result.physical_offset + acknowledgement.result.size)
        self.waiting = [one for one in self.waiting if not one.done]

    # --- operations

    def any_message(self, *, delay: bool = True) -> tuple[Message, dict[str, Any]]:
        message, fields = any_message(self.rng, delay=delay)
        if self.rng.random() < 0.1:
            message.body = self.rng.randbytes(self.rng.randrange(512, 1200))  # several sectors long
        elif self.rng.random() < 0.1:
            message.properties["long"] = "y" * self.rng.randrange(400, 1200)
        if self.without_keys:
            message.properties = {k: v for k, v in message.properties.items() if k not in ("KEYS", "UNIQ_KEY")}
        return message, fields

    def submit(self) -> None:
        message, fields = self.any_message()
        if self.rng.random() < 0.2:
            fields["sys_flag"] = self.rng.choice([4, 8, 12])
        acknowledgement = self.store.submit(message, self.rng.randrange(2), **fields)
        self.note(acknowledgement.result)
        self.waiting.append(acknowledgement)

    def append(self) -> None:
        message, fields = self.any_message()
        result = self.store.append(message, self.rng.randrange(2), **fields)
        if self.recorded.config.durability == "sync":
            self.promise(result.physical_offset + result.size)
        self.note(result)

    def burst(self) -> None:
        """Submit many messages to one queue."""
        message, _ = any_message(self.rng, delay=False)
        queue_id, tag = self.rng.randrange(2), self.rng.choice([None, "a", "b"])
        for number in range(self.rng.randrange(5, 30)):
            one = Message(message.topic, b"%d" % number, tags=tag, keys=f"k{number % 4}")
            acknowledgement = self.store.submit(one, queue_id)
            self.note(acknowledgement.result)
            self.waiting.append(acknowledgement)

    def batch(self) -> None:
        message, _ = any_message(self.rng, delay=False)
        count = self.rng.randrange(1, 5)
        batch = [any_message(self.rng, message.topic, delay=False)[0] for _ in range(count)]
        results = self.store.append_batch(batch, self.rng.randrange(2))
        if self.recorded.config.durability == "sync":
            self.promise(results[-1].physical_offset + results[-1].size)
        for result in results:
            self.note(result)

    def wait(self) -> None:
        if self.waiting:
            one = self.rng.choice(self.waiting)
            if len(self.waiting) % 2:
                one.wait()
            else:
                self.store.wait_for(one.result)
            self.promise(one.result.physical_offset + one.result.size)

    def flush(self) -> None:
        self.promise(self.store.flush())
        if self.recorded.vouched is None:
            self.recorded.vouched = len(self.files.trace)

    def flush_while_others_append(self) -> None:
        self.submit()

        def meanwhile() -> None:
            if not self.store.appender.lock.mutex.locked() and self.rng.random() < 0.5:  # else a producer is flushing
                self.submit()
                if self.rng.random() < 0.5:
                    self.store.find_by_key("TopicA", "key1")  # writes submitted messages to queues and index

        self.files.meanwhile = meanwhile
        try:
            self.rng.choice((self.wait, self.flush, self.append))()
        finally:
            self.files.meanwhile = None

    def pass_time(self) -> None:
        self.clock.advance(ms=self.rng.choice([0, 1, 700, 5000, 61_000]))
        self.store.run_due(self.clock.now_ms())

    def expire(self) -> None:
        store = self.store
        store.flush()
        retention = Retention(retained(store, self.recorded.config, lock=store.appender.lock))
        retention.delete_before(self.rng.choice([0, store.log.begin + store.log.file_size, store.log.end]))

    def close_and_open(self) -> None:
        end = self.store.log.end
        self.store.close()
        self.promise(end)
        self.recorded.closed.append(len(self.files.trace))
        self.open()

    def kill_and_open(self) -> None:
        """Let the process die but not the machine."""
        self.files = self.files.killed()
        self.waiting.clear()
        self.open(thorough=self.rng.random() < 0.5)
        assert {m.physical_offset: bytes(m.raw) for m in self.store} == {
            at: raw for at, raw in self.recorded.records.items() if at >= self.store.log.begin
        }

    def rot_and_recover(self) -> None:
        """Change the queue offset of a record, which recovery repairs."""
        records = [m for m in self.store if has_queue_entry(m.sys_flag)]
        if len(records) < 5:
            return
        self.store.close()
        self.waiting.clear()
        message = self.rng.choice(records[1:-1])
        begin = len(self.files.trace)
        size = self.recorded.config.commitlog_file_size
        start = message.physical_offset - message.physical_offset % size
        file = self.files.open(f"{ROOT}/commitlog/{start:020d}", writable=True)
        at = message.physical_offset - start + QUEUE_OFFSET_AT + 2
        file.buffer[at] = 1
        self.files.flush(file)
        self.open(thorough=True)
        self.recorded.rotten.append((begin, len(self.files.trace)))

    def recover(self) -> None:
        cuts = self.store.recover()
        assert cuts == [], cuts
        self.waiting.clear()

    def threads(self) -> None:
        """Let parallel producers share flushes."""
        store, count = self.store, 3

        def produce(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(count):
                message, fields = any_message(rng)
                result = store.submit(message, rng.randrange(2), **fields).wait()
                with self.guard:
                    self.promise(result.physical_offset + result.size)
                self.note(result)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(produce, [self.rng.random() for _ in range(3)]))

    STEPS: tuple[tuple[Callable[[Any], None], int], ...] = (
        (submit, 10),
        (append, 10),
        (burst, 2),
        (batch, 3),
        (wait, 2),
        (flush, 2),
        (flush_while_others_append, 3),
        (pass_time, 4),
        (expire, 1),
        (close_and_open, 1),
        (kill_and_open, 1),
        (recover, 1),
        (rot_and_recover, 1),
    )

    def step(self, what: Callable[[Run], None]) -> None:
        before = len(self.files.trace)
        what(self)
        self.recorded.deleted.append((before, self.store.log.begin))
        self.look()

    def run(self, steps: int) -> Recorded:
        whats, weights = zip(*self.STEPS, strict=True)
        for what in self.rng.choices(whats, weights, k=steps):
            self.step(what)
        self.recorded.trace = list(self.files.trace)
        return self.recorded


def record(seed: str, steps: int = 25) -> Recorded:
    """Make a run that begins with a new store."""
    return Run(seed).run(steps)


def record_after(earlier: Recorded, image: Image, seed: str) -> Recorded:
    """Make a run that begins with the recovery of an earlier run's image."""
    return Run(seed, (earlier, image)).run(12)


# ------------------------------------------------------------------------------------------------------- checking


def check(recorded: Recorded, image: Image, *, thoroughly: bool = False) -> None:
    """Check everything that must hold for a store that is opened after the crash."""
    if recorded.is_rotten(image.crash_point):
        return
    files, config = image.files(), recorded.config
    expected = recorded.records_at(image.crash_point)
    promised, deleted = recorded.promised_at(image.crash_point), recorded.deleted_at(image.crash_point)
    if recorded.vouched is not None and recorded.vouched <= image.crash_point:
        assert image.contents.get("/store/checkpoint"), "there was a checkpoint"
    store = opened(files, config)
    if image.crash_point in recorded.closed and "/store/abort: the new one" not in image.choices:
        assert "/store/abort" not in image.contents
        assert store.recovered == []
    found = list(store)
    for message in found:
        at = message.physical_offset
        assert expected.get(at) == message.raw, f"served at {at}, and never appended: {message}"
    begin = found[0].physical_offset if found else store.log.end
    assert [m.physical_offset for m in found] == [at for at in sorted(expected) if begin <= at < store.log.end]
    lost = [at for at in expected if deleted <= at < promised and not begin <= at < store.log.end]
    assert not lost, f"acknowledged, and lost: {lost}; the log has {begin} to {store.log.end}"
    verdict = store.verify()
    assert verdict.sound, verdict.damage
    if thoroughly:
        assert [*served(store)] == [m.physical_offset for m in found]
    _go_on(store, found, expected, promised, image)
    end = store.log.end
    store.close()
    assert file_size(files, "/store/abort") is None
    verdict = verify(ROOT, config, files)
    assert verdict.sound, verdict.damage
    if thoroughly:
        with opened(files, config) as store:
            assert store.recovered == []
            assert store.log.end == end
            served(store)
        with opened(image.files(), config, thorough=True) as store:
            assert list(store) == found
            served(store)
            verdict = store.verify()
            assert verdict.sound, verdict.damage


def _go_on(
    store: MessageStore, found: list[StoredMessage], expected: dict[int, bytes], promised: int, image: Image
) -> None:
    """Append to queues; the count must continue after the existing and promised messages."""
    last: dict[tuple[str, int], int] = {}
    floor: dict[tuple[str, int], int] = {}
    for message in found:
        if has_queue_entry(message.sys_flag):
            last[message.topic, message.queue_id] = message.queue_offset + 1
    for at, raw in expected.items():
        message = StoredMessage(raw)
        if at < promised and has_queue_entry(message.sys_flag):
            name = message.topic, message.queue_id
            floor[name] = max(floor.get(name, 0), message.queue_offset + 1)
    rng = random.Random(image.crash_point)
    for topic, queue_id in rng.sample(sorted({*last, *floor, ("New", 0)}), min(3, 1 + len({*last, *floor}))):
        appended, fields = any_message(rng, topic, delay=False)
        if topic == SystemTopic.SCHEDULE:
            appended.properties["DELAY"] = str(queue_id + 1)
        result = store.append(appended, queue_id, **fields)
        name = topic, queue_id
        assert result.queue_offset >= floor.get(name, 0), (name, result)
        if name in last:
            assert result.queue_offset == last[name], (name, result)
        stored = store.message_at(result.physical_offset)
        assert stored is not None
        assert stored.body == appended.body
        assert store.read(topic, queue_id, result.queue_offset, 1).messages == [stored]


def assert_settled(files: RecordingFiles) -> None:
    """Check that all changes of ``files`` are on the device, so that no crash can lose any."""
    images = CrashImages(files.trace)
    for seed in range(20):
        image = images.image(seed, len(files.trace))
        assert image.choices == (), image
        for path, data in image.contents.items():
            assert data is None or data == files.read(path), path


class CrashError(AssertionError):
    """A condition does not hold after a crash; the error says how to reproduce it."""


def crash_points(recorded: Recorded, seed: str, count: int) -> list[int]:
    """Return ``count`` points of a run in ascending order, half of them after a rename or a change of the checkpoint.

    Each point at which the store has just been opened or closed is included too.
    """
    rng, every = random.Random(seed), range(len(recorded.trace) + 1)
    rare = [
        number
        for number, event in enumerate(recorded.trace, 1)
        if event.call not in ("write", "flush") or event.path.endswith("/checkpoint")
    ]
    drawn = [rng.choice(rare if number % 2 else every) for number in range(count)]
    return sorted([*drawn, *recorded.opened, *recorded.closed])


def check_images(recorded: Recorded, seed: str, count: int) -> list[Image]:
    """Check a crash image at each of `crash_points`, one in ten thoroughly.

    Return the images from which a run can continue.
    """
    images = []
    every = CrashImages(recorded.trace, recorded.contents)
    for number, crash_point in enumerate(crash_points(recorded, seed, count)):
        image = every.image(f"{seed}/{number}", crash_point)
        try:
            check(recorded, image, thoroughly=number % 10 == 0)
        except Exception as error:
            raise CrashError(f"run {recorded.seed!r}, {image}\n{type(error).__name__}: {error}") from error
        if not recorded.is_rotten(image.crash_point):
            images.append(image)
    return images


def check_lives(seed: str, counts: Sequence[int]) -> int:
    """Make a run, then others that each start from a crash of the one before; return the number of checked images."""
    recorded = record(f"{seed} life 1")
    for life, count in enumerate(counts, 1):
        images = check_images(recorded, f"{seed} crash {life}", count)
        if life < len(counts):
            image = random.Random(f"{seed} {life}").choice(images)
            recorded = record_after(recorded, image, f"{seed} life {life + 1}")
    return sum(counts)


def main(images: int) -> int:
    """Check this many images or stop at the first failure: ``python -m tests.crash.runs 1000``."""
    done = number = 0
    while done < images:
        try:
            done += check_lives(f"hunt {number}", (20, 15, 15))
        except Exception as error:
            print(f"after {done} images: {type(error).__name__}: {error}")
            return 1
        number += 1
    print(f"{done:,} images, no loss")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
