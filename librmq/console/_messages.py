"""Messages on a page: the newest of a topic that a form selects, how long the log keeps them, and the parts of one.

A search reads backwards from the newest message, and stops after a number of messages or two seconds.
"""

from __future__ import annotations

import heapq
import json
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from itertools import islice
from typing import Any, Final

from librmq.clock import LAST_MS
from librmq.console._place import Place
from librmq.console._tables import Cell, Fact, Query, Table, message_link, topic_link
from librmq.diagnosis import GivenUpMessage, StoreView, StoryEvent, View
from librmq.diagnosis.deadletters import given_up
from librmq.errors import ConfigError, RmqError
from librmq.filter import SqlFilter, TagFilter
from librmq.formatting import UNKNOWN, moment, number, short, size
from librmq.message import StoredMessage, dead_letter_topic
from librmq.message.record import decompress_body
from librmq.store.format.directory import is_made_by_librmq
from librmq.store.format.documents import letter_identity

MESSAGES: Final = 25
_LOOKED_AT: Final = 20_000
"""Messages that one search reads."""
_SEARCH_S: Final = 2.0
"""Seconds after which a search stops, because a browser waits for its page."""
BODY_SIZE: Final = 64 << 10
"""The most bytes of a body that are shown, of which hexadecimal digits and the lines of a test show fewer."""
_HEX: Final = 4096
_IN_TEST: Final = 2048
_OF_KEY: Final = 64
_MOODS: Final = {"dead": "bad", "given_up": "bad", "retried": "warn", "not_passed": "warn", "passed": "good"}


# ---- messages of a topic


def selected(place: Place, view: View[Any], topic: str, query: Query) -> tuple[list[StoredMessage], str]:
    """Return the newest messages that a form selects, and where the search stopped."""
    key, tag, sql = query.text("key"), query.text("tag"), query.text("sql")
    since, until = query.time_ms("since"), query.time_ms("until")
    if sum(map(bool, (key, tag, sql))) > 1:
        raise ConfigError("expected one of key, tag and SQL")
    if key and isinstance(view, StoreView):
        begin_ms, end_ms = since or 0, LAST_MS if until is None else until - 1
        return _newest_first(view.store.find_by_key(topic, key, begin_ms, end_ms, max_messages=MESSAGES)), ""
    if key:
        found = place.acting().find_by_key(topic, key)
        note = f"Of the newest {_OF_KEY} with this key: a broker returns no more." if len(found) >= _OF_KEY else ""
        return _newest_first(_within(found, since, until)), note
    matches: Callable[[StoredMessage], bool] = lambda message: True  # noqa: E731
    if tag:
        tags = TagFilter(tag).tags
        matches = lambda message: not tags or message.tags in tags  # noqa: E731
    if sql:
        by_sql = SqlFilter(sql, strict=True)
        matches = lambda message: by_sql.matches(message.properties)  # noqa: E731
    is_plain = not (tag or sql or since is not None or until is not None)
    limit = MESSAGES if is_plain else _LOOKED_AT
    deadline = query.clock.monotonic() + _SEARCH_S
    messages, looked_at, is_cut = [], 0, False
    for message in _backwards(view, topic, limit):
        looked_at += 1
        if matches(message) and _within((message,), since, until):
            messages.append(message)
        if len(messages) >= MESSAGES:
            break
        if looked_at >= limit or query.clock.monotonic() > deadline:
            is_cut = not is_plain
            break
    limits = [f"the newest {number(looked_at)} messages"] if is_cut else []
    filled = 0 if is_plain else sum(map(bool, view.queues(topic).values()))
    limits += [f"{MESSAGES} of {number(filled)} queues, those with the newest messages"] if filled > MESSAGES else []
    return messages, f"The search looked at {' of '.join(limits)}: librmq show reads all." if limits else ""


def newest_letters(view: View[Any], group: str, limit: int) -> list[tuple[StoredMessage, GivenUpMessage]]:
    """Return the newest dead letters of a group, the last one first."""
    times, newest = view.resent_times, islice(_backwards(view, dead_letter_topic(group), limit), limit)
    return [
        (
            message,
            given_up(group, message)._replace(resent_at_ms=times.get(letter_identity(message)) if times else None),
        )
        for message in newest
    ]


def _backwards(view: View[Any], topic: str, limit: int) -> Iterator[StoredMessage]:
    """Yield the messages of a topic, the newest first; of each queue at most ``limit``, of many queues the freshest."""
    filled = [(queue, ids) for queue, ids in view.queues(topic).items() if ids]
    if len(filled) > MESSAGES:
        filled = heapq.nlargest(MESSAGES, filled, key=lambda entry: view.stored_at(entry[0], entry[1].stop - 1) or 0)
    queues = (queue_backwards(view, queue, ids, limit) for queue, ids in filled)
    return heapq.merge(*queues, key=lambda message: -message.store_timestamp_ms)


def queue_backwards(view: View[Any], queue: Any, ids: range, limit: int) -> Iterator[StoredMessage]:
    """Yield the messages of a queue, the newest first, about ``limit`` of them."""
    end = ids.stop
    while end > ids.start and ids.stop - end < limit:
        begin = max(ids.start, end - min(limit, 32))
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


