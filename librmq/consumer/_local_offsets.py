"""Progress of a broadcasting client, in a file of its own.

::

    <folder>/<client id>/<group>/offsets.json    {"offsetTable": {{"brokerName", "queueId", "topic"}: queue offset, …}}
    <folder>/<client id>/<group>/offsets.json.bak                its previous content

Mirrors ``LocalFileOffsetStore``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Final

from librmq.consumer._assignment import AssignedQueue
from librmq.errors import ConfigError, MalformedError, RmqError
from librmq.files import Files, file_size
from librmq.files.interface import make_folders
from librmq.java import json as java_json
from librmq.java.json import ObjectKey
from librmq.message import MessageQueue
from librmq.runtime import ProgressSaver
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import Aside

_log = EventLog("librmq.consumer")
_RETRY_S: Final = 2  # A failed write is tried again within the time of two saves.


class LocalOffsets:
    """Progress in a file, of this client alone."""

    def __init__(
        self,
        folder: str,
        client_id: str,
        group: str,
        files: Files,
        now_ms: Callable[[], int],
        aside: Aside | None,
    ) -> None:
        """Read the file, or the copy of its previous content; without ``aside`` `save_soon` writes by itself."""
        if os.path.basename(client_id) != client_id:
            raise ConfigError(f"instance_name: {client_id!r} can't be the name of a folder")
        self.path: str = os.path.join(folder, client_id, group, "offsets.json")
        self._files = files
        self._now_ms = now_ms
        self._process = os.getpid()
        self._unwritten: dict[AssignedQueue, int] = {}
        self._saver = ProgressSaver(
            f"progress in {self.path}",
            flush=self._write_file,
            reached=self._reached,
            note=self._written,
            now_ms=now_ms,
            save_every_s=0,
            retry_s=_RETRY_S,
            aside=aside,
        )
        self._table = self._load_table()

    def _load_table(self) -> dict[MessageQueue, int]:
        problem: MalformedError | None = None
        for path in (self.path, self.path + ".bak"):
            if file_size(self._files, path):
                try:
                    return _table(java_json.loads(self._files.read(path)))
                except MalformedError as error:
                    _log.warning("%(path)s: %(error)s", path=path, error=error)
                    problem = problem or MalformedError(
                        f"{path}: {error}: correct the file, or delete it to start by consume_from"
                    )
        if problem is not None:
            raise problem
        return {}

    def read(self, queue: MessageQueue) -> int | None:
        return self._table.get(queue)

    def hold(self, queue: MessageQueue, *, was_held: bool = False) -> None:
        """Return None: this progress is on no page."""

    def save(self, queues: Iterable[AssignedQueue]) -> bool:
        """Write new progress to the file, and return whether all is there."""
        if not self._has_new(queues):
            return True
        try:
            self._saver.save()
        except RmqError as error:
            _log.warning("storing progress in %(path)s fails: %(error)s", path=self.path, error=error)
            return False
        return True

    def save_soon(self, queues: Iterable[AssignedQueue]) -> bool:
        """Write progress while other work continues, and return whether all is there."""
        if self._has_new(queues):
            self._saver.run_due(self._now_ms())
        return not self._unwritten

    def _has_new(self, queues: Iterable[AssignedQueue]) -> bool:
        """Add new progress to the table, and return whether there is any to write."""
        for assigned in queues:
            if assigned.progress is not None and assigned.progress != assigned.stored_progress:
                self._table[assigned.queue] = self._unwritten[assigned] = assigned.progress
        return bool(self._unwritten) and os.getpid() == self._process  # After a fork the file belongs to the parent.

    def _reached(self) -> tuple[dict[AssignedQueue, int], bytes] | None:
        """Return what is not written yet, with the whole table as it is written."""
        if not self._unwritten:
            return None
        rows = {
            ObjectKey((("brokerName", queue.broker_name), ("queueId", queue.queue_id), ("topic", queue.topic))): offset
            for queue, offset in sorted(self._table.items())
        }
        return dict(self._unwritten), java_json.dumps({"offsetTable": rows}).encode()

    def _write_file(self, reached: tuple[dict[AssignedQueue, int], bytes]) -> None:
        make_folders(self._files, os.path.dirname(self.path))
        if file_size(self._files, self.path):
            self._files.write(self.path + ".bak", self._files.read(self.path))
        self._files.write(self.path, reached[1])

    def _written(self, reached: tuple[dict[AssignedQueue, int], bytes]) -> None:
        for assigned, progress in reached[0].items():
            assigned.stored_progress, assigned.may_be_passed = progress, False
            if self._unwritten.get(assigned) == progress:
                del self._unwritten[assigned]


def _table(document: object) -> dict[MessageQueue, int]:
    rows = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(rows, dict):
        raise MalformedError("expected an object with an offsetTable")
    table = {}
    for key, queue_offset in rows.items():
        fields = dict(key) if isinstance(key, ObjectKey) else {}
        topic, broker_name, queue_id = (fields.get(name) for name in ("topic", "brokerName", "queueId"))
        if not (isinstance(topic, str) and isinstance(broker_name, str) and isinstance(queue_id, int)):
            raise MalformedError(f"offsetTable: {key!r:.200} is not a queue")
        if not isinstance(queue_offset, int) or isinstance(queue_offset, bool) or queue_offset < 0:
            raise MalformedError(f"offsetTable: {queue_offset!r:.200} is not a queue offset of 0 or more")
        table[MessageQueue(topic, broker_name, queue_id)] = queue_offset
    return table
