"""A progress bar on a terminal for work that takes longer than a second, with rate and remaining time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Literal, Self, TextIO

from librmq.clock import Clock, SystemClock

__all__ = ["ProgressBar", "waiting"]

_FIRST_S: Final = 1.0
_EVERY_S: Final = 0.1

Unit = Literal["bytes", "messages"]


class ProgressBar:
    """Progress of a command towards a total; shows nothing in the first second, off a terminal, or without ``rich``.

    Rows that a command prints on a terminal while it works would mix with the bar: then ``quiet`` is true.
    """

    def __init__(
        self,
        what: str,
        total: int,
        unit: Unit = "bytes",
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock or SystemClock()
        self._is_shown = not quiet and self._stream.isatty()
        self._began = self._clock.monotonic()
        self._next = self._began + _FIRST_S
        self._bar: Any = None
        self._task: Any = None

    def to(self, done: int) -> None:
        """Show that ``done`` of the total is done."""
        if not self._is_shown or self._clock.monotonic() < self._next:
            return
        self._next = self._clock.monotonic() + _EVERY_S
        if self._bar is None:
            self._bar = self._begin()
            if self._bar is None:
                self._is_shown = False
                return
        seconds = self._clock.monotonic() - self._began
        self._bar.update(self._task, completed=done, rate=f"{done / seconds:,.0f}/s")
        self._bar.refresh()

    def _begin(self) -> object:
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            return None
        amount: list[progress.ProgressColumn]
        if self._unit == "bytes":
            amount = [progress.DownloadColumn(), progress.TransferSpeedColumn()]
        else:
            amount = [progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[rate]}")]
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            *amount,
            progress.TimeRemainingColumn(),
            console=Console(file=self._stream),
            auto_refresh=False,
            transient=True,
            get_time=self._clock.monotonic,
        )
        self._task = bar.add_task(self._what, total=self._total, rate="")
        # The work of the first second counts too.
        bar.tasks[0].start_time = self._began
        bar.start()
        return bar

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def waiting(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show on a terminal that work of unknown length goes on, from its first second on, with the time it has taken."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield
        return
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        yield
        return
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TimeElapsedColumn(),
        console=Console(file=stream),
        transient=True,
    )
    bar.add_task(what, total=None)
    timer = threading.Timer(_FIRST_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
