"""Anomalies of a history: what contradicts the promises of RocketMQ, with the events that show it.

`docs/histories.md` lists them. A message that one kind names is left out of the kinds after it, so that a fault has one
name. Each rule first finds its rows with arrays, and then describes only these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from librmq.testing.histories.events import (
    ABSENT,
    COMMIT,
    ENDED_DIED,
    ENDED_OK,
    ENDED_RETRY,
    ENDLESS,
    FAILED,
    OK,
    ROLLBACK,
    HistoryEvents,
    Integers,
    Table,
)
from librmq.testing.histories.rows import (
    HistoryRows,
    Marks,
    Mask,
    RowsByKey,
    distinct,
    eras,
    highest_before,
    highest_earlier,
    is_first_of_kind,
    is_in,
    take,
)

KINDS: Final = (
    "phantom",
    "aborted",
    "offset-conflict",
    "early",
    "send-order",
    "overlap",
    "delivery-order",
    "attempts",
    "repeat",
    "progress-ahead",
    "progress-back",
    "effect-twice",
    "undecided",
    "lost",
)
"""The kinds of anomalies, in the order in which they are looked for."""

_NONE: Final = np.zeros(0, np.int64)
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
    """The consumer group."""
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
    place = (anomaly.topic or "", anomaly.broker or "", anomaly.queue_id or 0, anomaly.queue_offset or 0)
    return anomaly.at_ms, KINDS.index(anomaly.anomaly), str(anomaly.id), anomaly.group or "", place, anomaly.events


class _Check:
    """One check of a history, rule by rule."""

    def __init__(self, history: HistoryEvents) -> None:
        self._history = HistoryRows(history)
        self._ids, self._texts = self._history.ids, self._history.texts
        self._groups, self._effects = self._history.groups, self._history.effects
        self._left_out = np.zeros(len(self._ids), bool)
        """Messages that a kind has named, by the number of their ids."""

    def anomalies(self) -> Iterator[Anomaly]:
        """Yield the anomalies by their kinds."""
        for rule in (self._phantoms, self._aborted, self._offset_conflicts, self._early):
            named: list[Anomaly] = list(rule())
            yield from named
        self._live_sends = take(self._history.sends, ~self._left_out[self._history.sends["id"]])
        self._live = take(self._history.deliveries, ~self._left_out[self._history.deliveries["id"]])
        yield from self._send_order()
        yield from self._order_of_deliveries()
        yield from self._attempts_and_repeats()
        yield from self._progress()
        yield from self._effects_twice()
        yield from self._undecided_and_lost()

    # ---- descriptions

    def _queue_text(self, table: Table, row: int, topic: str = "topic") -> str:
        names = (self._texts["topic"][table[topic][row]], self._texts["broker"][table["broker"][row]])
        return "/".join((*names, str(table["queue_id"][row])))

    def _anomaly(
        self,
        kind: str,
        at_ms: int,
        events: Iterable[int],
        what: str,
        *,
        message: int | None = None,
        group: int | None = None,
        place: tuple[Table, int] | None = None,
    ) -> Anomaly:
        """Return an anomaly; ``place`` is the row of a table with the queue, and the offset where one applies."""
        topic = broker = queue_id = queue_offset = None
        if place is not None:
            table, row = place
            topic = self._texts["topic"][table["read_topic" if "read_topic" in table else "topic"][row]]
            if table["queue"][row] >= 0:
                broker = self._texts["broker"][table["broker"][row]]
                queue_id, queue_offset = int(table["queue_id"][row]), int(table["queue_offset"][row])
        return Anomaly(
            kind,
            int(at_ms),
            None if message is None else self._ids[message],
            None if group is None else self._texts["group"][group],
            topic,
            broker,
            queue_id,
            queue_offset,
            tuple(sorted(self._history.with_crashes(kind, events))),
            what,
        )

    def _of_delivery(self, kind: str, row: int, events: Iterable[int], what: str, rows: Table | None = None) -> Anomaly:
        """Return an anomaly of a delivery, with ``{group}`` and ``{id}`` of the sentence filled in."""
        rows = self._history.deliveries if rows is None else rows
        message, group = int(rows["id"][row]), int(rows["group"][row])
        return self._anomaly(
            kind,
            int(rows["begin_ms"][row]),
            [*events, int(rows["line"][row])],
            what,
            message=message,
            group=group,
            place=(rows, row),
        )

    # ---- messages that should not be there

    def _phantoms(self) -> Iterator[Anomaly]:
        is_sent = np.zeros(len(self._ids), bool)
        is_sent[self._history.sends["id"]] = True
        rows, letters = self._history.deliveries, self._history.tables["dead_letter"]
        first: dict[int, tuple[int, int, int, int]] = {}
        for row in (~is_sent[rows["id"]]).nonzero()[0].tolist():
            first.setdefault(int(rows["id"][row]), (int(rows["begin_ms"][row]), 0, row, 0))
        for row in (~is_sent[letters["id"]]).nonzero()[0].tolist():
            message = int(letters["id"][row])
            letter = (int(letters["at_ms"][row]), 1, int(letters["group"][row]), row)
            first[message] = min(first.get(message, letter), letter)
        for message, (at_ms, is_letter, row, letter_row) in first.items():
            self._left_out[message] = True
            if not is_letter:
                what = f"Group {self._group(rows, row)} got {self._ids[message]}, which was never sent."
                yield self._of_delivery("phantom", row, (), what)
                continue
            what = f"{self._ids[message]} is a dead letter of group {self._texts['group'][row]}, but was never sent."
            events = [int(letters["line"][letter_row])]
            yield self._anomaly("phantom", at_ms, events, what, message=message, group=row)

    def _aborted(self) -> Iterator[Anomaly]:
        sends, rows, ends = self._history.sends, self._history.deliveries, self._history.tables["end_transaction"]
        size = len(self._ids)
        first = np.full(size, -1)
        first[rows["id"][::-1]] = np.arange(len(rows["id"]))[::-1]
        is_sent, is_stored, is_plain, is_rolled_back = (np.zeros(size, bool) for _ in range(4))
        is_sent[sends["id"]] = True
        is_stored[sends["id"][sends["outcome"] != FAILED]] = True
        is_plain[sends["id"][(sends["outcome"] != FAILED) & (sends["half"] != 1)]] = True
        self._is_half = is_stored & ~is_plain
        commit_ms = np.full(size, ENDLESS)
        commits = (ends["decision"] == COMMIT) & (ends["outcome"] != FAILED)
        np.minimum.at(commit_ms, ends["id"][commits], ends["begin_ms"][commits])
        is_rolled_back[ends["id"][(ends["decision"] == ROLLBACK) & (ends["outcome"] == OK)]] = True
        begin_ms = np.where(first >= 0, rows["begin_ms"][first], ENDLESS) if len(rows["id"]) else commit_ms
        is_delivered = (first >= 0) & ~self._left_out
        is_refused = is_delivered & is_sent & ~is_stored
        is_early = is_delivered & self._is_half & (begin_ms < commit_ms)
        for message in (is_refused | is_early).nonzero()[0].tolist():
            self._left_out[message] = True
            row = int(first[message])
            got = f"Group {self._group(rows, row)} got {self._ids[message]}"
            events = self._history.support(message)[:1]
            if is_refused[message]:
                what = f"{got}, although every send of it failed."
            elif commit_ms[message] != ENDLESS:
                what = f"{got} {commit_ms[message] - begin_ms[message]} ms before its transaction began to commit."
            elif is_rolled_back[message]:
                what = f"{got}, although its transaction was rolled back."
                events += [
                    int(ends["line"][end])
                    for end in self._history.ends_by_id(message)
                    if ends["decision"][end] == ROLLBACK and ends["outcome"][end] == OK
                ][:1]
            else:
                what = f"{got}, although nothing committed its transaction."
            yield self._of_delivery("aborted", row, events, what)

    def _offset_conflicts(self) -> Iterator[Anomaly]:
        sends = take(
            self._history.sends, (self._history.sends["queue"] >= 0) & ~self._left_out[self._history.sends["id"]]
        )
        rows = take(self._history.deliveries, ~self._left_out[self._history.deliveries["id"]])
        count = len(sends["id"])
        queue, offset, ids = (np.concatenate((sends[name], rows[name])) for name in ("queue", "queue_offset", "id"))
        order = np.lexsort((offset, queue))
        queue, offset, ids = queue[order], offset[order], ids[order]
        is_same = (queue[1:] == queue[:-1]) & (offset[1:] == offset[:-1])
        conflicts = (is_same & (ids[1:] != ids[:-1])).nonzero()[0]
        if not len(conflicts):
            return
        places = np.concatenate(([0], np.cumsum(~is_same)))
        named: dict[int, tuple[int, int, tuple[int, int]]] = {}

        def coming(holder: int) -> tuple[int, int, int, str]:
            if holder < count:
                return (
                    0,
                    int(sends["end_ms"][holder]),
                    int(sends["begin_ms"][holder]),
                    str(self._ids[sends["id"][holder]]),
                )
            return 1, holder, 0, ""

        for place in distinct(places[conflicts]).tolist():
            begin, end = places.searchsorted((place, place + 1))
            holders = sorted(order[begin:end].tolist(), key=coming)
            messages: dict[int, int] = {}
            for holder in holders:
                messages.setdefault(
                    int((sends["id"] if holder < count else rows["id"])[holder - count * (holder >= count)]), holder
                )
            (first_message, first_holder), *later = messages.items()
            self._left_out[first_message] = True
            for message, holder in later:
                self._left_out[message] = True
                at_ms = int(sends["end_ms"][holder]) if holder < count else int(rows["begin_ms"][holder - count])
                if message not in named or at_ms < named[message][0]:
                    named[message] = (at_ms, holder, (first_message, first_holder))
        for message, (at_ms, holder, (first_message, first_holder)) in named.items():
            table, row = (sends, holder) if holder < count else (rows, holder - count)
            lines = [int(table["line"][row])]
            if holder >= count:
                lines += self._history.support(message)
            if first_holder < count:
                lines.append(int(sends["line"][first_holder]))
            else:
                lines += [int(rows["line"][first_holder - count]), *self._history.support(first_message)]
            verb = "stored" if holder < count else "read"
            what = (
                f"{self._ids[message]} was {verb} at offset {table['queue_offset'][row]} of "
                f"{self._queue_text(table, row, 'topic' if holder < count else 'read_topic')}, "
                f"where {self._ids[first_message]} was before."
            )
            group = None if holder < count else int(rows["group"][row])
            yield self._anomaly("offset-conflict", at_ms, lines, what, message=message, group=group, place=(table, row))

    def _early(self) -> Iterator[Anomaly]:
        sends, rows = self._history.sends, self._history.deliveries
        is_asked = sends["not_before_ms"] != ABSENT
        if not is_asked.any():
            return
        due_ms = np.full(len(self._ids), ENDLESS)
        is_stored = sends["outcome"] != FAILED
        asked_ms = np.where(is_asked, sends["not_before_ms"], 0)
        np.minimum.at(due_ms, sends["id"][is_stored], asked_ms[is_stored])
        is_early = (rows["begin_ms"] < due_ms[rows["id"]]) & ~self._left_out[rows["id"]]
        early = (is_early & is_in(rows["id"], sends["id"][is_asked])).nonzero()[0]
        for row in early.tolist():
            message = int(rows["id"][row])
            if not self._left_out[message]:
                self._left_out[message] = True
                wait_ms = due_ms[message] - rows["begin_ms"][row]
                what = f"Group {self._group(rows, row)} got {self._ids[message]} {wait_ms} ms before its delivery time."
                yield self._of_delivery("early", row, self._history.support(message), what)

    def _group(self, table: Table, row: int) -> str:
        name: str = self._texts["group"][table["group"][row]]
        return name

    # ---- order

    def _send_order(self) -> Iterator[Anomaly]:
        sends = take(self._live_sends, self._live_sends["queue"] >= 0)
        keys, offset = sends["process"] * self._history.queues + sends["queue"], sends["queue_offset"]
        highest = highest_earlier(keys, offset)
        suspects = is_in(keys, keys[(highest >= 0) & (offset[highest] >= offset)])
        if not suspects.any():
            return
        sends = take(sends, suspects)
        crashes = take(self._history.tables["crash"], self._history.tables["crash"]["broker"] >= 0)
        mark = (crashes["broker"], crashes["at_ms"])
        ended = eras(*mark, sends["broker"], sends["end_ms"], after=False)
        begun = eras(*mark, sends["broker"], sends["begin_ms"], after=True)
        for row, first in self._falls(keys[suspects], sends, "queue_offset", ended, begun, is_equal_a_fall=True):
            what = (
                f"Process {self._texts['process'][sends['process'][row]]} sent {self._ids[sends['id'][row]]} after "
                f"{self._ids[sends['id'][first]]} to {self._queue_text(sends, row)}, but it has offset "
                f"{sends['queue_offset'][row]}, not above {sends['queue_offset'][first]}."
            )
            yield self._anomaly(
                "send-order",
                int(sends["end_ms"][row]),
                (sends["line"][first], sends["line"][row]),
                what,
                message=int(sends["id"][row]),
                place=(sends, row),
            )

    def _falls(
        self,
        keys: Integers,
        rows: Table,
        value: str,
        ended: Integers,
        begun: Integers,
        counts: Mask | None = None,
        *,
        is_equal_a_fall: bool = False,
    ) -> Iterator[tuple[int, int]]:
        """Yield rows that begin after a row of their key and era had ended with a larger value, with that row."""
        span = 1 + max(int(ended.max(initial=0)), int(begun.max(initial=0)))
        counted = np.arange(len(keys)) if counts is None else counts.nonzero()[0]
        highest = highest_before(
            (keys * span + ended)[counted],
            rows["end_ms"][counted],
            rows[value][counted],
            keys * span + begun,
            rows["begin_ms"],
        )
        first = counted[highest] if len(counted) else highest
        fall = rows[value][first] - rows[value]
        for row in ((highest >= 0) & (fall >= (not is_equal_a_fall))).nonzero()[0].tolist():
            yield row, int(first[row])

    def _order_of_deliveries(self) -> Iterator[Anomaly]:
        ordered = [number for number, rules in self._groups.items() if rules.ordered]
        if not ordered:
            return
        rows = take(self._live, is_in(self._live["group"], ordered))
        keys = rows["group"] * self._history.queues + rows["queue"]
        longest = highest_earlier(keys, rows["end_ms"])
        for row in ((longest >= 0) & (rows["end_ms"][longest] > rows["begin_ms"])).nonzero()[0].tolist():
            first = int(longest[row])
            what = (
                f"In the ordered group {self._group(rows, row)} a delivery of {self._ids[rows['id'][row]]} began while "
                f"one of {self._ids[rows['id'][first]]} ran in the same queue."
            )
            yield self._of_delivery("overlap", row, self._ordered_pair(rows, first, row), what, rows)
        highest = highest_earlier(keys, rows["queue_offset"])
        suspects = is_in(keys, keys[(highest >= 0) & (rows["queue_offset"][highest] > rows["queue_offset"])])
        if not suspects.any():
            return
        rows = take(rows, suspects)
        ended, begun = (
            self._delivery_eras(rows, "end_ms", after=False),
            self._delivery_eras(rows, "begin_ms", after=True),
        )
        is_ok = rows["outcome"] == ENDED_OK
        for row, first in self._falls(keys[suspects], rows, "queue_offset", ended, begun, is_ok):
            what = (
                f"In the ordered group {self._group(rows, row)} {self._ids[rows['id'][row]]} at offset "
                f"{rows['queue_offset'][row]} was delivered after {self._ids[rows['id'][first]]} at offset "
                f"{rows['queue_offset'][first]} of the same queue."
            )
            yield self._of_delivery("delivery-order", row, self._ordered_pair(rows, first, row), what, rows)

    def _ordered_pair(self, rows: Table, first: int, second: int) -> list[int]:
        """Return the lines that show two deliveries of an ordered group."""
        lines = [self._groups[int(rows["group"][first])].line, int(rows["line"][first])]
        for row in (first, second):
            lines += self._history.support(int(rows["id"][row]))
        return lines

    def _delivery_eras(self, rows: Table, time: str, *, after: bool) -> Integers:
        """Return numbers that rise with each assignment of a queue, reset of its topic, or crash."""
        assigns, resets, crashes = (self._history.tables[event] for event in ("assign", "reset", "crash"))
        topics = len(self._texts["topic"])
        numbers = eras(
            np.zeros_like(crashes["at_ms"]), crashes["at_ms"], np.zeros_like(rows["line"]), rows[time], after=after
        )
        numbers = numbers + eras(
            assigns["group"] * self._history.queues + self._history.queue(assigns, assigns["topic"]),
            assigns["at_ms"],
            rows["group"] * self._history.queues + rows["queue"],
            rows[time],
            after=after,
        )
        return numbers + eras(
            resets["group"] * topics + resets["topic"],
            resets["at_ms"],
            rows["group"] * topics + rows["read_topic"],
            rows[time],
            after=after,
        )

    # ---- repeats

    def _attempts_and_repeats(self) -> Iterator[Anomaly]:
        size = len(self._ids)
        scopes = self._live["group"] * size + self._live["id"]
        order = scopes.argsort(kind="stable")
        rows, scopes = take(self._live, order), scopes[order]
        attempt = np.minimum(rows["attempt"], len(scopes) + 2)
        highest = highest_earlier(scopes, attempt)
        last = np.where(highest >= 0, attempt[highest], -1)
        allowed = np.full(len(self._texts["group"]) + 1, ENDLESS)
        for group, rules in self._groups.items():
            allowed[group] = ENDLESS if rules.max_attempts is None else rules.max_attempts
        is_skipped = attempt > last + 1
        is_wrong = is_skipped | (rows["attempt"] >= allowed[rows["group"]])
        wrong = distinct(scopes[is_wrong])
        for row in is_wrong.nonzero()[0][scopes[is_wrong].searchsorted(wrong)].tolist():
            got = f"Group {self._group(rows, row)} got {self._ids[rows['id'][row]]} with attempt {rows['attempt'][row]}"
            events = self._history.support(int(rows["id"][row]))
            if is_skipped[row]:
                what = f"{got} after attempt {last[row]}." if last[row] >= 0 else f"{got} first."
            else:
                what = f"{got}, but its attempts end with {allowed[rows['group'][row]] - 1}."
                events.append(self._groups[int(rows["group"][row])].line)
            yield self._of_delivery("attempts", row, events, what, rows)
        self._ended_scopes(rows, scopes)
        if len(wrong):
            is_left = ~is_in(scopes, wrong)
            rows, scopes = take(rows, is_left), scopes[is_left]
        broadcast = [group for group, rules in self._groups.items() if rules.broadcast]
        parts = scopes
        if broadcast:
            is_shared = is_in(rows["group"], broadcast)
            parts = scopes * (len(self._texts["process"]) + 1) + np.where(is_shared, rows["process"] + 1, 0)
        again = highest_earlier(parts, np.arange(len(parts)), rows["outcome"] == ENDED_OK) >= 0
        if not again.any():
            return
        marks = Marks(self._history)
        parts_of, scopes_of = RowsByKey(parts), RowsByKey(scopes)
        for part in distinct(parts[again]).tolist():
            messages = parts_of(part)
            first_ms = int(rows["begin_ms"][scopes_of(int(scopes[messages[0]]))[0]])
            for row in self._unexplained(rows, messages, first_ms, marks):
                yield self._repeat(rows, messages, row, first_ms, marks)

    def _unexplained(
        self, rows: Table, part: Sequence[int], first_ms: int, marks: Marks, sends: Sequence[int] | None = None
    ) -> list[int]:
        """Return those deliveries of a message in a group that nothing explains."""
        message = int(rows["id"][part[0]])
        if sends is None:
            sends = [
                int(self._history.sends["begin_ms"][row])
                for row in self._history.sends_by_id(message)
                if self._history.sends["outcome"][row] != FAILED
            ]
        retries: dict[int, list[int]] = defaultdict(list)
        for row in part:
            if rows["outcome"][row] in (ENDED_RETRY, ENDED_DIED):
                retries[int(rows["attempt"][row]) + 1].append(int(rows["end_ms"][row]))
        for times in retries.values():
            times.sort()
        repeats = []
        resends, is_ended = 0, False
        for number, row in enumerate(part):
            begin_ms, times = int(rows["begin_ms"][row]), retries[int(rows["attempt"][row])]
            if number and times and times[0] <= begin_ms:
                times.pop(0)
            elif number and not marks.lies_between(rows, row, part[:number], first_ms):
                if sum(sent_ms <= begin_ms for sent_ms in sends) > resends + 1:
                    resends += 1
                elif is_ended:
                    repeats.append(row)
            is_ended = is_ended or rows["outcome"][row] == ENDED_OK
        return repeats

    def _repeat(self, rows: Table, part: Sequence[int], row: int, first_ms: int, marks: Marks) -> Anomaly:
        """Return the anomaly of a repeat, with the fewest of the deliveries before it that show it."""
        evidence = [before for before in part if before <= row]

        def shows(deliveries: Sequence[int]) -> bool:
            highest = -1
            for delivery in deliveries:
                attempt = int(rows["attempt"][delivery])
                if attempt > highest + 1:
                    return False
                highest = max(highest, attempt)
            return row in self._unexplained(rows, deliveries, first_ms, marks, [-ENDLESS])

        is_smaller = len(evidence) <= _LARGEST_SHRUNK
        while is_smaller:
            is_smaller = False
            for delivery in evidence[:-1]:
                fewer = [other for other in evidence if other != delivery]
                if shows(fewer):
                    evidence, is_smaller = fewer, True
        message = int(rows["id"][row])
        lines = [int(rows["line"][delivery]) for delivery in evidence]
        what = (
            f"Group {self._group(rows, row)} got {self._ids[message]} again with attempt {rows['attempt'][row]} after "
            "a delivery that ended ok, and no retry, resend, rebalance, crash or reset explains it."
        )
        return self._of_delivery("repeat", row, [*lines, *self._history.support(message)], what, rows)

    def _ended_scopes(self, rows: Table, scopes: Integers) -> None:
        """Note when a delivery of each message in a group first ended with ``ok`` or ``retry``, and which ended ok."""
        is_over = (rows["outcome"] == ENDED_OK) | (rows["outcome"] == ENDED_RETRY)
        ended, end_ms = scopes[is_over], rows["end_ms"][is_over]
        starts = is_first_of_kind(ended).nonzero()[0]
        self._over = (ended[starts], np.minimum.reduceat(end_ms, starts) if len(starts) else end_ms)
        self._consumed = scopes[rows["outcome"] == ENDED_OK]

    def _done_ms(self, group: int) -> Integers:
        """Return by message when a delivery in a group had ended with ``ok`` or ``retry``, or it was a dead letter."""
        size = len(self._ids)
        done_ms = np.full(size, ENDLESS)
        scopes, end_ms = self._over
        first, end = scopes.searchsorted((group * size, (group + 1) * size))
        done_ms[scopes[first:end] - group * size] = end_ms[first:end]
        letters = take(self._history.tables["dead_letter"], self._history.tables["dead_letter"]["group"] == group)
        np.minimum.at(done_ms, letters["id"], letters["at_ms"])
        return done_ms

    def _takes(self, group: int) -> Mask | None:
        """Return which messages the filter of a group takes; None for all."""
        selects = self._groups[group].selects if group in self._groups else None
        if selects is None:
            return None
        takes = np.zeros(len(self._ids), bool)
        takes[[self._history.id_numbers[name] for name in selects if name in self._history.id_numbers]] = True
        return takes

    def _resets(self, choose: Callable[[int, int], int]) -> dict[tuple[int, int], int]:
        """Return the first (``min``) or last (``max``) reset of groups and topics."""
        resets: dict[tuple[int, int], int] = {}
        table = self._history.tables["reset"]
        for group, topic, at_ms in zip(*(table[name].tolist() for name in ("group", "topic", "at_ms")), strict=True):
            resets[group, topic] = choose(resets.get((group, topic), at_ms), at_ms)
        return resets

    # ---- progress

    def _progress(self) -> Iterator[Anomaly]:
        commits = dict(self._history.tables["commit"])
        commits["queue"] = self._history.queue(commits, commits["topic"])
        order = np.lexsort([commits[name] for name in ("queue_offset", "at_ms", "queue", "group")])
        commits = dict(take(commits, order))
        yield from self._progress_ahead(commits)
        keys = commits["group"] * self._history.queues + commits["queue"]
        commits["begin_ms"] = commits["end_ms"] = commits["at_ms"]
        highest = highest_earlier(keys, commits["queue_offset"])
        suspects = is_in(keys, keys[(highest >= 0) & (commits["queue_offset"][highest] > commits["queue_offset"])])
        if not suspects.any():
            return
        commits = dict(take(commits, suspects))
        ended, begun = (self._progress_eras(commits, after=after) for after in (False, True))
        for row, first in self._falls(keys[suspects], commits, "queue_offset", ended, begun):
            what = (
                f"Progress of group {self._group(commits, row)} in {self._queue_text(commits, row)} fell from "
                f"{commits['queue_offset'][first]} to {commits['queue_offset'][row]} without a crash or a reset."
            )
            events = (commits["line"][first], commits["line"][row])
            group = int(commits["group"][row])
            yield self._anomaly("progress-back", commits["at_ms"][row], events, what, group=group, place=(commits, row))

    def _progress_eras(self, commits: Table, *, after: bool) -> Integers:
        resets, crashes = self._history.tables["reset"], self._history.tables["crash"]
        topics = len(self._texts["topic"])
        zeros = np.zeros_like(commits["line"])
        return eras(np.zeros_like(crashes["at_ms"]), crashes["at_ms"], zeros, commits["at_ms"], after=after) + eras(
            resets["group"] * topics + resets["topic"],
            resets["at_ms"],
            commits["group"] * topics + commits["topic"],
            commits["at_ms"],
            after=after,
        )

    def _progress_ahead(self, commits: Table) -> Iterator[Anomaly]:
        ahead: dict[tuple[int, int], tuple[int, int, int]] = {}
        sends = take(self._live_sends, self._live_sends["queue"] >= 0)
        order = np.lexsort((sends["queue_offset"], sends["queue"]))
        sends = take(sends, order)
        resets = self._resets(min)
        queues = commits["group"] * self._history.queues + commits["queue"]
        begins = is_first_of_kind(queues).nonzero()[0].tolist()
        group, done_ms, takes = -1, _NONE, None
        for begin, end in pairwise((*begins, len(queues))):
            if commits["group"][begin] != group:
                group = int(commits["group"][begin])
                done_ms = self._done_ms(group)
                takes = self._takes(group)
            first, last = sends["queue"].searchsorted((commits["queue"][begin], commits["queue"][begin] + 1))
            passed = np.maximum.accumulate(commits["queue_offset"][begin:end])
            at = passed.searchsorted(sends["queue_offset"][first:last], side="right")
            rows = first + (at < len(passed)).nonzero()[0]
            at = begin + at[at < len(passed)]
            passed_ms = commits["at_ms"][at]
            is_ahead = (passed_ms < done_ms[sends["id"][rows]]) & (
                passed_ms < resets.get((group, int(commits["topic"][begin])), ENDLESS)
            )
            if takes is not None:
                is_ahead &= takes[sends["id"][rows]]
            for row, commit in zip(rows[is_ahead].tolist(), at[is_ahead].tolist(), strict=True):
                passing = (int(commits["at_ms"][commit]), row, commit)
                key = (group, int(sends["id"][row]))
                ahead[key] = min(ahead.get(key, passing), passing)
        self._ahead = set(ahead)
        for (group, message), (at_ms, row, commit) in ahead.items():
            what = (
                f"Group {self._texts['group'][group]} saved progress {commits['queue_offset'][commit]} in "
                f"{self._queue_text(commits, commit)}, past {self._ids[message]} at offset "
                f"{sends['queue_offset'][row]}, before a delivery of it had ended."
            )
            events = (sends["line"][row], commits["line"][commit])
            yield self._anomaly("progress-ahead", at_ms, events, what, message=message, group=group, place=(sends, row))

    def _effects_twice(self) -> Iterator[Anomaly]:
        effects = self._history.tables["effect"]
        if not len(effects["line"]):
            return
        effects = take(effects, np.lexsort((effects["process"], effects["at_ms"])))
        keys = effects["name"] * (len(self._effects["key"]) + 1) + effects["key"]
        before = highest_earlier(keys, np.arange(len(keys)))
        rows_of = RowsByKey(keys)
        for row in (before >= 0).nonzero()[0].tolist():
            first = rows_of(int(keys[row]))[0]
            name, key = (
                self._effects["name"][effects["name"][row]],
                self._effects["key"][effects["key"][row]],
            )
            what = (
                f"Effect {name} of {key} happened again, in process {self._texts['process'][effects['process'][row]]}, "
                f"{effects['at_ms'][row] - effects['at_ms'][first]} ms after the first time."
            )
            events = (effects["line"][first], effects["line"][row])
            yield self._anomaly("effect-twice", effects["at_ms"][row], events, what)

    # ---- what never came

    def _undecided_and_lost(self) -> Iterator[Anomaly]:
        drained: dict[int, list[tuple[int, int]]] = defaultdict(list)
        table = self._history.tables["drained"]
        for group, at_ms, line in zip(*(table[name].tolist() for name in ("group", "at_ms", "line")), strict=True):
            if group in self._groups:
                drained[group].append((at_ms, line))
        sends = take(self._live_sends, self._live_sends["outcome"] == OK)
        rows_of = RowsByKey(sends["topic"])
        topics = {name: number for number, name in enumerate(self._texts["topic"])}
        rows_by_group = {
            group: np.sort(
                np.array(
                    [
                        row
                        for name in set(self._groups[group].topics)
                        if name in topics
                        for row in rows_of(topics[name])
                    ],
                    np.int64,
                )
            )
            for group in drained
        }
        for times in drained.values():
            times.sort()
        undecided = dict(self._undecided(sends, rows_by_group, drained))
        yield from undecided.values()
        self._left_out[list(undecided)] = True
        last_resets = self._resets(max)
        commit_ms = np.full(len(self._ids), ENDLESS)
        ends = self._history.tables["end_transaction"]
        is_commit = (ends["decision"] == COMMIT) & (ends["outcome"] == OK)
        np.minimum.at(commit_ms, ends["id"][is_commit], ends["end_ms"][is_commit])
        for group, rows in rows_by_group.items():
            yield from self._lost(group, take(sends, rows), drained[group], last_resets, commit_ms)

    def _undecided(
        self, sends: Table, rows_by_group: Mapping[int, Integers], drained: Mapping[int, list[tuple[int, int]]]
    ) -> Iterator[tuple[int, Anomaly]]:
        """Yield half messages without an end, and their anomalies."""
        is_open = self._is_half & ~self._left_out
        ends = self._history.tables["end_transaction"]
        is_open[ends["id"][ends["outcome"] == OK]] = False
        is_open[self._history.tables["discard"]["id"]] = False
        first: dict[int, tuple[int, str, int, int, int]] = {}
        for group, rows in rows_by_group.items():
            takes = self._takes(group)
            for row in rows[is_open[sends["id"][rows]]].tolist():
                message = int(sends["id"][row])
                after = bisect_left(drained[group], (int(sends["end_ms"][row]) + 1, 0))
                if after < len(drained[group]) and (takes is None or takes[message]):
                    at_ms, line = drained[group][after]
                    drain = (at_ms, self._texts["group"][group], row, line, group)
                    first[message] = min(first.get(message, drain), drain)
        for message, (at_ms, name, row, line, group) in first.items():
            what = (
                f"Group {name} drained, but the half message {self._ids[message]} has neither a decision nor a discard."
            )
            events = (self._groups[group].line, int(sends["line"][row]), line)
            place = (sends, row)
            yield message, self._anomaly("undecided", at_ms, events, what, message=message, group=group, place=place)

    def _lost(
        self,
        group: int,
        sends: Table,
        drained: Sequence[tuple[int, int]],
        last_resets: Mapping[tuple[int, int], int],
        commit_ms: Integers,
    ) -> Iterator[Anomaly]:
        size, takes = len(self._ids), self._takes(group)
        is_due = ~self._left_out if takes is None else takes & ~self._left_out
        first, end = self._consumed.searchsorted((group * size, (group + 1) * size))
        is_due[self._consumed[first:end] - group * size] = False
        letters = self._history.tables["dead_letter"]
        is_due[letters["id"][letters["group"] == group]] = False
        is_due[[message for ahead_group, message in self._ahead if ahead_group == group]] = False
        sends = take(sends, is_due[sends["id"]])
        visible_ms = np.where(sends["half"] == 1, np.maximum(sends["end_ms"], commit_ms[sends["id"]]), sends["end_ms"])
        lost: set[int] = set()
        drained_ms = [at_ms for at_ms, _ in drained]
        for row in (visible_ms < drained_ms[-1]).nonzero()[0].tolist():
            message = int(sends["id"][row])
            after = bisect_left(drained_ms, max(int(visible_ms[row]) + 1, int(sends["not_before_ms"][row])))
            reset_ms = last_resets.get((group, int(sends["topic"][row])), -ENDLESS)
            if message in lost or after == len(drained) or reset_ms >= sends["begin_ms"][row]:
                continue
            lost.add(message)
            at_ms, line = drained[after]
            events = [self._groups[group].line, int(sends["line"][row]), line]
            if sends["half"][row] == 1:
                ends = self._history.tables["end_transaction"]
                events += [
                    int(ends["line"][end])
                    for end in self._history.ends_by_id(message)
                    if ends["decision"][end] == COMMIT and ends["outcome"][end] == OK and ends["end_ms"][end] < at_ms
                ][:1]
            what = (
                f"Group {self._texts['group'][group]} drained, but {self._ids[message]} has neither a delivery that "
                "ended ok nor a dead letter."
            )
            yield self._anomaly("lost", at_ms, events, what, message=message, group=group, place=(sends, row))
