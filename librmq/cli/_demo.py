"""Demos whose code is shown as it runs: the story of a shop, and a producer that is killed."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from functools import partial
from itertools import count, product
from pathlib import Path
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Final, ParamSpec, Self, TextIO, TypeVar

import librmq
from librmq import (
    Broker,
    CheckedMessage,
    ManualClock,
    ManualRunner,
    MemoryDedupStore,
    Message,
    MessageStore,
    Producer,
    PushConsumer,
    StoredMessage,
    TransactionProducer,
    TransactionState,
    select_by_hash,
)
from librmq.cli._output import DAMAGED, Output
from librmq.clock import SystemClock
from librmq.dedup import DedupListener
from librmq.errors import InputError, StoreError
from librmq.formatting import printable
from librmq.runtime import critical
from librmq.runtime.event_log import held_back
from librmq.store import verify

if TYPE_CHECKING:
    from librmq.testing import Kit

__all__ = ["PAGE", "Program", "Screen", "demo_folder", "prove_by_kills", "replace_folder", "tell_shop"]

P = ParamSpec("P")
T = TypeVar("T")
Listener = Callable[..., None]

ABOUT: Final = "Made by a demo of librmq, which replaces this folder on each run.\n"
"""The beginning of ``README.txt`` in the folder of a demo."""
_TITLE: Final = "1"
_CODE: Final = "36"
_KILLED: Final = -9
"""The status of a program that ``kill -9`` has ended."""


# ---- what both stand on: a screen of code that is run as it is shown, programs that are killed, a folder


class Screen:
    """Prints the steps of a demo, in colours on a terminal unless ``NO_COLOR`` is set."""

    def __init__(self, stream: TextIO) -> None:
        """``stream`` gets whole lines."""
        self._stream = stream
        self._is_coloured = stream.isatty() and not os.environ.get("NO_COLOR")

    def say(self, line: str, style: str = "") -> None:
        """Print a line; ``style`` is the number of a terminal's colour."""
        line = printable(line)
        self._stream.write(f"\x1b[{style}m{line}\x1b[0m\n" if style and self._is_coloured else f"{line}\n")
        self._stream.flush()

    def title(self, line: str, *, is_apart: bool = True) -> None:
        """Print the title of a step, behind an empty line if it stands apart."""
        if is_apart:
            self.say("")
        self.say(line, _TITLE)

    def answer(self, line: str) -> None:
        """Print what code has printed or done."""
        self.say(f"  → {line}")

    def code(self, function: Callable[..., object]) -> None:
        """Show the lines of a function; those of a test with its first line, others without it and a ``return``."""
        source = inspect.getsource(function)
        if not function.__name__.startswith("test_"):
            source = textwrap.dedent(source.partition("\n")[2])
        for line in source.splitlines():
            if not line.startswith("return "):
                self.say(f"    {line}", _CODE)

    def run(self, function: Callable[P, T], *arguments: P.args, **settings: P.kwargs) -> T:
        """Show the lines of a function, call it, and show what it prints."""
        self.code(function)
        return self.call(function, *arguments, **settings)

    def call(self, function: Callable[P, T], *arguments: P.args, **settings: P.kwargs) -> T:
        """Call a function, and show what it prints."""
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                return function(*arguments, **settings)
        finally:
            for line in printed.getvalue().splitlines():
                self.answer(line)


_running: Final[set[subprocess.Popen[str]]] = set()


