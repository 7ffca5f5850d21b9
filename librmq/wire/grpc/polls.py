"""The receives under way: which wait for a message, and which have something to do."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

from librmq.runtime.locks import Lock

Place = tuple[str, int]
"""The topic and queue id that a receive names."""


class Poll:
    """One receive."""

    def __init__(self, polls: Polls, client_id: str, place: Place, arrived: threading.Event) -> None:
        self._polls = polls
        self.client_id = client_id
        self.place = place
        self._arrived = arrived
        self._is_held = False

    @property
    def waits(self) -> bool:
        """Whether it waits, and nothing has arrived."""
        return self._is_held and not self._arrived.is_set()

    def hold(self) -> None:
        """Note that it waits until something arrives."""
        self._is_held = True

    def wake(self) -> None:
        """Note that it looks again."""
        self._is_held = False

    def end(self) -> None:
        """Note that it is answered."""
        self._polls.close(self)


class Polls:
    """The receives of one server. Thread-safe."""

    def __init__(self, former: Mapping[str, Collection[Place]]) -> None:
        """``former`` are the places from which clients of the server before received, and to which they return."""
        self._lock = Lock()
        self._open: set[Poll] = set()
        self._places: dict[str, set[Place]] = {client_id: set(places) for client_id, places in former.items()}
        self._missing: dict[str, set[Place]] = {client_id: set(places) for client_id, places in former.items()}

    def open(self, client_id: str, place: Place, arrived: threading.Event, *, is_push: bool) -> Poll:
        """Note a receive that waits for ``arrived``, and the place of a known push consumer, until `remove_client`."""
        poll = Poll(self, client_id, place, arrived)
        with self._lock:
            self._open.add(poll)
            if is_push:
                self._places.setdefault(client_id, set()).add(place)
            if client_id in self._missing:
                self._missing[client_id].discard(place)
                if not self._missing[client_id]:
                    del self._missing[client_id]
        return poll

    def close(self, poll: Poll) -> None:
        """Note that a receive is answered."""
        with self._lock:
            self._open.discard(poll)

    def remove_client(self, client_id: str) -> None:
        """Remove the places from which a client has received."""
        with self._lock:
            self._places.pop(client_id, None)
            self._missing.pop(client_id, None)

    def places(self, client_id: str) -> frozenset[Place]:
        """Return where a known push consumer has received from."""
        with self._lock:
            return frozenset(self._places.get(client_id, ()))

    def missing(self) -> list[str]:
        """Return the former clients that do not receive from all their places yet."""
        with self._lock:
            return list(self._missing)

    def all_wait(self, push_consumers: Iterable[str]) -> bool:
        """Return whether all receives wait, and each push consumer has one at each place that it receives from."""
        with self._lock:
            if not all(poll.waits for poll in self._open):
                return False
            waiting = {(poll.client_id, poll.place) for poll in self._open}
            return all(
                client_id in self._places and all((client_id, place) in waiting for place in self._places[client_id])
                for client_id in push_consumers
            )
