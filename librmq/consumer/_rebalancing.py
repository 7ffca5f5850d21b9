"""Rebalancing: each instance of a group computes its share of queues, topic by topic. Mirrors ``RebalanceImpl``.

It is due immediately at the start and when members or routes change. It is due every 20 s while something is open: a
missing lock, an unknown start, a failed strategy, a queue whose listener still runs, or a lost pull. A pull counts as
lost when its queue was not pulled for 120 s; a pull that the broker holds, or that waits for another reason, is not
lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from librmq.client import allocate_averagely, allocate_averagely_by_circle, allocate_consistent_hash
from librmq.client.allocation import AllocationStrategy, own_share
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer._instance import SETTLED_MS, Instance, next_from_first
from librmq.errors import RmqError
from librmq.message import MessageQueue
from librmq.message.topics import TopicPrefix
from librmq.protocol import (
    PERM_READ,
    ConsumeFrom,
    ConsumerIds,
    MaxOffset,
    MessageModel,
    MinOffset,
    QueueData,
    QueueOffsetAt,
)
from librmq.runtime import Step, Work
from librmq.runtime.event_log import counted

INTERVAL_MS: Final = 20_000
PULL_IDLE_MS: Final = 120_000
_HALF_AN_HOUR_MS: Final = 30 * 60_000
_STARTS: Final = {
    ConsumeFrom.FIRST: "at the first message",
    ConsumeFrom.LAST: "at the end",
    ConsumeFrom.TIMESTAMP: "at the first message stored since consume_from_timestamp_ms",
}
_OWN_STRATEGIES: Final = frozenset((allocate_averagely, allocate_averagely_by_circle, allocate_consistent_hash))
"""Strategies without code of the application, which may run under the runner's lock."""
_Asked: TypeAlias = Mapping[str, tuple[list[MessageQueue], tuple[str, ...]]]
"""The queues of each topic, and the clients that share them."""
_Shares: TypeAlias = Mapping[str, list[MessageQueue] | Exception]
"""The share of each topic, or why a strategy has not computed it."""


def readable_queues(topic: str, route: Iterable[QueueData]) -> list[MessageQueue]:
    return [
        MessageQueue(topic, broker.broker_name, number)
        for broker in route
        if broker.permission & PERM_READ
        for number in range(broker.read_queues)
    ]


def _share_out(client_id: str, queues_by_topic: _Asked, strategy: AllocationStrategy) -> _Shares:
    shares: dict[str, list[MessageQueue] | Exception] = {}
    for topic, (queues, clients) in queues_by_topic.items():
        try:
            shares[topic] = own_share(client_id, queues, clients, strategy)
        except Exception as error:  # A user's strategy can fail.
            shares[topic] = error
    return shares


