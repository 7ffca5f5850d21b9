"""How retention finds the unconsumed messages of a file."""

from __future__ import annotations

from collections.abc import Iterable

from librmq.consumequeue import ENTRY, HOLE_SIZE, ConsumeQueue
from librmq.files.memory import MemoryFiles
from librmq.store.retention import Unread, UnreadInFile, unread_between


class OpenHalves:
    """A group of one reader that still needs the messages at these queue offsets."""

    def __init__(self, needed: set[int]) -> None:
        self.reader = Unread("halves", "H", 0, 0, lambda queue_offset: queue_offset not in needed)

    def unread(self, before: int) -> Iterable[Unread]:
        return [self.reader]

    def lost(self, unread: UnreadInFile) -> None:
        raise AssertionError


def test_unread_messages_before_a_hole_are_found() -> None:
    """Recovery fills a lost place of a queue with an entry of position 0, which is not its place in the log."""
    with ConsumeQueue.open("/q", 400, files=MemoryFiles(), writable=True) as queue:
        places = (1000, 100), (0, HOLE_SIZE), (1300, 100)
        queue.append_many(0, b"".join(ENTRY.pack(place, size, 0) for place, size in places))
        readers = OpenHalves({0})
        found = list(unread_between(readers, lambda topic, queue_id: queue, 1000, 2000))
        assert found == [UnreadInFile(readers.reader, 0, 1)]
