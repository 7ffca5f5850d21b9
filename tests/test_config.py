"""Settings: what is of a wrong type or out of range is refused when it is said, not when it is used."""

from __future__ import annotations

import math
from typing import Any

import pytest

from librmq import ConfigError, StoreConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compress_from", "4096"),
        ("compress_from", True),
        ("compress_from", 0),
        ("max_total_size", "1"),
        ("max_total_size", 1),
        ("message_delay_level", 5),
        ("store_host", None),
        ("delete_when", 4),
        ("flush_interval_s", "1"),
        ("flush_interval_s", -1),
        ("flush_thorough_interval_s", math.inf),
        ("flush_interval_consumequeue_s", math.nan),
        ("flush_thorough_interval_consumequeue_s", True),
        ("flush_least_bytes", 1.5),
    ],
)
def test_what_is_no_setting_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected .*, found "):
        StoreConfig.from_row({name: value})


def test_a_refusal_is_short_whatever_it_refuses() -> None:
    for row in ({"max_index_num": "x" * 70_000}, {"delete_when": "x" * 70_000}, {"x" * 70_000: 1}):
        with pytest.raises(ConfigError) as refused:
            StoreConfig.from_row(row)
        assert len(str(refused.value)) < 3_000


def test_the_defaults_are_settings() -> None:
    assert StoreConfig.from_row({}) == StoreConfig()
