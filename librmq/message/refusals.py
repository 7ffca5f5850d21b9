"""Errors of messages that clients, brokers and stores refuse alike."""

from __future__ import annotations

from librmq.errors import MessageIllegalError


def reserved_topic(topic: str) -> MessageIllegalError:
    """Return the error of a send to a topic of the broker's own."""
    return MessageIllegalError(f"topic {topic!r} is the broker's own: clients can't send to it")


def body_too_large(size: int, max_size: int) -> MessageIllegalError:
    """Return the error of a body of ``size`` bytes."""
    return MessageIllegalError(
        f"the body has {size:,} bytes, at most {max_size:,} are taken: send it in parts (docs/largebody.md), or raise "
        "max_message_size of the producer and of the store"
    )


def delayed_batch(topic: str) -> MessageIllegalError:
    """Return the error of a batch with a delivery time or a delay."""
    return MessageIllegalError(f"topic {topic!r}: a batch can't be delayed: send delayed messages one by one")


def delayed_transaction(topic: str) -> MessageIllegalError:
    """Return the error of a message of a transaction with a delivery time or a delay."""
    return MessageIllegalError(
        f"topic {topic!r}: a message of a transaction can't be delayed: "
        "send it without delay, deliver_at and delay_level"
    )
