"""Processes that share a store: one owns it, and when it ends another takes over, and nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import pytest

import librmq
from librmq import (
    Broker,
    BrokerBusyError,
    BrokerConfig,
    BrokerUnreachableError,
    ConfigError,
    ConsumeFrom,
    DeadLetter,
    DeliveredMessage,
    DiskFullError,
    DownstreamDown,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    ReceiptError,
    ReceivedMessage,
    SendStatus,
    SimpleConsumer,
    StoreConfig,
    StoreLockedError,
    TimerConfig,
    TransactionProducer,
    TransactionState,
    protocol,
)
from librmq.clock import SystemClock
from librmq.diagnosis.view import StoreView
from librmq.errors import (
    CorruptionError,
    FlushFailedError,
    NotAStoreError,
    ReadOnlyError,
    RmqError,
    StoreFullError,
    StoreIOError,
)
from librmq.message.topics import TopicType
from librmq.store.engine import _append_page as append_page
from librmq.store.engine._append_page import AppendPage
from librmq.store.peer_appends import PeerAppender
from librmq.wire._peer_sends import appends_path
from librmq.wire._unix_sockets import (
    connect_to,
    host_of_process,
    is_stopped,
    network_file_system,
    owner_socket,
    process_of_host,
    share_folder,
)
from librmq.wire.remote._connection import Connection, EndedTogether, GiveUp
from librmq.wire.remoting._frames import Frame, FrameSocket, encode
from librmq.wire.remoting._headers import RequestCode
from librmq.wire.remoting._request_codec import frame_of
from librmq.wire.share import SharedBroker
from librmq.wire.share_links import StoreOwner, StorePeer, connect_to_owner
from tests import lock_order
from tests.interrupting import at_each_call
from tests.programs import Fork, Process, environment, in_child, start_program
from tests.stores import LISTS_DESCRIPTORS, no_descriptor_left
from tests.wire import share_worker
from tests.wire.stub import wait_until

pytestmark = pytest.mark.skipif("sys.platform == 'win32'", reason="no Unix domain sockets with credentials")
CLOCK = SystemClock()


class Worker(Fork):
    """A process of `share_worker`, and what it has printed."""

    def __init__(self, scene: Scene, name: str, **options: Any) -> None:
        super().__init__(share_worker.work, scene.store, name, options)
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        self.name = name
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        self.scene = scene

    def _read(self) -> None:
        for line in self.stdout:
            self.lines.append(line.rstrip())

    @property
    def sends(self) -> list[tuple[str, float]]:
        """Outcome and seconds of each send."""
        return [(words[0], float(words[1])) for line in list(self.lines) if (words := line.split())[0] != "ready"]

    def wait_ready(self) -> Worker:
        wait_until(lambda: bool(self.lines) or not self.process.is_alive(), f"{self.name} is ready")
        assert self.lines, f"{self.name} has failed"
        return self

    def wait_sends(self, more: int) -> None:
        count = len(self.sends) + more
        wait_until(lambda: len(self.sends) >= count, f"{self.name} sends")

    def leave(self) -> None:
        """Let it shut down; its messages are the others'."""
        del self.scene.workers[self.name]
        self.end()
        assert self.process.exitcode == 0

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Stop it, and wait until it stands."""
        self.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(self.pid), f"{self.name} is stopped")

    def wait_until_killed(self) -> None:
        self.process.join(60)
        assert self.process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        """End its input, and wait until it has shut down."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        self._thread.join()
        self.stdout.close()
        self.process.join()


