"""Run programs in a separate interpreter that imports the librmq under test, or in forked children."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import AnyStr

import pytest

import librmq
from tests.reference import CHECKOUT

POSIX = pytest.mark.skipif("sys.platform == 'win32'", reason="needs a POSIX shell")


def environment(*folders: str, **variables: str) -> dict[str, str]:
    """Return this process's environment, in which librmq under test, ``tests`` and ``folders`` are imported."""
    roots = [str(Path(librmq.__file__ or "").parent.parent), *sys.path, str(CHECKOUT), *folders]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, roots))), **variables}


class Process(subprocess.Popen[AnyStr]):
    """A process that is killed where its ``with`` block fails, which would wait for its end otherwise."""

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


def in_child(check: Callable[[], object]) -> None:
    """Run ``check`` in a forked child, where it must not raise."""
    child = os.fork()
    if not child:
        status = 1
        try:
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
