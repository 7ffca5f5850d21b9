"""``replay --route``: the messages of a store arrive in a cluster, once each, as far as nothing fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence

import pytest

from librmq import Broker, BrokerConfig, Message, MessageStore, Producer
from librmq.clock import ManualClock
from librmq.protocol import ResponseCode
from librmq.store.format.documents import with_checksum
from librmq.wire.remoting import RemotingServer
from librmq.wire.remoting._frames import Frame, answer_to
from tests.cli.stand import Shell
from tests.wire.fake_servers import FakeServer

BEGIN_MS = 1_700_000_000_000


@pytest.fixture
def filled(shell: Shell) -> Shell:
    """The folder ``full``: two topics with a queue and two queues, and a message that waits."""
    with Broker.open("full") as broker:
        broker.create_topic("orders", 2)
        broker.create_topic("bills", 1)
        with Producer(broker, "shop") as producer:
            for number in range(12):
                tags = "big" if number > 8 else None
                producer.send(
                    "orders", b"%d" % number, queue=number % 2, keys=["k", "l"], tags=tags, properties={"a": "b"}
                )
            producer.send("bills", b"bill")
            producer.send("bills", b"later", delay_level=3)
    return shell


def bodies(broker: Broker, topic: str) -> list[bytes]:
    return sorted(message.body for message in broker.messages(topic))


def test_messages_arrive_as_they_were(filled: Shell, cluster: Broker, server: RemotingServer) -> None:
    """Messages of one queue stay in order; those that still wait for their time are not sent."""
    cluster.create_topic("orders", 2)
    rows = filled("replay", "full", "--route", server.address).rows
    assert rows == [
        {"topic": "bills", "messages": 1, "body_bytes": 4, "unconfirmed": 0, "dry_run": False},
        {"topic": "orders", "messages": 12, "body_bytes": 14, "unconfirmed": 0, "dry_run": False},
    ]
    assert bodies(cluster, "bills") == [b"bill"]
    queues: dict[int, list[int]] = {}
    for message in cluster.messages("orders"):
        queues.setdefault(message.queue_id, []).append(int(message.body))
        assert (message.keys, message.properties["a"]) == (("k", "l"), "b")
    assert queues == {0: [0, 2, 4, 6, 8, 10], 1: [1, 3, 5, 7, 9, 11]}
    with MessageStore.open("full", read_only=True) as store:
        sent = {message.unique_key for message in store if message.topic == "orders"}
    assert {message.unique_key for message in cluster.messages("orders")} == sent


def test_priorities_name_the_queue_again(shell: Shell, cluster: Broker, server: RemotingServer) -> None:
    with Broker.open("full") as broker:
        broker.create_topic("jobs", 2, message_type="PRIORITY")
        with Producer(broker, "shop") as producer:
            for priority in (3, None, 0, 3):
                producer.send("jobs", b"%d" % (priority or 0), priority=priority)
    cluster.create_topic("jobs", 4, message_type="PRIORITY")
    (row,) = shell("replay", "full", "--route", server.address).rows
    assert row["messages"] == 4
    with_priority = [(one.priority, one.queue_id) for one in cluster.messages("jobs") if one.priority is not None]
    assert sorted(with_priority) == [(0, 0), (3, 3), (3, 3)]


def test_large_compressed_bodies_are_sent(shell: Shell, cluster: Broker, server: RemotingServer) -> None:
    """Together they are small in the store, and too large for a batch."""
    with Broker.open("full") as broker, Producer(broker, "shop") as producer:
        broker.create_topic("orders", 1)
        for size in (1_000_000, 4_000_000):
            producer.send("orders", bytes(size))
    cluster.create_topic("orders", 1)
    assert [row["messages"] for row in shell("replay", "full", "--route", server.address).rows] == [2]
    assert [len(message.body) for message in cluster.messages("orders")] == [1_000_000, 4_000_000]


def test_a_dry_run_asks_for_the_topic(filled: Shell) -> None:
    with Broker.temporary(BrokerConfig(auto_create_topic=False)) as cluster, RemotingServer(cluster) as server:
        answer = filled("replay", "full", "--route", server.address, "--dry-run")
        assert (answer.status, "no broker has it" in answer.said) == (2, True)
        cluster.create_topic("orders", 2)
        cluster.create_topic("bills", 1)
        assert filled("replay", "full", "--route", server.address, "--dry-run").status == 0


def test_a_repeated_call_sends_only_what_is_new(filled: Shell, cluster: Broker, server: RemotingServer) -> None:
    words = ("replay", "full", "--route", server.address, "--topic", "orders", "--tag", "big")
    assert [row["messages"] for row in filled(*words).rows] == [3]
    assert filled(*words).rows == []
    with Broker.open("full") as broker, Producer(broker, "shop") as producer:
        producer.send("orders", b"new", tags="big")
    assert [row["messages"] for row in filled(*words, "--dry-run").rows] == [1]
    assert [row["messages"] for row in filled(*words).rows] == [1]
    assert bodies(cluster, "orders") == [b"10", b"11", b"9", b"new"]
    assert [row["messages"] for row in filled(*words, "--from-start").rows] == [4]


def test_a_failed_call_continues_where_it_ended(filled: Shell) -> None:
    """The cluster has no topic for the last message of the store, until it is made."""
    with Broker.temporary(BrokerConfig(auto_create_topic=False)) as cluster, RemotingServer(cluster) as server:
        cluster.create_topic("orders", 2)
        failed = filled("replay", "full", "--route", server.address)
        assert (failed.status, len(bodies(cluster, "orders"))) == (2, 12)
        cluster.create_topic("bills", 1)
        rows = filled("replay", "full", "--route", server.address).rows
        assert [(row["topic"], row["messages"]) for row in rows] == [("bills", 1)]
        assert len(bodies(cluster, "orders")) == 12


@pytest.fixture
def aged(shell: Shell) -> Shell:
    """The folder ``full``: a message of ``orders`` at minute 0, and one of ``bills`` at minute 10."""
    clock = ManualClock(BEGIN_MS)
    with MessageStore.open("full", clock=clock) as store:
        store.append(Message("orders", b"first"))
        clock.advance(minutes=10)
        store.append(Message("bills", b"second"))
    return shell


def at_minute(monkeypatch: pytest.MonkeyPatch, minute: int) -> None:
    """Set the time from which commands count ages."""
    monkeypatch.setattr("librmq.cli._selection.SystemClock", lambda: ManualClock(BEGIN_MS + 60_000 * minute))


def test_what_was_too_new_is_sent_by_a_later_call(
    aged: Shell, cluster: Broker, server: RemotingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("replay", "full", "--route", server.address, "--until", "15m")
    at_minute(monkeypatch, 20)
    assert [row["topic"] for row in aged(*words).rows] == ["orders"]
    at_minute(monkeypatch, 30)
    assert [row["topic"] for row in aged(*words).rows] == ["bills"]
    assert aged(*words).rows == []


def test_an_age_counts_from_the_call_that_failed(aged: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster takes the second message when it is older than the age."""
    with Broker.temporary(BrokerConfig(auto_create_topic=False)) as cluster, RemotingServer(cluster) as server:
        cluster.create_topic("orders", 1)
        words = ("replay", "full", "--route", server.address, "--since", "1h")
        at_minute(monkeypatch, 30)
        assert aged(*words).status == 2
        cluster.create_topic("bills", 1)
        at_minute(monkeypatch, 100)
        assert [row["topic"] for row in aged(*words).rows] == ["bills"]
        assert aged(*words, "--from-start").rows == []


