"""The benchmarks run at a tiny size; their results do not matter here."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.reference import CHECKOUT

Paths = set[str] | None

PARTS: dict[str, dict[str, Paths]] = {
    "store": {
        "append": {"single append"},
        "batch": {"batch append 256"},
        "pull": {"pull 32"},
        "scan": {"scan", "scan, two processes"},
        "rebuild": {"rebuild"},
        "tags": {"tag scan", "read() with a filter, no match"},
        "memory": {"queue, Python objects held", "queue, mapped and resident"},
        "import": {
            "import librmq",
            "import librmq.store.store",
            "librmq --help",
            "first test with rmq, after its imports",
        },
    },
    "durability": {
        "sync": {"sync append"},
        "group": {"sync append", "sync append, flush of 1 ms simulated"},
        "pipelined": {"sync append, pipelined"},
        "opening": {"opening, closed cleanly"},
        "killed": {"opening, after a kill"},
        "latency": {
            *(f"latency of single append, {share}" for share in ("p99", "p99.9", "p99.99")),
            *(f"latency of {raw}, p99.99" for raw in ("raw mapped write", "raw, pages touched")),
        },
    },
    "dedup": {
        "sqlite": {"claim and mark", "guarded delivery"},
        "redis": {"claim and mark", "guarded delivery", "guarded delivery, lists of 32"},
    },
    "allocate": {"allocation": None},
    "transactions": {"committed": None, "check": None},
    "replica": {"following": None, "waiting": None},
    "timers": {"timer": None, "due": None, "memory": None},
    "cluster": {"route": None, "drill": None},
    "columns": {"reading": None, "processes": None, "exporting": None},
    "diagnosis": {"lags": None, "loops": None, "shows": None, "reports": None},
    "wire": {"remoting": None, "pull": None, "connect": None, "oneway": None},
    "spark": {"decoding": None, "starts": None, "writing": None},
}
"""The paths of each part's rows, or None if any paths will do."""
OPTIONAL = {"queue, mapped and resident"}  # on systems that report it
LIMITS = {
    "raw write, unbuffered",
    "raw slices of records",
    "raw crc32",
    "raw pwrite and fdatasync",
    "flushes of the disk",
}


def load(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Import a module of ``benchmarks``; installed modules come first on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(CHECKOUT)])
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "store")


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "common")


def words_of(picture: Path) -> list[str]:
    return sorted(text for text in ElementTree.parse(picture).getroot().itertext() if text.strip())


@pytest.fixture
def charts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "charts")


