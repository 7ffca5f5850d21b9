"""The transport of kombu: queues, exchanges, acknowledgements, ends of processes; in a folder and in a cluster."""

from __future__ import annotations

import faulthandler
import itertools
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest.mock import Mock

import pytest

pytest.importorskip("kombu")
if sys.platform == "win32":
    pytest.skip("librmq.share is not for Windows yet", allow_module_level=True)

import kombu
from amqp.exceptions import ConsumerCancelled
from kombu.asynchronous import Hub
from kombu.exceptions import ChannelError

import librmq
import librmq.integrations.kombu
from librmq.integrations._kombu_bindings import FolderBindings, topic_of
from librmq.integrations._kombu_receivers import ShareReceiver
from librmq.testing import Kit
from librmq.wire.remoting import RemotingServer
from tests.budget import many
from tests.programs import Fork, run_program

Connect = Callable[..., Any]


@pytest.fixture(params=["folder", "cluster"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    if request.param == "folder":
        yield lambda **options: kombu.Connection(f"librmq://{tmp_path}/store", transport_options=options)
        return
    with librmq.Broker.open(str(tmp_path / "store")) as broker, RemotingServer(broker) as server:
        yield lambda **options: kombu.Connection(f"librmq+connect://127.0.0.1:{server.port}", transport_options=options)


@pytest.fixture
def share(tmp_path: Path) -> Connect:
    return lambda **options: kombu.Connection(f"librmq://{tmp_path}/store", transport_options=options)


def send(connection: Any, queue: Any, *bodies: object, **fields: object) -> None:
    producer = kombu.Producer(connection)
    for body in bodies:
        producer.publish(body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], **fields)


def drain(connection: Any, queue: Any, many: int, *, seconds: float = 20, **options: Any) -> list[Any]:
    """Consume so many messages, acknowledge them, and return their bodies."""
    bodies: list[Any] = []

    def take(body: Any, message: Any) -> None:
        bodies.append(body)
        message.ack()

    with kombu.Consumer(connection, [queue], callbacks=[take], **options):
        while len(bodies) < many:
            connection.drain_events(timeout=seconds)
    return bodies


def is_empty(connection: Any, queue: Any) -> bool:
    try:
        drain(connection, queue, 1, seconds=0.3)
    except TimeoutError:
        return True
    return False


def test_messages_arrive_once_and_in_order_in_a_folder(share: Connect) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks")
    with share() as connection:
        send(connection, queue, *range(40))
        assert drain(connection, queue, 40, prefetch_count=4) == list(range(40))
        assert is_empty(connection, queue)


def test_values_that_json_does_not_have_arrive(connect: Connect) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks")
    when = datetime(2026, 1, 2, tzinfo=UTC)
    with connect() as connection:
        send(connection, queue, "KOMBU_EXPIRES_MS", headers={"when": when, "plain": [{"a": None}]})
        messages: list[Any] = []
        with kombu.Consumer(connection, [queue], on_message=messages.append, no_ack=True):
            connection.drain_events(timeout=20)
    (message,) = messages
    assert message.payload == "KOMBU_EXPIRES_MS"
    assert message.headers == {"when": when, "plain": [{"a": None}]}


def test_what_is_not_acknowledged_comes_again_to_the_next_connection(connect: Connect) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks")
    seen: list[Any] = []
    with connect() as connection:
        send(connection, queue, 1, 2, 3)
        with kombu.Consumer(connection, [queue], callbacks=[lambda body, message: seen.append(message)]):
            while len(seen) < 3:
                connection.drain_events(timeout=20)
        next(message for message in seen if message.payload == 2).ack()
    with connect() as connection:
        again = drain(connection, queue, 2)
    assert {1, 3} <= {*again, *([] if len(again) < 3 else [2])} | {1, 3}
    assert set(again) <= {1, 2, 3}


@pytest.mark.parametrize("requeue", [True, False])
def test_reject(connect: Connect, requeue: bool) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks")
    with connect() as connection:
        send(connection, queue, "job")
        bodies: list[Any] = []

        def reject(body: Any, message: Any) -> None:
            bodies.append((body, message.delivery_info.get("redelivered", False)))
            if len(bodies) == 1:
                message.reject(requeue=requeue)
            else:
                message.ack()

        with kombu.Consumer(connection, [queue], callbacks=[reject]):
            connection.drain_events(timeout=20)
            if requeue:
                connection.drain_events(timeout=20)
        assert len(bodies) == 1 + requeue
        assert is_empty(connection, queue)


@many
@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
def test_another_connection_routes_by_the_bindings(connect: Connect, kind: str) -> None:
    exchange = kombu.Exchange("news", type=kind)
    queues = [kombu.Queue(f"{kind}.{name}", exchange, routing_key=key) for name, key in (("a", "x.1"), ("b", "y.1"))]
    with connect() as consuming, connect() as sending:
        for queue in queues:
            queue(consuming.channel()).declare()
        kombu.Producer(sending, exchange).publish("item", routing_key="x.1")
        assert drain(consuming, queues[0], 1) == ["item"]
        assert drain(consuming, queues[1], 1) == ["item"] if kind == "fanout" else is_empty(consuming, queues[1])


@many
def test_a_queue_that_another_connection_has_deleted_is_bound_again(connect: Connect) -> None:
    queue = kombu.Queue("tasks", kombu.Exchange("news"), routing_key="x")
    with connect() as connection, connect() as other:
        queue(connection.channel()).declare()
        queue(other.channel()).delete()
        queue(connection.channel()).declare()
        kombu.Producer(connection, queue.exchange).publish("item", routing_key="x")
        assert drain(connection, queue, 1) == ["item"]


def test_a_put_looks_twice_whether_bindings_have_changed(share: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look asks the system, and another process may have bound a queue, or given it a time to live."""
    with share() as connection:
        queue = connection.SimpleQueue("tasks")
        queue.put("first")
        read = Mock(side_effect=FolderBindings.read)
        monkeypatch.setattr(FolderBindings, "read", lambda bindings: read(bindings))
        queue.put("second")
        assert read.call_count == 2


def test_a_hub_without_messages_turns_once_a_second(share: Connect) -> None:
    """A worker of Celery looks between two turns of its hub whether it is to stop."""
    queue = kombu.Queue("tasks", routing_key="tasks")
    with share() as connection, kombu.Consumer(connection, [queue]):
        hub = Hub()
        connection.register_with_event_loop(hub)
        assert hub.fire_timers() <= 1
        connection.release()
        assert not hub.readers
        assert not hub.on_tick


def test_a_wake_after_the_end_of_its_connection_writes_nowhere(share: Connect, tmp_path: Path) -> None:
    """The thread of a receive can have the pipe of a connection that another thread closes."""
    with share() as connection, ExitStack() as opened:
        connection.register_with_event_loop(Hub())
        signal_of_hub = connection.transport._signal  # as a thread has read it before
        connection.release()
        for number in range(100):  # one has the descriptor of the pipe
            opened.enter_context((tmp_path / f"file-{number}").open("wb"))
        signal_of_hub.set()
        assert [path.stat().st_size for path in tmp_path.glob("file-*")] == [0] * 100


def test_an_acknowledgement_and_a_message_wake_the_hub(connect: Connect) -> None:
    """The hub of a worker sleeps while it has as many messages as it takes, and while there is none."""
    taken: list[Any] = []
    queue, control = kombu.Queue("tasks", routing_key="tasks"), kombu.Queue("control", routing_key="control")
    with (
        closing(Hub()) as hub,
        connect() as connection,
        connect() as sending,
        kombu.Consumer(connection.channel(), [queue], on_message=taken.append, prefetch_count=1),
        kombu.Consumer(connection.channel(), [control], on_message=taken.append, no_ack=True),
    ):
        connection.register_with_event_loop(hub)
        hub.timer.clear()  # so that it is woken, and does not look each second
        for look in list(hub.on_tick):
            look()
        send(sending, queue, "first", "second")
        while len(taken) < 1:
            hub.run_once()
        send(sending, control, "ping")
        while len(taken) < 2:
            hub.run_once()
        acknowledging = threading.Thread(target=taken[0].ack)
        acknowledging.start()
        while len(taken) < 3:
            hub.run_once()
        acknowledging.join()
        taken[2].ack()
    first, control_message, second = [message.payload for message in taken]
    assert control_message == "ping"
    assert {first, second} == {"first", "second"}


@pytest.mark.parametrize("prefetch", [2, 5])
def test_a_pool_has_its_turn_after_each_message_before_the_hub_waits(share: Connect, prefetch: int) -> None:
    """A pool passes its tasks to its processes in a turn of the hub, whose turns have no order."""
    taken: list[Any] = []
    passed: list[Any] = []
    queue, messages = kombu.Queue("tasks", routing_key="tasks"), list(range(12))
    with (
        closing(Hub()) as hub,
        share() as connection,
        kombu.Consumer(connection, [queue], on_message=taken.append, prefetch_count=prefetch),
    ):
        send(connection, queue, *messages)
        for _ in range(4):  # some have their turn before the one of the transport, and some after it
            hub.on_tick.add(lambda: passed.extend(taken[len(passed) :]))
        connection.register_with_event_loop(hub)
        poll = hub.poller.poll

        def look_and_poll(timeout: float) -> Any:
            assert passed == taken or select.select(list(hub.readers), [], [], 0)[0]
            if passed:
                acknowledged = next((message for message in passed if not message.acknowledged), None)
                if acknowledged is not None:
                    acknowledged.ack()  # as what a process of the pool says lets a worker do, in the hub's thread
            assert len(taken) - sum(message.acknowledged for message in taken) <= prefetch
            return poll(0)

        hub.poller.poll = look_and_poll
        turns = 0
        while not passed or len(passed) < len(messages) or not passed[-1].acknowledged:
            hub.run_once()
            turns += 1
        assert [message.payload for message in passed] == messages
        assert turns <= len(messages) + 3, "each acknowledgement brings the next message in the same turn"


@contextmanager
def pool(hub: Hub, waiting: list[Any], take: Callable[[], object], processes: int = 1) -> Iterator[list[Any]]:
    """Call ``take()`` whenever the hub can write to a process of a pool, while tasks wait, as with Celery's pools.

    Yield a list of what keeps all processes busy.
    """
    pipes = [os.pipe() for _ in range(processes)]
    busy: list[Any] = []

    def turn() -> None:
        for _, writer in pipes:
            if waiting and not busy:
                hub.add(writer, None, hub.WRITE | hub.ERR, consolidate=True)
            else:
                hub.remove_writer(writer)

    hub.on_tick.add(turn)
    hub.consolidate_callback = lambda _: take()
    yield busy
    for file in itertools.chain(*pipes):
        os.close(file)


@pytest.mark.parametrize("is_early", [True, False])
def test_one_receive_fills_the_room_of_several_tasks(
    share: Connect, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """While the worker has tasks for its process, which acknowledges them as they start or end."""
    monkeypatch.setattr(librmq.integrations.kombu, "_FILL_S", 3600.0)
    receive = Mock(side_effect=librmq.SimpleConsumer.receive_or_notify)
    monkeypatch.setattr(librmq.SimpleConsumer, "receive_or_notify", lambda *words, **more: receive(*words, **more))
    waiting: list[Any] = []
    done: list[Any] = []
    queue, messages = kombu.Queue("tasks", routing_key="tasks"), list(range(16))

    def begin() -> None:
        busy.append(waiting.pop(0))
        process.send(b"1")
        if is_early:
            hub.call_soon(busy[0].ack)

    def end() -> None:
        worker.recv(1)
        done.append(busy.pop())
        if not is_early:
            done[-1].ack()

    worker, process = socket.socketpair()
    with (
        worker,
        process,
        closing(Hub()) as hub,
        share() as connection,
        kombu.Consumer(connection, [queue], on_message=waiting.append, prefetch_count=4),
        pool(hub, waiting, begin) as busy,
    ):
        hub.add_reader(worker.fileno(), end)
        send(connection, queue, *messages)
        connection.register_with_event_loop(hub)
        while len(done) < len(messages):
            hub.run_once()
            assert len(waiting) <= 4
    assert [message.payload for message in done] == messages
    assert receive.call_count <= len(messages) // 2 + 1, "each brings two, and the last one nothing"


def test_an_idle_process_waits_for_no_acknowledgement(share: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that are acknowledged at their end may run for hours, beside a process that is free."""
    monkeypatch.setattr(librmq.integrations.kombu, "_LONGEST_WAIT_S", 3600.0)
    monkeypatch.setattr(librmq.integrations.kombu, "_FILL_S", 3600.0)
    waiting: list[Any] = []
    running: list[Any] = []
    queue = kombu.Queue("tasks", routing_key="tasks")
    with (
        closing(Hub()) as hub,
        share() as connection,
        kombu.Consumer(connection, [queue], on_message=waiting.append, prefetch_count=3),
        pool(hub, waiting, lambda: running.append(waiting.pop(0)), processes=3),
    ):
        connection.register_with_event_loop(hub)
        for number in range(3):
            send(connection, queue, number)
            while len(running) <= number:
                hub.run_once()
    assert [message.payload for message in running] == [0, 1, 2]


def test_tasks_that_may_not_run_keep_no_others_back(share: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the rate of some keeps them in the worker, where they look like tasks that wait for a process."""
    monkeypatch.setattr(librmq.integrations.kombu, "_FILL_S", 0.0)
    monkeypatch.setattr(librmq.integrations.kombu, "_UNFILLED_S", 3600.0)
    kept: list[Any] = []
    waiting: list[Any] = []
    done: list[Any] = []
    queue = kombu.Queue("tasks", routing_key="tasks")

    def deliver(message: Any) -> None:
        (kept if message.payload < 3 else waiting).append(message)

    def end() -> None:
        monkeypatch.setattr(librmq.integrations.kombu, "_FILL_S", 0.0 if len(done) < 2 else 3600.0)
        done.append(waiting.pop(0))
        done[-1].ack()

    with (
        closing(Hub()) as hub,
        share() as connection,
        kombu.Consumer(connection, [queue], on_message=deliver, prefetch_count=4),
        pool(hub, waiting, end),
    ):
        send(connection, queue, *range(8))
        connection.register_with_event_loop(hub)
        while len(done) < 5:
            hub.run_once()
    assert [message.payload for message in done] == [3, 4, 5, 6, 7]


@many
@pytest.mark.parametrize("ends", ["closes", "is busy", "goes on"])
def test_a_hub_keeps_no_acknowledgement_back(connect: Connect, ends: str) -> None:
    """It goes with the next receive; without one it is there after a moment."""
    taken: list[Any] = []
    queue = kombu.Queue("tasks", routing_key="tasks")
    with closing(Hub()) as hub, connect() as sending:
        with connect() as connection, kombu.Consumer(connection, [queue], on_message=taken.append, prefetch_count=1):
            connection.register_with_event_loop(hub)
            send(sending, queue, "first", "second")
            while not taken:
                hub.run_once()
            taken[0].ack()
            while ends == "goes on" and len(taken) < 2:
                hub.run_once()
            bound = queue(sending.channel())
            while ends == "is busy" and bound.queue_declare(passive=True).message_count > 1:
                pass
        assert queue(sending.channel()).queue_declare(passive=True).message_count == 1


def test_the_end_of_a_connection_says_what_it_can_not_acknowledge(
    share: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[Any] = []
    queue = kombu.Queue("tasks", routing_key="tasks")
    failing = Mock(side_effect=librmq.BrokerUnreachableError("the owner has gone"))
    with closing(Hub()) as hub, share(visibility_timeout=60) as connection:
        with kombu.Consumer(connection, [queue], on_message=taken.append):
            connection.register_with_event_loop(hub)
            send(connection, queue, "first", "second")
            while len(taken) < 2:
                hub.run_once()
        monkeypatch.setattr(librmq.SimpleConsumer, "ack_one_way", failing)
        for message in taken:
            message.ack()
        while not failing.called:
            pass
    assert "kombu: 2 processed messages come again: the owner has gone" in caplog.text


def test_an_acknowledgement_of_another_thread_ends_a_wait_for_events(connect: Connect) -> None:
    taken: list[Any] = []
    queue = kombu.Queue("tasks", routing_key="tasks")
    with connect() as connection, kombu.Consumer(connection, [queue], on_message=taken.append, prefetch_count=1):
        send(connection, queue, *range(5))
        for number in range(5):
            while len(taken) == number:
                connection.drain_events(timeout=20)
            threading.Thread(target=taken[number].ack).start()
        bound = queue(connection.channel())
        while bound.queue_declare(passive=True).message_count:
            pass
    assert sorted(message.payload for message in taken) == list(range(5))


def test_connections_of_one_hub_do_not_take_their_turns_within_each_other(connect: Connect) -> None:
    """However many messages wait, the stack does not grow with them."""
    depths: list[int] = []

    def take(message: Any) -> None:
        depths.append(sum(1 for _ in traceback.walk_stack(None)))
        message.ack()

    queues = [kombu.Queue(name, routing_key=name) for name in ("left", "right")]
    with closing(Hub()) as hub, ExitStack() as opened:
        for queue in queues:
            connection = opened.enter_context(connect())
            opened.enter_context(kombu.Consumer(connection, [queue], on_message=take))
            send(connection, queue, *range(300))
            connection.register_with_event_loop(hub)
        while len(depths) < 600:
            hub.run_once()
        assert len(set(depths)) <= 3, "one for a wake, one for a turn, and one for a turn in that of the other"


def test_a_cancelled_consumer_leaves_the_others_of_its_hub(connect: Connect) -> None:
    bodies: list[Any] = []

    def take(body: Any, message: Any) -> None:
        bodies.append(body)
        message.ack()

    stays, leaves = kombu.Queue("stays", routing_key="stays"), kombu.Queue("leaves", routing_key="leaves")
    with (
        closing(Hub()) as hub,
        connect() as connection,
        kombu.Consumer(connection, [stays, leaves], callbacks=[take]) as consumer,
    ):
        connection.register_with_event_loop(hub)
        for look in list(hub.on_tick):
            look()
        consumer.cancel_by_queue("leaves")
        with connect() as sending:
            send(sending, leaves, "left")
            send(sending, stays, "message")
        while not bodies:
            hub.run_once()
        assert bodies == ["message"]
        assert drain(connection, leaves, 1) == ["left"]


class Interrupted:
    """A consumer with a connection of its own, which a signal ends as Celery's cold shutdown does."""

    def __init__(self, url: str, queue: Any, at_line: int) -> None:
        self.connection, self.hub, self.at_line, self.lines = kombu.Connection(url), Hub(), at_line, 0
        self.taken: list[Any] = []
        self.consumer = kombu.Consumer(self.connection, [queue], on_message=self.taken.append, prefetch_count=2)
        send(self.connection, queue, "first", "second", "third")
        self.consumer.consume()
        signal.signal(signal.SIGUSR1, self.end)

    def end(self, *_: object) -> None:
        self.consumer.cancel()
        for message in self.taken:
            if not message.acknowledged:
                message.reject(requeue=True)

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        """Raise the signal at a line of the transport, or of a lock."""
        if not Path(frame.f_code.co_filename).stem.startswith(("kombu", "threading")):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at_line:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return self.trace

    def run(self, work: str) -> None:
        if work != "drain":
            self.connection.register_with_event_loop(self.hub)
            self.hub.call_repeatedly(0.01, lambda: None)
        loop = self.hub.create_loop()
        while len(self.taken) < 2:
            self.connection.drain_events(timeout=20) if work == "drain" else next(loop)
        if work in ("hub", "drain"):
            self.taken[0].ack()
        sys.settrace(self.trace)
        with suppress(TimeoutError):
            if work == "acknowledge":
                self.taken[0].ack()
            elif work == "drain":
                self.connection.drain_events(timeout=1)
                self.connection.drain_events(timeout=0.01)  # waits for an acknowledgement
            elif work == "hub":
                for _ in range(3):
                    next(loop)
            else:
                self.connection.release()
        sys.settrace(None)
        self.connection.release()


def interrupt_each_line(folder: str, work: str) -> None:
    queue, at_line = kombu.Queue("tasks", exchange=kombu.Exchange("work"), routing_key="tasks"), 0
    with librmq.share(f"{folder}/store"), kombu.Connection(f"librmq://{folder}/store") as connection:
        while True:
            faulthandler.dump_traceback_later(60, exit=True)
            interrupted = Interrupted(f"librmq://{folder}/store", queue, at_line := at_line + 1)
            interrupted.run(work)
            left = {"second", "third"}
            while left:
                left -= set(drain(connection, queue, 1))
            connection.default_channel.queue_purge("tasks")
            if interrupted.lines < at_line:
                print("lines", at_line, flush=True)
                return


@pytest.mark.slow
@pytest.mark.parametrize("work", ["acknowledge", "hub", "drain", "release"])
def test_a_signal_handler_ends_the_consumer_at_any_line(tmp_path: Path, work: str) -> None:
    with Fork(interrupt_each_line, str(tmp_path), work) as child:
        words = child.stdout.readline().split()
    assert words[:1] == ["lines"]
    assert int(words[1]) > 10


def test_size_purge_and_delete(connect: Connect) -> None:
    queue = kombu.Queue("a queue.with/any+name" * 10, routing_key="long")
    with connect() as connection:
        bound = queue(connection.channel())
        bound.declare()
        for number in range(5):
            connection.default_channel.basic_publish(
                connection.default_channel.prepare_message(str(number)), "", queue.name
            )
        assert bound.queue_declare().message_count == 5
        assert bound.purge() == 5
        assert bound.queue_declare().message_count == 0
        assert is_empty(connection, queue)
        bound.delete()
        assert connection.default_channel.basic_get(queue.name) is None
        assert connection.default_channel.queue_purge(queue.name) == 0
        with pytest.raises(ChannelError, match="NOT_FOUND"):
            bound.queue_declare(passive=True)


def test_a_queue_expires_without_consumers_only(share: Connect) -> None:
    queue = kombu.Queue("replies", kombu.Exchange("replies", type="fanout"), expires=0.001)
    with share() as connection, share() as other:
        with kombu.Consumer(connection, [queue]):
            kombu.Queue("other")(other.channel()).declare()  # deletes what has expired
            assert queue(other.channel()).queue_declare(passive=True)
        while "replies" in other.transport.broker.bindings.read()["queues"]:
            kombu.Queue("other")(other.channel()).declare()
        with pytest.raises(ChannelError, match="NOT_FOUND"):
            queue(other.channel()).queue_declare(passive=True)


def test_a_queue_that_expires_is_declared_after_its_deletion(share: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that starts again declares the queue of its remote control, which another process finds expired."""
    queue = kombu.Queue("control", kombu.Exchange("control", type="fanout"), expires=0.001)
    kept = kombu.Queue("control", queue.exchange, expires=3600)
    declaring: list[threading.Thread] = []
    delete = librmq.integrations.kombu.Channel.queue_delete

    def delete_beside(channel: Any, name: str) -> None:
        monkeypatch.undo()
        declaring.append(threading.Thread(target=kept(other.channel()).declare))
        declaring[0].start()
        delete(channel, name)

    with share() as connection, share() as other:
        queue(connection.channel()).declare()
        monkeypatch.setattr(librmq.integrations.kombu.Channel, "queue_delete", delete_beside)
        while not declaring:
            kombu.Queue("other")(connection.channel()).declare()  # deletes what has expired
        declaring[0].join(60)
        kombu.Producer(connection, queue.exchange).publish("stop")
        assert drain(other, kept, 1) == ["stop"]


@pytest.mark.parametrize("expires", [None, 3600], ids=["lasting", "temporary"])
def test_a_consumer_of_a_deleted_queue_connects_again(share: Connect, expires: float | None) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks", expires=expires)
    with share() as connection, share() as other:
        with kombu.Consumer(connection, [queue]):
            queue(other.channel()).delete()
            with pytest.raises(ConsumerCancelled, match="deleted while it had a consumer: kombu-tasks") as error:
                connection.drain_events(timeout=60)
            assert isinstance(error.value, connection.connection_errors)
        send(other, queue, "later")
        assert drain(connection, queue, 1) == ["later"]


@pytest.mark.parametrize("kind", ["direct", "fanout"])
def test_a_queue_whose_topic_is_gone_expires(share: Connect, tmp_path: Path, kind: str) -> None:
    """A kill in the middle of a deletion, and ``librmq topic delete``, leave its bindings."""
    exchange = kombu.Exchange("replies", type=kind)
    queue = kombu.Queue("replies", exchange, routing_key="key", expires=0.001)
    with share() as connection:
        queue(connection.channel()).declare()
        broker = connection.transport.broker
        while "waits":
            with broker.bindings.expired("replies") as is_expired:
                if is_expired:
                    break
        broker.route.delete_topic(broker.topic("replies"))
        for _ in range(1000):  # the queue is looked at again a millisecond after the last time
            kombu.Producer(connection, exchange).publish("lost", routing_key="key")
            if not broker.bindings.read()["queues"]:
                break
        assert broker.bindings.read()["queues"] == {}
        assert broker.bindings.read()["tables"] == {"replies": []}
        assert not list((tmp_path / "store/librmq/kombu").glob("used-*"))


def test_messages_expire(connect: Connect) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks")
    with connect() as connection:
        send(connection, queue, "late", expiration=0.001)
        send(connection, queue, "good")
        assert drain(connection, queue, 1) == ["good"]
        assert is_empty(connection, queue)


def test_messages_expire_by_their_queue(share: Connect) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks", message_ttl=0.001)
    with share() as connection:
        send(connection, queue, "late")
        assert is_empty(connection, queue)


def test_the_highest_priority_first(share: Connect) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks", max_priority=10)
    with share() as connection:
        for priority in (3, 9, 0, 10, 6):
            send(connection, queue, priority, priority=priority)
        assert drain(connection, queue, 5) == [10, 9, 6, 3, 0]


@pytest.mark.parametrize("priorities", [255, 11, -1, "10", True])
def test_other_numbers_of_priorities_are_refused(share: Connect, priorities: Any) -> None:
    queue = kombu.Queue("tasks", queue_arguments={"x-max-priority": priorities})
    with share() as connection, pytest.raises(ChannelError, match="whole number from 0 to 10, found"):
        queue(connection.channel()).declare()


def test_what_a_cluster_can_not_is_refused(tmp_path: Path) -> None:
    with librmq.Broker.open(str(tmp_path / "store")) as broker, RemotingServer(broker) as server:
        url = f"librmq+connect://127.0.0.1:{server.port}"
        with kombu.Connection(url) as connection, pytest.raises(ChannelError, match="x-max-priority"):
            kombu.Queue("tasks", max_priority=9)(connection.channel()).declare()
        with (
            kombu.Connection(url, transport_options={"delayed_delivery": True}) as connection,
            pytest.raises(librmq.ConfigError, match="delayed_delivery"),
        ):
            connection.connect()


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("librmq://folder", "expected librmq:///absolute"),
        ("librmq:///folder?visibility_timeout=9", "has a query.* broker_transport_options; .* write . as %3F"),
        ("librmq:///folder#1", "has a fragment"),
        ("librmq://~/folder", "~ means no home folder"),
        ("librmq:///~ann/folder", "~ means no home folder"),
        ("librmq:///C:/folder", "a drive"),
        ("librmq+connect://127.0.0.1:9876/folder", "a cluster has no path"),
        ("librmq+connect://127.0.0.1:9876?a=1", "has a query"),
    ],
)
def test_a_url_with_other_parts_is_refused(url: str, match: str) -> None:
    with kombu.Connection(url) as connection, pytest.raises(librmq.ConfigError, match=match):
        connection.connect()


@pytest.mark.parametrize("value", ["false", 0])
def test_a_delayed_delivery_that_is_neither_true_nor_false_is_refused(share: Connect, value: object) -> None:
    with share(delayed_delivery=value) as connection, pytest.raises(librmq.ConfigError, match="expected True or False"):
        connection.connect()


@pytest.mark.parametrize("seconds", [0, 43_201, "60", True])
def test_a_visibility_timeout_that_no_broker_takes_is_refused_by_senders_too(share: Connect, seconds: object) -> None:
    with (
        share(visibility_timeout=seconds) as connection,
        pytest.raises(librmq.ConfigError, match="visibility_timeout: expected seconds from 1 to 43200"),
    ):
        connection.connect()


def test_an_option_without_effect_is_named_once(share: Connect, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with share(visibilty_timeout=60, sep=":", visibility_timeout=60, max_retries=3) as connection:
            connection.connect()
            connection.default_channel.queue_declare("tasks")
    (warning,) = (record.getMessage() for record in caplog.records if "no effect" in record.getMessage())
    assert "'sep', 'visibilty_timeout': no effect with librmq" in warning


def test_a_cluster_ignores_a_visibility_timeout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same ``tasks.py`` serves a folder and a cluster."""
    queue = kombu.Queue("tasks", routing_key="tasks")
    with librmq.Broker.open(str(tmp_path / "store")) as broker, RemotingServer(broker) as server:
        url = f"librmq+connect://127.0.0.1:{server.port}"
        with kombu.Connection(url, transport_options={"visibility_timeout": 600}) as connection:
            send(connection, queue, "job")
            assert drain(connection, queue, 1) == ["job"]
    assert [record.getMessage() for record in caplog.records if "visibility_timeout has no effect" in record.message]


def test_a_process_without_delays_leaves_the_timers_to_others(share: Connect, tmp_path: Path) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks")
    with share() as connection:
        send(connection, queue, "plain")
        with share(delayed_delivery=True) as delaying:
            send(delaying, queue, "delayed")
            timers = librmq.BrokerConfig(timers=librmq.TimerConfig())
            with librmq.share(tmp_path / "store", timers):
                assert drain(connection, queue, 2) == ["plain", "delayed"]


@pytest.mark.parametrize("kind", ["socket", "pipe", "link"])
def test_a_file_of_the_bindings_that_is_none_is_named(share: Connect, tmp_path: Path, kind: str) -> None:
    lock = tmp_path / "store" / "librmq" / "kombu" / "lock"
    lock.parent.mkdir(parents=True)
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(lock))
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(tmp_path / "other")
    with (
        share() as connection,
        pytest.raises(librmq.CorruptionError, match=r"kombu/lock.* (regular file|symbolic link)"),
    ):
        connection.SimpleQueue("tasks").put("job")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_what_root_makes_belongs_to_the_owner_of_the_store(share: Connect, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    os.chown(store, 12345, 12346)
    with share() as connection:
        connection.SimpleQueue("tasks").put("job")
    made = list(store.rglob("*"))
    assert any(path.name == "bindings.json" for path in made)
    assert {path.stat().st_uid for path in made} == {12345}


def test_text_is_stored_as_it_is_and_the_limit_says_what_to_do(share: Connect) -> None:
    with share() as connection:
        queue = connection.SimpleQueue("tasks")
        arguments = ["x" * (4_000 << 10)]  # a third more in base64
        queue.put(arguments)
        message = queue.get(timeout=20)
        assert message.payload == arguments
        message.ack()
        with pytest.raises(librmq.MessageIllegalError, match=r"queue 'tasks': the message has 4,.* the name of a file"):
            queue.put(["x" * (4_096 << 10)])


def test_a_queue_is_deleted_with_its_last_consumer(share: Connect) -> None:
    replies = kombu.Queue("reply", kombu.Exchange("replies"), routing_key="1", auto_delete=True)
    with share() as connection, share() as other:
        with kombu.Consumer(connection, [replies]):
            with kombu.Consumer(other, [replies]):
                pass
            assert replies(other.channel()).queue_declare(passive=True)
        with pytest.raises(ChannelError, match="NOT_FOUND"):
            replies(other.channel()).queue_declare(passive=True)
        assert connection.transport.broker.bindings.read()["tables"]["replies"] == []


def test_queues_for_replies_leave_nothing_behind(share: Connect, tmp_path: Path) -> None:
    exchange = kombu.Exchange("replies")

    def left() -> tuple[set[str], object, object]:
        """Return the files of queues, the topics with their progress, and the queues that the bindings have."""
        broker = connection.transport.broker
        files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("consumequeue/**/*")}
        progress = {topic: set(broker.route.consumer_offsets("kombu", topic)) for topic in broker.route.topics()}
        return files, progress, broker.bindings.read()["queues"]

    with share() as connection, share() as other:
        states = []
        for number in range(12):
            queue = kombu.Queue(f"reply {number}", exchange, routing_key=str(number), auto_delete=True, expires=60)
            with kombu.Consumer(connection, [queue], no_ack=bool(number % 2)):
                send(other, queue, "first", "second", "third")
                assert drain(connection, queue, 1, no_ack=bool(number % 2))[0] in ("first", "second")
            states.append(left())
        assert states[2:] == states[1:-1]
        assert states[-1][2] == {}


@pytest.mark.slow
def test_a_queue_gets_nothing_of_the_former_one_with_its_topic(share: Connect, tmp_path: Path) -> None:
    """A process of the former one was killed with a message in flight, and senders were slow."""
    first, second = (kombu.Queue(name, kombu.Exchange(name), routing_key="key", expires=3600) for name in ("1", "2"))
    die = f"""
        import os, kombu, librmq.integrations.kombu
        with kombu.Connection("librmq://{tmp_path}/store") as connection:
            queue = kombu.Queue("1", kombu.Exchange("1"), routing_key="key", expires=3600)(connection.channel())
            queue.declare()
            for body in ("in flight", "unread"):
                queue.exchange.publish(body, routing_key="key")
            assert queue.get() is not None
            os._exit(9)
    """
    with share() as connection:
        broker = connection.transport.broker
        assert run_program(die).returncode == 9
        topic, stale = broker.topic("1"), broker.bindings.read()["queues"]["1"]

        def put_late(body: str) -> None:
            with pytest.MonkeyPatch.context() as patch:  # the sender has read the bindings before the deletion
                patch.setattr(broker.bindings, "read", lambda: {"queues": {"1": stale}})
                broker.put("1", connection.default_channel.prepare_message(body))

        first(connection.channel()).delete()
        put_late("before the second")
        bound = second(connection.channel())
        bound.declare()
        assert broker.topic("2") == topic
        assert bound.queue_declare().message_count == 0
        put_late("after the second")
        send(connection, second, "for the second")
        assert drain(connection, second, 1) == ["for the second"]
        assert is_empty(connection, second)
        send(connection, first, "again")
        assert broker.topic("1") != topic
        assert drain(connection, first, 1) == ["again"]


@pytest.mark.parametrize("work", ["receive", "purge"])
def test_a_topic_that_passes_to_another_queue_during_a_request(
    share: Connect, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    """The request of the former queue receives what was sent to the next one, and gives it back."""
    first, second = (kombu.Queue(name, kombu.Exchange(name), routing_key="key", expires=3600) for name in ("1", "2"))
    with share() as connection, share() as other:
        bound = first(connection.channel())
        bound.declare()
        topic, receiver = connection.transport.broker.topic("1"), connection.transport.receiver
        request = receiver.receive

        def receive(topics: list[str], most: int) -> Any:
            if topic in topics:
                monkeypatch.undo()
                first(other.channel()).delete()
                send(other, second, "for the second")
                assert other.transport.broker.topic("2") == topic
            return request(topics, most)

        monkeypatch.setattr(receiver, "receive", receive)
        if work == "receive":
            assert bound.get() is None
        else:
            assert bound.purge() == 0
        assert drain(other, second, 1) == ["for the second"]


def test_a_declaration_adds_to_the_file_of_bindings(
    share: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store" / "librmq" / "kombu" / "bindings.json"
    exchange = kombu.Exchange("work")
    with share() as connection, share() as other:

        def declare(name: str) -> int:
            before = path.stat().st_size if path.exists() else 0
            kombu.Queue(name, exchange, routing_key=name, expires=3600)(connection.channel()).declare()
            return path.stat().st_size - before

        declare("first")
        inode, size = path.stat().st_ino, declare("queue0")
        assert {declare(f"queue{number}") for number in range(1, 7)} == {size}
        assert path.stat().st_ino == inode
        with open(path, "a") as file:
            file.write('["bind", "work", "a kill')
        declare("last")
        monkeypatch.setattr("librmq.integrations._kombu_bindings._MOST_CHANGES", 4)
        for number in range(7):
            kombu.Queue(f"queue{number}", exchange)(other.channel()).delete()
        for _ in range(20):
            declare("again")
            kombu.Queue("again", exchange)(other.channel()).delete()
        assert path.stat().st_size < 10 * size  # it was written again; its inode can be the first one's by now
        for each in (connection, other):
            assert [row[2] for row in each.default_channel.get_table("work")] == ["first", "last"]


def test_a_message_whose_channel_is_cancelled_on_its_arrival_comes_again(
    share: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler cancels the consumer of the second of two channels; kombu rejects the message by the first."""
    begin = librmq.integrations.kombu.Channel.begin
    first, second = kombu.Queue("first", routing_key="first"), kombu.Queue("second", routing_key="second")
    with share() as connection:
        send(connection, second, "job")
        with kombu.Consumer(connection.channel(), [first]):
            consumer = kombu.Consumer(connection.channel(), [second], on_message=lambda message: None)
            consumer.consume()

            def begin_beside(channel: Any, *arguments: Any) -> Any:
                consumer.cancel()
                return begin(channel, *arguments)

            monkeypatch.setattr(librmq.integrations.kombu.Channel, "begin", begin_beside)
            connection.drain_events(timeout=20)
            monkeypatch.undo()
            assert drain(connection, second, 1) == ["job"]


@pytest.mark.slow
def test_a_process_that_lives_keeps_its_messages_hidden(share: Connect) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks")
    with share(visibility_timeout=6) as connection, share(visibility_timeout=6) as other:
        send(connection, queue, "long")
        held = queue(connection.channel()).get()
        with pytest.raises(TimeoutError):
            drain(other, queue, 1, seconds=9)
        held.ack()
        assert is_empty(other, queue)


def test_a_message_whose_answer_is_lost_comes_again_long_before_its_visibility_timeout(
    share: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that was stopped for some seconds answers then, and hides messages for a process that waits no more."""
    monkeypatch.setattr("librmq.integrations._kombu_receivers._CLAIM_S", 1.0)
    receive, renew, renewed = librmq.SimpleConsumer.receive_or_notify, librmq.SimpleConsumer.renew, threading.Event()

    def lose(*words: Any, **fields: Any) -> Any:
        if received := receive(*words, **fields):
            monkeypatch.undo()
            monkeypatch.setattr(librmq.SimpleConsumer, "renew", note)
            raise librmq.BrokerUnreachableError("the owner has not answered within 3 s")
        return received

    def note(consumer: Any, message: Any, seconds: float) -> None:
        assert seconds == 600
        renewed.set()
        renew(consumer, message, seconds)

    monkeypatch.setattr(librmq.SimpleConsumer, "receive_or_notify", lose)
    queue = kombu.Queue("tasks", routing_key="tasks")
    with share(visibility_timeout=600) as connection:
        send(connection, queue, "job")
        held: list[Any] = []
        with kombu.Consumer(connection, [queue], on_message=held.append):
            with pytest.raises(librmq.BrokerUnreachableError):
                connection.drain_events(timeout=20)
            connection.drain_events(timeout=20)
            assert renewed.wait(20)
            held[0].ack()


@pytest.mark.parametrize(("seconds", "attempts"), [(29, [1]), (59, [1]), (60, [2])])
def test_a_process_that_was_stopped_during_a_receive_begins_only_what_it_still_has(
    rmq: Kit, monkeypatch: pytest.MonkeyPatch, seconds: float, attempts: list[int]
) -> None:
    receive, stops, woken = librmq.SimpleConsumer.receive_or_notify, [seconds], Mock()

    def stop(*words: Any, **fields: Any) -> Any:
        received = receive(*words, **fields)
        rmq.advance(seconds=stops.pop() if stops else 0)
        return received

    monkeypatch.setattr(librmq.SimpleConsumer, "receive_or_notify", stop)
    rmq.broker.create_topic("tasks", 1)
    rmq.producer().send("tasks", "job")
    receivers = [ShareReceiver(cast("Any", rmq.broker), 600, woken) for _ in range(2)]
    begun = receivers[0].receive(["tasks"], 1)
    assert woken.called == (not begun)
    rmq.advance(seconds=30)
    begun += receivers[1].receive(["tasks"], 1)
    assert [delivery.attempt for delivery in begun] == attempts
    for receiver in receivers:
        receiver.close()


def test_an_owner_that_does_not_answer_is_asked_again_soon(share: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked for the other messages meanwhile, of which each would have a warning."""
    monkeypatch.setattr("librmq.integrations._kombu_receivers._PAUSE_S", 0.01)
    renew, asked, renewed = librmq.SimpleConsumer.renew, list[bytes](), threading.Event()

    def lose(consumer: Any, message: Any, seconds: float) -> None:
        asked.append(message.body)
        if len(asked) == 1:
            raise librmq.BrokerUnreachableError("the owner has not answered within 10 s")
        renew(consumer, message, seconds)
        if len(set(asked)) == 2:
            renewed.set()

    monkeypatch.setattr(librmq.SimpleConsumer, "renew", lose)
    queue = kombu.Queue("tasks", routing_key="tasks")
    with share(visibility_timeout=3) as connection:
        send(connection, queue, "first", "second")
        channel = connection.channel()
        held = [queue(channel).get(), queue(channel).get()]
        assert renewed.wait(20)
        assert asked[0] == asked[1]
        for message in held:
            message.ack()


@pytest.mark.slow
def test_the_visibility_timeout_ends_what_a_killed_process_has(share: Connect, tmp_path: Path) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks")
    with share(visibility_timeout=2) as connection:
        send(connection, queue, "job")
        killed = run_program(
            """
            import os, sys, kombu, librmq.integrations.kombu
            connection = kombu.Connection(sys.argv[1], transport_options={"visibility_timeout": 2})
            assert kombu.Queue("tasks")(connection.channel()).get().payload == "job"
            os._exit(9)
            """,
            f"librmq://{tmp_path}/store",
        )
        assert killed.returncode == 9, killed.stderr
        assert drain(connection, queue, 1) == ["job"]
        assert is_empty(connection, queue)


@pytest.mark.slow
def test_what_a_killed_process_has_acknowledged_does_not_come_again(share: Connect, tmp_path: Path) -> None:
    queue = kombu.Queue("tasks", routing_key="tasks")
    with share(visibility_timeout=6) as connection:
        send(connection, queue, *range(20))
        killed = run_program(
            """
            import os, signal, sys, kombu, librmq.integrations.kombu
            connection = kombu.Connection(sys.argv[1], transport_options={"visibility_timeout": 6})
            queue = connection.SimpleQueue("tasks")
            for message in [queue.get(timeout=20) for _ in range(20)][:15]:
                message.ack()
            os.kill(os.getpid(), signal.SIGKILL)
            """,
            f"librmq://{tmp_path}/store",
        )
        assert killed.returncode == -9, killed.stderr
        assert sorted(drain(connection, queue, 5)) == list(range(15, 20))
        assert is_empty(connection, queue)


@pytest.mark.slow
def test_a_forked_child_sends_and_leaves_the_messages_of_its_parent(tmp_path: Path) -> None:
    done = run_program(
        """
        import os, sys, warnings, kombu, librmq.integrations.kombu
        warnings.simplefilter("ignore", DeprecationWarning)
        connection = kombu.Connection(sys.argv[1])
        queue = connection.SimpleQueue("tasks")
        queue.put("parent")
        held = queue.get(timeout=20)
        child = os.fork()
        if not child:
            with kombu.Connection(sys.argv[1]) as own:
                own.SimpleQueue("tasks").put("child")
            connection.release()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        message = queue.get(timeout=20)
        assert message.payload == "child", message.payload
        message.ack()
        held.ack()
        connection.release()
        """,
        f"librmq://{tmp_path}/store",
    )
    assert not done.returncode, done.stderr


def test_names_of_topics() -> None:
    assert topic_of("celery") == "kombu-celery"
    assert topic_of("a.b") != topic_of("a-b")
    assert all(len(topic_of(name)) <= 66 for name in ("x" * 300, "é" * 50, "celery@host.celery.pidbox"))
