"""Tests that begin with a store: chosen topics and groups of a broker's folder, and the fewest with which a test fails.

::

    folder of a broker ── StoreStart.read ──> messages, progress ──> a small store in memory ──> one kit, or many
                                                    │
                          the parts of them that still fail (`shrink`) ──> a small store to keep

The folder is only read, like by every read-only handle. The small store is made as by `librmq.store.extract`: all of a
message stays but its offsets.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeAlias

from librmq.config import StoreConfig, check_path, nearest, to_timestamp_ms
from librmq.errors import ConfigError, CorruptionError
from librmq.files import DiskFiles, Files, MemoryFiles, OverlayFiles
from librmq.message import StoredMessage, retry_topic
from librmq.message.topics import (
    SystemTopic,
    TopicPrefix,
    is_own_group,
    kind_of_topic,
    receive_retry_topic,
    validate_group,
)
from librmq.protocol import PERM_READ, PERM_WRITE
from librmq.store import BrokerTables
from librmq.store.format.broker_tables import topic_row
from librmq.testing._network import FOLDER, SMALL_FILES, machine_ms
from librmq.testing.histories._history import show

if TYPE_CHECKING:
    from librmq.diagnosis import StoreView
    from librmq.store import Extracted

_END: Final = 1 << 62
_SHOWN: Final = 20

Progress: TypeAlias = Literal["begin", "end"] | datetime | int | Mapping[str, Mapping[int, int]] | None
"""Progress of a group: its recorded one (None), all messages, none, those stored from a time on, those from a queue
offset on in each queue, or from queue offsets by topic and queue id. Offsets are those of the source."""
GroupNames: TypeAlias = Collection[str] | Mapping[str, Progress]
"""Names of groups, or their progress by name."""


@dataclass(frozen=True)
class StoreStart:
    """The messages and groups of a store that kits start from. Immutable; one thread uses it."""

    topics: tuple[str, ...]
    """The topics whose messages it has."""
    groups: tuple[str, ...]
    """The groups whose progress it has."""
    messages: Sequence[StoredMessage] = field(repr=False)
    """The messages of the topics, and what waits for a delivery to them, in log order, as in the source."""
    now_ms: int
    """The time at which a kit begins: after the source's last message, or the machine's if there is none."""
    config: StoreConfig = field(repr=False)
    """The settings of a kit's store."""
    _tables: BrokerTables = field(repr=False)

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        topics: Collection[str] | None = None,
        groups: GroupNames | None = None,
        config: StoreConfig | None = None,
    ) -> Self:
        """Read the store in ``path``; see `Kit.from_store`."""
        check_path("store", path, "the folder of a store")
        from librmq.diagnosis.view import viewed  # few tests need what it loads

        with viewed(path) as view:
            damage = view.store.cut_short
            if damage is not None:
                raise CorruptionError(
                    damage.file, damage.offset, damage.kind, f"{damage.what}: run librmq salvage or recover on a copy"
                )
            names = _topic_names(view, topics)
            by_topic = {topic: _messages(view, topic) for topic in names}
            progress = _progress(view, names, groups)
            tables, waiting = _tables(view, by_topic, progress)
            messages = sorted(
                [*(message for of_topic in by_topic.values() for message in of_topic), *waiting],
                key=lambda message: message.physical_offset,
            )
            for message in messages:
                if not message.crc_ok:
                    file = view.store.log.sequence.path_at(message.physical_offset)
                    raise CorruptionError(file, message.physical_offset, "crc", "the body does not match its checksum")
            if config is None:
                config = _kit_config(view.store.config, messages)
            last_ms = max(view.now_ms or 0, _last_ms(messages))
            now_ms = last_ms + 1 if last_ms else machine_ms()
            return cls(names, tuple(progress), messages, now_ms, config, tables)

    def part(self, messages: Sequence[StoredMessage]) -> StoreStart:
        """Return the start of a kit with some of the messages, as of a store that has no others."""
        return replace(self, messages=messages, now_ms=_last_ms(messages) + 1 if messages else self.now_ms)

    # ---- stores

    @cached_property
    def _memory(self) -> Files:
        files = MemoryFiles()
        self._make(FOLDER, self.config, files)
        return files

    def files(self) -> Files:
        """Return files of its own for one kit, with the store in `FOLDER`."""
        return OverlayFiles(self._memory)

    def copy_to(self, path: str) -> None:
        """Make the store of a kit in a folder on the disk, which is empty or does not exist."""
        self._make(path, self.config, DiskFiles())

    def save(self, path: str) -> Extracted:
        """Make a store to keep, with files as small as the messages allow, in a folder like that of `copy_to`."""
        from librmq.store.extraction import small_config

        return self._make(path, small_config(self.config, self.messages), DiskFiles())

    def save_to(self, folder: Path) -> str:
        """Do as `save`; return how a failure says that the messages are saved."""
        self.save(str(folder))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return f"they are saved as a store of {size / 1024:.0f} KiB"

    def _make(self, path: str, config: StoreConfig, files: Files) -> Extracted:
        from librmq.store.extraction import make_store

        topics = self._tables.topics.rows.keys()
        return make_store(path, self.messages, self._tables, config, topics=topics, files=files)

    # ---- the fewest messages that fail

    def describe_part(self, shrunk: Shrunk | None, more: str) -> list[str]:
        """Return the lines of a failure on the fewest of the messages; ``more`` says how to allow more runs."""
        count = len(self.messages)
        if shrunk is None:
            return [
                f"not shrunk: with its {count:,} messages in a store of their own the test does not fail in this way"
            ]
        if not shrunk.start.messages:
            return [f"the test fails in this way without any of the {count:,} messages"]
        left = len(shrunk.start.messages)
        few = f"{left:,} of the {count:,} messages {'makes' if left == 1 else 'make'} the test fail in this way"
        if shrunk.is_cut:
            result = f"the search ended after {shrunk.tries} tries{more}"
        else:
            result = f"{shrunk.tries} tries" if left == 1 else f"and none of them can be left out, {shrunk.tries} tries"
        return [f"{few} ({result}):", *shrunk.lines()]

    # ---- the history before the test

    def copies(self, name: str) -> int:
        """Return how many records of one unique id are to be delivered to the topics."""
        return self._copies[name]

    @cached_property
    def _copies(self) -> Counter[str]:
        return Counter(message.unique_key for message in self.messages if message.unique_key and not _retries(message))


