"""Exploring: run one test under many legal schedules and show the shortest that fails.

The first run takes the usual schedule. Up to half of the runs then differ from it in one decision, each in another,
with the kinds in turn. The rest differ at random, in few decisions or in many. A failing schedule is made shorter as
long as the test still fails at the same line with the same type of exception.
"""

from __future__ import annotations

import base64
import gc
import inspect
import json
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Unpack

from librmq.clock import ManualClock
from librmq.errors import ConfigError, InputError
from librmq.files import TemporaryFolder
from librmq.runtime.event_log import HeldLine, held_back
from librmq.testing._from_store import Shrunk, StoreStart, moved_label, shrink
from librmq.testing._kit import Kit, KitKeywords, begin_of, starting_store
from librmq.testing._process import LIBRARY
from librmq.testing.exploring._explorer import FAULT, PAUSE, RESTING, TIME, Decision, Explorer, Place, Strategy, Trace

MOST_SHRINKING_RUNS: Final = 300
MOST_FAULTS: Final = 2
MOST_STORES: Final = 200
"""Runs with fewer messages of a store."""
_PROBABILITIES: Final = (0.05, 0.2, 0.5)
_SECOND: Final = ("pause", "pause", "pause", "order", "order time", "test")
_SEED_PREFIX: Final = "rmq1-"


class Attempt(NamedTuple):
    """One run of the test: its schedule and its failure."""

    trace: Trace
    error: BaseException | None
    states: Set[int] = frozenset()
    """The states that it has reached."""
    start: StoreStart | None = None
    """What its kit began with; None for an empty store."""

    @property
    def signature(self) -> tuple[type, str, int] | None:
        """Identity of the failure: its type and the line of the user's code; None where nothing failed."""
        return None if self.error is None else signature_of(self.error)


def signature_of(error: BaseException) -> tuple[type, str, int]:
    """Return the identity of a failure: its type and the line of the user's code."""
    return type(error), *_place(error.__traceback__)


Run = Callable[[Explorer], BaseException | None]
"""Runs the test once and returns its failure."""


@dataclass
class Fewest:
    """The fewest messages of a store with which a test fails in the same way."""

    start: StoreStart
    """All the messages."""
    shrunk: Shrunk | None
    """None if the test does not fail again with all of them in a store of their own."""
    decisions: tuple[Decision, ...]
    """The schedule with the fewest messages."""

    def describe(self, more: str, save: Callable[[StoreStart], Sequence[str]]) -> str:
        """Return what a failure says: the messages, and the lines that ``save`` returns after it has saved them.

        ``more`` says how to allow more runs, if that can find fewer messages.
        """
        lines = self.start.describe_part(self.shrunk, more)
        if self.shrunk is not None and self.shrunk.start.messages:
            lines += save(self.shrunk.start)
        return "\n".join(lines)


@dataclass
class Found:
    """A schedule under which the test fails."""

    decisions: tuple[Decision, ...]
    """The decisions that differ from the usual schedule; none if that one fails."""
    error: BaseException
    history: str
    run: int
    """Number of the run that failed first, counting from 1."""
    first_decisions: int
    """Number of decisions before the schedule was made shorter."""
    trace: Trace
    """The run itself."""
    on_disk: Attempt | None = None
    """The result of the same schedule with the store in a folder; None without such a run."""
    fewest: Fewest | None = None
    """The fewest messages that fail; None for a test that begins with an empty store, or that did not look for them."""

    @property
    def seed(self) -> str:
        """The text that runs the schedule again."""
        return encode_schedule(self.decisions)


