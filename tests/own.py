"""Parts that others write, tried by the tests of their requirements: see ``docs/extending.md``.

A test of a requirement takes the part by a fixture of its kind. With ``LIBRMQ_OWN=KIND=MODULE:CALLABLE`` only these
tests run, with what the callable returns in place of librmq's own.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import pytest


def _chosen() -> tuple[str, Callable[[], Any] | None]:
    """Return the kind of the part that the variable names, and what makes one."""
    text = os.environ.get("LIBRMQ_OWN", "")
    kind, _, path = text.partition("=")
    try:
        return kind, pkgutil.resolve_name(path) if text else None
    except (ValueError, ImportError, AttributeError) as error:
        raise pytest.UsageError(f"LIBRMQ_OWN={text}: {error}; expected KIND=MODULE:CALLABLE") from None


_KIND, _make = _chosen()


def params(kind: str, ours: Mapping[str, Any]) -> list[Any]:
    """Return the values of a fixture of this kind: librmq's own with their names, or what makes the chosen part."""
    if kind == _KIND:
        return [pytest.param(_make, id="own")]
    return [pytest.param(value, id=name) for name, value in ours.items()]


def keep(items: list[pytest.Item]) -> None:
    """Leave only the requirements of the chosen part."""
    if _KIND:
        items[:] = [
            item
            for item in items
            if item.get_closest_marker("requirement") and _KIND in getattr(item, "fixturenames", ())
        ]
        if not items:
            raise pytest.UsageError(f"LIBRMQ_OWN: no chosen test requires anything of a {_KIND}: see docs/extending.md")
