"""Transactions compared with what an observer expects, over lost answers, repeated ends, crashes and time.

A committed transaction's message is delivered once, any other never. In the end the store has decided every transaction
that its producer has decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from librmq.clock import ManualClock
from librmq.errors import TransactionRefusedError
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.message.topics import SystemTopic
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.recovery._verify import verify
from librmq.txn import CheckBack, TransactionConfig, Transactions
from tests.budget import examples
from tests.stores import ROOT, SMALL, START_MS, died

Place = tuple[int, int]


@dataclass
class Local:
    """A transaction as its producer knows it."""

    number: int
    places: list[Place] = field(default_factory=list)
    """The offsets by which the transaction can be ended: that of the send, and that of each check."""
    outcome: str | None = None
    """Outcome of the local transaction; None while it runs."""


class TransactionMachine(RuleBasedStateMachine):
    """Producers that decide and may or may not answer, and a broker that checks and dies."""

    @initialize(check_max=st.sampled_from([2, 15]))
    def begin(self, check_max: int) -> None:
        self.files = MemoryFiles()
        self.clock = ManualClock(START_MS)
        self.locals: list[Local] = []
        self.settings = TransactionConfig(check_max=check_max, most_at_once=3)
        self.open()

    def open(self) -> None:
        self.store = MessageStore.open(ROOT, SMALL, files=self.files, clock=self.clock)
        self.tables = BrokerTables.open(f"{ROOT}/config", files=self.files)
        self.questions: list[CheckBack] = []
        self.transactions = Transactions(self.store, self.tables, self.settings)

    # --- producers

    @rule(immunity=st.sampled_from([None, "1", "100"]))
    def send(self, immunity: str | None) -> None:
        local = Local(len(self.locals))
        message = Message("T", b"%d" % local.number, unique_key=f"U{local.number}")
        message.properties |= {"TRAN_MSG": "true", "PGROUP": "P"}
        if immunity is not None:
            message.properties["CHECK_IMMUNITY_TIME_IN_SECONDS"] = immunity
        result = self.transactions.prepare(message, 0)
        local.places.append((result.physical_offset, result.queue_offset))
        self.locals.append(local)

    @precondition(lambda self: self.locals)
    @rule(data=st.data(), outcome=st.sampled_from(["commit", "rollback"]))
    def decide(self, data: st.DataObject, outcome: str) -> None:
        """End the local transaction without the broker hearing of it."""
        local = data.draw(st.sampled_from(self.locals))
        local.outcome = local.outcome or outcome

    @precondition(lambda self: any(local.outcome for local in self.locals))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Let a producer end a transaction with any offset that it knows, possibly more than once."""
        local = data.draw(st.sampled_from([local for local in self.locals if local.outcome]))
        self.tell(local, data.draw(st.sampled_from(local.places)))

    def tell(self, local: Local, place: Place) -> None:
        if local.outcome == "commit":
            self.transactions.commit(*place, "P")
        else:
            self.transactions.rollback(*place, "P")

    @precondition(lambda self: self.questions)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Answer a check, in any order, or never."""
        question = self.questions.pop(data.draw(st.integers(0, len(self.questions) - 1)))
        local = self.locals[int(question.half.body)]
        place = question.half.physical_offset, question.half.queue_offset
        local.places.append(place)
        if local.outcome:
            self.tell(local, place)

    @precondition(lambda self: any(local.outcome for local in self.locals))
    @rule(data=st.data())
    def the_opposite_is_refused(self, data: st.DataObject) -> None:
        """An acknowledged end can't be reversed, except for half messages discarded before."""
        local = data.draw(st.sampled_from([local for local in self.locals if local.outcome]))
        place = local.places[0]
        self.tell(local, place)
        if local.outcome == "rollback" and local.number in self.given_up():
            return
        before = self.store.log.end
        try:
            (self.transactions.rollback if local.outcome == "commit" else self.transactions.commit)(*place, "P")
        except TransactionRefusedError:
            assert self.store.log.end == before
        else:
            raise AssertionError("expected a refusal")

    # --- the broker

    def run_due(self) -> int | None:
        due = self.transactions.check.run_due(self.clock.now_ms())
        self.questions += self.transactions.check.checked.questions
        return due

    @rule(seconds=st.sampled_from([0, 1, 7, 60, 61, 200]))
    def pass_time(self, seconds: int) -> None:
        until = self.clock.now_ms() + 1000 * seconds
        due = self.run_due()
        while due is not None and due <= until:
            self.clock.move_to(due)
            due = self.run_due()
        self.clock.move_to(until)

    @rule()
    def one_turn(self) -> None:
        """Run part of a pass, so that transactions end during it."""
        due = self.run_due()
        if due is not None:
            self.clock.move_to(due)
            self.run_due()

    @rule()
    def save(self) -> None:
        self.store.flush()
        self.tables.persist(self.clock.now_ms())

    @rule(clean=st.booleans())
    def die(self, clean: bool) -> None:
        if clean:
            self.save()
            self.store.close()
        else:
            self.files = died(self.files)
        self.open()

    # --- observations

    def of(self, topic: str) -> list[int]:
        return [int(message.body) for message in self.store if message.topic == topic]

    def given_up(self) -> set[int]:
        return set(self.of(SystemTopic.CHECK_MAX_TIME))

    @invariant()
    def only_what_was_committed_is_delivered_and_once(self) -> None:
        if not hasattr(self, "store"):
            return
        delivered = self.of("T")
        assert len(set(delivered)) == len(delivered)
        assert {self.locals[number].outcome for number in delivered} <= {"commit"}

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for local in self.locals:
            local.outcome = local.outcome or "rollback"
        for _ in range(20):
            self.pass_time(200)
            while self.questions:
                question = self.questions.pop()
                local = self.locals[int(question.half.body)]
                self.tell(local, (question.half.physical_offset, question.half.queue_offset))
        assert self.run_due() is None
        delivered = set(self.of("T"))
        committed = {local.number for local in self.locals if local.outcome == "commit"}
        assert committed - self.given_up() <= delivered <= committed
        self.store.close()
        assert verify(ROOT, SMALL, self.files).sound


TestTransactions = TransactionMachine.TestCase
TestTransactions.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_a_transaction_that_was_given_up_is_committed_by_one_op_message() -> None:
    machine = TransactionMachine()
    machine.begin(check_max=2)
    for _ in range(3):
        machine.send(immunity=None)
    machine.locals[0].outcome = "commit"
    machine.pass_time(seconds=200)
    assert machine.given_up() == {0, 1, 2}
    for _ in range(2):
        machine.tell(machine.locals[0], machine.locals[0].places[0])
    assert (machine.of("T"), machine.of(SystemTopic.OP)) == ([0], [6])
