"""Retries and dead letters: how a message is stored again after a failure of its consumer.

A failed message goes to the retry topic of its group, delayed. After too many deliveries, or if the listener says so,
it becomes a dead letter in the group's dead-letter topic, which no consumer reads. `retry_of` sends it to the group
again. A received message that was not acknowledged goes to a retry topic of its group and topic, to be received again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Final

from librmq.broker._context import BrokerContext, BrokerPart
from librmq.broker.handlers._in_flight import ALONE, Flight, is_receive_retry
from librmq.errors import BrokerError, ConfigError, CorruptionError, MessageIllegalError, refused_copy
from librmq.message import Message, StoredMessage, dead_letter_topic, retry_level, retry_topic
from librmq.message import record as record_format
from librmq.message.delays import parse_level
from librmq.message.ids import parse_host
from librmq.message.properties import PropertyName, record_cause
from librmq.message.topics import SystemTopic, TopicPrefix, receive_retry_topic
from librmq.protocol import (
    ENDED,
    INNER_PRODUCER,
    LOCAL_HOST,
    PERM_WRITE,
    GroupSettings,
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
from librmq.store import AppendResult, MessageStore
from librmq.store.engine.read import offset_at_place
from librmq.store.format.documents import LetterIdentity, note_resent, resent_times

_log = EventLog("librmq.broker")

_WAIT: Final = PropertyName.WAIT
_DELAY: Final = PropertyName.DELAY
_RETRY_TOPIC: Final = PropertyName.RETRY_TOPIC
_SENT_TOGETHER: Final = 64
"""Dead letters that are in memory at once while they are sent again."""
_FIRST_POP_TIME: Final = "1ST_POP_TIME"
_RESENT_FIRST: Final = 64
"""Dead letters of the first request that sends some again."""
_RESENT_MOST: Final = 4096
"""The most dead letters of a request."""
_QUICK_S: Final = 0.5
"""A broker that answers within this time is asked to send twice as many dead letters at a time."""
_UNKNOWN_RESENDS: Final = (
    "group %(group)s: %(letters)d dead letters count as unsent, but may have been sent: its retry topic has copies "
    "that name no letter and have no id"
)
_ROOM: Final = 30_000
"""A dead letter with fewer bytes of properties has room for its name in a copy."""
_DELIVERY_PROPERTIES: Final = (
    PropertyName.DELAY,
    PropertyName.REAL_TOPIC,
    PropertyName.REAL_QUEUE_ID,
    PropertyName.RECONSUME_TIME,
    PropertyName.WAIT,
    PropertyName.PROCESS_DEATHS,
)


class FailedMessages(BrokerPart):
    """The messages on which one broker's consumers failed. Thread-safe."""

    def __init__(
        self,
        context: BrokerContext,
        put: Callable[..., AppendResult],
        flushed: Callable[[AppendResult, str | None], object],
        send: Callable[[SendMessage], SendResponse],
        send_together: Callable[[SendTogether], list[SendResponse]],
    ) -> None:
        """``put(message, queue_id, …)`` stores a message, ``flushed(result, wait)`` makes it as durable as a send.

        ``send(request)`` and ``send_together(request)`` send dead letters again.
        """
        super().__init__(context)
        self._send = send
        self._send_together = send_together
        self._put = put
        self._flushed = flushed
        self._store_host = parse_host(context.store.config.store_host)
        self._earlier = (
            EarlierCopies(context.store, context.store.log.end, in_order=False) if context.was_killed else None
        )
        self._resending: set[LetterIdentity] = set()
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
        if self._earlier is not None and self._was_sent_back(self._earlier, message, group.name, name, properties):
            return SentBack(is_dead, max_retries)
        if is_dead and ENDED in request.cause and self._is_letter(group.name, message, properties):
            return SentBack(True, max_retries)
        stored = self._store_copy(message, name, queue_id, properties)
        # The consumer passes the message once this returns. Its progress can reach the device before the copy would,
        # and then a loss of power would leave neither. RocketMQ does not wait here.
        self._flushed(stored, None)
        self._count("dead_letters" if is_dead else "send_backs", topic=properties[_RETRY_TOPIC], group=group.name)
        if is_dead:
            return SentBack(True, max_retries)
        levels = self._store.levels
        level = levels.cap(parse_level(properties[_DELAY]))
        return SentBack(False, max_retries, levels.deliver_timestamp_ms(level, stored.store_timestamp_ms))

    def store_damaged(self, group_name: str, topic: str, message: StoredMessage | None, cause: str) -> None:
        """Store a dead letter for a message of a topic that can't be read: with what its record still has."""
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
        self._count("dead_letters", topic=properties[_RETRY_TOPIC], group=group_name)

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
            message.reconsume_times + 1,
            store_host=None if of_receive else message.store_host,
            is_copy=True,
        )

    def _was_sent_back(
        self, earlier: EarlierCopies, message: StoredMessage, group: str, topic: str, properties: Mapping[str, str]
    ) -> bool:
        """Return whether the last process stored this failure and died before it saved the group's progress.

        After a reset a message fails on purpose a second time, so it is stored again. A reset by an earlier process
        shows in the last retry, which the group has consumed without a failure.
        """
        if not earlier.concerns(message.physical_offset) or (group, message.topic) in self._offsets.moved_back:
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
                "not acknowledged, and can't come again: "
                "retention has deleted it",
                group=group,
                topic=topic,
                queue_id=queue_id,
                physical_offset=flight.physical_offset,
            )
            return
        retries = topic if is_receive_retry(group, topic) else receive_retry_topic(group, topic)
        if self._earlier is not None and self._was_stored_again(self._earlier, message, group, retries):
            return
        name = self._topics.ensure(retries).name
        if self._offsets.consumer_offset(retries, group, 0) is None:  # from now on it has a lag there
            self._offsets.set_consumer_offset(retries, group, 0, self._store.queue_range(retries, 0)[0])
        properties = dict(message.properties)
        properties.setdefault(_FIRST_POP_TIME, str(flight.received_ms))
        if is_suspect:
            deaths, alone = process_deaths(properties)
            properties[PropertyName.PROCESS_DEATHS] = f"{deaths + 1} {alone + bool(flight.receiver & ALONE)}"
        self._store_copy(message, name, 0, properties, of_receive=True)

    def _was_stored_again(self, earlier: EarlierCopies, message: StoredMessage, group: str, retries: str) -> bool:
        """Return whether the last process stored this message again, and died before it saved that it had.

        After a reset a message is received on purpose a second time. A reset by an earlier process shows in the last
        copy, which the group has consumed.
        """
        if not earlier.concerns(message.physical_offset) or (group, message.topic) in self._offsets.moved_back:
            return False

        def is_next(copy: StoredMessage) -> bool:
            last = max(earlier.records_like(message, retries), key=lambda record: record.physical_offset)
            consumed: int = self._saved.get(f"{retries}@{group}", {}).get(last.queue_id, 0)
            return last.queue_offset >= consumed

        return earlier.has(message, (retries,), is_next, deliveries=1)

    def resend(self, request: ResendLetters) -> ResentLetters:
        """Send dead letters to their group again, and note it; without any, return those that were not sent yet.

        Raises:
            CorruptionError: The file of the notes is damaged.
        """
        store, group = self._store, request.group
        if request.letters is None:
            times = resent_times(store.path, store.files)
            letters = list(store.topic_messages(dead_letter_topic(group)))
            sent, unknown = _sent_without_note(store, group, letters, times)
            unnoted = list(map(LetterIdentity.of, sent))
            if unnoted and not request.dry_run:
                self._note_resent(unnoted)
            before = times.keys() | set(unnoted)
            identities = map(LetterIdentity.of, letters)
            return ResentLetters(tuple(letter for letter in identities if letter not in before), unknown)
        with self._runner.lock:
            claimed = set(request.letters) - self._resending
            self._resending |= claimed
        try:
            if not request.only_unsent:
                return self._resend(group, request.letters, dry_run=request.dry_run)
            # The notes are read after the claim: a request that had a letter before has noted it by then.
            unsent = claimed - resent_times(store.path, store.files).keys()
            return self._resend(group, sorted(unsent), dry_run=request.dry_run)
        finally:
            with self._runner.lock:
                self._resending -= claimed

    def _resend(self, group: str, letters: Iterable[LetterIdentity], *, dry_run: bool) -> ResentLetters:
        sent: list[LetterIdentity] = []
        present = (letter for letter in map(self._letter, letters) if letter is not None)
        try:
            while left := list(islice(present, _SENT_TOGETHER)):
                while left:
                    # Together, so that all wait once for the device: a wait for each can exceed the caller's time.
                    requests = [retry_of(letter, group) for letter in left]
                    count = len(left) if dry_run else len(self._send_together(SendTogether(requests)))
                    if not count:
                        try:
                            self._send(requests[0])  # alone, the error says why it is refused
                        except (BrokerError, MessageIllegalError) as error:
                            raise refused_copy(left[0], error) from None
                    sent += map(LetterIdentity.of, left[: count or 1])
                    left = left[count or 1 :]
        finally:
            if sent and not dry_run:
                self._note_resent(sent)
        return ResentLetters(tuple(sent))

    def _note_resent(self, letters: Iterable[LetterIdentity]) -> None:
        store = self._store
        note_resent(store.path, store.files, letters, self._runner.now_ms(), store.log.begin)

    def _letter(self, identity: LetterIdentity) -> StoredMessage | None:
        """Return a dead letter; None if another broker has it, or retention has deleted it."""
        try:
            letter = self._store.message_at(identity.physical_offset)
        except CorruptionError:  # no record begins there
            return None
        return letter if letter is not None and LetterIdentity.of(letter) == identity else None

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
    """Return the number of redeliveries before a message becomes a dead letter."""
    return group.retry_max_times if request.max_reconsume_times is None else request.max_reconsume_times


