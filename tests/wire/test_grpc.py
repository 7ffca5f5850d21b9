"""The service of RocketMQ 5 in front of a broker, call by call."""

from __future__ import annotations

import gzip
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import grpc
import pytest

from librmq import Broker, BrokerBusyError, BrokerError, ConfigError, MessageStore, Producer
from librmq.files import MemoryFiles
from librmq.protocol import CreateTopic, ResponseCode, SendMessage
from librmq.store import verify
from librmq.wire.grpc import GrpcServer
from librmq.wire.grpc._messages import group_queue
from librmq.wire.grpc._protocol import message_class
from tests.budget import many
from tests.wire.stub import Stub, consumer_settings, message, producer_settings, resource, wait_until

OK, NONE = 20000, 40401


@pytest.mark.parametrize("client_type", [5, 6])
def test_consumers_of_lite_topics_are_refused(stub: Stub, client_type: int) -> None:
    with pytest.raises(grpc.RpcError, match="lite topics are not served"):
        next(stub.telemetry(consumer_settings("g", client_type)))


def test_clients_of_all_namespaces_share_topics(stub: Stub, broker: Broker) -> None:
    """As at the proxy, which goes by the name alone."""
    topic = message_class("Resource")(name="t", resource_namespace="tenant-a")
    assert stub.call("QueryRoute", topic=topic).status.code == OK
    sent = message("t")
    sent.topic.resource_namespace = "tenant-b"
    assert stub.send(sent).status.code == OK
    assert [one.body for one in stub.receive("t")[1]] == [b"x"]
    assert "t" in broker.topics()


def test_route_names_the_address_that_was_dialled(stub: Stub, broker: Broker) -> None:
    endpoints = message_class("Endpoints")(scheme=1)
    endpoints.addresses.add(host="10.1.2.3", port=99)
    answer = stub.call("QueryRoute", topic=resource("t"), endpoints=endpoints)
    assert answer.status.code == OK
    assert [queue.id for queue in answer.message_queues] == list(range(broker.config.default_topic_queues))
    assert {queue.permission for queue in answer.message_queues} == {4}
    assert answer.message_queues[0].broker.endpoints == endpoints
    assert "t" in broker.topics()


def test_advertised_address_is_in_routes(broker: Broker) -> None:
    with GrpcServer(broker, advertise="mq.example:8081") as server, Stub(server.address) as stub:
        (address,) = stub.call("QueryRoute", topic=resource("t")).message_queues[0].broker.endpoints.addresses
        assert (address.host, address.port) == ("mq.example", 8081)


def test_every_receipt_has_a_transaction_id(stub: Stub) -> None:
    (entry,) = stub.send(message("t", b"body", "id-1")).entries
    assert (entry.message_id, entry.transaction_id) == ("id-1", "id-1")


def test_unknown_topic_where_none_is_made(broker: Broker) -> None:
    with GrpcServer(broker, auto_create=False) as server, Stub(server.address) as stub:
        assert stub.call("QueryRoute", topic=resource("t")).status.code == 40402
        assert stub.send(message("t")).status.code == 40402


def test_message_is_sent_received_and_acknowledged(stub: Stub, broker: Broker) -> None:
    sent = message("t", b"body", "id-1", tag="a", keys=["k1", "k2"], properties={"color": "red"})
    answer = stub.send(sent)
    assert [(entry.status.code, entry.message_id) for entry in answer.entries] == [(OK, "id-1")]
    code, (found,) = stub.receive("t")
    assert code == OK
    system = found.system_properties
    assert (found.body, found.topic.name, dict(found.user_properties)) == (b"body", "t", {"color": "red"})
    assert (system.tag, list(system.keys), system.message_id, system.message_type) == ("a", ["k1", "k2"], "id-1", 1)
    assert (system.delivery_attempt, system.body_digest.type) == (1, 2)
    assert system.body_digest.checksum == "841A2D689AD86BD1611447453C22C6FC"
    entry = {"message_id": "id-1", "receipt_handle": system.receipt_handle}
    for _ in range(2):
        assert stub.call("AckMessage", group=resource("g"), topic=resource("t"), entries=[entry]).status.code == OK
    assert stub.receive("t") == (NONE, [])
    (stored,) = broker.messages("t")
    assert stored.unique_key == "id-1"


