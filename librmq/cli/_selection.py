"""What a command line selects: times as people write them, names that a store may not have, and messages."""

from __future__ import annotations

import argparse
import heapq
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Final

from librmq.cli._options import UNIT_MS
from librmq.cli._output import Output, complain, log_bar, watching_bar
from librmq.clock import Clock, ManualClock, SystemClock
from librmq.config import nearest
from librmq.errors import BodyCompressionError, CorruptionError, InputError, MissingExtraError, StoreError
from librmq.formatting import date_of, id_ranges
from librmq.message import MessageQueue, StoredMessage
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic, TopicPrefix, is_system_topic, kind_of_topic
from librmq.runtime.event_log import advance

if TYPE_CHECKING:
    from librmq.diagnosis import ClusterView
    from librmq.store import MessageFilter, MessageStore
    from librmq.store.engine.store_parts import QueueName

_MOST_OF_A_KEY: Final = 64

# ---- times

_AGO: Final = re.compile(r"-?(\d{1,12})(ms|s|m|h|d)")


def age_clock(stores: str | Sequence[str] | None, *times: str | float | None) -> Clock:
    """Return the clock from which ages among ``times`` count: that of the last message of stores not in use.

    A line on standard error says so. For stores in use, a cluster and a URL it is the machine's.
    """
    paths = [stores] if isinstance(stores, str) else stores or ()
    if not any(isinstance(time, float) or (time is not None and _AGO.fullmatch(time)) for time in times):
        return SystemClock()
    from librmq.diagnosis import StoreView
    from librmq.formatting import moment

    last_ms = []
    for path in paths:
        try:
            with StoreView.open(path) as view:
                if view.owner is not None or view.now_ms is None:
                    return SystemClock()
                last_ms.append(view.now_ms)
        except StoreError:  # the command says what is wrong
            return SystemClock()
    if not last_ms:
        return SystemClock()
    complain(
        f"note: no process uses {', '.join(paths)}: ages count from the last message, at {moment(max(last_ms))} UTC"
    )
    return ManualClock(max(last_ms))


def parse_time(text: str, clock: Clock, number: str = "milliseconds since 1970") -> int:
    """Return milliseconds since 1970 from a number, ISO 8601 (local without a zone) or an age such as ``2h``.

    ``number`` is what the error expects of a number.
    """
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= _LARGEST:
        return int(text)
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return max(0, clock.now_ms() - int(ago[1]) * UNIT_MS[ago[2]])
    try:
        return max(0, round(datetime.fromisoformat(text).timestamp() * 1000))
    except (ValueError, OverflowError, OSError):
        raise InputError(
            f"not a time: {text!r}; expected {number}, a date such as '2026-11-20 08:00' or "
            "2026-11-20T08:00:00Z, or how long ago such as 2h"
        ) from None


def iso_time(time_ms: int) -> str:
    """Return a time as ISO 8601 in UTC; the milliseconds where no calendar has the time, as an export writes them."""
    date = date_of(time_ms)
    return str(time_ms) if date is None else date.isoformat()


def times_between(arguments: argparse.Namespace, stores: str | Sequence[str] | None) -> tuple[int | None, int | None]:
    """Return the times of ``--since`` and ``--until``, in ms; None for one that is not given."""
    clock = age_clock(stores, arguments.since, arguments.until)
    since, until = (None if text is None else parse_time(text, clock) for text in (arguments.since, arguments.until))
    if since is not None and until is not None and since > until:
        raise InputError(
            f"--since {arguments.since} is later than --until {arguments.until}: expected the earlier time first"
        )
    return since, until


