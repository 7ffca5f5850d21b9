"""Requests of consumers, and requests that all clients make about themselves.

Mirrors ``ClientManageProcessor``, ``ConsumerManageProcessor``, the queue offsets of ``AdminBrokerProcessor``, and
``PullMessageProcessor`` and ``PullRequestHoldService`` as clients see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final, Literal

from librmq.broker import Broker
from librmq.broker.long_polling import Deadlines
from librmq.errors import BrokerError, BrokerUnreachableError
from librmq.message import MessageQueue
from librmq.protocol import (
    Acknowledge,
    CancelReceive,
    ChangeInvisible,
    CheckSubscription,
    ConsumerIds,
    ForwardToDeadLetters,
    HoldPlace,
    LockQueues,
    MaxOffset,
    MessageModel,
    MinOffset,
    MoveGroup,
    PullMessage,
    PullResponse,
    PullStatus,
    QueryOffset,
    QueueOffsetAt,
    ResetGroup,
    ResponseCode,
    SaveProgress,
    SendBack,
    UnlockQueues,
    Unregister,
    UpdateOffset,
)
from librmq.runtime import Step
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire.remoting._bodies import MOST_RECORD_BYTES, fitting, records_body
from librmq.wire.remoting._channels import Channel, ClientChannels, Handlers, RemotingCall, refused, served, tried
from librmq.wire.remoting._frames import Frame, to_fields
from librmq.wire.remoting._headers import (
    DURABLE_FIELD,
    PULL_CODES,
    PULL_WAITS,
    HoldHeader,
    PulledHeader,
    PullHeader,
    ReceiveHeader,
    RequestCode,
)
from librmq.wire.remoting._pop import PopRequests
from librmq.wire.remoting._request_codec import FORMS, Form, parse_pull, parse_receive, pulled_remark, received_reply
from librmq.wire.remoting._running_info import Rates

# ---- pulls, answered when there is a message or when the client's time is over

_log = EventLog("librmq.wire")
_LONGEST_WAIT_MS: Final = 120_000
_MOST_HELD: Final = 10_000
"""The held pulls of one connection."""
_MOST_HELD_IN_ALL: Final = 100_000
_MOST_STARTED: Final = 100_000
_LAST_S: Final = 253_402_300_799
"""The last second of the year 9999."""
_OWN_LANGUAGE: Final = "PYTHON"
"""The language of librmq's clients, which log themselves what a new group skips; other Python clients say ``CPP``."""


@dataclass(slots=True, eq=False)
class _HeldPull:
    """A pull that is answered later. Changes only under the runner's lock."""

    call: RemotingCall
    is_answered: bool = False
    is_asking: bool = False
    """Whether its connection's thread is about to ask again."""


