"""Pipelines over recorded stores, compared with the same results in plain Python.

In each pipeline a worker is killed during a task.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig, StoredMessage
from librmq.client.allocation import allocate_averagely, allocate_averagely_by_circle, allocate_consistent_hash
from librmq.diagnosis.pending import pending_messages
from librmq.filter import SqlFilter
from librmq.message.delays import level_of_queue_id
from librmq.message.message import MessageQueue
from librmq.message.topics import SystemTopic, TopicPrefix, is_own_group, is_system_topic
from librmq.scheduling.timer import Timers
from librmq.scheduling.timer_config import TimerConfig
from librmq.store.format.broker_tables import BrokerTables
from librmq.txn import Transactions
from tests.bytime import put_timed
from tests.golden.recorded import left_sound
from tests.reference import ABSENT, reference, rows

pytestmark = pytest.mark.spark
pytest.importorskip("pyspark")

from pyspark.sql import functions as F  # noqa: E402, N812

from librmq.spark.pipelines import run  # noqa: E402
from librmq.spark.pipelines._comparisons import reconcile  # noqa: E402
from tests.spark_session import killing, shared_session  # noqa: E402

Name = tuple[str, str, int]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return recorded stores of 4.9 with different contents, as if they were the brokers of a cluster.

    One store has lost its queues, which are rebuilt from the log. Stores of crashed brokers are recovered copies.
    """
    folders = sorted(path for path in reference().folder.iterdir() if (path / "store" / "commitlog").is_dir())
    chosen: list[str] = []
    seen: set[str] = set()
    for folder in reversed(folders):
        if not folder.name.startswith(("store-", "clients-")):
            continue
        path = folder / "store"
        if folder.name.startswith("store-") and not left_sound(folder):
            path = tmp_path_factory.mktemp(folder.name) / "store"
            shutil.copytree(folder / "store", path)
            config = StoreConfig.from_row(rows(folder, "config")[0])
            MessageStore.open(path, config, thorough=True).close()
        # Many stores are similar; those that add nothing new are skipped.
        with MessageStore.open(path, read_only=True) as store:  # its queues can be deleted
            topics = {topic for topic, _ in store.queues}
        kinds = {topic.rpartition("%")[0] or (topic if is_system_topic(topic) else "") for topic in topics}
        filters = path / "config" / "consumerFilter.json"
        if filters.exists() and "groupFilterData" in filters.read_text():
            kinds.add("filters")
        if folder.name.startswith("store-") or kinds - seen:
            chosen.append(str(path))
            seen |= kinds
    lost = str(tmp_path_factory.mktemp("lost") / "store")
    shutil.copytree(chosen[0], lost, ignore=shutil.ignore_patterns("consumequeue", "consumequeue_ext"))
    return [lost, *chosen[1:]]


@pytest.fixture(autouse=True)
def a_worker_is_killed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    if request.function in (test_a_store_alone, test_backlog, test_what_if):  # these read without a worker
        yield
        return
    with killing(tmp_path / "killed"):
        yield


class Plain:
    """Return the messages of the stores by queue, with all fields that the pipelines need."""

    def __init__(self, paths: list[str]) -> None:
        self.queues: dict[Name, tuple[int, int]] = {}
        self.messages: dict[Name, dict[int, StoredMessage]] = {}
        self.offsets: dict[tuple[str, str, str, int], int] = {}
        self.filters: list[tuple[str, str, str, str]] = []
        for path in paths:
            with MessageStore.open(path, read_only=True) as store:
                for (topic, queue_id), queue in store.queues.items():
                    name = path, topic, queue_id
                    self.queues[name] = queue.min_offset, queue.max_offset
                    self.messages[name] = {}
                    for at in range(queue.min_offset, queue.max_offset):
                        entry = queue.entry(at)
                        assert entry is not None
                        message = store.message_at(entry.physical_offset)
                        assert message is not None
                        self.messages[name][at] = message
            config = BrokerTables.open(os.path.join(path, "config"))
            for key, queue_offsets in config.offsets.rows.items():
                topic, _, group = key.rpartition("@")
                for queue_id, found in queue_offsets.items():
                    self.offsets[path, group, topic, queue_id] = found
            self.filters += [
                (path, one.group, one.topic, one.expression) for one in config.registrations(0) if one.filter
            ]

    def consumed(self) -> set[tuple[str, str, str, int]]:
        """Return every queue of each topic in which a group has progress somewhere: store, group, topic, queue id."""
        groups = {(group, topic) for _, group, topic, _ in self.offsets if not is_own_group(group)}
        return {
            (path, group, topic, queue_id)
            for group, topic in groups for path, name, queue_id in self.queues if name == topic
        }  # fmt: skip

    def of(self, topic: str) -> list[tuple[str, int, StoredMessage]]:
        return [
            (path, at, message)
            for (path, name, _), found in self.messages.items() if name == topic for at, message in found.items()
        ]  # fmt: skip


