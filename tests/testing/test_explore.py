"""Exploring: what it finds, the shortest schedules for that, and no findings without a fault."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sqlite3
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from librmq.consumer import DeliveredMessage
from librmq.errors import ConfigError, InputError, NotIdleError
from librmq.files._memory import MemoryFiles
from librmq.protocol import ConsumeFrom, MessageModel
from librmq.runtime.locks import Lock
from librmq.testing import Kit, Process, explore
from librmq.testing.exploring._exploration import (
    as_decided,
    at_random,
    decode_schedule,
    encode_schedule,
    read_seed,
    schedule_document,
    search,
)
from librmq.testing.exploring._explorer import FAULT, Decision, Explorer, Place
from tests.budget import examples, many
from tests.conftest import SlowBudget
from tests.histories import check_drained
from tests.planted import BUGS, Scenario, check_then_act, subscriptions_that_differ

LANES = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)


def run_of(function: Callable[[Kit], None]) -> Callable[[Explorer], BaseException | None]:
    """Run the test as `explore` does."""

    def run(explorer: Explorer) -> BaseException | None:
        kit = Kit(runner=explorer, check=False)
        try:
            function(kit)
        except AssertionError as error:
            explorer.trace.history = str(kit.history())
            return error
        finally:
            kit.abandon()
        return None

    return run


@pytest.mark.slow
@many
@LANES
def test_planted_bugs_pass_in_usual_order_and_are_found(bug: Scenario) -> None:
    with Kit() as rmq:
        bug(rmq, False)
    for seed in "012":
        result = search(run_of(lambda rmq: bug(rmq, False)), 200, seed)
        assert result.found is not None, result.summary()
        assert 1 <= len(result.found.decisions) <= 3
        assert result.runs <= 200


@pytest.mark.slow
@LANES
def test_a_seed_fails_again_at_the_same_line(bug: Scenario) -> None:
    with pytest.raises(AssertionError) as first:
        explore(lambda rmq: bug(rmq, False))
    report = first.value.__notes__[-1]
    assert "it fails in the same way with its store on disk" in report
    seed = report.rpartition(" ")[2]
    assert seed.startswith("rmq1-")
    with pytest.raises(AssertionError) as second:
        explore(lambda rmq: bug(rmq, False), seed=seed)
    assert second.traceback[-1].lineno == first.traceback[-1].lineno
    assert "run 1 of 1" in second.value.__notes__[-1]
    assert "on disk" not in second.value.__notes__[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_disk", "said"),
    [
        (None, "on disk the same schedule does not fail"),
        (LookupError("otherwise"), "on disk the same schedule fails in another way: LookupError: otherwise"),
    ],
)
def test_the_result_of_the_schedule_on_disk_is_reported(on_disk: Exception | None, said: str) -> None:
    folders: list[str] = []

    def test(rmq: Kit) -> None:
        if not isinstance(rmq.files, MemoryFiles):
            folders.append(rmq.path)
            if on_disk is not None:
                raise on_disk
            return
        check_then_act(rmq, False)

    with pytest.raises(AssertionError) as raised:
        explore(test)
    assert said in raised.value.__notes__[-1]
    assert len(folders) == 1  # only the folder of the last run
    assert not Path(folders[0]).exists()


@many
@LANES
def test_fixed_bugs_pass(bug: Scenario) -> None:
    runs = examples(240)
    result = explore(lambda rmq: bug(rmq, True), runs=runs)
    assert result.found is None
    assert result.runs == runs


@pytest.mark.slow
@LANES
def test_fixed_bugs_pass_ten_thousand_runs(bug: Scenario, slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(50, "times 200 runs"):
        explore(lambda rmq: bug(rmq, True), runs=200, seed=str(number))


def test_who_has_consumed_nothing_leaves_the_progress_of_a_lost_member() -> None:
    """The instance that stays knows of no other reader, and of no progress, when it takes the queue."""
    pull, retry_pull = "billing@new pull orders/broker-a/0", "billing@new pull %RETRY%billing/broker-a/0"
    schedule = (
        Decision(Place("choose", "client ids of old: after", 1), "client ids of old: before"),
        Decision(Place("fault", "billing@old orders/broker-a/0 0", 1), FAULT + "old is lost to the broker"),
        Decision(Place("order", pull, 1), "time"),
        Decision(Place("order", retry_pull, 1), "billing@old orders/broker-a/0 0"),
        Decision(Place("order", retry_pull, 2), "time"),
        Decision(Place("order", "billing@new save progress", 1), "time"),
    )
    result = explore(lambda rmq: subscriptions_that_differ(rmq, True), seed=encode_schedule(schedule))
    assert sum(result.chosen.values()) == len(schedule)


def booking(rmq: Kit) -> list[bytes]:
    """Book orders with a listener that first checks and can be interrupted after the check."""
    booked: list[bytes] = []

    @rmq.consumer("billing").subscribe("orders")
    def charge(message: DeliveredMessage) -> None:
        if message.body not in booked:
            rmq.checkpoint("between look and insert")
            booked.append(message.body)

    return booked


@pytest.mark.slow
def test_a_bug_that_needs_a_fault_and_a_pause_is_found() -> None:
    def test(rmq: Kit) -> None:
        booked = booking(rmq)
        for order in (b"o-1", b"o-2"):
            rmq.producer().send("orders", order)
        rmq.run_until_idle()
        assert len(booked) == len(set(booked))

    result = search(run_of(test), 1000)
    assert result.found is not None
    assert any(decision.chosen.startswith(FAULT) for decision in result.found.decisions)
    assert any(decision.chosen == "pause" for decision in result.found.decisions)


# ---- at least once


def deliver_ten(rmq: Kit) -> None:
    """Send ten messages; by its history each must be consumed, and more than once only after a failure."""

    def shop(process: Process) -> None:
        @process.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            rmq.checkpoint("before")

    rmq.app("shop", shop)
    for number in range(10):
        rmq.producer().send("orders", b"%d" % number)
    rmq.advance(minutes=5)
    check_drained(rmq, "billing")


@pytest.mark.slow
def test_at_least_once_ten_thousand_times(slow_budget: SlowBudget) -> None:
    for number in slow_budget.rounds(50, "times 200 schedules"):
        result = explore(deliver_ten, runs=200, seed=str(number))
        assert {"answer", "choose", "fault", "order", "pause", "test"} <= result.reached.keys()
        assert result.chosen["fault"] > 10


def broadcast(rmq: Kit, orderly: bool) -> None:
    """Let two instances get all messages, while one dies and starts again with the progress that it has saved."""
    got: dict[str, set[bytes]] = {}
    sent: set[bytes] = set()

    def cache(process: Process) -> None:
        name = process.name.partition("-")[0]  # one that joins is on another host
        settings: Any = {"instance_name": name, "model": MessageModel.BROADCASTING, "consume_from": ConsumeFrom.FIRST}

        @process.consumer("cache", orderly=orderly, **settings).subscribe("prices")
        def note(message: DeliveredMessage) -> None:
            rmq.checkpoint("before")
            got.setdefault(process.name, set()).add(message.body)

    def send(number: int) -> None:
        with suppress(ConnectionError):
            rmq.producer().send("prices", b"%d" % number, queue=number % 2)
            sent.add(b"%d" % number)

    rmq.broker.create_topic("prices", queues=2)
    for name in ("c1", "c2"):
        rmq.app(name, cache)
    rmq.advance(seconds=7)
    for number in range(6):
        if number == 3:
            rmq.advance(seconds=7)
            rmq.crash(next(process for process in rmq.processes if process.name == "c1" and not process.dead))
        send(number)
    rmq.advance(minutes=3)
    assert got.keys() >= {"c1", "c2"}
    assert all(bodies >= sent for bodies in got.values())
    assert {client_id.partition("@")[2] for client_id in rmq.files.names(f"{rmq.path}.clients")} == {"c1", "c2"}


@many
@pytest.mark.parametrize("orderly", [False, True])
def test_broadcasting_loses_nothing_over_restarts(orderly: bool) -> None:
    explore(lambda rmq: broadcast(rmq, orderly), runs=examples(200))


# ---- schedules


DECISIONS = (
    Decision(Place("order", "a listener", 2), "time"),
    Decision(Place("fault", "idle", 1), FAULT + "shop dies"),
)


@pytest.mark.slow
def test_states_are_beginnings_of_histories() -> None:
    """Runs that do the same reach no new state, and one more event at the end of a run is one more state."""

    def sends(rmq: Kit, count: int = 2) -> None:
        for _ in range(count):
            rmq.recorder.add_event("effect", name="charge", key=str(len(rmq.events())), process="shop", at_ms=0)

    assert [explore(sends, runs=runs).states for runs in (1, 20)] == [2, 2]
    more = explore(lambda rmq: sends(rmq, 3))
    assert (more.states, more.late_states) == (3, 0)

    def consumes(rmq: Kit) -> None:
        rmq.consumer("billing").subscribe("orders")(lambda message: None)
        with suppress(ConnectionError):
            rmq.producer().send("orders", b"x")
        rmq.advance(minutes=2)

    few, many = (explore(consumes, runs=runs) for runs in (3, 40))
    assert few.states < many.states
    assert 0 < many.late_states < many.states / 4
    assert f"{many.states:,} states ({many.late_states:,} of them new" in many.summary()


@pytest.mark.slow
def test_few_schedules_run_twice() -> None:
    """Random choices that make a schedule with one decision at most, which has run, give way to more of them."""

    def consumes(rmq: Kit) -> None:
        rmq.consumer("billing").subscribe("orders")(lambda message: rmq.checkpoint())
        for _ in range(3):
            with suppress(ConnectionError):
                rmq.producer().send("orders", b"x")
        rmq.run_until_idle()

    result = explore(consumes, runs=60)
    assert result.runs - result.schedules <= 2


def test_runs_in_a_folder_share_no_messages(tmp_path: Path) -> None:
    def once(rmq: Kit) -> None:
        rmq.consumer("billing").subscribe("orders")(lambda message: None)
        assert not rmq.messages("orders")
        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()

    found = explore(once, 5, path=tmp_path / "runs")
    assert found.runs == len(list((tmp_path / "runs").glob("run-*/commitlog"))) == 5


def test_schedules_are_written_and_read(tmp_path: Path) -> None:
    seed = encode_schedule(DECISIONS)
    assert decode_schedule(seed) == DECISIONS
    file = tmp_path / "schedule.json"
    result = search(run_of(lambda rmq: check_then_act(rmq, False)), 200)
    assert result.found is not None
    file.write_text(schedule_document("a test", result.found), "utf-8")
    assert read_seed(str(file)) == result.found.decisions
    file.write_text(seed, "utf-8")
    assert read_seed(str(file)) == DECISIONS
    assert read_seed("17") is None


@pytest.mark.parametrize("text", ["rmq1-", "rmq1-????", "rmq1-" + "A" * 50, "[1]", '{"decisions": 3}', "none.json"])
def test_an_invalid_schedule_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="schedule: expected a seed"):
        decode_schedule(text)


def test_an_unknown_label_means_the_usual() -> None:
    choose = as_decided(DECISIONS).choose
    assert choose(Place("order", "a listener", 2), ["a listener", "time"]) == 1
    assert choose(Place("order", "a listener", 2), ["a listener", "another"]) == 0
    assert choose(Place("order", "a listener", 1), ["a listener", "time"]) == 0


def test_chance_depends_on_the_place_alone() -> None:
    labels = ["a", "b", "c", "d"]
    places = [Place("order", f"step {number}", 1) for number in range(200)]
    first, second = at_random("7", 0.5).choose, at_random("7", 0.5).choose
    drawn = {place: first(place, labels) for place in places}
    assert {place: second(place, labels) for place in reversed(places)} == drawn
    assert len(set(drawn.values())) in (1, 4)  # a kind of choice is either left alone or varied


def test_a_run_is_released_before_the_next(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "librmq")  # a record that pytest keeps can hold a client
    kits: list[weakref.ref[Kit]] = []

    def scenario(rmq: Kit) -> None:
        assert all(kit() is None for kit in kits)
        kits.append(weakref.ref(rmq))
        rmq.consumer("readers").subscribe("T")(lambda message: None)
        rmq.producer().send("T", b"1")
        rmq.run_until_idle()

    explore(scenario, 60)


def test_at_most_two_faults() -> None:
    for seed in range(40):
        choose = at_random(str(seed), 0.5).choose
        labels = ["none", FAULT + "a", FAULT + "b"]
        chosen = [choose(Place("fault", "none", number), labels) for number in range(1, 200)]
        assert sum(map(bool, chosen)) <= 2


def test_a_schedule_survives_an_edit_of_the_test() -> None:
    def test(rmq: Kit, edited: bool) -> None:
        if edited:
            rmq.consumer("audit").subscribe("payments")(lambda message: None)
            rmq.producer().send("payments", b"p-1")
        booked = booking(rmq)
        rmq.producer().send("orders", b"o-1")
        rmq.producer().send("orders", b"o-1")
        if edited:
            rmq.producer().send("payments", b"p-2")
        rmq.run_until_idle()
        assert len(booked) == 1

    result = search(run_of(lambda rmq: test(rmq, False)), 200)
    assert result.found is not None
    again = search(run_of(lambda rmq: test(rmq, True)), 1, replay=result.found.decisions)
    assert again.found is not None
    assert again.found.decisions == result.found.decisions


def test_a_failure_of_the_usual_schedule_is_named_as_such() -> None:
    def test(rmq: Kit) -> None:
        raise AssertionError("always")

    with pytest.raises(AssertionError, match="always") as caught:
        explore(test)
    assert "the usual schedule fails" in caught.value.__notes__[-1]


# ---- listeners that wait for each other


def test_a_lock_held_over_a_pause_is_noticed() -> None:
    lock = Lock()

    def test(rmq: Kit) -> None:
        @rmq.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            with lock:
                rmq.checkpoint("with the lock")

        for _ in range(2):
            rmq.producer().send("orders", b"x")
        rmq.run_until_idle()
        assert len(rmq.delivered("billing")) == 2

    place = Place("pause", "billing@billing orders/broker-a/0 0: with the lock", 1)
    explorer: list[Explorer] = []

    def run(one: Explorer) -> BaseException | None:
        explorer.append(one)
        return run_of(test)(one)

    result = search(run, 1, replay=[Decision(place, "pause")])
    assert result.found is None
    assert explorer[0].trace.decisions == [Decision(place, "pause")]
    assert not explorer[0].trace.replayable


def test_a_transaction_of_the_test_makes_no_listener_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others go first between two sends of the test; its open transaction keeps the listener from its row."""
    monkeypatch.setattr("librmq.testing.exploring._explorer.LEAVE_S", 0.1)

    def test(rmq: Kit) -> None:
        @rmq.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            with closing(sqlite3.connect(path, timeout=20)) as database, database:
                database.execute("INSERT INTO paid VALUES (?)", (message.body,))

        with closing(sqlite3.connect(path)) as database, database:
            database.execute("INSERT INTO paid VALUES ('by hand')")
            rmq.producer().send("orders", b"o-1")
            rmq.producer().send("orders", b"o-2")
        rmq.run_until_idle()
        assert len(rmq.delivered("billing")) == 2

    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE paid (body)")
    replay = [Decision(Place("test", "test: send orders", number), "all others first") for number in (1, 2)]
    explorer: list[Explorer] = []

    def run(one: Explorer) -> BaseException | None:
        explorer.append(one)
        return run_of(test)(one)

    assert search(run, 1, replay=replay).found is None
    assert not explorer[0].trace.replayable


