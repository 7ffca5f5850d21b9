"""``groups`` and ``lag``: consumer groups, and the messages that they have left to consume."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from librmq.cli.input import parse_duration
from librmq.cli.output import Output, complain
from librmq.cli.stores import open_view
from librmq.cli.unknown_names import note_group, note_topic
from librmq.diagnosis.backlog import GroupLag, Lag, QueueLag, TopicLag
from librmq.diagnosis.backlog import lag as lag_of
from librmq.diagnosis.people import moment
from librmq.diagnosis.view import StoreView, is_own_group
from librmq.errors import InputError
from librmq.message.topics import dead_letter_topic
from librmq.store.format import directory

if TYPE_CHECKING:
    from librmq.cli.cluster_source import ClusterSource


def groups(arguments: argparse.Namespace, output: Output) -> int:
    """Print a line for each consumer group."""
    if arguments.route is not None:
        from librmq.cli.cluster_source import open_cluster

        with open_cluster(arguments) as cluster:
            for row in cluster.group_rows(everything=arguments.all):
                output.row(row)
        return 0
    with open_view(arguments) as view:
        topics: dict[str, list[str]] = {}
        for group, topic in view.progress:
            topics.setdefault(group, []).append(topic)
        messages: Counter[str] = Counter()
        for (topic, _), state in view.ranges.items():
            messages[topic] += state.max_offset - state.min_offset
        waiting = {group_lag.group: group_lag.lag for group_lag in lag_of(view, times=False).by_group()}
        for group in view.groups:
            if arguments.all or not is_own_group(group):
                output.row(
                    {
                        "group": group,
                        "topics": sorted(topics.get(group, ())),
                        "lag": waiting.get(group, 0 if group in topics else None),
                        "dead_letters": messages[dead_letter_topic(group)],
                    }
                )
    return 0


def lag(arguments: argparse.Namespace, output: Output) -> int:
    """Print the lag of each group in each queue, its sums by topic or group, or rates."""
    if arguments.every is not None:
        _lag_rates(arguments, output)
        return 0
    if arguments.route is not None:
        from librmq.cli.cluster_source import open_cluster

        if arguments.by == "origin":
            raise InputError("--by origin: expected a folder, because it reads the messages that wait")
        with open_cluster(arguments) as cluster:
            if arguments.by == "queue":
                for queue in cluster.lag_rows(arguments.group, arguments.topic):
                    output.row(queue)
            else:
                _print_lag(cluster.lag(arguments.group, arguments.topic), arguments.by, output)
            _note_unknown(cluster, arguments, output)
        return 0
    with open_view(arguments) as view:
        if arguments.by == "origin":
            from librmq.diagnosis.origins import waiting_origins

            for row in waiting_origins(view, group=arguments.group, topic=arguments.topic):
                output.row(row._asdict())
        else:
            _print_lag(lag_of(view, group=arguments.group, topic=arguments.topic), arguments.by, output)
        note_group(arguments.group, view.groups, output)
        note_topic(arguments.topic, view.topics, output)
        if not output.rows and output.says_nothing_found:
            output.says_nothing_found = False
            complain(f"note: {_why_no_lag(view)}")
    return 0


def _why_no_lag(view: StoreView) -> str:
    path = os.path.join(view.store.path, directory.CONFIG, "consumerOffset.json")
    if view.store.files.size(path) is None:
        return f"there is no {path}, so the progress of no group is known: copy the folder config too"
    return "no group has progress in these topics"


def expiring(arguments: argparse.Namespace, output: Output) -> int:
    """Print the unconsumed messages that retention by age would delete soon, by group and topic."""
    from librmq.diagnosis.expiry import expiring as expiring_of

    reserved_s = parse_duration("--reserved", arguments.reserved, "the time for which files are kept, such as 72h")
    within_s = parse_duration("--within", arguments.within, "a time from now on, such as 6h")
    with open_view(arguments) as view:
        for row in expiring_of(view, reserved_s=reserved_s, within_s=within_s):
            output.row(row._asdict())
        if view.owner is None and view.now_ms is not None:
            complain(f"note: no process uses the store; times count from its last message, {moment(view.now_ms)}")
    return 0


def _lag_rates(arguments: argparse.Namespace, output: Output) -> None:
    """Print how fast topics grow and groups consume them; of an unused store what its messages tell."""
    from librmq.cli.rates import follow_rates, interval_of, recent_rates

    def measure() -> Lag:
        with open_view(arguments) as view:
            return lag_of(view, group=arguments.group, topic=arguments.topic, times=False)

    seconds = interval_of(arguments)
    if arguments.route is not None:
        from librmq.cli.cluster_source import open_cluster

        with open_cluster(arguments) as cluster:
            _note_unknown(cluster, arguments, output)
            follow_rates(lambda: cluster.lag(arguments.group, arguments.topic, times=False), seconds, output)
    with open_view(arguments) as view:
        note_group(arguments.group, view.groups, output)
        note_topic(arguments.topic, view.topics, output)
        if view.owner is None:
            recent_rates(view, lag_of(view, group=arguments.group, topic=arguments.topic, times=False), output)
            return
    follow_rates(measure, seconds, output)


def _note_unknown(cluster: ClusterSource, arguments: argparse.Namespace, output: Output) -> None:
    """Tell a person about a group and a topic that the cluster does not have; each costs requests to all brokers."""
    if arguments.group is not None:
        note_group(arguments.group, cluster.groups(), output)
    if arguments.topic is not None:
        note_topic(arguments.topic, cluster.topics(), output)


def _print_lag(queue_lags: Lag, by: str, output: Output) -> None:
    rows: Iterable[QueueLag | TopicLag | GroupLag] = queue_lags
    if by != "queue":
        rows = queue_lags.by_topic() if by == "topic" else queue_lags.by_group()
    output.rows_of(row._asdict() for row in rows)
