"""``manage.py librmq_worker``: runs tasks in processes and threads until SIGTERM or SIGINT."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import django
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.utils import autoreload

from librmq import RmqError
from librmq.clock import SystemClock
from librmq.integrations.django._backend import LibrmqBackend
from librmq.integrations.django._tasks import task_backends
from librmq.integrations.django._worker import Worker
from librmq.runtime.locks import Event

_AGAIN_S = 1.0
"""Between the end of a process that failed and the next one."""


class Command(BaseCommand):
    """Runs the tasks of a backend."""

    help = "Runs tasks of a librmq backend. SIGTERM or SIGINT ends it after the running tasks, a second one at once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument("--backend", default="default", help="name in TASKS (default: default)")
        parser.add_argument(
            "--queue-name", action="append", default=[], metavar="NAME", help="a queue, repeatable (default: all)"
        )
        parser.add_argument("--processes", type=_positive, default=1, metavar="N", help="processes (default: 1)")
        parser.add_argument("--threads", type=_positive, default=1, metavar="N", help="threads of each (default: 1)")
        parser.add_argument("--burst", action="store_true", help="end when no task is due")
        parser.add_argument(
            "--reload",
            action=BooleanOptionalAction,
            default=settings.DEBUG,
            help="begin again when code changes (default: the setting DEBUG)",
        )

    def handle(self, *_: Any, **options: Any) -> None:
        """Run until a signal ends it."""
        backend = _backend(options["backend"])
        unknown = sorted(set(options["queue_name"]) - backend.queues) if backend.queues else []
        if unknown:
            raise CommandError(f"QUEUES has no {', '.join(unknown)}: expected some of {', '.join(backend.queues)}")
        if options["reload"] and not options["burst"]:
            autoreload.autoreload_started.connect(_watch_apps)
            autoreload.run_with_reloader(self._run, options)
        else:
            self._run(options)

    def _run(self, options: dict[str, Any]) -> None:
        queues, threads, processes = options["queue_name"], options["threads"], options["processes"]
        burst = options["burst"]
        backend = _backend(options["backend"])
        try:
            # The process that shares the store first owns it: with several processes the one that runs no task.
            backend.connection()
            party: Worker | _Crew = (
                Worker(backend, queues=queues, threads=threads, burst=burst)
                if processes == 1
                else _Crew(backend, queues, threads, processes, burst)
            )
        except (RmqError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error
        atexit.register(party.close)  # a reload ends the process without a signal
        _stop_at_signals(party)
        place = backend.options.get("path", "an open broker")
        self.stdout.write(f"librmq_worker {os.getpid()}: runs tasks of {place}; {processes} × {threads} at a time")
        self.stdout.flush()
        party.run()
        self.stdout.write(f"librmq_worker {os.getpid()}: ended")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return number


def _backend(alias: str) -> LibrmqBackend:
    if alias not in task_backends.settings:
        raise CommandError(f"TASKS has no {alias!r}: expected one of {', '.join(task_backends.settings)}")
    backend = task_backends[alias]
    if not isinstance(backend, LibrmqBackend):
        raise CommandError(f"TASKS[{alias!r}] is a {type(backend).__name__}, not a LibrmqBackend: give --backend")
    return backend


def _watch_apps(sender: autoreload.BaseReloader, **_: object) -> None:
    """Watch the project's apps, because other processes import their tasks."""
    for app in apps.get_app_configs():
        folder = Path(app.path)
        if "site-packages" not in folder.parts:
            sender.watch_dir(folder, "**/*.py")


def _stop_at_signals(party: Worker | _Crew) -> None:
    """End the party at the first signal after its running tasks, and the process at the second."""
    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        if signals:
            os._exit(128 + number)  # running tasks come again
        signals.append(number)
        party.stop()

    if threading.current_thread() is threading.main_thread():  # not in the reloader's thread, which ends by `atexit`
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)


class _Crew:
    """Processes that each have a worker, and are replaced when they fail."""

    def __init__(self, backend: LibrmqBackend, queues: list[str], threads: int, processes: int, burst: bool) -> None:
        self._arguments = (backend.alias, queues, threads, burst)
        self._number = processes
        self._processes: list[BaseProcess] = []
        self._stopping = Event()

    def run(self) -> None:
        """Run the processes until `stop`."""
        clock = SystemClock()
        for _ in range(self._number):
            self._begin()
        while self._processes:
            ended = wait([process.sentinel for process in self._processes])
            for process in [process for process in self._processes if process.sentinel in ended]:
                process.join()
                self._processes.remove(process)
                ends = self._arguments[-1] and not process.exitcode
                if not ends and not self._stopping.is_set() and not clock.wait(self._stopping, _AGAIN_S):
                    self._begin()

    def _begin(self) -> None:
        # Not by a fork: the threads of this process would leave their locks locked in the child.
        process = multiprocessing.get_context("spawn").Process(target=_run_process, args=self._arguments)
        process.start()
        self._processes.append(process)
        if self._stopping.is_set():  # the signal came in between
            process.terminate()

    def stop(self) -> None:
        """End each process after its running tasks."""
        self._stopping.set()
        for process in list(self._processes):
            process.terminate()

    def close(self) -> None:
        """Stop, and wait for the processes."""
        self.stop()
        for process in list(self._processes):
            process.join()


def _run_process(alias: str, queues: list[str], threads: int, burst: bool) -> None:
    """Run a worker in a process of its own, which ends with its parent."""
    django.setup()
    worker = Worker(_backend(alias), queues=queues, threads=threads, burst=burst)
    _stop_at_signals(worker)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        worker.stop()

    threading.Thread(target=follow, name="librmq-tasks-parent", daemon=True).start()
    worker.run()
