"""The opened parts of a store: log, queues, key index, checkpoint, and what is derived from one for another."""

from __future__ import annotations

from dataclasses import dataclass, field

from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue
from librmq.files.damage import Damage
from librmq.message.delay_levels import DelayLevels
from librmq.store.engine.dispatch import Dispatcher, Lane
from librmq.store.engine.queue_table import OpenQueue, QueueTable
from librmq.store.format.checkpoint import Checkpoint
from librmq.store.format.keyindex import KeyIndex

__all__ = ["Parts"]


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
    """What was found and cut."""
    lanes: dict[tuple[str, int], Lane] = field(default_factory=dict)

    def queue(self, topic: str, queue_id: int) -> ConsumeQueue:
        """A queue, made when first needed."""
        queue = self.queues.get((topic, queue_id))
        if queue is None:
            queue = self.queues[topic, queue_id] = self.open_queue(topic, queue_id)
        return queue

    def lane(self, topic: str, queue_id: int) -> Lane:
        """The lane of a queue, made when first needed."""
        lane = self.lanes.get((topic, queue_id))
        if lane is None:
            lane = self.lanes[topic, queue_id] = Lane(topic, queue_id, self.queue(topic, queue_id))
        return lane

    def close(self) -> None:
        """Close every part."""
        self.log.close()
        self.index.close()
        self.checkpoint.close()
        for queue in self.queues.opened():
            queue.close()
