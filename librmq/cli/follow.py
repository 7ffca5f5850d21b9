"""``follow``: a copy of a store that another process writes, kept up to date beside it."""

from __future__ import annotations

import argparse
import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

from librmq.cli.output import INTERRUPTED, JsonLines, Output, complain
from librmq.cli.progress import ProgressBar

if TYPE_CHECKING:
    from librmq.cluster import Replica

_POLL_S: Final = 0.2
_CLEAR: Final = "\r\x1b[K"


class StatusLine:
    """One line on a terminal that is replaced by the next; nothing elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_shown = stream.isatty()
        self._last = ""

    def show(self, text: str) -> None:
        """Replace the line; an empty text removes it."""
        if self._is_shown and text != self._last:
            self._last = text
            self._stream.write(_CLEAR + text)
            self._stream.flush()


def follow(arguments: argparse.Namespace, output: Output) -> int:
    """Keep the copy up to date until a signal ends it, or copy up to the present end."""
    from librmq.cluster import Replica

    if output.is_on_terminal:  # a table would wait until it is full
        output = Output(JsonLines(sys.stdout))
    with ExitStack() as following:
        ended = following.enter_context(_signals())
        with Replica.open(arguments.copy, of=arguments.store) as replica:
            lines = _States(replica, output)
            is_complete = _catch_up(replica, lines, ended)
            if not arguments.until_end:
                _keep_up(replica, lines, ended)
            elif is_complete:
                is_complete = replica.follow()
            lines.row("ended")
    if arguments.until_end and not is_complete:
        complain("interrupted")
        return INTERRUPTED
    return 0


@contextmanager
def _signals() -> Iterator[queue.SimpleQueue[int]]:
    """Put the numbers of SIGINT and SIGTERM in a queue."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    before = {
        number: signal.signal(number, lambda number, _: ended.put(number)) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _States:
    """The rows that a program reads: one for each change of state."""

    def __init__(self, replica: Replica, output: Output) -> None:
        self._replica = replica
        self._output = output
        self._state = ""
        self.row("copying")

    def row(self, state: str) -> None:
        """Print a row if the state is another one."""
        if state == self._state:
            return
        self._state, replica = state, self._replica
        row: dict[str, Any] = {"type": "follow", "state": state}
        self._output.row({**row, "physical_offset": replica.end, "lag_bytes": replica.lag_bytes})
        self._output.flush()

    def update(self) -> None:
        """Print a row if the master has become reachable or unreachable; raise why the replica has stopped."""
        if self._replica.failure is not None:
            raise self._replica.failure
        self.row("current" if self._replica.reaches_master else "unreachable")


def _has_ended(ended: queue.SimpleQueue[int]) -> bool:
    """Wait briefly for a signal."""
    try:
        ended.get(timeout=_POLL_S)
    except queue.Empty:
        return False
    return True


def _catch_up(replica: Replica, lines: _States, ended: queue.SimpleQueue[int]) -> bool:
    """Wait until the copy has everything, with a bar; return False if a signal came before."""
    begin = replica.end
    with ProgressBar("follow", replica.lag_bytes) as bar:
        while replica.lag_bytes or not replica.reaches_master:
            if _has_ended(ended):
                return False
            if replica.failure is not None:
                raise replica.failure
            bar.to(replica.end - begin)
    lines.update()
    return True


def _keep_up(replica: Replica, lines: _States, ended: queue.SimpleQueue[int]) -> None:
    """Show the state until a signal comes."""
    status = StatusLine(sys.stderr)
    try:
        while not _has_ended(ended):
            lines.update()
            what = f"{replica.lag_bytes:,} behind" if replica.reaches_master else "the master cannot be read"
            status.show(f"{replica.path}: {replica.end:,} bytes, {what}; Ctrl-C ends")
    finally:
        status.show("")
