"""The task of `benchmarks.django_tasks`: a function of a module, as Django requires."""

from __future__ import annotations

import time

from librmq.integrations.django._tasks import Task

if Task.__module__.startswith("django."):
    from django.tasks import task
else:
    from django_tasks import task

begins: list[float] = []


@task  # type: ignore[untyped-decorator]
def note(number: int) -> int:
    """Note when it begins."""
    begins.append(time.perf_counter())
    return number
