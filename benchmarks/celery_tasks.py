"""The application of `benchmarks.celery`: broker, settings and the file of its times come from the environment."""

from __future__ import annotations

import os
import time

from celery import Celery

import librmq.integrations.kombu  # noqa: F401  it registers librmq://

app = Celery("benchmarks.celery_tasks", broker=os.environ.get("CELERY_BROKER", "memory://"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=dict.fromkeys(
        ("data_folder_in", "data_folder_out", "control_folder"), os.environ.get("CELERY_FOLDER", "")
    )
    if app.conf.broker_url.startswith("filesystem")
    else {},
    task_acks_late=bool(os.environ.get("CELERY_LATE")),
    task_ignore_result=True,
    worker_prefetch_multiplier=int(os.environ.get("CELERY_PREFETCH", "4")),
)


@app.task  # type: ignore[untyped-decorator]
def note(sent_ns: int) -> None:
    """Write when the task begins and when it was sent, in one call of the system."""
    file = os.open(os.environ["CELERY_TIMES"], os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(file, time.time_ns().to_bytes(8, "big") + sent_ns.to_bytes(8, "big"))
    os.close(file)


def send(count: int, pause_s: float) -> None:
    """Send tasks, with a pause between two."""
    for _ in range(count):
        note.delay(time.time_ns())
        time.sleep(pause_s)