def test_what_waits_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("librmq.testing.exploring._explorer.STUCK_S", 0.2)
    monkeypatch.setattr("librmq.testing.exploring._explorer.LEAVE_S", 0.1)

    def test(rmq: Kit) -> None:
        lock = Lock()

        @rmq.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            with lock:
                pass

        with lock:
            rmq.producer().send("orders", b"o-1")
            rmq.producer().send("orders", b"o-2")
            rmq.run_until_idle()

    replay = [Decision(Place("test", "test: send orders", number), "all others first") for number in (1, 2)]
    where = r"billing@billing orders/broker-a/0 0 at test_explore.py:\d+: .*transaction"
    with pytest.raises(NotIdleError, match=where):
        search(run_of(test), 1, replay=replay)


def test_a_lock_of_asyncio_held_over_a_pause_is_released() -> None:
    def test(rmq: Kit) -> None:
        lock = asyncio.Lock()
        for group in ("billing", "shipping"):

            @rmq.consumer(group).subscribe("orders")
            async def charge(message: DeliveredMessage) -> None:
                async with lock:
                    rmq.checkpoint("with the lock")

        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()
        assert len(rmq.delivered("billing") + rmq.delivered("shipping")) == 2

    place = Place("pause", "billing@billing orders/broker-a/0 0: with the lock", 1)
    assert search(run_of(test), 1, replay=[Decision(place, "pause")]).found is None


