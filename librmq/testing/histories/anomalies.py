"""Anomalies of a history: what contradicts the promises of RocketMQ, with the events that show it.

A message that one kind names is left out of the kinds after it, so that a fault has one name. Each rule is said as
plainly as it can be, over rows that are in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from librmq.testing.histories._history import HistoryRows, Marks, by_key, falls
from librmq.testing.histories.events import (
    ENDLESS,
    Commit,
    Delivery,
    HistoryEvents,
    Mark,
    MessageId,
    Queue,
    Send,
)

KINDS: Final = {
    "phantom": "a message that was never sent was delivered, or is a dead letter",
    "aborted": (
        "a message was delivered although all its sends failed, its transaction was rolled back, or its commit had not "
        "begun"
    ),
    "offset-conflict": "one place in a queue has two messages",
    "early": "a message was delivered before its delivery time",
    "send-order": (
        "a process sent to a queue after another send had ended, but its offset is not above; a crash of the broker "
        "excuses it"
    ),
    "overlap": (
        "two deliveries of one queue ran at the same time in an ordered group; of a broadcasting one, in one process"
    ),
    "delivery-order": (
        "an ordered group, or a process of a broadcasting one, went back in a queue without an assignment, reset or "
        "crash in between"
    ),
    "attempts": "attempts of a message in a group skip a number, or reach `max_attempts`",
    "repeat": (
        "a message came again after a delivery that ends `ok`, and no retry, further send, assignment, revocation, "
        "crash or reset explains it; once that end is kept, no later assignment, revocation or kill does"
    ),
    "progress-ahead": "progress passed a message that had neither ended a delivery nor was a dead letter",
    "progress-back": "progress fell without a crash or reset",
    "effect-twice": "an effect happened again",
    "undecided": "a group drained, and a half message for it has neither a decision nor a discard",
    "lost": (
        "a group drained, and an acknowledged message for it has neither a delivery with `ok` nor is a dead letter; a "
        "reset after the send excuses it"
    ),
}
"""The kinds of anomalies, in the order in which they are looked for, and what each is."""
_RANKS: Final = {kind: rank for rank, kind in enumerate(KINDS)}
_LARGEST_SHRUNK: Final = 60
"""Deliveries of a message up to which the evidence of a repeat is made as small as possible."""


class Anomaly(NamedTuple):
    """Something that should not be in a history. Fields that do not apply are None."""

    anomaly: str
    """Its kind, one of `KINDS`."""
    at_ms: int
    """When it happened, on the clock of the history."""
    id: str | int | None
    """The message."""
    group: str | None
    topic: str | None
    """The topic of the place; for a retry, the retry topic."""
    broker: str | None
    """The broker of the place."""
    queue_id: int | None
    """The queue of the place."""
    queue_offset: int | None
    """The offset in the queue; of a commit, the progress."""
    events: tuple[int, ...]
    """Numbers of the lines, from 1, of the smallest set of events that shows it."""
    what: str
    """One sentence about it."""

    def row(self) -> dict[str, Any]:
        """Return the fields that apply, as ``librmq check-history`` prints them."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def check_history(events: Iterable[Mapping[str, Any]]) -> list[Anomaly]:
    """Return the anomalies of a history, by their times.

    Args:
        events: The events, in any order; `docs/histories.md` describes their fields. The first one is line 1.

    Raises:
        InputError: One of them is not an event of a history; the error names its line.
    """
    history = HistoryEvents()
    history.add(events)
    return find_anomalies(history)


def find_anomalies(history: HistoryEvents) -> list[Anomaly]:
    """Return the anomalies of a history that has been read, by their times."""
    return sorted(_Check(history).anomalies(), key=_order)


def _order(anomaly: Anomaly) -> tuple[object, ...]:
    """Order anomalies by what they say, so that the order of lines decides only between those that say the same."""
    place = (anomaly.topic or "", anomaly.broker or "", anomaly.queue_id or 0, anomaly.queue_offset or 0)
    what = (str(anomaly.id), anomaly.group or "", place, anomaly.what)
    return anomaly.at_ms, _RANKS[anomaly.anomaly], what, anomaly.events


