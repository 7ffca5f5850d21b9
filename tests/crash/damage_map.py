"""A map of damage: every kind of file of a store, damaged in every way, as each reader sees it.

A small store has each kind of file: the log, queues, the key index, the timer's files, the broker's tables, documents
of librmq's own. Readers are what users call. Each gives the answer that the sound store gives, or says that something
is wrong: by an error of librmq, a warning in the log, or the status of a command.
"""

from __future__ import annotations

import io
import logging
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

from librmq import (
    Broker,
    BrokerConfig,
    ConsumeFrom,
    ManualClock,
    ManualRunner,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    ReconsumeLater,
    SimpleConsumer,
    StoreConfig,
    StoredMessage,
    TimerConfig,
    TransactionConfig,
    TransactionProducer,
    TransactionState,
)
from librmq.cli import main
from librmq.columns import reader
from librmq.config import ENTRY_SIZE
from librmq.consumequeue_entries import entry_dtype
from librmq.errors import RmqError
from librmq.files._memory import MemoryFiles
from librmq.message.record import BODY_AT, LAYOUT, span
from librmq.store.format.indexfile import HEADER_SIZE
from librmq.store.format.timerfiles import TimerLog, TimerWheel, slot_dtype, unit_dtype
from librmq.store.recovery._verify import verify
from tests.log_parser import Parsed, parse
from tests.stores import ROOT, START_MS, Contents, contents, in_memory, on_disk

# ---- the store

_TOPIC, _LATER = "T", "later"
_GROUP, _IN_WORK = "G", "P"
_IDS: Final = [f"{number:032X}" for number in (3, 16, 39)]
_CONFIG: Final = StoreConfig.tiny(
    commitlog_file_size=4 << 10, consumequeue_file_size=40 * ENTRY_SIZE, max_index_num=128, max_message_size=2 << 10,
    message_delay_level="1s 1m 1h 2h",
)  # fmt: skip
_BROKER: Final = BrokerConfig(
    timers=TimerConfig(slots_total=300, timer_roll_window_slot=60, timer_precision_ms=60_000, timer_log_file_size=1024),
    transactions=TransactionConfig(timeout_s=60, interval_s=60),
)


@cache
def store(*, closed: bool) -> tuple[Contents, int]:
    """Return the files of a store that was closed, or killed, and the time of its end."""
    files, runner = MemoryFiles(), ManualRunner(ManualClock(START_MS))
    with warnings_of_librmq(), Broker.open(ROOT, _BROKER, runner=runner, files=files, store_config=_CONFIG) as broker:
        broker.create_topic(_TOPIC, 2)
        broker.create_topic(_LATER, 1)
        broker.set_group(_GROUP)
        _fill(broker, runner)
        if not closed:
            return contents(files), runner.now_ms()
    return contents(files), runner.now_ms()