def test_a_dead_process_keeps_no_connection_of_its_listener() -> None:
    class Connection:
        pass

    connections: list[weakref.ref[Connection]] = []
    open_ones: list[int] = []

    with Kit() as rmq:

        @rmq.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            open_ones.append(sum(connection() is not None for connection in connections))
            connection = Connection()
            connections.append(weakref.ref(connection))
            if len(connections) == 1:
                rmq.crash(rmq.processes[-1])

        gc.disable()
        try:
            rmq.producer().send("orders", b"x")
            rmq.run_until_idle()
        finally:
            gc.enable()
    assert open_ones == [0, 0]


def test_a_base_exception_is_raised_in_the_test() -> None:
    def test(rmq: Kit) -> None:
        rmq.consumer("billing").subscribe("orders")(lambda message: pytest.fail("from a listener"))
        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()

    with pytest.raises(pytest.fail.Exception, match="from a listener"):
        explore(test)


def test_ctrl_c_interrupts_a_running_listener() -> None:
    go_on = threading.Event()

    def test(rmq: Kit) -> None:
        @rmq.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            assert threading.current_thread() is not threading.main_thread()
            signal.raise_signal(signal.SIGINT)
            go_on.wait(30)

        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()

    # A listener that can pause has its own thread.
    place = Place("pause", "billing@billing orders/broker-a/0 0: in the middle", 1)
    with pytest.raises(KeyboardInterrupt):
        explore(test, seed=encode_schedule([Decision(place, "pause")]))
    go_on.set()
    explore(deliver_ten, runs=3)


