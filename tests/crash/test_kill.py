"""A writer is killed under load: every acknowledged message is there, the others are whole or missing.

A separate process appends from several threads and prints each acknowledged message, unbuffered. It is killed without
warning after some of them. `kill` leaves the page cache alone, so this also holds in async mode.
"""

from __future__ import annotations

import os
import random
import select
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from librmq.broker import Broker, BrokerConfig
from librmq.client.producer import Producer
from librmq.config import StoreConfig
from librmq.message.message import Message
from librmq.runtime import ManualRunner
from librmq.scheduling.timer_config import TimerConfig
from librmq.store import AppendResult, MessageStore
from librmq.store.engine import saved_state
from librmq.store.engine._durability import Acknowledgement
from librmq.store.recovery._verify import verify
from tests.conftest import SlowBudget
from tests.programs import Fork

pytestmark = [
    pytest.mark.platform,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be killed"),
]

CONFIG = StoreConfig(
    commitlog_file_size=16 << 10,
    consumequeue_file_size=50 * 20,
    consumequeue_ext_file_size=1 << 10,
    max_hash_slot_num=16,
    max_index_num=200,
    max_message_size=3000,
    flush_interval_s=0.002,
    flush_thorough_interval_s=0.005,
    flush_interval_consumequeue_s=0.004,
    flush_thorough_interval_consumequeue_s=0.01,
)
"""Settings with files so small that they roll all the time, and constant flushes."""


def fill(path: Path) -> None:
    """Write files of every kind that a store has."""
    settings = CONFIG.with_settings({"enable_consumequeue_ext": True, "commitlog_file_size": 4096})
    runner = ManualRunner()
    timers = TimerConfig(
        timer_log_file_size=4096, slots_total=1000, timer_roll_window_slot=500, timer_max_delay_sec=600
    )
    with (
        Broker.open(path, BrokerConfig(timers=timers), store_config=settings, runner=runner) as broker,
        Producer(broker, "shop") as producer,
    ):
        for number in range(40):
            producer.send("orders", bytes(300), keys=f"{number}", delay=7 if number < 3 else None)
        runner.advance(3_000)


def fill_new_queues(path: Path) -> None:
    """Write the first entries of so many queues that their files are made together."""
    with MessageStore.open(path, CONFIG, background=False) as store:
        for number in range(20):
            store.append(Message("orders", b"body"), number)


def is_killed_at(path: Path, number: int, fill: Callable[[Path], None], *, has_nameless: bool) -> bool:
    """Return whether a child that fills a store was killed before it gave the file of this number its length."""
    child = os.fork()
    if not child:
        lengths = 0
        set_length = os.ftruncate

        def ftruncate(descriptor: int, size: int) -> None:
            nonlocal lengths
            lengths += 1
            if lengths == number:
                os.kill(os.getpid(), signal.SIGKILL)
            set_length(descriptor, size)

        try:
            os.ftruncate = ftruncate
            if not has_nameless:
                del os.O_TMPFILE
            fill(path)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name")
@pytest.mark.parametrize(
    ("fill", "expected", "has_nameless"),
    [
        (fill, {"commitlog", "consumequeue", "consumequeue_ext", "index", "timerlog"}, False),
        (fill_new_queues, {"commitlog", "consumequeue", "index"}, True),
    ],
)
def test_no_file_is_there_before_it_has_its_length(
    tmp_path: Path, fill: Callable[[Path], None], expected: set[str], has_nameless: bool
) -> None:
    """A broker loads all files of its folders, and refuses a store with one of another length."""
    number, kinds = 1, set[str]()
    while is_killed_at(path := tmp_path / f"{number}", number, fill, has_nameless=has_nameless):
        for folder, _, names in os.walk(path):
            place = os.path.relpath(folder, path)
            kind = place.split(os.sep)[0]
            numbered = [name for name in names if name.isdigit()]
            kinds.update([kind] * bool(numbered))
            assert all(os.path.getsize(os.path.join(folder, name)) for name in numbered)
            if kind in ("commitlog", "index", "timerlog") or place.count(os.sep) == 2:
                assert names == numbered
        with MessageStore.open(path) as store:
            store.append(Message("goes on", b""))
        assert verify(path).sound
        number += 1
    assert kinds == expected
    assert number > 10


MODES = ("async", "sync", "pipelined")


def body_of(life: int, thread: int, number: int) -> bytes:
    """Return the body of a writer's message; lengths vary so that files end anywhere."""
    rng = random.Random(life * 1_000_003 + thread * 10_007 + number)
    return b"%d %d %d " % (life, thread, number) + rng.randbytes(rng.choice([0, 10, 200, 1200]))


@dataclass(frozen=True)
class Acknowledged:
    """A message that a writer has acknowledged."""

    life: int
    thread: int
    number: int
    physical_offset: int

    @property
    def topic(self) -> str:
        return f"T{self.thread % 3}"


