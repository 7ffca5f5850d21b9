"""The application of Django, which makes the outbox's table where a backend has one."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import post_migrate

from librmq.integrations.django._backend import LibrmqBackend
from librmq.integrations.django._tasks import task_backends


class LibrmqConfig(AppConfig):
    """Named ``librmq``, so that no application called ``django`` is in the way."""

    name = "librmq.integrations.django"
    label = "librmq"
    verbose_name = "librmq"

    def ready(self) -> None:
        """Create the outbox's table at ``manage.py migrate``, and in test databases."""
        post_migrate.connect(create_outbox, sender=self)


def create_outbox(using: str, **_: Any) -> None:
    """Create the table of each backend whose outbox is in the database ``using``, or upgrade it."""
    for alias in task_backends.settings:
        backend = task_backends[alias]
        if isinstance(backend, LibrmqBackend) and backend._outbox_database == using:
            backend._upgrade_outbox()
