"""A store as a stream of record batches: the rows that settings select, the files read, and the processes used."""

from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pytest

import librmq.columns
from librmq import ManualClock, Message, MessageStore, StoreConfig
from librmq.columns.options import OffsetTimes, ReadOptions, ReadSelection, View
from librmq.columns.planned_store import PlannedStore
from librmq.consumequeue import ConsumeQueue
from librmq.consumequeue_entries import ENTRY
from librmq.errors import ConfigError, CorruptionError, FilterSyntaxError, NotAStoreError
from librmq.files._disk import DiskFiles
from librmq.files._memory import MemoryFiles
from librmq.message.topics import SystemTopic
from tests.budget import many
from tests.programs import run_program
from tests.stores import ROOT, CountingFiles, from_disk, in_memory

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.compute as pc

from librmq.columns import DataLossError, dataset, export, reader

START_MS = 1_700_000_000_000
COUNT = 400
CONFIG = StoreConfig.tiny(commitlog_file_size=4096, max_message_size=2048)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of messages a second apart in two topics of two queues; every tenth message is delayed."""
    folder = tmp_path_factory.mktemp("stores") / "s"
    clock = ManualClock(START_MS)
    with MessageStore.open(folder, CONFIG, clock=clock) as store:
        for number in range(COUNT):
            clock.advance(ms=1000)
            message = Message(
                "AB"[number % 2],
                b"%d " % number * 20,
                tags=f"t{number % 4}",
                properties={"amount": str(number)},
                delay_level=1 if number % 10 == 0 else None,
            )
            store.append(message, number // 2 % 2)
    return folder


USER = [number for number in range(COUNT) if number % 10]


def numbers(found: Any) -> list[int]:
    return [int(body.split()[0]) for body in found.read_all().column("body").to_pylist()]


def moment(number: int) -> int:
    return START_MS + 1000 * (number + 1)


def test_without_settings_it_reads_all_user_messages(path: Path) -> None:
    found = reader(path)
    assert isinstance(found, pa.RecordBatchReader)
    assert found.schema.names[:4] == ["topic", "queueId", "queueOffset", "physicalOffset"]
    assert numbers(found) == USER  # in the order of the log
    some = reader(path, topic=re.compile("a", re.IGNORECASE), columns=["topic"]).read_all()
    assert set(some.column("topic").to_pylist()) == {"A"}
    everything = reader(str(path), topic=re.compile(".*"), columns=["topic"]).read_all()
    assert everything.num_rows == COUNT
    assert SystemTopic.SCHEDULE in everything.column("topic").to_pylist()


@many
@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"topic": "B"}, lambda n: n % 2),
        ({"topic": ["B", "none"], "queue": 1}, lambda n: n % 2 and n // 2 % 2),
        ({"topic": re.compile("[AC]"), "queue": [0, 7]}, lambda n: n % 2 == 0 and n // 2 % 2 == 0),
        ({"tags": "t1 || t2"}, lambda n: n % 4 in (1, 2)),
        ({"sql": "amount BETWEEN 5 AND 7"}, lambda n: 5 <= n <= 7),
        ({"since": moment(100), "until": moment(111)}, lambda n: 100 <= n < 111),
        ({"since": datetime.fromtimestamp(moment(390) / 1000, UTC)}, lambda n: n >= 390),
        ({"filter": pc.field("storeTimestamp") < pa.scalar(moment(9) * 1000, pa.timestamp("us", "UTC"))},
         lambda n: n < 9),
        ({"filter": pc.match_substring(pc.field("body").cast("string"), "77")}, lambda n: "77" in str(n)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("view", ["messages", "log"])
def test_settings_choose(path: Path, view: Any, settings: Any, wanted: Callable[[int], object]) -> None:
    found = reader(path, **{"view": view, "topic": ["A", "B"]} | settings)
    assert numbers(found) == [number for number in USER if wanted(number)]


def test_messages_that_wait_for_a_delay_are_chosen_by_their_tag(path: Path) -> None:
    """Their entries hold the time of delivery, not the hash of the tag."""
    waiting = reader(path, topic=SystemTopic.SCHEDULE, columns=["physicalOffset", "tags"]).read_all()
    for tag in ("t0", "t2"):
        found = reader(path, topic=SystemTopic.SCHEDULE, tags=tag, columns=["physicalOffset", "tags"]).read_all()
        assert found.equals(waiting.filter(pc.field("tags") == tag))
        assert found.num_rows == COUNT // 20
    assert reader(path, topic=SystemTopic.SCHEDULE, tags="t1").read_all().num_rows == 0


def test_offsets_of_queues(path: Path) -> None:
    columns = ["topic", "queueId", "queueOffset"]

    def places(**settings: Any) -> list[tuple[Any, ...]]:
        return sorted(tuple(row.values()) for row in reader(path, columns=columns, **settings).read_all().to_pylist())

    assert places(offsets={("A", 0): range(3, 5), ("B", 1): 99}) == [("A", 0, 3), ("A", 0, 4), ("B", 1, 99)]
    every = [("A", 0), ("A", 1), ("B", 0), ("B", 1)]
    assert places(offsets=range(7, 8)) == [(*name, 7) for name in every]
    assert places(view="queues", offsets=range(7, 8), topic=["A", "B"]) == [(*name, 7) for name in every]
    with pytest.raises(DataLossError, match="offsets 3 to 900"):
        places(offsets={("A", 0): range(3, 900)})
    assert places(offsets={("A", 0): 900}, fail_on_data_loss=False) == []
    with pytest.raises(ConfigError, match=r"^offsets: .* no queue 9 of topic 'A'"):
        places(offsets={("A", 9): 0})


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with retries and dead letters."""
    folder = tmp_path_factory.mktemp("stores") / "failing"
    with MessageStore.open(folder, CONFIG) as store:
        for topic in ("orders", "%RETRY%billing", "%RETRY%shop", "%DLQ%billing", "RMQ_SYS_TRACE_TOPIC"):
            store.append(Message(topic, b"body"), 0)
    return folder


