"""What was stored by minute in the last hours, read from the store itself: the order of its queues is their history.

A queue's messages are in the order of their times, so the minutes of three hours are found by halving, and an hour in
which nothing came costs one look. How far a group is now says which messages of each minute still wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from librmq.clock import Clock
from librmq.console._plots import area
from librmq.console._tables import Axis, Cell, Fact, Table
from librmq.diagnosis import StoreView, View
from librmq.formatting import moment, number, rate
from librmq.runtime.event_log import counted

_MINUTES: Final = 180
_MINUTE_MS: Final = 60_000
_QUEUES: Final = 64
"""The most queues of which a page seeks the minutes."""


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
    end_ms = clock.now_ms() if view.is_live else view.now_ms or 0
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
