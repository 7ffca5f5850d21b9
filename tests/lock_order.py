"""The order of locks: every lock of librmq that a test takes is recorded, by thread, and compared with the one list.

`docs/design.md` lists the locks by level, outer ones first. A thread that holds a lock may take those of a further
level. Anything else is a fault, whether two threads meet or not, and fails the test. So is code of the application that
librmq calls within a lock: handlers of log lines, notifications, subclasses of `Metrics`, strategies, listeners.
"""

# ruff: noqa: SLF001 (frames, and the methods of a reentrant lock that conditions call)

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import librmq
from librmq.runtime import locks

ROOT: Final = Path(librmq.__file__ or "").parent
LIST: Final = Path(__file__).resolve().parent.parent / "docs" / "design.md"
_NATIVE: Final = {"Lock": locks.Lock, "RLock": locks.RLock}
FAULTS: Final = "RMQ_LOCK_FAULTS"
"""Variable of the environment that names the file of faults, which processes that the tests fork write too."""
_MADE: Final = re.compile(r"^ *[\w.,: ]+ = .*\bR?Lock\(\)")
_DEEP: Final = 24
"""Frames of a stack that a fault shows."""


# ---- the list, and the locks of the code


Place = tuple[str, int, int]
"""File, line and column of a call that makes a lock."""


def names_in_code() -> dict[Place, str]:
    """Return the name of each lock, ``Class.attribute`` or ``module.variable``, by the place where it is made."""
    return {place: name for path in ROOT.rglob("*.py") for place, name in _names_in(path)}


def _names_in(path: Path) -> Iterator[tuple[Place, str]]:
    scope, depth, text = path.stem, 0, path.read_text("utf-8")
    for number, line in enumerate(text.splitlines() if "Lock()" in text else (), 1):
        begin = len(line) - len(line.lstrip())
        if line.strip() and begin < depth:
            scope, depth = path.stem, 0
        if line.startswith("class "):
            scope, depth = re.findall(r"\w+", line)[1], 4
        if "Lock()" not in line or not _MADE.search(line):
            continue
        statement = ast.parse(line.strip()).body[0]
        assert isinstance(statement, ast.Assign | ast.AnnAssign), f"{path}:{number}: expected a lock in an assignment"
        (target, *_), value = (
            statement.targets if isinstance(statement, ast.Assign) else [statement.target],
            statement.value,
        )
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for place, call in pairs:
            name = ast.unparse(place).removeprefix("self.")
            if isinstance(call, ast.Call) and "." not in name:  # else it is made again for another object, after a fork
                yield (str(path), number, begin + call.col_offset), f"{scope}.{name}"


@functools.cache
def levels() -> dict[str, list[int]]:
    """Return the levels of each lock of the list by name; a gate, at which threads wait and which none holds, has 0."""
    _, _, section = LIST.read_text("utf-8").partition("\n## Locks\n")
    section, _, _ = section.partition("\n## ")
    found: dict[str, list[int]] = {}
    for level, row in re.findall(r"^\| (\d+) \|(.*)\|", section, re.MULTILINE):
        for name in re.findall(r"`(\w+\.\w+)`", row):
            found.setdefault(name, []).append(int(level))
    return found


def may_take(name: str, *, within: str) -> bool:
    """Return whether a thread may take a lock while it holds another one."""
    listed = levels()
    return within in listed and name in listed and listed[within][0] < listed[name][-1]


# ---- the locks that a thread holds


class _Held(threading.local):
    """The locks that a thread holds, outer ones first."""

    def __init__(self) -> None:
        self.locks: list[_Held.Lock] = []

    class Lock:
        """What a thread can hold: its name in the list, and whether it is held at all."""

        name: str

        def is_held(self) -> bool:
            return True


_held = _Held()
_known: set[tuple[str, str]] = set()
"""Pairs of names that are in the order of the list, or were reported."""


def _wants(lock: _Held.Lock) -> None:
    """Note a fault if this thread holds a lock of the same or a further level, or one that is in no list."""
    for other in _held.locks:
        pair = other.name, lock.name
        if pair not in _known and other.is_held():
            _known.add(pair)
            if not may_take(lock.name, within=other.name):
                _note_fault(f"{lock.name} is taken within {other.name}")


