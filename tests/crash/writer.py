"""A writer in a process of its own: it reads one step per line of JSON, and prints the result."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from typing import Any

from librmq.config import StoreConfig
from librmq.message.message import Message
from librmq.store import MessageStore

CONFIG = StoreConfig(
    commitlog_file_size=16 << 10,
    consumequeue_file_size=50 * 20,
    consumequeue_ext_file_size=1 << 10,
    max_hash_slot_num=50,
    max_index_num=200,
    max_message_size=3000,
)
"""Settings with files so small that they roll all the time."""


def message_of(number: int) -> tuple[Message, int]:
    """Return the message with this number, and its queue; the number determines everything."""
    rng = random.Random(number)
    body = rng.randbytes(rng.choice([0, 1, 30, 300, 900]))
    tags = rng.choice([None, "TagA"])
    return Message("T", body, tags=tags, keys=[f"k{number}", "all"], properties={"n": str(number)}), number % 3


def append(store: MessageStore, number: int) -> tuple[Any, ...]:
    return store.append(*message_of(number))[:3]


def do(store: MessageStore, what: str, given: list[Any]) -> Any:
    match what:
        case "append":
            return [append(store, number) for number in range(*given)]
        case "each":
            for number in range(*given):
                print(json.dumps(append(store, number)), flush=True)
        case "batch":
            return [result[:3] for result in store.append_batch([message_of(number)[0] for number in range(*given)], 1)]
        case "flush":
            store.flush()
        case "expire":
            for _ in range(100):
                if store.run_due(store.clock.now_ms()) is None:
                    break
            return store.log.begin
        case "close":
            store.close()
    return None


def main() -> None:
    store: Any = None
    for line in sys.stdin:
        what, *given = json.loads(line)
        if what == "open":
            store = MessageStore.open(given[0], replace(CONFIG, **given[1]), background=False)
        print(json.dumps(do(store, what, given)), flush=True)


if __name__ == "__main__":
    main()
