"""What a process does that shares a store: it sends numbered messages, consumes them, and writes a history."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from librmq import ConsumeFrom, Producer, PushConsumer, RmqError, StoreConfig, record_history, share
from librmq.clock import SystemClock


def work(store: Path, name: str, folder: Path, options: dict[str, Any]) -> None:
    """Work until the input ends; a line of input ends the sends.

    Options are the ``rate`` of sends a second, the ``queue`` that gets them, the ``group`` to consume in, and settings
    of ``share`` and ``producer``. Prints a line ``ready``, then ``sent`` or ``refused`` with the seconds and the error
    for each send.
    """
    ending, clock = threading.Event(), SystemClock()
    files = StoreConfig(commitlog_file_size=1 << 20)  # since a recovery reads the last file
    shared = share(store, store_config=files, **options.get("share", {}))
    history = record_history(shared, os.path.join(folder, f"{name}.jsonl"), process=name)
    group, rate = options.get("group"), options.get("rate", 0)
    with shared, history, Producer(history, "shop", **options.get("producer", {})) as producer:
        consumer = None
        if group:
            consumer = PushConsumer(history, str(group), consume_from=ConsumeFrom.FIRST)
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
                except RmqError as error:
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
