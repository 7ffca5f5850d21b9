"""A store in memory with something that is done by time: it passes from one due step to the next."""

from __future__ import annotations

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.files.memory import MemoryFiles
from librmq.store import MessageStore
from tests.stores import ROOT, SMALL, START_MS


class ByTime:
    """The store, its clock and its files; `run_due` is the step."""

    def __init__(self, config: StoreConfig = SMALL, files: MemoryFiles | None = None, at_ms: int = START_MS) -> None:
        self.files = files or MemoryFiles()
        self.clock = ManualClock(at_ms)
        self.store = MessageStore.open(ROOT, config, files=self.files, clock=self.clock)
        self.runs: list[int] = []
        """When steps were due that `pass_to` has taken, after the start."""

    def run_due(self, now_ms: int) -> int | None:
        raise NotImplementedError

    def pass_to(self, at_ms: int) -> int | None:
        """Let time pass up to ``at_ms`` after the start; returns when the next step is due, after the start."""
        until = START_MS + at_ms
        due = self.run_due(self.clock.now_ms())
        while due is not None and due <= until:
            assert due >= self.clock.now_ms()
            self.clock.move_to(due)
            self.runs.append(due - START_MS)
            due = self.run_due(due)
        self.clock.move_to(until)
        return None if due is None else due - START_MS
