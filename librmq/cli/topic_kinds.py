"""Kinds of topics, by their names."""

from __future__ import annotations

from typing import Final

from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.topics import DEAD_LETTER_PREFIX, HALF_TOPIC, OP_TOPIC, RETRY_PREFIX, is_system_topic

_INHERITED: Final = 1
_KINDS: Final = {SCHEDULE_TOPIC: "delay", HALF_TOPIC: "half", OP_TOPIC: "op"}


def kind_of_topic(topic: str) -> str:
    """Return the kind of a topic: user, retry, dead, delay, half, op or system."""
    if topic.startswith(RETRY_PREFIX):
        return "retry"
    if topic.startswith(DEAD_LETTER_PREFIX):
        return "dead"
    return _KINDS.get(topic) or ("system" if is_system_topic(topic) else "user")


def is_listed(topic: str, permission: int) -> bool:
    """Return whether a topic is listed though it has no messages: users have made it."""
    is_own = kind_of_topic(topic) == "system" or topic in _KINDS or topic.endswith("_REPLY_TOPIC")
    return not is_own and not permission & _INHERITED
