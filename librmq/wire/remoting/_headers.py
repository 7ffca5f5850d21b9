"""The headers of the 4.x protocol, and `REQUESTS`, the table of the headers of requests by code.

An answer of one field has none: the field stands where the answer is made. A header is a request of `librmq.protocol`
where that has the same fields, or else a class of its own. The attribute ``queue_id: int`` is the field ``queueId``, a
whole number. An attribute with a default may be absent.

Mirrors the headers of ``org.apache.rocketmq.common.protocol.header``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Final, NamedTuple

from librmq.message.topics import SystemTopic
from librmq.protocol import (
    DAMAGE_MS,
    CancelMessage,
    ChangeInvisible,
    CleanUnusedTopics,
    ConsumerIds,
    ConsumerOffsetsOf,
    ConsumersChanged,
    CreateTopic,
    DeleteExpiredFiles,
    DeleteGroup,
    DeleteTopic,
    DescribeConnections,
    DescribeProgress,
    DescribeQueues,
    EndTransaction,
    ForwardToDeadLetters,
    HoldPlace,
    MaxOffset,
    MinOffset,
    PullStatus,
    QueryMessages,
    QueryOffset,
    QueueOffsetAt,
    ResetGroup,
    ResponseCode,
    SaveProgress,
    SendBack,
    SendStatus,
    StartGroup,
    TakeHandOuts,
    Takes,
    TopicGroups,
    Unregister,
    UpdateOffset,
    ViewMessage,
    value,
)
from librmq.wire.remoting._frames import from_fields, to_fields

# ---- codes of requests and results

ERROR_FIELD: Final = "librmqError"
"""Field of librmq's own in an answer, with the error for a client of librmq; other clients ignore it."""
DURABLE_FIELD: Final = "isDurable"
"""Field of librmq's own: progress is on the device before the answer, as a reset is; RocketMQ ignores it."""
PULL_COMMITS, PULL_WAITS, PULL_SUBSCRIBES = 1, 2, 4
"""Bits of a pull's ``sys_flag``."""
PULL_CODES: Final = {
    PullStatus.FOUND: 0,
    PullStatus.HELD: 19,
    PullStatus.NO_NEW_MESSAGE: 19,
    PullStatus.NO_MATCHED_MESSAGE: 20,
    PullStatus.OFFSET_ILLEGAL: 21,
}
SEND_CODES: Final = {
    SendStatus.SEND_OK: 0,
    SendStatus.FLUSH_DISK_TIMEOUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    SendStatus.FLUSH_SLAVE_TIMEOUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    SendStatus.SLAVE_NOT_AVAILABLE: ResponseCode.SLAVE_NOT_AVAILABLE,
}


