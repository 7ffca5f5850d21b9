"""Outside of a local session: with Spark Connect, and on workers that get librmq as a wheel.

Each test uses its own process, because a process has one session.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

import librmq

pytestmark = [pytest.mark.spark, pytest.mark.slow]
pyspark = pytest.importorskip("pyspark")
pytest.importorskip("grpc")

import pyspark_librmq  # noqa: E402
from librmq.spark.sessions import java_home  # noqa: E402
from tests.programs import Process  # noqa: E402
from tests.reference import CHECKOUT  # noqa: E402
from tests.spark_session import shared_session  # noqa: E402

STEPS = '''
from pyspark.errors import PySparkException
from pyspark.sql import functions as F

from librmq import Message, MessageStore
from librmq.spark import match_sql, match_tags
from librmq.spark.pipelines import run


def first_steps(spark, folder):
    """A store is written, read, filtered and streamed: each place where Spark runs librmq's code."""
    path = folder + "/store"
    rows = spark.range(40, numPartitions=4).select(
        F.col("id").cast("string").alias("body"), F.lit("t").alias("tags"), F.concat(F.lit("k"), "id").alias("keys"),
        F.create_map(F.lit("amount"), F.col("id").cast("string")).alias("properties"),
    )
    rows.write.format("rocketmq").mode("append").options(topic="T", jobId="once").save(path)
    frame = spark.read.format("rocketmq").load(path)
    assert frame.where(match_sql("properties", "amount >= 30") & match_tags("tags", "t")).count() == 10
    assert streamed(spark, folder, path) == list(range(40))


def streamed(spark, folder, path):
    stream = spark.readStream.format("rocketmq").option("maxOffsetsPerTrigger", "25").load(path)
    query = (
        stream.select("body").writeStream.format("parquet").option("path", folder + "/out")
        .option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
    )
    query.awaitTermination()
    return sorted(int(bytes(row[0])) for row in spark.read.parquet(folder + "/out").collect())


def steps(spark, folder):
    """Then a job is repeated, the store examined, and a stream goes on; problems are reported."""
    first_steps(spark, folder)
    path = folder + "/store"
    more = spark.range(40, 50).select(F.col("id").cast("string").alias("body"))
    for _ in range(2):
        more.write.format("rocketmq").mode("append").options(topic="T", jobId="more").save(path)
    frame = spark.read.format("rocketmq").load(path)
    assert frame.count() == 50
    frame.createOrReplaceTempView("messages")
    assert spark.sql("SELECT count(*) FROM messages WHERE match_sql(properties, 'amount < 5')").first()[0] == 5
    assert spark.read.format("rocketmq").option("sql", "amount < 3").load(path).count() == 3
    assert streamed(spark, folder, path) == list(range(50))
    assert sum(row["messages"] for row in run(spark, "skew", path).collect()) == 50
    try:
        spark.read.format("rocketmq").option("topicz", "T").load(path).count()
    except PySparkException as error:
        assert "did you mean topic" in str(error)
    else:
        raise AssertionError("an unknown option was taken")
    with MessageStore.open(path, read_only=True) as store:
        assert len(list(store)) == 50
