"""Conditions of errors: a short name in each sentence of librmq that Spark shows, by which a job can tell errors apart.

==================  ====================================================================
``RMQ_DATA_LOSS``   messages that a read should return are deleted, or a store is gone
``RMQ_DAMAGED``     a file of a store is damaged
``RMQ_BAD_OPTION``  an option, a column, a filter or another value is wrong
``RMQ_LOCKED``      another process writes to the store
``RMQ_ERROR``       any other error of librmq
==================  ====================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from librmq.columns import DataLossError
from librmq.errors import ConfigError, CorruptionError, FilterError, RmqError, StoreLockedError

_CONDITIONS: Final[tuple[tuple[type[RmqError], str], ...]] = (
    (DataLossError, "RMQ_DATA_LOSS"),
    (CorruptionError, "RMQ_DAMAGED"),
    (StoreLockedError, "RMQ_LOCKED"),
    (ConfigError, "RMQ_BAD_OPTION"),
    (FilterError, "RMQ_BAD_OPTION"),
    (RmqError, "RMQ_ERROR"),
)
_Class = TypeVar("_Class", bound=type)


def with_condition(error: RmqError) -> RmqError:
    """Put the condition of ``error`` before its text, unless it has one, and return it."""
    text = str(error)
    if not text.startswith("[RMQ_"):
        condition = next(name for kind, name in _CONDITIONS if isinstance(error, kind))
        error.args = (f"[{condition}] {text}",)
    return error


def shows_conditions(kind: _Class) -> _Class:
    """Let the methods of a class that Spark calls, and the rows that they return, raise errors with a condition."""
    for name, method in list(vars(kind).items()):
        if callable(method) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, raises_conditions(method))
    return kind


def raises_conditions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, whose errors of librmq have a condition, also those of an iterator that it returns."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except RmqError as error:
            with_condition(error)
            raise
        return _rows(result) if isinstance(result, Iterator) else result

    return call


def _rows(rows: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from rows
    except RmqError as error:
        with_condition(error)
        raise
