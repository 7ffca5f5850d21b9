"""Transactions of a broker: producers end them, a schedule checks them, and producers are asked.

Mirrors ``EndTransactionProcessor`` and ``TransactionalMessageCheckService``; `librmq.txn` has the operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from librmq.broker._context import BrokerContext, BrokerPart
from librmq.broker.long_polling import Arrivals
from librmq.errors import BrokerError, CorruptionError, RmqError, TransactionRefusedError
from librmq.message import StoredMessage
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.protocol import CheckTransaction, EndTransaction, TransactionState
from librmq.runtime import Work, calls_later
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import RLock
from librmq.runtime.runner import Aside
from librmq.scheduling.half_messages import CHECK_GROUP, QUEUE
from librmq.store.retention import Unread
from librmq.txn import CheckBack, FinalMessage, Transactions

_log = EventLog("librmq.broker")

DiscardHook = Callable[[StoredMessage, int], object]
"""Called with a half message that a check discarded, and its number of checks."""


class BrokerTransactions(BrokerPart):
    """The transactions of one broker. Thread-safe."""

    def __init__(
        self, context: BrokerContext, arrivals: Arrivals, discard_hooks: list[DiscardHook], start_ms: int
    ) -> None:
        """Notify ``arrivals`` of final messages, and ``discard_hooks`` of discarded ones.

        ``start_ms`` is the time of the broker's opening, from which the check's passes are counted.
        """
        super().__init__(context)
        self._discard_hooks = discard_hooks
        store = context.store
        self._arrivals = arrivals
        self._turns: dict[str, int] = {}
        self._unreachable_groups: set[str] = set()  # they are logged once, until they are reached again
        self._finals: deque[FinalMessage] = deque()  # waiting readers are still to be woken for these
        self._lock = RLock()  # reentrant, because an append of an end can make retention ask for open halves
        self._waits = store.config.durability == "sync"
        self._step = context.step("checks transactions", self._run_due)
        aside = context.aside("flushes for its check", self._step)
        self._transactions = Transactions(
            store,
            context.offsets,
            context.config.transactions,
            delivered=self._finals.append,
            make_topic=context.topics.ensure,
            is_reachable=self._is_reachable,
            waits=False,
            aside=None if aside is None else partial(self._aside, aside),
            start_ms=start_ms,
        )

    def half_stored(self, unique_key: str | None, physical_offset: int) -> None:
        """Note a half message before its producer gets an answer. Thread-safe."""
        self._transactions.half_stored(unique_key, physical_offset)

    def prepared(self) -> None:
        """Wake the check for a half message that was stored, or can be waiting."""
        if self._step.at is None:
            with self._runner.lock:
                self._runner.wake(self._step)

    def end_transaction(self, request: EndTransaction) -> None:
        if request.state is TransactionState.UNKNOWN:
            return
        half = self._half(request.physical_offset) if self._metrics is not None else None
        try:
            with calls_later(), self._lock:
                if request.state is TransactionState.ROLLBACK:
                    self._transactions.rollback(request.physical_offset, request.queue_offset, request.group)
                else:
                    self._transactions.commit(request.physical_offset, request.queue_offset, request.group)
                op = self._transactions.last_op
        except TransactionRefusedError as error:
            raise BrokerError(error.code, str(error)) from error
        finally:
            self._announce()  # a delivered message counts even if its op message failed
        if op is not None and self._waits:
            self._store.wait_for(op)  # without the lock, so that other ends can share the flush
        if half is not None:
            self._count_outcome(request.state.name.lower(), half)

    def _half(self, physical_offset: int) -> StoredMessage | None:
        try:
            return self._store.message_at(physical_offset)
        except CorruptionError:
            return None  # the end itself refuses it, and says why

    def _announce(self) -> None:
        while True:
            try:
                final = self._finals.popleft()
            except IndexError:  # another thread has announced the last one
                return
            self._topics.warn_of_missing(final[0])
            self._arrivals.stored(*final)

    def unread(self) -> Unread:
        """Return the check's progress, for retention: halves behind it can be open."""
        with self._lock:
            return Unread(CHECK_GROUP, SystemTopic.HALF, QUEUE, *self._transactions.open_halves())

    def is_rolled_back(self, half: StoredMessage) -> bool:
        """Return whether a half's transaction has ended without a delivery, so that a commit would be refused."""
        with self._lock:
            return self._transactions.is_rolled_back(half)

    def save(self) -> None:
        """Save the progress of the check, after a flush of the store. Raises the errors of the flush."""
        with self._lock:
            self._transactions.check.save()

    def _aside(self, aside: Aside, wait: Callable[[], object], done: Callable[[Exception | None], int | None]) -> None:
        def ended(error: Exception | None) -> int | None:
            with self._lock:
                return done(error)

        aside(wait, ended)

    def _run_due(self, now_ms: int) -> int | None:
        with self._lock:
            due = self._transactions.check.run_due(now_ms)
            questions, discarded = self._transactions.check.checked
        # Without the lock: a producer of this process can end its transaction while it is asked.
        for half, check_times in discarded:
            self._discarded(half, check_times)
        for question in questions:
            self._ask(question)
        return due

    def _is_reachable(self, group: str) -> bool:
        """Return whether a producer of the group is connected; log once if none is."""
        if self._clients.producers.get(group):
            return True
        self._log_unreachable(group, "none is connected: start a TransactionProducer of the group")
        return False

    def _log_unreachable(self, group: str, cause: object) -> None:
        if group not in self._unreachable_groups:
            self._unreachable_groups.add(group)
            _log.warning(
                "producer group %(group)s can't be asked about its open transactions, which wait: %(cause)s",
                group=group,
                cause=cause,
            )

    def _ask(self, question: CheckBack) -> None:
        """Pass a question to the next producer of the group in turn that accepts it."""
        producers = list((self._clients.producers.get(question.group) or {}).values())
        turn = self._turns.get(question.group, 0)
        self._turns[question.group] = turn + 1
        request = CheckTransaction(question.group, question.half, question.half.unique_key or "", self._broker_name)
        cause: object = "none is connected"
        for number in range(len(producers)):
            try:
                producers[(turn + number) % len(producers)].call(request)
            except RmqError as error:  # it is an ordinary producer, or is leaving
                cause = error
            except Exception:  # a user's executor can be shut down, and the check of others has to go on
                _log.exception("producer group %(group)s can't be asked about a transaction", group=question.group)
                return
            else:
                if question.group in self._unreachable_groups:
                    self._unreachable_groups.discard(question.group)
                    _log.info(
                        "producer group %(group)s is asked about its open transactions again", group=question.group
                    )
                self._count("transaction_checks", topic=question.topic)
                return
        self._log_unreachable(question.group, cause)
        with self._lock:
            self._transactions.check.note_unreached(question)

    def _discarded(self, half: StoredMessage, check_times: int) -> None:
        self._count_outcome("discard", half)
        for hook in self._discard_hooks:
            self._runner.submit(Work("discard hook", partial(hook, half, check_times), _log_failed_hook))

    def _count_outcome(self, outcome: str, half: StoredMessage) -> None:
        self._count("transactions", topic=half.properties.get(PropertyName.REAL_TOPIC, ""), outcome=outcome)


def _log_failed_hook(result: object, error: Exception | None) -> None:
    if error is not None:
        _log.error("a hook for discarded half messages failed", exc_info=error)
