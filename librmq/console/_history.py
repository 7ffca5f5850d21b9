"""What was stored by minute in the last hours, read from the store itself: the order of its queues is their history.

What no store keeps, such as how far groups were, is remembered from the looks at the overview.

A queue's messages are in the order of their times, so the minutes of three hours are found by halving, and an hour in
which nothing came costs one look. How far a group is now says which messages of each minute still wait for it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from librmq.clock import Clock
from librmq.console._plots import area
from librmq.console._tables import Axis, Cell, Fact, Table
from librmq.diagnosis import StoreView, View
from librmq.formatting import moment, number, rate
from librmq.runtime.event_log import counted
from librmq.runtime.locks import Lock

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
