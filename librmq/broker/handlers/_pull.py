"""Pulls: reads of queues for consumers, held if there is no message.

Mirrors ``PullMessageProcessor``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from librmq.broker._context import NEVER, BrokerContext, BrokerPart
from librmq.broker.handlers._send import SendHandler
from librmq.broker.long_polling import HandOver, Selection, parse_selection, registered_selection
from librmq.clock import Allowance
from librmq.errors import BrokerError, CorruptionError, RmqError
from librmq.message import Message, StoredMessage
from librmq.message.topics import SystemTopic
from librmq.protocol import (
    DAMAGE_MS,
    CheckSubscription,
    MaxOffset,
    MessageModel,
    MoveGroup,
    PullMessage,
    PullResponse,
    PullStatus,
    QueryOffset,
    QueueOffsetAt,
    Receive,
    ReceiveResponse,
    Request,
    ResponseCode,
    Subscription,
    TakeHandOuts,
)
from librmq.runtime.closing import LaterPart
from librmq.runtime.event_log import EventLog
from librmq.store import AppendResult, GetStatus, MessageStore, ReadResult

if TYPE_CHECKING:
    from librmq.broker._replication import Replication

_log = EventLog("librmq.broker")

_MOVED: Final = frozenset((GetStatus.OFFSET_OVERFLOW_BADLY, GetStatus.OFFSET_TOO_SMALL))


class PullHandler(BrokerPart):
    """The reading side of one broker. Thread-safe."""

    def __init__(self, context: BrokerContext, sending: SendHandler, replication: LaterPart[Replication]) -> None:
        super().__init__(context)
        self._registrations = context.registrations
        self._sending = sending
        self._replication = replication
        self._is_replica = context.config.replica_of is not None
        self._selected: dict[tuple[str, str], tuple[object, Selection]] = {}
        self._allowances: dict[str, tuple[Allowance, dict[str, tuple[int, int]]]] = {}
        """Of groups with a rate: what is left, and the rate and burst that each client says."""

    def pull(self, request: PullMessage) -> PullResponse:
        topic, queue_id, queue_offset = request.topic, request.queue_id, request.queue_offset
        store, held, notify = self._store, self._held, request.notify
        name, holder = (topic, queue_id), (request.client_id, request.group)
        is_held, hand_over = False, None if request.take is None else partial(self._hand_over, request, request.take)
        with self._runner.lock:
            selection = self._check_pull(request)
            if request.commit_offset is not None and not self._is_replica:
                self._offsets.advance_consumer_offset(topic, request.group, queue_id, request.commit_offset)
            if notify is not None:
                arrived = held.end_hold(name, holder, selection)
                if arrived is not None and request.stay and arrived.queue_offset == queue_offset:
                    response = self._answer_from_log(request, arrived, selection, notify, hand_over)
                    if response is not None:
                        return response
                elif store.queue_range(topic, queue_id)[1] == queue_offset:
                    # Hold first, then look again: a writer looks for held pulls after its append, without the lock.
                    held.hold_pull(name, holder, selection, notify, hand_over)
                    begin, end = store.queue_range(topic, queue_id)
                    if queue_offset == end:
                        return PullResponse(PullStatus.HELD, end, begin, end, (), True)
                    held.remove_pull(name, holder)
            read = self._read(request, selection)
            if isinstance(read, PullResponse):
                return read
            result = read
            status = _status(result, queue_offset)
            end = result.next_offset
            if notify is not None and request.stay and status is PullStatus.FOUND and end == result.max_offset:
                held.hold_pull(name, holder, selection, notify, hand_over)
                is_held = store.queue_range(topic, queue_id)[1] == end
                if not is_held:
                    held.remove_pull(name, holder)
        if status is PullStatus.OFFSET_ILLEGAL:
            self._store_moved_event(request, result.next_offset)
        if self._metrics is not None and status is PullStatus.FOUND:
            self._count_read(request, len(result.messages), result.total_size)
        has_others = self._is_replica or (self._replication.made is not None and self._replication.made.has_followers)
        suggests = (
            has_others and bool(result.messages) and self._store.counts_as_on_disk(result.messages[-1].physical_offset)
        )
        return PullResponse(
            status, result.next_offset, result.min_offset, result.max_offset, result.messages, is_held, suggests
        )

    def take_hand_outs(self, request: TakeHandOuts) -> tuple[int, int]:
        now_ms, group = self._runner.now_ms(), request.group
        allowance, limits = self._allowances.setdefault(group, (Allowance(now_ms), {}))
        before, members = len(set(limits.values())), self._clients.consumers.get(group)
        limits[request.client_id] = request.rate_by_1000, request.burst
        for client_id in [name for name in limits if members is None or name not in members.clients]:
            del limits[client_id]
        rate, burst = min(limits.values(), default=(request.rate_by_1000, request.burst))
        if len(set(limits.values())) > max(1, before):
            _log.warning(
                "group %(group)s: its members say different rates, %(_rates)s messages a second: the lowest counts",
                group=group,
                _rates=", ".join(f"{number / 1000:g}" for number, _ in sorted(set(limits.values()))),
            )
        return allowance.take(request.wanted, rate / 1000, burst, now_ms)

    def _read(self, request: PullMessage, selection: Selection) -> ReadResult | PullResponse:
        """Read the queue; hold the request for a message that a replica lacks, or whose entry a full disk refuses."""
        topic, queue_id, queue_offset = request.topic, request.queue_id, request.queue_offset
        store, held = self._store, self._held
        place, max_messages, matching = (topic, queue_id, queue_offset), request.max_messages, selection.matching
        try:
            result = store.read(*place, max_messages, matching, joined=request.joined, checked=True)
        except CorruptionError as error:
            if self._is_replica or not self._sending.failed().passes_damaged(
                (request.group, topic, queue_id), queue_offset, error, self._wait_for_repair(request)
            ):
                raise
            begin, end = store.queue_range(topic, queue_id)
            return PullResponse(PullStatus.NO_MATCHED_MESSAGE, queue_offset + 1, begin, end, ())
        if self._is_replica and queue_offset > result.max_offset:
            return self._wait_for_entry(request, selection, result)
        if (
            result.status is GetStatus.FOUND
            or not result.max_offset <= queue_offset < store.queue_range(topic, queue_id)[1]
        ):
            return result
        # Hold first, then read again, for a message that was stored between the two looks.
        name, holder = (topic, queue_id), (request.client_id, request.group)
        response = self._wait_for_entry(request, selection, result)
        result = store.read(*place, max_messages, matching, joined=request.joined, checked=True)
        if not result.messages:
            if request.notify is not None:
                held.answer_by_sweep(name, holder)
            return response
        held.remove_pull(name, holder)
        return result

    def _wait_for_repair(self, request: PullMessage) -> int:
        """Return the time after which the group passes a damaged message; only push consumers do so by themselves."""
        if request.damage_ms is not None:
            return request.damage_ms
        members = self._clients.consumers.get(request.group)
        return DAMAGE_MS if members is not None and members.kind == "push" else NEVER

    def _wait_for_entry(self, request: PullMessage, selection: Selection, result: ReadResult) -> PullResponse:
        """Answer a pull of a message whose entry this broker's queue does not have yet: its offset is not illegal."""
        status, is_held = PullStatus.NO_NEW_MESSAGE, request.notify is not None
        if request.notify is not None:
            name, holder = (request.topic, request.queue_id), (request.client_id, request.group)
            self._held.hold_pull(name, holder, selection, request.notify)
            status = PullStatus.HELD
        return PullResponse(status, request.queue_offset, result.min_offset, result.max_offset, (), is_held)

    def _answer_from_log(
        self,
        request: PullMessage,
        arrived: AppendResult,
        selection: Selection,
        notify: Callable[[], None],
        hand_over: HandOver | None,
    ) -> PullResponse | None:
        """Return the message that ended a hold from the log, before its entry is written, and hold the pull again.

        Return None if there are more messages or the log lacks it; then the queue is read as usual.
        """
        if self._store.queue_range(request.topic, request.queue_id)[1] != arrived.queue_offset + 1:
            return None
        raw = self._store.log.read(arrived.physical_offset, arrived.size)
        if raw is None:
            return None
        name, holder = (request.topic, request.queue_id), (request.client_id, request.group)
        self._held.hold_pull(name, holder, selection, notify, hand_over)
        begin, end = self._store.queue_range(request.topic, request.queue_id)
        if end != arrived.queue_offset + 1:
            self._held.remove_pull(name, holder)
            return None
        self._count_read(request, 1, arrived.size)
        return PullResponse(PullStatus.FOUND, end, begin, end, (StoredMessage(raw),), True)

    def _hand_over(
        self,
        request: PullMessage,
        take: Callable[[bytes, int, int], int | None],
        arrived: AppendResult,
    ) -> bool:
        """Give a message that has just been stored to the client whose pull is held, as the pull's repetition would.

        Return False if there are more messages, which one pull gets together.
        """
        topic, queue_id, appender = request.topic, request.queue_id, self._store.appender
        lane = appender.lanes.get((topic, queue_id))
        if lane is None or lane.next_queue_offset != arrived.queue_offset + 1:
            return False
        # The call that stores the message has just written the record, so it is not checked again.
        raw = appender.log.data_at(arrived.physical_offset, arrived.size)
        if len(raw) != arrived.size:
            return False
        progress = take(raw, lane.queue.min_offset, arrived.queue_offset + 1)
        if progress is None:
            return False
        if progress and not self._is_replica:
            self._offsets.advance_consumer_offset(topic, request.group, queue_id, progress)
        if self._metrics is not None:
            self._count_read(request, 1, arrived.size)
        return True

    def _count_read(self, request: PullMessage, messages: int, size: int) -> None:
        if self._metrics is not None:
            self._metrics.count("messages_out", messages, topic=request.topic, group=request.group)
            self._metrics.count("bytes_out", size, topic=request.topic, group=request.group)

    def _check_pull(self, request: PullMessage) -> Selection:
        """Refuse a pull that can't be served; return the group's selection."""
        if request.max_messages < 0:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, f"max_messages: expected 0 or more, found {request.max_messages}"
            )
        name = request.topic
        group, topic = self._groups.consuming(request.group), self._topics.readable(name)
        if not 0 <= request.queue_id < topic.read_queues:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR,
                f"topic {name!r} has {topic.read_queues} readable queues, but no queue {request.queue_id}",
            )
        if request.subscription is not None:
            return self.selection(request.subscription)
        members = self._clients.consumers.get(group.name)
        if members is None:
            raise BrokerError(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"group {group.name!r} has no running instance")
        if members.model is MessageModel.BROADCASTING and not group.broadcasts:
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"group {group.name!r} has broadcasting switched off: consumeBroadcastEnable of its settings is false "
                "(set_group with broadcasts=True switches it on)",
            )
        subscription = members.subscriptions.get(name)
        if subscription is None:
            raise BrokerError(
                ResponseCode.SUBSCRIPTION_NOT_EXIST,
                f"group {group.name!r} does not subscribe to topic {name!r} by its last heartbeat: do all its "
                "instances subscribe to the same topics?",
            )
        if request.subscription_version is not None and subscription.version < request.subscription_version:
            raise BrokerError(
                ResponseCode.SUBSCRIPTION_NOT_LATEST,
                f"group {group.name!r}, topic {name!r}: the last heartbeat has version {subscription.version} of the "
                f"subscription, and the pull has {request.subscription_version}: send a heartbeat first",
            )
        cached = self._selected.get((group.name, name))
        if cached is not None and cached[0] is subscription:
            return cached[1]
        return self._selection_of(group.name, subscription)

    def _selection_of(self, group: str, subscription: Subscription) -> Selection:
        topic = subscription.topic
        registration = None
        if not subscription.is_by_tags:
            self._check_type(subscription)
            registration = self._registrations.get(topic, group)
            if registration is None:
                raise BrokerError(
                    ResponseCode.FILTER_DATA_NOT_EXIST,
                    f"group {group!r} has no filter on topic {topic!r}: its expression did not compile",
                )
        source: object = registration or subscription
        cached = self._selected.get((group, topic))
        if cached is None or cached[0] is not source:
            if registration is None:
                selection = parse_selection(subscription)
            else:
                selection = registered_selection(self._registrations, registration)
            cached = self._selected[group, topic] = source, selection
        return cached[1]

    def check_subscription(self, request: CheckSubscription) -> None:
        self.selection(request.subscription)

    def selection(self, subscription: Subscription, *, by_text: bool = False) -> Selection:
        """Return the selection of a subscription, as `parse_selection`; refuse one that can't be pulled."""
        self._check_type(subscription)
        return parse_selection(subscription, by_text=by_text)

    def _check_type(self, subscription: Subscription) -> None:
        if not subscription.is_by_tags and not self._store.config.enable_property_filter:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR,
                f"topic {subscription.topic!r}: filters of type {subscription.expression_type} are switched off: "
                "open the broker with StoreConfig(enable_property_filter=True)",
            )

    def _store_moved_event(self, request: PullMessage, next_offset: int) -> None:
        """Store an event, as 4.9 does, when a consumer asks for a missing offset."""
        event = {
            "consumerGroup": request.group,
            "messageQueue": {
                "brokerName": self._broker_name,
                "queueId": request.queue_id,
                "topic": request.topic,
            },
            "offsetNew": next_offset,
            "offsetRequest": request.queue_offset,
        }
        body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
        message = Message(SystemTopic.OFFSET_MOVED, body, tags=request.group, keys=request.group)
        message.properties["DELAY"] = "0"
        try:
            self._sending.store_message(message, 0)
        except RmqError as error:  # for example a full disk; the client continues at a valid offset nevertheless
            _log.warning(
                "group %(group)s: the event %(event)s could not be stored: %(error)s",
                group=request.group,
                event=event,
                error=error,
                topic=request.topic,
                queue_id=request.queue_id,
            )


