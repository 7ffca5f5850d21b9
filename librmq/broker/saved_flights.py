"""Messages in flight, in a file of librmq's own that is saved with the progress of groups.

::

    librmq/receives.json    {"receives": {"version": 1, "queues": {"group@topic@queue id":
                                {"committed", "next", "flights"}}}}
                            flights: "queue offset, physical offset, received ms, invisible ms, attempt, visible ms",
                            separated by blanks, messages by commas; for a queue in order also "acknowledged" (queue
                            offsets) and "counts" (queue offset, deliveries) of messages that are read again

The broker of 4.9 ignores the file. Without it, messages in flight are delivered again immediately.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from librmq.broker.context import BrokerContext
from librmq.broker.in_flight import QueueFlights
from librmq.errors import CorruptionError
from librmq.runtime.event_log import EventLog
from librmq.runtime.flush_aside import FlushAside
from librmq.store.format.broker_tables import ConfigTable

_log = EventLog("librmq.broker")

QueueKey = tuple[str, str, int]
"""Group, topic of the queue, queue id."""
_FILE: Final = os.path.join("librmq", "receives.json")
_VERSION: Final = 1


class SavedFlights:
    """The file of one broker. Called under the runner's lock."""

    def __init__(self, context: BrokerContext, queues: Mapping[QueueKey, QueueFlights]) -> None:
        """``queues`` are the messages in flight, which change."""
        self._context = context
        self._queues = queues
        self._table = _table(context)
        self._rows: dict[str, Any] = dict(self._table.rows["queues"])  # rows that were not taken yet
        self._has_changed = False
        self._saver = FlushAside(
            "what is in flight",
            flush=lambda reached: None,  # `TableWriter` flushes the store before this table
            reached=lambda: self._has_changed or None,
            note=lambda reached: self._save(),
            now_ms=context.runner.now_ms,
            save_every_s=context.config.save_offsets_every_s,
        )
        self._step = context.steps.step("saves what is in flight", self._saver.run_due)

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

    def changed(self) -> None:
        """Save the file soon."""
        if not self._has_changed:
            self._has_changed = True
            due = self._saver.changed()
            if due is not None:
                self._context.runner.wake(self._step, due)

    def _save(self) -> None:
        self._fill()
        self._context.writing.save(self._table, self._context.runner.now_ms(), after_flush=True)
        self._has_changed = False

    def _fill(self) -> None:
        rows = {_name(key): queue.to_row() for key, queue in self._queues.items() if queue.has_notes}
        self._table.rows["queues"] = {**self._rows, **rows}

    def save_all(self) -> None:
        """Save for the last time."""
        if self._has_changed:
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
            if files.size(damaged) is not None:
                files.delete(damaged)
        return ConfigTable(path, "receives", _check_rows, False, files)


def _check_rows(rows: dict[Any, Any]) -> dict[Any, Any]:
    """Return the rows of this version; the rows of other versions are dropped."""
    queues = rows.get("queues")
    if rows.get("version") != _VERSION or not isinstance(queues, dict):
        queues = {}
    return {"version": _VERSION, "queues": {name: row for name, row in queues.items() if isinstance(name, str)}}
