"""Call commands in this process, on the store that comes with the project."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from librmq.cli import main
from tests import cases
from tests.message.samples import EQUAL_VALUES
from tests.reference import CHECKOUT, COMPACT, unpack_compact


def tool(name: str) -> Any:
    """Return a module of the folder ``tools``."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(CHECKOUT / "tools")
        return importlib.import_module(name)


ROW_TYPES: dict[str, tuple[str, ...]] = tool("row_types").ROW_TYPES


class Answer(NamedTuple):
    """The result of a command: its exit status, rows and messages."""

    status: int
    out: str
    said: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of output that consists of JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Shell:
    """Runs commands in a current folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *words: object, given: str | bytes = b"") -> Answer:
        """Run a command with ``given`` on standard input."""
        data = given.encode() if isinstance(given, str) else given
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        self._capsys.readouterr()
        status = main([str(word) for word in words], cases.commands_for(words))
        shown = self._capsys.readouterr()
        assert not EQUAL_VALUES.search(shown.out + shown.err), shown
        return Answer(status, shown.out, shown.err)


@cache
def _validator(command: str) -> Any:
    jsonschema = importlib.import_module("jsonschema")  # not every run has it
    forms = (ROW_TYPES | cases.ROW_TYPES)[command]
    return jsonschema.Draft202012Validator(tool("generated").row_schema(forms))


def errors_of(command: str, *rows: object) -> list[str]:
    """Return what is wrong with rows that a command has printed, by the JSON Schema of its page."""
    return [f"{error.message:.300}: {row}" for row in rows for error in _validator(command).iter_errors(row)]


def unpack_store(into: Path) -> Path:
    """Unpack the store that comes with the project into ``into / "store"``."""
    unpack_compact(COMPACT, into / "data")
    (into / "data" / "store-basic" / "store").rename(into / "store")
    return into / "store"


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder by relative path, without the lock file."""
    return {
        os.path.relpath(path, folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }
