"""The worker: receives tasks, runs them, and stores what became of them."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from traceback import format_exception
from typing import Any, Final

from django.db import close_old_connections
from django.utils.crypto import get_random_string

from librmq import OutboxSender, ReceivedMessage, SimpleConsumer
from librmq.clock import SystemClock
from librmq.errors import MessageIllegalError, ReceiptError, RmqError
from librmq.integrations.django._backend import LibrmqBackend, task_of
from librmq.integrations.django._tasks import TaskContext, normalize_json, task_finished, task_started
from librmq.protocol import ended_cause, process_deaths
from librmq.runtime.event_log import EventLog
from librmq.runtime.locks import Event, Lock

_log = EventLog("librmq.django")

_MAX_ATTEMPTS: Final = 5
"""Runs without an end, of which no process has died, after which a task counts as failed."""
_WAIT_S: Final = 1.0
"""A receive waits this long for a task, and so does the end of a worker."""
_RETRIES_FIRST: Final = 99
"""One of a hundred receives takes repeated tasks first, so that new ones don't keep them waiting for ever."""


_SHORT_TEXT: Final = 4_000
"""Characters of each end of a traceback that is too long."""


class WorkerLost(Exception):
    """Each worker that ran the task ended before the task did, by a crash or by SIGKILL."""


class ResultTooLargeError(Exception):
    """A task has returned more than a message holds: return the name of a file or of a row that has it."""


