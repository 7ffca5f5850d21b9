"""Progress of a group that its brokers keep; mirrors ``RemoteBrokerOffsetStore``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Final

from librmq.client import Client
from librmq.config import check_reached, to_timestamp_ms
from librmq.consumer._assignment import AssignedQueue
from librmq.consumer.config import StartAt
from librmq.errors import BrokerError, BrokerUnreachableError, RmqError
from librmq.message import MessageQueue
from librmq.message.topics import TopicPrefix
from librmq.protocol import DescribeQueues, HoldPlace, Place, QueryOffset, StartGroup, StartOutcome, UpdateOffset
from librmq.runtime import StateLog
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.consumer")
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
                    self._states.works(_key(queue), f"storing progress at {queue.broker_name}")
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
                self._states.failing(_key(queue), f"storing progress at {queue.broker_name}", error)
                all_stored = False
            else:
                assigned.stored_progress, assigned.may_be_passed = progress, (stored or 0) > progress
                assigned.is_chosen = False
                self._states.works(_key(queue), f"storing progress at {queue.broker_name}")
        return all_stored

    save_soon = save


def _key(queue: MessageQueue) -> tuple[str, ...]:
    return "progress", queue.broker_name
