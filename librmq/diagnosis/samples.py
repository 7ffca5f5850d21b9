"""Findings from the newest messages of topics: filters without a match, wrong clocks, retries without progress.

Of each topic a sample is read, so a finding says how many messages it looked at, and a rare case can stay unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from librmq.config import nearest
from librmq.diagnosis.deadletters import given_up
from librmq.diagnosis.findings import NAMED, Finding, Severity, Thresholds, counted, cut_if, sample
from librmq.diagnosis.formatting import duration
from librmq.diagnosis.pending import kind_of
from librmq.diagnosis.view import Source, StoreView, is_own_group, viewed
from librmq.errors import CorruptionError
from librmq.filter.registrations import Registration
from librmq.message.message import StoredMessage
from librmq.message.topics import RETRY_PREFIX, is_user_topic

_FEWEST: Final = 10
"""Fewest messages that say something about a filter."""


def newest(view: StoreView, topic: str, limit: int) -> Iterator[StoredMessage]:
    """Yield about ``most`` of the newest messages of a topic, as many from each queue."""
    ids = view.topics.get(topic, ())
    for queue_id in ids:
        state = view.ranges[topic, queue_id]
        with suppress(CorruptionError):
            begin = max(state.min_offset, state.max_offset - max(1, limit // len(ids)))
            yield from view.store.messages(topic, queue_id, begin)


def registered_filters(view: StoreView) -> Iterator[tuple[str, str, str]]:
    """Yield group, topic and expression of each registered SQL filter that compiles."""
    if view.broker is not None:
        registrations: Iterable[Registration] = view.broker.store.filters or ()
    else:
        registrations = view.tables.registrations(0) if view.tables.filters else ()
    for registration in registrations:
        if registration.filter is not None:
            yield registration.group, registration.topic, registration.expression


def sample_findings(source: Source, thresholds: Thresholds | None = None) -> list[Finding]:
    """Return what the newest messages of each topic show; at most ``sampled`` are read of a topic or for one question.

    Raises:
        NotAStoreError: The folder holds no store.
        ConfigError: ``consumerFilter.json`` is malformed.
    """
    limits = thresholds or Thresholds()
    with viewed(source) as view:
        return [*_filters(view, limits), *_clocks(view, limits), *_retries(view, limits)]


def _severity(topic: str, limits: Thresholds) -> Severity:
    return "error" if topic in limits.topics else "warning"


def _filters(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the registered filters that match none of their topic's newest messages."""
    for group, topic, expression in registered_filters(view):
        from librmq.filter.filters import compiled  # loads a grammar
        from librmq.filter.syntax import Property, postorder

        selector = compiled(expression)
        messages = list(newest(view, topic, limits.sampled))
        if len(messages) < _FEWEST or any(selector.matches(message.properties) for message in messages):
            continue
        names = {name for message in messages for name in message.properties}
        property_names = dict.fromkeys(
            node.name for node in postorder(selector.selector.root) if isinstance(node, Property)
        )
        near = {name: nearest(name, names) for name in property_names if name not in names}
        missing = [f"{name}" + f" (did you mean {other}?)" * (other is not None) for name, other in near.items()]
        yield Finding(
            "filter-matches-nothing",
            _severity(topic, limits),
            f"group {group}, topic {topic}",
            f"The registered filter {expression} matches none of the newest {counted(len(messages), 'message')}"
            + (f"; none has the property {', '.join(missing)}." if missing else "."),
            {
                "expression": expression,
                "missing_properties": near,
                **sample(len(messages), view.message_count(topic)),
            },
            "Compare the expression with the messages: librmq show STORE --topic "
            f"{topic} --limit 1, and librmq filter explains it.",
        )


def _clocks(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the topics with messages whose producers' clocks were far from the broker's."""
    topics = [topic for topic in view.topics if is_user_topic(topic)]
    for topic in topics:
        looked_at = 0
        late_s: list[float] = []
        hosts: Counter[str] = Counter()
        for message in newest(view, topic, max(_FEWEST, limits.sampled // len(topics))):
            looked_at += 1
            seconds = (message.store_timestamp_ms - message.born_timestamp_ms) / 1000
            if abs(seconds) > limits.clock_s and kind_of(message) == "plain":
                late_s.append(seconds)
                hosts[message.born_host[0]] += 1
        if late_s:
            most_s = max(late_s, key=abs)
            yield Finding(
                "born-far-from-stored",
                _severity(topic, limits),
                f"topic {topic}",
                f"{counted(len(late_s), 'message')} of the newest {looked_at:,}: more than {duration(limits.clock_s)} "
                f"from birth to storing, up to {duration(abs(most_s))}{', born in the future' * (most_s < 0)}, most "
                f"often on host {hosts.most_common(1)[0][0]}.",
                {
                    "messages": len(late_s),
                    **sample(looked_at, view.message_count(topic)),
                    "most_s": most_s,
                    "hosts": dict(hosts.most_common(NAMED)),
                    **cut_if(len(hosts) > NAMED),
                },
                "Check the clock of that host, unless these messages were imported, replayed, or sent with a time of "
                "their own.",
            )


def _retries(view: StoreView, limits: Thresholds) -> Iterator[Finding]:
    """Yield the topics in which a group has retries, but no progress."""
    for retry_topic in [topic for topic in view.topics if topic.startswith(RETRY_PREFIX)]:
        group = retry_topic.removeprefix(RETRY_PREFIX)
        if is_own_group(group) and not limits.own:
            continue
        waiting = view.message_count(retry_topic)
        if waiting and not _has_progress(view, group, retry_topic):
            yield Finding(
                "retries-without-progress",
                _severity(retry_topic, limits),
                f"group {group}, topic {retry_topic}",
                f"{counted(waiting, 'message')} to retry: the group has no progress in this topic, so its lag does not "
                "count them.",
                {"messages": waiting},
                "Start the group, which subscribes to its retries by itself.",
            )
        topics = Counter(
            given_up(group, message).original_topic for message in newest(view, retry_topic, limits.sampled)
        )
        for topic, count in topics.items():
            if topic in view.topics and topic != retry_topic and not _has_progress(view, group, topic):
                yield Finding(
                    "retries-without-progress",
                    _severity(topic, limits),
                    f"group {group}, topic {topic}",
                    f"{counted(count, 'retry message')} of this topic: the group consumed from it, but has no progress "
                    "there any more.",
                    {"messages": count, **sample(topics.total(), waiting)},
                    f"Set the progress before the group starts: librmq reset STORE --group {group} --topic {topic} "
                    "--to TIME.",
                )


def _has_progress(view: StoreView, group: str, topic: str) -> bool:
    progress = view.progress.get((group, topic))
    return progress is not None and (view.is_live or bool(progress))
