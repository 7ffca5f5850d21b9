"""Recording what clients do as events of a history, which `librmq.testing.check_history` judges.

A recorder stands around `Endpoint.call` for sends, transactions, receives and progress. For queues and deliveries a
`ConsumerRecorder` watches each consumer. The bodies of messages are in no event. ``docs/histories.md`` has the events.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Literal, Protocol, TypeVar, cast
from weakref import WeakSet

from librmq.client.client import Member
from librmq.client.operations import Operation, Watchers
from librmq.errors import BrokerError, MessageIllegalError, NoRouteError, RmqError
from librmq.java.lang import java_int
from librmq.message import DEFAULT_LEVELS, DelayLevels, Message, MessageQueue, StoredMessage
from librmq.message.delays import deliver_time_ms, time_properties
from librmq.message.ids import Receipt
from librmq.message.properties import PropertyName, is_half
from librmq.message.topics import TopicPrefix
from librmq.protocol import (
    Acknowledge,
    CancelMessage,
    CancelResult,
    ChangeInvisible,
    EndTransaction,
    ForwardToDeadLetters,
    Heartbeat,
    HoldPlace,
    MessageModel,
    Place,
    PullMessage,
    QueryOffset,
    Receive,
    Received,
    ReceiveResponse,
    Request,
    ResponseCode,
    SendBatch,
    SendMessage,
    SendResponse,
    SendStatus,
    TransactionState,
    UpdateOffset,
)
from librmq.runtime.event_log import EventLog

R = TypeVar("R")
_Reader = tuple[str, str, MessageQueue]
"""A process and a group, and a queue that they read."""
Event = dict[str, Any]
"""One event of a history, by the names of its fields."""

_TIMES: Final = frozenset((PropertyName.TIMER_DELAY_MS, PropertyName.TIMER_DELAY_SEC, PropertyName.TIMER_DELIVER_MS))
_UNIQUE_KEY: Final = PropertyName.UNIQUE_KEY
_SHARDING_KEY: Final = PropertyName.SHARDING_KEY
_REFUSALS: Final = frozenset(
    (
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        ResponseCode.MESSAGE_ILLEGAL,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
    )
)
"""Codes after which nothing can be stored."""
_log = EventLog("librmq.client")


def id_of(message: StoredMessage) -> str:
    """Return the name of a message in a history: its unique id, else the broker's id of its first record."""
    return message.unique_key or message.properties.get(PropertyName.ORIGIN_MESSAGE_ID) or message.offset_id


class EventSink(Protocol):
    """What takes the events of a recorder."""

    def begins(self, event: Event) -> None:
        """Take an event; one with `begin_ms` is as it stands if its process is killed now, and changes at its end."""

    def ends(self, event: Event, *, is_last: bool = True) -> None:
        """Take the same event at its end, and once more unless that ``is_last``."""

    def delivers(self, events: list[Event], messages: Sequence[StoredMessage], *, calls_listener: bool) -> None:
        """Take the deliveries of messages that are handed out together."""

    def cancels(self, name: str, *, is_sure: bool = False) -> None:
        """Note that a message was taken back before its delivery time: it may come or not, or for sure does not."""


