"""Threads that pass a baton: user code can pause and continue later, one piece at a time.

A listener runs in a pooled thread while the thread that takes turns waits; at a pause or its end the baton goes back.
So thread-locals, locks and event loops in listeners work as in production, and still nothing runs in parallel. A
listener that waits for a lock of a paused one stays waiting, and the others continue.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from librmq.runtime.locks import Lock

PATIENCE_S: Final = 0.05
"""A piece of user code without progress for two such periods counts as waiting for a paused one."""


class _Thread:
    """A thread that waits for a call to run."""

    def __init__(self) -> None:
        self.turn = Lock()
        self.turn.acquire()
        self.call: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._run, name="librmq-listener", daemon=True)
        self.thread.start()

    def place(self) -> tuple[object, int] | None:
        """Return the present place of the thread; two equal places mean no progress."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return None if frame is None else (frame.f_code, frame.f_lasti)

    def _run(self) -> None:
        while True:
            self.turn.acquire()
            call = self.call
            if call is None:
                return
            self.call = None
            call()


_idle: list[_Thread] = []


def end_threads() -> None:
    """End the waiting threads; new ones are made on demand."""
    while _idle:
        thread = _idle.pop()
        thread.turn.release()
        thread.thread.join()


class Baton:
    """Its holder runs: the thread that takes turns, or one piece of user code."""

    def __init__(self) -> None:
        self._back: SimpleQueue[None] = SimpleQueue()
        self._mine = threading.local()

    def current(self) -> Piece | None:
        """Return the piece that runs in this thread."""
        return getattr(self._mine, "piece", None)

    def run(self, piece: Piece) -> bool:
        """Run a piece until it pauses or ends; return False if it waits for another piece."""
        if piece.thread is None:
            piece.thread = _idle.pop() if _idle else _Thread()
            piece.thread.call = lambda: self._begin(piece)
        piece.thread.turn.release()
        before: tuple[object, int] | None = None
        while not self._is_back(PATIENCE_S):
            place = piece.thread.place()
            if place == before:
                return False
            before = place  # it makes progress, if slowly
        return True

    def wait(self) -> None:
        """Wait for the baton without a limit."""
        while not self._is_back(1.0):
            pass  # Ctrl-C gets in between the waits

    def _is_back(self, seconds: float) -> bool:
        try:
            self._back.get(timeout=seconds)
        except Empty:
            return False
        return True

    def _begin(self, piece: Piece) -> None:
        self._mine.piece = piece
        thread = piece.thread
        try:
            piece.call()
        except BaseException as error:
            piece.raised = error
        finally:
            self._mine.piece = None
            piece.ended = True
            if thread is not None:
                _idle.append(thread)
            self._back.put(None)

    def pause(self, piece: Piece) -> None:
        """Give the baton back from within the running piece, and wait for the next turn."""
        assert piece.thread is not None
        self._back.put(None)
        piece.thread.turn.acquire()


class Piece:
    """A piece of user code that runs in a pooled thread."""

    __slots__ = ("call", "ended", "raised", "thread")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.thread: _Thread | None = None
        self.ended = False
        self.raised: BaseException | None = None
