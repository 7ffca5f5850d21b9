"""A kit that official clients connect to: the test moves the clock, and the clients keep up.

The clients run in threads or processes of their own and time some things by the wall clock. So each hop of the clock
waits until they are settled: push consumers wait for messages, and no client still owes an answer.

Clients of 4.x do not acknowledge messages: they store a group's progress together with their next pull. So a held pull
ends as soon as its client owes progress, and its next pull stores it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from librmq.clock import LAST_MS, SystemClock
from librmq.config import to_seconds
from librmq.errors import BrokerUnreachableError
from librmq.message import MessageQueue, StoredMessage
from librmq.message.lag import queue_lag
from librmq.message.properties import PropertyName
from librmq.message.topics import TopicPrefix, group_of_retries, is_own_group, is_user_topic
from librmq.override import override
from librmq.protocol import (
    Acknowledge,
    ChangeInvisible,
    ChannelClosed,
    CheckTransaction,
    Endpoint,
    EndTransaction,
    ForwardToDeadLetters,
    Heartbeat,
    MessageModel,
    PullMessage,
    PullResponse,
    PullStatus,
    QueryOffset,
    Receive,
    Received,
    Request,
    RequestHandler,
    SendBack,
    SendMessage,
    SendResponse,
    Unregister,
    UpdateOffset,
)
from librmq.runtime.closing import Closing
from librmq.testing._kit import Kit, time_after
from librmq.testing._process import Process
from librmq.testing.histories._history import Call, show
from librmq.wire.remoting import RemotingServer, listen

if TYPE_CHECKING:
    from librmq.broker import Broker
    from librmq.wire.grpc import GrpcServer


_WAIT_S: Final = 20.0
_BACK_S: Final = 60.0
"""The longest time in which clients return after a fault; those of 4.x register every 30 s."""
_LOOK_S: Final = 0.001
R = TypeVar("R")
_LATE_S: Final = 20.0


class WireClient(Endpoint):
    """The endpoint of one client: a process of the kit whose code runs elsewhere. Thread-safe."""

    def __init__(self, kit: Kit, process_of: Callable[[str], Process], name: str, lost_groups: set[str]) -> None:
        """``process_of`` returns the process of a client, by its id, or by ``name`` before its first heartbeat.

        Groups that register are removed from ``lost_groups``.
        """
        self._kit = kit
        self._process_of = process_of
        self._lost_groups = lost_groups
        self._name = name
        self._made: Process | None = None
        self._groups: frozenset[str] = frozenset()
        self._calls: dict[str, Call] = {}

    @property
    def process(self) -> Process:
        """Its process, which its first request makes."""
        if self._made is None:
            self._made = self._process_of(self._name)
        return self._made

    @override
    def call(self, request: Request[R], /) -> R:
        """Pass a request to the broker, with the kit's history and faults."""
        if isinstance(request, Heartbeat):
            self._heartbeat(request)
        elif isinstance(request, ChannelClosed):
            self.note("leaves")
        elif isinstance(request, EndTransaction):
            self.note(f"ends a transaction: {request.state.name.lower()}")
        elif isinstance(request, ChangeInvisible):
            self._ended(request.receipt, "failed", f"lets a message come again in {request.invisible_ms:,} ms")
        elif isinstance(request, ForwardToDeadLetters):
            self._ended(request.receipt, "failed", "makes a message a dead letter")
        kit, label = self._kit, self.process.label
        if isinstance(request, Receive):
            with kit.runner.lock:  # so that its deliveries are the last ones
                received: Any = kit.recorder.call(label, kit.broker.name, request, self._pass_on)
                self._received(request, received.messages)
            return cast(R, received)
        answer = kit.recorder.call(label, kit.broker.name, request, self._pass_on)
        if isinstance(request, Heartbeat):  # only now is the group one that has clients
            with kit.runner.lock:
                self._lost_groups.difference_update(data.group for data in request.consumers)
        elif isinstance(request, Acknowledge):
            for receipt, is_good in zip(request.receipts, cast(Any, answer), strict=True):
                self._ended(receipt, "returned", "acknowledges" if is_good else "acknowledges too late")
        elif isinstance(request, ChangeInvisible):
            self._calls.pop(request.receipt, None)
        return answer

    def _pass_on(self, request: Request[Any]) -> object:
        return self._send(request) if isinstance(request, SendMessage) else self._kit.broker.call(request)

    def note(self, what: str, group: str = "") -> None:
        """Add a line to the history."""
        kit = self._kit
        with kit.runner.lock:
            kit.note(f"{group}@{self.process.label}" if group else self.process.label, what)

    def _heartbeat(self, request: Heartbeat) -> None:
        if self._made is None:
            self._name = request.client_id
        groups = frozenset(data.group for data in request.consumers)
        if self._groups != groups or not groups:
            self._groups = groups
            role = f"consumes as group {', '.join(sorted(groups))}" if groups else "produces"
            self.note(f"is connected and {role} ({request.client_id})")
        with self._kit.runner.lock:
            self._kit.observer.noted_heartbeat(self.process, request)

    # ---- sends

    def _send(self, request: SendMessage) -> SendResponse:
        kit, process, topic = self._kit, self.process, request.message.topic
        if PropertyName.TIMER_DELETE_KEY in request.message.properties:
            self.note(f"recalls a message of {topic}")
            return self._kit.broker.call(request)
        due: threading.Event | None = None
        with kit.runner.lock:  # so that time is not moved between the message and its fault
            kit.faults._before_send(process, topic, kit.broker.name)
            response: SendResponse = self._kit.broker.call(request)
            kit.observer.sent_to.add(topic)
            place = f"{topic}/{response.queue_id}:{response.queue_offset}"
            self.note(f"sends {place} {show(request.message)}")
            kit.faults._lose(process, topic, kit.broker.name, response)
            late_s = kit.faults.take_delay_s(process, topic, kit.broker.name)
            if late_s:
                due = threading.Event()
                kit.runner.after(late_s, "a late answer", due.set)  # when the test has moved the clock
        if due is not None and not SystemClock().wait(due, _LATE_S):
            raise BrokerUnreachableError(f"the answer is {late_s:g} s late, and the test did not move the clock")
        return response

    # ---- receives

    def _received(self, request: Receive, messages: tuple[Received, ...]) -> None:
        kit = self._kit
        calls = kit.history().calls
        for received, call in zip(messages, calls[len(calls) - len(messages) :], strict=True):
            kit.observer.note_received(request.group, request.topic)
            self._calls[received.receipt] = call
            retry = f", retry {received.attempt - 1}" if received.attempt > 1 else ""
            self.note(f"gets {call.where} {show(received.message)}{retry}", request.group)

    def _ended(self, receipt: str, outcome: str, what: str) -> None:
        kit = self._kit
        with kit.runner.lock:
            call = self._calls.pop(receipt, None)
            if call is None:  # acknowledged again, or renewed: for the history the delivery is over
                return
            call.ended_ms, call.outcome = kit.clock.now_ms() - kit.history().begin_ms, outcome
        self.note(f"{what} ({call.where})", call.events[0]["group"])