def retry_of(letter: StoredMessage, group: str) -> SendMessage:
    """Return the request that sends a dead letter to its group again, with all its retries.

    It goes to the retry topic of the group, so that only this group gets it, and is delivered immediately.

    Raises:
        ConfigError: The message is not a dead letter of the group.
    """
    if not isinstance(letter, StoredMessage):
        raise ConfigError(f"letters: expected messages such as Broker.dead_letters returns, found {letter!r:.80}")
    if letter.topic != dead_letter_topic(group):
        raise ConfigError(f"{letter.message_id} of topic {letter.topic!r} is not a dead letter of group {group!r}")
    retry = Message.from_parts(retry_topic(group), letter.stored_body, letter.flag, dict(letter.properties))
    for name in (*_DELIVERY_PROPERTIES, PropertyName.RESENT_LETTER):
        retry.properties.pop(name, None)
    if len(letter.properties_raw) < _ROOM:
        retry.properties[PropertyName.RESENT_LETTER] = _name_of(LetterIdentity.of(letter))
    host = letter.born_host or LOCAL_HOST
    # With one redelivery allowed, also in a group that allows none, whose retry would become a dead letter at once.
    flags = letter.sys_flag & (record_format.COMPRESSED | record_format.COMPRESSION_MASK)
    return SendMessage(INNER_PRODUCER, retry, 0, letter.born_timestamp_ms, host, flags, max_reconsume_times=1)