def test_receive_waits_for_a_message(stub: Stub, broker: Broker) -> None:
    stub.call("QueryRoute", topic=resource("t"))
    sending = threading.Timer(0.05, lambda: Producer(broker, "p").start().send("t", b"late"))
    sending.start()
    code, (found,) = stub.receive("t", wait_s=15)
    assert (code, found.body) == (OK, b"late")
    sending.join()


def test_a_close_ends_calls_as_they_usually_do(broker: Broker) -> None:
    """A client can take a stream that is reset for an error of its own, and end."""
    with GrpcServer(broker) as server, Stub(server.address) as stub, ThreadPoolExecutor(1) as threads:
        stream = stub.telemetry(consumer_settings("g", 2))
        next(stream)
        received = threads.submit(stub.receive, "t", wait_s=20, auto_renew=True)
        wait_until(server.is_settled)
        assert server.close()
        assert received.result(60) == (NONE, [])
        assert list(stream) == []


def test_filters_by_tag_and_by_property(stub: Stub) -> None:
    for number, tag in enumerate("ab"):
        stub.send(message("t", tag.encode(), f"id{number}", tag=tag, properties={"n": str(number)}))
    by_tag = message_class("FilterExpression")(type=1, expression="b")
    assert [found.body for found in stub.receive("t", "g1", filter_expression=by_tag)[1]] == [b"b"]
    by_sql = message_class("FilterExpression")(type=2, expression="n < 1")
    code, found = stub.receive("t", "g2", filter_expression=by_sql)
    assert (code, [one.body for one in found]) in ((OK, [b"a"]), (50001, []))  # the store's settings switch this off
    bad = message_class("FilterExpression")(type=2, expression="n >")
    assert stub.receive("t", "g3", filter_expression=bad)[0] in (40010, 50001)


def test_changed_time_makes_it_visible_again(stub: Stub) -> None:
    stub.send(message("t"))
    _, (found,) = stub.receive("t")
    handle = found.system_properties.receipt_handle
    answer = stub.call(
        "ChangeInvisibleDuration",
        group=resource("g"),
        topic=resource("t"),
        receipt_handle=handle,
        invisible_duration=message_class("ChangeInvisibleDurationRequest")().invisible_duration,
    )
    assert (answer.status.code, answer.receipt_handle != "") == (OK, True)
    _, (again,) = stub.receive("t", wait_s=15)
    assert (again.topic.name, again.system_properties.delivery_attempt) == ("t", 2)


def test_forwarded_message_is_a_dead_letter(stub: Stub, broker: Broker) -> None:
    stub.send(message("t", b"bad"))
    _, (found,) = stub.receive("t")
    handle = found.system_properties.receipt_handle
    fields = {"group": resource("g"), "topic": resource("t"), "receipt_handle": handle}
    assert stub.call("ForwardMessageToDeadLetterQueue", **fields).status.code == OK
    assert [letter.body for letter in broker.dead_letters("g")] == [b"bad"]
    assert stub.call("ForwardMessageToDeadLetterQueue", **fields).status.code == 40013


def test_group_of_messages_keeps_to_a_queue(stub: Stub, broker: Broker) -> None:
    stub.send(*(message("t", message_id=f"id{number}", message_group="orders-7") for number in range(5)))
    assert {one.queue_id for one in broker.messages("t")} == {group_queue("orders-7", 8)}


def test_queues_of_message_groups_are_those_of_the_service() -> None:
    """With Guava's consistent hash, one more queue either takes a group over or leaves it where it was."""
    for number in range(200):
        queues = [group_queue(f"group-{number}", count) for count in range(1, 20)]
        assert all(now in (before, count) for count, (before, now) in enumerate(pairwise(queues), 1))


