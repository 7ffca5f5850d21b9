"""A store that a running process owns and shares, read and changed through that process.

::

    commands that read     the files, which have the owner's messages, and its tables as they are now
    commands that change   requests to the owner, which tells the clients of all processes
    with --dry-run         the same without the requests; notes are kept in memory

Notes of skips and of dead letters sent again are written by the command itself, under a lock that the owner takes too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, Final, Literal

from librmq.errors import BrokerUnreachableError
from librmq.files.disk import DiskFiles
from librmq.files.memory import OverlayFiles
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import dead_letter_topic, validate_client_topic, validate_group
from librmq.protocol import (
    LOCAL_HOST,
    PERM_READ,
    PERM_WRITE,
    CancelMessage,
    CancelResult,
    CreateTopic,
    DeleteGroup,
    DeleteTopic,
    QueueData,
    ResetGroup,
    SendMessage,
    SetGroup,
    TopicDescription,
    UpdateOffset,
)
from librmq.protocol.client_requests import INNER_PRODUCER
from librmq.store import MessageStore
from librmq.store.format.broker_tables import BrokerTables, topic_type
from librmq.store.format.directory import CONFIG
from librmq.wire.remote import RemoteRoute
from librmq.wire.remote.administration import connections, tables
from librmq.wire.share_links import connect_to_owner
from librmq.wire.unix_sockets import share_folder

_END: Final = (1 << 63) - 1


@contextmanager
def owner_of(path: str, *, dry_run: bool = False) -> Iterator[OwnedStore | None]:
    """Connect to the process that owns and shares a store; None if there is no such process.

    With ``dry_run`` nothing is changed there.

    Raises:
        BrokerUnreachableError: It is stopped, or does not answer.
    """
    with ExitStack() as opened:
        try:
            route = connect_to_owner(path)
        except BrokerUnreachableError:
            if DiskFiles().lock_holder(os.path.join(share_folder(path), "lock")) is not None:
                raise
            yield None
            return
        opened.callback(route.close)
        yield OwnedStore(path, route, opened, dry_run)


class OwnerTables(BrokerTables):
    """The tables of an owner, of which `persist` sends the changes to it. Not thread-safe."""

    def __init__(self, path: str, route: RemoteRoute) -> None:
        """Ask the owner for them."""
        super().__init__(os.path.join(path, CONFIG), DiskFiles())
        (name,) = route.broker_names()
        self._broker = route.broker(name)
        self._moved: dict[tuple[str, str, int], int] = {}
        topics, groups, offsets = tables(self._broker)
        self.topics.replace(topics)
        self.groups.replace(groups)
        self.offsets.replace({key: {int(queue_id): at for queue_id, at in row.items()} for key, row in offsets.items()})
        self._before = self._rows()
        self.offsets.is_stored = self.delays.is_stored = True  # the owner's answers, before its first save too

    def _rows(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return dict(self.topics.rows), dict(self.groups.rows), dict(self.offsets.rows)

    def set_consumer_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Set a group's progress in a queue, also if the stored progress is the same: instances can be further."""
        super().set_consumer_offset(topic, group, queue_id, queue_offset)
        self._moved[topic, group, queue_id] = queue_offset

    def persist(self, now_ms: int) -> None:
        """Send the changes to the owner.

        Raises:
            BrokerError: It refuses one.
        """
        call = self._broker.call
        topics, groups, offsets = self._before
        changed_topics = _changed(topics, self.topics.rows)
        for topic in topics.keys() - self.topics.rows.keys():
            call(DeleteTopic(topic))
        for topic, row in changed_topics.items():
            kind = topic_type(row) if row.get("attributes") != topics.get(topic, {}).get("attributes") else None
            call(CreateTopic(topic, row["readQueueNums"], row["writeQueueNums"], row["perm"], kind))
        for group, row in _changed(groups, self.groups.rows).items():
            call(SetGroup(group, row))
        for group in _groups(groups, offsets) - _groups(self.groups.rows, self.offsets.rows):
            if group not in groups:
                call(SetGroup(group, {}))  # only a group with settings can be deleted
            call(DeleteGroup(group, removes_progress=True))
        moved, self._moved = self._moved, {}
        for (topic, group, queue_id), queue_offset in moved.items():
            call(ResetGroup(group, topic, -1, queue_id=queue_id, queue_offset=queue_offset))
        for key in self.offsets.rows.keys() - offsets.keys():  # the group is new, so it has no instances
            topic, _, group = key.rpartition("@")
            for queue_id, queue_offset in self.offsets.rows[key].items():
                if (topic, group, queue_id) not in moved:
                    call(UpdateOffset(group, topic, queue_id, queue_offset))
        self._before = self._rows()


