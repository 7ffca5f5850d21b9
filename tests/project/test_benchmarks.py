"""The benchmarks run at a tiny size; their results do not matter here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.reference import CHECKOUT

SUBJECTS = sorted(path.stem for path in (CHECKOUT / "benchmarks" / "results").glob("*.md"))
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
def frame(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load(monkeypatch, "frame")


@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.parametrize("name", SUBJECTS)
def test_each_case_is_measured(monkeypatch: pytest.MonkeyPatch, frame: ModuleType, tmp_path: Path, name: str) -> None:
    if name == "timers" and sys.platform != "linux":
        pytest.skip("needs /proc/self/status")
    cases = [case for case in load(monkeypatch, name).CASES if "pyspark" not in case.needs]
    if name == "growth":
        cases = list({case.name: case for case in reversed(cases)}.values())  # the smallest size of each
    rows, _ = frame.measure(cases, frame.Bench(rounds=1, scratch=tmp_path, scale=0.002))
    assert rows or name == "core"
    for row in rows:
        assert row.measured > 0 or row.unit in ("MiB", "% of a core"), row
        assert row.limit or row.against not in LIMITS, row
    assert not list(tmp_path.iterdir())  # nothing is left


@pytest.mark.parametrize("name", SUBJECTS)
def test_recorded_rows_have_their_case(monkeypatch: pytest.MonkeyPatch, frame: ModuleType, name: str) -> None:
    cases = {(case.name, case.detail) for case in load(monkeypatch, name).CASES}
    rows, _ = frame.recorded()[name]
    assert {(row.name, row.detail) for row in rows} <= cases


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_page_shows_the_results(frame: ModuleType, name: str) -> None:
    guide = (CHECKOUT / "docs" / "performance.md").read_text("utf-8")
    rows, measured_on = frame.recorded()[name]
    picture = CHECKOUT / "docs" / "performance" / f"{name}.svg"
    assert f"](../benchmarks/results/{name}.md)" in guide
    assert (f"](performance/{name}.svg)" in guide) == picture.is_file()
    assert (frame.TABLES / f"{name}.md").read_text("utf-8") == frame.page(name, rows, measured_on)
    if picture.is_file() and name != "growth":
        words = " ".join(ElementTree.parse(picture).getroot().itertext())
        assert all(frame.cells(row)[3] in words for row in rows if row.unit == "×")


# ---------------------------------------------------------------------------------------------------------- the frame


def test_runs_take_turns_in_fresh_folders(frame: ModuleType, tmp_path: Path) -> None:
    calls: list[str] = []

    def counting(name: str) -> Any:
        def run(context: str, folder: Path) -> float:
            assert context == "ready"
            assert not list(folder.iterdir())
            (folder / "left").touch()
            calls.append(name)
            return float(len(calls))

        return run

    def setup(bench: object) -> Iterator[str]:
        yield "ready"

    case = frame.Case("turns", counting("a"), "", counting("b"), "b", setup=setup)
    rows, absent = frame.measure([case, replace(case, name="again")], frame.Bench(rounds=2, scratch=tmp_path))
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert [row.name for row in rows] == ["turns", "again"]
    assert (rows[0].low, rows[0].high) == (5 / 6, 4 / 3)  # the warm-up is dropped
    assert rows[0].measured == pytest.approx((5 / 6 + 4 / 3) / 2)
    assert not absent
    assert not list(tmp_path.iterdir())


def test_the_clock_runs_between_the_yields(frame: ModuleType, tmp_path: Path) -> None:
    steps: list[str] = []

    def run(_: object, folder: Path) -> Iterator[Any]:
        steps.append("prepared")
        yield
        steps.append("timed")
        yield 10
        steps.append("checked")

    ((row,), _) = frame.measure([frame.Case("timed", run)], frame.Bench(rounds=1, scratch=tmp_path))
    assert steps == ["prepared", "timed", "checked"] * 2
    assert row.measured > 0


def test_absent_programs_are_named(frame: ModuleType, tmp_path: Path) -> None:
    def setup(bench: object) -> Iterator[None]:
        raise frame.AbsentError("a server")
        yield

    cases = [frame.Case("a", print, needs=("no_such_module",)), frame.Case("b", print, setup=setup)]
    assert frame.measure(cases, frame.Bench(rounds=1, scratch=tmp_path)) == ([], {"no_such_module", "a server"})


@pytest.mark.parametrize(
    ("options", "measured", "less"), [({}, 4.0, False), ({"is_cost": True}, 0.25, True), ({"unit": "s"}, 4.0, True)]
)
def test_a_ratio_is_that_of_the_units(
    frame: ModuleType, tmp_path: Path, options: dict[str, Any], measured: float, less: bool
) -> None:
    case = frame.Case("ratio", lambda *_: 8.0, "", lambda *_: 2.0, "other", **options)
    ((row,), _) = frame.measure([case], frame.Bench(rounds=1, scratch=tmp_path))
    assert (row.measured, row.unit, row.less) == (measured, "×", less)


def test_parts_of_one_run_share_its_rounds(frame: ModuleType, tmp_path: Path) -> None:
    runs: list[None] = []

    def run(*_: object) -> dict[str, float]:
        runs.append(None)
        return {"a": 1.0, "b": 2.0}

    cases = [frame.Case(part, frame.Part(run, part), unit="MiB") for part in "ab"]
    rows, _ = frame.measure(cases, frame.Bench(rounds=3, scratch=tmp_path))
    assert [row.measured for row in rows] == [1.0, 2.0]
    assert len(runs) == 4


@pytest.mark.parametrize(
    ("bounds", "verdicts"),
    [
        ({"least": 2, "reach": 3}, {1.9: "missed", 2: "met", 2.9: "met", 3: "reached"}),
        ({"least": 1.5, "at_most": True}, {1.5: "met", 1.6: "missed"}),
        ({"reach": 2}, {1: "short", 2: "reached"}),
        ({}, {1: ""}),
    ],
)
def test_verdicts(frame: ModuleType, bounds: dict[str, Any], verdicts: dict[float, str]) -> None:
    assert {measured: frame.Row("", "", "", measured, "×", **bounds).verdict for measured in verdicts} == verdicts


def test_rates_are_short(frame: ModuleType) -> None:
    assert frame.rate(187_432, "msg/s") == "187k\N{NO-BREAK SPACE}msg/s"
    assert frame.rate(1_234_567_890, "B/s") == "1.23\N{NO-BREAK SPACE}GB/s"
    assert frame.rate(999.9, "msg/s") == "1,000\N{NO-BREAK SPACE}msg/s"
    assert frame.rate(0.1234, "s") == "123\N{NO-BREAK SPACE}ms"
    assert frame.rate(53_210, "/s") == "53.2k/s"


def test_losses_are_said_in_words(frame: ModuleType) -> None:
    won = frame.Row("append", "128 B", "slow", 4.0, "×", 2)
    lost = frame.Row("append", "1 KiB", "fast", 0.25, "×", 2, ours="1 msg/s", other="4 msg/s")
    limit = frame.Row("append", "1 KiB", "raw", 0.25, "×", 0.2, limit=True)
    text = frame.shortcomings([won, lost, limit])
    assert "append, 1 KiB, against fast: 0.25× where 2× is required." in text
    assert "librmq has 1 msg/s, the other 4 msg/s" in text
    assert "slow" not in text
    assert "raw" not in text
    reached = "Every required figure was reached in this run."
    assert frame.shortcomings([won, limit]) == f"{reached}\n\nNo peer was faster in this run."
    assert frame.shortcomings([limit]) == reached


def test_the_table_leaves_empty_columns_out(frame: ModuleType) -> None:
    rows = [frame.Row("start", "", "", 0.25, "s", 0.3, at_most=True), frame.Row("rate", "", "", 2e4, "/s")]
    assert frame.markdown(rows).replace("\N{NO-BREAK SPACE}", "_").splitlines() == [
        "| path | measured | required | result |",
        "| --- | --- | --- | --- |",
        "| start | 0.25_s | ≤_0.3_s | met |",
        "| rate | 20,000/s |  |  |",
    ]


@pytest.mark.slow
def test_results_are_recorded_with_their_picture(
    frame: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plots = load(monkeypatch, "plots")
    monkeypatch.setattr(frame, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(frame, "TABLES", tmp_path / "results")
    monkeypatch.setattr(plots, "PICTURES", tmp_path / "pictures")
    ratio = frame.Row("append", "128 B", "peer", 5.0, "×", 2, low=4.0, high=6.0)
    points = [frame.Row("one queue: append", f"messages: {size:,}", "", 3.0, "µs") for size in (10, 1_000)]
    for name, rows in (("store", [ratio]), ("growth", points), ("memory", [frame.Row("memory", "", "", 3.0, "MiB")])):
        frame.record(name, rows, "a machine")
        assert frame.recorded()[name] == (rows, "a machine")
    assert "| 5.00× | 4.00–6.00 |" in (tmp_path / "results" / "store.md").read_text("utf-8")
    words = {path.stem: path.read_text("utf-8") for path in (tmp_path / "pictures").iterdir()}
    assert "5.00×  append, 128 B, against peer" in words["store"]
    assert "one queue" in words["growth"]
    assert set(words) == {"store", "growth"}


@pytest.mark.parametrize(
    "arguments", [["--rows", "append,none"], ["--rounds", "0"], ["--write", "--quick"], ["--write", "--rows", "pull"]]
)
def test_wrong_arguments_are_refused(
    frame: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    cases = [frame.Case(name, print) for name in ("append", "pull")]
    with pytest.raises(SystemExit) as refused:
        frame.main("store", "", cases, arguments)
    assert refused.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("store", "queue, mapped"), ("filter", "one message")])
def test_the_command_shows_a_table(name: str, rows: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--rounds", "1", "--rows", rows],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={"PYTHONPATH": str(CHECKOUT), "PYTHONIOENCODING": "utf-8", "PYTHONUTF8": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert rows in done.stdout
    assert "rounds: 1" in done.stdout
