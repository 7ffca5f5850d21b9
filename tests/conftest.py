"""Fixtures for all tests: reference data, copies of its stores, the time budget of slow tests; no skips in CI."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import gc
import hashlib
import inspect
import io
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, is_hypothesis_test, settings, strategies

from librmq.clock import ManualClock
from tests import budget, lock_order, own
from tests.log_levels import reset_levels
from tests.over_tcp import reason_of
from tests.reference import ABSENT, Row, document, encoding, existing, folders, jsonl, reference, rows, store_folders

pytest_plugins = ("pytest_librmq", "pytester")

__all__ = ["Row", "document", "encoding", "existing", "folders", "jsonl", "rows", "store_folders"]

# Neither profile checks time: a test must not fail because the machine is busy.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
    print_blob=True,
    max_examples=33,  # a third of what Hypothesis tries otherwise, and the same ones in each run
)
# The quick check draws few examples, and the same ones each time.
settings.register_profile("quick", settings.get_profile("ci"), max_examples=100 // budget.QUICK_DRAWN_PART)


MEMORY = Path("/dev/shm")
"""Temporary files are here if the folder exists: a flush is immediate."""
ON_DISK = ("tests/crash/", "tests/files/", "tests/golden/", "tests/store/", "tests/test_")
"""The tests about files, by the beginnings of their names: the whole check gives them a folder on a disk."""


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


lock_order.install()


def pytest_configure(config: pytest.Config) -> None:
    os.environ[lock_order.FAULTS] = tempfile.mkstemp(prefix="librmq-locks-")[1]
    os.environ.pop("COLUMNS", None)  # pytest-xdist gives its processes the width of its terminal
    quick = "not slow" in config.option.markexpr
    budget.run = budget.Run(quick, in_ci())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # shells start background jobs so
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("quick" if quick else "ci" if in_ci() else "dev"))


def pytest_report_header(config: pytest.Config) -> list[str]:
    import librmq

    return [f"reference data: {reference().origin}", f"librmq: {Path(librmq.__file__ or '').parent}"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an ``async def`` test in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def _locks_are_in_order() -> Iterator[None]:
    """Fail a test in which locks were taken in another order than that of the list."""
    lock_order.begin()
    yield
    faults = lock_order.faults()
    assert not faults, faults


@pytest.fixture(autouse=True)
def _levels_remain() -> Iterator[None]:
    """Fail a test that leaves a level at a logger of librmq."""
    yield
    assert not reset_levels()


@pytest.fixture(autouse=True)
def _users_progress_remains() -> Iterator[None]:
    """Fail a test whose broadcasting consumer keeps its progress in the user's home, where the next run finds it."""
    before = _progress_of_user()
    yield
    assert _progress_of_user() == before, "give the consumer an offsets_folder, or the route of a kit"


def _progress_of_user() -> dict[Path, int]:
    """Return the files with their times, without those of other processes, which can run beside the tests."""
    files = Path.home().glob(".rocketmq_offsets/*/*/*")
    own = f"@{os.getpid()}#"
    return {path: path.stat().st_mtime_ns for path in files if own in str(path) or "#" not in str(path)}


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a new folder, in the whole check on a disk for those of `ON_DISK`."""
    if budget.run.quick or not request.node.nodeid.startswith(ON_DISK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


# --- reference data


@pytest.fixture(scope="session")
def golden() -> Path:
    """Return the folder of reference data; use ``existing(...)`` to skip a test when a part of it is missing."""
    return reference().folder


StoreCopy = Callable[[str | Path], Path]


@pytest.fixture
def store_copy(tmp_path: Path) -> StoreCopy:
    """Copy the ``store/`` of a folder, or of a name such as ``"store-basic"``; the test may change the copy."""

    def copy(name: str | Path) -> Path:
        source = (existing(name) if isinstance(name, str) else name) / "store"
        target = tmp_path / f"{source.parent.name}-{len(list(tmp_path.iterdir()))}"
        # Copy contents but not modes, because the source may be read-only.
        shutil.copytree(source, target, copy_function=shutil.copyfile)
        for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
            folder.chmod(0o755)
        return target

    return copy


Run = Callable[..., tuple[int, list[Any], str]]


@pytest.fixture
def run_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command, as in ``run_lines("filter", "a > 5", given=…)``; return its exit status, lines and messages.

    ``given`` is the command's standard input: a string, bytes, or a list of rows and lines.
    """

    def run(*words: object, given: str | bytes | list[Row | str] = b"") -> tuple[int, list[str], str]:
        from librmq.cli import main
        from tests.cases import commands_for

        if isinstance(given, list):
            given = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in given)
        data = given.encode() if isinstance(given, str) else given
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        status = main([str(word) for word in words], commands_for(words))
        shown = capsys.readouterr()
        return status, shown.out.splitlines(), shown.err

    return run


@pytest.fixture
def run(run_lines: Run) -> Run:
    """Run a command as `run_lines` does, but parse its output as JSON lines."""

    def run_(*words: object, given: Any = b"") -> tuple[int, list[Row], str]:
        status, lines, said = run_lines(*words, given=given)
        return status, [json.loads(line) for line in lines], said

    return run_