def resend_letters(
    route: Route,
    group: str,
    messages: Callable[[str], Iterable[StoredMessage]],
    letters: Iterable[StoredMessage] | None,
    *,
    only_unsent: bool,
) -> int:
    """Send dead letters to their group again, as `AdministeredRoute.resend_dead_letters`; return their number.

    ``messages(topic)`` returns those of a topic at all brokers.
    """
    requests = None
    if letters is not None:
        # `retry_of` refuses other messages than dead letters, before anything asks for their places.
        checked = [(retry_of(letter, group), letter) for letter in letters]
        requests = {LetterIdentity.of(letter): request for request, letter in checked}
    if requests is None or only_unsent:
        unsent = UnsentLetters(route, group, messages)
        if unsent.unknown:
            _log.warning(_UNKNOWN_RESENDS, group=group, letters=unsent.unknown)
        return unsent.send(requests)
    left, names = dict(requests), route.broker_names()
    for name in names:  # the broker that has a letter notes it
        for letter in resend_by(route, name, group, tuple(left), only_unsent=False):
            del left[letter]
    for request in left.values():
        having = (data.broker_name for data in route.topic_route(request.message.topic))
        route.endpoint(next((name for name in having if name in names), names[0])).call(request)
    return len(requests)


class UnsentLetters:
    """The dead letters of a group that were not sent again."""

    def __init__(self, route: Route, group: str, messages: Callable[[str], Iterable[StoredMessage]]) -> None:
        """Ask each broker for those of which its log has no copy; copies that another broker sent count as well.

        ``messages(topic)`` returns those of a topic at all brokers.
        """
        self._route, self._group = route, group
        answers = {name: route.endpoint(name).call(ResendLetters(group)) for name in route.broker_names()}
        sent = set[LetterIdentity]()
        if len(answers) > 1 and any(answer.letters for answer in answers.values()):
            logs = map(messages, (dead_letter_topic(group), retry_topic(group)))
            letters, _ = letters_sent_again(heapq.merge(*logs, key=lambda message: message.store_timestamp_ms), group)
            sent.update(map(LetterIdentity.of, letters))
        self._by_broker = {
            name: [letter for letter in answer.letters if letter not in sent] for name, answer in answers.items()
        }
        self.letters = frozenset(chain.from_iterable(self._by_broker.values()))
        self.unknown = sum(answer.unknown for answer in answers.values())
        """How many of them may have been sent."""

    @property
    def doubt(self) -> str:
        """A sentence about those that may have been sent; empty without one."""
        return _UNKNOWN_RESENDS % {"group": self._group, "letters": self.unknown} if self.unknown else ""

    def send(self, wanted: Container[LetterIdentity] | None = None) -> int:
        """Send these letters, or the wanted ones, unless they were sent meanwhile; return their number.

        Each is sent by the broker that has it.
        """
        count = 0
        for name, letters in self._by_broker.items():
            chosen = letters if wanted is None else [letter for letter in letters if letter in wanted]
            count += len(resend_by(self._route, name, self._group, chosen, only_unsent=True))
        return count


