"""Dead letters: the messages that consumer groups have given up, with their causes."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from librmq.diagnosis._findings import Finding, Thresholds, cut_evidence, grouped
from librmq.diagnosis.view import LiveView, Source, StoreView, View, viewed
from librmq.formatting import sent_again
from librmq.message import StoredMessage
from librmq.message.properties import PropertyName, cause_of
from librmq.message.topics import TopicPrefix, original_topic
from librmq.runtime.event_log import counted
from librmq.store.format.documents import RecordIdentity

_CAUSES: Final = 5  # causes of a group and topic that get a finding each
ASKED: Final = 500
"""Dead letters in a queue, the newest, for which findings ask a broker of a cluster."""
OF_A_LETTER: Final = frozenset(
    (
        PropertyName.DLQ_ORIGIN_TOPIC,
        PropertyName.DLQ_ORIGIN_MESSAGE_ID,
        PropertyName.DEAD_LETTER_CAUSE,
        PropertyName.RESENT_LETTER,
    )
)
"""Properties of a dead letter that its message did not have, besides reserved ones."""
VARIABLE_PARTS: Final = "0x[0-9a-fA-F]+|[0-9A-Fa-f]{8,}|[0-9]+"
"""What differs between causes that count as one: a regular expression of Python and Java."""
_VARIABLE_PARTS: Final = re.compile(VARIABLE_PARTS)


class GivenUpMessage(NamedTuple):
    """A dead letter."""

    group: str
    original_topic: str
    """The topic of the send."""
    unique_key: str | None
    """The unique id; None if the message has none."""
    reconsume_times: int
    """Failed attempts."""
    store_timestamp_ms: int
    """Time at which the group gave it up."""
    cause: str
    """The exception of the last attempt, if a consumer of librmq kept it, else the record's cause."""
    physical_offset: int
    """The place of the dead letter in the log."""
    resent_at_ms: int | None = None
    """Time at which `Broker.resend_dead_letters` last sent it to the group again; None if it never did."""

    def is_caused_by(self, text: str) -> bool:
        """Return whether its cause contains a text, or would with numbers replaced by ``#``, as a sum has it."""
        return text in self.cause or text in _VARIABLE_PARTS.sub("#", self.cause)


class DeadLetterCause(NamedTuple):
    """Dead letters of one cause; numbers in the text of an exception are ignored.

    Times, attempts and example are those of the letters that were not sent again, or if all were, of all.
    """

    group: str
    original_topic: str
    """The topic of the sends."""
    cause: str
    """As in `GivenUpMessage`, with numbers replaced by ``#``."""
    messages: int
    """Number of dead letters that were not sent again."""
    first_timestamp_ms: int
    """Time at which the group gave up the first of them."""
    last_timestamp_ms: int
    """Time at which the group gave up the last of them."""
    most_times: int
    """The most failed attempts at one of them."""
    example: int
    """The physical offset of the last one."""
    resent: int
    """Number of dead letters that were sent again."""


def dead_letters(source: Source, *, group: str | None = None) -> list[GivenUpMessage]:
    """Return the dead letters of all groups, or of one, in the order of groups and of their queues.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed(source) as view:
        return [letter for *_, letter in letters_by_queue(view, group)]


def dead_letter_causes(source: Source, *, group: str | None = None) -> list[DeadLetterCause]:
    """Return the dead letters by group, topic and cause, the most frequent first.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed(source) as view:
        return sum_up_causes(letter for *_, letter in letters_by_queue(view, group))


def sum_up_causes(letters: Iterable[GivenUpMessage]) -> list[DeadLetterCause]:
    """Return dead letters by group, topic and cause, the most frequent first."""
    sums: dict[tuple[str, str, str], DeadLetterCause] = {}
    for letter in letters:
        name = letter.group, letter.original_topic, _VARIABLE_PARTS.sub("#", letter.cause)
        at_ms, times, is_unsent = letter.store_timestamp_ms, letter.reconsume_times, letter.resent_at_ms is None
        before = sums.get(name)
        if before is None or (is_unsent and not before.messages):  # the first one, or the first unsent one
            resent = not is_unsent if before is None else before.resent
            place = letter.physical_offset
            sums[name] = DeadLetterCause(*name, int(is_unsent), at_ms, at_ms, times, place, int(resent))
            continue
        sums[name] = before = before._replace(resent=before.resent + (not is_unsent))
        if is_unsent or not before.messages:
            sums[name] = before._replace(
                messages=before.messages + is_unsent,
                first_timestamp_ms=min(before.first_timestamp_ms, at_ms),
                last_timestamp_ms=max(before.last_timestamp_ms, at_ms),
                most_times=max(before.most_times, times),
                example=letter.physical_offset,
            )
    return sorted(sums.values(), key=lambda sums_of_cause: (-sums_of_cause.messages, sums_of_cause[:3]))


