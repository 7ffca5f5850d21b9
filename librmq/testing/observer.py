"""The observer of a kit: runner, processes and replicas report to it, for history and evidence, and for due faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from librmq.clock import ManualClock
from librmq.errors import RmqError
from librmq.protocol import Heartbeat, PullMessage, Receive, Received, SendResponse
from librmq.runtime.runner import Work
from librmq.testing.evidence import Evidence
from librmq.testing.faults import Faults
from librmq.testing.history import History, show
from librmq.testing.kit_runner import KitRunner, current_work
from librmq.testing.process import Process, Repeated
from librmq.testing.process_table import ProcessStateError, ProcessTable


class _Observed(Protocol):
    """The parts of the kit that its observer uses."""

    clock: ManualClock
    runner: KitRunner
    faults: Faults

    def note(self, actor: str, what: str | Callable[[], str]) -> None: ...


class KitObserver:
    """Takes the reports of one kit. Not thread-safe."""

    def __init__(
        self, kit: _Observed, history: History, evidence: Evidence, table: ProcessTable, start: Callable[[], None]
    ) -> None:
        """``start()`` starts the consumers that the test has declared, before the test sends."""
        self._kit = kit
        self._history = history
        self._evidence = evidence
        self._table = table
        self._start = start
        self._pulled_by: dict[tuple[str, str, str, int], str] = {}
        self.declared: set[str] = set()
        """The names of processes whose consumers the test has made itself."""

    # ---- processes and replicas

    def place(self, topic: str, broker_name: str, queue_id: int) -> str:
        """Return a queue as the history shows it."""
        return self._history.place(topic, broker_name, queue_id)

    def noted_pull(self, process: Process, request: PullMessage, broker_name: str) -> None:
        """Note a pull; the history gets a line when a process takes over a queue."""
        place = request.group, request.topic, broker_name, request.queue_id
        if self._pulled_by.get(place) != process.label:
            before = self._pulled_by.get(place)
            self._pulled_by[place] = process.label
            if before is not None:
                where = self.place(request.topic, broker_name, request.queue_id)
                self._kit.note(f"{request.group}@{process.label}", f"takes over {where} at {request.queue_offset}")

    def noted_receive(self, process: Process, request: Receive, broker_name: str, messages: Sequence[Received]) -> None:
        """Note what a simple consumer received."""
        for received in messages:
            self._evidence.note_received(request.group, request.topic)
            message = received.message
            where = f"{self.place(message.topic, broker_name, message.queue_id)}:{message.queue_offset}"
            attempt = f", attempt {received.attempt}" if received.attempt > 1 else ""
            self._kit.note(f"{request.group}@{process.label}", f"receives {where} {show(message)}{attempt}")

    def noted_remote_send(self, topic: str) -> None:
        """Note that a client over the wire sends to a topic."""
        self._evidence.note_sent(topic)

    def noted_read(self, topic: str) -> None:
        """Note that the test has read the messages of a topic."""
        self._evidence.note_read(topic)

    def noted_remote_receive(self, group: str, topic: str) -> None:
        """Note that a client over the wire got a message of a topic."""
        self._evidence.note_received(group, topic)

    def clear_pulls(self) -> None:
        """Clear the record of which process pulls which queue, because a broker joined."""
        self._pulled_by.clear()

    def noted_heartbeat(self, process: Process, request: Heartbeat) -> None:
        """Note the subscriptions of a process's consumers."""
        self._evidence.note_heartbeat(request, process.name in self.declared)

    def before_send(self, process: Process, topic: str, broker_name: str) -> Repeated | None:
        """Record a message before it is stored; refuse it if a fault is due, or return what comes twice."""
        if current_work() is None:
            try:
                self._start()
            except RmqError as error:  # as it is, the producer would take it for an answer to its send, and try again
                raise ProcessStateError(f"a consumer that the test declared can't start: {error}") from error
        if process.is_test:
            self._evidence.note_sent(topic)
        return self._kit.faults.before_send(process, topic, broker_name)

    def after_send(self, process: Process, topic: str, broker_name: str, response: SendResponse) -> None:
        """Record a stored message or batch; lose or delay the answer if a fault is due."""
        if current_work() is not None:
            for offset_id in response.offset_ids:
                self._kit.runner.sent(broker_name, topic, int(offset_id[-16:], 16))
        self._kit.faults.after_send(process, topic, broker_name, response)

    def ended_in_background(self, result: object, error: Exception | None) -> None:
        """Fail the test with the error of a function that `Process.background` ran."""
        if error is not None and self._kit.runner.failure is None:
            self._kit.runner.failure = error

    def keep_messages(self) -> None:
        """Read what listeners got so far, because a replica replaces a broker."""
        self._history.keep_messages(self._evidence.message_at)

    # ---- the runner

    def process_of(self, work: Work) -> Process | None:
        """Return the process whose code this is."""
        return self._table.process_of(work)

    def fails_fast(self, work: Work) -> bool:
        """Return whether an error of this code fails the test."""
        return self._table.fails_fast(work)

    def listener_begins(self, work: Work) -> None:
        """Note that user code begins."""
        self._history.begin(self._kit.clock.now_ms(), work, self._evidence.about)

    def listener_ends(self, work: Work, outcome: str, error: Exception | None) -> None:
        """Note that user code ends."""
        self._history.end(self._kit.clock.now_ms(), work, outcome, error)
