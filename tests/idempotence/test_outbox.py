"""The outbox: committed messages are sent at least once, by one sender at a time, in order if requested."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

from librmq.clock import ManualClock
from librmq.errors import ClientStateError, ConfigError, MessageIllegalError
from librmq.idempotence._sqltables import upgrade_tables
from librmq.idempotence.outbox import Outbox, OutboxSender
from librmq.message.message import Message
from librmq.protocol import SendStatus
from tests.budget import many
from tests.idempotence.conftest import DATABASES, DRIVERS, Database, together


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"
    id: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int]


class Result:
    def __init__(self, status: object) -> None:
        self.status = status


class Recorder:
    """A producer that records its sends; ``then`` is called after each send and returns its status."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.then: Callable[[Message], object] = lambda message: SendStatus.SEND_OK

    def send(self, message: Message) -> Result:
        self.sent.append(message)
        return Result(self.then(message))

    @property
    def bodies(self) -> list[str]:
        return [message.body.decode() for message in self.sent]


class Post:
    """A separate outbox in a database, with a clock and a sender."""

    def __init__(self, place: Database, table: str) -> None:
        self.engine = place.engine
        self.place = place
        self.table = table
        self.clock = ManualClock()
        self.outbox = Outbox(table=table, clock=self.clock)
        self.producer = Recorder()
        upgrade_tables(self.engine, dedup=None, messages=None, transactions=None, outbox=table)

    def add(self, *bodies: str, order_key: str | None = None) -> None:
        with self.engine.begin() as connection:
            for body in bodies:
                self.outbox.add(connection, Message("orders", body.encode()), order_key=order_key)

    def sender(self, producer: object = None, **settings: Any) -> OutboxSender:
        settings = {"table": self.table, "clock": self.clock, "claim_timeout": 60, **settings}
        return OutboxSender(self.engine, producer or self.producer, **settings)  # type: ignore[arg-type]

    def run(self, sender: OutboxSender) -> int:
        return sender.run_due(self.clock.now_ms()) - self.clock.now_ms()

    def second_sender_meanwhile(self) -> Recorder:
        """Let another sender run during each send of the first one; return the other's producer."""
        second = Recorder()
        other = self.sender(second)

        def meanwhile(message: Message) -> object:
            self.run(other)
            return SendStatus.SEND_OK

        self.producer.then = meanwhile
        return second

    def rows(self, state: int) -> int:
        return int(self.place.run(f"SELECT COUNT(*) FROM {self.table} WHERE state = {state}")[0][0])


@pytest.fixture(params=DATABASES)
def post(request: pytest.FixtureRequest, database: Callable[[str], Database], name: str) -> Post:
    return Post(database(request.param), "box_" + name.replace("-", "_"))


@pytest.fixture
def embedded(database: Callable[[str], Database], name: str) -> Post:
    """SQLite only, for tests that do not depend on the database."""
    return Post(database("sqlite"), "box_" + name.replace("-", "_"))


# --- adding messages


def test_only_committed_messages_are_sent(post: Post, name: str) -> None:
    sender = post.sender()
    with Session(post.engine) as session:
        session.execute(sqlalchemy.text("INSERT INTO effects (name) VALUES (:name)"), {"name": name})
        post.outbox.add(session, Message("orders", b"kept"))
        assert post.run(post.sender()) == 1000  # no message yet, so it looks again after a second
        session.commit()
        post.outbox.add(session, Message("orders", b"undone"))
        session.rollback()
    with closing(post.place.connect()) as connection:
        post.outbox.add(connection, Message("orders", b"plain"))
        connection.commit()
        post.outbox.add(connection, Message("orders", b"plain, undone"))
        connection.rollback()
    post.run(sender)
    assert post.producer.bodies == ["kept", "plain"]
    post.run(sender)
    assert post.producer.bodies == ["kept", "plain"]
    assert (sender.sent, sender.failed, sender.lost) == (2, 0, 0)
    assert (post.rows(0), post.rows(1)) == (0, 2)


