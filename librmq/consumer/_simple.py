"""Simple consumers: a received message is hidden for a time, and is delivered again unless it is acknowledged.

Mirrors ``SimpleConsumer`` of 5.x, which is similar to SQS. There is no rebalance: each instance of a group receives
from all queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, NoReturn, Self, TypeAlias, TypeVar, cast

from librmq.client import Client
from librmq.client.client import LifeCycle, Member, client_of
from librmq.clock import wait_async
from librmq.config import to_seconds, wrong_kind
from librmq.consumer._failures import Turn, Turns
from librmq.consumer._listeners import (
    DeliveredMessage,
    check_at_brokers,
    make_subscription,
)
from librmq.consumer._predicates import Predicate, TopicPredicate
from librmq.errors import (
    BrokerUnreachableError,
    ClientStateError,
    ConfigError,
    MessageIllegalError,
    NoRouteError,
    ReceiptError,
    RmqError,
)
from librmq.message import MessageQueue
from librmq.message.topics import check_receive_retry_topic, validate_group
from librmq.metrics import Metrics
from librmq.override import override
from librmq.protocol import (
    MAX_INVISIBLE_MS,
    MAX_RECEIVED,
    OF_GROUP,
    PERM_READ,
    Acknowledge,
    CancelReceive,
    ChangeInvisible,
    ConsumeFrom,
    ConsumerData,
    ConsumerOffsets,
    ConsumersChanged,
    DescribeGroups,
    Endpoint,
    ForwardToDeadLetters,
    MessageModel,
    Receive,
    Received,
    Request,
    ResetOffsets,
    ResponseCode,
    Route,
    SaveProgress,
    Subscription,
    Takes,
)
from librmq.runtime import Runner, StateLog, critical
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event, call_outside, check_reentry

R = TypeVar("R")
_Source: TypeAlias = tuple[Subscription, str]
"""What is received, and the broker's name."""
_WAIT_S: Final = 5.0
_INVISIBLE_S: Final = 60.0
_MOST_IN_WORK: Final = 20_000
_log = EventLog("librmq.consumer")


class ReceivedMessage(DeliveredMessage):
    """A message that a `SimpleConsumer` has received."""

    __slots__ = ("_topic", "attempt", "receipt", "visible_timestamp_ms")

    def __init__(self, received: Received, topic: str, broker_name: str) -> None:
        message = received.message
        queue = MessageQueue(received.stored_topic, broker_name, message.queue_id)
        super().__init__(message.raw, queue, message.queue_offset, (0, 0))
        self._topic = topic
        self.receipt: str = received.receipt
        """Identifies this delivery at the broker."""
        self.attempt: int = received.attempt
        """Number of this delivery, from 1."""
        self.visible_timestamp_ms: int = received.visible_timestamp_ms
        """Time of the next delivery unless it is acknowledged, in ms since 1970."""

    @property
    @override
    def topic(self) -> str:
        """The topic that the message was sent to, even for a redelivery."""
        return self._topic


_Asked: TypeAlias = tuple[list[ReceivedMessage], list[ReceivedMessage]]
"""What was received, and what is wanted of it."""


class _Wait:
    """The held receives of one call, which end with it."""

    def __init__(self, waits: set[_Wait], wake: Callable[[], None]) -> None:
        """Take those of the consumer, which have this one while it is entered."""
        self._waits = waits
        self.wake = wake
        """What the brokers call, by the ``notify`` of each receive."""
        self.acknowledged: tuple[str, ...] = ()
        """Receipts of messages that each receive acknowledges."""
        self.held: list[tuple[Endpoint, Callable[[], None]]] = []

    def __enter__(self) -> Self:
        self._waits.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._waits.discard(self)
        self.cancel()

    def cancel(self) -> None:
        while self.held:
            endpoint, notify = self.held.pop()
            with suppress(BrokerUnreachableError):
                endpoint.call(CancelReceive(notify))


