"""The contract of all stores, including those on real servers."""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import psycopg
import pytest
import redis
import sqlalchemy
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from librmq.clock import ManualClock
from librmq.dedup import DedupCounts, DedupListener
from librmq.errors import ConfigError, DedupStoreBusyError, DedupStoreError, StoreClosedError, StoreLockedError
from librmq.idempotence import _sqltables as sqltables
from librmq.idempotence._server_stores import RedisDedupStore, SqlDedupStore
from librmq.idempotence._sqltables import upgrade_tables
from librmq.idempotence._transactional_tables import purge_messages, transactional
from librmq.idempotence.outbox import Outbox, OutboxSender
from librmq.idempotence.stores import (
    Claim,
    DedupRecord,
    DedupStore,
    MemoryDedupStore,
    SqliteDedupStore,
    dedup_key,
    purge_step,
)
from librmq.listener import ReconsumeLater
from librmq.message.message import Message
from tests.conftest import in_ci
from tests.idempotence.conftest import DATABASES, STORES, Database, Place, connections, together
from tests.idempotence.servers import Absent, Server, pgbouncer
from tests.idempotence.test_listener import delivery
from tests.interrupting import at_each_call
from tests.programs import in_child, run_program

T = TypeVar("T")
NOW = 1_700_000_000_000
UNTIL = NOW + 600_000
KEPT = NOW + 72 * 3_600_000


def in_redis(place: Callable[[str], Place]) -> RedisDedupStore:
    store = place("redis").open()
    assert isinstance(store, RedisDedupStore)
    return store


# --- the contract


@pytest.mark.requirement
def test_a_key_is_claimed_once(store: DedupStore, key: str) -> None:
    assert store.claim(key, "a1", NOW, UNTIL) is Claim.NEW
    assert store.claim(key, "b1", NOW + 1, UNTIL + 1) is Claim.CONSUMING
    assert store.read(key, NOW + 1) == DedupRecord(False, "a1", UNTIL)


@pytest.mark.requirement
def test_a_finished_key_is_consumed(store: DedupStore, key: str) -> None:
    store.claim(key, "a1", NOW, UNTIL)
    assert store.finish(key, "a1", NOW + 1, KEPT)
    assert store.claim(key, "b1", NOW + 2, UNTIL) is Claim.CONSUMED
    assert store.read(key, NOW + 2) == DedupRecord(True, "a1", KEPT)


@pytest.mark.requirement
def test_a_released_key_is_new(store: DedupStore, key: str) -> None:
    store.claim(key, "a1", NOW, UNTIL)
    assert store.release(key, "a1", NOW + 1)
    assert store.read(key, NOW + 1) is None
    assert store.claim(key, "b1", NOW + 2, UNTIL) is Claim.NEW


@pytest.mark.requirement
def test_an_expired_claim_is_taken_over(store: DedupStore, key: str) -> None:
    store.claim(key, "a1", NOW, UNTIL)
    assert store.claim(key, "b1", UNTIL - 1, UNTIL + 600_000) is Claim.CONSUMING
    assert store.claim(key, "b1", UNTIL, UNTIL + 600_000) is Claim.TAKEN_OVER
    assert store.read(key, UNTIL) == DedupRecord(False, "b1", UNTIL + 600_000)
    assert store.finish(key, "b1", UNTIL + 1, KEPT)


@pytest.mark.requirement
def test_a_consumed_key_is_forgotten_when_it_expires(store: DedupStore, key: str) -> None:
    store.claim(key, "a1", NOW, UNTIL)
    store.finish(key, "a1", NOW, KEPT)
    assert store.claim(key, "b1", KEPT - 1, KEPT + 1) is Claim.CONSUMED
    assert store.read(key, KEPT) is None
    assert store.claim(key, "b1", KEPT, KEPT + 600_000) is Claim.TAKEN_OVER
    assert store.read(key, KEPT) == DedupRecord(False, "b1", KEPT + 600_000)


@pytest.mark.requirement
def test_an_expired_claim_is_neither_finished_nor_released(store: DedupStore, key: str) -> None:
    """The consumer pauses until its claim has expired, and resumes before, during or after another one's claim."""
    store.claim(key, "a1", NOW, UNTIL)
    assert not store.finish(key, "a1", UNTIL, KEPT)
    assert not store.release(key, "a1", UNTIL)

    store.claim(key, "b1", UNTIL, UNTIL + 600_000)
    assert not store.finish(key, "a1", UNTIL + 1, KEPT)
    assert not store.release(key, "a1", UNTIL + 1)
    assert store.read(key, UNTIL + 1) == DedupRecord(False, "b1", UNTIL + 600_000)

    assert store.finish(key, "b1", UNTIL + 2, KEPT)
    assert not store.finish(key, "a1", UNTIL + 3, KEPT + 5)
    assert not store.release(key, "a1", UNTIL + 3)
    assert store.read(key, UNTIL + 3) == DedupRecord(True, "b1", KEPT)