def _note_fault(what: str) -> None:
    stack = [call for call in traceback.extract_stack(sys._getframe(2)) if "site-packages" not in call.filename]
    with open(os.environ[FAULTS], "a") as file:
        file.write(f"{what}, in {threading.current_thread().name}\n{''.join(traceback.format_list(stack[-_DEEP:]))}\n")


def begin() -> None:
    """Begin a test: the main thread holds nothing, whatever a signal has left of the last one."""
    _held.locks.clear()


def faults() -> str:
    """Return the faults since the last call."""
    path = Path(os.environ[FAULTS])
    if not path.exists() or not path.stat().st_size:
        return ""
    text = path.read_text()
    path.write_text("")
    _known.clear()  # so that the next test with the same fault fails too
    return text


@contextmanager
def elsewhere() -> Iterator[None]:
    """Run a block that stands for another thread or process, which holds nothing."""
    before, _held.locks = _held.locks, []
    try:
        yield
    finally:
        _held.locks = before


def hold(lock: _Held.Lock) -> None:
    """Let this thread hold a lock until the end of the block `elsewhere`, as code of librmq does."""
    _held.locks.append(lock)


_ours: dict[CodeType, bool] = {}


def _is_ours(frame: FrameType) -> bool:
    """Return whether librmq runs a frame: a test that takes a lock itself stands for another thread."""
    code = frame.f_code
    is_ours = _ours.get(code)
    if is_ours is None:
        is_ours = _ours[code] = code.co_filename.startswith(str(ROOT))
    return is_ours


class Recorded(_Held.Lock):
    """A lock of librmq that notes who holds it. Ctrl-C leaves it as it does the lock in it, but for the release."""

    def __init__(self, lock: Any, name: str) -> None:
        self.name = name
        self._lock = lock
        self._taking = iter(lock.acquire, None)
        self.locked: Callable[[], bool] = getattr(lock, "locked", lambda: False)
        self._is_owned = getattr(lock, "_is_owned", None)

    def __enter__(self) -> bool:
        held, is_noted = _held.locks, _is_ours(sys._getframe(1))
        if held and is_noted and self not in held:
            _wants(self)
        for _ in self._taking:  # no signal's handler runs between this and the next lines
            if is_noted:
                held.append(self)
            return True
        raise AssertionError("acquire() returned None")

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        held, is_noted = _held.locks, _is_ours(sys._getframe(1))
        if blocking and held and is_noted and self not in held:
            _wants(self)
        has_it: bool = self._lock.acquire(blocking, timeout)
        if has_it and is_noted:
            held.append(self)
        return has_it

    def release(self) -> None:
        held = _held.locks
        if held and held[-1] is self:
            held.pop()
        elif self in held:
            del held[len(held) - 1 - held[::-1].index(self)]
        self._lock.release()

    def _release_save(self) -> Any:  # called by conditions, as the next one
        _held.locks = [lock for lock in _held.locks if lock is not self]
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        _held.locks.append(self)


class _PageFile(_Held.Lock):
    """The lock of the file of an `AppendPage`."""

    name = "AppendPage.take"

    def __init__(self, page: Any) -> None:
        self._page = page

    def is_held(self) -> bool:
        return bool(self._page.holds)


# ---- in place of those of librmq


def _maker(native: Callable[[], Any], names: Mapping[Place, str]) -> Callable[[], Any]:
    def make() -> Any:
        frame = sys._getframe(1)
        if not _is_ours(frame):
            return native()
        code = frame.f_code
        line, _, column, _ = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))
        name = names.get((code.co_filename, line or 0, column or 0))
        return native() if name is None or levels().get(name) == [0] else Recorded(native(), name)

    return make


def install() -> None:
    """Let librmq make locks that are recorded from now on."""
    names = names_in_code()
    for kind, native in _NATIVE.items():
        make = _maker(native, names)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("librmq") and getattr(module, kind, None) is native:
                setattr(module, kind, make)
    _record_page_files()
    _separate_processes()
    _watch_applications()


def _record_page_files() -> None:
    from librmq.store.engine._append_page import AppendPage

    take, release = AppendPage.take, AppendPage.release

    @functools.wraps(take)
    def take_it(self: AppendPage, *arguments: Any, **fields: Any) -> None:
        lock = self.__dict__.setdefault("recorded", _PageFile(self))
        is_noted = _is_ours(sys._getframe(1))
        if is_noted:
            _wants(lock)
        take(self, *arguments, **fields)
        if is_noted:
            _held.locks.append(lock)

    @functools.wraps(release)
    def release_it(self: AppendPage) -> None:
        _held.locks[:] = [lock for lock in _held.locks if lock is not self.__dict__.get("recorded")]
        release(self)

    AppendPage.take, AppendPage.release = take_it, release_it  # type: ignore[method-assign]


