"""The codec: requests of `librmq.protocol` and their results as frames, in both directions.

::

    client    request ── write ──> frame  ── parse ──> request    server
              result  <── read ─── answer <── reply ── result

`FORMS` has both directions by class of request, `headers.REQUESTS` the headers by code. Mirrors ``MQClientAPIImpl``
and the processors of the broker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

from librmq.errors import (
    BrokerBusyError,
    BrokerDamageError,
    BrokerDiskFullError,
    BrokerError,
    BrokerMessageIllegalError,
    BrokerStoreFullError,
    BrokerUnreachableError,
    MalformedError,
    MessageIllegalError,
    ReceiptError,
    RmqError,
)
from librmq.message import StoredMessage, record
from librmq.message.batch import BatchItem, encode_batch
from librmq.message.delays import TimerRefusedError
from librmq.message.ids import Host, format_host, parse_offset_message_id
from librmq.message.properties import PropertyName, encode_properties
from librmq.protocol import (
    DAMAGE_MS,
    Acknowledge,
    CancelMessage,
    CancelResult,
    ChangeInvisible,
    ChangeSchedule,
    CheckSubscription,
    CleanUnusedTopics,
    ConsumerIds,
    CreateTopic,
    DeleteExpiredFiles,
    DeleteGroup,
    DeleteTopic,
    DescribeSchedules,
    EndTransaction,
    ForwardToDeadLetters,
    Heartbeat,
    HoldPlace,
    LockQueues,
    MaxOffset,
    MinOffset,
    Place,
    PullMessage,
    PullResponse,
    PullStatus,
    QueryMessages,
    QueryOffset,
    QueueOffsetAt,
    Receive,
    Received,
    ReceiveResponse,
    ResendLetters,
    ResentLetters,
    ResetGroup,
    ResponseCode,
    SaveProgress,
    SendBack,
    SendBatch,
    SendMessage,
    SendReply,
    SendResponse,
    SendStatus,
    SetGroup,
    StartGroup,
    StartOutcome,
    Subscription,
    TakeHandOuts,
    TopicGroups,
    UnlockQueues,
    Unregister,
    UpdateOffset,
    ViewMessage,
)
from librmq.scheduling import Schedule
from librmq.store.format.broker_tables import group_row
from librmq.wire.remoting._bodies import (
    fitting,
    heartbeat_body,
    letters_in,
    messages_of,
    offsets_of,
    queue_key,
    queue_row,
    queues_of,
    read_body,
    read_request,
    records_body,
    subscription_of,
    subscription_row,
    text_in,
    unwrapped,
    write_body,
)
from librmq.wire.remoting._frames import Frame, from_fields, version_name
from librmq.wire.remoting._headers import (
    ERROR_FIELD,
    PULL_CODES,
    PULL_COMMITS,
    PULL_SUBSCRIBES,
    PULL_WAITS,
    REQUESTS,
    SEND_CODES,
    CancelledHeader,
    FoundByKeyHeader,
    HandedOutHeader,
    MessageFields,
    NewReceiptHeader,
    OffsetHeader,
    PulledHeader,
    PullHeader,
    PushedReplyHeader,
    ReceivedHeader,
    ReceiveHeader,
    RequestCode,
    SendHeader,
    SentHeader,
    StartedHeader,
)

H = TypeVar("H")
_STATUSES: Final[dict[int, SendStatus]] = {code: status for status, code in SEND_CODES.items()}
_ERRORS: Final[Mapping[str, type[BrokerError]]] = {
    "BrokerDamageError": BrokerDamageError,
    "DiskFullError": BrokerDiskFullError,
    "StoreFullError": BrokerStoreFullError,
    "ReceiptError": ReceiptError,
}
_OTHER_ERRORS: Final[Mapping[str, type[MessageIllegalError]]] = {
    "TimerRefusedError": TimerRefusedError,
    "MessageIllegalError": MessageIllegalError,
}
"""Errors of librmq without a code."""
_DISK_USED: Final = re.compile(r"disk is full \[CL: *(\d+\.\d+)")
"""Used part of the log's disk, in a broker's remark of a refused send, which names other possible causes too."""
_REFUSING_FROM: Final = 0.9  # a broker's default
_PULL_STATUSES: Final = {code: status for status, code in PULL_CODES.items() if status is not PullStatus.HELD}
_REMARKS: Final = {
    PullStatus.FOUND: "FOUND",
    PullStatus.NO_NEW_MESSAGE: "OFFSET_OVERFLOW_ONE",
    PullStatus.HELD: "OFFSET_OVERFLOW_ONE",
    PullStatus.NO_MATCHED_MESSAGE: "NO_MATCHED_MESSAGE",
}


def frame_of(code: RequestCode, header: object = None, body: bytes = b"") -> Frame:
    return Frame(code, {} if header is None else REQUESTS[code].write(header), body)


def refusal(answer: Frame) -> RmqError:
    """Return the error of a request that was refused."""
    return _error_of(answer.fields.get(ERROR_FIELD, ""), answer.code, answer.remark or "")


def _error_of(named: str, code: int, remark: str) -> RmqError:
    if named in _OTHER_ERRORS:
        return _OTHER_ERRORS[named](remark)
    kind = _ERRORS.get(named, BrokerError)
    if code == ResponseCode.SYSTEM_BUSY:
        kind = BrokerBusyError
    elif code == ResponseCode.MESSAGE_ILLEGAL and kind is BrokerError:
        kind = BrokerMessageIllegalError
    elif code == ResponseCode.SERVICE_NOT_AVAILABLE and kind is BrokerError:
        used = _DISK_USED.search(remark)
        if used is not None and float(used[1]) >= _REFUSING_FROM:
            kind = BrokerDiskFullError
    return kind(code, remark or f"refused with code {code}")


def name_of_error(error: RmqError, *, in_share: bool) -> str:
    """Return what an answer calls an error for clients of librmq; empty without a name.

    ``in_share`` says that they share the store. Elsewhere the fields of an answer are those of a broker.
    """
    error_types = (*_ERRORS, *(_OTHER_ERRORS if in_share else ()))  # a class before its bases
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((name for name in error_types if name in names), "")


def code_of_error(error: RmqError) -> int:
    """Return the code of the answer to a request that failed by an error of librmq."""
    if isinstance(error, BrokerError):
        return error.code
    if isinstance(error, MessageIllegalError):
        return ResponseCode.MESSAGE_ILLEGAL
    if isinstance(error, BrokerUnreachableError):
        return ResponseCode.SERVICE_NOT_AVAILABLE
    return ResponseCode.SYSTEM_ERROR


def check(answer: Frame) -> Frame:
    """Return the answer to a request that succeeded.

    Raises:
        BrokerError: The request was refused.
        MessageIllegalError: A broker of librmq refused its message.
    """
    if answer.code:
        raise refusal(answer)
    return answer


class Reply(NamedTuple):
    """The answer to a request that succeeded."""

    header: object = None
    body: bytes = b""
    code: int = 0
    remark: str | None = None


class Form(NamedTuple):
    """How the requests of one class and their results are written and read, at both ends."""

    code: RequestCode
    write: Callable[[Any], Frame]
    """Returns the frame of a request."""
    read: Callable[[Any, Frame], Any]
    """Returns the result in the answer to a request. Raises BrokerError, or MalformedError for another form."""
    parse: Callable[[Any, bytes], Any]
    """Returns the request in a header and a body. Raises MalformedError."""
    reply: Callable[[Any, Any], Reply]
    """Returns the answer to a request and its result. Raises BrokerError for a result that is answered as a refusal."""


class _Result(NamedTuple):
    reply: Callable[[Any, Any], Reply]
    read: Callable[[Any, Frame], Any]


def _as_header(code: RequestCode, result: _Result) -> Form:
    """Return the form of requests that are their own headers."""
    return Form(code, partial(frame_of, code), result.read, lambda request, body: request, result.reply)


def _by_body(
    code: RequestCode,
    row: Callable[[Any], Mapping[str, object]],
    parse: Callable[[dict[str, Any]], Any],
    result: _Result,
) -> Form:
    """Return the form of requests in a body: ``row`` returns its object, and ``parse`` reads it."""
    return Form(
        code,
        lambda request: frame_of(code, body=write_body(row(request))),
        result.read,
        lambda header, body: parse(read_request(body, code.name)),
        result.reply,
    )


# ---- results


def _in_body(name: str, what: str, write: Callable[[Any], object], read: Callable[[Any], Any]) -> _Result:
    """Return the form of results that a field of the body has; without it, ``read`` gets an empty list."""
    return _Result(
        lambda request, result: Reply(body=write_body({name: write(result)})),
        lambda request, answer: read(read_body(check(answer).body, what).get(name) or []),
    )


def _in_header(header: type[H], write: Callable[[Any], H], read: Callable[[H], Any]) -> _Result:
    """Return the form of results that a header has."""
    return _Result(
        lambda request, result: Reply(write(result)),
        lambda request, answer: read(from_fields(header, check(answer).fields)),
    )


def _names_in(names: object) -> tuple[str, ...]:
    if not isinstance(names, list):
        raise MalformedError(f"groupList: expected a list, found {names!r:.80}")
    return tuple(map(str, names))


def _reply_nothing(request: object, result: object) -> Reply:
    return Reply()


def _read_nothing(request: object, answer: Frame) -> None:
    check(answer)


def _read_no_queues(request: CleanUnusedTopics, answer: Frame) -> tuple[tuple[str, int], ...]:
    check(answer)
    return ()  # a broker does not name what it deletes


def _reply_progress(request: QueryOffset, offset: int | None) -> Reply:
    if offset is None:
        raise BrokerError(
            ResponseCode.QUERY_NOT_FOUND,
            f"group {request.group} has no progress in queue {request.queue_id} of {request.topic}",
        )
    return Reply(OffsetHeader(offset))


def _read_progress(request: QueryOffset, answer: Frame) -> int | None:
    return None if answer.code == ResponseCode.QUERY_NOT_FOUND else _OFFSET.read(request, answer)


def _header_of_place(place: Place | None) -> OffsetHeader:
    return OffsetHeader(-1 if place is None else place.number)


def _reply_ids(request: ConsumerIds, ids: Sequence[str]) -> Reply:
    if not ids:
        raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {request.group}")
    return Reply(body=write_body({"consumerIdList": ids}))


def _read_ids(request: ConsumerIds, answer: Frame) -> tuple[str, ...]:
    if answer.code == ResponseCode.SYSTEM_ERROR:
        return ()
    ids = read_body(check(answer).body, "consumer ids").get("consumerIdList")
    if not isinstance(ids, list) or not all(isinstance(client_id, str) for client_id in ids):
        raise MalformedError(f"consumerIdList: expected a list of texts, found {ids!r:.80}")
    return tuple(ids)


def _reply_viewed(request: ViewMessage, message: StoredMessage | None) -> Reply:
    if message is None:
        offset = request.physical_offset
        raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no message at the physical offset {offset}")
    return Reply(body=message.raw)


def _read_viewed(request: ViewMessage, answer: Frame) -> StoredMessage | None:
    if answer.code == ResponseCode.SYSTEM_ERROR:
        return None
    messages = messages_of(check(answer).body)
    return unwrapped(messages[0])[0] if messages else None


def _read_cancelled(request: CancelMessage, answer: Frame) -> CancelResult:
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        why = (
            f"the broker, of RocketMQ {version_name(answer.version)}, recalls no message without a handle, so it is "
            "delivered in its time. Brokers from 5.3.2 on recall what waits in their timer, by what send returned: "
            "send with delay= or deliver_at=, not delay_level=, to a broker with timerWheelEnable=true. A delay level "
            "is cancelled by librmq's brokers alone"
        )
        raise BrokerError(answer.code, f"message {request.message_id}: {why}")
    header = from_fields(CancelledHeader, check(answer).fields)
    return CancelResult(header.cancelled, header.why)


def _read_started(request: StartGroup, answer: Frame) -> StartOutcome:
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        why = (
            "start_at: the broker keeps no mark that the group was moved, as librmq's brokers do: move the group once "
            f"by `librmq reset --route … --group {request.group} --topic {request.topic}`, and leave start_at out"
        )
        raise BrokerError(answer.code, why)
    outcome = from_fields(StartedHeader, check(answer).fields).outcome
    try:
        return StartOutcome(outcome)
    except ValueError:
        expected = ", ".join(outcome.value for outcome in StartOutcome)
        raise MalformedError(f"outcome: expected one of {expected}, found {outcome!r:.80}") from None


def _reply_messages(request: QueryMessages, messages: Sequence[StoredMessage]) -> Reply:
    if not messages:
        remark = "can not find message, maybe time range not correct"
        return Reply(FoundByKeyHeader(0, 0), code=ResponseCode.QUERY_NOT_FOUND, remark=remark)
    messages = fitting(messages) if request.is_unique else fitting(reversed(messages))[::-1]
    last_ms = max(message.store_timestamp_ms for message in messages)
    return Reply(FoundByKeyHeader(last_ms, messages[-1].physical_offset), records_body(messages))


def _read_messages(request: QueryMessages, answer: Frame) -> tuple[StoredMessage, ...]:
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return ()
    messages = list[StoredMessage]()
    for stored in messages_of(check(answer).body):
        batch, is_named = unwrapped(stored), request.key in (stored.unique_key, *stored.keys)
        # A broker finds a batch by its own keys, or by those of any message in it.
        messages += [
            message
            for message in batch
            if len(batch) == 1 or is_named or request.key in (message.unique_key, *message.keys)
        ]
    return tuple(messages)


def _reply_acknowledged(request: Acknowledge, are_valid: tuple[bool, ...]) -> Reply:
    return Reply(body=write_body({"acknowledged": list(are_valid)}))


def _read_acknowledged(request: Acknowledge, answer: Frame) -> tuple[bool, ...]:
    are_valid = read_body(check(answer).body, "acknowledgements").get("acknowledged")
    if not isinstance(are_valid, list) or len(are_valid) != len(request.receipts):
        raise MalformedError(f"acknowledged: expected {len(request.receipts)} truth values, found {are_valid!r:.80}")
    return tuple(map(bool, are_valid))


_NOTHING: Final = _Result(_reply_nothing, _read_nothing)
_OFFSET: Final = _in_header(OffsetHeader, OffsetHeader, lambda header: header.offset)
_GROUPS: Final = _in_body("groupList", "the groups of a topic", list, _names_in)
"""Only the names of the groups."""
_LOCKED: Final = _in_body(
    "lockOKMQSet", "locked queues", lambda queues: [queue_row(queue) for queue in sorted(queues)], queues_of
)
_MOVED: Final = _in_body(
    "offsetTable",
    "a reset",
    lambda offsets: {queue_key(queue): queue_offset for queue, queue_offset in offsets.items()},
    offsets_of,
)


# ---- requests in a body


def _locks(kind: type[LockQueues | UnlockQueues], code: RequestCode, result: _Result) -> Form:
    def row(request: LockQueues | UnlockQueues) -> dict[str, object]:
        queues = [queue_row(queue) for queue in sorted(request.queues)]
        return {"clientId": request.client_id, "consumerGroup": request.group, "mqSet": queues}

    def parse(body: dict[str, Any]) -> LockQueues | UnlockQueues:
        queues = queues_of(body.get("mqSet"))
        return kind(text_in(body, "consumerGroup"), text_in(body, "clientId"), queues)

    return _by_body(code, row, parse, result)


def _check_row(request: CheckSubscription) -> dict[str, object]:
    row = subscription_row(request.subscription)
    return {"clientId": request.client_id, "group": request.group, "subscriptionData": row}


def _parse_check(body: dict[str, Any]) -> CheckSubscription | None:
    """Return the request, None if it has no subscription."""
    row = body.get("subscriptionData")
    if row is None:
        return None
    subscription = subscription_of(row)
    return CheckSubscription(text_in(body, "clientId"), text_in(body, "group"), subscription)


def _parse_group(body: dict[str, Any]) -> SetGroup:
    """Return the request, in which an omitted setting has its default: as at a broker, the row replaces the group's."""
    name = text_in(body, "groupName")
    return SetGroup(name, {**group_row(name), **body})