@pytest.mark.requirement
@pytest.mark.parametrize("meanwhile", ["no other", "a successor"])
def test_a_listener_paused_beyond_its_claim_fails_its_mark(
    store: DedupStore, name: str, meanwhile: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, seen = ManualClock(), []
    settings: dict[str, Any] = {"group": name, "clock": clock, "consuming_timeout": 60}
    successor = DedupListener(lambda message: seen.append("successor"), store, **settings)

    def paused(message: Any) -> None:
        clock.advance(seconds=60)
        if meanwhile == "a successor":
            successor(message)
        seen.append("paused")

    guard = DedupListener(paused, store, **settings)
    guard(delivery(1))
    assert guard.counts == DedupCounts(lost=1)
    if meanwhile == "a successor":
        assert seen == ["successor", "paused"]
        assert successor.counts == DedupCounts(consumed=1, taken_over=1)
        assert "another has consumed it too" in caplog.text
        assert successor(delivery(1)) is True  # its mark is valid
        assert successor.counts.duplicates == 1
    else:
        assert "no other consumer has taken it over" in caplog.text


@pytest.mark.requirement
def test_a_call_repeated_after_a_lost_answer_gives_the_same(store: DedupStore, key: str) -> None:
    assert store.claim(key, "a1", NOW, UNTIL) is Claim.NEW
    assert store.claim(key, "a1", NOW, UNTIL) is Claim.NEW or isinstance(store, SqlDedupStore)
    assert store.finish(key, "a1", NOW + 1, KEPT)
    assert store.finish(key, "a1", NOW + 1, KEPT)
    assert store.read(key, NOW + 1) == DedupRecord(True, "a1", KEPT)


@pytest.mark.requirement
def test_consumed_keys_are_not_released(store: DedupStore, key: str) -> None:
    store.claim(key, "a1", NOW, UNTIL)
    store.finish(key, "a1", NOW, KEPT)
    assert not store.release(key, "a1", NOW)
    assert store.claim(key, "b1", NOW, UNTIL) is Claim.CONSUMED


@pytest.mark.requirement
def test_an_unclaimed_key_cannot_be_finished(store: DedupStore, key: str) -> None:
    assert not store.finish(key, "a1", NOW, KEPT)
    assert not store.release(key, "a1", NOW)
    assert store.read(key, NOW) is None


@pytest.mark.requirement
def test_keys_differ_by_every_character(store: DedupStore, key: str) -> None:
    long = key + ":" + "x" * (255 - len(key) - 1)
    keys = [key + "A", key + "a", key + "a:", key + ".", key + "'", key + '"', key + "\\", key + "$", key + "?", long]
    keys.append(dedup_key("shop", key, "billing", "t", "größe 大 ".ljust(400)))
    keys.append(dedup_key("shop", key, "billing", "t", "größe 大 ".ljust(401)))
    for other_key in keys:
        assert store.claim(other_key, "a1", NOW, UNTIL) is Claim.NEW, other_key
    for other_key in keys:
        assert store.claim(other_key, "b1", NOW, UNTIL) is Claim.CONSUMING, other_key


@pytest.mark.requirement
def test_purging_deletes_only_expired_records(store: DedupStore, key: str) -> None:
    store.purge(KEPT, 1000)
    for number in range(5):
        store.claim(f"{key}.{number}", "a1", NOW, UNTIL + number)
    store.finish(f"{key}.0", "a1", NOW, KEPT)
    purged = store.purge(UNTIL + 3, 1000)
    assert purged == (0 if isinstance(store, RedisDedupStore) else 3)
    assert store.claim(f"{key}.0", "b1", UNTIL + 3, KEPT) is Claim.CONSUMED
    assert store.claim(f"{key}.4", "b1", UNTIL + 3, KEPT) is Claim.CONSUMING
    again = store.claim(f"{key}.1", "b1", UNTIL + 3, KEPT)
    assert again is (Claim.TAKEN_OVER if isinstance(store, RedisDedupStore) else Claim.NEW)


def test_purging_takes_slices(place: Callable[[str], Place], key: str) -> None:
    for name in ("memory", "sqlite", "sql-portable"):
        store = place(name).open()
        store.purge(KEPT * 2, 1 << 30)
        for number in range(5):
            store.claim(f"{key}.{number}", "a1", NOW, UNTIL)
        assert [store.purge(UNTIL, 2) for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", STORES)
def test_of_many_that_claim_at_the_same_time_one_gets_it(place: Callable[[str], Place], name: str, key: str) -> None:
    handles = [place(name).open() for _ in range(4)]
    for round_ in range(5):
        claims = [
            partial(handle.claim, f"{key}.{round_}", f"a{number}", NOW, UNTIL) for number, handle in enumerate(handles)
        ]
        assert sorted(together(*claims)) == [Claim.NEW, Claim.CONSUMING, Claim.CONSUMING, Claim.CONSUMING]


# --- each call is one statement or script, according to the server


@contextmanager
def asked(place: Place, store: DedupStore, made: list[sqlite3.Connection]) -> Iterator[list[str]]:
    """Collect the statements that the server logs; the list is filled at the end of the block."""
    seen: list[str] = []
    if place.name == "sqlite":
        made[-1].set_trace_callback(seen.append)
        yield seen
        made[-1].set_trace_callback(None)
        return
    assert place.server is not None
    if place.name == "redis":
        with redis.Redis.from_url(place.server.url) as client, client.monitor() as monitor:
            yield seen
            assert isinstance(store, RedisDedupStore)
            store.client.echo("the end")
            for command in monitor.listen():
                if command["client_type"] == "lua":
                    continue  # calls made by a script
                if command["command"] == "ECHO the end":
                    return
                seen.append(command["command"])
        return
    begin = place.server.log.stat().st_size
    yield seen
    with place.server.log.open(encoding="utf-8", errors="replace") as log:
        log.seek(begin)
        mark = "LOG:  " if place.name == "postgresql" else "\t"
        seen += [line.partition(mark)[2].strip() for line in log if mark in line]


@pytest.mark.parametrize("name", ["sqlite", "postgresql", "mysql", "redis"])
def test_each_call_is_one_statement_or_script(place: Callable[[str], Place], name: str, key: str) -> None:
    where = place(name)
    with connections() as made:
        store = where.open()
    store.claim(key, "a0", NOW, UNTIL)  # the store is connected, and its scripts are loaded
    store.finish(key, "a0", NOW, KEPT)
    store.release(key, "a0", NOW)
    calls: dict[str, Callable[[], object]] = {
        "new": lambda: store.claim(key + ".1", "a1", NOW, UNTIL),
        "busy": lambda: store.claim(key + ".1", "b1", NOW, UNTIL),
        "taken over": lambda: store.claim(key + ".1", "b1", UNTIL, KEPT),
        "finished": lambda: store.finish(key + ".1", "b1", UNTIL, KEPT),
        "refused": lambda: store.finish(key + ".1", "a1", UNTIL, KEPT),
        "consumed": lambda: store.claim(key + ".1", "c1", UNTIL, KEPT),
        "claimed": lambda: store.claim(key + ".2", "c1", UNTIL, KEPT),
        "released": lambda: store.release(key + ".2", "c1", UNTIL),
    }
    for what, call in calls.items():
        with asked(where, store, made) as seen:
            call()
        assert len(seen) == 1, (what, seen)
        assert key in seen[0] or "$1" in seen[0], (what, seen)


# --- keys


def test_keys_of_different_scopes_differ() -> None:
    parts = ["a", "b", "a:b", "a:", ":b", "", "a%3Ab", "A", " ", "ä", "\ud800", "a#b"]
    keys = {
        dedup_key(application, topic, group, tag, key)
        for application in parts[:6]
        for topic in parts
        for group in parts[:5]
        for tag in ("x", "x:y", None)
        for key in parts
    }
    assert len(keys) == 6 * len(parts) * 5 * 3 * len(parts)
    assert all(key.isascii() and key.isprintable() and " " not in key for key in keys)


def test_a_key_can_be_read() -> None:
    assert dedup_key("shop", "orders", "billing", "paid", "invoice/7:2") == "shop:orders:billing:paid:invoice/7:2"


def test_a_long_key_is_hashed_below_the_limit() -> None:
    short = dedup_key("shop", "orders", "billing", None, "k" * 234)
    long = dedup_key("shop", "orders", "billing", None, "k" * 235)
    assert (len(short), len(long)) == (255, 255)
    assert short.endswith("kkk")
    assert long.startswith("shop:orders:billing::kkk")
    assert "#" in long
    assert "#" not in dedup_key("shop", "orders", "billing", None, "k#" * 40)
    assert long != dedup_key("shop", "orders", "billing", None, "k" * 236)
    assert len(dedup_key("shop", "t" * 400, "billing", None, "k", limit=100)) == 100


# --- unreachable servers


def test_a_server_that_is_not_there_is_reported(key: str) -> None:
    unreachable: list[DedupStore] = [
        RedisDedupStore(redis.Redis(port=1, retry=Retry(NoBackoff(), 0))),
        SqlDedupStore("postgresql+psycopg://127.0.0.1:1/x"),
        SqlDedupStore("mysql+pymysql://127.0.0.1:1/x"),
    ]
    holder: tuple[Any, ...] = ("a1", NOW, UNTIL)
    for store in unreachable:
        for call, given in (("claim", holder), ("finish", holder), ("release", holder[:2]), ("read", holder[1:2])):
            with pytest.raises(DedupStoreError):
                getattr(store, call)(key, *given)
    with pytest.raises(DedupStoreError):
        SqlDedupStore("nothing://x")
    with pytest.raises(DedupStoreError):
        SqlDedupStore("mysql+pymysql://127.0.0.1:1/x").create()


def test_a_table_that_is_not_there_is_reported(tmp_path: Path, key: str) -> None:
    with SqlDedupStore(sqlalchemy.make_url(f"sqlite:///{tmp_path / 'x.db'}")) as store:
        with pytest.raises(DedupStoreError, match="no such table"):
            store.claim(key, "a1", NOW, UNTIL)
        with pytest.raises(DedupStoreError, match="no such table"):
            store.purge(NOW, 1)


def test_a_file_that_is_locked_is_reported(tmp_path: Path, key: str) -> None:
    path = tmp_path / "x.db"
    with SqliteDedupStore(path, timeout=0) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        calls: list[Callable[[], object]] = [
            lambda: store.claim(key, "a1", NOW, UNTIL),
            lambda: store.finish(key, "a1", NOW, UNTIL),
            lambda: store.purge(NOW, 1),
        ]
        for call in calls:
            with pytest.raises(DedupStoreError, match="locked"):
                call()
        other.execute("ROLLBACK")
        assert store.claim(key, "a1", NOW, UNTIL) is Claim.NEW


def test_a_file_that_is_not_a_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(DedupStoreError, match="not a database"):
        SqliteDedupStore(tmp_path / "x.db")
    with pytest.raises(DedupStoreError):
        SqliteDedupStore(tmp_path / "no" / "folder.db")


def test_a_foreign_value_in_redis_is_reported(place: Callable[[str], Place], key: str) -> None:
    store = in_redis(place)
    store.client.set(store.prefix + key, "mine")
    calls: list[Callable[[], object]] = [
        lambda: store.claim(key, "a1", NOW, UNTIL),
        lambda: store.finish(key, "a1", NOW, UNTIL),
        lambda: store.read(key, NOW),
    ]
    for call in calls:
        with pytest.raises(DedupStoreError, match="expected a record"):
            call()
    store.client.delete(store.prefix + key)
    store.client.lpush(store.prefix + key, "mine")
    with pytest.raises(DedupStoreError):
        store.claim(key, "a1", NOW, UNTIL)


# --- each kind of store


def test_a_closed_handle_is_reported(tmp_path: Path, key: str) -> None:
    store = SqliteDedupStore(tmp_path / "x.db")
    store.close()
    store.close()
    with pytest.raises(StoreClosedError, match="closed"):
        store.claim(key, "a1", NOW, UNTIL)


@pytest.mark.slow
@pytest.mark.skipif("not hasattr(os, 'fork')", reason="needs fork")
@pytest.mark.platform
def test_a_forked_child_does_not_hang(tmp_path: Path) -> None:
    """While other threads use the stores, a forked child gets an error from a file and can use a store in memory."""
    program = """if True:
    import os, sys, threading
    from librmq.idempotence import MemoryDedupStore, SqliteDedupStore
    from librmq.errors import StoreClosedError

    memory, file = MemoryDedupStore(), SqliteDedupStore(sys.argv[1])
    ended = threading.Event()

    def claim_all_the_time(number):
        count = 0
        while not ended.is_set():
            count += 1
            for store in (memory, file):
                store.claim(f"{number}-{count}", "a1", 1, 2)

    threads = [threading.Thread(target=claim_all_the_time, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    statuses = []
    for _ in range(20):
        child = os.fork()
        if not child:
            memory.claim("k", "b1", 1, 2)
            try:
                file.claim("k", "b1", 1, 2)
            except StoreClosedError as error:
                assert "before a fork" in str(error), error
                file.close()
                os._exit(7)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ended.set()
    sys.exit(statuses != [7] * 20)
    """
    assert run_program(program, tmp_path / "x.db").returncode == 0


def test_a_record_in_a_file_survives_its_process(tmp_path: Path, key: str) -> None:
    for durability, mode in (("async", 1), ("sync", 2)):
        path = tmp_path / f"{durability}.db"
        with connections() as made, SqliteDedupStore(path, durability=durability) as store:  # type: ignore[arg-type]
            assert made[0].execute("PRAGMA synchronous").fetchone() == (mode,)
            assert made[0].execute("PRAGMA journal_mode").fetchone() == ("wal",)
            store.claim(key, "a1", NOW, UNTIL)
            store.finish(key, "a1", NOW, KEPT)
        with SqliteDedupStore(path) as store:
            assert store.claim(key, "b1", NOW, UNTIL) is Claim.CONSUMED


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="durability"):
        SqliteDedupStore(tmp_path / "x.db", durability="maybe")  # type: ignore[arg-type]
    for table in ("", "a b", "x;y", "a.b.c", "1x", "x" * 70, 'a"b'):
        with pytest.raises(ConfigError, match="table"):
            SqliteDedupStore(tmp_path / "x.db", table=table)


def test_redis_removes_expired_records(place: Callable[[str], Place], key: str) -> None:
    """Redis waits for an extra minute, because clocks may differ; until then the time in the record decides."""
    store = in_redis(place)
    store.claim(key, "a1", NOW, UNTIL)
    assert 600_000 < store.client.pttl(store.prefix + key) <= 660_000
    store.finish(key, "a1", NOW, KEPT)
    assert 259_200_000 < store.client.pttl(store.prefix + key) <= 259_260_000
    store.client.pexpire(store.prefix + key, 1)
    while store.client.exists(store.prefix + key):
        pass
    assert store.claim(key, "b1", NOW, UNTIL) is Claim.NEW


def test_redis_that_forgot_its_scripts_gets_them_again(place: Callable[[str], Place], key: str) -> None:
    store = in_redis(place)
    store.client.script_flush()
    assert store.claim(key, "a1", NOW, UNTIL) is Claim.NEW
    store.client.script_flush()
    assert store.finish(key, "a1", NOW, KEPT)


def test_a_list_costs_redis_two_round_trips(
    place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One round trip is for all claims and one for all marks; each call stays atomic."""
    sends = []
    send: Any = redis.connection.AbstractConnection.send_packed_command

    def counted(self: Any, command: Any, check_health: bool = True) -> None:
        sends.append(command)
        send(self, command, check_health)

    store = in_redis(place)
    guard = DedupListener(
        lambda messages: None, store, group=name, key=lambda message: message.keys[0], batch=True, clock=ManualClock()
    )
    guard([delivery(98), delivery(99)])  # connected, with the scripts loaded
    monkeypatch.setattr(redis.connection.AbstractConnection, "send_packed_command", counted)
    assert guard([delivery(number) for number in range(20)]) is True
    assert len(sends) == 2
    assert guard([delivery(number) for number in range(21)]) is True
    assert len(sends) == 4
    assert guard.counts == DedupCounts(consumed=23, duplicates=20)


def test_calls_to_redis_together_are_answered_each_by_itself(place: Callable[[str], Place], key: str) -> None:
    store = in_redis(place)
    store.client.set(f"{store.prefix}{key}.x", "mine")
    store.claim(f"{key}.busy", "b1", NOW, UNTIL)
    store.client.script_flush()
    for again in range(2):  # first without the scripts, then with them
        answers = store.many(
            [
                ("claim", (f"{key}.new", "a1", NOW, UNTIL)),
                ("claim", (f"{key}.busy", "a1", NOW, UNTIL)),
                ("claim", (f"{key}.x", "a1", NOW, UNTIL)),
                ("read", (f"{key}.x", NOW)),
                ("read", (f"{key}.busy", NOW)),
                ("finish", (f"{key}.busy", "b1", NOW, KEPT)),
                ("release", (f"{key}.new", "a1", NOW)),
            ]
        )
        assert answers[:2] == [Claim.NEW, Claim.CONSUMED if again else Claim.CONSUMING]
        assert [type(answer) for answer in answers[2:4]] == [DedupStoreError, DedupStoreError]
        assert isinstance(answers[4], DedupRecord)
        assert answers[5:] == [True, True]
    unreachable = RedisDedupStore(redis.Redis(port=1, retry=Retry(NoBackoff(), 0)))
    with pytest.raises(DedupStoreError):
        unreachable.many([("claim", (key, "a1", NOW, UNTIL))])


def test_names_of_tables_and_redis_keys_can_be_chosen(place: Callable[[str], Place], tmp_path: Path, key: str) -> None:
    ours = in_redis(place)
    theirs = RedisDedupStore(ours.client, prefix="OTHER:")
    assert ours.claim(key, "a1", NOW, UNTIL) is Claim.NEW
    assert theirs.claim(key, "a1", NOW, UNTIL) is Claim.NEW
    assert ours.client.exists(f"MSGDEDUP:{key}", f"OTHER:{key}") == 2
    with SqliteDedupStore(tmp_path / "x.db") as one, SqliteDedupStore(tmp_path / "x.db", table="other") as two:
        assert one.claim(key, "a1", NOW, UNTIL) is Claim.NEW
        assert two.claim(key, "a1", NOW, UNTIL) is Claim.NEW


@pytest.mark.parametrize("name", ["postgresql", "mysql"])
def test_the_engine_of_an_application_will_do(place: Callable[[str], Place], name: str, key: str) -> None:
    """The engine commits transactions, and its pool resets connections."""
    where = place(name)
    assert where.server is not None
    engine = sqlalchemy.create_engine(where.server.url)
    store = SqlDedupStore(engine).create()
    assert store.claim(key, "a1", NOW, UNTIL) is Claim.NEW
    assert where.handle.claim(key, "b1", NOW, UNTIL) is Claim.CONSUMING
    store.close()  # does not close the engine
    assert store.finish(key, "a1", NOW, KEPT)
    with engine.connect() as connection:  # its connections still commit transactions
        connection.execute(sqlalchemy.text("UPDATE rmq_dedup SET owner = 'x' WHERE dedup_key = :key"), {"key": key})
        connection.rollback()
    assert store.read(key, NOW) == DedupRecord(True, "a1", KEPT)
    engine.dispose()


def in_use(engine: sqlalchemy.Engine) -> int:
    """Return the number of connections that the engine's pool lacks."""
    assert isinstance(engine.pool, sqlalchemy.QueuePool)
    return engine.pool.checkedout()


@pytest.mark.parametrize("name", ["sqlite", "postgresql", "mysql"])
@pytest.mark.parametrize("end", ["close", "garbage"])
def test_an_engine_gets_its_connections_back(
    database: Callable[[str], Database], name: str, end: str, key: str
) -> None:
    """A connection that commits each statement waits for the store's next call, and never for the application."""
    engine = sqlalchemy.create_engine(database(name).engine.url)
    update = sqlalchemy.text("UPDATE rmq_dedup SET owner = 'x' WHERE dedup_key = :key")
    store = SqlDedupStore(engine).create()
    assert store.claim(key, "a1", NOW, UNTIL) is Claim.NEW
    assert in_use(engine) == 1
    with engine.connect() as connection:
        connection.execute(update, {"key": key})
        connection.rollback()
    assert store.read(key, NOW) == DedupRecord(False, "a1", UNTIL)
    if end == "close":
        store.close()
    else:
        del store
        gc.collect()
    assert in_use(engine) == 0
    for _ in range(2):
        with engine.connect() as connection:
            connection.execute(update, {"key": key})
            connection.rollback()
    assert SqlDedupStore(engine).read(key, NOW) == DedupRecord(False, "a1", UNTIL)
    engine.dispose()


@pytest.mark.parametrize("why", ["small", "hook", "busy"])
def test_an_engine_with_no_connection_to_spare_gets_it_back_at_once(tmp_path: Path, why: str) -> None:
    """Neither a pool without others, nor one whose hooks prepare each use, lacks a connection between calls."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'x.db'}", pool_size=1 if why == "small" else 2)
    uses: list[object] = []
    if why == "hook":
        sqlalchemy.event.listen(engine, "checkout", lambda *those: uses.append(those))
    store = SqlDedupStore(engine).create()
    others = [engine.connect()] if why == "busy" else []
    uses.clear()
    store.claim("k", "a1", NOW, UNTIL)
    store.finish("k", "a1", NOW, KEPT)
    assert in_use(engine) == len(others)
    assert len(uses) == (2 if why == "hook" else 0)
    for connection in others:
        connection.close()
    engine.dispose()


def test_a_disposed_engine_closes_the_connection_that_waits(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    with closing(SqlDedupStore(engine).create()) as store:
        store.claim("k", "a1", NOW, UNTIL)
        closed: list[object] = []
        sqlalchemy.event.listen(engine, "close", lambda *those: closed.append(those))
        engine.dispose()
        assert len(closed) == 1
        assert store.finish("k", "a1", NOW, KEPT)
        assert in_use(engine) == 1
    engine.dispose()


@pytest.mark.skipif("not hasattr(os, 'fork')", reason="needs fork")
@pytest.mark.parametrize("name", ["postgresql", "mysql"])
def test_a_forked_child_leaves_the_sessions_of_its_parent_alone(
    place: Callable[[str], Place], name: str, key: str
) -> None:
    """The child disposes of the engine as SQLAlchemy's manual says, and the store takes a connection of its own."""
    server = place(name).server
    assert server is not None
    engine = sqlalchemy.create_engine(server.url)
    sessions: list[object] = []
    sqlalchemy.event.listen(engine, "connect", lambda *those: sessions.append(those))
    with closing(SqlDedupStore(engine).create()) as store:
        assert store.claim(key, "a1", NOW, UNTIL) is Claim.NEW

        def claim_in_child() -> None:
            engine.dispose(close=False)
            assert store.claim(key, "b1", NOW, UNTIL) is Claim.CONSUMING

        in_child(claim_in_child)
        assert store.finish(key, "a1", NOW, KEPT)
        assert store.read(key, NOW) == DedupRecord(True, "a1", KEPT)
        assert len(sessions) == 1
    engine.dispose()


# --- what is no outage


class Opened:
    """A store on its own connections, which can be ended at the server; ``connect`` options go into its URL."""

    def __init__(self, place: Place, has_engine: bool, **options: Any) -> None:
        assert place.server is not None
        place.handle  # noqa: B018 (makes the table)
        self.kind = place.name
        self.others = sqlalchemy.create_engine(place.server.url)
        url = sqlalchemy.make_url(place.server.url).update_query_dict(options)
        self.store = SqlDedupStore(
            sqlalchemy.create_engine(url) if has_engine else url.render_as_string(hide_password=False)
        )
        self.connections: dict[int, Any] = {}
        sqlalchemy.event.listen(self.store.engine, "connect", self._note)

    def _note(self, driver: Any, _: object) -> None:
        self.connections[driver.info.backend_pid if self.kind == "postgresql" else driver.thread_id()] = driver

    def kill(self) -> None:
        """End all connections of the store at the server, as its restart, or a limit of idle time, does."""
        kill = "SELECT pg_terminate_backend({})" if self.kind == "postgresql" else "KILL {}"
        with self.others.connect() as connection:
            for number in self.connections:
                with suppress(sqlalchemy.exc.OperationalError):  # an earlier one, which has ended
                    connection.execute(sqlalchemy.text(kill.format(number)))
        self.connections.clear()

    def waits(self) -> bool:
        """Return whether a statement waits for a lock."""
        with self.others.connect() as connection:
            waiting = "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            return bool(connection.execute(sqlalchemy.text(waiting)).scalar())

    def close(self) -> None:
        self.store.close()
        self.store.engine.dispose()
        self.others.dispose()


@pytest.mark.parametrize("has_engine", [False, True])
@pytest.mark.parametrize("name", ["postgresql", "mysql"])
def test_dead_connections_are_replaced(place: Callable[[str], Place], name: str, has_engine: bool, key: str) -> None:
    """Whatever call comes next, and however many connections have died, the store answers."""
    numbers = range(4)
    with closing(Opened(place(name), has_engine)) as opened:
        store, keys = opened.store, [f"{key}.{number}" for number in numbers]

        def on_all(call: Callable[[str], T]) -> list[T]:
            return together(*[partial(call, key) for key in keys])

        assert on_all(lambda key: store.claim(key, "a1", NOW, UNTIL)) == [Claim.NEW] * 4
        opened.kill()
        assert on_all(lambda key: store.finish(key, "a1", NOW, KEPT)) == [True] * 4
        opened.kill()
        assert on_all(lambda key: store.claim(key, "b1", NOW, UNTIL)) == [Claim.CONSUMED] * 4
        opened.kill()
        assert store.read(keys[0], NOW) == DedupRecord(True, "a1", KEPT)
        opened.kill()
        assert store.purge(0, 10) == 0


@pytest.mark.parametrize("has_engine", [False, True])
def test_a_dead_connection_that_its_driver_calls_open_is_replaced(
    place: Callable[[str], Place], monkeypatch: pytest.MonkeyPatch, has_engine: bool, key: str
) -> None:
    def execute(*_: object, **__: object) -> None:
        monkeypatch.undo()
        raise psycopg.OperationalError("connection socket closed")

    with closing(Opened(place("postgresql"), has_engine)) as opened:
        assert opened.store.claim(key, "a1", NOW, UNTIL) is Claim.NEW
        monkeypatch.setattr(psycopg.Cursor, "execute", execute)
        assert opened.store.finish(key, "a1", NOW, KEPT)


def test_a_connection_that_ends_as_it_is_set_up_is_no_outage(place: Callable[[str], Place], key: str) -> None:
    ends = [psycopg.errors.AdminShutdown("terminating connection due to administrator command")]

    def end_the_first(*_: object) -> None:
        if ends:
            raise ends.pop()

    with closing(Opened(place("postgresql"), has_engine=True)) as opened:
        opened.store.engine.dispose()
        sqlalchemy.event.listen(opened.store.engine, "connect", end_the_first)
        assert opened.store.claim(key, "a1", NOW, UNTIL) is Claim.NEW
        assert not ends


@pytest.mark.slow
@pytest.mark.parametrize("has_engine", [False, True])
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_conflict_is_no_outage(place: Callable[[str], Place], isolation: str, has_engine: bool, key: str) -> None:
    """Two consumers claim a key at the same moment, in a database whose transactions are isolated by default."""
    options = f"-c default_transaction_isolation={isolation.replace(' ', chr(92) + ' ')}"
    with closing(Opened(place("postgresql"), has_engine, options=options)) as opened:
        insert = sqlalchemy.text("INSERT INTO rmq_dedup VALUES (:key, 0, 'b1', 1, :until)")
        with opened.others.connect() as other:
            other.execute(insert, {"key": key, "until": UNTIL})
            with ThreadPoolExecutor(1) as pool:
                claim = pool.submit(opened.store.claim, key, "a1", NOW, UNTIL)
                while not opened.waits():
                    pass
                other.commit()
                assert claim.result() is Claim.CONSUMING
        keys = [f"{key}.{number}" for number in range(20)]

        def claim_all(owner: str) -> list[Claim]:
            return [opened.store.claim(key, owner, NOW, UNTIL) for key in keys]

        claims = together(*[partial(claim_all, f"a{number}") for number in range(4)])
        assert [sum(claim is Claim.NEW for claim in those) for those in zip(*claims, strict=True)] == [1] * 20


@pytest.mark.slow
def test_a_time_limit_of_statements_is_no_outage(place: Callable[[str], Place], key: str) -> None:
    """While another transaction holds the record, a message is delivered again later, not consumed without a claim."""
    seen: list[object] = []
    with closing(Opened(place("postgresql"), False, options="-c statement_timeout=2000")) as opened:
        guard = DedupListener(seen.append, opened.store, group=key, clock=ManualClock())
        name = dedup_key("", "orders", key, "paid", "ID1")
        with opened.others.connect() as other:
            other.execute(sqlalchemy.text("INSERT INTO rmq_dedup VALUES (:key, 0, 'b1', 1, 9)"), {"key": name})
            with pytest.raises(ReconsumeLater, match="statement timeout") as raised:
                guard(delivery(1))
        assert isinstance(raised.value.__cause__, DedupStoreBusyError)
        assert (seen, guard.counts) == ([], DedupCounts(postponed=1))
        guard(delivery(1))
        assert guard.counts == DedupCounts(postponed=1, consumed=1)


def test_a_locked_file_is_no_outage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.db"
    seen: list[object] = []
    with SqliteDedupStore(path, timeout=0) as store, closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        guard = DedupListener(seen.append, store, group="billing", clock=ManualClock())
        with pytest.raises(ReconsumeLater, match="locked"):
            guard(delivery(1))
        assert (seen, guard.counts) == ([], DedupCounts(postponed=1))
        assert "delivered again later, because the dedup store failed" in caplog.text


def test_a_pooler_without_prepared_statements_is_no_outage(place: Callable[[str], Place], key: str) -> None:
    """A server that lacks statements that the driver has prepared, as behind pgbouncer, costs no claim."""
    with closing(Opened(place("postgresql"), False)) as opened:
        for number in range(10):
            opened.store.claim(f"{key}.{number}", "a1", NOW, UNTIL)
        for driver in [driver for driver in opened.connections.values() if not driver.closed]:
            driver.execute("DEALLOCATE ALL")
        assert opened.store.claim(f"{key}.10", "a1", NOW, UNTIL) is Claim.NEW


def test_a_table_that_is_missing_on_a_server_is_not_tried_for_long(place: Callable[[str], Place], key: str) -> None:
    where = place("postgresql")
    assert where.server is not None
    with SqlDedupStore(where.server.url, table="nowhere") as store, pytest.raises(DedupStoreError) as raised:
        store.claim(key, "a1", NOW, UNTIL)
    assert not isinstance(raised.value, DedupStoreBusyError)


def test_redis_that_was_restarted_is_no_outage(place: Callable[[str], Place], key: str) -> None:
    """A client that does not retry by itself, as before version 6."""
    server = place("redis").server
    assert server is not None
    with closing(redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0))) as client:
        store = RedisDedupStore(client)
        client_id = client.client_id()
        assert store.claim(key, "a1", NOW, UNTIL) is Claim.NEW
        connection: Any = client.connection_pool.get_connection()
        connection.can_read = lambda *_, **__: False  # the end of the connection has not arrived yet
        client.connection_pool.release(connection)
        in_redis(place).client.client_kill_filter(_id=str(client_id))
        assert store.finish(key, "a1", NOW, KEPT)


