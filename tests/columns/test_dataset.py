"""A store as a dataset: filters that are pushed down select the same rows as filters applied afterwards."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from librmq import ManualClock, Message, MessageStore, StoreConfig

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from librmq.columns import dataset, reader
from tests.budget import examples
from tests.programs import run_program

START_MS = 1_700_000_000_000
COUNT = 900
COLUMNS = ["topic", "queueId", "queueOffset", "physicalOffset", "storeTimestamp", "tags", "keys", "body", "sysFlag"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "s"
    clock = ManualClock(START_MS)
    with MessageStore.open(folder, StoreConfig.tiny(), clock=clock) as store:
        for number in range(COUNT):
            clock.advance(ms=number % 3)
            topic = "Seldom" if number % 50 == 0 else "AB"[number % 2]
            tags = (None, "x", "it's")[number % 3]
            store.append(Message(topic, b"%d" % number, tags=tags, keys=f"k{number % 7}"), number % 5)
    return folder


@pytest.fixture(scope="module")
def table(path: Path) -> pa.Table:
    return reader(path, columns=COLUMNS).read_all()


def time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp((START_MS + milliseconds) / 1000, UTC)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "topic": st.sampled_from(["A", "B", "Seldom", "Nowhere", ""]),
    "queueId": st.integers(-1, 6),
    "queueOffset": st.integers(-1, 120),
    "physicalOffset": st.integers(0, 150_000),
    "storeTimestamp": st.integers(0, COUNT).map(time),
    "tags": st.sampled_from(["x", "it's", "none"]),
    "keys": st.sampled_from(["k1", "k6"]),
    "body": st.sampled_from([b"17", b"600"]),
}
Condition = tuple[str, str, Any]
CONDITIONS = st.sampled_from(sorted(VALUES)).flatmap(
    lambda name: st.one_of(
        st.tuples(st.just(name), st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), VALUES[name]),
        st.tuples(st.just(name), st.just("in"), st.lists(VALUES[name], min_size=1, max_size=4)),
        st.tuples(st.just(name), st.sampled_from(["is null", "is not null"]), st.none()),
    )
)
TREES: st.SearchStrategy[Any] = st.recursive(
    CONDITIONS,
    lambda below: st.one_of(
        st.tuples(st.just("and"), below, below),
        st.tuples(st.just("or"), below, below),
        st.tuples(st.just("not"), below),
    ),
    max_leaves=5,
)


def as_arrow(tree: Any) -> pc.Expression:
    if tree[0] == "and":
        return as_arrow(tree[1]) & as_arrow(tree[2])
    if tree[0] == "or":
        return as_arrow(tree[1]) | as_arrow(tree[2])
    if tree[0] == "not":
        return ~as_arrow(tree[1])
    name, operator, value = tree
    field = pc.field(name)
    if operator == "in":
        return field.isin(pa.array(value, pa.timestamp("us", "UTC") if name == "storeTimestamp" else None))
    if operator == "is null":
        return field.is_null()
    if operator == "is not null":
        return field.is_valid()
    compare: dict[str, Callable[[Any, Any], pc.Expression]] = {
        "=": lambda a, b: a == b,
        "<>": lambda a, b: a != b,
        "<": lambda a, b: a < b,
        "<=": lambda a, b: a <= b,
        ">": lambda a, b: a > b,
        ">=": lambda a, b: a >= b,
    }
    return compare[operator](field, pa.scalar(value))


def literal(value: Any) -> str:
    if isinstance(value, datetime):
        return f"TIMESTAMPTZ '{value.isoformat()}'"
    if isinstance(value, bytes):
        return f"'{value.decode()}'::BLOB"
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def as_sql(tree: Any) -> str:
    if tree[0] in ("and", "or"):
        return f"({as_sql(tree[1])} {tree[0]} {as_sql(tree[2])})"
    if tree[0] == "not":
        return f"(not {as_sql(tree[1])})"
    name, operator, value = tree
    if operator == "in":
        return f"{name} in ({', '.join(map(literal, value))})"
    return f"{name} {operator}" if value is None else f"{name} {operator} {literal(value)}"


def names(tree: Any) -> set[str]:
    """Return the columns of a filter."""
    if tree[0] in ("and", "or", "not"):
        return set().union(*map(names, tree[1:]))
    return {tree[0]}


def places(found: pa.Table) -> list[int]:
    return sorted(found.column("physicalOffset").to_pylist())


@settings(max_examples=examples(30))
@given(tree=TREES)
def test_filters_of_other_views_select_the_same(path: Path, table: pa.Table, tree: Any) -> None:
    assert places(reader(path, view="log", filter=as_arrow(tree)).read_all()) == places(table.filter(as_arrow(tree)))
    entries = reader(path, view="queues").read_all()
    if not {"storeTimestamp", "tags", "keys", "body"} & names(tree):
        assert places(reader(path, view="queues", filter=as_arrow(tree)).read_all()) == places(
            entries.filter(as_arrow(tree))
        )


@pytest.mark.slow
@settings(max_examples=examples(30))
@given(tree=TREES)
def test_arrow_pushes_filters_down(path: Path, table: pa.Table, tree: Any) -> None:
    wanted = places(table.filter(as_arrow(tree)))
    found = dataset(path)
    assert places(found.to_table(filter=as_arrow(tree), columns=["physicalOffset"])) == wanted
    assert places(reader(path, filter=as_arrow(tree)).read_all()) == wanted
    assert found.count_rows(filter=as_arrow(tree)) == len(wanted)


@settings(max_examples=examples(30))
@given(tree=TREES)
def test_duckdb_pushes_filters_down(path: Path, table: pa.Table, tree: Any) -> None:
    duckdb = pytest.importorskip("duckdb")
    asked = f"SELECT physicalOffset FROM {{}} WHERE {as_sql(tree)}"
    with duckdb.connect() as connection:
        connection.register("pushed", dataset(path))
        connection.register("plain", table)
        found, wanted = (places(connection.sql(asked.format(name)).to_arrow_table()) for name in ("pushed", "plain"))
    assert found == wanted


@pytest.mark.slow
@settings(max_examples=examples(30))
@given(tree=TREES)
def test_polars_pushes_filters_down(path: Path, table: pa.Table, tree: Any) -> None:
    polars = pytest.importorskip("polars")

    def of(tree: Any) -> Any:
        if tree[0] in ("and", "or"):
            return of(tree[1]) & of(tree[2]) if tree[0] == "and" else of(tree[1]) | of(tree[2])
        if tree[0] == "not":
            return ~of(tree[1])
        name, operator, value = tree
        column = polars.col(name)
        if operator == "in":
            return column.is_in(value)
        methods = {"=": "eq", "<>": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge", "is null": "is_null",
                   "is not null": "is_not_null"}  # fmt: skip
        return getattr(column, methods[operator])(*([] if value is None else [value]))

    # When Polars pushes down ``NOT IN``, it counts a null as a match, for any dataset.
    found, wanted = (
        polars.scan_pyarrow_dataset(one).filter(of(tree)).select("physicalOffset").collect().to_arrow()
        for one in (dataset(path, columns=COLUMNS), ds.dataset(table))
    )
    assert places(found) == places(wanted)


def test_a_dataset_is_read_repeatedly(path: Path, table: pa.Table) -> None:
    found = dataset(path, columns=COLUMNS)
    assert found.schema == table.schema
    assert found.to_table().equals(table)
    assert found.to_table().equals(table)
    assert found.head(3).equals(table.slice(0, 3))
    assert found.count_rows() == len(table)
    assert pa.Table.from_batches(found.to_batches(columns=["keys"])).equals(table.select(["keys"]))
    assert pickle.loads(pickle.dumps(found)).to_table().equals(table)
    doubled = found.to_table(columns={"twice": pc.field("queueOffset") * 2})
    assert doubled.column("twice").to_pylist() == [2 * one for one in table.column("queueOffset").to_pylist()]


ENDS_EARLY = """
import sys
import duckdb
from librmq import columns
store = columns.dataset(sys.argv[1])
print(duckdb.sql("SELECT topic FROM store LIMIT 3").fetchall())
"""


@pytest.mark.slow
def test_a_process_ends_after_a_query_with_a_limit(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    with MessageStore.open(tmp_path / "s", StoreConfig.tiny()) as store:
        for number in range(5_000):
            store.append(Message("T", bytes(3_000)), number % 4)
    run = run_program(ENDS_EARLY, tmp_path / "s")
    assert (run.returncode, run.stdout.split()) == (0, ["[('T',),", "('T',),", "('T',)]"])


def test_filters_of_a_dataset_add_up(path: Path, table: pa.Table) -> None:
    found = dataset(path, topic="A", filter=pc.field("queueId") > 1).filter(pc.field("queueOffset") < 9)
    wanted = (pc.field("topic") == "A") & (pc.field("queueId") > 1) & (pc.field("queueOffset") < 9)
    assert places(found.to_table(filter=pc.field("tags") == "x")) == places(
        table.filter(wanted & (pc.field("tags") == "x"))
    )
    assert pickle.loads(pickle.dumps(found)).count_rows() == len(table.filter(wanted))


@pytest.mark.parametrize("method", ["get_fragments", "sort_by", "join", "join_asof"])
def test_methods_that_need_files_of_a_dataset_are_refused(path: Path, method: str) -> None:
    with pytest.raises(NotImplementedError, match="to_table"):
        getattr(dataset(path), method)("queueOffset")