TYPED: dict[str, dict[str, Any]] = {
    "NORMAL": {},
    "FIFO": {"message_group": "g"},
    "DELAY": {"message_type": 3, "deliver_ms": 1},
    "TRANSACTION": {"message_type": 4},
    "PRIORITY": {"message_type": 6, "priority": 1},
}


def test_topic_of_a_type_refuses_other_messages(stub: Stub, broker: Broker) -> None:
    for name, number in zip(TYPED, (1, 2, 3, 4, 6), strict=True):
        broker.create_topic(name, 1, message_type=name)  # type: ignore[arg-type]
        (queue,) = stub.call("QueryRoute", topic=resource(name)).message_queues
        assert list(queue.accept_message_types) == [number]
        codes = [stub.send(message(name, **fields)).status.code for fields in TYPED.values()]
        assert codes == [OK if sent == name else 40014 for sent in TYPED]
        broker.create_topic(name, 2)  # keeps the type
        assert broker.topics()[name].message_type == name
    assert [one.body for one in broker.messages("NORMAL")] == [b"x"]


def test_priorities_cross_the_wire(stub: Stub, broker: Broker) -> None:
    broker.create_topic("t", 3, message_type="PRIORITY")
    for priority in (0, 9, 1):
        assert stub.send(message("t", str(priority).encode(), priority=priority)).status.code == OK
    assert [(one.body, one.queue_id) for one in broker.messages("t")] == [(b"0", 0), (b"9", 2), (b"1", 1)]
    refused = stub.send(message("t", priority=-1)).status
    assert (refused.code, "priority: expected 0 or more, found -1" in refused.message) == (40000, True)
    _, got = stub.receive("t")
    assert [(one.body, one.system_properties.priority) for one in got] == [(b"9", 9), (b"1", 1), (b"0", 0)]
    assert [one.system_properties.message_type for one in got] == [6, 6, 6]
    assert not any(one.user_properties for one in got)


def test_an_unknown_topic_is_created_for_every_type(stub: Stub, broker: Broker) -> None:
    assert list(stub.call("QueryRoute", topic=resource("t")).message_queues[0].accept_message_types) == [1, 2, 3, 4]
    assert broker.topics()["t"].message_type == "MIXED"
    with pytest.raises(BrokerError, match="expected one of NORMAL, FIFO"):
        broker.create_topic("u", message_type="fifo")  # type: ignore[arg-type]


