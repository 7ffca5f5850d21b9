"""``recover --dry-run``, ``salvage``, ``snapshot``, ``restore``, and refusals to open a store that would lose data."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from librmq.cli import main
from tests.cli.stand import Shell
from tests.conftest import Run, StoreCopy
from tests.reference import existing, rows, store_folders
from tests.stores import from_disk

stores = pytest.mark.parametrize("folder", store_folders())


@pytest.fixture
def damaged(store_copy: StoreCopy) -> tuple[Path, dict[str, Any]]:
    """Return a copy of ``store-basic`` with a damaged body in the log's second to last file, and that message's row."""
    copy = store_copy("store-basic")
    size = rows(existing("store-basic"), "config")[0]["commitlog_file_size"]
    last = max(int(path.name) for path in (copy / "commitlog").iterdir())
    row = next(
        row for row in rows(existing("store-basic"), "message") if row["phys"] >= last - size and row["body_b64"]
    )
    with open(copy / "commitlog" / f"{last - size:020d}", "r+b") as file:
        file.seek(row["phys"] % size + 88)
        file.write(bytes([base64.b64decode(row["body_b64"])[0] ^ 255]))
    return copy, row


def test_a_refused_opening_says_what_to_do(run: Run, damaged: tuple[Path, dict[str, Any]]) -> None:
    copy, row = damaged
    before = from_disk(copy)
    status, printed, err = run("load", copy)
    assert (status, printed) == (1, [])
    assert f"at {row['phys']}" in err
    assert f"librmq recover {copy}" in err
    assert {path: data for path, data in from_disk(copy).items() if path != "lock"} == {
        path: data for path, data in before.items() if path != "lock"
    }
    assert run("queues", copy)[0] == 1
    assert run("queues", copy, "--as-recovered")[0] == 0


def test_a_dry_run_prints_the_same_as_a_recovery(run: Run, damaged: tuple[Path, dict[str, Any]]) -> None:
    copy, row = damaged
    before = from_disk(copy)
    tried = run("recover", copy, "--dry-run")
    assert from_disk(copy) == before
    assert tried[0] == 0
    assert tried[1][0]["max_phy_offset"] == row["phys"]
    assert run("recover", copy) == tried


@stores
def test_a_dry_run_on_real_stores(run: Run, folder: Path, store_copy: StoreCopy) -> None:
    copy = store_copy(folder)
    before = from_disk(copy)
    tried = run("recover", "--dry-run", copy)
    assert from_disk(copy) == before
    assert run("recover", copy)[:2] == tried[:2]
    assert not tried[2] or tried[2].startswith("note: without --dry-run: ")


def test_salvage_prints_every_other_message_and_the_gap(run: Run, damaged: tuple[Path, dict[str, Any]]) -> None:
    copy, row = damaged
    for recovered in (False, True):
        if recovered:
            run("recover", copy)
        status, printed, err = run("salvage", copy)
        assert (status, err) == (0, "")
        (gap,) = (one for one in printed if one["type"] == "gap")
        assert (gap["phys"], gap["size"]) == (row["phys"], row["size"])
        assert gap["file"].startswith("librmq/salvage/" if recovered else "commitlog/")
        assert "checksum" in gap["what"]
        wanted = [one for one in rows(existing("store-basic"), "message") if one["phys"] != row["phys"]]
        assert [one for one in printed if one["type"] == "message"] == wanted


def test_salvage_into_a_new_store(run: Run, damaged: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Messages are unchanged, except that later queue offsets move up to close the gap."""
    copy, row = damaged
    new = tmp_path / "new"
    status, printed, err = run("salvage", copy, "--into", new)
    assert (status, err) == (0, "")
    assert [one["type"] for one in printed] == ["gap", "salvage"]
    count = len(rows(existing("store-basic"), "message")) - 1
    assert printed[1] == {"type": "salvage", "into": str(new), "records": count, "gaps": 1}
    assert run("verify", new)[0] == 0
    kept = ("topic", "queue_id", "store_timestamp", "born_host", "body_b64", "properties_raw")
    there = [one for one in run("dump", new)[1] if one["type"] == "message"]
    wanted = [one for one in rows(existing("store-basic"), "message") if one["phys"] != row["phys"]]
    assert [[one[name] for name in kept] for one in there] == [[one[name] for name in kept] for one in wanted]
    status, _, err = run("salvage", copy, "--into", new)
    assert status == 2
    assert "it is not empty" in err