def test_a_message_arrives_as_it_was_added(post: Post) -> None:
    message = Message(
        "orders", bytes(range(256)) * 300, tags="paid", keys=["a", "b"], delay_level=3, flag=-7,
        properties={"größe": "大 \U0001f600", "quote": "it's \"%s\" :name \\"},
    )  # fmt: skip
    with post.engine.begin() as connection:
        post.outbox.add(connection, message)
    assert len(message.properties["UNIQ_KEY"]) == 32
    post.run(post.sender())
    assert post.producer.sent == [message]
    assert list(post.producer.sent[0].properties) == list(message.properties)


def test_a_sender_runs_at_a_whole_number(embedded: Post) -> None:
    with pytest.raises(TypeError, match="now_ms: expected milliseconds since 1970, a whole number, found 'x'"):
        embedded.sender().run_due("x")  # type: ignore[arg-type]


def test_a_unique_id_is_kept(embedded: Post) -> None:
    with embedded.engine.begin() as connection:
        embedded.outbox.add(connection, Message("orders", b"one", unique_key="MINE"))
    embedded.run(embedded.sender())
    assert embedded.producer.sent[0].properties["UNIQ_KEY"] == "MINE"


@pytest.mark.parametrize("is_scoped", [False, True])
def test_adding_to_an_async_session(embedded: Post, is_scoped: bool) -> None:
    """With an order key too, the second message of a key waits for the first."""
    refused = {"kept"}
    embedded.producer.then = lambda message: (
        SendStatus.FLUSH_DISK_TIMEOUT if message.body.decode() in refused else SendStatus.SEND_OK
    )

    async def add() -> None:
        engine = create_async_engine(embedded.engine.url.set(drivername="sqlite+aiosqlite"), poolclass=NullPool)
        registry = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        async with registry() if is_scoped else AsyncSession(engine) as session:
            given = registry if is_scoped else session
            await embedded.outbox.add_async(given, Message("orders", b"kept"), order_key="a")
            await embedded.outbox.add_async(given, Message("orders", b"second"), order_key="a")
            await session.commit()
            await embedded.outbox.add_async(given, Message("orders", b"undone"))
        await engine.dispose()

    asyncio.run(add())
    embedded.run(embedded.sender())
    assert embedded.producer.bodies == ["kept"]
    refused.clear()
    embedded.clock.advance(seconds=1)
    embedded.run(embedded.sender())
    assert embedded.producer.bodies == ["kept", "kept", "second"]


@pytest.mark.parametrize(
    ("topic", "size"),
    [("", 1), ("a b", 1), ("t" * 128, 1), ("SCHEDULE_TOPIC_XXXX", 1), ("orders", 0), ("orders", (4 << 20) + 1)],
)
def test_messages_that_no_broker_accepts_are_refused(embedded: Post, topic: str, size: int) -> None:
    message = Message(topic, bytes(size))
    with embedded.engine.begin() as connection, pytest.raises(MessageIllegalError):
        embedded.outbox.add(connection, message)
    assert embedded.rows(0) == 0


@pytest.mark.parametrize("value", ["x" * 40_000, "\ud800"])
def test_properties_that_no_record_holds_are_refused(embedded: Post, value: str) -> None:
    message = Message("orders", b"one", properties={"note": value})
    with embedded.engine.begin() as connection, pytest.raises(MessageIllegalError, match="propert"):
        embedded.outbox.add(connection, message)
    assert embedded.rows(0) == 0


def test_a_delay_counts_from_the_send(embedded: Post) -> None:
    """A delivery time is kept as it is, also in a row that is sent late."""
    at = datetime(2030, 1, 1, tzinfo=UTC)
    with embedded.engine.begin() as connection:
        embedded.outbox.add(connection, Message("orders", b"one", delay=timedelta(minutes=30)))
        embedded.outbox.add(connection, Message("orders", b"two", deliver_at=at))
    embedded.clock.advance(hours=1)
    embedded.run(embedded.sender())
    first, second = embedded.producer.sent
    assert (first.delay_s, first.deliver_at_ms) == (1800, None)
    assert (second.delay_s, second.deliver_at_ms) == (None, round(at.timestamp() * 1000))
    assert first.properties.keys() == second.properties.keys() == {"UNIQ_KEY"}


