"""A store that is open in this process: what reading and writing it have in common."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from librmq.clock import Clock
from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.errors import ReadOnlyError, StoreClosedError
from librmq.files import Damage, Files
from librmq.message import DelayLevels
from librmq.runtime.compiled_core import CORE
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Inherited
from librmq.store.engine._entry_checks import EntryChecks, Transfer
from librmq.store.engine.derivation import KeyBlock
from librmq.store.engine.store_parts import Parts, QueueTable
from librmq.store.format._checkpoint import Checkpoint
from librmq.store.format._keyindex import KeyIndex

if TYPE_CHECKING:
    from librmq.store.engine.store_times import StoreTimes

_log = EventLog("librmq.store")


@functools.cache
def _report_python() -> None:
    """Log once in a process that it runs without the compiled core: a warning where an installation should have it."""
    if CORE.is_missed:
        _log.warning("hot paths run in %(core)s; docs/performance.md says how to get it", core=CORE.state)
    elif CORE.module is None:
        _log.info("hot paths run in %(core)s", core=CORE.state)


class StoreHandle(ABC):
    """An open store with its parts, which a recovery or a refresh replaces. Thread-safe.

    `ReadOnlyView` and `Writer` are the two kinds. A store that is only read has nothing that writes: no appender, no
    flushes, no retention and no thread.
    """

    config: StoreConfig
    """The given settings, or those inferred from the files."""
    levels: DelayLevels
    transfer: Transfer
    log: CommitLog
    queues: QueueTable
    index: KeyIndex
    checkpoint: Checkpoint
    checks: EntryChecks
    is_own = False
    """Whether librmq made the store, not a broker; only known while it is open for writing."""

    def __init__(self, path: str, files: Files, clock: Clock) -> None:
        """Prepare a handle that accepts no calls until `accept_calls`."""
        self.path = path
        self.files = files
        self.clock = clock
        self.recovered: list[Damage] = []
        self.closed: str | None = "was not opened"
        """The reason why no calls are accepted; None while they are."""

    def configure(self, config: StoreConfig) -> None:
        """Use these settings from now on."""
        self.config = config
        self.levels = DelayLevels.parse(config.message_delay_level)
        self.transfer = Transfer(config)

    def use_parts(self, parts: Parts) -> None:
        """Use these parts from now on."""
        self.log, self.index, self.checkpoint, self.queues = parts.log, parts.index, parts.checkpoint, parts.queues
        self.checks = EntryChecks(parts, self.transfer)

    def accept_calls(self) -> None:
        self.closed = None
        _open_handles.add(self)
        _report_python()

    @abstractmethod
    def up_to_date(self) -> Parts:
        """Return the parts, with everything that was acknowledged before the call, as far as the disk has room."""

    @abstractmethod
    def with_index(self) -> tuple[Parts, Sequence[KeyBlock]]:
        """Return the parts like `up_to_date`, and the keys that the index can lack, those of the last records."""

    @property
    @abstractmethod
    def times(self) -> StoreTimes:
        """The store times of the messages, and what is known of their order."""

    def close(self) -> None:
        """End the handle; see `MessageStore.close`."""
        self.abandon("is closed")

    @abstractmethod
    def abandon(self, why: str) -> None:
        """Release the store as a dying process does; see `MessageStore.abandon`."""

    def after_fork(self) -> None:
        """Leave the store to the parent, in a forked child."""
        _open_handles.discard(self)
        self.closed = "was opened before a fork: reopen the store in the child"

    # -------------------------------------------------------------------------------------------------------- refusals

    def check_open(self) -> None:
        """Refuse a call to a handle that is closed; wait for a recovery that is running."""
        if self.closed is not None:
            raise self.unusable()

    def unusable(self) -> Exception:
        """Return the error of a handle that is closed, or open for reading only."""
        if self.closed is not None:
            return StoreClosedError(f"{self.path}: this handle {self.closed}")
        return ReadOnlyError(f"{self.path}: this handle is read-only: use MessageStore.open without read_only=True")


_open_handles: Final[Inherited[StoreHandle]] = Inherited(lambda handle: handle.after_fork())
