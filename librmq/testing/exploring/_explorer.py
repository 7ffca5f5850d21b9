"""A runner that asks a strategy at every place where a real cluster could continue in several ways.

The kinds of decision:

======== ===========================================================================================
order    which due turn, ready listener or paused listener is next, or whether time passes before
pause    at a send, a `Kit.checkpoint` or the end of a listener: continue, let others run, or die there
fault    before a listener runs, before time passes and when everything rests: nothing, or a process dies,
         shuts down and starts again, is lost to the broker for up to 30 s, or is joined by another; in a
         cluster also: a broker, replica or site dies for a minute, or cannot be reached for as long
answer   the answer to a send comes, or is lost
test     between the test's own calls: continue, or let all others run first
choose   random choices of clients: a producer's first queue, the order of client ids
======== ===========================================================================================

A decision is identified by its usual choice and how often that had occurred; both use labels without random ids. So a
schedule stays valid after the test was edited, as far as it has the same places; elsewhere the usual choice is made.

Threads pass a baton, so that user code can pause and continue later, one piece at a time: a listener runs in a pooled
thread while the thread that takes turns waits; at a pause or its end the baton goes back. So thread-locals, locks and
event loops in listeners work as in production, and still nothing runs in parallel. A listener that waits for a lock of
a paused one stays waiting, and the others continue. One that waits for what the test holds, such as a transaction that
is open while the test sends, is left until the test moves time.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

from librmq.client import Client
from librmq.clock import ManualClock
from librmq.errors import NotIdleError
from librmq.override import override
from librmq.runtime import Runner, Step, Work
from librmq.runtime.locks import Lock
from librmq.runtime.runner import Turn
from librmq.testing._from_store import StoreStart
from librmq.testing._kit import Kit
from librmq.testing._kit_runner import KitRunner, current_work, is_dead
from librmq.testing._process import LIBRARY, Process, ProcessDied

# ---- threads that pass a baton

PATIENCE_S: Final = 0.05
"""A piece of user code without progress for two such periods counts as waiting for a paused one."""
LEAVE_S: Final = 0.5
"""A piece without progress for so long counts as waiting for the test, if that has let it run at a send of its own."""
STUCK_S: Final = 10.0
"""A piece without progress for so long, while all others go on as threads, ends the run."""


class _Thread:
    def __init__(self) -> None:
        self.turn = Lock()
        self.turn.acquire()
        self.call: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._run, name="librmq-listener", daemon=True)
        self.thread.start()

    def place(self) -> tuple[object, int] | None:
        """Return the present place of the thread; two equal places mean no progress."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return None if frame is None else (frame.f_code, frame.f_lasti)

    def _run(self) -> None:
        while True:
            self.turn.acquire()
            call = self.call
            if call is None:
                return
            self.call = None
            call()
            del call  # it holds everything of its run, which is collected before the next one


_idle: list[_Thread] = []


def end_threads() -> None:
    """End the waiting threads; new ones are made on demand."""
    while _idle:
        thread = _idle.pop()
        thread.turn.release()
        thread.thread.join()


class Baton:
    """Its holder runs: the thread that takes turns, or one piece of user code."""

    def __init__(self) -> None:
        self._back: SimpleQueue[Piece] = SimpleQueue()
        self._mine = threading.local()

    def current(self) -> Piece | None:
        """Return the piece that runs in this thread."""
        return getattr(self._mine, "piece", None)

    def run(self, piece: Piece) -> bool:
        """Run a piece until it pauses or ends; return False if it waits for another piece."""
        if piece.thread is None:
            piece.thread = _idle.pop() if _idle else _Thread()
            piece.thread.call = lambda: self._begin(piece)
        piece.thread.turn.release()
        return not self.wait({piece}, PATIENCE_S)

    def wait(self, pieces: set[Piece], seconds: float | None) -> set[Piece]:
        """Wait for running pieces to pause or end; return those without progress for ``seconds``.

        Without ``seconds`` wait for all. An event loop that another piece has given work to needs a wake-up from here,
        because asyncio's locks and events wake only the loop of their own thread.
        """
        waiting = set(pieces)
        before: dict[Piece, tuple[object, int] | None] = {}
        step_s, idle_s = min(seconds or 1.0, 1.0), 0.0  # Ctrl-C gets in between the waits
        while waiting and (seconds is None or idle_s < seconds):
            try:
                waiting.discard(self._back.get(timeout=step_s))
            except Empty:
                places = {piece: piece.place() for piece in waiting}
                idle_s = idle_s + step_s if places == before else 0.0
                before = places
                for piece in waiting:
                    piece.wake_loop()
        return waiting

    def _begin(self, piece: Piece) -> None:
        self._mine.piece = piece
        thread = piece.thread
        try:
            piece.call()
        except BaseException as error:
            piece.raised = error
        finally:
            self._mine.piece = None
            piece.ended = True
            if thread is not None:
                _idle.append(thread)
            self._back.put(piece)

    def pause(self, piece: Piece) -> None:
        """Give the baton back from within the running piece, and wait for the next turn."""
        assert piece.thread is not None
        self._back.put(piece)
        piece.thread.turn.acquire()