def test_clients_for_asyncio_are_refused() -> None:
    import redis.asyncio

    with pytest.raises(ConfigError, match=r"expected one that waits, redis.Redis, found redis.asyncio"):
        RedisDedupStore(redis.asyncio.Redis())  # type: ignore[arg-type]
    for url in ("sqlite+aiosqlite:///x.db", "postgresql+psycopg_async://x@y/z"):
        with pytest.raises(ConfigError, match="which needs an event loop"):
            SqlDedupStore(url)
    with pytest.raises(ConfigError, match="which needs an event loop"):
        SqlDedupStore(create_async_engine("sqlite+aiosqlite:///x.db"))  # type: ignore[arg-type]


def test_names_that_need_extras_can_be_imported_without() -> None:
    program = """if True:
    import sys
    sys.modules |= dict.fromkeys(["pybloom_live", "redis", "sqlalchemy"])
    from librmq.idempotence import *
    from librmq.errors import MissingExtraError
    for make in (SeenKeys, lambda: RedisDedupStore(None), lambda: SqlDedupStore("sqlite://")):
        try:
            make()
        except MissingExtraError as error:
            print(error.extra)
    """
    assert run_program(program).stdout.split() == ["bloom", "redis", "sql"]


def test_a_memory_store_forgets_released_keys(key: str) -> None:
    store = MemoryDedupStore()
    store.claim(key, "a1", NOW, UNTIL)
    assert len(store) == 1
    store.release(key, "a1", NOW)
    assert len(store) == 0
    assert store.purge(UNTIL, 10) == 0