class Program:
    """A module that runs as a program of its own. A context manager, which kills it."""

    def __init__(self, module: str, *words: object) -> None:
        """Start it."""
        with critical:  # a program that runs is noted, also if Ctrl-C comes before its `with` block
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the program
            )
            _running.add(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
        _running.discard(self.process)

    def lines(self) -> Iterator[str]:
        """Yield the whole lines that it prints, without their ends, until it has ended."""
        assert self.process.stdout is not None
        return (line[:-1] for line in self.process.stdout if line.endswith("\n"))

    def end(self) -> bool:
        """Send it an empty line, wait for its end, and return whether ``kill -9`` has ended it.

        Raises:
            StoreError: Its disk is full.
            InputError: It failed otherwise; the error has the last line that it printed.
        """
        _, errors = self.process.communicate("\n")
        if self.process.returncode not in (0, _KILLED):
            last = (errors.splitlines() or ["it printed no error"])[-1]
            failure = StoreError if "DiskFullError" in last else InputError
            raise failure(f"a program of the demo ended with status {self.process.returncode}: {last}")
        return self.process.returncode == _KILLED


def may_be_replaced(folder: Path) -> bool:
    """Return whether the folder is missing, empty, or left by a demo, so that replacing it loses nothing."""
    if not folder.is_dir():
        return not os.path.lexists(folder)
    about = folder / "README.txt"
    return not any(folder.iterdir()) or (about.is_file() and about.read_bytes().startswith(ABOUT.encode()))


def replace_folder(folder: Path, about: str = "") -> None:
    """Make the folder of a demo, in place of one that a demo has left."""
    if not may_be_replaced(folder):
        raise InputError(f"{folder} holds something else: name a folder that is empty or does not exist")
    folder.mkdir(parents=True, exist_ok=True)
    readme = folder / "README.txt"  # first, so that the next run may replace what an interrupted one leaves
    readme.write_text(f"{ABOUT}{about}", encoding="utf-8")
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != readme:
            path.unlink()


@contextmanager
def demo_folder(keep: str | None) -> Iterator[str]:
    """Make the folder of a demo; one without a name is removed at the end."""
    try:
        if keep is not None:
            replace_folder(Path(keep))
            yield keep
        else:
            with tempfile.TemporaryDirectory(prefix="librmq-demo-") as folder:
                try:
                    yield folder
                finally:  # nothing writes into the folder while it is removed
                    for process in _running:
                        process.kill()
                        process.wait()
    except (OSError, StoreError) as error:
        if isinstance(error, OSError) and error.filename is None and not isinstance(error, FileNotFoundError):
            raise  # of the screen, which has no name: it is full, or its reader has left
        raise InputError(
            f"{error}. The demo needs 20 MB in a folder that it can write: name one by --keep FOLDER, or by TMPDIR"
        ) from error


# ---- the proof that a kill loses nothing: a producer that is killed again and again while it sends

SENDS: Final = 10_000
KILLS: Final = 5


def _send(folder: str, first: int, last: int) -> None:
    with Broker.open(folder) as broker, Producer(broker, "till") as till:
        for number in range(first, last + 1):
            till.send("orders", json=number)
            print(number, flush=True)  # only now the order counts as accepted


def _read(folder: str) -> list[int]:
    with Broker.open(folder) as broker:
        return [order.json() for order in broker.messages("orders")]


def prove_by_kills(screen: Screen, folder: str, seed: int, *, sends: int = SENDS, kills: int = KILLS) -> bool:
    """Send numbers, kill the producer, start it behind the last accepted number; return whether all are there."""
    screen.say(f"A producer sends {sends:,} orders, and kill -9 ends it in the middle. Seed: {seed}")
    screen.code(_send)
    random = Random(seed)
    accepted = runs = killed = 0
    while accepted < sends:
        # Drawn for each run, because a program runs on for a moment before the kill takes effect.
        killed_after = random.randint(1, sends // (kills + 1)) if killed < kills else sends
        runs, begin = runs + 1, accepted
        with Program(__name__, "send", folder, accepted + 1, sends) as program:
            for line in program.lines():
                accepted = int(line)
                if accepted - begin == killed_after and killed < kills:
                    program.process.kill()
            is_killed = program.end()
        killed += is_killed
        screen.answer(f"run {runs}: {'killed' if is_killed else 'ended'} after {accepted - begin:,} accepted orders")
    with held_back():
        orders = screen.run(_read, folder)
    lost = set(range(1, accepted + 1)) - set(orders)
    is_sound = verify(folder).sound
    screen.answer(f"{accepted:,} orders accepted, {len(set(orders)):,} there, {len(lost):,} lost")
    screen.answer(f"{len(orders) - len(set(orders))} there twice: stored, but killed before the answer, and sent again")
    screen.answer(f"librmq verify finds {'no damage' if is_sound else 'DAMAGE'}")
    screen.say('A power cut can take the last half a second, unless StoreConfig(durability="sync").')
    return is_sound and not lost and accepted == sends


# ---- the shop: what is shown and run

PAGE: Final = "librmq demo --keep here, then librmq console here/shop"
"""What shows the folder in a browser, where the demo has only a temporary one."""
_KILLED_AT: Final = 400
_OPENING_S: Final = 3600


def _sell(folder: str, first: int, log: Listener) -> None:
    with Broker.open(folder) as broker, Producer(broker, "till") as till:
        bill, mail = PushConsumer(broker, "bill"), PushConsumer(broker, "mail")
        bill.subscribe("orders", lambda order: log("charged", order.json()))
        mail.subscribe("orders", lambda order: log("mailed", order.json()))
        with bill, mail:
            for number in range(first, 1001):
                log("sent", number, till.send("orders", json=number).status)
            broker.join(timeout=60)  # until both groups have caught up


def _open(folder: str, day_ms: int) -> tuple[ManualRunner, Broker]:
    runner = ManualRunner(ManualClock(day_ms))  # a clock that the program moves
    broker = Broker.open(folder, runner=runner)
    return runner, broker


def _charge(runner: ManualRunner, broker: Broker, till: Producer, bank: _Bank, show: Listener) -> PushConsumer:
    bill = PushConsumer(broker, "bill", max_reconsume_times=1)
    bill.subscribe("orders", bank.charge)  # raises: the bank opens in an hour
    bill.start()
    till.send("orders", b"one coat", keys="o-7")
    runner.advance(3_600_000)  # milliseconds
    show(*broker.dead_letters("bill"))
    return bill


def _charge_again(runner: ManualRunner, broker: Broker) -> None:
    broker.resend_dead_letters("bill")
    runner.advance(1_000)


def _wait(runner: ManualRunner, broker: Broker, till: Producer, bank: _Bank, show: Listener) -> None:
    mail = PushConsumer(broker, "mail")
    mail.subscribe("mails", show)
    pay = TransactionProducer(broker, "pay", bank.check, execute=bank.pay)
    with mail, pay:
        pay.send_in_transaction(Message("mails", b"thank you", keys="o-8"))
        till.send("mails", b"your coat is ready", delay=timedelta(days=1))
        runner.advance(24 * 3_600_000)


def test_the_reminder(rmq: Kit) -> None:
    rmq.producer().send("mails", b"your coat", delay=timedelta(days=1))
    rmq.advance(hours=24)
    assert rmq.messages("mails")[0].text() == "your coat"


def _select(runner: ManualRunner, broker: Broker, till: Producer, show: Listener) -> None:
    fraud = PushConsumer(broker, "fraud")
    fraud.subscribe("sales", show, sql="TAGS = 'card' AND total > 100")
    with fraud:
        for tag, total in ("card", "80"), ("card", "250"), ("cash", "900"):
            till.send("sales", total, tags=tag, properties={"total": total})
        runner.advance(1_000)


def _keep_order(runner: ManualRunner, broker: Broker, till: Producer, note: Listener) -> None:
    for name in "ann", "bob":
        worker = PushConsumer(broker, "ship", instance_name=name, orderly=True)
        worker.subscribe("boxes", partial(note, name))
        worker.start()
    for step, box in product(("packed", "sent", "delivered"), ("coat", "vest")):
        till.send("boxes", f"{box} {step}", selector=select_by_hash, arg=box)
    runner.advance(60_000)


def _drop_duplicates(runner: ManualRunner, broker: Broker, till: Producer, show: Listener) -> None:
    wrap = PushConsumer(broker, "wrap")
    seen = MemoryDedupStore(clock=runner.clock)  # or SQLite, Django, Redis …
    wrap.subscribe("gifts", DedupListener(show, seen, group="wrap", key=key))
    with wrap:
        till.send("gifts", b"one scarf", keys="g-1")
        till.send("gifts", b"one scarf", keys="g-1")  # a second click
        runner.advance(1_000)


def _join(folder: str) -> None:
    with librmq.share(folder) as shop, Producer(shop, "till") as till:
        for number in range(100):
            till.send("orders", json=number)
        print("the owner" if shop.is_owner else "a peer", flush=True)
        input()  # until all have sent


# ---- the shop: what the steps call


class _Log:
    """A log on standard output; its process is killed when so many orders are charged, in the middle of a send."""

    def __init__(self, killed_at: int) -> None:
        self._killed_at = killed_at
        self._charges = count(1)

    def __call__(self, *words: object) -> None:
        os.write(1, f"{' '.join(map(str, words))}\n".encode())  # in one write, because several threads log
        if words[0] == "charged" and next(self._charges) == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def key(message: StoredMessage) -> str:
    return message.keys[0]


class _Day:
    """A day by the moved clock."""

    def __init__(self, runner: ManualRunner) -> None:
        self._runner = runner
        self._begin_ms = runner.now_ms()

    def seconds(self) -> int:
        return (self._runner.now_ms() - self._begin_ms) // 1000

    def print(self, text: str) -> None:
        """Print a line after the time of the day."""
        seconds = self.seconds()
        hours = seconds // 3600
        print(f"{f'{hours} h' if hours else f'{seconds} s':>4}  {text}")

    def show(self, *messages: StoredMessage) -> None:
        for message in messages:
            cause = message.properties.get("DEAD_LETTER_CAUSE")
            self.print(f"a dead letter: {cause}" if cause else f"{message.topic}: {message.text()}")


class _Bank:
    """A bank that opens after an hour of the day, and whose answers to payments are lost."""

    def __init__(self, day: _Day) -> None:
        self._day = day

    def charge(self, order: StoredMessage) -> None:
        if self._day.seconds() < _OPENING_S:
            self._day.print("the listener raises ConnectionError")
            raise ConnectionError("the bank is closed")
        self._day.print(f"order {order.keys[0]} is charged")

    def pay(self, payment: Message, _: object) -> TransactionState:
        self._day.print(f"{payment.keys[0]} is paid, but the answer is lost")
        return TransactionState.UNKNOWN

    def check(self, payment: CheckedMessage) -> TransactionState:
        self._day.print(f"the broker asks: {payment.keys[0]} is paid, so its message is delivered")
        return TransactionState.COMMIT


# ---- the shop: its story


def tell_shop(screen: Screen, folder: str, page: str) -> bool:
    """Show and run the five steps in a folder, which is empty; return whether no order was lost.

    Args:
        screen: What shows them.
        folder: The folder.
        page: The command that shows the folder in a browser.
    """
    shop = os.path.join(folder, "shop")
    screen.say("librmq in a shop. The code runs as it is shown; → is what it prints.")
    with held_back():
        is_whole = _tell_selling(screen, shop)
        _tell_a_day(screen, os.path.join(folder, "day"))
        _tell_joining(screen, shop)
    screen.answer(f"in a browser: {page}")
    return is_whole


def _tell_selling(screen: Screen, folder: str) -> bool:
    screen.title("1  Send to a folder; two groups listen; kill -9 loses nothing", is_apart=False)
    screen.code(_sell)
    with Program(__name__, "sell", folder, 1, _KILLED_AT) as program:
        lines = [*program.lines()]
        is_killed = program.end()
    screen.answer(f"killed with -9 when {_KILLED_AT} orders were charged; started again for the rest")
    with Program(__name__, "sell", folder, 1 + _count(lines, "sent"), 0) as program:
        lines += program.lines()
        program.end()
    counts = [_count(lines, word) for word in ("sent", "charged", "mailed")]
    is_whole = is_killed and counts == [1000, 1000, 1000]
    verdict = "none is lost" if is_whole else "SOME ARE LOST"
    screen.answer("{:,} orders sent, {:,} charged, {:,} mailed: {}".format(*counts, verdict))
    return is_whole


def _count(lines: Iterable[str], word: str) -> int:
    """Return how many different orders the program has logged with a word."""
    return len({line for line in lines if line.startswith(word)})


def _tell_a_day(screen: Screen, folder: str) -> None:
    from librmq.testing import Kit

    screen.title("2  A retry, a dead letter with its cause, sent again")
    yesterday_ms = (SystemClock().now_ms() // 1000 - 26 * 3600) * 1000  # the hours of all steps end before now
    runner, broker = screen.run(_open, folder, yesterday_ms)
    with broker, Producer(broker, "till") as till:
        day = _Day(runner)
        bill = screen.run(_charge, runner, broker, till, _Bank(day), day.show)
        screen.run(_charge_again, runner, broker)
        bill.shutdown()

        screen.title("3  A reminder for tomorrow, and a transaction that its check decides")
        day = _Day(runner)
        began = SystemClock().monotonic()
        screen.run(_wait, runner, broker, till, _Bank(day), day.show)
        with Kit() as rmq:
            screen.run(test_the_reminder, rmq)
        seconds = round(SystemClock().monotonic() - began)
        screen.answer(f"passed; both days took {f'{seconds} s' if seconds else 'less than half a second'}")

        screen.title("4  Filters; the order of a key; duplicates")
        screen.run(_select, runner, broker, till, _Day(runner).show)
        steps: dict[str, list[str]] = {}
        screen.run(_keep_order, runner, broker, till, partial(_note, steps))
        screen.answer("; ".join(f"{box} {', '.join(done)}" for box, done in sorted(steps.items())))
        screen.run(_drop_duplicates, runner, broker, till, _Day(runner).show)


def _note(steps: dict[str, list[str]], worker: str, message: StoredMessage) -> None:
    box, step = message.text().split()
    steps.setdefault(f"{worker}: {box}", []).append(step)


def _tell_joining(screen: Screen, folder: str) -> None:
    screen.title("5  Several processes, and a page that shows them")
    screen.code(_join)
    before = _stored(folder)
    with ExitStack() as running:
        programs = []
        roles = []
        for _ in range(3):
            program = running.enter_context(Program(__name__, "join", folder))
            programs.append(program)
            roles.append(next(program.lines(), "gone"))
        for program in reversed(programs):  # the owner ends last
            program.end()
    stored = _stored(folder) - before
    screen.answer(f"the processes are {', '.join(roles)}; {stored} orders of theirs are there")


def _stored(folder: str) -> int:
    with MessageStore.open(folder, read_only=True) as store:
        return sum(message.topic == "orders" for message in store)


if __name__ == "__main__":
    with held_back():
        if sys.argv[1] == "send":
            _send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        elif sys.argv[1] == "sell":
            _sell(sys.argv[2], int(sys.argv[3]), _Log(killed_at=int(sys.argv[4])))
        else:
            _join(sys.argv[2])


def demo(arguments: argparse.Namespace, _: Output) -> int:
    """Show the steps; the status is 1 if something is lost."""
    if arguments.seed is not None and arguments.what != "kill":
        raise InputError("--seed: it draws when a producer is killed, so it is for librmq demo kill")
    screen, keep = Screen(sys.stdout), arguments.keep
    with demo_folder(keep) as folder:
        if arguments.what == "kill":
            seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
            is_whole = prove_by_kills(screen, folder, seed)
        else:
            page = PAGE if keep is None else f"librmq console {os.path.join(keep, 'shop')}"
            is_whole = tell_shop(screen, folder, page)
    return 0 if is_whole else DAMAGED
