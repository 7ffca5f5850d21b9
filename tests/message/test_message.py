"""Messages to be sent."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest

from librmq.errors import MessageIllegalError
from librmq.message.message import Message, MessageQueue
from librmq.message.properties import RESERVED_PROPERTIES, encode_properties
from librmq.message.topics import NOT_FOR_SENDING, is_system_topic, validate_client_topic, validate_topic


def test_all_but_topic_body_and_flag_are_ordered_properties() -> None:
    message = Message(
        "T",
        b"body",
        tags="TagA",
        keys=("k1", "k2"),
        properties={"z": "1", "a": "2"},
        delay_level=3,
        wait_store_ok=False,
        flag=7,
        unique_key="0A0B",
    )
    assert list(message.properties.items()) == [
        ("z", "1"),
        ("a", "2"),
        ("TAGS", "TagA"),
        ("KEYS", "k1 k2"),
        ("UNIQ_KEY", "0A0B"),
        ("DELAY", "3"),
        ("WAIT", "false"),
    ]
    assert (message.topic, message.body, message.flag) == ("T", b"body", 7)
    assert (message.tags, message.keys, message.unique_key) == ("TagA", ("k1", "k2"), "0A0B")
    assert (message.delay_level, message.wait_store_ok) == (3, False)


def test_a_bare_message_has_no_properties() -> None:
    message = Message("T", b"")
    assert (message.body, message.flag, message.properties) == (b"", 0, {})
    assert (message.tags, message.keys, message.unique_key) == (None, (), None)
    assert (message.delay_level, message.wait_store_ok) == (0, True)
    assert Message("T", b"", tags="", keys="", unique_key="", properties={}) == message
    assert Message("T", b"", wait_store_ok=True).properties == {"WAIT": "true"}


def test_keys_as_text_or_one_by_one() -> None:
    assert Message("T", b"", keys="k1").keys == ("k1",)
    assert Message("T", b"", keys=["k1"]).keys == ("k1",)
    assert Message("T", b"", keys=(key for key in ("k1", "k2"))).properties == {"KEYS": "k1 k2"}


def test_the_users_properties_are_copied() -> None:
    properties = {"a": "1"}
    message = Message("T", b"", properties=properties)
    message.properties["b"] = "2"
    assert properties == {"a": "1"}


def test_bodies_of_other_kinds_become_bytes() -> None:
    for body in (bytearray(b"x"), memoryview(b"x")):
        assert type(Message("T", body).body) is bytes
    assert Message("T", "grüße").body == "grüße".encode()


def test_a_json_value_instead_of_a_body() -> None:
    value = {"name": "grüße", "numbers": [1, 2.5, None]}
    message = Message("T", json=value)
    assert message.body == '{"name":"grüße","numbers":[1,2.5,null]}'.encode()
    assert json.loads(message.body) == value
    assert Message("T", json=None).body == b"null"


def test_a_time_to_wait_for() -> None:
    assert Message("T", b"").delay_s is Message("T", b"").deliver_at_ms is None
    assert Message("T", b"", delay=timedelta(minutes=1)).delay_s == Message("T", b"", delay=60).delay_s == 60
    at = datetime(2030, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))
    assert Message("T", b"", deliver_at=at).deliver_at_ms == 1_893_456_000_000
    assert Message("T", b"", delay=1) != Message("T", b"")
    assert "delay_s=1" in repr(Message("T", b"", delay=1))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"body": 1}, "body: expected bytes or text, or a value for json, found int"),
        ({"body": None}, "body: expected bytes or text, or a value for json, found none"),
        ({"body": "\ud800"}, "body: the text can't be written as UTF-8"),
        ({"body": b"x", "json": 1}, "body: expected either a body or json, found both"),
        ({"body": "x", "json": 1}, "body: expected either a body or json, found both"),
        ({"json": object()}, "can't be written as JSON"),
        ({"json": float("nan")}, "can't be written as JSON"),
        ({"json": "\ud800"}, "can't be written as JSON"),
        ({"delay": -1}, "delay: expected seconds or a timedelta"),
        ({"delay": "1"}, "delay: expected seconds or a timedelta"),
        (
            {"deliver_at": datetime(2030, 1, 1)},
            "found datetime.datetime(2030, 1, 1, 0, 0), which has none: pass tzinfo=UTC",
        ),
        ({"deliver_at": 1}, "deliver_at: expected a datetime with a time zone, found 1; give a duration as delay"),
        ({"delay": 1, "delay_level": 1}, "expected one of them, found several"),
        ({"tags": 5}, "property 'TAGS': expected text, found 5"),
        ({"tags": "a\x01b"}, "property 'TAGS': 01 and 02"),
        ({"keys": "a\x02b"}, "property 'KEYS': 01 and 02"),
        ({"keys": ["a", "b c"]}, "keys: 'b c' is empty or has whitespace"),
        ({"keys": ["a", ""]}, "keys: '' is empty or has whitespace"),
        ({"keys": "Ann Miller"}, "pass several keys as a list, such as ['Ann', 'Miller']"),
        ({"keys": "Ann\u00a0Miller"}, "has whitespace"),
        ({"keys": " "}, "has whitespace"),
        ({"keys": [1]}, "keys: expected strings"),
        ({"keys": 5}, "keys: expected strings"),
        ({"keys": b"k"}, "keys: expected strings"),
        ({"unique_key": b"0A"}, "property 'UNIQ_KEY': expected text"),
        ({"unique_key": "\x01"}, "property 'UNIQ_KEY': 01 and 02"),
        ({"flag": 2**31}, "flag: expected a whole number of 32 bits"),
        ({"flag": "1"}, "flag: expected a whole number of 32 bits"),
        ({"delay_level": 1.5}, "delay_level: expected a whole number of 32 bits"),
        ({"delay_level": -(2**31) - 1}, "delay_level: expected a whole number of 32 bits"),
        ({"properties": [1]}, "properties: expected strings by name"),
        ({"properties": 5}, "properties: expected strings by name"),
        ({"properties": {"a": 1}}, "property 'a': expected text, found 1"),
        ({"properties": {1: "a"}}, "property 1: expected text, found 1"),
        ({"properties": {b"a": "1"}}, "property b'a': expected text"),
        ({"properties": {"a": None}}, "property 'a': expected text, found None"),
        ({"properties": {"": "1"}}, "property '': name or value is blank"),
        ({"properties": {"a": " \t"}}, "property 'a': name or value is blank"),
        ({"properties": {"a\x01": "1"}}, "01 and 02 separate properties"),
        ({"properties": {"a": "1\x02b\x012"}}, "property 'a': 01 and 02 separate properties"),
        ({"properties": {"a": "1", "WAIT": "true"}}, "WAIT is not for users"),
        ({"properties": {"UNIQ_KEY": "1", "TAGS": "a"}}, "TAGS, UNIQ_KEY is not for users"),
    ],
)
def test_values_that_cannot_be_stored_are_refused(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(MessageIllegalError) as caught:
        Message("T", **({"body": b""} if arguments.keys().isdisjoint({"body", "json"}) else {}), **arguments)  # type: ignore[arg-type]
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES))
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(MessageIllegalError, match="is not for users"):
        Message("T", b"", properties={name: "1"})


def test_names_that_rocketmq_leaves_to_users() -> None:
    properties = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "30", "TRANSACTION_CHECK_TIMES": "1"}
    assert Message("T", b"", properties=properties).properties == properties


def test_a_message_is_compared_by_value_and_has_no_hash() -> None:
    assert Message("T", b"x", tags="a") == Message("T", b"x", tags="a")
    assert Message("T", b"x", tags="a") != Message("T", b"x", tags="b")
    assert Message("T", b"") != "T"
    with pytest.raises(TypeError):
        hash(Message("T", b""))


def test_long_bodies_are_cut_when_shown() -> None:
    assert repr(Message("T", b"x")) == "Message('T', b'x')"
    assert "(1,000,000 bytes)" in repr(Message("T", bytes(1_000_000)))
    assert len(repr(Message("T", bytes(1_000_000)))) < 400


def test_a_keyword_that_a_message_does_not_take_is_named() -> None:
    with pytest.raises(TypeError, match=r"tag: unknown keyword of a message; did you mean tags\?"):
        Message("T", b"x", tag="a")  # type: ignore[call-arg]


def test_a_property_that_is_not_unicode_is_named() -> None:
    for properties in ({"a": "1", "b": "\ud800"}, {"a": "1", "b\ud800": "1"}):
        with pytest.raises(MessageIllegalError, match=r"^property 'b.* cannot be written as UTF-8: surrogates"):
            encode_properties(properties)


# Message queues as values, and their order.


def test_a_queue_is_a_value() -> None:
    queue = MessageQueue("T", "broker-a", 3)
    assert str(queue) == "MessageQueue [topic=T, brokerName=broker-a, queueId=3]"
    assert queue == MessageQueue("T", "broker-a", 3)
    assert len({queue, MessageQueue("T", "broker-a", 3), MessageQueue("T", "broker-a", 4)}) == 2
    assert queue.java_hash == 1680488765


# Names of topics: which are valid, and which belong to the broker.


@pytest.mark.parametrize("topic", ["T", "a b", "中文", "T" * 127, "中" * 42, "...", "%RETRY%g", "a\\b", "rmq_sys_x"])
def test_topics_of_a_store(topic: str) -> None:
    validate_topic(topic)


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "/", "a\0", "T" * 128, "中" * 43, "\ud800", None, 5, b"T"])
def test_no_topics(topic: str) -> None:
    for validate in (validate_topic, validate_client_topic):
        with pytest.raises(MessageIllegalError, match="topic"):
            validate(topic)


@pytest.mark.parametrize("topic", ["a b", "中文", "a.b", "T\n", "a+b", "...", "²"])
def test_clients_are_stricter(topic: str) -> None:
    validate_topic(topic)
    with pytest.raises(MessageIllegalError, match="may only contain"):
        validate_client_topic(topic)


def test_topics_of_the_broker_are_system_topics() -> None:
    assert all(is_system_topic(topic) for topic in NOT_FOR_SENDING)
    assert not is_system_topic("%RETRY%g")