def _changed(before: dict[Any, Any], rows: dict[Any, Any]) -> dict[Any, Any]:
    return {key: row for key, row in rows.items() if before.get(key) != row}


def _groups(rows: dict[Any, Any], offsets: dict[Any, Any]) -> set[str]:
    return rows.keys() | {key.rpartition("@")[2] for key in offsets}


class OwnedStore:
    """A store and its owner, with the methods of `librmq.Broker` that commands use. Not thread-safe."""

    def __init__(self, path: str, route: RemoteRoute, opened: ExitStack, dry_run: bool) -> None:
        """Ask the owner for its tables; ``opened`` closes the store. With ``dry_run`` requests are left out."""
        (self._name,) = route.broker_names()
        self._path, self._opened, self._dry_run = path, opened, dry_run
        self._previewed: dict[str, TopicDescription] = {}  # topics that a dry run would create
        self.route = route
        self.runner = route.runner
        self.call: Any = (lambda _: None) if dry_run else route.broker(self._name).call
        self.tables = OwnerTables(path, route)

    def connections(self) -> tuple[int, list[tuple[str, int]]]:
        """Return when the owner began, and host and begin (ms) of each connection."""
        return connections(self.route.broker(self._name))

    @cached_property
    def store(self) -> MessageStore:
        """The store, opened for reading at the first use: commands that read open it by themselves."""
        files = OverlayFiles() if self._dry_run else DiskFiles()
        return self._opened.enter_context(MessageStore.open(self._path, read_only=True, files=files))

    def store_retry(self, copy: Message, retry: StoredMessage) -> int:
        """Store a copy of a retry for another group, which the tables have; return its queue offset."""
        if self._dry_run:
            return 0
        self.tables.persist(self.runner.now_ms())  # the group, before it has messages
        times = retry.reconsume_times
        send = SendMessage(
            INNER_PRODUCER,
            copy,
            0,
            retry.born_timestamp_ms,
            retry.born_host or LOCAL_HOST,
            retry.sys_flag,
            reconsume_times=times,
            max_reconsume_times=times + 1,  # however many attempts it has had
        )
        queue_offset: int = self.call(send).queue_offset
        return queue_offset

    def topics(self) -> dict[str, TopicDescription]:
        """Return all topics by name, including the broker's own."""
        return self.route.topics() | self._previewed

    def create_topic(self, topic: str, queues: int) -> None:
        """Create a topic."""
        validate_client_topic(topic)
        if self._dry_run:
            data = QueueData(self._name, queues, queues, PERM_READ | PERM_WRITE)
            self._previewed[topic] = TopicDescription(topic, (data,))
        self.call(CreateTopic(topic, queues, queues))

    def set_group(self, group: str) -> None:
        """Create a group, or leave it as it is."""
        validate_group(group)
        self.call(SetGroup(group, self.tables.groups.rows.get(group, {})))

    def consumer_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return a group's stored progress in a topic, by queue id."""
        return self.route.consumer_offsets(group, topic)  # as it is now: the group may be running

    def reset_group(self, group: str, topic: str, to: Literal["end"] | int, *, queue_id: int) -> None:
        """Move a running or stopped group in a queue."""
        queue_offset = _END if to == "end" else to
        self.call(ResetGroup(group, topic, -1, queue_id=queue_id, queue_offset=queue_offset))

    def cancel(self, message_id: str) -> CancelResult:
        """Cancel the delivery of a message that waits."""
        return self.route.broker(self._name).call(CancelMessage(message_id, dry_run=self._dry_run))

    def find_by_id(self, message_id: str) -> StoredMessage | None:
        """Return the first record with an id; None if there is none."""
        return next(iter(self.store.find_by_id(message_id)), None)

    def dead_letters(self, group: str) -> list[StoredMessage]:
        """Return a consumer group's dead letters."""
        topic = dead_letter_topic(group)
        names = sorted(name for name in self.store.queues if name[0] == topic)
        return [letter for name in names for letter in self.store.messages(*name)]

    def resend_dead_letters(self, group: str, letters: list[StoredMessage]) -> int:
        """Send dead letters to their group again."""
        return 0 if self._dry_run else self.route.resend_dead_letters(group, letters)