class ResetsByPull:
    """Resets, which a server can do as brokers of RocketMQ 5 (``useServerSideResetOffset``). Thread-safe.

    Then a reset moves the progress of the group. Until the next pull of a queue, or the end of one that is held,
    commits of its group are ignored, and that pull is answered with the offset of the reset. The commit that comes with
    such a pull is stored nevertheless. Mirrors ``AdminBrokerProcessor.resetOffsetInner`` and ``ConsumerOffsetManager``.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.is_on = False
        self._offsets: dict[tuple[str, str, int], int] = {}  # by group, topic and queue id
        self.handlers: Handlers = {
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self._reset,
            RequestCode.UPDATE_CONSUMER_OFFSET: self._update,
        }

    def _reset(self, call: RemotingCall) -> bytes:
        return call.serve(FORMS[ResetGroup], self._moved if self.is_on else self._broker.call)

    def _moved(self, request: ResetGroup) -> Mapping[MessageQueue, int]:
        group, topic, to = request.group, request.topic, request.queue_offset
        target: Literal["end"] | datetime | int = "end" if to is None else to
        if to is None and request.timestamp_ms >= 0:
            target = datetime.fromtimestamp(min(request.timestamp_ms / 1000, _LAST_S), UTC)
        moving = MoveGroup(group, topic, target, request.queue_id, dry_run=True)
        moved = self._broker.await_device(moving, self._broker.call(moving))
        with self._broker.runner.lock:
            for queue, queue_offset in moved.items():
                self._broker.call(UpdateOffset(group, topic, queue.queue_id, queue_offset))
                self._offsets[group, topic, queue.queue_id] = queue_offset
        self._broker.call(SaveProgress(group))
        return moved

    def _update(self, call: RemotingCall) -> bytes:
        request: UpdateOffset = call.header
        if (request.group, request.topic, request.queue_id) in self._offsets:
            return call.answer(remark="Offset has been previously reset")
        answer = call.serve(FORMS[UpdateOffset])
        if call.frame.fields.get(DURABLE_FIELD) == "true":
            self._broker.call(SaveProgress(request.group))
        return answer

    def answer(self, call: RemotingCall, *, commits: bool) -> bytes | None:
        """Answer a pull of a queue that was reset since the pull before; None if it was not. Under the runner's lock.

        Raises:
            BrokerError: The pull is refused; then the next one is told.
        """
        header: PullHeader = call.header
        place = group, topic, queue_id = header.consumer_group, header.topic, header.queue_id
        if place not in self._offsets:
            return None
        request = _request(call, commits=commits)
        call.call_broker(replace(request, commit_offset=None))
        target = self._offsets.pop(place)
        if request.commit_offset is not None:
            self._broker.call(UpdateOffset(group, topic, queue_id, request.commit_offset))
        begin, end = self._broker.store.queue_range(topic, queue_id)
        places = PulledHeader(target, begin, end, 0)
        return call.answer(places, code=PULL_CODES[PullStatus.OFFSET_ILLEGAL], remark="OFFSET_RESET")


class Pulls:
    """The pulls of one server's clients. Thread-safe."""

    def __init__(self, broker: Broker, rates: Rates, *, ends_holds: bool) -> None:
        """With ``ends_holds`` False, held pulls end by `answer_held` alone and not as the broker's clock moves."""
        self._broker = broker
        self._runner = broker.runner
        self._step = Step(f"{broker.name}: pulls of the wire", self._run_due)
        self._deadlines: Deadlines[_HeldPull] = Deadlines()
        self._held: dict[Channel, set[_HeldPull]] = {}
        self._count = 0
        self._ends_holds = ends_holds
        self.resets = ResetsByPull(broker)
        self._rates = rates
        self._started: set[tuple[str, str, int]] = set()
        """Groups with the queues that they have pulled from."""

    def pull(self, call: RemotingCall) -> bytes | None:
        """Answer a pull, or hold it."""
        header: PullHeader = call.header
        place = header.consumer_group, header.topic, header.queue_id
        if place not in self._started and call.frame.language != _OWN_LANGUAGE:
            self._warn_of_skipped(header)
        waits_ms = min(header.suspend_timeout_millis, _LONGEST_WAIT_MS)
        begin_ms = self._runner.now_ms()
        if self.resets.is_on:
            with self._runner.lock:
                if (answer := self.resets.answer(call, commits=True)) is not None:
                    return answer
        if not header.sys_flag & PULL_WAITS or waits_ms <= 0:
            request = _request(call, commits=True)
            return self._answer_pull(call, request, call.call_broker(request), begin_ms)
        waiting = _HeldPull(call)
        request = _request(call, lambda: self._woken(waiting), commits=True)
        with self._runner.lock:  # so that the hold is known before it can end
            response = call.call_broker(request)
            if response.status is PullStatus.HELD:
                held = self._held.setdefault(call.channel, set())
                if len(held) < _MOST_HELD and self._count < _MOST_HELD_IN_ALL:
                    held.add(waiting)
                    self._count += 1
                    if self._ends_holds:
                        deadline_ms = self._runner.now_ms() + waits_ms
                        self._deadlines.set(waiting, deadline_ms)
                        self._runner.wake(self._step, deadline_ms)
                    return None
            waiting.is_answered = True
        return self._answer_pull(call, request, response, begin_ms)

    def _warn_of_skipped(self, header: PullHeader) -> None:
        """Warn if the first pull of a clustering group without saved progress begins after a queue's first message.

        Clients of 4.x choose the offset themselves. It is checked before the pull saves the group's progress.
        """
        broker, group, start = self._broker, header.consumer_group, header.queue_offset
        topic, queue_id = header.topic, header.queue_id
        members = broker.connections(group)
        if members is None:
            return
        if len(self._started) >= _MOST_STARTED:
            self._started.clear()
        self._started.add((group, topic, queue_id))
        is_new = broker.consumer_offset(group, topic, queue_id) is None
        begin, end = broker.store.queue_range(topic, queue_id)
        skipped = min(start, end) - begin
        if is_new and skipped > 0 and members.model is MessageModel.CLUSTERING:
            _log.warning(
                "group %(group)s is new in %(topic)s/%(queue_id)d and skips its first %(skipped)d messages: it starts "
                "at %(queue_offset)d, because consume_from of its clients (consumeFromWhere) is %(consume_from)s; "
                "FIRST would read all, and reset_group moves the group back",
                group=group,
                topic=topic,
                queue_id=queue_id,
                skipped=skipped,
                queue_offset=start,
                consume_from=members.consume_from.name,
            )

    def drop_pulls(self, channel: Channel, group: str | None = None) -> None:
        """Drop the pulls of a connection that has ended, or of a group that its client has left."""
        with self._runner.lock:
            held = self._held.get(channel, set())
            for waiting in [pull for pull in held if group in (None, pull.call.header.consumer_group)]:
                self._end_hold(waiting)

    def _end_hold(self, waiting: _HeldPull) -> None:
        waiting.is_answered = True
        self._deadlines.discard(waiting)
        channel = waiting.call.channel
        held = self._held.get(channel, set())
        if waiting in held:
            held.discard(waiting)
            self._count -= 1
        if not held:
            self._held.pop(channel, None)

    def answer_held(self, queue: tuple[str, str, int] | None) -> None:
        """Answer the held pulls now: all, or the pulls of a group, topic and queue id."""
        with self._runner.lock:
            for waiting in [pull for held in self._held.values() for pull in held]:
                header: PullHeader = waiting.call.header
                place = header.consumer_group, header.topic, header.queue_id
                if queue in (None, place) and not waiting.is_asking:
                    waiting.is_asking = True
                    waiting.call.channel.run_later(partial(self._ask_again, waiting, is_last=True))

    def _woken(self, waiting: _HeldPull) -> None:
        """Let the connection's thread ask again. Called under the runner's lock."""
        if not waiting.is_answered and not waiting.is_asking:
            waiting.is_asking = True
            waiting.call.channel.run_later(partial(self._ask_again, waiting, is_last=False))

    def _run_due(self, now_ms: int) -> int | None:
        """Answer the pulls whose clients have waited long enough."""
        deadlines = self._deadlines
        was_set_back = (deadlines.first_ms or 0) > now_ms + _LONGEST_WAIT_MS
        for waiting in deadlines.pop_all() if was_set_back else deadlines.pop_due(now_ms):
            waiting.is_asking = True
            waiting.call.channel.run_later(partial(self._ask_again, waiting, is_last=True))
        return deadlines.first_ms

    def _ask_again(self, waiting: _HeldPull, *, is_last: bool) -> None:
        call = waiting.call
        request = _request(call, None if is_last else lambda: self._woken(waiting))
        with self._runner.lock:
            waiting.is_asking = False
            if waiting.is_answered:
                return
            begin_ms = self._runner.now_ms()
            answer = tried(lambda: self.resets.answer(call, commits=False) or call.call_broker(request))
            if isinstance(answer, PullResponse) and answer.status is PullStatus.HELD:
                return
            self._end_hold(waiting)
        if isinstance(answer, PullResponse):
            answer = tried(self._answer_pull, call, request, answer, begin_ms)
        if isinstance(answer, Exception):  # the client has left the group, or the broker is closed
            answer = refused(call.channel, call.frame, answer)
        call.write_later(answer)

    def _answer_pull(self, call: RemotingCall, request: PullMessage, response: PullResponse, begin_ms: int) -> bytes:
        header: PullHeader = call.header
        call.await_device(self._broker, request, response)
        status, body = response.status, records_body(response.messages)
        if len(body) > MOST_RECORD_BYTES:
            messages = fitting(response.messages)
            response = replace(response, messages=messages, next_offset=messages[-1].queue_offset + 1)
            body = records_body(messages)
        suggested = int(response.suggests_replica)  # the id of a slave
        places = response.next_offset, response.min_offset, response.max_offset, suggested
        now_ms, rates = self._runner.now_ms(), self._rates
        if status is PullStatus.FOUND:
            key, took_ms = f"{header.topic}@{header.consumer_group}", now_ms - begin_ms
            rates.count("get", key, now_ms, len(response.messages), len(body))
            rates.count("latency", f"{header.queue_id}@{key}", now_ms, took_ms)
            rates.took("get", took_ms)
        else:
            rates.count("miss", "", now_ms)
        remark = pulled_remark(header, response)
        return call.answer(PulledHeader(*places), body=body, code=PULL_CODES[status], remark=remark)


