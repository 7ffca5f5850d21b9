"""What a command reads from: a store's folder, or a running cluster, which answer the same questions."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from librmq.cli.output import ProgressBar
from librmq.cli.rows import Row, is_listed, kind_of_topic
from librmq.cli.stores import open_view
from librmq.diagnosis.group_lag import Lag
from librmq.diagnosis.group_lag import lag as lag_of
from librmq.diagnosis.view import StoreView, is_own_group
from librmq.message.delay_levels import DelayLevels
from librmq.message.topics import dead_letter_topic
from librmq.store.format import directory

if TYPE_CHECKING:
    from librmq.cli.selection import MessageQuery
    from librmq.consumequeue import ConsumeQueue
    from librmq.diagnosis.deadletters import GivenUpMessage
    from librmq.message.message import StoredMessage
    from librmq.store import MessageStore


class Source(Protocol):
    """Topics, groups and messages, as rows that commands print."""

    @property
    def levels(self) -> DelayLevels:
        """The delay levels of messages."""
        ...

    def topics(self) -> Collection[str]:
        """Return the topics that have queues."""
        ...

    def groups(self) -> Collection[str]:
        """Return the consumer groups."""
        ...

    def topic_rows(self, *, quiet: bool = False) -> Iterator[Row]:
        """Yield a row for each topic, with a progress bar unless ``quiet``."""
        ...

    def group_rows(self, *, everything: bool) -> Iterator[Row]:
        """Yield a row for each group; the broker's own only with ``everything``."""
        ...

    def lag(self, group: str | None = None, topic: str | None = None, *, times: bool = True) -> Lag:
        """Return the lag of all groups, or of one, in all topics, or in one."""
        ...

    def lag_rows(self, group: str | None = None, topic: str | None = None) -> Iterable[Row]:
        """Return a row for each queue of `lag`."""
        ...

    def dead_letters(self, group: str | None) -> Iterator[tuple[str, GivenUpMessage]]:
        """Yield the dead letters of all groups, or of one, each with its broker's name."""
        ...

    def messages(self, selection: MessageQuery) -> Iterator[StoredMessage]:
        """Yield the selected messages, oldest first."""
        ...

    def named(self, broker_name: str, row: Row) -> Row:
        """Return a row with the name of its broker, if there are several."""
        ...


@contextmanager
def open_source(arguments: argparse.Namespace) -> Iterator[Source]:
    """Open the store that a command reads, or connect to the cluster in ``--route``.

    Raises:
        CorruptionError: The store is damaged, or a kill has left a file of length zero.
        BrokerUnreachableError: No name server answers there.
        InputError: The command names a setting that only a store has.
    """
    if getattr(arguments, "route", None) is None:
        with open_view(arguments) as view:
            yield StoreSource(view)
    else:
        from librmq.cli.cluster import open_cluster

        with open_cluster(arguments) as cluster:
            yield cluster


class StoreSource:
    """A store's folder."""

    def __init__(self, view: StoreView) -> None:
        self.view = view

    @property
    def levels(self) -> DelayLevels:
        """The delay levels of the store's settings."""
        return self.view.store.levels

    def topics(self) -> Mapping[str, object]:
        """Return the topics that have queues."""
        return self.view.topics

    def groups(self) -> Collection[str]:
        """Return the groups of the broker's tables, and those of retry and dead-letter topics."""
        return self.view.groups

    def topic_rows(self, *, quiet: bool = False, command: str = "topics") -> Iterator[Row]:
        """Yield a row for each topic that has queues, or that users made, with a progress bar of the command."""
        tables, store = self.view.tables, self.view.store
        queues_by_topic: dict[str, list[ConsumeQueue]] = {
            topic: [] for topic, row in tables.topics.rows.items() if is_listed(topic, row.get("perm", 0))
        }
        for (topic, _), queue in sorted(store.queues.items()):
            queues_by_topic.setdefault(topic, []).append(queue)
        with ProgressBar(command, len(queues_by_topic), "topics", quiet=quiet) as bar:
            for number, (topic, queues) in enumerate(sorted(queues_by_topic.items())):
                bar.to(number)
                yield _topic_row(store, topic, queues)

    def group_rows(self, *, everything: bool) -> Iterator[Row]:
        """Yield a row for each group."""
        view = self.view
        topics: dict[str, list[str]] = {}
        for group, topic in view.progress:
            topics.setdefault(group, []).append(topic)
        messages: Counter[str] = Counter()
        for (topic, _), state in view.ranges.items():
            messages[topic] += state.max_offset - state.min_offset
        waiting = {row.group: row.lag for row in self.lag(times=False).by_group()}
        for group in view.groups:
            if everything or not is_own_group(group):
                yield {
                    "group": group,
                    "topics": sorted(topics.get(group, ())),
                    "lag": waiting.get(group, 0 if group in topics else None),
                    "dead_letters": messages[dead_letter_topic(group)],
                }

    def lag(self, group: str | None = None, topic: str | None = None, *, times: bool = True) -> Lag:
        """Return the lag of all groups, or of one, in all topics, or in one."""
        return lag_of(self.view, group=group, topic=topic, times=times)

    def lag_rows(self, group: str | None = None, topic: str | None = None) -> Iterable[Row]:
        """Return a row for each queue of `lag`."""
        return (row._asdict() for row in self.lag(group, topic))

    def no_lag_reason(self) -> str:
        """Return why the store has the lag of no group in some topics."""
        path = os.path.join(self.view.store.path, directory.CONFIG, "consumerOffset.json")
        if self.view.store.files.size(path) is None:
            return f"there is no {path}, so the progress of no group is known: copy the folder config too"
        return "no group has progress in these topics"

    def dead_letters(self, group: str | None) -> Iterator[tuple[str, GivenUpMessage]]:
        """Yield the dead letters of all groups, or of one."""
        from librmq.diagnosis.deadletters import dead_letters

        return (("", letter) for letter in dead_letters(self.view, group=group))

    def messages(self, selection: MessageQuery) -> Iterator[StoredMessage]:
        """Yield the selected messages in log order."""
        return selection.messages(self.view.store)

    def named(self, broker_name: str, row: Row) -> Row:
        """Return the row: a store has one broker."""
        return row


def _topic_row(store: MessageStore, topic: str, queues: list[ConsumeQueue]) -> dict[str, Any]:
    filled = [queue for queue in queues if queue.max_offset > queue.min_offset]
    return {
        "topic": topic,
        "kind": kind_of_topic(topic),
        "queues": len(queues),
        "messages": sum(queue.max_offset - queue.min_offset for queue in queues),
        "min_timestamp_ms": min(
            filter(None, (_stored_ms(store, queue, queue.min_offset) for queue in filled)), default=None
        ),
        "max_timestamp_ms": max(
            filter(None, (_stored_ms(store, queue, queue.max_offset - 1) for queue in filled)), default=None
        ),
    }


def _stored_ms(store: MessageStore, queue: ConsumeQueue, queue_offset: int) -> int | None:
    entry = queue.entry(queue_offset)
    return None if entry is None else store.log.store_timestamp_ms(entry.physical_offset, entry.size)
