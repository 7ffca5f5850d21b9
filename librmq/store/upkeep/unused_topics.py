"""Deletion of the queues of deleted topics. Mirrors 4.9.4's ``DefaultMessageStore.cleanUnusedTopic``."""

from __future__ import annotations

import os
from collections.abc import Container

from librmq.files.seam import Files
from librmq.message.topics import is_system_topic
from librmq.runtime.locks import critical
from librmq.store.engine.append import Appender
from librmq.store.engine.queue_table import QueueName
from librmq.store.format import directory


def clean_unused_topics(path: str, files: Files, appender: Appender, topics: Container[str]) -> list[QueueName]:
    """See `MessageStore.clean_unused_topics`."""
    queues = appender.open_parts().queues
    unused = sorted(name for name in queues if name[0] not in topics and not is_system_topic(name[0]))
    return [name for name in unused if _clean(path, files, appender, name)]


def _clean(path: str, files: Files, appender: Appender, name: QueueName) -> bool:
    """Delete the files of a queue unless the log has a message of it; return whether there were any."""
    appender.lock.check_reentry()
    with critical, appender.lock.flushing, appender.lock.mutex:
        queues = appender.open_parts().queues
        appender.catch_up()
        queue = queues.find(name)
        if queue is None or queue.max_physic_offset > appender.log.begin:
            return False
        folders = [directory.queue_folder(path, *name, ext=ext) for ext in (False, True)]
        if not any(map(files.is_folder, folders)):
            return False
        lane = appender.lanes.get(name)
        queue.clear()
        if lane is not None:  # another thread can be about to append through it
            lane.next_queue_offset = 0
        queue.flush()
        for folder in folders:
            files.delete(folder)
            if not files.list(os.path.dirname(folder)):
                files.delete(os.path.dirname(folder))
        if lane is None:
            del queues[name]
        return True