def _parse_acknowledge(body: dict[str, Any]) -> Acknowledge:
    receipts = body.get("receipts")
    if not isinstance(receipts, list):
        raise MalformedError(f"receipts: expected a list, found {receipts!r:.80}")
    return Acknowledge(text_in(body, "group"), text_in(body, "topic"), tuple(map(str, receipts)))


def _resend_row(request: ResendLetters) -> dict[str, object]:
    flags = {"onlyUnsent": request.only_unsent, "dryRun": request.dry_run}
    return {"group": request.group, "letters": request.letters, **flags}


def _parse_resend(body: dict[str, Any]) -> ResendLetters:
    letters = None if body.get("letters") is None else letters_in(body)
    return ResendLetters(
        text_in(body, "group"), letters, only_unsent=bool(body.get("onlyUnsent")), dry_run=bool(body.get("dryRun"))
    )


def _reply_resent(request: ResendLetters, answer: ResentLetters) -> Reply:
    refused = [
        [*letter, name_of_error(error, in_share=True), code_of_error(error), str(error)]
        for letter, error in answer.refused
    ]
    return Reply(body=write_body({"letters": answer.sent, "refused": refused}))


def _read_resent(request: ResendLetters, answer: Frame) -> ResentLetters:
    body = read_body(check(answer).body, "dead letters")
    rows = body.get("refused", [])
    refused = letters_in({"letters": [row[:3] for row in rows]})
    return ResentLetters(letters_in(body), tuple(zip(refused, (_error_of(*row[3:]) for row in rows), strict=True)))


