"""Each message is before a time or from it on, at every command, though the clock was set back and forth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ManualRunner
from librmq.diagnosis import report
from librmq.message import Message
from librmq.store import MessageStore
from tests.cli.stand import Shell
from tests.stores import SMALL, START_MS, AnyClock

MOVES = (0, 1, 5, -2000, 1, 3, 2000, 90_000_000, -180_000_000, 7, -1, 90_000_000, 40, -3, 2, 2, -60_000, 1, 61_000, 9)
"""How far the clock moves before each five messages."""
Row = dict[str, Any]


@pytest.fixture(params=["as librmq closed it", "as a broker left it"])
def times(request: pytest.FixtureRequest, shell: Shell) -> list[int]:
    """Make the store ``jumps`` in the shell's folder, and return the store times of its messages."""
    clock, times = AnyClock(), list[int]()
    with MessageStore.open("jumps", SMALL, clock=clock, background=False) as store:
        for number, move_ms in enumerate(MOVES):
            clock.time_ms += move_ms
            for queue_id in range(5):
                store.append(Message("TU"[number % 2], f"{len(times)}".encode(), tags="a", keys="k"), queue_id % 2)
                times.append(clock.time_ms)
    if request.param == "as a broker left it":
        Path("jumps/librmq/closed.json").unlink()
    return times


def bodies(rows: list[Row]) -> list[int]:
    return sorted(int(row["body"]) for row in rows)


@pytest.mark.slow
def test_two_windows_divide_the_messages(shell: Shell, times: list[int]) -> None:
    for moment in (START_MS + 5, START_MS - 90_000_000):
        early = [number for number, time_ms in enumerate(times) if time_ms < moment]
        late = [number for number, time_ms in enumerate(times) if time_ms >= moment]
        for window, expected in ((("--until", moment), early), (("--since", moment), late)):
            assert bodies(shell("show", "jumps", *window).rows) == expected
            by_topic = [row for topic in "TU" for row in shell("show", "jumps", "--topic", topic, *window).rows]
            assert bodies(by_topic) == expected
            assert bodies(shell("tail", "jumps", "-n", 500, *window).rows) == expected
            for by in ("topic", "tag", "hour"):
                rows = shell("count", "jumps", "--by", by, *window).rows
                assert sum(row["messages"] for row in rows) == len(expected), by
            shell("export", "jumps", "-o", f"rows{window[0]}{moment}.jsonl", *window)
            exported = [json.loads(line) for line in Path(f"rows{window[0]}{moment}.jsonl").read_text().splitlines()]
            assert sorted(int(row["body"]) for row in exported) == expected
            if expected:
                answer = shell("extract", "jumps", "-o", f"small{window[0]}{moment}", *window)
                assert [row["messages"] for row in answer.rows] == [len(expected)], answer.said


def test_topics_have_the_least_and_greatest_times(shell: Shell, times: list[int]) -> None:
    rows = {row["topic"]: row for row in shell("topics", "jumps").rows}
    for number, topic in enumerate("TU"):
        of_topic = [time_ms for at, time_ms in enumerate(times) if at // 5 % 2 == number]
        assert (rows[topic]["min_timestamp_ms"], rows[topic]["max_timestamp_ms"]) == (min(of_topic), max(of_topic))
    stats = shell("stats", "jumps").rows[0]
    assert (stats["min_timestamp_ms"], stats["max_timestamp_ms"]) == (min(times), max(times))


def test_reports_of_two_windows_divide_the_messages(times: list[int]) -> None:
    whole = report("jumps", check=False)
    assert whole.begin_ms is not None
    assert whole.begin_ms <= min(times)
    counts = [
        sum(topic.messages for topic in report("jumps", only={limit: str(START_MS + 5)}, check=False).stores[0].traffic)
        for limit in ("until", "since")
    ]
    early = sum(time_ms < START_MS + 5 for time_ms in times)
    assert counts == [early, len(times) - early]


def test_a_skip_passes_no_message_that_is_too_young(shell: Shell) -> None:
    """64 s ago the clock was set back by two hours: messages behind it look older than those before it."""
    clock = AnyClock()
    with Broker.open("shop", runner=ManualRunner(clock)) as broker:
        broker.create_topic("T", 1)
        broker.set_group("G")
        for move_ms in (0, 3_660_000, -7_200_000, 7_200_000 + 64_000):
            clock.time_ms += move_ms
            for _ in range(50):
                broker.store.append(Message("T", b"x"))
        broker.reset_group("G", "T", 0)
    (row,) = shell("skip", "shop", "--group", "G", "--topic", "T", "--older-than", "61m", "--dry-run").rows
    assert (row["begin"], row["end"]) == (0, 50)


def test_a_reset_to_a_time_begins_at_the_first_message_from_then_on(shell: Shell) -> None:
    clock = AnyClock()
    with Broker.open("shop", runner=ManualRunner(clock)) as broker:
        broker.create_topic("T", 1)
        broker.set_group("G")
        for move_ms in (0, 1000, -500, 10, -8000, 1, 1, 1, 1, 9000):
            clock.time_ms += move_ms
            broker.store.append(Message("T", b"x"))
    for at, expected in ((0, 0), (1, 1), (505, 1), (1000, 1), (1001, 9), (9999, 10)):
        words = ["--group", "G", "--topic", "T", "--to", START_MS + at, "--dry-run"]
        assert shell("reset", "shop", *words).rows[0]["after"] == expected
