"""Stores behind URLs: the same rows as on the disk, and how many bytes are fetched for them."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig
from librmq.cli import main
from librmq.columns.options import View
from librmq.errors import ConfigError, CorruptionError, NotAStoreError, StoreIOError
from tests.s3_server import serving
from tests.stores import put_in_memory

pytest.importorskip("pyarrow")
pytest.importorskip("fsspec")

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

from librmq.columns import RemoteStore, dataset, export, reader

START_MS = 1_700_000_000_000
COUNT = 900
CONFIG = StoreConfig(
    commitlog_file_size=1 << 20, consumequeue_file_size=200_000, max_hash_slot_num=1000, max_index_num=4000
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of 4 MiB of messages a second apart, most of them in topic A, every hundredth in topic B."""
    folder = tmp_path_factory.mktemp("stores") / "s"
    clock = ManualClock(START_MS)
    with MessageStore.open(folder, CONFIG, clock=clock) as store:
        for number in range(COUNT):
            clock.advance(ms=1000)
            topic = "B" if number % 100 == 50 else "A"
            store.append(Message(topic, b"%d " % number * 900, tags=f"t{number % 4}"), number % 2)
    return folder


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    yield put_in_memory(path, "memory://tests/store")
    fsspec.filesystem("memory").store.clear()


@pytest.mark.slow
def test_a_url_is_read_as_the_store_on_the_disk(path: Path, url: str, tmp_path: Path) -> None:
    views: tuple[View, ...] = ("messages", "queues", "log")
    for view in views:
        assert reader(url, view=view).read_all().equals(reader(path, view=view).read_all())
    chosen: list[Any] = [
        {"topic": "B"},
        {"sql": "TAGS = 't1'"},
        {"offsets": range(3, 9)},
        {"view": "log", "topic": "B"},
    ]
    for settings in chosen:
        assert reader(url, **settings).read_all().equals(reader(path, **settings).read_all())
    with pytest.raises(ConfigError, match=f"{path} has the messages of {url}|{url} has the messages of {path}"):
        reader([url, path])
    with MessageStore.open(tmp_path / "other", clock=ManualClock(START_MS + 1)) as store:
        store.append(Message("B", b"x"))
    both = reader([url, tmp_path / "other"], columns=["store"]).read_all()
    assert both.column("store").value_counts().to_pylist() == [
        {"values": url, "counts": COUNT},
        {"values": str(tmp_path / "other"), "counts": 1},
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"topic": "B"},
        {"topic": "B", "view": "log"},
        {"since": START_MS + 890_000},
        {"since": START_MS + 890_000, "view": "log"},
        {"filter": pc.field("queueOffset") < 3},
        {"view": "queues"},
    ],
)
def test_only_the_blocks_that_are_needed_are_fetched(path: Path, url: str, settings: Any) -> None:
    store = RemoteStore(url)
    found = reader(store, **settings).read_all()
    assert found.num_rows
    assert found.equals(reader(path, **settings).read_all())
    assert store.fetched_bytes < 1_600_000 < 3_000_000 < sum(file.stat().st_size for file in path.glob("commitlog/*"))
    fetched, requests = store.fetched_bytes, store.requests
    assert reader(store, **settings).read_all().equals(found)
    assert (store.fetched_bytes, store.requests) == (fetched, requests)


def test_a_whole_read_fetches_the_log_once(path: Path, url: str) -> None:
    store = RemoteStore(url)
    table = reader(store).read_all()
    assert reader(store, view="log").read_all().num_rows == table.num_rows
    assert store.fetched_bytes <= sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert pickle.loads(pickle.dumps(store)).url == url


