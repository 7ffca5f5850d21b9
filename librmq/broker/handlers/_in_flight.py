"""Messages in flight: received by a group from a queue, but not acknowledged.

Mirrors the notes of ``PopCheckPoint`` and ``ConsumerOrderInfoManager`` of 5.x, but in memory.

::

    queue    … 17 18 19 20 21 22 23 24 …
                  │     │  │     └─ next_offset: where the next receive reads
                  │     └──┴─ in flight
                  └─ in flight, and the smallest: committed, the progress of the group
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Self

from librmq.broker._context import BrokerContext
from librmq.broker._offsets import DelayedSave
from librmq.errors import BrokerError, CorruptionError
from librmq.files import file_size
from librmq.message.ids import Receipt
from librmq.message.topics import receive_retry_topic
from librmq.protocol import ResponseCode
from librmq.runtime.event_log import EventLog
from librmq.store.format.broker_tables import ConfigTable

_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_SAVED_FIELDS: Final = 6


def is_receive_retry(group: str, topic: str) -> bool:
    """Return whether ``topic`` is one of a group's `receive_retry_topic`."""
    return topic.startswith(receive_retry_topic(group, ""))


class RetryOwners:
    """The group that owns each retry topic.

    Two pairs can share a name: group ``a`` with topic ``b_c``, and group ``a_b`` with topic ``c``.
    """

    def __init__(self, groups: Callable[[str], Iterable[str]]) -> None:
        """``groups(topic)`` returns the groups with progress in a topic."""
        self._groups = groups
        self._owners: dict[str, str] = {}

    def check_owner(self, group: str, topic: str) -> None:
        """Refuse a group whose retry topic belongs to another group: each would get the other's messages.

        Raises:
            BrokerError: Another group owns the retry topic.
        """
        retries = receive_retry_topic(group, topic)
        owner = self._owners.get(retries)
        if owner is None:
            owner = next((other for other in self._groups(retries) if other != group), group)
            self._owners[retries] = owner
        if owner != group:
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"group {group!r} can't receive from topic {topic!r}: its retry topic {retries!r} belongs to group "
                f"{owner!r}, and each would get the other's messages; give one of the groups another name",
            )


class Flight:
    __slots__ = ("attempt", "invisible_ms", "physical_offset", "received_ms", "visible_ms")

    def __init__(
        self, physical_offset: int, received_ms: int, invisible_ms: int, attempt: int, visible_ms: int | None = None
    ) -> None:
        self.physical_offset = physical_offset
        self.received_ms = received_ms
        """Time of the delivery, which its receipt names like `invisible_ms`."""
        self.invisible_ms = invisible_ms
        self.attempt = attempt
        """1 for the first delivery."""
        self.visible_ms = received_ms + invisible_ms if visible_ms is None else visible_ms
        """Time of the next delivery unless it is acknowledged; renewals move it beyond the time in the receipt."""

    def has(self, receipt: Receipt) -> bool:
        """Return whether a receipt is the latest one."""
        return self.received_ms == receipt.received_ms and self.invisible_ms == receipt.invisible_ms


class QueueFlights:
    """The messages in flight in one queue for one group. Called under the runner's lock."""

    __slots__ = ("attempt_id", "committed", "counts", "flights", "next_offset")

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset
        self.committed = next_offset
        """The last stored progress; if the table differs, a reset or another consumer has moved it."""
        self.flights: dict[int, Flight] = {}
        """Flights by queue offset, in order."""
        self.counts: dict[int, int] = {}
        """Deliveries by queue offset, for messages in order that the progress has not passed."""
        self.attempt_id = ""

    @property
    def progress(self) -> int:
        """The smallest unacknowledged queue offset."""
        return next(iter(self.flights), self.next_offset)

    def add_flight(self, queue_offset: int, flight: Flight, *, is_ordered: bool = False) -> None:
        """Note a delivery; queue offsets only rise until `read_again`."""
        self.flights[queue_offset] = flight
        if is_ordered:
            self.counts[queue_offset] = flight.attempt

    def remove_flight(self, queue_offset: int) -> None:
        """Remove a message that was processed."""
        del self.flights[queue_offset]
        if self.counts:
            first = self.progress
            self.counts = {offset: count for offset, count in self.counts.items() if offset >= first}

    def is_locked(self, now_ms: int) -> bool:
        """Return whether a queue in order waits for the end of a delivery."""
        return any(flight.visible_ms > now_ms for flight in self.flights.values())

    def read_again(self) -> None:
        """Read a queue in order again from the first unacknowledged message.

        As in 5.x (``ConsumerOrderInfoManager``) acknowledged messages behind it are delivered again too.
        """
        self.next_offset = self.progress
        self.flights.clear()

    @property
    def has_notes(self) -> bool:
        """Whether there is anything to save beside the progress."""
        return bool(self.flights or self.counts)

    def to_row(self) -> dict[str, Any]:
        """Return the saved form."""
        row = {
            "committed": self.progress,
            "next": self.next_offset,
            "flights": ",".join(  # one text: a JSON list of as many numbers takes seconds
                [
                    f"{offset} {f.physical_offset} {f.received_ms} {f.invisible_ms} {f.attempt} {f.visible_ms}"
                    for offset, f in self.flights.items()
                ]
            ),
        }
        if self.counts:
            row["counts"] = ",".join(f"{offset} {count}" for offset, count in self.counts.items())
        return row

    @classmethod
    def of_row(cls, row: Any, progress: int, end: int) -> Self:  # noqa: ANN401 (it comes from a file)
        """Return the state in a saved row.

        Args:
            row: A result of `to_row`, or anything else.
            progress: The stored progress of the group. If it is smaller than the row's, the row is newer or the group
                was reset, so everything from there on is visible.
            end: The queue's end; a crash of the machine can have lost messages.
        """
        queue = cls(progress)
        saved = _saved_flights(row)
        if saved is None or row["committed"] > progress:
            return queue
        queue.next_offset = min(max(row["next"], progress), max(end, progress))
        for offset, physical, received, invisible, attempt, visible in saved:
            if progress <= offset < queue.next_offset:
                queue.flights[offset] = Flight(physical, received, invisible, attempt, visible)
        queue.counts = {offset: count for offset, count in _numbers(row.get("counts"), 2) or () if offset >= progress}
        return queue