@pytest.mark.parametrize(
    ("settings", "topics"),
    [
        ({}, {"orders"}),
        ({"view": "all"}, {"orders", "%RETRY%billing", "%RETRY%shop", "%DLQ%billing", "RMQ_SYS_TRACE_TOPIC"}),
        ({"topics": "%RETRY%*"}, {"%RETRY%billing", "%RETRY%shop"}),
        ({"topics": "%RETRY%*", "view": "all"}, {"%RETRY%billing", "%RETRY%shop"}),
        ({"topic": ["%*%billing", "ord*"], "view": "queues"}, {"orders", "%RETRY%billing", "%DLQ%billing"}),
        ({"topic": "*"}, {"orders", "%RETRY%billing", "%RETRY%shop", "%DLQ%billing", "RMQ_SYS_TRACE_TOPIC"}),
        ({"topic": "%DLQ%", "view": "all"}, set()),
    ],
)
def test_topics_by_pattern(failing: Path, settings: Any, topics: set[str]) -> None:
    assert set(reader(failing, columns=["topic"], **settings).read_all().column("topic").to_pylist()) == topics
    assert set(dataset(failing, **settings).to_table(["topic"]).column("topic").to_pylist()) == topics


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"topic": ["orders", "order"]}, "topic 'order' has no queue in STORE; did you mean 'orders'?"),
        ({"topics": "zzz"}, "topic 'zzz' has no queue in STORE; librmq topics lists the topics"),
        ({"topics": "%RETRY%x*"}, "no topic of STORE matches %RETRY%x.*; librmq topics lists the topics"),
        ({"topics": "%RETRY%*"}, ""),
        ({"topics": "RMQ_SYS_TRACE_TOPIC"}, ""),
        ({"topics": ["RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer"]}, ""),
    ],
)
def test_a_topic_that_no_store_has_is_logged(
    failing: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: Any, text: str
) -> None:
    for view in ("messages", "all", "queues", "log"):
        reader(failing, view=view, **settings)
        assert caplog.messages == ([text.replace("STORE", str(failing))] if text else [])
        caplog.clear()
    export(failing, tmp_path / "out.csv", **settings)
    assert caplog.messages == ([text.replace("STORE", str(failing))] if text else [])


def test_both_spellings_of_a_setting_are_refused(failing: Path) -> None:
    with pytest.raises(ConfigError, match=r"^topics: it is another spelling of topic, expected only one of them"):
        reader(failing, topic="orders", topics="orders")