# --- purging by the clock


def test_purging_is_due_every_minute_or_while_there_is_more() -> None:
    store = MemoryDedupStore()
    for number in range(1500):
        store.claim(f"k{number}", "a1", NOW, UNTIL)
    run_due = purge_step(store)
    assert run_due(NOW) == NOW + 60_000
    assert len(store) == 1500
    assert run_due(UNTIL) == UNTIL
    assert len(store) == 500
    assert run_due(UNTIL) == UNTIL + 60_000
    assert len(store) == 0


def test_a_store_that_can_not_be_purged_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    run_due = purge_step(SqlDedupStore("postgresql+psycopg://127.0.0.1:1/x"), every=5)
    assert run_due(NOW) == NOW + 5_000
    assert "could not be purged" in caplog.text


@pytest.mark.parametrize("base", DATABASES)
def test_old_records_of_messages_are_deleted_in_slices(database: Callable[[str], Database], base: str) -> None:
    """More than one slice of a thousand goes, and nothing that is still kept."""
    place = database(base)
    place.run("DELETE FROM rmq_messages")
    with place.engine.begin() as connection:
        insert = sqlalchemy.text("INSERT INTO rmq_messages VALUES (:key, :until)")
        connection.execute(insert, [{"key": f"k{number}", "until": number} for number in range(2_500)])
    assert purge_messages(place.engine, 2_199) == 2_200
    with closing(place.connect()) as connection:
        assert purge_messages(connection, 2_499) == 300
    assert place.run("SELECT COUNT(*) FROM rmq_messages") == [(0,)]


