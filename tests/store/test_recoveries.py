"""What recoveries make of damaged stores: a table of cases in ``recoveries/*.txt``.

A file has blocks with blank lines between them: a command, its input, a line ``----``, and what follows from it. So a
reviewer reads what is damaged beside what librmq says and leaves. ``LIBRMQ_REWRITE=1`` writes down what follows today;
a change of these files is reviewed like one of code.

``store [killed] [units]`` makes a store of small files (`tests.stores.SMALL`) with a message a line: ``topic/queue
body``, and ``tags= keys= unique= flag= delay= sys=``, ``size=`` of the body, ``times=``. Between them ``flush``
flushes, and ``forget topic/queue`` lets a queue begin again, as that of a topic that was deleted. What follows are the
records, ``#1`` and so on, with their places.

``case what is wrong`` changes that store, a change a line:

    #2.queue_id = 7                 a field of the second record, as a number
    #2+91 ^ 01                      bits of bytes behind where it begins; ``#end`` is where the log ends
    consumequeue/T/0/0 @20 = 00*20  bytes of a file; zeros before a number are left out, and ``index/1`` is the first
    gone consumequeue/T             a file or folder; also ``cut`` FILE SIZE, ``file`` FILE SIZE, ``folder`` FOLDER

What follows is the verdict of `verify`; in a word each what a broker and librmq do at a start; what a view says and
shows if that is not what an opening says and leaves; then that opening, and a thorough one if that differs: which
records each queue leads to from which offset on (``-`` is an entry without a record). Beside it, each case checks that
librmq does what the word says, that a verdict, a view and a refusal change nothing, that each queue goes on behind its
end, and that all messages of a store that is sound then are found by their keys.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any, Final

import pytest

from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.diagnosis import can_start
from librmq.errors import ConfigError, CorruptionError, NotAStoreError
from librmq.files._memory import MemoryFiles
from librmq.files.interface import Damage, Files
from librmq.message import record
from librmq.message.message import Message, StoredMessage
from librmq.message.topics import has_no_row
from librmq.store import MessageStore
from librmq.store.engine.derivation import has_queue_entry, is_indexed
from librmq.store.recovery._verify import UNKNOWABLE, verify
from tests.budget import some
from tests.store.test_core import WITH_AND_WITHOUT, without_core
from tests.stores import ROOT, SMALL, SMALL_EXT, START_MS, Contents, contents, in_memory, opened

FOLDER: Final = Path(__file__).parent / "recoveries"
FILES: Final = sorted(path.stem for path in FOLDER.glob("*.txt"))
KINDS: Final = {
    "half": record.TRANSACTION_PREPARED, "commit": record.TRANSACTION_COMMIT, "rollback": record.TRANSACTION_ROLLBACK,
}  # fmt: skip
FIELDS: Final = {
    "size": (0, 4), "magic": (record.MAGIC_AT, 4), "checksum": (record.BODY_CRC_AT, 4),
    "queue_id": (record.QUEUE_ID_AT, 4), "flag": (record.FLAG_AT, 4), "queue_offset": (record.QUEUE_OFFSET_AT, 8),
    "place": (record.PHYSICAL_OFFSET_AT, 8), "system_flag": (record.SYS_FLAG_AT, 4),
    "born_time": (record.BORN_TIMESTAMP_AT, 8), "born_host": (record.BORN_HOST_AT, 8),
    "store_time": (record.STORE_TIMESTAMP_AT, 8), "store_host": (record.STORE_HOST_AT, 8),
    "attempts": (record.BODY_AT - 16, 4), "prepared": (record.BODY_AT - 12, 8), "body_size": (record.BODY_AT - 4, 4),
    "body": (record.BODY_AT, 1),
}  # fmt: skip


class Cases:
    """The store of a file of cases, as its blocks make it."""

    def __init__(self) -> None:
        self.config: StoreConfig = SMALL
        self.found: Contents = {}
        self.places: list[int] = []
        self.end = 0

    def store(self, words: list[str], lines: list[str]) -> list[str]:
        """Make the store; return its records."""
        self.config = SMALL_EXT if "units" in words else SMALL
        files, clock = MemoryFiles(), ManualClock(START_MS)
        store = MessageStore.open(ROOT, self.config, files=files, clock=clock, background=False)
        for line in lines:
            first, *more = shlex.split(line)
            if first == "flush":
                store.flush()
            elif first == "forget":
                topic, _, queue_id = more[0].rpartition("/")
                store.queues[topic, int(queue_id)].clear()
                store.appender.lanes[topic, int(queue_id)].next_queue_offset = 0
            else:
                body = "".join(word for word in more if "=" not in word)
                self.append(store, clock, first, body, dict(word.split("=", 1) for word in more if "=" in word))
        records = list(store)
        self.places, self.end = [message.physical_offset for message in records], store.log.end
        if "killed" not in words:
            store.close()
        self.found = {name: data for name, data in contents(files).items() if not name.startswith("librmq")}
        store.abandon()
        return [
            f"#{number} at {one.physical_offset}: {one.topic}/{one.queue_id} {one.queue_offset}, {one.size} bytes"
            for number, one in enumerate(records, 1)
            if number in {1, len(records)} or len(records) <= 12
        ] or ["no records"]

    def append(self, store: MessageStore, clock: ManualClock, queue: str, body: str, options: dict[str, str]) -> None:
        topic, _, queue_id = queue.rpartition("/")
        flags = KINDS.get(options.pop("sys", ""), 0)
        numbers = {name: int(options.pop(name, default)) for name, default in (("size", "0"), ("times", "1"))}
        more: dict[str, Any] = {"tags": options.get("tags"), "unique_key": options.get("unique")}
        more |= {"keys": options["keys"].split(",")} if "keys" in options else {}
        more |= {"delay_level": int(options["delay"])} if "delay" in options else {}
        data, flag = body.encode().ljust(numbers["size"], b"."), int(options.get("flag", "0"))
        for _ in range(numbers["times"]):
            store.append(Message(topic, data, flag=flag, **more), int(queue_id), sys_flag=flags)
            clock.advance(ms=100)

    # ---- changes

    def changed(self, lines: list[str]) -> Contents:
        """Return the contents of the store with changes."""
        found = dict(self.found)
        for line in lines:
            first, *more = line.split()
            if first == "gone":
                path = self.path(more[0])
                assert path in found, line
                found = {name: data for name, data in found.items() if not f"{name}/".startswith(f"{path}/")}
            elif first == "folder":
                found[more[0]] = None
            elif first == "file":
                found[self.path(more[0])] = bytes(int(more[1]))
            elif first == "cut":
                found[self.path(more[0])] = found[self.path(more[0])][: int(more[1])]
            else:
                path, at, size = self.place(first, more)
                sign, value = more[-2:]
                data, new = found[path], self.value(value, size)
                if sign == "^":
                    new = bytes(a ^ b for a, b in zip(data[at : at + len(new)], new, strict=True))
                assert data[at : at + len(new)] != new, line
                found[path] = data[:at] + new + data[at + len(new) :]
        return found

    def place(self, first: str, more: list[str]) -> tuple[str, int, int]:
        """Return file and place of bytes, and how many a number there has."""
        if not first.startswith("#"):
            return self.path(first), int(more[0].removeprefix("@")), 0
        number, field, behind = re.fullmatch(r"#(\d+|end)(?:\.(\w+))?(?:\+(\d+))?", first).groups()  # type: ignore[union-attr]
        begin = self.end if number == "end" else self.places[int(number) - 1]
        offset, size = FIELDS.get(field, (0, 0))
        at = begin + offset + int(behind or 0)
        return f"commitlog/{at // SMALL.commitlog_file_size * SMALL.commitlog_file_size:020d}", at % 4096, size

    def value(self, text: str, size: int) -> bytes:
        """Return a number of ``size`` bytes, or hexadecimal digits, which can be repeated."""
        if size > 1 and re.fullmatch(r"-?\d+", text):
            return int(text).to_bytes(size, "big", signed=True)
        digits, _, times = text.partition("*")
        return bytes.fromhex(digits) * int(times or 1)

    def path(self, short: str) -> str:
        """Return the path of a file by its short name."""
        folder, name = os.path.split(short)
        if folder == "index" and len(name) == 1:
            return sorted(path for path in self.found if path.startswith("index/"))[int(name) - 1]
        is_start = name.isdigit() and (folder == "commitlog" or folder.count("/") == 2)
        return f"{folder}/{int(name):020d}" if is_start and len(name) < 10 else short

    # ---- what follows

    def case(self, lines: list[str]) -> list[str]:
        """Return the verdict on the changed store, and what openings say and leave."""
        found = self.changed(lines)
        files = in_memory(found)
        try:
            verdict = verify(ROOT, self.config, files)
        except NotAStoreError:
            return ["no store"]
        told = [f"damage: {self.told(one)}" for one in verdict.damage]
        told += [f"recoverable: {self.told(one)}" for one in verdict.recoverable]
        told += [f"note: {note.replace(ROOT, '')}" for note in verdict.notes if note != UNKNOWABLE]
        damaged = [self.told(one) for one in verdict.damage]
        view = self.shown(files, read_only=True)
        assert contents(files) == contents(in_memory(found)), "a verdict or a view has changed something"
        usual, thorough = (self.opening(found, damaged, thorough=thorough) for thorough in (False, True))
        start = can_start(ROOT, self.config, files=files)
        assert (start.librmq == "refuses") == usual[0].startswith("  refused")
        same = usual == thorough
        told = [*(told or ["sound"]), f"at a start a broker {start.broker}, librmq {start.librmq}"]
        told += [] if view == usual[: len(view)] else ["view:", *view]
        told += [f"opening{', also a thorough one' if same else ''}:", *usual]
        return told if same else [*told, "thorough opening:", *thorough]

    def opening(self, found: Contents, damaged: list[str], *, thorough: bool) -> list[str]:
        """Open the store; return what that says, and where queues lead then."""
        files = in_memory(found)
        told = self.shown(files, thorough=thorough)
        if told[0].startswith("  refused"):
            return told
        left = [self.told(one) for one in verify(ROOT, self.config, files).damage]
        with opened(files, self.config) as store:
            for message in store if not left else ():
                for key in message.keys if is_indexed(message.sys_flag) else ():
                    assert message in store.find_by_key(message.topic, key, max_messages=100)
            ends = {name: queue.max_offset for name, queue in store.queues.items() if not has_no_row(name[0])}
            for (topic, queue_id), end in ends.items():
                assert store.append(Message(topic, b"next"), queue_id).queue_offset == end
        return told + (["  as damaged as before"] if left and left == damaged else [f"  still: {one}" for one in left])

    def shown(self, files: Files, **how: bool) -> list[str]:
        """Return what an opening says, and where queues lead then."""
        before, led = contents(files), set[str]()
        try:
            with opened(files, self.config, **how) as store:
                told = [f"  {self.told(one)}" for one in store.recovered]
                queues = [self.queue(store, *name, led) for name in sorted(store.queues)]
                told += [*filter(None, queues)] or ["  no messages"]
                having = [self.number(one) for one in store if has_queue_entry(one.sys_flag)]
                alone = " ".join(one for one in having if one not in led)
                return [*told, f"  led to by no queue: {alone}"] if alone else told
        except ConfigError as error:
            return [f"  refused: {error}"]
        except CorruptionError as error:
            assert contents(files) == before, "a refused opening has changed something"
            damage = Damage(error.file, error.offset, error.kind, error.what.partition(". `librmq")[0])
            return [f"  refused: {self.told(damage)}"]

    def number(self, message: StoredMessage) -> str:
        place = message.physical_offset
        return f"#{self.places.index(place) + 1}" if place in self.places else f"@{place}"

    def queue(self, store: MessageStore, topic: str, queue_id: int, led: set[str]) -> str:
        """Return where a queue leads, and add that to ``led``."""
        queue, leads = store.queues[topic, queue_id], list[str]()
        for at in range(queue.min_offset, queue.max_offset):
            messages = store.read(topic, queue_id, at, 1).messages
            leads.append(self.number(messages[0]) if messages and messages[0].queue_offset == at else "-")
        led.update(leads)
        shown = leads if len(leads) <= 16 else [*leads[:2], "…", *leads[-2:]]
        return f"  {topic}/{queue_id} from {queue.min_offset}: {' '.join(shown)}" if leads else ""

    def told(self, damage: Damage) -> str:
        path = os.path.relpath(damage.file, ROOT)
        folder, name = os.path.split(path)
        indexes = sorted(path for path in self.found if path.startswith("index/"))
        if path in indexes:
            path = f"index/{indexes.index(path) + 1}"
        elif len(name) == 20 and name.isascii() and name.isdigit():
            path = f"{folder}/{int(name)}"
        lost = f" ({damage.bytes} bytes)" if damage.bytes else ""
        return f"{path} at {damage.offset}: {damage.kind}: {damage.what.replace(f'{ROOT}/', '')}{lost}"


@pytest.mark.parametrize("code", WITH_AND_WITHOUT)
@pytest.mark.parametrize("name", FILES)
def test_recoveries_are_as_written(name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if code == "pure":
        without_core(monkeypatch)
    path, cases, now = FOLDER / f"{name}.txt", Cases(), []
    text = path.read_text("utf-8")
    blocks = text.strip("\n").split("\n\n")
    tried = some([block for block in blocks if block.startswith("case")])
    for block in blocks:
        command, *lines = block.partition("\n----\n")[0].split("\n")
        if not command.startswith("store") and block not in tried:  # or the quick check leaves it out
            now.append(block)
            continue
        kind, *words = command.split()
        follows = cases.store(words, lines) if kind == "store" else cases.case(lines)
        now.append("\n".join([command, *lines, "----", *follows]))
    written = "\n\n".join(now) + "\n"
    if os.environ.get("LIBRMQ_REWRITE"):
        path.write_text(written, "utf-8")
    assert written.split("\n\n") == text.split("\n\n")
