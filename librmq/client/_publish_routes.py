"""What a producer knows of its route: the queues of topics, and brokers by name. Mirrors ``TopicPublishInfo``."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from librmq.client.client import Client
from librmq.client.queue_selectors import QueueSelector, RoundRobin
from librmq.errors import MessageIllegalError, NoRouteError
from librmq.message import Message, MessageQueue
from librmq.message.topics import SystemTopic
from librmq.protocol import PERM_WRITE, Endpoint, QueueData, site_of


class TopicQueues(NamedTuple):
    """The writable queues of a topic, and their turns."""

    queues: tuple[MessageQueue, ...]
    turns: RoundRobin
    near: tuple[MessageQueue, ...]
    """The queues at the client's own site."""


class PublishRoutes:
    """A producer's cache of its route: queues by topic, brokers by name. Thread-safe."""

    def __init__(self, client: Client, group: str, default_topic_queues: int) -> None:
        """``default_topic_queues`` is the number of queues of a topic that its first send creates."""
        self.topics: dict[str, TopicQueues] = {}
        """The topics looked up since the last change of the route."""
        self.endpoints: dict[str, Endpoint] = {}
        """The brokers looked up since then."""
        self._topics_before: dict[str, TopicQueues] = {}  # the route can have changed since
        self.client = client
        self._route = client.route
        self._runner = client.runner
        self.group = group
        self.default_topic_queues = default_topic_queues
        self._version = 0

    def drop_routes(self) -> None:
        """Clear the cache, under the runner's lock; a topic that stays the same keeps its turn."""
        self._version += 1
        self._topics_before.update(self.topics)
        self.topics.clear()
        self.endpoints.clear()

    def endpoint(self, broker_name: str) -> Endpoint:
        """Return the broker of that name, and cache it."""
        version = self._version
        endpoint = self._route.endpoint(broker_name)
        with self._runner.lock:
            if version == self._version:  # otherwise the endpoint can be outdated
                self.endpoints[broker_name] = endpoint
        return endpoint

    def queues(self, topic: str) -> TopicQueues:
        """Return the queues of a topic, and cache them.

        Raises:
            NoRouteError: No broker has the topic, and none creates it.
        """
        topic_queues = self.topics.get(topic)
        if topic_queues is not None:
            return topic_queues
        version = self._version
        data = self._route.topic_route(topic)
        is_new = not data
        if is_new:
            data = self._route.topic_route(SystemTopic.AUTO_CREATE)
        queues = _writable(topic, data, self.default_topic_queues if is_new else None)
        if not queues:
            brokers = ", ".join(self._route.broker_names())
            if not brokers:
                why = "the route has no broker: start one, or look at the address of the name server"
            elif is_new:
                why = "no broker has it, and none makes it at the first send; create it, as by Broker.create_topic"
            else:
                why = "none lets it be written"
            hint = f" (brokers: {brokers})" if brokers else ""
            raise NoRouteError(f"topic {topic!r}, requested by producer group {self.group!r}: {why}{hint}")
        before = self._topics_before.pop(topic, None)
        if before is not None and before.queues == queues:
            turns = before.turns  # another topic has changed, so this one keeps its turn
        else:
            count, random = len(queues), self.client.random
            begin = 0 if random is None else random.randrange(count)
            turns = RoundRobin(self._runner.choose(f"first queue of {topic}", [*range(begin, count), *range(begin)]))
        site = self.client.site
        near = () if site is None else tuple(queue for queue in queues if site_of(queue.broker_name) == site)
        topic_queues = TopicQueues(queues, turns, near)
        with self._runner.lock:
            if not is_new and version == self._version:  # the created topic can have another number of queues
                self.topics[topic] = topic_queues
        return topic_queues

    def named_queue(self, topic: str, queue: MessageQueue | int) -> MessageQueue:
        """Return the queue that a caller names; its number is enough if only one broker has the topic."""
        if isinstance(queue, MessageQueue):
            if queue.topic != topic:
                raise MessageIllegalError(f"queue: expected one of topic {topic!r}, found one of {queue.topic!r}")
            return queue
        if type(queue) is not int or queue < 0:
            raise MessageIllegalError(
                f"queue: expected a MessageQueue or a queue's number, from 0, found {queue!r:.80}"
            )
        names = [data.broker_name for data in self._route.topic_route(topic)] or list(self._route.broker_names())
        if len(names) != 1:
            raise NoRouteError(f"queue {queue} of topic {topic!r}: {len(names)} brokers have it; give a MessageQueue")
        return MessageQueue(topic, names[0], queue)

    def selected(
        self,
        message: Message,
        selector: QueueSelector,
        arg: object,
        if_broker_down: str | None = None,
        tried: Collection[str] = (),
    ) -> MessageQueue:
        """Return the queue that a selector chooses.

        With ``if_broker_down`` ``refuse`` it chooses among the queues of all brokers, including unreachable ones. With
        ``another`` brokers that were ``tried`` are left out while others remain.
        """
        if not callable(selector):
            raise MessageIllegalError(f"selector: expected a function, found {selector!r:.80}")
        topic = message.topic
        queues = self.queues(topic).queues
        if if_broker_down == "refuse":
            queues = _writable(topic, self._route.registered_route(topic)) or queues
        elif tried:
            queues = tuple(queue for queue in queues if queue.broker_name not in tried) or queues
        choice = selector(queues, message, arg)
        if choice not in queues:
            raise MessageIllegalError(
                f"topic {topic!r}: the selector chose {choice!r:.200}, which is not one of the {len(queues)} queues"
            )
        return choice


def _writable(topic: str, data: Collection[QueueData], limit: int | None = None) -> tuple[MessageQueue, ...]:
    """Return the queues of brokers that let the topic be written, sorted, at most ``limit`` of each broker."""
    return tuple(
        MessageQueue(topic, broker.broker_name, number)
        for broker in sorted(data, key=lambda entry: entry.broker_name)
        if broker.permission & PERM_WRITE
        for number in range(broker.write_queues if limit is None else min(broker.write_queues, limit))
    )
