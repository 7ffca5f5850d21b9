"""Calls of consumers: receive, acknowledge, change the invisible time, forward to the dead letters.

While a push consumer lives, the invisible times of its messages are renewed. Mirrors ``DefaultReceiptHandleManager``
of 5.3.3's proxy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Final, NamedTuple

from librmq.broker import Broker
from librmq.clock import SystemClock
from librmq.errors import RmqError
from librmq.protocol import (
    MAX_INVISIBLE_MS,
    MAX_RECEIVED,
    Acknowledge,
    CancelReceive,
    ChangeInvisible,
    Endpoint,
    ForwardToDeadLetters,
    QueueData,
    Receive,
    Received,
    Subscription,
)
from librmq.runtime import Runner, Step
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Lock
from librmq.wire.grpc._messages import check_group, check_topic, milliseconds, to_received
from librmq.wire.grpc._protocol import (
    Code,
    Context,
    Endpoints,
    Refusal,
    answers,
    client_id_of,
    header,
    message_class,
    refuse,
    sum_up,
)
from librmq.wire.grpc._sessions import LONG_POLL_S, FormerClient, Sessions, version_parts

# ---- receives that wait

Place = tuple[str, int]
"""The topic and queue id that a receive names."""


@dataclass(slots=True, eq=False)
class Poll:
    client_id: str
    place: Place
    arrived: threading.Event
    is_held: bool = False

    @property
    def waits(self) -> bool:
        """Whether it waits, and nothing has arrived."""
        return self.is_held and not self.arrived.is_set()


class Polls:
    """The receives of one server. Thread-safe."""

    def __init__(self, former: Mapping[str, Collection[Place]]) -> None:
        """``former`` are the places from which clients of the server before received, and to which they return."""
        self._lock = Lock()
        self._open: set[Poll] = set()
        self._places: dict[str, set[Place]] = {client_id: set(places) for client_id, places in former.items()}
        self._missing: dict[str, set[Place]] = {client_id: set(places) for client_id, places in former.items()}

    def open(self, client_id: str, place: Place, arrived: threading.Event, *, is_push: bool) -> Poll:
        """Note a receive that waits for ``arrived``, and the place of a known push consumer, until `remove_client`."""
        poll = Poll(client_id, place, arrived)
        with self._lock:
            self._open.add(poll)
            if is_push:
                self._places.setdefault(client_id, set()).add(place)
            if client_id in self._missing:
                self._missing[client_id].discard(place)
                if not self._missing[client_id]:
                    del self._missing[client_id]
        return poll

    def wake_all(self) -> None:
        with self._lock:
            for poll in self._open:
                poll.arrived.set()

    def close(self, poll: Poll) -> None:
        """Note that a receive is answered."""
        with self._lock:
            self._open.discard(poll)

    def remove_client(self, client_id: str) -> None:
        """Remove the places from which a client has received."""
        with self._lock:
            self._places.pop(client_id, None)
            self._missing.pop(client_id, None)

    def places(self, client_id: str) -> frozenset[Place]:
        """Return where a known push consumer has received from."""
        with self._lock:
            return frozenset(self._places.get(client_id, ()))

    def missing_clients(self) -> list[str]:
        """Return the former clients that do not receive from all their places yet."""
        with self._lock:
            return list(self._missing)

    def all_wait(self, push_consumers: Iterable[str]) -> bool:
        """Return whether all receives wait, and each push consumer has one at each place that it receives from."""
        with self._lock:
            if not all(poll.waits for poll in self._open):
                return False
            waiting = {(poll.client_id, poll.place) for poll in self._open}
            return all(
                client_id in self._places and all((client_id, place) in waiting for place in self._places[client_id])
                for client_id in push_consumers
            )


# ---- renewal of invisible times

FIRST_MS: Final = 60_000
_LOOK_MS: Final = 5_000
_RENEW_BEFORE_MS: Final = 10_000
_STEPS_MS: Final = tuple(60_000 * minutes for minutes in (1, 3, 5, 10, 30, 60))
_LONGEST_MS: Final = 3 * 3_600_000
_GONE_MS: Final = 1_000


@dataclass(slots=True)
class _Held:
    client_id: str
    begin_ms: int
    visible_ms: int
    renewals: int = 0


class Renewals:
    """The receipts that one server renews. Called under the runner's lock."""

    dead = False

    def __init__(self, broker: Endpoint, runner: Runner) -> None:
        self._broker = broker
        self._runner = runner
        self._held: dict[tuple[str, str, str], _Held] = {}
        self._step = Step("renew invisible times", self._run_due, self)

    def __len__(self) -> int:
        return len(self._held)

    def add_receipt(self, client_id: str, group: str, topic: str, receipt: str, visible_ms: int) -> None:
        """Renew a receipt until `remove_receipt`."""
        now_ms = self._runner.now_ms()
        self._held[group, topic, receipt] = _Held(client_id, now_ms, visible_ms)
        self._runner.wake(self._step, now_ms + _LOOK_MS)

    def remove_receipt(self, group: str, topic: str, receipt: str) -> None:
        """Renew a receipt no longer."""
        self._held.pop((group, topic, receipt), None)

    def client_gone(self, client_id: str) -> None:
        """Let what a client had come again in a second."""
        self._give_back([key for key, held in self._held.items() if held.client_id == client_id])

    def _give_back(self, keys: list[tuple[str, str, str]]) -> None:
        for key in keys:
            del self._held[key]
            self._change_invisible(key, _GONE_MS)

    def _run_due(self, now_ms: int) -> int | None:
        for key, held in list(self._held.items()):
            if held.visible_ms - now_ms >= _RENEW_BEFORE_MS:
                continue
            if now_ms - held.begin_ms >= _LONGEST_MS:
                del self._held[key]
                _log.warning(
                    "group %(group)s: a message of topic %(topic)s was renewed for 3 hours: it comes again",
                    group=key[0],
                    topic=key[1],
                )
                continue
            longer_ms = _STEPS_MS[min(held.renewals, len(_STEPS_MS) - 1)]
            held.renewals += 1
            held.visible_ms = now_ms + longer_ms
            if not self._change_invisible(key, longer_ms):
                del self._held[key]
        return now_ms + _LOOK_MS if self._held else None

    def _change_invisible(self, key: tuple[str, str, str], invisible_ms: int) -> bool:
        group, topic, receipt = key
        try:
            self._broker.call(ChangeInvisible(group, topic, receipt, invisible_ms, keeps_receipt=True))
        except RmqError as error:
            _log.info(
                "group %(group)s: a message of topic %(topic)s is not renewed: %(error)s",
                group=group,
                topic=topic,
                error=error,
            )
            return False
        return True

    def close(self) -> None:
        """Renew nothing any more; all clients are cut off."""
        self.dead = True
        self._give_back(list(self._held))


