"""A route that writes what its clients do to a file, a line an event, for `librmq.testing.check_history`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from librmq.client.recorder import Event, Recorder
from librmq.config import check_path
from librmq.errors import ConfigError
from librmq.message.message import StoredMessage
from librmq.protocol import Endpoint, QueueData, Request, Route
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.store import MessageStore

R = TypeVar("R")
_log = EventLog("librmq.client")

_MAX_BYTES: Final = 1 << 30


class RecordedRoute:
    """A route whose clients write a history. Made by `record_history`; a context manager. Thread-safe."""

    def __init__(self, route: Route, path: str | os.PathLike[str], process: str, max_bytes: int) -> None:
        self.runner = route.runner
        self.path: str = os.fspath(path)
        """The file."""
        self.recorder = Recorder(self.runner.now_ms, self)
        if isinstance(store := getattr(route, "store", None), MessageStore):
            self.recorder.levels = store.levels
        self._route = route
        self._process = process
        self._max_bytes = max_bytes
        self._size = 0
        self._lock = Lock()
        self._running: dict[int, Event] = {}
        try:
            self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 (closed by `close`)
        except FileExistsError as error:
            raise ConfigError(f"path: {self.path!r} exists: each run writes a history of its own") from error

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (what else the route offers)
        if name == "_route":  # of a handle that was not made
            raise AttributeError(name)
        return getattr(self._route, name)

    # ---- Route

    def topic_route(self, topic: str) -> tuple[QueueData, ...]:
        """Return the brokers that have a topic."""
        return self._route.topic_route(topic)

    def broker_names(self) -> tuple[str, ...]:
        """Return the names of the brokers that can be reached."""
        return self._route.broker_names()

    def endpoint(self, broker_name: str) -> Endpoint:
        """Return a broker, whose requests are recorded."""
        return _RecordedEndpoint(self.recorder, self._process, broker_name, self._route.endpoint(broker_name))

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` when brokers, topics or queues change."""
        return self._route.watch(changed)

    def noted_consumer(self, consumer: Any) -> None:  # noqa: ANN401 (any consumer)
        """Record a consumer that was made on this route."""
        consumer.recorder = self.recorder.consumer(self._process, consumer)

    # ---- the file

    def begins(self, event: Event) -> None:
        """Take an event; it is written at its end."""

    def ends(self, event: Event) -> None:
        """Write an event, unless the file is full."""
        self._running.pop(id(event), None)
        line = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._file.closed or self._size > self._max_bytes:
                return
            if self._size + len(line) > self._max_bytes:
                self._size = self._max_bytes + 1
                _log.warning(
                    "the history %(path)s is full at %(limit)d bytes: it ends here",
                    path=self.path,
                    limit=self._max_bytes,
                )
                return
            self._size += len(line)
            self._file.write(line)

    def delivers(self, events: list[Event], messages: Sequence[StoredMessage], *, calls_listener: bool) -> None:
        """Take deliveries that have begun."""
        for event in events:
            self._running[id(event)] = event

    def close(self) -> None:
        """Write the deliveries that still run, and close the file. Shut the clients down first."""
        self.recorder.end_invisible_times()
        for event in list(self._running.values()):
            self.ends(event)
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _RecordedEndpoint:
    """A broker whose requests are recorded."""

    def __init__(self, recorder: Recorder, process: str, broker_name: str, endpoint: Endpoint) -> None:
        self._recorder = recorder
        self._process = process
        self._broker_name = broker_name
        self._endpoint = endpoint

    def call(self, request: Request[R], /) -> R:
        """Pass a request on, and record it."""
        return self._recorder.call(self._process, self._broker_name, request, self._endpoint.call)


def record_history(
    route: Route, path: str | os.PathLike[str], *, process: str | None = None, max_bytes: int = _MAX_BYTES
) -> RecordedRoute:
    """Return a route whose producers and consumers write what they do to a new file, a line an event.

    Pass it to clients in place of ``route``, a `Broker` or what `librmq.connect` returns. `check_history` and
    ``librmq check-history`` judge the files of all processes together. Bodies are not in it.

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
    return RecordedRoute(route, path, process or f"{socket.gethostname()}:{os.getpid()}", max_bytes)
