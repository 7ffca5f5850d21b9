"""The checkpoint, with times up to which a store's files are on the device, and the abort marker.

::

    checkpoint   physic 8 | logics 8 | index 8 | zeros (5.x: two more fields)        4096 bytes, big-endian
                 store times in milliseconds of the last records flushed in the log, the consume queues and
                 the key index
    abort        empty; exists while a store is open for writing, and after a crash

Mirrors 4.9.4's ``StoreCheckpoint`` and the ``abort`` file of ``DefaultMessageStore``.
"""

from __future__ import annotations

import os
import struct
from typing import Final, Self

from librmq.errors import CorruptionError, ReadOnlyError
from librmq.files import DiskFiles, File, Files, file_size

CHECKPOINT_SIZE: Final = 4096
_TIMES: Final = struct.Struct(">qqq")
# Records of one moment are flushed in no particular order, so recovery starts this much earlier.
_MARGIN_MS: Final = 3000


class Checkpoint:
    """Three store times, in memory until `flush`. One thread can set and flush them; any thread can read them."""

    def __init__(self, path: str, files: Files, file: File | None, *, writable: bool) -> None:
        self.path = path
        self._files = files
        self._file = file
        self._writable = writable
        times = _TIMES.unpack_from(file.buffer) if file is not None else (0, 0, 0)
        self.physic_timestamp_ms: int = times[0]
        """Store time of the last record that the log has on the device."""
        self.logics_timestamp_ms: int = times[1]
        """Store time of the last record whose queue entry is on the device."""
        self.index_timestamp_ms: int = times[2]
        """Store time of the last record in an index file that was full and flushed."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, files: Files | None = None, writable: bool = False) -> Self:
        """Read the checkpoint at ``path``; without a file the times are 0, and `flush` creates it.

        Raises:
            CorruptionError: The file has another length, or a time before 1970.
        """
        path, files = os.fspath(path), files or DiskFiles()
        size = file_size(files, path)
        if size is None:
            return cls(path, files, None, writable=writable)
        if size != CHECKPOINT_SIZE:
            what = f"expected {CHECKPOINT_SIZE} bytes, found {size}"
            raise CorruptionError(path, min(size, CHECKPOINT_SIZE), "size", what)
        checkpoint = cls(path, files, files.open(path, writable=writable), writable=writable)
        for place, time_ms in enumerate(checkpoint.times_ms):
            if time_ms < 0:
                raise CorruptionError(path, 8 * place, "header", f"expected a time, found {time_ms} ms")
        return checkpoint

    @property
    def times_ms(self) -> tuple[int, int, int]:
        """The times of log, queues and index, in the order of the file."""
        return self.physic_timestamp_ms, self.logics_timestamp_ms, self.index_timestamp_ms

    @property
    def min_timestamp_ms(self) -> int:
        """Store time up to which log and queues are complete."""
        return max(0, min(self.physic_timestamp_ms, self.logics_timestamp_ms) - _MARGIN_MS)

    def lower(self, now_ms: int) -> None:
        """Lower the times to now if the clock was set back, so that they do not cover later records; flush a change."""
        if max(self.times_ms) > now_ms:
            lowered = (min(time_ms, max(now_ms, 0)) for time_ms in self.times_ms)
            self.physic_timestamp_ms, self.logics_timestamp_ms, self.index_timestamp_ms = lowered
            self.flush()

    def _clear_index_time(self) -> None:
        """Set the index time to 0, before a rebuild of the index; durable when it returns."""
        if self.index_timestamp_ms:
            self.index_timestamp_ms = 0
            self.flush()

    def flush(self) -> None:
        """Write the times and return when they have reached the device."""
        if not self._writable:
            raise ReadOnlyError(f"{self.path} is open for reading only")
        if self._file is None:
            self._file = self._files.create(self.path, CHECKPOINT_SIZE)
            self._files.flush_folder(os.path.dirname(self.path))
        self._files.reserve(self._file, 0, CHECKPOINT_SIZE)
        self._file.buffer[: _TIMES.size] = _TIMES.pack(
            *(max(time_ms, 0) for time_ms in self.times_ms)
        )  # none before 1970
        self._files.flush(self._file)

    def close(self) -> None:
        """Release the file, after which the checkpoint can't be written."""
        self._file = None
        self._writable = False
