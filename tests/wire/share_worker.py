"""A process that shares a store: it sends numbered messages, consumes them, and writes a history.

Words: the store, the process's name, the folder of histories, and options as JSON: ``rate`` of sends a second, the
``queue`` that gets them, ``group`` to consume in, ``share`` and ``producer``, the settings of both. Prints a line
``ready``, then ``sent`` or ``refused`` with the seconds and the error for each send. A line of input ends its sends,
the end of the input the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import librmq
from librmq.clock import SystemClock


def main(store: str, name: str, folder: str, options: dict[str, Any]) -> None:
    """Work until the input ends."""
    ending, clock = threading.Event(), SystemClock()
    files = librmq.StoreConfig(commitlog_file_size=1 << 20)  # since a recovery reads the last file
    shared = librmq.share(store, store_config=files, **options.get("share", {}))
    history = librmq.record_history(shared, os.path.join(folder, f"{name}.jsonl"), process=name)
    group, rate = options.get("group"), options.get("rate", 0)
    with shared, history, librmq.Producer(history, "shop", **options.get("producer", {})) as producer:
        consumer = None
        if group:
            consumer = librmq.PushConsumer(history, str(group), consume_from=librmq.ConsumeFrom.FIRST)
            consumer.subscribe("orders", lambda message: None)
            consumer.start()

        queue = options.get("queue")

        def send() -> None:
            number, begin = 0, clock.monotonic()
            while not ending.is_set():
                started = clock.monotonic()
                try:
                    producer.send("orders", f"{name} {number}".encode(), keys=f"{name}-{number}", queue=queue)
                    print(f"sent {clock.monotonic() - started:.3f}", flush=True)
                except librmq.RmqError as error:
                    print(f"refused {clock.monotonic() - started:.3f} {error}", flush=True)
                number += 1
                ending.wait(max(0.0, begin + number / float(str(rate)) - clock.monotonic()))

        print("ready", os.getpid(), flush=True)
        thread = threading.Thread(target=send) if rate else None
        if thread is not None:
            thread.start()
        sys.stdin.readline()
        ending.set()
        if thread is not None:
            thread.join()
        sys.stdin.read()
        if consumer is not None:
            consumer.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