# --- schema


@pytest.fixture(params=DATABASES)
def engine(
    request: pytest.FixtureRequest, place: Callable[[str], Place], tmp_path: Path
) -> Iterator[sqlalchemy.Engine]:
    server = place(request.param).server
    engine = sqlalchemy.create_engine(server.url if server else f"sqlite:///{tmp_path / 'x.db'}")
    yield engine
    engine.dispose()


def test_tables_are_made_once(engine: sqlalchemy.Engine) -> None:
    names = {"dedup": "d1", "messages": "m1", "transactions": "t1", "outbox": "o1", "versions": "v1"}
    assert upgrade_tables(engine, **names) == {"d1": 1, "m1": 1, "t1": 1, "o1": 1}
    assert upgrade_tables(engine, **names) == {"d1": 1, "m1": 1, "t1": 1, "o1": 1}


@pytest.mark.parametrize("shared", [{"outbox": "D5"}, {"versions": "d5"}])
def test_tables_that_differ_only_in_case_are_refused(engine: sqlalchemy.Engine, shared: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="table d5: expected a name of its own"):
        upgrade_tables(engine, dedup="d5", **shared)


def test_tables_of_two_calls_may_differ_in_case_and_be_long(engine: sqlalchemy.Engine) -> None:
    long = "t" * 62
    names: Any = {"messages": None, "transactions": None, "versions": "v6"}
    for dedup, outbox in (("D6", long), ("d6", None)):
        made = {name: 1 for name in (dedup, outbox) if name}
        assert upgrade_tables(engine, dedup=dedup, outbox=outbox, **names) == made
    assert len(sqlalchemy.inspect(engine).get_indexes(long)) == 2


