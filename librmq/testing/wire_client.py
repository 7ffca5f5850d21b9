"""Records and fails requests of a client that is connected over the wire, as the kit does for its own clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from librmq.clock import SystemClock
from librmq.errors import BrokerUnreachableError
from librmq.protocol import (
    Acknowledge,
    ChangeInvisible,
    ChannelClosed,
    EndTransaction,
    ForwardToDeadLetters,
    Heartbeat,
    Receive,
    Received,
    Request,
    SendMessage,
    SendResponse,
)
from librmq.runtime.runner import Step
from librmq.scheduling.timer_config import DELETE_KEY
from librmq.testing.history import Call, show
from librmq.testing.kit import Kit
from librmq.testing.process import Process

R = TypeVar("R")
_LATE_S: Final = 20.0


class WireClient:
    """The endpoint of one client: a process of the kit whose code runs elsewhere. Thread-safe."""

    def __init__(self, kit: Kit, process_of: Callable[[str], Process], name: str) -> None:
        """``process_of`` returns the process of a client, by its id, or by ``name`` before its first heartbeat."""
        self._kit = kit
        self._process_of = process_of
        self._name = name
        self._made: Process | None = None
        self._groups: frozenset[str] = frozenset()
        self._calls: dict[str, Call] = {}

    @property
    def process(self) -> Process:
        """Its process, which its first request makes."""
        if self._made is None:
            self._made = self._process_of(self._name)
        return self._made

    def call(self, request: Request[R], /) -> R:
        """Pass a request to the broker, with the kit's history and faults."""
        if isinstance(request, SendMessage):
            return cast(R, self._send(request))
        if isinstance(request, Heartbeat):
            self._heartbeat(request)
        elif isinstance(request, ChannelClosed):
            self.note("leaves")
        elif isinstance(request, EndTransaction):
            self.note(f"ends a transaction: {request.state.name.lower()}")
        elif isinstance(request, ChangeInvisible):
            self._ended(request.receipt, "failed", f"lets a message come again in {request.invisible_ms:,} ms")
        elif isinstance(request, ForwardToDeadLetters):
            self._ended(request.receipt, "failed", "makes a message a dead letter")
        answer = self._kit.broker.call(request)
        if isinstance(request, Receive):
            self._received(request, cast(Any, answer).messages)
        elif isinstance(request, Acknowledge):
            for receipt, is_good in zip(request.receipts, cast(Any, answer), strict=True):
                self._ended(receipt, "returned", "acknowledges" if is_good else "acknowledges too late")
        elif isinstance(request, ChangeInvisible):
            self._calls.pop(request.receipt, None)
        return answer

    def note(self, what: str, group: str = "") -> None:
        """Add a line to the history."""
        kit = self._kit
        with kit.runner.lock:
            kit.note(f"{group}@{self.process.label}" if group else self.process.label, what)

    def _heartbeat(self, request: Heartbeat) -> None:
        if self._made is None:
            self._name = request.client_id
        groups = frozenset(data.group for data in request.consumers)
        if self._groups != groups or not groups:
            self._groups = groups
            role = f"consumes as group {', '.join(sorted(groups))}" if groups else "produces"
            self.note(f"is connected and {role} ({request.client_id})")
        with self._kit.runner.lock:
            self._kit.observer.noted_heartbeat(self.process, request)

    # ---- sends

    def _send(self, request: SendMessage) -> SendResponse:
        kit, process, topic = self._kit, self.process, request.message.topic
        if DELETE_KEY in request.message.properties:
            self.note(f"recalls a message of {topic}")
            return self._kit.broker.call(request)
        due: threading.Event | None = None
        with kit.runner.lock:  # so that time is not moved between the message and its fault
            kit.faults.before_send(process, topic, kit.broker.name)
            response: SendResponse = self._kit.broker.call(request)
            kit.observer.noted_remote_send(topic)
            place = f"{topic}/{response.queue_id}:{response.queue_offset}"
            self.note(f"sends {place} {show(request.message)}")
            kit.faults.lose(process, topic, kit.broker.name, response)
            late_s = kit.faults.take_delay_s(process, topic, kit.broker.name)
            if late_s:
                due = self._due_in(late_s)
        if due is not None and not SystemClock().wait(due, _LATE_S):
            raise BrokerUnreachableError(f"the answer is {late_s:g} s late, and the test did not move the clock")
        return response

    def _due_in(self, seconds: float) -> threading.Event:
        """Return an event that is set once the test has moved the clock by ``seconds``."""
        runner, is_due = self._kit.runner, threading.Event()
        runner.wake(Step("a late answer", lambda now_ms: is_due.set()), runner.now_ms() + round(1000 * seconds))
        return is_due

    # ---- receives

    def _received(self, request: Receive, messages: tuple[Received, ...]) -> None:
        kit = self._kit
        for received in messages:
            stored = received.message
            where = f"{stored.topic}/{stored.queue_id}:{stored.queue_offset}"
            with kit.runner.lock:
                kit.observer.noted_remote_receive(request.group, request.topic)
                self._calls[received.receipt] = kit.history().begin_remote(
                    kit.clock.now_ms(), request.group, self.process.label, where, (kit.broker.name, stored)
                )
            attempt = f", attempt {received.attempt}" if received.attempt > 1 else ""
            self.note(f"gets {where} {show(stored)}{attempt}", request.group)

    def _ended(self, receipt: str, outcome: str, what: str) -> None:
        kit = self._kit
        with kit.runner.lock:
            call = self._calls.pop(receipt, None)
            if call is None:  # acknowledged again, or renewed: for the history the delivery is over
                return
            call.ended_ms, call.outcome = kit.clock.now_ms() - kit.history().begin_ms, outcome
        self.note(f"{what} ({call.where})", call.group)