class NotSettledError(AssertionError):
    """Clients did not answer within a bounded time by the wall clock."""


class ServedKit(Closing):
    """A kit and its server. A context manager; at its end clients are cut off. Not thread-safe."""

    def __init__(
        self,
        kit: Kit,
        grpc: int | None = 0,
        listening: socket.socket | None = None,
        *,
        changed: Callable[[str, str, bool], None] | None = None,
        was_killed: bool = False,
        min_polling: float | timedelta | None = None,
    ) -> None:
        """Serve the broker of a kit, whose clock should start at the machine's time.

        Args:
            kit: The kit.
            grpc: The port for clients of RocketMQ 5; 0 takes a free one.
            listening: The socket for clients of 4.x, whose address should be the kit's ``store_host``.
            changed: ``changed(client_id, group, is_connected)`` is called as clients come and go.
            was_killed: Whether another process served the kit's store and was killed: its groups are awaited.
            min_polling: As that of `librmq.wire.grpc.GrpcServer`; 0 takes receives that production refuses.
        """
        self.kit = kit
        """The broker, its dead letters, its faults and history, and all else of the fixture ``rmq``."""
        self._lost_groups = _groups(kit.broker) if was_killed else set()
        self._clients: dict[str, WireClient] = {}
        self._processes: dict[str, Process] = {}
        self._changed = changed
        self._options: dict[str, Any] = {} if min_polling is None else {"min_polling": min_polling}
        self._options["lost_groups"] = frozenset(self._lost_groups)
        self.grpc: GrpcServer | None = None
        """The server for clients of RocketMQ 5, if there is one."""
        self.remoting: ServedRemoting | None = None
        """The server for clients of 4.x, if there is one."""
        kit.observer.fixture = "rmq_remoting" if grpc is None else "rmq_grpc"  # whose calls warnings advise
        self._is_down = False
        self._serve(grpc, listening)

    def _serve(self, grpc: int | None, listening: socket.socket | None) -> None:
        """Begin to serve; of servers before these the clients are expected to return."""
        broker, endpoint, changed = self.kit.broker, self._endpoint, self._changed
        if grpc is not None:
            from librmq.wire.grpc import GrpcServer

            self.grpc = GrpcServer(
                broker, port=grpc, endpoints=endpoint, changed=changed, former=self.grpc, **self._options
            )
        if listening is not None:
            self.remoting = ServedRemoting(self.kit, listening, endpoint, self.remoting, changed)

    @property
    def _servers(self) -> list[GrpcServer | ServedRemoting]:
        return [server for server in (self.grpc, self.remoting) if server is not None]

    def _endpoint(self, name: str) -> WireClient:
        with self.kit.runner.lock:
            return self._clients.setdefault(name, WireClient(self.kit, self._process_of, name, self._lost_groups))

    def _process_of(self, name: str) -> Process:
        with self.kit.runner.lock:
            if name not in self._processes:
                self._processes[name] = self.kit._outside_process("client")
            return self._processes[name]

    @property
    def address(self) -> str:
        """``host:port`` of each server, for the configuration of a client."""
        return " and ".join(server.address for server in self._servers)

    def settle(self) -> None:
        """Wait until the clients have done what there is to do now.

        After a fault, first wait until each client that was connected before is back. While the broker is down, this
        returns at once. After the kill of another process, wait for a client of each group of the store that could get
        a message: until it registers, receives, or as a simple consumer sends a heartbeat. One that is not back in
        time, or missed nothing when this returned, is not awaited again.

        What a listener sends without waiting for the answer, as by ``send_async``, can arrive after it has returned,
        and this knows of it only then.

        Raises:
            NotSettledError: They did not within 20 s of wall-clock time, or a client was not back within 60 s.
        """
        clock, never = SystemClock(), threading.Event()
        begin = clock.monotonic()
        back = begin
        while not self._is_down:
            missing = [client for server in self._servers for client in server.missing()] + self._missing_groups()
            if missing:
                back = clock.monotonic()
            elif all(server.is_settled() for server in self._servers):
                self._await_no_group()
                return
            if missing and back > begin + _BACK_S:
                self._await_no_group()
                raise NotSettledError(
                    f"not back within {_BACK_S:g} s after the fault: {', '.join(missing[:5])}"
                    + (f" and {len(missing) - 5:,} more" if len(missing) > 5 else "")
                    + ". A client that ends before the fault, or shuts down after it, is not awaited"
                )
            if clock.monotonic() > back + _WAIT_S:
                raise NotSettledError(
                    f"the clients at {self.address} were not settled within {_WAIT_S:g} s: a push consumer has not "
                    "finished what it received or does not ask for more, or a producer has not answered a check"
                )
            clock.wait(never, _LOOK_S)

    def _await_no_group(self) -> None:
        with self.kit.runner.lock:
            self._lost_groups.clear()

    def _missing_groups(self) -> list[str]:
        """Return the groups of a killed process that are not back and could get a message.

        The store does not know subscriptions, so a group could get what is in any topic in which it has no progress.
        """
        broker, groups = self.kit.broker, self._lost_groups
        with self.kit.runner.lock:
            groups.difference_update(() if self.grpc is None else self.grpc.groups())
            topics = broker.topics() if groups else {}
            readers = {
                topic: groups if is_user_topic(topic) else {group_of_retries(topic, groups, topics)} & groups
                for topic in topics
                if is_user_topic(topic) or topic.startswith(TopicPrefix.RETRY)
            }
            missing = set[str]()
            for topic, queue_id in broker.store.queues if groups else ():
                bounds = broker.store.queue_range(topic, queue_id)
                for group in readers.get(topic, set()) - missing if bounds[0] < bounds[1] else ():
                    if queue_lag(broker.consumer_offset(group, topic, queue_id), *bounds):
                        missing.add(group)
            return [f"group {group}, whose server was killed" for group in sorted(missing)]

    def advance(self, *, hours: float = 0, minutes: float = 0, seconds: float = 0, ms: int = 0) -> None:
        """Let time pass hop by hop; after each, wait until the clients are settled, as `settle` does.

        Raises:
            NotSettledError: They did not settle within 20 s of wall-clock time, or a client was not back within 60 s.
        """
        runner = self.kit.runner
        until = time_after(runner.now_ms(), hours, minutes, seconds, ms)
        self.settle()
        while True:
            due = runner.next_due_ms()
            hop = until if due is None else max(min(due, until), runner.now_ms())
            self.kit.advance(ms=hop - runner.now_ms())
            self.settle()
            following = runner.next_due_ms()
            if runner.now_ms() >= until and (following is None or following > until):
                return

    def cut_connections(self) -> None:
        """Cut the connections of all clients in the middle of their calls; they may connect again at once.

        `settle` and `advance` wait until they have.
        """
        self.kit.note("fault", "all connections of clients are cut")
        if not self._is_down:
            self._cut()
            self._serve_again()

    def crash_broker(self, *, down: float | timedelta = 0) -> None:
        """Let the broker die and open it again after ``down`` seconds, with all acknowledged messages.

        Connections are cut, and refused until then. `settle` and `advance` wait for the clients once it is open.
        """
        to_seconds("down", down, maximum=(LAST_MS - self.kit.clock.now_ms()) / 1000)
        self._cut()
        self._is_down = True
        self.kit.crash_broker(down=down)
        self.kit.runner.after(down, "the broker serves again", self._serve_again)

    def _cut(self) -> None:
        if self.grpc is not None:
            self.grpc.close(grace=0)
        if self.remoting is not None:
            self.remoting.close()

    def _serve_again(self) -> None:
        port = None if self.grpc is None else self.grpc.port
        self._serve(port, None if self.remoting is None else listen(port=self.remoting.port))
        self._is_down = False

    @override
    def close(self, timeout: float = 5) -> bool:
        """End the clients' calls, and answer no more; return whether these end in ``timeout`` seconds a server."""
        have_ended = [server.close(timeout) for server in self._servers]
        return all(have_ended)


