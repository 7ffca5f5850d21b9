"""How commands read their input."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from librmq.cli._rows import read_rows, standard_input
from librmq.cli._selection import parse_time
from librmq.cli._stores import settle_config
from librmq.clock import ManualClock
from librmq.config import StoreConfig
from librmq.errors import InputError
from librmq.files._disk import DiskFiles

NOW = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("0", 0),
        ("1795150501158", 1_795_150_501_158),
        ("9223372036854775807", 9_223_372_036_854_775_807),
        ("2024-05-01T08:00:00Z", 1_714_550_400_000),
        ("2024-05-01T08:00:00.25+02:00", 1_714_543_200_250),
        ("1950-01-01T00:00:00Z", 0),
        ("-2h", NOW - 7_200_000),
        ("-90s", NOW - 90_000),
        ("-250ms", NOW - 250),
        ("-7d", NOW - 604_800_000),
        ("-30m", NOW - 1_800_000),
        ("-999999999999d", 0),
    ],
)
def test_times(text: str, time_ms: int) -> None:
    assert parse_time(text, ManualClock(NOW)) == time_ms


def test_a_time_without_a_zone_is_local() -> None:
    expected = round(datetime(2024, 5, 1, 8).astimezone().timestamp() * 1000)
    assert parse_time("2024-05-01T08:00:00", ManualClock(NOW)) == expected
    assert parse_time("2024-05-01 08:00", ManualClock(NOW)) == expected


@pytest.mark.parametrize(
    "text", ["", "yesterday", "-2w", "2 h", "9223372036854775808", "1e9", "-1", "٣", "99999999-01-01"]
)
def test_values_that_are_not_times(text: str) -> None:
    with pytest.raises(InputError, match="not a time"):
        parse_time(text, ManualClock(NOW))


@pytest.mark.slow
@given(st.text())
def test_any_text_is_a_time_or_bad_input(text: str) -> None:
    with contextlib.suppress(InputError):
        assert 0 <= parse_time(text, ManualClock(NOW)) < 1 << 63


# --- rows


def test_rows_are_numbered_by_their_lines() -> None:
    lines = [b'{"a":1}\n', b"\n", b"  \r\n", '{"b":"订单"}'.encode()]
    assert list(read_rows(lines)) == [(1, {"a": 1}), (4, {"b": "订单"})]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "expected a JSON object"),
        (b"1", "expected a JSON object"),
        (b'{"a":NaN}', "NaN is no JSON number"),
        (b'{"a":"\xff"}', "not UTF-8"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"a":' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a":1} x', "not JSON"),
    ],
)
def test_an_invalid_row_names_its_line(line: bytes, said: str) -> None:
    rows = read_rows([b"{}", line])
    assert next(rows) == (1, {})
    with pytest.raises(InputError) as caught:
        next(rows)
    assert str(caught.value).startswith("line 2: ")
    assert said in str(caught.value)


def test_lines_of_standard_input_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("librmq.cli._rows._LONGEST_LINE", 10)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"a": 1}\n' + b"x" * 30)))
    rows = read_rows(standard_input())
    assert next(rows) == (1, {"a": 1})
    with pytest.raises(InputError, match="line 2: longer than 10 bytes"):
        next(rows)
    monkeypatch.setattr(sys, "stdin", None)
    assert list(standard_input()) == []


@given(st.binary(max_size=200))
def test_any_bytes_are_a_row_or_bad_input(line: bytes) -> None:
    with contextlib.suppress(InputError):
        for _, row in read_rows([line]):
            assert isinstance(row, dict)


# --- settings


def store_with_log(folder: Path, size: int) -> str:
    (folder / "commitlog").mkdir()
    (folder / "commitlog" / f"{0:020d}").write_bytes(bytes(size))
    return str(folder)


def test_settings_of_a_file_complete_those_of_the_store(tmp_path: Path) -> None:
    store = store_with_log(tmp_path, 65536)
    file = tmp_path / "settings.json"
    row = {"type": "config", "load_ok": True, "commitlog_file_size": 65536, "message_delay_level": "1s 2s"}
    file.write_text(json.dumps(row))
    found = StoreConfig.broker(commitlog_file_size=65536, file_reserved_hours=None, flush_thorough_interval_s=10)
    assert settle_config(store, DiskFiles(), None) == found
    expected = dataclasses.replace(found, message_delay_level="1s 2s")
    assert settle_config(store, DiskFiles(), str(file)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"commitlog_file_size": 131072}', "commitlog_file_size: expected 65536, as in the files of "),
        ('{"commitlog_file_size": "x"}', "commitlog_file_size: expected a whole number"),
        ('{"no_such_setting": 1}', "no_such_setting: unknown setting of StoreConfig"),
        ("[]", "expected a JSON object"),
        ("{", "not JSON"),
        (None, "No such file"),
    ],
)
def test_bad_settings_name_their_file(tmp_path: Path, text: str | None, said: str) -> None:
    store = store_with_log(tmp_path, 65536)
    file = tmp_path / "settings.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError) as caught:
        settle_config(store, DiskFiles(), str(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)
