"""Sends: storing of messages from producers and of the broker's own, and replies, which are also pushed to clients.

Mirrors ``SendMessageProcessor`` and ``ReplyMessageProcessor``. A stored message has the properties that 4.9 stores, in
the same order. Appending does not take the runner's lock; waking held pulls and finding the client of a reply do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from librmq.broker._context import BrokerContext, BrokerPart, refused_by_replica
from librmq.broker._delayed_messages import Deliveries
from librmq.broker._topics import Topic
from librmq.config import to_seconds
from librmq.errors import (
    BrokerBusyError,
    BrokerError,
    FlushFailedError,
    MessageIllegalError,
    RmqError,
)
from librmq.java.lang import java_int
from librmq.message import Message, record
from librmq.message.delays import is_timed, time_properties
from librmq.message.ids import Host, encode_host, parse_host
from librmq.message.message import delayed_batch, delayed_transaction
from librmq.message.properties import PropertyName, is_half, priority_of
from librmq.message.topics import WAITING_TOPICS, SystemTopic, TopicPrefix, is_system_topic
from librmq.protocol import (
    TOOL_PRODUCERS,
    ReplyArrived,
    ResponseCode,
    SendBatch,
    SendMessage,
    SendReply,
    SendResponse,
    SendStatus,
    SendTogether,
)
from librmq.runtime.closing import LaterPart
from librmq.runtime.event_log import EventLog
from librmq.store import AppendResult
from librmq.store.engine.store_parts import CTRL_C_WAITS_S

if TYPE_CHECKING:
    from librmq.broker._replication import Replication
    from librmq.broker._transactions import BrokerTransactions
    from librmq.broker.handlers._repeated_sends import RecentSends
    from librmq.broker.retries import FailedMessages

_log = EventLog("librmq.broker")

_CLUSTER: Final = PropertyName.CLUSTER
_WAIT: Final = PropertyName.WAIT
_DELAY: Final = PropertyName.DELAY
_PREPARED: Final = PropertyName.TRANSACTION_PREPARED
_MAX_LOGGED_LEVELS: Final = 1000
_OK: Final = SendStatus.SEND_OK
HELD_PROPERTIES: Final = frozenset(
    (
        _DELAY,
        _PREPARED,
        PropertyName.TIMER_DELAY_MS,
        PropertyName.TIMER_DELAY_SEC,
        PropertyName.TIMER_DELIVER_MS,
        PropertyName.PRIORITY,
    )
)
"""Properties of messages that are not stored as they come."""
_new_response = tuple.__new__  # in a third of the time


class SendHandler(BrokerPart):
    """The writing side of one broker. Thread-safe."""

    def __init__(
        self,
        context: BrokerContext,
        deliveries: Deliveries,
        replication: LaterPart[Replication],
        transactions: LaterPart[BrokerTransactions],
    ) -> None:
        super().__init__(context)
        store, config = context.store, context.config
        self._by_name = context.topics.by_name
        self._master = config.replica_of
        self._cluster = context.cluster_name
        self._arrivals = deliveries.arrivals
        self._deliveries = deliveries
        self._missing_levels: set[tuple[str, int]] = set()
        self._write_tables = context.writing.write
        self._transactions = transactions
        self._waits = store.config.durability == "sync"
        self._replication = replication
        self._is_replicated = config.replication == "sync"
        self._confirms = self._waits or self._is_replicated
        self._busy_after_s = config.busy_after_s
        self._longest_wait_s = config.longest_wait_s
        self._stuck_at = -1  # the log's end when a running write was last seen,
        self._stuck_since = 0  # and the time when it was first seen
        self.failed = LaterPart(partial(self._make_failed, context))
        if context.was_killed:  # the log's end still separates what the killed process wrote
            self.failed()
        self._recent: RecentSends | None = None
        self.put: Callable[..., tuple[int, AppendResult]] = self._store_send
        """Stores a message, with the fields of a send; returns the queue that it is for, and its place."""
        if config.drop_resends_within is not None and config.replica_of is None:
            window_ms = round(1000 * to_seconds("drop_resends_within", config.drop_resends_within))
            from librmq.broker.handlers._repeated_sends import RecentSends

            self._recent = RecentSends(
                context,
                window_ms,
                lambda message: (
                    transactions().is_rolled_back(message)
                    if message.topic == SystemTopic.HALF
                    else message.topic in WAITING_TOPICS and context.cancellations.of_message(message) is not None
                ),
            )
            self.put = partial(self._recent.store_once, self._store_send)
        host = encode_host(parse_host(store.config.store_host))
        self._id_prefix = host.hex().upper()

    def _make_failed(self, context: BrokerContext) -> FailedMessages:
        from librmq.broker.retries import FailedMessages

        return FailedMessages(context, self.store_message, self._flushed, self.send_together)

    # ---- producers

    def answer(self, request: SendMessage) -> SendResponse:
        return self.confirmed(request.message, *self._put_requested(request))

    def send_together(self, request: SendTogether) -> list[SendResponse]:
        """Store messages up to the first that is refused, then wait once for the device if they have to."""
        stored = []
        for send in request.sends:
            try:
                stored.append(self._put_requested(send))
            except Exception:
                if not stored:
                    raise
                break  # as the first of another call, it is refused again
        return [self.confirmed(send.message, *place) for send, place in zip(request.sends, stored, strict=False)]

    def _put_requested(self, request: SendMessage) -> tuple[int, AppendResult]:
        return self.put(
            request.group,
            request.message,
            request.queue_id,
            request.born_timestamp_ms,
            request.born_host,
            request.sys_flag,
            request.default_queues,
            request,
        )

    def confirmed(self, message: Message, queue_id: int, result: AppendResult) -> SendResponse:
        """Return the response for a stored message, after the device and a replica have it if it requires that."""
        status = self._flushed(result, message.properties.get(_WAIT)) if self._confirms else _OK
        place = result.physical_offset
        offset_id = self._id_prefix + place.to_bytes(8).hex().upper()  # in two thirds of the time of a format
        response: SendResponse = _new_response(
            SendResponse, (status, queue_id, result.queue_offset, place, (offset_id,), None, None)
        )
        return response

    def _store_send(
        self,
        group: str,
        message: Message,
        queue_id: int,
        born_timestamp_ms: int,
        born_host: Host,
        sys_flag: int,
        default_queues: int,
        request: SendMessage | None = None,
    ) -> tuple[int, AppendResult]:
        """Store a message; return the queue that it is for, and its place.

        A ``request`` says more than other sends: how often the message was consumed, and like which topic to make its.
        """
        name = message.topic
        topic = self._by_name.get(name)
        if topic is None or not topic.is_ready:
            topic = self._for_send(
                name, default_queues, SystemTopic.AUTO_CREATE if request is None else request.default_topic
            )
        appender = self._store.appender
        if appender.log.end >= appender.room_until and not topic.is_retry:  # a retry lets a group continue
            self._check_room()
        if not 0 <= queue_id < topic.queues:
            queue_id = _choose(topic, queue_id)
        if topic.is_multi_tag:
            sys_flag |= record.MULTI_TAGS
        properties = message.properties.copy()
        is_copy = group in TOOL_PRODUCERS
        if not is_copy or record.has_room({**properties, _CLUSTER: self._cluster}):
            properties[_CLUSTER] = self._cluster  # a copy of a stored message can do without it
        wait = properties.pop(_WAIT, None)  # stored only if 4.9 stores it
        if topic.is_plain and message._delays is None and HELD_PROPERTIES.isdisjoint(properties):
            if appender.shared is not None and name not in appender.shared.offered:
                appender.shared.offer(name, topic.queues, lambda: self._by_name.get(name) is topic)
            if request is not None or is_copy:
                stored_message = Message.from_parts(name, message.body, message.flag, properties)
                times = 0 if request is None else request.reconsume_times
                return queue_id, self.store_message(
                    stored_message, queue_id, born_timestamp_ms, born_host, sys_flag, times, is_copy=is_copy
                )
            if appender.is_locked() and appender.lock.is_writing():
                self._check_busy(name)
            else:
                self._stuck_at = -1
            # A send without a request has the message to itself, so lending it the stored properties takes the place
            # of a copy.
            own_properties, message.properties = message.properties, properties
            try:
                result = self._store.append(
                    message,
                    queue_id,
                    born_timestamp_ms=born_timestamp_ms,
                    born_host=born_host,
                    sys_flag=sys_flag,
                    wait=False,
                )
            finally:
                message.properties = own_properties
            self._arrivals.stored(name, queue_id, properties, result, is_delivered=True)
            return queue_id, result
        if request is None:
            request = SendMessage(group, message, queue_id, born_timestamp_ms, born_host, default_queues=default_queues)
        return self._store_special(request, topic, queue_id, sys_flag, properties, wait)

    def _store_special(
        self,
        request: SendMessage,
        topic: Topic,
        queue_id: int,
        sys_flag: int,
        properties: dict[str, str],
        wait: str | None,
    ) -> tuple[int, AppendResult]:
        """Store a message that is not stored as it comes: a retry, a half, one with a delay or a priority."""
        message, name = request.message, topic.name
        if message._delays is not None:
            properties.update(time_properties(message))
        if PropertyName.PRIORITY in properties and not topic.is_retry:
            queue_id = _priority_queue(topic, properties, queue_id)
        stored_message = Message.from_parts(name, message.body, message.flag, properties)
        stored_queue_id = queue_id
        is_prepared = is_half(properties)
        if is_prepared:
            stored_queue_id = 0
            sys_flag = self._make_half(stored_message, queue_id, sys_flag, wait)
        elif topic.is_retry:
            stored_queue_id = self.failed().redirect(stored_message, queue_id, request)
        elif name == SystemTopic.HOP:
            stored_queue_id = self._send_to_relay(stored_message, request)
        elif is_timed(properties):
            stored_message, stored_queue_id = self._deliveries.waiting_form(
                stored_message, queue_id, is_deliver_at=message.deliver_at_ms is not None
            )
            properties = stored_message.properties
        if _DELAY in properties and self._level(name, properties[_DELAY]) > 0 and wait is not None:
            properties[_WAIT] = wait
        result = self.store_message(
            stored_message,
            stored_queue_id,
            request.born_timestamp_ms,
            request.born_host,
            sys_flag,
            request.reconsume_times,
            is_copy=request.group in TOOL_PRODUCERS,
        )
        if is_prepared:
            self._transactions().half_stored(stored_message.unique_key, result.physical_offset)
        elif topic.is_retry and stored_message.topic != name:
            group = name.removeprefix(TopicPrefix.RETRY)
            self._count("dead_letters", topic=properties.get(PropertyName.RETRY_TOPIC, name), group=group)
        return queue_id, result

    def send_batch(self, request: SendBatch) -> SendResponse:
        if not request.messages:
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "expected at least one message in a batch")
        recent = self._recent
        queue_id, results = (
            self._store_batch(request) if recent is None else recent.store_new(self._store_batch, request)
        )
        status = self._flushed(max(results), request.messages[0].properties.get(_WAIT))
        offset_ids = tuple(f"{self._id_prefix}{result.physical_offset:016X}" for result in results)
        first = results[0]
        return SendResponse(status, queue_id, first.queue_offset, first.physical_offset, offset_ids)

    def _store_batch(self, request: SendBatch) -> tuple[int, list[AppendResult]]:
        first = request.messages[0]
        topic = self._by_name.get(first.topic)
        if topic is None or not topic.is_ready:
            topic = self._for_send(first.topic, request.default_queues, request.default_topic)
        self._check_room()
        queue_id = request.queue_id
        if not 0 <= queue_id < topic.queues:
            queue_id = _choose(topic, queue_id)
        if any(is_timed(message.properties) for message in request.messages):
            raise delayed_batch(first.topic)
        if self._store.appender.lock.is_writing():
            self._check_busy(first.topic)
        results = self._store.append_batch(
            request.messages,
            queue_id,
            properties={_WAIT: first.properties.get(_WAIT, "true"), _CLUSTER: self._cluster},
            born_timestamp_ms=request.born_timestamp_ms,
            born_host=request.born_host,
            sys_flag=record.MULTI_TAGS if topic.is_multi_tag else 0,
            wait=False,
        )
        for message, result in zip(request.messages, results, strict=True):
            self._arrivals.stored(first.topic, queue_id, message.properties, result, is_delivered=True)
        return queue_id, results

    def send_reply(self, request: SendReply) -> SendResponse:
        """Push a reply to the client that requested it, and store it. Mirrors ``ReplyMessageProcessor``.

        Raises:
            BrokerError: It could not be pushed; it is stored nevertheless.
        """
        problem = self._push_reply(request.send)
        response = self.answer(request.send)
        if problem is not None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, problem)
        return response

    def _push_reply(self, send: SendMessage) -> str | None:
        message = send.message
        client_id = message.properties.get(PropertyName.REPLY_TO_CLIENT)
        with self._runner.lock:
            client = None if client_id is None else self._clients.endpoint(client_id)
        if client is None:
            return f"{self._broker_name}: the client {client_id} of the request is not connected here"
        properties = message.properties | {PropertyName.PUSH_REPLY_TIME: str(self._runner.now_ms())}
        pushed = Message.from_parts(message.topic, message.body, message.flag, properties)
        try:
            client.call(ReplyArrived(replace(send, message=pushed)))
        except RmqError as error:
            return f"{self._broker_name}: the client {client_id} of the request could not be reached: {error}"
        return None

    def _flushed(self, result: AppendResult, wait: str | None) -> SendStatus:
        """Wait for the device and for a replica, if the message requires it."""
        if wait is not None and wait.lower() != "true":
            return _OK
        status = _OK
        if self._waits:
            try:
                self._store.wait_for(result)
            except FlushFailedError:
                status = SendStatus.FLUSH_DISK_TIMEOUT  # the message is in the log, but may not survive the machine
        if self._is_replicated:
            replicated = self._replication().confirm(result.physical_offset + result.size)
            status = status if replicated is _OK else replicated
        return status

    def _for_send(self, name: str, default_queues: int, default_topic: str) -> Topic:
        if self._master is not None:  # no topic of a replica is ever ready for sends
            raise refused_by_replica(self._broker_name, self._master, SendMessage)
        with self._runner.lock:
            topic = self._topics.for_send(name, default_queues, default_topic)
        self._write_tables()  # before its first message
        topic.is_ready = True
        topic.is_plain = not (topic.is_retry or topic.is_multi_tag or name == SystemTopic.HOP or is_system_topic(name))
        return topic

    def _level(self, topic: str, text: str) -> int:
        """Return the delay level of a send; a missing level is logged once for each topic."""
        level = java_int(text)
        if level is None:
            raise MessageIllegalError(f"topic {topic!r}: {_DELAY} is a delay level, a whole number, found {text!r:.80}")
        levels = self._store.levels
        is_missing = not 0 <= level <= levels.max_level and not topic.startswith(TopicPrefix.RETRY)
        if is_missing and (topic, level) not in self._missing_levels:
            if len(self._missing_levels) < _MAX_LOGGED_LEVELS:
                self._missing_levels.add((topic, level))
            what = f"waits as level {levels.max_level}, the highest" if level > 0 else "is not delayed"
            _log.warning(
                "topic %(topic)s: there is no delay level %(level)d, so the message %(_what)s, as in 4.9",
                topic=topic,
                level=level,
                _what=what,
            )
        return level

    def _send_to_relay(self, carried: Message, request: SendMessage) -> int:
        """Prepare the target topic of a relayed message and check its queue; return the queue that the relay reads."""
        name, queue_id = self._deliveries.target_of(carried)
        target = self._by_name.get(name)
        if target is None or not target.is_ready:
            target = self._for_send(name, request.default_queues, request.default_topic)
        if not 0 <= queue_id < target.queues:
            _choose(target, max(queue_id, 0))
        return 0

    def _make_half(self, message: Message, queue_id: int, sys_flag: int, wait: str | None) -> int:
        properties = message.properties
        if is_timed(properties):
            raise delayed_transaction(message.topic)
        if wait is not None:
            properties[_WAIT] = wait
        properties.pop(_DELAY, None)  # an undecided message can't be delayed
        properties[PropertyName.REAL_TOPIC] = message.topic
        properties[PropertyName.REAL_QUEUE_ID] = str(queue_id)
        message.topic = SystemTopic.HALF
        return sys_flag & ~record.TRANSACTION_MASK

    # ---- storing

    def store_message(
        self,
        message: Message,
        queue_id: int,
        born_timestamp_ms: int | None = None,
        born_host: Host | None = None,
        sys_flag: int = 0,
        reconsume_times: int = 0,
        store_host: Host | None = None,
        *,
        is_copy: bool = False,
    ) -> AppendResult:
        """Append a message unchanged and wake the pulls that wait for it; see `MessageStore.append`.

        Returns when it is in the page cache, for any durability of the store.
        """
        store = self._store
        if store.appender.is_locked() and store.appender.lock.is_writing():
            self._check_busy(message.topic)
        else:
            self._stuck_at = -1
        result = store.append(
            message,
            queue_id,
            born_timestamp_ms=born_timestamp_ms,
            born_host=born_host,
            store_host=store_host,
            sys_flag=sys_flag,
            reconsume_times=reconsume_times,
            wait=False,
            is_copy=is_copy,
        )
        self._arrivals.stored(message.topic, queue_id, message.properties, result)
        return result

    def _check_room(self) -> None:
        try:
            self._store.check_room()
        finally:
            if not self._store.appender.accepts:
                self._arrivals.refused()

    def _check_busy(self, topic: str) -> None:
        """Refuse a send if another write takes too long, or if this one would wait too long."""
        now, end = self._runner.now_ms(), self._store.log.end
        if end != self._stuck_at or now < self._stuck_since:
            self._stuck_at, self._stuck_since = end, now
        took_ms, shared = now - self._stuck_since, self._store.appender.shared
        # While peers append, the other write can wait for one. Wait as long as it does, and as peers do for each other.
        of_peers = shared.wait_s if shared is not None and shared.is_open else 0.0, "the timeout of the share"
        wait_s, limit = max((self._longest_wait_s, "longest_wait_s of BrokerConfig"), of_peers)
        what = f"this send has waited {wait_s:g} s for other writes, as long as {limit} allows"
        busy_after_s, limit = max((self._busy_after_s, "busy_after_s of BrokerConfig"), of_peers)
        if took_ms > 1000 * busy_after_s:
            # If this process was paused and not the disk, the write ends immediately, so a short wait is enough.
            wait_s = min(wait_s, CTRL_C_WAITS_S)
            what = f"another write has taken {took_ms} ms, longer than {limit} allows"
        if self._store.appender.lock.is_free_within(wait_s):
            return
        self._count("busy", topic=topic)
        raise BrokerBusyError(
            ResponseCode.SYSTEM_BUSY,
            f"the store is busy: {what}: send again later, or raise it",
        )


def _choose(topic: Topic, queue_id: int) -> int:
    """Return the queue of a send; `BrokerError` if it does not exist."""
    if queue_id >= 0 or topic.queues == 0:
        raise BrokerError(
            ResponseCode.SYSTEM_ERROR, f"topic {topic.name!r} has {topic.queues} queues, but no queue {queue_id}"
        )
    return topic.next_queue()


def _priority_queue(topic: Topic, properties: dict[str, str], queue_id: int) -> int:
    """Return the queue that a message's priority names, as in 5.4; messages of other types lose their priority."""
    priority = priority_of(properties)
    if priority is None:
        return queue_id
    if is_half(properties) or _DELAY in properties or is_timed(properties) or PropertyName.SHARDING_KEY in properties:
        del properties[PropertyName.PRIORITY]
        return queue_id
    last: int = topic.queues - 1
    return min(priority, last)