def _groups(broker: Broker) -> set[str]:
    """Return the groups that have settings or progress in the store."""
    groups = {group for topic in broker.topics() for group in broker.groups_of(topic)}
    return {group for group in groups.union(broker.groups()) if not is_own_group(group)}


# ---- the server of the 4.x protocol

Queue = tuple[str, str, int]
"""A group, a topic and a queue id."""
_HELD_S: Final = 10.0
"""The longest time that a pull is held, by the machine's clock: clients give up after 30 s."""


class ServedRemoting:
    """A name server and broker for clients of 4.x."""

    def __init__(
        self,
        kit: Kit,
        listening: socket.socket,
        client_of: Callable[[str], WireClient],
        former: ServedRemoting | None,
        changed: Callable[[str, str, bool], None] | None,
    ) -> None:
        """Serve the kit's broker, and expect the clients of a ``former`` server to return."""
        self._kit = kit
        self._client_of = client_of
        self._last_clients: set[str] = set()
        self._pulls = _Pulls(kit, set() if former is None else former._last_clients)
        self._server = RemotingServer(
            kit.broker, listening=listening, creates_retry_topics=True, changed=changed, endpoints=self._endpoint
        )
        self.port: int = self._server.port
        self.address: str = self._server.address
        self._ended = threading.Event()
        self._releaser = threading.Thread(target=self._release, name="librmq held pulls", daemon=True)
        self._releaser.start()

    def _endpoint(self, name: str) -> Endpoint:
        return _PullingClient(self._kit, self._client_of(name), self._pulls)

    def _release(self) -> None:
        clock = SystemClock()
        while not clock.wait(self._ended, _HELD_S):
            self._server.release_pulls()

    def is_settled(self) -> bool:
        """Return whether push consumers have consumed everything, and producers answered all checks."""
        with self._kit.runner.lock:
            queues = list(self._pulls.unsettled())
        for queue in queues:
            self._server.release_pulls(queue)
        return not queues and not self._pulls.open_checks

    def missing(self) -> list[str]:
        """Return the clients of the former server that have not registered again."""
        return list(self._pulls.missing)

    def close(self, timeout: float = 5) -> bool:
        """Cut all clients off; return whether all requests have ended within ``timeout`` seconds."""
        if not self._ended.is_set():
            self._last_clients = {client.client_id for client in self._kit.broker.clients()} | self._pulls.missing
        self._ended.set()
        has_ended = self._server.close(timeout)
        self._releaser.join()
        return has_ended


