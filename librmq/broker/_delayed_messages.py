"""Delayed messages of one broker: how each waits, and its delivery by levels, timer and relay, or its cancellation."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

from librmq.broker._context import BrokerContext, BrokerPart
from librmq.broker.long_polling import Arrivals
from librmq.errors import CorruptionError, MessageIllegalError
from librmq.java.lang import java_int, java_long
from librmq.message import DelayLevels, Message, StoredMessage
from librmq.message.delays import delete_key, deliver_time_ms, level_of_queue_id, without_time
from librmq.message.ids import parse_offset_message_id
from librmq.message.properties import PropertyName
from librmq.message.topics import WAITING_TOPICS, SystemTopic, TopicPrefix
from librmq.protocol import NOT_SENT_HERE, CancelMessage, CancelResult
from librmq.runtime import Step
from librmq.runtime.closing import LaterPart
from librmq.scheduling import TimerConfig
from librmq.scheduling.waiting import HOP_GROUP, destination_of
from librmq.store import AppendResult, MessageStore
from librmq.store.format import directory

if TYPE_CHECKING:
    from librmq.delay import DelaySchedule
    from librmq.scheduling.relay import HopProxy
    from librmq.scheduling.timer import Timers


def _no_timer(store: MessageStore) -> str:
    """Return why a broker without timer and relay refuses a time, and what to do."""
    is_of_5 = directory.is_of_5(store.path, store.files)
    maker = "RocketMQ 5, whose timer does not run here" if is_of_5 else "a RocketMQ broker, where 4.9 would not see it"
    return (
        f"which is no delay level of this broker, and the store was made by {maker}: "
        "open the broker with BrokerConfig(timers=TimerConfig()) or BrokerConfig(hops=True)"
    )


class Deliveries(BrokerPart):
    """The delayed messages of one broker.

    Called under the runner's lock, except the notifications of `arrivals`, `waiting_form` and `target_of`.

    A message names its time by a delay level, or by one of 5.x's properties TIMER_DELAY_SEC, TIMER_DELAY_MS and
    TIMER_DELIVER_MS. In a store that librmq made, a timer takes what no level is as long as. A broker without timer,
    relay, or a level of exactly that length refuses such a time: 4.9 would deliver the message immediately.
    """

    def __init__(self, context: BrokerContext) -> None:
        super().__init__(context)
        runner, store, config = context.runner, context.store, context.config
        self._default_queues = config.default_topic_queues
        self._cancellations = context.cancellations
        self._notify_watchers = context.writing.notify_watchers
        wake_flush = None if context.flushing is None else context.wake_flush
        self.arrivals = Arrivals(runner, context.held, context.metrics, self._delayed, wake_flush)
        self._delay = context.step("delivers delayed messages", lambda now_ms: self.schedule().run_due(now_ms))
        had_delays = bool(context.tables.delays.rows) or any(topic == SystemTopic.SCHEDULE for topic, _ in store.queues)
        self.schedule = LaterPart(partial(self._make_schedule, context, runner.now_ms(), is_first=not had_delays))
        """Delivers by the delay levels; made when the first message waits for one."""
        if had_delays or config.hops:  # the relay appends without a notification
            self.schedule()
        self._timers: Timers | None = None
        self._timer_config = None if config.replica_of is not None else config.timers
        if config.replica_of is None and config.timers is None and store.is_own:
            # The files of this timer appear with the first message. A relay replaces it, unless messages of an earlier
            # run wait in the timer. A broker's directory keeps the broker's rule, because 4.9 sees no such messages.
            default = TimerConfig() if self._is_timed() or not config.hops else None
            self._timer_config = TimerConfig.of_store(store.path, store.files) or default
        if self._timer_config is not None:
            timing = context.step("delivers what is due", self._run_timers)
            self._saves_timers = context.aside("saves its timers", timing)
            self.arrivals.wake_by_topic[SystemTopic.TIMER] = partial(self._wake, timing)
            if self._is_timed() or directory.has_timer(store.path, store.files):
                self.timers()  # refuses files that do not fit
        self.relay: HopProxy | None = None
        if config.hops:
            from librmq.scheduling.relay import HopProxy

            relaying = context.step("sends on by levels", self._run_relay)
            self.relay = HopProxy(
                store,
                context.offsets,
                delivered=self._relayed,
                make_topic=self._make_target,
                is_cancelled=self._cancellations.skips,
                aside=context.aside("flushes for its hops", relaying),
            )
            self.arrivals.wake_by_topic[SystemTopic.HOP] = partial(self._wake, relaying)
        self._refusal = None if self.takes_any_delay else _no_timer(store)

    def _make_schedule(self, context: BrokerContext, start_ms: int, *, is_first: bool) -> DelaySchedule:
        from librmq.delay import DelaySchedule

        return DelaySchedule(
            context.store,
            context.tables,
            start_ms,
            context.config.delay,
            delivered=self._delivered,
            is_cancelled=self._cancellations.skips,
            persist=partial(context.writing.save, context.tables.delays),
            aside=context.aside("flushes for its delays", self._delay),
            is_first=is_first,
        )

    def timers(self) -> Timers | None:
        """Return the timer, which is opened at its first use; None for a broker without one."""
        if self._timers is None and self._timer_config is not None:
            from librmq.scheduling.timer import Timers

            with self._runner.lock:
                if self._timers is None:  # else another thread has opened it
                    self._timers = Timers(
                        self._store,
                        self._timer_config,
                        delivered=self._timed_out,
                        is_cancelled=self._cancellations.skips,
                        aside=self._saves_timers,
                    )
        return self._timers

    def _is_timed(self) -> bool:
        return self._store.queue_range(SystemTopic.TIMER, 0)[1] > 0

    def _run_timers(self, now_ms: int) -> int | None:
        timers = self.timers() if self._timers is not None or self._is_timed() else None
        return None if timers is None else timers.run_due(now_ms)

    @property
    def takes_any_delay(self) -> bool:
        """Whether a message can wait for any time, up to the timer's limit."""
        return self._timer_config is not None or self.relay is not None

    def start(self) -> None:
        self._run_schedule()
        for topic in (SystemTopic.TIMER, SystemTopic.HOP):
            if topic in self.arrivals.wake_by_topic:
                self.arrivals.wake_by_topic[topic]()

    def save(self) -> None:
        """Save the progress of each part, even if another part fails. Raises the errors of the flush."""
        with ExitStack() as saves:
            if self.relay is not None:
                saves.callback(self.relay.save)
            if self._timers is not None:
                saves.callback(self._timers.save)
            if self.schedule.made is not None:
                self.schedule.made.save(self._runner.now_ms())

    def end_timer_writes(self, why: str) -> None:
        """End all writes; later callers get ``why``. Return when no write is running. Thread-safe."""
        if self._timers is not None:
            self._timers.end_writing(why)

    def _run_schedule(self) -> None:
        schedule = self.schedule.made
        due = None if schedule is None else schedule.run_due(self._runner.now_ms())
        if due is not None:
            self._runner.wake(self._delay, due)

    def _delayed(self, level: int, store_timestamp_ms: int) -> int:
        self._runner.wake(self._delay, self.schedule().due_for(level, store_timestamp_ms))
        return self._store.levels.cap(level)

    def _delivered(self, message: StoredMessage, topic: str, queue_id: int, result: AppendResult) -> None:
        # The properties are decoded only if a held pull asks for them.
        properties = message.properties if (topic, queue_id) in self._held.by_queue else {}
        self._topics.warn_of_missing(topic)
        self.arrivals.stored(topic, queue_id, properties, result, is_delivered=True)
        if topic != SystemTopic.HOP:  # no level was counted when the relay sent it on
            self._count("delayed_out", level=str(level_of_queue_id(message.queue_id)))

    def _wake(self, step: Step) -> None:
        with self._runner.lock:
            self._runner.wake(step)

    def _timed_out(self, message: StoredMessage, result: AppendResult) -> None:
        properties = message.properties
        topic, queue_id = properties["REAL_TOPIC"], int(properties["REAL_QID"])
        self._topics.warn_of_missing(topic)
        self.arrivals.stored(topic, queue_id, properties, result, is_delivered=True)

    def _run_relay(self, now_ms: int) -> int | None:
        assert self.relay is not None
        due = self.relay.run_due(now_ms)
        self._run_schedule()  # it delivers the hops
        return due

    def _make_target(self, topic: str, queue_id: int) -> None:
        with self._runner.lock:
            target = self._topics.ensure(topic, self._default_queues)
        if not 0 <= queue_id < target.queues:
            raise MessageIllegalError(f"topic {topic!r} has {target.queues} queues, but no queue {queue_id}")

    def _relayed(self, hop: StoredMessage, result: AppendResult) -> None:
        message = self._store.message_at(result.physical_offset)
        if message is not None:
            self.arrivals.stored(message.topic, message.queue_id, message.properties, result, is_delivered=True)

    # ---- sends

    def waiting_form(self, message: Message, queue_id: int, *, is_deliver_at: bool = False) -> tuple[Message, int]:
        """Return the message to store in place of one that names a time, and its queue.

        A message that is already due is stored unchanged. A moment that the property of 5.x names is the timer's or the
        relay's, because a deleting message looks for it there; ``is_deliver_at`` says that the keyword names it.

        Raises:
            MessageIllegalError: The broker can't delay a message that long; the error names the setting to switch on.
            TimerRefusedError: The time is not a number, or too far away.
        """
        now_ms = self._runner.now_ms()
        properties = message.properties
        deliver_ms = deliver_time_ms(properties, now_ms)
        delay_ms = deliver_ms - now_ms
        if PropertyName.TIMER_DELETE_KEY not in properties:
            if delay_ms <= 0:
                return message, queue_id
            # A moment named by a property, and a timer's seconds, stay out of the levels.
            is_moment = PropertyName.TIMER_DELIVER_MS in properties and not is_deliver_at
            is_timed_only = is_moment or (self._timer_config is not None and PropertyName.TIMER_DELAY_SEC in properties)
            levels = DelayLevels() if is_timed_only else self._store.levels
            if level := levels.level_for(message.topic, delay_ms, self._refusal):
                delayed = without_time(message)
                delayed.properties[PropertyName.DELAY] = str(level)
                return delayed, queue_id
            timers = self.timers()
            if self.relay is not None and (timers is None or not timers.takes(delay_ms)):
                from librmq.scheduling.relay import send_at

                return send_at(without_time(message), deliver_ms, queue_id), 0
        timers = self.timers()
        if timers is None:
            raise MessageIllegalError(f"topic {message.topic!r}: the message cancels a timed message, {self._refusal}")
        waiting = timers.waiting_form(message, queue_id)
        return (message, queue_id) if waiting is None else (waiting, 0)

    def target_of(self, message: Message) -> tuple[str, int]:
        if self.relay is None:
            raise MessageIllegalError(
                f"topic {SystemTopic.HOP!r}: the relay, which delivers its messages, is off: "
                "open the broker with BrokerConfig(hops=True)"
            )
        properties = message.properties
        topic, target_ms = properties.get(PropertyName.HOP_TOPIC), java_long(properties.get(PropertyName.HOP_MS, ""))
        queue_id = java_int(properties.get(PropertyName.HOP_QUEUE_ID, "0"))
        if topic in (None, SystemTopic.HOP) or queue_id is None or target_ms is None:
            names = f"{PropertyName.HOP_MS}, {PropertyName.HOP_TOPIC} and {PropertyName.HOP_QUEUE_ID}"
            raise MessageIllegalError(
                f"topic {SystemTopic.HOP!r}: a message needs {names}: make it by librmq.scheduling.relay.send_at"
            )
        return topic or "", queue_id

    # ---- cancellation

    def cancel(self, request: CancelMessage) -> CancelResult:
        with self._runner.lock:
            result = self._cancel(request)
            version = self._cancellations.version
        if result.cancelled and not self._cancellations.is_durable(version):
            self._cancellations.write(self._store.log.begin, self._runner.now_ms(), version)
            with self._runner.lock:
                self._notify_watchers()
        return result

    def _cancel(self, request: CancelMessage) -> CancelResult:
        records = self._records_of(request.message_id, request.topic)
        waiting = [message for message in records if self._is_waiting(message, records)]
        if waiting:
            last = waiting[-1]
            topic, _ = destination_of(last)
            if not request.dry_run and self._cancellations.of_message(last) is None:
                self._cancellations.add(last, self._store.log.end, self._runner.now_ms())
                if last.topic == SystemTopic.TIMER and last.unique_key is not None:
                    self._delete_timer(last, topic, last.unique_key)
            return CancelResult(cancelled=True, why=f"it waited for topic {topic!r}, and is not delivered")
        sends = [message for message in records if PropertyName.TIMER_DELETE_KEY not in message.properties]
        if not sends:
            return NOT_SENT_HERE
        last = sends[-1]
        if last.topic in WAITING_TOPICS and self._cancellations.of_message(last) is not None:
            return CancelResult(cancelled=True, why="it was cancelled before its time")
        if last.topic == SystemTopic.HALF:
            return CancelResult(cancelled=False, why="half messages can't be cancelled: roll the transaction back")
        if last.topic in WAITING_TOPICS:
            return CancelResult(cancelled=False, why="it no longer waits, and its delivery is not in the log")
        return CancelResult(
            cancelled=False, why=f"delivered already: {last.topic}/{last.queue_id} has it at {last.queue_offset}"
        )

    def _records_of(self, message_id: str, topic: str | None) -> list[StoredMessage]:
        """Return the records of a producer's message in log order, without retries and dead letters of groups."""
        store, at_place = self._store, None
        try:
            _, physical_offset = parse_offset_message_id(message_id)
            at_place = store.message_at(physical_offset)
        except (ValueError, CorruptionError):
            pass  # it is a unique id
        is_place = at_place is not None and at_place.offset_id == message_id.upper()
        key = at_place.unique_key if at_place is not None and is_place else message_id
        if key is None:
            return [at_place] if at_place is not None else []
        topics = {*WAITING_TOPICS, SystemTopic.HALF} | ({topic} if topic is not None else set())
        matches = [message for name in topics for message in self._records_in(name, key)]
        if topic is None:
            targets = {destination_of(message).topic for message in matches if _is_own(message, None)} - topics
            matches += [message for name in targets if name for message in self._records_in(name, key)]
            matches = matches if targets else store.find_by_id(key)
        records = {message.physical_offset: message for message in matches if _is_own(message, topic)}
        return [records[place] for place in sorted(records)]

    def _records_in(self, topic: str, key: str) -> list[StoredMessage]:
        messages = self._store.find_by_key(topic, key, max_messages=_MOST_RECORDS)
        return [message for message in messages if message.unique_key == key]

    def _is_waiting(self, message: StoredMessage, records: list[StoredMessage]) -> bool:
        """Return whether a record waits for its time: progress is before it, and the log has no delivery of it."""
        topic, queue_offset = message.topic, message.queue_offset
        if topic == SystemTopic.SCHEDULE:
            is_passed = queue_offset < dict(self.schedule().next_offsets()).get(message.queue_id, 0)
        elif topic == SystemTopic.HOP:
            relay, saved = self.relay, self._offsets.consumer_offset(SystemTopic.HOP, HOP_GROUP, 0)
            is_passed = queue_offset < (saved or 0 if relay is None else relay.next_offset)
        elif topic == SystemTopic.TIMER:
            from librmq.store.format.timerfiles import TimerCheckpoint

            checkpoint = TimerCheckpoint.read(self._store.path, self._store.files) or TimerCheckpoint()
            timers = self._timers
            next_offset = checkpoint.queue_offset if timers is None else timers.next_offset
            read_ms = checkpoint.read_time_ms if timers is None else timers.read_ms
            out_ms = java_long(message.properties.get(PropertyName.TIMER_OUT_MS, "0")) or 0
            is_passed = queue_offset < next_offset and out_ms < read_ms
        else:
            return False
        if is_passed or PropertyName.TIMER_DELETE_KEY in message.properties:
            return False
        return not any(
            delivery.topic not in (*WAITING_TOPICS, SystemTopic.HALF)
            and delivery.physical_offset > message.physical_offset
            and delivery.born_timestamp_ms == message.born_timestamp_ms
            for delivery in records
        )

    def _delete_timer(self, waiting: StoredMessage, topic: str, unique_key: str) -> None:
        """Store a message that deletes a timer as 5.x does, so that a broker of 5.x does not deliver it either."""
        names = (
            PropertyName.TIMER_OUT_MS,
            PropertyName.REAL_TOPIC,
            PropertyName.REAL_QUEUE_ID,
            PropertyName.UNIQUE_KEY,
        )
        deletion = Message(SystemTopic.TIMER, b"0")
        deletion.properties = {name: waiting.properties[name] for name in names if name in waiting.properties}
        deletion.properties |= {
            PropertyName.TIMER_DELETE_KEY: delete_key(topic, unique_key),
            PropertyName.TIMER_DELETES_EARLIER: "true",
        }
        result = self._store.append(deletion, 0, wait=False)
        self.arrivals.stored(SystemTopic.TIMER, 0, deletion.properties, result, is_delivered=True)


_MOST_RECORDS: Final = 4096


def _is_own(message: StoredMessage, topic: str | None) -> bool:
    """Return whether a record is of the producer's message for a topic (None is any), not of a group's retry."""
    target = destination_of(message).topic if message.topic in (*WAITING_TOPICS, SystemTopic.HALF) else message.topic
    return not target.startswith((TopicPrefix.RETRY, TopicPrefix.DEAD_LETTER)) and topic in (None, target)
