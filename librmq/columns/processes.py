"""A read by several processes: each decodes some parts, and the parent yields their batches in order.

::

    parent ── stdin ──> child      a pickle: options, schema, parts; then the pipe stays open while the parent lives
           <── stdout ──           frames: kind 1, length 8, bytes; a batch, the end of a part, or an error

Children are separate programs, not forks, so the parent can have threads and needs no ``__main__`` guard. A child ends
when its stdin closes, also if the parent was killed. Child ``n`` modulo their number reads part ``n``. A thread for
each child reads ahead, at most `_AHEAD_BYTES`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

import pyarrow as pa

from librmq.columns.options import ReadOptions
from librmq.columns.parts import Part
from librmq.columns.read import Reading
from librmq.errors import ConfigError, StoreError

__all__ = ["read_in_processes"]

_FRAME: Final = struct.Struct(">cQ")
_LENGTH: Final = struct.Struct(">Q")
_BATCH: Final = b"b"
_END: Final = b"p"
_ERROR: Final = b"e"
_AHEAD_BYTES: Final = 32 << 20
_PIPE_BYTES: Final = 1 << 20
_F_SETPIPE_SZ: Final = 1031  # Linux
_CHILD: Final = "import sys; sys.path[:] = {path!r}; from librmq.columns.processes import serve; serve()"


class ReadingProcessError(StoreError):
    """A process that reads parts of a store ended before its work did."""


def read_in_processes(
    options: ReadOptions, schema: pa.Schema, parts: Sequence[Part], count: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``parts`` in order, read by ``count`` processes.

    Raises:
        ReadingProcessError: A process was killed.
    """
    if not sys.executable:
        raise ConfigError("processes: sys.executable is empty, so no process can be started; read with processes=1")
    children: list[_Child] = []
    try:
        for number in range(min(count, len(parts))):
            children.append(_Child(options, schema, parts[number::count]))
        for number in range(len(parts)):
            yield from children[number % len(children)].part()
    finally:
        for child in children:
            child.close()


class _Child:
    """A process that reads parts, and the thread that receives its batches."""

    def __init__(self, options: ReadOptions, schema: pa.Schema, parts: Sequence[Part]) -> None:
        self._schema = schema
        self._program = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._stdin: IO[bytes] = self._program.stdin
        self._stdout: IO[bytes] = self._program.stdout
        self._changed = threading.Condition()
        self._frames: deque[tuple[bytes, bytearray]] = deque()
        self._ahead = 0
        self._is_closed = False
        payload = pickle.dumps((os.getpid(), options, schema, list(parts)))
        self._thread = threading.Thread(target=self._run, args=(payload,), name="librmq columns", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # for example, no thread can be started
            with self._program:
                self._program.kill()
            raise

    def part(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches of the next part."""
        while True:
            with self._changed:
                while not self._frames:
                    self._changed.wait()
                kind, data = self._frames.popleft()
                self._ahead -= len(data)
                self._changed.notify_all()
            if kind == _END:
                return
            if kind == _ERROR:
                raise _error_of(data)
            yield pa.ipc.read_record_batch(pa.py_buffer(data), self._schema)

    def close(self) -> None:
        """End the process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._program.kill()
        self._program.wait()
        self._thread.join()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # of unwritten data
                pipe.close()

    def _run(self, payload: bytes) -> None:
        """Send the work, then receive frames until the process ends."""
        try:
            _widen(self._stdout)
            self._stdin.write(_LENGTH.pack(len(payload)) + payload)
            self._stdin.flush()
            while head := self._stdout.read(_FRAME.size):
                kind, size = _FRAME.unpack(head)
                data = bytearray(size)
                if self._stdout.readinto(data) != size:  # type: ignore[attr-defined]
                    break
                if not self._put(kind, data):
                    return
        except OSError:  # the child ended early or was closed
            pass
        except Exception as error:  # for example MemoryError; the reader must not wait forever
            self._put(_ERROR, bytearray(_pickled(error)))
            return
        status = self._program.wait()
        self._put(_ERROR, bytearray(_pickled(ReadingProcessError(f"a reading process ended with status {status}"))))

    def _put(self, kind: bytes, data: bytearray) -> bool:
        """Pass on a frame when there is room; return False if the reader has closed."""
        with self._changed:
            while self._frames and self._ahead + len(data) > _AHEAD_BYTES and not self._is_closed:
                self._changed.wait()
            self._frames.append((kind, data))
            self._ahead += len(data)
            self._changed.notify_all()
            return not self._is_closed


def _widen(pipe: IO[bytes]) -> None:
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):  # larger than the system allows
            fcntl.fcntl(pipe.fileno(), _F_SETPIPE_SZ, _PIPE_BYTES)


def _error_of(data: bytes | bytearray) -> BaseException:
    """Return the error that `_pickled` encoded, without its constructor, which may need other arguments."""
    kind, arguments, fields = pickle.loads(data)
    error: BaseException = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


# ------------------------------------------------------------------------------------------------------- in a child


def serve() -> None:
    """Read the parts that the parent sends, and write their batches to stdout. This is the main program of a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its children
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # prints must not mix with the frames
    source = sys.stdin.buffer
    (size,) = _LENGTH.unpack(source.read(_LENGTH.size))
    parent, options, schema, parts = pickle.loads(source.read(size))
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        reading = Reading(options, schema)
        for part in parts:
            for batch in reading.read(part):
                _send(out, _BATCH, batch.serialize())
            _send(out, _END, b"")
    except BrokenPipeError:  # the parent closed the read or ended
        os._exit(0)
    except Exception as error:
        _send(out, _ERROR, _pickled(error))


def _send(out: Any, kind: bytes, data: Any) -> None:
    view = memoryview(data)
    out.write(_FRAME.pack(kind, view.nbytes))
    while view.nbytes:
        view = view[out.write(view) :]


def _pickled(error: Exception) -> bytes:
    """Return an error as bytes, or its text if it can't be pickled."""
    try:
        return pickle.dumps((type(error), error.args, error.__dict__))
    except Exception:
        return pickle.dumps((StoreError, (f"{type(error).__name__}: {error}",), {}))


def _end_with_parent(parent: int) -> None:
    """End this process when the parent closes the pipe, or has ended while a fork of it still holds the pipe."""
    if os.name == "posix":
        import select

        while not select.select([0], [], [], 1.0)[0] and os.getppid() == parent:
            pass
    else:
        os.read(0, 1)
    os._exit(0)
