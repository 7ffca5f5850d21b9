"""Large bodies as JSON lines: the lines of small ones, made piece by piece."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from librmq import Message, MessageStore, StoreConfig

SIZE = 48 << 20
BODIES = [
    ('é"\\\n\x01 ' * SIZE)[: SIZE // 2].encode(),
    b"\xff" + bytes(SIZE),
    ("a" * (SIZE - 1)).encode() + b"\xc3",  # the end of a character is missing
]
EXPORT = """
from librmq.columns import export
export("store", "out.jsonl", format="jsonl")
print(1024 * int(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]))
"""


@pytest.mark.slow
def test_large_bodies_become_lines_in_little_memory(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    config = StoreConfig(commitlog_file_size=256 << 20, max_message_size=64 << 20)
    with MessageStore.open(tmp_path / "store", config) as store:
        for number, body in enumerate(BODIES):
            store.append(Message("orders", body, keys=f"k{number}", properties={"a": '"é"'}))
    done = subprocess.run([sys.executable, "-c", EXPORT], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 13 * SIZE
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[0]["body"].encode() == BODIES[0]
    assert [base64.b64decode(row["body_b64"]) for row in rows[1:]] == BODIES[1:]
    assert [(row["keys"], row["properties"]["a"]) for row in rows] == [(f"k{number}", '"é"') for number in range(3)]
