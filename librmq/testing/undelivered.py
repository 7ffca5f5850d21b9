"""Undelivered messages and unmatched subscriptions at the end of a test, with the reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from librmq.errors import FilterSyntaxError
from librmq.filter import SQL92, SqlFilter, TagFilter
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.message import StoredMessage
from librmq.message.topics import DEAD_LETTER_PREFIX, RETRY_PREFIX, is_system_topic
from librmq.protocol import Subscription

_MOST_TAGS = 5


class UndeliveredWarning(UserWarning):
    """A test ended with messages that no listener got, a subscription that matched nothing, or an unused fault."""


@dataclass(slots=True)
class Subscribed:
    """One topic of one group, as its consumers subscribed."""

    group: str
    subscription: Subscription
    is_declared: bool
    """Whether the test made the consumer itself; an application may subscribe to more than a test sends."""
    was_read: bool = False
    """Whether a listener of the group got a message of the topic, or the application pulls itself."""


def undelivered(
    subscribed: Collection[Subscribed],
    topics: Iterable[str],
    expected: Collection[str],
    read_topics: Collection[str],
    messages: Callable[[str], Sequence[StoredMessage]],
    next_offset: Callable[[str, StoredMessage], int],
    fixture: str,
) -> Iterator[str]:
    """Yield a sentence for each subscription that matched nothing, and for each topic to which no group subscribes.

    ``topics`` have messages, some group should read the ``expected`` ones, and the test has read the ``read_topics``.
    ``messages(topic)`` returns the messages of a topic, ``next_offset(group, message)`` a group's progress in the
    message's queue. ``fixture`` is the name of what the test moves time with.
    """
    subscribed_topics = {subscriber.subscription.topic for subscriber in subscribed}
    sent = [topic for topic in topics if _is_the_users(topic)]
    unread = [topic for topic in sent if topic not in subscribed_topics and topic not in read_topics]
    suggested: set[str] = set()
    for subscriber in subscribed:
        topic = subscriber.subscription.topic
        if subscriber.was_read or topic.startswith(RETRY_PREFIX):
            continue
        begin = f"{subscriber.group} got nothing of {topic!r}: "
        if topic in sent:
            yield begin + _why_none_of(messages(topic), subscriber, next_offset, fixture)
        elif delayed := [m for m in messages(SCHEDULE_TOPIC) if m.properties.get("REAL_TOPIC") == topic]:
            yield f"{begin}{_are(delayed)} still delayed: let time pass with {fixture}.advance(…)"
        elif near := closest_name(topic, unread):
            suggested.add(near)
            yield f"{begin}none was sent to it; {_are(messages(near))} in {near!r}, to which no group subscribes"
        elif subscriber.is_declared and sent:
            yield f"{begin}none was sent to it"
    for topic in unread:
        near = closest_name(topic, subscribed_topics)
        if topic not in suggested and (near or topic in expected):
            hint = f"; did you mean {near!r}?" if near else ""
            yield f"no group subscribes to {topic!r}: {_are(messages(topic))} in it{hint}"


def closest_name(name: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to ``name``, None if none is similar."""
    matches = get_close_matches(name, list(names), 1, 0.75)
    return matches[0] if matches else None


def _why_none_of(
    messages: Sequence[StoredMessage],
    subscriber: Subscribed,
    next_offset: Callable[[str, StoredMessage], int],
    fixture: str,
) -> str:
    expression = subscriber.subscription.expression
    if subscriber.subscription.expression_type == SQL92:
        try:
            sql = SqlFilter(expression)
        except FilterSyntaxError as error:  # of an official client; librmq's own clients refuse it
            return f"its filter {expression!r} is not valid, at character {error.position + 1:,}: {error.reason}"
        reasons = [(message, sql.explain(message.properties)) for message in messages]
        passing = [message for message, reason in reasons if reason.matches]
        first = reasons[0][1]
        why = f"{first.decided_by} decides for the first, because {first.why}"
    else:
        tags = list(dict.fromkeys(repr(message.tags) for message in messages))
        passing = [message for message in messages if TagFilter(expression).matches(message.tags)]
        why = f"their tags are {', '.join(tags[:_MOST_TAGS])}" + (", …" if len(tags) > _MOST_TAGS else "")
    if not passing:
        return f"its filter {expression!r} matches none of the {len(messages):,} there: {why}"
    if all(message.queue_offset < next_offset(subscriber.group, message) for message in passing):
        return f"{_are(passing)} older than the group, which started at the end of its queues (consume_from)"
    idle = f"{fixture}.run_until_idle()" if fixture == "rmq" else f"{fixture}.settle()"
    return f"{_are(passing)} not delivered yet: end the test with {idle} or {fixture}.advance(…)"


def _are(messages: Sequence[StoredMessage]) -> str:
    return "1 message is" if len(messages) == 1 else f"{len(messages):,} messages are"


def _is_the_users(topic: str) -> bool:
    return not is_system_topic(topic) and not topic.startswith((RETRY_PREFIX, DEAD_LETTER_PREFIX))
