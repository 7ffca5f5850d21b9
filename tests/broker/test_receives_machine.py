"""Receives compared with a model: in flight, acknowledged, redelivered; closed, killed, reopened."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from librmq import protocol
from librmq.broker import Broker
from librmq.config import StoreConfig
from librmq.errors import ReceiptError
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.runtime import ManualRunner
from librmq.store import verify
from tests.budget import examples

HOST = ("127.0.0.1", 1)
RETRIES = 2
MILLISECONDS = st.integers(1, 3000)


@dataclass
class Known:
    """The model's view of a message."""

    attempts: int = 0
    """The deliveries so far."""
    visible_ms: int = 0
    """When it is delivered again, if it is in flight."""
    is_done: bool = False
    is_dead: bool = False
    is_certain: bool = True
    """False after a crash that may have forgotten its deliveries, so it may be delivered more than once at a time."""
    last: protocol.Received | None = None
    may_be_done: bool = False


class ReceivesMachine(RuleBasedStateMachine):
    broker: Broker

    @initialize()
    def begin(self) -> None:
        self.files = MemoryFiles()
        self.runner = ManualRunner()
        self.known: dict[bytes, Known] = {}
        self.open()
        self.broker.set_group("g", retry_max_times=RETRIES)

    def open(self) -> None:
        self.broker = Broker.open("/b", files=self.files, runner=self.runner, store_config=StoreConfig.tiny())
        self.broker.create_topic("t", 2)

    @property
    def now_ms(self) -> int:
        return self.runner.now_ms()

    @rule(queue_id=st.integers(0, 1), count=st.integers(1, 4))
    def send(self, queue_id: int, count: int) -> None:
        for _ in range(count):
            body = str(len(self.known)).encode()
            self.broker.call(protocol.SendMessage("p", Message("t", body), queue_id, 1, HOST))
            self.known[body] = Known()

    @rule(most=st.integers(1, 6), invisible_ms=MILLISECONDS)
    def receive(self, most: int, invisible_ms: int) -> None:
        self.received(most, invisible_ms)

    def received(self, most: int, invisible_ms: int) -> list[protocol.Received]:
        found = list(self.broker.call(protocol.Receive("c", "g", "t", most, invisible_ms)).messages)
        assert len(found) <= most
        certain = [one.message.body for one in found if self.known[one.message.body].is_certain]
        assert len(set(certain)) == len(certain)
        for one in found:
            known = self.known[one.message.body]
            assert one.stored_topic == one.message.topic
            assert one.visible_timestamp_ms == self.now_ms + invisible_ms
            if known.is_certain:
                assert not known.is_done
                assert known.visible_ms <= self.now_ms
                assert one.attempt == known.attempts + 1
            known.attempts, known.visible_ms, known.last = one.attempt, one.visible_timestamp_ms, one
        self.note_the_dead()
        if not found:
            assert not any(known.is_certain and self.must_come(known) for known in self.known.values())
        return found

    def must_come(self, known: Known) -> bool:
        return not known.is_done and not known.is_dead and known.visible_ms <= self.now_ms

    def note_the_dead(self) -> None:
        for letter in self.broker.dead_letters("g"):
            known = self.known[letter.body]
            if not known.is_dead:
                assert not known.is_certain or known.attempts == RETRIES + 1 or known.is_done
                known.is_dead = True

    @precondition(lambda self: any(known.last for known in self.known.values()))
    @rule(pick=st.integers(0, 1000))
    def acknowledge(self, pick: int) -> None:
        known, last = self.pick(pick)
        (is_good,) = self.broker.call(protocol.Acknowledge("g", "t", (last.receipt,)))
        if known.is_certain and not known.is_dead:
            assert is_good == (known.visible_ms > self.now_ms or (known.is_done and self.is_fresh(last)))
        if known.is_certain:
            known.is_done |= is_good
        known.may_be_done |= is_good

    def is_fresh(self, last: protocol.Received) -> bool:
        _, received_ms, invisible_ms, *_ = last.receipt.split(" ")
        return int(received_ms) + int(invisible_ms) > self.now_ms

    @precondition(lambda self: any(known.last for known in self.known.values()))
    @rule(pick=st.integers(0, 1000), invisible_ms=st.integers(0, 3000))
    def change(self, pick: int, invisible_ms: int) -> None:
        known, last = self.pick(pick)
        try:
            receipt = self.broker.call(protocol.ChangeInvisible("g", "t", last.receipt, invisible_ms))
        except ReceiptError:
            assert known.is_done or known.is_dead or not known.is_certain or known.visible_ms <= self.now_ms
        else:
            assert not known.is_certain or (known.visible_ms > self.now_ms and not known.is_done)
            known.visible_ms = self.now_ms + invisible_ms
            known.last = replace(last, receipt=receipt)
            self.runner.advance(0)

    @precondition(lambda self: any(known.last for known in self.known.values()))
    @rule(pick=st.integers(0, 1000))
    def forward(self, pick: int) -> None:
        known, last = self.pick(pick)
        try:
            self.broker.call(protocol.ForwardToDeadLetters("g", "t", last.receipt))
        except ReceiptError:
            assert known.is_done or known.is_dead or not known.is_certain or known.visible_ms <= self.now_ms
        else:
            assert not known.is_certain or (known.visible_ms > self.now_ms and not known.is_done)
            known.is_dead = True

    def pick(self, number: int) -> tuple[Known, protocol.Received]:
        picks = [(known, known.last) for known in self.known.values() if known.last is not None]
        return picks[number % len(picks)]

    @rule(milliseconds=MILLISECONDS)
    def advance(self, milliseconds: int) -> None:
        self.runner.advance(milliseconds)

    @rule()
    def close_and_open(self) -> None:
        self.broker.close()
        assert not verify("/b", files=self.files).damage
        self.open()

    @rule()
    def crash_and_open(self) -> None:
        self.broker.abandon()
        self.open()
        for known in self.known.values():
            known.is_certain &= not known.attempts

    @invariant()
    def progress_is_never_past_what_waits(self) -> None:
        if not all(known.is_certain for known in self.known.values()):
            return
        progress = self.broker.consumer_offsets("g", "t")
        for known in self.known.values():
            last = known.last
            if last is not None and not known.is_done and not known.is_dead and known.visible_ms > self.now_ms:
                topic, queue_id = last.message.topic, last.message.queue_id
                if topic == "t":
                    assert progress[queue_id] <= last.message.queue_offset

    def teardown(self) -> None:
        """No unacknowledged message is lost: each is delivered or becomes a dead letter."""
        if not hasattr(self, "broker"):
            return
        for _ in range(200):
            self.runner.advance(3001)
            found = self.received(32, 1)
            for one in found:
                assert self.broker.call(protocol.Acknowledge("g", "t", (one.receipt,))) == (True,)
                self.known[one.message.body].is_done = self.known[one.message.body].may_be_done = True
            if not found:
                break
        assert [body for body, known in self.known.items() if not known.may_be_done and not known.is_dead] == []
        self.broker.close()
        assert not verify("/b", files=self.files).damage


TestReceives = ReceivesMachine.TestCase
TestReceives.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