def test_tables_may_be_in_another_file_of_sqlite() -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("ATTACH ':memory:' AS queue")
    names = {"dedup": "queue.d", "messages": "queue.m", "transactions": "queue.t", "outbox": "queue.o"}
    for _ in range(2):
        assert set(upgrade_tables(connection, **names, versions="queue.v")) == set(names.values())
    indexes = connection.execute("SELECT name FROM queue.sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
    assert {row[0] for row in indexes} == {"d_expires", "m_expires", "t_expires", "o_due", "o_order"}
    connection.close()


ADDED: Final = {"": ["ALTER TABLE {table} ADD COLUMN note VARCHAR(10)"]}


def test_tables_say_the_oldest_librmq_that_may_use_them(
    engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer librmq adds a column, which an older one does not need, and then changes what rows mean."""
    names: Any = {"dedup": None, "messages": "m3", "transactions": None, "outbox": "o3", "versions": "v3"}
    upgrade_tables(engine, **names)
    with monkeypatch.context() as newer:
        newer.setitem(sqltables.VERSIONS, "messages", [*sqltables.VERSIONS["messages"], ADDED])
        assert upgrade_tables(engine, **names) == {"m3": 2, "o3": 1}
    for expected in (True, False):
        assert upgrade_tables(engine, **names) == {"m3": 2, "o3": 1}
        with (
            engine.connect() as connection,
            transactional(connection, Message("orders", b"x", keys="k"), group="b", key=by_keys, table="m3") as first,
        ):
            assert first is expected
    with monkeypatch.context() as newer:
        newer.setitem(sqltables.VERSIONS, "messages", [*sqltables.VERSIONS["messages"], ADDED, {"": []}])
        newer.setitem(sqltables.OLDEST, "messages", 3)
        assert upgrade_tables(engine, **names) == {"m3": 3, "o3": 1}
    with pytest.raises(
        ConfigError, match="table m3: only a librmq that knows its version 3 may use it, this one knows 1"
    ):
        upgrade_tables(engine, **names)


def by_keys(message: Message) -> str:
    return message.properties["KEYS"]


@pytest.mark.slow
def test_tables_are_brought_up_to_date_by_one_of_many(
    engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes may create the schema at the same time; a later version is reached from the present one."""
    names = {"dedup": "d2", "messages": "m2", "transactions": "t2", "outbox": "o2", "versions": "v2"}

    def all_start() -> None:
        together(*[partial(upgrade_tables, engine, **names)] * 3)

    all_start()
    with SqlDedupStore(str(engine.url), table="d2") as store:
        store.claim("k", "a1", NOW, UNTIL)
    monkeypatch.setitem(sqltables.VERSIONS, "dedup", [*sqltables.VERSIONS["dedup"], ADDED])
    all_start()
    assert upgrade_tables(engine, **names) == {"d2": 2, "m2": 1, "t2": 1, "o2": 1}
    with engine.connect() as connection:
        rows = connection.execute(sqlalchemy.text("SELECT dedup_key, note FROM d2")).all()
        assert [tuple(row) for row in rows] == [("k", None)]


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_an_upgrade_that_waits_for_another_names_it(
    place: Callable[[str], Place], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other may be a session whose process hangs."""
    server = place(kind).server
    assert server is not None
    engine = sqlalchemy.create_engine(server.url)
    monkeypatch.setattr(sqltables, "LOCK_WAIT_S", 0.01 if kind == "postgresql" else 0)
    take, session = {
        "postgresql": ("SELECT pg_advisory_lock(8206115107)", "SELECT pg_backend_pid()"),
        "mysql": ("SELECT GET_LOCK('rmq_tables', 0)", "SELECT CONNECTION_ID()"),
    }[kind]
    with engine.connect() as other:
        number = other.execute(sqlalchemy.text(session)).scalar()
        other.execute(sqlalchemy.text(take))
        with pytest.raises(StoreLockedError, match=rf"another upgrade has had the lock .*: session {number} \("):
            upgrade_tables(engine)
        other.invalidate()
    while True:  # until the server has noticed the end of the other session
        with suppress(StoreLockedError):
            assert upgrade_tables(engine)["rmq_dedup"] == 1
            break
    engine.dispose()


@pytest.mark.slow
def test_a_pooler_of_transactions_before_postgresql(server: Callable[[str], Server], key: str) -> None:
    """Behind pgbouncer several processes start at once, again and again; then guards and senders do their work."""
    behind = server("postgresql")
    with ExitStack() as stack:
        try:
            pooler = stack.enter_context(pgbouncer(behind))
        except Absent as error:
            if in_ci():
                raise
            pytest.skip(str(error))
        engines = [sqlalchemy.create_engine(pooler.url, connect_args={"prepare_threshold": None}) for _ in range(4)]
        direct = sqlalchemy.create_engine(behind.url)
        stores = [stack.enter_context(SqlDedupStore(pooler.url)) for _ in range(2)]  # psycopg prepares their statements
        for engine in [*engines, direct]:
            stack.callback(engine.dispose)
        for round_ in range(3):
            name = f"bounced_{round_}"
            together(*[partial(upgrade_tables, engine, outbox=name, versions="bounced") for engine in engines])
        with direct.connect() as connection:
            locks = "SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory'"
            assert connection.execute(sqlalchemy.text(locks)).scalar() == 0
        for number in range(30):
            claims = [store.claim(f"{key}.{number}", f"a{at}", NOW, UNTIL) for at, store in enumerate(stores)]
            assert claims == [Claim.NEW, Claim.CONSUMING]
            assert stores[0].finish(f"{key}.{number}", "a0", NOW, KEPT)
        with engines[0].begin() as connection:
            for _ in range(30):
                Outbox(table=name).add(connection, Message("orders", b"x"), order_key="a")
        sent: list[Message] = []

        class Sink:
            def send(self, message: Message) -> None:
                sent.append(message)

        OutboxSender(sqlalchemy.create_engine(pooler.url, poolclass=NullPool), Sink(), table=name).run_due(NOW)
        assert len(sent) == 30


# --- signals


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("call", ["claim", "finish", "release", "purge"])
def test_an_interrupted_call_leaves_a_whole_record(tmp_path: Path, kind: str, call: str) -> None:
    """No partial record and no lock is left, and the error of the signal handler is raised."""
    kept: list[BaseException] = []
    came, number = True, 0
    while came:
        path = tmp_path / str(number)
        store: Any = MemoryDedupStore() if kind == "memory" else SqliteDedupStore(path)
        other = store if kind == "memory" else SqliteDedupStore(path, timeout=0.05)
        store.claim("k", "a", NOW, UNTIL)

        def act(store: Any = store) -> None:
            arguments = {"claim": ("k", "b", UNTIL, KEPT), "finish": ("k", "a", NOW, KEPT), "release": ("k", "a", NOW)}
            try:
                getattr(store, call)(*arguments.get(call, (UNTIL, 10)))
            except BaseException as error:
                kept.append(error)
                raise

        came = next(at_each_call(act, first=number))
        after = other.read("k", NOW)
        assert after in (
            DedupRecord(False, "a", UNTIL),
            {"claim": DedupRecord(False, "b", KEPT), "finish": DedupRecord(True, "a", KEPT)}.get(call),
        )
        assert other.claim("k", "c", KEPT, KEPT + 9) is (Claim.TAKEN_OVER if after else Claim.NEW)
        assert other.purge(KEPT, 10) == 0, "the expiry of a record that is gone takes the new one along"
        assert other.read("k", KEPT) == DedupRecord(False, "c", KEPT + 9)
        if kind == "sqlite":
            store.close()
            other.close()
        number += 1
    assert number > 3


def test_the_repr_of_a_store_in_memory_counts_its_keys() -> None:
    store = MemoryDedupStore()
    for key in ("a", "b", "c"):
        store.claim(key, "o", 0, 10)
    store.finish("a", "o", 0, 10)
    assert repr(store) == "<MemoryDedupStore: 1 keys consumed, 2 being consumed>"