def test_finally_runs_when_a_process_dies() -> None:
    left: list[int] = []

    def test(rmq: Kit) -> None:
        @rmq.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            try:
                rmq.checkpoint("in the middle")
            finally:
                left.append(1)

        rmq.producer().send("orders", b"x")
        rmq.run_until_idle()
        assert [one.outcome for one in rmq.delivered("billing")] == ["died", "returned"]

    place = Place("pause", "billing@billing orders/broker-a/0 0: in the middle", 1)
    assert search(run_of(test), 1, replay=[Decision(place, FAULT + "billing dies here")]).found is None
    assert left == [1, 1]


@pytest.mark.slow
def test_lines_of_a_listener_are_places_to_pause() -> None:
    def test(rmq: Kit) -> None:
        booked: list[bytes] = []

        def is_booked(order: bytes) -> bool:
            return order in booked

        @rmq.consumer("billing").subscribe("orders")
        def charge(message: DeliveredMessage) -> None:
            if not is_booked(message.body):
                booked.append(message.body)

        for _ in range(2):
            rmq.producer().send("orders", b"o-1")
        rmq.run_until_idle()
        assert len(booked) == 1

    before = sys.gettrace()
    with pytest.raises(AssertionError) as caught:
        explore(test, lines=True)
    assert "charge line 3" in caught.value.__notes__[-1]
    assert sys.gettrace() is before
    seed = caught.value.__notes__[-1].rpartition(" ")[2]
    with pytest.raises(AssertionError, match="assert 2 == 1"):
        explore(test, seed=seed, lines=True)
    assert explore(test, runs=60).found is None