def _written(time: datetime | None) -> Any:  # noqa: ANN401 (in the place of a time)
    return None if time is None else (round(1000 * time.timestamp()), str(time.tzinfo))


def _schedule_in(row: Sequence[Any]) -> Schedule:
    schedule = Schedule(*row)
    return schedule._replace(next=_read_time(schedule.next), last=_read_time(schedule.last))


def _read_time(pair: Any) -> datetime | None:  # noqa: ANN401 (in the place of a time)
    return None if pair is None else datetime.fromtimestamp(pair[0] / 1000, ZoneInfo(pair[1]))


# ---- the table

_C = RequestCode
OPERATOR_FORMS: Final[Mapping[type[Any], Form]] = {
    TopicGroups: _as_header(_C.QUERY_TOPIC_CONSUME_BY_WHO, _GROUPS),
    CreateTopic: _as_header(_C.UPDATE_AND_CREATE_TOPIC, _NOTHING),
    DeleteTopic: _as_header(_C.DELETE_TOPIC_IN_BROKER, _NOTHING),
    CleanUnusedTopics: _as_header(_C.CLEAN_UNUSED_TOPIC, _Result(_reply_nothing, _read_no_queues)),
    DeleteExpiredFiles: _as_header(_C.DELETE_EXPIRED_COMMITLOG, _NOTHING),
    SetGroup: _by_body(
        _C.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        lambda request: {**group_row(request.group), **request.settings},  # a broker replaces the whole row
        _parse_group,
        _NOTHING,
    ),
    DeleteGroup: _as_header(_C.DELETE_SUBSCRIPTIONGROUP, _NOTHING),
    ViewMessage: _as_header(_C.VIEW_MESSAGE_BY_ID, _Result(_reply_viewed, _read_viewed)),
    QueryMessages: _as_header(_C.QUERY_MESSAGE, _Result(_reply_messages, _read_messages)),
}
"""By class of request: the broker answers these as they are, and one that changes something only on its own machine."""
FORMS: Final[Mapping[type[Any], Form]] = {
    **OPERATOR_FORMS,
    EndTransaction: _as_header(_C.END_TRANSACTION, _NOTHING),
    Unregister: _as_header(_C.UNREGISTER_CLIENT, _NOTHING),
    ConsumerIds: _as_header(_C.GET_CONSUMER_LIST_BY_GROUP, _Result(_reply_ids, _read_ids)),
    QueryOffset: _as_header(_C.QUERY_CONSUMER_OFFSET, _Result(_reply_progress, _read_progress)),
    SaveProgress: _as_header(_C.SAVE_PROGRESS, _NOTHING),
    HoldPlace: _as_header(
        _C.HOLD_PLACE,
        _in_header(OffsetHeader, _header_of_place, lambda header: header.offset if header.offset >= 0 else None),
    ),
    UpdateOffset: _as_header(_C.UPDATE_CONSUMER_OFFSET, _NOTHING),
    MaxOffset: _as_header(_C.GET_MAX_OFFSET, _OFFSET),
    MinOffset: _as_header(_C.GET_MIN_OFFSET, _OFFSET),
    QueueOffsetAt: _as_header(_C.SEARCH_OFFSET_BY_TIMESTAMP, _OFFSET),
    LockQueues: _locks(LockQueues, _C.LOCK_BATCH_MQ, _LOCKED),
    UnlockQueues: _locks(UnlockQueues, _C.UNLOCK_BATCH_MQ, _NOTHING),
    SendBack: _as_header(_C.CONSUMER_SEND_MSG_BACK, _NOTHING),
    CheckSubscription: _by_body(_C.CHECK_CLIENT_CONFIG, _check_row, _parse_check, _NOTHING),
    CancelMessage: _as_header(
        _C.CANCEL_MESSAGE, _Result(lambda request, result: Reply(CancelledHeader(*result)), _read_cancelled)
    ),
    StartGroup: _as_header(
        _C.START_GROUP, _Result(lambda request, outcome: Reply(StartedHeader(outcome.value)), _read_started)
    ),
    TakeHandOuts: _as_header(
        _C.TAKE_HAND_OUTS,
        _in_header(
            HandedOutHeader,
            lambda counts: HandedOutHeader(*counts),
            lambda header: (header.allowed, header.again),
        ),
    ),
    ResetGroup: _as_header(_C.INVOKE_BROKER_TO_RESET_OFFSET, _MOVED),
    Acknowledge: _by_body(
        _C.ACKNOWLEDGE,
        lambda request: {"group": request.group, "topic": request.topic, "receipts": request.receipts},
        _parse_acknowledge,
        _Result(_reply_acknowledged, _read_acknowledged),
    ),
    ChangeInvisible: _as_header(
        _C.CHANGE_INVISIBLE, _in_header(NewReceiptHeader, NewReceiptHeader, lambda header: header.receipt)
    ),
    ResendLetters: _by_body(_C.RESEND_LETTERS, _resend_row, _parse_resend, _Result(_reply_resent, _read_resent)),
    ChangeSchedule: _by_body(
        _C.CHANGE_SCHEDULE,
        lambda request: {"name": request.name, "change": request.change, "rule": request.rule},
        lambda body: ChangeSchedule(text_in(body, "name"), body["change"], body["rule"]),
        _NOTHING,
    ),
    DescribeSchedules: _by_body(
        _C.DESCRIBE_SCHEDULES,
        lambda request: {},
        lambda body: DescribeSchedules(),
        _in_body(
            "schedules",
            "schedules",
            lambda schedules: [row._replace(next=_written(row.next), last=_written(row.last)) for row in schedules],
            lambda rows: tuple(map(_schedule_in, rows)),
        ),
    ),
    ForwardToDeadLetters: _as_header(_C.FORWARD_TO_DEAD_LETTERS, _NOTHING),
}
"""By class of request. Heartbeats, sends, pulls and receives, which need a connection's state, have their own."""


