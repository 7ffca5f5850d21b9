"""Output of commands: JSON lines, tables, files of CSV or Parquet, a progress bar. Also signals that end a command."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from itertools import chain, islice
from json.encoder import encode_basestring
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, Self, TextIO, TypeVar

from librmq.clock import Clock, SystemClock
from librmq.errors import CorruptionError, InputError, MissingExtraError, RecordError, StoreIOError
from librmq.formatting import UNSAFE, cell, escape, printable
from librmq.runtime.event_log import watched

if TYPE_CHECKING:
    import socket

T = TypeVar("T")

DAMAGED: Final = 1
"""Exit status: the store is damaged."""
BAD_INPUT: Final = 2
"""Exit status: bad usage or bad input."""
EMPTY: Final = 3
"""Exit status: there was no row, and ``--fail-empty`` was given."""
INTERRUPTED: Final = 130
"""Exit status: ended by Ctrl-C."""

_UNSAFE_IN_JSON: Final = re.compile("[" + UNSAFE.replace("\x00-\x1f", "") + "]")  # JSON itself escapes those
_BLOCK: Final = 256  # rows that are encoded together
_BLOCK_SIZE: Final = 1 << 15  # characters of rows that are written together
_BETWEEN: Final = "\x1e"  # what JSON escapes in texts stands between the values of a block
_names: Final[dict[str, str]] = {}
"""Names by the paths in whose place messages have them."""
to_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_encode_apart: Final = json.JSONEncoder(ensure_ascii=False, separators=(_BETWEEN, ":"), allow_nan=False).encode


class RowWriter(Protocol):
    """A form of output."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a row, now or when its table is full."""

    def flush(self) -> None:
        """Pass on every row so far; a table may wait until it is full."""

    def close(self) -> None:
        """Print all remaining rows."""


class LimitReached(Exception):
    """As many rows are printed as were asked for: the command ends."""


class Output:
    """Receiver of a command's rows, which counts them."""

    def __init__(
        self, writer: RowWriter, limit: int | None = None, stream: TextIO | None = None, path: str | None = None
    ) -> None:
        """``stream`` is closed with the output; ``path`` is the file that the rows go to."""
        self.writer = writer
        self.rows = 0
        self.is_on_terminal = False
        """Whether rows appear on a terminal."""
        self.says_nothing_found = True
        """Whether a terminal gets a note if there is no row."""
        self._limit = limit
        self._stream = stream
        self._unfinished = path
        self._is_closed = False

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a row, now or when its table is full."""
        self.writer.row(row)
        self._count()

    def lines(self, texts: Iterable[str]) -> None:
        """Print rows, each as JSON on one line: one by one on a terminal, elsewhere in blocks."""
        block: list[str] = []
        size, limit, block_size = 0, self._limit, 0 if self.is_on_terminal else _BLOCK_SIZE
        try:
            for text in texts:
                block.append(text)
                size += len(text)
                if size > block_size or self.rows + len(block) == limit:
                    self._write_lines(block)
                    size = 0
        finally:  # what came before an error stays
            self._write_lines(block)

    def _write_lines(self, block: list[str]) -> None:
        texts = block.copy()
        block.clear()  # a closed pipe ends this
        if not texts:
            return
        if isinstance(self.writer, JsonLines):
            self.writer.line("\n".join(texts))
        else:
            for row in json.loads(f"[{','.join(texts)}]"):
                self.writer.row(row)
        self._count(len(texts))

    def _count(self, rows: int = 1) -> None:
        self.rows += rows
        if self.rows == self._limit:
            raise LimitReached

    def explain_nothing(self, why: str) -> None:
        """Tell a person why there is no row, in place of the note that nothing was found."""
        self.says_nothing_found = False
        complain(f"note: {why}")

    def of_lines(self) -> Output:
        """Return output of JSON lines, on a terminal too, where a table would wait until it is full."""
        return Output(JsonLines(sys.stdout)) if self.is_on_terminal else self

    def flush(self) -> None:
        """Pass on every row so far; a table may wait until it is full. A file stays from now on."""
        self.writer.flush()
        self._unfinished = None

    def rows_of(self, rows: Iterable[Mapping[str, Any]] | Iterable[NamedTuple]) -> None:
        """Print many small rows, faster than one by one."""
        if not isinstance(self.writer, JsonLines):
            for row in rows:
                self.row(row if isinstance(row, Mapping) else row._asdict())
            return
        remaining = iter(rows)
        while block := list(islice(remaining, min(_BLOCK, (self._limit or sys.maxsize) - self.rows))):
            self.writer.rows_of(block)
            self.rows += len(block)
            if self.rows == self._limit:
                raise LimitReached

    def draw(self) -> None:
        """Show every row so far, in a table too. A file stays from now on."""
        getattr(self.writer, "draw", self.writer.flush)()
        self._unfinished = None

    def close(self) -> None:
        """Print all remaining rows, once."""
        if self._is_closed:
            return
        self.writer.close()
        if self._stream is not None:
            self._stream.close()
        self._is_closed, self._unfinished = True, None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Print all remaining rows; remove a file that looks whole, but is not. Rows before damage stay."""
        path, is_whole = self._unfinished, error is None or isinstance(error, CorruptionError | RecordError)
        try:
            self.close()
        except Exception as failure:
            if path is None:
                raise
            error, is_whole = failure if is_whole else error, False
        if path is None or is_whole:
            return
        _remove(path)
        if isinstance(error, OSError) and not isinstance(error, StoreIOError):
            raise InputError(f"{path}: {error.strerror}") from None
        if error is not None:
            raise error


