"""Names of topics: what is allowed, and which RocketMQ keeps for itself.

Mirrors ``TopicValidator``, ``MixAll.getRetryTopic`` and ``MixAll.getDLQTopic``.
"""

from __future__ import annotations

import re
from typing import Final

from librmq.errors import MessageIllegalError
from librmq.message.delay_levels import SCHEDULE_TOPIC

AUTO_CREATE_TOPIC: Final = "TBW102"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"

RETRY_PREFIX: Final = "%RETRY%"
DEAD_LETTER_PREFIX: Final = "%DLQ%"

NOT_FOR_SENDING: Final = frozenset(
    (SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, CHECK_MAX_TIME_TOPIC, SELF_TEST_TOPIC, OFFSET_MOVED_TOPIC)
)
"""The topics to which only the broker writes."""

_SYSTEM: Final = NOT_FOR_SENDING | {AUTO_CREATE_TOPIC, "BenchmarkTest", "RMQ_SYS_TRACE_TOPIC"}
_SYSTEM_PREFIX: Final = "rmq_sys_"
_MAX_SIZE: Final = 127
_MAX_GROUP: Final = 120  # with the prefix of its retry topic it must still be a topic
_CLIENT_PATTERN: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


def validate_topic(topic: str) -> None:
    """Refuse with `MessageIllegalError` what cannot be a topic of a store.

    RocketMQ counts characters instead of bytes, and loses the log's tail where both differ much.
    """
    if not isinstance(topic, str):
        raise MessageIllegalError(f"topic: expected text, found {type(topic).__name__}")
    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        raise MessageIllegalError(f"topic {topic[:200]!r} cannot be written as UTF-8") from None
    if not size:
        raise MessageIllegalError("topic is empty")
    if size > _MAX_SIZE:
        raise MessageIllegalError(f"topic {topic[:200]!r} has {size} bytes, {_MAX_SIZE} at most")
    if topic in (".", "..") or "/" in topic or "\0" in topic:
        raise MessageIllegalError(f"topic {topic!r} is no name of a folder")


def validate_queue(topic: str, queue_id: int) -> None:
    """Refuse with `MessageIllegalError` what cannot be a queue of a store; records on disk may name anything."""
    validate_topic(topic)
    if queue_id < 0:
        raise MessageIllegalError(f"queue id: expected 0 or more, found {queue_id}")


def validate_client_topic(topic: str) -> None:
    """Refuse with `MessageIllegalError` what RocketMQ's clients refuse; stricter than `validate_topic`."""
    validate_topic(topic)
    if not _CLIENT_PATTERN.fullmatch(topic):
        raise MessageIllegalError(f"topic {topic!r} may only contain letters, digits, '%', '|', '_' and '-'")


def validate_group(group: str) -> None:
    """Refuse with `MessageIllegalError` what cannot be a group of producers or consumers."""
    if not isinstance(group, str):
        raise MessageIllegalError(f"group: expected text, found {group!r:.80}")
    if not _CLIENT_PATTERN.fullmatch(group):
        raise MessageIllegalError(f"group {group!r} may only contain letters, digits, '%', '|', '_' and '-'")
    if len(group) > _MAX_GROUP:
        raise MessageIllegalError(f"group {group[:80]!r}… has {len(group)} characters, {_MAX_GROUP} at most")


def is_system_topic(topic: str) -> bool:
    """Return whether RocketMQ keeps the name for itself: no user creates such a topic."""
    return topic in _SYSTEM or topic.startswith(_SYSTEM_PREFIX)


def retry_topic(group: str) -> str:
    """The topic from which a consumer group takes what it failed on."""
    return RETRY_PREFIX + group


def dead_letter_topic(group: str) -> str:
    """The topic in which ends what a consumer group has given up."""
    return DEAD_LETTER_PREFIX + group