# ---- heartbeats


def heartbeat_frame(request: Heartbeat) -> Frame:
    return frame_of(RequestCode.HEART_BEAT, body=heartbeat_body(request))


# ---- sends


def send_frame(request: SendMessage | SendBatch | SendReply) -> Frame:
    if isinstance(request, SendBatch):
        items = [
            BatchItem(message.body, message.flag, encode_properties(message.properties)) for message in request.messages
        ]
        wait = {name: text for name, text in request.messages[0].properties.items() if name == PropertyName.WAIT}
        header = send_header(request, encode_properties(wait).decode())
        return frame_of(RequestCode.SEND_BATCH_MESSAGE, header, encode_batch(items))
    send = request.send if isinstance(request, SendReply) else request
    code = RequestCode.SEND_MESSAGE_V2 if send is request else RequestCode.SEND_REPLY_MESSAGE_V2
    header = send_header(send, encode_properties(send.message.properties).decode())
    return frame_of(code, header, send.message.body)


def send_header(send: SendMessage | SendBatch, properties: str) -> SendHeader:
    """Return the header of a send, with the properties of its message or those that all messages of its batch share."""
    is_batch = isinstance(send, SendBatch)
    message = send.messages[0] if isinstance(send, SendBatch) else send.message
    return SendHeader(
        producer_group=send.group,
        topic=message.topic,
        default_topic=send.default_topic,
        default_topic_queue_nums=send.default_queues,
        queue_id=send.queue_id,
        sys_flag=0 if isinstance(send, SendBatch) else send.sys_flag,
        born_timestamp=send.born_timestamp_ms,
        flag=message.flag,
        properties=properties,
        reconsume_times=0 if isinstance(send, SendBatch) else send.reconsume_times,
        max_reconsume_times=None if isinstance(send, SendBatch) else send.max_reconsume_times,
        batch=is_batch,
    )