def _fill(broker: Broker, runner: ManualRunner) -> None:
    """Let all that a store keeps wait in it, or have passed."""
    producer = Producer(broker, "sender")
    for number in range(40):
        message = Message(
            _TOPIC, b"body %03d " % number + bytes(range(60, 90)), tags="ab"[number % 2], keys=[f"k{number}"],
            properties={"n": str(number)}, unique_key=f"{number:032X}",
        )  # fmt: skip
        producer.send(message, queue=number // 2 % 2)
        runner.advance(1001)  # as with real clocks, times don't differ by whole seconds, which delays do
        if number == 20:
            _consume(broker, runner)
            broker.store.flush()
    for number in range(6):
        producer.send(_LATER, b"level %d" % number, delay_level=3 + number % 2)
        producer.send(_LATER, b"timer %d" % number, delay=timedelta(hours=number + 1, minutes=30))
        runner.advance(1001)
    producer.send(_LATER, b"passed", delay=timedelta(minutes=2))
    runner.advance(200_000)
    producer.send(_LATER, b"last timer", delay=timedelta(hours=8, minutes=30))
    for delay in (timedelta(hours=2), None):
        level = 4 if delay is None else None
        broker.cancel(producer.send(_LATER, b"cancelled", delay=delay, delay_level=level))
    senders = TransactionProducer(broker, "transactions", lambda _: TransactionState.UNKNOWN)
    for number, state in enumerate(3 * [TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN]):
        half = Message(_LATER, b"%s %d" % (state.name.encode(), number))
        senders.send_in_transaction(half, state, execute=lambda _, state: state)
    runner.advance(1001)
    with SimpleConsumer(broker, _IN_WORK) as receiver:
        receiver.subscribe(_TOPIC)
        receiver.ack(*(one for one in receiver.receive(20, invisible=3000) if one.queue_offset % 3))
    broker.store.flush()
    broker.resend_dead_letters(_GROUP, broker.dead_letters(_GROUP)[:1])
    runner.advance(10_000)
    senders.shutdown()
    producer.shutdown()


def _consume(broker: Broker, runner: ManualRunner) -> None:
    """Let a group consume what is there; of its messages some wait for a retry, and some are dead letters."""

    def listen(message: StoredMessage) -> None:
        number = int(message.body[5:8])
        if number % 5 == 4:
            raise ReconsumeLater(delay_level=3 if number % 2 else -1)

    consumer = PushConsumer(broker, _GROUP, consume_from=ConsumeFrom.FIRST)
    consumer.subscribe(_TOPIC, listen)
    consumer.start()
    runner.advance(5000)
    consumer.shutdown()


# ---- damage

KINDS: Final = ("bit", "bit", "bit", "zeros", "cut", "swap")
_LOG: Final = "commitlog"


class Damage(NamedTuple):
    """A change of one file."""

    path: str
    kind: str
    begin: int
    """The first byte that may differ."""
    data: bytes
    """The content of the file after it."""


def draw(found: Contents, rng: random.Random) -> Damage:
    """Draw a damage: a bit, bytes that become zero, a cut, or two places that are swapped."""
    kinds = defaultdict(list)
    for path, data in sorted(found.items()):
        if data:
            top, _, rest = path.partition("/")
            kinds[top if top in (_LOG, "index", "timerlog") else f"{top}/{rest.partition('/')[0]}"].append(path)
    queues = [kind for kind in kinds if kind.startswith("consumequeue/")]
    # The log and the queues have more fields than other files.
    path = rng.choice(kinds[rng.choice([*kinds, *queues, *8 * [_LOG]])])
    data = found[path]
    used = [at for at in range(0, len(data), 32) if any(data[at : at + 32])] or [0]
    at, other = (min(rng.choice(used) + rng.randrange(32), len(data) - 1) for _ in range(2))
    kind = rng.choice(KINDS)
    if kind == "bit":
        changed = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    elif kind == "zeros":
        size = min(rng.choice([1, 4, 20, 100, 512]), len(data) - at)
        changed = data[:at] + bytes(size) + data[at + size :]
    elif kind == "cut":
        changed = data[:at]
    else:
        at, other = sorted((at, other))
        size = min(rng.choice([1, 8, 20, 64]), other - at, len(data) - other)
        one, two = data[at : at + size], data[other : other + size]
        changed = data[:at] + two + data[at + size : other] + one + data[other + size :]
    return Damage(path, kind, at, changed)


def places(found: Contents, damage: Damage) -> set[str]:
    """Return what the changed bytes are, as people name it: the fields of a binary file, or the name of another."""
    before, after = found[damage.path], damage.data
    if len(after) < len(before):
        return {f"{damage.path.partition('/')[0]}: length"}
    return {_place(found, damage.path, at) for at in range(len(before)) if before[at] != after[at]}


def _place(found: Contents, path: str, at: int) -> str:
    part, _, below = path.partition("/")
    if part == _LOG:
        at += int(below)
        record = next((one for one in _records(_log_of(found)) if one.at <= at < one.at + one.size), None)
        return "log: no record" if record is None else f"log: {_record_field(found, record, at - record.at)}"
    if part == "consumequeue":
        topic = below.partition("/")[0]
        field = "no entry" if not any(found[path][at - at % ENTRY_SIZE :]) else _field(entry_dtype(), at % ENTRY_SIZE)
        return f"{'queue' if topic in (_TOPIC, _LATER) else topic}: {field}"
    if part == "index":
        return f"index: {'header' if at < HEADER_SIZE else 'slots and entries'}"
    if part == "timerlog":
        return f"timer log: {_field(unit_dtype(), at % TimerLog.UNIT_SIZE)}"
    if part == "timerwheel":
        return f"wheel: {_field(slot_dtype(), at % TimerWheel.SLOT_SIZE)}"
    if path == "config/timercheck":
        return f"timercheck: {('read time', 'log position', 'queue offset', 'the rest')[min(at // 8, 3)]}"
    return path.removesuffix(".bak")


def _field(of: np.dtype[Any], at: int) -> str:
    fields: Any = of.fields
    return str(next(name for name in reversed(fields) if fields[name][1] <= at))


def _log_of(found: Contents) -> tuple[tuple[str, bytes], ...]:
    return tuple((path, data) for path, data in found.items() if path.startswith(f"{_LOG}/"))


@cache
def _records(log: tuple[tuple[str, bytes], ...]) -> list[Parsed]:
    with TemporaryDirectory() as folder:
        return parse(on_disk(dict(log), Path(folder))).kept


def _record_field(found: Contents, record: Parsed, at: int) -> str:
    start = record.at - record.at % _CONFIG.commitlog_file_size
    data = found[f"{_LOG}/{start:020}"][record.at - start :]
    if at < BODY_AT:
        return next(name for name in reversed(LAYOUT) if span("size", name) - span(name, name) <= at)
    topic_at = BODY_AT + int.from_bytes(data[BODY_AT - 4 : BODY_AT], "big")
    return "body" if at < topic_at else "topic" if at <= topic_at + data[topic_at] else "properties"


# ---- readers

_TURNS: Final = 30
_TURN_MS: Final = 20 * 60_000


class Seen(NamedTuple):
    """What a reader answered, and what it said of damage."""

    answer: object
    said: str = ""
    is_foreign: bool = False
    """Whether it ended in an error that is not one of librmq."""


class Look(NamedTuple):
    """What all readers see of a store."""

    seen: dict[str, Seen]
    warned: frozenset[str]
    """What the broker logged while it had the store, without numbers."""
    is_refused: bool
    """Whether it refused to open the store."""
    verdict: object
    """What `verify` says; None if it refuses."""


CLIENTS: Final = ("push", "group", "tagged", "pull", "simple", "in work", "later")
"""Readers that get messages as clients do: a new group by push, one that goes on, by a tag, by polls, by receives, one
whose messages were in work, and by push what waited for its time or for the end of a transaction."""
BROKER: Final = ("messages", "by key", "dead letters", "lag")
COMMANDS: Final = {
    "show": "show s --body hex", "export": "export s --all -o out.jsonl", "query --key": "query s --topic T --key k7",
    "query --id": "query s --id {}", "lag s": "lag s", "pending": "pending s", "dead-letters": "dead-letters s",
}  # fmt: skip
READERS: Final = (*CLIENTS, *BROKER, *COMMANDS, "columns")


def silent(whole: Look, look: Look, *, closed: bool) -> list[str]:
    """Return the readers that answer otherwise than to the whole store and say nothing of it, also `verify`.

    In a store that was killed, `verify` may call sound what the next opening makes good.
    """
    wrong = [name for name in READERS if look.seen[name].answer != whole.seen[name].answer]
    passed = [
        name
        for name in wrong
        if look.seen[name].said == whole.seen[name].said
        and not (name in (*CLIENTS, *BROKER) and look.warned - whole.warned)
    ]
    lasting = [name for name in wrong if closed or name in (*CLIENTS, *BROKER)]
    return [*passed, *["verify"] * (look.verdict == whole.verdict and (look.is_refused or bool(lasting)))]


def look(found: Contents, now_ms: int, folder: Path) -> Look:
    """Ask all readers of a store with these files; ``folder`` is for the commands."""
    shutil.rmtree(folder, ignore_errors=True)
    on_disk(found, folder / "s")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        seen = {name: _seen(partial(_printed, words)) for name, words in COMMANDS.items()}
        seen["columns"] = _seen(_rows)
        with warnings_of_librmq():
            verdict = _seen(lambda: verify("s"))
    with warnings_of_librmq() as warned:
        life = _seen(lambda: _life(in_memory(found), now_ms))
    of_broker = life.answer if isinstance(life.answer, dict) else dict.fromkeys((*CLIENTS, *BROKER), life)
    return Look({**of_broker, **seen}, frozenset(warned), bool(life.said), verdict.answer)


def _seen(ask: Callable[[], object]) -> Seen:
    """Return an answer, or the error in its place."""
    try:
        answer = ask()
    except RmqError as error:
        return Seen(None, re.sub(r"\d+", "#", str(error)))
    except Exception as error:
        return Seen(None, repr(error), is_foreign=True)
    return answer if isinstance(answer, Seen) else Seen(answer)


@contextmanager
def warnings_of_librmq() -> Iterator[set[str]]:
    """Collect what librmq logs of warnings and errors, without numbers; nothing is printed."""
    warned: set[str] = set()

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warned.add(re.sub(r"\d+", "#", record.getMessage()))

    log, handler = logging.getLogger("librmq"), Collector(logging.WARNING)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(log, "handlers", [*log.handlers, handler])
        patched.setattr(log, "propagate", False)
        yield warned


def _printed(words: str) -> Seen:
    """Run a command, with each id if it takes one."""
    printed, said, is_foreign = [], [], False
    for one in _IDS if "{}" in words else [""]:
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            warnings_of_librmq() as warned,
        ):  # which go to standard error too
            status = main(words.format(one).split())
            out.flush()
        written = Path("out.jsonl")
        printed.append(written.read_bytes() if written.exists() else out.buffer.getvalue())
        written.unlink(missing_ok=True)
        is_foreign |= "a bug in librmq" in err.getvalue()
        said += [re.sub(r"\d+", "#", err.getvalue()), *sorted(warned), *[str(status)] * bool(status)]
    return Seen(printed, "".join(said), is_foreign)


