"""Clients of the service that come, go or are cut off: what they cost, and what happens to their messages."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from librmq import Broker, BrokerBusyError, ConfigError, CorruptionError, Producer
from librmq.clock import SystemClock
from librmq.protocol import EndTransaction, ResponseCode
from librmq.testing import Kit
from librmq.wire.grpc import GrpcServer
from librmq.wire.grpc import _messages as messages_module
from librmq.wire.grpc import _receives as receives_module
from librmq.wire.grpc import _server as server_module
from librmq.wire.grpc._protocol import SERVICE, message_class
from librmq.wire.grpc._server import Service
from librmq.wire.grpc._sessions import Commands
from tests.wire.stub import Stub, consumer_settings, message, producer_settings, resource, wait_until

OK = 20000


def test_clients_cut_off_early_leave_nothing(server: GrpcServer, broker: Broker) -> None:
    for number in range(40):
        with Stub(server.address, f"c{number}") as stub:
            answers: Any = stub.telemetry(producer_settings("t"))
            threading.Event().wait(0.001 * (number % 4))
            answers.cancel()
    wait_until(lambda: not server.clients and not broker.clients())


@pytest.mark.parametrize("group", ["", "a b", "CID_RMQ_SYS_x"])
def test_client_of_an_illegal_group_is_refused(server: GrpcServer, stub: Stub, group: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        next(stub.telemetry(consumer_settings(group)))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert server.clients == 0
    fields = {"group": resource(group), "topic": resource("t")}
    assert stub.receive("t", group)[0] == 40003
    for name in ("QueryAssignment", "AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue"):
        assert stub.call(name, **fields).status.code == 40003


def test_a_returning_client_outlives_its_former_stream(server: GrpcServer, broker: Broker) -> None:
    with Stub(server.address, "c") as later:
        with Stub(server.address, "c") as former:
            former_answers = former.telemetry(producer_settings("t"))
            next(former_answers)
            answers = later.telemetry(producer_settings("t"))
            next(answers)
        threading.Event().wait(0.1)
        assert later.call("Heartbeat", client_type=1).status.code == OK
        assert [client.client_id for client in broker.clients()] == ["c"]
    wait_until(lambda: not server.clients and not broker.clients())


def test_closed_server_leaves_no_clients(broker: Broker) -> None:
    with GrpcServer(broker) as server, Stub(server.address) as stub:
        answers = stub.telemetry(producer_settings("t"))
        next(answers)
        server.close()
        assert broker.clients() == ()


def test_error_in_a_report_does_not_reach_the_client(broker: Broker) -> None:
    def fails(*_: object) -> None:
        raise BrokenPipeError

    with GrpcServer(broker, changed=fails) as server, Stub(server.address) as stub:
        answers = stub.telemetry(producer_settings("t"))
        assert next(answers).status.code == OK
        assert stub.call("NotifyClientTermination").status.code == OK
        assert (server.clients, broker.clients()) == (0, ())


def test_client_that_does_not_read_costs_bounded_memory() -> None:
    commands = Commands()
    told = message_class("TelemetryCommand")(settings=producer_settings("t" * (64 << 10)))
    kept = sum(commands.enqueue(told) for _ in range(2000))
    assert 200 < kept <= 1000
    assert kept * told.ByteSize() <= 16 << 20
    commands.end_stream()
    assert not commands.enqueue(told)
    assert len(list(commands)) == kept


def test_settings_of_great_size_are_refused(stub: Stub, server: GrpcServer) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        next(stub.telemetry(producer_settings(*(f"topic-{number:0100}" for number in range(3000)))))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert server.clients == 0


def test_streams_without_settings_stop_no_client(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as ends:
        server = ends.enter_context(GrpcServer(broker))
        silent = [ends.enter_context(Stub(server.address, f"c{number}")) for number in range(70)]
        stub = ends.enter_context(Stub(server.address))
        with monkeypatch.context() as hurried:
            hurried.setattr(server_module, "_SETTINGS_S", 0.5)
            streams = [one.telemetry(None) for one in silent]
            assert stub.send(message("t")).status.code == OK
            for stream in streams:
                with pytest.raises(grpc.RpcError) as raised:
                    next(stream)
                assert raised.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert next(stub.telemetry(producer_settings("t"))).status.code == OK


def test_groups_that_would_share_retries_are_refused(stub: Stub, broker: Broker) -> None:
    """Group a with topic b_c, and group a_b with topic c."""
    stub.send(message("b_c", b"1"))
    stub.send(message("c", b"2"))
    assert len(stub.receive("b_c", "a")[1]) == 1
    code, messages = stub.receive("c", "a_b")
    assert (code, messages) == (40300, [])
    assert len(stub.receive("c", "other")[1]) == 1
    assert len(stub.receive("c", "a")[1]) == 1


@pytest.mark.slow
def test_silent_connection_is_ended(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(server_module.OPTIONS)
    assert options["grpc.keepalive_time_ms"] <= 60_000
    options |= {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 500}
    options |= {"grpc.http2.ping_timeout_ms": 500, "grpc.http2.min_ping_interval_without_data_ms": 500}
    monkeypatch.setattr(server_module, "OPTIONS", tuple(options.items()))
    with GrpcServer(broker) as server, socket.create_connection((server.host, server.port), timeout=60) as silent:
        silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        while silent.recv(4096):
            pass


# ---- receives whose client is gone


class Call:
    """A call as the service sees it, whose client may have gone."""

    def __init__(self, client_id: str = "c") -> None:
        self.is_there = True
        self._client_id = client_id

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("x-mq-client-id", self._client_id)]

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None

    def is_active(self) -> bool:
        return self.is_there

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True


@pytest.fixture
def kit() -> Iterator[Kit]:
    with Kit() as made:
        yield made


@pytest.fixture
def service(kit: Kit) -> Iterator[Service]:
    kit.broker.create_topic("t", 1)
    with Producer(kit.route, "p") as producer:
        for body in ("a", "b"):
            producer.send("t", body)
    made = Service(kit.broker, advertise=None, auto_create=True, changed=lambda *_: None)
    yield made
    made.close()


def receive_request(**fields: Any) -> Any:
    request = message_class("ReceiveMessageRequest")(batch_size=32, **fields)
    request.group.name, request.message_queue.topic.name = "g", "t"
    request.invisible_duration.FromSeconds(3600)
    request.long_polling_timeout.FromMilliseconds(1)
    return request


def received(service: Service) -> list[tuple[bytes, int]]:
    frames = list(service.receives.receive_message(receive_request(), Call()))
    messages = [frame.message for frame in frames if frame.WhichOneof("content") == "message"]
    return [(one.body, one.system_properties.delivery_attempt) for one in messages]


@pytest.mark.parametrize("frames", [1, 2])
def test_undelivered_messages_are_delivered_again(kit: Kit, service: Service, frames: int) -> None:
    answers: Any = service.receives.receive_message(receive_request(), Call())
    for _ in range(frames):  # the status, then a message that is sent when the next one is requested
        next(answers)
    answers.close()
    kit.advance(seconds=0.999)
    assert received(service) == []
    kit.advance(seconds=0.001)
    assert received(service) == [(b"a", 2), (b"b", 2)]


def test_client_gone_in_its_receive_has_nothing_renewed(kit: Kit, service: Service) -> None:
    call = Call()
    stream = Commands()
    service.sessions.take_settings("c", consumer_settings("g", 2), "5.1.2", stream)
    lost = service.receives.receive_message(receive_request(auto_renew=True), call)
    next(lost)
    assert len(service.receives.renewals) == 2
    lost.close()  # type: ignore[attr-defined]
    assert len(service.receives.renewals) == 0
    service.sessions.remove_client("c")
    late: Any = service.receives.receive_message(receive_request(auto_renew=True), call)
    kit.advance(seconds=1)
    next(late)
    assert len(service.receives.renewals) == 0  # the client has already ended, so nothing would end renewals later


def test_closed_server_returns_messages_of_push_consumers(kit: Kit, service: Service) -> None:
    service.sessions.take_settings("c", consumer_settings("g", 2), "5.1.2", Commands())
    frames = service.receives.receive_message(receive_request(auto_renew=True), Call())
    assert len(list(frames)) == 4
    service.close()
    kit.advance(seconds=1)
    assert received(service) == [(b"a", 2), (b"b", 2)]


def test_a_message_at_the_begin_of_a_wait_is_work(kit: Kit, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a test would move the clock before its push consumer has the message."""
    service.sessions.take_settings("c", consumer_settings("g", 2), "5.1.2", Commands())
    assert len(received(service)) == 2
    wait, settled = SystemClock.wait, list[bool]()

    def send_and_wait(clock: SystemClock, event: threading.Event, seconds: float | None) -> bool:
        if not settled:
            kit.producer().send("t", b"c")
            kit.run_until_idle()
            settled.append(service.is_settled())
        return wait(clock, event, seconds)

    monkeypatch.setattr(SystemClock, "wait", send_and_wait)
    request = receive_request()
    request.long_polling_timeout.FromSeconds(20)
    frames = list(service.receives.receive_message(request, Call()))
    assert [frame.message.body for frame in frames if frame.WhichOneof("content") == "message"] == [b"c"]
    assert settled == [False]


