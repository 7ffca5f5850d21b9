"""One run of everything: what clients do and what fails is drawn from a seed, and a week passes in its events' time."""

from __future__ import annotations

import errno
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import librmq
from librmq.client import CheckedMessage
from librmq.client.queue_selectors import select_by_hash
from librmq.client.recorder import id_of
from librmq.errors import RmqError, StoreIOError
from librmq.files.interface import File
from librmq.listener import ReconsumeLater
from librmq.message.topics import SystemTopic
from librmq.override import override
from librmq.protocol import EndTransaction
from librmq.scheduling.timer_config import TimerConfig
from librmq.testing import Kit
from librmq.testing._process import Process
from librmq.testing.histories.anomalies import check_history
from tests.file_seams import CrashImages, Image, RecordingFiles
from tests.simulation.promises import broken_promises, had_two_readers, records

DAYS: Final = 7
STEPS: Final = 2_000
"""Draws of a week; each is some sends, a read, or a fault."""
STORE: Final = "/sim"
TAKEN_BY: Final = {
    "orders": ("billing", "audit"),
    "payments": ("billing",),
    "reminders": ("bell", "mailer"),
    "parcels": ("shipping",),
}
"""The groups that take every message of a topic."""
_DRAIN_H: Final = 80
"""Hours in which a timer of three days, and then the attempts of a poisoned message, come to their end."""
_LONG_GAPS: Final = 0.3
"""The part of the gaps between draws in which nearly all of the time passes; the others last some seconds at most."""
_MOST_ATTEMPTS: Final = 5
_SAVED_MS: Final = 15_000
"""Time in which progress is saved for a loss of power, while a broker runs whose disk has room."""
_NEVER: Final = timedelta(days=365)
_CONFIG: Final = librmq.StoreConfig.tiny(
    commitlog_file_size=256 << 10, max_message_size=64 << 10, max_total_size=4 << 20, durability="sync"
)
_TIMERS: Final = TimerConfig(slots_total=3 * 7200, timer_roll_window_slot=7200, timer_log_file_size=64 << 10)
"""A small wheel, round which a message of three days goes many times."""