class Recorder:
    """Turns requests of clients, and what consumers tell, into events. Thread-safe if its sink is."""

    def __init__(self, now_ms: Callable[[], int], sink: EventSink, *, describes_groups: bool = True) -> None:
        """``describes_groups`` False leaves groups and their dead letters to the caller, who sees the stores."""
        self.levels: DelayLevels = DEFAULT_LEVELS
        """The delay levels of the brokers."""
        self.now_ms = now_ms
        self._sink = sink
        self._describes_groups = describes_groups
        self._groups: set[str] = set()
        self._named: dict[str, str] = {}  # client ids by stable name
        self._watched: WeakSet[Any] = WeakSet()
        self._committed: dict[tuple[str, str, str, int], int] = {}
        """The progress that a broker saved last, by group and queue."""
        self._running: dict[int, tuple[Event, StoredMessage]] = {}  # deliveries by identity of the message
        self._returned: dict[int, int] = {}  # the end of such deliveries whose outcome is open
        self._earlier_attempts: dict[tuple[str, str], int] = {}
        """The attempts of other groups that a dead letter's record counts, by group that reads it and message."""
        self._flights: dict[str, tuple[Event, int]] = {}  # receives by receipt, with the end of their time
        self._lapsed: set[tuple[str, MessageQueue]] = set()
        """Groups and queues in which such a time has ended."""
        self.asked_ms: dict[_Reader, int] = {}
        """When a process has asked for the progress of a queue, from which it will read it."""
        self.places: dict[_Reader, Place] = {}
        """Where a process keeps the progress of a queue, if no kill undoes it."""

    def add_event(self, kind: str, /, **fields: object) -> Event:
        """Record an event."""
        event = {"event": kind, **fields}
        self._sink.begins(event)
        return event

    # ---- requests

    def call(
        self, process: str, broker_name: str, request: Request[R], call: Callable[[Any], Any], *, has_page: bool = False
    ) -> R:
        """Pass a request on by ``call``, and record it; ``has_page`` if no kill undoes what the broker answers."""
        if isinstance(request, SendMessage | SendBatch):
            return cast(R, self._send(process, broker_name, request, call))
        if isinstance(request, EndTransaction):
            return cast(R, self._end_transaction(process, request, call))
        if isinstance(request, Heartbeat):
            for member in getattr(request.client, "members", list)():  # only a client that runs here has members
                if hasattr(member, "assigned") and member not in self._watched:  # not noted by a route of the user's
                    self.watch_consumer(process, member)
        if isinstance(request, CancelMessage):
            return cast(R, self._cancel(request, call))
        if isinstance(request, QueryOffset | HoldPlace):
            return cast(R, self._take_up(process, broker_name, request, call))
        answer: R = call(request)
        if isinstance(request, PullMessage):
            if request.commit_offset is not None:
                queue = MessageQueue(request.topic, broker_name, request.queue_id)
                self.committed(process, request.group, queue, request.commit_offset, only_forward=True)
        elif isinstance(request, UpdateOffset):
            queue, is_forward = MessageQueue(request.topic, broker_name, request.queue_id), bool(request.only_forward)
            self.committed(process, request.group, queue, request.queue_offset, only_forward=is_forward)
        elif isinstance(request, Receive | Acknowledge | ChangeInvisible | ForwardToDeadLetters):
            self._receive(process, broker_name, request, answer, has_page)
        return answer

    def _take_up(
        self, process: str, broker_name: str, request: QueryOffset | HoldPlace, call: Callable[[Any], Any]
    ) -> object:
        """Note when a process asks where it goes on in a queue, and where it keeps its progress."""
        reader = process, request.group, MessageQueue(request.topic, broker_name, request.queue_id)
        if isinstance(request, QueryOffset):
            self.asked_ms[reader] = self.now_ms()
        elif not request.was_held:
            self.asked_ms.setdefault(reader, self.now_ms())
        answer = call(request)
        if isinstance(answer, Place):
            self.places[reader] = answer
        return answer

    def _send(
        self,
        process: str,
        broker_name: str,
        request: SendMessage | SendBatch,
        call: Callable[[SendMessage | SendBatch], SendResponse],
    ) -> SendResponse:
        messages = (request.message,) if isinstance(request, SendMessage) else request.messages
        topic, begin_ms = messages[0].topic, self.now_ms()
        if topic.startswith(TopicPrefix.RETRY):  # a consumer has sent it back
            return call(request)
        sends = [
            self._begin_send(process, message, begin_ms)
            for message in messages
            if PropertyName.TIMER_DELETE_KEY not in message.properties
        ]
        outcome, response = "unknown", None
        try:
            response = call(request)
            if response.status is SendStatus.SEND_OK:
                outcome = "ok" if response.queue_offset >= 0 else "unknown"  # unknown after a send one way
        except (MessageIllegalError, NoRouteError):
            outcome = "failed"
            raise
        except BrokerError as error:
            outcome = "failed" if error.code in _REFUSALS else "unknown"
            raise
        finally:
            end_ms = self.now_ms()
            for number, (event, is_hidden) in enumerate(sends):
                event["end_ms"], event["outcome"] = end_ms, outcome
                if response is not None and outcome == "ok" and not is_hidden:
                    event["broker"], event["queue_id"] = broker_name, response.queue_id
                    event["queue_offset"] = response.queue_offset + number
                if "id" not in event and response is not None:
                    event["id"] = response.offset_ids[number]
                    self._sink.begins(event)
                if "id" in event:
                    self._sink.ends(event)
            for message in messages:
                if outcome != "failed" and PropertyName.TIMER_DELETE_KEY in message.properties:
                    self._sink.cancels(message.properties[PropertyName.TIMER_DELETE_KEY].rpartition("+")[2])
        return response

    def _begin_send(self, process: str, message: Message, begin_ms: int) -> tuple[Event, bool]:
        """Return the event of a send that begins, and whether its message is not yet in a queue of its topic."""
        event: Event = {"event": "send", "process": process}
        if (name := message.properties.get(_UNIQUE_KEY)) is not None:
            event["id"] = name
        event |= {"topic": message.topic, "begin_ms": begin_ms, "end_ms": begin_ms, "outcome": "unknown"}
        is_hidden = self._add_promises(event, message, begin_ms)
        if name is not None:  # an event needs a name
            self._sink.begins(event)
        return event, is_hidden

    def _add_promises(self, event: Event, message: Message, begin_ms: int) -> bool:
        """Add what the sender asked for; return whether the message is not yet in a queue of its topic."""
        properties, not_before_ms = message.properties, None
        if message._delays is not None:
            properties = time_properties(message)
        if PropertyName.DELAY in properties:
            level = java_int(properties[PropertyName.DELAY]) or 0
            if level > 0:
                not_before_ms = begin_ms + self.levels.delay_ms(self.levels.cap(level))
        elif not _TIMES.isdisjoint(properties):
            not_before_ms = deliver_time_ms(properties, begin_ms)
        if not_before_ms is not None:
            event["not_before_ms"] = not_before_ms
        if (key := message.properties.get(_SHARDING_KEY)) is not None:
            event["sharding_key"] = key
        if is_half(message.properties):
            event["half"] = True
            return True
        return not_before_ms is not None

    def _end_transaction(
        self, process: str, request: EndTransaction, call: Callable[[EndTransaction], object]
    ) -> object:
        if request.state is TransactionState.UNKNOWN or not request.message_id:
            return call(request)
        event = self.add_event(
            "end_transaction",
            process=process,
            id=request.message_id,
            begin_ms=(begin_ms := self.now_ms()),
            end_ms=begin_ms,
            decision="commit" if request.state is TransactionState.COMMIT else "rollback",
            outcome="unknown",
        )
        try:
            answer = call(request)
            event["outcome"] = "ok"
        finally:
            event["end_ms"] = self.now_ms()
            self._sink.ends(event)
        return answer

    def _cancel(self, request: CancelMessage, call: Callable[[CancelMessage], CancelResult]) -> CancelResult:
        try:
            result = call(request)
        except RmqError:  # it can be cancelled nevertheless
            self._sink.cancels(request.message_id)
            raise
        if result.cancelled and not request.dry_run:
            self._sink.cancels(request.message_id, is_sure=True)
        return result

    def committed(
        self, process: str, group: str, queue: MessageQueue, queue_offset: int, *, only_forward: bool = False
    ) -> None:
        """Record progress that a broker has saved, where it differs from the last; with ``only_forward`` no earlier."""
        last = self._committed.get((group, *queue), -1)
        if queue_offset == last or (only_forward and queue_offset < last):
            return
        self._committed[group, *queue] = queue_offset
        self.add_event("commit", group=group, **_place(queue), queue_offset=queue_offset, at_ms=self.now_ms())

    # ---- receives

    def _receive(
        self,
        process: str,
        broker_name: str,
        request: Receive | Acknowledge | ChangeInvisible | ForwardToDeadLetters,
        answer: Any,  # noqa: ANN401 (that of the request)
        has_page: bool,
    ) -> None:
        if isinstance(request, Receive):
            response: ReceiveResponse = answer
            if request.acknowledged:
                self._acknowledged(request.acknowledged, has_page)
            for received in response.messages:
                self._received(process, broker_name, request, received)
        elif isinstance(request, Acknowledge):
            valid = (receipt for receipt, is_valid in zip(request.receipts, answer, strict=True) if is_valid)
            self._acknowledged(valid, has_page)
        elif isinstance(request, ChangeInvisible):
            flight = self._flights.pop(request.receipt, None)
            if flight is not None:
                self._flights[answer] = flight[0], self.now_ms() + request.invisible_ms
        else:
            flight = self._flights.get(request.receipt)
            self._end_flight(request.receipt, "retry")
            if flight is not None:
                self.dead_letter(request.group, flight[0]["id"])

    def _acknowledged(self, receipts: Iterable[str], has_page: bool) -> None:
        self.end_invisible_times()  # a broker can take an acknowledgement after it has given the message back
        for receipt in receipts:
            # In order, what is acknowledged behind a message that comes again comes again too.
            is_kept = has_page and not Receipt.parse(receipt).is_ordered
            self._end_flight(receipt, "ok", is_kept=is_kept)

    def _received(self, process: str, broker_name: str, request: Receive, received: Received) -> None:
        message, group, times = received.message, request.group, received.attempt - 1
        queue = MessageQueue(received.stored_topic, broker_name, message.queue_id)
        event = self._delivery(process, group, message, request.topic, queue, message.queue_offset, times)
        self.end_invisible_times(event)
        if received.attempt > 1 and (group, queue) in self._lapsed:
            # A group in order: the queue is read again from its first message without an acknowledgement, and those
            # behind it that have one come again too.
            self._lapsed.discard((group, queue))
            self.assigned("revoke", process, group, queue)
        self._sink.delivers([event], [message], calls_listener=False)
        self._flights[received.receipt] = event, received.visible_timestamp_ms

    def end_invisible_times(self, again: Event | None = None) -> None:
        """End the received messages that are visible again: all of them by time, and the one that comes ``again``."""
        now_ms = self.now_ms()
        for receipt, (event, visible_ms) in list(self._flights.items()):
            is_again = again is not None and (event["id"], event["group"]) == (again["id"], again["group"])
            if visible_ms <= now_ms or is_again:
                self._end_flight(receipt, "died", min(visible_ms, now_ms))
                if "stored_in" not in event:  # this is a retry of a group without order, which reads nothing again
                    self._lapsed.add((event["group"], MessageQueue(event["topic"], event["broker"], event["queue_id"])))

    def _end_flight(self, receipt: str, outcome: str, at_ms: int | None = None, *, is_kept: bool = False) -> None:
        flight = self._flights.pop(receipt, None)
        if flight is not None:
            self._end(flight[0], outcome, at_ms, is_kept=is_kept)

    def has_committed(self, group: str, queue: MessageQueue) -> bool:
        """Return whether a broker has saved progress of a group in a queue, since it last crashed."""
        return (group, *queue) in self._committed

    # ---- deliveries

    def delivered(
        self,
        process: str,
        group: str,
        queue: MessageQueue,
        messages: Sequence[StoredMessage],
        *,
        calls_listener: bool = False,
    ) -> list[Event]:
        """Record that messages of one queue were handed out; their ends come by `ended`."""
        events = []
        for message in messages:
            topic = queue.topic
            if topic.startswith(TopicPrefix.RETRY):
                topic = message.properties.get(PropertyName.RETRY_TOPIC) or topic
            event = self._delivery(process, group, message, topic, queue, message.queue_offset, message.reconsume_times)
            self._running[id(message)] = event, message
            events.append(event)
        self._sink.delivers(events, messages, calls_listener=calls_listener)
        return events

    def _delivery(
        self,
        process: str,
        group: str,
        message: StoredMessage,
        topic: str,
        queue: MessageQueue,
        queue_offset: int,
        attempt: int,
    ) -> Event:
        read_topic, broker_name, queue_id = queue
        name = id_of(message)
        if read_topic.startswith(
            TopicPrefix.DEAD_LETTER
        ):  # its record counts the attempts of the group that gave it up
            self._earlier_attempts.setdefault((group, name), attempt)
        if read_topic.startswith((TopicPrefix.DEAD_LETTER, TopicPrefix.RETRY)):
            attempt -= self._earlier_attempts.get((group, name), 0)
        event: Event = {
            "event": "deliver",
            "process": process,
            "group": group,
            "id": name,
            "topic": topic,
            "broker": broker_name,
            "queue_id": queue_id,
            "queue_offset": queue_offset,
            "attempt": attempt,
            "begin_ms": self.now_ms(),
        }
        if topic != read_topic:
            event["stored_in"] = read_topic
        return event

    def ended(self, message: StoredMessage, outcome: str, *, is_kept_later: bool = False) -> Event | None:
        """Record the end of a delivery; return it, unless it had ended."""
        running = self._running.pop(id(message), None)
        returned_ms = self._returned.pop(id(message), None)
        if running is None or "outcome" in running[0]:
            return None
        self._end(running[0], outcome, returned_ms, is_last=not is_kept_later)
        return running[0]

    def _end(
        self,
        event: Event,
        outcome: str,
        at_ms: int | None = None,
        *,
        is_kept: bool = False,
        is_last: bool = True,
    ) -> None:
        if "outcome" not in event:
            event |= {"end_ms": self.now_ms() if at_ms is None else at_ms, "outcome": outcome}
            if is_kept:
                event["kept_ms"] = self.now_ms()
            self._sink.ends(event, is_last=is_last)

    def kept(self, event: Event, *, is_kept: bool) -> None:
        """Record whether no kill undoes the end of a delivery any more; if not, nothing else will say it either."""
        if is_kept:
            event["kept_ms"] = self.now_ms()
        self._sink.ends(event)

    def returned(self, message: StoredMessage) -> None:
        """Note that a listener has returned whose outcome is still open."""
        if id(message) in self._running:
            self._returned[id(message)] = self.now_ms()

    def crashed(self, processes: Collection[str]) -> None:
        """Record that processes have crashed, with which their deliveries end."""
        for process in sorted(processes):
            self.add_event("crash", process=process, at_ms=self.now_ms())
        self.died(processes)

    def died(self, processes: Collection[str]) -> None:
        """Record the end of the deliveries that still ran in processes."""
        for key, (event, _) in list(self._running.items()):
            if event["process"] in processes:
                del self._running[key]
                self._end(event, "died")

    def broker_crashed(self, broker_name: str) -> None:
        """Record that a broker has crashed; the progress that it has later need not be the last recorded one."""
        self.add_event("crash", broker=broker_name, at_ms=self.now_ms())
        self._committed = {place: progress for place, progress in self._committed.items() if place[2] != broker_name}
        self.places = {reader: place for reader, place in self.places.items() if reader[2].broker_name != broker_name}

    # ---- groups

    def assigned(
        self,
        name: Literal["assign", "revoke"],
        process: str,
        group: str,
        queue: MessageQueue,
        at_ms: int | None = None,
    ) -> None:
        """Record that a process reads a queue from now on, or from ``at_ms``, or no longer."""
        at_ms = self.now_ms() if at_ms is None else at_ms
        self.add_event(name, process=process, group=group, **_place(queue), at_ms=at_ms)

    def watch_consumer(self, process: str, consumer: Any) -> str:  # noqa: ANN401 (any consumer)
        """Record a consumer in a process; return the process of its events: its stable name, if it has one.

        Of clients on several hosts that share a stable name, only the first has it; the others have their ids.
        """
        client_id = consumer.client.client_id
        name = client_id.partition("@")[2] if consumer.client.has_stable_name else ""
        if name and self._named.setdefault(name, client_id) != client_id:
            name = client_id
        self._watched.add(consumer)
        consumer._watch_by(ConsumerRecorder(self, name or process, consumer, process).watchers)
        return name or process

    def joined(self, consumer: Member) -> None:
        """Record a group, once."""
        group, data = consumer.group, consumer.consumer_data()
        if group in self._groups or not self._describes_groups or data is None:
            return
        self._groups.add(group)
        topics = [topic for topic in data.subscriptions if not topic.startswith(TopicPrefix.RETRY)]
        fields: dict[str, object] = {"ordered": consumer.keeps_order}
        if data.model is MessageModel.BROADCASTING:
            fields["broadcast"] = True
        if any(data.subscriptions[topic].expression != "*" for topic in topics):
            fields["selects"] = []  # a filter is evaluated at the broker, so nothing is promised for any message
        self.add_event("group", group=group, topics=topics, **fields)

    def dead_letter(self, group: str, name: str) -> None:
        """Record a dead letter, as the broker says."""
        if self._describes_groups:
            self.add_event("dead_letter", group=group, id=name, at_ms=self.now_ms())

    def reset(self, group: str, topic: str) -> None:
        """Record that the progress of a group was moved."""
        self.add_event("reset", group=group, topic=topic, at_ms=self.now_ms())
        self._committed = {key: saved for key, saved in self._committed.items() if key[:2] != (group, topic)}


