"""Fixtures of the tests of crashes."""

from __future__ import annotations

import pytest

from librmq.store.engine import saved_state


@pytest.fixture
def mark_each_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a mark at each flush, not only after many bytes."""
    monkeypatch.setattr(saved_state, "WORTH_A_MARK", 1)