def _rows() -> Seen:
    columns = ["physicalOffset", "body", "topic", "queueId", "queueOffset"]
    with warnings_of_librmq() as warned:
        batches = [*reader("s", topic=re.compile(".*"), columns=columns)]
    return Seen([row for batch in batches for row in batch.to_pylist()], ", ".join(sorted(warned)))


def _fields(message: StoredMessage) -> tuple[object, ...]:
    """Return all that a message says of itself."""
    return (
        message.topic, message.queue_id, message.queue_offset, message.body, message.tags, message.keys, message.flag,
        tuple(sorted(message.properties.items())), message.born_timestamp_ms, message.born_host,
        message.store_timestamp_ms, message.store_host, message.reconsume_times,
    )  # fmt: skip


class _Life:
    """A broker of a store, and what its clients get within ten hours."""

    def __init__(self, broker: Broker, runner: ManualRunner) -> None:
        self._broker, self._runner = broker, runner
        self._begin_ms = runner.now_ms()
        self._got: dict[str, set[object]] = {name: set() for name in CLIENTS}
        self._pull = PullConsumer(broker, "pull")
        self._receivers = {"simple": SimpleConsumer(broker, "simple"), "in work": SimpleConsumer(broker, _IN_WORK)}

    def seen(self) -> dict[str, Seen]:
        """Return what each reader sees."""
        return {**self._asked(), **self._delivered()}

    def _asked(self) -> dict[str, Seen]:
        broker, topics = self._broker, (_TOPIC, _LATER)
        return {
            "messages": _seen(lambda: [_fields(one) for topic in topics for one in broker.messages(topic)]),
            "by key": _seen(lambda: [_fields(one) for n in range(40) for one in broker.find_by_key(_TOPIC, f"k{n}")]),
            "dead letters": _seen(lambda: [_fields(one) for one in broker.dead_letters(_GROUP)]),
            "lag": _seen(lambda: broker.lag(_GROUP)),
        }

    def _delivered(self) -> dict[str, Seen]:
        pushes = []
        for name, group, tags in (("push", "push", None), ("group", _GROUP, None), ("tagged", "tagged", "a")):
            push = PushConsumer(self._broker, group, consume_from=ConsumeFrom.FIRST)
            push.subscribe(_TOPIC, partial(self._note, name), tags=tags)
            if name == "push":
                push.subscribe(_LATER, partial(self._note, name))
            pushes.append(push)
        self._pull.subscribe(_TOPIC)
        for receiver in self._receivers.values():
            receiver.subscribe(_TOPIC)
        clients: list[Any] = [*pushes, self._pull, *self._receivers.values()]
        for client in clients:
            client.start()
        asks: dict[str, Callable[[], object]] = {"pull": self._poll}
        asks |= {name: partial(self._receive, name) for name in self._receivers}
        failed: dict[str, Seen] = {}
        for _ in range(_TURNS):
            for name, ask in asks.items():
                if (seen := _seen(ask)).said:
                    failed.setdefault(name, seen)
            self._runner.advance(_TURN_MS)
        for client in clients:
            client.shutdown()
        return {name: failed.get(name, Seen(None))._replace(answer=got) for name, got in self._got.items()}

    def _note(self, name: str, message: StoredMessage) -> None:
        if message.topic == _LATER:
            self._got["later"].add((message.body, (self._runner.now_ms() - self._begin_ms) // _TURN_MS))
        else:
            self._got[name].add(_fields(message) if message.topic == _TOPIC else message.body)

    def _poll(self) -> None:
        while messages := self._pull.poll(0):
            for message in messages:
                self._note("pull", message)

    def _receive(self, name: str) -> None:
        receiver = self._receivers[name]
        while messages := receiver.receive(32, wait=0, invisible=600):
            for message in messages:
                self._note(name, message)
            receiver.ack(*messages)


def _life(files: MemoryFiles, now_ms: int) -> dict[str, Seen]:
    runner = ManualRunner(ManualClock(now_ms))
    with Broker.open(ROOT, runner=runner, files=files) as broker:
        return _Life(broker, runner).seen()
