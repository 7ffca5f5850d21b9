"""Use a durable log inside an application: append, continue reading, find by key, flush.

    python examples/embed_log.py [FOLDER]      (a temporary folder unless given)

Run it twice with the same FOLDER: the second run continues where the first one stopped.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator

from librmq import Message, MessageStore, StoreConfig, StoredMessage


def main(path: str) -> None:
    # StoreConfig() has small files that grow in number; a broker's have 1 GiB each.
    with MessageStore.open(path, StoreConfig()) as store:
        # append returns when the message is in the page cache: it survives this process, not the machine.
        for number in range(3):
            message = Message("payments", f"payment {number}".encode(), tags="card", keys=f"invoice-{number}")
            result = store.append(message)
            print(f"appended as number {result.queue_offset} of queue 0, at {result.physical_offset} of the log")

        # Several messages, all or none.
        store.append_batch([Message("payments", b"fee 0"), Message("payments", b"fee 1")], queue_id=1)

        # After flush the messages survive the machine too.
        store.flush()

        for stored in all_of(store, "payments", 0):
            print(f"  {stored.queue_offset}: {stored.body.decode()}, {stored.tags}")

        found = store.find_by_key("payments", "invoice-1")
        print(f"invoice-1: {len(found)} found, the last is number {found[-1].queue_offset}")


def all_of(store: MessageStore, topic: str, queue_id: int) -> Iterator[StoredMessage]:
    """Yield the messages of a queue: each read returns some of them, and the offset of the next read."""
    result = store.read(topic, queue_id, 0)
    while result.messages:
        yield from result.messages
        result = store.read(topic, queue_id, result.next_offset)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
