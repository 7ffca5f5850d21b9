"""Log lines with named fields: one call gives the text of a line and the attributes of its record.

::

    _log = EventLog("librmq.broker")
    _log.warning("group %(group)s: %(count)d messages are gone", group="billing", count=3)

    text         group billing: 3 messages are gone
    attributes   record.rmq_group == "billing", record.rmq_count == 3

The prefix keeps the attributes apart from those of `logging.LogRecord` and of other packages. docs/logging.md lists
every line.
"""

from __future__ import annotations

import logging
from typing import Final, Self

__all__ = ["EventLog"]

_PREFIX: Final = "rmq_"
_DEEP: Final = 3  # from a record's place to its caller: `_write`, the method of the level, the caller


class EventLog:
    """A logger whose lines have named fields. A disabled line costs one look at its level. Thread-safe.

    Text, numbers and None stay what they are in a record; anything else becomes its text. A ``queue`` is the tuple of
    topic, broker name and queue id, and adds these three fields where they are not given. A name that begins with
    ``_`` is part of the text only.
    """

    __slots__ = ("_fields", "_logger")

    def __init__(self, name: str, **fields: object) -> None:
        """``fields`` belong to every line."""
        self._logger = logging.getLogger(name)
        self._fields = fields

    def with_fields(self, **fields: object) -> Self:
        """Return the same logger with more fields that belong to every line."""
        return type(self)(self._logger.name, **self._fields, **fields)

    def debug(self, text: str, **fields: object) -> None:
        """Write a line about normal work that only a developer of librmq needs."""
        self._write(logging.DEBUG, text, None, fields)

    def info(self, text: str, **fields: object) -> None:
        """Write a line about a normal change."""
        self._write(logging.INFO, text, None, fields)

    def warning(self, text: str, **fields: object) -> None:
        """Write a line about a failure that librmq copes with by itself."""
        self._write(logging.WARNING, text, None, fields)

    def error(self, text: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """Write a line about something that a person has to look at."""
        self._write(logging.ERROR, text, exc_info, fields)

    def exception(self, text: str, **fields: object) -> None:
        """Write an error with the traceback of the exception that is handled now."""
        self._write(logging.ERROR, text, True, fields)

    def log(self, level: int, text: str, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """Write a line of a level that is chosen at run time."""
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
        extra = {_PREFIX + name: _plain(value) for name, value in fields.items() if not name.startswith("_")}
        arguments = (fields,) if fields else ()
        self._logger.log(level, text, *arguments, exc_info=exc_info, extra=extra, stacklevel=_DEEP)


def _plain(value: object) -> object:
    """Return a value that every formatter of logs can write."""
    return value if value is None or isinstance(value, str | int | float) else str(value)
