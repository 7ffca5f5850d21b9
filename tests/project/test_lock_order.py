"""The list of locks in `docs/design.md` is whole, and the tests find what is taken in another order."""

from __future__ import annotations

import pytest

from librmq import Message, TransactionProducer, TransactionState
from librmq.broker import Broker
from librmq.runtime import ManualRunner
from librmq.store.engine._append import Appender
from tests import lock_order


def test_the_list_has_each_lock() -> None:
    in_code = {*lock_order.names_in_code().values(), "AppendPage.take"}
    assert in_code - lock_order.levels().keys() == set(), "add it to the list in docs/design.md"
    assert lock_order.levels().keys() - in_code == set(), "remove it from the list in docs/design.md"


def test_a_further_level_comes_later() -> None:
    assert lock_order.may_take("AppendLock.mutex", within="Runner.lock")
    assert not lock_order.may_take("Runner.lock", within="AppendLock.mutex")
    assert not lock_order.may_take("Channel._lock", within="Metrics._lock")
    assert not lock_order.may_take("Unlisted._lock", within="Runner.lock")
    assert lock_order.may_take("MemoryFiles._guard", within="MemoryFiles._guard"), "of an overlay"


def test_a_read_that_tells_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of a share once told of the messages of peers, so an owner stood still; no second thread is needed."""

    def follow(self: Appender) -> None:
        broker.runner.next_due_ms()  # which takes the lock of the runner

    with Broker.temporary(runner=ManualRunner()) as broker:
        bank = TransactionProducer(broker, "bank", lambda _: TransactionState.COMMIT)
        bank.send("orders", b"plain")
        monkeypatch.setattr(Appender, "follow", follow)
        bank.send_in_transaction(Message("orders", b"a bill"), execute=lambda *_: TransactionState.COMMIT)
        monkeypatch.undo()
    assert "Runner.lock is taken within BrokerTransactions._lock" in lock_order.faults()
