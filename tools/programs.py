"""Runs a program and watches its output, while a line of the screen shows the elapsed time."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from screen import Step

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


def _read(process: subprocess.Popen[bytes], pieces: queue.Queue[bytes]) -> None:
    """Pass on the program's output; an empty piece at its end."""
    assert process.stdout is not None
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        pieces.put(piece)
    pieces.put(b"")