def test_a_count_does_not_read_the_log(path: Path) -> None:
    opening, count, some, every = CountingFiles(), CountingFiles(), CountingFiles(), CountingFiles()
    reader(path, files=opening)
    messages = len(reader(path, files=every, columns=["queueId"]).read_all())
    assert len(every.opened) > len(opening.opened)
    assert dataset(path, files=count).count_rows() == messages
    assert count.opened == opening.opened
    first = pc.field("queueOffset") < 3
    assert dataset(path, files=some).count_rows(filter=first) == reader(path, filter=first).read_all().num_rows
    assert some.opened == opening.opened


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"topicz": "A"}, ConfigError, "topicz: unknown setting of reader; did you mean topic"),
        ({"queueId": 1}, ConfigError, "queueId: unknown setting of reader; did you mean queue?"),
        ({"selector": "a = 1"}, ConfigError, "selector: unknown setting of reader; did you mean sql?"),
        ({"startingTimestamp": 5}, ConfigError, "startingTimestamp: unknown setting of reader; did you mean since?"),
        ({"ending_timestamp": 5}, ConfigError, "ending_timestamp: unknown setting of reader; did you mean until?"),
        ({"topicPattern": "A.*"}, ConfigError, "did you mean topic, which takes re.compile(…)?"),
        (
            {"failOnDataLoss": False},
            ConfigError,
            "failOnDataLoss: unknown setting of reader; did you mean fail_on_data",
        ),
        (
            {"startingOffsets": "latest"},
            ConfigError,
            "startingOffsets: unknown setting of reader; did you mean offsets?",
        ),
        ({"view": "queue"}, ConfigError, "view: expected one of messages, all, queues, log, found 'queue'"),
        ({"columns": ["bodi"]}, ConfigError, "no column 'bodi'; did you mean body"),
        ({"view": "queues", "columns": ["body"]}, ConfigError, "the view queues has no column 'body'"),
        ({"view": "queues", "sql": "a = 1"}, ConfigError, "has no properties"),
        ({"since": datetime(2023, 1, 1)}, ConfigError, "since: expected a time with a time zone"),
        ({"offsets": range(0, 9, 2)}, ConfigError, "expected a range such as"),
        ({"offsets": {"A": 5}}, ConfigError, "a topic and a queue id like"),
        ({"view": "log", "offsets": {("A", 0): 5}}, ConfigError, "give a range"),
        ({"mode": "fast"}, ConfigError, "FAILFAST"),
        ({"filter": "topic = 'A'"}, ConfigError, "filter: expected an expression such as"),
        ({"storage_options": {"key": "k"}}, ConfigError, "storage_options: they are for URLs, and no store is one"),
        ({"since": 5, "until": 3}, ConfigError, "since: expected a time before until (3), found 5"),
        ({"topic": "A", "offsets": {("B", 0): 5}}, ConfigError, "offsets: ('B', 0) is of a topic that topic does not"),
        ({"sql": "a >< 5"}, FilterSyntaxError, "^"),
        ({"filter": pc.field("nothing") == 5}, ConfigError, "filter: No match for FieldRef.Name(nothing); the columns"),
        ({"filter": pc.field("topic") == 5}, ConfigError, "filter: Function 'equal' has no kernel"),
        ({"filter": pc.field("bornTimestamp") > datetime(2023, 1, 1)}, ConfigError, "filter: Cannot compare timestamp"),
        ({"filter": pc.field("topic")}, ConfigError, "filter: Filter expression must evaluate to bool"),
        ({"queue": 1, "offsets": {("B", 0): 5}}, ConfigError, "offsets: ('B', 0) is a queue that queue does not"),
        ({"offsets": {("AA", 0): 5}}, ConfigError, "no queue 0 of topic 'AA' to read; did you mean A:0?"),
        ({"offsets": {("A", 0): 900}}, DataLossError, "expected offset 900, found 0 to"),
        ({"offsets": {("A", 0): 900}}, DataLossError, "to read the rest, set fail_on_data_loss=False"),
    ],
)
def test_wrong_settings_are_refused_at_the_call(path: Path, settings: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        reader(path, **settings)


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError):
        reader(tmp_path)


def test_a_link_to_a_store_is_no_other_store(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match=r"link lead to the same store; name it once"):
        reader([path, tmp_path / "link"])


def test_several_stores(path: Path, tmp_path: Path) -> None:
    with MessageStore.open(tmp_path / "other", CONFIG, clock=ManualClock(moment(COUNT))) as store:
        store.append(Message("Late", b"x"))
    found = reader([path, tmp_path / "other"]).read_all()
    assert found.column("store").value_counts().to_pylist() == [
        {"values": str(path), "counts": len(USER)},
        {"values": str(tmp_path / "other"), "counts": 1},
    ]


