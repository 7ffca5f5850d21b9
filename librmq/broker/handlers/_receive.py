"""Receives, which 5.x calls POP: a received message is invisible for a time. The store stays readable by 4.9.

Mirrors ``PopMessageProcessor``, ``AckMessageProcessor``, ``ChangeInvisibleTimeProcessor`` and ``PopReviveService`` of
5.x, without their records in the log::

            receive                    acknowledge               progress moves
    ready ───────────────> in flight ───────────────> done
                           │  change: visible later, or now
                           └─ its time is over: stored again in %RETRY%<group>_<topic>, as one more attempt
                              (a group in order: the queue is read again from its first unacknowledged message)

Messages in flight are on the page of groups, and saved with the progress of groups. The broker of 4.9 ignores both.
Without them, messages in flight are delivered again immediately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from librmq.broker._context import NEVER, BrokerContext, BrokerPart
from librmq.broker._progress import Progress
from librmq.broker._topics import Topic, not_readable
from librmq.broker.handlers._in_flight import ALONE, Flight, QueueFlights, QueueKey, is_receive_retry, receiver_of
from librmq.broker.handlers._send import SendHandler
from librmq.broker.long_polling import ALL, Deadlines, Selection
from librmq.errors import BrokerError, CorruptionError, MalformedError, ReceiptError, RmqError
from librmq.message import StoredMessage
from librmq.message.ids import IN_ORDER, Receipt
from librmq.message.topics import check_receive_retry_topic, receive_retry_topic
from librmq.protocol import (
    MAX_INVISIBLE_MS,
    MAX_RECEIVED,
    OF_GROUP,
    Acknowledge,
    CancelReceive,
    ChangeInvisible,
    ForwardToDeadLetters,
    GroupSettings,
    QueryOffset,
    Receive,
    Received,
    ReceiveResponse,
    ResponseCode,
    SendBack,
    Subscription,
    Takes,
    TopicGroups,
    Unregister,
    ended_cause,
)
from librmq.runtime import StateLog
from librmq.runtime.event_log import EventLog
from librmq.store import GetStatus, ReadResult

_log = EventLog("librmq.broker")

MAX_IN_FLIGHT: Final = 10_000
"""Messages of a queue that a group can have in flight, as in 5.x."""
_ENOUGH_BYTES: Final = 4 << 20
"""A receive that has them takes no further message, because its answer has to fit into one frame."""
_RETRIES_FIRST_EVERY: Final = 5
_TRY_AGAIN_MS: Final = 1000
_READS_WITHOUT_MESSAGE: Final = 8


class ReceiveHandler(BrokerPart):
    """The receives of one broker, and its messages in flight. Called under the runner's lock."""

    def __init__(
        self,
        context: BrokerContext,
        sending: SendHandler,
        progress: Progress,
        selection: Callable[[Subscription], Selection],
    ) -> None:
        """``selection(subscription)`` refuses a filter that the broker does not serve."""
        super().__init__(context)
        self._sending = sending
        self._progress = progress
        progress.drop_flights = self._drop
        self._selection = selection
        self._queues: dict[QueueKey, QueueFlights] = {}
        self._visible: Deadlines[Flight] = Deadlines()
        self._turns: dict[tuple[str, str], int] = {}
        self._mixed: set[str] = set()  # groups about which the log has warned
        self._unordered: set[tuple[str, str]] = set()  # groups and topics about which the log has warned
        self._full: set[QueueKey] = set()  # queues of which a group can receive no more
        self._log = _log.with_fields(broker=context.name)
        self._states = StateLog(self._log, context.name)
        self._latest_ms = 0
        self._suspect_deaths = 0  # of a suspect that a receive has passed over
        self._step = context.step("ends invisible times", self._run_due)

    def start(self) -> None:
        """Restore the messages that were in flight when the store was closed, or its process killed."""
        page = self._offsets.page
        was_killed = page is not None and page.is_of_killed
        for name, place in [] if page is None else page.received:
            progress, settings = self._consumer_offset(name), self._groups.by_name.get(name.group)
            is_ordered = settings is not None and settings.is_ordered
            end = self._store.queue_range(name.topic, name.queue_id)[1]
            progress_or_none = -1 if progress is None else progress
            queue = QueueFlights.restored(
                name, place, progress_or_none, end, is_ordered=is_ordered, was_killed=was_killed
            )
            if progress is not None and (queue.flights or queue.handed_out):
                self._queues[name] = queue
                queue.committed = progress
                self._commit_progress(queue)
        for flight in self._flights():
            self._wake_at(flight)

    # ---- requests

    def receive(self, request: Receive) -> ReceiveResponse:
        for text in request.acknowledged:  # also if the receive is refused then
            self._acknowledge(request.group, request.topic, text)
        group, queues, selection = self._check_receive(request)
        now_ms = self._runner.now_ms()
        self._suspect_deaths = 0
        self._follow_clock(now_ms)
        first_ms = self._visible.first_ms
        if first_ms is not None and first_ms <= now_ms:  # its step has not run yet, such as right after a change to 0
            self._run_due(now_ms)
        notify = request.notify

        def read() -> tuple[list[Received], bool]:
            if not request.max_messages:
                return [], any(self._has_unread(group, queue) for queue in queues)
            return self._read_queues(request, group, queues, selection)

        received, has_more = read()
        if received or notify is None:
            return ReceiveResponse(tuple(received), suspect_deaths=self._suspect_deaths)
        if not has_more:
            selections = {queue: selection if queue[0] == request.topic else ALL for queue in queues}
            self._held.hold_receive(request.client_id, request.group, selections, notify)
            # Read once more, because a writer looks for held receives after its append.
            received, has_more = read()
            if received or has_more:
                self._held.remove_receive(notify)
        if has_more and not received:
            notify()  # no new message has to come: the next receive reads on
        return ReceiveResponse(tuple(received), not received, self._suspect_deaths)

    def cancel_receive(self, request: CancelReceive) -> None:
        self._held.remove_receive(request.notify)

    def acknowledge(self, request: Acknowledge) -> tuple[bool, ...]:
        return tuple([self._acknowledge(request.group, request.topic, text) for text in request.receipts])

    def _acknowledge(self, group: str, topic: str, text: str) -> bool:
        now_ms = self._runner.now_ms()
        receipt = self._parse(text)
        if receipt is None:
            return False
        flight = self._flight(group, topic, receipt)
        if flight is None:  # acknowledged, or by an older receipt; or it comes again, after a reset or a power cut
            key = group, receipt.stored_topic(group, topic), receipt.queue_id
            queue = self._queues.get(key)
            next_offset = (self._consumer_offset(key) or 0) if queue is None else queue.next_offset
            return receipt.queue_offset < next_offset and receipt.received_ms + receipt.invisible_ms > now_ms
        if flight.visible_ms <= now_ms:
            return False
        self._finish_flight(flight)
        return True

    def change(self, request: ChangeInvisible) -> str:
        _check_number("invisible_ms", request.invisible_ms, 0, MAX_INVISIBLE_MS)
        now_ms = self._runner.now_ms()
        receipt, flight = self._in_flight(request.group, request.topic, request.receipt)
        flight.visible_ms = now_ms + request.invisible_ms
        flight.receiver &= ~ALONE  # it has run for a while, and its process may do something else too
        if not request.keeps_receipt:
            if not receipt.is_ordered:
                flight.received_ms = now_ms
            # As in 5.x, receipts in order keep the time of the receive; their other number says when its time is over.
            flight.invisible_ms = flight.visible_ms - flight.received_ms
        self._wake_at(flight)
        flight.queue.note_flight(flight)
        self._offsets.saving.save_soon()
        return str(
            receipt._replace(
                first_offset=receipt.queue_offset,
                received_ms=flight.received_ms,
                invisible_ms=flight.invisible_ms,
                physical_offset=flight.physical_offset,
            )
        )

    def forward(self, request: ForwardToDeadLetters) -> None:
        _, flight = self._in_flight(request.group, request.topic, request.receipt)
        self._make_dead_letter(request.group, flight.physical_offset, request.cause)
        if self._is_in_flight(flight):
            self._finish_flight(flight)

    # ---- checks

    def _check_receive(self, request: Receive) -> tuple[GroupSettings, list[tuple[str, int]], Selection]:
        """Refuse an invalid receive; return the group, the queues in turn, and the selection."""
        _check_number("max_messages", request.max_messages, 1 if request.notify is None else 0, MAX_RECEIVED)
        _check_number("invisible_ms", request.invisible_ms, 1, MAX_INVISIBLE_MS)
        if request.max_attempts is not None:
            _check_number("max_attempts", request.max_attempts, 1, 1 << 31)
        name = request.topic
        group, topic = self._groups.consuming(request.group), self._topics.readable(name)
        if not topic.read_queues:
            raise not_readable(name)
        selection = ALL if request.subscription is None else self._selection(request.subscription)
        retries = receive_retry_topic(group.name, name)
        if not group.is_ordered:
            check_receive_retry_topic(group.name, name)
        elif (retries, 0) not in self._store.queues:
            retries = ""  # A group in order makes none, but has those of before it was made ordered.
        if retries:
            self._check_owner(group.name, name, retries)
        self._warn_of_pulls(group.name, name)
        if topic.message_type == "FIFO" and not group.is_ordered:
            self._warn_of_order(group.name, name)
        return group, self.queues_in_turn(group, topic, retries), selection

    def _check_owner(self, group: str, topic: str, retries: str) -> None:
        """Refuse a group whose retry topic of ``topic`` belongs to another group: each would get the other's messages.

        Two pairs can share a name: group ``a`` with topic ``b_c``, and group ``a_b`` with topic ``c``.
        """
        owners = self._clients.retry_owners
        owner = owners.get(retries)
        if owner is None:
            others = (other for other in self._progress.groups(TopicGroups(retries)) if other != group)
            owner = owners[retries] = next(others, group)
        if owner != group:
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"group {group!r} can't receive from topic {topic!r}: its retry topic {retries!r} belongs to group "
                f"{owner!r}, and each would get the other's messages; give one of the groups another name",
            )

    def _warn_of_order(self, group: str, topic: str) -> None:
        """Log once that a group without order receives from a topic whose messages are sent in order."""
        if (group, topic) not in self._unordered:
            self._unordered.add((group, topic))
            self._log.warning(
                "%(broker)s: topic %(topic)s is of type FIFO, and group %(group)s receives from it without order, as a "
                "group does by default: make the group ordered by set_group(…, is_ordered=True) or `librmq group "
                "create STORE GROUP --ordered`",
                group=group,
                topic=topic,
            )

    def _warn_of_pulls(self, group: str, topic: str) -> None:
        """Log once that a group both pulls and receives: each way moves progress past the other's messages."""
        members = self._clients.consumers.get(group)
        if members is None or members.kind == "simple" or topic not in members.subscriptions or group in self._mixed:
            return
        self._mixed.add(group)
        self._log.warning(
            "%(broker)s: group %(group)s receives from topic %(topic)s while it has %(kind)s consumers there, and "
            "both move one progress: messages "
            "will be missed or repeated. Give each kind of consumer its own group",
            group=group,
            topic=topic,
            kind=members.kind,
        )

    def _warn_of_full(self, key: QueueKey, room: int) -> None:
        """Log that a group gets no further message of a queue, each time that this begins."""
        if room > 0:
            self._full.discard(key)
        elif key not in self._full:
            self._full.add(key)
            group, topic, queue_id = key
            self._log.warning(
                "%(broker)s: group %(group)s has received %(count)d messages of topic %(topic)s, queue %(queue)d, "
                "without acknowledging them, and gets no more before it does. Let the broker hold messages that wait "
                "for a time (deliver_at), or acknowledge sooner",
                group=group,
                count=MAX_IN_FLIGHT,
                topic=topic,
                queue=queue_id,
            )

    def queues_in_turn(self, group: GroupSettings, topic: Topic, retries: str) -> list[tuple[str, int]]:
        """Return a receive's queues, from the next one in turn; retries come last, and first in every fifth receive.

        In a topic of priorities the last queue comes first, and retries always last, in the percentage of receives that
        the group's factor says.
        """
        name, queues = topic.name, topic.read_queues
        turn = self._turns.get((group.name, name), 0)
        self._turns[group.name, name] = turn + 1
        by_priority = topic.message_type == "PRIORITY" and not group.is_ordered and turn % 100 < group.priority_factor
        names = [(name, queues - 1 - number if by_priority else (turn + number) % queues) for number in range(queues)]
        if retries:
            are_first = not by_priority and turn % _RETRIES_FIRST_EVERY == _RETRIES_FIRST_EVERY - 1
            names.insert(0 if are_first else queues, (retries, 0))
        return names

    # ---- reads

    def _read_queues(
        self, request: Receive, group: GroupSettings, queues: list[tuple[str, int]], selection: Selection
    ) -> tuple[list[Received], bool]:
        """Take messages from the queues in turn, up to the requested number; return also whether a queue has more."""
        received: list[Received] = []
        has_more = False
        size = 0
        if request.takes is not Takes.NO_SUSPECT:  # they are among the retries, which come last else, or in order
            queues = sorted(queues, key=lambda queue: queue[0] == request.topic and not self._ended_in(group, queue))
        stored = self._store.queues
        for topic, queue_id in queues:
            room = request.max_messages - len(received)
            if room <= 0 or size >= _ENOUGH_BYTES:
                break
            queue_selection = ALL if topic != request.topic else selection  # a redelivered message has matched before
            if (topic, queue_id) not in stored:
                continue
            try:
                messages, has_unread = self._read_queue(
                    request, group, (group.name, topic, queue_id), room, _ENOUGH_BYTES - size, queue_selection
                )
            except RmqError:
                if not received:
                    raise
                break  # the received messages are in flight already, and the next receive meets the error
            received += messages
            size += sum(item.message.size for item in messages)
            has_more |= has_unread
        if received and self._metrics is not None:
            self._metrics.count("messages_out", len(received), topic=request.topic, group=group.name)
            self._metrics.count("bytes_out", size, topic=request.topic, group=group.name)
        return received, has_more

    def _has_unread(self, group: GroupSettings, name: tuple[str, int]) -> bool:
        if name not in self._store.queues:
            return False
        queue = self._queue(group.name, *name)
        if group.is_ordered and queue.is_locked(self._runner.now_ms()):
            return False
        return queue.next_offset < self._store.queues[name].max_offset

    def _ended_in(self, group: GroupSettings, name: tuple[str, int]) -> bool:
        return name in self._store.queues and self._queue(group.name, *name).has_deaths

    def _read_queue(
        self, request: Receive, group: GroupSettings, key: QueueKey, room: int, room_bytes: int, selection: Selection
    ) -> tuple[list[Received], bool]:
        """Take messages of one queue, until they have ``room_bytes``.

        Return also whether more are unread although no read found a match.
        """
        now_ms = self._runner.now_ms()
        queue = self._queue(*key)
        if group.is_ordered:
            if queue.is_locked(now_ms):
                is_same = bool(request.attempt_id) and request.attempt_id == queue.attempt_id
                return self._redelivered(request, queue) if is_same else [], False
            queue.read_again()
            queue.attempt_id = request.attempt_id
        received: list[Received] = []
        has_more = False
        max_attempts = group.retry_max_times + 1 if request.max_attempts is None else request.max_attempts
        receiver = 0 if request.max_process_deaths is None else receiver_of(request.client_id)
        has_suspects = receiver and (queue.has_deaths or key[1] != request.topic)
        for _ in range(_READS_WITHOUT_MESSAGE):
            room = min(room, MAX_IN_FLIGHT - len(queue.flights))
            self._warn_of_full(key, room)
            if room <= 0:
                break
            before = queue.next_offset
            result = self._read(key, before, room, selection, request.damage_ms)
            if result is None:
                break
            next_offset = result.next_offset
            for message in result.messages:
                queue_offset = message.queue_offset
                deaths = queue.deaths_of(message) if has_suspects else (0, 0)
                attempt = 1 + max(queue.attempts(queue_offset), message.reconsume_times)
                if (attempt > max_attempts or deaths[0]) and (cause := _cause(request, group, attempt, *deaths)):
                    self._make_dead_letter(group.name, message.physical_offset, cause)
                    continue
                if room_bytes <= 0 or (deaths[0] and (received or request.takes is Takes.NO_SUSPECT)):
                    self._suspect_deaths, next_offset = deaths[0] or self._suspect_deaths, queue_offset
                    break
                visible_ms = now_ms + request.invisible_ms
                times = now_ms, request.invisible_ms, attempt, visible_ms
                flight = Flight(queue, queue_offset, message.physical_offset, *times)
                flight.receiver = receiver | ALONE if deaths[0] and request.takes is Takes.ALONE else receiver
                queue.add_flight(flight, is_ordered=group.is_ordered)
                self._visible.set(flight, visible_ms)
                if not received:  # the others are visible at the same time
                    self._runner.wake(self._step, visible_ms)
                received.append(self._received(request.topic, message, flight, group.is_ordered))
                room_bytes -= message.size
            queue.next_offset = next_offset
            if received or next_offset == before or next_offset != result.next_offset:
                break
        else:
            has_more = True
        if received or queue.progress != queue.committed:
            self._commit_progress(queue)
        return received, has_more

    def _read(
        self, key: QueueKey, queue_offset: int, room: int, selection: Selection, damage_ms: int
    ) -> ReadResult | None:
        """Read a queue, and pass what has become a dead letter; None while the queue waits at a damaged message."""
        _, topic, queue_id = key
        try:
            result = self._store.read(topic, queue_id, queue_offset, room, selection.matching, checked=True)
        except CorruptionError as error:
            if self._sending.failed().passes_damaged(key, queue_offset, error, damage_ms):
                begin, end = self._store.queue_range(topic, queue_id)
                result = ReadResult(GetStatus.NO_MATCHED_MESSAGE, (), queue_offset + 1, begin, end)
            elif damage_ms == NEVER:
                raise
            else:
                self._states.failing(_reading(key), error)
                return None
        if self._states.causes:
            self._states.works(_reading(key))
        return result

    def _redelivered(self, request: Receive, queue: QueueFlights) -> list[Received]:
        """Answer a repeated attempt in order with the messages in flight."""
        messages = [(flight, self._store.message_at(flight.physical_offset)) for flight in queue.flights.values()]
        return [
            self._received(request.topic, message, flight, True) for flight, message in messages if message is not None
        ]

    def _received(self, topic: str, message: StoredMessage, flight: Flight, is_ordered: bool) -> Received:
        _, stored_topic, queue_id = flight.queue.key
        receipt = Receipt(
            first_offset=flight.queue_offset,
            received_ms=flight.received_ms,
            invisible_ms=flight.invisible_ms,
            revive_queue=IN_ORDER if is_ordered else 0,
            retry="0" if stored_topic == topic else "1",
            broker_name=self._broker_name,
            queue_id=queue_id,
            queue_offset=flight.queue_offset,
            physical_offset=flight.physical_offset,
        )
        return Received(message, stored_topic, str(receipt), flight.attempt, flight.visible_ms)

    # ---- messages in flight

    def _queue(self, group: str, topic: str, queue_id: int) -> QueueFlights:
        """Return a queue's messages in flight; start again if a reset or another consumer moved the progress."""
        key = group, topic, queue_id
        queue = self._current(key)
        if queue is not None:
            return queue
        progress = self._consumer_offset(key)
        begin, end = self._store.queue_range(topic, queue_id)
        first = self._first(key, begin, end) if progress is None else progress
        queue = QueueFlights(key, first, self._offsets.place(topic, group, queue_id))
        self._queues[key] = queue
        queue.committed = -1 if progress is None else progress
        self._commit_progress(queue)
        return queue

    def _first(self, key: QueueKey, begin: int, end: int) -> int:
        """Return where a group without progress starts, as in 5.x: where a new queue begins, else its last message."""
        if is_receive_retry(key[0], key[1]):
            return begin
        first = self._progress.query_offset(QueryOffset(*key))
        if first is not None:
            return first
        start = max(end - 1, begin)
        if start > begin:
            group, topic, queue_id = key
            _log.warning(
                "group %(group)s is new in %(topic)s/%(queue_id)d and skips its first %(skipped)d messages: it starts "
                "at %(queue_offset)d; clients that receive have no consume_from: reset_group chooses another start",
                group=group,
                topic=topic,
                queue_id=queue_id,
                skipped=start - begin,
                queue_offset=start,
            )
        return start

    def _consumer_offset(self, key: QueueKey) -> int | None:
        group, topic, queue_id = key
        return self._offsets.consumer_offset(topic, group, queue_id)

    def _current(self, key: QueueKey) -> QueueFlights | None:
        """Return a queue's messages in flight; drop them and return None if their progress was moved by others."""
        queue = self._queues.get(key)
        if queue is None:
            return None
        place = queue.place
        if queue.committed != (self._consumer_offset(key) if place is None else place.position):
            self._drop(*key)
            return None
        return queue

    def _drop(self, group: str, topic: str, queue_id: int) -> None:
        """Drop what is in flight in a queue, and let the next receive begin at the progress."""
        queue = self._queues.pop((group, topic, queue_id), None)
        if queue is not None:
            for flight in queue.flights.values():
                self._visible.discard(flight)
            queue.drop()
            self._offsets.saving.save_soon()

    def _commit_progress(self, queue: QueueFlights) -> None:
        progress = queue.progress
        if queue.place is None or progress < queue.committed:
            group, topic, queue_id = queue.key
            self._offsets.set_consumer_offset(topic, group, queue_id, progress)
        else:
            if progress != queue.committed:
                queue.place.set(progress)
            self._offsets.saving.save_soon()
        queue.committed = progress

    def _is_in_flight(self, flight: Flight) -> bool:
        queue = flight.queue
        return self._current(queue.key) is queue and queue.flights.get(flight.queue_offset) is flight

    def _finish_flight(self, flight: Flight) -> None:
        """Finish a message: move the progress, and wake receives that wait for the queue in order or for room."""
        queue = flight.queue
        group, topic, _ = queue.key
        was_full = len(queue.flights) >= MAX_IN_FLIGHT
        queue.remove_flight(flight)
        self._visible.discard(flight)
        self._commit_progress(queue)
        if was_full or (self._groups.get_or_create(group).is_ordered and not queue.is_locked(self._runner.now_ms())):
            self._held.wake_receives(group, topic)

    def _parse(self, text: str) -> Receipt | None:
        try:
            receipt = Receipt.parse(text)
        except MalformedError:
            return None
        return receipt if receipt.broker_name == self._broker_name else None

    def _flight(self, group: str, topic: str, receipt: Receipt) -> Flight | None:
        queue = self._current((group, receipt.stored_topic(group, topic), receipt.queue_id))
        flight = None if queue is None else queue.flights.get(receipt.queue_offset)
        return flight if flight is not None and flight.has(receipt) else None

    def _in_flight(self, group: str, topic: str, text: str) -> tuple[Receipt, Flight]:
        """Return the delivery of a receipt; raise `ReceiptError` if it has ended."""
        receipt = self._parse(text)
        if receipt is None:
            raise ReceiptError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{text!r:.200} is not a receipt of {self._broker_name}: pass one unchanged",
            )
        flight = self._flight(group, topic, receipt)
        if flight is None or flight.visible_ms <= self._runner.now_ms():
            raise ReceiptError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"group {group!r}, {topic!r}/{receipt.queue_id}: the message at queue offset {receipt.queue_offset} is "
                "no longer in flight under this receipt: it was delivered again, or was acknowledged",
            )
        return receipt, flight

    def _make_dead_letter(self, group: str, physical_offset: int, cause: str) -> None:
        self._sending.failed().send_back(SendBack(group, physical_offset, -1, 0, cause=cause))

    # ---- the end of invisible times

    def _wake_at(self, flight: Flight) -> None:
        self._visible.set(flight, flight.visible_ms)
        self._runner.wake(self._step, flight.visible_ms)

    def _run_due(self, now_ms: int) -> int | None:
        """Deliver the messages again that were not acknowledged within their invisible time."""
        self._follow_clock(now_ms)
        for flight in self._visible.pop_due(now_ms):
            if not self._is_in_flight(flight):
                continue
            group, topic, _ = flight.queue.key
            if self._groups.get_or_create(group).is_ordered:
                if self._has_ended(flight):
                    flight.queue.note_death(flight)
                self._held.wake_receives(group, topic)
                continue
            what = f"storing messages of group {group} again, which were not acknowledged"
            try:
                self._sending.failed().store_again(flight, is_suspect=self._has_ended(flight))
            except RmqError as error:
                self._visible.set(flight, now_ms + _TRY_AGAIN_MS)
                self._states.failing(what, error, again_ms=_TRY_AGAIN_MS)
                continue
            self._states.works(what)
            if self._is_in_flight(flight):
                self._finish_flight(flight)
        return self._visible.first_ms

    def _flights(self) -> Iterator[Flight]:
        for queue in self._queues.values():
            yield from queue.flights.values()

    def _has_ended(self, flight: Flight) -> bool:
        """Return whether the client that received a message has ended by surprise."""
        members = self._clients.consumers.get(flight.queue.key[0])
        receiver = flight.receiver & ~ALONE
        return bool(receiver) and (members is None or receiver not in map(receiver_of, members.clients))

    def left(self, request: Unregister) -> None:
        """Note that a client leaves its group in order: what it has received is no suspect."""
        self._forget(request.consumer_group, {receiver_of(request.client_id)})

    def end(self) -> None:
        """Note that the broker ends in order: what its clients have received is no suspect, and others stay suspect."""
        for group, members in self._clients.consumers.items():
            self._forget(group, set(map(receiver_of, members.clients)))
        if (page := self._offsets.page) is not None:
            page.is_needed |= any(flight.receiver for flight in self._flights())

    def _forget(self, group: str | None, receivers: set[int]) -> None:
        for flight in self._flights():
            if flight.queue.key[0] == group and flight.receiver & ~ALONE in receivers:
                flight.receiver = 0
                flight.queue.note_flight(flight)

    def _follow_clock(self, now_ms: int) -> None:
        """After the clock was set back, hide no message for longer than its invisible time from now."""
        if now_ms < self._latest_ms:
            for flight in self._flights():
                if flight.visible_ms > now_ms + flight.invisible_ms:
                    flight.visible_ms = now_ms + flight.invisible_ms
                    flight.queue.note_flight(flight)
                    self._wake_at(flight)
        self._latest_ms = now_ms


def _reading(key: QueueKey) -> str:
    group, topic, queue_id = key
    return f"group {group}: receiving from {topic}/{queue_id}"


def _cause(request: Receive, group: GroupSettings, attempt: int, deaths: int, deaths_alone: int) -> str | None:
    """Return why a message becomes a dead letter before an attempt; None if it is delivered."""
    limit = request.max_process_deaths or 0
    if limit == OF_GROUP:
        limit = group.max_process_deaths
    if 0 < limit <= deaths_alone:
        return ended_cause(deaths_alone, limit)
    max_attempts = group.retry_max_times + 1 if request.max_attempts is None else request.max_attempts
    if attempt - deaths <= max(max_attempts, 1):  # an end of the process uses up no attempt
        return None
    # In order, an acknowledged message can end here too: an earlier one was not acknowledged.
    return f"{'not passed by its group' if group.is_ordered else 'not acknowledged'} in {attempt - 1} attempts"


def _check_number(name: str, value: int, minimum: int, maximum: int) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        raise BrokerError(ResponseCode.SYSTEM_ERROR, f"{name}: expected {minimum} to {maximum}, found {value!r:.80}")
