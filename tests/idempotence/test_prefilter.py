"""A Bloom filter in front of a store: it saves statements where a claim takes several, and never decides the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from librmq.errors import ConfigError
from librmq.idempotence._server_stores import SeenKeys, SqlDedupStore
from librmq.idempotence.stores import Claim

NOW, UNTIL, KEPT = 1_000, 601_000, 9_000_000


class Counted:
    """A store that uses the portable statements and counts them."""

    def __init__(self, path: Path, seen: SeenKeys | None) -> None:
        self.statements = 0
        self.store = SqlDedupStore(f"sqlite:///{path}").create()
        self.store.engine.dispose()
        sqlalchemy.event.listen(self.store.engine, "connect", self._trace)
        self.store.use_portable_statements(seen)

    def _trace(self, connection: Any, _: object) -> None:
        connection.set_trace_callback(self._count)

    def _count(self, statement: str) -> None:
        self.statements += 1

    def claim(self, key: str, owner: str, now_ms: int = NOW) -> tuple[Claim, int]:
        """Make a claim; return its result and the number of statements."""
        before = self.statements
        claim = self.store.claim(key, owner, now_ms, now_ms + UNTIL)
        return claim, self.statements - before


@pytest.mark.parametrize("filtered", [False, True])
def test_a_prefilter_saves_statements(tmp_path: Path, filtered: bool) -> None:
    counted = Counted(tmp_path / "x.db", SeenKeys() if filtered else None)
    for number in range(20):
        assert counted.claim(f"k{number}", "a1") == (Claim.NEW, 1)
    counted.store.finish("k0", "a1", NOW, KEPT)
    duplicate = 1 if filtered else 3
    assert counted.claim("k0", "b1") == (Claim.CONSUMED, duplicate)
    assert counted.claim("k1", "b1") == (Claim.CONSUMING, duplicate)
    assert counted.claim("k1", "b1", NOW + UNTIL) == (Claim.TAKEN_OVER, 3 if filtered else 2)
    counted.store.close()


def test_other_processes_and_restarts_do_not_matter(tmp_path: Path) -> None:
    one, two = (Counted(tmp_path / "x.db", SeenKeys()) for _ in range(2))
    assert one.claim("k", "a1") == (Claim.NEW, 1)
    assert two.claim("k", "b1") == (Claim.CONSUMING, 3)  # certainly new to this filter, but the store has it
    one.store.finish("k", "a1", NOW, KEPT)
    again = Counted(tmp_path / "x.db", SeenKeys())
    assert again.claim("k", "c1") == (Claim.CONSUMED, 3)
    assert again.claim("k", "c2") == (Claim.CONSUMED, 1)
    for counted in (one, two, again):
        counted.store.close()


def test_a_wrong_filter_costs_one_statement(tmp_path: Path) -> None:
    class Wrong(SeenKeys):
        def add(self, key: str) -> bool:
            return True

    counted = Counted(tmp_path / "x.db", Wrong())
    assert counted.claim("k", "a1") == (Claim.NEW, 2)
    assert counted.claim("k", "b1") == (Claim.CONSUMING, 1)
    counted.store.close()


def test_where_it_saves_nothing_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="on sqlite, where a claim is one statement"):
        SqlDedupStore(f"sqlite:///{tmp_path / 'x.db'}", prefilter=SeenKeys())
    for capacity, rate in ((0, 0.1), (1, 0), (1, 1)):
        with pytest.raises(ConfigError, match="capacity"):
            SeenKeys(capacity, rate)


def test_its_memory_is_bounded() -> None:
    seen = SeenKeys(capacity=500, error_rate=0.01)
    fresh = [seen.add(f"k{number}") for number in range(5_000)]
    assert sum(fresh) < 250  # at most one in twenty is wrongly recognised
    assert all(seen.add(f"k{number}") for number in range(4_600, 5_000))  # the latest keys are known
    assert len(seen) <= 1_000
    assert not all(seen.add(f"k{number}") for number in range(500))  # the oldest keys are forgotten
