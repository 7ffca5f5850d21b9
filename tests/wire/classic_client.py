"""The unmodified classic client, `rocketmq` 0.4.4 over C++, sends, receives, and gets a failed message again."""

from __future__ import annotations

import sys
import threading

from rocketmq.client import Message, Producer, PushConsumer


def main(address: str) -> None:
    came: list[tuple[str, int]] = []
    changed = threading.Condition()

    def consume(message: object) -> None:
        with changed:
            came.append((message.body.decode(), message.reconsume_times))  # type: ignore[attr-defined]
            changed.notify()
            is_first = came[-1] == ("bad", 0)
        if is_first:
            raise RuntimeError("not yet")

    producer = Producer("PID-classic")
    producer.set_namesrv_addr(address)
    producer.start()
    consumer = PushConsumer("CID-classic")
    consumer.set_namesrv_addr(address)
    consumer.subscribe("classic", consume, "a")
    consumer.start()
    for body, tag in (("good", "a"), ("other", "b"), ("bad", "a")):
        message = Message("classic")
        message.set_keys(body)
        message.set_tags(tag)
        message.set_body(body)
        assert producer.send_sync(message).status == 0
    with changed:
        assert changed.wait_for(lambda: len(came) == 3, 120), came
    assert sorted(came) == [("bad", 0), ("bad", 1), ("good", 0)]
    consumer.shutdown()
    producer.shutdown()
    print("done")


main(sys.argv[1])
