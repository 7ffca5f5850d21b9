"""After any bytes of a log change, recovery and salvage leave a sound store, and consumers reach its end."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from librmq import ManualRunner, Message, PushConsumer
from librmq.broker import Broker
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.store import MessageStore
from librmq.store.extraction import rescue
from librmq.store.recovery._verify import verify
from tests.budget import examples
from tests.conftest import SlowBudget
from tests.store.test_reconcile import broker_gives
from tests.stores import START_MS

CONFIG = StoreConfig.tiny(commitlog_file_size=16_384)
TOPIC = "Topic"


@dataclass(frozen=True)
class Case:
    """A damaged store, with number and place of each message that no change touched, by queue."""

    folder: Path
    untouched: dict[int, dict[int, int]]

    def before(self, log_end: int) -> dict[int, list[int]]:
        """Return the numbers of the untouched messages before the log's end, by queue."""
        return {
            queue_id: [number for number, place in places.items() if place < log_end]
            for queue_id, places in self.untouched.items()
        }


def damaged(folder: Path, rng: random.Random) -> Case:
    """Write 500 to 2,000 messages into some queues, then change some bytes of the log."""
    size, records, queues = CONFIG.commitlog_file_size, [], rng.randint(2, 6)
    with MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS)) as store:
        for number in range(rng.randint(500, 2000)):
            message = Message(TOPIC, b"%d" % number, tags=f"t{number % 5}", keys=f"k{number}")
            queue_id = rng.randrange(queues)
            stored = store.append(message, queue_id)
            records.append((stored.physical_offset, stored.size, queue_id, number))
        end = store.log.end
    touched = {rng.randrange(end) for _ in range(rng.choice([1, 3, 10, 30]))}
    for at in touched:
        with open(folder / "commitlog" / f"{at - at % size:020d}", "r+b") as file:
            file.seek(at % size)
            byte = file.read(1)[0]
            file.seek(at % size)
            file.write(bytes([byte ^ rng.randint(1, 255)]))
    untouched: dict[int, dict[int, int]] = defaultdict(dict)
    for place, length, queue_id, number in records:
        if not any(place <= at < place + length for at in touched):
            untouched[queue_id][number] = place
    return Case(folder, untouched)


def consumed(folder: Path, queues: int) -> dict[int, list[int]]:
    """Return the numbers that a new group receives, by queue."""
    runner, seen = ManualRunner(ManualClock(START_MS + 10**9)), defaultdict[int, list[int]](list)
    with Broker.open(folder, runner=runner) as broker:
        broker.create_topic(TOPIC, queues)
        consumer = PushConsumer(broker, "g")
        # A flipped bit can call a body compressed.
        consumer.subscribe(TOPIC)(lambda message: seen[message.queue_id].append(int(message.stored_body)))
        consumer.start()
        runner.advance(120_000)
        consumer.shutdown()
    return seen


def check_consumers(folder: Path, wanted: dict[int, list[int]]) -> None:
    """Check that librmq and a broker's way of reading both give the untouched messages in order."""
    seen = consumed(folder, 1 + max(wanted))
    everything = [number for numbers in seen.values() for number in numbers]
    assert len(everything) == len(set(everything))
    for queue_id, numbers in wanted.items():
        known = set(numbers)
        assert [number for number in seen[queue_id] if number in known] == numbers
        given = [number for number in broker_gives(folder, queue_id, CONFIG) if number in known]
        assert list(dict.fromkeys(given)) == numbers


def check_case(folder: Path, rng: random.Random) -> None:
    """Salvage a damaged store into another, recover it in place, and consume from both."""
    case = damaged(folder / "old", rng)
    rescue(str(folder / "old"), str(folder / "new"), CONFIG)
    verdict = verify(folder / "new", CONFIG)
    assert verdict.sound, verdict.damage
    check_consumers(folder / "new", case.before(1 << 62))
    with MessageStore.open(folder / "old", CONFIG, thorough=True) as store:
        end = store.log.end
    verdict = verify(folder / "old", CONFIG)
    assert verdict.sound, verdict.damage
    with MessageStore.open(folder / "old", CONFIG, thorough=True) as store:
        assert store.recovered == []
    check_consumers(folder / "old", case.before(end))


@pytest.mark.slow
def test_messages_left_in_many_logs_are_consumed(tmp_path: Path, slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(600, "damaged logs", at_least=examples(8)):
        check_case(tmp_path / str(number), random.Random(f"flipped again {number}"))