@dataclass
class Exploration:
    """The result of exploring a test."""

    runs: int = 0
    """Number of runs to find a failure."""
    shrinking_runs: int = 0
    """Number of runs to simplify the failure."""
    schedules: int = 0
    """Number of different schedules among the runs."""
    states: int = 0
    """Number of different states that the runs have reached. A state is what clients and brokers have done so far, in
    the history of the kit, whatever the time."""
    late_states: int = 0
    """Number of them that no run before the last tenth of the runs had reached: if there are few, more runs will hardly
    show anything new."""
    reached: Counter[str] = field(default_factory=Counter)
    """Number of decisions over all runs, by kind."""
    chosen: Counter[str] = field(default_factory=Counter)
    """Number of decisions that were not the usual ones, by kind."""
    found: Found | None = None
    """The failure; None if no run failed."""

    def summary(self) -> str:
        """Return the numbers of runs, of schedules, of states and of decisions by kind."""
        kinds = ", ".join(f"{kind} {self.reached[kind]:,} ({self.chosen[kind]:,})" for kind in sorted(self.reached))
        return (
            f"{self.runs:,} runs, {self.schedules:,} schedules, {self.states:,} states "
            f"({self.late_states:,} of them new in the last tenth of the runs); "
            f"decisions, in parentheses those not as usual: {kinds or 'none'}"
        )

    def report(self) -> str:
        """Return a readable report of the failure; empty without one."""
        failure = self.found
        if failure is None:
            return ""
        lines = [f"failed in run {failure.run:,} of {self.runs:,}: {_short(failure.error)}"]
        if not failure.decisions:
            lines.append("the usual schedule fails")
        else:
            number = len(failure.decisions)
            decisions = "1 decision that is not" if number == 1 else f"{number} decisions that are not"
            lines.append(
                f"the shortest schedule that fails so has {decisions} as usual "
                f"(found with {failure.first_decisions}, made shorter in {self.shrinking_runs} runs):"
            )
            lines += [f"  {decision}" for decision in failure.decisions]
        if not failure.trace.replayable:
            lines.append("listeners waited for each other, so another run can differ")
        if failure.on_disk is not None:
            lines.append(_compared(failure.error, failure.on_disk))
        lines += ["what happened:", failure.history]
        if failure.decisions:
            lines.append(f"run it again with the seed {failure.seed}")
        return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------- schedules


def encode_schedule(decisions: Sequence[Decision]) -> str:
    """Return a schedule as a short text, the seed that runs it again."""
    document = json.dumps([[*place, label] for place, label in decisions], separators=(",", ":"))
    return _SEED_PREFIX + base64.urlsafe_b64encode(zlib.compress(document.encode(), 9)).decode().rstrip("=")


def decode_schedule(text: str) -> tuple[Decision, ...]:
    """Return the schedule of a seed, of a file's JSON, or of the path of such a file."""
    text = text.strip()
    try:
        if text.startswith(_SEED_PREFIX):
            packed = text.removeprefix(_SEED_PREFIX)
            inflater = zlib.decompressobj()
            text = inflater.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), 1 << 20).decode()
        elif not text.startswith(("[", "{")):
            text = Path(text).read_text("utf-8")
            if text.startswith(_SEED_PREFIX):
                return decode_schedule(text)
        document = json.loads(text)
        rows = document["decisions"] if isinstance(document, dict) else document
        decisions = [
            Decision(Place(str(kind), str(usual_label), int(number)), str(label))
            for kind, usual_label, number, label in rows
        ]
    except (OSError, ValueError, TypeError, KeyError, zlib.error) as error:
        raise InputError(f"schedule: expected a seed ({_SEED_PREFIX}…), or a file that has one: {error}") from error
    return tuple(decisions)


def read_seed(text: str) -> tuple[Decision, ...] | None:
    """Return the schedule of a seed or a file; None for other text, which only varies the random choices."""
    is_schedule = text.startswith(_SEED_PREFIX) or os.path.isfile(text) or text.endswith(".json")
    return decode_schedule(text) if is_schedule else None


def schedule_document(test: str, failure: Found) -> str:
    """Return a schedule as a file that people and `decode_schedule` can read."""
    rows = [[*place, label] for place, label in failure.decisions]
    return json.dumps({"test": test, "error": _short(failure.error), "decisions": rows}, indent=1) + "\n"


# --------------------------------------------------------------------------------------------------------- strategies