@lru_cache(1 << 8)
def _template(names: tuple[str, ...]) -> str:
    return "{" + ",".join([f"{encode_basestring(name)}:".replace("%", "%%") + "%s" for name in names]) + "}"


_encoders: Final[dict[type, Callable[[Any], str]]] = {
    bool: {True: "true", False: "false"}.__getitem__, type(None): lambda _: "null", str: encode_basestring,
}  # fmt: skip


def json_line(row: Mapping[str, Any]) -> str:
    """Return a row as JSON on one line, with characters escaped that could control a terminal."""
    # Most of the time for a row goes into its names, so those are not encoded again.
    values = [value if type(value) is int else _encoders.get(type(value), to_json)(value) for value in row.values()]
    return _safe(_template(tuple(row)) % tuple(values))


def _lines_of_tuples(rows: Sequence[NamedTuple]) -> str:
    names = rows[0]._fields
    values = _encode_apart(list(chain.from_iterable(rows)))[1:-1].split(_BETWEEN)  # JSON escapes it in texts
    if len(values) != len(rows) * len(names):  # there are lists in the rows
        return "".join([json_line(row._asdict()) + "\n" for row in rows])
    return _safe(f"{_template(names)}\n" * len(rows) % tuple(values))


def _safe(text: str) -> str:
    return text if text.isascii() and "\x7f" not in text else _UNSAFE_IN_JSON.sub(escape, text)


