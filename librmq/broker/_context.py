"""The context of a broker: what all its parts share, as one argument, and its life."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Final

from librmq.broker._clients import Clients, QueueLocks
from librmq.broker._offsets import GroupOffsets, TableWriter
from librmq.broker._topics import Topics
from librmq.broker.config import BrokerConfig
from librmq.broker.groups import Groups
from librmq.broker.long_polling import HeldRequests
from librmq.clock import moves_by_itself
from librmq.errors import (
    BrokerDamageError,
    BrokerDiskFullError,
    BrokerError,
    BrokerStoreFullError,
    BrokerUnreachableError,
    CorruptionError,
    DiskFullError,
    FlushFailedError,
    MessageIllegalError,
    RmqError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreIOError,
)
from librmq.files.interface import is_full
from librmq.message.delays import level_of_queue_id
from librmq.message.lag import queue_lag
from librmq.message.properties import PropertyName
from librmq.message.topics import (
    WAITING_TOPICS,
    SystemTopic,
    TopicPrefix,
    has_no_row,
    is_own_group,
    receive_retry_topic,
    validate_queue,
)
from librmq.protocol import CopiedTables, ResponseCode, Watchers
from librmq.runtime import Runner, Step
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Inherited
from librmq.runtime.runner import Aside, aside_by
from librmq.scheduling.waiting import Cancellations, destination_of
from librmq.store import BrokerTables, MessageStore
from librmq.store.format.broker_tables import ConfigTable, DelayedSave, unlisted_topics

if TYPE_CHECKING:
    from librmq.filter import Registrations
    from librmq.metrics import Metrics


_log = EventLog("librmq.broker")

_FILTERS_S: Final = 10
"""Time from the first unsaved change of filters to saving all of them."""
NEVER: Final = -1
"""In place of a time to wait for a repair: until a person repairs the store, or moves the group's progress."""


def _rests(now_ms: int) -> None:
    """Do nothing, as a step whose work is not made yet."""


