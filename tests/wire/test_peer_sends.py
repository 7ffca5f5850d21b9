"""What a peer of a share appends by itself, and what it leaves to the owner."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import librmq
from librmq import DiskFullError, Message, Producer, SendStatus, StoreConfig
from librmq.errors import BrokerUnreachableError, LostAnswerError, MessageIllegalError
from librmq.protocol import INNER_PRODUCER, PendingSend, SendLater, SendMessage
from librmq.store import AppendResult
from librmq.store.engine import _append_page as append_page
from librmq.store.engine._append_page import AppendPage
from librmq.store.peer_appends import PeerAppender
from librmq.wire._peer_sends import PeerSends, appends_path
from librmq.wire.share import SharedBroker
from librmq.wire.share_links import StoreOwner
from tests.wire.stub import wait_until

HOST = "127.0.0.1", 10911


def one(message: Message, queue_id: int = 0, **fields: Any) -> SendMessage:
    return SendMessage("shop", message, queue_id, 1, HOST, **fields)


class Appender:
    """In place of the appender of a page."""

    cluster_name, store_host, held_properties = "c", "127.0.0.1:10911", frozenset(("DELAY",))
    is_sync = False

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.flush: bool | Exception = True
        self.reached: list[int] = []
        self.turns: list[int] = []
        self.errors: dict[bytes, Exception] = {}

    def reach(self, end: int, wait_s: float) -> bool:
        self.reached.append(end)
        if isinstance(self.flush, Exception):
            raise self.flush
        return self.flush

    def encode(self, message: Message, *_: Any) -> Message:
        if message.body in self.errors:
            raise self.errors[message.body]
        return message

    def append_all(self, records: list[Message], wait_s: float, results: list[AppendResult]) -> None:
        self.turns.append(len(records))
        if isinstance(self.flush, Exception):
            raise self.flush
        for message in records:
            if message.topic == "unknown":
                return
            results.append(AppendResult(4096 + len(results), 200, len(results), 1_700_000_000_000, bytes(8)))

    def close(self) -> None:
        pass

    def append(self, message: Message, queue_id: int, *_: Any) -> AppendResult | None:
        self.messages.append(message)
        return None if message.topic == "unknown" else AppendResult(4096, 200, 7, 1_700_000_000_000, bytes(8))


@pytest.fixture
def appender(monkeypatch: pytest.MonkeyPatch) -> Appender:
    appender = Appender()
    monkeypatch.setattr(PeerAppender, "open", lambda *_: appender)
    return appender


def test_a_response_is_that_of_a_broker(appender: Appender) -> None:
    response = PeerSends("store", 1, lambda: None).send(one(Message("orders", b"x", keys="k"), 2))
    assert response is not None
    assert response[1:5] == (2, 7, 4096, ("7F00000100002A9F0000000000001000",))


def test_what_does_not_go_to_its_queue_at_once_is_for_the_owner(appender: Appender) -> None:
    sends = PeerSends("store", 1, lambda: None)
    assert sends.send(one(Message("orders", b"x", delay_level=3))) is None
    assert sends.send(one(Message("orders", b"x", delay=60))) is None
    assert not appender.messages
    assert sends.send(one(Message("unknown", b"x"))) is None


def test_a_send_to_a_store_that_confirms_waits_for_the_flush(appender: Appender) -> None:
    appender.is_sync = True
    sends = PeerSends("store", 1, lambda: None)

    def status(message: Message, **fields: Any) -> SendStatus:
        response = sends.send(one(message, **fields))
        assert response is not None
        return response.status

    assert status(Message("orders", b"x")) is SendStatus.SEND_OK
    assert appender.reached == [4296]
    appender.flush = False
    assert status(Message("orders", b"x")) is SendStatus.FLUSH_DISK_TIMEOUT
    assert status(Message("orders", b"x", wait_store_ok=False)) is SendStatus.SEND_OK
    assert status(Message("orders", b"x"), is_one_way=True) is SendStatus.SEND_OK
    assert len(appender.reached) == 2


def test_an_owner_that_is_stopped_before_its_flush_is_named(appender: Appender) -> None:
    appender.is_sync, appender.flush = True, BrokerUnreachableError("it may be stored")
    sends = PeerSends("store", 1, lambda: BrokerUnreachableError("process 7 is stopped"))
    with pytest.raises(BrokerUnreachableError, match="it may be stored; process 7 is stopped"):
        sends.send(one(Message("orders", b"x")))
    appender.flush = LostAnswerError("it may be stored")
    with pytest.raises(LostAnswerError, match=r"it may be stored$"):
        sends.send(one(Message("orders", b"x")))


class Later:
    """Sends of an event loop, and what they came to."""

    def __init__(self, *messages: Message) -> None:
        self.sends = [PendingSend(SendMessage("shop", message, 0, 1, HOST)) for message in messages]
        self.ended: SimpleQueue[Sequence[PendingSend]] = SimpleQueue()
        self.asked: list[Message] = []

    def begin(self, sends: PeerSends, *, owner_answers: bool = False) -> bool:
        def ask_owner(request: SendLater) -> bool:
            self.asked += [pending.send.message for pending in request.sends]
            return owner_answers

        return sends.send_later(SendLater(self.sends, self.ended.put), ask_owner)

    def outcomes(self) -> list[Any]:
        return [pending.outcome for pending in self.ended.get(timeout=60)]


ORDER, UNKNOWN = Message("orders", b"x"), Message("unknown", b"x")


@pytest.fixture
def sends(appender: Appender) -> Iterator[PeerSends]:
    with closing(PeerSends("store", 1, lambda: None)) as sends:
        assert not Later(ORDER).begin(sends)  # the owner stores the first ones
        wait_until(lambda: sends.may_append(ORDER), "the page is open")
        yield sends


def test_messages_of_an_event_loop_are_appended_by_a_thread(sends: PeerSends) -> None:
    later = Later(ORDER, ORDER)
    assert later.begin(sends)
    first, second = later.outcomes()
    assert first[1:5] == (0, 0, 4096, ("7F00000100002A9F0000000000001000",))
    assert second.queue_offset == 1
    sends.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("librmq share append")]
    assert not later.begin(sends)


def test_many_messages_of_an_event_loop_let_others_append_in_between(sends: PeerSends, appender: Appender) -> None:
    later = Later(*150 * [ORDER])
    assert later.begin(sends)
    assert [len(later.outcomes()) for _ in range(3)] == [64, 64, 22]  # each part ends by itself
    assert appender.turns == [64, 64, 22]


@pytest.mark.parametrize("owner_answers", [True, False])
def test_what_finds_no_room_in_a_thread_goes_to_the_owner(sends: PeerSends, owner_answers: bool) -> None:
    """With all that follow it."""
    later = Later(*70 * [ORDER], UNKNOWN, *70 * [ORDER])
    assert later.begin(sends, owner_answers=owner_answers)
    assert None not in [*later.outcomes(), *later.outcomes()]
    if not owner_answers:
        assert later.outcomes() == 71 * [None]  # each is sent by itself then
    sends.close()
    assert later.asked == [UNKNOWN, *70 * [ORDER]]
    assert later.ended.empty()


def test_an_error_in_a_thread_is_that_of_its_message(sends: PeerSends, appender: Appender) -> None:
    appender.errors = {b"illegal": MessageIllegalError("illegal")}
    later = Later(ORDER, Message("orders", b"illegal"))
    assert later.begin(sends)
    assert later.outcomes() == [None, None]  # each is sent by itself, and one gets the error
    appender.flush = BrokerUnreachableError("locked")
    later = Later(ORDER, ORDER)
    assert later.begin(sends)
    assert later.outcomes() == [appender.flush, appender.flush]  # the second one would wait for as long


def test_an_owner_that_fails_leaves_each_message_to_its_caller(sends: PeerSends) -> None:
    later = Later(UNKNOWN)

    def fail(request: SendLater) -> bool:
        raise BrokerUnreachableError("ended")

    assert sends.send_later(SendLater(later.sends, later.ended.put), fail)
    assert later.outcomes() == [None]


def test_an_event_loop_leaves_to_the_owner_what_waits_for_it(sends: PeerSends, appender: Appender) -> None:
    assert not Later(ORDER, Message("orders", b"x", delay_level=3)).begin(sends)
    hurried = Later(ORDER, ORDER)
    hurried.sends[1].send = replace(hurried.sends[1].send, timeout_ms=1)
    assert not hurried.begin(sends)  # the first would get the error of the other
    appender.is_sync = True
    assert not Later(ORDER).begin(sends)


def test_without_a_page_the_owner_stores_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerAppender, "open", lambda *_: None)
    assert PeerSends("store", 1, lambda: None).send(one(Message("orders", b"x"))) is None


# ---- event loops of a peer beside a real owner


class AtAppends:
    """A peer that appends by itself, and what a test does before and after its event loops append."""

    def __init__(self, owner: SharedBroker, peer: SharedBroker, producer: Producer) -> None:
        self.owner, self.peer, self.producer = owner, peer, producer
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None
        self.appended = 0

    def append_all(self, appender: PeerAppender, records: Any, wait_s: float, results: list[AppendResult]) -> None:
        is_of_loop = threading.current_thread().name.startswith("librmq share append")
        if is_of_loop:
            self.before()
        append_all(appender, records, wait_s, results)
        if is_of_loop:
            self.appended += len(results)
            self.after()

    def refuse(self) -> None:
        """Let the owner store the next messages, as one that has no room prepared."""
        assert isinstance(self.owner.link, StoreOwner)
        shared = self.owner.link.route.store.appender.shared
        assert shared is not None
        shared.refuse()

    def bodies(self) -> list[bytes]:
        """Return what is stored behind the first messages."""
        return [message.body for message in self.peer.messages("orders") if message.body != b"first"]


append_all = PeerAppender.append_all


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AtAppends]:
    if sys.platform != "linux":
        pytest.skip("only there peers append by themselves")
    monkeypatch.setattr("librmq.store.engine._shared_appends._QUIET_S", 600)  # it lets peers append from now on
    with (
        librmq.share(tmp_path, store_config=StoreConfig(max_message_size=1000)) as owner,
        librmq.share(tmp_path) as peer,
        Producer(peer, "shop", timeout=60) as producer,
    ):
        owner.create_topic("orders", 1)
        with Producer(owner, "shop") as own:
            own.send("orders", b"first")  # without a file of the log no peer may append
        at = AtAppends(owner, peer, producer)
        monkeypatch.setattr(PeerAppender, "append_all", lambda *given: at.append_all(*given))
        producer.send("orders", b"first")
        page = AppendPage.open(appends_path(str(tmp_path)))
        assert page is not None
        wait_until(lambda: page.numbers[append_page.STATE] == append_page.OPEN, "the peer may append")
        page.close()
        asyncio.run(producer.send_async("orders", b"first"))  # by the owner, while the thread starts
        yield at


def test_before_a_peer_stands_what_passes_requests_on(
    peer: AtAppends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded send is appended as one without a recorder; a copy and what is sent back are for the owner."""
    appended: list[bytes] = []
    send = PeerSends.send

    def noted(sends: PeerSends, request: SendMessage) -> Any:
        appended.append(request.message.body)
        return send(sends, request)

    monkeypatch.setattr(PeerSends, "send", noted)
    with librmq.record_history(peer.peer, tmp_path / "history.jsonl") as route, Producer(route, "shop") as producer:
        producer.send("orders", b"recorded")
        endpoint = route.endpoint(peer.peer.name)
        endpoint.call(one(Message("orders", b"sent back"), max_reconsume_times=3))
        endpoint.call(replace(one(Message("orders", b"a copy")), group=INNER_PRODUCER))
    assert appended == [b"recorded"]
    assert peer.bodies() == [b"recorded", b"sent back", b"a copy"]


