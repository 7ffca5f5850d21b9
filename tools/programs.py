"""Runs a program and watches its output, while a line of the screen shows the elapsed time, or beside another one.

Each program ends with the command that runs it. One that has the terminal gets Ctrl-C from there. All others lead a
group of their own, so that each ends together with the programs that it runs. A program that runs others in this way
itself has groups outside its own: it gets time to end them.
"""

from __future__ import annotations

import codecs
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from screen import Screen, Step

REDRAW_SECONDS = 0.2
GRACE_SECONDS = 10
"""After Ctrl-C a program has this time to end."""
GROUPS_SECONDS = 5
"""A program that may run groups itself has this time more, and again after a second Ctrl-C, at which it kills them."""
HAS_GROUPS = os.name == "posix"
_signals: list[int] = []
"""Signals that end the command. They interrupt the main thread; others that run programs look here."""
_starts = False
"""Whether the main thread starts a program; a signal interrupts it only when the program can be ended."""

Result = TypeVar("Result")


class Terminated(KeyboardInterrupt):
    """A signal that is not sent to the programs of the terminal, as Ctrl-C is, ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number
        """The exit status, as a shell gives it to a program that the signal has ended."""


@contextmanager
def interruptible() -> Iterator[None]:
    """End the programs of all threads at Ctrl-C, at SIGTERM, and at SIGHUP, which says that the terminal was closed."""

    def interrupt(number: int, _: object) -> None:
        if _signals and number != signal.SIGINT:
            return  # `timeout` sends SIGTERM twice, and only a second Ctrl-C is impatient
        _signals.append(number)
        if not _starts:
            raise _interruption(number)

    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if os.name == "posix" else [])]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _signals.clear()


def _interruption(number: int) -> KeyboardInterrupt:
    """Return what a signal raises in the main thread."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run a command with its programs; return its exit status, also if a signal ends it, which is then said."""
    try:
        with interruptible():
            return command()
    except Terminated as end:
        print(f"{name}: terminated", file=sys.stderr)
        return end.status
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def result_of(future: Future[Result], step: Step) -> Result:
    """Wait for a result, while the step's line shows the elapsed time."""
    while not wait([future], REDRAW_SECONDS).done:
        step.draw()
    return future.result()


def run_here(command: Sequence[str | Path], *, folder: Path, variables: Mapping[str, str]) -> int:
    """Run a program on the caller's terminal; return its exit status."""
    with running(command, folder, variables, is_read=False, runs_groups=True) as process:
        return process.wait()


@contextmanager
def running(
    command: Sequence[str | Path],
    folder: Path | None,
    variables: Mapping[str, str],
    *,
    is_read: bool,
    runs_groups: bool,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program, and end it if an exception leaves the block.

    One whose output is read leads a group of its own, which ends with it.
    """
    pipes: dict[str, Any] = {}
    if is_read:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        pipes["process_group"] = 0 if HAS_GROUPS else None
    process = None
    try:
        with _uninterrupted():
            process = subprocess.Popen([str(word) for word in command], cwd=folder, env=variables, **pipes)
        yield process
    except BaseException:
        if process is not None:
            end(process, in_group=is_read and HAS_GROUPS, runs_groups=runs_groups)
        raise


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a signal interrupt the main thread only after the block."""
    global _starts
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = len(_signals)
    _starts = True
    try:
        yield
    finally:
        _starts = False
        if len(_signals) > before:
            raise _interruption(_signals[-1])


def end(process: subprocess.Popen[bytes], *, in_group: bool, runs_groups: bool) -> None:
    """Interrupt the program, or its group, give it time to clean up, and kill what continues.

    Ctrl-C has reached a program without a group already.
    """

    def send(number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # there is none left
            os.killpg(process.pid, number) if in_group else process.send_signal(number)

    # A shell lets programs in its background ignore Ctrl-C, and with them those that they start.
    is_ignored = os.name != "posix" or signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    interrupt = signal.SIGTERM if is_ignored else signal.SIGINT
    more = GROUPS_SECONDS if runs_groups else 0
    try:
        if in_group or _signals[:1] != [signal.SIGINT]:
            send(interrupt)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS + more)
    except KeyboardInterrupt:  # a second Ctrl-C is impatient
        if runs_groups:
            if in_group:
                send(interrupt)
            with suppress(subprocess.TimeoutExpired):
                process.wait(more)
        raise
    finally:
        send(signal.SIGKILL if os.name == "posix" else signal.SIGTERM)
        process.wait()


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
    if _signals:
        raise CancelledError
    pieces: queue.Queue[bytes] = queue.Queue()
    output = b""
    with running(command, folder, variables, is_read=True, runs_groups=False) as process:
        threading.Thread(target=_read, args=(process, pieces), daemon=True).start()
        while True:
            if _signals:
                raise CancelledError
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
        self._command = command
        self._screen = screen
        self._variables = variables
        self._pieces: queue.Queue[bytes] = queue.Queue()

    def __enter__(self) -> Self:
        with running(self._command, None, self._variables, is_read=True, runs_groups=True) as self._process:
            self._reader = threading.Thread(target=_read, args=(self._process, self._pieces), daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            end(self._process, in_group=HAS_GROUPS, runs_groups=True)
        self._reader.join(GRACE_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()

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
