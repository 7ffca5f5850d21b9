"""Kinds of messages, by their records."""

from __future__ import annotations

from typing import Literal

from librmq.message import record
from librmq.message.message import StoredMessage


def kind_of(message: StoredMessage) -> Literal["plain", "delayed", "transactional"]:
    """Return the kind of a message in a topic of producers."""
    properties = message.properties
    if message.sys_flag & record.TRANSACTION_MASK or properties.get(record.PROPERTY_TRANSACTION_PREPARED) == "true":
        return "transactional"
    return "delayed" if record.PROPERTY_REAL_TOPIC in properties else "plain"
