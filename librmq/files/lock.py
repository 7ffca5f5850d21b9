"""A store's lock file, locked so that a broker's JVM and other processes see it.

The first byte is locked as the broker does (``FileChannel.tryLock(0, 1, false)``). A lock of ``fcntl`` belongs to the
process and ends when the process closes any descriptor of the file, even one that a backup opened for reading. Linux
also has locks of the open file description: they conflict with the others and end only with the descriptor that took
them. Within the process a registry refuses a second writer.

The file can be deleted under its holder, and a second writer would lock the next one. So the folder is locked too, by
``flock``, which only librmq sees.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from contextlib import suppress
from typing import Final

from librmq.errors import StoreIOError, StoreLockedError
from librmq.files.interface import SystemCall
from librmq.files.regular import open_regular
from librmq.runtime import critical
from librmq.runtime.locks import Inherited, Lock, call_in_child

if sys.platform != "win32":
    import fcntl

_FLOCK: Final = struct.Struct("qqihh" if sys.platform == "darwin" else "hhqqi4x")
"""``struct flock``: type, whence, start, length, pid on 64-bit Linux; start, length, pid, type, whence on macOS."""
HAS_PEER_LOCKS: Final = sys.platform == "linux" and _FLOCK.size == 32 and struct.calcsize("P") == 8
"""Whether locks can belong to an open file, so that peers of a share can hold parts of one lock, and append."""
_CONTENT: Final = b"lock"
"""What a broker writes into the file at each start."""
_OPEN: Final = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
_CONFLICTS: Final = (errno.EACCES, errno.EAGAIN)

_Key = tuple[int, int]  # device and inode
_held: dict[_Key, DiskLock] = {}
_held_guard = Lock()
_holders: dict[_Key, tuple[int, int]] = {}  # process and descriptor that held a lock when last looked for


class DiskLock:
    """The lock of one store, held until `release`.

    With ``folder``, the descriptor of the file's folder, the file is opened there, because a link could have replaced
    the folder since it was checked. With ``has_peers`` processes that share the store can have a `PeerLock` beside it;
    the lock of the folder then keeps a second owner out.

    Raises:
        StoreLockedError: Another writer holds it; the message names the process where it can be known.
        CorruptionError: The name belongs to something else than a regular file, such as a symbolic link.
        StoreIOError: The file can't be opened, written or locked.
    """

    def __init__(self, path: str, folder: int | None = None, *, has_peers: bool = False) -> None:
        self._path = os.path.abspath(path)
        self._has_peers = has_peers
        self._descriptor = self._folder = -1
        with _held_guard, SystemCall("lock", path):
            for held in _held.values():
                if held._path == self._path:
                    raise StoreLockedError(f"{path}: locked by this process (pid {os.getpid()})")
            while self._descriptor < 0:
                self._descriptor, self._key = self._open_locked(path, folder)

    def _open_locked(self, path: str, folder: int | None) -> tuple[int, _Key]:
        """Return the descriptor of the locked file (-1 if the file was replaced meanwhile) and the file's identity."""
        name = path if folder is None else os.path.basename(path)
        with suppress(OSError):
            if _key_of(os.stat(name, dir_fd=folder)) in _held:  # closing the file could end that lock
                raise StoreLockedError(f"{path}: locked by this process (pid {os.getpid()})")
        descriptor = open_regular(path, _OPEN, 0o644, name=name, folder=folder)
        try:
            status = os.fstat(descriptor)
            if sys.platform != "win32":
                self._lock(descriptor, path)
            if not _is_at(name, _key_of(status), folder):
                os.close(descriptor)
                return -1, _key_of(status)
            # A file that has the content keeps its time, by which `FileStatus.is_untouched` knows it.
            if status.st_size != len(_CONTENT):
                os.write(descriptor, _CONTENT)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
        _held[_key_of(status)] = self
        return descriptor, _key_of(status)

    def _lock(self, descriptor: int, path: str) -> None:
        try:
            _set_lock(descriptor, fcntl.F_RDLCK if self._has_peers else fcntl.F_WRLCK)
        except OSError as error:
            if error.errno not in _CONFLICTS:
                raise
            holder = _conflict(descriptor, os.fstat(descriptor), path) or 0
            raise StoreLockedError(f"{path}: locked by {_described(holder)}") from None

    def hold_folder(self) -> None:
        """Lock the folder too, where the file system can; see `FileLock.hold_folder`."""
        if sys.platform == "win32":
            return
        folder = os.path.dirname(self._path)
        with SystemCall("lock", folder):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                pid = _find_holder(_key_of(os.fstat(descriptor)))
                os.close(descriptor)
                if error.errno in _CONFLICTS:
                    why = "" if self._has_peers else ", whose lock file was deleted"
                    raise StoreLockedError(f"{self._path}: locked by {_described(pid)}{why}") from None
                return
            self._folder = descriptor

    def mark_untouched(self) -> None:
        """Date the lock file back to 1970; see `FileLock.mark_untouched`."""
        with SystemCall("date back", self._path):
            os.utime(self._descriptor if os.utime in os.supports_fd else self._path, ns=(0, 0))

    def check(self) -> None:
        """Check that the lock file was not replaced, since another writer could lock the new one.

        Raises:
            StoreIOError: It was deleted or replaced.
        """
        if not _is_at(self._path, self._key):
            what = OSError(errno.ESTALE, "the lock file was deleted or replaced: another process may write here too")
            raise StoreIOError("keep the lock", self._path, what)

    def release(self) -> None:
        """Release the lock; a repetition does nothing."""
        with critical, _held_guard:
            if self._descriptor >= 0:
                descriptor, self._descriptor = self._descriptor, -1
                folder, self._folder = self._folder, -1
                _held.pop(self._key, None)
                try:
                    if sys.platform != "win32":  # a child between fork and exec can have a copy of the descriptor
                        if folder >= 0:
                            fcntl.flock(folder, fcntl.LOCK_UN)
                        _set_lock(descriptor, fcntl.F_UNLCK)
                finally:
                    os.close(descriptor)
                    if folder >= 0:
                        os.close(folder)

    def close_after_fork(self) -> None:
        """Close a forked child's copy of the descriptors; the parent keeps its lock."""
        for descriptor in (self._descriptor, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._folder = -1


class PeerLock:
    """What a peer of a share holds beside its owner: no other writer, a broker's JVM neither, gets the lock meanwhile.

    Raises:
        StoreLockedError: Another writer has the lock.
        StoreIOError: The file can't be opened or locked.
    """

    def __init__(self, path: str) -> None:
        with SystemCall("lock", path):
            self._descriptor = open_regular(path, os.O_RDWR)
            try:
                _set_lock(self._descriptor, fcntl.F_RDLCK)
            except OSError as error:
                os.close(self._descriptor)
                if error.errno not in _CONFLICTS:
                    raise
                raise StoreLockedError(f"{path}: locked by another process") from None
        _peer_locks.add(self)

    def release(self) -> None:
        """Release the lock; a repetition does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_peer_locks: Final[Inherited[PeerLock]] = Inherited(PeerLock.release)
"""A forked child closes its copies, which would keep the lock when the parent has ended."""


def _after_fork() -> None:
    global _held_guard
    _held_guard = Lock()  # a thread of the parent may hold it
    for lock in list(_held.values()):
        lock.close_after_fork()
    _held.clear()


call_in_child(_after_fork)


def lock_holder(path: str) -> str | None:
    """Return the holder of the lock of the file ``path``, None if it is free. Changes nothing."""
    process = lock_process(path)
    if process == os.getpid():
        return f"this process (pid {process})"
    return None if process is None else _described(process)


def lock_process(path: str, *, is_whole: bool = False) -> int | None:
    """Return the process that holds the lock of the file ``path``, 0 if it is not visible, None if the lock is free.

    ``is_whole`` asks for a lock by ``flock``, and returns 0 if that is free too.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreIOError("look at the lock", path, error) from error
    with _held_guard:
        if is_whole:
            return _find_holder(_key_of(status))
        if _key_of(status) in _held:
            return os.getpid()
        if sys.platform == "win32":
            return None
        with SystemCall("look at the lock", path):
            try:
                descriptor = open_regular(path)
            except FileNotFoundError:  # deleted since the look
                return None
            try:
                return _conflict(descriptor, status, path)
            finally:
                os.close(descriptor)


def _is_at(name: str, key: _Key, folder: int | None = None) -> bool:
    try:
        return _key_of(os.lstat(name, dir_fd=folder)) == key
    except FileNotFoundError:
        return False


def _key_of(status: os.stat_result) -> _Key:
    return status.st_dev, status.st_ino


def _set_lock(descriptor: int, kind: int) -> None:
    """Lock or unlock the first byte, by the open file description where the system can."""
    if HAS_PEER_LOCKS:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(kind))
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the kernel or the file system lacks such locks
                raise
    fcntl.lockf(descriptor, fcntl.LOCK_UN if kind == fcntl.F_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)


