"""Several processes share one store and are killed at random moments; a database counts the effects."""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy

from librmq.clock import ManualClock, SystemClock
from librmq.idempotence._sqltables import upgrade_tables
from librmq.idempotence.outbox import Outbox
from librmq.message.message import Message
from tests.conftest import SlowBudget
from tests.idempotence.conftest import DATABASES, Database, Place
from tests.idempotence.worker import MODES, work
from tests.programs import Fork

WORKERS = 3
COUNT = 40

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform == 'win32'", reason="kills"), pytest.mark.platform]

_groups = itertools.count()


def hammer(
    mode: str, store: str, url: str, effects: Path, group: str, seed: int, disturb: Callable[[], object] = lambda: None
) -> int:
    """Let several processes work, kill each at a different moment, and finish their work; return the number of kills.

    ``disturb`` is called now and then while they work. This process finishes the work with a clock past the end of all
    claims.
    """
    moments = random.Random(seed)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Fork(work, mode, store, url, str(effects), group, seed + number, COUNT))
            for number in range(WORKERS)
        ]
        for worker in workers:
            for _ in range(moments.randrange(1, COUNT)):
                assert worker.stdout.readline()
                if moments.random() < 0.1:
                    disturb()
            worker.process.kill()
    clock = ManualClock(SystemClock().now_ms())
    clock.advance(minutes=10)
    with closing(MODES[mode](store, url, str(effects), group, clock)) as consumer:
        for number in range(COUNT):
            consumer.deliver(str(number))
    return len(workers)


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    path = tmp_path / "effects.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE effects (grp TEXT, name TEXT)")
    return path


def names(effects: Path, group: str) -> list[str]:
    with closing(sqlite3.connect(effects)) as connection:
        rows = connection.execute("SELECT name FROM effects WHERE grp = ? ORDER BY rowid", (group,))
        return [name for (name,) in rows]


@pytest.mark.parametrize(("mode", "each"), [("guarded", 1), ("stepped", 3)])
@pytest.mark.parametrize("name", ["sqlite", "postgresql", "mysql", "redis"])
def test_each_kill_costs_at_most_one_effect_too_many(
    place: Callable[[str], Place], name: str, mode: str, each: int, effects: Path, slow_budget: SlowBudget
) -> None:
    """Each effect happens; it happens twice only if its process was killed between the effect and the mark."""
    where = place(name)
    where.handle  # noqa: B018 (makes the table)
    url = where.server.url if where.server is not None else str(where.path)
    for seed in slow_budget.rounds(6, "rounds of three killed processes"):
        group = f"kills-{next(_groups)}"
        kills = hammer(mode, name, url, effects, group, seed)
        counted = Counter(names(effects, group))
        assert sorted(counted, key=int) == [str(number) for number in range(each * COUNT)]
        assert counted.total() - each * COUNT <= kills


@pytest.mark.parametrize("base", DATABASES)
def test_no_kill_costs_anything_in_one_transaction(
    database: Callable[[str], Database], base: str, effects: Path, slow_budget: SlowBudget
) -> None:
    where = database(base)
    for seed in slow_budget.rounds(6, "rounds of three killed processes"):
        group = f"kills-{next(_groups)}"
        hammer("transactional", "", where.url, effects, group, seed)
        rows = where.run("SELECT name, COUNT(*) FROM effects WHERE name LIKE :like GROUP BY name", like=f"{group}/%")
        assert {name: int(count) for name, count in rows} == {f"{group}/{number}": 1 for number in range(COUNT)}


def check_outbox(place: Database, effects: Path, group: str, keys: int, kill_senders: Callable[[], int]) -> None:
    """An outbox sends each message at least once, repeats what a kill left unmarked, and keeps a key's order."""
    upgrade_tables(place.engine, dedup=None, messages=None, transactions=None, outbox=group)
    outbox, total = Outbox(table=group), 4 * COUNT
    with place.engine.begin() as connection:
        for number in range(total):
            order_key = f"key-{number % keys}" if number % 3 else None
            outbox.add(connection, Message("orders", str(number).encode()), order_key=order_key)
    kills = kill_senders()
    sent = list(map(int, names(effects, group)))
    assert set(sent) == set(range(total))
    assert len(sent) - total <= 100 * kills
    for key in range(keys):
        firsts = list(dict.fromkeys(number for number in sent if number % keys == key and number % 3))
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("base", DATABASES)
def test_senders_that_are_killed_send_all_in_order(
    database: Callable[[str], Database], base: str, effects: Path, slow_budget: SlowBudget
) -> None:
    where = database(base)
    for seed in slow_budget.rounds(6, "rounds of three killed senders"):
        group = f"kills_{base}_{next(_groups)}"
        check_outbox(where, effects, group, 40, partial(hammer, "outbox", "", where.url, effects, group, seed))


# --- what applications and databases do every day


