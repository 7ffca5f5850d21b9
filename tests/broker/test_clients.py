"""A broker's warnings about clients that cannot work together; clients' own warnings are in ``tests/consumer``."""

from __future__ import annotations

import logging

import pytest

from librmq import SimpleConsumer
from librmq.protocol import ChannelClosed, Subscription
from tests.broker.parties import Listening, beat, opened


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "librmq.broker"]
    caplog.clear()
    return found


def test_two_clients_of_one_id_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    one, other = Listening(), Listening()
    with opened() as broker:
        for client in (one, one, other, one, other):
            beat(broker, Subscription("T"), client=client)
        (warning,) = told(caplog)
        assert "two clients use the id c1" in warning
        assert "instance_name" in warning
        broker.call(ChannelClosed("c1"))
        beat(broker, Subscription("T"), client=other)
        assert told(caplog) == []
        beat(broker, Subscription("T"), client=one)
        assert len(told(caplog)) == 1


def test_different_subscriptions_are_named_once_a_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "librmq.broker")
    with opened() as broker:
        clients = {name: Listening() for name in ("c1", "c2")}

        def says(name: str, *subscriptions: Subscription) -> list[str]:
            beat(broker, *subscriptions, client_id=name, client=clients[name])
            return told(caplog)

        assert says("c1", Subscription("T", version=1)) == []
        assert says("c2", Subscription("T", version=2)) == []  # another version alone is no difference
        (warning,) = says("c2", Subscription("T", "a", version=3))
        assert "instances of group g differ on T (" in warning
        assert "c1: " in warning
        assert says("c2", Subscription("T", "a", version=4)) == []
        (warning,) = says("c2", Subscription("T", "a", version=4), Subscription("U"))
        assert "U (" in warning
        (info,) = says("c2", Subscription("T", version=5))
        assert "subscribe to the same again" in info


def test_simple_consumers_of_a_group_may_receive_from_topics_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "librmq.broker")
    with opened() as broker:
        for name, *topics in (("c1", "T"), ("c2", "T", "U"), ("c3",)):
            consumer = SimpleConsumer(broker, "g", instance_name=name)
            for topic in topics:
                consumer.subscribe(topic)
            consumer.start()
        assert told(caplog) == []
        other = SimpleConsumer(broker, "g", instance_name="c4")
        other.subscribe("T", tags="a")
        other.start()
        (warning,) = told(caplog)
        assert "instances of group g differ on T (" in warning


class Counted(Subscription):
    """A subscription that counts how often its expression is asked for."""

    asked = 0

    def __getattribute__(self, name: str) -> object:
        if name == "expression":
            Counted.asked += 1
        return super().__getattribute__(name)


def test_a_heartbeat_reads_no_subscriptions_of_others() -> None:
    """Each of many members sends heartbeats, so one must not cost a look at all."""
    with opened() as broker:
        for number in range(50):
            beat(broker, Counted("T"), client_id=f"c{number}", client=Listening())
        before = Counted.asked
        beat(broker, Subscription("T"), client_id="last", client=Listening())
        assert Counted.asked == before
