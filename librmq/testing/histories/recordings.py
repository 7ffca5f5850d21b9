"""Histories that several processes recorded, each in a file of a folder, as one."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from librmq.client.recorder import Event


class Recording:
    """The histories of the processes of a soak, each in a file of a folder. They may still grow."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def lines(self, events: Sequence[Event]) -> Iterator[bytes]:
        """Yield the lines of all processes so far, and those of ``events``; each group is described once."""
        decided, readings = self._decided(), self._readings(events)
        groups = set()
        for _, line in self._recorded_lines():
            kind = recorded_kind(line)
            if kind == "group":
                name = json.loads(line)["group"]
                if name in groups:
                    continue
                groups.add(name)
            elif kind == "end_transaction" and _id(line) in decided:
                line = line.replace(b'"outcome":"unknown"', b'"outcome":"ok"')
            elif kind == "deliver" and readings.shared and (mark := readings.mark(json.loads(line))) is not None:
                yield _line(mark)
            yield line + b"\n"
        yield from map(_line, events)

    def _decided(self) -> set[bytes]:
        """Return the transactions whose end had no answer, and is known anyway.

        A commit is known where the message was delivered. A rollback shows only in that the broker does not ask any
        more, so it counts as done.
        """
        unknown = {
            _id(line): b'"decision":"commit"' in line
            for _, line in self._recorded_lines()
            if recorded_kind(line) == "end_transaction" and b'"outcome":"unknown"' in line
        }
        lines = self._recorded_lines() if unknown else ()
        delivered = {_id(line) for _, line in lines if recorded_kind(line) == "deliver"}
        return {name for name, is_commit in unknown.items() if not is_commit or name in delivered}

    def _readings(self, events: Sequence[Event]) -> _Readings:
        marks: dict[_Queue, list[tuple[int, str, str]]] = defaultdict(list)
        for process, line in self._recorded_lines():
            if (kind := recorded_kind(line)) in ("assign", "revoke"):
                event = json.loads(line)
                marks[_queue_of(event)].append((event["at_ms"], kind, process))
        for event in events:
            for queue_marks in marks.values() if event["event"] == "crash" and "process" in event else ():
                queue_marks.append((event["at_ms"], "crash", event["process"]))
        return _Readings(marks)

    def _recorded_lines(self) -> Iterator[tuple[str, bytes]]:
        """Yield what the processes have recorded so far, each with its process, without incomplete last lines."""
        for name in sorted(os.listdir(self._folder)):
            process, _, ending = name.partition(".")
            if ending != "jsonl":
                continue
            with open(os.path.join(self._folder, name), "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):
                        yield process, line.strip()


_Queue = tuple[str, str, str, int]
"""A group, and a queue that it reads."""


class _Readings:
    """Queues that were taken while another instance read them.

    A process that does not know yet that its queue has another owner reads on, so both deliver: each `mark` says who.
    """

    def __init__(self, marks: Mapping[_Queue, Sequence[tuple[int, str, str]]]) -> None:
        self.shared: dict[_Queue, list[tuple[int, float]]] = {}
        """When queues had two owners."""
        for queue, queue_marks in marks.items():
            times = self._times(sorted(queue_marks))
            if times and not queue[0].endswith("_in_order"):  # whose queues have locks
                self.shared[queue] = list(zip(times[::2], [*times[1::2], float("inf")], strict=False))

    def _times(self, marks: Sequence[tuple[int, str, str]]) -> list[int]:
        """Return when a queue got a second owner and lost it, in turn."""
        owners: Counter[str] = Counter()  # a process can have two instances of the group
        times: list[int] = []
        for at_ms, kind, process in marks:
            if kind == "assign":
                owners[process] += 1
            elif kind == "crash":
                del owners[process]
            else:
                owners[process] = max(0, owners[process] - 1)
            if len(times) % 2 != (owners.total() > 1):
                times.append(at_ms)
        return times

    def mark(self, delivery: Event) -> Event | None:
        """Return the event that a process reads a queue, for a delivery from one that another process reads too."""
        queue, begin_ms = _queue_of(delivery), delivery["begin_ms"]
        if not any(begin <= begin_ms <= end for begin, end in self.shared.get(queue, ())):
            return None
        fields = dict(zip(("group", "topic", "broker", "queue_id"), queue, strict=True))
        return {"event": "assign", "process": delivery["process"], **fields, "at_ms": begin_ms}


def _queue_of(event: Event) -> _Queue:
    return event["group"], event.get("stored_in") or event["topic"], event["broker"], event["queue_id"]


def _line(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def recorded_kind(line: bytes) -> str:
    """Return the kind of an event that a process has recorded."""
    return line[10 : line.index(b'"', 10)].decode()  # after {"event":"


def _id(line: bytes) -> bytes:
    """Return the name of a message in a recorded event."""
    return line.partition(b'"id":"')[2].partition(b'"')[0]
