"""Progress of consumer groups, on the page of groups and in ``consumerOffset.json``, and saving of a broker's tables.

Progress is on the page (`librmq.store.format.group_page`) before anything is answered that depends on it. The table is
its export, for other brokers and for a loss of power. Topics and groups are saved immediately, consumers' progress and
filters some time after a change. With a threaded runner, no thread waits for the disk under the runner's lock:
`TableWriter` copies a table under the lock and writes the copy without it.

Mirrors ``ConsumerOffsetManager`` and the schedule of ``BrokerController``. Called under the runner's lock;
`GroupOffsets.consumer_offset`, `groups` and `of_topic` do not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from librmq.errors import BrokerError, StoreClosedError, StoreIOError
from librmq.formatting import NAMED
from librmq.protocol import Place, PlaceName, ResponseCode
from librmq.runtime import ProgressSaver, StateLog, critical
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.runtime.runner import Aside
from librmq.store import BrokerTables
from librmq.store.format.broker_tables import ConfigTable, DelayedSave, progress_of, topic_and_group

_log = EventLog("librmq.broker")
_KEEPING: Final = "keeping progress on the page of groups, not only in the table"


class GroupOffsets:
    """The queue offset of the next message, by group, topic and queue."""

    def __init__(
        self,
        tables: BrokerTables,
        writing: TableWriter,
        now_ms: Callable[[], int],
        save_every_s: float,
        wake: Callable[[int], None],
        flush: Callable[[], object] | None,
    ) -> None:
        """``wake(at_ms)`` makes the runner call ``saving.saver.run_due`` by then.

        ``flush()`` flushes the store; a replica has none, and no page of groups.
        """
        self._writing = writing
        self._now_ms = now_ms
        self._table = table = tables.offsets
        table.rows  # noqa: B018 (makes them, before several threads ask for them)
        self.page = page = None if flush is None else tables.kept_page(flush)
        """The page of groups; None for a replica, and after the end."""
        self._places: dict[tuple[str, str], dict[int, Place]] = {} if page is None else page.places
        self._states = StateLog(_log, "progress")

        def wake_saver(at_ms: int) -> None:
            writing.notify_watchers()
            wake(at_ms)

        self.saving = saving = DelayedSave("the progress of consumers", self._save, now_ms, save_every_s, wake_saver)
        """Saves the progress, which is durable when a later `TableWriter.write` returns."""
        self._starts = tables.starts
        self.moved_back = set[tuple[str, str]]()
        """Groups and topics in which progress went back, as after a reset."""
        self.starts_version = 0
        """Number of marks that `mark_started` made."""
        for places in self._places.values():
            for place in places.values():
                place.saving = saving
        table.page = page
        if self.adopt():
            table.is_stored = True
            saving.save_soon()

    def _save(self) -> None:
        self.adopt()
        self._writing.save(self._table, self._now_ms(), after_flush=True)

    def _save_starts(self) -> None:
        self._writing.save(self._starts, self._now_ms())

    def of_topic(self, group: str, topic: str) -> Mapping[int, int]:
        row: Mapping[int, int] = self._table.rows.get(f"{topic}@{group}", {})
        places = self._places.get((group, topic))
        return row if places is None else {**row, **_positions(places)}

    def adopt(self) -> bool:
        """Take what the holders of queues have reached into the table; return whether it has changed."""
        if self.page is None or not self.page.takes_positions(self._table.rows):
            return False
        self._table.revision += 1
        return True

    def place(self, topic: str, group: str, queue_id: int) -> Place | None:
        """Return the place on the page of groups of a queue's progress; None if there is no room for one."""
        page, places = self.page, self._places.setdefault((group, topic), {})
        place = places.get(queue_id)
        if page is None:
            return None
        if place is None:
            row = self._table.rows.get(f"{topic}@{group}", {})
            try:
                place = places[queue_id] = page.add(PlaceName(group, topic, queue_id), row.get(queue_id, -1))
            except StoreIOError as error:
                self._states.failing(_KEEPING, error)
                return None
            place.saving = self.saving
            self._states.works(_KEEPING)
        return place

    def hold(self, place: Place, client_id: str, members: Iterable[str], *, was_held: bool) -> Place:
        """Return a `place` of its own for a consumer, which a position that is set back ends; see `GroupPage.hold`."""
        try:
            held = place.page.hold(place, client_id, members, was_held=was_held)
        except StoreIOError as error:
            self._states.failing(_KEEPING, error)
            return place
        self._states.works(_KEEPING)
        return held

    def end(self) -> None:
        """Let no place be written any more: another process can own the store."""
        self.adopt()
        page, self.page, self._places = self.page, None, {}
        if page is not None:
            page.close()

    def __len__(self) -> int:
        return len(self._table.rows)

    def topics(self, of_group: str | None = None) -> set[str]:
        return {topic for topic, group in self.names() if of_group in (None, group)}

    def groups(self, topic: str) -> list[str]:
        return [group for row_topic, group in self.names() if row_topic == topic]

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield the topic and the group of each row, and of each place with a position."""
        for key in list(self._table.rows):
            if (names := topic_and_group(key)) is not None:
                yield names
        for (group, topic), places in list(self._places.items()):
            if f"{topic}@{group}" not in self._table.rows and _positions(places):
                yield topic, group

    def consumer_offset(self, topic: str, group: str, queue_id: int) -> int | None:
        place = self._places.get((group, topic), {}).get(queue_id)
        if place is not None and (position := place.position) >= 0:
            return position
        row: Mapping[int, int] = self._table.rows.get(f"{topic}@{group}", {})
        return row.get(queue_id)

    def set_consumer_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Store a group's queue offset; a lower one is allowed, and logged."""
        place = self._places.get((group, topic), {}).get(queue_id)
        stored = self.consumer_offset(topic, group, queue_id) if place is None else place.position
        old = -1 if stored is None else stored
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
        self._move(topic, group, queue_id, queue_offset)

    def _move(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        place = self._places.get((group, topic), {}).get(queue_id) or self.place(topic, group, queue_id)
        if place is not None:
            place.set(queue_offset)
        else:
            self._table.rows.setdefault(f"{topic}@{group}", {})[queue_id] = queue_offset
            self._table.revision += 1
        self.saving.save_soon()

    def advance_consumer_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Store the queue offset that comes with a group's pull, unless a later one is stored.

        A member that was lost, and does not know yet that another has its queue, pulls with the progress of before.
        Members that go back on purpose store their progress by itself, by `set_consumer_offset`.
        """
        stored = self.consumer_offset(topic, group, queue_id)
        if stored is None or queue_offset > stored:
            self.set_consumer_offset(topic, group, queue_id, queue_offset)
        else:  # a peer can have stored it on the page, and it is not in the table yet
            self.saving.save_soon()

    def is_started(self, group: str, topic: str) -> bool:
        return topic in self._starts.rows.get(group, {})

    def mark_started(self, group: str, topic: str, now_ms: int) -> None:
        """Save the progress, then the mark that ``start_at`` has moved a group in a topic.

        A kill between the two moves the group again, to where it has not begun yet.
        """
        self.saving.save()
        self._starts.rows.setdefault(group, {})[topic] = now_ms
        self.starts_version += 1
        self._save_starts()

    def copy_starts(self, starts: Mapping[str, Mapping[str, int]]) -> None:
        if self._starts.replace({group: dict(row) for group, row in starts.items()}):
            self.saving.save()
            self._save_starts()

    def merge(self, rows: Mapping[str, Mapping[int, int]]) -> None:
        """Merge a master's progress, by ``topic@group``; progress that only this table has stays."""
        for name, row in rows.items():
            if self._table.rows.get(name) != row:
                self._table.rows[name] = dict(row)
                self._table.revision += 1
                self.saving.save_soon()

    def delete_queue(self, topic: str, queue_id: int) -> None:
        for group in self.groups(topic):
            if (place := self._places.get((group, topic), {}).get(queue_id)) is not None:
                place.set(-1)
            row = self._table.rows.get(f"{topic}@{group}", {})
            if row.pop(queue_id, None) is not None:
                self._table.revision += 1
                self.saving.save_soon()
                if not row:
                    self._table.remove(f"{topic}@{group}")

    def drop_group(self, group: str) -> None:
        for topic in self.topics(group):
            for place in self._places.get((group, topic), {}).values():
                place.set(-1)
            if f"{topic}@{group}" in self._table.rows:
                self._table.remove(f"{topic}@{group}")
            self.saving.save_soon()
        if group in self._starts.rows:
            self._starts.remove(group)
            self._save_starts()

    def clamp(self, end_of: Callable[[str, int], int]) -> None:
        """Limit all progress to the ends of the queues.

        A crash of the machine can lose consumed messages. The next messages get their queue offsets, and must not be
        skipped. Another process can have recovered the store, so this does not depend on the abort marker.
        """
        beyond = [
            (topic, group, queue_id, old, end)
            for (group, topic), row in progress_of(self._table.rows).items()
            for queue_id, old in row.items()
            if old > (end := end_of(topic, queue_id))
        ]
        for topic, group, queue_id, _, end in beyond:
            self.moved_back.add((group, topic))
            self._move(topic, group, queue_id, end)
        if beyond:
            named = [f"{group} in {topic}/{queue_id}, {old}" for topic, group, queue_id, old, _ in beyond[:NAMED]]
            _log.warning(
                "%(count)d positions of groups were beyond the ends of their queues, and are set to these ends; the "
                "first were: %(positions)s",
                count=len(beyond),
                positions="; ".join(named),
            )


def _positions(places: Mapping[int, Place]) -> dict[int, int]:
    return {queue_id: position for queue_id, place in list(places.items()) if (position := place.position) >= 0}


# ---- saving


class TableWriter:
    """The files of one broker's tables; for each file only the latest pending write counts."""

    def __init__(
        self,
        flush: Callable[[], object],
        now_ms: Callable[[], int],
        wake: Callable[[], None],
        aside: Aside | None,
    ) -> None:
        """Save tables; without ``aside`` `save` writes before it returns.

        ``flush`` returns when the messages of the store are on the device. ``wake``, called under the runner's lock,
        makes the runner call ``saver.run_due``.
        """
        self._flush = flush
        self._wake = wake
        self._waits = aside is None
        self._after_flush: set[ConfigTable] = set()
        self._latest: dict[ConfigTable, bytes] = {}
        self._written: dict[ConfigTable, bytes] = {}
        self._write_lock = Lock()
        self.watchers: list[Callable[[], None]] = []
        """Called once, when a table has changed. Under the runner's lock."""
        self._end_reason: str | None = None
        self.saver = ProgressSaver(
            "topics, groups, progress and filters",
            flush=lambda pending: self.write(),
            reached=lambda: self._pending() or None,
            note=lambda pending: None,
            now_ms=now_ms,
            save_every_s=0,
            aside=aside,
        )

    def save(self, table: ConfigTable, now_ms: int, *, after_flush: bool = False) -> None:
        """Write the present content of a table. Under the runner's lock.

        It is durable when a later `write` returns. With ``after_flush`` the store is flushed first: progress that
        passes a message must not reach the device before the retry copy of that message.
        """
        self._check_not_ended()
        self.notify_watchers()
        if after_flush:
            self._after_flush.add(table)
        if self._waits:
            if table in self._after_flush:
                self._flush()
            table.persist(now_ms)
        else:
            self._latest[table] = table.snapshot(now_ms)
            self._wake()

    def save_now(self, table: ConfigTable, now_ms: int) -> None:
        """Write a table, which does not change meanwhile; it is durable when this returns. Thread-safe."""
        self._check_not_ended()
        self._latest[table] = table.snapshot(now_ms)
        self.write()

    def notify_watchers(self) -> None:
        if self.watchers:
            watchers, self.watchers = self.watchers, []
            for changed in watchers:
                changed()

    def write(self) -> None:
        """Return when everything saved before the call is durable. Thread-safe.

        Raises:
            StoreIOError: The disk refuses a write, which is kept for the next call.
            StoreClosedError: The writes were ended.
        """
        self._check_not_ended()  # in a forked child no thread would release the lock
        with critical, self._write_lock:  # a signal handler can close the broker, which takes the lock
            self._check_not_ended()
            while pending := self._pending():
                table, data = pending[0]
                if table in self._after_flush:
                    self._flush()
                table.write(data)
                self._written[table] = data
                self._check_not_ended()

    def _pending(self) -> list[tuple[ConfigTable, bytes]]:
        return [(table, data) for table, data in list(self._latest.items()) if self._written.get(table) is not data]

    def refuse(self, why: str) -> None:
        """Begin no further write; later callers get ``why``."""
        self._end_reason = why

    def end_writing(self, why: str) -> None:
        """`refuse`; returns when nothing is being written."""
        self.refuse(why)
        with self._write_lock:
            self._latest.clear()

    def _check_not_ended(self) -> None:
        if self._end_reason is not None:
            raise StoreClosedError(self._end_reason)