def test_a_topic_that_two_clients_request_is_created_once(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client creates it after the route was read, and the topic keeps that client's queues and type."""
    call = broker.call

    def another_first(request: Any) -> Any:
        if isinstance(request, CreateTopic) and request.unless_exists:
            broker.create_topic("t", 1, message_type="FIFO")
        return call(request)

    with GrpcServer(broker) as server, Stub(server.address) as stub:
        monkeypatch.setattr(broker, "call", another_first)
        (queue,) = stub.call("QueryRoute", topic=resource("t")).message_queues
        assert list(queue.accept_message_types) == [2]


def test_batch_that_fails_midway_reports_stored_messages(
    stub: Stub, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = broker.call

    def busy(request: Any) -> Any:
        if isinstance(request, SendMessage) and request.message.body == b"1":
            raise BrokerBusyError(ResponseCode.SYSTEM_BUSY, "busy")
        return call(request)

    stub.call("QueryRoute", topic=resource("t"))
    monkeypatch.setattr(broker, "call", busy)
    answer = stub.send(*(message("t", str(number).encode(), f"id{number}") for number in range(3)))
    assert answer.status.code == 30000
    assert [(entry.status.code, entry.message_id) for entry in answer.entries] == [
        (OK, "id0"),
        (42900, ""),
        (OK, "id2"),
    ]
    assert sorted(one.body for one in broker.messages("t")) == [b"0", b"2"]
    answer = stub.send(message("t", b"1"))
    assert (answer.status.code, list(answer.entries)) == (42900, [])


def test_a_full_disk_is_named_in_the_answer() -> None:
    files = MemoryFiles()
    files.disk_used_ratio = 0.95
    with Broker.open("/store", files=files) as broker, GrpcServer(broker) as server, Stub(server.address) as stub:
        stub.call("QueryRoute", topic=resource("t"))
        answer = stub.send(message("t"))
        assert (answer.status.code, list(answer.entries)) == (50001, [])
        assert "the disk is 95.0% full" in answer.status.message


def test_transaction_is_committed_or_rolled_back(stub: Stub, broker: Broker) -> None:
    for number, resolution in enumerate((1, 2)):
        (entry,) = stub.send(message("t", str(number).encode(), f"id{number}", message_type=4)).entries
        answer = stub.call(
            "EndTransaction",
            topic=resource("t"),
            message_id=f"id{number}",
            transaction_id=entry.transaction_id,
            resolution=resolution,
        )
        assert answer.status.code == OK
    assert [one.body for one in broker.messages("t")] == [b"0"]
    assert stub.call("EndTransaction", topic=resource("t"), transaction_id="unknown").status.code == 50001
    assert stub.call("EndTransaction", topic=resource("t")).status.code == 40008


def test_a_transaction_with_an_unknown_outcome_can_be_ended_later(stub: Stub, broker: Broker) -> None:
    """A check that comes before the producer has decided takes nothing away from its own commit."""
    (entry,) = stub.send(message("t", message_type=4)).entries
    codes = [
        stub.call(
            "EndTransaction", topic=resource("t"), message_id="id", transaction_id=entry.transaction_id,
            resolution=resolution, source=source,
        ).status.code
        for resolution, source in ((0, 2), (1, 1), (1, 1))
    ]  # fmt: skip
    assert codes == [OK, OK, 50001]
    assert [one.body for one in broker.messages("t")] == [b"x"]


def test_timed_message_can_be_recalled(stub: Stub, broker: Broker) -> None:
    due_ms = broker.runner.now_ms() + 3_600_000
    (entry,) = stub.send(message("t", deliver_ms=due_ms, message_type=3)).entries
    answer = stub.call("RecallMessage", topic=resource("t"), recall_handle=entry.recall_handle)
    assert (answer.status.code, answer.message_id) == (OK, "id")
    assert stub.call("RecallMessage", topic=resource("u"), recall_handle=entry.recall_handle).status.code == 50001
    assert stub.call("RecallMessage", topic=resource("t"), recall_handle="nonsense").status.code == 50001


def test_the_trace_of_a_message_is_kept(stub: Stub, broker: Broker) -> None:
    """As by the proxy, which shows it to users too."""
    assert stub.send(message("t", trace_context="00-4bf9-00f0-01")).status.code == OK
    assert [one.properties["TRACE_CONTEXT"] for one in broker.messages("t")] == ["00-4bf9-00f0-01"]
    (got,) = stub.receive("t")[1]
    assert got.system_properties.trace_context == got.user_properties["TRACE_CONTEXT"] == "00-4bf9-00f0-01"


@many
@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ([], 40016),
        ([message("")], 40002),
        ([message("%SYS^")], 40002),
        ([message("SCHEDULE_TOPIC_XXXX")], 40002),
        ([message("t", b"")], 41302),
        ([message("t", b"x" * ((4 << 20) + 1))], 41301),
        ([message("t", properties={"TAGS": "x"})], 40007),
        ([message("t", properties={"a": "b\n"})], 40007),
        ([message("t", properties={str(number): "" for number in range(129)})], 43101),
        ([message("t", properties={"a": "b" * (16 << 10)})], 43101),
        ([message("t", properties={"é": "é" * (8 << 10)})], 43101),
        ([message("t", tag=" ")], 40004),
        ([message("t", tag="a|b")], 40004),
        ([message("t", keys=[" "])], 40005),
        ([message("t", message_group="")], 40006),
        ([message("t", message_group="g" * 64)], 40006),
        ([message("t", message_id="")], 40009),
        ([message("t", deliver_ms=1 << 45)], 40012),
        ([message("t", lite_topic="chat-1")], 40014),
        ([message("t", message_type=5)], 40014),
        ([message("t", message_type=4, deliver_ms=1 << 40)], 40014),
        ([message("t", b"no gzip", body_encoding=2)], 40016),
        ([message("t", zlib.compress(bytes(range(256)))[:-9], body_encoding=2)], 40016),
        ([message("t", gzip.compress(bytes(range(256)))[:-9], body_encoding=2)], 40016),
    ],
)
def test_refused_message_has_the_code_of_the_service(stub: Stub, broker: Broker, sent: list[Any], code: int) -> None:
    answer = stub.send(*sent)
    assert (answer.status.code, list(answer.entries)) == (code, [])
    assert answer.status.message
    assert list(broker.messages("t")) == []


