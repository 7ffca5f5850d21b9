"""The output of ``check`` and ``demo``: one line per step, with a bar while it runs.

Without a terminal the lines are plain, and a long step prints its progress after every tenth, or every ten seconds.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

NAME_WIDTH = 10
BAR_WIDTH = 20
SILENT_SECONDS = 10
"""After this time without a line, a step that is not redrawn prints one."""


def seconds_text(seconds: float) -> str:
    """Return a duration in readable form: ``7 s``, ``1:05 min``."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}:{whole % 60:02} min"


def bar(share: float, *, unicode: bool) -> str:
    """Draw a bar, filled to ``share``, from 0 to 1."""
    done = round(max(0.0, min(1.0, share)) * BAR_WIDTH)
    full, empty = ("━", "─") if unicode else ("#", ".")
    return full * done + empty * (BAR_WIDTH - done)


class Screen:
    """Prints lines, and redraws the last one if the output is a terminal."""

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self.stream = stream or sys.stdout
        terminal = self.stream.isatty() and os.name != "nt" and os.environ.get("TERM") != "dumb"
        self.live = terminal if live is None else live
        self.unicode = (self.stream.encoding or "").lower().startswith("utf")

    def line(self, text: str = "") -> None:
        """Print a line that stays."""
        print(("\r\x1b[2K" if self.live else "") + self._printable(text), file=self.stream, flush=True)

    def redraw(self, text: str) -> None:
        """Show a line until the next one; nothing without a terminal."""
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            print("\r\x1b[2K" + self._printable(text)[:width], end="", file=self.stream, flush=True)

    def write(self, text: str) -> None:
        """Pass on what another program has printed."""
        print(self._printable(text), end="", file=self.stream, flush=True)

    def _printable(self, text: str) -> str:
        encoding = self.stream.encoding or "ascii"
        return text.encode(encoding, "replace").decode(encoding)


class Step:
    """One line: a name, the progress of the step, and finally its outcome and duration.

    A context manager; an exception that leaves it marks the step as failed.
    """

    def __init__(self, screen: Screen, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.screen = screen
        self.name = name
        self.failed = False
        self._detail = ""
        self._share: float | None = None
        self._tenth = 0
        self._clock = clock
        self._begin = self._spoke = clock()

    def __enter__(self) -> Self:
        self.draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        outcome = "interrupted" if is_interrupted else "FAILED" if self.failed or kind else "ok"
        took = seconds_text(self._clock() - self._begin)
        detail = f"  {self._detail}" if self._detail else ""
        self.screen.line(f"{self.name:<{NAME_WIDTH}} {outcome:<6} {took:>9}{detail}")

    def show(self, detail: str, share: float | None = None) -> None:
        """Show the current action of the step, and its progress if known."""
        self._detail, self._share = detail, share
        if self.screen.live:
            self.draw()
        elif share is not None and int(share * 10) > self._tenth:
            self._tenth = int(share * 10)
            self._spoke = self._clock()
            self.screen.line(f"{self.name:<{NAME_WIDTH}} {self._tenth * 10} %, {detail}")

    def draw(self) -> None:
        """Redraw the line, which shows the elapsed time; without a terminal print it after ten seconds of silence."""
        now = self._clock()
        detail, took = f"{self._detail}  " if self._detail else "", seconds_text(now - self._begin)
        if self.screen.live:
            drawn = "" if self._share is None else bar(self._share, unicode=self.screen.unicode) + "  "
            self.screen.redraw(f"{self.name:<{NAME_WIDTH}} {drawn}{detail}{took}")
        elif now - self._spoke >= SILENT_SECONDS:
            self._spoke = now
            self.screen.line(f"{self.name:<{NAME_WIDTH}} {detail}{took}")

    def finish(self, detail: str, *, failed: bool = False) -> None:
        """Set the text of the last line."""
        self._detail, self._share, self.failed = detail, None, failed
