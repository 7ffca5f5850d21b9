"""Refresh the caches of all instances by broadcasting each change.

    python examples/broadcast_cache.py

In a `CLUSTERING` group one instance gets a message, in a `BROADCASTING` group every instance. Each keeps its own
progress in its own folder, so give instances permanent names. A failed refresh is logged and not retried, so let the
listener do only simple work, such as dropping a key.
"""

from __future__ import annotations

import tempfile

from librmq import Broker, DeliveredMessage, ManualRunner, MessageModel, Producer, PushConsumer, Route


class Catalogue:
    """A web server that answers from its cache, and otherwise asks the database."""

    def __init__(self, route: Route, name: str, database: dict[str, int], folder: str) -> None:
        self.name = name
        self.asked = 0
        self._database = database
        self._cache: dict[str, int] = {}
        self.consumer = PushConsumer(
            route, "catalogue", model=MessageModel.BROADCASTING, instance_name=name, offsets_folder=folder
        )
        self.consumer.subscribe("prices")(self.forget)
        self.consumer.start()

    def price(self, product: str) -> int:
        if product not in self._cache:
            self.asked += 1
            self._cache[product] = self._database[product]
        return self._cache[product]

    def forget(self, message: DeliveredMessage) -> None:
        print(f"{self.name} forgets the price of the {message.keys[0]}")
        self._cache.pop(message.keys[0], None)


def main(folder: str) -> list[Catalogue]:
    database = {"coat": 120, "hat": 30}
    runner = ManualRunner()  # a manual clock, so this ends immediately; an application omits it
    with Broker.temporary(runner=runner) as broker:
        broker.create_topic("prices", 2)
        servers = [Catalogue(broker, name, database, folder) for name in ("web-1", "web-2", "web-3")]
        runner.advance(1_000)  # an instance gets messages sent after it has found its queues
        producer = Producer(broker, "backoffice")

        def show(when: str) -> None:
            print(f"{when}:", *(f"{server.price('coat')} ({server.name})" for server in servers))

        show("the coat costs")
        database["coat"] = 99
        show("the database has another price, the caches have not")
        producer.send("prices", b"changed", keys="coat")
        runner.advance(1_000)
        show("after the message")
        print(f"questions to the database: {[server.asked for server in servers]}")
        for server in servers:
            server.consumer.shutdown()
    return servers


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
