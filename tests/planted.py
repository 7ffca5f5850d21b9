"""Five common bugs with messages, each with its fixed form; all pass in the usual order."""

from __future__ import annotations

from collections.abc import Callable

from librmq.client.producer import Producer
from librmq.consumer import DeliveredMessage
from librmq.message.message import Message
from librmq.testing import Kit, Process

__all__ = ["BUGS"]

Scenario = Callable[[Kit, bool], None]


def send(producer: Producer, message: Message, queue: int | None = None) -> None:
    """Send, and send again if the answer is lost, because the client does not retry a send to a given queue."""
    for _ in range(5):
        try:
            producer.send(message, queue=queue)
        except ConnectionError:
            continue
        return


def check_then_act(rmq: Kit, mended: bool) -> None:
    """Checks whether an order is booked, and books it: two deliveries of one order can check before either books."""
    booked: list[bytes] = []  # a table of the database

    def insert_unless_there(order: bytes) -> None:  # one statement
        if order not in booked:
            booked.append(order)

    def shop(process: Process) -> None:
        @process.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            if mended:
                insert_unless_there(message.body)
            elif message.body not in booked:
                rmq.checkpoint("between look and insert")
                booked.append(message.body)

    rmq.app("shop", shop)
    for order in (b"o-1", b"o-2", b"o-1"):  # the second o-1 is a customer's second click
        send(rmq.producer(), Message("orders", order))
    rmq.run_until_idle()
    assert sorted(booked) == [b"o-1", b"o-2"]


def acknowledged_before_done(rmq: Kit, mended: bool) -> None:
    """Passes the message to a thread and returns: if the process ends, the message counts as consumed."""
    done: set[bytes] = set()

    def shop(process: Process) -> None:
        @process.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            if mended:
                done.add(message.body)
            else:
                process.background(lambda: done.add(message.body))

    rmq.app("shop", shop)
    for order in (b"o-1", b"o-2", b"o-3"):
        send(rmq.producer(), Message("orders", order))
    rmq.advance(minutes=2)
    assert done == {b"o-1", b"o-2", b"o-3"}


def order_across_queues(rmq: Kit, mended: bool) -> None:
    """Assumes that messages are delivered in the order of the sends, although they are in several queues."""
    seen: list[bytes] = []

    def shop(process: Process) -> None:
        @process.consumer("billing", orderly=mended).subscribe("orders")
        def note(message: DeliveredMessage) -> None:
            if message.body not in seen:
                seen.append(message.body)

    rmq.app("shop", shop)
    for state in (b"created", b"paid", b"shipped"):
        send(rmq.producer(), Message("orders", state), 0 if mended else None)
    rmq.advance(minutes=5)
    assert seen == [b"created", b"paid", b"shipped"]


def state_in_a_consumer(rmq: Kit, mended: bool) -> None:
    """Counts in the memory of a consumer, which is lost with its process."""
    table: set[bytes] = set()

    def shop(process: Process) -> set[bytes]:
        paid = table if mended else set()

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


def subscriptions_that_differ(rmq: Kit, mended: bool) -> None:
    """The instances of a group select different tags: messages that an instance did not select are skipped."""
    seen: set[bytes] = set()

    def instance(tags: str) -> Callable[[Process], None]:
        def shop(process: Process) -> None:
            @process.consumer("billing").subscribe("orders", tags=tags)
            def note(message: DeliveredMessage) -> None:
                seen.add(message.body)

        return shop

    rmq.app("new", instance("created || paid"))
    rmq.app("old", instance("created || paid" if mended else "created"))
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