@pytest.mark.slow
def test_coroutines_are_explored() -> None:
    def test(rmq: Kit) -> None:
        booked: list[bytes] = []

        @rmq.consumer("billing").subscribe("orders")
        async def charge(message: DeliveredMessage) -> None:
            if message.body not in booked:
                rmq.checkpoint("between look and insert")
                booked.append(message.body)

        for _ in range(2):
            rmq.producer().send("orders", b"o-1")
        rmq.run_until_idle()
        assert len(booked) == 1

    with Kit() as rmq:
        test(rmq)
    result = search(run_of(test), 200)
    assert result.found is not None
    assert len(result.found.decisions) <= 3


@pytest.mark.parametrize(("queue", "fails"), [(None, False), (0, True)])
def test_a_lost_answer_fails_a_send_to_a_given_queue_and_repeats_another(queue: int | None, fails: bool) -> None:
    errors: list[ConnectionError] = []

    def scenario(rmq: Kit) -> None:
        rmq.consumer("billing").subscribe("orders")(lambda message: None)
        try:
            rmq.producer().send("orders", b"o-1", queue=queue)
        except ConnectionError as error:
            errors.append(error)
        rmq.advance(minutes=2)

    explore(scenario, 30)
    assert any("the answer was lost" in str(error) for error in errors) == fails


def test_a_search_that_would_try_nothing_is_refused() -> None:
    """A coroutine that no one awaits would pass under each schedule."""

    async def never_runs(rmq: Kit) -> None:
        raise AssertionError

    for runs in (0, -1):
        with pytest.raises(ConfigError, match="runs: expected a whole number of at least 1"):
            explore(lambda rmq: None, runs=runs)
    with pytest.raises(TypeError, match=r"returns a coroutine: pass `lambda rmq: asyncio\.run"):
        explore(never_runs, runs=2)
    with pytest.raises(AssertionError):
        explore(lambda rmq: asyncio.run(never_runs(rmq)), runs=2)