def test_assignment_is_any_queue_or_each_in_order(stub: Stub, broker: Broker) -> None:
    broker.create_topic("t", 3)
    broker.create_topic("closed", 3, permission=2)
    broker.set_group("in-order", is_ordered=True)
    for group, ids in (("g", [-1]), ("in-order", [0, 1, 2])):
        answer = stub.call("QueryAssignment", topic=resource("t"), group=resource(group))
        assert [one.message_queue.id for one in answer.assignments] == ids
    assert stub.call("QueryAssignment", topic=resource("closed"), group=resource("g")).status.code == 40300


def test_acknowledgements_are_answered_each(stub: Stub) -> None:
    stub.send(message("t"))
    (found,) = stub.receive("t")[1]
    receipts = found.system_properties.receipt_handle, "nonsense"
    entries = [{"message_id": "id", "receipt_handle": one} for one in receipts]
    answer = stub.call("AckMessage", group=resource("g"), topic=resource("t"), entries=entries)
    assert (answer.status.code, [one.status.code for one in answer.entries]) == (30000, [OK, 40013])


def test_received_message_is_of_its_type(stub: Stub, broker: Broker) -> None:
    past_ms = broker.runner.now_ms() - 1
    kinds: list[dict[str, Any]] = [{}, {"message_group": "g"}, {"message_type": 3, "deliver_ms": past_ms}]
    for number, fields in enumerate(kinds):
        stub.send(message("t", b"x", f"id{number}", **fields))
    found: dict[str, Any] = {}
    while len(found) < 3:
        found |= {one.system_properties.message_id: one for one in stub.receive("t", wait_s=5)[1]}
    assert [found[f"id{number}"].system_properties.message_type for number in range(3)] == [1, 2, 3]
    assert found["id1"].system_properties.message_group == "g"
    assert not any(name in one.user_properties for one in found.values() for name in ("UNIQ_KEY", "PGROUP", "KEYS"))


def test_compressed_body_is_stored_unpacked(stub: Stub, broker: Broker) -> None:
    for number, body in enumerate((gzip.compress(b"body"), zlib.compress(b"body"))):
        assert stub.send(message("t", body, f"id{number}", body_encoding=2)).status.code == OK
    assert {one.body for one in broker.messages("t")} == {b"body"}
    assert {one.body for one in stub.receive("t")[1]} == {b"body"}


