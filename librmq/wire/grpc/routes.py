"""Routes of topics: their queues at the address of the server, and the assignments of push consumers."""

from __future__ import annotations

import ipaddress
from typing import Any, Final

from librmq.broker import Broker
from librmq.protocol import PERM_READ, PERM_WRITE, CreateTopic, QueueData
from librmq.wire.grpc.messages import MessageType, check_group, check_topic
from librmq.wire.grpc.protocol import Code, Context, Refusal, answers, client_id_of

_PERMISSIONS: Final = {0: 1, PERM_READ: 2, PERM_WRITE: 3, PERM_READ | PERM_WRITE: 4}


class Routes:
    """The routes of one broker. Thread-safe."""

    def __init__(self, broker: Broker, advertise: str | None, auto_create: bool) -> None:
        self._broker = broker
        self._advertise = advertise
        self._auto_create = auto_create

    @answers("QueryRouteResponse")
    def query_route(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Return the queues of a topic, at the address that the client has connected to."""
        client_id_of(context)
        topic = check_topic(request.topic.name)
        data = self.ensure_topic(topic)
        accepted = MessageType.of_topic(data.message_type)
        for queue_id in range(max(data.read_queues, data.write_queues)):
            permission = data.permission & ~(PERM_READ if queue_id >= data.read_queues else 0)
            permission &= ~(PERM_WRITE if queue_id >= data.write_queues else 0)
            queue = response.message_queues.add()
            self._fill(queue, request, queue_id, permission & (PERM_READ | PERM_WRITE))
            queue.accept_message_types.extend(accepted)

    def _fill(self, queue: Any, request: Any, queue_id: int, permission: int) -> None:  # noqa: ANN401
        queue.topic.name = request.topic.name
        queue.id = queue_id
        queue.permission = _PERMISSIONS[permission]
        queue.broker.name = self._broker.name
        queue.broker.endpoints.CopyFrom(request.endpoints)
        if self._advertise is not None:
            host, _, port = self._advertise.rpartition(":")
            endpoints = queue.broker.endpoints
            del endpoints.addresses[:]
            endpoints.addresses.add(host=host.strip("[]"), port=int(port))
            endpoints.scheme = _scheme(host.strip("[]"))

    def ensure_topic(self, topic: str) -> QueueData:
        """Return a topic's queues, creating the topic if necessary: official clients ask for it before they send."""
        route = self._broker.topic_route(topic)
        if route:
            return route[0]
        if not self._auto_create:
            raise Refusal(
                Code.TOPIC_NOT_FOUND, f"topic {topic!r} does not exist: create it first, because auto_create is off"
            )
        queues = self._broker.config.default_topic_queues
        self._broker.call(CreateTopic(topic, queues, queues, unless_exists=True))
        return self._broker.topic_route(topic)[0]

    @answers("QueryAssignmentResponse")
    def query_assignment(self, request: Any, context: Context, response: Any) -> None:  # noqa: ANN401
        """Return a push consumer's assignments: any queue, or for ordered groups each queue."""
        client_id_of(context)
        group, topic = check_group(request.group.name), check_topic(request.topic.name)
        data = self.ensure_topic(topic)
        if not data.permission & PERM_READ or not data.read_queues:
            raise Refusal(Code.FORBIDDEN, f"topic {topic!r} has no readable queue")
        ids = range(data.read_queues) if self._broker.is_ordered(group) else [-1]
        for queue_id in ids:
            self._fill(response.assignments.add().message_queue, request, queue_id, PERM_READ)


def _scheme(host: str) -> int:
    try:
        return 1 if ipaddress.ip_address(host).version == 4 else 2
    except ValueError:
        return 3
