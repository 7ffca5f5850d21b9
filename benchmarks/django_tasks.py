"""Workers of Django's tasks: ``librmq_worker`` beside the worker of django-tasks' database backend.

A process enqueues the tasks, and then runs its backend's worker, which ends when no task is left. The rate counts from
the beginning of the first task to that of the last. SQLite and PostgreSQL are as Django connects to them by default.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from benchmarks.frame import Bench, Case, Target, last_line, main, with_server

COUNTS: Final = {"librmq": 3_000}
"""Tasks of a run; the databases get 500."""
_CODE: Final = "from benchmarks.django_tasks import work; print(work(*sys.argv[1:]))"


def _database(url: str) -> dict[str, Any]:
    if not url.startswith("postgres"):
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url}
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": parts.hostname,
        "NAME": parts.path.strip("/"),
        "PASSWORD": parts.password or "",
        "PORT": parts.port,
        "USER": parts.username,
    }


def work(backend: str, database: str, store: str, count: str) -> float:
    """Enqueue tasks, run them by the backend's worker, and return their number a second."""
    import django
    from django.conf import settings
    from django.core.management import call_command

    ours = {"BACKEND": "librmq.integrations.django.LibrmqBackend", "OPTIONS": {"path": store}}
    theirs = {"BACKEND": "django_tasks_db.DatabaseBackend"}
    settings.configure(
        DATABASES={"default": _database(database)},
        INSTALLED_APPS=["librmq.integrations.django", "django_tasks", "django_tasks_db"],
        SECRET_KEY="of a benchmark",
        TASKS={"default": ours if backend == "librmq" else theirs},
        USE_TZ=True,
    )
    django.setup()
    call_command("migrate", verbosity=0)
    from benchmarks.django_functions import begins, note

    for number in range(int(count)):
        note.enqueue(number)
    sys.stdout, output = sys.stderr, sys.stdout
    if backend == "librmq":
        call_command("librmq_worker", burst=True)
    else:
        call_command("db_worker", batch=True, startup_delay=False)
    sys.stdout = output
    assert len(begins) == int(count)
    return (len(begins) - 1) / max(begins[-1] - begins[0], 1e-9)


postgresql: Final = partial(with_server, kind="PostgreSQL")


def _run(backend: str, both: Bench | tuple[Bench, str], folder: Path) -> float:
    bench, database = (both, f"{folder}/db.sqlite3") if isinstance(both, Bench) else both
    count = max(bench.count(COUNTS.get(backend, 500)), 2)
    return float(last_line(_CODE, backend, database, folder / "store", count))


def _cases() -> Iterator[Case]:
    needs = ("django", "django_tasks_db")
    ours, theirs = partial(_run, "librmq"), partial(_run, "database")
    yield Case("tasks", ours, "one worker", theirs, "database backend on SQLite", Target(3), "tasks/s", needs=needs)
    yield Case("tasks", ours, "one worker", theirs, "database backend on PostgreSQL", Target(3), "tasks/s", postgresql,
               needs=(*needs, "psycopg"))  # fmt: skip


CASES: Final = list(_cases())

if __name__ == "__main__":
    main("django_tasks", __doc__, CASES)
