"""Progress of a store's timers, and the checkpoint that keeps it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from librmq.runtime.flush_aside import FlushAside
from librmq.runtime.runner import Aside
from librmq.scheduling.timer_config import TimerConfig
from librmq.scheduling.timer_wheel import TimerSlots
from librmq.store import MessageStore
from librmq.store.format.timerfiles import TimerCheckpoint


class _Reached(NamedTuple):
    """Progress at one time."""

    changes: int
    """Number of changes up to then."""
    checkpoint: TimerCheckpoint


class TimerProgress:
    """Progress of the timers. Only `end` is thread-safe."""

    def __init__(
        self,
        store: MessageStore,
        slots: TimerSlots,
        config: TimerConfig,
        checkpoint: TimerCheckpoint,
        aside: Aside | None,
    ) -> None:
        """Continue from ``checkpoint``; ``aside`` saves while other work continues, None saves within `run_due`."""
        self.checkpoint = checkpoint
        """As it was read, or written last."""
        self.read_ms = checkpoint.read_time_ms
        """All slots before this time are empty."""
        self.queue_offset = checkpoint.queue_offset
        """The first message of the timer topic that has no unit yet."""
        self.changes = 0
        """Number of changes that the timers have counted for the checkpoint."""
        self._saved_changes = 0
        self._store = store
        self._slots = slots
        saver = FlushAside(
            "the timer's progress",
            flush=self._write_checkpoint,
            reached=self._reached,
            note=self._saved,
            now_ms=store.clock.now_ms,
            save_every_s=config.save_every_s,
            retry_s=config.retry_s,
            aside=aside,
        )
        self.run_due, self.put_back, self.end, self._save = saver.run_due, saver.put_back, saver.end, saver.save

    def save(self) -> None:
        """Write the checkpoint if anything has changed, after a flush of everything that it covers."""
        if self._slots.has_wheel and self.read_ms != self.checkpoint.read_time_ms:
            self.changes += 1  # time alone needs no save
        self._save()

    def _reached(self) -> _Reached | None:
        """Return the progress to save, None if nothing has changed."""
        if self.changes == self._saved_changes:
            return None
        before = self.checkpoint
        checkpoint = replace(
            before,
            read_time_ms=self.read_ms,
            log_position=self._slots.log.end,
            queue_offset=self.queue_offset,
            master_queue_offset=self.queue_offset,
        )
        if self.queue_offset != before.queue_offset:
            checkpoint.version_counter += 1
            checkpoint.version_timestamp_ms = self._store.clock.now_ms()
        return _Reached(self.changes, checkpoint)

    def _write_checkpoint(self, reached: _Reached) -> None:
        """Flush everything that a checkpoint covers, and write the checkpoint. Thread-safe."""
        self._store.flush()
        self._slots.flush()
        reached.checkpoint.write(self._store.path, self._store.files)

    def _saved(self, reached: _Reached) -> None:
        """Release everything before a written checkpoint."""
        self.checkpoint = reached.checkpoint
        self._slots.log.trim(self._store.log.begin)
        self._saved_changes = reached.changes  # after the steps that can fail, so that they are tried again
