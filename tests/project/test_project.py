"""The checkout itself: its commands, its licence, the version of its files, and the options of Java."""

from __future__ import annotations

import importlib
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

import librmq
from tests.programs import POSIX
from tests.reference import CHECKOUT


@POSIX
@pytest.mark.platform
def test_commands_can_be_started() -> None:
    for name in ("demo", "check", "tools/python", ".ci/run"):
        if (CHECKOUT / name).exists():  # a source distribution lacks some of them
            assert os.access(CHECKOUT / name, os.X_OK), name


def test_the_core_has_the_licence_of_librmq() -> None:
    assert (CHECKOUT / "core" / "LICENSE").read_bytes() == (CHECKOUT / "LICENSE").read_bytes()
    assert "](.." not in (CHECKOUT / "core" / "README.md").read_text("utf-8")  # the package index shows it alone


def test_a_tag_names_the_version_of_every_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    release = importlib.import_module("release")
    release.check_tag(f"v{librmq.__version__}")
    with pytest.raises(release.ReleaseError, match=rf"tag is v9.9.9, .*__init__.py has {librmq.__version__}: let"):
        release.check_tag("v9.9.9")
    all_places = release.PLACES
    for place, (path, pattern) in enumerate(all_places):
        other = tmp_path / path.name
        other.write_text(path.read_text("utf-8").replace(librmq.__version__, "9.9.9"))
        places = [*all_places[:place], (other, pattern), *all_places[place + 1 :]]
        monkeypatch.setattr(release, "CHECKOUT", Path(path.anchor))
        monkeypatch.setattr(release, "PLACES", places)
        with pytest.raises(release.ReleaseError, match=rf"{path.name} has 9.9.9"):
            release.check_tag(f"v{librmq.__version__}")


def test_a_release_tries_every_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for_users = extras.keys() - {"all", "bench", "dev", "docs", "test", "test-spark"}
    assert importlib.import_module("release").USES.keys() - {""} == for_users


@pytest.mark.spark
def test_java_knows_the_options_of_a_short_session() -> None:
    """And prints no warning, which each program on Spark would show."""
    pytest.importorskip("pyspark")
    from librmq.spark.session import java_home

    java = [str(java_home() / "bin" / "java"), *os.environ["SPARK_SUBMIT_OPTS"].split(), "-version"]
    done = subprocess.run(java, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