# --- machines that stand still


_PATIENCE_S = 60.0


@pytest.fixture(autouse=True, scope="session")
def kits_begin_at_one_time() -> Iterator[None]:
    """Let kits begin in November 2023 instead of at the machine's time, so that each run of the tests is alike."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("librmq.testing._network.SystemClock", lambda: ManualClock(1_700_000_000_000))
        yield


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """Give sends and requests by the machine's clock a minute by default, because a busy machine can stall for seconds.

    Under a manual clock the defaults of the library count, and so does what a test sets itself.
    """
    from librmq.client.producer import Producer
    from librmq.clock import moves_by_itself
    from librmq.wire.remote.remote_route import connect

    make, defaults = Producer.__init__, connect.__kwdefaults__
    assert defaults is not None

    @functools.wraps(make)
    def make_patient(self: Producer, route: Any, *arguments: Any, **settings: Any) -> None:
        runner = getattr(route, "runner", None)
        if settings.get("config") is None and runner is not None and moves_by_itself(runner.clock):
            settings.setdefault("timeout", _PATIENCE_S)
        make(self, route, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Producer, "__init__", make_patient)
        patched.setitem(defaults, "timeout", _PATIENCE_S)
        yield


# --- the budget of slow tests


class SlowBudget:
    """One test's share of the time for slow tests; what it does not use goes to later tests."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.reached: list[str] = []

    def rounds(self, wanted: int, what: str = "rounds", at_least: int = 1, *, of_list: bool = False) -> Iterator[int]:
        """Yield up to ``wanted`` numbers of rounds, which are seeds; ``of_list`` says that they are places of a list.

        They begin at 0, or at ``RMQ_FIRST_ROUND``, by which `tools/prove.py` goes on where it stopped. They end when
        the share is used up, but not before ``at_least`` rounds. The number of rounds done is printed at the end of
        the run.
        """
        begin = time.monotonic()  # noqa: TID251 (the budget is of real time)
        first = int(os.environ.get("RMQ_FIRST_ROUND") or 0)
        done = 0
        try:
            while done < wanted and (done < at_least or self._used(begin) < self.seconds):
                yield (first + done) % wanted if of_list else first + done
                done += 1
        finally:
            self.reached.append(f"{done:,} of {wanted:,} {what} in {self._used(begin):.1f} s")

    @staticmethod
    def _used(begin: float) -> float:
        return time.monotonic() - begin  # noqa: TID251


class SlowTime:
    """The time for slow tests (``RMQ_SLOW_SECONDS``, or 60, for each process of a run), shared through a folder.

    The folder holds one file for each test that has begun: the seconds it was given or, once it has ended, took.
    """

    def __init__(self, folder: Path, seconds: float, tests: int) -> None:
        self.folder = folder
        self.seconds = seconds
        self.tests = tests

    def share(self, test: str) -> float:
        """Return the time for a test that is about to begin: an equal part of the time left."""
        taken = [float(path.read_text()) for path in self.folder.iterdir()]
        share = max(0.0, self.seconds - sum(taken)) / max(1, self.tests - len(taken))
        self.note(test, share)
        return share

    def note(self, test: str, seconds: float) -> None:
        """Record the time that a test was given, or took."""
        name = hashlib.sha256(test.encode()).hexdigest()
        beside = self.folder.with_name(name)
        beside.write_text(str(seconds))
        os.replace(beside, self.folder / name)  # so that other processes never read half of it


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collections, each of which would scan all modules and tests so far."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


_slow_tests = 0


def pytest_collection_finish(session: pytest.Session) -> None:
    global _slow_tests
    _slow_tests = sum("slow_budget" in getattr(item, "fixturenames", ()) for item in session.items)
    gc.collect()
    gc.freeze()  # spares each garbage collection from scanning thousands of tests
    gc.set_threshold(20_000, 20, 20)  # with 700 objects collections take a tenth of the time of all tests
    if session.config.option.collectonly:
        _fill_caches_of_hypothesis()


def _fill_caches_of_hypothesis() -> None:
    """Let Hypothesis note what it learns of all characters and of librmq's constants, which takes seconds.

    `./check` collects in a new checkout before it starts several processes, each of which would learn it otherwise.
    """

    @settings(max_examples=100)
    @given(strategies.lists(strategies.text()))
    def draw(_: list[str]) -> None: ...

    draw()


@pytest.fixture(scope="session")
def slow_time(tmp_path_factory: pytest.TempPathFactory) -> SlowTime:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if workers else base) / "slow-time" / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    seconds = float(os.environ.get("RMQ_SLOW_SECONDS") or 60)
    return SlowTime(folder, seconds * max(1, workers), _slow_tests)


