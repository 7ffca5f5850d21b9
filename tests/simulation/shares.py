"""Processes that share a store, from a seed: owners and members are killed, stopped and end, and others take over.

A member is a fork of this process, which has no threads, so it begins within milliseconds. The seed draws what members
send and what happens to them; the system decides when they run, so a seed repeats the kind of a run and not each step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import librmq
from librmq.broker import BrokerConfig
from librmq.client.queue_selectors import select_by_hash
from librmq.clock import SystemClock
from librmq.config import TransactionConfig
from librmq.files.lock import lock_process
from librmq.listener import ReconsumeLater
from librmq.message.properties import PropertyName
from librmq.testing import check_history
from librmq.wire._unix_sockets import share_folder
from tests.recording import Recording
from tests.simulation.promises import broken_promises, records, unfinished

T = TypeVar("T")

TAKEN_BY: Final = {"orders": ("billing",), "parcels": ("shipping_in_order",), "payments": ("ledger",)}
MEMBERS: Final = 3
CHANGES: Final = 8
_CLOCK: Final = SystemClock()
_EVENT: Final = 200
"""Bytes of an event in a history."""
_LOCKED_S: Final = 30
"""Until the lock of a killed member expires: as long as a client trusts its own."""
_PATIENCE_S: Final = 90
"""For whatever must happen, also on a busy machine; an ordered group begins up to 20 s after it has a lock."""


class Member:
    """A process of the share: its id, and the pipe through which it is asked to drain, or to leave."""

    def __init__(self, name: str, work: Callable[[int], None]) -> None:
        """Fork, and run ``work`` with the reading end of the pipe in the child."""
        self.name = name
        reading, writing = os.pipe()
        self._writing: int | None = writing
        sys.stderr.flush()
        self.process = os.fork()
        if not self.process:
            os.close(writing)
            status = 1
            try:
                work(reading)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(reading)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process, number)

    def drain(self) -> None:
        """Let it send no more, and consume what is left."""
        assert self._writing is not None
        with suppress(BrokenPipeError):  # it has ended, and `_ended` says why
            os.write(self._writing, b"d")

    def leave(self) -> None:
        if self._writing is not None:
            with suppress(BrokenPipeError):  # it has ended
                os.write(self._writing, b"x")  # later members have this end of the pipe too
            os.close(self._writing)
            self._writing = None

    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> int:
        """Let it end unless it has; return its exit status, or its signal as a negative number."""
        self.leave()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


class SharedWorld:
    """A store that members share, and what goes wrong."""

    def __init__(self, seed: int | str, folder: Path) -> None:
        """Draw the settings; ``folder`` is empty, and keeps the store and the histories."""
        self.seed, self.rng = seed, random.Random(f"shares {seed}")
        self.store, self.folder = folder / "store", folder
        self.drops_resends = self.rng.random() < 0.25
        """Whether the first member lets the store keep one record of each message, which later owners keep up."""
        self.waits = self.rng.random() < 0.25
        """Whether each send waits for the disk, so that owners die between a record and its acknowledgement.

        Without this and the drops of resends members append by themselves.
        """
        self.hurries = self.rng.random() < 0.25
        """Whether members send without a pause, so that transactions end and are asked about at full speed."""
        self.has_heirs = self.rng.random() < 0.5
        """Whether the members that remain consume what is left, or a new one that no former owner knew."""
        self.counts: Counter[str] = Counter()
        self._members: list[Member] = []
        self._count = 0
        self._events: list[dict[str, Any]] = []

    # ---- a member

    def _start(self) -> None:
        name = f"p{self._count}"
        self._count += 1
        self._members.append(Member(name, lambda pipe: self._work(name, pipe, is_first=name == "p0")))

    def _share(self, *, is_first: bool) -> Any:
        """Share the store; the first member names what it promises, and the others name nothing."""
        # An owner does not give a half message up, because no member answers until it has registered.
        checks = TransactionConfig(timeout_s=0.2, interval_s=0.2, check_max=10_000)
        config = BrokerConfig(longest_wait_s=_PATIENCE_S, lock_expiry_s=_LOCKED_S, transactions=checks)
        if is_first and self.drops_resends:
            config = replace(config, drop_resends_within=600)
        sizes = librmq.StoreConfig.tiny(commitlog_file_size=1 << 20)
        if is_first and self.waits:
            sizes = replace(sizes, durability="sync")
        return librmq.share(
            self.store,
            config,
            store_config=sizes,
            timeout=_PATIENCE_S,  # in which a send, too, asks the next owner for the queues of its topic
            wait=_PATIENCE_S,
            take_over_stopped=0.4,
        )

    def _work(self, name: str, pipe: int, *, is_first: bool) -> None:
        """Send and consume until the pipe says that the member drains, or leaves."""
        rng = random.Random(f"{self.seed} {name}")
        with (self.folder / f"{name}.txt").open("w") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
        draining, leaving = threading.Event(), threading.Event()

        def follow_pipe() -> None:
            if os.read(pipe, 1) == b"d":
                draining.set()
                os.read(pipe, 1)
            leaving.set()
            draining.set()

        threading.Thread(target=follow_pipe, daemon=True).start()
        shared = self._share(is_first=is_first)
        history = librmq.record_history(shared, self.folder / f"{name}.jsonl", process=name)
        consumers: list[librmq.PushConsumer] = []
        with (
            shared,
            history,
            librmq.Producer(history, "shop", timeout=_PATIENCE_S) as producer,
            librmq.TransactionProducer(
                history, "bank", lambda half: _decision(half.message_id), timeout=_PATIENCE_S
            ) as bank,
        ):
            for topic, (group,) in TAKEN_BY.items():
                consumer = librmq.PushConsumer(
                    history, group, orderly=group.endswith("_in_order"), consume_from=librmq.ConsumeFrom.FIRST
                )
                consumer.subscribe(topic, _consume)
                consumers.append(consumer.start())
            while not draining.wait(0 if self.hurries else rng.choice((0, 0.002, 0.01))):
                draw = rng.random()
                if draw < 0.4:
                    producer.send("orders", rng.randbytes(rng.choice((10, 300))))
                elif draw < 0.5:
                    producer.send("orders", b"later", delay=0.2)
                elif draw < 0.6:
                    producer.send_batch([librmq.Message("orders", b"%d" % number) for number in range(3)])
                elif draw < 0.7:
                    decide = _decision_of if rng.random() < 0.5 else _leave_to_check
                    bank.send_in_transaction(librmq.Message("payments", b"a bill"), execute=decide)
                else:
                    producer.send("parcels", b"a coat", selector=select_by_hash, arg=str(rng.randrange(8)))
            if not leaving.is_set():
                shared.join(timeout=_PATIENCE_S)
                (self.folder / f"{name}.drained").touch()
                leaving.wait()
            for consumer in consumers:
                consumer.shutdown()

    # ---- what goes wrong

    def _owner(self) -> Member:
        """Return the member that owns the store, once there is one."""
        lock = os.path.join(share_folder(str(self.store)), "lock")

        def owners() -> list[Member]:
            process = lock_process(lock) if os.path.exists(lock) else None
            return [member for member in self._members if member.process == process]

        return self._wait_for(owners, "a member owns the store")[0]

    def _wait_for(self, reached: Callable[[], T], what: str) -> T:
        """Wait until something is true, and return it."""
        begin = _CLOCK.monotonic()
        while not (value := reached()):
            assert _CLOCK.monotonic() - begin < _PATIENCE_S, f"not within {_PATIENCE_S} s: {what}"
            _pass(0.002)
        return value

    def _size(self) -> int:
        """Return how many bytes the histories have."""
        return sum(path.stat().st_size for path in self.folder.glob("*.jsonl"))

    def _note_crash(self, member: Member) -> None:
        at_ms = _CLOCK.now_ms()
        self._events.append({"event": "crash", "process": member.name, "at_ms": at_ms})
        self._events.append({"event": "crash", "broker": "broker-a", "at_ms": at_ms})

    def _ended(self, member: Member, *expected: int) -> None:
        member.leave()
        self._wait_for(member.has_ended, f"{member.name} ends")
        status = member.wait()
        self._members.remove(member)
        if status == -signal.SIGKILL:
            self._note_crash(member)
        if status not in expected:
            log = (self.folder / f"{member.name}.txt").read_text("utf-8", "replace")
            last = (log.splitlines() or [""])[-1]
            raise AssertionError(f"{member.name} ended by {status}: {last}\n{log[-3000:]}")

    def kill(self, member: Member) -> None:
        self._note_crash(member)
        member.signal(signal.SIGKILL)
        self._ended(member, -signal.SIGKILL)

    def kill_owner(self) -> None:
        self.kill(self._owner())

    def kill_any(self) -> None:
        self.kill(self.rng.choice(self._members))

    def kill_heirs(self) -> None:
        """Kill the owner, and the next one while it takes over."""
        self.kill_owner()
        _pass(self.rng.choice((0, 0.01, 0.05)))
        self.kill_owner()

    def let_go(self) -> None:
        self._ended(self._owner(), 0)

    def kill_leaving(self) -> None:
        """Kill the owner while it hands over."""
        owner = self._owner()
        self._note_crash(owner)
        owner.leave()
        _pass(self.rng.choice((0.001, 0.01, 0.03)))
        owner.signal(signal.SIGKILL)
        self._ended(owner, 0, -signal.SIGKILL)

    def stop_owner(self) -> None:
        """Stop the owner until another member ends it."""
        owner = self._owner()
        self._note_crash(owner)
        owner.signal(signal.SIGSTOP)
        self._ended(owner, -signal.SIGKILL)

    def pause_owner(self) -> None:
        """Stop the owner for a moment."""
        self._pause(self._owner())

    def pause_any(self) -> None:
        """Stop a member for a moment, perhaps while it appends to the log."""
        self._pause(self.rng.choice(self._members))

    def _pause(self, member: Member) -> None:
        member.signal(signal.SIGSTOP)
        _pass(self.rng.choice((0.01, 0.2)))
        member.signal(signal.SIGCONT)

    FAULTS: Final = (
        (kill_owner, 4), (kill_any, 4), (kill_heirs, 2), (let_go, 3), (kill_leaving, 2), (stop_owner, 1),
        (pause_owner, 1), (pause_any, 1),
    )  # fmt: skip

    def run(self, changes: int = CHANGES) -> None:
        """Let members come and go, then let those that remain or a new one consume what is left, and judge the run.

        Raises:
            AssertionError: A promise is broken; the folder keeps the store and the histories.
        """
        calls, weights = zip(*self.FAULTS, strict=True)
        try:
            self._start()
            self._wait_for((self.folder / "p0.jsonl").exists, "the first member shares the store")
            for call in self.rng.choices(calls, weights, k=changes):
                while len(self._members) < MEMBERS:
                    self._start()
                more = self._size() + _EVENT * self.rng.choice((1, 30, 100))
                self._wait_for(lambda: self._size() >= more, "members send and consume")  # noqa: B023 (called at once)
                self.counts[call.__name__] += 1
                call(self)
            if not self.has_heirs:
                self._end_all()
                self._start()
            self._drain()
            self._end_all()
            self._judge()
        except BaseException as error:
            error.add_note(f"shares of seed {self.seed!r} in {self.folder}")
            raise
        finally:
            for member in self._members:
                member.signal(signal.SIGKILL)
                member.wait()

    def _end_all(self) -> None:
        for member in list(self._members):
            self._ended(member, 0)

    def _drain(self) -> None:
        """Let the members consume what is left, and answer for what is undecided.

        Members that outlive an owner do so only if the next owner knows them. A new one would take their queues, and
        answer for them.
        """
        for member in self._members:
            member.drain()
        for member in self._members:
            done = self.folder / f"{member.name}.drained"
            self._wait_for(lambda: done.exists() or member.has_ended(), f"{member.name} drains")  # noqa: B023
            if not done.exists():
                self._ended(member, 0)
        begin = _CLOCK.monotonic()
        while broken := unfinished(self._recorded(), TAKEN_BY):
            if _CLOCK.monotonic() - begin >= _PATIENCE_S:
                raise AssertionError(f"not within {_PATIENCE_S} s: {len(broken)} open:\n" + "\n".join(broken[:10]))
            _pass(0.1)

    def _recorded(self) -> list[dict[str, Any]]:
        """Return what the members have recorded, and what happened to them.

        A member can die between an end of a transaction and its record, so each half counts as ended as its name says:
        what is committed must then be delivered, and nothing else may be.
        """
        events = [json.loads(line) for line in Recording(str(self.folder)).lines(self._events)]
        ended = {event["id"] for event in events if event["event"] == "end_transaction" and event["outcome"] == "ok"}
        halves = [event for event in events if event.get("half") and event["outcome"] != "failed"]
        for half in halves:
            if half["id"] not in ended:
                decision = _decision(half["id"]).name.lower()
                end = {"event": "end_transaction", "decision": decision, "outcome": "ok"}
                events.append(end | {name: half[name] for name in ("process", "id", "begin_ms", "end_ms")})
        return events

    def _judge(self) -> None:
        at_ms = _CLOCK.now_ms() + 1
        self._events += [{"event": "drained", "group": group, "at_ms": at_ms} for (group,) in TAKEN_BY.values()]
        events = self._recorded()
        for event in events:
            self.counts[f"{event['event']} {event.get('outcome', '')}".strip()] += 1
        anomalies = check_history(events)
        assert not anomalies, f"{len(anomalies)} anomalies:\n" + "\n".join(map(str, anomalies[:10]))
        log = list(records(path.read_bytes() for path in sorted((self.store / "commitlog").iterdir())))
        broken = broken_promises(events, log, TAKEN_BY, ["shipping_in_order"])
        sends = Counter(event["id"] for event in events if event["event"] == "send")
        for name, count in Counter(record.message_id for record in log if record.topic in TAKEN_BY).items():
            if count > (1 if self.drops_resends else sends[name]):
                broken.append(f"{name} is stored {count} times, and was sent {sends[name]} times")
        assert not broken, f"{len(broken)} broken promises:\n" + "\n".join(broken[:10])


def _consume(message: librmq.DeliveredMessage) -> None:
    """Take longer for some messages, so that others end behind them; some others come again."""
    draw = zlib.crc32(message.message_id.encode())
    if draw % 32 == 1 and message.topic != "parcels" and not message.reconsume_times:
        raise ReconsumeLater("comes again", delay_level=1)
    if draw % 4 == 0:
        _pass(0.2)


def _decision(name: str) -> librmq.TransactionState:
    return librmq.TransactionState.ROLLBACK if zlib.crc32(name.encode()) % 4 == 0 else librmq.TransactionState.COMMIT


def _decision_of(half: librmq.Message, _: object) -> librmq.TransactionState:
    return _decision(half.properties[PropertyName.UNIQUE_KEY])


def _leave_to_check(_: librmq.Message, __: object) -> librmq.TransactionState:
    return librmq.TransactionState.UNKNOWN


def _pass(seconds: float) -> None:
    _CLOCK.wait(threading.Event(), seconds)