class Scene:
    """The processes of one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.workers: dict[str, Worker] = {}
        self._count = 0

    def start(self, **options: Any) -> Worker:
        self._count += 1
        worker = Worker(self, f"p{self._count}", **options)
        self.workers[worker.name] = worker
        return worker

    def refused(self) -> list[str]:
        """Return what the processes say of sends that were refused."""
        return [line for worker in self.workers.values() for line in worker.lines if line.startswith("refused")]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    try:
        yield made
    finally:
        for worker in list(made.workers.values()):
            worker.send_signal(signal.SIGCONT)
            worker.process.kill()
            worker.end()


@pytest.mark.slow
def test_a_stopped_owner_keeps_the_store(scene: Scene) -> None:
    owner = scene.start().wait_ready()
    peer = scene.start(rate=20, producer={"timeout": 1}, share={"timeout": 1}).wait_ready()
    stopped = f"process {owner.pid}, which owns the store, is stopped"
    for number in range(2):
        peer.wait_sends(5)
        owner.stop()
        before = len(scene.refused())
        wait_until(lambda: len(scene.refused()) > before, "a send is refused")  # noqa: B023 (called at once)
        for refused in scene.refused()[before:]:
            assert stopped in refused
            assert float(refused.split()[1]) > 0.9
        if not number:
            with pytest.raises(BrokerUnreachableError, match=stopped):
                librmq.share(scene.store, timeout=0.2, wait=0.5)
        assert is_stopped(owner.pid)
        owner.send_signal(signal.SIGCONT)
        wait_until(lambda: peer.sends[-1][0] == "sent", "a send is stored again")


def progress_in_folder(scene: Scene) -> dict[int, int]:
    with StoreView.open(scene.store) as view:
        return dict(view.progress.get(("billing", "orders"), {}))


@pytest.mark.slow
def test_clients_end_beside_a_stopped_owner(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The first request that has no answer takes its time; those for each queue and client take none.

    What was consumed is on the page of groups already.
    """
    owner, heard, queues = scene.start().wait_ready(), list[DeliveredMessage](), 8
    with librmq.share(scene.store, timeout=4) as shared:
        shared.create_topic("orders", queues)
        consumer = PushConsumer(shared, "billing", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", heard.append)
        with consumer, Producer(shared, "shop") as producer:
            for queue in range(queues):
                producer.send("orders", b"a coat", queue=queue)
            wait_until(lambda: len(heard) == queues, "the messages are heard")
            wait_until(lambda: progress_in_folder(scene) == dict.fromkeys(range(queues), 1), "they are consumed")
            owner.stop()
            begin = CLOCK.monotonic()
    assert CLOCK.monotonic() - begin < 2 * queues
    assert "ends although not all of its progress is stored" not in caplog.text
    with librmq.share(scene.store, take_over_stopped=0) as heir:
        assert (heir.is_owner, heir.lag("billing")) == (True, 0)


@pytest.mark.slow
def test_a_stopped_owner_that_many_wait_for(scene: Scene) -> None:
    """Its queue of new connections is full, so that a connection can't say who it is."""
    owner = scene.start().wait_ready()
    owner.stop()
    with ExitStack() as waiting:
        with suppress(BlockingIOError):
            while True:
                connected = waiting.enter_context(socket.socket(socket.AF_UNIX))
                connected.setblocking(False)
                connected.connect(owner_socket(scene.store))
        stopped = f"process {owner.pid}, which owns the store, is stopped"
        choices: tuple[dict[str, Any], ...] = ({}, {"take_over_stopped": 60})
        for settings in choices:
            with pytest.raises(BrokerUnreachableError, match=stopped):
                librmq.share(scene.store, timeout=0.1, wait=0.1, **settings)
        with librmq.share(scene.store, take_over_stopped=0) as heir:
            assert heir.is_owner


@pytest.mark.slow
@pytest.mark.parametrize("most_s", [0.2, 3600])
def test_an_idle_peer_ends_an_owner_that_is_stopped_for_too_long(scene: Scene, most_s: float) -> None:
    owner = scene.start().wait_ready()
    with librmq.share(scene.store, take_over_stopped=most_s, timeout=1) as peer:
        owner.stop() if most_s > 1 else owner.send_signal(signal.SIGSTOP)
        if most_s < 1:
            wait_until(lambda: peer.is_owner, "the peer takes over")
            owner.wait_until_killed()
            return
        with pytest.raises(BrokerUnreachableError, match="is stopped"):
            peer.create_topic("orders", 2)
        assert is_stopped(owner.pid)
        assert not peer.is_owner
        owner.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_who_joins_a_stopped_owner_does_not_wait_for_its_answer(scene: Scene) -> None:
    """A peer that lost the last owner joins the next one, which can be stopped before it has answered."""
    owner = scene.start().wait_ready()
    owner.stop()
    with librmq.share(scene.store, timeout=3600, wait=60, take_over_stopped=0.2) as heir:
        assert heir.is_owner
    owner.wait_until_killed()


@pytest.mark.slow
def test_an_owner_that_is_stopped_before_it_listens_is_ended_too(scene: Scene) -> None:
    scene.start().wait_ready().leave()
    lock = os.path.join(share_folder(scene.store), "lock")
    words = "import signal as s, sys, threading; from librmq.files._disk import DiskFiles"
    stopping = f"{words}; lock = DiskFiles().lock(sys.argv[1]); s.pthread_kill(threading.get_ident(), s.SIGSTOP)"
    owner: Process[str] = Process([sys.executable, "-P", "-c", stopping, lock], env=environment())
    wait_until(lambda: is_stopped(owner.pid), "the owner is stopped")
    with pytest.raises(BrokerUnreachableError, match=f"process {owner.pid}, which owns the store, is stopped"):
        librmq.share(scene.store, timeout=0.1, wait=0.1)
    with librmq.share(scene.store, wait=60, take_over_stopped=0.2) as heir:
        assert heir.is_owner
    assert owner.wait(60) == -signal.SIGKILL


# ---- in this process: it is an owner and a peer


@pytest.mark.slow
def test_a_take_over_is_logged_in_the_words_of_a_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[DeliveredMessage] = []
    with caplog.at_level("INFO"), pair(tmp_path) as (owner, peer), Producer(peer, "shop") as producer:
        consumer = PushConsumer(peer, "billing", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", heard.append)
        with consumer:
            producer.send("orders", b"a coat")
            wait_until(lambda: len(heard) == 1, "it is consumed")
            owner.close()
            wait_until(lambda: peer.is_owner, "the peer takes over")
            producer.send("orders", b"another coat")
            wait_until(lambda: len(heard) == 2, "the next one is consumed")
    assert caplog.text.count(f"process {os.getpid()} owns the store") == 3  # the owner, the peer, and it again
    assert "name server" not in caplog.text
    assert "127.0.0.1:" not in caplog.text


@contextmanager
def pair(folder: Path, **settings: Any) -> Iterator[tuple[SharedBroker, SharedBroker]]:
    """Share a store twice; the first one owns it."""
    with librmq.share(folder / "store", **settings) as owner, librmq.share(folder / "store", **settings) as peer:
        assert (owner.is_owner, peer.is_owner, peer.owner) == (True, False, os.getpid())
        yield owner, peer


def test_clients_of_all_kinds_at_a_peer(tmp_path: Path) -> None:
    with pair(tmp_path, config=BrokerConfig(timers=TimerConfig())) as (owner, peer):
        peer.create_topic("orders", 2)
        with Producer(peer, "shop") as producer, Producer(owner, "shop") as own_producer:
            for number in range(4):
                producer.send("orders", b"%d" % number, keys=f"k{number}", tags="paid")
                own_producer.send("orders", b"own %d" % number)
            producer.send("orders", b"later", delay=0.05)
            producer.send_batch([Message("orders", b"a"), Message("orders", b"b")])
        got: list[bytes] = []
        with PullConsumer(peer, "audit", consume_from=ConsumeFrom.FIRST) as consumer:
            consumer.subscribe("orders")
            while len(got) < 11:
                got += [message.body for message in consumer.poll(10)]
        assert sorted(got) == sorted(
            [b"%d" % n for n in range(4)] + [b"own %d" % n for n in range(4)] + [b"later", b"a", b"b"]
        )
        heard: list[bytes] = []
        is_down = [True]
        consumer_push = PushConsumer(peer, "billing", consume_from=ConsumeFrom.FIRST)

        @consumer_push.subscribe("orders", sql="TAGS = 'paid'")
        def charge(message: DeliveredMessage) -> None:
            if is_down and message.keys == ("k0",):
                is_down.clear()
                raise DownstreamDown(seconds=0.05)
            heard.append(message.body)

        with consumer_push:
            wait_until(lambda: len(heard) == 4, "messages are heard")
        with TransactionProducer(peer, "bank", lambda message: TransactionState.UNKNOWN) as bank:
            bank.send_in_transaction(
                Message("orders", b"committed"), execute=lambda message, arg: TransactionState.COMMIT
            )
        assert b"committed" in [message.body for message in peer.messages("orders")]


def test_a_relative_path_where_the_working_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StoreIOError, match="find the working directory"):
        librmq.share("store")


def test_a_peer_knows_the_topics_that_it_has_changed(tmp_path: Path) -> None:
    with pair(tmp_path) as (_, peer):
        for queues in (2, 5):
            peer.create_topic("orders", queues)
            assert [data.read_queues for data in peer.topic_route("orders")] == [queues]
        peer.delete_topic("orders")
        assert peer.known_route("orders") == ()


def test_a_peer_sends_no_letter_again_that_a_killed_process_has_not_noted(tmp_path: Path) -> None:
    def refuse(message: DeliveredMessage) -> None:
        raise DeadLetter

    with pair(tmp_path) as (owner, peer):
        owner.create_topic("orders", 1)
        consumer = PushConsumer(owner, "billing", consume_from=ConsumeFrom.FIRST)
        consumer.subscribe("orders", refuse)
        with consumer, Producer(owner, "shop") as producer:
            producer.send("orders", b"x")
            wait_until(lambda: len(peer.dead_letters("billing")) == 1, "the message is a dead letter")
        assert peer.resend_dead_letters("billing") == 1
        (tmp_path / "store/librmq/resent.json").unlink()  # as if SIGKILL had come before the note
        assert peer.resend_dead_letters("billing") == 0


def test_receives_at_a_peer(tmp_path: Path) -> None:
    with (
        pair(tmp_path) as (owner, peer),
        Producer(owner, "shop") as producer,
        SimpleConsumer(peer, "mailer") as consumer,
    ):
        consumer.subscribe("orders")
        assert consumer.receive(wait=0) == []
        threading.Timer(0.05, lambda: producer.send("orders", b"one")).start()
        (first,) = consumer.receive(wait=30)
        consumer.extend(first, 0)
        (again,) = consumer.receive(wait=30)
        assert (again.body, again.attempt) == (b"one", 2)
        with pytest.raises(ReceiptError):
            consumer.ack(first)
        with pytest.raises(ReceiptError, match="no longer in flight"):
            consumer.extend(first, 5)
        consumer.dead_letter(again, "broken")
        assert [letter.body for letter in peer.dead_letters("mailer")] == [b"one"]
        producer.send("orders", b"two")
        consumer.ack(*consumer.receive(wait=30))
        producer.send("orders", b"three")
        (late,) = consumer.receive(wait=30, invisible=0.001)
        (third,) = consumer.receive(wait=30)
        with pytest.raises(ReceiptError, match="no longer in flight"):
            consumer.ack_one_way(late)
        assert peer.lag("mailer") == 1
        consumer.ack_one_way(third)
        assert peer.lag("mailer") == 0, "the question follows the acknowledgement"
        for number in range(3):
            producer.send("orders", b"%d" % number)
        messages: list[ReceivedMessage] = []
        while len(messages) < 3:
            messages += consumer.receive_or_notify("orders", 1, lambda: None, acknowledge=messages)
        assert peer.lag("mailer") == 1
        peer.delete_topic("orders")
        with pytest.raises(RmqError):
            consumer.receive_or_notify("orders", 1, lambda: None, acknowledge=messages)
        (state,) = owner_clients(owner)
        assert state.consumer_groups == ("mailer",)


def owner_clients(shared: SharedBroker) -> list[Any]:
    broker = cast("StoreOwner", shared.link).route
    return [client for client in broker.clients() if client.consumer_groups]


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", ["drain", "close"])
def test_a_second_close_completes_one_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    owner = librmq.share(tmp_path / "store")
    link = owner.link
    assert isinstance(link, StoreOwner)

    def press_ctrl_c() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    place = link.server if interrupted == "drain" else link.route
    monkeypatch.setattr(place, interrupted, press_ctrl_c, raising=True)
    with pytest.raises(KeyboardInterrupt):
        owner.close()
    with pytest.raises(StoreLockedError):
        Broker.open(tmp_path / "store")
    owner.close()
    Broker.open(tmp_path / "store").close()


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")
def test_a_share_stays_open_while_a_peer_is_stopped_within_an_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another close completes it, and until then no other process owns the store."""
    owner = librmq.share(tmp_path)
    assert isinstance(owner.link, StoreOwner)
    with librmq.share(tmp_path) as peer, Producer(peer, "shop") as producer:
        page = AppendPage.open(appends_path(str(tmp_path)))
        assert page is not None
        while page.numbers[append_page.STATE] != append_page.OPEN:
            producer.send("orders", b"x")
        monkeypatch.setattr(owner.link.route.store.appender.shared, "wait_s", 0.01)
        page.take(20)
        with pytest.raises(BrokerUnreachableError, match="has written to the log for"):
            owner.close()
        with pytest.raises(BrokerUnreachableError, match="locked by this process"):
            librmq.share(tmp_path, timeout=0.05, wait=0)
        page.release()
        page.close()
        owner.close()
        producer.send("orders", b"y")


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")
def test_a_send_bears_another_one_that_waits_for_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        librmq.share(tmp_path, BrokerConfig(longest_wait_s=0)) as owner,
        librmq.share(tmp_path) as peer,
        Producer(owner, "shop") as producer,
        Producer(peer, "shop") as of_peer,
    ):
        assert isinstance(owner.link, StoreOwner)
        lock = owner.link.route.store.appender.lock
        page = AppendPage.open(appends_path(str(tmp_path)))
        assert page is not None
        while page.numbers[append_page.STATE] != append_page.OPEN:
            with suppress(BrokerBusyError):  # at the moment at which the owner lets peers append
                of_peer.send("orders", b"x")
        page.take(20)
        first = threading.Thread(target=producer.send, args=("orders", b"first"))
        first.start()
        wait_until(lock.is_writing)
        wait = lock.is_free_within

        def end_write_of_peer(seconds: float) -> bool:
            page.release()
            return wait(seconds)

        monkeypatch.setattr(lock, "is_free_within", end_write_of_peer)
        assert producer.send("orders", b"second").status is SendStatus.SEND_OK
        first.join()
        page.close()


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")
@pytest.mark.parametrize("call", ["os.posix_fallocate", "fcntl.flock"])
def test_a_folder_that_takes_no_page_is_shared_by_the_owner_alone(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real: Callable[..., object] = getattr(append_page, call.partition(".")[0]).__dict__[call.partition(".")[2]]

    def refuse(descriptor: int, *words: int) -> object:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("appends.new"):
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real(descriptor, *words)

    monkeypatch.setattr(call, refuse)
    with librmq.share(tmp_path) as owner, librmq.share(tmp_path) as peer, Producer(peer, "shop") as producer:
        producer.send("orders", b"x")
        assert [message.body for message in owner.messages("orders")] == [b"x"]
        assert not os.path.exists(appends_path(str(tmp_path)))
    assert "peers of the share send by its owner" in caplog.text


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")
def test_a_peer_waits_for_the_flush_that_the_store_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, int]] = []
    reach = PeerAppender.reach

    def noted(appender: PeerAppender, end: int, wait_s: float) -> bool:
        is_flushed = reach(appender, end, wait_s)
        flushed.append((end, store.appender.flushed))
        return is_flushed

    with librmq.share(tmp_path, store_config=StoreConfig(durability="sync")) as owner:
        assert isinstance(owner.link, StoreOwner)
        store = owner.link.route.store
        monkeypatch.setattr(PeerAppender, "reach", noted)
        with librmq.share(tmp_path) as peer, Producer(peer, "shop") as producer:
            while len(flushed) < 3:
                assert producer.send("orders", b"x").status is SendStatus.SEND_OK
    assert all(device >= end for end, device in flushed)


@LISTS_DESCRIPTORS
def test_a_closed_share_leaves_no_descriptor_open(tmp_path: Path) -> None:
    librmq.share(tmp_path).close()
    with no_descriptor_left():
        librmq.share(tmp_path).close()


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")
def test_a_close_that_is_interrupted_behind_its_page_ends_when_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmap = AppendPage.unmap

    def interrupt(page: AppendPage) -> None:
        unmap(page)
        monkeypatch.undo()
        raise KeyboardInterrupt

    share = librmq.share(tmp_path)
    monkeypatch.setattr(AppendPage, "unmap", interrupt)
    with pytest.raises(KeyboardInterrupt):
        share.close()
    share.close()
    assert not os.path.exists(appends_path(str(tmp_path)))


def test_a_second_close_leaves_the_next_owner_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a Ctrl-C that came once the store was released."""
    first = librmq.share(tmp_path / "store")
    link = first.link
    assert isinstance(link, StoreOwner)
    release = link._lock.release

    def press_ctrl_c() -> None:
        monkeypatch.undo()
        release()
        raise KeyboardInterrupt

    monkeypatch.setattr(link._lock, "release", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        first.close()
    with librmq.share(tmp_path / "store") as second:
        assert isinstance(second.link, StoreOwner)
        first.close()
        with librmq.share(tmp_path / "store") as third:
            assert isinstance(third.link, StorePeer)


@pytest.mark.parametrize("role", ["owner", "peer"])
def test_a_signal_handler_closes_a_share_within_its_call(tmp_path: Path, role: str) -> None:
    """At each of some calls of a send."""
    with librmq.share(tmp_path / "store") as owner:
        owner.create_topic("orders", 1)
        if role == "owner":
            owner.close()
        for number in range(0, 400, 9):
            shared = librmq.share(tmp_path / "store")
            producer = Producer(shared, "shop")

            def close(signal_number: int, frame: object, shared: SharedBroker = shared) -> None:
                shared.close()
                raise KeyboardInterrupt

            before = signal.signal(signal.SIGUSR1, close)
            try:
                next(at_each_call(lambda: producer.send("orders", b"x"), signal.SIGUSR1, first=number))  # noqa: B023
            finally:
                signal.signal(signal.SIGUSR1, before)
            shared.close()
            with pytest.raises(BrokerUnreachableError):
                shared.call(protocol.QueryOffset("g", "orders", 0))


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")
def test_a_signal_handler_closes_a_share_within_an_append_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, is_sent = AppendPage.commit, threading.Event()

    def commit_and_signal(page: AppendPage, *words: int) -> None:
        commit(page, *words)
        is_sent.set()
        signal.raise_signal(signal.SIGUSR1)

    with librmq.share(tmp_path / "store") as owner, librmq.share(tmp_path / "store") as peer:
        owner.create_topic("orders", 1)
        before = signal.signal(signal.SIGUSR1, lambda number, frame: peer.close())
        monkeypatch.setattr(AppendPage, "commit", commit_and_signal)
        try:
            with Producer(peer, "shop") as producer:
                while not is_sent.is_set():
                    assert producer.send("orders", b"x").status is SendStatus.SEND_OK
                with pytest.raises(BrokerUnreachableError, match="was closed"):
                    producer.send("orders", b"late")
        finally:
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")
def test_what_a_signal_interrupts_at_the_owner_is_not_overtaken(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner, which stores batches, is stopped when the signal comes; the peer's own appends go on meanwhile."""
    owner, has_ended, is_batch = scene.start().wait_ready(), threading.Event(), threading.Event()
    write, thread, asked = FrameSocket.write, threading.get_ident(), list[bytes]()

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def resume() -> None:
        has_ended.wait(1)
        owner.send_signal(signal.SIGCONT)

    def write_and_signal(stream: FrameSocket, data: bytes) -> None:
        write(stream, data)
        if threading.get_ident() == thread:
            asked.append(data)
            if is_stopped(owner.pid) and is_batch.is_set():
                resuming.start()
                signal.raise_signal(signal.SIGUSR1)
            else:
                owner.send_signal(signal.SIGCONT)

    with librmq.share(scene.store, timeout=300) as shared, Producer(shared, "shop", timeout=300) as producer:
        shared.create_topic("orders", 1)
        monkeypatch.setattr(FrameSocket, "write", write_and_signal)
        before = signal.signal(signal.SIGUSR1, interrupt)
        resuming = threading.Thread(target=resume)
        try:
            seen = -1
            while len(asked) > seen:  # until a send needs no owner, who shuts peers out when they have been quiet
                seen = len(asked)
                producer.send("orders", b"0")
                owner.stop()
                producer.send("orders", b"0")
            producer.send("orders", b"1")
            is_batch.set()
            with pytest.raises(KeyboardInterrupt):
                producer.send_batch([Message("orders", b"2"), Message("orders", b"3")])
        finally:
            signal.signal(signal.SIGUSR1, before)
        producer.send("orders", b"4")
        has_ended.set()
        resuming.join()
        producer.send_batch([Message("orders", b"5"), Message("orders", b"6")])
        stored = [message.body for message in shared.messages("orders")]
    assert stored == sorted(stored)
    assert stored[-7:] == [b"0", *(b"%d" % number for number in range(1, 7))]


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")
def test_a_one_way_message_is_stored_before_the_next_one_of_its_peer(tmp_path: Path) -> None:
    """Whether the owner stores it, as after each change of a topic, or the peer."""
    with librmq.share(tmp_path) as owner, librmq.share(tmp_path) as peer, Producer(peer, "shop") as producer:
        for topic in map("orders-{}".format, range(8)):
            owner.create_topic(topic, 1)
            for body in (b"1", b"2", b"3"):
                producer.send_oneway(topic, body)
                assert [message.body for message in owner.messages(topic)][-1:] == [body]


@pytest.mark.slow
def test_the_last_one_hands_over_to_none(tmp_path: Path) -> None:
    with librmq.share(tmp_path / "store") as first:
        with Producer(first, "shop") as producer:
            producer.send("orders", b"kept")
        assert repr(first).endswith(f"/store', owner: {os.getpid()}>")
        folder = Path(share_folder(tmp_path / "store"))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(os.stat(owner_socket(tmp_path / "store")).st_mode) == 0o600
    assert sorted(entry.name for entry in folder.iterdir()) == ["lock"]
    assert repr(first).endswith("closed>")
    with pytest.raises(BrokerUnreachableError, match="closed; make another"):
        first.call(protocol.QueryOffset("g", "orders", 0))
    with Broker.open(tmp_path / "store") as broker:
        assert [message.body for message in broker.messages("orders")] == [b"kept"]
        with pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
            librmq.share(tmp_path / "store")


def test_a_store_that_is_released_a_moment_later_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a process that ends goes after its connections."""
    holder, open_broker = Broker.open(tmp_path / "store"), Broker.open

    def open_once_released(*place: Any, **settings: Any) -> Broker:
        try:
            return open_broker(*place, **settings)
        except StoreLockedError:
            holder.close()
            raise

    monkeypatch.setattr("librmq.wire.share._RELEASED_S", 30.0)
    monkeypatch.setattr(Broker, "open", open_once_released)
    with librmq.share(tmp_path / "store") as shared:
        assert shared.is_owner


def test_a_command_reaches_the_owner(tmp_path: Path) -> None:
    with pytest.raises(BrokerUnreachableError, match="can't be reached"):
        connect_to_owner(tmp_path / "store")
    with librmq.share(tmp_path / "store") as shared, connect_to_owner(tmp_path / "store") as route:
        route.create_topic("orders", 3)
        assert shared.topic_route("orders")[0].read_queues == 3


def test_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    deep = tmp_path / ("d" * 100)
    for _ in range(2):  # the second time after an owner that was killed
        with pair(deep) as (_, peer):
            place = Path(owner_socket(deep / "store"))
            assert len(bytes(place)) < 100 < len(bytes(deep))
            with Producer(peer, "shop") as producer:
                producer.send("orders", b"x")
        assert not place.exists()
        assert not place.parent.exists()


@pytest.mark.parametrize("part", ["librmq", "librmq/share"])
def test_a_shared_folder_that_leads_elsewhere_is_refused(tmp_path: Path, part: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "share").mkdir(parents=True)
    elsewhere.chmod(0o755)
    (tmp_path / "store" / part).parent.mkdir(parents=True)
    (tmp_path / "store" / part).symlink_to(elsewhere)
    with pytest.raises(RmqError, match="follow_links=True" if part == "librmq" else "a symbolic link"):
        librmq.share(tmp_path / "store")
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
    assert list((elsewhere / "share").iterdir()) == []
    if part == "librmq":
        librmq.share(tmp_path / "store", follow_links=True).close()
        return
    for follow_links in (False, True):  # no advice that would not help
        with pytest.raises(RmqError, match="librmq follows none below its own folder"):
            librmq.share(tmp_path / "store", follow_links=follow_links)


def test_the_place_of_a_folder_from_elsewhere_harms_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the target of a link ``place.new``, nor the file that ``place`` names, is changed."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    store = tmp_path / ("long" * 40)
    folder = Path(share_folder(store))
    folder.mkdir(parents=True)
    victims = [tmp_path / "bashrc", tmp_path / "librmq-mine" / "owner", tmp_path / "place"]
    victims[1].parent.mkdir()
    for victim in victims:
        victim.write_text("mine")
    status = store.stat()
    for victim in victims:
        for name in ("place.new", "place.tmp"):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(victim)
        (folder / "place").write_text(f"{status.st_dev}:{status.st_ino} {victim}")
        with pytest.raises(CorruptionError, match="a symbolic link"):
            librmq.share(store)
        for name in ("place.new", "place.tmp"):
            (folder / name).unlink()
        librmq.share(store).close()
        assert [mine.read_text() for mine in victims] == ["mine"] * 3


def test_a_copy_has_an_owner_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    deep = tmp_path / ("d" * 100)
    with librmq.share(deep / "store") as shared, Producer(shared, "shop") as producer:
        producer.send("orders", b"x")
        shutil.copytree(deep / "store", deep / "copy")
        with librmq.share(deep / "copy") as copy, Producer(copy, "shop") as other:
            assert copy.is_owner
            other.send("orders", b"y")
        assert [message.body for message in shared.messages("orders")] == [b"x"]
        producer.send("orders", b"z")  # its place is still there
        with librmq.share(deep / "store") as peer:
            assert not peer.is_owner


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"config": StoreConfig()}, ConfigError, "expected store_config="),
        ({"store_config": BrokerConfig()}, (ConfigError, TypeError), "store_config"),
        ({"name": "\n"}, ConfigError, "name"),
        ({"timeout": 0}, ConfigError, "timeout"),
        ({"take_over_stopped": -1}, ConfigError, "take_over_stopped"),
        ({"path": 3}, (ConfigError, TypeError), "path"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: dict[str, Any], error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        librmq.share(**{"path": tmp_path / "store", **settings})
    assert list(tmp_path.iterdir()) == []


def test_wrong_places_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(NotAStoreError):
            librmq.share(path)
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    lines = {"nfs4": "nfs4 server:/data rw", "ext4": "ext4 /dev/sda1 rw", "fuse.sshfs": "fuse.sshfs host: rw"}
    for kind, line in lines.items():
        mounts.write_text(f"36 35 {os.major(device)}:{os.minor(device)} / /data rw shared:1 - {line}\n")
        wanted = None if kind == "ext4" else kind
        assert network_file_system(str(tmp_path / "not" / "yet"), str(mounts)) == wanted
    monkeypatch.setattr("librmq.wire.share.network_file_system", lambda path: "nfs4")
    with pytest.raises(ConfigError, match="network file system nfs4"):
        librmq.share(tmp_path / "store")
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="take_over_stopped: only Linux"):
        librmq.share(tmp_path / "store", take_over_stopped=1)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="not for Windows yet"):
        librmq.share(tmp_path / "store")
    monkeypatch.undo()
    assert not (tmp_path / "store").exists()


def _send(message: Message, queue_id: int = 0) -> protocol.SendMessage:
    return protocol.SendMessage("shop", message, queue_id, CLOCK.now_ms(), ("127.0.0.1", 0))


def full(error: Exception) -> Callable[[SharedBroker], object]:
    """Return a send to a store that refuses it."""

    def send(shared: SharedBroker) -> object:
        def refuse(*_: object, **__: object) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("librmq.store.MessageStore.append", refuse)
            return shared.call(_send(Message("orders", b"x")))

    return send


REFUSALS: dict[str, Callable[[SharedBroker], object]] = {
    "the broker's own topic": lambda shared: shared.call(_send(Message("SCHEDULE_TOPIC_XXXX", b"x"))),
    "too large": lambda shared: shared.call(_send(Message("orders", bytes(5 << 20)))),
    "no queue of a timer": lambda shared: shared.call(_send(Message("orders", b"x", delay=9e9))),
    "a delayed batch": lambda shared: shared.call(
        protocol.SendBatch("shop", (Message("orders", b"x", delay_level=3),), 0, CLOCK.now_ms(), ("127.0.0.1", 0))
    ),
    "no such topic": lambda shared: shared.call(_send(Message("absent", b"x"))),
    "no permission": lambda shared: shared.call(protocol.PullMessage("c", "billing", "secret", 0, 0, 32, None)),
    "a full disk": full(DiskFullError("full")),
    "a full store": full(StoreFullError("full")),
    "a failed flush": full(FlushFailedError(OSError(5, "Input/output error"))),
    "read-only": full(ReadOnlyError("a replica")),
    "a topic's name": lambda shared: shared.create_topic("no!"),
    "a topic's type": lambda shared: shared.create_topic("orders", message_type=cast("Any", "SOUND")),
    "a topic's queues": lambda shared: shared.create_topic("orders", 1 << 20),
    "no topic to delete": lambda shared: shared.delete_topic("absent"),
    "the broker's own to delete": lambda shared: shared.delete_topic("SCHEDULE_TOPIC_XXXX"),
    "no group to delete": lambda shared: shared.delete_group("absent"),
    "a group's name": lambda shared: shared.call(protocol.SetGroup("no!", {})),
    "a group's setting": lambda shared: shared.call(protocol.SetGroup("billing", {"retryMaxTimes": "many"})),
    "no progress": lambda shared: shared.call(protocol.ResetGroup("billing", "orders", -1)),
    "no half": lambda shared: shared.call(protocol.EndTransaction("shop", TransactionState.COMMIT, 0, 1 << 40, "x")),
    "no message": lambda shared: shared.call(protocol.SendBack("billing", 1 << 40, 0)),
    "a receipt": lambda shared: shared.call(protocol.ChangeInvisible("billing", "orders", "rubbish", 1000)),
    "no subscription": lambda shared: shared.call(protocol.PullMessage("c", "billing", "orders", 0, 0, 32, None)),
    "no topic to read": lambda shared: shared.call(protocol.PullMessage("c", "billing", "absent", 0, 0, 32, None)),
}


def test_errors_are_those_of_the_owner(tmp_path: Path) -> None:
    """What catches an error of the owner's own request catches it in every process, with the same code and text."""
    config = BrokerConfig(auto_create_topic=False, timers=TimerConfig())
    with pair(tmp_path, config=config) as shared:
        shared[0].create_topic("orders", 2)
        shared[0].create_topic("secret", 2, permission=protocol.PERM_WRITE)
        for what, refused in REFUSALS.items():
            errors: list[Any] = []
            for broker in shared:
                try:
                    refused(broker)
                    errors.append(None)
                except RmqError as error:
                    errors.append(error)
            own, other = errors
            assert own is not None, what
            assert isinstance(other, type(own)), (what, own, other)
            assert (str(other), getattr(other, "code", 0)) == (str(own), getattr(own, "code", 0)), what
        types: tuple[TopicType, ...] = ("FIFO", "DELAY")
        for topic_type, broker in zip(types, shared, strict=True):
            broker.create_topic("typed", 1, message_type=topic_type)
            assert shared[0].topic_route("typed")[0].message_type == topic_type


@pytest.mark.slow
def test_a_hostile_peer_stops_no_other(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, peer), Producer(peer, "shop") as producer, ExitStack() as hostile:
        server = cast("StoreOwner", owner.link).server
        for junk in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00", b"\x7f\xff\xff\xff" + bytes(1000), b""):
            connected = hostile.enter_context(connect_to(owner_socket(peer.path), 5))
            connected.sendall(junk)
        for _ in range(20):  # a peer that reads no answers
            connected = hostile.enter_context(connect_to(owner_socket(peer.path), 5))
            connected.setblocking(False)
            with suppress(BlockingIOError, BrokenPipeError):
                while True:
                    connected.send(encode(frame_of(RequestCode.GET_ALL_TOPIC_CONFIG)) * 100)
        for number in range(100):
            producer.send("orders", b"%d" % number)
        assert server.refused == 2


def test_the_store_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    for make in (lambda: Broker.open(tmp_path / "broker"), lambda: librmq.share(tmp_path / "share")):
        make().close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    for name, part in (("broker", "commitlog"), ("share", "librmq/share")):
        with pytest.raises(ConfigError, match=rf"{part} belongs to user .*{user}.*, and this process to 12345: only"):
            librmq.share(tmp_path / name)


def test_a_store_whose_own_folder_is_closed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = os.stat

    def refused(path: Any, **settings: Any) -> os.stat_result:
        if str(path).endswith("share"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return look(path, **settings)

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(StoreIOError, match="librmq/share: look at: Permission denied"):
        librmq.share(tmp_path / "store")


def test_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with librmq.share(tmp_path / "store"):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(BrokerUnreachableError, match=r"belongs to user .*: expected one's own"):
            connect_to(owner_socket(tmp_path / "store"), 5)
        with socket.socket(socket.AF_UNIX) as connected:
            connected.connect(owner_socket(tmp_path / "store"))
            assert connected.recv(1) == b""


def test_shared_without_blocking_the_event_loop(tmp_path: Path) -> None:
    async def run() -> bytes:
        async with await librmq.share_async(tmp_path / "store") as owner:
            async with await librmq.share_async(tmp_path / "store") as peer, Producer(peer, "shop") as producer:
                await producer.send_async("orders", b"x")
            return next(owner.messages("orders")).body

    assert asyncio.run(run()) == b"x"


def test_a_failed_async_send_notes_a_stopped_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another send does, so that later calls under the runner's lock do not wait for it."""

    def time_out(_: object, requests: Sequence[tuple[Frame, Any]], ended: EndedTogether[Any]) -> GiveUp:
        ended([(key, BrokerUnreachableError("it has not answered")) for _, key in requests])
        return lambda *_: None

    with pair(tmp_path) as (_, peer), Producer(peer, "shop") as producer:
        peer.create_topic("orders", 1)
        producer.send("orders", b"first")
        monkeypatch.setattr("librmq.wire.share_links.is_stopped", lambda process: True)
        monkeypatch.setattr(Connection, "send_later", time_out)
        assert not cast("StorePeer", peer.link).is_silent
        asyncio.run(producer.send_async("orders", b"x", delay_level=1))  # by the owner
        assert cast("StorePeer", peer.link).is_silent


def test_a_send_that_the_end_of_the_owner_overtakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection ends before the request is written, so the next owner gets it, though the send has one try."""
    write = FrameSocket.write
    with pair(tmp_path) as (owner, peer), Producer(peer, "shop") as producer:
        peer.create_topic("orders", 1)
        (queue,) = producer.queues("orders")
        link = cast("StorePeer", peer.link)

        def write_late(stream: FrameSocket, data: bytes | bytearray) -> None:
            if b"overtaken" in data:
                monkeypatch.undo()
                owner.close()
                assert link.has_ended.wait(30)
                wait_until(lambda: stream._is_shut, "the connection has ended")
            write(stream, data)

        monkeypatch.setattr(FrameSocket, "write", write_late)
        producer.send("orders", b"overtaken", queue=queue, timeout=30)
        assert [message.body for message in peer.messages("orders")] == [b"overtaken"]


@pytest.mark.parametrize("way", ["queue", "selector", "batch"])
def test_a_send_to_one_queue_whose_answer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The owner ends after it has stored the message: the next one gets it again, in the same queue."""
    with pair(tmp_path) as (owner, peer), Producer(peer, "shop") as producer:
        peer.create_topic("orders", 4)
        queue = producer.queues("orders")[2]
        link, read = cast("StorePeer", peer.link), Connection.request

        def lose(connection: Connection, frame: Frame, timeout_s: float) -> Frame:
            answer = read(connection, frame, timeout_s)
            if b"lost" in bytes(frame.body):
                monkeypatch.undo()
                owner.close()
                assert link.has_ended.wait(30)
                raise BrokerUnreachableError("the connection has ended")
            return answer

        monkeypatch.setattr(Connection, "request", lose)
        if way == "queue":
            result = producer.send("orders", b"lost", queue=queue, timeout=30)
        elif way == "selector":
            result = producer.send("orders", b"lost", selector=lambda queues, message, arg: queues[2], timeout=30)
        else:
            result = producer.send_batch([Message("orders", b"lost")], queue=queue)
        producer.send("orders", b"after", queue=queue)
        assert result.queue.queue_id == 2
        assert [(message.queue_id, message.body) for message in peer.messages("orders")] == [
            *[(2, b"lost")] * 2,
            (2, b"after"),
        ]


def test_messages_come_in_the_order_of_the_log(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, peer), Producer(peer, "shop") as producer:
        peer.create_topic("orders", 3)
        queues, bodies = producer.queues("orders"), [b"%d" % number for number in range(7)]
        for number, body in enumerate(bodies):
            producer.send("orders", body, queue=queues[-number % 3])
        for shared in (owner, peer):
            assert [message.body for message in shared.messages("orders")] == bodies


def test_an_unexpected_error_ends_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the next owner has opened the store already."""
    errors = [OSError(errno.EMFILE, "Too many open files"), RuntimeError("a bug"), MemoryError()]
    settle = SharedBroker._settle

    def settle_late(shared: SharedBroker, link: Any) -> None:
        if errors:
            raise errors.pop()
        settle(shared, link)

    monkeypatch.setattr("librmq.wire.share._FAILED_S", 0.01)
    with pair(tmp_path, timeout=30) as (owner, peer):
        with Producer(peer, "shop", timeout=30) as producer:
            monkeypatch.setattr(SharedBroker, "_settle", settle_late)
            owner.close()
            producer.send("orders", b"x", timeout=30)
        assert (peer.is_owner, errors) == (True, [])


def test_a_process_without_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("librmq.wire._unix_sockets.socket.socket", refuse)
    with pytest.raises(BrokerUnreachableError, match="Too many open files"):
        connect_to(str(tmp_path / "owner"), 1)


def test_a_missing_socket_file_is_not_the_end(tmp_path: Path) -> None:
    with pair(tmp_path) as (_, peer), Producer(peer, "shop", timeout=0.2) as producer:
        os.unlink(owner_socket(tmp_path / "store"))
        with pytest.raises(RmqError, match=rf"process {os.getpid()} owns .* is missing: restart"):
            producer.send("orders", b"x")
        assert peer.owner == os.getpid()


def test_a_repeated_request_has_the_time_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def fail(_: SharedBroker, timeout_s: float) -> None:
        waits.append(timeout_s)
        raise BrokerUnreachableError("no owner")

    with pair(tmp_path) as (_, peer):
        monkeypatch.setattr(SharedBroker, "_wait_for_owner", fail)
        for left_s in (600.0, -1.0):
            with pytest.raises(BrokerUnreachableError, match="no owner"):
                peer._call_next(protocol.QueryOffset("audit", "orders", 0), CLOCK.monotonic() + left_s)
        assert 0 < waits[0] <= 600.0
        assert waits[1] == 0.0
        monkeypatch.undo()
        sends: list[protocol.SendMessage] = []
        monkeypatch.setattr(SharedBroker, "_call_owner", lambda *words: sends.append(words[3]))
        peer._call_next(replace(_send(Message("orders", b"x")), timeout_ms=900_000.0), CLOCK.monotonic() + 600)
        assert sends[0].timeout_ms is not None
        assert 0 < sends[0].timeout_ms <= 600_000


def test_a_client_that_ends_while_there_is_no_owner(tmp_path: Path) -> None:
    """The next owner does not learn of it."""
    with pair(tmp_path) as (_, peer):
        link = cast("StorePeer", peer.link)
        peer._note_lost(link)
        try:
            with peer.runner.lock:
                for name in ("ended", "stays"):
                    peer.call(protocol.Heartbeat(name, peer.endpoint(peer.name), frozenset({"shop", "bank"}), ()))
                peer.call(protocol.ChannelClosed("ended"))
                peer.call(protocol.Unregister("stays", producer_group="shop"))
            assert {name: beat.producer_groups for name, beat in peer._beats.items()} == {"stays": {"bank"}}
        finally:
            peer.link = link


def test_a_client_that_comes_while_others_are_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next owner learns of it once, after the others."""
    registered, register = list[list[str]](), StoreOwner.register

    def register_and_come(
        owner: StoreOwner, beats: dict[str, protocol.Heartbeat], gives_up: Callable[[], bool]
    ) -> None:
        registered.append(sorted(beats))
        register(owner, beats, gives_up)
        if len(registered) == 1:
            with peer.runner.lock:
                peer.call(protocol.Heartbeat("comes", peer.endpoint(peer.name), frozenset({"shop"}), ()))

    with pair(tmp_path) as (owner, peer):
        peer.call(protocol.Heartbeat("was there", peer.endpoint(peer.name), frozenset({"shop"}), ()))
        monkeypatch.setattr(StoreOwner, "register", register_and_come)
        owner.close()
        wait_until(lambda: peer.is_owner, "the peer takes over")
        assert registered == [["was there"], ["comes"]]


def test_the_next_owner_waits_for_the_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They register with it before it shares out the queues, so that each keeps its own."""
    waits, wait = list[float](), Broker.await_members

    def await_members(broker: Broker, seconds: float) -> None:
        waits.append(seconds)
        wait(broker, seconds)

    monkeypatch.setattr(Broker, "await_members", await_members)
    with pair(tmp_path) as (owner, peer):
        assert waits == [], "there was no owner before the first one"
        owner.close()
        wait_until(lambda: peer.is_owner, "the peer takes over")
        assert waits == [1.0]


def test_a_call_waits_beyond_an_owner_that_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that has come and gone before the call saw it takes none of the call's time."""
    with pair(tmp_path) as (_, peer):
        link, settled, wait, waits = cast("StorePeer", peer.link), peer._settled, SystemClock.wait, list[float]()
        peer._note_lost(link)

        def wait_for_owners(clock: SystemClock, event: threading.Event, timeout_s: float) -> bool:
            if event is not settled:
                return wait(clock, event, timeout_s)
            waits.append(timeout_s)
            if len(waits) == 2:
                peer.link = link
            return True

        monkeypatch.setattr(SystemClock, "wait", wait_for_owners)
        try:
            peer.call(protocol.QueryOffset("audit", "orders", 0))
        finally:
            peer.link = link
        assert len(waits) == 2


def test_calls_wait_for_the_next_owner_of_one_that_ended_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call can find that an owner has ended while the clients that come last are registered there."""
    registered, register = list[StorePeer](), StorePeer.register

    def register_and_end(link: StorePeer, beats: dict[str, protocol.Heartbeat], gives_up: Callable[[], bool]) -> None:
        registered.append(link)
        register(link, beats, gives_up)
        if len(registered) == 2:
            peer._note_lost(link)

    with pair(tmp_path) as (_, peer):
        link = cast("StorePeer", peer.link)
        peer._note_lost(link)
        monkeypatch.setattr(StorePeer, "register", register_and_end)
        peer._settle(link)
        is_settled = peer._settled.is_set()
        peer._settle(link)
        assert (is_settled, peer._settled.is_set()) == (False, True)


# ---- forks


@pytest.mark.parametrize("of_owner", [True, False])
def test_a_forked_child_connects_again(tmp_path: Path, of_owner: bool) -> None:
    with pair(tmp_path) as shared:
        parent, other = shared if of_owner else shared[::-1]
        with Producer(parent, "shop") as before:
            before.send("orders", b"parent")
            asyncio.run(before.send_async("orders", b"parent"))

            def check() -> None:
                asyncio.run(before.send_async("orders", b"by the parent's producer"))
                assert not parent.is_owner
                with Producer(parent, "shop") as producer:
                    producer.send("orders", b"child")
                with PullConsumer(parent, "audit", consume_from=ConsumeFrom.FIRST) as consumer:
                    consumer.subscribe("orders")
                    sent, got = {b"child", b"by the parent's producer", b"parent"}, set[bytes]()
                    while not got >= sent and (messages := consumer.poll(30)):
                        got.update(message.body for message in messages)
                assert got >= sent
                parent.close()

            in_child(check)
            asyncio.run(before.send_async("orders", b"parent again"))
        assert len(list(other.messages("orders"))) == 5


@pytest.mark.slow
def test_a_child_takes_over_from_its_parent(scene: Scene) -> None:
    """As with gunicorn's ``preload``: the children inherit an owner, and one of them is the next."""
    program = """
        import os, sys, librmq
        shared = librmq.share(sys.argv[1])
        producer = librmq.Producer(shared, "shop")
        producer.send("orders", b"parent")
        if os.fork() == 0:
            producer.send("orders", b"child")
            print("sent", flush=True)
            sys.stdin.readline()
            producer.send("orders", b"heir")
            producer.send("orders", b"later", delay=3600)  # which only an owner can store
            print("owner", shared.owner == os.getpid(), flush=True)
            shared.close()
            os._exit(0)
        os.wait()
    """
    with start_program(program, scene.store) as parent:
        assert parent.stdout.readline() == "sent\n"
        parent.kill()
        parent.wait()
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "owner True\n"
    with librmq.share(scene.store) as shared:
        assert sorted(message.body for message in shared.messages("orders")) == [b"child", b"heir", b"parent"]


@pytest.mark.parametrize("process", [1, 1234, 4_194_304])
def test_a_process_has_an_address_of_its_own(process: int) -> None:
    host = host_of_process(process)
    assert ip_address(host).is_loopback
    assert process_of_host(host) == process


@pytest.mark.skipif("sys.platform != 'linux'", reason="only there peers append by themselves")
def test_delays_that_meet_a_process_stopped_within_an_append_come_after_it(tmp_path: Path) -> None:
    """A step of the owner waits a moment only, because it holds the lock of the runner, and comes again."""
    received, number = set[bytes](), 0
    with (
        librmq.share(tmp_path) as owner,
        librmq.share(tmp_path) as peer,
        Producer(owner, "shop") as producer,
        Producer(peer, "shop") as of_peer,
    ):
        page = AppendPage.open(appends_path(str(tmp_path)))
        assert page is not None
        with closing(page):
            consumer = PushConsumer(owner, "billing", consume_from=ConsumeFrom.FIRST)
            consumer.subscribe("orders", lambda message: received.add(message.body))
            consumer.start()
            delayed = set[bytes]()
            while delayed <= {message.body for message in owner.messages("orders")}:  # they came before it was taken
                if delayed:
                    page.release()
                number += 1
                delayed = {b"%d by level" % number, b"%d by time" % number}
                producer.send("orders", b"%d by level" % number, delay_level=1)
                producer.send("orders", b"%d by time" % number, delay=1)
                while page.numbers[append_page.STATE] != append_page.OPEN:
                    of_peer.send("orders", b"x")
                page.take(20)
            CLOCK.wait(threading.Event(), 2)
            assert not delayed <= received
            page.release()
            wait_until(lambda: delayed <= received, "they come")
            consumer.shutdown()


@pytest.mark.slow
def test_a_peer_says_since_when_an_owner_stands_still(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with librmq.share(tmp_path) as owner, librmq.share(tmp_path) as peer:
        peer.create_topic("orders", 1)
        with lock_order.elsewhere(), owner.runner.lock:  # which its steps need
            for _ in range(2):
                with pytest.raises(BrokerUnreachableError) as raised:
                    peer.create_topic("bills", 1)
                said = str(raised.value)
                assert f"process {os.getpid()}, which owns the store, is not stopped, and has answered no " in said
                assert re.search(r" since 20\d\d-.*: if librmq who .* says that it stands still, end it$", said)
    lines = [record for record in caplog.records if "stands still" in record.getMessage()]
    assert [record.levelname for record in lines] == ["WARNING"]
