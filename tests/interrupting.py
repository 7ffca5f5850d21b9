"""Real signals at any place: runs something repeatedly, and sends a signal one place later each time."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import librmq

__all__ = ["at_each_call", "interrupted_at_call"]


def interrupted_at_call(number: int, act: Callable[[], object]) -> bool:
    """Call ``act()`` with SIGINT at one of its calls of librmq; return whether it made that many calls."""
    return next(at_each_call(act, first=number))


def at_each_call(
    act: Callable[[], object],
    number: int = signal.SIGINT,
    error: type[BaseException] = KeyboardInterrupt,
    first: int = 0,
) -> Iterator[bool]:
    """Call ``act()`` repeatedly; a signal arrives at one call that librmq makes, then at the next.

    Python checks for signals there: when a function begins, and when a C function returns. The first signal arrives at
    call ``first``. Yields after each ``act()`` whether the signal arrived; the last time it did not. ``error`` is what
    its handler raises.
    """
    folder = os.path.dirname(librmq.__file__)
    for place in itertools.count(first):
        left, came = place, False

        def look(frame: FrameType, event: str, _: object) -> None:
            nonlocal left, came
            code = frame.f_code
            if event not in ("call", "c_return") or not code.co_filename.startswith(folder):
                return
            if code.co_name != "__del__":  # errors there are lost
                left -= 1
                if left < 0 and not came:
                    came = True
                    signal.raise_signal(number)

        before = sys.getprofile()
        sys.setprofile(look)
        try:
            act()
        except error:
            assert came
        finally:
            sys.setprofile(before)
        yield came
        if not came:
            return
