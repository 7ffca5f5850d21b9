"""A message that ends its process becomes a dead letter, and everything else runs."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

import librmq
from librmq import (
    Broker,
    BrokerError,
    ConfigError,
    ConsumeFrom,
    DeliveredMessage,
    Producer,
    PullConsumer,
    PushConsumer,
    ReceiptError,
    ReceivedMessage,
    SimpleConsumer,
)
from librmq.broker import AdministeredRoute
from librmq.cli import main
from librmq.clock import ManualClock
from librmq.protocol import Receive, Request, SendBack
from librmq.runtime import ManualRunner
from librmq.testing import Kit, Process
from tests.programs import Fork, start_program
from tests.wrapped_route import WrappedBrokers

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="only there a kill is told from a loss of power")

MESSAGES = 40
POISON = b"7"
DEATHS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fault": lambda: ctypes.string_at(0),
}


DIED: Final = {7, -signal.SIGKILL, -signal.SIGSEGV}
PATIENT_S: Final = 60
"""Longer than an owner or a process takes on a busy machine."""


def opened(path: Path, *, is_shared: bool) -> AdministeredRoute:
    return librmq.share(path, wait=60, timeout=PATIENT_S) if is_shared else Broker.open(path, wait=60)


def fill(path: Path) -> None:
    with Broker.open(path) as broker, Producer(broker, "p") as producer:
        broker.create_topic("t", 2)
        broker.set_group("g")
        broker.reset_group("g", "t", to="begin")
        for number in range(MESSAGES):
            producer.send("t", b"%d" % number)


def write_line(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line + b"\n")


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().split() if path.exists() else []


def listen(route: AdministeredRoute, ledger: Path, death: Callable[[], object], **settings: Any) -> None:
    """Consume all messages with a listener that ends the process at one of them."""

    def consume(message: DeliveredMessage) -> None:
        if message.body == POISON:
            death()
        write_line(ledger, message.body)

    consumer = PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST, **settings)
    consumer.subscribe("t", consume)
    with consumer:
        route.join()


def count_deaths(call: Callable[..., object], *arguments: object, most: int = 8) -> int:
    """Start a process again and again until it ends by itself, and return how often it did not."""
    for deaths in range(most):
        with Fork(call, *arguments) as child:
            child.process.join(5 * PATIENT_S)
            if child.process.exitcode == 0:
                return deaths
            assert child.process.exitcode in DIED, "the process fails"
    return most


def letters(path: Path) -> dict[bytes, str]:
    with Broker.open(path) as broker:
        letters = broker.dead_letters("g")
        assert len({letter.body for letter in letters}) == len(letters)
        return {letter.body: letter.properties["DEAD_LETTER_CAUSE"] for letter in letters}


def listen_to_lists(route: AdministeredRoute, ledger: Path, death: Callable[[], object]) -> None:
    def consume(messages: list[DeliveredMessage]) -> None:
        if any(message.body == POISON for message in messages):
            death()
        for message in messages:
            write_line(ledger, message.body)

    consumer = PushConsumer(route, "g", consume_from=ConsumeFrom.FIRST, batch_size=8)
    consumer.subscribe("t", consume)
    with consumer:
        route.join()


def is_done(ledger: Path) -> bool:
    return set(lines_of(ledger)) == {b"%d" % number for number in range(MESSAGES)} - {POISON}


def iterate(route: AdministeredRoute, ledger: Path, death: Callable[[], object]) -> None:
    for message in route.consume("t", group="g", timeout=30):
        if message.body == POISON:
            death()
        write_line(ledger, message.body)
        if is_done(ledger):
            break


def poll(route: AdministeredRoute, ledger: Path, death: Callable[[], object]) -> None:
    with PullConsumer(route, "g", auto_commit=False, poll_timeout=30) as consumer:
        consumer.subscribe("t")
        while not is_done(ledger):
            messages = consumer.poll()
            if any(message.body == POISON for message in messages):
                death()
            for message in messages:
                write_line(ledger, message.body)
            consumer.commit()


def receive(route: AdministeredRoute, ledger: Path, death: Callable[[], object]) -> None:
    with SimpleConsumer(route, "g") as consumer:
        consumer.subscribe("t")
        while not is_done(ledger) or not route.dead_letters("g"):
            for message in consumer.receive(8, invisible=2, wait=1):
                if message.body == POISON:
                    death()
                write_line(ledger, message.body)
                with suppress(ReceiptError):
                    consumer.ack(message)


def receive_in_order(route: AdministeredRoute, ledger: Path, death: Callable[[], object]) -> None:
    route.set_group("g", is_ordered=True)
    receive(route, ledger, death)


WAYS: dict[str, Callable[[AdministeredRoute, Path, Callable[[], object]], None]] = {
    "push": listen,
    "one thread": partial(listen, threads=1),
    "orderly": partial(listen, orderly=True),
    "lists": listen_to_lists,
    "consume": iterate,
    "poll": poll,
    "receive": receive,
    "receive in order": receive_in_order,
}


RECEIVED = [pytest.param(way, marks=pytest.mark.slow) for way in ("receive", "receive in order")]
"""Those that wait after each death until what the process had received is visible again."""
PLACES = [False, pytest.param(True, marks=pytest.mark.slow)]
"""Whether the store is shared; a few quick tests are."""


def work(path: Path, ledger: Path, way: str, kind: str, is_shared: bool) -> None:
    with opened(path, is_shared=is_shared) as route:
        WAYS[way](route, ledger, DEATHS[kind])


def check(store: Path, ledger: Path) -> None:
    assert list(letters(store)) == [POISON]
    assert "its process ended 3 times while it ran alone" in letters(store)[POISON]
    assert is_done(ledger)


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param(way, kind, marks=[pytest.mark.slow] if way.startswith("receive") else [])
        for way, kind in zip(WAYS, [*DEATHS, *DEATHS, "exit", "kill"], strict=True)
    ],
)
@pytest.mark.parametrize("is_shared", PLACES)
def test_a_message_that_ends_its_process_is_a_dead_letter(way: str, kind: str, is_shared: bool, tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    assert count_deaths(work, store, ledger, way, kind, is_shared) == 1 + 3
    check(store, ledger)


@pytest.mark.parametrize("way", ["push", "orderly", "poll", *RECEIVED])
def test_a_peer_dies_at_a_message_while_the_owner_lives(way: str, tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    with librmq.share(store):
        assert count_deaths(work, store, ledger, way, "kill", True) == 1 + 3
    check(store, ledger)


@pytest.mark.parametrize("way", ["push", "orderly", "poll", *RECEIVED])
@pytest.mark.parametrize("is_shared", PLACES)
def test_a_group_says_after_how_many_ends(way: str, is_shared: bool, tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    with Broker.open(store) as broker:
        broker.set_group("g", max_process_deaths=1)
        assert broker.group_settings("g").max_process_deaths == 1
    assert count_deaths(work, store, ledger, way, "exit", is_shared) == 1 + 1
    assert list(letters(store)) == [POISON]
    assert "(max_process_deaths=1)" in letters(store)[POISON]


def receive_two_and_die(path: Path) -> None:
    with Broker.open(path) as broker, SimpleConsumer(broker, "g") as consumer:
        consumer.subscribe("t")
        assert len(consumer.receive(2, invisible=0.5, wait=20)) == 2
        DEATHS["kill"]()


def test_of_several_threads_one_receives_a_suspect(tmp_path: Path) -> None:
    fill(tmp_path)
    with Fork(receive_two_and_die, tmp_path) as child:
        child.process.join(60)
        assert child.process.exitcode == -signal.SIGKILL
    begun, goes_on = threading.Event(), threading.Event()

    def wait_for_the_other(request: Request[Any], call: Callable[[Any], Any]) -> Any:
        if isinstance(request, Receive) and request.takes and not begun.is_set():
            begun.set()
            assert goes_on.wait(30)
        return call(request)

    with (
        Broker.open(tmp_path) as broker,
        ThreadPoolExecutor() as pool,
        SimpleConsumer(WrappedBrokers(broker, wait_for_the_other), "g") as consumer,
    ):
        consumer.subscribe("t")

        def receive_suspect() -> list[ReceivedMessage]:
            while True:
                messages = consumer.receive(1, wait=20)
                if begun.is_set():
                    return messages
                consumer.ack(*messages)

        alone = pool.submit(receive_suspect)
        assert begun.wait(30)
        assert consumer.receive(1, wait=0) == []
        goes_on.set()
        assert len(alone.result(30)) == 1


def test_a_receive_under_way_brings_no_message_beside_a_suspect(tmp_path: Path) -> None:
    """What the broker has answered, and the consumer has not heard yet, is in work too."""
    fill(tmp_path)
    with Fork(receive_two_and_die, tmp_path) as child:
        child.process.join(60)
        assert child.process.exitcode == -signal.SIGKILL
    runner = ManualRunner(ManualClock(10**14))
    with Broker.open(tmp_path, runner=runner) as broker:
        beside = list[int]()

        def receive_beside(request: Request[Any], call: Callable[[Any], Any]) -> Any:
            answered = call(request)
            if isinstance(request, Receive) and not beside:
                beside.extend(attempts(10))
            return answered

        def attempts(most: int) -> list[int]:
            """Receive messages up to a suspect, which comes again, and acknowledge them."""
            found = [0]
            while len(found) < most and found[-1] < 2:
                messages = other.receive(1)
                other.ack(*messages)
                found += [message.attempt for message in messages] or [0]
                runner.advance(1)
            return found

        route = WrappedBrokers(broker, receive_beside)
        with SimpleConsumer(route, "g") as consumer, SimpleConsumer(broker, "g") as other:
            consumer.subscribe("t")
            other.subscribe("t")
            (message,) = consumer.receive(1)
            assert message.attempt == 1
            assert set(beside) == {0, 1}
            assert attempts(10)[-1] == 0  # its turn waits
            consumer.ack(message)
            assert attempts(10)[-1] == 2


def poll_and_die(path: Path) -> None:
    with Broker.open(path) as broker, PullConsumer(broker, "g", auto_commit=False, max_process_deaths=1) as consumer:
        consumer.subscribe("t")
        assert consumer.poll(20)
        DEATHS["kill"]()


def received_in_kit(process: Process) -> SimpleConsumer:
    consumer = SimpleConsumer(process, "g")
    consumer.subscribe("t")
    return consumer.start()


def test_who_receives_rarely_gets_a_suspect_after_its_turn() -> None:
    """A turn is shorter than the time between two receives, none of which waits."""
    with Kit() as rmq:
        rmq.network.has_pages = True
        process = rmq.app("billing", received_in_kit)
        process.state.receive(wait=0)
        rmq.producer().send("t", b"in work")
        assert process.state.receive(invisible=30, wait=0)
        restarted = rmq.crash(process)
        assert restarted is not None
        bodies = []
        for _ in range(4):
            rmq.advance(minutes=1)
            for message in restarted.state.receive(wait=0):
                bodies.append(message.body)
                restarted.state.ack(message)
        assert bodies == [b"in work"]


def poll_in_kit(process: Process) -> PullConsumer:
    consumer = PullConsumer(process, "g", consume_from=ConsumeFrom.FIRST)
    consumer.subscribe("t")
    return consumer.start()


@pytest.mark.parametrize("make", [received_in_kit, poll_in_kit])
@pytest.mark.parametrize(("pause_s", "work_s"), [(3600, 0), (3600, 40), (1, 40)])
def test_who_comes_after_a_turn_is_alone_then(
    make: Callable[[Process], SimpleConsumer | PullConsumer], pause_s: int, work_s: int
) -> None:
    """Its process has no message in work, whether its turn has passed or could not begin beside other messages."""
    with Kit() as rmq:
        rmq.network.has_pages = True
        rmq.broker.create_topic("t", 1)
        process = rmq.app("billing", make)
        rmq.run_until_idle()
        if make is received_in_kit:
            process.state.receive(wait=0)  # its group begins here
        for body in (b"0", b"1", POISON, b"2"):
            rmq.producer().send("t", body)
        deaths = 0
        while deaths < 8 and not list(rmq.broker.dead_letters("g")):
            consumer = process.state
            receives = isinstance(consumer, SimpleConsumer)
            for message in consumer.receive(invisible=300, wait=0) if receives else consumer.poll(0):
                if message.body == POISON:
                    deaths += 1
                    restarted = rmq.crash(process)
                    assert restarted is not None
                    process = restarted
                    break
                rmq.advance(seconds=work_s)
                if receives:
                    consumer.ack(message)
            rmq.advance(seconds=pause_s)
        assert [letter.body for letter in rmq.broker.dead_letters("g")] == [POISON]
        assert deaths == 1 + 3


def test_a_turn_waits_longer_after_each_death_for_long_messages() -> None:
    """Else a suspect would never be alone beside listeners that take longer than the first wait."""
    with Kit() as rmq:
        rmq.network.has_pages = True
        rmq.broker.create_topic("t", 1)
        rmq.broker.create_topic("long", 1)
        deaths = 0

        def consume(message: DeliveredMessage) -> None:
            nonlocal deaths
            if message.body == POISON:
                deaths += 1
                rmq.crash(rmq.processes[-1])

        def make(process: Process) -> None:
            for group, topic in (("h", "long"), ("g", "t")):
                process.consumer(group, consume_from=ConsumeFrom.FIRST, threads=2).subscribe(topic, consume)

        rmq.app("billing", make, fail_fast=False)
        rmq.faults.slow_listener("h", 30, times=1000)
        rmq.run_until_idle()
        rmq.producer().send("t", POISON)
        while deaths < 10 and not list(rmq.broker.dead_letters("g")):
            rmq.producer().send("long", b"a film")
            rmq.advance(seconds=7)
        assert [letter.body for letter in rmq.broker.dead_letters("g")] == [POISON]


def test_a_pull_consumer_without_other_messages_passes_a_dead_letter(tmp_path: Path) -> None:
    with Broker.open(tmp_path) as broker, Producer(broker, "p") as producer:
        broker.create_topic("t", 1)
        broker.set_group("g")
        broker.reset_group("g", "t", to="begin")
        producer.send("t", POISON)
    for _ in range(2):  # it becomes a suspect, and ends a process alone
        with Fork(poll_and_die, tmp_path) as child:
            child.process.join(60)
            assert child.process.exitcode == -signal.SIGKILL
    with (
        Broker.open(tmp_path) as broker,
        PullConsumer(broker, "g", auto_commit=False, max_process_deaths=1) as consumer,
    ):
        consumer.subscribe("t")
        while not any(True for _ in broker.dead_letters("g")):
            assert consumer.poll(1) == []
        assert broker.lag("g", "t") == 0


@pytest.mark.parametrize("way", ["push", *RECEIVED])
def test_who_opens_the_store_between_makes_no_difference(way: str, tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    for _ in range(1 + 3):
        assert count_deaths(work, store, ledger, way, "kill", False, most=1) == 1
        Broker.open(store).close()
    assert count_deaths(work, store, ledger, way, "kill", False) == 0
    check(store, ledger)


@pytest.mark.parametrize("way", ["push", *RECEIVED])
def test_copies_take_positions_and_no_suspects(way: str, tmp_path: Path) -> None:
    store, ledger, again = tmp_path / "store", tmp_path / "ledger", tmp_path / "again"
    fill(store)
    assert count_deaths(work, store, ledger, way, "kill", False, most=4) == 4
    assert main(["snapshot", str(store), str(tmp_path / "snapshot")]) == 0
    assert main(["restore", str(tmp_path / "snapshot"), str(again)]) == 0
    shutil.copytree(store, tmp_path / "copy")
    assert lag_of(store) == lag_of(again)  # that of the plain copy is the table's
    for copied in (again, tmp_path / "copy"):
        assert count_deaths(work, copied, ledger, way, "kill", False, most=1) == 1
        assert letters(copied) == {}
    assert count_deaths(work, store, ledger, way, "kill", False) == 0
    check(store, ledger)


def lag_of(path: Path) -> int:
    with Broker.open(path) as broker:
        return broker.lag("g", "t")


def test_queues_in_order_of_a_dead_peer_are_free(tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    with librmq.share(store) as route:
        assert count_deaths(work, store, ledger, "orderly", "kill", True, most=1) == 1
        listen(route, ledger, lambda: None, orderly=True)  # waits for less than the time of the dead one's locks
    assert set(lines_of(ledger)) == {b"%d" % number for number in range(MESSAGES)}


def convict_and_end(path: Path, ledger: Path) -> None:
    """End this process when the owner has stored the dead letter, before it is known here."""
    with librmq.share(path, wait=60, timeout=PATIENT_S) as route:
        kind = type(route.endpoint(route.broker_names()[0]))
        call = kind.call

        def end(self: Any, request: Any) -> Any:
            answer = call(self, request)
            if isinstance(request, SendBack):
                os._exit(7)
            return answer

        kind.call = end  # type: ignore[method-assign]
        listen(route, ledger, DEATHS["kill"])


@pytest.mark.parametrize("way", ["push", pytest.param("orderly", marks=pytest.mark.slow), "poll"])
def test_a_kill_in_the_conviction_makes_one_dead_letter(way: str, tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    with librmq.share(store):
        assert count_deaths(work, store, ledger, way, "kill", True, most=4) == 4
        with Fork(convict_and_end, store, ledger) as child:
            child.process.join(60)
            assert child.process.exitcode == 7
        assert count_deaths(work, store, ledger, way, "kill", True) == 0
    check(store, ledger)


def consume_beside_others(path: Path, ledger: Path) -> None:
    with librmq.share(path, wait=60, timeout=PATIENT_S) as route:
        listen(route, ledger, DEATHS["kill"])


@pytest.mark.slow
def test_owners_and_peers_die_at_a_message(tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    deaths = 0
    while True:
        with Fork(consume_beside_others, store, ledger) as first, Fork(consume_beside_others, store, ledger) as second:
            for child in (first, second):
                child.process.join(5 * PATIENT_S)
            codes = [child.process.exitcode for child in (first, second)]
        assert DIED.union([0]).issuperset(codes), "a process fails"
        deaths += codes.count(-signal.SIGKILL)
        assert deaths <= 8
        if codes == [0, 0]:
            break
    check(store, ledger)


def end_at(path: Path, ledger: Path, settings: dict[str, Any], how: Callable[[], object]) -> None:
    """End this process by itself while all listeners have a message."""
    with Broker.open(path) as broker:
        begun = threading.Semaphore(0)

        def consume(message: DeliveredMessage) -> None:
            write_line(ledger, message.body)
            begun.release()
            threading.Event().wait()

        consumer = PushConsumer(broker, "g", consume_from=ConsumeFrom.FIRST, **settings)
        consumer.subscribe("t", consume)
        consumer.start()
        begun.acquire(timeout=30)
        how()


def by_default_action() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


def by_handler() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


@pytest.mark.parametrize("how", [by_default_action, pytest.param(by_handler, marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [{}, {"orderly": True}])
def test_three_deployments_in_a_row_make_no_dead_letter(
    how: Callable[[], object], settings: dict[str, Any], tmp_path: Path
) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    for _ in range(3):
        with Fork(end_at, store, ledger, settings, how) as child:
            child.process.join(60)
            assert child.process.exitcode is not None
    with Fork(work_innocently, store, ledger) as child:
        child.process.join(60)
        assert child.process.exitcode == 0
    assert letters(store) == {}
    assert set(lines_of(ledger)) == {b"%d" % number for number in range(MESSAGES)}


def work_innocently(path: Path, ledger: Path) -> None:
    with Broker.open(path) as broker:
        listen(broker, ledger, lambda: None)


_ENDS_BY_ITSELF = """
    import sys, threading
    from librmq import Broker, ConsumeFrom, PushConsumer

    broker, begun = Broker.open(sys.argv[1]), threading.Event()

    def consume(message):
        begun.set()
        threading.Event().wait()

    consumer = PushConsumer(broker, "g", consume_from=ConsumeFrom.FIRST, threads=1)
    consumer.subscribe("t", consume)
    consumer.start()
    assert begun.wait(30)
    sys.exit(7)
