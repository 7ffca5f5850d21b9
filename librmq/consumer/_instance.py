"""One instance of a consumer group: the state that its parts share, its progress, its description, and its gauges.

`BrokerOffsets` mirrors ``RemoteBrokerOffsetStore``; `librmq.consumer._local_offsets` has the progress of a broadcasting
instance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from librmq.client import Client
from librmq.client.operations import Watched
from librmq.config import check_reached, to_timestamp_ms
from librmq.consumer._assignment import AssignedQueue, LeftWork
from librmq.consumer.config import ConsumerConfig, StartAt
from librmq.errors import BrokerError, BrokerUnreachableError, RmqError
from librmq.filter import TagFilter
from librmq.message import MessageQueue
from librmq.message.lag import queue_lag
from librmq.message.topics import TopicPrefix
from librmq.protocol import (
    DescribeQueues,
    HeldQueue,
    HoldPlace,
    InstanceState,
    ListenerCall,
    MaxOffset,
    Place,
    QueryOffset,
    Route,
    StartGroup,
    StartOutcome,
    Subscription,
    UpdateOffset,
)
from librmq.runtime import Runner, StateLog, Step
from librmq.runtime.event_log import EventLog
from librmq.runtime.runner import next_on_grid

if TYPE_CHECKING:
    from librmq.consumer._local_offsets import LocalOffsets
    from librmq.metrics import Metrics

FIRST_SAVE_MS: Final = 10_000
SAVE_INTERVAL_MS: Final = 5_000
SETTLED_MS: Final = 1_000
"""In this time the former reader of a queue stores its progress."""
REOPENED_MS: Final = 3_000
"""In this time the members of a group have shared its queues out at a broker that was away."""
AWAY_MS: Final = 2 * REOPENED_MS
"""After a pull that did not reach its broker: the time until the next pull, and then `REOPENED_MS`."""
_LONGEST_FIRST_MS: Final = 60_000  # No first time is planned further ahead than this.
_CONCURRENT_TIMES: Final = 16  # This is the default of 4.9.

_log = EventLog("librmq.consumer")


def next_from_first(now_ms: int, first_ms: int, interval_ms: int) -> int:
    """Return the first time after ``now_ms`` on the grid that begins at ``first_ms`` with steps of ``interval_ms``."""
    if first_ms - _LONGEST_FIRST_MS <= now_ms < first_ms:
        # Otherwise the clock was set back, and the first time is too far away.
        return first_ms
    return next_on_grid(now_ms, first_ms, interval_ms)


class Instance(Watched):
    """What the parts of one instance share: its identity, its queues, and the saving of its progress.

    It changes under the runner's lock. `librmq.consumer.base.Consumer` is the instance that its users see.
    """

    _config: ConsumerConfig
    kind: str
    """``push`` or ``pull``."""
    _shares_queues: bool = True
    """Whether rebalancing divides the group's queues among its instances, and a caller assigns none."""

    def __init__(self, route: Route, group: str, client: Client) -> None:
        self.client: Client = client
        self.group: str = group
        self.route: Route = route
        self.runner: Runner = route.runner
        name = client.client_id.partition("@")[2] if client.has_stable_name else ""
        self._label: str = f"{group}@{name}" if name else group
        """Group and instance, the same in each run."""
        self.subscriptions: dict[str, Subscription] = {}
        """By topic."""
        self._filters: dict[str, TagFilter] = {}
        """Exact checks by topic, for subscriptions with tags."""
        self.assigned: dict[MessageQueue, AssignedQueue] = {}
        """The queues of this instance now, including released ones whose listener still runs."""
        self._stopping: bool = False
        """Whether the instance is shutting down, so that nothing new begins."""
        self.started_ms: int = 0
        """The time of joining the group, from which checks of timeouts and the renewal of locks count."""
        self._offsets: BrokerOffsets | LocalOffsets
        """Store of the progress of one instance. Called under the runner's lock."""
        self.metrics: Metrics | None = None
        self._log: EventLog = _log.with_fields(consumer=self._label, group=group)
        self._states: StateLog = StateLog(self._log, self._label)
        self._saving = Step(f"{self._label} save progress", self._save_due, client)
        self._maximum_of_group: int | None = None  # what a broker said last; -1 stands for the group's setting

    @property
    def config(self) -> ConsumerConfig:
        return self._config

    @property
    def max_reconsume_times(self) -> int | None:
        """The redeliveries before a message becomes a dead letter: those of the instance that started last."""
        maximum = self._maximum_of_group
        return self.config.max_reconsume_times if maximum is None else None if maximum < 0 else maximum

    @property
    def max_redeliveries(self) -> int | None:
        """The same for this instance's way of consuming; None without a limit, which only an orderly one has."""
        maximum = self.max_reconsume_times
        return _CONCURRENT_TIMES if maximum is None and not self.config.orderly else maximum

    def _make_assigned(self, queue: MessageQueue, next_offset: int, progress: int | None) -> AssignedQueue:
        """Make the state of a queue before taking it; raise `RmqError` if its broker can't be asked for its place."""
        label = f"{self._label} pull {queue.topic}/{queue.broker_name}/{queue.queue_id}"
        assigned = AssignedQueue(queue, next_offset, progress, Step(label, lambda now_ms: None, self.client))
        assigned.place = self._offsets.hold(queue)
        if assigned.place is not None:
            assigned.left = LeftWork(assigned.place.finished(), assigned.place.suspects())
            assigned.forget_left()
        return assigned

    def _lock(self, queue: MessageQueue) -> bool:
        return True

    def _start_queue(self, assigned: AssignedQueue) -> None:
        raise NotImplementedError

    def _release_queue(self, assigned: AssignedQueue, now_ms: int) -> bool:
        """End with a queue; return False if its listener still runs."""
        self._save((assigned,))
        assigned.leave_marks()
        return True

    def _note_take(self, queue: MessageQueue, start: int, stored: int | None) -> None:
        self._note("take", queue.topic, "moved" if stored is None and start else "", queue=queue)

    # ---- progress

    def _progressed(self, assigned: AssignedQueue, progress: int) -> None:
        """Set the progress of a queue: on the page of groups at once, or else it is stored soon."""
        assigned.progress = progress
        place = assigned.place
        if (
            place is not None
            and not assigned.is_chosen
            and place.advance(progress)
            and place.saving is not None
            and not self._states.causes  # after a failure, the next save also says that storing works again
        ):
            assigned.stored_progress = progress
        else:
            self._progress_off_page(assigned)

    def _progress_off_page(self, assigned: AssignedQueue) -> None:
        """Let progress be stored that the page of groups does not have, or not alone."""
        if self._saving.at is None:
            self._save_soon()

    def _save_soon(self) -> None:
        """Schedule the storing of progress: 10 s after the start, then every 5 s, and soon after a queue has moved."""
        self.runner.wake(self._saving, self._next_save_ms(self.runner.now_ms()))

    def _next_save_ms(self, now_ms: int) -> int:
        due_ms = next_from_first(now_ms, self.started_ms + FIRST_SAVE_MS, SAVE_INTERVAL_MS)
        moved = any(assigned.may_be_passed for assigned in self.assigned.values())
        return min(due_ms, now_ms + SETTLED_MS) if moved else due_ms

    def _save_due(self, now_ms: int) -> int | None:
        settled = [
            assigned for assigned in self.assigned.values() if not now_ms < assigned.settled_ms <= now_ms + AWAY_MS
        ]
        is_complete = len(settled) == len(self.assigned)
        if self._stopping or (self._offsets.save_soon(self._changed(settled)) and is_complete):
            return None
        return self._next_save_ms(now_ms)

    def _save(self, queues: Iterable[AssignedQueue]) -> bool:
        """Store unstored progress, and return whether all is stored."""
        return self._offsets.save(self._changed(queues))

    def _changed(self, queues: Iterable[AssignedQueue]) -> list[AssignedQueue]:
        changed = [
            assigned
            for assigned in queues
            if assigned.progress is not None
            and assigned.progress != assigned.stored_progress
            # A position that was set back counts, and not what was reached before.
            and not (assigned.is_chosen and assigned.progress > assigned.next_offset)
        ]
        return [assigned for assigned in changed if self._may_store(assigned)]

    def progress(self, topic: str | None = None) -> dict[MessageQueue, int]:
        """Return the progress in the assigned queues, the queue offset of the next message to consume."""
        with self.runner.lock:
            return {
                queue: assigned.progress
                for queue, assigned in self.assigned.items()
                if assigned.progress is not None and topic in (None, queue.topic)
            }

    def _may_store(self, assigned: AssignedQueue) -> bool:
        """Return whether this instance may report the progress of a queue."""
        return True


