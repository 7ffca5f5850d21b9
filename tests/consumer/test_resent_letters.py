"""Dead letters that are sent again."""

from __future__ import annotations

from typing import Any

import pytest

from librmq.diagnosis.deadletters import dead_letters
from librmq.errors import ConfigError
from librmq.listener import DeadLetter
from librmq.testing import Kit
from tests.consumer.parties import bodies, send, subscribed


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
