"""Pull consumers, for applications that drive the loop. Mirrors ``DefaultLitePullConsumer``.

They pull nothing ahead: a poll asks the queues in turn, and waits at the brokers if none has a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final, Never, Unpack

from librmq.client import Client
from librmq.clock import wait_async
from librmq.config import to_seconds, to_timestamp_ms
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._failures import Rests, Turn, conviction, later_retries
from librmq.consumer._listeners import DeliveredMessage, delivered_messages
from librmq.consumer._predicates import Predicate, TopicPredicate
from librmq.consumer.base import Consumer
from librmq.consumer.config import PullConsumerConfig, PullConsumerKeywords
from librmq.errors import BrokerDamageError, BrokerError, ClientStateError, ConfigError, RmqError
from librmq.listener import DownstreamDown
from librmq.message import MessageQueue, StoredRecords
from librmq.metrics import Metrics
from librmq.override import override
from librmq.protocol import (
    MaxOffset,
    MinOffset,
    PullMessage,
    PullResponse,
    PullStatus,
    QueueOffsetAt,
    Route,
    Subscription,
    Suspect,
)
from librmq.runtime.locks import Event, Inherited, Lock

LOCK_PAUSE_S: Final = 0.0001
"""Seconds between two rounds of a poll, during which other threads can take the lock."""


class _Arrival(Event):
    """Event that wakes a poll in a thread or in an event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @override
    def set(self) -> None:
        super().set()
        if self.awaited is not None:
            loop, event = self.awaited
            with suppress(RuntimeError):  # The loop was closed, with its waiting coroutines.
                loop.call_soon_threadsafe(event.set)

    def is_awaited_here(self) -> bool:
        awaited = self.awaited
        if awaited is None:
            return False
        try:
            return awaited[0] is asyncio.get_running_loop()
        except RuntimeError:
            return False


