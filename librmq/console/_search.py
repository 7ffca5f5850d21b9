"""The messages of a topic by what a form selects, what the box of each page finds, and what was stored by minute.

A search reads backwards and stops after a number of messages or two seconds. Its page then leads on from there, so any
depth is reached. Times are sought by the order of the queues: the minutes of three hours are found by halving, and an
hour in which nothing came costs one look. How far a group is now says which messages of each minute still wait for it.
What no store keeps, such as how far groups were, is remembered from the looks at the overview.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from librmq.clock import LAST_MS, Clock
from librmq.console._messages import messages_table
from librmq.console._place import QUEUES, Look, Place, backwards, freshest
from librmq.console._tables import (
    Axis,
    Cell,
    Fact,
    Page,
    Query,
    Table,
    area,
    count,
    group_link,
    link,
    message_link,
    topic_link,
)
from librmq.diagnosis import Lag, StoreView, View
from librmq.diagnosis import lag as lag_of
from librmq.errors import ConfigError
from librmq.filter import SqlFilter, TagFilter
from librmq.formatting import UNKNOWN, moment, number, rate, size
from librmq.message import StoredMessage
from librmq.message.topics import is_own_group, kind_of_topic
from librmq.runtime.event_log import counted
from librmq.runtime.locks import Lock
from librmq.store.format.directory import is_made_by_librmq

_MINUTES: Final = 180
_MINUTE_MS: Final = 60_000
_QUEUES: Final = 64
"""The most queues of which a page seeks the minutes."""


_KEPT: Final = 180
_LEAST_MS: Final = 2_000
_RATE_MS: Final = 60_000
"""Rates are of about this time."""


class History(NamedTuple):
    facts: Sequence[Fact] = ()
    tables: Sequence[Table] = ()


def history_of(
    view: View[Any], queues: Mapping[Any, range], clock: Clock, behind: Mapping[Any, int] | None = None
) -> History:
    """Return what was stored by minute; with ``behind``, by queue how far a group is, also what of it waits.

    Nothing where that takes too long: at a broker elsewhere, and of many queues.
    """
    filled = {queue: ids for queue, ids in queues.items() if ids}
    if not isinstance(view, StoreView) or len(filled) > _QUEUES:
        return History()
    end_ms = _end_ms(view, clock)
    times = [end_ms - (_MINUTES - minute) * _MINUTE_MS for minute in range(_MINUTES + 1)]
    stored, waiting = [0] * _MINUTES, [0] * _MINUTES
    for queue, ids in filled.items():
        cuts = [*_cuts(lambda time_ms, run: _first_from(view, queue, time_ms, run), times[:-1], ids), ids.stop]  # noqa: B023
        at = ids.stop if behind is None else behind.get(queue, ids.stop)
        for minute in range(_MINUTES):
            stored[minute] += cuts[minute + 1] - cuts[minute]
            waiting[minute] += max(cuts[minute + 1] - max(cuts[minute], at), 0)
    facts = [Fact("stored", rate(stored[-1] / 60), "in the last minute")]
    if not any(stored):
        return History(facts)
    what = f"{counted(sum(stored), 'message')} in the last three hours, at most {number(max(stored))} in a minute"
    if behind is not None:
        what += f"; {number(sum(waiting))} of them wait for the group. No file keeps when it consumed the others"
    axis = Axis([moment(time_ms)[11:16] for time_ms in times[:: _MINUTES // 2]], is_span=True)
    title = "Stored by minute" if behind is None else "Stored by minute, and what waits of it"
    plot = Cell(area(stored, what, () if behind is None else waiting), "", "plot")
    return History(facts, [Table(title, ("UTC",), [[plot]], f"{what}.", axes={"UTC": axis})])


def stored_per_s(view: StoreView, clock: Clock) -> Mapping[str, float] | None:
    """Return the messages a second of each topic in the last minute; None where these came in many queues."""
    begin_ms, counts = _end_ms(view, clock) - _MINUTE_MS, Counter[str]()
    newest_first = sorted(view.ranges.items(), key=lambda item: -item[1].max_physic_offset)
    for at, (queue, state) in enumerate(newest_first):
        ids = range(state.min_offset, state.max_offset)
        if not ids or (stored := ids.stop - _first_from(view, queue, begin_ms, ids)) <= 0:
            break  # what the other queues have is older
        if at == _QUEUES:
            return None
        counts[queue[0]] += stored
    return {topic: stored * 1000 / _MINUTE_MS for topic, stored in counts.items()}


def _end_ms(view: StoreView, clock: Clock) -> int:
    return clock.now_ms() if view.is_live else view.now_ms or 0


def _first_from(view: StoreView, queue: tuple[str, int], time_ms: int, run: range) -> int:
    return view.store.times.first_from(view.store.queues[queue], time_ms, run)


def _cuts(first_from: Callable[[int, range], int], times: Sequence[int], run: range) -> Iterator[int]:
    """Yield for each of some times, in their order, the first offset of a run that was stored then or later."""
    if not run or not times:
        yield from [run.stop] * len(times)
        return
    half = len(times) // 2
    cut = first_from(times[half], run)
    yield from _cuts(first_from, times[:half], range(run.start, cut))
    yield cut
    yield from _cuts(first_from, times[half + 1 :], range(cut, run.stop))


# ---- what the overview remembers


class Sample(NamedTuple):
    """One look."""

    at_ms: int
    ends: Mapping[str, int]
    """The sum of the ends of a topic's queues."""
    lags: Mapping[str, int]
    """The lag of each group."""
    positions: Mapping[str, int] | None
    """The sum of a group's progress over its queues; None where these are too many to add up."""