def _watch_applications() -> None:
    """Let code of the application check, where librmq calls it, that its thread holds no lock of librmq."""
    from librmq.client import allocation
    from librmq.metrics import Metrics
    from librmq.runtime import event_log
    from librmq.runtime.runner import Runner

    def call_checked(call: Callable[[], object]) -> None:
        def checked() -> None:
            _check_application("what call_outside has got")
            call()

        call_outside(checked)

    def own_share_checked(client_id: str, queues: Any, clients: Any, *strategy: Any) -> Any:
        if strategy and getattr(allocation, getattr(strategy[0], "__name__", ""), None) is not strategy[0]:
            _check_application("a strategy")
        return own_share(client_id, queues, clients, *strategy)

    def write_checked(self: Any, *fields: Any) -> None:  # also lines that no handler gets at this level
        if locks._thread.calls is None:
            _check_application("a log line", queues=True)
        write(self, *fields)

    def call_work_checked(self: Runner, work: Any) -> object:
        _check_application("work of a runner")
        return call_work(self, work)

    call_outside, own_share = locks.call_outside, allocation.own_share
    write, call_work = event_log.EventLog._write, Runner._call
    _replace(call_outside, call_checked)
    _replace(own_share, own_share_checked)
    Runner._call = call_work_checked  # type: ignore[method-assign]
    event_log.EventLog._write = write_checked  # type: ignore[method-assign, assignment]
    event_log._DEEP += 1  # type: ignore[misc]
    Metrics.__init_subclass__ = classmethod(_watch_subclass)  # type: ignore[assignment]


def _replace(function: Callable[..., object], checked: Callable[..., object]) -> None:
    for module in list(sys.modules.values()):
        name = function.__name__
        if getattr(module, "__name__", "").startswith("librmq") and getattr(module, name, None) is function:
            setattr(module, name, checked)


def _watch_subclass(cls: type[Any]) -> None:
    for name, method in list(vars(cls).items()):
        if callable(method) and not name.startswith("_"):
            setattr(cls, name, _checking(method))


def _checking(method: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(method)
    def called(*arguments: object, **fields: object) -> object:
        _check_application(f"{method.__qualname__} of a subclass")
        return method(*arguments, **fields)

    return called


_OF_A_CALL: Final = "PullConsumer._polling"
"""Held by a call of the application as those of the first level are, within one of which it can be taken."""


def _check_application(what: str, *, queues: bool = False) -> None:
    """Note a fault if this thread holds a lock of librmq, but for those of calls, and that of a runner by hand.

    ``queues``: what comes under the lock of a runner waits for its release.
    """

    held = [lock.name for lock in _held.locks if lock.is_held() and lock.name != _OF_A_CALL]
    names = [name for name in held if levels().get(name, [9])[-1] > 1]
    if not names:
        return
    if "Runner.lock" in names and (
        queues or not any((one := at()) is not None and one._is_held() for at in locks._outsides)
    ):
        return
    pair = what, names[-1]
    if pair not in _known:
        _known.add(pair)
        _note_fault(f"{what} is called within {', '.join(names)}")


def _separate_processes() -> None:
    """Let what one thread of a kit does in the name of several processes count as done by several threads."""
    from librmq.testing._kit_runner import KitRunner
    from librmq.testing._network import Network
    from librmq.wire.frame_links import _TurnTransport

    # The ends of a connection without a socket, and a replica that finds its master again.
    for owner, name in ((_TurnTransport, "_send"), (_TurnTransport, "_arrive"), (Network, "_reconnect")):
        setattr(owner, name, _elsewhere(getattr(owner, name)))
    after = KitRunner.after

    @functools.wraps(after)
    def call_after(self: KitRunner, seconds: Any, label: str, call: Callable[[], object]) -> None:
        after(self, seconds, label, _elsewhere(call))  # what an operator does

    KitRunner.after = call_after  # type: ignore[method-assign]


def _elsewhere(call: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(call)
    def called(*arguments: object, **fields: object) -> object:
        with elsewhere():
            return call(*arguments, **fields)

    return called
