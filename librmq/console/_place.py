"""The place that a console shows: a broker of this process, a shared store, a cluster, or a folder that is at rest.

Each page opens the views that it needs and closes them: a view is one moment. Where a broker runs elsewhere its numbers
come by requests, and what only the log can tell from the folder, if it is on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from librmq import SharedBroker
from librmq.broker import AdministeredRoute, Broker
from librmq.clock import Clock, SystemClock
from librmq.config import wrong_kind
from librmq.diagnosis import ClusterView, StoreView, View
from librmq.errors import ConfigError
from librmq.store import MessageStore


class Place:
    """A route, a folder, or both. Thread-safe."""

    def __init__(self, place: AdministeredRoute | str | os.PathLike[str], folder: str | None = None) -> None:
        """``folder`` is that of the store behind a route, where it is on this machine.

        Raises:
            TypeError: ``place`` is neither a route nor a path.
        """
        self.route: AdministeredRoute | None = None
        self.folder = folder
        if isinstance(place, str | os.PathLike):
            self.folder = os.fspath(place)
        elif isinstance(place, AdministeredRoute):
            self.route = place
            if isinstance(place, SharedBroker):
                self.folder = place.path
        else:
            raise wrong_kind("console", place, "a Broker, what share or connect returned, a Cluster, or a folder")
        self.clock: Clock = SystemClock() if self.route is None else self.route.runner.clock
        self._extent: tuple[int, int] | None = None

    @property
    def broker(self) -> Broker | None:
        """The broker, if it is in this process."""
        return self.route if isinstance(self.route, Broker) else None

    @property
    def title(self) -> str:
        """What the pages are about."""
        if self.folder is not None:
            return self.folder
        return self.broker.store.path if self.broker is not None else ", ".join(self.acting().broker_names())

    @property
    def has_log(self) -> bool:
        """Whether the log can be read here."""
        return self.folder is not None or self.broker is not None

    def acting(self) -> AdministeredRoute:
        """Return the route to the brokers.

        Raises:
            ConfigError: No process has the folder's store open.
        """
        if self.route is None:
            raise ConfigError(f"{self.folder}: no broker has this store open, so nothing can be changed here")
        return self.route

    @contextmanager
    def view(self, at_ms: int | None = None) -> Iterator[View[Any]]:
        """View topics, groups and progress as the brokers have them now, or the store as it was at a time."""
        if self.route is not None and self.broker is None and at_ms is None:
            yield ClusterView(self.route)
        else:
            with self.log(at_ms) as view:
                yield view

    @contextmanager
    def log(self, at_ms: int | None = None) -> Iterator[StoreView]:
        """View the store with its log, now or as it was at a time.

        Raises:
            ConfigError: The log is on another machine, or the time is before its first message.
        """
        broker = self.broker
        if broker is not None and at_ms is None:
            view = StoreView.of(broker)
            self._note_extent(view)
            yield view
            return
        folder, files = (self.folder, None) if broker is None else (broker.store.path, broker.store.files)
        if folder is None:
            raise ConfigError("this needs the folder of the store, which is on the machine of the broker")
        if at_ms is None:
            with StoreView.open(folder) as view:
                self._note_extent(view)
                yield view
            return
        moment = datetime.fromtimestamp(at_ms / 1000, UTC)
        with MessageStore.open(folder, read_only=True, files=files, at=moment) as store:
            yield StoreView.over(store)

    @property
    def extent(self) -> tuple[int, int] | None:
        """The times between which the store can be shown; None without a log, a message or a view so far."""
        if self._extent is None or self.route is None:
            return self._extent
        return self._extent[0], max(self._extent[0], self.clock.now_ms())

    def find_extent(self) -> None:
        """Read `extent`, if no view of the present has noted it."""
        if self._extent is None and self.has_log:
            with self.log():
                pass

    def _note_extent(self, view: StoreView) -> None:
        log = view.store.log
        first_ms = log.first_store_timestamp_ms(log.begin) if log.begin < log.end else None
        if first_ms is not None and view.now_ms is not None:
            self._extent = first_ms, max(first_ms, view.now_ms)
