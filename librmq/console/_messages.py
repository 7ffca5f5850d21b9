"""Messages on a page: lists of all, dead letters and waiting ones; one with its story, and a test that sends it."""

from __future__ import annotations

import json
from base64 import b64encode
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple

from librmq.console._place import (
    NOT_IN_STORY,
    NOT_WAITING,
    Look,
    kinds_not_asked,
    newest_letters,
    story_by_requests,
    waiting_by_requests,
)
from librmq.console._tables import KINDS, Cell, Fact, Page, Query, Table, count, link, message_link, topic_link
from librmq.diagnosis import GivenUpMessage, PendingMessage, StoreView, StoryEvent, View, pending_messages, story
from librmq.diagnosis.view import count_dead_letters
from librmq.errors import ConfigError, RmqError
from librmq.formatting import UNKNOWN, moment, number, short, size
from librmq.message import DEFAULT_LEVELS, DelayLevels, StoredMessage
from librmq.message import record as record_format
from librmq.message.properties import PropertyName
from librmq.message.topics import WAITING_TOPICS, SystemTopic
from librmq.scheduling.waiting import destination_of, own_time_ms
from librmq.store.engine.derivation import derived_tags_code

BODY_SIZE: Final = 64 << 10
"""The most bytes of a body that are shown, of which hexadecimal digits and the lines of a test show fewer."""
_HEX: Final = 4096
_IN_TEST: Final = 2048
_LOG_SIZE: Final = 256 << 20
"""Bytes of a log in which the records of a message without a unique id are searched for at once."""
_NO_UNIQUE_ID: Final = "The message has no unique id, by which its records are found quickly."
_MOODS: Final = {"dead": "bad", "given_up": "bad", "retried": "warn", "not_passed": "warn", "passed": "good"}
_HALVES: Final = (SystemTopic.HALF, SystemTopic.CHECK_MAX_TIME)


# ---- a list


def messages_table(messages: Sequence[StoredMessage], note: str, *, bodies: bool) -> Table:
    """Return a table of messages, which shows the beginnings of their bodies, or their sizes without ``bodies``."""
    rows = [
        [
            Cell(name_of(message), message_link(message)),
            Cell(moment(message.store_timestamp_ms)),
            topic_link(message.topic),
            Cell(f"{message.queue_id} / {message.queue_offset}", is_number=True),
            Cell(message.tags or ""),
            Cell(preview(message) if bodies else size(message.size)),
        ]
        for message in messages
    ]
    columns = ("message", "stored", "topic", "queue / offset", "tag", "body" if bodies else "size")
    records = [record_of(message, bodies=bodies) for message in messages]
    return Table("Messages", columns, rows, note, "None was found." if note else "No message here.", records=records)


def letter_cells(message: StoredMessage, letter: GivenUpMessage) -> list[Cell]:
    """Return a dead letter, its cause, the topic of its send, when its group gave it up, and its attempts."""
    return [
        Cell(name_of(message), message_link(message)),
        Cell(short(letter.cause, 120)),
        topic_link(letter.original_topic),
        Cell(moment(letter.store_timestamp_ms)),
        count(letter.reconsume_times),
    ]


def name_of(message: StoredMessage) -> str:
    """Return what people call a message: its keys, else its id."""
    return short(" ".join(message.keys), 60) or short(message.message_id, 40)


def record_of(message: StoredMessage, *, bodies: bool) -> dict[str, Any]:
    """Return a message as a row of an export; a body that is no text is in base64."""
    row = {
        "message_id": message.message_id,
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "store_timestamp_ms": message.store_timestamp_ms,
        "keys": " ".join(message.keys),
        "tags": message.tags,
        "properties": dict(message.properties),
    }
    if bodies:
        try:
            head = body, is_cut = head_of_body(message, BODY_SIZE)
            row["body"] = _text(head)
        except UnicodeDecodeError:
            row["body_b64"] = b64encode(body).decode()
        except RmqError as error:
            return {**row, "body_error": str(error)}
        row["is_cut"] = is_cut
    return row


def preview(message: StoredMessage) -> str:
    """Return the beginning of a body as text; its size if it is none."""
    try:
        return short(" ".join(_text(head_of_body(message, 256)).split()), 60)
    except (RmqError, UnicodeDecodeError):
        return size(message.size)


