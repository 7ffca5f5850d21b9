"""What each reading command answers to a store that is not whole, compared with a parser of its own.

The site shows the table of the answers in ``docs/store.md``: ``LIBRMQ_WRITE_TABLE=1`` writes it beside this test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from librmq import Broker, ConsumeFrom, ManualClock, ManualRunner, Message, Producer, PushConsumer, StoreConfig
from librmq.columns import reader
from librmq.errors import RmqError
from tests import budget
from tests.budget import many
from tests.cli.stand import Shell
from tests.crash.damage_map import warnings_of_librmq
from tests.log_parser import parse
from tests.reference import CHECKOUT

SIZE = 4096
MESSAGES = 40
BODIES = [b"body %03d" % number + bytes(200) for number in range(MESSAGES)]
ALL = MESSAGES + 3
TABLE = CHECKOUT / "tests" / "cli" / "damage_by_command.md"

COMMANDS = {
    "topics": "topics s", "stats": "stats s", "queues": "queues s", "queue": "queue s T 0", "count": "count s",
    "groups": "groups s", "lag": "lag s", "progress": "progress s",
    "expiring": "expiring s --reserved 1h --within 1h",
    "whatif": "whatif s --group G --topic T --handler 20ms", "pending": "pending s", "dead-letters": "dead-letters s",
    "show": "show s", "tail": "tail s -n 1000 --all", "dump": "dump s", "query": "query s --topic T --key k7",
    "story": "story s k7", "export": "export s -o out.jsonl", "traces": "traces s",
    "timers": "timers s", "disk": "disk s", "report": "report s -o r.html",
    "diagnose": "diagnose s --no-verify", "verify": "verify s", "can-start": "can-start s",
}  # fmt: skip


def logs(path: Path) -> list[Path]:
    return sorted(file for file in (path / "commitlog").iterdir() if any(file.read_bytes()))


def entries(path: Path) -> list[Path]:
    return sorted((path / "consumequeue" / "T" / "0").iterdir())


def patch(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


def record(path: Path, number: int) -> tuple[Path, int, int]:
    """Return the file, the place in it, and the size of a record."""
    parsed = parse(path).kept[number]
    file = next(file for file in reversed(logs(path)) if int(file.name) <= parsed.at)
    return file, parsed.at - int(file.name), parsed.size


def zero(path: Path, number: int, keep: int = 0) -> None:
    file, at, size = record(path, number)
    patch(file, at + keep, bytes(size - keep))


def killed(path: Path) -> None:
    (path / "abort").touch()
    shutil.rmtree(path / "librmq")
    patch(path / "checkpoint", 0, bytes(24))


def killed_with_a_cut_queue(path: Path) -> None:
    killed(path)
    os.truncate(entries(path)[0], 10)


def killed_again(path: Path) -> None:
    """Leave it as a kill soon after an opening does, whose records have the times of those before."""
    (path / "abort").touch()
    patch(path / "checkpoint", 0, bytes(24))


def both(*steps: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        for step in steps:
            step(path)

    return damage


def flip_body(path: Path) -> None:
    file, at, _ = record(path, MESSAGES // 2)
    patch(file, at + 90, b"\xff")


def garbage_behind(path: Path) -> None:
    last = parse(path).kept[-1]
    file = logs(path)[-1]
    patch(file, last.at + last.size - int(file.name), b"\x00\x00\x01garbage")


def only_file(path: Path) -> Path:
    (file,) = (path / "consumequeue" / "%DLQ%G" / "0").iterdir()
    return file


def by_broker(path: Path) -> None:
    """Remove what a broker does not write: librmq's note of the close."""
    shutil.rmtree(path / "librmq")