class RequestCode(enum.IntEnum):
    """What a request asks the server to do."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    CLEAN_EXPIRED_CONSUMEQUEUE = 306
    GET_CONSUMER_RUNNING_INFO = 307
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    GET_UNIT_TOPIC_LIST = 311
    GET_HAS_UNIT_SUB_TOPIC_LIST = 312
    GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST = 313
    CLONE_GROUP_OFFSET = 314
    VIEW_BROKER_STATS_DATA = 315
    CLEAN_UNUSED_TOPIC = 316
    GET_BROKER_CONSUME_STATS = 317
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    ADD_WRITE_PERM_OF_BROKER = 327
    GET_ALL_PRODUCER_INFO = 328
    DELETE_EXPIRED_COMMITLOG = 329
    RECALL_MESSAGE = 370  # of 5.x, like POP
    GET_TOPIC_CONFIG = 351  # of 5.x, whose tools ask for it before a topic's statistics
    GET_SUBSCRIPTIONGROUP_CONFIG = 352  # of 5.x, whose tools and dashboard ask for it
    LITE_PULL_MESSAGE = 361  # of 5.x, whose clients pull by it for a `DefaultLitePullConsumer`
    POP_MESSAGE = 200_050
    NOTIFICATION = 200_054
    ACK_MESSAGE = 200_051
    CHANGE_MESSAGE_INVISIBLETIME = 200_053
    # librmq's own, which 4.x lacks and 5.x has in another form, if at all
    RECEIVE = 31_001
    CANCEL_RECEIVE = 31_002
    NOTIFY_RECEIVE = 31_003
    ACKNOWLEDGE = 31_004
    CHANGE_INVISIBLE = 31_005
    FORWARD_TO_DEAD_LETTERS = 31_006
    CANCEL_MESSAGE = 31_007
    LIST_CONNECTIONS = 31_008
    START_GROUP = 31_009
    GROUPS_BEHIND = 31_010
    RESEND_LETTERS = 31_011
    HOLD_PLACE = 31_012
    SAVE_PROGRESS = 31_013
    CHANGE_SCHEDULE = 31_014
    DESCRIBE_SCHEDULES = 31_015
    TAKE_HAND_OUTS = 31_016


@value
class CancelledHeader:
    """What has become of it."""

    cancelled: bool
    why: str


@value
class HandedOutHeader:
    """How many it may hand out, and when it asks again."""

    allowed: int
    again: int


@value
class StartedHeader:
    """The value of a `StartOutcome`."""

    outcome: str


@value
class EmptyHeader:
    """No fields; everything is in the body."""


@value
class MessageFields:
    """What the headers of a sent message and of a pushed reply begin with."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: int
    queue_id: int
    sys_flag: int
    born_timestamp: int
    flag: int
    properties: str = ""
    reconsume_times: int = 0
    unit_mode: bool = False


@value
class SendHeader(MessageFields):
    """A message or a batch to store. Two codes use single letters as field names, in this order."""

    max_reconsume_times: int | None = None
    batch: bool = False


@value
class PushedReplyHeader(MessageFields):
    """A reply for the client that waits for it."""

    born_host: str = ""
    store_host: str = ""
    store_timestamp: int = 0


@value
class SentHeader:
    """Where a message is stored; commas separate the ids of a batch."""

    NAMES: ClassVar = "MSG_REGION=region TRACE_ON=is_traced"

    msg_id: str
    queue_id: int
    queue_offset: int
    transaction_id: str | None = None
    region: str = "DefaultRegion"
    is_traced: bool = True
    recall_handle: str | None = None
    """Of 5.x: recalls a message with a delivery time."""


@value
class RefusedSendHeader:
    NAMES: ClassVar = SentHeader.NAMES

    region: str = "DefaultRegion"
    is_traced: bool = True


@value
class PullHeader:
    """A pull of one queue. ``sys_flag``: 1 commits, 2 may be held, 4 carries a subscription."""

    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_msg_nums: int
    sys_flag: int
    commit_offset: int
    suspend_timeout_millis: int
    sub_version: int
    subscription: str = ""
    expression_type: str = "TAG"
    damage_ms: int | None = None
    """librmq's own: when a damaged message becomes a dead letter."""


@value
class PulledHeader:
    """Where the next pull begins. The body has the records."""

    next_begin_offset: int
    min_offset: int
    max_offset: int
    suggest_which_broker_id: int = 0


@value
class FoundByKeyHeader:
    """How far the key index has come. The body has the records."""

    index_last_update_timestamp: int
    index_last_update_phyoffset: int


@value
class OffsetHeader:
    """A queue offset, or the place of a record."""

    offset: int


@value
class CheckTransactionHeader:
    """A question about a half message. The body has its record."""

    tran_state_table_offset: int
    commit_log_offset: int
    msg_id: str = ""
    transaction_id: str = ""
    offset_msg_id: str = ""


@value
class NameHeader:
    """The name of a broker, a cluster or a group of producers."""

    name: str


@value
class TopicHeader:
    """A topic of a name server, whose route is asked for or that is deleted."""

    topic: str
    accept_standard_json_only: bool = False
    cluster_name: str | None = None


