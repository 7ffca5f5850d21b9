"""A worker that is killed again and again, and yet books each order exactly once.

    python examples/kill_proof_worker.py [FOLDER]

It starts itself as a worker, kills the worker with ``kill -9`` after a random number of bookings, and starts it again,
until all orders are booked. The queue repeats what a killed worker did last; the table of noted messages, in the same
transaction as the bookings, drops the repetitions.
"""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from librmq import Broker, DeliveredMessage, Message, Producer, PushConsumer, split_batch
from librmq.idempotence import transactional, upgrade_tables


def connect(folder: Path) -> sqlite3.Connection:
    """Connect to the database; a transaction of another thread is waited for."""
    return sqlite3.connect(folder / "bookings.db", timeout=30)


def place_orders(folder: Path, count: int) -> None:
    """Store orders, and make the table of bookings."""
    with closing(connect(folder)) as database:
        upgrade_tables(database)
        database.execute("CREATE TABLE bookings (number TEXT)")
        database.commit()
    with Broker.open(folder / "queue") as broker, Producer(broker, "shop") as producer:
        for batch in split_batch([Message("orders", b"x", keys=f"o-{number}") for number in range(count)]):
            producer.send_batch(batch)


def work(folder: Path) -> None:
    """Book orders until none is left; print a line for each delivery."""
    with Broker.open(folder / "queue", wait=30) as broker:
        worker = PushConsumer(broker, "booking", threads=4)

        @worker.subscribe("orders")
        def book(message: DeliveredMessage) -> None:
            with closing(connect(folder)) as database, transactional(database, message, group="booking") as is_first:
                if is_first:
                    database.execute("INSERT INTO bookings VALUES (?)", (message.keys[0],))
            print("booked" if is_first else "seen before", message.keys[0], flush=True)

        with worker:
            broker.join(timeout=60)


def main(folder: Path, count: int = 40, kills: int = 3, seed: int = 1) -> tuple[int, int]:
    """Return how many orders were booked, and how often deliveries were repeated."""
    chance = random.Random(seed)
    place_orders(folder, count)
    repeated = 0
    for life in range(kills + 1):
        lifetime = chance.randint(3, count // (kills + 1)) if life < kills else sys.maxsize
        command = [sys.executable, "-P", __file__, str(folder), "work"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
            assert worker.stdout is not None
            for number, line in enumerate(worker.stdout, 1):
                repeated += line.startswith("seen before")
                if number == lifetime:
                    worker.kill()  # kill -9
                    break
        print(f"worker {life + 1} {'was killed' if life < kills else 'has finished'} after {number} deliveries")
    with closing(connect(folder)) as database:
        (booked, different) = database.execute("SELECT count(*), count(DISTINCT number) FROM bookings").fetchone()
    print(f"{count} orders, {booked} bookings, {different} of them different; {repeated} repetitions were dropped")
    return booked, different


if __name__ == "__main__":
    if sys.argv[2:] == ["work"]:
        work(Path(sys.argv[1]))
    elif sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
