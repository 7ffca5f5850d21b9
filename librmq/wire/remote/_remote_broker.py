"""A broker behind TCP as an `Endpoint`, and a broker with its slaves as one.

Slaves serve reads that the master suggests, or can't serve itself. Mirrors ``MQClientAPIImpl``, ``PullAPIWrapper`` and
``MQClientInstance.findBrokerAddressInSubscribe``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar, cast

from librmq.clock import Clock
from librmq.errors import (
    BrokerError,
    BrokerUnreachableError,
    ClientError,
    ConfigError,
    MalformedError,
    MessageIllegalError,
    RmqError,
)
from librmq.message import DelayLevels, Message
from librmq.message.delays import time_properties
from librmq.message.properties import PropertyName
from librmq.override import override
from librmq.protocol import (
    MEMBERSHIP,
    REPLICA_READS,
    Acknowledge,
    CancelMessage,
    CancelReceive,
    ChangeInvisible,
    ChangeSchedule,
    ChannelClosed,
    CheckSubscription,
    ClientRemoved,
    DescribeConnections,
    DescribeSchedules,
    Endpoint,
    EndTransaction,
    ForwardToDeadLetters,
    GroupConnections,
    GroupSubscriptions,
    Heartbeat,
    LockQueues,
    PendingSend,
    PullMessage,
    PullResponse,
    PullStatus,
    Receive,
    Request,
    ResendLetters,
    ResentLetters,
    ResponseCode,
    SendBack,
    SendBatch,
    SendLater,
    SendMessage,
    SendReply,
    SendResponse,
    SendStatus,
    SentBack,
    Subscription,
    UnlockQueues,
    Unregister,
    UpdateOffset,
)
from librmq.runtime import Runner, Step
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.runtime.runner import NEVER
from librmq.store import BrokerTables
from librmq.wire.remote._client_requests import ClientRequests, join, leave
from librmq.wire.remote._connection import Transport
from librmq.wire.remote._consumer_requests import SUSPEND_MS, HeldReceives, LongPulls
from librmq.wire.remote._dialing import Connections
from librmq.wire.remote._pop_receives import PopReceives
from librmq.wire.remoting._bodies import group_clients_of, numbers_in, read_body, table_in
from librmq.wire.remoting._frames import Frame, version_name
from librmq.wire.remoting._headers import RequestCode
from librmq.wire.remoting._pop import unsupported
from librmq.wire.remoting._request_codec import FORMS, check, frame_of, heartbeat_frame, read_sent, send_frame

# ---- delays: brokers of 4.9 have levels, those of 5.x a timer as well

_FIRST_WITH_TIMER: Final = 413
"""The version of 5.0.0 in answers."""


class BrokerDelays(NamedTuple):
    """The delay levels of a broker, and whether it has a timer."""

    level_text: str
    """Its setting ``messageDelayLevel``."""
    has_timer: bool
    """Its setting ``timerWheelEnable``, which a broker of 4.9 lacks."""
    cancels_levels: bool = False
    """Whether it cancels what waits in a level: librmq's does, which answers as one of 4.9."""

    @classmethod
    def from_settings(cls, answer: Frame) -> BrokerDelays:
        """Read the settings of a broker; one of 5.x that refuses to say them is asked for its timer.

        Raises:
            BrokerError: A broker of 4.x refuses.
        """
        if answer.code and answer.version >= _FIRST_WITH_TIMER:  # without a timer, it refuses the message itself
            return cls("", has_timer=True)
        lines = check(answer).body.decode("utf-8", "replace").splitlines()
        settings = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
        has_timer = settings.get("timerWheelEnable", "").lower() == "true"
        return cls(settings.get("messageDelayLevel", ""), has_timer, answer.version < _FIRST_WITH_TIMER)

    def waiting_form(self, message: Message, broker_name: str, now_ms: int) -> Message:
        """Return the message to send in place of one with ``delay`` or ``deliver_at``: with 5.x's property or a level.

        A broker of RocketMQ with a timer recalls what waits there, and cancels no level.

        Raises:
            MessageIllegalError: The broker has neither a level of that length nor a timer.
        """
        try:
            levels = DelayLevels.parse(self.level_text)
        except ConfigError:  # a level that librmq does not know
            levels = DelayLevels()
        delay_s, at_ms = message.delay_s, message.deliver_at_ms
        refusal = (
            f"but broker {broker_name} has no timer, and none of its delay levels, "
            f"{self.level_text or 'which it hides'}, is that long: give delay= the length of a level, or send to a "
            "broker with a timer (RocketMQ 5 with timerWheelEnable=true, or librmq's)"
        )
        delay_ms = round(1000 * (delay_s or 0)) if at_ms is None else at_ms - now_ms
        level = 0
        if self.cancels_levels or not self.has_timer:
            level = levels.level_for(message.topic, delay_ms, None if self.has_timer else refusal)
        added = {PropertyName.DELAY: str(level)} if level else time_properties(message)
        return Message.from_parts(message.topic, message.body, message.flag, message.properties | added)