def messages_table(messages: Iterable[StoredMessage], note: str, *, bodies: bool) -> Table:
    """Return a table of messages, which shows the beginnings of their bodies, or their sizes without ``bodies``."""
    rows = [
        [
            Cell(moment(message.store_timestamp_ms)),
            Cell(short(message.message_id, 40), message_link(message)),
            Cell(f"{message.queue_id} / {message.queue_offset}", is_number=True),
            Cell(message.tags or ""),
            Cell(short(" ".join(message.keys), 60)),
            Cell(_preview(message) if bodies else size(message.size)),
        ]
        for message in messages
    ]
    columns = ("stored", "id", "queue / offset", "tag", "keys", "body" if bodies else "size")
    return Table("Messages", columns, rows, note, "None was found." if note else "No message here.")


def _preview(message: StoredMessage) -> str:
    try:
        return short(_text(head_of_body(message, 256)), 60)
    except (RmqError, UnicodeDecodeError):
        return size(message.size)


def head_of_body(message: StoredMessage, limit: int) -> tuple[bytes, bool]:
    """Return at most ``limit`` bytes of a body as sent, and whether there are more.

    Raises:
        BodyCompressionError: It can't be decompressed.
        MissingExtraError: The extra ``compression`` is not installed.
    """
    head = decompress_body(message.stored_body, message.sys_flag, limit + 1, cuts=True)
    return head[:limit], len(head) > limit


def _text(head: tuple[bytes, bool]) -> str:
    """Return a body as text, without the character in which it is cut."""
    return getincrementaldecoder("utf-8")().decode(head[0], final=not head[1])


def retention_of(place: Place, view: View[Any]) -> Fact:
    """Return what the log keeps, which is one for all topics; unknown where only a broker's own settings say it."""
    if not isinstance(view, StoreView) and not place.has_log:
        return Fact("kept", UNKNOWN, "the settings of the broker say it")
    with nullcontext(view) if isinstance(view, StoreView) else place.log() as log:
        store = log.store
        if not log.is_live and not is_made_by_librmq(store.path, store.files):
            return Fact("kept", UNKNOWN, "the settings of the broker say it")
        config = store.config
    hours, log_size = config.file_reserved_hours, config.max_total_size
    limit = "no limit of size" if log_size is None else f"at most {size(log_size)} of log"
    unread = "what a group has not consumed stays" if config.keep_unconsumed else "unconsumed messages go as well"
    return Fact("kept", "at any age" if hours is None else f"{number(hours)} hours", f"{limit}; {unread}")


# ---- one message


def events_of(story: Iterable[StoryEvent]) -> list[list[Cell]]:
    """Return the rows of a story."""
    return [
        [
            Cell(moment(event.at_ms) if event.at_ms is not None else ""),
            Cell(event.event, "", _MOODS.get(event.event, "")),
            topic_link(event.topic),
            Cell(f"{event.queue_id} / {event.queue_offset}" if event.queue_offset >= 0 else "", is_number=True),
            Cell(event.group or ""),
            Cell(event.note),
        ]
        for event in story
    ]


def body_of(message: StoredMessage, kind: str) -> Mapping[str, str]:
    """Return the body as text, JSON or hexadecimal digits; it is never unpickled or run."""
    try:
        head = body, is_cut = head_of_body(message, BODY_SIZE)
    except RmqError as error:
        return {"kind": "unreadable", "text": str(error), "note": ""}
    cut = f"Only the first {size(BODY_SIZE)} are shown."
    if kind != "hex":
        with suppress(ValueError, RecursionError):
            if kind != "text" and not is_cut:
                text = json.dumps(json.loads(body), indent=2, ensure_ascii=False)
                return {"kind": "JSON", "text": text[:BODY_SIZE], "note": cut if len(text) > BODY_SIZE else ""}
        with suppress(UnicodeDecodeError):
            return {"kind": "text", "text": _text(head), "note": cut if is_cut else ""}
    note = f"Only the first {size(_HEX)} are shown." if len(body) > _HEX else ""
    return {"kind": "hex", "text": body[:_HEX].hex(" ", -4), "note": note}


def fields_of(message: StoredMessage) -> list[list[Cell]]:
    values = {
        "queue / offset": f"{message.queue_id} / {message.queue_offset}",
        "physical offset": number(message.physical_offset),
        "offset id": message.offset_id,
        "unique id": message.unique_key or "none",
        "born": f"{moment(message.born_timestamp_ms)} at {message.born_host[0]}",
        "flag": str(message.flag),
    }
    return [[Cell(name), Cell(value)] for name, value in values.items()]


def as_test(message: StoredMessage) -> str:
    """Return the lines that make a test begin with a message like this one; none if its body can't be read."""
    try:
        body, is_cut = head_of_body(message, _IN_TEST)
    except RmqError:
        return ""
    properties = {
        name: value
        for name, value in message.properties.items()
        if name not in ("TAGS", "KEYS", "UNIQ_KEY", "WAIT", "CLUSTER") and name.islower()
    }
    arguments = [repr(message.topic), repr(body)]
    arguments += [f"tags={message.tags!r}"] if message.tags else []
    arguments += [f"keys={' '.join(message.keys)!r}"] if message.keys else []
    arguments += [f"properties={properties!r}"] if properties else []
    note = f"    # The body goes on: this is its beginning, of {number(_IN_TEST)} bytes.\n" if is_cut else ""
    send = f"    rmq.producer().send({', '.join(arguments)})\n"
    return f"def test_this_message(rmq):\n{note}{send}    rmq.advance(seconds=1)"
