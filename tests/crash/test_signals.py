"""Real signals whose handlers raise, at random moments of every operation: none leaves a store unsound."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

import librmq
from librmq.config import StoreConfig
from librmq.message.message import Message
from librmq.store._store import MessageStore
from tests import lock_order
from tests.conftest import SlowBudget

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals of POSIX")

LIBRMQ = os.path.dirname(librmq.__file__)
TOPICS = ("orders", "payments", "refunds")
CONFIG = StoreConfig.tiny(commitlog_file_size=16384, consumequeue_file_size=1000, flush_interval_s=0.01)


class Alarm(Exception):
    """Raised by the signal handlers."""


@contextmanager
def alarms(chance: random.Random, pace: list[float]) -> Iterator[Callable[[], int]]:
    """Send signals at random times that raise `Alarm` while librmq runs; yield a function that counts those raised."""
    handled = 0

    def set_timer() -> None:
        signal.setitimer(
            signal.ITIMER_REAL, chance.choice((50e-6, 500e-6, 5e-3, 50e-3)) * chance.random() * pace[-1] + 1e-6
        )

    def handle(_number: int, frame: FrameType | None) -> None:
        nonlocal handled
        set_timer()
        files = set[str]()
        while frame is not None:
            files.add(frame.f_code.co_filename)
            frame = frame.f_back
        # A lock that is recorded, unlike the one of librmq in its place, can be interrupted before its release.
        if lock_order.__file__ not in files and any(file.startswith(LIBRMQ) for file in files):
            handled += 1
            raise Alarm

    hook, sys.unraisablehook = sys.unraisablehook, deque[object](maxlen=0).append  # finalizers can't be interrupted
    signal.signal(signal.SIGALRM, handle)
    set_timer()
    try:
        yield lambda: handled
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # stays ignored, because a signal may be on its way
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook


def message(chance: random.Random, number: int, topic: str | None = None) -> Message:
    return Message(
        topic or chance.choice(TOPICS), str(number).encode() + bytes(chance.randrange(300)), tags="a", keys=f"k{number}"
    )


def use(store: MessageStore, chance: random.Random, numbers: Iterator[int], stored: dict[str, int]) -> None:
    """Make one of the possible changes to the store; add acknowledged messages to ``stored``."""
    what = chance.randrange(12)
    if what < 6:
        one = message(chance, next(numbers))
        store.append(one, chance.randrange(2))
        stored[one.keys[0]] = 1
    elif what < 8:
        topic = chance.choice(TOPICS)
        batch = [message(chance, next(numbers), topic) for _ in range(chance.randrange(1, 40))]
        store.append_batch(batch, chance.randrange(2))
        stored.update((one.keys[0], 1) for one in batch)
    elif what == 8:
        store.flush()
    elif what == 9:
        store.read(chance.choice(TOPICS), 0, chance.randrange(50))
    elif what == 10:
        store.find_by_key(TOPICS[0], f"k{chance.randrange(100)}")
    else:
        store.run_due(store.clock.now_ms())


def check(store: MessageStore, stored: dict[str, int], found_at: dict[str, int]) -> None:
    """Check queue offsets for gaps, and that everything acknowledged is there once in log, queues and index."""
    found: dict[str, int] = {}
    offsets: dict[tuple[str, int], int] = {}
    for one in store:
        name = one.topic, one.queue_id
        assert one.queue_offset == offsets.get(name, 0), f"{name}: two records, or none, at {offsets.get(name, 0)}"
        offsets[name] = one.queue_offset + 1
        assert one.keys[0] not in found, f"{one.keys} is there twice"
        found[one.keys[0]] = one.physical_offset
    assert stored.keys() <= found.keys(), f"lost: {sorted(stored.keys() - found.keys())[:5]}"
    for (topic, queue_id), end in offsets.items():
        assert store.queue_range(topic, queue_id) == (0, end)
    found_at.update(found)


def insist(act: Callable[[], object], pace: list[float]) -> None:
    """Call ``act`` until no signal interrupts it; each interruption makes signals rarer."""
    while True:
        try:
            act()
            del pace[1:]
            return
        except Alarm:
            pace.append(1.5 * pace[-1])


def run_one(path: Path, chance: random.Random) -> int:
    """Open, use and close a store while signals arrive; return how many there were."""
    numbers, stored = itertools.count(), dict[str, int]()
    opened: list[MessageStore] = []
    pace = [1.0]
    with alarms(chance, pace) as handled:
        for _ in range(chance.randrange(1, 3)):
            insist(lambda: opened.append(MessageStore.open(path, CONFIG, background=chance.random() < 0.5)), pace)
            for _ in range(chance.randrange(10, 80)):
                with suppress(Alarm):
                    use(opened[-1], chance, numbers, stored)
            insist(opened[-1].close, pace)
    with MessageStore.open(path) as store:
        assert store.recovered == []
        verdict = store.verify()
        assert verdict.sound, verdict
        found: dict[str, int] = {}
        check(store, stored, found)
        for key in chance.sample(sorted(found), min(20, len(found))):
            places = [one.physical_offset for topic in TOPICS for one in store.find_by_key(topic, key)]
            assert places == [found[key]], f"{key}: in the index at {places}, in the log at {found[key]}"
    return handled()


@pytest.mark.slow
def test_random_signals_leave_every_store_sound(
    tmp_path: Path, slow_budget: SlowBudget, figure: Callable[[str], None]
) -> None:
    signals = stores = 0
    for number in slow_budget.rounds(1_000, "stores under signals", at_least=10):
        signals += run_one(tmp_path / str(number), random.Random(number))
        stores += 1
    figure(f"signals: {signals} in {stores} stores, 0 unsound")
    assert signals