# ---- progress at the brokers

_EFFECTS: Final = {
    StartOutcome.MOVED: "has moved it",
    StartOutcome.MOVED_BEFORE: "has no effect, because an earlier start has moved it",
    StartOutcome.NO_QUEUES: "has no effect, because the topic is new: the group gets all its messages",
}


class BrokerOffsets:
    """Progress at the brokers, for all instances of the group."""

    def __init__(self, client: Client, group: str, states: StateLog, start_at: StartAt | None) -> None:
        self._client = client
        self._group = group
        self._states = states
        self._start_at = start_at
        self._started: set[tuple[str, str]] = set()

    def start(self, topic: str, broker_name: str) -> None:
        """Let a broker move the group in a topic to ``start_at``, unless it has moved it before.

        A broker whose queues all end before an offset moves the group to their ends, if another broker's do not.

        Raises:
            BrokerError: The broker can't.
            BrokerUnreachableError: It can't be reached; `read` asks again.
            ConfigError: ``start_at`` is an offset beyond the end of every queue.
        """
        at, place = self._start_at, (topic, broker_name)
        if at is None or place in self._started or topic.startswith(TopicPrefix.RETRY):
            return
        request = StartGroup(self._group, topic, client_id=self._client.client_id)
        if isinstance(at, datetime):
            request = replace(request, timestamp_ms=max(0, to_timestamp_ms("start_at", at)))
        elif at != "last":
            request = replace(request, queue_offset=0 if at == "first" else at)
        endpoint = self._client.route.endpoint(broker_name)
        outcome = endpoint.call(request)
        is_beyond = outcome is StartOutcome.BEYOND_END
        if is_beyond and isinstance(at, int):
            check_reached("start_at", at, topic, self._ends(topic))
            outcome = endpoint.call(replace(request, queue_offset=None))
        self._started.add(place)
        _log.log(
            logging.WARNING if is_beyond else logging.INFO,
            "group %(group)s in %(topic)s at %(broker)s: start_at is %(start_at)s, which %(effect)s",
            group=self._group,
            topic=topic,
            broker=broker_name,
            start_at=at,
            effect="is beyond the end of every queue there, so it has moved it to the ends" * is_beyond
            or _EFFECTS[outcome],
        )

    def _ends(self, topic: str) -> list[int]:
        ends = list[int]()
        for name in self._client.route.broker_names():
            with suppress(BrokerError, BrokerUnreachableError):  # the topic need not be at each broker
                bounds = self._client.route.endpoint(name).call(DescribeQueues(topic))
                ends += [part.max_offset for part in bounds.values()]
        return ends

    def read(self, queue: MessageQueue) -> int | None:
        self.start(queue.topic, queue.broker_name)
        request = QueryOffset(self._group, queue.topic, queue.queue_id)
        return self._client.route.endpoint(queue.broker_name).call(request)

    def hold(self, queue: MessageQueue, *, was_held: bool = False) -> Place | None:
        """Return the place of a queue that is taken, or ``was_held``.

        None without a page of groups that this process can write.
        """
        endpoint = self._client.route.endpoint(queue.broker_name)
        if not endpoint.has_page:
            return None
        request = HoldPlace(self._group, queue.topic, queue.queue_id, self._client.client_id, was_held)
        place = endpoint.call(request)
        return place if isinstance(place, Place) else None

    def save(self, queues: Iterable[AssignedQueue]) -> bool:
        """Send new progress to the brokers, unless they have later progress; return whether all of it is there."""
        all_stored = True
        for assigned in queues:
            progress, queue = assigned.progress, assigned.queue
            is_kept = assigned.keep()
            if progress is None or progress == assigned.stored_progress:
                if is_kept:
                    self._states.works(f"storing progress at {queue.broker_name}")
                continue
            update, stored = UpdateOffset(self._group, queue.topic, queue.queue_id, progress), None
            try:
                if is_kept:
                    # The page can be further before the owner gets this, so that it may move nothing back.
                    self._client.route.endpoint(queue.broker_name).call(replace(update, only_forward=True))
                else:
                    # Where none was stored, a reader that the broker lost, and does not know, can have stored some.
                    is_unknown = assigned.may_be_passed or assigned.stored_progress is None
                    stored = self.read(queue) if is_unknown and not assigned.is_chosen else None
                    if not stored or stored < progress:
                        self._client.route.endpoint(queue.broker_name).call(update)
                    if assigned.place is None or not assigned.place.advance(progress):  # it was set back
                        assigned.place = self.hold(queue, was_held=True)
            except RmqError as error:
                self._states.failing(f"storing progress at {queue.broker_name}", error)
                all_stored = False
            else:
                assigned.stored_progress, assigned.may_be_passed = progress, (stored or 0) > progress
                assigned.is_chosen = False
                self._states.works(f"storing progress at {queue.broker_name}")
        return all_stored

    save_soon = save


