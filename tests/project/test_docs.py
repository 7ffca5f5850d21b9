"""Run what the README and the docs show: Python snippets, commands with their output, examples and links."""

from __future__ import annotations

import ast
import contextlib
import gc
import html
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _pytest.mark import ParameterSet

import librmq
from librmq import MessageStore
from librmq.cli import main
from tests.cli.stand import unpack_store
from tests.log_levels import reset_levels
from tests.programs import POSIX
from tests.project import first_attempts
from tests.project.first_attempts import subscribe_failing
from tests.reference import CHECKOUT

DOCS = CHECKOUT / "docs"
DOCUMENTS = [CHECKOUT / "README.md", *sorted(DOCS.rglob("*.md"))]
ENGINES = pytest.mark.skipif(find_spec("duckdb") is None, reason="needs DuckDB and Polars, of the extra test")
DJANGO = pytest.mark.skipif(find_spec("django") is None, reason="needs Django, of the extra test")
MARKS = {
    "spark.md": [pytest.mark.spark],
    "cluster.md": [pytest.mark.slow],
    "columns.md": [ENGINES, pytest.mark.slow],
    "dedup.md": [pytest.mark.slow],
    "howto/scheduled-jobs.md": [pytest.mark.slow],
    "store.md": [pytest.mark.slow],
}


def name_of(document: Path) -> str:
    return document.relative_to(DOCS if document.is_relative_to(DOCS) else CHECKOUT).as_posix()


COMMAND_MARKS = {
    "README.md": [pytest.mark.slow],
    "cli.md": [pytest.mark.slow],
    "processes.md": [pytest.mark.slow],
    "testing.md": [pytest.mark.slow],
    "howto/shell.md": [pytest.mark.slow],
    "tutorials/django.md": [pytest.mark.slow, DJANGO],
    "tutorials/investigate.md": [pytest.mark.slow],
    "tutorials/queue.md": [pytest.mark.slow],
    "tutorials/testing.md": [pytest.mark.slow],
}
EXAMPLES = CHECKOUT / "examples"
RUN_OFTEN = (DOCS / "howto", DOCS / "tutorials")
ANYTHING = re.compile(r"…|\.\.\.")


class Block(NamedTuple):
    """A fenced block of a document. One with a file name is a file, which later commands of the page use."""

    kind: str
    line: int
    text: str
    file: str | None = None


def blocks(document: Path) -> list[Block]:
    text = document.read_text("utf-8")
    return [
        Block(found[1], text.count("\n", 0, found.start()) + 2, found[3], found[2])
        for found in re.finditer(r'^```(\w+)(?: title="(\S+)")?\n(.*?)^```$', text, re.MULTILINE | re.DOTALL)
    ]


def pages(kind: str, marks: dict[str, list[pytest.MarkDecorator]]) -> list[ParameterSet]:
    """Return the documents that have a block of this kind, as test parameters."""
    found = [path for path in DOCUMENTS if any(block.kind == kind for block in blocks(path))]
    return [pytest.param(path, marks=marks.get(name_of(path), [])) for path in found]


def commands(block: Block) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with the output shown for it."""
    parts = re.split(r"^\$ (.*)\n", block.text, flags=re.MULTILINE)
    assert not parts[0], f"line {block.line}: output before the first command"
    return list(zip(parts[1::2], parts[2::2], strict=True))


def shows(shown: str, real: str) -> bool:
    """Return whether output is as shown. An ellipsis matches anything; blank lines and trailing spaces are ignored."""

    def plain(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.split("\n") if line.strip())

    pattern = ".*".join(map(re.escape, ANYTHING.split(plain(shown))))
    return re.fullmatch(pattern, plain(real), re.DOTALL) is not None


@pytest.fixture(scope="module")
def project_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_store(tmp_path_factory.mktemp("project"))


@pytest.fixture
def folder(tmp_path: Path, project_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a new folder with a broker's store in ``store``, and with the ``librmq`` under test as a command.

    As in a reader's shell, programs of the folder import each other, and pytest has its own settings.
    """
    assert librmq.__file__ is not None
    work = tmp_path / "work"
    shutil.copytree(project_store, work / "store")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in (
        ("librmq", f"#!{sys.executable}\nimport sys\nfrom librmq.cli import main\n\nsys.exit(main())\n"),
        ("python", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'),
        ("pytest", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pytest "$@"\n'),
    ):
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(commands), os.environ["PATH"])))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(librmq.__file__).parent.parent), str(EXAMPLES))))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("PYTHONUNBUFFERED", "")  # else lines of two processes would be written in parts
    monkeypatch.chdir(work)
    return work


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )


