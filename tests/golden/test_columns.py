"""The recorded stores read as Arrow in every way; the rows equal the recorded ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from librmq.columns import dataset, reader
from librmq.columns.decoding import TYPES, columns_of
from tests.golden.recorded import expected, of_record
from tests.reference import rows, store_folders

EVERY = [name for name in TYPES if name not in ("tagsCode", "store", "_corrupt_record")]
ALL_TOPICS = re.compile("(?s).*")


def by_polars(store: Path, **settings: Any) -> list[Any]:
    polars = pytest.importorskip("polars")
    return list(polars.scan_pyarrow_dataset(dataset(store, **settings)).collect().to_arrow().to_pylist())


def by_duckdb(store: Path, **settings: Any) -> list[Any]:
    duckdb = pytest.importorskip("duckdb")
    duckdb.execute("SET TimeZone = 'UTC'")
    found = duckdb.from_arrow(dataset(store, **settings)).to_arrow_table()
    return list(found.to_pylist())


def by_url(store: Path, **settings: Any) -> list[Any]:
    pytest.importorskip("fsspec")
    return list(reader(f"local://{store}", **settings).read_all().to_pylist())


FORMS: dict[str, Callable[..., list[Any]]] = {
    "reader": lambda store, **settings: reader(store, **settings).read_all().to_pylist(),
    "dataset": lambda store, **settings: dataset(store, **settings).to_table().to_pylist(),
    "duckdb": by_duckdb,
    "polars": by_polars,
    "url": by_url,
}


@pytest.fixture(params=FORMS)
def read(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    return FORMS[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("folder", store_folders())
def test_the_log_is_the_recorded_one(folder: Path, read: Callable[..., list[Any]]) -> None:
    columns = [name for name in EVERY if read is not FORMS["polars"] or name != "properties"]  # polars has no maps
    found = read(folder / "store", view="log", columns=columns)
    wanted = rows(folder, "message")
    assert [row["physicalOffset"] for row in found] == [row["phys"] for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        ours.setdefault("properties", theirs["properties"])
        record = of_record(ours)
        assert record == expected(theirs, record)


@pytest.mark.slow
@pytest.mark.parametrize("folder", store_folders())
def test_the_queues_are_the_recorded_ones(folder: Path, read: Callable[..., list[Any]]) -> None:
    found = read(folder / "store", view="queues")
    wanted = sorted(rows(folder, "cq"), key=lambda row: (row["topic"], row["queue_id"], row["offset"]))
    assert sorted(tuple(row.values()) for row in found) == [
        (row["topic"], row["queue_id"], row["offset"], row["phys"], row["size"], row["tags_code"]) for row in wanted
    ]


@pytest.mark.slow
@pytest.mark.parametrize("folder", store_folders())
def test_messages_are_those_that_queue_entries_point_to(folder: Path, read: Callable[..., list[Any]]) -> None:
    names = sorted(columns_of("queues") - {"store", "_corrupt_record"})
    found = read(folder / "store", topic=ALL_TOPICS, columns=names)
    queues = {(row["topic"], row["queue_id"], row["offset"]): row for row in rows(folder, "cq")}
    assert len(found) == len(queues)
    for row in found:
        entry = queues[row["topic"], row["queueId"], row["queueOffset"]]
        assert (row["physicalOffset"], row["size"], row["tagsCode"]) == (
            entry["phys"],
            entry["size"],
            entry["tags_code"],
        )
