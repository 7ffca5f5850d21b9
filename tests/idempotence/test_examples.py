"""The examples do what they claim, with SQLite and with real servers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy.pool import NullPool

from librmq.clock import ManualClock
from tests.idempotence.conftest import DATABASES, Database
from tests.programs import example, run_program
from tests.reference import CHECKOUT


@pytest.fixture
def shop(database: Callable[[str], Database]) -> Callable[[str], sqlalchemy.Engine]:
    """``shop("mysql")`` returns an engine with fresh tables of the example."""

    def make(base: str) -> sqlalchemy.Engine:
        place = database(base)
        for table in ("orders", "charges"):
            place.run(f"DROP TABLE IF EXISTS {table}")
        engine = sqlalchemy.create_engine(place.url, poolclass=NullPool)
        example("idempotence").make_tables(engine, 3)
        return engine

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "base", "charges", "took_ms"),
    [
        *(("check_then_act", base, 2, 1100) for base in DATABASES),
        *(("conditional_update", base, 1, 1100) for base in DATABASES),
        # The duplicate is refused, and then delivered again.
        *(("select_for_update_nowait", base, 1, 10_100) for base in DATABASES[1:]),
    ],
)
def test_how_often_a_duplicate_charges(
    shop: Callable[[str], sqlalchemy.Engine], way: str, base: str, charges: int, took_ms: int
) -> None:
    """The work takes a second, and the duplicate arrives after 100 ms."""
    ways, clock = example("idempotence"), ManualClock(0)
    assert ways.deliver_twice(shop(base), getattr(ways, way), 0, clock) == charges
    assert clock.now_ms() == took_ms


@pytest.mark.slow
@pytest.mark.parametrize("base", DATABASES[1:])
def test_a_lock_that_waits_charges_once(shop: Callable[[str], sqlalchemy.Engine], base: str) -> None:
    """Whether the duplicate waits for the lock or arrives after it is free, it finds the order paid."""
    ways, engine = example("idempotence"), shop(base)
    with engine.connect() as one, engine.connect() as two:
        first = ways.select_for_update(one, 0)
        assert next(first) == 1.0  # the first one holds the lock and works
        duplicate = threading.Thread(target=lambda: list(ways.select_for_update(two, 0)))
        duplicate.start()
        assert list(first) == []
        duplicate.join()
    with engine.connect() as connection:
        assert connection.execute(sqlalchemy.text("SELECT COUNT(*) FROM charges")).scalar_one() == 1


def test_the_ways_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    example("idempotence").main(f"sqlite:///{tmp_path / 'x.db'}")
    assert "check_then_act: charged 2 times\nconditional_update: charged 1 times\n" in capsys.readouterr().out


def test_from_one_database_to_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    example("exactly_once").main(tmp_path)
    shown = capsys.readouterr().out
    assert shown.startswith("2 messages sent\n")
    assert shown.count("mail: ") == 2
    assert shown.endswith("invoice for order-1: 40\ninvoice for order-2: 25\n")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["django", "flask", "fastapi", "peewee", "sqlmodel"])
def test_recipes_for_sessions_of_frameworks(recipe: str) -> None:
    """In a process of its own, because Django's settings are a process's."""
    done = run_program((CHECKOUT / "examples" / "effects_once.py").read_text("utf-8"), recipe)
    assert done.stdout == f"{recipe}: 100 - 10 = 90\n", done.stderr
