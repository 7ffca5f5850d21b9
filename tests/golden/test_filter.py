"""Every recorded filter case with the Python and Arrow back ends; bloom positions, subscriptions, registrations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from librmq.errors import ConfigError, FilterEvaluationError, FilterSyntaxError
from librmq.filter import BROKER_BLOOM, BloomFilter, Registrations, SqlFilter, TagFilter
from librmq.filter._interpreter import explain
from librmq.filter.filters import Compiled, compiled
from librmq.filter.parser import Dialect
from librmq.java import json as java_json
from tests.conftest import Run
from tests.reference import Row, document, encoding, existing, folders, jsonl, store_folders

DIALECTS: list[tuple[str, Dialect]] = [("cases.jsonl", "4.9"), ("cases-5.3.3.jsonl", "5.3")]


def cases(file: str) -> tuple[Row, ...]:
    return jsonl(existing("filter", file))


def compiling(file: str, dialect: Dialect) -> list[tuple[Row, Compiled]]:
    return [(row, compiled(row["expr"], dialect)) for row in cases(file) if row["result"] != "PARSE_ERROR"]


@pytest.mark.parametrize(("file", "dialect"), DIALECTS)
def test_python_agrees_with_the_broker(file: str, dialect: Dialect) -> None:
    for row in cases(file):
        result: Any
        match = None
        try:
            sql = compiled(row["expr"], dialect)
            match = sql.matches(row["props"])
            result = sql.evaluate(row["props"])
        except FilterSyntaxError:
            result = "PARSE_ERROR"
        except FilterEvaluationError as error:
            result = f"EVAL_ERROR:{error.java_name}"
        assert (result, match) == (row["result"], row["match"]), row
        assert type(result) is type(row["result"]), row


@pytest.mark.parametrize(("file", "dialect"), DIALECTS)
def test_strict_refuses_exactly_the_ignored_text(file: str, dialect: Dialect) -> None:
    for row, sql in compiling(file, dialect):
        if sql.selector.ignored_from is None:
            SqlFilter(row["expr"], dialect=dialect, strict=True)
        else:
            with pytest.raises(FilterSyntaxError):
                SqlFilter(row["expr"], dialect=dialect, strict=True)


@pytest.mark.parametrize(("file", "dialect"), DIALECTS)
def test_explanations_agree_with_the_verdict(file: str, dialect: Dialect) -> None:
    verdicts: dict[object, str] = {True: "TRUE", False: "FALSE", None: "UNKNOWN"}
    for row, sql in compiling(file, dialect):
        explanation = explain(sql.selector, row["props"])
        assert explanation.matches is row["match"], row
        assert explanation.verdict == verdicts.get(row["result"], "ERROR"), row
        assert explanation.decided_by
        assert explanation.why in str(explanation)


@pytest.mark.parametrize(("file", "dialect"), DIALECTS)
def test_arrow_answers_every_case_itself(file: str, dialect: Dialect, figure: Callable[[str], None]) -> None:
    pa = pytest.importorskip("pyarrow")
    from librmq.filter._arrow_backend import match_arrow

    answered = 0
    rows = compiling(file, dialect)
    for row, sql in rows:
        properties = row["props"]
        maps = pa.array([properties and list(properties.items()), None, []], pa.map_(pa.string(), pa.string()))
        empty = sql.matches({})
        got = match_arrow(sql.question, maps)
        assert got.type == pa.bool_()
        assert got.to_pylist() == [row["match"], empty, empty], row
        names = sorted(properties or ())
        if names:
            columns = [pa.array([properties[name], None], pa.string()) for name in names]
            batch = pa.RecordBatch.from_arrays(columns, names=names)
            assert match_arrow(sql.question, batch).to_pylist() == [row["match"], empty], row
        answered += 1
    figure(f"filter, Arrow: {answered} of {len(rows)} compiling cases of {file} answered by kernels")
    assert answered == len(rows)


def test_bloom_hashes_and_positions() -> None:
    recorded = document(existing("bloom.json"))
    for row in recorded["filters"]:
        bloom = BloomFilter(row["f"], row["n"])
        assert (bloom.hash_count, bloom.bit_count) == (row["k"], row["m"])
        bitmap = bloom.bitmap()
        for given in row["positions"]:
            positions = bloom.positions(given["str"])
            assert list(positions) == given["bits"], given
            assert bloom.hit(bitmap, positions) is given["hit_before_add"], given
            if given["added"]:
                bloom.add(bitmap, positions)
        if "bits_array_bytes_hex_after_adds" in row:
            assert bitmap.hex() == row["bits_array_bytes_hex_after_adds"]
        if "hit_after_all" in row:
            hits = [bloom.hit(bitmap, bloom.positions(given["str"])) for given in row["positions"]]
            assert hits == row["hit_after_all"]
    for row in recorded["errors"]:
        with pytest.raises(ConfigError):
            BloomFilter(row["f"], row["n"])
    for row in recorded["bits_array"]:
        bitmap = bytearray(row["byte_length"])
        BloomFilter.add(bitmap, row["set"])
        assert bitmap.hex() == row["bytes_hex"]


def test_subscriptions() -> None:
    for row in encoding("subscription"):
        if "error" in row:
            with pytest.raises(FilterSyntaxError):
                TagFilter(row["expr"])
        else:
            tags = TagFilter(row["expr"])
            assert tags.expression == row["sub_string"]
            assert sorted(tags.tags) == row["tags_set"]
            assert sorted(tags.codes) == row["code_set"]


@pytest.mark.parametrize("folder", [*store_folders(), *folders("clients-")])
def test_registrations_are_read_and_written_again(folder: Any) -> None:
    path = folder / "store" / "config" / "consumerFilter.json"
    if not path.exists():
        return  # a store that has no filters
    recorded = java_json.loads(path.read_text("utf-8"))
    entries = [data for topic in recorded["filterDataByTopic"].values() for data in topic["groupFilterData"].values()]
    now_ms = max([data["bornTime"] for data in entries], default=0) + 60_000
    registrations = Registrations()
    assert registrations.load(recorded, now_ms)
    for data in entries:
        # A registration written without a dead time counts as dead since half a minute before it was read.
        data.update(deadTime=data["deadTime"] or now_ms - 30_000, dead=True)
        found = registrations.get(data["topic"], data["consumerGroup"])
        assert found is not None
        assert found.bloom == BROKER_BLOOM.bloom_positions(f"{found.group}#{found.topic}")
        assert found.filter is not None
    assert registrations.to_document(now_ms) == recorded


# The commands ``filter`` and ``bloom`` compared with the answers of RocketMQ.


@pytest.mark.parametrize(("file", "dialect"), [("cases.jsonl", []), ("cases-5.3.3.jsonl", ["--dialect", "5.3"])])
def test_filter(run_lines: Run, file: str, dialect: list[str]) -> None:
    cases = jsonl(existing("filter", file))
    given = [{name: case[name] for name in ("expr", "props") if name in case} for case in cases]
    status, lines, err = run_lines("filter", *dialect, given=given)
    assert (status, err) == (0, "")
    wanted = ("expr", "props", "result", "match")
    assert [json.loads(line) for line in lines] == [
        {name: case[name] for name in wanted if name in case} for case in cases
    ]


def test_bloom(run_lines: Run) -> None:
    filters = document(existing("bloom.json"))["filters"]
    given = [
        {"f": one["f"], "n": one["n"], "strings": [position["str"] for position in one["positions"]]} for one in filters
    ]
    status, lines, err = run_lines("bloom", given=given)
    assert (status, err) == (0, "")
    expected = [
        {
            "k": one["k"],
            "m": one["m"],
            "positions": [{"str": each["str"], "bits": each["bits"]} for each in one["positions"]],
        }
        for one in filters
    ]
    assert [json.loads(line) for line in lines] == expected


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("filter", "{"),
        ("filter", "{}"),
        ("filter", '{"expr": 5}'),
        ("filter", '{"expr": "a = 1", "props": [1]}'),
        ("filter", '{"expr": "a = 1", "props": {"a": 1}}'),
        ("bloom", '{"f": 0, "n": 32, "strings": []}'),
        ("bloom", '{"f": 20, "n": 32, "strings": [5]}'),
    ],
)
def test_bad_input_ends_with_the_answers_before_it(run_lines: Run, command: str, line: str) -> None:
    good = {"filter": '{"expr": "a = 1", "props": null}', "bloom": '{"f": 20, "n": 32, "strings": ["x"]}'}[command]
    status, lines, err = run_lines(command, given=[good, line, good])
    assert (status, len(lines)) == (2, 1)
    assert err.startswith(f"librmq {command}: line 2: ")


def test_an_explanation_is_for_people(run_lines: Run) -> None:
    status, lines, err = run_lines(
        "filter", "--explain", given=[{"expr": "a > 5 AND b = 'x'", "props": {"a": "\x1b7"}}]
    )
    assert (status, err) == (0, "")
    assert "match" in lines[0]
    assert not any("\x1b" in line for line in lines)
    status, lines, err = run_lines("filter", "--explain", given=[{"expr": "a >", "props": {}}])
    assert (status, lines) == (2, [])
    assert err.startswith("librmq filter: line 1: ")
    assert err.splitlines()[-1].strip() == "^"