def _place(queue: MessageQueue) -> dict[str, object]:
    return dict(zip(("topic", "broker", "queue_id"), queue, strict=True))


class ConsumerRecorder:
    """Records the queues and deliveries of one consumer."""

    def __init__(self, recorder: Recorder, process: str, consumer: Member, route_process: str) -> None:
        """Record a consumer in ``process``, whose requests go over the route of ``route_process``."""
        self._recorder = recorder
        self._route_process = route_process
        self._unkept: dict[MessageQueue, list[Event]] = {}
        """What has ended, and is not kept yet, by queue; of queues that it reads."""
        self.process = process
        """The process of its events."""
        self._group = consumer.group
        self._consumer = consumer
        self._polled: Sequence[StoredMessage] = ()

    @property
    def watchers(self) -> Watchers:
        """What records the queues that the consumer reads, and what becomes of their messages."""
        return {
            "take": self._take,
            "release": self._release,
            "reset": lambda moment: self._recorder.reset(self._group, moment.topic or ""),
            "hand_out": self._hand_out,
            "settle": self._settle,
            "keep": self._keep,
            "give_up": lambda moment: self._recorder.dead_letter(
                self._group, id_of(cast("StoredMessage", moment.message))
            ),
        }

    def _take(self, moment: Operation) -> None:
        recorder = self._recorder
        recorder.joined(self._consumer)
        if moment.result == "moved" and moment.queue and not recorder.has_committed(self._group, moment.queue):
            recorder.reset(self._group, moment.queue.topic)
        if moment.queue is not None:
            self._unkept[moment.queue] = []
            # What its former reader ends from its question on can come again here.
            asked_ms = recorder.asked_ms.pop(self._reader(moment.queue), None)
            recorder.assigned("assign", self.process, self._group, moment.queue, asked_ms)

    def _release(self, moment: Operation) -> None:
        if moment.queue is not None:
            for event in self._unkept.pop(moment.queue, []):
                self._recorder.kept(event, is_kept=False)
            self._recorder.assigned("revoke", self.process, self._group, moment.queue)

    def _reader(self, queue: MessageQueue) -> _Reader:
        return self._route_process, self._group, queue

    def _hand_out(self, moment: Operation) -> None:
        messages: Any = moment.messages
        is_call = moment.result == "listener"
        if moment.queue is not None:
            self._recorder.delivered(self.process, self._group, moment.queue, messages, calls_listener=is_call)
        if not is_call:
            self._polled = *self._polled, *messages

    def _settle(self, moment: Operation) -> None:
        messages: Any = moment.messages
        outcome = moment.result
        if not messages:
            messages, self._polled = self._polled, ()
        for message in messages:
            if outcome == "open":
                self._recorder.returned(message)
            else:
                queue: MessageQueue = message.queue
                unkept = self._unkept.get(queue) if outcome == "ok" and self._place(queue) is not None else None
                event = self._recorder.ended(message, outcome, is_kept_later=unkept is not None)
                if unkept is not None and event is not None:
                    unkept.append(event)

    def _keep(self, moment: Operation) -> None:
        for queue in list(self._unkept) if moment.queue is None else [moment.queue]:
            events = self._unkept.get(queue, [])
            place = self._place(queue)
            for event in events:
                self._recorder.kept(event, is_kept=place is not None and place.is_open)
            events.clear()

    def _place(self, queue: MessageQueue) -> Place | None:
        return self._recorder.places.get(self._reader(queue))