@dataclass(eq=False, repr=False, kw_only=True)
class BrokerContext:
    """One broker's names, settings and store, its tables and the steps that save them, clients and held requests."""

    life: BrokerLife
    runner: Runner
    cluster_name: str
    config: BrokerConfig
    store: MessageStore
    metrics: Metrics | None
    tables: BrokerTables
    """The broker's files."""
    registrations: Registrations
    was_killed: bool
    """Whether the last process did not close the store, so that the progress of its last seconds is lost."""

    def __post_init__(self) -> None:
        runner, config, store, metrics, tables = self.runner, self.config, self.store, self.metrics, self.tables
        life, cluster_name, registrations = self.life, self.cluster_name, self.registrations
        self.name = name = life.name
        self.count: Callable[..., object] = nothing if metrics is None else metrics.count
        """Counts what happens to messages, by the names and labels of `librmq.metrics`; without metrics nothing."""
        self.flushing: Step | None = None
        """Flushes the store under a manual clock; otherwise a thread of the store does."""
        if not moves_by_itself(runner.clock):
            self.flushing = self.step("flushes its store", store.run_due)
        self._flush_ms = round(1000 * store.config.flush_interval_s)
        writing = self.step("writes its tables")
        aside = self.aside("writes its tables", writing)
        self.writing = TableWriter(store.flush, runner.now_ms, partial(runner.wake, writing), aside)
        writing.run_due = self.writing.saver.run_due
        holding = self.step("answers held pulls")
        self.held = HeldRequests(runner.now_ms, partial(runner.wake, holding))
        holding.run_due = self.held.run_due

        def save(table: ConfigTable, now_ms: int) -> None:
            self.held.rules_changed()
            self.writing.save(table, now_ms)

        self.topics = Topics(tables.topics, save, config, name, cluster_name, runner.now_ms, life.watchers.notify)
        self.groups = Groups(tables.groups, save, config.auto_create_group, runner.now_ms)
        self.cancellations = Cancellations(store.path, store.files)  # first, because a damaged file is refused
        saving = self.step("saves progress", self._save_due)
        wake_saving, flush = partial(runner.wake, saving), None if config.replica_of is not None else store.flush
        self.offsets = GroupOffsets(
            tables, self.writing, runner.now_ms, config.save_offsets_every_s, wake_saving, flush
        )
        self._filters_saving = DelayedSave(
            "the filters of consumers", self._save_filters, runner.now_ms, _FILTERS_S, wake_saving
        )
        if config.replica_of is None and self.cancellations.truncate(store.log.end):
            self.cancellations.write(store.log.begin, runner.now_ms())
        # Progress is limited here, before transactions and the relay resume from it.
        with runner.lock:
            if unnamed := tables.offsets.unnamed():
                _log.warning(
                    "%(file)s: %(keys)d keys are no topic@group, such as %(key)s: they stay, and count for no group",
                    file=tables.offsets.path,
                    keys=len(unnamed),
                    key=repr(unnamed[0])[:80],
                )
            self.offsets.clamp(cache(lambda topic, queue_id: store.queue_range(topic, queue_id)[1]))
            if config.replica_of is None and store.queues:  # a new store has no messages
                self._add_unlisted_topics()
        self.locks = QueueLocks(round(1000 * config.lock_expiry_s), runner.now_ms)
        self.clients = Clients(
            broker_name=name,
            runner=runner,
            topics=self.topics,
            groups=self.groups,
            registrations=registrations,
            held=self.held,
            metrics=metrics,
            filters_changed=self._filters_changed,
        )
        # The topic of a group's own retries was made for it, as was the group.
        of_receives = {
            topic
            for topic in self.topics.by_name
            if topic.startswith(TopicPrefix.RETRY) and topic.removeprefix(TopicPrefix.RETRY) not in self.groups.by_name
        }
        for topic, group in self.offsets.names() if of_receives else ():
            if (retries := receive_retry_topic(group, topic)) in of_receives:
                self.clients.retry_owners[retries] = group

    def step(self, what: str, run_due: Callable[[int], int | None] = _rests) -> Step:
        """Return a step of the broker, which runs until its end; ``what`` completes its label.

        What needs the step to be made, as to wake it, gives it its ``run_due`` afterwards.
        """
        return Step(f"{self.name} {what}", run_due, self.life)

    def aside(self, what: str, step: Step) -> Aside | None:
        """Return what waits for the disk without the lock, and then wakes a step; None under a manual clock."""
        return aside_by(self.runner, f"{self.name} {what}", self.life, partial(self.runner.wake, step))

    def await_device(self, end_of: Callable[[], int] | None = None) -> None:
        """With durability "sync", wait until the device has the log up to a place, or all of it.

        The shared flush has mostly come so far already; then the place is not asked for.
        """
        store = self.store
        if store.config.durability == "sync":
            commit, end = store.writer.durability.commit, store.log.end
            if commit.flushed < end:
                commit.reach(end if end_of is None else end_of())

    def wake_flush(self) -> None:
        """Let the step that flushes the store run in time for what was stored now."""
        step = self.flushing
        assert step is not None
        at = self.runner.now_ms() + self._flush_ms
        if step.at is None or at < step.at:  # a flush of queues can be due much later
            with self.runner.lock:
                self.runner.wake(step, at)

    def _add_unlisted_topics(self) -> None:
        """Make the topics that have messages and were lost, or for which messages wait; or warn of them."""
        store, listed = self.store, self.topics.by_name
        unlisted = unlisted_topics(store.queues, store.queue_range, listed)
        if self.tables.topics.is_new:  # otherwise a deleted topic would come back
            try:
                for topic, queue_id in self._awaited_queues():
                    if topic not in listed and not has_no_row(topic):
                        with suppress(MessageIllegalError):  # no store can have such a queue
                            validate_queue(topic, queue_id)
                            unlisted[topic] = max(unlisted.get(topic, 0), queue_id + 1)
            except CorruptionError as error:
                _log.warning("the topics of some messages that wait are unknown: %(error)s", error=error)
        self.topics.add_unlisted(unlisted, self.tables.groups.rows)

    def _awaited_queues(self) -> Iterator[tuple[str, int]]:
        """Yield the queues for which messages wait, or undecided halves; some have been delivered."""
        for topic, queue_id in sorted(self.store.queues):
            if topic in (*WAITING_TOPICS, SystemTopic.HALF):
                level = level_of_queue_id(queue_id)
                begin = self.tables.delay_offset(level) if topic == SystemTopic.SCHEDULE else 0
                for message in self.store.messages(topic, queue_id, begin):
                    if (
                        PropertyName.TIMER_DELETE_KEY not in message.properties
                        and (destination := destination_of(message)).topic
                    ):
                        yield destination

    # ---- saving

    def _filters_changed(self) -> None:
        if self.tables.filters or any(True for _ in self.registrations):
            self._filters_saving.save_soon()

    def _save_filters(self) -> None:
        now_ms = self.runner.now_ms()
        self.tables.set_filters(self.registrations.to_document(now_ms)["filterDataByTopic"])
        self.writing.save(self.tables.filter_table, now_ms)

    def _save_due(self, now_ms: int) -> int | None:
        dues = self.offsets.saving.saver.run_due(now_ms), self._filters_saving.saver.run_due(now_ms)
        return min((due for due in dues if due is not None), default=None)

    def save_all(self) -> None:
        self.offsets.adopt()
        if self.tables.filters or self._filters_saving.has_changed:
            self._save_filters()
        self.writing.end_writing(self.life.why_dead)
        self.store.flush()
        self.tables.persist(self.runner.now_ms())
        if self.offsets.page is not None:
            self.offsets.page.is_in_table = True

    def copy_tables(self, tables: CopiedTables) -> None:
        """Replace the tables by a master's, except the topics. Under the runner's lock."""
        self.topics.notify_copied()
        self.groups.copy_rows(tables.groups)
        self.offsets.merge(tables.offsets)
        self.offsets.copy_starts(tables.starts)
        if self.tables.delays.replace(tables.delays):
            self.writing.save(self.tables.delays, self.runner.now_ms())
        if self.tables.schedules.replace(dict(tables.schedules)):
            self.writing.save(self.tables.schedules, self.runner.now_ms())
        if self.cancellations.replace(tables.cancelled):
            self.cancellations.write(self.store.log.begin, self.runner.now_ms())

    # ---- metrics

    def show_gauges(self, replica_count: Callable[[], int]) -> None:
        metrics = self.metrics
        if metrics is not None:
            store, held = self.store, self.held.by_queue
            metrics.gauge("held_pulls", lambda: sum(map(len, list(held.values()))), owner=self)
            metrics.gauge("replicas", replica_count, owner=self)
            metrics.gauge("log_bytes", lambda: store.log.end, owner=self)
            metrics.gauge("disk_used", lambda: store.files.used_ratio(store.path), owner=self)
            if self.config.replica_of is None:  # a replica's lags are those of its master
                metrics.observe("group_lag", self._lags, owner=self)

    def hide_gauges(self) -> None:
        if self.metrics is not None:
            self.metrics.remove_gauges(self)
            for group in self.clients.consumers:  # clients that have not left
                self.metrics.gauge("clients", None, group=group)

    def _lags(self) -> dict[tuple[str, ...], float]:
        """Return the lag of each group of users in each topic with progress, whether it has consumers or not."""
        lags: dict[tuple[str, ...], float] = {}
        with self.runner.lock:
            self.offsets.adopt()
            progress = {place: dict(offsets) for place, offsets in self.tables.progress().items()}
            queues = {name: topic.read_queues for name, topic in self.topics.by_name.items()}
        for (group, topic), offsets in progress.items():
            if topic in queues and not is_own_group(group):
                with suppress(StoreClosedError):  # the broker has ended since the reader of the metrics asked
                    lags[topic, group] = sum(
                        queue_lag(offsets.get(queue_id), *self.store.queue_range(topic, queue_id))
                        for queue_id in range(queues[topic])
                    )
        return lags


