"""Subscriptions, as consumers of all kinds create and check them."""

from __future__ import annotations

from contextlib import suppress

from librmq.client.client import Client
from librmq.errors import BrokerUnreachableError, ConfigError, NoRouteError
from librmq.filter import SQL92, TAG, SqlFilter, TagFilter
from librmq.message.message import validate_client_topic
from librmq.protocol import CheckSubscription, Subscription


def make_subscription(
    topic: str, tags: str | None, sql: str | None, version: int
) -> tuple[Subscription, TagFilter | None]:
    """Return a subscription, and the exact check of its tags if it has any.

    Raises:
        ConfigError: Both ``tags`` and ``sql`` are given, or one is not a string.
        FilterSyntaxError: The expression does not compile.
        MessageIllegalError: The topic has an invalid name.
    """
    validate_client_topic(topic)
    if tags is not None and sql is not None:
        raise ConfigError(f"topic {topic!r}: expected tags or sql, found both: give either tags or sql")
    for name, value in (("tags", tags), ("sql", sql)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"topic {topic!r}: {name}: expected text, found {value!r:.80}")
    if sql is not None:
        SqlFilter(sql)
        return Subscription(topic, sql, SQL92, version), None
    tag_filter = TagFilter(tags)
    return Subscription(topic, tag_filter.expression, TAG, version), tag_filter if tag_filter.tags else None


def check_at_brokers(client: Client, group: str, subscription: Subscription) -> None:
    """Check that each reachable broker serves an SQL subscription; raise `BrokerError` if one does not."""
    if subscription.expression_type == TAG:
        return
    request = CheckSubscription(client.client_id, group, subscription)
    for name in client.route.broker_names():
        with suppress(BrokerUnreachableError, NoRouteError):
            client.endpoint(name).call(request)
