"""The state of a message in each group, and resending dead letters."""

from __future__ import annotations

from typing import Any

import pytest

from librmq.consumer import PullConsumer
from librmq.consumer._tracks import MessageTrack, TrackType, message_tracks
from librmq.diagnosis.deadletters import dead_letters
from librmq.errors import ConfigError
from librmq.listener import DeadLetter
from librmq.protocol import MessageModel
from librmq.testing import Kit
from tests.consumer.parties import bodies, send, subscribed


def test_tracks(one_queue: Kit) -> None:
    rmq = one_queue
    subscribed(rmq, group="all")
    subscribed(rmq, group="tagged", filters={"tags": "b"})
    subscribed(rmq, group="by-sql", filters={"sql": "amount > 100"})
    subscribed(rmq, group="cast", model=MessageModel.BROADCASTING)
    gone, paused = subscribed(rmq, group="gone"), subscribed(rmq, group="late")
    puller = PullConsumer(rmq.route, "puller")
    puller.subscribe("t")
    puller.start()
    send(rmq, "0", tags="a", properties={"amount": "x"})
    rmq.advance(seconds=30)
    gone.shutdown()
    paused.pause()
    rmq.advance(seconds=20)
    send(rmq, "1", tags="b", properties={"amount": "120"})
    rmq.advance(seconds=30)
    send(rmq, "2", tags="b")
    rmq.run_until_idle()
    first, second, third = rmq.messages("t")
    assert dict(message_tracks(rmq.broker, first)) == {
        "all": TrackType.CONSUMED,
        "tagged": TrackType.CONSUMED_BUT_FILTERED,
        "by-sql": TrackType.CONSUMED_BUT_FILTERED,
        "cast": TrackType.CONSUME_BROADCASTING,
        "gone": TrackType.NOT_ONLINE,
        "late": TrackType.CONSUMED,
        "puller": TrackType.PULL,
    }
    tracks = dict(message_tracks(rmq.broker, second))
    assert (tracks["by-sql"], tracks["tagged"]) == (TrackType.CONSUMED, TrackType.CONSUMED)
    assert MessageTrack("late", TrackType.NOT_CONSUME_YET) in message_tracks(rmq.broker, third)


def test_dead_letters_sent_again(one_queue: Kit) -> None:
    repaired = False

    def listener(message: Any) -> None:
        if not repaired:
            raise DeadLetter

    subscribed(one_queue, listener)
    subscribed(one_queue, group="other")
    send(one_queue, "a", keys="k", tags="x", properties={"color": "red"})
    one_queue.advance(seconds=10)
    repaired = True
    assert [one_queue.broker.resend_dead_letters("g") for _ in range(2)] == [1, 0]
    assert all(letter.resent_at_ms is not None for letter in dead_letters(one_queue.broker, group="g"))
    one_queue.run_until_idle()
    assert one_queue.broker.resend_dead_letters("g", one_queue.dead_letters("g")) == 1  # named, it is sent once more
    again = one_queue.delivered("g")[-1]
    assert (again.body, again.message.topic, again.attempt) == (b"a", "%RETRY%g", 0)
    assert bodies(one_queue, group="other") == ["a"]
    stored, _ = one_queue.messages("%RETRY%g")
    assert (stored.keys, stored.tags, stored.properties["color"]) == (("k",), "x", "red")
    assert len(one_queue.dead_letters("g")) == 1
    with pytest.raises(ConfigError, match="not a dead letter"):
        one_queue.broker.resend_dead_letters("g", one_queue.messages("t"))
