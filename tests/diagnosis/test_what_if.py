"""Estimates of how long a backlog takes, compared with real consumers whose listeners are timed by a manual clock."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from librmq import Broker, ConfigError, Message, PushConsumer
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.diagnosis import Consumption, consumption_of, estimate, what_if
from librmq.errors import NotIdleError
from librmq.files._memory import MemoryFiles
from librmq.runtime import ManualRunner
from librmq.runtime.runner import Step, Work
from librmq.testing import Kit
from tests.broker.parties import send
from tests.budget import examples, many
from tests.stores import START_MS

TOPIC = "T"


class SlowListeners(ManualRunner):
    """A runner that gives each listener call a duration, so that calls overlap."""

    def __init__(self, wanted: Consumption, seed: int) -> None:
        super().__init__(ManualClock(START_MS))
        self._wanted = wanted
        self._rng = random.Random(seed)
        self._free_ms = 0.0  # when the downstream service finishes the work it has

    def _takes_ms(self, messages: int) -> int:
        wanted = self._wanted
        mean_ms, spread = 1000 * wanted.handler_s, wanted.handler_spread
        own = mean_ms if not spread else self._rng.gammavariate(1 / spread**2, mean_ms * spread**2)
        if wanted.downstream_per_s is not None:  # a server that handles one call at a time
            now = self.now_ms()
            self._free_ms = max(self._free_ms, now) + 1000 * messages / wanted.downstream_per_s
            own = max(own, self._free_ms - now)
        return max(1, round(own))

    def perform(self, work: Work) -> None:
        if not work.about:
            super().perform(work)
            return
        with self.lock:
            self.running.add(work)
        result = work.call()

        def end(now_ms: int) -> None:
            self.running.discard(work)
            work.done(result, None)

        with self.lock:
            self.wake(Step("end of a call", end), self.now_ms() + self._takes_ms(len(work.about)))

    def take(self, ms: int) -> None:
        """Advance the clock, whether listeners are running or not."""
        until = self.now_ms() + ms
        with suppress(NotIdleError):
            self.advance(ms)
        self.manual_clock.move_to(until)

    @property
    def is_working(self) -> bool:
        return any(work.about for work in self.running)


@contextmanager
def backlog(wanted: Consumption, runner: SlowListeners, listener: Any) -> Iterator[Broker]:
    """Open a broker whose consumers begin to drain such a backlog."""
    config = StoreConfig(commitlog_file_size=16 << 20)
    with Broker.open("/b", runner=runner, files=MemoryFiles(), store_config=config) as broker:
        broker.create_topic(TOPIC, len(wanted.lags))
        consumers = [
            PushConsumer(
                broker, "G", instance_name=f"{number:03}", threads=int(wanted.threads), batch_size=wanted.batch_size,
                orderly=wanted.is_orderly,
            )
            for number in range(wanted.clients)
        ]  # fmt: skip
        for consumer in consumers:
            consumer.subscribe(TOPIC, listener)
            consumer.start()
        runner.advance(60_000)
        for consumer in consumers:
            consumer.pause()
        runner.advance(5_000)
        for queue_id, lag in enumerate(wanted.lags):
            for _ in range(lag):
                broker.store.append(Message(TOPIC, b"x"), queue_id)
        for consumer in consumers:
            consumer.resume()
        yield broker


def simulated(wanted: Consumption, seed: int) -> float:
    """Return how many seconds real consumers take to drain such a backlog."""
    step_ms = max(5, round(estimate(wanted).drain_s or 0))  # a thousandth of the estimate
    runner = SlowListeners(wanted, seed)
    left = list(wanted.lags)
    late = set(range(len(left)))  # queues that have had waiting messages all the time

    def listener(messages: Any) -> None:
        for message in messages if isinstance(messages, list) else [messages]:
            left[message.queue_id] -= 1
            if not left[message.queue_id]:
                late.discard(message.queue_id)

    with backlog(wanted, runner, listener) as broker:
        begin = runner.now_ms()
        sent = 0
        while True:
            runner.take(step_ms)
            took_s = (runner.now_ms() - begin) / 1000
            if not late and (wanted.stored_per_s or not runner.is_working):  # new messages may wait a moment
                return took_s
            assert took_s < 30 * step_ms + 60, "the backlog does not drain"
            due = int(took_s * wanted.stored_per_s)
            for number in range(sent, due):
                send(broker, TOPIC, b"x", number % len(wanted.lags))
                left[number % len(wanted.lags)] += 1
            sent = max(sent, due)


def drawn(seed: int) -> Consumption:
    rng = random.Random(seed)
    queues, clients, threads = rng.randint(1, 8), rng.randint(1, 4), rng.randint(1, 8)
    is_orderly = rng.random() < 0.3
    batch = 1 if is_orderly else rng.choice([1, 1, 4])
    lags = [rng.randint(150, 300) for _ in range(queues)]
    handler_s = rng.uniform(0.05, 0.4)
    parallel = min(threads, queues) if is_orderly else threads
    rate = min(clients, queues) * parallel * batch / handler_s
    downstream = rng.choice([None, None, rate * rng.uniform(0.3, 0.8)])
    spread = rng.choice([0.0, 0.5, 1.0])
    has_inflow = downstream is None and rng.random() < 0.6
    return Consumption(
        lags=lags,
        handler_s=handler_s,
        handler_spread=spread,
        clients=clients,
        threads=threads,
        batch_size=batch,
        is_orderly=is_orderly,
        downstream_per_s=downstream,
        stored_per_s=rate / batch * rng.uniform(0.1, 0.5) if has_inflow else 0.0,
    )


def has_uncertain_inflow(wanted: Consumption) -> bool:
    return wanted.stored_per_s > 0 and (wanted.is_orderly or wanted.batch_size > 1)


DRAINING = [seed for seed in range(60) if estimate(drawn(seed)).drain_s is not None][:50]
UNCERTAIN = [seed for seed in range(100, 160) if has_uncertain_inflow(drawn(seed)) and estimate(drawn(seed)).drain_s]
QUICK = [*DRAINING[::10], 13, 20, 33]  # the last three are cheap, with an inflow to batches
OTHERS = [seed for seed in [*UNCERTAIN, *DRAINING] if seed not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in OTHERS[: examples(len(OTHERS))])]
)
def test_the_estimate_is_within_15_percent_of_simulations(seed: int) -> None:
    """Compare with the mean of several runs, because call times are random; it must lie between the stated bounds.

    50 scenarios of all kinds are drawn, and further ones of new messages for orderly or batched consumption.
    """
    wanted = drawn(seed)
    expected = estimate(wanted)
    runs = [simulated(wanted, 1000 * run + seed) for run in range(4 if wanted.handler_spread else 1)]
    mean = sum(runs) / len(runs)
    assert expected.drain_s is not None
    assert expected.low_s is not None
    assert expected.low_s <= mean <= (expected.high_s or math.inf)
    assert mean == pytest.approx(expected.drain_s, rel=0.15)


@many
@pytest.mark.parametrize(
    "wanted",
    [
        Consumption(lags=[1000], handler_s=0.1, handler_spread=0, threads=1),
        Consumption(lags=[3000, 1500, 200, 0], handler_s=0.01, handler_spread=0, threads=1),
        Consumption(lags=[3000, 1500, 200], handler_s=0.05, threads=4),
        Consumption(lags=[300, 300, 0, 0], handler_s=0.05, threads=4, clients=4),
        Consumption(lags=[300, 300, 0, 0], handler_s=0.05, handler_spread=0, threads=4, batch_size=4),
        Consumption(lags=[300, 100, 0, 0], handler_s=0.05, handler_spread=0, threads=8, is_orderly=True),
        Consumption(lags=[600, 300, 0, 0], handler_s=0.05, handler_spread=0, threads=1, is_orderly=True),
    ],
)
def test_the_wait_of_a_new_message_is_as_simulated(wanted: Consumption) -> None:
    """One message comes to each queue just after consumers have pulled what they hold."""
    runner = SlowListeners(wanted, 1)
    waits_s: dict[int, float] = {}

    def listener(messages: Any) -> None:
        for message in messages if isinstance(messages, list) else [messages]:
            if message.body == b"new":
                waits_s[message.queue_id] = (runner.now_ms() - begin) / 1000

    with backlog(wanted, runner, listener) as broker:
        begin = runner.now_ms()
        runner.take(1)
        for queue_id in range(len(wanted.lags)):
            send(broker, TOPIC, b"new", queue_id)
        while len(waits_s) < len(wanted.lags):
            runner.take(50)
    expected = estimate(wanted)
    mean_s = sum(waits_s.values()) / len(waits_s)
    assert mean_s == pytest.approx(expected.new_wait_s, rel=0.15)
    if not wanted.is_orderly or wanted.threads > 1:  # else the first turns are chance
        assert min(waits_s.values()) == pytest.approx(expected.shortest_new_wait_s, rel=0.15, abs=0.1)
        assert max(waits_s.values()) == pytest.approx(expected.longest_new_wait_s, rel=0.15)


def test_a_new_message_behind_a_queue_that_no_client_has() -> None:
    no_client = Consumption(lags=[5, 5], handler_s=1, strategy=lambda client, queues, clients: list(queues[:1]))
    assert estimate(no_client)[-4:] == (None, None, None, 0)


def test_changes_that_help_and_that_do_not() -> None:
    bound = Consumption(lags=[1000] * 4, handler_s=0.25, handler_spread=0, clients=2, threads=5)
    found = {one.name: one for one in what_if(bound)}
    assert found["as it is"].estimate.rate_per_s == 40
    assert found["twice the consumers"].speed_up == pytest.approx(2, rel=0.02)
    assert found["twice the threads"].speed_up == pytest.approx(2, rel=0.02)
    assert (found["twice the queues"].speed_up or 1) < 1.02  # waiting messages stay in their queues
    more = {one.name: one for one in what_if(found["twice the consumers"].consumption)}
    assert more["twice the consumers"].estimate.idle_clients == 4
    assert more["twice the consumers"].speed_up == pytest.approx(1, rel=0.02)


def test_a_full_downstream_is_reported() -> None:
    found = {
        one.name: one
        for one in what_if(Consumption(lags=[1000] * 4, handler_s=0.25, clients=2, threads=5, downstream_per_s=20))
    }
    assert found["as it is"].estimate.bound_by == "downstream"
    assert found["twice the threads"].speed_up == pytest.approx(1, rel=0.05)


def test_an_inflow_that_is_too_large_never_drains() -> None:
    found = estimate(Consumption(lags=[10, 10], handler_s=1, threads=1, stored_per_s=3))
    assert (found.drain_s, found.high_s, found.wait_s, found.bound_by) == (None, None, None, "inflow")
    assert (found.utilisation, found.growth_per_s) == (3, 2)


@pytest.mark.parametrize(
    ("settings", "growth"),
    [
        ({"stored_per_s": 9}, 0),
        ({"stored_per_s": 12}, 2),
        ({"stored_per_s": 9, "clients": 2}, 0),
        ({"stored_per_s": 18, "clients": 2}, 2),  # one of two instances has two of the three queues, 12 a second
        ({"stored_per_s": 9, "downstream_per_s": 5}, 4),
        ({"stored_per_s": 9, "is_orderly": True, "threads": 9}, 0),
        ({"stored_per_s": 36, "is_orderly": True, "threads": 9}, 6),
        ({"stored_per_s": 9, "clients": 2, "strategy": lambda client, queues, clients: list(queues[:1])}, 6),
    ],
)
def test_how_fast_a_backlog_grows(settings: dict[str, Any], growth: float) -> None:
    """Instances take 10 messages a second each, or orderly ones 10 of each queue."""
    now = Consumption(**{"lags": [10] * 3, "handler_s": 0.1, "threads": 1, **settings})
    assert estimate(now).growth_per_s == pytest.approx(growth)
    for scenario in what_if(now):
        assert ("the waits are those of this moment" in scenario.advice) == (scenario.estimate.growth_per_s > 0)


def test_a_backlog_grows_as_estimated() -> None:
    wanted = Consumption(lags=[10, 10], handler_s=0.1, handler_spread=0, threads=1, clients=2, stored_per_s=30)
    runner, begun = SlowListeners(wanted, 1), 0

    def listener(messages: Any) -> None:
        nonlocal begun
        begun += 1

    with backlog(wanted, runner, listener) as broker:
        for number in range(1200):
            runner.take(33 + (number % 3 == 0))
            send(broker, TOPIC, b"x", number % 2)
    assert 1200 + 20 - begun == pytest.approx(20 + 40 * estimate(wanted).growth_per_s, rel=0.05)


def test_no_lag_takes_no_time_but_a_wait() -> None:
    found = estimate(Consumption(lags=[0], handler_s=0.1, threads=1, stored_per_s=5))
    assert (found.drain_s, found.bound_by, found.utilisation) == (0, "nothing", 0.5)
    assert found.wait_s == pytest.approx(0.1)  # as in an M/M/1 queue


@pytest.mark.parametrize(
    "wrong",
    [{"clients": 0}, {"threads": 0}, {"batch_size": 0}, {"handler_s": 0}, {"lags": []}, {"lags": [-1]},
     {"downstream_per_s": 0}, {"threads": math.nan}, {"threads": math.inf}, {"threads": "4"}, {"threads": True},
     {"clients": 1.5}, {"batch_size": None}, {"handler_s": math.nan}, {"handler_s": "1"}, {"handler_s": math.inf},
     {"handler_spread": -1}, {"handler_error": math.nan}, {"stored_per_s": -1}, {"stored_per_s": math.inf},
     {"lags": 7}, {"lags": [1.5]}, {"lags": ["1"]}, {"lags": [math.nan]}, {"queues": []}, {"is_orderly": "yes"},
     {"strategy": "averagely"}],
)  # fmt: skip
def test_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected"):
        estimate(Consumption(**{"lags": [1], "handler_s": 1.0, **wrong}))


def test_the_consumption_of_a_running_group(rmq: Kit) -> None:
    rmq.broker.create_topic("T", 4)
    for _ in range(2):
        rmq.consumer("G", threads=3).subscribe("T", lambda message: None)
    rmq.producer().send("T", b"x")
    rmq.advance(seconds=30)
    found = consumption_of(rmq.broker, "G", "T", handler_s=0.1)
    assert (found.clients, found.threads, found.is_orderly) == (2, 3, False)
    with pytest.raises(ConfigError, match="no progress"):
        consumption_of(rmq.broker, "H", "T", handler_s=0.1)