class Samples:
    """The last looks of all who have the overview open. Thread-safe.

    Nothing is measured while no page asks, so that a console that is not looked at costs nothing.
    """

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._lock = Lock()

    def add(self, sample: Sample) -> None:
        """Add a look, unless the last one has just been; after a clock that was set back the earlier ones go."""
        with self._lock:
            if self._samples and sample.at_ms < self._samples[-1].at_ms:
                self._samples.clear()
            if not self._samples or sample.at_ms - self._samples[-1].at_ms >= _LEAST_MS:
                self._samples.append(sample)

    def lags(self, group: str) -> list[tuple[int, int]]:
        """Return time and lag of a group at each look, the oldest first."""
        with self._lock:
            return [(sample.at_ms, sample.lags[group]) for sample in self._samples if group in sample.lags]

    def per_s(self, numbers_of: Callable[[Sample], Mapping[str, int] | None]) -> dict[str, float] | None:
        """Return by how much each number of a look has grown a second; None if it is unknown, or at the first look."""
        with self._lock:
            if len(self._samples) < 2:
                return None
            *_, before, last = self._samples
            first = next(look for look in self._samples if last.at_ms - look.at_ms <= _RATE_MS or look is before)
        then, now = numbers_of(first), numbers_of(last)
        if then is None or now is None:
            return None
        seconds = (last.at_ms - first.at_ms) / 1000
        return {name: max(now[name] - then[name], 0) / seconds for name in then.keys() & now.keys()}


MESSAGES: Final = 25
"""Messages that a page lists."""
_LOOKED_AT: Final = 20_000
"""Messages that one search reads."""
_SEARCH_S: Final = 2.0
"""Seconds after which a search stops, because a browser waits for its page."""
_OF_KEY: Final = 64
_ROWS: Final = 100
_FORM: Final = ("key", "tag", "sql", "since", "until")
_EVER: Final = (0, LAST_MS)


# ---- a topic


def topic_page(look: Look, query: Query) -> Page:
    """Show a topic's messages by what the form selects, its groups and its queues."""
    topic, place = query.required("name"), look.place
    with place.view(query.at_ms) as view:
        queues = view.queues(topic)
        if not queues and topic not in view.listed_topics:
            raise ConfigError(f"there is no topic {topic!r}")
        results = _found(place, view, topic, query)
        with place.beside(view) as log:
            retained, history = _kept(log), history_of(log, log.queues(topic), query.clock)
        groups = _groups(place, view, topic, query)
        bounds = _queues_table(view, queues)
    total = sum(map(len, queues.values()))
    form = {name: query.text(name) for name in _FORM}
    return Page(
        topic,
        [
            Fact("messages", number(total), f"in {counted(len(queues), 'queue')}"),
            Fact("kind", kind_of_topic(topic)),
            retained,
            *history.facts,
        ],
        [
            messages_table(results.messages, results.note, bodies=look.bodies),
            *history.tables,
            *groups,
            bounds,
        ],
        template="topic.html.j2",
        is_live=not query.text("behind"),
        more={
            "query": form,
            "older": link("topic", name=topic, **form, behind=results.behind) if results.behind else "",
            "newest": link("topic", name=topic, **form) if query.text("behind") else "",
        },
    )


