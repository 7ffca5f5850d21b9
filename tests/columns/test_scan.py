"""A store as record batches, without Spark."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig
from tests.programs import run_program

pytest.importorskip("pyarrow")

from librmq.columns import DataLossError, ReadOptions, ReadSelection, plan, scan
from librmq.columns.options import View


@pytest.fixture
def path(tmp_path: Path) -> str:
    with MessageStore.open(tmp_path / "s", StoreConfig.tiny(), clock=ManualClock(1_700_000_000_000)) as store:
        for number in range(40):
            store.append(Message("AB"[number % 2], b"%d" % number, tags=f"t{number % 4}"), number // 2 % 2)
    return str(tmp_path / "s")


def test_scan_reads_only_the_requested_rows(path: str) -> None:
    def bodies(options: ReadOptions) -> list[int]:
        return sorted(int(body) for batch in scan(options, ["body"]) for body in batch.column("body").to_pylist())

    assert bodies(ReadOptions((path,))) == list(range(40))
    assert bodies(ReadOptions((path,), view="log", min_partitions=3)) == list(range(40))
    assert bodies(ReadOptions((path,), selection=ReadSelection(topics=frozenset("B"), queue_ids=frozenset((1,))))) == [
        number for number in range(40) if number % 2 and number // 2 % 2
    ]
    assert bodies(ReadOptions((path,), selection=ReadSelection(tags="t3"))) == list(range(3, 40, 4))
    assert bodies(ReadOptions((path,), starting={"A": {"0": 9, "1": -1}}, ending={"B": {"0": 0, "1": 0}})) == [36]
    (batch,) = scan(ReadOptions((path,), selection=ReadSelection(topics=frozenset("A"))))
    assert batch.schema.names[:4] == ["topic", "queueId", "queueOffset", "physicalOffset"]


def test_a_plan_has_the_wanted_number_of_parts(path: str, tmp_path: Path) -> None:
    """Also if one queue has nearly all messages, and another store only one."""
    with MessageStore.open(path) as store:
        for _ in range(1500):
            store.append(Message("A", b""), 0)
    with MessageStore.open(tmp_path / "small", StoreConfig.tiny()) as store:
        store.append(Message("A", b"other"), 0)
    for view in get_args(View):
        options = ReadOptions((path, str(tmp_path / "small")), view=view, min_partitions=1000)
        assert 1000 <= len(plan(options)) <= 1001


def test_offsets_that_are_not_there(path: str) -> None:
    options = ReadOptions((path,), starting={"A": {"0": 99}})
    with pytest.raises(DataLossError, match="expected offset 99, found 0 to 10"):
        list(scan(options))


@pytest.mark.slow
def test_columns_and_reports_know_no_spark(path: str) -> None:
    code = (
        "import sys; from librmq.columns import ReadOptions, scan; "
        f"assert sum(batch.num_rows for batch in scan(ReadOptions(({path!r},)))) == 40; "
        f"from librmq.diagnosis import report; assert report({path!r}).stores[0].records == 40; "
        "assert not {'pyspark', 'pandas', 'librmq.spark'} & set(sys.modules)"
    )
    done = run_program(code)
    assert not done.returncode, done.stderr
