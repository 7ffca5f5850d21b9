"""Five common bugs in message processing, each with its fix; in the usual order of events all of them pass."""

from __future__ import annotations

from collections.abc import Callable

from librmq.client.producer import Producer
from librmq.consumer import DeliveredMessage
from librmq.message.message import Message
from librmq.testing import Kit, Process

__all__ = ["BUGS"]

Scenario = Callable[[Kit, bool], None]


def send(producer: Producer, message: Message, queue: int | None = None) -> None:
    """Send a message, and retry if the answer is lost, because the client does not retry a send to a given queue."""
    for _ in range(5):
        try:
            producer.send(message, queue=queue)
        except ConnectionError:
            continue
        return


def check_then_act(rmq: Kit, repaired: bool) -> None:
    """Check whether an order is booked, then book it: two deliveries can both check before either books."""
    booked: list[bytes] = []  # stands for a database table

    def insert_unless_there(order: bytes) -> None:  # a single SQL statement
        if order not in booked:
            booked.append(order)

    def shop(process: Process) -> None:
        @process.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            if repaired:
                insert_unless_there(message.body)
            elif message.body not in booked:
                rmq.checkpoint("between look and insert")
                booked.append(message.body)

    rmq.app("shop", shop)
    for order in (b"o-1", b"o-2", b"o-1"):  # the customer clicked twice for o-1
        send(rmq.producer(), Message("orders", order))
    rmq.run_until_idle()
    assert sorted(booked) == [b"o-1", b"o-2"]


def acknowledged_before_done(rmq: Kit, repaired: bool) -> None:
    """Hand the message to a thread and return: if the process then dies, the message still counts as consumed."""
    done: set[bytes] = set()

    def shop(process: Process) -> None:
        @process.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            if repaired:
                done.add(message.body)
            else:
                process.background(lambda: done.add(message.body))

    rmq.app("shop", shop)
    for order in (b"o-1", b"o-2", b"o-3"):
        send(rmq.producer(), Message("orders", order))
    rmq.advance(minutes=2)
    assert done == {b"o-1", b"o-2", b"o-3"}


def order_across_queues(rmq: Kit, repaired: bool) -> None:
    """Expect messages in the order in which they were sent, although they are in several queues."""
    seen: list[bytes] = []

    def shop(process: Process) -> None:
        @process.consumer("billing", orderly=repaired).subscribe("orders")
        def note(message: DeliveredMessage) -> None:
            if message.body not in seen:
                seen.append(message.body)

    rmq.app("shop", shop)
    for state in (b"created", b"paid", b"shipped"):
        send(rmq.producer(), Message("orders", state), 0 if repaired else None)
    rmq.advance(minutes=5)
    assert seen == [b"created", b"paid", b"shipped"]


def state_in_a_consumer(rmq: Kit, repaired: bool) -> None:
    """Keep a count in the consumer's memory, which is lost when its process dies."""
    table: set[bytes] = set()

    def shop(process: Process) -> set[bytes]:
        paid = table if repaired else set()

        @process.consumer("billing").subscribe("orders")
        def count(message: DeliveredMessage) -> None:
            paid.add(message.body)

        return paid

    rmq.app("shop", shop)
    for order in (b"o-1", b"o-2", b"o-3"):
        send(rmq.producer(), Message("orders", order))
    rmq.advance(minutes=2)
    living = [process.state for process in rmq.processes if not process.dead and process.state is not None]
    assert max(map(len, living)) == 3


def subscriptions_that_differ(rmq: Kit, repaired: bool) -> None:
    """Let the instances of a group select different tags: an instance skips the messages that it does not select."""
    seen: set[bytes] = set()

    def instance(tags: str) -> Callable[[Process], None]:
        def shop(process: Process) -> None:
            @process.consumer("billing").subscribe("orders", tags=tags)
            def note(message: DeliveredMessage) -> None:
                seen.add(message.body)

        return shop

    rmq.app("new", instance("created || paid"))
    rmq.app("old", instance("created || paid" if repaired else "created"))
    send(rmq.producer(), Message("orders", b"o-1", tags="paid"))
    rmq.advance(minutes=2)
    assert seen == {b"o-1"}


BUGS: tuple[Scenario, ...] = (
    check_then_act,
    acknowledged_before_done,
    order_across_queues,
    state_in_a_consumer,
    subscriptions_that_differ,
)