def as_decided(decisions: Sequence[Decision]) -> Strategy:
    """Make the usual choices except for these decisions; ignore a decision whose label is not on offer."""
    labels_by_place: Mapping[Place, str] = dict(decisions)

    def choose(place: Place, labels: Sequence[str]) -> int:
        label = labels_by_place.get(place)
        return 0 if label is None or label not in labels else labels.index(label)

    pausing = [place.usual for place, _ in decisions if place.kind == PAUSE]
    return Strategy(choose, lambda label: any(usual_label.startswith(f"{label}: ") for usual_label in pausing))


def at_random(seed: str, probability: float) -> Strategy:
    """Deviate from the usual choice with ``probability``, in half of the kinds; faults more rarely, and few.

    The random choices depend only on the seed and the place, so they stay when the test is edited elsewhere.
    """
    faults = 0

    @cache
    def is_met(kind: str) -> bool:
        return _drawn(seed, kind) % 2 == 0

    def choose(place: Place, labels: Sequence[str]) -> int:
        nonlocal faults
        if not is_met(place.kind):
            return 0
        drawn = _drawn(seed, place)
        likely = probability if place.kind not in ("fault", "answer") else min(probability, 0.2)
        if drawn % 10_000 >= 10_000 * likely:
            return 0
        index = 1 + drawn // 10_000 % (len(labels) - 1)
        if labels[index].startswith(FAULT):
            if faults >= MOST_FAULTS:
                return 0
            faults += 1
        return index

    return Strategy(choose, lambda label: is_met(PAUSE))


def _drawn(seed: str, what: object) -> int:
    return int.from_bytes(blake2b(f"{seed}|{what}".encode(), digest_size=8).digest(), "big")


def singles(reached: Sequence[tuple[Place, tuple[str, ...]]], seed: str) -> Iterator[Decision]:
    """Yield all schedules that differ in one decision from the one that met ``reached``; kinds alternate."""
    lanes = [
        iter(sorted(lane, key=lambda decision: _drawn(seed, decision))) for _, lane in sorted(_by_kind(reached).items())
    ]
    while lanes:
        for lane in list(lanes):
            decision = next(lane, None)
            if decision is None:
                lanes.remove(lane)
            else:
                yield decision


def _by_kind(reached: Sequence[tuple[Place, tuple[str, ...]]]) -> dict[str, list[Decision]]:
    """Return all other choices by kind; for faults also by what fails and whether listeners waited."""
    kinds: dict[str, list[Decision]] = {}
    for place, labels in reached:
        for label in labels[1:]:
            kind = place.kind
            if label.startswith(FAULT):
                kind += f" {label.rpartition(' ')[2]} {place.usual in RESTING}"
            elif label == TIME:
                kind += " time"
            kinds.setdefault(kind, []).append(Decision(place, label))
    return kinds


