"""The topics of a broker: queues and permissions, kept in ``topics.json``; checks of what callers of a route name.

Mirrors ``TopicConfigManager``. Topics change under the runner's lock; `Topics.by_name` is read without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from datetime import datetime
from typing import Any, Final, Literal

from librmq.broker.config import BrokerConfig
from librmq.config import suggest, to_timestamp_ms
from librmq.errors import BrokerError, ConfigError, MessageIllegalError
from librmq.message.message import reserved_topic
from librmq.message.topics import (
    MESSAGE_TYPE,
    NOT_FOR_SENDING,
    TOPIC_TYPES,
    SystemTopic,
    TopicPrefix,
    group_of_retries,
    has_no_row,
    is_own_group,
    is_system_topic,
    reply_topic,
    validate_client_topic,
    validate_topic,
)
from librmq.protocol import PERM_INHERIT, PERM_READ, PERM_WRITE, CreateTopic, QueueData, ResponseCode, TopicDescription
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.store.format.broker_tables import MOST_QUEUES, ConfigTable, topic_row, topic_type

_READ_WRITE: Final = PERM_READ | PERM_WRITE
_BENCHMARK_TOPIC: Final = "BenchmarkTest"

_QUEUE_TYPE: Final = "queue.type"
"""How a broker of 5.x stores queues, which no client sees. librmq has them in files, and keeps no word of it: a broker
that continues the directory would look for them elsewhere."""
_ATTRIBUTES: Final[Mapping[str, Collection[str]]] = {
    MESSAGE_TYPE: TOPIC_TYPES,
    _QUEUE_TYPE: ("SimpleCQ", "BatchCQ", "RocksDBCQ"),
}
"""The attributes of 5.x that topics can have here, and what each can be."""
_NAMED: Final = 10
_versions: Final = itertools.count(1)

_log = EventLog("librmq.broker")


class Topic:
    """A topic in `Topics`. The queue id of a send must be below ``queues``."""

    __slots__ = (
        "_turn",
        "is_multi_tag",
        "is_plain",
        "is_ready",
        "is_retry",
        "message_type",
        "name",
        "permission",
        "queues",
        "read_queues",
        "write_queues",
    )

    def __init__(self, name: str, row: dict[str, Any]) -> None:
        self.name = name
        self.read_queues: int = row.get("readQueueNums", 16)
        self.write_queues: int = row.get("writeQueueNums", 16)
        self.queues = max(self.read_queues, self.write_queues)
        self.permission: int = row.get("perm", _READ_WRITE)
        self.message_type = topic_type(row)
        self.is_multi_tag = row.get("topicFilterType") == "MULTI_TAG"
        self.is_retry = name.startswith(TopicPrefix.RETRY)
        self.is_ready = False
        """Whether the topic is writable and durable, so that a send needs no further check."""
        self.is_plain = False
        """Whether it is ready, and messages without special properties are stored unchanged."""
        self._turn = itertools.count()  # counting is one atomic step

    def at(self, broker_name: str) -> QueueData:
        """Return the topic's queues, as routes show them."""
        return QueueData(broker_name, self.read_queues, self.write_queues, self.permission, self.message_type)

    def next_queue(self) -> int:
        """Return the next queue in turn, for a send that leaves it to the broker."""
        return next(self._turn) % max(self.write_queues, 1)


def not_readable(name: str) -> BrokerError:
    """Return the error of a pull or receive from a topic that may not be read."""
    return BrokerError(
        ResponseCode.NO_PERMISSION,
        f"topic {name!r} is not readable: its permission forbids it, or it has no read queues (create_topic sets both)",
    )


def check_topic_settings(request: CreateTopic) -> None:
    """Check what an administrator names of a topic, before any broker is asked."""
    validate_client_topic(request.topic)
    for what, value, maximum in (
        ("read_queues", request.read_queues, MOST_QUEUES),
        ("write_queues", request.write_queues, MOST_QUEUES),
        ("permission", request.permission, _READ_WRITE | PERM_INHERIT),
    ):
        if type(value) is not int or not 0 <= value <= maximum:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"{what}: expected 0 to {maximum}, found {value!r:.80}")
    for attribute, setting in request.attributes.items():
        if (choices := _ATTRIBUTES.get(attribute)) is None:
            what = f"attributes: expected {' or '.join(_ATTRIBUTES)}, which librmq has, found {attribute!r:.80}"
            raise BrokerError(ResponseCode.SYSTEM_ERROR, what)
        if setting is not None and setting not in choices:
            name = attribute.replace(".", "_")
            what = f"{name}: expected one of {', '.join(choices)}, found {setting!r:.80}"
            raise BrokerError(ResponseCode.SYSTEM_ERROR, what)


def refuse_own_topic(name: str, own_topics: Container[str] = ()) -> None:
    """Refuse to change a topic that RocketMQ reserves, or one of the broker's ``own_topics``."""
    if name in own_topics or is_system_topic(name):
        raise MessageIllegalError(f"topic {name!r} is the broker's own: it can't be created, changed or deleted")