# ---- what clients elsewhere may know

_PLACES: Final = (MaxOffset, MoveGroup, QueryOffset, QueueOffsetAt)


def told_end(store: MessageStore, request: Request[Any], answer: Any) -> int:  # noqa: ANN401 (of any request)
    """Return the physical offset below which are all messages that an answer has or lets its client pass."""
    if isinstance(request, Receive):
        received: ReceiveResponse = answer
        return max((item.message.physical_offset + item.message.size for item in received.messages), default=0)
    if isinstance(request, _PLACES):
        return store.log.end
    if not isinstance(request, PullMessage) or answer.next_offset == request.queue_offset:
        return 0
    response: PullResponse = answer
    last, passed = response.messages[-1] if response.messages else None, response.next_offset - 1
    if last is None or last.queue_offset != passed:  # a filter has let later ones pass
        last = next(iter(store.read(request.topic, request.queue_id, passed, 1).messages), None)
    return store.log.end if last is None else last.physical_offset + last.size


def _status(result: ReadResult, queue_offset: int) -> PullStatus:
    status = result.status
    if status is GetStatus.FOUND:
        return PullStatus.FOUND
    if status in _MOVED:
        return PullStatus.OFFSET_ILLEGAL
    if status is GetStatus.NO_MESSAGE_IN_QUEUE:
        return PullStatus.OFFSET_ILLEGAL if queue_offset else PullStatus.NO_NEW_MESSAGE
    if status is GetStatus.OFFSET_OVERFLOW_ONE:
        return PullStatus.NO_NEW_MESSAGE
    return PullStatus.NO_MATCHED_MESSAGE  # the scan ended before the end of the queue
