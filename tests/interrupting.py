"""Real signals at any place: run an action repeatedly, and send a signal one call later each time; or die at a line."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import librmq
from tests.lock_order import begin, elsewhere

__all__ = ["at_each_call", "interrupted_at_call", "killed_at_line"]


def interrupted_at_call(number: int, act: Callable[[], object]) -> bool:
    """Call ``act()`` and send SIGINT at the given call that librmq makes; return whether there were that many calls."""
    return next(at_each_call(act, first=number))


def at_each_call(
    act: Callable[[], object],
    number: int = signal.SIGINT,
    error: type[BaseException] = KeyboardInterrupt,
    first: int = 0,
    within: str = os.path.dirname(librmq.__file__),
) -> Iterator[bool]:
    """Call ``act()`` repeatedly, and send a signal at one call that librmq makes, then at the next.

    Calls are the places where Python checks for signals: a function begins, or a C function returns. The first signal
    arrives at call ``first``. ``error`` is the exception that the signal's handler raises. Yield after each ``act()``
    whether the signal arrived; the first time it does not is the last. ``within`` is the folder of the calls.
    """
    for place in itertools.count(first):
        left, came = place, False

        def look(frame: FrameType, event: str, _: object) -> None:
            nonlocal left, came
            code = frame.f_code
            if event not in ("call", "c_return") or not code.co_filename.startswith(within):
                return
            if code.co_name != "__del__":  # Python ignores errors raised there
                left -= 1
                if left < 0 and not came:
                    came = True
                    with elsewhere():  # a handler may take what it has interrupted, or is refused
                        signal.raise_signal(number)

        before = sys.getprofile()
        sys.setprofile(look)
        try:
            act()
        except error:
            assert came
        finally:
            sys.setprofile(before)
            begin()
        yield came
        if not came:
            return


def killed_at_line(line: int, act: Callable[[], object]) -> None:
    """Call ``act()``, and end this process by SIGKILL at a line of librmq, counted from 0, if there are that many.

    Lines of threads that begin meanwhile count too.
    """
    folder, left = os.path.dirname(librmq.__file__), line

    def look(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return look

    threading.settrace(look)
    sys.settrace(look)
    act()
    sys.settrace(None)
    threading.settrace(None)