@pytest.mark.parametrize("settings", [{}, {"view": "log"}, {"view": "queues"}, {"topic": "A"}, {"mode": "PERMISSIVE"}])
def test_a_copy_beside_its_store_is_refused(path: Path, tmp_path: Path, settings: Any) -> None:
    """Whichever is behind, or if both have messages of their own, and however they are read.

    A copy that has no message of its store is another store.
    """
    earlier, later = tmp_path / "earlier", tmp_path / "later"
    for copy in (earlier, later):
        shutil.copytree(path, copy)
    with MessageStore.open(later, CONFIG, clock=ManualClock(moment(COUNT + 10))) as store:
        for number in range(50):
            store.append(Message("A", b"%d" % number * 50), number % 2)
    for stores in ([earlier, later], [later, earlier]):
        with pytest.raises(ConfigError, match=r"later has the messages of .*/earlier, up to the one at \d+ at least"):
            reader(stores, **settings)
    with MessageStore.open(earlier, CONFIG, clock=ManualClock(moment(COUNT + 20))) as store:
        store.append(Message("A", b"in the copy alone"))
    with pytest.raises(ConfigError, match=r"later has the messages of .*/earlier, up to the one at \d+ at least"):
        reader([later, earlier], **settings)
    for file in sorted((later / "commitlog").iterdir())[:-1]:
        file.unlink()
    (later / "librmq" / "closed.json").unlink()
    assert reader([earlier, later], **settings).read_all().num_rows > 0


@many
@pytest.mark.parametrize(
    "settings",
    [
        {"topic": "Late"},
        {"topic": "A", "offsets": range(5)},
        {"offsets": {("A", 0): range(40, 45)}},
        {"since": moment(395)},
        {"until": moment(8)},
        {"view": "log", "since": moment(395)},
        {"view": "log", "since": moment(200), "until": moment(210)},
        {"filter": pc.field("topic") == "Late"},
        {"filter": (pc.field("queueOffset") < 3) & (pc.field("tags") != "t1")},
        {"filter": pc.field("physicalOffset") < 3000},
        {"filter": pc.field("storeTimestamp") > pa.scalar(moment(396) * 1000, pa.timestamp("us", "UTC"))},
    ],
)
def test_unneeded_records_are_not_read(path: Path, tmp_path: Path, settings: Any) -> None:
    """A log file without wanted rows is opened at most to look up a time."""
    store = tmp_path / "s"
    shutil.copytree(path, store)
    with MessageStore.open(store, CONFIG, clock=ManualClock(moment(COUNT + 10))) as opened:
        for number in range(3):
            opened.append(Message("Late", b"%d " % number * 20, tags="t1"))
    whole, some = CountingFiles(), CountingFiles()
    reader(store, files=whole).read_all()
    batches = reader(store, files=some, **settings)
    some.opened.clear()
    found = batches.read_all()
    assert 0 < found.num_rows < 30
    assert whole.log_bytes > 15 * 4096
    assert some.log_bytes <= 4 * 4096, sorted(some.opened)


