"""The sixth step of the demo: the directory of a real broker, read, appended to, and recovered after a kill.

    python examples/demo_broker.py [FOLDER]      (./demo runs it after librmq demo, which makes FOLDER)

``./demo --store`` is the long version.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from demo_store import append_in_a_process_that_dies, run_part, unpack
from librmq import MessageStore
from librmq.cli._demo import Screen


def look(broker: Path, killed: Path, accepted: set[int]) -> None:
    with MessageStore.open(broker, read_only=True) as store:  # takes no lock
        orders = store.find_by_key("OrderTopic", "key14")
        print(f"{len(store.queues)} queues; key14 is in {len(orders)} orders")
    with MessageStore.open(killed) as store:  # a copy; its writer was killed
        print("lost:", accepted - {order.physical_offset for order in store})


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0] if arguments else "demo-output")
    broker, killed = folder / "broker", folder / "killed"
    unpack(folder)
    shutil.copytree(broker, killed)
    with MessageStore.open(broker, read_only=True) as store:
        messages = list(store)
    appended = append_in_a_process_that_dies(killed, messages[-1].store_timestamp_ms + 60_000)
    screen = Screen(sys.stdout)
    screen.title("6  The directory of a RocketMQ 4.9.4 broker, and a writer killed in it")
    logging.getLogger("librmq").addHandler(logging.NullHandler())  # the screen shows the same
    screen.run(look, broker, killed, {*appended, *(message.physical_offset for message in messages)})
    return 0


if __name__ == "__main__":
    run_part(main)
