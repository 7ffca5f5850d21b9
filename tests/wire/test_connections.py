"""The connections of a route: how they are opened, rest after a failure, and end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from librmq import BrokerUnreachableError
from librmq.clock import ManualClock
from librmq.wire.remote.connections import Connections
from librmq.wire.remote.transport import Requested, Transport
from librmq.wire.remoting.frames import Frame


class Line:
    """A `Transport` that only opens and closes."""

    is_open = True

    def ask(self, frame: Frame, timeout_s: float) -> Frame:
        raise NotImplementedError

    def begin(self, frame: Frame, ended: object) -> None:
        raise NotImplementedError

    def tell(self, frame: Frame) -> None:
        raise NotImplementedError

    def answer(self, frame: Frame) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.is_open = False


Dialled = Callable[[str], Transport]


def connections(dialled: Dialled, clock: ManualClock) -> Connections:
    def dial(address: str, requested: Requested, lost: Callable[[Transport], None]) -> Transport:
        return dialled(address)

    return Connections(dial, clock.monotonic, lambda *_: None, lambda *_: None, (1.0, 4.0))


def test_an_address_rests_for_all_clients() -> None:
    """While a host is down, its clients do not wait for a connection one after the other."""
    tried: list[str] = []

    def refuse(address: str) -> Transport:
        tried.append(address)
        raise BrokerUnreachableError(f"{address} is down")

    clock = ManualClock()
    made = connections(refuse, clock)
    for client_id in ("a", "b", "a"):
        with pytest.raises(BrokerUnreachableError, match="h:1 is down"):
            made.get("h:1", client_id)
    assert tried == ["h:1"]
    for seconds, tries in ((1, 2), (1, 2), (1, 3), (3, 3), (1, 4), (3, 4), (1, 5)):  # rests of 1, 2, 4 and 4 s
        clock.advance(seconds=seconds)
        with suppress(BrokerUnreachableError):
            made.get("h:1", f"client {seconds}")
        assert len(tried) == tries


def test_a_client_that_leaves_while_it_dials_is_closed() -> None:
    line = Line()

    def leave(address: str) -> Transport:
        made.drop("a", address)
        return line

    made = connections(leave, ManualClock())
    assert made.get("h:1", "a") is line
    assert not line.is_open
