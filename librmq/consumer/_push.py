"""Push consumers, which pull messages and call listeners.

Each assigned queue has one pull, which the broker holds while the queue has no message. A postponed pull (too much is
held, the lock is missing, the consumer is paused) is woken when the reason ends. Mirrors ``DefaultMQPushConsumer``,
``DefaultMQPushConsumerImpl`` and ``PullAPIWrapper``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar, Unpack, cast, overload

from librmq.client import Client, Operation
from librmq.client.operations import Watcher
from librmq.clock import Allowance
from librmq.config import check_arguments
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._concurrent import ConcurrentDelivery, check_weight
from librmq.consumer._instance import AWAY_MS, REOPENED_MS, instance_state, show_gauges
from librmq.consumer._listener_calls import ListenerCalls, consume_directly
from librmq.consumer._listeners import (
    BatchListener,
    DeliveredMessage,
    Listener,
    MessageListener,
)
from librmq.consumer.base import Consumer
from librmq.consumer.config import ConsumerConfig, ConsumerKeywords
from librmq.errors import (
    BrokerDamageError,
    BrokerError,
    BrokerUnreachableError,
    ClientStateError,
    ConfigError,
    RmqError,
    StoreClosedError,
)
from librmq.listener import is_coroutine_function, refuse_generator
from librmq.message import MessageQueue
from librmq.override import override
from librmq.protocol import (
    ConsumeDirectly,
    Endpoint,
    InstanceState,
    MessageModel,
    PullMessage,
    PullResponse,
    PullStatus,
    Request,
    ResponseCode,
    Route,
    TakeHandOuts,
)
from librmq.runtime import Step
from librmq.runtime.runner import NEVER

if TYPE_CHECKING:
    from librmq.client.traces import TraceWriter
    from librmq.consumer._orderly import BlockedQueue, BrokerLocks, OrderlyDelivery
    from librmq.consumer._predicates import Predicate
    from librmq.filter import WatchedPredicate
    from librmq.metrics import Metrics

# ---- pulls

AFTER_ERROR_MS: Final = 3_000
CORRECTION_MS: Final = 10_000
"""Within this time a position is corrected at once only once, and the right one is stored before it is used."""


class Fetcher:
    """The pulls of a push consumer. Called under the runner's lock."""

    def __init__(self, consumer: PushConsumer) -> None:
        self._consumer = consumer
        self._is_clustering = consumer.config.model is MessageModel.CLUSTERING
        self._is_remote = consumer.route.is_remote
        self._begins_at_once = consumer.runner.begins_at_once and not consumer.config.orderly
        self._corrected_ms: dict[MessageQueue, int] = {}
        self._permits = 0
        """Messages that may be handed out by the group's rate, and were not."""
        self._own_rate: Allowance | None = None
        """That of this instance alone, where a remote broker keeps none for the group."""
        self.share_limits()

    def start(self, assigned: AssignedQueue) -> None:
        delivery, wake = self._consumer._concurrent, self._consumer.runner.wake
        assigned.pull.run_due = partial(self._run_pull, assigned)
        assigned.notify = partial(wake if delivery is None else delivery.pull_again, assigned.pull)
        wake(assigned.pull)

    def share_limits(self) -> None:
        """Divide the limits of a topic among the assigned queues of all topics, as in 4.9."""
        config, count = self._consumer.config, max(1, len(self._consumer.assigned))
        self._config = config
        self._interval_ms = round(config.pull_interval * 1000)
        self._max_span = NEVER if config.orderly else config.max_span
        self.max_messages: int = config.max_held_messages
        self.max_bytes: int = config.max_held_bytes
        if config.max_held_messages_of_topic is not None:
            self.max_messages = max(1, config.max_held_messages_of_topic // count)
        if config.max_held_bytes_of_topic is not None:
            self.max_bytes = max(1 << 20, config.max_held_bytes_of_topic // count)

    def is_full(self, assigned: AssignedQueue) -> bool:
        return assigned.messages.exceeds(self.max_messages, self.max_bytes, self._max_span)

    def _throttles(self, assigned: AssignedQueue) -> bool:
        assigned.throttled = self.is_full(assigned)
        if assigned.throttled:
            self._consumer._note("throttle", assigned.queue.topic)
        return assigned.throttled

    def resume_throttled(self, assigned: AssignedQueue) -> None:
        if not self.is_full(assigned):
            assigned.throttled = False
            self._consumer.runner.wake(assigned.pull)

    def apply_settings(self) -> None:
        """Pull by the consumer's new settings: queues that they throttle no more, and those that rest between pulls."""
        self.share_limits()
        for assigned in self._consumer.assigned.values():
            if assigned.throttled:
                self.resume_throttled(assigned)
            elif assigned.pull.at is not None:
                self._consumer.runner.wake(assigned.pull)

    def wake_all(self) -> None:
        for assigned in self._consumer.assigned.values():
            if not assigned.released:
                self._consumer.runner.wake(assigned.pull)

    def _run_pull(self, assigned: AssignedQueue, now_ms: int) -> int | None:
        """Pull a queue and deliver its messages; return the time of the next pull, None if another turn wakes it."""
        consumer, queue = self._consumer, assigned.queue
        assigned.lost = False
        try:
            if assigned.released or consumer._stopping or consumer.is_paused:
                return None
            assigned.pulled_timestamp_ms = now_ms
            if self._throttles(assigned):
                return None
            try:
                if consumer.locks is not None and not consumer.locks.may_pull(assigned, now_ms):
                    return None
                progress = self._progress_to_store(assigned)
                endpoint = assigned.endpoint = consumer.client.route.endpoint(queue.broker_name)
                max_messages = self._config.pull_batch_size
                if self._config.rate is not None:
                    max_messages, again_ms = self._permitted(endpoint, self._config.rate, now_ms)
                    if not max_messages:
                        return again_ms
                stays = not self._interval_ms
                hands_over = self._config.rate is None and stays and self._begins_at_once and endpoint.hands_over
                response = endpoint.call(
                    PullMessage(
                        client_id=consumer.client.client_id,
                        group=consumer.group,
                        topic=queue.topic,
                        queue_id=queue.queue_id,
                        queue_offset=assigned.next_offset,
                        max_messages=max_messages,
                        subscription=None,
                        commit_offset=progress,
                        notify=assigned.notify,
                        stay=stays,
                        take=partial(self._take, assigned) if hands_over else None,
                        damage_ms=-1 if self._config.on_damage is None else round(1000 * self._config.on_damage),
                    )
                )
            except BrokerDamageError as error:
                self._report_failure(assigned, error)
                return now_ms + AFTER_ERROR_MS
            except RmqError as error:
                return self._handle_failure(assigned, error, now_ms)
            self._permits -= min(self._permits, len(response.messages))
            if consumer._states.causes:
                consumer._states.works(("pull", queue.broker_name, queue.topic))
            # A remote broker has not taken this pull's progress yet, as its answer may be still to come. Only a local
            # call has stored it by now.
            if progress is not None and not self._is_remote:
                assigned.stored_progress = progress
            return self._handle_response(assigned, response, now_ms)
        except BaseException:
            assigned.lost = True
            consumer._rebalancing.wake_on_grid()
            raise

    def _permitted(self, endpoint: Endpoint, rate: float, now_ms: int) -> tuple[int, int]:
        """Return how many messages the next pull may hand out, and if none, when to ask again."""
        again_ms, max_messages = now_ms, self._config.pull_batch_size
        if not self._permits:
            burst = self._config.burst or max(1, round(rate / 10))
            permits, name = min(max_messages, burst), (self._consumer.group, self._consumer.client.client_id)
            if not self._is_remote or endpoint.has_page:
                self._permits, again_ms = endpoint.call(TakeHandOuts(*name, permits, round(1000 * rate), burst))
                return min(max_messages, self._permits), again_ms
            if self._own_rate is None:
                self._own_rate = Allowance(now_ms)
                self._consumer._log.info(
                    "%(consumer)s: rate counts for this instance alone, because a remote broker has none for the group"
                )
            self._permits, again_ms = self._own_rate.take(permits, rate, burst, now_ms)
        return min(max_messages, self._permits), again_ms

    def _progress_to_store(self, assigned: AssignedQueue) -> int | None:
        """Return the progress that a pull stores; `save` stores what was chosen, even if the broker's is later."""
        if assigned.place is not None:  # It is there, perhaps further when a broker gets this pull.
            return None
        stores = self._is_clustering and not (assigned.may_be_passed or assigned.is_chosen)
        return assigned.progress if stores and assigned.progress else None

    def _take(self, assigned: AssignedQueue, raw: bytes, min_offset: int, max_offset: int) -> int | None:
        """Begin the next message of a held pull in the thread that stores it, if no listener runs.

        While one runs, messages gather, and a pull gets them together. Return the progress to store, 0 for none; None
        if a pull has to get the message.
        """
        consumer = self._consumer
        if (
            consumer.calls.running
            or assigned.next_offset != max_offset - 1
            or assigned.pull.at is not None
            or assigned.released
            or assigned.left is not None
            or assigned.progress is None
            or consumer.is_paused
            or consumer._states.causes
            or assigned.queue.topic in consumer._filters
            or self.is_full(assigned)
        ):
            return None
        delivery, now_ms = consumer._concurrent, consumer.runner.now_ms()
        try:
            if delivery is None or not delivery.try_begin(assigned, raw, (min_offset, max_offset), now_ms):
                return None
            assigned.next_offset = max_offset
            assigned.pulled_timestamp_ms = now_ms
            if consumer.watchers:
                consumer._note("pull", assigned.queue.topic, PullStatus.FOUND.value)
        except BaseException:  # Ctrl-C in the main thread: the queue is taken again, with all that it has begun
            consumer.calls.count_running()
            assigned.lost, assigned.pulled_timestamp_ms = True, 0
            consumer._rebalancing.wake()
            raise
        progress = self._progress_to_store(assigned)
        if progress is None:
            return 0
        assigned.stored_progress = progress
        return progress

    def _handle_failure(self, assigned: AssignedQueue, error: RmqError, now_ms: int) -> int:
        consumer, queue = self._consumer, assigned.queue
        # The broker can have been reopened from older progress, and another reader can have stored its own. Until that
        # is known, nothing of this instance may overwrite it.
        if self._is_clustering:
            if isinstance(error, (BrokerUnreachableError, StoreClosedError)):
                assigned.doubt_progress(now_ms + AWAY_MS)
            elif assigned.progress is None or assigned.stored_progress is not None or not assigned.may_be_passed:
                assigned.doubt_progress(now_ms + REOPENED_MS)
            consumer._save_soon()
        if isinstance(error, BrokerError) and error.code == ResponseCode.SUBSCRIPTION_NOT_EXIST:
            consumer.client.removed_by(queue.broker_name)
        self._report_failure(assigned, error)
        return now_ms + AFTER_ERROR_MS

    def _report_failure(self, assigned: AssignedQueue, error: RmqError) -> None:
        queue, level = assigned.queue, logging.DEBUG if assigned.is_retry else logging.WARNING
        key = "pull", queue.broker_name, queue.topic
        self._consumer._states.failing(f"pulling {assigned.label}", error, level, key=key)

    def _handle_response(self, assigned: AssignedQueue, response: PullResponse, now_ms: int) -> int | None:
        status = response.status
        self._consumer._note("pull", assigned.queue.topic, status.value)
        if status is PullStatus.OFFSET_ILLEGAL:
            self._correct(assigned, response.next_offset, now_ms)
            return None
        begin, assigned.next_offset = assigned.next_offset, response.next_offset
        if status is not PullStatus.FOUND:
            assigned.unfinished((), begin, assigned.next_offset)
            self._pass_skipped(assigned)
            return None if status is PullStatus.HELD else now_ms + self._interval_ms
        messages = response.messages
        tag_filter = self._consumer._filters.get(assigned.queue.topic)
        if tag_filter is not None:
            messages = [message for message in messages if tag_filter.matches(message.tags)]
        messages = assigned.unfinished(messages, begin, assigned.next_offset)
        if messages and assigned.progress is None and assigned.place is not None:
            # A kill before the first message has ended must not let the next process begin behind it.
            self._consumer._progressed(assigned, messages[0].queue_offset)
        bounds = response.min_offset, response.max_offset
        self._consumer.delivery.pulled(assigned, messages, bounds, now_ms)
        self._pass_skipped(assigned)
        # Without an interval the next pull would be the next turn, which a full queue can do without.
        if (not self._interval_ms and self._throttles(assigned)) or response.is_held:
            return None
        return now_ms + self._interval_ms

    def _pass_skipped(self, assigned: AssignedQueue) -> None:
        """Count what the pulls have passed over as consumed, as soon as what precedes it is."""
        assigned.messages.pass_to(assigned.next_offset)
        if not len(assigned.messages) and (assigned.progress is None or assigned.progress < assigned.next_offset):
            self._consumer._progressed(assigned, assigned.next_offset)

    def _correct(self, assigned: AssignedQueue, next_offset: int, now_ms: int) -> None:
        """Release a queue that lacks this offset; it is assigned again at an offset that it has.

        The broker says it also of a reset, and says that once. So the offset is stored before anything else, and
        results of listeners that still run are ignored: their progress would undo the reset.
        """
        consumer, queue = self._consumer, assigned.queue
        consumer._log.warning(
            "%(consumer)s: %(queue)s has no offset %(queue_offset)d, or its group was reset; %(next_offset)d is next",
            queue=queue,
            queue_offset=assigned.next_offset,
            next_offset=next_offset,
        )
        consumer._note("reset", queue.topic)
        assigned.released = True
        assigned.choose(next_offset)
        # A broker that has no right offset must not keep the consumer busy.
        is_repeated = 0 <= now_ms - self._corrected_ms.get(queue, -CORRECTION_MS) < CORRECTION_MS
        self._corrected_ms[queue] = now_ms

        def correct(at_ms: int) -> int | None:
            if consumer._stopping or consumer.assigned.get(queue) is not assigned:
                return None
            if not consumer._save((assigned,)) and 0 <= at_ms - now_ms < CORRECTION_MS:
                return at_ms + AFTER_ERROR_MS
            consumer._reassign(assigned)
            if is_repeated:
                consumer._rebalancing.wake_on_grid()
            else:
                consumer._rebalancing.wake()
            return None

        consumer.runner.wake(Step(f"{consumer._label} correct {assigned.label}", correct, consumer.client))


F = TypeVar("F", bound=MessageListener | BatchListener)
R = TypeVar("R")

RESET_MS: Final = 10_000
"""Time that running listeners have to end when a group is reset."""


# ---- the consumer


class _SubscriptionKeywords(TypedDict, total=False):
    tags: str | None
    sql: str | None
    predicate: Predicate[DeliveredMessage] | None
    batch: bool | None
    must_return: bool
    weight: int | None


class PushConsumer(Consumer[ConsumerConfig]):
    """A consumer that pulls messages and calls the listeners of their topics, as an instance of a group. Thread-safe.

    Instances of a group have different clients. Coroutines run on the event loop in which `start` was called, or else
    on a loop of librmq.
    """

    kind = "push"

    def __init__(  # noqa: PLR0913 (each is a keyword of its own)
        self,
        route: Route,
        group: str,
        *,
        client: Client | None = None,
        instance_name: str | None = None,
        config: ConsumerConfig | None = None,
        hooks: Iterable[Watcher] = (),
        before_last_attempt: Callable[[DeliveredMessage], object] | None = None,
        metrics: Metrics | None = None,
        trace: bool | str = False,
        **settings: Unpack[ConsumerKeywords],
    ) -> None:
        """It joins its group at `start` or in a ``with`` block.

        Args:
            route: A `Broker`, or several in a `RouteTable`.
            group: The consumer group; its instances share the messages.
            client: The identity; by default one of its own.
            instance_name: Makes the client's id the same from run to run.
            config: Settings.
            hooks: Called with each call of a listener, an `Operation`; each may return a function that gets what the
                listener returns, and its exception.
            before_last_attempt: Called with a message that would become a dead letter if it failed once more.
            metrics: Counts pulls and consumed messages.
            trace: Whether each delivery and its outcome are recorded in ``RMQ_SYS_TRACE_TOPIC``, or the name of another
                topic for that, as by ``enableMsgTrace`` of RocketMQ's clients.
            **settings: Single settings of `ConsumerConfig`, in place of those in ``config``.

        Raises:
            ConfigError: There is no such setting, its value is refused, or a function can't take its argument.
            TypeError: ``route`` is not a route.
        """
        super().__init__(route, group, ConsumerConfig.of(config, settings), client, instance_name)
        if before_last_attempt is not None:
            check_arguments("before_last_attempt: the function", before_last_attempt, "one message")
        self.metrics = metrics
        self._gauged: Metrics | None = None
        if metrics is not None:
            from librmq.metrics import outside

            self._gauged = outside(metrics)
        self.traces: TraceWriter | None = None
        if trace is not False:
            from librmq.client.traces import TraceWriter

            timeout_s = lambda: self.config.consume_timeout  # noqa: E731
            self.traces = TraceWriter(self.client, group, trace, metrics, "CONSUME", timeout_s)
        self._watch_by(
            None if before_last_attempt is None else {"process": partial(_note_last_attempts, before_last_attempt)},
            None if self.traces is None else self.traces.watchers,
            hooks=hooks,
            metrics=metrics,
        )
        self.calls: ListenerCalls = ListenerCalls(self)
        self._listeners = self.calls.listeners
        self.is_paused: bool = False
        self._resets: list[list[tuple[AssignedQueue, int]]] = []
        self._subscribed: list[tuple[str, Callable[..., Any], _SubscriptionKeywords]] = []
        self.predicates: list[tuple[str, WatchedPredicate[DeliveredMessage]]] = []
        """The predicates of its listeners, which count their answers, by topic."""
        self._fetcher = fetcher = Fetcher(self)
        self.locks: BrokerLocks | None = None
        """The locks of its queues, if it is orderly and uses them."""
        self._concurrent: ConcurrentDelivery | None = None
        self._orderly: OrderlyDelivery | None = None
        self.delivery: ConcurrentDelivery | OrderlyDelivery
        """The one of both that chooses what the listeners get next, and applies their results."""
        if self.config.orderly:
            from librmq.consumer._orderly import OrderlyDelivery

            self.delivery = self._orderly = OrderlyDelivery(self.calls, self._rebalancing, fetcher.resume_throttled)
            self.locks = self._orderly.locks
        else:
            self.delivery = self._concurrent = ConcurrentDelivery(self.calls, fetcher.resume_throttled)

    # ---- settings

    def configure(self, **settings: Unpack[ConsumerKeywords]) -> None:
        """Change settings while the consumer runs, at once and without losing a message.

        Running listeners end first: with fewer ``threads`` or a smaller ``batch_size`` only later calls differ. What is
        held beyond a lower limit is delivered before the next pull.

        Raises:
            ConfigError: There is no such setting, its value is refused, or it can't change after the consumer was made.
                Then nothing has changed.
        """
        with self.runner.lock:
            self._change_settings(self.config.with_settings(settings))

    @override
    def _check_settings(self, config: ConsumerConfig) -> None:
        topic = self._listeners.without_batches()
        if config.batch_size > 1 and topic is not None:
            raise ConfigError(
                f"batch_size: expected 1, because the listener of topic {topic!r} takes single messages, found "
                f"{config.batch_size}: subscribe it with batch=True"
            )

    @override
    def _settings_changed(self) -> None:
        self._fetcher.apply_settings()
        self.delivery.apply_settings(self.runner.now_ms())

    # ---- subscribing

    @overload
    def subscribe(
        self, topic: str, listener: None = None, **options: Unpack[_SubscriptionKeywords]
    ) -> Callable[[F], F]: ...

    @overload
    def subscribe(self, topic: str, listener: F, **options: Unpack[_SubscriptionKeywords]) -> F: ...

    def subscribe(
        self,
        topic: str,
        listener: F | None = None,
        *,
        tags: str | None = None,
        sql: str | None = None,
        predicate: Predicate[DeliveredMessage] | None = None,
        batch: bool | None = None,
        must_return: bool = False,
        weight: int | None = None,
    ) -> F | Callable[[F], F]:
        """Call ``listener``, or the decorated function, with messages of a topic.

        A topic has one listener for all its messages, or several with different tags; the group's subscription is
        their union. When a listener returns, its messages are consumed; an exception is a failure.

        Args:
            topic: The topic; it can be created later.
            listener: A function, or coroutine function, of a `DeliveredMessage`.
            tags: Tags separated by ``||``; None: all messages.
            sql: An SQL92 expression over properties.
            predicate: A function of the message, run before the listener in its thread; False counts the message as
                consumed, but in a batch that fails it can be retried with the others. A `WatchedPredicate` has its own
                budget and policies.
            batch: Pass a list of up to ``batch_size`` messages; the default if ``batch_size`` is more than one. Such a
                listener can return the index of the last consumed message.
            must_return: Nothing counts as consumed unless the listener returns True, or such an index.
            weight: Share of this listener's messages, 1 to 1,000, among those that begin while others wait in this
                consumer; None counts as 1. Beside listeners with tags, one without gets the rest of the topic if one of
                them has a weight.

        Raises:
            ConfigError: Both ``tags`` and ``sql`` are given, a message could match both this listener and another one,
                the listener is a generator or can't take its argument, or an orderly consumer gets a weight.
            FilterSyntaxError: The expression does not compile.
        """
        if batch is False and self.config.batch_size > 1:
            raise ConfigError(f"topic {topic!r}: batch=False passes single messages, so batch_size must be 1")
        check_weight(topic, weight, self.config.orderly)
        subscription, tag_filter = self._subscription(topic, tags, sql)
        as_list = self.config.batch_size > 1 if batch is None else batch
        options: _SubscriptionKeywords = {
            "tags": tags,
            "sql": sql,
            "predicate": predicate,
            "batch": batch,
            "must_return": must_return,
            "weight": weight,
        }

        def register(function: F) -> F:
            if not callable(function):
                raise ConfigError(f"topic {topic!r}: expected a function as listener, found {function!r:.80}")
            refuse_generator(function, f"topic {topic!r}: ")
            argument = "a list of messages" if as_list else "one message"
            check_arguments(f"topic {topic!r}: the listener", function, argument)
            called: Callable[..., Any] = function
            if predicate is not None:
                from librmq.consumer._predicates import TopicPredicate, with_predicate
                from librmq.filter import Policy

                judge = TopicPredicate(topic, predicate, self)
                if as_list and judge.watched.on_error is Policy.STOP:
                    raise ConfigError(
                        f"topic {topic!r}: predicate: on_error=STOP lets one message fail, so its listener takes "
                        "single messages: subscribe it with batch=False, or choose another policy"
                    )
                called = with_predicate(function, judge, as_list)
                self.predicates.append((topic, judge.watched))
            listener_tags = tag_filter.tags if tag_filter is not None else frozenset[str]()
            with self.runner.lock:
                is_async = is_coroutine_function(function)
                wrapped = Listener(called, as_list, must_return, is_async, weight, sql is not None)
                all_tags = self._listeners.register(topic, listener_tags, wrapped)
                if all_tags == listener_tags:
                    self._set_subscription(subscription, tag_filter)
                else:  # The subscription has the tags of the other listeners of the topic too.
                    self._set_subscription(*self._subscription(topic, " || ".join(sorted(all_tags)), None))
                self._subscribed.append((topic, function, options))
                self._line_up()
            return function

        return register if listener is None else register(listener)

    @override
    def hold_back(self) -> None:
        self.calls.may_begin = False

    @override
    def go_on(self, now_ms: int) -> None:
        self.calls.may_begin = not self._stopping
        self.delivery.go_on(now_ms)

    @property
    @override
    def in_work(self) -> int:
        return 0 if self.client.dead else self.calls.running

    def _line_up(self) -> None:
        """Let the messages that wait go to the present listeners; orderly ones find theirs when they begin."""
        if self._concurrent is not None:
            self._concurrent.line_up()

    def subscribe_like(self, other: PushConsumer) -> None:
        """Subscribe the listeners of another consumer."""
        for topic, function, options in other._subscribed:
            self.subscribe(topic, function, **options)

    def unsubscribe(self, topic: str) -> None:
        """Release the topic's queues."""
        with self.runner.lock:
            self.subscriptions.pop(topic, None)
            self._listeners.unregister(topic)
            self._subscribed = [entry for entry in self._subscribed if entry[0] != topic]
            self.predicates = [entry for entry in self.predicates if entry[0] != topic]
            self._filters.pop(topic, None)
            self._line_up()
            for assigned in self.assigned.values():
                # If the topic is subscribed again before the rebalance, its new filter leaves out what is held here.
                assigned.is_taken |= assigned.queue.topic == topic
            if self.is_running:
                self.client.beat()
                self._rebalancing.wake()

    # ---- life

    @override
    def _check_ready(self) -> None:
        if not self.subscriptions:
            raise ConfigError(f"group {self.group!r}: subscribe a listener to a topic before start() or the with block")

    @override
    def _join_group(self) -> None:
        if self._listeners.are_async:
            import asyncio  # slow to load, and unnecessary for other listeners

            try:
                self.calls.loop = asyncio.get_running_loop()
            except RuntimeError:
                self.calls.loop = None
        super()._join_group()
        if self._gauged is not None:
            show_gauges(self, self._gauged)

    @override
    def shutdown(self, timeout: float | timedelta | None = None) -> bool:
        """Stop pulling, wait up to ``timeout`` (None: as configured) for listeners, save progress and leave the group.

        Return whether all listeners have ended. The result of a listener that is still running is ignored, and its
        message is delivered again elsewhere. Coroutine listeners are cancelled then; threads can't be. A second
        shutdown does nothing. On the loop of coroutine listeners, call `shutdown_async` instead.
        """
        self._check_not_within()
        try:
            in_time = self._stop(timeout, self.delivery.stop)
        finally:
            if self._gauged is not None:
                self._gauged.remove_gauges(self)
            if self.traces is not None:
                self.traces.close()
        if not in_time:
            with self.runner.lock:
                running, cancelled = self.calls.running, self.calls.cancel()
            self._log.warning(
                "%(consumer)s: %(running)d listeners still run after the shutdown, and %(cancelled)d of them, "
                "coroutines, were cancelled",
                running=running,
                cancelled=cancelled,
            )
        return in_time

    @override
    def _check_not_within(self) -> None:
        super()._check_not_within()
        if self.calls.are_around_caller():
            raise ClientStateError(
                f"{self._life.what} can't shut down in its own listener, which it would wait for: set an event there, "
                "and let the code that started it shut it down; pause() only stops pulling"
            )

    @override
    def _release_locks(self) -> None:
        resets, self._resets = self._resets, []
        # A reset still waits for running listeners. Apply its offsets now, because progress that is saved at shutdown
        # must be the chosen one.
        for assigned, queue_offset in (entry for reset in resets for entry in reset):
            if self.assigned.get(assigned.queue) is assigned:
                assigned.choose(queue_offset)
                self._save((assigned,))
        if self.locks is not None:
            self.locks.release_all()

    def pause(self) -> None:
        """Stop pulling; pulled messages are still delivered."""
        self.is_paused = True

    def resume(self) -> None:
        """Pull again."""
        with self.runner.lock:
            self.is_paused = False
            self._fetcher.wake_all()
            if self.is_running:
                self._rebalancing.wake()

    # ---- queues

    @override
    def _lock(self, queue: MessageQueue) -> bool:
        return self.locks is None or self.locks.lock(queue)

    @override
    def _start_queue(self, assigned: AssignedQueue) -> None:
        self._fetcher.share_limits()
        if assigned.progress is not None:
            self._progressed(assigned, assigned.progress)
        if self.locks is not None:
            self.locks.note_taken(assigned)
        self._fetcher.start(assigned)

    @override
    def _changed(self, queues: Iterable[AssignedQueue]) -> list[AssignedQueue]:
        if self._concurrent is not None:
            self._concurrent.settle()
        return super()._changed(queues)

    @override
    def _may_store(self, assigned: AssignedQueue) -> bool:
        # While a reset waits, listeners of the queue's earlier messages end. Their progress must not be stored over the
        # chosen one.
        is_reset = any(queue is assigned for reset in self._resets for queue, _ in reset)
        return not is_reset and (self.locks is None or self.locks.may_store(assigned, self.runner.now_ms()))

    @override
    def _release_queue(self, assigned: AssignedQueue, now_ms: int) -> bool:
        super()._release_queue(assigned, now_ms)
        return self._orderly is None or self._orderly.release_queue(assigned, now_ms)

    def _reassign(self, assigned: AssignedQueue) -> None:
        """Release a queue whose progress was chosen; the next rebalance resumes there."""
        if self._release_queue(assigned, self.runner.now_ms()):
            self.assigned.pop(assigned.queue, None)
            self._note("release", queue=assigned.queue)

    @override
    def _reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Drop held messages, wait for running listeners, and continue from other offsets."""
        self.is_paused = True
        reset = [
            (assigned, offsets[assigned.queue]) for assigned in self.assigned.values() if assigned.queue in offsets
        ]
        # The latest reset decides: an earlier one that still waits must not set its offsets after it.
        for earlier in self._resets:
            earlier[:] = [entry for entry in earlier if entry[0].queue not in offsets]
        self._resets.append(reset)
        for assigned, _ in reset:
            assigned.released = True
            assigned.messages.drop_all()

        def resume_queues(now_ms: int) -> int | None:
            self._resets = [entry for entry in self._resets if entry is not reset]
            for assigned, queue_offset in reset:
                if self.assigned.get(assigned.queue) is assigned and not self._stopping:
                    assigned.choose(queue_offset)
                    self._reassign(assigned)
            if not self._resets:
                self.resume()
            return None

        step = Step(f"{self._label} reset {topic}", resume_queues, self.client)
        self.runner.wake(step, self.runner.now_ms() + RESET_MS)

    @override
    def _state(self) -> InstanceState:
        calls = self.calls
        return instance_state(self, listeners=calls.shown(), running=calls.running, is_paused=self.is_paused)

    @property
    @override
    def keeps_order(self) -> bool:
        """Whether its listeners get a queue's messages in order, each after the end of the one before."""
        return self.config.orderly and self.config.batch_size == 1

    @override
    def answer(self, request: Request[R], /) -> R:
        """Answer a broker's request; under the runner's lock."""
        if isinstance(request, ConsumeDirectly):
            return cast("R", consume_directly(self.calls, request))
        return super().answer(request)

    def blocked_queues(self) -> list[BlockedQueue]:
        """Return the orderly queues paused by a failing first message, with its number of failures."""
        with self.runner.lock:
            return [] if self._orderly is None else self._orderly.blocked()


def _note_last_attempts(before_last_attempt: Callable[[DeliveredMessage], object], operation: Operation) -> None:
    if operation.max_times is not None:
        for message in cast("Sequence[DeliveredMessage]", operation.messages):
            if message.reconsume_times >= operation.max_times:
                before_last_attempt(message)
