"""Run a broker inside an application: threads send, a group consumes, and everything shuts down in order.

    python examples/embed_broker.py [FOLDER]      (a temporary folder unless given)

Run it twice with the same FOLDER: topics, messages and progress are still there. Ctrl-C ends it in order too.

A group that is new in an old folder begins with the next message; ``consume_from=ConsumeFrom.FIRST`` reads all.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from queue import Queue

from librmq import Broker, DeliveredMessage, Producer, PushConsumer, StoreConfig

SHOPS = ("berlin", "lima")
ORDERS = 3


def main(path: str) -> None:
    before = set(threading.enumerate())
    charged: Queue[str] = Queue()

    # At the end of the `with` block producer, consumer and broker shut down, the last one first.
    with Broker.open(path, store_config=StoreConfig()) as broker:
        billing = PushConsumer(broker, "billing", threads=4)

        @billing.subscribe("orders", tags="created")
        def charge(message: DeliveredMessage) -> None:
            """Run in a thread of librmq. Returning means consumed; an exception means a redelivery."""
            charged.put(message.keys[0])

        with billing, Producer(broker, "shop") as producer:

            def sell(shop: str) -> None:
                for number in range(1, ORDERS + 1):
                    producer.send("orders", b"one coat", tags="created", keys=[f"{shop}-{number}"])

            shops = [threading.Thread(target=sell, args=(shop,)) for shop in SHOPS]
            for thread in shops:
                thread.start()
            for _ in range(len(SHOPS) * ORDERS):
                print(f"charged {charged.get(timeout=30)}")
            for thread in shops:
                thread.join()

            # A shutdown waits up to 5 s for running listeners, and stores the group's progress.
            print("shut down in order" if billing.shutdown() else "a listener was still running")

        stored = sum(1 for _ in broker.messages("orders"))
        done = sum(broker.consumer_offsets("billing", "orders").values())
        print(f"{stored} orders in the log, {done} of them consumed")
    print(f"threads left: {len(set(threading.enumerate()) - before)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
