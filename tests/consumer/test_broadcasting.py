"""Broadcasting: each instance gets all messages, and keeps its progress in its own file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from librmq.client.client import Client
from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.errors import ConfigError, MalformedError, StoreIOError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.files.interface import file_size
from librmq.listener import ReconsumeLater
from librmq.protocol import ConsumeFrom, ConsumerIds, MessageModel
from librmq.testing import Kit
from tests.consumer.parties import bodies, send

PATH = "/offsets/127.0.0.1@b1/g/offsets.json"


def broadcasting(
    rmq: Kit, name: str = "b1", listener: Any = lambda message: None, topic: str = "t", **settings: Any
) -> PushConsumer:
    """Return a started consumer whose client has the same id after each start."""
    client = Client(rmq.route, host=("127.0.0.1", 0), instance_name=name)
    usual: dict[str, Any] = {"files": rmq.files, "offsets_folder": "/offsets", "consume_from": ConsumeFrom.FIRST}
    consumer = PushConsumer(rmq.route, "g", client=client, model=MessageModel.BROADCASTING, **usual | settings)
    consumer.subscribe(topic, listener)
    return consumer.start()


def test_each_instance_keeps_its_progress_in_a_file(one_queue: Kit) -> None:
    first, _ = (broadcasting(one_queue, name) for name in ("b1", "b2"))
    send(one_queue, "a", "b")
    one_queue.advance(ms=9_900)
    assert file_size(one_queue.files, PATH) is None
    one_queue.advance(ms=100)
    assert one_queue.files.read(PATH).decode() == (
        '{\n\t"offsetTable":{{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":0,\n\t\t\t"topic":"t"\n\t\t}:2\n\t}\n}'
    )
    first.shutdown()
    send(one_queue, "c")
    one_queue.run_until_idle()
    broadcasting(one_queue)
    one_queue.run_until_idle()
    assert bodies(one_queue, "b1") == ["a", "b", "c"]
    assert bodies(one_queue, "b2") == ["a", "b", "c"]
    assert one_queue.broker.consumer_offsets("g", "t") == {}


def test_on_disk(one_queue: Kit, tmp_path: Path) -> None:
    folder: dict[str, Any] = {"files": DiskFiles(), "offsets_folder": str(tmp_path)}
    for _ in range(2):
        consumer = broadcasting(one_queue, **folder)
        send(one_queue, "a")
        one_queue.advance(seconds=10)
        consumer.shutdown()
    assert bodies(one_queue) == ["a", "a"]
    assert (tmp_path / "127.0.0.1@b1" / "g" / "offsets.json").stat().st_size
    with pytest.raises(ConfigError, match="can't be the name of a folder"):
        broadcasting(one_queue, "../b1", **folder)


def test_failures_are_dropped(one_queue: Kit) -> None:
    one_queue.expect("lost")

    def fail(message: DeliveredMessage) -> None:
        raise ReconsumeLater

    broadcasting(one_queue, listener=fail)
    send(one_queue, "a")
    one_queue.advance(hours=1)
    assert bodies(one_queue) == ["a"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"offsetTable":{"a":1}}', '{"offsetTable":3}'])
def test_unreadable_progress_is_taken_from_the_copy(one_queue: Kit, text: str) -> None:
    """If no copy of the progress can be read, the start is refused."""
    consumer = broadcasting(one_queue)
    for body in "ab":
        send(one_queue, body)
        one_queue.advance(seconds=10)
    consumer.shutdown()
    one_queue.files.write(PATH, text.encode())
    broadcasting(one_queue).shutdown()
    assert bodies(one_queue) == ["a", "b"]
    one_queue.run_until_idle()
    one_queue.files.write(PATH, text.encode())
    broadcasting(one_queue)
    one_queue.run_until_idle()
    assert bodies(one_queue) == ["a", "b", "b"]
    for path in (PATH, PATH + ".bak"):
        one_queue.files.write(path, b"{")
    with pytest.raises(MalformedError, match=r"offsets\.json"):
        broadcasting(one_queue)


class FullDisk(MemoryFiles):
    is_full = False

    def write(self, path: str, data: bytes | Iterable[bytes]) -> None:
        if self.is_full:
            raise StoreIOError("write", path, OSError(28, "no space left"))
        super().write(path, data)


def test_progress_that_cannot_be_saved_is_saved_later(one_queue: Kit) -> None:
    """A full disk does not keep the consumer in its group either."""
    files = FullDisk()
    files.make_folder("/offsets")
    consumer = broadcasting(one_queue, files=files)
    send(one_queue, "a")
    files.is_full = True
    one_queue.advance(seconds=12)
    files.is_full = False
    one_queue.advance(seconds=3)
    assert b":1" in files.read(PATH)
    send(one_queue, "b")
    one_queue.run_until_idle()
    files.is_full = True
    assert consumer.shutdown()
    assert b":1" in files.read(PATH)
    assert one_queue.broker.call(ConsumerIds("g")) == ()


@pytest.mark.parametrize("start", list(ConsumeFrom))
def test_the_message_that_creates_its_topic_is_delivered(rmq: Kit, start: ConsumeFrom) -> None:
    """The first send to a new topic created queues whose first messages were never delivered (issue 14, 2.4)."""
    broadcasting(rmq, topic="new", consume_from=start)
    send(rmq, "before the first rebalance", topic="new", queue=0)
    rmq.advance(seconds=1)
    send(rmq, "after it", topic="new", queue=1)
    rmq.advance(seconds=1)
    rmq.broker.create_topic("new", 6)
    send(rmq, "in a queue that is new", topic="new", queue=5)
    rmq.advance(seconds=1)
    assert bodies(rmq) == ["before the first rebalance", "after it", "in a queue that is new"]


def test_messages_before_the_start_are_skipped(rmq: Kit) -> None:
    send(rmq, "old", queue=0)
    broadcasting(rmq, consume_from=ConsumeFrom.LAST)
    rmq.advance(seconds=1)
    send(rmq, "new", queue=0)
    rmq.advance(seconds=1)
    assert bodies(rmq) == ["new"]
