"""Filters for reads of a store, first by queue entry, then by the message itself.

Mirrors 4.9.4's ``DefaultMessageFilter`` and ``ExpressionMessageFilter``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from librmq.clock import Clock
from librmq.config import wrong_kind
from librmq.consumequeue_entries import ExtUnit
from librmq.errors import ConfigError
from librmq.filter import Policy, Registration, Registrations, SqlFilter, TagFilter, WatchedPredicate
from librmq.message import StoredMessage
from librmq.store.engine.read import MessageFilter


class ByTags:
    """Filter by a tag subscription (``a || b``): the hash in the queue entry, then the tag itself. Thread-safe."""

    def __init__(self, filter_: TagFilter, *, exact: bool = True) -> None:
        """Without ``exact`` the hash alone decides, as in a broker, whose consumers compare the tag."""
        self._filter = filter_
        self._exact = exact and not filter_.takes_all
        self._codes = np.array(sorted(filter_.codes), np.int32)
        # The only codes of matching entries, for the compiled core; None if all match.
        self._packed_codes: bytes | None = None if filter_.takes_all else self._codes.tobytes()

    def match_entries(
        self, tags_codes: npt.NDArray[np.int64], units: Sequence[ExtUnit | None] | None
    ) -> npt.NDArray[np.bool_]:
        """Return which entries can match, by the hashes of their tags."""
        if self._packed_codes is None:
            return np.ones(len(tags_codes), np.bool_)
        codes = tags_codes.astype(np.int32)  # 4.9 compares 32 bits, of delivery times too
        return codes == self._codes if len(self._codes) == 1 else np.isin(codes, self._codes)

    def match_message(self, message: StoredMessage) -> bool:
        """Return whether the tag itself matches."""
        return not self._exact or self._filter.matches(message.tags)


class BySql:
    """Filter by an SQL92 expression: the bitmap of the extension unit if a registration has bits, then the message.

    Thread-safe.
    """

    def __init__(self, filter_: SqlFilter | Registration, registrations: Registrations | None = None) -> None:
        """``registrations`` holds the registration and decides its bits."""
        self._filter = filter_
        self._registrations = registrations

    def match_entries(
        self, tags_codes: npt.NDArray[np.int64], units: Sequence[ExtUnit | None] | None
    ) -> npt.NDArray[np.bool_]:
        """Return which entries can match, by the bitmaps of their units."""
        matches = np.ones(len(tags_codes), np.bool_)
        if units is not None and self._registrations is not None and isinstance(self._filter, Registration):
            bloom = self._registrations.bloom
            if self._registrations.answers_for(self._filter):
                for at, unit in enumerate(units):
                    if unit is not None:
                        matches[at] = self._filter.may_match(unit.bitmap, unit.store_timestamp_ms, bloom)
        return matches

    def match_message(self, message: StoredMessage) -> bool:
        """Return whether the expression is TRUE for the message."""
        return self._filter.matches(message.properties)


class ByPredicate:
    """Filter by a function of the application, whose errors and duration are watched. Thread-safe."""

    def __init__(self, predicate: WatchedPredicate[StoredMessage]) -> None:
        self._predicate = predicate

    def match_entries(
        self, tags_codes: npt.NDArray[np.int64], units: Sequence[ExtUnit | None] | None
    ) -> npt.NDArray[np.bool_]:
        """Return that all entries can match."""
        return np.ones(len(tags_codes), np.bool_)

    def match_message(self, message: StoredMessage) -> bool:
        """Return the function's answer."""
        return self._predicate.matches(message, f"physical offset {message.physical_offset}")


def message_filter(
    tags: str | None,
    sql: str | SqlFilter | None,
    registration: tuple[str, str] | None,
    predicate: Callable[[StoredMessage], object] | WatchedPredicate[StoredMessage] | None,
    *,
    filters: Registrations | None,
    sql_allowed: bool,
    clock: Clock,
) -> MessageFilter | None:
    """Make a filter of one argument; see `MessageStore.matching`."""
    if sum(argument is not None for argument in (tags, sql, registration, predicate)) > 1:
        raise ConfigError("matching: expected one of tags, sql, registration, predicate")
    if tags is not None:
        if not isinstance(tags, str):
            raise wrong_kind("tags", tags, "text such as 'a || b'")
        return ByTags(TagFilter(tags))
    if predicate is not None:
        if not isinstance(predicate, WatchedPredicate):
            predicate = WatchedPredicate(predicate, clock=clock, budget=0.01)
        if predicate.on_error is Policy.STOP:
            raise ConfigError("predicate: on_error: expected SKIP or DELIVER for reads of a store, found STOP")
        return ByPredicate(predicate)
    if (sql is not None or registration is not None) and not sql_allowed:
        raise ConfigError("SQL filters are switched off: open the store with StoreConfig(enable_property_filter=True)")
    if sql is not None:
        return BySql(sql if isinstance(sql, SqlFilter) else SqlFilter(sql))
    if registration is None:
        return None
    try:
        topic, group = registration
    except (TypeError, ValueError):
        raise wrong_kind("registration", registration, "(topic, group)") from None
    registered = None if filters is None else filters.get(topic, group)
    if registered is None:
        raise ConfigError(
            f"group {group!r} has no filter on topic {topic!r}: register it first, in the store's filters"
        )
    return BySql(registered, filters)