class Disk(RecordingFiles):
    """A disk in memory that can be full, and that a power cut leaves in one of the states that it allows."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self._cuts = 0
        self._before: dict[str, bytes | None] = {}

    def create(self, path: str, size: int, *, keep_descriptor: bool = False) -> File:
        """Refuse a new file while the disk is full."""
        if self.is_full:
            raise StoreIOError("create", path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return super().create(path, size, keep_descriptor=keep_descriptor)

    def cut_power(self, seed: str) -> None:
        """Become what the device holds; no process may have a file open."""
        self._cuts += 1
        image = CrashImages(self.trace, self._before).image(seed, len(self.trace))
        for name in self.names(os.sep):
            self.delete(os.sep + name)
        image.write_to(self)
        self._before = dict(image.contents)
        self.trace.clear()

    @override
    def identity_in_memory(self, path: str) -> str:
        """Return another text after each loss of power, as for a machine that has started again."""
        return f"{super().identity_in_memory(path)} {self._cuts}"

    def put_folder(self, source: Path) -> None:
        """Let the store begin as a copy of a folder, which the device holds."""
        self._before = {STORE: None}
        for path in sorted(source.rglob("*")):
            if path.is_dir() or path.stat().st_size:
                name = os.path.join(STORE, path.relative_to(source))
                self._before[name] = None if path.is_dir() else path.read_bytes()
        Image(0, 0, self._before, ()).write_to(self)
        self.trace.clear()


class World:
    """A broker, its clients and what goes wrong, from one seed."""

    def __init__(
        self,
        seed: int | str,
        *,
        over_share: bool = False,
        begin_with: tuple[Path, librmq.StoreConfig, int] | None = None,
    ) -> None:
        """Open the broker and start the clients.

        Args:
            seed: Decides everything.
            over_share: Whether clients reach the broker as peers of a shared store, through its socket.
            begin_with: The folder of a store to go on with, its settings, and its last time in ms.
        """
        self.rng = random.Random(f"world {seed}")
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.disk = Disk()
        config, now_ms = _CONFIG, 1_700_000_000_000  # a seed repeats the times too
        if begin_with is not None:
            folder, sizes, now_ms = begin_with
            self.disk.put_folder(folder)
            config = replace(sizes, durability="sync")
        self.config = config
        self.kit = kit = Kit(
            STORE,
            files=self.disk,
            store_config=config,
            broker_config=librmq.BrokerConfig(timers=_TIMERS) if begin_with is None else None,
            now_ms=now_ms,
            over_share=over_share,
            check=True,
        )
        kit.network.has_pages = not over_share
        for topic in TAKEN_BY:
            kit.broker.create_topic(topic, 4)
        self.producers = [
            kit.app(f"shop{number}", lambda process: librmq.Producer(process, "shop")) for number in range(2)
        ]
        self.bank = kit.app("bank", lambda process: librmq.TransactionProducer(process, "bank", self._decision_of))
        self.apps = [
            *(kit.app(f"billing{number}", self._billing, fail_fast=False) for number in range(2)),
            *(kit.app(f"shipping{number}", self._shipping, fail_fast=False) for number in range(2)),
            kit.app("cache", self._cache, fail_fast=False),
            kit.app("stamps", self._stamps, fail_fast=False),
            kit.app("bell", self._bell, fail_fast=False),
            kit.app("audit", self._audit, fail_fast=False),
            kit.app("mailer", self._mailer, fail_fast=False),
        ]
        self._number = 0
        self._timers: list[librmq.SendResult] = []
        self._cancelled: set[str] = set()
        self._given_up: set[str] = set()
        self._ended_ms: list[int] = []
        """When the broker's process ended."""
        self._unsaved_ms: list[tuple[int, int]] = []
        """Times in which progress could not be saved: each begins, and has an end."""

    # ---- the clients

    def _billing(self, process: Process) -> None:
        consumer = process.consumer(
            "billing", max_reconsume_times=_MOST_ATTEMPTS, consume_from=librmq.ConsumeFrom.FIRST, threads=3
        )
        for topic in ("orders", "payments"):
            consumer.subscribe(topic, self._consume)

    def _shipping(self, process: Process) -> None:
        consumer = process.consumer(
            "shipping", orderly=True, max_reconsume_times=_MOST_ATTEMPTS, consume_from=librmq.ConsumeFrom.FIRST
        )
        consumer.subscribe("parcels", self._consume)

    def _cache(self, process: Process) -> None:
        consumer = process.consumer("cache", model=librmq.MessageModel.BROADCASTING, instance_name="cache")
        consumer.subscribe("orders", lambda message: None, tags="a || b")

    def _stamps(self, process: Process) -> None:
        """Take the messages of some tags."""
        consumer = process.consumer("stamps", consume_from=librmq.ConsumeFrom.FIRST)
        consumer.subscribe("orders", lambda message: None, tags="a || b")

    def _bell(self, process: Process) -> None:
        """Take reminders the moment they are due."""
        consumer = process.consumer("bell", max_reconsume_times=_MOST_ATTEMPTS, consume_from=librmq.ConsumeFrom.FIRST)
        consumer.subscribe("reminders", self._consume)

    def _audit(self, process: Process) -> librmq.PullConsumer:
        consumer = librmq.PullConsumer(process, "audit", consume_from=librmq.ConsumeFrom.FIRST)
        consumer.subscribe("orders")
        return consumer.start()

    def _mailer(self, process: Process) -> librmq.SimpleConsumer:
        consumer = librmq.SimpleConsumer(process, "mailer")
        consumer.subscribe("reminders")
        return consumer.start()

    def _consume(self, message: librmq.DeliveredMessage) -> None:
        """Fail by the message's own name: now and then at first, or always."""
        lot = zlib.crc32(message.body[:12]) % 100
        if lot < 2 or (lot < 15 and not message.reconsume_times):
            raise ReconsumeLater("as drawn")

    def _decision_of(self, message: CheckedMessage) -> librmq.TransactionState:
        """Decide at once, after some checks, or never, until the broker gives the message up."""
        lot = zlib.crc32(message.body[:12])
        if lot % 11 == 0 or (lot % 3 == 0 and message.check_times < 3):
            return librmq.TransactionState.UNKNOWN
        decision, half = _decision(message.body), message.half
        if lot % 5 == 0:
            end = EndTransaction("bank", decision, half.queue_offset, half.physical_offset, message.message_id)
            self.kit.later(self.rng.choice((5, 400)), "the bank decides late", partial(self._end_late, end))
        return decision

    def _end_late(self, end: EndTransaction) -> None:
        """End a transaction that the answer to a check has ended."""
        with suppress(RmqError):
            self.kit.route.endpoint(self.kit.broker.name).call(end)

    # ---- what happens

    def _body(self) -> bytes:
        self._number += 1
        return (b"%012d" % self._number) + self.rng.randbytes(self.rng.choice((0, 20, 200, 3000)))

    def _producer(self) -> librmq.Producer:
        producer: librmq.Producer = self.rng.choice(self._living(self.producers)).state
        return producer

    def _living(self, apps: list[Process]) -> list[Process]:
        names = {app.name for app in apps}
        return [process for process in self.kit.processes if process.name in names and not process.dead]

    def send(self) -> None:
        """Send plain messages, with and without tags and keys."""
        for _ in range(self.rng.randint(1, 5)):
            self._producer().send("orders", self._body(), tags=self.rng.choice((None, "a", "b", "c")), keys="k")

    def send_batch(self) -> None:
        self._producer().send_batch([librmq.Message("orders", self._body()) for _ in range(self.rng.randint(2, 6))])

    def send_one_way(self) -> None:
        self._producer().send_oneway("orders", self._body())

    def send_ordered(self) -> None:
        key = str(self.rng.randrange(8))
        for _ in range(self.rng.randint(1, 4)):
            self._producer().send("parcels", self._body(), selector=select_by_hash, arg=key)

    def send_delayed(self) -> None:
        """Send a message for later: at a level, or at any time of up to three days."""
        if self.rng.random() < 0.4:
            sent = self._producer().send("reminders", self._body(), delay_level=self.rng.choice((1, 2, 3, 5)))
        else:
            delay = self.rng.choice((1, 10, 60, 37, 4000, 86_400, 3 * 86_000))
            for more in range(self.rng.randint(1, 3)):  # due one second after the other
                sent = self._producer().send("reminders", self._body(), delay=timedelta(seconds=delay + more))
        if self.rng.random() < 0.2:
            self._timers.append(sent)

    def cancel(self) -> None:
        """Cancel a delayed message, which may be on its way."""
        if self._timers:
            sent = self._timers.pop(self.rng.randrange(len(self._timers)))
            self._cancelled.add(sent.message_id)
            self._producer().cancel(sent)

    def transact(self) -> None:
        """Send in a transaction that ends, or that the broker has to ask about."""
        message = librmq.Message("payments", self._body())
        state = _decision(message.body) if self.rng.random() < 0.6 else librmq.TransactionState.UNKNOWN
        for process in self._living([self.bank]):
            process.state.send_in_transaction(message, execute=lambda _, __: state)

    def receive(self) -> None:
        """Let the simple consumer take what is there, acknowledge most of it at once, and some of it late or never."""
        for process in self._living(self.apps[-1:]):
            for message in process.state.receive(16, invisible=30):
                draw = self.rng.random()
                if draw < 0.9:
                    process.state.ack(message)
                elif draw < 0.95:
                    process.state.extend(message, 300)
                    self.kit.later(200, "the mailer has sent a reminder", partial(self._acknowledge, process, message))

    def _acknowledge(self, process: Process, message: librmq.ReceivedMessage) -> None:
        if not process.dead:
            with suppress(RmqError):  # the broker is down, or had forgotten who has the message
                process.state.ack(message)

    def poll(self) -> None:
        """Let the pull consumer take what is there."""
        for process in self._living(self.apps[-2:-1]):
            while process.state.poll(timeout=0):
                pass

    # ---- what goes wrong

    def crash_client(self) -> None:
        """Kill a client, or end it; another one starts."""
        process = self.rng.choice(self._living([*self.producers, self.bank, *self.apps]))
        self.rng.choice((self.kit.crash, self.kit.restart))(process)

    def lose_client(self) -> None:
        """Let the broker lose a client that does not notice."""
        self.kit.lose(self.rng.choice(self._living(self.apps[:2])))

    def move_queues(self) -> None:
        """Let an ordered group's queues go to its other instance and back while listeners run."""
        self.kit.faults.slow_listener("shipping", self.rng.choice((5, 40)), times=4)
        for _ in range(3):
            self.send_ordered()
        self.kit.advance(seconds=1)
        self.kit.restart(self.rng.choice(self._living(self.apps[2:4])))
        self.kit.advance(seconds=1)

    def kill_at_work(self) -> None:
        """Kill a client or the broker while messages are in work, and others have ended behind them in their queues."""
        self.kit.faults.slow_listener("billing", 40)
        for _ in range(2):
            self.send()
        self.kit.advance(seconds=1)
        if self.rng.random() < 0.5:
            self.kit.crash(self.rng.choice(self._living(self.apps[:2])))
        else:
            self._producer().send_batch([librmq.Message("reminders", self._body()) for _ in range(3)])
            for process in self._living(self.apps[-1:]):
                process.state.ack(*process.state.receive(16, invisible=30)[1:])
            self.kill_broker()

    def disturb(self) -> None:
        """Disturb the next sends, the next listener, or a client's clock."""
        faults = self.kit.faults
        kind = self.rng.randrange(6)
        # Not of delayed messages: if one is stored twice, and the broker dies after it has delivered both, it delivers
        # each a second time, which no event of the history explains.
        topic = self.rng.choice(("orders", "payments", "parcels"))
        if kind == 0:
            faults.lose_answer(topic)
        elif kind == 1:
            faults.refuse_send(busy=self.rng.random() < 0.5)
        elif kind == 2:
            faults.repeat_request(topic)
        elif kind == 3:
            faults.late_answer(self.rng.choice((0.1, 2)), topic)
        elif kind == 4:
            faults.slow_listener("billing", self.rng.choice((2, 300, 2000)))
        else:
            faults.skew_clock(self.rng.choice(self._living(self.producers)), self.rng.choice((-3600, 0, 3600)))

    def close_broker(self) -> None:
        """End the broker's process cleanly; the next one opens its store."""
        broker = self.kit.broker
        if not broker.dead:
            self._ended_ms.append(self.kit.runner.now_ms())
            self._open_later(0.1, 5, 60, 400)
            try:
                broker.close()
            except RmqError:  # The disk is full: what was not saved is lost, as if the broker had been killed.
                self.kit.recorder.broker_crashed(broker.name)
                raise

    def kill_broker(self) -> None:
        """Kill the broker's process; the next one opens its store, at times without naming settings."""
        self._reopen(lambda: None)

    def cut_power(self) -> None:
        """Cut the power of the broker's machine, which takes the progress that was not saved yet."""
        now_ms = self.kit.runner.now_ms()
        since_ms = now_ms - _SAVED_MS
        for begin_ms, end_ms in sorted(self._unsaved_ms, reverse=True):
            if end_ms > since_ms:
                since_ms = min(since_ms, begin_ms - _SAVED_MS)

        def damage() -> None:
            self.kit.recorder.add_event("crash", broker=self.kit.broker.name, at_ms=now_ms, since_ms=since_ms)
            self.disk.cut_power(f"{self.seed} {self._number}")

        self._reopen(damage)

    def _reopen(self, damage: Callable[[], None]) -> None:
        kit = self.kit
        if not kit.broker.dead:
            self._ended_ms.append(kit.runner.now_ms())
            kit.crash_broker(down=_NEVER)
            damage()
            self._open_later(0.1, 5, 400)

    def _open_later(self, *seconds: float) -> None:
        after = self.rng.choice(seconds)
        self._saves_nothing(after)
        self.kit.later(after, "a process opens the store", self._open)

    def _saves_nothing(self, seconds: float) -> None:
        """Note that no progress is saved for some time."""
        now_ms = self.kit.runner.now_ms()
        self._unsaved_ms.append((now_ms, now_ms + round(1000 * seconds)))

    def _open(self) -> None:
        """Open the store with its settings, or as a process that names durability alone; on a full disk try again."""
        kit = self.kit
        try:
            is_new = not self.disk.names(os.path.join(STORE, "commitlog"))  # its sizes are for the first opener to name
            if is_new or self.rng.random() < 0.5:
                kit.network.reopen(kit.broker.name)
            else:
                promise = librmq.StoreConfig(durability="sync")
                kit.network.table.add(
                    librmq.Broker.open(STORE, store_config=promise, runner=kit.runner, files=self.disk)
                )
        except StoreIOError as error:
            if not self.disk.is_full:
                raise
            self.counts[f"opening: {type(error).__name__}"] += 1
            self._saves_nothing(30)
            kit.later(30, "a process opens the store", self._open)

    def fill_disk(self) -> None:
        """Fill the disk for a while, or nearly."""
        self.disk.is_full = self.rng.random() < 0.5
        self.disk.disk_used_ratio = 0.0 if self.disk.is_full else 0.95
        after = self.rng.choice((10, 600))
        self._saves_nothing(after)
        self.kit.later(after, "the disk has room again", self.free_disk)

    def free_disk(self) -> None:
        """Let the disk have room again."""
        self.disk.is_full, self.disk.disk_used_ratio = False, 0.0

    WORK: Final = (
        (send, 30), (send_batch, 6), (send_one_way, 2), (send_ordered, 15), (send_delayed, 8), (cancel, 1),
        (transact, 10), (receive, 12), (poll, 12),
    )  # fmt: skip
    FAULTS: Final = (
        (crash_client, 4),
        (lose_client, 1),
        (move_queues, 1),
        (kill_at_work, 2),
        (disturb, 5),
        (close_broker, 2),
        (kill_broker, 2),
        (cut_power, 2),
        (fill_disk, 1),
    )

    def run(self, days: float = DAYS, steps: int = STEPS) -> None:
        """Let the days pass, then all that waits come to its end, and judge the run.

        Raises:
            AssertionError: A promise is broken; the error names the seed and has the history.
        """
        calls, weights = zip(*self.WORK, *self.FAULTS, strict=True)
        mean_s = days * 86_400 / (_LONG_GAPS * steps)
        try:
            for call in self.rng.choices(calls, weights, k=steps):
                gap_s = (
                    self.rng.expovariate(1 / mean_s)
                    if self.rng.random() < _LONG_GAPS
                    else self.rng.choice((0, 0.05, 1, 5))
                )
                self.kit.advance(seconds=gap_s)
                self._note_given_up()
                self.counts[call.__name__] += 1
                try:
                    call(self)
                except RmqError as error:
                    self.counts[type(error).__name__] += 1
            self._drain()
            self._judge()
        except BaseException as error:
            error.add_note(f"simulation of seed {self.seed!r}, at {self.kit.clock.now_ms()} ms")
            self.kit.abandon()
            raise

    def _note_given_up(self) -> None:
        """Record dead letters and discarded halves while the log has them: retention deletes what no group reads."""
        if self.kit.broker.dead:
            return
        for group in ("billing", "shipping", "bell"):
            for letter in self.kit.broker.dead_letters(group):
                name = id_of(letter)
                if name not in self._given_up:
                    self._given_up.add(name)
                    at_ms = letter.store_timestamp_ms
                    self.kit.recorder.add_event("dead_letter", group=group, id=name, at_ms=at_ms)
        for half in self.kit.broker.messages(SystemTopic.CHECK_MAX_TIME):
            if (name := id_of(half)) not in self._given_up:
                self._given_up.add(name)
                self.kit.recorder.add_event("discard", id=name, at_ms=half.store_timestamp_ms)

    def _drain(self) -> None:
        self.free_disk()
        self.kit.advance(minutes=10)  # a dead broker is back, and the locks of lost clients expire
        for hours in (1, 1, _DRAIN_H - 2, 1):
            for _ in range(4):
                self.kit.advance(hours=hours / 4)
                for _ in range(20):
                    self.poll()
                    self.receive()
                    self.kit.advance(seconds=31)  # messages that were not acknowledged are visible again
        self.kit.run_until_idle()

    def _judge(self) -> None:
        events = self.kit.events()
        self.counts["events"] = len(events)
        for event in events:
            self.counts[f"{event['event']} {event.get('outcome', '')}".strip()] += 1
        log = records(self.log_files())
        events = [event for event in events if event.get("id") not in self._cancelled]
        broken = broken_promises(events, log, TAKEN_BY, ["shipping"])
        assert not broken, f"{len(broken)} broken promises:\n" + "\n".join(broken[:10])
        overlaps = [anomaly.events for anomaly in check_history(events) if anomaly.anomaly == "overlap"]
        if overlaps and all(self._is_of_an_ended_broker(events[number - 1] for number in shown) for shown in overlaps):
            self.kit.expect("overlap")
        backs = [anomaly.events for anomaly in check_history(events) if anomaly.anomaly == "progress-back"]
        if backs and all(had_two_readers(events, *shown) for shown in backs):
            self.kit.expect("progress-back")
        self.kit.close()

    def _is_of_an_ended_broker(self, shown: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether the broker, and its locks with it, ended while the first of two listeners ran."""
        first, second = (event["begin_ms"] for event in shown if event["event"] == "deliver")
        return any(first <= at_ms <= second for at_ms in self._ended_ms)

    def log_files(self) -> Iterator[bytes]:
        folder = os.path.join(STORE, "commitlog")
        for name in self.disk.names(folder):
            yield self.disk.read(os.path.join(folder, name), 0, 1 << 30)

    def text(self) -> str:
        """Return the history, which is the same whenever the seed is."""
        return str(self.kit.history())


def _decision(body: bytes) -> librmq.TransactionState:
    return librmq.TransactionState.ROLLBACK if zlib.crc32(body[:12]) % 4 == 0 else librmq.TransactionState.COMMIT
