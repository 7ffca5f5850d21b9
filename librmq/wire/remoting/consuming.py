"""Requests of consumers, and requests that all clients make about themselves.

Mirrors ``ClientManageProcessor``, ``ConsumerManageProcessor`` and the queue offsets of ``AdminBrokerProcessor``.
"""

from __future__ import annotations

from librmq.broker import Broker
from librmq.errors import BrokerError, MalformedError
from librmq.protocol import (
    CheckSubscription,
    ConsumerIds,
    LockQueues,
    MaxOffset,
    MinOffset,
    QueryOffset,
    QueueOffsetAt,
    ResponseCode,
    SendBack,
    UnlockQueues,
    UpdateOffset,
)
from librmq.wire.remoting.bodies import queue_row, queues_of, read_request, subscription_of, write_body
from librmq.wire.remoting.calls import Handlers, RemotingCall
from librmq.wire.remoting.client_channels import ClientChannels
from librmq.wire.remoting.headers import (
    ConsumerGroupHeader,
    GroupProgressHeader,
    GroupQueueHeader,
    LeavingClientHeader,
    QueueAtTimeHeader,
    QueueOffsetHeader,
    QueueOfTopicHeader,
    RequestCode,
    SendBackHeader,
    TimestampHeader,
)
from librmq.wire.remoting.pulling import Pulling
from librmq.wire.remoting.rates import Rates


class Consuming:
    """The consumers of one server. Thread-safe."""

    def __init__(self, broker: Broker, sessions: ClientChannels, pulling: Pulling, rates: Rates) -> None:
        self._broker = broker
        self._rates = rates
        self._sessions = sessions
        self._pulling = pulling
        self.handlers: Handlers = {
            RequestCode.PULL_MESSAGE: pulling.pull,
            RequestCode.HEART_BEAT: self._heartbeat,
            RequestCode.UNREGISTER_CLIENT: self._unregister,
            RequestCode.QUERY_CONSUMER_OFFSET: self._query_offset,
            RequestCode.UPDATE_CONSUMER_OFFSET: self._update_offset,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: self._consumer_ids,
            RequestCode.CONSUMER_SEND_MSG_BACK: self._send_back,
            RequestCode.LOCK_BATCH_MQ: self._lock,
            RequestCode.UNLOCK_BATCH_MQ: self._unlock,
            RequestCode.CHECK_CLIENT_CONFIG: self._check_subscription,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self._offset_at,
            RequestCode.GET_MAX_OFFSET: self._max_offset,
            RequestCode.GET_MIN_OFFSET: self._min_offset,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self._earliest,
        }

    # ---- clients

    def _heartbeat(self, call: RemotingCall) -> bytes:
        self._sessions.heartbeat(call.channel, call.frame)
        return call.answer()

    def _unregister(self, call: RemotingCall) -> bytes:
        header: LeavingClientHeader = call.header
        if header.consumer_group:
            self._pulling.drop_pulls(call.channel, header.consumer_group)  # if it asked again, it would be refused
        self._sessions.leave(call.channel, header.client_id, header.producer_group, header.consumer_group)
        return call.answer()

    def _consumer_ids(self, call: RemotingCall) -> bytes:
        header: ConsumerGroupHeader = call.header
        ids = self._broker.call(ConsumerIds(header.consumer_group))
        if not ids:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {header.consumer_group}")
        return call.answer(body=write_body({"consumerIdList": ids}))

    def _check_subscription(self, call: RemotingCall) -> bytes:
        fields = read_request(call.frame.body, "CHECK_CLIENT_CONFIG")
        if fields.get("subscriptionData") is not None:
            subscription = subscription_of(fields["subscriptionData"])
            self._broker.call(CheckSubscription(_text(fields, "clientId"), _text(fields, "group"), subscription))
        return call.answer()

    # ---- progress

    def _query_offset(self, call: RemotingCall) -> bytes:
        header: GroupQueueHeader = call.header
        offset = self._broker.call(QueryOffset(header.consumer_group, header.topic, header.queue_id))
        if offset is None:
            raise BrokerError(
                ResponseCode.QUERY_NOT_FOUND,
                f"group {header.consumer_group} has no progress in queue {header.queue_id} of {header.topic}",
            )
        return call.answer(QueueOffsetHeader(offset))

    def _update_offset(self, call: RemotingCall) -> bytes:
        header: GroupProgressHeader = call.header
        call.call_broker(UpdateOffset(header.consumer_group, header.topic, header.queue_id, header.commit_offset))
        return call.answer()

    def _send_back(self, call: RemotingCall) -> bytes:
        header: SendBackHeader = call.header
        call.call_broker(
            SendBack(
                header.group,
                header.offset,
                header.delay_level,
                header.max_reconsume_times,
                header.origin_topic,
                header.origin_msg_id,
                header.cause or "",
            )
        )
        self._rates.add("back", f"{header.origin_topic}@{header.group}", self._broker.runner.now_ms())
        return call.answer()

    # ---- locks

    def _lock(self, call: RemotingCall) -> bytes:
        fields = read_request(call.frame.body, "LOCK_BATCH_MQ")
        queues = queues_of(fields.get("mqSet"))
        held = self._broker.call(LockQueues(_text(fields, "consumerGroup"), _text(fields, "clientId"), queues))
        return call.answer(body=write_body({"lockOKMQSet": [queue_row(queue) for queue in sorted(held)]}))

    def _unlock(self, call: RemotingCall) -> bytes:
        fields = read_request(call.frame.body, "UNLOCK_BATCH_MQ")
        queues = queues_of(fields.get("mqSet"))
        self._broker.call(UnlockQueues(_text(fields, "consumerGroup"), _text(fields, "clientId"), queues))
        return call.answer()

    # ---- queues

    def _offset_at(self, call: RemotingCall) -> bytes:
        header: QueueAtTimeHeader = call.header
        return call.answer(
            QueueOffsetHeader(self._broker.call(QueueOffsetAt(header.topic, header.queue_id, header.timestamp)))
        )

    def _max_offset(self, call: RemotingCall) -> bytes:
        header: QueueOfTopicHeader = call.header
        return call.answer(QueueOffsetHeader(self._broker.call(MaxOffset(header.topic, header.queue_id))))

    def _min_offset(self, call: RemotingCall) -> bytes:
        header: QueueOfTopicHeader = call.header
        return call.answer(QueueOffsetHeader(self._broker.call(MinOffset(header.topic, header.queue_id))))

    def _earliest(self, call: RemotingCall) -> bytes:
        header: QueueOfTopicHeader = call.header
        return call.answer(TimestampHeader(stored_ms(self._broker, header.topic, header.queue_id, first=True)))


def stored_ms(broker: Broker, topic: str, queue_id: int, *, first: bool = False) -> int:
    """Return the store time in ms of a queue's first or last message; -1 if the queue has none."""
    store = broker.store
    begin, end = store.queue_range(topic, queue_id)
    messages = store.read(topic, queue_id, begin if first else end - 1, 1).messages if end > begin else ()
    return messages[0].store_timestamp_ms if messages else -1


def _text(fields: dict[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise MalformedError(f"{name}: expected text, found {value!r:.80}")
    return value