def pairs(failing: Sequence[Trace], seed: str) -> Iterator[tuple[Decision, Decision]]:
    """Yield schedules of a fault and one more decision, most often a pause; kinds of faults alternate."""
    kinds: dict[str, list[tuple[Decision, dict[str, list[Decision]]]]] = {}
    for trace in failing:
        fault = trace.decisions[0]
        kind = f"{fault.chosen.rpartition(' ')[2]} {fault.place.usual in RESTING}"
        kinds.setdefault(kind, []).append((fault, _by_kind(trace.reached)))
    names = sorted(kinds)
    for number in count() if names else ():
        lane = kinds[names[number % len(names)]]
        drawn = _drawn(seed, number)
        fault, others = lane[drawn % len(lane)]
        kind = _SECOND[drawn // 1_000 % len(_SECOND)]
        if kind in others:
            yield fault, others[kind][drawn // 1_000_000 % len(others[kind])]


# -------------------------------------------------------------------------------------------------------------- search


def search(
    run: Run,
    runs: int,
    seed: str = "0",
    replay: Sequence[Decision] | None = None,
    *,
    lines: bool = False,
    most_stores: int = MOST_STORES,
) -> Exploration:
    """Run a test under up to ``runs`` schedules, or under the one to replay; see `explore`.

    That of a failure runs up to ``most_stores`` times with fewer messages of the store that the kit begins with.
    """
    check_runs(runs)
    with _collected_in_between():
        return _Search(run, runs, seed, lines, most_stores).search(replay)


def check_runs(runs: object) -> None:
    """Refuse a number of schedules with which nothing is explored."""
    if type(runs) is not int or runs < 1:
        raise ConfigError(f"runs: expected a whole number of at least 1, found {runs!r:.80}")


@contextmanager
def _collected_in_between() -> Iterator[None]:
    """Collect garbage between runs: a run's garbage is young, and full collections cost a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Search:
    """One search: its runs, their outcomes, and the schedules to try next."""

    def __init__(self, run: Run, runs: int, seed: str, lines: bool, most_stores: int) -> None:
        self.result = Exploration()
        self._run = run
        self._runs = runs
        self._seed = seed
        self._lines = lines
        self._most_stores = most_stores
        self._schedules: dict[tuple[Decision, ...], Sequence[tuple[Place, tuple[str, ...]]] | None] = {}
        """The schedules that were run; of those with one decision at most, also the places with a choice."""
        self._states: set[int] = set()
        self._states_by_run = [0]
        self._failing: list[Trace] = []  # runs with one fault, to which a second decision is added

    def search(self, replay: Sequence[Decision] | None) -> Exploration:
        """Run the schedule to replay, or try schedules until one fails or the runs are used up."""
        usual_attempt = self._counted(as_decided(replay or ()))
        if usual_attempt.error is not None:
            self.result.found = self._failure(usual_attempt, is_replayed=replay is not None)
        elif replay is None:
            for strategy in islice(self._strategies(usual_attempt), max(0, self._runs - 1)):
                attempt = self._counted(strategy)
                if attempt.error is not None:
                    shortest = self._shorten(attempt, usual_attempt)
                    self.result.found = self._failure(shortest, len(attempt.trace.decisions))
                    break
        return self.result

    def _attempt(self, strategy: Strategy, on_disk: bool = False, start: StoreStart | None = None) -> Attempt:
        gc.collect(0)  # between runs, so that each run reuses the memory of the one before
        result, explorer = self.result, Explorer(strategy, ManualClock(0))  # the kit moves it to the beginning
        explorer.is_first, explorer.switches_at_lines, explorer.on_disk = not result.runs, self._lines, on_disk
        explorer.start = start
        error = self._run(explorer)
        trace = explorer.trace
        result.reached.update(place.kind for place, _ in trace.reached)
        result.chosen.update(decision.place.kind for decision in trace.decisions)
        kit: Kit | None = getattr(explorer, "kit", None)  # None where the test failed before it had a kit
        return Attempt(trace, error, _states_of(kit), None if kit is None else kit.start)

    def _counted(self, strategy: Strategy) -> Attempt:
        attempt = self._attempt(strategy)
        decisions = attempt.trace.decisions
        is_short = len(decisions) < 2 and attempt.trace.replayable
        self._schedules.setdefault(tuple(decisions), attempt.trace.reached if is_short else None)
        self._states |= attempt.states
        self._states_by_run.append(len(self._states))
        self.result.runs += 1
        self.result.states = len(self._states)
        self.result.late_states = len(self._states) - self._states_by_run[-1 - max(1, self.result.runs // 10)]
        self.result.schedules = len(self._schedules)
        if len(decisions) == 1 and decisions[0].chosen.startswith(FAULT):
            self._failing.append(attempt.trace)
        return attempt

    def _strategies(self, usual_attempt: Attempt) -> Iterator[Strategy]:
        for decision in islice(singles(usual_attempt.trace.reached, self._seed), self._runs // 2):
            yield as_decided([decision])
        two_each = pairs(self._failing, self._seed)
        for number in count():
            if (two := next(two_each, None)) is not None:
                yield as_decided(two)
            likely = _PROBABILITIES[number % len(_PROBABILITIES) :]
            drawn = [partial(at_random, f"{self._seed}/{number}", probability) for probability in likely]
            yield next((draw for draw in drawn if not self._was_run(draw())), drawn[-1])()

    def _was_run(self, strategy: Strategy) -> bool:
        """Return whether a strategy makes a schedule that was run with one decision at most."""
        decisions: tuple[Decision, ...] = ()
        begin = 0
        while (reached := self._schedules.get(decisions)) is not None:
            for number in range(begin, len(reached)):
                place, labels = reached[number]
                if index := strategy.choose(place, labels):
                    decisions, begin = (*decisions, Decision(place, labels[index])), number + 1
                    break
            else:
                return True
        return False

    def _shorten(self, failed: Attempt, usual_attempt: Attempt) -> Attempt:
        """Return the same failure with the fewest decisions found."""
        result, shortest = self.result, failed
        tried: set[tuple[Decision, ...]] = set()

        def still_fails(decisions: Sequence[Decision]) -> bool:
            nonlocal shortest
            key = tuple(decisions)
            if key in tried or result.shrinking_runs >= MOST_SHRINKING_RUNS:
                return False
            tried.add(key)
            result.shrinking_runs += 1
            candidate = self._attempt(as_decided(decisions))
            if candidate.signature == failed.signature and len(candidate.trace.decisions) < len(
                shortest.trace.decisions
            ):
                shortest = candidate
                return True
            return False

        size = max(1, len(shortest.trace.decisions) // 2)
        while len(shortest.trace.decisions) > 1:
            decisions = shortest.trace.decisions
            parts = [decisions[:at] + decisions[at + size :] for at in range(0, len(decisions), size)]
            if not any(still_fails(part) for part in parts):
                if size == 1:
                    break
                size = max(1, size // 2)
            else:
                size = max(1, min(size, len(shortest.trace.decisions) // 2))
        labels = {decision.chosen for decision in failed.trace.decisions}
        met = dict.fromkeys((*usual_attempt.trace.reached, *shortest.trace.reached))
        others = [Decision(place, label) for place, offered in met for label in offered[1:] if label in labels]
        # Places are counted, so one decision can just shift another: the same labels elsewhere may fail with fewer.
        if len(shortest.trace.decisions) > 1:
            any(still_fails([decision]) for decision in others)
        for first in [decision for decision in shortest.trace.decisions if len(shortest.trace.decisions) > 2]:
            if any(still_fails([first, decision]) for decision in others if decision.place != first.place):
                break
        return shortest

    def _failure(self, failed: Attempt, first_decisions: int = 0, *, is_replayed: bool = False) -> Found:
        trace, error = failed.trace, failed.error
        assert error is not None
        decisions = tuple(trace.decisions)
        again = None if is_replayed else self._attempt(as_decided(decisions), on_disk=True)
        fewest = None if is_replayed or self._most_stores <= 0 else self._fewest(failed)
        return Found(
            decisions=decisions,
            error=error,
            history=trace.history,
            run=self.result.runs,
            first_decisions=first_decisions,
            trace=trace,
            on_disk=again,
            fewest=fewest,
        )

    def _fewest(self, failed: Attempt) -> Fewest | None:
        """Look for the fewest messages of the store with which the same schedule fails in the same way."""
        start = failed.start
        if start is None or not start.messages:
            return None
        smallest = failed.trace.decisions

        def fails(part: StoreStart) -> bool:
            nonlocal smallest
            moved = moved_label(start, part)  # labels have queue offsets, which count only the messages that are left
            decisions = [
                Decision(place._replace(usual=moved(place.usual)), moved(label))
                for place, label in failed.trace.decisions
            ]
            attempt = self._attempt(as_decided(decisions), start=part)
            is_same = attempt.signature == failed.signature
            if is_same:
                smallest = attempt.trace.decisions
            return is_same

        shrunk = shrink(start, fails, self._most_stores)
        return Fewest(start, shrunk, tuple(smallest))


def _states_of(kit: Kit | None) -> Set[int]:
    """Return a number for each beginning of the history of a run, without its times and random ids."""
    states: set[int] = set()
    state = 0
    numbers: dict[str, int] = {}
    for event in () if kit is None else kit.history().events:
        name = event.get("id")
        if name is not None and name not in numbers:
            numbers[name] = len(numbers)
        facts = [value for field, value in event.items() if field != "id" and not field.endswith("_ms")]
        state = hash((state, None if name is None else numbers[name], *facts))
        states.add(state)
    return states


@contextmanager
def explored_kit(explorer: Explorer, **settings: Unpack[KitKeywords]) -> Iterator[Kit]:
    """Make the kit for one run, in memory or, ``on_disk``, in a folder, and abandon it at the end.

    With ``path`` it is in a new folder there, because a run would find the messages of those before in a shared one.
    Only the first run checks its store: the same broker writes all of them.
    """
    path, folder = settings.get("path"), None
    if path is not None:
        os.makedirs(path, exist_ok=True)
        settings["path"] = tempfile.mkdtemp(prefix="run-", dir=os.fspath(path))
    elif explorer.on_disk:
        folder = TemporaryFolder()
        settings["path"] = folder.name
    if explorer.start is not None:
        settings["store"] = explorer.start
    try:
        kit = Kit(runner=explorer, check=explorer.is_first, **settings)
        try:
            yield kit
        finally:
            kit.abandon()
    finally:
        if folder is not None:
            folder.delete()


def explore(
    function: Callable[[Kit], object],
    runs: int = 200,
    *,
    seed: str = "0",
    lines: bool = False,
    **settings: Unpack[KitKeywords],
) -> Exploration:
    """Run ``function(rmq)`` under up to ``runs`` schedules, with a fresh `Kit` of ``settings`` each time.

    Raises the error of the shortest failing schedule, with the report as a note. ``seed`` from such a report, or the
    path of a file that contains it, runs only that schedule; any other string varies the random choices. With ``lines``
    a listener can also pause at each line of its own file, which is slower and hides those lines from coverage. With
    ``path`` each run has a new folder in it.

    A failing test that begins with a ``store`` runs again with fewer of its messages, and the fewest are saved in a
    temporary folder, which another note names. librmq's log has the lines of the shortest failing schedule only.
    """
    start = starting_store(
        settings.get("store"), settings.pop("topics", None), settings.pop("groups", None), settings.get("store_config")
    )
    settings["store"] = start  # read once
    if start is None:
        settings.setdefault("now_ms", begin_of(None, None))  # all schedules begin at one time

    logged: dict[int, list[HeldLine]] = {}

    def run(explorer: Explorer) -> BaseException | None:
        with held_back() as lines_of_log, explored_kit(explorer, **settings) as kit:
            try:
                result = function(kit)
                if inspect.iscoroutine(result):
                    result.close()
                    raise TypeError(
                        "the test returns a coroutine: pass `lambda rmq: asyncio.run(test(rmq))` to explore"
                    )
                kit.close()
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:
                explorer.trace.history = kit._account()
                logged[id(explorer.trace)] = lines_of_log
                return error
            return None

    result = search(run, runs, seed, read_seed(seed), lines=lines)
    found = result.found
    if found is not None:
        for line in logged[id(found.trace)]:
            line.log()
        if found.fewest is not None:
            found.error.add_note(found.fewest.describe("", partial(_saved, found.fewest)))
        found.error.add_note(result.report())
        raise found.error
    return result


def _saved(fewest: Fewest, start: StoreStart) -> list[str]:
    """Save the fewest messages in a temporary folder, and return how a test begins with them."""
    folder = Path(tempfile.mkdtemp(prefix="librmq-failing-store-"))
    saved = start.save_to(folder)
    seed = f", seed={encode_schedule(fewest.decisions)!r}" if fewest.decisions else ""
    return [
        f"{saved}, with which the test begins by:",
        f"explore(test, store={str(folder)!r}, topics={list(start.topics)!r}, groups={list(start.groups)!r}{seed})",
    ]


def _place(traceback: TracebackType | None) -> tuple[str, int]:
    """Return the innermost line of the user's code."""
    place = ("", 0)
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(LIBRARY):
            place = file, traceback.tb_lineno
        traceback = traceback.tb_next
    return place


def _compared(error: BaseException, on_disk: Attempt) -> str:
    """Return a sentence that compares the same schedule with the store in a folder."""
    if on_disk.error is None:
        return "with its store on disk the same schedule does not fail: the disk or chance makes the difference"
    if on_disk.signature == signature_of(error):
        return "it fails in the same way with its store on disk"
    return f"with its store on disk the same schedule fails in another way: {_short(on_disk.error)}"


def _short(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
