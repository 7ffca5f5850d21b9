"""What a person decides about backlog: skip messages, set them aside, replay or move them; end a half message.

Each skip is recorded in ``librmq/skipped.jsonl`` of the store, a file that RocketMQ ignores. A second group can then
replay the skipped messages.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from librmq.diagnosis._lag_report import QueueLag, lag, no_progress
from librmq.diagnosis.pending import family_of_half, given_up_halves, open_halves
from librmq.diagnosis.view import Source, StoreView, viewed
from librmq.errors import (
    BrokerError,
    ConfigError,
    CorruptionError,
    MessageIllegalError,
    TransactionRefusedError,
    refused_copy,
)
from librmq.files.interface import read_replaced
from librmq.message import Message, StoredMessage, record
from librmq.message.properties import RESERVED_PROPERTIES, PropertyName
from librmq.protocol import (
    INNER_PRODUCER,
    LOCAL_HOST,
    EndTransaction,
    SendMessage,
    TopicDescription,
    TransactionState,
)
from librmq.store.format.documents import OWN_FOLDER, checked, notes_locked, with_checksum

if TYPE_CHECKING:
    from librmq.broker import Broker, StoreRoute

Policy = Literal["age", "lag", "end"]

_FILE: Final = "skipped.jsonl"
_KEPT: Final = frozenset(("KEYS", "TAGS", "UNIQ_KEY"))


class SkippedQueue(NamedTuple):
    """The messages that a policy skips in one queue."""

    queue_id: int
    """Number of the queue."""
    begin: int
    """The group's progress before."""
    end: int
    """The group's progress after."""
    first_timestamp_ms: int | None
    """Store time of the first skipped message; None if it is unreadable."""
    last_timestamp_ms: int | None
    """Store time of the last skipped message; None if it is unreadable."""


class Skip(NamedTuple):
    """A plan of a policy, or the record of a skip."""

    group: str
    topic: str
    policy: str
    """The text of the policy."""
    at_ms: int | None
    """Time of the skip; None for a plan."""
    queues: tuple[SkippedQueue, ...]
    """The skipped messages, by queue."""
    aside: str | None = None
    """The topic that the messages were copied to."""

    @property
    def messages(self) -> int:
        """The number of skipped messages."""
        return sum(queue.end - queue.begin for queue in self.queues)


class Replay(NamedTuple):
    """A plan of `replay`."""

    group: str
    topic: str
    starts: dict[int, int]
    """The queue offset of the group's first message, by queue id."""
    messages: int
    """The skipped messages that the store still has."""


def plan_skip(
    source: Source,
    group: str,
    topic: str,
    *,
    older_than: float | None = None,
    lag_above: int | None = None,
    to_end: bool = False,
    now_ms: int | None = None,
) -> Skip:
    """Return which messages of a topic a group would skip, and change nothing.

    Args:
        source: A running broker, the folder of a store, or a view of either.
        group: The consumer group.
        topic: The topic.
        older_than: Skip messages stored more than this many seconds ago, up to the first later one: progress is a
            place in a queue, so after the clock was set back older messages can be left behind it.
        lag_above: Leave this many of the newest messages in each queue.
        to_end: Skip everything.
        now_ms: The time from which the age counts; by default now for a store in use, else that of its last message.

    Raises:
        ConfigError: Not exactly one of the three is given, or the group has no progress in the topic.
        NotAStoreError: The folder holds no store.
    """
    if sum((older_than is not None, lag_above is not None, to_end)) != 1:
        raise ConfigError("plan_skip: expected one of older_than=, lag_above= and to_end=True")
    if (older_than or 0) < 0 or (lag_above or 0) < 0:
        raise ConfigError(f"plan_skip: expected 0 or more, found older_than={older_than!r}, lag_above={lag_above!r}")
    with viewed(source) as view:
        rows = list(lag(view, group=group, topic=topic, times=False))
        if not rows:
            raise no_progress(group, topic)
        queues = []
        age_from_ms = view.now_ms if now_ms is None else now_ms
        for row in rows:
            begin = row.next_offset
            end = min(max(begin, _end_offset(view, row, older_than, lag_above, age_from_ms)), row.max_offset)
            if begin < end:
                queues.append(_skipped_queue(view, row, begin, end))
        policy = "end" if to_end else f"older than {older_than:g} s" if older_than is not None else f"lag > {lag_above}"
        return Skip(group, topic, policy, None, tuple(queues))


