"""A running cluster, of which commands print the same rows as of a store: ``--route``."""

from __future__ import annotations

import argparse
import heapq
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final

from librmq.cli.selection import MessageQuery
from librmq.diagnosis.view import QueueProgress, groups_of_topics, is_listed
from librmq.errors import BrokerError, InputError
from librmq.message.delays import DEFAULT_LEVELS
from librmq.message.message import MessageQueue, StoredMessage
from librmq.message.topics import kind_of_topic
from librmq.protocol import PullMessage, PullStatus, QueueBounds, QueueOffsetAt, ResponseCode, Subscription
from librmq.store.format.documents import LetterIdentity
from librmq.wire.remote import RemoteRoute, connect

_PULLER: Final = "TOOLS_CONSUMER"
"""The group of ``mqadmin``, which brokers know."""
_AT_ONCE: Final = 32
_VARIABLES: Final = {
    "accessKey": "LIBRMQ_ACCESS_KEY",
    "secretKey": "LIBRMQ_SECRET_KEY",
    "securityToken": "LIBRMQ_SECURITY_TOKEN",
}
_KEY_LINE: Final = re.compile(
    r"^[ \t]*(accessKey|secretKey|securityToken)[ \t]*:[ \t]*([\"']?)(.+?)\2[ \t]*(?:[ \t]#.*)?$", re.M
)


@contextmanager
def open_cluster(arguments: argparse.Namespace) -> Iterator[ClusterView]:
    """Connect to the name server in ``--route``.

    Raises:
        BrokerUnreachableError: No name server answers there.
        InputError: The command names a setting that only a store has.
    """
    if getattr(arguments, "config", None) is not None:
        raise InputError("--config describes the files of a store: leave it out with --route")
    with connect_to(arguments) as route:
        yield ClusterView(route)


def connect_to(arguments: argparse.Namespace) -> RemoteRoute:
    """Connect to the name server in ``--route``, with the keys and the TLS that options, environment or a file name.

    Raises:
        BrokerUnreachableError: No name server answers there.
        InputError: A file can't be read, or has no key.
    """
    access = access_of(arguments)
    is_tls, ca_file = access.pop("tls"), access.pop("ca_file")
    tls = None
    if is_tls:
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # an SSLError is one
            raise InputError(f"--tls-ca {ca_file}: {error.strerror or error}: expected certificates in PEM") from None
    return connect(**access, tls=tls)


def access_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return address, keys and TLS of the cluster in ``--route``: ``tls`` is whether, ``ca_file`` whom to trust."""
    keys = _keys(arguments)
    ca_file = arguments.tls_ca or os.environ.get("LIBRMQ_TLS_CA")
    return {
        "address": arguments.route,
        "access_key": keys.get("accessKey"),
        "secret_key": keys.get("secretKey"),
        "security_token": keys.get("securityToken"),
        "tls": bool(arguments.tls or ca_file),
        "ca_file": ca_file,
    }


def _keys(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the keys by their names in ``tools.yml``: of a file, or of options and environment."""
    variables = {name: os.environ.get(variable) for name, variable in _VARIABLES.items()}
    variables["accessKey"] = arguments.access_key or variables["accessKey"]
    variables["secretKey"] = arguments.secret_key or variables["secretKey"]
    if (keys := {name: value for name, value in variables.items() if value}) and arguments.keys is None:
        if "accessKey" not in keys or "secretKey" not in keys:
            raise InputError(
                f"found only {', '.join(keys)}: expected a name and a secret, by --access-key and --secret-key, by "
                "LIBRMQ_ACCESS_KEY and LIBRMQ_SECRET_KEY, or by --keys FILE"
            )
        return keys
    home = os.environ.get("ROCKETMQ_HOME")
    default_path = os.path.join(home, "conf", "tools.yml") if home else None
    path = arguments.keys or (default_path if default_path is not None and os.path.exists(default_path) else None)
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    keys = {match[1]: match[3] for match in _KEY_LINE.finditer(text)}
    if "accessKey" in keys and "secretKey" in keys:
        return keys
    if arguments.keys is None:
        return {}
    raise InputError(f"{path}: expected lines such as 'accessKey: name' and 'secretKey: secret'")


