"""Results of the pipelines for small stores that are made for the case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualClock, ManualRunner, Message, MessageStore, Producer, PushConsumer, StoreConfig

pytestmark = pytest.mark.spark
pytest.importorskip("pyspark")

from librmq.diagnosis import Consumption, estimate, expiring  # noqa: E402
from librmq.diagnosis.pending import pending_messages  # noqa: E402
from librmq.errors import ConfigError  # noqa: E402
from librmq.spark import stores  # noqa: E402
from librmq.spark._functions import strategy_of  # noqa: E402
from librmq.spark.pipelines import backlog, dead_letters, left_out, reconcile, run, what_if  # noqa: E402
from librmq.spark.pipelines._backlog import MESSAGE_COLUMNS  # noqa: E402
from librmq.store import BrokerTables  # noqa: E402
from tests.diagnosis.test_letters import CASES as DEAD_LETTERS  # noqa: E402
from tests.message.test_lag import CASES as LAGS  # noqa: E402
from tests.spark_session import shared_session  # noqa: E402

START_MS = 1_700_000_000_000
CONFIG = StoreConfig.tiny(commitlog_file_size=8192, max_message_size=4096)


def store(path: Path, messages: list[tuple[str, int, str]], offsets: str = "") -> Path:
    """Make a store of messages (topic, queue, keys) one second apart, with the progress of groups."""
    clock = ManualClock(START_MS)
    with MessageStore.open(path, CONFIG, clock=clock) as opened:
        for topic, queue_id, keys in messages:
            clock.advance(ms=1000)
            message = Message(topic, b"x" * 500)
            message.properties["KEYS"] = keys  # as any client can send them
            opened.append(message, queue_id)
    (path / "config").mkdir(exist_ok=True)
    (path / "config" / "consumerOffset.json").write_text('{"offsetTable":{' + offsets + "}}")
    return path


def found(name: str, path: Path, *columns: str, **settings: str) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in run(shared_session(), name, str(path), settings).select(*columns).collect()}


def test_a_queue_without_progress_counts_from_its_begin(tmp_path: Path) -> None:
    """So do the group's lag, the clients that would drain it, and messages that retention would delete unread."""
    messages = [("T", n % 3, "") for n in range(30)] + [("Other", 0, "")]
    path = store(tmp_path / "s", messages, '"T@g":{0:4},"T@h":{0:10,1:10,2:10}')
    backlog = found("backlog", path, "group", "topic", "queueId", "offset", "lag", "lost")
    assert backlog == {
        ("g", "T", 0, 4, 6, 0), ("g", "T", 1, None, 10, 0), ("g", "T", 2, None, 10, 0),
        *(("h", "T", queue_id, 10, 0, 0) for queue_id in range(3)),
    }  # fmt: skip
    assert ("g", "T", 26) in found("what-if", path, "group", "topic", "lag", clients="1")
    log = MessageStore.open(path, read_only=True)
    with log:
        files = {message.physical_offset // log.config.commitlog_file_size for message in log}
    assert len(files) > 1
    (row,) = run(shared_session(), "retention", str(path), {"hours": "0"}).collect()
    in_first = row["messages"]
    assert row["unread"] == len([n for n in range(in_first) if n % 3 or n // 3 >= 4])


def test_a_group_reads_its_topics_at_every_broker(tmp_path: Path) -> None:
    """Also at a broker where it has no progress yet, by the driver or by a frame; another topic stays its own."""
    spark = shared_session()
    first = store(tmp_path / "a", [("T", n % 2, "") for n in range(10)], '"T@g":{0:5,1:1}')
    other = store(tmp_path / "b", [("U", 0, ""), *(("T", n % 2, "") for n in range(30))], "")
    both = [str(first), str(other)]
    expected = {(str(first), "T", 0, 0), (str(first), "T", 1, 4), (str(other), "T", 0, 15), (str(other), "T", 1, 15)}
    waiting = stores.messages(spark, both, MESSAGE_COLUMNS)
    by_frame = backlog(stores.offsets(spark, both), stores.queues(spark, both), waiting)
    for rows in (run(spark, "backlog", both), by_frame):
        assert {tuple(row) for row in rows.select("store", "topic", "queueId", "lag").collect()} == expected
    (row,) = run(spark, "what-if", both, {"clients": "1", "strategies": "AVG"}).collect()
    assert (row["queues"], row["lag"]) == (4, 34)
    unread = {Path(row["store"]).name: row["unread"] for row in run(spark, "retention", both, {"hours": "0"}).collect()}
    assert unread["b"] > 0


@pytest.mark.parametrize("hours", [0, 2 / 3600, 12 / 3600, 1])
def test_retention_counts_unread_messages_as_the_command_does(tmp_path: Path, hours: float) -> None:
    """With one group, because a pipeline counts a message once for all groups."""
    messages = [("T", n % 3, "") for n in range(60)] + [("Other", 0, "")]
    path = store(tmp_path / "s", messages, '"T@g":{0:4,1:9}')
    (row,) = run(shared_session(), "retention", str(path), {"hours": str(hours)}).collect()
    rows = expiring(path, reserved_s=3600 * hours, within_s=0)
    assert sum(one.messages for one in rows) == row["unread"]
    assert bool(rows) == (hours < 1)


def test_a_pipeline_reads_messages_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(tmp_path / "s", [("T", 0, "a")], '"T@g":{0:0}')
    for name in ("retention", "skew", "duplicates", "dead-letters"):
        run(shared_session(), name, str(path)).explain()
        assert capsys.readouterr().out.count("Scan rocketmq") == 1, name


def test_a_message_is_not_a_duplicate_of_itself(tmp_path: Path) -> None:
    path = store(tmp_path / "s", [("T", 0, "a a"), ("T", 0, "b  b c"), ("T", 1, "c"), ("U", 0, "a")])
    assert found("duplicates", path, "topic", "key", "secondsAfter") == {("T", "c", 1.0)}
    assert found("duplicates-approximate", path, "topic", "key") <= {("T", "c")}
    assert found("skew", path, "topic", "key", "messages", by="key") == {
        ("T", "a", 1), ("T", "b", 1), ("T", "c", 2), ("U", "a", 1),
    }  # fmt: skip


def test_reconcile_keeps_topics_apart(tmp_path: Path) -> None:
    path = store(tmp_path / "s", [("A", 0, "k1"), ("B", 0, "k1"), ("B", 0, "k2 k2"), ("A", 0, "k3"), ("A", 0, "k3")])
    spark = shared_session()
    rows = spark.createDataFrame([("k1",), ("k3",), ("k4",)], "id string")
    messages = spark.read.format("rocketmq").load(str(path))
    verdicts = {tuple(row) for row in reconcile(messages, rows, business_key="id").select(
        "topic", "key", "verdict", "messages").collect()}  # fmt: skip
    assert verdicts == {("B", "k2", "extra", 1), ("A", "k3", "repeated", 2), (None, "k4", "missing", 0)}
    table = str(tmp_path / "rows")
    rows.write.parquet(table)
    of_b = found("reconcile", path, "topic", "key", "verdict", rows=table, key="id", topic="B")
    assert of_b == {("B", "k2", "extra"), (None, "k3", "missing"), (None, "k4", "missing")}


def test_pipelines_take_topics_groups_times_and_offsets(tmp_path: Path) -> None:
    messages = [("A", n % 2, f"k{n % 3}") for n in range(12)] + [("B", 0, "k0"), ("B", 0, "k0"), ("%DLQ%g", 0, "")]
    path = store(tmp_path / "s", messages, '"A@g":{0:2},"B@h":{0:1},"B@g":{0:2}')

    def counts(**settings: str) -> set[tuple[Any, ...]]:
        return found("skew", path, "topic", "queueId", "messages", **settings)

    assert counts(topic="B, %DLQ%g") == {("B", 0, 2), ("%DLQ%g", 0, 1)}
    assert counts(since=str(START_MS + 10_000)) == {("A", 0, 1), ("A", 1, 2), ("B", 0, 2), ("%DLQ%g", 0, 1)}
    assert counts(until="2023-11-14T22:13:23Z") == {("A", 0, 1), ("A", 1, 1)}
    assert counts(topic="A", starting_offsets='{"A":{"0":5}}', ending_offsets='{"A":{"1":2}}') == {
        ("A", 0, 1), ("A", 1, 2),
    }  # fmt: skip
    assert counts(tags="none") == set()
    duplicates = found("duplicates", path, "topic", "key", topic="A", until=str(START_MS + 5000))
    assert duplicates == {("A", "k0")}
    assert found("backlog", path, "group", "topic", "lag", group="g") == {("g", "A", 4), ("g", "A", 6), ("g", "B", 0)}
    assert found("backlog", path, "group", "topic", "lag", topic="B") == {("g", "B", 0), ("h", "B", 1)}
    assert found("what-if", path, "group", "topic", topic="B", group="h", clients="1") == {("h", "B")}
    assert found("dead-letters", path, "group", "messages", group="g") == {("g", 1)}
    assert found("dead-letters", path, "group", group="h,i") == set()
    for settings, text in (
        ({"since": "yesterday"}, "2026-11-20T08:00"),
        ({"since": "9", "until": "5"}, "setting since: expected a time before until, found '9'"),
        ({"tag": "a"}, "did you mean tags"),
    ):
        with pytest.raises(ConfigError, match=text):
            counts(**settings)
    with pytest.raises(ConfigError, match="backlog has no setting 'tags'"):
        found("backlog", path, tags="a")


def test_waiting_retries_belong_to_the_topic_of_the_message(tmp_path: Path) -> None:
    """As in `librmq.diagnosis.pending_messages`."""
    path, runner = tmp_path / "s", ManualRunner(ManualClock(START_MS))
    with Broker.open(path, runner=runner, store_config=StoreConfig.tiny()) as broker:
        producer, consumer = Producer(broker, "p"), PushConsumer(broker, "g")
        consumer.subscribe("T", lambda _: 1 / 0)
        consumer.start()
        producer.send("T", b"fails")
        producer.send("U", b"later", delay=3600)
        runner.advance(3000)
        consumer.shutdown()
    with MessageStore.open(path, read_only=True) as opened:
        for topic in ("T", "U", "%RETRY%g", "V"):
            places = {(one.physical_offset,) for one in pending_messages(opened, topic=topic)}
            assert found("timers", path, "physicalOffset", topic=topic) == places
            assert len(places) == (topic != "V")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_messages_that_wait_for_their_time_are_no_backlog(tmp_path: Path, is_damaged: bool) -> None:
    """The progress of delay levels is not a group's, in a store that is too damaged to open neither.

    That of transactions belongs to a group of the broker's own, which counts only if it is named.
    """
    own = "RMQ_SYS_TRANS_HALF_TOPIC", "CID_RMQ_SYS_TRANS"
    path = store(tmp_path / "s", [("T", 0, ""), (own[0], 0, "")], f'"T@g":{{0:0}},"{own[0]}@{own[1]}":{{0:0}}')
    with MessageStore.open(path, CONFIG, clock=ManualClock(START_MS + 9000)) as opened:
        for _ in range(3):
            opened.append(Message("T", b"x", delay_level=3), 0)
    (path / "config" / "delayOffset.json").write_text('{"offsetTable":{3:1}}')
    settings = {}
    if is_damaged:
        (file,) = (path / "consumequeue" / "T" / "0").iterdir()
        (path / "consumequeue" / "U" / "0").mkdir(parents=True)
        (path / "consumequeue" / "U" / "0" / file.name).write_bytes(b"x" * 30)
        settings = {"damaged": "skip"}
    assert found("backlog", path, "group", "topic", "lag", **settings) == {("g", "T", 1)}
    assert found("backlog", path, "group", "lag", group=own[1], **settings) == {(own[1], 1)}
    assert found("what-if", path, "group", "topic", clients="1", **settings) == {("g", "T")}
    assert len(found("timers", path, "physicalOffset", **settings)) == 2


def test_backlog_reads_only_the_first_message_that_waits(tmp_path: Path) -> None:
    """A damaged message behind it does no harm, and the largest lag comes first."""
    path = store(tmp_path / "s", [("T", n % 2, "") for n in range(9)], '"T@g":{0:1,1:3}')
    with MessageStore.open(path, read_only=True) as opened:
        place = list(opened)[4].physical_offset
    with open(path / "commitlog" / f"{0:020}", "r+b") as log:
        log.seek(place)
        log.write(b"\xff" * 4)
    rows = run(shared_session(), "backlog", str(path)).collect()
    assert [(row["queueId"], row["lag"], row["oldest"].timestamp(), row["ageSeconds"]) for row in rows] == [
        (0, 4, START_MS / 1000 + 3, 6.0), (1, 1, START_MS / 1000 + 8, 1.0),
    ]  # fmt: skip


def test_skew_counts_empty_queues_of_all_stores(tmp_path: Path) -> None:
    """Also those that only the table of topics has; topics of the broker itself have no skew unless they are named."""
    paths = [
        store(tmp_path / "a", [("T", 0, "") for _ in range(8)]),
        store(tmp_path / "b", [("RMQ_SYS_TRACE_TOPIC", 0, "")]),
    ]
    tables = BrokerTables.open(str(paths[0] / "config"))
    tables.set_topic("T", read_queues=8, write_queues=8, permission=6)
    tables.persist(START_MS)
    names = list(map(str, paths))
    columns = "topic", "queueId", "messages", "share", "ratio"
    rows = run(shared_session(), "skew", names).select(*columns).collect()
    assert [tuple(row) for row in rows] == [("T", 0, 8, 1.0, 8.0)]
    named = run(shared_session(), "skew", names, {"topic": "RMQ_SYS_TRACE_TOPIC"}).select(*columns).collect()
    assert [tuple(row) for row in named] == [("RMQ_SYS_TRACE_TOPIC", 0, 1, 1.0, 1.0)]


def test_skew_says_whether_it_leaves_queues_out(tmp_path: Path) -> None:
    path = store(tmp_path / "s", [("T", n % 3, "") for n in range(9)] + [("U", 0, "")])
    assert found("skew", path, "topic", "cut", most="2") == {("T", True), ("U", False)}


def test_damaged_records_can_be_skipped(tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    path = store(tmp_path / "s", [("T", 0, f"k{n}") for n in range(9)], '"T@g":{0:0}')
    with MessageStore.open(path, read_only=True) as opened:
        place = list(opened)[4].physical_offset
    with open(path / "commitlog" / f"{0:020}", "r+b") as log:
        log.seek(place)
        log.write(b"\xff" * 4)
    with pytest.raises(PySparkException, match="mode PERMISSIVE"):
        found("skew", path, "queueId", "messages")
    sound = store(tmp_path / "sound", [("T", 0, f"j{n}") for n in range(9)], '"T@g":{0:0}')
    assert found("skew", path, "queueId", "messages", "skipped", damaged="skip") == {(0, 8, True)}
    spark = shared_session()
    both = run(spark, "skew", [str(path), str(sound)], {"damaged": "skip"})
    assert {(row["store"], row["skipped"]) for row in both.collect()} == {(str(path), True), (str(sound), False)}
    assert "skipped" not in run(spark, "skew", str(sound)).columns
    for name in ("skew", "duplicates", "retention"):
        (row,) = left_out(spark, name, str(path), {"damaged": "skip"}).collect()
        assert row["store"] == str(path)
        assert f"at {place}: " in row["reason"], name
    assert left_out(spark, "skew", str(path)).count() == 0  # a pipeline that fails leaves nothing out
    assert left_out(spark, "skew", str(path), {"damaged": "skip", "topic": "U"}).count() == 0
    assert left_out(spark, "transactions", str(path), {"damaged": "skip"}).count() == 0


def test_damage_after_a_crash_halves_no_number_in_silence(tmp_path: Path) -> None:
    """A crashed store is read as recovery leaves it, but not where that cuts sound records."""
    path = store(tmp_path / "s", [("T", 0, f"k{n}") for n in range(9)], '"T@g":{0:0}')
    with MessageStore.open(path, read_only=True) as opened:
        place = list(opened)[4].physical_offset
    with open(path / "commitlog" / f"{0:020}", "r+b") as log:
        log.seek(place + 88)
        log.write(b"\xff")
    (path / "abort").touch()
    spark = shared_session()

    def read(**options: str) -> Any:
        reader = spark.read.format("rocketmq").schema("topic string, body binary")
        return reader.options(**options).load(str(path))

    for name in ("skew", "backlog", "duplicates"):
        with pytest.raises(Exception, match="sound records follow"):
            run(spark, name, str(path)).collect()
        assert run(spark, name, str(path), {"damaged": "skip"}).count() >= 0
    with pytest.raises(Exception, match="sound records follow"):
        read().collect()
    assert read(asRecovered="true").count() == 4
    assert read(mode="DROPMALFORMED").count() == 8


def test_lag_is_the_same_by_expressions_of_spark() -> None:
    """The table of cases is that of `librmq.message.lag`, with a queue for each."""
    spark, name = shared_session(), "store string, topic string, queueId int"
    cases = [("s", "T", queue_id, *case) for queue_id, case in enumerate(LAGS)]
    queues = spark.createDataFrame(
        [(*case[:3], *case[4:6]) for case in cases], f"{name}, minOffset bigint, maxOffset bigint"
    )
    offsets = spark.createDataFrame(
        [("s", "T", "g", case[2], case[3]) for case in cases if case[3] is not None],
        "store string, topic string, group string, queueId int, offset bigint",
    )
    messages = spark.createDataFrame([], f"{name}, queueOffset bigint, storeTimestamp timestamp")
    rows = backlog(offsets, queues, messages).select("queueId", "lag", "lost").collect()
    assert {tuple(row) for row in rows} == {(case[2], case[7], case[8]) for case in cases}


def test_causes_are_the_same_by_expressions_of_spark() -> None:
    """The table of cases is that of `librmq.diagnosis.dead_letter_causes`, with a store for each."""
    columns = "store string, topic string, storeTimestamp timestamp, properties map<string,string>, reconsumeTimes int"
    letters = [(str(n), "%DLQ%G", None, case[0], case[1]) for n, case in enumerate(DEAD_LETTERS)]
    rows = dead_letters(shared_session().createDataFrame(letters, columns)).select("store", "group", "topic", "cause")
    assert {tuple(row) for row in rows.collect()} == {
        (str(n), "G", topic, cause) for n, (_, _, topic, cause) in enumerate(DEAD_LETTERS)
    }


@pytest.mark.parametrize("strategy", ["AVG", "AVG_BY_CIRCLE", "CONSISTENT_HASH"])
def test_what_if_is_the_estimate_without_spread(strategy: str) -> None:
    """A client's rate is that of its threads; a queue's rate that of one listener in order."""
    spark = shared_session()
    lags = {"even": [50, 50, 50, 50], "uneven": [900, 0, 7, 40, 1], "one": [300], "none": [0, 0]}
    rates = {"clients": (100.0, 1e9), "queues": (100.0, 25.0)}
    frame = spark.createDataFrame(
        [("broker", group, "topic", at, lag) for group, row in lags.items() for at, lag in enumerate(row)],
        "store string, group string, topic string, queueId int, lag bigint",
    )
    scenarios = [(name, strategy, clients, *rate) for name, rate in rates.items() for clients in (1, 2, 3, 8)]
    schema = "scenario string, strategy string, clients int, clientRate double, queueRate double"
    for row in what_if(frame, spark.createDataFrame(scenarios, schema)).collect():
        ordered = row["scenario"] == "queues"
        expected = estimate(
            Consumption(
                lags=lags[row["group"]], handler_s=1 / 25 if ordered else 1 / 100, handler_spread=0.0,
                clients=row["clients"], threads=4 if ordered else 1, is_orderly=ordered,
                strategy=strategy_of(strategy),
            )
        )  # fmt: skip
        assert row["idleClients"] == expected.idle_clients
        assert (row["mostQueues"], row["unowned"]) == (expected.most_queues, expected.unowned_queues)
        assert row["drainSeconds"] == pytest.approx(expected.drain_s)
