"""How librmq differs, on purpose, from what RocketMQ 4.9 reports about a store that it recovered.

Tests compare recorded rows as they are. Only where one differs do they ask here for the name of the deviation, and
fail if there is none. A store that was closed cleanly has no deviation but that of deleted files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.golden.recorded import left_sound
from tests.reference import Row, rows

FILLER_SIZE = 0x7FFFFFFF
"""The size in entries that RocketMQ writes before the first one of a queue that begins above 0."""

DEVIATIONS = {
    "rebuilt": "A recovery of RocketMQ 4.9 leaves out entries of records before its starting point, and writes filler "
    "in front of later ones; librmq rebuilds each entry whose record is in the log.",
    "tags": "RocketMQ 4.9 keeps an entry when the tags of its record change on the disk; librmq takes the record's.",
    "keys": "A recovery of RocketMQ 4.9 indexes some keys twice and others not at all; librmq indexes each key once.",
    "deleted": "RocketMQ 4.9 finds an offset by time through the times of a queue's files where some log files are "
    "deleted; librmq takes the times of the remaining records.",
}


def entry_deviations(folder: Path, queue: tuple[str, int], printed: Sequence[Row]) -> set[str]:
    """Return the names of the deviations in the entries of a queue; fail where a difference has none."""
    topic, queue_id = queue
    recorded = {row["offset"]: row for row in rows(folder, "cq") if (row["topic"], row["queue_id"]) == queue}
    ours = {row["offset"]: row for row in printed}
    if list(recorded.values()) == list(printed):
        return set()
    assert not left_sound(folder), f"the entries of {topic} {queue_id} differ from those of a clean store"
    records = {row["phys"]: row for row in rows(folder, "message")}
    names = set()
    for offset in sorted(recorded.keys() | ours.keys()):
        theirs, entry = recorded.get(offset), ours.get(offset)
        if theirs == entry:
            continue
        assert entry is not None, f"librmq lacks the entry {theirs}"
        record = records[entry["phys"]]
        place = record["topic"], record["queue_id"], record["queue_offset"]
        assert (*place, record["size"]) == (topic, queue_id, offset, entry["size"])
        if theirs is None or theirs["size"] == FILLER_SIZE:
            names.add("rebuilt")
        else:
            code, digits = record["dispatch_tags_code"], record["dispatch_tags_code_hex"]
            assert entry == {**theirs, "tags_code": code, "tags_code_hex": digits}
            names.add("tags")
    return names


def answer_deviation(folder: Path, recorded: Row, answer: Row, entry_names: set[str]) -> str:
    """Return the name of the deviation in an answer that differs; ``entry_names`` are those of its queue's entries."""
    if recorded["type"] != "index_query":
        first = next(
            (row for row in rows(folder, "cq") if all(row[name] == recorded[name] for name in ("topic", "queue_id"))),
            None,
        )
        if first is not None and first["phys"] < rows(folder, "store")[1]["min_phy_offset"]:
            return "deleted"
        assert entry_names, f"{answer} was recorded as {recorded}"
        return sorted(entry_names)[0]
    assert not left_sound(folder), f"{answer} was recorded as {recorded}"
    records = {row["phys"]: row for row in rows(folder, "message")}
    last_timestamp_ms = max((row["store_timestamp"] for row in records.values()), default=0)
    bounded = int(recorded["begin"]) > 0 or int(recorded["end"]) <= last_timestamp_ms
    for name in ("phys_offsets", "query_message_phys"):
        assert len(set(answer[name])) == len(answer[name]), f"librmq finds a record twice: {answer}"
        if len(answer[name]) < recorded["max_num"] and not bounded:  # times are rounded by the file that has the key
            assert {place for place in recorded[name] if place in records} <= set(answer[name])
    return "keys"
