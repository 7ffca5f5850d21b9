"""Histories of jobs that write to a store, and of groups that read it afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, repeat
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from librmq import MessageStore
from librmq.testing import Anomaly, check_history

Event = dict[str, Any]


class Row(NamedTuple):
    """A message, and where a job writes it or a group reads it."""

    topic: str
    queue_id: int
    queue_offset: int
    body: bytes

    def event(self, kind: str, **fields: object) -> Event:
        """Return an event in the row's queue, at its offset unless ``fields`` have another."""
        place = {"topic": self.topic, "broker": "store", "queue_id": self.queue_id, "queue_offset": self.queue_offset}
        return {"event": kind, **place, **fields}


def ends_of(rows: Iterable[Row]) -> dict[tuple[str, int], int]:
    """Return the offset after the last message of each queue."""
    return {(row.topic, row.queue_id): row.queue_offset + 1 for row in sorted(rows)}


class JobHistory:
    """What jobs write to the store in a folder, and what groups read there.

    Messages are named by their bodies, so these differ. What the store holds at first must stay where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self._times, self._groups = count(), count()
        with Job(self, self._by_queues()):
            pass

    def job(self, topic: str, bodies: Iterable[bytes], queue_ids: Iterable[int] = repeat(0)) -> Job:
        """Begin a job whose messages follow those that are now in their queues."""
        ends = ends_of(self._by_queues())
        rows = []
        for body, queue_id in zip(bodies, queue_ids, strict=False):
            queue_offset = ends.get((topic, queue_id), 0)
            rows.append(Row(topic, queue_id, queue_offset, body))
            ends[topic, queue_id] = queue_offset + 1
        return Job(self, rows)

    def anomalies(self, *reads: Iterable[Row]) -> list[Anomaly]:
        """Let a new group make each of the reads, to the ends of all queues, and return what is wrong so far.

        Without any, one group reads the store by its queues, and one by its log, which has also what is in no queue
        yet, but would be after a recovery.
        """
        topics = sorted({event["topic"] for event in self.events if event["event"] == "send"})
        for rows in reads or (self._by_queues(), self._by_log()):
            group = f"group-{next(self._groups)}"
            self.events.append({"event": "group", "group": group, "topics": topics})
            for row in rows:
                fields = {"process": group, "group": group, "id": row.body.decode(), "attempt": 0, "outcome": "ok"}
                self.events.append(row.event("deliver", **fields, begin_ms=self.now_ms(), end_ms=self.now_ms()))
            for (topic, queue_id), end in ends_of(rows).items():
                commit = Row(topic, queue_id, end, b"").event("commit", group=group, at_ms=self.now_ms())
                self.events.append(commit)
            self.events.append({"event": "drained", "group": group, "at_ms": self.now_ms()})
        return check_history(self.events)

    def now_ms(self) -> int:
        """Return a time after all earlier ones."""
        return next(self._times)

    def _by_queues(self) -> list[Row]:
        if not self.path.exists():
            return []
        with MessageStore.open(self.path, read_only=True) as store:
            return [
                Row(*queue, queue_offset, message.body)
                for queue in store.queues
                for queue_offset, message in enumerate(store.messages(*queue), store.queue_range(*queue)[0])
            ]

    def _by_log(self) -> list[Row]:
        with MessageStore.open(self.path, read_only=True) as store:
            return [Row(message.topic, message.queue_id, message.queue_offset, message.body) for message in store]


class Job:
    """A job that writes each of its messages once.

    It ends as its ``with`` block does; another block repeats the same job. Before its end, as when it is killed, its
    messages may be stored or not.
    """

    def __init__(self, history: JobHistory, rows: list[Row]) -> None:
        self._history = history
        self._rows = rows
        now_ms = history.now_ms()
        send = {"event": "send", "process": "jobs", "begin_ms": now_ms, "end_ms": now_ms, "outcome": "unknown"}
        self._sends: list[Event] = [{**send, "id": row.body.decode(), "topic": row.topic} for row in rows]
        history.events += self._sends

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        now_ms = self._history.now_ms()
        for send, row in zip(self._sends, self._rows, strict=True):
            end: Event = {"outcome": "failed"} if error is not None else row.event("send", outcome="ok")
            send |= {"end_ms": now_ms, **end}
