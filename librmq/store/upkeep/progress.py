"""Progress in the ``config`` folder of a copied store.

A rescued store numbers its messages differently. Progress that points beyond a queue would make a group skip later
messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from librmq.files.seam import Files
from librmq.message.delay_levels import SCHEDULE_TOPIC, queue_id_of_level
from librmq.store.format import directory
from librmq.store.format.broker_tables import BrokerTables, ConfigTable

PROGRESS_TABLES: Final = ("consumerOffset.json", "delayOffset.json")
"""Files of ``config`` with the progress of consumers and delay levels."""

NewOffset = Callable[[str, int, int], int]
"""Function of topic, queue id and queue offset to the queue offset in the copy."""


def revise_progress(path: str, files: Files, new_offset: NewOffset, now_ms: int) -> None:
    """Replace every stored queue offset by its ``new_offset``.

    Backups are deleted, since they hold the progress of the source.

    Raises:
        CorruptionError: A table and its backup are unreadable.
    """
    folder = os.path.join(path, directory.CONFIG)
    tables = BrokerTables.open(folder, files=files)
    for name, offsets in list(tables.offsets.rows.items()):
        topic = name.rpartition("@")[0]
        tables.offsets.set(name, {queue_id: new_offset(topic, queue_id, at) for queue_id, at in offsets.items()})
    for level, at in list(tables.delays.rows.items()):
        tables.delays.set(level, new_offset(SCHEDULE_TOPIC, queue_id_of_level(level), at))
    for table, file in zip((tables.offsets, tables.delays), PROGRESS_TABLES, strict=True):
        _write(table, os.path.join(folder, file), files, now_ms)


def _write(table: ConfigTable, path: str, files: Files, now_ms: int) -> None:
    if not files.size(path) and not files.size(f"{path}.bak"):
        return  # the source has no such table
    table.persist(now_ms)
    if files.size(f"{path}.bak") is not None:
        files.delete(f"{path}.bak")
