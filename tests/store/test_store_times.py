"""Windows of time and places by time in queues, whatever the clock did, by what a close notes and without it."""

from __future__ import annotations

import os
from collections import defaultdict
from datetime import UTC, datetime
from typing import Literal

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings

from librmq.columns import reader
from librmq.files._memory import MemoryFiles
from librmq.message import Message
from librmq.store import MessageStore
from librmq.store.engine.store_times import UNKNOWN, StoreTimes
from librmq.store.format.documents import CLOSED_FILE
from tests.budget import examples
from tests.stores import ROOT, SMALL, START_MS, AnyClock

JUMPS = st.sampled_from((0, 0, 0, 1, 1, 3, 10, 1000, -1, -2, -5, -2000, 90_000_000, -90_000_000))
"""By how much the clock moves between two messages."""
STEPS = st.lists(st.tuples(JUMPS, st.integers(0, 2), st.integers(0, 25)), min_size=1, max_size=20)
"""Move of the clock, queue id, and 0 to close the store and open it again."""


def filled(steps: list[tuple[int, int, int]]) -> tuple[MemoryFiles, dict[int, list[int]]]:
    """Return a store of two messages a step, and the store times by queue."""
    files, clock = MemoryFiles(), AnyClock()
    times = defaultdict[int, list[int]](list)
    store = MessageStore.open(ROOT, SMALL, files=files, clock=clock, background=False)
    for move_ms, queue_id, rest in steps:
        clock.time_ms += move_ms
        if not rest:
            store.close()
            store = MessageStore.open(ROOT, SMALL, files=files, clock=clock, background=False)
        for _ in range(2):
            store.append(Message("T", b"x" * 40), queue_id)
            times[queue_id].append(clock.time_ms)
    check(store, times)
    store.close()
    return files, times


def moments(times: dict[int, list[int]]) -> list[int]:
    every = sorted({time_ms for of_queue in times.values() for time_ms in of_queue})
    return [every[0] - 1, *every, every[-1] + 1]


def check(store: MessageStore, times: dict[int, list[int]]) -> None:
    """Compare the answers of a store with the times of its messages."""
    bounds = moments(times)
    for queue_id, expected in times.items():
        queue, offsets = store.queues["T", queue_id], range(len(expected))
        assert store.times.extent(queue, offsets) == (min(expected), max(expected))
        for since in bounds[:: len(bounds) // 5 + 1]:
            following = (at for at, time_ms in enumerate(expected) if time_ms >= since)
            assert store.first_offset_from("T", queue_id, since) == next(following, len(expected))
            for until in bounds[:: len(bounds) // 5 + 1]:
                chosen = [at for at, time_ms in enumerate(expected) if since <= time_ms < until]
                span = store.times.span(queue, since, until, offsets)
                assert list(span[:1]) == chosen[:1]
                assert list(span[-1:]) == chosen[-1:]


@settings(max_examples=examples(60))
@given(STEPS)
def test_a_window_has_its_messages_whatever_the_clock_did(steps: list[tuple[int, int, int]]) -> None:
    files, times = filled(steps)
    with MessageStore.open(ROOT, files=files, read_only=True) as store:
        order = store.times.order
        assert order is not None
        assert order.begin == store.log.begin  # so that no header is read that an order of times spares
        check(store, times)
    files.delete(os.path.join(ROOT, CLOSED_FILE))
    with MessageStore.open(ROOT, files=files, read_only=True) as store:
        assert not store.times.covers_log
        check(store, times)


@settings(max_examples=examples(30))
@given(STEPS, st.booleans())
def test_windows_of_columns_divide_the_messages(steps: list[tuple[int, int, int]], is_noted: bool) -> None:
    files, times = filled(steps)
    if not is_noted:
        files.delete(os.path.join(ROOT, CLOSED_FILE))
    every = sorted(time_ms for of_queue in times.values() for time_ms in of_queue)
    bounds = moments(times)
    columns = ("storeTimestamp",)
    for until in bounds[:: len(bounds) // 3 + 1]:
        early, late = (
            sorted(int(time.timestamp() * 1000 + 0.5) for time in batches.read_all()[0].to_pylist())
            for batches in (
                reader(ROOT, files=files, columns=columns, until=until),
                reader(ROOT, files=files, columns=columns, since=until),
            )
        )
        assert early == [time_ms for time_ms in every if time_ms < until]
        assert early + late == every
        views: tuple[Literal["queues", "log"], ...] = ("queues", "log")
        for view in views:
            assert reader(ROOT, files=files, view=view, until=until).read_all().num_rows == len(early)
            assert reader(ROOT, files=files, view=view, since=until).read_all().num_rows == len(late)
        moment = pa.scalar(until * 1000, pa.timestamp("us", "UTC"))
        rows = reader(ROOT, files=files, filter=pc.field("storeTimestamp") < moment).read_all()
        assert rows.num_rows == len(early)


def test_a_moment_shows_no_message_that_was_stored_later() -> None:
    """The log ends before the first later message, wherever a search would look in its queues."""
    files, _ = filled([(1000, 0, 1), (9000, 1, 1), (-8000, 0, 1), (1, 0, 1), (50_000, 1, 0), (-1, 0, 1)])
    for is_noted in (True, False):
        if not is_noted:
            files.delete(os.path.join(ROOT, CLOSED_FILE))
        for after_ms, messages in ((1000, 2), (2000, 2), (10_000, 8), (52_000, 8), (52_001, 12)):
            at = datetime.fromtimestamp((START_MS + after_ms) / 1000, UTC)
            with MessageStore.open(ROOT, files=files, read_only=True, at=at) as store:
                assert len(list(store)) == messages


def test_what_a_close_noted_counts_only_for_the_log_that_it_saw() -> None:
    """Another record in the place of the last one: nothing is known, and headers are read."""
    files, times = filled([(1000, 0, 1), (-500, 0, 1)])
    with MessageStore.open(ROOT, files=files, read_only=True) as store:
        order = store.times.order
        assert order is not None
        assert order.setback_ms == 500
        last = list(store)[-1].physical_offset
    path = os.path.join(ROOT, "commitlog", f"{0:020}")
    files.open(path).buffer[last + 95] ^= 1
    with MessageStore.open(ROOT, files=files, read_only=True) as store:
        assert store.times.order is None or store.times.order.end == 0
        assert StoreTimes(store.log).extent(store.queues["T", 0], range(3)) == (START_MS + 500, START_MS + 1000)
    assert UNKNOWN < 0 < min(times[0])
