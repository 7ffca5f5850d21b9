"""Locks whose ``with`` blocks release them even if a signal handler raises, as Ctrl-C's does.

Handlers run in the main thread, between two instructions. Up to Python 3.13 none runs between taking a lock of
`threading` and entering the ``with`` block that releases it. From 3.14 on one can (python/cpython#148874), and the lock
remains taken forever. So there these locks are taken by a step of an iterator, because no handler runs right after one.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING or sys.version_info < (3, 14):
    from threading import Lock as Lock  # noqa: TID251
    from threading import RLock as RLock  # noqa: TID251
else:

    class _InWith:
        """A lock of `threading` that is taken by ``with`` in a step of an iterator."""

        __slots__ = (
            "__exit__", "__weakref__", "_acquire_restore", "_is_owned", "_release_save", "_taking",
            "acquire", "locked", "release",
        )  # fmt: skip

        def __init__(self, lock: Lock | RLock) -> None:
            self.acquire: Final = lock.acquire
            self.release: Final = lock.release
            self.locked: Final = lock.locked
            self.__exit__: Final = lock.__exit__
            self._taking: Final = iter(lock.acquire, None)
            for name in ("_acquire_restore", "_is_owned", "_release_save"):  # of a reentrant lock, for conditions
                if hasattr(lock, name):
                    setattr(self, name, getattr(lock, name))

        def __enter__(self) -> bool:
            for _ in self._taking:
                return True
            raise AssertionError("acquire() returned None")

    def Lock() -> _InWith:  # noqa: N802 (as in threading)
        """Return a lock that its holder can't take again."""
        return _InWith(threading.Lock())  # noqa: TID251

    def RLock() -> _InWith:  # noqa: N802
        """Return a lock that its holder can take again."""
        return _InWith(threading.RLock())  # noqa: TID251