class _Check:
    def __init__(self, history: HistoryEvents) -> None:
        self._history = HistoryRows(history)
        self._groups = self._history.groups
        self._left_out: set[MessageId] = set()
        """Messages that a kind has named."""
        self._is_half: set[MessageId] = set()
        """Messages of which only halves may be stored."""
        self._scopes: dict[str, dict[MessageId, list[Delivery]]] = defaultdict(dict)
        """The deliveries of each message in each group."""
        self._letters: dict[tuple[str, MessageId], int] = {}
        """When a message was in the dead-letter topic of a group."""
        for at_ms, _, event in self._history.marks["dead_letter"]:
            key = (event["group"], event["id"])
            self._letters[key] = min(self._letters.get(key, at_ms), at_ms)
        self._ahead: dict[tuple[str, MessageId], tuple[int, Send, Commit]] = {}
        """What progress has passed, by group and message: when, its send and the commit."""

    def anomalies(self) -> Iterator[Anomaly]:
        for rule in (self._phantoms, self._aborted, self._offset_conflicts, self._early):
            named: list[Anomaly] = list(rule())
            yield from named
        self._sends = [send for send in self._history.sends if send.id not in self._left_out]
        self._deliveries = [row for row in self._history.deliveries if row.id not in self._left_out]
        for row in self._deliveries:
            self._scopes[row.group].setdefault(row.id, []).append(row)
        yield from self._send_order()
        yield from self._order_of_deliveries()
        yield from self._attempts_and_repeats()
        yield from self._progress_ahead()
        yield from self._progress_back()
        yield from self._effects_twice()
        yield from self._undecided_and_lost()

    # ---- descriptions

    def _anomaly(
        self,
        kind: str,
        at_ms: int,
        events: Iterable[int],
        what: str,
        *,
        message: MessageId | None = None,
        group: str | None = None,
        place: Send | Delivery | Commit | None = None,
    ) -> Anomaly:
        """Return an anomaly; ``place`` is the row with the queue, and the offset where one applies."""
        topic = broker = queue_id = queue_offset = None
        if place is not None and place.queue:
            (topic, broker, queue_id), queue_offset = place.queue, place.queue_offset
        elif isinstance(place, Send):
            topic = place.topic
        lines = tuple(sorted(self._history.with_crashes(kind, events)))
        return Anomaly(
            anomaly=kind,
            at_ms=at_ms,
            id=message,
            group=group,
            topic=topic,
            broker=broker,
            queue_id=queue_id,
            queue_offset=queue_offset,
            events=lines,
            what=what,
        )

    def _of_delivery(self, kind: str, row: Delivery, events: Iterable[int], what: str) -> Anomaly:
        lines = [*events, row.line]
        return self._anomaly(kind, row.begin_ms, lines, what, message=row.id, group=row.group, place=row)

    # ---- messages that should not be there

    def _phantoms(self) -> Iterator[Anomaly]:
        is_sent = self._history.sends_by_id
        first: dict[MessageId, Delivery] = {}
        for row in self._history.deliveries:
            if row.id not in is_sent:
                first.setdefault(row.id, row)
        letters: dict[MessageId, tuple[int, str, int]] = {}
        for at_ms, line, event in self._history.marks["dead_letter"]:
            if (message := event["id"]) not in is_sent:
                letter = (at_ms, event["group"], line)
                letters[message] = min(letters.get(message, letter), letter)
        for message in {**first, **letters}:
            self._left_out.add(message)
            if message in first and (message not in letters or first[message].begin_ms <= letters[message][0]):
                row = first[message]
                yield self._of_delivery("phantom", row, (), f"Group {row.group} got {message}, which was never sent.")
                continue
            at_ms, group, line = letters[message]
            what = f"{message} is a dead letter of group {group}, but was never sent."
            yield self._anomaly("phantom", at_ms, [line], what, message=message, group=group)

    def _aborted(self) -> Iterator[Anomaly]:
        plain = {send.id for send in self._history.sends if send.outcome != "failed" and not send.is_half}
        stored = {send.id for send in self._history.sends if send.outcome != "failed"}
        self._is_half = stored - plain
        first: dict[MessageId, Delivery] = {}
        for row in self._history.deliveries:
            if row.id not in plain and row.id not in self._left_out:
                first.setdefault(row.id, row)
        for message, row in first.items():
            ends = [end for end in self._history.ends_by_id.get(message, ()) if end.outcome != "failed"]
            commit_ms = min((end.begin_ms for end in ends if end.decision == "commit"), default=ENDLESS)
            rollbacks = [end.line for end in ends if end.decision == "rollback" and end.outcome == "ok"]
            got = f"Group {row.group} got {message}"
            events = self._history.support(message)[:1]
            if message not in stored:
                what = f"{got}, although every send of it failed."
            elif row.begin_ms >= commit_ms:
                continue
            elif commit_ms != ENDLESS:
                what = f"{got} {commit_ms - row.begin_ms} ms before its transaction began to commit."
            elif rollbacks:
                what = f"{got}, although its transaction was rolled back."
                events += rollbacks[:1]
            else:
                what = f"{got}, although nothing committed its transaction."
            self._left_out.add(message)
            yield self._of_delivery("aborted", row, events, what)

    def _offset_conflicts(self) -> Iterator[Anomaly]:
        holders = self._holders_of_conflicts()
        named: dict[MessageId, tuple[int, Send | Delivery, Send | Delivery]] = {}
        for rows in holders.values():
            messages: dict[MessageId, Send | Delivery] = {}
            for row in rows:
                messages.setdefault(row.id, row)
            (_, first), *later = messages.items()
            self._left_out |= messages.keys()
            for message, row in later:
                at_ms = row.end_ms if isinstance(row, Send) else row.begin_ms
                if message not in named or at_ms < named[message][0]:
                    named[message] = (at_ms, row, first)
        for message, (at_ms, row, first) in named.items():
            lines = [row.line, first.line]
            for holder in (row, first):
                lines += self._history.support(holder.id) if isinstance(holder, Delivery) else ()
            verb = "stored" if isinstance(row, Send) else "read"
            what = (
                f"{message} was {verb} at offset {row.queue_offset} of {_queue_text(row)}, where {first.id} was before."
            )
            group = row.group if isinstance(row, Delivery) else None
            yield self._anomaly("offset-conflict", at_ms, lines, what, message=message, group=group, place=row)

    def _holders_of_conflicts(self) -> dict[tuple[Queue | tuple[()], int], list[Send | Delivery]]:
        """Return the places that hold two messages, with their sends by the ends, and then their deliveries."""
        rows: list[Send | Delivery] = [send for send in self._history.sends if send.queue]
        rows += self._history.deliveries
        if self._left_out:
            rows = [row for row in rows if row.id not in self._left_out]
        messages: dict[Queue | tuple[()], dict[int, MessageId]] = defaultdict(dict)
        conflicts = set()
        for row in rows:
            if messages[row.queue].setdefault(row.queue_offset, row.id) != row.id:
                conflicts.add((row.queue, row.queue_offset))
        if not conflicts:
            return {}
        holders = by_key(
            (row for row in rows if (row.queue, row.queue_offset) in conflicts),
            lambda row: (row.queue, row.queue_offset),
        )
        for place_rows in holders.values():
            place_rows.sort(
                key=lambda row: (0, row.end_ms, row.begin_ms, str(row.id)) if isinstance(row, Send) else (1,)
            )
        return dict(sorted(holders.items()))

    def _early(self) -> Iterator[Anomaly]:
        delayed = {send.id for send in self._history.sends if send.not_before_ms is not None} - self._left_out
        if not delayed:
            return
        due_ms = {
            message: min((send.not_before_ms or 0 for send in self._history.stored(message)), default=0)
            for message in delayed
        }
        for row in self._history.deliveries:
            if row.id in due_ms and row.begin_ms < due_ms[row.id] and row.id not in self._left_out:
                self._left_out.add(row.id)
                wait_ms = due_ms[row.id] - row.begin_ms
                what = f"Group {row.group} got {row.id} {wait_ms} ms before its delivery time."
                yield self._of_delivery("early", row, self._history.support(row.id), what)

    # ---- order

    def _send_order(self) -> Iterator[Anomaly]:
        crashes = self._history.crashes("broker")
        queues = by_key((send for send in self._sends if send.queue), lambda send: (send.process, send.queue))
        for (process, queue), sends in queues.items():
            marks = crashes.get(queue[1], [])
            for send, first in falls(sends, [at_ms for at_ms, _ in marks], is_equal_a_fall=True):
                what = (
                    f"Process {process} sent {send.id} after {first.id} to {_queue_text(send)}, but it has offset "
                    f"{send.queue_offset}, not above {first.queue_offset}."
                )
                lines = (first.line, send.line)
                yield self._anomaly("send-order", send.end_ms, lines, what, message=send.id, place=send)

    def _order_of_deliveries(self) -> Iterator[Anomaly]:
        ordered = {name for name, rules in self._groups.items() if rules.ordered}
        queues = by_key(
            (row for row in self._deliveries if row.group in ordered),
            # Each instance of a broadcasting group reads each queue for itself.
            lambda row: (row.group, row.queue, row.process if self._groups[row.group].broadcast else ""),
        )
        for (group, queue, _), rows in queues.items():
            longest: Delivery = rows[0]
            for row in rows[1:]:
                if longest.end_ms > row.begin_ms:
                    what = (
                        f"In the ordered group {group} a delivery of {row.id} began while one of {longest.id} ran in "
                        "the same queue."
                    )
                    yield self._of_delivery("overlap", row, self._ordered_pair(longest, row), what)
                longest = max(row, longest, key=lambda entry: entry.end_ms)
            marks = (
                *self._history.crashes_ms,
                *self._history.assigns_ms.get((group, queue), ()),
                *self._history.resets_ms.get((group, queue[0]), ()),
            )
            for row, first in falls(rows, marks, lambda row: row.is_ok):
                what = (
                    f"In the ordered group {group} {row.id} at offset {row.queue_offset} was delivered after "
                    f"{first.id} at offset {first.queue_offset} of the same queue."
                )
                yield self._of_delivery("delivery-order", row, self._ordered_pair(first, row), what)

    def _ordered_pair(self, first: Delivery, second: Delivery) -> list[int]:
        """Return the lines that show two deliveries of an ordered group."""
        supports = (*self._history.support(first.id), *self._history.support(second.id))
        return [self._groups[first.group].line, first.line, *supports]

    # ---- repeats

    def _attempts_and_repeats(self) -> Iterator[Anomaly]:
        marks: Marks | None = None
        for group, messages in self._scopes.items():
            rules = self._groups.get(group)
            allowed = ENDLESS if rules is None or rules.max_attempts is None else rules.max_attempts
            is_broadcast = rules is not None and rules.broadcast
            for rows in messages.values():
                if (wrong := self._wrong_attempt(rows, allowed)) is not None:
                    yield wrong
                    continue
                if len(rows) == 1:
                    continue
                for part in by_key(rows, lambda row: row.process).values() if is_broadcast else (rows,):
                    if not any(row.is_ok for row in part[:-1]):
                        continue
                    marks = marks or Marks(self._history)
                    for row in self._unexplained(part, rows[0].begin_ms, marks):
                        yield self._repeat(part, row, rows[0].begin_ms, marks)

    def _wrong_attempt(self, rows: Sequence[Delivery], allowed: int) -> Anomaly | None:
        """Return the anomaly of the first delivery whose attempt skips one, or is one too many."""
        last = -1
        for row in rows:
            if row.attempt <= last + 1 and row.attempt < allowed:
                last = max(last, row.attempt)
                continue
            got = f"Group {row.group} got {row.id} with attempt {row.attempt}"
            events = self._history.support(row.id)
            if row.attempt > last + 1:
                what = f"{got} after attempt {last}." if last >= 0 else f"{got} first."
            else:
                what = f"{got}, but its attempts end with {allowed - 1}."
                events.append(self._groups[row.group].line)
            return self._of_delivery("attempts", row, events, what)
        return None

    def _unexplained(
        self, part: Sequence[Delivery], first_ms: int, marks: Marks, sends_ms: Sequence[int] | None = None
    ) -> list[Delivery]:
        """Return those deliveries of a message in a group that nothing explains."""
        if sends_ms is None:
            sends_ms = [send.begin_ms for send in self._history.stored(part[0].id)]
        retries: dict[int, list[int]] = defaultdict(list)
        for row in sorted(part, key=lambda row: row.end_ms):
            if row.outcome in ("retry", "died"):
                retries[row.attempt + 1].append(row.end_ms)
        repeats = []
        queues: set[Queue] = set()
        places: dict[tuple[Queue, int], Delivery] = {}
        resends, is_ended = 0, False
        for number, row in enumerate(part):
            queues.add(row.queue)
            times, place = retries[row.attempt], (row.queue, row.queue_offset)
            # A retry or a further send is another place, with an end of its own.
            former = [places[place]] if place in places else places.values()
            kept_rows = [before for before in former if marks.is_kept(before, row.begin_ms)]
            if place in places and kept_rows:
                if not marks.undo(kept_rows[0], row):
                    repeats.append(row)
            elif number and times and times[0] <= row.begin_ms:
                times.pop(0)
            elif number and (
                not any(marks.undo(before, row) for before in kept_rows)
                if kept_rows
                else not marks.lies_between(row, queues, first_ms)
            ):
                if sum(sent_ms <= row.begin_ms for sent_ms in sends_ms) > resends + 1:
                    resends += 1
                elif is_ended:
                    repeats.append(row)
            places[place] = row
            is_ended = is_ended or row.is_ok
        return repeats

    def _repeat(self, part: Sequence[Delivery], row: Delivery, first_ms: int, marks: Marks) -> Anomaly:
        """Return the anomaly of a repeat, with the fewest of the deliveries before it that show it."""
        evidence = [before for before in part if before <= row]

        def shows(deliveries: Sequence[Delivery]) -> bool:
            highest = -1
            for delivery in deliveries:
                if delivery.attempt > highest + 1:
                    return False
                highest = max(highest, delivery.attempt)
            return row in self._unexplained(deliveries, first_ms, marks, [-ENDLESS])

        is_smaller = len(evidence) <= _LARGEST_SHRUNK
        while is_smaller:
            is_smaller = False
            for delivery in evidence[:-1]:
                fewer = [other for other in evidence if other is not delivery]
                if shows(fewer):
                    evidence, is_smaller = fewer, True
        lines = [*(delivery.line for delivery in evidence), *self._history.support(row.id)]
        is_kept = any(marks.is_kept(before, row.begin_ms) for before in evidence)
        what = (
            f"Group {row.group} got {row.id} again with attempt {row.attempt} after a delivery that ended ok"
            f"{' and was kept' * is_kept}, and no retry, resend{'' if is_kept else ', rebalance, crash'} or reset "
            "explains it."
        )
        return self._of_delivery("repeat", row, lines, what)

    # ---- progress

    def _takes(self, group: str, message: MessageId) -> bool:
        rules = self._groups.get(group)
        return rules is None or rules.selects is None or message in rules.selects

    def _progress_ahead(self) -> Iterator[Anomaly]:
        sends_by_queue = by_key((send for send in self._sends if send.queue), lambda send: send.queue)
        for sends in sends_by_queue.values():
            sends.sort(key=lambda send: send.queue_offset)
        commits = by_key(self._history.commits, lambda commit: (commit.group, commit.queue))
        for (group, queue), rows in sorted(commits.items()):
            resets_ms = self._history.resets_ms.get((group, queue[0]), (ENDLESS,))
            passing = iter(rows)
            commit = next(passing, None)
            for send in sends_by_queue.get(queue, ()):
                while commit is not None and commit.queue_offset <= send.queue_offset:
                    commit = next(passing, None)
                if commit is None:
                    break
                at_ms, key = commit.begin_ms, (group, send.id)
                is_ahead = at_ms < resets_ms[0] and self._takes(*key) and not self._is_done(*key, at_ms)
                if is_ahead and (key not in self._ahead or at_ms < self._ahead[key][0]):
                    self._ahead[key] = (at_ms, send, commit)
        for (group, message), (at_ms, send, commit) in self._ahead.items():
            what = (
                f"Group {group} saved progress {commit.queue_offset} in {_queue_text(commit)}, past {message} at "
                f"offset {send.queue_offset}, before a delivery of it had ended."
            )
            lines = (send.line, commit.line)
            yield self._anomaly("progress-ahead", at_ms, lines, what, message=message, group=group, place=send)

    def _is_done(self, group: str, message: MessageId, at_ms: int) -> bool:
        """Return whether a message had ended a delivery in a group by then, or was a dead letter."""
        rows = self._scopes[group].get(message, ())
        return any(row.end_ms <= at_ms and row.outcome in ("ok", "retry") for row in rows) or (
            self._letters.get((group, message), ENDLESS) <= at_ms
        )

    def _progress_back(self) -> Iterator[Anomaly]:
        commits = by_key(self._history.commits, lambda commit: (commit.group, commit.queue))
        for (group, queue), rows in commits.items():
            marks = (*self._history.crashes_ms, *self._history.resets_ms.get((group, queue[0]), ()))
            for row, first in falls(rows, marks):
                what = (
                    f"Progress of group {group} in {_queue_text(row)} fell from {first.queue_offset} to "
                    f"{row.queue_offset} without a crash or a reset."
                )
                lines = (first.line, row.line)
                yield self._anomaly("progress-back", row.begin_ms, lines, what, group=group, place=row)

    def _effects_twice(self) -> Iterator[Anomaly]:
        first: dict[tuple[str, str | int], tuple[int, int]] = {}
        marks = self._history.marks["effect"]
        for at_ms, line, event in sorted(marks, key=_effect_order):
            key = (event["name"], event["key"])
            if key not in first:
                first[key] = (at_ms, line)
                continue
            first_ms, first_line = first[key]
            what = (
                f"Effect {key[0]} of {key[1]} happened again, in process {event['process']}, {at_ms - first_ms} ms "
                "after the first time."
            )
            yield self._anomaly("effect-twice", at_ms, (first_line, line), what)

    # ---- what never came

    def _undecided_and_lost(self) -> Iterator[Anomaly]:
        drained: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for at_ms, line, event in self._history.marks["drained"]:
            if event["group"] in self._groups:
                drained[event["group"]].append((at_ms, line))
        if not drained:
            return
        by_topic = by_key((send for send in self._sends if send.outcome == "ok"), lambda send: send.topic)
        sends = {
            group: sorted(send for topic in set(self._groups[group].topics) for send in by_topic.get(topic, ()))
            for group in drained
        }
        for times in drained.values():
            times.sort()
        undecided = dict(self._undecided(sends, drained))
        yield from undecided.values()
        self._left_out |= undecided.keys()
        for group, times in drained.items():
            yield from self._lost(group, sends[group], times)

    def _undecided(
        self, sends: Mapping[str, Sequence[Send]], drained: Mapping[str, Sequence[tuple[int, int]]]
    ) -> Iterator[tuple[MessageId, Anomaly]]:
        """Yield half messages without an end, and their anomalies."""
        is_open = self._is_half - self._left_out
        is_open -= {end.id for end in self._history.ends if end.outcome == "ok"}
        is_open -= {mark.event["id"] for mark in self._history.marks["discard"]}
        first: dict[MessageId, tuple[int, str, Send, int]] = {}
        for group, group_sends in sends.items() if is_open else ():
            for send in group_sends:
                if send.id not in is_open or not self._takes(group, send.id):
                    continue
                after = bisect_left(drained[group], (send.end_ms + 1, 0))
                if after < len(drained[group]):
                    at_ms, line = drained[group][after]
                    drain = (at_ms, group, send, line)
                    first[send.id] = min(first.get(send.id, drain), drain)
        for message, (at_ms, group, send, line) in first.items():
            what = f"Group {group} drained, but the half message {message} has neither a decision nor a discard."
            lines = (self._groups[group].line, send.line, line)
            yield message, self._anomaly("undecided", at_ms, lines, what, message=message, group=group, place=send)

    def _lost(self, group: str, sends: Sequence[Send], drained: Sequence[tuple[int, int]]) -> Iterator[Anomaly]:
        scopes, lost = self._scopes[group], set()
        drained_ms = [at_ms for at_ms, _ in drained]
        for send in sends:
            message, key = send.id, (group, send.id)
            if any(row.is_ok for row in scopes.get(message, ())) or key in self._letters or key in self._ahead:
                continue
            if message in self._left_out or message in lost or not self._takes(*key):
                continue
            commits = [
                end
                for end in self._history.ends_by_id.get(message, ())
                if end.decision == "commit" and end.outcome == "ok"
            ]
            visible_ms = send.end_ms
            if send.is_half:
                visible_ms = max(visible_ms, min((end.end_ms for end in commits), default=ENDLESS))
            due_ms = visible_ms + 1 if send.not_before_ms is None else max(visible_ms + 1, send.not_before_ms)
            after = bisect_left(drained_ms, due_ms)
            resets_ms = self._history.resets_ms.get((group, send.topic), (-ENDLESS,))
            if after == len(drained) or resets_ms[-1] >= send.begin_ms:
                continue
            lost.add(message)
            at_ms, line = drained[after]
            lines = [self._groups[group].line, send.line, line]
            if send.is_half:
                lines += [end.line for end in commits if end.end_ms < at_ms][:1]
            what = f"Group {group} drained, but {message} has neither a delivery that ended ok nor a dead letter."
            yield self._anomaly("lost", at_ms, lines, what, message=message, group=group, place=send)


def _effect_order(mark: Mark) -> tuple[object, ...]:
    """Order effects by time and by what they are, so that the order of lines decides only between equal ones."""
    name, key = mark.event["name"], mark.event["key"]
    return mark.at_ms, mark.event["process"], name, str(type(key)), key, mark.line


def _queue_text(row: Send | Delivery | Commit) -> str:
    return "/".join(map(str, row.queue))
