"""Faults on request, as they occur in a real cluster, including all causes of duplicates.

A fault applies to the next event, once unless ``times`` says otherwise, and is part of the history. Faults of processes
and of the broker are methods of the kit: `Kit.crash`, `Kit.restart`, `Kit.join`, `Kit.lose`, `Kit.crash_broker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from librmq.clock import ManualClock
from librmq.errors import BrokerBusyError, BrokerError, BrokerUnreachableError
from librmq.protocol import ResponseCode, SendResponse
from librmq.runtime.runner import Runner
from librmq.testing.process import Process

__all__ = ["Faults"]


class _Host(Protocol):
    """The parts of the kit that faults use."""

    clock: ManualClock

    @property
    def runner(self) -> Runner: ...

    def note(self, who: str, what: str) -> None: ...


@dataclass(slots=True)
class _Due:
    kind: str
    times: int
    topic: str | None
    seconds: float = 0.0
    code: int = 0


class Faults:
    """Faults of one test, each requested by a call: ``rmq.faults``."""

    def __init__(self, kit: _Host) -> None:
        self._kit = kit
        self._due: list[_Due] = []
        self._slow: dict[str, list[int]] = {}

    def lose_answer(self, topic: str | None = None, *, times: int = 1) -> None:
        """Store the next send (to ``topic``) and lose its answer, so that the producer sends a duplicate."""
        self._due.append(_Due("lose", times, topic))

    def refuse_send(self, topic: str | None = None, *, times: int = 1, busy: bool = False) -> None:
        """Refuse the next send; with ``busy`` like an overloaded broker, so that the producer does not try again."""
        code = ResponseCode.SYSTEM_BUSY if busy else ResponseCode.SERVICE_NOT_AVAILABLE
        self._due.append(_Due("refuse", times, topic, code=code))

    def late_answer(self, seconds: float | timedelta, topic: str | None = None, *, times: int = 1) -> None:
        """Store the next send immediately and answer it ``seconds`` later; all tries of a send have 3 s in total."""
        self._due.append(_Due("late", times, topic, _seconds(seconds)))

    def slow_listener(self, group: str, seconds: float | timedelta, *, times: int = 1) -> None:
        """Let the next listener of a group work immediately and return ``seconds`` later."""
        self._slow.setdefault(group, []).extend([round(1000 * _seconds(seconds))] * times)

    def skew_clock(self, process: Process, seconds: float | timedelta) -> None:
        """Set the clock of a process ahead (below 0: back), and with it all its timestamps."""
        process.skew_ms = round(1000 * _seconds(seconds))
        self._kit.note("fault", f"the clock of {process.label} is {process.skew_ms:+,} ms off")

    # ---- called by the kit

    def before_send(self, process: Process, topic: str) -> None:
        """Raise the error of a refused send, if one is due."""
        if self._due and (due := self._take("refuse", topic)) is not None:
            self._kit.note("fault", f"refuses what {process.label} sends to {topic}")
            remark = f"refused on request (topic {topic!r})"
            raise (
                BrokerBusyError(due.code, remark)
                if due.code == ResponseCode.SYSTEM_BUSY
                else BrokerError(due.code, remark)
            )

    def after_send(self, process: Process, topic: str, response: SendResponse) -> None:
        """Lose or delay the answer, if a fault is due."""
        kit = self._kit
        lost = bool(self._due) and self._take("lose", topic) is not None
        if (
            lost
            or kit.runner.choose(f"answer to {process.label}, topic {topic}", ("comes", "fault: is lost")) != "comes"
        ):
            kit.note("fault", f"the answer to {process.label} is lost; {topic}/{response.queue_id} has the message")
            raise BrokerUnreachableError(f"the answer was lost (topic {topic!r})")
        if self._due and (due := self._take("late", topic)) is not None:
            kit.note("fault", f"the answer to {process.label} takes {due.seconds:g} s")
            kit.clock.advance(seconds=due.seconds)

    def slow(self, group: str) -> int:
        """Return the delay of the next listener of the group in milliseconds."""
        waits = self._slow.get(group)
        return waits.pop(0) if waits else 0

    def _take(self, kind: str, topic: str) -> _Due | None:
        for due in self._due:
            if due.kind == kind and due.topic in (None, topic):
                due.times -= 1
                if due.times <= 0:
                    self._due.remove(due)
                return due
        return None


def _seconds(duration: float | timedelta) -> float:
    return duration.total_seconds() if isinstance(duration, timedelta) else duration
