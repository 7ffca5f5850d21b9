"""Stores of RocketMQ 5, beside what its clients and mqadmin knew of them: each line of the truth files is asserted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, MessageIllegalError, Producer
from librmq.diagnosis import StoreView, diagnose, pending_messages, story
from librmq.diagnosis.view import group_summaries, topic_summaries
from librmq.message.properties import PropertyName
from librmq.message.topics import SystemTopic
from librmq.wire.remoting._frames import Frame
from librmq.wire.remoting._request_codec import read_pulled
from tests.reference import existing, unpack


@pytest.fixture(scope="module", params=["v2", "bcq"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a store and its truth; the tables of ``v2`` are in RocksDB."""
    name = request.param
    if name == "v2":
        pytest.importorskip("rocksdict")
    truth: dict[str, Any] = json.loads(existing("store-5.3.3", f"{name}-truth.json").read_text())
    folder = tmp_path_factory.mktemp("truth")
    unpack(existing("store-5.3.3", f"{name}.tar.xz"), folder)
    return folder / name, truth


def test_each_line_of_the_truth(store: tuple[Path, dict[str, Any]]) -> None:
    path, truth = store
    assert truth.keys() == {
        "broker", "stopped", "messages", "lag", "dead_letters", "pending", "recalled", "pop_acknowledged",
    }  # fmt: skip
    assert (path / "abort").exists() == (truth["stopped"] == "kill -9")
    with StoreView.open(path) as view:
        messages = {row.topic: row.messages for row in topic_summaries(view) if row.kind == "user"}
        assert messages == truth["messages"]
        groups = list(group_summaries(view, includes_own=False))
        assert {row.group: row.lag for row in groups} == truth["lag"]
        assert sum(row.dead_letters for row in groups) == truth["dead_letters"]
        assert Counter(row.kind for row in pending_messages(view.store, view.tables)) == truth["pending"]
        timers = list(view.store.messages(SystemTopic.TIMER, 0))
        assert sum(PropertyName.TIMER_DELETE_KEY in message.properties for message in timers) == truth["recalled"]
        popped = [event for message in view.store.messages("pop", 0) for event in story(view, message.unique_key or "")]
        acknowledged = [event for event in popped if event.note == "received by POP and acknowledged"]
        assert len(acknowledged) == truth["pop_acknowledged"]
        assert sum("not acknowledged" in event.note for event in popped) == truth["pending"]["pop"]


def test_what_such_a_broker_does_not_store_is_no_finding(store: tuple[Path, dict[str, Any]]) -> None:
    """With ``configManagerVersion=v2`` it stores neither topics of dead letters nor groups that it made by itself."""
    kinds = {finding.kind for finding in diagnose(store[0])}
    assert not kinds & {"unlisted-topic", "unlisted-group"}


def test_a_refused_delay_names_the_maker_of_the_store(tmp_path: Path) -> None:
    unpack(existing("store-5.3.3", "tx3.tar.xz"), tmp_path)
    with Broker.open(tmp_path / "tx3") as broker, Producer(broker, "shop") as producer:
        broker.create_topic("orders", 1)
        with pytest.raises(MessageIllegalError, match=r"made by RocketMQ 5, .* BrokerConfig\(timers=") as caught:
            producer.send("orders", b"x", delay=7)
    assert "4.9" not in str(caught.value)


def test_a_client_reads_what_the_log_has(store: tuple[Path, dict[str, Any]]) -> None:
    """A broker sends the records of its log: a batch of a topic with queues of batches is one of them."""
    fields = {"nextBeginOffset": "1", "minOffset": "0", "maxOffset": "1", "suggestWhichBrokerId": "0"}
    with StoreView.open(store[0]) as view:
        for topic, count in store[1]["messages"].items():
            records = b"".join(record.raw for record in view.store.log if record.topic == topic)
            pulled, _ = read_pulled(Frame(0, fields, records))
            expected = [message.raw for message in view.store.topic_messages(topic)]
            assert sorted(message.raw for message in pulled.messages) == sorted(expected)
            assert len(expected) == count
