"""Consume the steps of each order in sequence, and different orders in parallel.

    python examples/ordered_orders.py

The key of an order selects the queue, so its steps follow each other. An orderly consumer takes one message of a queue
at a time. After a failure the queue pauses, and no message overtakes the failed one. The program moves the clock by
hand, so the pauses take no time. An application omits the runner, and the broker then runs threads.
"""

from __future__ import annotations

from collections import defaultdict

from librmq import Broker, DeliveredMessage, ManualRunner, Producer, PushConsumer, SuspendQueue, select_by_hash

STEPS = ("created", "paid", "packed", "shipped")


def main() -> dict[str, list[str]]:
    seen: dict[str, list[str]] = defaultdict(list)
    runner = ManualRunner()
    with Broker.temporary(runner=runner) as broker:
        broker.create_topic("orders", 4)
        begin_ms = runner.now_ms()

        for name in ("w1", "w2"):  # two workers share the four queues
            worker = PushConsumer(broker, "warehouse", instance_name=name, orderly=True)

            @worker.subscribe("orders")
            def handle(message: DeliveredMessage, name: str = name) -> None:
                order, step = message.keys[0], message.body.decode()
                when = (runner.now_ms() - begin_ms) / 1000
                if (order, step) == ("order-2", "paid") and message.reconsume_times < 2:
                    print(f"{when:5.1f} s  {name}  {order} {step}: the bank does not answer, its queue pauses")
                    raise SuspendQueue(seconds=5)
                print(f"{when:5.1f} s  {name}  {order} {step}")
                seen[order].append(step)

            worker.start()

        producer = Producer(broker, "shop")
        for step in STEPS:
            for order in ("order-1", "order-2", "order-3"):
                producer.send("orders", step.encode(), keys=order, selector=select_by_hash, arg=order)
        runner.advance(60_000)

    for order, steps in sorted(seen.items()):
        print(f"{order}: {' -> '.join(steps)}")
    return seen


if __name__ == "__main__":
    main()
