"""Run the counted tests for hours, two at a time, and add what they have survived to a file.

    .venv/bin/python tools/prove.py --hours 8
    .venv/bin/python tools/prove.py --hours 0.5 --only tests/simulation

Each test goes on with the seeds behind those that it has had, and the test that has come least far is next. So a run
can be interrupted at any moment, and all come to their count at about the same time: after eight hours, on two
processors. A failure keeps the test's folder and output below ``build/proofs``.
It is printed first, until its entry in the file names the commit that repaired it as ``"repaired"``. The tests run on
the code that ``LIBRMQ_CORE`` names, but the fuzzing of the compiled core runs on the core.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from facts import UNCOUNTED_HOURS

CHECKOUT = Path(__file__).resolve().parent.parent
KEPT = CHECKOUT / "build" / "proofs"
_REACHED = re.compile(
    r"^(?P<test>\S+): (?P<done>[\d,]+)(?: of (?P<full>[\d,]+))? (?P<what>.*) in [\d.]+ s$", re.MULTILINE
)


class Collector:
    """Notes the tests that count rounds."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note them once the tests are collected."""
        self.names = [item.nodeid for item in items if "slow_budget" in getattr(item, "fixturenames", ())]


def counted_tests(places: list[str]) -> list[str]:
    """Return the tests below the places that count rounds."""
    collector = Collector()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main(["--collect-only", "-q", "-n", "0", "-m", "slow", *places], [collector])
    if status:
        sys.exit(f"the tests can't be collected:\n{output.getvalue()}")
    return collector.names


class Proofs:
    """What each test has survived, in a file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self.rows: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        """By test: ``what`` is counted, ``rounds`` (seeds from 0 on) and how many a full run has (``of``; None if that
        is a matter of time), ``hours``, ``commit``, ``failed`` first seeds."""

    def take(self, tests: list[str]) -> str | None:
        """Return the test that has come least far of those that do not run; None if all run."""
        with self._lock:
            free = [test for test in tests if test not in self._running]
            test = min(free, key=self.share, default=None)
            if test is not None:
                self._running.add(test)
            return test

    def share(self, test: str) -> float:
        """Return how many full runs a test has had; one with an open failure waits until the others have had theirs."""
        row = self.rows.get(test, {})
        had = row["rounds"] / row["of"] if row.get("of") else row.get("hours", 0) / UNCOUNTED_HOURS
        is_open = any("repaired" not in failed for failed in row.get("failed", ()))
        return float(had + 1 + row["hours"] if is_open else had)

    def open_failures(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the failures that no commit has repaired, each with its test."""
        return [
            (name, failed) for name, row in self.rows.items() for failed in row["failed"] if "repaired" not in failed
        ]

    def first_round(self, test: str) -> int:
        """Return the seed with which a test goes on."""
        return int(self.rows.get(test, {}).get("rounds", 0))

    def add(
        self, test: str, rounds: int, of: int | None, what: str, hours: float, commit: str, *, failed: bool
    ) -> None:
        """Add a run of a test, and write the file."""
        with self._lock:
            self._running.discard(test)
            row = self.rows.setdefault(test, {"what": what, "rounds": 0, "hours": 0.0, "commit": commit, "failed": []})
            failure = {"first_round": row["rounds"], "commit": commit}
            if failed and failure not in row["failed"]:
                row["failed"].append(failure)
            row.update(what=what or row["what"], rounds=row["rounds"] + rounds, of=of or row.get("of"), commit=commit)
            row["hours"] = round(row["hours"] + hours, 4)
            text = json.dumps(dict(sorted(self.rows.items())), indent=1) + "\n"
            beside = self._path.with_suffix(".new")
            beside.write_text(text, "utf-8")
            beside.replace(self._path)


def prove(proofs: Proofs, test: str, seconds: float, commit: str) -> None:
    """Run a test for some time, and note how far it came."""
    first = proofs.first_round(test)
    folder = KEPT / f"{zlib.crc32(test.encode()):08x}-{first}"  # short, because tests bind sockets below it
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", test, "-q", "-n", "0", "-p", "no:cacheprovider"]
    variables = {**os.environ, "RMQ_SLOW_SECONDS": str(seconds), "RMQ_FIRST_ROUND": str(first)}
    if test.endswith("[core]"):
        variables["LIBRMQ_CORE"] = ""  # what fuzzes the compiled core tries nothing on the Python code
    begin = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        status = subprocess.call(
            [*command, "--basetemp", str(folder / "files")], cwd=CHECKOUT, env=variables, stdout=output, stderr=output
        )
    text = (folder / "output.txt").read_text("utf-8", "replace")
    reached = _REACHED.findall(text)
    rounds, of = (sum(int(row[place].replace(",", "") or 0) for row in reached) for place in (1, 2))
    what = ", ".join(dict.fromkeys(what for _, _, _, what in reached))
    if not status and not rounds:  # it was skipped: it counts nothing, and stays among those that run
        print(f"left out, because it tried nothing: {test}\n  {folder}", flush=True)
        return
    proofs.add(test, rounds, of or None, what, (time.monotonic() - begin) / 3600, commit, failed=status != 0)
    if status:
        print(f"FAILED from round {first} on: {test}\n  {folder}", flush=True)
    else:
        print(f"{rounds:,} {what} from {first:,} on: {test}", flush=True)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() or path.is_symlink() else path.rmdir()
        folder.rmdir()


def main() -> int:
    """Run the tests until the time is over; return 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, required=True)
    parser.add_argument("--only", nargs="+", default=["tests"], metavar="TEST", help="files, folders or tests")
    parser.add_argument("--seconds", type=float, default=120, help="of each turn of a test")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--file", type=Path, default=CHECKOUT / "build" / "proofs.json")
    settings = parser.parse_args()
    os.chdir(CHECKOUT)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    tests, proofs = counted_tests(settings.only), Proofs(settings.file)
    for name, failed in proofs.open_failures():
        print(f"FAILED at {failed['commit']}, from round {failed['first_round']} on: {name}")
    print(f"{len(tests)} counted tests, {settings.hours:g} hours, {settings.jobs} at a time", flush=True)
    end = time.monotonic() + 3600 * settings.hours

    def work() -> None:
        while time.monotonic() < end and (test := proofs.take(tests)) is not None:
            prove(proofs, test, min(settings.seconds, end - time.monotonic()), git.stdout.strip())

    workers = [threading.Thread(target=work) for _ in range(settings.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return int(bool(proofs.open_failures()))


if __name__ == "__main__":
    sys.exit(main())
