"""Log lines with named fields: one call supplies the text of a line and the attributes of its log record.

::

    _log = EventLog("librmq.broker")
    _log.warning("group %(group)s: %(count)d messages are gone", group="billing", count=3)

    text         group billing: 3 messages are gone
    attributes   record.rmq_group == "billing", record.rmq_count == 3

The prefix keeps the attributes apart from `logging.LogRecord`'s and other packages' attributes. docs/logging.md lists
every line. A long call reports its progress to `watched`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from numbers import Integral, Real
from textwrap import indent
from traceback import TracebackException
from typing import Final, NamedTuple, Self, TypeAlias

from librmq.errors import RmqError
from librmq.formatting import printable, printable_lines
from librmq.override import override
from librmq.runtime.locks import call_outside

_PREFIX: Final = "rmq_"
_DEEP: Final = 3  # stack levels from a record to its caller: `_write`, the method of the level, the caller


class EventLog:
    """A logger whose lines have named fields. A disabled line costs one check of its level. Thread-safe.

    Numbers and None are unchanged in a record; other values become strings, in which control characters are escaped. A
    ``queue`` is the tuple of topic, broker name and queue id, and adds these three fields unless they are given. Fields
    whose names begin with ``_`` appear in the text only.
    """

    __slots__ = ("_fields", "_logger")

    def __init__(self, name: str, **fields: object) -> None:
        """``fields`` are added to every line."""
        self._logger = logging.getLogger(name)
        self._fields = fields

    def with_fields(self, **fields: object) -> Self:
        """Return this logger with more fields for every line."""
        return type(self)(self._logger.name, **self._fields, **fields)

    def debug(self, text: str, **fields: object) -> None:
        """Log normal work that matters only to developers of librmq."""
        self._write(logging.DEBUG, text, None, fields)

    def info(self, text: str, **fields: object) -> None:
        """Log a normal change."""
        self._write(logging.INFO, text, None, fields)

    def warning(self, text: str, **fields: object) -> None:
        """Log a failure that librmq handles by itself."""
        self._write(logging.WARNING, text, None, fields)

    def error(self, text: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """Log a problem that needs a person's attention."""
        self._write(logging.ERROR, text, exc_info, fields)

    def exception(self, text: str, **fields: object) -> None:
        """Log an error with the traceback of the current exception."""
        self._write(logging.ERROR, text, True, fields)

    def log(self, level: int, text: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """Log a line at a level that is chosen at run time."""
        self._write(level, text, exc_info, fields)

    def _write(self, level: int, text: str, exc_info: BaseException | bool | None, fields: dict[str, object]) -> None:
        if not self._logger.isEnabledFor(level):
            return
        if self._fields:
            fields = self._fields | fields
        queue = fields.get("queue")
        if isinstance(queue, tuple):
            topic, broker, queue_id = queue
            parts: dict[str, object] = {"topic": topic, "broker": broker, "queue_id": queue_id}
            fields = parts | fields | {"queue": f"{topic}/{broker}/{queue_id}"}
        # What the text shows can come from a message, so that it could end the line or command a terminal.
        values = {name: _plain(value) for name, value in fields.items()}
        extra = {_PREFIX + name: value for name, value in values.items() if not name.startswith("_")}
        arguments = (values,) if values else ()
        error = sys.exc_info()[1] if exc_info is True else exc_info
        described = (type(error), error, error.__traceback__) if isinstance(error, BaseException) else None
        file, line, function, _ = self._logger.findCaller(stacklevel=_DEEP)
        record = self._logger.makeRecord(
            self._logger.name, level, file, line, text, arguments, described, function, extra
        )
        # A formatter writes `exc_text` where a record has it, and else the raw text of the error's message.
        if described is not None:
            record.exc_text = _shown(TracebackException(*described, compact=True))
        call_outside(partial(self._logger.handle, record))


def _shown(error: TracebackException) -> str:
    """Return a traceback; its lines are indented, so that a message of several lines begins none of the log's."""
    return indent(printable_lines("".join(error.format()).rstrip("\n")), "  ")


def _plain(value: object) -> object:
    """Return a value that every log formatter can write, in one line; an error of librmq can have several."""
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Real):  # of numpy
        return int(value) if isinstance(value, Integral) else float(value)
    return str(value) if isinstance(value, RmqError) else printable(str(value))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 message`` and ``2,000 messages``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class HeldLine(NamedTuple):
    """A line as it was logged. The error is described without its frames, which would keep their variables alive."""

    record: logging.LogRecord
    error: TracebackException | None

    def log(self) -> None:
        """Log it now."""
        record = self.record
        log = logging.getLogger(record.name)
        if log.isEnabledFor(record.levelno):
            if self.error is not None:
                record.exc_text = _shown(self.error)
            log.handle(record)


