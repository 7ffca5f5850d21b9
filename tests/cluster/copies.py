"""Masters and their copies, and how tests compare both."""

from __future__ import annotations

from typing import Any

from librmq import Broker, MessageStore
from librmq.cluster import Replica
from tests.broker.parties import send
from tests.stores import contents

COPY = "/copy"


def copy_of(broker: Broker, **settings: Any) -> Replica:
    settings.setdefault("of", broker)
    return Replica.open(COPY, runner=broker.runner, files=broker.store.files, **settings)


def fill(broker: Broker, count: int = 100, topic: str = "T") -> None:
    for number in range(count):
        send(broker, topic, b"%d" % number * (1 + number % 50), number % 3, keys=f"k{number}", tags="ab"[number % 2])


def log_files(store: MessageStore) -> dict[str, bytes]:
    """Return the log's bytes by file, up to its end."""
    log = store.log
    return {
        name: store.files.read(f"{store.path}/commitlog/{name}", 0, 1 << 30)[: log.end - int(name)]
        for name in (f"{start:020}" for start in log.sequence.starts)
        if log.end > int(name)
    }


def queue_files(store: MessageStore) -> dict[str, bytes | None]:
    store.flush()
    return {name: data for name, data in contents(store.files, f"{store.path}/consumequeue").items() if data}


def assert_copies(replica: Replica, broker: Broker) -> None:
    assert replica.follow()
    assert log_files(replica.store) == log_files(broker.store)
    assert queue_files(replica.store) == queue_files(broker.store)
    assert replica.store.verify().damage == ()