def run_command(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a shell command prints. ``librmq`` runs in this process, which saves most of the time."""
    given, first, rest = "", *(f"{command} | ".split(" | ")[:2])
    if first.startswith("echo '"):
        given, first, rest = shlex.split(first)[1] + "\n", rest, ""
    lexer = shlex.shlex(first, posix=True, punctuation_chars="<>&;")
    lexer.whitespace_split = True
    words = list(lexer)
    if words[0] != "librmq" or any(word.strip("<>&;") == "" for word in words):
        return run("/bin/sh", "-c", command).stdout
    printed, told = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode()), "utf-8"))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told if rest else printed):
        main(words[1:])
    printed.flush()
    raw = printed.buffer.getvalue()
    if rest:
        raw = told.buffer.getvalue() + subprocess.run(rest, shell=True, input=raw, stdout=subprocess.PIPE).stdout
    return str(raw.decode("utf-8"))


@pytest.fixture
def levels() -> Iterator[None]:
    """Take the levels back that a page sets at loggers."""
    yield
    reset_levels()


@pytest.mark.parametrize("document", pages("python", MARKS), ids=name_of)
@pytest.mark.usefixtures("levels", "capsys")
def test_python_snippets_run(document: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # a page imports an example that its reader has copied
    names: dict[str, Any] = {}
    # Readers run a program many times, in the folder that the last run has left, and its first attempts can fail.
    for number in range(4 if document.parent in RUN_OFTEN else 1):
        if number == 3:
            (folder / "failing").mkdir()
            monkeypatch.chdir("failing")
            monkeypatch.setattr(librmq.PushConsumer, "subscribe", subscribe_failing)
        names = {"__name__": document.stem}
        for block in blocks(document):
            if block.kind == "python" and block.file is None:
                place = "\n" * (block.line - 1)  # so that errors name the line in the document
                exec(compile(place + block.text, str(document), "exec"), names)
    if names.keys() & {"sqlite3", "SqliteDedupStore", "create_engine"}:  # a program's end closes its connections
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            names.clear()
            gc.collect()


def failing_runs(document: Path, programs: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run programs of a page in their order, with failing first attempts; return what goes wrong."""
    failing = folder / "failing"
    failing.mkdir()
    files = [block for block in blocks(document) if block.file is not None and "/" not in block.file]
    for block in files:
        (failing / str(block.file)).write_text(block.text, "utf-8")
    shutil.copy(first_attempts.__file__, failing / "sitecustomize.py")
    with monkeypatch.context() as patched:
        patched.chdir(failing)
        patched.setenv("PYTHONPATH", os.pathsep.join((str(failing), os.environ["PYTHONPATH"])))
        # One that dies at its first run, as its page says, runs again there.
        last = {command: run("/bin/sh", "-c", command) for command in programs}
    wrong = [f"{document.name}, failing\n$ {name}\n{done.stdout}" for name, done in last.items() if done.returncode]
    consumes = any("PushConsumer" in block.text and f"python {block.file}" in " ".join(last) for block in files)
    if consumes and not any(first_attempts.CAUSE in done.stdout for done in last.values()):
        wrong.append(f"{document.name}: no attempt has failed")
    return wrong


@POSIX
@pytest.mark.platform
@pytest.mark.parametrize("document", pages("console", COMMAND_MARKS), ids=name_of)
def test_commands_print_the_shown_output(document: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[str] = []
    ran: list[str] = []
    for block in blocks(document):
        if block.file is not None:
            (folder / block.file).write_text(block.text, "utf-8")
        if block.kind == "console":
            for command, shown in commands(block):
                if command.startswith(("librmq spark", "librmq doctor")) and find_spec("pyspark") is None:
                    continue  # the quick check has no Spark; the whole check runs them
                real = run_command(command, monkeypatch)
                ran.append(command)
                if not shows(shown, real):
                    wrong.append(f"{document.name}:{block.line}\n$ {command}\n{real}\nshown is\n{shown}")
    # Programs of a page that end by themselves run twice more, and in a new folder with failing first attempts.
    programs = [command for command in ran if re.fullmatch(r"python (?!manage)\w+\.py.*", command)]
    for command in dict.fromkeys(programs):
        again = [run("/bin/sh", "-c", command) for _ in range(2)]
        wrong += [f"{document.name}, again\n$ {command}\n{done.stdout}" for done in again if done.returncode]
    if programs:
        wrong += failing_runs(document, programs, folder, monkeypatch)
    logs = [f"{log.name}:\n{log.read_text('utf-8')}" for log in folder.glob("*.log")]
    assert not wrong, "\n\n".join(wrong + logs)


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)]+)\)", text):
            name, _, heading = target.partition("#")
            if "://" in name:
                continue
            other = document.parent / name if name else document
            assert other.exists(), (document, target)
            if heading:
                headings = re.findall(r"^#+ (.*)$", other.read_text("utf-8"), re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings]
                assert heading in anchors, (document, target)