def _retries(message: StoredMessage) -> str:
    """Return the group of a retry, also of one that waits for its time; empty for other messages."""
    target = message.properties.get("REAL_TOPIC", "") if message.topic == SystemTopic.SCHEDULE else message.topic
    return target.removeprefix(TopicPrefix.RETRY) if target.startswith(TopicPrefix.RETRY) else ""


def _last_ms(messages: Sequence[StoredMessage]) -> int:
    return max((message.store_timestamp_ms for message in messages), default=0)


# ---- what is read


def _topic_names(view: StoreView, topics: Collection[str] | None) -> tuple[str, ...]:
    listed = {
        topic
        for topic in view.listed_topics
        if kind_of_topic(topic) in ("user", "dead")
        and not topic.startswith(TopicPrefix.LIGHT)  # messages of other topics
    }
    if topics is None:
        return tuple(sorted(topic for topic in listed if kind_of_topic(topic) == "user"))
    _check_names("topics", "a list of topics", topics)
    for topic in topics:
        if topic not in listed:
            near = nearest(topic, listed)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(sorted(listed)) or 'none'}"
            raise ConfigError(f"topics: {view.store.path} has no topic {topic!r:.80}; {hint}")
    return tuple(dict.fromkeys(topics))


def _messages(view: StoreView, topic: str) -> list[StoredMessage]:
    return [message for queue, offsets in view.queues(topic).items() for message in view.messages(queue, offsets)]


def _progress(view: StoreView, topics: Collection[str], groups: GroupNames | None) -> dict[str, Progress]:
    if groups is None:
        _check_known(view, "all groups")
        return {group: None for group in view.groups if not is_own_group(group)}
    _check_names("groups", "a list of groups, or their progress by name", groups)
    progress = dict(groups) if isinstance(groups, Mapping) else dict.fromkeys(groups)
    for group, start in progress.items():
        validate_group(group)
        if not _is_progress(start):
            raise ConfigError(
                f"groups: {group}: expected 'begin', 'end', a time with a time zone, a queue offset, or queue offsets "
                f"by topic and queue id, found {start!r:.80}"
            )
        if isinstance(start, Mapping) and (others := [topic for topic in start if topic not in topics]):
            raise ConfigError(
                f"groups: {group}: expected progress in {', '.join(topics) or 'no topic'}, found {others[0]!r:.80}"
            )
        if start is None:
            _check_known(view, group)
        for topic, offsets in start.items() if isinstance(start, Mapping) else ():
            queue_ids = _queue_ids(view, topic)
            if missing := sorted(offsets.keys() - queue_ids):
                raise ConfigError(
                    f"groups: {group}: expected progress in queues {', '.join(map(str, sorted(queue_ids)))} of topic "
                    f"{topic}, found {missing[0]}"
                )
    return progress


def _check_known(view: StoreView, name: str) -> None:
    if (why := view.unknown_progress) is not None:
        raise ConfigError(
            f"groups: no progress of {name}: {why}, or say where groups begin, as in groups={{'GROUP': 'begin'}}"
        )