def pushed_reply(header: SendHeader, body: bytes, born_host: Host, store_host: str, store_timestamp_ms: int) -> Frame:
    """Return the frame that pushes a reply, which was sent with this header, to the client that waits for it."""
    pushed = PushedReplyHeader(
        **{field.name: getattr(header, field.name) for field in fields(MessageFields)},
        born_host=format_host(born_host),
        store_host=store_host,
        store_timestamp=store_timestamp_ms,
    )
    return frame_of(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, body)


def sent_reply(response: SendResponse, code: int, remark: str | None) -> Reply:
    """Return the answer to a send; ``code`` and ``remark`` say why a stored reply could not be pushed."""
    status = response.status
    header = SentHeader(
        ",".join(response.offset_ids),
        response.queue_id,
        response.queue_offset,
        response.transaction_id,
        recall_handle=response.recall_handle,
    )
    if remark is None and status is not SendStatus.SEND_OK:
        remark = status.name
    return Reply(header, code=code or SEND_CODES[status], remark=remark)


def read_sent(answer: Frame) -> SendResponse:
    status = _STATUSES.get(answer.code)
    if status is None:
        raise refusal(answer)
    sent = from_fields(SentHeader, answer.fields)
    ids = tuple(sent.msg_id.split(","))
    return SendResponse(
        status,
        sent.queue_id,
        sent.queue_offset,
        parse_offset_message_id(ids[0])[1],
        ids,
        sent.transaction_id,
        sent.recall_handle,
    )


