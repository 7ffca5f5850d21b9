"""Listeners: the user's functions by topic and tag, and the meaning of their results."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from librmq.consumer.delivered import DeliveredMessage
from librmq.errors import ConfigError
from librmq.filter import WatchedPredicate
from librmq.listener import ReconsumeLater

MessageListener = Callable[[DeliveredMessage], object | Awaitable[object]]
"""A listener for one message at a time."""

BatchListener = Callable[[list[DeliveredMessage]], object | Awaitable[object]]
"""A listener for up to ``batch_size`` messages at a time."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A function that gets messages of a topic."""

    function: Callable[[Any], Any]
    as_list: bool
    must_return: bool
    is_async: bool

    def acknowledged(self, result: object, count: int) -> int:
        """Return the index of the last of ``count`` messages that the result acknowledges, -1 for none.

        Raises:
            ValueError: The listener returned an index below -1.
        """
        if self.as_list and isinstance(result, int) and not isinstance(result, bool):
            if result < -1:
                raise ValueError(f"the listener returned {result}: expected the index of a message, or -1 for none")
            return min(result, count - 1)
        if self.must_return and result is not True:
            return -1
        return count - 1


class Listeners:
    """The listeners of one consumer. A topic has one for all its messages, or several for disjoint tags."""

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[str | None, Listener]] = {}  # by tag; None: all messages of the topic

    def __contains__(self, topic: object) -> bool:
        return topic in self._by_topic

    def __len__(self) -> int:
        return len(self._by_topic)

    @property
    def are_async(self) -> bool:
        """Whether any of them is a coroutine function."""
        return any(listener.is_async for by_tag in self._by_topic.values() for listener in by_tag.values())

    def register(self, topic: str, tags: frozenset[str], listener: Listener) -> frozenset[str]:
        """Add a listener for some tags of a topic, or for all of it; return all tags with a listener of the topic.

        Raises:
            ConfigError: A message could go to this listener and another one.
        """
        present = self._by_topic.get(topic, {})
        new_tags: set[str | None] = set(tags) or {None}
        if present and (None in present or None in new_tags or not new_tags.isdisjoint(present)):
            shared = sorted(tag for tag in new_tags & present.keys() if tag is not None)
            what = f"tag {shared[0]!r} of topic {topic!r}" if shared else f"topic {topic!r}"
            raise ConfigError(
                f"{what} has a listener already: unsubscribe({topic!r}) first, or give each listener its own tags"
            )
        self._by_topic[topic] = {**present, **dict.fromkeys(new_tags, listener)}
        return frozenset(tag for tag in self._by_topic[topic] if tag is not None)

    def unregister(self, topic: str) -> None:
        """Drop all listeners of a topic."""
        self._by_topic.pop(topic, None)

    def listener_for(self, topic: str, message: DeliveredMessage) -> Listener | None:
        """Return the listener of a message; None where the topic, or the message's tag, has none."""
        by_tag = self._by_topic.get(topic)
        if by_tag is None:
            return None
        return by_tag.get(None) or by_tag.get(message.tags)

    def share_batches(self, topic: str, is_retry: bool) -> bool:
        """Return whether one listener gets all messages of a queue, so that they can share a batch."""
        if is_retry:  # a retry topic has messages of all topics
            return len(self._by_topic) == 1 and all(map(_has_one_listener, self._by_topic.values()))
        return _has_one_listener(self._by_topic.get(topic, {}))


def _has_one_listener(by_tag: dict[str | None, Listener]) -> bool:
    return len(set(map(id, by_tag.values()))) <= 1


def is_coroutine_function(function: object) -> bool:
    """Return whether ``function`` returns a coroutine; an object can have an asynchronous ``__call__``."""
    call = getattr(cast(Any, function), "__call__", None)  # noqa: B004 - only the type's own counts
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def refuse_generator(function: object, where: str = "") -> None:
    """Raise `ConfigError` for a generator function, asynchronous or not, because a call of it runs nothing.

    ``where`` begins the message.
    """
    call = getattr(cast(Any, function), "__call__", None)  # noqa: B004 - only the type's own counts
    if any(inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code) for code in (function, call)):
        raise ConfigError(
            f"{where}the listener {function!r:.80} is a generator, whose body a call does not run: "
            "remove `yield` from it"
        )


def with_predicate(
    function: Callable[[Any], Any], predicate: WatchedPredicate[DeliveredMessage], as_list: bool
) -> Callable[[Any], Any]:
    """Return a listener that gets only the messages that match; the others count as consumed."""
    if not as_list:

        def single(message: DeliveredMessage) -> object:
            return function(message) if predicate.matches(message, message.message_id) else True

        async def single_async(message: DeliveredMessage) -> object:
            return await function(message) if predicate.matches(message, message.message_id) else True

        return single_async if is_coroutine_function(function) else single

    def batch(messages: list[DeliveredMessage]) -> object:
        indices = _matching(predicate, messages)
        if not indices:
            return True
        try:
            return _index_in_batch(function([messages[index] for index in indices]), indices, len(messages))
        except ReconsumeLater as later:
            later.consumed = _consumed_in_batch(later.consumed, indices, len(messages))
            raise

    async def batch_async(messages: list[DeliveredMessage]) -> object:
        indices = _matching(predicate, messages)
        if not indices:
            return True
        try:
            return _index_in_batch(await function([messages[index] for index in indices]), indices, len(messages))
        except ReconsumeLater as later:
            later.consumed = _consumed_in_batch(later.consumed, indices, len(messages))
            raise

    return batch_async if is_coroutine_function(function) else batch


def _matching(predicate: WatchedPredicate[DeliveredMessage], messages: Sequence[DeliveredMessage]) -> list[int]:
    return [index for index, message in enumerate(messages) if predicate.matches(message, message.message_id)]


def _index_in_batch(result: object, indices: list[int], count: int) -> object:
    """Translate an index among the matching messages to one among all."""
    if isinstance(result, bool) or not isinstance(result, int) or result < -1:
        return result
    return _consumed_in_batch(result + 1, indices, count) - 1


def _consumed_in_batch(consumed: int, indices: list[int], count: int) -> int:
    return count if consumed >= len(indices) else indices[max(0, consumed)]