def head_of_body(message: StoredMessage, limit: int) -> tuple[bytes, bool]:
    """Return at most ``limit`` bytes of a body as sent, and whether there are more.

    Raises:
        BodyCompressionError: It can't be decompressed.
        MissingExtraError: The extra ``compression`` is not installed.
    """
    head = record_format.decompress_body(message.stored_body, message.sys_flag, limit + 1, cuts=True)
    return head[:limit], len(head) > limit


def _text(head: tuple[bytes, bool]) -> str:
    """Return a body as text, without the character in which it is cut."""
    return getincrementaldecoder("utf-8")().decode(head[0], final=not head[1])


# ---- one message


class Waits(NamedTuple):
    """What a stored message waits for, or waited for."""

    topic: str
    """The topic of its delivery."""
    due_ms: int | None
    """The time of its delivery; None for a half, for which its producer decides."""

    @classmethod
    def of(cls, message: StoredMessage, levels: DelayLevels = DEFAULT_LEVELS) -> Waits | None:
        """Return it of a record in a topic of delays, timers or halves; None of any other."""
        if message.topic in _HALVES:
            return cls(destination_of(message).topic, None)
        if message.topic not in WAITING_TOPICS:
            return None
        own_ms = own_time_ms(message)
        return cls(destination_of(message).topic, derived_tags_code(message, levels) if own_ms is None else own_ms)


def message_page(look: Look, query: Query) -> Page:
    """Show a message and its story."""
    name, unread, place = query.text("id"), "", look.place
    events: Sequence[StoryEvent] = ()
    levels = DEFAULT_LEVELS
    if place.has_log:
        with place.log(query.at_ms, asks_owner=True) as view:
            message, levels = _record(view, query), view.levels
            log = view.store.log
            log_size, note = log.end - log.begin, ""
            if message.unique_key is None and log_size > _LOG_SIZE and not query.text("story"):
                unread = size(log_size)  # records that belong together are found only by their content
            else:
                events = story(view, name or message.message_id)
    else:
        stored = place.acting().find_by_id(query.required("id"))
        if stored is None:
            raise ConfigError(f"there is no message {name!r}")
        message, note = stored, NOT_IN_STORY
        events = story_by_requests(place.acting(), message)
    waits = Waits.of(message, levels)
    columns = ("time", "event", "topic", "queue / offset", "group", "note")
    return Page(
        name_of(message),
        [
            Fact("topic", message.topic if waits is None else waits.topic or UNKNOWN),
            Fact("stored", moment(message.store_timestamp_ms)),
            *_waiting_facts(message, waits, events, query.clock.now_ms()),
            Fact("attempts", number(message.reconsume_times)),
            Fact("size", size(message.size)),
        ],
        [
            Table("Story", columns, _events(events), note, _NO_UNIQUE_ID),
            Table("Fields", ("field", "value"), _fields(message)),
            Table(
                "Properties",
                ("name", "value"),
                [[Cell(name), Cell(short(value, 4096))] for name, value in sorted(message.properties.items())],
            ),
        ],
        template="message.html.j2",
        is_live=False,
        more={
            "body": _body(message, query.text("as")) if look.bodies else {"kind": "hidden", "text": "", "note": ""},
            "unread": unread,
            "test": _as_test(message, waits) if look.bodies else "",
            "id": message.message_id,
        },
    )


def _record(view: StoreView, query: Query) -> StoredMessage:
    name = query.text("id")
    if name:
        message = next(iter(view.store.find_by_id(name)), None)
    else:
        topic, queue_id = query.required("topic"), query.number("queue", largest=1 << 31)
        message = view.message(topic, queue_id, query.number("offset"))
    if message is None:
        raise ConfigError(f"there is no message {name!r}" if name else "there is no message at this place")
    return message


