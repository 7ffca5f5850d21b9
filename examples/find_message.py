"""Find a message in a broker's directory, without changing anything there.

    python examples/find_message.py STORE TOPIC KEY

Prints every message of TOPIC that has KEY among its keys or as its unique id, and the message before it in its queue.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from librmq import MessageStore, RmqError, StoredMessage


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    path, topic, key = arguments
    try:
        # read_only takes no lock and changes no byte.
        with MessageStore.open(path, read_only=True) as store:
            found = store.find_by_key(topic, key)
            for message in found:
                show(message)
                if message.queue_offset:
                    before = store.read(topic, message.queue_id, message.queue_offset - 1, 1).messages
                    print(f"    before it: {before[0].message_id if before else 'nothing, it was removed'}")
    except RmqError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(found)} found")
    return 0


def show(message: StoredMessage) -> None:
    stored = datetime.fromtimestamp(message.store_timestamp_ms / 1000, UTC)
    print(f"{stored:%Y-%m-%d %H:%M:%S} UTC  queue {message.queue_id}, number {message.queue_offset}")
    print(f"    id: {message.message_id}")
    print(f"    properties: {dict(message.properties)}")
    print(f"    body: {len(message.body)} bytes, checksum {'right' if message.crc_ok else 'WRONG'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
