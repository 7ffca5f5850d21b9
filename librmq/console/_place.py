"""The place that a console shows: a broker of this process, a shared store, a cluster, or a folder that is at rest.

Each page opens the views that it needs and closes them: a view is one moment. Where a broker runs elsewhere its numbers
come by requests, and what only the log can tell from the folder, if it is on this machine. Of many messages
it reads the newest.

By requests, a story has the records that the brokers find by the message's unique id, and the progress of groups. What
waits is what the delay levels hold, which the brokers' own levels could make longer than the default ones that are
taken here, and the newest messages of RocketMQ 5's timer.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

from librmq import SharedBroker
from librmq.broker import AdministeredRoute, Broker, StoreRoute
from librmq.clock import Clock, SystemClock
from librmq.config import wrong_kind
from librmq.diagnosis import ClusterView, GivenUpMessage, PendingMessage, StoreView, StoryEvent, View
from librmq.diagnosis.deadletters import given_up
from librmq.diagnosis.pending import pending_of, scheduled
from librmq.errors import BrokerError, BrokerUnreachableError, ConfigError, CorruptionError
from librmq.formatting import number
from librmq.java.json import NumberColumns
from librmq.java.lang import java_int
from librmq.message import DEFAULT_LEVELS, MessageQueue, StoredMessage, dead_letter_topic, retry_topic
from librmq.message.delays import delete_key
from librmq.message.properties import PropertyName, cause_of
from librmq.message.topics import SystemTopic, TopicPrefix
from librmq.protocol import QueryMessages, ResponseCode
from librmq.scheduling.waiting import own_time_ms
from librmq.store import BrokerTables, MessageStore
from librmq.store.format import directory
from librmq.wire.remote import RemoteRoute
from librmq.wire.share_links import OwnedStore, connect_to_sharing

_MUCH: Final = 1 << 20
"""Bytes of saved progress above which no page asks its owner for all of it."""

_MANY_QUEUES: Final = 1_000
_PARTS: Final = ("commitlog", "consumequeue", "index", "checkpoint")


class _Kept(NamedTuple):
    """The progress of a million groups and topics, of which each page would else make columns again."""

    version: object
    columns: NumberColumns
    tables: BrokerTables


class Place:
    """A route, a folder, or both. Thread-safe."""

    def __init__(self, place: AdministeredRoute | str | os.PathLike[str], folder: str | None = None) -> None:
        """``folder`` is that of the store behind a route, where it is on this machine."""
        self.route: AdministeredRoute | None = None
        self.folder = folder
        if isinstance(place, str | os.PathLike):
            self.folder = os.fspath(place)
        elif isinstance(place, AdministeredRoute):
            self.route = place
            if isinstance(place, SharedBroker):
                self.folder = place.path
        else:
            raise wrong_kind("console", place, "a Broker, what share or connect returned, a Cluster, or a folder")
        self.clock: Clock = SystemClock() if self.route is None else self.route.runner.clock
        self._extent: tuple[int, int] | None = None
        self._kept: _Kept | None = None
        self.is_at_rest: bool = False
        """Whether no process had the store open for writing at the last view, so that nothing flows."""

        self.unknown: list[str] = []
        """Why progress was unknown at the last view of the folder, and what to do."""

        self.missing: list[str] = []
        """What the folder's store is short of, as commands say it."""
        self._missing_at: object = None

        self.unanswered: str = ""
        """Why the broker beside the folder did not answer when it was last asked; empty if it did."""

    @property
    def broker(self) -> Broker | None:
        """The broker, if it is in this process."""
        return self.route if isinstance(self.route, Broker) else None

    @property
    def title(self) -> str:
        """What the pages are about."""
        if self.folder is not None:
            return self.folder
        return self.broker.store.path if self.broker is not None else ", ".join(self.acting().broker_names())

    @property
    def has_log(self) -> bool:
        """Whether the log can be read here."""
        return self.folder is not None or self.broker is not None

    def acting(self) -> AdministeredRoute:
        """Return the route to the brokers."""
        if self.route is None:
            raise ConfigError(f"{self.folder}: no broker has this store open, so nothing can be changed here")
        return self.route

    @contextmanager
    def view(self, at_ms: int | None = None) -> Iterator[View[Any]]:
        """View topics, groups and progress as the brokers have them now, or the store as it was at a time."""
        if self.route is not None and self.broker is None and at_ms is None and not self.has_much_progress:
            yield ClusterView(self.route, self.folder)
            self.unanswered = ""
        else:
            with self.log(at_ms) as view:
                yield view

    @contextmanager
    def log(self, at_ms: int | None = None, *, asks_owner: bool = False) -> Iterator[StoreView]:
        """View the store with its log, now or as it was at a time.

        With ``asks_owner`` topics, groups and progress are those that the process which shares the store has now, not
        those that it has saved.

        Raises:
            ConfigError: The log is on another machine, or the time is before its first message.
        """
        broker = self.broker
        if broker is not None and at_ms is None:
            view = StoreView.of(broker)
            self._note_extent(view)
            with self._keeping(view, view.progress_version):
                yield view
            return
        folder, files = (self.folder, None) if broker is None else (broker.store.path, broker.store.files)
        if folder is None:
            raise ConfigError("this needs the folder of the store, which is on the machine of the broker")
        if at_ms is None:
            version, cache = _state_of(os.path.join(folder, directory.CONFIG)), self._kept
            with ExitStack() as opened:
                owner = self._answering(opened) if asks_owner else None
                if owner is not None:
                    yield opened.enter_context(StoreView.open(folder, tables=owner.tables, route=owner))
                    return
            tables = cache.tables if cache is not None and cache.version == version else None
            route = self.route if asks_owner and self.has_much_progress else None  # it is asked for all but that
            with StoreView.open(folder, tables=tables, route=route) as view:
                self._note_extent(view)
                with self._keeping(view, version):
                    yield view
                if (damage := view.store.log.unreadable) is not None:
                    what = f"the record at {damage.offset} is damaged: {damage.what}"
                    self.missing += [what] if what not in self.missing else []
            return
        moment = datetime.fromtimestamp(at_ms / 1000, UTC)
        with MessageStore.open(folder, read_only=True, files=files, at=moment) as store:
            yield StoreView.over(store)

    def live(self, at_ms: int | None, most_groups: int) -> AbstractContextManager[StoreView | ClusterView]:
        """View the log, with the instances that its owner knows; of a cluster without a log so many groups."""
        if self.has_log:
            return self.log(at_ms, asks_owner=True)
        return nullcontext(ClusterView(self.acting(), most_groups=most_groups))

    @contextmanager
    def beside(self, view: View[Any], *, asks_owner: bool = False) -> Iterator[View[Any]]:
        """View the log behind a view, as `log` does; the view itself if it has the log, or if no log is here."""
        if isinstance(view, StoreView) or not self.has_log:
            yield view
        else:
            with self.log(asks_owner=asks_owner) as log:
                yield log

    @property
    def has_much_progress(self) -> bool:
        """Whether the progress of a broker elsewhere is shown as it was last saved, because there is so much of it."""
        if self.folder is None or self.route is None or self.broker is not None:
            return False
        path = os.path.join(self.folder, directory.CONFIG, "consumerOffset.json")
        return os.path.isfile(path) and os.path.getsize(path) > _MUCH

    @property
    def can_own(self) -> bool:
        """Whether `owner` returns the store: its broker is in this process, or answers beside its folder."""
        return self.broker is not None or (self.route is not None and self.folder is not None)

    @contextmanager
    def owner(self) -> Iterator[StoreRoute]:
        """Return the store with its broker, in this process or in the one that has the folder open.

        Raises:
            ConfigError: The store is on another machine.
            BrokerUnreachableError: The broker does not answer.
        """
        if self.broker is not None:
            yield self.broker
            return
        if self.route is None or self.folder is None:
            raise ConfigError("this needs the folder of the store beside its broker")
        with ExitStack() as opened:
            sharing = None if isinstance(self.route, RemoteRoute) else connect_to_sharing(self.folder)
            route = self.route if sharing is None else opened.enter_context(sharing)
            if not isinstance(route, RemoteRoute) or len(route.broker_names()) != 1:
                raise BrokerUnreachableError(f"{self.folder}: expected one broker that has this store open")
            yield OwnedStore(self.folder, route, opened)

    def _answering(self, opened: ExitStack) -> StoreRoute | None:
        """Return the process that has the folder open, with its tables of this moment; None if none answers."""
        if not self.can_own or self.has_much_progress:
            return None
        try:
            owner = opened.enter_context(self.owner())
            _ = owner.tables  # of this moment
            self.unanswered = ""
            return owner
        except BrokerUnreachableError as error:
            self.unanswered = str(error)
            return None

    @contextmanager
    def _keeping(self, view: StoreView, version: object) -> Iterator[None]:
        """Give a view the columns that an earlier one made of the same progress, or keep those that it makes."""
        cache = self._kept
        if cache is not None:
            view.earlier_columns = cache.columns
            if cache.version == version:
                view.progress_columns = cache.columns
        yield
        columns = vars(view).get("progress_columns")
        if not view.is_live and view.tables.offsets.has_rows:
            self._kept = None  # the rows of a million groups and topics take too much memory to stay
        elif columns is not None:  # else the progress is little, or was not asked for
            self._kept = _Kept(version, columns, view.tables)

    @property
    def extent(self) -> tuple[int, int] | None:
        """The times between which the store can be shown; None without a log, a message or a view so far."""
        if self._extent is None or self.route is None:
            return self._extent
        return self._extent[0], max(self._extent[0], self.clock.now_ms())

    def find_extent(self) -> None:
        """Read `extent`, if no view of the present has noted it."""
        if self._extent is None and self.has_log:
            with self.log():
                pass

    def _note_extent(self, view: StoreView) -> None:
        self.is_at_rest = view.owner is None
        if self.route is None:  # else its broker says them
            reasons = (view.unknown_progress, view.unknown_delays, view.unknown_groups)
            self.unknown = [reason for reason in reasons if reason is not None]
        store, log = view.store, view.store.log
        parts = (os.path.join(store.path, name) for name in _PARTS)
        marks = log.end, *(os.stat(path).st_mtime_ns if os.path.exists(path) else 0 for path in parts)
        if not self._missing_at and not log.gaps and len(store.queues) > _MANY_QUEUES and store.cut_short is None:
            self._missing_at = "the second look"  # the first one does not wait for a look at each queue's files
        elif marks != self._missing_at:
            self.missing = [directory.told(damage) for damage in store.condition.damage]
            self._missing_at = marks
        first_ms = log.first_store_timestamp_ms(log.begin) if log.begin < log.end else None
        if first_ms is not None and view.now_ms is not None:
            self._extent = first_ms, max(first_ms, view.now_ms)


