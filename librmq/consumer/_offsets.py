"""Progress of a group: kept at the brokers (clustering), or in a file of the client (broadcasting).

::

    <folder>/<client id>/<group>/offsets.json    {"offsetTable": {{"brokerName", "queueId", "topic"}: queue offset, …}}
    <folder>/<client id>/<group>/offsets.json.bak                its previous content

Mirrors ``RemoteBrokerOffsetStore`` and ``LocalFileOffsetStore``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Final

from librmq.client import Client
from librmq.config import check_reached, to_timestamp_ms
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer.config import StartAt
from librmq.errors import BrokerError, BrokerUnreachableError, ConfigError, MalformedError, RmqError
from librmq.files import Files, file_size
from librmq.files.interface import make_folders
from librmq.java import json as java_json
from librmq.java.json import ObjectKey
from librmq.message import MessageQueue
from librmq.message.topics import TopicPrefix
from librmq.protocol import DescribeQueues, HoldPlace, Place, QueryOffset, StartGroup, StartOutcome, UpdateOffset
from librmq.runtime import ProgressSaver, StateLog
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import Aside

_log = EventLog("librmq.consumer")
_EFFECTS: Final = {
    StartOutcome.MOVED: "has moved it",
    StartOutcome.MOVED_BEFORE: "has no effect, because an earlier start has moved it",
    StartOutcome.NO_QUEUES: "has no effect, because the topic is new: the group gets all its messages",
}
_RETRY_S: Final = 2  # A failed write is tried again within the time of two saves.


class BrokerOffsets:
    """Progress at the brokers, for all instances of the group."""

    def __init__(self, client: Client, group: str, states: StateLog, start_at: StartAt | None) -> None:
        self._client = client
        self._group = group
        self._states = states
        self._start_at = start_at
        self._started: set[tuple[str, str]] = set()

    def start(self, topic: str, broker_name: str) -> None:
        """Let a broker move the group in a topic to ``start_at``, unless it has moved it before.

        A broker whose queues all end before an offset moves the group to their ends, if another broker's do not.

        Raises:
            BrokerError: The broker can't.
            BrokerUnreachableError: It can't be reached; `read` asks again.
            ConfigError: ``start_at`` is an offset beyond the end of every queue.
        """
        at, place = self._start_at, (topic, broker_name)
        if at is None or place in self._started or topic.startswith(TopicPrefix.RETRY):
            return
        request = StartGroup(self._group, topic, client_id=self._client.client_id)
        if isinstance(at, datetime):
            request = replace(request, timestamp_ms=max(0, to_timestamp_ms("start_at", at)))
        elif at != "last":
            request = replace(request, queue_offset=0 if at == "first" else at)
        endpoint = self._client.route.endpoint(broker_name)
        outcome = endpoint.call(request)
        is_beyond = outcome is StartOutcome.BEYOND_END
        if is_beyond and isinstance(at, int):
            check_reached("start_at", at, topic, self._ends(topic))
            outcome = endpoint.call(replace(request, queue_offset=None))
        self._started.add(place)
        _log.log(
            logging.WARNING if is_beyond else logging.INFO,
            "group %(group)s in %(topic)s at %(broker)s: start_at is %(start_at)s, which %(effect)s",
            group=self._group,
            topic=topic,
            broker=broker_name,
            start_at=at,
            effect="is beyond the end of every queue there, so it has moved it to the ends" * is_beyond
            or _EFFECTS[outcome],
        )

    def _ends(self, topic: str) -> list[int]:
        """Return the ends of the topic's queues at all brokers that can be reached."""
        ends = list[int]()
        for name in self._client.route.broker_names():
            with suppress(BrokerError, BrokerUnreachableError):  # the topic need not be at each broker
                bounds = self._client.route.endpoint(name).call(DescribeQueues(topic))
                ends += [part.max_offset for part in bounds.values()]
        return ends

    def read(self, queue: MessageQueue) -> int | None:
        """Ask the broker for the stored progress; None if there is none."""
        self.start(queue.topic, queue.broker_name)
        request = QueryOffset(self._group, queue.topic, queue.queue_id)
        return self._client.route.endpoint(queue.broker_name).call(request)

    def hold(self, queue: MessageQueue, *, was_held: bool = False) -> Place | None:
        """Return the place of a queue that is taken, or ``was_held``.

        None without a page of groups that this process can write.
        """
        endpoint = self._client.route.endpoint(queue.broker_name)
        if not endpoint.has_page:
            return None
        request = HoldPlace(self._group, queue.topic, queue.queue_id, self._client.client_id, was_held)
        place = endpoint.call(request)
        return place if isinstance(place, Place) else None

    def save(self, queues: Iterable[AssignedQueue]) -> bool:
        """Send new progress to the brokers, unless they have later progress; return whether all of it is there."""
        all_stored = True
        for assigned in queues:
            progress, queue = assigned.progress, assigned.queue
            is_kept = assigned.keep()
            if progress is None or progress == assigned.stored_progress:
                if is_kept:
                    self._states.works(_key(queue), f"storing progress at {queue.broker_name}")
                continue
            update, stored = UpdateOffset(self._group, queue.topic, queue.queue_id, progress), None
            try:
                if is_kept:
                    # The page can be further before the owner gets this, so that it may move nothing back.
                    self._client.route.endpoint(queue.broker_name).call(replace(update, only_forward=True))
                else:
                    # Where none was stored, a reader that the broker lost, and does not know, can have stored some.
                    is_unknown = assigned.may_be_passed or assigned.stored_progress is None
                    stored = self.read(queue) if is_unknown and not assigned.is_chosen else None
                    if not stored or stored < progress:
                        self._client.route.endpoint(queue.broker_name).call(update)
                    if assigned.place is None or not assigned.place.advance(progress):  # it was set back
                        assigned.place = self.hold(queue, was_held=True)
            except RmqError as error:
                self._states.failing(_key(queue), f"storing progress at {queue.broker_name}", error)
                all_stored = False
            else:
                assigned.stored_progress, assigned.may_be_passed = progress, (stored or 0) > progress
                assigned.is_chosen = False
                self._states.works(_key(queue), f"storing progress at {queue.broker_name}")
        return all_stored

    save_soon = save


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
        """Read the file, or the copy of its previous content.

        Args:
            folder: Holds the files of all clients.
            client_id: Names a folder in it.
            group: Names a folder in that.
            files: Reads and writes.
            now_ms: The time.
            aside: Writes while other work continues; None writes within `save_soon`.

        Raises:
            ConfigError: ``client_id`` cannot be the name of a folder.
            MalformedError: Neither file is readable.
        """
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
        """Return the stored progress, None if there is none."""
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


Offsets = BrokerOffsets | LocalOffsets
"""Store of the progress of one instance. Called under the runner's lock."""


def _key(queue: MessageQueue) -> tuple[str, ...]:
    return "progress", queue.broker_name


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
