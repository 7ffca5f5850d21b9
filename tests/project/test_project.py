"""The checkout itself: its commands, its part of the reference data, and the code that tests share."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import librmq
from tests.data.cut import cut
from tests.programs import POSIX
from tests.reference import CHECKOUT, COMPACT, unpack_compact


def run_pytest(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder in a separate process, without the pytest variables of this run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, "."],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
    )


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


@pytest.mark.spark
def test_java_knows_the_options_of_a_short_session() -> None:
    """And prints no warning, which each program on Spark would show."""
    pytest.importorskip("pyspark")
    from librmq.spark.session import java_home

    java = [str(java_home() / "bin" / "java"), *os.environ["SPARK_SUBMIT_OPTS"].split(), "-version"]
    done = subprocess.run(java, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


@pytest.mark.slow
def test_in_ci_a_skip_is_a_failure_unless_marked(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(CHECKOUT)!r})\n"
        "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('all of it', allow_module_level=True)\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_skips(): pytest.skip('no reason at all')\n"
        "@pytest.mark.platform\n"
        "def test_may_skip(): pytest.skip('another system')\n"
        "@pytest.mark.xfail\n"
        "def test_may_fail(): assert False\n"
        "def test_passes(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    platform\n")
    tallies = []
    for ci in ("true", ""):
        child = run_pytest(tmp_path, "--continue-on-collection-errors", CI=ci)
        tallies.append(child.stdout.splitlines()[-1].strip("= ").rpartition(" in ")[0])
    assert tallies == ["1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error", "1 passed, 3 skipped, 1 xfailed"]


@pytest.mark.slow
def test_cutting_the_compact_data_again_changes_nothing(tmp_path: Path) -> None:
    again = tmp_path / "again"
    unpack_compact(COMPACT, tmp_path / "compact")
    cut(tmp_path / "compact", again)
    for path in again.rglob("*"):
        if path.is_file() and path.suffix != ".xz":  # the compressed size depends on the version of xz
            assert path.read_bytes() == (COMPACT / path.relative_to(again)).read_bytes(), path.name
    with (
        tarfile.open(again / "store-basic.tar.xz") as new,
        tarfile.open(COMPACT / "store-basic.tar.xz") as old,
    ):
        assert new.getnames() == old.getnames()
        for name in old.getnames():
            contents = [archive.extractfile(name) for archive in (new, old)]
            assert len({content.read() for content in contents if content}) == 1, name