def test_a_dry_run_sends_and_notes_nothing(filled: Shell, cluster: Broker, server: RemotingServer) -> None:
    rows = filled("replay", "full", "--route", server.address, "--dry-run", "--until", "1h").rows
    assert rows == []
    rows = filled("replay", "full", "--route", server.address, "--dry-run").rows
    assert [row["messages"] for row in rows] == [1, 12]
    assert "orders" not in cluster.topics()
    assert not (filled.folder / "full" / "librmq" / "replay.json").exists()


def fill(folder: str, *bodies: bytes, begin_ms: int = BEGIN_MS) -> None:
    """Store messages, one in each minute from a time on."""
    clock = ManualClock(begin_ms)
    with MessageStore.open(folder, clock=clock) as store:
        for body in bodies:
            clock.advance(minutes=1)
            store.append(Message("orders", body))


def cut_and_grow(shell: Shell, kept: Sequence[bytes], *bodies: bytes) -> None:
    """Make the folder ``cut``: as ``full`` would be after its log was cut behind some messages, and has grown again."""
    fill("cut", *kept)
    fill("cut", *bodies, begin_ms=BEGIN_MS + 3_600_000)
    shutil.copy(shell.folder / "full" / "librmq" / "replay.json", shell.folder / "cut" / "librmq" / "replay.json")


