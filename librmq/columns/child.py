"""The program of a process that reads parts of a store for another one; `librmq.columns.transfer` has the protocol."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO, Final

from librmq.columns.parts import Part
from librmq.columns.read import Reading
from librmq.columns.transfer import (
    BATCH,
    END,
    ERROR,
    FRAME,
    LENGTH,
    LOG_LINE,
    READY,
    SHARED,
    ReadRequest,
    SlotWriter,
    pickled,
)
from librmq.runtime.event_log import hand_over

COMMAND: Final = "import sys; sys.path[:] = {path!r}; from librmq.columns.child import serve; serve()"


def serve() -> None:
    """Read the parts that the parent sends until it closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where the parent could not block it
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # prints must not mix with the frames
    hand_over(lambda line: _send(out, LOG_LINE, line))
    work: ReadRequest = _received(sys.stdin.buffer)
    parts: queue.SimpleQueue[Part] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, parts), daemon=True).start()
    threading.Thread(target=_end_without, args=(work.parent,), daemon=True).start()
    try:
        slots = None if work.slots is None else SlotWriter(work.schema, work.slots)
        reading = Reading(work.options, work.schema)
        _send(out, READY, b"")
        while True:
            for batch in reading.read(parts.get()):
                place = None if slots is None else slots.write(batch)
                if place is None:
                    _send(out, BATCH, batch.serialize())
                else:
                    _send(out, SHARED, place)
            _send(out, END, b"")
    except BrokenPipeError:  # the parent closed the read or ended
        os._exit(0)
    except Exception as error:
        _send(out, ERROR, pickled(error))


def _received(source: BinaryIO) -> Any:
    """Return an object from the parent; the process ends when the parent has closed the pipe."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        os._exit(0)
    return pickle.loads(source.read(*LENGTH.unpack(head)))


def _receive(source: BinaryIO, parts: queue.SimpleQueue[Part]) -> None:
    """Accept parts immediately, so that the parent never waits while one is read."""
    while True:
        parts.put(_received(source))


def _send(out: Any, kind: bytes, data: Any) -> None:
    view = memoryview(FRAME.pack(kind, len(data)) + data) if len(data) < 512 else None
    if view is None:
        _send_all(out, memoryview(FRAME.pack(kind, len(data))))
        view = memoryview(data)
    _send_all(out, view)


def _send_all(out: Any, view: memoryview) -> None:
    while view.nbytes:
        view = view[out.write(view) :]


def _end_without(parent: int) -> None:
    """End this process when the parent has ended, although a fork of it holds the pipe."""
    if not hasattr(os, "getppid") or os.name != "posix":
        return
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(1.0)
    os._exit(0)
