"""Recorded requests as those of `librmq.protocol`, so that a client can send them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from librmq import Message, MessageQueue, protocol
from librmq.java import json as java_json
from librmq.message.batch import decode_batch
from librmq.message.properties import decode_properties

HOST: Final = ("127.0.0.1", 1)
NAMES: Final = (
    "producerGroup topic defaultTopic defaultTopicQueueNums queueId sysFlag bornTimestamp flag properties "
    "reconsumeTimes unitMode maxReconsumeTimes batch"
)
LETTERS: Final = dict(zip("abcdefghijklm", NAMES.split(), strict=True))


def of_type(kind: type[Any], text: str | None, default: Any = None) -> Any:
    return default if text is None else text == "true" if kind is bool else kind(text)


def send_of(fields: Mapping[str, str], body: bytes) -> protocol.Request[Any]:
    named = {LETTERS.get(name, name): value for name, value in fields.items()}
    properties = decode_properties(named.get("properties", ""))
    born_ms, queue_id = int(named["bornTimestamp"]), int(named["queueId"])
    if of_type(bool, named.get("batch")):
        messages = tuple(
            Message.from_parts(named["topic"], one.body, one.flag, decode_properties(one.properties_raw))
            for one in decode_batch(body)
        )
        if not messages:
            raise ValueError("no client sends a batch without messages")
        queues = int(named["defaultTopicQueueNums"])
        return protocol.SendBatch(named["producerGroup"], messages, queue_id, born_ms, HOST, queues)
    return protocol.SendMessage(
        named["producerGroup"],
        Message.from_parts(named["topic"], body, int(named["flag"]), properties),
        queue_id,
        born_ms,
        HOST,
        int(named["sysFlag"]),
        int(named["defaultTopicQueueNums"]),
        int(named.get("reconsumeTimes", "0")),
        of_type(int, named.get("maxReconsumeTimes")),
    )


def queues_in(rows: Any) -> frozenset[MessageQueue]:
    return frozenset(MessageQueue(row["topic"], row["brokerName"], row["queueId"]) for row in map(dict, rows))


def subscription_of(row: Mapping[str, Any]) -> protocol.Subscription:
    return protocol.Subscription(row["topic"], row["subString"], row["expressionType"], row["subVersion"])


def group_of(row: Mapping[str, Any]) -> protocol.SetGroup:
    return protocol.SetGroup(row["groupName"], {name: value for name, value in row.items() if name != "groupName"})


def pull_of(f: Mapping[str, str], _: bytes) -> protocol.PullMessage:
    subscription = None
    if int(f["sysFlag"]) & 4:
        subscription = protocol.Subscription(f["topic"], f.get("subscription", ""), f.get("expressionType", "TAG"), 0)
    place = f["topic"], int(f["queueId"]), int(f["queueOffset"]), int(f["maxMsgNums"])
    return protocol.PullMessage("c", f["consumerGroup"], *place, subscription)


Build = Callable[[Mapping[str, str], bytes], protocol.Request[Any]]
REQUESTS: Final[dict[str, tuple[Build, protocol.Request[Any]]]] = {
    "SEND_MESSAGE": (send_of, protocol.SendMessage("p", Message("t", b"x"), 0, 1, HOST)),
    "SEND_MESSAGE_V2": (send_of, protocol.SendMessage("p", Message("t", b"x"), 0, 1, HOST)),
    "SEND_BATCH_MESSAGE": (send_of, protocol.SendBatch("p", (Message("t", b"x"),), 0, 1, HOST)),
    "PULL_MESSAGE": (pull_of, protocol.PullMessage("c", "g", "t", 0, 0)),
    "QUERY_CONSUMER_OFFSET": (
        lambda f, _: protocol.QueryOffset(f["consumerGroup"], f["topic"], int(f["queueId"])),
        protocol.QueryOffset("g", "t", 0),
    ),
    "UPDATE_CONSUMER_OFFSET": (
        lambda f, _: protocol.UpdateOffset(f["consumerGroup"], f["topic"], int(f["queueId"]), int(f["commitOffset"])),
        protocol.UpdateOffset("g", "t", 0, 1),
    ),
    "GET_MAX_OFFSET": (lambda f, _: protocol.MaxOffset(f["topic"], int(f["queueId"])), protocol.MaxOffset("t", 0)),
    "GET_MIN_OFFSET": (lambda f, _: protocol.MinOffset(f["topic"], int(f["queueId"])), protocol.MinOffset("t", 0)),
    "SEARCH_OFFSET_BY_TIMESTAMP": (
        lambda f, _: protocol.QueueOffsetAt(f["topic"], int(f["queueId"]), int(f["timestamp"])),
        protocol.QueueOffsetAt("t", 0, 0),
    ),
    "GET_CONSUMER_LIST_BY_GROUP": (lambda f, _: protocol.ConsumerIds(f["consumerGroup"]), protocol.ConsumerIds("g")),
    "LOCK_BATCH_MQ": (
        lambda _, body: protocol.LockQueues(
            (b := java_json.loads(body))["consumerGroup"], b["clientId"], queues_in(b["mqSet"])
        ),
        protocol.LockQueues("g", "c", frozenset()),
    ),
    "UNLOCK_BATCH_MQ": (
        lambda _, body: protocol.UnlockQueues(
            (b := java_json.loads(body))["consumerGroup"], b["clientId"], queues_in(b["mqSet"])
        ),
        protocol.UnlockQueues("g", "c", frozenset()),
    ),
    "CONSUMER_SEND_MSG_BACK": (
        lambda f, _: protocol.SendBack(
            f["group"],
            int(f["offset"]),
            int(f["delayLevel"]),
            of_type(int, f.get("maxReconsumeTimes")),
            f["originTopic"],
            f["originMsgId"],
        ),
        protocol.SendBack("g", 0, -1),
    ),
    "CHECK_CLIENT_CONFIG": (
        lambda _, body: protocol.CheckSubscription(
            (b := java_json.loads(body))["clientId"], b["group"], subscription_of(b["subscriptionData"])
        ),
        protocol.CheckSubscription("c", "g", protocol.Subscription("t", "*", "TAG", 0)),
    ),
    "VIEW_MESSAGE_BY_ID": (lambda f, _: protocol.ViewMessage(int(f["offset"])), protocol.ViewMessage(0)),
    "QUERY_MESSAGE": (
        lambda f, _: protocol.QueryMessages(
            f["topic"], f["key"], int(f["maxNum"]), int(f["beginTimestamp"]), int(f["endTimestamp"])
        ),
        protocol.QueryMessages("t", "k"),
    ),
    "UPDATE_AND_CREATE_TOPIC": (
        lambda f, _: protocol.CreateTopic(
            f["topic"], int(f["readQueueNums"]), int(f["writeQueueNums"]), int(f["perm"])
        ),
        protocol.CreateTopic("t", 1, 1),
    ),
    "DELETE_TOPIC_IN_BROKER": (lambda f, _: protocol.DeleteTopic(f["topic"]), protocol.DeleteTopic("t")),
    "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP": (
        lambda _, body: group_of(java_json.loads(body)),
        protocol.SetGroup("g", {}),
    ),
    "DELETE_SUBSCRIPTIONGROUP": (
        lambda f, _: protocol.DeleteGroup(f["groupName"], of_type(bool, f.get("removeOffset"), False)),
        protocol.DeleteGroup("g"),
    ),
    "INVOKE_BROKER_TO_RESET_OFFSET": (
        lambda f, _: protocol.ResetGroup(f["group"], f["topic"], int(f["timestamp"]), f["isForce"] == "true"),
        protocol.ResetGroup("g", "t", 0, True),
    ),
    "CLEAN_UNUSED_TOPIC": (lambda *_: protocol.CleanUnusedTopics(), protocol.CleanUnusedTopics()),
}
"""By name: the request of a recorded frame, and one in place of a frame that no client would send."""
