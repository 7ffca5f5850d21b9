"""Retries and dead letters: how a message is stored again after a failure of its consumer.

A failed message goes to the retry topic of its group, delayed as `librmq.message.delays.retry_level` says. After too
many deliveries, or if the listener says so, it becomes a dead letter in the group's dead-letter topic, which no
consumer reads. `retry_of` sends it to the group again. A received message that was not acknowledged goes to a retry
topic of its group and topic, to be received again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Final

from librmq.broker._context import NEVER, BrokerContext, BrokerPart
from librmq.broker.handlers._in_flight import ALONE, Flight, QueueKey, is_receive_retry
from librmq.consumequeue import offset_at_place
from librmq.errors import (
    BrokerError,
    ConfigError,
    CorruptionError,
    MessageIllegalError,
    RecordError,
    RmqError,
    refused_copy,
)
from librmq.message import Message, StoredMessage, dead_letter_topic, retry_level, retry_topic
from librmq.message import record as record_format
from librmq.message.delays import parse_level
from librmq.message.ids import parse_host
from librmq.message.properties import PropertyName, record_cause
from librmq.message.topics import SystemTopic, TopicPrefix, original_topic, receive_retry_topic
from librmq.protocol import (
    ENDED,
    INNER_PRODUCER,
    LOCAL_HOST,
    PERM_WRITE,
    DescribeTopics,
    GroupSettings,
    MessageModel,
    ResendLetters,
    ResentLetters,
    ResponseCode,
    Route,
    SendBack,
    SendMessage,
    SendResponse,
    SendTogether,
    SentBack,
    process_deaths,
)
from librmq.runtime.event_log import EventLog
from librmq.scheduling.waiting import EarlierCopies
from librmq.store import AppendResult
from librmq.store.format.documents import RecordIdentity, note_resent, resent_times

_log = EventLog("librmq.broker")

_WAIT: Final = PropertyName.WAIT
_DELAY: Final = PropertyName.DELAY
_RETRY_TOPIC: Final = PropertyName.RETRY_TOPIC
_RESENT_LETTER: Final = PropertyName.RESENT_LETTER
_MOST_TIMES: Final = (1 << 31) - 1
"""What a record holds of the times that a message was consumed."""
_SENT_TOGETHER: Final = 64
"""Dead letters that are in memory at once while they are sent again."""
_FIRST_POP_TIME: Final = "1ST_POP_TIME"
_RESENT_FIRST: Final = 64
"""Dead letters of the first request that sends some again."""
_RESENT_MOST: Final = 4096
"""The most dead letters of a request."""
_QUICK_S: Final = 0.5
"""A broker that answers within this time is asked to send twice as many dead letters at a time."""
_DELIVERY_PROPERTIES: Final = (
    PropertyName.DELAY,
    PropertyName.REAL_TOPIC,
    PropertyName.REAL_QUEUE_ID,
    PropertyName.RECONSUME_TIME,
    PropertyName.WAIT,
    PropertyName.PROCESS_DEATHS,
    _RESENT_LETTER,
)
"""Properties of a dead letter that its copy does not have."""


class FailedMessages(BrokerPart):
    """The messages on which one broker's consumers failed. Thread-safe."""

    def __init__(
        self,
        context: BrokerContext,
        put: Callable[..., AppendResult],
        flushed: Callable[[AppendResult, str | None], object],
        send_together: Callable[[SendTogether], list[SendResponse]],
    ) -> None:
        """``put(message, queue_id, …)`` stores a message, ``flushed(result, wait)`` makes it as durable as a send."""
        super().__init__(context)
        self._send_together = send_together
        self._put = put
        self._flushed = flushed
        self._store_host = parse_host(context.store.config.store_host)
        self._earlier = (
            EarlierCopies(context.store, context.store.log.end, in_order=False) if context.was_killed else None
        )
        self._resending: set[RecordIdentity] = set()
        self._damaged_since: dict[QueueKey, tuple[int, int]] = {}
        """Where a group waits for a repair of a damaged message, and since when; a restart begins the wait again."""
        rows = {} if self._earlier is None else context.tables.offsets.rows
        self._saved = {name: dict(row) for name, row in rows.items() if name[:1] == "%"}

    def send_back(self, request: SendBack) -> SentBack | None:
        """Store a failed message again: for a later delivery, or as a dead letter."""
        with self._runner.lock:
            group = self._groups.get_or_create(request.group)
            if group.retry_queues <= 0:
                return None
            retries = self._topics.ensure(retry_topic(group.name), group.retry_queues)
        if not retries.permission & PERM_WRITE:
            raise BrokerError(
                ResponseCode.NO_PERMISSION,
                f"topic {retries.name!r} is not writable: its permission forbids it (create_topic sets it)",
            )
        name, queue_id = retries.name, retries.next_queue()
        message = self._message_at(request.physical_offset)
        times = message.reconsume_times
        properties = dict(message.properties)
        properties.setdefault(_RETRY_TOPIC, message.topic)
        properties[_WAIT] = "false"
        max_retries = _max_retries(group, request)
        is_dead = times >= max_retries or request.delay_level < 0
        if is_dead:
            name, queue_id = self._dead_letters_of(group), 0
            properties[_DELAY] = "0"
            record_cause(properties, request.cause, len(message.properties_raw))
        else:
            properties[_DELAY] = str(request.delay_level or retry_level(times))
        properties.setdefault(PropertyName.ORIGIN_MESSAGE_ID, message.offset_id)
        is_ended = is_dead and ENDED in request.cause
        if self._was_sent_back(message, group.name, name, properties) or (
            is_ended and self._is_letter(group.name, message, properties)
        ):
            return SentBack(is_dead, max_retries)
        stored = self._store_copy(message, name, queue_id, properties)
        # The consumer passes the message once this returns. Its progress can reach the device before the copy would,
        # and then a loss of power would leave neither. RocketMQ does not wait here.
        self._flushed(stored, None)
        topic = original_topic(group.name, properties[_RETRY_TOPIC])
        self._count("dead_letters" if is_dead else "send_backs", topic=topic, group=group.name)
        if is_dead:
            return SentBack(True, max_retries)
        levels = self._store.levels
        level = levels.cap(parse_level(properties[_DELAY]))
        return SentBack(False, max_retries, levels.deliver_timestamp_ms(level, stored.store_timestamp_ms))

    def passes_damaged(self, key: QueueKey, queue_offset: int, error: CorruptionError, after_ms: int) -> bool:
        """Return whether a group passes a message that can't be read, which then is one of its dead letters.

        Until ``after_ms`` have gone by since its first read, it does not. Called under the runner's lock.
        """
        now_ms = self._runner.now_ms()
        at, since_ms = self._damaged_since.get(key, (-1, 0))
        if at != queue_offset or since_ms > now_ms:  # a clock was set back
            since_ms = now_ms
            self._damaged_since[key] = queue_offset, now_ms
        if after_ms == NEVER or now_ms - since_ms < after_ms:
            return False
        group, topic, queue_id = key
        members = self._clients.consumers.get(group)
        becomes = "is passed, because broadcasting has no dead letters"
        if members is None or members.model is not MessageModel.BROADCASTING:
            self._store_damaged(group, topic, self._readable(topic, queue_id, queue_offset), str(error))
            becomes = "becomes a dead letter"
        _log.error(
            "group %(group)s: the message of %(topic)s/%(queue_id)d at queue offset %(queue_offset)d %(_becomes)s: "
            "%(error)s",
            group=group,
            topic=topic,
            queue_id=queue_id,
            queue_offset=queue_offset,
            error=error,
            _becomes=becomes,
        )
        del self._damaged_since[key]
        return True

    def _readable(self, topic: str, queue_id: int, queue_offset: int) -> StoredMessage | None:
        """Return a message whose body alone is damaged; None if less can be read."""
        queue, log = self._store.queue(topic, queue_id), self._store.log
        try:
            entry = None if queue is None else queue.entry(queue_offset)
            raw = None if entry is None else log.read(entry.physical_offset, entry.size)
            message = None if raw is None else StoredMessage.framed(raw)
        except (CorruptionError, RecordError):
            return None
        return message if message is not None and message.topic == topic else None

    def _store_damaged(self, group_name: str, topic: str, message: StoredMessage | None, cause: str) -> None:
        with self._runner.lock:
            group = self._groups.get_or_create(group_name)
        properties = {} if message is None else dict(message.properties)
        properties.setdefault(_RETRY_TOPIC, topic)
        properties |= {_WAIT: "false", _DELAY: "0"}
        record_cause(properties, cause, 0 if message is None else len(message.properties_raw))
        # No wait for the device: a pull calls this under the runner's lock, and the damaged record stays in the log.
        if message is None:
            letter = Message.from_parts(self._dead_letters_of(group), b"", 0, properties)
            self._put(letter, 0, self._runner.now_ms(), self._store_host, 0, 1)
        else:
            properties.setdefault(PropertyName.ORIGIN_MESSAGE_ID, message.offset_id)
            self._store_copy(message, self._dead_letters_of(group), 0, properties)
        self._count("dead_letters", topic=original_topic(group_name, properties[_RETRY_TOPIC]), group=group_name)

    def _store_copy(
        self, message: StoredMessage, topic: str, queue_id: int, properties: dict[str, str], *, of_receive: bool = False
    ) -> AppendResult:
        """Store a copy with one more attempt; that of a receive names this broker as its sender, as 5.x does."""
        return self._put(
            Message.from_parts(topic, message.stored_body, message.flag, properties),
            queue_id,
            message.born_timestamp_ms,
            self._store_host if of_receive else message.born_host,
            message.sys_flag,
            min(message.reconsume_times + 1, _MOST_TIMES),
            store_host=None if of_receive else message.store_host,
            is_copy=True,
        )

    def _was_sent_back(self, message: StoredMessage, group: str, topic: str, properties: Mapping[str, str]) -> bool:
        """Return whether the last process stored this failure and died before it saved the group's progress.

        After a reset a message fails on purpose a second time, so it is stored again. A reset by an earlier process
        shows in the last retry, which the group has consumed without a failure.
        """
        earlier = self._earlier
        if earlier is None or (group, message.topic) in self._offsets.moved_back:
            return False
        name = PropertyName.ORIGIN_MESSAGE_ID
        origin = properties[name]
        topics = retry_topic(group), dead_letter_topic(group)

        def is_failure(copy: StoredMessage) -> bool:
            real_topic = copy.properties.get(PropertyName.REAL_TOPIC)
            return origin == copy.properties.get(name) and (copy.topic in topics or real_topic in topics)

        def is_next(copy: StoredMessage) -> bool:
            is_of_topic = topic in (copy.topic, copy.properties.get(PropertyName.REAL_TOPIC))
            return is_of_topic and is_failure(copy) and not has_ended_well()

        def has_ended_well() -> bool:
            failures = filter(
                is_failure,
                (copy for at in (SystemTopic.SCHEDULE, *topics) for copy in earlier.records_like(message, at)),
            )
            last = max(failures, key=lambda copy: (copy.reconsume_times, copy.physical_offset))
            consumed = self._saved.get(f"{last.topic}@{group}", {}).get(last.queue_id, 0)
            return last.topic == topics[0] and last.queue_offset < consumed

        return earlier.has(message, (SystemTopic.SCHEDULE, topic), is_next, deliveries=1)

    def _is_letter(self, group: str, message: StoredMessage, properties: Mapping[str, str]) -> bool:
        """Return whether a message that ends its process is a dead letter already, of a consumer that was killed then.

        After a reset it becomes one again.
        """
        if not message.unique_key or (group, message.topic) in self._offsets.moved_back:
            return False
        names = PropertyName.ORIGIN_MESSAGE_ID, PropertyName.DEAD_LETTER_CAUSE
        letters = self._store.find_by_key(dead_letter_topic(group), message.unique_key)
        return any(all(letter.properties.get(name) == properties.get(name) for name in names) for letter in letters)

    def redirect(self, message: Message, queue_id: int, request: SendMessage) -> int:
        """Make a dead letter of a message that a consumer sent to its retry topic too often; return its queue."""
        if request.reconsume_times < (request.max_reconsume_times or 0):
            return queue_id
        with self._runner.lock:
            group = self._groups.get_or_create(message.topic.removeprefix(TopicPrefix.RETRY))
        if request.reconsume_times < _max_retries(group, request):
            return queue_id
        message.topic = self._dead_letters_of(group)
        return 0

    def store_again(self, flight: Flight, *, is_suspect: bool) -> None:
        """Store a received message that was not acknowledged in time, as 5.x does when it revives one.

        ``is_suspect`` says that the process which received it has ended by surprise.
        """
        group, topic, queue_id = flight.queue.key
        message = self._store.message_at(flight.physical_offset)
        if message is None:
            _log.warning(
                "group %(group)s: the message of %(topic)s/%(queue_id)d at physical offset %(physical_offset)d was "
                "not acknowledged, and can't come again: retention has deleted it",
                group=group,
                topic=topic,
                queue_id=queue_id,
                physical_offset=flight.physical_offset,
            )
            return
        retries = topic if is_receive_retry(group, topic) else receive_retry_topic(group, topic)
        if self._was_stored_again(message, group, retries):
            return
        name = self._topics.ensure(retries).name
        self._count_lag(group, retries)
        properties = dict(message.properties)
        properties.setdefault(_FIRST_POP_TIME, str(flight.received_ms))
        if is_suspect:
            deaths, alone = process_deaths(properties)
            properties[PropertyName.PROCESS_DEATHS] = f"{deaths + 1} {alone + bool(flight.receiver & ALONE)}"
        self._store_copy(message, name, 0, properties, of_receive=True)

    def _count_lag(self, group: str, retries: str) -> None:
        """Give a group progress in a retry topic of its receives, so that it has a lag there from now on."""
        if self._offsets.consumer_offset(retries, group, 0) is None:
            self._offsets.set_consumer_offset(retries, group, 0, self._store.queue_range(retries, 0)[0])

    def _was_stored_again(self, message: StoredMessage, group: str, retries: str) -> bool:
        """Return whether the last process stored this message again, and died before it saved that it had.

        After a reset a message is received on purpose a second time. A reset by an earlier process shows in the last
        copy, which the group has consumed.
        """
        earlier = self._earlier
        if earlier is None or (group, message.topic) in self._offsets.moved_back:
            return False

        def is_next(copy: StoredMessage) -> bool:
            last = max(earlier.records_like(message, retries), key=lambda record: record.physical_offset)
            consumed: int = self._saved.get(f"{retries}@{group}", {}).get(last.queue_id, 0)
            return last.queue_offset >= consumed

        return earlier.has(message, (retries,), is_next, deliveries=1)

    def resend(self, request: ResendLetters) -> ResentLetters:
        """Send dead letters to their group again, and note it; without any, return those that were not sent yet."""
        store, group, letters = self._store, request.group, request.letters
        if letters is None:
            return ResentLetters(self._unsent(group, dry_run=request.dry_run))
        with self._runner.lock:
            claimed = set(letters) - self._resending
            self._resending |= claimed
        try:
            if request.only_unsent:
                # The notes are read after the claim: a request that had a letter before has noted it by then.
                letters = tuple(sorted(claimed - resent_times(store.path, store.files).keys()))
            return self._resend(group, letters, dry_run=request.dry_run)
        finally:
            with self._runner.lock:
                self._resending -= claimed

    def _unsent(self, group: str, *, dry_run: bool) -> tuple[RecordIdentity, ...]:
        """Return the letters without a note or a copy in the log; note those of which a killed process left a copy."""
        store = self._store
        noted = resent_times(store.path, store.files)
        letters = map(RecordIdentity.of, store.topic_messages(dead_letter_topic(group)))
        unsent = {_name_of(letter): letter for letter in letters if letter not in noted}
        if not unsent:
            return ()
        begin = min(unsent.values()).physical_offset
        queues = [queue for queue in store.queues if _is_retry_of(group, queue[0])]
        copies = chain.from_iterable(
            store.messages(*queue, offset_at_place(store.queues[queue], begin)) for queue in queues
        )
        names = (copy.properties.get(_RESENT_LETTER, "") for copy in copies)
        sent = [unsent.pop(name) for name in names if name in unsent]
        if sent and not dry_run:
            self._note_resent(sent)
        return tuple(unsent.values())

    def _resend(self, group: str, letters: Iterable[RecordIdentity], *, dry_run: bool) -> ResentLetters:
        sent: list[RecordIdentity] = []
        refused: list[tuple[RecordIdentity, RmqError]] = []
        left: list[StoredMessage] = []
        present = (letter for letter in map(self._letter, letters) if letter is not None)
        try:
            while left := [*left, *islice(present, _SENT_TOGETHER - len(left))]:
                requests = [retry_of(letter, group, receives=self._receives) for letter in left]
                try:
                    # Together, so that all wait once for the device: a wait for each can exceed the caller's time.
                    count = len(left) if dry_run else len(self._send_together(SendTogether(requests)))
                except (BrokerError, MessageIllegalError) as error:
                    first = left.pop(0)
                    refused.append((RecordIdentity.of(first), refused_copy(first, error)))
                    continue
                for topic in () if dry_run else {request.message.topic for request in requests} - {retry_topic(group)}:
                    with self._runner.lock:
                        self._count_lag(group, topic)
                sent += map(RecordIdentity.of, left[:count])
                left = left[count:]
        finally:
            if sent and not dry_run:
                self._note_resent(sent)
        return ResentLetters(tuple(sent), tuple(refused))

    def _receives(self, group: str, topic: str) -> bool:
        """Return whether a group receives from a topic, so that it does not read the retry topic of the group."""
        if (members := self._clients.consumers.get(group)) is not None:
            if members.kind == "pull" and retry_topic(group) not in members.subscriptions:
                raise BrokerError(
                    ResponseCode.NO_PERMISSION,
                    f"group {group!r} pulls, and reads no retries: read its letters by dead_letters, or send them to a "
                    "topic for it by `librmq replay STORE --group GROUP --to-topic TOPIC`",
                )
            return members.kind == "simple"
        # Each consumer with a listener has progress in the retry topic of its group, from its start on.
        read = self._offsets.topics(group)
        return topic in read and retry_topic(group) not in read

    def _note_resent(self, letters: Iterable[RecordIdentity]) -> None:
        store = self._store
        note_resent(store.path, store.files, letters, self._runner.now_ms(), store.log.begin)

    def _letter(self, identity: RecordIdentity) -> StoredMessage | None:
        """Return a dead letter; None if another broker has it, or retention has deleted it."""
        try:
            letter = self._store.message_at(identity.physical_offset)
        except CorruptionError:  # no record begins there
            return None
        return letter if letter is not None and RecordIdentity.of(letter) == identity else None

    def _dead_letters_of(self, group: GroupSettings) -> str:
        with self._runner.lock:
            return self._topics.ensure(dead_letter_topic(group.name)).name

    def _message_at(self, physical_offset: int) -> StoredMessage:
        try:
            message = self._store.message_at(physical_offset)
        except CorruptionError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no readable message: {error}") from error
        if message is None:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"no message at physical offset {physical_offset}")
        return message