def test_a_dataset_and_an_export_of_a_url(path: Path, url: str, tmp_path: Path) -> None:
    wanted = reader(path, topic="B").read_all()
    assert dataset(url).to_table(filter=pc.field("topic") == "B").equals(wanted)
    assert export(url, tmp_path / "out.jsonl", topic="B").rows == wanted.num_rows
    assert export(RemoteStore(url), tmp_path / "again.jsonl", topic="B").rows == wanted.num_rows
    assert main(["export", url, "-o", str(tmp_path / "lake"), "--topic", "B"]) == 0
    assert [name for name in os.listdir(tmp_path / "lake") if name.endswith(".parquet")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crashed", "torn", "closed by a broker", "changed since its close"])
def test_a_store_that_librmq_did_not_close(path: Path, tmp_path: Path, kind: str) -> None:
    """The remote store is read as recovery would leave it, like the local one."""
    folder = tmp_path / "s"
    if kind in ("crashed", "torn"):
        store = MessageStore.open(folder, CONFIG, clock=ManualClock(START_MS), background=False)
        for number in range(700):
            store.append(Message("T", b"%d " % number * 900))
        shutil.copytree(folder, tmp_path / "copy")
        store.close()
        folder = tmp_path / "copy"
        if kind == "torn":
            last = max((folder / "commitlog").iterdir())
            raw = last.read_bytes().rstrip(b"\0")
            last.write_bytes(raw[:-500].ljust(1 << 20, b"\0"))
    else:
        shutil.copytree(path, folder)
        (folder / "librmq" / "closed.json").unlink()
        if kind == "changed since its close":
            with MessageStore.open(folder, clock=ManualClock(START_MS)) as store:
                store.append(Message("A", b"one more"), 0)
            shutil.copy(path / "librmq" / "closed.json", folder / "librmq")
    remote = put_in_memory(folder, f"memory://tests/{kind}")
    views: tuple[View, ...] = ("messages", "queues", "log")
    for view in views:
        found = reader(remote, view=view).read_all()
        assert found.num_rows >= 699
        assert found.equals(reader(folder, view=view).read_all())
    if kind in ("closed by a broker", "changed since its close"):
        part = RemoteStore(remote)
        assert reader(part, topic="B").read_all().num_rows
        assert part.fetched_bytes < 1_600_000


def test_a_broker_closed_it_before_all_had_entries(path: Path, tmp_path: Path) -> None:
    """The end of the log is unknown then, so the store is copied whole."""
    folder = tmp_path / "s"
    shutil.copytree(path, folder)
    (folder / "librmq" / "closed.json").unlink()
    for file in folder.glob("consumequeue/*/*/*"):
        raw = file.read_bytes()
        used = len(raw.rstrip(b"\0")) // 20 * 20 - 40
        file.write_bytes(raw[:used].ljust(len(raw), b"\0"))
    remote = put_in_memory(folder, "memory://tests/behind")
    for view in get_args(View):
        found = reader(remote, view=view).read_all()
        assert found.num_rows
        assert found.equals(reader(folder, view=view).read_all())


@pytest.mark.parametrize(
    ("store", "error", "text"),
    [
        ("dbfs:/store", ConfigError, "found the scheme dbfs: write the path where it is mounted, such as /dbfs/"),
        ("wasbs:store", ConfigError, "found the scheme wasbs"),
        ("s3://", ConfigError, "expected a path or a URL such as s3://bucket/store, found the scheme s3"),
        ("nothing://store", ConfigError, "expected a scheme that fsspec knows, such as s3://"),
        ("oci://bucket/store", ConfigError, "a package is missing that reads oci://"),
        ("memory://tests/none", NotAStoreError, "memory://tests/none: there is nothing here"),
    ],
)
def test_urls_that_are_refused(store: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        reader(store)


def test_a_file_system_that_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError("Unable to load libjvm\nmore")

    monkeypatch.setattr("pyarrow.fs.HadoopFileSystem", refuse)
    with pytest.raises(StoreIOError, match=r"^hdfs://host/store: open the file system: Unable to load libjvm$"):
        reader("hdfs://host/store")


def test_settings_that_a_url_does_not_allow(url: str) -> None:
    wrong: Any
    for wrong in (5, {1: "key"}):
        with pytest.raises(ConfigError, match="storage_options: expected values by names of arguments, found"):
            reader(url, storage_options=wrong)


def test_an_error_names_the_url(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "s")
    with open(tmp_path / "s" / "commitlog" / f"{0:020}", "r+b") as file:
        file.seek(3000)
        file.write(b"\xff" * 100)
    with pytest.raises(CorruptionError, match=f"local://{tmp_path}/s/commitlog/{0:020}"):
        reader(f"local://{tmp_path}/s").read_all()


def test_names_that_lead_out_of_the_mirror_are_refused(url: str) -> None:
    system = fsspec.filesystem("memory")
    system.store["/evil/../../passwd"] = next(iter(system.store.values()))
    with pytest.raises(NotAStoreError, match="is no name of a store's file"):
        reader("memory://evil")


# ---------------------------------------------------------------------------------------------------------------- S3


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs takes the place of PyArrow")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the server's own code
def test_a_store_in_s3(path: Path) -> None:
    """PyArrow reads S3 by ranges."""
    with serving(path, "a store") as options:
        store = RemoteStore("s3://bucket/a store", options)
        assert reader(store, topic="B").read_all().equals(reader(path, topic="B").read_all())
        assert 0 < store.fetched_bytes < 1_600_000
        whole = reader("s3://bucket/a store/", storage_options=options, columns=["body", "queueOffset"])
        assert whole.read_all().equals(reader(path, columns=["body", "queueOffset"]).read_all())
        assert isinstance(whole, pa.RecordBatchReader)
        with pytest.raises(ConfigError, match="PyArrow can't open s3://"):
            reader("s3://bucket/store", storage_options={"nothing": 1})


def test_a_remote_export_reports_damage_once(path: Path, tmp_path: Path) -> None:
    """The report names the URL."""
    shutil.copytree(path, tmp_path / "s")
    (file,) = (tmp_path / "s" / "consumequeue" / "B" / "0").iterdir()
    os.truncate(file, 30)
    url = put_in_memory(tmp_path / "s", "memory://damaged-export")
    settings: dict[str, Any] = {"mode": "PERMISSIVE", "columns": ["topic", "_corrupt_record"]}
    made = export(url, tmp_path / "out", **settings)
    assert made.damaged == 1
    (told,) = pa.dataset.dataset(tmp_path / "out").to_table()["_corrupt_record"].drop_null().to_pylist()
    assert told.startswith(f"{url}/consumequeue/B/0/")