class _SuspectToReceive:
    """A message that waits at the broker for a receive that takes suspects; see `librmq.consumer._failures`."""

    def __init__(self, consumer: SimpleConsumer, deaths: int) -> None:
        self.deaths = deaths
        self.takes: Takes = Takes.NO_SUSPECT
        self.is_taken = False
        self.message: ReceivedMessage | None = None
        self.turn = Turn(self, self._begin)
        self._consumer = consumer

    def _begin(self, turn: Turn, now_ms: int) -> bool:
        consumer = self._consumer
        if consumer._suspect is not self or not consumer._life.is_running:
            return False
        self.takes = self.takes or Takes.BESIDE_OTHERS
        consumer._wake_all()
        return True

    def runs_alone(self, is_alone: bool) -> None:
        consumer = self._consumer
        if is_alone:
            self.takes = Takes.ALONE
        elif consumer._suspect is self:
            if self.message is None:  # no receive has come within its turn: the next one gets it
                self.takes = Takes.BESIDE_OTHERS
            else:
                consumer._suspect = None
                consumer._goes_on_in_company(self.message)


class SimpleConsumer(Member):
    """A consumer that receives messages and acknowledges each, as an instance of a group. Thread-safe.

    Receive, handle, acknowledge:

        with SimpleConsumer(broker, "mailer") as consumer:
            consumer.subscribe("orders", tags="paid")
            for message in consumer.receive(16, invisible=30):
                send_mail(message.body)
                consumer.ack(message)
    """

    def __init__(
        self,
        route: Route,
        group: str,
        *,
        client: Client | None = None,
        instance_name: str | None = None,
        metrics: Metrics | None = None,
        on_damage: float | timedelta | None = 60.0,
        max_process_deaths: int | None = None,
    ) -> None:
        """It joins its group at `start` or in a ``with`` block.

        Args:
            route: A `Broker`, or several in a `RouteTable`.
            group: The consumer group. It must have no push or pull consumers: both move one progress.
            client: The identity; by default a new one.
            instance_name: Keeps the client's id the same from run to run.
            metrics: Counts the answers of predicates.
            on_damage: Seconds that a queue waits at a message whose record is damaged, before that becomes a dead
                letter with the damage as its cause; None: receives raise `BrokerDamageError` until it is repaired.
                Over `librmq.connect` that is the broker's: ``librmq serve`` waits 60 s, RocketMQ's compares nothing.
            max_process_deaths: Ends of the process, by a crash or a kill while it has received a message alone, before
                that becomes a dead letter; 0: none makes it one. None: the group's setting, 3.

        Raises:
            ConfigError: Both ``client`` and ``instance_name`` are given, or the client belongs to another route.
            TypeError: ``route`` is not a route.
        """
        validate_group(group)
        self.client: Client = client_of(route, type(self).__name__, client, instance_name)
        self.group = group
        self.route = route
        self.runner: Runner = route.runner
        self.subscriptions: dict[str, Subscription] = {}
        """By topic."""
        self._life = LifeCycle(f"simple consumer of group {group!r}")
        self._states = StateLog(_log.with_fields(group=group), group)
        self.metrics = metrics
        self._watch_by(metrics=metrics)
        self._damage_ms = -1 if on_damage is None else round(1000 * to_seconds("on_damage", on_damage))
        if max_process_deaths is not None and (
            type(max_process_deaths) is not int or not 0 <= max_process_deaths <= 100
        ):
            raise ConfigError(
                f"max_process_deaths: expected a whole number from 0 to 100, found {max_process_deaths!r:.80}"
            )
        self._max_process_deaths = OF_GROUP if max_process_deaths is None else max_process_deaths
        self._turns: Turns = Turns.of(self.runner)
        self._suspect: _SuspectToReceive | None = None
        self._asking: set[_Wait] = set()
        self._is_held_back = False
        self._in_work: dict[str, int] = {}  # the times of the next deliveries of what it has received, by receipt
        self._predicates: dict[str, TopicPredicate[ReceivedMessage]] = {}
        self._waits: set[_Wait] = set()
        self._notices: dict[str, _Wait] = {}  # of `receive_or_notify`, by topic
        self._turn = 0
        self._kept: list[ReceivedMessage] = []  # of cancelled receives, for the next ones

    # ---- life

    def subscribe(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        predicate: Predicate[ReceivedMessage] | None = None,
    ) -> None:
        """Subscribe to a topic by ``tags`` separated by ``||`` (None: all), or by an SQL92 expression.

        Receives acknowledge messages for which ``predicate``, a function or a `WatchedPredicate`, is false, and do not
        return them. Where it raises and its policy is STOP, the message is neither returned nor acknowledged. A second
        subscription of a topic replaces the first.

        Raises:
            BrokerError: A broker does not serve the SQL subscription.
            ConfigError: Both ``tags`` and ``sql`` are given, or one is not a string.
            FilterSyntaxError: The expression does not compile.
            MessageIllegalError: The name of the topic is invalid, or too long for a retry topic of this group.
        """
        subscription, _ = make_subscription(topic, tags, sql, self.runner.now_ms())
        judge: TopicPredicate[ReceivedMessage] | None = None
        if predicate is not None:
            judge = TopicPredicate(topic, predicate, self)
        self._check_retry_topic(topic)
        check_at_brokers(self.client, self.group, subscription)
        with self.runner.lock:
            self.subscriptions[topic] = subscription
            self._predicates.pop(topic, None)
            if judge is not None:
                self._predicates[topic] = judge
            if self._life.is_running:
                self.client.beat()
                self._wake_all()

    def unsubscribe(self, topic: str) -> None:
        """Receive no longer from a topic, whose messages in flight can still be acknowledged.

        A second call does nothing.
        """
        with self.runner.lock:
            self._end_notice(topic)
            self._predicates.pop(topic, None)
            if self.subscriptions.pop(topic, None) is not None and self._life.is_running:
                self.client.beat()
                self._wake_all()

    def _check_retry_topic(self, topic: str) -> None:
        """Refuse names that are too long for a retry topic, unless the group is ordered at each broker."""
        try:
            check_receive_retry_topic(self.group, topic)
        except MessageIllegalError:
            for name in self.route.broker_names():
                with suppress(BrokerUnreachableError, NoRouteError):
                    settings = self.client.route.endpoint(name).call(DescribeGroups()).get(self.group)
                    if settings is None or not settings.is_ordered:
                        raise

    @override
    def start(self) -> Self:
        """Join the group.

        Raises:
            BrokerUnreachableError: The route is a single broker, which is closed.
            ClientStateError: The consumer was started before.
        """
        with self.runner.lock, critical:  # no shutdown would complete a part of it
            self._life.start(lambda: self.client.join(self))
            self._turns.join(self)
        return self

    @override
    def shutdown(self) -> None:
        """Leave the group; waiting receives return nothing. Messages in flight are delivered again in time.

        A second call does nothing.
        """
        check_reentry()
        with self.runner.lock, critical:  # nor would a second call
            if self._life.shut_down():
                self._wake_all()
                for topic in list(self._notices):
                    self._end_notice(topic)
                self._in_work.clear()
                self._end_work()
                self._turns.leave(self)
                self.client.leave(self)

    async def shutdown_async(self) -> None:
        """Shut down without blocking the event loop."""
        await self.runner.offload(self.shutdown)

    @override
    def __repr__(self) -> str:
        topics = ", ".join(self.subscriptions) or "none"
        return f"<SimpleConsumer {self.group}, {self._life.state.value}, topics: {topics}>"

    @property
    def config(self) -> NoReturn:
        """No settings: the arguments of `receive` count for each call."""
        raise AttributeError(f"{self._life.what} has no settings: receive takes them for each call")

    @config.setter
    def config(self, config: object) -> None:
        raise ConfigError(f"{self._life.what} has no settings: receive takes them for each call, found {config!r:.80}")

    # ---- receiving

    def receive(
        self,
        max_messages: int = MAX_RECEIVED,
        *,
        invisible: float | timedelta = _INVISIBLE_S,
        wait: float | timedelta = _WAIT_S,
    ) -> list[ReceivedMessage]:
        """Return up to ``max_messages`` messages, each hidden from the group for a time.

        Acknowledge each message within that time, or `extend` it; otherwise it is delivered again, with ``attempt`` one
        higher. After the group's retries it becomes a dead letter.

        Args:
            max_messages: At most this many, 1 to 32.
            invisible: Seconds for which the messages are hidden, up to 12 hours.
            wait: Seconds to wait if there is no message. With a manual clock the call returns immediately.

        Raises:
            BrokerError: The broker refuses the request.
            ClientStateError: The consumer is not running, or has no subscription.
        """
        if not self.watchers:
            return self._receive(max_messages, invisible, wait)
        with self._receiving() as receive:
            return receive.returns(self._receive(max_messages, invisible, wait))

    def _receive(
        self, max_messages: int, invisible: float | timedelta, wait: float | timedelta
    ) -> list[ReceivedMessage]:
        invisible_ms, seconds = self._check_receive("receive", invisible, wait)
        clock, arrived = self.runner.clock, Event()
        deadline = clock.monotonic() + seconds
        with _Wait(self._waits, arrived.set) as waits:
            while True:
                arrived.clear()
                received = self._receive_once(waits, max_messages, invisible_ms)
                messages = self._wanted(received)
                remaining = deadline - clock.monotonic()
                if messages or not self._life.is_running or remaining <= 0:
                    return messages
                if not received and not clock.wait(arrived, remaining):
                    return []

    async def receive_async(
        self,
        max_messages: int = MAX_RECEIVED,
        *,
        invisible: float | timedelta = _INVISIBLE_S,
        wait: float | timedelta = _WAIT_S,
    ) -> list[ReceivedMessage]:
        """Receive while other coroutines of the event loop run.

        What a broker answers to a receive that was cancelled is returned by the next call.
        """
        with self._receiving() as receive:
            invisible_ms, seconds = self._check_receive("receive_async", invisible, wait)
            clock, arrived, loop = self.runner.clock, asyncio.Event(), asyncio.get_running_loop()
            deadline = clock.monotonic() + seconds

            def wake() -> None:
                with suppress(RuntimeError):  # The loop was closed, with its waiting coroutines.
                    loop.call_soon_threadsafe(arrived.set)

            with _Wait(self._waits, wake) as waits:
                while True:
                    arrived.clear()
                    received, messages = await self._ask_async(waits, max_messages, invisible_ms)
                    remaining = deadline - clock.monotonic()
                    if messages or not self._life.is_running or remaining <= 0:
                        return receive.returns(messages)
                    if not received and not await wait_async(clock, arrived, remaining):
                        return receive.returns([])

    async def _ask_async(self, waits: _Wait, max_messages: int, invisible_ms: int) -> _Asked:
        """Ask once, like `receive`; a thread waits for the answers of brokers that are elsewhere."""
        answer: list[ReceivedMessage] = []
        is_given_up = False

        def keep() -> None:
            if answer:
                self._kept += answer
                self._wake_all()

        def ask() -> _Asked:
            received = self._receive_once(waits, max_messages, invisible_ms)
            messages = self._wanted(received)
            with self.runner.lock:
                answer[:] = messages
                if is_given_up:
                    keep()
            if is_given_up:
                waits.cancel()
            return received, messages

        if not self.route.is_remote:
            return ask()
        try:
            return await self.runner.offload(ask)
        except BaseException:  # The thread can go on, and outlive the event loop.
            with self.runner.lock:
                is_given_up = True
                keep()
            raise

    def receive_or_notify(
        self,
        topic: str,
        max_messages: int,
        notify: Callable[[], object],
        *,
        invisible: float | timedelta = _INVISIBLE_S,
        acknowledge: Sequence[ReceivedMessage] = (),
    ) -> list[ReceivedMessage]:
        """Return messages of one topic; without any, let ``notify`` be called once as soon as there may be some.

        For event loops of their own: ``notify`` runs in any thread, and must only wake the loop. The next call for the
        topic, `unsubscribe` and `shutdown` end the wait. ``acknowledge`` are processed messages: those of the topic are
        acknowledged by the same request, others as by `ack_one_way`; after an error, acknowledge them again. Those that
        are too late are not refused: a warning in the log names the first.

        Raises:
            BrokerError: The broker refuses the request.
            ClientStateError: The consumer is not running, or has no subscription of the topic.
            NoRouteError: There is no such topic.
        """
        with self._receiving(topic) as receive:
            return receive.returns(self._receive_or_notify(topic, max_messages, notify, invisible, acknowledge))

    def _receive_or_notify(
        self,
        topic: str,
        max_messages: int,
        notify: Callable[[], object],
        invisible: float | timedelta,
        done: Sequence[ReceivedMessage],
    ) -> list[ReceivedMessage]:
        invisible_ms, _ = self._check_receive("receive_or_notify", invisible, 0)
        subscription = self.subscriptions.get(topic)
        if subscription is None:
            raise ClientStateError(f"{self._life.what} has no subscription of {topic}: call subscribe(topic) first")
        self._end_notice(topic)
        only, now_ms = (topic, *self.route.broker_names()), self.runner.now_ms()
        if (
            self.watchers
            or self._is_held_back
            or any(
                (message.topic, message.broker_name) != only or message.visible_timestamp_ms <= now_ms
                for message in done
            )
        ):
            try:
                self.ack_one_way(*done)
            except ReceiptError as error:  # An error would end a caller's loop, and another call could change nothing.
                _log.warning("group %(group)s: %(error)s", group=self.group, error=error)
            done = ()

        def arrived() -> None:
            if waits in self._waits:
                self._waits.discard(waits)
                call_outside(notify)

        waits = self._notices[topic] = _Wait(self._waits, arrived)
        waits.acknowledged = tuple([message.receipt for message in done])
        self._end_work(*waits.acknowledged)
        self._waits.add(waits)
        while self._notices.get(topic) is waits:
            sources = self._sources(subscription)
            if not sources:
                self._end_notice(topic)
                raise NoRouteError(f"topic {topic!r} has no queue to read: create it first, or unsubscribe")
            received = self._receive_from(sources, waits, max_messages, invisible_ms)
            messages = self._wanted(received)
            if messages or not received:
                if messages:
                    self._end_notice(topic)
                return messages
            waits.cancel()
        return []

    def _end_notice(self, topic: str) -> None:
        waits = self._notices.pop(topic, None)
        if waits is not None:
            self._waits.discard(waits)
            waits.cancel()

    def _check_receive(self, call: str, invisible: float | timedelta, wait: float | timedelta) -> tuple[int, float]:
        self._life.check_running(call)
        if not self.subscriptions:
            raise ClientStateError(f"{self._life.what} has no subscription: call subscribe(topic) first")
        invisible_s = to_seconds("invisible", invisible, 0.001, MAX_INVISIBLE_MS / 1000)
        return round(1000 * invisible_s), to_seconds("wait", wait)

    def _receive_once(self, waits: _Wait, max_messages: int, invisible_ms: int) -> list[ReceivedMessage]:
        """Ask the brokers of each topic until one has messages, starting with another broker each time."""
        waits.cancel()
        if self._kept:
            with self.runner.lock:
                now_ms, topics = self.runner.now_ms(), self.subscriptions
                messages = [item for item in self._kept if item.visible_timestamp_ms > now_ms and item.topic in topics]
                messages, self._kept = messages[:max_messages], messages[max_messages:]
            if messages:
                return messages
        sources = [
            source for subscription in list(self.subscriptions.values()) for source in self._sources(subscription)
        ]
        return self._receive_from(sources, waits, max_messages, invisible_ms)

    def _sources(self, subscription: Subscription) -> list[_Source]:
        return [
            (subscription, data.broker_name)
            for data in self.route.topic_route(subscription.topic)
            if data.permission & PERM_READ and data.read_queues
        ]

    def _receive_from(
        self, sources: list[_Source], waits: _Wait, max_messages: int, invisible_ms: int
    ) -> list[ReceivedMessage]:
        self._turn += 1
        suspect, takes = self._suspect, Takes.NO_SUSPECT
        if suspect is not None:
            with self.runner.lock:  # One thread takes it: two would each have a suspect, and neither alone.
                if suspect is self._suspect and not suspect.is_taken:
                    if suspect.takes is Takes.BESIDE_OTHERS:
                        self._turns.begin_now(suspect.turn)
                    takes, suspect.is_taken = suspect.takes, bool(suspect.takes)
        try:
            self._asking.add(waits)  # before the look whether it may, because a turn holds back, and looks at this then
            if self._is_held_back and not takes:
                for subscription, name in sources[:1] if waits.acknowledged else ():
                    acknowledged = Acknowledge(self.group, subscription.topic, waits.acknowledged, is_one_way=True)
                    self.client.route.endpoint(name).call(acknowledged)
                return []
            return self._ask(sources, waits, max_messages, invisible_ms, takes, suspect if takes else None)
        except BaseException:
            if takes and suspect is not None:
                suspect.is_taken = False
            raise
        finally:
            self._asking.discard(waits)
            if self._is_held_back:
                with self.runner.lock:
                    self._turns.look()

    def _ask(
        self,
        sources: list[_Source],
        waits: _Wait,
        max_messages: int,
        invisible_ms: int,
        takes: Takes,
        suspect: _SuspectToReceive | None,
    ) -> list[ReceivedMessage]:
        for number in range(len(sources)):
            subscription, name = sources[(self._turn + number) % len(sources)]
            # The function is one for this receive alone, because the broker knows by it which one is cancelled.
            notify: Callable[[], None] = partial(waits.wake)
            topic, client_id = subscription.topic, self.client.client_id
            try:
                endpoint = self.client.route.endpoint(name)
                request = Receive(
                    *(client_id, self.group, topic, 1 if takes else max_messages, invisible_ms, subscription),
                    notify=notify,
                    acknowledged=waits.acknowledged,
                    damage_ms=self._damage_ms,
                    max_process_deaths=self._max_process_deaths if endpoint.has_page else None,
                    takes=takes,
                )
                response = endpoint.call(request)
            except (BrokerUnreachableError, NoRouteError) as error:
                if len(sources) == 1:
                    raise
                self._states.failing(f"receiving from {name}", error)
                continue
            if self._states.causes:
                self._states.works(f"receiving from {name}")
            if response.is_held:
                waits.held.append((endpoint, notify))
            if response.suspect_deaths:
                with self.runner.lock:
                    if self._suspect is None:
                        self._suspect = _SuspectToReceive(self, response.suspect_deaths)
                        self._turns.ask(self._suspect.turn)
            if response.messages:
                received = [ReceivedMessage(message, topic, name) for message in response.messages]
                self._note_received(received, suspect)
                return received
        if suspect is not None:  # another process has received it
            with self.runner.lock:
                if self._suspect is suspect:
                    self._suspect = None
                    self._turns.ended(suspect.turn)
        return []

    # ---- suspects

    def _note_received(self, received: list[ReceivedMessage], suspect: _SuspectToReceive | None) -> None:
        in_work = self._in_work
        if len(in_work) > _MOST_IN_WORK:
            now_ms = self.runner.now_ms()
            self._in_work = in_work = {receipt: at_ms for receipt, at_ms in in_work.items() if at_ms > now_ms}
        for message in received:
            in_work[message.receipt] = message.visible_timestamp_ms
        if suspect is not None:
            with self.runner.lock:
                suspect.message = received[0]
                if suspect.takes is not Takes.ALONE and self._suspect is suspect:
                    self._suspect = None

    def _end_work(self, *receipts: str) -> None:
        """Note that messages are processed; end the turn of a suspect among them."""
        for receipt in receipts:
            self._in_work.pop(receipt, None)
        if self._suspect is not None or self._is_held_back:
            with self.runner.lock:
                suspect = self._suspect
                if suspect is not None and (
                    not self._life.is_running or (suspect.message and suspect.message.receipt not in self._in_work)
                ):
                    self._suspect = suspect.message = None
                    self._turns.ended(suspect.turn)
                self._turns.look()

    def _goes_on_in_company(self, message: ReceivedMessage) -> None:
        left_ms = message.visible_timestamp_ms - self.runner.now_ms()
        if left_ms > 0 and self._life.is_running and not self.client.dead:
            with suppress(RmqError):  # Then an end of the process counts although others were in work.
                self._change(message, left_ms / 1000, keeps_receipt=True)

    @property
    def in_work(self) -> int:
        """The number of messages that it has received, and not acknowledged, and of receives under way."""
        now_ms = self.runner.now_ms()
        in_work = sum(at_ms > now_ms for at_ms in list(self._in_work.values()))
        return 0 if self.client.dead else in_work + len(self._asking)

    def hold_back(self) -> None:
        """Receive no message while a suspect has its turn."""
        self._is_held_back = True

    def go_on(self, now_ms: int) -> None:
        """Receive messages again."""
        self._is_held_back = False
        self._wake_all()

    def leave_marks(self) -> None:
        """Leave the group in order, so that what it has received is not suspect."""
        if not self.runner.is_inherited:
            with suppress(RmqError):
                self.client.leave(self)

    def _wanted(self, received: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Return the messages for which their topic's predicate is true, and acknowledge those for which it is not."""
        if not self._predicates:
            return received
        matching: list[ReceivedMessage] = []
        unwanted: list[ReceivedMessage] = []
        for message in received:
            predicate = self._predicates.get(message.topic)
            try:
                is_wanted = predicate is None or predicate.matches(message)
            except Exception:  # Its policy is to stop, so the message comes again after its invisible time.
                continue
            (matching if is_wanted else unwanted).append(message)
        if unwanted:
            with suppress(RmqError):  # Messages that are not acknowledged come again, and are judged again.
                self.ack(*unwanted)
        return matching

    # ---- outcomes of a message

    def ack(self, *messages: ReceivedMessage, durable: bool = False) -> None:
        """Acknowledge processed messages; a kill of the process does not undo it.

        With ``durable`` a loss of power does not undo it either: the call returns when the device has it.

        Raises:
            ReceiptError: A message is no longer in flight: its time is over, or, after a renewal, it was acknowledged
                before. The others are acknowledged.
        """
        try:
            self._acknowledge(messages, is_one_way=False)
        finally:
            for name in {message.broker_name for message in messages} if durable else ():
                self.client.route.endpoint(name).call(SaveProgress(self.group))

    def ack_one_way(self, *messages: ReceivedMessage) -> None:
        """Acknowledge processed messages without waiting for a remote broker's answer.

        What was written to the connection arrives also if this process is killed. If the broker is killed before it has
        read it, the messages are delivered again.

        Raises:
            ReceiptError: The invisible time of a message is over. The others are acknowledged.
        """
        self._acknowledge(messages, is_one_way=True)

    def _acknowledge(self, messages: tuple[ReceivedMessage, ...], *, is_one_way: bool) -> None:
        by_source: dict[tuple[str, str], list[ReceivedMessage]] = {}
        for message in messages:
            if not isinstance(message, ReceivedMessage):
                raise wrong_kind("ack", message, "received messages, as in ack(first, second) or ack(*messages)")
            by_source.setdefault((message.broker_name, message.topic), []).append(message)
        failed: list[ReceivedMessage] = []
        for (_, topic), batch in by_source.items():
            request = Acknowledge(self.group, topic, tuple([message.receipt for message in batch]), is_one_way)
            answers = self._settle("ack", batch, request)
            self._end_work(*request.receipts)
            now_ms = self.runner.now_ms() if is_one_way else 0
            failed += [
                message
                for message, is_acknowledged in zip(batch, answers, strict=True)
                if not is_acknowledged or message.visible_timestamp_ms <= now_ms
            ]
        if failed:
            raise ReceiptError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{len(failed)} of {len(messages)} messages are no longer in flight, first {failed[0].message_id} of "
                f"topic {failed[0].topic!r}: they were acknowledged before, or their invisible time is over and they "
                "are delivered again. Acknowledge each once, and receive with a longer invisible time, or extend it",
            )

    def _settle(self, kind: Literal["ack", "dead_letter"], messages: list[ReceivedMessage], request: Request[R]) -> R:
        first = messages[0]
        if not self.watchers:
            return self.client.route.endpoint(first.broker_name).call(request)
        fields = {"broker_name": first.broker_name, "is_batch": len(messages) > 1}
        with self._watched(kind, first.topic, messages, **fields) as outcome:
            return outcome.returns(self.client.route.endpoint(first.broker_name).call(request))

    async def ack_async(self, *messages: ReceivedMessage, durable: bool = False) -> None:
        """Acknowledge like `ack` without blocking the event loop."""
        await self.runner.offload(lambda: self.ack(*messages, durable=durable))

    def extend(self, message: ReceivedMessage, invisible: float | timedelta) -> None:
        """Hide a message for ``invisible`` seconds from now; 0 delivers it again immediately.

        Raises:
            ReceiptError: The message was already delivered again, or acknowledged.
        """
        self._change(message, invisible, keeps_receipt=False)

    def _change(self, message: ReceivedMessage, invisible: float | timedelta, *, keeps_receipt: bool) -> None:
        invisible_ms = round(1000 * to_seconds("invisible", invisible, 0, MAX_INVISIBLE_MS / 1000))
        request = ChangeInvisible(self.group, message.topic, message.receipt, invisible_ms, keeps_receipt)
        receipt = message.receipt
        message.receipt = self.client.route.endpoint(message.broker_name).call(request)
        message.visible_timestamp_ms = self.runner.now_ms() + invisible_ms
        if invisible_ms:
            self._in_work[message.receipt] = message.visible_timestamp_ms
        if not invisible_ms or message.receipt != receipt:
            self._end_work(receipt)

    def renew(self, message: ReceivedMessage, invisible: float | timedelta) -> None:
        """Hide a message for ``invisible`` seconds from now, while another thread may acknowledge it.

        Its receipt stays valid, unlike that of `extend`, except at a broker of RocketMQ 5, which gives a new one.

        Raises:
            ReceiptError: The message was already delivered again, or acknowledged.
        """
        self._change(message, invisible, keeps_receipt=True)

    async def extend_async(self, message: ReceivedMessage, invisible: float | timedelta) -> None:
        """Hide a message like `extend` without blocking the event loop."""
        await self.runner.offload(lambda: self.extend(message, invisible))

    def dead_letter(self, message: ReceivedMessage, cause: str = "") -> None:
        """Make a message a dead letter of the group, with an optional ``cause``.

        Raises:
            ReceiptError: The message was already delivered again, or acknowledged.
        """
        request = ForwardToDeadLetters(self.group, message.topic, message.receipt, cause)
        receipt = message.receipt
        self._settle("dead_letter", [message], request)
        self._end_work(receipt)

    # ---- what brokers ask

    @override
    def consumer_data(self) -> ConsumerData:
        """Return the description of this instance for heartbeats."""
        subscriptions = dict(self.subscriptions)
        return ConsumerData(self.group, "simple", MessageModel.CLUSTERING, ConsumeFrom.LAST, subscriptions)

    @override
    def answer(self, request: Request[R], /) -> R:
        """Answer a broker's request; under the runner's lock."""
        result: Any = None
        if isinstance(request, ConsumersChanged | ResetOffsets):
            self._wake_all()
        elif isinstance(request, ConsumerOffsets):
            result = {}
        elif isinstance(request, SaveProgress):  # The broker has the progress, so there is nothing to save here.
            pass
        else:
            raise ClientStateError(f"{self._life.what} answers no {type(request).__name__}")
        return cast(R, result)

    def _wake_all(self) -> None:
        for waits in list(self._waits):
            waits.wake()