def _end_offset(
    view: StoreView, row: QueueLag, older_than: float | None, lag_above: int | None, now_ms: int | None
) -> int:
    if lag_above is not None:
        return row.max_offset - lag_above
    if older_than is None:
        return row.max_offset
    if now_ms is None:
        return row.min_offset
    from_ms = now_ms - round(1000 * older_than)
    unread = range(row.next_offset, max(row.next_offset, row.max_offset))
    return view.store.times.first_from(view.store.queues[row.topic, row.queue_id], from_ms, unread)


def _skipped_queue(view: StoreView, row: QueueLag, begin: int, end: int) -> SkippedQueue:
    first, last = view.message(row.topic, row.queue_id, begin), view.message(row.topic, row.queue_id, end - 1)
    return SkippedQueue(
        row.queue_id, begin, end,
        None if first is None else first.store_timestamp_ms, None if last is None else last.store_timestamp_ms,
    )  # fmt: skip


def skip(broker: StoreRoute, plan: Skip) -> Skip:
    """Skip the messages of a plan, record it, and return the record. The messages stay in the store until they expire.

    Raises:
        ConfigError: The group has moved on beyond the plan: make a new one.
        BrokerError: The topic does not exist.
        BrokerUnreachableError: The broker is closed.
    """
    _check_plan(broker, plan)
    done = plan._replace(at_ms=broker.runner.now_ms())
    _record(broker, done)  # first: a record without its skip does no harm
    for queue in plan.queues:
        broker.reset_group(plan.group, plan.topic, queue.end, queue_id=queue.queue_id)
    return done


def set_aside(broker: StoreRoute, plan: Skip, topic: str) -> Skip:
    """Copy the messages of a plan to another topic, then skip them like `skip`.

    Bodies, keys, tags, unique ids and the sender's properties are kept. If the call fails halfway, some messages are
    in both topics.

    Raises:
        ConfigError: ``topic`` is the plan's own, or the group has moved on beyond the plan.
        BrokerError: A topic does not exist.
        MessageIllegalError: ``topic`` is refused.
        BrokerUnreachableError: The broker is closed.
    """
    queues = _other_topic(broker, plan, topic).write_queues
    messages = (
        message
        for queue in plan.queues
        for message in broker.store.messages(plan.topic, queue.queue_id, queue.begin, queue.end)
    )
    for number, message in enumerate(messages):
        properties = {
            name: value
            for name, value in message.properties.items()
            if name in _KEPT or name not in RESERVED_PROPERTIES
        }
        copy = Message.from_parts(topic, message.stored_body, message.flag, properties)
        host, flags = message.born_host or LOCAL_HOST, message.sys_flag & (record.COMPRESSED | record.COMPRESSION_MASK)
        request = SendMessage(INNER_PRODUCER, copy, number % queues, message.born_timestamp_ms, host, flags)
        try:
            broker.call(request)
        except (BrokerError, MessageIllegalError) as error:
            raise refused_copy(message, error) from None
    return skip(broker, plan._replace(aside=topic))