@pytest.mark.slow
@stores
def test_salvage_agrees_with_dump_of_a_recovered_store(run: Run, folder: Path, store_copy: StoreCopy) -> None:
    copy = store_copy(folder)
    run("recover", copy)
    log = [row for row in run("dump", copy)[1] if row["type"] == "message"]
    status, printed, _ = run("salvage", copy)
    assert status == 0
    assert [row for row in printed if row["type"] == "message"][: len(log)] == log


@pytest.mark.slow
@stores
def test_snapshot_and_restore(run: Run, folder: Path, store_copy: StoreCopy, tmp_path: Path) -> None:
    copy = store_copy(folder)
    run("recover", copy)
    before = from_disk(copy)
    status, (made,), err = run("snapshot", copy, tmp_path / "snapshot")
    assert (status, err) == (0, "")
    assert from_disk(copy) == before
    status, (back,), err = run("restore", tmp_path / "snapshot", tmp_path / "back")
    assert (status, err) == (0, "")
    assert (made["type"], made["path"], back["path"]) == (
        "snapshot",
        str(tmp_path / "snapshot"),
        str(tmp_path / "back"),
    )
    assert (back["min_phy_offset"], back["max_phy_offset"]) == (made["min_phy_offset"], made["max_phy_offset"])
    assert back["linked_files"] == 0
    assert made["copied_files"] + made["linked_files"] == back["copied_files"]
    for name in ("snapshot", "back"):
        assert run("verify", tmp_path / name)[0] == 0
        assert run("dump", tmp_path / name) == run("dump", copy)
        assert run("queues", tmp_path / name) == run("queues", copy)
    assert run("snapshot", copy, tmp_path / "copied", "--copy")[1][0]["linked_files"] == 0


def test_no_snapshot_is_made_of_damage_or_of_nothing(
    run: Run, damaged: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    copy, row = damaged
    status, printed, err = run("snapshot", copy, tmp_path / "snapshot")
    assert (status, printed) == (1, [])
    assert f"at {row['phys']}" in err
    assert not (tmp_path / "snapshot").exists()
    assert run("snapshot", tmp_path / "nowhere", tmp_path / "x")[0] == 2
    assert run("salvage", tmp_path / "nowhere")[0] == 2


@pytest.mark.slow
def test_tables_show_gaps(capsys: pytest.CaptureFixture[str], damaged: tuple[Path, dict[str, Any]]) -> None:
    pytest.importorskip("rich")
    assert main(["salvage", str(damaged[0]), "--format", "table"]) == 0
    shown = capsys.readouterr().out
    assert "body checksum" in shown
    assert "unique id" in shown


# ``extract`` makes a small store of selected messages.


@pytest.mark.parametrize("selection", [("--key", "key14"), ("--topic", "OrderTopic"), ("--sql", "TAGS = 'TagA'"), ()])
def test_the_selected_messages_are_extracted(selection: tuple[str, ...], shell: Shell) -> None:
    chosen = shell("show", "store", *selection).rows
    answer = shell("extract", "store", *selection, "-o", "small")
    assert (answer.status, answer.rows) == (
        0,
        [{"type": "extract", "into": "small", "messages": len(chosen), "bytes": sum(row["size"] for row in chosen)}],
    )
    numbers = {
        "phys": 0,
        "commit_log_offset": 0,
        "queue_offset": 0,
        "msg_id": "",
        "raw_sha1": "",
        "prepared_transaction_offset": 0,
    }
    copied = shell("show", "small").rows
    assert [row | numbers for row in copied] == [row | numbers for row in chosen]
    assert shell("verify", "small").rows[0]["sound"] is True


def test_a_limit_takes_the_first(shell: Shell) -> None:
    first = shell("show", "store", "--topic", "OrderTopic", "--limit", 3).rows
    assert shell("extract", "store", "--topic", "OrderTopic", "--limit", 3, "-o", "small").rows[0]["messages"] == 3
    assert {row["store_timestamp"] for row in shell("show", "small").rows} == {row["store_timestamp"] for row in first}


def test_hidden_bodies_are_printed_as_such(shell: Shell) -> None:
    assert shell("extract", "store", "--key", "key14", "-o", "small", "--redact", "bodies").status == 0
    assert {row["body"].strip("x") for row in shell("show", "small").rows} == {""}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--key", "none", "-o", "small"), "expected at least one message to extract, found none"),
        (("-o", "store/small"), "is in the store"),
        (("-o", "store"), "it is not empty"),
        ((), "the following arguments are required: -o/--out"),
    ],
)
def test_an_extract_that_makes_no_sense_is_refused(words: tuple[str, ...], said: str, shell: Shell) -> None:
    answer = shell("extract", "store", *words)
    assert answer.status == 2
    assert said in answer.said
