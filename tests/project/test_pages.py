"""Pages of the documentation: names, texts and tables are those of the code and of the tests."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import librmq
from librmq.cli._syntax import COMMANDS
from librmq.cli.commands.completion import options_of
from librmq.metrics import METRICS
from tests.project.test_docs import DOCS
from tests.reference import CHECKOUT

ROWS = re.findall(r"^\| `(.*?)` \| `(\w+)`", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)


def with_broker(
    act: Callable[[librmq.Broker], Any], config: librmq.BrokerConfig | None = None
) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        with librmq.Broker.temporary(config, runner=librmq.ManualRunner()) as broker:
            act(broker)

    return run


def a_second_writer(folder: Path) -> None:
    with librmq.MessageStore.open(folder):
        librmq.MessageStore.open(folder)


def a_closed_store(folder: Path) -> None:
    store = librmq.MessageStore.open(folder)
    store.close()
    store.append(librmq.Message("orders", b"x"))


def a_cut_file(folder: Path) -> None:
    with librmq.MessageStore.open(folder, librmq.StoreConfig.tiny()) as store:
        for _ in range(40):
            store.append(librmq.Message("orders", b"x" * 4000))
    os.truncate(sorted((folder / "commitlog").iterdir())[1], 100)
    librmq.MessageStore.open(folder)


def several_log_files(folder: Path) -> list[Path]:
    with librmq.MessageStore.open(folder, librmq.StoreConfig.tiny()) as store:
        for _ in range(60):
            store.append(librmq.Message("orders", b"x" * 4000))
    return sorted((folder / "commitlog").iterdir())


def a_log_on_several_paths(folder: Path) -> None:
    files = several_log_files(folder)
    (folder / "log-b").mkdir()
    for file in files[1::2]:
        file.rename(folder / "log-b" / file.name)
    librmq.MessageStore.open(folder)


def a_log_with_a_gap(folder: Path) -> None:
    several_log_files(folder)[1].unlink()
    librmq.MessageStore.open(folder)


def a_long_body(folder: Path) -> None:
    with librmq.MessageStore.open(folder, librmq.StoreConfig.tiny()) as store:
        store.append(librmq.Message("orders", b"x" * 70_000))


def a_delay_in_the_store_of_a_broker(folder: Path) -> None:
    with librmq.Broker.open(folder, runner=librmq.ManualRunner(), store_config=librmq.StoreConfig.tiny()) as broker:
        librmq.Producer(broker, "shop").send("orders", b"x")
    (folder / "librmq" / "config.json").unlink()
    with librmq.Broker.open(folder, runner=librmq.ManualRunner()) as broker:
        librmq.Producer(broker, "shop").send("orders", b"x", delay=timedelta(seconds=90))


def a_closed_broker(folder: Path) -> None:
    broker = librmq.Broker.temporary(runner=librmq.ManualRunner())
    producer = librmq.Producer(broker, "shop").start()
    broker.close()
    producer.send("orders", b"x")


NO_TOPICS = librmq.BrokerConfig(auto_create_topic=False)
ERRORS: list[Callable[[Path], object]] = [
    a_second_writer,
    lambda folder: librmq.MessageStore.open(folder, read_only=True).close(),
    a_log_on_several_paths,
    a_log_with_a_gap,
    a_closed_store,
    a_cut_file,
    a_long_body,
    a_delay_in_the_store_of_a_broker,
    with_broker(lambda broker: librmq.Producer(broker, "shop").send("orders", b"x"), NO_TOPICS),
    a_closed_broker,
    lambda folder: librmq.PushConsumer("data", "billing"),  # type: ignore[arg-type]
    lambda folder: librmq.connect("127.0.0.1:1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "provoke"), list(zip(ROWS, ERRORS, strict=True)), ids=[text for text, _ in ROWS])
def test_an_error_has_the_text_of_its_row(
    row: tuple[str, str], provoke: Callable[[Path], object], tmp_path: Path
) -> None:
    text, name = row
    kind = TypeError if name == "TypeError" else vars(librmq.errors)[name]
    with pytest.raises(kind) as caught:
        provoke(tmp_path / "store")
    assert type(caught.value).__name__ == name
    pattern = ".*".join(map(re.escape, text.split("…")))
    assert re.fullmatch(pattern, str(caught.value), re.DOTALL)


# The page for users of the official Python client has its names as they are.


SECTION = (DOCS / "from.md").read_text("utf-8").partition("## The official Python client\n")[2].partition("\n## ")[0]
FIRST_CELLS = re.findall(r"^\| (`[A-Z].*?) \|", SECTION, re.MULTILINE)
NAMES = sorted({name for cell in FIRST_CELLS for name in re.findall(r"`([A-Z]\w+(?:\.\w+)?)", cell)})
LIST = """\
import json, rocketmq
public = {name: dir(getattr(rocketmq, name)) for name in dir(rocketmq) if name[0].isupper()}
public["SendReceipt"] += vars(rocketmq.SendReceipt("id", None, None, 0))
print(json.dumps(public))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("rocketmq") is None, reason="needs the official client, of the extra test")
def test_names_of_the_official_client_exist(tmp_path: Path) -> None:
    """The client runs in a process of its own, because it writes logs to the home folder."""
    done = subprocess.run(
        [sys.executable, "-c", LIST], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    public = json.loads(done.stdout.splitlines()[-1])
    missing = [
        name
        for name in NAMES
        if (parts := name.split("."))[0] not in public or not set(parts[1:]) <= set(public[parts[0]])
    ]
    assert missing == []
    assert public.keys() - {name.partition(".")[0] for name in NAMES} == set()


# Each guarantee in the docs names a test that exists.


DOCUMENT = CHECKOUT / "docs" / "guarantees.md"
LINKED_TEST = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")


def test_each_test_exists(generated: ModuleType) -> None:
    pages = [generated.fill((DOCS / name).read_text("utf-8")) for name in ("guarantees.md", "faults.md", "judged.md")]
    named = [link for page in pages for link in LINKED_TEST.findall(page)]
    texts = {file: (CHECKOUT / file).read_text("utf-8") for _, file in named}
    assert len(named) > 100
    assert [test for test, file in named if f"def {test}(" not in texts[file]] == []


def test_every_promise_has_tests(generated: ModuleType) -> None:
    """Each sentence that begins in bold letters is in the list, in its order."""
    page = DOCUMENT.read_text("utf-8")
    leads = [" ".join(lead.split()) for lead in re.findall(r"^- \*\*(.+?)\*\*", page, re.MULTILINE | re.DOTALL)]
    listed = importlib.import_module("facts").facts()["promised"]
    assert len(listed) > 50
    assert [row["promise"] for row in listed] == [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", lead) for lead in leads]
    assert [row["promise"] for row in listed if not row["tests"]] == []


# ``docs/logging.md`` explains log lines that exist; the site adds all others, and other tables, from the code.


@pytest.fixture(scope="module")
def generated() -> Iterator[ModuleType]:
    """Return the module that makes the tables; it reads the log lines of the library once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(CHECKOUT / "tools")
        module = importlib.import_module("generated")
        lines = list(module.log_lines())
        patched.setattr(module, "log_lines", lambda: lines)
        yield module


def test_the_lines_of_the_page_exist(generated: ModuleType) -> None:
    page = (CHECKOUT / "docs" / "logging.md").read_text("utf-8").partition("## Lines that need action")[2]
    rows = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    texts = [*generated.WORDLESS_LINES, *(text for _, _, text, _ in generated.log_lines())]
    patterns = {row: ".*".join(map(re.escape, row.split("…"))) for row in rows}
    assert len(rows) > 20
    assert [row for row, pattern in patterns.items() if not any(re.match(pattern, text) for text in texts)] == []


def test_every_argument_has_a_value_and_a_meaning(generated: ModuleType) -> None:
    tables = generated.command_tables()
    assert re.findall(r"^\| `[^`]* ` .*|^\| .*\|  \|$", tables, re.MULTILINE) == []
    sections = {part.partition("\n")[0]: part for part in tables.split("### librmq ")}
    assert "Common options: `--config`, `--dry-run`, `--format`, `-o`." in sections["recover"]
    assert "`--dry-run`" not in sections["serve"]
    assert "| `--tls [CERT KEY]` |" in sections["serve"]
    assert "| `--format parquet \\| csv \\| jsonl` |" in sections["export"]
    assert "| `-o, --out FILE` |" not in sections["show"]
    assert "--at" not in sections["verify"]  # known only to be refused with a reason


def test_every_table_of_a_page_is_made(generated: ModuleType) -> None:
    pages = [page.read_text("utf-8") for page in (CHECKOUT / "docs").rglob("*.md")]
    filled = [generated.fill(page) for page in pages if "<!-- generated: " in page]
    assert len(filled) >= 3
    assert [page for page in filled if "<!-- generated: " in page] == []
    assert any("| `lag` | gauge | topic, group |" in page for page in filled)
    assert any("### librmq show" in page and "| `--grep REGEX` |" in page for page in filled)
    tests = {name for page in filled for name in re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", page)}
    assert [name for name in tests if not (CHECKOUT / name).is_file()] == []


def test_programs_find_each_page_with_a_sentence(generated: ModuleType) -> None:
    lines = [line for line in generated.llms().splitlines() if line.startswith("- ")]
    pages = [*(CHECKOUT / "docs").rglob("*.md")]
    links = {match[1] for line in lines if (match := re.fullmatch(r"- \[[^\]]+\]\(([\w/-]+\.html)\): .{10,}\.", line))}
    assert len(lines) == len(pages)
    assert links == {page.relative_to(CHECKOUT / "docs").with_suffix(".html").as_posix() for page in pages}
    assert "use_directory_urls: false" in (CHECKOUT / "mkdocs.yml").read_text("utf-8")  # so these are the site's files


def test_tables_are_up_to_date(generated: ModuleType) -> None:
    """`python tools/generated.py` writes them into the pages; the trusted parts may grow by some lines."""
    facts = importlib.import_module("facts")
    for path in generated.pages():
        text = path.read_text("utf-8")
        filled = generated.fill(text, written=True)
        if path.name == DOCUMENT.name:
            text, filled = (re.sub(r"[\d,]{3,}", "", page) for page in (text, filled))
        assert filled == text, f"{path.name}: python tools/generated.py writes its tables again"
    counted = [facts.lines_of(row["files"]) for row in facts.facts()["trusted"]]
    for path in (DOCUMENT, CHECKOUT / "README.md"):
        (total,) = re.findall(r"some ([\d,]+) lines\s+of\s+Python", path.read_text("utf-8"))
        assert int(total.replace(",", "")) == pytest.approx(sum(counted), rel=0.1), path.name


ENTERED = """
import json, os, sys, threading
import librmq
from librmq import Message, MessageStore, StoreConfig

home, sync, entered = os.path.dirname(librmq.__file__), StoreConfig(durability="sync"), set()

def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(home) and frame.f_code.co_name != "<module>":
        entered.add("librmq/" + os.path.relpath(frame.f_code.co_filename, home).replace(os.sep, "/"))

def run(path):
    store = MessageStore.open(path, sync)
    for number in range(400):  # so many are derived together
        store.append(Message("orders", b"one coat", keys=f"o-{number}"))
    store.abandon()
    with MessageStore.open(path, sync) as store:
        store.append(Message("orders", b"two coats"))
        assert len(list(store)) == 401
        assert store.read("orders", 0, 0).messages

run("first")  # imports its modules
threading.setprofile(note)
sys.setprofile(note)
run("second")
sys.setprofile(None)
threading.setprofile(None)
print(json.dumps(sorted(entered)))
"""


def test_the_trusted_parts_are_those_that_a_run_enters(generated: ModuleType, tmp_path: Path) -> None:
    """A killed store is opened, appended to with sync, and read; what owns a shared store is on the list as well."""
    environment = {**os.environ, "LIBRMQ_CORE": "off", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-c", ENTERED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    parts = {row["part"]: row["files"] for row in importlib.import_module("facts").facts()["trusted"]}
    shared = {"the next owner of a shared store", "appends of peers"}
    assert set(json.loads(done.stdout)) == {name for part in parts.keys() - shared for name in parts[part]}


def test_proofs_are_shown_when_they_are_there(
    generated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = importlib.import_module("facts")
    name = "tests/crash/test_kill.py::test_a_hundred_kills"
    row = {"what": "kills", "rounds": 1200, "of": 2000, "hours": 0.5, "commit": "5b7b03c4", "failed": []}
    failed = {"first_round": 7, "commit": "5b7b03c4"}
    other = {**row, "failed": [{**failed, "repaired": "256fa555"}, failed]}
    monkeypatch.setattr(facts, "PROOFS", tmp_path / "proofs.json")
    assert "survived" not in facts.trusted()
    assert facts.proof_table() == "No long run is recorded yet."
    facts.PROOFS.write_text(json.dumps({f"{name}[a]": row, f"{name}[b]": other}))
    assert "| 2,400 kills | [`test_a_hundred_kills`]" in facts.trusted()
    assert facts.proof_table().splitlines()[2:] == [
        "| [`test_a_hundred_kills`](../tests/crash/test_kill.py) | 2,400 kills | 1.00 | 1.5 | 4,000 | 1.67 |"
        " `5b7b03c4` | repaired by `256fa555`, open |",
        "| all |  | 1.00 |  |  | 1.7 |  |  |",
    ]


def test_the_readme_is_short() -> None:
    assert len((CHECKOUT / "README.md").read_text("utf-8").split()) <= 900


def test_every_logger_has_named_fields() -> None:
    """A plain logger would write lines without named fields, which the page does not cover.

    `locks` is what the named loggers stand on; its one line has no fields.
    """
    plain = {path.name for path in (CHECKOUT / "librmq").rglob("*.py") if "getLogger(" in path.read_text("utf-8")}
    assert plain == {"event_log.py", "locks.py"}


# The dashboard shows metrics that exist, by labels that they have.


BOARD: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text("utf-8"))


def plots() -> Iterator[tuple[str, str]]:
    """Yield the expression and the names of the lines of each plot."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


def test_plots_use_metrics_and_labels_that_exist() -> None:
    for expression, legend in plots():
        names = re.findall(r"librmq_(\w+)", expression)
        assert names, expression
        for name in names:
            metric = METRICS[name.removesuffix("_total")]
            assert name.endswith("_total") == (metric.kind == "counter"), expression
            used = set(re.findall(r"(\w+)=~", expression)) | set(re.findall(r"\{\{(\w+)\}\}", legend))
            for by in re.findall(r"by \(([\w, ]+)\)", expression):
                used |= set(by.split(", "))
            assert used <= set(metric.labels), expression


# The page for users of mqadmin names an equivalent for each mqadmin command, and the equivalents exist.


OF_4_9 = """
addWritePerm allocateMQ brokerConsumeStats brokerStatus checkMsgSendRT cleanExpiredCQ cleanUnusedTopic cloneGroupOffset
clusterAclConfigVersion clusterList clusterRT consumeMessage consumer consumerConnection consumerProgress consumerStatus
deleteAclConfig deleteExpiredCommitLog deleteKvConfig deleteSubGroup deleteTopic exportConfigs exportMetadata
exportMetrics getAclConfig getBrokerConfig getConsumerConfig getConsumerStatus getNamesrvConfig printMsg printMsgByQueue
producer producerConnection queryCq queryMsgById queryMsgByKey queryMsgByOffset queryMsgByUniqueKey queryMsgTraceById
resetOffsetByTime resetOffsetByTimeOld sendMessage sendMsgStatus skipAccumulatedMessage startMonitoring statsAll
topicClusterList topicList topicRoute topicStatus updateAclConfig updateBrokerConfig updateGlobalWhiteAddr
updateKvConfig updateNamesrvConfig updateOrderConf updateSubGroup updateTopic updateTopicPerm wipeWritePerm
"""

PAGE = (CHECKOUT / "docs" / "mqadmin.md").read_text("utf-8")


def test_each_command_of_mqadmin_has_a_row() -> None:
    first = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert sorted(name for cell in first for name in re.findall(r"`(\w+)`", cell)) == OF_4_9.split()


def test_the_commands_that_are_named_exist() -> None:
    for name, rest in re.findall(r"`librmq ([a-z-]+)([^`]*)`", PAGE):
        assert name in COMMANDS
        options = set(re.findall(r"--[a-z-]+", rest))
        assert options <= set(options_of(name)), f"librmq {name}{rest}"


# The reference on the site: each setting has a description, and the tree of errors has every error.


PAGES = re.findall(r"reference/(\w+)\.md", (CHECKOUT / "mkdocs.yml").read_text("utf-8"))
PACKAGES = [importlib.import_module("librmq" if name == "librmq" else f"librmq.{name}") for name in PAGES]
WITHOUT_EXTRA = [package for package in PACKAGES if package.__name__ != "librmq.spark"]
"""Packages whose exports can be imported in the environment of the quick check."""
EXPORTS = [getattr(package, name) for package in WITHOUT_EXTRA for name in package.__all__]


def subclasses(of: type) -> set[type]:
    below: set[type] = set(of.__subclasses__())
    return {of}.union(*map(subclasses, below))


def undescribed(kind: type) -> list[str]:
    """Return the settings or members in a class's body that no docstring follows."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = []
    for node, following in itertools.zip_longest(body.body, body.body[1:]):
        names = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if names and not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
            found += [f"{kind.__name__}.{ast.unparse(name)}" for name in names]
    return found


@pytest.mark.slow
def test_settings_statuses_and_fields_are_described() -> None:
    kinds = {kind for kind in EXPORTS if isinstance(kind, type) and not issubclass(kind, BaseException)}
    plain = {kind for kind in kinds if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")}
    plain |= {kind for kind in kinds if issubclass(kind, enum.Enum)}
    fields = {name for kind in plain for name in undescribed(kind) if "._" not in name}
    # A description could only repeat these names: those of the vocabulary, and a class that has one field of its kind.
    assert {name.partition(".")[2] for name in fields} <= {
        "body", "broker_name", "brokers", "calls", "client_id", "finding", "group", "half", "is_folder", "master",
        "message", "message_id", "name", "next_step", "properties", "queue", "queue_id", "topic",
    }  # fmt: skip


def test_the_tree_of_errors_has_every_error() -> None:
    """Each row has its place below its base, and names the base outside of librmq."""
    drawn, above = {}, dict[int, str]()
    for line in (librmq.errors.__doc__ or "").splitlines():
        if row := re.match(r"    ([ │├└─]*)([A-Z]\w+Error)\b(?:.* \((\w+)\)$)?", line):
            depth = len(row[1]) // 4
            above[depth] = row[2]
            drawn[row[2]] = {name for name in (above.get(depth - 1), row[3]) if name}
    kinds = {kind for kind in subclasses(librmq.errors.RmqError) if kind.__module__.startswith("librmq.")}
    bases = {kind.__name__: {base.__name__ for base in kind.__bases__} - {"Exception"} for kind in kinds}
    assert drawn == {name: of for name, of in bases.items() if re.fullmatch("[A-Z].*Error", name)}
