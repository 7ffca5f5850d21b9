"""The part of the pytest plugin that loads when a test needs it; `pytest_librmq` is the other part."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest
from _pytest.runner import runtestprotocol

from librmq.broker import BrokerConfig
from librmq.clock import SystemClock
from librmq.errors import ConfigError, InputError
from librmq.message.ids import format_host
from librmq.scheduling.timer_config import TimerConfig
from librmq.testing.exploration import Exploration, explored_kit, read_seed, schedule_document, search
from librmq.testing.explorer import Explorer
from librmq.testing.explorer import end_threads as end_threads
from librmq.testing.kit import SMALL_FILES, Kit, KitKeywords
from librmq.testing.verdict import HistoryAnomalyError

if TYPE_CHECKING:
    from librmq.testing.served import ServedKit

_KIT: Final = pytest.StashKey[Kit]()
_EXPLORER: Final = pytest.StashKey[Explorer | None]()
_ERROR: Final = pytest.StashKey[BaseException | None]()


def kit_of(request: pytest.FixtureRequest) -> Generator[Kit, None, None]:
    """Make the fixture ``rmq``."""
    node = request.node
    settings = _settings(request)
    if request.config.getoption("rmq_over_tcp"):
        settings.setdefault("over_tcp", True)
    explorer = node.stash.get(_EXPLORER, None)
    with _opened(settings) if explorer is None else explored_kit(explorer, **settings) as kit:
        node.stash[_KIT] = kit
        try:
            yield kit
            if node.stash.get(_ERROR, None) is None:
                try:
                    kit.close()
                except HistoryAnomalyError:
                    if explorer is not None:
                        explorer.trace.history = kit.account()
                    raise
        finally:
            del node.stash[_KIT]


def served_kit_of(request: pytest.FixtureRequest, *, remoting: bool = False) -> Generator[ServedKit, None, None]:
    """Make the fixture ``rmq_grpc``, or ``rmq_remoting``."""
    from librmq.testing.served import Serve, ServedKit, serve_grpc, serve_remoting

    node = request.node
    serve: Serve = serve_grpc
    settings: dict[str, Any] = {
        "broker_config": BrokerConfig(timers=TimerConfig()),
        "now_ms": SystemClock().now_ms(),  # clients compute times of delivery by theirs
        **_settings(request),
    }
    if remoting:
        from librmq.wire.remoting import listen

        listening = listen()
        config = settings.get("store_config") or SMALL_FILES
        store_host = format_host(listening.getsockname())  # clients of 4.x dial the store's address
        settings["store_config"], serve = replace(config, store_host=store_host), serve_remoting(listening)
    with _opened(settings) as kit:
        node.stash[_KIT] = kit
        try:
            with ServedKit(kit, serve) as served:
                yield served
            if node.stash.get(_ERROR, None) is None:
                kit.close()
        finally:
            del node.stash[_KIT]


def _settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the settings of the kit that the marker ``rmq`` names."""
    marker = request.node.get_closest_marker("rmq")
    settings: dict[str, Any] = dict(marker.kwargs) if marker is not None else {}
    names = ["on_disk", *KitKeywords.__annotations__]
    if unknown := sorted(settings.keys() - set(names)):
        raise ConfigError(f"the marker rmq has no setting {', '.join(unknown)}; its settings are {', '.join(names)}")
    if settings.pop("on_disk", False):
        folder = request.getfixturevalue("tmp_path") / "broker"
        folder.mkdir()
        settings["path"] = folder
    return settings


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
            explorer.trace.history = kit.account()
        else:
            report.sections.append(("what happened (rmq)", kit.account()))


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


def explore_item(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Repeat the whole protocol of a test with its own fixtures, and report the most informative run."""
    config = item.config
    marker = item.get_closest_marker("rmq_explore")
    assert marker is not None
    runs = marker.args[0] if marker.args else marker.kwargs.get("runs", 200)
    option = config.getoption("rmq_seed")
    seed = str(option if option is not None else marker.kwargs.get("seed", "0"))
    try:
        replay = read_seed(seed)
    except InputError as error:
        raise pytest.UsageError(f"--rmq-seed: {error}") from error
    reports: list[pytest.TestReport] = []
    failed: dict[int, list[pytest.TestReport]] = {}
    parent = item.parent
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)

    def run(explorer: Explorer) -> BaseException | None:
        item.stash[_EXPLORER], item.stash[_ERROR] = explorer, None
        item._report_sections.clear()  # output and log lines of earlier runs
        # Name the parent as the next item, so that fixtures of wider scope stay.
        reports[:] = runtestprotocol(item, log=False, nextitem=parent)  # type: ignore[arg-type]
        if any(report.skipped and not hasattr(report, "wasxfail") for report in reports):
            raise _NothingToExplore
        error = item.stash[_ERROR]
        if error is not None:
            failed[id(explorer.trace)] = list(reports)
        return error

    def search_all() -> None:
        try:
            result = search(run, runs, seed, replay, lines=marker.kwargs.get("lines", False))
        except _NothingToExplore:
            return
        if result.found is not None:
            reports[:] = failed[id(result.found.trace)]
            _describe(item, reports, result)
        reports[-1].user_properties.append(("rmq_explored", result.summary()))

    def tear_down() -> None:
        item.stash[_ERROR] = None
        item.stash[_EXPLORER] = None
        item.session._setupstate.teardown_exact(nextitem)

    phases: list[tuple[Callable[[], None], Literal["call", "teardown"]]]
    phases = [(search_all, "call"), (tear_down, "teardown")]
    for phase, when in phases:  # an error fails this test, and later ones run
        ended = pytest.CallInfo.from_call(phase, when, (pytest.exit.Exception, KeyboardInterrupt))
        if ended.excinfo is not None:
            reports.append(item.ihook.pytest_runtest_makereport(item=item, call=ended))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _describe(item: pytest.Item, reports: list[pytest.TestReport], result: Exploration) -> None:
    """Add the schedule to the report, and save it in a file."""
    assert result.found is not None
    text = result.report()
    cache = getattr(item.config, "cache", None)
    if cache is not None and result.found.decisions:
        path = Path(cache.mkdir("rmq")) / (re.sub(r"[^\w.-]+", "-", item.nodeid)[-150:] + ".json")
        path.write_text(schedule_document(item.nodeid, result.found), "utf-8")
        text += f"\nor from the file {path}:\npytest {item.nodeid!r} --rmq-seed={path}"
    for report in reports:
        if report.failed or hasattr(report, "wasxfail"):
            report.sections.append(("explored (rmq)", text))
            break