def move_to(broker: StoreRoute, plan: Skip, topic: str, *, queues: int | None = None) -> Skip:
    """Copy the messages of a plan to another topic in which the same group continues, then skip them like `skip`.

    The group's progress in ``topic`` is set to the present end, unless it has some. So a consumer that subscribes to
    both topics gets each message once, and new messages of the old topic do not wait behind the backlog. A new topic
    with more queues lets more consumers share the backlog.

    Args:
        broker: The running broker.
        plan: What to move.
        topic: The other topic.
        queues: The number of its queues if it is new; by default that of the plan's topic.

    Raises:
        ConfigError: ``topic`` is the plan's own, or the group has moved on beyond the plan.
        BrokerError: The plan's topic does not exist.
        MessageIllegalError: ``topic`` is refused.
        BrokerUnreachableError: The broker is closed.
    """
    other = _other_topic(broker, plan, topic, queues)
    offsets = broker.consumer_offsets(plan.group, topic)
    for queue_id in range(other.read_queues):
        if queue_id not in offsets:
            broker.reset_group(plan.group, topic, "end", queue_id=queue_id)
    return set_aside(broker, plan, topic)


def _other_topic(broker: StoreRoute, plan: Skip, topic: str, queues: int | None = None) -> TopicDescription:
    """Return the topic that a plan's messages go to; create it if it is new, by default with the plan's queues."""
    if topic == plan.topic:
        raise ConfigError(f"topic {topic!r}: expected another one than the plan's")
    _check_plan(broker, plan)
    topics = broker.topics()
    if topic not in topics:
        broker.create_topic(topic, queues or topics[plan.topic].write_queues)
        topics = broker.topics()
    return topics[topic]


def _check_plan(broker: StoreRoute, plan: Skip) -> None:
    now = broker.consumer_offsets(plan.group, plan.topic)
    for queue in plan.queues:
        if now.get(queue.queue_id, 0) > queue.end:
            raise ConfigError(
                f"group {plan.group!r}, {plan.topic!r}/{queue.queue_id}: the plan ends at {queue.end}, and the group "
                f"is already at {now[queue.queue_id]}: make a new plan"
            )


def plan_continue_as(source: Source, group: str, new_group: str, topic: str) -> dict[int, int]:
    """Return the queue offsets, by queue id, at which `continue_as` would start a new group; change nothing.

    Raises:
        ConfigError: The group has no progress in the topic, or the new group has some.
        NotAStoreError: The folder holds no store.
    """
    with viewed(source) as view:
        offsets = view.progress.get((group, topic))
        if not offsets:
            raise no_progress(group, topic)
        if view.progress.get((new_group, topic)):
            raise ConfigError(f"group {new_group!r} already has progress in topic {topic!r}: choose another name")
        ends = {queue_id: view.store.queue_range(topic, queue_id)[1] for queue_id in offsets}
        return {queue_id: min(queue_offset, ends[queue_id]) for queue_id, queue_offset in offsets.items()}


def continue_as(broker: Broker, group: str, new_group: str, topic: str) -> dict[int, int]:
    """Copy the progress of a group in a topic to a new group; return the queue offsets by queue id.

    Raises:
        ConfigError: The group has no progress in the topic, or the new group has some.
        MessageIllegalError: The new name is refused.
        BrokerUnreachableError: The broker is closed.
    """
    offsets = plan_continue_as(broker, group, new_group, topic)
    broker.set_group(new_group)
    for queue_id, queue_offset in offsets.items():
        broker.reset_group(new_group, topic, queue_offset, queue_id=queue_id)
    return broker.consumer_offsets(new_group, topic)


def plan_replay(source: Source, note: Skip, group: str) -> Replay:
    """Return where `replay` would start a second group, and how many messages are left for it; change nothing.

    Raises:
        ConfigError: ``group`` is the group that skipped.
        NotAStoreError: The folder holds no store.
    """
    if group == note.group:
        raise ConfigError(f"group {group!r}: expected a second group; the first would repeat what it consumed since")
    with viewed(source) as view:
        begins = {queue.queue_id: view.store.queue_range(note.topic, queue.queue_id)[0] for queue in note.queues}
    starts = {queue.queue_id: max(queue.begin, begins[queue.queue_id]) for queue in note.queues}
    return Replay(group, note.topic, starts, sum(max(0, queue.end - starts[queue.queue_id]) for queue in note.queues))


