"""Requests of `librmq.protocol` as frames, and answers as their results: one table for all that needs no state."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from librmq.errors import (
    BrokerBusyError,
    BrokerDiskFullError,
    BrokerError,
    BrokerStoreFullError,
    MalformedError,
    RecordError,
)
from librmq.message import record
from librmq.message.batch import BatchItem, encode_batch
from librmq.message.ids import parse_offset_message_id
from librmq.message.message import Message, MessageQueue, StoredMessage
from librmq.message.properties import PROPERTY_WAIT, encode_properties
from librmq.message.topics import AUTO_CREATE_TOPIC
from librmq.protocol import (
    CheckSubscription,
    CleanUnusedTopics,
    ConsumerIds,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    EndTransaction,
    Heartbeat,
    LockQueues,
    MaxOffset,
    MinOffset,
    QueryMessages,
    QueryOffset,
    QueueOffsetAt,
    ResetGroup,
    ResponseCode,
    SendBack,
    SendBatch,
    SendMessage,
    SendReply,
    SendResponse,
    SendStatus,
    SetGroup,
    UnlockQueues,
    Unregister,
    UpdateOffset,
    ViewMessage,
)
from librmq.store.format.broker_tables import group_row
from librmq.wire.remoting.bodies import heartbeat_body, queue_row, queues_of, read_body, subscription_row, write_body
from librmq.wire.remoting.frames import Frame, from_fields, to_fields
from librmq.wire.remoting.headers import (
    ERROR_FIELD,
    REQUESTS,
    SEND_CODES,
    ConsumerGroupHeader,
    CreateTopicHeader,
    EndTransactionHeader,
    GroupProgressHeader,
    GroupQueueHeader,
    GroupToDeleteHeader,
    LeavingClientHeader,
    PhysicalOffsetHeader,
    QueryByKeyHeader,
    QueueAtTimeHeader,
    QueueOfTopicHeader,
    RequestCode,
    ResetOffsetHeader,
    SendBackHeader,
    TopicNameHeader,
)

_STATUSES: Final[dict[int, SendStatus]] = {code: status for status, code in SEND_CODES.items()}
_ERRORS: Final = {"DiskFullError": BrokerDiskFullError, "StoreFullError": BrokerStoreFullError}
_DISK_USED: Final = re.compile(r"disk is full \[CL: *(\d+\.\d+)")
"""Used part of the log's disk, in a broker's remark of a refused send, which names other possible causes too."""
_REFUSING_FROM: Final = 0.9  # a broker's default
_LONGEST_TIME_MS: Final = (1 << 63) - 1


def frame_of(code: RequestCode, header: object = None, body: bytes = b"") -> Frame:
    """Return the frame of a request."""
    fields = {} if header is None else to_fields(header, by_letters=REQUESTS[code].by_letters)
    return Frame(code, fields, body)


def refusal(answer: Frame) -> BrokerError:
    """Return the error of a request that was refused."""
    kind = _ERRORS.get(answer.fields.get(ERROR_FIELD, ""), BrokerError)
    if answer.code == ResponseCode.SYSTEM_BUSY:
        kind = BrokerBusyError
    elif answer.code == ResponseCode.SERVICE_NOT_AVAILABLE and kind is BrokerError:
        used = _DISK_USED.search(answer.remark or "")
        if used is not None and float(used[1]) >= _REFUSING_FROM:
            kind = BrokerDiskFullError
    return kind(answer.code, answer.remark or f"refused with code {answer.code}")


def check(answer: Frame) -> Frame:
    """Return the answer to a request that succeeded.

    Raises:
        BrokerError: The request was refused.
    """
    if answer.code:
        raise refusal(answer)
    return answer


def header_of(code: RequestCode, answer: Frame) -> Any:  # noqa: ANN401 of the class that `REQUESTS` names
    """Return the fields of an answer.

    Raises:
        MalformedError: A field is missing, or has the wrong type.
    """
    return from_fields(REQUESTS[code].answer, answer.fields)


def messages_of(body: bytes) -> tuple[StoredMessage, ...]:
    """Return the records in a body.

    Raises:
        MalformedError: The body is something else.
    """
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


def offsets_of(table: object) -> dict[MessageQueue, int]:
    """Return a table of queue offsets, with objects or arrays of pairs as in Java's answers.

    Raises:
        MalformedError: It is something else.
    """
    if isinstance(table, Mapping):
        rows = [(dict(key) if isinstance(key, tuple) else key, offset) for key, offset in table.items()]
    elif isinstance(table, list):
        rows = [(row, row.get("offset") if isinstance(row, dict) else None) for row in table]
    else:
        raise MalformedError(f"expected a table of queue offsets, found {table!r:.80}")
    offsets: dict[MessageQueue, int] = {}
    for row, offset in rows:
        if type(offset) is not int:
            raise MalformedError(f"expected a queue offset, found {offset!r:.80}")
        offsets.update(dict.fromkeys(queues_of([row]), offset))
    return offsets


class Form(NamedTuple):
    """How one kind of request is written, and its answer read."""

    write: Callable[[Any], Frame]
    read: Callable[[Any, Frame], Any]


# ---- sends


def _write_send(request: SendMessage) -> Frame:
    message = request.message
    fields = _send_fields(
        request, message, encode_properties(message.properties).decode(), request.sys_flag, request.reconsume_times
    )
    if request.max_reconsume_times is not None:
        fields["l"] = str(request.max_reconsume_times)
    return Frame(RequestCode.SEND_MESSAGE_V2, fields, message.body)


def _write_reply(request: SendReply) -> Frame:
    frame = _write_send(request.send)
    frame.code = RequestCode.SEND_REPLY_MESSAGE_V2
    return frame


def _write_batch(request: SendBatch) -> Frame:
    items = [
        BatchItem(message.body, message.flag, encode_properties(message.properties)) for message in request.messages
    ]
    wait = {name: value for name, value in request.messages[0].properties.items() if name == PROPERTY_WAIT}
    fields = _send_fields(request, request.messages[0], encode_properties(wait).decode(), 0, 0)
    fields["m"] = "true"
    return Frame(RequestCode.SEND_BATCH_MESSAGE, fields, encode_batch(items))


def _send_fields(
    request: SendMessage | SendBatch, message: Message, properties: str, sys_flag: int, reconsume_times: int
) -> dict[str, str]:
    # By hand, because a small send spends much of its time here; the letters are those of `SendHeader`.
    return {
        "a": request.group,
        "b": message.topic,
        "c": AUTO_CREATE_TOPIC,
        "d": str(request.default_queues),
        "e": str(request.queue_id),
        "f": str(sys_flag),
        "g": str(request.born_timestamp_ms),
        "h": str(message.flag),
        "i": properties,
        "j": str(reconsume_times),
        "k": "false",
        "m": "false",
    }


def _read_sent(request: SendMessage | SendBatch, answer: Frame) -> SendResponse:
    status = _STATUSES.get(answer.code)
    if status is None:
        raise refusal(answer)
    sent = header_of(RequestCode.SEND_MESSAGE_V2, answer)
    ids = tuple(sent.msg_id.split(","))
    return SendResponse(
        status, sent.queue_id, sent.queue_offset, parse_offset_message_id(ids[0])[1], ids, sent.transaction_id
    )


def _write_end(request: EndTransaction) -> Frame:
    header = EndTransactionHeader(
        request.group,
        request.queue_offset,
        request.physical_offset,
        request.state.value,
        request.from_check,
        request.message_id,
        request.message_id,
    )
    return frame_of(RequestCode.END_TRANSACTION, header)


# ---- consumers


def _read_none(request: object, answer: Frame) -> None:
    check(answer)


def _write_ids(request: ConsumerIds) -> Frame:
    return frame_of(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupHeader(request.group))


def _read_ids(request: ConsumerIds, answer: Frame) -> tuple[str, ...]:
    if answer.code == ResponseCode.SYSTEM_ERROR:  # no consumer for this group
        return ()
    ids = read_body(check(answer).body, "consumer ids").get("consumerIdList")
    if not isinstance(ids, list) or not all(isinstance(client_id, str) for client_id in ids):
        raise MalformedError(f"consumerIdList: expected a list of texts, found {ids!r:.80}")
    return tuple(ids)


def _read_progress(request: QueryOffset, answer: Frame) -> int | None:
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return None
    return _read_offset(RequestCode.QUERY_CONSUMER_OFFSET, answer)


def _read_offset(code: RequestCode, answer: Frame) -> int:
    offset: int = header_of(code, check(answer)).offset
    return offset


def _write_locks(code: RequestCode, request: LockQueues | UnlockQueues) -> Frame:
    rows = [queue_row(queue) for queue in sorted(request.queues)]
    return frame_of(
        code, body=write_body({"clientId": request.client_id, "consumerGroup": request.group, "mqSet": rows})
    )


def _read_locked(request: LockQueues, answer: Frame) -> frozenset[MessageQueue]:
    return queues_of(read_body(check(answer).body, "locked queues").get("lockOKMQSet") or [])


def _write_send_back(request: SendBack) -> Frame:
    header = SendBackHeader(
        request.physical_offset,
        request.group,
        request.delay_level,
        request.origin_message_id,
        request.origin_topic,
        False,
        request.max_reconsume_times,
        request.cause or None,
    )
    return frame_of(RequestCode.CONSUMER_SEND_MSG_BACK, header)


def _write_check(request: CheckSubscription) -> Frame:
    row = subscription_row(request.subscription)
    body = {"clientId": request.client_id, "group": request.group, "subscriptionData": row}
    return frame_of(RequestCode.CHECK_CLIENT_CONFIG, body=write_body(body))


# ---- administration


def _write_topic(request: CreateTopic) -> Frame:
    header = CreateTopicHeader(
        request.topic, AUTO_CREATE_TOPIC, request.read_queues, request.write_queues, request.permission
    )
    return frame_of(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


def _write_group(request: SetGroup) -> Frame:
    """Write the whole row that a real broker puts in the place of its own."""
    row = {**group_row(request.group), **request.settings}
    return frame_of(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=write_body(row))


def _write_query(request: QueryMessages) -> Frame:
    header = QueryByKeyHeader(
        request.topic, request.key, request.max_messages, request.begin_ms, min(request.end_ms, _LONGEST_TIME_MS)
    )
    return frame_of(RequestCode.QUERY_MESSAGE, header)


def _read_found(request: QueryMessages, answer: Frame) -> tuple[StoredMessage, ...]:
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return ()
    return messages_of(check(answer).body)


def _read_viewed(request: ViewMessage, answer: Frame) -> StoredMessage | None:
    if answer.code == ResponseCode.SYSTEM_ERROR:  # as a broker answers for an offset without a message
        return None
    messages = messages_of(check(answer).body)
    return messages[0] if messages else None


def _write_reset(request: ResetGroup) -> Frame:
    header = ResetOffsetHeader(request.topic, request.group, request.timestamp_ms, request.force)
    return frame_of(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header)


def _read_reset(request: ResetGroup, answer: Frame) -> dict[MessageQueue, int]:
    return offsets_of(read_body(check(answer).body, "a reset").get("offsetTable") or {})


_C = RequestCode
FORMS: Final[Mapping[type[Any], Form]] = {
    SendMessage: Form(_write_send, _read_sent),
    SendBatch: Form(_write_batch, _read_sent),
    SendReply: Form(_write_reply, lambda request, answer: _read_sent(request.send, answer)),
    EndTransaction: Form(_write_end, _read_none),
    Heartbeat: Form(lambda request: frame_of(_C.HEART_BEAT, body=heartbeat_body(request)), _read_none),
    Unregister: Form(
        lambda request: frame_of(
            _C.UNREGISTER_CLIENT, LeavingClientHeader(request.client_id, request.producer_group, request.consumer_group)
        ),
        _read_none,
    ),
    ConsumerIds: Form(_write_ids, _read_ids),
    QueryOffset: Form(
        lambda request: frame_of(
            _C.QUERY_CONSUMER_OFFSET, GroupQueueHeader(request.group, request.topic, request.queue_id)
        ),
        _read_progress,
    ),
    UpdateOffset: Form(
        lambda request: frame_of(
            _C.UPDATE_CONSUMER_OFFSET,
            GroupProgressHeader(request.group, request.topic, request.queue_id, request.queue_offset),
        ),
        _read_none,
    ),
    MaxOffset: Form(
        lambda request: frame_of(_C.GET_MAX_OFFSET, QueueOfTopicHeader(request.topic, request.queue_id)),
        lambda _, answer: _read_offset(_C.GET_MAX_OFFSET, answer),
    ),
    MinOffset: Form(
        lambda request: frame_of(_C.GET_MIN_OFFSET, QueueOfTopicHeader(request.topic, request.queue_id)),
        lambda _, answer: _read_offset(_C.GET_MIN_OFFSET, answer),
    ),
    QueueOffsetAt: Form(
        lambda request: frame_of(
            _C.SEARCH_OFFSET_BY_TIMESTAMP, QueueAtTimeHeader(request.topic, request.queue_id, request.timestamp_ms)
        ),
        lambda _, answer: _read_offset(_C.SEARCH_OFFSET_BY_TIMESTAMP, answer),
    ),
    LockQueues: Form(lambda request: _write_locks(_C.LOCK_BATCH_MQ, request), _read_locked),
    UnlockQueues: Form(lambda request: _write_locks(_C.UNLOCK_BATCH_MQ, request), _read_none),
    SendBack: Form(_write_send_back, _read_none),
    CheckSubscription: Form(_write_check, _read_none),
    CreateTopic: Form(_write_topic, _read_none),
    DeleteTopic: Form(lambda request: frame_of(_C.DELETE_TOPIC_IN_BROKER, TopicNameHeader(request.topic)), _read_none),
    CleanUnusedTopics: Form(lambda request: frame_of(_C.CLEAN_UNUSED_TOPIC), lambda _, answer: (check(answer), ())[1]),
    SetGroup: Form(_write_group, _read_none),
    DeleteGroup: Form(
        lambda request: frame_of(
            _C.DELETE_SUBSCRIPTIONGROUP, GroupToDeleteHeader(request.group, request.removes_progress)
        ),
        _read_none,
    ),
    ViewMessage: Form(
        lambda request: frame_of(_C.VIEW_MESSAGE_BY_ID, PhysicalOffsetHeader(request.physical_offset)), _read_viewed
    ),
    QueryMessages: Form(_write_query, _read_found),
    ResetGroup: Form(_write_reset, _read_reset),
}
"""By class of request."""