def read_ranges(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the options that choose a part of the stores, as settings of a report or a pipeline."""
    since, until = times_between(arguments, arguments.stores)
    options = {
        "topic": arguments.topic,
        "group": arguments.group,
        "tags": arguments.tag,
        "since": since,
        "until": until,
    }
    return {name: str(value) for name, value in options.items() if value is not None}


# ---- unknown names

GROUPS: Final = "; librmq groups lists the groups"
TOPICS: Final = "; librmq topics lists the topics"
"""What to do about an unknown name, for `near`."""


def note_group(group: str | None, groups: Collection[str], output: Output) -> None:
    """Tell a person that there is no such group, and which one is near."""
    if group is not None and group not in groups:
        output.explain_nothing(f"there is no group {group!r}{near(group, groups, GROUPS)}")


def note_topic(topic: str | None, topics: Collection[str], output: Output) -> None:
    """Tell a person that a topic has no queue, and which one is near."""
    if topic is not None and topic not in topics:
        output.explain_nothing(f"topic {topic!r} has no queue{near(topic, topics, TOPICS)}")


def note_topic_of(store: MessageStore, topic: str | None, output: Output, queue_id: int | None = None) -> None:
    """Tell a person that a topic has no queue in a store, or not this one, if no row was printed."""
    if not output.rows:
        note_topic(topic, {name for name, _ in store.queues}, output)
        note_queue(topic, queue_id, {number for name, number in store.queues if name == topic}, output)


def note_queue(topic: str | None, queue_id: int | None, ids: Collection[int], output: Output) -> None:
    """Tell a person which queues a topic has that has not this one."""
    if ids and queue_id is not None and queue_id not in ids:
        output.explain_nothing(f"topic {topic!r} has no queue {queue_id}: its queues are {id_ranges(ids)}")


def note_offsets(selection: MessageQuery, held: range | None, output: Output) -> None:
    """Tell a person which offsets a queue has, if none of the selected ones is among them."""
    offsets = selection.offsets
    if held is None or offsets is None or (offsets.start < held.stop and held.start < offsets.stop):
        return
    has = f"has the offsets {held.start} to {held.stop - 1}" if held else f"is empty; its next offset is {held.stop}"
    output.explain_nothing(f"queue {selection.queue_id} of topic {selection.topic!r} {has}")


def note_message(output: Output, *, name: str | None, kind: str, is_limited: bool) -> None:
    """Tell a person that no message has an id or a key, if no row was printed."""
    if name is not None and not output.rows and output.says_nothing_found:
        where = " among those that the other options select" if is_limited else ""
        output.explain_nothing(f"no message has the {kind} {name!r}{where}")


def note_part(stores: Iterable[str], topics: str | None, groups: str | None, output: Output) -> None:
    """Tell a person which of the topics and groups, separated by commas, none of the stores has.

    It prints nothing if a store can't be read, because its names are not known.
    """
    from librmq.diagnosis import StoreView

    known_topics: set[str] = set()
    known_groups: set[str] = set()
    if topics is None and groups is None:
        return
    try:
        for path in stores:
            with StoreView.open(path) as view:
                known_topics.update(view.topics)
                known_groups.update(view.groups)
    except StoreError:
        return
    for topic in topics.split(",") if topics else ():
        note_topic(topic.strip(), known_topics, output)
    for group in groups.split(",") if groups else ():
        note_group(group.strip(), known_groups, output)


def near(name: str, names: Collection[str], otherwise: str) -> str:
    """Return the end of a message about an unknown name: the nearest known one, ``otherwise`` if none is near."""
    nearest_name = nearest(name, names)
    return f"; did you mean {nearest_name!r}?" if nearest_name is not None else otherwise


# ---- messages

_LARGEST: Final = (1 << 63) - 1
_HEX_DIGITS: Final = frozenset("0123456789abcdefABCDEF")
_ID_LENGTHS: Final = (32, 56)
_OFFSETS: Final = re.compile(r"(\d{1,18})(?:(-)(\d{1,18})?)?", re.ASCII)
_READ: Final = 32
_SETBACK_MS: Final = 60_000
"""How far a clock of a cluster may have been set back."""

Test = Callable[[StoredMessage], bool]


@dataclass(frozen=True)
class MessageQuery:
    """The selection of a command line; None and the widest ranges select all."""

    topic: str | None = None
    queue_id: int | None = None
    offsets: range | None = None
    """Queue offsets."""
    key: str | None = None
    id: str | None = None
    tags: str | None = None
    sql: str | None = None
    grep: re.Pattern[str] | None = None
    begin_ms: int = -_LARGEST - 1
    end_ms: int = _LARGEST
    """Exclusive."""

    @property
    def is_by_index(self) -> bool:
        """Whether the index leads to the messages."""
        return self.id is not None or self.key is not None

    @property
    def has_times(self) -> bool:
        """Whether store times limit the messages."""
        return self.begin_ms > -_LARGEST - 1 or self.end_ms < _LARGEST

    def test(self, *, is_in_queue: bool = False) -> Test:
        """Return the function that decides about a message.

        With ``is_in_queue`` it comes from selected places of a selected queue, so that these need no test.

        Raises:
            FilterSyntaxError: An expression does not compile.
        """
        tests: list[Test] = []
        if self.topic is not None and not is_in_queue:
            tests.append(self._is_in_queue)
        elif self.queue_id is not None and not is_in_queue:
            tests.append(lambda message: message.queue_id == self.queue_id)
        if self.has_times:
            tests.append(lambda message: self.begin_ms <= message.store_timestamp_ms < self.end_ms)
        if self.key is not None:
            tests.append(lambda message: self.key in message.keys or self.key == message.unique_key)
        if self.tags is not None:
            from librmq.filter import TagFilter  # a grammar comes with it

            by_tags = TagFilter(self.tags)
            tests.append(lambda message: by_tags.matches(message.tags))
        if self.sql is not None:
            from librmq.filter import SqlFilter

            by_sql = SqlFilter(self.sql, strict=True)
            tests.append(lambda message: by_sql.matches(message.properties))
        if self.grep is not None:
            pattern = self.grep
            tests.append(lambda message: pattern.search(_text(message)) is not None)
        if len(tests) > 1:
            return lambda message: all(test(message) for test in tests)
        return tests[0] if tests else lambda _: True

    def _is_in_queue(self, message: StoredMessage) -> bool:
        """Return whether a message is in a selected queue of the topic, by its record or as a light queue's."""
        assert self.topic is not None
        for queue_id, queue_offset in places_in(message, self.topic):
            if self.queue_id in (None, queue_id) and (self.offsets is None or queue_offset in self.offsets):
                return True
        return False

    def select_from(self, store: MessageStore, *, reads_on: bool = False) -> Iterator[StoredMessage]:
        """Yield the selected messages of a store in log order; by queue where topic, key or id are given.

        With ``reads_on`` queues are read on behind damaged records, as `in_queue` does.
        """
        test = self.test(is_in_queue=self.topic is not None and not self.is_by_index)
        if self.id is not None:
            yield from filter(test, store.find_by_id(self.id))
        elif self.key is not None:
            yield from filter(test, self._with_key(store, self.key))
        elif self.topic is None:
            yield from filter(test, store)
        else:
            yield from filter(test, self._in_queues(store, reads_on=reads_on))

    def places(self, store: MessageStore, limit: int | None) -> array[int]:
        """Return the physical offsets of the selected messages, at most ``limit``; a batch of 5.x has several."""
        if limit is None and self == MessageQuery():
            store.refresh()
            return array("q", (place for place, _, raw in store.log.scan() if raw is not None))
        return array("q", (message.physical_offset for message in islice(self.select_from(store), limit)))

    def bar(self, what: str, store: MessageStore, *, quiet: bool = False) -> AbstractContextManager[None]:
        """Show the progress of the way that `select_from` goes."""
        if self.topic is None or self.is_by_index:
            return log_bar(what, store.path, 1, quiet=quiet)
        return watching_bar(what, sum(map(len, self.ranges(store).values())), "messages", quiet=quiet)

    def select_at(self, view: ClusterView) -> Iterator[StoredMessage]:
        """Yield the selected messages of a cluster, oldest first."""
        test, route = self.test(), view.route
        if self.id is not None:
            message = route.find_by_id(self.id)
            yield from filter(test, [] if message is None else [message])
            return
        users = (topic for topic in view.topics if kind_of_topic(topic) == "user")
        topics = users if self.topic is None else [self.topic]
        if self.key is not None:
            by_topic = [route.find_by_key(topic, self.key) for topic in topics]
            if max(map(len, by_topic), default=0) >= _MOST_OF_A_KEY:
                complain(f"note: a broker returns the last {_MOST_OF_A_KEY} messages of a key: older ones are left out")
            messages = chain.from_iterable(by_topic)
            yield from filter(test, sorted(messages, key=lambda message: message.store_timestamp_ms))
            return
        queues = [
            self._at_queue(view, queue, offsets)
            for topic in topics
            for queue, offsets in view.queues(topic).items()
            if self.queue_id in (None, queue.queue_id)
        ]
        merged = heapq.merge(*queues, key=lambda message: (message.store_timestamp_ms, message.physical_offset))
        yield from filter(self.test(is_in_queue=True), merged)

    def _at_queue(self, view: ClusterView, queue: MessageQueue, offsets: range) -> Iterator[StoredMessage]:
        begin, end = offsets.start, offsets.stop
        if self.offsets is not None:
            begin, end = max(begin, self.offsets.start), min(end, self.offsets.stop)
        elif self.has_times and self.begin_ms > 0:
            # The broker searches as if times ascended, so begin earlier and read on for as long as its clock may have
            # been set back.
            begin = max(begin, view.queue_offset_at(queue, max(0, self.begin_ms - _SETBACK_MS)))
        messages = view.messages(queue, range(begin, max(begin, end)))
        return takewhile(lambda message: message.store_timestamp_ms < self.end_ms + _SETBACK_MS, messages)

    def _with_key(self, store: MessageStore, key: str) -> list[StoredMessage]:
        is_of_any = self.topic is None or self.topic.startswith(TopicPrefix.LIGHT)  # the index has a record's own topic
        topics = {name[0] for name in store.queues} if is_of_any or self.topic is None else {self.topic}
        messages = [message for topic in topics for message in store.find_by_key(topic, key, max_messages=1 << 31)]
        return sorted(messages, key=lambda message: message.physical_offset)

    def ranges(self, store: MessageStore) -> dict[QueueName, range]:
        """Return the queue offsets that may be selected, by queue."""
        ranges = {}
        for name in sorted(store.queues):
            if self.topic not in (None, name[0]) or self.queue_id not in (None, name[1]):
                continue
            queue = store.queues[name]
            begin, end = queue.min_offset, queue.max_offset
            if self.offsets is not None:
                begin, end = max(begin, self.offsets.start), min(end, self.offsets.stop)
            if begin < end and self.has_times:
                offsets = store.times.span(queue, self.begin_ms, self.end_ms, range(begin, end))
                begin, end = offsets.start, offsets.stop
            if begin < end:
                ranges[name] = range(begin, end)
        return ranges

    def _in_queues(self, store: MessageStore, *, reads_on: bool) -> Iterator[StoredMessage]:
        matching = store.matching(tags=self.tags)
        streams = [
            in_queue(store, name, offsets, matching, reads_on=reads_on) for name, offsets in self.ranges(store).items()
        ]
        return heapq.merge(*streams, key=lambda message: message.physical_offset)


def in_queue(
    store: MessageStore,
    name: QueueName,
    offsets: range,
    matching: MessageFilter | None = None,
    *,
    reads_on: bool = False,
) -> Iterator[StoredMessage]:
    """Yield the messages of a queue with the wanted queue offsets.

    With ``reads_on`` a damaged record is left out and noted in the log, which the command reports at its end.

    Raises:
        CorruptionError: A record is damaged, without ``reads_on``.
    """
    at, step = offsets.start, _READ
    if name[0] == SystemTopic.SCHEDULE:
        matching = None  # its entries have times of delivery in place of tags
    while at < offsets.stop:
        try:
            result = store.read(*name, at, min(step, offsets.stop - at), matching)
        except CorruptionError as error:
            if not reads_on:
                raise
            if step == 1:
                store.log.leave_out(error)
                at, step = at + 1, _READ
            else:
                step = 1
            continue
        yield from (message for message in result.messages if _queue_offset(message, name) < offsets.stop)
        if result.next_offset <= at:
            return
        advance(result.next_offset - at)
        at = result.next_offset


def places_in(message: StoredMessage, topic: str) -> Iterator[tuple[int, int]]:
    """Yield queue id and queue offset of each queue of a topic that has a message: its own, or a light one.

    The entries of a light queue, ``%LMQ%…``, lead to records of other topics.
    """
    if message.topic == topic:
        yield message.queue_id, message.queue_offset
    elif PropertyName.INNER_MULTI_DISPATCH in message.properties:
        from librmq.store.engine.derivation import light_queues

        for name, queue_id, queue_offset in light_queues(
            message.topic.encode(), message.queue_id, message.properties_raw
        ):
            if name == topic:
                yield queue_id, queue_offset


def _queue_offset(message: StoredMessage, name: QueueName) -> int:
    places = places_in(message, name[0])
    return next((queue_offset for queue_id, queue_offset in places if queue_id == name[1]), message.queue_offset)


def _text(message: StoredMessage) -> str:
    """Return the body as text; of one that cannot be decompressed the stored bytes."""
    try:
        body = message.body
    except (BodyCompressionError, MissingExtraError):
        body = message.stored_body
    return body.decode(errors="backslashreplace")


def user_queue(name: QueueName) -> bool:
    """Return whether a queue belongs to no topic of the broker's own."""
    return not is_system_topic(name[0])


# ---------------------------------------------------------------------------------------------------- arguments


def select(arguments: argparse.Namespace) -> MessageQuery:
    """Return the selection by the options of `librmq.cli._options.SELECTION`."""
    since, until = times_between(arguments, arguments.store)
    if arguments.offset is not None and (arguments.topic is None or arguments.queue is None):
        raise InputError("--offset is a queue offset: name the queue too, by --topic and --queue")
    if arguments.id is not None:
        check_id(arguments.id)
    return MessageQuery(
        topic=arguments.topic,
        queue_id=arguments.queue,
        offsets=None if arguments.offset is None else _offsets(arguments.offset),
        key=arguments.key,
        id=arguments.id,
        tags=arguments.tag,
        sql=arguments.sql,
        grep=None if arguments.grep is None else _pattern(arguments.grep),
        begin_ms=-_LARGEST - 1 if since is None else since,
        end_ms=_LARGEST if until is None else until,
    )


def check_id(text: str) -> None:
    """Refuse a text that is neither an offset id nor a possible unique id of a client."""
    if not text or not text.isprintable() or " " in text:
        raise InputError(f"malformed id: expected an offset id or a unique id, found {text!r:.80}")
    if len(text) > 32 and _HEX_DIGITS.issuperset(text) and len(text) not in _ID_LENGTHS:
        raise InputError(f"malformed id: {len(text)} hex digits; an offset id has 32 or 56, a unique id 32")


def _offsets(text: str) -> range:
    match = _OFFSETS.fullmatch(text)
    if match is None:
        raise InputError(f"--offset: expected a queue offset such as 100, or 100-200, or 100-, found {text!r:.80}")
    begin = int(match[1])
    if not match[2]:
        return range(begin, begin + 1)
    if match[3] and int(match[3]) < begin:
        raise InputError(f"--offset {text}: {begin} is after {match[3]}: expected the smaller queue offset first")
    return range(begin, int(match[3]) + 1 if match[3] else _LARGEST)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InputError(f"--grep: {error} in {text!r:.80}") from None
