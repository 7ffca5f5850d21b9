"""Unique ids of messages."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from librmq.errors import MalformedError
from librmq.message.ids import UniqueIds, decode_unique_id
from tests.programs import in_child, run_program

NOW = 1_700_000_000_000  # 2023-11-14 22:13:20
MONTH = 1_698_796_800_000  # 2023-11-01


def test_a_unique_id_tells_where_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 0x1_1234)
    text = UniqueIds(lambda: NOW, bytes((127, 0, 0, 1)), 0xDEADBEEF, first=0).next()
    assert text == f"7F0000011234DEADBEEF{NOW - MONTH:08X}0000"
    assert decode_unique_id(text, NOW + 1) == ("127.0.0.1", 0x1234, 0xDEADBEEF, NOW, 0)
    assert decode_unique_id(text.lower(), NOW + 1).timestamp_ms == NOW


def test_a_unique_id_of_ipv6() -> None:
    ip = bytes.fromhex("fe80000000000000000000000000a001")
    text = UniqueIds(lambda: NOW, ip, -1).next()
    assert len(text) == 56
    parts = decode_unique_id(text, NOW + 1)
    assert (parts.ip, parts.maker) == ("fe80:0000:0000:0000:0000:0000:0000:a001", 0xFFFFFFFF)


def test_unique_ids_count_on_through_time() -> None:
    times = iter([NOW, NOW, NOW + 1, MONTH - 1, MONTH])
    ids = UniqueIds(lambda: next(times), bytes(4), 0, first=0)
    parts = [decode_unique_id(ids.next(), NOW + 2) for _ in range(5)]
    assert [part.counter for part in parts] == [0, 1, 2, 3, 4]
    assert [part.timestamp_ms for part in parts[:3]] == [NOW, NOW, NOW + 1]
    assert parts[4].timestamp_ms == MONTH
    # An id made at the very end of October is still dated October when it is read in November.
    assert decode_unique_id(f"{'0' * 20}{31 * 86_400_000 - 1:08X}0003", MONTH + 5).timestamp_ms == MONTH - 1


def test_the_counter_wraps() -> None:
    ids = UniqueIds(lambda: NOW, bytes(4), 0)
    made = [ids.next() for _ in range(65_537)]
    assert len(set(made)) == 65_536
    assert made[-1] == made[0]


def test_threads_make_distinct_ids() -> None:
    clock = iter(range(NOW, NOW + 1_000_000))
    ids = UniqueIds(lambda: next(clock) // 7, bytes(4), 0)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: [ids.next() for _ in range(5_000)], range(8)))
    assert len(set().union(*made)) == 40_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_makes_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds although process number and millisecond may equal the parent's, as in containers."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    ids = UniqueIds(lambda: NOW, bytes(4))
    ids.next()
    read, write = os.pipe()
    in_child(lambda: os.write(write, ids.next().encode()))
    text = os.read(read, 100).decode()
    os.close(read)
    os.close(write)
    theirs, mine = decode_unique_id(text, NOW + 1), decode_unique_id(ids.next(), NOW + 1)
    assert theirs.timestamp_ms == mine.timestamp_ms == NOW
    assert theirs.maker != mine.maker


@pytest.mark.slow
def test_unique_ids_differ_though_address_and_pid_are_shared() -> None:
    """Repair 1.5: in containers every process has number 1, and several often start in the same millisecond."""
    program = (
        "import os; os.getpid = lambda: 1\n"
        "from librmq import ManualClock, ManualRunner, Broker, Producer\n"
        f"broker = Broker.temporary(runner=ManualRunner(ManualClock({NOW})))\n"
        "producer = Producer(broker, 'g')\n"
        "print(*[producer.send('T', b'x').message_id for _ in range(20)])\n"
    )
    made = [run_program(program).stdout.split() for _ in range(2)]
    assert len({*made[0], *made[1]}) == 40
    assert made[0][0][-4:] != made[1][0][-4:] or made[0][0][12:20] != made[1][0][12:20]


@pytest.mark.parametrize("text", ["", "0" * 31, "0" * 33, "0" * 40, "g" * 32, " " * 32, "0 " * 16, "٣" * 32])
def test_no_unique_ids(text: str) -> None:
    with pytest.raises(MalformedError, match="unique id of 32 or 56 hex digits"):
        decode_unique_id(text, NOW)


def test_an_address_of_another_length_is_refused() -> None:
    with pytest.raises(MalformedError, match="4 or 16 bytes"):
        UniqueIds(lambda: NOW, b"abc", 0)
