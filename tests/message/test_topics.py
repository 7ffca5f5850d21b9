"""Names of topics: which are valid, and which belong to the broker."""

from __future__ import annotations

import pytest

from librmq.errors import MessageIllegalError
from librmq.message.topics import NOT_FOR_SENDING, is_system_topic, validate_client_topic, validate_topic


@pytest.mark.parametrize("topic", ["T", "a b", "中文", "T" * 127, "中" * 42, "...", "%RETRY%g", "a\\b", "rmq_sys_x"])
def test_topics_of_a_store(topic: str) -> None:
    validate_topic(topic)


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "/", "a\0", "T" * 128, "中" * 43, "\ud800", None, 5, b"T"])
def test_no_topics(topic: str) -> None:
    for validate in (validate_topic, validate_client_topic):
        with pytest.raises(MessageIllegalError, match="topic"):
            validate(topic)


@pytest.mark.parametrize("topic", ["a b", "中文", "a.b", "T\n", "a+b", "...", "²"])
def test_clients_are_stricter(topic: str) -> None:
    validate_topic(topic)
    with pytest.raises(MessageIllegalError, match="may only contain"):
        validate_client_topic(topic)


def test_topics_of_the_broker_are_system_topics() -> None:
    assert all(is_system_topic(topic) for topic in NOT_FOR_SENDING)
    assert not is_system_topic("%RETRY%g")