class _Pulls:
    """Progress of the clients of one server. Changes only under the runner's lock."""

    def __init__(self, kit: Kit, missing: set[str]) -> None:
        self._kit = kit
        self.calls: dict[Queue, dict[int, tuple[StoredMessage, Call]]] = {}
        """What was pulled and is not consumed; a client can pull on one connection and send back on another."""
        self.missing = missing
        """The ids of clients that were registered before a fault, and are not since."""
        self.delivered: dict[Queue, tuple[int, _PullingClient]] = {}
        """The offset after the messages that a client got last, and the client."""
        self.waiting: dict[Queue, int] = {}
        """The offset of the pull that was held last."""
        self.open_checks: set[int] = set()
        """The physical offsets of half messages whose checks have no answer."""

    def unsettled(self) -> Iterator[Queue]:
        """Yield the queues whose last messages a group of push consumers has not consumed."""
        broker = self._kit.broker
        for group in {data for client in broker.clients() for data in client.consumer_groups}:
            connections = broker.connections(group)
            if connections is None or connections.kind != "push" or connections.model is MessageModel.BROADCASTING:
                continue
            for topic in connections.subscriptions:
                for queue_id in range(sum(data.read_queues for data in broker.topic_route(topic))):
                    end = broker.store.queue_range(topic, queue_id)[1]
                    consumed = broker.consumer_offset(group, topic, queue_id) or 0
                    queue = group, topic, queue_id
                    delivered = self.delivered[queue][0] if queue in self.delivered else 0
                    if consumed < end and (delivered > consumed or self.waiting.get(queue, -1) < end):
                        yield queue


