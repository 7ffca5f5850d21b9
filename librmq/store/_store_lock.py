"""The lock of a store: one process, and one handle in it, holds it while it writes."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Final

from librmq.clock import SystemClock
from librmq.errors import StoreLockedError
from librmq.files import FileLock, Files
from librmq.runtime import critical
from librmq.runtime.locks import call_in_child
from librmq.store.format import directory

_LOOK_AGAIN_S: Final = 0.05
"""Interval at which a lock of another writer is tried."""

_held: dict[FileLock, weakref.ref[object]] = {}
"""The locks of this process, with their handles."""


def lock_store(handle: object, path: str, files: Files, wait_s: float) -> FileLock:
    """Lock the store in ``path`` for ``handle``; wait ``wait_s`` for another writer, in real time.

    Raises:
        StoreLockedError: Another writer has the store.
    """
    clock, never = SystemClock(), threading.Event()
    deadline = clock.monotonic() + wait_s
    while True:
        try:
            with critical:
                return _lock(handle, path, files)
        except StoreLockedError as error:
            remaining_s = deadline - clock.monotonic()
            if remaining_s <= 0:
                raise StoreLockedError(
                    f"{error}; only one process can write to a store (docs/processes.md): close it there first; in "
                    f"Python, wait=seconds waits for that, and MessageStore.open(path, read_only=True) reads meanwhile"
                ) from None
        clock.wait(never, min(remaining_s, _LOOK_AGAIN_S))


def _lock(handle: object, path: str, files: Files) -> FileLock:
    """Take the lock; first release the lock of a handle that Ctrl-C lost."""
    place = directory.lock_path(path)
    try:
        lock = _lock_with_folder(place, files)
    except StoreLockedError:
        gc.collect()
        lost_locks = [lock for lock, holder in list(_held.items()) if holder() is None]
        if not lost_locks:
            raise
        for lost_lock in lost_locks:
            unlock_store(lost_lock)
        lock = _lock_with_folder(place, files)
    _held[lock] = weakref.ref(handle)
    return lock


def _lock_with_folder(place: str, files: Files) -> FileLock:
    lock = files.lock(place)
    try:
        lock.hold_folder()
    except BaseException:
        lock.release()
        raise
    return lock


def unlock_store(lock: FileLock) -> None:
    """Release a lock; a second call does nothing."""
    with critical:
        if _held.pop(lock, None) is not None:
            lock.release()


call_in_child(_held.clear)  # the locks are the parent's
