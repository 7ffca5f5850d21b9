"""Bodies: the JSON of requests and answers, without spaces, and with objects as keys where Java needs them.

What reads a body, or a part of one, raises `MalformedError` if it can't.

Mirrors ``RemotingSerializable`` and the classes of ``org.apache.rocketmq.common.protocol.body``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from json.encoder import encode_basestring
from typing import Any, Final

from librmq.errors import FilterSyntaxError, MalformedError, RecordError
from librmq.filter import TAG, TagFilter
from librmq.java import json as java_json
from librmq.message import MessageQueue, StoredMessage, StoredRecords, record
from librmq.message.batch import inner_messages
from librmq.protocol import (
    ConsumeFrom,
    ConsumerData,
    GroupConnections,
    Heartbeat,
    MessageModel,
    QueueData,
    Subscription,
)
from librmq.store.format.documents import RecordIdentity

MOST_REQUEST_BYTES: Final = 4 << 20
MOST_REQUEST_ELEMENTS: Final = 200_000
"""Values in the body of a request. A heartbeat of a thousand groups has some ten thousand."""
MOST_RECORD_BYTES: Final = 15 << 20
"""Records in the body of an answer, which a frame holds beside its header."""
_MOST_QUEUES: Final = 100_000
"""Of a topic, and in each number of a route."""
_PULLS = ("CONSUME_ACTIVELY", 0)
_KIND, _SIMPLE = "librmqKind", "simple"
_REDELIVERIES: Final = "librmqMaxReconsumeTimes"
_ANSWERS_CHECKS: Final = "librmqAnswersChecks"
"""Members of librmq's own, which brokers of RocketMQ ignore: of consumers that receive, of push consumers, and of
producers."""
_BROADCASTS = ("BROADCASTING", 0)
_FIRST = ("CONSUME_FROM_FIRST_OFFSET", 4)
_TIMESTAMP = ("CONSUME_FROM_TIMESTAMP", 5)


_encode: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def write_body(value: object) -> bytes:
    """Return a body. Keys of type `ObjectKey` are written as objects, numbers as quoted keys."""
    try:
        text = _encode(value)
    except TypeError:  # an `ObjectKey`, or another mapping than a dict
        text = _text(value)
    return text.encode("utf-8", "replace")


def _text(value: object) -> str:
    if type(value) is str:
        return encode_basestring(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_key(key)}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _key(key: object) -> str:
    return _text(dict(key) if isinstance(key, java_json.ObjectKey) else str(key))


def records_body(messages: Iterable[StoredMessage]) -> bytes:
    """Return messages as their records in the log, one after the other."""
    return b"".join(StoredRecords.raw_records(messages))


def fitting(messages: Iterable[StoredMessage]) -> list[StoredMessage]:
    """Return the first messages, as many as one frame holds, and at least one if there is any."""
    size, first = 0, list[StoredMessage]()
    for message in messages:
        size += message.size
        if first and size > MOST_RECORD_BYTES:
            break
        first.append(message)
    return first


def read_request(body: bytes, what: str) -> dict[str, Any]:
    """Return the object in the body of a client's request, which is bounded: a few bytes can become many objects.

    The error names ``what``.
    """
    elements = sum(map(body.count, (b",", b"{", b"[")))
    if len(body) > MOST_REQUEST_BYTES or elements > MOST_REQUEST_ELEMENTS:
        raise MalformedError(
            f"the body of {what} has {len(body):,} bytes and some {elements:,} elements: expected at most "
            f"{MOST_REQUEST_BYTES:,} and {MOST_REQUEST_ELEMENTS:,}"
        )
    return read_body(body, what)


def read_body(body: bytes, what: str) -> dict[str, Any]:
    """Return the object in a body; the error names ``what``."""
    try:
        parsed = java_json.loads(body)
    except (MalformedError, RecursionError) as error:
        raise MalformedError(f"the body of {what}: {error}") from None
    if not isinstance(parsed, dict):
        raise MalformedError(f"the body of {what}: expected an object, found {type(parsed).__name__}")
    return parsed


def messages_of(body: bytes) -> tuple[StoredMessage, ...]:
    messages, at, end = [], 0, len(body)
    while at < end:
        try:
            size = record.check_record(body, at, end, check_body=False)
        except RecordError as error:
            raise MalformedError(f"a body of messages: at byte {at}: {error}") from None
        if not size:
            raise MalformedError(f"a body of messages: at byte {at}: expected a record, found the end of a file")
        messages.append(StoredMessage(body[at : at + size]))
        at += size
    return tuple(messages)


def unwrapped(stored: StoredMessage) -> list[StoredMessage]:
    """Return the messages of a record: a broker sends a batch of a topic with queues of batches as one."""
    try:
        return inner_messages(stored)
    except RecordError as error:
        raise MalformedError(
            f"a batch of topic {stored.topic!r:.80} at queue offset {stored.queue_offset}: {error}"
        ) from error


# ---- members of an object


def text_in(row: object, name: str) -> str:
    text = row.get(name) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise MalformedError(f"{name}: expected text, found {text!r:.80} in {row!r:.160}")
    return text


def number_in(row: object, name: str) -> int:
    number = row.get(name) if isinstance(row, dict) else None
    if type(number) is not int:
        raise MalformedError(f"{name}: expected a whole number, found {number!r:.80} in {row!r:.160}")
    return number


def rows_in(table: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the objects of a list in an object; none if it is missing."""
    rows = table.get(name) or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MalformedError(f"{name}: expected a list of objects, found {rows!r:.80}")
    return rows


