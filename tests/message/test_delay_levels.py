"""Delay levels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.errors import ConfigError
from librmq.message import retry_level
from librmq.message.delays import DEFAULT_LEVELS, DelayLevels, level_of_queue_id, queue_id_of_level


def test_every_unit() -> None:
    assert DelayLevels.parse("2s 3m 4h 5d 007s").delays_ms == (2_000, 180_000, 14_400_000, 432_000_000, 7_000)


def test_spaces_at_the_end_are_ignored() -> None:
    assert DelayLevels.parse("1s 2s  ").delays_ms == (1_000, 2_000)


@pytest.mark.parametrize(("level", "capped"), [(-3, -3), (0, 0), (1, 1), (18, 18), (19, 18), (1000, 18)])
def test_cap(level: int, capped: int) -> None:
    assert DEFAULT_LEVELS.cap(level) == capped


def test_the_pause_before_a_retry_grows_with_each_failure() -> None:
    """As 4.9 has it: 10 s, 30 s, 1 min, and so on up to the highest level."""
    assert [DEFAULT_LEVELS.delay_ms(retry_level(times)) for times in range(3)] == [10_000, 30_000, 60_000]
    assert DEFAULT_LEVELS.cap(retry_level(16)) == DEFAULT_LEVELS.max_level


@pytest.mark.parametrize(
    "text", ["", " ", "1s  2s", " 1s", "1", "s", "1x", "1.5s", "-1s", "+1s", "1_0s", "1S", "1s\t2s", "1s\n", "٣s"]
)
def test_bad_levels_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="delay level"):
        DelayLevels.parse(text)


def test_a_delay_that_would_not_fit_64_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="delay level 2 is too long"):
        DelayLevels.parse("1s 999999999999999999d")
    with pytest.raises(ConfigError, match="delay level 1"):
        DelayLevels.parse("9" * 10_000 + "s")


@given(st.text())
def test_any_text_is_levels_or_refused(text: str) -> None:
    try:
        levels = DelayLevels.parse(text)
    except ConfigError:
        return
    assert levels.max_level == len(text.split())


@given(st.integers(1, 100))
def test_queues_count_from_0(level: int) -> None:
    assert queue_id_of_level(level) == level - 1
    assert level_of_queue_id(queue_id_of_level(level)) == level


def test_levels_are_a_value() -> None:
    assert DelayLevels.parse("1s 1m") == DelayLevels((1_000, 60_000))
    assert hash(DelayLevels.parse("1s")) == hash(DelayLevels((1_000,)))
