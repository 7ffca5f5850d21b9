"""What all tests share: reference data, copies of its stores, the budget of slow tests, no skips in CI."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.reference import (
    ABSENT,
    Row,
    document,
    encoding,
    existing,
    folders,
    jsonl,
    reference,
    rows,
    store_folders,
)

pytest_plugins = ("pytest_librmq", "pytester")

__all__ = ["Row", "document", "encoding", "existing", "folders", "jsonl", "rows", "store_folders"]

# A busy machine is no failure: neither profile looks at time.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
    print_blob=True,
)


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if in_ci() else "dev"))


def pytest_report_header(config: pytest.Config) -> list[str]:
    import librmq

    return [f"reference data: {reference().origin}", f"librmq: {Path(librmq.__file__ or '').parent}"]


# --- reference data


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of reference data; ``existing(...)`` skips where a part of it is absent."""
    return reference().folder


StoreCopy = Callable[[str | Path], Path]


@pytest.fixture
def store_copy(tmp_path: Path) -> StoreCopy:
    """``store_copy("store-basic")``, or with a folder: a copy of its ``store/`` that the test may spoil."""

    def copy(name: str | Path) -> Path:
        source = (existing(name) if isinstance(name, str) else name) / "store"
        target = tmp_path / f"{source.parent.name}-{len(list(tmp_path.iterdir()))}"
        # The originals may be read-only: contents are copied, modes are not.
        shutil.copytree(source, target, copy_function=shutil.copyfile)
        for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
            folder.chmod(0o755)
        return target

    return copy


# --- the budget of slow tests


class SlowBudget:
    """One test's share of the time for slow tests; what it does not use goes to those after it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.reached: list[str] = []

    def rounds(self, wanted: int, what: str = "rounds", at_least: int = 1) -> Iterator[int]:
        """0, 1, … up to ``wanted``, until the share is used up, though never fewer than ``at_least``.

        How far it came is printed at the end of the run.
        """
        begin = time.monotonic()  # noqa: TID251 (the budget is of real time)
        done = 0
        try:
            while done < wanted and (done < at_least or self._used(begin) < self.seconds):
                yield done
                done += 1
        finally:
            self.reached.append(f"{done:,} of {wanted:,} {what} in {self._used(begin):.1f} s")

    @staticmethod
    def _used(begin: float) -> float:
        return time.monotonic() - begin  # noqa: TID251


class _Slow:
    """The seconds left for slow tests (``RMQ_SLOW_SECONDS``, or 60), and the tests that wait for them."""

    seconds = float(os.environ.get("RMQ_SLOW_SECONDS") or 60)
    waiting = 0
    told: list[str] = []  # noqa: RUF012 (one for the run)


def pytest_collection_finish(session: pytest.Session) -> None:
    _Slow.waiting = sum("slow_budget" in getattr(item, "fixturenames", ()) for item in session.items)


@pytest.fixture
def slow_budget(request: pytest.FixtureRequest) -> Iterator[SlowBudget]:
    """The test's share of the time: ``for number in slow_budget.rounds(10_000, "crash points"):``."""
    budget = SlowBudget(_Slow.seconds / max(1, _Slow.waiting))
    begin = time.monotonic()  # noqa: TID251
    yield budget
    _Slow.seconds = max(0.0, _Slow.seconds - (time.monotonic() - begin))  # noqa: TID251
    _Slow.waiting -= 1
    _Slow.told += [f"{request.node.nodeid}: {reached}" for reached in budget.reached]


_figures: list[str] = []


@pytest.fixture
def figure() -> Callable[[str], None]:
    """``figure("756 of 756 cases …")``: what a test measured, printed at the end of the run."""
    return _figures.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("figures")
        for line in _figures:
            terminalreporter.line(line)
    if _Slow.told:
        terminalreporter.section("how far slow tests came")
        for line in _Slow.told:
            terminalreporter.line(line)


# --- in CI a skip is a failure


def _allowed(reason: str) -> bool:
    """Skips for want of reference data are allowed where not all of it is at hand anyway."""
    return reason.removeprefix("Skipped: ").startswith(ABSENT) and not reference().whole


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    longrepr = report.longrepr
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    if not _allowed(reason):
        report.outcome = "failed"
        report.longrepr = f"in CI nothing may be skipped (mark it platform if it must be): {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if in_ci() and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("platform"):
        _forbid(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if in_ci() and report.skipped:
        _forbid(report)
    return report
