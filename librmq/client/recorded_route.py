"""A route that writes what its clients do to a file, a line an event, for `librmq.testing.check_history`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeVar

from librmq.client.recorder import Event, Recorder
from librmq.config import check_path
from librmq.errors import ConfigError
from librmq.message import MessageQueue, StoredMessage
from librmq.override import override
from librmq.protocol import (
    Endpoint,
    HoldPlace,
    Place,
    Request,
    Route,
    RouteWrapper,
)
from librmq.runtime import calls_later
from librmq.runtime.closing import Closing
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.store import MessageStore

R = TypeVar("R")
_log = EventLog("librmq.client")

_MAX_BYTES: Final = 1 << 30
_ROOM: Final = 96
"""Bytes behind the beginning of an event for what its end adds: outcome and place."""
_PAGE: Final = 4096


class RecordedRoute(RouteWrapper):
    """A route whose clients' requests and deliveries go to a recorder. Thread-safe if its sink is."""

    def __init__(self, route: Route, recorder: Recorder, process: str) -> None:
        """``process`` is the name of the clients' process in the history."""
        super().__init__(route)
        self.recorder = recorder
        self._process = process

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (what else the route offers)
        if name == "_route":  # a copy of this object that was not initialized has no route to ask
            raise AttributeError(name)
        return getattr(self._route, name)

    @override
    def wrap(self, broker_name: str, broker: Endpoint) -> Endpoint:
        """Return a broker, whose requests are recorded."""
        return _RecordedEndpoint(self.recorder, self._process, broker_name, broker)

    @override
    def noted_consumer(self, consumer: Any) -> None:  # noqa: ANN401 (any consumer)
        """Record a consumer that was made on this route."""
        self.recorder.watch_consumer(self._process, consumer)


class HistoryFile(RecordedRoute, Closing):
    """A route whose clients write a history. Made by `record_history`; a context manager. Thread-safe."""

    def __init__(self, route: Route, path: str | os.PathLike[str], process: str, max_bytes: int) -> None:
        super().__init__(route, Recorder(route.runner.now_ms, self), process)
        self.path: str = os.fspath(path)
        """The file."""
        if isinstance(store := getattr(route, "store", None), MessageStore):
            self.recorder.levels = store.levels
        self._max_bytes = max_bytes
        self._size = 0
        self._lock = Lock()
        self._open: dict[int, tuple[Event, int, int]] = {}  # events by identity, with place and size in the file
        try:
            self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 (closed by `close`)
        except FileExistsError as error:
            raise ConfigError(f"path: {self.path!r} exists: each run writes a history of its own") from error

    def begins(self, event: Event) -> None:
        """Write an event, unless the file is full; one that can end, with room for its end."""
        line = _line(event)
        room = _ROOM if "begin_ms" in event else 0
        with calls_later(), self._lock:
            place = self._append(line, room)
            if room and place is not None:
                self._open[id(event)] = event, place, len(line) + room

    def ends(self, event: Event, *, is_last: bool = True) -> None:
        """Write an event again, in the place where it began."""
        with calls_later(), self._lock:
            _, place, size = self._open.get(id(event), (event, 0, 0))
            if is_last:
                self._open.pop(id(event), None)
            line = _line(event)
            if not size or self._file.closed:
                return
            if len(line) <= size:
                self._write(place, line.ljust(size))
            elif self._append(line, 0) is not None:  # first: a kill between the two leaves both, which is legal
                self._write(place, b" " * (size + 1))

    def delivers(self, events: list[Event], messages: Sequence[StoredMessage], *, calls_listener: bool) -> None:
        """Write deliveries that have begun."""
        for event in events:
            self.begins(event)

    def _append(self, line: bytes, room: int) -> int | None:
        """Append a line and room behind it, which no page boundary cuts; return its place, None if the file is full."""
        size = len(line) + room + 1
        gap = -self._size % _PAGE if self._size % _PAGE + size > _PAGE else 0
        if self._file.closed or self._size > self._max_bytes:
            return None
        if self._size + gap + size > self._max_bytes:
            self._size = self._max_bytes + 1
            _log.warning(
                "the history %(path)s is full at %(limit)d bytes: it ends here", path=self.path, limit=self._max_bytes
            )
            return None
        self._write(self._size, b" " * gap + line.ljust(size - 1) + b"\n")
        self._size += gap + size
        return self._size - size

    def _write(self, place: int, line: bytes) -> None:
        # One system call, so that a killed process leaves a line as it began or as it ended: a kill can cut a write
        # only between two pages.
        self._file.seek(place)
        self._file.write(line)

    def cancels(self, name: str, *, is_sure: bool = False) -> None:
        """Leave the line of the send as it is: without ``drained`` lines no message counts as lost."""

    @override
    def close(self) -> None:
        """Close the file. Shut the clients down first."""
        self.recorder.end_invisible_times()
        with self._lock:
            self._file.close()


def _line(event: Event) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


class _RecordedEndpoint(Endpoint):
    def __init__(self, recorder: Recorder, process: str, broker_name: str, behind: Endpoint) -> None:
        self.behind = behind
        self.has_page = behind.has_page
        self._recorder = recorder
        self._process = process
        self._broker_name = broker_name

    @override
    def call(self, request: Request[R], /) -> R:
        answer = self._recorder.call(
            self._process, self._broker_name, request, self.behind.call, has_page=self.has_page
        )
        if isinstance(request, HoldPlace) and isinstance(answer, Place):
            answer.watcher = partial(self._committed, request, answer)
        return answer

    def _committed(self, request: HoldPlace, place: Place) -> None:
        """Record progress that a consumer writes to the page of groups, without a request."""
        queue = MessageQueue(request.topic, self._broker_name, request.queue_id)
        self._recorder.committed(self._process, request.group, queue, place.position)


def record_history(
    route: Route, path: str | os.PathLike[str], *, process: str | None = None, max_bytes: int = _MAX_BYTES
) -> HistoryFile:
    """Return a route whose producers and consumers write what they do to a new file, a line an event.

    What has begun is written at once, and again in its place at its end: a killed process leaves sends whose outcome is
    unknown, and deliveries without an end. Pass the route to clients in place of ``route``, a `Broker` or what
    `librmq.connect` returns. `check_history` and ``librmq check-history`` judge the files of all processes together.
    Bodies are not in them.

    Args:
        route: The brokers.
        path: The file, which must not exist.
        process: The name of this process in the history; by default host and process id.
        max_bytes: The history ends, with a warning in the log, before it is larger.

    Raises:
        ConfigError: The file exists, or a value is refused.
    """
    check_path("path", path, "the path of a new file")
    if type(max_bytes) is not int or max_bytes < 1:
        raise ConfigError(f"max_bytes: expected a whole number of at least 1, found {max_bytes!r:.80}")
    return HistoryFile(route, path, process or f"{socket.gethostname()}:{os.getpid()}", max_bytes)