def write(path: Path, mode: str, life: int, threads: int) -> None:
    """Append from several threads, and print what is acknowledged; each flush leaves a mark."""
    pytest.MonkeyPatch().setattr(saved_state, "WORTH_A_MARK", 1)
    sync = mode == "sync" or (mode == "pipelined" and life % 2 == 0)
    store = MessageStore.open(path, replace(CONFIG, durability="sync" if sync else "async"))

    def tell(number: int, thread: int, result: AppendResult) -> None:
        os.write(1, b"%d %d %d\n" % (thread, number, result.physical_offset))

    def produce(thread: int) -> None:
        window = deque[tuple[int, Acknowledgement[AppendResult]]]()
        number = 0
        while True:
            topic, queue_id = f"T{thread % 3}", thread % 2
            message = Message(topic, body_of(life, thread, number), keys=f"{life}-{thread}-{number}")
            if mode == "pipelined":
                window.append((number, store.submit(message, queue_id)))
                while window and (window[0][1].done or len(window) > 32):
                    first, acknowledgement = window.popleft()
                    tell(first, thread, acknowledgement.wait())
            elif number % 7 == 3:
                more = Message(topic, body_of(life, thread, number + 1), keys=f"{life}-{thread}-{number + 1}")
                for at, result in enumerate(store.append_batch([message, more], queue_id)):
                    tell(number + at, thread, result)
                number += 1
            else:
                tell(number, thread, store.append(message, queue_id))
                if mode == "async" and number % 50 == 49:
                    store.flush()
            number += 1

    run_threads(produce, threads)


def run_threads(target: Callable[[int], None], threads: int) -> None:
    """Start threads, each with its number; a failure of one ends the process."""

    def fail(failure: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(failure)
        os._exit(1)

    threading.excepthook = fail
    for thread in range(threads):
        threading.Thread(target=target, args=(thread,)).start()


def live(path: Path, mode: str, life: int, messages: int, threads: int = 4) -> list[Acknowledged]:
    """Start a writer, kill it once it has acknowledged this many messages, and read its remaining acknowledgements."""
    with Fork(write, path, mode, life, threads) as child:
        told = b""
        while told.count(b"\n") < messages:
            select.select([child.stdout], [], [])
            part = os.read(child.stdout.fileno(), 1 << 16)
            assert part, "the writer ended by itself"
            told += part
        child.process.kill()
        while part := os.read(child.stdout.fileno(), 1 << 16):
            told += part
        child.process.join()
        assert child.process.exitcode == -signal.SIGKILL
    assert told.endswith(b"\n")
    return [Acknowledged(life, *map(int, line.split())) for line in told.splitlines()]


def check(path: Path, acknowledged: list[Acknowledged], *, thorough: bool = False) -> None:
    """Open the store of the killed process: it works, nothing acknowledged is lost, and everything is whole."""
    with MessageStore.open(path, CONFIG, thorough=thorough) as store:
        found = {}
        for message in store:
            if message.topic == "goes on":
                continue
            life, thread, number = map(int, message.body.split(b" ", 3)[:3])
            assert message.body == body_of(life, thread, number), "torn"
            found[message.physical_offset] = (life, thread, number)
        for one in acknowledged:
            assert found[one.physical_offset] == (one.life, one.thread, one.number)
        assert len(set(found.values())) == len(found), "twice"
        for (topic, queue_id), queue in store.queues.items():
            queue_offset = queue.min_offset
            while queue_offset < queue.max_offset:
                result = store.read(topic, queue_id, queue_offset)
                assert result.messages, result
                queue_offset = result.next_offset
        for one in acknowledged[:: max(1, len(acknowledged) // 50)]:
            keyed = store.find_by_key(one.topic, f"{one.life}-{one.thread}-{one.number}")
            assert [message.physical_offset for message in keyed] == [one.physical_offset]
        assert sum(queue.max_offset - queue.min_offset for queue in store.queues.values()) == len(list(store))
        last = store.append(Message("goes on", b"%d" % len(acknowledged)))
        store.flush()
        assert store.read("goes on", 0, last.queue_offset, 1).messages[0].body == b"%d" % len(acknowledged)
    verdict = verify(str(path), CONFIG)
    assert verdict.sound, verdict.damage


def test_acknowledged_messages_survive_a_kill(tmp_path: Path) -> None:
    acknowledged: list[Acknowledged] = []
    for life, messages in enumerate((60, 400)):
        acknowledged += live(tmp_path / "store", MODES[0], life, messages)
        check(tmp_path / "store", acknowledged)


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path, slow_budget: SlowBudget) -> None:
    """The store survives kill after kill; after some of them a new writer starts."""
    path: Path | None = None
    acknowledged: list[Acknowledged] = []
    for kill in slow_budget.rounds(100, "kills", at_least=6):
        if path is None or kill % 9 == 0:
            path, acknowledged = tmp_path / f"store-{kill}", []
        rng = random.Random(kill)
        acknowledged += live(path, MODES[kill % 3], kill, rng.choice([1, 5, 50, 500, 2000]), rng.choice([1, 4, 8]))
        check(path, acknowledged)


@pytest.mark.slow
def test_a_message_that_is_missing_would_be_noticed(tmp_path: Path) -> None:
    """The check itself can fail: for a changed byte of an acknowledged message, or one message too many in the list."""
    path = tmp_path / "store"
    acknowledged = live(path, "async", 0, 30)
    check(path, acknowledged)
    with pytest.raises(KeyError):
        check(path, [*acknowledged, Acknowledged(0, 0, 10_000, 1 << 40)])
    with pytest.raises(AssertionError):
        check(path, [*acknowledged, Acknowledged(0, 0, 10_000, acknowledged[0].physical_offset)])
