"""``replay``: a second group where a skip began, or a store's messages sent to a cluster or to another topic."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final

from librmq.cli._output import Output, ProgressBar, complain
from librmq.cli._routes import connect_to
from librmq.cli._selection import MessageQuery, note_group, note_topic_of, select
from librmq.cli._stores import open_running, open_store
from librmq.client import Producer, SendResult
from librmq.diagnosis import StoreView
from librmq.diagnosis.deadletters import OF_A_LETTER
from librmq.errors import BrokerError, CorruptionError, InputError, MessageIllegalError, refused_copy
from librmq.files import DiskFiles
from librmq.files.interface import read_replaced
from librmq.message import Message, StoredMessage, dead_letter_topic, record
from librmq.message.properties import RESERVED_PROPERTIES, PropertyName, encode_properties
from librmq.message.topics import is_user_topic, validate_client_topic
from librmq.protocol import REPLAY_PRODUCER, Route, SendStatus
from librmq.store import MessageStore
from librmq.store.engine.derivation import has_queue_entry
from librmq.store.format.documents import OWN_FOLDER, RecordIdentity, checked, with_checksum
from librmq.wire.share_links import OwnedStore

_TOGETHER: Final = 256  # messages
_TOGETHER_BYTES: Final = 1 << 20
_LARGEST: Final = (1 << 63) - 1
_KEPT: Final = frozenset((PropertyName.TAGS, PropertyName.KEYS, PropertyName.UNIQUE_KEY, PropertyName.PRIORITY))
_USUAL_LIMIT: Final = 4 << 20
"""The most bytes of a body that RocketMQ's brokers take by default."""
_SURE_PROPERTIES: Final = 32_000
"""So many bytes of properties leave room for a unique id."""


def replay(arguments: argparse.Namespace, output: Output) -> int:
    """Start a second group where a group's last skip of a topic began, or send messages elsewhere."""
    if arguments.route is not None or arguments.to_topic is not None:
        return _replay_to_cluster(arguments, output)
    if None in (arguments.group, arguments.topic, arguments.to):
        raise InputError("expected --group, --topic and --to; or --route or --to-topic, to send messages")
    from librmq.diagnosis import replay, skipped

    with open_running(arguments) as broker:
        name = arguments.group, arguments.topic
        skips = [skip for skip in skipped(StoreView.over(broker.store)) if (skip.group, skip.topic) == name]
        if not skips:
            raise InputError(f"group {arguments.group!r} has skipped nothing of topic {arguments.topic!r}")
        note = skips[-1]
        messages = replay(broker, note, arguments.to)
    row = {"group": arguments.to, "topic": note.topic, "skipped_by": note.group, "skipped_at_ms": note.at_ms}
    output.row({**row, "skipped": note.messages, "messages": messages, "dry_run": arguments.dry_run})
    return 0


def _replay_to_cluster(arguments: argparse.Namespace, output: Output) -> int:
    """Send the selected messages in log order, each queue's to one queue, and print a line for each topic.

    A file in the store notes how far the cluster has acknowledged them, so that a repeated command continues there.
    """
    _check_target(arguments)
    # Without a store, ages count from now, so that a later call sends what was too new.
    selection = select(argparse.Namespace(**(vars(arguments) | {"store": None, "key": None, "id": None})))
    counted: dict[str, list[int]] = {}
    with ExitStack() as opened:
        broker = None if arguments.route is not None else opened.enter_context(open_running(arguments))
        store = opened.enter_context(open_store(arguments)) if broker is None else broker.store
        progress = _Progress(arguments, store, selection)
        bar = opened.enter_context(ProgressBar("replay", store.log.end - store.log.begin, quiet=output.is_on_terminal))
        if broker is None:
            route: Route = opened.enter_context(connect_to(arguments))
        else:
            route = broker.remote if isinstance(broker, OwnedStore) else broker
        producer, batches = opened.enter_context(Producer(route, REPLAY_PRODUCER)), None
        if not arguments.dry_run:
            opened.callback(progress.write)  # also if it is interrupted
            batches = _Batches(producer, progress, arguments.to_topic)
        large = 0
        for message, end in _messages(store, progress):
            if batches is None:
                _check_copy(producer, message, arguments.to_topic, is_first=message.topic not in counted)
            large += len(message.stored_body) > _USUAL_LIMIT
            if batches is not None:
                batches.add_message(message, end)
            bar.to(end - store.log.begin)
            count = counted.setdefault(message.topic, [0, 0])
            count[0] += 1
            count[1] += len(message.body)
        if batches is not None:
            batches.send_all()
            progress.finished(store.log.end)
        if not counted and arguments.group is not None:  # the topic is that of its dead letters
            note_group(arguments.group, StoreView.over(store).groups, output)
        elif not counted:
            note_topic_of(store, selection.topic, output, selection.queue_id)
    unconfirmed: Counter[tuple[str, str]] = Counter() if batches is None else batches.unconfirmed
    for topic, (messages, size) in sorted(counted.items()):
        row = {"topic": topic, "messages": messages, "body_bytes": size}
        of_topic = sum(count for (name, _), count in unconfirmed.items() if name == topic)
        output.row(row | {"unconfirmed": of_topic, "dry_run": arguments.dry_run})
    _warn(unconfirmed)
    if large and arguments.dry_run and arguments.route is not None:
        complain(
            f"note: {large:,} messages have more than {_USUAL_LIMIT:,} bytes: a broker refuses them, and the command "
            "stops there, unless its maxMessageSize is larger"
        )
    if not counted:
        why = (
            "earlier calls have sent all; --from-start repeats them" if progress.is_continued else "nothing is selected"
        )
        complain(f"note: nothing is sent: {why}")
    return 0


