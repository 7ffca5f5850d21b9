"""What has become of a message, and dead letters sent again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from librmq.consumer import PullConsumer
from librmq.consumer.message_track import MessageTrack, TrackType, message_tracks, resend_dead_letters
from librmq.files.memory import MemoryFiles
from librmq.listener import DeadLetter
from librmq.protocol import MessageModel
from tests.world import World
from tests.world import world as make_world


@pytest.fixture
def world() -> Iterator[World]:
    with make_world(1, enable_property_filter=True) as world:
        yield world


def test_tracks(world: World) -> None:
    files = MemoryFiles()
    files.make_folder("/offsets")
    world.consumer("c1", "all").start()
    world.consumer("c2", "tagged", tags="b").start()
    world.consumer("c3", "by-sql", sql="amount > 100").start()
    world.consumer("c4", "cast", model=MessageModel.BROADCASTING, files=files, offsets_folder="/offsets").start()
    gone = world.consumer("c5", "gone")
    gone.start()
    paused = world.consumer("c6", "late")
    paused.start()
    puller = PullConsumer(world.broker, "puller", instance_name="l1")
    puller.subscribe("t")
    puller.start()
    world.send("0", tags="a", properties={"amount": "x"})
    world.advance(30)
    gone.shutdown()
    paused.pause()
    world.advance(20)
    world.send("1", tags="b", properties={"amount": "120"})
    world.advance(30)
    world.send("2", tags="b")
    world.advance()
    first, second, third = world.broker.messages("t")
    assert dict(message_tracks(world.broker, first)) == {
        "all": TrackType.CONSUMED,
        "tagged": TrackType.CONSUMED_BUT_FILTERED,
        "by-sql": TrackType.CONSUMED_BUT_FILTERED,
        "cast": TrackType.CONSUME_BROADCASTING,
        "gone": TrackType.NOT_ONLINE,
        "late": TrackType.CONSUMED,
        "puller": TrackType.PULL,
    }
    tracks = dict(message_tracks(world.broker, second))
    assert (tracks["by-sql"], tracks["tagged"]) == (TrackType.CONSUMED, TrackType.CONSUMED)
    assert MessageTrack("late", TrackType.NOT_CONSUME_YET) in message_tracks(world.broker, third)
    puller.shutdown()


def test_dead_letters_sent_again(world: World) -> None:
    mended = False

    def listener(message: Any) -> None:
        if not mended:
            raise DeadLetter

    world.consumer("c1", "g", listener=listener).start()
    world.consumer("c2", "other").start()
    world.send("a", keys="k", tags="x", properties={"color": "red"})
    world.advance(10)
    letters = world.broker.dead_letters("g")
    mended = True
    assert resend_dead_letters(world.broker, letters) == 1
    world.advance()
    again = world.seen[-1]
    assert (again.consumer, again.body, again.queue.topic, again.reconsume_times) == ("c1", "a", "%RETRY%g", 0)
    assert world.bodies("c2") == ["a"]
    stored = next(iter(world.broker.messages("%RETRY%g")))
    assert (stored.keys, stored.tags, stored.properties["color"]) == (("k",), "x", "red")
    assert len(world.broker.dead_letters("g")) == 1
    with pytest.raises(ValueError, match="no dead letter"):
        resend_dead_letters(world.broker, world.broker.messages("t"))
