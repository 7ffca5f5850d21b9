"""What if: how long a backlog takes to drain with more consumers, threads, queues, or a faster listener.

::

    client     rate = threads * batch / time of a call            concurrent; orderly: min(threads, queues with lag)
    drain      of a client: (its lag) / (its rate - its inflow);  of the group: the longest of its clients
    inflow     a new message fills no batch: it takes a call of its own while fewer than 1000 wait in its queue
    downstream the services that listeners call bound the sum of rates
    wait       of a new message without backlog: Erlang's C, with the spread of the time of a call
    new wait   of a new message behind the backlog: of each queue of its client, the messages that begin before it

A client holds up to 1000 messages of each queue and begins them in the order in which they came, so a new message waits
for what its client holds of all its queues, also in a queue without backlog.

The allocation strategy itself assigns the queues. An added queue gets only new messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, NamedTuple

from librmq.client import allocate_averagely
from librmq.client.allocation import AllocationStrategy
from librmq.config import Between, Config
from librmq.diagnosis._instances import instances
from librmq.diagnosis._lag_report import lag, no_progress
from librmq.diagnosis.view import Source, viewed
from librmq.message import MessageQueue
from librmq.override import override

_DEVIATIONS: Final = 2.0  # on either side: about 95 %
_EXACT: Final = 0.03
"""Relative error from allocation, pulls and rounding."""
_HELD: Final = 1000
"""Messages of a queue that a client holds; while fewer wait, it pulls each new one at once, for a call of its own."""
_TURN_S: Final = 60.0
"""Time for which an orderly consumer's thread stays with one queue."""
_COARSE: Final = 0.15
"""The same if all share a downstream service, which also delays clients with spare threads."""


_MOST: Final = 1e12
"""The largest number that is taken for a time, a rate or a factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption(Config):
    """How a group consumes a topic. The caller gives the values that a folder does not show.

    Raises:
        ConfigError: A value is not a number, or out of range; the message names it.
    """

    lags: Sequence[int]
    """Waiting messages, by queue."""
    handler_s: Annotated[float, Between(1e-9, _MOST)]
    """Mean duration of a listener's call, in seconds."""
    handler_spread: Annotated[float, Between(0, 1000)] = 1.0
    """Standard deviation of that time, as a multiple of the mean: 0 for a constant time, 1 for an exponential one."""
    handler_error: Annotated[float, Between(0, 1000)] = 0.0
    """Possible relative error of the mean itself."""
    clients: Annotated[int, Between(1, 1_000_000)] = 1
    """Running instances of the group."""
    threads: Annotated[float, Between(1, _MOST)] = 20
    """Listeners that each client runs in parallel; with a fraction, the rate of a client as a multiple of a queue's."""
    batch_size: Annotated[int, Between(1, 1_000_000)] = 1
    """Messages of one call of a listener."""
    is_orderly: bool = False
    """Whether listeners take the messages of a queue in order."""
    stored_per_s: Annotated[float, Between(0, _MOST)] = 0.0
    """New messages of the topic; each queue gets the same share."""
    downstream_per_s: Annotated[float | None, Between(1e-9, _MOST)] = None
    """Messages per second that the services behind all listeners can take; None without a limit."""
    strategy: AllocationStrategy = allocate_averagely
    """How the group shares queues among its clients."""
    queues: Sequence[MessageQueue] | None = None
    """The queues, sorted, for strategies that look at their names; None: those of one broker."""

    @override
    def _check_together(self) -> None:
        if not self.lags or any(type(waiting) is not int or waiting < 0 for waiting in self.lags):
            raise self.refusal("lags", "the number of waiting messages of each queue")
        if self.queues is not None and len(self.queues) != len(self.lags):
            raise self.refusal("queues", f"{len(self.lags)} queues, as lags has")


class Estimate(NamedTuple):
    """An estimate of a drain."""

    drain_s: float | None
    """Time until nothing waits; None if never."""
    low_s: float | None
    """Lower bound of the time in about 95 % of cases; None if it is never."""
    high_s: float | None
    """Upper bound of the time in about 95 % of cases; None if it is never, or has no upper bound."""
    rate_per_s: float
    """Messages per second while all clients of the group work."""
    utilisation: float
    """Share of that rate for new messages; from 1 on, the backlog grows."""
    wait_s: float | None
    """Mean wait of a new message without backlog; None if the backlog grows."""
    bound_by: Literal["nothing", "clients", "one queue", "downstream", "inflow", "unowned queues"]
    """What limits the rate."""
    idle_clients: int
    """Clients without a queue."""
    most_queues: int
    """The most queues of one client."""
    fewest_queues: int
    """The fewest queues of one client."""
    most_lag: int
    """The most waiting messages of one client."""
    unowned_queues: int
    """Queues that the strategy gives to no client."""
    new_wait_s: float | None
    """Mean wait of a message that is stored now, in any of the queues, until its call begins; None if it is never."""
    shortest_new_wait_s: float | None
    """The same in the queue where it is shortest."""
    longest_new_wait_s: float | None
    """The same in the queue where it is longest."""
    growth_per_s: float
    """Messages per second by which the backlog grows in the end, because clients get more than they can take. Above 0,
    the waits are those of this moment, and later messages wait longer."""


