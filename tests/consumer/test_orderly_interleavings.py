"""Orderly consumption under any interleaving: no two consumers process one queue, no message overtakes another.

A run is a list of decisions, drawn from a seed: which turn is next, when a listener that has begun ends and how, when
an instance starts, leaves, dies, or hears nothing for a while. Listeners take time here: their end is a turn of its
own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from librmq.consumer import DeliveredMessage, PushConsumer
from librmq.errors import BrokerUnreachableError
from librmq.message.message import MessageQueue
from librmq.protocol import MaxOffset
from librmq.runtime.manual import ManualRunner
from librmq.runtime.runner import Step, Turn, Work
from tests.world import Seam, World
from tests.world import world as make_world

QUEUES = 2
NAMES = ("a", "b", "c")


class End:
    """A listener comes to its end."""

    def __init__(self, owner: Interleaved, work: Work) -> None:
        self.owner = owner
        self.work = work

    def go(self, fails: bool) -> None:
        self.owner.ends.remove(self)
        consumer, message = self.owner.at_work.pop(id(self.work))
        error = ValueError("no") if fails else None
        if not fails and not consumer.client.dead:
            self.owner.check.done(message)
        self.owner._finish(self.work, None, error)


class Check:
    """What must never happen."""

    def __init__(self) -> None:
        self.completed: dict[MessageQueue, set[int]] = {}

    def begun(self, at_work: dict[int, tuple[PushConsumer, DeliveredMessage]]) -> None:
        queues = [message.queue for consumer, message in at_work.values() if not consumer.client.dead]
        assert len(queues) == len(set(queues)), "two listeners have messages of one queue"
        for consumer, message in at_work.values():
            if not consumer.client.dead:
                before = set(range(message.queue_offset))
                missing = before - self.completed.get(message.queue, set())
                assert not missing, f"{message.queue_offset} overtakes {missing} of {message.queue}"

    def done(self, message: DeliveredMessage) -> None:
        self.completed.setdefault(message.queue, set()).add(message.queue_offset)


class Interleaved(ManualRunner):
    """Runs by hand; a listener's end waits to be chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.check = Check()
        self.ends: list[End] = []
        self.at_work: dict[int, tuple[PushConsumer, DeliveredMessage]] = {}
        self.latest: tuple[PushConsumer, DeliveredMessage] | None = None

    def perform(self, work: Work) -> None:
        self.running.add(work)
        self.latest = None
        if work.owner is None or not work.owner.dead:
            work.call()
        if self.latest is None:  # dropped before it ran
            self._finish(work, None, None)
            return
        self.at_work[id(work)] = self.latest
        self.ends.append(End(self, work))
        self.check.begun(self.at_work)

    def turns(self) -> list[Turn]:
        """What may come next, but for time: it passes where no step is due."""
        return [turn for turn in self.options(self.now_ms()) if isinstance(turn, Step | Work)]

    def settle(self, works: int = 1) -> None:
        """Take all turns in their usual order, but for the ends of listeners."""
        while turns := [turn for turn in self.turns() if works or isinstance(turn, Step)]:
            self.take(turns[0])

    def let_pass(self, most_ms: int) -> None:
        top = self._top()
        if top is not None and top.at is not None:
            if top.at > self.now_ms():
                self.manual_clock.move_to(min(top.at, self.now_ms() + most_ms))
        else:
            self.manual_clock.move_to(self.now_ms() + most_ms)

    def take(self, turn: Turn) -> None:
        with self.lock:
            turn.go(self)


class Group:
    """The instances of a group, and what happens to them."""

    def __init__(self, world: World, runner: Interleaved) -> None:
        self.world = world
        self.runner = runner
        self.members: dict[str, tuple[PushConsumer, Seam]] = {}
        self.generation = 0

    def start(self, name: str) -> None:
        if name in self.members:
            return
        self.generation += 1
        seam = Seam(self.world.broker)
        consumer = PushConsumer(seam, "g", instance_name=f"{name}{self.generation}", orderly=True, threads=4)

        @consumer.subscribe("t")
        def listen(message: DeliveredMessage) -> None:
            self.runner.latest = consumer, message

        consumer.start()
        self.members[name] = consumer, seam

    def leave(self, name: str) -> None:
        found = self.members.get(name)
        if found and not found[0].delivery.running:
            del self.members[name]
            found[0].shutdown()

    def die(self, name: str) -> None:
        found = self.members.pop(name, None)
        if found:
            found[0].client.dead = True
            self.world.broker.forget(found[0].client.client_id)

    def cut_off(self, name: str) -> None:
        """It neither hears nor is heard, and does not know it; only while it is at no message."""
        found = self.members.get(name)
        if found and not found[0].delivery.running:
            consumer, seam = found
            seam.fail = lambda request: BrokerUnreachableError("cut off")
            self.world.broker.forget(consumer.client.client_id)

    def reach(self, name: str) -> None:
        found = self.members.get(name)
        if found:
            consumer, seam = found
            if seam.fail(Any) is not None:  # type: ignore[arg-type]
                seam.fail = lambda request: None
                consumer.client.forgotten_by("broker-a")


def _decide(group: Group, world: World, runner: Interleaved, decisions: Iterator[int]) -> None:
    for decision in decisions:
        kind, which = decision % 20, decision // 20
        name = NAMES[which % 3]
        turns = runner.turns()
        if kind < 4 and turns:
            runner.take(turns[which % len(turns)])
        elif kind < 8:
            runner.settle()
        elif kind < 12 and runner.ends:
            runner.ends[which % len(runner.ends)].go(fails=which % 3 == 2)
        elif kind == 12:
            world.send("x", queue=which % QUEUES)
        elif kind == 13:
            group.start(name)
        elif kind == 14:
            group.leave(name)
        elif kind == 15:
            group.die(name)
        elif kind == 16:
            (group.cut_off if which % 2 else group.reach)(name)
        elif kind > 16:
            runner.settle(works=which % 2)
            runner.let_pass((50, 1000, 20_000, 60_000)[which % 4])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_no_interleaving_breaks_the_order(seed: int) -> None:
    rng = random.Random(seed)
    decisions = [rng.randrange(20 * 60) for _ in range(250)]
    runner = Interleaved()
    with make_world(QUEUES, runner) as world:
        group = Group(world, runner)
        group.start("a")
        for queue in (0, 1, 0, 1, 0):
            world.send("x", queue=queue)
        _decide(group, world, runner, iter(decisions))
        # In the end all is quiet, and every message was consumed.
        for name in NAMES:
            group.reach(name)
        group.start("a")
        for _ in range(150):
            runner.settle()
            if runner.ends:
                runner.ends[0].go(fails=False)
            else:
                runner.let_pass(20_000)
        for queue in range(QUEUES):
            end = world.broker.call(MaxOffset("t", queue))
            assert runner.check.completed.get(MessageQueue("t", "broker-a", queue), set()) == set(range(end))
        for consumer, _ in group.members.values():
            consumer.shutdown()