def _queues_table(view: View[Any], queues: Mapping[Any, range]) -> Table:
    rows = [
        [
            Cell(_name(view, queue), is_number=True),
            count(ids.start),
            count(ids.stop),
            count(len(ids)),
            Cell(moment(view.stored_at(queue, ids.start)) if ids else ""),
            Cell(moment(view.stored_at(queue, ids.stop - 1)) if ids else ""),
        ]
        for queue, ids in islice(queues.items(), _ROWS)
    ]
    left = f"The first {_ROWS} of {number(len(queues))} queues." if len(queues) > _ROWS else ""
    return Table("Queues", ("queue", "first offset", "end", "messages", "oldest", "newest"), rows, left)


def _groups(place: Place, view: View[Any], topic: str, query: Query) -> list[Table]:
    """Return the groups that consume a topic, with what waits for each there, the most first."""
    if place.route is not None and query.at_ms is None:
        names = {*place.route.groups_of(topic)}
    elif query.at_ms is None:
        names = {group for group in view.groups if not is_own_group(group)}
    else:
        return []
    visible = sorted(names)[:_ROWS]
    progress: Lag = lag_of(view, group=visible, topic=topic)
    by_group = {row.group: row for row in progress.by_group()}
    if place.route is None:
        visible = [group for group in visible if group in by_group]
    lags = {group: row.lag for group, row in by_group.items()}
    rows = [
        [
            group_link(group),
            count(lags.get(group), "warn"),
            Cell(moment(by_group[group].oldest_timestamp_ms) if lags.get(group) else ""),
        ]
        for group in sorted(visible, key=lambda group: (-lags.get(group, 0), group))
    ]
    note = f"Of {number(len(names))} groups the first {_ROWS} were asked for." if len(names) > _ROWS else ""
    return [Table("Groups", ("group", "lag", "oldest waits since"), rows, note, "No group yet.")]


def _kept(view: View[Any]) -> Fact:
    """Return what the log keeps, which is one for all topics; unknown where only a broker's own settings say it."""
    if not isinstance(view, StoreView) or not (view.is_live or is_made_by_librmq(view.store.path, view.store.files)):
        return Fact("kept", UNKNOWN, "the settings of the broker say it")
    config = view.store.config
    hours, log_size = config.file_reserved_hours, config.max_total_size
    limit = "no limit of size" if log_size is None else f"at most {size(log_size)} of log"
    unread = "what a group has not consumed stays" if config.keep_unconsumed else "unconsumed messages go as well"
    return Fact("kept", "at any age" if hours is None else f"{number(hours)} hours", f"{limit}; {unread}")


# ---- a search


class _Found(NamedTuple):
    messages: Sequence[StoredMessage]
    note: str = ""
    """Where the search stopped."""
    behind: str = ""
    """Where to go on, as a parameter of the page; empty at the end."""


def _found(place: Place, view: View[Any], topic: str, query: Query) -> _Found:
    """Return the newest messages that a form selects."""
    key, tag, sql = query.text("key"), query.text("tag"), query.text("sql")
    since, until = query.time_ms("since"), query.time_ms("until")
    begin_ms, end_ms = since or 0, LAST_MS if until is None else until
    if sum(map(bool, (key, tag, sql))) > 1:
        raise ConfigError("expected one of key, tag and SQL")
    if key and isinstance(view, StoreView):
        of_key = view.store.find_by_key(topic, key, begin_ms, end_ms - 1, max_messages=MESSAGES)
        return _Found(_newest_first(of_key))
    if key:
        of_key = place.acting().find_by_key(topic, key)
        note = f"Of the newest {_OF_KEY} with this key: a broker returns no more." if len(of_key) >= _OF_KEY else ""
        return _Found(
            _newest_first(message for message in of_key if begin_ms <= message.store_timestamp_ms < end_ms), note
        )
    by_tag, by_sql = TagFilter(tag), SqlFilter(sql, strict=True) if sql else None
    ends = _positions(query.text("behind"))
    runs = {queue: ids for queue, ids in view.queues(topic).items() if ids}
    if (begin_ms, end_ms) != _EVER:
        runs = {queue: view.span(queue, begin_ms, end_ms) for queue in runs}
    runs = {
        queue: range(ids.start, min(ids.stop, ends.get(_name(view, queue), ids.stop))) for queue, ids in runs.items()
    }
    filled = freshest(view, {queue: ids for queue, ids in runs.items() if ids})
    places = {queue: ids.stop for queue, ids in runs.items()}
    deadline, looked_at, is_cut = query.clock.monotonic() + _SEARCH_S, 0, False
    messages: list[StoredMessage] = []
    last: StoredMessage | None = None
    for queue, message in backwards(view, filled):
        if len(messages) >= MESSAGES or looked_at >= _LOOKED_AT or query.clock.monotonic() > deadline:
            is_cut = len(messages) < MESSAGES
            break
        looked_at, last, places[queue] = looked_at + 1, message, message.queue_offset
        is_selected = by_tag.matches(message.tags) and (by_sql is None or by_sql.matches(message.properties))
        if is_selected and begin_ms <= message.store_timestamp_ms < end_ms:
            messages.append(message)
    else:
        places |= {queue: ids.start for queue, ids in filled.items()}
    left = any(places[queue] > ids.start for queue, ids in runs.items())
    behind = " ".join(f"{_name(view, queue).replace(' ', '/')}:{at}" for queue, at in places.items()) if left else ""
    notes = []
    if is_cut and last is not None:
        notes.append(f"The search looked at {number(looked_at)} messages, back to {moment(last.store_timestamp_ms)}.")
    if left and len(messages) < MESSAGES and len(filled) < len(runs):
        notes.append(f"Of {counted(len(runs), 'queue')} those {QUEUES} with the newest messages were read.")
    return _Found(messages, " ".join(notes), behind)