'''

CONNECT = """
import os, sys
from librmq.spark.sessions import java_home
os.environ["JAVA_HOME"] = str(java_home())
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
from librmq.spark import register
spark = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
assert "connect" in type(spark).__module__
register(spark)
steps(spark, sys.argv[1])
spark.stop()
"""

WHERE = """
def where(batches):
    import librmq
    import pyarrow as pa

    for _ in batches:
        yield pa.RecordBatch.from_pydict({"file": [librmq.__file__]})


(row,) = spark.range(1, numPartitions=1).mapInArrow(where, "file string").collect()
assert sys.argv[3] in row["file"], row
"""

SHIPPED = (
    """
import sys
from librmq.spark import register, session
settings = {
    "spark.executor.memory": "768m",
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}
spark = session("librmq", "local-cluster[1,2,768]", settings)
spark.sparkContext.pythonExec = sys.argv[2]
register(spark, ship=True)
"""
    + WHERE
    + "first_steps(spark, sys.argv[1])"
)

SUBMITTED = (
    """
import sys
import librmq
from librmq.spark import register
from pyspark.sql import SparkSession
spark = SparkSession.builder.config("spark.sql.shuffle.partitions", "2").getOrCreate()
register(spark, ship=sys.argv[2] == "ship")
assert sys.argv[3] in librmq.__file__, librmq.__file__
"""
    + WHERE
    + "first_steps(spark, sys.argv[1])"
)

LARGE = """
import sys
from librmq import Message, MessageStore, StoreConfig
from librmq.spark import register, session
EXECUTOR, BODY = 128 << 20, 256 << 10
count = 10 * EXECUTOR // BODY
path = sys.argv[1] + "/store"
with MessageStore.open(path, StoreConfig(commitlog_file_size=256 << 20)) as store:
    for number in range(count):
        store.append(Message("T", number.to_bytes(4, "big") + bytes(BODY - 4), keys=f"k{number}"), number % 4)
settings = {
    "spark.executor.memory": f"{EXECUTOR >> 20}m",
    "spark.testing.reservedMemory": str(32 << 20),
    "spark.network.maxRemoteBlockSizeFetchToMem": "32m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}
spark = session("librmq", "local-cluster[1,1,1024]", settings | {"spark.sql.shuffle.partitions": "2"})
register(spark)
frame = spark.read.format("rocketmq").load(path)
rows = frame.groupBy("queueId").agg({"*": "count", "queueOffset": "max"}).collect()
assert sorted((row[0], row["count(1)"], row["max(queueOffset)"]) for row in rows) == [
    (number, count // 4, count // 4 - 1) for number in range(4)
]
whole = frame.selectExpr("sum(length(body))", "count(DISTINCT substr(body, 1, 4))").first()
assert tuple(whole) == (count * BODY, count), whole
spark.stop()
"""


def run(tmp_path: Path, script: str, *arguments: str, **variables: str) -> str:
    """Run a script in a separate process, and return its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS + script, str(tmp_path), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(CHECKOUT)]), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-4000:]
    return done.stderr


QUIET = """
import sys
from argparse import Namespace
from librmq import Message, MessageStore
from librmq.cli import main
from librmq.cli.commands.diagnosis import start
path = sys.argv[1] + "/store"
with MessageStore.open(path) as store:
    store.append(Message("T", b"x"))
spark = start(Namespace(master="local[1]"))
assert spark.conf.get("spark.ui.showConsoleProgress") == "false"
spark.sparkContext.setLogLevel("ERROR")  # as `session` leaves it
frame = spark.range(100_000, numPartitions=4).mapInArrow(lambda batches: batches, "id long")
assert len(frame.limit(3).collect()) == 3
assert frame.count() == 100_000
assert spark.read.format("rocketmq").load(path).count() == 1
assert main(["spark", "run", "skew", path]) == 0
"""


OF_JAVA_25 = re.compile(r"WARNING: package sun\.security\.action not in java\.base\r?\n")
"""What it prints about an option that Spark gives it."""


def test_a_session_without_an_activated_environment(tmp_path: Path) -> None:
    """The session finds the data source and prints nothing, even if a LIMIT ends a task, or in a command."""
    assert OF_JAVA_25.sub("", run(tmp_path, QUIET, PATH=os.defpath)) == ""


CAUSE = """
import sys
from argparse import Namespace
from librmq.cli.commands.diagnosis import start

def until_written(batches):
    open(gate).read()
    yield from batches

folder, gate = sys.argv[1:]
spark = start(Namespace(master="local[1]"))
assert spark.range(1, numPartitions=1).mapInArrow(until_written, "id long").count() == 1
spark.read.format("rocketmq").option("topicz", "x").load(folder)
"""


def test_a_terminal_shows_a_bar_and_the_cause(tmp_path: Path) -> None:
    """The stage waits until its bar is seen. The cause comes before the traceback of Spark."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    terminal, its_end = pty.openpty()
    with Process(
        [sys.executable, "-c", CAUSE, str(tmp_path), str(gate)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(CHECKOUT)])},
        stderr=its_end,
    ) as program:
        os.close(its_end)
        shown = b""
        while b"[Stage " not in shown:
            more = os.read(terminal, 4096)
            assert more, shown
            shown += more
        gate.write_bytes(b"")
        with contextlib.suppress(OSError):  # Linux ends a terminal with an error
            while more := os.read(terminal, 4096):
                shown += more
        os.close(terminal)
    assert program.returncode == 1
    first, second, *_ = OF_JAVA_25.sub("", re.sub(r"\r?\[Stage [^\r]*\r|\r +\r", "", shown.decode())).splitlines()
    assert first == "librmq: [RMQ_BAD_OPTION] unknown option 'topicz' for format rocketmq: did you mean topic?"
    assert second.startswith("Traceback")


@pytest.mark.skipif(os.name != "posix", reason="elsewhere workers run this Python without a script")
def test_workers_import_pyspark_with_its_bytecode() -> None:
    """Spark names a zip of its modules first, which each process would compile again."""
    shared_session()
    zips = Path(pyspark.__file__).parent / "python" / "lib"
    names = [*map(str, sorted(zips.glob("*.zip"))), "/a b", "/c*", str(zips.parent / "other.zip")]
    assert (zips / "pyspark.zip").exists()
    told = subprocess.run(
        [os.environ["PYSPARK_PYTHON"], "-c", "import os, pyspark; print(pyspark.__file__, os.environ['PYTHONPATH'])"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(names)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert told.strip() == f"{pyspark.__file__} {os.pathsep.join(names[-3:])}"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process as only Linux can")
@pytest.mark.parametrize("module", ["pyspark.worker", "pyspark.sql.worker.create_data_source"])
def test_a_worker_whose_jvm_ends_prints_nothing(module: str) -> None:
    """Make Spark's own request for a Python worker of the session, and close its connection."""
    shared_session()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"PYTHON_UNIX_DOMAIN_ENABLED": "true", "PYTHON_WORKER_FACTORY_SOCK_DIR": folder}
        with Process[bytes](
            [os.environ["PYSPARK_PYTHON"], "-m", "pyspark.daemon", module],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(CHECKOUT)]), **settings},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as daemon:  # fmt: skip
            (length,) = struct.unpack(">i", daemon.stdout.read(4))
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(daemon.stdout.read(length))
                worker = os.pidfd_open(struct.unpack(">i", connection.recv(4))[0])
            select.select([worker], [], [], 60)
            os.close(worker)
            daemon.stdin.close()
            assert daemon.stderr.read() == b""


def test_through_spark_connect(tmp_path: Path) -> None:
    run(tmp_path, CONNECT)


LACKING = """
import sys
from importlib.machinery import PathFinder

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in ("librmq", "pyspark_librmq"):
            spec = PathFinder.find_spec(name, [place for place in sys.path if place.endswith((".zip", "/env/lib"))])
            if spec is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return spec

sys.meta_path.insert(0, Lacking())
"""


def lacking_python(folder: Path) -> Path:
    """Make a Python for Spark that has librmq only as it is delivered to it: ``bin/python`` in a folder."""
    for name in ("bin", "lib"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "lib" / "sitecustomize.py").write_text(LACKING)
    python = folder / "bin" / "python"
    lib = '$(cd "$(dirname "$0")/../lib" && pwd)'
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{lib}:$PYTHONPATH" exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    return python


def test_on_a_cluster_that_gets_librmq(tmp_path: Path) -> None:
    """The Python of Spark, on workers and for the plans of streams on the driver, has librmq only as it is shipped."""
    run(tmp_path, SHIPPED, str(lacking_python(tmp_path)), ".zip")


def test_a_store_of_ten_times_the_memory_of_an_executor(tmp_path: Path) -> None:
    run(tmp_path, LARGE)


BIN = Path(pyspark.__file__ or "").parent / "bin"


def submit(folder: Path, master: str, python: object, *words: object, arguments: tuple[str, str]) -> None:
    """Let spark-submit run the first steps; ``words`` deliver librmq."""
    script = folder / "job.py"
    script.write_text(STEPS + SUBMITTED)
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"JAVA_HOME": str(java_home()), "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
    settings = {
        "spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    }  # fmt: skip
    options = (word for setting, value in settings.items() for word in ("--conf", f"{setting}={value}"))
    command = [BIN / "spark-submit", "--master", master, *options, *words, script, folder, *arguments]
    done = subprocess.run([*map(str, command)], env=variables, cwd=folder, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-4000:]


def copy_of_librmq(archive: zipfile.ZipFile | Path) -> None:
    """Write the modules of librmq into an archive or a folder."""
    for package in (librmq, pyspark_librmq):
        folder = Path(package.__file__ or "").parent
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                if isinstance(archive, zipfile.ZipFile):
                    archive.write(path, path.relative_to(folder.parent))
                else:
                    target = archive / path.relative_to(folder.parent)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)


@pytest.mark.parametrize(("master", "ship"), [("local[2]", "ship"), ("standalone", "")])
def test_spark_submit_with_the_wheel(tmp_path: Path, request: pytest.FixtureRequest, master: str, ship: str) -> None:
    """Batches and streams have librmq only as --py-files gives it, here and on a cluster of two workers."""
    wheel = tmp_path / "librmq.zip"
    with zipfile.ZipFile(wheel, "w") as archive:
        copy_of_librmq(archive)
    url = request.getfixturevalue("standalone") if master == "standalone" else master
    submit(tmp_path, url, lacking_python(tmp_path), "--py-files", wheel, arguments=(ship, ".zip"))


def test_spark_submit_with_an_environment(tmp_path: Path, standalone: str) -> None:
    """Workers have librmq only in the environment of --archives, which is unpacked in the driver's folder too."""
    lacking_python(tmp_path / "env")
    copy_of_librmq(tmp_path / "env" / "lib")
    archive = shutil.make_archive(str(tmp_path / "packed"), "gztar", tmp_path / "env")
    words = ("--archives", f"{archive}#env")
    submit(tmp_path, standalone, "./env/bin/python", *words, arguments=("", "/env/lib/"))