_TIMER: Final = Topic(SystemTopic.TIMER, topic_row(SystemTopic.TIMER, 1, 1, _READ_WRITE))


def _some(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


class Topics:
    """All topics of one broker."""

    def __init__(
        self,
        table: ConfigTable,
        save: Callable[[ConfigTable, int], None],
        config: BrokerConfig,
        broker_name: str,
        cluster_name: str,
        now_ms: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        """``save(table, now_ms)`` writes a table; ``changed()`` is called after each change."""
        self._table = table
        self._save = save
        self._config = config
        self._now_ms = now_ms
        self._changed = changed
        self._own_topics = {SystemTopic.AUTO_CREATE, broker_name, cluster_name, *NOT_FOR_SENDING}
        queues = config.default_topic_queues
        defaults = [
            (SystemTopic.SELF_TEST, 1, _READ_WRITE),
            *([(SystemTopic.AUTO_CREATE, queues, _READ_WRITE | PERM_INHERIT)] if config.auto_create_topic else []),
            (_BENCHMARK_TOPIC, 1024, _READ_WRITE),
            (cluster_name, 16, _READ_WRITE | PERM_INHERIT),
            (broker_name, 1, _READ_WRITE | PERM_INHERIT),
            (SystemTopic.OFFSET_MOVED, 1, _READ_WRITE),
            (SystemTopic.SCHEDULE, 18, _READ_WRITE),
            (reply_topic(cluster_name), 1, _READ_WRITE),
        ]
        for name, count, permission in defaults:
            table.rows.setdefault(name, topic_row(name, count, count, permission))
        self.by_name: dict[str, Topic] = {name: Topic(name, row) for name, row in table.rows.items()}
        """By name."""
        self.version = next(_versions)
        """Version of the topics, which a new or changed topic increases before its next message."""
        self._lock = Lock()  # guards the table, because a replica copies topics without the runner's lock
        self._is_changed = False
        self._missing = set[str]()  # topics of which `warn_of_missing` has warned

    def warn_of_missing(self, name: str) -> None:
        """Log once that a message was delivered into a topic that the table lacks."""
        if name not in self.by_name and not has_no_row(name) and name not in self._missing:
            self._missing.add(name)
            _log.warning(
                "topics.json lacks topic %(topic)s, into which a message was delivered that had waited, so no group "
                "gets it; create_topic makes the topic with its old messages",
                topic=name,
            )

    def add_unlisted(self, unlisted: Mapping[str, int], groups: Collection[str]) -> None:
        """Handle topics of messages that the table lacks, by their numbers of queues. Under the runner's lock.

        A store that never had a broker has no table: its topics are created. An incomplete table stays as it is, but
        for topics of retries and dead letters of one of the ``groups``: a process was killed before it could write the
        table, and the group has passed the messages that were copied there, so that its lag would lack them.
        """

        def is_of_group(name: str) -> bool:
            if name.startswith(TopicPrefix.RETRY):
                return group_of_retries(name, groups, self.by_name) in groups
            return name.startswith(TopicPrefix.DEAD_LETTER) and name.removeprefix(TopicPrefix.DEAD_LETTER) in groups

        added_topics = {name: count for name, count in unlisted.items() if self._table.is_new or is_of_group(name)}
        if lacking := unlisted.keys() - added_topics.keys():
            _log.warning(
                "topics.json lacks topics that have messages, so no group gets these (%(topics)d): %(names)s; "
                "create_topic makes a topic with its old messages",
                topics=len(lacking),
                names=_some(sorted(lacking)),
            )
        if not added_topics:
            return
        for name, queues in added_topics.items():
            row = topic_row(name, min(queues, MOST_QUEUES), min(queues, MOST_QUEUES), _READ_WRITE)
            self._table.set(name, row)
            self.by_name[name] = Topic(name, row)
        if self._table.is_new:
            _log.info(
                "the store has no topics.json, so its topics are those of its messages (%(topics)d): %(names)s",
                topics=len(added_topics),
                names=_some(list(added_topics)),
            )
        self._save(self._table, self._now_ms())

    def copy_rows(self, rows: Mapping[str, Any], write: Callable[[ConfigTable, int], None]) -> None:
        """Replace all topics by a master's, which ``write(table, now_ms)`` makes durable. Thread-safe.

        `notify_copied` must be called later.
        """
        with self._lock:
            if self._table.replace(rows):
                self.by_name.update({name: Topic(name, row) for name, row in rows.items()})
                for name in self.by_name.keys() - rows.keys():
                    del self.by_name[name]
                self.version, self._is_changed = next(_versions), True
            write(self._table, self._now_ms())

    def notify_copied(self) -> None:
        """Notify the watchers of topics that were copied. Called under the runner's lock."""
        if self._is_changed:
            self._is_changed = False
            self._changed()

    def find(self, name: str) -> Topic | None:
        """Return a topic, or that of the timer, which RocketMQ 5 lists and the table of 4.9 lacks; None without one."""
        return self.by_name.get(name) or (_TIMER if name == SystemTopic.TIMER else None)

    def readable(self, name: str) -> Topic:
        """Return the topic of a pull or receive; `BrokerError` if it does not exist or may not be read."""
        topic = self.find(name)
        if topic is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist")
        if not topic.permission & PERM_READ:
            raise not_readable(name)
        return topic

    def for_send(self, name: str, default_queues: int, default_topic: str) -> Topic:
        """Return the topic of a send, made on demand like the default topic, with at most ``default_queues`` queues."""
        if name in NOT_FOR_SENDING:
            raise reserved_topic(name)
        if (topic := self.by_name.get(name)) is not None:
            return topic
        validate_client_topic(name)
        default = self.by_name.get(default_topic)
        is_allowed = self._config.auto_create_topic or default_topic != SystemTopic.AUTO_CREATE
        if is_allowed and default is not None and default.permission & PERM_INHERIT:
            queues = max(0, min(default_queues, default.write_queues))
            return self._set_row(CreateTopic(name, queues, queues, default.permission & ~PERM_INHERIT))
        if name.startswith(TopicPrefix.RETRY):
            return self._set_row(CreateTopic(name, 1, 1))
        otherwise = "let sends do so with BrokerConfig(auto_create_topic=True)"
        if default_topic != SystemTopic.AUTO_CREATE:
            otherwise = (
                f"send with a default topic that exists and lets topics inherit from it, not {default_topic!r:.80}"
            )
        raise BrokerError(
            ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist: create it with create_topic, or {otherwise}"
        )

    def ensure(self, name: str, queues: int = 1) -> Topic:
        """Return one of the broker's own topics, such as a group's retry topic, created on demand."""
        return self.by_name.get(name) or self._set_row(CreateTopic(name, queues, queues))

    def change_topic(self, request: CreateTopic) -> None:
        check_topic_settings(request)
        refuse_own_topic(request.topic, self._own_topics)
        if request.read_queues < request.write_queues:
            _log.warning(
                "topic %(topic)s: producers write to %(write_queues)s queues, and consumers read only %(read_queues)s: "
                "no group gets the messages of the others",
                topic=request.topic,
                write_queues=request.write_queues,
                read_queues=request.read_queues,
            )
        self._set_row(request)

    def delete(self, name: str) -> None:
        """Delete a topic; `BrokerError` if it does not exist, `MessageIllegalError` for one of the broker's own."""
        refuse_own_topic(name, self._own_topics)
        if self.by_name.pop(name, None) is None:
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic {name!r} does not exist")
        with self._lock:
            self._table.remove(name)
            self.version = next(_versions)
            self._save(self._table, self._now_ms())
        self._changed()

    def _set_row(self, request: CreateTopic) -> Topic:
        name = request.topic
        counts = request.read_queues, request.write_queues
        before = self._table.rows.get(name)
        attributes = {name: value for name, value in request.attributes.items() if name != _QUEUE_TYPE}
        row = topic_row(name, *counts, request.permission, before=before, attributes=attributes)
        with self._lock:
            self._table.set(name, row)
            self.version = next(_versions)
            self._save(self._table, self._now_ms())
            topic = self.by_name[name] = Topic(name, row)
        self._changed()
        return topic


# ---- what callers of a route name, checked before a broker is asked


def check_names(**names: object) -> None:
    """Refuse names of topics or groups that are not text. Any text passes: brokers can have any name."""
    for what, name in names.items():
        if not isinstance(name, str):
            raise MessageIllegalError(f"{what}: expected text, found {name!r:.80}")


def check_key(topic: str, key: object, max_messages: object) -> None:
    validate_topic(topic)
    if not isinstance(key, str):
        raise ConfigError(f"key: expected text, found {key!r:.80}")
    if type(max_messages) is not int:
        raise ConfigError(f"max_messages: expected a whole number, found {max_messages!r:.80}")


def target_of(to: object) -> Literal["begin", "end"] | datetime | int:
    if isinstance(to, datetime) and to.tzinfo is not None:
        to_timestamp_ms("to", to)
        return to
    if type(to) is int and to >= 0:
        return to
    if to == "begin" or to == "end":
        return to
    raise ConfigError(
        f"to: expected 'begin', 'end', a time with a time zone or a queue offset of at least 0, found {to!r:.80}"
    )


def no_such_topic(topic: str, topics: Mapping[str, TopicDescription]) -> BrokerError:
    """Return the error for a topic that no broker has, with names of others that are like it."""
    of_users = [
        name
        for name, description in topics.items()
        if description.kind == "user" and not description.permission & PERM_INHERIT
    ]
    return BrokerError(ResponseCode.TOPIC_NOT_EXIST, f"topic {topic!r} does not exist; {suggest(topic, of_users)}")


def no_such_group(group: str, groups: Iterable[str]) -> BrokerError:
    """Return the error for a group that no broker has, with names of others that are like it."""
    near = suggest(group, [name for name in groups if not is_own_group(name)])
    return BrokerError(
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        f"group {group!r} does not exist; {near} (set_group creates a group)",
    )
