"""The processes of a test: their names, which of them live, and whose failures fail the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from librmq.config import wrong_kind
from librmq.runtime.runner import Work
from librmq.testing.kit_runner import current_work, group_of
from librmq.testing.process import A_PROCESS, Process, ProcessHost


class ProcessStateError(RuntimeError):
    """A process cannot do what the test asks: it has ended, cannot start, or makes the call in its own listener."""


class ProcessTable:
    """All processes of a test, dead ones too, in the order in which they were made."""

    def __init__(self, host: ProcessHost, choose: Callable[[str, Sequence[str]], str]) -> None:
        self.processes: list[Process] = []
        self._host = host
        self._choose = choose
        self._tolerated: set[str] = set()

    def make(
        self, name: str, factory: Callable[[Process], Any], generation: int = 1, site: str | None = None
    ) -> Process:
        """Return a new process, with a client id that sorts after the earlier ones or, if chosen so, before them."""
        count = len(self.processes)
        order = "after" if not count else self._choose(f"client ids of {name}", ("after", "before"))
        host = f"10.0.0.{254 - count % 150}" if order == "before" else f"10.0.1.{100 + count % 150}"
        process = Process(self._host, name, generation, host, factory, site)
        before = next((earlier for earlier in self.processes if earlier.name == name), None)
        if before is not None:
            process.restarts(before)
        self.processes.append(process)
        return process

    def free_name(self, name: str) -> str:
        """Return the name, with a number appended if a process already has that name."""
        names = {process.name for process in self.processes}
        number = 1
        while (free := name if number == 1 else f"{name}-{number}") in names:
            number += 1
        return free

    def living(self, process: Process) -> Process:
        """Return the process, or its restarted successor.

        Raises:
            ProcessStateError: It has ended without a successor.
            TypeError: It is no process.
        """
        if not isinstance(process, Process):
            raise wrong_kind("process", process, A_PROCESS)
        for latest in reversed(self.processes):
            if latest.name == process.name and not latest.dead:
                return latest
        raise ProcessStateError(f"{process.name} has ended and was not restarted: name a living process")

    def process_of(self, work: Work) -> Process | None:
        """Return the process that runs this code."""
        for process in self.processes:
            if work.owner is process or any(work.owner is client for client in process.clients.values()):
                return process
        return None

    def runs_now(self, process: Process) -> bool:
        """Return whether the process's own code runs now."""
        work = current_work()
        return work is not None and self.process_of(work) is process

    def tolerate(self, name: str) -> None:
        """Treat failures of a process or a group as failed deliveries, as in production."""
        self._tolerated.add(name)

    def tolerate_like(self, process: Process, other: Process) -> None:
        """Treat failures of ``other`` like failures of ``process``."""
        if process.name in self._tolerated:
            self._tolerated.add(other.name)

    def fails_fast(self, work: Work) -> bool:
        """Return whether an error of this code fails the test."""
        process = work.label.partition(" ")[0].partition("@")[2].partition("~")[0].partition(".")[0]
        return group_of(work) not in self._tolerated and process not in self._tolerated
