"""The parts of a group's page: queues by lag and instance, settings, what holds it back, what its instances do now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from librmq.broker import AdministeredRoute
from librmq.broker.groups import settings_in
from librmq.console._place import LETTERS, Look
from librmq.console._tables import Cell, Fact, Page, Query, Table, count, group_link, link, topic_link
from librmq.diagnosis import ClusterView, DeadLetterCause, HeldProgress, QueueLag
from librmq.diagnosis.view import LiveView
from librmq.errors import BrokerError
from librmq.formatting import UNKNOWN, duration, moment, number, short
from librmq.protocol import GroupConnections, GroupSettings, InstanceState, ResponseCode

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


_ROWS: Final = 100
"""Rows of a table of instances, listeners or causes."""


@dataclass
class Members:
    """The running instances of a group, and its settings, as far as a place knows them."""

    connections: GroupConnections | None = None
    settings: GroupSettings | None = None
    states: Mapping[str, InstanceState | None] | None = None
    """What each instance reports; None for one that does not answer, and at a past moment."""
    instances: Sequence[dict[str, Any]] = ()
    """The same as rows of `librmq top`."""
    owners: Mapping[tuple[str, str, int], str] = field(default_factory=dict)
    """The instance that has each queue, by broker (empty if there is only one), topic and number."""

    @classmethod
    def of(
        cls,
        route: AdministeredRoute | None,
        live: LiveView | None,
        group: str,
        row: Mapping[str, Any] | None,
        *,
        is_at_rest: bool,
    ) -> Members:
        """Ask for the instances of a group, once where ``live`` has asked.

        A folder ``is_at_rest`` has none, and the settings of its ``row``.
        """
        if route is None:
            return cls(None, None if row is None else settings_in(group, row), {} if is_at_rest else None)
        connections = route.connections(group)
        try:
            settings: GroupSettings | None = route.group_settings(group)
        except BrokerError as error:
            if error.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                raise
            settings = None  # only its progress or its retries show the group
        live = ClusterView(route) if live is None else live
        states = live.states(group)
        is_cluster = len(route.broker_names()) > 1
        owners = {
            (held.queue.broker_name if is_cluster else "", held.queue.topic, held.queue.queue_id): client_id
            for client_id, state in states.items()
            for held in (() if state is None else state.queues)
        }
        return cls(connections, settings, states, [*live.instance_rows((group,))], owners)

    @property
    def retries(self) -> int | None:
        """How often a message comes again before it is a dead letter: as the instances say, else as the group does."""
        limits = [state.max_reconsume_times for state in (self.states or {}).values() if state is not None]
        of_group = None if self.settings is None else self.settings.retry_max_times
        return next((retries for retries in limits if retries is not None), of_group)

    @property
    def retries_note(self) -> str:
        """What the retries are, and the setting of the group where its instances say others."""
        of_group = self.retries if self.settings is None else self.settings.retry_max_times
        return f"before a dead letter{'' if self.retries == of_group else f'; the group has {number(of_group)}'}"

    def owner_of(self, broker_name: str, row: QueueLag) -> str:
        """Return the instance that has a queue; empty without one."""
        if self.states is None:
            return UNKNOWN
        nothing = UNKNOWN if None in self.states.values() else ""
        return self.owners.get((broker_name, row.topic, row.queue_id), nothing)

    def table(self, rows: Iterable[tuple[str, QueueLag]]) -> Table:
        """Return the instances, each with its threads and the lag of its queues."""
        lags: Counter[str] = Counter()
        for broker_name, queue in rows:
            lags[self.owner_of(broker_name, queue)] += queue.lag
        connections, cells = self.connections, []
        for row in self.instances[:_ROWS]:
            name = row["instance"]
            lag = count(None if self.states is None or self.states[name] is None else lags[name], "warn")
            kind = ["", "", ""]
            if connections is not None:
                kind = [connections.kind, connections.model.value, short(_subscriptions(connections, name), 200)]
            cells.append([*instance_cells(row, lag), *map(Cell, kind)])
        columns = ("instance", "lag", *DOES, "kind", "model", "subscriptions")
        note = f"The first {_ROWS}." if len(self.instances) > _ROWS else ""
        nothing = "Unknown: only the process that has the store open knows them."
        return Table("Instances", columns, cells, note, nothing if self.states is None else "No instance runs.")

    def settings_table(self) -> Table:
        """Return the settings, by the options of `librmq group create`."""
        settings, connections = self.settings, self.connections
        rows: list[tuple[str, str]] = []
        if settings is not None:
            rows = [
                ("retries", number(settings.retry_max_times)),
                ("queues of retries", number(settings.retry_queues)),
                ("ordered", _yes_or_no(settings.is_ordered)),
                ("consumes", "yes" if settings.consumes else "no: suspended"),
                ("broadcasts", _yes_or_no(settings.broadcasts)),
                ("priority factor", number(settings.priority_factor)),
                ("ends of a process before a dead letter", number(settings.max_process_deaths)),
            ]
            begin = UNKNOWN if connections is None else connections.consume_from.name.lower()
            rows.append(("consume from", begin))
        cells = [[Cell(name), Cell(value)] for name, value in rows]
        return Table("Settings", ("setting", "value"), cells, nothing="Unknown: no broker says them.")


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def _subscriptions(connections: GroupConnections, client_id: str) -> str:
    subscriptions = connections.subscriptions_by_client.get(client_id, connections.subscriptions)
    return ", ".join(f"{topic}: {filtered.expression}" for topic, filtered in sorted(subscriptions.items()))


def queues_of_group(
    rows: Iterable[tuple[str, QueueLag]], held: Sequence[HeldProgress] | None, members: Members
) -> Table:
    """Return the queues of a group with lag, instance, and the message that each waits for, if that is known."""
    waits = {(queue.topic, queue.queue_id): _held(queue) for queue in held or ()}
    cells = []
    for broker_name, row in rows:
        cells.append(
            [
                topic_link(row.topic),
                Cell(f"{broker_name} {row.queue_id}".strip(), is_number=True),
                count(row.lag, "warn"),
                *([] if held is None else [waits.get((row.topic, row.queue_id), Cell(""))]),
                Cell(moment(row.oldest_timestamp_ms) if row.lag else ""),
                count(row.consumer_offset),
                count(row.max_offset),
                Cell(members.owner_of(broker_name, row)),
            ]
        )
    waits_for = [] if held is None else ["waits for"]
    columns = ["topic", "queue", "lag", *waits_for, "oldest", "progress", "end", "instance"]
    return Table("Queues", columns, cells, nothing="The group has no progress in any topic.")


def _held(queue: HeldProgress) -> Cell:
    return Cell(short(queue.keys or queue.message_id or "", 40), link("message", id=queue.message_id or ""))


def causes(dead_letter_causes: Sequence[DeadLetterCause], letters: int, *, is_noted: bool) -> Table:
    """Return the causes of so many dead letters; ``is_noted`` if those that were sent again are known."""
    rows = [
        [
            Cell(short(cause.cause, 200), link("letters", group=cause.group, cause=cause.cause)),
            topic_link(cause.original_topic),
            count(cause.messages),
            *([count(cause.resent)] if is_noted else []),
            Cell(moment(cause.last_timestamp_ms)),
            count(cause.most_times),
        ]
        for cause in islice(dead_letter_causes, _ROWS)
    ]
    columns = ("cause", "topic", "letters", *(["sent again"] if is_noted else []), "last", "attempts")
    note = f"Of the newest {LETTERS} letters." if letters > LETTERS else ""
    return Table("Dead letters by cause", columns, rows, note)
