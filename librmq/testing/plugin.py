"""The part of the pytest plugin that loads when a test needs it; `pytest_librmq` is the other part."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest
from _pytest.runner import runtestprotocol

from librmq.clock import SystemClock
from librmq.errors import ConfigError, InputError
from librmq.message.ids import format_host
from librmq.testing._evidence import HistoryAnomalyError
from librmq.testing._from_store import StoreStart, shrink
from librmq.testing._kit import Kit, KitKeywords, begin_of
from librmq.testing._network import SMALL_FILES
from librmq.testing.exploring._exploration import (
    Exploration,
    Fewest,
    check_runs,
    encode_schedule,
    explored_kit,
    read_seed,
    schedule_document,
    search,
    signature_of,
)
from librmq.testing.exploring._explorer import Explorer
from librmq.testing.exploring._explorer import end_threads as end_threads

if TYPE_CHECKING:
    from librmq.testing._served import ServedKit

_KIT: Final = pytest.StashKey[Kit]()
_EXPLORER: Final = pytest.StashKey[Explorer | None]()
_ERROR: Final = pytest.StashKey[BaseException | None]()
_BEGIN_MS: Final = pytest.StashKey[int]()
"""The time at which all schedules of a test begin, so that they differ by what is chosen alone."""
_START: Final = pytest.StashKey[StoreStart]()
"""What the kit of a run begins with."""


def kit_of(request: pytest.FixtureRequest) -> Generator[Kit, None, None]:
    """Make the fixture ``rmq``."""
    node = request.node
    settings = _settings(request)
    if not (settings.get("over_tcp") or settings.get("over_share")):  # what a test needs is its marker's choice
        for name in ("over_tcp", "over_share"):
            if request.config.getoption(f"rmq_{name}"):
                settings.setdefault(name, True)
    explorer = node.stash.get(_EXPLORER, None)
    if explorer is not None and settings.get("store") is None:
        settings.setdefault("now_ms", node.stash.setdefault(_BEGIN_MS, begin_of(None, None)))
    with _opened(settings) if explorer is None else explored_kit(explorer, **settings) as kit:
        node.stash[_KIT] = kit
        try:
            yield kit
            if node.stash.get(_ERROR, None) is None:
                try:
                    kit.close()
                except HistoryAnomalyError:
                    if explorer is not None:
                        explorer.trace.history = kit._account()
                    raise
        finally:
            del node.stash[_KIT]


def served_kit_of(request: pytest.FixtureRequest, *, remoting: bool = False) -> Generator[ServedKit, None, None]:
    """Make the fixture ``rmq_grpc``, or ``rmq_remoting``."""
    from librmq.testing._served import ServedKit

    node = request.node
    listening = None
    settings: dict[str, Any] = _settings(request, *(() if remoting else ("min_polling",)))
    min_polling = settings.pop("min_polling", None)
    start: StoreStart | None = settings.get("store")
    now_ms = SystemClock().now_ms()  # clients compute times of delivery by theirs
    settings.setdefault("now_ms", now_ms if start is None else max(now_ms, start.now_ms))
    if remoting:
        from librmq.wire.remoting import listen

        listening = listen()
        config = settings.get("store_config") or SMALL_FILES
        store_host = format_host(listening.getsockname())  # clients of 4.x dial the store's address
        settings["store_config"] = replace(config, store_host=store_host)
    with _opened(settings) as kit:
        node.stash[_KIT] = kit
        try:
            with ServedKit(kit, None if remoting else 0, listening, min_polling=min_polling) as served:
                yield served
            if node.stash.get(_ERROR, None) is None:
                kit.close()
        finally:
            del node.stash[_KIT]


def _settings(request: pytest.FixtureRequest, *further: str) -> dict[str, Any]:
    """Return the settings of the kit that the marker ``rmq`` names, and ``further`` ones of the fixture."""
    marker = request.node.get_closest_marker("rmq")
    settings: dict[str, Any] = dict(marker.kwargs) if marker is not None else {}
    names = ["on_disk", *further, *KitKeywords.__annotations__]
    if unknown := sorted(settings.keys() - set(names)):
        raise ConfigError(f"the marker rmq has no setting {', '.join(unknown)}; its settings are {', '.join(names)}")
    if settings.get("store") is not None:
        topics, groups = settings.pop("topics", None), settings.pop("groups", None)
        if _START not in request.node.stash:
            path = _store_path(settings["store"], request.path.parent)
            request.node.stash[_START] = StoreStart.read(path, topics, groups, settings.get("store_config"))
        start = settings["store"] = request.node.stash[_START]
        settings["store_config"] = start.config
    if settings.pop("on_disk", False):
        folder = request.getfixturevalue("tmp_path") / "broker"
        folder.mkdir()
        settings["path"] = folder
    return settings


def _store_path(path: str | os.PathLike[str], beside: Path) -> str | os.PathLike[str]:
    """Return the folder of a store, which a relative path names from the test's file on, or else from the cwd on."""
    near = beside / path
    return near if near.exists() else path