class JsonLines:
    """Output with one JSON object on each line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def row(self, row: Mapping[str, Any]) -> None:
        """Print a row."""
        self._stream.write(json_line(row) + "\n")

    def line(self, text: str) -> None:
        """Print a row that is JSON."""
        self._stream.write(_safe(text) + "\n")

    def rows_of(self, rows: Sequence[Any]) -> None:
        """Print rows: mappings, or named tuples of one type."""
        is_mapping = isinstance(rows[0], Mapping)
        self._stream.write("".join([json_line(row) + "\n" for row in rows]) if is_mapping else _lines_of_tuples(rows))

    def flush(self) -> None:
        """Pass on every row so far."""
        self._stream.flush()

    close = flush


def open_output(form: str | None, stream: TextIO, path: str | None = None, limit: int | None = None) -> Output:
    """Return output in ``form``, or without one in the form that suits ``path``, else ``stream``.

    If the extra for tables is missing, a terminal gets JSON lines and a hint.

    Raises:
        InputError: ``path`` cannot be written.
        MissingExtraError: The extra for the form is missing.
    """
    if path is not None:
        ending = path.rpartition(".")[2].lower()
        form = form or {"csv": "csv", "parquet": "parquet", "txt": "table"}.get(ending, "jsonl")
    if form == "parquet":
        if path is None:
            raise InputError("--format parquet: name a file with -o, because Parquet is not text")
        return Output(ParquetRows(path), limit, path=path)
    file = None
    if path is not None:
        try:
            file = stream = open(path, "w", encoding="utf-8", newline="")  # noqa: SIM115 (closed with the output)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
    output = Output(_writer(form, stream), limit, file, path)
    output.is_on_terminal = stream.isatty()
    return output


def _writer(form: str | None, stream: TextIO) -> RowWriter:
    if form == "csv":
        return CsvRows(stream)
    if form == "jsonl" or (form is None and not stream.isatty()):
        return JsonLines(stream)
    try:
        from librmq.cli._table import Table
    except ImportError:
        missing = MissingExtraError("a table", "cli")
        if form == "table":
            raise missing from None
        complain(f"hint: {missing}")
        return JsonLines(stream)
    return Table(stream)


def write_page(path: str, text: str) -> None:
    """Write a file, of which nothing is left if that fails."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except BaseException:
                _remove(path)
                raise
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def _remove(path: str) -> None:
    """Remove a file that is not whole; not a device or a pipe."""
    if os.path.isfile(path):
        os.unlink(path)


def name_as(path: str, name: str) -> None:
    """Let messages on standard error name ``name`` in place of ``path``, the local copy of what has that name."""
    _names[path] = name


def complain(message: str) -> None:
    """Print a message on standard error, on as many lines as it has."""
    for path, name in _names.items():
        message = message.replace(path, name)
    lines = (printable(line) for line in message.split("\n"))
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


# ---- signals


class EndSignals:
    """SIGINT and SIGTERM as they come, for the main thread."""

    def __init__(self, wakeups: socket.socket, wakes: socket.socket) -> None:
        self._wakeups = wakeups
        self._wakes = wakes

    def end(self) -> None:
        """Let `wait` return as if SIGTERM had come. Thread-safe."""
        with suppress(OSError):  # it is full of signals, or the wait is over
            self._wakes.send(bytes([signal.SIGTERM]))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next signal, at most so long; return whether it came."""
        self._wakeups.settimeout(timeout_s)
        try:
            while self._wakeups.recv(1)[0] not in _END_SIGNALS:
                pass
        except (TimeoutError, BlockingIOError):
            return False
        return True


_END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def end_signals() -> Iterator[EndSignals]:
    """Let SIGINT and SIGTERM interrupt nothing but a wait for them."""
    # Handlers in Python run between two steps of the main thread, so none runs while it blocks if the system gives the
    # signal to another thread, or just before. The wakeup descriptor is written to when the signal comes.
    import socket  # few commands wait

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        descriptor = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: None) for number in _END_SIGNALS}
        try:
            yield EndSignals(ours, theirs)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(descriptor)


# ---- files of rows

_FIRST: Final = 500
"""Rows that tell which columns there are."""
_GROUP: Final = 1 << 14


_NESTED: Final = (dict, list)
_encode: Final = json.JSONEncoder(ensure_ascii=False).encode
_headings: Final = lru_cache(1 << 8)(lambda names: [*map(cell, names)])


def _cell(value: object) -> object:
    """Return a cell of a line of CSV, which neither a terminal nor a spreadsheet obeys."""
    if isinstance(value, str):
        return value if value.isalnum() else cell(value)
    return printable(_encode(value)) if isinstance(value, _NESTED) else value


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _utf8(value) if isinstance(value, str)
        else _utf8(json.dumps(value, ensure_ascii=False)) if isinstance(value, _NESTED) else value
        for name, value in row.items()
    }  # fmt: skip


def _utf8(text: str) -> str:
    """Return a text with each lone surrogate, which UTF-8 cannot hold, as its escape."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