class ClusterView:
    """What the brokers of a cluster say of their topics, groups and messages. Not thread-safe."""

    levels = DEFAULT_LEVELS
    """The delay levels that brokers have by default."""
    resent_times: Final[Mapping[LetterIdentity, int]] = MappingProxyType({})
    """None: brokers do not note which dead letters were sent again."""

    def __init__(self, route: RemoteRoute) -> None:
        self.route = route
        self._bounds: dict[str, dict[MessageQueue, QueueBounds]] = {}

    def broker_name(self, queue: MessageQueue) -> str:
        """Return the name of a queue's broker; empty if the cluster has only one."""
        return queue.broker_name if len(self.route.broker_names()) > 1 else ""

    # ---- topics

    @cached_property
    def _permissions(self) -> dict[str, int]:
        return {topic: data.permission for topic, data in self.route.topics().items()}

    @property
    def topics(self) -> list[str]:
        """The topics that have messages, and those that users made."""
        return [
            topic
            for topic, permission in self._permissions.items()
            if is_listed(topic, permission) or any(bounds.max_offset for bounds in self._bounds_of(topic).values())
        ]

    listed_topics = topics

    def _bounds_of(self, topic: str) -> dict[MessageQueue, QueueBounds]:
        """Return the queues of a topic as they were when first asked for."""
        if topic not in self._bounds:
            self._bounds[topic] = self.route.queues(topic)
        return self._bounds[topic]

    def queues(self, topic: str) -> dict[MessageQueue, range]:
        """Return the queue offsets of the messages in each queue of a topic, as they were when first asked for."""
        return {queue: range(bounds.min_offset, bounds.max_offset) for queue, bounds in self._bounds_of(topic).items()}

    def queue_offset_at(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the queue offset that the broker has for a time."""
        return self.route.broker(queue.broker_name).call(QueueOffsetAt(queue.topic, queue.queue_id, time_ms))

    def stored_at(self, queue: MessageQueue, queue_offset: int) -> int | None:
        """Return a store time; None if the message is gone, or the topic's permission forbids to read it."""
        bounds = self._bounds_of(queue.topic).get(queue)
        if bounds is not None and queue_offset == bounds.max_offset - 1:
            return bounds.last_timestamp_ms or None
        try:
            message = next(self.messages(queue, range(queue_offset, queue_offset + 1)), None)
        except BrokerError as error:
            if error.code != ResponseCode.NO_PERMISSION:
                raise
            return None
        return None if message is None else message.store_timestamp_ms

    # ---- groups

    @cached_property
    def groups(self) -> list[str]:
        """The groups that brokers know, with the groups that retry and dead-letter topics name, sorted."""
        groups = self.route.groups().keys()
        return sorted(groups | groups_of_topics(self.topics, groups))

    def consumed(self, group: str, topic: str | None = None) -> Iterator[tuple[str, dict[MessageQueue, QueueProgress]]]:
        """Yield the topics in which a group has progress, sorted, or one of them, each with its queues."""
        progress = self.route.progress(group, topic)
        for name, queues in groupby(progress, key=lambda queue: queue.topic):
            ranges = self.queues(name)
            yield (
                name,
                {
                    queue: QueueProgress(
                        ranges.get(queue, range(0)).start, progress[queue].max_offset, progress[queue].queue_offset
                    )
                    for queue in queues
                },
            )

    # ---- messages

    def messages(self, queue: MessageQueue, offsets: range) -> Iterator[StoredMessage]:
        """Yield the messages of a queue with these queue offsets, without deleted ones.

        Raises:
            BrokerError: The topic's permission forbids to read it.
        """
        broker, at = self.route.broker(queue.broker_name), offsets.start
        everything = Subscription(queue.topic, "*")
        while at < offsets.stop:
            count = min(_AT_ONCE, offsets.stop - at)
            answer = broker.call(
                PullMessage("", _PULLER, queue.topic, queue.queue_id, at, count, everything)  # no client asks
            )
            if answer.status is PullStatus.FOUND:
                yield from (message for message in answer.messages if message.queue_offset < offsets.stop)
            if answer.next_offset <= at:
                return
            at = answer.next_offset

    def selected(self, query: MessageQuery) -> Iterator[StoredMessage]:
        """Yield the selected messages, oldest first."""
        test = query.test()
        if query.id is not None:
            message = self.route.find_by_id(query.id)
            yield from filter(test, [] if message is None else [message])
        elif query.key is not None:
            topics = [query.topic] if query.topic is not None else self._of_users()
            yield from filter(test, (message for topic in topics for message in self._with_key(topic, query.key)))
        else:
            topics = [query.topic] if query.topic is not None else self._of_users()
            queues = [
                self._in_queue(queue, offsets, query)
                for topic in topics
                for queue, offsets in self.queues(topic).items()
                if query.queue_id in (None, queue.queue_id)
            ]
            yield from filter(
                test, heapq.merge(*queues, key=lambda message: (message.store_timestamp_ms, message.physical_offset))
            )

    def _of_users(self) -> list[str]:
        return [topic for topic in self.topics if kind_of_topic(topic) == "user"]

    def _with_key(self, topic: str, key: str) -> list[StoredMessage]:
        try:
            return self.route.find_by_key(topic, key)
        except BrokerError as error:
            if error.code != ResponseCode.QUERY_NOT_FOUND:
                raise
            return []

    def _in_queue(self, queue: MessageQueue, offsets: range, query: MessageQuery) -> Iterator[StoredMessage]:
        begin, end = offsets.start, offsets.stop
        if query.offsets is not None:
            begin, end = max(begin, query.offsets.start), min(end, query.offsets.stop)
        elif query.has_times and query.begin_ms > 0:
            # Of several messages stored in that millisecond the broker may mean any: so ask for the one before.
            begin = max(begin, self.queue_offset_at(queue, query.begin_ms - 1))
        for message in self.messages(queue, range(begin, max(begin, end))):
            if message.store_timestamp_ms >= query.end_ms:
                return
            yield message
