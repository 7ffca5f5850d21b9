"""The JSON of the broker's config files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq.errors import MalformedError
from librmq.java.json import NumberColumns, NumberRows, ObjectKey, dumps, loads
from tests.budget import examples

QUEUE = {"brokerName": "broker-a", "queueId": 0, "topic": "T"}

OFFSETS = """{
\t"offsetTable":{
\t\t"T@g":{0:21,1:0,-1:5
\t\t},
\t\t"消息@g":{}
\t}
}"""

BROADCAST = """{
\t"offsetTable":{{
\t\t\t"brokerName":"broker-a",
\t\t\t"queueId":0,
\t\t\t"topic":"T"
\t\t}:4,{
\t\t\t"brokerName":"broker-a",
\t\t\t"queueId":1,
\t\t\t"topic":"T"
\t\t}:5
\t}
}"""


def test_bare_numbers_as_keys() -> None:
    value = loads(OFFSETS)
    assert value == {"offsetTable": {"T@g": {0: 21, 1: 0, -1: 5}, "消息@g": {}}}
    assert dumps(value) == OFFSETS


def test_objects_as_keys() -> None:
    value = loads(BROADCAST)
    key, other = value["offsetTable"]
    assert dict(key) == QUEUE
    assert key == ObjectKey(QUEUE.items())
    assert value["offsetTable"][ObjectKey(QUEUE.items())] == 4
    assert dict(other)["queueId"] == 1
    assert dumps(value) == BROADCAST


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "{}"),
        ([], "[]"),
        ((), "[]"),
        ("", '""'),
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (-(2**63), "-9223372036854775808"),
        (1.5, "1.5"),
        ([22, 7, 106], "[22,7,106]"),
        ({"bits": [1, 2], "dead": False}, '{\n\t"bits":[1,2],\n\t"dead":false\n}'),
        (["a", {"b": None}], '[\n\t"a",\n\t{\n\t\t"b":null\n\t}\n]'),
        ([[1], []], "[\n\t[1],\n\t[]\n]"),
        ({1: {2: 3}}, "{1:{2:3\n\t}\n}"),
        ({"a": 1, 2: 3, "b": 4}, '{\n\t"a":1,2:3,\n\t"b":4\n}'),
        ({"1": 1, 1: 2}, '{\n\t"1":1,1:2\n}'),
        ('"\\/\b\f\n\r\t', '"\\"\\\\/\\b\\f\\n\\r\\t"'),
        (
            "\0\x0b\x1f\x7f\x9f\xa0\u2028\u2029é中\U0001f600",
            '"\\u0000\\u000B\\u001F\\u007F\\u009F\xa0\\u2028\\u2029é中\U0001f600"',
        ),
        ({"\n": 1}, '{\n\t"\\n":1\n}'),
    ],
)
def test_there_and_back(value: object, text: str) -> None:
    assert dumps(value) == text
    read = loads(text)
    assert read == (list(value) if isinstance(value, tuple) else value)
    assert dumps(read) == text
    assert loads(text.encode()) == read


def test_other_white_space_and_escapes_are_read() -> None:
    assert loads(' {\r\n"a" : [ 1 , 2 ] , 0 :\t{ } }\n') == {"a": [1, 2], 0: {}}
    assert loads('"\\u00e9\\ud83d\\ude00\\/"') == "é\U0001f600/"
    assert loads("[0, -0, 1e3, -1.5E-2, 0.0]") == [0, 0, 1000.0, -0.015, 0.0]


def test_of_equal_keys_the_last_wins() -> None:
    assert loads('{"a":1,"a":2,0:3,0:4}') == {"a": 2, 0: 4}


def test_rows_of_numbers_are_read_when_they_are_asked_for() -> None:
    text = '{"t":{"a@g":{0:1,2:3} ,\n"b@g":{0:-5},"a@h":{7:8}}, "u":{"a@g":{0:1}}}'
    value = loads(text, rows_of="t")
    rows = value["t"]
    assert isinstance(rows, NumberRows)
    assert {"t": rows.as_dict(), "u": value["u"]} == loads(text)
    columns = rows.columns()
    parts = {("a", "g"): {0: 1, 2: 3}, ("b", "g"): {0: -5}, ("a", "h"): {7: 8}}
    named = {"@".join(name): row for name, row in parts.items()}
    assert {name: rows.get(name) for name in (*named, "a", "a@g@")} == {**named, "a": None, "a@g@": None}
    for read in (columns, NumberColumns.of({"@": {0: 1}, **named, "a@": {0: 1}, "a@g@h": {0: 1}})):
        assert read.rows() == parts
        assert read.names == (["a", "b"], ["g", "h"])
        assert [column.tolist() for column in read.parts] == [[0, 1, 0], [0, 0, 1]]
        assert [column.tolist() for column in read[2:5]] == [[2, 1, 1], [0, 2, 0, 7], [1, 3, -5, 8]]
    some = columns.chosen(columns.parts[0] == 0)
    assert [column.tolist() for column in some[2:5]] == [[2, 1], [0, 2, 7], [1, 3, 8]]
    assert columns.named(0, {"a"}).rows() == some.rows()
    assert columns.named(1, {"h", "x"}).rows() == {("a", "h"): {7: 8}}
    assert NumberColumns.of({}).rows() == {}


def test_columns_of_changed_rows_are_those_of_all_rows() -> None:
    rows: dict[str, dict[int, int]] = {"a@g": {0: 1}, "b@g": {}, "a@h": {0: 2, 1: 3}}
    columns = NumberColumns.of(rows)
    changes: list[tuple[str, dict[int, int]]] = [("a@g", {0: 5}), ("b@g", {3: 7}), ("a@h", {1: 4}), ("c@h", {1: 1})]
    for name, row in changes:
        rows[name] = row
        columns = NumberColumns.of(rows, columns)
        assert columns.rows() == NumberColumns.of(rows).rows() == {tuple(key.split("@")): rows[key] for key in rows}
        assert NumberColumns.of({}, columns).rows() == {}


@pytest.mark.parametrize("rows", ['"a":{0:1}', '"a@b@c":{0:1}', '"a@g":{}', '"a@g":{0:1},"b@g":{}', '"a@g":1', ""])
def test_other_rows_are_read_at_once(rows: str) -> None:
    text = f'{{"t":{{{rows}}}}}'
    assert loads(text, rows_of="t") == loads(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1, column 1: expected a value, found the end"),
        ("  \n", "line 2, column 1: expected a value, found the end"),
        ("{", "line 1, column 2: expected a key, found the end"),
        ('{"a"\n:\n  ?}', "line 3, column 3: expected a value, found '?}'"),
        ('{"a"}', "line 1, column 5: expected ':', found '}'"),
        ('{"a":1', "line 1, column 7: expected ',' or '}', found the end"),
        ('{"a":1 "b":2}', "line 1, column 8: expected ',' or '}', found"),
        ('{"a":1,}', "line 1, column 8: expected a key, found '}'"),
        ('{"a@b":{0:1},}', "line 1, column 14: expected a key, found '}'"),
        ("[1,]", "line 1, column 4: expected a value, found ']'"),
        ("[1}", "line 1, column 3: expected ',' or ']', found '}'"),
        ("{}x", "line 1, column 3: expected the end, found 'x'"),
        ("nul", "line 1, column 1: expected a value, found 'nul'"),
        ("NaN", "line 1, column 1: expected a value, found 'NaN'"),
        ("-", "line 1, column 1: expected a value, found '-'"),
        ("01", "line 1, column 2: expected the end, found '1'"),
        ("\uff11", "line 1, column 1: expected a value"),
        ("9223372036854775808", "line 1, column 1: expected a number of 64 bits"),
        ("9" * 5000, "line 1, column 1: expected a number of 64 bits"),
        ("1e999", "line 1, column 1: expected a number of 64 bits"),
        ("{a:1}", "line 1, column 2: expected a key, found 'a:1}'"),
        ("{'a':1}", "line 1, column 2: expected a key"),
        ("{true:1}", "line 1, column 2: expected a key"),
        ("{1.5:2}", "line 1, column 2: expected a whole number as a key, found '1.5:2}'"),
        ('{{"a":[]}:1}', "line 1, column 2: expected an object of plain values as a key"),
        ("{{0:1}:1}", "line 1, column 2: expected an object of plain values as a key"),
        ('"abc', "line 1, column 1: expected text, found unterminated string starting"),
        ('"a\nb"', "line 1, column 3: expected text, found invalid control character"),
        ('"\\x"', "line 1, column 2: expected text, found invalid \\escape"),
        ('"\\ud800"', "line 1, column 1: expected text, found half a surrogate pair in it"),
        ("[" * 65 + "]" * 65, "line 1, column 65: expected less than 64 levels"),
        ('{"a":' * 100_000, "line 1, column 321: expected less than 64 levels"),
        ('{"a":' * 64 + '{0:1},"b":{0:1}', "line 1, column 321: expected less than 64 levels"),
        ("{" * 100_000, "line 1, column 65: expected less than 64 levels"),
        ("\ufeff{}", "line 1, column 1: expected a value"),
        (b'{"\xff":1}', "byte 2 is not UTF-8"),
    ],
)
def test_errors_name_their_position(text: str | bytes, reason: str) -> None:
    with pytest.raises(MalformedError) as caught:
        loads(text)
    assert str(caught.value).startswith(reason)


def test_64_levels_are_read_and_written() -> None:
    text = "[\n" * 63 + "[]" + "]" * 63
    value = loads(text)
    assert loads(dumps(value)) == value
    with pytest.raises(MalformedError, match="at most 64 deep"):
        dumps([value])


@pytest.mark.parametrize(
    "value", [b"x", {1.5: 1}, {True: 1}, {None: 1}, {("a", 1): 1}, {"a": {1, 2}}, float("nan"), [float("inf")]]
)
def test_values_without_a_json_form_are_refused(value: object) -> None:
    with pytest.raises(MalformedError, match="expected"):
        dumps(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(MalformedError, match="at most 64 deep"):
        dumps(value)


def test_tables_of_numbers_are_read_at_once_as_pair_by_pair() -> None:
    table = {number: number * 7 for number in range(-3, 1000)}
    pairs = ",".join(f"{key}:{value}" for key, value in table.items())
    assert loads(f"{{{pairs}\n\t}}") == loads(f"{{ {pairs.replace(',', ' , ')} }}") == table
    assert loads("{0:1,0:2}") == {0: 2}
    rows = {f"t{number}@g": {0: number, 1: -number} for number in range(2000)} | {
        "é\n": {0: 1},
        "x": "y",
        "z@g": {2: 3},
    }
    assert loads(dumps({"table": rows})) == loads(dumps({"table": rows}).replace("\t", " \t\n")) == {"table": rows}
    assert loads('{"a":{0:1},"a":{0:2},"b":{}}') == {"a": {0: 2}, "b": {}}
    for wrong in (
        "{0:1,}",
        "{0:01}",
        "{0:1,2}",
        "{0:99999999999999999999}",
        "{0:1",
        '{"a":{0:1},}',
        '{"a":{0:1},',
        '{"a":{0:1},,"b":{0:1}}',
        '{"a":{0:1},"b":{0:01}}',
        '{"a":{0:1},"b"}',
    ):
        with pytest.raises(MalformedError):
            loads(wrong)


TEXTS = (
    st.sampled_from(['"a"', '"é"', '"\\u00e9"', '"\\ud83d\\ude00"', '"\\/"', '"\t"'])
    | st.sampled_from(['"\\ud800"', '"\\uDFFF\\ud800"', '"\ud800"'])
    | st.sampled_from(["0", "-0", "01", "1.5", "1.", "1e400", "-1E400", "1e-400", "NaN", "-Infinity", "true", "nul"])
    | st.sampled_from([str(sign * limit - 1) for limit in (2**53, 10**18, 2**63, 10**19, 10**30) for sign in (1, -1)])
    | st.text(max_size=5).map(json.dumps)
)
KEYS = st.sampled_from(['"a"', '"b"', '"\\u0061"', "1", "-7", '"1"', '{"a":1}'])
SPACES = st.sampled_from(["", " ", "\n\t", "\x0b", "\u00a0"])
DOCUMENTS = st.recursive(
    TEXTS,
    lambda inner: (
        st.builds(lambda items, space: "[" + ("," + space).join(items) + "]", st.lists(inner, max_size=3), SPACES)
        | st.builds(
            lambda pairs, space: "{" + ",".join(f"{key}{space}:{value}" for key, value in pairs) + "}",
            st.lists(st.tuples(KEYS, inner), max_size=3),
            SPACES,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=examples(300), deadline=None)
@given(DOCUMENTS)
def test_plain_json_is_read_as_all_other_text_is(text: str) -> None:
    """A key that is a number lets the whole text be read in the one way that knows such keys."""

    def outcome(text: str) -> str:
        try:
            return repr(loads(text))
        except MalformedError:
            return "refused"

    expected = outcome('{0:"","value":' + text + "}")
    found = outcome(text)
    assert expected == (found if found == "refused" else f"{{0: '', 'value': {found}}}")


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_plain_json_is_as_deep_as_other_text(opening: str) -> None:
    closing = opening.translate({ord("["): "]", ord("{"): "}", ord('"'): None, ord("a"): None, ord(":"): None})[::-1]
    levels = opening.count("[") + opening.count("{")
    most = 64 // levels
    assert str(loads(opening * (most - 1) + "0" + closing * (most - 1))).count("0") == 1
    with pytest.raises(MalformedError, match="less than 64 levels"):
        loads(opening * (most + 1) + "0" + closing * (most + 1))