class Scenario(NamedTuple):
    """A change, and the estimate with it."""

    name: str
    """The change, in a few words."""
    consumption: Consumption
    """Consumption after the change."""
    estimate: Estimate
    """Estimate for that consumption."""
    speed_up: float | None
    """How many times faster the backlog drains than without the change; None if either never drains."""
    advice: str
    """How to make the change, or what else to look at; empty without a change."""


def estimate(consumption: Consumption) -> Estimate:
    """Return how long a backlog takes to drain."""
    shares, unowned = _shares(consumption)
    inflow = consumption.stored_per_s / len(consumption.lags)  # messages a second into each queue
    rates = [_rate(consumption, len(share)) for share in shares]
    rate, bound = sum(rates), "clients"
    limit = consumption.downstream_per_s
    if limit is not None and rate > limit:
        rates = [client_rate * limit / rate for client_rate in rates]
        rate, bound = limit, "downstream"
    utilisation = consumption.stored_per_s / rate if rate else math.inf
    wait = _mean_wait(consumption, rate, utilisation)
    facts = (
        sum(not share for share in shares),
        max(map(len, shares)),
        min(map(len, shares)),
        max(sum(consumption.lags[queue] for queue in share) for share in shares),
        len(unowned),
        *((None, None, None) if unowned else _new_waits(consumption, shares, rates, wait or 0.0)),
        inflow * len(unowned) + _growth(consumption, shares, inflow),
    )
    total = sum(consumption.lags)
    if any(consumption.lags[queue] for queue in unowned) or (unowned and inflow):
        return Estimate(None, None, None, rate, utilisation, None, "unowned queues", *facts)
    if not total:
        return Estimate(0.0, 0.0, 0.0, rate, utilisation, wait, "nothing", *facts)
    full = _drain_of_group(consumption, shares, rates, inflow, bound)
    alone = _drain_of_group(
        consumption, shares, rates, inflow * (1 if consumption.is_orderly else consumption.batch_size), bound
    )
    mean, variance, what = alone if max(consumption.lags) < _HELD else full
    if math.isinf(mean):
        return Estimate(None, None, None, rate, utilisation, wait, "inflow", *facts)
    off = consumption.handler_error + (_COARSE if bound == "downstream" else _EXACT)
    low = full[0] * (1 - off) - _DEVIATIONS * math.sqrt(full[1])
    high = alone[0] * (1 + off) + _DEVIATIONS * math.sqrt(max(variance, alone[1]))
    if consumption.batch_size > 1 and inflow:
        high += consumption.handler_s  # for a call that is not full
    bound_by: Literal["clients", "one queue", "downstream"]
    bound_by = "one queue" if what == "one queue" else "downstream" if what == "downstream" else "clients"
    return Estimate(
        mean, max(0.0, low), high if math.isfinite(high) else None, rate, utilisation, wait, bound_by, *facts
    )


def _drain_of_group(
    consumption: Consumption, shares: list[list[int]], rates: list[float], inflow: float, bound: str
) -> tuple[float, float, str]:
    """Return mean and variance of the time in which the group drains all queues, and its bound."""
    times = [
        _drain_of_client(consumption, [consumption.lags[queue] for queue in share], rate, inflow, bound)
        for share, rate in zip(shares, rates, strict=True)
        if share and any(consumption.lags[queue] or inflow for queue in share)
    ]
    limit = consumption.downstream_per_s
    if limit is not None and bound == "downstream":  # a finished client leaves its share of it to the others
        spare = limit - consumption.stored_per_s
        together = sum(consumption.lags) / spare if spare > 0 else math.inf
        times = [
            (max(together, _drain_without_limit(consumption, shares, inflow)), max(time[1] for time in times), bound)
        ]
    return *_latest([time[:2] for time in times]), max(times)[2]