@pytest.mark.slow
@pytest.mark.parametrize("grown", [(b"4",), (b"4", b"5"), (b"4", b"5", b"6", b"7")])
def test_a_log_that_was_cut_since_is_refused(
    shell: Shell, cluster: Broker, server: RemotingServer, grown: tuple[bytes, ...]
) -> None:
    """It is shorter than at the last replay, as long, or longer."""
    fill("full", b"1", b"2", b"3")
    assert [row["messages"] for row in shell("replay", "full", "--route", server.address).rows] == [3]
    cut_and_grow(shell, [b"1"], *grown)
    words = ("replay", "cut", "--route", server.address)
    refused = shell(*words)
    assert refused.status == 2
    assert "the log was cut before that since then" in refused.said
    assert "--from-start" in refused.said
    assert len(bodies(cluster, "orders")) == 3
    assert [row["messages"] for row in shell(*words, "--from-start").rows] == [1 + len(grown)]
    assert shell(*words).rows == []


def test_a_log_that_was_cut_behind_the_place_continues(shell: Shell, cluster: Broker, server: RemotingServer) -> None:
    fill("full", b"1", b"2")
    assert [row["messages"] for row in shell("replay", "full", "--route", server.address).rows] == [2]
    cut_and_grow(shell, [b"1", b"2"], b"5")
    assert [row["messages"] for row in shell("replay", "cut", "--route", server.address).rows] == [1]
    assert bodies(cluster, "orders") == [b"1", b"2", b"5"]


def test_messages_without_a_confirmation_are_counted(filled: Shell) -> None:
    """The cluster stores them, and says that their flush took too long."""

    def answer(frame: Frame) -> Frame:
        fields = {"msgId": "0" * 32, "queueId": "0", "queueOffset": "0"}
        return answer_to(frame, ResponseCode.FLUSH_DISK_TIMEOUT, "FLUSH_DISK_TIMEOUT", fields=fields)

    with FakeServer(answer) as server:
        done = filled("replay", "full", "--route", server.address, "--topic", "orders")
    assert [(row["messages"], row["unconfirmed"]) for row in done.rows] == [(12, 12)]
    assert done.status == 0
    assert "12 messages without confirming how safely (12 FLUSH_DISK_TIMEOUT)" in done.said


def test_wrong_words_are_refused(filled: Shell) -> None:
    assert "expected --group, --topic and --to; or --route" in filled("replay", "full", "--topic", "orders").said
    both = filled("replay", "full", "--route", "127.0.0.1:1", "--to", "g")
    assert "leave them out with --route" in both.said
    place = {"physical_offset": 0}
    for wrong in ({"a": 1}, {"a": place | {"record": 5}}, {"a": place | {"record": [0, 0, 0]}}, {"a": {"since_ms": 1}}):
        (filled.folder / "full" / "librmq" / "replay.json").write_bytes(with_checksum(json.dumps(wrong).encode()))
        assert "delete it to begin at the start" in filled("replay", "full", "--route", "127.0.0.1:1").said
