"""A read by several processes, including the caller's; batches come in the order of the parts.

Children are separate programs, not forks, so the caller can have threads and needs no ``__main__`` guard. Parts are
assigned one by one: a child has at most `_PARTS_AHEAD`, and this process reads the next part that no child has, unless
its caller is busy with the batches. While it waits for a child's batch, it reads later parts, up to `_AHEAD_BYTES`, so
no process waits for the slowest. Children start while this process plans, which takes a child as long as this process
to read `_PARTS_TO_START` parts, so its first part comes after them.

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
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, Final

import numpy as np
import pyarrow as pa

from librmq.columns.options import Part, ReadingProcessError, ReadOptions
from librmq.columns.read import Reading
from librmq.errors import ConfigError, StoreError
from librmq.runtime.event_log import hand_over, log_again

# ---- transfer of batches

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
    def allocate(cls) -> Slots | None:
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
            self._free.release_slot(slot)
        else:
            weakref.finalize(array, self._free.release_slot, slot).atexit = False
        return pa.py_buffer(array)


class _FreeSlots:
    """The pipe for free slots. Batches that outlive the read hold it too, so no other file gets its number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.held = 0
        """Number of slots with a batch that the caller holds."""

    def release_slot(self, slot: int) -> None:
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

COMMAND: Final = "import sys; sys.path[:] = {path!r}; from librmq.columns.processes import serve; serve()"


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


# ---- the assignment of parts

_PARTS_AHEAD: Final = 2
_PARTS_TO_START: Final = 8
_AHEAD_BYTES: Final = 48 << 20


class SharedReader(pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]
    """The rows of parts in order, read by ``count`` processes including this one.

    `close`, the end of the rows, or dropping the reader end the other processes immediately. Reading raises
    `ReadingProcessError` if one of them is killed, and `StoreError` after `close`.
    """

    def __init__(
        self,
        options: ReadOptions,
        schema: pa.Schema,
        planned: Callable[[], Sequence[Part]],
        count: int,
        *,
        is_busy: bool = False,
    ) -> None:
        """Start the other processes, and call ``planned`` for the parts meanwhile.

        This process reads no part if ``is_busy``, because its work on the batches takes as long as reading.
        """
        self._source = _Source(_Reading(options, schema, planned, count, is_busy=is_busy), schema)
        super().__init__(self._source)

    def close(self) -> None:
        """End the reading processes; no more rows can be read."""
        self._source.close()


class _Source:
    """The read as a stream of Arrow's IPC format: a file to pyarrow, which takes its buffers without a copy."""

    def __init__(self, reading: _Reading, schema: pa.Schema) -> None:
        self._reading = reading
        self._messages = reading.ipc_messages()
        self._message: pa.Buffer = schema.serialize()
        self._at = 0
        self.closed = False
        weakref.finalize(self, reading.close)  # Arrow holds this object longer than its caller holds the reader

    def readable(self) -> bool:
        return True

    def read(self, size: int) -> pa.Buffer:
        if self.closed:
            raise StoreError("this read is closed")
        if self._at >= self._message.size:
            self._message, self._at = next(self._messages, pa.py_buffer(b"")), 0
        piece = self._message.slice(self._at, min(size, self._message.size - self._at))
        self._at += size
        return piece

    read_buffer = read

    def close(self) -> None:
        self.closed = True
        self._message = pa.py_buffer(b"")
        self._reading.close()


