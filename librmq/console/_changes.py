"""Changes that the console makes on request: each shows before and after first, and the command that does the same.

A change is prepared from the request's parameters twice, for the page that shows it and for the request that makes it.
So nothing but the parameters travels between the two.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Final, Literal

from librmq.broker.retries import resend_letters
from librmq.config import check_reached
from librmq.console._messages import Waits, has_key, letter_cells, name_of
from librmq.console._place import Place
from librmq.console._tables import Cell, Query, Table, count, link, message_link, topic_link
from librmq.diagnosis import GivenUpMessage, StoreView, decide_half, plan_skip, skip
from librmq.diagnosis.deadletters import letters_by_queue
from librmq.errors import ConfigError, RmqError
from librmq.formatting import moment, number
from librmq.message import StoredMessage
from librmq.protocol import MoveGroup
from librmq.runtime.event_log import EventLog, counted
from librmq.scheduling.waiting import destination_of
from librmq.store.format.documents import RecordIdentity

_log = EventLog("librmq.console")
_LETTERS: Final = 1_000
"""Letters that one request sends again; the next request goes on behind them."""


@dataclass
class Change:
    title: str
    command: str
    """The command that does the same."""
    tables: Sequence[Table]
    apply: Callable[[], list[Table]]
    """Makes the change, and returns what it did."""
    is_needed: bool = True
    back: str = "./"
    """The page to go on with."""


class Changes:
    """The changes of one place. Thread-safe."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._kinds: dict[str, Callable[[Query], Change]] = {
            "reset": self._reset,
            "skip": self._skip,
            "retries": self._retries,
            "resend": self._resend,
            "cancel": self._cancel,
            "half": self._half,
        }

    def prepare(self, query: Query) -> Change:
        """Return the change that a request names."""
        what = query.required("what")
        if what not in self._kinds:
            raise ConfigError(f"what: expected one of {', '.join(self._kinds)}, found {what!r:.80}")
        return self._kinds[what](query)

    def apply(self, query: Query, caller: str, address: str) -> tuple[Change, list[Table]]:
        """Make a change, and log who made it."""
        change = self.prepare(query)
        fields = {"caller": caller, "address": address, "command": change.command}
        _log.warning("%(caller)s at %(address)s: %(command)s", **fields)
        try:
            done = change.apply()
        except RmqError as error:
            _log.warning("%(caller)s at %(address)s: %(command)s failed: %(error)s", **fields, error=error)
            raise
        return change, done

    def _command(self, *words: object) -> str:
        place = self._place.title if self._place.folder is not None or self._place.broker is not None else "STORE"
        first, *arguments = map(str, words)
        return shlex.join(["librmq", *first.split(), place, *arguments])

    # ---- progress

    def _reset(self, query: Query) -> Change:
        group, topic, to = query.required("group"), query.required("topic"), query.required("to")
        target: Literal["begin", "end"] | datetime | int
        if to in ("begin", "end"):
            target = "begin" if to == "begin" else "end"
        elif to.isascii() and to.isdigit():
            target = query.number("to")
        else:
            target = datetime.fromtimestamp((query.time_ms("to") or 0) / 1000, UTC)
        route = self._place.acting()
        if isinstance(target, int):
            check_reached("to", target, topic, [bounds.max_offset for bounds in route.queues(topic).values()])
        before = route.progress(group, topic)
        rows = []
        for name in route.broker_names():
            planned = route.endpoint(name).call(MoveGroup(group, topic, target, dry_run=True))
            for queue, offset in sorted(planned.items()):
                progress = before.get(queue)
                old = None if progress is None else progress.queue_offset
                passed = 0 if old is None else offset - old
                rows.append(
                    [
                        Cell(f"{queue.broker_name} {queue.queue_id}"),
                        count(old),
                        count(offset),
                        Cell(f"{passed:+,}" if passed else "", is_number=True),
                    ]
                )
        word = ["--offset", to] if isinstance(target, int) else ["--to", str(target)]  # of a time with its zone

        def apply() -> list[Table]:
            moved = route.reset_group(group, topic, target)
            cells = [[Cell(f"{queue.broker_name} {queue.queue_id}"), count(offset)] for queue, offset in moved.items()]
            return [Table("Progress now", ("queue", "progress"), cells)]

        return Change(
            f"Reset group {group} in topic {topic} to {to}",
            self._command("reset", "--group", group, "--topic", topic, *word),
            [Table("Progress", ("queue", "before", "after", "skipped (+) or again (−)"), rows)],
            apply,
            back=link("group", name=group),
        )

    def _skip(self, query: Query) -> Change:
        group, topic = query.required("group"), query.required("topic")
        minutes = query.number("minutes", largest=1 << 31)
        now_ms = self._place.clock.now_ms()
        with self._place.owner() as owner:
            source = self._place.broker or StoreView.over(owner.store, owner.tables)
            plan = plan_skip(source, group, topic, older_than=60 * minutes, now_ms=now_ms)
        rows = [
            [
                Cell(str(queue.queue_id), is_number=True),
                count(queue.begin),
                count(queue.end),
                count(queue.end - queue.begin),
                Cell(moment(queue.last_timestamp_ms)),
            ]
            for queue in plan.queues
        ]

        def apply() -> list[Table]:
            with self._place.owner() as owner:
                done = skip(owner, plan)
            messages = sum(queue.end - queue.begin for queue in done.queues)
            return [Table("Skipped", ("queues", "messages"), [[count(len(done.queues)), count(messages)]])]

        return Change(
            f"Skip what is older than {minutes} minutes for group {group} in topic {topic}",
            self._command("skip", "--group", group, "--topic", topic, "--older-than", f"{minutes}m"),
            [Table("Skipped messages", ("queue", "before", "after", "messages", "the last is of"), rows)],
            apply,
            is_needed=bool(plan.queues),
            back=link("group", name=group),
        )

    def _retries(self, query: Query) -> Change:
        group, retries = query.required("group"), query.number("retries", largest=1 << 31)
        route = self._place.acting()
        before = route.groups().get(group)

        def apply() -> list[Table]:
            route.set_group(group, retry_max_times=retries)
            return [Table("Retries now", ("group", "retries"), [[Cell(group), count(route.groups().get(group))]])]

        return Change(
            f"Let group {group} retry {retries} times",
            self._command("group create", group, "--retries", retries),
            [Table("Retries before a dead letter", ("before", "after"), [[count(before), count(retries)]])],
            apply,
            back=link("group", name=group),
        )

    # ---- messages

    def _resend(self, query: Query) -> Change:
        group, ids, cause, key = query.required("group"), query.words("id"), query.text("cause"), query.text("key")
        letters = list(islice(self._letters(group, ids, cause, key), _LETTERS + 1))
        to_send = letters[:_LETTERS]
        rows = [letter_cells(message, letter) for message, letter in to_send[:100]]
        more = "" if len(letters) <= _LETTERS else f"The first {number(_LETTERS)}; ask again for the others."
        only = [["--id", message_id] for message_id in ids]
        if key and not ids:  # the command knows no part of a key
            only = [["--id", message.message_id] for message, _ in to_send]
        only = only or [["--cause", cause] if cause else []]
        return Change(
            f"Send {counted(len(to_send), 'dead letter')} to group {group} again",
            " && ".join(self._command("dead-letters", "--group", group, "--resend", *words) for words in only),
            [
                Table(
                    "Dead letters that were not sent again",
                    ("message", "cause", "topic", "given up", "attempts"),
                    rows,
                    more,
                )
            ],
            partial(self._send_letters, group, [message for message, _ in to_send]),
            is_needed=bool(to_send),
            back=link("letters", group=group, cause=cause, key=key),
        )

    def _letters(
        self, group: str, ids: Sequence[str], cause: str, key: str
    ) -> Iterator[tuple[StoredMessage, GivenUpMessage]]:
        """Yield the letters of a group with these ids; without any, those that match and were not sent again."""
        with self._place.view() as view:
            for _, message, letter in letters_by_queue(view, group):
                is_named = message.message_id in ids or message.unique_key in ids
                is_unsent = letter.resent_at_ms is None
                if is_named or (not ids and is_unsent and letter.is_caused_by(cause) and has_key(message, key)):
                    yield message, letter

    def _send_letters(self, group: str, letters: Sequence[StoredMessage]) -> list[Table]:
        """Send letters, each of which has its outcome; one that a killed request has sent is not sent again."""
        route, is_noted = self._place.acting(), self._place.has_log  # a broker of RocketMQ notes nowhere what was sent
        sent, refused = resend_letters(route, group, route.messages, letters, only_unsent=is_noted)
        outcomes = dict.fromkeys(sent, Cell("sent", "", "good"))
        outcomes |= {letter: Cell(str(error), "", "bad") for letter, error in refused}
        before = Cell("was sent before")
        rows = [
            [Cell(name_of(letter), message_link(letter)), outcomes.get(RecordIdentity.of(letter), before)]
            for letter in letters
        ]
        return [Table("Sent again", ("message", "outcome"), rows)]

    def _cancel(self, query: Query) -> Change:
        message_id = query.required("id")
        route = self._place.acting()
        message = route.find_by_id(message_id)
        if message is None:
            raise ConfigError(f"there is no message {message_id!r}")
        waits, named = Waits.of(message), Cell(name_of(message), link("message", id=message_id))
        topic = message.topic if waits is None else waits.topic
        due = Cell("" if waits is None or waits.due_ms is None else moment(waits.due_ms))

        def apply() -> list[Table]:
            result = route.cancel(message_id)
            outcome = (
                Cell("cancelled", "", "good") if result.cancelled else Cell(result.why or "not cancelled", "", "bad")
            )
            return [Table("Cancelled", ("message", "outcome"), [[named, outcome]])]

        return Change(
            f"Cancel message {name_of(message)}",
            self._command("cancel", message_id),
            [
                Table(
                    "Message",
                    ("message", "topic", "due", "after"),
                    [[named, topic_link(topic), due, Cell("never delivered")]],
                )
            ],
            apply,
            back="waiting",
        )

    def _half(self, query: Query) -> Change:
        offset, decision = query.number("offset"), query.text("decision")
        with self._place.owner() as owner:
            half = owner.store.message_at(offset)
            if half is None:
                raise ConfigError(f"offset: there is no message at {offset}")
            decide_half(owner, offset, commit=True, dry_run=True)
        is_commit, topic = decision == "commit", destination_of(half).topic

        def apply() -> list[Table]:
            if decision not in ("commit", "rollback"):
                raise ConfigError(f"decision: expected commit or rollback, found {decision!r}")
            with self._place.owner() as owner:
                decide_half(owner, offset, commit=is_commit)
            return [Table("Decided", ("message", "decision"), [[Cell(name_of(half)), Cell(decision)]])]

        return Change(
            f"Decide the half message {name_of(half)}",
            self._command("decide", offset, "--commit" if is_commit else "--rollback"),
            [
                Table(
                    "Half message",
                    ("message", "topic", "born"),
                    [[Cell(name_of(half)), topic_link(topic), Cell(moment(half.born_timestamp_ms))]],
                )
            ],
            apply,
            back="waiting",
        )