def replay(broker: StoreRoute, note: Skip, group: str) -> int:
    """Start a second group where a skip began; return the number of skipped messages that the store still has.

    The group also gets the later messages: shut it down after ``note.queues[…].end``, or let it continue. A consumer
    that must not repeat effects needs a guard, such as `librmq.dedup.DedupListener`.

    Raises:
        ConfigError: ``group`` is the group that skipped.
        BrokerError: The topic does not exist.
        MessageIllegalError: The group's name is refused.
    """
    plan = plan_replay(StoreView.over(broker.store), note, group)
    broker.set_group(group)
    for queue_id, queue_offset in plan.starts.items():
        broker.reset_group(group, note.topic, queue_offset, queue_id=queue_id)
    return plan.messages


def skipped(source: Source) -> list[Skip]:
    """Return the records of `skip`, in order.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: The file of records is damaged.
    """
    with viewed(source) as view:
        path = os.path.join(view.store.path, OWN_FOLDER, _FILE)
        notes, at = [], 0
        for line in read_replaced(view.store.files, path).splitlines(keepends=True):
            try:
                fields = json.loads(checked(path, line, at))
                queues = tuple(SkippedQueue(**queue) for queue in fields.pop("queues"))
                notes.append(Skip(**fields, queues=queues))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise CorruptionError(path, at, "config", f"expected the note of a skip: {error}") from None
            at += len(line)
        return notes


def _record(broker: StoreRoute, done: Skip) -> None:
    files, folder = broker.store.files, os.path.join(broker.store.path, OWN_FOLDER)
    path = os.path.join(folder, _FILE)
    fields = {**done._asdict(), "queues": [queue._asdict() for queue in done.queues]}
    with notes_locked(broker.store.path, files):
        note = with_checksum(json.dumps(fields, ensure_ascii=False).encode())
        files.write(path, read_replaced(files, path) + note + b"\n")


# ---- retries and halves that wait

_SYSTEM_ERROR: Final = 1


def decide_half(
    broker: StoreRoute, physical_offset: int, *, commit: bool, force: bool = False, dry_run: bool = False
) -> None:
    """Commit or roll back a half message that checks have discarded, with ``force`` also one that is still checked.

    Args:
        broker: The running broker.
        physical_offset: The place in a result of `given_up`.
        commit: Whether to deliver or to drop the message.
        force: Whether ``physical_offset`` may be that of an open half of a store at rest, whose producer group gives no
            answer any more.
        dry_run: Only refuse what can't be decided.

    Raises:
        TransactionRefusedError: There is no such half message at this place, it was already decided, or the log no
            longer has it.
        BrokerUnreachableError: The broker is closed.
    """
    store = broker.store
    half = next(
        (candidate for candidate in given_up_halves(store) if candidate.physical_offset == physical_offset), None
    )
    if half is None:
        half = _checked_half(broker, physical_offset, force)
        family = [half]
    else:
        family = family_of_half(store, half)
    if not family:
        raise TransactionRefusedError(
            _SYSTEM_ERROR, f"the log no longer has the half of {half.message_id}: send the message again instead"
        )
    last = family[-1]
    state = TransactionState.COMMIT if commit else TransactionState.ROLLBACK
    group = half.properties.get(PropertyName.PRODUCER_GROUP, "")
    if not dry_run:
        broker.call(EndTransaction(group, state, last.queue_offset, last.physical_offset, last.message_id))


def _checked_half(broker: StoreRoute, physical_offset: int, force: bool) -> StoredMessage:
    """Return the open half at a place, which checks still ask about; refuse it without ``force``."""
    halves = (half for _, half in open_halves(broker.store, broker.tables))
    half = next((half for half in halves if half.physical_offset == physical_offset), None)
    if half is None:
        raise TransactionRefusedError(
            _SYSTEM_ERROR,
            f"physical offset {physical_offset}: expected an undecided half that was given up, as "
            "`librmq pending --kind given_up` lists",
        )
    if not force:
        raise TransactionRefusedError(
            _SYSTEM_ERROR,
            f"physical offset {physical_offset}: checks still ask the producer group about this half; if no producer "
            "will answer, `librmq decide --force` decides it in a store that no process uses",
        )
    return half