@pytest.fixture
def slow_budget(request: pytest.FixtureRequest, slow_time: SlowTime) -> Iterator[SlowBudget]:
    """Give the test its share of the time: ``for number in slow_budget.rounds(10_000, "crash points"):``."""
    name = request.node.nodeid.partition("@")[0]  # with several processes, the group's name follows the @
    budget = SlowBudget(slow_time.share(name))
    if budget.seconds > float(request.config.getini("faulthandler_timeout")) / 2:
        faulthandler.cancel_dump_traceback_later()  # a test with this much time is slow, not hung
    begin = time.monotonic()  # noqa: TID251
    yield budget
    slow_time.note(name, time.monotonic() - begin)  # noqa: TID251
    request.node.user_properties += [("slow", f"{name}: {reached}") for reached in budget.reached]


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Note what a test measured, as in ``figure("756 of 756 cases …")``; it is printed at the end of the run."""
    return lambda line: request.node.user_properties.append(("figure", line))


_told: dict[str, list[str]] = {"figure": [], "slow": []}
_skipped: dict[str, str] = {}
"""Reasons by test, because several processes can report the same module that was not collected."""


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    return (longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)).removeprefix("Skipped: ")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped[report.nodeid] = _reason(report)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the figures of tests in the process that prints them; it gets the reports of all other processes."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped[report.nodeid] = _reason(report)
    if report.when == "teardown":
        for name, line in report.user_properties:
            if name in _told:
                _told[name].append(str(line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, title in (("figure", "figures"), ("slow", "how far slow tests came")):
        if _told[name]:
            terminalreporter.section(title)
            for line in sorted(_told[name]):
                terminalreporter.line(line)
    # Print each reason once, with the number of tests that share it.
    lacking = f"this run has only a part of the reference data, {reference().origin}"
    reasons = Counter(lacking if reason.startswith(ABSENT) else reason for reason in _skipped.values())
    for reason, number in reasons.most_common():
        terminalreporter.line(f"skipped {number}: {reason}")


# --- several processes

_process = os.environ.get("PYTEST_XDIST_WORKER", "")
"""The name of this worker process: gw0, gw1, …; empty if the run has a single process."""


@pytest.hookimpl(wrapper=True)
def pytest_collect_directory(path: Path) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
    """Begin at another place in each process: at the front, at the back, and in the middle.

    The first run in a checkout rewrites and compiles every test module. This way each process finds most of them done.
    """
    collector = yield
    place = int(_process[2:] or 0) % 3
    if collector is not None and place:
        in_order = collector.collect

        def collect() -> list[pytest.Item | pytest.Collector]:
            found = list(in_order())
            middle = len(found) // 2
            return found[::-1] if place == 1 else found[middle:] + found[:middle]

        collector.collect = collect  # type: ignore[method-assign]
    return collector


def pytest_make_parametrize_id(val: object) -> str | None:
    """Cut long values, because the processes of a run send the name of a test several times."""
    if isinstance(val, str | bytes) and len(val) > 100:
        return f"{val[:40]!r} and more, {len(val)} long"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order and group tests for several processes.

    Long tests come first, so that no process is still busy with one at the end, and are distributed one by one. Tests
    that share a session or a server stay together. The other tests of a module stay together too, because they share
    its fixtures.
    """
    own.keep(items)
    if budget.run.quick:
        _leave_out(items)
    over_tcp, over_share = (
        (items[0].config.getoption(f"rmq_over_{way}") for way in ("tcp", "share")) if items else (False, False)
    )
    for item in items if over_tcp or over_share else ():
        reason = reason_of(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"over a connection: {reason}"))
    if _process:
        ranks: dict[str, int] = {}
        for item in items:
            if item.get_closest_marker("spark"):
                item.add_marker(pytest.mark.xdist_group("spark"))
            is_grouped = item.get_closest_marker("xdist_group") is not None
            ranks[item.nodeid] = 0 if is_grouped else 1 if _is_long(item) else 2
            if ranks[item.nodeid] == 2:
                item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
        items.sort(key=lambda item: (ranks[item.nodeid], str(item.path)))


def _leave_out(items: list[pytest.Item]) -> None:
    """Keep one case in `budget.PART` of each test of `budget.many`, the first too."""
    places = defaultdict[str, Iterator[int]](itertools.count)
    left_out = [
        item
        for item in items
        if getattr(getattr(item, "function", None), "has_many_cases", False)
        and next(places[item.nodeid.partition("[")[0]]) % budget.PART
    ]
    if left_out:
        items[0].config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def _is_long(item: pytest.Item) -> bool:
    """Return whether a test can take long: a slow one, one that crashes stores, or draws its cases."""
    is_drawn = is_hypothesis_test(getattr(item, "function", None)) or item.path.stem.endswith("_machine")
    return is_drawn or "crash" in item.path.parts or item.get_closest_marker("slow") is not None


# --- in CI a skip is a failure


def _allowed(reason: str) -> bool:
    """Return whether a skip is allowed: only for missing reference data, and only if the data in use are incomplete."""
    return reason.startswith(ABSENT) and not reference().whole


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = _reason(report)
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
    if report.skipped and "not spark" in collector.config.getoption("markexpr") and "'pyspark'" in _reason(report):
        # The quick check leaves these tests out, so it does not need Spark.
        report.outcome, report.longrepr, report.result = "passed", None, []
    if in_ci() and report.skipped:
        _forbid(report)
    return report