def _saved_flights(row: Any) -> list[list[int]] | None:  # noqa: ANN401 (it comes from a file)
    """Return the numbers of a row's flights by queue offset; None for an invalid row."""
    if not isinstance(row, dict):
        return None
    if not all(type(row.get(name)) is int and row[name] >= 0 for name in ("committed", "next")):
        return None
    return _numbers(row.get("flights"), _SAVED_FIELDS)


def _numbers(text: object, fields: int) -> list[list[int]] | None:
    """Return the numbers in a text, sorted, in groups of ``fields`` each; None for anything else."""
    if not isinstance(text, str):
        return None
    groups = [group.split(" ") for group in text.split(",") if group]
    if not all(len(group) == fields and all(map(_NUMBER.fullmatch, group)) for group in groups):
        return None
    return sorted(list(map(int, group)) for group in groups)


# ---- the file of messages in flight
#
#     librmq/receives.json    {"receives": {"version": 1, "queues": {"group@topic@queue id":
#                                 {"committed", "next", "flights"}}}}
#                             flights: "queue offset, physical offset, received ms, invisible ms, attempt, visible ms",
#                             separated by blanks, messages by commas; for a queue in order also "counts" (queue
#                             offset, deliveries)

_log = EventLog("librmq.broker")

QueueKey = tuple[str, str, int]
"""Group, topic of the queue, queue id."""
_FILE: Final = os.path.join("librmq", "receives.json")
_VERSION: Final = 1


class SavedFlights:
    """The file of one broker, which is librmq's own and is saved with the progress of groups.

    The broker of 4.9 ignores it. Without it, messages in flight are delivered again immediately. Called under the
    runner's lock.
    """

    def __init__(self, context: BrokerContext, queues: Mapping[QueueKey, QueueFlights]) -> None:
        """``queues`` are the messages in flight, which change."""
        self._context = context
        self._queues = queues
        self._table = _table(context)
        self._rows: dict[str, Any] = dict(self._table.rows["queues"])  # rows that were not taken yet
        runner = context.runner
        step = context.step("saves what is in flight")
        self.saving = DelayedSave(
            "what is in flight",
            self._save,
            runner.now_ms,
            context.config.save_offsets_every_s,
            partial(runner.wake, step),
        )
        step.run_due = self.saving.saver.run_due

    def __iter__(self) -> Iterator[QueueKey]:
        """Iterate over the queues in the file."""
        for name in list(self._rows):
            group, _, queue_name = name.partition("@")
            topic, _, queue_id = queue_name.rpartition("@")
            if queue_id.isdecimal() and queue_id.isascii():
                yield group, topic, int(queue_id)

    def pop_row(self, key: QueueKey) -> object:
        """Return the row of a queue, once; None if there is none."""
        return self._rows.pop(_name(key), None)

    def _save(self) -> None:
        self._fill()
        self._context.writing.save(self._table, self._context.runner.now_ms(), after_flush=True)

    def _fill(self) -> None:
        rows = {_name(key): queue.to_row() for key, queue in self._queues.items() if queue.has_notes}
        self._table.rows["queues"] = {**self._rows, **rows}

    def save_all(self) -> None:
        """Save for the last time."""
        if self.saving.has_changed:
            self._fill()
            self._context.store.flush()
            self._table.persist(self._context.runner.now_ms())


def _name(key: QueueKey) -> str:
    return f"{key[0]}@{key[1]}@{key[2]}"


def _table(context: BrokerContext) -> ConfigTable:
    """Read the saved file; an unreadable one counts as missing."""
    path, files = os.path.join(context.store.path, _FILE), context.store.files
    try:
        return ConfigTable(path, "receives", _check_rows, False, files)
    except CorruptionError as error:
        _log.warning(
            "%(broker)s: messages in flight are unknown, so they are delivered again: %(error)s",
            broker=context.name,
            error=error,
        )
        for damaged in (path, f"{path}.bak"):
            if file_size(files, damaged) is not None:
                files.delete(damaged)
        return ConfigTable(path, "receives", _check_rows, False, files)


def _check_rows(rows: dict[Any, Any]) -> dict[Any, Any]:
    """Return the rows of this version; the rows of other versions are dropped."""
    queues = rows.get("queues")
    if rows.get("version") != _VERSION or not isinstance(queues, dict):
        queues = {}
    return {"version": _VERSION, "queues": {name: row for name, row in queues.items() if isinstance(name, str)}}
