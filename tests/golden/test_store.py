"""Every real store at hand, opened: what the original found in it, read and searched through `MessageStore`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import CorruptionError
from librmq.message import record
from librmq.message.message import Message, StoredMessage
from librmq.store import MessageStore
from librmq.store.recovery import salvage
from librmq.store.recovery.verify import verify
from tests.conftest import StoreCopy
from tests.reference import Row, rows, store_folders
from tests.stores import from_disk

pytestmark = pytest.mark.parametrize("folder", store_folders())

NOW = 2_000_000_000_000


def config_of(folder: Path) -> StoreConfig:
    return StoreConfig.from_row(rows(folder, "config")[0])


@cache
def sound_as_left(folder: Path) -> bool:
    """Whether it was closed cleanly, and not damaged since."""
    store = folder / "store"
    return not rows(folder, "config")[0]["abort_file_present"] and verify(str(store), config_of(folder)).sound


@pytest.fixture
def path(folder: Path, store_copy: StoreCopy) -> Path:
    return store_copy(folder)


@pytest.fixture
def store(folder: Path, path: Path) -> Iterator[MessageStore]:
    with open_as_left(path, config_of(folder)) as store:
        yield store


def open_as_left(path: Path, config: StoreConfig) -> MessageStore:
    """The store, opened; where good records stand behind damage, only on demand: the original cuts them unasked."""
    clock = ManualClock(NOW)
    with suppress(CorruptionError):
        return MessageStore.open(path, config, clock=clock)
    with pytest.raises(CorruptionError, match=f"librmq recover {re.escape(str(path))}") as refused:
        MessageStore.open(path, config, clock=clock)
    assert any(item.physical_offset > refused.value.offset for item in salvage.records(str(path)))
    return MessageStore.open(path, config, thorough=True, clock=clock)


def queues_of(row: Row) -> dict[tuple[str, int], tuple[int, int, int]]:
    """Those that have entries: the original makes its delay queues up."""
    return {
        (queue["topic"], queue["queue_id"]): (queue["min_offset"], queue["max_offset"], queue["max_physic_offset"])
        for queue in row["queues"]
        if queue["max_offset"]
    }


def test_log_and_queues(folder: Path, store: MessageStore) -> None:
    after_load, after_start = rows(folder, "store")
    assert (store.log.begin, store.log.end) == (after_load["min_phy_offset"], after_load["max_phy_offset"])
    found = {
        name: (queue.min_offset, queue.max_offset, queue.max_physic_offset)
        for name, queue in store.queues.items()
        if queue.max_offset
    }
    assert found == queues_of(after_start)


def test_messages(folder: Path, store: MessageStore) -> None:
    found = list(store)
    expected = rows(folder, "message")
    assert [hashlib.sha1(message.raw).hexdigest() for message in found] == [row["raw_sha1"] for row in expected]
    assert [message.offset_id for message in found] == [row["msg_id"] for row in expected]
    blanks = [(place, size) for place, size, raw in store.log.scan() if raw is None]
    assert [at for at, _ in blanks] == [row["phys"] for row in rows(folder, "blank")]


class ByTags:
    """A subscription to tags as the broker takes it: by the codes of the entries alone."""

    def __init__(self, expression: str) -> None:
        self._codes = [record.tags_code(tag.strip()) for tag in expression.split("||") if tag.strip()]

    def match_entries(self, tags_codes: npt.NDArray[np.int64], units: Any) -> npt.NDArray[np.bool_]:
        return np.isin(tags_codes, self._codes)

    def match_message(self, message: StoredMessage) -> bool:
        return True


@cache
def lost(folder: Path) -> set[tuple[str, int]]:
    """The queues of which the original lost entries while it recovered: it serves filler instead."""
    return {(row["topic"], row["queue_id"]) for row in rows(folder, "cq") if row["size"] == 0x7FFFFFFF}


def test_reads(folder: Path, store: MessageStore) -> None:
    questions = rows(folder, "get_message")
    assert questions
    for row in questions:
        if (row["topic"], row["queue_id"]) in lost(folder):
            continue
        expression = row["sub_expression"]
        matching = None if expression in (None, "*", "") else ByTags(expression)
        found = store.read(row["topic"], row["queue_id"], row["offset"], row["max_msg_nums"], matching)
        assert found.status.value == row["status"], row
        assert (found.next_offset, found.min_offset, found.max_offset) == (
            row["next_begin_offset"],
            row["min_offset"],
            row["max_offset"],
        ), row
        places = [message.physical_offset for message in found.messages]
        assert places == row.get("phys_offsets", places), row
        assert [message.queue_offset for message in found.messages] == row.get(
            "queue_offsets", [message.queue_offset for message in found.messages]
        ), row


def test_offsets_by_time(folder: Path, store: MessageStore) -> None:
    questions = rows(folder, "offset_by_time")
    assert questions
    for row in questions:
        if (row["topic"], row["queue_id"]) in lost(folder):
            continue
        queue = store.queues.get((row["topic"], row["queue_id"]))
        first = None if queue is None else queue.entry(queue.min_offset)
        if first is not None and first.physical_offset < store.log.begin:
            continue  # the time of a file whose messages are gone is that of the file system
        found = [[time, store.queue_offset_at(row["topic"], row["queue_id"], time)] for time, _ in row["results"]]
        assert found == row["results"], (row["topic"], row["queue_id"])


def test_queries(folder: Path, store: MessageStore) -> None:
    questions = rows(folder, "index_query")
    assert questions
    for row in questions:
        topic, key, begin, end, most = (row[name] for name in ("topic", "key", "begin", "end", "max_num"))
        if sound_as_left(folder):
            assert store.index.query(topic, key, begin, end, most) == row["phys_offsets"], row
            found = store.find_by_key(topic, key, begin, end, most, exact=False)
            assert [message.physical_offset for message in found] == row["query_message_phys"], row
            continue
        # Recovering, the original indexes some keys twice, at times that are rounded anew, and may lose older ones.
        if begin > 0 or end < NOW:
            continue
        places = dict.fromkeys(store.index.query(topic, key, begin, end))
        there = dict.fromkeys(place for place in row["phys_offsets"] if place < store.log.end)  # its index may be ahead
        assert [place for place in places if place in there] == list(there), row


def test_opening_a_cleanly_closed_store_changes_nothing(folder: Path, path: Path) -> None:
    """A cleanly closed store is opened and closed without a change."""
    if not sound_as_left(folder):
        return
    before = from_disk(path)
    for _ in range(2):
        with MessageStore.open(path, config_of(folder), clock=ManualClock(NOW)) as store:
            assert store.recovered == []
    after = {name: data for name, data in from_disk(path).items() if not name.startswith("librmq")}
    assert after == before


def test_recovering_agrees_and_goes_on(folder: Path, path: Path) -> None:
    config = config_of(folder)
    with MessageStore.open(path, config, thorough=True, clock=ManualClock(NOW)) as store:
        after_start = queues_of(rows(folder, "store")[1])
        assert {name: queue.max_offset for name, queue in store.queues.items() if queue.max_offset} == {
            name: high for name, (_, high, _) in after_start.items()
        }
        assert len(list(store)) == len(rows(folder, "message"))
        assert store.recover() == []
        end = store.log.end
        for (topic, queue_id), (_, high, _) in sorted(after_start.items()):
            assert store.append(Message(topic, b"more", keys="more"), queue_id).queue_offset == high
    verdict = verify(str(path), config)
    assert verdict.sound, verdict.damage
    with MessageStore.open(path, config, clock=ManualClock(NOW)) as store:
        assert store.recovered == []
        for topic, queue_id in after_start:
            assert store.find_by_key(topic, "more")
            assert store.read(topic, queue_id, after_start[topic, queue_id][1]).messages[0].body == b"more"
        assert store.log.end > end
