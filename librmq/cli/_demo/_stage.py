"""What demos stand on: a screen of code that is run as it is shown, a folder, programs that are killed."""

from __future__ import annotations

import inspect
import io
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, Self, TextIO, TypeVar

from librmq.errors import InputError, StoreError
from librmq.printable import printable
from librmq.runtime import critical

P = ParamSpec("P")
T = TypeVar("T")

ABOUT: Final = "Made by a demo of librmq, which replaces this folder on each run.\n"
"""The beginning of ``README.txt`` in the folder of a demo."""
_TITLE: Final = "1"
_CODE: Final = "36"
_KILLED: Final = -9
"""The status of a program that ``kill -9`` has ended."""


class Screen:
    """Prints the steps of a demo, in colours on a terminal unless ``NO_COLOR`` is set."""

    def __init__(self, stream: TextIO) -> None:
        """``stream`` gets whole lines."""
        self._stream = stream
        self._is_coloured = stream.isatty() and not os.environ.get("NO_COLOR")

    def say(self, line: str, style: str = "") -> None:
        """Print a line; ``style`` is the number of a terminal's colour."""
        line = printable(line)
        self._stream.write(f"\x1b[{style}m{line}\x1b[0m\n" if style and self._is_coloured else f"{line}\n")
        self._stream.flush()

    def title(self, line: str, *, is_apart: bool = True) -> None:
        """Print the title of a step, behind an empty line if it stands apart."""
        if is_apart:
            self.say("")
        self.say(line, _TITLE)

    def answer(self, line: str) -> None:
        """Print what code has printed or done."""
        self.say(f"  → {line}")

    def code(self, function: Callable[..., object]) -> None:
        """Show the lines of a function; those of a test with its first line, others without it and a ``return``."""
        source = inspect.getsource(function)
        if not function.__name__.startswith("test_"):
            source = textwrap.dedent(source.partition("\n")[2])
        for line in source.splitlines():
            if not line.startswith("return "):
                self.say(f"    {line}", _CODE)

    def run(self, function: Callable[P, T], *arguments: P.args, **settings: P.kwargs) -> T:
        """Show the lines of a function, call it, and show what it prints."""
        self.code(function)
        return self.call(function, *arguments, **settings)

    def call(self, function: Callable[P, T], *arguments: P.args, **settings: P.kwargs) -> T:
        """Call a function, and show what it prints."""
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                return function(*arguments, **settings)
        finally:
            for line in printed.getvalue().splitlines():
                self.answer(line)


_running: Final[set[subprocess.Popen[str]]] = set()


class Program:
    """A module that runs as a program of its own. A context manager, which kills it."""

    def __init__(self, module: str, *words: object) -> None:
        """Start it."""
        with critical:  # a program that runs is noted, also if Ctrl-C comes before its `with` block
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, words)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the program
            )
            _running.add(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._process.communicate()
        _running.discard(self._process)

    def lines(self) -> Iterator[str]:
        """Yield the whole lines that it prints, without their ends, until it has ended."""
        assert self._process.stdout is not None
        return (line[:-1] for line in self._process.stdout if line.endswith("\n"))

    def kill(self) -> None:
        """Kill it by ``kill -9``."""
        self._process.kill()

    def end(self) -> bool:
        """Send it an empty line, wait for its end, and return whether ``kill -9`` has ended it.

        Raises:
            StoreError: Its disk is full.
            InputError: It failed otherwise; the error has the last line that it printed.
        """
        _, errors = self._process.communicate("\n")
        if self._process.returncode not in (0, _KILLED):
            last = (errors.splitlines() or ["it printed no error"])[-1]
            failure = StoreError if "DiskFullError" in last else InputError
            raise failure(f"a program of the demo ended with status {self._process.returncode}: {last}")
        return self._process.returncode == _KILLED


def may_be_replaced(folder: Path) -> bool:
    """Return whether the folder is missing, empty, or left by a demo, so that replacing it loses nothing."""
    if not folder.is_dir():
        return not os.path.lexists(folder)
    about = folder / "README.txt"
    return not any(folder.iterdir()) or (about.is_file() and about.read_bytes().startswith(ABOUT.encode()))


def replace_folder(folder: Path, about: str = "") -> None:
    """Make the folder of a demo, in place of one that a demo has left.

    Raises:
        InputError: It holds something else.
    """
    if not may_be_replaced(folder):
        raise InputError(f"{folder} holds something else: name a folder that is empty or does not exist")
    folder.mkdir(parents=True, exist_ok=True)
    readme = folder / "README.txt"  # first, so that the next run may replace what an interrupted one leaves
    readme.write_text(f"{ABOUT}{about}", encoding="utf-8")
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != readme:
            path.unlink()


@contextmanager
def demo_folder(keep: str | None) -> Iterator[str]:
    """Make the folder of a demo; one without a name is removed at the end.

    Raises:
        InputError: No file can be made there, or a disk is full.
    """
    try:
        if keep is not None:
            replace_folder(Path(keep))
            yield keep
        else:
            with tempfile.TemporaryDirectory(prefix="librmq-demo-") as folder:
                try:
                    yield folder
                finally:  # nothing writes into the folder while it is removed
                    for process in _running:
                        process.kill()
                        process.wait()
    except (OSError, StoreError) as error:
        if isinstance(error, OSError) and error.filename is None and not isinstance(error, FileNotFoundError):
            raise  # of the screen, which has no name: it is full, or its reader has left
        raise InputError(
            f"{error}. The demo needs 20 MB in a folder that it can write: name one by --keep FOLDER, or by TMPDIR"
        ) from error
