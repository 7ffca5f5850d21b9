"""A store that the tests of appends by peers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from librmq.store import verify
from tests.store.shared_store import Shared


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    shared = Shared(tmp_path)
    shared.direct(b"first of a peer", 1)
    yield shared
    shared.close()
    assert verify(shared.path).sound
