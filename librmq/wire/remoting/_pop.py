"""POP and recall, requests of RocketMQ 5: their frames in both directions, and the server's answers.

::

    POP_MESSAGE  group, topic, queue (-1: any), number, invisible time (ms)
       answer    time of the receive, invisible time, revive queue; for each queue, by a mark of its topic (0 the topic
                 itself, 1 and 2 the group's retry topic), the first queue offset and those of the messages; of a
                 group in order, how often each message (``qo`` queue ``%`` queue offset) was received before, if it
                 was, and the least such count of each queue; records
    NOTIFICATION  group, topic, queue, poll time (ms): held until a POP can find messages
       answer    whether it can
    ACK_MESSAGE, CHANGE_MESSAGE_INVISIBLETIME
                 group, topic of the record, queue, queue offset, and as ``extraInfo`` what names the receive
    RECALL_MESSAGE  topic, and the handle in the answer to the send of a message with a delivery time

A receipt (`librmq.message.ids.Receipt`) has nine fields; the first eight are ``extraInfo``, which a
record of a retry topic carries as its property ``POP_CK``. Mirrors ``PopMessageProcessor``, ``AckMessageProcessor``,
``ChangeInvisibleTimeProcessor``, ``RecallMessageProcessor`` and ``ExtraInfoUtil`` of 5.3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from librmq.broker import Broker
from librmq.broker.long_polling import Deadlines
from librmq.errors import BrokerError, MalformedError, ReceiptError, RmqError
from librmq.message import StoredMessage
from librmq.message import record as record_format
from librmq.message.ids import RecallHandle, Receipt
from librmq.message.properties import decode_properties, encode_properties
from librmq.message.topics import original_topic, receive_retry_topic
from librmq.protocol import (
    Acknowledge,
    CancelMessage,
    CancelReceive,
    CancelResult,
    ChangeInvisible,
    Receive,
    Received,
    ReceiveResponse,
    ResponseCode,
    Subscription,
)
from librmq.runtime import Step
from librmq.wire.remoting._bodies import messages_of, records_body, unwrapped
from librmq.wire.remoting._channels import Handlers, RemotingCall
from librmq.wire.remoting._frames import Frame, from_fields
from librmq.wire.remoting._headers import (
    NotifiedHeader,
    PopAckHeader,
    PopChangedHeader,
    PopHeader,
    PoppedHeader,
    RecallHeader,
    RequestCode,
)
from librmq.wire.remoting._request_codec import check, frame_of

PROPERTY_POP_CK: Final = "POP_CK"
_NOTHING: Final = (19, 209, 210)
"""Answers without a message: not found, too many wait, waited long enough."""
_NO_MESSAGE: Final = 208
_ILLEGAL: Final = 604
_ANY_QUEUE: Final = -1
_FROM_FIRST: Final = 0
_LONGEST_POLL_MS: Final = 60_000
_MOST_NOTIFICATIONS: Final = 10_000
_ALL_ATTEMPTS: Final = 1 << 31


# ---- at the client


def pop_frame(request: Receive, now_ms: int, *, is_ordered: bool, poll_ms: int | None = None) -> Frame:
    """Return the frame of a receive that is not held; ``is_ordered`` says that the group receives in order.

    With ``poll_ms`` it is the frame that asks when a receive can find messages.
    """
    subscription = request.subscription or Subscription(request.topic)
    header = PopHeader(
        consumer_group=request.group,
        topic=request.topic,
        queue_id=_ANY_QUEUE,
        max_msg_nums=request.max_messages,
        invisible_time=request.invisible_ms,
        poll_time=poll_ms or 0,
        born_time=now_ms,
        init_mode=_FROM_FIRST,
        exp_type=subscription.expression_type,
        exp=subscription.expression,
        order=is_ordered,
        attempt_id=(request.attempt_id or None) if poll_ms is None else None,
    )
    return frame_of(RequestCode.POP_MESSAGE if poll_ms is None else RequestCode.NOTIFICATION, header)


def read_popped(request: Receive, broker_name: str, answer: Frame) -> ReceiveResponse:
    """Return the response in the answer to a receive; the messages of one record follow each other."""
    if answer.code in _NOTHING:
        return ReceiveResponse()
    header = from_fields(PoppedHeader, check(answer).fields)
    first = _numbers("startOffsetInfo", header.start_offset_info)
    counts = _numbers("orderCountInfo", header.order_count_info)
    received = []
    for record in messages_of(answer.body):
        named = record.properties.get(PROPERTY_POP_CK)
        if named is not None:
            receipt = Receipt.parse(named)
        else:
            retry = _retry_of(request.group, request.topic, record.topic)
            begin = first.get((retry, str(record.queue_id)), record.queue_offset)
            receipt = Receipt(
                first_offset=begin, received_ms=header.pop_time, invisible_ms=header.invisible_time,
                revive_queue=header.revive_qid, retry=retry, broker_name=broker_name, queue_id=record.queue_id,
                queue_offset=record.queue_offset,
            )  # fmt: skip
        receipt = receipt._replace(physical_offset=record.physical_offset)
        stored_topic = receipt.stored_topic(request.group, request.topic)
        visible_ms = receipt.received_ms + receipt.invisible_ms
        mark = _message_mark(record.queue_id, record.queue_offset)
        of_queue = counts.get((receipt.retry, str(record.queue_id)), 0)
        before = counts.get((receipt.retry, mark), of_queue) or record.reconsume_times
        for number, message in enumerate(unwrapped(record)):
            text = str(receipt._replace(queue_offset=receipt.queue_offset + number))
            received.append(Received(message, stored_topic, text, before + 1, visible_ms))
    return ReceiveResponse(received)


def _numbers(name: str, text: str | None) -> dict[tuple[str, str], int]:
    """Return the numbers in a field of an answer, by mark of the topic, and queue or message."""
    numbers = {}
    for part in filter(None, (text or "").split(";")):
        try:
            retry, key, number = part.split(" ")
            numbers[retry, key] = int(number)
        except ValueError:
            raise MalformedError(f"{name}: {part!r:.80}") from None
    return numbers


def _message_mark(queue_id: int, queue_offset: int) -> str:
    return f"qo{queue_id}%{queue_offset}"


def _retry_of(group: str, topic: str, stored_topic: str) -> str:
    if stored_topic == receive_retry_topic(group, topic):
        return "1"
    return "2" if stored_topic == receive_retry_topic(group, topic, v2=True) else "0"


def ack_frame(group: str, topic: str, receipt: Receipt) -> Frame:
    real_topic = receipt.stored_topic(group, topic)
    header = PopAckHeader(group, real_topic, receipt.queue_id, receipt.extra_info, receipt.queue_offset)
    return frame_of(RequestCode.ACK_MESSAGE, header)


def read_acked(answer: Frame) -> bool:
    """Return whether the receipt was valid."""
    if answer.code == _NO_MESSAGE:
        return False
    check(answer)
    return True


def change_frame(request: ChangeInvisible, receipt: Receipt) -> Frame:
    """Return the frame that changes when a message is visible again."""
    real_topic = receipt.stored_topic(request.group, request.topic)
    place = receipt.queue_id, receipt.extra_info, receipt.queue_offset
    header = PopAckHeader(request.group, real_topic, *place, request.invisible_ms)
    return frame_of(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)


def read_changed(receipt: Receipt, answer: Frame) -> str:
    """Return the new receipt.

    Raises:
        BrokerError: The request was refused.
        ReceiptError: The message of a group in order was acknowledged; brokers answer without the new times.
    """
    if "popTime" not in check(answer).fields:
        raise ReceiptError(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the message at queue offset {receipt.queue_offset} is no longer in flight: it was acknowledged",
        )
    header = from_fields(PopChangedHeader, answer.fields)
    return str(
        receipt._replace(
            first_offset=receipt.queue_offset,
            received_ms=header.pop_time,
            invisible_ms=header.invisible_time,
            revive_queue=header.revive_qid,
        )
    )


def recall_frame(topic: str, handle: str) -> Frame:
    return frame_of(RequestCode.RECALL_MESSAGE, RecallHeader(topic, handle))


def read_recalled(answer: Frame) -> CancelResult:
    """Return whether a message was recalled; what the broker says of one that is due already is the reason.

    Raises:
        BrokerError: The broker has no recall, or forbids it.
    """
    if answer.code == _ILLEGAL:
        return CancelResult(cancelled=False, why=answer.remark or "recall failed")
    check(answer)
    return CancelResult(cancelled=True, why="recalled")


# ---- at the server


class PopRequests:
    """Answers POP and recall by the broker's own receives and cancellation. Thread-safe.

    A receive that finds nothing is answered at once, whatever its poll time; NOTIFICATION is held. As at a broker, the
    client makes dead letters, and looks whether the time of a receipt is over: an acknowledgement or a change after it
    succeeds here, and has no effect.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._held = 0
        self._deadlines: Deadlines[Callable[[], None]] = Deadlines()
        self._step = Step(f"{broker.name}: notifications", self._run_due)
        self.handlers: Handlers = {
            RequestCode.POP_MESSAGE: self._pop,
            RequestCode.NOTIFICATION: self._notify,
            RequestCode.ACK_MESSAGE: self._acknowledge,
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME: self._change,
            RequestCode.RECALL_MESSAGE: self._recall,
        }

    def _pop(self, call: RemotingCall) -> bytes:
        header: PopHeader = call.header
        subscription = Subscription(header.topic, header.exp or "*", header.exp_type or "TAG")
        request = Receive(
            "", header.consumer_group, header.topic, header.max_msg_nums, header.invisible_time, subscription,
            header.attempt_id or "", max_attempts=_ALL_ATTEMPTS,
        )  # fmt: skip
        response = call.await_device(self._broker, request, call.call_broker(request))
        if not response.messages:
            return call.answer(code=_NOTHING[-1], remark="no message")
        receipts = [Receipt.parse(part.receipt) for part in response.messages]
        first = receipts[0]
        offsets: dict[tuple[str, int], list[int]] = {}
        records = []
        for part, receipt in zip(response.messages, receipts, strict=True):
            offsets.setdefault((receipt.retry, receipt.queue_id), []).append(receipt.queue_offset)
            is_like_first = receipt[1:4] == first[1:4] and receipt.retry == "0"
            records.append(part.message if is_like_first else _with_receipt(part.message, header.topic, receipt))
        answer = PoppedHeader(
            first.received_ms,
            first.invisible_ms,
            first.revive_queue,
            0,
            ";".join(f"{retry} {queue_id} {numbers[0]}" for (retry, queue_id), numbers in offsets.items()),
            ";".join(
                f"{retry} {queue_id} {','.join(map(str, numbers))}" for (retry, queue_id), numbers in offsets.items()
            ),
            _order_counts(response.messages, receipts) if header.order else None,
        )
        return call.answer(answer, body=records_body(records))

    def _notify(self, call: RemotingCall) -> bytes | None:
        """Answer when a receive can find messages, or the poll time is over."""
        header: PopHeader = call.header
        runner, poll_ms = self._broker.runner, min(header.poll_time, _LONGEST_POLL_MS)
        is_answered = False

        def end(*, has_message: bool) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                self._held -= 1
                self._deadlines.discard(give_up)
                if not has_message:
                    call.call_broker(CancelReceive(notify))
                call.channel.run_later(partial(call.write_later, call.answer(NotifiedHeader(has_message))))

        def notify() -> None:
            end(has_message=True)

        def give_up() -> None:
            with suppress(RmqError):  # the client has left, or the broker is closed
                end(has_message=False)

        subscription = Subscription(header.topic, header.exp or "*", header.exp_type or "TAG")
        with runner.lock:
            if self._held >= _MOST_NOTIFICATIONS:
                return call.answer(NotifiedHeader(polling_full=True))
            self._held += 1
            try:
                call.call_broker(Receive("", header.consumer_group, header.topic, 0, 1, subscription, notify=notify))
            except BaseException:
                self._held -= 1
                raise
            if poll_ms <= 0:
                give_up()
            elif not is_answered:
                due_ms = runner.now_ms() + poll_ms
                self._deadlines.set(give_up, due_ms)
                runner.wake(self._step, due_ms)
        return None

    def _run_due(self, now_ms: int) -> int | None:
        for give_up in self._deadlines.pop_due(now_ms):
            give_up()
        return self._deadlines.first_ms

    def _acknowledge(self, call: RemotingCall) -> bytes:
        header: PopAckHeader = call.header
        topic, receipt = self._named(header)
        call.call_broker(Acknowledge(header.consumer_group, topic, (receipt,)))
        return call.answer()

    def _change(self, call: RemotingCall) -> bytes:
        header: PopAckHeader = call.header
        topic, receipt = self._named(header)
        try:
            changed = Receipt.parse(
                call.call_broker(ChangeInvisible(header.consumer_group, topic, receipt, header.invisible_time))
            )
        except ReceiptError:
            if Receipt.parse(receipt).is_ordered:
                return call.answer()
            changed = Receipt.parse(receipt)._replace(
                received_ms=self._broker.runner.now_ms(), invisible_ms=header.invisible_time
            )
        return call.answer(PopChangedHeader(changed.received_ms, changed.invisible_ms, changed.revive_queue))

    def _named(self, header: PopAckHeader) -> tuple[str, str]:
        """Return the topic of the receive, and the receipt, of a message that the store has."""
        topic = header.topic
        if topic not in self._broker.tables.topics.rows:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist, apply first please!")
        begin, end = self._broker.store.queue_range(topic, header.queue_id)
        if not begin <= header.offset < end:
            at = f"{topic}@{header.queue_id}, commit:{header.offset}, store:{begin}~{end}"
            raise BrokerError(_NO_MESSAGE, f"offset is illegal, key:{at}")
        receipt = Receipt.parse(header.extra_info)
        receipt = receipt._replace(queue_id=header.queue_id, queue_offset=header.offset)
        return topic if receipt.retry == "0" else original_topic(header.consumer_group, topic), str(receipt)

    def _recall(self, call: RemotingCall) -> bytes:
        header: RecallHeader = call.header
        try:
            topic, _, _, message_id = RecallHandle.parse(header.recall_handle)
        except MalformedError as error:
            raise BrokerError(_ILLEGAL, f"recall failed, {error}") from error
        if topic != header.topic:
            raise BrokerError(_ILLEGAL, f"recall failed, {header.recall_handle!r:.80} is no handle of {header.topic!r}")
        result = self._broker.call(CancelMessage(message_id, topic))
        if not result.cancelled:
            return call.answer(code=_ILLEGAL, remark=f"recall failed: {result.why}")
        return call.answer_fields({"msgId": message_id})