class Piece:
    """A piece of user code that runs in a pooled thread."""

    __slots__ = ("call", "ended", "loop", "raised", "thread")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.thread: _Thread | None = None
        self.ended = False
        self.raised: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of a coroutine, which runs in the piece's thread."""

    def place(self) -> tuple[object, int] | None:
        """Return the present place of its code; two equal places mean no progress."""
        return None if self.ended or self.thread is None else self.thread.place()

    def line(self) -> str:
        """Return file and line of the user's code in which it stands; empty if it has ended."""
        frame = sys._current_frames().get((self.thread and self.thread.thread.ident) or 0)
        while frame is not None and frame.f_code.co_filename.startswith((LIBRARY, *_STANDARD)):
            frame = frame.f_back
        return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    def wake_loop(self) -> None:
        """Let its event loop look for what other threads have given it to do."""
        if self.loop is not None:
            with suppress(RuntimeError):  # it has just been closed
                self.loop.call_soon_threadsafe(_nothing)


def _nothing() -> None:
    pass


_STANDARD: Final = os.path.dirname(threading.__file__), "<"
"""Where the code of the standard library is."""

_T = TypeVar("_T")
FAULT: Final = "fault: "
"""Prefix of the labels of faults."""
PAUSE: Final = "pause"
"""The kind of decision, and the choice, to let others go before a listener."""
TIME: Final = "time"
"""The choice to let time pass."""
RESTING: Final = frozenset((TIME, "idle"))
"""The usual choices while no listener waits for its turn."""
MOST_INSTANCES: Final = 3
DOWN_S: Final = 60
"""Time until a broker or a site returns."""
_Fault = tuple[str, Callable[[], object]]


class Place(NamedTuple):
    """The place of a decision: its kind, the usual choice, and how often that has occurred."""

    kind: str
    usual: str
    number: int


class Decision(NamedTuple):
    """A choice other than the usual one."""

    place: Place
    chosen: str

    @override
    def __str__(self) -> str:
        nth = "" if self.place.number == 1 else f", time {self.place.number}"
        return f"[{self.place.kind}] {self.chosen!r} instead of {self.place.usual!r}{nth}"


class Strategy(NamedTuple):
    """A way to decide: ``choose(place, labels)`` returns the index of a choice; 0 is the usual one."""

    choose: Callable[[Place, Sequence[str]], int]
    pauses: Callable[[str], bool] = lambda label: True
    """Whether the work of this label can pause; other work needs no thread, which is faster."""


@dataclass(slots=True)
class Trace:
    """The record of one run."""

    decisions: list[Decision] = field(default_factory=list)
    """The choices that were not the usual ones, in order."""
    reached: list[tuple[Place, tuple[str, ...]]] = field(default_factory=list)
    """The places with a choice, and the labels on offer."""
    replayable: bool = True
    """False once listeners waited for each other, so that threads decided the order."""
    history: str = ""
    """Events of a failed test."""


class _Paused(Work):
    """A listener that lets others go first."""

    __slots__ = ("piece",)

    def __init__(self, work: Work, piece: Piece) -> None:
        super().__init__(f"continue {work.label}", work.call, work.done, work.owner)
        self.piece = piece

    @override
    def go(self, runner: Runner) -> None:
        assert isinstance(runner, Explorer)
        runner.paused.remove(self)
        runner._let_run(self.piece)


