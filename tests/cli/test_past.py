"""Commands with ``--at`` print what they print for a copy of the store that was made at that moment."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import librmq
from librmq.cli._syntax import PAST
from librmq.message.record import span
from tests.cli.stand import Shell

COMMANDS: dict[str, tuple[str, ...]] = {
    "count": ("--by", "key"),
    "dead-letters": (),
    "dump": (),
    "pending": (),
    "query": ("--topic", "orders", "--key", "k1"),
    "queue": ("orders", "0"),
    "queues": (),
    "show": (),
    "tail": ("--topic", "orders"),
    "topics": (),
}
WITHOUT_PROGRESS = {"diagnose", "groups", "lag", "stats", "story"}
"""Commands whose output depends on the progress of groups too."""
ELSEWHERE = {"traces"}
"""Commands that have nothing to print of this store, and are tried in files of their own."""
COPYING = {"export", "extract"}
"""Commands that write what they read."""


SETTINGS = librmq.BrokerConfig(
    timers=librmq.TimerConfig(slots_total=1200, timer_log_file_size=4096, timer_roll_window_slot=600)
)
SIZES = librmq.StoreConfig.tiny(commitlog_file_size=1 << 16)
"""Small, because the store is copied again and again."""


class Copied(NamedTuple):
    """A copy of the store, with the physical offset at which its log ends, and the time."""

    folder: Path
    log_end: int
    now_ms: int


class Recorded(NamedTuple):
    """A store, and copies of it from earlier moments."""

    store: Path
    moments: list[Copied]


def consume(message: Any) -> None:
    if "k1" in message.keys:
        raise librmq.ReconsumeLater


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a store with sends, delays, timers, transactions, retries and dead letters."""
    folder, moments = tmp_path_factory.mktemp("past"), []
    clock, states = librmq.ManualClock(1_700_000_000_000), list(librmq.TransactionState)
    for number in range(5):
        runner = librmq.ManualRunner(clock)
        with librmq.Broker.open(folder / "store", SETTINGS, store_config=SIZES, runner=runner) as broker:
            if number == 0:
                broker.create_topic("orders", 2)
            consumer = librmq.PushConsumer(broker, "billing", max_reconsume_times=1)
            consumer.subscribe("orders", consume)
            with (
                consumer,
                librmq.Producer(broker, "shop") as producer,
                librmq.TransactionProducer(broker, "sales", lambda _: librmq.TransactionState.UNKNOWN) as transactions,
            ):
                producer.send("orders", b"x", keys="k1", queue=0)
                producer.send("orders", b"y", keys=f"k{number + 2}", delay=5 + 40 * number)
                producer.send("orders", b"z", delay_level=5)
                half = librmq.Message("orders", b"half", keys=f"half{number}")
                transactions.send_in_transaction(half, execute=lambda *_, at=number: states[at % len(states)])
                runner.advance(43_000)
            end = broker.store.log.end
        target = folder / str(number)
        shutil.copytree(folder / "store", target)
        moments.append(Copied(target, end, clock.now_ms()))
        clock.advance(ms=1)
    return Recorded(folder / "store", moments)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_past_is_shown_as_a_copy_shows_it(command: str, recorded: Recorded, shell: Shell) -> None:
    options = COMMANDS[command]
    printed = []
    for folder, log_end, now_ms in recorded.moments:
        expected = shell(command, folder, *options)
        for moment in (log_end, datetime.fromtimestamp(now_ms / 1000, UTC).isoformat()):
            answer = shell(command, recorded.store, *options, "--at", moment)
            assert (answer.status, answer.rows) == (expected.status, expected.rows)
            assert answer.said.startswith("note: the store as of 2023-11-14T22:")
        printed.append(expected.out)
    assert len(set(printed)) > 1


@pytest.mark.slow
def test_an_export_ends_with_the_moment(recorded: Recorded, shell: Shell, tmp_path: Path) -> None:
    for number, (folder, log_end, now_ms) in enumerate(recorded.moments):
        expected = tmp_path / f"{number}.jsonl"
        assert shell("export", folder, "--out", expected, "--all").status == 0
        for kind, moment in (("end", log_end), ("time", datetime.fromtimestamp(now_ms / 1000, UTC).isoformat())):
            out = tmp_path / f"{number}-{kind}.jsonl"
            answer = shell("export", recorded.store, "--out", out, "--all", "--at", moment)
            assert answer.status == 0
            assert out.read_text("utf-8") == expected.read_text("utf-8")