@pytest.mark.parametrize("order_key", ["", "k" * 256, "k\0", "k\ud83d", b"k", 7])
def test_an_order_key_is_text_that_every_database_takes(embedded: Post, order_key: Any) -> None:
    with embedded.engine.begin() as connection, pytest.raises(MessageIllegalError, match="order key"):
        embedded.outbox.add(connection, Message("orders", b"one"), order_key=order_key)


def test_an_order_key_and_a_priority_both_name_a_queue(embedded: Post) -> None:
    with embedded.engine.begin() as connection, pytest.raises(MessageIllegalError, match="has a priority"):
        embedded.outbox.add(connection, Message("orders", b"one", priority=1), order_key="a")


# --- at least once


@many
@pytest.mark.parametrize("refusal", ["timeout", "status", "not ok"])
def test_it_is_sent_until_it_is_taken(post: Post, refusal: str, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(message: Message) -> object:
        if refusal == "timeout":
            raise TimeoutError("no answer")
        return SendStatus.FLUSH_DISK_TIMEOUT if refusal == "status" else "NOT_OK"

    post.producer.then = refuse
    post.add("one")
    sender = post.sender()
    waits = []
    for _ in range(8):
        before = len(post.producer.sent)
        seconds = 0
        while len(post.producer.sent) == before:
            post.run(sender)
            post.clock.advance(seconds=1)
            seconds += 1
        waits.append(seconds)
    assert waits == [1, 1, 2, 4, 8, 16, 32, 60]  # the first attempt is immediate
    assert sender.failed == 8
    assert "row 1 to orders was not sent, attempt 1:" in caplog.text
    post.producer.then = lambda message: SendStatus.SEND_OK
    post.clock.advance(seconds=60)
    post.run(sender)
    assert (sender.sent, post.rows(0)) == (1, 0)
    assert len({message.properties["UNIQ_KEY"] for message in post.producer.sent}) == 1


def test_a_cause_is_logged_once_a_day_for_each_row(embedded: Post, caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: Message) -> object:
        raise TimeoutError(f"no answer after {len(embedded.producer.sent)} ms")

    def rows_logged() -> list[str]:
        """Let the sender try several times; return the rows that it has warned about."""
        caplog.clear()
        for _ in range(5):
            embedded.run(sender)
            embedded.clock.advance(minutes=1)
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        return [str(record.__dict__["rmq_row"]) for record in warnings]

    embedded.add("one", "two")
    embedded.producer.then, sender = fail, embedded.sender()
    assert rows_logged() == ["1", "2"]
    assert rows_logged() == []
    assert sender.failed > 10
    embedded.producer.then = lambda message: SendStatus.FLUSH_DISK_TIMEOUT
    assert rows_logged() == ["1", "2"]
    embedded.clock.advance(days=1)
    assert rows_logged() == ["1", "2"]


def test_a_sender_that_dies_after_sending_leaves_it_to_another(post: Post) -> None:
    def die(message: Message) -> object:
        raise SystemExit

    post.producer.then = die
    post.add("one", "two")
    with pytest.raises(SystemExit):
        post.run(post.sender())
    post.producer.then = lambda message: SendStatus.SEND_OK
    other = post.sender()
    post.run(other)
    assert post.producer.bodies == ["one"]  # the first sender has claimed both
    post.clock.advance(ms=59_999)
    post.run(other)
    assert post.producer.bodies == ["one"]
    post.clock.advance(ms=1)
    post.run(other)
    assert post.producer.bodies == ["one", "one", "two"]
    assert post.producer.sent[0] == post.producer.sent[1]  # including its unique id
    assert other.sent == 2


def test_rows_of_a_tenth_of_a_second_are_marked_together(post: Post) -> None:
    """A sender that dies repeats what it has sent since; a slow producer's rows are marked one by one."""
    post.add(*"abcdefg")

    def send(message: Message) -> object:
        if message.body == b"f":
            raise SystemExit
        post.clock.advance(ms=60)
        return SendStatus.SEND_OK

    post.producer.then = send
    sender = post.sender()
    with pytest.raises(SystemExit):
        post.run(sender)
    assert sender.sent == 5  # What was sent is marked on the way out; a kill would leave the last one unmarked.
    states = post.place.run(f"SELECT state, due_timestamp_ms FROM {post.table} ORDER BY id")
    assert [state for state, _ in states] == [1, 1, 1, 1, 1, 0, 0]
    assert len({due_ms for state, due_ms in states if state}) == 2


def test_a_sender_that_slept_through_its_claim_says_so(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    other = post.sender()

    def sleep(message: Message) -> object:
        post.producer.then = lambda message: SendStatus.SEND_OK
        post.clock.advance(seconds=60)
        post.run(other)
        return SendStatus.SEND_OK

    post.producer.then = sleep
    post.add("one", "two")
    sender = post.sender()
    post.run(sender)
    assert post.producer.bodies == ["one", "one", "two"]  # and the other sender sends what the first had not begun
    assert (sender.sent, sender.lost, other.sent) == (0, 1, 2)
    assert "row 1 was sent after its claim had expired" in caplog.text


# --- several senders


@pytest.mark.slow
def test_nothing_is_claimed_twice(post: Post) -> None:
    second = post.second_sender_meanwhile()
    post.add(*map(str, range(150)))
    post.run(post.sender())
    assert sorted(map(int, post.producer.bodies + second.bodies)) == list(range(150))
    assert second.bodies == list(map(str, range(100, 150)))  # none of the first hundred


@pytest.mark.slow
def test_of_senders_that_saw_the_same_rows_one_gets_each(post: Post) -> None:
    post.add(*map(str, range(40)))
    producers = [Recorder() for _ in range(3)]
    senders = [post.sender(producer) for producer in producers]

    def run(sender: OutboxSender) -> None:
        for _ in range(20):
            post.run(sender)

    together(*[partial(run, sender) for sender in senders])
    assert sorted(int(body) for producer in producers for body in producer.bodies) == list(range(40))
    assert sum(sender.sent for sender in senders) == 40


# --- order


def test_rows_go_in_the_order_in_which_they_were_added(embedded: Post) -> None:
    embedded.add(*map(str, range(250)))
    embedded.run(embedded.sender())
    assert embedded.producer.bodies == list(map(str, range(250)))


def test_rows_of_a_key_wait_for_each_other(post: Post) -> None:
    post.add("a1", "a2", order_key="a")
    post.add("b1", "b2", order_key="b")
    post.add("free")
    post.add("a3", order_key="a")
    refused = {"a1"}
    post.producer.then = lambda message: (
        SendStatus.FLUSH_DISK_TIMEOUT if message.body.decode() in refused else SendStatus.SEND_OK
    )
    sender = post.sender()
    post.run(sender)
    assert post.producer.bodies == ["a1", "b1", "b2", "free"]
    refused.clear()
    post.clock.advance(seconds=1)
    post.run(sender)
    assert post.producer.bodies[4:] == ["a1", "a2", "a3"]


def test_rows_of_a_key_wait_for_another_sender_too(post: Post) -> None:
    second = post.second_sender_meanwhile()
    post.add("a1", "a2", "a3", order_key="a")
    post.run(post.sender())
    assert second.bodies == []
    assert post.producer.bodies == ["a1", "a2", "a3"]


def test_rows_with_a_key_can_be_sent_by_it(embedded: Post) -> None:
    ordered = []

    def send_ordered(message: Message, order_key: str) -> None:
        ordered.append((message.body, order_key))

    embedded.add("free")
    embedded.add("a1", order_key="a")
    sender = embedded.sender(send_ordered=send_ordered)
    embedded.run(sender)
    assert (embedded.producer.bodies, ordered, sender.sent) == (["free"], [(b"a1", "a")], 2)


def test_rows_behind_one_that_fails_do_not_hold_back_others(embedded: Post) -> None:
    embedded.add(*map(str, range(250)), order_key="a")
    embedded.add("free")
    embedded.add("b1", "b2", order_key="b")
    embedded.producer.then = lambda message: (
        SendStatus.FLUSH_DISK_TIMEOUT if message.body == b"0" else SendStatus.SEND_OK
    )
    sender = embedded.sender()
    embedded.run(sender)
    assert embedded.producer.bodies == ["0", "free", "b1", "b2"]


@pytest.mark.parametrize("autoflush", [False, True])
def test_a_session_is_flushed_first(post: Post, name: str, autoflush: bool) -> None:
    """The change of an account, which SQLAlchemy keeps until then, locks its row before the message has its number."""
    with Session(post.engine) as session:
        session.execute(sqlalchemy.text("INSERT INTO accounts VALUES (:name, 90)"), {"name": name})
        session.commit()
    with Session(post.engine, autoflush=autoflush) as session:
        account = session.get_one(Account, name)
        account.balance = 80
        post.outbox.add(session, Message("orders", b"80"), order_key=name)
        assert not session.dirty


def test_a_clock_that_is_ahead_holds_nothing_back(post: Post) -> None:
    """One of several writers is an hour ahead."""
    ahead = Outbox(table=post.table, clock=ManualClock(post.clock.now_ms() + 3_600_000))
    post.add("a1", order_key="a")
    with post.engine.begin() as connection:
        ahead.add(connection, Message("orders", b"a2"), order_key="a")
        ahead.add(connection, Message("orders", b"free"))
    post.add("a3", order_key="a")
    post.run(post.sender())
    assert sorted(post.producer.bodies[:3]) == ["a1", "a2", "a3"] or "free" in post.producer.bodies
    assert [body for body in post.producer.bodies if body != "free"] == ["a1", "a2", "a3"]
    assert post.rows(0) == 0


@pytest.mark.slow
def test_a_backlog_costs_the_same_for_each_row(tmp_path: Path) -> None:
    """Steps of SQLite's virtual machine for a row of a backlog of one key, which must not grow with the backlog."""
    steps: list[float] = []
    for count in (200, 2_000):
        path = tmp_path / f"{count}.db"
        ran = itertools.count()

        def connect(path: Path = path, ran: itertools.count[int] = ran) -> sqlite3.Connection:
            connection = sqlite3.connect(path)
            connection.execute("PRAGMA synchronous = OFF")
            connection.set_progress_handler(lambda: next(ran) and None, 10)
            return connection

        with closing(sqlite3.connect(path)) as connection:
            upgrade_tables(connection)
            for _ in range(count):
                Outbox().add(connection, Message("orders", b"x"), order_key="a")
            connection.commit()
        sender = OutboxSender(connect, Recorder(), clock=ManualClock(1 << 42))
        sender.run_due(1 << 42)
        assert sender.sent == count
        steps.append(next(ran) / count)
    assert steps[1] < 1.5 * steps[0]


# --- databases as people have them


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_senders_of_an_isolated_database_repeat_nothing(
    database: Callable[[str], Database], isolation: str, name: str
) -> None:
    post = Post(database("postgresql"), "box_" + name.replace("-", "_"))
    for key in range(10):
        post.add(*[f"{key}:{number}" for number in range(12)], order_key=f"{key}")
    options = f"-c default_transaction_isolation={isolation.replace(' ', chr(92) + ' ')}"
    url = sqlalchemy.make_url(post.place.url).update_query_dict({"options": options})
    engines = [sqlalchemy.create_engine(url) for _ in range(4)]
    sent: list[str] = []
    senders = []
    for engine in engines:
        producer = Recorder()
        producer.then = lambda message: sent.append(message.body.decode())
        senders.append(OutboxSender(engine, producer, table=post.table, clock=post.clock))

    def run(sender: OutboxSender) -> None:
        while post.rows(0):
            post.run(sender)

    together(*[partial(run, sender) for sender in senders])
    assert len(sent) == 120
    assert [sender.failed + sender.lost for sender in senders] == [0] * 4
    for key in range(10):
        assert [body for body in sent if body.startswith(f"{key}:")] == [f"{key}:{number}" for number in range(12)]
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize("is_function", [False, True])
@pytest.mark.parametrize("base", ["postgresql", "mysql"])
def test_a_connection_that_dies_while_a_message_is_sent_repeats_nothing(
    database: Callable[[str], Database], base: str, is_function: bool, name: str
) -> None:
    post = Post(database(base), "box_" + name.replace("-", "_"))
    numbers: list[int] = []

    def note(driver: Any) -> Any:
        numbers.append(driver.info.backend_pid if base == "postgresql" else driver.thread_id())
        return driver

    engine = sqlalchemy.create_engine(post.place.url)
    sqlalchemy.event.listen(engine, "connect", lambda driver, _: note(driver) and None)

    def kill(message: Message) -> object:
        statement = "SELECT pg_terminate_backend({})" if base == "postgresql" else "KILL {}"
        while numbers:  # A connection is opened only after the end of the one before.
            post.place.run(statement.format(numbers.pop()))
        return SendStatus.SEND_OK

    post.add("a1", "a2", order_key="a")
    post.producer.then = kill
    place = (lambda: note(post.place.connect())) if is_function else engine
    sender = OutboxSender(place, post.producer, table=post.table, clock=post.clock)
    post.run(sender)
    assert (post.producer.bodies, sender.sent, sender.lost) == (["a1", "a2"], 2, 0)
    engine.dispose()


@pytest.mark.parametrize("rows", ["dicts", "named"])
@pytest.mark.parametrize(("base", "driver"), DRIVERS)
def test_rows_of_any_kind_are_sent(
    database: Callable[[str], Database], base: str, driver: str, rows: str, name: str
) -> None:
    """An application may have set what rows its connections give; schema and sender read them all."""
    place = database(base)
    table = "box_" + name.replace("-", "_")
    with closing(place.connect_by(driver, rows)) as connection:
        upgrade_tables(connection, outbox=table)
        Outbox(table=table).add(connection, Message("orders", b"one"))
        connection.commit()
    producer = Recorder()
    sender = OutboxSender(lambda: place.connect_by(driver, rows), producer, table=table)
    sender.run_due(0)
    assert (producer.bodies, sender.sent) == (["one"], 1)


# --- producers


@pytest.mark.parametrize("status", [None, "SEND_OK", "OK", SendStatus.SEND_OK])
def test_results_that_count_as_sent(embedded: Post, status: object) -> None:
    class Foreign:
        def send(self, message: Message) -> object:
            result = Result(None)
            del result.status
            result.send_status = status  # type: ignore[attr-defined]
            return result

    embedded.add("one")
    sender = embedded.sender(Foreign())
    embedded.run(sender)
    assert (sender.sent, sender.failed) == (1, 0)


def test_a_producer_that_does_not_wait_is_none(embedded: Post, caplog: pytest.LogCaptureFixture) -> None:
    class Later:
        async def send(self, message: Message) -> None:
            raise AssertionError

    embedded.add("one")
    sender = embedded.sender(Later())
    embedded.run(sender)
    assert (sender.sent, sender.failed) == (0, 1)
    assert "needs a producer whose send waits" in caplog.text


def test_settings_that_make_no_sense_are_refused(embedded: Post) -> None:
    with pytest.raises(ConfigError, match="a producer with send"):
        embedded.sender(object())
    with pytest.raises(ConfigError, match="claim_timeout"):
        embedded.sender(claim_timeout=0)
    with pytest.raises(ConfigError, match="table"):
        embedded.sender(table="a b")
    with pytest.raises(ConfigError, match="table"):
        Outbox(table="a b")


# --- start and shutdown of the sender


def test_a_thread_sends(tmp_path: Path) -> None:
    """A function returns plain driver connections, and the machine's clock is used."""
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as connection:
        upgrade_tables(connection)
        sent = threading.Event()

        class Told(Recorder):
            def send(self, message: Message) -> Result:
                result = super().send(message)
                sent.set()
                return result

        producer = Told()
        with OutboxSender(lambda: sqlite3.connect(path), producer).start() as sender:
            assert sender.start() is sender
            Outbox().add(connection, Message("orders", b"one"))
            connection.commit()
            sender.wake()
            assert sent.wait(30)
        assert producer.bodies == ["one"]
        assert (sender.sent, connection.execute("SELECT state FROM rmq_outbox").fetchall()) == (1, [(1,)])


def test_an_async_engine_runs_in_its_loop(embedded: Post, tmp_path: Path) -> None:
    """Rows are sent by a thread, statements run in the event loop, and nothing blocks it."""

    async def scenario() -> None:
        engine = create_async_engine(embedded.engine.url.set(drivername="sqlite+aiosqlite"))
        async with AsyncSession(engine) as session:
            await embedded.outbox.add_async(session, Message("orders", b"one"))
            await session.commit()
        sent = asyncio.Event()
        loop = asyncio.get_running_loop()

        def tell(message: Message) -> object:
            loop.call_soon_threadsafe(sent.set)
            return SendStatus.SEND_OK

        embedded.producer.then = tell
        sender = OutboxSender(engine, embedded.producer, table=embedded.table, clock=embedded.clock)
        with pytest.raises(ConfigError, match="await start_async or run_due_async"):
            sender.start()
        async with await sender.start_async():
            await asyncio.wait_for(sent.wait(), 30)
            with pytest.raises(ClientStateError, match="await shutdown_async"):
                sender.shutdown()
        async with AsyncSession(engine) as session:
            await embedded.outbox.add_async(session, Message("orders", b"two"))
            await session.commit()
        again = OutboxSender(engine, embedded.producer, table=embedded.table, clock=embedded.clock)
        await again.run_due_async(embedded.clock.now_ms())
        assert (sender.sent, again.sent) == (1, 1)
        await engine.dispose()

    asyncio.run(scenario())
    assert embedded.producer.bodies == ["one", "two"]


def test_closing_releases_rows_that_were_not_started(post: Post) -> None:
    sender = post.sender()

    def close(message: Message) -> object:
        sender.shutdown()
        return SendStatus.SEND_OK

    post.producer.then = close
    post.add("one", "two")
    post.run(sender)
    assert post.producer.bodies == ["one"]
    post.producer.then = lambda message: SendStatus.SEND_OK
    post.run(post.sender())
    assert post.producer.bodies == ["one", "two"]


def test_sent_rows_are_kept_for_a_while(embedded: Post) -> None:
    sender = embedded.sender(keep_sent=60)
    embedded.add("one")
    embedded.run(sender)
    embedded.clock.advance(ms=59_999)
    embedded.run(sender)
    assert embedded.rows(1) == 1
    embedded.clock.advance(ms=1)
    embedded.run(sender)
    assert embedded.rows(1) == 0


def test_a_sender_checks_table_and_engine_at_its_start(embedded: Post, tmp_path: Path) -> None:
    """The sender does not retry forever."""
    with pytest.raises(
        ConfigError, match=r"table nowhere can't be read \(librmq.idempotence.upgrade_tables .* no such table"
    ):
        embedded.sender(table="nowhere").start()
    with pytest.raises(ConfigError, match="no such table: nowhere"):
        embedded.run(embedded.sender(table="nowhere"))
    (tmp_path / "text.db").write_text("no database at all " * 100)
    with pytest.raises(ConfigError, match="not a database"):
        OutboxSender(lambda: sqlite3.connect(tmp_path / "text.db"), embedded.producer).start()
    with pytest.raises(ConfigError, match="expected a session or connection, found str"):
        OutboxSender(lambda: "shop.db", embedded.producer).start()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        for wrong, said in (
            ("sqlite:///shop.db", "an Engine or a function that opens a connection, found .sqlite"),
            (connection, "found <sqlite3.Connection"),
        ):
            with pytest.raises(ConfigError, match=said):
                OutboxSender(wrong, embedded.producer)


def test_a_database_out_of_reach_is_reported_once_and_retried(
    embedded: Post, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "librmq.outbox")
    path = tmp_path / "later" / "shop.db"
    sender = OutboxSender(lambda: sqlite3.connect(path), embedded.producer, clock=embedded.clock, poll_interval=5)
    for _ in range(3):
        assert embedded.run(sender) == 5000
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "rmq_outbox: the database failed, and is tried again" in caplog.text
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        upgrade_tables(connection)
        Outbox(clock=embedded.clock).add(connection, Message("orders", b"x"))
        connection.commit()
    embedded.run(sender)
    assert embedded.producer.bodies == ["x"]
    last = caplog.records[-1]
    assert (last.levelname, last.getMessage()) == ("INFO", "rmq_outbox: the database works again")