def _waiting_facts(
    message: StoredMessage, waits: Waits | None, events: Sequence[StoryEvent], now_ms: int
) -> list[Fact]:
    """Return what a message waits for, as far as it still does."""
    if waits is None:
        return []
    happened = {event.event for event in events}
    if waits.due_ms is None:
        end = next((end for end in ("committed", "rolled_back", "given_up") if end in happened), "")
        group = message.properties.get(PropertyName.PRODUCER_GROUP, "")
        if end:
            return [Fact("transaction", end.replace("_", " "))]
        return [Fact("waits for", "a decision", f"of producer group {group}, to commit or to roll back", "warn")]
    if "cancelled" in happened:
        return [Fact("due", moment(waits.due_ms), "cancelled")]
    is_due = waits.due_ms <= now_ms
    return [Fact("was due" if is_due else "due", moment(waits.due_ms), "" if is_due else f"waits in {message.topic}")]


def _events(story: Iterable[StoryEvent]) -> list[list[Cell]]:
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


def _body(message: StoredMessage, kind: str) -> Mapping[str, str]:
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


def _fields(message: StoredMessage) -> list[list[Cell]]:
    values = {
        "queue / offset": f"{message.queue_id} / {message.queue_offset}",
        "physical offset": number(message.physical_offset),
        "offset id": message.offset_id,
        "unique id": message.unique_key or "none",
        "born": f"{moment(message.born_timestamp_ms)} at {message.born_host[0]}",
        "flag": str(message.flag),
    }
    return [[Cell(name), Cell(value)] for name, value in values.items()]