def test_an_extracted_store_ends_with_the_moment(recorded: Recorded, shell: Shell, tmp_path: Path) -> None:
    for number, (folder, log_end, _) in enumerate(recorded.moments):
        shell("extract", folder, "--topic", "orders", "-o", tmp_path / f"{number}")
        shell("extract", recorded.store, "--topic", "orders", "-o", tmp_path / f"{number}-at", "--at", log_end)
        expected = shell("dump", tmp_path / f"{number}")
        assert (expected.status, expected.rows) == (0, shell("dump", tmp_path / f"{number}-at").rows)


def test_ends_of_lag_are_those_of_then(recorded: Recorded, shell: Shell) -> None:
    folder, log_end, _ = recorded.moments[1]
    then = {(row["topic"], row["queue_id"]): row for row in shell("lag", folder).rows}
    for row in shell("lag", recorded.store, "--at", log_end).rows:
        early = then.get((row["topic"], row["queue_id"]), {"min_offset": 0, "max_offset": 0})
        assert (row["min_offset"], row["max_offset"]) == (early["min_offset"], early["max_offset"])
        assert (row["consumer_offset"], row["lag"]) == (None, row["max_offset"] - row["min_offset"])


def test_a_story_ends_with_the_moment(recorded: Recorded, shell: Shell) -> None:
    folder, log_end, _ = recorded.moments[1]
    in_log = [row for row in shell("story", folder, "k1").rows if row["at_ms"] is not None]
    rows = shell("story", recorded.store, "k1", "--at", log_end).rows
    assert [row for row in rows if row["at_ms"] is not None] == in_log
    assert {row["event"] for row in rows if row["at_ms"] is None} <= {"dead"}


def test_before_the_first_message_nothing_is_wrong(recorded: Recorded, shell: Shell) -> None:
    assert shell("diagnose", recorded.store, "--at", "0").rows == []
    assert {row["consumer_offset"] for row in shell("lag", recorded.store, "--at", "0").rows} <= {None}
    assert shell("pending", recorded.store, "--at", "0").rows == []


def test_commands_that_show_the_past_are_listed() -> None:
    assert COMMANDS.keys() | WITHOUT_PROGRESS | COPYING | ELSEWHERE == PAST


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "--at", "99999999"), "at: expected a physical offset from 0 to"),
        (("show", "--at", "2001-01-01T00:00Z"), "when the first message was stored, found 2001-01-01 00:00:00.000 UTC"),
        (("show", "--at", "99999999999"), "where the log begins and ends, found 99999999999; a time needs its date"),
        (("show", "--at", "soon"), "not a time: 'soon'; expected a physical offset, a date such as"),
        (("show", "--at", "never"), "not a time: 'never'"),
        (("tail", "-f", "--at", "0"), "--at: expected no --follow with it"),
        (("dead-letters", "--resend", "--at", "0"), "--at: expected no --resend with it"),
        (("dump", "--all", "--at", "0"), "--at: expected no --all with it"),
        (("expiring", "--at", "0"), "--at: expiring has no earlier moment, because the progress that groups had then"),
        (("timers", "--at", "0"), "--at: timers has no earlier moment, because the timer's files hold only"),
        (("verify", "--at", "0"), "--at: verify has no earlier moment, because it compares the files as they are"),
    ],
)
def test_a_moment_that_makes_no_sense_is_refused(
    words: tuple[str, ...], said: str, recorded: Recorded, shell: Shell
) -> None:
    command, *options = words
    answer = shell(command, recorded.store, *options)
    assert (answer.status, answer.out) == (2, "")
    assert said in answer.said


@pytest.mark.parametrize(("command", "at"), [("show", "2001-01-01T00:00Z"), ("lag", "300")])
def test_a_stored_time_that_no_calendar_has_is_said_as_a_number(
    command: str, at: str, recorded: Recorded, tmp_path: Path, shell: Shell
) -> None:
    folder = shutil.copytree(recorded.store, tmp_path / "damaged")
    log, stored_at = folder / "commitlog" / f"{0:020}", span("size", "store_timestamp") - 8
    data = bytearray(log.read_bytes())
    data[stored_at] = 1
    log.write_bytes(data)
    stored_ms = int.from_bytes(data[stored_at : stored_at + 8])
    answer = shell(command, folder, "--at", at)
    assert str(stored_ms) in answer.said
    assert "a bug in librmq" not in answer.said