class Explorer(KitRunner):
    """A `KitRunner` whose choices are made by ``strategy``."""

    kit: Kit
    settles_history = False  # the history of a failing run is read before its broker closes

    def __init__(self, strategy: Strategy, clock: ManualClock) -> None:
        super().__init__(clock)
        self.strategy = strategy
        self.trace = Trace()
        self.is_first = False
        """Whether it is the first run of a test."""
        self.on_disk = False
        """Whether the store of this run is in a folder."""
        self.start: StoreStart | None = None
        """What the kit begins with instead of the store of its settings."""
        self.switches_at_lines = False
        """Whether a listener may also pause at each line of its own file."""
        self._seen: dict[tuple[str, str], int] = {}
        self._baton = Baton()
        self._pieces: dict[Piece, Work] = {}
        self._inline: Work | None = None
        self._faults = 0
        self._faults_by_process: dict[Process, tuple[_Fault, _Fault, _Fault, _Fault]] = {}
        self._taking = False
        self._until_ms = 0
        self._test_stands_at = ""
        """The test's own send or checkpoint at which it lets all others go first; empty elsewhere."""
        self._left: set[Piece] = set()
        """Pieces that wait for what the test holds."""

    # ---- deciding

    def decide(self, kind: str, labels: Sequence[str]) -> int:
        """Return the index of a choice among ``labels``."""
        if len(labels) == 1 or not self.trace.replayable:
            return 0
        seen = self._seen
        key = kind, labels[0]
        number = seen[key] = seen.get(key, 0) + 1
        place: Place = tuple.__new__(Place, (kind, labels[0], number))
        self.trace.reached.append((place, tuple(labels)))
        index = self.strategy.choose(place, labels)
        if index:
            label = labels[index]
            self.trace.decisions.append(Decision(place, label))
            if label.startswith(FAULT):
                self._faults += 1
            self.kit.note("explored", f"{label.removeprefix(FAULT)}, instead of: {labels[0]}")
        return index

    @override
    def settles(self) -> bool:
        """Return whether the cluster needs time to recover from a fault."""
        return self._faults > 0

    @override
    def choose(self, kind: str, options: Sequence[_T]) -> _T:
        """Return one of the options that a real cluster has."""
        name = "answer" if kind.startswith("answer") else "choose"
        labels = [str(option) if str(option).startswith(FAULT) else f"{kind}: {option}" for option in options]
        return options[self.decide(name, labels)]

    @override
    def _take_turns(self, until_ms: int) -> None:
        before = self._taking
        if not before and not self._test_stands_at:
            self._wait(self._left)
        self._taking, self._until_ms = True, until_ms
        try:
            self._take_picked_turns(until_ms)
        finally:
            self._taking = before

    @override
    def pick(self, options: Iterator[Turn]) -> Turn | None:
        """Return the turn to take; None ends the run."""
        usual_turn = next(options, None)
        if isinstance(usual_turn, Step) and not isinstance(usual_turn.owner, Client) and not is_dead(usual_turn):
            return None if self.failure is not None else usual_turn  # background work of a broker involves no client
        turns = [] if usual_turn is None else self._alive(chain((usual_turn,), options))
        while self.failure is None:
            first = turns[0] if turns else None
            if isinstance(first, Step):
                if not isinstance(first.owner, Client):
                    return first
            else:
                faults = self._possible_faults()
                if faults:
                    usual_label = "idle" if first is None else first.label
                    index = self.decide("fault", [usual_label, *(label for label, _ in faults)])
                    if index:
                        faults[index - 1][1]()
                        turns = self._alive(self.options(self._until_ms))
                        continue
                if first is None:
                    return None
            if len(turns) == 1:
                return first
            offered = [
                turn for turn in turns if not isinstance(turn, Step) or turn is first or isinstance(turn.owner, Client)
            ]
            return offered[self.decide("order", _distinct([turn.label for turn in offered]))]
        return None

    def _alive(self, options: Iterator[Turn]) -> list[Turn]:
        """Return the turns of living processes, and drop the turns of dead ones."""
        while True:
            turns = list(options)
            dead = [turn for turn in turns if turn.owner is not None and turn.owner.dead]
            if not dead:
                return turns
            for turn in dead:
                if isinstance(turn, Work) and turn in self.ready:
                    self.ready.remove(turn)
                elif isinstance(turn, Step):
                    turn.at = None
            options = self.options(self._until_ms)

    def _possible_faults(self) -> list[_Fault]:
        kit = self.kit
        faults: list[_Fault] = []
        living = [process for process in kit.processes if not process.is_test and not process.dead and process.clients]
        for process in living:
            dies, starts_again, is_lost, joins = self._faults_by_process.get(process) or self._faults_of(process)
            faults.append(dies)
            if not self._has_pieces_of(process):
                faults.append(starts_again)
            faults.append(is_lost)
            if (
                len(living) < MOST_INSTANCES
                or sum(other._factory is process._factory for other in living) < MOST_INSTANCES
            ):
                faults.append(joins)
        if kit.network.is_whole_cluster:
            for copy in kit.network.copies:
                faults.append((f"{FAULT}{copy.name} crashes", partial(copy.crash, down=DOWN_S)))
                cut = partial(kit.faults.cut, copy.master_name, copy.name, seconds=DOWN_S)
                faults.append((f"{FAULT}{copy.name} unreachable", cut))
            for name in kit.network.by_name:
                faults.append((f"{FAULT}{name} crashes", partial(kit.crash_broker, name, down=DOWN_S)))
                faults.append((f"{FAULT}{name} unreachable", partial(kit.faults.isolate, name, DOWN_S)))
            for site in kit.network.table.sites() if any(process.site for process in living) else ():
                if not any(process.site == site and self._has_pieces_of(process) for process in living):
                    faults.append((f"{FAULT}site {site} dark", partial(kit.lose_site, site, down=DOWN_S)))
                faults.append((f"{FAULT}site {site} unreachable", partial(kit.faults.isolate, site, DOWN_S)))
        return faults

    def _faults_of(self, process: Process) -> tuple[_Fault, _Fault, _Fault, _Fault]:
        kit, what = self.kit, f"{FAULT}{process.label}"
        faults = self._faults_by_process[process] = (
            (f"{what} dies", partial(kit.crash, process)),
            (f"{what} is started again", partial(kit.restart, process)),
            (f"{what} is lost to the broker", partial(kit.lose, process)),
            (f"{FAULT}another {process.label} joins", partial(kit.join, process)),
        )
        return faults

    def _has_pieces_of(self, process: Process) -> bool:
        return any(self.process_table.process_of(work) is process for work in self._pieces.values())

    # ---- user code that can pause

    @override
    def perform(self, work: Work) -> None:
        """Run user code until it ends or pauses; code that can pause gets its own thread."""
        # Beside paused work, or the test in the middle, it may have to wait for these, which only a thread can.
        if not self._pieces and not self._test_stands_at and not self.strategy.pauses(work.label):
            self._inline = work
            try:
                self.run_code(work)
            finally:
                self._inline = None
                self.crash_the_dying()
            return
        context = copy_context()
        piece = Piece(lambda: context.run(self.run_code, work))
        self._pieces[piece] = work
        self._let_run(piece)

    @override
    def _call(self, work: Work) -> object:
        if not self.switches_at_lines or not work.about:
            return work.call()
        before = sys.gettrace()
        sys.settrace(self._points_at_lines())
        try:
            return work.call()
        finally:
            sys.settrace(before)

    def _points_at_lines(self) -> Callable[[FrameType, str, object], Callable[..., Any] | None]:
        """Return a trace function with a point at each line of the file of the first function that it sees."""
        file: str | None = None

        def trace_calls(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
            nonlocal file
            name = frame.f_code.co_filename
            if file is None and not name.startswith((LIBRARY, "<")):  # a dataclass compiles "<string>"
                file = name
            return trace_lines if name == file else None

        def trace_lines(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
            if event == "line":
                code = frame.f_code
                self.point(f"{code.co_name} line {frame.f_lineno - code.co_firstlineno}")
            return trace_lines

        return trace_calls

    def _let_run(self, piece: Piece) -> None:
        if not self._baton.run(piece):
            self._wait({piece})
        self._after(piece)

    def _wait(self, going: set[Piece]) -> None:
        """Wait for running pieces, and let all paused ones run as threads if there are any.

        While the test itself stands in the middle, pieces that wait for what it holds are left for later.

        Raises:
            NotIdleError: A piece waits for something that nothing else gives up.
        """
        if not going:
            return
        going = set(going)
        if self.paused:
            self._decide_no_more("a listener waits for a paused one")
        alone = self.trace.replayable
        while self.paused:
            paused = self.paused.pop(0)
            assert isinstance(paused, _Paused)
            assert paused.piece.thread is not None
            paused.piece.thread.turn.release()
            going.add(paused.piece)
        # A listener alone may be slow: it waits for another system.
        limit = LEAVE_S if self._test_stands_at else None if alone else STUCK_S
        waiting = self._baton.wait(going, limit)
        if waiting and not self._test_stands_at:
            self._left = set()  # so that the end of the test does not wait for them again
            stuck = ", ".join(sorted(f"{self._pieces[piece].label} at {piece.line()}" for piece in waiting))
            raise NotIdleError(
                f"{stuck}: it waits for something that is not released while others go first, such as an open "
                "transaction or a lock: end that before a send, rmq.checkpoint() or the end of a listener"
            )
        if waiting - self._left:
            self._decide_no_more(f"a listener waits, perhaps for the test, which stands at: {self._test_stands_at}")
        self._left = waiting
        self.left = {self._pieces[piece] for piece in waiting}
        for piece in list(self._pieces):
            self._after(piece)

    def _decide_no_more(self, why: str) -> None:
        self.trace.replayable = False
        self.kit.note("explored", f"{why}: from here on chance decides")

    def _after(self, piece: Piece) -> None:
        if piece.ended:
            self._pieces.pop(piece, None)
            raised, piece.raised = piece.raised, None
            self.crash_the_dying()
            if raised is not None:
                raise raised

    @override
    def point(self, label: str) -> None:
        """Let other turns run, or the process die."""
        piece = self._baton.current()
        work = self._inline if piece is None else self._pieces[piece]
        if work is None:
            if current_work.get() is not None:
                return  # a coroutine in the test's own event loop, which decides who is next
            if not self._taking and self.decide("test", [f"test: {label}", "all others first"]):
                self._test_stands_at = label
                try:
                    self.kit._let_others_run()
                finally:
                    self._test_stands_at = ""
            return
        if is_dead(work):
            raise ProcessDied(work.label)
        process = self.kit._table.process_of(work)
        labels = [f"{work.label}: {label}", PAUSE]
        if process is not None:
            labels.append(f"{FAULT}{process.label} dies here")
        index = self.decide(PAUSE, labels)
        if index == 2 and process is not None:
            self.kit.note("fault", f"{process.label} dies and starts again")
            self.die_here(process)
        if index == 1 and piece is not None:
            self.paused.append(_Paused(work, piece))
            self._baton.pause(piece)
            if is_dead(work):
                raise ProcessDied(work.label)

    @override
    def _finish(self, work: Work, result: object, error: Exception | None) -> None:
        if not is_dead(work):
            self.point("its end")
        super()._finish(work, result, error)

    @override
    def _launch(self, work: Work, coroutine: Coroutine[Any, Any, object]) -> None:
        piece = self._baton.current()
        if piece is None:
            super()._launch(work, coroutine)
        else:
            with asyncio.Runner() as loop:  # its own loop, because it can stop in the middle
                piece.loop = loop.get_loop()
                loop.run(self._run(work, coroutine))

    @override
    def unwind(self, process: Process) -> None:
        """End the paused code of a dead process: it raises `ProcessDied` at its place."""
        super().unwind(process)
        for paused in [work for work in self.paused if self.process_table.process_of(work) is process]:
            assert isinstance(paused, _Paused)
            self.paused.remove(paused)
            self._let_run(paused.piece)

    @override
    def shutdown(self, timeout: float | timedelta = 0) -> bool:
        """End all paused code."""
        self._baton.wait(self._left, LEAVE_S)
        for paused in list(self.paused):
            if paused in self.paused:
                try:
                    paused.go(self)
                except KeyboardInterrupt:
                    raise
                except BaseException:
                    continue  # an error of user code after the run has no effect on its result
        return super().shutdown(timeout)


def _distinct(labels: list[str]) -> list[str]:
    if len(set(labels)) == len(labels):
        return labels
    seen: Counter[str] = Counter()
    distinct = []
    for label in labels:
        seen[label] += 1
        distinct.append(label if seen[label] == 1 else f"{label} #{seen[label]}")
    return distinct
