"""The end of a log that a broker closed, found by the entries of its queues.

A broker leaves no note of where its log ends. After a clean shutdown the queues have an entry of each record, so the
log ends with the record of the last entry, if nothing follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from librmq.consumequeue import ConsumeQueue
from librmq.errors import CorruptionError
from librmq.files.disk import DiskFiles
from librmq.store.engine.open_store import PartFiles, QueueTable
from librmq.store.format import directory
from librmq.store.recovery.open import write_closed_state

_AFTER_END: Final = 4096
_Fetch = Callable[[Sequence[tuple[str, int, int]]], None]


def note_clean_end(path: str, logs: Mapping[str, int], fetch: _Fetch) -> bool:
    """Note the end of the log in the mirror ``path``, as librmq does at a close; return whether it is known.

    Args:
        path: The mirror, with queues and headers of the index.
        logs: Lengths of the log's files, by name within the store.
        fetch: Fetches ranges of these files into the mirror.
    """
    files = DiskFiles()
    try:
        config = directory.infer_config(path, files)

        def open_queue(topic: str, queue_id: int) -> ConsumeQueue:
            folder = directory.queue_folder(path, topic, queue_id)
            return ConsumeQueue.open(folder, config.consumequeue_file_size, files=files, writable=False)

        queues = QueueTable(open_queue, dict.fromkeys(directory.list_queues(path, files)))
        last = [queue.entry(queue.max_offset - 1) for queue in queues.values() if queue.max_offset > queue.min_offset]
        spans = [(entry.physical_offset, entry.size) for entry in last if entry is not None]
        if not spans:
            return False
        place, size = max(spans)
        ranges = []
        for name, length in logs.items():
            start = int(name.rpartition("/")[2])
            begin, end = max(place - start, 0), min(max(place + size - start, 0) + _AFTER_END, length)
            if start + length > place and begin < end:
                ranges.append((name, begin, end))
        fetch(ranges)
        part_files = PartFiles(path, config, files)
        log = part_files.open_log(scan_from=lambda _: place)
        if log.last_write != place or log.found_end.damage is not None:
            return False
        write_closed_state(path, files, log, queues, part_files.open_index())
    except CorruptionError:
        return False  # a reader of the whole copy reports what is wrong
    return True
