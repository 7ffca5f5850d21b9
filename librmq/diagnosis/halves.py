"""Half messages that checks have discarded: list them, and decide about them later.

A half that 15 checks could not end goes to ``TRANS_CHECK_MAX_TIME_TOPIC``, and no producer is asked again. A later
decision delivers or drops the message, and writes an op message for its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from librmq.diagnosis.findings import Finding, Thresholds, counted
from librmq.diagnosis.formatting import duration
from librmq.diagnosis.pending import family_of_half, given_up_halves, open_halves
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.errors import TransactionRefusedError
from librmq.java.lang import java_int
from librmq.message import record
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import OP_TOPIC
from librmq.scheduling.half_messages import OP_TAG, QUEUE

if TYPE_CHECKING:
    from librmq.broker import Broker

_SYSTEM_ERROR = 1


class GivenUpHalf(NamedTuple):
    """An undecided half message that checks have discarded."""

    group: str
    """The producer group."""
    topic: str
    """The topic of the message."""
    unique_key: str | None
    """The unique id; None if the message has none."""
    checks: int
    """Number of checks."""
    born_timestamp_ms: int
    """Time of the send, in milliseconds since 1970."""
    given_up_timestamp_ms: int
    """Time at which the last check discarded it."""
    physical_offset: int
    """The place of the record in the topic of discarded halves."""
    can_be_decided: bool
    """Whether the log still has its half."""


def given_up(source: Source) -> list[GivenUpHalf]:
    """Return the undecided half messages that checks have discarded, in log order.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed(source) as view:
        return [
            GivenUpHalf(
                half.properties.get(record.PROPERTY_PRODUCER_GROUP, ""),
                half.properties.get(record.PROPERTY_REAL_TOPIC, ""),
                half.unique_key,
                java_int(half.properties.get(record.PROPERTY_TRANSACTION_CHECK_TIMES, "0")) or 0,
                half.born_timestamp_ms,
                half.store_timestamp_ms,
                half.physical_offset,
                bool(family_of_half(view.store, half)),
            )
            for half in given_up_halves(view.store)
        ]


def decide_half(broker: Broker, physical_offset: int, *, commit: bool) -> None:
    """Commit or roll back a half message that checks have discarded.

    Args:
        broker: The running broker.
        physical_offset: The place in a result of `given_up`.
        commit: Whether to deliver or to drop the message.

    Raises:
        TransactionRefusedError: There is no such half message at this place, it was already decided, or the log no
            longer has it.
        BrokerUnreachableError: The broker is closed.
    """
    from librmq.protocol import EndTransaction, TransactionState  # loads asyncio, which a list does not need

    store = broker.store
    half = next(
        (candidate for candidate in given_up_halves(store) if candidate.physical_offset == physical_offset), None
    )
    if half is None:
        raise TransactionRefusedError(
            _SYSTEM_ERROR,
            f"physical offset {physical_offset}: expected an undecided half that was given up, as "
            "`librmq pending --kind given_up` lists",
        )
    family = family_of_half(store, half)
    if not family:
        raise TransactionRefusedError(
            _SYSTEM_ERROR, f"the log no longer has the half of {half.message_id}: send the message again instead"
        )
    last = family[-1]
    state = TransactionState.COMMIT if commit else TransactionState.ROLLBACK
    group = half.properties.get(record.PROPERTY_PRODUCER_GROUP, "")
    broker.call(EndTransaction(group, state, last.queue_offset, last.physical_offset, last.message_id))
    with broker.runner.lock:  # no check asks about it any more: the op message is the only trace of a rollback
        broker.store.append(Message(OP_TOPIC, str(last.queue_offset).encode(), tags=OP_TAG), QUEUE)


def half_findings(source: Source, thresholds: Thresholds | None = None) -> list[Finding]:
    """Return the findings about halves of each producer group and topic: given up, or never checked."""
    limits = thresholds or Thresholds()
    halves_by_topic: dict[tuple[str, str], list[GivenUpHalf]] = {}
    with viewed(source) as view:
        unchecked = list(_unchecked(view, limits))
        for half in given_up(view):
            halves_by_topic.setdefault((half.group, half.topic), []).append(half)
    return [
        *unchecked,
        *(_given_up(group, topic, halves, limits) for (group, topic), halves in halves_by_topic.items()),
    ]


def _given_up(group: str, topic: str, halves: list[GivenUpHalf], limits: Thresholds) -> Finding:
    return Finding(
        "given-up-halves",
        "error" if topic in limits.topics else "warning",
        f"producer group {group}, topic {topic}",
        f"Checks have given up {counted(len(halves), 'half message')}, without commit or rollback.",
        {
            "halves": len(halves),
            "checks": max(half.checks for half in halves),
            "first_timestamp_ms": min(half.given_up_timestamp_ms for half in halves),
            "last_timestamp_ms": max(half.given_up_timestamp_ms for half in halves),
            "physical_offset": halves[-1].physical_offset,
        },
        "Look up the transactions in the producer's database, then commit or roll back each: librmq decide STORE "
        "OFFSET, or decide_half.",
    )


def _unchecked(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the halves that no check has asked about, though it was due long ago."""
    halves_by_topic: dict[tuple[str, str], list[tuple[int, StoredMessage]]] = {}
    for check_ms, half in open_halves(view.store, view.tables):
        due_ms = max(check_ms, half.store_timestamp_ms)  # the producer's clock can be wrong
        checks = java_int(half.properties.get(record.PROPERTY_TRANSACTION_CHECK_TIMES, "0"))
        if not checks and (view.age_s(due_ms) or 0) > limits.unchecked_s:
            group = half.properties.get(record.PROPERTY_PRODUCER_GROUP, "")
            halves_by_topic.setdefault((group, half.properties.get(record.PROPERTY_REAL_TOPIC, "")), []).append(
                (due_ms, half)
            )
    for (group, topic), halves in halves_by_topic.items():
        due_ms, oldest = min(halves, key=lambda pair: pair[0])
        yield Finding(
            "unchecked-halves",
            "error" if topic in limits.topics else "warning",
            f"producer group {group}, topic {topic}",
            f"{counted(len(halves), 'half message')} without commit or rollback, and never checked; the first check "
            f"was due {duration(view.age_s(due_ms))} ago.",
            {
                "halves": len(halves),
                "first_timestamp_ms": oldest.store_timestamp_ms,
                "last_timestamp_ms": max(half.store_timestamp_ms for _, half in halves),
                "due_timestamp_ms": due_ms,
                "physical_offset": oldest.physical_offset,
            },
            "Start the broker, which checks them, and a transaction producer of this group, which answers.",
        )
