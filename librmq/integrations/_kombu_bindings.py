"""Exchanges and their bindings to queues, which all processes that use a store or a cluster have in common.

They are in ``librmq/kombu/`` of a store's folder, and in the topic ``kombu_bindings`` of a cluster.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from itertools import count
from typing import Any, Final, TypeAlias

from kombu.utils.json import JSONEncoder, loads

import librmq
from librmq import SharedBroker
from librmq.clock import SystemClock
from librmq.files import DiskFiles
from librmq.files.regular import make_owned_folder, open_regular
from librmq.runtime.locks import Lock
from librmq.wire.remote import RemoteRoute

if sys.platform != "win32":
    import fcntl

KombuRoute: TypeAlias = "SharedBroker | RemoteRoute"
_clock: Final = SystemClock()
to_json: Final = JSONEncoder().encode
_BINDINGS: Final = "kombu_bindings"
_MOST_CHANGES: Final = 1_000
"""After so many changes of bindings, one looks whether most are outdated."""
TOPIC: Final = "librmq-topic"
"""The argument of a temporary queue that names its topic, which a later queue uses again."""


@lru_cache
def topic_of(queue: str) -> str:
    """Return the topic of a lasting queue: its name where it can be one, else the beginning and a hash."""
    if re.fullmatch(r"[a-zA-Z0-9_-]{1,60}", queue):
        return f"kombu-{queue}"
    begin = re.sub(r"[^a-zA-Z0-9_-]", "-", queue)[:40]
    return f"kombu-{begin}-{hashlib.sha256(queue.encode()).hexdigest()[:12]}"


class _Table:
    """Exchanges, their bindings, and the arguments of queues."""

    def __init__(self, rows: dict[str, Any] | None = None) -> None:
        self.rows: dict[str, Any] = {"types": {}, "tables": {}, "queues": {}} if rows is None else rows

    def apply(self, change: list[Any]) -> None:
        """Make a change; a repetition changes nothing."""
        if not self.lacks(change):
            return
        types, tables, queues = self.rows["types"], self.rows["tables"], self.rows["queues"]
        kind, name, *values = change
        if kind == "exchange":
            types[name] = values[0]
        elif kind == "delete exchange":
            types.pop(name, None)
            tables.pop(name, None)
        elif kind == "queue":
            queues[name] = values[0]
        elif kind == "delete queue":
            queues.pop(name, None)
            for exchange in self._exchanges_of(name):
                tables[exchange] = [row for row in tables[exchange] if row[2] != name]
        elif kind == "bind":
            tables.setdefault(name, []).append(values)
        elif kind == "unbind":
            tables[name].remove(values)

    def lacks(self, change: list[Any]) -> bool:
        """Return whether a change would change anything."""
        types, tables, queues = self.rows["types"], self.rows["tables"], self.rows["queues"]
        kind, name, *values = change
        if kind == "exchange":
            return bool(types.get(name) != values[0])
        if kind == "delete exchange":
            return name in types or name in tables
        if kind == "queue":
            return bool(queues.get(name) != values[0])
        if kind == "delete queue":
            return name in queues or bool(self._exchanges_of(name))
        return bool((values in tables.get(name, [])) == (kind == "unbind"))

    def _exchanges_of(self, queue: str) -> list[str]:
        return [exchange for exchange, rows in self.rows["tables"].items() if any(row[2] == queue for row in rows)]

    @property
    def size(self) -> int:
        """Number of its rows."""
        return sum(map(len, (self.rows["types"], self.rows["queues"], *self.rows["tables"].values())))


class FolderBindings:
    """The table in a file of the store's folder, and which queues have consumers. Thread-safe.

    The first line of the file is a table, and each further line a change, so that a change costs the same however many
    queues there are. When most changes are outdated, one more writes the table again. A last line without its end was
    not written whole, and counts as absent.
    """

    def __init__(self, folder: str) -> None:
        self._folder = os.path.join(folder, "librmq", "kombu")
        DiskFiles().make_folder(os.path.dirname(self._folder))
        with suppress(FileExistsError):
            make_owned_folder(self._folder, 0o700)
        self._path = os.path.join(self._folder, "bindings.json")
        self._lock = Lock()
        self._file = -1  # stays open, so that no later file has its inode
        self._seen = (0, 0)  # its inode and size
        self._read_end = 0
        self._changes = 0
        self._table = _Table()
        self._expiries: list[tuple[int, str]] = []  # a heap: the time of the next look at a queue that expires
        self._watched: set[str] = set()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the other processes and threads."""
        file = _open(os.path.join(self._folder, "lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def read(self) -> dict[str, Any]:
        """Return the rows of the table, which change with it."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return _Table().rows
        if (status.st_ino, status.st_size) != self._seen:
            with self._lock:
                self._read_on()
        return self._table.rows

    def _read_on(self) -> None:
        """Read what was written since the last time; under the lock."""
        file = _open(self._path, os.O_RDONLY)
        status = os.fstat(file)
        if status.st_ino == self._seen[0] and status.st_size >= self._read_end:
            os.close(file)
        else:
            self.close()
            self._file = file
        text = os.pread(self._file, status.st_size - self._read_end, self._read_end)
        for line in text[: text.rfind(b"\n") + 1].splitlines():
            if not self._read_end:
                self._table = _Table(loads(line.decode()))
                self._watch(self._table.rows["queues"], 0)
            else:
                change = loads(line.decode())
                self._table.apply(change)
                self._changes += 1
                if change[0] == "queue":
                    self._watch({change[1]: change[2]}, _clock.now_ms())
            self._read_end += len(line) + 1
        self._seen = status.st_ino, status.st_size

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._seen, self._read_end, self._changes = -1, (0, 0), 0, 0

    def change(self, *change: Any) -> None:
        """Make a change in all processes."""
        if _Table(self.read()).lacks([*change]):
            with self.locked():
                self.change_locked(*change)

    def change_locked(self, *change: Any) -> None:
        """Make a change in all processes, which are `locked` out."""
        with self._lock:
            if not os.path.exists(self._path):
                self._write_table(_Table())
            self._read_on()
            if not self._table.lacks([*change]):
                return
            line = f"{to_json([*change])}\n".encode()
            file = _open(self._path, os.O_RDWR)
            try:
                os.ftruncate(file, self._read_end)
                os.pwrite(file, line, self._read_end)
                os.fsync(file)
            finally:
                os.close(file)
            self._read_on()
            if self._changes % _MOST_CHANGES == 0 and self._changes > 2 * self._table.size:
                self._write_table(self._table)

    def _write_table(self, table: _Table) -> None:
        DiskFiles().write(self._path, f"{to_json(table.rows)}\n".encode())

    # Topics of temporary queues, such as those for replies, are used again: a topic of its own for each would stay,
    # with the files of its queue and a row of progress, until retention has deleted the last message of it.

    def free_topic(self) -> str:
        """Return a topic that no temporary queue has; called while other processes are `locked` out."""
        used = {arguments.get(TOPIC) for arguments in self.read()["queues"].values()}
        return next(name for number in count(1) if (name := f"kombu_temporary_{number}") not in used)

    # A consumer holds a lock on the file of a queue that expires or is deleted with its last consumer; the time to the
    # expiry counts from the file's last change. A process that deletes the queue excludes others by the same lock until
    # everything of the queue is gone.

    def _used_path(self, queue: str) -> str:
        return os.path.join(self._folder, f"used-{topic_of(queue)}")

    def hold(self, queue: str) -> int:
        """Note that a queue is used until the returned file is closed, or the process ends."""
        while True:
            file = _open(self._used_path(queue), os.O_RDWR | os.O_CREAT)
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file).st_nlink:  # else the queue was deleted meanwhile
                os.utime(file)
                return file
            os.close(file)

    def _watch(self, queues: dict[str, dict[str, Any]], now_ms: int) -> None:
        """Look at queues when they can have expired."""
        for queue, arguments in queues.items():
            if "x-expires" in arguments and queue not in self._watched:
                self._watched.add(queue)
                heapq.heappush(self._expiries, (now_ms + arguments["x-expires"] if now_ms else 0, queue))

    def due(self) -> list[str]:
        """Return the queues that may have expired; each is looked at again later, unless it is deleted."""
        now_ms, names = _clock.now_ms(), list[str]()
        if not self._expiries or self._expiries[0][0] > now_ms:
            return []
        queues = self.read()["queues"]
        with self._lock:
            while self._expiries and self._expiries[0][0] <= now_ms:
                _, name = heapq.heappop(self._expiries)
                self._watched.discard(name)
                if name in queues:
                    names.append(name)
            for name in names:
                self._watch({name: queues[name]}, now_ms)
        return names

    @contextmanager
    def unused(self, queue: str, for_ms: int = 0) -> Iterator[bool]:
        """Yield whether no client has used a queue for a time; then none can declare it meanwhile."""
        with ExitStack() as opened:
            is_unused = False
            with suppress(FileNotFoundError, BlockingIOError):
                file = _open(self._used_path(queue), os.O_RDONLY)
                opened.callback(os.close, file)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(file)
                is_unused = bool(status.st_nlink) and status.st_mtime_ns // 1_000_000 + for_ms <= _clock.now_ms()
            yield is_unused

    @contextmanager
    def expired(self, queue: str) -> Iterator[bool]:
        """Yield whether no client has used a queue for its ``x-expires``; then none can declare it meanwhile."""
        expires_ms = self.read()["queues"].get(queue, {}).get("x-expires")
        if expires_ms is None:
            yield False
        else:
            with self.unused(queue, expires_ms) as is_unused:
                yield is_unused

    def remove_note(self, queue: str) -> None:
        """Remove the note of when a queue was used, which is deleted."""
        with suppress(FileNotFoundError):
            os.unlink(self._used_path(queue))


def _open(path: str, flags: int) -> int:
    try:
        return open_regular(path, flags | os.O_NOFOLLOW)
    except librmq.CorruptionError as error:
        what = f"{error.what}: delete what is there; the next process writes a file"
        raise librmq.CorruptionError(path, 0, "name", what) from error


class ClusterBindings:
    """The table as the sum of the changes in a topic, each repeated by its process while the queue is declared."""

    def __init__(self, route: KombuRoute, producer: librmq.Producer) -> None:
        self._route = route
        self._producer = producer
        self._ends: dict[Any, int] = {}
        self._rows = _Table().rows
        if not route.topic_route(_BINDINGS):
            route.create_topic(_BINDINGS, 1)

    def read(self) -> dict[str, Any]:
        """Return the rows of the table."""
        ends = {queue: bounds.max_offset for queue, bounds in self._route.queues(_BINDINGS).items()}
        if ends != self._ends:
            table = _Table()
            for message in self._route.messages(_BINDINGS):
                table.apply(loads(message.body))
            self._rows, self._ends = table.rows, ends
        return self._rows

    def change(self, *change: Any) -> None:
        """Make a change in all processes."""
        if _Table(self.read()).lacks(list(change)):
            self._producer.send(_BINDINGS, to_json(list(change)).encode())
