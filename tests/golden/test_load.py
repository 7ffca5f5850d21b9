"""Recorded operations applied again; rows and files equal the recorded ones byte for byte."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from librmq.commitlog import CommitLog
from librmq.config import StoreConfig
from librmq.consumequeue_entries import ENTRY
from librmq.files._disk import DiskFiles
from librmq.files.interface import Damage
from librmq.filter import Registrations
from librmq.java import json as java_json
from librmq.message.message import StoredMessage
from librmq.message.record import BORN_TIMESTAMP_AT, SYS_FLAG_AT, TRANSACTION_COMMIT, TRANSACTION_MASK, host_ends
from librmq.message.topics import SystemTopic
from librmq.store import MessageStore
from librmq.store.format import directory
from librmq.store.recovery._verify import verify
from tests.cases.load import run
from tests.golden.recorded import contents
from tests.reference import Row, jsonl, rows, store_folders

stores = pytest.mark.parametrize("folder", store_folders())

INDEX_HEADER = 40


# --- recorded operations


def recorded(folder: Path) -> list[tuple[Row, Row]]:
    """Return each operation with the time at which it was applied, and its result row."""
    finals, ops = defaultdict(list), defaultdict(list)
    for message in rows(folder, "message"):
        if message["sys_flag"] & TRANSACTION_MASK == TRANSACTION_COMMIT:
            finals[message["prepared_transaction_offset"]].append(message["store_timestamp"])
        if message["topic"] == SystemTopic.OP:
            ops[base64.b64decode(message["body_b64"]).decode()].append(message["store_timestamp"])
    halves: dict[str, Row] = {}
    result = []
    pairs = zip(jsonl(folder / "ops.jsonl"), jsonl(folder / "put_results.jsonl"), strict=True)
    for operation, answer in pairs:
        at_ms = answer.get("store_timestamp", answer.get("at_ms"))
        if operation["op"] == "half":
            halves[operation["id"]] = answer
        elif answer.get("response_code") == 0:
            half = halves[operation["id"]]
            op_times, final_times = ops[str(half["queue_offset"])], finals[half["phys"]]
            at_ms = op_times.pop(0) if op_times else None
            if operation["op"] == "commit":
                at_ms = final_times.pop(0) if final_times else None
        timed = operation if at_ms is None else {**operation, "at_ms": at_ms}
        result.append((timed, answer))
    return result


def is_delayed(operation: Row) -> bool:
    return int(operation.get("delayLevel") or operation.get("props", {}).get("DELAY", 0)) > 0


def without_what_comes_later(folder: Path) -> list[tuple[Row, Row]]:
    """Return the operations that involve neither a check nor a delivery."""
    return [
        (operation, answer)
        for operation, answer in recorded(folder)
        if operation["op"] != "tx_check" and not is_delayed(operation)
    ]


def lines(operations: Iterable[Row]) -> list[str]:
    return [json.dumps(operation, ensure_ascii=False) for operation in operations]


def config_of(folder: Path) -> StoreConfig:
    return StoreConfig.from_row(rows(folder, "config")[0])


@dataclass
class Loaded:
    """The results of one run."""

    path: Path
    answers: list[Row] = field(default_factory=list)


def load(path: Path, config: StoreConfig, operations: Iterable[Row]) -> Loaded:
    loaded = Loaded(path)
    run(path, config, lines(operations), loaded.answers.append, warn=lambda reason: None)
    return loaded


# --- files


def open_log(store: Path, config: StoreConfig) -> CommitLog:
    return CommitLog.open(str(store / "commitlog"), config.commitlog_file_size, writable=False)


def log_bytes(store: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((store / "commitlog").iterdir()))


@cache
def damage(folder: Path) -> tuple[Damage, ...]:
    """Return the later damage that the reference's files show; parts that are ahead do not count."""
    if not (folder / "mutation.json").exists():
        return ()
    verdict = verify(str(folder / "store"), config_of(folder))
    return tuple(item for item in verdict.damage if item.kind != "ahead")


def is_spoilt(folder: Path, part: str) -> bool:
    """Return whether the reference's files with this prefix are damaged, so that they can't be compared."""
    return any(Path(item.file).relative_to(folder / "store").is_relative_to(part) for item in damage(folder))


