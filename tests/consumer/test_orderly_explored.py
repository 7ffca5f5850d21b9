"""Order holds under any interleaving of rebalances, crashes and lock expiry, and breaks without the lock."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from librmq.consumer import DeliveredMessage
from librmq.message.message import Message
from librmq.testing import Kit, Process, explore
from tests.conftest import SlowBudget
from tests.planted import send


def orders_in_order(rmq: Kit, lock_queues: bool = True) -> None:
    """Two instances consume two queues in order, while one of them starts and stops."""
    at_work: dict[int, str] = {}
    seen: dict[int, list[int]] = defaultdict(list)

    def shop(process: Process) -> None:
        @process.consumer("billing", orderly=True, lock_queues=lock_queues).subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            queue = message.queue.queue_id
            other = at_work.get(queue)
            assert other is None, f"{other} and {process.label} have queue {queue} at the same time"
            at_work[queue] = process.label
            try:
                rmq.checkpoint("at work")
                number = int(message.body)
                newest = max(seen[queue], default=-1)
                assert number <= newest + 1, f"{number} overtakes {newest + 1} in queue {queue}"
                seen[queue].append(number)
            finally:
                del at_work[queue]

    rmq.broker.create_topic("orders", queues=2)
    first = rmq.app("shop", shop)
    for number in range(3):
        for queue in range(2):
            send(rmq.producer(), Message("orders", b"%d" % number), queue)
        if number == 1:
            rmq.join(first)
    rmq.advance(minutes=5 if lock_queues else 0.5)
    assert {queue: set(numbers) for queue, numbers in seen.items()} == {0: {0, 1, 2}, 1: {0, 1, 2}}


@pytest.mark.slow
def test_no_schedule_of_many_breaks_the_order(slow_budget: SlowBudget) -> None:
    chosen = Counter[str]()
    for number in slow_budget.rounds(200, "times 50 schedules", at_least=2):
        chosen += explore(orders_in_order, runs=50, seed=str(number)).chosen
    assert chosen["fault"] > 20
    assert chosen["pause"] > 5


@pytest.mark.slow
def test_without_the_lock_two_have_a_queue_at_once() -> None:
    with pytest.raises(AssertionError, match=r"at the same time|overtakes|progress-back") as caught:
        explore(lambda rmq: orders_in_order(rmq, lock_queues=False), runs=400)
    assert "the shortest schedule" in caught.value.__notes__[-1]
