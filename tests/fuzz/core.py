"""Fuzzes the compiled core under sanitizers: builds it with them in a scratch folder, and feeds it damaged data.

``python -P tests/fuzz/core.py [--seconds N] [--seed N]``; without a C compiler or its sanitizers it says so.
A reading beyond a buffer, an undefined operation or a crash ends it with status 1 and the sanitizer's report.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from librmq.clock import SystemClock
from librmq.config import StoreConfig
from librmq.consumequeue import ConsumeQueue
from librmq.delay import COPIED_PROPERTIES
from librmq.errors import RmqError
from librmq.files import File
from librmq.files._memory import MemoryFiles
from librmq.files.rolling import MappedFileQueue
from librmq.message.message import Message, StoredMessage
from librmq.message.properties import texts_before_values
from librmq.runtime.compiled_core import CORE, LogState
from librmq.store import MessageStore
from librmq.store.engine._entry_checks import Transfer

CHECKOUT: Final = Path(__file__).resolve().parents[2]
FLAGS: Final = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g"
NAMES: Final = ("TAGS", "KEYS", "UNIQ_KEY", "DELAY", "WAIT", "region", "é", "n" * 300, "\U0001f600")
USUAL_NAMES: Final = ("TAGS", "KEYS", "UNIQ_KEY", "region", "amount")
TEXTS: Final = ("", "a", "b c", "é", "日本", "\U0001f600x", "x" * 4000, "\ud800", "a\2b", "a\1b", "3")


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of them, or a length, changed, or with another end."""
    made = bytearray(data)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(made)) if made else 0
        value = chance.choice(
            (b"\0", b"\xff", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", bytes([chance.randrange(256)]))
        )
        made[at : at + len(value)] = value
    return bytes(made[: chance.randrange(len(made) + 1)] if chance.random() < 0.3 else made)


class Drawn(random.Random):
    """Chance that a fuzzer leads: it comes from bytes, and behind their end from a seed, so that loops end."""

    def __init__(self, data: bytes) -> None:
        super().__init__(len(data))
        self._left = int.from_bytes(data, "little")

    def getrandbits(self, k: int, /) -> int:
        if not self._left:
            return super().getrandbits(k)
        drawn = self._left & ((1 << k) - 1)
        self._left >>= -(-k // 8) * 8
        return drawn

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)


class Log(LogState):
    """What a compiled read needs of a log."""

    def __init__(self, end: int, file_size: int, mapped: dict[int, File]) -> None:
        self.end, self.file_size, self._mapped = end, file_size, mapped


class Fuzzer:
    """Calls of the core with data that no caller would give."""

    def __init__(self, chance: random.Random) -> None:
        if CORE.module is None:
            raise SystemExit(f"the core that was just built does not run: {CORE.state}")
        self.core = CORE.module
        self.chance = chance
        self.store, self.waiting = self.open_store(), self.open_store()
        self.log, self.pulled = b"", list[StoredMessage]()
        for _ in range(64):
            self.append()
        messages = [message for message in self.store if len(message.raw) < 3000]
        self.log = b"".join(message.raw for message in messages)
        ends = list(accumulate((len(message.raw) for message in messages), initial=0))
        self.places = [(at, end - at) for at, end in pairwise(ends) if end <= 1 << 14]

    @staticmethod
    def open_store() -> Any:
        config = StoreConfig.tiny(commitlog_file_size=1 << 20)
        return MessageStore.open("/store", config, files=MemoryFiles(), background=False)

    def append(self) -> None:
        """Append a message, or a batch, of unusual properties and sizes."""
        chance = self.chance
        is_usual = chance.random() < 0.7
        names = USUAL_NAMES if is_usual else (*NAMES, *(f"p{number}" for number in range(chance.choice((0, 3, 70)))))
        texts = TEXTS[:7] if is_usual else TEXTS
        chosen = chance.sample(names, chance.randrange(len(names) + 1))
        message = Message(
            "T" * chance.choice((1, 5, 19, 127)),
            bytes(chance.choice((0, 1, 63, 64, 65, 1000) if chance.random() < 0.98 else (99_000,))),
        )
        message.properties.update({name: chance.choice(texts) for name in chosen})
        message.flag = 0 if is_usual else chance.choice((0, -1, 1 << 31, 1 << 70))
        with suppress(RmqError, TypeError):
            if chance.random() < 0.3:
                self.store.append_batch([message] * chance.choice((1, 3, 300)), chance.randrange(3))
            else:
                fields: Any = {
                    "born_host": chance.choice((None, ("10.0.0.1", 7), ("::1", 7), b"12345678", b"1")),
                    "born_timestamp_ms": chance.choice((None, 5, -1, 1 << 63)),
                    "sys_flag": chance.choice((0, 8, 16, -1, 1 << 64)),
                    "prepared_transaction_offset": chance.choice((0, 90, 1 << 70)),
                }
                queue_id = 0 if is_usual else chance.choice((0, 1, -1, 1 << 40))
                self.store.append(message, queue_id, **fields if chance.random() < 0.5 else {})

    def scan(self) -> None:
        """Read records out of a damaged chunk."""
        chunk = damaged(self.chance, self.log[self.chance.randrange(len(self.log)) :][:5000])
        self.items(
            chunk, self.chance.randrange(len(chunk) + 50), self.chance.choice((0, 50)), self.chance.random() < 0.5
        )
        for _, _, raw in self.items(damaged(self.chance, self.log), 0, 0, True)[:20]:
            self.read_body(raw)

    def derive(self) -> None:
        """Derive entries and keys of damaged records, which lie where they name."""
        chance = self.chance
        at, _ = chance.choice(self.places)
        start = int.from_bytes(self.log[at + 28 : at + 36], "big") - at
        data = self.log if chance.random() < 0.3 else damaged(chance, self.log)
        place, most = chance.choice((at, at, at, len(data), -1, 1 << 62)), chance.choice((0, 1, 5, 100))
        with suppress(ValueError):
            self.core.derive(
                data,
                start,
                place,
                len(data) + chance.choice((0, 0, 50)),
                most,
                chance.choice((0, 188)),
                chance.random() < 0.5,
                chance.choice(((), (1000, 5000), (1,) * 99)),
            )

    def items(self, data: bytes, place: int, beyond: int, check_body: bool) -> list[Any]:
        """Return the usual records from a place on, up to an end that may lie beyond the data, also at odd places."""
        end = len(data) + beyond

        def unusual(at: int) -> tuple[int, int, bytes]:
            magic = data.find(b"\xda\xa3\x20\xa7", at + 5)
            return at, (end if magic < 0 else magic - 4) - at, b""

        return [item for item in self.core.Items(data, 0, place, end, end, check_body, unusual, abs) if item[2]]

    def read_body(self, raw: bytes) -> None:
        """Read the parts of a damaged message."""
        with suppress(RmqError):
            _ = StoredMessage(damaged(self.chance, raw)).body

    def pull(self) -> None:
        """Pull by queue entries that lead anywhere."""
        chance, size = self.chance, 1 << 14
        buffer = mmap.mmap(-1, size)
        data = (self.log if chance.random() < 0.3 else damaged(chance, self.log))[:size]
        buffer[: len(data)] = data
        begin = chance.randrange(len(self.places))
        message = StoredMessage(self.log[self.places[begin][0] :][: self.places[begin][1]])
        start = chance.choice((message.physical_offset - self.places[begin][0],) * 3 + (0, size, 1 << 40))
        sizes = (chance.choice((0, 90, 91, 200, 1 << 20, -1)) for _ in range(chance.randrange(40)))
        entries = b"".join(struct.pack(">qiq", start + chance.randrange(-50, size + 50), each, 0) for each in sizes)
        if chance.random() < 0.7:
            entries = b"".join(struct.pack(">qiq", start + at, length, 0) for at, length in self.places[begin:])
        end = start + chance.choice((size, size, 100, size + 100, 1 << 50))
        entries = entries if chance.random() < 0.3 else damaged(chance, entries)
        name = (
            chance.choice((message.topic,) * 3 + ("é", "t" * 128)),
            chance.choice((message.queue_id,) * 3 + (1 << 70,)),
        )
        most, first = chance.choice((1, 1, 3, 50)), chance.choice((message.queue_offset,) * 3 + (0, 1 << 62))
        pulled = self.core.pull(entries, buffer, start, end, most, 1 << 16, *name, first, chance.random() < 0.5)
        self.pulled = self.pulled[chance.randrange(64) :]  # messages that are dropped serve again
        if pulled is not None and not isinstance(pulled[0], bytes):
            self.pulled += pulled[0]
        queue, files = object.__new__(ConsumeQueue), object.__new__(MappedFileQueue)
        queue._files, queue._closed, files.file_size = files, False, chance.choice((20 * 100, 7, 1 << 40))
        files.mapped = {0: File("", mmap.mmap(-1, len(entries) + 1), 0, False)}
        files.mapped[0].buffer[: len(entries)] = entries
        offset, most, high = (chance.choice((0, 0, 1, 50, 99, -1, 1 << 62, 1 << 70)) for _ in range(3))
        with suppress(OverflowError):
            log = Log(end, size, {start: File("", buffer, size, False)})
            result = self.core.read(log, queue, offset, most, Transfer(StoreConfig()), 0, high, name)
            self.pulled += [] if result is None else result.messages

    def wait(self) -> None:
        """Append damaged messages that waited, in layouts that fit some."""
        chance = self.chance
        values = {
            "REAL_TOPIC": chance.choice(("T", "T", "T", "U", "RMQ_SYS_TRANS_HALF_TOPIC")),
            "KEYS": chance.choice(TEXTS[:7]),
            "REAL_QID": chance.choice(("0", "0", "0", "1", "-1", "9" * 10)),
        }
        names = chance.choice((tuple(values), tuple(values)[::2], ("KEYS",)))
        befores = list(map(str.encode, texts_before_values(names)))
        raw = b"".join(before + values[name].encode() for before, name in zip(befores, names, strict=True))
        body = bytes(chance.choice((0, 3, 1000)))
        record = bytearray(84) + struct.pack(">I", len(body)) + body + b"\x13" + b"W" * 19
        record += struct.pack(">H", len(raw)) + raw
        record[:8] = struct.pack(">II", len(record), 0xDAA320A7)
        is_damaged = chance.random() < 0.5
        messages = [
            StoredMessage((damaged(chance, bytes(record)) if is_damaged else bytes(record)).ljust(91, b"\0"))
            for _ in range(chance.choice((1, 1, 3, 80)))
        ]
        places = tuple(names.index(name) if name in names else -1 for name in COPIED_PROPERTIES)
        odd = tuple(chance.choice((-1, 0, 2, 4, 1 << 40)) for _ in places)
        if self.waiting.log.end > 1 << 23:
            self.waiting.close()
            self.waiting = self.open_store()
        self.waiting.append(Message("T", bytes(1000)), chance.randrange(2))  # it opens the queue, and makes room
        self.waiting.appender.append_waiting(
            messages, befores * chance.choice((1, 1, 1, 30)), chance.choice((places, places, odd))
        )

    def follow(self) -> None:
        """Dispatch the last records of a log that were damaged before."""
        chance, store = self.chance, self.open_store()
        sent = [
            store.append(
                Message("T", b"x", tags="t", keys="k", delay_level=chance.choice((0, 0, 3))),
                1,
                sys_flag=chance.choice((0, 0, 0, 4)),
            )
            for _ in range(chance.choice((1, 3, 17)))
        ]
        begin = sent[chance.randrange(len(sent))].physical_offset
        buffer = store.log.sequence.file(0).buffer
        data = buffer[begin : store.log.end]
        if chance.random() < 0.7:
            buffer[begin : store.log.end] = damaged(chance, data).ljust(len(data), b"\0")[: len(data)]
        with suppress(RmqError):
            store.read("T", 1, 0)

    def index(self) -> None:
        """Hash keys, and write index entries over slots that lead anywhere."""
        chance = self.chance
        texts = [None, *(text.encode("utf-8", "surrogatepass") for text in TEXTS), b"", b"k1 k2", b"\xff", b"k " * 50]
        rows = [
            (number, number, chance.choice((0, -(1 << 31), 1 << 31)), chance.choice(texts), chance.choice(texts))
            for number in range(chance.randrange(40))
        ]
        self.core.key_hashes(rows)
        slots, room, count = 7, 50, chance.randrange(60)
        buffer = mmap.mmap(-1, 40 + 4 * slots + 20 * room)
        buffer[40 : 40 + 4 * slots] = chance.randbytes(4 * slots)
        hashes = np.array([chance.choice((0, 1, 1 << 31, -1, (1 << 62) - 1)) for _ in range(count)], np.int64)
        places = np.arange(count + chance.choice((0, 0, 0, 1)), dtype=np.int64)
        with suppress(ValueError):
            number = chance.choice((0, 1, 40, -1, 1 << 40))
            self.core.put_entries(buffer, slots, number, places, places, hashes, chance.choice((0, 1 << 40)), 5)
        with suppress(ValueError):
            self.core.spread(places, np.arange(count), hashes if chance.random() < 0.5 else np.sort(places), 0)

    def columns(self) -> None:
        """Look at records and their properties where damaged entries lead, also beyond the data."""
        chance, data = self.chance, damaged(self.chance, self.log)
        places, sizes = np.array(chance.choices(self.places, k=9)).T.copy()
        if chance.random() < 0.5:
            data = data[: chance.choice((places[0] + 91, len(data)))]
            sizes = np.array([int.from_bytes(data[at : at + 4], "big") for at in places.tolist()])
        else:
            places[chance.randrange(9)] = chance.choice((-1, len(data) - 91, len(data) - 4, 1 << 62))
        self.core.frames(data, places, sizes)
        begins, ends = sorted(chance.choices((0, 5, 700, len(data), len(data) + 1, -1), k=2))
        with suppress(ValueError):
            self.core.property_values(data, np.array([begins] * 2), np.array([ends] * 2), b"KEYS")

    def checksum(self) -> None:
        """Compute checksums at odd places and lengths, and of parts that may lie outside."""
        data = self.log[self.chance.randrange(100) :][: self.chance.choice((300, 3000)) - self.chance.randrange(300)]
        assert self.core.crc32(data) == self.core.crc32(data, 1) == self.core.crc32(data, 0)
        places = [self.chance.choice((-1, 0, 5, len(data), len(data) + 1, 1 << 62)) for _ in range(20)]
        self.core.checksums(data, np.array(places[:10]), np.array(places[10:]))
        with mmap.mmap(-1, 5 * mmap.PAGESIZE) as pages:
            begin, end, part = self.chance.choice(places), self.chance.choice(places), self.chance.choice((-1, 0, 4096))
            self.core.advise(pages, begin, end, mmap.MADV_WILLNEED, part)

    def run(self, seconds: float = math.inf, calls: int = 1 << 62) -> int:
        """Call everything until the time is over, or so many calls were made; return their number."""
        parts: list[Callable[[], Any]] = [
            self.append, self.scan, self.derive, self.pull, self.wait, self.follow, self.index,
            self.checksum, self.columns, lambda: self.read_body(self.log[:300]),
        ]  # fmt: skip
        clock, made = SystemClock(), 0
        end_ms = clock.now_ms() + seconds * 1000
        while made < calls and clock.now_ms() < end_ms:
            self.chance.choice(parts)()
            made += 1
        return made


def main() -> int:
    """Build the core with sanitizers, fuzz it in a process with their library, and return its status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20, metavar="N", help="how long to fuzz (20)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the damage (1)")
    options = parser.parse_args()
    if "ASAN_OPTIONS" in os.environ:  # in the process that is started below
        fuzzer = Fuzzer(random.Random(options.seed))
        calls, counts = fuzzer.run(options.seconds), fuzzer.core.counts()
        print(f"{calls} calls, {counts}: nothing found")
        assert all(counts.values()), "a part of the core never did its work, so nothing could be found in it"
        return 0
    compiler = shutil.which(os.environ.get("CC", "gcc")) or "false"
    asked = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    library = asked.stdout.strip()
    if not os.path.isabs(library):
        print("skipped: no C compiler with an address sanitizer")
        return 0
    with tempfile.TemporaryDirectory(prefix="librmq-fuzz-") as scratch:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        flags = {"CFLAGS": FLAGS, "LDFLAGS": FLAGS, "LIBRMQ_CORE": "on"}
        subprocess.run([*pip, "--target", f"{scratch}/built", CHECKOUT], env={**os.environ, **flags}, check=True)
        variables = {
            **os.environ,
            "LD_PRELOAD": library,
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
            "LIBRMQ_CORE": "on",
            "PYTHONPATH": f"{scratch}/built{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        return 1 if subprocess.run([sys.executable, "-P", *sys.argv], env=variables, check=False).returncode else 0


if __name__ == "__main__":
    sys.exit(main())
