"""What a version promises to programs: `api.txt` lists it."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.reference import CHECKOUT

API = "api.txt"


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module("api")


def test_the_file_is_up_to_date(api: ModuleType) -> None:
    written = (CHECKOUT / API).read_text("utf-8").splitlines()
    promised = api.api().splitlines()
    advice = "run `python tools/api.py`"
    assert sorted({*written} ^ {*promised}) == [], advice
    assert written == promised, advice


def test_a_version_promises_few_names(api: ModuleType) -> None:
    """What is promised can't be replaced any more; a name that no page teaches and no user needs stays librmq's own."""
    assert sum(map(len, api.promised().values())) <= 450
