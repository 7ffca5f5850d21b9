"""Transactions at a broker: halves end by their producer's word, and forgotten ones are asked about.

Mirrors ``EndTransactionProcessor``, ``TransactionalMessageCheckService`` and
``AbstractTransactionalMessageCheckListener``. What a half, an end and a check pass are stands in `librmq.txn`. Called
under the runner's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from librmq import codec
from librmq.broker.offsets import ConsumerOffsets
from librmq.broker.registry import Registry
from librmq.broker.sending import Sending
from librmq.broker.topics import Topics
from librmq.dispatch import parse_level
from librmq.errors import BrokerError, RmqError, TransactionRefusedError
from librmq.javahash import java_int
from librmq.message import StoredMessage
from librmq.protocol import CheckTransaction, EndTransaction, TransactionState
from librmq.runner import Runner, Work
from librmq.store import AppendResult, MessageStore
from librmq.txn import CheckBack, Transactions, TransactionSettings

__all__ = ["BrokerTransactions", "DiscardHook"]

_log = logging.getLogger("librmq.broker")

DiscardHook = Callable[[StoredMessage, int], None]
"""Called with a half message that was given up, and how often it had been checked."""


class BrokerTransactions:
    """The transactions of one broker."""

    def __init__(
        self,
        runner: Runner,
        store: MessageStore,
        topics: Topics,
        registry: Registry,
        offsets: ConsumerOffsets,
        sending: Sending,
        delayed: Callable[[int, int], None],
        name: str,
        settings: TransactionSettings,
        original: bool,
    ) -> None:
        self.discard_hooks: list[DiscardHook] = []
        self._runner = runner
        self._registry = registry
        self._offsets = offsets
        self._sending = sending
        self._delayed = delayed
        self._name = name
        self._asked = 0
        self._topics = topics
        self._transactions = Transactions(
            store,
            self,
            runner.now_ms(),
            settings,
            ask=self._ask,
            discarded=self._discarded,
            make_topic=self._make_topic,
            original=original,
        )
        self.run_due = self._transactions.run_due
        self._store = store

    def _make_topic(self, topic: str) -> None:
        self._topics.ensure(topic)

    def consumer_offset(self, topic: str, group: str, queue_id: int) -> int | None:
        """Progress of the check."""
        return self._offsets.get(group, topic, queue_id)

    def set_consumer_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Note progress of the check."""
        self._offsets.set(group, topic, queue_id, queue_offset)

    def end(self, request: EndTransaction) -> None:
        """Commit or roll back; `BrokerError` if that is refused."""
        try:
            if request.state is TransactionState.COMMIT:
                half = self._store.message_at(request.physical_offset) if request.physical_offset >= 0 else None
                result = self._transactions.commit(request.physical_offset, request.queue_offset, request.group)
                if result is not None and half is not None:
                    self._arrived(half, result)
            elif request.state is TransactionState.ROLLBACK:
                self._transactions.rollback(request.physical_offset, request.queue_offset, request.group)
        except TransactionRefusedError as error:
            raise BrokerError(error.code, str(error)) from error

    def _arrived(self, half: StoredMessage, result: AppendResult) -> None:
        properties = half.properties
        level = parse_level(properties.get(codec.PROPERTY_DELAY))
        if level > 0:
            self._delayed(level, result.store_timestamp_ms)
            return
        queue_id = java_int(properties.get(codec.PROPERTY_REAL_QUEUE_ID, "")) or 0
        self._sending.arrived(properties.get(codec.PROPERTY_REAL_TOPIC, ""), queue_id, properties)

    def _ask(self, question: CheckBack) -> None:
        """Ask one producer of the group, each in its turn; where there is none the count goes on all the same."""
        clients = list(self._registry.producers.get(question.group, {}).values())
        transaction_id = question.half.unique_key or ""
        self._asked += 1
        for at in range(len(clients)):
            client = clients[(self._asked + at) % len(clients)]
            try:
                client.call(CheckTransaction(question.group, question.half, transaction_id, self._name))
            except RmqError as error:  # an ordinary producer, or one that is about to leave
                _log.warning("group %s: a producer can't be asked about a transaction: %s", question.group, error)
            else:
                return
        _log.warning("group %s: nobody is there to be asked about transaction %s", question.group, transaction_id)

    def _discarded(self, half: StoredMessage, check_times: int) -> None:
        for hook in self.discard_hooks:
            self._runner.submit(Work("discard hook", _call(hook, half, check_times), _told))


def _call(hook: DiscardHook, half: StoredMessage, check_times: int) -> Callable[[], None]:
    return lambda: hook(half, check_times)


def _told(result: object, error: Exception | None) -> None:
    if error is not None:
        _log.error("a hook for discarded half messages has failed", exc_info=error)