def _max_retries(group: GroupSettings, request: SendBack | SendMessage) -> int:
    return group.retry_max_times if request.max_reconsume_times is None else request.max_reconsume_times


def _is_retry_of(group: str, topic: str) -> bool:
    """Return whether a letter that a group gets again can be in a topic."""
    return topic == retry_topic(group) or is_receive_retry(group, topic)


def retry_of(
    letter: StoredMessage, group: str, *, receives: Callable[[str, str], bool] = lambda group, topic: False
) -> SendMessage:
    """Return the request that sends a dead letter to its group again, with all its retries.

    It goes to the retry topic of the group, so that only this group gets it, and is delivered immediately: to that of
    the letter's topic if it was received there, or if ``receives(group, topic)``.
    """
    if not isinstance(letter, StoredMessage):
        raise ConfigError(f"letters: expected messages such as Broker.dead_letters returns, found {letter!r:.80}")
    if letter.topic != dead_letter_topic(group):
        raise ConfigError(f"{letter.message_id} of topic {letter.topic!r} is not a dead letter of group {group!r}")
    properties = {name: value for name, value in letter.properties.items() if name not in _DELIVERY_PROPERTIES}
    topic, origin = retry_topic(group), properties.get(_RETRY_TOPIC, "")
    if origin and (is_receive_retry(group, origin) or receives(group, origin)):
        topic = origin if is_receive_retry(group, origin) else receive_retry_topic(group, origin)
        del properties[_RETRY_TOPIC]
    named = properties | {_RESENT_LETTER: _name_of(RecordIdentity.of(letter))}
    has_room = record_format.has_room(named)
    retry = Message.from_parts(topic, letter.stored_body, letter.flag, named if has_room else properties)
    host = letter.born_host or LOCAL_HOST
    # With one redelivery allowed, also in a group that allows none, whose retry would become a dead letter at once.
    flags = letter.sys_flag & (record_format.COMPRESSED | record_format.COMPRESSION_MASK)
    return SendMessage(INNER_PRODUCER, retry, 0, letter.born_timestamp_ms, host, flags, 1, max_reconsume_times=1)


