"""A progress bar on a terminal for work that takes longer than a second, with rate and remaining time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Final, Literal, Self, TextIO

from librmq.clock import Clock, SystemClock
from librmq.files.disk import DiskFiles
from librmq.runtime.call_progress import watched
from librmq.store.format.directory import COMMITLOG

_FIRST_S: Final = 1.0
_EVERY_S: Final = 0.1

Unit = Literal["bytes", "messages", "topics"]


class ProgressBar:
    """Progress of a command towards a total; shows nothing in the first second, off a terminal, or without ``rich``.

    Rows that a command prints on a terminal while it works would mix with the bar: then ``quiet`` is true.
    """

    def __init__(
        self,
        what: str,
        total: int,  # 0: unknown
        unit: Unit = "bytes",
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock or SystemClock()
        self._is_shown = not quiet and self._stream.isatty()
        self._began = self._clock.monotonic()
        self._next = self._began + _FIRST_S
        self._bar: Any = None
        self._task: Any = None

    def advance(self, more: int, total: int | None = None) -> None:
        """Show that ``more`` is done than before, of a total that may be better known by now."""
        self._total = self._total if total is None else total
        self.to(self._done + more)

    def to(self, done: int) -> None:
        """Show that ``done`` of the total is done."""
        self._done = done
        if not self._is_shown or self._clock.monotonic() < self._next:
            return
        self._next = self._clock.monotonic() + _EVERY_S
        if self._bar is None:
            self._bar = self._begin()
            if self._bar is None:
                self._is_shown = False
                return
        seconds = self._clock.monotonic() - self._began
        self._bar.update(self._task, completed=done, total=self._total or None, rate=f"{done / seconds:,.0f}/s")
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
        self._task = bar.add_task(self._what, total=self._total or None, rate="")
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
def watching_bar(what: str, total: int, unit: Unit = "bytes", *, quiet: bool = False) -> Iterator[None]:
    """Show the progress that calls inside the block report."""
    with ProgressBar(what, total, unit, quiet=quiet) as bar, watched(bar.advance):
        yield


def log_bar(what: str, store: str, passes: int, *, quiet: bool = False) -> AbstractContextManager[None]:
    """Show the progress of calls that walk over the log of a store some times."""
    files = DiskFiles().list(os.path.join(store, COMMITLOG))
    return watching_bar(what, passes * sum(file.size for file in files), quiet=quiet)