def _shares(consumption: Consumption) -> tuple[list[list[int]], list[int]]:
    """Return the numbers of the queues of each client, and of those that no client has."""
    clients = [f"client-{number:06}" for number in range(consumption.clients)]
    queues = consumption.queues or [MessageQueue("topic", "broker", number) for number in range(len(consumption.lags))]
    numbers = {queue: number for number, queue in enumerate(queues)}
    shares = [[numbers[queue] for queue in consumption.strategy(client, queues, clients)] for client in clients]
    owned = {queue for share in shares for queue in share}
    return shares, [queue for queue in range(len(queues)) if queue not in owned]


def _new_waits(
    consumption: Consumption, shares: list[list[int]], rates: list[float], idle_wait: float
) -> tuple[float, float, float]:
    """Return the wait of a new message behind the backlog: its mean over the queues, the shortest and the longest."""
    waits = []
    for share, rate in zip(shares, rates, strict=True):
        lags = [consumption.lags[queue] for queue in share]
        queue_rate, held = rate, float(_HELD)
        if consumption.is_orderly:  # a queue waits only for itself, or while all threads stay with others for a turn
            queue_rate = rate / min(consumption.threads, len(lags)) if lags else rate
            held = _TURN_S * queue_rate if sum(map(bool, lags)) > consumption.threads else 0.0
        for lag_of_queue in lags:
            ahead = sum(min(waiting, max(lag_of_queue, held)) for waiting in lags)
            waits.append(max(ahead / rate, lag_of_queue / queue_rate, idle_wait))
    return sum(waits) / len(waits), min(waits), max(waits)


def _growth(consumption: Consumption, shares: list[list[int]], inflow: float) -> float:
    """Return how many messages a second more come to the clients than they take."""
    growth = 0.0
    for share in shares:
        of_queue = max(0.0, inflow - consumption.batch_size / consumption.handler_s) if consumption.is_orderly else 0.0
        growth += max(len(share) * of_queue, len(share) * inflow - _rate(consumption, len(share)))
    limit = consumption.downstream_per_s
    return max(growth, 0.0 if limit is None else inflow * sum(map(len, shares)) - limit)


def _rate(consumption: Consumption, queues: int) -> float:
    parallel = min(consumption.threads, queues) if consumption.is_orderly else consumption.threads * (queues > 0)
    return parallel * consumption.batch_size / consumption.handler_s


def _drain_without_limit(consumption: Consumption, shares: list[list[int]], inflow: float) -> float:
    """Return the longest time of a client if the downstream were no limit."""
    times = [
        _drain_of_client(
            consumption, [consumption.lags[queue] for queue in share], _rate(consumption, len(share)), inflow, ""
        )[0]
        for share in shares
        if share
    ]
    return max(times)


def _drain_of_client(
    consumption: Consumption, lags: list[int], rate: float, inflow: float, bound: str
) -> tuple[float, float, str]:
    """Return mean and variance of the time in which one client drains its queues, and its bound."""
    time = _drain_time(consumption, sum(lags), rate, inflow * len(lags), _parallel_calls(consumption, lags))
    if consumption.is_orderly and inflow and consumption.threads < len(lags):
        turn = min(_TURN_S, time[0]) / 2  # a thread stays with a queue that gets new messages, while others wait
        time = time[0] + turn * (consumption.threads > 1), time[1] + (0.75 * turn) ** 2
    times = [(*time, bound)]
    if consumption.is_orderly:  # one listener a queue
        queue_rate = min(rate, consumption.batch_size / consumption.handler_s)
        times_of_queues = [_drain_time(consumption, waiting, queue_rate, inflow, 1) for waiting in lags]
        times.append(
            (*(_latest(times_of_queues) if consumption.threads >= len(lags) else max(times_of_queues)), "one queue")
        )
    return max(times)


def _latest(times: list[tuple[float, float]]) -> tuple[float, float]:
    """Return mean and variance of the latest of several times, by Clark's formulas for normal ones."""
    mean, variance = times[0]
    for other, its in times[1:]:
        together = math.sqrt(variance + its)
        if math.isinf(mean) or math.isinf(other) or not together:
            mean, variance = max((mean, variance), (other, its))
            continue
        far = (mean - other) / together
        below = math.erfc(-far / math.sqrt(2)) / 2
        density = math.exp(-far * far / 2) / math.sqrt(2 * math.pi)
        latest = mean * below + other * (1 - below) + together * density
        square = (mean**2 + variance) * below + (other**2 + its) * (1 - below) + (mean + other) * together * density
        mean, variance = latest, max(0.0, square - latest**2)
    return mean, variance


def _parallel_calls(consumption: Consumption, lags: list[int]) -> float:
    return min(consumption.threads, sum(map(bool, lags)) or 1) if consumption.is_orderly else consumption.threads