def own_end(folder: Path, store: Path, config: StoreConfig) -> int:
    """Return where our log stops being comparable, because the reference may have been damaged later."""
    with open_log(store, config) as log:
        end = log.end
    ends = [item.offset for item in damage(folder) if Path(item.file).parent == folder / "store" / "commitlog"]
    if (folder / "mutation.json").exists():
        ends.append(rows(folder, "store")[0]["max_phy_offset"])
    return min([end, *ends])


def is_torn(raw: bytes) -> bool:
    """Return whether a record of the reference has damage that no checksum covers: no property contains a NUL."""
    return b"\0" in StoredMessage(raw).properties_raw


def is_written_beside(message: StoredMessage) -> bool:
    """Return whether the record is a side effect of an operation or of time, so that its store time may differ."""
    properties = message.properties
    if message.topic in (SystemTopic.OP, SystemTopic.CHECK_MAX_TIME) or "TRANSACTION_CHECK_TIMES" in properties:
        return True
    return (
        message.topic != SystemTopic.SCHEDULE and int(properties.get("DELAY", "0")) > 0 and "REAL_TOPIC" in properties
    )


def masked(record: bytes) -> bytes:
    """Return a record without the fields that may differ: store time, and the born time of an op message."""
    message = StoredMessage(record)
    if not is_written_beside(message):
        return record
    stored = host_ends(record[SYS_FLAG_AT + 3])[0]
    record = record[:stored] + bytes(8) + record[stored + 8 :]
    if message.topic != SystemTopic.OP:
        return record
    born = BORN_TIMESTAMP_AT
    return record[:born] + bytes(8) + record[born + 8 :]


def assert_same_log(folder: Path, store: Path, config: StoreConfig) -> set[int]:
    """Compare the logs; return the physical offsets of the records whose store time may differ."""
    free: set[int] = set()
    if not (store / "commitlog").exists():
        return free
    ours, theirs = log_bytes(store), log_bytes(folder / "store")
    first = min(int(path.name) for path in (folder / "store" / "commitlog").iterdir())  # the first remaining file
    end = own_end(folder, store, config)
    with open_log(store, config) as log:
        for begin, size, raw in log.scan(end=end):
            upto = begin + size
            if begin >= first:
                a, b = ours[begin:upto], theirs[begin - first : upto - first]
                assert (a == b) if raw is None else (is_torn(b) or masked(a) == masked(b)), f"log at {begin}"
            if raw is not None and is_written_beside(StoredMessage(raw)):
                free.add(begin)
        assert not any(ours[log.end :])
    return free


def assert_same_queues(folder: Path, store: Path, config: StoreConfig) -> None:
    """Check that each of our queue files begins like the reference's; unwritten bytes are zero."""
    files = DiskFiles()
    for topic, queue_id in directory.list_queues(str(store), files):
        ours = sorted(Path(directory.queue_folder(str(store), topic, queue_id)).iterdir())
        for path in ours:
            data = path.read_bytes()
            assert len(data) == config.consumequeue_file_size
            if is_spoilt(folder, str(path.parent.relative_to(store))):
                continue
            written = data.rstrip(b"\0")
            whole = len(written) + -len(written) % 20
            assert (folder / "store" / path.relative_to(store)).read_bytes()[:whole] == data[:whole], path


def assert_same_units(folder: Path, store: Path, free: set[int]) -> None:
    """Check that each of our extension files begins like the reference's; unwritten bytes are zero."""
    free_units = units_of(store, free)
    for path in sorted((store / "consumequeue_ext").rglob("0*0")):
        if path.is_file():
            data, end = path.read_bytes(), 0
            theirs = (folder / "store" / path.relative_to(store)).read_bytes()
            while (size := int.from_bytes(data[end : end + 2], "big", signed=True)) > 0:
                if (str(path.parent.relative_to(store / "consumequeue_ext")), int(path.name) + end) in free_units:
                    data, theirs = (one[: end + 10] + bytes(8) + one[end + 18 :] for one in (data, theirs))
                end += size
            end += 2 if size else 0  # the mark at the end of a file
            assert theirs[:end] == data[:end], path
            assert not any(data[end:]), path


def units_of(store: Path, places: set[int]) -> set[tuple[str, int]]:
    """Return, by queue and place, the extension units whose entries point at the given physical offsets."""
    found = set()
    for path in (store / "consumequeue").rglob("0*0"):
        if path.is_file():
            for place, _, code in ENTRY.iter_unpack(path.read_bytes()):
                if place in places:
                    found.add((str(path.parent.relative_to(store / "consumequeue")), code + (1 << 63)))
    return found