def test_invisible_times_are_refused_as_by_the_proxy(stub: Stub, broker: Broker) -> None:
    """10 s to 12 h, and from 0 for a change; renewed receives have no time of their own."""
    stub.send(message("t"))
    duration = message_class("ReceiveMessageRequest")().invisible_duration
    for milliseconds, words in (
        (9_999, "the invisibleTime is too small. min is 10000"),
        (43_200_001, "the invisibleTime is too large. max is 43200000"),
    ):
        duration.FromMilliseconds(milliseconds)
        request = message_class("ReceiveMessageRequest")(batch_size=1, invisible_duration=duration)
        request.group.name, request.message_queue.topic.name = "g", "t"
        status = stub.receive_status(request)
        assert (status.code, status.message) == (40011, words)
    duration.FromMilliseconds(10_000)
    _, (found,) = stub.receive("t", invisible_duration=duration)
    for milliseconds, code, words in (
        (-1, 40011, "the invisibleTime is too small. min is 0"),
        (43_200_001, 40011, "the invisibleTime is too large. max is 43200000"),
        (0, OK, "OK"),
    ):
        duration.FromMilliseconds(milliseconds)
        changed = stub.call(
            "ChangeInvisibleDuration",
            group=resource("g"),
            topic=resource("t"),
            receipt_handle=found.system_properties.receipt_handle,
            invisible_duration=duration,
        )
        assert (changed.status.code, changed.status.message) == (code, words)
    with GrpcServer(broker, min_invisible=1) as server, Stub(server.address) as other:
        duration.FromSeconds(1)
        assert other.receive("t", invisible_duration=duration)[0] == OK
    with pytest.raises(ConfigError, match="min_invisible"):
        GrpcServer(broker, min_invisible=0)


def test_a_receive_whose_deadline_is_near_is_refused(stub: Stub, server: GrpcServer, broker: Broker) -> None:
    """In the way that each version of a client knows. A server may be told to take any."""
    request = message_class("ReceiveMessageRequest")(group=resource("g"))
    request.message_queue.topic.name = "t"
    request.invisible_duration.FromSeconds(10)
    request.long_polling_timeout.FromMilliseconds(1)
    assert stub.receive_status(request, 4.9).code == 40000
    with Stub(server.address, x_mq_client_version="5.1.2") as newer:
        refused = newer.receive_status(request, 4.9)
        assert (refused.code, "expected 5 s or more" in refused.message) == (40018, True)
        assert newer.receive_status(request, 10).code == NONE
    with GrpcServer(broker, min_polling=0) as lenient, Stub(lenient.address) as other:
        assert other.receive_status(request, 4.9).code == NONE
    with pytest.raises(ConfigError, match="min_polling"):
        GrpcServer(broker, min_polling=-1)


def test_names_without_room_for_a_retry_topic_are_refused_where_the_group_subscribes(
    stub: Stub, broker: Broker
) -> None:
    group, topic = "g" * 60, "t" * 60
    asked = {"topic": resource(topic), "group": resource(group)}
    refused = stub.call("QueryAssignment", **asked)
    assert refused.status.code == 40003
    assert "together have more than 119 bytes" in refused.status.message
    settings = consumer_settings(group)
    settings.subscription.subscriptions.add().topic.name = topic
    with pytest.raises(grpc.RpcError, match="together have more than 119 bytes"):
        next(stub.telemetry(settings))
    broker.set_group(group, is_ordered=True)
    assert stub.call("QueryAssignment", **asked).status.code == OK


def test_refused_receives_have_the_code_of_the_service(stub: Stub) -> None:
    stub.send(message("t"))
    assert stub.receive("t", "CID_RMQ_SYS_x")[0] == 40003
    assert stub.receive("t", "a group")[0] == 40003
    assert stub.receive("SCHEDULE_TOPIC_XXXX")[0] == 40002
    sent = message("t", message_type=4)
    sent.system_properties.orphaned_transaction_recovery_duration.FromSeconds(3601)
    assert stub.send(sent).status.code == 40000


def test_call_without_a_client_id_is_refused(server: GrpcServer) -> None:
    with Stub(server.address, "") as stub:
        assert stub.call("QueryRoute", topic=resource("t")).status.code == 40017


