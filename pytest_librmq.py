"""The pytest plugin of librmq: the fixture ``rmq`` and the marker ``rmq_explore``.

An entry point loads it in every run of pytest with librmq installed, so it imports librmq only for tests that use it.
`librmq.testing.plugin` has the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from librmq.testing import Kit
    from librmq.testing._served import ServedKit

__all__ = ["rmq", "rmq_grpc", "rmq_remoting"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("librmq").addoption(
        "--rmq-seed",
        metavar="SEED_OR_FILE",
        default=None,
        help="run tests marked rmq_explore under one schedule: that of a seed, or of a file, from a failure's report; "
        "any other text varies the random choices",
    )
    parser.getgroup("librmq").addoption(
        "--rmq-over-tcp",
        action="store_true",
        help="let requests of clients in tests with the fixture rmq cross a TCP connection, as frames of RocketMQ 4.x",
    )
    parser.getgroup("librmq").addoption(
        "--rmq-over-share",
        action="store_true",
        help="let them cross the socket of processes that share a store",
    )
    parser.getgroup("librmq").addoption(
        "--rmq-shrink",
        metavar="TRIES",
        type=int,
        default=200,
        help="after a failure of a test that begins with a store, run it up to so many times with fewer messages "
        "(default: 200, 0: never)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "rmq_explore(runs=200, lines=False): run the test under this many legal schedules, and show the shortest that "
        "fails; with lines, other turns can interrupt listeners at any line",
    )
    config.addinivalue_line(
        "markers",
        "rmq(on_disk=False, store=None, topics=None, groups=None, now_ms=None, **settings): settings of the "
        "fixture rmq, those of Kit; store is the folder of a broker with whose messages the test begins",
    )


@pytest.fixture
def rmq(request: pytest.FixtureRequest) -> Generator[Kit, None, None]:
    """A broker under a clock that the test moves (`librmq.testing.Kit`); its store must be sound at the end."""
    from librmq.testing.plugin import kit_of

    yield from kit_of(request)


@pytest.fixture
def rmq_grpc(request: pytest.FixtureRequest) -> Generator[ServedKit, None, None]:
    """A served broker to which official clients of RocketMQ 5 connect, under a clock that the test moves."""
    from librmq.testing.plugin import served_kit_of

    yield from served_kit_of(request)


@pytest.fixture
def rmq_remoting(request: pytest.FixtureRequest) -> Generator[ServedKit, None, None]:
    """A served name server and broker to which clients of RocketMQ 4.x connect, under a clock that the test moves."""
    from librmq.testing.plugin import served_kit_of

    yield from served_kit_of(request, remoting=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse explored tests that are written wrong before any test runs."""
    for item in items:
        if (marker := item.get_closest_marker("rmq_explore")) is not None:
            from librmq.testing.plugin import check_explored

            check_explored(item, marker)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("rmq_explore") is not None:
        from librmq.testing.plugin import explore_item

        explore_item(item, nextitem)
        return True
    if (marker := item.get_closest_marker("rmq")) is not None and marker.kwargs.get("store") is not None:
        from librmq.testing.plugin import shrink_item

        shrink_item(item, nextitem)
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if (plugin := _loaded()) is not None:
        plugin.add_history(item, call, report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the kinds of decisions in explored tests, from the reports, which can come from other processes."""
    explored = {
        report.nodeid: summary
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, summary in getattr(report, "user_properties", ())
        if name == "rmq_explored"
    }
    if explored:
        terminalreporter.section("explored (rmq)")
        for nodeid, summary in explored.items():
            terminalreporter.line(f"{nodeid}: {summary}")


def pytest_unconfigure() -> None:
    if (plugin := _loaded()) is not None:
        plugin.end_threads()


def _loaded() -> ModuleType | None:
    """Return the rest of the plugin if a test has used it."""
    return sys.modules.get("librmq.testing.plugin")
