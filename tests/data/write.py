"""Write the store that a release of librmq leaves in ``tests/data/stores``: a bit of each of its files.

``python -m tests.data.write tests/data/stores/librmq-VERSION.tar.xz``, once, by the release itself.
"""

from __future__ import annotations

import datetime
import io
import sys
import tarfile
import tempfile
from pathlib import Path

import librmq
from librmq.dedup import DedupListener
from librmq.idempotence import SqliteDedupStore

START_MS = 1_700_000_000_000
CONFIG = librmq.StoreConfig.tiny(commitlog_file_size=8192, max_message_size=4000, enable_consumequeue_ext=True)


def write(path: Path) -> None:
    """Write a store with 24 orders, of which a group has consumed 12, and some of all that waits."""
    clock = librmq.ManualClock(START_MS)
    runner = librmq.ManualRunner(clock)
    with librmq.Broker.open(str(path), librmq.BrokerConfig(hops=True), store_config=CONFIG, runner=runner) as broker:
        broker.create_topic("orders", 2)
        billing = librmq.PushConsumer(broker, "billing", instance_name="one", max_reconsume_times=0)
        guard = SqliteDedupStore(path / "guard.sqlite", clock=clock)
        billing.subscribe("orders", sql="amount > 3 OR amount IS NULL")(
            DedupListener(charge, guard, group="billing", clock=clock)
        )
        billing.start()
        with librmq.Producer(broker, "shop") as producer:
            for number in range(24):
                if number == 12:
                    runner.advance(1000)
                    billing.shutdown()
                body = (b"order %d " % number) * (1 if number % 5 else 30)
                producer.send("orders", body, keys=f"k{number}", tags="a", properties={"amount": str(number)})
                runner.advance(1000)
            producer.send("orders", b"by level", delay_level=18)
            producer.send("orders", b"by time", deliver_at=datetime.datetime(2023, 11, 15, 2, tzinfo=datetime.UTC))
            producer.cancel(producer.send("orders", b"cancelled", delay_level=17))
            producer.send("held", b"received")
            broker.store.append_batch([librmq.Message("orders", b"batched %d" % number) for number in range(3)])
        with librmq.TransactionProducer(broker, "payments", lambda _: librmq.TransactionState.UNKNOWN) as payments:
            unknown = librmq.TransactionState.UNKNOWN
            payments.send_in_transaction(librmq.Message("orders", b"open"), execute=lambda *_: unknown)
        receiver = librmq.SimpleConsumer(broker, "workers", instance_name="one")
        receiver.subscribe("held")
        receiver.start()
        receiver.receive(invisible=3600)
        runner.advance(10_000)
        receiver.shutdown()
        guard.close()


def charge(message: librmq.Message) -> None:
    """Refuse an order, which becomes a dead letter."""
    if message.body == b"order 7 ":
        raise ValueError("no such customer")


def pack(folder: Path, archive: Path) -> None:
    """Pack a store as ``.tar.xz`` without its lock, and without this machine's times, owners and modes."""
    with tarfile.open(archive, "w:xz", format=tarfile.PAX_FORMAT, preset=9) as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != "lock":
                member = tarfile.TarInfo(f"store/{path.relative_to(folder).as_posix()}")
                content = path.read_bytes()
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch, "store"))
        pack(Path(scratch, "store"), Path(sys.argv[1]))