def _check_target(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other; ``--group`` with ``--to-topic`` stands for its dead letters."""
    if arguments.to is not None or (arguments.group is not None and arguments.to_topic is None):
        raise InputError("--group and --to start a second group in the store: leave them out with --route")
    if arguments.to_topic is None:
        return
    validate_client_topic(arguments.to_topic)
    if arguments.group is not None:
        if arguments.topic is not None:
            raise InputError("expected either --topic, or --group for its dead letters")
        arguments.topic = dead_letter_topic(arguments.group)
    if arguments.topic is None or arguments.topic == arguments.to_topic:
        raise InputError("--to-topic: name another topic to take messages from by --topic, or a group by --group")


def _check_copy(producer: Producer, stored: StoredMessage, to_topic: str | None, *, is_first: bool) -> None:
    """Refuse in a dry run what sending would refuse; ``is_first`` is the first message of its topic.

    Raises:
        MessageIllegalError: The topic is new, and no broker makes one of this name; or the properties are too long.
        NoRouteError: No broker has the topic, and none makes it.
    """
    topic = to_topic or stored.topic
    if is_first and not producer.route.topic_route(topic):
        validate_client_topic(topic)
    if is_first:
        producer.queues(topic)
    if len(stored.properties_raw) > _SURE_PROPERTIES:
        properties = {PropertyName.UNIQUE_KEY: "0" * 32, **_message_to_send(stored, to_topic).properties}
        size = len(encode_properties(properties))
        if size > record.MAX_PROPERTIES_SIZE:
            raise refused_copy(stored, MessageIllegalError(f"its properties and a unique id have {size:,} bytes"))


def _warn(unconfirmed: Counter[tuple[str, str]]) -> None:
    """Tell a person that messages are stored, but not as safely as the brokers are configured to store them."""
    by_status: Counter[str] = Counter()
    for (_, status), count in unconfirmed.items():
        by_status[status] += count
    if by_status:
        counts = ", ".join(f"{count:,} {status}" for status, count in sorted(by_status.items()))
        complain(
            f"note: brokers stored {by_status.total():,} messages without confirming how safely ({counts}): they are "
            "lost if a broker's machine fails before it has flushed or copied them; look at its disk and its replicas"
        )


def _messages(store: MessageStore, progress: _Progress) -> Iterator[tuple[StoredMessage, int]]:
    """Yield the selected messages still to send, each with the physical offset of the next record."""
    selection = progress.selection
    test = selection.test()
    for physical_offset, size, raw in store.log.scan(max(progress.physical_offset, store.log.begin)):
        if raw is None:
            continue
        message = StoredMessage(raw)
        before = progress.note_read(message)
        if message.store_timestamp_ms >= selection.end_ms:
            progress.stay_before(physical_offset, before)
            continue
        is_of_topic = selection.topic is not None or is_user_topic(message.topic)  # `test` compares a named topic
        if is_of_topic and has_queue_entry(message.sys_flag) and test(message):
            progress.note_reachable(physical_offset, before)
            progress.note_reachable(physical_offset + size, RecordIdentity.of(message))
            yield message, physical_offset + size


def _message_to_send(stored: StoredMessage, topic: str | None) -> Message:
    """Return a message to send: with its unique id, by which consumers recognise one that is sent twice.

    What failed attempts added is left out: the count, the retry topic, and for another topic the cause.
    """
    left_out = RESERVED_PROPERTIES if topic is None else RESERVED_PROPERTIES | OF_A_LETTER
    # All others are sent as they are: what clients refuse in new messages can be in stored ones.
    properties = {name: value for name, value in stored.properties.items() if name in _KEPT or name not in left_out}
    return Message.from_parts(topic or stored.topic, stored.body, stored.flag, properties)


class _Batches:
    """Messages that wait to be sent; those of one queue go as batches."""

    def __init__(self, producer: Producer, progress: _Progress, to_topic: str | None) -> None:
        self._producer = producer
        self._to_topic = to_topic
        self._progress = progress
        self._waiting: dict[tuple[str, int], list[StoredMessage]] = {}
        self._messages = self._bytes = 0
        self._end = progress.physical_offset
        self.unconfirmed: Counter[tuple[str, str]] = Counter()
        """Messages by topic and status, of a status that does not confirm how safely they are stored."""

    def add_message(self, message: StoredMessage, end: int) -> None:
        """Add a message, and send all if they are many; ``end`` is where its record ends."""
        self._waiting.setdefault((message.topic, message.queue_id), []).append(message)
        self._messages += 1
        self._bytes += len(message.body)
        self._end = end
        if self._messages >= _TOGETHER or self._bytes >= _TOGETHER_BYTES:
            self.send_all()

    def send_all(self) -> None:
        """Send all, each queue in order, and note how far the cluster has them."""
        try:
            for queue, messages in list(self._waiting.items()):
                self._send_queue(queue[1], messages)  # which leaves what it could not send
                del self._waiting[queue]
            self._messages = self._bytes = 0
        finally:
            waiting = [messages[0].physical_offset for messages in self._waiting.values()]
            self._progress.passed(min(waiting, default=self._end))

    def _send_queue(self, queue_id: int, stored: list[StoredMessage]) -> None:
        messages = [_message_to_send(message, self._to_topic) for message in stored]
        topic = messages[0].topic
        queues = self._producer.queues(topic) if _can_be_batch(stored, messages) else ()
        if queues:
            with suppress(MessageIllegalError, BrokerError):  # sent alone, the one that is refused has its error
                sent = self._producer.send_batch(messages, queue=queues[queue_id % len(queues)])
                self._count_unconfirmed(stored[0].topic, len(messages), sent)
                return
        for message in messages:  # the first message of an unknown topic makes it
            try:
                if message.priority is None:
                    sent = self._producer.send(
                        message, selector=lambda queues, _, queue_id: queues[queue_id % len(queues)], arg=queue_id
                    )
                else:
                    sent = self._producer.send(message)  # to the queue that its priority names
            except (MessageIllegalError, BrokerError) as error:
                raise refused_copy(stored[0], error) from None
            self._count_unconfirmed(stored[0].topic, 1, sent)
            del stored[0]

    def _count_unconfirmed(self, topic: str, messages: int, sent: SendResult) -> None:
        if sent.status is not SendStatus.SEND_OK:
            self.unconfirmed[topic, sent.status.value] += messages


def _can_be_batch(stored: Sequence[StoredMessage], messages: Sequence[Message]) -> bool:
    """Return whether one batch can hold messages: their bodies are compressed in the store, but not in a batch."""
    size = max(sum(message.size for message in stored), sum(len(message.body) for message in messages))
    have_priorities = any(message.priority is not None for message in messages)
    return len(stored) > 1 and size < _TOGETHER_BYTES and is_user_topic(messages[0].topic) and not have_priorities


class _Progress:
    """How far a selection was sent to a cluster, in a file of the store.

    The file has for each selection the physical offset up to which all was sent, the record before it, and for a
    selection with an age the time from which the age counts.
    """

    def __init__(self, arguments: argparse.Namespace, store: MessageStore, selection: MessageQuery) -> None:
        names = ("topic", "queue", "offset", "tag", "sql", "grep", "since", "until", "to_topic")
        options = {name: str(value) for name in names if (value := getattr(arguments, name)) is not None}
        self._key = json.dumps({"route": arguments.route, **options}, sort_keys=True)
        self._path = os.path.join(store.path, OWN_FOLDER, "replay.json")
        self._files = DiskFiles()
        self._is_finished = False
        self._most = _LARGEST
        self._record: RecordIdentity | None = None  # the last one that was sent
        self._last: RecordIdentity | None = None  # the last one that was read
        self._before: dict[int, RecordIdentity | None] = {}  # records by an offset that progress can reach
        self.physical_offset = 0
        self.selection = selection
        """What to send. An age in ``--since`` counts from the first call until one has sent everything."""
        progress = self._places().get(self._key)
        self.is_continued = progress is not None and not arguments.from_start
        """Whether an earlier call has come some way."""
        if progress is not None and self.is_continued:
            self.physical_offset = progress["physical_offset"]
            self._record = self._last = RecordIdentity(*progress["record"]) if progress.get("record") else None
            self.selection = replace(selection, begin_ms=min(selection.begin_ms, progress.get("since_ms", _LARGEST)))
            self._check_log(store)

    def _check_log(self, store: MessageStore) -> None:
        """Check that the log still has the last record that was sent."""
        end = store.log.end
        is_cut = self.physical_offset > end
        if self._record is not None and store.log.begin <= self._record.physical_offset:  # else retention deleted it
            message = None
            if self._record.physical_offset < end:
                with suppress(CorruptionError):  # another record begins elsewhere
                    message = store.message_at(self._record.physical_offset)
            is_cut |= message is None or RecordIdentity.of(message) != self._record
        if is_cut:
            what = "" if self._record is None else f" after message {self._record.message_id}"
            raise InputError(
                f"{self._path}: the last replay ended at {self.physical_offset:,}{what}, and the log was cut before "
                "that since then, so messages that it got later could be left out: send all again with --from-start, "
                "by which consumers get some twice, with their unique ids; or name a time to begin at with --since"
            )

    def _places(self) -> dict[str, dict[str, Any]]:
        data = read_replaced(self._files, self._path)
        if not data:
            return {}
        try:
            places = json.loads(checked(self._path, data))
        except ValueError:
            places = None
        if not isinstance(places, dict) or not all(map(_is_progress, places.values())):
            raise InputError(
                f"{self._path}: it does not say how far a replay has come; delete it to begin at the start"
            )
        return places

    def note_read(self, message: StoredMessage) -> RecordIdentity | None:
        """Note that a message was read, and return the record before it."""
        before, self._last = self._last, RecordIdentity.of(message)
        return before

    def note_reachable(self, physical_offset: int, before: RecordIdentity | None) -> None:
        """Note the record before an offset that progress can reach."""
        self._before.setdefault(physical_offset, before)

    def stay_before(self, physical_offset: int, before: RecordIdentity | None) -> None:
        """Note that a message here was too new: a later call with the same age in ``--until`` can select it."""
        if physical_offset < self._most:
            self._most = physical_offset
            self.note_reachable(physical_offset, before)

    def passed(self, physical_offset: int) -> None:
        """Note that everything before an offset was sent."""
        self.physical_offset = min(physical_offset, self._most)
        self._record = self._before.get(self.physical_offset, self._record)
        self._before = {at: record_before for at, record_before in self._before.items() if at >= self.physical_offset}
        self.write()

    def finished(self, end: int) -> None:
        """Note that everything was sent; ``end`` is that of the log."""
        self._is_finished = True
        self._before[end] = self._last
        self.passed(end)

    def write(self) -> None:
        """Write the file."""
        now: dict[str, object] = {"physical_offset": self.physical_offset}
        if self._record is not None:
            now["record"] = list(self._record)
        if not self._is_finished and self.selection.begin_ms >= 0:
            now["since_ms"] = self.selection.begin_ms
        places = self._places() | {self._key: now}
        self._files.make_folder(os.path.dirname(self._path))
        self._files.write(self._path, with_checksum(json.dumps(places, indent=1).encode()))


def _is_progress(value: object) -> bool:
    if not isinstance(value, dict) or type(value.get("physical_offset")) is not int:
        return False
    record_before = value.get("record", [0, "", 0])
    if not isinstance(record_before, list) or [type(field) for field in record_before] != [int, str, int]:
        return False
    return type(value.get("since_ms", 0)) is int