def refused_by_replica(name: str, master: str, kind: type) -> BrokerError:
    """Return the error of a request of a ``kind`` that only the ``master`` of the replica ``name`` takes."""
    return BrokerError(
        ResponseCode.SERVICE_NOT_AVAILABLE,
        f"{name} is a replica of {master} and takes no {kind.__name__}: ask {master}, or promote the replica",
    )


class BrokerPart:
    """A part of one broker, with what most parts use."""

    def __init__(self, context: BrokerContext) -> None:
        self._runner = context.runner
        self._store = context.store
        self._topics = context.topics
        self._groups = context.groups
        self._offsets = context.offsets
        self._clients = context.clients
        self._held = context.held
        self._broker_name = context.name
        self._count = context.count
        self._metrics = context.metrics


# ---- life


class BrokerLife:
    """Whether one broker answers. It owns the broker's turns, which do not run after its end."""

    is_inherited = False
    """Whether the store behind this copy is the parent's: closing the copy must leave it alone."""

    def __init__(self, name: str, path: str) -> None:
        self.dead = False
        """Whether it accepts no more calls."""
        self.was_killed = False
        self.release_lock: Callable[[], object] = nothing
        """Called in a forked child, in which no thread would release the locks of a write."""
        self.name = name
        self.path = path
        self._why = "was closed"
        self.watchers: Watchers = Watchers()
        """Notified when topics or queues have changed, and at the end."""
        _open.add(self)

    def mark_ended(self, *, was_killed: bool) -> None:
        """Note that the broker accepts no more calls, and notify its watchers. Under the runner's lock."""
        self.dead, self.was_killed = True, was_killed
        _open.discard(self)
        self.watchers.notify()

    def inherited(self) -> None:
        _open.discard(self)
        self.dead, self._why = True, "was opened before a fork: open the broker again in the child"
        self.is_inherited = True
        self.release_lock()

    @property
    def why_dead(self) -> str:
        return f"{self.path}: this handle {self._why}"

    def check_open(self) -> None:
        if self.dead:
            raise StoreClosedError(self.why_dead)

    def refusal(self, error: StoreError) -> RmqError:
        if isinstance(error, StoreClosedError):
            return BrokerUnreachableError(f"{self.name} is closed: {self.why_dead if self.dead else error}")
        kind, code = BrokerError, ResponseCode.SERVICE_NOT_AVAILABLE
        if isinstance(error, DiskFullError) or (isinstance(error, StoreIOError) and is_full(error)):
            kind = BrokerDiskFullError
        elif isinstance(error, StoreFullError):
            kind = BrokerStoreFullError
        elif isinstance(error, CorruptionError):
            kind, code = BrokerDamageError, ResponseCode.SYSTEM_ERROR
        elif not isinstance(error, FlushFailedError):
            code = ResponseCode.SYSTEM_ERROR
        return kind(code, f"{self.name}: {error}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            raise self.refusal(error) from error


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


_open: Final[Inherited[BrokerLife]] = Inherited(BrokerLife.inherited)