# ---- state for diagnosis


def instance_state(
    member: Instance,
    *,
    listeners: tuple[ListenerCall, ...] = (),
    running: int = 0,
    is_paused: bool = False,
) -> InstanceState:
    """Return the state of an instance. Call it under the runner's lock."""
    config = member.config
    held = [assigned for assigned in member.assigned.values() if not assigned.released]
    return InstanceState(
        client_id=member.client.client_id,
        group=member.group,
        kind=member.kind,
        model=config.model,
        is_orderly=config.orderly,
        is_paused=is_paused,
        threads=config.threads if member.kind == "push" else 0,
        running=running,
        strategy=getattr(config.strategy, "__name__", repr(config.strategy)),
        queues=tuple(_held_queue(assigned, config.orderly) for assigned in held),
        listeners=listeners,
        started_ms=member.started_ms,
        max_reconsume_times=member.max_reconsume_times,
    )


def _held_queue(assigned: AssignedQueue, is_orderly: bool) -> HeldQueue:
    messages = assigned.messages
    running = messages.begun if is_orderly else sum(1 for _ in messages._started())
    first = messages._first_message()
    since_ms = None if first is None else first.consume_start_timestamp_ms
    if since_ms is None and assigned.delivering and assigned.since_ms:
        since_ms = assigned.since_ms  # An orderly one counts from the first of its calls without a rest.
    return HeldQueue(
        queue=assigned.queue,
        progress=assigned.progress,
        stored=assigned.stored_progress,
        waiting=len(messages) - running,
        running=running,
        first=None if first is None else first.queue_offset,
        first_message_id=None if first is None else first.message_id,
        first_since_ms=since_ms,
        first_failures=0 if first is None else first.reconsume_times,
        pulled_timestamp_ms=assigned.pulled_timestamp_ms,
        is_throttled=assigned.throttled,
        last=None if first is None else first.queue_offset + messages.span,
        held_bytes=messages.size,
        is_locked=assigned.locked,
        lock_timestamp_ms=assigned.lock_timestamp_ms,
    )