def _order_counts(parts: Iterable[Received], receipts: Iterable[Receipt]) -> str:
    """Return how often messages of a group in order were received before, and the least such count of each queue."""
    counts, min_counts = list[str](), dict[tuple[str, int], int]()
    for part, receipt in zip(parts, receipts, strict=True):
        before, queue = part.attempt - 1, (receipt.retry, receipt.queue_id)
        min_counts[queue] = min(before, min_counts.get(queue, before))
        if before:
            counts.append(f"{receipt.retry} {_message_mark(receipt.queue_id, receipt.queue_offset)} {before}")
    return ";".join([*counts, *(f"{retry} {queue_id} {count}" for (retry, queue_id), count in min_counts.items())])


def _with_receipt(message: StoredMessage, topic: str, receipt: Receipt) -> StoredMessage:
    """Return a message under the topic of the receive, with its receipt, as 5.x answers one of a retry topic."""
    record = record_format.decode_record(message.raw)
    properties = decode_properties(record.properties_raw) | {PROPERTY_POP_CK: receipt.extra_info}
    changed = replace(record, topic=topic, properties_raw=encode_properties(properties))
    return StoredMessage(bytes(record_format.encode_record(changed)))


def unsupported(kind: str, broker_name: str, version: str) -> BrokerError:
    """Return the error of a broker that does not know a request."""
    return BrokerError(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        f"{broker_name} is a broker of RocketMQ {version}, which has no {kind}: see docs/connect.md",
    )
