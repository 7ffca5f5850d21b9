"""A running cluster as the source of the same rows that commands print of a store: ``--route``."""

from __future__ import annotations

import argparse
import heapq
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from librmq.cli.rows import Row, is_listed, kind_of_topic
from librmq.cli.selection import MessageQuery
from librmq.diagnosis.deadletters import GivenUpMessage, given_up
from librmq.diagnosis.group_lag import Lag, QueueLag
from librmq.diagnosis.view import is_own_group
from librmq.errors import BrokerError, InputError
from librmq.message.delay_levels import DEFAULT_LEVELS, DelayLevels
from librmq.message.lag import queue_lag, unread_from
from librmq.message.message import MessageQueue, StoredMessage
from librmq.message.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, dead_letter_topic
from librmq.protocol import PullMessage, PullStatus, QueueOffsetAt, ResponseCode, Subscription
from librmq.wire.remote import ClusterAdmin, QueueBounds, RemoteRoute, connect

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
def open_cluster(arguments: argparse.Namespace) -> Iterator[ClusterSource]:
    """Connect to the name server in ``--route``.

    Raises:
        BrokerUnreachableError: No name server answers there.
        InputError: The command names a setting that only a store has.
    """
    if getattr(arguments, "config", None) is not None:
        raise InputError("--config describes the files of a store: leave it out with --route")
    with connect_to(arguments) as route:
        yield ClusterSource(route)


def connect_to(arguments: argparse.Namespace) -> RemoteRoute:
    """Connect to the name server in ``--route``, with the keys and the TLS that options, environment or a file name.

    Raises:
        BrokerUnreachableError: No name server answers there.
        InputError: A file can't be read, or has no key.
    """
    keys = _keys(arguments)
    ca_file = arguments.tls_ca or os.environ.get("LIBRMQ_TLS_CA")
    tls = None
    if arguments.tls or ca_file:
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # an SSLError is one
            raise InputError(f"--tls-ca {ca_file}: {error.strerror or error}: expected certificates in PEM") from None
    return connect(
        arguments.route,
        tls=tls,
        access_key=keys.get("accessKey"),
        secret_key=keys.get("secretKey"),
        security_token=keys.get("securityToken"),
    )


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


