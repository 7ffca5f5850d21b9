"""Running instances of consumer groups: which message holds their progress and where, and whether they agree.

An unconsumed message holds the progress of its queue, even if later ones are consumed. The instances of a running
broker report what they hold and where their listeners are; for a folder only the place and the message are known. An
agreement between instances, and an owner of each queue, are known only to a running broker or a cluster.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from librmq.broker import GroupConnections
from librmq.broker.groups import TopicDifference, comparable, group_differences
from librmq.diagnosis._findings import Finding, Thresholds, cut_evidence, grouped, sample_evidence
from librmq.diagnosis._lag_report import Lag, QueueLag, is_uneven, lag
from librmq.diagnosis.view import LiveSource, LiveView, StoreView, viewed_live
from librmq.errors import CorruptionError
from librmq.formatting import duration, id_ranges, innermost_frame
from librmq.message import MessageQueue
from librmq.message.topics import TopicPrefix, is_own_group
from librmq.protocol import PERM_READ, HeldQueue, InstanceState, ListenerCall, MessageModel
from librmq.runtime.event_log import counted

States = Mapping[str, InstanceState | None]
_SAMPLED: Final = 1000
_SHORT: Final = 3  # frames
_SOON_S: Final = 10.0
"""Time in which a healthy group takes the messages of a burst."""


class HeldProgress(NamedTuple):
    """A queue of a group with messages to consume, and what holds back its progress."""

    group: str
    topic: str
    """The topic of the queue."""
    queue_id: int
    """Number of the queue."""
    lag: int
    """Number of unconsumed messages."""
    stored_offset: int | None
    """The broker's progress; None without any."""
    consumed_offset: int | None
    """The instance's progress in memory, which is stored soon; None if unknown."""
    message_id: str | None
    """The message at the progress; None if it can't be read."""
    oldest_timestamp_ms: int | None
    """Store time of the oldest unconsumed message; None if it is unreadable."""
    failures: int | None
    """The group's failed attempts at that message; None if unknown."""
    client_id: str | None
    """The instance that has the queue; None without one, or if unknown."""
    held_s: float | None
    """Seconds for which a listener has had the message; None without one, or if unknown."""
    thread: str | None
    """The name of the listener's thread; None without one, or if unknown."""
    stack: tuple[str, ...]
    """The place of the listener, the outermost call first; empty if unknown."""
    behind: int | None
    """Later messages that the instance holds; None if unknown."""
    broker_name: str = ""
    """The broker of the queue; empty if there is only one."""
    keys: str = ""
    """The keys of the message; empty without any, or if it can't be read."""

    @property
    def place(self) -> str:
        """The innermost frame of the application's own code, or the innermost one if there is none; empty without."""
        return innermost_frame(self.stack)


def held_progress(source: LiveSource, *, group: str | None = None) -> list[HeldProgress]:
    """Return every queue with messages to consume, and what holds back its progress, the longest held first.

    Args:
        source: A running broker, a share, a cluster, the folder of a store, or a view of one.
        group: Only this group.

    Raises:
        NotAStoreError: The folder holds no store.
        CorruptionError: A file is damaged.
    """
    with viewed_live(source) as view:
        held = [queue for _, _, queues in _held_by_group(view, lag(view, group=group)) for queue in queues]
        return sorted(held, key=_longest_first)


def _longest_first(queue: HeldProgress) -> tuple[object, ...]:
    return -(queue.held_s or 0), -queue.lag, queue.group, queue.topic, queue.queue_id


def _held_by_group(view: LiveView, group_lag: Lag) -> Iterator[tuple[str, list[InstanceState], list[HeldProgress]]]:
    """Yield each group that has messages to consume, with its instances and the queues of these messages."""
    rows = (row for row in group_lag.by_broker() if row[1].lag)
    for name, rows_of_group in grouped(rows, lambda row: row[1].group).items():
        states = [state for state in instances(view, name).values() if state is not None]
        yield name, states, sorted(_held_queues(view, states, rows_of_group), key=_longest_first)