_log = EventLog("librmq.wire")

_GIVEN_BACK_MS: Final = 1000
_ANSWER_S: Final = 0.2
"""Part of a deadline that is left for sending the answer."""


_POLLING_TIME_KNOWN: Final = (5, 0, 3)
"""The version from which on clients know the code of a polling time that is too short."""


class ReceiveLimits(NamedTuple):
    """What is refused by 5.3.3's proxy, and by a server unless its settings say otherwise."""

    min_invisible_ms: int = 10_000
    """The shortest invisible time of a receive."""
    min_polling_s: float = 5.0
    """The least time that a receive leaves until its deadline."""


@dataclass(eq=False, repr=False)
class Receives:
    """The receives of one server's clients. Thread-safe."""

    broker: Broker
    ensure_topic: Callable[[str], QueueData]
    sessions: Sessions
    endpoints: Endpoints
    former: InitVar[Mapping[str, FormerClient]]
    limits: ReceiveLimits

    def __post_init__(self, former: Mapping[str, FormerClient]) -> None:
        self._runner = self.broker.runner
        self._ends_polls = False
        self._waiting_clock = SystemClock()  # clients wait by the wall clock, even if the broker's clock is moved
        self.renewals = Renewals(self.broker, self._runner)
        self.polls = Polls({name: client.places for name, client in former.items() if client.places})

    def is_settled(self) -> bool:
        """Return whether push consumers are waiting and have answered for everything that they received."""
        return not len(self.renewals) and self.polls.all_wait(self.sessions.push_consumers())

    def client_gone(self, client_id: str) -> None:
        """Make a client's messages visible again. Its session has ended, so it gets no more messages to renew."""
        self.polls.remove_client(client_id)
        with self._runner.lock:
            self.renewals.client_gone(client_id)

    def end_polls(self) -> None:
        """Answer the receives that wait, now and from now on."""
        self._ends_polls = True
        self.polls.wake_all()

    def close(self) -> None:
        """Stop all renewals."""
        with self._runner.lock:
            self.renewals.close()

    def receive_message(self, request: Any, context: Context) -> Iterator[Any]:
        """Receive messages, or wait for some: yield first the status, then the messages, last the time."""
        response_type = message_class("ReceiveMessageResponse")
        handed_out: list[tuple[Received, Any]] = []
        status = response_type()
        status.status.code, status.status.message = Code.OK, "OK"
        try:
            handed_out = self._receive(request, context)
            if not handed_out:
                status.status.code, status.status.message = Code.MESSAGE_NOT_FOUND, "no new message"
        except RmqError as error:
            refuse(status.status, error)
        except Exception as error:
            _log.exception(
                "group %(group)s: a receive from topic %(topic)s failed",
                group=request.group.name,
                topic=request.message_queue.topic.name,
            )
            refuse(status.status, error)
        sent = 0
        try:
            yield status
            for _, message in handed_out:
                yield response_type(message=message)
                sent += 1
        except GeneratorExit:  # the client is gone
            self._give_back(request, [received for received, _ in handed_out[sent:]])
            raise
        last = response_type()
        last.delivery_timestamp.FromMilliseconds(self._runner.now_ms())
        yield last

    def _give_back(self, request: Any, messages: list[Received]) -> None:
        """Make messages that did not reach their client visible again in a second, as 5.3.3 does."""
        group, topic = request.group.name, request.message_queue.topic.name
        self._end_renewals(group, topic, tuple(message.receipt for message in messages))
        for message in messages:
            try:
                self.broker.call(ChangeInvisible(group, topic, message.receipt, _GIVEN_BACK_MS))
            except RmqError as error:  # its deadline is over, or the broker was closed
                _log.debug(
                    "group %(group)s: a message of topic %(topic)s was not given back: %(error)s",
                    group=group,
                    topic=topic,
                    error=error,
                )

    def _receive(self, request: Any, context: Context) -> list[tuple[Received, Any]]:
        client_id = client_id_of(context)
        wait_s = self.poll_time(request, context)
        group, topic = check_group(request.group.name), check_topic(request.message_queue.topic.name)
        queues = self.ensure_topic(topic).read_queues
        expression = request.filter_expression
        kind = "SQL92" if expression.type == 2 else "TAG"
        asked_ms = milliseconds(request.invisible_duration, "invisible_duration", Code.ILLEGAL_INVISIBLE_TIME)
        invisible_ms = FIRST_MS if request.auto_renew else _check_invisible(asked_ms, self.limits.min_invisible_ms)
        arrived = threading.Event()
        context.add_callback(arrived.set)
        queue_id = request.message_queue.id if 0 <= request.message_queue.id < queues else -1
        is_adopted = request.auto_renew and self.sessions.adopt(client_id, group)
        is_push = self.sessions.is_known(client_id)
        poll = self.polls.open(client_id, (topic, queue_id), arrived, is_push=is_push)
        self.sessions.group_called(group)
        notify = arrived.set
        receive = Receive(
            client_id,
            group,
            topic,
            max(1, min(request.batch_size or 1, MAX_RECEIVED)),
            invisible_ms,
            Subscription(topic, expression.expression or "*", kind),
            request.attempt_id,
            notify=notify,
        )
        clock = self._waiting_clock
        deadline = clock.monotonic() + wait_s
        try:
            while True:
                arrived.clear()
                # Look after `clear`, which could otherwise erase the signal of the end.
                if self._ends_polls or not context.is_active():
                    break
                answer = self.endpoints(client_id).call(receive)
                messages = self.broker.await_device(receive, answer).messages
                if messages:
                    return self._handed_out(request, context, client_id, messages, invisible_ms)
                poll.is_held = True
                remaining = deadline - clock.monotonic()
                if remaining <= 0 or not clock.wait(arrived, remaining):
                    break
                poll.is_held = False
            return []
        finally:
            self.polls.close(poll)
            self.broker.call(CancelReceive(notify))
            if is_adopted and not context.is_active():  # it has no stream whose end would say so
                self.sessions.remove_client(client_id)
                self.client_gone(client_id)

    def _handed_out(
        self,
        request: Any,
        context: Context,
        client_id: str,
        messages: Sequence[Received],
        invisible_ms: int,
    ) -> list[tuple[Received, Any]]:
        """Return received messages in their client's format, and renew them while the client lives."""
        group, topic = request.group.name, request.message_queue.topic.name
        if not context.is_active():
            self._give_back(request, list(messages))
            return []
        pairs = []
        for message in messages:
            try:
                pairs.append((message, to_received(message, topic, invisible_ms)))
            except (RmqError, ValueError) as error:  # it becomes a dead letter eventually; the others are read
                _log.warning(
                    "group %(group)s: a message of topic %(topic)s can't be sent to its client: %(error)s",
                    group=group,
                    topic=topic,
                    error=error,
                )
        if request.auto_renew:
            with self._runner.lock:
                if self.sessions.is_known(client_id):  # otherwise nothing would end the renewals
                    for message, _ in pairs:
                        self.renewals.add_receipt(
                            client_id, group, topic, message.receipt, message.visible_timestamp_ms
                        )
        return pairs

    def poll_time(self, request: Any, context: Context) -> float:
        """Return how many seconds a receive waits; the client's deadline includes time for the answer.

        Raises:
            Refusal: The deadline is nearer than the least long poll, as 5.3.3's proxy answers.
        """
        polling_s = milliseconds(request.long_polling_timeout, "long_polling_timeout", Code.ILLEGAL_POLLING_TIME) / 1000
        remaining = context.time_remaining()
        seconds = min(polling_s or LONG_POLL_S, LONG_POLL_S)
        if remaining is None:
            return seconds
        if remaining < self.limits.min_polling_s:
            is_old = version_parts(header(context, "x-mq-client-version")) < _POLLING_TIME_KNOWN
            raise Refusal(
                Code.BAD_REQUEST if is_old else Code.ILLEGAL_POLLING_TIME,
                f"the deadline of a receive: {remaining:.3f} s are left, expected {self.limits.min_polling_s:g} s or "
                "more, as the proxy does: let the client wait longer, or lower --min-polling of `librmq serve`",
            )
        return max(0.0, min(seconds, remaining - _ANSWER_S))

    @answers("AckMessageResponse")
    def ack_message(self, request: Any, context: Context, response: Any) -> None:
        endpoint = self.endpoints(client_id_of(context))
        group, topic = check_group(request.group.name), check_topic(request.topic.name)
        receipts = tuple(entry.receipt_handle for entry in request.entries)
        codes = []
        answers: tuple[bool, ...] = endpoint.call(Acknowledge(group, topic, receipts))
        for entry, is_good in zip(request.entries, answers, strict=True):
            code = Code.OK if is_good else Code.INVALID_RECEIPT_HANDLE
            codes.append(code)
            result = response.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle)
            result.status.code = code
            result.status.message = "OK" if is_good else "the receipt is no longer good: the message has come again"
        self._end_renewals(group, topic, receipts)
        sum_up(response.status, codes)

    @answers("ChangeInvisibleDurationResponse")
    def change_invisible_duration(self, request: Any, context: Context, response: Any) -> None:
        endpoint = self.endpoints(client_id_of(context))
        group, topic = check_group(request.group.name), check_topic(request.topic.name)
        invisible_ms = milliseconds(request.invisible_duration, "invisible_duration", Code.ILLEGAL_INVISIBLE_TIME)
        _check_invisible(invisible_ms, 0)
        changed = ChangeInvisible(group, topic, request.receipt_handle, invisible_ms)
        response.receipt_handle = endpoint.call(changed)
        self._end_renewals(group, topic, (request.receipt_handle,))

    @answers("ForwardMessageToDeadLetterQueueResponse")
    def forward_to_dead_letters(self, request: Any, context: Context, response: Any) -> None:
        endpoint = self.endpoints(client_id_of(context))
        group, topic = check_group(request.group.name), check_topic(request.topic.name)
        endpoint.call(ForwardToDeadLetters(group, topic, request.receipt_handle))
        self._end_renewals(group, topic, (request.receipt_handle,))

    def _end_renewals(self, group: str, topic: str, receipts: tuple[str, ...]) -> None:
        with self._runner.lock:
            for receipt in receipts:
                self.renewals.remove_receipt(group, topic, receipt)


def _check_invisible(invisible_ms: int, least_ms: int) -> int:
    """Return an invisible time; refuse one out of range in the words of 5.3.3's proxy."""
    if invisible_ms < least_ms:
        raise Refusal(Code.ILLEGAL_INVISIBLE_TIME, f"the invisibleTime is too small. min is {least_ms}")
    if invisible_ms > MAX_INVISIBLE_MS:
        raise Refusal(Code.ILLEGAL_INVISIBLE_TIME, f"the invisibleTime is too large. max is {MAX_INVISIBLE_MS}")
    return invisible_ms
