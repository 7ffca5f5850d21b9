"""Processes that consume are killed at any line: what was in work at each kill repeats, and nothing else.

A process that consumes writes a line before and after each message to a file, in one system call, which a kill does not
undo. So the ledger knows without librmq what was begun, and what was answered. Each life sends messages too, so that
there is always something to do.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import shutil
import signal
import sys
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import librmq
from librmq import Broker, ConsumeFrom, Producer, PullConsumer, PushConsumer, ReceiptError, RmqError, SimpleConsumer
from librmq.broker import AdministeredRoute
from librmq.clock import SystemClock
from librmq.message import StoredMessage
from librmq.override import override
from tests.conftest import SlowBudget
from tests.interrupting import killed_at_line
from tests.programs import Fork

pytestmark = [pytest.mark.slow, pytest.mark.skipif("sys.platform != 'linux'", reason="only there a kill is kept")]

CLOCK: Final = SystemClock()
NEVER: Final = threading.Event()
KILLS: Final = 25
LIMIT: Final = 3
"""Ends of a process after which a message is a dead letter; see `Round.deaths`."""
QUEUES: Final = range(4)
LISTENERS: Final = ("push", "push", "lists", "orderly")
WAYS: Final = (*LISTENERS, "simple", "poll")


class Round(NamedTuple):
    seed: str
    way: str
    members: int
    """Processes at a time: one alone, or several in a share."""
    threads: int
    messages: int
    """Sent by each life."""
    work_s: float
    """For a message; one in eight takes thirty times as long, so that others overtake it."""
    poisons: int
    deaths: int
    """``max_process_deaths``. With poisons so few kills happen that they alone convict nothing; else it is high."""

    @classmethod
    def draw(cls, seed: str) -> Round:
        rng = random.Random(seed)
        members, poisons = rng.choice((1, 1, 1, 2, 3)), rng.choice((0, 0, 0, 0, 1, 2))
        way = rng.choice(WAYS)
        return cls(
            seed,
            way,
            members,
            rng.choice((1, 2, 4, 20)),
            rng.choice((5, 20, 60)),
            rng.choice((0, 0.001, 0.004)),
            poisons,
            LIMIT if poisons else 4 * KILLS,
        )

    @property
    def kills(self) -> int:
        return LIMIT - 1 if self.poisons else KILLS


class Ledger:
    """What a life begins and ends. Thread-safe."""

    def __init__(self, path: Path, life: int, work_s: float) -> None:
        self._lines = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._life = life
        self._work_s = work_s

    def write(self, what: str, *names: str) -> None:
        """Add a line."""
        os.write(self._lines, f"{self._life} {threading.get_ident()} {what} {' '.join(names)}\n".encode())

    def begin(self, messages: list[Any]) -> None:
        """Begin messages, at the poisons of which this process ends."""
        self.write("begins", *map(name_of, messages))
        if any(message.body.startswith(b"poison") for message in messages):
            os.kill(os.getpid(), signal.SIGKILL)
        long = sum(zlib.crc32(message.body) % 8 == 0 for message in messages)
        if self._work_s:
            CLOCK.wait(NEVER, self._work_s * (1 + 30 * long))

    def end(self, messages: list[Any]) -> None:
        """Note that messages are consumed, or that this was answered."""
        self.write("ends", *map(name_of, messages))


class Takes(logging.Handler):
    """Notes in a ledger which queues a life takes."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if " takes %(queue)s" in record.msg:
            fields = vars(record)
            self._ledger.write("takes", f"{fields['rmq_topic']}/{fields['rmq_queue_id']}")


def name_of(message: StoredMessage) -> str:
    return f"{message.topic}/{message.queue_id}:{message.body.decode()}"