def resend_by(
    route: Route, name: str, group: str, letters: Sequence[LetterIdentity], *, only_unsent: bool
) -> list[LetterIdentity]:
    """Send dead letters to their group again by the broker that has them; return those."""
    broker, clock = route.endpoint(name), route.runner.clock
    sent: list[LetterIdentity] = []
    begin, count = 0, _RESENT_FIRST
    while begin < len(letters):
        begin_s = clock.monotonic()
        answer = broker.call(ResendLetters(group, tuple(letters[begin : begin + count]), only_unsent))
        sent.extend(answer.letters)
        begin += count
        # The broker writes all notes again at each request, so few large requests are faster. A slow one can exceed the
        # time for an answer.
        is_quick = clock.monotonic() - begin_s < _QUICK_S
        count = min(2 * count, _RESENT_MOST) if is_quick else max(count // 2, _RESENT_FIRST)
    return sent


def _sent_without_note(
    store: MessageStore, group: str, letters: list[StoredMessage], times: Mapping[LetterIdentity, int]
) -> tuple[list[StoredMessage], int]:
    """Return those of all dead letters whose copies in the log a killed process had not noted in ``times``.

    A copy is in the retry topic, and has failed in no delivery before it was stored, unlike a retry. The number is that
    of other letters that may have been sent.
    """
    unnoted = {_ids(letter) for letter in letters if LetterIdentity.of(letter) not in times}
    if not unnoted:
        return [], 0
    letters = [letter for letter in letters if _ids(letter) in unnoted]  # a message that died twice has several
    begin = min(letter.physical_offset for letter in letters)
    topic = retry_topic(group)
    retries = (
        store.messages(topic, queue_id, offset_at_place(store.queues[name, queue_id], begin))
        for name, queue_id in store.queues
        if name == topic
    )
    records = heapq.merge(letters, *retries, key=lambda record: record.physical_offset)
    sent, unknown = letters_sent_again(records, group)
    return [letter for letter in sent if LetterIdentity.of(letter) not in times], sum(
        LetterIdentity.of(letter) not in times for letter in unknown
    )


def letters_sent_again(records: Iterable[StoredMessage], group: str) -> tuple[list[StoredMessage], list[StoredMessage]]:
    """Return the dead letters of which there are copies, and those of which copies may be there.

    ``records`` are the dead letters and retries of a group in the order in which they were stored. A copy names its
    letter. Copies of librmq 0.1 do not: such a one counts for the first letter with its ids that has none, and without
    ids it can be that of any letter without ids.
    """
    letters: dict[str, StoredMessage] = {}
    named = set[str]()
    order: list[tuple[str, _Ids]] = []  # letters by name, and copies without one
    for record in records:
        if record.topic == dead_letter_topic(group):
            name = _name_of(LetterIdentity.of(record))
            letters[name] = record
            order.append((name, _ids(record)))
        elif not record.reconsume_times:
            name = record.properties.get(PropertyName.RESENT_LETTER, "")
            if name:
                named.add(name)
            else:
                order.append((name, _ids(record)))
    sent = letters.keys() & named
    waiting: dict[_Ids, dict[str, int]] = {}  # unsent letters with their numbers in the order
    last_nameless = 0
    for number, (name, ids) in enumerate(order):
        if name:
            if name not in sent:
                waiting.setdefault(ids, {})[name] = number
        elif ids == _NO_IDS:
            last_nameless = number
        elif waiting.get(ids):
            first = next(iter(waiting[ids]))
            del waiting[ids][first]
            sent.add(first)
    unknown = [name for name, number in waiting.get(_NO_IDS, {}).items() if number < last_nameless]
    return [letter for name, letter in letters.items() if name in sent], [letters[name] for name in unknown]


_Ids = tuple[str | None, str | None]
_NO_IDS: Final[_Ids] = None, None


def _name_of(letter: LetterIdentity) -> str:
    """Return what stands for a dead letter in its copies, also those in the log of another broker."""
    return " ".join(map(str, letter))


def _ids(message: StoredMessage) -> _Ids:
    return message.unique_key, message.properties.get(PropertyName.ORIGIN_MESSAGE_ID)