# ---- pulls


def pull_frame(request: PullMessage, suspend_ms: int) -> Frame:
    """Return the frame of a pull, which the broker may hold for ``suspend_ms`` if the request has ``notify``."""
    subscription = request.subscription
    flag = 0 if request.commit_offset is None else PULL_COMMITS
    flag |= 0 if request.notify is None else PULL_WAITS
    flag |= 0 if subscription is None else PULL_SUBSCRIBES
    header = PullHeader(
        consumer_group=request.group,
        topic=request.topic,
        queue_id=request.queue_id,
        queue_offset=request.queue_offset,
        max_msg_nums=request.max_messages,
        sys_flag=flag,
        commit_offset=request.commit_offset or 0,
        suspend_timeout_millis=0 if request.notify is None else suspend_ms,
        sub_version=0 if subscription is None else subscription.version,
        subscription="" if subscription is None else subscription.expression,
        expression_type="TAG" if subscription is None else subscription.expression_type,
        damage_ms=None if request.damage_ms == DAMAGE_MS else request.damage_ms,
    )
    return frame_of(RequestCode.PULL_MESSAGE, header)


def parse_pull(header: PullHeader, client_id: str, notify: Callable[[], None] | None, *, commits: bool) -> PullMessage:
    """Return the request of a client; only the first try of a pull commits, since progress can move during a hold."""
    subscription = None
    if header.sys_flag & PULL_SUBSCRIBES:
        expression, kind = header.subscription or "*", header.expression_type or "TAG"
        subscription = Subscription(header.topic, expression, kind, header.sub_version)
    return PullMessage(
        client_id=client_id,
        group=header.consumer_group,
        topic=header.topic,
        queue_id=header.queue_id,
        queue_offset=header.queue_offset,
        max_messages=header.max_msg_nums,
        subscription=subscription,
        commit_offset=header.commit_offset if commits and header.sys_flag & PULL_COMMITS else None,
        notify=notify,
        subscription_version=header.sub_version,
        joined=True,
        damage_ms=header.damage_ms,
    )


