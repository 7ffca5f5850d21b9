"""The tasks of the tests of Django's backend: functions of a module, as Django requires."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from django.db import connection

from librmq.integrations.django import _tasks as tasks

if tasks.Task.__module__.startswith("django."):
    from django.tasks import task
else:
    from django_tasks import task

ran: list[Any] = []


@task
def add(first: int, second: int) -> int:
    ran.append((first, second))
    return first + second


@task
def fail(reason: str) -> None:
    ran.append(reason)
    raise ValueError(reason)


@task
async def add_in_a_coroutine(first: int, second: int) -> int:
    return first + second


@task
def not_json() -> object:
    return object()


@task
def end_with(size: int, as_error: bool) -> str:
    ran.append(size)
    if as_error:
        raise ValueError("begin" + "x" * size + "end")
    return "x" * size


@task
def take(text: str) -> int:
    return len(text)


@task
def leave() -> None:
    raise SystemExit(3)


@task(takes_context=True)
def attempt(context: Any) -> list[object]:
    return [context.attempt, context.task_result.status]


@task
def mark(folder: str, name: str) -> str:
    """Note in a file that the task began, and wait while the file ``hold`` is there."""
    with (Path(folder) / name).open("a") as file:
        file.write(f"{os.getpid()}\n")
    while (Path(folder) / "hold").exists():
        os.sched_yield()
    return name


@task
def end_process() -> None:
    os._exit(7)


@task
def count_rows() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM orders")
        return int(cursor.fetchone()[0])