def test_every_document_is_listed() -> None:
    text = (DOCS / "index.md").read_text("utf-8")
    assert [name for name in map(name_of, DOCUMENTS[1:]) if name != "index.md" and f"]({name})" not in text] == []
    assert "](docs/index.md)" in DOCUMENTS[0].read_text("utf-8")


def test_the_map_is_that_of_the_folder() -> None:
    """Each room is in one row, and the rows follow the order of the layers that import-linter checks."""
    picture = (CHECKOUT / "CONTRIBUTING.md").read_text("utf-8").partition("```text\n")[2].partition("```")[0]
    rows = re.findall(r"^ {17}(\w+(?: \| \w+)?)", picture, re.MULTILINE)
    names = [name for row in rows for name in row.split(" | ")]
    assert librmq.__file__ is not None
    package = Path(librmq.__file__).parent
    modules = [path.stem for path in package.glob("*.py")] + [
        path.parent.name for path in package.glob("*/__init__.py")
    ]
    assert sorted(names) == sorted(name for name in modules if name != "__init__")
    with (CHECKOUT / "pyproject.toml").open("rb") as file:
        contract = tomllib.load(file)["tool"]["importlinter"]["contracts"][0]
    layers = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    height = {name: number for number, layer in enumerate(layers) for name in layer}
    assert height.keys() == set(names)
    assert [height[name] for name in names] == sorted(height.values())


def test_ideas_and_walks_name_modules_and_calls_that_exist() -> None:
    text = (DOCS / "design.md").read_text("utf-8").partition("| idea | module |")[2]
    ideas = set(re.findall(r"^\|[^|`]*\| `([a-z_.]+)` \|$", text, re.MULTILINE))
    hops = re.findall(r"^[│├└ ]*([A-Z_a-z][\w., →]*?) {2,}([a-z_.]+)", text, re.MULTILINE)
    assert len(ideas) > 10
    assert len(hops) > 20
    sources = {name: importlib.util.find_spec(f"librmq.{name}") for name in ideas.union(module for _, module in hops)}
    assert [name for name, found in sorted(sources.items()) if found is None] == []
    for calls, module in hops:
        found = sources[module]
        assert found is not None
        source = Path(found.origin or "").read_text("utf-8")
        assert any(re.search(rf"(def|class) {call}\b", source) for call in re.findall(r"\w+", calls)), calls


# ---------------------------------------------------------------------------------------------------- examples


def test_the_page_names_every_kind_of_finding() -> None:
    page = (DOCS / "diagnosis.md").read_text("utf-8")
    calls = (
        node
        for path in (CHECKOUT / "librmq" / "diagnosis").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
    )
    kinds = {call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)}
    assert len(kinds) > 30
    assert [kind for kind in kinds if f"`{kind!s}`" not in page] == []


def test_every_example_is_run() -> None:
    here = {"demo_broker.py", "demo_report.py", "demo_store.py", "embed_log.py", "find_message.py"}
    by_test_examples = {
        "broadcast_cache.py",
        "embed_broker.py",
        "fastapi_app.py",
        "large_bodies.py",
        "order_stock.py",
        "order_timeout.py",
        "ordered_orders.py",
        "test_message_logic.py",
    }
    by_tests_of_idempotence = {"effects_once.py", "exactly_once.py", "idempotence.py"}
    by_tests_of_the_wire = {"mail_worker.py", "test_mail_worker.py"}
    by_test_examples |= {"kill_proof_worker.py", "order_service.py", "test_order_service.py"}
    names = here | by_test_examples | by_tests_of_idempotence | by_tests_of_the_wire
    assert {path.name for path in EXAMPLES.glob("*.py")} == names


@pytest.mark.slow
def test_the_demo_fits_a_screen(folder: Path) -> None:
    """If the first part fails, ``python tools/generated.py`` draws the picture again."""
    shop = run(sys.executable, "-m", "librmq", "demo", "--keep", "demo-output").stdout
    broker = run(sys.executable, EXAMPLES / "demo_broker.py").stdout
    picture = (DOCS / "pictures" / "demo.svg").read_text("utf-8")
    drawn = [html.unescape(row) for row in re.findall(r"<text [^>]*>(.*)</text>", picture)]
    lines = re.sub(r"took \d+ s$", "took less than half a second", shop, flags=re.MULTILINE).splitlines()
    assert lines[:-1] == drawn[:-1]
    assert lines[-1] == "  → in a browser: librmq console demo-output/shop"
    assert broker.splitlines()[-2:] == ["  → 18 queues; key14 is in 5 orders", "  → lost: set()"]
    screen = f"{shop}{broker}".splitlines()
    assert len(screen) <= 90
    assert [line for line in screen if len(line) > 80] == []
    report = run(sys.executable, EXAMPLES / "demo_report.py", "--small").stdout
    findings = re.findall(r"→ (\w+: group \w+, topic \w+: \d+ [a-z ]+)", report)
    assert findings == [
        "info: group bill, topic orders: 300 messages wait",
        "info: group mail, topic orders: 300 messages wait",
    ]
    assert {path.name for path in (folder / "demo-output").iterdir()} == {
        *("README.txt", "broker", "day", "killed", "report.html", "shop")
    }


