"""What a reader wants of a store: topics, queues, offsets, times."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from librmq.errors import ConfigError
from librmq.message.topics import is_system_topic

__all__ = ["Mode", "Offsets", "Predicate", "ReadOptions", "View", "Wanted", "check_filters", "nearest"]

View = Literal["messages", "queues", "log"]
Mode = Literal["FAILFAST", "PERMISSIVE", "DROPMALFORMED"]
Offsets = Literal["earliest", "latest"] | Mapping[str, Any]
"""Where to begin or end: by topic and queue id, perhaps by store before that; -2 earliest, -1 latest."""

EARLIEST: Final = -2
LATEST: Final = -1
LARGEST_OFFSET: Final = (1 << 63) - 1


def nearest(name: str, known: Any) -> str:
    """Return a hint at the known name that looks most like ``name``, or at all of them."""
    lower = {one.lower(): one for one in known}
    found = difflib.get_close_matches(name.lower(), lower, 1, 0.5)
    return f"did you mean {lower[found[0]]}?" if found else f"known are {', '.join(sorted(known))}"


def check_filters(view: str, tags: str | None, sql: str | None, name: str) -> str | None:
    """Check the two filters of a read; return the tags, None where they let every message pass.

    Args:
        view: What is read: messages, queues or log.
        tags: A tag expression.
        sql: An SQL92 expression.
        name: What the caller calls ``sql``, for the error.

    Raises:
        ConfigError: The view has no properties for ``sql``.
        FilterSyntaxError: An expression does not compile.
    """
    if tags is not None:
        from librmq.filter import TagFilter  # it brings a grammar, which few reads need

        TagFilter(tags)
    if sql is not None:
        if view == "queues":
            raise ConfigError(f"{name}: the view queues has no properties; read the view messages")
        from librmq.filter import SqlFilter

        SqlFilter(sql)
    return None if tags in (None, "*", "") else tags


@dataclass(frozen=True)
class Wanted:
    """Which messages: what options and pushed filters say of topic, queue, offset, time and tag."""

    topics: frozenset[str] | None = None
    topic_pattern: str | None = None
    queue_ids: frozenset[int] | None = None
    begin_offset: int = 0
    end_offset: int = LARGEST_OFFSET
    begin_ms: int | None = None
    end_ms: int | None = None
    """Stored before then."""
    tags: str | None = None
    queues: frozenset[tuple[str, int]] | None = None
    """Only these, where not every queue of the topics is wanted."""
    internal: bool = False
    """Whether topics that the broker keeps for itself are wanted without being named."""

    def queue(self, topic: str, queue_id: int) -> bool:
        """Return whether messages of the queue may be wanted."""
        if self.queue_ids is not None and queue_id not in self.queue_ids:
            return False
        if self.queues is not None:
            return (topic, queue_id) in self.queues
        return self.topic(topic)

    def topic(self, topic: str) -> bool:
        """Return whether the read includes a topic."""
        if self.topics is not None:
            return topic in self.topics
        if self.topic_pattern is not None:
            return re.fullmatch(self.topic_pattern, topic) is not None
        return self.internal or not is_system_topic(topic)

    @property
    def takes_all(self) -> bool:
        """Return whether a whole read of the log wants every record, so that none has to be checked."""
        return self == Wanted(internal=True)


@dataclass(frozen=True)
class Predicate:
    """A condition on rows: an expression of `pyarrow.compute`, and the columns that it looks at."""

    expression: Any
    columns: tuple[str, ...]


@dataclass(frozen=True)
class ReadOptions:
    """The options of a read, checked."""

    paths: tuple[str, ...]
    view: View = "messages"
    wanted: Wanted = field(default_factory=Wanted)
    selector: str | None = None
    predicate: Predicate | None = None
    starting: Offsets = "earliest"
    ending: Offsets = "latest"
    fail_on_data_loss: bool = True
    mode: Mode = "FAILFAST"
    min_partitions: int = 1
    max_offsets_per_trigger: int | None = None
    checksums: bool = True
    several: bool = False
    """Whether more than one store may be meant, so that rows say which theirs is."""
