"""The checkout itself: its commands, its licence, the version of its files, and the options of Java."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import librmq
from tests.programs import POSIX
from tests.reference import CHECKOUT


@POSIX
@pytest.mark.platform
def test_commands_can_be_started() -> None:
    for name in ("demo", "check", "tools/python", ".ci/run"):
        if (CHECKOUT / name).exists():  # a source distribution lacks some of them
            assert os.access(CHECKOUT / name, os.X_OK), name


def test_a_tag_names_the_version_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    release = importlib.import_module("release")
    release.check_tag(f"v{librmq.__version__}")
    with pytest.raises(release.ReleaseError, match=rf"tag is v9.9.9, .*__init__.py has {librmq.__version__}: let"):
        release.check_tag("v9.9.9")


@pytest.mark.parametrize(
    ("name", "module", "fault"),
    [
        ("librmq-1.0-cp311-cp311-linux_x86_64.whl", None, "lacks the compiled core, which its name promises"),
        ("librmq-1.0-py3-none-any.whl", "librmq/runtime/_core.abi3.so", "has the compiled core, which its name denies"),
        ("librmq-1.0-py3-none-any.whl", None, None),
        ("librmq-1.0-cp311-cp311-linux_x86_64.whl", "librmq/runtime/_core.cpython-311-x86_64-linux-gnu.so", None),
    ],
)
def test_a_wheel_has_the_core_that_its_name_promises(
    name: str, module: str | None, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    release = importlib.import_module("release")
    faults = release.core_faults(name, ["librmq/__init__.py", *([module] if module else [])])
    assert [sentence.removeprefix(f"{name} ") for sentence in faults] == ([fault] if fault else [])


def extras() -> dict[str, list[str]]:
    """Return what each extra for users requires; "" is the library alone."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    not_for_users = {"all", "bench", "dev", "docs", "test", "test-spark"}
    return {"": project["dependencies"]} | {name: optional[name] for name in optional if name not in not_for_users}


def installed_with(requirements: list[str]) -> set[str]:
    """Return the distributions that an installation of these brings, as far as this environment has them.

    Raises:
        PackageNotFoundError: One of ``requirements`` is not installed.
    """
    found: set[str] = set()
    waiting = [Requirement(one) for one in requirements]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in found or not (one.marker is None or one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        for below in map(Requirement, metadata.distribution(name).requires or ()):
            if any(below.marker is None or below.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
                with suppress(metadata.PackageNotFoundError):
                    metadata.distribution(below.name)
                    waiting.append(Requirement(f"{below.name}[{','.join(below.extras)}]"))
    return found


WITHOUT_OTHERS = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {missing} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def test_a_release_tries_every_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    assert importlib.import_module("release").USES.keys() == extras().keys()


@pytest.mark.slow
@pytest.mark.platform
@pytest.mark.parametrize("extra", extras())
def test_an_extra_needs_no_other(extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    release = importlib.import_module("release")
    try:
        present = installed_with(extras()[""] + extras()[extra])
    except metadata.PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    missing = {
        module
        for module, of in metadata.packages_distributions().items()
        if not present & set(map(canonicalize_name, of)) and not module.startswith(("librmq", "_", "pyspark_librmq"))
    }
    program = WITHOUT_OTHERS.format(missing=missing) + release.USES[extra]
    release.run(sys.executable, "-P", "-c", program, folder=tmp_path)


@pytest.mark.spark
def test_java_knows_the_options_of_a_short_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """And prints no warning, which each program on Spark would show."""
    pytest.importorskip("pyspark")
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    from librmq.spark.sessions import java_home

    options = importlib.import_module("project").variables()["SPARK_SUBMIT_OPTS"]
    java = [str(java_home() / "bin" / "java"), *options.split(), "-version"]
    done = subprocess.run(java, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