"""


@pytest.mark.slow
def test_ends_of_an_interpreter_make_no_dead_letter(tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    for _ in range(5):
        with start_program(_ENDS_BY_ITSELF, store) as program:
            assert program.wait(60) == 7
    with Fork(work_innocently, store, ledger) as child:
        child.process.join(60)
        assert child.process.exitcode == 0
    assert letters(store) == {}


def test_the_command_shows_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    count_deaths(work, store, ledger, "push", "exit", False)
    assert main(["dead-letters", str(store), "--group", "g", "--causes"]) == 0
    assert "its process ended" in capsys.readouterr().out


def test_without_a_limit_a_message_ends_its_process_again_and_again(tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    assert count_deaths(work_with_limit, store, ledger, 0, most=6) == 6
    assert letters(store) == {}
    with Broker.open(store) as broker:
        broker.set_group("g", max_process_deaths=0)
    assert count_deaths(work_with_limit, store, ledger, None, most=2) == 2
    assert letters(store) == {}
    assert count_deaths(work_with_limit, store, ledger, 3) == 0  # the consumer's setting counts, and who has
    # opened and closed the store meanwhile has not forgotten the ends
    assert list(letters(store)) == [POISON]
    assert is_done(ledger)


def work_with_limit(path: Path, ledger: Path, limit: int | None) -> None:
    with Broker.open(path) as broker:
        listen(broker, ledger, DEATHS["exit"], max_process_deaths=limit)


@pytest.mark.parametrize("number", [-1, 101, True, "3", 1.0])
def test_settings_of_ends_are_checked(number: Any, tmp_path: Path) -> None:
    with Broker.open(tmp_path / "store") as broker:
        with pytest.raises(BrokerError, match="max_process_deaths: expected a whole number from 0 to 100"):
            broker.set_group("g", max_process_deaths=number)
        for make in (PushConsumer, SimpleConsumer):
            with pytest.raises(ConfigError, match="max_process_deaths"):
                make(broker, "g", max_process_deaths=number)


def listen_beside_a_long_one(path: Path, ledger: Path) -> None:
    """Let one of two threads have the first message until the process is killed, and the other one all the others."""
    with Broker.open(path) as broker:

        def consume(message: DeliveredMessage) -> None:
            if message.body != b"0":
                write_line(ledger, message.body)
                if len(lines_of(ledger)) < MESSAGES - 1:
                    return
                print("done", flush=True)
            threading.Event().wait()

        consumer = PushConsumer(broker, "g", consume_from=ConsumeFrom.FIRST, threads=2)
        consumer.subscribe("t", consume)
        with consumer:
            threading.Event().wait()


def test_a_close_forgets_nothing_that_a_kill_has_left(tmp_path: Path) -> None:
    store, ledger = tmp_path / "store", tmp_path / "ledger"
    fill(store)
    with Fork(listen_beside_a_long_one, store, ledger) as child:
        assert child.stdout.readline() == "done\n"
    in_work = [b"0", lines_of(ledger)[-1]]
    for _ in range(2):
        Broker.open(store).close()  # as a command does
    with Fork(work_innocently, store, ledger) as child:
        child.process.join(60)
        assert child.process.exitcode == 0
    assert sorted(lines_of(ledger)[MESSAGES - 1 :]) == sorted(in_work)
    with Broker.open(store) as broker:
        assert broker.lag("g") == 0
    assert not [*(store / "librmq" / "groups").iterdir()]  # the tables have it all