class Server:
    """A database whose connections are ended again and again, and whose transactions are isolated by default."""

    def __init__(self, place: Database) -> None:
        self.place = place
        url = sqlalchemy.make_url(place.url)
        if place.name == "postgresql":
            url = url.update_query_dict({"options": "-c default_transaction_isolation=serializable"})
        elif place.name == "mysql":
            isolation = "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"
            url = url.update_query_dict({"init_command": isolation})
        self.url = url.render_as_string(hide_password=False)
        with place.engine.begin() as connection:
            for account in ("taken", "left", "right"):
                exists = sqlalchemy.text("SELECT 1 FROM accounts WHERE id = :id")
                if not connection.execute(exists, {"id": account}).first():
                    insert = sqlalchemy.text("INSERT INTO accounts VALUES (:id, 0)")
                    connection.execute(insert, {"id": account})

    def end_connections(self) -> None:
        """End all connections at the server, as its restart does."""
        if self.place.name == "postgresql":
            self.place.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            )
        elif self.place.name == "mysql":
            for (number,) in self.place.run(
                "SELECT id FROM information_schema.processlist WHERE user = 'root' AND id <> CONNECTION_ID()"
            ):
                with suppress(sqlalchemy.exc.OperationalError):  # it has ended meanwhile
                    self.place.run(f"KILL {int(number)}")
        self.place.close()  # else a later test gets a dead connection of those that waited in the pools here


@pytest.fixture
def disturbed(database: Callable[[str], Database]) -> Callable[[str], Server]:
    return lambda base: Server(database(base))


@pytest.mark.parametrize("base", ["postgresql", "mysql"])
def test_a_guard_counts_no_dead_connection_and_no_conflict_as_an_outage(
    disturbed: Callable[[str], Server], base: str, effects: Path, slow_budget: SlowBudget
) -> None:
    """Messages would be consumed without a guard if the database could not be reached, and so twice."""
    server = disturbed(base)
    for seed in slow_budget.rounds(6, "rounds of three killed processes and ended connections"):
        group = f"kills-{next(_groups)}"
        kills = hammer("unguarded", base, server.url, effects, group, seed, server.end_connections)
        counted = Counter(names(effects, group))
        assert sorted(counted, key=int) == [str(number) for number in range(COUNT)]
        assert counted.total() - COUNT <= kills


@pytest.mark.parametrize("base", ["postgresql", "mysql"])
def test_senders_repeat_nothing_for_ended_connections(
    disturbed: Callable[[str], Server], base: str, effects: Path, slow_budget: SlowBudget
) -> None:
    server = disturbed(base)
    for seed in slow_budget.rounds(6, "rounds of three killed senders and ended connections"):
        group = f"kills_{base}_{next(_groups)}"
        hammered = partial(hammer, "outbox", "", server.url, effects, group, seed, server.end_connections)
        check_outbox(server.place, effects, group, 8, hammered)


@pytest.mark.parametrize("base", DATABASES)
def test_blocks_that_swallow_errors_lose_and_repeat_nothing(
    disturbed: Callable[[str], Server], base: str, effects: Path, slow_budget: SlowBudget
) -> None:
    """Expected duplicate keys, deadlocks and dead connections in a block: all of it happens once, or none."""
    server = disturbed(base)
    for seed in slow_budget.rounds(6, "rounds of three killed processes and swallowed errors"):
        group = f"kills-{next(_groups)}"
        hammer("disturbed", "", server.url, effects, group, seed, server.end_connections)
        like = {"like": f"{group}/%"}
        rows = server.place.run("SELECT name, COUNT(*) FROM effects WHERE name LIKE :like GROUP BY name", **like)
        assert {name: int(count) for name, count in rows} == {f"{group}/{number}": 1 for number in range(COUNT)}


@pytest.mark.parametrize("base", DATABASES)
def test_blocks_that_end_their_transaction_lose_and_repeat_nothing(
    disturbed: Callable[[str], Server], base: str, effects: Path, slow_budget: SlowBudget
) -> None:
    """Rollbacks, commits, dead connections in a block: all of it happens once, or it is known as a dead letter."""
    server = disturbed(base)
    for seed in slow_budget.rounds(6, "rounds of three killed processes and ended transactions"):
        group = f"kills-{next(_groups)}"
        hammer("ending", "", server.url, effects, group, seed, server.end_connections)
        like = {"like": f"{group}/%"}
        rows = server.place.run("SELECT name, COUNT(*) FROM effects WHERE name LIKE :like GROUP BY name", **like)
        counts = {name.partition("/")[2]: int(count) for name, count in rows}
        dead = set(names(effects, group))
        for number in map(str, range(COUNT)):
            halves = [counts.get(number + half, 0) for half in "ab"]
            assert halves == [1, 1] or (number in dead and max(halves) == 1), (number, halves, dead)


@pytest.mark.parametrize("base", ["postgresql", "mysql"])
def test_no_message_reports_a_change_that_does_not_exist(
    disturbed: Callable[[str], Server], base: str, effects: Path, slow_budget: SlowBudget
) -> None:
    server = disturbed(base)
    for seed in slow_budget.rounds(6, "rounds of three killed processes and swallowed errors"):
        group = f"kills-{next(_groups)}"
        hammer("announced", "", server.url, effects, group, seed, server.end_connections)
        rows = server.place.run("SELECT name FROM effects WHERE name LIKE :like", like=f"{group}/%")
        delivered = names(effects, group)
        assert len(set(delivered)) >= COUNT
        assert set(delivered) <= {name for (name,) in rows}