@contextmanager
def _opened(settings: dict[str, Any]) -> Iterator[Kit]:
    kit = Kit(**settings)
    try:
        yield kit
    finally:
        kit.abandon()


def add_history(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Record the failure of a test's phase, and add the history up to then."""
    error = None if call.excinfo is None else call.excinfo.value
    if error is None or (report.skipped and not hasattr(report, "wasxfail")):
        return
    item.stash.setdefault(_ERROR, None)
    if item.stash[_ERROR] is None:
        item.stash[_ERROR] = error
    kit, explorer = item.stash.get(_KIT, None), item.stash.get(_EXPLORER, None)
    if kit is not None:
        if explorer is not None:
            explorer.trace.history = kit._account()
        else:
            report.sections.append(("what happened (rmq)", kit._account()))


_EXPLORE_SETTINGS = ("runs", "lines", "seed")
"""The settings of the marker ``rmq_explore``."""


class _NothingToExplore(Exception):
    """The test was skipped."""


def check_explored(item: pytest.Item, marker: pytest.Mark) -> None:
    """Raise `pytest.UsageError` for a test that can't be explored, or wrong settings of its marker."""
    for served in {"rmq_grpc", "rmq_remoting"}.intersection(getattr(item, "fixturenames", ())):
        raise pytest.UsageError(
            f"{item.nodeid}: a test with {served} can't be explored, because librmq cannot choose the order in which "
            "official clients act: remove rmq_explore, or use the fixture rmq"
        )
    if "rmq" not in getattr(item, "fixturenames", ()):
        raise pytest.UsageError(f"{item.nodeid}: a test marked rmq_explore takes the fixture rmq")
    if unknown := marker.kwargs.keys() - _EXPLORE_SETTINGS:
        raise pytest.UsageError(
            f"{item.nodeid}: rmq_explore has no setting {', '.join(sorted(unknown))}; its settings are "
            f"{', '.join(_EXPLORE_SETTINGS)}"
        )
    if len(marker.args) > 1:
        raise pytest.UsageError(
            f"{item.nodeid}: rmq_explore takes runs alone without a name, found {marker.args!r:.80}"
        )
    try:
        check_runs(_runs(marker))
    except ConfigError as error:
        raise pytest.UsageError(f"{item.nodeid}: rmq_explore: {error}") from error


def _runs(marker: pytest.Mark) -> int:
    runs: int = marker.args[0] if marker.args else marker.kwargs.get("runs", 200)
    return runs


class _Repetition:
    """Repeats the whole protocol of a test with its own fixtures, and reports one run."""

    def __init__(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self.reports: list[pytest.TestReport] = []
        """The reports of the last run, or of the one to show."""
        self._item = item
        self._nextitem = nextitem

    def run(self) -> BaseException | None:
        """Run the test once; return its failure."""
        item = self._item
        item.stash[_ERROR] = None
        item._report_sections.clear()  # output and log lines of earlier runs
        # Name the parent as the next item, so that fixtures of wider scope stay.
        self.reports = runtestprotocol(item, log=False, nextitem=item.parent)  # type: ignore[arg-type]
        return item.stash[_ERROR]

    @property
    def was_skipped(self) -> bool:
        return any(report.skipped and not hasattr(report, "wasxfail") for report in self.reports)

    def report(self, run_all: Callable[[], None]) -> None:
        item = self._item
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)

        def tear_down() -> None:
            item.stash[_ERROR] = None
            item.stash[_EXPLORER] = None
            if _START in item.stash:
                del item.stash[_START]
            item.session._setupstate.teardown_exact(self._nextitem)

        phases: list[tuple[Callable[[], None], Literal["call", "teardown"]]]
        phases = [(run_all, "call"), (tear_down, "teardown")]
        for phase, when in phases:  # an error fails this test, and later ones run
            ended = pytest.CallInfo.from_call(phase, when, (pytest.exit.Exception, KeyboardInterrupt))
            if ended.excinfo is not None:
                self.reports.append(item.ihook.pytest_runtest_makereport(item=item, call=ended))
        for report in self.reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def explore_item(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a test under many schedules, and report the most informative run."""
    marker = item.get_closest_marker("rmq_explore")
    assert marker is not None
    option = item.config.getoption("rmq_seed")
    seed = str(option if option is not None else marker.kwargs.get("seed", "0"))
    try:
        replay = read_seed(seed)
    except InputError as error:
        raise pytest.UsageError(f"--rmq-seed: {error}") from error
    failed: dict[int, list[pytest.TestReport]] = {}
    repetition = _Repetition(item, nextitem)

    def run(explorer: Explorer) -> BaseException | None:
        item.stash[_EXPLORER] = explorer
        error = repetition.run()
        if repetition.was_skipped:
            raise _NothingToExplore
        if error is not None:
            failed[id(explorer.trace)] = repetition.reports
        return error

    def search_all() -> None:
        try:
            lines = marker.kwargs.get("lines", False)
            result = search(run, _runs(marker), seed, replay, lines=lines, most_stores=_most_tries(item))
        except _NothingToExplore:
            return
        if result.found is not None:
            repetition.reports = failed[id(result.found.trace)]
            _describe(item, repetition.reports, result)
            if result.found.fewest is not None:
                _add_section(repetition.reports, "shrunk (rmq)", _described(item, result.found.fewest))
        repetition.reports[-1].user_properties.append(("rmq_explored", result.summary()))

    repetition.report(search_all)


def shrink_item(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run a test that begins with a store; if it fails, look for the fewest messages with which it fails so."""
    is_repeatable = "rmq" in getattr(item, "fixturenames", ())  # unlike the order in which official clients act
    most_tries = _most_tries(item) if is_repeatable else 0
    repetition = _Repetition(item, nextitem)

    def run_all() -> None:
        error = repetition.run()
        original = repetition.reports
        if error is None or most_tries <= 0 or not any(report.failed for report in original) or original[0].failed:
            return
        signature = signature_of(error)
        smallest: list[pytest.TestReport] = []

        def fails(start: StoreStart) -> bool:
            nonlocal smallest
            item.stash[_START] = start
            failure = repetition.run()
            is_same = failure is not None and signature_of(failure) == signature
            if is_same:
                smallest = repetition.reports
            return is_same

        start = item.stash[_START]
        shrunk = shrink(start, fails, most_tries)
        repetition.reports = smallest if shrunk is not None and shrunk.start.messages else original
        _add_section(repetition.reports, "shrunk (rmq)", _described(item, Fewest(start, shrunk, ())))

    repetition.report(run_all)


def _most_tries(item: pytest.Item) -> int:
    """Return how many runs with fewer messages the failure of a test allows."""
    tries: int = item.config.getoption("rmq_shrink")
    return 0 if item.config.getoption("usepdb", False) else tries


def _described(item: pytest.Item, fewest: Fewest) -> str:
    """Save the smallest store, and return what the test's failure says of it."""
    tries = 0 if fewest.shrunk is None else fewest.shrunk.tries
    return fewest.describe(f", and --rmq-shrink={10 * tries} may find fewer", partial(_saved, item, fewest))


def _saved(item: pytest.Item, fewest: Fewest, start: StoreStart) -> list[str]:
    folder = _cache_file(item, "-store")
    if folder is None:
        return ["they are not saved, because pytest runs without its cache"]
    shutil.rmtree(folder, ignore_errors=True)
    saved = start.save_to(folder)
    names = f"topics={list(start.topics)!r}, groups={list(start.groups)!r}"
    lines = [
        f"{saved}: {folder}",
        "copy it beside the test, which then begins with it:",
        f"cp -r {folder} {item.path.parent / 'failing-store'}",
        f"@pytest.mark.rmq(store='failing-store', {names})",
    ]
    if fewest.decisions:
        lines.append(f"pytest {item.nodeid!r} --rmq-seed={encode_schedule(fewest.decisions)}")
    return lines


def _cache_file(item: pytest.Item, ending: str) -> Path | None:
    """Return a place in pytest's cache for what a failing test leaves; None without a cache."""
    cache = getattr(item.config, "cache", None)
    return None if cache is None else Path(cache.mkdir("rmq")) / (re.sub(r"[^\w.-]+", "-", item.nodeid)[-150:] + ending)


def _add_section(reports: Sequence[pytest.TestReport], title: str, text: str) -> None:
    for report in reports:
        if report.failed or hasattr(report, "wasxfail"):
            report.sections.append((title, text))
            break


def _describe(item: pytest.Item, reports: list[pytest.TestReport], result: Exploration) -> None:
    """Add the schedule to the report, and save it in a file."""
    assert result.found is not None
    text = result.report()
    path = _cache_file(item, ".json") if result.found.decisions else None
    if path is not None:
        path.write_text(schedule_document(item.nodeid, result.found), "utf-8")
        text += f"\nor from the file {path}:\npytest {item.nodeid!r} --rmq-seed={path}"
    _add_section(reports, "explored (rmq)", text)
