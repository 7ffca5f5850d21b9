"""Rows of a history in the order in which rules count them, with the lines that support them.

`HistoryRows` also knows which message is in which row, and `Marks` what lies between two deliveries.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from librmq.testing.histories.events import (
    Commit,
    Delivery,
    HistoryEvents,
    MessageId,
    Queue,
    Send,
    TransactionEnd,
)

_Row = TypeVar("_Row", Send, Delivery, Commit)


def falls(
    rows: Sequence[_Row],
    marks_ms: Iterable[int],
    counts: Callable[[_Row], bool] = lambda row: True,
    *,
    is_equal_a_fall: bool = False,
) -> Iterator[tuple[_Row, _Row]]:
    """Yield rows that begin after one had ended with a larger offset, with that row, where no mark lies between.

    Args:
        rows: The rows of one queue, by their begins.
        marks_ms: The times of the marks.
        counts: Whether a row that has ended counts.
        is_equal_a_fall: Whether the same offset is wrong too.
    """
    highest = -1
    for row in rows:
        if row.queue_offset < highest + is_equal_a_fall:
            break
        highest = row.queue_offset
    else:
        return
    marks = sorted(marks_ms)
    ended = sorted(filter(counts, rows), key=lambda row: row.end_ms)
    done, era, best = 0, 0, None
    for row in rows:
        while done < len(ended) and ended[done].end_ms < row.begin_ms:
            first, done = ended[done], done + 1
            first_era = bisect_left(marks, first.end_ms)
            if best is None or first_era > era or first.queue_offset >= best.queue_offset:
                era, best = first_era, first
        is_fall = best is not None and best.queue_offset + is_equal_a_fall > row.queue_offset
        if best is not None and is_fall and bisect_right(marks, row.begin_ms) == era:
            yield row, best


def by_key(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return rows by a key, in their order."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


class HistoryRows:
    """The rows of a history, with sends and deliveries in order."""

    def __init__(self, history: HistoryEvents) -> None:
        self.groups, self.marks = history.groups, history.marks
        self.ends: list[TransactionEnd] = history.ends
        self.sends: list[Send] = sorted(history.sends)
        self.commits: list[Commit] = sorted(history.commits)
        self._crash_lines: dict[int, tuple[int, int]] = {}
        """Begin, and line of the crash, of deliveries that end by it, by their lines."""
        crashes = self.crashes("process")
        self.deliveries: list[Delivery] = sorted(
            row if row.outcome is not None else self._died(row, crashes.get(row.process, ()))
            for row in history.deliveries
        )
        self.sends_by_id: dict[MessageId, list[Send]] = defaultdict(list)
        for send in self.sends:
            self.sends_by_id[send.id].append(send)
        self.ends_by_id: dict[MessageId, list[TransactionEnd]] = defaultdict(list)
        for end in self.ends:
            self.ends_by_id[end.id].append(end)

    def _died(self, row: Delivery, crashes: Sequence[tuple[int, int]]) -> Delivery:
        """Return a delivery without an end, which a later crash of its process ends."""
        number = bisect_left(crashes, (row.begin_ms, 0))
        if number == len(crashes):
            return row
        at_ms, line = crashes[number]
        self._crash_lines[row.line] = (row.begin_ms, line)
        return row._replace(end_ms=at_ms, outcome="died")

    def crashes(self, field: str) -> dict[str, list[tuple[int, int]]]:
        """Return the times and lines of crashes by process or broker, in order."""
        crashes: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for at_ms, line, event in sorted(self.marks["crash"], key=lambda mark: mark[:2]):
            if event.get(field) is not None:
                crashes[event[field]].append((at_ms, line))
        return crashes

    @cached_property
    def crashes_ms(self) -> list[int]:
        """The times of all crashes."""
        return [mark.at_ms for mark in self.marks["crash"]]

    @cached_property
    def resets_ms(self) -> dict[tuple[str, str], list[int]]:
        """The times of resets by group and topic, in order."""
        resets: dict[tuple[str, str], list[int]] = defaultdict(list)
        for mark in self.marks["reset"]:
            resets[mark.event["group"], mark.event["topic"]].append(mark.at_ms)
        return {key: sorted(times) for key, times in resets.items()}

    @cached_property
    def assigns_ms(self) -> dict[tuple[str, Queue], list[int]]:
        """The times of assignments by group and queue."""
        return self.moves_ms("assign")

    def moves_ms(self, *kinds: str) -> dict[tuple[str, Queue], list[int]]:
        """Return the times of assignments or revocations by group and queue, in order."""
        moves: dict[tuple[str, Queue], list[int]] = defaultdict(list)
        for kind in kinds:
            for at_ms, _, event in self.marks[kind]:
                moves[event["group"], (event["topic"], event["broker"], event["queue_id"])].append(at_ms)
        return {key: sorted(times) for key, times in moves.items()}

    def stored(self, message: MessageId) -> list[Send]:
        """Return the sends of a message that did not fail."""
        return [send for send in self.sends_by_id.get(message, ()) if send.outcome != "failed"]

    def support(self, message: MessageId) -> list[int]:
        """Return the lines without which a delivered message would be a phantom, aborted or early."""
        stored = self.stored(message)
        if not stored:
            return [send.line for send in self.sends_by_id.get(message, ())[:1]]
        first = min(stored, key=lambda send: (max(0, send.not_before_ms or 0), send.is_half))
        lines = [first.line]
        if first.is_half:
            plain = [send for send in stored if not send.is_half]
            commits = [
                end for end in self.ends_by_id.get(message, ()) if end.decision == "commit" and end.outcome != "failed"
            ]
            if plain:
                lines.append(plain[0].line)
            elif commits:
                lines.append(min(commits, key=lambda end: end.begin_ms).line)
        return lines

    @cached_property
    def _begins_ms(self) -> Mapping[int, int]:
        return {row.line: row.begin_ms for row in self.deliveries}

    def with_crashes(self, kind: str, lines: Iterable[int]) -> set[int]:
        """Return lines with the crashes that end a delivery among them, where its end counts."""
        evidence = set(lines)
        if self._crash_lines.keys().isdisjoint(evidence):
            return evidence
        begins = [self._begins_ms[line] for line in evidence if line in self._begins_ms]
        for line in evidence & self._crash_lines.keys():
            begin_ms, crash_line = self._crash_lines[line]
            if kind == "repeat" or begins.count(begin_ms) > 1:
                evidence.add(crash_line)
        return evidence


class Marks:
    """Assignments, revocations, crashes and resets, which explain repeats, with sorted times."""

    def __init__(self, history: HistoryRows) -> None:
        self._queues = history.moves_ms("assign", "revoke")
        self._resets = history.resets_ms
        members: dict[str, set[str]] = defaultdict(set)
        for mark in history.marks["assign"]:
            members[mark.event["group"]].add(mark.event["process"])
        for row in history.deliveries:
            members[row.group].add(row.process)
        crashes = history.crashes("process")
        self._processes = {
            group: sorted(at_ms for process in processes for at_ms, _ in crashes.get(process, ()))
            for group, processes in members.items()
        }
        self._brokers = {broker: [at_ms for at_ms, _ in times] for broker, times in history.crashes("broker").items()}

    def lies_between(self, row: Delivery, queues: Iterable[Queue], first_ms: int) -> bool:
        """Return whether one lies between the first delivery of a message in a group and ``row``.

        ``queues`` are those that the message was delivered from until then.
        """
        times = [
            self._processes.get(row.group, ()),
            *(self._queues.get((row.group, queue), ()) for queue in queues),
            *(self._brokers.get(queue[1], ()) for queue in queues),
            self._resets.get((row.group, row.topic), ()),
            self._resets.get((row.group, row.queue[0]), ()),
        ]
        return any(
            (after := bisect_left(every, first_ms)) < len(every) and every[after] <= row.begin_ms for every in times
        )
