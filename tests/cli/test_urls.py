"""Commands on a store behind a URL: the rows are those of its folder, and some commands fetch little of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig
from librmq.files._disk import DiskFiles
from tests.budget import many
from tests.cli.stand import Shell
from tests.cli.test_rocksdb_tables import tables_of
from tests.pop_store import PopStore
from tests.rocksdb_stores import FORMS, write_tables
from tests.s3_server import serving
from tests.stores import put_in_memory
from tests.stores_of_5 import KINDS, keep_queues_elsewhere

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

URL = "memory://bucket/broker-a/store"
START_MS = 1_700_000_000_000
put = partial(put_in_memory, url=URL)


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the bytes of the log that are fetched."""
    counts = {"log": 0}
    kind = type(fsspec.filesystem("memory"))
    cat_ranges = kind.cat_ranges

    def counted(self: Any, paths: list[str], begins: list[int], ends: list[int], **settings: Any) -> Any:
        counts["log"] += sum(
            end - begin for path, begin, end in zip(paths, begins, ends, strict=True) if "/commitlog/" in path
        )
        return cat_ranges(self, paths, begins, ends, **settings)

    monkeypatch.setattr(kind, "cat_ranges", counted)
    return counts


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of 8 MiB with a group that has consumed some messages."""
    clock = ManualClock(START_MS)
    config = StoreConfig(commitlog_file_size=2 << 20, consumequeue_file_size=200_000)
    folder = tmp_path_factory.mktemp("urls") / "large"
    with MessageStore.open(folder, config, clock=clock) as store:
        for number in range(900):
            clock.advance(ms=1000)
            store.append(Message("A", b"%d " % number * 2000), number % 3)
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "consumerOffset.json").write_text('{"offsetTable":{"A@G":{0:7,1:150},"A@H":{2:200}}}')
    return folder


@many
@pytest.mark.parametrize(
    "words",
    [
        "lag STORE",
        "lag STORE --by origin",
        "lag STORE --every 10s",
        "groups STORE --all",
        "topics STORE",
        "queues STORE",
        "queue STORE OrderTopic 0",
        "show STORE --topic OrderTopic --key key14",
        "show STORE --grep 1",
        "tail STORE",
        "count STORE --by tag",
        "query STORE --topic OrderTopic --key key14",
        "dump STORE",
        "story STORE key14",
        "pending STORE",
        "dead-letters STORE",
        "diagnose STORE",
        "check STORE --volumes",
        "expiring STORE --reserved 0s --within 0s",
        "timers STORE",
    ],
)
def test_a_url_has_the_rows_of_the_folder(shell: Shell, words: str) -> None:
    put(shell.folder / "store")
    here = shell(*words.replace("STORE", "store").split())
    there = shell(*words.replace("STORE", URL).split())
    assert (there.status, there.out) == (here.status, here.out)
    assert there.said == here.said.replace("store is", f"{URL} is")


@pytest.mark.parametrize("command", ["lag", "groups", "pending"])
def test_what_pop_holds_is_fetched_too(shell: Shell, command: str) -> None:
    store = PopStore(str(shell.folder / "pop"), DiskFiles())
    store.send("orders", 3)
    store.receive("G", "orders", [0, 1])
    store.close()
    there = shell(command, put(shell.folder / "pop"))
    assert there.out == shell(command, "pop").out
    assert [row.get("in_flight") or row["kind"] for row in there.rows] in ([2], ["pop", "pop"])


@many
@pytest.mark.parametrize("words", ["lag STORE", "groups STORE", "topics STORE", "queues STORE", "queue STORE A 0"])
def test_what_queues_show_needs_little_of_the_log(
    shell: Shell, large: Path, fetched: dict[str, int], words: str
) -> None:
    put(large)
    there = shell(*words.replace("STORE", URL).split())
    assert there.out == shell(*words.replace("STORE", str(large)).split()).out
    assert there.rows
    assert fetched["log"] < 700_000 < 6_000_000 < sum(file.stat().st_size for file in large.glob("commitlog/*"))


def test_other_commands_fetch_the_log_once(shell: Shell, large: Path, fetched: dict[str, int]) -> None:
    put(large)
    assert len(shell("show", URL, "--topic", "A", "--tag", "*").rows) == 900
    assert fetched["log"] == sum(file.stat().st_size for file in large.glob("commitlog/*"))


def test_a_store_that_was_not_closed(shell: Shell) -> None:
    """It is fetched whole, and read as its folder is."""
    (shell.folder / "store" / "abort").touch()
    put(shell.folder / "store")
    for words in (["lag"], ["topics"], ["diagnose"]):
        here, there = shell(words[0], "store"), shell(words[0], URL)
        assert (there.status, there.out) == (here.status, here.out)
        assert here.rows


def test_statistics_and_the_report_name_the_url(shell: Shell) -> None:
    put(shell.folder / "store")
    put(shell.folder / "store", url="memory://bucket/broker-b/store")
    (row,) = shell("stats", URL).rows
    (here,) = shell("stats", "store").rows
    assert row == here | {"path": URL}
    pytest.importorskip("jinja2")
    assert shell("report", URL, "memory://bucket/broker-b/store", "store", "--out", "page.html").status == 0
    stores = json.loads((shell.folder / "page.json").read_text())["stores"]
    assert [one["path"] for one in stores] == [URL, "memory://bucket/broker-b/store", "store"]
    assert [one["store"] for one in stores[:2]] == ["broker-a", "broker-b"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (f"verify {URL}", "verify needs the folder of a store, found a URL: copy the store to a folder first"),
        (f"recover {URL} --dry-run", "recover needs the folder of a store"),
        (f"import {URL} rows.jsonl", "import needs the folder of a store"),
        (f"serve {URL}", "serve needs the folder of a store"),
        (f"dead-letters {URL} --resend", "dead-letters --resend needs the folder of a store"),
        (f"tail {URL} --follow", "tail --follow needs the folder of a store"),
        ("lag memory://bucket", f"memory://bucket: no store, but 1 are below it ({URL}): name one of them"),
        ("lag memory://none", "memory://none: there is nothing here; expected the folder of a store"),
        (f"lag {URL} --storage-options 5", "--storage-options: expected a JSON object; an example:"),
        ("lag store --storage-options {}", "--storage-options: they are for a URL such as s3://bucket/store, found"),
        ("report store --storage-options {}", "--storage-options: they are for a URL such as s3://bucket/store"),
        ("lag nothing://store", "expected a scheme that fsspec knows, such as s3://"),
    ],
)
def test_what_is_refused_says_what_to_do(shell: Shell, words: str, text: str) -> None:
    put(shell.folder / "store")
    refused = shell(*words.split())
    assert (refused.status, refused.out) == (2, "")
    assert text in refused.said
    assert not (shell.folder / "memory:").exists()


def test_damage_is_reported_by_its_url(shell: Shell) -> None:
    path = sorted((shell.folder / "store" / "commitlog").iterdir())[0]
    with open(path, "r+b") as file:
        file.truncate(100)
    put(shell.folder / "store")
    refused = shell("dump", URL)
    assert refused.status == shell("dump", "store").status == 1
    assert f"{URL}/commitlog/" in refused.said


@pytest.mark.slow
@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs takes the place of PyArrow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the server's own code
def test_a_store_in_s3(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address and keys come as options, or from the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    here = shell("lag", "store")
    with serving(shell.folder / "store", "store") as options:
        given = shell("lag", "s3://bucket/store", "--storage-options", json.dumps(options))
        assert (given.status, given.out) == (0, here.out)
        assert shell("export", "s3://bucket/store", "-o", "a.jsonl", "--storage-options", json.dumps(options)).rows
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{options['endpoint_override']}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "here")
        assert shell("lag", "s3://bucket/store").out == here.out
        assert shell("show", "s3://bucket/store", "--key", "key14").out == shell("show", "store", "--key", "key14").out


@many
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_5_behind_a_url(shell: Shell, kind: str) -> None:
    commands = [["topics", "STORE"], ["lag", "STORE"], ["show", "STORE", "--topic", "OrderTopic"]]
    expected = [shell(*(word.replace("STORE", "store") for word in words)).out for words in commands]
    keep_queues_elsewhere(shell.folder / "store", kind)
    url = put(shell.folder / "store")
    assert [shell(*(word.replace("STORE", url) for word in words)).out for words in commands] == expected


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_tables_in_rocksdb_behind_a_url(shell: Shell, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rocksdict")
    store, names = shell.folder / "store", ("topics.json", "subscriptionGroup.json", "consumerOffset.json")
    commands = (
        "groups {} --all",
        "lag {}",
        "topics {}",
        "pending {}",
        "progress {}",
        "expiring {} --reserved 1ms --within 1ms",
    )

    def printed(place: object) -> list[tuple[int, str]]:
        return [shell(*words.format(place).split())[:2] for words in commands]

    write_tables(store / "config", form, tables_of(store / "config"))
    for path in (store / "config" / f"{name}{end}" for name in names for end in ("", ".bak")):
        path.unlink(missing_ok=True)
    expected = printed("store")
    assert any(json.loads(line)["lag"] for line in expected[1][1].splitlines())
    url = put(store)
    assert printed(url) == expected
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "rocksdict", None)
        for command in ("lag", "groups"):
            status, _, said = shell(command, url)
            assert (status, "pip install 'librmq[rocksdb]'" in said) == (0, True)
    for manifest in (store / "config").rglob("MANIFEST-*"):
        first, *rest = manifest.read_bytes()
        manifest.write_bytes(bytes([first ^ 1, *rest]))
    put(store)
    status, out, said = shell("lag", url)
    assert (status, out, "can't be read" in said) == (0, "", True)
