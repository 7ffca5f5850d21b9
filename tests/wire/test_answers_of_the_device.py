"""With durability "sync", clients elsewhere get nothing that a loss of power can take: they would skip what follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from librmq import Broker, Message, StoreConfig, protocol
from librmq.errors import BrokerError
from librmq.files import MemoryFiles
from librmq.files.interface import Files
from librmq.wire.frame_links import FrameLinks
from librmq.wire.grpc import GrpcServer
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._headers import RequestCode as Code
from tests.broker.parties import HOST, Listening, beat, opened
from tests.file_seams import FailingFiles, GatedFiles
from tests.wire.remoting_client import RawClient
from tests.wire.stub import Stub

SYNC = StoreConfig.tiny(durability="sync")
B = protocol.Subscription("t", "b")
WAIT_S = 60.0


def put(broker: Broker, body: bytes, tags: str = "a") -> None:
    """Store a message whose sender does not wait, so that no one has to flush it."""
    broker.call(protocol.SendMessage("p", Message("t", body, tags=tags, wait_store_ok=False), 0, 5, HOST))


@contextmanager
def with_unflushed(files: Files | None = None) -> Iterator[Broker]:
    """Open a broker whose second message is not on the device; under its clock no thread flushes."""
    with opened(files, store=SYNC) as broker:
        broker.create_topic("t", 1)
        put(broker, b"first")
        broker.call(protocol.UpdateOffset("g", "t", 0, 2))
        broker.store.flush()
        put(broker, b"second")
        assert not is_flushed(broker)
        yield broker
        broker.abandon()


def is_flushed(broker: Broker) -> bool:
    return broker.store.writer.durability.commit.flushed == broker.store.log.end


def pull(
    queue_offset: int = 0, subscription: protocol.Subscription | None = None, number: int = 32
) -> protocol.PullMessage:
    return protocol.PullMessage("c", "g", "t", 0, queue_offset, number, subscription or protocol.Subscription("t"))


TELLING = [
    pull(),
    pull(1),
    pull(0, B),  # nothing matches, and the next offset is behind the message
    pull(9),  # beyond the end: it goes on there
    protocol.Receive("c", "h", "t", 32, 10_000, protocol.Subscription("t")),
    protocol.MaxOffset("t", 0),
    protocol.QueryOffset("g", "t", 0),
    protocol.QueueOffsetAt("t", 0, 1 << 40),
]


@pytest.mark.parametrize("request_", TELLING, ids=lambda request: type(request).__name__)
@pytest.mark.parametrize("is_shared", [False, True])
def test_only_a_connection_of_this_machine_is_answered_before(
    request_: protocol.Request[object], is_shared: bool
) -> None:
    with with_unflushed() as broker:
        links = FrameLinks(broker.runner, is_shared=is_shared)
        beat(broker, B)
        links.endpoint("client", broker).call(request_)
        assert is_flushed(broker) is not is_shared
        links.close()


@pytest.mark.parametrize("request_", [pull(2), pull(0, number=1), pull(0, protocol.Subscription("t", "a"), 1)])
def test_an_answer_of_flushed_messages_does_not_wait(request_: protocol.PullMessage) -> None:
    with with_unflushed() as broker:
        broker.await_device(request_, broker.call(request_))
        assert not is_flushed(broker)


def test_a_failed_flush_is_the_answer() -> None:
    files = FailingFiles(MemoryFiles())
    with with_unflushed(files) as broker:
        links = FrameLinks(broker.runner)
        endpoint = links.endpoint("client", broker)
        files.fail("flush")
        for _ in range(2):
            with pytest.raises(BrokerError, match="flush"):
                endpoint.call(pull())
        assert endpoint.call(pull(number=1)).messages[0].body == b"first"
        links.close()


def test_a_reset_names_no_place_before() -> None:
    class Noting(Listening):
        def call(self, request: protocol.Request[object], /) -> object:
            if isinstance(request, protocol.ResetOffsets):
                flushed.append(is_flushed(broker))
            return super().call(request)

    flushed: list[bool] = []
    with with_unflushed() as broker:
        beat(broker, B, client=Noting())
        broker.reset_group("g", "t", to="end")
        assert flushed == [True]


def test_a_held_pull_waits_for_the_device_and_lets_others_go_on() -> None:
    files = GatedFiles()
    with opened(files, store=SYNC) as broker, RemotingServer(broker) as server:
        broker.create_topic("t", 1)
        put(broker, b"first")  # makes the files
        with RawClient(server.port) as puller, RawClient(server.port) as other:
            puller.beat("c1", "g", topics=("t",))
            number = puller.pull("g", "t", 1, wait_ms=15_000)
            puller.call(Code.GET_MIN_OFFSET, topic="t", queue_id=0)  # the pull is held by now
            files.come.clear()
            files.gate.clear()
            try:
                put(broker, b"second")
                assert files.come.wait(WAIT_S), "it was answered before"
                assert other.call(Code.GET_CONSUMER_LIST_BY_GROUP, consumer_group="g").code == 0
            finally:
                files.gate.set()
            answer = puller.answer()
        assert (answer.opaque, answer.code, is_flushed(broker)) == (number, 0, True)
        assert b"second" in answer.body


def test_a_receive_by_grpc_waits_for_the_device() -> None:
    files = FailingFiles(MemoryFiles())
    with with_unflushed(files) as broker, GrpcServer(broker) as server, Stub(server.address) as stub:
        assert [message.body for message in stub.receive("t", "h")[1]] == [b"first", b"second"]
        assert is_flushed(broker)
        put(broker, b"third")
        files.fail("flush")
        code, messages = stub.receive("t", "h")
        assert (code // 10_000, messages) == (5, [])
