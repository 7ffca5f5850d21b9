"""What every instance does now: which thread has which message since when, and at which line its listener stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from librmq.console._place import Look
from librmq.console._tables import Cell, Fact, Page, Query, Table, count, group_link, link, topic_link
from librmq.diagnosis.view import LiveView
from librmq.formatting import duration, number, short

_GROUPS: Final = 100
DOES: Final = ("busy", "threads", "queues", "held messages", "state")
"""What `instance_cells` say of an instance, after its name and where it is."""
_AT_WORK: Final = ("message", "for", "stands at", "group", "topic", "thread", "instance")
_NOBODY: Final = "No process has this store open, so nothing is at work."


def busy_page(look: Look, query: Query) -> Page:
    """Show the instances of all groups, and where their listeners stand, the one that has worked longest first."""
    place = look.place
    if place.route is None or query.at_ms is not None:
        return Page("Busy", notes=["Of a past moment nothing is known." if query.at_ms is not None else _NOBODY])
    with place.live(None, _GROUPS) as view:
        names = view.running_groups
        states = list(view.instance_rows(names[:_GROUPS]))
        work = work_table(view, names[:_GROUPS])
    running, threads = (sum(row[name] or 0 for row in states) for name in ("busy", "threads"))
    instances = [instance_cells(row, group_link(row["group"])) for row in states]
    silent = [row["state"] for row in states].count("does not answer")
    note = f"Of {number(len(names))} groups the first {_GROUPS} were asked." if len(names) > _GROUPS else ""
    return Page(
        "Busy",
        [
            Fact("listeners at work", number(running), f"of {number(threads)} threads", _warn(running >= threads > 0)),
            Fact("instances", number(len(states)), f"{number(silent)} silent" if silent else "", _warn(silent > 0)),
        ],
        [
            work,
            Table("Instances", ("instance", "group", *DOES), instances, note, "No instance runs."),
        ],
    )


def work_table(view: LiveView, groups: Sequence[str]) -> Table:
    """Return where the listeners of groups stand, the one that has worked longest first."""
    rows = [[*_work(row)] for row in view.listener_rows(groups)]
    return Table("At work", _AT_WORK, rows, nothing="No listener works now.")


def _work(row: dict[str, Any]) -> Iterator[Cell]:
    more = f" and {number(row['messages'] - 1)} more" if row["messages"] > 1 else ""
    yield Cell(short(row["keys"] or row["message_id"], 60) + more, link("message", id=row["message_id"]))
    yield Cell(duration(row["for_s"]), order=row["for_s"])
    yield Cell(row["place"])
    yield group_link(row["group"])
    yield topic_link(row["topic"])
    yield Cell(row["thread"])
    yield Cell(row["instance"])


def instance_cells(row: dict[str, Any], where: Cell) -> list[Cell]:
    """Return what an instance does, as `DOES` names it, after its name and ``where`` it is."""
    return [
        Cell(row["instance"]),
        where,
        count(row["busy"], _warn(0 < (row["threads"] or 0) <= (row["busy"] or 0))),
        *(count(row[name]) for name in ("threads", "queues", "held")),
        Cell(row["state"], "", _warn(row["state"] != "runs")),
    ]


def _warn(is_unusual: bool) -> str:
    return "warn" if is_unusual else ""
