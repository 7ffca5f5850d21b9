"""Rows of a history in the order in which rules count them, and searches over their columns.

`HistoryRows` also finds the lines that support a delivery, and `Marks` what lies between two deliveries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from librmq.testing.histories.events import (
    ABSENT,
    COMMIT,
    ENDED_DIED,
    ENDED_OK,
    ENDLESS,
    FAILED,
    OK,
    RUNNING,
    HistoryEvents,
    Integers,
    Table,
)

Mask = NDArray[np.bool_]

# ---- searches over columns


class RowsByKey:
    """The rows of a table by a key."""

    def __init__(self, keys: Integers) -> None:
        self._order = keys.argsort(kind="stable")
        self._keys = keys[self._order]

    def __call__(self, key: int) -> list[int]:
        """Return the rows of a key, in their order."""
        first, end = self._keys.searchsorted((key, key + 1))
        rows: list[int] = self._order[first:end].tolist()
        return rows


def take(table: Table, rows: Integers | Mask) -> Table:
    """Return some rows of a table, in this order."""
    if rows.dtype == np.bool_ and rows.all():
        return table
    return {name: column[rows] for name, column in table.items()}


def distinct(values: Integers) -> Integers:
    """Return values in order, each once."""
    values = np.sort(values)
    return values[is_first_of_kind(values)]


def is_first_of_kind(values: Integers) -> Mask:
    """Return which of values in order are the first of their kind."""
    is_first = np.ones(len(values), bool)
    is_first[1:] = values[1:] != values[:-1]
    return is_first


def is_in(values: Integers, chosen: Sequence[int] | Integers) -> Mask:
    """Return which values are among the chosen ones."""
    unique = distinct(np.asarray(chosen, np.int64))
    if not len(unique):
        return np.zeros(len(values), bool)
    nearest: Integers = unique[np.minimum(unique.searchsorted(values), len(unique) - 1)]
    return np.equal(nearest, values)


def highest_earlier(keys: Integers, values: Integers, counts: Mask | None = None) -> Integers:
    """Return for each row the earlier row of the same key with the largest value, -1 for none.

    Only rows in ``counts`` are returned; among equal values the later row is.
    """
    size = len(keys)
    by_value = values.argsort(kind="stable")
    ranks = np.empty(size, np.int64)
    ranks[by_value] = np.arange(1, size + 1)
    if counts is not None:
        ranks[~counts] = 0
    order = keys.argsort(kind="stable")
    is_first = is_first_of_kind(keys[order])
    base = (np.cumsum(is_first) - 1) * (size + 1)
    highest = np.maximum.accumulate(ranks[order] + base) - base
    earlier = np.zeros(size, np.int64)
    earlier[1:] = highest[:-1]
    earlier[is_first] = 0
    rows = np.full(size, -1)
    rows[order] = np.where(earlier > 0, by_value[earlier - 1], -1)
    return rows


def highest_before(
    keys: Integers, end_ms: Integers, values: Integers, query_keys: Integers, query_ms: Integers
) -> Integers:
    """Return for each query the row of its key that ended before, with the largest value; -1 for none."""
    every_ms = np.concatenate((query_ms, end_ms))
    is_row = np.repeat((False, True), (len(query_ms), len(end_ms)))
    every_key = np.concatenate((query_keys, keys))
    order = np.lexsort((is_row, every_ms))  # at the same time a query comes first
    every_value = np.concatenate((np.zeros_like(query_ms), values))
    highest = highest_earlier(every_key[order], every_value[order], is_row[order])
    rows = np.full(len(order), -1)
    rows[order] = np.where(highest >= 0, order[highest] - len(query_ms), -1)
    return rows[: len(query_ms)]


def eras(mark_keys: Integers, mark_ms: Integers, keys: Integers, at_ms: Integers, *, after: bool) -> Integers:
    """Return numbers that rise with each mark of a key; ``after`` says whether marks at the same time come before."""
    if not len(mark_ms):
        return np.zeros(len(keys), np.int64)
    rank = np.concatenate((np.ones(len(mark_ms), np.int64), np.full(len(at_ms), 2 * after)))
    order = np.lexsort((rank, np.concatenate((mark_ms, at_ms)), np.concatenate((mark_keys, keys))))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(rank[order] == 1)
    return numbers[len(mark_ms) :]


# ---- rows


class HistoryRows:
    """The tables of a history, with sends and deliveries in order."""

    def __init__(self, history: HistoryEvents) -> None:
        tables = history.tables()
        self.ids: list[Any] = list(history.names["id"])
        self.id_numbers = history.names["id"]
        self.texts = {field: sorted(history.names[field]) for field in ("process", "topic", "broker", "group")}
        self.effects = {field: list(history.names[field]) for field in ("name", "key")}
        self.groups = {self.texts["group"].index(name): rules for name, rules in history.groups.items()}
        """What is said of groups, by their numbers."""
        self.tables = tables
        self._queue_ids = distinct(
            np.concatenate([tables[event]["queue_id"] for event in ("send", "deliver", "assign", "revoke", "commit")])
        )
        self.queues = len(self._queue_ids) * max(1, len(self.texts["broker"])) * max(1, len(self.texts["topic"]))
        """No number of a queue is as large."""
        self._crash_lines: dict[int, tuple[int, int]] = {}
        """Begin, and line of the crash, of deliveries that end by it, by their lines."""
        self.sends = self._ordered_sends()
        self.deliveries = self._ordered_deliveries()

    @cached_property
    def sends_by_id(self) -> RowsByKey:
        """The rows of sends by messages."""
        return RowsByKey(self.sends["id"])

    @cached_property
    def ends_by_id(self) -> RowsByKey:
        """The rows of ends of transactions by messages."""
        return RowsByKey(self.tables["end_transaction"]["id"])

    def queue(self, table: Table, topic: Integers) -> Integers:
        """Return the numbers of queues, which rise by topic, broker and queue id."""
        ranks = self._queue_ids.searchsorted(table["queue_id"])
        return (topic * len(self.texts["broker"]) + table["broker"]) * len(self._queue_ids) + ranks

    def _ordered_sends(self) -> Table:
        sends = dict(self.tables["send"])
        is_placed = (sends["outcome"] == OK) & (sends["half"] != 1) & (sends["not_before_ms"] == ABSENT)
        sends["queue"] = np.where(is_placed, self.queue(sends, sends["topic"]), -1)
        keys = [sends[name] for name in ("queue_offset", "queue", "end_ms", "begin_ms")]
        return take(sends, np.lexsort(keys))

    def _ordered_deliveries(self) -> Table:
        rows = dict(self.tables["deliver"])
        rows["read_topic"] = np.where(rows["stored_in"] >= 0, rows["stored_in"], rows["topic"])
        rows["queue"] = self.queue(rows, rows["read_topic"])
        rows["outcome"] = np.where(rows["outcome"] < 0, RUNNING, rows["outcome"])
        rows["end_ms"] = np.where(rows["outcome"] == RUNNING, ENDLESS, rows["end_ms"])
        crashes = self.crashes("process")
        for row in (rows["outcome"] == RUNNING).nonzero()[0].tolist():
            crash_ms = crashes.get(int(rows["process"][row]), ())
            begin = bisect_left(crash_ms, int(rows["begin_ms"][row]))
            if begin < len(crash_ms):
                rows["end_ms"][row] = crash_ms[begin]
                rows["outcome"][row] = ENDED_DIED
                self._crash_lines[int(rows["line"][row])] = (
                    int(rows["begin_ms"][row]),
                    self._crash_line(int(rows["process"][row]), crash_ms[begin]),
                )
        # What is equal in all that counts: deliveries that do not end well first, then by names.
        tie = (rows["outcome"] == ENDED_OK) * len(self.texts["group"]) + rows["group"]
        tie = (tie * len(self.texts["process"]) + rows["process"]) * self.queues + rows["queue"]
        keys = [tie, *(rows[name] for name in ("attempt", "queue_offset", "end_ms", "begin_ms"))]
        return take(rows, np.lexsort(keys))

    def _crash_line(self, process: int, at_ms: int) -> int:
        table = self.tables["crash"]
        return int(table["line"][(table["process"] == process) & (table["at_ms"] == at_ms)][0])

    def crashes(self, field: str) -> dict[int, list[int]]:
        """Return the times of crashes by process or broker."""
        crashes = defaultdict(list)
        table = self.tables["crash"]
        for number, at_ms in zip(table[field].tolist(), table["at_ms"].tolist(), strict=True):
            if number >= 0:
                crashes[number].append(at_ms)
        return {number: sorted(times) for number, times in crashes.items()}

    def support(self, message: int) -> list[int]:
        """Return the lines without which a delivered message would be a phantom, aborted or early."""
        sends = self.sends
        rows = [row for row in self.sends_by_id(message) if sends["outcome"][row] != FAILED]
        if not rows:
            return [int(sends["line"][row]) for row in self.sends_by_id(message)[:1]]
        first = min(rows, key=lambda row: (max(0, int(sends["not_before_ms"][row])), sends["half"][row], row))
        lines = [int(sends["line"][first])]
        if sends["half"][first] == 1:
            plain = [row for row in rows if sends["half"][row] != 1]
            ends = self.tables["end_transaction"]
            commits = [
                row
                for row in self.ends_by_id(message)
                if ends["decision"][row] == COMMIT and ends["outcome"][row] != FAILED
            ]
            if plain:
                lines.append(int(sends["line"][plain[0]]))
            elif commits:
                lines.append(int(ends["line"][min(commits, key=lambda row: int(ends["begin_ms"][row]))]))
        return lines

    def with_crashes(self, kind: str, lines: Iterable[int]) -> set[int]:
        """Return lines with the crashes that end a delivery among them, where its end counts."""
        evidence = {int(line) for line in lines}
        if self._crash_lines.keys().isdisjoint(evidence):
            return evidence
        rows = self.deliveries
        begins = rows["begin_ms"][np.isin(rows["line"], list(evidence))].tolist()
        for line in evidence & self._crash_lines.keys():
            begin_ms, crash_line = self._crash_lines[line]
            if kind == "repeat" or begins.count(begin_ms) > 1:
                evidence.add(crash_line)
        return evidence


class Marks:
    """Assignments, revocations, crashes and resets, which explain repeats, with sorted times."""

    def __init__(self, history: HistoryRows) -> None:
        tables = history.tables
        self._queues: dict[tuple[int, int], list[int]] = defaultdict(list)
        processes: dict[int, set[int]] = defaultdict(set)
        for event in ("assign", "revoke"):
            table = tables[event]
            queues = history.queue(table, table["topic"])
            for group, queue, at_ms in zip(
                table["group"].tolist(), queues.tolist(), table["at_ms"].tolist(), strict=True
            ):
                self._queues[group, queue].append(at_ms)
        span = len(history.texts["process"]) + 1
        for event in ("assign", "deliver"):
            for pair in distinct(tables[event]["group"] * span + tables[event]["process"]).tolist():
                processes[pair // span].add(pair % span)
        crashes = history.crashes("process")
        self._processes = {
            group: sorted(at_ms for process in members for at_ms in crashes.get(process, ()))
            for group, members in processes.items()
        }
        self._brokers = history.crashes("broker")
        self._resets: dict[tuple[int, int], list[int]] = defaultdict(list)
        table = tables["reset"]
        for group, topic, at_ms in zip(*(table[name].tolist() for name in ("group", "topic", "at_ms")), strict=True):
            self._resets[group, topic].append(at_ms)
        for times in (*self._queues.values(), *self._resets.values()):
            times.sort()

    def lies_between(self, rows: Table, row: int, earlier: Iterable[int], first_ms: int) -> bool:
        """Return whether one lies between the first delivery of a message in a group and the one in a row."""
        begin_ms, group = int(rows["begin_ms"][row]), int(rows["group"][row])
        places = [*earlier, row]
        times = [
            self._processes.get(group, ()),
            *(self._queues.get((group, int(rows["queue"][place])), ()) for place in places),
            *(self._brokers.get(int(rows["broker"][place]), ()) for place in places),
            self._resets.get((group, int(rows["topic"][row])), ()),
            self._resets.get((group, int(rows["read_topic"][row])), ()),
        ]
        return any((after := bisect_left(every, first_ms)) < len(every) and every[after] <= begin_ms for every in times)
