"""Ctrl-C safety: a signal during a critical block is handled right after it.

Python runs signal handlers in the main thread between two instructions, and a handler can raise there, as Ctrl-C's
does. Code that makes several changes that must agree puts them in a ``with critical:`` block. In the main thread every
signal with a Python handler is then noted, and its handler is called at the end of the block. In other threads, where
no handler runs, the block costs a comparison; in the main thread it costs some microseconds. Code that is too hot for
this sets a mark during its changes, and the next caller repairs them (`MessageStore.append`).

Setting a handler resets how system calls continue after the signal, so the choice of `signal.siginterrupt` is restored.

Blocks nest; the outermost one counts. A block may wait for a disk, but not for code of the application, because Ctrl-C
would wait too.
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

    def note(self, number: int, frame: FrameType | None) -> None:
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
    critical.note(number, frame)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=critical.after_fork)
