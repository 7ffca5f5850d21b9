"""The page about errors has their texts as they are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq import (
    Broker,
    BrokerConfig,
    ManualRunner,
    Message,
    MessageStore,
    Producer,
    PushConsumer,
    StoreConfig,
    SuspendQueue,
)
from librmq.errors import MissingExtraError
from tests.project.test_docs import DOCS

ROWS = re.findall(r"^\| `(.*?)` \| `(\w+)`: ", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)


def ignore(message: object) -> None:
    """Consume a message."""


def with_broker(act: Callable[[Broker], Any], config: BrokerConfig | None = None) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with Broker.temporary(config, runner=ManualRunner()) as broker:
            act(broker)

    return run


def a_second_writer(folder: Path) -> None:
    with MessageStore.open(folder):
        MessageStore.open(folder)


def a_closed_store(folder: Path) -> None:
    store = MessageStore.open(folder)
    store.close()
    store.append(Message("orders", b"x"))


def a_read_only_store(folder: Path) -> None:
    MessageStore.open(folder).close()
    with MessageStore.open(folder, read_only=True) as store:
        store.append(Message("orders", b"x"))


def a_cut_file(folder: Path) -> None:
    with MessageStore.open(folder, StoreConfig.tiny()) as store:
        for _ in range(40):
            store.append(Message("orders", b"x" * 4000))
    os.truncate(sorted((folder / "commitlog").iterdir())[1], 100)
    MessageStore.open(folder)


def a_long_body(folder: Path) -> None:
    with MessageStore.open(folder, StoreConfig.tiny()) as store:
        store.append(Message("orders", b"x" * 70_000))


def a_closed_broker(folder: Path) -> None:
    broker = Broker.temporary(runner=ManualRunner())
    producer = Producer(broker, "shop").start()
    broker.close()
    producer.send("orders", b"x")


def two_listeners(broker: Broker) -> None:
    consumer = PushConsumer(broker, "billing")
    consumer.subscribe("orders", ignore)
    consumer.subscribe("orders", ignore)


def a_second_start(broker: Broker) -> None:
    consumer = PushConsumer(broker, "billing")
    consumer.subscribe("orders", ignore)
    consumer.start()
    consumer.shutdown()
    consumer.start()


def a_group_that_is_behind(broker: Broker) -> None:
    broker.create_topic("orders", 1)
    consumer = PushConsumer(broker, "billing", orderly=True)

    @consumer.subscribe("orders")
    def wait(message: object) -> None:
        raise SuspendQueue(seconds=3600)

    consumer.start()
    Producer(broker, "shop").send("orders", b"x")
    broker.join(timeout=1)


def an_extra(folder: Path) -> None:
    raise MissingExtraError("a dedup store in Redis", "redis")


NO_TOPICS = BrokerConfig(auto_create_topic=False)
ERRORS: list[Callable[[Path], object]] = [
    a_second_writer,
    lambda folder: MessageStore.open(folder, read_only=True).close(),
    a_closed_store,
    a_read_only_store,
    a_cut_file,
    a_long_body,
    with_broker(lambda broker: Producer(broker, "shop").send("orders", b"")),
    with_broker(lambda broker: Producer(broker, "shop").send_batch([Message("orders", b"x" * 10**6)] * 6)),
    with_broker(lambda broker: Producer(broker, "shop").send("orders", b"x", delay=timedelta(seconds=90))),
    with_broker(lambda broker: Producer(broker, "shop").send("SELF_TEST_TOPIC", b"x")),
    with_broker(lambda broker: Producer(broker, "shop").send("orders", b"x"), NO_TOPICS),
    with_broker(lambda broker: broker.reset_group("billing", "orders", "begin")),
    a_closed_broker,
    with_broker(two_listeners),
    with_broker(a_second_start),
    with_broker(lambda broker: PushConsumer(broker, "billing", thread=3)),  # type: ignore[call-arg]
    lambda folder: PushConsumer("data", "billing"),  # type: ignore[arg-type]
    lambda folder: librmq.connect("127.0.0.1:1"),
    with_broker(lambda broker: PushConsumer(broker, "billing").subscribe("orders", ignore, sql="amount >> 5")),
    with_broker(a_group_that_is_behind),
    an_extra,
]


def test_log_lines_are_as_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = (DOCS / "troubleshooting.md").read_text("utf-8").partition("## Log lines")[2].partition("\n## ")[0]
    shown = re.findall(r"^\| `(.*?)` \|", part, re.MULTILINE)
    store = MessageStore.open(tmp_path / "store")
    store.append(Message("orders", b"x"))
    store.abandon()
    MessageStore.open(tmp_path / "store").close()
    runner = ManualRunner()
    with Broker.temporary(runner=runner) as broker:
        consumer = PushConsumer(broker, "billing", max_reconsume_times=1)
        consumer.subscribe("orders", lambda message: 1 // 0)
        consumer.start()
        Producer(broker, "shop").send("orders", b"x", keys="o-1")
        runner.advance(60_000)
    lines = [record.getMessage() for record in caplog.records]
    assert len(shown) > 1
    for text in shown:
        pattern = ".*".join(map(re.escape, text.split("…")))
        assert any(re.fullmatch(pattern, line) for line in lines), (text, lines)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "provoke"), list(zip(ROWS, ERRORS, strict=True)), ids=[text for text, _ in ROWS])
def test_an_error_has_the_text_of_its_row(
    row: tuple[str, str], provoke: Callable[[Path], object], tmp_path: Path
) -> None:
    text, name = row
    kind = TypeError if name == "TypeError" else vars(librmq.errors)[name]
    with pytest.raises(kind) as caught:
        provoke(tmp_path / "store")
    assert type(caught.value).__name__ == name
    pattern = ".*".join(map(re.escape, text.split("…")))
    assert re.fullmatch(pattern, str(caught.value), re.DOTALL)