class _PullingClient(Endpoint):
    """The endpoint of one connection: records what it pulls. Thread-safe."""

    def __init__(self, kit: Kit, client: WireClient, pulls: _Pulls) -> None:
        self._kit = kit
        self._client = client
        self._pulls = pulls
        self._checked_clients: dict[RequestHandler, _CheckedClient] = {}

    @override
    def call(self, request: Request[R], /) -> R:
        """Pass a request to the broker, with the kit's history and faults."""
        if isinstance(request, Heartbeat):
            endpoint = self._checked_clients.setdefault(
                request.client, _CheckedClient(request.client, self._pulls.open_checks)
            )
            registered = self._client.call(replace(request, client=endpoint))
            self._pulls.missing.discard(request.client_id)
            return cast(R, registered)
        if isinstance(request, SendBack):
            self._failed(request)
        answer: Any = self._client.call(request)
        with self._kit.runner.lock:
            if isinstance(request, QueryOffset):  # it takes the queue
                place = MessageQueue(request.topic, self._kit.broker.name, request.queue_id)
                self._kit.recorder.assigned("assign", self._client.process.label, request.group, place)
            elif isinstance(request, PullMessage):
                self._pulled(request, answer)
            elif isinstance(request, UpdateOffset):
                self._passed((request.group, request.topic, request.queue_id), request.queue_offset)
            elif isinstance(request, Unregister):
                self._pulls.missing.discard(request.client_id)
            elif isinstance(request, EndTransaction):
                self._pulls.open_checks.discard(request.physical_offset)
            elif isinstance(request, ChannelClosed):
                delivered = self._pulls.delivered
                for queue in [queue for queue, (_, client) in delivered.items() if client is self]:
                    del delivered[queue]
        return cast(R, answer)

    def _pulled(self, request: PullMessage, response: PullResponse) -> None:
        queue = request.group, request.topic, request.queue_id
        if request.commit_offset is not None:
            self._passed(queue, request.commit_offset)
        if response.status is PullStatus.HELD:
            self._pulls.waiting[queue] = request.queue_offset
            return
        self._pulls.waiting.pop(queue, None)
        if response.status is not PullStatus.FOUND:
            return
        self._pulls.delivered[queue] = response.next_offset, self
        kit, label = self._kit, self._client.process.label
        kit.observer.note_received(request.group, request.topic)
        place = MessageQueue(request.topic, kit.broker.name, request.queue_id)
        for stored in response.messages:
            kit.recorder.delivered(label, request.group, place, [stored])
            call = kit.history().calls[-1]
            self._pulls.calls.setdefault(queue, {})[stored.queue_offset] = stored, call
            attempt = call.events[0]["attempt"]
            retry = f", retry {attempt}" if attempt else ""
            self._client.note(f"gets {call.where} {show(stored)}{retry}", request.group)

    def _passed(self, queue: Queue, queue_offset: int) -> None:
        """Note that a group's progress has passed the messages before an offset."""
        calls = self._pulls.calls.get(queue, {})
        for offset in [offset for offset in calls if offset < queue_offset]:
            self._ended(*calls.pop(offset), "ok", "is done")

    def _failed(self, request: SendBack) -> None:
        with self._kit.runner.lock:
            for (group, _, _), calls in self._pulls.calls.items():
                for offset, (stored, call) in list(calls.items()):
                    if group == request.group and stored.physical_offset == request.physical_offset:
                        del calls[offset]
                        self._ended(stored, call, "retry", "sends back")

    def _ended(self, stored: StoredMessage, call: Call, outcome: str, what: str) -> None:
        self._kit.recorder.ended(stored, outcome)
        self._client.note(f"{what} ({call.where})", call.events[0]["group"])


class _CheckedClient:
    """A client that the broker asks about transactions. Called under the runner's lock."""

    def __init__(self, client: RequestHandler, open_checks: set[int]) -> None:
        self._client = client
        self._open_checks = open_checks

    def call(self, request: Request[R], /) -> R:
        if isinstance(request, CheckTransaction):
            self._open_checks.add(request.message.physical_offset)
        return self._client.call(request)