def push(route: AdministeredRoute, settings: Round, ledger: Ledger) -> Callable[[], object]:
    """Begin to consume with a listener; return what ends it."""
    is_list = settings.way == "lists"

    def listen(message: Any) -> None:
        messages = message if is_list else [message]
        ledger.begin(messages)
        ledger.end(messages)

    consumer = PushConsumer(
        route,
        "g",
        consume_from=ConsumeFrom.FIRST,
        threads=settings.threads,
        orderly=settings.way == "orderly",
        batch_size=8 if is_list else 1,
        max_process_deaths=settings.deaths,
    )
    consumer.subscribe("t", listen)
    consumer.start()
    return consumer.shutdown


def receive(route: AdministeredRoute, settings: Round, ledger: Ledger, ending: threading.Event) -> None:
    with SimpleConsumer(route, "g", max_process_deaths=settings.deaths) as consumer:
        consumer.subscribe("t")
        while not ending.is_set():
            for message in consumer.receive(8, invisible=5, wait=0.2):
                ledger.begin([message])
                with suppress(ReceiptError):  # it took too long
                    consumer.ack(message)
                    ledger.end([message])


def poll(route: AdministeredRoute, settings: Round, ledger: Ledger, ending: threading.Event) -> None:
    of_group: Any = {"auto_commit": False, "consume_from": ConsumeFrom.FIRST, "max_process_deaths": settings.deaths}
    with PullConsumer(route, "g", **of_group) as consumer:
        consumer.subscribe("t")
        while not ending.is_set():
            if messages := consumer.poll(0.2):
                ledger.begin(messages)
                consumer.commit()
                ledger.end(messages)


def consume(route: AdministeredRoute, settings: Round, ledger: Ledger) -> Callable[[], object]:
    """Begin to consume; return what ends it."""
    if settings.way in LISTENERS:
        return push(route, settings, ledger)

    def work() -> None:
        while not ending.is_set():
            with suppress(RmqError):  # the owner of the store has ended
                (receive if settings.way == "simple" else poll)(route, settings, ledger, ending)

    ending = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()

    def end() -> None:
        ending.set()
        thread.join()

    return end


def live(store: Path, path: Path, settings: Round, life: int, line: int | None, count: int) -> None:
    """Send messages and consume until a line of standard input, or be killed at a line of librmq.

    Without messages to send, all is consumed when the line ``idle`` is printed.
    """

    def work() -> None:
        ledger = Ledger(path, life, settings.work_s)
        logging.getLogger("librmq.consumer").addHandler(Takes(ledger))
        logging.getLogger("librmq.consumer").setLevel(logging.DEBUG)
        route = librmq.share(store, wait=60, timeout=5) if settings.members > 1 else Broker.open(store, wait=60)
        with route, Producer(route, "p", retries=0) as producer:  # a retry can store a message twice
            end = consume(route, settings, ledger)
            print("ready", flush=True)
            for number in range(count):
                body = f"{life}.{number}"
                with suppress(RmqError):
                    producer.send("t", body.encode())
                    ledger.write("sent", body)
            # Before a member has a queue, a group whose processes were all killed at once has no lag that is known.
            while not count and (
                route.lag("g") or all(route.consumer_offset("g", "t", queue) is None for queue in QUEUES)
            ):
                CLOCK.wait(NEVER, 0.02)
            print("idle", flush=True)
            sys.stdin.readline()
            end()
        ledger.write("closes")

    if line is None:
        work()
    else:
        killed_at_line(line, work)