# ---- gauges

_GAUGES: dict[str, Callable[[AssignedQueue], float]] = {
    "queues": lambda assigned: 1,
    "waiting_messages": lambda assigned: len(assigned.messages),
    "waiting_bytes": lambda assigned: assigned.messages.size,
}
"""What an instance holds of a queue, measured under the runner's lock."""


def _lag(member: Instance, topic: str) -> float | None:
    """Return the lag of an instance in its queues of a topic; None if a broker can't be asked for their ends."""
    with member.runner.lock:
        progress = {
            assigned.queue: assigned.next_offset if assigned.progress is None else assigned.progress
            for assigned in _assigned(member, topic)
        }
    lag = 0
    # Without the lock: a broker over TCP may take seconds to answer, in which other turns of the clients go on.
    try:
        for queue, offset in progress.items():
            end = member.client.route.endpoint(queue.broker_name).call(MaxOffset(queue.topic, queue.queue_id))
            lag += queue_lag(offset, 0, end)
    except RmqError:
        return None
    return lag


def _assigned(member: Instance, topic: str) -> list[AssignedQueue]:
    return [
        assigned for assigned in member.assigned.values() if assigned.queue.topic == topic and not assigned.released
    ]


def show_gauges(member: Instance, metrics: Metrics) -> None:
    for topic in list(member.subscriptions):
        for name, measure in _GAUGES.items():
            value = partial(_total, member, topic, measure)
            metrics.gauge(name, value, owner=member, topic=topic, group=member.group)
        metrics.gauge("lag", partial(_lag, member, topic), owner=member, topic=topic, group=member.group)


def _total(member: Instance, topic: str, measure: Callable[[AssignedQueue], float]) -> float:
    with member.runner.lock:
        return sum(map(measure, _assigned(member, topic)))
