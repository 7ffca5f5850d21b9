"""The proof that a kill loses nothing: a producer that is killed again and again while it sends."""

from __future__ import annotations

import sys
from random import Random
from typing import Final

from librmq import Broker, Producer
from librmq.cli._demo._stage import Program, Screen
from librmq.runtime.event_log import held_back
from librmq.store import verify

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
        with Program(__name__, folder, accepted + 1, sends) as program:
            for line in program.lines():
                accepted = int(line)
                if accepted - begin == killed_after and killed < kills:
                    program.kill()
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


if __name__ == "__main__":
    with held_back():
        _send(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