@value
class ClientOfGroupHeader:
    """A client that is to describe itself, perhaps with its stacks, or to consume a message now."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False
    msg_id: str = ""
    broker_name: str = ""


@value
class ClientStatusHeader:
    """A group's clients, or one of them, whose progress is requested."""

    topic: str
    group: str
    client_addr: str | None = None


@value
class CloneOffsetHeader:
    """Progress that one group takes over from another."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


@value
class StatsOfHeader:
    stats_name: str
    stats_key: str


@value
class OrderedOnlyHeader:
    """Whether only ordered groups are meant."""

    is_order: bool = False


@value
class QueueEntriesHeader:
    topic: str
    queue_id: int
    index: int
    count: int
    consumer_group: str | None = None


@value
class KvHeader:
    """A part of the name server's table, a key in it, and the key's value."""

    namespace: str
    key: str = ""
    value: str = ""


# ---- receives, librmq's own


@value
class ReceiveHeader:
    """A receive; ``hold`` is its number at the client, 0 for one that is not to be held."""

    client_id: str
    consumer_group: str
    topic: str
    max_messages: int
    invisible_ms: int
    hold: int = 0
    attempt_id: str = ""
    subscription: str = "*"
    expression_type: str = "TAG"
    sub_version: int = 0
    max_attempts: int | None = None
    acknowledged: str | None = None
    """Receipts, separated by line ends."""
    damage_ms: int = DAMAGE_MS
    max_process_deaths: int | None = None
    takes: Takes = Takes.NO_SUSPECT


@value
class ReceivedHeader:
    """The answer: whether the receive is held, and in a line for each message its receipt, attempt and time."""

    is_held: bool
    deliveries: str
    suspect_deaths: int = 0


@value
class HoldHeader:
    hold: int


@value
class NewReceiptHeader:
    """The receipt of a message that stays invisible for another time."""

    receipt: str


# ---- POP and recall, of 5.x


@value
class PopHeader:
    """A receive, or the question when it can find messages; queue -1 is any. It may be held for ``poll_time`` ms."""

    consumer_group: str
    topic: str
    queue_id: int
    poll_time: int
    born_time: int
    max_msg_nums: int = 0
    invisible_time: int = 0
    init_mode: int = 0
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False
    attempt_id: str | None = None


@value
class PopChangedHeader:
    """The new receive of a message whose invisible time was changed."""

    pop_time: int
    invisible_time: int
    revive_qid: int


@value
class PoppedHeader(PopChangedHeader):
    """The answer; its lists are of a topic's mark, a queue or message, and numbers: see `librmq.wire.remoting._pop`."""

    rest_num: int
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


@value
class NotifiedHeader:
    has_msg: bool = False
    polling_full: bool = False


@value
class PopAckHeader:
    """The end of one receive, or a change of its invisible time, in ms."""

    consumer_group: str
    topic: str
    queue_id: int
    extra_info: str
    offset: int
    invisible_time: int = 0


