"""The checksum of a body is the same with and without ISA-L."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.message.record import crc32

STORE = """
import sys
if sys.argv[2] == "without":
    sys.modules["isal"] = None
from librmq import ManualClock, Message, MessageStore
from librmq.message.record import crc32
with MessageStore.open(sys.argv[1], clock=ManualClock(1000)) as store:
    for size in range(200):
        store.append(Message("t", bytes([size]) * size, unique_key=str(size)))
    store.append_batch([Message("t", b"x" * size) for size in range(50)])
print(crc32.__module__)
"""


@given(st.binary(max_size=300), st.integers(0, 20))
def test_checksums_are_those_of_zlib(data: bytes, begin: int) -> None:
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data)[begin:]) == zlib.crc32(data[begin:])


@pytest.mark.slow
def test_logs_are_equal_with_and_without_isal(tmp_path: Path) -> None:
    pytest.importorskip("isal")
    logs = []
    for kind in ("with", "without"):
        ran = subprocess.run(
            [sys.executable, "-c", STORE, tmp_path / kind, kind], capture_output=True, text=True, check=True
        )
        assert (ran.stdout.strip() == "zlib") == (kind == "without")
        logs.append(min((tmp_path / kind / "commitlog").iterdir()).read_bytes())
    assert logs[0] == logs[1]