def _flock(kind: int) -> bytes:
    if sys.platform == "darwin":
        return _FLOCK.pack(0, 1, 0, kind, os.SEEK_SET)
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0)


def _described(process: int) -> str:
    return f"process {process}" if process else "another process"


def _conflict(descriptor: int, status: os.stat_result, path: str) -> int | None:
    """Return the process that holds a lock of the first byte, 0 if it is not visible, None if the lock is free.

    Of an owner and its peers, which hold it together, it is the owner, which holds the folder too.
    """
    fields = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, _flock(fcntl.F_WRLCK)))
    pid: int
    kind: int
    pid, kind = (fields[2], fields[3]) if sys.platform == "darwin" else (fields[4], fields[0])
    if kind == fcntl.F_UNLCK:
        return None
    if pid <= 0 and kind == fcntl.F_RDLCK:
        with suppress(OSError):
            pid = _find_holder(_key_of(os.stat(os.path.dirname(os.path.abspath(path)))))
    if pid <= 0:  # a lock of an open file description, which has no process
        pid = _find_holder(_key_of(status))
    return pid


def _find_holder(key: _Key) -> int:
    """Return the process that has a locked descriptor of the file, 0 if none is visible."""
    holder = _holders.get(key)
    if holder is not None and _has_lock(*holder, key):
        return holder[0]
    _holders.pop(key, None)
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError):  # the process ended meanwhile or belongs to another user
                    for descriptor in map(int, os.listdir(f"/proc/{name}/fd")):
                        if _has_lock(int(name), descriptor, key):
                            _holders[key] = int(name), descriptor
                            return int(name)
    return 0


def _has_lock(pid: int, descriptor: int, key: _Key) -> bool:
    with suppress(OSError):
        if _key_of(os.stat(f"/proc/{pid}/fd/{descriptor}")) == key:
            with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as file:
                return "lock:" in file.read()
    return False
