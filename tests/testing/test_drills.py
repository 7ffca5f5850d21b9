"""Drills: each preset keeps its promises, wrong scripts are refused, and the docs show the current figures."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from librmq.broker._replication import Replication
from librmq.errors import ConfigError
from librmq.protocol import SendStatus
from librmq.testing._drills import (
    Deployment,
    DrillReport,
    Fault,
    disk_loss,
    one_active,
    one_active_replicated,
    one_cluster,
    presets,
    run_drill,
    two_active,
    two_active_routed,
)
from tests.reference import CHECKOUT

SHORT = (
    Fault(2, "lose brokers", "hz"),
    Fault(6, "return brokers", "hz"),
)


@pytest.fixture(scope="module")
def by_name() -> dict[str, DrillReport]:
    return {report.name: report for report in (run_drill(deployment, rate=0.5) for deployment in presets())}


@pytest.mark.slow
def test_a_table_compares_drills_and_the_docs_show_one(by_name: dict[str, DrillReport]) -> None:
    rows = DrillReport.table(list(by_name.values())).splitlines()
    assert "| one active | 600 (17 %) | 0 | 0 s | 8 | 1,350 (45 %) | 420 (14 %) | 0 |" in rows
    assert len(rows) == 2 + len(by_name)
    assert (CHECKOUT / "docs" / "drill.svg").read_text("utf-8") == by_name["all active, routed"].svg()


@pytest.mark.slow
def test_no_preset_loses_a_message(by_name: dict[str, DrillReport]) -> None:
    for report in by_name.values():
        assert (report.lost, report.anomalies) == (0, [])
        assert {event["event"] for event in report.history} >= {"send", "deliver", "crash", "commit", "drained"}
        assert report.sent + report.refused == 3_600
        assert report.delivered == report.sent + report.duplicates


@pytest.mark.slow
def test_one_cluster_refuses_nothing_and_takes_over(by_name: dict[str, DrillReport]) -> None:
    report = by_name["one cluster"]
    assert (report.refused, report.most_waiting) == (0, 0)
    while_lost = report.minutes[8]
    assert while_lost.consumed["sh", "hz"] == 30
    given_back = report.minutes[15]
    assert given_back.consumed == {("hz", "hz"): 30, ("sh", "sh"): 30}


@pytest.mark.slow
def test_one_active_refuses_until_the_operator_switches(by_name: dict[str, DrillReport]) -> None:
    report = by_name["one active"]
    assert [minute.refused for minute in report.minutes[19:27]] == [0, 60, 60, 60, 60, 60, 0, 0]
    assert report.minutes[10].consumed == {("sh", "hz"): 60}


@pytest.mark.slow
def test_replicas_are_promoted_by_the_operator(by_name: dict[str, DrillReport]) -> None:
    """A failover repeats at most 15 s of messages; one comes each second."""
    report = by_name["one active, replicas"]
    assert [minute.refused > 0 for minute in report.minutes[19:27]] == [False, *[True] * 6, False]
    assert [row.what for row in report.events if "promoted" in row.what] == [
        "sh: the replica of hz-hz-0 is promoted",
        "sh: the replica of hz-hz-1 is promoted",
    ]
    assert 0 < sum(minute.duplicates for minute in report.minutes[20:30]) <= 15
    assert report.minutes[45].consumed == {("sh", "sh"): 60}


@pytest.mark.slow
def test_all_active_waits_for_its_own_consumers(by_name: dict[str, DrillReport]) -> None:
    report = by_name["all active"]
    assert (report.sends_across, report.deliveries_across) == (0, 0)
    assert report.longest_wait_s == 420
    assert sum(minute.refused for minute in report.minutes[20:30]) == 300


@pytest.mark.slow
def test_a_router_switches_within_its_probes(by_name: dict[str, DrillReport]) -> None:
    report = by_name["all active, routed"]
    assert report.refused < 20
    assert [row.what for row in report.events if "switches" in row.what][:2] == [
        "hz switches from hz to sh: hz is out of reach",
        "hz switches from sh to hz: it is back",
    ]
    assert "consumed: sh from sh" in report.timeline()


@pytest.mark.slow
def test_a_timeline_tells_who_consumed_from_where(by_name: dict[str, DrillReport]) -> None:
    lines = by_name["one cluster"].timeline().splitlines()
    assert lines[:4] == [
        "        consumed: hz from hz 150, sh from sh 150; lag 0",
        "   5.0  hz: lose consumers",
        "        consumed: sh from hz 210, sh from sh 210; lag 0",
        "  12.0  hz: return consumers",
    ]


@pytest.mark.slow
def test_a_picture_is_svg(by_name: dict[str, DrillReport]) -> None:
    for report in by_name.values():
        root = ElementTree.fromstring(report.svg())
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert f"{report.name}: messages per minute" in texts
        assert {"consumed at hz", "consumed at sh", "sends refused"} <= set(texts)
        assert any(text is not None and text.endswith("minute 20, hz: lose brokers") for text in texts)


def test_a_cut_link_keeps_each_site_at_its_own() -> None:
    script = [Fault(2, "cut link", "hz"), Fault(6, "heal link", "hz")]
    report = run_drill(one_cluster(), script, minutes=10, rate=0.2)
    assert (report.refused, report.lost, report.sends_across) == (0, 0, 0)


def test_a_drill_is_the_same_in_each_run() -> None:
    first, second = (run_drill(two_active_routed(), SHORT, minutes=8, rate=0.2) for _ in range(2))
    assert (first.timeline(), first.svg()) == (second.timeline(), second.svg())


@pytest.mark.slow
def test_more_sites_than_two() -> None:
    sites = ("bj", "hz", "sh")
    for deployment in presets(sites):
        report = run_drill(deployment, [(2, "lose site", "hz"), (6, "return site", "hz")], minutes=8, rate=0.2)
        assert (report.lost, report.sites) == (0, sites)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deployment", "expected"),
    [
        (one_active(), 300),
        (replace(one_active_replicated(), replica_lag_s=30), 24),
        (one_active_replicated(), 0),
        (one_active_replicated(replication="sync"), 0),
    ],
)
def test_only_replicas_keep_what_was_on_a_destroyed_disk(deployment: Deployment, expected: int) -> None:
    """No acknowledgement promised more, so the history has no anomaly. A second disk, of the replica, has no copy."""
    report = run_drill(deployment, disk_loss(), minutes=30, rate=0.5)
    assert (report.lost, report.anomalies) == (expected, [])
    again = [*disk_loss(), (22, "lose consumers", "hz"), (22, "lose consumers", "sh")]
    again += [(25, "destroy disks", site) for site in ("hz", "sh")] + [(26, "return brokers", "hz")]
    report = run_drill(deployment, again, minutes=30, rate=0.5)
    assert report.lost > expected
    assert report.anomalies == []


def test_a_drill_shows_that_a_synchronous_master_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bug that answers SEND_OK to messages that only the destroyed disk has, the history is wrong."""
    monkeypatch.setattr(Replication, "confirm", lambda *_: SendStatus.SEND_OK)
    deployment = replace(one_active_replicated(replication="sync"), replica_lag_s=30)
    report = run_drill(deployment, disk_loss(), minutes=30, rate=0.5)
    assert report.lost == 24
    assert "offset-conflict" in {anomaly.anomaly for anomaly in report.anomalies}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ([(1, "explode", "hz")], "unknown verb 'explode'"),
        ([(1, "lose site", "bj")], "unknown site 'bj'; expected one of hz, sh"),
        ([(99, "lose site", "hz")], "minute 99 is outside the drill of 5 minutes"),
    ],
)
def test_wrong_scripts_are_named(script: list[tuple[float, str, str]], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        run_drill(two_active(), script, minutes=5)  # type: ignore[arg-type]


def test_wrong_deployments_are_named() -> None:
    unserved = Deployment(name="x", title="x", clusters={"a": ("hz",)}, homes={"hz": "a", "sh": "b"})
    with pytest.raises(ConfigError, match="site 'sh': no cluster serves it"):
        run_drill(unserved, (), minutes=1)
    beside = Deployment(name="x", title="x", clusters={"a": ("hz",)}, homes={"hz": "a"}, replicas={"a": "hz"})
    with pytest.raises(ConfigError, match="replicas: expected another site than those of a cluster, found 'a' at 'hz'"):
        run_drill(beside, (), minutes=1)
    with pytest.raises(ConfigError, match="1 minute or more"):
        run_drill(one_active(), (), minutes=0)