def resend_letters(
    route: Route,
    group: str,
    messages: Callable[[str], Iterable[StoredMessage]],
    letters: Iterable[StoredMessage] | None,
    *,
    only_unsent: bool,
) -> ResentLetters:
    """Send dead letters to their group again, as `AdministeredRoute.resend_dead_letters`; return what became of each.

    One that a broker refuses does not keep the others. ``messages(topic)`` returns those of a topic at all brokers.
    """
    # `retry_of` refuses other messages than dead letters, before anything asks for their places.
    checked = [(retry_of(letter, group), letter) for letter in letters or ()]
    requests = {RecordIdentity.of(letter): (request, letter) for request, letter in checked}
    if letters is None or only_unsent:
        unsent = unsent_letters(route, group, messages)
        selected = unsent if letters is None else [letter for letter in unsent if letter in requests]
        return _send_letters(route, group, selected, only_unsent=True)
    answer = _send_letters(route, group, requests, only_unsent=False)
    sent, refused = list(answer.sent), list(answer.refused)
    names, done = route.broker_names(), {*sent, *(letter for letter, _ in refused)}
    for identity, (request, letter) in requests.items():
        if identity not in done:  # no broker that answers has it
            having = (data.broker_name for data in route.topic_route(request.message.topic))
            try:
                route.endpoint(next((name for name in having if name in names), names[0])).call(request)
                sent.append(identity)
            except (BrokerError, MessageIllegalError) as error:
                refused.append((identity, refused_copy(letter, error)))
    return ResentLetters(tuple(sent), tuple(refused))