def pulled_remark(header: PullHeader, response: PullResponse) -> str:
    """Return the remark in the answer to a pull, which says why it has no messages."""
    if response.status is PullStatus.OFFSET_ILLEGAL:
        return "OFFSET_TOO_SMALL" if header.queue_offset < response.min_offset else "OFFSET_OVERFLOW_BADLY"
    return _REMARKS[response.status]


def pull_status(answer: Frame) -> PullStatus | None:
    """Return the status in the answer to a pull, None if it was refused. A hold that has ended found nothing."""
    return _PULL_STATUSES.get(answer.code)


def read_pulled(answer: Frame) -> tuple[PullResponse, int]:
    """Return the response in the answer to a pull, and the id of the broker that should get the next one.

    Raises:
        MalformedError: The answer has another form.
    """
    status = _PULL_STATUSES[answer.code]
    header = from_fields(PulledHeader, answer.fields)
    messages = messages_of(answer.body) if status is PullStatus.FOUND else ()
    if any(message.sys_flag & record.INNER_BATCH for message in messages):
        messages = tuple(chain.from_iterable(map(unwrapped, messages)))
    suggested = header.suggest_which_broker_id
    response = PullResponse(
        status,
        header.next_begin_offset,
        header.min_offset,
        header.max_offset,
        messages,
        suggests_replica=suggested != 0,
    )
    return response, suggested