def test_event_loops_of_two_threads_append_by_themselves(peer: AtAppends) -> None:
    results: dict[bytes, int] = {}

    async def send(name: str) -> None:
        bodies = [f"{name} {number}".encode() for number in range(150)]
        sent = await asyncio.gather(*(peer.producer.send_async("orders", body) for body in bodies))
        results.update(zip(bodies, (result.queue_offset for result in sent), strict=True))

    with ThreadPoolExecutor(2) as pool:
        for number in range(20):  # the owner stores those for which it has prepared no room yet
            list(pool.map(asyncio.run, map(send, (f"a{number}", f"b{number}"))))
            if peer.appended:
                break
    assert {offset - 3: body for body, offset in results.items()} == dict(enumerate(peer.bodies()))
    assert peer.appended


@pytest.mark.parametrize("of_owner", [False, True])
def test_async_sends_keep_their_order_where_each_is_awaited(peer: AtAppends, of_owner: bool) -> None:
    """Also where a peer appends one message, and its owner stores the next; others are under way meanwhile."""
    producer = Producer(peer.owner, "own") if of_owner else peer.producer

    numbers = count(1)

    def refuse() -> None:
        if not next(numbers) % 5:
            peer.refuse()

    peer.before = refuse

    async def send(name: str) -> None:
        for number in range(20):
            await producer.send_async("orders", f"{name}{number}".encode())

    async def send_all() -> None:
        await asyncio.gather(*map(send, "abc"))

    asyncio.run(send_all())
    for name in "abc":
        own = [int(body[1:]) for body in peer.bodies() if body.startswith(name.encode())]
        assert own == [*range(20)]