def assert_same_index(folder: Path, store: Path, config: StoreConfig, free: set[int]) -> None:
    """Check that the index files are equal but for their names; the last may be only a beginning."""
    if is_spoilt(folder, "index"):
        return
    ours, theirs = sorted((store / "index").glob("*")), sorted((folder / "store" / "index").glob("*"))
    begin = INDEX_HEADER + 4 * config.max_hash_slot_num

    def comparable(data: bytes) -> bytes:
        """Remove the times that depend on times which may differ."""
        parts = bytearray(data)
        for at, place in ((0, 16), (8, 24)):
            if int.from_bytes(data[place : place + 8], "big") in free:
                parts[at : at + 8] = bytes(8)
        if int.from_bytes(data[16:24], "big") in free:  # all times in the file count from that one
            return bytes(parts[: begin + 20])
        for at in range(begin + 20, len(data) - 19, 20):
            if int.from_bytes(data[at + 4 : at + 12], "big") in free:
                parts[at + 12 : at + 16] = bytes(4)
        return bytes(parts)

    for ours_at, theirs_at in zip(ours, theirs, strict=False):
        a, b = comparable(ours_at.read_bytes()), comparable(theirs_at.read_bytes())
        if a[36:40] == b[36:40]:
            assert a == b
        else:
            assert ours_at == ours[-1]
            count = int.from_bytes(a[36:40], "big")
            assert a[:8] + a[16:24] == b[:8] + b[16:24]  # the place where it begins
            assert a[begin : begin + 20 * count] == b[begin : begin + 20 * count]
    assert len(ours) <= len(theirs)


def assert_same_answers(ours: list[Row], theirs: list[Row]) -> None:
    """Compare row by row. A check that met its own copies, which is a race, is counted together with the next ones."""
    race: tuple[list[Row], list[Row]] | None = None
    for a, b in zip(ours, theirs, strict=True):
        if race is None and b["op"] == "tx_check" and places(b["check_back"]) & places(b["discarded"]):
            race = [], []
        if race is None or b["op"] != "tx_check":
            assert lines([a]) == lines([b])
            continue
        for side, row in zip(race, (a, b), strict=True):
            side += row["check_back"] + row["discarded"]
        if a["half_consume_offset"] == b["half_consume_offset"]:
            assert sorted(lines(race[0])) == sorted(lines(race[1]))
            assert lines([{**a, "check_back": [], "discarded": []}]) == lines(
                [{**b, "check_back": [], "discarded": []}]
            )
            race = None
    assert race is None


def places(halves: list[Row]) -> set[int]:
    return {half["queue_offset"] for half in halves}


@stores
def test_rows_and_files_are_the_recorded_ones(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder)
    pairs = recorded(folder)
    loaded = load(tmp_path / "store", config, [operation for operation, _ in pairs])
    assert_same_answers(loaded.answers, [answer for _, answer in pairs])
    free = assert_same_log(folder, loaded.path, config)
    assert_same_queues(folder, loaded.path, config)
    assert_same_units(folder, loaded.path, free)
    assert_same_index(folder, loaded.path, config, free)
    crashed = pairs[-1][0]["op"] == "crash"
    # RocketMQ also writes progress periodically. That makes a difference if it dies.
    for name in () if crashed else ("delayOffset.json", "consumerOffset.json"):
        if (loaded.path / "config" / name).exists():
            ours, theirs = ((path / "config" / name).read_bytes() for path in (loaded.path, folder / "store"))
            assert java_json.loads(ours) == java_json.loads(theirs)
    assert (loaded.path / "abort").exists() is crashed


# --- other operations: the recorded messages at other places


def essence(message: StoredMessage) -> tuple[Any, ...]:
    """Return the parts of a message that do not depend on the messages around it."""
    own = message.topic != SystemTopic.OP
    return (
        message.topic,
        message.queue_id,
        message.flag,
        message.sys_flag,
        message.born_timestamp_ms if own else None,
        message.store_timestamp_ms if own else None,
        message.born_host,
        message.store_host,
        message.reconsume_times,
        message.stored_body if own else None,
        message.properties_raw,
        message.body_crc if own else None,
    )