# ---- receives


def receive_frame(request: Receive, hold: int) -> Frame:
    """Return the frame of a receive, which the broker holds under this number unless it is 0."""
    subscription = request.subscription or Subscription(request.topic)
    header = ReceiveHeader(
        client_id=request.client_id,
        consumer_group=request.group,
        topic=request.topic,
        max_messages=request.max_messages,
        invisible_ms=request.invisible_ms,
        hold=hold,
        attempt_id=request.attempt_id,
        subscription=subscription.expression,
        expression_type=subscription.expression_type,
        sub_version=subscription.version,
        max_attempts=request.max_attempts,
        acknowledged="\n".join(request.acknowledged) or None,
        damage_ms=request.damage_ms,
        max_process_deaths=request.max_process_deaths,
        takes=request.takes,
    )
    return frame_of(RequestCode.RECEIVE, header)


def parse_receive(header: ReceiveHeader, notify: Callable[[], None] | None) -> Receive:
    return Receive(
        client_id=header.client_id,
        group=header.consumer_group,
        topic=header.topic,
        max_messages=header.max_messages,
        invisible_ms=header.invisible_ms,
        subscription=Subscription(header.topic, header.subscription, header.expression_type, header.sub_version),
        attempt_id=header.attempt_id,
        max_attempts=header.max_attempts,
        notify=notify,
        acknowledged=tuple(header.acknowledged.split("\n")) if header.acknowledged else (),
        damage_ms=header.damage_ms,
        max_process_deaths=header.max_process_deaths,
        takes=header.takes,
    )


def received_reply(response: ReceiveResponse) -> Reply:
    lines = [f"{part.receipt} {part.attempt} {part.visible_timestamp_ms}" for part in response.messages]
    return Reply(
        ReceivedHeader(response.is_held, "\n".join(lines), response.suspect_deaths),
        records_body(part.message for part in response.messages),
    )


def read_received(answer: Frame) -> ReceiveResponse:
    header = from_fields(ReceivedHeader, check(answer).fields)
    try:
        rows = [line.rsplit(" ", 2) for line in header.deliveries.split("\n") if line]
        messages = [
            Received(message, message.topic, receipt, int(attempt), int(visible_ms))
            for message, (receipt, attempt, visible_ms) in zip(messages_of(answer.body), rows, strict=True)
        ]
    except ValueError as error:
        raise MalformedError(f"deliveries: {error}") from error
    return ReceiveResponse(messages, header.is_held, header.suspect_deaths)