@pytest.fixture(scope="module")
def plain(stores: list[str]) -> Plain:
    return Plain(stores)


def millis(value: Any) -> int | None:
    return None if value is None else round(value.timestamp() * 1000)


def test_backlog(stores: list[str], plain: Plain) -> None:
    rows = run(shared_session(), "backlog", stores).where(f"topic != '{SystemTopic.SCHEDULE}'").collect()
    newest: dict[str, int] = defaultdict(int)
    for (path, _, _), messages in plain.messages.items():
        newest[path] = max([newest[path], *(one.store_timestamp_ms for one in messages.values())])
    wanted = {}
    for path, group, topic, queue_id in plain.consumed():
        if topic != SystemTopic.SCHEDULE:
            begin, end = plain.queues[path, topic, queue_id]
            offset = plain.offsets.get((path, group, topic, queue_id), begin)
            first = plain.messages[path, topic, queue_id].get(max(begin, offset))
            oldest = None if first is None else first.store_timestamp_ms
            age = 0.0 if oldest is None else (newest[path] - oldest) / 1000
            wanted[path, group, topic, queue_id] = max(0, end - max(begin, offset)), max(0, begin - offset), oldest, age
    assert {
        (row["store"], row["group"], row["topic"], row["queueId"]): (
            row["lag"], row["lost"], millis(row["oldest"]), row["ageSeconds"],
        )
        for row in rows
    } == wanted  # fmt: skip
    assert any(lag for lag, *_ in wanted.values())


def test_skew(stores: list[str], plain: Plain) -> None:
    found = {
        (row["store"], row["topic"], row["queueId"]): (row["messages"], row["ratio"])
        for row in run(shared_session(), "skew", stores).collect()
    }
    queues = {name: len(messages) for name, messages in plain.messages.items() if not is_system_topic(name[1])}
    for path in stores:
        for topic, row in BrokerTables.open(os.path.join(path, "config")).topics.rows.items():
            queues |= {
                (path, topic, queue_id): queues.get((path, topic, queue_id), 0)
                for queue_id in range(int(row["readQueueNums"]))
            }
    topics: dict[str, list[int]] = defaultdict(list)
    for (_, topic, _), count in queues.items():
        topics[topic].append(count)
    for name, (count, ratio) in found.items():
        of_topic = topics[name[1]]
        assert (count, ratio) == (queues[name], pytest.approx(count / (sum(of_topic) / len(of_topic))))
    assert found.keys() == {name for name, count in queues.items() if count}


def own(plain: Plain) -> list[tuple[str, str, int, int, str, StoredMessage]]:
    """Yield every key of every message sent by a producer."""
    return [
        (key, topic, message.store_timestamp_ms, message.physical_offset, path, message)
        for (path, topic, _), messages in plain.messages.items()
        if not is_system_topic(topic) and not topic.startswith(("%RETRY%", "%DLQ%"))
        for message in messages.values()
        for key in {*message.properties.get("KEYS", "").split(" ")}
        if key
    ]


