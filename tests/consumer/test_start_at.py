"""`start_at` moves a group once, whatever progress it has, and one line says what `consume_from` means."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

import pytest

import librmq
from librmq import Broker, ManualClock, ManualRunner, MessageModel, Producer, PullConsumer, PushConsumer, StoreConfig
from librmq.broker import BrokerConfig
from librmq.cluster import Cluster, Replica, promote_replica
from librmq.consumer.config import StartAt
from librmq.errors import BrokerError, ConfigError, CorruptionError, MalformedError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files, file_size
from librmq.message.message import MessageQueue
from librmq.protocol import (
    ConsumeFrom,
    ResetOffsets,
    ResponseCode,
    StartGroup,
    StartOutcome,
    Subscription,
    UpdateOffset,
)
from librmq.store import snapshot
from librmq.store.format.documents import with_checksum
from librmq.testing import Kit, Process, explore
from librmq.wire.remote.remote_route import connect
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._frames import Frame, answer_to
from librmq.wire.remoting._request_codec import FORMS
from tests.broker.parties import beat
from tests.budget import examples, many, some
from tests.cluster.replica_link import ReplicaLink
from tests.file_seams import CrashImages, RecordingFiles

BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)


def open_broker(files: Files, **settings: Any) -> Broker:
    clock = ManualClock(1000 * int(BEGIN.timestamp()))
    return Broker.open("/b", store_config=StoreConfig.tiny(), files=files, runner=ManualRunner(clock), **settings)


def fill(broker: Broker) -> None:
    """Store a, b, c a minute apart, of which group g has consumed a and b."""
    broker.create_topic("t", 1)
    with Producer(broker, "p") as producer:
        for body in "abc":
            producer.send("t", body.encode())
            broker.runner.pass_time(60)
    with PullConsumer(broker, "g", pull_batch_size=2) as consumer:
        consumer.subscribe("t")
        assert len(consumer.poll()) == 2


def read(broker: Any, kind: str = "pull", many: int | None = None, **settings: Any) -> str:
    """Return what group g gets from its progress on, without ``many`` until a poll gets nothing."""
    bodies: list[bytes] = []
    if kind == "push":
        consumer = PushConsumer(broker, "g", **settings)
        consumer.subscribe("t", lambda message: bodies.append(message.body))
        with consumer:
            broker.runner.advance(5_000)
    else:
        with PullConsumer(broker, "g", **settings) as polling:
            if kind == "assign":
                polling.assign([MessageQueue("t", broker.broker_names()[0], 0)])
            else:
                polling.subscribe("t")
            while len(bodies) != many and (messages := polling.poll()):
                bodies += [message.body for message in messages]
    return b"".join(bodies).decode()


@many
@pytest.mark.parametrize("kind", ["push", "pull", "assign"])
@pytest.mark.parametrize(
    ("start_at", "expected"),
    [
        ("first", "abc"),
        ("last", ""),
        (BEGIN + timedelta(seconds=30), "bc"),
        (BEGIN + timedelta(days=1), ""),
        (1, "bc"),
        (3, ""),
        (None, "c"),
    ],
)
def test_a_group_with_progress_moves_once(kind: str, start_at: StartAt | None, expected: str) -> None:
    files = MemoryFiles()
    with open_broker(files) as broker:
        fill(broker)
        assert read(broker, kind, start_at=start_at) == expected
        assert read(broker, kind, start_at=start_at) == ""
    with open_broker(files) as broker:
        assert read(broker, kind, start_at=start_at) == ""
        assert read(broker, kind, start_at="first") == ("abc" if start_at is None else "")
        broker.delete_group("g", keep_progress=False)
        assert read(broker, kind, start_at="first") == "abc"


@pytest.mark.parametrize("kind", ["push", "pull", "assign"])
def test_an_offset_that_no_queue_has_starts_nothing(kind: str) -> None:
    with open_broker(MemoryFiles()) as broker:
        fill(broker)
        with pytest.raises(
            ConfigError, match=r"start_at: expected a queue offset up to 3, .* 2026-01-01T00:00:00\+00:00"
        ):
            read(broker, kind, start_at=1_767_225_600_000)
        assert broker.consumer_offset("g", "t") == 2
        assert read(broker, kind, start_at=1) == "bc"


def test_a_broker_whose_queues_are_shorter_starts_at_their_ends(caplog: pytest.LogCaptureFixture) -> None:
    with Cluster.open(
        "/c", ["a", "b"], files=MemoryFiles(), runner=ManualRunner(), store_config=StoreConfig.tiny()
    ) as cluster:
        cluster.create_topic("t", 1)
        producer = Producer(cluster, "p")
        for name in "aab":
            producer.send("t", b"x", queue=MessageQueue("t", name, 0))
        with PullConsumer(cluster, "g", start_at=2) as consumer:
            consumer.subscribe("t")
            assert not consumer.poll()
            assert {queue.broker_name: consumer.position(queue) for queue in consumer.assignment} == {"a": 2, "b": 1}
    assert "start_at is 2, which is beyond the end of every queue there, so it has moved it to the ends" in caplog.text


def test_further_instances_and_those_that_run(rmq: Kit) -> None:
    """The second instance finds the mark; the first instance with `start_at` moves running ones along."""
    rmq.broker.create_topic("t", 2)
    for number in range(6):
        rmq.producer().send("t", b"%d" % number)
    seen: list[bytes] = []

    def begin(**settings: Any) -> None:
        rmq.consumer("g", **settings).subscribe("t", lambda message: seen.append(message.body))
        rmq.advance(minutes=1)

    begin()
    assert len(seen) == 6
    begin(start_at="first")
    assert len(seen) == 12
    begin(start_at="first")
    begin(start_at="last")
    rmq.producer().send("t", b"6")
    rmq.advance(minutes=1)
    assert len(seen) == 13


def test_the_instance_that_starts_is_not_told_to_move() -> None:
    """Over a connection it would hear that after it has read messages, and read them again."""
    with open_broker(MemoryFiles()) as broker:
        fill(broker)
        starting, running = (beat(broker, Subscription("t"), client_id=client_id) for client_id in ("c1", "c2"))
        assert broker.call(StartGroup("g", "t", queue_offset=0, client_id="c1")) is StartOutcome.MOVED
        assert [sum(isinstance(one, ResetOffsets) for one in client.heard) for client in (starting, running)] == [0, 1]


def test_a_topic_that_comes_later_and_a_new_queue(rmq: Kit) -> None:
    seen: list[bytes] = []
    rmq.consumer("g", start_at="last").subscribe("t", lambda message: seen.append(message.body))
    rmq.run_until_idle()
    for number in range(8):
        rmq.producer().send("t", b"%d" % number)
    rmq.advance(minutes=1)
    assert len(seen) == 8  # they came after the start


@pytest.mark.slow
def test_over_tcp_and_in_a_shared_store(rmq: Kit, tmp_path: Path) -> None:
    rmq.broker.create_topic("t", 1)
    for body in "abc":
        rmq.producer().send("t", body.encode())
    with RemotingServer(rmq.broker) as server, connect(f"127.0.0.1:{server.port}") as route:
        assert read(route, many=3, consume_from=ConsumeFrom.FIRST, poll_timeout=60) == "abc"
        assert read(route, many=2, start_at=1, poll_timeout=60) == "bc"
        assert read(route, start_at=1, poll_timeout=0.3) == ""
    with librmq.share(tmp_path / "store") as owner:
        for body in "abc":
            Producer(owner, "p").send("t", body.encode())
        assert sorted(read(owner, many=3, consume_from=ConsumeFrom.FIRST, poll_timeout=60)) == list("abc")
        assert sorted(read(owner, many=3, start_at="first", poll_timeout=60)) == list("abc")
        assert read(owner, start_at="first", poll_timeout=0.3) == ""


def test_a_broker_of_rocketmq_is_refused() -> None:
    answer = answer_to(Frame(31_009, {}), ResponseCode.REQUEST_CODE_NOT_SUPPORTED, " request type 31009 not supported")
    with pytest.raises(BrokerError, match="as librmq's brokers do: move the group once by `librmq reset --route"):
        FORMS[StartGroup].read(StartGroup("g", "t"), answer)
    with pytest.raises(
        MalformedError, match="outcome: expected one of moved, moved before, no queues, beyond end, found 'x'"
    ):
        FORMS[StartGroup].read(StartGroup("g", "t"), answer_to(Frame(31_009, {}), 0, fields={"outcome": "x"}))


@pytest.mark.parametrize("over_tcp", [False, True])
def test_one_line_says_what_start_at_has_done(rmq: Kit, caplog: pytest.LogCaptureFixture, over_tcp: bool) -> None:
    rmq.broker.create_topic("t", 1)
    rmq.producer().send("t", b"a")
    caplog.set_level(logging.INFO, "librmq.consumer")
    with ExitStack() as ends:
        server = ends.enter_context(RemotingServer(rmq.broker))
        route = ends.enter_context(connect(f"127.0.0.1:{server.port}")) if over_tcp else rmq.broker
        for topics in (["t"], ["t", "new"]):
            with PullConsumer(route, "g", start_at="first") as consumer:
                for topic in topics:
                    consumer.subscribe(topic)
    lines = [line.getMessage().partition("start_at is first, which ")[2] for line in caplog.records]
    assert [line for line in lines if line] == [
        "has moved it",
        "has no effect, because an earlier start has moved it",
        "has no effect, because the topic is new: the group gets all its messages",
    ]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"start_at": "begin"}, "start_at: expected one of 'first', 'last'"),
        ({"start_at": -1}, "a whole number from 0 to"),
        ({"start_at": True}, "start_at: expected"),
        ({"start_at": 1.5}, "start_at: expected"),
        ({"start_at": datetime(2026, 1, 1)}, "a time with a time zone"),
        ({"start_at": "first", "model": MessageModel.BROADCASTING}, "a broadcasting instance keeps its progress"),
    ],
)
def test_refused(settings: dict[str, Any], error: str) -> None:
    with open_broker(MemoryFiles()) as broker:
        for kind in (PushConsumer, PullConsumer):
            with pytest.raises(ConfigError, match=error):
                kind(broker, "g", **settings)
        with pytest.raises(ConfigError, match="it says where the group starts"):
            PullConsumer(broker, "g").configure(start_at="last")


@pytest.mark.parametrize(
    "rubbish",
    [b"{", b"[]", with_checksum(b'{"startTable": {"g": 7}}'), with_checksum(b'{"startTable": {"g": {"t": "x"}}}')],
)
def test_a_damaged_file(rubbish: bytes) -> None:
    files = MemoryFiles()
    open_broker(files).close()
    assert not file_size(files, "/b/librmq/starts.json")  # no store without `start_at` has it
    files.write("/b/librmq/starts.json", rubbish)
    with pytest.raises(CorruptionError, match=r"starts\.json"):
        open_broker(files)


def test_snapshots_keep_the_mark() -> None:
    files = MemoryFiles()
    with open_broker(files) as broker:
        fill(broker)
        assert read(broker, start_at="first") == "abc"
        snapshot("/b", "/copy", files=files)
    assert files.read("/copy/librmq/starts.json") == files.read("/b/librmq/starts.json")


@pytest.mark.parametrize("replication", ["sync", "async"])
def test_a_promoted_replica_keeps_the_mark_and_the_move(replication: Literal["sync", "async"]) -> None:
    """Master and replica die before the next copy of the tables by time; a synchronous master needs no time at all."""
    files = MemoryFiles()
    master = open_broker(files, config=BrokerConfig(replication=replication))
    fill(master)
    replica = Replica.open("/replica", of=master, files=files)
    master.set_group("other")  # the tables wait for the next copy
    consumer = PullConsumer(master, "g", start_at="first", pull_batch_size=1)
    consumer.subscribe("t")
    consumer.start()
    if replication == "async":
        master.runner.pass_time(0.1)
    master.abandon()
    replica.abandon()
    promote_replica("/replica", files=files)
    with Broker.open("/replica", files=files, runner=master.runner) as promoted:
        assert read(promoted, start_at="last") == "abc"  # moved there, and not once more


def test_a_link_that_is_cut_does_not_fail_a_start() -> None:
    files = MemoryFiles()
    master = open_broker(files, config=BrokerConfig(replication="sync"))
    fill(master)
    link = ReplicaLink(master, ManualClock(0))
    replica = Replica.open("/replica", of=link, files=files, runner=master.runner)
    link.cut()
    assert read(master, start_at="first") == "abc"
    link.restore()
    master.runner.pass_time(6)  # no message comes
    replica.abandon()
    promote_replica("/replica", files=files)
    with Broker.open("/replica", files=files, runner=master.runner) as promoted:
        assert read(promoted, start_at="first") == ""


@pytest.mark.slow
def test_no_power_failure_moves_a_group_that_has_begun() -> None:
    """Once a poll has returned, the mark and the progress that it belongs to are on the device."""
    files = RecordingFiles()
    broker = open_broker(files)
    fill(broker)
    begin = len(files.trace)
    with PullConsumer(broker, "g", start_at="first", pull_batch_size=1) as consumer:
        consumer.subscribe("t")
        started = len(files.trace)
        assert consumer.poll()[0].body == b"a"
        consumer.poll()
        consumer.shutdown()
    broker.close()
    images = CrashImages(files.trace)
    for crash_point in some(range(begin, len(images))):
        with open_broker(images.image(crash_point, crash_point).files()) as again:
            rest = read(again, start_at="first")
            assert rest in (("abc", "bc", "c") if crash_point >= started else ("abc",)), crash_point
            assert read(again, start_at="first") == ""


def moved_once(rmq: Kit) -> None:
    """Two instances start a group at its first message again, while they and the broker die."""
    seen: list[bytes] = []

    def shop(process: Process) -> None:
        process.consumer("g", start_at="first").subscribe("t", lambda message: seen.append(message.body))

    rmq.broker.create_topic("t", 2)
    for number in range(4):
        rmq.producer().send("t", b"%d" % number)
    for queue_id in range(2):
        rmq.broker.call(UpdateOffset("g", "t", queue_id, 2))
    rmq.app("one", shop)
    rmq.app("two", shop)
    rmq.advance(minutes=2)
    rmq.crash_broker()
    rmq.advance(minutes=2)
    assert set(seen) == {b"0", b"1", b"2", b"3"}
    before = len(seen)
    rmq.app("three", shop)
    rmq.advance(minutes=2)
    assert len(seen) == before  # a kill before the progress is saved explains a repeat, a start does not


def test_no_schedule_moves_a_group_twice() -> None:
    assert explore(moved_once, runs=examples(50)).chosen["fault"] > 0


@pytest.mark.parametrize(("has_progress", "consume_from"), [(False, "FIRST"), (False, "LAST"), (True, "FIRST")])
def test_one_line_says_what_consume_from_means(
    caplog: pytest.LogCaptureFixture, has_progress: bool, consume_from: str
) -> None:
    with open_broker(MemoryFiles()) as broker:
        broker.create_topic("t", 1)
        if has_progress:
            fill(broker)
        caplog.set_level(logging.INFO, "librmq.consumer")
        caplog.clear()
        read(broker, "push", consume_from=ConsumeFrom[consume_from])
    (line,) = [line.getMessage() for line in caplog.records if "consume_from" in line.getMessage()]
    assert f"consume_from is {consume_from}" in line
    assert ("where the group has progress it continues, so consume_from has no effect" in line) == has_progress
