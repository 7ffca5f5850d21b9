"""Transfer of batches from a process that reads parts of a store to the process that wants them.

::

    parent ── stdin ──> child      length 8, bytes: pickles: a `ReadRequest`, then each part for the child
           <── stdout ──           frames: kind 1, length 8, bytes
           ── free ──>             the number of each slot that may be written again, 1 byte

    shared memory                  `SLOTS` slots of `SLOT_BYTES`, each for one batch as a message of Arrow's IPC format

A batch that fits into a slot crosses without a copy by the parent. Others, and all where the system lacks
``memfd_create``, go through the pipe.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa

from librmq.columns.options import ReadOptions
from librmq.columns.parts import Part
from librmq.columns.read import Reading
from librmq.errors import StoreError
from librmq.runtime.event_log import hand_over

FRAME: Final = struct.Struct(">cQ")
LENGTH: Final = struct.Struct(">Q")
READY: Final = b"r"
"""The child has started, and accepts parts."""
SHARED: Final = b"s"
"""A batch in a slot: the slot's number, and the batch's start and length."""
BATCH: Final = b"b"
"""A batch."""
LOG_LINE: Final = b"l"
"""A record of the log of ``librmq``."""
END: Final = b"p"
"""A part has no more batches."""
ERROR: Final = b"e"
"""An error, after which the child ends."""

SLOTS: Final = 6
SLOT_BYTES: Final = 16 << 20
_PLACE: Final = struct.Struct(">BQQ")


@dataclass(frozen=True)
class ReadRequest:
    """The settings of a child."""

    parent: int
    options: ReadOptions
    schema: pa.Schema
    slots: tuple[int, int] | None
    """Descriptors of the shared memory and of the pipe for free slots."""


class Slots:
    """The shared memory, seen by the parent."""

    def __init__(self, memory: int) -> None:
        try:
            os.ftruncate(memory, SLOTS * SLOT_BYTES)
            self._map = mmap.mmap(memory, SLOTS * SLOT_BYTES)
            reading, writing = os.pipe()
        except BaseException:
            os.close(memory)
            raise
        self._descriptors = [memory, reading]
        self._free = _FreeSlots(writing)

    @classmethod
    def create(cls) -> Slots | None:
        """Return shared memory; None if the system has no memory of this kind."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            return cls(os.memfd_create("librmq-columns", os.MFD_CLOEXEC))
        except OSError:
            return None

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors for the child."""
        return self._descriptors[0], self._descriptors[1]

    def close_inherited(self) -> None:
        """Close the descriptors that the child has inherited; the mapping stays."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def buffer(self, place: bytes | bytearray) -> pa.Buffer:
        """Return the message of a `SHARED` frame; its slot is free when the last array on it is gone.

        A caller that keeps batches would use up the slots, so it gets copies then.
        """
        slot, begin, size = _PLACE.unpack(place)
        array = np.frombuffer(self._map, np.uint8, size, slot * SLOT_BYTES + begin)
        self._free.held += 1
        if self._free.held > SLOTS // 2:
            array = array.copy()
            self._free.release(slot)
        else:
            weakref.finalize(array, self._free.release, slot).atexit = False
        return pa.py_buffer(array)


class _FreeSlots:
    """The pipe for free slots. Batches that outlive the read hold it too, so no other file gets its number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.held = 0
        """Number of slots with a batch that the caller holds."""

    def release(self, slot: int) -> None:
        self.held -= 1
        with contextlib.suppress(OSError):  # the child has ended
            os.write(self._descriptor, bytes([slot]))

    def __del__(self) -> None:
        os.close(self._descriptor)


class SlotWriter:
    """The shared memory, seen by a child."""

    def __init__(self, schema: pa.Schema, descriptors: tuple[int, int]) -> None:
        memory, self._freed = descriptors
        self._map = memoryview(mmap.mmap(memory, SLOTS * SLOT_BYTES))
        self._schema = schema
        self._schema_bytes = schema.serialize().size
        self._free = list(range(SLOTS))

    def write(self, batch: pa.RecordBatch) -> bytes | None:
        """Write a batch into the next free slot, and return its place; None if the batch is too large.

        Wait until the parent releases a slot.
        """
        if self._schema_bytes + pa.ipc.get_record_batch_size(batch) > SLOT_BYTES:
            return None
        if not self._free:
            self._free += os.read(self._freed, SLOTS)
            if not self._free:
                raise BrokenPipeError("the parent has ended")
        slot = self._free.pop()
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(self._map[slot * SLOT_BYTES :][:SLOT_BYTES]))
        pa.ipc.new_stream(sink, self._schema).write_batch(batch)
        return _PLACE.pack(slot, self._schema_bytes, sink.tell() - self._schema_bytes)


def pickled(error: Exception) -> bytes:
    """Return an error as bytes, or its text if it can't be pickled."""
    try:
        return pickle.dumps((type(error), error.args, error.__dict__))
    except Exception:
        return pickle.dumps((StoreError, (f"{type(error).__name__}: {error}",), {}))


def unpickled(data: bytes | bytearray) -> BaseException:
    """Return the error that `pickled` encoded, without its constructor, which may need other arguments."""
    kind, arguments, fields = pickle.loads(data)
    error: BaseException = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


def pipe_size(descriptor: Any) -> None:
    """Widen a pipe if the system allows it."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, 1 << 20)


# ---- the reading process

COMMAND: Final = "import sys; sys.path[:] = {path!r}; from librmq.columns.transfer import serve; serve()"


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
