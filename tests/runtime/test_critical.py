"""Real signals that arrive during a critical block are handled after the block."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from librmq.runtime.locks import critical
from tests.interrupting import at_each_call

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs signals of POSIX")


class Taken(Exception):
    """Raised by the signal handlers of these tests."""


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """List the handled signals in order; the handlers of SIGUSR1 and SIGUSR2 raise, that of SIGALRM does not."""
    handled: list[int] = []

    def handle(number: int, _: object) -> None:
        handled.append(number)
        if number != signal.SIGALRM:
            raise Taken(number)

    numbers = signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM
    before = [signal.signal(number, handle) for number in numbers]
    yield handled
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_signal_is_handled_after_the_block(handlers: list[int]) -> None:
    done = False

    def stretch() -> None:
        nonlocal done
        with critical, critical:
            signal.raise_signal(signal.SIGUSR1)
            done = True

    with pytest.raises(Taken):
        stretch()
    assert done
    assert handlers == [signal.SIGUSR1]


def test_every_signal_is_handled_once(handlers: list[int]) -> None:
    def stretch() -> None:
        with critical:
            for number in (signal.SIGUSR1, signal.SIGALRM, signal.SIGUSR2, signal.SIGUSR1):
                signal.raise_signal(number)

    with pytest.raises(Taken) as taken:
        stretch()
    assert handlers == [signal.SIGUSR1, signal.SIGALRM, signal.SIGUSR2]
    assert isinstance(taken.value.__context__, Taken)


def test_an_error_of_the_block_is_kept(handlers: list[int]) -> None:
    def stretch() -> None:
        with critical:
            signal.raise_signal(signal.SIGUSR1)
            raise ValueError("of the stretch")

    with pytest.raises(Taken) as taken:
        stretch()
    assert isinstance(taken.value.__context__, ValueError)


def test_handlers_are_the_applications_again(handlers: list[int]) -> None:
    numbers = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
    before = list(map(signal.getsignal, numbers))
    with critical:
        pass
    assert list(map(signal.getsignal, numbers)) == before
    with pytest.raises(Taken):
        signal.raise_signal(signal.SIGUSR2)


def test_a_signal_at_any_call_is_neither_lost_nor_early(handlers: list[int]) -> None:
    """A signal interrupts each call of entering and leaving: the block runs completely or not at all."""
    stretches: list[str] = []

    def run() -> None:
        with critical:
            stretches.append("begun")
            stretches.append("ended")

    before = signal.getsignal(signal.SIGUSR1)
    for was_raised in at_each_call(run, signal.SIGUSR1, Taken):
        assert stretches in ([], ["begun", "ended"])
        assert len(handlers) == was_raised
        stretches.clear()
        handlers.clear()
        assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGUSR2) is before


def test_other_threads_change_no_handler(handlers: list[int]) -> None:
    found: list[object] = []
    before = signal.getsignal(signal.SIGUSR1)

    def run() -> None:
        with critical:
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def was_interrupted(number: int, signals: int) -> bool:
    """Return whether one of many signals ends a system call of this thread that Python does not retry."""
    main, (reading, writing) = threading.get_ident(), os.pipe()
    state, has_ended = Path(f"/proc/self/task/{threading.get_native_id()}/stat"), threading.Event()

    def send() -> None:
        sys.settrace(None)  # under coverage, Python 3.11 loops here for ever while a signal waits for the main thread
        for _ in range(signals):
            while b") S " not in state.read_bytes() and not has_ended.is_set():  # until the thread is waiting
                pass
            if has_ended.is_set():
                break
            signal.pthread_kill(main, number)
        os.write(writing, b"!")

    sender = threading.Thread(target=send)
    sender.start()
    count = ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1)
    has_ended.set()
    sender.join()
    os.close(reading)
    os.close(writing)
    return bool(count != 1)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
@pytest.mark.parametrize("interrupts", [True, False])
def test_system_calls_resume_as_the_application_chose(handlers: list[int], interrupts: bool) -> None:
    """The setting of `signal.siginterrupt` holds during a block and after it."""
    signals = 100_000 if interrupts else 50  # the thread can also wait elsewhere, where a signal ends nothing
    signal.siginterrupt(signal.SIGALRM, interrupts)
    with critical:
        assert was_interrupted(signal.SIGALRM, signals) is interrupts
    assert was_interrupted(signal.SIGALRM, signals) is interrupts
    assert set(handlers) == {signal.SIGALRM}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_another_thread_handles_signals(handlers: list[int]) -> None:
    """Another thread forks while the main thread is in a critical block; the child is not in that block."""
    statuses = []

    def fork() -> None:
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGALRM)
            with critical:
                pass
            os._exit(0 if handlers == [signal.SIGALRM] else 1)
        statuses.append(os.waitpid(child, 0)[1])

    thread = threading.Thread(target=fork)
    with critical:
        thread.start()
        thread.join()
    assert statuses == [0]