def test_places_of_unknown_clients_are_not_kept(service: Service) -> None:
    for number in range(5):
        request = receive_request()
        request.message_queue.id = number
        list(service.receives.receive_message(request, Call(f"c{number}")))
    service.sessions.take_settings("push", consumer_settings("g", 2), "5.1.2", Commands())
    for number in range(5):
        request.message_queue.id = number + 7
        list(service.receives.receive_message(request, Call("push")))
    assert service.receives.polls._places == {"push": {("t", -1)}}


def test_receive_waits_20_seconds_at_most(service: Service) -> None:
    request = receive_request()
    request.long_polling_timeout.FromSeconds(1 << 30)
    assert service.receives.poll_time(request, Call()) == 20


def test_message_that_cannot_be_sent_hides_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    convert = messages_module.to_received

    def fails(one: Any, topic: str, invisible_ms: int) -> Any:
        if one.message.body == b"a":
            raise CorruptionError("f", 0, "record", "the body can't be unpacked")
        return convert(one, topic, invisible_ms)

    monkeypatch.setattr(receives_module, "to_received", fails)
    assert received(service) == [(b"b", 1)]
    assert "can't be sent to its client" in caplog.text


def test_transaction_can_be_ended_again_after_a_refusal(
    stub: Stub, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = stub.send(message("t", message_type=4)).entries
    fields = {"topic": resource("t"), "message_id": "id", "transaction_id": entry.transaction_id, "resolution": 1}
    call = broker.call

    def busy(request: Any) -> Any:
        if isinstance(request, EndTransaction):
            raise BrokerBusyError(ResponseCode.SYSTEM_BUSY, "busy")
        return call(request)

    with monkeypatch.context() as patched:
        patched.setattr(broker, "call", busy)
        assert stub.call("EndTransaction", **fields).status.code == 42900
    assert stub.call("EndTransaction", **fields).status.code == OK
    assert [one.body for one in broker.messages("t")] == [b"x"]


def test_times_out_of_range_are_refused(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    sent = message("t")
    sent.system_properties.born_timestamp.seconds = 1 << 60
    assert stub.send(sent).status.code == 40000
    sent = message("t")
    sent.system_properties.delivery_timestamp.seconds = 1 << 60
    assert stub.send(sent).status.code == 40012
    assert caplog.records == []


def test_the_calls_of_one_address_are_a_choice(broker: Broker) -> None:
    """The refusal names the option; a server with a larger one answers."""
    for bound in (0, "many"):
        with pytest.raises(ConfigError, match="calls_of_address: expected 1 to"):
            GrpcServer(broker, calls_of_address=bound)  # type: ignore[arg-type]
    for bound in (1, 100):
        with GrpcServer(broker, calls_of_address=bound) as server, ExitStack() as streams:
            holder, other = (streams.enter_context(Stub(server.address, name)) for name in ("one", "two"))
            stream = holder.telemetry(producer_settings("t"))  # kept, because a stream without a name is cancelled
            assert next(stream).status.code == OK
            if bound == 100:
                assert other.send(message("t")).status.code == OK
                continue
            with pytest.raises(grpc.RpcError, match=r"1 calls of .* are open already.*--grpc-calls, allows more"):
                other.send(message("t"))


@pytest.mark.slow
def test_one_client_leaves_calls_for_others(server: GrpcServer) -> None:
    """A connection that holds calls without ever sending a request is refused more; another one is answered."""
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    ended = threading.Event()

    def no_request() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    with grpc.insecure_channel(server.address, options) as channel, Stub(server.address, "other") as other:
        hold = channel.stream_stream(f"/{SERVICE}/SendMessage", None, None)
        calls = [hold(no_request(), timeout=60) for _ in range(300)]
        try:
            refused: queue.Queue[grpc.StatusCode] = queue.Queue()
            for call in calls:
                call.add_done_callback(lambda done: refused.put(done.code()))
            assert {refused.get(timeout=30) for _ in range(44)} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert other.send(message("t")).status.code == OK
            assert next(other.telemetry(producer_settings("t"))).status.code == OK
            assert refused.empty()
        finally:
            ended.set()
            for call in calls:
                call.cancel()