def _drain_time(
    consumption: Consumption, messages: int, rate: float, inflow: float, parallel: float
) -> tuple[float, float]:
    """Return mean and variance of the time of some messages at a rate, the last calls among them."""
    if messages and rate <= inflow:
        return math.inf, 0.0
    calls = max(1.0, messages / consumption.batch_size)
    at_last = min(parallel, math.ceil(calls))
    stretch = rate / (rate - inflow) if inflow else 1.0
    in_flow = max(0.0, messages - at_last * consumption.batch_size) / rate * stretch
    longest = consumption.handler_s * (1 + consumption.handler_spread * (_harmonic(math.ceil(at_last)) - 1))
    deviation = consumption.handler_spread * consumption.handler_s
    variance = calls * stretch * (deviation / parallel) ** 2 * stretch**2 + deviation**2
    return in_flow + (longest if messages else 0.0), variance


def _harmonic(number: int) -> float:
    return sum(1 / call for call in range(1, number + 1)) if number < 100 else math.log(number) + 0.5772


def _mean_wait(consumption: Consumption, rate: float, utilisation: float) -> float | None:
    """Return the mean time in the queue by Erlang's C, with Allen and Cunneen's factor for the spread."""
    if utilisation >= 1 or not rate:
        return None
    servers = max(1, round(rate * consumption.handler_s / consumption.batch_size))
    load = utilisation * servers
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = load * blocked / (number + load * blocked)
    waits = blocked / (1 - utilisation * (1 - blocked))
    return waits * consumption.handler_s / (servers * (1 - utilisation)) * (1 + consumption.handler_spread**2) / 2


_GROWS: Final = "More messages come than are consumed: the waits are those of this moment, and grow."


def what_if(consumption: Consumption) -> list[Scenario]:
    """Estimate the present state and each of the usual changes, the greatest speed-up first."""
    now = estimate(consumption)
    same = Scenario("as it is", consumption, now, 1.0, _GROWS if now.growth_per_s else "")
    more_queues = replace(consumption, lags=[*consumption.lags, *[0] * len(consumption.lags)], queues=None)
    changes: list[tuple[str, Consumption, str]] = [
        (
            "twice the consumers", replace(consumption, clients=2 * consumption.clients),
            "Start more instances while there are more queues than instances.",
        ),
        (
            "twice the threads", replace(consumption, threads=2 * consumption.threads),
            "Raise threads= in small steps; if that does not help, the service behind the listeners is the limit.",
        ),
        (
            "twice the queues", more_queues,
            "New queues, also on another broker, get only new messages, which wait for what their instances hold.",
        ),
        (
            "twice the queues and consumers",
            replace(more_queues, clients=2 * consumption.clients),
            "New messages in new queues begin at once on instances that have no other queues.",
        ),
        (
            "ten messages a call", replace(consumption, batch_size=10 * consumption.batch_size),
            "Only if a call with more messages takes hardly longer; the limit of a downstream service stays.",
        ),
        (
            "a listener twice as fast", replace(consumption, handler_s=consumption.handler_s / 2),
            "Find the slow place of the listeners: held_progress shows their stacks.",
        ),
        (
            "a listener twice as slow", replace(consumption, handler_s=consumption.handler_s * 2),
            "The effect of a slower downstream service.",
        ),
    ]  # fmt: skip
    scenarios = []
    for name, changed, advice in changes:
        then = estimate(changed)
        gain = now.drain_s / then.drain_s if now.drain_s and then.drain_s else None
        scenarios.append(Scenario(name, changed, then, gain, f"{advice} {_GROWS}" if then.growth_per_s else advice))
    return [same, *sorted(scenarios, key=lambda scenario: -(scenario.speed_up or 0))]


def consumption_of(
    source: Source, group: str, topic: str, *, handler_s: float, stored_per_s: float = 0.0
) -> Consumption:
    """Return how a group consumes a topic now: its lag, and for a running broker its instances and their settings.

    Args:
        source: A running broker, the folder of a store, or a view of either.
        group: The consumer group.
        topic: The topic.
        handler_s: Mean time of one call of the listener.
        stored_per_s: New messages of the topic.

    Raises:
        ConfigError: The group has no progress in the topic.
        NotAStoreError: The folder holds no store.
    """
    with viewed(source) as view:
        rows = list(lag(view, group=group, topic=topic, times=False))
        if not rows:
            raise no_progress(group, topic)
        states = [state for state in instances(view, group).values() if state is not None]
        return Consumption(
            lags=[row.lag for row in rows],
            handler_s=handler_s,
            clients=max(1, len(states)),
            threads=max((state.threads for state in states), default=20) or 1,
            is_orderly=any(state.is_orderly for state in states),
            stored_per_s=stored_per_s,
        )
