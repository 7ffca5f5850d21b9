"""Messages in flight: received by a group from a queue, but not acknowledged.

Each change is on the page of groups (`librmq.store.format.group_page`) before it is answered. Mirrors the notes of
``PopCheckPoint`` and ``ConsumerOrderInfoManager`` of 5.x.

::

    queue    … 17 18 19 20 21 22 23 24 …
                  │     │  │     └─ next_offset: where the next receive reads
                  │     └──┴─ in flight
                  └─ in flight, and the smallest: committed, the progress of the group
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

from librmq.message import StoredMessage
from librmq.message.ids import Receipt
from librmq.message.properties import PropertyName
from librmq.message.topics import receive_retry_topic
from librmq.protocol import Place, process_deaths

_DEATHS: Final = PropertyName.PROCESS_DEATHS.encode()
_MOST_ATTEMPTS: Final = (1 << 24) - 1
_MOST_DEATHS: Final = (1 << 7) - 1
QueueKey = tuple[str, str, int]
"""Group, topic of the queue, queue id."""


def is_receive_retry(group: str, topic: str) -> bool:
    return topic.startswith(receive_retry_topic(group, ""))


ALONE: Final = 1 << 38
"""The bit of a receiver that has the message alone."""


def receiver_of(client_id: str) -> int:
    """Return the number by which the page knows a client that receives."""
    return (zlib.crc32(client_id.encode()) >> 8 or 1) << 39


@dataclass(slots=True, eq=False)
class Flight:
    queue: QueueFlights
    queue_offset: int
    physical_offset: int
    received_ms: int
    """Time of the delivery, which its receipt names like `invisible_ms`."""
    invisible_ms: int
    attempt: int
    """1 for the first delivery."""
    visible_ms: int
    """Time of the next delivery unless it is acknowledged; renewals move it beyond the time in the receipt."""
    cell: int | None = None
    """Its place on the page of groups."""
    receiver: int = 0
    """`receiver_of` its client; 0 for one at whose end it is no suspect."""
    deaths: tuple[int, int] = 0, 0
    """In order: how often its process has ended by surprise, and that alone. A retry copy has a property for it."""

    def has(self, receipt: Receipt) -> bool:
        """Return whether a receipt is the latest one."""
        return self.received_ms == receipt.received_ms and self.invisible_ms == receipt.invisible_ms


class QueueFlights:
    """The messages in flight in one queue for one group, and on the page of groups. Called under the runner's lock.

    A kill can come between any two changes of the page. So a message is on it before ``next_offset`` passes it, and
    goes from it only when it is acknowledged or stored again.
    """

    __slots__ = ("_next_offset", "_page", "attempt_id", "committed", "flights", "handed_out", "key", "place")

    def __init__(self, key: QueueKey, next_offset: int, place: Place | None) -> None:
        """Begin at a queue offset; without a place, what is in flight comes again after a kill."""
        self.key = key
        self.place = place
        self._page = None if place is None else place.page
        self.next_offset = next_offset
        self.committed = next_offset
        """The last stored progress; if the table differs, a reset or another consumer has moved it."""
        self.flights: dict[int, Flight] = {}
        """Flights by queue offset, in order."""
        self.handed_out: dict[int, Flight] = {}
        """The last deliveries of messages in order that the progress has not passed, in flight or not."""
        self.attempt_id = ""

    @classmethod
    def restored(
        cls, key: QueueKey, place: Place, progress: int, end: int, *, is_ordered: bool, was_killed: bool
    ) -> QueueFlights:
        """Return the state that a page has.

        ``progress`` is that of the group, and ``end`` the queue's end: a recovery can have cut messages.
        ``was_killed`` says that processes have ended by surprise.
        """
        noted = place.next_offset
        next_offset = progress if noted is None else min(max(noted, progress), max(end, progress))
        queue, page = cls(key, next_offset, place), place.page
        for row in sorted(page.flights.pop(place.number, []), key=lambda row: (row.queue_offset, not row.is_in_flight)):
            offset = row.queue_offset
            is_in_flight = noted is not None and row.is_in_flight and progress <= offset < next_offset
            numbers = row.received_ms, row.invisible_ms, row.attempt & _MOST_ATTEMPTS, row.visible_ms, row.cell
            flight = Flight(queue, offset, row.physical_offset, *numbers)
            if is_in_flight and offset not in queue.flights:
                if was_killed:
                    flight.receiver = row.attempt >> 38 << 38
                queue.flights[offset] = flight
            elif not is_ordered or row.is_in_flight or offset < progress or offset in queue.handed_out:
                page.free_flight(row.cell)
                continue
            if is_ordered:
                flight.deaths = row.attempt >> 24 & _MOST_DEATHS, row.attempt >> 31 & _MOST_DEATHS
                queue.handed_out[offset] = flight
        return queue

    @property
    def next_offset(self) -> int:
        return self._next_offset

    @next_offset.setter
    def next_offset(self, queue_offset: int) -> None:
        self._next_offset = queue_offset
        if self.place is not None:
            self.place.set_next_offset(queue_offset)

    @property
    def progress(self) -> int:
        return next(iter(self.flights), self._next_offset)

    def add_flight(self, flight: Flight, *, is_ordered: bool = False) -> None:
        """Note a delivery; queue offsets only rise until `read_again`."""
        before = self.handed_out.get(flight.queue_offset)
        if before is not None:
            flight.cell, flight.deaths = before.cell, before.deaths
        if is_ordered or before is not None:
            self.handed_out[flight.queue_offset] = flight
        self.note_flight(flight)
        self.flights[flight.queue_offset] = flight

    def note_flight(self, flight: Flight) -> None:
        place = self.place
        if place is not None:
            deaths, deaths_alone = flight.deaths
            flight.cell = place.page.add_flight(
                place.number,
                flight.cell,
                flight.queue_offset,
                flight.physical_offset,
                flight.received_ms,
                flight.invisible_ms,
                min(flight.attempt, _MOST_ATTEMPTS) | deaths << 24 | deaths_alone << 31 | flight.receiver,
                flight.visible_ms,
            )

    def remove_flight(self, flight: Flight) -> None:
        del self.flights[flight.queue_offset]
        self._end(flight, is_kept=flight.queue_offset in self.handed_out)
        if self.handed_out:
            first = self.progress
            for offset in [offset for offset in self.handed_out if offset < first]:
                self._end(self.handed_out.pop(offset), is_kept=False)

    def attempts(self, queue_offset: int) -> int:
        handed_out = self.handed_out.get(queue_offset)
        return 0 if handed_out is None else handed_out.attempt

    @property
    def has_deaths(self) -> bool:
        return bool(self.handed_out) and any(flight.deaths[0] for flight in self.handed_out.values())

    def deaths_of(self, message: StoredMessage) -> tuple[int, int]:
        """Return how often a message's process has ended by surprise, and how often of these it was alone."""
        if _DEATHS in message.raw:
            return process_deaths(message.properties)
        handed_out = self.handed_out.get(message.queue_offset)
        return (0, 0) if handed_out is None else handed_out.deaths

    def note_death(self, flight: Flight) -> None:
        """Note that the process of a message's receiver has ended by surprise; it counts once."""
        deaths, deaths_alone = flight.deaths
        was_alone = flight.receiver & ALONE != 0
        flight.deaths = min(deaths + 1, _MOST_DEATHS), min(deaths_alone + was_alone, _MOST_DEATHS)
        flight.receiver = 0
        self.note_flight(flight)

    def is_locked(self, now_ms: int) -> bool:
        """Return whether a queue in order waits for the end of a delivery."""
        return any(flight.visible_ms > now_ms for flight in self.flights.values())

    def read_again(self) -> None:
        """Read a queue in order again from the first unacknowledged message.

        As in 5.x (``ConsumerOrderInfoManager``) acknowledged messages behind it are delivered again too.
        """
        self.next_offset = self.progress  # first: from then on nothing behind it counts as in flight
        for flight in self.flights.values():
            self._end(flight, is_kept=True)
        self.handed_out |= self.flights
        self.flights.clear()

    def drop(self) -> None:
        """Remove everything from the page, because the progress was moved by others."""
        for flight in (self.handed_out | self.flights).values():
            self._end(flight, is_kept=False)

    def _end(self, flight: Flight, *, is_kept: bool) -> None:
        """Note that a message is no longer in flight, and whether its attempts and deaths still count."""
        if self._page is not None and flight.cell is not None:
            (self._page.end_flight if is_kept else self._page.free_flight)(flight.cell)
