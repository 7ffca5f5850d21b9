"""Records for tests."""

from __future__ import annotations

import re
from typing import Final

from librmq.message.record import Record, body_checksum

EQUAL_VALUES: Final = re.compile(
    r"expected (?:[a-z]+ )*(\S*\d\S*?)(?: (?:[a-z]+ )*[a-z]+)?, (?:as closed, )?found (?:[a-z]+ )*\1(?![\w.])"
)
"""An error that names one value as expected and as found, and so does not say what is wrong."""


def record(**changes: object) -> Record:
    """Return a record with something in every field."""
    body = changes.pop("body", b"hello")
    assert isinstance(body, bytes)
    fields: dict[str, object] = {
        "topic": "TopicTest",
        "queue_id": 3,
        "flag": -7,
        "queue_offset": 2**40 + 1,
        "physical_offset": 2**41 + 2,
        "sys_flag": 0,
        "born_timestamp_ms": 1_700_000_000_001,
        "born_host": ("192.168.1.10", 54321),
        "store_timestamp_ms": 1_700_000_000_002,
        "store_host": ("127.0.0.1", 10911),
        "reconsume_times": 4,
        "prepared_transaction_offset": 2**42 + 3,
        "body": body,
        "body_crc": body_checksum(body),
        "properties_raw": b"TAGS\x01TagA\x02KEYS\x01k1 k2",
    }
    return Record(**(fields | changes))  # type: ignore[arg-type]
