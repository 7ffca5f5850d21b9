"""Lists of messages that stand still: the dead letters of a group, and what waits for its time or a decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from librmq.console._backwards import newest_letters
from librmq.console._messages import name_of, preview, record_of
from librmq.console._place import Look
from librmq.console._requested import LETTERS, NOT_WAITING, kinds_not_asked, waiting_by_requests
from librmq.console._tables import KINDS, Cell, Fact, Page, Query, Table, count, link, message_link, topic_link
from librmq.diagnosis import GivenUpMessage, PendingMessage, StoreView, View, pending_messages
from librmq.diagnosis.view import count_dead_letters
from librmq.errors import ConfigError
from librmq.formatting import UNKNOWN, moment, number, short, size
from librmq.message import StoredMessage

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
        read = newest_letters(view, group, LETTERS)
        dead = count_dead_letters(view, group)
    found = [(message, letter) for message, letter in read if letter.is_caused_by(cause) and has_key(message, key)]
    rows, every, is_noted = [], dead.every, dead.resent is not None
    for message, letter in found:
        resent = [Cell("" if letter.resent_at_ms is None else moment(letter.resent_at_ms))] if is_noted else []
        rows.append(
            [
                *([Cell(message.message_id, "", "box")] if chooses else []),
                Cell(name_of(message), message_link(message)),
                Cell(short(letter.cause, 120)),
                topic_link(letter.original_topic),
                Cell(moment(letter.store_timestamp_ms)),
                count(letter.reconsume_times),
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
    records = [_letter_record(message, letter, bodies=look.bodies, is_noted=is_noted) for message, letter in found]
    nothing = "No letter has this cause or key." if read else "None."
    return Page(
        f"Dead letters of {group}",
        tables=[Table("Dead letters", columns, rows, note, nothing, records=records)],
        template="letters.html.j2",
        more={"group": group, "has_letters": bool(found), "query": {"cause": cause, "key": key}},
    )


def _letter_record(message: StoredMessage, letter: GivenUpMessage, *, bodies: bool, is_noted: bool) -> dict[str, Any]:
    row = letter._asdict() | record_of(message, bodies=bodies)
    return row if is_noted else {name: value for name, value in row.items() if name != "resent_at_ms"}


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
        found = list(islice(waiting, _WAITING + 1))
    is_cut, found = len(found) > _WAITING, found[:_WAITING]
    counts = Counter(pending.kind for pending, _ in found)
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
        for pending, message in found
    ]
    note, nothing = ("", "Nothing waits.") if has_log else (NOT_WAITING, "Nothing of what was asked for.")
    if is_cut:
        note = f"The first {number(_WAITING)}: librmq pending lists all. {note}"
    unasked = [] if has_log else [name for name in kinds_not_asked(view) if kind in ("", name)]
    columns = ("message", "due", "topic", "kind", "checks", "body" if look.bodies else "size", "")
    records = [
        pending._asdict() | ({} if message is None else {"stored": record_of(message, bodies=look.bodies)})
        for pending, message in found
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
        asked = waiting_by_requests(view, query.clock.now_ms(), _WAITING + 1)
        yield from ((pending, message) for pending, message in asked if kind in ("", pending.kind))
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
