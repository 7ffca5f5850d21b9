"""The example for Delta Lake and Iceberg, with batches of messages in place of a stream."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from librmq import Message, MessageStore, StoreConfig
from tests.reference import CHECKOUT

pytest.importorskip("pyarrow")

from librmq import columns


def recipe(name: str, folder: Path) -> Any:
    """Return a function of the example, whose tables are in ``folder``."""
    names = runpy.run_path(str(CHECKOUT / "examples" / "spark" / "lake_tables.py"))
    return partial(names[name], folder=str(folder))


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
    for number in (0, 1, 1, 0, 2):
        rows = columns.reader(store, offsets=range(10 * number, 10 * number + 10), columns=wanted).read_all()
        write(SimpleNamespace(toArrow=lambda rows=rows: rows), number)
    found = read(tmp_path)
    assert found.column_names == wanted
    assert sorted(int(body) for body in found["body"].to_pylist()) == list(range(30))
