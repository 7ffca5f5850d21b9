"""Plain requests, clients that only record, and brokers that the kit cannot create.

Prefer the kit's broker (fixtures ``rmq`` and ``broker``). Use `opened` when a test closes and reopens its broker, when
the files fail or already have content, or when the settings differ within one test.
"""

from __future__ import annotations

from typing import Any

from librmq import protocol
from librmq.broker import Broker, BrokerConfig
from librmq.config import StoreConfig
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Files
from librmq.message.message import Message
from librmq.runtime import ManualRunner
from librmq.runtime.runner import Runner

HOST = ("192.168.1.10", 54321)


def opened(
    files: Files | None = None, runner: Runner | None = None, *, store: StoreConfig | None = None, **settings: Any
) -> Broker:
    return Broker.open(
        "/b",
        BrokerConfig(**settings),
        files=files or MemoryFiles(),
        runner=runner or ManualRunner(),
        store_config=store or StoreConfig.tiny(),
    )


def broker_directory() -> MemoryFiles:
    """Return files with a store that looks as if a broker of 4.9 had made it."""
    files = MemoryFiles()
    with opened(files) as broker:
        send(broker, "First", b"first")
    files.delete("/b/librmq/config.json")
    return files


def manual(broker: Broker) -> ManualRunner:
    assert isinstance(broker.runner, ManualRunner)
    return broker.runner


def send(broker: Broker, topic: str, body: bytes = b"x", queue_id: int = 0, **fields: Any) -> protocol.SendResponse:
    names = ("sys_flag", "default_queues", "reconsume_times", "max_reconsume_times")
    of_request = {name: fields.pop(name) for name in names if name in fields}
    message = Message(topic, body, **fields)
    return broker.call(protocol.SendMessage("p", message, queue_id, 1_600_000_000_000, HOST, **of_request))


def pull(broker: Broker, topic: str, queue_offset: int = 0, queue_id: int = 0, **fields: Any) -> protocol.PullResponse:
    fields.setdefault("subscription", protocol.Subscription(topic))
    return broker.call(protocol.PullMessage("c1", "g", topic, queue_id, queue_offset, **fields))


class Listening:
    """A client that records the requests it gets from the broker."""

    def __init__(self) -> None:
        self.heard: list[protocol.Request[Any]] = []

    def call(self, request: protocol.Request[Any], /) -> Any:
        self.heard.append(request)


def beat(
    broker: Broker,
    *subscriptions: protocol.Subscription,
    client_id: str = "c1",
    group: str = "g",
    client: Listening | None = None,
    model: protocol.MessageModel = protocol.MessageModel.CLUSTERING,
) -> Listening:
    client = client or Listening()
    told = {one.topic: one for one in subscriptions}
    consumers = (protocol.ConsumerData(group, "push", model, protocol.ConsumeFrom.LAST, told),)
    broker.call(protocol.Heartbeat(client_id, client, frozenset(), consumers))
    return client
