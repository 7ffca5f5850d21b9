"""What an earlier run of a store wrote after it had saved its progress for the last time, derived from the log.

A process that dies loses the progress of its last seconds, but not the records that it wrote. So before it writes a
copy of a record, `EarlierCopies` searches the log for one, by unique id, time of birth and number of deliveries.
Records that were written again on purpose have the same id, and keep copies of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from librmq.errors import CorruptionError, RecordError
from librmq.message import StoredMessage
from librmq.message.properties import PropertyName
from librmq.runtime.event_log import EventLog
from librmq.store import MessageStore

_log = EventLog("librmq.delay")

_MAX_RECORDS: Final = 4096  # A client can send any number of messages with one id, so a search has an end.
_ROUTE_PROPERTIES: Final = (PropertyName.TIMER_ROLL_TIMES, PropertyName.REAL_TOPIC)
"""Properties that differ between records on different routes, such as the retries of two groups in one queue."""


class EarlierCopies:
    """The copies that are in the log when it is opened. Not thread-safe if the calls are ``in_order``."""

    def __init__(self, store: MessageStore, *, in_order: bool = True) -> None:
        """With ``in_order`` the copies were written in the order of the calls, so the first without a copy is the last.

        Make it before the store is written.
        """
        self._store = store
        self._end = store.log.end
        self._in_order = in_order
        self._is_over = self._end == store.log.begin

    def concerns(self, physical_offset: int) -> bool:
        """Return whether a record can have a copy."""
        return physical_offset < self._end and not self._is_over

    def has(
        self,
        message: StoredMessage,
        topics: tuple[str, ...],
        accepts: Callable[[StoredMessage], bool],
        deliveries: int = 0,
    ) -> bool:
        """Return whether a copy of a record is in one of ``topics``; False in doubt.

        A copy has ``deliveries`` more deliveries than the record, and ``accepts(copy)`` is true. In doubt are records
        without a unique id, and equal records if some of them may have no copy.
        """
        if not message.unique_key or not self.concerns(message.physical_offset):
            return False
        try:
            return self._has(message, topics, accepts, deliveries)
        except (CorruptionError, RecordError) as error:
            _log.warning(
                "the log can't show whether %(message_id)s was delivered before the crash, so it is delivered again: "
                "%(error)s",
                message_id=message.unique_key,
                error=error,
            )
            return False

    def _has(
        self,
        message: StoredMessage,
        topics: tuple[str, ...],
        accepts: Callable[[StoredMessage], bool],
        deliveries: int,
    ) -> bool:
        times = message.reconsume_times
        copies = [
            copy.physical_offset
            for topic in topics
            for copy in self.records_like(message, topic)
            if copy.reconsume_times == times + deliveries and accepts(copy)
        ]
        if not any(place > message.physical_offset for place in copies):
            self._is_over = self._in_order
            return False
        route = list(map(message.properties.get, _ROUTE_PROPERTIES))
        equal = [
            record.physical_offset
            for record in self.records_like(message, message.topic)
            if record.reconsume_times == times and list(map(record.properties.get, _ROUTE_PROPERTIES)) == route
        ]
        if equal == [message.physical_offset]:
            return True
        if message.physical_offset not in equal:  # The index lacks keys here, so the copy stays in doubt.
            return False
        # Several records can be the origin of a copy. Each one before a copy has its own if they alternate.
        places = sorted([*equal, *(place for place in copies if place > equal[0])])
        return places[::2] == equal

    def records_like(self, message: StoredMessage, topic: str) -> list[StoredMessage]:
        """Return the records of a topic in the log at the opening that have the id and the birth of a message."""
        if not message.unique_key:
            return []
        return [
            record
            for record in self._store.find_by_key(topic, message.unique_key, max_messages=_MAX_RECORDS)
            if record.unique_key == message.unique_key
            and record.physical_offset < self._end
            and record.born_timestamp_ms == message.born_timestamp_ms
        ]