def test_heartbeat_wants_settings_first(stub: Stub, server: GrpcServer) -> None:
    assert stub.call("Heartbeat", client_type=1).status.code == 40015
    answers = stub.telemetry(producer_settings("t"))
    assert next(answers).status.code == OK
    assert stub.call("Heartbeat", client_type=1).status.code == OK
    assert server.clients == 1
    assert stub.call("NotifyClientTermination").status.code == OK
    assert list(answers) == []
    assert server.clients == 0


def test_settings_are_completed(stub: Stub) -> None:
    settings = next(stub.telemetry(consumer_settings("g", 2))).settings
    assert settings.subscription.long_polling_timeout.seconds == 20
    delays = [delay.seconds for delay in settings.backoff_policy.customized_backoff.next]
    assert (settings.backoff_policy.max_attempts, delays[:4], len(delays)) == (17, [1, 5, 10, 30], 18)
    assert (settings.metric.on, settings.subscription.fifo) == (False, False)


def test_settings_are_those_of_the_group(stub: Stub, broker: Broker) -> None:
    broker.set_group("g", retry_max_times=3, is_ordered=True)
    settings = next(stub.telemetry(consumer_settings("g", 2))).settings
    assert (settings.backoff_policy.max_attempts, settings.subscription.fifo) == (4, True)


def test_settings_of_a_producer_are_completed(stub: Stub) -> None:
    settings = next(stub.telemetry(producer_settings("t"))).settings
    assert (settings.publishing.max_body_size, settings.publishing.validate_message_type) == (4 << 20, True)
    assert settings.backoff_policy.max_attempts == 3


@pytest.mark.parametrize(("version", "is_on"), [("5.1.0", True), ("5.0.9", True), ("5.1.1", False), ("5.1.2", False)])
def test_old_python_push_consumers_are_asked_to_measure(server: GrpcServer, version: str, is_on: bool) -> None:
    settings = consumer_settings("g", 2)
    settings.user_agent.language = 6
    with Stub(server.address, x_mq_client_version=version) as stub:
        assert next(stub.telemetry(settings)).settings.metric.on is is_on


def test_node_gets_delays_that_it_knows(stub: Stub) -> None:
    settings = consumer_settings("g", 2)
    settings.user_agent.language = 8
    policy = next(stub.telemetry(settings)).settings.backoff_policy
    assert policy.WhichOneof("strategy") == "exponential_backoff"


def test_node_gets_its_settings_twice(stub: Stub) -> None:
    """The client drops them while it asks for the routes of its topics, and would then wait for minutes."""
    settings = producer_settings("t", "u")
    settings.user_agent.language = 8
    answers = stub.telemetry(settings)
    assert next(answers) == next(answers)


def test_settings_that_say_nothing_end_the_stream(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        next(stub.telemetry(message_class("Settings")()))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_unknown_call_is_unimplemented(stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        stub.raw("PullMessage", b"")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_two_servers_do_not_share_a_port(server: GrpcServer, broker: Broker) -> None:
    with pytest.raises(ConfigError, match="can't listen on"):
        GrpcServer(broker, port=server.port)


@pytest.mark.parametrize("port", [-1, 65_536, 99_999, "8081 "])
def test_a_port_that_does_not_exist_is_refused(broker: Broker, port: Any) -> None:
    with pytest.raises(ConfigError, match="port: expected 0 to 65535, found"):
        GrpcServer(broker, port=port)
    with pytest.raises(ConfigError, match="advertise: expected host:port"):
        GrpcServer(broker, advertise=f"mq.example:{port}")


def test_store_written_over_the_wire_is_sound(tmp_path: Any) -> None:
    with Broker.open(tmp_path / "s") as broker, GrpcServer(broker) as server, Stub(server.address) as stub:
        stub.send(*(message("t", message_id=f"id{number}") for number in range(20)))
        stub.receive("t")
    assert not verify(tmp_path / "s").damage
    with MessageStore.open(tmp_path / "s", read_only=True) as store:
        assert len(list(store)) == 20