def test_duplicates(stores: list[str], plain: Plain) -> None:
    rows = run(shared_session(), "duplicates", stores, {"window": "100000000"}).collect()
    groups: dict[tuple[str, str], list[tuple[int, str, int]]] = defaultdict(list)
    for key, topic, time, place, path, _ in own(plain):
        groups[topic, key].append((time, path, place))
    wanted: Counter[tuple[str, str]] = Counter()
    for name, found in groups.items():
        times = sorted(found)
        wanted[name] += sum(b[0] - a[0] <= 100_000_000_000 for a, b in pairwise(times))
    assert Counter((row["topic"], row["key"]) for row in rows) == +wanted
    few = run(shared_session(), "duplicates", stores, {"window": "0.05"}).collect()
    assert all(row["secondsAfter"] <= 0.05 for row in few)
    approximate = Counter(
        (row["topic"], row["key"]) for row in run(shared_session(), "duplicates-approximate", stores).collect()
    )
    exact = Counter({name: len(found) - 1 for name, found in groups.items() if len(found) > 1})
    assert not exact - approximate
    assert (approximate - exact).total() <= 2 + 0.01 * len(groups)


def test_what_if(stores: list[str], plain: Plain) -> None:
    settings = {"clients": "1,3", "rate": "10", "queue_rate": "7"}
    rows = run(shared_session(), "what-if", stores, settings).collect()
    strategies = {
        "AVG": allocate_averagely, "AVG_BY_CIRCLE": allocate_averagely_by_circle,
        "CONSISTENT_HASH": allocate_consistent_hash,
    }  # fmt: skip
    lags: dict[tuple[str, str], dict[MessageQueue, int]] = defaultdict(dict)
    for path, group, topic, queue_id in plain.consumed():
        if topic != SystemTopic.SCHEDULE:
            begin, end = plain.queues[path, topic, queue_id]
            offset = plain.offsets.get((path, group, topic, queue_id), begin)
            lags[group, topic][MessageQueue(topic, path, queue_id)] = max(0, end - max(begin, offset))
    checked = 0
    for row in rows:
        if row["topic"] == SystemTopic.SCHEDULE:
            continue
        queues = lags[row["group"], row["topic"]]
        ordered = sorted(queues, key=lambda one: (one.topic, one.broker_name, one.queue_id))
        clients = [f"client-{n:06d}" for n in range(row["clients"])]
        shares = [strategies[row["strategy"]](client, ordered, clients) for client in clients]
        sums = [sum(queues[one] for one in share) for share in shares]
        assert (row["queues"], row["lag"]) == (len(queues), sum(queues.values()))
        assert (row["idleClients"], row["mostQueues"], row["mostLag"]) == (
            sum(not share for share in shares), max(map(len, shares)), max(sums),
        )  # fmt: skip
        assert row["drainSeconds"] == pytest.approx(max(max(sums) / 10, max(queues.values()) / 7))
        checked += 1
    assert checked


def test_pending_transactions(stores: list[str], plain: Plain, tmp_path: Path) -> None:
    made = str(tmp_path / "made")
    with MessageStore.open(made, StoreConfig.tiny(), clock=ManualClock(1_700_000_000_000)) as store:
        transactions = Transactions(store, BrokerTables.open(os.path.join(made, "config")))
        halves = []
        for number in range(6):
            message = Message("H", b"x", unique_key=f"H{number}")
            message.properties |= {"PGROUP": "P", "TRAN_MSG": "true"}
            halves.append(transactions.prepare(message, 0))
        transactions.commit(halves[1].physical_offset, halves[1].queue_offset, "P")
        for body, tags in ((b"no number", "d"), (b"2", None), (b" 2", "d"), (b"77", "d"), (b"+3", "d"), (b"4,5,", "d")):
            store.append(Message(SystemTopic.OP, body, tags=tags))
    found = {
        (row["store"], row["queueOffset"], row["group"], row["topic"])
        for row in run(shared_session(), "transactions", [*stores, made]).collect()
    }
    ended = {(path, int(message.body)) for path, _, message in plain.of(SystemTopic.OP)}
    wanted = {
        (path, at, message.properties.get("PGROUP"), message.properties.get("REAL_TOPIC"))
        for path, at, message in plain.of(SystemTopic.HALF)
        if at >= plain.offsets.get((path, "CID_RMQ_SYS_TRANS", SystemTopic.HALF, 0), 0) and (path, at) not in ended
    }
    assert found == wanted | {(made, 0, "P", "H"), (made, 2, "P", "H")}
    with MessageStore.open(made, read_only=True) as store:
        assert [one.unique_key for one in pending_messages(store, kind="half")] == ["H0", "H2"]