class ClusterSource:
    """What the brokers of a cluster say of their topics, groups and messages. Not thread-safe."""

    def __init__(self, route: RemoteRoute) -> None:
        self.route = route
        self.admin = ClusterAdmin(route)
        self._topics: dict[str, int] | None = None
        self._bounds: dict[str, dict[MessageQueue, QueueBounds]] = {}

    def named(self, broker_name: str, row: Row) -> Row:
        """Return a row with the name of its broker, if the cluster has several."""
        return row | {"broker": broker_name} if len(self.route.broker_names()) > 1 else row

    @property
    def levels(self) -> DelayLevels:
        """The delay levels that brokers have by default."""
        return DEFAULT_LEVELS

    # ---- topics

    def topics(self) -> list[str]:
        """Return the topics that a list shows: those with messages, and those that users made."""
        if self._topics is None:
            self._topics = {
                topic: max(data.permission for data in brokers) for topic, brokers in self.admin.topics().items()
            }
        return [
            topic
            for topic, permission in self._topics.items()
            if is_listed(topic, permission) or any(bounds.max_offset for bounds in self.bounds(topic).values())
        ]

    def bounds(self, topic: str) -> dict[MessageQueue, QueueBounds]:
        """Return the queues of a topic with the messages in each, as they were when first asked for."""
        if topic not in self._bounds:
            self._bounds[topic] = self.admin.queues(topic)
        return self._bounds[topic]

    def queue_offset_at(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the queue offset that the broker has for a time."""
        return self.route.broker(queue.broker_name).call(QueueOffsetAt(queue.topic, queue.queue_id, time_ms))

    def topic_rows(self, *, quiet: bool = False) -> Iterator[Row]:
        """Yield a row for each topic."""
        for topic in self.topics():
            queues = self.bounds(topic)
            last_ms = max((bounds.last_timestamp_ms for bounds in queues.values()), default=0)
            first = (self.message(queue, bounds.min_offset) for queue, bounds in queues.items() if bounds.max_offset)
            yield {
                "topic": topic,
                "kind": kind_of_topic(topic),
                "queues": len(queues),
                "messages": sum(bounds.max_offset - bounds.min_offset for bounds in queues.values()),
                "min_timestamp_ms": min((message.store_timestamp_ms for message in first if message), default=None),
                "max_timestamp_ms": last_ms or None,
            }

    # ---- groups

    def groups(self) -> list[str]:
        """Return the groups that brokers know, and those of retry and dead-letter topics, sorted."""
        groups = set(self.admin.groups())
        for topic in self.topics():
            for prefix in (RETRY_PREFIX, DEAD_LETTER_PREFIX):
                if topic.startswith(prefix):
                    groups.add(topic.removeprefix(prefix))
        return sorted(filter(None, groups))

    def group_rows(self, *, everything: bool) -> Iterator[Row]:
        """Yield a row for each group."""
        for group in self.groups():
            if everything or not is_own_group(group):
                rows = [row for _, row in self._queue_lags(group, times=False)]
                letters = self.bounds(dead_letter_topic(group)).values()
                yield {
                    "group": group,
                    "topics": sorted({row.topic for row in rows}),
                    "lag": sum(row.lag for row in rows) if rows else None,
                    "dead_letters": sum(bounds.max_offset - bounds.min_offset for bounds in letters),
                }

    def lag(self, group: str | None = None, topic: str | None = None, *, times: bool = True) -> Lag:
        """Return the lag of all groups, or of one, in all topics, or in one."""
        return Lag.of(row for _, row in self._all_lags(group, topic, times=times))

    def lag_rows(self, group: str | None = None, topic: str | None = None) -> Iterator[Row]:
        """Yield a row for each queue of `lag`."""
        rows = sorted(self._all_lags(group, topic), key=lambda pair: (pair[1].group, pair[1].topic, pair[0]))
        for queue, row in rows:
            yield self.named(queue.broker_name, row._asdict())

    def _all_lags(
        self, group: str | None, topic: str | None, *, times: bool = True
    ) -> Iterator[tuple[MessageQueue, QueueLag]]:
        groups = [name for name in self.groups() if not is_own_group(name)] if group is None else [group]
        return (pair for name in groups for pair in self._queue_lags(name, topic, times=times))

    def _queue_lags(
        self, group: str, topic: str | None = None, *, times: bool = True
    ) -> Iterator[tuple[MessageQueue, QueueLag]]:
        for queue, progress in self.admin.progress(group, topic).items():
            bounds = self.bounds(queue.topic).get(queue)
            begin = 0 if bounds is None else bounds.min_offset
            lag = queue_lag(progress.queue_offset, begin, progress.max_offset)
            oldest = self.message(queue, unread_from(progress.queue_offset, begin)) if times and lag else None
            row = QueueLag(
                group,
                queue.topic,
                queue.queue_id,
                begin,
                progress.max_offset,
                progress.queue_offset,
                lag,
                None if oldest is None else oldest.store_timestamp_ms,
            )
            yield queue, row

    # ---- messages

    def message(self, queue: MessageQueue, queue_offset: int) -> StoredMessage | None:
        """Return one message; None if it is gone, or the topic's permission forbids to read it."""
        try:
            return next(self._pulled(queue, range(queue_offset, queue_offset + 1)), None)
        except BrokerError as error:
            if error.code != ResponseCode.NO_PERMISSION:
                raise
            return None

    def _pulled(self, queue: MessageQueue, offsets: range) -> Iterator[StoredMessage]:
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

    def messages(self, query: MessageQuery) -> Iterator[StoredMessage]:
        """Yield the selected messages, oldest first."""
        test = query.test()
        if query.id is not None:
            message = self.admin.find_by_id(query.id, query.topic)
            yield from filter(test, [] if message is None else [message])
        elif query.key is not None:
            topics = [query.topic] if query.topic is not None else self._of_users()
            yield from filter(test, (message for topic in topics for message in self._with_key(topic, query.key)))
        else:
            topics = [query.topic] if query.topic is not None else self._of_users()
            queues = [
                self._in_queue(queue, bounds, query)
                for topic in topics
                for queue, bounds in self.bounds(topic).items()
                if query.queue_id in (None, queue.queue_id)
            ]
            yield from filter(
                test, heapq.merge(*queues, key=lambda message: (message.store_timestamp_ms, message.physical_offset))
            )

    def _of_users(self) -> list[str]:
        return [topic for topic in self.topics() if kind_of_topic(topic) == "user"]

    def _with_key(self, topic: str, key: str) -> list[StoredMessage]:
        try:
            return self.admin.find_by_key(topic, key)
        except BrokerError as error:
            if error.code != ResponseCode.QUERY_NOT_FOUND:
                raise
            return []

    def _in_queue(self, queue: MessageQueue, bounds: QueueBounds, query: MessageQuery) -> Iterator[StoredMessage]:
        begin, end = bounds.min_offset, bounds.max_offset
        if query.offsets is not None:
            begin, end = max(begin, query.offsets.start), min(end, query.offsets.stop)
        elif query.has_times and query.begin_ms > 0:
            # Of several messages stored in that millisecond the broker may mean any: so ask for the one before.
            begin = max(begin, self.queue_offset_at(queue, query.begin_ms - 1))
        for message in self._pulled(queue, range(begin, max(begin, end))):
            if message.store_timestamp_ms >= query.end_ms:
                return
            yield message

    def dead_letters(self, group: str | None) -> Iterator[tuple[str, GivenUpMessage]]:
        """Yield the dead letters of all groups, or of one, each with its broker's name."""
        letter_topic = None if group is None else dead_letter_topic(group)
        for topic in self.topics():
            if topic.startswith(DEAD_LETTER_PREFIX) and letter_topic in (None, topic):
                for queue, bounds in self.bounds(topic).items():
                    for message in self._pulled(queue, range(bounds.min_offset, bounds.max_offset)):
                        yield queue.broker_name, given_up(topic.removeprefix(DEAD_LETTER_PREFIX), message)
