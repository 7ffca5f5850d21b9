"""Settings: values of a wrong type or out of range are refused when they are given, not when they are used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from librmq import ConfigError, StoreConfig
from librmq.client.sender import ProducerConfig, ProducerKeywords
from librmq.config import Between, Config, Seconds, to_seconds
from librmq.consumer.config import ConsumerConfig, ConsumerKeywords, PullConsumerConfig, PullConsumerKeywords
from librmq.dedup import DedupConfig, DedupKeywords
from librmq.idempotence.outbox import OutboxConfig, OutboxKeywords


def test_a_refusal_is_always_short() -> None:
    for row in ({"max_index_num": "x" * 70_000}, {"delete_when": "x" * 70_000}, {"x" * 70_000: 1}):
        with pytest.raises(ConfigError) as refused:
            StoreConfig.from_row(row)
        assert len(str(refused.value)) < 3_000


def test_the_defaults_are_settings() -> None:
    assert StoreConfig.from_row({}) == StoreConfig.broker()


# --- the checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Config):
    """A configuration with settings of every kind."""

    count: Annotated[int, Between(1, 16)] = 3
    ratio: Annotated[float, Between(0)] = 0.5
    pause_s: Annotated[float | None, Seconds(0.1)] = None
    mode: Literal["a", "b"] = "a"
    name: str = ""
    is_on: bool = False
    call: Callable[[int], int] | None = None
    store: StoreConfig | None = None

    def _check_together(self) -> None:
        if self.count > 10 and not self.is_on:
            raise self.refusal("count", "at most 10 unless is_on")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count: expected a whole number from 1 to 16, found 0"),
        ({"count": True}, "count: expected a whole number from 1 to 16, found True"),
        ({"count": 2.0}, "count: expected a whole number from 1 to 16, found 2.0"),
        ({"count": None}, "count: expected a whole number from 1 to 16, found None"),
        ({"count": 11}, "count: expected at most 10 unless is_on, found 11"),
        ({"ratio": -1}, "ratio: expected a number of at least 0, found -1"),
        ({"ratio": math.nan}, "ratio: expected a number of at least 0, found nan"),
        ({"pause_s": 0}, "pause_s: expected seconds from 0.1 to 31536000, or None, found 0"),
        ({"mode": "c"}, "mode: expected one of 'a', 'b', found 'c'"),
        ({"name": 1}, "name: expected text, found 1"),
        ({"is_on": 1}, "is_on: expected True or False, found 1"),
        ({"call": 1}, "call: expected a function, or None, found 1"),
        ({"store": 1}, "store: expected a StoreConfig, or None, found 1"),
        ({"cuont": 1}, "cuont: unknown setting of Example; did you mean count?"),
        ({"x": 1}, "x: unknown setting of Example; known are call, count, is_on, mode, name, pause_s, ratio, store"),
    ],
)
def test_a_refusal_names_the_setting_and_the_expected_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Example().with_settings(settings)
    assert str(refused.value) == message


def test_settings_of_every_kind_are_taken() -> None:
    settings = {"count": 16, "ratio": 1, "pause_s": 0.1, "mode": "b", "name": "n", "is_on": True, "call": abs}
    found = Example().with_settings({**settings, "store": StoreConfig()})
    assert {name: getattr(found, name) for name in settings} == settings


def test_durations_are_seconds_or_a_timedelta() -> None:
    assert to_seconds("timeout", 1.5) == to_seconds("timeout", timedelta(seconds=1.5)) == 1.5
    for value in (-1, True, "1", timedelta(seconds=-1), math.nan):
        with pytest.raises(ConfigError, match=r"^timeout: expected seconds or a timedelta of at least 0, found "):
            to_seconds("timeout", value)  # type: ignore[arg-type]
    assert Example().with_settings({"pause_s": timedelta(minutes=1)}).pause_s == 60
    with pytest.raises(ConfigError, match=r"^ratio: expected a number of at least 0, found datetime\.timedelta"):
        Example().with_settings({"ratio": timedelta(seconds=1)})


@pytest.mark.parametrize(
    ("config", "keywords", "others"),
    [
        (ProducerConfig, ProducerKeywords, set()),
        (ConsumerConfig, ConsumerKeywords, {"concurrency"}),
        (PullConsumerConfig, PullConsumerKeywords, {"concurrency"}),
        (OutboxConfig, OutboxKeywords, set()),
        (DedupConfig, DedupKeywords, {"key", "metrics", "clock"}),
    ],
)
def test_typed_keywords_are_the_settings(config: type[Config], keywords: type[Any], others: set[str]) -> None:
    expected = get_type_hints(config, include_extras=True)
    for name, hint in expected.items():
        if get_origin(hint) is Annotated:
            plain, limits = get_args(hint)[:2]
            expected[name] = plain | timedelta if isinstance(limits, Seconds) else plain
    hints = get_type_hints(keywords)
    assert {name: hints[name] for name in hints.keys() - others} == expected