def letters_in(body: Mapping[str, Any]) -> tuple[RecordIdentity, ...]:
    """Return the dead letters that an object names."""
    try:
        rows = body["letters"]
        return tuple(RecordIdentity(int(place), str(name), int(stored_ms)) for place, name, stored_ms in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedError(f"letters: expected place, id and store time of each dead letter: {error!r:.80}") from None


def table_in(body: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    """Return the objects of a table in an object, by their names; none if it is missing."""
    rows = body.get(name) or {}
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise MalformedError(f"{name}: expected an object of objects, found {rows!r:.80}")
    return {str(key): row for key, row in rows.items()}


def numbers_in(body: Mapping[str, Any], name: str) -> dict[int, int]:
    """Return the numbers of a table in an object, by the number that each has as its key; none if it is missing."""
    rows = body.get(name) or {}
    if not isinstance(rows, dict) or not all(str(key).isdecimal() and type(row) is int for key, row in rows.items()):
        raise MalformedError(f"{name}: expected an object of numbers by number, found {rows!r:.80}")
    return {int(key): number for key, number in rows.items()}


# ---- queues


def queue_row(queue: MessageQueue) -> dict[str, Any]:
    """Return a queue as Java writes it."""
    return {"brokerName": queue.broker_name, "queueId": queue.queue_id, "topic": queue.topic}


def queue_key(queue: MessageQueue) -> java_json.ObjectKey:
    return java_json.ObjectKey(queue_row(queue).items())


def queues_of(rows: object) -> frozenset[MessageQueue]:
    if not isinstance(rows, list):
        raise MalformedError(f"expected a list of queues, found {rows!r:.80}")
    return frozenset(_queue_of(row) for row in rows)


def by_queue(table: object) -> list[tuple[MessageQueue, Any]]:
    """Return the rows of a table by queue, whose keys are objects."""
    if not isinstance(table, dict):
        raise MalformedError(f"expected a table by queue, found {table!r:.80}")
    return [(_queue_of(dict(key) if isinstance(key, tuple) else key), row) for key, row in table.items()]


def offsets_of(table: object) -> dict[MessageQueue, int]:
    """Return a table of queue offsets, with objects or arrays of pairs as in Java's answers."""
    if isinstance(table, list):
        return {_queue_of(row): number_in(row, "offset") for row in table}
    offsets = by_queue(table)
    for queue, offset in offsets:
        if type(offset) is not int:
            raise MalformedError(f"{queue}: expected a queue offset, found {offset!r:.80}")
    return dict(offsets)


def _queue_of(row: object) -> MessageQueue:
    if isinstance(row, dict):
        topic, broker, queue_id = row.get("topic"), row.get("brokerName"), row.get("queueId")
        if isinstance(topic, str) and isinstance(broker, str) and type(queue_id) is int:
            return MessageQueue(topic, broker, queue_id)
    raise MalformedError(f"expected a queue with topic, brokerName and queueId, found {row!r:.80}")


# ---- routes


def broker_row(name: str, cluster: str, addresses: Mapping[int, str]) -> dict[str, Any]:
    """Return a broker with its addresses by broker id, as a name server writes it."""
    by_id = {str(broker_id): address for broker_id, address in addresses.items()}
    return {"brokerAddrs": by_id, "brokerName": name, "cluster": cluster}


def broker_addresses(table: object) -> dict[str, dict[int, str]]:
    """Return the addresses of brokers by their names and ids, from a table of their rows."""
    if not isinstance(table, dict):
        raise MalformedError(f"expected a table of brokers, found {table!r:.80}")
    by_name: dict[str, dict[int, str]] = {}
    for name, row in table.items():
        addresses = row.get("brokerAddrs") if isinstance(row, dict) else None
        if not isinstance(addresses, dict):
            raise MalformedError(f"broker {name!r:.80}: expected brokerAddrs, found {row!r:.80}")
        for key, address in addresses.items():
            if not str(key).isdecimal():
                raise MalformedError(f"broker {name!r:.80}: expected a broker id, found {key!r:.80}")
            if not isinstance(address, str) or not address.rpartition(":")[2].isdecimal():
                raise MalformedError(f"broker {name!r:.80}: expected host:port, found {address!r:.80}")
            by_name.setdefault(str(name), {})[int(key)] = address
    return by_name


def route_body(brokers: Iterable[Mapping[str, Any]], queues: Iterable[QueueData]) -> bytes:
    """Return the body of a route: the rows of its brokers, and the queues at each."""
    rows = [
        {
            "brokerName": data.broker_name,
            "perm": data.permission,
            "readQueueNums": data.read_queues,
            "topicSysFlag": 0,
            "writeQueueNums": data.write_queues,
        }
        for data in queues
    ]
    return write_body({"brokerDatas": list(brokers), "filterServerTable": {}, "queueDatas": rows})


def route_of(body: Mapping[str, Any]) -> tuple[dict[str, dict[int, str]], list[QueueData]]:
    """Return the addresses of a route's brokers by name and id, and the queues at each."""
    brokers = broker_addresses({str(row.get("brokerName")): row for row in rows_in(body, "brokerDatas")})
    data = [queue_data_of(text_in(row, "brokerName"), row) for row in rows_in(body, "queueDatas")]
    if sum(max(queue_data.read_queues, queue_data.write_queues) for queue_data in data) > _MOST_QUEUES:
        raise MalformedError(f"queueDatas: expected at most {_MOST_QUEUES:,} queues")
    return brokers, data


def queue_data_of(broker_name: str, row: Mapping[str, Any]) -> QueueData:
    """Return the queues of a topic at a broker, from a row of a route or of the broker's topics."""
    read, write, permission = (number_in(row, name) for name in ("readQueueNums", "writeQueueNums", "perm"))
    if not all(0 <= number <= _MOST_QUEUES for number in (read, write, permission)):
        raise MalformedError(f"expected 0 to {_MOST_QUEUES:,} queues, found {row!r:.200}")
    return QueueData(broker_name, read, write, permission)


# ---- heartbeats


def heartbeat_of(body: bytes) -> tuple[str, frozenset[str], tuple[ConsumerData, ...], frozenset[str] | None]:
    """Return the fields of a `Heartbeat` without its client: id (empty without groups) and groups of three kinds."""
    heartbeat = read_request(body, "a heartbeat")
    client_id = heartbeat.get("clientID") or ""
    producers = {text_in(row, "groupName"): row.get(_ANSWERS_CHECKS) for row in rows_in(heartbeat, "producerDataSet")}
    checking = None if None in producers.values() else frozenset(group for group in producers if producers[group])
    consumers = tuple(
        _consumer_of(text_in(row, "groupName"), row, map(subscription_of, rows_in(row, "subscriptionDataSet")))
        for row in rows_in(heartbeat, "consumerDataSet")
    )
    if not isinstance(client_id, str) or (not client_id and (producers or consumers)):
        raise MalformedError(f"a heartbeat: expected clientID, text, found {client_id!r:.80}")
    return client_id, frozenset(producers), consumers, checking


def _consumer_of(group: str, row: Mapping[str, Any], subscriptions: Iterable[Subscription]) -> ConsumerData:
    begin = row.get("consumeFromWhere")
    return ConsumerData(
        group,
        _SIMPLE if row.get(_KIND) == _SIMPLE else "pull" if row.get("consumeType") in _PULLS else "push",
        MessageModel.BROADCASTING if row.get("messageModel") in _BROADCASTS else MessageModel.CLUSTERING,
        ConsumeFrom.FIRST if begin in _FIRST else ConsumeFrom.TIMESTAMP if begin in _TIMESTAMP else ConsumeFrom.LAST,
        {subscription.topic: subscription for subscription in subscriptions},
        *((number_in(row[_REDELIVERIES], name) for name in ("times", "setTimestamp")) if _REDELIVERIES in row else ()),
    )


def _consumer_row(data: ConsumerData | GroupConnections, *, is_active: bool) -> dict[str, Any]:
    return {
        "consumeFromWhere": data.consume_from.value,
        "consumeType": _PULLS[0] if is_active else "CONSUME_PASSIVELY",
        "messageModel": data.model.value,
    }


def heartbeat_body(heartbeat: Heartbeat) -> bytes:
    """Return the body of a heartbeat, as `heartbeat_of` reads it."""
    consumers = [
        {
            **_consumer_row(data, is_active=data.kind == "pull"),
            **({_KIND: _SIMPLE} if data.kind == _SIMPLE else {}),
            **({} if times is None else {_REDELIVERIES: {"times": times, "setTimestamp": data.set_timestamp_ms}}),
            "groupName": data.group,
            "subscriptionDataSet": [subscription_row(subscription) for subscription in data.subscriptions.values()],
            "unitMode": False,
        }
        for data in heartbeat.consumers
        for times in (data.max_reconsume_times,)
    ]
    checking = heartbeat.checking_groups
    producers = [
        {"groupName": group, **({} if checking is None else {_ANSWERS_CHECKS: group in checking})}
        for group in sorted(heartbeat.producer_groups)
    ]
    return write_body({"clientID": heartbeat.client_id, "consumerDataSet": consumers, "producerDataSet": producers})


# ---- clients of a group


def group_clients_body(members: GroupConnections, connections: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the body with a group as its clients describe it, and the rows of their connections."""
    subscriptions = {topic: subscription_row(subscription) for topic, subscription in members.subscriptions.items()}
    row = _consumer_row(members, is_active=members.kind != "push")
    return write_body({"connectionSet": list(connections), **row, "subscriptionTable": subscriptions})


def group_clients_of(group: str, body: Mapping[str, Any]) -> GroupConnections:
    """Return a group as its clients describe it, each with the subscriptions of all."""
    ids = tuple(text_in(row, "clientId") for row in rows_in(body, "connectionSet"))
    data = _consumer_of(group, body, map(subscription_of, table_in(body, "subscriptionTable").values()))
    by_client = dict.fromkeys(ids, data.subscriptions)
    return GroupConnections(group, data.kind, data.model, data.consume_from, data.subscriptions, ids, by_client)


# ---- subscriptions


def subscription_of(row: object) -> Subscription:
    if not isinstance(row, dict) or not isinstance(row.get("topic"), str):
        raise MalformedError(f"expected a subscription with a topic, found {row!r:.80}")
    try:
        version = int(row.get("subVersion") or 0)
    except (TypeError, ValueError):
        raise MalformedError(f"subVersion: expected a whole number, found {row['subVersion']!r:.80}") from None
    expression, kind = row.get("subString") or "*", row.get("expressionType") or "TAG"
    return Subscription(row["topic"], str(expression), str(kind), version)


def subscription_row(subscription: Subscription) -> dict[str, Any]:
    """Return a subscription as Java writes it. A broker selects tags by their codes."""
    tags: TagFilter | None = None
    if subscription.expression_type == TAG:
        with suppress(FilterSyntaxError):  # it selects nothing
            tags = TagFilter(subscription.expression)
    return {
        "classFilterMode": False,
        "codeSet": [] if tags is None else sorted(tags.codes),
        "expressionType": subscription.expression_type,
        "subString": subscription.expression,
        "subVersion": subscription.version,
        "tagsSet": [] if tags is None else sorted(tags.tags),
        "topic": subscription.topic,
    }
