"""Resending of dead letters to the group that gave them up."""

from __future__ import annotations

from typing import Final

from librmq.errors import ConfigError
from librmq.message import Message, StoredMessage, record, retry_topic
from librmq.message.topics import DEAD_LETTER_PREFIX
from librmq.protocol import LOCAL_HOST, SendMessage

__all__ = ["retry_of"]

_OF_THE_LAST_TIME: Final = (
    record.PROPERTY_DELAY,
    record.PROPERTY_REAL_TOPIC,
    record.PROPERTY_REAL_QUEUE_ID,
    record.PROPERTY_RECONSUME_TIME,
    record.PROPERTY_WAIT,
)


def retry_of(letter: StoredMessage, group: str | None = None) -> SendMessage:
    """Return the request that lets a group have a dead letter once more, with all its retries.

    It goes to the retry topic of the group, so that no other group sees it, and is delivered at once.

    Raises:
        ConfigError: the message is no dead letter, or none of ``group`` where that is given.
    """
    topic = letter.topic
    if not topic.startswith(DEAD_LETTER_PREFIX):
        raise ConfigError(f"{letter.message_id} of topic {topic!r} is no dead letter: expected {DEAD_LETTER_PREFIX}…")
    if group not in (None, topic.removeprefix(DEAD_LETTER_PREFIX)):
        raise ConfigError(f"{letter.message_id} of topic {topic!r} is no dead letter of group {group!r}")
    again = Message(retry_topic(topic.removeprefix(DEAD_LETTER_PREFIX)), letter.body, flag=letter.flag)
    again.properties.update(letter.properties)
    for name in _OF_THE_LAST_TIME:
        again.properties.pop(name, None)
    host = letter.born_host or LOCAL_HOST
    return SendMessage("CLIENT_INNER_PRODUCER", again, 0, letter.born_timestamp_ms, host)