class _OwnPart:
    """A part that this process reads ahead: the batches read, and the rest."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.read: deque[pa.Buffer | Exception] = deque()
        self.is_whole = False

    def more(self) -> int:
        """Read one more batch and return its size in bytes; an error is kept for its turn."""
        try:
            batch = next(self._batches, None)
        except Exception as error:
            self.read.append(error)
            self.is_whole = True
            return 0
        if batch is None:
            self.is_whole = True
            return 0
        message = batch.serialize(pa.system_memory_pool())
        self.read.append(message)
        return int(message.size)


class _Reading:
    """The assignment of parts to processes."""

    def __init__(
        self,
        options: ReadOptions,
        schema: pa.Schema,
        planned: Callable[[], Sequence[Part]],
        count: int,
        *,
        is_busy: bool,
    ) -> None:
        if not sys.executable:
            raise ConfigError("processes: sys.executable is empty, so no process can be started; read with processes=1")
        self._reading = Reading(options, schema)
        self._is_busy = is_busy
        self._planned = planned  # it holds the mirror of a remote store
        self._own_parts: dict[int, _OwnPart] = {}
        self._ahead = 0
        self._reader_of: dict[int, _Child] = {}
        self._children: list[_Child] = []
        try:
            with _without_interrupts():
                for _ in range(count - 1):
                    self._children.append(_Child(options, schema))
            self._parts = planned()
            self._unread = deque(range(len(self._parts)))
            """The parts that no process has."""
            while self._children and len(self._children) >= len(self._parts) + is_busy:
                self._children.pop().close()
            first = 0 if is_busy else min(_PARTS_TO_START, len(self._parts) - len(self._children))
            for number, child in enumerate(self._children, first):
                self._give(number, child)
        except BaseException:
            self.close()
            raise

    def ipc_messages(self) -> Iterator[pa.Buffer]:
        """Yield all batches in order, as messages of Arrow's IPC format."""
        try:
            for number in range(len(self._parts)):
                if self._is_busy and number in self._unread:
                    self._give(number, min(self._children, key=lambda child: child.parts))
                child = self._reader_of.pop(number, None)
                yield from self._own_messages(number) if child is None else self._messages_of(child)
        finally:
            self.close()

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            child.close()

    def _give(self, number: int, child: _Child) -> None:
        self._unread.remove(number)
        self._reader_of[number] = child
        child.give(number, self._parts[number])

    def _give_out(self) -> None:
        """Assign the next parts to children that have started."""
        for child in self._children:
            child.listen()
            while child.is_ready and child.parts < _PARTS_AHEAD:
                number = next((number for number in self._unread if number > child.last), None)
                if number is None:
                    break
                self._give(number, child)

    def _own_messages(self, number: int) -> Iterator[pa.Buffer]:
        part = self._own_parts.pop(number, None) or self._begin_part(self._unread.popleft())
        while True:
            while part.read:
                message = part.read.popleft()
                if isinstance(message, Exception):
                    raise message
                self._ahead -= message.size
                yield message
                self._give_out()
            if part.is_whole:
                return
            self._ahead += part.more()

    def _messages_of(self, child: _Child) -> Iterator[pa.Buffer]:
        while True:
            while not child.listen() and self._read_ahead():
                self._give_out()
            kind, message = child.frame()
            if kind == END:
                return
            yield message
            self._give_out()

    def _begin_part(self, number: int) -> _OwnPart:
        return _OwnPart(self._reading.read(self._parts[number]))

    def _read_ahead(self) -> bool:
        """Read a batch of a later part here; return False if there is none, or no room."""
        if self._is_busy or self._ahead >= _AHEAD_BYTES:
            return False
        last = max(self._own_parts, default=-1)
        if last < 0 or self._own_parts[last].is_whole:
            if not self._unread:
                return False
            last = self._unread.popleft()
            self._own_parts[last] = self._begin_part(last)
        self._ahead += self._own_parts[last].more()
        return True


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold back Ctrl-C, which a terminal sends to all processes; those started here never see it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a new process inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Child:
    """A process that reads parts, seen by the receiver of their batches."""

    def __init__(self, options: ReadOptions, schema: pa.Schema) -> None:
        self.is_ready = False
        self.parts = 0
        """Number of its unfinished parts."""
        self.last = -1
        """Its last part; batches come in this order."""
        self._frames: deque[tuple[bytes, Any]] = deque()
        self._is_closed = False
        self._slots = Slots.allocate()
        inherited = () if self._slots is None else self._slots.descriptors
        try:
            self._program = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=inherited,
            )
        finally:
            if self._slots is not None:
                self._slots.close_inherited()
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._stdin: IO[bytes] = self._program.stdin
        self._stdout: IO[bytes] = self._program.stdout
        pipe_size(self._stdin)
        pipe_size(self._stdout)
        self._send_pickled(ReadRequest(os.getpid(), options, schema, inherited or None))

    def give(self, number: int, part: Part) -> None:
        """Assign a part, which comes after its other parts."""
        self.last = number
        self.parts += 1
        self._send_pickled(part)

    def _send_pickled(self, what: object) -> None:
        data = pickle.dumps(what)
        view = memoryview(LENGTH.pack(len(data)) + data)
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its frames will show
            while view.nbytes:
                view = view[self._stdin.write(view) :]

    def listen(self) -> bool:
        """Receive its frames; return whether there is a batch or an end to take."""
        while not self._frames and self._has_frame():
            self._take_frame()
        return bool(self._frames)

    def frame(self) -> tuple[bytes, Any]:
        """Wait for the next batch, or for the end of its part; raise the error that ended the process."""
        while not self._frames:
            self._take_frame()
        kind, data = self._frames.popleft()
        if kind == ERROR:
            raise unpickled(data)
        self.parts -= kind == END
        return kind, self._slots.buffer(data) if kind == SHARED and self._slots is not None else pa.py_buffer(data)

    def _has_frame(self) -> bool:
        """Return whether a frame can be taken without waiting; where that is unknown, False."""
        if os.name != "posix":
            return not self.is_ready
        import select

        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        return bool(poll.poll(0))

    def _take_frame(self) -> None:
        head = self._read_bytes(FRAME.size)
        kind, size = FRAME.unpack(head) if len(head) == FRAME.size else (ERROR, -1)
        data = self._read_bytes(size) if size > 0 else bytearray()
        if size > len(data) or size < 0:
            if self._is_closed:
                raise StoreError("this read is closed")
            status = self._program.wait()
            error = ReadingProcessError(f"a process that read the store ended with status {status}")
            kind, data = ERROR, bytearray(pickled(error))
        if kind == READY:
            self.is_ready = True
        elif kind == LOG_LINE:
            log_again(bytes(data))
        else:
            self._frames.append((kind, data))

    def _read_bytes(self, size: int) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size and (count := self._stdout.readinto(view[at:])):  # type: ignore[attr-defined]
            at += count
        del view
        return data[:at] if at < size else data

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        self._program.kill()
        self._program.wait()
        for pipe in (self._stdin, self._stdout):
            pipe.close()
