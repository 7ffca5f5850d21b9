"""Faults on request, as they occur in a real cluster, including those that cause duplicates.

A fault applies to the next event, once unless ``times`` says otherwise, and is part of the history. Faults of processes
and of the broker are methods of the kit: `Kit.crash`, `Kit.restart`, `Kit.join`, `Kit.lose`, `Kit.crash_broker`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from librmq.clock import LAST_MS
from librmq.config import to_seconds, wrong_kind
from librmq.errors import BrokerBusyError, BrokerError, BrokerUnreachableError, ConfigError
from librmq.protocol import ResponseCode, SendResponse
from librmq.testing._kit_runner import KitRunner, ProcessTable
from librmq.testing._process import A_PROCESS, KitParts, Process


@dataclass(slots=True)
class _Due:
    kind: str
    """The method that requests it."""
    times: int
    topic: str | None
    broker: str | None
    seconds: float = 0.0
    code: int = 0
    met: set[tuple[str, str]] = field(default_factory=set)
    """Kinds and names of the topics and brokers to which something was sent since the request."""

    def __post_init__(self) -> None:
        _check_times(self.times)


class Faults:
    """Faults of one test, each requested by a call: ``rmq.faults``."""

    def __init__(self, kit: KitParts, runner: KitRunner, table: ProcessTable) -> None:
        self._kit = kit
        self._runner = runner
        self._table = table
        self._due: list[_Due] = []
        self._slow_groups: set[str] = set()

    def lose_answer(self, topic: str | None = None, *, times: int = 1, broker: str | None = None) -> None:
        """Store the next send (to ``topic`` or ``broker``) and lose its answer: the producer sends a duplicate."""
        self._due.append(_Due("lose_answer", times, topic, broker))

    def refuse_send(
        self, topic: str | None = None, *, times: int = 1, busy: bool = False, broker: str | None = None
    ) -> None:
        """Refuse the next send; with ``busy`` like an overloaded broker, so that the producer does not try again."""
        code = ResponseCode.SYSTEM_BUSY if busy else ResponseCode.SERVICE_NOT_AVAILABLE
        self._due.append(_Due("refuse_send", times, topic, broker, code=code))

    def late_answer(
        self, seconds: float | timedelta, topic: str | None = None, *, times: int = 1, broker: str | None = None
    ) -> None:
        """Store the next send immediately and answer it ``seconds`` later; all tries of a send have 3 s in total."""
        self._due.append(_Due("late_answer", times, topic, broker, _seconds(seconds)))

    def repeat_request(self, topic: str | None = None, *, times: int = 1, broker: str | None = None) -> None:
        """Let the next send arrive twice: the broker stores the message twice, and the producer gets one answer."""
        self._due.append(_Due("repeat_request", times, topic, broker))

    def slow_listener(self, group: str, seconds: float | timedelta, *, times: int = 1) -> None:
        """Let the next listener of a group work immediately and return ``seconds`` later.

        The consumer sends a message back that a concurrent listener still has after ``consume_timeout``, 15 min. It
        looks every 15 min, so the message comes again 15 to 30 min after the call, plus the delay of its retry, 10 s.
        """
        _check_times(times)
        self._slow_groups.add(group)
        self._runner.called_groups.discard(group)
        self._runner.slow_listeners.setdefault(group, []).extend([round(1000 * _seconds(seconds))] * times)

    def cut(self, end: str, other: str, *, seconds: float | timedelta | None = None) -> None:
        """Cut the link of a broker or site to a replica, site or process, for ``seconds`` or until `heal`."""
        link = f"the link of {end} and {other}"
        self._kit.note("fault", f"{link} is cut")
        number, lost = self._kit.network.cut(end, other, self._table.processes)
        for process, broker in lost:
            for client in process.clients:
                broker.remove_client(client.client_id)
        self._kit.network.table.changed()

        def heal() -> None:
            if self._kit.network.heal(end, other, number):  # unless another cut lasts longer
                self._kit.note("fault", f"{link} works again")

        if seconds is not None:
            self._runner.after(seconds, link, heal)

    def isolate(self, end: str, seconds: float | timedelta) -> None:
        """Cut all links of a broker to processes, or all links between a site and others, for ``seconds``."""
        for other in self._kit.network.others(end, [process for process in self._table.processes if not process.dead]):
            self.cut(end, other, seconds=seconds)

    def delay(self, end: str, other: str, seconds: float | timedelta) -> None:
        """Let sends, pulls and replicas' copies over the link of two brokers, replicas, sites or processes take time.

        0 ends this. Other calls take no time.
        """
        self._kit.note("fault", f"the link of {end} and {other} takes {_seconds(seconds):g} s")
        self._kit.network.delay(end, other, _seconds(seconds), self._table.processes)

    def heal(self, end: str, other: str) -> None:
        """Restore a link, however many times `cut` has cut it."""
        if not self._kit.network.heal(end, other):  # an end of a cut link can be gone, as a copy that took over is
            self._kit.network.check_ends(end, other, self._table.processes)
        self._kit.note("fault", f"the link of {end} and {other} works again")

    def skew_clock(self, process: Process, seconds: float | timedelta) -> None:
        """Set the clock of a process, and thus all its timestamps, ahead (below 0: back)."""
        if not isinstance(process, Process):
            raise wrong_kind("process", process, A_PROCESS)
        process._skew_ms = round(1000 * to_seconds("seconds", seconds, -math.inf))
        self._kit.note("fault", f"the clock of {process.label} is {process._skew_ms:+,} ms off")

    # ---- called by the kit

    def _missed(self) -> Iterator[str]:
        """Yield a sentence for each fault after whose request nothing was sent, or its group was not called."""
        for due in self._due:
            for kind, name in (("topic", due.topic), ("broker", due.broker)):
                if name is not None and (kind, name) not in due.met:
                    yield f"the fault {due.kind} never happened: nothing was sent to {kind} {name!r} after its request"
            if not due.met and due.topic is due.broker is None:
                yield f"the fault {due.kind} never happened: nothing was sent after its request"
        for group in sorted(self._slow_groups - self._runner.called_groups):
            yield f"the fault slow_listener never happened: no listener of group {group!r} was called after its request"

    def _before_send(self, process: Process, topic: str, broker: str) -> bool:
        """Raise the error of a refused send, if one is due; return whether the request arrives twice."""
        for due in self._due:
            due.met |= {("topic", topic), ("broker", broker)}
        if self._due and (refusal := self._take("refuse_send", topic, broker)) is not None:
            self._kit.note("fault", f"refuses what {process.label} sends to {topic}")
            remark = f"refused on request (topic {topic!r})"
            raise (
                BrokerBusyError(refusal.code, remark)
                if refusal.code == ResponseCode.SYSTEM_BUSY
                else BrokerError(refusal.code, remark)
            )
        is_repeated = bool(self._due) and self._take("repeat_request", topic, broker) is not None
        if is_repeated:
            self._kit.note("fault", f"what {process.label} sends to {topic} arrives twice, and is stored twice")
        return is_repeated

    def _lose(self, process: Process, topic: str, broker: str, response: SendResponse) -> None:
        kit = self._kit
        lost = bool(self._due) and self._take("lose_answer", topic, broker) is not None
        if (
            lost
            or self._runner.choose(f"answer to {process.label}, topic {topic}", ("comes", "fault: is lost")) != "comes"
        ):
            kit.note("fault", f"the answer to {process.label} is lost; {topic}/{response.queue_id} has the message")
            raise BrokerUnreachableError(f"the answer was lost (topic {topic!r})")

    def take_delay_s(self, process: Process, topic: str, broker: str) -> float:
        """Return the delay of the answer in seconds, 0 if no fault is due."""
        due = self._take("late_answer", topic, broker) if self._due else None
        if due is None:
            return 0.0
        self._kit.note("fault", f"the answer to {process.label} takes {due.seconds:g} s")
        return due.seconds

    def _take(self, kind: str, topic: str, broker: str) -> _Due | None:
        for due in self._due:
            if due.kind == kind and due.topic in (None, topic) and due.broker in (None, broker):
                due.times -= 1
                if due.times <= 0:
                    self._due.remove(due)
                return due
        return None


def _seconds(duration: float | timedelta) -> float:
    return to_seconds("seconds", duration, maximum=LAST_MS / 1000)


def _check_times(times: int) -> None:
    if type(times) is not int or times < 1:
        raise ConfigError(f"times: expected a whole number of at least 1, found {times!r:.80}")