@pytest.mark.parametrize("name", ["store", "durability", "allocate", "transactions", "timers"])
def test_every_part_is_tried(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert list(load(monkeypatch, name).ROWS) == list(PARTS[name])


@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.parametrize(("name", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_each_row_is_measured(
    monkeypatch: pytest.MonkeyPatch, common: ModuleType, tmp_path: Path, name: str, part: str
) -> None:
    if (name, part) == ("timers", "memory") and sys.platform != "linux":
        pytest.skip("needs /proc/self/status")
    rows = load(monkeypatch, name).ROWS[part](common.Bench(rounds=1, scratch=tmp_path, scale=0.002))
    paths = {row.path for row in rows}
    expected = PARTS[name][part]
    assert rows
    assert expected is None or expected - OPTIONAL <= paths <= expected
    for row in rows:
        assert row.measured > 0 or row.unit == "MiB", row
        assert row.limit or row.against not in LIMITS, row
        if name == "store" and part in ("append", "batch", "pull", "scan", "rebuild"):
            assert {one.case for one in rows if one.path == row.path} == {"128 B", "1 KiB"}
    assert name in ("cluster", "columns", "diagnosis", "timers", "transactions", "spark") or not list(
        tmp_path.iterdir()
    )  # nothing is left


@pytest.mark.slow
def test_variants_take_turns_in_fresh_folders(common: ModuleType, tmp_path: Path) -> None:
    calls: list[str] = []

    def variant(name: str) -> object:
        def run(folder: Path) -> float:
            assert not list(folder.iterdir())
            (folder / "left").touch()
            calls.append(name)
            return float(len(calls))

        return run

    rates = common.Bench(rounds=2, scratch=tmp_path).interleave({"a": variant("a"), "b": variant("b")})
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert rates == {"a": [4.0, 5.0], "b": [3.0, 6.0]}  # the warm-up is dropped
    assert not list(tmp_path.iterdir())


def test_a_ratio_is_the_median_of_the_rounds(common: ModuleType) -> None:
    row = common.compare("path", "case", "peer", [10.0, 20.0, 90.0], [5.0, 20.0, 10.0])
    assert (row.measured, row.spread) == (2.0, "1.00–9.00")
    assert (row.ours, row.other) == ("20\N{NO-BREAK SPACE}msg/s", "10\N{NO-BREAK SPACE}msg/s")


def test_verdicts(common: ModuleType) -> None:
    least = common.Target(2, 3)
    assert [least.verdict(value) for value in (1.9, 2, 2.9, 3)] == ["missed", "met", "met", "reached"]
    most = common.Target(1.5, at_most=True)
    assert [most.verdict(value) for value in (1.5, 1.6)] == ["met", "missed"]
    assert [common.Target(reach=2).verdict(value) for value in (1, 2)] == ["short", "reached"]
    assert common.NO_TARGET.verdict(1) == ""


def test_rates_are_short(common: ModuleType) -> None:
    assert common.rate(187_432, "msg/s") == "187k\N{NO-BREAK SPACE}msg/s"
    assert common.rate(1_234_567_890, "B/s") == "1.23\N{NO-BREAK SPACE}GB/s"
    assert common.rate(999.9, "msg/s") == "1,000\N{NO-BREAK SPACE}msg/s"
    assert common.rate(0.1234, "s") == "123\N{NO-BREAK SPACE}ms"
    assert common.rate(53_210, "/s") == "53.2k/s"


def test_losses_are_said_in_words(common: ModuleType) -> None:
    won = common.compare("append", "128 B", "slow", [4.0], [1.0], common.Target(2))
    lost = common.compare("append", "1 KiB", "fast", [1.0], [4.0], common.Target(2))
    limit = common.compare("append", "1 KiB", "raw", [1.0], [4.0], common.Target(0.2), limit=True)
    text = common.shortcomings([won, lost, limit])
    assert "append, 1 KiB, against fast: 0.25× where 2× is required." in text
    assert "librmq has 1\N{NO-BREAK SPACE}msg/s, the other 4\N{NO-BREAK SPACE}msg/s" in text
    assert "slow" not in text
    assert "raw" not in text
    assert common.shortcomings([won, limit]) == (
        "Every required figure was reached in this run.\n\nNo peer was faster in this run."
    )
    assert common.shortcomings([limit]) == "Every required figure was reached in this run."


def test_markdown_has_a_cell_for_every_title(common: ModuleType) -> None:
    row = common.compare("append", "128 B", "peer", [4.0], [1.0], common.Target(2, 3))
    title, line, cells = common.markdown([row]).splitlines()
    assert title.count("|") == line.count("|") == cells.count("|")
    assert "| 4.00× | 4.00–4.00 | 2× | 3× | reached |" in cells


def test_markdown_leaves_empty_columns_out(common: ModuleType) -> None:
    rows = [
        common.Row("start", "", "", 0.25, "s", common.Target(0.3, at_most=True)),
        common.Row("rate", "", "", 2e4, "/s"),
    ]
    assert common.markdown(rows).replace("\N{NO-BREAK SPACE}", "_").splitlines() == [
        "| path | measured | required | result |",
        "| --- | --- | --- | --- |",
        "| start | 0.25_s | ≤_0.3_s | met |",
        "| rate | 20,000/s |  |  |",
    ]


@pytest.mark.slow
def test_results_are_kept_with_their_picture(
    charts: ModuleType, common: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(charts, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(charts, "PICTURES", tmp_path / "pictures")
    rows = [
        common.compare("append", "128 B", "peer", [4.0, 6.0], [1.0, 1.0], common.Target(2)),
        common.compare("append", "1 KiB", "peer", [1.0, 1.5], [1.0, 1.0], common.Target(2)),
        common.compare("opening", "", "a", [8.0], [10.0], common.Target(2, at_most=True)),
        common.Row("memory", "", "", 3.0, "MiB"),
    ]
    charts.keep("store", common.markdown(rows))
    assert "| 5.00× | 4.00–6.00 |" in (tmp_path / "results" / "store.md").read_text("utf-8")
    drawn = words_of(tmp_path / "pictures" / "store.svg")
    for line in ("append, against peer", "5.00×", "128 B", "1.25×", "1 KiB", "opening (less is better)", "against a"):
        assert line in drawn
    charts.keep("memory", common.markdown(rows[3:]))
    assert not (tmp_path / "pictures" / "memory.svg").exists()


@pytest.mark.parametrize("name", sorted({"filter", "clients", "core", "growth", *PARTS}))
def test_the_page_shows_the_results(charts: ModuleType, name: str) -> None:
    page = (CHECKOUT / "docs" / "performance.md").read_text("utf-8")
    assert f"](../benchmarks/results/{name}.md)" in page
    assert (charts.RESULTS / f"{name}.md").is_file()
    assert (f"](performance/{name}.svg)" in page) == (charts.PICTURES / f"{name}.svg").is_file()


def test_pictures_show_the_figures_of_the_results(charts: ModuleType) -> None:
    for picture in charts.PICTURES.glob("*.svg"):
        page = (charts.RESULTS / f"{picture.stem}.md").read_text("utf-8")
        lines = [(row.shown, label) for _, rows in charts.groups(list(charts.ratios(page))) for label, row in rows]
        names = [(panel.title, *panel.curves) for panel in charts.panels_of(page)]
        wanted = collections.Counter(" ".join(itertools.chain(*lines, *names)).split())
        assert wanted, picture.name
        assert wanted <= collections.Counter(" ".join(words_of(picture)).split()), picture.name


def test_curves_are_read_from_their_table(charts: ModuleType) -> None:
    panel = charts.Panel("one queue", "messages", "µs")
    panel.add("append", 10_000, 0.000_011_3)
    panel.add("append", 1_000_000, 0.001_41)
    assert "10,000: 11.3\N{NO-BREAK SPACE}µs; 1,000,000: 1,410\N{NO-BREAK SPACE}µs" in charts.table([panel])
    assert charts.panels_of(charts.table([panel])) == [panel]


def test_the_table_is_printed_without_rich(
    common: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("rich", "rich.console", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    common.show([common.compare("append", "128 B", "peer", [4.0], [1.0])])
    title, cells = capsys.readouterr().out.splitlines()
    assert title.split()[:4] == ["path", "case", "against", "measured"]
    assert "append  128 B  peer     4.00×" in cells


@pytest.mark.parametrize(
    "arguments", [["--rows", "append,none"], ["--rounds", "0"], ["--write", "--quick"], ["--write", "--rows", "pull"]]
)
def test_wrong_arguments_are_refused(
    store: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        store.main(arguments)
    assert refused.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "shown"),
    [
        ("store", "memory", "50,000 entries"),
        pytest.param("filter", "message,compile", "filter, one message", marks=pytest.mark.slow),
    ],
)
def test_the_command_shows_a_table(name: str, rows: str, shown: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--rounds", "1", "--rows", rows],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={"PYTHONPATH": str(CHECKOUT), "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert "rounds: 1." in done.stdout


@pytest.mark.slow
def test_growth_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("ERROR", logger="librmq"):  # afterwards the level is as before
        assert load(monkeypatch, "growth").main(["--quick", "--rows", "messages,producers"]) == 0
    shown = capsys.readouterr().out
    for path in ("append", "pull of 32, a message", "lookup by key", "closed cleanly", "after a kill"):
        assert path in shown


@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.skipif(importlib.util.find_spec("librmq_core") is None, reason="librmq-core is not installed")
def test_both_codes_are_measured(monkeypatch: pytest.MonkeyPatch, common: ModuleType, tmp_path: Path) -> None:
    core, bench = load(monkeypatch, "core"), common.Bench(rounds=1, scratch=tmp_path, scale=0.001)
    for rows in (core.both(bench), core.against_peers(bench)):
        assert {row.case for row in rows} == {"128 B", "1 KiB"}
        assert all(row.measured > 0 for row in rows)
    against = {row.against for row in rows}
    assert {"raw write, unbuffered", "raw slices of records", "raw crc32", "twice one thread"} <= against
