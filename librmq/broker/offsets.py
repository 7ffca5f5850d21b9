"""Progress of consumer groups, kept in ``consumerOffset.json``.

Mirrors ``ConsumerOffsetManager``. Called under the runner's lock; `GroupOffsets.get`, `groups` and `of_topic` do not
need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from librmq.errors import BrokerError
from librmq.protocol import ResponseCode
from librmq.runtime.event_log import EventLog
from librmq.store.format.broker_tables import ConfigTable

_log = EventLog("librmq.broker")


class GroupOffsets:
    """The queue offset of the next message, by group, topic and queue."""

    def __init__(
        self, table: ConfigTable, save: Callable[[ConfigTable, int], None], changed: Callable[[], None]
    ) -> None:
        """Use a table, and report its changes.

        Args:
            table: The rows of ``consumerOffset.json``.
            save: ``save(table, now_ms)`` writes a table.
            changed: Called after the first change since the last `save`.
        """
        self._table = table
        self._save = save
        self._changed = changed
        self.has_changed = False
        """Whether there are unsaved changes."""
        self.moved_back = set[tuple[str, str]]()
        """Groups and topics in which progress went back, as after a reset."""
        self._rows: dict[tuple[str, str], dict[int, int]] = {}  # rows of the table in use

    def of_topic(self, group: str, topic: str) -> Mapping[int, int]:
        """Return a group's queue offsets in a topic, by queue id; empty without any."""
        return self._rows.get((group, topic)) or self._table.rows.get(f"{topic}@{group}", {})

    def groups(self, topic: str) -> list[str]:
        """Return the groups that have progress in a topic."""
        rows = (name.rpartition("@") for name in list(self._table.rows))
        return [group for row_topic, _, group in rows if row_topic == topic]

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return a group's queue offset, None if never stored."""
        return self.of_topic(group, topic).get(queue_id)

    def set(self, group: str, topic: str, queue_id: int, queue_offset: int) -> None:
        """Store a group's queue offset; a lower one is allowed, and logged."""
        row = self._rows.get((group, topic))
        if row is None:
            row = self._rows[group, topic] = self._table.rows.setdefault(f"{topic}@{group}", {})
        old = row.get(queue_id, -1)
        if old == queue_offset:
            return
        if queue_offset < 0 or queue_id < 0:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR,
                f"group {group!r}, topic {topic!r}: expected a queue id and a queue offset of 0 or more, "
                f"found {queue_id} and {queue_offset}",
            )
        if queue_offset < old:
            self.moved_back.add((group, topic))
            _log.info(
                "group %(group)s: progress in %(topic)s/%(queue_id)d goes back from %(old)d to %(queue_offset)d",
                group=group,
                topic=topic,
                queue_id=queue_id,
                old=old,
                queue_offset=queue_offset,
            )
        row[queue_id] = queue_offset
        if not self.has_changed:
            self._changed()
            self.has_changed = True

    def merge(self, rows: Mapping[str, Mapping[int, int]]) -> None:
        """Merge a master's progress, by ``topic@group``; progress that only this table has stays."""
        for name, row in rows.items():
            if self._table.rows.get(name) != row:
                topic, _, group = name.rpartition("@")
                self._rows.pop((group, topic), None)
                self._table.rows[name] = dict(row)
                if not self.has_changed:
                    self._changed()
                    self.has_changed = True

    def delete_queue(self, topic: str, queue_id: int) -> None:
        """Delete the groups' progress in a deleted queue."""
        for group in self.groups(topic):
            row = self._table.rows[f"{topic}@{group}"]
            if row.pop(queue_id, None) is not None and not self.has_changed:
                self._changed()
                self.has_changed = True
            if not row:
                self._table.remove(f"{topic}@{group}")
                self._rows.pop((group, topic), None)

    def drop_group(self, group: str) -> None:
        """Delete a group's progress in all topics."""
        for name in [name for name in self._table.rows if name.rpartition("@")[2] == group]:
            self._table.remove(name)
            self._rows.pop((group, name.rpartition("@")[0]), None)
            if not self.has_changed:
                self._changed()
                self.has_changed = True

    def clamp(self, end_of: Callable[[str, int], int]) -> None:
        """Limit all progress to the ends of the queues.

        A crash of the machine can lose consumed messages. The next messages get their queue offsets, and must not be
        skipped. Another process can have recovered the store, so this does not depend on the abort marker.
        """
        for name, row in self._table.rows.items():
            topic, _, group = name.rpartition("@")
            for queue_id, queue_offset in list(row.items()):
                end = end_of(topic, queue_id)
                if queue_offset > end:
                    _log.warning(
                        "group %(group)s: progress in %(topic)s/%(queue_id)d was %(old)d, beyond the queue's end: "
                        "set to %(queue_offset)d",
                        group=group,
                        topic=topic,
                        queue_id=queue_id,
                        old=queue_offset,
                        queue_offset=end,
                    )
                    self.set(group, topic, queue_id, end)

    def save(self, now_ms: int) -> None:
        """Save changes, if there are any."""
        if self.has_changed:
            self._save(self._table, now_ms)
            self.has_changed = False
