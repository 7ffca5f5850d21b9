"""Threads that pass a baton: user code that can stop in its middle and go on later, one piece of it at a time.

A listener runs in a pooled thread while the thread that takes turns waits; when it pauses or ends the baton goes back.
So thread-locals, locks and event loops in listeners work as in production, and yet nothing runs at the same time. Only
code that waits for another listener (for a lock that one which has paused holds) is left to wait, and the others go on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

__all__ = ["Baton", "end_threads"]

PATIENCE_S: Final = 0.05
"""A piece of user code that twice in so long does not get on is taken to wait for another one that has paused."""


class _Thread:
    """A thread that waits for something to run."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.call: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._run, name="librmq-listener", daemon=True)
        self.thread.start()

    def place(self) -> tuple[object, int] | None:
        """Where it is at the moment: the same again, if it does not get on."""
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
    """End the threads that wait; others are made when they are needed."""
    while _idle:
        thread = _idle.pop()
        thread.turn.release()
        thread.thread.join()


class Baton:
    """Whoever holds it runs: the thread that takes turns, or one piece of user code."""

    def __init__(self) -> None:
        self._back: SimpleQueue[None] = SimpleQueue()
        self._mine = threading.local()

    def current(self) -> Piece | None:
        """The piece that runs in this thread."""
        return getattr(self._mine, "piece", None)

    def run(self, piece: Piece) -> bool:
        """Let a piece begin or go on, until it pauses or ends; False if it waits for something else meanwhile."""
        if piece.thread is None:
            piece.thread = _idle.pop() if _idle else _Thread()
            piece.thread.call = lambda: self._begin(piece)
        piece.thread.turn.release()
        before: tuple[object, int] | None = None
        while not self._is_back(PATIENCE_S):
            place = piece.thread.place()
            if place == before:
                return False
            before = place  # it gets on, if slowly
        return True

    def wait(self) -> None:
        """Wait for the baton, however long it takes."""
        while not self._is_back(1.0):
            pass  # in between Ctrl-C is heard

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
        """Called by the piece that runs: give the baton back, and wait for the next turn."""
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