def comes_later(message: StoredMessage) -> bool:
    """Return whether a delivery or a check wrote the message, or it still waits for one."""
    properties = message.properties
    delayed = message.topic == SystemTopic.SCHEDULE or int(properties.get("DELAY", "0")) > 0
    return delayed or "TRANSACTION_CHECK_TIMES" in properties


@stores
def test_messages_are_the_recorded_ones(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder)
    pairs = without_what_comes_later(folder)
    loaded = load(tmp_path / "store", config, [operation for operation, _ in pairs])
    places = {"phys", "queue_offset", "msg_id"}
    for ours, (_, theirs) in zip(loaded.answers, pairs, strict=True):
        assert {name: ours[name] for name in ours if name not in places} == {
            name: theirs[name] for name in theirs if name not in places
        }
    with MessageStore.open(loaded.path, config, read_only=True) as store:
        written = [essence(message) for message in store]
    with open_log(folder / "store", config) as log:
        there = [StoredMessage(raw) for _, _, raw in log.scan() if raw is not None]
        torn = {message.physical_offset for message in there if is_torn(message.raw)}
    expected = [essence(message) for message in there if not comes_later(message)]
    assert expected
    if (folder / "mutation.json").exists():
        written = written[written.index(expected[0]) :][: len(expected)]
    if torn:  # what ours should be is unknown for these
        assert sum(a != b for a, b in zip(written, expected, strict=True)) <= len(torn)
        return
    assert written == expected


# --- the bitmaps of filters


Unit = tuple[int, int, str | None] | None


def recorded_units(folder: Path) -> dict[int, Unit]:
    """Return tags code, store time and bitmap of each record's extension unit, or None, by physical offset."""
    found: dict[int, Unit] = {}
    for row in rows(folder, "cq"):
        ext = row.get("ext")
        found[row["phys"]] = ext and (ext["tags_code"], ext["msg_store_time"], ext["bitmap_hex"])
    return found


@stores
def test_units_are_the_recorded_ones(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder)
    loaded = load(tmp_path / "store", config, [operation for operation, _ in without_what_comes_later(folder)])
    ours: list[Unit] = []
    with MessageStore.open(loaded.path, config, read_only=True) as store:
        for message in store:
            queue = store.queues.get((message.topic, message.queue_id))
            entry = None if queue is None else queue.entry(message.queue_offset)
            if queue is None or entry is None or entry.physical_offset != message.physical_offset:
                continue  # a prepared message or a rollback
            unit = queue.ext_unit(entry.tags_code)
            bitmap = None if unit is None or unit.bitmap is None else unit.bitmap.hex()
            time = 0 if unit is None or message.topic == SystemTopic.OP else unit.store_timestamp_ms
            ours.append(None if unit is None else (unit.tags_code, time, bitmap))
    recorded_ones = recorded_units(folder)
    theirs: list[Unit] = []
    with open_log(folder / "store", config) as log:
        for place, _, raw in log.scan():
            if raw is not None and place in recorded_ones:
                message = StoredMessage(raw)
                if not comes_later(message):
                    unit_of = recorded_ones[place]
                    free = unit_of is not None and message.topic == SystemTopic.OP
                    theirs.append((unit_of[0], 0, unit_of[2]) if unit_of is not None and free else unit_of)
    if (folder / "mutation.json").exists():
        ours = ours[: len(theirs)]
    assert theirs
    assert ours == theirs


@stores
def test_recorded_bitmaps_are_those_of_the_filters_in_force(folder: Path) -> None:
    """Delivered messages are included. If a delivery fell between two operations, the filters of either may apply."""
    states: list[tuple[int, Registrations]] = [(-1, Registrations())]  # the physical offset from which they apply
    operations: list[Row] = []
    last = -1
    for operation, answer in recorded(folder):
        last = answer.get("phys", last)
        if operation["op"] == "filter":
            operations.append(operation)
            filters = Registrations()
            for one in operations:
                filters.register(one["topic"], one["group"], one["expr"], "SQL92", one["version"], 0)
            states.append((last, filters))
    following = [begin for begin, _ in states[1:]] + [1 << 62]
    nexts = sorted(answer["phys"] for _, answer in recorded(folder) if "phys" in answer)
    properties = {row["phys"]: row["properties"] for row in rows(folder, "message")}
    for row in rows(folder, "cq"):
        if row.get("ext") is None or row["phys"] not in properties:
            continue
        possible = set()
        for (begin, filters), end in zip(states, following, strict=True):
            until = next((phys for phys in nexts if phys > end), 1 << 62)
            if begin < row["phys"] < until:
                bitmap = filters.bitmap(row["topic"], properties[row["phys"]])
                possible.add(bitmap and bitmap.hex())
        assert row["ext"]["bitmap_hex"] in possible, row


