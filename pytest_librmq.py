"""The pytest plugin of librmq: the fixture ``rmq`` and the marker ``rmq_explore``.

Loaded by an entry point in every run of pytest where librmq is installed, so it imports nothing of it until a test
asks. What it does is in `librmq.testing.plugin`.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from librmq.testing import Kit

__all__ = ["rmq"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("librmq").addoption(
        "--rmq-seed",
        metavar="SEED_OR_FILE",
        default=None,
        help="run tests marked rmq_explore under the one schedule of this seed, or of this file, which a failure told; "
        "any other text makes chance another",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "rmq_explore(runs=200, lines=False): run the test under so many legal schedules, and show the shortest that "
        "fails; with lines, listeners may be interrupted at any line",
    )
    config.addinivalue_line("markers", "rmq(on_disk=False, **settings): how the kit of fixture rmq is made")


@pytest.fixture
def rmq(request: pytest.FixtureRequest) -> Generator[Kit, None, None]:
    """A broker under a clock that the test moves (`librmq.testing.Kit`); its store must be sound at the end."""
    from librmq.testing.plugin import kit_of

    yield from kit_of(request)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("rmq_explore") is None:
        return None
    from librmq.testing.plugin import explore_item

    explore_item(item, nextitem)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if (plugin := _loaded()) is not None:
        plugin.add_history(item, call, report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which kinds of decisions exploring has met, told by the reports, as those come from other processes too."""
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
    """The rest of the plugin, if a test has asked for it."""
    return sys.modules.get("librmq.testing.plugin")
