"""The opened parts of a store: log, queues, key index, checkpoint, and the dispatch between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from librmq.commitlog import CommitLog
from librmq.consumequeue import ENTRY, ConsumeQueue
from librmq.files.seam import Damage
from librmq.message.delay_levels import DelayLevels
from librmq.message.message import StoredMessage
from librmq.store.engine.dispatch import Dispatcher, Lane, derived_tags_code, has_queue_entry, is_indexed
from librmq.store.engine.queue_table import OpenQueue, QueueTable
from librmq.store.format.checkpoint import Checkpoint
from librmq.store.format.keyindex import KeyIndex


@dataclass(slots=True)
class Parts:
    """The opened parts of a store."""

    levels: DelayLevels
    log: CommitLog
    queues: QueueTable
    index: KeyIndex
    checkpoint: Checkpoint
    dispatcher: Dispatcher
    open_queue: OpenQueue
    cuts: list[Damage]
    """Everything that recovery cut or rewrote."""
    walked_from: int | None = None
    """For a view of a crashed store that did not compare the index: where its walk over the log began, behind records
    that the checkpoint covers. None for parts that were opened as a whole."""
    lanes: dict[tuple[str, int], Lane] = field(default_factory=dict)

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return a queue, made at its first use."""
        queue = self.queues.find((topic, queue_id))
        if queue is None:
            queue = self.queues[topic, queue_id] = self.open_queue(topic, queue_id)
        return queue

    def lane(self, topic: str, queue_id: int) -> Lane:
        """Return the lane of a queue, made at its first use."""
        lane = self.lanes.get((topic, queue_id))
        if lane is None:
            lane = self.lanes[topic, queue_id] = Lane(topic, queue_id, self.queue(topic, queue_id))
        return lane

    def derive_again(self) -> None:
        """Repair queues and index from the log after a signal has interrupted an append.

        Only the writer calls it, under its lock, in a critical block. After an error such as a full disk the next call
        continues.
        """
        log, dispatcher = self.log, self.dispatcher
        begin = dispatcher.writing_at
        walk = log.walk(begin)
        if walk.damage is not None:
            log.truncate(walk.physical_offset)
        if walk.physical_offset > begin:
            log.end, log.last_write = walk.physical_offset, begin
        dispatcher.rewind(begin, self.lanes.values())
        for _, _, raw in log.scan(begin):
            if raw is not None:
                self._derive(StoredMessage(raw))
        dispatcher.writing_at = -1

    def _derive(self, message: StoredMessage) -> None:
        """Collect the queue entry and the keys of a record of the log."""
        lane, dispatcher = self.lane(message.topic, message.queue_id), self.dispatcher
        place, properties = message.physical_offset, message.properties
        if has_queue_entry(message.sys_flag):
            code = derived_tags_code(message, self.levels)
            if lane.queue.ext is not None:
                code = dispatcher.add_unit(lane, code, message.store_timestamp_ms, message.properties_raw)
            if not lane.next_queue_offset:
                lane.next_queue_offset = message.queue_offset  # the log of a copy begins with a later message
            dispatcher.add(lane, ENTRY.pack(place, message.size, code))
        keys = (properties.get("UNIQ_KEY"), properties.get("KEYS")) if is_indexed(message.sys_flag) else (None, None)
        dispatcher.records.append((place, message.store_timestamp_ms, lane.prefix_hash, *keys))

    def close(self) -> None:
        """Close every part."""
        self.log.close()
        self.index.close()
        self.checkpoint.close()
        for queue in self.queues.opened():
            queue.close()