@contextmanager
def held_back() -> Iterator[list[HeldLine]]:
    """Keep the lines of this process in the list, without logging them."""
    log = logging.getLogger("librmq")
    lines: list[HeldLine] = []
    before = log.handlers, log.propagate
    log.handlers, log.propagate = [_HoldingBack(lines)], False
    try:
        yield lines
    finally:
        log.handlers, log.propagate = before


class _HoldingBack(logging.Handler):
    def __init__(self, lines: list[HeldLine]) -> None:
        super().__init__()
        self._lines = lines

    @override
    def emit(self, record: logging.LogRecord) -> None:
        error, record.exc_info = record.exc_info, None
        record.msg, record.args = record.getMessage(), None  # the arguments can change
        described = None
        if error is not None and error[0] is not None:
            described = TracebackException(*error, lookup_lines=False, compact=True)
        self._lines.append(HeldLine(record, described))


# ---- lasting conditions


class StateLog:
    """Logs lasting conditions: one line when a condition begins or changes, one when it ends.

    Not thread-safe: called under the runner's lock, or by the one caller of a step.
    """

    def __init__(self, log: EventLog, label: str) -> None:
        self._log = log
        self._owner = label
        self.causes: dict[Hashable, tuple[str, object]] = {}
        """What fails now, and why, by key; callers check this first if success is frequent."""

    def failing(
        self,
        what: str,
        error: Exception,
        level: int = logging.WARNING,
        *,
        key: Hashable = None,
        again_ms: int | None = None,
        traceback: bool = False,
    ) -> None:
        """Note that ``what`` fails; log it unless it failed for the same kind of reason before.

        What fails together has a ``key``, by default ``what``. ``again_ms`` is the time to the next try.
        """
        key = what if key is None else key
        cause = type(error), getattr(error, "code", None) or getattr(error, "errno", None)
        is_known = key in self.causes and self.causes[key][1] == cause
        if not is_known:
            self.causes[key] = what, cause
        self._log.log(
            logging.DEBUG if is_known else level,
            "%(owner)s: %(task)s fails%(_again)s: %(error)s",
            owner=self._owner,
            task=what,
            error=error,
            again_ms=again_ms,
            _again="" if again_ms is None else f"; next try in {again_ms} ms",
            exc_info=error if traceback and not is_known else None,
        )

    def works(self, key: Hashable) -> None:
        """Note that what has this key succeeds; log it if it failed before."""
        if self.causes and (failed := self.causes.pop(key, None)) is not None:
            self._log.info("%(owner)s: %(task)s works again", owner=self._owner, task=failed[0])


# ---- progress of a long call

Watcher: TypeAlias = Callable[[int, int | None], object]
"""Receives the amount just done, and the total if the call knows it."""

_watcher: Final[ContextVar[Watcher | None]] = ContextVar("librmq_call_progress", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Report the progress of calls inside the block, in the current thread or task, to ``watcher``.

    ::

        with watched(lambda done, total: print(done)):
            verify(path)                     # reports the log bytes that it has read, a MiB at a time
    """
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def advance(done: int, total: int | None = None) -> None:
    """Report that the amount ``done`` has just been completed, of ``total`` altogether."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(done, total)
