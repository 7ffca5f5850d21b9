"""Messages of a log file that some group has not consumed yet.

A store does not know groups. A broker reports by `Readers` the progress of each reader of a queue: of consumer groups,
and of its own parts that deliver messages later. Retention asks before it deletes a file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError
from librmq.files.interface import Files
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.topics import HALF_TOPIC, RETRY_PREFIX, SYSTEM_PREFIX
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables
from librmq.store.recovery.queue_check import first_at

FindQueue = Callable[[str, int], ConsumeQueue | None]


class Unread(NamedTuple):
    """The progress of a reader in a queue."""

    group: str
    topic: str
    queue_id: int
    queue_offset: int
    """Queue offset of the first message that the reader may still need."""
    has_passed: Callable[[int], bool] | None = None
    """Returns whether a later queue offset is no longer needed; None needs all of them."""


class UnreadInFile(NamedTuple):
    """The messages that a reader still needs in a part of the log."""

    reader: Unread
    queue_offset: int
    """Queue offset of the first message."""
    messages: int


class Readers(Protocol):
    """Retention's questions to a broker. Any thread calls them, without a lock of the store."""

    def unread(self, before: int) -> Iterable[Unread]:
        """Return each reader's progress by queue; messages stored at or after ``before`` don't matter."""
        ...

    def lost(self, unread: UnreadInFile) -> None:
        """Note that messages were deleted before their reader reached them."""
        ...


def unread_between(readers: Readers, find: FindQueue, begin: int, end: int) -> Iterator[UnreadInFile]:
    """Yield the unconsumed messages from physical offset ``begin`` to ``end``, reader by reader."""
    for reader in readers.unread(end):
        queue = find(reader.topic, reader.queue_id)
        if queue is None:
            continue
        low = max(reader.queue_offset, queue.min_offset)
        queue_offsets = range(max(low, first_at(queue, begin)), first_at(queue, end))
        if reader.has_passed is None:
            if queue_offsets:
                yield UnreadInFile(reader, queue_offsets.start, len(queue_offsets))
            continue
        needed = [queue_offset for queue_offset in queue_offsets if not reader.has_passed(queue_offset)]
        if needed:
            yield UnreadInFile(reader, needed[0], len(needed))


def may_have_readers(path: str, files: Files) -> bool:
    """Return whether a broker may still need messages of the store in ``path``.

    So it is if a group has saved progress, or if messages wait for a retry, their time or the end of a transaction.
    """
    for topic in files.names(os.path.join(path, directory.CONSUMEQUEUE)):
        if topic.startswith((RETRY_PREFIX, SYSTEM_PREFIX)) or topic in (SCHEDULE_TOPIC, HALF_TOPIC):
            return True
    try:
        return bool(BrokerTables.open(os.path.join(path, directory.CONFIG), files=files).offsets.rows)
    except CorruptionError:
        return True


def describe_holder(part: UnreadInFile, path: str) -> str:
    """Return which messages keep a log file of the store in ``path``, and how to free it."""
    reader, count = part.reader, "1 message" if part.messages == 1 else f"{part.messages} messages"
    place = f"from queue offset {part.queue_offset} of {reader.topic}/{reader.queue_id} on"
    discard = "delete the file together with them by keep_unconsumed=False"
    if reader.topic == SCHEDULE_TOPIC or reader.topic.startswith(SYSTEM_PREFIX):
        pending = shlex.join(("librmq", "pending", path))
        return f"{count} there wait for a delivery time, {place}: wait ({pending} lists them), or {discard}"
    if reader.topic == HALF_TOPIC:
        return (
            f"{count} there wait for the end of a transaction, {place}: let the producer group commit them or roll "
            f"them back, or {discard}"
        )
    command = shlex.join(("librmq", "skip", path, "--group", reader.group, "--topic", reader.topic))
    return (
        f"group {reader.group!r} has not consumed {count} there, {place}: let the group consume, or skip them: "
        f"broker.reset_group({reader.group!r}, {reader.topic!r}, 'end'), or, while no process has the store open, "
        f"{command}"
    )