def _as_test(message: StoredMessage, waits: Waits | None) -> str:
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
    arguments = [repr(message.topic if waits is None else waits.topic), repr(body)]
    arguments += [f"tags={message.tags!r}"] if message.tags else []
    arguments += [f"keys={' '.join(message.keys)!r}"] if message.keys else []
    arguments += [f"properties={properties!r}"] if properties else []
    note = f"    # The body goes on: this is its beginning, of {number(_IN_TEST)} bytes.\n" if is_cut else ""
    if waits is not None and waits.due_ms is None:
        return (
            "from librmq import Message, TransactionProducer, TransactionState\n\n\n"
            f"def test_this_message(rmq):\n{note}"
            "    commit = lambda message, *_: TransactionState.COMMIT\n"
            "    producer = TransactionProducer(rmq.broker, 'test', commit, execute=commit)\n"
            f"    producer.send_in_transaction(Message({', '.join(arguments)}))\n    rmq.advance(seconds=1)"
        )
    seconds = 1
    if waits is not None and waits.due_ms is not None:
        wait_s = max(-((message.store_timestamp_ms - waits.due_ms) // 1000), 1)
        arguments, seconds = [*arguments, f"delay={wait_s}"], wait_s + 2
    send = f"    rmq.producer().send({', '.join(arguments)})\n"
    return f"def test_this_message(rmq):\n{note}{send}    rmq.advance(seconds={seconds})"


_WAITING: Final = 1_000


def has_key(message: StoredMessage | None, text: str) -> bool:
    """Return whether a key, or the id, of a message contains a text."""
    return message is not None and any(text in name for name in (*message.keys, message.message_id))


# ---- dead letters


def letters_page(look: Look, query: Query) -> Page:
    """Show a group's dead letters, the newest first, with what a resend needs."""
    group, chooses = query.required("group"), look.allow_changes and query.at_ms is None
    cause, key = query.text("cause"), query.text("key")
    with look.place.view(query.at_ms) as view:
        read = newest_letters(view, group)
        dead = count_dead_letters(view, group)
    letters = [(message, letter) for message, letter in read if letter.is_caused_by(cause) and has_key(message, key)]
    rows, every, is_noted = [], dead.every, dead.resent is not None
    for message, letter in letters:
        resent = [Cell("" if letter.resent_at_ms is None else moment(letter.resent_at_ms))] if is_noted else []
        rows.append(
            [
                *([Cell(message.message_id, "", "box")] if chooses else []),
                *letter_cells(message, letter),
                *resent,
                Cell(preview(message) if look.bodies else size(message.size)),
            ]
        )
    columns = ["message", "cause", "topic", "given up", "attempts", *(["sent again"] if is_noted else [])]
    columns = [*(["send again"] if chooses else []), *columns, "body" if look.bodies else "size"]
    note = (
        f"Of the newest {number(len(read))} of {number(every)}: librmq dead-letters lists all. "
        if len(read) < every
        else ""
    )
    note += "" if is_noted else "Brokers do not note which were sent again."
    records = [letter._asdict() | record_of(message, bodies=look.bodies) for message, letter in letters]
    for record in () if is_noted else records:
        del record["resent_at_ms"]
    nothing = "No letter has this cause or key." if read else "None."
    return Page(
        f"Dead letters of {group}",
        tables=[Table("Dead letters", columns, rows, note, nothing, records=records)],
        template="letters.html.j2",
        more={"group": group, "has_letters": bool(letters), "query": {"cause": cause, "key": key}},
    )


# ---- what waits


def waiting_page(look: Look, query: Query) -> Page:
    """Show what waits for its time or a decision: halves, delays, timers, retries, what POP holds."""
    place, kind, key, topic = look.place, query.text("kind"), query.text("key"), query.text("topic")
    if kind and kind not in KINDS:
        raise ConfigError(f"kind: expected {', '.join(KINDS)}, found {kind!r:.80}")
    has_log = place.has_log
    with place.log(query.at_ms, asks_owner=True) if has_log else place.view() as view:
        waiting = (
            (pending, message)
            for pending, message in _waiting(view, query, kind)
            if topic in ("", pending.topic) and (not key or has_key(message, key))
        )
        first_waiting = list(islice(waiting, _WAITING + 1))
    is_cut, first_waiting = len(first_waiting) > _WAITING, first_waiting[:_WAITING]
    counts = Counter(pending.kind for pending, _ in first_waiting)
    may_change = look.allow_changes and query.at_ms is None and not place.unanswered
    rows = [
        [
            Cell(*_named(pending, message)),
            Cell("" if pending.due_ms is None else moment(pending.due_ms)),
            topic_link(pending.topic),
            Cell(pending.kind),
            count(pending.checks),
            Cell("" if message is None else preview(message) if look.bodies else size(message.size)),
            _change(pending, can_decide=place.can_own) if may_change else Cell(""),
        ]
        for pending, message in first_waiting
    ]
    note, nothing = ("", "Nothing waits.") if has_log else (NOT_WAITING, "Nothing of what was asked for.")
    if is_cut:
        note = f"The first {number(_WAITING)}: librmq pending lists all. {note}"
    unasked = [] if has_log else [name for name in kinds_not_asked(view) if kind in ("", name)]
    columns = ("message", "due", "topic", "kind", "checks", "body" if look.bodies else "size", "")
    records = [
        pending._asdict() | ({} if message is None else {"stored": record_of(message, bodies=look.bodies)})
        for pending, message in first_waiting
    ]
    return Page(
        "Waiting",
        [
            *(Fact(name, number(amount), "at least" if is_cut else "") for name, amount in sorted(counts.items())),
            *(Fact(name, UNKNOWN, "not asked for") for name in unasked),
        ],
        [Table("Waiting messages", columns, rows, note, nothing, records=records)],
        template="waiting.html.j2",
        more={"query": {"kind": kind, "topic": topic, "key": key}, "kinds": tuple(KINDS)},
    )


def _waiting(view: View[Any], query: Query, kind: str) -> Iterator[tuple[PendingMessage, StoredMessage | None]]:
    """Yield what waits, each with its record as far as there is one."""
    if not isinstance(view, StoreView):
        waiting = waiting_by_requests(view, query.clock.now_ms(), _WAITING + 1)
        yield from ((pending, message) for pending, message in waiting if kind in ("", pending.kind))
        return
    for pending in pending_messages(view.store, view.tables, kind=kind or None):  # type: ignore[arg-type]
        has_record = pending.physical_offset >= 0
        yield pending, view.store.message_at(pending.physical_offset) if has_record else None


def _named(pending: PendingMessage, message: StoredMessage | None) -> tuple[str, str]:
    """Return what people call a message, and its address."""
    unique_key = pending.unique_key or ""
    if message is None or pending.kind == "schedule":
        return short(unique_key, 40), ""
    return name_of(message), link("message", id=unique_key) if unique_key else message_link(message)


def _change(pending: PendingMessage, *, can_decide: bool) -> Cell:
    if pending.kind in ("delay", "timer") and pending.unique_key:
        return Cell("cancel", link("change", what="cancel", id=pending.unique_key))
    if pending.kind == "given_up" and can_decide:
        return Cell("decide", link("change", what="half", offset=pending.physical_offset))
    return Cell("")