R = TypeVar("R")
_log = EventLog("librmq.wire")
T = TypeVar("T")
Rows = Mapping[str, Mapping[str, Any]]
COMMIT_IGNORED: Final = "Offset has been previously reset"
"""The remark of a broker that says of a commit that it was successful, but has not stored it."""
_SENDS: Final = (SendMessage, SendBatch, SendReply)
_BY_POP: Final[dict[type[Any], Callable[[PopReceives, Any], object]]] = {
    Receive: PopReceives.receive,
    CancelReceive: PopReceives.cancel,
    Acknowledge: PopReceives.acknowledge,
    ChangeInvisible: PopReceives.change,
    ForwardToDeadLetters: PopReceives.forward,
}
_NO_FRAME: Final = Frame(0)
_OF_RECEIVES: Final = (
    *(Acknowledge, ChangeInvisible, ForwardToDeadLetters, ResendLetters),
    *(ChangeSchedule, DescribeSchedules),
)
_NOT_SENT: Final = -1
_REST_MS: Final = 3_000
_HELD_MS: Final = SUSPEND_MS + 5_000  # a broker looks every 5 s which holds are over
_RETRIES_MS: Final = 20_000
"""Age up to which a group's ``retryMaxTimes`` counts, as in a gRPC proxy."""


@dataclass(eq=False, repr=False)
class RemoteBroker(Endpoint):
    """One broker. Thread-safe."""

    name: str
    address: str
    """Its ``host:port``, which may change."""
    transports: Connections
    """The connections of the route."""
    runner: Runner
    later: Callable[[Callable[[], None]], None]
    """Runs a function under the runner's lock, soon."""
    stored: Callable[[str], None]
    """Called with the topic of each message that was stored."""
    timeout_s: float
    """Time for an answer."""
    answers: Mapping[type, Callable[[RemoteBroker, Any], Any]]
    """What answers a request by other requests, by its class."""
    name_servers: tuple[str, ...] = ()
    """Addresses, which clients report to a broker that asks."""

    def __post_init__(self) -> None:
        name, runner, later, timeout_s = self.name, self.runner, self.later, self.timeout_s
        self._lock = Lock()
        self._beats: dict[str, Heartbeat] = {}
        self._knows: dict[str, Transport] = {}  # the connection on which the broker has a client's heartbeat
        self._delays: tuple[Transport, BrokerDelays] | None = None  # what it said on which connection
        # The settings of groups, and on which connection and when they came.
        self._groups: dict[str, tuple[Transport, int, Mapping[str, Any]]] = {}
        self._silent_until_ms = 0
        self._left: dict[str, int] = {}  # by group, until when the broker can hold pulls of instances that have left
        self.has_receives = False
        """Whether the broker is librmq's, which has receives with an invisible time."""
        self._receives = HeldReceives(name, self._of_client, timeout_s)
        self._pops = PopReceives(
            broker_name=name,
            clock=runner.clock,
            ask=self.request,
            send=lambda frame, ended: self.transports.get(self.address).send(frame, ended),
            later=later,
            run_at=self._run_at,
            is_ordered=self._is_ordered,
            retries_of=self._retries_of,
        )
        self.requests: ClientRequests = ClientRequests(
            name, self._beats.get, self._receives.notify, later, self.name_servers
        )
        self._pulls = LongPulls(name, runner.now_ms, self._of_client, later, timeout_s, self._run_at)

    def _run_at(self, call: Callable[[], None], due_ms: int) -> None:
        self.runner.wake(Step(f"{self.name} pulls again", lambda now_ms: call()), due_ms)

    @property
    def clock(self) -> Clock:
        return self.runner.clock

    @override
    def __repr__(self) -> str:
        return f"<RemoteBroker {self.name} at {self.address}>"

    @override
    def call(self, request: Request[R], /) -> R:
        """Answer a request by asking the broker. Only a `PullMessage` with ``notify`` does not wait for its answer.

        Raises:
            BrokerError: The broker refuses the request, or its version has no such request.
            BrokerUnreachableError: It can't be reached, does not answer in time, or its answer can't be read.
            MessageIllegalError: It can't delay a message as long as its sender wants.
        """
        kind = type(request)
        if kind is PullMessage:
            return cast("R", self._pulls.pull(cast("PullMessage", request)))
        if kind in _SENDS:
            return cast("R", self._send_messages(request))
        if kind is SendLater:
            return cast("R", self._send_later(cast("SendLater", request)))
        if kind is Heartbeat:
            self._note_heartbeat(cast("Heartbeat", request))
            return cast("R", None)
        if (answer_by := self.answers.get(kind)) is not None:
            return cast("R", answer_by(self, request))
        form = FORMS.get(kind)
        if kind is CancelMessage and not self.has_receives and cast("CancelMessage", request).recall_handle is not None:
            return cast("R", self._pops.recall(cast("CancelMessage", request)))
        if form is None or (kind in _OF_RECEIVES and not self.has_receives):
            return cast("R", self._call_otherwise(request))
        if kind is UpdateOffset:
            return cast("R", self._store_progress(self._pulls.after_reset(cast("UpdateOffset", request))))
        frame = form.write(request)
        if kind is EndTransaction and not self.has_receives:  # a client of 4.x awaits no answer
            self.transports.get(self.address).send_one_way(frame)
            return cast("R", None)
        if isinstance(request, Acknowledge) and request.is_one_way:
            self.transports.get(self.address).send_one_way(frame)
            return cast("R", (True,) * len(request.receipts))
        if kind is Unregister:
            self._unregister(cast("Unregister", request), frame)
            return cast("R", None)
        answer = self._ask(frame, self._transport_of(request))
        result = self._read_result(form.read, request, answer)
        return cast("R", self._sent_back(request) if isinstance(request, SendBack) else result)

    def _store_progress(self, request: UpdateOffset) -> None:
        form = FORMS[UpdateOffset]
        answer = self._ask(form.write(request), self._transport_of(request))
        form.read(request, answer)
        if answer.remark == COMMIT_IGNORED:
            _log.info(
                "%(broker)s: progress of group %(group)s in %(topic)s/%(queue_id)d is not stored, because the group "
                "was reset: the next answer to a pull says where it continues",
                broker=self.name,
                group=request.group,
                topic=request.topic,
                queue_id=request.queue_id,
            )

    def _read_result(self, read: Callable[[Any, Frame], Any], request: object, answer: Frame) -> object:
        try:
            return read(request, answer)
        except MalformedError as error:
            what = type(request).__name__
            raise BrokerUnreachableError(f"{self.name}: the answer to {what} can't be read: {error}") from error

    def _ask(self, frame: Frame, transport: Transport) -> Frame:
        """Ask for something that consumers wait for under their lock: not again for a while, if it takes too long."""
        now_ms = self.runner.now_ms()
        if now_ms < self._silent_until_ms <= now_ms + _REST_MS:
            raise BrokerUnreachableError(f"{self.name} at {self.address} did not answer a moment ago: try again later")
        begin_s = self.runner.clock.monotonic()
        try:
            return transport.request(frame, self.timeout_s)
        except BrokerUnreachableError:
            if transport.is_open or self.runner.clock.monotonic() - begin_s >= self.timeout_s:
                self._silent_until_ms = self.runner.now_ms() + _REST_MS
            raise

    # ---- sends

    def _send_messages(self, request: Any) -> object:  # noqa: ANN401 SendMessage | SendBatch | SendReply
        send: SendMessage | SendBatch = request.send if type(request) is SendReply else request
        transport = self.transports.get(self.address)
        timeout_s = self.timeout_s if send.timeout_ms is None else max(0.0, send.timeout_ms / 1000)
        if isinstance(send, SendMessage) and send.message._delays is not None:
            begin_s, now_ms = self.runner.clock.monotonic(), self.runner.now_ms()
            waiting = self._delays_of(transport, timeout_s).waiting_form(send.message, self.name, now_ms)
            send = replace(send, message=waiting)
            request = SendReply(send) if type(request) is SendReply else send
            timeout_s = max(0.0, timeout_s - (self.runner.clock.monotonic() - begin_s))
        frame = send_frame(request)
        if isinstance(send, SendMessage) and send.is_one_way:
            transport.send_one_way(frame)
            return SendResponse(SendStatus.SEND_OK, send.queue_id, _NOT_SENT, _NOT_SENT, ("",))
        return self._sent(send, transport.request(frame, timeout_s))

    def _sent(self, send: SendMessage | SendBatch, answer: Frame) -> SendResponse:
        response = cast("SendResponse", self._read_result(lambda _, answer: read_sent(answer), send, answer))
        self.stored(send.messages[0].topic if isinstance(send, SendBatch) else send.message.topic)
        return response

    def _send_later(self, request: SendLater) -> bool:
        """Send messages together, if that need not wait; return whether they were sent."""
        transport = self.transports.get_open(self.address)
        if transport is None or any(pending.send.message._delays is not None for pending in request.sends):
            return False
        frames = [send_frame(pending.send) for pending in request.sends]
        give_up = transport.send_later(
            list(zip(frames, request.sends, strict=True)), partial(self._end_later, request.ended)
        )
        if give_up is None:
            return False
        for pending, frame in zip(request.sends, frames, strict=True):
            pending.number = frame.opaque

        def give_up_send(pending: PendingSend) -> BrokerUnreachableError | None:
            timeout_ms = pending.send.timeout_ms
            return give_up(pending.number, self.timeout_s if timeout_ms is None else timeout_ms / 1000)

        request.give_up = give_up_send
        return True

    def _end_later(
        self, ended: Callable[[Sequence[PendingSend]], None], outcomes: Sequence[tuple[PendingSend, Frame | RmqError]]
    ) -> None:
        for pending, outcome in outcomes:
            try:
                pending.outcome = outcome if isinstance(outcome, RmqError) else self._sent(pending.send, outcome)
            except RmqError as error:
                pending.outcome = error
        ended([pending for pending, _ in outcomes])

    def _delays_of(self, transport: Transport, timeout_s: float) -> BrokerDelays:
        """Return what the broker can delay, asked once a connection: it can return with other settings."""
        learnt = self._delays
        if learnt is None or learnt[0] is not transport:
            try:
                delays = BrokerDelays.from_settings(
                    transport.request(frame_of(RequestCode.GET_BROKER_CONFIG), timeout_s)
                )
            except BrokerError as error:
                raise MessageIllegalError(
                    f"broker {self.name} does not say what it can delay, so that delay= and deliver_at= can't be sent: "
                    f"{error}: give delay_level="
                ) from error
            learnt = self._delays = transport, delays
        return learnt[1]

    # ---- messages that were sent back

    def _sent_back(self, request: SendBack) -> SentBack | None:
        """Derive what has become of a message, which the broker's answer does not say; None if that is unknown."""
        max_times = request.max_reconsume_times
        if request.delay_level < 0:
            return SentBack(is_dead=True, max_reconsume_times=max_times or 0)
        if max_times is None and (max_times := self._retries_of(request.group)) is None:
            return None
        return SentBack(request.reconsume_times >= max_times, max_times)

    def _settings_of(self, group: str, max_age_ms: int = NEVER) -> Mapping[str, Any]:
        """Return the settings of a group, empty without any, as they were up to ``max_age_ms`` ago.

        They are asked for once a connection, and those of a group that has none again after a while: it may get some.
        """
        transport, now_ms = self.transports.get(self.address), self.runner.now_ms()
        learnt = self._groups.get(group)
        if learnt is not None and learnt[0] is transport:
            age_ms = now_ms - learnt[1]
            if 0 <= age_ms < (max_age_ms if learnt[2] else _REST_MS) or (learnt[2] and max_age_ms == NEVER):
                return learnt[2]
        settings: Mapping[str, Any] = self.group_rows().get(group, {})
        self._groups[group] = transport, now_ms, settings
        return settings

    def _is_ordered(self, group: str) -> bool:
        """Return whether a group receives in order; a broker that does not show its groups has no POP, or forbids it.

        Raises:
            BrokerError: The client may not see it, so that order could be lost.
        """
        try:
            return self._settings_of(group).get("consumeMessageOrderly") is True
        except BrokerError as error:
            if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                return False
            raise

    def _retries_of(self, group: str) -> int | None:
        try:
            max_times = self._settings_of(group, _RETRIES_MS).get("retryMaxTimes")
        except ClientError as error:
            _log.debug(
                "%(broker)s: the settings of %(group)s are unknown: %(error)s",
                broker=self.name,
                group=group,
                error=error,
            )
            return None
        return max_times if type(max_times) is int else None

    # ---- clients

    def _of_client(self, client_id: str) -> Transport:
        """Return the connection of a client, on which the broker knows it."""
        transport = self.transports.get(self.address, client_id)
        if self._knows.get(client_id) is not transport and (beat := self._beats.get(client_id)) is not None:
            check(self._ask(heartbeat_frame(beat), transport))
            with self._lock:
                self._knows[client_id] = transport
        return transport

    def _transport_of(self, request: object) -> Transport:
        """Return the connection of the client that asks, if one is known: what it says stays in order."""
        if isinstance(request, LockQueues | UnlockQueues | CheckSubscription):
            return self._of_client(request.client_id)
        if isinstance(request, UpdateOffset):
            with self._lock:
                beats = self._beats.values()
                its = [beat.client_id for beat in beats for data in beat.consumers if data.group == request.group]
            if len(its) == 1:
                return self._of_client(its[0])
        return self.transports.get(self.address)

    def _note_heartbeat(self, request: Heartbeat) -> None:
        with self._lock:
            before = self._beats.get(request.client_id)
            present = self._beats[request.client_id] = join(before, request)
            self._knows.pop(request.client_id, None)
        if before is not None and before.consumers != present.consumers:
            for data in before.consumers:
                self._pulls.expire(request.client_id, data.group)
        self._of_client(request.client_id)

    def beat(self) -> bool:
        """Repeat all heartbeats; return whether all arrived. Waits: never under the runner's lock."""
        with self._lock:
            beats, registered = self._beats.copy(), set(self._knows)
            self._knows.clear()
        all_arrived = True
        for client_id, beat in beats.items():
            if not self.has_client(client_id):
                continue
            try:
                self._of_client(client_id)
            except ClientError as error:
                all_arrived = False
                if isinstance(error, BrokerError) and client_id in registered:  # it has lost its rights: it will say so
                    self.later(partial(beat.client.call, ClientRemoved(self.name)))
                _log.debug(
                    "%(client)s: no heartbeat reaches %(broker)s: %(error)s",
                    client=client_id,
                    broker=self.name,
                    error=error,
                )
        return all_arrived

    def introduce(self) -> None:
        """Send heartbeats of clients that the broker does not know yet. Waits: never under the runner's lock."""
        for client_id in self.heartbeats():
            with suppress(BrokerError):  # it has no rights
                if self.has_client(client_id):
                    self._of_client(client_id)

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Return the last heartbeat of each client that has not left, by id."""
        return self._beats.copy()

    def adopt(self, other: RemoteBroker) -> None:
        """Take over the heartbeats of another broker's clients, which go out with the next request of each."""
        with self._lock:
            self._beats |= {key: beat for key, beat in list(other._beats.items()) if key not in self._beats}

    def has_client(self, client_id: str) -> bool:
        """Return whether a client has sent a heartbeat and not left."""
        return client_id in self._beats

    def _unregister(self, request: Unregister, frame: Frame) -> None:
        client_id = request.client_id
        with self._lock:
            beat = self._beats.get(client_id)
            remaining = None if beat is None else leave(beat, request)
            if remaining is None:
                self._beats.pop(client_id, None)
            else:
                self._beats[client_id] = remaining
            transport = self._knows.get(client_id) if remaining is not None else self._knows.pop(client_id, None)
        if request.consumer_group is not None:
            self._pulls.drop_client(client_id, request.consumer_group)
            now_ms = self.runner.now_ms()
            self._left = {group: until for group, until in self._left.items() if until > now_ms}
            self._left[request.consumer_group] = now_ms + _HELD_MS
        try:
            if transport is not None and transport.is_open:
                check(self._ask(frame, transport))
        finally:
            if remaining is None:
                self.transports.drop(client_id, self.address)

    def _call_otherwise(self, request: object) -> object:
        if isinstance(request, ChannelClosed):
            with self._lock:
                self._beats.pop(request.client_id, None)
                self._knows.pop(request.client_id, None)
            self._pulls.drop_client(request.client_id)
            self.transports.drop(request.client_id, self.address)
            return None
        if self.has_receives and isinstance(request, Receive):
            return self._receives.receive(request)
        if self.has_receives and isinstance(request, CancelReceive):
            self._receives.cancel(request)
            return None
        if (by_pop := _BY_POP.get(type(request))) is not None:
            return self._read_result(lambda pop, _: by_pop(self._pops, pop), request, _NO_FRAME)
        if isinstance(request, GroupSubscriptions):
            return self._subscriptions(request)
        if isinstance(request, ResendLetters):
            if request.letters is not None and not request.only_unsent:
                return ResentLetters(())
            raise ConfigError(
                f"group {request.group!r}: brokers do not note which dead letters were sent again: name them, such as "
                f"letters=route.dead_letters({request.group!r}), or by --id of a command"
            )
        if isinstance(request, ChangeSchedule | DescribeSchedules):
            raise ConfigError(
                f"{self.name}: RocketMQ has no schedules, and its clients can't make one: set it where the store is, "
                "by Broker.open or librmq.share"
            )
        version = version_name(self.request(frame_of(RequestCode.GET_BROKER_RUNTIME_INFO)).version)
        raise unsupported(type(request).__name__, self.name, version)

    def _subscriptions(self, request: GroupSubscriptions) -> Mapping[str, Mapping[str, Subscription]]:
        """Return the same subscriptions for each client: a broker of 4.x keeps one table for a group."""
        members = self.connections(request.group)
        return {} if members is None else members.subscriptions_by_client

    def connections(self, group: str) -> GroupConnections | None:
        """Return a group as its clients describe it; None if none is online."""
        answer = self.request(frame_of(RequestCode.GET_CONSUMER_CONNECTION_LIST, DescribeConnections(group)))
        if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
            return None
        return self._read(answer, f"the clients of {group}", partial(group_clients_of, group))

    def tables(self, folder: str) -> BrokerTables:
        """Return the tables of a store, which are in a folder here, as its broker has them now and slaves get them."""
        topics = self.read(
            frame_of(RequestCode.GET_ALL_TOPIC_CONFIG), "the topics", partial(table_in, name="topicConfigTable")
        )
        request = frame_of(RequestCode.GET_ALL_DELAY_OFFSET)
        delays = self.read(request, "the progress of delay levels", partial(numbers_in, name="offsetTable"))
        tables = BrokerTables.open(folder)
        tables.take(topics, self.group_rows(), self.all_offsets(), delays)
        return tables

    def await_left_pulls(self, group: str) -> None:
        """Wait until a broker of RocketMQ holds no pull of the instances of a group that have left by this route.

        It answers a pull of a closed connection too when its hold ends, and makes the group of the pull again.
        """
        left_ms = self._left.get(group, 0) - self.runner.now_ms()
        if left_ms > 0 and not self.has_receives and not self.is_librmq():
            self.clock.wait(threading.Event(), min(left_ms, _HELD_MS) / 1000)

    def is_librmq(self) -> bool:
        """Ask the broker whether it is librmq's, which answers with the version of RocketMQ that it follows."""
        frame = frame_of(RequestCode.GET_BROKER_RUNTIME_INFO)
        return self.read(frame, "the state of the broker", lambda body: "librmqVersion" in (body.get("table") or {}))

    def group_rows(self) -> Rows:
        frame = frame_of(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
        return self.read(frame, "the groups", partial(table_in, name="subscriptionGroupTable"))

    def all_offsets(self) -> dict[str, dict[int, int]]:
        """Return the progress of all groups: a queue offset for each queue, by ``topic@group``."""

        def parse(body: Mapping[str, Any]) -> dict[str, dict[int, int]]:
            rows = table_in(body, "offsetTable")
            return {key: numbers_in(rows, key) for key in rows}

        return self.read(frame_of(RequestCode.GET_ALL_CONSUMER_OFFSET), "the progress of all groups", parse)

    def request(self, frame: Frame) -> Frame:
        """Send a request of the route itself, not of a client, and return its answer.

        Raises:
            BrokerUnreachableError: It can't be reached, or does not answer in time.
        """
        return self._ask(frame, self.transports.get(self.address))

    def request_within(self, frame: Frame, timeout_s: float) -> Frame:
        """Send a request that the broker passes on to a client, whose silence says nothing about the broker."""
        return self.transports.get(self.address).request(frame, timeout_s)

    def read(self, frame: Frame, what: str, parse: Callable[[dict[str, Any]], T]) -> T:
        """Send a request like `request`, and read the body of its answer.

        Raises:
            BrokerError: The broker refuses.
            BrokerUnreachableError: It does not answer, or its answer can't be read.
        """
        return self._read(self.request(frame), what, parse)

    def _read(self, answer: Frame, what: str, parse: Callable[[dict[str, Any]], T]) -> T:
        check(answer)
        try:
            return parse(read_body(answer.body, what))
        except MalformedError as error:
            raise BrokerUnreachableError(f"{self.name}: {what} can't be read: {error}") from error

    def move(self, address: str) -> None:
        """Note another address, and end the connections of clients to the old one."""
        before, self.address = self.address, address
        for client_id in list(self._beats):
            self.transports.drop(client_id, before)

    def close(self) -> None:
        """Remove all clients, and end their connections, by which the broker removes them too."""
        with self._lock:
            beats = list(self._beats.values())
            self._beats.clear()
            self._knows.clear()
        for beat in beats:
            self._pulls.drop_client(beat.client_id)
            self.transports.drop(beat.client_id, self.address)


# ---- a broker with its slaves

MASTER: Final = 0


class BrokerGroup:
    """The brokers of one name. Thread-safe."""

    def __init__(self, name: str, make: Callable[[str], RemoteBroker]) -> None:
        """``make`` returns the broker at an address."""
        self.name = name
        self._make = make
        self._members: dict[int, RemoteBroker] = {}
        self._suggested: dict[tuple[str, int], int] = {}  # suggested offsets by topic and queue id
        self._committed: dict[tuple[str, str, int], int] = {}  # committed offsets by group, topic and queue id

    @override
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
    def first_member(self) -> RemoteBroker:
        """The master, or a slave without one."""
        return next(iter(self._members.values()))

    @property
    def entry(self) -> Callable[[Request[Any]], Any]:
        """The function that answers requests: the master's own, as long as it is alone."""
        return self.first_member.call if list(self._members) == [MASTER] else self.call

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
        if issubclass(kind, REPLICA_READS):
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
            suggested = broker._pulls.suggested.pop(place, None)
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
