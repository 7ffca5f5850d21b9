"""Durability of a store: the log by group commit, queues and index, and the checkpoint.

The checkpoint covers log, queues and index, so it is written last.
"""

from __future__ import annotations

from collections.abc import Callable

from librmq.errors import StoreIOError
from librmq.store.engine.append_lock import AppendLock
from librmq.store.engine.group_commit import GroupCommit, flush_all
from librmq.store.engine.store_parts import Parts


class Durability:
    """Flushes the parts of a store that one `Appender` writes. Thread-safe."""

    def __init__(
        self,
        parts: Parts,
        lock: AppendLock,
        catch_up: Callable[[], object],
        check_lock: Callable[[], object],
        on_failure: Callable[[], None],
    ) -> None:
        """Take the functions to call.

        ``catch_up()`` writes due entries and keys, under ``lock``; ``check_lock()`` raises if another process has taken
        over the store; ``on_failure()`` is called once, when a flush of the log has failed.
        """
        self._parts = parts
        self._lock = lock
        self._catch_up = catch_up
        self._check_lock = check_lock
        self.commit = GroupCommit(self._flush_log, parts.log.end, on_failure)
        """The log's part."""
        self.settled = parts.log.end
        """Physical offset below which queues and index are on the device too."""
        self._derived_failure: StoreIOError | None = None  # a failure of queues or index, after which no flush counts

    def flush(self) -> int:
        """Flush the log, the parts derived from it, and the checkpoint; return the flushed physical offset.

        Raises:
            FlushFailedError: This or an earlier flush of the log failed: the store accepts nothing more.
            StoreIOError: This or an earlier flush of queues or index failed: the next open rebuilds them.
            StoreClosedError: The store was closed meanwhile.
        """
        lock, parts = self._lock, self._parts
        dispatcher, checkpoint, index = parts.dispatcher, parts.checkpoint, parts.index
        lock.check_reentry()
        with lock.flushing:
            with lock.mutex:
                self._catch_up()
                end, stored = parts.log.end, dispatcher.dispatched_timestamp_ms
                indexed = index.full_timestamp_ms
                queues, dispatcher.unflushed = dispatcher.unflushed, set()
                entries, dispatcher.entries = dispatcher.entries, 0
            try:
                self.commit.reach(end)
                flush_all(queues)
                index.flush()
                if self._derived_failure is not None:  # the kernel can now report unwritten pages as flushed
                    raise self._still_failed(self._derived_failure)
                if stored:
                    checkpoint.physic_timestamp_ms = checkpoint.logics_timestamp_ms = stored
                    # At most the time of the last record, in case the clock was set back.
                    checkpoint.index_timestamp_ms = min(indexed, stored)
                checkpoint.flush()
                self.settled = end
            except BaseException as error:
                with lock.mutex:
                    dispatcher.unflushed |= queues
                    dispatcher.entries += entries
                if self._derived_failure is None and isinstance(error, StoreIOError) and error.call.startswith("flush"):
                    self._derived_failure = error
                raise
        return self.commit.flushed

    @staticmethod
    def _still_failed(failure: StoreIOError) -> StoreIOError:
        why = f"{failure.strerror}, so queues and index may lack entries on the device: close the store and reopen it"
        return StoreIOError(failure.call, failure.filename, OSError(failure.errno, why))

    def _flush_log(self) -> int:
        """Flush the log if this handle is still the only writer, because another writer can have overwritten it."""
        self._check_lock()
        return self._parts.log.flush()