class Rebalancing:
    """Assignment of queues to one instance. Called under the runner's lock."""

    def __init__(self, member: Instance) -> None:
        self._member = member
        self.started_ms: int = 0
        self._created_ms = member.runner.now_ms()
        route = member.route
        # Rebalancing runs under the runner's lock, where a remote route must not wait for a name server.
        self._route_of = route.known_route
        self._is_remote = route.is_remote
        self._is_incomplete = False
        self._is_sharing_out = False  # the application's strategy runs
        self._is_due_again = False
        self._has_others = False
        self._is_reported = False
        self._brokers: frozenset[str] = frozenset()
        self._initial_queues: dict[str, frozenset[MessageQueue]] = {}
        self.step: Step = Step(f"{member._label} rebalance", self.run_due, member.client)

    def start(self) -> None:
        member = self._member
        self.started_ms = member.runner.now_ms()
        self._brokers = frozenset(member.route.broker_names())
        for topic in member.subscriptions:
            self.note_queues(topic)
        member.runner.wake(self.step)

    def note_queues(self, topic: str) -> None:
        self._initial_queues.setdefault(topic, frozenset(self._queues(topic)))

    def _queues(self, topic: str) -> list[MessageQueue]:
        try:
            route = self._route_of(topic)
        except RmqError as error:  # No name server answers.
            self._member._states.failing(f"asking for the route of {topic}", error)
            self._is_incomplete = True
            return []
        self._member._states.works(f"asking for the route of {topic}")
        return readable_queues(topic, route)

    def wake(self) -> None:
        """Rebalance immediately, because members or routes have changed."""
        if not self._member._stopping:
            self._member.runner.wake(self.step)

    def wake_on_grid(self) -> None:
        """Rebalance at the next multiple of 20 s, because something is open."""
        if not self._member._stopping:
            now_ms = self._member.runner.now_ms()
            self._member.runner.wake(self.step, next_from_first(now_ms, self.started_ms, INTERVAL_MS))

    def run_due(self, now_ms: int) -> int | None:
        """Compute the share of each topic, and take and release queues accordingly."""
        member = self._member
        if member._stopping or not member._shares_queues:
            return None
        if self._is_sharing_out:
            self._is_due_again = True
            return None
        self._is_incomplete = False
        queues_by_topic, shares = self._ask(), dict[str, list[MessageQueue] | Exception]()
        strategy = member.config.strategy
        if member.config.model is not MessageModel.CLUSTERING:
            shares.update((topic, queues) for topic, (queues, _) in queues_by_topic.items())
        elif strategy in _OWN_STRATEGIES or not queues_by_topic:
            shares.update(_share_out(member.client.client_id, queues_by_topic, strategy))
        else:
            self._is_sharing_out = True
            call = partial(_share_out, member.client.client_id, queues_by_topic, strategy)
            member.runner.submit(Work(f"{self.step.label} strategy", call, self._shared_out, member.client))
            return None
        return self._apply(shares, now_ms)

    def _shared_out(self, shares: _Shares | None, error: Exception | None) -> None:
        self._is_sharing_out = False
        due_ms = None if self._member._stopping else self._apply(shares or {}, self._member.runner.now_ms())
        if self._is_due_again:
            self._is_due_again = False
            self.wake()
        elif due_ms is not None:
            self._member.runner.wake(self.step, due_ms)

    def _apply(self, shares: _Shares, now_ms: int) -> int | None:
        """Take and release queues by the share of each topic, and return when to compute them again."""
        member = self._member
        before = set(member.assigned)
        changed = [topic for topic in member.subscriptions if self._rebalance_topic(topic, shares.get(topic), now_ms)]
        for assigned in list(member.assigned.values()):
            if assigned.queue.topic not in member.subscriptions:
                self._release_queue(assigned, now_ms)
        if any(assigned.lost for assigned in member.assigned.values()):
            self._is_incomplete = True
        if before != member.assigned.keys():
            member._log.info(
                "%(consumer)s: consumes %(count)d queues of %(topics)s: %(taken)d taken, %(released)d released",
                count=len(member.assigned),
                topics=", ".join(sorted({queue.topic for queue in member.assigned})) or "no topic",
                taken=len(member.assigned.keys() - before),
                released=len(before - member.assigned.keys()),
            )
            self.report_start()
            member._save_soon()
        if changed:
            # Raise the versions, so that the broker keeps this instance's subscription if instances differ.
            for topic in changed:
                member._note("rebalance", topic)
                member.subscriptions[topic] = replace(member.subscriptions[topic], version=now_ms)
            member.client.beat()
        return next_from_first(now_ms, self.started_ms, INTERVAL_MS) if self._is_incomplete else None

    def report_start(self) -> None:
        """Log once, for the first queues that are taken, what `consume_from` means for the group."""
        offsets = [assigned.progress for assigned in self._member.assigned.values() if not assigned.is_retry]
        if self._is_reported or not offsets:
            return
        self._is_reported = True
        consume_from = self._member.config.consume_from
        new, at_first = offsets.count(None), offsets.count(0)
        meanings = (
            (new, f"in {counted(new, 'queue')} the group has no progress, and begins {_STARTS[consume_from]}"),
            (at_first, f"in {counted(at_first, 'queue')} its progress is 0, and it begins with the first message"),
            (len(offsets) - new - at_first, "where the group has progress it continues, so consume_from has no effect"),
        )
        self._member._log.info(
            "%(consumer)s: consume_from is %(consume_from)s: %(meaning)s",
            consume_from=consume_from.name,
            meaning="; ".join(meaning for count, meaning in meanings if count),
        )

    def _ask(self) -> _Asked:
        """Return what is shared out; the assigned queues of a topic that is left out stay, as in 4.9."""
        queues_by_topic: dict[str, tuple[list[MessageQueue], tuple[str, ...]]] = {}
        for topic in self._member.subscriptions:
            queues, clients = self._queues(topic), None
            if not queues:
                # A remote route drops a missing topic that no consumer asks for, so ask again at the next round.
                self._is_incomplete |= self._is_remote
                continue
            if self._member.config.model is MessageModel.CLUSTERING:
                clients = self._clients([data.broker_name for data in self._route_of(topic)])
                if not clients:  # No broker answers, or it does not know the group.
                    self._is_incomplete = True
                    continue
                self._has_others = len(clients) > 1
            queues_by_topic[topic] = queues, clients or ()
        return queues_by_topic

    def _rebalance_topic(self, topic: str, share: list[MessageQueue] | Exception | None, now_ms: int) -> bool:
        what = f"sharing out the queues of {topic}"
        if isinstance(share, Exception):  # Assigned queues stay, as in 4.9.
            self._member._states.failing(what, share, logging.ERROR, traceback=True)
            self._is_incomplete = True
            return False
        if share is None:
            return False
        self._member._states.works(what)
        return self._update(topic, dict.fromkeys(share), now_ms)

    def _clients(self, broker_names: list[str]) -> tuple[str, ...] | None:
        client = self._member.client
        for name in sorted(broker_names):
            try:
                clients = client.route.endpoint(name).call(ConsumerIds(self._member.group))
            except RmqError as error:
                self._member._states.failing(f"asking {name} for the group's members", error)
            else:
                self._member._states.works(f"asking {name} for the group's members")
                if client.client_id not in clients:
                    client.removed_by(name)
                return clients
        return None

    def _update(self, topic: str, share: dict[MessageQueue, None], now_ms: int) -> bool:
        member = self._member
        changed = False
        for assigned in [assigned for assigned in member.assigned.values() if assigned.queue.topic == topic]:
            # The queue was given up while its listener still ran: release it before it is taken again.
            given_back = assigned.released and assigned.release_until_ms
            is_taken = assigned.is_taken or (assigned.place is not None and assigned.place.is_taken)
            if assigned.queue not in share or given_back or is_taken:
                changed |= self._release_queue(assigned, now_ms)
            elif now_ms - assigned.pulled_timestamp_ms > PULL_IDLE_MS:
                if assigned.lost:
                    changed |= self._release_queue(assigned, now_ms)  # It is taken again below, with a pull of its own.
                elif assigned.pull.at is None and not assigned.throttled:
                    # The broker can have lost the pull that it held, as after a restart, so pull again.
                    member.runner.wake(assigned.pull)
        for queue in share:
            if queue not in member.assigned:
                changed |= self._take_queue(queue, now_ms)
        return changed

    def _release_queue(self, assigned: AssignedQueue, now_ms: int) -> bool:
        assigned.released = assigned.may_be_passed = True
        if not self._member._release_queue(assigned, now_ms):
            self._is_incomplete = True
            return False
        self._member.assigned.pop(assigned.queue, None)
        self._member._note("release", queue=assigned.queue)
        self._member._log.debug("%(consumer)s: releases %(queue)s", queue=assigned.queue)
        return True

    def _take_queue(self, queue: MessageQueue, now_ms: int) -> bool:
        member = self._member
        try:
            if not member._lock(queue):
                member._log.info("%(consumer)s: %(queue)s is locked by another client", queue=queue)
                self._is_incomplete = True
                return False
            stored = member._offsets.read(queue)
            next_offset = self.start_offset(queue) if stored is None else stored
            assigned = member._make_assigned(queue, next_offset, stored)
        except RmqError as error:
            member._states.failing(f"finding where to start in {queue}", error, key=("start", queue.broker_name))
            self._is_incomplete = True
            return False
        member._states.works(("start", queue.broker_name))
        if stored or self._has_others:  # A broker that was just reopened may not know the others yet.
            assigned.may_be_passed, assigned.settled_ms = True, now_ms + SETTLED_MS
        member.assigned[queue] = assigned
        member._note_take(queue, next_offset, stored)
        member._log.debug(
            "%(consumer)s: takes %(queue)s at %(queue_offset)d", queue=assigned.queue, queue_offset=next_offset
        )
        member._start_queue(assigned)
        return True

    def start_offset(self, queue: MessageQueue) -> int:
        config = self._member.config
        is_retry = queue.topic.startswith(TopicPrefix.RETRY)
        if config.consume_from is ConsumeFrom.FIRST or (config.consume_from is ConsumeFrom.LAST and is_retry):
            return 0
        if config.consume_from is ConsumeFrom.LAST and self._is_new(queue):
            return 0
        endpoint = self._member.client.route.endpoint(queue.broker_name)
        if config.consume_from is ConsumeFrom.LAST or is_retry:
            start = endpoint.call(MaxOffset(queue.topic, queue.queue_id))
        else:
            timestamp_ms = config.consume_from_timestamp_ms
            if timestamp_ms is None:
                timestamp_ms = self._created_ms - _HALF_AN_HOUR_MS
            start = endpoint.call(QueueOffsetAt(queue.topic, queue.queue_id, timestamp_ms))
        skipped = start - endpoint.call(MinOffset(queue.topic, queue.queue_id))
        if skipped > 0:
            self._member._log.log(
                logging.WARNING if config.model is MessageModel.CLUSTERING else logging.INFO,
                "%(consumer)s: the group is new in %(queue)s and skips its first %(skipped)d messages: it starts at "
                "%(queue_offset)d, because consume_from is %(consume_from)s; ConsumeFrom.FIRST would read all",
                queue=queue,
                skipped=skipped,
                queue_offset=start,
                consume_from=config.consume_from.name,
            )
        return start

    def _is_new(self, queue: MessageQueue) -> bool:
        """Return whether a broadcasting instance gets all messages of a queue, which is newer than its subscription."""
        initial_queues = self._initial_queues.get(queue.topic)
        is_known_broker = queue.broker_name in self._brokers
        is_broadcasting = self._member.config.model is MessageModel.BROADCASTING
        return is_broadcasting and is_known_broker and initial_queues is not None and queue not in initial_queues
