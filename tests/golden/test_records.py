"""Every record in the logs of real brokers: checked, decoded, encoded again, compared with what they reported."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from librmq.errors import RecordError
from librmq.message.delay_levels import SCHEDULE_TOPIC
from librmq.message.message import StoredMessage
from librmq.message.record import (
    check_record,
    decode_properties,
    decode_record,
    encode_record,
    find_property,
    format_host,
)
from tests.reference import ABSENT, reference, rows, store_folders

# Fields of a row that are compared below, or that are made of others.
ELSEWHERE = {"stored_body_b64", "dispatch_tags_code", "dispatch_tags_code_hex", "dispatch_keys"}


def records(log: Path) -> Iterator[tuple[int, bytes]]:
    """Physical offset and bytes of each record, up to the first that is none."""
    for file in sorted(log.iterdir()):
        data = file.read_bytes()
        at = 0
        while at < len(data):
            try:
                size = check_record(data, at, len(data), check_body=True)
            except RecordError:
                return
            if not size:
                break
            yield int(file.name) + at, data[at : at + size]
            at += size


def logs() -> list[ParameterSet]:
    """All logs there are, of stores, clients' brokers and the timer."""
    folder = reference().folder
    found = sorted(folder.glob("*/store*/commitlog"))
    nothing = pytest.mark.skip(reason=f"{ABSENT}no logs in {reference().origin}")
    return [pytest.param(log, id=str(log.parent.relative_to(folder))) for log in found] or [
        pytest.param(None, marks=nothing)
    ]


@pytest.mark.parametrize("log", logs())
def test_records_are_encoded_again_as_they_were(log: Path) -> None:
    count = 0
    for physical_offset, raw in records(log):
        record = decode_record(raw)
        assert encode_record(record) == raw
        assert record.physical_offset == physical_offset
        properties = decode_properties(record.properties_raw)
        for name in [*properties, "TAGS", "nothing"]:
            value = find_property(record.properties_raw, name.encode())
            assert (None if value is None else value.decode()) == properties.get(name)
        count += 1
    assert count


@pytest.mark.parametrize("folder", store_folders())
def test_messages_say_what_the_original_reports(folder: Path) -> None:
    reported = {row["phys"]: row for row in rows(folder, "message")}
    found = dict(records(folder / "store" / "commitlog"))
    assert reported
    for physical_offset, row in reported.items():
        raw = found[physical_offset]
        message = StoredMessage(raw)
        assert {
            "type": "message",
            "phys": physical_offset,
            "size": message.size,
            "crc_ok": message.crc_ok,
            "magic": f"{message.magic:08x}",
            "body_crc": message.body_crc,
            "topic": message.topic,
            "queue_id": message.queue_id,
            "flag": message.flag,
            "queue_offset": message.queue_offset,
            "commit_log_offset": message.physical_offset,
            "sys_flag": message.sys_flag,
            "born_timestamp": message.born_timestamp_ms,
            "born_host": format_host(message.born_host),
            "store_timestamp": message.store_timestamp_ms,
            "store_host": format_host(message.store_host),
            "reconsume_times": message.reconsume_times,
            "prepared_transaction_offset": message.prepared_transaction_offset,
            "msg_id": message.offset_id,
            "body_b64": b64encode(message.body).decode() or None,
            "properties": message.properties,
            "properties_raw": message.properties_raw.decode(),
            "dispatch_uniq_key": message.unique_key,
            "raw_sha1": hashlib.sha1(raw, usedforsecurity=False).hexdigest(),
        } == {name: value for name, value in row.items() if name not in ELSEWHERE}
        if message.topic != SCHEDULE_TOPIC:
            assert message.tags_code == row["dispatch_tags_code"]
        if "stored_body_b64" in row:
            assert b64encode(message.stored_body).decode() == row["stored_body_b64"]