class Look(NamedTuple):
    """What a page is about, and what it may show."""

    place: Place
    bodies: bool
    """Whether bodies of messages are shown."""
    allow_changes: bool
    """Whether pages offer changes."""


def _state_of(folder: str) -> tuple[tuple[str, int, int, int], ...]:
    """Return what differs as soon as a file below a folder is replaced or written: each file's node, size and time."""
    states = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            with suppress(FileNotFoundError):  # which its owner has just replaced
                state = os.stat(path)
                states.append((path, state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(sorted(states))


# ---- walks over queues, and what brokers answer

QUEUES: Final = 25
"""Queues that are read; of more those with the newest messages."""


def freshest(view: View[Any], runs: dict[Any, range]) -> dict[Any, range]:
    """Return the queues that a page reads: of many, those with the newest messages."""
    if len(runs) <= QUEUES:
        return runs
    return dict(heapq.nlargest(QUEUES, runs.items(), key=lambda run: view.stored_at(run[0], run[1].stop - 1) or 0))


def backwards(view: View[Any], runs: Mapping[Any, range]) -> Iterator[tuple[Any, StoredMessage]]:
    """Yield the messages of some queues, the newest first, each with its queue."""

    def of_queue(queue: Any, ids: range) -> Iterator[tuple[Any, StoredMessage]]:
        for message in queue_backwards(view, queue, ids, len(ids)):
            yield queue, message

    walks = (of_queue(queue, ids) for queue, ids in runs.items())
    return heapq.merge(*walks, key=lambda item: -item[1].store_timestamp_ms)


def newest_letters(view: View[Any], group: str) -> list[tuple[StoredMessage, GivenUpMessage]]:
    """Return the newest dead letters of a group, `LETTERS` at most, the last one first."""
    times = view.resent_times
    runs = {queue: ids for queue, ids in view.queues(dead_letter_topic(group)).items() if ids}
    newest = islice(backwards(view, freshest(view, runs)), LETTERS)
    return [(message, given_up(group, message, times)) for _, message in newest]


def queue_backwards(view: View[Any], queue: Any, ids: range, limit: int) -> Iterator[StoredMessage]:
    """Yield the messages of a queue, the newest first, about ``limit`` of them."""
    end = ids.stop
    while end > ids.start and ids.stop - end < limit:
        begin = max(ids.start, end - min(limit, 32))
        yield from reversed(_readable(view, queue, range(begin, end)))
        end = begin


def _readable(view: View[Any], queue: Any, offsets: range) -> list[StoredMessage]:
    """Return the messages of a queue without damaged ones, which the place tells."""
    try:
        return list(view.messages(queue, offsets))
    except CorruptionError as error:
        if not isinstance(view, StoreView):
            raise
        if len(offsets) == 1:
            view.store.log.leave_out(error)
            return []
    return [message for at in offsets for message in _readable(view, queue, range(at, at + 1))]


NOT_IN_STORY: Final = (
    "By requests to the brokers. Checks of a transaction, what POP did, filters, cancellations and traces need the "
    "log: give the console the folder of the store."
)
NOT_WAITING: Final = (
    "By requests to the brokers: what waits in a delay level, by the default delays, and among the newest messages of "
    "the timer. Halves, the relay and POP need the log: give the console the folder of the store, or run librmq "
    "pending on the broker's machine."
)
_Event = Literal["stored", "half", "delayed", "retried", "dead", "passed", "not_passed"]
_BEFORE_DELIVERY: Final = (SystemTopic.SCHEDULE, SystemTopic.TIMER, SystemTopic.HALF)
_MOST_RECORDS: Final = 64
LETTERS: Final = 500
"""Dead letters of a group that a page looks at."""


def story_by_requests(route: AdministeredRoute, message: StoredMessage) -> list[StoryEvent]:
    """Return the records of a message in order of their times, then its end in each group of its topic."""
    sent_to = message.properties.get(PropertyName.RETRY_TOPIC) or message.topic
    if sent_to in _BEFORE_DELIVERY:
        sent_to = message.properties.get(PropertyName.REAL_TOPIC, sent_to)
    groups = route.groups_of(sent_to)
    topics = {sent_to: "", **dict.fromkeys(_BEFORE_DELIVERY, "")}
    topics |= {name: group for group in groups for name in (retry_topic(group), dead_letter_topic(group))}
    records = [
        (broker, record, group) for topic, group in topics.items() for broker, record in _records(route, topic, message)
    ]
    records.sort(key=lambda entry: (entry[1].store_timestamp_ms, entry[1].physical_offset))
    events = [_event(record, _kind(record), group, record.store_timestamp_ms) for _, record, group in records]
    dead = {group for _, record, group in records if record.topic.startswith(TopicPrefix.DEAD_LETTER)}
    for group in groups:
        progress = route.progress(group)
        for broker, record, _ in records:
            at = progress.get(MessageQueue(record.topic, broker, record.queue_id))
            if at is not None:
                end: _Event = "passed" if at.queue_offset > record.queue_offset else "not_passed"
                note = f"its progress is {number(at.queue_offset)}"
                events.append(_event(record, "dead" if group in dead else end, group, None, note))
    return events


def _records(route: AdministeredRoute, topic: str, message: StoredMessage) -> Iterator[tuple[str, StoredMessage]]:
    """Yield the records of a message in a topic, each with its broker."""
    key = message.unique_key
    for broker in route.broker_names() if key else ():
        try:
            answer = route.endpoint(broker).call(QueryMessages(topic, key or "", _MOST_RECORDS, is_unique=True))
        except BrokerError as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            continue
        yield from ((broker, record) for record in answer if record.unique_key == key)


def _kind(record: StoredMessage) -> _Event:
    kinds: dict[str, _Event] = {
        SystemTopic.SCHEDULE: "delayed", SystemTopic.TIMER: "delayed", SystemTopic.HALF: "half",
    }  # fmt: skip
    if record.topic.startswith(TopicPrefix.RETRY):
        return "retried"
    return "dead" if record.topic.startswith(TopicPrefix.DEAD_LETTER) else kinds.get(record.topic, "stored")


def _event(record: StoredMessage, kind: _Event, group: str, at_ms: int | None, note: str | None = None) -> StoryEvent:
    if note is None and at_ms is not None:
        notes = {
            "dead": lambda: cause_of(record.properties, record.reconsume_times),
            "retried": lambda: f"attempt {record.reconsume_times + 1}",
            "delayed": lambda: f"for topic {record.properties.get(PropertyName.REAL_TOPIC, '')}",
        }
        note = notes[kind]() if kind in notes else ""
    place = record.topic, record.queue_id, record.queue_offset, record.physical_offset
    return StoryEvent(at_ms, kind, *place, group or None, note or "", record.unique_key)


def waiting_by_requests(view: View[Any], now_ms: int, limit: int) -> list[tuple[PendingMessage, StoredMessage | None]]:
    """Return what waits of the ``limit`` newest messages of each delay level and of the timer, sorted by time."""
    waiting: list[tuple[PendingMessage, StoredMessage | None]] = []
    for queue, offsets in view.queues(SystemTopic.SCHEDULE).items():
        # The messages of a level become due in the order of its queue, so the last ones are those that wait.
        for message in queue_backwards(view, queue, offsets, limit):
            level = java_int(message.properties.get(PropertyName.DELAY, "")) or queue.queue_id + 1
            due_ms = message.store_timestamp_ms + DEFAULT_LEVELS.delay_ms(level)
            if due_ms <= now_ms:
                break
            waiting.append((pending_of("delay", due_ms, message), message))
    for queue, offsets in view.queues(SystemTopic.TIMER).items():
        # Known are those that a later record has cancelled, or stored again for the next part of its time.
        replaced_keys = set[str | None]()
        for message in queue_backwards(view, queue, offsets, limit):
            cancelled = message.properties.get(PropertyName.TIMER_DELETE_KEY)
            key, target = message.unique_key, message.properties.get(PropertyName.REAL_TOPIC, "")
            due_ms = own_time_ms(message) or 0
            is_last = key is None or replaced_keys.isdisjoint((key, delete_key(target, key)))
            if cancelled is None and is_last and due_ms > now_ms and not target.startswith(TopicPrefix.REVIVE):
                waiting.append((pending_of("timer", due_ms, message), message))
            replaced_keys.add(cancelled or key)
    if isinstance(view, ClusterView) and "schedule" not in kinds_not_asked(view):
        waiting += ((pending, None) for pending in scheduled(view.route.schedules()))
    return sorted(waiting, key=lambda waits: waits[0].due_ms or 0)


def kinds_not_asked(view: View[Any]) -> tuple[str, ...]:
    """Return the kinds of waiting messages for which no request asks; RocketMQ's protocol has no schedules."""
    is_remote = not isinstance(view, ClusterView) or isinstance(view.route, RemoteRoute)
    return ("half", "given_up", "pop", *(("schedule",) if is_remote else ()))
