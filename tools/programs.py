"""Runs a program and watches its output, while a line of the screen shows the elapsed time, or beside another one."""

from __future__ import annotations

import codecs
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from screen import Screen, Step

REDRAW_SECONDS = 0.2
GRACE_SECONDS = 10
"""After Ctrl-C a program has this time to end; one that waits for such a program has half as much more."""

Result = TypeVar("Result")


def result_of(future: Future[Result], step: Step) -> Result:
    """Wait for a result, while the step's line shows the elapsed time."""
    while not wait([future], REDRAW_SECONDS).done:
        step.draw()
    return future.result()


def run_here(command: Sequence[str | Path], *, folder: Path, variables: Mapping[str, str]) -> int:
    """Run a program on the caller's terminal; return its exit status."""
    process = subprocess.Popen([str(word) for word in command], cwd=folder, env=variables)
    with ending(process):
        return process.wait()


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for the program's end after Ctrl-C, which has reached it too, so that it can clean up."""
    try:
        yield
    except BaseException:
        try:
            process.wait(GRACE_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # a second Ctrl-C is impatient
            process.kill()
            process.wait()
        raise


def watch(
    command: Sequence[str | Path],
    step: Step | None,
    *,
    folder: Path,
    variables: Mapping[str, str],
    look: Callable[[str], None] = lambda _: None,
) -> tuple[int, str]:
    """Run a program; return its exit status and whole output.

    ``look`` is called with the output so far when it grows, and a few times a second. Without a step nothing is shown.
    """
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    pieces: queue.Queue[bytes] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, pieces), daemon=True)
    reader.start()
    output = b""
    with ending(process):
        while True:
            try:
                piece = pieces.get(timeout=REDRAW_SECONDS)
            except queue.Empty:
                piece = None
            if piece == b"":
                break
            output += piece or b""
            look(output.decode("utf-8", "replace"))
            if step is not None:
                step.draw()
        return process.wait(), output.decode("utf-8", "replace")


class Beside:
    """A program that runs while others do, and prints when it is waited for. A context manager, which ends it."""

    def __init__(self, command: Sequence[str | Path], screen: Screen, variables: Mapping[str, str]) -> None:
        self._screen = screen
        self._pieces: queue.Queue[bytes] = queue.Queue()
        # A group of its own, so that it ends together with the programs that it runs.
        self._process = subprocess.Popen(
            [str(word) for word in command],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0 if os.name == "posix" else None,
        )
        self._reader = threading.Thread(target=_read, args=(self._process, self._pieces), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._end()
        self._reader.join(GRACE_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _end(self) -> None:
        """Interrupt the program and those that it runs, and kill what continues."""
        if os.name != "posix":
            self._process.terminate()
            self._process.wait()
            return
        # A shell lets programs in its background ignore Ctrl-C, and with them those that they start.
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        os.killpg(self._process.pid, signal.SIGTERM if is_ignored else signal.SIGINT)
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.5 * GRACE_SECONDS)  # it gives its own programs GRACE_SECONDS
        finally:
            with suppress(ProcessLookupError, PermissionError):  # there is none left
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait(self) -> int:
        """Show what the program has printed, and prints until its end; return its exit status."""
        text = codecs.getincrementaldecoder("utf-8")("replace")
        while piece := self._pieces.get():
            self._screen.write(text.decode(piece))
        return self._process.wait()


def _read(process: subprocess.Popen[bytes], pieces: queue.Queue[bytes]) -> None:
    """Pass on the program's output; an empty piece at its end."""
    assert process.stdout is not None
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        pieces.put(piece)
    pieces.put(b"")
