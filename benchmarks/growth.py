"""Cost against size: what a call costs while a store, its queues, its consumers or its producers become more.

Costs are processor time of the whole process, the least of several parts, so that other work on the machine counts
little. Stores above a million messages are sparse: only their newest messages have bytes, the older files are holes.

``python -m benchmarks.growth [--quick] [--write]``
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import logging
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import charts
from benchmarks.charts import Panel
from benchmarks.common import machine
from librmq.broker import Broker
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.consumer import PushConsumer
from librmq.files.memory import MemoryFiles
from librmq.message.message import Message
from librmq.runtime.runner import ManualRunner
from librmq.store import MessageStore

TOPIC: Final = "orders"
BODY: Final = b"x" * 128
BATCH: Final = 256
TAIL: Final = 1 << 18
"""Number of messages of a sparse store that have bytes, more than its last three files of the log."""
CONFIG: Final = StoreConfig(
    commitlog_file_size=16 << 20, max_hash_slot_num=100_000, max_index_num=200_000, disk_refuse_ratio=100
)
MANY_QUEUES: Final = 10_000
"""Number of queues from which a store is recovered once only, because each queue takes its time."""
PARTS: Final = 7
PULLS: Final = 500
RECORD: Final = 260
"""About the size of a record."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured."""

    messages: tuple[int, ...] = (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
    queues: tuple[int, ...] = (1, 10, 100, 1_000, 10_000, 50_000)
    consumers: tuple[int, ...] = (1, 10, 100, 1_000)
    producers: tuple[int, ...] = (1, 2, 4, 8, 16)
    dense: int = 1_000_000
    """The largest store without holes."""
    calls: int = 4_096
    """Number of calls of a part."""


QUICK: Final = Sizes((1_000, 4_000), (1, 16), (1, 4), (1, 2), calls=512)


def least(part: Callable[[int], int], parts: int = PARTS) -> float:
    """Return the processor time of one call, the least of some parts; ``part`` takes its number, returns its calls."""
    found = []
    for number in range(parts):
        begin = time.process_time()
        calls = part(number)
        found.append((time.process_time() - begin) / calls)
    return min(found)


def messages(first: int, count: int) -> list[Message]:
    """Make messages with one key each."""
    return [Message(TOPIC, BODY, tags="paid", keys=f"k{number:09d}") for number in range(first, first + count)]


# ------------------------------------------------------------------------------------------------------------- messages


def fill(path: Path, count: int, dense: int) -> None:
    """Make a closed store of ``count`` messages; above ``dense`` of them, only the newest have bytes."""
    holes = max(0, count - TAIL) if count > dense else 0
    size, files = CONFIG.commitlog_file_size, 0
    with MessageStore.open(path, CONFIG) as store:
        if holes:
            files = holes * RECORD // size
            store.log.begin_at(files * size)
            store.appender.lane(TOPIC, 0).next_queue_offset = holes
        for first in range(holes, count, BATCH):
            store.append_batch(messages(first, min(BATCH, count - first)))
    queue = path / "consumequeue" / TOPIC / "0"
    make_holes(path / "commitlog", size, files * size)
    if holes:
        name = min(os.listdir(queue))
        make_holes(queue, (queue / name).stat().st_size, int(name))


def make_holes(folder: Path, size: int, end: int) -> None:
    """Make files of zeros without blocks in front of those that a folder has."""
    for start in range(0, end, size):
        with open(folder / f"{start:020d}", "wb") as file:
            file.truncate(size)


def by_messages(scratch: Path, sizes: Sizes) -> Iterator[Panel]:
    """Measure calls, and opening, of stores of growing size."""
    calls = Panel("one queue", "messages in the store", "µs")
    opened = Panel("opening the store", "messages in the store", "ms")
    for count in sizes.messages:
        path = scratch / f"messages-{count}"
        fill(path, count, sizes.dense)
        add_openings(opened, path, count)
        with MessageStore.open(path, CONFIG) as store:
            add_calls(calls, store, count, sizes.calls)
        shutil.rmtree(path)
    yield calls
    yield opened


def add_openings(panel: Panel, path: Path, count: int, rounds: int = 3) -> None:
    """Measure the opening of a store that was closed, and of one that was killed after some appends."""

    def closed(_: int) -> int:
        MessageStore.open(path, CONFIG).close()
        return 1

    panel.add("closed cleanly", count, least(closed, 3))
    seconds = []
    for _ in range(rounds):
        store = MessageStore.open(path, CONFIG)
        store.append_batch([Message("last", BODY)] * BATCH)
        store.abandon()
        begin = time.process_time()
        store = MessageStore.open(path, CONFIG)
        seconds.append(time.process_time() - begin)
        if not store.recovered:
            raise RuntimeError("the store was opened without a recovery")
        store.close()
    panel.add("after a kill", count, min(seconds))


def add_calls(panel: Panel, store: MessageStore, count: int, calls: int) -> None:
    """Measure append, pull and lookup in a store whose newest messages, at least ``TAIL`` or all, have bytes."""
    made = messages(count, calls * PARTS)
    first = max(0, count - TAIL)

    def append(number: int) -> int:
        for message in made[number * calls : (number + 1) * calls]:
            store.append(message)
        return calls

    def pull(number: int) -> int:
        found = 0
        for at in range(first + number, count - 32, max(1, (count - 32 - first) // 128)):
            found += len([message.body for message in store.read(TOPIC, 0, at, 32).messages])
        return found

    def look_up(number: int) -> int:
        places = range(first + number, count, max(1, (count - first) // 256))
        found = sum(len(store.find_by_key(TOPIC, f"k{at:09d}", max_messages=1)) for at in places)
        if found != len(places):
            raise RuntimeError(f"{found} of {len(places)} messages were found")
        return found

    panel.add("lookup by key", count, least(look_up))
    panel.add("pull of 32, a message", count, least(pull))
    panel.add("append", count, least(append))


# --------------------------------------------------------------------------------------------------------------- others


def dealt_out(store: MessageStore, places: Sequence[tuple[str, int]], calls: int) -> Callable[[int], int]:
    """Return a part of `least` that appends to all queues in turns, far from each other."""
    turns = [places[number * 7919 % len(places)] for number in range(max(calls, len(places)))]
    dealt = itertools.cycle([(Message(topic, BODY), queue_id) for topic, queue_id in turns])

    def append(_: int) -> int:
        for message, queue_id in itertools.islice(dealt, calls):
            store.append(message, queue_id)
        store.appender.drain()
        return calls

    return append


def by_queues(scratch: Path, sizes: Sizes) -> Iterator[Panel]:
    """Measure appends dealt out over queues, pulls of them, and opening.

    ``mapped_files`` is measured too at its largest for these queues, if the process may have as many descriptors.
    """
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200
    calls = Panel("calls dealt out over queues", "queues", "µs")
    opened = Panel("opening a store of queues", "queues", "ms")
    for count in sizes.queues:
        path, places = scratch / f"queues-{count}", [(f"T{number // 16}", number % 16) for number in range(count)]
        with MessageStore.open(path, CONFIG) as store:
            for topic, queue_id in places:
                store.append(Message(topic, BODY), queue_id)

            def pull(_: int, store: MessageStore = store, places: Sequence[tuple[str, int]] = places) -> int:
                for turn in range(0, 7919 * PULLS, 7919):
                    store.read(*places[turn % len(places)], 0, 1)
                return PULLS

            calls.add("append", count, least(dealt_out(store, places, sizes.calls)))
            calls.add("pull of one message", count, least(pull))
        if count < descriptors:
            mapped = dataclasses.replace(CONFIG, mapped_files=max(count, CONFIG.mapped_files))
            with MessageStore.open(path, mapped) as store:
                append = dealt_out(store, places, sizes.calls)
                for part in range(count // sizes.calls + 1):  # map the files
                    append(part)
                calls.add("append, all mapped", count, least(append))
        add_openings(opened, path, count, 3 if count < MANY_QUEUES else 1)
        shutil.rmtree(path)
    yield calls
    yield opened


@contextmanager
def group(consumers: int) -> Iterator[tuple[ManualRunner, Producer, list[object]]]:
    """Start consumers of one group, by hand and in memory, with a queue for each."""
    runner = ManualRunner()
    seen: list[object] = []
    config = StoreConfig.tiny(commitlog_file_size=16 << 20)
    with Broker.open("/broker", store_config=config, files=MemoryFiles(), runner=runner) as broker:
        broker.create_topic(TOPIC, consumers)
        made = []
        for number in range(consumers):
            consumer = PushConsumer(broker, group="readers", instance_name=f"c{number}")
            consumer.subscribe(TOPIC)(seen.append)
            made.append(consumer.start())
        with Producer(broker, "writers") as producer:
            runner.advance(60_000)
            yield runner, producer, seen
        for consumer in made:
            consumer.shutdown()


def by_consumers(_: Path, sizes: Sizes) -> Iterator[Panel]:
    """Measure the send of a message with its delivery to a listener, and an idle second of the whole group."""
    panel = Panel("a group of consumers, a queue each", "consumers", "µs")
    for count in sizes.consumers:
        with group(count) as (runner, producer, seen):

            def deliver(
                _: int, runner: ManualRunner = runner, producer: Producer = producer, seen: list[object] = seen
            ) -> int:
                seen.clear()
                for _ in range(sizes.calls // 8):
                    producer.send(TOPIC, BODY)
                    runner.advance()
                if len(seen) != sizes.calls // 8:
                    raise RuntimeError(f"{len(seen)} of {sizes.calls // 8} messages came")
                return len(seen)

            panel.add("send and delivery", count, least(deliver, 3))
    yield panel


def by_producers(scratch: Path, sizes: Sizes) -> Iterator[Panel]:
    """Measure appends of several threads to one store."""
    panel = Panel("threads that append", "producers", "µs")
    for count in sizes.producers:
        with MessageStore.open(scratch / f"producers-{count}", CONFIG) as store:
            made = messages(0, sizes.calls * 4)

            def append(_: int, store: MessageStore = store, count: int = count, made: Sequence[Message] = made) -> int:
                def run(share: Sequence[Message]) -> None:
                    for message in share:
                        store.append(message)

                threads = [threading.Thread(target=run, args=(made[number::count],)) for number in range(count)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                return len(made)

            panel.add("append", count, least(append))
    yield panel


# -------------------------------------------------------------------------------------------------------------- command


MEASURED: Final = {
    "messages": by_messages, "queues": by_queues, "consumers": by_consumers, "producers": by_producers
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the points, and keep them with their picture if that is wanted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default=",".join(MEASURED), metavar="A,B", help="which of %(default)s")
    parser.add_argument("--largest", type=int, default=100_000_000, metavar="N", help="messages of the largest store")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a trial, not a measurement")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the curves into this file")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results, with its picture")
    chosen = parser.parse_args(arguments)
    names = chosen.rows.split(",")
    if unknown := sorted(set(names) - set(MEASURED)):
        parser.error(f"no such rows: {', '.join(unknown)}; there are {', '.join(MEASURED)}")
    if chosen.write and (chosen.quick or set(names) != set(MEASURED)):
        parser.error("--write: the results are of all rows at full size")
    sizes = QUICK if chosen.quick else Sizes()
    logging.getLogger("librmq").setLevel(logging.ERROR)
    panels: list[Panel] = []
    with tempfile.TemporaryDirectory(prefix="librmq-growth-") as scratch:
        place = machine(Path(scratch))
        sizes = Sizes(
            tuple(size for size in sizes.messages if size <= chosen.largest), sizes.queues, sizes.consumers,
            sizes.producers, sizes.dense, sizes.calls,
        )  # fmt: skip
        for name in names:
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            panels += MEASURED[name](Path(scratch), sizes)
    shown = charts.table(panels)
    print(shown)
    if chosen.picture:
        charts.save(lambda: charts.curves(panels), chosen.picture, "Costs of benchmarks.growth")
    if chosen.write:
        charts.keep("growth", f"{shown}\n\nMeasured on: {place}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
