"""Run programs in a separate interpreter that imports the librmq under test, or in forked children."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import SystemRandom
from types import ModuleType, TracebackType
from typing import IO, Any, AnyStr, Self

import pytest

import librmq
from tests.conftest import in_ci
from tests.reference import CHECKOUT

POSIX = pytest.mark.skipif("sys.platform == 'win32'", reason="needs a POSIX shell")


def environment(*folders: str, **variables: str) -> dict[str, str]:
    """Return this process's environment, in which librmq under test, ``tests`` and ``folders`` are imported."""
    roots = [str(Path(librmq.__file__ or "").parent.parent), *sys.path, str(CHECKOUT), *folders]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, roots))), **variables}


class Process(subprocess.Popen[AnyStr]):
    """A process that is killed where its ``with`` block fails, which would wait for its end otherwise.

    Only pipes that a test has asked for are there.
    """

    stdin: IO[AnyStr]
    stdout: IO[AnyStr]
    stderr: IO[AnyStr]

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, value, traceback)


def start_program(program: str, *words: object, **variables: str) -> Process[str]:
    """Start a program with pipes to its standard input and from its standard output."""
    return Process(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(**variables),
    )


@contextmanager
def start_serve(
    store: Path, *options: str, command: Sequence[str] = (sys.executable, "-m", "librmq", "serve")
) -> Iterator[tuple[Process[str], dict[str, Any]]]:
    """Start ``librmq serve``, and yield the process with the row of its ready line; it is killed if it goes on."""
    pipe = subprocess.PIPE
    words = [*command, str(store), *options]
    with Process(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment()) as process:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
        if process.poll() is None:
            process.kill()


def run_program(
    program: str, *words: object, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; it may take at most ``timeout`` seconds."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=timeout,
        env=environment(**variables),
    )


def free_port() -> int:
    """Return a port of 127.0.0.1 for a program that can't choose one.

    It is none that the system gives to sockets by itself, one of which could take it before the program does.
    """
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


_PRELOADED = [
    *("psycopg", "pymysql", "sqlalchemy.dialects.mysql", "sqlalchemy.dialects.postgresql"),  # else at a connection
    *(__name__, "tests.crash.test_replica_signals", "tests.idempotence.worker", "tests.wire.share_worker"),
]


class Fork:
    """A call in a process forked by a server that has imported librmq; the ``with`` block kills it.

    It starts in milliseconds, with pipes as standard input and output, and has no file, lock or thread of this process.
    """

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        (their_input, own_input), (own_output, their_output) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(own_input, "w"), os.fdopen(own_output)
        with (
            Connection(their_input) as stdin,
            Connection(their_output) as stdout,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])  # the first call starts the server
            self.process = context.Process(target=_call, args=(stdin, stdout, call, arguments), daemon=True)
            self.process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.stdin.close()
        self.stdout.close()


def _call(stdin: Connection, stdout: Connection, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    sys.stdin = os.fdopen(0)
    call(*arguments)


def in_child(check: Callable[[], object]) -> None:
    """Run ``check`` in a forked child, where it must not raise; one that hangs prints its threads and ends."""
    child = os.fork()
    if not child:
        status = 1
        try:
            faulthandler.register(signal.SIGALRM, chain=True)
            signal.alarm(60)
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def example(name: str) -> ModuleType:
    """Load a program from the folder ``examples`` as a module."""
    spec = importlib.util.spec_from_file_location(name, CHECKOUT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpack_suite(package: str, folder: Path, files: str = "/t/|/pyproject.toml$") -> None:
    """Unpack the tests of a package, and its settings of them; skip the test where nothing can be downloaded."""
    if not (in_ci() or os.environ.get("LIBRMQ_DOWNLOADS")):
        pytest.skip(f"downloads the source archive of {package}: only in CI, or with LIBRMQ_DOWNLOADS=1")
    words = ["download", "-q", "--no-deps", "--no-binary", package]
    words += ["-d", str(folder), f"{package}=={version(package)}"]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the source archive of {package} can't be had: {done.stderr[-200:]}")
    with tarfile.open(next(folder.glob(f"{package}-*.tar.gz"))) as archive:
        tests = [member for member in archive.getmembers() if re.search(files, member.name)]
        for member in tests:
            member.name = member.name.partition("/")[2]
        archive.extractall(folder, tests, filter="data")
