"""The cause of a dead letter: why a group gave the message up, as a property of the record.

Consumers and brokers write it by `record_cause`. A letter without it, such as one of RocketMQ, gets a cause from its
counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from librmq.java.lang import java_int
from librmq.message.properties import PropertyName

AT_ONCE: Final = "never retried"
USED_UP: Final = "retries used up"
IN_ORDER: Final = "ordered, retries used up"
_ROOM: Final = 30_000
"""A failed message with fewer bytes of properties has room for the cause."""


def record_cause(properties: dict[str, str], cause: str | None, size: int) -> None:
    """Add the cause to the properties of a dead letter, unless those of the message, ``size`` bytes, leave no room."""
    if cause and size < _ROOM:
        properties[PropertyName.DEAD_LETTER_CAUSE] = cause


def recorded_cause(properties: Mapping[str, str]) -> str | None:
    """Return the cause that a consumer or a broker of librmq recorded, None without one."""
    return properties.get(PropertyName.DEAD_LETTER_CAUSE) or None


def cause_of(properties: Mapping[str, str], reconsume_times: int) -> str:
    """Return why a group gave a message up: what a consumer recorded, else what the record shows."""
    recorded = recorded_cause(properties)
    if recorded:
        return recorded
    if java_int(properties.get(PropertyName.RECONSUME_TIME, "")) is not None:
        return IN_ORDER  # an orderly consumer sends the message itself, with its count as a property
    return AT_ONCE if reconsume_times <= 1 else USED_UP
