"""Django's settings, which a process has once, for all tests on Django."""

from __future__ import annotations

from pathlib import Path

import django
from django.conf import settings


def configure(folder: Path) -> None:
    """Configure Django with a SQLite file in a folder, unless this process has done so."""
    if settings.configured:
        return
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "db.sqlite3"}},
        INSTALLED_APPS=["librmq.integrations.django"],
        SECRET_KEY="of a test",
        USE_TZ=True,
    )
    django.setup()
