"""The modules behind the commands of the checkout."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest

from tests.reference import CHECKOUT


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import a module of ``tools/`` as the commands do, as in ``tools("screen")``."""
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module
