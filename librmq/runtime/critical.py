"""Ctrl-C safety: a signal that comes during a critical stretch is taken right after it.

Python runs signal handlers in the main thread between two instructions, and a handler may raise there: Ctrl-C's does.
Code that changes several things which must agree says ``with critical:`` around them. In the main thread every signal
that has a Python handler is then noted instead of handled, and its handler is called when the stretch has ended. In
other threads, where no handler runs, the stretch costs a comparison; in the main thread some microseconds. What is too
hot for that leaves a mark while it changes things, by which the next caller repairs them (`MessageStore.append`).

Setting a handler resets how system calls go on after the signal, so what `signal.siginterrupt` chose is put back.

Stretches nest; the outermost one counts. Waiting for a disk is fine within one, waiting for other code
of the application is not: Ctrl-C would wait too.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums of `signal`, which cost as much as all the rest
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, Final, cast

__all__ = ["critical"]

_Handler = Callable[[int, FrameType | None], Any]

_SIGNALS: Final = sorted(map(int, signal.valid_signals()))
_getsignal: Final = _signal.getsignal
_set_signal: Final = _signal.signal
_main = threading.main_thread().ident
_sigaction: Final = getattr(ctypes.PyDLL(None), "sigaction", None) if os.name == "posix" else None
_ACTION_SIZE: Final = 1024  # bytes, more than any system's


class Critical:
    """A context manager within which no signal handler runs. Use the one object `critical`."""

    def __init__(self) -> None:
        # only used by the main thread
        self._depth = 0
        self._seen: list[object] = []  # the handler of each signal when a block last began
        self._handlers: dict[int, _Handler] = {}  # the application's handlers among them
        self._noted: list[int] = []
        self._actions: dict[int, ctypes.Array[ctypes.c_char]] = {}  # the system's of `_handlers`

    def __enter__(self) -> None:
        if get_ident() != _main:
            return
        if not self._depth:
            seen = list(map(_getsignal, _SIGNALS))
            if seen != self._seen:
                self._look(seen)
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
        """Set a handler, and nothing else of what the system does at the signal."""
        _set_signal(number, handler)
        if _sigaction is not None:
            _sigaction(number, self._actions[number], None)

    def _look(self, seen: list[object]) -> None:
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
            except BaseException:  # a signal came when its handler was restored already
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

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal later if a block runs, otherwise at once."""
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
            if self._noted:  # although that one has raised
                self._handle_noted()

    def after_fork(self) -> None:
        """Make the surviving thread of a child process its main thread."""
        global _main
        before, _main = _main, get_ident()
        if self._depth and self._noted:
            self._noted.clear()
        if self._depth and before != _main:  # the thread whose block this is does not exist here
            self._depth = 0
            self.restore()


critical: Final = Critical()
"""The critical block of this process."""


def _note(number: int, frame: FrameType | None) -> None:
    critical.note(number, frame)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=critical.after_fork)