def test_a_cancelled_send_that_is_stored_already(peer: AtAppends) -> None:
    async def send() -> None:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.ensure_future(peer.producer.send_async("orders", b"%d" % number)) for number in range(3)]
        peer.after = lambda: loop.call_soon_threadsafe(tasks[1].cancel)
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert [(await task).queue_offset for task in (tasks[0], tasks[2])] == [3, 5]

    asyncio.run(send())
    assert peer.bodies() == [b"0", b"1", b"2"]


def test_a_closed_loop_leaves_its_thread_to_others(peer: AtAppends) -> None:
    is_begun, is_closed = threading.Event(), threading.Event()

    def wait() -> None:
        is_begun.set()
        assert is_closed.wait(60)

    peer.before = wait

    async def leave() -> None:
        left = asyncio.ensure_future(peer.producer.send_async("orders", b"left"))
        while not is_begun.is_set():
            await asyncio.sleep(0)
        assert not left.done()

    asyncio.run(leave())
    is_closed.set()
    assert asyncio.run(peer.producer.send_async("orders", b"of another loop")).queue_offset == 4
    assert peer.bodies() == [b"left", b"of another loop"]


def test_messages_of_a_loop_survive_an_owner_that_ends_before_they_are_appended(peer: AtAppends) -> None:
    def end() -> None:
        peer.before = lambda: None
        peer.owner.close()

    peer.before = end

    async def send() -> None:
        await asyncio.gather(*(peer.producer.send_async("orders", b"%d" % number) for number in range(100)))

    asyncio.run(send())
    assert sorted(map(int, peer.bodies())) == [*range(100)]
    assert peer.peer.is_owner


def test_a_message_that_is_refused_ends_no_other_of_its_turn(peer: AtAppends) -> None:
    async def send() -> list[Any]:
        bodies = b"1", bytes(2000), b"2"
        sends = (peer.producer.send_async("orders", body) for body in bodies)
        return await asyncio.gather(*sends, return_exceptions=True)

    first, refused, last = asyncio.run(send())
    assert isinstance(refused, MessageIllegalError)
    assert sorted((first.queue_offset, last.queue_offset)) == [3, 4]
    assert sorted(peer.bodies()) == [b"1", b"2"]


def test_a_full_disk_is_named_to_each_message_of_a_turn(peer: AtAppends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DiskFullError("the disk is full")

    async def send() -> list[Any]:
        sends = (peer.producer.send_async("orders", b"x") for _ in range(3))
        return await asyncio.gather(*sends, return_exceptions=True)

    monkeypatch.setattr("librmq.store.MessageStore.append", refuse)
    peer.before = peer.refuse  # as an owner without room does
    errors = asyncio.run(send())
    assert [str(error) for error in errors] == 3 * ["broker-a: the disk is full"]