class Killed:
    """A store whose processes are killed."""

    def __init__(self, folder: Path, settings: Round) -> None:
        self._store, self._ledger = folder / "store", folder / "ledger"
        self._settings = settings
        self._rng = random.Random(f"kills {settings.seed}")
        self._members: dict[int, Fork] = {}
        self._with_line: set[int] = set()
        self._lives = 0
        self.counts: Counter[str] = Counter()

    def _begin(self, *, is_last: bool = False) -> int:
        line, life, self._lives = None, self._lives, self._lives + 1
        if self._left and not is_last and self._rng.random() < 0.6:
            line = int(math.exp(self._rng.uniform(math.log(300), math.log(150_000))))
            self._with_line.add(life)
        count = 0 if is_last else self._settings.messages
        self._members[life] = Fork(live, self._store, self._ledger, self._settings, life, line, count)
        return life

    @property
    def _left(self) -> int:
        """The number of kills that nothing is to do yet."""
        return self._settings.kills - self.counts["at a line"] - self.counts["at a time"] - len(self._with_line)

    def _end(self, life: int, kind: str) -> None:
        self._members.pop(life).__exit__()
        self._with_line.discard(life)
        died = [line.split() for line in self._ledger.read_text().splitlines()] if self._ledger.exists() else []
        last = next((line for line in reversed(died) if line[0] == str(life)), [])
        is_poison = last[2:3] == ["begins"] and any(":poison" in name for name in last[3:])
        self.counts["at a poison" if is_poison else kind] += 1

    def run(self) -> Counter[str]:
        """Kill processes, let the last ones consume the rest, judge the ledger, and return what was counted."""
        settings, rng = self._settings, self._rng
        with Broker.open(self._store) as broker, Producer(broker, "p") as producer:
            broker.create_topic("t", rng.choice((1, 2, 4)))
            for number in range(settings.poisons):
                producer.send("t", f"poison{number}".encode())
        try:
            while len(self._members) < settings.members:
                self._begin()
            while self._left or self._with_line:
                CLOCK.wait(NEVER, rng.uniform(0.005, 0.15))
                ended = [life for life, fork in self._members.items() if fork.process.exitcode is not None]
                for life in ended:
                    assert self._members[life].process.exitcode == -signal.SIGKILL, f"life {life} fails"
                    self._end(life, "at a line")
                if not ended and rng.random() < 0.5:
                    victim = rng.choice([*self._members])
                    if self._left or victim in self._with_line:
                        self._end(victim, "at a time")
                while len(self._members) < settings.members:
                    self._begin()
            for life in [*self._members]:
                self._close(life)
            for _ in range(2 * (1 + LIMIT) * settings.poisons + 1):
                life = self._begin(is_last=True)
                if self._says(life, "ready") and self._says(life, "idle"):
                    self._close(life)
                    break
                self._end(life, "by itself")
            else:
                raise AssertionError("a message ends its process again and again")
        finally:
            for fork in self._members.values():
                fork.__exit__()
        self._judge()
        return self.counts

    def _says(self, life: int, line: str) -> bool:
        """Return whether a process says something before its end."""
        fork = self._members[life]
        watchdog = threading.Timer(300, fork.process.kill)
        watchdog.start()
        said = fork.stdout.readline()
        watchdog.cancel()
        assert said.strip() in (line, ""), said  # it can end between a word and the end of its line
        return bool(said)

    def _close(self, life: int) -> None:
        """Let a process end in order, unless it is killed meanwhile."""
        fork = self._members[life]
        with suppress(BrokenPipeError):
            os.write(fork.stdin.fileno(), b"\n")
        fork.process.join(300)
        assert fork.process.exitcode in (0, -signal.SIGKILL), f"life {life} ends by {fork.process.exitcode}"
        self._end(life, "by itself" if fork.process.exitcode else "closed")

    def _judge(self) -> None:
        """Compare the ledger with what was promised.

        Raises:
            AssertionError: A promise is broken.
        """
        verdict = judged(self._ledger.read_text(), self._settings.way, is_alone=self._settings.members == 1)
        assert not verdict, verdict[:10]
        with Broker.open(self._store) as broker:
            assert broker.lag("g") == 0
            dead = Counter(letter.body.decode() for letter in broker.dead_letters("g"))
        assert set(dead) == {f"poison{number}" for number in range(self._settings.poisons)}, dead
        self.counts["repeated dead letters"] += dead.total() - len(dead)


class Call(NamedTuple):
    """A message that a listener got, or what stands for one, in a ledger; lines by number."""

    life: str
    thread: str
    queue: str
    begin: int
    end: int | None


