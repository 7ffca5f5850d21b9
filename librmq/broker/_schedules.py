"""Schedules of a broker: the step that sends what is due, and the requests that change them.

A message is sent before its due time is noted as reached, and the note follows a flush of the log. After a kill, or a
loss of power, the due times since the last note are looked for in the topic, so each has exactly one message.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

from librmq.broker._context import BrokerContext
from librmq.errors import LASTING, BrokerError, MessageIllegalError, RmqError
from librmq.message import record
from librmq.message.ids import parse_host
from librmq.message.message import body_too_large
from librmq.message.properties import PropertyName
from librmq.protocol import ChangeSchedule, DescribeSchedules, ResponseCode
from librmq.runtime import StateLog
from librmq.runtime.event_log import EventLog
from librmq.scheduling import Schedule
from librmq.scheduling.schedules import ScheduleRule

_log = EventLog("librmq.broker")
_LATE_MS: Final = 1_000
"""A due time that is passed by more than this is missed."""
_AGAIN_MS: Final = 10_000
_AT_ONCE: Final = 64
"""The most messages of one turn; the rest follows in others."""
_STORED_BEFORE_MS: Final = 60_000
"""By so much the clock may have gone back between the send of a message and a kill."""
_GROUP: Final = "librmq-schedules"


class Schedules:
    """The schedules of one broker. Called under the runner's lock."""

    def __init__(self, context: BrokerContext, put: Callable[..., Any]) -> None:
        """``put`` stores a message, with the fields of a send."""
        self._context = context
        self._put = put
        self._table = context.tables.schedules
        self._host = parse_host(context.store.config.store_host)
        self._looked: set[str] = set()
        """Schedules whose first due time since the opening was looked for in its queue."""
        self._states = StateLog(_log, "schedules")
        self._step = context.step("sends what schedules are due", self.run_due)

    def start(self) -> None:
        """Send from now on what is due."""
        self._context.runner.wake(self._step)

    def describe(self, request: DescribeSchedules) -> tuple[Schedule, ...]:
        return tuple(Schedule.of_row(name, row) for name, row in sorted(self._table.rows.items()))

    def change(self, request: ChangeSchedule) -> None:
        name, row, now_ms = request.name, self._table.rows.get(request.name), self._context.runner.now_ms()
        if request.change == "set":
            rule = ScheduleRule.of_row(request.rule or {})
            rule.due_after(now_ms, now_ms)  # refuses what this process can't read
            if len(rule.body) > (largest := self._context.store.config.max_message_size):
                raise body_too_large(len(rule.body), largest)
            added = {PropertyName.CLUSTER: self._context.cluster_name}
            if not record.has_room({**rule.message(name, now_ms).properties, **added}):
                raise MessageIllegalError(
                    f"schedule {name!r:.80}: a message of it would have more than {record.MAX_PROPERTIES_SIZE:,} bytes "
                    "of properties: put large values into the body"
                )
            if row is not None and ScheduleRule.of_row(row) == rule:
                return
            if row is not None:
                _log.info(
                    "schedule %(schedule)s is replaced: it was %(before)s to %(_before)s, and is %(rule)s to %(topic)s",
                    schedule=name,
                    before=ScheduleRule.of_row(row).text,
                    _before=row["topic"],
                    rule=rule.text,
                    topic=rule.topic,
                )
            self._table.set(name, rule.new_row(now_ms, row))
        elif row is None:
            names = ", ".join(sorted(self._table.rows)) or "none"
            raise BrokerError(
                ResponseCode.QUERY_NOT_FOUND,
                f"schedule {name!r:.80}: there is none of this name; known are {names:.400}",
            )
        elif request.change == "delete":
            self._table.remove(name)
        elif row["paused"] != (request.change == "pause"):
            self._table.set(name, {**row, "paused": not row["paused"]})
        else:
            return
        self._save()
        self._context.runner.wake(self._step)

    def _save(self) -> None:
        self._context.writing.save(self._table, self._context.runner.now_ms(), after_flush=True)

    # ---- what is due

    def run_due(self, now_ms: int) -> int | None:
        """Send what is due; return when the next message is."""
        next_ms: int | None = None
        for name in list(self._table.rows):
            try:
                due_ms = self._send_due(name, now_ms)
            except LASTING:
                return None
            except RmqError as error:  # a full disk, a message that the broker refuses, or a missing extra
                self._states.failing(f"sending what schedule {name} is due", error)
                due_ms = now_ms + _AGAIN_MS
            else:
                self._states.works(f"sending what schedule {name} is due")
            if due_ms is not None and (next_ms is None or due_ms < next_ms):
                next_ms = due_ms
        return next_ms

    def _send_due(self, name: str, now_ms: int) -> int | None:
        """Send what one schedule is due; return when its next message is."""
        row = self._table.rows[name]
        if row["paused"]:
            return None
        rule, set_ms = ScheduleRule.of_row(row), row["set_ms"]
        # Where the clock was set back, due times come again; those that have a message are found in the topic.
        reached_ms = min(row["reached_ms"], now_ms)
        last_ms, sent = row["last_ms"], 0
        try:
            while (due_ms := rule.due_after(reached_ms, set_ms)) is not None and due_ms <= now_ms:
                if rule.missed != "all":
                    due_ms = rule.last_due(reached_ms, now_ms, set_ms) or due_ms
                if rule.missed != "skip" or now_ms - due_ms <= _LATE_MS:
                    if sent == _AT_ONCE:
                        return now_ms
                    self._send(name, rule, due_ms, now_ms)
                    last_ms, sent = due_ms, sent + 1
                reached_ms = due_ms
            return due_ms
        finally:
            if reached_ms != row["reached_ms"]:
                self._table.set(name, {**row, "reached_ms": reached_ms, "last_ms": last_ms})
                self._save()

    def _send(self, name: str, rule: ScheduleRule, due_ms: int, now_ms: int) -> None:
        """Send the message of a due time, unless the topic has it."""
        topic = self._context.topics.by_name.get(rule.topic)
        queues = self._context.config.default_topic_queues if topic is None else topic.write_queues
        queue_id = zlib.crc32(name.encode()) % max(1, queues)
        is_first, message = name not in self._looked, rule.message(name, due_ms)
        self._looked.add(name)
        if not self._is_stored(rule.topic, queue_id, rule.message_id(name, due_ms), due_ms if is_first else None):
            self._put(_GROUP, message, queue_id, now_ms, self._host, 0, queues)

    def _is_stored(self, topic: str, queue_id: int, unique_key: str, due_ms: int | None) -> bool:
        """Return whether the topic has a message; at the first of an opening its queue is read too.

        The keys of the last messages before a kill can be missing, or the whole index.
        """
        store = self._context.store
        if any(message.unique_key == unique_key for message in store.find_by_key(topic, unique_key)):
            return True
        if due_ms is None or (topic, queue_id) not in store.queues:
            return False
        begin = store.queue_offset_at(topic, queue_id, due_ms - _STORED_BEFORE_MS)
        return any(message.unique_key == unique_key for message in store.messages(topic, queue_id, begin))
