"""What a process does that shares a store: it sends numbered messages."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from librmq import Producer, RmqError, share
from librmq.clock import SystemClock


def work(store: Path, name: str, options: dict[str, Any]) -> None:
    """Work until the input ends.

    Options are the ``rate`` of sends a second, and settings of ``share`` and ``producer``. Prints a line ``ready``,
    then ``sent`` or ``refused`` with the seconds and the error for each send.
    """
    ending, clock, rate = threading.Event(), SystemClock(), options.get("rate", 0)
    with (
        share(store, **options.get("share", {})) as shared,
        Producer(shared, "shop", **options.get("producer", {})) as producer,
    ):

        def send() -> None:
            number, begin = 0, clock.monotonic()
            while not ending.is_set():
                started = clock.monotonic()
                try:
                    producer.send("orders", f"{name} {number}".encode(), delay_level=1)  # which the owner stores
                    print(f"sent {clock.monotonic() - started:.3f}", flush=True)
                except RmqError as error:
                    print(f"refused {clock.monotonic() - started:.3f} {error}", flush=True)
                number += 1
                ending.wait(max(0.0, begin + number / rate - clock.monotonic()))

        print("ready", os.getpid(), flush=True)
        thread = threading.Thread(target=send) if rate else None
        if thread is not None:
            thread.start()
        sys.stdin.read()
        ending.set()
        if thread is not None:
            thread.join()
