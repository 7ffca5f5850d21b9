"""The application of ``test_celery.py``; its folder comes from the environment."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

import librmq.integrations.kombu  # noqa: F401 (makes kombu know librmq://)
from librmq.clock import SystemClock

FOLDER = Path(os.environ.get("TASKS_FOLDER", "."))
app = Celery(
    "tests.integrations.celery_tasks",
    broker=os.environ.get("TASKS_BROKER", f"librmq://{FOLDER.absolute()}/queue"),
    backend=f"file://{FOLDER.absolute()}/results",
)
app.conf.update(broker_connection_retry_on_startup=True, worker_prefetch_multiplier=2)
if not app.conf.broker_url.startswith("librmq+connect"):
    app.conf.broker_transport_options = {
        "visibility_timeout": 3,
        "delayed_delivery": bool(os.environ.get("TASKS_DELAYED")),
    }


@worker_ready.connect
def note_ready(**_: object) -> None:
    (FOLDER / f"ready {os.getpid()}").touch()


@app.task
def add(first: int, second: int) -> int:
    return first + second


@app.task(bind=True, max_retries=3)
def third_time(self: Any) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


@app.task
def held() -> None:
    """Wait for the file ``go``."""
    while not (FOLDER / "go").exists():
        SystemClock().wait(threading.Event(), 0.02)


@app.task(acks_late=True)
def end_process() -> None:
    os._exit(1)


@app.task(acks_late=True)
def note(number: int, seconds: float = 0) -> None:
    """Write a line when it begins, and one when it ends."""
    with open(FOLDER / "notes", "a") as file:
        file.write(f"begins {number}\n")
        file.flush()
        if seconds:
            SystemClock().wait(threading.Event(), seconds)
        file.write(f"ends {number}\n")
