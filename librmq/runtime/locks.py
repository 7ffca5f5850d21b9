"""Ctrl-C safety: locks that are released even if a signal handler raises, and blocks in which no handler runs.

Handlers run in the main thread, between two instructions. Up to Python 3.13 none runs between taking a lock of
`threading` and entering the ``with`` block that releases it. From 3.14 on one can (python/cpython#148874), and the lock
remains taken forever. So there these locks are taken by a step of an iterator, because no handler runs right after one.
A handler may need the locks of the code that it has interrupted, to shut something down. Such code uses `critical` or
`Event`.

A forked child has none of its parent's threads: `call_in_child` and `Inherited` correct what it has of their locks.

Calls of the application's code wait until its thread has released the locks of runners. A logging handler, a subclass
of `Metrics` or a notification can call librmq, and takes locks of its own. Another thread can hold such a lock while it
calls librmq, and wait for the lock of a runner. So none of these is called within that, nor within another lock of
librmq: code that logs under one takes it in a block of `calls_later`.
"""

# Why so much for Ctrl-C
#
# A signal handler of Python runs in the main thread, between any two instructions of the code that runs there, and may
# raise: the default one of SIGINT raises KeyboardInterrupt. So a change of a store that takes two statements can be
# cut in two. The program may well go on: a shell prints a new prompt, a test runner runs the next test, a handler of
# an application shuts things down, and flushes and closes the very store that was being changed. What was considered:
#
# - `try` and `finally` around each change, or catching KeyboardInterrupt. The handler can raise before the `try` is
#   entered, and again within the `finally`, so there is always one more instruction to protect. It helps only where a
#   repair can be repeated: that is what the marks of an append are.
# - Blocking the signal by `pthread_sigmask`. This concerns one thread, and a signal to the process then goes to
#   another one. There the interpreter notes it, and runs the handler in the main thread all the same.
# - A handler of our own, set once at the import, which notes a signal while librmq works, as trio does for its tasks.
#   trio owns the loop in which all of them run, and sets its handler only in place of the default one. A library may
#   not replace the handlers of the application that calls it, and one that the application sets later would undo it.
#   So handlers are replaced for the time of a block, and those that were there are called at its end.
# - Changing files in a thread of its own, where no handler runs. Every append would pay for two switches of threads,
#   and a handler that interrupts the caller while it waits could not call the store either, because the store waits
#   for its caller.
# - Code in C, between whose statements no handler runs. The compiled core has this for free, but pure Python has to
#   keep the same promise.
#
# What is left is a block that puts the handlers off. It costs some microseconds, so an append, which is hotter than
# that, leaves a mark instead, by which the next caller repairs what a handler has cut in two.
#
# Neither makes a lock safe that `with` takes: if a handler raises after the lock is taken and before the block is
# entered, no `finally` knows of the lock. Up to Python 3.13 one instruction does both. From 3.14 on, taking the lock
# is a call like any other, after which handlers run. A step of an iterator closes this gap, because the loop's own
# instruction takes the lock, and no handler runs before the next one.
#
# `threading.Event` takes a lock in each method. A handler that sets the event for which the main thread is about to
# wait would therefore wait for its own thread. With a reentrant lock it would get in, in the middle of a change. Hence
# `Event` below: a flag, and a gate for each thread that waits.

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`, which cost as much as all the rest
import ctypes
import logging
import os
import signal
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from weakref import WeakSet

from librmq.errors import StoreError
from librmq.override import override

T = TypeVar("T")

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
            # A reentrant lock has them, and conditions call them.
            for name in ("_acquire_restore", "_is_owned", "_release_save"):
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


class Event(threading.Event):
    """An event that a signal handler can use while it interrupts a method of the same event.

    Each thread that waits has a gate of its own, and no lock is held where another method, or thread, could need it.
    """

    def __init__(self) -> None:
        self._flag = False
        self._gates: dict[Lock, None] = {}

    @override
    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._flag  # not as the superclass says, in whose place gevent puts a class of its own

    @override
    def set(self) -> None:
        """Let all threads pass."""
        self._flag = True
        for gate in list(self._gates):
            with suppress(RuntimeError):  # it is open
                gate.release()

    @override
    def clear(self) -> None:
        """Let threads wait again."""
        self._flag = False

    @override
    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set or the seconds have passed; return whether it is or was set."""
        if self._flag:
            return True
        gate = threading.Lock()  # noqa: TID251 (never in a `with` block; gevent's where it has replaced it)
        gate.acquire()
        try:
            self._gates[gate] = None
            seconds = -1 if timeout is None else max(0, min(timeout, threading.TIMEOUT_MAX))
            return self.is_set() or gate.acquire(timeout=seconds) or self.is_set()
        finally:
            self._gates.pop(gate, None)


def if_free(lock: Lock) -> Iterator[bool]:
    """Take a lock without waiting, in a loop that runs once with it, or not at all.

    No signal handler runs between a step of the loop and the next line::

        for _ in if_free(lock):
            try:
                ...
            finally:
                lock.release()
            break
    """
    return iter(partial(lock.acquire, False), False)


def is_held_here(lock: RLock) -> bool:
    """Return whether this thread holds a lock."""
    try:
        threading.Condition(lock).notify(0)
    except RuntimeError:
        return False
    return True


class Appending:
    """What a thread holds while it appends, and a signal handler that interrupts it must not wait for."""

    def __init__(self) -> None:
        _appending.append(weakref.ref(self, _appending.remove))

    def is_held_here(self) -> bool:
        """Return whether this thread appends."""
        raise NotImplementedError

    def check_reentry(self) -> None:
        """Refuse a call of a signal handler that has interrupted an append, because it would wait for its own thread.

        Raises:
            StoreError: The call is such a handler's.
        """
        if self.is_held_here():
            raise StoreError(
                "a signal handler called the store in the middle of a call that it interrupted, and would wait for "
                "itself forever: let the handler record the signal, and call the store after it has returned"
            )


_appending: Final[list[weakref.ref[Appending]]] = []


def check_reentry() -> None:
    """Refuse a call of a signal handler that has interrupted an append of this thread to any store.

    Another thread can wait for that append while it has a lock that the call needs.
    """
    for reference in list(_appending):
        if (appending := reference()) is not None:
            appending.check_reentry()


# ---- critical blocks

_Handler = Callable[[int, FrameType | None], Any]

_SIGNALS: Final = sorted(map(int, signal.valid_signals()))
_getsignal: Final = _signal.getsignal
_set_signal: Final = _signal.signal
_main = threading.main_thread().ident
_sigaction: Final = getattr(ctypes.PyDLL(None), "sigaction", None) if os.name == "posix" else None
_ACTION_SIZE: Final = 1024  # bytes, more than any system's


class Critical:
    """A context manager after which signals that came within it are handled. Use the one object `critical`.

    A signal handler can raise between any two instructions of the main thread, as Ctrl-C's does. Code that makes
    several changes that must agree puts them in a ``with critical:`` block. In the main thread every signal with a
    Python handler is then noted, and its handler is called at the end of the block; this costs some microseconds. In
    other threads, where no handler runs, the block costs a comparison. Code that is too hot for this sets a mark during
    its changes, and the next caller repairs them (`MessageStore.append`).

    Setting a handler resets how system calls continue after the signal, so the choice of `signal.siginterrupt` is
    restored. Blocks nest; the outermost one counts. A block may wait for a disk, but not for code of the application,
    because Ctrl-C would wait too.
    """

    def __init__(self) -> None:
        # only used by the main thread
        self._depth = 0
        self._seen: list[object] = []  # handlers at the start of the last block, by signal
        self._handlers: dict[int, _Handler] = {}  # the application's handlers among them
        self._noted: list[int] = []
        self._actions: dict[int, ctypes.Array[ctypes.c_char]] = {}  # the system's actions for `_handlers`

    def __enter__(self) -> None:
        if get_ident() != _main:
            return
        if not self._depth:
            seen = list(map(_getsignal, _SIGNALS))
            if seen != self._seen:
                self._read_handlers(seen)
            if _sigaction is not None:
                for number, action in self._actions.items():
                    _sigaction(number, None, action)
            try:
                for number in self._handlers:
                    self._set(number, _note)
            except BaseException:  # a signal came before its handler was replaced
                self.restore()
                raise
        self._depth += 1

    def _set(self, number: int, handler: _Handler) -> None:
        """Set a handler without changing the system's other settings for the signal."""
        _set_signal(number, handler)
        if _sigaction is not None:
            _sigaction(number, self._actions[number], None)

    def _read_handlers(self, seen: list[object]) -> None:
        if _note in seen:  # left by a signal at the end of a block
            self.restore()
            seen = list(map(_getsignal, _SIGNALS))
        self._seen = []
        self._handlers = {
            number: cast("_Handler", handler)
            for number, handler in zip(_SIGNALS, seen, strict=True)
            if callable(handler)
        }
        self._actions = {number: ctypes.create_string_buffer(_ACTION_SIZE) for number in self._handlers}
        self._seen = seen

    def __exit__(self, *_: object) -> None:
        if get_ident() != _main:
            return
        self._depth -= 1
        if not self._depth:
            try:
                for number, handler in self._handlers.items():
                    self._set(number, handler)
            except BaseException:  # a signal came after its handler was restored
                self.restore()
                raise
            finally:
                if self._noted:
                    self._handle_noted()

    def restore(self) -> None:
        """Restore the application's handlers. If a signal interrupts this, the next block completes it."""
        for number, handler in self._handlers.items():
            if _getsignal(number) in (_note, handler):
                self._set(number, handler)

    def record_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal after the running block, or immediately without one."""
        if self._depth:
            if number not in self._noted:
                self._noted.append(number)
        else:
            self.restore()
            self._handlers[number](number, frame)

    def _handle_noted(self) -> None:
        number = self._noted.pop(0)
        try:
            self._handlers[number](number, sys._getframe(2))
        finally:
            if self._noted:  # the other signals, even if this one raised
                self._handle_noted()

    def after_fork(self) -> None:
        """Make the surviving thread of a child process its main thread."""
        global _main
        before, _main = _main, get_ident()
        if self._depth and self._noted:
            self._noted.clear()
        if self._depth and before != _main:  # the thread that entered the block does not exist in the child
            self._depth = 0
            self.restore()


critical: Final = Critical()
"""The critical block of this process: within ``with critical:`` no signal handler runs."""


def _note(number: int, frame: FrameType | None) -> None:
    critical.record_signal(number, frame)


def call_in_child(correct: Callable[[], object]) -> None:
    """Call ``correct()`` in every forked child, in the order of these calls."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=correct)


call_in_child(critical.after_fork)


class Inherited(WeakSet[T]):
    """Objects that a forked child must correct, because their threads and locks are the parent's."""

    def __init__(self, correct: Callable[[T], object]) -> None:
        """Call ``correct`` with each object that is in the set, in every forked child."""
        super().__init__()
        call_in_child(lambda: [correct(inherited) for inherited in list(self)])


class Outside:
    """The calls that wait for the release of one lock, in the order in which they came. Thread-safe."""

    def __init__(self, is_held: Callable[[], bool], run_later: Callable[[], object]) -> None:
        """``is_held()`` returns whether this thread has the lock; ``run_later()``, under it, has `run` called soon."""
        self._is_held, self._run_later = is_held, run_later
        self.calls: deque[Callable[[], object]] = deque()
        """Those that wait."""
        self._running = Lock()
        _outsides.append(weakref.ref(self, _outsides.remove))

    def takes(self, call: Callable[[], object]) -> bool:
        """Keep a call if this thread has the lock; return whether it does."""
        if not self._is_held():
            return False
        self.calls.append(call)
        self._run_later()
        return True

    def run(self) -> None:
        """Make the calls that wait, unless this thread has the lock or defers calls, or another thread makes them."""
        if self._is_held() or _thread.calls is not None:
            return
        for _ in if_free(self._running):
            try:
                while self.calls:
                    try:
                        self.calls.popleft()()
                    except Exception:
                        _log.exception("the application's code has failed")
            finally:
                self._running.release()
            break


_log: Final = logging.getLogger("librmq.runner")
_outsides: Final[list[weakref.ref[Outside]]] = []


class _Thread(threading.local):
    calls: list[Callable[[], object]] | None = None
    """What this thread calls at the end of `calls_later`."""


_thread: Final = _Thread()


@contextmanager
def calls_later() -> Iterator[None]:
    """Make the calls of the application's code that come up within the block at its end."""
    if _thread.calls is not None:
        yield
        return
    calls: list[Callable[[], object]] = []
    try:
        _thread.calls = calls  # here, because a signal's handler can raise at any line
        yield
    finally:
        _thread.calls = None
        for call in calls:
            call_outside(call)


def call_outside(call: Callable[[], object]) -> None:
    """Call the application's code: now, or as soon as this thread has released the locks of runners."""
    if _thread.calls is not None:
        _thread.calls.append(call)
        return
    for reference in list(_outsides):
        outside = reference()
        if outside is not None and outside.takes(call):
            return
    call()