def read_one(path: Path) -> None:
    """Let the group have read the first message of a queue."""
    table = path / "config" / "consumerOffset.json"
    text = table.read_text()
    assert text.count("0:0") == 1, text
    table.write_text(text.replace("0:0", "0:1"))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "none": lambda path: None,
    "killed, nothing damaged": killed,
    "killed, the last record half written": both(lambda path: zero(path, -1, 60), killed),
    "killed, other bytes behind the end": both(garbage_behind, killed),
    "killed, a last log file of length zero": both(
        lambda path: (path / "commitlog" / f"{1 << 20:020}").touch(), killed
    ),
    "killed, the only file of a queue missing": both(lambda path: only_file(path).unlink(), killed),
    "killed, a record in the middle lost": both(lambda path: zero(path, MESSAGES // 2), killed),
    "killed after a close, the last log file missing": both(lambda path: logs(path)[-1].unlink(), killed_again),
    "killed after a close, the first log file missing": both(lambda path: logs(path)[0].unlink(), killed_again),
    "closed, the last record lost": lambda path: zero(path, -1),
    "closed, a record in the middle lost": lambda path: zero(path, MESSAGES // 2),
    "closed, one byte of a body changed": flip_body,
    "the first log file missing": lambda path: logs(path)[0].unlink(),
    "a log file in the middle missing": lambda path: logs(path)[1].unlink(),
    "the last log file missing": lambda path: logs(path)[-1].unlink(),
    "the last log file half copied": lambda path: os.truncate(logs(path)[-1], 300),
    "a log file cut to 100 bytes": lambda path: os.truncate(logs(path)[1], 100),
    "a foreign file in the log": lambda path: (path / "commitlog" / "notes").write_text("x"),
    "the last file of a queue missing": lambda path: entries(path)[-1].unlink(),
    "the only file of a queue missing": lambda path: only_file(path).unlink(),
    "the first file of a queue missing": lambda path: entries(path)[0].unlink(),
    "the folder of a queue missing": lambda path: shutil.rmtree(path / "consumequeue" / "T" / "0"),
    "killed, a queue file cut to 10 bytes": killed_with_a_cut_queue,
    "a queue file cut to 10 bytes": lambda path: os.truncate(entries(path)[0], 10),
    "the last entry of a queue lost": lambda path: patch(entries(path)[-1], 60, bytes(20)),
    "an entry that leads elsewhere": lambda path: patch(entries(path)[0], 60, (5).to_bytes(8, "big")),
    "by a broker, the only file of a queue missing": both(by_broker, lambda path: only_file(path).unlink()),
    "by a broker, the first file of a queue missing": both(by_broker, lambda path: entries(path)[0].unlink()),
    "by a broker, the last file of a queue missing": both(by_broker, lambda path: entries(path)[-1].unlink()),
    "by a broker, the last entry of a queue lost": both(
        by_broker, lambda path: patch(entries(path)[-1], 60, bytes(20))
    ),
    "by a broker, the folder of a queue missing": both(
        by_broker, read_one, lambda path: shutil.rmtree(path / "consumequeue" / "T" / "0")
    ),
    "by a broker, the folder of an unread queue missing": both(
        by_broker, lambda path: shutil.rmtree(path / "consumequeue" / "T" / "0")
    ),
    "an index file missing": lambda path: sorted((path / "index").iterdir())[0].unlink(),
    "an index file with an impossible header": lambda path: patch(
        sorted((path / "index").iterdir())[0], 0, b"\xff" * 40
    ),
    "no checkpoint": lambda path: (path / "checkpoint").unlink(),
    "a checkpoint of 10 bytes": lambda path: os.truncate(path / "checkpoint", 10),
    "progress unreadable, with a backup": lambda path: _break(path, "consumerOffset.json", has_backup=True),
    "progress unreadable, without a backup": lambda path: _break(path, "consumerOffset.json", has_backup=False),
    "topics unreadable, without a backup": lambda path: _break(path, "topics.json", has_backup=False),
}


UNSEEN = {"by a broker, the last entry of a queue lost", "by a broker, the folder of an unread queue missing"}
"""Damage that only a comparison of the whole log shows, or none: such a queue can have been deleted with its topic."""


GAPS = {"a log file in the middle missing", "a log file cut to 100 bytes", "a foreign file in the log"}
"""Damage of the log behind which every command reads on."""


def _break(path: Path, name: str, *, has_backup: bool) -> None:
    table = path / "config" / name
    backup = table.with_name(f"{name}.bak")
    if has_backup:
        backup.write_bytes(table.read_bytes())
    else:
        backup.unlink(missing_ok=True)
    table.write_text("{broken")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a closed store with several files of each kind; tests copy it."""
    path = tmp_path_factory.mktemp("damage") / "s"
    clock = ManualClock(1_700_000_000_000)
    config = StoreConfig.tiny(commitlog_file_size=SIZE, consumequeue_file_size=8 * 20, max_index_num=16)
    with Broker.open(path, runner=ManualRunner(clock), store_config=config) as broker:
        broker.create_topic("T", 2)
        broker.set_group("G")
        broker.reset_group("G", "T", "begin")
        producer = Producer(broker, "P")
        for number in range(MESSAGES):
            producer.send(Message("T", BODIES[number], keys=f"k{number}"), queue=number % 2)
            clock.advance(seconds=1)
        producer.send("%DLQ%G", b"dead", queue=0)
        producer.send("T", b"later", queue=0, delay=3600)
        trace = ("SubBefore", clock.now_ms(), "region", "G", "R1", "A1", 0, "k7")
        producer.send("traces", ("\x01".join(map(str, trace)) + "\x02").encode(), queue=0)
    return path


Answers = dict[str, tuple[str, str]]


def answers(shell: Shell, sound: Path, name: str) -> Answers:
    """Return the answer of each command to a damage, with its output."""
    path = shell.folder / "s"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(sound, path)
    DAMAGES[name](path)
    given = {}
    for command, words in COMMANDS.items():
        answer = shell(*words.split())
        assert answer.status in (0, 1, 2), (name, command, answer.said)
        assert "Traceback" not in answer.said
        assert "a bug in librmq" not in answer.said
        assert answer.status == 0 or answer.said or command in ("verify", "diagnose", "can-start"), (name, command)
        written = shell.folder / "out.jsonl"
        out = written.read_text() if written.exists() else answer.out
        written.unlink(missing_ok=True)
        if command in ("disk", "can-start"):  # the row of the disk itself, and its speed, are the machine's
            out = "".join(line for line in out.splitlines(keepends=True) if '"type":"disk"' not in line)
            out = re.sub(r'"read_[a-z_]+":[^,]+,', "", out)
        given[command] = (_kind(shell, command, answer.status, out), out)
    return given


def _kind(shell: Shell, command: str, status: int, out: str) -> str:
    """Return the kind of an answer: a short one has status 0 if the user takes it as recovered."""
    if status == 0:
        return "ok"
    if command in ("verify", "diagnose", "can-start"):
        return "short" if out else "refused"
    again = shell(*COMMANDS[command].split(), "--as-recovered")
    (shell.folder / "out.jsonl").unlink(missing_ok=True)
    return "short" if again.status == 0 or "checksum" in again.said else "refused"


def places(output: str) -> list[int]:
    """Return the places of the messages that a command has printed; those with a wrong body say so in their rows."""
    return [row["phys"] for row in map(json.loads, output.splitlines()) if row["type"] == "message" and row["crc_ok"]]


@pytest.fixture(scope="module")
def whole() -> Answers:
    """Hold the answers to the store without damage, which the first test asks for."""
    return {}


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, str]]:
    """Collect the answers by damage and command, for the test of the page at the end."""
    return {}


@many
@pytest.mark.parametrize("name", DAMAGES)
def test_each_command_has_one_of_four_answers(
    shell: Shell, sound: Path, whole: Answers, table: dict[str, dict[str, str]], name: str
) -> None:
    if not whole:
        whole.update(answers(shell, sound, "none"))
    given = answers(shell, sound, name)
    table[name] = {
        command: "sound" if (kind, out) == ("ok", whole[command][1]) else "recovered" if kind == "ok" else kind
        for command, (kind, out) in given.items()
    }
    parsed = parse(shell.folder / "s")
    kept = {record.at for record in parsed.kept}
    for command in ("show", "dump", "tail"):
        kind, out = given[command]
        shown = places(out)
        if name in GAPS:
            assert (kind, set(shown)) == ("short", readable(shell.folder / "s", name)), (name, command)
        if kind == "ok":
            # What is not damaged in the log is complete, up to the first unreadable place.
            assert set(shown) == kept or (name in UNSEEN and set(shown) < kept), (name, command)
        elif kind == "short":
            assert set(shown) <= kept | {record.at for record in parsed.behind if record.is_sound}, (name, command)
    table[name]["columns"] = columns_answer(shell.folder / "s", readable(shell.folder / "s", name), name)
    table[name][CONSUMER] = consumer_answer(shell.folder / "s", is_seen=name not in UNSEEN)


def readable(path: Path, name: str) -> set[int]:
    """Return the places of the records that are read: behind a missing file too."""
    parsed = parse(path)
    return {record.at for record in (*parsed.kept, *(parsed.behind if name in GAPS else ()))}


def columns_answer(path: Path, kept: set[int], name: str) -> str:
    """Return the answer of a read by columns: a short one is read as recovered, or else raises.

    Unless the damage is seen, rows are missing.
    """
    for as_recovered in (False, True):
        read: list[int] = []
        columns = ["physicalOffset", "body"]
        try:
            for batch in reader(str(path), topic=re.compile(".*"), columns=columns, as_recovered=as_recovered):
                read += batch.column(0).to_pylist()
        except RmqError:
            continue
        assert set(read) == kept if name not in UNSEEN else set(read) < kept
        return "short" if as_recovered else "sound" if len(read) == ALL else "recovered"
    return "refused"


def consumer_answer(path: Path, *, is_seen: bool) -> str:
    """Return what a new group gets from a broker that opens the store: nothing is missing in silence."""
    got: dict[int, bool] = {}
    runner = ManualRunner(ManualClock(1_700_000_100_000))
    with warnings_of_librmq() as warned:
        try:
            with Broker.open(path, runner=runner) as broker:
                consumer = PushConsumer(broker, "new", consume_from=ConsumeFrom.FIRST)
                consumer.subscribe("T", lambda message: got.update({message.physical_offset: message.body in BODIES}))
                consumer.start()
                runner.advance(60_000)
                consumer.shutdown()
        except RmqError:
            return "refused"
    assert all(got.values())
    if len(got) == MESSAGES:
        return "all"
    assert warned or not is_seen
    return "the rest" if got else "none"


def places_here(path: Path, step: list[str]) -> set[int]:
    """Return the places of the rows of Spark's data source, read in this process; ``step`` gets what was begun."""
    from librmq.spark._source import RocketMQDataSource

    step.append("plan")
    source = RocketMQDataSource({"path": str(path), "topicPattern": ".*"})
    reader_of_spark: Any = source.reader(source.schema())
    parts = reader_of_spark.partitions()
    step.append("read")
    batches = [batch for part in parts for batch in reader_of_spark.read(part)]
    return {place for batch in batches for place in batch["physicalOffset"].to_pylist()}


@pytest.mark.spark
@pytest.mark.slow
def test_spark_answers_as_columns_do(tmp_path: Path, sound: Path) -> None:
    """Its data source reads each damage here; a session, which takes seconds, one of each answer at each step."""
    pytest.importorskip("pyspark")
    from pyspark.errors import PySparkException

    from librmq.spark import register
    from tests.spark_session import shared_session

    def places_in_session(path: Path, _: list[str]) -> set[int]:
        frame = shared_session().read.format("rocketmq").option("topicPattern", ".*").load(str(path))
        return {row.physicalOffset for row in frame.select("physicalOffset", "body").collect()}

    register(shared_session())
    in_session: set[tuple[str, str]] = set()
    for number, (name, damage) in enumerate(DAMAGES.items()):
        path = shutil.copytree(sound, tmp_path / str(number) / "s")
        damage(path)
        expected = columns_answer(path, readable(path, name), name)
        step: list[str] = []
        for places_of in (places_here, places_in_session):
            try:
                rows = places_of(path, step)
            except (RmqError, PySparkException):
                assert expected in ("short", "refused"), name
            else:
                assert expected == ("sound" if len(rows) == ALL else "recovered"), name
            if (expected, step[-1]) in in_session:
                break
        in_session.add((expected, step[-1]))
    assert {expected for expected, _ in in_session} == {"sound", "recovered", "short", "refused"}


def test_the_kept_table_is_this_one(table: dict[str, dict[str, str]]) -> None:
    assert "none" in table, "this test needs those before it"
    text = rendered(table)
    kept = TABLE.read_text("utf-8")
    if budget.run.quick:  # it has some of the rows
        assert set(text.splitlines()) <= set(kept.splitlines()), "LIBRMQ_WRITE_TABLE=1 writes the table"
        return
    assert len(table) == len(DAMAGES)
    if os.environ.get("LIBRMQ_WRITE_TABLE"):
        TABLE.write_text(f"{text}\n", "utf-8")
        return
    assert kept == f"{text}\n", "LIBRMQ_WRITE_TABLE=1 writes the table"


def rendered(table: dict[str, dict[str, str]]) -> str:
    """Return the table in Markdown; the commands that a row does not name answer as for a sound store."""
    head = ["damage", "recovered", "short", "refused", CONSUMER]
    rows = [
        [
            name,
            *(_names([name for name in given if given[name] == kind], given) for kind in head[1:-1]),
            answers[CONSUMER],
        ]
        for name, answers in table.items()
        if name != "none"
        for given in [{command: kind for command, kind in answers.items() if command != CONSUMER}]
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


CONSUMER = "what a consumer gets"
NAMED = {
    "checks": {"report", "diagnose", "verify", "can-start"},
    "tables": {
        "topics", "stats", "groups", "lag", "progress", "expiring", "whatif", "pending", "dead-letters", "story",
        "traces", "disk",
    },
}  # fmt: skip
"""Commands that the page names together."""


def _names(commands: list[str], of: Collection[str]) -> str:
    others = [command for command in of if command not in commands]
    if not others:
        return "all"
    said = commands if len(commands) <= len(others) else others
    together = [name for name, named in NAMED.items() if named <= set(said)]
    alone = [f"`{command}`" for command in said if not any(command in NAMED[name] for name in together)]
    return ("" if said is commands else "all but ") + ", ".join(together + alone)


@pytest.mark.parametrize("words", ["disk s", COMMANDS["expiring"], "lag s --at 2023-11-14T22:14:00Z"])
def test_times_of_a_log_whose_first_record_is_damaged(shell: Shell, sound: Path, words: str) -> None:
    """What looks only at the time of the first record says too that it can't be read."""
    path = shutil.copytree(sound, shell.folder / "s")
    patch(logs(path)[0], 4, bytes(4))
    answer = shell(*words.split())
    assert answer.status
    assert "the file begins with none" in answer.said