class Lives:
    """What a ledger says of calls, and of the queues that each life took."""

    def __init__(self, text: str, way: str, *, is_alone: bool) -> None:
        self._way, self._is_alone = way, is_alone
        lines = [line.split() for line in text.splitlines()]
        self._count = len(lines)
        self.closed = {life for life, _, what, *_ in lines if what == "closes"}
        self.sent = {body for _, _, what, *names in lines for body in names if what == "sent"}
        self.calls = defaultdict[str, list[Call]](list)
        self._takes = defaultdict[tuple[str, str], list[int]](list)
        self._begins_of = defaultdict[tuple[str, str], list[Call]](list)
        self._lines_of = defaultdict[tuple[str, str], list[int]](list)
        for number, (life, thread, what, *names) in enumerate(lines):
            if what == "takes":
                self._takes[life, names[0]].append(number)
            elif what in ("begins", "ends"):
                self._lines_of[life, thread].append(number)
                for name in names:
                    self._note(Call(life, thread, name.partition(":")[0], number, None), what, name.partition(":")[2])

    def _note(self, call: Call, what: str, body: str) -> None:
        row = self.calls[body]
        if what == "begins":
            row.append(call)
            self._begins_of[call.life, call.queue].append(call)
        else:
            place = next(at for at in reversed(range(len(row))) if row[at][:2] == call[:2])
            row[place] = row[place]._replace(end=call.begin)

    def _taken_behind(self, call: Call) -> int:
        """Return the line of its thread behind which a message was taken."""
        own = self._lines_of[call.life, call.thread]
        return own[bisect_left(own, call.begin) - 1] if own[0] < call.begin else -1

    def _was_handed_over(self, call: Call, answered: int | None, other: Call) -> bool:
        """Return whether the life of another call has taken the queue of a message that was in work."""
        until = other.begin if answered is None else min(answered, other.begin)
        own = [taken for taken in self._takes[call.life, call.queue] if taken < call.begin]
        behind = max(self._taken_behind(call), *own[-1:], -1)
        return any(behind < taken < until for taken in self._takes[other.life, call.queue])

    def was_in_work(self, call: Call, again: Call) -> bool:
        """Return whether a message may come again."""
        if self._is_alone and self._way != "simple" and call.life == again.life:
            return False
        if call.end is None or call.end > again.begin:
            return True
        own = self._lines_of[call.life, call.thread]
        later = own[bisect_right(own, call.end) :]
        if self._way in LISTENERS and call.life not in self.closed and not later:
            return True  # It was killed before it could answer.
        # A listener's thread has answered when it takes the next one, other threads know of that at its next line.
        answered = call.end if self._way not in LISTENERS else later[0] if later else self._count
        if self._was_handed_over(call, answered, again) or self._was_handed_over(again, again.end, call):
            return not self._is_alone
        # A process that lives had it in work when it handed the queue over, so it took nothing of the queue since.
        return not self._is_alone and not any(
            begun.begin < again.begin
            and (self._taken_behind(begun) >= answered or (begun.thread == call.thread and begun.begin > call.end))
            for begun in self._begins_of[call.life, call.queue]
        )


def judged(text: str, way: str, *, is_alone: bool) -> list[str]:
    """Return a sentence for each message of a ledger that is lost, or comes again but was not in work at a kill."""
    lives = Lives(text, way, is_alone=is_alone)
    found = [f"{body} is lost" for body in lives.sent - lives.calls.keys()]
    for body, row in lives.calls.items():
        found += [
            f"{body} was not in work, and comes again: {call}, {again}"
            for call, again in itertools.pairwise(row)
            if not lives.was_in_work(call, again)
        ]
        answers = way not in LISTENERS and row[-1].life not in lives.closed
        has_ended = any(call.end is not None for call in row)
        if not has_ended and not body.startswith("poison") and not answers:
            found.append(f"{body} is lost: {row}")
    return found


