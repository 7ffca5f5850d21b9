"""A group's own predicates on messages, and listeners that get only the messages that match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from librmq.client.operations import Watched
from librmq.consumer._listeners import DeliveredMessage
from librmq.filter import Policy, WatchedPredicate
from librmq.listener import ReconsumeLater, is_coroutine_function

M = TypeVar("M", bound=DeliveredMessage)

PREDICATE_BUDGET_S: Final = 1.0
"""Seconds above which a call of a plain function as predicate is logged."""

Predicate = Callable[[M], object] | WatchedPredicate[M]
"""An application's choice of messages: a function, or one with a budget and policies."""


class TopicPredicate(Generic[M]):
    """A group's own predicate on a topic. Call it without the runner's lock. Thread-safe."""

    def __init__(self, topic: str, predicate: Predicate[M], consumer: Watched) -> None:
        """Raise `ConfigError` for what is not a predicate."""
        if not isinstance(predicate, WatchedPredicate):
            predicate = WatchedPredicate(predicate, clock=consumer.client.runner.clock, budget=PREDICATE_BUDGET_S)
        self.topic = topic
        self.watched: WatchedPredicate[M] = predicate
        """The predicate with its counts."""
        self._consumer = consumer

    def matches(self, message: M) -> bool:
        """Return whether to deliver a message; raise the predicate's error where its policy is to stop."""
        match, error, is_slow = self.watched.judge(message, message.message_id)
        outcome = "error" if error is not None else "slow" if is_slow else "match" if match else "no match"
        self._consumer._note("predicate", self.topic, outcome)
        if error is not None and self.watched.on_error is Policy.STOP:
            raise error
        return match


def with_predicate(
    function: Callable[[Any], Any], predicate: TopicPredicate[DeliveredMessage], as_list: bool
) -> Callable[[Any], Any]:
    """Return a listener that gets only the messages that match; the others count as consumed."""
    if not as_list:

        def single(message: DeliveredMessage) -> object:
            return function(message) if predicate.matches(message) else True

        async def single_async(message: DeliveredMessage) -> object:
            return await function(message) if predicate.matches(message) else True

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


def _matching(predicate: TopicPredicate[DeliveredMessage], messages: Sequence[DeliveredMessage]) -> list[int]:
    return [index for index, message in enumerate(messages) if predicate.matches(message)]


def _index_in_batch(result: object, indices: list[int], count: int) -> object:
    """Translate an index among the matching messages to one among all."""
    if isinstance(result, bool) or not isinstance(result, int) or result < -1:
        return result
    return _consumed_in_batch(result + 1, indices, count) - 1


def _consumed_in_batch(consumed: int, indices: list[int], count: int) -> int:
    return count if consumed >= len(indices) else indices[max(0, consumed)]
