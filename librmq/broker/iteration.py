"""Iteration over a topic as an instance of a consumer group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, Self, cast

from librmq.errors import BrokerUnreachableError
from librmq.lazy_exports import exported
from librmq.message.message import StoredMessage
from librmq.protocol import Route


class _Consumer(Protocol):
    """The part of a pull consumer that `consume_topic` needs."""

    def subscribe(self, topic: str, *, tags: str | None = None, sql: str | None = None) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    def __iter__(self) -> Iterator[StoredMessage]: ...


def consume_topic(
    route: Route, topic: str, group: str, tags: str | None, sql: str | None, timeout: float
) -> Iterator[StoredMessage]:
    """Subscribe immediately; yield messages until none arrives for ``timeout`` seconds."""
    make = cast("Callable[..., _Consumer]", exported("librmq", "PullConsumer"))  # lazy: it uses brokers
    consumer = make(route, group, poll_timeout=timeout)
    consumer.subscribe(topic, tags=tags, sql=sql)

    def messages() -> Iterator[StoredMessage]:
        with consumer:  # leaving the loop early ends this block by an exception
            yield from consumer
            if not route.broker_names():
                raise BrokerUnreachableError(
                    f"topic {topic!r}, group {group!r}: the broker was closed during the iteration"
                )

    return messages()