def store_with_timers(path: Path) -> None:
    """Create timers that are in slots, rolled, deleted, due, or not yet in the wheel."""
    clock = ManualClock(1_700_000_000_000)
    with MessageStore.open(path, StoreConfig.tiny(), clock=clock) as store:
        settings = TimerConfig(slots_total=600, timer_log_file_size=1024, timer_roll_window_slot=100)
        timers = Timers(store, settings)

        def put(seconds: int, key: str, topic: str = "T", **properties: str) -> None:
            message = Message(topic, b"x", unique_key=key)
            message.properties |= {"TIMER_DELAY_SEC": str(seconds), **properties}
            put_timed(timers, message)

        for seconds in (3, 10, 30, 30, 300, 300, 20):
            put(seconds, f"K{seconds}")
        put(30, "popped", f"{TopicPrefix.REVIVE}cluster")  # a note of POP, which is no message
        put(30, "gone")
        put(30, "delete", TIMER_DEL_UNIQKEY="T+gone")
        put(30, "gone too")
        put(30, "delete", TIMER_DEL_UNIQKEY="gone too")
        put(20, "too late", TIMER_DEL_UNIQKEY="T+K300")
        store.append(Message("D", b"x", delay_level=3, unique_key="D"))
        timers.run_due(clock.now_ms())
        clock.advance(ms=5000)
        timers.run_due(clock.now_ms())
        timers.save()
        put(40, "late")
        put(40, "later", TIMER_DEL_UNIQKEY="T+late")


def recorded_delays(folder: Path) -> dict[int, tuple[str, int, str]]:
    """Return topic, delivery time, and unique id of each message that waits for its delay, as RocketMQ reports it."""
    tables = BrokerTables.open(str(folder / "store" / "config"))
    messages = {row["phys"]: row for row in rows(folder, "message")}
    return {
        row["phys"]: (
            messages[row["phys"]]["properties"]["REAL_TOPIC"],
            row["ext"]["tags_code"] if "ext" in row else row["tags_code"],
            messages[row["phys"]]["dispatch_uniq_key"],
        )
        for row in rows(folder, "cq")
        if row["topic"] == SystemTopic.SCHEDULE
        and row["offset"] >= tables.delay_offset(level_of_queue_id(row["queue_id"]))
    }


def test_pending_timers(stores: list[str], tmp_path: Path) -> None:
    store_with_timers(tmp_path / "made")
    others = [str(path / "store") for path in reference().folder.glob("timer-*") if (path / "store").is_dir()]
    paths = [*stores, *others, str(tmp_path / "made")]
    found = Counter(
        (row["store"], row["kind"], row["topic"], millis(row["due"]), row["uniqueKey"], row["physicalOffset"])
        for row in run(shared_session(), "timers", paths).collect()
    )
    wanted: Counter[tuple[Any, ...]] = Counter()
    for path in paths:
        with MessageStore.open(path, read_only=True) as store:
            wanted.update(
                (path, "timer" if one.kind == "timer" else "delay", one.target_topic, one.due_ms, one.unique_key,
                 one.physical_offset)
                for one in pending_messages(store) if one.kind not in ("half", "given_up")
            )  # fmt: skip
    assert found == wanted
    for folder in reference().folder.glob("store-*"):
        if str(folder / "store") in stores:
            assert {
                place: (topic, due, key)
                for path, kind, topic, due, key, place in found if (path, kind) == (str(folder / "store"), "delay")
            } == recorded_delays(folder)  # fmt: skip
    made = Counter(kind for path, kind, *_ in found.elements() if path == str(tmp_path / "made"))
    assert made == {"delay": 1, "timer": 7}


@pytest.fixture(scope="module")
def with_dead_letters(plain: Plain) -> None:
    """Skip the test if the reference data have no dead letters: nothing would be read, and no worker killed."""
    if not any(topic.startswith("%DLQ%") for _, topic, _ in plain.messages):
        pytest.skip(f"{ABSENT}no dead letters in {reference().origin}")


@pytest.fixture(scope="module")
def with_filters(plain: Plain) -> None:
    """Skip the test if no group of the reference data at hand has registered a filter."""
    if not plain.filters:
        pytest.skip(f"{ABSENT}no registered filters in {reference().origin}")