@pytest.mark.slow
def test_the_look_at_a_brokers_directory_succeeds_and_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    child = run(sys.executable, EXAMPLES / "demo_store.py")
    assert child.returncode == 0, child.stdout
    assert " NO " not in child.stdout
    assert child.stdout.count(" yes ") == 5
    assert [line for line in child.stdout.splitlines() if len(line) > 80 and "bin" not in line] == []
    assert {path.name for path in (folder / "demo-output").iterdir()} == {
        "README.txt",
        "broker",
        "continued",
        "damaged",
    }
    from librmq.store import verify

    assert [verify(str(folder / "demo-output" / name)).sound for name in ("broker", "continued", "damaged")] == [
        True,
        True,
        False,
    ]


@pytest.mark.slow
def test_the_report_says_what_it_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = run(sys.executable, EXAMPLES / "demo_report.py", "--small", folder)
    assert (child.returncode, "run librmq demo --keep first" in child.stdout) == (2, True)
    for name in ("day", "shop"):
        MessageStore.open(folder / name).close()
    (folder / "report.html").mkdir()
    child = run(sys.executable, EXAMPLES / "demo_report.py", "--small", folder)
    assert (child.returncode, child.stdout.splitlines()[-1][:20]) == (2, "The demo ends here: "), child.stdout


@pytest.mark.slow
def test_the_embedded_log_continues(folder: Path) -> None:
    first, second = (run(sys.executable, EXAMPLES / "embed_log.py", "log").stdout for _ in range(2))
    assert "invoice-1: 1 found, the last is number 1" in first
    assert "invoice-1: 2 found, the last is number 4" in second


def cells(tag: str | None) -> list[str]:
    """Return the code cells of the notebook, without those for Spark if ``tag`` is None, else up to those."""
    notebook = json.loads((EXAMPLES / "investigation.ipynb").read_text("utf-8"))
    of_code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in of_code if cell["metadata"].get("tags", [tag])[0] in (None, tag)]


@ENGINES
def test_the_notebook_finds_what_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for cell in cells(None):
        exec(cell, names)
    assert names["worst"][0][1] > 0
    assert "CG_order has 276 messages left" in capsys.readouterr().out


@ENGINES
def test_the_notebook_finds_retries_and_dead_letters(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = librmq.ManualRunner(librmq.ManualClock(1_700_000_000_000))
    with librmq.Broker.open("failing", runner=runner) as broker:
        consumer = librmq.PushConsumer(broker, "billing", max_reconsume_times=2)
        consumer.subscribe("orders", lambda message: 1 / (message.body != b"order 3"))
        consumer.start()
        producer = librmq.Producer(broker, "shop")
        receipts = [producer.send("orders", b"order %d" % number, keys=f"order-{number}") for number in range(6)]
        runner.advance(3_600_000)
        consumer.shutdown()
    monkeypatch.setenv("STORE", "failing")
    names: dict[str, Any] = {}
    for cell in cells(None):
        exec(cell, names)
    assert names["worst"][0] == (receipts[3].message_id, 3, 4, "order-3")
    assert all(attempts == 0 for _, attempts, _, _ in names["worst"][1:])
    assert {topic for _, topic, _, _ in names["by_second"]} >= {"orders", "%RETRY%billing", "%DLQ%billing"}
    assert " dead orders" in capsys.readouterr().out


@ENGINES
@pytest.mark.spark
def test_the_notebook_asks_spark_the_same(folder: Path) -> None:
    names: dict[str, Any] = {}
    for cell in cells("spark"):
        exec(cell, names)
    by_topic = Counter({topic: 0 for _, topic, _, _ in names["by_second"]})
    for _, topic, messages, _ in names["by_second"]:
        by_topic[topic] += messages
    assert {row.topic: row.messages for row in names["on_spark"]} == by_topic


@pytest.mark.slow
def test_a_message_is_found(folder: Path) -> None:
    child = run(sys.executable, EXAMPLES / "find_message.py", "store", "OrderTopic", "key14")
    assert child.returncode == 0, child.stdout
    assert child.stdout.endswith("5 found\n")
    child = run(sys.executable, EXAMPLES / "find_message.py", folder / "nothing", "OrderTopic", "key14")
    assert (child.returncode, child.stdout) == (1, f"{folder / 'nothing'}: no store: it has no folder commitlog\n")
