"""Django's tasks in a librmq store: a backend for the setting ``TASKS``, and ``manage.py librmq_worker``.

::

    INSTALLED_APPS = [..., "librmq.integrations.django"]
    TASKS = {
        "default": {"BACKEND": "librmq.integrations.django.LibrmqBackend", "OPTIONS": {"path": BASE_DIR / "tasks"}},
    }

A consumer's listeners use connections as requests do by ``PushConsumer(…, hooks=[fresh_connections])``.
Tasks are those of ``django.tasks`` where Django has them (from 6.0 on), else those of the package ``django-tasks``.
"""

# isort: off
from librmq.integrations.django import _tasks as _tasks  # first, because its error names the extra

# isort: on
from librmq.integrations.django._backend import LibrmqBackend as LibrmqBackend
from librmq.integrations.django._worker import ResultTooLargeError as ResultTooLargeError
from librmq.integrations.django._worker import Worker as Worker
from librmq.integrations.django._worker import WorkerLost as WorkerLost
from librmq.integrations.django._worker import fresh_connections as fresh_connections

__all__ = ["LibrmqBackend", "ResultTooLargeError", "Worker", "WorkerLost", "fresh_connections"]