TABLES = ("topic", "subgroup", "consumer_offset", "filter", "persist")


@stores
def test_tables_are_the_recorded_ones(folder: Path, tmp_path: Path) -> None:
    """The order of keys may differ, and so may versions, birth times, and entries that the broker creates."""
    pairs = [(operation, answer) for operation, answer in recorded(folder) if operation["op"] in TABLES]
    operations = [operation for operation, _ in pairs]
    loaded = load(tmp_path / "store", config_of(folder), operations)
    assert lines(loaded.answers) == lines(answer for _, answer in pairs)
    named = {
        "topics.json": {row["topic"] for row in operations if row["op"] == "topic"},
        "subscriptionGroup.json": {row["group"] for row in operations if row["op"] == "subgroup"},
        "consumerOffset.json": {
            f"{row['topic']}@{row['group']}" for row in operations if row["op"] == "consumer_offset"
        },
        "delayOffset.json": set(),
        "consumerFilter.json": {operation["topic"] for operation, row in pairs if row.get("registered")},
    }
    for name, keys in named.items():
        text = (tmp_path / "store" / "config" / name).read_text("utf-8")
        ours, theirs = java_json.loads(text), java_json.loads((folder / "store/config" / name).read_bytes())
        assert list(ours) == list(theirs)
        table = list(ours)[-1]
        assert ours[table].keys() == keys
        assert timeless(ours[table]) == timeless({key: theirs[table][key] for key in keys})
        if "dataVersion" in ours:
            assert ours["dataVersion"]["counter"] >= len(keys)
        assert text == java_json.dumps(ours)


def timeless(value: Any) -> Any:
    """Return a table without its birth times."""
    if isinstance(value, dict):
        return {name: timeless(one) for name, one in value.items() if name != "bornTime"}
    return value


# --- two runs


@pytest.mark.slow
@stores
def test_two_runs_are_identical_in_every_file(folder: Path, tmp_path: Path) -> None:
    operations = [operation for operation, _ in recorded(folder)]
    one, other = (load(tmp_path / name, config_of(folder), operations) for name in ("one", "other"))
    assert one.answers == other.answers
    found = [contents(run.path) for run in (one, other)]
    for files in found:
        files.pop("librmq/retention.json", None)  # it names its folder
    assert found[0] == found[1]


def split(operations: Sequence[Row]) -> int:
    """Return a place near the middle where no transaction is open, or the end if there is none."""
    last = {row["id"]: at for at, row in enumerate(operations) if row["op"] in ("commit", "rollback")}
    first = {row["id"]: at for at, row in enumerate(operations) if row["op"] == "half"}
    free = [
        at
        for at in range(1, len(operations))
        if "at_ms" in operations[at] and not any(first[one] < at <= last[one] for one in last)
    ]
    return min(free, key=lambda at: abs(at - len(operations) // 2), default=len(operations))


@stores
def test_a_run_continues_where_another_ended(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder)
    operations = [operation for operation, _ in without_what_comes_later(folder)]
    at = split(operations)
    whole = load(tmp_path / "whole", config, operations)
    first = load(tmp_path / "parts", config, operations[:at])
    second = load(tmp_path / "parts", config, operations[at:])
    assert first.answers + second.answers == whole.answers
    for name in ("commitlog", "consumequeue", "consumequeue_ext"):
        assert contents(second.path / name) == contents(whole.path / name)
    ours, theirs = contents(second.path / "index"), contents(whole.path / "index")
    assert list(ours.values()) == list(theirs.values())


@stores
def test_no_operations_change_no_byte(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder)
    operations = [operation for operation, _ in without_what_comes_later(folder)]
    operations = [operation for operation in operations if operation["op"] != "crash"]
    loaded = load(tmp_path / "store", config, operations)
    before = contents(loaded.path)
    load(loaded.path, config, [])
    assert contents(loaded.path) == before
