"""Every record in the logs of real brokers is checked, decoded, encoded again, and compared with the reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from librmq.errors import RecordError
from librmq.message.properties import decode_properties, find_property
from librmq.message.record import check_record, decode_record, encode_record
from tests.reference import ABSENT, reference


def records(log: Path) -> Iterator[tuple[int, bytes]]:
    """Yield physical offset and bytes of each record, up to the first that is not one."""
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
    """Return all available logs: of stores, of clients' brokers and of the timer."""
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
