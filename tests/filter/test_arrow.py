"""Arrow columns that a filter accepts, including sliced columns and nulls."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import pytest

from librmq.errors import MissingExtraError
from librmq.filter import SqlFilter
from librmq.filter.parser import JavaLong
from librmq.java.lang import java_int, java_long, parse_double
from tests.budget import some
from tests.filter.typed_columns import REFUSED, TYPED_CASES

pa = pytest.importorskip("pyarrow")

MAPS = pa.map_(pa.string(), pa.string())
ROWS: list[dict[str, str] | None] = [{"a": "7"}, None, {}, {"b": "x", "a": "3"}, {"a": "x"}, {"a": "9", "b": "x"}]
SQL = SqlFilter("a > 5 OR b = 'x'")


def maps(rows: list[dict[str, str] | None]) -> Any:
    return pa.array([None if row is None else list(row.items()) for row in rows], MAPS)


def test_slices_of_maps() -> None:
    whole = maps(ROWS)
    expected = [SQL.matches(row) for row in ROWS]
    for begin in range(len(ROWS) + 1):
        for length in range(len(ROWS) + 1 - begin):
            part = SQL.match_arrow(whole.slice(begin, length))
            assert part.to_pylist() == expected[begin : begin + length]
            assert part.null_count == 0


def test_nothing_under_a_null_map_counts() -> None:
    offsets = pa.array([0, 1, 2], pa.int32())
    array = pa.MapArray.from_arrays(offsets, pa.array(["a", "a"]), pa.array(["7", "7"]), mask=pa.array([True, False]))
    assert SQL.match_arrow(array).to_pylist() == [False, True]


def test_a_name_twice_in_a_map_counts_with_its_last_value() -> None:
    array = pa.array([[("a", "1"), ("a", "7")], [("a", "7"), ("a", "1")]], MAPS)
    assert SQL.match_arrow(array).to_pylist() == [True, False]


def test_as_many_entries_as_rows_but_not_one_each() -> None:
    given: tuple[tuple[list[Any], list[bool]], ...] = (
        ([[("a", "7"), ("a", "1")], []], [False, False]),
        ([[], [("a", "1"), ("a", "7")]], [False, True]),
        ([[("a", "7")], [("a", "7")]], [True, True]),
        ([[("a", "7")], [("a", None)]], [True, False]),
        ([[("a", "7")], None], [True, False]),
        ([[("c", "7"), ("a", "7")], [("a", "1")], [("a", "7"), ("c", "7")]], [True, False, True]),
    )
    for rows, expected in given:
        array = pa.array(rows, MAPS)
        assert SQL.match_arrow(array).to_pylist() == expected
        assert SQL.match_arrow(array.slice(1)).to_pylist() == expected[1:]
    offsets, texts = pa.array([0, 1, 2], pa.int32()), pa.array(["7", "7"])
    nulls = pa.MapArray.from_arrays(offsets, pa.array(["a", "a"]), texts, mask=pa.array([True, False]))
    assert SqlFilter("a IS NOT NULL AND a > 5").match_arrow(nulls).to_pylist() == [False, True]


@pytest.mark.slow
def test_every_short_text_is_read_as_a_number_of_java() -> None:
    """Each string gets its own column, so that others that need more care do not affect how it is read."""
    from librmq.filter import _arrow_backend as arrow_backend

    readings = ((int, java_int), (JavaLong, java_long))
    for length in range(4):
        for letters in some([*product("-./05e+x", repeat=length)]):
            text = "".join(letters)
            column = pa.array(["", text, text]).slice(1, 1)
            for kind, parse in readings:
                numbers, _ = arrow_backend.integers_of(column, kind)
                assert numbers.to_pylist() == [parse(text)], text
            numbers, _ = arrow_backend.doubles_of(column)
            assert repr(numbers.to_pylist()) == repr([parse_double(text)]), text


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_kinds_of_texts(kind: Any) -> None:
    given = ["7", None, "+6", "\u0669", "x", "0x7"]
    batch = pa.RecordBatch.from_arrays([pa.array(given, pa.string()).cast(kind)], names=["a"])
    sql = SqlFilter("a > 5 AND a < 3000000000 AND (a > 5.5 OR a = a)")
    assert sql.match_arrow(batch).to_pylist() == [sql.matches({"a": text} if text else {}) for text in given]
    hexadecimal = SqlFilter("a > 5.5 OR a IN ('x', 'y') OR b > a")
    expected = [hexadecimal.matches({"a": text} if text else {}) for text in given]
    assert hexadecimal.match_arrow(batch).to_pylist() == expected


def test_texts_that_begin_alike() -> None:
    texts = ["abcdefgh", "abcdefgh1", "abcdefgh2", "abcdefg", None, "", "a", "ab"]
    for given, text in product((texts, texts[3:]), ("abcdefgh", "abcdefgh1", "abcdefg", "", "a", "ab")):
        sql = SqlFilter(f"name_of_it = '{text}'")
        expected = [value == text for value in given]
        whole = pa.array([value and [("name_of_the", "x"), ("name_of_it", value)] for value in given], MAPS)
        if text:
            assert sql.match_arrow(whole).to_pylist() == expected
        batch = pa.RecordBatch.from_arrays([pa.array(given)], names=["name_of_it"])
        assert sql.match_arrow(batch).to_pylist() == expected
        assert sql.match_arrow(batch.slice(1)).to_pylist() == expected[1:]


def test_large_maps_and_dictionaries_in_maps() -> None:
    names = pa.array(["a", "b", "a"]).dictionary_encode()
    array = pa.MapArray.from_arrays(
        pa.array([0, 2, 3], pa.int32()), names, pa.array(["1", "x", "7"], pa.large_string())
    )
    assert SQL.match_arrow(array).to_pylist() == [True, True]


def test_hexadecimal_doubles_are_rounded_once() -> None:
    from librmq.filter._arrow_backend import doubles_of

    texts = [
        *("0x1.00000000000008p0", "0x1.000000000000080000001p0", "0x1.00000000000018p0", "0x1.00000000000017fffffp0"),
        *(
            "0x0.8p-1074",
            "0x0.80000000000000000001p-1074",
            "0x1.8p-1074",
            "0x2.8p-1074",
            "0x2.80000000000000000001p-1074",
        ),
        *("0x1p-1075", "0x1.0000000000001p-1075", "0x0.fffffffffffff8p-1022", "0x0.fffffffffffff4p-1022"),
        *(
            "0x1.fffffffffffff7p1023",
            "0x1.fffffffffffff8p1023",
            "-0x1p1024",
            "0x0p99999999999",
            "-0x.0p0",
            "0x1p-99999999999",
        ),
        *(
            "0xfffffffffffff800p0",
            "0xfffffffffffffbffp0",
            "0x00000000000000000000.1p4f",
            "0X1P+3D",
            "0x1",
            "0x.p1",
            "0x1p",
        ),
    ]
    numbers, _ = doubles_of(pa.array(texts))
    assert list(map(repr, numbers.to_pylist())) == [repr(parse_double(text)) for text in texts]


def test_columns_that_are_not_there() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["7", "1"]), pa.nulls(2)], names=["a", "b"])
    assert SQL.match_arrow(batch).to_pylist() == [True, False]
    assert SqlFilter("c IS NULL").match_arrow(batch).to_pylist() == [True, True]
    assert SqlFilter("TRUE").match_arrow(batch).to_pylist() == [True, True]
    assert SqlFilter("FALSE").match_arrow(batch.slice(0, 0)).to_pylist() == []


def test_columns_count_as_the_text_of_senders() -> None:
    for case in TYPED_CASES:
        batch = pa.RecordBatch.from_arrays([pa.array([case.value], case.arrow or None)], names=["a"])
        if case.text is REFUSED:
            with pytest.raises(TypeError, match=r"column 'a': expected strings, integers or booleans, got .*; cast it"):
                SqlFilter(case.expression).match_arrow(batch)
        else:
            expected = SqlFilter(case.expression).matches({} if case.text is None else {"a": case.text})
            assert SqlFilter(case.expression).match_arrow(batch).to_pylist() == [expected], case


def test_other_columns_are_refused() -> None:
    with pytest.raises(TypeError, match="map array"):
        SQL.match_arrow(pa.array(["x"]))
    with pytest.raises(TypeError, match="values of the map"):
        SQL.match_arrow(pa.array([[("a", 1.5)]], pa.map_(pa.string(), pa.float64())))
    with pytest.raises(TypeError, match="more than one column"):
        SQL.match_arrow(pa.RecordBatch.from_arrays([pa.array(["1"]), pa.array(["x"])], names=["a", "a"]))


@pytest.mark.slow
def test_more_rows_than_are_worked_on_at_a_time() -> None:
    given = [{"a": str(number % 11), "b": "x" * (number % 3)} for number in range(70_000)]
    expected = [SQL.matches(row) for row in given]
    assert SQL.match_arrow(maps(list(given))).to_pylist() == expected
    columns = [pa.array([row[name] for row in given]) for name in ("a", "b")]
    assert SQL.match_arrow(pa.RecordBatch.from_arrays(columns, names=["a", "b"])).to_pylist() == expected
    with pytest.raises(TypeError, match="map array"):
        SQL.match_arrow(pa.array(["x"] * 70_000))


def test_without_pyarrow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "librmq.filter._arrow_backend", raising=False)
    with pytest.raises(MissingExtraError, match=r"librmq\[arrow\]"):
        SQL.match_arrow(maps(ROWS))