def _queue_ids(view: StoreView, topic: str) -> set[int]:
    return {*range(view.queue_count(topic)), *view.topics.get(topic, ())}


def _check_names(setting: str, expected: str, names: object) -> None:
    if isinstance(names, str) or not isinstance(names, Collection) or any(type(name) is not str for name in names):
        raise ConfigError(f"{setting}: expected {expected}, found {names!r:.80}")


def _is_progress(start: object) -> bool:
    if isinstance(start, Mapping):
        return all(
            isinstance(offsets, Mapping) and all(map(_is_offset, (*offsets, *offsets.values())))
            for offsets in start.values()
        )
    return start in (None, "begin", "end") or isinstance(start, datetime) or _is_offset(start)


def _is_offset(value: object) -> bool:
    return type(value) is int and value >= 0


def _tables(
    view: StoreView, by_topic: Mapping[str, Sequence[StoredMessage]], progress: Mapping[str, Progress]
) -> tuple[BrokerTables, list[StoredMessage]]:
    """Return the rows of the topics and groups, and the messages that wait for a delivery to them."""
    tables = BrokerTables.open(FOLDER, files=MemoryFiles())
    recorded = [group for group, start in progress.items() if start is None]
    retry_topics = [retry_topic(group) for group in recorded]
    retry_topics += [receive_retry_topic(group, topic) for group in recorded for topic in by_topic]
    for topic in retry_topics:
        if topic in view.tables.topics.rows:
            tables.topics.set(topic, view.tables.topics.rows[topic])
    queue_ids = {topic: _queue_ids(view, topic) for topic in by_topic}
    for topic, ids in queue_ids.items():
        tables.topics.set(topic, _readable(view.tables.topics.rows.get(topic), topic, max(ids, default=0) + 1))
    for group, start in progress.items():
        if group in view.tables.groups.rows:
            tables.groups.set(group, view.tables.groups.rows[group])
        for topic, messages in by_topic.items():
            offsets = _offsets(start, view.progress.get((group, topic), {}), topic, messages, queue_ids[topic])
            tables.offsets.set(f"{topic}@{group}", offsets)
    waiting = [message for group in recorded for message in _retries_of(view, group, by_topic, tables)]
    if SystemTopic.SCHEDULE in view.topics:
        from librmq.diagnosis import pending_messages

        for pending in (
            *pending_messages(view.store, view.tables, kind="delay"),
            *pending_messages(view.store, view.tables, kind="retry"),
        ):
            targets = retry_topics if pending.kind == "retry" else by_topic
            message = view.store.message_at(pending.physical_offset)
            if pending.topic in by_topic and pending.target_topic in targets and message is not None:
                waiting.append(message)
    return tables, waiting


def _retries_of(view: StoreView, group: str, topics: Collection[str], tables: BrokerTables) -> Iterator[StoredMessage]:
    """Yield the waiting retries of a group's messages, also of those that it receives; note where it begins in them."""
    for topic in (retry_topic(group), *(receive_retry_topic(group, topic) for topic in topics)):
        if offsets := view.progress.get((group, topic), {}):
            tables.offsets.set(f"{topic}@{group}", dict.fromkeys(offsets, 0))
        for message in _messages(view, topic):
            is_wanted = topic != retry_topic(group) or message.properties.get("RETRY_TOPIC") in topics
            if is_wanted and message.queue_offset >= offsets.get(message.queue_id, 0):
                yield message


def _readable(row: Mapping[str, Any] | None, topic: str, queues: int) -> dict[str, Any]:
    """Return a topic's row with which consumers read all its queues."""
    fields: dict[str, Any] = {**(row or topic_row(topic, queues, queues, PERM_READ | PERM_WRITE))}
    fields["readQueueNums"] = max(fields.get("readQueueNums", 0), queues)
    fields["perm"] = fields.get("perm", PERM_WRITE) | PERM_READ
    return fields


def _offsets(
    start: Progress,
    recorded: Mapping[int, int],
    topic: str,
    messages: Sequence[StoredMessage],
    queue_ids: Collection[int],
) -> dict[int, int]:
    """Return a group's progress in a topic by queue id; a queue without any begins with its first message."""
    if start is None:
        return {queue_id: recorded.get(queue_id, 0) for queue_id in queue_ids}
    if isinstance(start, Mapping):
        offsets = start.get(topic, {})
        return {queue_id: offsets.get(queue_id, 0) for queue_id in queue_ids}
    if isinstance(start, datetime):
        at_ms = to_timestamp_ms("groups", start)
        later = [message for message in messages if message.store_timestamp_ms >= at_ms]
        first = {message.queue_id: message.queue_offset for message in reversed(later)}
        return {queue_id: first.get(queue_id, _END) for queue_id in queue_ids}
    offset = {"begin": 0, "end": _END}[start] if isinstance(start, str) else start
    return dict.fromkeys(queue_ids, offset)