class PullConsumer(Consumer[PullConsumerConfig]):
    """A consumer that polls. Thread-safe, but only one thread or coroutine can poll at a time.

    Either call `subscribe`, which divides the queues among the group's instances, or `assign` queues. A message counts
    as consumed at the next poll or `commit` after its poll.
    """

    kind = "pull"

    def __init__(
        self,
        route: Route,
        group: str,
        *,
        client: Client | None = None,
        instance_name: str | None = None,
        config: PullConsumerConfig | None = None,
        metrics: Metrics | None = None,
        **settings: Unpack[PullConsumerKeywords],
    ) -> None:
        """It joins its group at `start` or in a ``with`` block.

        Args:
            route: A `Broker`, or several in a `RouteTable`.
            group: The consumer group.
            client: The identity; by default one of its own.
            instance_name: Makes the client's id the same from run to run.
            config: Settings.
            metrics: Counts rebalances and the answers of predicates.
            **settings: Single settings of `PullConsumerConfig`, in place of those in ``config``.

        Raises:
            ConfigError: There is no such setting, or its value is refused.
            TypeError: ``route`` is not a route.
        """
        super().__init__(route, group, PullConsumerConfig.of(config, settings), client, instance_name)
        self.metrics = metrics
        self._watch_by(metrics=metrics)
        self._predicates: dict[str, TopicPredicate[DeliveredMessage]] = {}
        self._assigned: tuple[MessageQueue, ...] | None = None
        self._paused: set[MessageQueue] = set()
        self._turn = 0
        self._pulled_end = 0  # the offset after the messages that are being handed out
        self._last: tuple[AssignedQueue, int, int] | None = None  # its queue, its first offset, and the next one
        self._arrived = _Arrival()
        self._polling = Lock()
        self._looks_once = False
        """Whether the present poll waits for nothing."""
        self._rests: Rests[Never] = Rests(self, self._end_rest)
        self._retries = later_retries(self)
        self._in_work = 0
        self._is_held_back = False
        self._turn_of: tuple[AssignedQueue, int, Turn] | None = None
        """The suspect that waits for its turn, or has it: its queue and queue offset."""
        self._has_turn = False
        _consumers.add(self)

    def configure(self, **settings: Unpack[PullConsumerKeywords]) -> None:
        """Change settings while the consumer runs; the next poll uses them.

        Raises:
            ConfigError: There is no such setting, its value is refused, it is for listeners, or it can't change after
                the consumer was made. Then nothing has changed.
        """
        with self.runner.lock:
            self._change_settings(self.config.with_settings(settings))

    # ---- which queues

    def subscribe(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        predicate: Predicate[DeliveredMessage] | None = None,
    ) -> None:
        """Subscribe to a topic by ``tags`` separated by ``||`` (None: all), or by an SQL92 expression.

        Polls pass over messages for which ``predicate``, a function or a `WatchedPredicate`, is false.
        """
        if self._assigned is not None:
            raise ClientStateError(
                f"{self._life.what} has queues assigned: subscribe and assign exclude each other; make another consumer"
            )
        subscription, tag_filter = self._subscription(topic, tags, sql)
        with self.runner.lock:
            before = self.subscriptions.get(topic)
        if before is not None and before.expression != subscription.expression:
            raise ConfigError(
                f"topic {topic!r} is subscribed already, with {before.expression!r}: give all its tags at once, "
                "as tags='a || b'"
            )
        judges = {} if predicate is None else {topic: TopicPredicate(topic, predicate, self)}
        self._set_subscription(subscription, tag_filter)
        self._predicates = {name: judge for name, judge in self._predicates.items() if name != topic} | judges
        with self.runner.lock:
            if self.is_running:
                self._rebalancing.run_due(self.runner.now_ms())

    def assign(
        self,
        queues: Iterable[MessageQueue],
        *,
        tags: str | None = None,
        sql: str | None = None,
        predicate: Predicate[DeliveredMessage] | None = None,
    ) -> None:
        """Read exactly these queues, even if other instances read them; this replaces the queues assigned before.

        Filters as in `subscribe`.
        """
        if self._assigned is None and self.subscriptions:
            raise ClientStateError(
                f"{self._life.what} has subscribed: subscribe and assign exclude each other; make another consumer"
            )
        unique_queues = tuple(dict.fromkeys(_check_queues(queues)))
        topics = list(dict.fromkeys(queue.topic for queue in unique_queues))
        judges = {} if predicate is None else {topic: TopicPredicate(topic, predicate, self) for topic in topics}
        self._assigned, self._shares_queues = unique_queues, False
        for topic in topics:
            self._set_subscription(*self._subscription(topic, tags, sql))
        self._predicates = judges
        with self.runner.lock:
            if self.is_running:
                self._take_assigned()

    def _take_assigned(self) -> None:
        queues = self._assigned or ()
        for queue in [queue for queue in self.assigned if queue not in queues]:
            assigned = self.assigned.pop(queue)
            assigned.released = True
            self._note("release", queue=queue)
            self._release_queue(assigned, self.runner.now_ms())
        for queue in queues:
            if queue not in self.assigned:
                stored = self._offsets.read(queue)
                next_offset = self._rebalancing.start_offset(queue) if stored is None else stored
                assigned = self.assigned[queue] = self._make_assigned(queue, next_offset, stored)
                self._note_take(queue, next_offset, stored)
                self._start_queue(assigned)
        self._rebalancing.report_start()

    @property
    def assignment(self) -> tuple[MessageQueue, ...]:
        """Return the queues that are read now, sorted."""
        with self.runner.lock:
            return tuple(sorted(queue for queue, assigned in self.assigned.items() if not assigned.released))

    # ---- life

    @override
    def _join_group(self) -> None:
        super()._join_group()
        if self._assigned is not None:
            self._take_assigned()
        else:
            self._rebalancing.run_due(self.runner.now_ms())  # now, so that the first poll has queues

    @override
    def shutdown(self, timeout: float | timedelta | None = None) -> bool:
        """Commit as configured, save, and leave the group. A second call does nothing.

        The messages of the last poll count as consumed, unless an exception leaves a ``with`` block of this consumer.
        """
        return self._shut_down(timeout, self.config.auto_commit)

    @override
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._shut_down(None, self.config.auto_commit and kind is None)

    def _shut_down(self, timeout: float | timedelta | None, commits: bool) -> bool:
        def begin() -> None:
            if commits:
                self._commit_polled()
            else:
                self._note("settle", result="retry")
            self._end_work()
            self._arrived.set()

        self._check_not_within()
        return self._stop(timeout, begin)

    # ---- queues as the rebalance gives them

    @override
    def _start_queue(self, assigned: AssignedQueue) -> None:
        assigned.notify = self._arrived.set
        if assigned.progress is not None:
            self._progressed(assigned, assigned.progress)
        self._arrived.set()

    @override
    def _routes_changed(self) -> None:
        self._arrived.set()
        super()._routes_changed()

    @override
    def _reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, queue_offset in offsets.items():
            if queue in self.assigned:
                self._set_position(self.assigned[queue], queue_offset)
                self._continue_at(self.assigned[queue], queue_offset)

    def _continue_at(self, assigned: AssignedQueue, queue_offset: int) -> None:
        """Continue where the broker says, by a reset or because the queue lacks the position.

        A reset has moved the broker's progress too. What this consumer stored before is not there any more, and has to
        be stored again when it is reached again.
        """
        assigned.choose(queue_offset)
        self._save_soon()

    # ---- polling

    def poll(self, timeout: float | timedelta | None = None) -> list[DeliveredMessage]:
        """Return up to ``pull_batch_size`` messages of one queue; wait up to ``timeout`` (None: as configured).

        The list is empty when the time has passed; the next poll then continues after the messages that the filter
        skipped. With a manual clock the call returns immediately. It waits for a poll in another thread.

        A predicate with ``on_error=Policy.STOP`` ends the list before the message on which it raised; the poll that
        begins with that message raises its error, and so do later ones of that queue, while other queues have their
        turns. So it is with a message whose record is damaged, which `seek` passes.

        Raises:
            BrokerDamageError: The next message of a queue can't be read; the error names file and place.
            BrokerError: No message came, and a broker refused the last heartbeat, as when the group has no rights.
            ClientStateError: `poll_async` runs in this event loop.
        """
        return self._poll(timeout, one_by_one=False)

    def _poll(self, timeout: float | timedelta | None, one_by_one: bool) -> list[DeliveredMessage]:
        has_begun = False
        try:
            with self._receiving() as receive:  # within, because its end can be interrupted too
                self._life.check_running("poll")
                if self._arrived.is_awaited_here():
                    raise ClientStateError(f"{self._life.what} is being polled in this event loop: one poll at a time")
                clock = self.runner.clock
                seconds = self.config.poll_timeout if timeout is None else to_seconds("timeout", timeout)
                deadline = clock.monotonic() + seconds
                self._looks_once = seconds <= 0
                with self._polling:
                    self._begin_poll()
                    has_begun = True
                    while True:
                        messages, has_moved = self._try_poll(one_by_one)
                        if messages or self._stopping:
                            return receive.returns(messages)
                        remaining = deadline - clock.monotonic()
                        if has_moved and remaining >= 0:
                            clock.wait(self._arrived, LOCK_PAUSE_S)  # This offers the lock to other threads.
                            continue
                        if remaining <= 0 or not clock.wait(self._arrived, remaining):
                            return self._no_messages()
        except BaseException:  # Ctrl-C lost the pulled messages, so pull them again
            if has_begun:
                self._rewind()
            raise

    def _no_messages(self) -> list[DeliveredMessage]:
        """Return an empty list, unless queues only look empty because a broker refuses this client."""
        for name, error in list(self.client.refusals.items()):
            raise BrokerError(
                error.code,
                f"{self._life.what}: broker {name} gives it no messages, because it refuses its heartbeats: {error}",
            ) from error
        return []

    async def poll_async(self, timeout: float | timedelta | None = None) -> list[DeliveredMessage]:
        """Poll while other coroutines of the event loop run. A cancelled poll loses no message.

        Raises:
            BrokerError: As `poll`.
            ClientStateError: Another poll of this consumer is running.
        """
        return await self._poll_async(timeout, one_by_one=False)

    async def _poll_async(self, timeout: float | timedelta | None, one_by_one: bool) -> list[DeliveredMessage]:
        with self._receiving() as receive:
            self._life.check_running("poll")
            clock = self.runner.clock
            seconds = self.config.poll_timeout if timeout is None else to_seconds("timeout", timeout)
            deadline = clock.monotonic() + seconds
            if not self._polling.acquire(blocking=False):
                raise ClientStateError(f"{self._life.what} is being polled: one poll at a time")
            self._looks_once = seconds <= 0
            try:
                arrived = asyncio.Event()
                self._arrived.awaited = asyncio.get_running_loop(), arrived
                self._begin_poll()
                while True:
                    arrived.clear()
                    # A thread would not help: a pull can only wait for a page of a mapped file, and such a wait blocks
                    # the whole interpreter.
                    messages, has_moved = self._try_poll(one_by_one)
                    if messages or self._stopping:
                        return receive.returns(messages)
                    remaining = deadline - clock.monotonic()
                    if has_moved and remaining >= 0:
                        await asyncio.sleep(0)
                    elif remaining <= 0 or not await wait_async(clock, arrived, remaining):
                        return receive.returns(self._no_messages())
            except BaseException:  # as in `_poll`: a watcher, a predicate or a signal handler can raise
                self._rewind()
                raise
            finally:
                self._arrived.awaited = None
                self._polling.release()

    def __iter__(self) -> Iterator[DeliveredMessage]:
        """Hand out messages one by one, until a poll finds none in its time.

        A message counts as consumed when the loop asks for the next one. If the loop ends early, the remaining messages
        come with the next poll.
        """
        while messages := self._poll(None, one_by_one=True):
            yield from self._hand_out(messages)

    async def __aiter__(self) -> AsyncIterator[DeliveredMessage]:
        """Hand out messages like ``for`` while other coroutines of the event loop run."""
        while messages := await self._poll_async(None, one_by_one=True):
            for message in self._hand_out(messages):
                yield message

    def _hand_out(self, messages: list[DeliveredMessage]) -> Iterator[DeliveredMessage]:
        """Move the position past one message after the other, and yield those that are wanted."""
        next_offsets = [*(message.queue_offset for message in messages[1:]), self._pulled_end]
        for message, next_offset in zip(messages, next_offsets, strict=True):
            is_wanted = self._is_wanted(message)
            if not self._advance(message, next_offset, is_wanted):
                return  # The position has changed meanwhile, so the next poll begins there.
            if is_wanted:
                yield message

    def _is_wanted(self, message: DeliveredMessage) -> bool:
        """Ask the topic's predicate, without the lock."""
        predicate = self._predicates.get(message.queue.topic)
        return predicate is None or predicate.matches(message)

    def _wanted(self, messages: list[DeliveredMessage]) -> list[DeliveredMessage]:
        """Return the pulled messages for which the topic's predicate is true, up to one on which it stops."""
        matching, passed = list[DeliveredMessage](), list[DeliveredMessage]()
        if messages[0].queue.topic not in self._predicates:
            matching = passed = messages
        else:
            for message in messages:
                try:
                    is_wanted = self._is_wanted(message)
                except Exception:  # A predicate raises only where its policy is to stop.
                    self._stop_before(message)
                    if matching:
                        break
                    self._last = None  # What precedes the message was passed over, so a rewind must not bring it back.
                    self._note_passed(passed)
                    raise
                passed.append(message)
                if is_wanted:
                    matching.append(message)
        self._note_passed(passed)
        return matching

    def _note_passed(self, messages: Sequence[DeliveredMessage]) -> None:
        """Note messages that a poll returns, or passes over by a predicate: they count as consumed too."""
        if messages:
            self._note("hand_out", queue=messages[0].queue, messages=messages)

    def _stop_before(self, message: DeliveredMessage) -> None:
        """Pull from this message on again, unless the position has changed since its pull."""
        with self.runner.lock:
            if self._last is not None and self._last[0].next_offset == self._last[2]:
                assigned, before, _ = self._last
                assigned.next_offset = message.queue_offset
                self._last = assigned, before, message.queue_offset

    def _advance(self, message: DeliveredMessage, next_offset: int, is_wanted: bool) -> bool:
        """Move the position past one message; return False if the position has changed meanwhile."""
        with self.runner.lock:
            assigned = self.assigned.get(message.queue)
            if assigned is None or assigned.released or assigned.next_offset != message.queue_offset:
                return False
            if assigned.queue in self._rests:
                return False
            if self.config.auto_commit and assigned.progress != assigned.next_offset:
                self._progressed(assigned, assigned.next_offset)
            assigned.next_offset = next_offset
            self._last = assigned, message.queue_offset, next_offset
            if is_wanted and assigned.place is not None:
                assigned.place.begin((message,))
            self._note("settle", result="ok")
            self._note_passed((message,))
            return True

    def _begin_poll(self) -> None:
        """Count the messages of the previous poll as consumed, if so configured."""
        self._last, commits = None, self.config.auto_commit
        if not commits:
            self._note("settle", result="ok")
        if commits or self._in_work:
            with self.runner.lock:
                if commits:
                    self._commit_polled()
                self._end_work()

    # ---- suspects

    @override
    def hold_back(self) -> None:
        self._is_held_back = True

    @override
    def go_on(self, now_ms: int) -> None:
        self._is_held_back = False
        self._arrived.set()

    @property
    @override
    def in_work(self) -> int:
        return 0 if self.client.dead else self._in_work

    def _end_work(self) -> None:
        """Note that the messages of the last poll are processed, as the next call says."""
        has_begun, self._in_work = self._in_work > 0 or self._stopping, 0
        if self._has_turn and has_begun and self._turn_of is not None:
            turn, self._turn_of, self._has_turn = self._turn_of[2], None, False
            self._turns.ended(turn)
        elif self._is_held_back:
            self._turns.look()

    def _before_suspect(self, assigned: AssignedQueue, messages: list[DeliveredMessage]) -> list[DeliveredMessage]:
        """Return the pulled messages up to a suspect, or it alone if it has its turn; the next pull has the others."""
        suspects = {} if assigned.left is None else assigned.left.suspects
        number = next((number for number, message in enumerate(messages) if message.queue_offset in suspects), None)
        if number is None:
            return messages
        assigned.next_offset = messages[number].queue_offset
        return messages[:number] or self._judge(assigned, messages[0], suspects[messages[0].queue_offset])

    def _judge(self, assigned: AssignedQueue, message: DeliveredMessage, suspect: Suspect) -> list[DeliveredMessage]:
        """Return the next message if it is its turn, or make it a dead letter."""
        offset, error = message.queue_offset, conviction(suspect, assigned.place, self.config.max_process_deaths)
        if error is not None:
            if not self._retries().convict(assigned, message, error):
                return []
            if assigned.place is not None:
                assigned.place.finish(offset)
        elif self._turn_of is None or self._turn_of[:2] != (assigned, offset) or not self._has_turn:
            if self._turn_of is None or self._turn_of[0].released:
                turn = Turn(suspect, self._begin_turn)
                self._turn_of, self._has_turn = (assigned, offset, turn), False
                self._turns.ask(turn)
            return []
        else:
            self._turns.begin_now(self._turn_of[2])
        assigned.take_suspect(offset)
        assigned.next_offset = offset + 1
        return [] if error is not None else [message]

    def _begin_turn(self, turn: Turn, now_ms: int) -> bool:
        if self._turn_of is None or self._turn_of[2] is not turn:
            return False
        if self._stopping or self._turn_of[0].released:
            self._turn_of = None
            return False
        self._has_turn = True
        self._arrived.set()
        return True

    def _rewind(self) -> None:
        with self.runner.lock:
            self._note("settle", result="retry")
            if self._last is not None:
                assigned, before, next_offset = self._last
                assigned.leave_marks()
                if assigned.next_offset == next_offset:
                    assigned.next_offset = before

    def _try_poll(self, one_by_one: bool) -> tuple[list[DeliveredMessage], bool]:
        """Pull the queues in turn; the brokers hold the pulls of queues without messages."""
        self._arrived.clear()
        with self.runner.lock:
            messages, has_moved = ([], False) if self._stopping else self._pull_in_turn(one_by_one)
        if one_by_one or not messages:
            return messages, has_moved
        if (place := self.assigned[messages[0].queue].place) is not None:
            place.begin_pulled(messages)
        return self._wanted(messages), has_moved

    def _pull_in_turn(self, one_by_one: bool) -> tuple[list[DeliveredMessage], bool]:
        """Pull each queue up to the first with messages; return also whether a position moved without any."""
        has_moved = False
        if self._is_held_back and not self._has_turn:
            return [], False
        only = self._turn_of[0] if self._has_turn and self._turn_of is not None else None
        queues = [
            assigned
            for assigned in self.assigned.values()
            if not assigned.released and assigned.queue not in self._paused and assigned.queue not in self._rests
            if (only is None or only is assigned) and not self._is_taken(assigned)
        ]
        for number in range(len(queues)):
            at = (self._turn + number) % len(queues)
            self._pass_ended(queues[at])
            before = queues[at].next_offset
            try:
                messages = self._pull_queue(queues[at])
            except BrokerDamageError:
                self._turn = at + 1  # the others have their turns before the next error
                raise
            if messages:
                if one_by_one:  # The position is moved later, when each message is handed out.
                    self._pulled_end = queues[at].next_offset
                    queues[at].next_offset = messages[0].queue_offset
                    self._last = queues[at], before, messages[0].queue_offset
                self._turn = at + 1
                self._in_work = len(messages)
                return messages, True
            has_moved |= queues[at].next_offset != before
        return [], has_moved

    def _is_taken(self, assigned: AssignedQueue) -> bool:
        if self._shares_queues and assigned.place is not None:
            assigned.is_taken |= assigned.place.is_taken
        return assigned.is_taken

    def _pass_ended(self, assigned: AssignedQueue) -> None:
        """Pass what the former reader of a queue has ended since this one took it."""
        place = assigned.place
        if self._shares_queues and assigned.may_be_passed and not assigned.is_chosen and place and place.is_open:
            assigned.next_offset = max(assigned.next_offset, place.position)

    def _pull_queue(self, assigned: AssignedQueue) -> list[DeliveredMessage]:
        queue = assigned.queue
        assigned.pulled_timestamp_ms = self.runner.now_ms()
        try:
            response = self._request(assigned)
        except BrokerDamageError:
            raise
        except RmqError as error:
            self._states.failing(f"polling {assigned.label}", error, key=("poll", queue.broker_name, queue.topic))
            return []
        if self._states.causes:
            self._states.works(("poll", queue.broker_name, queue.topic))
        if response.status is PullStatus.HELD:
            return []
        begin, end = assigned.next_offset, response.next_offset
        self._last = assigned, begin, end
        assigned.next_offset = end
        if response.status is PullStatus.OFFSET_ILLEGAL:
            self._continue_at(assigned, response.next_offset)
            self._note("reset", queue.topic)
            self._log.warning(
                "%(consumer)s: %(queue)s continues at %(queue_offset)d",
                queue=assigned.queue,
                queue_offset=response.next_offset,
            )
        tag_filter = self._filters.get(queue.topic)
        bounds, messages = (response.min_offset, response.max_offset), response.messages
        if tag_filter is not None:
            messages = [message for message in messages if tag_filter.matches(message.tags)]
        records = StoredRecords.raw_records(messages)
        offsets: Iterable[int] = range(begin, end)
        if len(records) != end - begin:  # else none was passed, and to ask each takes a tenth of the time
            offsets = [message.queue_offset for message in messages]
        delivered = delivered_messages(records, queue, offsets, bounds)
        if assigned.left is not None:
            delivered = self._before_suspect(assigned, assigned.left.pulled(delivered, begin, end))
            assigned.forget_left()
            self._last = assigned, begin, end = assigned, begin, assigned.next_offset
            if not delivered and not assigned.is_chosen and assigned.place and assigned.place.position == begin < end:
                self._progressed(assigned, end)  # no commit has to come, which would pass a dead letter
        return delivered

    def _request(self, assigned: AssignedQueue) -> PullResponse:
        queue, endpoint = assigned.queue, self.client.route.endpoint(assigned.queue.broker_name)
        # A poll that does not wait asks the owner of a share for an answer; a held pull has one for a later poll.
        notify = None if self._looks_once and self.route.is_remote and endpoint.has_page else assigned.notify
        subscription: Subscription | None = None if self._shares_queues else self.subscriptions.get(queue.topic)
        request = PullMessage(
            client_id=self.client.client_id,
            group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=assigned.next_offset,
            max_messages=self.config.pull_batch_size,
            subscription=subscription,
            commit_offset=None,
            notify=notify,
        )
        assigned.endpoint = endpoint
        return endpoint.call(request)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Exclude queues from polls."""
        self._paused.update(_check_queues(queues))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Include queues in polls again."""
        self._paused.difference_update(_check_queues(queues))
        self._arrived.set()

    def rest(self, seconds: float | timedelta, *, queue: MessageQueue | None = None, reason: str = "") -> None:
        """Take back the messages handed out last, and hand out none for ``seconds``, because downstream is down.

        A loop over the consumer takes back its present message and ends. What `commit` has passed is not taken back.
        With ``queue`` only that queue rests.

        Raises:
            ValueError: ``seconds`` is not above 0, or more than a day.
            ClientStateError: The queue is not read.
        """
        error = DownstreamDown(reason, seconds=seconds, only_queue=queue is not None)
        with self.runner.lock:
            self._rewind()
            last = next(iter(self.assigned), None) if queue is None else self._assigned_queue(queue).queue
            if last is not None:
                self._rests.begin_rest(error, last)

    def _end_rest(self, now_ms: int, due: list[Never]) -> None:
        self._rests.succeeded()
        self._arrived.set()

    # ---- positions

    def _assigned_queue(self, queue: MessageQueue) -> AssignedQueue:
        assigned = self.assigned.get(queue)
        if assigned is None or assigned.released:
            raise ClientStateError(
                f"{self._life.what} does not read {queue} now: assign it, or poll until a rebalance gives it"
            )
        return assigned

    def _set_position(self, assigned: AssignedQueue, queue_offset: int) -> None:
        self._note("reset", assigned.queue.topic)
        assigned.next_offset, assigned.is_chosen = queue_offset, True
        self._arrived.set()

    def seek(self, queue: MessageQueue, queue_offset: int) -> None:
        """Continue polling at another queue offset.

        Raises:
            ClientStateError: The queue is not assigned, or has no such offset.
        """
        with self.runner.lock:
            assigned = self._assigned_queue(queue)
            self._check_offset(queue, queue_offset, self.min_offset(queue))
            self._set_position(assigned, queue_offset)

    def _check_offset(self, queue: MessageQueue, queue_offset: object, first: int) -> None:
        end = self.max_offset(queue)
        if type(queue_offset) is not int or not first <= queue_offset <= end:
            raise ClientStateError(
                f"{queue} has offsets {first} to {end}, not {queue_offset!r:.80}; queue_offset_at finds that of a time"
            )

    def seek_to_begin(self, queue: MessageQueue) -> None:
        """Continue at the oldest message."""
        with self.runner.lock:
            self._set_position(self._assigned_queue(queue), self.min_offset(queue))

    def seek_to_end(self, queue: MessageQueue) -> None:
        """Continue at the next new message."""
        with self.runner.lock:
            self._set_position(self._assigned_queue(queue), self.max_offset(queue))

    def position(self, queue: MessageQueue) -> int:
        """Return the queue offset of the next poll."""
        with self.runner.lock:
            return self._assigned_queue(queue).next_offset

    def min_offset(self, queue: MessageQueue) -> int:
        """Return the queue offset of the oldest message."""
        return self.client.route.endpoint(queue.broker_name).call(MinOffset(queue.topic, queue.queue_id))

    def max_offset(self, queue: MessageQueue) -> int:
        """Return the queue offset of the next new message."""
        return self.client.route.endpoint(queue.broker_name).call(MaxOffset(queue.topic, queue.queue_id))

    def queue_offset_at(self, queue: MessageQueue, time: datetime | int) -> int:
        """Return the queue offset of the message stored nearest to a time: one with a time zone, or ms since 1970.

        The broker's search takes store times to ascend; after its clock was set back the answer can be a later message.
        """
        timestamp_ms = to_timestamp_ms("time", time)
        return self.client.route.endpoint(queue.broker_name).call(
            QueueOffsetAt(queue.topic, queue.queue_id, timestamp_ms)
        )

    # ---- progress

    @override
    def _progress_off_page(self, assigned: AssignedQueue) -> None:
        super()._progress_off_page(assigned)
        if assigned.is_chosen and assigned.place is not None:
            # The page takes no progress after a seek until the broker has stored the first.
            self._offsets.save([assigned])

    def _commit_polled(self) -> None:
        self._note("settle", result="ok")
        for assigned in self.assigned.values():
            if not assigned.released and assigned.progress != assigned.next_offset:
                self._progressed(assigned, assigned.next_offset)
        self._note("keep")

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store progress now: after all polled messages, or at these queue offsets.

        Raises:
            ClientStateError: A broker did not store it, or a queue ends before its offset.
            TypeError: ``offsets`` does not map queues to queue offsets.
        """
        if offsets is not None and not isinstance(offsets, Mapping):
            raise TypeError(f"offsets: expected {{MessageQueue: queue offset}}, found {offsets!r:.80}")
        with self.runner.lock:
            self._life.check_running("commit")
            if offsets is None:
                positions = {
                    assigned: assigned.next_offset for assigned in self.assigned.values() if not assigned.released
                }
            else:
                positions = self._chosen(offsets)
            self._note("settle", result="ok")
            unkept = list[AssignedQueue]()
            for assigned, queue_offset in positions.items():
                assigned.progress = queue_offset
                if queue_offset != assigned.stored_progress:
                    if not assigned.keep() or self._states.causes:  # then `save` says that storing works again
                        unkept.append(assigned)
                    elif queue_offset != assigned.stored_progress and self._saving.at is None:
                        self._save_soon()  # the owner of a share, in another process, gets it some time later
            if unkept and not self._offsets.save(unkept):
                raise ClientStateError(
                    f"{self._life.what}: a broker has not stored the progress, as a logged warning explains: try again"
                )
            if offsets is None:
                self._note("keep")
                self._end_work()
                self._last = None  # What is committed is not taken back by `rest`.

    def _chosen(self, offsets: Mapping[MessageQueue, int]) -> dict[AssignedQueue, int]:
        positions = {self._assigned_queue(queue): queue_offset for queue, queue_offset in offsets.items()}
        for assigned, queue_offset in positions.items():
            if type(queue_offset) is not int or queue_offset < 0:
                raise TypeError(f"{assigned.queue}: expected a queue offset, found {queue_offset!r:.80}")
            if queue_offset > assigned.next_offset:
                self._check_offset(assigned.queue, queue_offset, 0)
        for assigned in positions:
            assigned.may_be_passed = False
        return positions

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the stored progress of the group in a queue; None if there is none."""
        if not isinstance(queue, MessageQueue):
            raise TypeError(f"queue: expected a MessageQueue, found {queue!r:.80}")
        with self.runner.lock:
            return self._offsets.read(queue)


def _check_queues(queues: object) -> list[MessageQueue]:
    """Return the queues."""
    if isinstance(queues, Iterable) and not isinstance(queues, MessageQueue):
        elements = list(queues)
        if all(isinstance(queue, MessageQueue) for queue in elements):
            return elements
    raise TypeError(f"queues: expected a list of MessageQueue, found {queues!r:.200}")


def _leave_to_parent(consumer: PullConsumer) -> None:
    if consumer._life.is_running:
        consumer._life.leave_to_parent()


_consumers: Final[Inherited[PullConsumer]] = Inherited(_leave_to_parent)
