"""A broker with threads: no reader waits for a message that exists, and closing ends the broker's threads."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import PullConsumer, PushConsumer, SimpleConsumer
from librmq.errors import BrokerUnreachableError, StoreError
from librmq.files._memory import MemoryFiles
from librmq.message.message import Message
from librmq.protocol import PullMessage, PullStatus, SendMessage, Subscription, UpdateOffset
from librmq.runtime import ManualRunner
from librmq.runtime.threads import ThreadRunner
from tests.broker.parties import HOST
from tests.interrupting import at_each_call
from tests.programs import in_child


class Reader:
    """Pulls a queue to its end in the thread that wakes it, until all messages are read."""

    def __init__(self, broker: Broker, queue_id: int, count: int) -> None:
        self.broker, self.queue_id, self.count = broker, queue_id, count
        self.bodies: list[bytes] = []
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while len(self.bodies) < self.count:
            self.ready.clear()
            response = self.broker.call(
                PullMessage(
                    "c",
                    "g",
                    "T",
                    self.queue_id,
                    len(self.bodies),
                    subscription=Subscription("T", "a"),
                    notify=self.ready.set,
                    commit_offset=len(self.bodies),
                )
            )
            self.bodies += [message.body for message in response.messages]
            if response.status is PullStatus.HELD:
                assert self.ready.wait(30), "a message was stored, and its reader was not notified"


def test_no_message_is_missed_between_looking_and_waiting() -> None:
    senders, queues, each = 3, 2, 300
    with Broker.open("/b", files=MemoryFiles(), store_config=StoreConfig(commitlog_file_size=1 << 20)) as broker:
        broker.create_topic("T", queues)
        readers = [Reader(broker, queue_id, senders * each) for queue_id in range(queues)]

        def run(sender: int) -> None:
            for at in range(each):
                for queue_id in range(queues):
                    message = Message("T", b"%d %d" % (sender, at), tags="a")
                    broker.call(SendMessage("p", message, queue_id, 1, HOST))

        threads = [threading.Thread(target=run, args=(sender,)) for sender in range(senders)]
        for thread in threads:
            thread.start()
        for thread in [*threads, *(reader.thread for reader in readers)]:
            thread.join(60)
        for reader in readers:
            assert len(reader.bodies) == senders * each
            for sender in range(senders):
                mine = [body for body in reader.bodies if body.startswith(b"%d " % sender)]
                assert mine == [b"%d %d" % (sender, at) for at in range(each)]


def test_its_own_threads_end_with_it() -> None:
    before = set(threading.enumerate())
    broker = Broker.open("/b", files=MemoryFiles(), store_config=StoreConfig.tiny())
    broker.call(SendMessage("p", Message("T", b"x", delay_level=1), 0, 1, HOST))
    own = set(threading.enumerate()) - before
    broker.close()
    for thread in own:
        thread.join(60)
    assert set(threading.enumerate()) <= before


def test_a_given_runner_continues() -> None:
    runner = ThreadRunner()
    try:
        for name in ("a", "b"):
            with Broker.temporary(name=name, runner=runner) as broker:
                assert broker.runner is runner
                assert os.path.isdir(broker.store.path)
            assert not os.path.exists(broker.store.path)
    finally:
        assert runner.shutdown()


@pytest.mark.skipif("not hasattr(os, 'fork')", reason="needs fork")
def test_a_child_process_cannot_use_the_broker() -> None:
    with Broker.temporary() as broker:
        broker.create_topic("T")

        def send() -> None:
            with pytest.raises(BrokerUnreachableError):
                broker.call(SendMessage("p", Message("T", b"x"), 0, 1, HOST))

        in_child(send)
        assert broker.call(SendMessage("p", Message("T", b"x"), 0, 1, HOST)).queue_offset == 0


@pytest.mark.skipif("not hasattr(os, 'fork')", reason="needs fork")
def test_a_child_process_waits_for_no_lock_that_a_thread_of_its_parent_held() -> None:
    with Broker.temporary() as broker:
        is_held, is_done = threading.Event(), threading.Event()

        def hold() -> None:
            with broker.runner.lock:
                is_held.set()
                is_done.wait(60)

        def save() -> None:
            with pytest.raises(BrokerUnreachableError):
                broker.call(UpdateOffset("g", "T", 0, 0))

        holder = threading.Thread(target=hold)
        holder.start()
        assert is_held.wait(60)
        try:
            in_child(save)
        finally:
            is_done.set()
            holder.join()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["broker", "producer", "push", "pull", "simple"])
def test_a_signal_handler_does_not_wait_for_what_waits_for_its_append(name: str) -> None:
    """A pull has the runner's lock and waits for the append that the handler interrupts, whose thread needs it."""
    broker = Broker.open("/b", files=MemoryFiles(), store_config=StoreConfig.tiny(), runner=ManualRunner())
    broker.create_topic("T", 1)
    push, pull, simple = PushConsumer(broker, "push"), PullConsumer(broker, "pull"), SimpleConsumer(broker, "simple")
    push.subscribe("T", lambda _: None)
    pull.subscribe("T")
    simple.subscribe("T")
    parts = {
        "broker": broker.close,
        "producer": Producer(broker, "producer").start().shutdown,
        "push": push.start().shutdown,
        "pull": pull.start().shutdown,
        "simple": simple.start().shutdown,
    }
    refused: list[str] = []

    def handle(*_: object) -> None:
        if broker.store.appender.lock.owner:
            with pytest.raises(StoreError, match="let the handler record the signal"):
                parts[name]()
            refused.append(name)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for _ in at_each_call(lambda: broker.store.appender.append(Message("T", b"x")), signal.SIGUSR1):
            pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused
    assert not broker.dead
    parts[name]()
    broker.close()
