"""Base of push and pull consumers: one instance of a group, its subscriptions, queues, progress and life."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Generic, Self, TypeVar, cast

from librmq.broker.groups import comparable, describe_differences
from librmq.client import Client
from librmq.client.client import LifeCycle, Member, client_of
from librmq.config import to_seconds
from librmq.consumer._failures import Turns
from librmq.consumer._instance import REOPENED_MS, BrokerOffsets, Instance, instance_state
from librmq.consumer._listeners import check_at_brokers, make_subscription
from librmq.consumer._rebalancing import Rebalancing, readable_queues
from librmq.consumer.config import FIXED, ConsumerConfig
from librmq.errors import BrokerUnreachableError, ClientStateError, ConfigError, GroupMismatchError, RmqError
from librmq.filter import TagFilter
from librmq.message import MessageQueue, retry_topic
from librmq.message.topics import validate_group
from librmq.override import override
from librmq.protocol import (
    ConsumerData,
    ConsumerIds,
    ConsumerOffsets,
    ConsumersChanged,
    DescribeInstance,
    GroupSubscriptions,
    InstanceState,
    MessageModel,
    Request,
    ResetOffsets,
    Route,
    SaveProgress,
    Subscription,
)
from librmq.runtime.locks import check_reentry
from librmq.runtime.runner import aside_by

C = TypeVar("C", bound=ConsumerConfig)
R = TypeVar("R")


class Consumer(Instance, Member, Generic[C]):
    """One instance of a consumer group. Its state changes under the runner's lock."""

    _config: C

    def __init__(self, route: Route, group: str, config: C, client: Client | None, instance_name: str | None) -> None:
        validate_group(group)
        super().__init__(route, group, client_of(route, type(self).__name__, client, instance_name))
        self._config = config
        self._rebalancing: Rebalancing = Rebalancing(self)
        self._life = LifeCycle(f"{self.kind} consumer of group {group!r}")
        self._leaving = False
        self._turns: Turns = Turns.of(self.runner)
        self._maximum_set_ms = 0
        self._times_removed = self.client.times_removed
        route.noted_consumer(self)

    # ---- settings

    @property  # type: ignore[explicit-override]  # mypy sees no mark of a property that has a setter
    @override
    def config(self) -> C:
        """The settings; assigning others changes those that differ, like ``configure``."""
        return self._config

    @config.setter
    def config(self, config: C) -> None:
        kind = type(self._config)
        if type(config) is not kind:
            raise ConfigError(f"config: expected a {kind.__name__}, found {type(config).__name__}")
        self._change_settings(config)

    def _change_settings(self, config: C) -> None:
        """Use other settings from now on, or refuse them all."""
        with self.runner.lock:
            before = self._config
            for name in before.names():
                reason = FIXED.get(name)
                if reason is not None and getattr(config, name) != getattr(before, name):
                    raise ConfigError(
                        f"{name}: {self._life.what} can't change it from {getattr(before, name)!r:.80} to "
                        f"{getattr(config, name)!r:.80}, because {reason}: make another consumer"
                    )
            self._check_settings(config)
            self._config = config
            self._settings_changed()
            if config.max_reconsume_times != before.max_reconsume_times and self.is_running:
                self._maximum_set_ms, self._maximum_of_group = self.runner.now_ms(), None
                self.client.beat()

    def _check_settings(self, config: C) -> None:
        """Refuse settings that do not fit the subscriptions."""

    def _settings_changed(self) -> None:
        """Apply new settings to what is running. Under the lock."""

    # ---- what push and pull do differently

    def _reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        raise NotImplementedError

    # ---- subscriptions

    def _subscription(self, topic: str, tags: str | None, sql: str | None) -> tuple[Subscription, TagFilter | None]:
        return make_subscription(topic, tags, sql, self.runner.now_ms())

    def _set_subscription(self, subscription: Subscription, tag_filter: TagFilter | None) -> None:
        if self.is_running:
            self._learn_routes([subscription.topic])
            self._move_group([subscription.topic])
        with self.runner.lock:
            if self.is_running:
                check_at_brokers(self.client, self.group, subscription)
            before = self.subscriptions.get(subscription.topic)
            # Brokers keep the higher version, and both can have been made within a millisecond.
            if before is not None and subscription.version <= before.version:
                subscription = replace(subscription, version=before.version + 1)
            self.subscriptions[subscription.topic] = subscription
            self._filters.pop(subscription.topic, None)
            if tag_filter is not None:
                self._filters[subscription.topic] = tag_filter
            if self.is_running:
                self._rebalancing.note_queues(subscription.topic)
                self.client.beat()
                self._rebalancing.wake()

    # ---- life

    @property
    def was_started(self) -> bool:
        """Whether it was started, or shut down instead."""
        return not self._life.is_new

    @property
    def is_running(self) -> bool:
        """Whether it was started and not shut down."""
        return self._life.is_running

    def _check_ready(self) -> None:
        """Refuse to start an incomplete instance; it can be started later."""

    def _join_group(self) -> None:
        config = self.config
        if config.model is MessageModel.CLUSTERING:
            if self.kind == "push":
                retries = retry_topic(self.group)
                self.subscriptions[retries] = Subscription(retries, version=self.runner.now_ms())
        else:
            if not self.client.has_stable_name:
                self._log.warning("%(consumer)s broadcasts without an instance_name: its progress is lost at the end")
            if config.offsets_folder is None and self.runner.progress_home is not None:
                folder, files = self.runner.progress_home
            else:
                folder = config.offsets_folder or os.path.join(os.path.expanduser("~"), ".rocketmq_offsets")
                files = config.files
            aside = aside_by(self.runner, f"{self._label} writes progress", self.client, lambda at: None)
            now_ms, client_id = self.runner.now_ms, self.client.client_id
            from librmq.consumer._local_offsets import LocalOffsets

            self._offsets = LocalOffsets(folder, client_id, self.group, files, now_ms, aside)
        if config.guard and (differences := describe_differences(self.group, self._subscriptions_of_all())):
            raise GroupMismatchError(differences)
        for subscription in self.subscriptions.values():
            check_at_brokers(self.client, self.group, subscription)
        self._warn_of_same_id()
        self.started_ms: int = self.runner.now_ms()
        self._maximum_set_ms = self.started_ms
        self.client.join(self)
        self._turns.join(self)
        self._rebalancing.start()

    def _subscriptions_of_all(self) -> dict[str, dict[str, str]]:
        group: dict[str, dict[str, str]] = {}
        for name in self.route.broker_names():
            for client_id, subscriptions in (
                self.client.route.endpoint(name).call(GroupSubscriptions(self.group)).items()
            ):
                group.setdefault(client_id, {}).update(comparable(subscriptions))
        group[self.client.client_id] = comparable(self.subscriptions)
        return group

    def _warn_of_same_id(self) -> None:
        for name in self.route.broker_names():
            try:
                is_registered = self.client.client_id in self.client.route.endpoint(name).call(ConsumerIds(self.group))
            except RmqError:
                continue
            if is_registered:
                self._log.warning(
                    "%(consumer)s: group %(group)s has an instance of client id %(client)s at %(broker)s already. "
                    "Two instances of one id count as one, "
                    "and both consume its queues: give each its own instance_name, or shut the other down first",
                    client=self.client.client_id,
                    broker=name,
                )
                return

    def _stop(self, timeout: float | timedelta | None, begin: Callable[[], threading.Event | None]) -> bool:
        """Call ``begin`` under the lock, wait for its result, save, leave, and return whether all ended in time."""
        ended, in_time = None, True
        try:
            with self.runner.lock:
                if self._life.is_running:
                    self._stopping = self._leaving = True
                    self._life.shut_down()
                    ended = begin()
                else:
                    self._life.shut_down()
            if ended is not None and not self.runner.is_inherited:
                seconds = self.config.shutdown_timeout if timeout is None else to_seconds("timeout", timeout)
                in_time = self.runner.clock.wait(ended, seconds)
        finally:  # Ctrl-C ends only the wait; the next call ends the rest
            if self._leaving:
                with self.runner.lock:
                    try:
                        self._save(self.assigned.values())
                        if not all(assigned.keep() for assigned in self._changed(self.assigned.values())):
                            self._log.warning(
                                "%(consumer)s: ends although not all of its progress is stored, as a warning before "
                                "this one explains: what was consumed since is delivered again"
                            )
                        self._release_locks()
                    finally:
                        self._leave()
                        self._leaving = False
        return in_time

    def _leave(self) -> None:
        self.leave_marks()
        for assigned in self.assigned.values():
            assigned.released = True
            self._note("release", queue=assigned.queue)
        self.assigned.clear()
        self._turns.leave(self)
        self.client.leave(self)

    def leave_marks(self) -> None:
        """Remove the marks of messages that have begun."""
        for assigned in self.assigned.values() if not self.runner.is_inherited else ():
            assigned.leave_marks()

    def hold_back(self) -> None:
        """Begin no message while a suspect has its turn."""

    def go_on(self, now_ms: int) -> None:
        """Begin messages again."""

    @property
    def in_work(self) -> int:
        """The number of messages that have begun and not ended."""
        return 0

    def _release_locks(self) -> None:
        """Release this instance's locks at the brokers."""

    @override
    def __repr__(self) -> str:
        topics = ", ".join(topic for topic in self.subscriptions if topic != retry_topic(self.group))
        kind, state = type(self).__name__, self._life.state.value
        return f"<{kind} {self._label}, {state}, topics: {topics or 'none'}, queues: {len(self.assigned)}>"

    @override
    def start(self) -> Self:
        """Join the group and begin to consume.

        Raises:
            BrokerError: A broker does not serve an SQL subscription, or has no ``start_at``.
            BrokerUnreachableError: The route is a single broker, which is closed.
            ConfigError: A push consumer has no listener yet: subscribe one, then start. Or ``start_at`` is an offset
                that no queue has.
            ClientStateError: The consumer was started before.
            GroupMismatchError: With ``guard``, instances of the group have other subscriptions.
        """
        is_first = False
        if self._life.is_new:
            self._learn_routes([*self.subscriptions, retry_topic(self.group)])
            if self.config.model is MessageModel.CLUSTERING:
                self._offsets = BrokerOffsets(self.client, self.group, self._states, self.config.start_at)
                self._move_group(self.subscriptions)
        try:
            with self.runner.lock:
                if self._life.is_new:
                    self._check_ready()
                    is_first = True
                self._life.start(self._join_group)
        except BaseException:
            if is_first:
                with self.runner.lock:
                    self._life.fail_start()  # Ctrl-C has interrupted it after the start
                    self._stopping: bool = True
                    self._leave()
            raise
        return self

    def _move_group(self, topics: Iterable[str]) -> None:
        """Let the brokers move the group to ``start_at``; without the runner's lock, because they write it first."""
        if self.config.start_at is not None:
            for topic in topics:
                for name in self.route.broker_names():
                    with suppress(BrokerUnreachableError):  # The broker is asked again before a queue is taken.
                        cast("BrokerOffsets", self._offsets).start(topic, name)

    def _learn_routes(self, topics: Iterable[str]) -> None:
        """Ask a remote route for topics, without the runner's lock, so that nothing waits for the answer under it."""
        if not self.route.is_remote:
            return
        for topic in topics:
            with suppress(RmqError):  # The route is asked for again, and the failure is logged then.
                self.route.topic_route(topic)

    @override
    def shutdown(self, timeout: float | timedelta | None = None) -> bool:
        """Leave the group, and return whether all listeners ended in time."""
        raise NotImplementedError

    def _check_not_within(self) -> None:
        """Refuse a shutdown that would wait for its caller."""
        check_reentry()

    async def shutdown_async(self, timeout: float | timedelta | None = None) -> bool:
        """Shut down without blocking the event loop."""
        self._check_not_within()
        return await self.runner.offload(functools.partial(self.shutdown, timeout))

    # ---- what brokers ask

    @override
    def consumer_data(self) -> ConsumerData | None:
        """Return the description of this instance for heartbeats."""
        config = self.config
        maximum: int | None = None
        if self.kind == "push" and config.model is MessageModel.CLUSTERING:
            maximum = -1 if config.max_reconsume_times is None else config.max_reconsume_times
        return ConsumerData(
            self.group,
            self.kind,
            config.model,
            config.consume_from,
            dict(self.subscriptions),
            maximum,
            self._maximum_set_ms,
        )

    @override
    def answer(self, request: Request[R], /) -> R:
        """Answer a broker's request; under the runner's lock."""
        result: Any = None
        if isinstance(request, ConsumersChanged):
            if request.max_reconsume_times is not None:
                self._maximum_of_group = request.max_reconsume_times
            self._routes_changed()
            self._rebalancing.wake()
        elif isinstance(request, ResetOffsets):
            self._note("reset", request.topic)
            self._reset_offsets(request.topic, request.offsets)
        elif isinstance(request, ConsumerOffsets):
            result = self.progress(request.topic)
        elif isinstance(request, SaveProgress):
            self.runner.wake(self._saving)
        elif isinstance(request, DescribeInstance):
            result = self._state()
        else:
            raise ClientStateError(f"{self._life.what} answers no {type(request).__name__}")
        return cast(R, result)

    def _state(self) -> InstanceState:
        return instance_state(self)

    def _routes_changed(self) -> None:
        """Pull again from a broker that was reopened or has removed this client, and send it the progress."""
        is_removed = self.client.times_removed != self._times_removed
        self._times_removed = self.client.times_removed
        names = self.route.broker_names()
        for assigned in self.assigned.values():
            name = assigned.queue.broker_name
            if is_removed or (name in names and assigned.endpoint not in (None, self.client.route.endpoint(name))):
                assigned.doubt_progress(self.runner.now_ms() + REOPENED_MS)
                with suppress(RmqError):  # Until it can be asked again, what is reached counts on the page before.
                    assigned.place = self._offsets.hold(assigned.queue, was_held=True)
                if not assigned.released and not assigned.throttled:
                    # The pull can wait for the next try after a failure.
                    self.runner.wake(assigned.pull)
                if self._saving.at is None:
                    self._save_soon()

    def queues(self, topic: str) -> list[MessageQueue]:
        """Return all readable queues of a topic, sorted."""
        return sorted(readable_queues(topic, self.route.topic_route(topic)))
