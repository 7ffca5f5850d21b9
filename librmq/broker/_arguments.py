"""Checks of what callers of a route name, before a broker is asked: topics, groups, ids, keys, places in queues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal

from librmq.config import suggest, to_timestamp_ms
from librmq.errors import BrokerError, ConfigError, MessageIllegalError
from librmq.message.topics import is_own_group, validate_topic
from librmq.protocol import PERM_INHERIT, ResponseCode, TopicDescription


def check_names(**names: object) -> None:
    """Refuse names of topics or groups that are not text. Any text passes: brokers can have any name.

    Raises:
        MessageIllegalError: A name is not text.
    """
    for what, name in names.items():
        if not isinstance(name, str):
            raise MessageIllegalError(f"{what}: expected text, found {name!r:.80}")


def check_id(message_id: object) -> None:
    """Refuse an id that is not text.

    Raises:
        ConfigError: The id is not text.
    """
    if not isinstance(message_id, str):
        raise ConfigError(f"message_id: expected the text of an id, found {message_id!r:.80}")


def check_key(topic: str, key: object, max_messages: object) -> None:
    """Refuse a search that no broker can make.

    Raises:
        MessageIllegalError: The name of the topic is invalid.
        ConfigError: The key is not text, or the number is not a whole number.
    """
    validate_topic(topic)
    if not isinstance(key, str):
        raise ConfigError(f"key: expected text, found {key!r:.80}")
    if type(max_messages) is not int:
        raise ConfigError(f"max_messages: expected a whole number, found {max_messages!r:.80}")


def target_of(to: object) -> Literal["begin", "end"] | datetime | int:
    """Return where a group moves to.

    Raises:
        ConfigError: ``to`` does not name a place in a queue.
    """
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
