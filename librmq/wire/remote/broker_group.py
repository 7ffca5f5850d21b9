"""A broker with its slaves as one endpoint: slaves serve reads that the master suggests, or can't serve itself.

Mirrors ``PullAPIWrapper`` and ``MQClientInstance.findBrokerAddressInSubscribe``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from librmq.errors import BrokerError, BrokerUnreachableError
from librmq.protocol import (
    MEMBERSHIP,
    REPLICA_READS,
    Heartbeat,
    PullMessage,
    PullResponse,
    PullStatus,
    Request,
    UpdateOffset,
)
from librmq.wire.remote.remote_broker import RemoteBroker

R = TypeVar("R")
MASTER: Final = 0


class BrokerGroup:
    """The brokers of one name. Thread-safe."""

    def __init__(self, name: str, make: Callable[[str], RemoteBroker]) -> None:
        """``make`` returns the broker at an address."""
        self.name = name
        self._make = make
        self._members: dict[int, RemoteBroker] = {}
        self._suggested: dict[tuple[str, int], int] = {}  # by topic and queue id
        self._committed: dict[tuple[str, str, int], int] = {}  # by group, topic and queue id

    def __repr__(self) -> str:
        return f"<BrokerGroup {self.name}: {self._members}>"

    def move(self, addresses: Mapping[int, str]) -> bool:
        """Note the addresses by broker id, 0 for the master; return whether they have changed."""
        if {number: broker.address for number, broker in self._members.items()} == addresses:
            return False
        before, members = self._members, dict(self._members)
        removed = [members.pop(number) for number in set(members) - set(addresses)]
        for number, address in addresses.items():
            member = members.get(number)
            if member is None:
                members[number] = member = self._make(address)
                for broker in before.values():
                    member.adopt(broker)
            elif member.address != address:
                member.move(address)
        self._members = dict(sorted(members.items()))
        for broker in removed:
            broker.close()
        return True

    @property
    def first(self) -> RemoteBroker:
        """The master, or a slave without one."""
        return next(iter(self._members.values()))

    @property
    def entry(self) -> Callable[[Request[Any]], Any]:
        """The function that answers requests: the master's own, as long as it is alone."""
        return self.first.call if list(self._members) == [MASTER] else self.call

    def member_of(self, address: str, client_id: str) -> RemoteBroker | None:
        """Return the member at an address, if it has a heartbeat of the client."""
        matching = (
            broker for broker in self._members.values() if broker.address == address and broker.has_client(client_id)
        )
        return next(matching, None)

    def beat(self) -> bool:
        """Repeat all heartbeats; return whether all arrived. Waits: never under the runner's lock."""
        arrived = [broker.beat() for broker in self._members.values()]
        return all(arrived)

    def close(self) -> None:
        """Remove all clients, and end their connections."""
        for broker in self._members.values():
            broker.close()

    # ---- requests

    def call(self, request: Request[R], /) -> R:
        """Answer a request by the master, a read also by a slave.

        Raises:
            BrokerError: The broker refuses the request.
            BrokerUnreachableError: None that can serve it can be reached.
        """
        kind = type(request)
        if kind is PullMessage:
            return cast("R", self._pull(cast("PullMessage", request)))
        if kind in MEMBERSHIP:
            return self._call_all(request)
        if kind in REPLICA_READS:
            return self._first_answer(request)
        master = self._members.get(MASTER)
        if master is None:
            raise BrokerUnreachableError(
                f"broker {self.name} has no master now, and a slave takes no {type(request).__name__}: try again later"
            )
        return master.call(request)

    def _first_answer(self, request: Request[R]) -> R:
        failure: BrokerUnreachableError | None = None
        for broker in self._members.values():
            try:
                return broker.call(request)
            except BrokerUnreachableError as error:
                failure = failure or error
        raise failure or BrokerUnreachableError(f"broker {self.name} is gone")

    def _call_all(self, request: Request[R]) -> R:
        """Pass what a client says of itself to all; slaves serve consumers only."""
        failure: BrokerUnreachableError | None = None
        is_done, answer = False, cast("R", None)
        for number, broker in self._members.items():
            if number != MASTER and isinstance(request, Heartbeat) and not request.consumers:
                continue
            try:
                answer = broker.call(request)
                is_done = True
            except BrokerUnreachableError as error:
                failure = failure or error
        if failure is not None and not is_done:
            raise failure
        return answer

    # ---- pulls

    def _pull(self, request: PullMessage) -> PullResponse:
        place = request.topic, request.queue_id
        failure: BrokerError | BrokerUnreachableError | None = None
        for number in self._order(self._suggested.get(place, MASTER)):
            broker = self._members[number]
            try:
                response = broker.call(request if number == MASTER else self._without_commit(request))
            except BrokerUnreachableError as error:
                failure = failure or error
                continue
            except BrokerError as error:
                if number == MASTER:
                    raise
                failure = failure or error  # a slave may not have copied a topic or a group yet
                continue
            suggested = broker.take_suggested(*place)
            if suggested is not None:
                self._suggested[place] = suggested
            if number == MASTER or not _is_useless(request, response):
                return response
            failure = failure or BrokerUnreachableError(
                f"{broker.name} at {broker.address}: the slave has no message at {request.queue_offset} yet"
            )
        raise failure or BrokerUnreachableError(f"broker {self.name} is gone")

    def _order(self, suggested: int) -> list[int]:
        """Return the ids to ask, the suggested one first."""
        numbers = list(self._members)
        first = next((number for number in (suggested, suggested + 1) if number in numbers), MASTER)
        return sorted(numbers, key=lambda number: (number != first, number))

    def _without_commit(self, request: PullMessage) -> PullMessage:
        """Store the progress at the master, because a slave keeps none, and return the rest of the pull."""
        if request.commit_offset is None:
            return request
        queue = request.group, request.topic, request.queue_id
        if self._committed.get(queue) != request.commit_offset:
            with suppress(BrokerUnreachableError):  # it is stored with the next progress
                self._first_answer(UpdateOffset(*queue, request.commit_offset))
                self._committed[queue] = request.commit_offset
        return replace(request, commit_offset=None)


def _is_useless(request: PullMessage, response: PullResponse) -> bool:
    """Return whether a slave lacks what was asked for.

    The same pull would only be repeated. Its bounds say nothing: a slave behind its master ends earlier, and a new one
    can begin later, so that a client which went there would get messages twice or never.
    """
    if response.status is PullStatus.OFFSET_ILLEGAL:
        return True
    is_empty = response.status is PullStatus.NO_MATCHED_MESSAGE
    return is_empty and response.next_offset == request.queue_offset