def _positions(text: str) -> dict[str, int]:
    """Return where a search goes on, by the names of queues."""
    positions = {}
    for word in text.split():
        name, _, offset = word.rpartition(":")
        if not (offset.isascii() and offset.isdigit() and len(offset) < 20):
            raise ConfigError(f"behind: expected queues with offsets such as 0:120, found {text!r:.80}")
        positions[name.replace("/", " ")] = int(offset)
    return positions


def _name(view: View[Any], queue: Any) -> str:
    return f"{view.broker_name(queue)} {queue[-1]}".strip()


def _newest_first(messages: Iterable[StoredMessage]) -> list[StoredMessage]:
    return sorted(messages, key=lambda message: -message.store_timestamp_ms)[:MESSAGES]


# ---- the box of each page


def find_page(look: Look, query: Query) -> Page:
    """Show what has an id, a key or a name; a single thing with it is shown at once."""
    words, place = query.required("q"), look.place
    with place.log(query.at_ms, asks_owner=True) if place.has_log else place.view() as view:
        topics = [topic for topic in view.topics if words.lower() in topic.lower()]
        groups = [group for group in view.groups if words.lower() in group.lower()]
        searched = [*view.topics] if isinstance(view, StoreView) else [*islice(view.topics, _ROWS)]
        matches = _with_id_or_key(place, view, words, searched)
        every = len(view.topics)
    exact = [group_link(group).link for group in groups if group == words]
    exact += [topic_link(topic).link for topic in topics if topic == words]
    exact += [message_link(message) for message in matches]
    looked = f"Keys were looked for in the first {_ROWS} of {number(every)} topics." if len(searched) < every else ""
    names = [
        Table(
            title,
            (title.lower(),),
            [[to(name)] for name in some[:_ROWS]],
            f"The first {_ROWS} of {number(len(some))}." if len(some) > _ROWS else "",
            f"No {title[:-1].lower()} has this name.",
        )
        for title, some, to in (("Groups", groups, group_link), ("Topics", topics, topic_link))
    ]
    nothing = f"No message has this id or key. {looked}".strip()
    messages = messages_table(matches, looked, bodies=look.bodies)._replace(nothing=nothing)
    return Page(
        f"Found for {words}",
        tables=[messages, *names],
        is_live=False,
        location=exact[0] if len(exact) == 1 else "",
    )


def _with_id_or_key(place: Place, view: View[Any], words: str, topics: Iterable[str]) -> list[StoredMessage]:
    """Return the newest messages with an id, or with a key in any of some topics."""
    if isinstance(view, StoreView):
        matches = view.store.find_by_id(words)
        if not matches:
            matches = [
                message for topic in topics for message in view.store.find_by_key(topic, words, max_messages=MESSAGES)
            ]
        sends = {
            message_link(message): message for message in sorted(matches, key=lambda record: -record.physical_offset)
        }
        return _newest_first(sends.values())  # of a message that came again, or waited, its first record
    message = place.acting().find_by_id(words)
    if message is not None:
        return [message]
    return _newest_first(message for topic in topics for message in place.acting().find_by_key(topic, words))
