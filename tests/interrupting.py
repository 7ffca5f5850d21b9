"""Ctrl-C at any place: runs something again and again, and interrupts it each time one place later.

The places are those at which the interpreter looks for signals: at the begin of a function, behind each call, and where
a loop goes back.
"""

from __future__ import annotations

import dis
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import librmq

__all__ = ["at_each_call", "interrupted_at", "interruptions"]

_LOOKING = ("RESUME", "CALL", "JUMP_BACKWARD")


def _places(code: CodeType) -> set[int]:
    return {one.offset for one in dis.get_instructions(code) if one.opname.startswith(_LOOKING)}


@contextmanager
def interrupted_at(number: int, functions: tuple[Callable[..., Any], ...]) -> Iterator[Callable[[], bool]]:
    """Raise `KeyboardInterrupt` at place ``number`` of those that this thread comes by in ``functions``.

    Gives what tells whether that was reached.
    """
    codes = {one.__code__: _places(one.__code__) for one in functions}
    behind: dict[FrameType, int] = {}
    left, was_reached = number, False

    def bytecode(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left, was_reached
        if event == "opcode":
            before, behind[frame] = behind.get(frame), frame.f_lasti
            if before is None or before in codes[frame.f_code]:
                left -= 1
            if left < 0 and not was_reached:
                was_reached = True
                raise KeyboardInterrupt
        return bytecode

    def call(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return bytecode

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield lambda: was_reached
    finally:
        sys.settrace(before)


def interruptions(functions: tuple[Callable[..., Any], ...], act: Callable[[int], None]) -> int:
    """Call ``act(number)``, interrupted at place ``number`` of ``functions``, until that is not reached.

    ``act`` may let the `KeyboardInterrupt` out. Gives how often it was interrupted.
    """
    for number in itertools.count():
        with interrupted_at(number, functions) as was_reached:
            try:
                act(number)
            except KeyboardInterrupt:
                assert was_reached()
        if not was_reached():
            return number
    raise AssertionError


def at_each_call(
    act: Callable[[], object],
    number: int = signal.SIGINT,
    error: type[BaseException] = KeyboardInterrupt,
    first: int = 0,
) -> Iterator[bool]:
    """Call ``act()`` again and again; a signal comes with one call that librmq makes, then with the next.

    That is where Python looks for signals: as a function begins, and as one that is written in C returns. They begin
    with call ``first``. Yields after each ``act()`` whether the signal came; the last time it did not. ``error`` is
    what its handler raises.
    """
    folder = os.path.dirname(librmq.__file__)
    for place in itertools.count(first):
        left, came = place, False

        def look(frame: FrameType, event: str, _: object) -> None:
            nonlocal left, came
            code = frame.f_code
            if event not in ("call", "c_return") or not code.co_filename.startswith(folder):
                return
            if code.co_name != "__del__":  # what is raised there goes nowhere
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