def test_kills_repeat_what_was_in_work_and_nothing_else(
    tmp_path: Path, slow_budget: SlowBudget, figure: Callable[[str], None]
) -> None:
    """No message is lost, none repeated that was not in work; what ends its process is a dead letter, nothing else."""
    counts: Counter[str] = Counter()
    for seed in slow_budget.rounds(10_000 // KILLS, f"times up to {KILLS} kills of processes that consume"):
        folder = tmp_path / str(seed)
        folder.mkdir()
        counts += Killed(folder, Round.draw(f"kept work {seed}")).run()
        shutil.rmtree(folder)
    figure("processes that end " + ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())))


LEDGERS: Final = {
    "0 1 sent a\n0 1 begins t/0:a\n1 1 begins t/0:a\n1 1 ends t/0:a": "",
    "0 1 begins t/0:a\n0 1 ends t/0:a\n1 1 begins t/0:a\n1 1 ends t/0:a": "",  # killed before its answer was kept
    "0 1 sent a": "a is lost",
    "0 1 begins t/0:a": "a is lost",
    "0 1 begins t/0:a\n0 1 ends t/0:a\n0 1 begins t/0:b\n1 1 begins t/0:a\n1 1 ends t/0:a\n1 1 begins t/0:b\n"
    "1 1 ends t/0:b": "a was not in work",
    "0 1 begins t/0:a\n0 1 ends t/0:a\n0 1 closes\n1 1 begins t/0:a\n1 1 ends t/0:a": "a was not in work",
    "0 1 begins t/0:a\n0 2 begins t/0:a\n0 1 ends t/0:a\n0 2 ends t/0:a": "a was not in work",
}


@pytest.mark.parametrize("ledger", LEDGERS)
def test_the_ledger_shows_what_is_lost_and_what_comes_again(ledger: str) -> None:
    found = judged(ledger, "push", is_alone=True)
    assert [sentence[: len(LEDGERS[ledger])] for sentence in found] == [LEDGERS[ledger]] * bool(LEDGERS[ledger])


def test_an_answer_is_kept_before_it_is_given() -> None:
    ledger = "0 1 begins t/0:a\n0 1 ends t/0:a\n1 1 begins t/0:a\n1 1 ends t/0:a"
    assert judged(ledger, "simple", is_alone=True)


def test_a_process_of_a_share_hands_over_what_it_has_in_work() -> None:
    begin, again = "0 1 begins t/0:a\n", "1 1 begins t/0:a\n1 1 ends t/0:a\n0 1 begins t/1:c\n0 1 ends t/1:c"
    assert not judged(begin + "0 1 ends t/0:a\n" + again, "push", is_alone=False)
    assert judged(begin + "0 1 ends t/0:a\n0 1 begins t/0:b\n0 1 ends t/0:b\n" + again, "push", is_alone=False)
    # A thread can have taken a message before another one has answered, and write that it begins behind that.
    begin = "0 2 begins t/0:x\n" + begin + "0 1 ends t/0:a\n"
    assert not judged(begin + "0 2 ends t/0:x\n0 2 begins t/0:b\n0 2 ends t/0:b\n" + again, "push", is_alone=False)
    # A process can also take the queue back, and find what it had in work, or write that it begins behind the new one.
    work, more = "0 1 begins t/0:a\n0 1 ends t/0:a\n", "0 1 begins t/0:b\n0 1 ends t/0:b\n"
    assert not judged(work + "0 3 takes t/0\n" + more + work, "push", is_alone=False)
    assert judged(work + more + work, "push", is_alone=False)
    late = "0 3 takes t/0\n1 3 takes t/0\n1 1 begins t/0:a\n1 1 ends t/0:a\n1 1 begins t/0:b\n1 1 ends t/0:b\n"
    assert not judged(late + work, "poll", is_alone=False)
    assert judged(late + "0 1 begins t/0:c\n0 1 ends t/0:c\n" + work, "poll", is_alone=False)
    taken = "0 1 begins t/1:d\n0 1 ends t/1:d\n0 2 ends t/0:x\n0 2 begins t/0:b\n0 2 ends t/0:b\n"
    assert judged(begin + taken + again, "push", is_alone=False)
