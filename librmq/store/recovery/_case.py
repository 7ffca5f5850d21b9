"""A store that is opened and, if its last exit requires it, recovered."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from librmq.clock import Clock
from librmq.config import StoreConfig
from librmq.files import Files
from librmq.store.engine.saved_state import Mark
from librmq.store.engine.store_parts import QueueName, Recovered


class RecoveryMode(enum.Enum):
    """Extent of a recovery and its cuts."""

    LAST_EXIT = "as the last exit requires"
    """Cut only damage that a crash explains; otherwise refuse the store."""
    PREVIEW = "as the last exit requires, in memory"
    """For a read-only view, in an `OverlayFiles`: end the log at the first damage, and keep the bytes after it."""
    WHOLE_LOG = "all of the log"
    """On demand: cut at the first damage, and rebuild files with a wrong length or an impossible header."""
    LIVING = "all of the log of an open store"
    """`WHOLE_LOG` for a store that this process had open until now, so that no crash changed a record."""


@dataclass(slots=True)
class Case:
    """A store that is opened and recovered, and what is known of its last exit."""

    path: str
    config: StoreConfig
    files: Files
    clock: Clock
    mode: RecoveryMode
    is_clean: bool
    """Whether the store was closed."""
    noted: Mapping[QueueName, int]
    """Where the messages of queues ended, as notes of the last close and flush say, if it was not."""
    keeps_deleted: bool
    """Whether a check of all of the log leaves a queue without a folder deleted, like its topic."""
    mark: Mark | None = None
    """The mark of the last flush, if the recovery begins there."""
    begin: int = 0
    """Where the walk over the log begins, and the comparison with it."""
    reads_bodies: bool = False
    """Whether no walk has checked the bodies of records from ``begin`` on, so that the comparison does."""
    changed_queues: frozenset[QueueName] | None = None
    """Queues that were deleted or added since the store was closed; None: queues and index are unchanged."""
    recovered: Recovered = field(default_factory=Recovered)

    @property
    def is_thorough(self) -> bool:
        """Whether the whole log is checked."""
        return self.mode in (RecoveryMode.WHOLE_LOG, RecoveryMode.LIVING)

    @property
    def is_preview(self) -> bool:
        """Whether the store is only read, and recovered in memory."""
        return self.mode is RecoveryMode.PREVIEW