def instances(view: LiveView, group: str) -> States:
    """Return what instances say; those that the broker of this process would ask over a connection are left out."""
    is_here = isinstance(view, StoreView) and view.route is view.broker
    return view.states(group, timeout_s=0) if is_here else view.states(group)


def _held_queues(
    view: LiveView, states: list[InstanceState], rows: list[tuple[str, QueueLag]]
) -> Iterator[HeldProgress]:
    names = ("",) if view.route is None else view.route.broker_names()
    queues: dict[MessageQueue, tuple[InstanceState, HeldQueue]] = {}
    calls: dict[tuple[MessageQueue, int], ListenerCall] = {}
    for state in states:
        queues |= {held.queue: (state, held) for held in state.queues}
        calls |= {(call.queue, call.queue_offset): call for call in state.listeners}
    for broker_name, row in rows:
        queue = MessageQueue(row.topic, broker_name or names[0], row.queue_id)
        owner = queues.get(queue)
        if owner is None:
            yield _held_in_folder(view, queue, row, broker_name)
        else:
            yield _held_by_instance(view, queue, row, calls, *owner)._replace(broker_name=broker_name)


def _held_in_folder(view: LiveView, queue: MessageQueue, row: QueueLag, broker_name: str = "") -> HeldProgress:
    message = view.message_of(queue, row.next_offset)
    return HeldProgress(
        group=row.group, topic=row.topic, queue_id=row.queue_id, lag=row.lag, stored_offset=row.consumer_offset,
        consumed_offset=None, message_id=None if message is None else message.message_id,
        oldest_timestamp_ms=row.oldest_timestamp_ms, failures=None if message is None else message.reconsume_times,
        client_id=None, held_s=None, thread=None, stack=(), behind=None, broker_name=broker_name,
        keys="" if message is None else " ".join(message.keys),
    )  # fmt: skip