@pytest.mark.usefixtures("with_dead_letters")
def test_dead_letters(stores: list[str], plain: Plain) -> None:
    found = {
        (row["store"], row["group"], row["topic"], row["cause"]): (row["messages"], millis(row["last"]))
        for row in run(shared_session(), "dead-letters", stores).collect()
    }
    wanted: dict[Any, list[int]] = defaultdict(list)
    for (path, topic, _), messages in plain.messages.items():
        if topic.startswith("%DLQ%"):
            for message in messages.values():
                properties = message.properties
                cause = (
                    "ordered, retries used up" if "RECONSUME_TIME" in properties
                    else "never retried" if message.reconsume_times <= 1 else "retries used up"
                )  # fmt: skip
                key = path, topic.removeprefix("%DLQ%"), properties.get("RETRY_TOPIC", topic), cause
                wanted[key].append(message.store_timestamp_ms)
    assert found == {key: (len(times), max(times)) for key, times in wanted.items()}


@pytest.mark.usefixtures("with_filters")
def test_filters(stores: list[str], plain: Plain) -> None:
    found = {
        (row["store"], row["group"], row["topic"]): (row["messages"], row["matched"], row["bytes"], row["savedBytes"])
        for row in run(shared_session(), "filters", stores).collect()
    }
    wanted = {}
    for path, group, topic, expression in plain.filters:
        filter_ = SqlFilter(expression)
        messages = [message for where, _, message in plain.of(topic) if where == path]
        matched = [message for message in messages if filter_.matches(message.properties)]
        size = sum(message.size for message in messages)
        wanted[path, group, topic] = len(messages), len(matched), size, size - sum(one.size for one in matched)
    assert found == wanted


def test_reconciliation(stores: list[str], plain: Plain) -> None:
    spark = shared_session()
    keys = Counter((topic, key) for key, topic, *_ in own(plain))
    names = sorted({key for _, key in keys})
    business = names[:-3] + names[:2] + ["nobody sent this"]
    frame = spark.createDataFrame([(key,) for key in business], "id string")
    messages = spark.read.format("rocketmq").load(stores).where("topic not like '\\\\%%'")
    found = Counter(
        tuple(row) for row in reconcile(messages, frame, business_key="id").select("topic", "verdict", "key").collect()
    )
    rows = Counter(business)
    wanted: Counter[tuple[str | None, str, str]] = Counter()
    for key in {*rows} - {*names}:
        wanted[None, "missing", key] += 1
    for (topic, key), sent in keys.items():
        if not rows[key]:
            wanted[topic, "extra", key] += 1
        elif sent > rows[key]:
            wanted[topic, "repeated", key] += 1
    assert found == wanted
    late = reconcile(
        messages, frame.withColumn("at", F.lit("2020-01-01").cast("timestamp")),
        business_key="id", business_time="at", late_seconds=60,
    )  # fmt: skip
    assert late.where("verdict = 'late'").count() == sum(key in business for _, key in keys)


def test_retention(stores: list[str]) -> None:
    hours = (0.0, 0.0001, 72.0)
    rows = run(shared_session(), "retention", stores, {"hours": ",".join(map(str, hours))}).collect()
    found = {(row["store"], row["hours"]): (row["files"], row["bytes"], row["messages"]) for row in rows}
    for path in stores:
        with MessageStore.open(path, read_only=True) as store:
            size = store.config.commitlog_file_size
            by_file: dict[int, list[StoredMessage]] = defaultdict(list)
            for message in store:
                by_file[message.physical_offset // size].append(message)
        if not by_file:
            continue
        now = max(message.store_timestamp_ms for messages in by_file.values() for message in messages)
        for one in hours:
            gone = [
                messages for number, messages in by_file.items()
                if now - max(message.store_timestamp_ms for message in messages) >= one * 3_600_000
                and number < max(by_file)
            ]  # fmt: skip
            assert found[path, one] == (len(gone), len(gone) * size, sum(map(len, gone))), (path, one)


def test_a_store_alone(stores: list[str], tmp_path: Path) -> None:
    target = tmp_path / "backlog"
    run(shared_session(), "backlog", stores[0]).write.parquet(str(target))
    assert shared_session().read.parquet(str(target)).columns[0] == "store"
