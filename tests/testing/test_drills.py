"""Drills: each preset keeps its promises, wrong scripts are refused, and the docs show the current figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from librmq.broker._replication import Replication
from librmq.errors import ConfigError
from librmq.protocol import SendStatus
from librmq.testing._drills import Drill, DrillReport, run_drill
from librmq.testing._replica import (
    Deployment,
    one_active,
    one_active_replicated,
    one_cluster,
    presets,
    two_active,
    two_active_routed,
)


def brokers_fail(drill: Drill) -> None:
    drill.run(minutes=2)
    drill.lose_brokers("hz")
    drill.run(minutes=4)
    drill.return_brokers("hz")
    drill.run(minutes=2)


def disk_loss(drill: Drill) -> None:
    """Let, within half an hour, the first site lose its brokers' disks while no consumer runs.

    The brokers return with empty disks, unless replicas have taken their places.
    """
    first, *_ = sites = list(drill.deployment.homes)
    drill.run(minutes=5)
    for site in sites:
        drill.lose_consumers(site)
    drill.run(minutes=5)
    drill.destroy_disks(first)
    drill.run(minutes=6)
    drill.return_brokers(first)
    drill.run(minutes=4)
    for site in sites:
        drill.return_consumers(site)
    drill.run(minutes=10)


@pytest.fixture(scope="module")
def by_name() -> dict[str, DrillReport]:
    return {report.name: report for report in (run_drill(deployment, rate=0.5) for deployment in presets())}


@pytest.mark.slow
def test_a_table_compares_drills(by_name: dict[str, DrillReport]) -> None:
    rows = DrillReport.table(list(by_name.values())).splitlines()
    assert "| one active | 600 (17 %) | 0 | 0 s | 0 | 1,350 (45 %) | 420 (14 %) | 0 |" in rows
    assert len(rows) == 2 + len(by_name)


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


def test_a_cut_link_keeps_each_site_at_its_own() -> None:
    def script(drill: Drill) -> None:
        drill.run(minutes=2)
        drill.cut_link("hz")
        drill.run(minutes=4)
        drill.heal_link("hz")
        drill.run(minutes=4)

    report = run_drill(one_cluster(), script, rate=0.2)
    assert (report.refused, report.lost, report.sends_across) == (0, 0, 0)


@pytest.mark.slow
def test_a_drill_is_the_same_in_each_run() -> None:
    first, second = (run_drill(two_active_routed(), brokers_fail, rate=0.2) for _ in range(2))
    assert (first.timeline(), first.minutes) == (second.timeline(), second.minutes)


@pytest.mark.slow
def test_more_sites_than_two() -> None:
    def script(drill: Drill) -> None:
        drill.run(minutes=2)
        drill.lose_site("hz")
        drill.run(minutes=4)
        drill.return_site("hz")
        drill.run(minutes=2)

    sites = ("bj", "hz", "sh")
    for deployment in presets(sites):
        report = run_drill(deployment, script, rate=0.2)
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

    def twice(drill: Drill) -> None:
        disk_loss(drill)
        for site in ("hz", "sh"):
            drill.lose_consumers(site)
        drill.run(minutes=3)
        for site in ("hz", "sh"):
            drill.destroy_disks(site)
        drill.run(minutes=1)
        drill.return_brokers("hz")
        drill.run(minutes=4)

    report = run_drill(deployment, disk_loss, rate=0.5)
    assert (report.lost, report.anomalies) == (expected, [])
    report = run_drill(deployment, twice, rate=0.5)
    assert report.lost > expected
    assert report.anomalies == []


@pytest.mark.slow
def test_a_drill_shows_that_a_synchronous_master_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bug that answers SEND_OK to messages that only the destroyed disk has, the history is wrong."""
    monkeypatch.setattr(Replication, "confirm", lambda *_: SendStatus.SEND_OK)
    deployment = replace(one_active_replicated(replication="sync"), replica_lag_s=30)
    report = run_drill(deployment, disk_loss, rate=0.5)
    assert report.lost == 24
    assert "offset-conflict" in {anomaly.anomaly for anomaly in report.anomalies}


def test_a_script_that_is_wrong_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown site 'bj'; expected one of hz, sh"):
        run_drill(two_active(), lambda drill: drill.lose_site("bj"))
    with pytest.raises(ConfigError, match="no time passed"):
        run_drill(two_active(), lambda drill: drill.lose_site("hz"))


def test_wrong_deployments_are_named() -> None:
    unserved = Deployment(name="x", clusters={"a": ("hz",)}, homes={"hz": "a", "sh": "b"})
    with pytest.raises(ConfigError, match="site 'sh': no cluster serves it"):
        run_drill(unserved)
    beside = Deployment(name="x", clusters={"a": ("hz",)}, homes={"hz": "a"}, replicas={"a": "hz"})
    with pytest.raises(ConfigError, match="replicas: expected another site than those of a cluster, found 'a' at 'hz'"):
        run_drill(beside)
    with pytest.raises(ConfigError, match="1,000 orders a second at most"):
        run_drill(one_active(), rate=0)
