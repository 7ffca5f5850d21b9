"""A cluster of Spark that tests share."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import free_port


@pytest.fixture(scope="session")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a standalone cluster of two workers, and yield its URL.

    They are on hosts of their own, because Spark runs a speculative task on another host than the first.
    """
    pyspark = pytest.importorskip("pyspark")
    from librmq.spark.sessions import java_home

    spark, folder = Path(pyspark.__file__).parent / "bin", tmp_path_factory.mktemp("standalone")
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"JAVA_HOME": str(java_home()), "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1"}
    master = ["master.Master", "--host", "127.0.0.1", "--port", str(port)]
    worker = ["worker.Worker", "--cores", "1", "--memory", "768m"]
    hosts = "127.0.0.1", "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
    folders = [str(folder / name) for name in ("a", "b")]
    workers = [[*worker, "--host", host, "--work-dir", work, url] for host, work in zip(hosts, folders, strict=True)]
    with contextlib.ExitStack() as running:
        for kind, *words in (master, *workers):
            command = [str(spark / "spark-class"), f"org.apache.spark.deploy.{kind}", *words, "--webui-port", "0"]
            with (folder / "cluster.log").open("ab") as log:
                process = running.enter_context(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
            running.callback(process.kill)
        yield url