def _held_by_instance(
    view: LiveView, queue: MessageQueue, row: QueueLag, calls: dict[tuple[MessageQueue, int], ListenerCall],
    state: InstanceState, held: HeldQueue,
) -> HeldProgress:  # fmt: skip
    at = held.progress if held.first is None else held.first
    message = None if at is None else view.message_of(queue, at)
    call = None if held.first is None else calls.get((queue, held.first))
    waits_for_thread = call is None and bool(state.listeners) and not state.is_orderly
    since_ms = None if waits_for_thread else held.first_since_ms
    return HeldProgress(
        group=row.group, topic=row.topic, queue_id=row.queue_id, lag=row.lag, stored_offset=row.consumer_offset,
        consumed_offset=at, message_id=held.first_message_id or (None if message is None else message.message_id),
        oldest_timestamp_ms=None if message is None else message.store_timestamp_ms, failures=held.first_failures,
        client_id=state.client_id, held_s=view.age_s(since_ms), thread=None if call is None else call.thread,
        stack=() if call is None else call.stack, behind=max(0, held.waiting + held.running - 1),
        keys="" if message is None else " ".join(message.keys),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- findings


def stuck_findings(view: LiveView, limits: Thresholds, group_lag: Lag) -> Iterator[Finding]:
    """Yield the messages that hold progress, and common places of the threads of a group's listeners.

    A folder shows only the keys of its messages: of one queue that lags, whether most have one key.
    """
    if view.route is None:
        assert isinstance(view, StoreView)
        yield from _hot_key_findings(view, group_lag, limits)
        return
    for group, states, held in _held_by_group(view, group_lag):
        if not limits.own and is_own_group(group):
            continue
        stuck = grouped((queue for queue in held if _is_stuck(queue, limits)), lambda queue: queue.topic)
        yield from map(_stuck_message, stuck.values())
        yield from _listener_findings(view, group, states, held, limits)
        yield from _hot_queue_findings(view, states, [queue for queue in held if queue.topic not in stuck], limits)


def _is_stuck(queue: HeldProgress, limits: Thresholds) -> bool:
    return queue.held_s is not None and (queue.held_s > limits.stuck_s or (queue.failures or 0) >= limits.retries)


def _name(broker_name: str, queue_id: int) -> str:
    return f"{broker_name} {queue_id}".strip()


def _stuck_message(held: list[HeldProgress]) -> Finding:
    """Return the finding about the queues of a group and topic that messages hold, the longest held first."""
    longest, queue_ids = held[0], [queue.queue_id for queue in held]
    where = f" in thread {longest.thread}, at {innermost_frame(longest.stack)}" if longest.stack else ""
    failed = f", after {longest.failures} failures" if longest.failures else ""
    return Finding(
        "stuck-message", "error", f"group {longest.group}, topic {longest.topic}",
        f"In queue {_name(longest.broker_name, longest.queue_id)} a listener has had message "
        f"{longest.keys or longest.message_id} for {duration(longest.held_s or 0)}{where}{failed}; "
        f"{counted(longest.behind or 0, 'held message')} behind it."
        + f" In {counted(len(held) - 1, 'more queue')} it is alike." * (len(held) > 1),
        {"queue_id": longest.queue_id, "queues": len(held), "queue_ids": id_ranges(queue_ids),
         **cut_evidence(id_ranges(queue_ids).endswith("…")), "queue_offset": longest.consumed_offset,
         "stored_offset": longest.stored_offset, "message_id": longest.message_id, "keys": longest.keys or None,
         "held_s": longest.held_s,
         "failures": longest.failures, "client_id": longest.client_id, "thread": longest.thread,
         "stack": list(longest.stack), "held_behind": longest.behind, "lag": longest.lag},
        "Check that place of the listener: give its wait a timeout, or lower consume_timeout.",
    )  # fmt: skip


def _listener_findings(
    view: LiveView, group: str, states: list[InstanceState], held: list[HeldProgress], limits: Thresholds
) -> Iterator[Finding]:
    """Yield the common places of the listeners of a group with backlog."""
    waiting = sum(queue.lag for queue in held)
    push = [state for state in states if state.kind == "push"]
    if waiting <= limits.normal_lag or not push:
        return
    calls = [call for state in push for call in state.listeners]
    places = Counter(call.stack[-_SHORT:] for call in calls if call.stack)
    running, threads = sum(state.running or 0 for state in push), sum(state.threads for state in push)
    evidence = {"lag": waiting, "listeners_running": running, "threads": threads, "instances": len(push)}
    paused = [state.client_id for state in push if state.is_paused]
    if paused:
        yield Finding(
            "paused", "warning", f"group {group}",
            f"Paused: {counted(len(paused), 'instance')}, while {waiting:,} messages wait.",
            {**evidence, "client_ids": paused}, "Call consumer.resume().",
        )  # fmt: skip
    if places and len(calls) > 1:
        place, count = places.most_common(1)[0]
        if count > 1 and 2 * count > len(calls):
            stack = next(call.stack for call in calls if call.stack[-_SHORT:] == place)
            yield Finding(
                "listeners-at-one-place", "warning", f"group {group}",
                f"{count} of {len(calls)} running listeners are at one place, "
                f"{innermost_frame(stack)}: they all wait for something slow.",
                {**evidence, "count": count, "stack": list(place)},
                "Check what that line waits for: a database, a lock, another service. More threads or consumers add "
                "to its load.",
            )  # fmt: skip
            return
    is_burst = all((view.age_s(queue.oldest_timestamp_ms) or 0) <= _SOON_S for queue in held)
    if (
        not running
        and None not in [state.running for state in push]
        and not paused
        and not is_burst
        and not any(queue.behind or queue.held_s is not None for queue in held)
    ):
        yield Finding(
            "idle-with-backlog", "warning", f"group {group}",
            f"All listeners are idle though {waiting:,} messages wait.", evidence,
            "Check whether progress is stored, whether queues have an owner, and whether filters exclude the rest.",
        )  # fmt: skip
    elif running and running >= threads:
        yield Finding(
            "too-few-threads", "warning", f"group {group}",
            f"No thread of {counted(len(push), 'instance')} is free, {threads} work at different places, and "
            f"{waiting:,} messages wait.",
            evidence, "Try more threads or instances; if that does not help, the service that they call is the limit.",
        )  # fmt: skip


def _hot_queue_findings(
    view: LiveView, states: list[InstanceState], held: list[HeldProgress], limits: Thresholds
) -> Iterator[Finding]:
    """Yield the topics of which one queue lags, with the cause if it is known."""
    for topic, queues in grouped(held, lambda queue: queue.topic).items():
        largest, total = max(queues, key=lambda queue: queue.lag), sum(queue.lag for queue in queues)
        if is_uneven(view, topic, largest.lag, total, limits):
            state = next((state for state in states if state.client_id == largest.client_id), None)
            yield _uneven_lag(view, largest, total, state, limits)


def _hot_key_findings(view: StoreView, group_lag: Lag, limits: Thresholds) -> Iterator[Finding]:
    """Yield the topics of a folder of which one queue lags, with the key that most of its messages have."""
    for columns, topic_lag in zip(group_lag.topics, group_lag.by_topic(), strict=True):
        is_wanted = limits.own or not is_own_group(topic_lag.group)
        largest = topic_lag.most_in_one_queue
        if is_wanted and is_uneven(view, topic_lag.topic, largest, topic_lag.lag, limits):
            row = next(queue for queue in columns.rows() if queue.lag == largest)
            queue = MessageQueue(row.topic, "", row.queue_id)
            yield _uneven_lag(view, _held_in_folder(view, queue, row), topic_lag.lag, None, limits)


def _uneven_lag(
    view: LiveView, queue: HeldProgress, total: int, state: InstanceState | None, limits: Thresholds
) -> Finding:
    """Return the finding about a queue that lags more than the others of its topic, by its cause.

    ``state`` is the instance that has the queue, if known. Without a known cause, the finding is ``uneven-lag``.
    """
    key, share, looked_at = _most_frequent_key(view, queue)
    if key is not None and share >= limits.key_share:
        kind = "hot-key"
        what = f"{share:.0%} of the next {counted(looked_at, 'message')} have the key {key}"
        step = "Spread that key over several queues, or give it its own topic."
    elif state is None or state.is_paused:  # the queue has no owner, or its owner pauses: other findings
        kind, what = "uneven-lag", f"it is one of {view.queue_count(queue.topic)} queues"
        step = "Check that queue for a stuck or slow consumer."
    elif queue.behind:
        kind, what = "slow-listener", f"instance {queue.client_id} holds {queue.behind + 1} messages of it and is slow"
        step = "Compare that instance with the others: its machine, its listener, its threads."
    else:
        kind, what = "far-consumer", f"instance {queue.client_id} holds none of its messages: they arrive slowly"
        step = "Compare that instance's network and its pull settings with the others'."
    return Finding(
        kind, "warning",
        f"group {queue.group}, topic {queue.topic}, queue {_name(queue.broker_name, queue.queue_id)}",
        f"This queue holds {queue.lag:,} of the {total:,} messages that wait: {what}.",
        {
            "lag": queue.lag, "lag_of_topic": total, "client_id": queue.client_id, "key": key, "share": share,
            **sample_evidence(looked_at, queue.lag),
        },
        step,
    )  # fmt: skip


def _most_frequent_key(view: LiveView, queue: HeldProgress) -> tuple[str | None, float, int]:
    """Return the most frequent key of the next messages of a queue, its share, and the number of these messages.

    A cluster is not asked for so many messages.
    """
    if not isinstance(view, StoreView):
        return None, 0.0, 0
    begin = queue.consumed_offset if queue.consumed_offset is not None else queue.stored_offset or 0
    # Retention can have deleted unread messages.
    begin = max(begin, view.ranges[queue.topic, queue.queue_id].min_offset)
    counts: Counter[str] = Counter()
    looked_at = 0
    with suppress(CorruptionError):
        for message in view.store.messages(queue.topic, queue.queue_id, begin, begin + _SAMPLED):
            looked_at += 1
            counts.update(set(message.keys))
    if not counts or looked_at < 2:
        return None, 0.0, looked_at
    key, count = counts.most_common(1)[0]
    return key, count / looked_at, looked_at


# ----------------------------------------------------------------------------------------------- agreement of instances

_Waiting = Mapping[tuple[str, str, int], int]
"""Messages that wait, by broker (empty if there is only one), topic and number of the queue."""


def consistency_findings(view: LiveView, limits: Thresholds, group_lag: Lag) -> Iterator[Finding]:
    """Yield disagreements between the instances of a group, and queues without an owner or with two.

    During a rebalance, queues can be without an owner for a moment.
    """
    route, broker = view.route, view.broker if isinstance(view, StoreView) else None
    if route is None:
        return
    waiting: defaultdict[str, dict[tuple[str, str, int], int]] = defaultdict(dict)
    for broker_name, row in group_lag.by_broker():
        if row.lag:
            waiting[row.group][broker_name, row.topic, row.queue_id] = row.lag
    for client_id in () if broker is None else sorted(broker.shared_client_ids()):
        yield Finding(
            "shared-client-id", "error", f"client {client_id}",
            "Two clients use this id. They count as one and consume the same queues, so messages are delivered twice.",
            {"client_id": client_id}, "Give each an instance_name of its own, or shut the other down first.",
        )  # fmt: skip
    for group in view.groups:
        if not limits.own and is_own_group(group):
            continue
        connections = route.connections(group)
        if connections is None:
            yield from _absence_findings(group, waiting[group])
            continue
        states = instances(view, group)
        differences = group_differences(
            {client_id: comparable(topics) for client_id, topics in connections.subscriptions_by_client.items()}
        )
        for difference in differences:
            yield _subscription_finding(view, group, difference, states, waiting[group])
        yield from _mode_findings(group, states)
        if connections.model is MessageModel.CLUSTERING and not differences and all(states.values()):
            yield from _owner_findings(view, connections, states, waiting[group])


def _absence_findings(group: str, counts: _Waiting) -> Iterator[Finding]:
    if counts:
        yield Finding(
            "group-not-running", "warning", f"group {group}",
            f"{counted(sum(counts.values()), 'message')} {'waits' if sum(counts.values()) == 1 else 'wait'} in "
            f"{counted(len(counts), 'queue')}, and the group has no running instance.",
            {"lag": sum(counts.values()), "queues": len(counts), "instances": 0},
            "Start an instance; or reset an unused group to the end of the topic.",
        )  # fmt: skip


def _subscription_finding(
    view: LiveView,
    group: str,
    difference: TopicDifference,
    states: States,
    waiting: _Waiting,
) -> Finding:
    held = [
        f"{client_id}: {', '.join(queue_ids)}"
        for client_id, state in states.items()
        if state is not None
        and (queue_ids := [str(held.queue.queue_id) for held in state.queues if held.queue.topic == difference.topic])
    ]
    unread = sum(count for (_, topic, _), count in waiting.items() if topic == difference.topic)
    unread_ids = ""
    if not difference.without:
        what = "a message that does not match the filter of its queue's owner is skipped for good"
    elif all(states.values()):
        owned = {held.queue.queue_id for state in states.values() if state is not None for held in state.queues
                 if held.queue.topic == difference.topic}  # fmt: skip
        unread_ids = id_ranges(set(range(view.queue_count(difference.topic))) - owned)
        what = f"nothing reads queue {unread_ids}" if unread_ids else "a queue that such an instance gets stays unread"
    else:
        what = "queues that are allocated to an instance without it stay unread"
    return Finding(
        "subscriptions-differ", "error", f"group {group}, topic {difference.topic}",
        f"The instances subscribe to different things: {difference}. So {what}.",
        {
            "without": list(difference.without),
            "subscriptions": {str(kind): list(client_ids) for kind, client_ids in difference.subscriptions},
            "queues_held": held,
            "queues_unread": unread_ids,
            "lag": unread,
        },
        "Give every instance the same subscriptions, or use another group for different ones.",
    )  # fmt: skip


def _mode_findings(group: str, states: States) -> Iterator[Finding]:
    for name, mode_of in (
        ("model", lambda state: state.model.name.lower()),
        ("order", lambda state: "orderly" if state.is_orderly else "concurrent"),
        ("strategy", lambda state: state.strategy),
    ):
        modes: dict[str, list[str]] = {}
        for client_id, state in states.items():
            if state is not None:
                modes.setdefault(mode_of(state), []).append(client_id)
        if len(modes) > 1:
            text = "; ".join(f"{', '.join(client_ids)}: {mode}" for mode, client_ids in modes.items())
            yield Finding(
                f"{name}-differs", "error", f"group {group}", f"The instances differ in {name}: {text}.",
                {"instances": modes}, "Start every instance of a group with the same settings.",
            )  # fmt: skip


def _owner_findings(
    view: LiveView, connections: GroupConnections, states: States, waiting: _Waiting
) -> Iterator[Finding]:
    group, route = connections.group, view.route
    assert route is not None
    names = route.broker_names()
    of_several = len(names) > 1
    idle: Counter[str] = Counter(dict.fromkeys(states, 0))
    for topic in sorted(connections.subscriptions):
        owners: dict[tuple[str, int], list[str]] = {
            (data.broker_name if of_several else "", number): []
            for data in route.topic_route(topic)
            if data.permission & PERM_READ
            for number in range(data.read_queues)
        }
        shares = dict.fromkeys(states, 0)
        for client_id, state in states.items():
            for held in () if state is None else state.queues:
                if held.queue.topic == topic and held.queue.broker_name in names:
                    queue = held.queue.broker_name if of_several else "", held.queue.queue_id
                    owners.setdefault(queue, []).append(client_id)
                    shares[client_id] += 1
        if not topic.startswith(TopicPrefix.RETRY):
            idle.update(shares)
            yield from _share_findings(group, topic, shares)
        yield from _ownership_findings(group, topic, owners, waiting)
    without = [client_id for client_id, count in idle.items() if not count]
    if without:
        yield Finding(
            "idle-instances", "info", f"group {group}",
            f"{len(without)} of {counted(len(states), 'instance')} without a queue: more instances than queues.",
            {"client_ids": without, "instances": len(states)},
            "Add queues to the topic, or stop the instances that have none.",
        )  # fmt: skip


def _share_findings(group: str, topic: str, shares: Mapping[str, int]) -> Iterator[Finding]:
    largest, smallest = max(shares.values(), default=0), min(shares.values(), default=0)
    if largest > smallest + 1:
        yield Finding(
            "uneven-shares", "warning", f"group {group}, topic {topic}",
            f"One instance has {counted(largest, 'queue')}, another {smallest}.", {"queues_by_client_id": dict(shares)},
            "Check the allocation strategy: the shares of allocate_averagely differ by at most one.",
        )  # fmt: skip


def _ownership_findings(
    group: str, topic: str, owners: Mapping[tuple[str, int], list[str]], waiting: _Waiting
) -> Iterator[Finding]:
    unowned = [queue for queue, client_ids in owners.items() if not client_ids]
    doubled: dict[str, Any] = {
        _name(name, queue_id): client_ids for (name, queue_id), client_ids in owners.items() if client_ids[1:]
    }
    if unowned:
        unread = sum(waiting.get((name, topic, queue_id), 0) for name, queue_id in unowned)
        yield Finding(
            "queues-without-owner", "error", f"group {group}, topic {topic}",
            f"{len(unowned)} of {counted(len(owners), 'queue')} without an instance; "
            f"{counted(unread, 'message')} left there.",
            {"queue_ids": [_name(*queue) if queue[0] else queue[1] for queue in unowned], "lag": unread},
            "Check the allocation strategy, and whether all instances use the same one.",
        )  # fmt: skip
    if doubled:
        yield Finding(
            "queues-with-two-owners", "error", f"group {group}, topic {topic}",
            f"{counted(len(doubled), 'queue')} with more than one instance: their messages are delivered twice.",
            {"client_ids_by_queue_id": doubled},
            "Check the allocation strategy, and whether all instances use the same one.",
        )  # fmt: skip