class Worker:
    """Runs the tasks of a backend in threads of this process.

    Thread-safe. `run_pending` needs no thread, for tests and scripts.
    """

    def __init__(
        self, backend: LibrmqBackend, *, queues: Iterable[str] = (), threads: int = 1, burst: bool = False
    ) -> None:
        """It receives nothing before `start` or `run_pending`.

        Args:
            backend: Has the store, and the queues by default.
            queues: Names of queues; by default all of the backend's.
            threads: Number of tasks that run at a time.
            burst: Whether `run` ends when no task is due.
        """
        self.id: str = f"{socket.gethostname()}-{os.getpid()}-{get_random_string(6)}"
        """Is among the ``worker_ids`` of each result."""
        self._backend = backend
        self._burst = burst
        self._stopping = Event()
        self._ended = Event()
        self._threads = [
            threading.Thread(target=self._run_thread, name=f"librmq-tasks-{number}", daemon=True)
            for number in range(threads)
        ]
        self._running: dict[str, ReceivedMessage] = {}
        self._lock = Lock()
        connection = backend.connection()
        names = sorted(set(queues) or backend.queues or {"default"})
        for name in names:
            connection.create_topic(backend._topic_of(name), 201, "PRIORITY")
        if connection.route.groups().get(backend.group) is None:
            connection.route.set_group(backend.group, priority_factor=_RETRIES_FIRST)
        # The worker itself ends a task at which processes have ended, so that its result says so.
        self._consumer = SimpleConsumer(connection.route, backend.group, max_process_deaths=0)
        for name in names:
            self._consumer.subscribe(backend._topic_of(name))
        self._consumer.start()
        self._extender = threading.Thread(target=self._extend, name="librmq-tasks-extend", daemon=True)
        self._sender: OutboxSender | None = backend._outbox_sender()

    # ---- life

    def start(self) -> None:
        """Start the threads."""
        if self._sender is not None:
            self._sender.start()
        for thread in (self._extender, *self._threads):
            thread.start()

    def stop(self) -> None:
        """Begin no further task; those that run go on. A signal handler may call it."""
        self._stopping.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the running tasks, after `stop`; return whether they have ended."""
        clock = SystemClock()
        until = None if timeout is None else clock.monotonic() + timeout
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(None if until is None else max(0.0, until - clock.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def run(self) -> None:
        """Run tasks until another thread or a signal handler calls `stop`, and end with the running ones."""
        if self._sender is not None and self._burst:
            self._sender.run_due(self._backend.now_ms())
        self.start()
        if self._burst:
            self.join()
        else:
            self._stopping.wait()
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """Stop, wait for the running tasks, and leave the group. A second call does nothing."""
        self.stop()
        self.join(timeout)
        self._ended.set()
        if self._sender is not None:
            self._sender.shutdown()
        self._consumer.shutdown()

    def run_pending(self) -> int:
        """Run the tasks that are due, one after the other in this thread; return their number."""
        if self._sender is not None:
            self._sender.run_due(self._backend.now_ms())
        number = 0
        while self._run_next(0):
            number += 1
        return number

    # ---- one task

    def _run_thread(self) -> None:
        clock = SystemClock()
        while not self._stopping.is_set():
            try:
                if not self._run_next(_WAIT_S) and self._burst:
                    return
            except RmqError as error:
                _log.warning("no task can be received, trying again: %(error)s", error=error)
                clock.wait(self._stopping, _WAIT_S)
            except Exception:
                _log.exception("a task was not run, and comes again")

    def _run_next(self, wait_s: float) -> bool:
        """Run one task; return False if none is due."""
        messages = self._consumer.receive(1, invisible=self._backend._invisible_s, wait=wait_s)
        for message in messages:
            with self._lock:
                self._running[message.receipt] = message
            key = message.receipt
            close_old_connections()
            try:
                self._handle(message)
                with self._lock, suppress(ReceiptError):  # it runs again elsewhere, finds the result, and ends there
                    self._consumer.ack(message)
            finally:
                with self._lock:
                    del self._running[key]
                close_old_connections()
        return bool(messages)

    def _handle(self, message: ReceivedMessage) -> None:
        """Run the task of a message, unless it has ended before or is not due."""
        state: dict[str, Any] = json.loads(message.body)
        state = self._backend.find(state["id"]) or state
        if state["status"] in ("SUCCESSFUL", "FAILED"):
            return
        now_ms = self._backend.now_ms()
        if (state["run_after_ms"] or 0) > now_ms + 1000:
            self._backend.send(state)  # further on its way
            return
        try:
            task = task_of(state)
        except Exception as error:
            _log.exception("task %(id)s can't be run: %(task)s is not a task", id=state["id"], task=state["task"])
            self._save_end(state, error)
            return
        if lost := self._why_lost(message, len(state["worker_ids"])):
            self._finish(task, state, WorkerLost(lost))
            with suppress(ReceiptError):  # it comes again elsewhere, where it has ended
                self._consumer.dead_letter(message, lost)
            return
        state["status"] = "RUNNING"
        state["started_at_ms"] = state["started_at_ms"] or now_ms
        state["last_attempted_at_ms"] = now_ms
        state["worker_ids"].append(self.id)
        self._backend.save(state)
        self._call(task, state)

    def _why_lost(self, message: ReceivedMessage, runs: int) -> str:
        """Return why a task whose workers have ended is not run again; empty if it is."""
        deaths, deaths_alone = process_deaths(message.properties)
        if deaths_alone:
            group = self._backend.connection().route.group_settings(self._backend.group)
            if 0 < group.max_process_deaths <= deaths_alone:
                return ended_cause(deaths_alone, group.max_process_deaths)
        return f"{_MAX_ATTEMPTS} workers have ended while they ran it" if runs - deaths >= _MAX_ATTEMPTS else ""

    def _call(self, task: Any, state: dict[str, Any]) -> None:
        """Call a task's function, and store the outcome."""
        result = self._backend._result_of(state, task)
        task_started.send(type(self._backend), task_result=result)
        context = (TaskContext(task_result=result),) if task.takes_context else ()
        try:
            state["return_value"] = normalize_json(task.call(*context, *state["args"], **state["kwargs"]))
        except KeyboardInterrupt:
            raise  # the user ends `run_pending`, and the task runs again
        except BaseException as error:  # SystemExit too, which would end this thread without a result
            self._finish(task, state, error)  # here, so that what logs the signal has the traceback
        else:
            self._finish(task, state)

    def _finish(self, task: Any, state: dict[str, Any], error: BaseException | None = None) -> None:
        """Store the end of a task, and tell Django's listeners."""
        self._save_end(state, error)
        task_finished.send(type(self._backend), task_result=self._backend._result_of(state, task))

    def _save_end(self, state: dict[str, Any], error: BaseException | None) -> None:
        state["status"] = "SUCCESSFUL" if error is None else "FAILED"
        state["finished_at_ms"] = self._backend.now_ms()
        if error is not None:
            kind = type(error)
            path = f"{kind.__module__}.{kind.__qualname__}"
            state["errors"].append({"exception_class_path": path, "traceback": "".join(format_exception(error))})
        try:
            self._backend.save(state)
        except MessageIllegalError as refusal:
            # Without a stored end the task would run again, with the same end.
            state["return_value"] = None
            if error is None:
                _log.error("task %(id)s: its result is not stored, so it counts as failed: %(error)s",
                           id=state["id"], error=refusal)  # fmt: skip
                self._save_end(state, ResultTooLargeError(str(refusal)))
                return
            text = state["errors"][-1]["traceback"]
            left_out = f"\n… {len(text) - 2 * _SHORT_TEXT} characters are left out …\n"
            state["errors"][-1]["traceback"] = text[:_SHORT_TEXT] + left_out + text[-_SHORT_TEXT:]
            self._backend.save(state)

    def _extend(self) -> None:
        """Keep running tasks hidden, until they end."""
        clock = SystemClock()
        while not clock.wait(self._ended, self._backend._invisible_s / 3):
            with self._lock:
                for message in self._running.values():
                    try:
                        self._consumer.extend(message, self._backend._invisible_s)
                    except RmqError as error:
                        _log.warning("a running task is not hidden any more, and may run twice: %(error)s", error=error)


def fresh_connections(_: object) -> Callable[[object, Exception | None], None]:
    """Give a listener Django's connections as a request has them; a hook of `librmq.PushConsumer`.

    Before and after each call it closes connections that have failed, or are as old as ``CONN_MAX_AGE`` allows. Without
    it a thread of a consumer keeps a connection that the database has ended, and each of its messages fails.
    """
    close_old_connections()
    return lambda result, error: close_old_connections()
