"""Selections of subscriptions, for reads of a queue and for one arriving message.

Mirrors ``ExpressionMessageFilter``: tags by their hash, whose exact text consumers check; SQL exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from librmq.errors import BrokerError, FilterSyntaxError
from librmq.message.record import tags_code
from librmq.protocol import ResponseCode, Subscription

if TYPE_CHECKING:
    from librmq.filter import Registration, Registrations, SqlFilter, TagFilter
    from librmq.store.engine.read import MessageFilter


class Selection:
    """A subscription, ready to use. Immutable and thread-safe."""

    __slots__ = ("_codes", "_sql", "matching")

    def __init__(
        self,
        matching: MessageFilter | None,
        tags: TagFilter | None = None,
        sql: SqlFilter | Registration | None = None,
    ) -> None:
        self.matching = matching
        """The filter for `MessageStore.read`; None selects all."""
        self._codes = None if tags is None or tags.takes_all else tags.codes
        self._sql = sql

    def takes(self, properties: Mapping[str, str]) -> bool:
        """Return whether a message with these properties would be read."""
        if self._codes is not None:
            tags = properties.get("TAGS")
            return (tags_code(tags) if tags else 0) in self._codes
        return self._sql is None or self._sql.matches(properties)


ALL: Final = Selection(None)


@lru_cache(maxsize=1024)
def selection_of(expression: str, expression_type: str, *, by_text: bool) -> Selection:
    """Return the selection of a valid expression. Tags are compared ``by_text``, or by their hash as a queue has it."""
    from librmq.filter import SqlFilter, TagFilter  # a grammar comes with it, which few need
    from librmq.store.engine.message_filters import BySql, ByTags

    if expression_type == "SQL92":
        sql = SqlFilter(expression)
        return Selection(BySql(sql), sql=sql)
    tags = TagFilter(expression)
    return ALL if tags.takes_all else Selection(ByTags(tags, exact=by_text), tags)


def parse_selection(subscription: Subscription) -> Selection:
    """Parse a subscription; `BrokerError` if that fails."""
    expression_type = subscription.expression_type or "TAG"
    if expression_type == "TAG" and subscription.expression in ("*", ""):
        return ALL
    if expression_type not in ("TAG", "SQL92"):
        raise BrokerError(
            ResponseCode.SUBSCRIPTION_PARSE_FAILED,
            f"topic {subscription.topic!r}: expected a filter of type TAG or SQL92, found {expression_type!r:.80}",
        )
    try:
        return selection_of(subscription.expression, expression_type, by_text=False)
    except FilterSyntaxError as error:
        raise BrokerError(ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"topic {subscription.topic!r}: {error}") from error


def registered_selection(registrations: Registrations, registration: Registration) -> Selection:
    """Return the selection of a registered SQL subscription, which can use the store's bitmaps."""
    from librmq.store.engine.message_filters import BySql

    return Selection(BySql(registration, registrations), sql=registration)