def test_rows_are_filtered_before_bodies_are_read(path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged body is not an error if a filter excludes its row."""
    shutil.copytree(path, tmp_path / "s")
    place = reader(path, filter=pc.field("tags") == "t1").read_all().column("physicalOffset")[5].as_py()
    file = tmp_path / "s" / "commitlog" / f"{place - place % 4096:020d}"
    raw = bytearray(file.read_bytes())
    raw[place % 4096 + 90] ^= 0xFF
    file.write_bytes(raw)
    for settings in ({"tags": "t2"}, {"sql": "TAGS = 't2'"}, {"filter": pc.field("tags") == "t2"}):
        assert reader(tmp_path / "s", **settings).read_all().num_rows
    with pytest.raises(CorruptionError, match="checksum"):
        reader(tmp_path / "s").read_all()
    with caplog.at_level("WARNING", "librmq.columns"):
        assert reader(tmp_path / "s", mode="DROPMALFORMED").read_all().num_rows == len(USER) - 1
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path / 's'}: damaged places left out of a read: 1, the first: ")
    assert f": at {place}: " in line


def test_a_condition_on_tags_leaves_out_records_by_the_hash_in_their_entries(path: Path, tmp_path: Path) -> None:
    """As the setting does: a record that is unreadable is not looked at. Other conditions look at every record."""
    shutil.copytree(path, tmp_path / "s")
    tags, whole = pc.field("tags"), reader(path).read_all()
    place = whole.filter(tags == "t1").column("physicalOffset")[5].as_py()
    file = tmp_path / "s" / "commitlog" / f"{place - place % 4096:020d}"
    raw = bytearray(file.read_bytes())
    raw[place % 4096 + 4] ^= 0xFF
    file.write_bytes(raw)
    many = tags.isin([f"t{number}" for number in range(2, 40)])
    for wanted in (
        tags == "t2",
        many,
        (tags == "t2") & (pc.field("queueId") >= 0),
        tags == pc.scalar(b"t2"),
        many & tags.is_valid(),
        tags == "x",
    ):
        found = reader(tmp_path / "s", filter=wanted, fail_on_data_loss=False).read_all()
        assert found.equals(whole.filter(wanted)), wanted
    keys = pc.field("keys")
    for wanted in (tags != "t2", (tags == "t2") | (keys != "none"), ~(tags == "t2"), pc.starts_with(tags, "t2"),
                   tags.is_null() | (tags == "t2"), pc.coalesce(tags, pc.scalar("t2")) == "t2"):  # fmt: skip
        with pytest.raises(CorruptionError):
            reader(tmp_path / "s", filter=wanted).read_all()


def test_an_end_by_time_in_a_killed_store_with_a_damaged_queue(path: Path, tmp_path: Path) -> None:
    """The other queues are found by time as ever."""
    shutil.copytree(path, tmp_path / "s")
    (file,) = (tmp_path / "s" / "consumequeue" / "B" / "1").iterdir()
    os.truncate(file, 30)
    (tmp_path / "s" / "abort").touch()
    middle = START_MS + COUNT * 500
    wanted: dict[str, Any] = {"topic": "A", "columns": ["physicalOffset"]}
    whole = reader(path, **wanted).read_all()["physicalOffset"].to_pylist()
    until = reader(path, until=middle, **wanted).read_all()["physicalOffset"].to_pylist()
    assert 0 < len(until) < len(whole)
    found = reader(tmp_path / "s", mode="DROPMALFORMED", until=middle, **wanted).read_all()
    assert found["physicalOffset"].to_pylist() == until
    options = ReadOptions(
        (str(tmp_path / "s"),),
        selection=ReadSelection(topics=frozenset("A")),
        mode="DROPMALFORMED",
        fail_on_data_loss=False,
        starting={"A": {"0": 3}},
        ending=OffsetTimes({"A": {"0": middle}}),
    )
    with PlannedStore.open(str(tmp_path / "s"), options) as planned:
        assert planned.narrowed()["A", 0] == range(3, planned.first_at(("A", 0), middle))
        assert planned.damage


@pytest.mark.slow
def test_the_log_view_decodes_no_records_of_other_queues(path: Path, tmp_path: Path) -> None:
    """Damage in a record of another queue is no error; damage in a record that is wanted is one."""
    shutil.copytree(path, tmp_path / "s")
    place = reader(path, topic="A", queue=0).read_all().column("physicalOffset")[9].as_py()
    file = tmp_path / "s" / "commitlog" / f"{place - place % 4096:020d}"
    raw = bytearray(file.read_bytes())
    raw[place % 4096 + 4] ^= 0xFF
    file.write_bytes(raw)
    unhurt: list[Any] = [{"topic": "B"}, {"topic": "A", "queue": 1}, {"topic": SystemTopic.SCHEDULE}]
    for settings in unhurt:
        found, sound = (reader(one, view="log", **settings).read_all() for one in (tmp_path / "s", path))
        assert found.equals(sound)
        assert found.num_rows == reader(path, **settings).read_all().num_rows
    with pytest.raises(CorruptionError):
        reader(tmp_path / "s", view="log", topic="A").read_all()


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 5])
def test_a_closed_store_without_its_last_log_files(
    path: Path, tmp_path: Path, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No crash explains queue entries beyond the log, so the messages are not left out in silence."""
    copy = shutil.copytree(path, tmp_path / "copy")
    for file in sorted((copy / "commitlog").iterdir())[kept:]:
        file.unlink()
    for view in get_args(View):
        with pytest.raises(CorruptionError, match=r"queues have entries up to \d+, beyond the log's end"):
            reader(copy, view=view)
    found = reader(copy, topic="A", mode="PERMISSIVE", columns=["body", "_corrupt_record"]).read_all().to_pylist()
    (told,) = (row["_corrupt_record"] for row in found if row["_corrupt_record"])
    assert "messages (A/0 " in told, told
    bodies = [row["body"] for row in found if row["body"] is not None]
    assert bodies == reader(path, topic="A").read_all()["body"].to_pylist()[: len(bodies)]
    assert bool(bodies) == bool(kept)
    (copy / "abort").touch()  # nor does a crash lose what the last close, or the checkpoint, covers
    with pytest.raises(CorruptionError, match="the last close noted that it reached" if kept else "beyond the log's"):
        reader(copy)
    (copy / "librmq" / "closed.json").unlink()
    if kept:  # it is as a copy of a running store is
        assert reader(copy, topic="A", columns=["body"]).read_all()["body"].to_pylist() == bodies
        assert "beyond the log's end: this copy was made while a process wrote, or has lost its end" in caplog.text
    else:
        with pytest.raises(CorruptionError, match="beyond the log's end"):
            reader(copy, topic="A", columns=["body"])


@pytest.mark.parametrize("entry", [(0, -5, 0), (1 << 40, 100, 0)])
def test_a_damaged_entry_is_reported_as_the_mode_says(tmp_path: Path, entry: tuple[int, int, int]) -> None:
    """Retention makes no entry lead behind the log, so ``fail_on_data_loss`` does not hide one that does."""
    with MessageStore.open(tmp_path / "s", CONFIG) as store:
        for number in range(4):
            store.append(Message("T", b"%d" % number), 0)
    file = tmp_path / "s" / "consumequeue" / "T" / "0" / f"{0:020d}"
    raw = bytearray(file.read_bytes())
    raw[40:60] = ENTRY.pack(*entry)
    file.write_bytes(raw)
    columns = ["queueOffset", "body"]
    for loss in (True, False):
        with pytest.raises(CorruptionError, match=r"at 40: queue offset 2: found physical offset"):
            reader(tmp_path / "s", fail_on_data_loss=loss).read_all()
        shown = reader(tmp_path / "s", mode="PERMISSIVE", fail_on_data_loss=loss, columns=columns).read_all()
        assert sorted(map(tuple, map(dict.values, shown.to_pylist()))) == [(0, b"0"), (1, b"1"), (2, None), (3, b"3")]
        assert reader(tmp_path / "s", mode="DROPMALFORMED", fail_on_data_loss=loss).read_all().num_rows == 3


def test_planning_again_keeps_no_queue_open(path: Path, tmp_path: Path) -> None:
    """A stream plans at each trigger, also of a damaged store, whose queues the planner opens itself."""
    copy = shutil.copytree(path, tmp_path / "copy")
    os.truncate(sorted((copy / "commitlog").iterdir())[-1], 100)

    def held() -> int:
        gc.collect()
        return sum(type(one) is ConsumeQueue for one in gc.get_objects())

    with PlannedStore.open(str(copy), ReadOptions((str(copy),), mode="PERMISSIVE")) as store:
        before = held()
        for _ in range(3):
            store.refresh()
        assert held() <= before


def test_a_store_that_was_not_closed_is_read_unchanged(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path / "open", CONFIG)
    for number in range(50):
        store.append(Message("T", b"%d" % number))
    shutil.copytree(tmp_path / "open", tmp_path / "crashed")
    log = tmp_path / "crashed" / "commitlog" / f"{4096:020d}"
    end = store.log.end % 4096
    log.write_bytes(log.read_bytes()[:end] + b"torn" + log.read_bytes()[end + 4 :])
    before = from_disk(tmp_path / "crashed")
    assert numbers(reader(tmp_path / "crashed")) == list(range(50))
    assert numbers(reader(tmp_path / "crashed", view="log")) == list(range(50))
    assert numbers(reader(tmp_path / "open")) == list(range(50))
    assert from_disk(tmp_path / "crashed") == before
    store.close()


@pytest.mark.slow
def test_a_read_leaves_a_store_in_memory_as_it_was(path: Path) -> None:
    """A reader must not release the pages of memory files, which have no other copy of their contents."""
    files = in_memory(from_disk(path))
    for _ in range(2):
        assert numbers(reader(ROOT, files=files)) == USER
        assert numbers(reader(ROOT, files=files, view="log")) == numbers(reader(path, view="log"))


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
PEAK = """
import re, sys
from librmq.columns import reader
store = sys.argv[1]
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
next(reader(store, columns=["queueOffset"]))
before = peak()
rows = sum(batch.num_rows for batch in reader(store))
read = peak()
print(rows, read - before)
"""


@linux
@pytest.mark.platform
@pytest.mark.slow
def test_memory_does_not_grow_with_the_store(tmp_path: Path) -> None:
    """285 MiB of bodies are read, and about 85 MiB are held, as for a store of a third."""
    with MessageStore.open(tmp_path / "s", StoreConfig(commitlog_file_size=32 << 20)) as store:
        for number in range(5000):
            store.append(Message("T", bytes([number % 256]) * 60_000))
    done = run_program(PEAK, tmp_path / "s")
    assert not done.returncode, done.stderr
    rows, read = map(int, done.stdout.split())
    assert rows == 5_000
    assert read < 150, "MiB"


# --------------------------------------------------------------------------------------------------------- the room


@pytest.mark.slow
@linux
@pytest.mark.platform
def test_many_queues_need_few_descriptors(tmp_path: Path) -> None:
    config = StoreConfig.tiny(commitlog_file_size=4 << 20)
    with MessageStore.open(tmp_path / "s", config, clock=ManualClock(START_MS)) as store:
        for number in range(400):  # of as many entries that a plan does not keep them
            store.append_batch([Message(f"T{number}", b"%d" % each) for each in range(60)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader(tmp_path / "s", columns=["topic"]).read_all()  # loads what it needs
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(limits[0]) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[320], limits[1]))  # some 256 files of queues may be mapped
    gc.disable()  # descriptors are given back without it
    try:
        assert reader(tmp_path / "s", columns=["topic"]).read_all().num_rows == 24_000
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("end", ["closed", "closed by a broker", "killed", "open"])
def test_a_plan_opens_each_queue_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Recovering a killed store in memory looks at each of its queues once more."""
    store = MessageStore.open(tmp_path / "s", CONFIG, clock=ManualClock(START_MS), background=False)
    for number in range(100):
        store.append(Message(f"T{number % 20}", b"%d" % number), 0)
    store.flush()
    if end == "killed":
        store.abandon()
    elif end != "open":
        store.close()
    if end == "closed by a broker":
        shutil.rmtree(tmp_path / "s" / "librmq")
    looks: list[str] = []

    def counted(name: str) -> Callable[..., object]:
        call: Callable[..., object] = getattr(DiskFiles, name)

        def look(files: DiskFiles, path: str, *arguments: object, **settings: object) -> object:
            looks.extend(part for part in path.split(os.sep) if re.fullmatch("T[0-9]+", part))
            return call(files, path, *arguments, **settings)

        return look

    for name in ("descriptor", "read_used"):
        monkeypatch.setattr(DiskFiles, name, counted(name))
    batches = reader(tmp_path / "s", columns=["topic"])
    found = Counter(looks)
    assert len(found) == 20
    assert set(found.values()) == {1}
    assert batches.read_all().num_rows == 100


def test_an_export_of_a_package_is_not_a_module() -> None:
    names = vars(librmq.columns)["__all__"]
    assert not [name for name in names if type(getattr(librmq.columns, name)) is type(os)]
    assert callable(dataset)


@pytest.mark.slow
def test_a_batch_is_bounded_by_what_its_bodies_decode_to() -> None:
    """Compressed bodies of a few bytes each, of which a batch of rows would take hundreds of MiB."""
    bodies = [b"%d" % number + bytes(2_000_000) for number in range(20)]
    files = MemoryFiles()
    with MessageStore.open("/s", StoreConfig(compress_from=4096), files=files, background=False) as store:
        for body in bodies:
            store.append(Message("T", body, tags="odd" if body[:1] in b"13579" else "even"))
            store.append(Message("T", b"short"))
    for condition in (None, pc.binary_length(pc.field("body")) > 5):
        batches = list(reader("/s", files=files, columns=["body", "queueOffset"], filter=condition))
        read = [body for batch in batches for body in batch.column("body").to_pylist()]
        assert [body for body in read if body != b"short"] == bodies
        assert len(read) == (40 if condition is None else 20)
        assert max(batch.nbytes for batch in batches) < 20 << 20