def _kit_config(source: StoreConfig, messages: Sequence[StoredMessage]) -> StoreConfig:
    """Return settings whose files have room for the messages, and for as large ones."""
    from librmq.store.extraction import small_config

    config = small_config(replace(SMALL_FILES, message_delay_level=source.message_delay_level), messages)
    file_size = max(SMALL_FILES.commitlog_file_size, config.commitlog_file_size)
    return replace(config, commitlog_file_size=file_size, max_message_size=file_size // 2)


# ---- the fewest messages that fail


class Shrunk(NamedTuple):
    """The fewest messages found with which a test fails in the same way."""

    start: StoreStart
    """What a kit begins with."""
    tries: int
    """Number of runs."""
    is_cut: bool
    """Whether more runs can find fewer."""

    def lines(self) -> Iterator[str]:
        """Yield a line for each message, up to some."""
        for message in self.start.messages[:_SHOWN]:
            name = message.unique_key or message.offset_id
            keys = f" keys {' '.join(message.keys)}" if message.keys else ""
            yield f"  {message.topic}/{message.queue_id}:{message.queue_offset} {name}{keys} {show(message)}"
        if (more := len(self.start.messages) - _SHOWN) > 0:
            yield f"  … {more:,} more"


def shrink(start: StoreStart, fails: Callable[[StoreStart], bool], most_tries: int) -> Shrunk | None:
    """Return the fewest messages found with which ``fails`` is true; None if it is false with all of them.

    The last message that the failure needs is found by halving, then the last one before it, and so on: about twenty
    tries for each among ten thousand. The first try is a store with all messages, the second one with none. At the end
    each message is left out once more.
    """
    tries = 0
    fewest: Sequence[StoredMessage] | None = None

    def still_fails(messages: Sequence[StoredMessage]) -> bool:
        nonlocal tries, fewest
        if tries == most_tries:
            raise _TriesUsedUp
        tries += 1
        is_failing = fails(start.part(messages))
        if is_failing:
            fewest = messages
        return is_failing

    try:
        if not still_fails(start.messages):
            return None
        _find_fewest(start.messages, still_fails)
    except _TriesUsedUp:
        pass
    else:
        most_tries = tries + 1
    return None if fewest is None else Shrunk(start.part(fewest), tries, is_cut=tries == most_tries)


def moved_label(full: StoreStart, part: StoreStart) -> Callable[[str], str]:
    """Return a function of a label of a schedule that changes its queue offsets to those with a part of the messages.

    The first messages of each queue are those of the store; what the test sends comes behind them.
    """
    kept_places = {message.physical_offset for message in part.messages}
    ranks: dict[tuple[str, str], list[int]] = {}  # each queue offset's rank among the kept messages
    for message in full.messages:
        queue = ranks.setdefault((message.topic, str(message.queue_id)), [0])
        queue.append(queue[-1] + (message.physical_offset in kept_places))

    def moved(match: re.Match[str]) -> str:
        queue, offset = ranks.get((match["topic"], match["queue"])), int(match["offset"])
        if queue is None:
            return match[0]
        last = len(queue) - 1
        return f"{match['before']}{queue[min(offset, last)] + max(0, offset - last)}"

    return lambda label: _QUEUE_OFFSET.sub(moved, label)


_QUEUE_OFFSET: Final = re.compile(r"(?P<before>(?P<topic>[^\s/]+)/[^\s/]+/(?P<queue>\d+) )(?P<offset>\d+)")


class _TriesUsedUp(Exception):
    """No more runs are allowed."""


def _find_fewest(messages: Sequence[StoredMessage], still_fails: Callable[[Sequence[StoredMessage]], bool]) -> None:
    """Try fewer and fewer of the messages, all of which fail together."""
    needed: list[StoredMessage] = []
    while messages and not still_fails(needed):
        passing, failing = 0, len(messages)  # how many of the first messages pass, and fail, with the needed ones
        needs_earlier = False
        while failing - passing > 1:
            middle = (passing + failing) // 2
            if still_fails([*messages[:middle], *needed]):
                failing = middle
            elif needs_earlier or not still_fails([*messages[middle:failing], *needed]):
                passing, needs_earlier = middle, True
            else:
                messages, passing, failing = messages[middle:failing], 0, failing - middle
        needed.insert(0, messages[failing - 1])
        messages = messages[: failing - 1]
    at = 0
    while at < len(needed) and len(needed) > 1:
        others = [*needed[:at], *needed[at + 1 :]]
        if still_fails(others):
            needed, at = others, 0
        else:
            at += 1