def unsent_letters(
    route: Route, group: str, messages: Callable[[str], Iterable[StoredMessage]]
) -> list[RecordIdentity]:
    """Return the dead letters of a group that were not sent again.

    ``messages(topic)`` returns those of a topic at all brokers.
    """
    answers = [route.endpoint(name).call(ResendLetters(group)).sent for name in route.broker_names()]
    unsent = {_name_of(letter): letter for letter in chain.from_iterable(answers)}
    if unsent and len(answers) > 1:  # a broker does not know of the copies that another one has sent
        topics = {topic for name in route.broker_names() for topic in route.endpoint(name).call(DescribeTopics())}
        for copy in chain.from_iterable(messages(topic) for topic in topics if _is_retry_of(group, topic)):
            unsent.pop(copy.properties.get(_RESENT_LETTER, ""), None)
    return list(unsent.values())


def _send_letters(route: Route, group: str, letters: Iterable[RecordIdentity], *, only_unsent: bool) -> ResentLetters:
    """Send dead letters to their group again, each by the broker that has it and notes it."""
    clock = route.runner.clock
    sent: dict[RecordIdentity, None] = {}
    refused: dict[RecordIdentity, RmqError] = {}
    for name in route.broker_names():
        left = [letter for letter in letters if letter not in sent and letter not in refused]
        begin, count = 0, _RESENT_FIRST
        while begin < len(left):
            begin_s = clock.monotonic()
            request = ResendLetters(group, tuple(left[begin : begin + count]), only_unsent)
            answer = route.endpoint(name).call(request)
            sent.update(dict.fromkeys(answer.sent))
            refused.update(answer.refused)
            begin += count
            # The broker writes all notes again at each request, so few large requests are faster. A slow one can exceed
            # the time for an answer.
            is_quick = clock.monotonic() - begin_s < _QUICK_S
            count = min(2 * count, _RESENT_MOST) if is_quick else max(count // 2, _RESENT_FIRST)
    return ResentLetters(tuple(sent), tuple(refused.items()))


def _name_of(letter: RecordIdentity) -> str:
    """Return what stands for a dead letter in its copies, also those in the log of another broker."""
    return " ".join(map(str, letter))
