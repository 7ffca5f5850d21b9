"""Compare record starts found in windows with those found by a single chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from librmq.columns import arrays
from librmq.message.record import FIXED_SIZE, MESSAGE_MAGIC, MESSAGE_MAGIC_V2, Record, encode_record

PAD = encode_record(Record(topic="T", body=b""))


def record(size: int, body: bytes = b"") -> bytes:
    return encode_record(Record(topic="T", body=body + bytes(max(0, size - len(PAD) - len(body)))))


LOOKALIKE = b"1234" + MESSAGE_MAGIC.to_bytes(4, "big")
PIECES = st.one_of(
    st.integers(100, 3000).map(record),
    st.integers(100, 900).map(
        lambda size: record(size, PAD + LOOKALIKE)
    ),  # a body that contains the beginning of a record
    st.integers(100, 900).map(lambda size: record(size, LOOKALIKE)),
    st.integers(100, 300).map(lambda size: encode_record(Record(topic="T", body=bytes(size), magic=MESSAGE_MAGIC_V2))),
    st.just(b"no record"),
)


def by_one_chain(data: bytes, end: int) -> tuple[list[int], bool]:
    """Return the starts of records, and whether bytes that are no record follow them."""
    found: list[int] = []
    at = 0
    while at < end:
        size = int.from_bytes(data[at : at + 4], "big")
        if int.from_bytes(data[at + 4 : at + 8], "big") not in (MESSAGE_MAGIC, MESSAGE_MAGIC_V2):
            return found, any(data[at:end])
        if not FIXED_SIZE <= size <= len(data) - at:
            return found, True
        found.append(at)
        at += size
    return found, False


@given(st.lists(PIECES, min_size=1, max_size=60), st.integers(0, 400), st.sampled_from([1, 2, 50]))
def test_windows_agree_with_a_single_chain(pieces: list[bytes], zeros: int, windows: int) -> None:
    data = b"".join(pieces) + bytes(zeros)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "WINDOW", max(1024, len(data) // windows))
        blocks = list(arrays.record_starts(np.frombuffer(data, np.uint8), 0, len(data)))
    found: list[Any] = [place for places, _ in blocks for place in places.tolist()]
    bad = [one for _, wrong in blocks for one in wrong]
    wanted, broken = by_one_chain(data, len(data))
    assert found == wanted
    assert bool(bad) == broken
