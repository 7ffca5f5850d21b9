"""Damaged messages of a queue: each group waits for a repair at one, and passes it as a dead letter after a time."""

from __future__ import annotations

from librmq.broker._context import NEVER, BrokerContext, BrokerPart
from librmq.broker.handlers._in_flight import QueueKey
from librmq.broker.retries import FailedMessages
from librmq.errors import CorruptionError, RecordError
from librmq.message import StoredMessage
from librmq.protocol import MessageModel
from librmq.runtime.event_log import EventLog

_log = EventLog("librmq.broker")


class DamagedMessages(BrokerPart):
    """The damaged messages at which groups of one broker wait. Called under the runner's lock.

    The times are in memory: after a restart the wait begins again.
    """

    def __init__(self, context: BrokerContext, failed: FailedMessages) -> None:
        super().__init__(context)
        self._failed = failed
        self._since: dict[QueueKey, tuple[int, int]] = {}

    def passes(self, key: QueueKey, queue_offset: int, error: CorruptionError, after_ms: int) -> bool:
        """Return whether the group passes a message that can't be read, which then is one of its dead letters.

        Until ``after_ms`` have gone by since its first read, it does not.
        """
        now_ms = self._runner.now_ms()
        at, since_ms = self._since.get(key, (-1, 0))
        if at != queue_offset or since_ms > now_ms:  # a clock was set back
            since_ms = now_ms
            self._since[key] = queue_offset, now_ms
        if after_ms == NEVER or now_ms - since_ms < after_ms:
            return False
        group, topic, queue_id = key
        members = self._clients.consumers.get(group)
        becomes = "is passed, because broadcasting has no dead letters"
        if members is None or members.model is not MessageModel.BROADCASTING:
            self._failed.store_damaged(group, topic, self._readable(topic, queue_id, queue_offset), str(error))
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
        del self._since[key]
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
