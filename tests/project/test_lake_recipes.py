"""The example for Delta Lake and Iceberg: with batches of messages in place of a stream, and by Spark."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from librmq import Message, MessageStore, StoreConfig
from tests.programs import example

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from librmq import columns


def recipe(name: str, folder: Path) -> Any:
    """Return a function of the example, whose tables are in ``folder``."""
    return partial(getattr(example("spark/lake_tables"), name), folder=str(folder))


def to_delta(folder: Path) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(f"{folder}/messages").to_pyarrow_table()


def to_iceberg(folder: Path) -> Any:
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("local", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse")
    return catalog.load_table("lake.messages").scan().to_arrow()


@pytest.mark.slow  # the packages are those of the whole check
@pytest.mark.parametrize(("package", "read"), [("deltalake", to_delta), ("pyiceberg", to_iceberg)])
def test_a_batch_that_comes_again_changes_nothing(tmp_path: Path, package: str, read: Any) -> None:
    pytest.importorskip(package)
    store = tmp_path / "store"
    with MessageStore.open(store, StoreConfig.tiny()) as opened:
        for number in range(30):
            opened.append(Message("A", b"%d" % number, keys=f"k{number}"))
    wanted = ["topic", "queueId", "queueOffset", "keys", "properties", "storeTimestamp", "body"]
    (tmp_path / "warehouse").mkdir()
    write = recipe(read.__name__, tmp_path)

    def parquet(folder: str) -> None:
        Path(folder).mkdir(parents=True)  # a file of a table is never replaced
        for part in (0, 5):
            pq.write_table(rows.slice(part, 5), f"{folder}/part-{part}.parquet")

    batch = SimpleNamespace(write=SimpleNamespace(mode=lambda mode: SimpleNamespace(parquet=parquet)))
    for number in (0, 1, 1, 0, 2):
        rows = columns.reader(store, offsets=range(10 * number, 10 * number + 10), columns=wanted).read_all()
        write(batch, number)
    found = read(tmp_path)
    assert found.column_names == wanted
    assert sorted(int(body) for body in found["body"].to_pylist()) == list(range(30))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(("package", "read"), [("deltalake", to_delta), ("pyiceberg", to_iceberg)])
def test_a_stream_of_spark_into_a_table(tmp_path: Path, package: str, read: Any) -> None:
    """Also if Spark repeats a batch that the table has."""
    pytest.importorskip(package)
    pytest.importorskip("pyspark")
    kind = read.__name__.removeprefix("to_")
    for first in (0, 30):
        with MessageStore.open(tmp_path / "store", StoreConfig.tiny()) as opened:
            for number in range(first, first + 30):
                opened.append(Message("A", b"%d" % number, keys=f"k{number}", properties={"a": "b"}), number % 3)
        for _ in range(2):
            assert example("spark/lake_tables").main([str(tmp_path / "store"), kind, str(tmp_path)]) == 0
            last = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda one: int(one.name))
            last.unlink()
            last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
        assert sorted(int(body) for body in read(tmp_path)["body"].to_pylist()) == list(range(first + 30))