def letters_by_queue(
    view: View[Any], group: str | Collection[str] | None = None, newest: int = sys.maxsize
) -> Iterator[tuple[Any, StoredMessage, GivenUpMessage]]:
    """Yield the dead letters of all groups, or of some, with queue and message; of each queue the ``newest`` ones."""
    groups = (group,) if isinstance(group, str) else group
    for topic in view.topics:
        group_name = topic.removeprefix(TopicPrefix.DEAD_LETTER)
        if topic.startswith(TopicPrefix.DEAD_LETTER) and (groups is None or group_name in groups):
            for queue, offsets in view.queues(topic).items():
                for message in view.messages(queue, offsets[-newest:]):
                    yield queue, message, given_up(group_name, message, view.resent_times)


def given_up(
    group: str, message: StoredMessage, times: Mapping[RecordIdentity, int] = MappingProxyType({})
) -> GivenUpMessage:
    """Return a message of a group's dead-letter topic as a dead letter; ``times`` say when those were sent again."""
    return GivenUpMessage(
        group=group, original_topic=origin_of(group, message.topic, message.properties), unique_key=message.unique_key,
        reconsume_times=message.reconsume_times, store_timestamp_ms=message.store_timestamp_ms,
        cause=cause_of(message.properties, message.reconsume_times), physical_offset=message.physical_offset,
        resent_at_ms=times.get(RecordIdentity.of(message)) if times else None,
    )  # fmt: skip


def origin_of(group: str, topic: str, properties: Mapping[str, str]) -> str:
    """Return the topic that a message of a group's topic of retries or dead letters was sent to."""
    origin = properties.get(PropertyName.RETRY_TOPIC) or properties.get(PropertyName.DLQ_ORIGIN_TOPIC) or topic
    return original_topic(group, origin)  # a message that was received again has the retry topic's name


# ------------------------------------------------------------------------------------------------------------ causes


def dead_letter_findings(view: LiveView, limits: Thresholds) -> Iterator[Finding]:
    """Yield a finding for each frequent cause of unsent dead letters of a group and topic, and one for the rest."""
    letters = letters_by_queue(view) if isinstance(view, StoreView) else letters_by_queue(view, view.groups, ASKED)
    unsent = [cause for cause in sum_up_causes(letter for *_, letter in letters) if cause.messages]
    for causes in grouped(unsent, lambda cause: (cause.group, cause.original_topic)).values():
        yield from (_causes_finding([cause], limits) for cause in causes[:_CAUSES])
        if len(causes) > _CAUSES:
            yield _causes_finding(causes[_CAUSES:], limits)


def _causes_finding(causes: Sequence[DeadLetterCause], limits: Thresholds) -> Finding:
    largest, messages = causes[0], sum(cause.messages for cause in causes)
    resent = sum(cause.resent for cause in causes)
    more = f" {sent_again(resent)}." if resent else ""
    what = largest.cause if len(causes) == 1 else f"{counted(len(causes), 'rarer cause')}, such as {largest.cause}"
    return Finding(
        "dead-letters", limits._severity_of(largest.original_topic),
        f"group {largest.group}, topic {largest.original_topic}", f"{counted(messages, 'dead letter')}: {what}.{more}",
        {"cause": largest.cause, "causes": len(causes), **cut_evidence(len(causes) > 1), "messages": messages,
         "resent": resent,
         "first_timestamp_ms": min(cause.first_timestamp_ms for cause in causes),
         "last_timestamp_ms": max(cause.last_timestamp_ms for cause in causes), "physical_offset": largest.example},
        f"Fix the cause, then send them again: librmq dead-letters STORE --resend --group {largest.group}, or "
        "broker.resend_dead_letters.",
    )  # fmt: skip