def _request(call: RemotingCall, notify: Callable[[], None] | None = None, *, commits: bool = False) -> PullMessage:
    client_id = call.channel.client_id or f"{call.channel.peer[0]}:{call.channel.peer[1]}"
    return parse_pull(call.header, client_id, notify, commits=commits)


class ChannelReceives:
    """The held receives of one server's clients. Thread-safe.

    A receive that finds nothing is answered at once. When the client should ask again, it gets NOTIFY_RECEIVE with the
    receive's number.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = Lock()
        self._held: dict[Channel, dict[int, Callable[[], None]]] = {}

    def receive(self, call: RemotingCall) -> bytes:
        """Answer a receive, and hold it if there is no message."""
        header: ReceiveHeader = call.header
        channel, hold = call.channel, header.hold
        if not hold:
            request = parse_receive(header, None)
            reply = received_reply(call.await_device(self._broker, request, call.call_broker(request)))
            return call.answer(reply.header, body=reply.body)

        def notify() -> None:
            self._remove(channel, hold)
            channel.send_one_way(Frame(RequestCode.NOTIFY_RECEIVE, to_fields(HoldHeader(hold))))

        with self._lock:
            held = self._held.setdefault(channel, {})
            if len(held) >= _MOST_HELD:
                raise BrokerError(ResponseCode.SYSTEM_BUSY, f"a client with more than {_MOST_HELD:,} held receives")
            held[hold] = notify
        is_held, request = False, parse_receive(header, notify)
        try:
            response = call.call_broker(request)
            is_held = response.is_held
        finally:
            if not is_held:
                self._remove(channel, hold)
        reply = received_reply(call.await_device(self._broker, request, response))
        return call.answer(reply.header, body=reply.body)

    def cancel(self, call: RemotingCall) -> bytes:
        """Remove a held receive."""
        header: HoldHeader = call.header
        notify = self._remove(call.channel, header.hold)
        if notify is not None:
            call.call_broker(CancelReceive(notify))
        return call.answer()

    def drop_receives(self, channel: Channel) -> None:
        """Remove the receives of a connection that has ended."""
        with self._lock:
            held = self._held.pop(channel, {})
        for notify in held.values():
            with suppress(BrokerUnreachableError):
                channel.endpoint.call(CancelReceive(notify))

    def _remove(self, channel: Channel, hold: int) -> Callable[[], None] | None:
        with self._lock:
            held = self._held.get(channel, {})
            notify = held.pop(hold, None)
            if not held:
                self._held.pop(channel, None)
        return notify


class ConsumerRequests:
    """The consumers of one server. Thread-safe."""

    def __init__(
        self, broker: Broker, sessions: ClientChannels, pulls: Pulls, receives: ChannelReceives, rates: Rates
    ) -> None:
        self._broker = broker
        self._rates = rates
        self._sessions = sessions
        self._pulls = pulls
        self.handlers: Handlers = {
            **dict.fromkeys((RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE), pulls.pull),
            RequestCode.HEART_BEAT: self._heartbeat,
            RequestCode.UNREGISTER_CLIENT: self._unregister,
            RequestCode.CONSUMER_SEND_MSG_BACK: self._send_back,
            RequestCode.CHECK_CLIENT_CONFIG: self._check_subscription,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self._earliest,
            RequestCode.RECEIVE: receives.receive,
            RequestCode.CANCEL_RECEIVE: receives.cancel,
            **PopRequests(broker).handlers,
            **pulls.resets.handlers,
            **served(None, Acknowledge, ChangeInvisible, ForwardToDeadLetters),
            **served(broker.call, ConsumerIds, LockQueues, UnlockQueues, MinOffset, HoldPlace, SaveProgress),
            **{FORMS[kind].code: partial(self._place, FORMS[kind]) for kind in (QueryOffset, QueueOffsetAt, MaxOffset)},
        }

    # ---- clients

    def _heartbeat(self, call: RemotingCall) -> bytes:
        self._sessions.register_client(call.channel, call.frame)
        return call.answer()

    def _unregister(self, call: RemotingCall) -> bytes:
        request: Unregister = call.header
        if request.consumer_group:
            # End the held pulls now: the client would be refused if it asked again.
            self._pulls.drop_pulls(call.channel, request.consumer_group)
        self._sessions.remove_client(call.channel, request)
        return call.answer()

    def _check_subscription(self, call: RemotingCall) -> bytes:
        request = FORMS[CheckSubscription].parse(call.header, call.frame.body)
        if request is not None:
            self._broker.call(request)
        return call.answer()

    # ---- failures and queues

    def _send_back(self, call: RemotingCall) -> bytes:
        answer, header = call.serve(FORMS[SendBack]), call.header
        self._rates.count("back", f"{header.origin_topic}@{header.group}", self._broker.runner.now_ms())
        return answer

    def _place(self, form: Form, call: RemotingCall) -> bytes:
        broker = self._broker
        return call.serve(form, lambda request: call.await_device(broker, request, broker.call(request)))

    def _earliest(self, call: RemotingCall) -> bytes:
        request: MinOffset = call.header
        begin, _ = self._broker.store.queue_range(request.topic, request.queue_id)
        return call.answer_fields({"timestamp": stored_ms(self._broker, request.topic, request.queue_id, begin)})


def stored_ms(broker: Broker, topic: str, queue_id: int, queue_offset: int) -> int:
    """Return the store time in ms of a message; -1 if there is none."""
    messages = broker.store.read(topic, queue_id, queue_offset, 1).messages
    return messages[0].store_timestamp_ms if messages else -1