class CsvRows:
    """Rows of CSV, with the columns of the first rows."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._writer = csv.writer(stream, lineterminator="\n")
        self._first: list[tuple[list[str], list[object]]] = []
        self._columns: list[str] = []

    def row(self, row: Mapping[str, Any]) -> None:
        """Write a row."""
        columns, cells = _headings(tuple(row)), [*map(_cell, row.values())]
        if self._columns:
            self._write(columns, cells)
            return
        self._first.append((columns, cells))
        if len(self._first) == _FIRST:
            self._write_first()

    def _write_first(self) -> None:
        self._columns = list(dict.fromkeys(chain.from_iterable(columns for columns, _ in self._first)))
        self._writer.writerow(self._columns)
        for columns, cells in self._first:
            self._write(columns, cells)
        self._first.clear()

    def _write(self, columns: list[str], cells: list[object]) -> None:
        if columns != self._columns:
            by_column = dict(zip(columns, cells, strict=True))
            if others := by_column.keys() - self._columns:
                names = ", ".join(map(repr, sorted(others)))
                raise InputError(f"CSV: a row has other fields than the first {_FIRST} ({names}): use jsonl")
            cells = [by_column.get(column, "") for column in self._columns]
        self._writer.writerow(cells)

    def flush(self) -> None:
        """Pass on every row so far."""
        if self._first:
            self._write_first()
        self._stream.flush()

    close = flush


class ParquetRows:
    """A file of Parquet, with the columns and types of the first rows."""

    def __init__(self, path: str) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise MissingExtraError("Parquet", "arrow") from None
        self._arrow = pyarrow
        self._path = path
        self._rows: list[dict[str, Any]] = []
        self._file: Any = None
        self._schema: Any = None

    def row(self, row: Mapping[str, Any]) -> None:
        """Take a row; a full group is written."""
        self._rows.append(_flat(row))
        if len(self._rows) == _GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the rows so far."""
        rows, self._rows = self._rows, []
        if not rows and self._file is not None:
            return
        arrow = self._arrow
        try:
            if self._file is None:
                names = dict.fromkeys(chain(*rows))
                table = arrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
                kinds = [arrow.string() if arrow.types.is_null(field.type) else field.type for field in table.schema]
                self._schema = arrow.schema(list(zip(table.schema.names, kinds, strict=True)))
                self._file = arrow.parquet.ParquetWriter(self._path, self._schema)
            self._file.write_table(arrow.Table.from_pylist(rows, schema=self._schema))
        except OSError as error:
            raise InputError(f"{self._path}: {error}") from None
        except (arrow.ArrowException, OverflowError) as error:
            raise InputError(f"Parquet: a row does not fit the columns ({error}): use jsonl") from None

    def close(self) -> None:
        """Write the remaining rows and end the file."""
        try:
            self.flush()
        finally:
            if self._file is not None:
                self._file.close()


# ---- progress

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

    def track(self, items: Iterable[T], amount: Callable[[T], int]) -> Iterator[T]:
        """Yield items, and show after each that its amount is done."""
        for item in items:
            yield item
            self.advance(amount(item))

    def to(self, done: int) -> None:
        """Show that ``done`` of the total is done."""
        self._done = done
        if not self._is_shown or self._clock.monotonic() < self._next:
            return
        self._next = self._clock.monotonic() + _EVERY_S
        if self._bar is None:
            self._bar = self._start_bar()
            if self._bar is None:
                self._is_shown = False
                return
        seconds = self._clock.monotonic() - self._began
        self._bar.update(self._task, completed=done, total=self._total or None, rate=f"{done / seconds:,.0f}/s")
        self._bar.refresh()

    def _start_bar(self) -> object:
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
    from librmq.files import DiskFiles
    from librmq.store.format.directory import COMMITLOG

    files = DiskFiles().list(os.path.join(store, COMMITLOG))
    return watching_bar(what, passes * sum(file.size for file in files), quiet=quiet)
