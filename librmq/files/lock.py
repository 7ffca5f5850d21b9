"""A store's lock file, locked so that a broker's JVM and other processes see it."""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
from typing import Final

from librmq.errors import StoreIOError, StoreLockedError

if sys.platform != "win32":
    import fcntl
from librmq.files.seam import named

__all__ = ["DiskLock", "lock_holder"]


_LOCKED_BYTE: Final = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid

# The process's own locks by (device, inode): fcntl does not exclude one's own process, and closing any descriptor
# of the file would release the lock, so the file of a held lock is never opened again here.
_held: dict[tuple[int, int], str] = {}
_held_guard = threading.Lock()


def _conflict(descriptor: int) -> str | None:
    """Who would be in the way of locking the first byte."""
    asked = _LOCKED_BYTE.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    kind, _, _, _, pid = _LOCKED_BYTE.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else f"process {pid}"


class DiskLock:
    """The first byte of the lock file, locked as the broker's JVM does (``FileChannel.tryLock(0, 1, false)``)."""

    def __init__(self, path: str) -> None:
        with _held_guard, named("lock", path):
            if os.path.exists(path):
                status = os.stat(path)
                if (status.st_dev, status.st_ino) in _held:
                    raise StoreLockedError(f"{path}: locked by this process (pid {os.getpid()})")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if sys.platform != "win32":
                    try:
                        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
                    except OSError as error:
                        if error.errno not in (errno.EACCES, errno.EAGAIN):
                            raise
                        holder = _conflict(descriptor) or "another process"
                        raise StoreLockedError(f"{path}: locked by {holder}") from None
                os.pwrite(descriptor, b"lock", 0)
                status = os.fstat(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            self._key = (status.st_dev, status.st_ino)
            self._descriptor = descriptor
            _held[self._key] = path

    def release(self) -> None:
        with _held_guard:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                _held.pop(self._key, None)


def _after_fork() -> None:
    global _held_guard
    _held.clear()  # locks of fcntl are not inherited: the child holds none of its parent's
    _held_guard = threading.Lock()  # some thread of the parent may hold it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def lock_holder(path: str) -> str | None:
    """Who holds the lock, None for nobody; changes nothing."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreIOError("look at the lock", path, error) from error
    with _held_guard:
        if (status.st_dev, status.st_ino) in _held:
            return f"this process (pid {os.getpid()})"
        if sys.platform == "win32":
            return None
        with named("look at the lock", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it may be anything, a pipe too
            try:
                return _conflict(descriptor)
            finally:
                os.close(descriptor)
