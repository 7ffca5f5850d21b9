"""Runs a program and watches its output, while a line of the screen shows the elapsed time, or beside another one."""

from __future__ import annotations

import codecs
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from screen import Screen, Step

REDRAW_SECONDS = 0.2
GRACE_SECONDS = 10


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
    try:
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
    except BaseException:
        # Ctrl-C has reached the program too, so it can clean up.
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


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
        """Interrupt the program, and kill it if it continues."""
        if os.name == "posix":
            os.killpg(self._process.pid, signal.SIGINT)
        else:
            self._process.terminate()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

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
