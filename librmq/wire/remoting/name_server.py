"""Requests that clients send to a name server, which is the broker itself here, on the same port.

Mirrors ``DefaultRequestProcessor`` of the name server.
"""

from __future__ import annotations

from typing import Any, Final

from librmq.broker import Broker
from librmq.errors import BrokerError, RmqError
from librmq.message.topics import RETRY_PREFIX, is_system_topic
from librmq.protocol import PERM_WRITE, CreateTopic, QueueData, ResponseCode
from librmq.runtime.locks import Lock
from librmq.wire.remoting.bodies import broker_row, route_body, write_body
from librmq.wire.remoting.channels import Channel, Handlers, RemotingCall
from librmq.wire.remoting.headers import (
    AddedTopicsHeader,
    BrokerNameHeader,
    ClusterNameHeader,
    KvKeyHeader,
    KvNamespaceHeader,
    KvPairHeader,
    KvValueHeader,
    RequestCode,
    RouteOfTopicHeader,
    WipedTopicsHeader,
)

_MOST_VALUES: Final = 10_000
_OF_UNITS: Final = (
    RequestCode.GET_UNIT_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
)
"""Questions about topics of units, which no broker of librmq has."""


class NameServer:
    """Routes of one broker, and a table of keys and values that lasts as long as the server. Thread-safe."""

    def __init__(self, broker: Broker, creates_retry_topics: bool) -> None:
        """See `RemotingServer` for the last argument."""
        self._broker = broker
        self._creates_retry_topics = creates_retry_topics
        self._lock = Lock()
        self._values: dict[tuple[str, str], str] = {}
        self.handlers: Handlers = {
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._clusters,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_of_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            **dict.fromkeys(_OF_UNITS, lambda call: call.answer(body=write_body({"topicList": []}))),
            RequestCode.DELETE_TOPIC_IN_NAMESRV: lambda call: call.answer(),  # the broker's answer has deleted it
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._add,
            RequestCode.GET_NAMESRV_CONFIG: self._config,
            RequestCode.PUT_KV_CONFIG: self._put,
            RequestCode.GET_KV_CONFIG: self._get,
            RequestCode.DELETE_KV_CONFIG: self._delete,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._list,
        }

    # ---- routes

    def _route(self, call: RemotingCall) -> bytes:
        header: RouteOfTopicHeader = call.header
        queues = self._broker.topic_route(header.topic)
        if not queues and self._creates_retry_topics and header.topic.startswith(RETRY_PREFIX):
            self._broker.call(CreateTopic(header.topic, 1, 1, unless_exists=True))
            queues = self._broker.topic_route(header.topic)
        if not queues:
            remark = f"No topic route info in name server for the topic: {header.topic}"
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, remark)
        return call.answer(body=route_body([self._broker_row(call.channel)], queues))

    def _broker_row(self, channel: Channel) -> dict[str, Any]:
        broker = self._broker
        return broker_row(broker.name, broker.cluster_name, {0: channel.broker_address})

    def _clusters(self, call: RemotingCall) -> bytes:
        broker = self._broker
        table = {broker.name: self._broker_row(call.channel)}
        clusters = {broker.cluster_name: [broker.name]}
        return call.answer(body=write_body({"brokerAddrTable": table, "clusterAddrTable": clusters}))

    # ---- topics

    def _topics(self, call: RemotingCall) -> bytes:
        return call.answer(body=write_body({"topicList": list(self._broker.topics())}))

    def _topics_of_cluster(self, call: RemotingCall) -> bytes:
        header: ClusterNameHeader = call.header
        topics = list(self._broker.topics()) if header.cluster == self._broker.cluster_name else []
        return call.answer(body=write_body({"topicList": topics}))

    def _system_topics(self, call: RemotingCall) -> bytes:
        names = [self._broker.cluster_name, self._broker.name, *filter(is_system_topic, self._broker.topics())]
        return call.answer(body=write_body({"brokerAddr": call.channel.broker_address, "topicList": names}))

    def _wipe(self, call: RemotingCall) -> bytes:
        return call.answer(WipedTopicsHeader(self._permit(call.header, is_writable=False)))

    def _add(self, call: RemotingCall) -> bytes:
        return call.answer(AddedTopicsHeader(self._permit(call.header, is_writable=True)))

    def _permit(self, header: BrokerNameHeader, *, is_writable: bool) -> int:
        """Allow or forbid writes to all user topics; return their number."""
        if header.broker_name != self._broker.name:
            return 0
        changed = 0
        for topic, data in self._broker.topics().items():
            permission = data.permission | PERM_WRITE if is_writable else data.permission & ~PERM_WRITE
            changed += self._set_permission(topic, data, permission)
        return changed

    def _set_permission(self, topic: str, data: QueueData, permission: int) -> bool:
        if permission == data.permission:
            return True
        try:
            self._broker.call(CreateTopic(topic, data.read_queues, data.write_queues, permission))
        except RmqError:  # the broker's own
            return False
        return True

    # ---- values

    def _config(self, call: RemotingCall) -> bytes:
        return call.answer(body=f"listenPort={call.channel.own[1]}\n".encode())

    def _put(self, call: RemotingCall) -> bytes:
        header: KvPairHeader = call.header
        with self._lock:
            if len(self._values) >= _MOST_VALUES and (header.namespace, header.key) not in self._values:
                raise BrokerError(ResponseCode.SYSTEM_ERROR, f"there are {_MOST_VALUES:,} values already")
            self._values[header.namespace, header.key] = header.value
        return call.answer()

    def _get(self, call: RemotingCall) -> bytes:
        header: KvKeyHeader = call.header
        value = self._values.get((header.namespace, header.key))
        if value is None:
            raise BrokerError(
                ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {header.namespace} Key: {header.key}"
            )
        return call.answer(KvValueHeader(value))

    def _delete(self, call: RemotingCall) -> bytes:
        header: KvKeyHeader = call.header
        with self._lock:
            self._values.pop((header.namespace, header.key), None)
        return call.answer()

    def _list(self, call: RemotingCall) -> bytes:
        header: KvNamespaceHeader = call.header
        with self._lock:
            values = {key: value for (namespace, key), value in self._values.items() if namespace == header.namespace}
        if not values:
            raise BrokerError(ResponseCode.QUERY_NOT_FOUND, f"No config item, Namespace: {header.namespace}")
        return call.answer(body=write_body({"table": values}))