@value
class RecallHeader:
    """A recall of a message with a delivery time."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


# ---- the table


class RequestForm(NamedTuple):
    header: type[Any] = EmptyHeader
    names: str = ""
    """What the attributes of the header do not tell: ``field=attribute`` is the name of a field, ``-attribute`` is no
    field, ``!attribute`` may not be absent in spite of its default, ``?attribute`` is left out where it is empty, and
    ``field:text`` is a field that always has this text."""

    def read(self, fields: Mapping[str, str]) -> Any:  # noqa: ANN401 (a header)
        """Return the header that fields describe; `MalformedError` if they describe none."""
        return from_fields(self.header, fields, self.names)

    def write(self, header: object) -> dict[str, str]:
        return to_fields(header, self.names)


_LETTERS: Final = " ".join(map("{}={}".format, "abcdefghijklm", (field.name for field in fields(SendHeader))))
_OF_GROUP: Final = "consumerGroup=group"
_TOPIC: Final = (
    "readQueueNums=read_queues !read_queues writeQueueNums=write_queues !write_queues perm=permission !permission "
    f"?attributes -unless_exists defaultTopic:{SystemTopic.AUTO_CREATE} topicFilterType:SINGLE_TAG topicSysFlag:0 "
    "order:false"
)
_BY_KEY: Final = (
    "maxNum=max_messages !max_messages beginTimestamp=begin_ms !begin_ms endTimestamp=end_ms !end_ms "
    "_UNIQUE_KEY_QUERY=is_unique"
)
_TRANSACTION: Final = (
    "producerGroup=group tranStateTableOffset=queue_offset commitLogOffset=physical_offset commitOrRollback=state "
    "fromTransactionCheck=from_check msgId=message_id transactionId=message_id"
)
_SENT_BACK: Final = "offset=physical_offset originMsgId=origin_message_id ?cause -reconsume_times unitMode:false"
REQUESTS: Final[Mapping[RequestCode, RequestForm]] = {
    **dict.fromkeys(RequestCode, RequestForm()),
    RequestCode.SEND_MESSAGE: RequestForm(SendHeader),
    RequestCode.SEND_MESSAGE_V2: RequestForm(SendHeader, _LETTERS),
    RequestCode.SEND_BATCH_MESSAGE: RequestForm(SendHeader, _LETTERS),
    **dict.fromkeys((RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE), RequestForm(PullHeader)),
    RequestCode.QUERY_MESSAGE: RequestForm(QueryMessages, _BY_KEY),
    RequestCode.QUERY_CONSUMER_OFFSET: RequestForm(QueryOffset, _OF_GROUP),
    RequestCode.HOLD_PLACE: RequestForm(HoldPlace, _OF_GROUP),
    RequestCode.SAVE_PROGRESS: RequestForm(SaveProgress, _OF_GROUP),
    RequestCode.UPDATE_CONSUMER_OFFSET: RequestForm(UpdateOffset, f"{_OF_GROUP} commitOffset=queue_offset"),
    RequestCode.UPDATE_AND_CREATE_TOPIC: RequestForm(CreateTopic, _TOPIC),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: RequestForm(QueueOffsetAt, "timestamp=timestamp_ms"),
    RequestCode.GET_MAX_OFFSET: RequestForm(MaxOffset),
    RequestCode.GET_MIN_OFFSET: RequestForm(MinOffset),
    RequestCode.GET_EARLIEST_MSG_STORETIME: RequestForm(MinOffset),
    RequestCode.VIEW_MESSAGE_BY_ID: RequestForm(ViewMessage, "offset=physical_offset"),
    RequestCode.UNREGISTER_CLIENT: RequestForm(Unregister, "clientID=client_id"),
    RequestCode.CONSUMER_SEND_MSG_BACK: RequestForm(SendBack, _SENT_BACK),
    RequestCode.END_TRANSACTION: RequestForm(EndTransaction, _TRANSACTION),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: RequestForm(ConsumerIds, _OF_GROUP),
    RequestCode.CHECK_TRANSACTION_STATE: RequestForm(CheckTransactionHeader),
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: RequestForm(ConsumersChanged, _OF_GROUP),
    RequestCode.PUT_KV_CONFIG: RequestForm(KvHeader, "!key !value"),
    RequestCode.GET_KV_CONFIG: RequestForm(KvHeader, "!key"),
    RequestCode.DELETE_KV_CONFIG: RequestForm(KvHeader, "!key"),
    RequestCode.GET_ROUTEINFO_BY_TOPIC: RequestForm(TopicHeader, "-cluster_name"),
    RequestCode.GET_TOPIC_STATS_INFO: RequestForm(DescribeQueues),
    RequestCode.GET_TOPIC_CONFIG: RequestForm(DescribeQueues),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: RequestForm(NameHeader, "group=name"),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: RequestForm(DescribeConnections, _OF_GROUP),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: RequestForm(NameHeader, "producerGroup=name"),
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: RequestForm(NameHeader, "brokerName=name"),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: RequestForm(DeleteGroup, "groupName=group removeOffset=removes_progress"),
    RequestCode.GET_CONSUME_STATS: RequestForm(DescribeProgress, _OF_GROUP),
    RequestCode.DELETE_TOPIC_IN_BROKER: RequestForm(DeleteTopic),
    RequestCode.CLEAN_UNUSED_TOPIC: RequestForm(CleanUnusedTopics),
    RequestCode.DELETE_EXPIRED_COMMITLOG: RequestForm(DeleteExpiredFiles),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: RequestForm(TopicHeader, "-accept_standard_json_only"),
    RequestCode.GET_KVLIST_BY_NAMESPACE: RequestForm(KvHeader),
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: RequestForm(ClientStatusHeader),
    **dict.fromkeys(
        (RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RequestCode.RESET_CONSUMER_CLIENT_OFFSET),
        RequestForm(ResetGroup, "timestamp=timestamp_ms isForce=force offset=queue_offset"),
    ),
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: RequestForm(ClientStatusHeader),
    RequestCode.GET_TOPICS_BY_CLUSTER: RequestForm(NameHeader, "cluster=name"),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: RequestForm(TopicGroups),
    RequestCode.QUERY_CONSUME_TIME_SPAN: RequestForm(ConsumerOffsetsOf),
    RequestCode.GET_CONSUMER_RUNNING_INFO: RequestForm(ClientOfGroupHeader, "-msg_id -broker_name"),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: RequestForm(ClientOfGroupHeader, "-jstack_enable !msg_id"),
    RequestCode.CLONE_GROUP_OFFSET: RequestForm(CloneOffsetHeader),
    RequestCode.VIEW_BROKER_STATS_DATA: RequestForm(StatsOfHeader),
    RequestCode.GET_BROKER_CONSUME_STATS: RequestForm(OrderedOnlyHeader),
    RequestCode.QUERY_CONSUME_QUEUE: RequestForm(QueueEntriesHeader),
    RequestCode.CANCEL_MESSAGE: RequestForm(CancelMessage),
    RequestCode.TAKE_HAND_OUTS: RequestForm(TakeHandOuts, "rate=rate_by_1000"),
    RequestCode.START_GROUP: RequestForm(StartGroup, "timestamp=timestamp_ms offset=queue_offset"),
    RequestCode.SEND_REPLY_MESSAGE: RequestForm(SendHeader),
    RequestCode.SEND_REPLY_MESSAGE_V2: RequestForm(SendHeader, _LETTERS),
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: RequestForm(PushedReplyHeader),
    RequestCode.ADD_WRITE_PERM_OF_BROKER: RequestForm(NameHeader, "brokerName=name"),
    RequestCode.RECEIVE: RequestForm(ReceiveHeader),
    **dict.fromkeys((RequestCode.CANCEL_RECEIVE, RequestCode.NOTIFY_RECEIVE), RequestForm(HoldHeader)),
    RequestCode.POP_MESSAGE: RequestForm(PopHeader, "!max_msg_nums !invisible_time !init_mode"),
    RequestCode.NOTIFICATION: RequestForm(PopHeader, "-max_msg_nums -invisible_time -init_mode"),
    RequestCode.ACK_MESSAGE: RequestForm(PopAckHeader, "-invisible_time"),
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: RequestForm(PopAckHeader, "!invisible_time"),
    RequestCode.RECALL_MESSAGE: RequestForm(RecallHeader),
    RequestCode.CHANGE_INVISIBLE: RequestForm(ChangeInvisible, _OF_GROUP),
    RequestCode.FORWARD_TO_DEAD_LETTERS: RequestForm(ForwardToDeadLetters, _OF_GROUP),
}
