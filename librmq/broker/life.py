"""The life of one broker: open, closed, killed, or inherited by a child process; and its errors in each state."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from librmq.errors import (
    BrokerDiskFullError,
    BrokerError,
    BrokerStoreFullError,
    BrokerUnreachableError,
    DiskFullError,
    FlushFailedError,
    RmqError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreIOError,
)
from librmq.protocol import ResponseCode
from librmq.protocol.endpoint import Watchers

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


class BrokerLife:
    """Whether one broker answers. It owns the broker's turns, which do not run after its end."""

    def __init__(self, name: str, path: str) -> None:
        self.dead = False
        """Whether it accepts no more calls."""
        self.was_killed = False
        self.release_lock: Callable[[], object] = _nothing
        """Called in a forked child, in which no thread would release the locks of a write."""
        self._name = name
        self._path = path
        self._why = "was closed"
        self._watchers = Watchers()

    def mark_open(self) -> None:
        """Note that the broker is open; a fork ends it in the child."""
        _open.add(self)

    def mark_ended(self, *, was_killed: bool) -> None:
        """Note that the broker accepts no more calls, and notify its watchers. Under the runner's lock."""
        self.dead, self.was_killed = True, was_killed
        _open.discard(self)
        self.changed()

    def inherited(self) -> None:
        """Note that this is a copy in a forked child."""
        self.dead, self._why = True, "was opened before a fork: open the broker again in the child"
        self.release_lock()

    @property
    def why_dead(self) -> str:
        """The reason why the handle can't be used."""
        return f"{self._path}: this handle {self._why}"

    def check_open(self) -> None:
        """Raise `StoreClosedError` after the broker's end."""
        if self.dead:
            raise StoreClosedError(self.why_dead)

    def refusal(self, error: StoreError) -> RmqError:
        """Return the error for clients for an error of the store."""
        if isinstance(error, StoreClosedError):
            return BrokerUnreachableError(f"{self._name} is closed: {self.why_dead if self.dead else error}")
        kind, code = BrokerError, ResponseCode.SERVICE_NOT_AVAILABLE
        if isinstance(error, DiskFullError) or (isinstance(error, StoreIOError) and error.errno in _NO_SPACE):
            kind = BrokerDiskFullError
        elif isinstance(error, StoreFullError):
            kind = BrokerStoreFullError
        elif not isinstance(error, FlushFailedError):
            code = ResponseCode.SYSTEM_ERROR
        return kind(code, f"{self._name}: {error}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise errors of the store as errors for clients."""
        try:
            yield
        except StoreError as error:
            raise self.refusal(error) from error

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Call ``changed`` when topics change and at the end; return a function that ends this."""
        return self._watchers.watch(changed)

    def changed(self) -> None:
        """Notify the watchers that topics or queues have changed, or that the broker has ended."""
        self._watchers.notify()


def _nothing() -> None:
    """Do nothing."""


_open: Final[weakref.WeakSet[BrokerLife]] = weakref.WeakSet()


def _after_fork() -> None:
    for life in list(_open):
        life.inherited()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
