"""The messages of a topic that a page shows: the newest, of those that a form selects.

A search reads backwards from the newest message, and stops after a number of messages or two seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

from librmq.console._place import Place
from librmq.console._tables import Query
from librmq.diagnosis import GivenUpMessage, StoreView, View
from librmq.diagnosis.deadletters import given_up
from librmq.errors import ConfigError
from librmq.filter import SqlFilter, TagFilter
from librmq.formatting import number
from librmq.message import StoredMessage, dead_letter_topic
from librmq.store.format.documents import letter_identity

MESSAGES: Final = 25
_LOOKED_AT: Final = 20_000
"""Messages that one search reads."""
_SEARCH_S: Final = 2.0


def selected(place: Place, view: View[Any], topic: str, query: Query) -> tuple[list[StoredMessage], str]:
    """Return the newest messages that a form selects, and where the search stopped."""
    key, tag, sql = query.text("key"), query.text("tag"), query.text("sql")
    since, until = query.time_ms("since"), query.time_ms("until")
    if sum(map(bool, (key, tag, sql))) > 1:
        raise ConfigError("expected one of key, tag and SQL")
    if key and isinstance(view, StoreView):
        found = view.store.find_by_key(topic, key, max_messages=MESSAGES)
        return _newest_first(_within(found, since, until)), ""
    if key:
        return _newest_first(_within(place.acting().find_by_key(topic, key), since, until)), ""
    matches: Callable[[StoredMessage], bool] = lambda message: True  # noqa: E731
    if tag:
        tags = TagFilter(tag).tags
        matches = lambda message: not tags or message.tags in tags  # noqa: E731
    if sql:
        by_sql = SqlFilter(sql, strict=True)
        matches = lambda message: by_sql.matches(message.properties)  # noqa: E731
    is_plain = not (tag or sql or since is not None or until is not None)
    most = MESSAGES if is_plain else _LOOKED_AT
    deadline = query.clock.monotonic() + _SEARCH_S
    found, looked_at, is_cut = [], 0, False
    for message in _backwards(view, topic, most):
        looked_at += 1
        if matches(message) and _within((message,), since, until):
            found.append(message)
        if len(found) >= MESSAGES:
            break
        if looked_at >= most or query.clock.monotonic() > deadline:
            is_cut = not is_plain
            break
    note = f"The search looked at the newest {number(looked_at)} messages: librmq show reads all." if is_cut else ""
    return found, note


def count_letters(view: View[Any], group: str) -> int:
    """Return the number of a group's dead letters."""
    return sum(map(len, view.queues(dead_letter_topic(group)).values()))


def newest_letters(view: View[Any], group: str, most: int) -> list[tuple[StoredMessage, GivenUpMessage]]:
    """Return the newest dead letters of a group, the last one first."""
    times, newest = view.resent_times, islice(_backwards(view, dead_letter_topic(group), most), most)
    return [
        (
            message,
            given_up(group, message)._replace(resent_at_ms=times.get(letter_identity(message)) if times else None),
        )
        for message in newest
    ]


def _backwards(view: View[Any], topic: str, most: int) -> Iterator[StoredMessage]:
    """Yield the messages of a topic, the newest first; of each queue at most ``most``, of many queues the freshest."""
    filled = [(queue, ids) for queue, ids in view.queues(topic).items() if ids]
    if len(filled) > MESSAGES:
        filled = heapq.nlargest(MESSAGES, filled, key=lambda entry: view.stored_at(entry[0], entry[1].stop - 1) or 0)
    queues = (queue_backwards(view, queue, ids, most) for queue, ids in filled)
    return heapq.merge(*queues, key=lambda message: -message.store_timestamp_ms)


def queue_backwards(view: View[Any], queue: Any, ids: range, most: int) -> Iterator[StoredMessage]:
    """Yield the messages of a queue, the newest first, about ``most`` of them."""
    end = ids.stop
    while end > ids.start and ids.stop - end < most:
        begin = max(ids.start, end - min(most, 32))
        yield from reversed(list(view.messages(queue, range(begin, end))))
        end = begin


def _within(messages: Iterable[StoredMessage], since: int | None, until: int | None) -> list[StoredMessage]:
    return [
        message
        for message in messages
        if (since is None or message.store_timestamp_ms >= since)
        and (until is None or message.store_timestamp_ms < until)
    ]


def _newest_first(messages: Iterable[StoredMessage]) -> list[StoredMessage]:
    return sorted(messages, key=lambda message: -message.store_timestamp_ms)[:MESSAGES]
