"""What was sampled, cut or left out carries that in its own row: in every command, format, section and page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from librmq import ManualClock, Message, MessageStore, StoreConfig
from librmq.console import render_page
from librmq.diagnosis import QueueLag, Report
from librmq.filter._registrations import Registrations
from librmq.message.properties import PropertyName
from tests.cli.stand import Shell

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
MESSAGES = 10_500
"""More than a finding, and than the origins of a group and topic, look at."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a store in which each limit is exceeded."""
    folder = tmp_path_factory.mktemp("large")
    clock = ManualClock(START_MS)
    config = StoreConfig.tiny(commitlog_file_size=4 << 20, consumequeue_file_size=20 * 12_000)
    with MessageStore.open(folder / "store", config, clock=clock) as store:
        for number in range(MESSAGES):
            message = Message("T", b"x", keys="hot" if number % 2 else f"k{number % 600}", tags="ab"[number % 2])
            if number % 10 == 0:
                message.properties[PropertyName.REAL_TOPIC] = "T"  # delivered after a delay
            store.append(message, 0, born_timestamp_ms=clock.now_ms() - 3 * HOUR_MS)
            clock.advance(ms=10)
        for queue_id in range(1, 4):
            store.append(Message("T", b"x"), queue_id)
        for queue_id in range(0, 60, 2):
            store.append(Message("Wide", b"x"), queue_id)
        for number in range(8):
            letter = Message("%DLQ%G", b"x", unique_key=f"U{number}")
            letter.properties[PropertyName.DEAD_LETTER_CAUSE] = f"Error{'abcdefgh'[number]}"
            store.append(letter)
    (folder / "store" / "config").mkdir(exist_ok=True)
    offsets = {"T@G": {str(queue_id): 0 for queue_id in range(4)}, "Wide@G": {str(at): 9 for at in range(0, 60, 2)}}
    (folder / "store" / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": offsets}))
    registrations = Registrations()
    registrations.register("T", "G", "prise > 5", "SQL92", 1, START_MS)
    document = json.dumps(registrations.to_document(START_MS))
    (folder / "store" / "config" / "consumerFilter.json").write_text(document)
    return folder


def parts_of(value: object) -> Iterator[dict[str, Any]]:
    """Yield a row and each object in it."""
    if isinstance(value, dict):
        yield value
        for part in value.values():
            yield from parts_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from parts_of(part)


def check_marks(rows: list[dict[str, Any]]) -> set[str]:
    """Check that each row says what it leaves out; return the marks that are true."""
    marks = set()
    for part in parts_of(rows):
        if "looked_at" in part:
            assert isinstance(part["sampled"], bool), part
        if any(isinstance(value, str) and value.endswith("…") for value in part.values()):
            assert part["cut"], part
        marks |= {name for name in ("sampled", "cut", "skipped") if part.get(name)}
    return marks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "marks"),
    [
        ("topics store", set()),
        ("queues store", set()),
        ("groups store", set()),
        ("stats store", set()),
        ("lag store", set()),
        ("lag store --by topic", set()),
        ("lag store --by group", set()),
        ("lag store --by origin", {"sampled"}),
        ("expiring store --reserved 0s", set()),
        ("dead-letters store", set()),
        ("dead-letters store --causes", set()),
        ("count store --by key", set()),
        ("count store --by tag", set()),
        ("count store --by tag --sampled", {"sampled"}),
        ("diagnose store", {"sampled", "cut"}),
        ("diagnose store --design", {"sampled"}),
        ("diagnose store --volumes", set()),
        ("pending store", set()),
    ],
)
def test_commands(large: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, words: str, marks: set[str]) -> None:
    if "--sampled" in words:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(large)
    rows = shell(*words.split(), "--format", "jsonl").rows
    assert check_marks(rows) == marks
    for row in csv.DictReader(io.StringIO(shell(*words.split(), "--format", "csv").out)):
        for name in ("sampled", "cut"):
            assert (name in row) == (name in rows[0])
    if rows and "sampled" in rows[0]:
        assert "sampled" in shell(*words.split(), "--format", "table").out


@pytest.mark.slow
def test_records_that_were_not_verified(large: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(large)
    for form in ("jsonl", "table"):
        assert "not-verified" in shell("diagnose", "store", "--no-verify", "--format", form).out
        assert "not-verified" not in shell("diagnose", "store", "--verify", "--format", form).out


def test_findings_that_look_at_a_part(large: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(large)
    rows = [*shell("diagnose", "store").rows, *shell("diagnose", "store", "--design").rows]
    found = {row["finding"]: row["evidence"] for row in rows if row["subject"].partition("topic ")[2][:1] == "T"}
    for kind in ("hot-key", "filter-matches-nothing", "born-far-from-stored", "mixed-kinds", "skewed-key"):
        assert found[kind]["sampled"], kind
        assert 0 < found[kind]["looked_at"] < MESSAGES
    assert {"progress-beyond-end", "dead-letters"} <= {row["finding"] for row in rows if row["evidence"].get("cut")}


def test_a_search_with_as_many_results_as_it_may_have(shell: Shell) -> None:
    whole = shell("query", "store", "--topic", "OrderTopic", "--key", "key14")
    assert "as many as --max" not in whole.said
    cut = shell("query", "store", "--topic", "OrderTopic", "--key", "key14", "--max", len(whole.rows))
    assert "as many as --max" in cut.said


def test_the_report_and_its_page(large: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr("librmq.diagnosis._message_sums.MOST_KEYED", 1000)
    page = tmp_path / "report.html"
    assert shell("report", large / "store", "--out", page).status == 0
    found = json.loads(page.with_suffix(".json").read_text())
    (part,) = found["stores"]
    assert {row["finding"] for row in part["findings"] if row["evidence"].get("sampled")} >= {"hot-key"}
    assert all(row["sampled"] for row in (*part["keys"], *part["repeated"]))
    assert all(row["cut"] for row in part["keys"])
    assert check_marks([found]) >= {"sampled", "cut"}
    html = page.read_text()
    assert "a sample of the messages was counted" in html
    assert "a sample of the keys was looked at" in html
    assert "Further keys of T are left out" in html
    part["lag"] = [QueueLag("G", "T", queue_id, 0, 5, None, 5, START_MS)._asdict() for queue_id in range(400)]
    assert "each square shows the largest of" in render_page(Report.from_json(json.dumps(found)))


def test_places_that_cannot_be_read_are_counted(shell: Shell) -> None:
    pytest.importorskip("jinja2")
    log = next((shell.folder / "store" / "commitlog").iterdir())
    data = bytearray(log.read_bytes())
    data[4:8] = b"xxxx"  # the magic number of the first record
    log.write_bytes(data)
    answer = shell("report", "store", "--out", "r.html")
    assert answer.status == 1
    assert "the numbers can leave out messages" in answer.said
    assert shell("report", "store", "--out", "r.html", "--as-recovered").status == 0
    (summary,) = json.loads((shell.folder / "r.json").read_text())["stores"]
    assert summary["skipped"] is True
    assert "without the unreadable" in (shell.folder / "r.html").read_text()
